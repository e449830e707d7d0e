"""Checks of the decoding functions: types and shapes.

Values are checked by :mod:`flashtile.checks.values`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile.checks.arguments import (
    check_backend,
    check_contiguous,
    check_dense,
    check_device,
    check_dtype,
    check_equal,
    check_groups,
    check_head_dim,
    check_heads_tensor,
    check_int,
    check_int32,
    check_last_stride,
    check_longest,
    check_offsets,
    check_pair,
    check_qv,
    check_rotary,
    check_same_dtype,
    check_same_rows,
    check_score_options,
    check_sink,
    check_slopes,
    check_tensor,
    check_written,
    is_choice,
    named,
)
from flashtile.problems.common import DTYPES, MAX_LENGTH
from flashtile.problems.decode import (
    FP8,
    MAX_HEAD_DIM,
    MAX_SOFTMAX_MAX,
    MAX_SPLITS,
    AppendOptions,
    AppendTensors,
    CacheTensors,
    CombineOptions,
    CopyOptions,
    CopyTensors,
    DecodeOptions,
    NoTensors,
)
from flashtile.problems.masking import CAUSAL
from flashtile.torch_private import share_storage

DENSE_CACHE = "(batch, seqlen_cache, heads_kv, head_dim)"
PAGED_CACHE = "(num_blocks, page_size, heads_kv, head_dim)"
SHARED_MEMORY = "v_cache shares memory with k_cache, but must have its own memory"


def check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
) -> None:
    """Check the arguments of an attention call over a KV cache.

    Errors are as for :func:`flashtile.checks.attention.check_call`.
    """
    varlen = tensors.cu_seqlens_q is not None
    if varlen:
        check_dense("cu_seqlens_q", tensors.cu_seqlens_q)
    check_dense("q", q)
    check_dtype("q", q)
    check_heads_tensor("q", q, varlen, "total_q", "seqlen_q", q, MAX_HEAD_DIM)
    batch = _batch_of_queries(q, tensors.cu_seqlens_q, options.max_seqlen_q)
    check_cache(q, k_cache, v_cache, tensors.block_table)
    check_groups(q, k_cache, "k_cache")
    _check_addresses(k_cache, batch, tensors.cache_batch_idx, tensors.block_table)
    for name in ("cache_seqlens", "cache_leftpad"):
        check_int32(name, getattr(tensors, name), (batch,), "(batch,)", q)
    check_int32("cu_seqlens_k_new", tensors.cu_seqlens_k_new, (batch + 1,), "(batch + 1,)", q)
    check_slopes(tensors.alibi_slopes, batch, q)
    check_sink(tensors.sink, q)
    check_tensor("softmax_max", tensors.softmax_max, ((q.shape[-2],),), "(heads_q,)", q)
    check_descales(k_cache, tensors.k_descale, tensors.v_descale, batch)
    check_pair("prior_out", tensors.prior_out, "prior_lse", tensors.prior_lse)
    if tensors.prior_out is not None:
        _check_prior(q, v_cache, tensors)
    if tensors.qv is not None:
        check_qv(q, v_cache, "v_cache", tensors.qv)
        if v_cache.dtype == FP8:
            raise NotImplementedError(f"qv must be None over a cache of {v_cache.dtype}, got a tensor")
    _check_options(options)
    for name in ("tree_mask", "softmax_max") if options.invariant else ():
        if getattr(tensors, name) is not None or (name == "softmax_max" and options.phi is not None):
            raise NotImplementedError(f"{name} must be None with invariant: rows of a tile share its effect")
    if tensors.tree_mask is not None:
        seqlen_q = options.max_seqlen_q if varlen else q.shape[1]
        _check_tree(tensors, batch, seqlen_q, options, q)


def _check_prior(q: Tensor, v_cache: Tensor, tensors: CacheTensors) -> None:
    tokens, heads = q.shape[:-2].numel(), q.shape[-2]
    dtypes = (torch.float64 if q.dtype == torch.float64 else torch.float32,)
    shape = (tokens, heads, v_cache.shape[-1])
    check_tensor("prior_out", tensors.prior_out, (shape,), "(tokens, heads, head_dim_v)", q, dtypes)
    check_tensor("prior_lse", tensors.prior_lse, ((heads, tokens),), "(heads, tokens)", q, dtypes)


def check_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors, options: AppendOptions
) -> None:
    """Check the arguments of an append to a KV cache. Errors are as for :func:`check_decode`."""
    slots, varlen = tensors.slot_mapping is not None, tensors.cu_seqlens_k_new is not None
    if slots:
        check_dense("slot_mapping", tensors.slot_mapping)
    if varlen:
        check_dense("cu_seqlens_k_new", tensors.cu_seqlens_k_new)
    for name, new in (("k", k), ("v", v)):
        check_dense(name, new)
        check_dtype(name, new)
        check_heads_tensor(name, new, slots or varlen, "total_new", "seqlen_new", k, MAX_HEAD_DIM)
    check_same_rows("v", v, "k", k)
    check_cache(k, k_cache, v_cache, tensors.block_table)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_equal("(heads, head_dim) =", name, new.shape[-2:], f"{name}_cache", cache.shape[-2:])
    check_no_gradient(k_cache, v_cache)
    check_memory(k_cache, v_cache)
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if _share(new, cache):
            raise ValueError(
                f"{name} shares memory with {name}_cache, to which it is written: call {name}.clone()"
            )
    check_same_dtype("v", v, "k", k)
    check_backend(options.backend)
    if slots:
        check_descales(k_cache, tensors.k_descale, tensors.v_descale, None)
        _check_slots(k, tensors)
        return
    if tensors.cache_seqlens is None:
        raise ValueError("cache_seqlens must give the positions at which k and v are appended, got None")
    if varlen:
        check_offsets("cu_seqlens_k_new", tensors.cu_seqlens_k_new, k)
        check_int("max_seqlen_k_new", options.max_seqlen_k_new or 0, 0, MAX_LENGTH)
        batch = tensors.cu_seqlens_k_new.shape[0] - 1  # type: ignore[union-attr]
    else:
        batch = k.shape[0]
    check_descales(k_cache, tensors.k_descale, tensors.v_descale, batch)
    check_int32("cache_seqlens", tensors.cache_seqlens, (batch,), "(batch,)", k)
    _check_addresses(k_cache, batch, tensors.cache_batch_idx, tensors.block_table)
    _check_rotary(k, batch, tensors)


def check_step(
    k: Tensor | None,
    v: Tensor | None,
    tensors: AppendTensors,
    options: AppendOptions,
    tree_mask: Tensor | None,
) -> None:
    """Check what a call that may append and then attends requires in addition to :func:`check_append`."""
    if k is None and v is None:
        name, value = next(
            (name, value)
            for name, value in (
                ("rotary_cos", tensors.rotary_cos),
                ("rotary_sin", tensors.rotary_sin),
                ("rotary_seqlens", tensors.rotary_seqlens),
                ("cu_seqlens_k_new", tensors.cu_seqlens_k_new),
                ("max_seqlen_k_new", options.max_seqlen_k_new),
            )
            if value is not None
        )
        raise ValueError(f"{name} must be None without k and v to append, got {type(value).__name__}")
    if k is None or v is None:
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing} must be given with {'v' if k is None else 'k'}, got None")
    if tensors.cache_seqlens is None:
        raise ValueError("cache_seqlens must give the positions at which k and v are appended, got None")
    if tensors.rotary_cos is not None and tree_mask is not None:
        raise ValueError("rotary_cos must be None with tree_mask: rotate by each node's depth beforehand")


def check_copy(
    k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, tensors: CopyTensors, options: CopyOptions
) -> None:
    """Check the arguments of a copy of cache blocks. Errors are as for :func:`check_decode`.

    The caches may have a leading dimension of layers.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, cache)
        if cache.dim() not in (4, 5):
            raise ValueError(
                f"{name} must have shape {PAGED_CACHE} or (num_layers, num_blocks, page_size, heads_kv, "
                f"head_dim), got {tuple(cache.shape)}"
            )
        check_dtype(name, cache, (*DTYPES, FP8))
        check_device(name, cache, k_cache)
        check_last_stride(name, cache)
    check_same_rows("v_cache", v_cache, "k_cache", k_cache)
    check_memory(k_cache, v_cache)
    check_dense("block_pairs", block_pairs)
    check_dtype("block_pairs", block_pairs, (torch.int32, torch.int64))
    if block_pairs.dim() != 2 or block_pairs.shape[1] != 2:
        raise ValueError(
            f"block_pairs must have shape (n, 2), (source, destination) pairs, got {tuple(block_pairs.shape)}"
        )
    check_device("block_pairs", block_pairs, k_cache)
    expected = (*k_cache.shape[:-3], k_cache.shape[-2])
    layout = "(num_blocks, heads_kv), with num_layers in front if the caches have layers,"
    for name, descale in zip(tensors._fields, tensors, strict=True):
        check_tensor(name, descale, (expected,), layout, k_cache)
    check_pair("k_descale", tensors.k_descale, "v_descale", tensors.v_descale)
    check_backend(options.backend)


