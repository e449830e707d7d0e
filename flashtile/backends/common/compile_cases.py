"""The kernels that backends share, for compilation ahead of time."""

from __future__ import annotations

from typing import Any

from flashtile.backends.common.compile_report import CompileCase, types_of
from flashtile.backends.common.preprocess import (
    NUM_WARPS,
    PreprocessLengths,
    PreprocessPointers,
    preprocess_kernel,
    preprocess_variant,
)
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
    types: dict[str, Any] = dict.fromkeys(("out", "dout"), f"*{dtype}")
    types |= dict.fromkeys(("counters", "cu_seqlens_q"), "*i32")
    types |= {pointer: None for pointer, present in given.items() if not present}
    return CompileCase(
        name=name,
        kernel=preprocess_kernel,
        signature={
            "pointers": types_of(PreprocessPointers, "*fp32", **types),
            "lse_factor": "fp32",
            "lengths": types_of(PreprocessLengths, "i32"),
        },
        constants={"C": preprocess_variant(problem, has_dlse, dq_accum_columns)},
        num_warps=NUM_WARPS,
        tensor_cores=False,
    )
