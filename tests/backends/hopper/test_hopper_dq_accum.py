"""dq_accum of the Hopper backward, its postprocess warps run as Python: converted, zeroed and used again."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from flashtile.backends.common.preprocess import num_padded_rows
from flashtile.backends.hopper import work_tiles
from flashtile.backends.hopper.backward import config, dq_accum
from flashtile.backends.hopper.backward import schedule as backward_schedule
from flashtile.backends.hopper.backward.dq_accum import AccumSizes, DqAccum
from flashtile.backends.hopper.backward.schedule import BackwardPointers, BackwardSchedule
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.problems.masking import KernelMask
from kernels_as_python import functions_of, make_work_tile
from walk import walk

ROWS = 64
BLOCK_N = 128
PATIENCE = 15.0
"""Seconds after which programs that wait for one another are said to."""


class Pointer:
    """An address in a tensor: a number, or one for each element."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def load(self, **_: Any) -> Any:
        if isinstance(self.offset, torch.Tensor):
            return self.memory[self.offset]
        time.sleep(0)  # whoever polls lets others go on
        return int(self.memory[self.offset])

    def store(self, values: torch.Tensor, mask: torch.Tensor | None = None, **_: Any) -> None:
        inside = torch.ones_like(self.offset, dtype=torch.bool) if mask is None else mask
        inside = inside.expand(self.offset.shape)
        self.memory[self.offset[inside]] = values.expand(self.offset.shape)[inside]


LOCK = threading.Lock()


def atomic_add(pointer: Pointer, value: int, **_: Any) -> int:
    with LOCK:
        before = int(pointer.memory[pointer.offset])
        pointer.memory[pointer.offset] += value
        return before


def nothing(*_: Any, **__: Any) -> None:
    pass


class Tile:
    """Of shared memory."""

    def __init__(self, *shape: int) -> None:
        self.values = torch.full(shape, torch.nan)

    def index(self, slot: int) -> Tile:
        tile = Tile()
        tile.values = self.values[slot]
        return tile

    def load(self, layout: Any) -> Values:
        return Values(self.values)

    def store(self, values: torch.Tensor) -> None:
        self.values[...] = values


