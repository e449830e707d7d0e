"""Requests and the state of their answers while they are computed."""

from __future__ import annotations

import asyncio
import time
from enum import Enum
from typing import Any

from flashtile.engine.detokenizer import Detokenizer
from flashtile.engine.outputs import FlatLogprobs, RequestMetrics
from flashtile.engine.sampling_params import BeamSearchParams, SamplingParams

NOT_ERRORS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task on purpose. Every other BaseException is an error, for example a panic of Rust
code in a tokenizer."""


class State(Enum):
    """State of a sequence.

    WAITING sequences have no keys and values. SWAPPED sequences also wait, but their keys and values are in
    host memory.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """A prompt and one answer to it.

    Attributes:
        request, index: the request, and the number of this answer in it.
        tokens: tokens of the prompt and of the answer that the host knows.
        shares_tokens: whether ``tokens`` is also the list of other answers, until :meth:`append` copies it.
        pending: number of further tokens that launched steps choose, which the host has not read yet.
        num_computed: number of tokens whose keys and values are written by the steps launched so far.
        block_sequence: the block manager's number of the sequence; None while it has no memory.
        num_cached: number of tokens whose blocks were added to the prefix cache.
        state, finish_reason, stop_reason: the state; why the answer ended, as in ``CompletionOutput``.
        forked: whether the request's other answers were forked from this sequence, or it is such a fork.
        guesses: speculated tokens that the next step verifies.
        parents: the parent of each guess (:class:`flashtile.engine.speculation.Guesses`).
        ngrams, num_indexed: the index of prompt lookup, and the number of tokens that it covers.
        max_tokens: maximum number of tokens of the prompt and the answer.
        held: excluded from steps, because it is a beam and the tokens of the other beams are not known yet.
        logprobs, cumulative_logprob: log-probabilities of the answer's tokens, if they were requested.
        entries: the tokens whose logits are changed (:mod:`flashtile.engine.adjust`), from the first need on.
        matcher: knows the tokens that may follow ``tokens`` (:mod:`flashtile.engine.structured`). None: all.
        detokenizer: writes the answer's text, from the first need for it until the request ends.
        num_sent: number of the answer's tokens in earlier outputs, if outputs have only the new part.
    """

    def __init__(self, request: Request, index: int, tokens: list[int]):
        self.request, self.index, self.tokens = request, index, tokens
        self.order = (request.priority, request.number, index)
        self.max_tokens = request.num_prompt + request.max_outputs
        self.pending = self.num_computed = self.num_cached = 0
        self.block_sequence: int | None = None
        self.state, self.forked, self.held = State.WAITING, False, False
        self.shares_tokens = False
        self.guesses: list[int] = []
        self.parents: tuple[int, ...] = ()
        self.ngrams: dict[tuple[int, ...], int] = {}
        self.num_indexed = 1
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.logprobs: FlatLogprobs | None = None
        self.cumulative_logprob = 0.0
        self.entries: Any = None
        self.matcher: Any = None if request.matchers is None else request.matchers[index]
        self.detokenizer: Detokenizer | None = None
        self.num_sent = 0

    def append(self, token: int) -> None:
        """Append a token to the answer."""
        if self.shares_tokens:
            self.tokens, self.shares_tokens = list(self.tokens), False
        self.tokens.append(token)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and the answer, including pending tokens."""
        return len(self.tokens) + self.pending

    @property
    def num_outputs(self) -> int:
        """Number of tokens of the answer, including pending tokens."""
        return self.num_tokens - self.request.num_prompt

    @property
    def wanted(self) -> int:
        """Number of tokens to compute before the next token can be chosen, or 0 if none will be chosen."""
        tokens = self.num_tokens
        if self.held or tokens >= self.max_tokens:
            return 0
        return tokens + len(self.guesses) - self.num_computed

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.request.num_prompt :]


class Request:
    """One call of the engine, with the state of its answers.

    Attributes:
        number: number of the request. Requests of equal priority are scheduled in the order of their numbers.
        params: sampling parameters. A beam search has greedy ones with the log-probabilities that it needs.
        beam: parameters of a beam search, or None.
        max_outputs: maximum number of tokens of an answer.
        ends: tokens that end an answer.
        seed: seed of the draws, which also depend on the answer's index and the position.
        sequences: the answers: one until the prompt is computed, then ``n``, or the beams of a beam search.
        salt: only requests with the same salt share blocks through the prefix cache.
        matchers: matchers of ``structured_outputs``, one for each answer, or None.
        num_blocks: number of blocks that the answers use at present, with and without sharing.
        counted: (the block manager's number, blocks, samples) of each answer when ``num_blocks`` was counted.
        width: largest number of sequences that the request has at the same time.
        reads_tokens: whether the host must know the last token before the next token can be chosen.
        readable: whether the tokenizer could decode the answers so far.
    """

    def __init__(
        self,
        request_id: str,
        number: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        beam: BeamSearchParams | None = None,
        max_outputs: int,
        ends: frozenset[int] = frozenset(),
        seed: int = 0,
        priority: int = 0,
        salt: bytes = b"",
        matchers: list[Any] | None = None,
    ):
        self.request_id, self.number, self.prompt = request_id, number, prompt
        self.prompt_token_ids, self.num_prompt = prompt_token_ids, len(prompt_token_ids)
        self.params, self.beam, self.max_outputs, self.ends = params, beam, max_outputs, ends
        self.seed, self.priority, self.salt = seed, priority, salt
        self.num_cached_tokens, self.readable = 0, True
        self.num_blocks, self.counted = (0, 0), list[Any]()
        self.metrics = RequestMetrics(time.monotonic())
        self.prompt_logprobs: FlatLogprobs | None = None
        self.matchers, self.width, self.reads_tokens = matchers, params.n, params.reads_tokens
        if beam is not None:
            # Beams need ``beam_width`` tokens that continue them, even if all end tokens are likelier.
            self.reads_tokens, params.logprobs = True, (len(ends) + 1) * beam.beam_width
        self.sequences = [Sequence(self, 0, list(prompt_token_ids))]

    @property
    def finished(self) -> bool:
        return all(sequence.state is State.FINISHED for sequence in self.sequences)
