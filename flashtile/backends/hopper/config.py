"""Configurations of the Hopper kernels: data, chosen by head sizes and mask. Nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.problem import Problem

WARPGROUP_ROWS = 64
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = {2: 240, 3: 160}
"""By number of consumer warpgroups; with a producer's 24 they fill the 64 K registers of a multiprocessor."""
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
        Q_IN_REGISTERS: columns of q that stay in registers, which spares shared memory a part of its reads.
        paired_below: under a mask with a right edge, sequences of fewer keys take their blocks of queries in
            pairs (``schedule.blocks_of``), longer ones the dearest of all heads first.
    """

    warpgroups: int
    BLOCK_N: int
    STAGES: int = 2
    Q_STAGES: int = 1
    PING_PONG: bool = False
    Q_HOLDS_O: bool = False
    Q_IN_REGISTERS: int = 0
    paired_below: int = 8192

    @property
    def BLOCK_M(self) -> int:
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
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


F = ForwardConfig
_CONFIGS: dict[tuple[int, int, bool], ForwardConfig] = {
    (64, 64, False): F(3, 128, Q_STAGES=2, PING_PONG=True),
    (64, 64, True): F(3, 128, Q_STAGES=2, PING_PONG=True),
    (64, 128, False): F(2, 128),
    (64, 128, True): F(2, 128),
    (64, 256, False): F(2, 64),
    (64, 256, True): F(2, 64),
    (128, 64, False): F(2, 128),
    (128, 64, True): F(2, 128),
    (128, 128, False): F(2, 128),
    (128, 128, True): F(2, 128),
    (128, 256, False): F(2, 64),
    (128, 256, True): F(2, 64),
    (256, 64, False): F(2, 64),
    (256, 64, True): F(2, 64),
    (256, 128, False): F(2, 64),
    (256, 128, True): F(2, 64),
    (256, 256, False): F(2, 64, Q_HOLDS_O=True),
    (256, 256, True): F(2, 64, PING_PONG=True, Q_HOLDS_O=True),
}
"""(padded head_dim, padded head_dim_v, windowed) -> config; causal is a window."""


def padded(head_dim: int) -> int:
    """The head size that the tiles have: TMA fills what is missing with zeros."""
    return next(size for size in (64, 128, 256) if head_dim <= size)


def choose(problem: Problem) -> ForwardConfig:
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    return _CONFIGS[padded(problem.head_dim), padded(problem.head_dim_v), left >= 0 or right >= 0]


def smem_bytes(config: ForwardConfig, block_d: int, block_dv: int) -> int:
    """Shared memory of the tiles, in bytes, as the kernel allocates them (barriers take a few dozen more)."""
    q = config.Q_STAGES * config.BLOCK_M * block_d
    kv = config.STAGES * config.BLOCK_N * (block_d + block_dv)
    o = 0 if config.Q_HOLDS_O else config.BLOCK_M * block_dv
    return 2 * (q + kv + o)