def check_no_gradient(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that no cache requires a gradient, because caches are written in place."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if isinstance(cache, Tensor) and cache.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, but is written in place: {name} must be detached")


def check_memory(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that all elements of the caches have their own memory, because caches are written in place."""
    check_written("k_cache", k_cache)
    check_written("v_cache", v_cache)
    if k_cache is v_cache or _share(k_cache, v_cache):
        raise ValueError(SHARED_MEMORY)


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether an element of ``a`` and one of ``b`` share memory.

    Each of them has memory of its own for each of its elements. Only tensors of equal strides are compared,
    and none in a graph, where Dynamo shows no addresses.
    """
    if torch.compiler.is_dynamo_compiling() or a.stride() != b.stride():
        return False
    if not share_storage(a, b):
        return False
    steps = sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True)
    distances = {b.storage_offset() - a.storage_offset()}
    for stride, size_a, size_b in steps:  # element i of a and j of b are (i - j) strides apart
        apart = {(d, d // stride + more) for d in distances for more in (0, 1) if stride}
        distances = {d - n * stride for d, n in apart if -size_b < n < size_a} if stride else distances
    return 0 in distances and a.numel() > 0 and b.numel() > 0


def check_own_memory(k_cache: Tensor, v_cache: Tensor) -> None:
    """Check that keys and values are not written to the same memory.

    This check runs at every call. Other checks are skipped if a launch is cached for the signature of the
    tensors, but a signature contains no addresses.
    """
    if k_cache.data_ptr() == v_cache.data_ptr() and k_cache.numel() > 0:
        raise ValueError(SHARED_MEMORY)


def check_shared_prefix(
    q: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    prefix_seqlens: int | Tensor,
    cu_prefix_groups: Tensor | None,
    descales: tuple[Tensor | None, Tensor | None],
) -> None:
    """Check what attention over a shared prefix requires in addition to attention over a cache."""
    check_dense("q", q)
    if q.dim() != 4:
        raise ValueError(f"q must have 4 dimensions (batch, seqlen_q, heads, head_dim), got {tuple(q.shape)}")
    check_dense("block_table", block_table)
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"block_table must have shape (batch, max_blocks) with batch = {q.shape[0]}, "
            f"got {tuple(block_table.shape)}"
        )
    check_dense("cache_seqlens", cache_seqlens)
    for name, descale in zip(("k_descale", "v_descale"), descales, strict=True):
        if isinstance(descale, Tensor) and descale.dim() == 3:
            raise NotImplementedError(
                f"{name} must be (heads_kv,) or per page (sequences share pages), got {tuple(descale.shape)}"
            )
    groups = 1
    if cu_prefix_groups is not None:
        check_dense("cu_prefix_groups", cu_prefix_groups)
        if cu_prefix_groups.dtype != torch.int32:
            raise TypeError(f"cu_prefix_groups must be int32, got {cu_prefix_groups.dtype}")
        if cu_prefix_groups.dim() != 1 or cu_prefix_groups.shape[0] < 2:
            raise ValueError(
                f"cu_prefix_groups must have shape (num_groups + 1,), got {tuple(cu_prefix_groups.shape)}"
            )
        check_device("cu_prefix_groups", cu_prefix_groups, q)
        groups = cu_prefix_groups.shape[0] - 1
    if isinstance(prefix_seqlens, Tensor):
        check_int32("prefix_seqlens", prefix_seqlens, (groups,), "(num_groups,)", q)
    else:
        check_int("prefix_seqlens", prefix_seqlens, 0, MAX_LENGTH)


def check_combine(
    out_partial: Tensor, lse_partial: Tensor, tensors: NoTensors, options: CombineOptions
) -> None:
    """Check that the partial results match each other."""
    check_dense("out_partial", out_partial)
    check_dense("lse_partial", lse_partial)
    if out_partial.dim() not in (4, 5):
        raise ValueError(
            "out_partial must have shape (num_splits, batch, seqlen, heads, head_dim) or "
            f"(num_splits, total, heads, head_dim), got {tuple(out_partial.shape)}"
        )
    check_dtype("out_partial", out_partial)
    wide = torch.float64 if out_partial.dtype == torch.float64 else torch.float32
    if lse_partial.dtype != wide:
        raise TypeError(f"lse_partial must be {wide} with {out_partial.dtype}, got {lse_partial.dtype}")
    if out_partial.shape[0] == 0:
        raise ValueError("out_partial has no split, but must have at least one")
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial must have the shape of out_partial without head_dim, "
            f"{tuple(out_partial.shape[:-1])}, got {tuple(lse_partial.shape)}"
        )
    check_device("out_partial", out_partial, out_partial)
    check_device("lse_partial", lse_partial, out_partial)
    check_last_stride("out_partial", out_partial)
    if not is_choice(options.out_dtype, DTYPES):
        got = named(options.out_dtype)
        raise TypeError(f"out_dtype must be float16, bfloat16, float32 or float64, got {got}")
    check_backend(options.backend)


