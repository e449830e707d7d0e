"""Flat products: 1 to 16 rows of x, with a ring of asynchronous copies.

If the measured table assigns a shape to another kernel, this backend serves the shape only when the caller
names ``backend="hopper"``.
"""

from __future__ import annotations

from typing import Any

from flashtile.backends import hopper
from flashtile.problems.linear import LinearProblem

NAME = "hopper"


def reason_against(problem: LinearProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    from flashtile.backends.portable.linear.config import SIXTEEN_BIT, found_row, kind_of

    reason = hopper.reason_of_device(problem)  # type: ignore[arg-type]
    if reason is not None:
        return reason
    if problem.dtype not in SIXTEEN_BIT:
        return f"it computes in float16 or bfloat16, not {problem.dtype}"
    if problem.invariant:
        return "its order of sums is not that of products of more than 16 rows"
    if not 1 <= problem.M <= 16:
        return f"it multiplies 1 to 16 rows, x has {problem.M}"
    if problem.heads is not None and problem.heads.norm:
        return "its tiles have no whole heads, whose queries and keys are normalised"
    if problem.scales == "block":
        return "it takes scales of the weight's rows, not of its blocks"
    if not problem.aligned:
        return "rows of x and weight must begin at multiples of 16 bytes"
    if explicit:
        return None
    found = found_row(problem)
    kind = kind_of(problem, found)
    if found is None:
        return None
    if kind != "flat":
        return f"the table gives {problem.M} rows to {kind}"
    measured = found.row.measured(problem.M, kind)
    if measured is not None and measured["backend"] != NAME:
        return f"the table gives {problem.M} rows to the portable flat product"
    return None


def configure_linear(problem: LinearProblem) -> Any:
    from flashtile.backends.hopper.linear.config import choose
    from flashtile.backends.portable.linear.config import found_row

    found = found_row(problem)
    measured = None if found is None else found.row.measured(problem.M, "flat")
    if measured is None or measured["backend"] != NAME:
        return choose(problem, None)
    return choose(problem, tuple(measured["config"]))


configure_linear_qkv = configure_linear


def prepare_linear(problem: LinearProblem, config: Any) -> Any:
    from flashtile.backends.hopper.linear.launch import FlatLaunch

    return FlatLaunch(problem, config)


prepare_linear_qkv = prepare_linear
