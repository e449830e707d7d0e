"""merge_states: attention over a union of key sets."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor

from cases import BF16, FP16, FP32, FP64
from flashtile import merge_states, testing
from flashtile.reference import attention as reference


def states(parts: int, dtype=FP64, varlen: bool = False) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of one query set over ``parts`` random key sets of different lengths."""
    q = testing.random_tensor((2, 5, 3, 4), dtype, "cpu", seed=0)
    found = []
    for i in range(parts):
        shape = (2, 3 + 2 * i, 3, 4)
        k, v = (testing.random_tensor(shape, dtype, "cpu", seed=10 + 2 * i + j) for j in range(2))
        out, lse = reference.attention(q, k, v)
        found.append((out[0], lse[0]) if varlen else (out, lse))
    return found


def near(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_parts_of_the_keys_make_the_whole(cut: int) -> None:
    q, k, v = (testing.random_tensor((2, s, 3, 4), FP64, "cpu", seed=i) for i, s in enumerate((5, 9, 9)))
    parts = [reference.attention(q, k[:, part], v[:, part]) for part in (slice(cut), slice(cut, None))]
    near(merge_states(*parts[0], *parts[1]), reference.attention(q, k, v))


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_order_and_grouping_do_not_matter(varlen: bool) -> None:
    a, b, c, d = states(4, varlen=varlen)
    near(merge_states(*a, *b), merge_states(*b, *a))
    left = functools.reduce(lambda x, y: merge_states(*x, *y), (a, b, c, d))
    near(merge_states(*merge_states(*a, *b), *merge_states(*c, *d)), left)


@pytest.mark.parametrize("parts", [3, 7])
def test_any_number_of_parts_at_once(parts: int) -> None:
    q, k, v = (testing.random_tensor((2, s, 3, 4), FP64, "cpu", seed=i) for i, s in enumerate((5, 20, 20)))
    cuts = [0, *range(1, parts), 20]
    found = [reference.attention(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(cuts)]
    near(merge_states(*itertools.chain.from_iterable(found)), reference.attention(q, k, v))


def test_many_parts_are_rounded_once() -> None:
    found = states(5, BF16)
    out, lse = merge_states(*itertools.chain.from_iterable(found))
    exact = merge_states(*(t.double() for t in itertools.chain.from_iterable(found)))
    torch.testing.assert_close(out.double(), exact[0], rtol=torch.finfo(BF16).eps / 2 * 1.01, atol=1e-7)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=1e-6)


def test_out_of_a_part_without_keys_is_not_looked_at() -> None:
    ((out, lse),) = states(1)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    near(merge_states(out, lse, *nothing, *nothing), (out, lse))


def test_more_parts_are_checked_too() -> None:
    a, b, c = states(3)
    with pytest.raises(ValueError, match="pairs of out and lse, got 1"):
        merge_states(*a, *b, c[0])
    with pytest.raises(TypeError, match=r"out_2 has dtype torch\.float32, but out_a has torch\.float64"):
        merge_states(*a, *b, c[0].float(), c[1])
    with pytest.raises(ValueError, match="lse_2 has shape"):
        merge_states(*a, *b, c[0], c[1][:1])


@pytest.mark.parametrize("mark", [-torch.inf, torch.inf], ids=["-inf", "+inf"])
def test_a_row_without_keys_adds_nothing(mark: float) -> None:
    ((out, lse),) = states(1)
    nothing = torch.zeros_like(out), torch.full_like(lse, mark)
    near(merge_states(out, lse, *nothing), (out, lse))
    near(merge_states(*nothing, out, lse), (out, lse))


@pytest.mark.parametrize("marks", [(-torch.inf, -torch.inf), (torch.inf, -torch.inf), (torch.inf, torch.inf)])
def test_two_rows_without_keys_stay_without(marks: tuple[float, float]) -> None:
    ((out, lse),) = states(1)
    zero = torch.zeros_like(out)
    merged = merge_states(zero, torch.full_like(lse, marks[0]), zero, torch.full_like(lse, marks[1]))
    near(merged, (zero, torch.full_like(lse, -torch.inf)))


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_exponents_beyond_float32(size: float) -> None:
    (out_a, lse_a), (out_b, lse_b) = states(2, FP32)
    out, lse = merge_states(out_a, lse_a + size, out_b, lse_b + size)
    expected_out, expected_lse = merge_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out, expected_out, rtol=1e-2, atol=1e-2)  # lse itself keeps three decimals
    torch.testing.assert_close(lse - size, expected_lse, rtol=0, atol=2e-3)


