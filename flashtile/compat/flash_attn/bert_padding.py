"""``flash_attn.bert_padding``: between padded batches and packed tokens. All of it is differentiable."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.api.padding import pad, unpad

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``."""
    return input.index_select(0, indices)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``input[indices]`` and input itself."""
    return input.index_select(0, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with ``values`` at ``indices`` and 0 elsewhere."""
    return pad(values, indices, 1, first_axis_dim)[0]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """(tokens, indices, cu_seqlens, max_seqlen, seqused) of hidden_states (batch, seqlen, ...).

    Args:
        attention_mask: (batch, seqlen), 1 where there is a token.
        unused_mask: likewise, 1 where there is memory for a token that is not used: it is among the tokens,
            but not counted in seqused.
    """
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    return *unpad(hidden_states, mask), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(tokens, indices, cu_seqlens, max_seqlen) where a row of the batch holds several sequences.

    Args:
        attention_mask_in_length: (batch, seqlen) int: a row has the lengths of its sequences, then zeros.
    """
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    filled = attention_mask_in_length.sum(-1, keepdim=True)
    positions = torch.arange(attention_mask_in_length.shape[1], device=filled.device)
    tokens, indices, _, _ = unpad(hidden_states, positions < filled)
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return tokens, indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) with the tokens at ``indices`` and 0 elsewhere."""
    return pad(hidden_states, indices, batch, seqlen)
