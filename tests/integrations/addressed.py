"""Launches on the CPU that take addresses, like those of compiled kernels.

A launch reads memory with the shapes, strides and dtypes of its first call. If it were used for tensors that
differ in one of these, its results would be wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flashtile.backends.cpu import decode as backend
from flashtile.integrations import paged
from flashtile.op import operation
from flashtile.problems.decode import AppendTensors, CacheTensors


class Form(NamedTuple):
    """What a compiled launch knows of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def at(self, address: int) -> Tensor:
        """Return the tensor at an address, as a view of its memory."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        count = (last + 1) * self.dtype.itemsize if 0 not in self.shape else 1
        memory = torch.frombuffer((ctypes.c_byte * count).from_address(address), dtype=torch.uint8)
        return (
            memory[: count // self.dtype.itemsize * self.dtype.itemsize]
            .view(self.dtype)
            .as_strided(self.shape, self.strides)
        )


def form_of(tensor: Tensor | None) -> Form | None:
    return None if tensor is None else Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def at(forms: Any, addresses: Any) -> list[Tensor | None]:
    """Return the tensors at addresses. A tensor is absent from all calls of a launch, or from none."""
    pairs = list(zip(forms, addresses, strict=True))
    assert all((form is None) == (address is None) for form, address in pairs)
    return [None if form is None else form.at(address) for form, address in pairs]


class Decode:
    """Attention over a cache."""

    writes_into = True

    def __init__(self, launch: Any, calls: list[str]) -> None:
        self._launch, self._calls = launch, calls
        self._forms: Any = None

    @property
    def can_launch_by_address(self) -> bool:
        return self._forms is not None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: Any, out: Any = None, lse: Any = None
    ) -> Any:
        result, result_lse = self._launch(q, k, v, tensors)
        if out is None:
            return result, result_lse
        self._forms = [form_of(t) for t in (q, k, v, out)], [form_of(t) for t in tensors]
        return out.copy_(result), result_lse

    def by_address(self, out: Tensor, given: tuple[int, ...], addresses: tuple, memory: dict) -> None:
        self._calls.append("decode")
        first, optional = self._forms
        *cache, to = at(first, given)
        to.copy_(self._launch(*cache, CacheTensors(*at(optional, addresses)))[0])


class Append:
    """Writing to slots of a cache."""

    def __init__(self, launch: Any, calls: list[str]) -> None:
        self._launch, self._calls = launch, calls
        self._forms: Any = None

    @property
    def can_launch_by_address(self) -> bool:
        return self._forms is not None

    def __call__(
        self, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, tensors: AppendTensors
    ) -> None:
        of_slots = tensors.slot_mapping, tensors.k_descale, tensors.v_descale
        self._forms = [form_of(t) for t in (k_cache, v_cache, k, v, *of_slots)]
        self._launch(k_cache, v_cache, k, v, tensors)

    def by_address(self, *addresses: int | None) -> None:
        self._calls.append("append")
        absent = (None,) * (len(self._forms) - len(addresses))
        *given, slots, k_descale, v_descale = at(self._forms, (*addresses, *absent))
        self._launch(*given, AppendTensors(slot_mapping=slots, k_descale=k_descale, v_descale=v_descale))


@contextmanager
def launches() -> Iterator[list[str]]:
    """Make launches on the CPU take addresses, without gradients. Yields the names of launches by address."""
    calls: list[str] = []
    decode, append, debugs = backend.prepare_decode, backend.prepare_append_kvcache, operation.environment
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(backend, "prepare_decode", lambda *given: Decode(decode(*given), calls))
        patch.setattr(backend, "prepare_append_kvcache", lambda *given: Append(append(*given), calls))
        patch.setattr(paged, "reads_values", lambda tensor: debugs.get(operation.DEBUG) == operation.ON)
        with operation.remembering():  # forgets all launches
            yield calls
    with operation.remembering():
        pass
