"""Why the Hopper kernels do not take a call's modifiers of scores: functions, dropout, a bias."""

from __future__ import annotations

from dataclasses import replace

from flashtile.backends.common.preprocess import ROW_PAD
from flashtile.backends.hopper.backward.config import alternatives
from flashtile.backends.hopper.config import is_windowed
from flashtile.backends.hopper.forward.config import MAX_COLUMNS_OF_MODIFIERS, choose
from flashtile.problems.attention import Problem

MAX_DROPPED = 31 / 32
"""Above this dropout_p, the threshold is NaN in fp16."""


def reason_against_modifiers(problem: Problem) -> str | None:
    """Return why the kernels do not take a call's modifiers; None if they do."""
    reason = None
    if problem.mods is not None:
        reason = reason_against_mods(problem)
    if reason is None and problem.dropout_p:
        reason = reason_against_dropout(problem)
    if reason is None and problem.bias:
        reason = reason_against_bias(problem)
    return reason


def reason_against_mods(problem: Problem) -> str | None:
    """Return why the kernels do not take a call's score_mod, mask_mod or block mask; None if they do."""
    mods = problem.mods
    assert mods is not None
    most = MAX_COLUMNS_OF_MODIFIERS["functions"]
    if max(problem.head_dim, problem.head_dim_v) > most:
        return f"it takes {mods.given} for head sizes up to {most}"
    if mods.score_mod and (problem.softcap > 0 or problem.alibi):
        return f"it takes no {'softcap' if problem.softcap > 0 else 'alibi_slopes'} with score_mod"
    if mods.block_size is None:
        return None
    size_q, size_kv = mods.block_size
    config = choose(replace(problem, dropout_p=0.0, bias=False))
    if size_q % config.BLOCK_M or size_kv % config.BLOCK_N:
        return (
            f"blocks of block_mask must be multiples of {config.BLOCK_M} queries and {config.BLOCK_N} keys, "
            f"they are {size_q} by {size_kv}"
        )
    if is_windowed(problem):
        return "it takes no causal or window_size with block_mask: write it in the block mask's mask_mod"
    return None


def reason_against_dropout(problem: Problem) -> str | None:
    """Return why the kernels do not take a call's dropout; None if they do."""
    most = MAX_COLUMNS_OF_MODIFIERS["dropout"]
    if max(problem.head_dim, problem.head_dim_v) > most:
        return f"it takes dropout_p for head sizes up to {most}"
    if problem.dropout_p > MAX_DROPPED:
        return f"it takes dropout_p up to {MAX_DROPPED}"
    if problem.partial:
        return "it takes no dropout_p where results are partial"
    if problem.mods is not None:
        return f"it takes no dropout_p with {problem.mods.given}"
    return None


def reason_against_bias(problem: Problem) -> str | None:
    """Return why the kernels do not take a call's bias; None if they do."""
    most = MAX_COLUMNS_OF_MODIFIERS["bias"]
    if max(problem.head_dim, problem.head_dim_v) > most:
        return f"it takes a bias for head sizes up to {most}"
    for name, given in (
        ("alibi_slopes", problem.alibi), ("dropout_p", problem.dropout_p),
        ("float32 results", problem.partial), ("functions of scores and masks", problem.mods is not None),
    ):  # fmt: skip
        if given:
            return f"it takes no {name} with bias"
    return problem.bias_obstacle


def reason_against_mods_backward(problem: Problem) -> str | None:
    """Return why the backward does not take a call's score_mod, mask_mod or block mask; None if it does.

    The function is called only for calls that the forward takes.
    """
    mods = problem.mods
    assert mods is not None
    if mods.learned:
        return "it computes no gradients of captured tensors"
    if mods.block_size is None:
        return None
    if problem.deterministic and not alternatives(problem)[0].wide:
        return "it takes no block_mask when deterministic, for head sizes up to 128"
    if mods.list_heads > 1 and problem.group_size > 1:
        return "it takes no block_mask that differs between query heads of one key head"
    size_q, _ = mods.block_size
    if size_q > ROW_PAD and problem.seqlen_q % size_q:
        return f"seqlen_q must be a multiple of the {size_q} queries of a block of block_mask"
    return None
