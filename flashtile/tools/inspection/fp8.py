"""Compile cases of the kernels that quantise to FP8, and of attention over FP8 tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flashtile.backends.hopper import CAPABILITY
from flashtile.backends.hopper.fp8.config import Fp8Config, every_row
from flashtile.backends.hopper.fp8.kernel import fp8_forward_kernel
from flashtile.backends.hopper.fp8.launch import Fp8ForwardLaunch
from flashtile.backends.portable.fp8 import NATIVE_CAPABILITY
from flashtile.backends.portable.fp8.launch import HEAD_DIMS, Fp8AttendLaunch, QuantizeLaunch, row
from flashtile.problems.common import shared_fields
from flashtile.problems.fp8 import AttendTensors, Fp8Problem, QuantizeProblem, QuantizeTensors
from flashtile.problems.fp8_layout import E4M3, KEY_BLOCK, QUERY_BLOCK, num_blocks, num_blocks_varlen
from flashtile.tools.inspection import attention
from flashtile.tools.inspection.attention import FEATURES, inputs_of
from flashtile.tools.inspection.recording import case_of, cases_of, launches_of, meta, only, only_case, words
from flashtile.tools.inspection.report import HOPPER, CompileCase, architecture

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

PLAIN = Fp8Problem(**vars(attention.PLAIN) | {"dtype": E4M3}, v_transposed=True, block_scales=True)
GROUPED = replace(PLAIN, num_heads_kv=2)
_ATTENDED: dict[str, tuple[Fp8Problem, tuple[int, ...]]] = {
    "full": (PLAIN, HEAD_DIMS),
    "rows causal": (replace(PLAIN, v_transposed=False, block_scales=False, window_right=0), (64,)),
    "features": (replace(PLAIN, **FEATURES, sink=True), (32,)),
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
            call = partial(Fp8AttendLaunch(problem, config), *attended(problem))
            yield only_case(capability, call, f"fp8 attend head_dim {head_dim} {name}")
    if arch == HOPPER:
        yield from hopper_cases()


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
    scales_and_lengths = AttendTensors(
        q_descale=scales[0], k_descale=scales[1], v_descale=scales[1], **shared_fields(AttendTensors, extras)
    )
    return q, k, v, scales_and_lengths


def hopper_cases() -> Iterator[CompileCase]:
    """Yield the compile cases of each entry of the table of configurations, and two more.

    Entries without a window get a plain case. Entries with a window get a case with all features, and a
    causal case if v is transposed in memory. Entries for unequal head sizes have only a plain case. The two
    further cases, at head_dim 128, are a short causal q with several heads per tile, and a call without
    scales.
    """
    for block_d, block_dv, windowed, v_transposed, config in every_row():
        plain = replace(GROUPED, head_dim=block_d, head_dim_v=block_dv, v_transposed=v_transposed)
        if not windowed:
            yield _hopper_case(plain, config)
            continue
        if v_transposed:
            yield _hopper_case(replace(plain, window_right=0), config)
        everything = replace(plain, varlen=True, window_left=64, window_right=64, softcap=1.0)
        yield _hopper_case(replace(everything, seqused_k=not v_transposed), config)
    square = replace(GROUPED, head_dim=128, head_dim_v=128)
    yield _hopper_case(replace(square, window_right=0, seqlen_q=4, total_q=8), Fp8Config(2, 128))
    unscaled = replace(square, v_transposed=False, block_scales=False)
    yield _hopper_case(unscaled, Fp8Config(2, 128), scaled=False)


def _hopper_case(problem: Fp8Problem, config: Fp8Config, scaled: bool = True) -> CompileCase:
    q, k, v, tensors = attended(problem)
    if not scaled:
        tensors = tensors._replace(q_descale=None, k_descale=None, v_descale=None)
    sizes, tile = f"{problem.head_dim}/{problem.head_dim_v}", f"{config.BLOCK_M}x{config.BLOCK_N}"
    features = "features" if problem.softcap else "causal" if problem.window_right == 0 else "full"
    more = words(
        {
            "ping-pong": config.PING_PONG,
            "q in registers": config.Q_IN_REGISTERS,
            "packed": problem.seqlen_q < config.BLOCK_M,
            "v row by row": not problem.v_transposed,
            "without scales": not scaled,
        }
    )
    cases = cases_of(CAPABILITY, partial(Fp8ForwardLaunch(problem, config), q, k, v, tensors))
    name = " ".join((f"hopper fp8 forward head_dim {sizes}", tile, features, *more))
    return only(fp8_forward_kernel, cases, name=name)
