"""The oracle itself, against the definition row by row, torch's attention and finite differences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cases import BF16, FP32, FP64, Case, masks
from flashtile import testing
from flashtile.reference import attention as reference

MASKS = masks(3, 2)


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    softmax_scale: float | None,
    slopes: Tensor | None,
    sink: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One sequence, one loop step per query and key: (seqlen, heads, head_dim) -> (out, lse)."""
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=FP64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=FP64)
    for head in range(q.shape[1]):
        for i in range(q.shape[0]):
            position = i + k.shape[0] - q.shape[0]
            weights = {}
            for j in range(k.shape[0]):
                hidden_left = window_size[0] >= 0 and j < position - window_size[0]
                hidden_right = not causal and window_size[1] >= 0 and j > position + window_size[1]
                if hidden_left or hidden_right or (causal and j > position):
                    continue
                pairs = zip(q[i, head].tolist(), k[j, head // group].tolist(), strict=True)
                score = scale * sum(a * b for a, b in pairs)
                if softcap:
                    score = softcap * math.tanh(score / softcap)
                if slopes is not None:
                    score -= slopes[head].item() * abs(position - j)
                weights[j] = math.exp(score)
            rest = 0.0 if sink is None else math.exp(sink[head].item())
            total = sum(weights.values(), rest)
            if total:
                out[i, head] = sum(w / total * v[j, head // group] for j, w in weights.items())
                lse[head, i] = math.log(total)
    return out, lse


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("lengths", [((4, 7), (7, 4), (1, 5)), ((0, 3), (5, 0), (6, 6))], ids=["", "empty"])
def test_definition(mask: dict[str, Any], lengths: tuple[tuple[int, int], ...]) -> None:
    heads = {"heads_q": 4, "heads_kv": 2, "head_dim": 3, "head_dim_v": 2}
    call = Case(name="definition", lengths=lengths, unused_tail=2, dtype=FP64, **heads, **mask)
    inputs = call.inputs("cpu")
    out, lse = reference.attention(*inputs.qkv, **inputs.arguments)
    slopes, sink = inputs.arguments.get("alibi_slopes"), inputs.arguments.get("sink")
    seqused_k = inputs.arguments.get("seqused_k", torch.tensor([seqlen_k for _, seqlen_k in lengths]))
    row = key = 0
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        rows, keys = slice(row, row + seqlen_q), slice(key, key + seqused_k[b])
        row, key = row + seqlen_q, key + seqlen_k
        expected_out, expected_lse = by_definition(
            inputs.q[rows], inputs.k[keys], inputs.v[keys], call.causal, call.window_size, call.softcap,
            call.softmax_scale, slopes[b] if call.alibi == "batch" else slopes, sink,
        )  # fmt: skip
        torch.testing.assert_close(out[rows], expected_out, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(lse[:, rows], expected_lse, rtol=1e-10, atol=1e-12)
        if slopes is None and lengths[0] == (4, 7):  # the dense form of the same sequence
            dense_out, dense_lse = reference.attention(
                inputs.q[None, rows], inputs.k[None, keys], inputs.v[None, keys],
                causal=call.causal, window_size=call.window_size, softcap=call.softcap,
                softmax_scale=call.softmax_scale, sink=sink,
            )  # fmt: skip
            torch.testing.assert_close(dense_out[0], out[rows])
            torch.testing.assert_close(dense_lse[0], lse[:, rows])
    assert (out[row:] == 0).all()
    assert (lse[:, row:] == -math.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_torch_agrees(causal: bool, group: int) -> None:
    heads = (3 * group, 3, 3)
    qkv = [testing.random_tensor((2, 33, h, 8), FP64, "cpu", seed=i) for i, h in enumerate(heads)]
    out, _ = reference.attention(*qkv, causal=causal)
    theirs = [t.transpose(1, 2) for t in qkv]
    expected = scaled_dot_product_attention(*theirs, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


DIFFERENTIABLE = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.125])},
    "sink": {"sink": torch.tensor([0.5, -1.0], dtype=FP64)},
    "sink-without-keys": {"sink": torch.tensor([0.5, -torch.inf], dtype=FP64), "window_size": (0, 0)},
    "everything": {
        "causal": True, "window_size": (2, -1), "softcap": 1.5, "softmax_scale": 0.4,
        "alibi_slopes": torch.tensor([0.5, 0.125]), "sink": torch.tensor([0.5, -1.0], dtype=FP64),
        "seqused_k": torch.tensor([3], dtype=torch.int32),
    },
}  # fmt: skip


@pytest.mark.parametrize("arguments", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE.keys())
def test_finite_differences(arguments: dict[str, Any]) -> None:
    shapes = ((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 3))
    leaves = [testing.random_tensor(s, FP64, "cpu", seed=i).requires_grad_() for i, s in enumerate(shapes)]

    names = [name for name in ("sink",) if name in arguments]
    leaves += [arguments[name].detach().requires_grad_() for name in names]

    def attend(*given: Tensor) -> tuple[Tensor, Tensor]:
        more = arguments | dict(zip(names, given[3:], strict=True))
        out, lse = reference.attention(*given[:3], **more)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


def test_gradients_of_rows_without_keys_are_zero() -> None:
    lengths = enumerate((6, 3, 3))
    q, k, v = (testing.random_tensor((1, s, 2, 4), FP64, "cpu", seed=i).requires_grad_() for i, s in lengths)
    out, lse = reference.attention(q, k, v, causal=True)
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == -math.inf).all()
    ones = torch.ones_like(out), torch.ones_like(lse)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), ones, retain_graph=True)
    assert (dq[:, :3] == 0).all()
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    for gradient in torch.autograd.grad(out[:, :3].sum(), (q, k, v)):
        assert (gradient == 0).all()


def test_upcast() -> None:
    inputs = Case(name="upcast", seqlen_q=9, seqlen_k=12, dtype=BF16).inputs("cpu")
    plain, plain_lse = reference.attention(*inputs.qkv)
    wide, wide_lse = reference.attention(*inputs.qkv, upcast=FP32)
    exact, exact_lse = reference.attention(*(t.double() for t in inputs.qkv))
    assert (plain.dtype, plain_lse.dtype, wide.dtype, wide_lse.dtype) == (BF16, FP32, FP32, FP32)
    assert exact_lse.dtype == FP64
    assert (wide - exact).abs().max() < 1e-5 < (plain - exact).abs().max()
