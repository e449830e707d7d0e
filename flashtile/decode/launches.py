"""Launches of the decoding functions, kept per call signature as in :mod:`flashtile.launches`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.checks.decode import check_append, check_combine, check_copy, check_decode
from flashtile.checks.values import check_append_values, check_copy_values, check_decode_values, wanted
from flashtile.decode.dispatch import Launch, select
from flashtile.decode.problem import (
    AppendOptions,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    CombineProblem,
    CopyProblem,
    DecodeOptions,
    DecodeProblem,
)
from flashtile.launches import LaunchCache, signatures

_decode_launches = LaunchCache()
_append_launches = LaunchCache()
_append_and_decode_launches = LaunchCache()
_combine_launches = LaunchCache()
_copy_launches = LaunchCache()


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tensors: CacheTensors,
    options: DecodeOptions,
    return_lse: bool = True,
) -> tuple[Tensor, Any]:
    """(out, lse) of attention over a cache; lse may be None unless ``return_lse``."""
    launch = find_decode(q, k_cache, v_cache, tensors, options)
    if wanted(q, options.debug_checks):
        check_decode_values(q, k_cache, tensors, options)
    return launch(q, k_cache, v_cache, *tensors, return_lse=return_lse)


def find_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
) -> Launch:
    """The launch for this signature; a new one is checked and prepared."""
    try:
        key = (options, *signatures((q, k_cache, v_cache, *tensors)))
    except Exception:  # not a tensor, or one without strides: the checks name it
        check_decode(q, k_cache, v_cache, tensors, options)
        raise
    launch = _decode_launches.get(key)
    if launch is None:
        check_decode(q, k_cache, v_cache, tensors, options)
        problem = DecodeProblem.from_tensors(q, k_cache, v_cache, tensors, options)
        launch = _decode_launches.keep(key, select(problem, options.backend).prepare_decode(problem))
    return launch


def append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors, options: AppendOptions
) -> None:
    """Write k and v into the caches in place, and the rotated queries into their tensor."""
    launch = find_append(k_cache, v_cache, k, v, tensors, options)
    if wanted(k, options.debug_checks):
        check_append_values(k_cache, k, tensors, options)
    launch(k_cache, v_cache, k, v, *tensors)


def find_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors, options: AppendOptions
) -> Launch:
    """The launch for this signature; a new one is checked and prepared."""
    try:
        key = (options, *signatures((k_cache, v_cache, k, v, *tensors)))
    except Exception:
        check_append(k_cache, v_cache, k, v, tensors, options)
        raise
    launch = _append_launches.get(key)
    if launch is None:
        check_append(k_cache, v_cache, k, v, tensors, options)
        problem = AppendProblem.from_tensors(k_cache, v_cache, k, v, tensors, options)
        launch = _append_launches.keep(key, select(problem, options.backend).prepare_append(problem))
    return launch


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
    """Append, then (out, lse) as :func:`decode`, by one look-up for both. Nothing is written unless the whole
    call is right.

    ``appended`` comes without queries; they are rotated here if it has angles.
    """
    angles = appended.rotary_cos, appended.rotary_sin, appended.rotary_seqlens
    try:
        key = (options, append_options, *signatures((q, k_cache, v_cache, k, v, *tensors, *angles)))
    except Exception:
        check_decode(q, k_cache, v_cache, tensors, options)
        check_append(k_cache, v_cache, k, v, appended, append_options)
        raise
    queries = q
    if appended.rotary_cos is not None:
        queries = q.new_empty(q.shape)
        appended = AppendTensors(*appended[:-3], q, tensors.cu_seqlens_q, queries)
    launches = _append_and_decode_launches.get(key)
    if launches is None:
        pair = (
            find_append(k_cache, v_cache, k, v, appended, append_options),
            find_decode(queries, k_cache, v_cache, tensors, options),
        )
        launches = _append_and_decode_launches.keep(key, pair)
    if wanted(q, options.debug_checks):
        check_append_values(k_cache, k, appended, append_options)
        check_decode_values(queries, k_cache, tensors, options)
    launches[0](k_cache, v_cache, k, v, *appended)
    return launches[1](queries, k_cache, v_cache, *tensors, return_lse=return_lse)


def combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(out, lse) as (batch, seqlen, heads, head_dim) and (batch, heads, seqlen) from 5- and 4-dimensional
    partial results."""
    key = (out_dtype, backend, *signatures((out_partial, lse_partial)))
    launch = _combine_launches.get(key)
    if launch is None:
        check_combine(out_partial, lse_partial, None, out_dtype)
        num_splits, batch, seqlen, heads, head_dim = out_partial.shape
        problem = CombineProblem(
            num_splits, batch, seqlen, heads, head_dim, out_partial.dtype, out_dtype, out_partial.device
        )
        launch = _combine_launches.keep(key, select(problem, backend).prepare_combine(problem))
    return launch(out_partial, lse_partial)


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
    key = (backend, *signatures(tensors))
    launch = _copy_launches.get(key)
    if launch is None:
        check_copy(*tensors)
        problem = CopyProblem(
            num_pairs=block_pairs.shape[0],
            num_layers=k_cache.shape[0],
            num_blocks=k_cache.shape[1],
            dtype=k_cache.dtype,
            device=k_cache.device,
            descales=k_descale is not None,
        )
        launch = _copy_launches.keep(key, select(problem, backend).prepare_copy(problem))
    if wanted(k_cache, debug_checks):
        check_copy_values(k_cache.shape[1], block_pairs)
    launch(*tensors)
