"""A few calls of every kind to run under NVIDIA's compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitizer_cases.py --only decode

Without torch's cache each tensor is an allocation of its own, so that memcheck sees an access beside it. A
plain script: neither pytest nor the reference, whose launches would be checked as slowly as ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import flashtile
import flashtile.fp8
from cases import BF16, FP16, FP32, Case
from decode_cases import CASES as DECODE_CASES
from decode_cases import DecodeCase, build
from flashtile import masks
from flashtile.api.cascade import cascade_with_kvcache
from flashtile.backends.portable.decode import config as decode_config
from flashtile.operators.decode import SharedKeys
from flashtile.problems.decode import FP8
from linear_calls import CALLS as PRODUCTS
from linear_calls import make_inputs
from linear_calls import run as run_product

RAGGED = ((70, 130), (1, 139), (0, 17), (35, 0), (7, 7))
SANITIZED = (
    Case(name="causal", causal=True),
    Case(name="odd head_dim", head_dim=59, head_dim_v=40, layout="offset"),
    Case(name="window", window_size=(33, 5), layout="transposed", dtype=BF16),
    Case(name="everything", causal=True, window_size=(40, -1), softcap=3.0, alibi="batch", layout="packed"),
    Case(name="varlen", lengths=RAGGED, unused_tail=9, causal=True, slack=100),
    Case(name="varlen float32", lengths=RAGGED, dtype=FP32, alibi="head"),
    Case(name="head_dim 128", head_dim=128, seqlen_q=200, seqlen_k=64, dtype=FP16),
    Case(name="head_dim 256", head_dim=256, seqlen_q=65, seqlen_k=127, dtype=BF16, causal=True),
    Case(name="head_dim 512", head_dim=512, seqlen_q=100, seqlen_k=130, dtype=BF16, causal=True),
    Case(name="expanded", layout="expanded", heads_q=6, heads_kv=3),
    Case(name="sink", sink="own", causal=True, heads_q=6, heads_kv=3),
    Case(name="unused keys", unused_keys=40, sink="float32", window_size=(33, 5), dtype=BF16),
    Case(name="shared keys", heads_q=8, heads_kv=1, seqlen_q=600, seqlen_k=650, causal=True, dtype=BF16),
    Case(name="shared keys, head_dim 256", heads_q=8, heads_kv=1, seqlen_q=300, head_dim=256, dtype=BF16),
    Case(name="varlen, unused keys", lengths=RAGGED, unused_keys=5, sink="float32", unused_tail=9),
)
DETERMINISTIC = (
    Case(name="deterministic", causal=True, dtype=BF16, seqlen_q=200, seqlen_k=300),
    Case(
        name="deterministic, head_dim 128", head_dim=128, head_dim_v=64, window_size=(90, 40), unused_keys=9
    ),
    Case(name="deterministic, varlen", head_dim=128, lengths=RAGGED, unused_tail=9, sink="own"),
    Case(name="deterministic, head_dim 256", head_dim=256, head_dim_v=128, lengths=RAGGED, causal=True),
)
"""Kernels that add blocks of keys up in one order wait for each other in memory."""
SHORT = ((70, 70), (1, 1), (0, 17), (35, 0), (90, 90))
FURTHER: tuple[tuple[Case, dict[str, Any]], ...] = (
    (Case(name="statistics", causal=True, dtype=BF16), {"return_max_logits": True, "return_entropy": True}),
    (Case(name="statistics, float32", dtype=FP32, sink="own"), {"return_entropy": True}),
    (Case(name="head_dim 24", head_dim=24, dtype=BF16, causal=True), {}),
    (Case(name="head_dim 8, varlen", head_dim=8, lengths=RAGGED, unused_tail=9), {}),
    (Case(name="varlen, 5 heads", heads_q=10, lengths=RAGGED, causal=True, layout="transposed"), {}),
    (Case(name="varlen, 6 heads", heads_q=12, lengths=SHORT, head_dim=128, causal=True, slack=4), {}),
    (Case(name="divided keys", batch=1, seqlen_q=100, seqlen_k=9000, dtype=BF16, causal=True), {}),
)  # fmt: skip
"""With further arguments."""


DECODED = {
    case.name: case
    for case in (
        *DECODE_CASES,
        DecodeCase("few tiles a program", lengths=(8192,), capacity=8192, page_size=16, head_dim=128),
        DecodeCase("few tiles a program, fp8", lengths=(5000, 3), capacity=8192, page_size=64, head_dim=128,
                   cache_dtype=FP8, descale="block"),
    )
}  # fmt: skip
MASS = {
    "stored": DecodeCase("", heads=(10, 2), page_size=4),
    "recomputed": DecodeCase(
        "", seqlen_q=7, heads=(27, 9), page_size=4, sink="float32",
        arguments={"causal": True, "window_size": (9, 0)},
    ),
    "fp8": DecodeCase("", cache_dtype=FP8, descale="block", page_size=4, heads=(8, 8)),
    "many rows": DecodeCase(
        "", seqlen_q=40, lengths=(90, 41, 300), capacity=304, heads=(14, 2), page_size=16, head_dim=128
    ),
    "a page of several sequences": DecodeCase("", lengths=(17, 4, 40), seqlen_q=3, page_size=4),
}  # fmt: skip
WHOLE_NAMES = ("dense", "one-large-page", "sink", "ragged-queries", "fp8")
"""Whose work tiles are left whole, as short ones are."""
DECODED_NAMES = (
    "odd-head-dims", "heads-in-blocks", "paged", "page-size-1", "empty-cache", "window-causal",
    "leftpad-paged", "batch-idx", "append-ragged", "rotary-ragged", "fp8-append", "fp8-append-rotary",
    "tree-ragged", "everything", "more-splits-than-keys", "split-size", "few tiles a program",
    "few tiles a program, fp8",
)  # fmt: skip


def attention(device: str, backend: str | None) -> Iterator[str]:
    cases = *((case, {}) for case in SANITIZED), *((case, {"deterministic": True}) for case in DETERMINISTIC)
    for case, more in (*cases, *FURTHER):
        inputs = case.inputs(device)
        leaves = [t.detach().requires_grad_() for t in inputs.qkv]
        given = {"return_lse": True, "backend": backend, **inputs.arguments, **more}
        results = [x for x in flashtile.attention(*leaves, **given) if x.requires_grad]
        upstream = inputs.dout, inputs.dlse, *map(torch.randn_like, results[2:])
        torch.autograd.grad(results, leaves, upstream)
        yield case.name
    shapes = (2, 70, 6, 64), (2, 99, 2, 64), (2, 99, 2, 64)
    q, k, v = (torch.randn(shape, device=device).to(BF16) for shape in shapes)
    along = partial(flashtile.attention, causal=True, return_lse=True, backend=backend)
    torch.func.jvp(along, (q, k, v), (q.cos(), k.cos(), v.cos()))
    yield "tangents"
    offsets = torch.tensor([0, 0, 70, 71, 90], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(90, heads, 64, device=device).to(BF16) for heads in (6, 2, 2))
    flashtile.flash_attn_varlen_func(
        q, k, v, offsets, offsets, 70, 70, causal=True, invariant=True, backend=backend
    )
    yield "varlen, invariant"


def decode(device: str, backend: str | None) -> Iterator[str]:
    for name in (*WHOLE_NAMES, *DECODED_NAMES):
        if name == DECODED_NAMES[0]:  # all the rest is shared out among all programs
            decode_config.MAX_WHOLE_BYTES = decode_config.MAX_UNEVEN_BYTES = -1
        tensors, arguments = build(DECODED[name], BF16, device)
        flashtile.flash_attn_with_kvcache(*tensors, backend=backend, **arguments)
        yield name
    (q, k_cache, v_cache, _, _), arguments = build(DECODED["paged"], BF16, device)
    arguments["block_table"][:, 0] = arguments["block_table"][0, 0]
    arguments |= {"prefix_seqlens": 1, "backend": backend}
    flashtile.flash_attn_with_shared_prefix(q, k_cache, v_cache, **arguments)
    yield "shared prefix"
    for name, case in MASS.items():
        (q, k_cache, v_cache, _, _), arguments = build(case, BF16, device)
        if name == "a page of several sequences":
            arguments["block_table"][:, 0] = arguments["block_table"][0, 0]
        arguments["mass"] = torch.zeros(k_cache.shape[:3], device=device)
        flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, backend=backend, **arguments)
        yield f"mass, {name}"
    (q, k_cache, v_cache, _, _), arguments = build(DECODED["paged"], BF16, device)
    flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, invariant=True, backend=backend, **arguments)
    yield "invariant"
    if backend is None:
        yield from groups(q, k_cache, v_cache, device)


def groups(q: Tensor, k_cache: Tensor, v_cache: Tensor, device: str) -> Iterator[str]:
    """Two sequences of three share a page, as the engine's levels say, and as kernels find it."""
    table, lengths, starts, of_group, first, end, none = (
        torch.tensor(numbers, dtype=torch.int32, device=device)
        for numbers in (
            [[0, 1, 2], [0, 3, 4], [5, 6, 7]], [9, 11, 12], range(4), [0, 2, 3], [0, 0], [4, 0], [4, 4, 0]
        )
    )  # fmt: skip
    level = SharedKeys(table[[0, 2]], end, first, of_group, 3)
    arguments = {"cache_seqlens": lengths, "block_table": table, "cache_leftpad": none, "causal": True}
    cascade_with_kvcache(q, k_cache, v_cache, levels=[level, level._replace(first=end)], **arguments)
    yield "groups"
    if device != "cpu":
        from flashtile.backends.portable.decode.groups import GroupLaunch

        found = torch.empty(3, 4, dtype=torch.int32, device=device)
        GroupLaunch(3, 3, 3, 4, 16, 1)(table, lengths, starts, *found)
        yield "groups, found by kernels"


