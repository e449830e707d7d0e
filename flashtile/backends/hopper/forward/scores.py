"""From raw products to probabilities in the Hopper forward, with queries as rows: soft-cap, score and mask
functions, bias, ALiBi, masks, the online softmax, dropout.

A probability takes one FMA and one exp2, because softmax_scale and log2(e) form one factor, ``scale_log2``.
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.columns import plus_columns
from flashtile.backends.hopper.compat import gluon
from flashtile.backends.hopper.constants import LN_2
from flashtile.backends.hopper.inline_asm import to_fp32
from flashtile.backends.hopper.modifiers import bias
from flashtile.backends.hopper.modifiers.block_lists import key_block
from flashtile.backends.hopper.modifiers.dropout import drop, random_bits, schedule_barrier
from flashtile.backends.hopper.modifiers.functions import hide_scores, modify_scores
from flashtile.backends.hopper.soft_cap import tanh_of

LAG_LOG2 = gl.constexpr(8.0)
"""Log2 of the largest P with LAZY_RESCALE. P has the same relative error as if it were at most 1, and is far
from the largest fp16."""

LARGE = gl.constexpr(2.0**27)
"""From this magnitude on, scores of fp32 differ by at least 16, or not at all."""


@gluon.constexpr_function
def has_natural_scores(C):
    """Whether :func:`apply_score_mod` returns scores in natural units."""
    return C.SCORE_MOD is not None or C.HAS_BIAS


@gluon.jit
def to_log2(C: gl.constexpr, top, scale_log2):
    """Return the factor of rows whose largest score is ``top``, from the softmax's scores to log2 units.

    An FMA computes the exponents of P. It does not round the product that is rounded in the row's maximum, so
    exponents err by up to 2 ** -24 of the maximum. P then leaves the range of 16 bits if all scores of a row
    are large, for example -1e9. With a power of two, both are exact. In place of log2(e) it is as good for
    LARGE scores, because P is about 0 wherever a score differs from the maximum. And it is greater, so the
    converted maxima keep the order of the scores.
    """
    if has_natural_scores(C):
        scale_log2 = gl.where(gl.abs(top) < LARGE, scale_log2, 2.0)
    return scale_log2


@gluon.jit
def is_large(m):
    """Whether the maximum ``m`` comes from a LARGE score, so that :func:`to_log2` was 2."""
    return gl.abs(m) >= 2 * LARGE


@gluon.jit
def to_natural(C: gl.constexpr, m):
    """Return the maximum ``m`` of each row in natural units, the inverse of :func:`to_log2`."""
    if has_natural_scores(C):
        return m * gl.where(is_large(m), 0.5, LN_2)
    else:
        return m * LN_2


@gluon.jit
def visited(C: gl.constexpr, rows, n):
    """Return (block of keys, whether it is full) for the tile's block number ``n``.

    With a block mask, the block and the flag are loaded from the list of the block mask. Callers do this
    early, so that a product hides the latency. Without a block mask, the result is (n, False).
    """
    if C.LISTED:
        return key_block(C, rows.modifiers.blocks, n)
    return n, False


@gluon.jit
def dropout_bits(C: gl.constexpr, rows, n, WIDTH: gl.constexpr, s_layout: gl.constexpr):
    """Return random bits that decide which probabilities of block ``n`` are dropped; 0 without dropout.

    They do not depend on scores, so they can be computed while the product is in flight.
    """
    if C.HAS_DROPOUT:
        bits = random_bits(rows.modifiers.dropout, n * C.BLOCK_N, WIDTH, False, s_layout)
        if not C.LATE_BITS:
            schedule_barrier(bits)
        return bits
    else:
        return 0


@gluon.jit
def load_bias(C: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr, rows, i, s_layout: gl.constexpr):
    """Load the ``i``-th tile in the channel of the bias to registers; return 0 without a bias.

    This is called early, so that the load overlaps with a product.
    """
    if C.HAS_BIAS:
        return bias.read_rows(C, W, rows.modifiers.bias, i, WIDTH, s_layout)
    else:
        return 0


@gluon.jit
def release_bias(C: gl.constexpr, rows, i, added):
    """Complete the load that :func:`load_bias` has started, release the bias tile, and return the values."""
    if C.HAS_BIAS:
        added = bias.release_rows(rows.modifiers.bias, i, added)
    return added


@gluon.jit
def apply_score_mod(C: gl.constexpr, s, n, rows, numbers, s_layout: gl.constexpr, added=0):
    """Apply soft-cap, SCORE_MOD, bias and ALiBi to the raw products of block ``n``.

    With HAS_SCORE_MOD, the results are scores in log2 units. Otherwise the results are raw products, the tanh
    of a soft-cap, or, with SCORE_MOD or a bias, scores in natural units. The softmax then multiplies them by
    ``scale_log2``. With KEY_SCALES (decoding), raw products are multiplied by the scales of their keys.
    """
    if C.KEY_SCALES:
        s = s * numbers.key_scales.load(gl.SliceLayout(0, s_layout))[None, :]
    if C.SOFTCAP:
        s = tanh_of(s, numbers.softcap_rate, C.TANH_APPROX)
        if C.HAS_SCORE_MOD:
            s = s * numbers.softcap_log2
    elif C.HAS_SCORE_MOD:
        s = s * numbers.scale_log2
    if has_natural_scores(C):
        s = s * numbers.scale
    if C.SCORE_MOD is not None:
        s, _ = modify_scores(C, s, n, rows, s_layout)
    if C.HAS_BIAS:
        s = s + to_fp32(added)
    if C.ALIBI:
        between = (n * C.BLOCK_N - rows.positions).to(gl.float32)
        s = s - rows.slope[:, None] * gl.abs(plus_columns(between, s.shape[1], s_layout))
    return s


@gluon.jit
def mask(
    C: gl.constexpr, s, n, rows, s_layout: gl.constexpr, is_full=False, columns=0,
    PARTIAL: gl.constexpr = True,
):  # fmt: skip
    """Return the scores of block ``n``, with -inf where a row does not see a key.

    A row sees the keys in [first_key, last_key] that neither a tree mask nor MASK_MOD hides. ``is_full`` says
    that a block mask lists the block as full, so that MASK_MOD hides none of its keys. PARTIAL says that it
    does not. ``columns`` is the result of ``modifiers.functions.load_columns``.
    """
    keys = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s_layout))[None, :]
    if C.MASK_MOD is not None:
        s = hide_scores(C, s, n, is_full, rows, columns, s_layout, PARTIAL)
    if C.MASK_MOD is None or not C.LISTED or not C.EVEN_N:
        s = gl.where(keys <= (rows.last_key - n * C.BLOCK_N)[:, None], s, float("-inf"))
    if C.HAS_LEFT:
        s = gl.where(keys >= (rows.first_key - n * C.BLOCK_N)[:, None], s, float("-inf"))
    if C.HAS_TREE:
        tree = rows.tree
        columns = keys + (n * C.BLOCK_N - tree.first_key)
        inside = (columns >= 0) & (columns < tree.columns) & (tree.row >= 0)[:, None]
        seen = gl.load(tree.mask + tree.row[:, None] + columns, mask=inside, other=1)
        s = gl.where(seen != 0, s, float("-inf"))
    return s


@gluon.jit
def online_softmax(C: gl.constexpr, s, m, scale_log2):
    """Return (unnormalised P, new row maximum, factor for earlier sums). ``scale_log2`` is positive.

    With LAZY_RESCALE (FlashAttention-4, Zadouri et al. 2026, arXiv:2603.05451), the maximum m changes only if
    a score exceeds it by LAG_LOG2. P and the sums are in units of 2 ** m, so out and lse do not depend on m.
    """
    top = gl.max(s, 1)
    if not C.HAS_SCORE_MOD:
        top = top * to_log2(C, top, scale_log2)
    if C.LAZY_RESCALE:
        m_new = gl.where(top > m + LAG_LOG2, top, m)
    else:
        m_new = gl.maximum(m, top)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # -inf: the row has seen no key so far
    if C.HAS_SCORE_MOD:
        p = gl.exp2(s - shift[:, None])
    elif has_natural_scores(C):
        factor = gl.where(is_large(m_new), 2.0, scale_log2)
        p = gl.exp2(gl.fma(s, factor[:, None], -shift[:, None]))
    else:
        p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, m_new, gl.exp2(m - shift)


@gluon.jit
def quad_sums(p):
    """Sum p [rows, N] to [rows, 4], one sum for each of the four threads that share a row, without a shuffle.

    In wgmma's accumulator, column 8 a + 2 t + b belongs to thread t of the quad.
    """
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def drop_probabilities(C: gl.constexpr, p, bits, rows):
    """Return P in 16 bits, with 0 for each probability that dropout drops."""
    if C.HAS_DROPOUT:
        return drop(p, bits, rows.modifiers.dropout, False)
    else:
        return p