def check_combined_into(out_partial: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    """Check that ``out`` has the shape, dtype and device of the combined result."""
    check_dense("out", out)
    check_device("out", out, out_partial)
    if out.shape != out_partial.shape[1:]:
        raise ValueError(f"out must have shape {tuple(out_partial.shape[1:])}, got {tuple(out.shape)}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, but out_dtype is {dtype}: they must be equal")
    check_written("out", out)
    if out.requires_grad:
        raise ValueError("out requires grad, but is written in place: it must be detached")


def _batch_of_queries(q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None) -> int:
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise ValueError(f"max_seqlen_q must be None without cu_seqlens_q, got {max_seqlen_q}")
        return q.shape[0]
    check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    check_longest("max_seqlen_q", max_seqlen_q)
    return cu_seqlens_q.shape[0] - 1


def _check_options(options: DecodeOptions) -> None:
    check_score_options(options)
    if options.phi is not None and not abs(options.phi) <= MAX_SOFTMAX_MAX:
        raise ValueError(
            f"softmax_max must be from {-MAX_SOFTMAX_MAX} to {MAX_SOFTMAX_MAX}, got {options.phi}"
        )
    check_int("num_splits", options.num_splits, 0, MAX_SPLITS)
    check_int("split_size", options.split_size, 0, MAX_LENGTH)
    if options.num_splits > 0 and options.split_size > 0:
        raise ValueError(
            f"split_size must be None with num_splits = {options.num_splits}, got {options.split_size}"
        )
    masking = options.masking
    if options.invariant and options.num_splits > 1:
        raise ValueError(
            f"num_splits must be at most 1 with invariant (use split_size), got {options.num_splits}"
        )
    if options.invariant and options.split_size and (masking.window_left >= 0 or masking.attention_chunk):
        raise ValueError(
            "split_size must be None with invariant and a window or chunks, whose parts would begin at the "
            f"first key that a tile of rows sees, got {options.split_size}"
        )


def _check_tree(
    tensors: CacheTensors, batch: int, seqlen_q: int | None, options: DecodeOptions, q: Tensor
) -> None:
    mask = tensors.tree_mask
    assert mask is not None
    check_dense("tree_mask", mask)
    check_dtype("tree_mask", mask, (torch.bool,))
    shapes = ((1, seqlen_q, seqlen_q), (batch, seqlen_q, seqlen_q))
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"tree_mask must have shape (seqlen_q, seqlen_q) = {shapes[0][1:]} or "
            f"(batch, seqlen_q, seqlen_q) = {shapes[1]}, got {tuple(mask.shape)}"
        )
    check_device("tree_mask", mask, q)
    check_contiguous("tree_mask", mask)
    masking = options.masking
    if masking.has_window:
        given = "causal=True" if masking == CAUSAL else f"window_size={masking.arguments()['window_size']}"
        raise ValueError(f"tree_mask cannot be combined with causal or window_size, got {given}")
    if name := masking.beyond_window:
        raise ValueError(f"{name} must be 0 with tree_mask, got {getattr(masking, name)}")
    if tensors.alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes must be None with tree_mask, because a node's position in the cache is not its "
            "depth, got a tensor"
        )


