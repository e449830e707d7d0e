"""Configurations of the Hopper kernels: data, chosen by head sizes and mask. Nothing is tuned at run time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashtile.problem import UNLIMITED, Problem

WARPGROUP_ROWS = 64
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""By number of consumer warpgroups; with a producer's 24 they fill the 64 K registers of a multiprocessor."""
KEEPER_WARPS = 2
"""Warps of the backward that make dQ of its sums, beside its producer and its adder."""
KEEPER_CHUNK = 1024
KEEPER_STAGES = 3
"""Sums that they take at a time, and how many such chunks they have on the way."""
GRADIENT_PART = 64
"""Columns of dK and dV that leave together."""
O_PART = 64
"""Columns of the output that leave together with ``O_IN_PARTS``."""
LAUNCH_REGISTERS = {2: 168, 3: 128}
"""What each thread starts with, before the partitions trade: 65536 over all threads, in steps of 8."""


@dataclass(frozen=True)
class ForwardConfig:
    """Tile and pipeline of the forward kernel.

    Args:
        warpgroups: consumers of 64 rows each.
        BLOCK_N: keys of a block.
        STAGES, Q_STAGES: blocks of keys and values, and blocks of queries, in shared memory.
        PING_PONG: consumers take turns on the tensor cores.
        Q_HOLDS_O: the output leaves through the queries' shared memory, where there is no room for its own.
        O_IN_PARTS: the output leaves ``O_PART`` columns at a time, through two small tiles of each consumer,
            so that the queries' shared memory is free for the next ones at once.
        Q_IN_REGISTERS: columns of q that stay in registers, which spares shared memory a part of its reads.
        LAZY_RESCALE: the running maximum of a row may lag behind by a factor of 2 ** 8, so that most blocks
            of keys leave O as it is; a warp multiplies it only where one of its rows has a new maximum.
        PIN_WAIT: the wait for P V stays behind the exponentials, where the assembler would move it in front.
        paired_below: under a mask with a right edge, sequences of fewer keys take their blocks of queries in
            pairs (``schedule.blocks_of``), longer ones the dearest of all heads first.
        QUEUED: these longer ones from a queue, unless there is a left edge, too, and most blocks cost the
            same. Those of a variable-length batch always are.
        spill_budget: bytes of register spills that were measured and accepted, none of them in the loop over
            uncut blocks; features_spill_budget: the same with every feature at once.
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
    paired_below: int = 8192
    QUEUED: bool = False
    spill_budget: int = 0
    features_spill_budget: int = 0

    @property
    def BLOCK_M(self) -> int:  # noqa: N802 - as in the kernel
        return self.warpgroups * WARPGROUP_ROWS


@dataclass(frozen=True)
class Variant:
    """Everything that the forward kernel is compiled for: one constant of the kernel."""

    VARLEN: bool
    SEQUSED: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    SOFTCAP: bool
    ALIBI: bool
    SINK: bool
    EVEN_N: bool
    """No block has keys behind the last, in any sequence."""
    QUEUED: bool
    """Programs take items from a queue, as they have time, and not in turn."""
    PAIRED: bool
    """Programs take blocks of query rows in pairs that cost the same together (``schedule.blocks_of``)."""
    PACK: int
    """Query heads of a key head that share a tile, row by row."""
    KV_GROUP: int
    """Tiles' heads to a key head."""
    BENT: bool
    """Scores are more than raw products times a positive scale."""
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    WARPGROUPS: int
    STAGES: int
    Q_STAGES: int
    PING_PONG: bool
    Q_HOLDS_O: bool
    Q_IN_REGISTERS: int
    """Columns of q that stay in registers, 0 or half of BLOCK_D."""
    O_IN_PARTS: bool
    LAZY_RESCALE: bool
    PIN_WAIT: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


@dataclass(frozen=True)
class BackwardConfig:
    """Tile and pipeline of the backward kernel: two consumers of 64 keys each.

    Args:
        BLOCK_M: query rows of a step, 64 or 128.
        STAGES: blocks of queries and output gradients in shared memory.
        spill_budget, features_spill_budget: as in :class:`ForwardConfig`; causal_spill_budget: under a mask.
    """

    BLOCK_M: int
    STAGES: int = 2
    spill_budget: int = 0
    causal_spill_budget: int = 0
    features_spill_budget: int = 0

    @property
    def BLOCK_N(self) -> int:  # noqa: N802 - as in the kernel
        return 2 * WARPGROUP_ROWS


