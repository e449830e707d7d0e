"""Frozen, hashable descriptions of the decoding functions' calls, without data.

Backends prepare one launch for each description. :mod:`flashtile.checks.decode` checks the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.problems.common import Results, find_tma_obstacle, passed_on
from flashtile.problems.masking import EVERYTHING, Masking

MAX_HEAD_DIM = 512
MAX_SPLITS = 256
MAX_TMA_ROWS = 2**30
MAX_SOFTMAX_MAX = 1e6
"""Largest accepted magnitude of softmax_max. float32 still resolves scores of this size to 1/16."""
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
"""Quantisation saturates at this magnitude, because e4m3 has no infinity."""


class CacheTensors(NamedTuple):
    """The optional tensors of an attention call over a cache, in addition to q and the cache."""

    cache_seqlens: Tensor | None = None
    cache_leftpad: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    block_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    tree_mask: Tensor | None = None
    prior_out: Tensor | None = None
    """Attention over other keys, merged into the result: (tokens, heads_q, head_dim_v), in lse's dtype."""
    prior_lse: Tensor | None = None
    """Log-sum-exp of ``prior_out``, (heads_q, tokens)."""
    softmax_max: Tensor | None = None
    """Number subtracted from the scores of each head, (heads_q,)."""
    qv: Tensor | None = None
    """Queries for the values, shaped as q with head_dim_v, contiguous: scores are ``q k^T + qv v^T``."""


class DecodeOptions(NamedTuple):
    """The non-tensor arguments of attention over a cache, with exactly the declared types."""

    max_seqlen_q: int | None = None
    seqlen_new: int = 0
    """Number of new tokens of each sequence, which are in the cache but not counted in ``cache_seqlens``."""
    softmax_scale: float | None = None
    masking: Masking = EVERYTHING
    softcap: float = 0.0
    num_splits: int = 0
    split_size: int = 0
    invariant: bool = False
    partial: bool = False
    """Whether out is float32, to be merged with other results before it is rounded."""
    return_lse: bool = True
    phi: float | None = None
    """``softmax_max``, if the caller gave one number instead of a tensor."""
    backend: str | None = None
    debug_checks: bool = False


class AppendTensors(NamedTuple):
    """The optional tensors of an append, in addition to the cache and the new keys and values."""

    cache_seqlens: Tensor | None = None
    slot_mapping: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    block_table: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    q: Tensor | None = None
    """Queries to rotate in the same launch; None if there are none."""
    cu_seqlens_q: Tensor | None = None
    q_rotated: Tensor | None = None
    """Receives the rotated queries."""


class AppendOptions(NamedTuple):
    """The non-tensor arguments of an append, with exactly the declared types."""

    max_seqlen_k_new: int | None = None
    max_seqlen_q: int | None = None
    rotary_interleaved: bool = True
    rotate_q_by_token: bool = False
    backend: str | None = None
    debug_checks: bool = False


class NoTensors(NamedTuple):
    """The optional tensors of an operation that has none."""


class CombineOptions(NamedTuple):
    """The non-tensor arguments of a combination of partial results."""

    out_dtype: torch.dtype
    backend: str | None = None


class CopyTensors(NamedTuple):
    """The scales of an FP8 cache. The scales of a block are copied together with the block."""

    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


class CopyOptions(NamedTuple):
    """The non-tensor arguments of a copy of blocks."""

    backend: str | None = None
    debug_checks: bool = False


