"""Attention and decoding with all pairs of head sizes from 1 to 40, few rows and keys, for memcheck.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitizer_head_sizes.py --part 1/16

Each pair compiles kernels of its own, so processes share the pairs out by ``--part``. Head sizes decide
whether Triton copies tiles asynchronously, how it swizzles them, and which order their elements have in
shared memory. Results are compared with PyTorch's, because a wrong descriptor need not read out of range.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile

LARGEST = 40
LAYOUTS = "tokens first", "heads first", "offset", "overlapping"
ROWS_AND_KEYS = (1, 1), (14, 2), (3, 70), (70, 33)


def make(heads: int, tokens: int, width: int, layout: str, seed: int) -> Tensor:
    """Return a tensor (1, tokens, heads, width) in float16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if layout == "overlapping":  # each token begins one element after the one before
        memory = torch.randn(1, heads, tokens + width - 1, generator=generator, device="cuda").half()
        return memory.unfold(-1, width, 1).transpose(1, 2)
    x = torch.randn(1, tokens, heads, width, generator=generator, device="cuda").half()
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "offset":
        return F.pad(x, (1, 2))[..., 1:-2]
    return x


def check(name: str, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    error = (out.float() - exact).abs().max().item()
    if not error < 2e-2:
        raise SystemExit(f"{name}: off by {error:.3g}")


def pairs(part: int, parts: int) -> Iterator[tuple[int, int]]:
    for number in range(part - 1, LARGEST**2, parts):
        yield 1 + number // LARGEST, 1 + number % LARGEST


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="1/1", help="such as 3/16")
    parser.add_argument("--every", type=int, default=1, help="take only every n-th pair of the part")
    parser.add_argument("--turn", type=int, default=0, help="0 to 15: other layouts and lengths")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    done = 0
    for number, (head_dim, head_dim_v) in enumerate(pairs(part, parts)):
        if number % options.every:
            continue
        turn = number + options.turn  # all layouts and lengths in turn, since each pair compiles for seconds
        layout, (rows, keys) = LAYOUTS[turn % 4], ROWS_AND_KEYS[turn // 4 % 4]
        shapes = (6, rows, head_dim), (3, keys, head_dim), (3, keys, head_dim_v)
        q, k, v = (make(*shape, layout, seed) for seed, shape in enumerate(shapes))
        name = f"head_dim {head_dim}, head_dim_v {head_dim_v}, {rows} rows, {keys} keys, {layout}"
        check(name, flashtile.attention(q, k, v), q, k, v)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out = flashtile.attention(q, k, v, backend="portable" if number % 2 else None)
        if number % 4 == 0:
            out.backward(torch.ones_like(out))
        check(name, out.detach(), q.detach(), k.detach(), v.detach())
        many = make(48, 1, head_dim, "tokens first", 9)  # 48 query heads on one key head
        cached = [x.detach()[:, :, :1] for x in (k, v)]
        used = torch.full((1,), keys, dtype=torch.int32, device="cuda")
        check(name, flashtile.flash_attn_with_kvcache(many, *cached, cache_seqlens=used), many, *cached)
        done += 1
    torch.cuda.synchronize()
    print(f"{done} pairs of head sizes, part {options.part}")


if __name__ == "__main__":
    main(sys.argv[1:])
