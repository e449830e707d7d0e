"""Results in float32, of which sums over devices are made."""

from __future__ import annotations

import pytest
import torch

import flashtile
import flashtile.testing
from flashtile.api import merge
from flashtile.operators.attention import BACKWARD, FORWARD
from flashtile.problems.attention import NO_EXTRAS, OptionalTensors, Options
from flashtile.problems.masking import CAUSAL
from targets import Target

pytestmark = pytest.mark.numerical


def relative(x: torch.Tensor, right: torch.Tensor) -> float:
    return ((x - right).norm() / right.norm()).item()


def test_they_are_not_rounded(target: Target):
    """Nearer to float64 than what is rounded to 16 bits by more than half of a rounding's own error."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, 37, 4, 32, device=target.device, dtype=torch.float16).unbind()
    k, v = torch.randn(2, 1, 50, 2, 32, device=target.device, dtype=torch.float16).unbind()
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact = flashtile.reference.attention.attention(*leaves, causal=True)[0]
    right = [exact, *torch.autograd.grad(exact, leaves, dout.double())]
    options = Options(masking=CAUSAL, backend=target.backend, partial=True)
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
    extras = OptionalTensors(offsets, offsets)
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
    arguments = FORWARD.flat((q, q, q), NO_EXTRAS, options)
    torch.library.opcheck(FORWARD.operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("empty", [(), ("first",), ("second",), ("first", "second")])
@pytest.mark.parametrize(("start", "rows"), [(0, 35), (7, 20)])
@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merging_in_place_is_merging(empty, start, rows, kernel, dtype):
    """Of all rows and of some; where neither state has keys, out is 0."""
    torch.manual_seed(0)
    heads, tokens, width = 3, 35, 40
    out, lse = torch.randn(2, tokens, heads, width), 4 * torch.randn(2, heads, tokens)
    more, more_lse = torch.randn(2, rows, heads, width), 4 * torch.randn(2, heads, rows)
    if "first" in empty:
        out[:, start + 2], lse[:, :, start + 2] = 0.0, -torch.inf
    if "second" in empty:
        more[:, 2], more_lse[:, :, 2] = 0.0, -torch.inf
    others = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    others[0][:, start : start + rows], others[1][:, :, start : start + rows] = more, more_lse
    right_out, right_lse = flashtile.merge_states(out, lse, *others)
    merge_into = merge.merge_into
    if kernel:
        from flashtile.backends.portable.merging import merge as merge_into
    found = merge_into(out, lse, more, more_lse, start, dtype)
    assert (found is out) == (dtype == torch.float32)
    torch.testing.assert_close(found, right_out.to(dtype))
    torch.testing.assert_close(lse, right_lse)
