"""Compile cases of the portable kernels that quantise to FP8, and of attention over FP8 tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flashtile.backends.portable.fp8 import NATIVE_CAPABILITY
from flashtile.backends.portable.fp8.launch import HEAD_DIMS, Fp8AttendLaunch, QuantizeLaunch, row
from flashtile.problems.common import shared_fields
from flashtile.problems.fp8 import AttendTensors, Fp8Problem, QuantizeProblem, QuantizeTensors
from flashtile.problems.fp8_layout import E4M3, KEY_BLOCK, QUERY_BLOCK, num_blocks, num_blocks_varlen
from flashtile.tools.inspection.portable import inputs_of
from flashtile.tools.inspection.recording import case_of, launches_of, meta
from flashtile.tools.inspection.report import CompileCase, architecture

_QUERIES = QuantizeProblem(
    role="q",
    method="block",
    batch=2,
    seqlen=4096,
    total=8192,
    num_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    device=torch.device("meta"),
    seed=0,
)
_VALUES = replace(_QUERIES, role="v", seed=None)
_QUANTIZED: dict[str, QuantizeProblem] = {
    "q head_dim 128": _QUERIES,
    "q head_dim 80 features": replace(
        _QUERIES, head_dim=80, varlen=True, seqused=True, rotary_dim=40, rotary_interleaved=True
    ),
    "k head_dim 128 rotary by head": replace(_QUERIES, role="k", rotary_dim=128, method="head"),
    "k head_dim 256": replace(_QUERIES, role="k", head_dim=256),
    "k head_dim 256 rotary": replace(_QUERIES, role="k", head_dim=256, rotary_dim=256),
    "q one column": replace(_QUERIES, head_dim=1, num_heads=16),  # a stride of 1, which Triton specializes
    "v head_dim 64": replace(_VALUES, head_dim=64),
    "v head_dim 256 varlen": replace(_VALUES, head_dim=256, varlen=True),
}

_PLAIN = Fp8Problem(
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    total_q=8192,
    total_k=8192,
    num_heads_q=8,
    num_heads_kv=8,
    head_dim=64,
    head_dim_v=64,
    dtype=E4M3,
    device=torch.device("meta"),
    softmax_scale=1.0,
    v_transposed=True,
    block_scales=True,
)
_FEATURES = replace(
    _PLAIN,
    varlen=True,
    seqused_k=True,
    window_left=64,
    window_right=64,
    softcap=1.0,
    alibi=True,
    sink=True,
)
_ATTENDED: dict[str, tuple[Fp8Problem, tuple[int, ...]]] = {
    "full": (_PLAIN, HEAD_DIMS),
    "rows causal": (replace(_PLAIN, v_transposed=False, block_scales=False, window_right=0), (64,)),
    "features": (_FEATURES, (32,)),
}
"""Problems, and the head sizes that each is compiled for."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the kernels that quantise q, k and v, and those of FP8 attention at several head sizes."""
    capability = divmod(architecture(arch).capability, 10)
    native = capability >= NATIVE_CAPABILITY
    for name, quantized in _QUANTIZED.items():
        launches = launches_of(capability, partial(QuantizeLaunch(quantized, native), *_quantized(quantized)))
        suffixes = ("",) if len(launches) == 1 else (" pass 1", " pass 2")
        for launched, suffix in zip(launches, suffixes, strict=True):
            yield case_of(launched, f"fp8 quantize {name}{suffix}", tensor_cores=False)
    for name, (any_problem, head_dims) in _ATTENDED.items():
        for head_dim in head_dims:
            config = row(native, head_dim)
            problem = replace(any_problem, head_dim=head_dim, head_dim_v=head_dim)
            (launched,) = launches_of(
                capability, partial(Fp8AttendLaunch(problem, config), *attended(problem))
            )
            yield case_of(launched, f"fp8 attend head_dim {head_dim} {name}")


def _quantized(problem: QuantizeProblem) -> tuple[Tensor, QuantizeTensors]:
    """Return the tensors of a quantisation: contiguous, on the meta device."""
    rows = (problem.total,) if problem.varlen else (problem.batch, problem.seqlen)
    lengths = meta(problem.batch, dtype=torch.int32)
    angles = meta(problem.seqlen, problem.rotary_dim // 2) if problem.rotary_dim else None
    return meta(*rows, problem.num_heads, problem.head_dim, dtype=problem.dtype), QuantizeTensors(
        cu_seqlens=meta(problem.batch + 1, dtype=torch.int32) if problem.varlen else None,
        seqused=lengths if problem.seqused else None,
        rotary_cos=angles,
        rotary_sin=angles,
        rotary_offsets=lengths if problem.varlen and problem.rotary_dim else None,
    )


def attended(problem: Fp8Problem) -> tuple[Tensor, Tensor, Tensor, AttendTensors]:
    """Return the tensors of attention over quantised q, k and v: contiguous, on the meta device."""
    q, k, v, extras = inputs_of(problem)
    first = () if problem.varlen else (problem.batch,)
    scales = []
    for heads, length, total, block in (
        (problem.num_heads_q, problem.seqlen_q, problem.total_q, QUERY_BLOCK),
        (problem.num_heads_kv, problem.seqlen_k, problem.total_k, KEY_BLOCK),
    ):
        blocks = (
            num_blocks_varlen(total, problem.batch, block) if problem.varlen else num_blocks(length, block)
        )
        scales.append(
            meta(*first, heads, blocks) if problem.block_scales else meta(problem.batch, problem.num_heads_kv)
        )
    if problem.v_transposed:
        columns = scales[1].shape[-1] * KEY_BLOCK
        v = meta(*first, problem.num_heads_kv, problem.head_dim_v, columns, dtype=E4M3)
    return (
        q,
        k,
        v,
        AttendTensors(
            q_descale=scales[0],
            k_descale=scales[1],
            v_descale=scales[1],
            **shared_fields(AttendTensors, extras),
        ),
    )
