"""From a call with functions to the arguments of its kernels."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.config import KernelConfig
from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.common.launch import outer_stride
from flashtile.backends.common.preprocess import padded_rows, preprocess_launch, preprocess_rows
from flashtile.backends.portable.arguments import Variant
from flashtile.backends.portable.config import Config
from flashtile.backends.portable.launch import is_aligned, variant_of
from flashtile.backends.portable.mods import functions
from flashtile.backends.portable.mods.arguments import CAPTURED
from flashtile.backends.portable.mods.kernels import dkdv_kernel, dq_kernel, forward_kernel
from flashtile.problems.attention import Problem
from flashtile.problems.common import LOG2_E

kv_lists_of = operator.attrgetter("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
q_lists_of = operator.attrgetter("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
_captured_of = operator.attrgetter(*CAPTURED)


def variants_of(
    problem: Problem, config: KernelConfig, precision: str, wide: bool, aligned: bool, by_keys: bool
) -> tuple[Variant, Variant]:
    """(C, FULL) of a kernel; ``by_keys`` is the one whose programs own keys."""
    mods = problem.mods
    assert mods is not None
    plain = variant_of(problem, config, precision, wide, aligned)
    score = functions.score_function(mods)
    variant = replace(
        plain,
        SCORE_MOD=score,
        MASK_MOD=functions.mask_function(mods),
        HAS_SCORE_MOD=plain.HAS_SCORE_MOD or score is not None,
        **functions.guards(mods),
    )
    if mods.block_size is not None:
        size_q, size_kv = mods.block_size
        variant = replace(
            variant,
            EVEN_M=problem.seqlen_q % size_q == 0,
            EVEN_N=problem.seqlen_k % size_kv == 0,
            OWN=size_kv if by_keys else size_q,
            PARTS=size_q // config.BLOCK_M if by_keys else size_kv // config.BLOCK_N,
        )
    return variant, replace(variant, MASK_MOD=None)


class Arguments:
    """What a call's kernels share."""

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> None:
        mods = problem.mods
        assert mods is not None
        self.problem, self.mods = problem, mods
        self.inputs = (q, k, v)
        left, right = problem.effective_window(problem.seqlen_q, problem.seqlen_k)
        # A block mask of no lists has any shape: nothing reads it.
        listed = (1, 1) if mods.block_size is None else extras.kv_num_blocks.shape[:2]
        self.scalars = (
            *(stride for t in (q, k, v) for stride in (t.stride(0), t.stride(1), t.stride(2))),
            *(max(size, 1) for size in listed),
            *mods.kernel_sizes(_captured_of(extras)),
            outer_stride(extras.alibi_slopes),
            problem.num_heads_q,
            problem.group_size,
            problem.seqlen_q,
            problem.seqlen_k,
            left,
            right,
            problem.softmax_scale,
            problem.softmax_scale * LOG2_E,
            problem.softcap,
        )

    def kernel(
        self,
        kernel: Any,
        programs: int,
        config: KernelConfig,
        precision: str,
        by_keys: bool,
        *padded_rows: int,
        **more: Any,
    ) -> KeptKernel:
        """``more`` are constants that attention itself does not have."""
        problem = self.problem
        block = max(config.BLOCK_M, config.BLOCK_N)
        wide = any(block * tensor.stride(-3) >= 2**31 for tensor in self.inputs)
        aligned = problem.dtype.itemsize == 2 and problem.head_dim_v % 16 == 0
        aligned = aligned and all(map(is_aligned, self.inputs))
        both = variants_of(problem, config, precision, wide, aligned, by_keys)
        variant, full = (replace(one, **more) for one in both)
        if kernel is dq_kernel:
            add = functions.gradient_function(self.mods)
            variant, full = (replace(one, ADD_GRADIENTS=add) for one in (variant, full))
        return KeptKernel(kernel, programs, (*padded_rows, *self.scalars), (variant, full), config)


def captured_of(extras: Any) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in _captured_of(extras)]