def sampling(device: str, backend: str | None) -> Iterator[str]:
    """Draws of the engine. The random calls check them as well, and have options for them."""
    from fuzz.sampling import draws

    draws(7, 32000, 0, device, temperature=(0.0, 1.0), dtype=BF16)
    yield "temperature"
    for shape in ("flat", "peaked", "few", "empty", "bad"):
        filters = {"top_k": (0, 7, 40000), "top_p": (0.9, 1.0), "min_p": (0.0, 0.1, 0.0, 0.0)}
        draws(12, 32000, 0, device, shape, BF16, **filters)
        yield f"filters, {shape} rows"
    draws(5, 300, 0, device, top_k=(0, 7), adjusted=True, strided=True)
    yield "changed logits"


def fp8(device: str, backend: str | None) -> Iterator[str]:
    for head_dim in (64, 128, 256):
        shapes = ((70, 4), (333, 2), (333, 2))
        q, k, v = (torch.randn(2, n, heads, head_dim, device=device).to(BF16) for n, heads in shapes)
        flashtile.fp8.attention(q, k, v, causal=True, return_lse=True, backend=backend)
        yield f"head_dim {head_dim}"
        flashtile.flash_attn_func(*(t.to(FP8) for t in (q, k, v)), window_size=(100, 20), backend=backend)
        yield f"head_dim {head_dim}, row by row"
    cu_seqlens = torch.tensor([0, 0, 70, 71, 203], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(210, h, 100, device=device).to(FP16) for h in (4, 2, 2))
    flashtile.fp8.attention(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=140, max_seqlen_k=140,
        backend=backend,
    )  # fmt: skip
    yield "varlen"


