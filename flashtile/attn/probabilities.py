"""FlashAttention-2's ``S_dmask``, for tests: probabilities whose sign says what dropout dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtile import dropout, reference
from flashtile.attn.problem import Extras, Options


def signed_probabilities(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Tensor:
    """(batch, heads_q, seqlen_q, seqlen_k) in q's dtype: the softmax, negative where dropout dropped it.

    For debugging: it takes memory of that size. Packed sequences are padded with zeros to the longest.
    """
    found: list[Tensor] = []

    def look(probabilities: Tensor) -> Tensor:
        found.append(probabilities)
        return probabilities

    assert extras.rng_state is not None
    with torch.no_grad():
        reference.attention(
            q, k, v, **extras._replace(rng_state=None)._asdict(), max_seqlen_q=options.max_seqlen_q,
            max_seqlen_k=options.max_seqlen_k, softmax_scale=options.softmax_scale, causal=options.causal,
            window_size=(options.window_left, options.window_right), softcap=options.softcap, round_p=look,
        )  # fmt: skip
        heads = q.shape[-2]
        if extras.cu_seqlens_q is None:
            shape = (q.shape[0], heads, q.shape[1], k.shape[1])
        else:
            shape = (len(found), heads, options.max_seqlen_q or 0, options.max_seqlen_k or 0)
        signed = q.new_zeros(shape)
        for b, one in enumerate(found):
            one = one if extras.sink is None else one[..., :-1]
            own = signed if len(found) == 1 and one.shape[0] == shape[0] else signed[b : b + 1]
            own[:, :, : one.shape[2], : one.shape[3]] = one
        mask = dropout.kept(extras.rng_state, options.dropout_p, heads, *map(range, shape))
    return torch.where(mask, signed, -signed)
