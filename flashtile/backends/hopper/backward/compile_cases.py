"""Every configuration of the Hopper backward, for compilation ahead of time (``flashtile inspect``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flashtile.attn.problem import Problem
from flashtile.backends.common.compile_cases import preprocess_case
from flashtile.backends.common.tma import View
from flashtile.backends.hopper.backward import launch, wide_launch
from flashtile.backends.hopper.backward.config import BackwardConfig, WideBackwardConfig, choose
from flashtile.backends.hopper.backward.kernel import backward_kernel
from flashtile.backends.hopper.backward.wide_dkv import dkv_kernel
from flashtile.backends.hopper.backward.wide_dq import dq_kernel
from flashtile.backends.hopper.compile_cases import HOPPER, PLAIN, attention_case, tensors
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.compile_report import CompileCase

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


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each pair of head sizes without a mask, causal, and with every feature at once; unequal ones, which are
    not timed, only the last."""
    if arch != HOPPER:
        return
    for sizes, (mask, problem) in itertools.product((*_TABLE, *_WIDE), _MASKS.items()):
        if mask == "features" or sizes[0] == sizes[1]:
            yield from _products(mask, replace(problem, head_dim=sizes[0], head_dim_v=sizes[1]))
    yield from _products("causal", replace(_CAUSAL, head_dim=128, head_dim_v=128, partial=True))
    with_sink = replace(_FULL, head_dim=128, head_dim_v=128, sink=True)
    yield preprocess_case(
        "hopper backward preprocess head_dim 128", with_sink, "bf16", has_dlse=True, dq_accum_columns=128
    )


def _products(mask: str, problem: Problem) -> Iterator[CompileCase]:
    """The kernel of five products, or the two for head sizes over 128."""
    config = choose(problem)
    if not isinstance(config, WideBackwardConfig):
        variant = launch.variant_of(problem, config)
        views = launch.views(problem, variant, *tensors(problem), resident_heads=3)
        yield _case(mask, problem, config, backward_kernel, views, variant)
        return
    views = wide_launch.views(problem, *tensors(problem))
    dkv, dq = wide_launch.variants(problem, config)
    yield _case(mask, problem, config, dkv_kernel, views, dkv)
    yield _case(mask, problem, config, dq_kernel, views, dq)


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
    what = kernel.fn.__name__.removesuffix("_kernel")
    product = "backward" if what == "backward" else f"backward {what}"
    sizes, tile = f"{problem.head_dim}/{problem.head_dim_v}", f"{variant.BLOCK_M}x{variant.BLOCK_N}"
    name = f"{product} head_dim {sizes} {tile} {mask}"
    case = attention_case(
        name + " partial" * problem.partial, kernel, views, variant, LAUNCH_REGISTERS[2], budgets[mask]
    )
    return replace(case, signature=case.signature | {"dq": "*fp32"}) if problem.partial else case
