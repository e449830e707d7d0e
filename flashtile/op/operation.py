"""An operation: the path of a call from a public function to a kernel launch.

A *plain* call (eager, with no observer) looks up its prepared launch by its signature: shapes, strides,
dtypes, devices and alignment of its tensors, and its options. A new signature is checked, described as a
frozen problem and given to the first backend that supports it. Every other call (``torch.compile``,
``torch.export``, modes, transforms, subclasses, lazy negation) is checked and goes through
``torch.ops.flashtile``, with the fake implementation that the operation registers. A plain call skips torch's
dispatcher, which costs more host time than the launch.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from flashtile.caches import BoundedCache
from flashtile.garbage import uncollected
from flashtile.op.observers import remember_shardings, tell_observers
from flashtile.op.refusals import (
    leave_graph_of_gradients,
    refuse_functionalized_gradients,
    refuse_tangents,
    refuse_transformed_gradients,
    refuse_transformed_writes,
    transforming,
    without_backward,
)
from flashtile.op.registry import (
    define,
    flat,
    flat_fields,
    gathered,
    implement,
    register_autograd,
    register_fake,
    schema,
)
from flashtile.op.selection import Selection, on_target, select
from flashtile.problems.common import address_of
from flashtile.problems.newest import newest_call
from flashtile.torch_private import (
    FakeTensorMode,
    detect_fake_mode,
    has_no_memory,
    in_forward_mode,
    innermost_transform,
    is_traced,
    num_dispatch_modes,
    tensor_guards,
)

Tensors = tuple[Any, ...]
"""The tensors that every call of an operation has, in order; None for an omitted tensor."""

SIGNATURE_BYTES = 4096
"""Approximate host memory of a cached launch: its key, its problem and its kernels' fixed arguments."""
CACHE_BYTES = 16 * 2**20
"""Limit of the cached launches of each operation, in bytes."""

PLAIN_TYPES = (Tensor, Parameter)
"""Tensor types whose operations run unchanged. Other subclasses may override operations."""

# Bound at import, because every call uses them.
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
tell_written = torch.autograd.graph.increment_version
"""Raise the versions of several tensors that kernels have written. Autograd may have saved the old values.

torch leaves out tensors that were made in inference mode, which have no version.
"""

# If a name is missing, os.environ.get raises and catches two errors, which takes 0.8 us.
environment = os.environ._data  # type: ignore[attr-defined]
DEBUG, ON = os.environ.encodekey("FLASHTILE_DEBUG"), os.environ.encodevalue("1")


_launch_caches: list[BoundedCache] = []


def launch_cache() -> BoundedCache:
    """Return a new cache of prepared launches. :func:`remembering` clears all of these caches."""
    _launch_caches.append(BoundedCache(CACHE_BYTES))
    return _launch_caches[-1]


OPERATIONS: dict[str, Calls] = {}
"""Every kind of calls. The name of an operation is that of its operator in ``torch.ops.flashtile``."""


