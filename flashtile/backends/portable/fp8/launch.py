"""Launches of the two FP8 kernels, each for tensors of one signature: attention over e4m3, and
quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.config import (
    KernelConfig,
    QkvStrides,
    TokenStrides,
    outer_stride,
    padded,
    token_strides,
)
from flashtile.backends.common.launch import CachedLaunch, Outputs
from flashtile.backends.portable.fp8.attend import (
    Fp8AttendPointers,
    Fp8AttendVariant,
    Fp8Lengths,
    Fp8Numbers,
    Fp8ScaleStrides,
    attend_kernel,
)
from flashtile.backends.portable.fp8.quantize import (
    LARGEST_GIVEN,
    LARGEST_ONLY,
    ONE_PASS,
    QuantizeLengths,
    QuantizeNumbers,
    QuantizePointers,
    QuantizeScaleStrides,
    QuantizeStrides,
    QuantizeVariant,
    quantize_kernel,
)
from flashtile.problems.fp8 import AttendTensors, Fp8Problem, QuantizeProblem, QuantizeTensors
from flashtile.problems.fp8_layout import E4M3, E4M3_MAX, SMALLEST_LARGEST
from flashtile.problems.masking import KernelMask

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


def fp8_attend_variant(problem: Fp8Problem, config: AttendConfig, mask: KernelMask) -> Fp8AttendVariant:
    return Fp8AttendVariant(
        **mask.constants,
        VARLEN=problem.varlen,
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
        self._outputs = Outputs(problem, all_written=not problem.varlen)
        self._kernel: CachedLaunch | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors) -> tuple[Tensor, Tensor]:
        problem = self._problem
        out, lse = self._outputs(q)
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
        mask = problem.for_kernels(problem.seqlen_q, problem.seqlen_k)
        strides = QkvStrides(*token_strides(q), *token_strides(k), *self._strides_of_v(v))
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
            mask=mask,
        )
        numbers = Fp8Numbers(problem.softmax_scale, problem.softcap)
        variant = fp8_attend_variant(problem, self._config, mask)
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


ELEMENTS_PER_THREAD = 32
"""Elements of a tile that a thread holds in registers."""
REGISTERS = 64
"""Registers per thread: enough for ELEMENTS_PER_THREAD elements, and few enough for two to four programs per
multiprocessor, so that one loads while another computes. q, k and v are quantised at 0.93, 0.87 and 0.91 of a
copy's speed on an H100; with 64 elements and any number of registers it was 0.83, 0.63 and 0.73."""
ROTARY_REGISTERS = 128
"""Registers per thread with rotary embedding, because the angles need registers.

With :func:`rotates_halves`, REGISTERS are enough.
"""
MAX_WARPS = 16
"""Maximum warps of a program for which each thread can have ROTARY_REGISTERS registers."""


def rotates_halves(problem: QuantizeProblem) -> bool:
    """Return ``QuantizeVariant.HALVES``: whether all columns are rotated, and both halves loaded separately.

    This is done only for blocks so small that two programs fit on a multiprocessor.
    """
    columns = padded(problem.stored_head_dim)
    by_halves = problem.rotary_dim == columns and not problem.rotary_interleaved
    return by_halves and problem.rows * columns <= MAX_WARPS * 32 * ELEMENTS_PER_THREAD


def quantize_variant(problem: QuantizeProblem, native: bool, number: int) -> QuantizeVariant:
    """Return the constants of the kernel. ``number`` is the pass, for example ONE_PASS."""
    stored = problem.stored_head_dim
    return QuantizeVariant(
        PASS=number,
        VARLEN=problem.varlen,
        TRANSPOSED=problem.role == "v",
        TRANSFORM_STAGES=stored.bit_length() - 1 if problem.transformed else 0,
        ROTARY_DIM=problem.rotary_dim,
        INTERLEAVED=problem.rotary_interleaved,
        HALVES=rotates_halves(problem),
        HEAD_DIM=problem.head_dim,
        STORED_HEAD_DIM=stored,
        BLOCK_D=padded(stored),
        BLOCK_M=problem.rows,
        NATIVE=native,
    )


def num_warps(problem: QuantizeProblem) -> int:
    warps = problem.rows * padded(problem.stored_head_dim) // ELEMENTS_PER_THREAD // 32
    return max(min(warps, MAX_WARPS) if problem.rotary_dim else warps, 1)


def compile_options(problem: QuantizeProblem) -> dict[str, Any]:
    """Return the compiler's options. FMA fusion is off, so that results equal the CPU's to the bit."""
    options = {"num_warps": num_warps(problem), "enable_fp_fusion": False}
    if torch.version.hip is None:  # AMD's compiler has no option "maxnreg"
        few = not problem.rotary_dim or rotates_halves(problem)
        options["maxnreg"] = REGISTERS if few else ROTARY_REGISTERS
    return options


class QuantizeLaunch:
    """The launch ``(x, tensors) -> (values, scales)`` for tensors of one signature."""

    def __init__(self, problem: QuantizeProblem, native: bool) -> None:
        self._problem = problem
        self._native = native
        self._values_shape, self._scales_shape = problem.values_shape, problem.scales_shape
        self._programs = triton.cdiv(problem.seqlen, problem.rows) * problem.num_heads * problem.batch
        self._kernels: list[CachedLaunch] = []

    def __call__(self, x: Tensor, tensors: QuantizeTensors) -> tuple[Tensor, Tensor]:
        problem = self._problem
        # Packed sequences leave gaps between scales and between columns, and rows after the last sequence. No
        # program writes to these elements, so they are set to 0 here.
        allocate = x.new_zeros if problem.varlen else x.new_empty
        values = allocate(*self._values_shape, dtype=E4M3)
        scales = allocate(*self._scales_shape, dtype=torch.float32)
        if self._programs == 0:
            return values, scales.fill_(SMALLEST_LARGEST / E4M3_MAX)
        if not self._kernels:
            self._kernels = self._prepare(x, tensors)
        stored = values if self._native else values.view(torch.uint8)
        if tensors.scale is not None:
            largest: Tensor | None = problem.largest_of(tensors.scale)
        else:
            largest = None if problem.method == "block" else torch.zeros_like(scales)
        for kernel in self._kernels:
            kernel(x.device, x, stored, scales, largest, *tensors[:-1])
        return values, scales

    def _prepare(self, x: Tensor, tensors: QuantizeTensors) -> list[CachedLaunch]:
        problem = self._problem
        heads, blocks = problem.num_heads, problem.blocks
        scale_strides = {
            "tensor": (0, 0),
            "head": (heads, 1),
            "block": (0 if problem.varlen else heads * blocks, blocks),
        }[problem.method]
        strides = QuantizeStrides(*token_strides(x), columns=blocks * problem.rows)
        lengths = QuantizeLengths(heads, problem.seqlen, problem.total)
        numbers = QuantizeNumbers(
            seed=problem.seed or 0,
            rotary_offset=problem.rotary_offset,
            rotary_rows=1 if tensors.rotary_cos is None else tensors.rotary_cos.shape[0],
            normalizer=problem.normalizer,
        )
        scalars = (strides, lengths, QuantizeScaleStrides(*scale_strides), numbers)
        of_method = (ONE_PASS,) if problem.method == "block" else (LARGEST_ONLY, LARGEST_GIVEN)
        passes = (LARGEST_GIVEN,) if problem.scale_given else of_method
        return [
            CachedLaunch(
                quantize_kernel,
                self._programs,
                scalars,
                (quantize_variant(problem, self._native, number.value),),
                None,
                pointers=QuantizePointers,
                **compile_options(problem),
            )
            for number in passes
        ]