class Values:
    """A tensor, whose ``to`` knows only that the result is written as it is."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.clone()

    def __mul__(self, factor: float) -> Values:
        return Values(self.values * factor)

    def to(self, dtype: Any) -> torch.Tensor:
        return self.values


class View:
    """dq_accum as TMA sees it: [tiles x groups of 8 columns, groups of 8 rows, 64]."""

    def __init__(self, memory: torch.Tensor, block_d: int) -> None:
        self.memory = memory.view(-1, 8, 64)
        shape = [block_d // 8, config.POSTPROCESS_CHUNK // (8 * block_d), 64]
        self.block_type = SimpleNamespace(shape=shape, nbytes=4 * math.prod(shape))

    def box(self, at: list[int]) -> torch.Tensor:
        columns, groups, _ = self.block_type.shape
        assert at[0] % columns == 0
        assert at[0] + columns <= len(self.memory)
        assert at[1] + groups <= 8
        return self.memory[at[0] : at[0] + columns, at[1] : at[1] + groups]


def async_load(view: View, at: list[int], barrier: Any, tile: Tile) -> None:
    tile.store(view.box(at))


def async_store(view: View, at: list[int], tile: Tile) -> None:
    view.box(at)[...] = tile.values


def chunks_of(view: View) -> SimpleNamespace:
    shape = view.block_type.shape
    zeros = Tile(*shape)
    zeros.store(torch.zeros(shape))
    return SimpleNamespace(
        tiles=Tile(config.POSTPROCESS_STAGES, *shape), full=SimpleNamespace(index=nothing), zeros=zeros
    )


PYTHON_GL = SimpleNamespace(
    load=Pointer.load,
    store=Pointer.store,
    atomic_add=atomic_add,
    arange=lambda begin, end, layout: torch.arange(begin, end),
    full=lambda shape, value, dtype, layout: torch.full(shape, value),
    float32=torch.float32,
    BlockedLayout=nothing,
    SliceLayout=nothing,
    static_range=range,
    minimum=min,
    maximum=max,
)


def patient(counter: Pointer, count: int) -> None:
    """In place of ``wait_for``."""
    end = time.monotonic() + PATIENCE
    while counter.load() < count:
        assert time.monotonic() < end, "waits forever"


FUNCTIONS = functions_of(
    work_tiles,
    backward_schedule,
    dq_accum,
    gl=PYTHON_GL,
    WorkTile=make_work_tile,
    to_int64=int,
    mbarrier=SimpleNamespace(wait=nothing, expect=nothing),
    async_load=async_load,
    async_store=async_store,
    wait_for=patient,
    **dict.fromkeys(("wait_for_writes", "fence_async_shared", "partition_barrier"), nothing),
)
"""Those of the warps that add to dq_accum and convert it. Programs differ in what they take from counters."""


DENSE = [(2, (300, 500)), (3, (64, 128)), (1, (1, 700)), (2, (129, 1))]
PACKED = [((7, 130), (0, 50), (200, 16), (64, 300)), ((1, 1),), ((0, 40), (130, 129))]


def run(
    lengths: tuple[tuple[int, int], ...],
    heads: int,
    group: int,
    head_dim: int,
    block_m: int,
    programs: int,
    resident: int,
    swizzle: int = 0,
    varlen: bool = False,
    row_splits: int = 1,
) -> None:
    """A thread for each program's warp that adds, and one for its postprocess warps."""
    block_d = 64 if head_dim <= 64 else 128
    batch, longest_q, longest_k = len(lengths), max(q for q, _ in lengths), max(k for _, k in lengths)
    total_q = sum(q for q, _ in lengths)
    rows = num_padded_rows(longest_q, total_q, batch, varlen)
    blocks = -(-longest_k // BLOCK_N)
    table_rows: list[int] = []
    start_q = start_k = 0
    for sequence, (seqlen_q, seqlen_k) in enumerate(lengths):
        for place in range(-(-seqlen_k // BLOCK_N)):
            row = [sequence, place, start_k, start_q, seqlen_k, seqlen_q]
            table_rows += row + [0] * (TABLE_WIDTH.value - len(row))
        start_q, start_k = start_q + seqlen_q, start_k + seqlen_k
    width = TABLE_WIDTH.value
    blocks_of_head = len(table_rows) // width if varlen else blocks
    table = torch.tensor([blocks_of_head, *[0] * (width - 1), *table_rows])
    total_heads = heads if varlen else heads * batch
    resident = min(resident, total_heads)
    C = SimpleNamespace(
        VARLEN=varlen, SEQUSED=False, DETERMINISTIC=swizzle > 0, GROUPED=group > 1, BLOCK_M=block_m,
        BLOCK_N=BLOCK_N, BLOCK_D=block_d, HAS_LEFT=False, HAS_RIGHT=False, HAS_CUTS=False, LISTED=False,
        SHARED=row_splits > 1, COLUMN_SPLITS=1, SEQUENCES_FIRST=False, ONE_BLOCK=False,
    )  # fmt: skip
    numbers = BackwardSchedule(
        num_tiles=heads * batch * blocks, num_blocks=blocks, num_heads=heads, seqlen_q=longest_q,
        seqlen_k=longest_k, batch_rows_k=longest_k, mask=KernelMask(-1, -1), alibi_stride=0,
        swizzle=max(swizzle, 1), group=group, row_shift=row_splits.bit_length() - 1,
    )  # fmt: skip
    memory = torch.zeros(resident * group, rows, block_d)  # by the preprocess kernel
    # Tokens of sequences without keys are nobody's: their gradients are zeroed when they are allocated.
    dq = torch.zeros if varlen else torch.empty
    dq = dq(total_q if varlen else batch * longest_q, heads * group, head_dim).fill_(
        0.0 if varlen else torch.nan
    )
    counters = torch.zeros(2 + 2 * total_heads, dtype=torch.int64)
    present = {"table": Pointer(table), "counters": Pointer(counters)}
    pointers = BackwardPointers(*map(present.get, BackwardPointers._fields))
    sizes = AccumSizes(
        row_blocks=rows // block_m,
        total_heads=total_heads,
        resident_heads=resident,
        row_vectors=head_dim // 8,
    )
    accum = DqAccum(
        sizes,
        dq_semaphores=None,
        dq=Pointer(dq.view(-1)),
        next_part=Pointer(counters, 1),
        added_blocks=Pointer(counters, 2),
        converted_parts=Pointer(counters, 2 + total_heads),
    )
    errors: list[BaseException] = []

    def accumulate_dq() -> None:
        tile_index = atomic_add(pointers.counters, 1)
        while tile_index < FUNCTIONS["count_tiles"](C, pointers, numbers):
            following = atomic_add(pointers.counters, 1)  # as the producer: before it waits
            work = FUNCTIONS["find_work_tile"](C, tile_index, pointers, numbers)
            key_head, _ = FUNCTIONS["head_and_block"](C, tile_index, blocks_of_head, numbers)
            FUNCTIONS["wait_until_zeroed"](key_head, blocks_of_head * row_splits, accum)
            begin, end, _, _ = FUNCTIONS["own_row_blocks"](C, tile_index, work, numbers)
            for g in range(group):
                first = FUNCTIONS["accum_row"](C, work, key_head, g, begin * block_m, numbers, accum)
                with LOCK:
                    added = memory.view(-1, block_d)[first : first + (end - begin) * block_m]
                    added += (key_head * group + g + 1) * 2.0**-10
            atomic_add(accum.added_blocks + key_head, 1)
            tile_index = following

    def guarded(function: Callable, *arguments: Any) -> threading.Thread:
        def body() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    threads = []
    view = View(memory, block_d)
    for _ in range(programs):
        threads.append(guarded(accumulate_dq))
        threads.append(
            guarded(FUNCTIONS["postprocess"], C, chunks_of(view), view, pointers, numbers, accum, 0.5)
        )
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)
    dq = dq.view(-1, heads * group, head_dim)
    start = 0
    for sequence, (seqlen_q, seqlen_k) in enumerate(lengths):
        own = dq[start : start + seqlen_q]
        for head in range(heads * group):
            of_batch = head if varlen else sequence * heads * group + head
            expected = -(-seqlen_k // BLOCK_N) * (of_batch + 1) * 2.0**-11
            assert (own[:, head] == expected).all(), (sequence, head)
        start += seqlen_q


SHAPES = [(1, 128, 64), (2, 64, 128), (3, 72, 64)]  # (group, head_dim, block_m)
PROGRAMS = [(1, 1), (3, 1), (4, 3), (5, 100)]  # (programs, resident)


@pytest.mark.parametrize(
    ("lengths", "shape", "programs"),
    [  # in make test any two of the three meet
        pytest.param(
            DENSE[i], SHAPES[j], PROGRAMS[k], marks=() if (i + k) % 3 == j else (pytest.mark.thorough,)
        )
        for i, j, k in itertools.product(range(len(DENSE)), range(len(SHAPES)), range(len(PROGRAMS)))
    ],
    ids=str,
)
def test_equal_lengths(
    lengths: tuple[int, tuple[int, int]], shape: tuple[int, int, int], programs: tuple[int, int]
) -> None:
    batch, of_each = lengths
    run((of_each,) * batch, 4, *shape, *programs)


@walk("lengths", PACKED)
@walk(("programs", "resident"), [(1, 1), (3, 2), (4, 100)])
def test_variable_lengths(lengths: tuple[tuple[int, int], ...], programs: int, resident: int) -> None:
    run(lengths, 5, 2, 128, 64, programs, resident, varlen=True)


@walk("row_splits", [2, 4])
@walk(("programs", "resident"), [(1, 1), (3, 1), (5, 100)])
def test_rows_that_programs_share(programs: int, resident: int, row_splits: int) -> None:
    """A head is complete when all shares of its blocks of keys are."""
    run(((300, 500),) * 2, 3, 2, 128, 64, programs, resident, row_splits=row_splits)
    run(PACKED[0], 3, 2, 64, 128, programs, resident, varlen=True, row_splits=row_splits)


@walk(("swizzle", "resident"), [(1, 1), (2, 2), (4, 8), (8, 8)])
def test_in_one_order(swizzle: int, resident: int) -> None:
    run(((200, 400),) * 4, 4, 1, 128, 64, 3, resident, swizzle)


def test_the_order_of_what_is_converted_is_that_of_what_was_stored() -> None:
    """Of one tile with all numbers different."""
    for head_dim, block_m in itertools.product((64, 128), (64, 128)):
        columns = head_dim // 2 if block_m == ROWS else head_dim
        tile = torch.arange(ROWS * head_dim, dtype=torch.float32).reshape(ROWS, head_dim)
        store = FUNCTIONS["in_register_order"]
        memory = torch.cat([store(part).flatten() for part in tile.split(columns, 1)])
        dq = torch.empty(ROWS * head_dim)
        C = SimpleNamespace(
            VARLEN=False, SEQUSED=False, GROUPED=False, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_D=head_dim,
            SHARED=False, COLUMN_SPLITS=1, SEQUENCES_FIRST=False,
        )  # fmt: skip
        numbers = BackwardSchedule(1, 1, 1, ROWS, BLOCK_N, BLOCK_N, -1, -1, 0, 1)
        accum = DqAccum(AccumSizes(128 // block_m, 1, 1, head_dim // 8), None, Pointer(dq), None, None, None)
        view = View(torch.cat([memory, memory * 0]), head_dim)
        FUNCTIONS["convert_part"](C, chunks_of(view), view, 0, 0, 0, None, numbers, accum, 2.0)
        assert torch.equal(dq.view(ROWS, head_dim), 2 * tile)


def test_each_counter_has_memory_of_its_own() -> None:
    """The launch allocates 2 + 2 * total_heads counters. The first is that of the work queue."""
    sizes, heads = SimpleNamespace(total_heads=5), range(5)
    pointers = SimpleNamespace(counters=100, dq_semaphores="semaphores", dq="dq")
    accum = functions_of(dq_accum)["accum_of"](sizes, pointers)
    assert (accum.sizes, accum.dq_semaphores, accum.dq) == (sizes, "semaphores", "dq")
    counters = [accum.next_part]
    counters += [start + head for start in (accum.added_blocks, accum.converted_parts) for head in heads]
    assert counters == list(range(101, 100 + 2 + 2 * len(heads)))