def _check_slots(k: Tensor, tensors: AppendTensors) -> None:
    check_tensor("slot_mapping", tensors.slot_mapping, ((k.shape[0],),), "(total_new,)", k, (torch.int64,))
    addressing = "cache_seqlens", "cache_batch_idx", "block_table", "cu_seqlens_k_new"
    for name in (*addressing, "rotary_cos", "rotary_sin"):
        if getattr(tensors, name) is not None:
            raise ValueError(
                f"{name} must be None with slot_mapping, which gives all tokens' positions, got a tensor"
            )


def _check_rotary(k: Tensor, batch: int, tensors: AppendTensors) -> None:
    check_rotary(tensors.rotary_cos, tensors.rotary_sin, k, k.shape[-1], (k.dtype, torch.float32))
    check_int32("rotary_seqlens", tensors.rotary_seqlens, (batch,), "(batch,)", k)
    if tensors.rotary_cos is None and tensors.rotary_seqlens is not None:
        raise ValueError("rotary_seqlens must be None without rotary_cos and rotary_sin, got a tensor")


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> None:
    """Check that the cache matches ``q``, which may be queries or new keys."""
    layout = DENSE_CACHE if block_table is None else PAGED_CACHE
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, cache)
        if cache.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions {layout}, got shape {tuple(cache.shape)}")
        if cache.dtype not in (q.dtype, FP8):
            fp8 = "" if q.dtype == FP8 else f", or {FP8}"
            raise TypeError(
                f"{name} has dtype {cache.dtype}, but must be {q.dtype}, like queries and new keys{fp8}"
            )
        check_device(name, cache, q)
        check_head_dim(name, cache, MAX_HEAD_DIM)
        check_last_stride(name, cache)
    check_same_dtype("v_cache", v_cache, "k_cache", k_cache)
    check_same_rows("v_cache", v_cache, "k_cache", k_cache)
    if k_cache.shape[2] == 0:
        raise ValueError("k_cache must have at least one head, got 0")
    if block_table is not None and k_cache.shape[1] == 0:
        raise ValueError("k_cache must have pages of at least one token, got page_size 0")