@dataclass(frozen=True)
class DecodeProblem(Masking, Results):
    """Description of attention over a KV cache. The queries are the last tokens of each sequence.

    Lengths are in tokens. Bool fields such as ``alibi`` say whether the call has that argument.

    The keys of sequence b are positions ``cache_leftpad[b] <= j < L[b]``, where ``L[b]`` is
    ``cache_seqlens[b]`` plus the number of appended tokens. Query i is at position ``i + L[b] - seqlen_q``.
    Windows and ALiBi use the distance from this position. Chunks begin at ``cache_leftpad[b]``.
    """

    batch: int
    seqlen_q: int  # the longest if varlen
    total_q: int  # rows of q in memory
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    capacity: int  # largest number of keys of a sequence
    page_size: int  # 0 for a dense cache
    num_blocks: int  # pages of the pool, or rows of the dense cache
    seqlen_new: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device
    softmax_scale: float
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    leftpad: bool = False
    batch_idx: bool = False
    tree: bool = False
    prior: bool = False
    varlen: bool = False
    varlen_new: bool = False
    lengths: bool = False  # whether cache_seqlens gives the lengths; otherwise they are the capacity
    descale: str = "none"  # see descale_kind
    num_splits: int = 0  # 0: the backend chooses
    split_size: int = 0
    invariant: bool = False  # whether a row's sums have one order in all calls
    return_lse: bool = True  # otherwise lse may be None
    tma_obstacle: str | None = None  # why Hopper's TMA cannot address q or the caches
    softmax_max: float | None = None  # subtracted from scores; None: their maximum
    softmax_max_by_head: bool = False  # a tensor holds one softmax_max per head instead
    qv: bool = False  # scores include the products of qv and v

    @property
    def mixed(self) -> bool:
        """Whether sequences have less than half as many query tokens in the mean as the longest has.

        A serving step is mixed: chunks of prompts, and single tokens of more sequences. A chunk and the token
        of one other sequence are not.
        """
        return 2 * self.total_q < self.batch * self.seqlen_q

    @classmethod
    def from_tensors(
        cls, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
    ) -> DecodeProblem:
        """Describe a call that :func:`flashtile.checks.decode.check_decode` has accepted."""
        varlen = tensors.cu_seqlens_q is not None
        if tensors.cu_seqlens_q is not None:
            assert options.max_seqlen_q is not None
            batch, seqlen_q = tensors.cu_seqlens_q.shape[0] - 1, options.max_seqlen_q
        else:
            batch, seqlen_q = q.shape[0], q.shape[1]
        head_dim = q.shape[-1]
        scale = options.softmax_scale
        columns = head_dim if tensors.qv is None else head_dim + v_cache.shape[-1]
        return cls(
            **passed_on(cls, tensors, options)
            | dict(
                batch=batch,
                seqlen_q=seqlen_q,
                total_q=q.shape[0] if varlen else batch * seqlen_q,
                num_heads_q=q.shape[-2],
                num_heads_kv=k_cache.shape[-2],
                head_dim=head_dim,
                head_dim_v=v_cache.shape[-1],
                capacity=capacity(k_cache, tensors.block_table),
                page_size=0 if tensors.block_table is None else k_cache.shape[1],
                num_blocks=k_cache.shape[0],
                dtype=q.dtype,
                cache_dtype=k_cache.dtype,
                out_dtype=out_dtype(q, options),
                device=q.device,
                softmax_scale=columns**-0.5 if scale is None else scale,
                alibi=tensors.alibi_slopes is not None,
                leftpad=tensors.cache_leftpad is not None,
                batch_idx=tensors.cache_batch_idx is not None,
                tree=tensors.tree_mask is not None,
                prior=tensors.prior_out is not None,
                varlen=varlen,
                varlen_new=tensors.cu_seqlens_k_new is not None,
                lengths=tensors.cache_seqlens is not None,
                num_splits=options.num_splits or int(options.invariant and not options.split_size),
                descale=descale_kind(tensors.k_descale),
                tma_obstacle=find_obstacle_in_cache(q, k_cache, v_cache),
                softmax_max=options.phi,
                softmax_max_by_head=tensors.softmax_max is not None,
            )
        )