class ForwardLaunch:
    """``(q, k, v, extras) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: Problem, config: Config) -> None:
        self._problem, self._config = problem, config
        self._kernel: KeptKernel | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> tuple[Tensor, Tensor]:
        problem, config = self._problem, self._config.forward
        out = q.new_empty(*problem.out_shape)
        lse = q.new_empty(*problem.lse_shape, dtype=torch.float32)
        programs = triton.cdiv(problem.seqlen_q, config.BLOCK_M) * problem.num_heads_q * problem.batch
        if programs == 0:
            return out, lse
        if self._kernel is None:
            arguments = Arguments(problem, q, k, v, extras)
            self._kernel = arguments.kernel(forward_kernel, programs, config, self._config.precision, False)
        self._kernel(
            q.device, q, k, v, out, lse, extras.alibi_slopes, extras.sink, *captured_of(extras),
            *kv_lists_of(extras),
        )  # fmt: skip
        return out, lse


class BackwardLaunch:
    """``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, *those of captured tensors)``."""

    def __init__(self, problem: Problem, config: Config) -> None:
        self._problem, self._config = problem, config
        self._padded_rows = padded_rows(problem.seqlen_q, problem.total_q, problem.batch, False)
        self._kernels: tuple[KeptKernel, KeptKernel, KeptKernel] | None = None

    def __call__(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: Any,
    ) -> tuple[Tensor | None, ...]:
        problem, sink = self._problem, extras.sink
        assert problem.mods is not None
        no_rows = problem.batch * problem.seqlen_q == 0
        no_keys = problem.batch * problem.seqlen_k == 0
        allocate = q.new_zeros if no_rows or no_keys else q.new_empty
        dq, dk, dv = allocate(*q.shape), allocate(*k.shape), allocate(*v.shape)
        captured = captured_of(extras)
        gradients = tuple(
            tensor.new_zeros(tensor.shape, dtype=torch.float32)
            if tensor is not None and i in problem.mods.learned
            else None
            for i, tensor in enumerate(captured)
        )
        dsink = None if sink is None else torch.zeros_like(sink)
        if not (no_rows or (no_keys and sink is None)):
            if self._kernels is None:
                self._kernels = self._prepare(dlse, q, k, v, extras)
            preprocess, compute_dkdv, compute_dq = self._kernels
            shape = (problem.batch, problem.num_heads_q, self._padded_rows)
            neg_lse, neg_delta = (q.new_empty(*shape, dtype=torch.float32) for _ in range(2))
            dsink = preprocess_rows(preprocess, neg_lse, neg_delta, out, dout, lse, dlse, extras)
            if not no_keys:
                inputs = (q, k, v, dout, neg_lse, neg_delta)
                slopes = extras.alibi_slopes
                compute_dkdv(q.device, *inputs, dk, dv, slopes, *captured, *q_lists_of(extras))
                compute_dq(q.device, *inputs, dq, slopes, *captured, *kv_lists_of(extras), *gradients)
        cast = (
            None if gradient is None or tensor is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, captured, strict=True)
        )
        return dq, dk, dv, dsink, *cast

    def _prepare(
        self, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, extras: Any
    ) -> tuple[KeptKernel, KeptKernel, KeptKernel]:
        problem, config = self._problem, self._config
        arguments = Arguments(problem, q, k, v, extras)
        programs = triton.cdiv(problem.seqlen_k, config.dkdv.BLOCK_N) * problem.num_heads_kv * problem.batch
        dkdv = arguments.kernel(dkdv_kernel, programs, config.dkdv, config.precision, True, self._padded_rows)
        programs = triton.cdiv(problem.seqlen_q, config.dq.BLOCK_M) * problem.num_heads_q * problem.batch
        dq = arguments.kernel(dq_kernel, programs, config.dq, config.precision, False, self._padded_rows)
        return preprocess_launch(problem, dlse is not None, LOG2_E), dkdv, dq
