"""Configurations of the Hopper forward: data, chosen by head sizes and mask. Nothing is tuned at run time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import permutations
from typing import ClassVar

from flashtile.backends.hopper.compat import VIEWS_SPAN_TILES
from flashtile.backends.hopper.config import (
    MAX_COLUMNS_OF_V,
    WARPGROUP_ROWS,
    ModifierFlags,
    is_windowed,
    modifiers_of,
    padded_columns,
)
from flashtile.backends.hopper.forward.rounds import blocks_stand_alone, fastest, measured_costs
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masking import MaskConstants

O_PART = 64
"""With ``O_IN_PARTS``: columns of a 16-bit output that one TMA store writes; half as many in float32."""


@dataclass(frozen=True)
class ForwardConfig:
    """Tile and pipeline of the forward kernel.

    Args:
        warpgroups: consumers of 64 rows each, 1 to 3.
        BLOCK_N: keys of a block.
        STAGES, Q_STAGES: blocks of keys and values, and blocks of queries, in shared memory.
        PING_PONG: consumers use the tensor cores in turn: one multiplies while the others compute
            exponentials (FlashAttention-3).
        Q_HOLDS_O: the output is stored through the shared memory of q, because there is no room for a tile of
            its own.
        O_IN_PARTS: the output is stored ``O_PART`` columns at a time, through two small tiles per consumer,
            so that the shared memory of q is free for the next queries at once.
        Q_IN_REGISTERS: columns of q that stay in registers, which saves reads of shared memory.
        LAZY_RESCALE: the running maximum of a row may lag behind by a factor of 2 ** 8, so that most blocks
            of keys need no rescaling of O. A warp rescales O only if one of its rows has a new maximum.
        PIN_WAIT: the wait for P V stays after the exponentials; the assembler would move it before them.
        PROGRAMS: programs that share a multiprocessor: one begins or ends a tile while another multiplies.
        paired_below: number of keys. Under a mask with a right edge, sequences with fewer keys are computed
            in pairs of query blocks (``schedule.num_parts``). In longer sequences, the longest query blocks
            of all heads come first.
        QUEUED: under a mask with only a right edge, programs take the blocks of sequences of at least
            ``paired_below`` keys from the work queue. Blocks of packed sequences always come from the queue.
        BIAS_STAGES: tiles of a bias in shared memory.
        LATE_BITS: the assembler may delay the computation of dropout's random bits until the exponentials.
            Otherwise they are computed during the products.
    """

    warpgroups: int
    BLOCK_N: int
    STAGES: int = 2
    Q_STAGES: int = 1
    PING_PONG: bool = False
    Q_HOLDS_O: bool = False
    O_IN_PARTS: bool = False
    Q_IN_REGISTERS: int = 0
    LAZY_RESCALE: bool = False
    PIN_WAIT: bool = False
    PROGRAMS: int = 1
    paired_below: int = 8192
    QUEUED: bool = False
    BIAS_STAGES: int = 1
    LATE_BITS: bool = False

    @property
    def BLOCK_M(self) -> int:  # noqa: N802 - as in the kernel
        return self.warpgroups * WARPGROUP_ROWS


@dataclass(frozen=True)
class ForwardVariant(MaskConstants, ModifierFlags):
    """Compile-time parameters of the forward kernel, which takes them as one constexpr."""

    HAS_TREE: ClassVar[bool] = False
    """Only decoding has tree masks."""

    VARLEN: bool
    SEQUSED: bool
    SOFTCAP: bool
    TANH_APPROX: bool
    """Soft-caps use the hardware's tanh (``soft_cap``)."""
    ALIBI: bool
    SINK: bool
    MAX_LOGITS: bool
    """Whether the largest score of each row is a result."""
    ENTROPY: bool
    """Whether the entropy of each row's probabilities is a result."""
    INVARIANT: bool
    """Whether rows have the bits that ``decode.kernel`` gives them."""
    EVEN_N: bool
    """All sequences end with a whole block of keys. False with a window, where the last block is masked."""
    QUEUED: bool
    """Programs take work tiles from the work queue, not in a fixed order."""
    PAIRED: bool
    """A work tile is a pair of blocks of query rows; all pairs cost the same (``schedule.num_parts``)."""
    FIRST_BLOCK_PARTIAL: bool
    """The first block of query rows of a sequence lacks warpgroups, not the last, which sees the most keys
    under a mask with a right edge (``rounds.first_is_partial``)."""
    PACK: int
    """Number of rows of a token in a tile: one for each query head of a key head that shares the tile
    (FlashAttention-3's PackGQA), and unused ones if these are no power of two."""
    PACKED_HEADS: int
    """Number of query heads of a key head that share a tile."""
    SCALED_SCORES: bool
    """Scores are scaled to log2 units before the softmax, for ALiBi or a scale that is not positive.
    Otherwise the softmax scales its input: raw products, the tanh of a soft-cap, or scores in natural
    units."""
    BLOCK_D: int
    """Columns of q and k in shared memory."""
    BLOCK_DV: int
    D_PARTS: int
    """Number of tiles into which the columns of q and k are divided; 1 if BLOCK_D is a power of two."""
    DV_PARTS: int
    """Number of tiles into which the columns of v are divided; 1 if BLOCK_DV is a power of two."""
    O_LEFT: int
    """Columns of O's left accumulator: all, if BLOCK_DV is a power of two."""
    O_RIGHT: int
    """Columns of O's right accumulator; 0 if there is none."""
    QK_COLUMNS: int
    """Columns of q and k that are multiplied. Columns past head_dim are zeros."""
    BLOCK_M: int
    BLOCK_N: int
    WARPGROUPS: int
    STAGES: int
    Q_STAGES: int
    PING_PONG: bool
    Q_HOLDS_O: bool
    Q_IN_REGISTERS: int
    """Number of the first columns of q, which stay in registers; 0 if none do."""
    O_IN_PARTS: bool
    LAZY_RESCALE: bool
    PIN_WAIT: bool
    K_BY_PARTS: bool
    """With a single stage, each of the D_PARTS tiles of a block of k has a channel, and is loaded again as
    soon as its product is complete. A block of v is loaded after the next block of k, whose memory is free
    earlier."""
    COLUMN_SPLITS: int
    """Number of work tiles for the same query rows, each of which computes BLOCK_DV columns of the output. A
    head of the schedule is one of these parts of a query head."""
    PROGRAMS: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    PRODUCER_WARPS: int
    KEY_SCALES: ClassVar[bool] = False


