"""What full attention on a CPU could gain: processor time of other ways to compute it.

    OMP_NUM_THREADS=1 python benchmarks/cpu_attempts.py            # float32
    OMP_NUM_THREADS=1 python benchmarks/cpu_attempts.py bfloat16

One thread, S=4096, 8 heads of 64. Errors (largest, root mean square, against float64) are in units of those
of standard attention in the same dtype. The findings stand in docs/measured/cpu.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

SEQLEN, HEADS, HEAD_DIM = 4096, 8, 64
SCALE = HEAD_DIM**-0.5
REPEATS = 3

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(heads, seqlen, head_dim) each -> the same."""


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax((q * SCALE) @ k.mT, -1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's own kernel, which flashtile calls."""
    batch = (t[None] for t in (q, k, v))
    return torch._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, False, scale=SCALE)[0][0]


def products_alone(block_m: int, block_n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No attention: the time of its two products in tiles."""
    out = torch.zeros_like(q)
    scores = q.new_empty(1, block_m, block_n)
    for head in range(HEADS):
        one = slice(head, head + 1)
        for m in range(0, SEQLEN, block_m):
            for n in range(0, SEQLEN, block_n):
                torch.bmm(q[one, m : m + block_m], k[one, n : n + block_n].mT, out=scores)
                out[one, m : m + block_m].baddbmm_(scores, v[one, n : n + block_n])
    return out


def row_blocks(in_place: bool, block_m: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A block of rows against all keys at a time, nothing to rescale; softmax by torch or ``in_place``."""
    out = torch.empty_like(q)
    scores = q.new_empty(block_m, SEQLEN)
    q = q * SCALE
    for head in range(HEADS):
        for m in range(0, SEQLEN, block_m):
            rows = slice(m, m + block_m)
            torch.mm(q[head, rows], k[head].T, out=scores)
            if in_place:
                scores.sub_(scores.amax(-1, keepdim=True)).exp_()
                torch.mm(scores, v[head], out=out[head, rows]).div_(scores.sum(-1, keepdim=True))
            else:
                torch.mm(torch.softmax(scores, -1), v[head], out=out[head, rows])
    return out


def bounded(block_m: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """|q| max|k| in place of the maximum, subtracted in the product; a column of ones sums the rows."""
    out = torch.empty_like(q)
    scores = q.new_empty(block_m, SEQLEN)
    q = q * SCALE
    v = torch.cat([v, v.new_ones(HEADS, SEQLEN, 1), v.new_zeros(HEADS, SEQLEN, 15)], -1)
    bound = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).amax(-1)[:, None, None]
    for head in range(HEADS):
        for m in range(0, SEQLEN, block_m):
            rows = slice(m, m + block_m)
            torch.addmm(bound[head, rows], q[head, rows], k[head].T, beta=-1, out=scores)
            product = scores.exp_() @ v[head]
            out[head, rows] = product[:, :HEAD_DIM] / product[:, HEAD_DIM, None]
    return out


def processor_time(call: Callable[[], Tensor]) -> float:
    """Seconds, the best of REPEATS after one more."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "float32")
    q, k, v = (torch.randn(HEADS, SEQLEN, HEAD_DIM, dtype=dtype) for _ in range(3))
    exact = standard(q.double(), k.double(), v.double())

    def errors(out: Tensor) -> tuple[float, float]:
        error = out.double() - exact
        return error.abs().max().item(), error.square().mean().sqrt().item()

    plain = errors(standard(q, k, v))
    ways: dict[str, Attend] = {"standard": standard, "torch's fused kernel": fused}
    for block_m in (64, 128, 256, 512):
        ways[f"blocks of {block_m} rows, torch.softmax"] = partial(row_blocks, False, block_m)
        ways[f"blocks of {block_m} rows, in place"] = partial(row_blocks, True, block_m)
        ways[f"blocks of {block_m} rows, bound for maximum"] = partial(bounded, block_m)
    for name, attend in ways.items():
        largest, rms = (error / of for error, of in zip(errors(attend(q, k, v)), plain, strict=True))
        print(f"{name:45} {processor_time(partial(attend, q, k, v)):.3f} s   error {largest:.2f} {rms:.2f}")
    for block_m, block_n in ((64, 512), (256, 512), (256, 4096), (512, 4096)):
        alone = processor_time(partial(products_alone, block_m, block_n, q, k, v))
        print(f"products alone, tiles of {block_m} x {block_n:<14} {alone:.3f} s")
    square = torch.randn(4096, 4096, dtype=dtype)
    rate = 2 * 4096**3 / processor_time(lambda: square @ square)
    floor = 4 * HEADS * SEQLEN**2 * HEAD_DIM / rate
    print(f"products at the rate of a 4096^3 product ({rate / 1e9:.0f} GFLOP/s): {floor:.3f} s")


if __name__ == "__main__":
    main()
