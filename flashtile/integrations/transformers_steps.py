"""Fast path for decoding steps in Transformers (one query per sequence), whose time is dominated by the host.

The layers of a step call attention with tensors of equal shapes and strides. The first layer takes the
general path. The others look up the first layer's launch by the arguments that Transformers passes. They pass
these tensors to the launch without a transpose, because a compiled kernel needs only addresses, which a
transpose does not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtile.caches import BoundedCache
from flashtile.op.operation import CACHE_BYTES, SIGNATURE_BYTES, is_plain, signatures
from flashtile.operators.decode import DECODE
from flashtile.problems.decode import DecodeOptions

_launches: BoundedCache = BoundedCache(CACHE_BYTES)
"""Maps the key of :func:`kind_of_step` to (launch, shape of out)."""


def kind_of_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    others: dict[str, Any],
) -> tuple | None:
    """Return the key of the launch of a step without a mask, or None for a step that needs the general path.

    The arguments are those of Transformers' attention: query (batch, heads, 1, head_dim), key and value
    (batch, heads_kv, keys, head_dim). ``others`` has the flag ``output_attentions``.
    """
    given, positions = others.get, others.get("position_ids")
    if (
        not is_plain((query, key, value))
        or type(scaling) is not float
        or torch.is_grad_enabled()
        or torch._C._is_any_autocast_enabled()
        or dropout
        or s_aux is not None
        or given("output_attentions")
        or given("position_bias") is not None
        or given("cache") is not None
        or given("cu_seq_lens_q") is not None
        or (positions is not None and positions.shape[-1] != 1)
    ):
        return None
    return (scaling, sliding_window, softcap, *signatures((query, key, value)))


def attend_by(kind: tuple, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Compute out (batch, 1, heads, head_dim) by an earlier layer's launch. Return None if there is none."""
    known = _launches.get(kind)
    if known is None:
        return None
    launch, shape = known
    out = query.new_empty(*shape)
    launch(query, key, value, DECODE.nothing, out)
    return out


def remember(kind: tuple, q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions, out: Tensor) -> None:
    """Store the launch that computed ``out``, for the following layers.

    q, k, v and out are (batch, tokens, heads, head_dim).
    """
    launch: Any = DECODE.launches.get((options, *signatures((q, k, v))))
    if getattr(launch, "takes_addresses", False):
        _launches.store(kind, (launch, tuple(out.shape)), SIGNATURE_BYTES)
