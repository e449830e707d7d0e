"""The kernels that backends share, for compilation ahead of time."""

from __future__ import annotations

from typing import Any

from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.common.preprocess import NUM_WARPS, preprocess_kernel, variant_of
from flashtile.problems.attention import Problem


def preprocess_case(
    name: str, problem: Problem, dtype: str, has_dlse: bool = False, dq_accum_columns: int = 0
) -> CompileCase:
    """``preprocess_kernel`` as the backward of ``problem`` launches it, with tensors in ``dtype`` ("bf16").

    Counters of programs come with an accumulator of dQ.
    """
    given = {
        "dlse": has_dlse,
        "dsink": problem.sink,
        "sink": problem.sink,
        "dq_accum": dq_accum_columns > 0,
        "counters": dq_accum_columns > 0,
        "cu_seqlens_q": problem.varlen,
    }
    constants: dict[str, Any] = {pointer: None for pointer, present in given.items() if not present}
    constants["C"] = variant_of(problem, has_dlse, dq_accum_columns)
    rows = ("lse", "dlse", "neg_lse", "neg_delta", "dsink", "dq_accum", "sink")
    types = dict.fromkeys(("out", "dout"), f"*{dtype}") | dict.fromkeys(rows, "*fp32")
    types |= dict.fromkeys(("counters", "cu_seqlens_q"), "*i32") | {"lse_factor": "fp32"}
    return CompileCase(
        name=name,
        kernel=preprocess_kernel,
        signature={
            argument: types.get(argument, "i32")
            for argument in preprocess_kernel.arg_names
            if argument not in constants
        },
        constants=constants,
        num_warps=NUM_WARPS,
        tensor_cores=False,
    )
