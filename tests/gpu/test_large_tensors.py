"""More than 2^31 elements: every offset in 64 bits, in every tensor, forward and backward."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import testing
from flashtile.reference import attention as reference
from targets import Target

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.huge]

HEADS, HEAD_DIM = 64, 128
WINDOW = 256
ROWS_IN_2_31 = 2**31 // (HEADS * HEAD_DIM)
SEQLEN = ROWS_IN_2_31 + 1000
CHECKED_HEADS = (0, 31, 63)


def skip_without(gigabytes: float) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, there are {free / 2**30:.1f}")


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bfloat16 without a float32 copy of the whole."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return tensor.normal_(generator=torch.Generator("cuda").manual_seed(seed))


def assert_span_is_right(
    tensors: tuple[Tensor, ...], results: tuple[Tensor, ...], first: int, last: int, context: int
) -> None:
    """Rows ``first`` to ``last`` of some heads of a long sequence against the reference on them alone.

    tensors (q, k, v, dout) and results (out, dq, dk, dv): (seqlen, heads, head_dim). Rows see themselves and
    ``context`` keys before; the rows behind ``last`` that see checked keys are part of the reference call.
    """
    heads = torch.tensor(CHECKED_HEADS, device="cuda")
    end = min(last + context, tensors[0].shape[0])
    start = max(first - context, 0)
    q, dout = (tensors[i][first:end].index_select(1, heads)[None] for i in (0, 3))
    k, v = (tensors[i][start:end].index_select(1, heads)[None] for i in (1, 2))

    def attend(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out, _ = reference.attention(*leaves, window_size=(context, 0))
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    skipped = first - start
    spans = {
        "out": slice(0, last - first),
        "dq": slice(0, last - first),
        "dk": slice(skipped, skipped + last - first),
        "dv": slice(skipped, skipped + last - first),
    }
    exact, plain = attend(torch.float64), attend(torch.bfloat16)
    for result, wide, narrow, (name, span) in zip(results, exact, plain, spans.items(), strict=True):
        got = result[first:last].index_select(1, heads)[None]
        comparison = testing.compare(name, got, wide[:, span], narrow[:, span], factor=testing.FACTORS[name])
        assert comparison.holds, f"rows {first} to {last}: {comparison}"


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_long(gpu_target: Target, varlen: bool) -> None:
    """Every tensor of the call beyond 2^31 elements."""
    skip_without(42)
    shape = (SEQLEN, HEADS, HEAD_DIM)
    q, k, v, dout = (normal(shape, seed) for seed in range(4))
    arguments: dict[str, Any] = {"window_size": (WINDOW, 0), "backend": gpu_target.backend}
    # Varlen: a short sequence, then one that starts before element 2^31 and ends behind it, then the rest.
    cuts = [0, 700, SEQLEN - 500, SEQLEN] if varlen else [0, SEQLEN]
    given = [t.requires_grad_() if varlen else t[None].requires_grad_() for t in (q, k, v)]
    if varlen:
        cu_seqlens = torch.tensor(cuts, dtype=torch.int32, device="cuda")
        longest = max(b - a for a, b in pairwise(cuts))
        arguments.update(
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest
        )
    out = flashtile.attention(*given, **arguments)
    gradients = torch.autograd.grad(out, given, dout if varlen else dout[None])
    results = [t.detach() if varlen else t[0].detach() for t in (out, *gradients)]
    tensors = [t.detach() for t in (q, k, v, dout)]
    for start, end in pairwise(cuts):
        sequence = tuple(t[start:end] for t in tensors)
        computed = tuple(t[start:end] for t in results)
        spans = {(0, 300), (end - start - 300, end - start)}
        if start < ROWS_IN_2_31 < end - 300:
            spans.add((ROWS_IN_2_31 - start - 150, ROWS_IN_2_31 - start + 150))
        for first, last in spans:
            assert_span_is_right(sequence, computed, first, last, WINDOW)


STRIDES = {
    # A tile of 128 rows alone spans more than 2^31 elements.
    "row": ((1, 140, 2, 64), (0, 2**24, 64, 1)),
    "head": ((1, 140, 2, 64), (0, 64, 2**31 + 64 * 140, 1)),
    "batch": ((2, 140, 2, 64), (2**31 + 128 * 140, 128, 64, 1)),
}


@pytest.mark.parametrize("which", STRIDES)
@pytest.mark.parametrize("large", ["q", "k", "v"])
def test_far_apart(gpu_target: Target, which: str, large: str) -> None:
    """One input whose elements lie more than 2^31 apart, by each of its strides."""
    skip_without(8)
    shape, strides = STRIDES[which]
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    assert extent > 2**31
    storage = torch.empty(extent, dtype=torch.bfloat16, device="cuda")
    random = (testing.random_tensor(shape, torch.bfloat16, "cuda", seed=seed) for seed in range(3))
    given = dict(zip("qkv", random, strict=True))
    given[large] = storage.as_strided(shape, strides).copy_(given[large])
    testing.check(*given.values(), causal=True, backend=gpu_target.backend)
    if which != "batch":
        cu_seqlens = testing.cu_seqlens((50, 90), "cuda")
        testing.check(
            *(t[0] for t in given.values()),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=90,
            max_seqlen_k=90,
            causal=True,
            backend=gpu_target.backend,
        )


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_lse_beyond_2_31(gpu_target: Target, varlen: bool) -> None:
    """Rows of head_dim 1 in thirteen kinds: out and lse, as long as it, by table."""
    skip_without(26)
    heads, length, kinds = 512, 2**22 + 1000, 13
    kind = torch.arange(kinds, device="cuda")
    row = torch.arange(length, device="cuda")
    q = torch.empty((length, heads, 1), dtype=torch.float16, device="cuda")
    for h in range(heads):
        q[:, h, 0] = ((row + 5 * h) % kinds - 6) / 4
    k, v = (testing.random_tensor((5, 1, 1), torch.float16, "cuda", seed=seed) for seed in (1, 2))
    by_kind = ((kind - 6) / 4).double()[None, :, None, None]
    out_table, lse_table = reference.attention(by_kind, k[None].double(), v[None].double())

    given = (q[None], k[None], v[None])
    arguments: dict[str, Any] = {}
    if varlen:
        given = (q, k, v)
        arguments = {
            "cu_seqlens_q": testing.cu_seqlens((length,), "cuda"),
            "cu_seqlens_k": testing.cu_seqlens((5,), "cuda"),
            "max_seqlen_q": length,
            "max_seqlen_k": 5,
        }
    with testing.poisoned_memory():
        out, lse = flashtile.attention(*given, return_lse=True, backend=gpu_target.backend, **arguments)
    out, lse = out.view(length, heads), lse.view(heads, length)
    assert lse.numel() > 2**31
    for h in range(heads):
        expected = (row + 5 * h) % kinds
        # Written so that NaN fails.
        assert (out[:, h] - out_table.view(-1)[expected]).abs().max() < 2e-3, f"out of head {h}"
        assert (lse[h] - lse_table.view(-1)[expected]).abs().max() < 1e-5, f"lse of head {h}"
