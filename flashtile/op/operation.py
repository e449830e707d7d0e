"""One operation: what attention, decoding and FP8 share between their front doors and their kernels.

A *plain* call (eager, nothing watches it) looks its prepared launch up by its signature: shapes, strides,
dtypes, devices and alignment of its tensors, and its options. A new signature is checked, described as a
frozen problem and given to the first backend that serves it. Every other call (``torch.compile``,
``torch.export``, modes, transforms, subclasses) is checked and goes through ``torch.ops.flashtile``, whose
fake the operation registers. The plain call skips torch's dispatcher, which costs more host time than the
launch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from flashtile.caches import BoundedCache
from flashtile.op.observers import remember_shardings, tell_observers
from flashtile.op.refusals import (
    leave_graph_of_gradients,
    refuse_tangents,
    refuse_transformed_gradients,
    transforming,
    without_backward,
)
from flashtile.op.registry import define, implement, register_autograd, register_fake
from flashtile.op.schema import schema
from flashtile.op.selection import select

Tensors = tuple[Any, ...]
"""The tensors that every call of an operation has, in its order; None for one that may be left out."""

SIGNATURE_BYTES = 4096
"""About what a kept launch takes on the host: its key, its problem and its kernels' fixed arguments."""
CACHE_BYTES = 16 * 2**20
"""Of kept launches, for each operation."""

PLAIN_TYPES = (Tensor, Parameter)
"""A subclass may watch what is done with it; these do not."""

# Bound here, since every call asks them.
dispatch_modes = torch._C._len_torch_dispatch_stack
transform = torch._C._functorch.peek_interpreter_stack
tracing = torch._C._get_tracing_state

# For a name that is not there, os.environ.get raises and catches two errors, which takes 0.8 us.
environment = os.environ._data  # type: ignore[attr-defined]
DEBUG, ON = os.environ.encodekey("FLASHTILE_DEBUG"), os.environ.encodevalue("1")


