"""The calls of training and serving, recorded on fake tensors, which need no memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import flashtile
from flashtile.checks.arguments import check_choice
from flashtile.compilation.calls import Call, calls_of
from flashtile.compilation.compiling import Source
from flashtile.engine.config import ModelConfig, model_folder, parse_config, read_config, read_json
from flashtile.engine.step_calls import Limits, step_calls
from flashtile.files import as_path
from flashtile.op.operation import remembering
from flashtile.torch_private import FakeTensorMode

PURPOSES = ("training", "serving", "both")
"""Purposes for which the kernels of a model are compiled."""

SHAPES = (
    (1, 16), (16, 16), (64, 32), (1, 64), (64, 64), (16, 128), (3, 197), (1, 333), (4, 333), (4, 384),
    (1, 512), (1, 640), (3, 1000), (1, 1024), (2, 1024), (2, 1500), (1, 2048), (1, 3000), (1, 4096),
    (2, 5000), (1, 8192), (8, 8192), (1, 12000),
)  # fmt: skip
"""(batch, seqlen) of training sequences. Kernels are chosen by ranges of lengths, and by how well the work
tiles of a call fill the card. Few of these lengths are multiples of tile sizes."""
FEATURE_SHAPES = (
    (1, 100), (16, 128), (3, 197), (1, 512), (1, 1000), (8, 1000), (1, 1024), (8, 1024), (1, 2048), (8, 2048),
    (1, 3000), (1, 4096), (8, 4096), (1, 8192),
)  # fmt: skip
"""(batch, seqlen) of the calls with other features than causal masks and packed sequences."""
WINDOWS = (127, 256, 1023, 4095)
"""Left windows. Kernels for windows of up to 128 keys differ from those for wider ones; 4095 is Mistral's."""
DECODING_WINDOWS = (127, 511, 1023, 4095)
"""Left windows of decoding: the number of splits, and so the kernel that combines them, follows from them."""
CACHES = ((1, 1024), (8, 1024), (64, 1024), (1, 8192), (8, 8192))
"""(batch, length) of the KV caches of decoding."""
PAGE_SIZES = (16, 256)
"""Tokens of a page: vLLM's default, for all features, and the fewest that FlashAttention takes."""


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer: their numbers, sizes and dtype, and what every call of the layer has.

    Attributes:
        window: how many earlier keys a query sees, -1 for all.
        softcap: soft cap of the scores, 0 for none.
        has_sink: whether each head has a learned sink.
    """

    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    window: int = -1
    softcap: float = 0.0
    has_sink: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a causal call."""
        sink = None
        if self.has_sink:
            sink = torch.zeros(
                self.num_heads, dtype=getattr(torch, self.dtype), requires_grad=True, device="cpu"
            )
        return {"causal": True, "window_size": (self.window, -1), "softcap": self.softcap, "sink": sink}

    def tensors(self, batch: int, seqlen: int) -> tuple[torch.Tensor, ...]:
        """Return q, k and v, which require gradients."""
        sizes = (
            (self.num_heads, self.head_dim), (self.num_heads_kv, self.head_dim),
            (self.num_heads_kv, self.head_dim_v),
        )  # fmt: skip
        dtype = getattr(torch, self.dtype)
        return tuple(
            torch.empty(batch, seqlen, *size, dtype=dtype, requires_grad=True, device="cpu") for size in sizes
        )


TRAINING_HEADS = ((16, 16), (16, 4))
"""(query heads, key heads). Kernels of training do not depend on the number of query heads per key head if it
exceeds 1."""
CACHE_HEADS = (*TRAINING_HEADS, (16, 2), (32, 8))
"""(query heads, key heads). Kernels of decoding depend on the key heads and on the query heads of each."""


def documented(heads: Iterable[tuple[int, int]]) -> list[Heads]:
    """Return the heads for which the presets of ``flashtile compile`` compile kernels.

    Args:
        heads: (query heads, key heads) of layers.
    """
    return [
        Heads(num_heads, num_heads_kv, head_dim, head_dim_v, dtype)
        for dtype in ("bfloat16", "float16")
        for head_dim, head_dim_v in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
        for num_heads, num_heads_kv in heads
    ]


