"""Random programs of the manager beside a model that has no blocks: a dictionary of token lists.

Contents are real. A memory of token numbers stands for the keys and values; every write and copy that the
manager asks for is carried out in it, and nothing else. After every operation each sequence must read,
through its block table, exactly what the model says, and the manager's books must agree.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from snapshots import COPIES, snapshot

from flashtile.kv_cache import BlockManager, OutOfBlocksError, OutOfSequencesError

UNWRITTEN = -1
NULL_BLOCK = 0
VOCABULARY = 2
"""Few tokens: prompts share prefixes often."""


class Programs(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 14),
        max_sequences=st.integers(1, 6),
        max_seqlen=st.integers(1, 24),
        num_host_blocks=st.integers(0, 20),
        window_left=st.sampled_from([-1, -1, 0, 1, 3, 7]),
    )
    def start(self, **sizes):
        num_blocks, block_size = sizes.pop("num_blocks"), sizes.pop("block_size")
        self.manager = BlockManager(num_blocks, block_size, **sizes)
        self.memory = [[UNWRITTEN] * block_size for _ in range(num_blocks)]
        self.host = [[UNWRITTEN] * block_size for _ in range(sizes["num_host_blocks"])]
        self.model: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}
        self.known: set[tuple[bytes, tuple[int, ...]]] = set()
        self.written = 0
        self.originals = []

    def attempt(self, operation, *arguments):
        """The operation's result, or None if there was no room; then nothing may have changed."""
        before = snapshot(self.manager)
        try:
            return operation(*arguments)
        except (OutOfBlocksError, OutOfSequencesError):
            assert snapshot(self.manager) == before
            return None

    def carry_out(self, copies, source, destination):
        destinations = [target for _, target in copies]
        assert len(set(destinations)) == len(destinations)
        if source is destination:
            assert not set(destinations) & {origin for origin, _ in copies}
        for origin, target in copies:
            destination[target] = list(source[origin])

    def write(self, sequence, tokens):
        """What a kernel does after an append: the last tokens, to blocks that nobody else holds."""
        size, blocks = self.manager.block_size, self.manager.blocks(sequence)
        first = self.manager.length(sequence) - len(tokens)
        assert self.read(sequence, first) == self.model[sequence][self.first_seen(first) :]
        for position, token in enumerate(tokens, first):
            block = blocks[position // size]
            assert self.manager.pool.refs[block] == 1, "a write to a shared block"
            self.memory[block][position % size] = token
        self.model[sequence] += tokens

    @rule(
        target=sequences,
        tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=12),
        salt=st.sampled_from([b"", b"adapter"]),
    )
    def create(self, tokens, salt):
        tokens = tokens[: self.manager.max_seqlen]
        sequence = self.attempt(self.manager.create, tokens, salt)
        if sequence is None:
            return multiple()
        found = self.manager.length(sequence)
        assert found % self.manager.block_size == 0
        assert found == 0 or found < len(tokens)
        assert found == 0 or (salt, tuple(tokens[:found])) in self.known
        self.model[sequence], self.salts[sequence] = tokens[:found], salt
        copies = self.attempt(self.manager.reserve, sequence, len(tokens) - found)
        if copies is not None:
            assert copies == []  # what was found is whole blocks
            self.write(sequence, tokens[found:])
        return sequence

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence):
        if self.refused(sequence, self.manager.fork):
            return multiple()
        twin = self.attempt(self.manager.fork, sequence)
        if twin is None:
            return multiple()
        self.model[twin], self.salts[twin] = list(self.model[sequence]), self.salts[sequence]
        return twin

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        if sequence in self.model:
            self.manager.free(sequence)
            del self.model[sequence]
        with pytest.raises(ValueError, match=f"got {sequence}: it was freed"):
            self.manager.free(sequence)

    @rule(sequence=sequences, tokens=st.lists(st.integers(0, VOCABULARY - 1), max_size=9))
    def append(self, sequence, tokens):
        if self.refused(sequence, self.manager.reserve):
            return
        if len(self.model[sequence]) + len(tokens) > self.manager.max_seqlen:
            before = snapshot(self.manager)
            with pytest.raises(ValueError, match="num_tokens must be from 0 to"):
                self.manager.reserve(sequence, len(tokens))
            assert snapshot(self.manager) == before
            return
        copies = self.attempt(self.manager.reserve, sequence, len(tokens))
        if copies is not None:
            self.carry_out(copies, self.memory, self.memory)
            self.write(sequence, tokens)

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def step(self, data):
        """A whole batch at once."""
        chosen = data.draw(st.permutations(self.resident()))[: data.draw(st.integers(0, 6))]
        chosen = [s for s in chosen if len(self.model[s]) < self.manager.max_seqlen]
        room = min((self.manager.max_seqlen - len(self.model[s]) for s in chosen), default=0)
        if data.draw(st.booleans()):
            counts = [1] * len(chosen)
            copies = self.attempt(self.manager.reserve_batch, self.manager.batch(chosen))
        else:
            counts = [data.draw(st.integers(0, min(room, 5))) for _ in chosen]
            copies = self.attempt(self.manager.reserve_batch, self.manager.batch(chosen), counts)
        if copies is not None:
            self.carry_out(copies, self.memory, self.memory)
            for sequence, count in zip(chosen, counts, strict=True):
                self.written += 1
                self.write(sequence, [(self.written + i) % VOCABULARY for i in range(count)])

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence, share):
        if self.refused(sequence, lambda s: self.manager.truncate(s, 0)):
            return
        length = round(share * len(self.model[sequence]))
        skipped, window = self.skipped(sequence), self.manager.window_left
        if skipped and length - window < skipped * self.manager.block_size:
            before = snapshot(self.manager)
            with pytest.raises(ValueError, match=f"whose first {skipped} blocks the window has passed"):
                self.manager.truncate(sequence, length)
            assert snapshot(self.manager) == before
            return
        self.manager.truncate(sequence, length)
        del self.model[sequence][length:]

    @rule(sequence=sequences)
    def cache_blocks(self, sequence):
        if self.refused(sequence, lambda s: self.manager.cache_blocks(s, [])):
            return
        tokens, salt = self.model[sequence], self.salts[sequence]
        self.manager.cache_blocks(sequence, tokens, salt)
        for end in range(len(tokens) + 1):
            self.known.add((salt, tuple(tokens[:end])))

    @rule()
    def reset_prefix_cache(self):
        self.manager.reset_prefix_cache()
        self.known.clear()

    @precondition(lambda self: self.resident())
    @rule(target=sequences, data=st.data())
    def select(self, data):
        """Beam search: some sequences without a child, some with several."""
        beams = data.draw(st.permutations(self.resident()))[: data.draw(st.integers(1, 4))]
        parents = data.draw(st.lists(st.integers(0, len(beams) - 1), max_size=5))
        chosen = self.attempt(self.manager.select, beams, parents)
        if chosen is None:
            return multiple()
        contents = [list(self.model[beams[parent]]) for parent in parents]
        salts = [self.salts[beams[parent]] for parent in parents]
        for sequence in set(beams) - set(chosen):
            del self.model[sequence]
        new = [sequence for sequence in chosen if sequence not in self.model]
        self.model.update(zip(chosen, contents, strict=True))
        self.salts.update(zip(chosen, salts, strict=True))
        return multiple(*new)

    @precondition(lambda self: self.resident())
    @rule(data=st.data())
    def swap_out(self, data):
        chosen = data.draw(st.permutations(self.resident()))[: data.draw(st.integers(1, 4))]
        copies = self.attempt(self.manager.swap_out, chosen)
        if copies is not None:
            self.carry_out(copies, self.memory, self.host)
            assert all(self.manager.is_swapped_out(sequence) for sequence in chosen)

    @precondition(lambda self: len(self.resident()) < len(self.model))
    @rule(data=st.data())
    def swap_in(self, data):
        absent = [sequence for sequence in self.model if self.manager.is_swapped_out(sequence)]
        chosen = data.draw(st.permutations(absent))[: data.draw(st.integers(1, 4))]
        copies = self.attempt(self.manager.swap_in, chosen)
        if copies is not None:
            self.carry_out(copies, self.host, self.memory)

    @rule(copied=st.sampled_from(COPIES))
    def go_on_with_a_copy(self, copied):
        """The rest of the program runs on the copy, and must not reach the original."""
        self.originals.append((self.manager, snapshot(self.manager)))
        self.manager = copied(self.manager)
        assert snapshot(self.manager) == self.originals[-1][1]

    def skipped(self, sequence):
        """Leading blocks that the window has passed: they point to the null block, no other entry does."""
        blocks = self.manager.blocks(sequence)
        return blocks.count(NULL_BLOCK) if self.manager.window_left >= 0 else 0

    def first_seen(self, position):
        """The first key that a query at the position sees."""
        return 0 if self.manager.window_left < 0 else max(0, position - self.manager.window_left)

    def read(self, sequence, length):
        """What a query at position ``length`` sees of the tokens before it, through the block table."""
        tokens = [token for block in self.manager.blocks(sequence) for token in self.memory[block]]
        return tokens[self.first_seen(length) : length]

    def resident(self):
        return [sequence for sequence in self.model if not self.manager.is_swapped_out(sequence)]

    def refused(self, sequence, operation):
        """Whether the sequence cannot take part because it is freed or swapped out; that must be said."""
        if sequence not in self.model:
            with pytest.raises(ValueError, match="it was freed or never created"):
                operation(sequence)
            return True
        if self.manager.is_swapped_out(sequence):
            with pytest.raises(ValueError, match="is swapped out: swap it in first"):
                operation(sequence)
            return True
        return False

    @invariant()
    def contents_are_equal(self):
        if not hasattr(self, "manager"):
            return
        assert set(self.manager.sequences) == set(self.model)
        for sequence, tokens in self.model.items():
            assert self.manager.length(sequence) == len(tokens)
            if not self.manager.is_swapped_out(sequence):
                assert self.read(sequence, len(tokens)) == tokens[self.first_seen(len(tokens)) :]
                assert len(self.manager.blocks(sequence)) == -(-len(tokens) // self.manager.block_size)

    @invariant()
    def books_agree(self):
        if hasattr(self, "manager"):
            assert all(left == right for _, left, right in self.manager.check_integrity())

    def teardown(self):
        """Nothing leaks: when every sequence is freed and the prefix cache emptied, all blocks are free."""
        if not hasattr(self, "manager"):
            return
        for sequence in list(self.model):
            self.manager.free(sequence)
        pool = self.manager.pool
        self.manager.reset_prefix_cache()
        assert len(pool.free) == pool.num_blocks - self.manager.pool.null_blocks
        assert len(self.manager.host_pool.free) == self.manager.host_pool.num_blocks
        self.manager.check_integrity()
        assert all(snapshot(original) == before for original, before in self.originals)


Programs.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPrograms = Programs.TestCase
