"""Launch arguments of both passes for the modifiers of a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.backends.hopper.modifiers.functions import CapturedTensors
from flashtile.backends.portable.attention.function_pointers import Lists
from flashtile.dropout import threshold
from flashtile.problems.attention import Problem
from flashtile.problems.masks import Mods


def modifier_flags(problem: Problem, fixed: bool) -> dict[str, Any]:
    """Return fields of :class:`ModifierFlags` for either pass.

    If ``fixed``, as in the backward, functions take few registers: integers in a mask_mod are compiled as
    literals, and threads keep nothing for several scores. Integers in a score_mod are always compiled as
    literals, because a score_mod leaves no registers free.
    """
    mods = problem.mods
    flags = {"HAS_BIAS": problem.bias, "HAS_DROPOUT": problem.dropout_p > 0}
    if mods is None:
        return flags
    from flashtile.backends.portable.attention import functions

    shared = not fixed
    mask, listed = functions.mask_function(mods, True, fixed, shared), mods.block_size is not None
    return {
        **flags,
        "HAS_MODS": True,
        "HAS_CUTS": mask is not None or listed,
        "SCORE_MOD": functions.score_function(mods, True, fixed=True, shared=shared),
        "MASK_MOD": mask,
        "MASK_COLUMNS": functions.column_function(mods) if shared else None,
        "LISTED": listed,
        **functions.guards(mods),
    }


def modifier_integers(problem: Problem, bias: Tensor | None) -> dict[str, int]:
    """Return the fields of the kernels' ``schedule`` that dropout and the bias read.

    They are the same for the forward and the backward.
    """
    integers = {}
    if problem.dropout_p:
        integers["drop_threshold"] = threshold(problem.dropout_p)
    if bias is not None:
        integers["bias_batch"], integers["bias_heads"], _, _ = own_sizes(bias)
    return integers


def own_sizes(bias: Tensor) -> tuple[int, ...]:
    """Return the shape of ``bias``, with 1 for dimensions that it is expanded along (stride 0)."""
    return tuple(size if step else 1 for size, step in zip(bias.shape, bias.stride(), strict=True))


def is_shared(problem: Problem, bias: Tensor | None) -> bool:
    """Whether several sequences share the bias of a head."""
    return bias is not None and own_sizes(bias)[0] == 1 < problem.batch


class FunctionTensors:
    """Turns the tensors of a call's score and mask functions, and of its block mask, into kernel arguments.

    One object serves the calls of one signature. ``by_keys``: whether each block of keys has a list;
    otherwise each block of query rows has one.
    """

    def __init__(self, mods: Mods, extras: Any, by_keys: bool) -> None:
        from flashtile.backends.portable.attention.function_pointers import (
            captured_of,
            kv_lists_of,
            q_lists_of,
        )

        captured = captured_of(extras)
        self._captured_of, self._lists_of = captured_of, q_lists_of if by_keys else kv_lists_of
        self._sizes = mods.kernel_sizes(captured)
        self._list_sizes = None if mods.block_size is None else extras.kv_num_blocks.shape[:2]
        self._has_captured = any(tensor is not None for tensor in captured)
        self._without_captured: Any = 0
        if mods.numbers:
            self._without_captured = CapturedTensors(*(0,) * len(captured), *self._sizes)

    def __call__(self, extras: Any, missing: Tensor, by_address: bool) -> tuple[Any, Any, list]:
        """Return (lists, captured, tensors that must live until the launch).

        With ``by_address``, lists and captured have addresses instead of tensors. ``lists`` is None without a
        block mask; ``missing`` replaces lists that the block mask lacks. Captured tensors that a call lacks
        are 0. If a call has neither captured tensors nor numbers, ``captured`` itself is 0. It is not None,
        because jit functions of Triton 3.6 cannot return a structure that contains None.
        """
        lists, captured, tensors = None, self._without_captured, []
        if self._has_captured:
            tensors = self._captured_of(extras)
            given = [0 if t is None else t.data_ptr() if by_address else t for t in tensors]
            captured = CapturedTensors(*given, *self._sizes)
        if self._list_sizes is not None:
            listed: list[Any] = [missing if t is None else t for t in self._lists_of(extras)]
            tensors = [*tensors, *listed]
            if by_address:
                listed = [t.data_ptr() for t in listed]
            lists = Lists(*listed, *self._list_sizes)
        return lists, captured, tensors
