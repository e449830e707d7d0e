"""Every configuration of the portable kernels, for compilation ahead of time (``flashtile inspect``,
tests)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashtile.backends.common import dependent_launch
from flashtile.backends.common.compile_cases import preprocess_case
from flashtile.backends.common.compile_report import CompileCase, architecture, types_of
from flashtile.backends.common.config import KernelConfig
from flashtile.backends.common.launch import padded
from flashtile.backends.portable import all_reduce, fits, flash1
from flashtile.backends.portable.attention import backward_dbias, backward_dkdv, backward_dq, forward
from flashtile.backends.portable.attention.arguments import (
    AttentionLengths,
    AttentionNumbers,
    AttentionStrides,
    AttentionVariant,
    CellStrides,
    PaddingStrides,
    TokenStrides,
)
from flashtile.backends.portable.attention.launch import attention_variant
from flashtile.backends.portable.config import HEAD_DIMS, dbias_tile, family_of_capability, for_cells, row_for
from flashtile.problems.attention import Problem

PLAIN = Problem(
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    total_q=8192,
    total_k=8192,
    num_heads_q=8,
    num_heads_kv=8,
    head_dim=64,
    head_dim_v=64,
    dtype=torch.bfloat16,
    device=torch.device("meta"),
    softmax_scale=1.0,
)
_VARIANTS: dict[str, Problem] = {
    "full": PLAIN,
    "causal": replace(PLAIN, window_right=0),
    "masks": replace(PLAIN, window_right=0, mask=True, key_padding_mask=True),
    "bias": replace(PLAIN, bias=True, bias_grad=True),
    "dropout": replace(PLAIN, window_right=0, dropout_p=0.1),
    "features": replace(
        PLAIN,
        varlen=True,
        seqused_k=True,
        window_left=64,
        window_right=64,
        softcap=1.0,
        alibi=True,
        sink=True,
    ),
}
"""Plain problems as most calls have them, and one with every feature at once."""

_WITH_CELLS = (("hopper", 2, 64), ("hopper", 2, 128))
"""Families, element bytes and head sizes for which masks, biases and dropout are compiled."""
_CELL_SPILLS = {
    "dkdv bf16 head_dim 64 dropout": 168,
    "dkdv bf16 head_dim 128 masks": 92,
    "dkdv bf16 head_dim 128 bias": 300,
    "dkdv bf16 head_dim 128 dropout": 396,
}
"""Bytes of register spills with masks, biases and dropout: the most of Triton 3.6 and 3.7, none timed yet."""
_CELLS = torch.empty(2, 8, 4096, 4096, dtype=torch.bool, device="meta")
STRIDES = frozenset({"strides"})
_CELL_STRIDES = CellStrides("i32", "i32", "i32", 1)
_SCALARS = {
    "sizes": types_of(backward_dbias.BiasSizes, "i32"),
    "padded_rows": "i32",
    "strides": types_of(
        AttentionStrides,
        types_of(TokenStrides, "i32"),
        mask=_CELL_STRIDES,
        padding=PaddingStrides("i32", 1),
        bias=_CELL_STRIDES,
    ),
    "lengths": types_of(AttentionLengths, "i32"),
    "numbers": types_of(AttentionNumbers, "fp32"),
}
"""Arguments of the kernels other than tensors and constants."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each row of the table that serves ``arch``, for each kernel and variant."""
    capability = divmod(architecture(arch).capability, 10)
    table_family = family_of_capability(*capability)
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4)):
        for head_dim in HEAD_DIMS:
            if not fits(capability, element_bytes, head_dim):
                continue
            for variant, any_head_dim in _VARIANTS.items():
                problem = replace(any_head_dim, head_dim=head_dim, head_dim_v=head_dim)
                needs_general_mask = problem.needs_general_mask is not None
                if needs_general_mask and (table_family, element_bytes, head_dim) not in _WITH_CELLS:
                    continue
                config = row_for(capability, element_bytes, padded(head_dim), windowed=variant != "full")
                if needs_general_mask:
                    config = for_cells(config)
                for name, kernel, pointers, tile in (
                    ("forward", forward.forward_kernel, forward.ForwardPointers, config.forward),
                    ("dkdv", backward_dkdv.dkdv_kernel, backward_dkdv.DkdvPointers, config.dkdv),
                    ("dq", backward_dq.dq_kernel, backward_dq.DqPointers, config.dq),
                    ("dbias", backward_dbias.dbias_kernel, backward_dbias.DbiasPointers, dbias_tile(config)),
                ):
                    if name == "dbias" and not problem.bias_grad:
                        continue
                    yield CompileCase(
                        name=f"{name} {dtype} head_dim {head_dim} {variant}",
                        kernel=kernel,
                        signature=signature_of(kernel, pointers, dtype, problem),
                        constants={"C": _variant(problem, tile, config.precision)},
                        divisible_by_16=STRIDES,
                        num_warps=tile.num_warps,
                        num_stages=tile.num_stages,
                        spill_budget=_CELL_SPILLS.get(f"{name} {dtype} head_dim {head_dim} {variant}", 0)
                        if needs_general_mask
                        else tile.features_spill_budget
                        if variant == "features"
                        else tile.spill_budget,
                        tensor_cores=element_bytes == 2 or config.precision != "ieee",
                        exhaustive=head_dim > 256,
                    )
            plain = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim)
            yield preprocess_case(f"preprocess {dtype} head_dim {head_dim}", plain, dtype)
    for head_dim in (64, 128):
        for name, causal in (("full", False), ("causal", True)):
            yield _flash1_case(f"flash1 bf16 head_dim {head_dim} {name}", head_dim, causal)

    if capability >= dependent_launch.CAPABILITY:
        for name, words, ending in (("1 row", 2048, all_reduce.SUM), ("join", 2**17, all_reduce.JOIN)):
            yield _all_reduce_case(f"all-reduce bf16 {name}", words, ending.value)


