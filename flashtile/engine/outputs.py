"""The results of a request, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """The log-probability of a token.

    Attributes:
        logprob: in nats.
        rank: 1 for the likeliest token.
        decoded_token: the text that the token stands for; None without a tokenizer. A token that is only part
            of a character is spelt by its bytes, ``bytes:\\xe2\\x98``.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities by token: the chosen token, and as many of the likeliest as were requested."""


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        index: number of the answer, below ``n``.
        text, token_ids: the answer so far, or its new part, depending on ``output_kind``.
        cumulative_logprob: log-probability of the answer so far, if ``logprobs`` were requested.
        logprobs: one entry for each of ``token_ids``, if they were requested.
        finish_reason: "stop" (an end token or a stop text), "length", "abort" or "error"; None while the
            answer is unfinished.
        stop_reason: the stop text or the token of ``stop_token_ids`` that ended the answer; None for the
            model's own end token. After an error it is the error's message.
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
    """Times and memory of a request.

    Attributes:
        arrival_time, first_scheduled_time, first_token_time, finished_time: seconds by ``time.monotonic``;
            None before the event.
        preemptions: how often an answer lost its memory and was recomputed or swapped.
        blocks: number of blocks that the answers used, summed over the steps.
        unshared_blocks: the same sum if the answers shared no blocks.
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
        """Share of the KV cache's memory saved by sharing blocks between the answers, from 0 to 1."""
        return 1 - self.blocks / self.unshared_blocks if self.unshared_blocks else 0.0


@dataclass
class RequestOutput:
    """A request's answers at some moment.

    Attributes:
        request_id, prompt, prompt_token_ids: the request. ``prompt`` is None if it came as tokens.
        prompt_logprobs: one entry for each token of the prompt, None for the first, if they were requested.
        outputs: the answers in the order of their indices; for a beam search, the best first.
        finished: no more outputs follow.
        metrics: times and memory.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