def linear(device: str, backend: str | None) -> Iterator[str]:
    for call in PRODUCTS:
        run_product(call, make_inputs(call, BF16, device, aligned=call.K % 8 == 0), backend=backend)
        yield call.name
    run_product(PRODUCTS[4], make_inputs(PRODUCTS[4], BF16, device), backend=backend, invariant=True)
    yield "invariant"


def functions(device: str, backend: str | None) -> Iterator[str]:
    """Functions of scores and masks, block masks, dropout, and an additive bias with its gradient."""
    for head_dim in (64, 128):
        q, k, v = (
            torch.randn(2, n, heads, head_dim, device=device).to(BF16).requires_grad_()
            for n, heads in ((200, 4), (333, 2), (333, 2))
        )
        bias = torch.randn(1, 4, 200, 333, device=device).to(BF16).requires_grad_()
        slopes = torch.rand(4, device=device, requires_grad=True)
        window = masks.window(70, 20)
        pictures = masks.causal() | masks.document(torch.arange(400, device=device) // 9)
        calls: dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]] = {
            "score_mod": ({"score_mod": masks.alibi(slopes)}, (slopes,)),
            "block_mask": (
                {"block_mask": masks.create_block_mask(window, None, None, 200, 333, device)},
                (),
            ),
            "mask_mod": ({"mask_mod": window}, ()),
            "pictures": ({"mask_mod": pictures}, ()),
            "dropout": ({"dropout_p": 0.1, "causal": True}, ()),
            "dropout of all keys": ({"dropout_p": 0.003}, ()),
            "bias": ({"bias": bias.detach()}, ()),
            "bias with its gradient": ({"bias": bias, "causal": True}, (bias,)),
            "bias by head": ({"bias": bias[:, :, :1], "window_size": (90, 40)}, (bias,)),
        }
        for name, (arguments, leaves) in calls.items():
            out = flashtile.attention(q, k, v, backend=backend, **arguments)
            torch.autograd.grad(out.float().sum(), (q, k, v, *leaves))
            yield f"{name}, head_dim {head_dim}"
        for batch in (1, 2):  # rows of whole 16 bytes, as TMA loads them
            bias = torch.randn(batch, 4, 200, 328, device=device).to(BF16).requires_grad_()
            out = flashtile.attention(q, k[:, 5:], v[:, 5:], backend=backend, bias=bias, causal=True)
            torch.autograd.grad(out.float().sum(), (q, k, v, bias))
            yield f"bias of {batch} sequences, head_dim {head_dim}"


PARTS = {
    "attention": attention, "functions": functions, "decode": decode, "sampling": sampling, "fp8": fp8,
    "linear": linear,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="Default: what dispatch chooses.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", choices=PARTS, help="Default: all.")
    options = parser.parse_args()
    for part in (options.only,) if options.only else PARTS:
        for name in PARTS[part](options.device, options.backend):
            if options.device == "cuda":
                torch.cuda.synchronize()
            print(f"ran {part}: {name}", flush=True)


if __name__ == "__main__":
    main()
