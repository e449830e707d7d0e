"""Block masks: lists of the blocks of scores with visible elements, so that hidden blocks cost nothing.

As in FlexAttention (Dong et al. 2024, arXiv:2412.05496, section 4.2), a block of BLOCK_SIZE queries by keys
is empty (skipped), full (computed without the mask) or partial. Lists hold the full and partial blocks for
each query block (forward pass and dq) and, transposed, for each key block (dk and dv).
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flashtile.caches import outlives_modes
from flashtile.checks.arguments import as_device, as_int, check_dense, check_int
from flashtile.masks.evaluate import evaluate
from flashtile.masks.mods import mask_mod as as_mask_mod
from flashtile.masks.mods import traced
from flashtile.problems.common import MAX_LENGTH
from flashtile.problems.masks import LISTS

ELEMENTS_AT_ONCE = 2**24
"""Approximate number of a mask's elements that are evaluated at once to find its blocks."""


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Lists of partial and full blocks, with FlexAttention's names.

    All lists are int32 on one device. ``kv_*`` lists hold the key blocks of each query block, ``q_*`` lists
    the query blocks of each key block. ``full_*`` lists hold full blocks, the other lists partial blocks.

    * ``*kv_num_blocks`` (batch or 1, heads or 1, query blocks) and ``*q_num_blocks`` (..., key blocks):
      number of blocks in each list.
    * ``*kv_indices`` (batch or 1, heads or 1, query blocks, key blocks) and ``*q_indices`` (..., key blocks,
      query blocks): indices of the listed blocks, of which only the first ``*_num_blocks`` are valid.
    """

    seq_lengths: tuple[int, int]
    """(number of queries, number of keys)."""
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor
    full_q_num_blocks: Tensor
    full_q_indices: Tensor
    BLOCK_SIZE: tuple[int, int]
    """(queries of a block, keys of a block)."""
    mask_mod: Callable[..., Any]
    """The mask that is applied in partial blocks."""

    def __post_init__(self) -> None:
        for name, least in (("seq_lengths", 0), ("BLOCK_SIZE", 1)):
            pair = getattr(self, name)
            if len(pair) != 2 or any(not _is_int(one) or one < least for one in pair):
                raise ValueError(f"{name} must be two ints of at least {least}, got {pair!r}")
        for name in LISTS:
            check_dense(name, getattr(self, name))

    @property
    def lists(self) -> tuple[Tensor, ...]:
        return tuple([getattr(self, name) for name in LISTS])

    def to(self, device: torch.device | str) -> BlockMask:
        """Return a copy whose lists of blocks are on ``device``. Tensors captured by ``mask_mod`` stay."""
        return replace(self, **{name: getattr(self, name).to(device) for name in LISTS})

    def sparsity(self) -> float:
        """Return the percentage of blocks that are skipped."""
        kept = self.kv_num_blocks.sum() + self.full_kv_num_blocks.sum()
        return 100 * (1 - int(kept) / max(self.kv_indices.numel(), 1))

    def __repr__(self) -> str:
        shape = (*self.kv_num_blocks.shape[:2], *self.seq_lengths)
        return f"BlockMask(shape={shape}, BLOCK_SIZE={self.BLOCK_SIZE}, mask_mod={self.mask_mod})"


_NAMES = tuple(field.name for field in fields(BlockMask))


FLEX_OPTIONS = {"_compile", "separate_full_blocks", "compute_dq_write_order", "dq_kv_order"}
"""Arguments of FlexAttention's function of this name that change no mask."""


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    **flex_options: Any,
) -> BlockMask:
    """Create the block mask of a mask function, with FlexAttention's argument names.

    Every element of the mask is evaluated once on ``device``, in chunks. On a GPU this does not synchronise.

    Args:
        mask_mod: ``mask_mod(batch, head, q_idx, kv_idx)``, as for :func:`flashtile.masks.mask_mod`.
        B, H: batch size and number of query heads for which the mask differs; None or 1 if it is the same
            for all.
        Q_LEN, KV_LEN: numbers of queries and keys.
        device: device of the lists. None: the device of the captured tensors, or the CPU if there are none.
        BLOCK_SIZE: number of queries and of keys in a block, or one int for both; multiples of 16.
        flex_options: FlexAttention's ``_compile``, ``separate_full_blocks``, ``compute_dq_write_order`` and
            ``dq_kv_order``, which are ignored.

    Raises:
        TypeError: ``mask_mod`` does not compile, or an argument has another name.
        ValueError: a length, block size or device is not allowed, or ``mask_mod`` reads outside of a captured
            tensor (checked on a GPU only with ``FLASHTILE_DEBUG=1``).

    Examples:
        >>> from flashtile import masks
        >>> block_mask = masks.create_block_mask(masks.causal(), None, None, 1024, 1024)
        >>> block_mask.sparsity()  # percent of the blocks
        43.75
        >>> q, k, v = torch.randn(3, 1, 1024, 2, 16).unbind()
        >>> flashtile.attention(q, k, v, block_mask=block_mask).shape
        torch.Size([1, 1024, 2, 16])
    """
    for name in flex_options.keys() - FLEX_OPTIONS:
        raise TypeError(f"create_block_mask() has no argument {name!r}")
    batch, heads = as_length("B", 1 if B is None else B), as_length("H", 1 if H is None else H)
    Q_LEN, KV_LEN = as_length("Q_LEN", Q_LEN), as_length("KV_LEN", KV_LEN)
    sizes = size_q, size_kv = block_sizes(BLOCK_SIZE)
    mask_mod = as_mask_mod(mask_mod)
    mask_mod.check_lengths(Q_LEN, KV_LEN)
    program, tensors, *_ = traced("mask_mod", mask_mod)
    device = device_of_mask(device, tensors)
    blocks_q, blocks_kv = -(-Q_LEN // size_q), -(-KV_LEN // size_kv)
    some = torch.zeros((batch, heads, blocks_q, blocks_kv), dtype=torch.bool, device=device)
    every = torch.zeros_like(some)
    keys = torch.arange(KV_LEN, device=device)
    debug = os.environ.get("FLASHTILE_DEBUG", "0") == "1"
    at_once = max(1, ELEMENTS_AT_ONCE // max(size_q * KV_LEN, 1))
    for b in range(batch):
        for h in range(heads):
            for first in range(0, blocks_q, at_once):
                last = min(first + at_once, blocks_q)
                rows = torch.arange(first * size_q, min(last * size_q, Q_LEN), device=device)
                inputs = {
                    "b": torch.tensor(b, device=device),
                    "h": torch.tensor(h, device=device),
                    "q": rows[:, None],
                    "kv": keys,
                }
                (seen,) = evaluate(program, inputs, tensors, check=debug or None)
                seen = torch.as_tensor(seen, device=device).expand(len(rows), KV_LEN)
                some[b, h, first:last] = _any(seen, last - first, blocks_kv, sizes)
                every[b, h, first:last] = ~_any(~seen, last - first, blocks_kv, sizes)
    return block_mask_of(some, every, (Q_LEN, KV_LEN), sizes, mask_mod)


def block_mask_of(
    some: Tensor,
    every: Tensor,
    lengths: tuple[int, int],
    sizes: tuple[int, int],
    mask_mod: Callable[..., Any],
) -> BlockMask:
    """Return a block mask, given whether some and whether all elements of each block are visible.

    Args:
        some, every: (batch or 1, heads or 1, query blocks, key blocks) bool, for each block.
        lengths: (number of queries, number of keys).
        sizes: (queries of a block, keys of a block).
        mask_mod: the mask that is applied in partial blocks.
    """
    partial, full = some & ~every, some & every
    lists = (*_lists(partial), *_lists(full), *_lists(partial.mT), *_lists(full.mT))
    return BlockMask(lengths, *lists, BLOCK_SIZE=sizes, mask_mod=mask_mod)


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def as_length(name: str, value: Any) -> int:
    """Return ``value`` as an int. Raise an error that names the argument unless it is 0 to MAX_LENGTH."""
    value = as_int(name, value)
    check_int(name, value, 0, MAX_LENGTH)
    return value


def block_sizes(value: Any) -> tuple[int, int]:
    """Return (queries, keys) of a block."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or any(type(one) is not int or one % 16 or not 16 <= one <= MAX_LENGTH for one in pair):
        raise ValueError(f"BLOCK_SIZE must be one or two multiples of 16 up to {MAX_LENGTH}, got {value!r}")
    return pair[0], pair[1]


def device_of_mask(given: Any, tensors: tuple[Tensor, ...]) -> torch.device:
    """Return the device on which a mask that captures these tensors is evaluated."""
    if given is None:
        given = tensors[0].device if tensors else "cpu"
    device = as_device("device", given)
    if device.type == "meta":
        raise ValueError("device must be None or a device with data, got meta")
    for tensor in tensors:
        if tensor.device.type != device.type:
            raise ValueError(f"mask_mod must read tensors on {device}, got a tensor on {tensor.device}")
    return device


def _any(seen: Tensor, blocks_q: int, blocks_kv: int, sizes: tuple[int, int]) -> Tensor:
    """Return (blocks_q, blocks_kv) bool: whether a block of ``seen`` (queries, keys) contains a True."""
    size_q, size_kv = (min(size, length) for size, length in zip(sizes, seen.shape, strict=True))
    missing = blocks_kv * size_kv - seen.shape[1], blocks_q * size_q - seen.shape[0]
    padded = torch.nn.functional.pad(seen, (0, missing[0], 0, missing[1]))
    return padded.view(blocks_q, size_q, blocks_kv, size_kv).any(3).any(1)


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (counts, indices) of the True blocks along the last dimension, both int32.

    ``indices`` has the shape of ``blocks``. The indices of the True blocks come first, in ascending order.
    """
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def listed(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Convert lists of a block mask to a bool tensor in the shape of ``indices``, True for listed blocks."""
    within = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    places = indices.long().clamp(0, max(indices.shape[-1] - 1, 0))
    counts = torch.zeros_like(indices).scatter_add_(-1, places, within.to(indices.dtype))
    return counts > 0


_of_flex: weakref.WeakKeyDictionary[Any, tuple[list, BlockMask]] = weakref.WeakKeyDictionary()
"""Maps a block mask of FlexAttention to (its attributes at the conversion, the converted block mask)."""


def of_flex_attention(block_mask: Any) -> BlockMask:
    """Convert FlexAttention's BlockMask to a :class:`BlockMask`. The result is cached until the mask changes.

    A :class:`BlockMask` is returned unchanged.

    FlexAttention's mask has no lists for the backward pass if it was made with ``compute_q_blocks=False``.
    They are then computed from the lists for the forward pass.

    Raises:
        TypeError: the argument is not a block mask.
    """
    if isinstance(block_mask, BlockMask):
        return block_mask
    try:
        attributes = [getattr(block_mask, name) for name in _NAMES]
    except AttributeError:
        raise TypeError(
            "block_mask must be made by flashtile.masks.create_block_mask or be FlexAttention's BlockMask, "
            f"got {type(block_mask).__name__}"
        ) from None
    keeps = not torch.compiler.is_dynamo_compiling()
    known = _of_flex.get(block_mask) if keeps else None
    if known is not None and all(map(operator.is_, known[0], attributes)):
        return known[1]
    lists = {name: getattr(block_mask, name) for name in LISTS}
    has_q_lists = lists["q_indices"] is not None
    for name in ("kv", "q") if has_q_lists else ("kv",):
        if lists[f"full_{name}_num_blocks"] is None:
            with torch.inference_mode(False):  # a mask first seen in inference mode may be used in training
                none = torch.zeros_like(lists[f"{name}_num_blocks"])
            lists[f"full_{name}_num_blocks"], lists[f"full_{name}_indices"] = none, lists[f"{name}_indices"]
            keeps = keeps and outlives_modes(none)
    if not has_q_lists:
        for full in ("", "full_"):
            blocks = listed(lists[f"{full}kv_num_blocks"], lists[f"{full}kv_indices"])
            lists[f"{full}q_num_blocks"], lists[f"{full}q_indices"] = _lists(blocks.mT)
    contiguous = {name: tensor.contiguous() for name, tensor in lists.items()}
    made = BlockMask(
        tuple(block_mask.seq_lengths),
        **contiguous,
        BLOCK_SIZE=tuple(block_mask.BLOCK_SIZE),
        mask_mod=as_mask_mod(block_mask.mask_mod),
    )
    # If a list was copied or computed, the result is not cached: it would miss later writes to the original.
    if keeps and has_q_lists and all(contiguous[name] is tensor for name, tensor in lists.items()):
        _of_flex[block_mask] = attributes, made
    return made
