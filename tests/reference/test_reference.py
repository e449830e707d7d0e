"""The reference of the tests, compared with the oracle of the random calls, torch's attention and finite
differences."""

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
from flashtile.reference.decode import attention_with_kvcache
from flashtile.rounding import exact_product
from fuzz import oracle
from walk import walk

pytestmark = pytest.mark.numerical

MASKS = masks(3, 2)


@walk("mask", MASKS.values())
@walk("lengths", [None, ((4, 7), (7, 4), (1, 5)), ((0, 3), (5, 0), (6, 6))])
def test_results_are_those_of_the_random_calls_oracle(mask: dict[str, Any], lengths: Any) -> None:
    """They share no code. With ``lengths``, sequences are packed, with tokens after the last."""
    shape = {"seqlen_q": 4, "seqlen_k": 7} if lengths is None else {"lengths": lengths, "unused_tail": 2}
    heads = {"heads_q": 4, "heads_kv": 2, "head_dim": 3, "head_dim_v": 2}
    inputs = Case(name="oracle", dtype=FP64, **shape, **heads, **mask).inputs("cpu")
    results = reference.attention(*inputs.qkv, **inputs.arguments)
    expected = oracle.attention(*inputs.qkv, **inputs.arguments)
    torch.testing.assert_close(results, expected, rtol=1e-10, atol=1e-12)


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


@walk("arguments", DIFFERENTIABLE.values())
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


@walk("shape", [(17, 33), (40, 70), (3, 17, 70)])
def test_a_row_of_nan_leaves_other_rows_of_a_product(shape: tuple[int, ...]) -> None:
    """Also with columns that do not fill the registers of the CPU's product in bfloat16."""
    a, b = torch.randn(shape).bfloat16(), torch.randn(*shape[:-2], shape[-1], 24).bfloat16()
    clean, others = exact_product(a, b), torch.arange(shape[-2]) != 1
    a[..., 1, :] = torch.nan
    assert torch.equal(exact_product(a, b)[..., others, :], clean[..., others, :])


def test_one_length_stands_for_all_sequences() -> None:
    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 2, 8)
    of_each = torch.full((2,), 5, dtype=torch.int32)
    one, each = (attention_with_kvcache(q, k, k, cache_seqlens=lengths) for lengths in (5, of_each))
    for got, expected in zip(one, each, strict=True):
        assert torch.equal(got, expected)
