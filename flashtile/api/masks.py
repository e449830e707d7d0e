"""Converts ``score_mod``, ``mask_mod`` and ``block_mask`` into the form that operators take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from flashtile.masks.block_mask import BlockMask, of_flex_attention
from flashtile.masks.mods import MaskMod, traced
from flashtile.masks.program import behind
from flashtile.masks.tracing import Trace
from flashtile.operators import functions as operators
from flashtile.operators.functions import Functions, SignedExtras
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.problems.masks import MAX_CAPTURED, MAX_SIZES

_EVERYTHING = (True,)
"""``Program.results`` of a mask function that hides nothing."""


def with_functions(
    q: Tensor,
    k: Tensor,
    extras: OptionalTensors,
    options: Options,
    score_mod: Any,
    mask_mod: Any,
    block_mask: Any,
) -> tuple[Any, Any]:
    """Return (extras, options) of a call with score or mask functions, or a block mask.

    ``check_with_functions`` has accepted the call.

    Raises:
        TypeError: a function does not compile, or ``block_mask`` is not a block mask.
        ValueError: ``mask_mod`` and ``block_mask`` are both given, too many tensors are captured, or q or k
            has more tokens than ``mask_mod`` is defined for.
    """
    has_limit = isinstance(mask_mod, MaskMod) and mask_mod.most_tokens is not None
    if has_limit and isinstance(q, Tensor) and isinstance(k, Tensor) and q.dim() == k.dim() == 4:
        mask_mod.check_lengths(q.shape[1], k.shape[1])
    given = functions(score_mod, mask_mod, block_mask)
    if given.captured and torch.compiler.is_compiling():
        # torch combines a 0-dim CPU tensor with tensors on any device, but kernels need it on q's device.
        captured = tuple([t if t.dim() else t.to(q.device) for t in given.captured])
        given = given._replace(captured=captured)
    if given.soft_cap and not options.softcap and extras.alibi_slopes is None:
        # The kernels have a faster path for soft-capping.
        given, options = given._replace(score_mod=""), options._replace(softcap=given.soft_cap)
    return operators.with_functions(extras, options, given)


_kept: weakref.WeakKeyDictionary[BlockMask, Functions] = weakref.WeakKeyDictionary()
"""The traced functions of each block mask. A call's score_mod is not part of the entry.

A call whose score_mod captures tensors does not use the cache.
"""


def functions(score_mod: Any, mask_mod: Any, block_mask: Any) -> Functions:
    """Trace the functions that are not None, and return them in the form that operators take."""
    blocks: BlockMask | None = None
    if block_mask is not None:
        if mask_mod is not None:
            raise ValueError(
                "mask_mod must be None with block_mask, which contains one, got a function: make the "
                "block mask of both, create_block_mask(mask_mod(a) & b, ...)"
            )
        blocks = of_flex_attention(block_mask)
        mask_mod = blocks.mask_mod
    score = None if score_mod is None else traced("score_mod", score_mod)
    mask = None if mask_mod is None else traced("mask_mod", mask_mod)
    captures = score is not None and score.tensors
    if blocks is None or captures or torch.compiler.is_dynamo_compiling():
        return _functions(score, mask, blocks)
    known = _kept.get(blocks)
    if known is None or known.mask is not mask:
        made = _functions(None, mask, blocks)
        known = _kept[blocks] = made._replace(extras=SignedExtras.of(made.captured, made.lists))
    if score is None:
        return known
    return known._replace(score_mod=score.text, soft_cap=score.soft_cap)


def _functions(score: Trace | None, mask: Trace | None, blocks: BlockMask | None) -> Functions:
    captured: tuple[Tensor, ...] = ()
    texts = {"score_mod": "", "mask_mod": ""}
    for kind, trace in (("score_mod", score), ("mask_mod", mask)):
        if trace is None or (kind == "mask_mod" and trace.program.results == _EVERYTHING):
            continue
        texts[kind] = behind(trace.text, len(captured)) if captured else trace.text
        captured += trace.tensors
        if captured and (len(captured) > MAX_CAPTURED or sum(t.dim() for t in captured) > MAX_SIZES):
            raise ValueError(
                f"{kind} must read at most {MAX_CAPTURED} tensors of {MAX_SIZES} dimensions together (with "
                f"the other function), got {len(captured)} of {sum(t.dim() for t in captured)}"
            )
    lists: tuple[Tensor, ...] = ()
    block_size = lengths = 0, 0
    if blocks is not None:
        lists, block_size, lengths = blocks.lists, blocks.BLOCK_SIZE, blocks.seq_lengths
    return Functions(
        captured,
        lists,
        texts["score_mod"],
        texts["mask_mod"],
        block_size,
        lengths,
        0.0 if score is None else score.soft_cap,
        mask,
    )
