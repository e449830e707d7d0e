"""Gradients of FP8 attention: those of the 16-bit backward pass over what is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashtile
from cases import BF16, CASES, FP16
from flashtile import fp8
from flashtile.compat import flash_attn_interface
from flashtile.operators import fp8_gradients
from flashtile.operators.gradients import attention_backward
from flashtile.problems.fp8_layout import E4M3
from flashtile.reference.decode import turn
from flashtile.testing import fp8 as testing
from targets import CUDA, INTERPRETING, Target

pytestmark = pytest.mark.numerical

BY_NAME = {case.name: case for case in CASES}
INTERPRETED = ["tiny-full", "tiny-causal", "tiny-sink-causal", "tiny-varlen-causal"]
NAMES = [
    *INTERPRETED, "tiny-everything", "tiny-window", "tiny-softcap", "tiny-alibi-batch", "tiny-used-window",
    "tiny-more-queries-causal", "tiny-varlen-everything", "tiny-varlen-tail-window",
    "tiny-no-keys-everything", "tiny-varlen-no-keys-full", "tiny-batch-0-full", "tiny-heads-6-2-causal",
    "tiny-d59-causal", "tiny-d40-8-causal", "tiny-packed-causal", "medium-causal", "medium-varlen-everything",
    "medium-bf16-everything",
]  # fmt: skip
CPU_ONLY = pytest.mark.skipif(
    INTERPRETING, reason="Triton's interpreter is slow, and does not compute bfloat16"
)
METHODS = [("block", True), ("head", False), ("tensor", True)]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def learning(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def qkv(seqlen: int = 150, dtype: torch.dtype = BF16) -> list[Tensor]:
    return learning(*(random(2, seqlen, heads, 32, dtype=dtype, seed=heads + i)
                      for i, heads in enumerate((4, 2, 2))))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "method", "hadamard"),
    [
        # No kernel decides what the CPU's tests of all names show.
        *((name, *METHODS[i % 3]) for i, name in enumerate(INTERPRETED if INTERPRETING or CUDA else NAMES)),
        *(("tiny-varlen-tail-causal", *one) for one in ([] if INTERPRETING else METHODS)),
    ],
)
def test_gradients_are_those_of_the_backward_pass_over_what_is_stored(
    target: Target, name: str, method: str, hadamard: bool
) -> None:
    """Of the same lse and out, bit for bit; rows that see nothing get 0."""
    if not target.takes(BY_NAME[name]):
        pytest.skip(f"{target.name} does not take {name}")
    inputs = BY_NAME[name].inputs(target.device)
    arguments, call = dict(inputs.arguments), {"method": method, "hadamard": hadamard, "seed": 3}
    sink = arguments.get("sink")
    if sink is not None:
        arguments["sink"] = sink = sink.detach().clone().requires_grad_()
    q, k, v = tensors = learning(*inputs.qkv)
    given = {"deterministic": True, "backend": target.backend}
    out, lse = fp8.attention(q, k, v, **arguments, **call, **given, return_lse=True)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    found = torch.autograd.grad(out, [*tensors, *([] if sink is None else [sink])], dout)

    parts = testing.quantize_call(*inputs.qkv, **call, **arguments, backend=target.backend)
    stored = [x.dequantize().to(q.dtype).contiguous() for x in parts]
    if sink is not None:
        arguments["sink"] = sink.detach().float()
    *expected, dsink = attention_backward(dout, *stored, out.detach(), lse.detach(), **arguments, **given)
    if sink is not None:
        expected.append(dsink.to(sink.dtype))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()
    assert not found[0][lse.mT.isneginf()].any()


@CPU_ONLY
@pytest.mark.parametrize("method", ["block", "head"])
def test_the_lse_of_the_forward_pass_leaves_no_more_than_the_rounding_of_p(method: str) -> None:
    """The probabilities that the backward pass recomputes, and rowsum(dout out), are those of e4m3's pass.

    e4m3 rounds a probability by at most 2**-4 of it; bfloat16 rounds operands and results by 2**-8.
    """
    q, k, v = qkv()
    out = fp8.attention(q, k, v, causal=True, method=method)
    dout = random(*out.shape)
    found = torch.autograd.grad(out, (q, k, v), dout)
    heads = [x.dequantize(torch.float64).movedim(1, 2) for x in testing.quantize_call(q, k, v, method=method)]
    q, k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in heads)
    scale, dout = q.shape[-1] ** -0.5, dout.double().movedim(1, 2)
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    p = (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1)
    dp = dout @ v.mT
    delta, moved = (p * dp).sum(-1, True), (p * dp.abs()).sum(-1, True)
    ds = p * (dp - delta) * scale
    error = p * (2**-4 * moved + 2**-5 * (dp.abs() + moved)) * scale
    exact = ds @ k, ds.mT @ q, p.mT @ dout
    bounds = error @ k.abs(), error.mT @ q.abs(), 2**-5 * p.mT @ dout.abs()
    for ours, theirs, bound in zip(found, exact, bounds, strict=True):
        shape = ours.movedim(1, 2).shape
        theirs, bound = (x.unflatten(1, (shape[1], -1)).sum(2) for x in (theirs, bound))
        assert ((ours.movedim(1, 2) - theirs).abs() <= bound + 2**-8 * theirs.abs() + 1e-6).all()


@CPU_ONLY
def test_gradients_of_lse_alone_are_the_probabilities() -> None:
    q, k, v = qkv()
    _, lse = fp8.attention(q, k, v, return_lse=True)
    dq, dv = torch.autograd.grad(lse.sum(), (q, v))
    parts = [x.dequantize(torch.float64) for x in testing.quantize_call(q, k, v)]
    parts[0].requires_grad_()
    _, exact = flashtile.reference.attention.attention(*parts, upcast=torch.float64)
    (expected,) = torch.autograd.grad(exact.sum(), parts[0])
    assert (dq - expected).abs().max() < 2**-5 * expected.abs().max()
    assert not dv.any()


@CPU_ONLY
def test_containers_pass_their_gradients_on() -> None:
    """Quantised before the call or within it, and changed in place afterwards; used twice, they add up."""
    q, k, v = qkv()
    within = torch.autograd.grad(fp8.attention(q, k, v, causal=True).sum(), (q, k, v))
    copies = [x * 1 for x in (q, k, v)]
    parts = [fp8.quantize(x, role).to("cpu") for x, role in zip(copies, "qkv", strict=True)]
    copies[1].mul_(2)
    before = torch.autograd.grad(fp8.attention(*parts, causal=True).sum(), (q, k, v), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(within, before, strict=True))
    (twice,) = torch.autograd.grad(
        fp8.attention(*parts, causal=True).sum() + fp8.attention(*parts).sum(), k, retain_graph=True
    )
    (other,) = torch.autograd.grad(fp8.attention(*parts).sum(), k, retain_graph=True)
    torch.testing.assert_close(twice, within[1] + other, rtol=2**-6, atol=2**-6)


@CPU_ONLY
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_one_learns_and_under_no_grad_none(name: str) -> None:
    call = {n: x.detach() for n, x in zip("qkv", qkv(), strict=True)}
    call[name].requires_grad_()
    fp8.attention(**call).sum().backward()
    assert call[name].grad.any()
    with torch.no_grad():
        assert not fp8.attention(**call).requires_grad
        assert fp8.quantize(call[name], name).source is None


@CPU_ONLY
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_quantising_is_rotary_embedding_for_gradients(packed: bool, interleaved: bool) -> None:
    """The transform, the scale and rounding are the identity; rows not in use get 0.

    Two packed rows belong to no sequence.
    """
    cos, sin = random(40, 8).float().cos(), random(40, 8).float().sin()
    cu_seqlens = torch.tensor([0, 4, 4, 13], dtype=torch.int32)
    place = torch.cat([torch.arange(4), torch.arange(11)]) if packed else torch.arange(13).expand(3, 13)
    sequence = torch.tensor([0] * 4 + [2] * 11) if packed else torch.arange(3)[:, None]
    first, used = torch.tensor([3, 0, 34]).int(), torch.tensor([4, 0, 5]).int()
    x = random(*((15,) if packed else (3, 13)), 2, 24).requires_grad_()
    more = {"cu_seqlens": cu_seqlens, "max_seqlen": 9} if packed else {}
    stored = fp8.quantize(
        x, "k", rotary_cos=cos, rotary_sin=sin, rotary_offset=first, seqused=used,
        rotary_interleaved=interleaved, **more,
    )  # fmt: skip
    dx = random(*x.shape, seed=5)
    (found,) = torch.autograd.grad(stored.source, x, dx)
    at = (place + first[sequence]).clamp(max=39)
    wide = x.detach().double().requires_grad_()
    turned = turn(wide, cos[at].unsqueeze(-2).double(), sin[at].unsqueeze(-2).double(), interleaved)
    (expected,) = torch.autograd.grad(turned, wide, dx.double() * (place < used[sequence])[..., None, None])
    assert (found - expected).abs().max() < 2**-7 * expected.abs().max()
    assert torch.equal(found == 0, expected == 0)


@CPU_ONLY
def test_rotary_embedding_within_the_call_is_differentiated() -> None:
    q, k, v = qkv()
    angles = torch.outer(torch.arange(150.0), 10.0 ** -torch.arange(8.0))
    cos, sin = angles.cos(), angles.sin()
    out = fp8.attention(q, k, v, causal=True, rotary_cos=cos, rotary_sin=sin)
    found = torch.autograd.grad(out.float().square().sum(), (q, k))
    rotated = [turn(x.float(), cos[:, None], sin[:, None], False) for x in (q, k)]
    exact, _ = flashtile.reference.attention.attention(*rotated, v.float(), causal=True)
    for ours, theirs in zip(found, torch.autograd.grad(exact.square().sum(), (q, k)), strict=True):
        assert torch.cosine_similarity(ours.flatten().float(), theirs.flatten().float(), dim=0) > 0.99


@CPU_ONLY
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_gradients_compile_without_graph_breaks(dynamic: bool) -> None:
    torch._dynamo.reset()

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = fp8.quantize(k * 2, "k", seed=2), fp8.quantize(v, "v")
        return fp8.attention(q + 1, *cache, causal=True)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seqlen in (40, 150) if dynamic else (40,):
        q, k, v = qkv(seqlen)
        found, expected = (torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, model))
        for ours, eager in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, eager, rtol=2**-6, atol=2**-6)


@CPU_ONLY
def test_e4m3_leaves_have_gradients() -> None:
    """FlashAttention-3's tests pass such leaves. torch rounds to e4m3 unless a leaf asks for more."""
    q, k, v = tensors = [x.detach().to(E4M3).requires_grad_() for x in qkv()]
    scale = 0.5 + torch.rand(2, 2, generator=torch.Generator().manual_seed(0))
    call = {"causal": True, "q_descale": scale, "v_descale": scale[:, :1].expand(2, 2)}
    out = flash_attn_interface.flash_attn_func(*tensors, **call)
    with torch.no_grad():
        assert torch.equal(out, flash_attn_interface.flash_attn_func(*tensors, **call))
    dout = random(*out.shape)
    found = torch.autograd.grad(out, tensors, dout)
    wide = [x.detach().to(BF16) for x in (q, k, v)]
    wide[0] = wide[0] * scale.repeat_interleave(2, 1)[:, None, :, None]
    wide[2] = wide[2] * scale[:, None, :1, None]
    plain = learning(*(x.to(BF16) for x in wide))
    expected = list(torch.autograd.grad(flashtile.attention(*plain, causal=True), plain, dout))
    expected[0] = expected[0] * scale.repeat_interleave(2, 1)[:, None, :, None]
    expected[2] = expected[2] * scale[:, None, :1, None]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == E4M3
        assert torch.cosine_similarity(ours.flatten().float(), theirs.flatten().float(), dim=0) > 0.99
    if hasattr(q, "grad_dtype"):
        q.grad_dtype = BF16
        for _ in range(2):
            flash_attn_interface.flash_attn_func(*tensors[:1], k.detach(), v.detach()).sum().backward()
        assert q.grad.dtype == BF16


