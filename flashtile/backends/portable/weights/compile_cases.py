"""The kernels of attention weights, for compilation ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from flashtile.backends.common.compile_report import CompileCase, architecture
from flashtile.backends.portable.attention.launch import attention_variant
from flashtile.backends.portable.compile_cases import PLAIN, STRIDES, signature_of
from flashtile.backends.portable.config import family_of_capability, for_cells, row_for
from flashtile.backends.portable.mods.compile_cases import WITH_MODS, function_types
from flashtile.backends.portable.mods.config import of_row
from flashtile.backends.portable.mods.launch import with_functions
from flashtile.backends.portable.weights.config import WeightsConfig, of_forward
from flashtile.backends.portable.weights.kernel import WeightsPointers, weights_kernel
from flashtile.backends.portable.weights.launch import constants_of
from flashtile.problems.attention import Problem, WeightsProblem

_FORMS = (("full", 0), ("columns", 0), ("top", 8), ("top", 128))
_FEATURES: dict[str, Any] = {
    "varlen": True, "seqused_k": True, "window_left": 64, "window_right": 64, "softcap": 1.0, "alibi": True,
}  # fmt: skip
_BUDGETS = {
    ("hopper", 64, "modified top 8"): 24,
    ("ampere", 64, "full"): 440,
    ("ampere", 64, "modified full"): 592,
    ("ampere", 64, "modified columns"): 28,
    ("ampere", 64, "modified top 8"): 12,
}
"""Bytes of spills by family, head size and name of the form; none of these kernels was timed."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each form with many features, and with functions along a block mask."""
    capability = divmod(architecture(arch).capability, 10)
    family = family_of_capability(*capability)
    for form, top in _FORMS:
        name = f"{form} {top}" if top else form
        telling = form == "columns" or (family == "hopper" and top == 8)
        for head_dim in (64, 128):
            plain = replace(PLAIN, head_dim=head_dim, head_dim_v=head_dim, **_FEATURES)
            problem = _with_form(plain, form, top)
            config = of_forward(problem, for_cells(row_for(capability, 2, head_dim, windowed=True)))
            yield _case(
                f"weights bf16 head_dim {head_dim} {name}", problem, config,
                budget=_BUDGETS.get((family, head_dim, name), 0), exhaustive=not telling or head_dim == 64,
            )  # fmt: skip
        with_mods = _with_form(replace(WITH_MODS, head_dim=64, head_dim_v=64), form, top)
        config = of_forward(with_mods, of_row(with_mods, family, 2, 64))
        yield _case(
            f"modified weights bf16 head_dim 64 {name}", with_mods, config,
            budget=_BUDGETS.get((family, 64, f"modified {name}"), 0), exhaustive=form != "columns",
        )  # fmt: skip


def _with_form(problem: Problem, form: str, top: int) -> WeightsProblem:
    given = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return WeightsProblem(**given, form=form, top=top)


def _case(
    name: str, problem: WeightsProblem, config: WeightsConfig, budget: int, exhaustive: bool
) -> CompileCase:
    tile = config.tile
    variant = attention_variant(problem, tile, config.precision, wide=False, aligned=True)
    variant = replace(variant, **constants_of(problem))
    types: dict[str, Any] = {"weights": "*bf16" if problem.form == "full" else "*fp32"}
    types["indices"] = "*i64" if problem.form == "top" else None
    if problem.mods is not None:
        variant = with_functions(variant, problem, tile, owns_keys=problem.form == "columns")
        types |= function_types(problem.mods, gradients=False)
    return CompileCase(
        name=name,
        kernel=weights_kernel,
        signature=signature_of(weights_kernel, WeightsPointers, "bf16", problem, **types),
        constants={"C": variant},
        divisible_by_16=STRIDES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        spill_budget=budget,
        exhaustive=exhaustive,
    )