class Operation:
    """What flashtile computes under one name: ``torch.ops.flashtile.<name>`` and its prepared launches.

    Args:
        name: of the operator, and of ``prepare_<name>`` and ``configure_<name>`` in a backend.
        tensors: names of the tensors that every call has; "dout?" may be None.
        beside: the tensors that a call may have beside them, as a NamedTuple in which all are None. A call
            that has none of them passes this very value, which is known by identity.
        options: NamedTuple of the arguments that are not tensors, hashable, with a field ``backend``.
        results: how many tensors come back.
        check: ``(*tensors, beside, options)`` raises for a call that no backend could compute. It looks at
            types and shapes, never at data.
        describe: ``(*tensors, beside, options)`` to the problem.
        fake: ``(*tensors, beside, options)`` to empty results, of which one that does not exist is None.
        check_values: ``(*tensors, beside, options)`` raises for lengths and tables that lead out of the
            tensors. It reads data: done on the CPU, and on a GPU under ``debug_checks``.
        check_traced: the part of ``check`` that ``torch.compile`` traces, for what no graph can hold; the
            fake checks the rest. None is all of it.
        part: the subpackage of a backend that serves it ("" is the backend's own package).
        mutates: names of the tensors that are written in place.
        no_gradient: what to do instead, for an operation without a backward pass.
        flops: ``(*tensors, beside, options)`` to the floating-point operations of a call.
        shardings: ``(*tensors, beside, options)`` to the placements of DTensors that need no communication.
        suffix: of the operator's name, for another operator that the same backends serve.
    """

    def __init__(
        self,
        name: str,
        *,
        tensors: tuple[str, ...],
        beside: Any,
        options: type[Any],
        results: int,
        check: Callable[..., None],
        describe: Callable[..., Any],
        fake: Callable[..., Any] = lambda *arguments: None,
        check_values: Callable[..., None] | None = None,
        check_traced: Callable[..., None] | None = None,
        part: str = "",
        mutates: tuple[str, ...] = (),
        no_gradient: str | None = None,
        flops: Callable[..., int] | None = None,
        shardings: Callable[..., list] | None = None,
        suffix: str = "",
    ) -> None:
        self.name, self.part, self.check, self.describe, self.fake = name, part, check, describe, fake
        self.no_gradient, self.flops, self.shardings = no_gradient, flops, shardings
        if shardings is not None:
            remember_shardings(self)
        self._check_values, self._check_traced = check_values, check_traced or check
        self.tensors, self.nothing, self.options, self.results = tensors, beside, options, results
        self._num_tensors = len(tensors)
        self._num_beside = len(beside._fields)
        self.names = tuple(n.rstrip("?") for n in tensors) + beside._fields
        self.launches: BoundedCache = BoundedCache(CACHE_BYTES)
        operator = name + suffix
        self.operator = define(operator, schema(operator, tensors, type(beside), options, results, mutates))
        for device in ("CUDA", "CPU"):
            implement(operator, device, self._kernel)
        register_fake(operator, self._fake_kernel)
        if no_gradient is not None and results and not mutates:
            register_autograd(operator, self._refuse_backward)

    def __call__(self, tensors: Tensors, beside: Any, options: Any) -> Any:
        """The results of a call without a backward pass, by the shortest path that is right for it."""
        if is_plain(tensors, beside):
            if self.no_gradient is not None and torch.is_grad_enabled() and any_learns(tensors, beside):
                run = partial(self.launch, tensors, beside, options)
                return without_backward(run, self.no_gradient, self.learning(tensors, beside))
            return self.launch(tensors, beside, options)
        return self.traced(tensors, beside, options)

    def launch(self, tensors: Tensors, beside: Any, options: Any) -> Any:
        """The results of a plain call, by the launch that was prepared for its signature."""
        prepared = self.prepared(tensors, beside, options)
        self.check_values(tensors, beside, options)
        return prepared(*tensors, beside)

    def prepared(self, tensors: Tensors, beside: Any, options: Any) -> Callable[..., Any]:
        """The launch for this signature. A new one is checked first."""
        try:
            key: tuple = (options, *signatures(tensors))
            if beside is not self.nothing:
                key += self.signature(beside)
            prepared = self.launches.get(key)
        except Exception:  # not a tensor, one without strides, an option that is not hashable
            self.check(*tensors, beside, options)
            raise
        if prepared is None:
            launch = self.prepare_checked(tensors, beside, options)
            prepared = self.launches.store(key, launch, SIGNATURE_BYTES)
        return prepared

    def signature(self, beside: Any) -> tuple:
        """What a launch was prepared for of the tensors beside."""
        return signatures(beside)

    def prepare_checked(self, tensors: Tensors, beside: Any, options: Any) -> Callable[..., Any]:
        """A launch for a new signature."""
        self.check(*tensors, beside, options)
        return self.prepare(tensors, beside, options)

    def prepare(self, tensors: Tensors, beside: Any, options: Any) -> Callable[..., Any]:
        """A launch for the signature of a call that has been checked."""
        return select(self, self.describe(*tensors, beside, options), options.backend).prepare()

    def check_values(self, tensors: Tensors, beside: Any, options: Any) -> None:
        """Check the data where that costs no synchronisation, or is asked for."""
        debug_checks = getattr(options, "debug_checks", False)
        if self._check_values is not None and reads_values(tensors[0], debug_checks):
            self._check_values(*tensors, beside, options)

    def traced(self, tensors: Tensors, beside: Any, options: Any) -> Any:
        """The results of any other call, through the operator."""
        if torch.compiler.is_dynamo_compiling():
            leave_graph_of_gradients()
            self._check_traced(*tensors, beside, options)
        else:
            self.check(*tensors, beside, options)
            described = _described.get()
            if described is not None:
                described.append((self, self.describe(*tensors, beside, options), options.backend))
                return self.fake(*tensors, beside, options)
            if self.no_gradient is not None and transforming():
                refuse_transformed_gradients(self.no_gradient, self.names, (*tensors, *beside))
        tell_observers(self, (*tensors, *beside))
        refuse_tangents(self.names, (*tensors, *beside))
        return self.operator(*tensors, *beside, *options)

    def learning(self, tensors: Tensors, beside: Any) -> list[tuple[str, Tensor]]:
        """(name, tensor) of each tensor that requires a gradient."""
        given = zip(self.names, (*tensors, *beside), strict=False)
        return [(name, t) for name, t in given if t is not None and t.requires_grad]

    def split(self, arguments: tuple) -> tuple[Tensors, Any, Any]:
        """(tensors, beside, options) of the operator's arguments."""
        first = self._num_tensors
        tensors, rest = arguments[:first], arguments[first:]
        beside, options = rest[: self._num_beside], self.options(*rest[self._num_beside :])
        given = any(tensor is not None for tensor in beside)
        return tensors, type(self.nothing)(*beside) if given else self.nothing, options

    def _kernel(self, *arguments: Any) -> Any:
        tensors, beside, options = self.split(arguments)
        return _without_none(self.launch(tensors, beside, options), tensors)

    def _fake_kernel(self, *arguments: Any) -> Any:
        tensors, beside, options = self.split(arguments)
        self.check(*tensors, beside, options)
        return _without_none(self.fake(*tensors, beside, options), tensors)

    def _refuse_backward(self, ctx: Any, *gradients: Any) -> None:
        wanted = zip(self.names, ctx.needs_input_grad, strict=False)
        name = next((name for name, needed in wanted if needed), self.names[0])
        raise NotImplementedError(f"{name} must not require a gradient: {self.no_gradient}")


