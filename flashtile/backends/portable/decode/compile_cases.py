"""Configurations of the decoding kernels, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashtile.backends.common.compile_cases import case_of, launches_of, meta
from flashtile.backends.common.compile_report import CompileCase, architecture, types_of
from flashtile.backends.common.config import QkvStrides
from flashtile.backends.common.device import compiling_for
from flashtile.backends.common.launch import NUM_WARPS
from flashtile.backends.portable.config import family_of_capability
from flashtile.backends.portable.decode import config, launch
from flashtile.backends.portable.decode.attend import (
    DecodeNumbers,
    DecodePointers,
    OuterStrides,
    decode_kernel,
)
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
from flashtile.backends.portable.decode.launch import (
    APPEND_ROWS,
    COPY_TILE,
    AppendingLaunch,
    AppendLaunch,
    CopyLaunch,
)
from flashtile.backends.portable.decode.schedule import DecodeLengths, Splits
from flashtile.backends.portable.exchange import exchange_kernel, exchange_variant
from flashtile.problems.common import UNLIMITED
from flashtile.problems.decode import (
    FP8,
    AppendOptions,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    CopyOptions,
    CopyProblem,
    CopyTensors,
    DecodeOptions,
    DecodeProblem,
)

_PAGED = DecodeProblem(
    batch=8,
    seqlen_q=1,
    total_q=8,
    num_heads_q=32,
    num_heads_kv=8,
    head_dim=128,
    head_dim_v=128,
    capacity=65536,
    page_size=16,
    num_blocks=32768,
    seqlen_new=0,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    device=torch.device("meta"),
    softmax_scale=1.0,
    lengths=True,
)
_FEATURES = {
    "seqlen_q": 4,
    "window_left": 1024,
    "window_right": 0,
    "softcap": 1.0,
    "alibi": True,
    "sink": True,
    "leftpad": True,
    "varlen": True,
    "varlen_new": True,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "page 16": {},
    "page 1": {"page_size": 1},
    "page 256": {"page_size": 256},
    "dense": {"page_size": 0},
    "whole": {"page_size": 0, "lengths": False, "capacity": 256, "return_lse": False},
    "splits": {"num_splits": 4},
    "tree": {"tree": True, "seqlen_q": 4},
    "prior": {"prior": True},
    "unified max": {"softmax_max": 0.0},
    "unified max, features": _FEATURES | {"softmax_max_by_head": True},
    "features": _FEATURES,
    "chunk": {"seqlen_q": 4, "window_right": 0, "attention_chunk": 8192},
}
"""Variants by name. Every tile is compiled for pages of 16 tokens. For 16-bit elements and head_dim 128,
NARROW tiles are compiled for all variants, and other tiles for ``_WIDE_VARIANTS``."""
_WIDE_VARIANTS = ("page 16", "splits", "features", "unified max")

_LATENT_SPILLS = {("hopper", config.WIDE): 556, ("ampere", config.WIDE): 116}
"""Accepted bytes of spills with ``qv``, by family and BLOCK_M. These kernels were not timed."""

_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    FP8: "*fp8e4nv",
}


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the cases of all decoding kernels.

    Attention is compiled with each tile that is configured for ``arch``. Some tiles are compiled in several
    variants.
    """
    capability = architecture(arch).capability
    table_family = family_of_capability(*divmod(capability, 10))
    for dtype, element_bytes in ((torch.bfloat16, 2), (torch.float32, 4), (FP8, 1)):
        for head_dim in config.HEAD_DIMS:
            for BLOCK_M in config.row_blocks(table_family, element_bytes, head_dim):
                chosen = config.row(table_family, element_bytes, BLOCK_M, head_dim)
                variants: Iterable[str] = ("page 16",)
                if element_bytes == 1 and head_dim == 128 and BLOCK_M == config.NARROW:
                    variants = ("page 16", "unified max")
                if head_dim == 128 and element_bytes == 2:
                    variants = _VARIANTS if BLOCK_M == config.NARROW else _WIDE_VARIANTS
                for variant in variants:
                    problem = replace(
                        _PAGED,
                        head_dim=head_dim,
                        head_dim_v=head_dim,
                        dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
                        cache_dtype=dtype,
                        descale="head" if dtype == FP8 else "none",
                        **_VARIANTS[variant],
                    )
                    name = f"{_TYPES[dtype][1:]} head_dim {head_dim} rows {BLOCK_M} {variant}"
                    yield _attention_case(f"decode {name}", problem, chosen, capability, variant)
                    if head_dim == 128 and variant in ("page 16", "splits") and element_bytes == 2:
                        yield _combine_case(f"decode combine {name}", problem, chosen, capability, True)
                        if launch.is_stream_k(problem, chosen):
                            by_boundary = f"decode combine {name} by boundary"
                            yield _combine_case(by_boundary, problem, chosen, capability, False)
    latent = replace(_PAGED, num_heads_q=128, num_heads_kv=1, head_dim=64, head_dim_v=512, qv=True)
    for BLOCK_M in config.row_blocks(table_family, 2, latent.head_dim_v):
        chosen = config.row(table_family, 2, BLOCK_M, latent.head_dim_v)
        tile = replace(chosen.tile, spill_budget=_LATENT_SPILLS.get((table_family, BLOCK_M), 0))
        name = f"decode bf16 latent 64 and 512 rows {BLOCK_M}"
        case = _attention_case(name, latent, replace(chosen, tile=tile), capability, "page 16")
        few = table_family == "hopper" and BLOCK_M == config.NARROW
        yield replace(case, exhaustive=not few)
    if table_family == "hopper":
        for head_dim in (64, 128):
            yield _appending_case(head_dim, divmod(capability, 10))
    yield _combine_given_case()
    if not architecture(arch).amd:
        yield _exchange_case()
    for dtype in (torch.bfloat16, FP8):
        for packed in (False, True):
            yield _append_case(dtype, divmod(capability, 10), packed)
    yield _copy_case(divmod(capability, 10))


