"""``torch.library`` operators of the decoding functions, with fakes; those that write caches say so.

A plain eager call skips the dispatcher, whose host time exceeds the launch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.attn.operators import _library
from flashtile.checks.decode import check_append, check_combine, check_copy, check_decode
from flashtile.decode import launches
from flashtile.decode.problem import AppendOptions, AppendTensors, CacheTensors, DecodeOptions, out_dtype

_library.define(
    "decode(Tensor q, Tensor k_cache, Tensor v_cache, "
    "Tensor? cache_seqlens, Tensor? cache_leftpad, Tensor? cache_batch_idx, Tensor? block_table, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k_new, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? k_descale, Tensor? v_descale, Tensor? tree_mask, Tensor? prior_out, Tensor? prior_lse, "
    "SymInt? max_seqlen_q, SymInt seqlen_new, float? softmax_scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, int num_splits, int split_size, bool partial, "
    "str? backend, bool debug_checks) -> (Tensor, Tensor)"
)
_library.define(
    "append_kvcache(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor? cache_seqlens, Tensor? slot_mapping, Tensor? cache_batch_idx, Tensor? block_table, "
    "Tensor? cu_seqlens_k_new, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, "
    "Tensor? k_descale, Tensor? v_descale, Tensor? q, Tensor? cu_seqlens_q, Tensor(c!)? q_rotated, "
    "SymInt? max_seqlen_k_new, SymInt? max_seqlen_q, bool rotary_interleaved, bool rotate_q_by_token, "
    "str? backend, bool debug_checks) -> ()"
)
_library.define(
    "combine(Tensor out_partial, Tensor lse_partial, ScalarType out_dtype, str? backend) -> (Tensor, Tensor)"
)
_library.define(
    "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_pairs, Tensor(c!)? k_descale, "
    "Tensor(d!)? v_descale, str? backend, bool debug_checks) -> ()"
)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tensors: CacheTensors,
    options: DecodeOptions,
    return_lse: bool = True,
) -> tuple[Tensor, Any]:
    """(out, lse) of attention over a cache, by the shortest path that is right; lse may be None unless
    ``return_lse``.
    """
    if is_plain(q, k_cache, v_cache, *tensors):
        return launches.decode(q, k_cache, v_cache, tensors, options, return_lse)
    check_decode(q, k_cache, v_cache, tensors, options)
    return torch.ops.flashtile.decode(q, k_cache, v_cache, *tensors, *options)


def append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors, options: AppendOptions
) -> None:
    """Write k and v into the caches in place; no gradient flows through a cache."""
    if is_plain(k_cache, v_cache, k, v, *tensors, inference=True):
        launches.append(k_cache, v_cache, k, v, tensors, options)
        return
    check_append(k_cache, v_cache, k, v, tensors, options)
    with torch.no_grad():
        torch.ops.flashtile.append_kvcache(k_cache, v_cache, k, v, *tensors, *options)


def append_and_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    appended: AppendTensors,
    append_options: AppendOptions,
    tensors: CacheTensors,
    options: DecodeOptions,
    return_lse: bool = True,
) -> tuple[Tensor, Any]:
    """(out, lse) over a cache with k and v in it, as :func:`decode`. Nothing is written unless the whole call
    is right.

    ``appended`` comes without queries; they are rotated here if it has angles.
    """
    angles = appended.rotary_cos, appended.rotary_sin, appended.rotary_seqlens
    if is_plain(q, k_cache, v_cache, k, v, *tensors, *angles):
        return launches.append_and_decode(
            q, k_cache, v_cache, k, v, appended, append_options, tensors, options, return_lse
        )
    check_decode(q, k_cache, v_cache, tensors, options)
    if appended.rotary_cos is not None:
        queries = q.detach().new_empty(q.shape)
        appended = appended._replace(q=q.detach(), cu_seqlens_q=tensors.cu_seqlens_q, q_rotated=queries)
        append(k_cache, v_cache, k, v, appended, append_options)
        if q.requires_grad and torch.is_grad_enabled():
            # Whoever asks for a gradient is to be refused, and not told that there is none.
            queries = torch.where(queries.new_ones((), dtype=torch.bool), queries, q)
        q = queries
    else:
        append(k_cache, v_cache, k, v, appended, append_options)
    return decode(q, k_cache, v_cache, tensors, options, return_lse)


def combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows from their partial results."""
    if is_plain(out_partial, lse_partial):
        return launches.combine(out_partial, lse_partial, out_dtype, backend)
    check_combine(out_partial, lse_partial, None, out_dtype)
    return torch.ops.flashtile.combine(out_partial, lse_partial, out_dtype, backend)


