"""Groups of neighbours that share blocks, as the plug-ins of serving engines find them on the device."""

from __future__ import annotations

import random

import pytest
import torch

import called
from flashtile.integrations import paged_groups
from flashtile.integrations.paged import Step
from flashtile.integrations.paged_groups import MAX_GROUP_QUERIES, SharedBlocks, find_groups

SIZE = 4
"""Tokens of a block."""


def random_step(seed: int, device: str = "cpu") -> tuple[list[torch.Tensor], int, int]:
    """Return (block_table, seq_lens, starts), the largest group, and the fewest tokens that must be saved.

    Ranges of sequences begin alike, within each other, some equal blocks are not cached yet, and some
    sequences are padding.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, columns = draw.choice((2, 3, 7, 16, 17, 33)), 40
    table = torch.randint(1, draw.choice((4, 10**5)), (rows, columns), dtype=torch.int32)
    for _ in range(draw.randrange(5)):
        first, blocks = draw.randrange(rows), draw.randrange(columns)
        end = draw.randrange(first, rows) + 1
        table[first:end, :blocks] = table[first, :blocks].clone()
    queries = torch.randint(0, 4, (rows,))
    lengths = torch.randint(0, columns * SIZE - 3, (rows,)) + queries
    lengths[(queries == 0) & (torch.rand(rows) < 0.5)] = 0
    starts = torch.cat((torch.zeros(1), queries.cumsum(0)))
    tensors = [tensor.int().to(device) for tensor in (table, lengths, starts)]
    return tensors, draw.choice((2, 3, 16)), draw.choice((1, 40, 200))


def expected_groups(
    table: list, lengths: list, starts: list, most: int, least: int
) -> list[tuple[int, int, int]]:
    """The (first, end, keys) of all groups, by trying every threshold."""
    full = [max(0, lengths[i] - starts[i + 1] + starts[i]) // SIZE for i in range(len(lengths))]

    def common(i: int) -> int:
        limit = min(full[i - 1 : i + 1])
        different = (at for at in range(limit) if table[i][at] != table[i - 1][at])
        return SIZE * next(different, limit)

    depths = [0, *(common(i) for i in range(1, len(lengths)))]
    saved, threshold = max((depth * sum(one >= depth for one in depths), depth) for depth in depths)
    ranges: list[list[int]] = []
    for i, depth in enumerate(depths):
        if saved >= least and i and depth >= threshold and len(ranges[-1]) < most:
            ranges[-1].append(i)
        else:
            ranges.append([i])
    return [(r[0], r[-1] + 1, min((depths[i] for i in r[1:]), default=0)) for r in ranges]


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(60))
def test_groups_of_random_steps(seed):
    tensors, most, least = random_step(seed)
    offsets, shared = (found.tolist() for found in find_groups(*tensors, SIZE, most, least))
    table, lengths, starts = (tensor.tolist() for tensor in tensors)
    expected = expected_groups(table, lengths, starts, most, least)
    assert shared == [keys for first, end, keys in expected for _ in range(first, end)]
    assert offsets == [
        *(starts[i if i == first else end] for first, end, _ in expected for i in range(first, end)),
        starts[-1],
    ]
    for first, end, keys in expected:  # they are the same keys, and older than all queries
        assert len({tuple(row[: keys // SIZE]) for row in table[first:end]}) == 1
        assert all(keys <= lengths[i] - starts[i + 1] + starts[i] for i in range(first, end) if keys)


def test_random_steps_have_groups_of_all_kinds():
    """Else the tests above would show little."""
    found, full = [], 0
    for seed in range(60):
        tensors, most, least = random_step(seed)
        found.append(expected_groups(*(tensor.tolist() for tensor in tensors), most, least))
        full += any(end - first == most for first, end, _ in found[-1])
    keys = [{keys for _, _, keys in one} for one in found]
    assert sum(one == {0} for one in keys) > 5
    assert sum(len(one) > 2 for one in keys) > 5  # groups of different lengths
    assert full > 5  # ranges that were divided


def check_kernels(seed: int, device: str) -> None:
    """Compare the kernels with torch, also of memory after the step's sequences."""
    from flashtile.backends.portable.decode.groups import GroupLaunch

    tensors, most, least = random_step(seed, device)
    rows, stride = len(tensors[1]), tensors[0].stride(0)
    common, offsets, shared = torch.full((3, 80), -7, dtype=torch.int32, device=device)
    GroupLaunch(40, rows, stride, SIZE, most, least)(*tensors, common, offsets, shared)
    expected = find_groups(*(tensor.cpu() for tensor in tensors), SIZE, most, least)
    assert offsets.tolist() == [*expected[0].tolist(), *[-7] * (79 - rows)]
    assert shared.tolist() == [*expected[1].tolist(), *[-7] * (80 - rows)]


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(8))
def test_kernels_in_the_interpreter(seed):
    check_kernels(seed, "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("blocks", [0, 3, 1024, 1025, 2050])
def test_long_tables_in_the_interpreter(blocks):
    """A program compares 1,024 blocks at a time."""
    from flashtile.backends.portable.decode.groups import GroupLaunch

    table = torch.arange(4 * 2100, dtype=torch.int32).view(4, 2100)
    table[1:3, :blocks] = table[1, :blocks].clone()
    tensors = table, torch.full((4,), 2100 * SIZE, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
    common, offsets, shared = torch.empty(3, 16, dtype=torch.int32)
    GroupLaunch(4, 4, 2100, SIZE, 64, 1)(*tensors, common, offsets, shared)
    assert shared[:4].tolist() == [0, blocks * SIZE, blocks * SIZE, 0]
    assert offsets[:5].tolist() == ([0, 1, 3, 3, 4] if blocks else [0, 1, 2, 3, 4])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_kernels_on_a_gpu(seed):
    check_kernels(seed, "cuda")


def test_a_group_has_a_bounded_number_of_queries(monkeypatch):
    """The bound is one of sequences in the step, so that no sequence is divided."""
    monkeypatch.setattr(paged_groups, "MIN_SAVED_TOKENS", 1)
    shared = SharedBlocks(256, SIZE, torch.device("cpu"))
    table = torch.ones(200, 3, dtype=torch.int32)
    for longest in (1, 4, 32, 64):
        starts = torch.arange(201, dtype=torch.int32) * longest
        lengths = torch.full((200,), 2 * SIZE + longest, dtype=torch.int32)
        found = shared.find(Step(200 * longest, longest, starts, lengths, table, longest == 1))
        if longest == 64:
            assert found is None
            break
        assert found.end.tolist() == [2 * SIZE] * 200
        assert found.cu_seqlens_q.diff().max() == found.max_seqlen_q == MAX_GROUP_QUERIES
        assert (found.cu_seqlens_q.diff() > 0).sum() == -(-200 * longest // MAX_GROUP_QUERIES)


def test_a_known_step_calls_few_functions():
    """On a GPU, the host slices two buffers, finds the launch of this number of sequences, and makes it."""
    shared, launched = SharedBlocks(256, SIZE, torch.device("cpu")), []
    table, lengths, starts = (torch.ones(sizes).as_subclass(OnGpu) for sizes in ((256, 64), (256,), (257,)))
    sizes = 256, 64, SIZE, MAX_GROUP_QUERIES, paged_groups.MIN_SAVED_TOKENS
    shared._launches[sizes] = lambda *given: launched.append(given)
    step = Step(256, 1, starts, lengths, table, True)
    assert called.functions_called(lambda: shared.find(step)) < 25
    assert launched[0][:3] == (table, lengths, starts)


class OnGpu(torch.Tensor):
    """A tensor that seems to be on a GPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl
