"""Single operations of the block manager, and its errors for wrong calls."""

from __future__ import annotations

import pytest
import torch
from snapshots import snapshot

from called import functions_called
from flashtile.kv_cache import (
    BlockManager,
    CacheFullError,
    IntegrityError,
    OutOfBlocksError,
    OutOfSequencesError,
    PagedKVCache,
)
from walk import walk

pytestmark = pytest.mark.quick

TOKENS = list(range(10, 23))
"""3 blocks of 4, and one token."""


def make(num_blocks=16, block_size=4, **sizes) -> BlockManager:
    return BlockManager(num_blocks, block_size, **{"max_sequences": 8, "max_seqlen": 64, **sizes})


def with_tokens(manager: BlockManager, num_tokens: int) -> int:
    sequence = manager.create()
    manager.reserve(sequence, num_tokens)
    return sequence


class TestGrowing:
    def test_blocks_are_taken_when_they_are_needed(self):
        manager = make()
        sequence = manager.create()
        held = []
        for _ in range(9):
            assert manager.reserve(sequence) == []
            held.append(len(manager.blocks(sequence)))
        assert held == [1, 1, 1, 1, 2, 2, 2, 2, 3]
        assert manager.length(sequence) == 9

    def test_out_of_blocks_says_how_many_and_changes_nothing(self):
        manager = make(num_blocks=3)
        sequence = with_tokens(manager, 6)
        before = snapshot(manager)
        with pytest.raises(
            OutOfBlocksError, match="reserving for 1 sequence needs 2 blocks, but 1 of 3 are"
        ) as e:
            manager.reserve(sequence, 7)
        assert (e.value.needed, e.value.available) == (2, 1)
        assert isinstance(e.value, CacheFullError)
        assert snapshot(manager) == before
        manager.reserve(sequence, 6)  # exactly what is left

    @walk("before", range(5))
    @walk("count", range(7))
    def test_a_batch_grows_as_a_sequence_alone(self, before, count):
        alone, together = make(), make()
        for manager in (alone, together):
            with_tokens(manager, before)
        (sequence,) = alone.sequences
        alone.reserve(sequence, count)
        together.reserve_batch(together.batch([sequence]), [count])
        assert snapshot(together) == snapshot(alone)

    def test_the_last_block_is_full_or_partly_empty(self):
        for tokens, waste in ((8, 0), (6, 2 / 8)):
            manager = make()
            with_tokens(manager, tokens)
            assert (manager.usage().tokens, manager.usage().waste) == (tokens, waste)

    def test_a_batch_grows_as_a_whole_or_not_at_all(self):
        manager = make(num_blocks=4)
        sequences = [with_tokens(manager, 4) for _ in range(3)]
        before = snapshot(manager)
        with pytest.raises(OutOfBlocksError, match="3 sequences needs 3 blocks, but 1 of 4"):
            manager.reserve_batch(manager.batch(sequences))
        assert snapshot(manager) == before
        assert manager.reserve_batch(manager.batch(sequences), [1, 0, 0]) == []

    def test_truncated_blocks_come_back(self):
        manager = make()
        sequence = with_tokens(manager, 13)
        manager.truncate(sequence, 5)
        assert (manager.length(sequence), len(manager.blocks(sequence))) == (5, 2)
        assert manager.pool.available == 14


