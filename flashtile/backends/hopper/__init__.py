"""Gluon kernels for NVIDIA's Hopper GPUs (compute capability 9.0): TMA, wgmma, warp specialisation.

This module selects and prepares the kernels of attention. The backward serves each call that the forward
serves, except some with score or mask functions (``refusals``).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flashtile.backends.common.config import RAGGED_ROWS
from flashtile.backends.common.device import capability, is_nvidia
from flashtile.backends.common.releases import reason_of_releases
from flashtile.problems.attention import Problem
from flashtile.problems.decode import DecodeProblem

NAME = "hopper"
LARGEST_HEAD_DIM = 512
CAPABILITY = (9, 0)


def reason_against(problem: Problem, explicit: bool) -> str | None:
    """Return why this backend does not serve the problem; None if it does."""
    reason = reason_of_device(problem)
    if reason is not None:
        return reason
    beyond = replace(problem, dropout_p=0.0, bias=False).needs_general_mask
    if beyond is not None:
        return f"it has no {beyond}"
    if problem.partial and max(problem.head_dim, problem.head_dim_v) > 128:
        return "its kernels for head sizes over 128 write 16 bits, partial results are float32"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16, not {problem.dtype}"
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % 8:
            return f"{name} must be a multiple of 8 for TMA, it is {size}"
        if size > LARGEST_HEAD_DIM:
            return f"{name} must be at most {LARGEST_HEAD_DIM} for its tiles, it is {size}"
    from flashtile.backends.hopper.refusals import reason_against_modifiers

    reason = reason_against_modifiers(problem)
    return reason_of_tensors(problem) if reason is None else reason


def reason_against_forward(problem: Problem, explicit: bool) -> str | None:
    """Return why the forward kernel does not serve a call, or None if it does.

    An invariant call needs rows with the bits that ``decode.kernel`` gives them: blocks of as many keys, and
    the same steps of the softmax. ``decode.kernel`` adds a sink last, scales soft-capped scores and those
    with ALiBi otherwise, and its head sizes over 128 have other blocks.
    """
    reason = reason_against(problem, explicit)
    if reason is None and problem.invariant:
        for name, given in (
            ("softcap", problem.softcap), ("alibi_slopes", problem.alibi), ("sink", problem.sink),
            ("head size over 128", max(problem.head_dim, problem.head_dim_v) > 128),
        ):  # fmt: skip
            if given:
                return f"it takes no {name} in invariant calls"
    return reason


def reason_against_backward(problem: Problem, explicit: bool) -> str | None:
    """Return why the backward kernels do not serve a call, or None if they do."""
    reason = reason_against(problem, explicit)
    if reason is None and problem.entropy:
        return "it computes no gradient of the entropy"
    if reason is None and problem.mods is not None:
        from flashtile.backends.hopper.refusals import reason_against_mods_backward

        reason = reason_against_mods_backward(problem)
    return reason


def reason_of_device(problem: Problem | DecodeProblem) -> str | None:
    """Return why no kernel of this backend runs on the problem's device; None if they do."""
    reason = reason_of_releases(problem.device)
    if reason is not None:
        return reason
    if not is_nvidia(problem.device):
        return f"its kernels run on NVIDIA's Hopper GPUs, not on {problem.device}"
    major, minor = capability(problem.device)
    if (major, minor) != CAPABILITY:
        return f"it needs compute capability 9.0 (Hopper), {problem.device} has {major}.{minor}"
    return None


def reason_of_tensors(problem: Problem) -> str | None:
    """Return why this backend's kernels cannot address the problem's tensors; None if they can.

    The FP8 kernels have the same limits.
    """
    if problem.tma_obstacle is not None:
        return problem.tma_obstacle
    if 0 in (problem.batch, problem.total_q, problem.total_k, problem.seqlen_q, problem.seqlen_k):
        return "there are no queries or no keys"
    if max(problem.total_q, problem.total_k) > RAGGED_ROWS:
        return f"it addresses up to {RAGGED_ROWS} rows, there are {max(problem.total_q, problem.total_k)}"
    return None


def configure_forward(problem: Problem):
    """Return a ``ForwardConfig``, or a ``DividedConfig`` for few queries on many keys."""
    from flashtile.backends.hopper.forward.config import choose
    from flashtile.backends.hopper.forward.divided import divided

    config = choose(problem)
    # Combining divided keys is another order of sums.
    return config if problem.invariant else divided(problem, config) or config


def heads_of_tile(problem: Problem, config) -> tuple[int, int]:
    """Return (query heads of a key head that share a tile of the forward, rows that a token takes in it)."""
    from flashtile.backends.hopper.config import rows_of_token
    from flashtile.backends.hopper.forward.rounds import plan_of

    pack = plan_of(problem, config).pack
    return pack, rows_of_token(pack)


def configure_backward(problem: Problem):
    """Return a ``BackwardConfig``, or a ``WideBackwardConfig`` for head sizes over 128."""
    from flashtile.backends.hopper.backward.config import choose

    return choose(problem)


def prepare_forward(problem: Problem, config):
    from flashtile.backends.hopper.forward.divided import DividedConfig, DividedForwardLaunch
    from flashtile.backends.hopper.forward.launch import HopperForwardLaunch

    launch = DividedForwardLaunch if isinstance(config, DividedConfig) else HopperForwardLaunch
    return launch(problem, config)


def prepare_backward(problem: Problem, config):
    from flashtile.backends.hopper.backward.launch import HopperBackwardLaunch

    return HopperBackwardLaunch(problem, config)
