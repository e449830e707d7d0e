"""Padded batches: packs their tokens, recognises padding masks, and computes attention under them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.api.attention import attention
from flashtile.backends.common.device import is_capturing
from flashtile.checks.arguments import check_dense, check_device, check_dtype, check_int
from flashtile.checks.conversions import as_int
from flashtile.checks.values import check_between
from flashtile.op.operation import is_plain, reads_values
from flashtile.problems.common import DTYPES, MAX_LENGTH, WHOLE


class Packed(NamedTuple):
    """The tokens of a padded batch, one after the other."""

    tokens: Tensor
    indices: Tensor  # (total,) int64, positions in the flattened batch
    cu_seqlens: Tensor  # (batch + 1,) int32
    max_seqlen: int


def unpad(padded: Tensor, mask: Tensor) -> Packed:
    """Pack the tokens of ``padded`` (batch, seqlen, ...) for which ``mask`` (batch, seqlen) is true.

    Waits for the device, because the host needs the number of tokens.

    Examples:
        >>> from flashtile.api.padding import pad, unpad
        >>> padded = torch.randn(2, 5, 4, 64)  # (batch, seqlen, heads, head_dim)
        >>> mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
        >>> tokens, indices, cu_seqlens, max_seqlen = unpad(padded, mask)
        >>> tokens.shape, cu_seqlens, max_seqlen
        (torch.Size([7, 4, 64]), tensor([0, 5, 7], dtype=torch.int32), 5)
        >>> torch.equal(pad(tokens, indices, 2, 5)[1, :2], padded[1, :2])
        True
    """
    check_dense("padded", padded)
    check_dense("mask", mask)
    check_dtype("mask", mask, (*WHOLE, *DTYPES))
    if mask.dim() != 2 or padded.shape[:2] != mask.shape:
        raise ValueError(
            "mask must have shape (batch, seqlen), as padded (batch, seqlen, ...) begins, "
            f"got {tuple(mask.shape)} and {tuple(padded.shape)}"
        )
    if mask.device != padded.device:
        raise ValueError(f"mask is on {mask.device}, not on {padded.device}: all must be on one device")
    mask = mask.bool()
    lengths = mask.sum(1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    return Packed(padded.flatten(0, 1).index_select(0, indices), indices, cu_seqlens, longest)


def pad(tokens: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo :func:`unpad`: return (batch, seqlen, ...) with ``tokens`` at ``indices``, and 0 elsewhere.

    Examples:
        >>> flashtile.padding.pad(torch.tensor([5, 6, 7]), torch.tensor([0, 3, 4]), batch=2, seqlen=3)
        tensor([[5, 0, 0],
                [6, 7, 0]])
    """
    check_dense("tokens", tokens)
    check_dense("indices", indices)
    check_dtype("indices", indices, (torch.int64,))
    check_device("indices", indices, tokens)
    if tokens.dim() < 1 or tuple(indices.shape) != tuple(tokens.shape[:1]):
        raise ValueError(
            "indices must have shape (total,), as tokens (total, ...) begins, "
            f"got {tuple(indices.shape)} and {tuple(tokens.shape)}"
        )
    batch, seqlen = as_int("batch", batch), as_int("seqlen", seqlen)
    check_int("batch", batch, 0, MAX_LENGTH)
    check_int("seqlen", seqlen, 0, MAX_LENGTH)
    if is_plain((indices,)) and reads_values(indices):
        check_between("indices", indices, 0, batch * seqlen - 1, "the last position of the batch")
    if tokens.is_floating_point() and tokens.dtype.itemsize == 1:  # index_copy does not support FP8
        return pad(tokens.view(torch.uint8), indices, batch, seqlen).view(tokens.dtype)
    empty = tokens.new_zeros((batch * seqlen, *tokens.shape[1:]))
    return empty.index_copy(0, indices, tokens).unflatten(0, (batch, seqlen))


class MaskPattern(NamedTuple):
    """A boolean mask described by its valid keys and whether it is causal."""

    keys: Tensor | None  # (batch, seqlen_k) bool; None: all of them
    causal: bool  # aligned to the bottom right
    right_padded: bool  # the valid keys come first


def can_look(mask: Tensor) -> bool:
    """Whether the host may read a mask to choose how attention is computed.

    False in a compiled graph, under a dispatch mode or transform, for tensors without data, and during the
    capture of a CUDA graph.
    """
    if torch.compiler.is_compiling() or not is_plain((mask,)):
        return False
    return not is_capturing(mask.device)