def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_pairs: Tensor,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    backend: str | None,
    debug_checks: bool,
) -> None:
    """Copy blocks of caches with a dimension of layers in front, in place."""
    tensors = (k_cache, v_cache, block_pairs, k_descale, v_descale)
    if is_plain(*tensors, inference=True):
        launches.copy_blocks(*tensors, backend, debug_checks)
        return
    check_copy(*tensors)
    with torch.no_grad():
        torch.ops.flashtile.copy_blocks(*tensors, backend, debug_checks)


def is_plain(*tensors: Tensor | None, inference: bool = False) -> bool:
    """Nothing but this call would see the operator: no trace, mode, transform, subclass or gradient.

    ``inference``: no gradient is wanted whatever the tensors say.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    grad = torch.is_grad_enabled() and not inference
    for tensor in tensors:
        if tensor is not None and (type(tensor) is not Tensor or (grad and tensor.requires_grad)):
            return False
    first = tensors[0]  # whose device the others must share
    return (
        (first is None or not first.is_meta)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


def _decode_kernel(q, k_cache, v_cache, *arguments):
    tensors, options = CacheTensors(*arguments[:_CACHE]), DecodeOptions(*arguments[_CACHE:])
    return launches.decode(q, k_cache, v_cache, tensors, options)


def _decode_fake(q, k_cache, v_cache, *arguments):
    tensors, options = CacheTensors(*arguments[:_CACHE]), DecodeOptions(*arguments[_CACHE:])
    check_decode(q, k_cache, v_cache, tensors, options)
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if tensors.cu_seqlens_q is not None else (rows[0], heads, rows[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*rows, heads, v_cache.shape[-1]), dtype=out_dtype(q, options))
    return out, q.new_empty(lse_shape, dtype=lse_dtype)


def _append_kernel(k_cache, v_cache, k, v, *arguments):
    tensors, options = AppendTensors(*arguments[:_APPEND]), AppendOptions(*arguments[_APPEND:])
    launches.append(k_cache, v_cache, k, v, tensors, options)


def _append_fake(k_cache, v_cache, k, v, *arguments):
    tensors, options = AppendTensors(*arguments[:_APPEND]), AppendOptions(*arguments[_APPEND:])
    check_append(k_cache, v_cache, k, v, tensors, options)


def _combine_fake(out_partial, lse_partial, out_dtype, backend):
    check_combine(out_partial, lse_partial, None, out_dtype)
    _, batch, seqlen, heads, _ = out_partial.shape
    out = out_partial.new_empty(out_partial.shape[1:], dtype=out_dtype)
    return out, lse_partial.new_empty((batch, heads, seqlen))


def _copy_fake(k_cache, v_cache, block_pairs, k_descale, v_descale, backend, debug_checks):
    check_copy(k_cache, v_cache, block_pairs, k_descale, v_descale)


def _refuse_gradient(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "q must not require a gradient: attention over a cache has no backward pass (call it under "
        "torch.no_grad(), or train with flash_attn_func or flash_attn_varlen_func)"
    )


def _refuse_combine_gradient(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "out_partial must not require a gradient: flash_attn_combine has no backward pass, merge_states has"
    )


_CACHE = len(CacheTensors._fields)
_APPEND = len(AppendTensors._fields)
for _device in ("CUDA", "CPU"):
    _library.impl("decode", _decode_kernel, _device)
    _library.impl("append_kvcache", _append_kernel, _device)
    _library.impl("combine", launches.combine, _device)
    _library.impl("copy_blocks", launches.copy_blocks, _device)
torch.library.register_fake("flashtile::decode", _decode_fake, lib=_library)
torch.library.register_fake("flashtile::append_kvcache", _append_fake, lib=_library)
torch.library.register_fake("flashtile::combine", _combine_fake, lib=_library)
torch.library.register_fake("flashtile::copy_blocks", _copy_fake, lib=_library)
torch.library.register_autograd("flashtile::decode", _refuse_gradient, lib=_library)
torch.library.register_autograd("flashtile::combine", _refuse_combine_gradient, lib=_library)