def training_calls(layers: Iterable[Heads], features: bool = False) -> list[Call]:
    """Return the attention calls of forward and backward passes, over dense batches and packed sequences.

    Args:
        layers: heads of the layers.
        features: whether to add calls with each other feature: dropout, soft caps, ALiBi, windows, chunks,
            deterministic gradients, sinks, biases, boolean masks, predefined mask functions, block masks,
            FP8, attention weights. ``masks.relative_position`` is left out: its largest distance is compiled
            into its kernels, so they would serve few tables.
    """
    with remembering() as remembered, FakeTensorMode():
        for layer in layers:
            plain: tuple[dict[str, Any], ...] = (layer.arguments(), {})
            for batch, seqlen in SHAPES:
                for arguments in plain:
                    tensors = layer.tensors(batch, seqlen)
                    flashtile.attention(*tensors, **arguments).sum().backward()
                    packed = _packed(batch, seqlen) | arguments
                    flashtile.attention(*(t.flatten(0, 1) for t in tensors), **packed).sum().backward()
            for batch, seqlen in FEATURE_SHAPES if features else ():
                for arguments in _features(layer, batch, seqlen):
                    flashtile.attention(*layer.tensors(batch, seqlen), **arguments).sum().backward()
                _forward_only(layer, batch, seqlen)
    return calls_of(remembered)


def _packed(batch: int, seqlen: int) -> dict[str, Any]:
    """Return the arguments of a call with packed sequences. Offsets are 0: fake tensors have no values."""
    offsets = torch.zeros(batch + 1, dtype=torch.int32, device="cpu")
    return {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen,
    }  # fmt: skip


def _features(layer: Heads, batch: int, seqlen: int) -> Iterator[dict[str, Any]]:
    """Yield the arguments of calls with one feature each, except for causal masks and packed sequences."""
    heads, dtype = layer.num_heads, getattr(torch, layer.dtype)
    rng_state = torch.zeros(2, dtype=torch.int64, device="cpu")
    lengths = torch.zeros(batch, dtype=torch.int32, device="cpu")
    ids = torch.zeros(batch, seqlen, dtype=torch.int32, device="cpu")
    document = flashtile.masks.document(ids)
    for causal in (True, False):
        yield {"dropout_p": 0.1, "causal": causal, "rng_state": rng_state}
        yield {"deterministic": True, "causal": causal}
        yield {"sink": torch.zeros(heads, dtype=dtype, requires_grad=True, device="cpu"), "causal": causal}
        for learned in (False, True):
            bias = torch.zeros(1, heads, seqlen, seqlen, dtype=dtype, requires_grad=learned, device="cpu")
            yield {"bias": bias, "causal": causal}
        yield {
            "key_padding_mask": torch.ones(batch, seqlen, dtype=torch.bool, device="cpu"),
            "causal": causal,
        }
        yield {"mask_mod": document, "causal": causal}
    yield {"softcap": 30.0, "causal": True}
    yield {"alibi_slopes": torch.zeros(heads, device="cpu"), "causal": True}
    for left in WINDOWS:
        yield {"window_size": (left, 0)}
    yield {"attention_chunk": 512, "causal": True}
    yield {"mask": torch.ones(batch, 1, seqlen, seqlen, dtype=torch.bool, device="cpu")}
    yield {"mask_mod": flashtile.masks.padding(lengths)}
    yield {"mask_mod": flashtile.masks.prefix_lm(lengths)}
    own = flashtile.masks.document(ids[0]) & flashtile.masks.causal()
    yield {"block_mask": _block_mask(own, seqlen)}
    if batch == 1:
        yield {"block_mask": flashtile.masks.create_tree_mask(ids[0, :3], ids[0, :2], seqlen)}


def _forward_only(layer: Heads, batch: int, seqlen: int) -> None:
    """Call attention in FP8, and attention weights."""
    q, k, v = (tensor.detach() for tensor in layer.tensors(batch, seqlen))
    lse = torch.zeros(batch, layer.num_heads, seqlen, device="cpu")
    for causal in (True, False):
        flashtile.fp8.attention(q, k, v, causal=causal)
        for form in ("full", "columns"):
            flashtile.attention_weights(q, k, lse, form, causal=causal)


