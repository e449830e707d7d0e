"""Guards: whether a call may use the launch of another one, whose tensors have other addresses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.op import operation
from walk import walk


@pytest.fixture(params=["compiled", "plain"])
def guard(request, monkeypatch) -> Any:
    """Guards of torch.compile, and what takes their place in a torch without them."""
    if request.param == "plain":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    return operation.guard


def pair(**options: Any) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, **options), torch.randn(2, 1, 8)[..., ::2]


DIFFERENT = {
    "shape": lambda t: t[:2], "strides": lambda t: t.t().contiguous().t(), "dtype": lambda t: t.double(),
    "dimensions": lambda t: t[None], "device": lambda t: t.to("meta"),
    "subclass": lambda t: t.as_subclass(type("Subclass", (Tensor,), {})),
    "requires_grad": lambda t: t.requires_grad_(), "fake": lambda t: fake(t),
}  # fmt: skip


def fake(tensor: Tensor) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def test_other_tensors_of_the_same_kind(guard):
    serves = guard(pair())
    assert serves(*pair())
    assert serves(*pair())
    with torch.no_grad():
        assert serves(*pair())


@walk("name", DIFFERENT)
@walk("place", [0, 1])
def test_one_property_differs(guard, name, place):
    given = [torch.randn(3, 4), torch.randn(3, 4)]
    serves = guard(tuple(given))
    changed = list(torch.randn(2, 3, 4).unbind())
    assert serves(*changed)
    changed[place] = DIFFERENT[name](changed[place].clone())
    assert not serves(*changed)


def test_a_tensor_that_is_given_twice(guard):
    a, b = torch.randn(2, 3, 4)
    assert guard((a, a))(b, b)


@pytest.mark.parametrize("transform", ["vmap", "grad", "trace"])
def test_transforms_and_traces(guard, transform):
    serves, found = guard((torch.randn(3, 4),)), []

    def call(x: Tensor) -> Tensor:
        found.append(serves(x))
        return x.sum()

    if transform == "trace":
        torch.jit.trace(call, (torch.randn(3, 4),), check_trace=False)
    elif transform == "vmap":
        torch.func.vmap(call)(torch.randn(2, 3, 4))
    else:
        torch.func.grad(call)(torch.randn(3, 4))
    assert found == [False]


@pytest.mark.parametrize("context", [nullcontext, torch.inference_mode, torch.no_grad])
def test_a_guard_serves_the_mode_in_which_it_was_made(guard, context):
    with context():
        serves = guard(pair())
        assert serves(*pair())