@CPU_ONLY
def test_derivatives_that_do_not_exist_are_refused_by_name() -> None:
    q, k, v = qkv(9)
    with pytest.raises(NotImplementedError, match="create_graph must be False"):
        torch.autograd.grad(fp8.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="q must not require a gradient"):
        torch.func.grad(lambda q: fp8.attention(q, k.detach(), v.detach()).sum())(q.detach())
    with pytest.raises(NotImplementedError, match="tangents"):
        torch.func.jvp(lambda q: fp8.attention(q, k.detach(), v.detach()), (q.detach(),), (q.detach(),))
    learned = torch.ones(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="alibi_slopes must not require"):
        fp8.attention(q, k, v, alibi_slopes=learned)
    table = {"rotary_cos": torch.ones(9, 4, requires_grad=True), "rotary_sin": torch.ones(9, 4)}
    with pytest.raises(NotImplementedError, match="rotary_cos must not require"):
        fp8.attention(q, k, v, **table)
    stored = [x.detach().to(E4M3) for x in (q, k, v)]
    stored[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="k_descale must not require"):
        flashtile.attention(*stored, k_descale=torch.ones(2, 2, requires_grad=True))


@CPU_ONLY
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    q, k, v = qkv(40)
    (expected,) = torch.autograd.grad(fp8.attention(q, k, v).sum(), k)
    checkpoint(fp8.attention, q, k, v, use_reentrant=reentrant).sum().backward()
    assert torch.equal(k.grad, expected)


@CPU_ONLY
def test_a_batch_of_gradients_is_each_of_them() -> None:
    q, k, v = qkv(40)
    out = fp8.attention(q, k, v)
    douts = torch.stack([random(*out.shape, seed=i) for i in range(2)])
    (many,) = torch.autograd.grad(out, k, douts, retain_graph=True, is_grads_batched=True)
    for dout, ours in zip(douts, many, strict=True):
        (one,) = torch.autograd.grad(out, k, dout, retain_graph=True)
        torch.testing.assert_close(ours, one, rtol=2**-6, atol=2**-6)


@CPU_ONLY
def test_calls_without_gradients_have_no_node(monkeypatch) -> None:
    monkeypatch.setattr(fp8_gradients.Fp8Attention, "apply", None)
    monkeypatch.setattr(fp8_gradients.StraightThrough, "apply", None)
    fp8.attention(*(x.detach() for x in qkv(9)))


@CPU_ONLY
def test_float16_and_autocast() -> None:
    for dtype, context in (
        (FP16, torch.autocast("cpu", enabled=False)),
        (torch.float32, torch.autocast("cpu", BF16)),
    ):
        tensors = qkv(40, dtype)
        with context:
            fp8.attention(*tensors).sum().backward()
        assert all(x.grad.dtype == dtype for x in tensors)