class TestSharing:
    def test_two_samples_of_one_prompt(self):
        """Kwon et al. 2023, figure 8: a prompt of 7 tokens, blocks of 4, two samples."""
        manager = make()
        first = with_tokens(manager, 7)
        second = manager.fork(first)
        full, tail = manager.blocks(first)
        assert manager.blocks(second) == [full, tail]
        ((source, copy),) = manager.reserve(first)  # the first to write copies the block
        assert source == tail
        assert manager.blocks(first) == [full, copy]
        assert manager.reserve(second) == []  # the other now holds it alone
        assert manager.blocks(second) == [full, tail]
        assert manager.usage().blocks == 3
        assert manager.usage().blocks_unshared == 4
        assert manager.usage().saved == pytest.approx(1 / 4)

    def test_many_forks_at_once_are_those_one_by_one(self):
        managers = make(), make()
        for manager in managers:
            with_tokens(manager, 6)
        assert managers[0].fork_many(0, 3) == [managers[1].fork(0) for _ in range(3)]
        assert snapshot(managers[0]) == snapshot(managers[1])
        before = snapshot(managers[0])
        assert managers[0].fork_many(0, 0) == []
        with pytest.raises(OutOfSequencesError):
            managers[0].fork_many(0, 99)
        assert snapshot(managers[0]) == before

    def test_in_a_batch_the_last_holder_writes_in_place(self):
        manager = make()
        sequences = [with_tokens(manager, 6)]
        sequences += [manager.fork(sequences[0]) for _ in range(3)]
        (tail,) = {manager.blocks(sequence)[1] for sequence in sequences}
        copies = manager.reserve_batch(manager.batch(sequences))
        assert [source for source, _ in copies] == [tail] * 3
        assert len({manager.blocks(sequence)[1] for sequence in sequences}) == 4

    def test_a_batch_needs_no_block_for_the_last_holder(self):
        manager = make(num_blocks=5)
        sequences = [with_tokens(manager, 6)]
        sequences += [manager.fork(sequences[0]) for _ in range(3)]
        assert len(manager.reserve_batch(manager.batch(sequences))) == 3
        assert manager.pool.available == 0

    def test_every_holder_but_the_last_needs_a_block(self):
        manager = make(num_blocks=4)
        sequences = [with_tokens(manager, 6)]
        sequences += [manager.fork(sequences[0]) for _ in range(3)]
        blocks = [manager.blocks(sequence) for sequence in sequences]
        with pytest.raises(OutOfBlocksError, match="4 sequences needs 3 blocks, but 2 of 4"):
            manager.reserve_batch(manager.batch(sequences))
        assert [manager.blocks(sequence) for sequence in sequences] == blocks
        assert manager.pool.available == 2

    def test_a_shared_block_that_does_not_grow_needs_no_copy(self):
        manager = make(num_blocks=2)
        sequence = with_tokens(manager, 6)
        manager.fork(sequence)
        assert manager.pool.available == 0
        assert manager.reserve(sequence, 0) == []
        assert manager.reserve_batch(manager.batch([sequence]), 0) == []
        with pytest.raises(OutOfBlocksError, match="1 sequence needs 1 blocks, but 0 of 2"):
            manager.reserve(sequence)

    def test_a_full_block_is_shared_for_good(self):
        manager = make()
        first = with_tokens(manager, 8)
        second = manager.fork(first)
        assert manager.reserve(first) == manager.reserve(second) == []
        assert manager.blocks(first)[:2] == manager.blocks(second)[:2]

    def test_beams(self):
        manager = make()
        beams = [with_tokens(manager, 5) for _ in range(3)]
        chosen = manager.select(beams, [1, 1, 0])
        assert chosen[0] == beams[1]
        assert chosen[2] == beams[0]
        assert set(manager.sequences) == set(chosen)
        assert manager.blocks(chosen[0]) == manager.blocks(chosen[1])

    def test_waste_counts_shared_tokens_once(self):
        manager = make()
        first = with_tokens(manager, 7)
        manager.fork(first)
        usage = manager.usage()
        assert (usage.blocks, usage.tokens) == (2, 7)
        assert usage.waste == pytest.approx(1 / 8)