F = ForwardConfig
_M128_N128 = F(2, 128, paired_below=4096, QUEUED=True)
_M128_N64 = F(2, 64)
_M128_N128_TWO_Q = F(2, 128, Q_STAGES=2)
_M128_N128_TWO_Q_PING_PONG = replace(_M128_N128_TWO_Q, PING_PONG=True)
_M192_N128 = F(3, 128, Q_STAGES=2, PING_PONG=True)
_M192_N128_FREE = replace(_M192_N128, PING_PONG=False)
_M128_N128_Q128 = F(2, 128, Q_IN_REGISTERS=128, QUEUED=True)
_M128_N128_LAZY = F(2, 128, Q_STAGES=2, LAZY_RESCALE=True)
_M128_N128_LAZY_PING_PONG = replace(_M128_N128_LAZY, PING_PONG=True)
_M128_N64_LAZY = F(2, 64, STAGES=4, Q_STAGES=2, LAZY_RESCALE=True)
_M128_N64_SHARED = F(2, 64, STAGES=3, Q_STAGES=2, PROGRAMS=2)
_M128_N64_SHARED_LAZY = replace(_M128_N64_SHARED, LAZY_RESCALE=True)
_M64_N128 = F(1, 128, Q_STAGES=2, paired_below=0)
_M64_N128_SHARED = replace(_M64_N128, PROGRAMS=2)
_M64_N128_LAZY = replace(_M64_N128, LAZY_RESCALE=True)
_M64_N64_LAZY = F(1, 64, Q_HOLDS_O=True, LAZY_RESCALE=True, paired_below=0)
_M64_N64_LAZY_Q128 = replace(_M64_N64_LAZY, Q_IN_REGISTERS=128)
_D96_N128 = F(2, 128, Q_STAGES=2, O_IN_PARTS=True, LAZY_RESCALE=True)
_D96_N128_PING_PONG = replace(_D96_N128, PING_PONG=True)
_D96_M64 = replace(_D96_N128, warpgroups=1, paired_below=0)
_D160_N128 = F(2, 128, Q_HOLDS_O=True, paired_below=1024, QUEUED=True)
_D192_N128 = F(2, 128, Q_HOLDS_O=True, paired_below=1024, QUEUED=True)
_D192_N64_Q128_PINNED = F(
    2, 64, STAGES=3, Q_HOLDS_O=True, Q_IN_REGISTERS=128, LAZY_RESCALE=True, PIN_WAIT=True
)  # fmt: skip
_D192_N64_Q128 = replace(_D192_N64_Q128_PINNED, PIN_WAIT=False, paired_below=1024, QUEUED=True)
_D192_N64_Q128_O_IN_PARTS = replace(
    _D192_N64_Q128_PINNED, STAGES=2, Q_HOLDS_O=False, O_IN_PARTS=True, PIN_WAIT=False, paired_below=4096
)
_D256_N64_O_IN_PARTS = F(2, 64, O_IN_PARTS=True, LAZY_RESCALE=True, paired_below=4096)
_D256_N64_PINNED = F(2, 64, Q_HOLDS_O=True, LAZY_RESCALE=True, PIN_WAIT=True)
_D256_N64_Q128_PINNED = replace(_D256_N64_PINNED, Q_IN_REGISTERS=128, PING_PONG=True)
_D256_N64_Q128 = F(2, 64, Q_HOLDS_O=True, Q_IN_REGISTERS=128, LAZY_RESCALE=True, paired_below=4096)
_D512_N64 = F(
    2, 64, STAGES=1, Q_HOLDS_O=True, Q_IN_REGISTERS=128, LAZY_RESCALE=True, paired_below=4096
)  # fmt: skip
"""Configuration for head sizes over 256: 224 KiB of shared memory, 128 of them for q."""
PARTIAL = F(2, 128, O_IN_PARTS=True, QUEUED=True, paired_below=4096)
"""Configuration for results in float32 and head sizes up to 128: out is stored in parts, to save memory."""
PARTIAL_Q = replace(PARTIAL, Q_IN_REGISTERS=128)
"""PARTIAL for q of 128 columns, which fit in registers."""
PARTIAL_Q_WINDOWED = replace(PARTIAL_Q, PIN_WAIT=True)
ANY_LENGTH = 2**31

