"""Configurations of the decoding kernels, for compilation ahead of time (``flashtile inspect``, tests)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton

from flashtile.backends.common.compile_report import CompileCase, architecture
from flashtile.backends.common.kept_kernel import NUM_WARPS
from flashtile.backends.portable.config import family_of_capability
from flashtile.backends.portable.decode import append, combine, config, copy_blocks, launch
from flashtile.backends.portable.decode import append_launch as launch_cache
from flashtile.backends.portable.decode.append import append_kernel
from flashtile.backends.portable.decode.attend import decode_kernel
from flashtile.backends.portable.decode.combine import combine_given_kernel, combine_kernel
from flashtile.backends.portable.decode.config import DecodeConfig
from flashtile.backends.portable.decode.copy_blocks import copy_kernel
from flashtile.backends.portable.exchange import exchange_kernel, variant_of
from flashtile.problems.decode import FP8, DecodeProblem

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
}
"""Every tile is compiled for pages of 16, those of 16-bit heads of 128 for the rest, too."""
_WIDE_VARIANTS = ("page 16", "splits", "features", "unified max")

_LATENT_SPILLS = {("hopper", config.WIDE): 556, ("ampere", config.WIDE): 116}
"""Bytes of spills with queries for the values, by family and rows: as they are, not timed."""

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.uint16: "u16",
    FP8: "fp8e4nv",
}
_INT32_TENSORS = ("cache_seqlens", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new", "block_table")
_FLOAT_TENSORS = ("rotary_cos", "rotary_sin", "prior_out", "prior_lse")
_FLOATS = ("softmax_scale", "scale_log2", "softcap", "softmax_max")


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each row of the table that serves ``arch``, variants of one, and the kernels beside attention."""
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
                    name = f"{_TYPES[dtype]} head_dim {head_dim} rows {BLOCK_M} {variant}"
                    yield _attention_case(f"decode {name}", problem, chosen, capability, variant)
                    if head_dim == 128 and variant in ("page 16", "splits") and element_bytes == 2:
                        yield _combine_case(f"decode combine {name}", problem, chosen, capability, True)
                        if launch.is_balanced(problem, chosen):
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
    yield _combine_given_case()
    if not architecture(arch).amd:
        yield _exchange_case()
    for dtype in (torch.bfloat16, FP8):
        for packed in (False, True):
            yield _append_case(dtype, capability, packed)
    yield _copy_case()


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
    compiled_for = launch.variant_of(
        problem, chosen, native_e4m3=native, pairs=pairs, pdl=capability >= 90, wide=False, aligned=True
    )
    present = {
        "cache_leftpad": problem.leftpad,
        "block_table": problem.page_size > 0,
        "cu_seqlens_q": problem.varlen,
        "cu_seqlens_k_new": problem.varlen_new,
        "cache_batch_idx": False,
        "alibi_slopes": problem.alibi,
        "sink_ptr": problem.sink,
        "k_descale": problem.descale != "none",
        "v_descale": problem.descale != "none",
        "tree_mask": problem.tree,
        "prior_out": problem.prior,
        "prior_lse": problem.prior,
        "softmax_max_ptr": problem.softmax_max_by_head,
        "softmax_max": problem.softmax_max is not None,
        "qv_ptr": problem.qv,
        "lse_ptr": problem.return_lse,
    }
    tensors = dict.fromkeys(("q_ptr", "qv_ptr"), problem.dtype)
    tensors |= {"out_ptr": problem.out_dtype, "k_ptr": cache, "v_ptr": cache}
    constants: dict[str, Any] = {"C": compiled_for}
    constants |= {name: None for name, there in present.items() if not there}
    tile = chosen.tile
    has_features = variant == "tree" or variant.endswith("features") or variant.startswith("unified")
    return CompileCase(
        name=name,
        kernel=decode_kernel,
        **_arguments(decode_kernel, tensors, constants, ("q_stride", "k_stride", "v_stride")),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        spill_budget=tile.features_spill_budget if has_features else tile.spill_budget,
        tensor_cores=problem.dtype.itemsize == 2 or chosen.precision != "ieee",
    )


def _combine_case(
    name: str, problem: DecodeProblem, chosen: DecodeConfig, capability: int, by_work_tile: bool
) -> CompileCase:
    balanced = launch.is_balanced(problem, chosen)
    tile = launch.combine_tile(problem, chosen, (33 if by_work_tile else 1) if balanced else None)
    compiled_for = launch.combine_variant(problem, chosen, tile, by_work_tile, capability >= 90)
    absent = ("sink_ptr", "prior_out", "prior_lse", "cache_leftpad", "cu_seqlens_q", "cu_seqlens_k_new")
    constants = {"C": compiled_for} | dict.fromkeys(absent)
    return _plain_case(name, combine_kernel, {"out_ptr": problem.out_dtype}, constants, tile.num_warps)