def quantizer(target: Target) -> str | None:
    """The backend that quantises: Hopper has none of its own."""
    return None if target.backend == "hopper" else target.backend


def outputs_and_gradients(target: Target, inputs: list[Tensor], upto: int, **how: Any) -> tuple[Tensor, ...]:
    """Return out and the gradients of q, k and v before row ``upto``, for a loss of these rows of out."""
    tensors = learning(*inputs)
    scales = how.pop("scales", (None,) * 3)
    parts = [
        fp8.quantize(x, role, scale=scale, backend=quantizer(target), **how)
        for x, role, scale in zip(tensors, "qkv", scales, strict=True)
    ]
    out = fp8.attention(*parts, causal=True, deterministic=True, backend=target.backend)[:, :upto]
    gradients = torch.autograd.grad(out.float().square().sum(), tensors)
    assert not any(dx[:, upto:].any() for dx in gradients)
    return out, *(dx[:, :upto] for dx in gradients)


@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "transformed"])
@pytest.mark.parametrize(
    ("method", "given", "upto", "leaks"),
    [
        ("head", True, 37, False),
        ("tensor", True, 37, False),
        pytest.param("tensor", True, 130, False, marks=CPU_ONLY),
        pytest.param("block", False, 128, False, marks=CPU_ONLY),  # a block of keys ends there
        pytest.param("block", False, 127, True, marks=CPU_ONLY),
        pytest.param("head", False, 128, True, marks=CPU_ONLY),
        pytest.param("tensor", False, 128, True, marks=CPU_ONLY),
    ],
)
def test_what_later_tokens_change(
    target: Target, method: str, given: bool, upto: int, leaks: bool, hadamard: bool
) -> None:
    """Scales that the caller gives let no later token change an output or a gradient by a bit.

    Scales computed from tokens do, up to the end of a block (TransformerEngine's issue 3248).
    """
    seqlen = upto + 9
    before = [random(1, seqlen, 2, 16, dtype=FP16, seed=i).to(target.device) for i in range(3)]
    after = [torch.cat([x[:, :upto], 50 * x[:, upto:] + 3], 1) for x in before]
    how: dict[str, Any] = {"method": method, "hadamard": hadamard}
    if given:
        shapes = ((1, 2), (1, 2), (1, 1)) if method == "head" else ((1, 1),) * 3
        how["scales"] = [torch.full(shape, 4 / 448, device=target.device) for shape in shapes]
    found = [outputs_and_gradients(target, tensors, upto, **how) for tensors in (before, after)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) is not leaks
