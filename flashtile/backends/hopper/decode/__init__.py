"""A Gluon kernel for NVIDIA's Hopper GPUs: attention of several query tokens over a cache.

The portable backend serves most calls with at most 16 query rows per key head (``config.serves_few_rows``
says which it does not), and appending, combining and copying. Invariant calls have this kernel for any number
of rows, with equally many keys in each tile (``config.choose``), so that single tokens have the bits of
prompts. ``softmax_max`` saves time in the portable kernel and changes no result. This kernel ignores it, and
is still faster than the portable kernel. A call with both ``softmax_max`` and an explicit
``backend="hopper"`` is refused.
"""

from __future__ import annotations

import torch

from flashtile.backends import hopper, portable
from flashtile.problems.decode import FP8, DecodeProblem

PORTABLE_ROWS = 16
"""Rows of the portable kernel's smallest tile, with which decoding is as fast as memory allows."""


def reason_against(problem: DecodeProblem, explicit: bool) -> str | None:
    """Why this backend does not serve the problem; None if it does."""
    from flashtile.backends.hopper.decode.config import serves_few_rows, serves_heads

    reason = hopper.reason_of_device(problem) or portable.reason_of_masking(problem)
    if reason is not None:
        return reason
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, not {problem.dtype}"
    if problem.cache_dtype not in (problem.dtype, FP8):
        return f"its kernel takes caches in the dtype of q or e4m3, not {problem.cache_dtype}"
    if problem.qv:
        return "its kernel takes no qv"
    if problem.prior:
        return "its kernel takes no result over a shared prefix"
    unified = problem.softmax_max is not None or problem.softmax_max_by_head
    if unified and explicit:
        return "its kernel takes no softmax_max: it finds the maximum of each row"
    sizes = problem.head_dim, problem.head_dim_v
    multiple = 16 // problem.cache_dtype.itemsize
    for name, size in zip(("head_dim", "head_dim_v"), sizes, strict=True):
        if size % multiple:
            return f"{name} must be a multiple of {multiple} for its loads, it is {size}"
    if not serves_heads(*sizes):
        return f"it has no tile for head sizes of {sizes[0]} and {sizes[1]}"
    if problem.tma_obstacle is not None:
        return problem.tma_obstacle
    if 0 in (problem.batch, problem.total_q, problem.seqlen_q, problem.num_blocks, problem.capacity):
        return "there are no queries or no keys"
    rows = problem.seqlen_q * problem.group_size
    # Prompts need this kernel, and single tokens must have the bits of prompts if the call is invariant.
    free = not (explicit or problem.invariant)
    if rows <= PORTABLE_ROWS and free and not serves_few_rows(problem):
        return f"{rows} query rows of a key head fit the portable kernel's tile of {PORTABLE_ROWS}"
    return None


def configure_decode(problem: DecodeProblem):
    from flashtile.backends.hopper.decode.config import choose

    return choose(problem)


def prepare_decode(problem: DecodeProblem, config):
    from flashtile.backends.hopper.decode.launch import HopperDecodeLaunch

    return HopperDecodeLaunch(problem, config)


configure_decode_mass = configure_decode


def reason_against_decode_mass(problem: DecodeProblem, explicit: bool) -> str | None:
    reason = reason_against(problem, explicit)
    if reason is None and not explicit and problem.seqlen_q * problem.group_size <= PORTABLE_ROWS:
        return "the portable kernel stores probabilities of few rows, this one has to read the keys again"
    return reason


def prepare_decode_mass(problem: DecodeProblem, config):
    from flashtile.backends.portable.decode.mass import MassLaunch

    return MassLaunch(problem, prepare_decode(problem, config))