class TestPrefixCache:
    def test_the_same_prompt_finds_its_blocks(self):
        manager = make()
        first = manager.create(TOKENS)
        assert manager.length(first) == 0
        manager.reserve(first, 13)
        assert manager.cache_blocks(first, TOKENS) == 3
        assert manager.cache_blocks(first, TOKENS) == 0
        second = manager.create(torch.tensor(TOKENS))
        assert manager.length(second) == 12
        assert manager.blocks(second) == manager.blocks(first)[:3]

    @walk(
        ("tokens", "salt", "found"),
        [
            (TOKENS[:12], b"", 8),  # the last token's query is to be computed
            (TOKENS[:11], b"", 8),
            ([*TOKENS[:5], 99, *TOKENS[6:]], b"", 4),
            ([99, *TOKENS[1:]], b"", 0),
            (TOKENS, b"other", 0),
            ([], b"", 0),
        ],
    )
    def test_only_an_equal_prefix_is_found(self, tokens, salt, found):
        manager = make()
        first = with_tokens(manager, 13)
        manager.cache_blocks(first, TOKENS)
        manager.free(first)
        assert manager.length(manager.create(tokens, salt)) == found

    def test_freed_blocks_are_found_until_they_are_needed(self):
        manager = make(num_blocks=4)
        first = with_tokens(manager, 13)
        manager.cache_blocks(first, TOKENS)
        manager.free(first)
        assert manager.usage().cached_blocks == 3
        assert manager.pool.available == 4
        with_tokens(manager, 8)  # the free block, and the end of the prefix
        assert manager.length(manager.create(TOKENS)) == 8

    def test_the_least_recently_used_goes_first(self):
        manager = make(num_blocks=3, block_size=2)
        for token in (1, 2, 3):
            sequence = with_tokens(manager, 2)
            manager.cache_blocks(sequence, [token, token])
            manager.free(sequence)
        manager.free(manager.create([1, 1, 0]))  # used again: 2 is now the oldest
        with_tokens(manager, 1)
        found = []
        for token in (1, 2, 3):
            sequence = manager.create([token, token, 0])
            found.append(manager.length(sequence))
            manager.free(sequence)
        assert found == [2, 0, 2]

    def test_forgetting_keeps_what_is_held(self):
        manager = make()
        first, second = with_tokens(manager, 8), with_tokens(manager, 4)
        manager.cache_blocks(first, range(8))
        manager.cache_blocks(second, [9] * 4)
        manager.free(second)
        assert manager.reset_prefix_cache() == 3
        assert manager.length(manager.create(range(9))) == 0
        assert manager.pool.num_blocks - manager.pool.available == 2
        manager.truncate(first, 6)
        assert manager.reserve(first) == []  # nobody else has it

    def test_a_cached_block_is_copied_before_it_is_written(self):
        manager = make()
        sequence = with_tokens(manager, 8)
        manager.cache_blocks(sequence, list(range(8)))
        cached = manager.blocks(sequence)[1]
        manager.truncate(sequence, 6)
        ((source, _),) = manager.reserve(sequence)
        assert source == cached
        other = manager.create([*range(8), 0])
        assert manager.blocks(other)[1] == cached


class TestWindow:
    def test_a_sequence_holds_no_more_than_its_window(self):
        manager = make(num_blocks=4, window_left=7, max_seqlen=1000)
        sequence = manager.create()
        for _ in range(1000):
            manager.reserve(sequence)
        # 7 earlier keys and the token itself lie in at most 3 blocks; the null block is the fourth
        assert manager.blocks(sequence)[:-3] == [0] * 247
        assert 0 not in manager.blocks(sequence)[-3:]

    def test_a_fork_still_sees_what_the_other_has_passed(self):
        manager = make(window_left=4)
        first = with_tokens(manager, 10)
        second = manager.fork(first)
        manager.reserve(first, 8)
        manager.reserve(first, 3)
        assert manager.blocks(second)[1] not in manager.blocks(first)
        assert manager.blocks(second)[1] != 0

    def test_a_block_that_the_other_passes_in_the_same_step_is_written_in_place(self):
        manager = make(num_blocks=5, window_left=3)  # the block of nothing, and three that are taken
        first = with_tokens(manager, 8)
        second = manager.fork(first)
        manager.truncate(second, 6)
        manager.reserve(first, 4)
        held = manager.blocks(second)
        assert manager.reserve_batch(manager.batch([first, second])) == []  # the fifth is the first one's
        assert manager.blocks(second) == held

    def test_truncating_before_the_window_is_refused(self):
        manager = make(window_left=4)
        sequence = with_tokens(manager, 17)
        manager.reserve(sequence, 4)
        with pytest.raises(
            ValueError, match="length must be at least 16 for sequence 0, whose first 3 blocks the window"
        ):
            manager.truncate(sequence, 15)
        manager.truncate(sequence, 16)

    def test_blocks_that_the_window_has_passed_are_not_found_again(self):
        """Their entries name the block of nothing, which no prompt may begin with."""
        manager = make(window_left=3)
        sequence = with_tokens(manager, 12)
        manager.reserve(sequence)
        passed = manager.table.skipped[manager.table.row(sequence)]
        assert passed == 2
        assert manager.cache_blocks(sequence, TOKENS) == 3 - passed
        assert manager.length(manager.create([*TOKENS, 1])) == 0
        manager.check_integrity()