def _combine_given_case() -> CompileCase:
    constants = {"C": combine.CombineGivenVariant(HEAD_DIM_V=128, BLOCK_DV=128, ROWS=2, SPLITS=16)}
    return _plain_case("decode combine given", combine_given_kernel, {"out_ptr": torch.bfloat16}, constants)


def _exchange_case() -> CompileCase:
    signature = dict.fromkeys(exchange_kernel.arg_names, "i32") | {"timeout_ns": "i64"}
    signature |= {"out": "*fp32", "lse": "*fp32", "result": "*bf16", "result_lse": "*fp32"}
    signature |= {"memories": "*i64", "calls": "*i64"}
    del signature["C"]
    return CompileCase(
        name="decode exchange",
        kernel=exchange_kernel,
        signature=signature,
        constants={"C": variant_of(2, 2048, 128)},
        divisible_by_16=frozenset(),
        num_warps=NUM_WARPS,
        tensor_cores=False,
    )


def _append_case(dtype: torch.dtype, capability: int, packed: bool) -> CompileCase:
    as_bits = dtype == FP8 and capability < 89
    compiled_for = append.Variant(
        HAS_SLOTS=False,
        HAS_LENGTHS=True,
        HAS_BATCH_IDX=False,
        VARLEN=packed,
        VARLEN_Q=packed,
        PAGE_SIZE=16,
        DESCALE="none" if dtype != FP8 else "sequence" if packed else "block",
        QUANTISED=dtype == FP8,
        E4M3_BITS=as_bits,
        ROTARY_DIM=128,
        INTERLEAVED=True,
        HAS_ROTARY_SEQLENS=False,
        ROTATE_Q=True,
        ROTATE_Q_BY_TOKEN=True,
        HEAD_DIM=128,
        HEAD_DIM_V=128,
        BLOCK_D=128,
        BLOCK_DV=128,
        ROWS=launch_cache.APPEND_ROWS,
    )
    absent = ["slot_mapping", "cache_batch_idx", "rotary_seqlens"]
    absent += [] if packed else ["cu_seqlens_k_new", "cu_seqlens_q"]
    absent += [] if dtype == FP8 else ["k_descale", "v_descale"]
    constants = {"C": compiled_for} | {name: None for name in absent}
    cache = torch.uint8 if as_bits else dtype
    tensors = {name: torch.bfloat16 for name in ("k_ptr", "v_ptr", "q_in_ptr", "q_out_ptr")}
    tensors |= {"k_cache_ptr": cache, "v_cache_ptr": cache}
    name = f"decode append {_TYPES[dtype]}{' packed' if packed else ''}"
    return _plain_case(name, append_kernel, tensors, constants)


def _copy_case() -> CompileCase:
    rows = launch_cache.COPY_TILE // 128
    compiled_for = copy_blocks.Variant(
        HAS_DESCALES=False,
        HEAD_DIM=128,
        HEAD_DIM_V=128,
        BLOCK_D=128,
        BLOCK_DV=128,
        BLOCK_HEADS=8,
        BLOCK=triton.next_power_of_2(rows),
    )
    constants = {"C": compiled_for, "k_descale": None, "v_descale": None}
    tensors = {"k_ptr": torch.bfloat16, "v_ptr": torch.bfloat16}
    return _plain_case("decode copy blocks", copy_kernel, tensors, constants)


def _plain_case(
    name: str,
    kernel: Any,
    tensors: dict[str, torch.dtype],
    constants: dict[str, Any],
    num_warps: int = NUM_WARPS,
) -> CompileCase:
    """A kernel without products."""
    return CompileCase(
        name=name,
        kernel=kernel,
        **_arguments(kernel, tensors, constants, ("k_", "v_")),
        num_warps=num_warps,
        tensor_cores=False,
    )


def _arguments(
    kernel: Any, tensors: dict[str, torch.dtype], constants: dict[str, Any], aligned: tuple[str, ...]
) -> dict[str, Any]:
    """Signature of a launch with contiguous tensors; strides whose names begin as ``aligned`` are multiples
    of 16."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name in tensors:
            signature[name] = f"*{_TYPES[tensors[name]]}"
        elif name in _INT32_TENSORS or name == "pairs_ptr":
            signature[name] = "*i32"
        elif name == "tree_mask":
            signature[name] = "*i1"
        elif name.endswith(("_ptr", "_slopes", "_descale")) or name in _FLOAT_TENSORS:
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name in _FLOATS else "i32"
    strides = frozenset(name for name in signature if name.startswith(aligned) and "_stride_" in name) - {
        name for name in signature if "descale" in name
    }
    return {"signature": signature, "constants": constants, "divisible_by_16": strides}
