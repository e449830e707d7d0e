"""Launchers of attention over a cache and of combining: conversion of tensors to kernel arguments.

Each is for tensors of one signature. Grids, sizes of partial results and constants are computed at its first
call.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.launch import allocator, padded
from flashtile.backends.portable.decode import plan
from flashtile.backends.portable.decode.append import (
    AppendLengths,
    AppendPointers,
    AppendStrides,
    AppendVariant,
)
from flashtile.backends.portable.decode.append_launch import AppendLaunch
from flashtile.backends.portable.decode.arguments import (
    DecodeNumbers,
    DecodePointers,
    DecodeStrides,
    OuterStrides,
)
from flashtile.backends.portable.decode.attend import decode_kernel
from flashtile.backends.portable.decode.combine import (
    CombineGivenVariant,
    CombinePointers,
    GivenPointers,
    GivenSizes,
    GivenStrides,
    combine_given_kernel,
    combine_kernel,
)
from flashtile.backends.portable.decode.config import DecodeConfig
from flashtile.backends.portable.decode.results import Splits
from flashtile.backends.portable.decode.schedule import DecodeLengths
from flashtile.problems.common import LOG2_E, UNLIMITED
from flashtile.problems.decode import AppendTensors, CacheTensors, CombineProblem, DecodeProblem

_of_combine = itemgetter(*map(CacheTensors._fields.index, CombinePointers._fields[3:]))
"""Picks the tensors of :class:`CacheTensors` that the combining kernel takes."""


def is_capturing(tensor: Tensor) -> bool:
    """Whether work on a tensor is captured for a CUDA graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class DecodeScalars(NamedTuple):
    """Arguments of the attention kernel that are not tensors, in its order."""

    strides: DecodeStrides
    outer: OuterStrides
    lengths: DecodeLengths
    numbers: DecodeNumbers
    num_blocks: int
    splits: Splits
    new_strides: AppendStrides | None = None
    new_lengths: AppendLengths | None = None


