"""Additional arguments that a user's functions and a block mask need at the launch of an attention kernel."""

from __future__ import annotations

import operator
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.common.cached_launch import CachedLaunch
from flashtile.backends.common.launch import KernelConfig
from flashtile.backends.portable.attention import functions
from flashtile.backends.portable.attention.arguments import AttentionVariant
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.masks import MAX_CAPTURED, MAX_SIZES, Mods

CAPTURED = tuple(f"captured_{i}" for i in range(MAX_CAPTURED))
SIZES = tuple(f"size_{i}" for i in range(MAX_SIZES))


Captured: Any = namedtuple(  # type: ignore[misc]
    "Captured", [f"{kind}_{i}" for kind in ("tensor", "gradient") for i in range(MAX_CAPTURED)] + [*SIZES]
)
"""Contiguous tensors that functions read, their fp32 gradients, and the sizes of all their dimensions.

The last fields of sizes hold integer constants of the traced functions. Unused tensors are None, unused
sizes 0."""


class Lists(NamedTuple):
    """Lists of a block mask: the key blocks of each row block, or the row blocks of each key block.

    ``batch`` and ``heads`` are the mask's own sizes: 1 if all sequences or heads share it.
    """

    num_blocks: Any
    indices: Any
    full_num_blocks: Any
    full_indices: Any
    batch: Any
    heads: Any


kv_lists_of = operator.attrgetter("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
q_lists_of = operator.attrgetter("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
_captured_of = operator.attrgetter(*CAPTURED)
_PLAIN = len(OptionalTensors._fields)
"""Number of optional tensors of a call without score or mask functions. They come first."""
_NO_GRADIENTS = (None,) * MAX_CAPTURED


def captured_of(extras: Any) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in _captured_of(extras)]


def with_functions(
    plain: AttentionVariant, problem: Problem, config: KernelConfig, owns_keys: bool
) -> AttentionVariant:
    """Add the score and mask functions of ``problem`` to a variant.

    ``owns_keys``: whether each program computes the results of a block of keys (dk, dv), not of rows.
    """
    mods = problem.mods
    assert mods is not None
    score = functions.score_function(mods)
    variant = replace(
        plain,
        SCORE_MOD=score,
        MASK_MOD=functions.mask_function(mods),
        HAS_SCORE_MOD=plain.HAS_SCORE_MOD or score is not None,
        **functions.guards(mods),
    )
    if mods.block_size is None:
        return variant
    size_q, size_kv = mods.block_size
    variant = replace(
        variant,
        EVEN_M=problem.seqlen_q % size_q == 0,
        EVEN_N=problem.seqlen_k % size_kv == 0,
        MASK_BLOCK=size_kv if owns_keys else size_q,
        TILES_PER_MASK_BLOCK=size_q // config.BLOCK_M if owns_keys else size_kv // config.BLOCK_N,
    )
    return replace(variant, FULL=replace(variant, MASK_MOD=None))


class FunctionPointers:
    """``(kernel, extras, captured) -> last arguments of the kernel``, for calls of one signature."""

    def __init__(self, problem: Problem, extras: Any) -> None:
        mods = problem.mods
        assert mods is not None
        self._mods = mods
        self._sizes = mods.kernel_sizes(_captured_of(extras))
        self._list_sizes: Sequence[int] = ()
        if mods.block_size is not None:
            self._list_sizes = [max(size, 1) for size in extras.kv_num_blocks.shape[:2]]

    def __call__(
        self,
        kernel: CachedLaunch,
        extras: Any,
        captured: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None] = _NO_GRADIENTS,
        owns_keys: bool = False,
    ) -> tuple[Any, ...]:
        """Return the kernel's last arguments.

        ``captured``: the tensors of :func:`captured_of`, which the caller keeps alive until the launch.
        ``owns_keys``: whether each program computes the results of a block of keys (dk, dv), not of rows.
        """
        tensors: Sequence[Any] = (*captured, *gradients)
        lists: Sequence[Any] = ()
        if self._list_sizes:
            lists = (q_lists_of if owns_keys else kv_lists_of)(extras)
        if kernel.takes_addresses:
            tensors, lists = _addresses(tensors), _addresses(lists)
        listed = Lists._make((*lists, *self._list_sizes)) if lists else None
        return (*extras[:_PLAIN], None, Captured(*tensors, *self._sizes), listed)

    def new_gradients(self, captured: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return fp32 zeros for each captured tensor that requires a gradient, and None for the others."""
        return [
            tensor.new_zeros(tensor.shape, dtype=torch.float32)
            if tensor is not None and i in self._mods.learned
            else None
            for i, tensor in enumerate(captured)
        ]

    def cast(
        self, gradients: Sequence[Tensor | None], captured: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Convert each gradient to the dtype of its tensor."""
        return [
            None if gradient is None or tensor is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, captured, strict=True)
        ]


def zero_gradients(mods: Mods, extras: Any) -> tuple[Tensor | None, ...]:
    """Return zero gradients of the captured tensors, for calls in which no row sees a key."""
    return tuple(
        torch.zeros_like(tensor) if tensor is not None and i in mods.learned else None
        for i, tensor in enumerate(_captured_of(extras))
    )


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
