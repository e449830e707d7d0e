"""Launcher of the quantisation kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.launch import padded, token_strides
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
from flashtile.problems.fp8 import QuantizeProblem, QuantizeTensors
from flashtile.problems.fp8_layout import E4M3, E4M3_MAX, SMALLEST_LARGEST

ELEMENTS_PER_THREAD = 32
"""Elements of a tile that a thread holds in registers."""
REGISTERS = 64
"""Registers per thread: enough for ELEMENTS_PER_THREAD elements, and few enough for two to four programs per
multiprocessor, so that one loads while another computes."""
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


def spill_budget(problem: QuantizeProblem) -> int:
    """Return how many bytes of register spills are accepted.

    Spills are accepted only if a tile and its rotary angles fill the registers.
    """
    fills = problem.rotary_dim and num_warps(problem) == MAX_WARPS and not rotates_halves(problem)
    return 200 if fills else 0


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