def _check_addresses(
    k_cache: Tensor, batch: int, cache_batch_idx: Tensor | None, block_table: Tensor | None
) -> None:
    """Check the tensors that address the sequences: a block table of pages, or rows of a dense cache."""
    if block_table is not None:
        check_dense("block_table", block_table)
        check_dtype("block_table", block_table, (torch.int32,))
        if block_table.dim() != 2 or block_table.shape[0] != batch:
            raise ValueError(
                f"block_table must have shape (batch, max_blocks) with batch = {batch}, "
                f"got {tuple(block_table.shape)}"
            )
        check_device("block_table", block_table, k_cache)
        check_last_stride("block_table", block_table)
        if cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx must be None with block_table: choose rows of the table instead, "
                "block_table[cache_batch_idx]"
            )
        return
    check_int32("cache_batch_idx", cache_batch_idx, (batch,), "(batch,)", k_cache)
    if cache_batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has {k_cache.shape[0]} rows, but there are {batch} sequences: they must be equal, or "
            "cache_batch_idx must choose rows"
        )


def check_descales(
    cache: Tensor, k_descale: Tensor | None, v_descale: Tensor | None, batch: int | None
) -> None:
    """Check that scales match the cache, and are given only for a cache in e4m3.

    ``batch`` is None if tokens are addressed by slots instead of sequences.
    """
    if k_descale is None and v_descale is None:
        return
    if cache.dtype != FP8:
        name = "v_descale" if k_descale is None else "k_descale"
        raise ValueError(f"{name} must be None for a cache of {cache.dtype}, because only {FP8} is scaled")
    check_pair("k_descale", k_descale, "v_descale", v_descale)
    heads = cache.shape[2]
    shapes: tuple[tuple[int, ...], ...] = ((heads,), (cache.shape[0], heads))
    layout = "(heads_kv,) or (cache.shape[0], heads_kv)"
    if batch is not None:
        shapes += ((batch, 1, heads),)
        layout = "(heads_kv,), (cache.shape[0], heads_kv) or (batch, 1, heads_kv)"
    for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
        check_tensor(name, descale, shapes, layout, cache)
    assert k_descale is not None
    assert v_descale is not None
    if k_descale.dim() != v_descale.dim():
        check_equal("shape", "v_descale", v_descale.shape, "k_descale", k_descale.shape)