# (columns of q and k, columns of v, windowed) -> entries (keys, config). The first entry with more keys than
# a row sees is used. A causal mask is a window. A config is None where tiles with more columns are faster.
# Measured on H100 and H200 for S = 77 to 32760 (docs/measured). A comment has what was measured against the
# choice before it, as a ratio of speeds (benchmarks/results/experiments/hopper_forward.json).
_TABLE: dict[tuple[int, int, bool], tuple[tuple[int, ForwardConfig | None], ...]] = {
    # Exponentials bound these: 16 a clock, as scores of 32 columns take half of the products' time or less.
    # With 128 keys a warp issues 6.2 instructions a score and thread, with 64 keys 7.6.
    (32, 32, False): (
        (513, _M128_N64_SHARED),  # heads of 32, 512 keys: 139 us, three warpgroups 152, ping-pong 140
        # 1,024 queries fill 89 % of tiles of 192 rows. With heads of 32 these take 263 us, 128 rows with
        # ping-pong 248. Where 192 divides the queries, 128 rows are 4 to 8 % slower (768 to 1,920 queries).
        (1025, _M128_N128_TWO_Q_PING_PONG),
        (ANY_LENGTH, _M192_N128_FREE),  # ping-pong: within 3 %
    ),
    (32, 32, True): (
        (4096, _M128_N64_SHARED),  # two programs share a multiprocessor: 1.157, one 1.048
        (ANY_LENGTH, _M192_N128_FREE),  # not measured
    ),
    (64, 64, False): (
        (320, _M128_N64_SHARED),  # 64 images of 197 tokens 1.581, S 257 1.078, but S 384 0.926
        (ANY_LENGTH, _M192_N128),  # two warpgroups, two stages of q, ping-pong: S 2048 0.86
    ),
    (64, 64, True): (
        (640, _M128_N64_SHARED),  # S 512 1.059, but S 2000 0.931
        (4096, _M128_N128_TWO_Q),  # two warpgroups: S 512 146 -> 234 TFLOP/s, S 2048 358 -> 413
        (ANY_LENGTH, _M192_N128),  # from S 4096 on three warpgroups are faster
    ),
    (128, 128, False): (
        (2048, _M128_N128_LAZY),  # a second stage of q, lazy: S 512 1.117, S 1024 1.033
        (4096, _M128_N128),  # lazy 0.935 to 0.996
        (24576, _M128_N128_Q128),  # q in registers: 1 to 2 % faster from S 4096 on
        (ANY_LENGTH, _M128_N128),  # q not in registers: S 32760 1.057
    ),
    (128, 128, True): (
        (1024, _M128_N64_LAZY),  # blocks of 64 keys: S 512 1.036 and 1.045, but S 1024 0.986
        (2048, _M128_N128_LAZY_PING_PONG),  # ping-pong, lazy: S 512 1.076, S 1024 1.022
        (8192, _M128_N128),  # q in registers is 2 to 4 % slower in short sequences
        (ANY_LENGTH, _M128_N128_Q128),
    ),
    (256, 256, False): (
        (1024, _D256_N64_O_IN_PARTS),  # O by tiles of 64 columns, lazy: S 512 1.070
        (8192, _D256_N64_PINNED),  # the wait for P V pinned: 0.993 to 1.089, best without a mask
        (ANY_LENGTH, _D256_N64_Q128_PINNED),
    ),
    (256, 256, True): (
        (1024, _D256_N64_O_IN_PARTS),  # as without a mask: S 512 1.054
        (ANY_LENGTH, _D256_N64_Q128),  # q in registers: 2 to 7 % faster; lazy: 0.996 to 1.079
    ),
    (192, 128, False): ((ANY_LENGTH, _D192_N128),),  # blocks of 128 keys: S 4096 1.207
    # S 4096 1.195, S 8192 1.229. The queue from 1024 keys on, not from 4096: S 2709 1.148, S 2942 1.040,
    # and no difference with one round of pairs. Times of one kernel vary by up to 5 %.
    (192, 128, True): ((ANY_LENGTH, _D192_N128),),
    (96, 96, False): (
        # Tiles of 128 columns. 96 columns were 0.868 to 1.002 for short sequences, and 0.914 to 1.057 with
        # ping-pong: images at head_dim 72 lose what those at 80 and 96 gain.
        (4096, None),
        (ANY_LENGTH, _D96_N128),  # S 4096, D 80: 1.081
    ),
    (96, 96, True): (
        (4096, _D96_N128_PING_PONG),  # with ping-pong, S 2000, D 80 and 96: 1.065, 1.030
        (ANY_LENGTH, None),  # with ping-pong, S 4096, D 96: 0.983, S 6000, D 80: 0.981
    ),
    (160, 160, False): ((ANY_LENGTH, _D160_N128),),  # five boxes of 32 columns: S 4096 1.200
    (160, 160, True): ((ANY_LENGTH, _D160_N128),),  # S 2000, D 144 1.536, D 160 1.333 with the queue
    (192, 192, False): (
        (1024, _D192_N64_Q128_O_IN_PARTS),  # O in parts: S 512 1.063
        (ANY_LENGTH, _D192_N64_Q128_PINNED),  # pinned without a mask, as at 256 columns
    ),
    (192, 192, True): (
        (1024, _D192_N64_Q128_O_IN_PARTS),
        (ANY_LENGTH, _D192_N64_Q128),  # with the queue: S 8192 1.048
    ),
    (512, 512, False): ((ANY_LENGTH, _D512_N64),),  # other tiles do not fit; not measured against others
    (512, 512, True): ((ANY_LENGTH, _D512_N64),),
}
_TABLE |= {
    (d, dv, windowed): ((ANY_LENGTH, _M128_N128 if max(d, dv) <= 128 else _M128_N64),)
    for d, dv in permutations((64, 128, 256), 2)
    for windowed in (False, True)
}
"""Unequal head sizes have tiles that fit in shared memory. These configurations were not timed."""
_OTHER_ROWS: dict[ForwardConfig, tuple[ForwardConfig, ...]] = {
    _M128_N128_TWO_Q: (_M192_N128, _M64_N128, _M64_N128_SHARED),
    _M128_N128_TWO_Q_PING_PONG: (_M192_N128_FREE, _M64_N128),
    _M192_N128: (_M128_N128_TWO_Q, _M64_N128),
    _M192_N128_FREE: (_M128_N128_TWO_Q, _M64_N128),
    _M128_N128: (_M64_N128,),
    _M128_N128_LAZY: (_M64_N128_LAZY,),
    _M128_N128_LAZY_PING_PONG: (_M64_N128_LAZY,),
    _D96_N128_PING_PONG: (_D96_M64,),
    _D256_N64_O_IN_PARTS: (_M64_N64_LAZY,),
    _D256_N64_PINNED: (_M64_N64_LAZY,),
    _D256_N64_Q128: (_M64_N64_LAZY_Q128,),
}
"""Configuration -> configurations with tiles of other rows that compute the same bits. The fields that decide
the order of a row's sums are equal: ``BLOCK_N``, ``LAZY_RESCALE`` and ``Q_IN_REGISTERS``. Only then may the
number of sequences choose between them, since the output of a sequence must not depend on the others.

Tiles of 64 rows, for one sequence of 1024 with 8 heads, in us: head_dim 64 causal 15.0 instead of 17.6, 128
causal 19.0 instead of 22.4, 256 causal 28.1 instead of 30.9, 64 full 14.4 instead of 20.3. Two programs with
such tiles on each multiprocessor: 6 x 1480, 4 heads of 64, causal, 27.7 instead of 30.2."""
LONG = 3072
"""From here on, packed sequences under a causal mask have tiles of 192 rows at head_dim 64. Three drawn
batches take 0.918 and 0.977 of the time of 128 rows where heads share tiles besides, and 0.996 where they do
not. Estimated from COSTS: 0.90 to 0.96, and 0.93 to 1.01. Under a window to the left the kernel of 192 rows
spills 452 bytes, that of 128 rows 8."""
SHORT = 128
_SHORT_ROWS: dict[ForwardConfig, ForwardConfig] = {
    _M128_N64_LAZY: F(1, 64, Q_STAGES=2, Q_HOLDS_O=True, LAZY_RESCALE=True, PROGRAMS=2),
    _M128_N64_SHARED: F(1, 64, Q_STAGES=2, Q_HOLDS_O=True, PROGRAMS=3),
    _M128_N64_SHARED_LAZY: F(1, 64, Q_STAGES=2, Q_HOLDS_O=True, LAZY_RESCALE=True, PROGRAMS=3),
    _D96_N128_PING_PONG: F(1, 64, Q_STAGES=2, Q_HOLDS_O=True, LAZY_RESCALE=True, PROGRAMS=3),
}
"""Configuration -> another one for packed sequences of at most SHORT tokens. Most have one block of keys, so
a program mostly waits: for tiles, and for its own warpgroup. More programs with single warpgroups share a
multiprocessor instead. Of documents of 1 to 40 tokens, a query tile then takes 0.9 (three programs) or 1.4 us
of a multiprocessor, and one of two warpgroups 3.5. Of documents of 16 to 128 tokens, two in three fill less
than half of a tile of 128 rows. At head_dim 80 and 96, documents of 1 to 40 tokens take 0.32 of the time of
tiles of two warpgroups, those of 16 to 128 tokens 0.51 and 0.53.

Several sequences in one tile would fill it better. But P of a hidden key is 0, and 0 times a NaN or an
infinity among the values of one sequence would reach the others. A row's sums would also depend on where its
sequence lies in the tile."""
# Modifiers -> configs for head sizes up to 64, 128 and, with functions, 256. All have two consumers: a 16-bit
# tile of a bias then fits in registers, and blocks of block masks consist of tiles of 128 rows. Other
# combinations of modifiers are refused.
_MODIFIED: dict[tuple[str, ...], tuple[ForwardConfig, ...]] = {
    ("functions",): (  # blocks of 64 keys: 947 instead of 827 us for a causal mask_mod
        F(2, 128, Q_STAGES=2, QUEUED=True),
        F(2, 128, QUEUED=True),
        F(2, 64, O_IN_PARTS=True, LAZY_RESCALE=True, QUEUED=True),
    ),
    ("dropout",): (  # lazy rescaling, three warpgroups, and another choice of PIN_WAIT were slower
        F(2, 128, Q_STAGES=2, PIN_WAIT=True, QUEUED=True, paired_below=4096),
        F(2, 128, QUEUED=True, paired_below=4096),
    ),
    ("bias",): (  # three warpgroups with blocks of 64 keys took 1.51 to 1.67 times the time without a bias
        F(2, 128, Q_STAGES=2, BIAS_STAGES=2, paired_below=4096, QUEUED=True),
        F(2, 128, paired_below=4096, QUEUED=True),
    ),
}
MAX_COLUMNS_OF_MODIFIERS = {kind: 64 << (len(configs) - 1) for (kind,), configs in _MODIFIED.items()}
"""Largest head sizes with each kind of modifier."""
PARTS_OF = {96: 3, 160: 5, 192: 3, 512: 4}
"""Number of tiles into which columns are divided if their number is not a power of two, or over 256."""
_FEWER_COLUMNS = (32, 96, 160, 192)
BETTER_FILLED = 1.15
"""Blocks of 64 keys replace blocks of 128 keys if the filled fraction of their columns (:func:`_fills`) is
larger by this factor."""