class TestSwapping:
    def test_sharing_survives(self):
        manager = make(num_host_blocks=4)
        first = with_tokens(manager, 10)
        second = manager.fork(first)
        blocks = manager.blocks(first)
        out = manager.swap_out([first, second])
        assert [source for source, _ in out] == blocks
        assert manager.pool.available == 16
        assert manager.is_swapped_out(first)
        assert manager.length(first) == 10
        back = manager.swap_in([second, first])
        assert len(back) == 3
        assert manager.blocks(first) == manager.blocks(second)
        assert manager.host_pool.available == 4

    def test_what_others_hold_stays(self):
        manager = make(num_host_blocks=4)
        first = with_tokens(manager, 10)
        second = manager.fork(first)
        manager.swap_out([first])
        assert manager.usage().blocks == 3
        assert len(manager.blocks(second)) == 3
        manager.free(first)
        assert manager.host_pool.available == 4

    def test_a_row_that_named_host_blocks_serves_again(self):
        manager = make(num_blocks=2, num_host_blocks=8)
        for _ in range(4):
            manager.swap_out([with_tokens(manager, 8)])
        manager.free(3)  # its entries were host blocks 6 and 7, which the pool does not have
        sequence = manager.create()
        manager.reserve_batch(manager.batch([sequence]))
        assert manager.blocks(sequence)[0] in range(2)
        manager.check_integrity()

    def test_a_full_host_is_said_and_changes_nothing(self):
        manager = make(num_host_blocks=2)
        sequence = with_tokens(manager, 10)
        before = snapshot(manager)
        with pytest.raises(OutOfBlocksError, match="swapping out 1 sequence needs 3 blocks, but 2 of 2"):
            manager.swap_out([sequence])
        assert snapshot(manager) == before


