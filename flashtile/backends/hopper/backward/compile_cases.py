"""Every configuration of the Hopper backward, for compilation ahead of time (``flashtile inspect``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flashtile.backends.common.compile_cases import preprocess_case
from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.common.tma import View
from flashtile.backends.hopper.backward import launch, wide_launch
from flashtile.backends.hopper.backward.config import BackwardConfig, WideBackwardConfig, choose
from flashtile.backends.hopper.backward.kernel import backward_kernel
from flashtile.backends.hopper.backward.splits import Splits
from flashtile.backends.hopper.backward.sum_parts import sum_parts_kernel
from flashtile.backends.hopper.backward.sum_parts import variant_of as sum_variant
from flashtile.backends.hopper.backward.wide_dkv import dkv_kernel
from flashtile.backends.hopper.backward.wide_dq import dq_kernel
from flashtile.backends.hopper.compile_cases import HOPPER, PLAIN, attention_case, tensors
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.problems.attention import Problem

_FULL = replace(PLAIN, num_heads_kv=PLAIN.num_heads_q)
_CAUSAL = replace(_FULL, window_right=0)
_FEATURES = replace(
    PLAIN,
    varlen=True,
    seqused_k=True,
    window_left=64,
    window_right=64,
    softcap=1.0,
    alibi=True,
    deterministic=True,
)
_MASKS = {"full": _FULL, "causal": _CAUSAL, "features": _FEATURES}
_TABLE = ((64, 64), (128, 128), (64, 128), (128, 64))
_WIDE = ((256, 256), (256, 128), (64, 256))
_SHARED = Splits(heads=4, rows=2)
"""Blocks of keys that eight programs share, each with a query head."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each pair of head sizes without a mask, causal, and with every feature at once; unequal ones, which are
    not timed, only the last."""
    if arch != HOPPER:
        return
    for sizes, (mask, problem) in itertools.product((*_TABLE, *_WIDE), _MASKS.items()):
        if mask == "features" or sizes[0] == sizes[1]:
            yield from _products(mask, replace(problem, head_dim=sizes[0], head_dim_v=sizes[1]))
    yield from _products("causal", replace(_CAUSAL, head_dim=128, head_dim_v=128, partial=True))
    for size in (64, 128, 256):
        shared = replace(PLAIN, window_right=0, head_dim=size, head_dim_v=size)
        for case in _products("causal", shared, _SHARED):
            yield replace(case, exhaustive=size <= 128)  # as without splits, but for a few integers
    # Of whose columns S and dP leave some out.
    for sizes in ((40, 40), (80, 80), (96, 96), (192, 128), (160, 160)):
        for case in _products("causal", replace(_CAUSAL, head_dim=sizes[0], head_dim_v=sizes[1])):
            yield replace(case, exhaustive=True)
    # With shared memory for dK and dV of its own.
    for case in _products("features", replace(_FEATURES, head_dim=256, head_dim_v=128), _SHARED):
        yield replace(case, exhaustive=True)
    yield _sum_case(replace(PLAIN, head_dim=72, head_dim_v=128), _SHARED.parts)
    with_sink = replace(_FULL, head_dim=128, head_dim_v=128, sink=True)
    yield preprocess_case(
        "hopper backward preprocess head_dim 128", with_sink, "bf16", has_dlse=True, dq_accum_columns=128
    )


def _products(mask: str, problem: Problem, splits: Splits = Splits()) -> Iterator[CompileCase]:  # noqa: B008
    """The kernel of five products, or the two for head sizes over 128; where keys are shared, only that of dK
    and dV, since the other is the same."""
    config = replace(choose(problem), HEAD_SPLITS=splits.heads, ROW_SPLITS=splits.rows)
    if not isinstance(config, WideBackwardConfig):
        variant = launch.variant_of(problem, config)
        views = launch.views(problem, variant, *tensors(problem), resident_heads=3)
        yield _case(mask, problem, config, backward_kernel, views, variant)
        return
    dkv, dq = wide_launch.variants(problem, config)
    views = wide_launch.views(problem, dkv, *tensors(problem))
    yield _case(mask, problem, config, dkv_kernel, views, dkv)
    if splits.parts == 1:
        yield _case(mask, problem, config, dq_kernel, views, dq)


def _sum_case(problem: Problem, parts: int) -> CompileCase:
    types = {"dk_parts": "*fp32", "dv_parts": "*fp32", "dk": "*bf16", "dv": "*bf16"}
    return CompileCase(
        name=f"hopper backward sum of {parts} parts head_dim {problem.head_dim}/{problem.head_dim_v}",
        kernel=sum_parts_kernel,
        signature=types | {"rows": "i32", "blocks_k": "i32"},
        constants={"C": sum_variant(problem, parts)},
        tensor_cores=False,
    )


def _case(
    mask: str,
    problem: Problem,
    config: BackwardConfig,
    kernel: Any,
    views: Mapping[str, View],
    variant: Any,
) -> CompileCase:
    budgets = {
        "full": config.spill_budget,
        "causal": config.causal_spill_budget,
        "features": config.features_spill_budget,
    }
    shared = config.parts > 1
    what = kernel.fn.__name__.removesuffix("_kernel")
    product = "backward" if what == "backward" else f"backward {what}"
    sizes, tile = f"{problem.head_dim}/{problem.head_dim_v}", f"{variant.BLOCK_M}x{variant.BLOCK_N}"
    name = f"{product} head_dim {sizes} {tile} {mask}{' partial' * problem.partial}{' shared' * shared}"
    case = attention_case(name, kernel, views, variant, LAUNCH_REGISTERS[2], budgets[mask])
    return replace(case, signature=case.signature | {"dq": "*fp32"}) if problem.partial else case