def test_a_far_larger_part_wins() -> None:
    (out_a, lse_a), (out_b, lse_b) = states(2, FP32)
    torch.testing.assert_close(merge_states(out_a, lse_a + 500, out_b, lse_b), (out_a, lse_a + 500))
    torch.testing.assert_close(merge_states(out_a, lse_a - 500, out_b, lse_b), (out_b, lse_b))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64])
def test_dtypes_are_kept_and_rounded_once(dtype) -> None:
    (out_a, lse_a), (out_b, lse_b) = states(2, dtype)
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype
    assert lse.dtype == (FP64 if dtype == FP64 else FP32)
    exact = merge_states(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    torch.testing.assert_close(out.double(), exact[0], rtol=torch.finfo(dtype).eps, atol=3e-7)


def test_gradients_by_finite_differences() -> None:
    (out_a, lse_a), (out_b, lse_b) = states(2)
    leaves = [t.detach().requires_grad_() for t in (out_a, lse_a, out_b, lse_b)]
    assert torch.autograd.gradcheck(merge_states, leaves)
    assert torch.autograd.gradgradcheck(merge_states, leaves)


@pytest.mark.parametrize("mark", [-torch.inf, torch.inf], ids=["-inf", "+inf"])
def test_gradients_beside_rows_without_keys(mark: float) -> None:
    """A row that one part, or both, has no key for: finite gradients, 0 into what adds nothing."""
    (out_a, lse_a), (out_b, lse_b) = states(2)
    lse_b[:, :, 1:3] = mark
    lse_a[:, :, 2] = mark
    leaves = [t.detach().requires_grad_() for t in (out_a, lse_a, out_b, lse_b)]
    out, lse = merge_states(*leaves)
    dout_a, dlse_a, dout_b, dlse_b = torch.autograd.grad((out.sum(), lse[lse.isfinite()].sum()), leaves)
    for gradient in (dout_a, dlse_a, dout_b, dlse_b):
        assert gradient.isfinite().all()
    near(dout_a[:, 1], torch.ones_like(dout_a[:, 1]))
    near(dlse_a[..., 1], torch.ones_like(dlse_a[..., 1]))
    for gradient in (dout_b[:, 1:3], dlse_b[..., 1:3], dout_a[:, 2], dlse_a[..., 2]):
        near(gradient, torch.zeros_like(gradient))


def test_inputs_are_not_written() -> None:
    a, b = states(2)
    b[1][:, :, 0] = torch.inf
    before = [t.clone() for t in (*a, *b)]
    merge_states(*a, *b)
    near((*a, *b), tuple(before))


BAD = {
    "rank": (lambda a, la, b, lb: (a[0, 0], la, b[0, 0], lb), ValueError, "out_a must have shape"),
    "out shapes": (lambda a, la, b, lb: (a, la, b[:1], lb), ValueError, "out_b has shape"),
    "lse shape": (lambda a, la, b, lb: (a, la.mT, b, lb), ValueError, "lse_a must have shape"),
    "lse of b": (lambda a, la, b, lb: (a, la, b, lb[:1]), ValueError, "lse_b has shape"),
    "out dtypes": (lambda a, la, b, lb: (a, la, b.float(), lb), TypeError, "out_b has dtype torch.float32"),
    "lse dtype": (lambda a, la, b, lb: (a, la.half(), b, lb), TypeError, "lse_a"),
    "not a tensor": (lambda a, la, b, lb: (a, la, b, 1.0), TypeError, "lse_b must be a torch.Tensor"),
    "device": (lambda a, la, b, lb: (a, la, b.to("meta"), lb), ValueError, "out_b is on meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    change, error, message = BAD[name]
    a, b = states(2)
    with pytest.raises(error, match=message):
        merge_states(*change(*a, *b))
