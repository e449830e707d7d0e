"""Cache of traced functions. A trace is reused as long as tracing again would give the same program.

A cached trace is used only if everything that the function reads from outside is unchanged. Without a cached
trace the function is run on symbols again, which takes about 100 us of host time. At every call the cache
compares

* the function's code and defaults, and those of the functions that it calls;
* closure cells, globals, attributes of modules, functions and tensors, and a partial's arguments, if they
  hold numbers, strings, dtypes, tensors, tuples of these, functions, or predefined masks;
* properties of tensors that the function read: shape, strides, dtype, device, ``requires_grad``.

A trace is not cached if the function read anything else:

* an element of a list or a dict, or an attribute of an object or a class;
* the result of a function that is not known to depend only on its arguments;
* an import inside the function;
* a tensor's data as a number (``lengths[0]``, ``int(t)``, ``t.item()``, a 0-dim tensor on the CPU).

A tensor that is indexed with batch, head or positions is captured instead: kernels read it at run time.

:func:`_guards_of` finds what a function can read: everything that its code names. While the function runs,
the recorder notes which properties of tensors the function reads.

Under ``torch.compile`` nothing is cached, because Dynamo inlines the function and adds its own guards. A
0-dim tensor is then captured, and making a number from a tensor's data breaks the graph.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.masks.tracing import FUNCTIONS, PLAIN_TENSORS, Trace, apart, trace
from flashtile.masks.triton_functions import STAND_INS
from flashtile.torch_private import outside_of_fake_mode

_CONSTANTS = frozenset(
    (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device)
)
"""Types whose values never change. Subclasses are excluded, because they may have user-defined methods."""

_PURE = (
    "abs all any bool callable complex dict divmod enumerate filter float frozenset int isinstance iter len "
    "list map max min next pow range reversed round set slice sorted str sum tuple zip"
)
"""Builtins whose result depends only on their arguments."""

_KNOWN = {
    id(value): value
    for value in (
        *(getattr(builtins, name) for name in _PURE.split()),
        *(
            value
            for value in vars(builtins).values()
            if isinstance(value, type) and issubclass(value, Exception)
        ),
        *(value for value in vars(math).values() if callable(value)),
        *(getattr(torch, name, None) for name in FUNCTIONS),
        *(getattr(torch.nn.functional, name, None) for name in FUNCTIONS),
        Tensor,
        *STAND_INS,
    )
}
"""Callables whose code is not inspected.

The recorder sees calls of torch's functions: it records those with a symbol among their arguments. A call
with only tensors makes the recorder note that the function reads data.
"""

_MISSING = object()
_KEY = {kind: f"__flashtile_{kind}__" for kind in ("score_mod", "mask_mod")}
"""Keys of traces in the ``__dict__`` of their functions.

A trace may refer back to its function, for example if the function calls itself. The garbage collector can
free such a cycle only if the trace is in the function's own dict.
"""

_called_as: dict[type, str] = {}


def called_as(attribute: str) -> Callable[[type], type]:
    """Decorate a class whose ``__call__`` only calls the function stored in the object's ``attribute``.

    The cache then guards this function instead of the object.
    """

    def note(cls: type) -> type:
        _called_as[cls] = attribute
        return cls

    return note


class _Guards:
    """State, at the time of the trace, of everything that a function can read."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.functions: list[tuple[weakref.ref, Any, Any, Any]] = []
        """(weak reference to a function, its code, defaults and keyword defaults)."""
        self.cells: list[tuple[types.CellType, Any]] = []
        """(closure cell, its content)."""
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        """(dict, name, the value of that name)."""
        self.lengths: list[tuple[Any, int]] = []
        """(dict that is read as a whole, its length)."""
        self.empty: list[dict[str, Any]] = []
        """Dicts of attributes that must stay empty."""
        self.tensors: tuple[tuple[Tensor, int, torch.dtype], ...] = ()
        """Captured tensors, with their number of dimensions and dtype."""
        self.properties: tuple[tuple[Callable[..., Any], tuple, Any], ...] = ()
        """Properties of tensors, as in ``Trace.properties``."""

    def hold(self) -> bool:
        """Whether everything that the function can read is unchanged."""
        for reference, code, defaults, keywords in self.functions:
            function = reference()
            if (
                function is None
                or function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keywords
            ):
                return False
        for names, name, was in self.names:
            if names.get(name, _MISSING) is not was:
                return False
        for cell, was in self.cells:
            if _contents(cell) is not was:
                return False
        for whole, length in self.lengths:
            if len(whole) != length:
                return False
        for tensor, dimensions, dtype in self.tensors:
            if tensor.ndim != dimensions or tensor.dtype is not dtype:
                return False
        for read, arguments, value in self.properties:
            if read(*arguments) != value:
                return False
        return not any(self.empty)


class _Kept(NamedTuple):
    guards: _Guards
    trace: Trace

    def __reduce__(self) -> Any:  # if the function is copied, the copy has no cached trace
        return type(None), ()