# (columns of q and k, of v) -> (keys, config), for masks with both edges. Searched before _TABLE.
_BOTH_EDGES: dict[tuple[int, int], tuple[tuple[int, ForwardConfig], ...]] = {
    (64, 64): ((512, _M128_N64_SHARED_LAZY),),  # a window of 128 with packed heads: 1.167, not lazy 1.143
    (128, 128): (
        (1024, _M128_N64_LAZY),  # a window of 512 over blocks of 128 keys: packed 1.09 and 1.15, dense 1.03
        (2048, _M128_N128),  # a window of 1024: packed 1.07 to 1.08, dense 1.04, at head_dim 96 1.06 and 1.20
    ),
}
_BOTH_EDGES_PACKED = _BOTH_EDGES | {
    # Six drawn batches: 1.03 to 1.06 with windows of 2048 and 4096, over two or three warpgroups; 1.02 with
    # windows of 512, over the same tiles without lazy rescaling. Dense calls: 0.92 to 0.98.
    (64, 64): ((4097, _M128_N64_SHARED_LAZY),),
}


def tile_columns(problem: Problem) -> tuple[int, int]:
    """Return the widths of tiles in shared memory, in columns: (width of q and k, width of v).

    Each head size can use a few widths. The result is the pair with the smallest sum for which ``_TABLE`` has
    a configuration for this number of keys. The width of v is a power of two for calls with modifiers or
    partial results, which do not use ``_TABLE``, or if this release of Triton requires it.
    """
    if max(problem.head_dim, problem.head_dim_v) > MAX_COLUMNS_OF_V:
        return 512, 512
    if problem.invariant:  # of_tables has two configurations for these
        return padded_columns(problem.head_dim), padded_columns(problem.head_dim_v)
    windowed, keys = is_windowed(problem), problem.seqlen_k
    others = bool(modifiers_of(problem)) or problem.partial
    of_qk, of_v = (_columns_for(size) for size in (problem.head_dim, problem.head_dim_v))
    if others or not VIEWS_SPAN_TILES:
        of_v = of_v[-1:]
    pairs = ((d, dv) for d in of_qk for dv in of_v)
    return min((pair for pair in pairs if _row(*pair, windowed, keys) is not None), key=sum)


