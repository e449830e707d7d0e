"""From raw products to probabilities in the Hopper backward, and from dP to dS, with keys as rows: soft-cap,
score and mask functions, bias, ALiBi, masks, dropout."""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.backward.schedule import group_size, query_head
from flashtile.backends.hopper.columns import plus_columns
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import LOG2_E, WARPGROUP_ROWS
from flashtile.backends.hopper.inline_asm import to_16_bit, to_fp32
from flashtile.backends.hopper.modifiers import Modifiers
from flashtile.backends.hopper.modifiers import bias as bias_tiles
from flashtile.backends.hopper.modifiers.block_lists import visited_block
from flashtile.backends.hopper.modifiers.dropout import drop, generator_of
from flashtile.backends.hopper.modifiers.functions import function_arguments
from flashtile.backends.hopper.soft_cap import tanh_of


class BackwardNumbers(NamedTuple):
    """Floats of the launch, for scores in log2 units."""

    scale: Any
    """softmax_scale."""
    scale_log2: Any
    """softmax_scale * log2(e); softmax_scale with SCORE_MOD; not used with a soft-cap."""
    softcap_rate: Any
    """softmax_scale / softcap."""
    softcap_log2: Any
    """softcap * log2(e)."""
    zero: Any
    """0.0, as an argument because the compiler must not know its value (``step``)."""
    keep_scale: Any = None
    """Factor of dropout, 1 / keep; ``scale`` includes it."""
    keep: Any = None
    """1 - dropout_p."""


class QueryHead(NamedTuple):
    """Properties of a query head that the steps need."""

    slope: Any
    """ALiBi's slope, in log2 units."""
    modifiers: Any
    """:class:`~flashtile.backends.hopper.modifiers.Modifiers`."""


@gluon.jit
def row_of(vector, layout: gl.constexpr):
    """Load one number per query row from shared memory to registers, as [1, rows]."""
    return gl.expand_dims(vector.load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def key_generator(C: gl.constexpr, W: gl.constexpr, work, g, pointers, schedule):
    """Return dropout's ``Generator`` for warpgroup W's keys and query head ``g`` of the key head."""
    head_of_batch = (work.sequence * schedule.num_heads + work.head) * group_size(C, schedule) + g
    return generator_of(head_of_batch, work.tile_in_head * C.BLOCK_N + W * WARPGROUP_ROWS, pointers, schedule)


@gluon.jit
def key_modifiers(C: gl.constexpr, W: gl.constexpr, work, g, bias, blocks, pointers, schedule):
    """Return the :class:`Modifiers` for the keys of warpgroup W and one query head.

    ``g`` is the index of the query head among the heads that share the key head. ``bias`` is the channel that
    brings tiles of the bias. ``blocks`` is the result of ``schedule.row_list`` for the work tile.
    """
    generator = 0
    arguments = 0
    if C.HAS_MODS:
        arguments = function_arguments(work, query_head(C, work, g, schedule), pointers.captured)
    if C.HAS_DROPOUT:
        generator = key_generator(C, W, work, g, pointers, schedule)
    return Modifiers(bias, generator, arguments, blocks)


@gluon.jit
def positions(C: gl.constexpr, W: gl.constexpr, m, work, s_layout: gl.constexpr):
    """Return (positions of warpgroup W's keys, [keys, 1], positions of the rows of block ``m``, [1, rows]).

    Positions are aligned so that the last query of the sequence has the position of the last key.
    """
    keys = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout))
    rows = gl.arange(0, C.BLOCK_M, layout=gl.SliceLayout(0, s_layout))
    keys += work.tile_in_head * C.BLOCK_N + W * WARPGROUP_ROWS
    return keys[:, None], (rows + (m * C.BLOCK_M + work.seqlen_k - work.seqlen_q))[None, :]


@gluon.jit
def soft_cap(C: gl.constexpr, s, numbers):
    """Return (scores, softcap_grad) of raw products Q K^T.

    Scores are in log2 units, or in natural units if a SCORE_MOD follows. softcap_grad is the derivative of
    the capped score with respect to the scaled product. Without a soft-cap it is 1.0.
    """
    softcap_grad = 1.0
    if C.SOFTCAP:
        tanh = tanh_of(s, numbers.softcap_rate, False)
        s = tanh * numbers.softcap_log2
        softcap_grad = 1 - tanh * tanh
    else:
        s = s * numbers.scale_log2
    return s, softcap_grad


