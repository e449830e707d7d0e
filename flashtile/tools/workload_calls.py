"""The attention calls of training, recorded on fake tensors: nothing is computed, and no memory is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.compilation.calls import Call, calls_of
from flashtile.engine.config import ModelConfig
from flashtile.op.operation import remembering

SEQLENS = (128, 512, 1000, 1024, 2048, 4096, 8192, 16384)
"""Lengths of training sequences. Kernels are chosen by ranges of lengths. No tile size divides 1000."""
BATCHES = (1, 8)


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer: numbers of query and key heads, sizes, dtype, and the left window."""

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    window: int = -1

    def tensors(self, batch: int, seqlen: int) -> tuple[torch.Tensor, ...]:
        """Return q, k and v, which require gradients."""
        sizes = (
            (self.num_heads, self.head_dim), (self.num_heads_kv, self.head_dim),
            (self.num_heads_kv, self.head_dim_v),
        )  # fmt: skip
        dtype = getattr(torch, self.dtype)
        return tuple(torch.empty(batch, seqlen, *size, dtype=dtype, requires_grad=True) for size in sizes)


DOCUMENTED = tuple(
    Heads(16, heads_kv, head_dim, head_dim_v, dtype)
    for dtype in ("bfloat16", "float16")
    for head_dim, head_dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    for heads_kv in (16, 4)
)
"""Heads for which the presets of ``flashtile compile`` compile kernels."""


def training_calls(layers: Iterable[Heads], features: bool = False) -> list[Call]:
    """Return the attention calls of forward and backward passes, over dense batches and packed sequences.

    Args:
        layers: heads of the layers.
        features: whether to add calls with dropout, soft caps, ALiBi, windows, biases and predefined masks.
    """
    with remembering() as remembered, FakeTensorMode():
        for layer in layers:
            for batch, seqlen in product(BATCHES, SEQLENS):
                for arguments in _training_arguments(layer, batch, seqlen, features):
                    out = flashtile.attention(*layer.tensors(batch, seqlen), **arguments)
                    out.sum().backward()
                for arguments in _training_arguments(layer, batch, seqlen, features=False):
                    q, k, v = (tensor.flatten(0, 1) for tensor in layer.tensors(batch, seqlen))
                    packed = _packed(batch, seqlen)
                    flashtile.attention(q, k, v, **packed, **arguments).sum().backward()
    return calls_of(remembered)


def _packed(batch: int, seqlen: int) -> dict[str, Any]:
    """Return the arguments of a call with ``batch`` packed sequences of up to ``seqlen`` tokens.

    The offsets are all 0, because fake tensors have no values.
    """
    offsets = torch.zeros(batch + 1, dtype=torch.int32)
    return {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen,
    }  # fmt: skip


def _training_arguments(layer: Heads, batch: int, seqlen: int, features: bool) -> Iterator[dict[str, Any]]:
    yield {"causal": True, "window_size": (layer.window, -1)}
    yield {}
    if not features:
        return
    heads = layer.num_heads
    documents = torch.zeros(batch, seqlen, dtype=torch.int32)
    yield {"dropout_p": 0.1, "causal": True, "rng_state": torch.zeros(2, dtype=torch.int64)}
    yield {"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}
    yield {"softcap": 30.0, "causal": True}
    yield {"alibi_slopes": torch.zeros(heads), "causal": True}
    yield {"window_size": (256, 0)}
    yield {"bias": torch.zeros(1, heads, seqlen, seqlen, dtype=getattr(torch, layer.dtype))}
    yield {"mask_mod": flashtile.masks.document(documents), "causal": True}
    yield {"mask_mod": flashtile.masks.prefix_lm(64)}


def heads_of(config: ModelConfig) -> list[Heads]:
    """Return the heads of a model's layers.

    Layers with the same heads and window are listed once.
    """
    dtype = config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16"
    sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim
    return [Heads(*sizes, dtype, window) for window in dict.fromkeys(config.windows)]
