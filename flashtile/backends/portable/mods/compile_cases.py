"""The kernels with functions, for compilation ahead of time: a learned bias under a document mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashtile.backends.common.compile_report import CompileCase, architecture, types_of
from flashtile.backends.common.config import KernelConfig
from flashtile.backends.portable.attention import backward_dkdv, backward_dq, forward
from flashtile.backends.portable.attention.arguments import AttentionVariant
from flashtile.backends.portable.attention.launch import attention_variant
from flashtile.backends.portable.compile_cases import PLAIN, STRIDES, signature_of
from flashtile.backends.portable.config import family_of_capability
from flashtile.backends.portable.mods.arguments import SIZES, Captured, Lists
from flashtile.backends.portable.mods.config import of_row
from flashtile.backends.portable.mods.functions import gradient_function
from flashtile.backends.portable.mods.launch import with_functions
from flashtile.problems.attention import Problem
from flashtile.problems.masks import Mods

_SCORE = """\
t0: int = sub kv q
t1: int = maximum t0 -128
t2: int = minimum t1 128
t3: int = add t2 128
t4: float = load 0 h t3
t5: float = add score t4
return t5"""
_MASK = """\
t0: int = load 1 b q
t1: int = load 1 b kv
t2: bool = eq t0 t1
t3: bool = le kv q
t4: bool = and t2 t3
return t4"""
_MODS = Mods(_SCORE, _MASK, learned=(0,), ranks=(2, 2), block_size=(128, 128))
WITH_MODS = replace(PLAIN, mods=_MODS)
_VARIANTS = {
    "block mask": WITH_MODS,
    "mask_mod": replace(WITH_MODS, mods=replace(_MODS, score_mod="", learned=(), block_size=None)),
    "score_mod": replace(WITH_MODS, window_right=0, mods=Mods(_SCORE, learned=(0,), ranks=(2,))),
}


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Each kernel and variant at the head sizes of most models."""
    table_family = family_of_capability(*divmod(architecture(arch).capability, 10))
    hopper = table_family == "hopper"
    for dtype, element_bytes, head_dim in (
        ("bf16", 2, 64),
        ("bf16", 2, 128),
        ("fp32", 4, 64),
    ):
        for variant, any_head_dim in _VARIANTS.items():
            problem = replace(any_head_dim, head_dim=head_dim, head_dim_v=head_dim)
            config = of_row(problem, table_family, element_bytes, head_dim)
            for name, kernel, pointers, tile in (
                ("forward", forward.forward_kernel, forward.ForwardPointers, config.forward),
                ("dkdv", backward_dkdv.dkdv_kernel, backward_dkdv.DkdvPointers, config.dkdv),
                ("dq", backward_dq.dq_kernel, backward_dq.DqPointers, config.dq),
            ):
                yield CompileCase(
                    name=f"{name} {dtype} head_dim {head_dim} {variant}",
                    kernel=kernel,
                    signature=signature_of(
                        kernel, pointers, dtype, problem, **function_types(problem.mods, name == "dq")
                    ),
                    constants={"C": _variant(name, problem, tile, config.precision)},
                    divisible_by_16=STRIDES,
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    spill_budget=max(
                        tile.spill_budget, _BUDGETS.get((table_family, dtype, head_dim, name), 0)
                    ),
                    tensor_cores=config.precision != "ieee",
                    exhaustive=not hopper or (dtype, head_dim, variant) != ("bf16", 128, "block mask"),
                )


_BUDGETS: dict[tuple[str, str, int, str], int] = {
    ("hopper", "bf16", 64, "dkdv"): 64,
    ("hopper", "bf16", 64, "dq"): 4,
    ("hopper", "bf16", 128, "dkdv"): 164,
    ("hopper", "fp32", 64, "dkdv"): 16,
    ("hopper", "fp32", 64, "dq"): 16,
    ("ampere", "bf16", 64, "dkdv"): 352,
    ("ampere", "bf16", 64, "forward"): 12,
    ("ampere", "bf16", 128, "dkdv"): 52,
    ("ampere", "bf16", 64, "dq"): 8,
    ("ampere", "fp32", 64, "dkdv"): 4,
    ("ampere", "fp32", 64, "forward"): 44,
}
"""Bytes of spills, the most of Triton 3.6 and 3.7; none of these kernels was timed."""


def _variant(name: str, problem: Problem, tile: KernelConfig, precision: str) -> AttentionVariant:
    assert problem.mods is not None
    plain = attention_variant(problem, tile, precision, wide=False, aligned=True)
    if name == "dq":
        plain = replace(plain, ADD_GRADIENTS=gradient_function(problem.mods))
    return with_functions(plain, problem, tile, owns_keys=name == "dkdv")


def function_types(mods: Mods | None, gradients: bool = True) -> dict[str, Any]:
    """Types of the pointers that functions and a block mask add."""
    assert mods is not None
    captured = {f"tensor_{i}": "*i32" for i in range(len(mods.ranks))}
    if mods.score_mod:
        captured["tensor_0"] = "*fp32"
    captured |= {f"gradient_{i}": "*fp32" for i in mods.learned if gradients}
    captured |= dict.fromkeys(SIZES, "i32")
    lists = None if mods.block_size is None else types_of(Lists, "*i32", batch="i32", heads="i32")
    return {"captured": types_of(Captured, None, **captured), "lists": lists}
