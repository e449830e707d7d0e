"""Floating-point operations, counted as torch counts those of its own attention, for ``FlopCounterMode``.

Every pair of a query and a key counts, even if a mask hides it. Lengths are read from the device, which
synchronises, as torch's own count does. Sequences of fake tensors are assumed to have the maximum length.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


def forward_flops(scores: int, num_heads_q: int, head_dim: int, head_dim_v: int) -> int:
    """Count the operations of Q K^T and P V, for ``scores`` pairs of a query and a key."""
    return 2 * scores * num_heads_q * (head_dim + head_dim_v)


def backward_flops(scores: int, num_heads_q: int, head_dim: int, head_dim_v: int) -> int:
    """Count the operations of Q K^T (recomputed), dO V^T, P^T dO, dS K and dS^T Q."""
    return 2 * scores * num_heads_q * (3 * head_dim + 2 * head_dim_v)


def count_scores(
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    seqlen_k: int,
    cu_seqlens_k: Tensor | None,
    max_seqlen_k: int | None,
) -> int:
    """Count the query-key pairs within each sequence, over all sequences; ``seqlen_k`` is for a dense k."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return q.shape[0] * q.shape[1] * seqlen_k
    lengths = lengths_of(cu_seqlens_q, max_seqlen_q or 0), lengths_of(cu_seqlens_k, max_seqlen_k or 0)
    return sum(rows * keys for rows, keys in zip(*lengths, strict=True))


def lengths_of(cu_seqlens: Tensor, longest: int) -> list[int]:
    if not has_data(cu_seqlens):
        return [longest] * (cu_seqlens.shape[0] - 1)
    return cu_seqlens.diff().tolist()


def has_data(tensor: Tensor) -> bool:
    return not isinstance(tensor, (FakeTensor, FunctionalTensor)) and not tensor.is_meta