class TestWrongCalls:
    @walk(
        ("sizes", "error", "message"),
        [
            ({"num_blocks": 0}, ValueError, "num_blocks must be from 1"),
            ({"num_blocks": 1, "window_left": 3}, ValueError, "num_blocks must be from 2"),
            ({"block_size": 0}, ValueError, "block_size must be from 1"),
            ({"block_size": 2.0}, TypeError, "block_size must be an int, got float"),
            ({"max_sequences": 0}, ValueError, "max_sequences must be from 1"),
            ({"max_seqlen": -5}, ValueError, "max_seqlen must be from 1 to 1073741824, got -5"),
            ({"num_host_blocks": -1}, ValueError, "num_host_blocks must be from 0"),
            ({"window_left": -2}, ValueError, "window_left must be from -1"),
        ],
    )
    def test_sizes(self, sizes, error, message):
        with pytest.raises(error, match=message):
            make(**sizes)

    @walk(
        "operation",
        [
            lambda m, s: m.reserve(s),
            lambda m, s: m.fork(s),
            lambda m, s: m.free(s),
            lambda m, s: m.truncate(s, 0),
            lambda m, s: m.cache_blocks(s, []),
            lambda m, s: m.batch([s]),
            lambda m, s: m.select([s], [0]),
            lambda m, s: m.swap_out([s]),
            lambda m, s: m.swap_in([s]),
            lambda m, s: m.length(s),
            lambda m, s: m.blocks(s),
            lambda m, s: m.is_swapped_out(s),
        ],
    )
    def test_a_freed_sequence(self, operation):
        manager = make(num_host_blocks=4)
        sequence = with_tokens(manager, 5)
        manager.free(sequence)
        with_tokens(manager, 5)  # takes the same row
        before = snapshot(manager)
        with pytest.raises(
            ValueError, match=f"sequence must be one that exists, got {sequence}: it was freed"
        ):
            operation(manager, sequence)
        assert snapshot(manager) == before

    def test_a_batch_whose_sequence_was_freed_or_swapped_out(self):
        manager = make(num_host_blocks=4)
        first, second = with_tokens(manager, 3), with_tokens(manager, 3)
        batch = manager.batch([first, second])
        manager.swap_out([second])
        with pytest.raises(ValueError, match=f"sequence {second} is swapped out: swap it in first"):
            manager.reserve_batch(batch)
        manager.swap_in([second])
        manager.reserve_batch(batch)
        manager.free(first)
        with_tokens(manager, 3)
        with pytest.raises(ValueError, match=f"got {first}: it was freed"):
            manager.reserve_batch(batch)

    def test_two_writers(self):
        manager = make()
        sequence = with_tokens(manager, 3)
        with pytest.raises(ValueError, match=f"must differ from one another, got {sequence} more than once"):
            manager.batch([sequence, sequence])

    @walk(
        ("num_tokens", "error", "message"),
        [
            (-1, ValueError, "num_tokens must be from 0 to"),
            (60, ValueError, r"from 0 to 59 for sequence 0 \(5 tokens of max_seqlen=64\), got 60"),
            (2**40, ValueError, "num_tokens must be from 0 to"),
            ([60], ValueError, "from 0 to 59 for sequence 0"),
            ([2**40], ValueError, "from 0 to 59 for sequence 0"),
            ([-1], ValueError, "from 0 to 59 for sequence 0"),
            ([1, 1], ValueError, r"must have shape \(batch,\) = \(1,\), got \(2,\)"),
            ([1.0], TypeError, "num_tokens must be integers"),
        ],
    )
    def test_num_tokens(self, num_tokens, error, message):
        manager = make()
        batch = manager.batch([with_tokens(manager, 5)])
        before = snapshot(manager)
        with pytest.raises(error, match=message):
            manager.reserve_batch(batch, num_tokens)
        if isinstance(num_tokens, int):
            with pytest.raises(error, match="num_tokens must be from 0 to 59"):
                manager.reserve(0, num_tokens)
        assert snapshot(manager) == before

    def test_other_arguments(self):
        manager = make(max_sequences=2)
        sequence = with_tokens(manager, 5)
        for operation, message in (
            (lambda: manager.truncate(sequence, 6), "length must be from 0 to 5"),
            (
                lambda: manager.cache_blocks(sequence, range(6)),
                "tokens: expected at most the 5 written tokens of sequence 0, got 6",
            ),
            (lambda: manager.create(range(65)), "tokens: expected at most max_seqlen=64, got 65"),
            (
                lambda: manager.create(torch.zeros(2, 2)),
                r"tokens must be one-dimensional, got shape \(2, 2\)",
            ),
            (lambda: manager.select([sequence], [1]), "parents must be from 0 to 0, got 1"),
            (lambda: manager.swap_in([sequence]), "sequence 0 is not swapped out"),
        ):
            before = snapshot(manager)
            with pytest.raises(ValueError, match=message):
                operation()
            assert snapshot(manager) == before

    def test_too_many_sequences(self):
        manager = make(max_sequences=2)
        sequences = [with_tokens(manager, 5), manager.create()]
        before = snapshot(manager)
        for operation in (
            manager.create,
            lambda: manager.fork(sequences[0]),
            lambda: manager.select(sequences, [0, 0, 1]),
        ):
            with pytest.raises(
                OutOfSequencesError, match="at most 0 more sequences, got 1: 2 of max_sequences=2"
            ):
                operation()
            assert snapshot(manager) == before
        assert len(manager.select(sequences, [0, 0])) == 2  # the childless one makes room

    @walk(
        ("sizes", "error", "message"),
        [
            ({"num_layers": 0}, ValueError, "num_layers must be from 1 to 1073741824, got 0"),
            ({"head_dim": 4.0}, TypeError, "head_dim must be an int, got float"),
            (
                {"k_descale": torch.ones(1, 2)},
                ValueError,
                "k_descale must be None, got a tensor: k_descale is only accepted for a cache of float8",
            ),
            (
                {"dtype": torch.float8_e4m3fn, "k_descale": torch.ones(2, 2), "v_descale": torch.ones(2, 2)},
                ValueError,
                r"k_descale must have shape .* = \(1, 2\) or \(1, 8, 2\), got \(2, 2\)",
            ),
            (
                {"dtype": torch.float8_e4m3fn, "v_descale": torch.ones(1, 2)},
                ValueError,
                "k_descale must be given with v_descale, got None",
            ),
            (
                {
                    "dtype": torch.float8_e4m3fn,
                    "k_descale": torch.ones(1, 2),
                    "v_descale": torch.ones(1, 8, 2),
                },
                ValueError,
                r"v_descale must have shape of k_descale = \(1, 2\), got \(1, 8, 2\)",
            ),
            (
                {"dtype": torch.float8_e4m3fn, "k_descale": torch.ones(1, 2).double(), "v_descale": 1.0},
                TypeError,
                "k_descale must be float32, got torch.float64",
            ),
        ],
    )
    def test_cache_sizes(self, sizes, error, message):
        layers, head_dim = sizes.pop("num_layers", 1), sizes.pop("head_dim", 8)
        with pytest.raises(error, match=message):
            PagedKVCache(layers, 8, 4, 2, head_dim, max_sequences=2, max_seqlen=8, **sizes)


