"""Every configuration of attention over a cache on Hopper, for compilation ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashtile.backends.common.compile_report import CompileCase, types_of
from flashtile.backends.common.device import Target
from flashtile.backends.common.launch import NUM_WARPS
from flashtile.backends.hopper.compile_cases import HOPPER, words
from flashtile.backends.hopper.decode.combine import combine_divided_kernel, combine_recorded_kernel
from flashtile.backends.hopper.decode.config import HopperDecodeConfig, choose, every_row
from flashtile.backends.hopper.decode.kernel import (
    CacheRows,
    CacheStrides,
    HopperDecodePointers,
    attend_kernel,
)
from flashtile.backends.hopper.decode.launch import (
    divided_variant,
    hopper_decode_variant,
    packed,
    recorded_variant,
    views,
)
from flashtile.backends.hopper.decode.work import CHUNKS, TablePointers, table_kernel
from flashtile.backends.hopper.forward.schedule import Numbers
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.backends.portable.decode.attend import OuterStrides
from flashtile.backends.portable.decode.combine import CombinePointers
from flashtile.backends.portable.decode.schedule import DecodeLengths, Splits
from flashtile.problems.decode import FP8, DecodeProblem

_PAGED = DecodeProblem(
    batch=8,
    seqlen_q=8,
    total_q=64,
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
    device=Target("H100", (9, 0), 132),  # type: ignore[arg-type]
    softmax_scale=1.0,
    window_right=0,
    lengths=True,
)
_CHUNK: dict[str, Any] = {"seqlen_q": 1024, "total_q": 8192}
_WHOLE: dict[str, Any] = {"batch": 16, "total_q": 128}
_MANY_SEQUENCES: dict[str, Any] = {"batch": 40, "total_q": 320}
_FEATURES: dict[str, Any] = {
    "window_left": 1024,
    "softcap": 1.0,
    "alibi": True,
    "sink": True,
    "varlen": True,
    "varlen_new": True,
    "num_splits": 3,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "page 1": {"page_size": 1},
    "padded": {"page_size": 0, "leftpad": True},
    "page 256": {"page_size": 256},
    "dense": {"page_size": 0, "batch_idx": True},
    "tree": {"window_right": -1, "tree": True},
    "chunk": {"attention_chunk": 8192},
    "e4m3 by head": {"descale": "head"},
    "e4m3 by sequence": {"descale": "sequence"},
    "e4m3 by block, page 1": {"descale": "block", "page_size": 1},
}
_E4M3 = ("e4m3 by head", "e4m3 by sequence", "e4m3 by block, page 1")
_FEW, _MANY = ("padded", "tree"), ("page 1", "page 256", "dense", "chunk")
"""Variants compiled with at most 64 query rows per sequence and key head, and with more."""


_STRUCTURES = {
    "lengths": types_of(DecodeLengths, "i32", attention_chunk=None),
    "splits": types_of(Splits, "i32"),
}
_COMBINED = {
    "pointers": types_of(
        CombinePointers, None, partial="*fp32", out="*bf16", lse="*fp32", cache_seqlens="*i32"
    ),
    **_STRUCTURES,
    "row_blocks": "i32",
}
"""Types of the arguments of a kernel that combines parts."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield a compile case with all features for each configuration (:func:`every_row`).

    Configurations of equal head sizes also have a case without features, and those with head_dim 128 have
    cases of ``_VARIANTS``. Last come the kernels that combine parts, and the one that fills the table of the
    work queue.
    """
    if arch != HOPPER:
        return
    for block_d, block_dv, cache_dtype, config in every_row():
        problem = replace(_PAGED, head_dim=block_d, head_dim_v=block_dv, cache_dtype=cache_dtype)
        rows: tuple[dict[str, Any], ...] = ({}, _WHOLE, _CHUNK)
        problem = next(p for p in (replace(problem, **row) for row in rows) if choose(p) == config)
        fp8 = cache_dtype == FP8
        features = _FEATURES | ({"descale": "block"} if fp8 else {})
        if block_d == block_dv:
            yield _case(problem, config, "e4m3" if fp8 else "page 16")
        yield _case(replace(problem, **features), config, "e4m3 features" if fp8 else "features")
        if block_d == block_dv == 128:
            few = _FEW if problem.seqlen_q == _PAGED.seqlen_q else _MANY
            for name in _E4M3 if fp8 else few:
                varied = replace(problem, **_VARIANTS[name])
                yield _case(varied, choose(varied), name)
    for problem in (_PAGED, replace(_PAGED, **_MANY_SEQUENCES)):
        yield _combine_case(problem, choose(problem))
    problem = replace(_PAGED, **_CHUNK)
    config = choose(problem)
    constants = {"C": hopper_decode_variant(problem, config), "WIDTH": TABLE_WIDTH.value, "CHUNK": CHUNKS[-1]}
    signature = {"pointers": TablePointers("*fp32", "*i32", None, None, None)}
    signature |= {"batch": "i32", "programs": "i32"} | _STRUCTURES
    yield _small_case("hopper decode table", table_kernel, signature, constants)
    variant, num_warps = divided_variant(packed(problem), config)
    constants = {"C": variant, "WIDTH": TABLE_WIDTH.value}
    name = "hopper decode combine of a table"
    yield _small_case(name, combine_divided_kernel, _COMBINED, constants, num_warps)


def _combine_case(problem: DecodeProblem, config: HopperDecodeConfig) -> CompileCase:
    variant, num_warps = recorded_variant(problem, config, hopper_decode_variant(problem, config))
    name = f"hopper decode combine by {'work tile' if variant.BY_WORK_TILE else 'program'}"
    return _small_case(name, combine_recorded_kernel, _COMBINED, {"C": variant}, num_warps)


def _small_case(
    name: str, kernel: Any, signature: dict[str, Any], constants: dict[str, Any], num_warps: int = NUM_WARPS
) -> CompileCase:
    """Return the compile case of a kernel without matrix products."""
    return CompileCase(
        name=name,
        kernel=kernel,
        signature=signature,
        constants=constants,
        num_warps=num_warps,
        tensor_cores=False,
    )


def _case(problem: DecodeProblem, config: HopperDecodeConfig, name: str) -> CompileCase:
    variant = hopper_decode_variant(problem, config)
    shape = (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)
    rows = (problem.num_blocks, problem.page_size or problem.capacity, problem.num_heads_kv)
    q = torch.empty(*shape, problem.num_heads_q, problem.head_dim, dtype=problem.dtype, device="meta")
    k = torch.empty(*rows, problem.head_dim, dtype=problem.cache_dtype, device="meta")
    v = torch.empty(*rows, problem.head_dim_v, dtype=problem.cache_dtype, device="meta")
    cache = "*fp8e4nv" if variant.E4M3 else "*bf16"
    gathered = cache if variant.GATHER else None
    scales = "*fp32" if problem.descale != "none" else None
    pointers = types_of(
        HopperDecodePointers,
        None,
        k_cache=gathered,
        v_cache=gathered,
        out="*bf16",
        lse="*fp32",
        partial="*fp32",
        cache_seqlens="*i32" if problem.lengths else None,
        cache_leftpad="*i32" if problem.leftpad else None,
        cache_batch_idx="*i32" if problem.batch_idx else None,
        block_table="*i32" if problem.page_size else None,
        cu_seqlens_q="*i32" if problem.varlen else None,
        cu_seqlens_k_new="*i32" if problem.varlen_new else None,
        alibi_slopes="*fp32" if problem.alibi else None,
        sink="*fp32" if problem.sink else None,
        tree_mask="*i1" if problem.tree else None,
        k_descale=scales,
        v_descale=scales,
    )
    descriptors = dict(zip(("q_desc", "k_desc", "v_desc"), views(problem, variant, q, k, v), strict=True))
    more = words({"stream-K": variant.STREAM_K, "queue": not variant.STREAM_K})
    head = f"head_dim {variant.BLOCK_D}/{variant.BLOCK_DV} {variant.BLOCK_M}x{variant.BLOCK_N}"
    return CompileCase(
        name=" ".join(("hopper decode", head, name, *more)),
        kernel=attend_kernel,
        signature={name: view.type_name for name, view in descriptors.items()}
        | {
            "pointers": pointers,
            "strides": types_of(CacheStrides, "i32"),
            **_STRUCTURES,
            **({"lengths": types_of(DecodeLengths, "i32")} if problem.attention_chunk else {}),
            "cache": types_of(CacheRows, "i32"),
            "outer": types_of(OuterStrides, "i32"),
            "numbers": types_of(Numbers, "fp32"),
        },
        constants={"C": variant},
        divisible_by_16=frozenset(("strides",)),
        options={"maxnreg": config.registers[-1]},
        spill_budget=config.tile.features_spill_budget if "features" in name else config.tile.spill_budget,
        exhaustive=variant.E4M3 and (variant.HEAD_DIM != 128 or name not in ("e4m3", "e4m3 features")),
    )