def as_booleans(name: str, mask: Tensor) -> Tensor | None:
    """Convert a boolean or additive mask of scores to a bool mask that is True where a query sees a key.

    An additive mask is 0 where a query sees a key and -inf elsewhere. The result is None for other values, or
    if :func:`can_look` forbids reading them. Reading waits for the device.

    Raises:
        TypeError: the mask is neither bool nor of a float dtype that attention supports.
    """
    check_dtype(name, mask, (torch.bool, *DTYPES))
    if mask.dtype == torch.bool:
        return mask
    if not can_look(mask):
        return None
    taking_part = mask == 0
    return taking_part if bool((taking_part | (mask == -torch.inf)).all()) else None


def as_mask_or_bias(mask: Tensor) -> dict[str, Any]:
    """Return ``mask`` as a keyword argument of attention: ``mask`` if it is bool, otherwise ``bias``."""
    return {"mask" if mask.dtype == torch.bool else "bias": mask}


def recognise(mask: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> MaskPattern | None:
    """Recognise padding, a causal mask, or both in a boolean ``mask`` that is True where a query sees a key.

    A causal mask must be aligned to the bottom right. Without a causal mask, any keys may be padding. With a
    causal mask, padding must be as in :func:`pattern_of`. Returns None for other patterns, or if
    :func:`can_look` forbids reading the mask. Waits for the device.

    Args:
        mask: bool of up to 4 dimensions, broadcastable to (batch, heads, seqlen_q, seqlen_k).
    """
    if not can_look(mask):
        return None
    mask = mask[(None,) * (4 - mask.dim())].expand(batch, -1, seqlen_q, seqlen_k)
    one = mask[:, 0]
    keys = one.any(1)
    earlier = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=mask.device).tril(seqlen_k - seqlen_q)
    of_keys = keys[:, None]
    findings = (mask == mask[:, :1]).all(), (one == of_keys).all(), (one == (of_keys & earlier)).all()
    same_heads, padding, causal = torch.stack(findings).tolist()
    if not same_heads or not (padding or causal):
        return None
    return pattern_of(keys, not padding, seqlen_q)


def pattern_of(keys: Tensor, causal: bool, seqlen_q: int) -> MaskPattern | None:
    """Return the pattern of a padding mask (batch, seqlen_k) that is True for valid keys.

    With ``causal`` (aligned to the bottom right), padding must be on the left in all sequences, or on the
    right in all sequences. Padding on the right also requires seqlen_q == seqlen_k. Returns None for other
    padding, or if :func:`can_look` forbids reading the mask. Waits for the device.
    """
    if not can_look(keys):
        return None
    if not causal:
        return MaskPattern(None if bool(keys.all()) else keys, False, False)
    findings = keys.all(), (keys[:, 1:] >= keys[:, :-1]).all(), (keys[:, 1:] <= keys[:, :-1]).all()
    whole, last, first = torch.stack(findings).tolist()
    if whole:
        return MaskPattern(None, True, False)
    if last or (first and keys.shape[1] == seqlen_q):
        return MaskPattern(keys, True, not last)
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: MaskPattern, **options: Any) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of :func:`flashtile.attention` under a recognised mask, without work on padded keys.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim).
        options: arguments of :func:`flashtile.attention`, without its masks.
    """
    causal = pattern.causal
    if pattern.keys is None:
        result: Any = attention(q, k, v, causal=causal, return_lse=True, **options)
        return result
    packed = unpad(k, pattern.keys)
    packed_v = v.flatten(0, 1).index_select(0, packed.indices)
    everything = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    if not pattern.right_padded:
        # The last keys remain the last ones, so a causal mask stays aligned.
        parts = [(everything, causal)]
    else:
        # A query at the position of a valid key sees the keys up to its own. Later queries see every key.
        parts = [(pattern.keys, True), (~pattern.keys, False)]
    out: Any = 0
    lse: Any = 0
    for rows, causal in parts:
        of_q = unpad(q, rows)
        part, part_lse = attention(
            of_q.tokens, packed.tokens, packed_v, cu_seqlens_q=of_q.cu_seqlens,
            cu_seqlens_k=packed.cu_seqlens, max_seqlen_q=of_q.max_seqlen, max_seqlen_k=packed.max_seqlen,
            causal=causal, return_lse=True, **options,
        )  # fmt: skip
        part, part_lse = (pad(t, of_q.indices, *q.shape[:2]) for t in (part, part_lse.T))
        out, lse = out + part, lse + part_lse
    return out, lse.transpose(1, 2)
