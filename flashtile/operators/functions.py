"""Attention with score and mask functions: the arguments of its operations, and checks of their values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtile.checks.attention import check_learned_slopes
from flashtile.checks.values import check_block_lists, check_lengths
from flashtile.op.operation import PLAIN_TYPES, signatures
from flashtile.problems.attention import (
    NO_EXTRAS,
    ModifiedExtras,
    ModifiedOptions,
    OptionalTensors,
    Options,
    captured_tensors,
    learned_of,
)
from flashtile.problems.masks import BACKWARD_LISTS, CAPTURED, LISTS, MAX_CAPTURED

if TYPE_CHECKING:  # `import flashtile` does not import masks, because few programs use them
    from flashtile.masks.tracing import Trace

_NOT_CAPTURED, _NO_LISTS = (None,) * MAX_CAPTURED, (None,) * len(LISTS)


class SignedExtras(ModifiedExtras):
    """Extras that are built once for many calls: captured tensors and a block mask's lists.

    The tensors are as those of a plain call (:func:`flashtile.op.operation.is_plain`). The signature of the
    lists that the forward pass reads is computed again only if their addresses change.
    """

    captured: tuple[Tensor, ...]
    lists: tuple[Tensor, ...]
    """Lists that the forward pass reads."""
    of_forward: SignedExtras
    """Extras for a call that needs no backward pass, without the lists that only that pass reads."""
    signed: tuple[list[int], str] = ([], "")
    """Addresses of the lists, and their signature as a string, because Python caches a string's hash."""

    @classmethod
    def of(cls, captured: tuple[Tensor, ...], lists: tuple[Tensor, ...]) -> SignedExtras | None:
        """Return the extras; None if a call with these tensors is not plain."""
        if any(type(tensor) not in PLAIN_TYPES or tensor.is_neg() for tensor in (*captured, *lists)):
            return None
        own, read = (*NO_EXTRAS, *captured, *_NOT_CAPTURED[len(captured) :]), lists[:-BACKWARD_LISTS]
        made = tuple.__new__(cls, (*own, *lists))
        made.of_forward = tuple.__new__(cls, (*own, *read, *_NO_LISTS[:BACKWARD_LISTS]))
        for extras in (made, made.of_forward):
            extras.captured, extras.lists = captured, read
        return made

    _make = ModifiedExtras._make  # a copy with other tensors is not signed

    def signature(self) -> tuple:
        addresses = [tensor.data_ptr() for tensor in self.lists]
        at, text = self.signed
        if at != addresses:
            text = str(signatures(self.lists))
            self.signed = addresses, text
        return (text, *signatures(self.captured)) if self.captured else (text,)


class Functions(NamedTuple):
    """The traced form of ``score_mod``, ``mask_mod`` and ``block_mask``."""

    captured: tuple[Tensor, ...]
    lists: tuple[Tensor, ...]
    """Lists of the block mask; () if there is no block mask."""
    score_mod: str
    mask_mod: str
    block_size: tuple[int, int]
    lengths: tuple[int, int]
    """Numbers of queries and keys that the block mask was made for."""
    soft_cap: float
    """The soft cap, if ``score_mod`` is only a soft cap."""
    mask: Trace | None
    """The trace whose text is ``mask_mod``."""
    extras: SignedExtras | None = None
    """Extras of a call whose only optional arguments are functions, cached for the next such call."""


def learning_slopes(q: Tensor, k: Tensor, extras: Any, options: Any) -> tuple[Any, Any]:
    """Return (extras, options) of a backward pass that computes the gradient of ``alibi_slopes``.

    ALiBi becomes a program in front of the ``score_mod``, and the slopes become the last captured tensor.
    """
    from flashtile.masks.program import alibi, composed, parse

    check_learned_slopes(extras, options)
    captured, slopes = captured_tensors(extras), extras.alibi_slopes
    program = alibi(len(captured), int(k.shape[1] - q.shape[1]), slopes.dim() == 2)
    if getattr(options, "score_mod", ""):
        program = composed(program, parse(options.score_mod))
    further = ModifiedExtras(*extras)._replace(
        alibi_slopes=None, **dict(zip(CAPTURED, (*captured, slopes), strict=False))
    )
    learned = getattr(options, "learned", 0) | 1 << len(captured)
    return further, ModifiedOptions(*options)._replace(score_mod=str(program), learned=learned)


