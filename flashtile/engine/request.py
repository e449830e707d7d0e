"""A request and its answers in the making."""

from __future__ import annotations

import time
from enum import Enum

from flashtile.engine.outputs import RequestMetrics, TokenLogprobs
from flashtile.engine.sampling_params import BeamSearchParams, SamplingParams


class State(Enum):
    """Of a sequence. SWAPPED waits, its keys and values in host memory; WAITING has none anywhere."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """A prompt and one answer to it.

    Attributes:
        request, index: whose it is, and which of the answers.
        tokens: the prompt's and the answer's, as far as the host knows them.
        pending: tokens beyond them that the device has chosen, or is about to: their number is known before
            they are.
        num_computed: tokens whose keys and values are written by the steps launched so far.
        block_sequence: the block manager's number of it, None while it has no memory.
        num_cached: tokens whose blocks it has entered into the prefix cache.
        state, finish_reason, stop_reason: where it stands.
        forked: the request's other answers have been made from it, or it is one of them.
        guesses: tokens that the next step computes behind the others, to see whether they are right.
        parents: what each of them stands behind (:class:`flashtile.engine.speculation.Guesses`).
        held: it takes part in no step until the request says so (a beam that waits for the others).
        logprobs, cumulative_logprob: of the answer's tokens, where they were asked for.
    """

    __slots__ = (
        "block_sequence", "cumulative_logprob", "finish_reason", "forked", "guesses", "held", "index",
        "logprobs", "num_cached", "num_computed", "order", "parents", "pending", "request", "state",
        "stop_reason", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, tokens: list[int]):
        self.request, self.index, self.tokens = request, index, tokens
        self.order = (request.priority, request.number, index)
        self.pending = self.num_computed = self.num_cached = 0
        self.block_sequence: int | None = None
        self.state, self.forked, self.held = State.WAITING, False, False
        self.guesses: list[int] = []
        self.parents: tuple[int, ...] = ()
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0

    @property
    def num_tokens(self) -> int:
        """With those that are pending."""
        return len(self.tokens) + self.pending

    @property
    def num_outputs(self) -> int:
        """Tokens of the answer, pending ones included."""
        return len(self.tokens) + self.pending - self.request.num_prompt

    @property
    def wanted(self) -> int:
        """Tokens that the next steps have to compute before another can be chosen."""
        full = self.num_outputs >= self.request.max_outputs
        return 0 if self.held or full else self.num_tokens + len(self.guesses) - self.num_computed

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.request.num_prompt :]


class Request:
    """Everything that belongs to one call.

    Attributes:
        number: counts requests; among equal priorities the lower one goes first.
        max_outputs: tokens that an answer may have.
        ends: tokens that end an answer.
        seed: what its draws depend on, besides the index of the answer and the position.
        sequences: its answers; one until the prompt is computed, then ``n``.
        salt: keeps its blocks apart from other tenants' in the prefix cache.
        aborted: it was called off.
    """

    def __init__(
        self,
        request_id: str,
        number: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        max_outputs: int,
        ends: frozenset[int] = frozenset(),
        seed: int = 0,
        priority: int = 0,
        salt: bytes = b"",
    ):
        self.request_id, self.number, self.prompt = request_id, number, prompt
        self.prompt_token_ids, self.num_prompt = prompt_token_ids, len(prompt_token_ids)
        self.params, self.max_outputs, self.ends = params, max_outputs, ends
        self.seed, self.priority, self.salt = seed, priority, salt
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(time.monotonic())
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.aborted = False
        self.sequences = [Sequence(self, 0, list(prompt_token_ids))]

    @property
    def is_beam_search(self) -> bool:
        return isinstance(self.params, BeamSearchParams)

    @property
    def width(self) -> int:
        """Sequences that it needs at most at a time."""
        params = self.params
        return params.beam_width if isinstance(params, BeamSearchParams) else params.n

    @property
    def reads_prompt_cache(self) -> bool:
        """Not where logits of every token of the prompt are asked for: found blocks would have none."""
        return isinstance(self.params, BeamSearchParams) or self.params.prompt_logprobs is None

    @property
    def reads_tokens(self) -> bool:
        """Whether the host must know the last token before the next can be chosen."""
        return isinstance(self.params, BeamSearchParams) or self.params.reads_tokens

    @property
    def finished(self) -> bool:
        return all(sequence.state is State.FINISHED for sequence in self.sequences)
