"""Random programs of a PagedKVCache beside a model that knows only each sequence's tokens.

A token's keys and values are random numbers that its prefix decides, as in a real model. Blocks hold NaN
before they are written, and after each step the attention over the paged cache must be the reference's over
contiguous keys and values, whatever was forked, truncated, found by its prefix, copied or swapped before.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from snapshots import COPIES, snapshot
from torch import Tensor

from flashtile.kv_cache import OutOfBlocksError, OutOfSequencesError, PagedKVCache
from flashtile.reference import attention as reference

pytestmark = pytest.mark.numerical

LAYERS, HEADS_Q, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 2, 4, 2, 8, 5
MAX_SEQLEN = 40


@cache
def content_of_last(tokens: tuple[int, ...]) -> Tensor:
    """(layers, kv_heads, head_dim + head_dim_v): keys beside values of the last token."""
    generator = torch.Generator().manual_seed(hash(tokens) % 2**63)
    return torch.randn(LAYERS, HEADS_KV, HEAD_DIM + HEAD_DIM_V, generator=generator)


def contents(tokens: list[int]) -> Tensor:
    """(len(tokens), layers, kv_heads, head_dim + head_dim_v)."""
    empty = torch.zeros(0, LAYERS, HEADS_KV, HEAD_DIM + HEAD_DIM_V)
    each = [content_of_last(tuple(tokens[: end + 1])) for end in range(len(tokens))]
    return torch.stack(each) if each else empty


class PagedPrograms(RuleBasedStateMachine):
    device = "cpu"

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from([1, 3, 4, 16]),
        num_host_blocks=st.integers(0, 20),
        window_left=st.sampled_from([-1, -1, 0, 3, 5]),
    )
    def start(self, num_blocks, block_size, num_host_blocks, window_left):
        self.cache = PagedKVCache(
            LAYERS,
            num_blocks,
            block_size,
            HEADS_KV,
            HEAD_DIM,
            head_dim_v=HEAD_DIM_V,
            max_sequences=5,
            max_seqlen=MAX_SEQLEN,
            num_host_blocks=num_host_blocks,
            window_left=window_left,
            dtype=torch.float32,
            device=self.device,
        )
        unwritten = slice(self.cache.pool.null_blocks, None)  # the null block is for reading
        self.cache.k[:, unwritten] = torch.nan
        self.cache.v[:, unwritten] = torch.nan
        self.originals = []
        self.model: dict[int, list[int]] = {}

    def resident(self):
        return [sequence for sequence in self.model if not self.cache.is_swapped_out(sequence)]

    def draw_some(self, data, sequences):
        return data.draw(st.permutations(sequences))[: data.draw(st.integers(1, 5))]

    @rule(tokens=st.lists(st.integers(0, 1), max_size=20))
    def create(self, tokens):
        try:
            sequence = self.cache.create(tokens)
        except OutOfSequencesError:
            return
        self.model[sequence] = tokens[: self.cache.length(sequence)]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def step(self, data):
        sequences = self.draw_some(data, self.resident())
        most = min(6, *(MAX_SEQLEN - len(self.model[sequence]) for sequence in sequences))
        new = [data.draw(st.lists(st.integers(0, 1), max_size=most)) for _ in sequences]
        if data.draw(st.booleans()):
            new = [new[0]] * len(sequences)
        counts = [len(tokens) for tokens in new]
        number = counts[0] if len(set(counts)) == 1 else counts
        try:
            step = self.cache.reserve_step(self.cache.batch(sequences), number)
        except OutOfBlocksError:
            return
        for sequence, tokens in zip(sequences, new, strict=True):
            self.model[sequence] = self.model[sequence] + tokens
        written = [
            contents(self.model[sequence])[-count:]
            for sequence, count in zip(sequences, counts, strict=True)
            if count
        ]
        both = torch.cat([contents([]), *written])
        ends = [len(self.model[sequence]) for sequence in sequences]
        spans = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        assert step.positions.tolist() == [position for span in spans for position in span]
        assert step.seqused_k.tolist() == ends
        twice = data.draw(st.booleans())
        for layer in range(LAYERS):
            q = torch.randn(sum(counts), HEADS_Q, HEAD_DIM, device=self.device)
            k, v = both[:, layer].to(self.device).split([HEAD_DIM, HEAD_DIM_V], -1)
            if twice:  # by slots, and then once more by attend: the same numbers to the same places
                self.cache.write(layer, k, v, step)
            out = self.cache.attend(layer, q, k, v, step)
            assert out.shape == (sum(counts), HEADS_Q, HEAD_DIM_V)
            for sequence, part, queries in zip(sequences, out.split(counts), q.split(counts), strict=True):
                exact = self.attention(queries.cpu(), contents(self.model[sequence])[:, layer])
                torch.testing.assert_close(part.cpu(), exact, rtol=1e-4, atol=1e-5)

    def attention(self, q, both):
        k, v = both[None].split([HEAD_DIM, HEAD_DIM_V], -1)
        window = (self.cache.window_left, -1)
        return reference.attention(q[None], k, v, causal=True, window_size=window)[0][0]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def fork(self, data):
        sequence = data.draw(st.sampled_from(self.resident()))
        try:
            twin = self.cache.fork(sequence)
        except OutOfSequencesError:
            return
        self.model[twin] = self.model[sequence]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        sequence = data.draw(st.sampled_from(list(self.model)))
        self.cache.free(sequence)
        del self.model[sequence]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def truncate(self, data):
        sequence = data.draw(st.sampled_from(self.resident()))
        length = data.draw(st.integers(0, len(self.model[sequence])))
        try:
            self.cache.truncate(sequence, length)
        except ValueError:
            assert self.cache.window_left >= 0
            return
        self.model[sequence] = self.model[sequence][:length]

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def cache_blocks(self, data):
        sequence = data.draw(st.sampled_from(self.resident()))
        self.cache.cache_blocks(sequence, self.model[sequence])

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def swap_out(self, data):
        chosen = self.draw_some(data, self.resident())
        try:
            self.cache.swap_out(chosen)
        except OutOfBlocksError:
            assert not any(self.cache.is_swapped_out(sequence) for sequence in chosen)

    @precondition(lambda self: len(self.resident()) < len(self.model))
    @rule(data=st.data())
    def swap_in(self, data):
        chosen = self.draw_some(data, [s for s in self.model if self.cache.is_swapped_out(s)])
        try:
            self.cache.swap_in(chosen)
        except OutOfBlocksError:
            assert all(self.cache.is_swapped_out(sequence) for sequence in chosen)

    @rule(copied=st.sampled_from(COPIES))
    def go_on_with_a_copy(self, copied):
        self.originals.append((self.cache, snapshot(self.cache)))
        self.cache = copied(self.cache)

    def teardown(self):
        assert all(snapshot(original) == before for original, before in getattr(self, "originals", []))

    @invariant()
    def memory_holds_the_model(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        window = self.cache.window_left
        for sequence in self.resident():
            exact = contents(self.model[sequence])
            blocks = torch.tensor(self.cache.blocks(sequence), dtype=torch.int64)
            both = torch.cat([self.cache.k[:, blocks], self.cache.v[:, blocks]], -1).flatten(1, 2).cpu()
            seen = 0 if window < 0 else max(0, len(exact) - window)
            assert torch.equal(both.transpose(0, 1)[seen : len(exact)], exact[seen:])


class PagedProgramsOnGPU(PagedPrograms):
    device = "cuda"


PagedPrograms.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
PagedProgramsOnGPU.TestCase.settings = settings(max_examples=30, stateful_step_count=30)
TestPagedPrograms = PagedPrograms.TestCase
TestPagedProgramsOnGPU = pytest.mark.gpu(PagedProgramsOnGPU.TestCase)
