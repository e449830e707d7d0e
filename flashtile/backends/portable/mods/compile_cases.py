"""The kernels with functions, for compilation ahead of time: a learned bias under a document mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashtile.backends.common.compile_report import CompileCase, architecture
from flashtile.backends.common.config import KernelConfig
from flashtile.backends.portable.compile_cases import PLAIN
from flashtile.backends.portable.config import Config, family_of_capability
from flashtile.backends.portable.mods import functions, kernels
from flashtile.backends.portable.mods.arguments import CAPTURED, GRADIENTS, LISTS
from flashtile.backends.portable.mods.config import of_row
from flashtile.backends.portable.mods.launch import variants_of
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
_STRIDES = frozenset(f"{tensor}_stride_{of}" for tensor in "qkv" for of in "bsh")
_FLOAT_ROWS = ("lse", "neg_lse", "neg_delta")


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
            for name, kernel, tile in (
                ("forward", kernels.forward_kernel, config.forward),
                ("dkdv", kernels.dkdv_kernel, config.dkdv),
                ("dq", kernels.dq_kernel, config.dq),
            ):
                yield CompileCase(
                    name=f"{name} {dtype} head_dim {head_dim} {variant}",
                    kernel=kernel,
                    **_arguments(kernel, dtype, problem, tile, config),
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    spill_budget=max(
                        tile.spill_budget, _BUDGETS.get((table_family, dtype, head_dim, name), 0)
                    ),
                    tensor_cores=config.precision != "ieee",
                    exhaustive=not hopper or (dtype, head_dim, variant) != ("bf16", 128, "block mask"),
                )


_BUDGETS: dict[tuple[str, str, int, str], int] = {
    ("hopper", "bf16", 64, "dkdv"): 12,
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


def _arguments(
    kernel: Any, dtype: str, problem: Problem, tile: KernelConfig, config: Config
) -> dict[str, Any]:
    mods = problem.mods
    assert mods is not None
    constants: dict[str, Any] = {"alibi_slopes": None, "sink": None}
    constants |= dict.fromkeys(CAPTURED[len(mods.ranks) :])
    constants |= {name: None for i, name in enumerate(GRADIENTS) if i not in mods.learned}
    if mods.block_size is None:
        constants |= dict.fromkeys(LISTS)
    by_keys = kernel is kernels.dkdv_kernel
    both = variants_of(problem, tile, config.precision, wide=False, aligned=True, by_keys=by_keys)
    if kernel is kernels.dq_kernel:
        add = functions.gradient_function(mods)
        both = (replace(both[0], ADD_GRADIENTS=add), replace(both[1], ADD_GRADIENTS=add))
    constants["C"], constants["FULL"] = both
    types = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), f"*{dtype}")
    types |= dict.fromkeys((*_FLOAT_ROWS, *GRADIENTS), "*fp32") | dict.fromkeys(LISTS, "*i32")
    types |= {CAPTURED[i]: "*fp32" if mods.score_mod and i == 0 else "*i32" for i in range(len(mods.ranks))}
    types |= dict.fromkeys(("softmax_scale", "scale_log2", "softcap"), "fp32")
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    return {"signature": signature, "constants": constants, "divisible_by_16": _STRIDES}