def _columns_for(size: int) -> list[int]:
    """Return the tile widths in shared memory, in columns, that a head size can use.

    160 columns are possible only for head sizes that are multiples of 16. They are loaded as five TMA boxes
    of 32 columns. Such boxes need rows in global memory that are multiples of 32 bytes.
    """
    found = [n for n in (*_FEWER_COLUMNS, padded_columns(size)) if size <= n <= padded_columns(size)]
    return [n for n in found if n != 160 or size % 16 == 0]


def _row(block_d: int, block_dv: int, windowed: bool, keys: int) -> ForwardConfig | None:
    rows = _TABLE.get((block_d, block_dv, windowed), ())
    return next((config for most, config in rows if keys < most), None)


def accumulators(block_dv: int, head_dim_v: int) -> tuple[int, int]:
    """Return the numbers of columns of O's left and right accumulators; the right one has 0 if there is one.

    One wgmma computes a power of two of columns, at least 16.
    """
    left = 1 << (block_dv.bit_length() - 1)
    if left == block_dv:
        return left, 0
    return left, max(16, 1 << (head_dim_v - left - 1).bit_length())


def choose(problem: Problem) -> ForwardConfig:
    """Return the configuration of a problem.

    It is that of the tables above, or an alternative that takes less time because the call has few work tiles
    (``rounds``), or because its packed sequences are short.
    """
    config = of_tables(problem)
    if modifiers_of(problem) or problem.partial:
        return config
    if problem.varlen and max(problem.seqlen_q, problem.seqlen_k) <= SHORT:
        return _SHORT_ROWS.get(config, config)
    left, _ = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    if problem.varlen and problem.seqlen_k >= LONG and left == UNLIMITED and config == _M128_N128_TWO_Q:
        return _M192_N128
    return fastest(problem, alternatives(config), partial(measured_costs, tile_columns(problem)))


