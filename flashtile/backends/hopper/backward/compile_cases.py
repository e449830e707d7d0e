"""Every configuration of the Hopper backward, for compilation ahead of time (``flashtile inspect``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from flashtile.backends.common.compile_cases import preprocess_case
from flashtile.backends.common.compile_report import CompileCase, types_of
from flashtile.backends.common.tma import View
from flashtile.backends.hopper.backward import bias_gradient, launch, wide_launch
from flashtile.backends.hopper.backward.config import (
    BackwardConfig,
    WideBackwardConfig,
    alternatives,
)
from flashtile.backends.hopper.backward.dq_accum import AccumSizes, BackwardScalars
from flashtile.backends.hopper.backward.kernel import BackwardNumbers, backward_kernel
from flashtile.backends.hopper.backward.schedule import BackwardPointers, BackwardSchedule
from flashtile.backends.hopper.backward.splits import Splits
from flashtile.backends.hopper.backward.sum_parts import sum_parts_kernel
from flashtile.backends.hopper.backward.sum_parts import variant_of as sum_variant
from flashtile.backends.hopper.backward.wide_dkv import DkvPointers, dkv_kernel
from flashtile.backends.hopper.backward.wide_dq import DqPointers, dq_kernel
from flashtile.backends.hopper.compile_cases import (
    HOPPER,
    PLAIN,
    attention_case,
    bias_of,
    modified,
    modifier_pointers,
    schedule_types,
    tensors,
)
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.backends.hopper.forward.schedule import ForwardSchedule
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
    yield preprocess_case(
        "hopper backward preprocess head_dim 128", with_sink, "bf16", has_dlse=True, dq_accum_columns=128
    )


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
    if not isinstance(config, WideBackwardConfig):
        variant = launch.variant_of(problem, config)
        own = launch.views(problem, variant, *tensors(problem), 3 * problem.group_size, config.parts)
        yield _case(mask, problem, config, backward_kernel, own, variant, _structures(problem, variant))
        return
    for kernel, views, variant, structures in _wide(problem, config):
        if kernel is dkv_kernel or splits.parts == 1:
            yield _case(mask, problem, config, kernel, views, variant, structures)


def _wide(
    problem: Problem, config: WideBackwardConfig
) -> Iterator[tuple[Any, Mapping[str, View], Any, Mapping[str, Any]]]:
    """Yield (kernel, views, variant, types of structures) of both kernels for head sizes over 128."""
    dkv, dq = wide_launch.variants(problem, config)
    for kernel, variant, is_dq in ((dkv_kernel, dkv, False), (wide_launch.dq_kernel_of(dkv), dq, True)):
        views = wide_launch.views(problem, dkv, config.parts, *tensors(problem), of_dq=is_dq)
        yield kernel, views, variant, _wide_structures(problem, variant, is_dq)


def _modified(kind: str, name: str, problem: Problem) -> Iterator[CompileCase]:
    """Yield the compile case of ``backward_kernel`` with a modifier, or two for head sizes over 128.

    A bias of dense sequences has a second case, in which the kernel writes dS as the bias's gradient.
    """
    config = alternatives(problem)[0]
    if isinstance(config, WideBackwardConfig):
        for kernel, views, variant, structures in _wide(problem, config):
            sizes = f"head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N}"
            what = kernel.fn.__name__.removesuffix("_kernel")
            named = f"{kind} backward {what} {sizes} {name}"
            yield attention_case(named, kernel, views, variant, LAUNCH_REGISTERS[2], 0, structures)
        return
    shared = bias_of(problem)
    biases = [shared]
    if shared is not None and not problem.varlen:
        biases.append(shared.expand(problem.batch, -1, -1, -1).contiguous())
    for bias in biases:
        own = replace(problem, bias_grad=bias is not shared)
        variant = launch.variant_of(own, alternatives(own)[0], bias)
        views = launch.views(own, variant, *tensors(own), 3 * own.group_size, parts=1)
        sizes = f"head_dim {own.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N}"
        yield attention_case(
            f"{kind} backward {sizes} {name}{' dS' * variant.STORES_DS}",
            backward_kernel,
            views,
            variant,
            LAUNCH_REGISTERS[2],
            0,
            _structures(own, variant, bias),
        )


def _structures(problem: Problem, variant: Any, bias: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the types of ``backward_kernel``'s parameters by name, except the descriptors that every call
    has."""
    described = launch.bias_views(problem, variant, bias)
    dropped = "fp32" if variant.HAS_DROPOUT else None
    return {
        **{
            name: None if view is None else view.type_name
            for name, view in zip(("bias_desc", "dbias_desc"), described, strict=True)
        },
        "pointers": types_of(
            BackwardPointers,
            "*i32",
            table="*i32" if variant.VARLEN else None,
            dq="*fp32" if problem.partial else "*bf16",
            **modifier_pointers(variant, problem.mods),
            scalars=BackwardScalars(
                schedule_types(BackwardSchedule, variant),
                types_of(AccumSizes, "i32"),
                types_of(BackwardNumbers, "fp32", keep_scale=dropped, keep=dropped),
            ),
        ),
    }


def _wide_structures(problem: Problem, variant: Any, is_dq: bool) -> dict[str, Any]:
    """Return the types of the parameters of ``dkv_kernel`` (or ``dq_kernel``, if ``is_dq``) that are
    structures, by name."""
    read = {
        name: kind
        for name, kind in modifier_pointers(variant, problem.mods).items()
        if name in DkvPointers._fields
    }
    pointers = types_of(DqPointers if is_dq else DkvPointers, "*fp32", counters="*i32", **read)
    has_queue = is_dq and variant.QUEUED
    return {
        "pointers": pointers._replace(table="*i32" if variant.VARLEN or has_queue else None),
        "schedule": schedule_types(ForwardSchedule if is_dq else BackwardSchedule, variant),
        "numbers": types_of(BackwardNumbers, "fp32", keep_scale=None, keep=None),
    }


def _bias_gradient(name: str, problem: Problem) -> CompileCase:
    problem = replace(problem, varlen=False, seqused_k=False)
    bias = bias_of(problem)
    assert bias is not None
    has_score_mod = launch.variant_of(problem, alternatives(problem)[0], bias).HAS_SCORE_MOD
    variant = bias_gradient.gradient_variant_of(problem, has_score_mod)
    return attention_case(
        f"bias gradient head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}",
        bias_gradient.gradient_kernel,
        bias_gradient.gradient_views(problem, variant, *tensors(problem), bias),
        variant,
        LAUNCH_REGISTERS[2],
        0,
        {
            "sizes": types_of(bias_gradient.BiasSizes, "i32"),
            "scores": types_of(BackwardNumbers, "fp32", keep_scale=None, keep=None),
        },
    )


def _sum_case(problem: Problem) -> CompileCase:
    types = {"dk_parts": "*fp32", "dv_parts": "*fp32", "dk": "*bf16", "dv": "*bf16"}
    return CompileCase(
        name=f"hopper backward sum of parts head_dim {problem.head_dim}/{problem.head_dim_v}",
        kernel=sum_parts_kernel,
        signature=types | {"rows": "i32", "num_parts": "i32", "blocks_k": "i32"},
        constants={"C": sum_variant(problem)},
        tensor_cores=False,
    )


def _case(
    mask: str,
    problem: Problem,
    config: BackwardConfig,
    kernel: Any,
    views: Mapping[str, View],
    variant: Any,
    structures: Mapping[str, Any],
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
    return attention_case(name, kernel, views, variant, LAUNCH_REGISTERS[2], budgets[mask], structures)
