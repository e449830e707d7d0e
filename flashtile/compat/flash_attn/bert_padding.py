"""``flash_attn.bert_padding``: differentiable conversion between padded batches and packed tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.api.padding import pad, unpad
from flashtile.checks.arguments import check_dense, check_device, check_dtype, renaming
from flashtile.checks.values import check_between
from flashtile.op.operation import is_plain, reads_values
from flashtile.problems.common import DTYPES, WHOLE

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return ``input[indices]``: rows (total, ...) of input (rows, ...) at ``indices`` (total,)."""
    check_dense("input", input)
    check_dense("indices", indices)
    check_dtype("indices", indices, (torch.int32, torch.int64))
    check_device("indices", indices, input)
    if input.dim() < 1 or indices.dim() != 1:
        raise ValueError(
            f"indices must have shape (total,), for input of one dimension or more, "
            f"got {tuple(indices.shape)} and {tuple(input.shape)}"
        )
    if is_plain((indices,)) and reads_values(indices):
        check_between("indices", indices, 0, input.shape[0] - 1, "the last row of input")
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return (result of :func:`index_first_axis`, input)."""
    return index_first_axis(input, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return a tensor (first_axis_dim, ...) with ``values`` at ``indices`` and 0 elsewhere."""
    with renaming(tokens="values", seqlen="first_axis_dim"):
        return pad(values, indices, 1, first_axis_dim)[0]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of padded sequences.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), 1 for tokens, 0 for padding.
        unused_mask: (batch, seqlen), 1 for unused tokens, which are packed but not counted in seqused.

    Returns:
        (tokens (total, ...), indices (total,) into the flattened batch, cu_seqlens (batch + 1,) int32,
        max_seqlen, seqused (batch,) int32).
    """
    mask = attention_mask
    if unused_mask is not None:
        for name, given in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
            check_dense(name, given)
            check_dtype(name, given, (*WHOLE, *DTYPES))
            check_device(name, given, attention_mask)
        if unused_mask.shape != attention_mask.shape:
            raise ValueError(
                f"unused_mask must have the shape of attention_mask, {tuple(attention_mask.shape)}, "
                f"got {tuple(unused_mask.shape)}"
            )
        mask = attention_mask.bool() | unused_mask.bool()
    with renaming(padded="hidden_states", mask="attention_mask"):
        return *unpad(hidden_states, mask), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack the tokens of a batch whose rows hold several sequences each.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen) int. Each row lists the lengths of its sequences, followed
            by zeros.

    Returns:
        (tokens (total, ...), indices (total,) into the flattened batch, cu_seqlens (sequences + 1,) int32,
        max_seqlen).
    """
    check_dense("hidden_states", hidden_states)
    check_dense("attention_mask_in_length", attention_mask_in_length)
    check_device("attention_mask_in_length", attention_mask_in_length, hidden_states)
    check_dtype("attention_mask_in_length", attention_mask_in_length, WHOLE[1:])
    if attention_mask_in_length.dim() != 2:
        shape = tuple(attention_mask_in_length.shape)
        raise ValueError(f"attention_mask_in_length must have shape (batch, seqlen), got {shape}")
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    filled = attention_mask_in_length.sum(-1, keepdim=True)
    positions = torch.arange(attention_mask_in_length.shape[1], device=filled.device)
    with renaming(padded="hidden_states", mask="attention_mask_in_length"):
        tokens, indices, _, _ = unpad(hidden_states, positions < filled)
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return tokens, indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return a tensor (batch, seqlen, ...) with hidden_states (total, ...) at ``indices`` and 0 elsewhere."""
    with renaming(tokens="hidden_states"):
        return pad(hidden_states, indices, batch, seqlen)