class Calls:
    """The arguments of one kind of calls, which are recorded, or repeated on "meta" to find kernels.

    Args:
        full_name: name in :data:`OPERATIONS` and in files of recorded calls.
        tensors, optional, options, extended_to: as in :class:`Operation`.
    """

    def __init__(
        self,
        full_name: str,
        tensors: tuple[str, ...],
        optional: Any,
        options: type[Any],
        extended_to: tuple[Any, Any] | None = None,
    ) -> None:
        self.full_name = full_name
        self.tensors, self.nothing, self.options = tensors, optional, options
        self._num_tensors = len(tensors)
        self._num_optional, self._num_options = len(optional._fields), len(flat_fields(options))
        extended_to = extended_to or (type(optional), options)
        self._extended_to = extended_to
        self.names = tuple(n.rstrip("?") for n in tensors) + extended_to[0]._fields
        every_optional, every_option = extended_to[0]._fields, flat_fields(extended_to[1])
        self.arguments = self._arranged(self.names[: len(tensors)], every_optional, every_option)
        """Names of all arguments, in the order of the operator's schema."""
        further = *every_optional[self._num_optional :], *every_option[self._num_options :]
        known = extended_to[0]._field_defaults | extended_to[1]._field_defaults
        self._defaults = tuple(known[name] for name in further)
        OPERATIONS[full_name] = self

    def launch_on_meta(self, tensors: Tensors, optional: Any, options: Any, target: Any = None) -> None:
        """Launch a call with its tensors replaced by tensors on torch's "meta" device.

        No kernel runs: launches are collected by ``backends.common.launch.recording``.

        ``target``: the GPU of the call. None: that of its tensors.
        """
        raise NotImplementedError

    def following(self, tensors: Tensors, optional: Any, options: Any) -> Iterable[tuple]:
        """Return (operation, tensors, optional, options) of each call that will follow this one."""
        return ()

    def normalized(self, tensors: Tensors) -> Tensors:
        """Return the tensors in the form that launches expect."""
        return tensors

    def _remember(self, tensors: Tensors, optional: Any, options: Any) -> None:
        for calls in _remembering:
            calls.append((self, tensors, optional, options))

    def _set_newest(self, tensors: Tensors, optional: Any, options: Any) -> None:
        """Make a call on a GPU the one that :data:`newest_call` repeats."""
        if tensors[0].is_cuda:
            # Weak references, because strong ones would keep the tensors until another call is prepared.
            given = [None if tensor is None else weakref.ref(tensor) for tensor in (*tensors, *optional)]
            newest_call.set(partial(self._repeat, given, optional._make, options))

    def _repeat(self, given: list[Any], optional: Callable[[Iterable], Any], options: Any) -> None:
        """Launch a call and those that will follow, with tensors on torch's "meta" device.

        ``given`` are weak references to the tensors of the call, None for omitted tensors. Nothing is
        launched if a tensor no longer exists, or is not aligned to 16 bytes. Tensors on "meta" count as
        aligned, so other kernels would be compiled.
        """
        values = [None if reference is None else reference() for reference in given]
        for reference, value in zip(given, values, strict=True):
            if reference is not None and (value is None or address_of(value) % 16):
                return
        tensors, extras = tuple(values[: self._num_tensors]), optional(values[self._num_tensors :])
        for operation, *call in ((self, tensors, extras, options), *self.following(tensors, extras, options)):
            operation.launch_on_meta(*call)

    def flat(self, tensors: Tensors, optional: Any, options: Any) -> tuple:
        """Return the operator's arguments in the order of its schema."""
        return self._arranged(tensors, optional, flat(options))

    def _arranged(self, tensors: Any, optional: Any, options: tuple) -> tuple:
        first, second = self._num_optional, self._num_options
        return (*tensors, *optional[:first], *options[:second], *optional[first:], *options[second:])

    def flat_of_all(self, tensors: Tensors, optional: Any, options: Any) -> tuple:
        """Return all arguments of the operator's schema, with defaults for those that the call omits."""
        given = self.flat(tensors, optional, options)
        return given + self._defaults[len(self._defaults) - (len(self.arguments) - len(given)) :]

    def split(self, arguments: tuple) -> tuple[Tensors, Any, Any]:
        """Split the operator's arguments into (tensors, optional, options).

        ``arguments`` may end early, because torch's dispatcher drops trailing arguments that equal their
        defaults.
        """
        first = self._num_tensors
        second = first + self._num_optional
        third = second + self._num_options
        tensors, optional, options = arguments[:first], arguments[first:second], arguments[second:third]
        further = (*arguments[third:], *self._defaults[len(arguments) - third :])
        if any(value is not None and (isinstance(value, Tensor) or value) for value in further):
            wide, wide_options = self._extended_to
            end = len(wide._fields) - self._num_optional
            every_option = gathered(wide_options, (*options, *further[end:]))
            return tensors, wide(*optional, *further[:end]), every_option
        given = any(tensor is not None for tensor in optional)
        optional = type(self.nothing)(*optional) if given else self.nothing
        return tensors, optional, gathered(self.options, options)