def index_of_slopes(options: Any) -> int:
    """Return the index of the slopes among the captured tensors of the call of :func:`learning_slopes`."""
    return learned_of(options)[-1]


def pack(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Concatenate the gradients of captured tensors to one vector; return None if there are none.

    The operator returns this vector, because it must have the same number of results in every call, and
    because vmap accepts only tensors as results.
    """
    given = [gradient.flatten() for gradient in gradients if gradient is not None]
    return torch.cat(given) if given else None


def unpack(packed: Tensor | None, extras: Any, options: Any) -> dict[str, Tensor | None]:
    """Split the vector of :func:`pack` into the gradients of captured tensors, and return them by name."""
    names = [CAPTURED[i] for i in learned_of(options)]
    if packed is None or not names:
        return dict.fromkeys(names)
    tensors = [getattr(extras, name) for name in names]
    parts = packed.split([tensor.numel() for tensor in tensors])
    return {n: p.reshape(t.shape).to(t.dtype) for n, p, t in zip(names, parts, tensors, strict=True)}


def check_values(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> None:
    """Raise if offsets or block lists are inconsistent, or if a function reads outside of a captured tensor.

    A captured tensor is one that ``score_mod`` or ``mask_mod`` indexes. The indices are checked here only on
    GPUs, because the CPU backend checks them while it computes.
    """
    if not isinstance(extras, ModifiedExtras):
        check_lengths(q, k, v, extras, options)
        return
    if options.block_q:
        by_queries = check_block_lists("kv", tuple(getattr(extras, name) for name in LISTS[:4]))
        if extras.q_indices is not None:
            by_keys = check_block_lists("q", tuple(getattr(extras, name) for name in LISTS[4:]))
            if not torch.equal(by_queries.mT, by_keys):
                raise ValueError(
                    "block_mask.q_indices and full_q_indices must name the blocks that kv_indices and "
                    "full_kv_indices name, got others"
                )
    if not q.is_cuda:
        return
    from flashtile.masks.evaluate import evaluate
    from flashtile.masks.program import parse

    captured = captured_tensors(extras)
    batch, heads, rows, keys = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    for kind, text in (("score_mod", options.score_mod), ("mask_mod", options.mask_mod)):
        if not text:
            continue
        for first in range(0, rows, 256):
            inputs = {
                "score": q.new_zeros((), dtype=torch.float32),
                "b": torch.arange(batch, device=q.device)[:, None, None, None],
                "h": torch.arange(heads, device=q.device)[:, None, None],
                "q": torch.arange(first, min(first + 256, rows), device=q.device)[:, None],
                "kv": torch.arange(keys, device=q.device),
            }
            evaluate(parse(text), inputs, captured, kind=kind, check=True)


def with_functions(extras: OptionalTensors, options: Options, functions: Functions) -> tuple[Any, Any]:
    """Return (extras, options) of a call with score or mask functions: all tensors, and all options."""
    captured, lists, score_mod, mask_mod, block_size, lengths, *_ = functions
    learned = 0
    if captured and torch.is_grad_enabled():
        learned = sum(1 << i for i, t in enumerate(captured) if t.requires_grad and t.is_floating_point())
    modified = ModifiedOptions._make((*options, score_mod, mask_mod, learned, *block_size, *lengths))
    if functions.extras is not None and extras is NO_EXTRAS:
        return functions.extras, modified
    tensors = *extras, *captured, *_NOT_CAPTURED[len(captured) :], *(lists or _NO_LISTS)
    return ModifiedExtras._make(tensors), modified


def without_backward_lists(extras: Any) -> Any:
    """Return the extras without those lists of the block mask that only the backward pass reads."""
    if type(extras) is SignedExtras:
        return extras.of_forward
    if extras.kv_num_blocks is None:
        return extras
    return ModifiedExtras._make((*extras[:-BACKWARD_LISTS], *_NO_LISTS[:BACKWARD_LISTS]))