class AppendProblem(NamedTuple):
    """Description of an append: keys and values are rotated, quantised, written. Lengths are in tokens."""

    batch: int
    seqlen_new: int  # number of new tokens per sequence; an upper bound if varlen
    total_new: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    capacity: int
    page_size: int  # 0 for a dense cache
    num_blocks: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    slots: bool = False  # whether slot_mapping gives the positions
    batch_idx: bool = False
    varlen: bool = False
    descale: str = "none"
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    rotary_rows: int = 0
    rotary_seqlens: bool = False
    seqlen_q: int = 0  # number of queries per sequence to rotate in the same launch; the longest if varlen_q
    total_q: int = 0
    num_heads_q: int = 0
    varlen_q: bool = False
    rotate_q_by_token: bool = False  # False: all queries of a sequence are rotated to position cache_seqlens

    @classmethod
    def from_tensors(
        cls,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: AppendTensors,
        options: AppendOptions,
    ) -> AppendProblem:
        """Describe a call that :func:`flashtile.checks.decode.check_append` has accepted."""
        slots, varlen = tensors.slot_mapping is not None, tensors.cu_seqlens_k_new is not None
        if slots:
            batch, seqlen_new = 1, k.shape[0]
        elif tensors.cu_seqlens_k_new is not None:
            longest = options.max_seqlen_k_new
            batch, seqlen_new = (
                tensors.cu_seqlens_k_new.shape[0] - 1,
                k.shape[0] if longest is None else longest,
            )
        else:
            batch, seqlen_new = k.shape[0], k.shape[1]
        q, seqlen_q = tensors.q, 0
        if q is not None:
            longest = options.max_seqlen_q
            seqlen_q = q.shape[1] if longest is None else longest
        cos = tensors.rotary_cos
        return cls(
            **passed_on(cls, tensors, options)
            | dict(
                batch=batch,
                seqlen_new=seqlen_new,
                total_new=k.shape[0] if slots or varlen else batch * seqlen_new,
                num_heads_kv=k_cache.shape[-2],
                head_dim=k_cache.shape[-1],
                head_dim_v=v_cache.shape[-1],
                capacity=capacity(k_cache, tensors.block_table),
                page_size=0 if tensors.block_table is None else k_cache.shape[1],
                num_blocks=k_cache.shape[0],
                dtype=k.dtype,
                cache_dtype=k_cache.dtype,
                device=k.device,
                slots=slots,
                batch_idx=tensors.cache_batch_idx is not None,
                varlen=varlen,
                descale=descale_kind(tensors.k_descale),
                rotary_dim=0 if cos is None else 2 * cos.shape[1],
                rotary_rows=0 if cos is None else cos.shape[0],
                seqlen_q=seqlen_q,
                total_q=0 if q is None else q.shape[:-2].numel(),
                num_heads_q=0 if q is None else q.shape[-2],
                varlen_q=tensors.cu_seqlens_q is not None,
            )
        )


class CombineProblem(NamedTuple):
    """Description of a merge of ``num_splits`` partial results of every row, over disjoint sets of keys."""

    num_splits: int
    batch: int
    seqlen: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_tensors(
        cls, out_partial: Tensor, lse_partial: Tensor, tensors: NoTensors, options: CombineOptions
    ) -> CombineProblem:
        """Describe a merge of the partial results ``out_partial``.

        ``out_partial`` is (num_splits, batch, seqlen, heads, head_dim).
        """
        shape: tuple[int, ...] = out_partial.shape
        num_splits, batch, seqlen, heads, head_dim = shape
        dtypes = out_partial.dtype, options.out_dtype
        return cls(num_splits, batch, seqlen, heads, head_dim, *dtypes, out_partial.device)


class CopyProblem(NamedTuple):
    """Description of a copy of blocks of a cache onto other blocks, in all layers."""

    num_pairs: int
    num_layers: int
    num_blocks: int
    dtype: torch.dtype
    device: torch.device
    descales: bool

    @classmethod
    def from_tensors(
        cls, k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, tensors: CopyTensors, options: CopyOptions
    ) -> CopyProblem:
        """Describe a copy of blocks within two caches.

        Both caches are (num_layers, num_blocks, page_size, heads_kv, head_dim).
        """
        return cls(
            num_pairs=block_pairs.shape[0],
            num_layers=k_cache.shape[0],
            num_blocks=k_cache.shape[1],
            dtype=k_cache.dtype,
            device=k_cache.device,
            descales=tensors.k_descale is not None,
        )


def capacity(k_cache: Tensor, block_table: Tensor | None) -> int:
    """Return the largest number of keys that a sequence can have."""
    if block_table is None:
        return k_cache.shape[1]
    return block_table.shape[1] * k_cache.shape[1]


def find_obstacle_in_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Return why TMA cannot address q or the caches, or None if it can.

    TMA addresses a cache as one tensor (tokens, heads, head_dim).
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[0] > 1 and cache.stride(0) % max(cache.stride(1), 1):
            return (
                f"{name} must have a whole number of tokens between pages (or rows) for TMA, "
                f"got strides {cache.stride()}"
            )
        tokens = cache.shape[0] * (cache.stride(0) // max(cache.stride(1), 1))
        if tokens > MAX_TMA_ROWS:
            return f"{name} must have at most {MAX_TMA_ROWS} tokens for TMA, got {tokens}"
    return find_tma_obstacle(q, k_cache, v_cache, False)


def out_dtype(q: Tensor, options: DecodeOptions) -> torch.dtype:
    return torch.float32 if options.partial and q.dtype != torch.float64 else q.dtype


def descale_kind(descale: Tensor | None) -> str:
    """Return the granularity of the scales: "none", "head", "block" or "sequence".

    "head" is one scale for each head. "block" is one scale for each head of each page, or of each row of a
    dense cache. "sequence" is one scale for each head of each sequence.
    """
    return "none" if descale is None else ("head", "block", "sequence")[descale.dim() - 1]
