"""Launcher of the FP8 attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.launch import KernelConfig, TokenStrides, outer_stride, padded, token_strides
from flashtile.backends.portable.fp8.attend import (
    Fp8AttendPointers,
    Fp8AttendVariant,
    Fp8Lengths,
    Fp8Numbers,
    Fp8ScaleStrides,
    Fp8Strides,
    attend_kernel,
)
from flashtile.problems.common import UNLIMITED
from flashtile.problems.fp8 import AttendTensors, Fp8Problem

K = KernelConfig


@dataclass(frozen=True)
class AttendConfig:
    """Tile of the kernel, and whether products take FP8 operands (``native``).

    Otherwise e4m3 operands are converted to float16, which is exact.
    """

    tile: KernelConfig
    native: bool


# (native, padded head_dim) -> tile. These tiles fit with few register spills. They have not been timed.
_TABLE: dict[tuple[bool, int], KernelConfig] = {
    (True, 32): K(64, 64, 4, 3),
    (True, 64): K(64, 64, 4, 3),
    (True, 128): K(64, 64, 4, 2),
    (True, 256): K(64, 64, 8, 1),
    (False, 32): K(64, 64, 4, 2),
    (False, 64): K(64, 32, 4, 2),
    (False, 128): K(64, 32, 4, 2),
    (False, 256): K(32, 32, 4, 1),
}
HEAD_DIMS = (32, 64, 128, 256)
MIN_WIDTH = HEAD_DIMS[0]
"""Minimum columns of a tile: an FP8 product of the tensor cores sums over 32 columns."""


def row(native: bool, width: int) -> AttendConfig:
    """Return the configuration in the table for these arguments. ``width`` is a padded head_dim."""
    return AttendConfig(_TABLE[native, width], native)


def choose(problem: Fp8Problem, native: bool) -> AttendConfig:
    return row(native, padded(max(problem.head_dim, problem.head_dim_v), MIN_WIDTH))


def fp8_attend_variant(problem: Fp8Problem, config: AttendConfig) -> Fp8AttendVariant:
    left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
    return Fp8AttendVariant(
        VARLEN=problem.varlen,
        HAS_LEFT=left != UNLIMITED,
        HAS_RIGHT=right != UNLIMITED,
        HAS_SOFTCAP=problem.softcap > 0,
        HAS_ALIBI=problem.alibi,
        BLOCK_SCALES=problem.block_scales,
        TRANSPOSED=problem.v_transposed,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=padded(problem.head_dim, MIN_WIDTH),
        BLOCK_DV=padded(problem.head_dim_v, MIN_WIDTH),
        BLOCK_M=config.tile.BLOCK_M,
        BLOCK_N=config.tile.BLOCK_N,
        NATIVE=config.native,
    )


class Fp8AttendLaunch:
    """The launch ``(q, k, v, tensors) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: Fp8Problem, config: AttendConfig) -> None:
        self._problem = problem
        self._config = config
        self._out_shape = problem.out_shape
        self._lse_shape = problem.lse_shape
        self._kernel: CachedLaunch | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors) -> tuple[Tensor, Tensor]:
        problem = self._problem
        out = q.new_empty(*self._out_shape, dtype=problem.out_dtype)
        lse = q.new_empty(*self._lse_shape, dtype=torch.float32)
        if problem.varlen:  # no program writes tokens outside all sequences
            out.zero_()
            lse.fill_(-torch.inf)
        blocks = triton.cdiv(problem.seqlen_q, self._config.tile.BLOCK_M)
        programs = blocks * problem.num_heads_q * problem.batch
        if out.numel() == 0 or programs == 0:
            return out, lse
        if self._kernel is None:
            self._kernel = self._prepare(programs, q, k, v, tensors)
        if not self._config.native:
            q, k, v = (t.view(torch.uint8) for t in (q, k, v))
        self._kernel(q.device, q, k, v, out, lse, *tensors)
        return out, lse

    def _prepare(
        self, programs: int, q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors
    ) -> CachedLaunch:
        problem = self._problem
        left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
        strides = Fp8Strides(*token_strides(q), *token_strides(k), *self._strides_of_v(v))
        scale_strides = Fp8ScaleStrides(
            *(stride for scale in tensors.scales for stride in self._strides_of_scale(scale))
        )
        lengths = Fp8Lengths(
            q_scale_group=problem.q_scale_group,
            alibi_stride_b=outer_stride(tensors.alibi_slopes),
            num_heads_q=problem.num_heads_q,
            group_size=problem.group_size,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            total_q=problem.total_q,
            total_k=problem.total_k,
            window_left=left,
            window_right=right,
        )
        numbers = Fp8Numbers(problem.softmax_scale, problem.softcap)
        variant = fp8_attend_variant(problem, self._config)
        scalars = (strides, scale_strides, lengths, numbers)
        return CachedLaunch(
            attend_kernel, programs, scalars, (variant,), self._config.tile, pointers=Fp8AttendPointers
        )

    def _strides_of_v(self, v: Tensor) -> TokenStrides:
        """Return the strides of v between batch entries, rows and heads.

        The rows of a transposed v are features.
        """
        if not self._problem.v_transposed:
            return token_strides(v)
        batch = 0 if self._problem.varlen else v.stride(0)
        return TokenStrides(batch, token=v.stride(-2), head=v.stride(-3))

    def _strides_of_scale(self, scale: Tensor | None) -> tuple[int, int]:
        """Return (stride between batch entries, stride between heads) of a scale."""
        if scale is None:
            return 0, 0
        if self._problem.block_scales:
            return 0 if self._problem.varlen else scale.stride(0), scale.stride(-2)
        return scale.stride(0), scale.stride(1)
