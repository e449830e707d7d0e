"""Launchers of the kernels that change the cache: append and copy of blocks."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.launch import outer_stride, padded, token_strides
from flashtile.backends.portable.decode.append import (
    AppendLengths,
    AppendPointers,
    AppendStrides,
    AppendVariant,
    append_kernel,
)
from flashtile.backends.portable.decode.copy_blocks import (
    CopyLengths,
    CopyPointers,
    CopyStrides,
    CopyVariant,
    copy_kernel,
)
from flashtile.backends.portable.decode.plan import converts_e4m3
from flashtile.problems.decode import FP8, AppendProblem, AppendTensors, CopyProblem, CopyTensors

APPEND_ROWS = 16
COPY_TILE = 8192
"""Elements of keys, and of values, that a copying program moves at a time."""


class AppendLaunch:
    """``(k_cache, v_cache, k, v, tensors) -> None``, in place, for tensors of one signature."""

    def __init__(self, problem: AppendProblem) -> None:
        self._problem = problem
        self._as_bits = problem.cache_dtype == FP8 and not converts_e4m3(problem.device)
        # (sequences, tokens of each): packed sequences are divided as one. Without sequences, all packed
        # tokens are padding and nothing is launched: tensors with an entry per sequence have no memory.
        batch = problem.batch
        new = (min(batch, 1), problem.total_new) if problem.varlen else (batch, problem.seqlen_new)
        queries = (min(batch, 1), problem.total_q) if problem.varlen_q else (batch, problem.seqlen_q)
        self._rows = min(APPEND_ROWS, triton.next_power_of_2(max(new[1], queries[1], 1)))
        self._programs = new[0] * triton.cdiv(new[1], self._rows) * problem.num_heads_kv
        self._programs_q = queries[0] * triton.cdiv(queries[1], self._rows) * problem.num_heads_q
        self._device = problem.device
        self._kernel: CachedLaunch | None = None

    def __call__(
        self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors
    ) -> None:
        if self._programs + self._programs_q == 0:
            return
        if self._kernel is None:
            self._kernel = self._prepare(k_cache, v_cache, k, v, tensors)
        self._kernel(self._device, *self.pointers(k_cache, v_cache, k, v, tensors))

    def by_address(
        self,
        k_cache: int,
        v_cache: int,
        k: int,
        v: int,
        slots: int,
        k_descale: int | None = None,
        v_descale: int | None = None,
    ) -> None:
        """Append by a slot mapping, with the addresses of the tensors. Requires :attr:`has_addresses`."""
        kernel = self._kernel
        assert kernel is not None
        stream = kernel.stream()
        if stream is None:
            with torch.cuda.device(self._device):
                self.by_address(k_cache, v_cache, k, v, slots, k_descale, v_descale)
            return
        kernel.by_address(
            stream,
            (
                k_cache, v_cache, k, v, None, slots, None, None, None, None, None, None, k_descale, v_descale,
                None, None, None,
            ),
        )  # fmt: skip

    @property
    def problem(self) -> AppendProblem:
        return self._problem

    @property
    def has_addresses(self) -> bool:
        """Whether :meth:`by_address` may be called, which requires a compiled kernel."""
        return self._kernel is not None and self._kernel.takes_addresses

    def pointers(
        self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors
    ) -> AppendPointers:
        """Return the tensors of a call as the kernel takes them."""
        if self._as_bits:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        return AppendPointers(k_cache, v_cache, k, v, *tensors)

    def arguments(
        self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors
    ) -> tuple[AppendVariant, AppendStrides, AppendLengths]:
        """Return the kernel's arguments that are not tensors."""
        problem = self._problem
        q, block_table = tensors.q, tensors.block_table
        variant = AppendVariant(
            HAS_SLOTS=problem.slots,
            HAS_LENGTHS=tensors.cache_seqlens is not None,
            HAS_BATCH_IDX=problem.batch_idx,
            VARLEN=problem.varlen,
            VARLEN_Q=problem.varlen_q,
            PAGE_SIZE=k_cache.shape[1] if problem.page_size or problem.slots else 0,
            DESCALE=problem.descale,
            QUANTISED=problem.cache_dtype == FP8,
            E4M3_BITS=self._as_bits,
            ROTARY_DIM=problem.rotary_dim,
            INTERLEAVED=problem.rotary_interleaved,
            HAS_ROTARY_SEQLENS=problem.rotary_seqlens,
            ROTATE_Q=self._programs_q > 0,
            ROTATE_Q_BY_TOKEN=problem.rotate_q_by_token,
            HEAD_DIM=problem.head_dim,
            HEAD_DIM_V=problem.head_dim_v,
            BLOCK_D=padded(problem.head_dim),
            BLOCK_DV=padded(problem.head_dim_v),
            ROWS=self._rows,
        )
        strides = AppendStrides(
            *token_strides(k_cache),
            *token_strides(v_cache),
            *token_strides(k),
            *token_strides(v),
            *((0, 0, 0) if q is None else token_strides(q)),
        )
        lengths = AppendLengths(
            table_stride=0 if block_table is None else block_table.stride(0),
            k_descale_stride=outer_stride(tensors.k_descale),
            v_descale_stride=outer_stride(tensors.v_descale),
            seqlen_new=problem.seqlen_new,
            total_new=problem.total_new,
            num_heads_kv=problem.num_heads_kv,
            seqlen_q=problem.seqlen_q,
            total_q=problem.total_q,
            num_heads_q=problem.num_heads_q,
            capacity=problem.capacity,
            num_blocks=problem.num_blocks,
            rotary_rows=problem.rotary_rows,
            batch=problem.batch,
            new_programs=self._programs,
        )
        return variant, strides, lengths

    def _prepare(self, *tensors: Any) -> CachedLaunch:
        variant, strides, lengths = self.arguments(*tensors)
        programs = self._programs + self._programs_q
        return CachedLaunch(
            append_kernel, programs, (strides, lengths), (variant,), None, pointers=AppendPointers
        )


