"""What a request gives back, by vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """``logprob`` in nats; ``rank`` 1 is the likeliest; ``decoded_token`` as it stands within a text, None
    without a tokenizer. A part of a character is spelt by its bytes: ``bytes:\\xe2\\x98``."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""By token: the chosen one, and as many of the likeliest as were asked for."""


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the ``n``.
        text, token_ids: the answer so far, or what is new in it, as ``output_kind`` says.
        cumulative_logprob: of ``token_ids`` so far, if ``logprobs`` were asked for.
        logprobs: one entry a token, if they were asked for.
        finish_reason: "stop" (an end token or a stop text), "length", "abort" or "error"; None while it runs.
        stop_reason: the stop text or the token of ``stop_token_ids`` that ended it; None for the model's own
            end token. With "error" the message: what failed, or that the logits were NaN or infinite.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times in seconds by ``time.monotonic``, None until then, and what the request cost.

    Attributes:
        arrival_time, first_scheduled_time, first_token_time, finished_time: when.
        preemptions: times that an answer lost its memory and was computed again or swapped.
        blocks, unshared_blocks: sums over its steps of the blocks that its answers used, and of those that
            they would have used without sharing.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0
    blocks: int = 0
    unshared_blocks: int = 0

    @property
    def memory_saved(self) -> float:
        """Share of the memory of keys and values that its answers' sharing saved, from 0 to 1."""
        return 1 - self.blocks / self.unshared_blocks if self.unshared_blocks else 0.0


@dataclass
class RequestOutput:
    """The answers of a request, some time.

    Attributes:
        request_id, prompt, prompt_token_ids: as they came; ``prompt`` is None where tokens came.
        prompt_logprobs: one entry a token of the prompt, None for the first, if they were asked for.
        outputs: by index; of a beam search the best first.
        finished: nothing more comes.
        metrics: times and memory.
        num_cached_tokens: tokens of the prompt that the prefix cache had.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