def _all_reduce_case(name: str, words: int, ending: int) -> CompileCase:
    variant, num_warps = all_reduce.all_reduce_variant(
        2, words, ending, True, ending == all_reduce.SUM.value, True
    )
    arguments = all_reduce.all_reduce_kernel.arg_names
    types = dict.fromkeys(("part", "residual", "out"), "*bf16") | {"memories": "*i64", "calls": "*i64"}
    types["timeout_ns"] = "i64"
    constants: dict[str, Any] = {"C": variant} | ({} if variant.RESIDUAL else {"residual": None})
    return CompileCase(
        name=name,
        kernel=all_reduce.all_reduce_kernel,
        signature={one: types.get(one, "i32") for one in arguments if one not in constants},
        constants=constants,
        divisible_by_16=frozenset(),
        num_warps=num_warps,
        tensor_cores=False,
    )


def _flash1_case(name: str, head_dim: int, causal: bool) -> CompileCase:
    config = flash1.config_of(2, head_dim)
    rows = dict.fromkeys(("partial", "row_max", "row_sum"), "*fp32")
    return CompileCase(
        name=name,
        kernel=flash1.flash1_kernel,
        signature={
            "pointers": types_of(flash1.Flash1Pointers, "*bf16", **rows),
            "strides": types_of(flash1.Flash1Strides, types_of(TokenStrides, "i32")),
            "lengths": types_of(flash1.Flash1Lengths, "i32"),
            "softmax_scale": "fp32",
        },
        constants={"C": flash1.flash1_variant(head_dim, head_dim, 4096, 4096, causal, config)},
        divisible_by_16=STRIDES,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        spill_budget=config.spill_budget,
    )


def _variant(problem: Problem, tile: KernelConfig, precision: str) -> AttentionVariant:
    cells = (_CELLS if problem.mask else None, _CELLS if problem.bias else None)
    return attention_variant(problem, tile, precision, wide=False, aligned=True, cells=cells)


def signature_of(kernel: Any, pointers: Any, dtype: str, problem: Problem, **more: Any) -> dict[str, Any]:
    """Types of a launch with contiguous tensors; ``more`` are those of further tensors."""
    types = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dbias"), f"*{dtype}")
    types |= dict.fromkeys(("lse", "neg_lse", "neg_delta"), "*fp32")
    given = {
        "cu_seqlens_q": "*i32" if problem.varlen else None,
        "cu_seqlens_k": "*i32" if problem.varlen else None,
        "seqused_q": "*i32" if problem.seqused_q else None,
        "seqused_k": "*i32" if problem.seqused_k else None,
        "alibi_slopes": "*fp32" if problem.alibi else None,
        "sink": "*fp32" if problem.sink else None,
        "mask": "*i1" if problem.mask else None,
        "key_padding_mask": "*i1" if problem.key_padding_mask else None,
        "bias": f"*{dtype}" if problem.bias else None,
        "rng_state": "*i64" if problem.dropout_p > 0 else None,
        "key_bounds": "*i32" if problem.key_padding_mask else None,
    }
    structures = _SCALARS | {"pointers": types_of(pointers, None, **types, **given, **more)}
    return {name: structures[name] for name in kernel.arg_names if name in structures}