@gluon.jit
def apply_score_mod(
    C: gl.constexpr, W: gl.constexpr, s, m, work, slope, numbers, s_layout: gl.constexpr, modifiers=0
):  # fmt: skip
    """Return (scores in log2 units, their derivative), computed from the raw products ``s``, Q K^T.

    The scores are the scaled products after a soft-cap and ALiBi, or after SCORE_MOD. The derivative is with
    respect to the scaled products. SCORE_MOD takes scores in natural units, so with SCORE_MOD
    ``numbers.scale_log2`` is softmax_scale.
    """
    s, softcap_grad = soft_cap(C, s, numbers)
    if C.LISTED:
        m, _ = visited_block(C, modifiers.blocks, m)
    if C.SCORE_MOD is not None:
        keys, rows = positions(C, W, m, work, s_layout)
        own = modifiers.functions
        s, own_grad = C.SCORE_MOD(s, own.sequence, own.head, rows - own.offset, keys, own.captured)
        s, softcap_grad = s * LOG2_E, own_grad
    if C.ALIBI:
        keys = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, s_layout)).to(gl.float32)
        first_key = work.tile_in_head * C.BLOCK_N + W * WARPGROUP_ROWS
        between = (m * C.BLOCK_M + work.seqlen_k - work.seqlen_q - first_key).to(gl.float32)
        s = s - slope * gl.abs(plus_columns(between - keys, C.BLOCK_M, s_layout))
    return s, softcap_grad


@gluon.jit
def mask(C: gl.constexpr, W: gl.constexpr, p, m, work, schedule, s_layout: gl.constexpr, modifiers=0):
    """Return P with 0 for keys that a row does not see."""
    is_full = False
    if C.LISTED:
        m, is_full = visited_block(C, modifiers.blocks, m)
    keys, rows = positions(C, W, m, work, s_layout)
    if C.MASK_MOD is not None:
        own = modifiers.functions
        seen = C.MASK_MOD(own.sequence, own.head, rows - own.offset, keys, own.captured)
        p = gl.where(seen | is_full, p, 0.0)
    if not C.EVEN_N:
        p = gl.where(keys < work.seqlen_k, p, 0.0)
    if C.HAS_RIGHT:
        p = gl.where(keys <= rows + schedule.window_right, p, 0.0)
    if C.HAS_LEFT:
        p = gl.where(keys >= rows - schedule.window_left, p, 0.0)
    return p


@gluon.jit
def exponentials(C: gl.constexpr, s, neg_lse):
    """Return P of scores in log2 units and keys as rows, not yet masked."""
    p = gl.exp2(s + neg_lse)
    if C.GUARD_SCORES:  # SCORE_MOD may return NaN for rows past the end
        p = gl.where(neg_lse == float("-inf"), 0.0, p)
    return p


@gluon.jit
def weights_of(C: gl.constexpr, p, softcap_grad):
    """Return P times the derivative of the soft-cap or SCORE_MOD, so that dS = weights * (dP - delta)."""
    weights = p * softcap_grad
    if C.GUARD_FACTORS:  # the derivative may be infinite or NaN where a score is hidden
        weights = gl.where(p == 0.0, 0.0, weights)
    return weights


@gluon.jit
def probabilities(
    C: gl.constexpr, W: gl.constexpr, CUT: gl.constexpr, s, added, m, slot, work, head, shared, scalars
):  # fmt: skip
    """Return (P, weights), computed from ``s``, the raw products of keys and the rows of block ``m``.

    ``weights`` is P times the derivative of the soft-cap or SCORE_MOD, so that dS = weights * (dP - delta).
    ``added`` has the values of the bias.
    """
    s_layout: gl.constexpr = s.type.layout
    slope, modifiers = head
    numbers = scalars.numbers
    softcap_grad = 1.0
    if C.HAS_SCORE_MOD:
        s, softcap_grad = apply_score_mod(C, W, s, m, work, slope, numbers, s_layout, modifiers)
        if C.HAS_BIAS:
            s = s + bias_tiles.in_log2(added)
        neg_lse = row_of(shared.neg_lse.index(slot).reshape([C.BLOCK_M]), s_layout)
        p = exponentials(C, s, neg_lse)
    elif C.HAS_BIAS:
        p = gl.exp2(s * numbers.scale_log2 + bias_tiles.in_log2(added))
    else:
        p = gl.exp2(s * numbers.scale_log2)
    if C.HAS_BIAS:
        p = bias_tiles.hide_rows(C, p, m, work, s_layout)
    if CUT:
        p = mask(C, W, p, m, work, scalars.schedule, s_layout, modifiers)
    return p, weights_of(C, p, softcap_grad)


@gluon.jit
def score_gradients(C: gl.constexpr, p, weights, dp, bits, slot, modifiers, shared, numbers):
    """Return dS in 16 bits. ``p`` is P after dropout. ``dp`` is dP - delta; with dropout it is only dP."""
    dtype: gl.constexpr = p.dtype
    s_layout: gl.constexpr = dp.type.layout
    if C.HAS_DROPOUT:  # delta is also subtracted where P is dropped and dP is 0
        neg_delta = row_of(shared.neg_delta.index(slot).reshape([C.BLOCK_M]), s_layout) * numbers.keep
        kept = p
        if C.SOFTCAP:
            kept = drop(weights, bits, modifiers.dropout, True)
        return to_16_bit(to_fp32(kept) * dp + to_fp32(weights) * neg_delta, dtype)
    else:
        return to_16_bit(to_fp32(weights) * dp, dtype)
