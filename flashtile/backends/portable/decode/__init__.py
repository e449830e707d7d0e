"""Decoding in Triton: attention over a cache, combining of partial results, appends, copies of blocks."""

from __future__ import annotations

from flashtile.backends import portable
from flashtile.problems.decode import FP8, AppendProblem, CombineProblem, CopyProblem, DecodeProblem


def reason_against(
    problem: DecodeProblem | AppendProblem | CombineProblem | CopyProblem, explicit: bool
) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    dtypes = {getattr(problem, name, problem.dtype) for name in ("dtype", "cache_dtype")}
    computed = set() if isinstance(problem, CopyProblem) else dtypes  # a copy moves bits
    reason = portable.reason_of_device(problem.device, computed, explicit)
    if reason is None and isinstance(problem, DecodeProblem):
        reason = portable.reason_of_masking(problem)
    return reason or portable.reason_of_dtypes(dtypes - {FP8})


def configure_decode(problem: DecodeProblem):
    from flashtile.backends.portable.decode.config import choose

    return choose(problem)


def prepare_decode(problem: DecodeProblem, config):
    from flashtile.backends.portable.decode.launch import DecodeLaunch

    return DecodeLaunch(problem, config)


configure_decode_mass = configure_decode


def prepare_decode_mass(problem: DecodeProblem, config):
    from flashtile.backends.portable.decode.mass import MassLaunch

    return MassLaunch(problem)


def prepare_append_kvcache(problem: AppendProblem, config: None):
    from flashtile.backends.portable.decode.launch import AppendLaunch

    return AppendLaunch(problem)


def prepare_combine(problem: CombineProblem, config: None):
    from flashtile.backends.portable.decode.launch import CombineLaunch

    return CombineLaunch(problem)


def prepare_copy_blocks(problem: CopyProblem, config: None):
    from flashtile.backends.portable.decode.launch import CopyLaunch

    return CopyLaunch(problem)
