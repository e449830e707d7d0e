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
from flashtile.backends.portable.decode import config as decode_config
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


DECODED = {
    case.name: case
    for case in (
        *DECODE_CASES,
        DecodeCase("few tiles a program", lengths=(8192,), capacity=8192, page_size=16, head_dim=128),
        DecodeCase("few tiles a program, fp8", lengths=(5000, 3), capacity=8192, page_size=64, head_dim=128,
                   cache_dtype=FP8, descale="block"),
    )
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
    for case in (*SANITIZED, *DETERMINISTIC):
        inputs = case.inputs(device)
        leaves = [t.detach().requires_grad_() for t in inputs.qkv]
        results = flashtile.attention(
            *leaves,
            return_lse=True,
            backend=backend,
            deterministic=case in DETERMINISTIC,
            **inputs.arguments,
        )
        torch.autograd.grad(results, leaves, (inputs.dout, inputs.dlse))
        yield case.name


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
        calls: dict[str, tuple[dict[str, Any], tuple[Tensor, ...]]] = {
            "score_mod": ({"score_mod": masks.alibi(slopes)}, (slopes,)),
            "block_mask": (
                {"block_mask": masks.create_block_mask(window, None, None, 200, 333, device)},
                (),
            ),
            "mask_mod": ({"mask_mod": window}, ()),
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


PARTS = {"attention": attention, "functions": functions, "decode": decode, "fp8": fp8, "linear": linear}


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
