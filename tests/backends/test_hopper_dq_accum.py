"""The sums of dQ on the Hopper backend, its keeper run as Python: converted, zeroed, and used again."""

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

from flashtile.backends.common.preprocess import padded_rows
from flashtile.backends.hopper import config
from flashtile.backends.hopper.backward import dq_accum as backward_sums
from flashtile.backends.hopper.backward import kernel as backward
from flashtile.backends.hopper.backward import schedule as backward_schedule
from flashtile.backends.hopper.backward.dq_accum import Sums
from flashtile.backends.hopper.backward.schedule import Pointers, Schedule
from flashtile.backends.hopper.forward import schedule
from flashtile.backends.hopper.forward.schedule import TABLE_WIDTH
from kernels_as_python import functions_of, make_work

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
    """The sums as TMA sees them: [tiles x groups of 8 columns, groups of 8 rows, 64]."""

    def __init__(self, memory: torch.Tensor, block_d: int) -> None:
        self.memory = memory.view(-1, 8, 64)
        shape = [block_d // 8, config.KEEPER_CHUNK // (8 * block_d), 64]
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


def keep_of(view: View) -> SimpleNamespace:
    shape = view.block_type.shape
    zeros = Tile(*shape)
    zeros.store(torch.zeros(shape))
    return SimpleNamespace(
        tiles=Tile(config.KEEPER_STAGES, *shape), full=SimpleNamespace(index=nothing), zeros=zeros
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
    """In place of ``await_count``."""
    end = time.monotonic() + PATIENCE
    while counter.load() < count:
        assert time.monotonic() < end, "waits forever"


FUNCTIONS = functions_of(
    schedule,
    backward_schedule,
    backward,
    backward_sums,
    gl=PYTHON_GL,
    Work=make_work,
    wide=int,
    mbarrier=SimpleNamespace(wait=nothing, expect=nothing),
    async_load=async_load,
    async_store=async_store,
    await_count=patient,
    **dict.fromkeys(("await_writes", "fence_async_shared", "partition_barrier"), nothing),
)
"""The keeper's and the adder's; programs differ only in what they take from the counters."""


DENSE = [(2, (300, 500)), (3, (64, 128)), (1, (1, 700)), (2, (129, 1))]
RAGGED = [((7, 130), (0, 50), (200, 16), (64, 300)), ((1, 1),), ((0, 40), (130, 129))]


def run(
    lengths: tuple[tuple[int, int], ...],
    heads: int,
    group: int,
    head_dim: int,
    block_m: int,
    programs: int,
    kept: int,
    section: int = 0,
    varlen: bool = False,
) -> None:
    """Every program's adder and keeper, a thread each; each addition is 1 in every column of a row block."""
    block_d = 64 if head_dim <= 64 else 128
    batch, longest_q, longest_k = len(lengths), max(q for q, _ in lengths), max(k for _, k in lengths)
    total_q = sum(q for q, _ in lengths)
    rows = padded_rows(longest_q, total_q, batch, varlen)
    blocks = -(-longest_k // BLOCK_N)
    table_rows: list[int] = []
    start_q = start_k = 0
    for sequence, (seqlen_q, seqlen_k) in enumerate(lengths):
        for place in range(-(-seqlen_k // BLOCK_N)):
            row = [sequence, place, start_k, start_q, seqlen_k, seqlen_q]
            table_rows += row + [0] * (TABLE_WIDTH.value - len(row))
        start_q, start_k = start_q + seqlen_q, start_k + seqlen_k
    width = TABLE_WIDTH.value
    items_of_head = len(table_rows) // width if varlen else blocks
    table = torch.tensor([items_of_head, *[0] * (width - 1), *table_rows])
    all_heads = heads if varlen else heads * batch
    kept = min(kept, all_heads)
    C = SimpleNamespace(
        VARLEN=varlen, SEQUSED=False, DETERMINISTIC=section > 0, GROUP=group, BLOCK_M=block_m,
        BLOCK_N=BLOCK_N, BLOCK_D=block_d, HAS_LEFT=False, HAS_RIGHT=False,
    )  # fmt: skip
    numbers = Schedule(
        items=heads * batch * blocks, blocks=blocks, heads=heads, seqlen_q=longest_q, seqlen_k=longest_k,
        rows_k=longest_k, left=-1, right=-1, alibi_stride=0, section=max(section, 1),
    )  # fmt: skip
    memory = torch.zeros(kept * group, rows, block_d)  # by the preparation
    # Tokens of sequences without keys are nobody's: their gradients are zeroed when they are allocated.
    dq = torch.zeros if varlen else torch.empty
    dq = dq(total_q if varlen else batch * longest_q, heads * group, head_dim).fill_(
        0.0 if varlen else torch.nan
    )
    counters = torch.zeros(2 + 2 * all_heads, dtype=torch.int64)
    pointers = Pointers(table=Pointer(table), seqused_k=None, alibi_slopes=None, next_item=Pointer(counters))
    sums = Sums(
        q_blocks=rows // block_m, all_heads=all_heads, kept=kept, vectors=head_dim // 8, turns=None,
        dq=Pointer(dq.view(-1)), next_part=Pointer(counters, 1), added=Pointer(counters, 2),
        cleared=Pointer(counters, 2 + all_heads),
    )  # fmt: skip
    errors: list[BaseException] = []

    def adder() -> None:
        item = atomic_add(pointers.next_item, 1)
        while item < FUNCTIONS["item_count"](C, pointers, numbers):
            following = atomic_add(pointers.next_item, 1)  # as the producer: before it waits
            work = FUNCTIONS["find_keys"](C, item, pointers, numbers)
            key_head, _ = FUNCTIONS["block_of_item"](C, item, items_of_head, numbers)
            FUNCTIONS["await_room"](key_head, items_of_head, sums)
            for g in range(group):
                first = FUNCTIONS["sums_row"](C, work, key_head, g, 0, sums)
                with LOCK:
                    added = memory.view(-1, block_d)[first : first + -(-work.seqlen_q // ROWS) * ROWS]
                    added += (key_head * group + g + 1) * 2.0**-10
            atomic_add(sums.added + key_head, 1)
            item = following

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
        threads.append(guarded(adder))
        threads.append(guarded(FUNCTIONS["keeper"], C, keep_of(view), view, pointers, numbers, sums, 0.5))
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


@pytest.mark.parametrize(("batch", "lengths"), DENSE)
@pytest.mark.parametrize(("group", "head_dim", "block_m"), [(1, 128, 64), (2, 64, 128), (3, 72, 64)])
@pytest.mark.parametrize(("programs", "kept"), [(1, 1), (3, 1), (4, 3), (5, 100)])
def test_equal_lengths(
    batch: int, lengths: tuple[int, int], group: int, head_dim: int, block_m: int, programs: int, kept: int
) -> None:
    run((lengths,) * batch, 4, group, head_dim, block_m, programs, kept)


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize(("programs", "kept"), [(1, 1), (3, 2), (4, 100)])
def test_variable_lengths(lengths: tuple[tuple[int, int], ...], programs: int, kept: int) -> None:
    run(lengths, 5, 2, 128, 64, programs, kept, varlen=True)


@pytest.mark.parametrize(("section", "kept"), [(1, 1), (2, 2), (4, 8), (8, 8)])
def test_in_one_order(section: int, kept: int) -> None:
    run(((200, 400),) * 4, 4, 1, 128, 64, 3, kept, section)


def test_the_order_of_what_is_converted_is_that_of_what_was_stored() -> None:
    """Of one tile with all numbers different."""
    for head_dim, block_m in itertools.product((64, 128), (64, 128)):
        columns = head_dim // 2 if block_m == ROWS else head_dim
        tile = torch.arange(ROWS * head_dim, dtype=torch.float32).reshape(ROWS, head_dim)
        store = FUNCTIONS["in_register_order"]
        memory = torch.cat([store(part).flatten() for part in tile.split(columns, 1)])
        dq = torch.empty(ROWS * head_dim)
        C = SimpleNamespace(
            VARLEN=False, SEQUSED=False, GROUP=1, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_D=head_dim
        )
        numbers = Schedule(1, 1, 1, ROWS, BLOCK_N, BLOCK_N, -1, -1, 0, 1)
        sums = Sums(128 // block_m, 1, 1, head_dim // 8, None, Pointer(dq), None, None, None)
        view = View(torch.cat([memory, memory * 0]), head_dim)
        FUNCTIONS["convert_part"](C, keep_of(view), view, 0, 0, 0, None, numbers, sums, 2.0)
        assert torch.equal(dq.view(ROWS, head_dim), 2 * tile)