def _attention_case(
    name: str, problem: DecodeProblem, chosen: DecodeConfig, capability: int, variant: str
) -> CompileCase:
    native = capability >= 89
    cache = problem.cache_dtype
    pairs = cache == FP8 and chosen.tile.BLOCK_M == config.NARROW
    if pairs:
        cache = torch.uint16
    elif cache == FP8 and not native:
        cache = torch.uint8
    left, right = launch.effective_window(problem)
    plan = launch.Plan(
        cache, left != UNLIMITED, right != UNLIMITED, True, False, False, launch.is_stream_k(problem, chosen),
        0, launch.softmax_max_kind(problem, chosen), 0,
    )  # fmt: skip
    with compiling_for(divmod(capability, 10)):
        compiled_for = launch.decode_variant(problem, chosen, plan)
    elements = _TYPES[problem.dtype]
    pointers = types_of(
        DecodePointers,
        None,
        q=elements,
        k=_TYPES[cache],
        v=_TYPES[cache],
        out=_TYPES[problem.out_dtype],
        lse="*fp32" if problem.return_lse else None,
        partial="*fp32",
        cache_seqlens="*i32",
        cache_leftpad="*i32" if problem.leftpad else None,
        block_table="*i32" if problem.page_size else None,
        cu_seqlens_q="*i32" if problem.varlen else None,
        cu_seqlens_k_new="*i32" if problem.varlen_new else None,
        alibi_slopes="*fp32" if problem.alibi else None,
        sink="*fp32" if problem.sink else None,
        k_descale="*fp32" if problem.descale != "none" else None,
        v_descale="*fp32" if problem.descale != "none" else None,
        tree_mask="*i1" if problem.tree else None,
        prior_out="*fp32" if problem.prior else None,
        prior_lse="*fp32" if problem.prior else None,
        softmax_max="*fp32" if problem.softmax_max_by_head else None,
        qv=elements if problem.qv else None,
    )
    softmax_max = None if problem.softmax_max is None else "fp32"
    tile = chosen.tile
    has_features = variant == "tree" or variant.endswith("features") or variant.startswith("unified")
    return CompileCase(
        name=name,
        kernel=decode_kernel,
        signature={
            "pointers": pointers,
            "strides": types_of(QkvStrides, "i32"),
            "outer": types_of(OuterStrides, "i32"),
            "lengths": types_of(
                DecodeLengths, "i32", attention_chunk="i32" if problem.attention_chunk else None
            ),
            "numbers": types_of(DecodeNumbers, "fp32", softmax_max=softmax_max),
            "num_blocks": "i32",
            "splits": types_of(Splits, "i32"),
            "new_strides": None,
            "new_lengths": None,
        },
        constants={"C": compiled_for},
        divisible_by_16=frozenset(("strides",)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        spill_budget=tile.features_spill_budget if has_features else tile.spill_budget,
        tensor_cores=problem.dtype.itemsize == 2 or chosen.precision != "ieee",
    )


def _combine_case(
    name: str, problem: DecodeProblem, chosen: DecodeConfig, capability: int, by_work_tile: bool
) -> CompileCase:
    stream_k = launch.is_stream_k(problem, chosen)
    tile = launch.combine_tile(problem, chosen, (33 if by_work_tile else 1) if stream_k else None)
    compiled_for = launch.combine_variant(problem, chosen, tile, stream_k, by_work_tile, capability >= 90)
    signature = {
        "pointers": types_of(
            CombinePointers, None, partial="*fp32", out=_TYPES[problem.out_dtype], lse="*fp32",
            cache_seqlens="*i32",
        ),
        "lengths": types_of(DecodeLengths, "i32", attention_chunk=None),
        "splits": types_of(Splits, "i32"),
        "teams": "i32",
        "row_blocks": "i32",
    }  # fmt: skip
    return _plain_case(name, combine_kernel, signature, compiled_for, num_warps=tile.num_warps)


def _combine_given_case() -> CompileCase:
    signature = {
        "pointers": types_of(GivenPointers, "*fp32", out="*bf16"),
        "strides": types_of(GivenStrides, "i32"),
        "sizes": types_of(GivenSizes, "i32"),
    }
    compiled_for = CombineGivenVariant(HEAD_DIM_V=128, BLOCK_DV=128, ROWS=2, SPLITS=16)
    return _plain_case("decode combine given", combine_given_kernel, signature, compiled_for)


def _exchange_case() -> CompileCase:
    signature = dict.fromkeys(exchange_kernel.arg_names, "i32") | {"timeout_ns": "i64"}
    signature |= {"out": "*fp32", "lse": "*fp32", "result": "*bf16", "result_lse": "*fp32"}
    signature |= {"memories": "*i64", "calls": "*i64"}
    del signature["C"]
    return CompileCase(
        name="decode exchange",
        kernel=exchange_kernel,
        signature=signature,
        constants={"C": exchange_variant(2, 2048, 128)},
        num_warps=NUM_WARPS,
        tensor_cores=False,
    )


def _append_case(dtype: torch.dtype, capability: tuple[int, int], packed: bool) -> CompileCase:
    """Return the case of an append kernel that applies rotary embedding to the new keys and to queries.

    There are as many query tokens as new tokens. ``packed``: whether their sequences are packed.
    """
    bf16, int32, heads = torch.bfloat16, torch.int32, 8
    cache = meta(1024, 16, heads, 128, dtype=dtype)
    rows = (8 * APPEND_ROWS,) if packed else (8, APPEND_ROWS)
    new, q = meta(*rows, heads, 128, dtype=bf16), meta(*rows, 4 * heads, 128, dtype=bf16)
    offsets = meta(9, dtype=int32) if packed else None
    scales = None
    if dtype == FP8:
        scales = meta(8, 1, heads) if packed else meta(1024, heads)
    tensors = AppendTensors(
        cache_seqlens=meta(8, dtype=int32), block_table=meta(8, 64, dtype=int32), cu_seqlens_k_new=offsets,
        rotary_cos=meta(1024, 64), rotary_sin=meta(1024, 64), k_descale=scales, v_descale=scales, q=q,
        cu_seqlens_q=offsets, q_rotated=q,
    )  # fmt: skip
    longest = APPEND_ROWS if packed else None
    options = AppendOptions(max_seqlen_k_new=longest, max_seqlen_q=longest, rotate_q_by_token=True)
    given = (cache, cache, new, new, tensors)
    with compiling_for(capability):
        launch = AppendLaunch(AppendProblem.from_tensors(*given, options))
    (launched,) = launches_of(capability, partial(launch, *given))
    name = f"decode append {_TYPES[dtype][1:]}{' packed' if packed else ''}"
    return case_of(launched, name, tensor_cores=False)


def _appending_case(head_dim: int, capability: tuple[int, int]) -> CompileCase:
    """Return the case of an attention kernel that appends a new token and applies rotary embedding."""
    bf16, int32, heads = torch.bfloat16, torch.int32, 8
    cache, new = (meta(size, n, heads, head_dim, dtype=bf16) for size, n in ((4096, 16), (1, 1)))
    queries = meta(1, 1, 4 * heads, head_dim, dtype=bf16)
    lengths, table, angles = meta(1, dtype=int32), meta(1, 4096, dtype=int32), meta(65536, head_dim // 2)
    given = (cache, cache, new, new)
    tensors = CacheTensors(cache_seqlens=lengths, block_table=table)
    appended = AppendTensors(cache_seqlens=lengths, block_table=table, rotary_cos=angles, rotary_sin=angles)
    with compiling_for(capability):
        problem = DecodeProblem.from_tensors(queries, cache, cache, tensors, DecodeOptions(seqlen_new=1))
        append = AppendLaunch(AppendProblem.from_tensors(*given, appended, AppendOptions()))
        chosen = config.choose(problem)
        launch = AppendingLaunch(problem, chosen, append)
    (launched, *_) = launches_of(capability, partial(launch, queries, *given, appended, tensors))
    name = f"decode bf16 head_dim {head_dim} rows {config.NARROW} appending"
    return case_of(launched, name, spill_budget=chosen.tile.spill_budget)


def _copy_case(capability: tuple[int, int]) -> CompileCase:
    cache = meta(1, 1024, COPY_TILE // 128 // 8, 8, 128, dtype=torch.bfloat16)
    given = (cache, cache, meta(4, 2, dtype=torch.int32), CopyTensors())
    launch = CopyLaunch(CopyProblem.from_tensors(*given, CopyOptions()))
    (launched,) = launches_of(capability, partial(launch, *given))
    return case_of(launched, "decode copy blocks", tensor_cores=False)


def _plain_case(
    name: str,
    kernel: Any,
    signature: dict[str, Any],
    compiled_for: Any,
    num_warps: int = NUM_WARPS,
) -> CompileCase:
    """Return the case of a kernel without matrix products."""
    return CompileCase(
        name=name,
        kernel=kernel,
        signature=signature,
        constants={"C": compiled_for},
        num_warps=num_warps,
        tensor_cores=False,
    )