class Operation(Calls):
    """One named computation: the operator ``torch.ops.flashtile.<name>`` and its prepared launches.

    Args:
        name: name of the operator, and of ``prepare_<name>`` and ``configure_<name>`` in a backend.
        tensors: names of the tensors that every call has; a name such as "dout?" may be None.
        optional: the optional tensors of a call, as a NamedTuple in which all are None. A call that has none
            of them passes this very object, which is recognised by identity.
        options: NamedTuple of the arguments that are not tensors, hashable, with a field ``backend``.
        results: number of returned tensors.
        check: ``(*tensors, optional, options)`` raises for a call that no backend could compute. It looks at
            types and shapes, never at data.
        describe: ``(*tensors, optional, options) -> problem``.
        fake: ``(*tensors, optional, options) -> results``: empty tensors, or None for an absent result.
        check_values: ``(*tensors, optional, options)`` raises for lengths and tables that point outside the
            tensors. It reads data, so on a GPU it is called only under ``debug_checks``.
        check_traced: the part of ``check`` that ``torch.compile`` traces, for arguments that cannot enter a
            graph; the fake implementation checks the rest. None means all of ``check``.
        part: the subpackage of a backend that implements it ("" is the backend's own package).
        mutates: names of the tensors that are written in place.
        no_gradient: advice in the error message of an operation without a backward pass.
        flops: ``(*tensors, optional, options) -> number`` of floating-point operations of a call.
        shardings: ``(*tensors, optional, options) -> placements`` of DTensors that need no communication.
        suffix: suffix of the operator's name, for a second operator that the same backends implement.
        extended_to: the types of ``optional`` and ``options`` in calls with more arguments. The fields that
            these types add come last in the operator's schema, with defaults.
    """

    def __init__(
        self,
        name: str,
        *,
        tensors: tuple[str, ...],
        optional: Any,
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
        extended_to: tuple[Any, Any] | None = None,
    ) -> None:
        super().__init__(name + suffix, tensors, optional, options, extended_to)
        self.name, self.part, self.check, self.describe, self.fake = name, part, check, describe, fake
        self.no_gradient, self.flops, self.shardings = no_gradient, flops, shardings
        if shardings is not None:
            remember_shardings(self)
        self._check_values, self._check_traced = check_values, check_traced or check
        self.results = results
        self._written = tuple(self.names.index(n) for n in mutates)
        self.launches = launch_cache()
        operator = self.full_name
        text = schema(operator, tensors, type(optional), options, results, mutates, self._extended_to)
        self.operator = define(operator, text)
        for device in ("CUDA", "CPU"):
            implement(operator, device, self._kernel)
        register_fake(operator, self._fake_kernel)
        if no_gradient is not None and results and not mutates:
            register_autograd(operator, self._refuse_backward)

    def __call__(self, tensors: Tensors, optional: Any, options: Any) -> Any:
        """Return the results of a call.

        A plain call (:func:`is_plain`) uses its prepared launch. Any other call goes through the torch
        operator. If the operation has no backward pass and a tensor requires a gradient, the results get a
        backward pass that raises NotImplementedError.
        """
        if is_plain(tensors, optional):
            if self.no_gradient is not None and torch.is_grad_enabled() and any_learns(tensors, optional):
                run = partial(self.launch, tensors, optional, options)
                return without_backward(run, self.no_gradient, self.learning(tensors, optional))
            return self.launch(tensors, optional, options)
        return self.traced(tensors, optional, options)

    def launch(self, tensors: Tensors, optional: Any, options: Any) -> Any:
        """Return the results of a plain call (:func:`is_plain`), using the launch for its signature."""
        prepared = self.prepared(tensors, optional, options)
        self.check_values(tensors, optional, options)
        return prepared(*tensors, optional)

    def prepared(self, tensors: Tensors, optional: Any, options: Any) -> Callable[..., Any]:
        """Return the launch for the signature of this call. A call with a new signature is checked first."""
        try:
            key: tuple = (options, *signatures(tensors))
            if optional is not self.nothing:
                key += self.signature(optional)
            prepared = self.launches.get(key)
        except Exception:  # not a tensor, or one without strides, or an option that is not hashable
            self.check(*tensors, optional, options)
            raise
        if prepared is None:
            self._refuse_without_memory((*tensors, *optional))
            launch = self.prepare_checked(tensors, optional, options)
            prepared = self.launches.store(key, launch, SIGNATURE_BYTES)
        return prepared

    def _refuse_without_memory(self, tensors: Tensors) -> None:
        """Refuse torch's zero tensors: they have no memory, so a kernel would read from address 0."""
        for name, tensor in zip(self.names, tensors, strict=False):
            if tensor is not None and has_no_memory(tensor):
                raise ValueError(
                    f"{name} must have memory, got a tensor of torch._efficientzerotensor, which has none: "
                    f"pass {name}.clone()"
                )

    @staticmethod
    def signature(optional: Any) -> tuple:
        """Return those properties of the optional tensors that a launch depends on."""
        return signatures(optional)

    def prepare_checked(self, tensors: Tensors, optional: Any, options: Any) -> Callable[..., Any]:
        """Check a call with a new signature, and return a launch for this signature."""
        self.check(*tensors, optional, options)
        self._remember(tensors, optional, options)
        return self.prepare(tensors, optional, options)

    def prepare(self, tensors: Tensors, optional: Any, options: Any) -> Callable[..., Any]:
        """Return a new launch for the signature of a call that has been checked."""
        self._set_newest(tensors, optional, options)
        with uncollected():  # backends are imported
            return self._select(tensors, optional, options).prepare()

    def _select(self, tensors: Tensors, optional: Any, options: Any, target: Any = None) -> Selection:
        """Select a backend, for the GPU ``target`` if given. Raises NotImplementedError if none serves."""
        problem = self.describe(*tensors, optional, options)
        if target is not None:
            problem = on_target(problem, target)
        return select(self, problem, options.backend)

    def is_served(self, tensors: Tensors, optional: Any, options: Any, target: Any = None) -> bool:
        """Whether a backend serves a call, on the GPU ``target`` if given."""
        try:
            self.refuse_unserved(tensors, optional, options, target)
        except NotImplementedError:
            return False
        return True

    def refuse_unserved(self, tensors: Tensors, optional: Any, options: Any, target: Any = None) -> None:
        """Raise NotImplementedError if no backend, or not the requested one, serves a call."""
        with uncollected():  # backends are imported
            self._select(tensors, optional, options, target)

    def launch_on_meta(self, tensors: Tensors, optional: Any, options: Any, target: Any = None) -> None:
        launch = self._select(tensors, optional, options, target).prepare()
        with _AllocatingOnMeta():
            launch(*map(on_meta, tensors), optional._make(map(on_meta, optional)))

    def check_values(self, tensors: Tensors, optional: Any, options: Any) -> None:
        """Check the values of CPU tensors, and of GPU tensors if debug checks are enabled."""
        debug_checks = getattr(options, "debug_checks", False)
        if self._check_values is not None and reads_values(tensors[0], debug_checks):
            self._check_values(*tensors, optional, options)

    def traced(self, tensors: Tensors, optional: Any, options: Any) -> Any:
        """Return the results of a call that is not plain (:func:`is_plain`), using the torch operator."""
        if torch.compiler.is_dynamo_compiling():
            leave_graph_of_gradients()
            self._check_traced(*tensors, optional, options)
        else:
            self.check(*tensors, optional, options)
            described = _described.get()
            if described is not None:
                described.append((self, self.describe(*tensors, optional, options), options.backend))
                return self.fake(*tensors, optional, options)
            self._refuse_negated((*tensors, *optional))
            self._remember(tensors, optional, options)
            if self._written:
                refuse_transformed_writes(self.names, self._written, (*tensors, *optional))
            if self.no_gradient is not None and transforming():
                refuse_transformed_gradients(self.no_gradient, self.names, (*tensors, *optional))
            refuse_functionalized_gradients(self.names, (*tensors, *optional))
        refuse_tangents(self.names, (*tensors, *optional))
        tell_observers(self, (*tensors, *optional))
        return self.operator(*self.flat(tensors, optional, options))

    def _refuse_negated(self, tensors: Tensors) -> None:
        """Refuse to write into tensors with torch's negative bit. The dispatcher supports at most one."""
        for i in self._written:
            if tensors[i] is not None and tensors[i].is_neg():
                name = self.names[i]
                raise ValueError(
                    f"{name} must hold its own numbers because it is written, got a tensor with torch's "
                    f"negative bit: pass {name}.resolve_neg()"
                )

    def learning(self, tensors: Tensors, optional: Any) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) for each tensor that requires a gradient."""
        given = zip(self.names, (*tensors, *optional), strict=False)
        return [(name, t) for name, t in given if t is not None and t.requires_grad]

    def returned(self, results: Any, tensors: Tensors) -> Any:
        """Return the results of a launch, with each None replaced by an empty tensor for the operator."""
        if isinstance(results, tuple) and any(r is None for r in results):
            like = next(t for t in tensors if t is not None)
            return tuple(like.new_empty(0) if r is None else r for r in results)
        return results

    def _kernel(self, *arguments: Any) -> Any:
        tensors, optional, options = self.split(arguments)
        return self.returned(self.launch(tensors, optional, options), tensors)

    def _fake_kernel(self, *arguments: Any) -> Any:
        tensors, optional, options = self.split(arguments)
        self.check(*tensors, optional, options)
        return self.returned(self.fake(*tensors, optional, options), tensors)

    def _refuse_backward(self, ctx: Any, *gradients: Any) -> None:
        wanted = zip(self.arguments, ctx.needs_input_grad, strict=False)
        name = next((name for name, needed in wanted if needed), self.names[0])
        raise NotImplementedError(f"{name} must not require a gradient: {self.no_gradient}")


class Writing(Operation):
    """An operation that writes into two or more tensors of every call, and may write into optional ones.

    It returns nothing about them.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        first = self._num_tensors
        self._written_tensors = itemgetter(*(i for i in self._written if i < first))
        self._written_optional = tuple(i - first for i in self._written if i >= first)

    def launch(self, tensors: Tensors, optional: Any, options: Any) -> Any:
        prepared = self.prepared(tensors, optional, options)
        self.check_values(tensors, optional, options)
        results = prepared(*tensors, optional)
        tell_written(self._written_tensors(tensors))
        for i in self._written_optional:
            if optional[i] is not None:
                tell_written([optional[i]])
        return results


