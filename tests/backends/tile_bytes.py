"""Shared memory that the tiles of Hopper's kernels take, in bytes. Barriers take a few dozen bytes more."""

from __future__ import annotations

from flashtile.backends.hopper.backward.config import (
    GRADIENT_PART,
    POSTPROCESS_CHUNK,
    POSTPROCESS_STAGES,
    BackwardConfig,
    WideBackwardConfig,
)
from flashtile.backends.hopper.config import MAX_COLUMNS_OF_V, WARPGROUP_ROWS
from flashtile.backends.hopper.forward.config import O_PART, ForwardConfig
from flashtile.backends.hopper.fp8.config import Fp8Config


def of_forward(config: ForwardConfig, block_d: int, block_dv: int) -> int:
    q = config.Q_STAGES * config.BLOCK_M * block_d
    block_dv = min(block_dv, MAX_COLUMNS_OF_V)
    kv = config.STAGES * config.BLOCK_N * (block_d + block_dv)
    o = 0 if config.Q_HOLDS_O else config.BLOCK_M * (2 * O_PART if config.O_IN_PARTS else block_dv)
    return 2 * (q + kv + o)


def of_fp8(config: Fp8Config, block_d: int, block_dv: int, v_transposed: bool) -> int:
    q = config.Q_STAGES * config.BLOCK_M * block_d
    kv = config.STAGES * config.BLOCK_N * (block_d + block_dv)
    v_rows = 0 if v_transposed else config.STAGES * config.BLOCK_N * block_dv
    o = 2 * config.BLOCK_M * block_dv
    return q + kv + v_rows + o


def of_backward(config: BackwardConfig, block_d: int, block_dv: int) -> int:
    """Of the kernel for head sizes up to 128."""
    both = block_d + block_dv
    tiles = (config.STAGES * config.BLOCK_M + config.BLOCK_N) * both
    ds = 2 * config.BLOCK_N * config.BLOCK_M
    gradients = config.BLOCK_N * min(GRADIENT_PART, block_d)
    statistics = 2 * config.STAGES * config.BLOCK_M
    dq = config.BLOCK_M * block_d
    if config.ONE_BLOCK:
        return 2 * (tiles + ds + gradients + dq) + 4 * statistics
    chunks = min(POSTPROCESS_CHUNK, 2 * 8 * block_d) * (POSTPROCESS_STAGES + 1)
    return 2 * (tiles + ds + gradients) + 4 * (statistics + dq + chunks)


def of_wide_backward(config: WideBackwardConfig, block_d: int, block_dv: int) -> tuple[int, int]:
    """Of the kernels of (dK and dV, dQ) for head sizes over 128."""
    both = block_d + block_dv
    if config.COLUMN_SPLITS > 1:
        return _of_halves(config, block_d)
    rows, extra = config.STAGES * config.BLOCK_M, config.EXTRA_Q * config.BLOCK_M
    weights = 2 * config.BLOCK_M * config.BLOCK_N
    dk_columns = GRADIENT_PART if extra else block_d
    gradients = 0 if block_d == block_dv else config.BLOCK_N * (dk_columns + block_dv)
    tiles = (rows + config.BLOCK_N) * both + extra * block_d
    dkv = 2 * (tiles + weights + gradients) + 4 * (2 * rows + extra)
    v_stages = 1 if block_d == block_dv else 2
    dq = 2 * (2 * WARPGROUP_ROWS * both + config.BLOCK_N * (config.STAGES * block_d + v_stages * block_dv))
    return dkv, dq


def _of_halves(config: WideBackwardConfig, columns: int) -> tuple[int, int]:
    resident = 2 * WARPGROUP_ROWS * columns
    halves = 4 * config.STAGES + 1
    moving = halves * config.BLOCK_M * columns // 2
    exchanged = 2 * WARPGROUP_ROWS * config.BLOCK_M
    statistics = halves * config.BLOCK_M
    return 2 * (resident + moving + exchanged) + 4 * statistics, 2 * (resident + moving + 2 * exchanged)