def kept(kind: str, function: Callable[..., Any]) -> Trace:
    """Return the trace of a function, from the cache if tracing again would give the same program."""
    if torch.compiler.is_dynamo_compiling():
        return trace(kind, function)
    own = getattr(function, "__dict__", None)
    last = None if own is None else own.get(_KEY[kind])
    if last is not None and last.guards.owner() is function and last.guards.hold():
        return last.trace
    return apart(_keep)(kind, function, own)


def _keep(kind: str, function: Callable[..., Any], own: Any) -> Trace:
    """Trace a function. Cache the trace as an attribute of the function if all that it read is guarded."""
    guards = _guards_of(function)  # before the function runs, because running may change what it reads
    with outside_of_fake_mode():  # as in ``explain``: a function may read numbers of its tensors
        made = trace(kind, function)
    if guards is not None and made.properties is not None:
        guards.tensors = tuple((tensor, tensor.ndim, tensor.dtype) for tensor in made.tensors)
        guards.properties = made.properties
        own[_KEY[kind]] = _Kept(guards, made)
    return made


def _guards_of(function: Any) -> _Guards | None:
    """Return guards for a function, or None if something that it can read cannot be guarded."""
    if type(function) not in (types.FunctionType, functools.partial):
        return None
    walk = _Walk(_Guards(function))
    return walk.guards if walk.may_read(function) and walk.attributes_are_guarded() else None


class _Walk:
    """A walk over everything that a function's code can name."""

    def __init__(self, guards: _Guards) -> None:
        self.guards = guards
        self.seen: dict[int, Any] = {}
        self.attributes: dict[str, None] = {}
        """Names of the attributes that the code reads, on any object."""
        self.spaces: list[dict[str, Any]] = []
        """``vars`` of the reachable modules, functions, partials, predefined masks and tensors."""

    def may_read(self, value: Any) -> bool:
        """Guard everything reachable from ``value``. Return False if something cannot be guarded."""
        kind = type(value)
        if kind in _CONSTANTS or id(value) in _KNOWN or id(value) in self.seen:
            return True
        self.seen[id(value)] = value
        if kind in (tuple, torch.Size):
            return all(map(self.may_read, value))
        if hasattr(value, "__dict__"):
            # A function's __dict__ may be empty now, but the trace will be stored in it.
            full = vars(value) or kind is types.FunctionType
            (self.spaces if full else self.guards.empty).append(vars(value))
        if kind in PLAIN_TENSORS or kind is types.ModuleType:
            return True
        if kind is types.FunctionType:
            return self._function(value)
        if kind is functools.partial:
            return self.may_read(value.func) and self.may_read(value.args) and self._whole(value.keywords)
        return kind in _called_as and self._name(vars(value), _called_as[kind])

    def _function(self, function: types.FunctionType) -> bool:
        code, defaults, keywords = function.__code__, function.__defaults__, function.__kwdefaults__
        self.guards.functions.append((weakref.ref(function), code, defaults, keywords))
        read = _names_in(code)
        if read is None or not self.may_read(defaults) or not self._whole(keywords or {}):
            return False
        self.attributes.update(dict.fromkeys(read.attributes))
        for cell in function.__closure__ or ():
            was = _contents(cell)
            self.guards.cells.append((cell, was))
            if was is not _MISSING and not self.may_read(was):
                return False
        names = function.__globals__
        return all(
            self._name(names, name) and (name in names or self._name(vars(builtins), name))
            for name in read.names
        )

    def _whole(self, names: dict[str, Any]) -> bool:
        self.guards.lengths.append((names, len(names)))
        return all(self._name(names, name) for name in names)

    def _name(self, names: dict[str, Any], name: str) -> bool:
        was = names.get(name, _MISSING)
        self.guards.names.append((names, name, was))
        return was is _MISSING or self.may_read(was)

    def attributes_are_guarded(self) -> bool:
        """Guard all attributes that the code may read, and everything reachable from them.

        The code may read each name in ``attributes`` on each object in ``spaces``, so all combinations are
        guarded. Returns False if one of them cannot be guarded.
        """
        done: set[tuple[int, str]] = set()
        while True:
            places = [(i, name) for i in range(len(self.spaces)) for name in self.attributes]
            new = [place for place in places if place not in done]
            if not new:
                return True
            done.update(new)
            for i, name in new:
                space = self.spaces[i]
                missing = name not in space and space.get("__name__") != "torch"
                if (missing and "__getattr__" in space) or not self._name(space, name):
                    return False


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return _MISSING


class _Names(NamedTuple):
    names: frozenset[str]
    """Names of globals."""
    attributes: frozenset[str]


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> _Names | None:
    """Return the names of globals and attributes that code reads.

    Returns None if the code imports, defines a class, uses a class pattern of a ``match`` statement, or reads
    Python's own attributes (``__dict__``), through which everything can be reached.
    """
    names: set[str] = set()
    attributes: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname.startswith("IMPORT") or step.opname in ("LOAD_BUILD_CLASS", "MATCH_CLASS"):
            return None
        if step.opcode in dis.hasname:
            (names if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else attributes).add(step.argval)
    if any(name.startswith("__") for name in attributes):
        return None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            if inner is None:
                return None
            names |= inner.names
            attributes |= inner.attributes
    return _Names(frozenset(names), frozenset(attributes))
