"""TMA loads and stores of the Hopper backward: rows of q and dO, blocks of k and v, and their gradients."""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from flashtile.backends.hopper.columns import column_parts, store_part
from flashtile.backends.hopper.compat import async_load, async_store, gluon
from flashtile.backends.hopper.constants import RAGGED_ROWS, WARPGROUP_ROWS


class BackwardDescriptors(NamedTuple):
    """Descriptors of the tensors that a producer loads."""

    q: Any
    k: Any
    v: Any
    do: Any
    neg_lse: Any
    neg_delta: Any
    bias: Any
    """None without a bias."""


class Statistics(NamedTuple):
    """Two numbers of each query row (``common.preprocess``): -lse and -delta."""

    neg_lse: Any
    neg_delta: Any


@gluon.jit
def load_rows(C: gl.constexpr, desc, work, row, head, barrier, tile, column=0):
    """Load BLOCK_M rows of q or dO by TMA, from ``column`` on; rows past the last query arrive as zeros."""
    if C.VARLEN:
        end = work.start_q + work.seqlen_q
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_q + row, head, column], barrier, tile)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, tile)


@gluon.jit
def load_keys(C: gl.constexpr, desc, work, barrier, tile, column=0):
    """Load the work tile's block of keys or values by TMA, from ``column`` on; rows past the last key arrive
    as zeros."""
    row = work.tile_in_head * C.BLOCK_N
    head = work.head_kv
    if C.VARLEN or C.SEQUSED:
        end = work.start_k + work.seqlen_k
        async_load(desc, [RAGGED_ROWS, end, RAGGED_ROWS - work.seqlen_k + row, head, column], barrier, tile)
    else:
        async_load(desc, [work.sequence, row, head, column], barrier, tile)


@gluon.jit
def store_gradient(
    C: gl.constexpr, W: gl.constexpr, desc, work, head, tile, gradient, schedule, start=0
):  # fmt: skip
    """Store the gradient of warpgroup W's keys of a head by TMA, through one tile of shared memory.

    Each store writes as many columns as the block of ``desc`` has. The first column of ``gradient`` is column
    ``start`` of the head. Rows past the last key are not written.
    """
    PART: gl.constexpr = desc.block_type.shape[-1]
    parts = column_parts(gradient, PART)
    for n in gl.static_range(gradient.shape[1] // PART):
        tma.store_wait(0)  # the tile may still hold the previous part
        store_part(parts[n], tile)
        row = work.tile_in_head * C.BLOCK_N + W * WARPGROUP_ROWS
        if C.VARLEN or C.SEQUSED:
            end = work.start_k + work.seqlen_k
            if C.SEQUSED and not C.VARLEN:  # dK and dV have no gaps between sequences, unlike k
                end = work.sequence * schedule.seqlen_k + work.seqlen_k
            coordinate = RAGGED_ROWS - work.seqlen_k + row
            async_store(desc, [RAGGED_ROWS, end, coordinate, head, start + n * PART], tile)
        else:
            async_store(desc, [work.sequence, row, head, start + n * PART], tile)