class DecodeLaunch:
    """``(q, k_cache, v_cache, tensors[, out, lse]) -> (out, lse or None)`` for tensors of one signature."""

    writes_into = True

    def __init__(self, problem: DecodeProblem, config: DecodeConfig) -> None:
        self._problem = problem
        self._config = config
        self._out_shape = problem.out_shape
        self._out_dtype = problem.out_dtype
        self._lse_shape = problem.lse_shape
        self._lse_size = math.prod(problem.lse_shape)
        self._device = problem.device
        self._varlen = problem.varlen
        self._return_lse = problem.return_lse
        self._empty = 0 in problem.out_shape or problem.batch == 0 or problem.seqlen_q == 0
        self._partials = 0
        """Number of floats of partial results, rounded up so that the lse after them is aligned."""
        self._scratch_bytes = self._scratch_size = 0
        """Partial results and lse, in bytes and as elements of ``out``. Another dtype would take 0.2 us."""
        self._stores_lse = True
        self._append: tuple[AppendVariant, AppendStrides, AppendLengths] | None = None
        self._new_out: Any = None
        self._attend: Any = None
        self._combine: CachedLaunch | None = None
        self._addresses: tuple[Any, tuple] = None, ()
        """Addresses of the last call by address, and those of them that the combining kernel takes."""
        self._by_capacity: tuple = ()
        self._scalars: DecodeScalars | None = None
        self._combine_scalars: tuple = ()
        """Scalars of the combining kernel except the lengths, which both kernels share."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tensors: CacheTensors,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: AppendPointers | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self._empty:
            return self._cleared(q, out, lse)
        attend, combine, device = self._attend, self._combine, self._device
        return_lse = self._return_lse
        if attend is None:
            k_cache, v_cache = self._operands(k_cache, v_cache)
            attend, combine = self._prepare(q, k_cache, v_cache, tensors)
            return_lse = self._stores_lse  # to compile in the first call, Triton needs lse as a tensor
            self._new_out = allocator(q, self._out_shape, self._out_dtype)
        if self._varlen:
            out, lse = self._cleared(q, out, lse)
        else:
            if out is None:
                out = self._new_out(q)
            if return_lse and lse is None:
                lse = q.new_empty(*self._lse_shape, dtype=torch.float32)
        scratch = None
        lse_to: Tensor | int | None = lse
        if lse is None and self._stores_lse:  # lse is not returned, but stored after the partial results
            scratch = q.new_empty(self._partials + self._lse_size, dtype=torch.float32)
            lse_to = scratch.data_ptr() + 4 * self._partials
        elif self._partials:
            scratch = q.new_empty(self._partials, dtype=torch.float32)
        attend(device, q, k_cache, v_cache, out, lse_to, scratch, new, *tensors)
        if combine is not None:
            combine(device, scratch, out, lse_to, *_of_combine(tensors))
        if self._attend is None and attend.takes_addresses:
            self._scratch_bytes = 4 * (self._partials + self._lse_size)
            self._scratch_size = triton.cdiv(self._scratch_bytes, self._out_dtype.itemsize)
            self._combine, self._attend = combine, attend
        return out, lse

    def by_address(
        self,
        out: Tensor,
        given: tuple[int, int, int, int],
        addresses: tuple,
        memory: dict[int, Tensor],
    ) -> None:
        """Write attention to ``out``. Requires :attr:`has_addresses`.

        Only the address of ``out`` is used, so its shape may differ from that of the signature. Tokens after
        the last offset of packed sequences are not written.

        Args:
            given: addresses of q, the two caches and ``out``.
            addresses: those of the fields of :class:`CacheTensors`.
            memory: partial results by stream, for calls that run one after the other on a stream.
        """
        attend, combine, partials = self._attend, self._combine, self._partials
        stream = attend.stream()
        if stream is None:
            with torch.cuda.device(self._device):
                self.by_address(out, given, addresses, memory)
            return
        lse = partial = None
        if self._stores_lse:  # after the partial results
            scratch = memory.get(stream)
            if scratch is None or scratch.nbytes < self._scratch_bytes or is_capturing(out):
                scratch = self._new_scratch(out, stream, memory)
            partial = scratch.data_ptr()
            lse = partial + 4 * partials
        attend.by_address(stream, (*given, lse, partial if partials else None, None), addresses)
        if combine is not None:
            known, of_combine = self._addresses
            if known is not addresses:
                of_combine = _of_combine(addresses)
                self._addresses = addresses, of_combine
            combine.by_address(stream, (partial, given[3], lse), of_combine)

    def _new_scratch(self, out: Tensor, stream: int, memory: dict[int, Tensor]) -> Tensor:
        """Return memory for partial results and lse. A captured graph has its own: it may live longer."""
        scratch = out.new_empty(self._scratch_size)
        if not is_capturing(out):
            memory[stream] = scratch
        return scratch

    @property
    def has_addresses(self) -> bool:
        """Whether :meth:`by_address` may be called, which requires compiled kernels."""
        combine = self._combine
        return self._attend is not None and (combine is None or combine.takes_addresses)

    def with_append(self, append: Any) -> AppendingLaunch | None:
        """Return a launch that also does the work of the launch ``append``; None if the kernel does not."""
        if not isinstance(append, AppendLaunch) or not plan.appends(
            self._problem, self._config, append.problem
        ):
            return None
        return AppendingLaunch(self._problem, self._config, append)

    @property
    def takes_addresses(self) -> bool:
        """Whether later calls may give the addresses of q and of the caches instead of tensors.

        This requires a compiled kernel. Such calls also give ``out``.
        """
        return self._attend is not None and not self._varlen

    def with_cache_length(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors
    ) -> DecodeLaunch | None:
        """Return a launch for dense caches of another length that uses the compiled kernels of this launch.

        None if the kernels do not serve that length or are not compiled yet. The tensors must be valid, and
        differ from those of this launch only in the length and the strides of the caches.
        """
        attend, combine, scalars = self._attend, self._combine, self._scalars
        if attend is None or scalars is None or self._problem.tma_obstacle is not None:
            return None
        problem = copy.copy(self._problem)  # takes 4 us; replace() takes 20 us
        object.__setattr__(problem, "capacity", k_cache.shape[1])
        caches = self._operands(k_cache, v_cache)
        if self._decided(problem, *caches) != self._by_capacity:
            return None
        left, right = plan.effective_window(problem)
        capacity = problem.capacity if problem.num_blocks else 0
        lengths = scalars.lengths._replace(
            capacity=capacity, window_left=left, window_right=right,
            attention_chunk=plan.effective_chunk(problem),
        )  # fmt: skip
        strides, outer = plan.strides_of(q, *caches), plan.outer_strides_of(tensors)
        scalars = scalars._replace(strides=strides, outer=outer, lengths=lengths)
        attend = attend.with_scalars(scalars)
        if combine is not None:
            combine = combine.with_scalars((lengths, *self._combine_scalars))
        if attend is None or (combine is None) != (self._combine is None):
            return None
        other = copy.copy(self)
        other._problem, other._scalars, other._attend, other._combine = problem, scalars, attend, combine
        return other

    def _decided(self, problem: DecodeProblem, k_cache: Tensor, v_cache: Tensor) -> tuple:
        """Return the properties of kernels and grids that depend on the length and strides of a dense cache.

        A launch for another length can use the same compiled kernels if these properties are the same.
        """
        config = self._config
        left, right = plan.effective_window(problem)
        longest = max(plan.extent(k_cache), plan.extent(v_cache))
        return (
            left != UNLIMITED, right != UNLIMITED, plan.aligned(problem, k_cache, v_cache), longest >= 2**31,
            longest * k_cache.element_size() >= 2**31, plan.is_stream_k(problem, config),
            plan.grid_size(problem, config), plan.softmax_max_kind(problem, config),
            problem.split_size and problem.capacity, k_cache.dtype,
        )  # fmt: skip

    def _operands(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        return plan.as_operands(k_cache, v_cache, self._config)

    def _cleared(self, q: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out, lse) filled with 0 and -inf, because some tokens are not written by any program."""
        out = q.new_zeros(self._out_shape, dtype=self._out_dtype) if out is None else out.zero_()
        if lse is None:
            return out, q.new_full(self._lse_shape, -torch.inf, dtype=torch.float32)
        return out, lse.fill_(-torch.inf)

    def _prepare(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors
    ) -> tuple[CachedLaunch, CachedLaunch | None]:
        """Return the attention kernel and, if it leaves partial results, the kernel that combines them."""
        problem, config = self._problem, self._config
        stream_k = plan.is_stream_k(problem, config)
        num_splits, split_n_blocks = plan.num_splits_of(problem, config)
        work_tiles = problem.batch * plan.m_blocks_of(problem, config) * problem.num_heads_kv
        programs, teams = work_tiles * num_splits, 0
        if stream_k:
            team = plan.heads_per_team(problem, config)
            teams = max(1, plan.grid_size(problem, config) // team)
            programs = teams * team
        variant = plan.decode_variant(
            problem,
            config,
            native_e4m3=plan.converts_e4m3(self._device),
            pairs=k_cache.dtype == torch.uint16,
            pdl=plan.has_dependent_launch(self._device),
            wide=any(plan.extent(cache) >= 2**31 for cache in (k_cache, v_cache)),
            aligned=plan.aligned(problem, k_cache, v_cache),
        )
        if num_splits == 1 and not stream_k:
            variant = replace(variant, SPLIT=False)
        new_strides, new_lengths = None, None
        if self._append is not None:
            of_append, new_strides, new_lengths = self._append
            of_append = replace(  # the attention kernel itself rotates the queries
                of_append, BLOCK_D=variant.BLOCK_D, BLOCK_DV=variant.BLOCK_DV, ROTATE_Q=False,
                ROTATE_Q_BY_TOKEN=False,
            )  # fmt: skip
            variant = replace(variant, APPEND=of_append)
        scale = problem.softmax_scale
        softmax_max = problem.softmax_max if variant.SOFTMAX_MAX == "number" else None
        self._scalars = scalars = DecodeScalars(
            plan.strides_of(q, k_cache, v_cache),
            plan.outer_strides_of(tensors),
            plan.lengths_of(problem, config),
            DecodeNumbers(scale, scale * LOG2_E, problem.softcap, softmax_max),
            max(problem.num_blocks, 1),
            Splits(
                partial_rows=min(config.tile.BLOCK_M, problem.seqlen_q * problem.group_size),
                slots=2 * programs if stream_k else programs,
                num_splits=num_splits,
                split_n_blocks=split_n_blocks,
            ),
            new_strides=new_strides,
            new_lengths=new_lengths,
        )
        self._by_capacity = self._decided(problem, k_cache, v_cache)
        # With dependent launch, a kernel may start before the previous kernel has ended. It then waits on the
        # device until the previous kernel has ended.
        options: dict[str, Any] = {"launch_pdl": True} if variant.PDL else {}
        attend = CachedLaunch(
            decode_kernel, programs, scalars, (variant,), config.tile, pointers=DecodePointers, **options
        )
        if not variant.SPLIT:
            self._stores_lse = self._return_lse or self._varlen
            return attend, None
        slots, rows = scalars.splits.slots, scalars.splits.partial_rows
        self._partials = plan.round_up(slots * rows * (problem.head_dim_v + 1), 64)
        return attend, self._prepare_combine(scalars, work_tiles, programs, teams, options)

    def _prepare_combine(
        self, scalars: DecodeScalars, work_tiles: int, programs: int, teams: int, options: dict[str, Any]
    ) -> CachedLaunch:
        """Return the kernel that combines the partial results of ``programs`` programs.

        ``teams``: number of teams of a stream-K grid; 0 for other grids.
        """
        problem, config = self._problem, self._config
        tile = plan.combine_tile(problem, config, triton.cdiv(programs, work_tiles) if teams else None)
        by_work_tile = not teams or work_tiles < programs
        units = work_tiles if by_work_tile else programs - programs // teams
        row_blocks = triton.cdiv(scalars.splits.partial_rows, tile.rows)
        pdl = plan.has_dependent_launch(self._device)
        self._combine_scalars = (scalars.splits, teams, row_blocks)
        return CachedLaunch(
            combine_kernel,
            units * row_blocks,
            (scalars.lengths, *self._combine_scalars),
            (plan.combine_variant(problem, config, tile, teams > 0, by_work_tile, pdl),),
            None,
            pointers=CombinePointers,
            num_warps=tile.num_warps,
            **options,
        )


class AppendingLaunch:
    """``(q, k_cache, v_cache, k, v, appended, tensors) -> (out, lse or None)`` in one attention kernel.

    The kernel appends k and v, the new tokens of each sequence, and rotates the queries q.
    """

    def __init__(self, problem: DecodeProblem, config: DecodeConfig, append: AppendLaunch) -> None:
        self._launch = DecodeLaunch(problem, config)
        self._new = append

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        appended: AppendTensors,
        tensors: CacheTensors,
    ) -> tuple[Tensor, Tensor | None]:
        given = (k_cache, v_cache, k, v, appended)
        if self._launch._append is None:
            self._launch._append = self._new.arguments(*given)
        return self._launch(q, k_cache, v_cache, tensors, new=self._new.pointers(*given))