def _block_mask(mask_mod: flashtile.masks.MaskMod, seqlen: int) -> flashtile.masks.BlockMask:
    """Return a block mask for fake tensors, which have no values from which its lists could be made."""
    blocks = -(-seqlen // 128)
    lists = (
        torch.zeros(1, 1, blocks, dtype=torch.int32, device="cpu"),
        torch.zeros(1, 1, blocks, blocks, dtype=torch.int32, device="cpu"),
    )
    return flashtile.masks.BlockMask((seqlen, seqlen), *4 * lists, BLOCK_SIZE=(128, 128), mask_mod=mask_mod)


def decoding_calls(layers: Iterable[Heads], features: bool = False) -> list[Call]:
    """Return the calls that append one token, or a chunk of a prompt, to KV caches and attend to them.

    Args:
        layers: heads of the layers.
        features: whether to add rotary embedding and copies of pages. For one token, caches in pages and
            fewer key heads than query heads, also windows, soft caps, sinks and caches in e4m3.
    """
    page = PAGE_SIZES[0]
    with remembering() as remembered, FakeTensorMode():
        for layer, (batch, length) in product(layers, CACHES):
            for tokens, page_size in product((1, 512), (0, *PAGE_SIZES)):
                _decode(layer, batch, length, tokens, page_size)
                if features and page_size in (0, page):
                    _decode(layer, batch, length, tokens, page_size, **_rotary(layer, length))
            if features and layer.num_heads_kv < layer.num_heads:
                _decode(layer, batch, length, 1, page, torch.float8_e4m3fn)
                _decode(layer, batch, length, 1, page, softcap=30.0)
                _decode(layer, batch, length, 1, page, sink=torch.zeros(layer.num_heads, device="cpu"))
                for left in DECODING_WINDOWS:
                    _decode(layer, batch, length, 1, page, window_size=(left, 0))
            for pairs in (1, 64) if features else ():
                flashtile.copy_blocks(
                    *_caches(layer, 64, page), torch.zeros(pairs, 2, dtype=torch.int64, device="cpu")
                )
    return calls_of(remembered)


def _decode(
    layer: Heads,
    batch: int,
    length: int,
    tokens: int,
    page_size: int,
    cache_dtype: torch.dtype | None = None,
    **arguments: Any,
) -> None:
    """Append tokens to KV caches of a length and attend to them. With ``page_size`` 0, caches are dense."""
    q, k, v = (tensor.detach() for tensor in layer.tensors(batch, tokens))
    pages = length // max(page_size, 1)
    shape = (batch * pages, page_size) if page_size else (batch, length)
    k_cache, v_cache = (cache.to(cache_dtype or q.dtype) for cache in _caches(layer, *shape))
    table = torch.zeros(batch, pages, dtype=torch.int32, device="cpu") if page_size else None
    lengths = torch.zeros(batch, dtype=torch.int32, device="cpu")
    flashtile.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, block_table=table, **arguments
    )


def _caches(layer: Heads, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches of keys and of values, whose first dimensions are ``shape``."""
    dtype, heads = getattr(torch, layer.dtype), layer.num_heads_kv
    keys = torch.empty(*shape, heads, layer.head_dim, dtype=dtype, device="cpu")
    return keys, torch.empty(*shape, heads, layer.head_dim_v, dtype=dtype, device="cpu")


def _rotary(layer: Heads, length: int) -> dict[str, Any]:
    """Return the arguments of calls with rotary embedding, in Llama's layout."""
    angles = torch.zeros(length, layer.head_dim // 2, dtype=getattr(torch, layer.dtype), device="cpu")
    return {"rotary_cos": angles, "rotary_sin": angles, "rotary_interleaved": False}


def heads_of(config: ModelConfig) -> list[Heads]:
    """Return the heads of a model's layers, equal layers once."""
    dtype = config.dtype if config.dtype in ("bfloat16", "float16") else "bfloat16"
    sizes = config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim
    every = config.attn_softcap, config.family.sinks
    return [Heads(*sizes, dtype, window, *every) for window in dict.fromkeys(config.windows)]


def read_model(path: str | os.PathLike[str]) -> ModelConfig:
    """Read the config of a model: a folder, a file such as config.json, or a name in Hugging Face's cache.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: a field of the config is absent, of the wrong type or out of range.
        NotImplementedError: the model is not supported.
    """
    found = as_path(path, "model")
    if found.is_file():
        return parse_config(read_json(found), str(found))
    return read_config(model_folder(found))


def model_calls(config: ModelConfig, purpose: str = "both") -> list[Source]:
    """Return the calls of a model.

    Args:
        config: the model.
        purpose: "training": attention in both passes. "serving": all steps of the engine with its default
            settings. "both".
    """
    check_choice("purpose", purpose, PURPOSES)
    found: list[Source] = []
    if purpose != "serving":
        found += training_calls(heads_of(config))
    if purpose != "training":
        found += step_calls(config, Limits(config.max_position_embeddings))
    return found
