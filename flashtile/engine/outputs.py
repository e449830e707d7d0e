"""The results of a request, under vLLM's names."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload


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
"""Log-probabilities by token: the chosen token first, and as many of the likeliest as were requested."""


class FlatLogprobs(Sequence[TokenLogprobs | None]):
    """Log-probabilities at successive positions, with a dict for each, which is made when it is read.

    A long prompt has millions of log-probabilities. As objects, these would take 25 times the memory, and all
    threads would wait seconds for each garbage collection.

    Args:
        spell: returns the text of a token. None: there is no tokenizer.
        missing: number of first positions that have None.
    """

    def __init__(self, spell: Callable[[int], str] | None, missing: int = 0):
        self._spell, self._missing = spell, missing
        self._tokens, self._logprobs, self._ranks = array("i"), array("f"), array("i")
        self._best_tokens, self._best_logprobs = array("i"), array("f")

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], ranks: Sequence[int],
        best_logprobs: Sequence[float], best_tokens: Sequence[int],
    ) -> None:  # fmt: skip
        """Append positions, each with the chosen token, and with equally many of the likeliest tokens."""
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)
        self._ranks.extend(ranks)
        self._best_tokens.extend(best_tokens)
        self._best_logprobs.extend(best_logprobs)

    def since(self, first: int) -> FlatLogprobs:
        """Return a copy of the positions from ``first`` on, for a sequence without missing positions."""
        found, best = FlatLogprobs(self._spell), first * self._count
        found.add(
            self._tokens[first:], self._logprobs[first:], self._ranks[first:], self._best_logprobs[best:],
            self._best_tokens[best:],
        )  # fmt: skip
        return found

    @property
    def _count(self) -> int:
        return len(self._best_tokens) // max(1, len(self._tokens))

    def __len__(self) -> int:
        return self._missing + len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprobs | None]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index] - self._missing
        if i < 0:
            return None
        spell: Callable[[int], str | None] = self._spell or (lambda token: None)
        token, count = self._tokens[i], self._count
        found = {token: Logprob(self._logprobs[i], self._ranks[i], spell(token))}
        for rank, at in enumerate(range(i * count, (i + 1) * count), 1):
            other = self._best_tokens[at]
            if other not in found:
                found[other] = Logprob(self._best_logprobs[at], rank, spell(other))
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> Any:
        return list, (list(self),)  # without the tokenizer


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
    logprobs: Sequence[TokenLogprobs] | None = None
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
    prompt_logprobs: Sequence[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
