"""The kernels of attention weights, for compilation ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from flashtile.backends.common.compile_report import CompileCase, architecture
from flashtile.backends.portable.arguments import Numbers, Variant
from flashtile.backends.portable.compile_cases import PLAIN, STRIDES
from flashtile.backends.portable.config import family_of_capability, for_cells, row_for
from flashtile.backends.portable.launch import variant_of
from flashtile.backends.portable.mods.arguments import CAPTURED, LISTS
from flashtile.backends.portable.mods.compile_cases import WITH_MODS
from flashtile.backends.portable.mods.config import of_row
from flashtile.backends.portable.mods.launch import variants_of
from flashtile.backends.portable.weights.config import of_forward
from flashtile.backends.portable.weights.kernel import Pointers, weights_kernel
from flashtile.backends.portable.weights.launch import constants_of
from flashtile.backends.portable.weights.modified import modified_weights_kernel
from flashtile.problems.attention import Problem, WeightsProblem

_FORMS = (("full", 0), ("columns", 0), ("top", 8), ("top", 128))
_FEATURES: dict[str, Any] = {
    "varlen": True, "seqused_k": True, "window_left": 64, "window_right": 64, "softcap": 1.0, "alibi": True,
}  # fmt: skip
_BUDGETS = {
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
            variant = variant_of(problem, config.tile, config.precision, wide=False, aligned=True)
            given = dict.fromkeys(("mask", "key_padding_mask", "bias", "seqused_q"))
            given |= dict.fromkeys(("mask_stride_k", "padding_stride_k", "bias_stride_k"), 1)
            given["C"] = replace(variant, **constants_of(problem))
            yield _case(
                f"weights bf16 head_dim {head_dim} {name}", weights_kernel, given, form, config.tile,
                budget=_BUDGETS.get((family, head_dim, name), 0), exhaustive=not telling or head_dim == 64,
            )  # fmt: skip
        with_mods = _with_form(replace(WITH_MODS, head_dim=64, head_dim_v=64), form, top)
        config = of_forward(with_mods, of_row(with_mods, family, 2, 64))
        both = variants_of(
            with_mods, config.tile, config.precision, wide=False, aligned=True, by_keys=form == "columns"
        )
        given = {"alibi_slopes": None} | dict.fromkeys(CAPTURED[2:])
        given["C"], given["FULL"] = (replace(one, **constants_of(with_mods)) for one in both)
        yield _case(
            f"modified weights bf16 head_dim 64 {name}", modified_weights_kernel, given, form, config.tile,
            budget=_BUDGETS.get((family, 64, f"modified {name}"), 0), exhaustive=form != "columns",
        )  # fmt: skip


def _with_form(problem: Problem, form: str, top: int) -> WeightsProblem:
    given = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return WeightsProblem(**given, form=form, top=top)


def _case(
    name: str, kernel: Any, constants: dict[str, Any], form: str, tile: Any, budget: int, exhaustive: bool
) -> CompileCase:
    if form != "top":
        constants = constants | {"indices": None}
    variant: Variant = constants["C"]
    types = dict.fromkeys(Pointers._fields, "*i32") | dict.fromkeys(("q", "k"), "*bf16")
    types |= dict.fromkeys(("lse", "alibi_slopes"), "*fp32") | {"indices": "*i64"}
    types |= {"weights": "*bf16" if variant.FORM == "full" else "*fp32"}
    types |= {CAPTURED[0]: "*fp32", CAPTURED[1]: "*i32"} | dict.fromkeys((*LISTS, "listed_blocks"), "*i32")
    types |= dict.fromkeys(Numbers._fields, "fp32")
    return CompileCase(
        name=name,
        kernel=kernel,
        signature={n: types.get(n, "i32") for n in kernel.arg_names if n not in constants},
        constants=constants,
        divisible_by_16=STRIDES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        spill_budget=budget,
        exhaustive=exhaustive,
    )