@dataclass(frozen=True)
class WideBackwardConfig(BackwardConfig):
    """Of the two kernels for head sizes over 128: a consumer of 64 keys each for dK and dV, two of 64 rows
    for dQ.

    Args:
        paired_below: of the kernel of dQ, as in :class:`ForwardConfig`.
    """

    BLOCK_M: int = WARPGROUP_ROWS
    causal_spill_budget: int = 88
    features_spill_budget: int = 480
    paired_below: int = 8192

    @property
    def BLOCK_N(self) -> int:  # noqa: N802 - as in the kernels
        return WARPGROUP_ROWS


@dataclass(frozen=True)
class BackwardVariant:
    """Everything that the backward kernel is compiled for: one constant of the kernel."""

    VARLEN: bool
    SEQUSED: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    SOFTCAP: bool
    ALIBI: bool
    BENT: bool
    """Scores are more than raw products times a positive scale."""
    EVEN_N: bool
    """No block has keys behind the last, in any sequence."""
    MASKED: bool
    """Some block has pairs of row and key that must not count."""
    DETERMINISTIC: bool
    """Blocks of keys add to dQ in one order."""
    GROUP: int
    """Query heads to a key head."""
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


F = ForwardConfig
_TWO = F(2, 128, paired_below=4096, QUEUED=True, features_spill_budget=60)
_NARROW = F(2, 64, spill_budget=28, features_spill_budget=64)
_THREE = F(3, 128, Q_STAGES=2, PING_PONG=True, spill_budget=268, features_spill_budget=484)
_TWO_Q = F(2, 128, Q_IN_REGISTERS=128, QUEUED=True, spill_budget=64, features_spill_budget=196)
_SHORT = F(2, 128, Q_STAGES=2, LAZY_RESCALE=True)
_SHORT_TURNS = replace(_SHORT, PING_PONG=True, spill_budget=36, features_spill_budget=88)
_SHORT_BLOCKS = F(2, 64, STAGES=4, Q_STAGES=2, LAZY_RESCALE=True, spill_budget=36)
_WIDE_SHORT = F(
    2, 64, O_IN_PARTS=True, LAZY_RESCALE=True, paired_below=4096, spill_budget=44, features_spill_budget=44
)
_WIDE = F(2, 64, Q_HOLDS_O=True, LAZY_RESCALE=True, PIN_WAIT=True)
_WIDE_Q = replace(_WIDE, Q_IN_REGISTERS=128, PING_PONG=True, spill_budget=24)
_WIDE_CAUSAL = F(
    2,
    64,
    Q_HOLDS_O=True,
    Q_IN_REGISTERS=128,
    LAZY_RESCALE=True,
    paired_below=4096,
    spill_budget=116,
    features_spill_budget=244,
)
ANY_LENGTH = 2**31

# (padded head_dim, padded head_dim_v, windowed) -> (keys, config) where no row sees as many keys; causal is a
# window.
# H100, S = 512 to 16384: docs/measured.md. Rows of unequal head sizes have the tiles that fit; not timed.
_TABLE: dict[tuple[int, int, bool], tuple[tuple[int, ForwardConfig], ...]] = {
    (64, 64, False): ((ANY_LENGTH, _THREE),),
    (64, 64, True): ((4096, F(2, 128, Q_STAGES=2, features_spill_budget=8)), (ANY_LENGTH, _THREE)),
    (128, 128, False): ((2048, _SHORT), (4096, _TWO), (ANY_LENGTH, _TWO_Q)),
    (128, 128, True): ((1024, _SHORT_BLOCKS), (2048, _SHORT_TURNS), (8192, _TWO), (ANY_LENGTH, _TWO_Q)),
    (256, 256, False): ((1024, _WIDE_SHORT), (8192, _WIDE), (ANY_LENGTH, _WIDE_Q)),
    (256, 256, True): ((1024, _WIDE_SHORT), (ANY_LENGTH, _WIDE_CAUSAL)),
    (64, 128, False): ((ANY_LENGTH, _TWO),),
    (64, 128, True): ((ANY_LENGTH, _TWO),),
    (128, 64, False): ((ANY_LENGTH, _TWO),),
    (128, 64, True): ((ANY_LENGTH, _TWO),),
    (64, 256, False): ((ANY_LENGTH, _NARROW),),
    (64, 256, True): ((ANY_LENGTH, _NARROW),),
    (128, 256, False): ((ANY_LENGTH, _NARROW),),
    (128, 256, True): ((ANY_LENGTH, _NARROW),),
    (256, 64, False): ((ANY_LENGTH, _NARROW),),
    (256, 64, True): ((ANY_LENGTH, _NARROW),),
    (256, 128, False): ((ANY_LENGTH, _NARROW),),
    (256, 128, True): ((ANY_LENGTH, _NARROW),),
}