def is_plain(required: tuple[Tensor, ...], *optional: Iterable[Tensor | None]) -> bool:
    """Nothing but this call would see the operator: no trace, mode, transform, tangent or subclass."""
    if torch.compiler.is_dynamo_compiling():
        return False
    for tensor in required:
        if type(tensor) not in PLAIN_TYPES:
            return False
    for tensors in optional:
        for extra in tensors:
            if extra is not None and type(extra) not in PLAIN_TYPES:
                return False
    return (
        (required[0].is_cuda or required[0].is_cpu)  # whose device the others must share
        and dispatch_modes() == 0
        and transform() is None
        and forward_ad._current_level < 0
        and tracing() is None
    )


def any_learns(*tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of them requires a gradient."""
    for some in tensors:
        for tensor in some:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def signatures(tensors: Iterable[Tensor | None]) -> tuple:
    """What a launch was prepared for of each tensor: five entries, or None for one that is absent."""
    entries: list = []
    for t in tensors:
        if t is None:
            entries.append(None)
        else:
            entries += t.shape, t.stride(), t.dtype, t.device, not t.data_ptr() & 15
    return tuple(entries)


def reads_values(tensor: Tensor, debug_checks: bool = False) -> bool:
    """Whether a call on this device checks its data. On a GPU that synchronises, so it does only if asked to,
    by ``debug_checks`` or ``FLASHTILE_DEBUG=1``.
    """
    return debug_checks or not tensor.is_cuda or environment.get(DEBUG) == ON


def _without_none(results: Any, tensors: Tensors) -> Any:
    """An operator's results are tensors: one without elements stands for a result that does not exist."""
    if isinstance(results, tuple) and any(r is None for r in results):
        like = next(t for t in tensors if t is not None)
        return tuple(like.new_empty(0) if r is None else r for r in results)
    return results


Described = list[tuple[Operation, Any, "str | None"]]
_described: ContextVar[Described | None] = ContextVar("flashtile_described", default=None)


@contextlib.contextmanager
def describing(*arguments: Any) -> Iterator[Described]:
    """Calls within compute nothing, and return fake tensors: a list of what they are, (operation, problem,
    backend that was asked for). ``arguments`` of these calls may be fake already.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    described: Described = []
    token = _described.set(described)
    try:
        with detect_fake_mode(arguments) or FakeTensorMode(allow_non_fake_inputs=True):
            yield described
    finally:
        _described.reset(token)
