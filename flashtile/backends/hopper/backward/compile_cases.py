"""Every configuration of the Hopper backward, for compilation ahead of time (``flashtile inspect``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from flashtile.backends.common.compile_cases import meta
from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.common.preprocess import preprocess_kernel
from flashtile.backends.hopper.backward.bias_gradient import gradient_kernel
from flashtile.backends.hopper.backward.config import BackwardConfig, WideBackwardConfig, alternatives
from flashtile.backends.hopper.backward.costs import Splits
from flashtile.backends.hopper.backward.halves_dq import halves_dq_kernel
from flashtile.backends.hopper.backward.kernel import backward_kernel
from flashtile.backends.hopper.backward.launch import HopperBackwardLaunch
from flashtile.backends.hopper.backward.sum_parts import sum_parts_kernel
from flashtile.backends.hopper.backward.wide_dkv import dkv_kernel
from flashtile.backends.hopper.backward.wide_dq import dq_kernel
from flashtile.backends.hopper.backward.wide_launch import WideBackwardLaunch
from flashtile.backends.hopper.compile_cases import HOPPER, PLAIN, bias_of, inputs, modified, only, recorded
from flashtile.problems.attention import Problem

_DQ = (dq_kernel, halves_dq_kernel)
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
_KNOWN = replace(_FEATURES, varlen=False, seqused_k=False, deterministic=False)
"""Every feature of the calls that may have another configuration than that of the tables."""
_TABLE = ((64, 64), (128, 128), (64, 128), (128, 64))
_WIDE = ((256, 256), (256, 128), (64, 256), (512, 512))
_MODIFIED_SPILLS: dict[str, dict[int, tuple[int, ...]]] = {
    "mods": {
        64: (132, 84, 200, 60, 84, 76),
        128: (128, 296, 144, 240, 324, 72),
        256: (188, 164, 144, 120, 236, 8),
    },
    "dropout": {64: (32, 60, 104), 128: (100, 212, 864)},
    "bias": {64: (60, 212, 508), 128: (132, 156, 316)},
}
"""At head_dim 256 for the kernel of dQ; that of dK and dV spills nothing."""
_BIAS_GRADIENT_SPILLS: dict[int, tuple[int, ...]] = {64: (40, 20, 4), 128: (40, 20, 8)}
_TELLING = {("dropout", "causal", 128), ("mods", "block mask", 256)}
"""Cases with modifiers that every run of the tests compiles; the other cases differ little from them."""
_SHARED = Splits(heads=4, rows=2)
"""Eight programs share a block of keys: each has one of four query heads and half of the rows."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the compile cases of the kernels of the backward pass.

    Each pair of equal head sizes has three cases: without a mask, causal, and with every feature at once.
    Unequal head sizes have only the case with every feature, because they are not timed. Further cases have
    splits (several programs share a block of keys), padded head sizes, or modifiers such as dropout.
    """
    if arch != HOPPER:
        return
    for sizes, (mask, problem) in itertools.product((*_TABLE, *_WIDE), _MASKS.items()):
        if mask == "features" or sizes[0] == sizes[1]:
            yield from _products(mask, replace(problem, head_dim=sizes[0], head_dim_v=sizes[1]))
    yield from _products("causal", replace(_CAUSAL, head_dim=128, head_dim_v=128, partial=True))
    for mask, problem in (_MASKS | {"features": _KNOWN}).items():
        problem = replace(problem, head_dim=64, head_dim_v=64)
        for config in alternatives(problem)[1:]:
            yield from _products(mask, problem, config=config)
            grouped = replace(problem, num_heads_kv=PLAIN.num_heads_kv)  # _SHARED divides four heads
            for case in _products(mask, grouped, _SHARED, config):
                yield replace(case, exhaustive=True)
    for size in (64, 128, 256, 512):
        shared = replace(PLAIN, window_right=0, head_dim=size, head_dim_v=size)
        for case in _products("causal", shared, _SHARED):
            yield replace(case, exhaustive=size <= 128)  # the code differs little from that without splits
    # Where work tiles are few, dQ is computed in single blocks of rows, not in pairs.
    single = replace(PLAIN, batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=384, seqlen_k=384)
    for case in _products("causal", replace(single, window_right=0, head_dim=256, head_dim_v=256)):
        if case.kernel is dq_kernel:
            yield replace(case, name=f"{case.name} single", exhaustive=True)
    # S and dP skip columns of padding at these head sizes.
    for sizes in ((40, 40), (80, 80), (96, 96), (192, 128), (160, 160), (320, 320)):
        for case in _products("causal", replace(_CAUSAL, head_dim=sizes[0], head_dim_v=sizes[1])):
            yield replace(case, exhaustive=True)
    # With unequal head sizes, dK and dV have shared memory of their own.
    for case in _products("features", replace(_FEATURES, head_dim=256, head_dim_v=128), _SHARED):
        yield replace(case, exhaustive=True)
    yield _sum_case(replace(PLAIN, head_dim=72, head_dim_v=128))
    for kind, spills in _MODIFIED_SPILLS.items():
        for name, problem, spill_budget in modified(kind, spills):
            for case in _modified(kind, name, problem):
                telling = (kind, name, problem.head_dim) in _TELLING
                budget = 0 if case.kernel is dkv_kernel else spill_budget
                yield replace(case, spill_budget=budget, exhaustive=not telling)
    for name, problem, spill_budget in modified("bias", _BIAS_GRADIENT_SPILLS):
        telling = name == "causal" and problem.head_dim == 64
        yield replace(_bias_gradient(name, problem), spill_budget=spill_budget, exhaustive=not telling)
    with_sink = replace(_FULL, head_dim=128, head_dim_v=128, sink=True)
    yield only(
        preprocess_kernel,
        _backward(with_sink, alternatives(with_sink)[0], has_dlse=True),
        name="hopper backward preprocess head_dim 128",
        tensor_cores=False,
    )


def _backward(
    problem: Problem,
    config: BackwardConfig,
    bias: torch.Tensor | None = None,
    has_dlse: bool = False,
) -> list[CompileCase]:
    """Return the cases of all kernels of a backward pass."""
    q, k, v, extras = inputs(problem, bias)
    out, lse = meta(*problem.out_shape, dtype=problem.out_dtype), meta(*problem.lse_shape)
    launch: Any = WideBackwardLaunch if isinstance(config, WideBackwardConfig) else HopperBackwardLaunch
    return recorded(launch(problem, config), out, lse if has_dlse else None, q, k, v, out, lse, extras)


def _products(
    mask: str,
    problem: Problem,
    splits: Splits = Splits(),  # noqa: B008
    config: BackwardConfig | None = None,
) -> Iterator[CompileCase]:
    """Yield the compile case of ``backward_kernel``, or two compile cases for head sizes over 128.

    Without ``config``, the configuration is the first of :func:`alternatives`. With splits, head sizes over
    128 have only the case of ``dkv_kernel``; ``dq_kernel`` stays the same.
    """
    assert problem.group_size % splits.heads == 0
    config = replace(config or alternatives(problem)[0], HEAD_SPLITS=splits.heads, ROW_SPLITS=splits.rows)
    for case in _backward(problem, config):
        if case.kernel in (backward_kernel, dkv_kernel) or (case.kernel in _DQ and splits.parts == 1):
            yield _named(case, mask, problem, config)


def _modified(kind: str, name: str, problem: Problem) -> Iterator[CompileCase]:
    """Yield the compile case of ``backward_kernel`` with a modifier, or two for head sizes over 128.

    A bias of dense sequences has a second case, in which the kernel writes dS as the bias's gradient.
    """
    shared = bias_of(problem)
    biases = [shared]
    if shared is not None and not problem.varlen:
        biases.append(shared.expand(problem.batch, -1, -1, -1).contiguous())
    for bias in biases:
        own = replace(problem, bias_grad=bias is not shared)
        for case in _backward(own, alternatives(own)[0], bias):
            if case.kernel in (backward_kernel, dkv_kernel, *_DQ):
                variant = case.constants["C"]
                sizes = f"head_dim {own.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N}"
                stores_ds = " dS" * (case.kernel is backward_kernel and variant.STORES_DS)
                named = f"hopper {kind} {_product(case)} {sizes} {name}{stores_ds}"
                yield replace(case, name=named)


def _bias_gradient(name: str, problem: Problem) -> CompileCase:
    problem = replace(problem, varlen=False, seqused_k=False, bias_grad=True)
    case = only(gradient_kernel, _backward(problem, alternatives(problem)[0]))
    variant = case.constants["C"]
    tile = f"{variant.BLOCK_M}x{variant.BLOCK_N}"
    return replace(case, name=f"hopper bias gradient head_dim {problem.head_dim} {tile} {name}")


def _sum_case(problem: Problem) -> CompileCase:
    config = replace(alternatives(problem)[0], HEAD_SPLITS=_SHARED.heads, ROW_SPLITS=_SHARED.rows)
    name = f"hopper backward sum of parts head_dim {problem.head_dim}/{problem.head_dim_v}"
    return only(sum_parts_kernel, _backward(problem, config), name=name, tensor_cores=False)


def _product(case: CompileCase) -> str:
    """Return "backward", and which gradients the kernel computes if it does not compute all."""
    what = case.kernel.fn.__name__.removesuffix("_kernel")
    return "backward" if what == "backward" else f"backward {what}"


def _named(case: CompileCase, mask: str, problem: Problem, config: BackwardConfig) -> CompileCase:
    budgets = {
        "full": config.spill_budget,
        "causal": config.causal_spill_budget,
        "features": config.features_spill_budget,
    }
    variant, shared = case.constants["C"], config.parts > 1
    sizes, tile = f"{problem.head_dim}/{problem.head_dim_v}", f"{variant.BLOCK_M}x{variant.BLOCK_N}"
    what = f"{mask}{' partial' * problem.partial}{' shared' * shared}"
    name = f"hopper {_product(case)} head_dim {sizes} {tile} {what}"
    return replace(case, name=name, spill_budget=budgets[mask])