class CombineLaunch:
    """``(out_partial, lse_partial) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: CombineProblem) -> None:
        self._problem = problem
        self._kernel: CachedLaunch | None = None

    def __call__(
        self, out_partial: Tensor, lse_partial: Tensor, tensors: None = None
    ) -> tuple[Tensor, Tensor]:
        problem = self._problem
        shape = (problem.batch, problem.seqlen, problem.num_heads, problem.head_dim)
        out = torch.empty(shape, dtype=problem.out_dtype, device=problem.device)
        lse_shape = (problem.batch, problem.num_heads, problem.seqlen)
        lse = torch.empty(lse_shape, dtype=torch.float32, device=problem.device)
        rows = lse.numel()
        if rows == 0:
            return out, lse
        if self._kernel is None:
            width = padded(problem.head_dim)
            splits = min(16, triton.next_power_of_2(max(problem.num_splits, 1)))
            rows_of_program = max(1, plan.COMBINE_TILE // (splits * width))
            strides = GivenStrides(*out_partial.stride()[:-1], *lse_partial.stride())
            self._kernel = CachedLaunch(
                combine_given_kernel,
                triton.cdiv(rows, rows_of_program),
                (strides, GivenSizes(problem.num_splits, problem.seqlen, problem.num_heads, rows)),
                (CombineGivenVariant(problem.head_dim, width, rows_of_program, splits),),
                None,
                pointers=GivenPointers,
            )
        self._kernel(problem.device, out_partial, lse_partial, out, lse)
        return out, lse