def leak(manager):
    manager.pool.free.pop()


def free_twice(manager):
    manager.pool.free.append(manager.pool.free[-1])


def lost_reference(manager):
    manager.pool.refs[manager.blocks(0)[0]] -= 1


def held_and_free(manager):
    manager.pool.free.append(manager.blocks(0)[0])


def outside(manager):
    manager.table.entries[0] = 99


def same_block_twice(manager):
    manager.table.entries[1] = manager.table.entries[0]


def grown_without_blocks(manager):
    manager.table.lengths[0] += 4


def lost_hash(manager):
    manager.pool.block_of.clear()


def written_beyond_its_end(manager):
    manager.table.written[0] = 7


def row_leak(manager):
    manager.table.free_rows.pop()


def wrong_owner(manager):
    manager.table.sequence_of_row[0] = 5


FAULTS = {
    leak: "pool: free [+] cached [+] used = blocks: 15 != 16",
    free_twice: "pool: free [+] cached [+] used = blocks: 17 != 16",
    lost_reference: "pool: blocks whose refs = users [+] hashed = blocks: 15 != 16",
    held_and_free: "pool: free [+] cached [+] used = blocks: 17 != 16",
    outside: "pool: blocks outside of the pool = 0: 1 != 0",
    same_block_twice: "pool: blocks twice in one table = 0: 1 != 0",
    grown_without_blocks: "pool: .* != 16",
    lost_hash: "pool: hashes = hashed blocks: 0 != 1",
    written_beyond_its_end: "sequences with more written tokens than tokens = 0: 1 != 0",
    row_leak: "rows in use [+] free rows = max_sequences: 7 != 8",
    wrong_owner: "rows owned by their resident sequence = resident sequences: 0 != 1",
}


class TestIntegrity:
    """Each fault that the books can show is found and named."""

    @walk(("fault", "message"), FAULTS.items())
    def test_faults_are_found(self, fault, message):
        manager = make()
        manager.cache_blocks(with_tokens(manager, 6), [1, 2, 3, 4])
        manager.check_integrity()
        fault(manager)
        with pytest.raises(IntegrityError, match=message):
            manager.check_integrity()

    def test_every_invariant_has_its_numbers(self):
        manager = make()
        with_tokens(manager, 6)
        stated = [str(invariant) for invariant in manager.check_integrity()]
        assert "pool: free + cached + used = blocks: 16 = 16" in stated


class TestCost:
    """In calls of Python functions, which are the same on every machine."""

    def step(self, sequences: int, crossing: int, num_blocks: int = 4096) -> int:
        """Calls of one step in which so many sequences need a block."""
        manager = make(num_blocks=num_blocks, block_size=16, max_sequences=2048)
        batch = manager.batch([manager.create() for _ in range(sequences)])
        manager.reserve_batch(batch, [16] * crossing + [5] * (sequences - crossing))
        return functions_called(lambda: manager.reserve_batch(batch))

    def test_inside_a_block_a_step_costs_the_same_for_every_batch(self):
        self.step(1, crossing=0)  # the first of a process, in which torch does more
        assert self.step(1, crossing=0) == self.step(1000, crossing=0)

    def test_only_those_that_cross_a_boundary_cost(self):
        base = self.step(1000, crossing=1)
        assert self.step(1000, crossing=101) <= base + 100 * 12
        assert self.step(1000, crossing=101) == self.step(101, crossing=101)

    def test_no_operation_depends_on_the_pool(self):
        def program(num_blocks: int) -> int:
            manager = make(num_blocks=num_blocks, max_sequences=64)

            def operations():
                sequence = with_tokens(manager, 14)
                twin = manager.fork(sequence)
                manager.reserve(twin, 20)
                manager.cache_blocks(twin, list(range(34)))
                manager.free(sequence)
                manager.free(twin)
                manager.create(list(range(34)))

            return functions_called(operations)

        assert program(64) == program(100_000)
