"""Attention weights on every backend: all of them, their column sums, the top of each row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashtile
from cases import FP32, Case
from flashtile import masks
from flashtile.api.probabilities import probabilities
from flashtile.problems.attention import WeightsProblem
from targets import Target

CALL = Case(name="weights", seqlen_q=37, seqlen_k=45, head_dim=24, dtype=FP32)
SMALL = replace(CALL, batch=1, seqlen_q=20, seqlen_k=40, heads_q=2, heads_kv=1, head_dim=16)
PACKED = replace(CALL, lengths=((5, 9), (0, 4), (3, 0), (18, 30)), unused_tail=2, slack=1)
CALLS = {
    "causal": replace(CALL, causal=True),
    "no-keys": replace(CALL, seqlen_q=45, seqlen_k=37, causal=True, layout="offset"),
    "window": replace(CALL, window_size=(9, 4), softcap=2.0, alibi="batch", sink="float32"),
    "masks": replace(CALL, mask="bhq", padding="left", bias="hq", dropout_p=0.3),
    "chunk": replace(CALL, attention_chunk=7, unused_keys=3, unused_rows=2, softmax_scale=-0.2),
    "packed": replace(PACKED, causal=True, bias="b", unused_keys=1),
    "one-head": replace(CALL, batch=1, seqlen_q=5, heads_q=1, heads_kv=1, head_dim=16, causal=True),
    "half": replace(CALL, dtype=torch.float16),
}
INTERPRETED = {"window": ("full",), "packed": ("full", "columns"), "masks": ("columns",), "one-head": (5,)}
FORMS = ("full", "columns", 5, 64)


def forms_of(target: Target, name: str) -> tuple:
    return INTERPRETED.get(name, ()) if target.name == "interpreter" else FORMS


def check(target: Target, forms: tuple, q, k, v, arguments: dict) -> None:
    """Against standard attention in float64, which stores every probability."""
    exact = probabilities(
        *(t.double() for t in (q, k, v)),
        **{n: a for n, a in arguments.items() if n not in ("dropout_p", "rng_state")},
    )
    atol = {torch.float16: 1e-3}.get(q.dtype, 2e-6)
    offsets = arguments.get("cu_seqlens_k"), arguments.get("cu_seqlens_q")
    for form in forms:
        out, lse, found = flashtile.attention(
            q, k, v, **arguments, return_lse=True, return_attn_weights=form, backend=target.backend
        )
        plain, plain_lse = flashtile.attention(q, k, v, **arguments, return_lse=True, backend=target.backend)
        assert torch.equal(out, plain)
        assert torch.equal(lse, plain_lse)
        if form == "full":
            assert found.dtype == q.dtype
            torch.testing.assert_close(found.double(), exact, atol=atol, rtol=1e-4)
        elif form == "columns":
            expected = packed(exact.sum(2), offsets[0], k)
            torch.testing.assert_close(found.double(), expected, atol=30 * atol, rtol=1e-4)
        else:
            check_top(found, packed(exact, offsets[1], q), form, atol)


def packed(padded, offsets, tokens):
    """What is (batch, heads, longest, ...), as packed sequences have it; zero behind the last."""
    if offsets is None:
        return padded
    result = padded.new_zeros((padded.shape[1], len(tokens), *padded.shape[3:]))
    for b, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        result[:, start:end] = padded[b, :, : end - start]
    return result


def check_top(found, exact, top: int, atol: float) -> None:
    expected = torch.nn.functional.pad(exact, (0, top)).topk(top, -1).values
    torch.testing.assert_close(found.weights.double(), expected, atol=atol, rtol=1e-4)
    there = found.indices >= 0
    at = exact.gather(-1, found.indices.clamp(0, exact.shape[-1] - 1))
    torch.testing.assert_close(found.weights[there].double(), at[there], atol=atol, rtol=1e-4)
    assert (found.weights[~there] == 0).all()
    # A row keeps as many as it sees, each key once.
    assert torch.equal(there.sum(-1), (exact > 0).sum(-1).clamp(max=top))
    for row, kept in zip(found.indices.flatten(0, -2).tolist(), there.flatten(0, -2).sum(-1), strict=True):
        assert len(set(row[:kept])) == kept


@pytest.mark.parametrize("name", CALLS)
def test_weights(target: Target, name: str) -> None:
    forms = forms_of(target, name)
    if not forms:
        pytest.skip("the interpreter takes seconds")
    case = CALLS[name]
    if target.name == "interpreter" and case.lengths is None and case.heads_q > 1:
        small = {"batch": 1, "seqlen_q": 20, "seqlen_k": 40, "heads_q": 2, "heads_kv": 1, "head_dim": 16}
        case = replace(case, **small)
    inputs = case.inputs(target.device)
    check(target, forms, *inputs.qkv, inputs.arguments)


def test_weights_of_functions_and_block_masks(target: Target) -> None:
    case = SMALL if target.name == "interpreter" else CALL
    q, k, v = case.inputs(target.device).qkv
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.2], device=target.device)[: case.heads_q].requires_grad_()
    seen = masks.dilated(3, 4) & masks.causal() & masks.mask_mod(lambda b, h, q, kv: q % 7 != 3)
    given = {"score_mod": masks.alibi(slopes, offset=8), "mask_mod": seen}
    lengths = case.batch, case.heads_q, case.seqlen_q, case.seqlen_k
    blocks = masks.create_block_mask(given["mask_mod"], *lengths, target.device, (16, 16))
    listed = {"score_mod": given["score_mod"], "block_mask": blocks}
    calls = [(given, ("columns",)), (listed, ("full", 20))]  # more weights than a block has keys
    if target.name != "interpreter":
        calls = [(given, FORMS), (listed, FORMS)]
    for arguments, forms in calls:
        check(target, forms, q, k, v, arguments)


def test_the_largest_of_wide_heads_are_refused_where_they_do_not_fit() -> None:
    pytest.importorskip("triton")
    from flashtile.backends.portable.weights import reason_of_top

    def problem(head_dim: int, top: int, dtype: torch.dtype = torch.bfloat16) -> WeightsProblem:
        q = torch.empty(1, 4, 2, head_dim, dtype=dtype)
        return WeightsProblem.from_tensors(q, q, q, form="top", top=top)

    assert reason_of_top(problem(512, 128)) is None
    assert reason_of_top(problem(576, 64)) is None
    assert "largest 128 weights of a row, of heads of 576" in str(reason_of_top(problem(576, 128)))
    assert "float32" in str(reason_of_top(problem(512, 128, FP32)))


def test_weights_have_no_gradient_and_out_has() -> None:
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 8, 2, 16).unbind())
    out, weights = flashtile.attention(q, k, v, return_attn_weights=True)
    expected = torch.autograd.grad(flashtile.attention(q, k, v).sum(), (q, k, v))
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True), expected))
    with pytest.raises(NotImplementedError, match=r"q must not require a gradient: weights have none"):
        weights.sum().backward()
    torch._dynamo.reset()  # other tests may have reached the limit of recompilations
    compiled = torch.compile(flashtile.attention, backend="eager", fullgraph=True)
    top = compiled(q.detach(), k.detach(), v.detach(), return_attn_weights=3)[1]
    assert torch.equal(top.weights, weights.detach().topk(3, -1).values)


def test_weights_under_autocast() -> None:
    q, k = torch.randn(2, 1, 8, 2, 16).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        _, weights = flashtile.attention(q, k, k, return_attn_weights=True)
        _, lse = flashtile.attention(q, k, k, return_lse=True)
        assert torch.equal(flashtile.attention_weights(q, k, lse, "full"), weights)
    assert weights.dtype == torch.bfloat16
    half = q.bfloat16(), k.bfloat16()
    assert torch.equal(weights, flashtile.attention_weights(*half, lse, "full"))


def test_what_takes_part_is_said() -> None:
    q = torch.randn(1, 8, 2, 16)
    lse = torch.zeros(1, 2, 8)
    for form, error, text in (
        ("all", ValueError, "\"columns\" or an int from 1 to 128, got 'all'"),
        (0, ValueError, "from 1 to 128, got 0"),
        (129, ValueError, "from 1 to 128, got 129"),
        (1.5, TypeError, "got float 1.5"),
    ):
        with pytest.raises(error, match=f"return_attn_weights must be .*{text}"):
            flashtile.attention(q, q, q, return_attn_weights=form)
        with pytest.raises(error, match=f"form must be .*{text}"):
            flashtile.attention_weights(q, q, lse, form)
    with pytest.raises(ValueError, match=r"lse must have shape \(1, 2, 8\), got \(1, 8, 2\)"):
        flashtile.attention_weights(q, q, lse.mT)
    with pytest.raises(TypeError, match=r"lse must be torch\.float32, got torch\.float64"):
        flashtile.attention_weights(q, q, lse.double())
    with pytest.raises(TypeError, match=r"attention_weights\(\) got an unexpected keyword argument 'caused'"):
        flashtile.attention_weights(q, q, lse, caused=True)
    with pytest.raises(NotImplementedError, match="hopper: it has no kernels for weights"):
        flashtile.attention_weights(q, q, lse, backend="hopper")
    explanation = flashtile.explain(q, q, q, return_attn_weights=True)
    assert explanation.operations == ("forward", "backward", "weights")
    assert explanation.backend == "cpu"