@cache
def alternatives(config: ForwardConfig) -> tuple[ForwardConfig, ...]:
    """Return ``config`` and others that compute the same bits: with tiles of other rows, or without pairs."""
    same = (config, *_OTHER_ROWS.get(config, ()))
    single = (replace(other, paired_below=0) for other in same if other.paired_below)
    return (*same, *single)


def of_tables(problem: Problem) -> ForwardConfig:
    """Return the configuration of a problem from the tables above, without regard to its number of tiles."""
    modifiers = modifiers_of(problem)
    if modifiers:
        widest = max(padded_columns(problem.head_dim), padded_columns(problem.head_dim_v))
        own = _MODIFIED[modifiers][(64, 128, 256).index(widest)]
        # Under a mask a warpgroup waits more. With LATE_BITS it computes random bits during these waits.
        return replace(own, LATE_BITS=problem.dropout_p > 0 and is_windowed(problem))
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    windowed, seen = is_windowed(problem), problem.seqlen_k
    sizes = tile_columns(problem)
    if problem.invariant:  # as decode.kernel: blocks of 128 keys, not lazy, q not in registers
        return _M128_N128_TWO_Q if sizes == (64, 64) else _M128_N128
    if problem.partial:
        if sizes[0] < 128:
            return PARTIAL
        return PARTIAL_Q_WINDOWED if windowed else PARTIAL_Q
    if left != UNLIMITED and right != UNLIMITED:
        seen = min(seen, left + 1 + right)
        of_edges = _BOTH_EDGES_PACKED if problem.varlen else _BOTH_EDGES
        for keys, own in of_edges.get(sizes, ()):
            if seen < keys:
                return own
    config = _row(*sizes, windowed, seen)
    assert config is not None
    if config == _M128_N128_LAZY:
        filled, better = _fills(seen, config.BLOCK_N), _fills(seen, _M128_N64_LAZY.BLOCK_N)
        return _M128_N64_LAZY if better > BETTER_FILLED * filled else config
    if config == _M128_N64_LAZY and blocks_stand_alone(problem, config.BLOCK_M):
        return _M128_N128_LAZY
    return config


def _fills(keys: int, block_n: int) -> float:
    """Return the fraction of filled columns if ``keys`` keys are divided into blocks of ``block_n``."""
    return keys / (math.ceil(keys / block_n) * block_n) if keys else 1.0


def every_row() -> Iterator[tuple[int, int, bool, int, ForwardConfig]]:
    """Yield (columns of q and k, columns of v, windowed, keys, config) for each entry of ``_TABLE``.

    The entry is for rows that see fewer than ``keys`` keys. Entries without a configuration and repeated
    configurations are left out.
    """
    for (block_d, block_dv, windowed), rows in _TABLE.items():
        if block_dv in _FEWER_COLUMNS and not VIEWS_SPAN_TILES:
            continue
        known: list[ForwardConfig | None] = [None]
        for keys, config in rows:
            if config is not None and config not in known:
                yield block_d, block_dv, windowed, keys, config
            known.append(config)
