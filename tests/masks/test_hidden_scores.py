"""Hidden scores have gradient 0 whatever a function makes of them; slopes and exponents have gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import masks, testing
from flashtile.masks.mods import traced
from flashtile.problems.masks import Mods
from flashtile.reference import attention as reference
from targets import Target
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

SEQLEN = 20


class Hiding(NamedTuple):
    """A function of scores by a learned number for each head that is not finite where the mask hides them."""

    score_mod: Callable[[Tensor], Callable[..., Any]]
    mask: dict[str, Any]


def apart(b, h, q_idx, kv_idx):
    return q_idx != kv_idx


def _zero_distance(t: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q_idx, kv_idx: s * t[h] / (q_idx - kv_idx).abs()


def _log_distance(t: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q_idx, kv_idx: s + t[h] * torch.log(q_idx - kv_idx + 1)


def _hides_itself(t: Tensor) -> Callable[..., Any]:
    def modify(s, b, h, q_idx, kv_idx):
        return torch.where(q_idx != kv_idx, s * t[h] / (q_idx - kv_idx).abs(), -float("inf"))

    return modify


def _past_the_end(t: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q_idx, kv_idx: s + t[h] * torch.log(float(SEQLEN) - q_idx) / (SEQLEN - kv_idx)


HIDING = {
    "mask_mod": Hiding(_zero_distance, {"mask_mod": apart}),
    "block_mask": Hiding(_zero_distance, {"block_mask": apart}),
    "causal": Hiding(_log_distance, {"causal": True}),
    "the function": Hiding(_hides_itself, {}),
    "the end of the sequence": Hiding(_past_the_end, {}),
    "the end of a full block": Hiding(_past_the_end, {"block_mask": lambda b, h, q, kv: q < 100}),
    "every row": Hiding(_zero_distance, {"mask_mod": lambda b, h, q_idx, kv_idx: q_idx < 0}),
}


@pytest.mark.parametrize("name", HIDING)
def test_hidden_scores_have_no_gradient(target: Target, name: str) -> None:
    make, mask = HIDING[name]
    mask = dict(mask)
    if "block_mask" in mask:
        lengths = None, None, SEQLEN, SEQLEN
        mask["block_mask"] = masks.create_block_mask(mask["block_mask"], *lengths, target.device, 16)
    own = torch.tensor([0.7, 0.3], device=target.device, requires_grad=True)
    q, k, v = (
        testing.random_tensor((1, SEQLEN, 2, 16), torch.float32, target.device, seed=seed).requires_grad_()
        for seed in range(3)
    )
    score_mod = make(own)
    out = flashtile.attention(q, k, v, score_mod=score_mod, backend=target.backend, **mask)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected, _ = reference.attention(*wide, score_mod=score_mod, **mask)
    ours = torch.autograd.grad(out.square().sum(), (q, k, v, own))
    exact = torch.autograd.grad(expected.square().sum(), (*wide, own))
    for got, wanted in zip(ours, exact, strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["mask_mod", "causal", "the function", "every row"])
def test_second_derivatives_and_tangents_are_finite(name: str) -> None:
    make, mask = HIDING[name]
    own = torch.tensor([0.7, 0.3], dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(1, 3, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(q, k, v, own):
        return flashtile.attention(q, k, v, score_mod=make(own), **mask)

    assert torch.autograd.gradgradcheck(attend, (q, k, v, own), fast_mode=True)
    _, tangents = torch.func.jvp(lambda q: attend(q, k.detach(), v.detach(), own.detach()), (q,), (q,))
    assert tangents.isfinite().all()


@pytest.mark.parametrize("name", ["mask_mod", "causal", "the function", "every row"])
def test_second_derivatives_under_vmap_equal_a_loop(name: str) -> None:
    """vmap allows no selection of the visible scores."""
    make, mask = HIDING[name]
    q, k, v = (torch.randn(1, 3, 2, 2, dtype=torch.float64) for _ in range(3))
    second = torch.func.hessian(
        lambda own: flashtile.attention(q, k, v, score_mod=make(own), **mask).square().sum()
    )
    learned = torch.tensor([[0.7, 0.3], [0.2, 0.9]], dtype=torch.float64)
    expected = torch.stack([second(own) for own in learned])
    torch.testing.assert_close(torch.func.vmap(second)(learned), expected)


def test_the_oracle_hides_as_a_formula_does() -> None:
    """s / distance without the diagonal, by hand."""
    q, k, v = (torch.randn(1, 5, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    own = torch.tensor([0.7])
    out, _ = reference.attention(q, k, v, score_mod=_zero_distance(own), mask_mod=apart)
    i = torch.arange(5)
    distance = (i[:, None] - i).abs().double().fill_diagonal_(1.0)
    scores = 0.7 * (q[0, :, 0] @ k[0, :, 0].T) / 2 / distance
    weights = scores.masked_fill(torch.eye(5, dtype=torch.bool), -torch.inf).softmax(-1)
    expected = (weights @ v[0, :, 0])[None, :, None]
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    for got, wanted in zip(
        *(torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, expected)), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("start", [1.5, 0.0])
def test_a_learned_exponent_of_a_base_that_is_0(target: Target, start: float) -> None:
    power = torch.tensor(start, device=target.device, requires_grad=True)

    def modify(s, b, h, q_idx, kv_idx):
        return s + (torch.relu(q_idx - kv_idx) / 8) ** power

    q, k, v = (testing.random_tensor((1, 9, 1, 16), torch.float32, target.device, seed=i) for i in range(3))
    out = flashtile.attention(q, k, v, score_mod=modify, backend=target.backend)
    expected, _ = reference.attention(q.double(), k.double(), v.double(), score_mod=modify)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    (ours,), (exact,) = (torch.autograd.grad(t.square().sum(), power) for t in (out, expected))
    assert exact.isfinite()
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-4)


def test_a_learned_base_of_an_exponent_that_is_0(target: Target) -> None:
    base = torch.tensor([0.0, 0.0, 2.0], device=target.device, requires_grad=True)
    exponents = torch.tensor([0.0, 2.0, 0.0], device=target.device)

    def modify(s, b, h, q_idx, kv_idx):
        return s + base[kv_idx] ** exponents[kv_idx]

    q, k, v = (testing.random_tensor((1, 3, 1, 16), torch.float32, target.device, seed=i) for i in range(3))
    out = flashtile.attention(q, k, v, score_mod=modify, backend=target.backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), base)
    assert torch.equal(gradient, torch.zeros_like(base))


def test_powers_are_torchs(target: Target) -> None:
    exponents = torch.tensor([-3.0, -2.0, 0.0, 2.0, 3.0], device=target.device)

    def modify(s, b, h, q_idx, kv_idx):
        of_ints = 2 ** (kv_idx - q_idx) + (kv_idx - 1) ** (kv_idx - q_idx) / 8  # 0 for a negative exponent
        return s + (kv_idx - 2.5) ** exponents[q_idx] + (kv_idx - 1.5) ** -2 + of_ints

    q, k, v = (testing.random_tensor((1, 5, 1, 16), torch.float32, target.device, seed=i) for i in range(3))
    out = flashtile.attention(q, k, v, score_mod=modify, backend=target.backend)
    expected, _ = reference.attention(q.double(), k.double(), v.double(), score_mod=modify)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_function_that_stays_finite_needs_no_guard() -> None:
    """Guards cost the kernels registers."""
    functions = pytest.importorskip("flashtile.backends.portable.attention.functions")
    table = torch.zeros(2, 9)

    def guards(score_mod: Any) -> tuple[bool, bool]:
        trace = traced("score_mod", score_mod)
        mods = Mods(score_mod=trace.text, ranks=tuple(t.dim() for t in trace.tensors))
        found = functions.guards(mods)
        return found["GUARD_SCORES"], found["GUARD_FACTORS"]

    assert guards(masks.relative_position(table)) == (False, False)
    assert guards(masks.alibi(torch.zeros(2))) == (False, False)
    assert guards(lambda s, b, h, q, kv: torch.where(q > kv, s / 3, -float("inf"))) == (False, False)
    assert guards(lambda s, b, h, q, kv: s * table[h, kv]) == (False, True)
    assert guards(lambda s, b, h, q, kv: s + torch.log(q - kv)) == (True, False)
    assert guards(lambda s, b, h, q, kv: s / (q - kv)) == (True, True)
    assert guards(lambda s, b, h, q, kv: torch.where(q > kv, s, -float("inf")).exp()) == (True, True)


SLOPES = {
    "alone": {},
    "causal": {"causal": True, "softcap": 3.0},
    "score_mod": {"score_mod": lambda s, b, h, q_idx, kv_idx: s * (1 + h) - kv_idx / 8},
    "soft-cap": {"score_mod": masks.softcap(2.0)},
    "mask_mod": {"mask_mod": masks.causal(5)},
    "block_mask": {"block_mask": masks.create_block_mask(masks.causal(5), None, None, 9, 14, BLOCK_SIZE=16)},
}


@walk("shape", [(2,), (3, 2)])
@walk("name", SLOPES)
def test_slopes_of_alibi_learn(name: str, shape: tuple[int, ...]) -> None:
    slopes = (torch.rand(shape) + 0.1).requires_grad_()
    q, k, v = (torch.randn(3, length, 2, 8, requires_grad=True) for length in (9, 14, 14))
    out = flashtile.attention(q, k, v, alibi_slopes=slopes, **SLOPES[name])
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected, _ = reference.attention(*wide, alibi_slopes=slopes, **SLOPES[name])
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    ours = torch.autograd.grad(out.square().sum(), (q, k, v, slopes))
    exact = torch.autograd.grad(expected.square().sum(), (*wide, slopes))
    for got, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-3, atol=1e-4)


def test_slopes_that_cannot_learn_are_refused_at_every_call() -> None:
    q = torch.randn(1, 8, 2, 8)
    slopes = torch.rand(2, requires_grad=True)
    beside = {"bias": torch.zeros(1, 1, 8, 8)}
    flashtile.attention(q, q, q, alibi_slopes=slopes.detach(), **beside)  # the signature is known then
    with pytest.raises(NotImplementedError, match="alibi_slopes requires grad"):
        flashtile.attention(q, q, q, alibi_slopes=slopes, **beside)
    with pytest.raises(NotImplementedError, match="alibi_slopes requires grad"):
        torch.func.grad(lambda s: flashtile.attention(q, q, q, alibi_slopes=s, **beside).sum())(
            slopes.detach()
        )
    hidden = torch.func.vmap(lambda s: flashtile.attention(q, q, q, alibi_slopes=s, **beside))
    with pytest.raises(NotImplementedError, match="alibi_slopes requires grad"):
        hidden(slopes[None]).sum().backward()
    assert not flashtile.attention(q, q, q, alibi_slopes=slopes.detach()).requires_grad
    assert flashtile.flash_attn_func(q, q, q, alibi_slopes=slopes).requires_grad
