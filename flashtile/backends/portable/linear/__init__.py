"""Products with a weight in Triton: GEMV, flat products, and torch's product with a separate epilogue."""

from __future__ import annotations

from flashtile.backends import portable
from flashtile.problems.linear import LinearProblem


def reason_against(problem: LinearProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    from flashtile.backends.portable.linear.config import SIXTEEN_BIT

    dtypes = {problem.dtype}
    if problem.invariant and problem.dtype not in SIXTEEN_BIT:
        return f"it has an invariant product in float16 and bfloat16, not in {problem.dtype}"
    return portable.reason_of_device(problem.device, dtypes, explicit) or portable.reason_of_dtypes(dtypes)


def configure_linear(problem: LinearProblem):
    from flashtile.backends.portable.linear.config import choose

    return choose(problem)


configure_linear_qkv = configure_linear


def prepare_linear(problem: LinearProblem, config):
    from flashtile.backends.portable.linear.launch import prepare

    return prepare(problem, config)


prepare_linear_qkv = prepare_linear