def is_plain(required: tuple[Tensor, ...], *optional: Iterable[Tensor | None]) -> bool:
    """Whether a call is plain: eager, without dispatch modes, transforms, tangents and tensor subclasses.

    Memory of a tensor with torch's negative bit (``z.conj().imag``) holds the numbers before their negation,
    which torch's dispatcher applies. So a call with such a tensor is not plain.
    """
    if is_dynamo_compiling():
        return False
    for tensor in required:
        if type(tensor) not in PLAIN_TYPES or tensor.is_neg():
            return False
    for tensors in optional:
        for extra in tensors:
            if extra is not None and (type(extra) not in PLAIN_TYPES or extra.is_neg()):
                return False
    return (
        (required[0].is_cuda or required[0].is_cpu)  # the other tensors must be on the same device
        and num_dispatch_modes() == 0
        and innermost_transform() is None
        and not in_forward_mode()
        and not is_traced()
    )


def any_learns(*tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of the tensors requires a gradient."""
    for some in tensors:
        for tensor in some:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def signatures(tensors: Iterable[Tensor | None]) -> tuple:
    """Return the properties that a launch depends on: five per tensor, or None for an absent one.

    The last one is whether the address is aligned; None if it is null, so a tensor without memory never gets
    the launch of a tensor with memory.
    """
    entries: list = []
    for t in tensors:
        if t is None:
            entries.append(None)
        else:
            address = t.data_ptr()
            entries += t.shape, t.stride(), t.dtype, t.device, not address & 15 if address else None
    return tuple(entries)


def guard(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """Return a function of as many tensors. It is true for plain calls whose tensors are like these.

    This is a plain call. Tensors are alike if their signatures are equal, apart from the alignment of
    addresses, and also ``requires_grad``. The function must not be called under ``torch.compile``, in
    dispatch modes and with forward-mode tangents. It may be false for other reasons.
    """
    expected = _compared(tensors)
    return fast_guard(tensors) or (lambda *given: is_plain(given) and _compared(given) == expected)


def fast_guard(tensors: tuple[Tensor, ...]) -> Callable[..., bool] | None:
    """Return torch.compile's guard of ``tensors``, which compares in C++ without a tuple for each property.

    None if this release of torch has no such guard, or if a tensor is given twice.
    """
    try:
        check = tensor_guards(tensors)
        return check if check(*tensors) else None
    except Exception:
        return None


def _compared(tensors: tuple[Tensor, ...]) -> list[tuple]:
    return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]


def on_meta(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor on torch's "meta" device with the shape, strides and dtype of ``tensor``."""
    if tensor is None or tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta"))


class _AllocatingOnMeta(TorchFunctionMode):
    """Inside the context, ``empty_like`` and ``zeros_like`` of contiguous tensors on "meta" import no sympy.

    torch computes the strides of their results in Python. It first imports sympy, which took 2.5 s on a
    machine that had not read it before.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _LIKE and len(args) == 1 and named.keys() <= {"dtype"}:
            (like,) = args
            if like.is_meta and like.is_contiguous():
                dtype = named.get("dtype") or like.dtype
                return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
        return func(*args, **named)


_LIKE = (torch.empty_like, torch.zeros_like)


def reads_values(tensor: Tensor, debug_checks: bool = False) -> bool:
    """Whether a call whose first tensor is ``tensor`` checks the values of its tensors.

    Reading values on a GPU synchronises. There, values are checked only with ``debug_checks`` or
    ``FLASHTILE_DEBUG=1``.
    """
    return debug_checks or not tensor.is_cuda or environment.get(DEBUG) == ON


Remembered = list[tuple[Calls, Tensors, Any, Any]]
_remembering: list[Remembered] = []


@contextlib.contextmanager
def remembering() -> Iterator[Remembered]:
    """Collect the calls inside the context, in every thread, once for each signature.

    Yields a list of (operation, tensors, optional, options), which keeps the tensors alive.
    """
    calls: Remembered = []
    for cache in _launch_caches:
        cache.clear()  # calls with a known signature would not be collected
    _remembering.append(calls)
    try:
        yield calls
    finally:
        _remembering.remove(calls)


Described = list[tuple[Operation, Any, "str | None"]]
_described: ContextVar[Described | None] = ContextVar("flashtile_described", default=None)


@contextlib.contextmanager
def describing(*arguments: Any) -> Iterator[Described]:
    """Record the calls of flashtile's operations inside the context instead of computing them.

    Yields a list of (operation, problem, requested backend). The recorded calls return fake tensors. If
    ``arguments`` contain fake tensors, the FakeTensorMode of these tensors is used.
    """
    described: Described = []
    token = _described.set(described)
    try:
        with detect_fake_mode(arguments) or FakeTensorMode(allow_non_fake_inputs=True):
            yield described
    finally:
        _described.reset(token)
