"""The kernels that backends share, for compilation ahead of time."""

from __future__ import annotations

from flashtile.backends.common.launch import padded
from flashtile.backends.common.preprocess import (
    PREPROCESS_BLOCK_M,
    PREPROCESS_NUM_WARPS,
    ROW_PAD,
    preprocess_kernel,
)
from flashtile.compile_report import CompileCase
from flashtile.problem import Problem


def preprocess_case(
    name: str, problem: Problem, dtype: str, has_dlse: bool = False, dq_accum_columns: int = 0
) -> CompileCase:
    """``preprocess_kernel`` as the backward of ``problem`` launches it, with tensors in ``dtype`` ("bf16").

    Counters of programs come with an accumulator of dQ.
    """
    accumulates = dq_accum_columns > 0
    given = {
        "dlse_ptr": has_dlse,
        "dsink_ptr": problem.sink,
        "sink": problem.sink,
        "dq_accum_ptr": accumulates,
        "counters_ptr": accumulates,
        "cu_seqlens_q": problem.varlen,
    }
    constants = {
        "VARLEN": problem.varlen,
        "HAS_DLSE": has_dlse,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_DV": padded(problem.head_dim_v),
        "BLOCK_M": PREPROCESS_BLOCK_M,
        "ROW_PAD": ROW_PAD,
        "DQ_ACCUM_COLUMNS": dq_accum_columns,
        **{pointer: None for pointer, present in given.items() if not present},
    }
    types = {
        "out_ptr": f"*{dtype}",
        "dout_ptr": f"*{dtype}",
        "counters_ptr": "*i32",
        "cu_seqlens_q": "*i32",
        "sink": "*fp32",
        "lse_factor": "fp32",
    }
    signature = {
        argument: types.get(argument, "*fp32" if argument.endswith("_ptr") else "i32")
        for argument in preprocess_kernel.arg_names
        if argument not in constants
    }
    return CompileCase(
        name=name,
        kernel=preprocess_kernel,
        signature=signature,
        constants=constants,
        num_warps=PREPROCESS_NUM_WARPS,
        tensor_cores=False,
    )
