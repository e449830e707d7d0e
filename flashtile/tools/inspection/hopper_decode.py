"""Compile cases of attention over a cache on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashtile.backends.common.device import Target
from flashtile.backends.hopper.decode.combine import combine_divided_kernel, combine_recorded_kernel
from flashtile.backends.hopper.decode.config import HopperDecodeConfig, choose, every_row
from flashtile.backends.hopper.decode.kernel import attend_kernel
from flashtile.backends.hopper.decode.launch import HopperDecodeLaunch
from flashtile.backends.hopper.decode.work import table_kernel
from flashtile.problems.decode import FP8, DecodeProblem
from flashtile.tools.inspection.hopper import HOPPER, words
from flashtile.tools.inspection.portable_decode import inputs_of
from flashtile.tools.inspection.recording import cases_of, only
from flashtile.tools.inspection.report import CompileCase

_H100 = Target("H100", (9, 0), 132)
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
    device=_H100,  # type: ignore[arg-type]
    softmax_scale=1.0,
    window_right=0,
    lengths=True,
)
_CHUNK: dict[str, Any] = {"seqlen_q": 1024, "total_q": 8192}
_DIVIDED: dict[str, Any] = {"seqlen_q": 64, "total_q": 512}
"""Few blocks of rows and many keys, so that work tiles are divided into parts."""
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
        combine = only(combine_recorded_kernel, _cases(problem, choose(problem)), tensor_cores=False)
        unit = "work tile" if combine.constants["C"].BY_WORK_TILE else "program"
        yield replace(combine, name=f"hopper decode combine by {unit}")
    for kernel, name, sizes in (
        (table_kernel, "table", _CHUNK | {"batch": 40, "total_q": 40960}),
        (combine_divided_kernel, "combine of a table", _DIVIDED),
    ):
        problem = replace(_PAGED, **sizes)
        cases = _cases(problem, choose(problem))
        yield only(kernel, cases, name=f"hopper decode {name}", tensor_cores=False)


def _cases(problem: DecodeProblem, config: HopperDecodeConfig) -> list[CompileCase]:
    return cases_of(_H100, partial(HopperDecodeLaunch(problem, config), *inputs_of(problem)))


def _case(problem: DecodeProblem, config: HopperDecodeConfig, name: str) -> CompileCase:
    case = only(attend_kernel, _cases(problem, config))
    variant = case.constants["C"]
    more = words({"stream-K": variant.STREAM_K, "queue": not variant.STREAM_K})
    head = f"head_dim {variant.BLOCK_D}/{variant.BLOCK_DV} {variant.BLOCK_M}x{variant.BLOCK_N}"
    return replace(case, name=" ".join(("hopper decode", head, name, *more)))
