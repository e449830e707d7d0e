"""Attention probabilities from standard attention, for tests.

Also FlashAttention-2's ``S_dmask``, whose sign says which probabilities dropout dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile import dropout
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.reference import attention as reference


def probabilities(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """Return the probabilities before dropout, (batch, heads_q, seqlen_q, seqlen_k).

    Their dtype is the argument ``upcast`` if it is given, otherwise that of q. The memory grows with
    seqlen_q * seqlen_k. The probabilities of packed sequences are padded with zeros to the longest sequence.
    ``arguments`` are those of :func:`flashtile.reference.attention.attention`.
    """
    found: list[Tensor] = []

    def look(one: Tensor) -> Tensor:
        found.append(one)
        return one

    with torch.no_grad():
        reference.attention(q, k, v, **arguments, round_p=look)
    if arguments.get("cu_seqlens_q") is None:
        shape = (q.shape[0], q.shape[-2], q.shape[1], k.shape[1])
    else:
        lengths = arguments["max_seqlen_q"] or 0, arguments["max_seqlen_k"] or 0
        shape = (len(found), q.shape[-2], *lengths)
    padded = q.new_zeros(shape, dtype=arguments.get("upcast") or q.dtype)
    for b, one in enumerate(found):
        one = one if arguments.get("sink") is None else one[..., :-1]
        own = padded if len(found) == 1 and one.shape[0] == shape[0] else padded[b : b + 1]
        own[:, :, : one.shape[2], : one.shape[3]] = one
    return padded


def signed_probabilities(
    q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors, options: Options
) -> Tensor:
    """Return :func:`probabilities` in float32 or wider, with a minus sign where dropout dropped them."""
    assert extras.rng_state is not None
    found = probabilities(
        q, k, v, **extras._replace(rng_state=None)._asdict(), **options.masking.arguments(),
        max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k,
        softmax_scale=options.softmax_scale, softcap=options.softcap,
        upcast=torch.promote_types(q.dtype, torch.float32),
    )  # fmt: skip
    with torch.no_grad():
        shape = found.shape
        mask = dropout.kept(extras.rng_state, options.dropout_p, q.shape[-2], *map(range, shape))
        return torch.where(mask, found, -found)
