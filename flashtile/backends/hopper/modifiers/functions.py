"""Score and mask functions (SCORE_MOD, MASK_MOD) on a warpgroup's tile of scores.

Rows of a tile are queries, as in the forward. For the backward, where rows are keys, see ``backward.kernel``.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.columns import column_numbers, row_numbers
from flashtile.backends.hopper.compat import gluon
from flashtile.problems.masks import MAX_CAPTURED, MAX_SIZES

CapturedTensors = namedtuple(  # type: ignore[misc]
    "CapturedTensors",
    [f"tensor_{i}" for i in range(MAX_CAPTURED)] + [f"size_{i}" for i in range(MAX_SIZES)],
)
"""Contiguous tensors that functions read (0 for those that a call lacks), then the sizes of all their
dimensions in order. The last fields hold the integers of ``Mods.numbers`` instead of sizes."""


class FunctionArguments(NamedTuple):
    """Arguments of score_mod and mask_mod in addition to scores, queries and keys."""

    sequence: Any
    head: Any
    """The query head."""
    offset: Any
    """Position of the first query among the keys."""
    captured: Any
    first: Any
    """In the forward, the warpgroup's first query."""


class Distances(NamedTuple):
    """Distances of the queries and keys of a tile, q - kv, as the sum of two numbers. Threads have both parts
    of a distance in common with other scores, so they compute some distances once for two scores."""

    threads: Any
    """int32, one number for all registers of a thread."""
    registers: Any
    """int32, a constant of each register."""


@gluon.jit
def function_arguments(work, head, captured, first=0):
    """Return the :class:`FunctionArguments` of a query head and the warpgroup's rows from ``first`` on."""
    return FunctionArguments(work.sequence, head, work.seqlen_k - work.seqlen_q, captured, first)


@gluon.jit
def distances_of(between, N: gl.constexpr, layout: gl.constexpr):
    """Return the :class:`Distances` of a tile of queries by keys.

    ``between`` is the first query minus the first key. ``layout`` is that of the tile, [64, N].
    """
    keys_of_threads, keys_of_registers = column_numbers(N, layout, gl.int32)
    threads, registers = row_numbers(layout)
    threads = between + (threads[:, None] - keys_of_threads[None, :])
    return Distances(threads, registers[:, None] - keys_of_registers[None, :])


@gluon.jit
def modify_scores(C: gl.constexpr, s, n, rows, s_layout: gl.constexpr):
    """Return (SCORE_MOD of the scores of key block ``n``, its derivative).

    Scores and results are in natural units, not log2.
    """
    own = rows.modifiers.functions
    keys = n * C.BLOCK_N + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))
    queries = rows.positions - own.offset
    distances = distances_of(own.first - n * C.BLOCK_N, s.shape[1], s_layout)
    return C.SCORE_MOD(
        s, own.sequence, own.head, queries[:, None], keys[None, :], own.captured, distances
    )  # fmt: skip


@gluon.jit
def load_columns(C: gl.constexpr, n, rows, WIDTH: gl.constexpr):
    """Load what MASK_MOD needs for each key of block ``n``. Return a tuple of [WIDTH], or 0 without loads.

    Each thread loads the values of other keys. Callers load early, so that a product hides the latency.
    """
    if C.MASK_COLUMNS is not None:
        own = rows.modifiers.functions
        keys = n * C.BLOCK_N + gl.arange(0, WIDTH, layout=gl.BlockedLayout([1], [32], [4], [0]))
        return C.MASK_COLUMNS(own.sequence, own.head, keys, own.captured)
    else:
        return 0


@gluon.jit
def convert_columns(columns, layout: gl.constexpr):
    """Return the values of :func:`load_columns` as a tuple of [1, N] for a tile of this layout."""
    own = (gl.convert_layout(columns[0], gl.SliceLayout(0, layout))[None, :],)
    if len(columns) > 1:
        return own + convert_columns(columns[1:], layout)
    else:
        return own


@gluon.jit
def hide_scores(
    C: gl.constexpr, s, n, is_full, rows, columns, s_layout: gl.constexpr, PARTIAL: gl.constexpr
):  # fmt: skip
    """Return the scores with -inf for keys of block ``n`` that MASK_MOD hides, unless the block is full.

    ``columns`` is the result of :func:`load_columns`. With PARTIAL, the block is known to be partial.
    Otherwise the list of the block mask may also be empty, which hides all keys.
    """
    own = rows.modifiers.functions
    queries = rows.positions - own.offset
    keys = n * C.BLOCK_N + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))
    distances = distances_of(own.first - n * C.BLOCK_N, s.shape[1], s_layout)
    if C.MASK_COLUMNS is not None:
        columns = convert_columns(columns, s_layout)
    seen = C.MASK_MOD(
        own.sequence, own.head, queries[:, None], keys[None, :], own.captured, distances, columns
    )  # fmt: skip
    if C.LISTED and not PARTIAL:
        s = gl.where(seen | is_full, s, float("-inf"))
        return gl.where(rows.modifiers.blocks.is_empty, float("-inf"), s)
    else:
        return gl.where(seen, s, float("-inf"))
