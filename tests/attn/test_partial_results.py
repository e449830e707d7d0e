"""Results in float32, of which sums over devices are made."""

from __future__ import annotations

import pytest
import torch

import flashtile
import flashtile.testing
from flashtile.attn.operators import BACKWARD, FORWARD
from flashtile.attn.problem import NO_EXTRAS, Extras, Options
from flashtile.merge import merge_into
from targets import Target


def relative(x: torch.Tensor, right: torch.Tensor) -> float:
    return ((x - right).norm() / right.norm()).item()


def test_they_are_not_rounded(target: Target):
    """Nearer to float64 than what is rounded to 16 bits by more than half of a rounding's own error."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, 37, 4, 32, device=target.device, dtype=torch.float16).unbind()
    k, v = torch.randn(2, 1, 50, 2, 32, device=target.device, dtype=torch.float16).unbind()
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact = flashtile.reference.attention(*leaves, causal=True)[0]
    right = [exact, *torch.autograd.grad(exact, leaves, dout.double())]
    options = Options(causal=True, backend=target.backend, partial=True)
    out, lse = FORWARD.launch((q, k, v), NO_EXTRAS, options)
    tensors = (dout, None, q, k, v, out.half(), lse)
    found = [out, *BACKWARD.launch(tensors, NO_EXTRAS, options)[:3]]
    rounded = FORWARD.launch((q, k, v), NO_EXTRAS, options._replace(partial=False))
    whole = [rounded[0], *BACKWARD.launch(tensors, NO_EXTRAS, options._replace(partial=False))[:3]]
    torch.testing.assert_close(lse, rounded[1], rtol=1e-4, atol=1e-4)  # of scores in 16 bits on some CPUs
    for part, of_16_bits, of_float64 in zip(found, whole, right, strict=True):
        assert part.dtype == torch.float32
        assert of_16_bits.dtype == torch.float16
        assert relative(part, of_float64) < relative(of_16_bits, of_float64)
        assert not torch.equal(part, part.half().float())


def test_tokens_of_no_sequence_are_zero(target: Target):
    q, k, v = torch.randn(3, 9, 2, 16, device=target.device, dtype=torch.float16).unbind()
    offsets = torch.tensor([0, 4, 7], dtype=torch.int32, device=target.device)
    extras = Extras(offsets, offsets)
    options = Options(max_seqlen_q=4, max_seqlen_k=4, backend=target.backend, partial=True)
    with flashtile.testing.poisoned_memory():
        out, lse = FORWARD.launch((q, k, v), extras, options)
        gradients = BACKWARD.launch((out.half(), None, q, k, v, out.half(), lse), extras, options)[:3]
    assert out.dtype == torch.float32
    for result in (out, *gradients):
        assert not result[7:].any()
        assert result[:7].isfinite().all()
    assert (lse[:, 7:] == -torch.inf).all()


def test_the_operators_know_their_dtypes():
    q = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    options = Options(partial=True)
    arguments = (q, q, q, *NO_EXTRAS, *options)
    torch.library.opcheck(FORWARD.operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("empty", [(), ("first",), ("second",), ("first", "second")])
def test_merging_in_place_is_merging(empty):
    torch.manual_seed(0)
    states = [(torch.randn(2, 5, 3, 8), 4 * torch.randn(2, 3, 5)) for _ in range(2)]
    for name, (out, lse) in zip(("first", "second"), states, strict=True):
        if name in empty:
            out[:, 2], lse[:, :, 2] = 0.0, -torch.inf
    right = flashtile.merge_states(*states[0], *states[1])
    merge_into(*states[0], *states[1])
    torch.testing.assert_close(states[0], right)