class CopyLaunch:
    """``(k_cache, v_cache, block_pairs, tensors) -> None``, in place, for tensors of one signature."""

    def __init__(self, problem: CopyProblem) -> None:
        self._problem = problem
        self._kernel: CachedLaunch | None = None

    def __call__(self, k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, tensors: CopyTensors) -> None:
        problem = self._problem
        if problem.num_pairs == 0 or 0 in k_cache.shape[:-1]:
            return
        if problem.dtype == FP8:  # bytes are copied, also on GPUs without FP8
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        if self._kernel is None:
            self._kernel = self._prepare(k_cache, v_cache, block_pairs, tensors)
        self._kernel(problem.device, k_cache, v_cache, block_pairs, *tensors)

    def _prepare(
        self, k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, tensors: CopyTensors
    ) -> CachedLaunch:
        problem = self._problem
        _, num_blocks, page_size, heads, head_dim = k_cache.shape
        head_dim_v = v_cache.shape[-1]
        rows = page_size * heads
        block = min(triton.next_power_of_2(rows), max(1, COPY_TILE // padded(max(head_dim, head_dim_v))))
        parts = triton.cdiv(rows, block)
        strides = CopyStrides(*k_cache.stride()[:-1], *v_cache.stride()[:-1])
        pair_stride, pair_column_stride = block_pairs.stride()
        k_scale_strides, v_scale_strides = (
            (0, 0) if scales is None else scales.stride()[:2]
            for scales in (tensors.k_descale, tensors.v_descale)
        )
        lengths = CopyLengths(
            pair_stride=pair_stride,
            pair_column_stride=pair_column_stride,
            k_descale_stride_l=k_scale_strides[0],
            k_descale_stride_b=k_scale_strides[1],
            v_descale_stride_l=v_scale_strides[0],
            v_descale_stride_b=v_scale_strides[1],
            num_layers=problem.num_layers,
            num_blocks=num_blocks,
            page_size=page_size,
            num_heads=heads,
            parts=parts,
        )
        variant = CopyVariant(
            HAS_DESCALES=problem.descales,
            HEAD_DIM=head_dim,
            HEAD_DIM_V=head_dim_v,
            BLOCK_D=padded(head_dim),
            BLOCK_DV=padded(head_dim_v),
            BLOCK_HEADS=triton.next_power_of_2(heads),
            BLOCK=block,
        )
        programs = parts * problem.num_layers * problem.num_pairs
        return CachedLaunch(
            copy_kernel, programs, (strides, lengths), (variant,), None, pointers=CopyPointers
        )
