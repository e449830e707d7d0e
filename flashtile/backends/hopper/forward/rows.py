"""A warpgroup's query rows in the Hopper forward, as masks, ALiBi and modifiers of scores see them."""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import WARPGROUP_ROWS
from flashtile.backends.hopper.modifiers import Modifiers
from flashtile.backends.hopper.modifiers.block_lists import listed_keys
from flashtile.backends.hopper.modifiers.dropout import generator_of
from flashtile.backends.hopper.modifiers.functions import function_arguments


class Rows(NamedTuple):
    """Properties of a warpgroup's 64 rows that masks, ALiBi and modifiers need."""

    positions: Any
    """Position of each row among the keys, [64]."""
    first_key: Any
    """The first key that each row sees, [64]."""
    last_key: Any
    """The last key that each row sees, [64]."""
    slope: Any
    """ALiBi's slope of each row's head, in log2 units."""
    tree: Any
    """A tree mask, as a :class:`Tree`; 0 without one."""
    modifiers: Any
    """:class:`~flashtile.backends.hopper.modifiers.Modifiers`; 0 where the variant has none."""


class Tree(NamedTuple):
    """A tree mask of draft tokens (``decode``): which of a sequence's last tokens each row sees."""

    mask: Any
    """Pointer to the mask of the sequence."""
    row: Any
    """Offset of each row in the mask, in elements, [64]; -1 for a row that does not exist."""
    first_key: Any
    """Number of the key to which the first column of the mask refers."""
    columns: Any
    """Number of columns of the mask."""


@gluon.jit
def own_rows(C: gl.constexpr, work, first, row_layout: gl.constexpr):
    """Return (row of the sequence, query head) for each of a warpgroup's 64 rows.

    If PACK > 1, the PACK query heads of a token are consecutive rows.
    """
    row = gl.arange(0, WARPGROUP_ROWS, layout=row_layout)
    return first + row // C.PACK, work.head // C.COLUMN_SPLITS * C.PACK + row % C.PACK


@gluon.jit
def row_modifiers(C: gl.constexpr, work, block, first, bias, pointers, schedule):
    """Return the :class:`Modifiers` of a warpgroup's rows, which begin at row ``first`` and are in ``block``.

    ``bias`` is the channel of the bias.
    """
    generator = 0
    arguments = 0
    blocks = 0
    if C.LISTED:
        blocks = listed_keys(C, 4, work, block, pointers.lists)
    if C.HAS_MODS:
        arguments = function_arguments(work, work.head, pointers.captured, first)
    if C.HAS_DROPOUT:
        head_of_batch = work.sequence * schedule.num_heads + work.head
        generator = generator_of(head_of_batch, first, pointers, schedule)
    return Modifiers(bias, generator, arguments, blocks)


@gluon.jit
def mask_rows(C: gl.constexpr, work, positions, slope, schedule, modifiers=0):
    """Return the :class:`Rows` of query rows. ``positions``: the index of each row in its sequence."""
    in_keys = positions + work.seqlen_k - work.seqlen_q
    last_key = gl.full([WARPGROUP_ROWS], 0, gl.int32, positions.type.layout) + work.seqlen_k - 1
    if C.HAS_RIGHT:
        last_key = gl.minimum(in_keys + schedule.window_right, last_key)
    return Rows(in_keys, in_keys - schedule.window_left, last_key, slope, 0, modifiers)


@gluon.jit
def rows_in(C: gl.constexpr, rows, layout: gl.constexpr):
    """Return ``rows`` with its tensors converted to ``layout``."""
    slope = rows.slope
    if C.ALIBI:
        slope = gl.convert_layout(slope, layout)
    tree = rows.tree
    if C.HAS_TREE:
        tree = Tree(tree.mask, gl.convert_layout(tree.row, layout), tree.first_key, tree.columns)
    return Rows(
        gl.convert_layout(rows.positions, layout),
        gl.convert_layout(rows.first_key, layout),
        gl.convert_layout(rows.last_key, layout),
        slope,
        tree,
        rows.modifiers,
    )
