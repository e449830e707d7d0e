"""Torch's default device and default dtype change no result."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

import flashtile
from flashtile import masks
from flashtile.kv_cache import PagedKVCache
from walk import walk

ROOT = Path(flashtile.__file__).parent
FACTORIES = {constructor.__name__ for constructor in _device_constructors()}
"""Functions of torch whose results are on the default device."""


def sources():
    """The modules that make tensors, parsed."""
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if "torch." in text:
            yield path.relative_to(ROOT), ast.parse(text)


def test_new_tensors_name_their_device():
    without = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in FACTORIES and ast.unparse(node.func.value) == "torch"
        if not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert without == []


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


def rand(*shape):
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") - 0.5


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cpu")


Q, K, V = rand(2, 9, 4, 16), rand(2, 12, 2, 16), rand(2, 12, 2, 16)
SQUARE = rand(2, 40, 4, 16), rand(2, 40, 2, 16), rand(2, 40, 2, 16)
HALF = [tensor.bfloat16() for tensor in (Q, K, V)]
TABLE, IDS = rand(4), torch.arange(40) // 7
SINK, SLOPES, LENGTHS = rand(4), rand(4).abs(), int32(3, 9)
OFFSETS = {
    "cu_seqlens_q": int32(0, 4, 9),
    "cu_seqlens_k": int32(0, 3, 12),
    "max_seqlen_q": 5,
    "max_seqlen_k": 9,
}
STATE = torch.tensor([5, 7])
PAGES = rand(6, 16, 2, 16), rand(6, 16, 2, 16)
TABLE_OF_PAGES = int32(0, 1, 2, 0, 4, 5).view(2, 3)
CAUSAL_BLOCKS = masks.create_block_mask(
    masks.document(IDS) & masks.causal(), None, None, 40, 40, BLOCK_SIZE=16
)
PARTS = rand(3, 2, 9, 4, 16), rand(3, 2, 9, 4)


def attend(*tensors, **arguments):
    """Out, lse and gradients of a call."""
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]
    out, lse = flashtile.attention(*tensors, **arguments, return_lse=True)
    return out, lse, *torch.autograd.grad(out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum(), tensors)


def decode(**arguments):
    return flashtile.flash_attn_with_kvcache(Q, K.clone(), V.clone(), return_softmax_lse=True, **arguments)


def paged(**arguments):
    return flashtile.flash_attn_with_kvcache(
        Q, *(cache.clone() for cache in PAGES), cache_seqlens=LENGTHS, block_table=TABLE_OF_PAGES, **arguments
    )


def cached_pages():
    cache = PagedKVCache(
        num_layers=1, num_blocks=8, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32,
        device="cpu", max_sequences=4, max_seqlen=64,
    )  # fmt: skip
    batch = cache.batch([cache.create(), cache.create()])
    step = cache.reserve_step(batch, 12)
    cache.write(0, K.flatten(0, 1), V.flatten(0, 1), step)
    cache.fork(batch.sequences[0])
    return cache.k, cache.v, cache.device_block_table


CALLS = {
    "window": lambda: attend(Q, K, V, window_size=(2, 1)),
    "softcap": lambda: attend(Q, K, V, causal=True, softcap=1.0),
    "padding": lambda: attend(Q, K, V, causal=True, key_padding_mask=rand(2, 12) < 0.2),
    "mask": lambda: attend(Q, K, V, mask=rand(9, 12) < 0.2),
    "bias": lambda: attend(Q, K, V, bias=rand(4, 9, 12)),
    "sink": lambda: attend(Q, K, V, sink=SINK),
    "sink of packed rows": lambda: attend(Q[0], K[0], V[0], sink=SINK, **OFFSETS),
    "alibi": lambda: attend(Q, K, V, alibi_slopes=SLOPES, causal=True),
    "chunk": lambda: attend(*SQUARE, attention_chunk=3),
    "used": lambda: attend(Q, K, V, seqused_k=LENGTHS, seqused_q=LENGTHS),
    "packed": lambda: attend(Q[0], K[0], V[0], causal=True, **OFFSETS),
    "dropout": lambda: attend(Q, K, V, dropout_p=0.3, rng_state=STATE),
    "half": lambda: attend(*HALF, window_size=(4, 3)),
    "mask_mod": lambda: attend(*SQUARE, mask_mod=lambda b, h, i, j: i >= j),
    "captured": lambda: attend(*SQUARE, score_mod=lambda s, b, h, i, j: s * TABLE[h] + 1),
    "constant": lambda: attend(
        *SQUARE, score_mod=lambda s, b, h, i, j: 0.3, mask_mod=lambda b, h, i, j: True
    ),
    "constant in float64": lambda: attend(
        *(tensor.double() for tensor in SQUARE), score_mod=lambda s, b, h, i, j: 0.3
    ),
    "block_mask": lambda: attend(*SQUARE, block_mask=CAUSAL_BLOCKS),
    "create_block_mask": lambda: masks.create_block_mask(masks.document(IDS), None, None, 40, 40).lists,
    "tree": lambda: masks.create_tree_mask(int32(0, 4, 40), int32(-1, 0), 40).lists,
    "weights": lambda: flashtile.attention(Q, K, V, return_attn_weights=True, causal=True),
    "largest weights": lambda: flashtile.attention(Q, K, V, return_attn_weights=2),
    "kvcache": lambda: decode(cache_seqlens=LENGTHS, window_size=(4, 0)),
    "kvcache with new": lambda: decode(k=K[:, :1], v=V[:, :1], cache_seqlens=LENGTHS, causal=True),
    "kvcache alibi": lambda: decode(cache_seqlens=LENGTHS, alibi_slopes=SLOPES, sink=SINK),
    "softmax_max": lambda: decode(cache_seqlens=LENGTHS, softmax_max=1.3),
    "splits": lambda: decode(cache_seqlens=LENGTHS, num_splits=3),
    "pages": lambda: paged(causal=True),
    "combine": lambda: flashtile.flash_attn_combine(*PARTS),
    "merge": lambda: flashtile.merge_states(Q, PARTS[1][0].mT, HALF[0].float(), PARTS[1][1].mT),
    "shared prefix": lambda: flashtile.flash_attn_with_shared_prefix(
        Q, *PAGES, TABLE_OF_PAGES, int32(20, 30), 16
    ),
    "fp8": lambda: flashtile.fp8.attention(*HALF, causal=True, hadamard=True),
    "linear": lambda: flashtile.linear.linear(Q, rand(8, 16), activation="silu_and_mul"),
    "PagedKVCache": cached_pages,
}


@walk("default", DEFAULTS)
@walk("call", CALLS)
def test_defaults_change_nothing(call, default):
    expected = flattened(CALLS[call]())
    with DEFAULTS[default]():
        actual = flattened(CALLS[call]())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def flattened(results):
    return [results] if isinstance(results, torch.Tensor) else [one for one in results if one is not None]