# (padded head_dim, padded head_dim_v) -> the first rows of a mask with both edges, which both cut blocks.
_BOTH_EDGES: dict[tuple[int, int], tuple[tuple[int, ForwardConfig], ...]] = {
    (128, 128): ((2048, _SHORT_BLOCKS),),
}


def padded(head_dim: int) -> int:
    """The head size that the tiles have: TMA fills what is missing with zeros."""
    return next(size for size in (64, 128, 256) if head_dim <= size)


def choose(problem: Problem) -> ForwardConfig:
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    windowed = left != UNLIMITED or right != UNLIMITED
    block_d, block_dv = padded(problem.head_dim), padded(problem.head_dim_v)
    seen = problem.seqlen_k
    rows = _TABLE[block_d, block_dv, windowed]
    if left != UNLIMITED and right != UNLIMITED:
        seen = min(seen, left + 1 + right)
        rows = _BOTH_EDGES.get((block_d, block_dv), ()) + rows
    return next(config for keys, config in rows if seen < keys)


_BACKWARD: dict[tuple[int, int], BackwardConfig] = {
    (64, 64): BackwardConfig(128, spill_budget=32, causal_spill_budget=40, features_spill_budget=1824),
    (128, 128): BackwardConfig(64, spill_budget=40, causal_spill_budget=48, features_spill_budget=200),
    (64, 128): BackwardConfig(64, features_spill_budget=48),
    (128, 64): BackwardConfig(64, features_spill_budget=88),
}


def choose_backward(problem: Problem) -> BackwardConfig:
    """:class:`WideBackwardConfig` where either head size is over 128."""
    return _BACKWARD.get((padded(problem.head_dim), padded(problem.head_dim_v)), WideBackwardConfig())


def every_row() -> Iterator[tuple[int, int, bool, int, ForwardConfig]]:
    """(padded head_dim, padded head_dim_v, windowed, keys, config) of the whole table."""
    for (block_d, block_dv, windowed), rows in _TABLE.items():
        for keys, config in rows:
            yield block_d, block_dv, windowed, keys, config


def smem_bytes(config: ForwardConfig, block_d: int, block_dv: int) -> int:
    """Shared memory of the tiles, in bytes, as the kernel allocates them (barriers take a few dozen more)."""
    q = config.Q_STAGES * config.BLOCK_M * block_d
    kv = config.STAGES * config.BLOCK_N * (block_d + block_dv)
    o = 0 if config.Q_HOLDS_O else config.BLOCK_M * (2 * O_PART if config.O_IN_PARTS else block_dv)
    return 2 * (q + kv + o)


def backward_smem_bytes(config: BackwardConfig, block_d: int, block_dv: int) -> int:
    """The same of the backward kernel of five products."""
    both = block_d + block_dv
    tiles = (config.STAGES * config.BLOCK_M + config.BLOCK_N) * both
    ds = 2 * config.BLOCK_N * config.BLOCK_M
    gradients = config.BLOCK_N * GRADIENT_PART
    statistics = 2 * config.STAGES * config.BLOCK_M
    dq = config.BLOCK_M * block_d
    sums = KEEPER_CHUNK * (KEEPER_STAGES + 1)
    return 2 * (tiles + ds + gradients) + 4 * (statistics + dq + sums)


def wide_smem_bytes(config: WideBackwardConfig, block_d: int, block_dv: int) -> tuple[int, int]:
    """The same of the two kernels for head sizes over 128: of dK and dV, and of dQ."""
    both = block_d + block_dv
    rows = config.STAGES * config.BLOCK_M
    weights = 2 * config.BLOCK_M * config.BLOCK_N
    gradients = 0 if block_d == block_dv else config.BLOCK_N * both
    dkv = 2 * ((rows + config.BLOCK_N) * both + weights + gradients) + 4 * 2 * rows
    v_stages = 1 if block_d == block_dv else 2
    dq = 2 * (2 * WARPGROUP_ROWS * both + config.BLOCK_N * (config.STAGES * block_d + v_stages * block_dv))
    return dkv, dq
