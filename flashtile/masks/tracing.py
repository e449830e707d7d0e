"""Tracing of a user's function into a program: the function runs on symbols, which record operations on them.

Tracing is simpler than parsing: Python itself evaluates numbers, closures, loops and calls of other
functions, and the derivative comes from the same list of operations. An ``if`` on a symbol, or a conversion
of a symbol to a number, raises an error that shows the user's line.
"""

from __future__ import annotations

import functools
import linecache
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashtile.checks import arguments
from flashtile.checks.arguments import check_dense
from flashtile.masks import operations, program
from flashtile.masks.operations import FLOATS, INTS, clamps_share_ties, promoted, promoted_int, range_of
from flashtile.masks.program import LOAD, Builder, Name, Operand, Program, soft_cap_of
from flashtile.masks.ranges import without_identities
from flashtile.masks.triton_functions import in_torch
from flashtile.problems.common import DTYPES, WHOLE
from flashtile.torch_private import comptime, is_compiler_loaded, run_at_trace_time, version_of

SIGNATURES = {
    "score_mod": ("score", "b", "h", "q", "kv"),
    "mask_mod": ("b", "h", "q", "kv"),
}
"""Arguments of each kind of function, in FlexAttention's order."""

_MACHINERY = (
    *(str(Path(__file__).with_name(f"{name}.py")) for name in ("tracing", "triton_functions", "mods")),
    *(str(module.__file__) for module in (arguments, operations, program)),
)
_LIBRARIES = (*_MACHINERY, str(Path(torch.__file__).parent))
"""Files of flashtile and torch, whose lines are not shown in errors."""


class Trace(NamedTuple):
    """A function as a program, with the tensors that it reads."""

    program: Program
    tensors: tuple[Tensor, ...]
    text: str
    """``str(program)``, computed once."""
    soft_cap: float
    """The soft cap, if the program is only a soft cap of the scores, else 0."""
    properties: tuple[tuple[Callable[..., Any], tuple, Any], ...] | None
    """Properties of tensors that the function read: (function, its arguments, its result).

    None if the function called any other torch function without symbols, for example to read a tensor's data
    as a Python number or to create a tensor.
    """


def trace(kind: str, function: Callable[..., Any]) -> Trace:
    """Run ``function`` on symbols, with the arguments of ``kind`` in :data:`SIGNATURES`.

    Raises:
        TypeError: ``function`` does not have these arguments, does something that depends on run-time values,
            or does not return a score (a boolean for a mask); the message shows the user's line.
    """
    if not callable(function):
        raise TypeError(f"{kind} must be a function, got {type(function).__name__}")
    with _InOnePiece():
        if torch.compiler.is_dynamo_compiling():
            _guard_defaults(function)
            return _trace(kind, function, compiling=True)
        return apart(_trace)(kind, function, compiling=False)


def _guard_defaults(function: Any) -> None:
    """Let Dynamo compile again when a number among a function's defaults has changed.

    Dynamo of torch 2.11 takes a default that a function uses for a constant, without a guard. A key of a dict
    has one.
    """
    if isinstance(function, types.FunctionType) and not _is_of_the_graph(function):
        values = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        _ = {value: None for value in values if isinstance(value, (int, float))}


def _is_of_the_graph(function: Any) -> bool:
    """Whether the code that Dynamo compiles defines ``function`` itself, so that its defaults need no guard.

    No Dynamo can read the defaults of such a function, and each shows it in another way. That of torch 2.13
    has no ``__closure__`` for it. That of 2.11 has one that is never None, and lacks ``__kwdefaults__`` if
    the function has free variables.
    """
    try:
        closure = function.__closure__
    except AttributeError:
        return True
    if function.__code__.co_freevars:
        return not hasattr(function, "__kwdefaults__")
    return closure is not None


class _InOnePiece:
    """Context manager that does nothing at run time. Dynamo does not break a graph within a ``with`` block.

    A graph break would split a trace between Dynamo and Python.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with Dynamo disabled. Otherwise Dynamo compiles parts of it after a graph break."""
    return _disabled(function) if is_compiler_loaded() else function


@functools.cache
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)


def _trace(kind: str, function: Callable[..., Any], compiling: bool) -> Trace:
    recorder = _Recorder(compiling, has_derivative=kind == "score_mod" and not compiling)
    arguments = [recorder.symbol(Name(name)) for name in SIGNATURES[kind]]
    try:
        # The derivative of the program would ignore torch.no_grad() in the function. To refuse such code, the
        # recorder checks that gradients, which are enabled here, are still enabled.
        with nullcontext() if compiling else torch.enable_grad(), recorder:
            result = _as_run(function)(*arguments)
        for placeholder, _ in recorder.placeholders:
            _refuse_hidden_change(placeholder)
        operand = None if result is None else recorder.operand(result)
    except Exception as error:
        line = user_line(traceback=error.__traceback__) or _first_line(function)
        # With !s the text is a constant for Dynamo, which torch 2.11 shows to the user.
        raise TypeError(f"{kind} does not compile: {error!s}\n  {line}") from error
    wanted = "float" if kind == "score_mod" else "bool"
    if operand is None or recorder.builder.kind(operand) != wanted:
        got = "None" if operand is None else _said(recorder.builder.kind(operand))
        text = f"{kind} must return {_said(wanted)} ({_HOW[wanted]}), got {got}"
        raise TypeError(f"{text}\n  {_first_line(function)}")
    program = recorder.builder.finish(operand)
    if recorder.narrow:
        program = without_identities(program, [_CONVERSIONS.get(t.dtype, "") for t in recorder.tensors])
    properties = tuple(recorder.properties.values()) if recorder.reads_no_data else None
    return Trace(program, tuple(recorder.tensors), str(program), soft_cap_of(program), properties)


def _refuse_hidden_change(placeholder: Tensor) -> None:
    """Break the graph if a function in place changed a placeholder without the recorder.

    Functions such as torch.relu_ and torch.fill_ bypass __torch_function__ under Dynamo. Only the version of
    Dynamo's fake tensor tells that they were called.
    """

    def check(context: Any) -> None:
        if version_of(context.get_local("placeholder").as_fake()):
            context.graph_break(
                "torch.compile does not show a function in place, such as torch.relu_(score): use the "
                "method, score.relu_(), or a function that returns a new value"
            )

    comptime()(check)


_HOW = {
    "float": "the modified score",
    "bool": "True where the query sees the key: comparisons joined by &, | and ~",
}


def _said(kind: str) -> str:
    return {"float": "a float", "int": "an int", "bool": "a bool"}[kind]


def _first_line(function: Any) -> str:
    """Return ``file:line: text`` of the definition of a function."""
    if torch.compiler.is_dynamo_compiling():
        return ""
    code = getattr(getattr(function, "fn", function), "__code__", None)
    return "" if code is None else _located(code.co_filename, code.co_firstlineno)


def user_line(traceback: types.TracebackType | None = None) -> str:
    """Return ``file:line: text`` of the innermost line outside flashtile and torch.

    The line is taken from ``traceback`` if given, otherwise from the current call stack.
    """
    if torch.compiler.is_dynamo_compiling():
        return ""
    frames: list[tuple[types.FrameType, int]] = []
    if traceback is not None:
        while traceback is not None:
            frames.append((traceback.tb_frame, traceback.tb_lineno))
            traceback = traceback.tb_next
        frames.reverse()
    else:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            frames.append((frame, frame.f_lineno))
            frame = frame.f_back
    for frame, number in frames:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARIES):
            return _located(filename, number)
    return ""


def _located(filename: str, number: int) -> str:
    return f"{Path(filename).name}:{number}: {linecache.getline(filename, number).strip()}"


def _may_be_a_number(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.requires_grad


@run_at_trace_time
def _name_of(function: Any) -> str:
    return str(function.__name__)


PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

METADATA = frozenset(
    (
        *(
            getattr(Tensor, name)
            for name in ("dim", "size", "stride", "numel", "is_floating_point", "__len__")
        ),
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "layout")
        ),
    )
)
"""Properties of a tensor that a function may read. They are guarded: a cached trace needs the same values."""

_NUMBERS = frozenset(("item", "int", "float", "bool", "index", "tolist", "numpy"))
"""Names of methods, without underscores, that make Python numbers from a tensor's data."""


class _Recorder(TorchFunctionMode):
    """Records torch's operations on symbols, including ``tensor[symbol]``.

    A symbol is a :class:`Symbol`. Under Dynamo a symbol is a meta tensor instead, identified by its unique
    length (:meth:`index`), because Dynamo supports all operators only on tensors.
    """

    def __init__(self, compiling: bool, has_derivative: bool) -> None:
        super().__init__()
        self.has_derivative = has_derivative
        self.builder = Builder()
        self.narrow: dict[Name, str] = {}
        """Ints of fewer than 64 bits, and their conversions in ``INTS``."""
        self.tensors: list[Tensor] = []
        self.properties: dict[tuple, tuple[Callable[..., Any], tuple, Any]] = {}
        self.reads_no_data = True
        self.compiling, self.busy = compiling, False
        self.placeholders: list[tuple[Tensor, Name]] = []

    def symbol(self, name: Name) -> Any:
        if not self.compiling:
            return Symbol(self, name)
        # Dynamo does not show functions such as torch.exp_ to the recorder. Elements that share memory make
        # torch refuse most of them; :func:`_refuse_hidden_change` finds the others.
        single = torch.empty(1, dtype=torch.complex64, device="meta")
        placeholder = single.expand(len(self.placeholders) + 2)
        self.placeholders.append((placeholder, name))
        return placeholder

    def index(self, placeholder: Tensor) -> int:
        return len(placeholder) - 2

    def name_of(self, value: Any) -> Name | None:
        """Return the name of a symbol's value in the program. Return None if ``value`` is not a symbol."""
        if isinstance(value, Symbol):
            if value.recorder is not self:
                raise TypeError("the function uses a value of another function that is being compiled")
            return value.name
        if not self.compiling or not isinstance(value, Tensor) or value.device.type != "meta":
            return None
        placeholder, name = self.placeholders[self.index(value)]
        if placeholder is value:
            return name
        if value.dtype == torch.float32:  # from abs() of a placeholder, which bypasses __torch_function__
            return self.builder.emit("abs", name)
        raise TypeError("torch.compile does not show an operation on a value: use torch's functions")

    def has_symbol(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(self.has_symbol, value))
        return self.name_of(value) is not None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if not self.has_symbol((args, tuple(kwargs.values()))):
            return self.without_symbols(name, func, args, kwargs)
        if name == "__get__":  # a symbol has no properties such as x.dtype
            raise TypeError(f"a {_KIND_OF_SYMBOL} has no such attribute")
        return self.call(name, args, kwargs)

    def without_symbols(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.compiling:
            if name.strip("_") in _NUMBERS:
                raise TypeError(
                    "a Python number is made of a tensor's data, which a graph of torch.compile does not "
                    "have: index the tensor with batch, head, q_idx or kv_idx, or leave fullgraph=True out"
                )
            return func(*args, **kwargs)
        if not self.busy:
            if func in METADATA and not kwargs and type(args[0]) in PLAIN_TENSORS:
                self.read(func, *args)
            else:
                self.reads_no_data = False
        return func(*args, **kwargs)

    def read(self, function: Callable[..., Any], tensor: Tensor, *more: Any) -> None:
        """Record a property of a tensor, ``function(tensor, *more)``, because the program depends on it."""
        self.properties[function, id(tensor), more] = function, (tensor, *more), function(tensor, *more)

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record an operation on symbols.

        ``busy`` is set meanwhile, so properties of tensors that the recorder itself reads are not recorded.
        """
        self.busy = True
        try:
            return self._call(name, args, kwargs)
        finally:
            self.busy = False

    def _call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.has_derivative and not torch.is_grad_enabled():
            raise TypeError("torch.no_grad() and torch.autograd.Function do not compile")
        plain = name.strip("_")
        in_place = kwargs.pop("inplace", False) or (name.endswith("_") and not name.endswith("__"))
        if name.startswith("__i") and plain[1:] in FUNCTIONS:
            plain, in_place = plain[1:], True
        if plain == "getitem":
            return self.load(*args)
        if plain in FUNCTIONS:
            result = FUNCTIONS[plain](self, *args, **kwargs)
            if in_place:
                return self.assign(args[0], result)
            # A later function in place must not change the operand together with the result.
            return self.symbol(self.operand(result)) if any(result is one for one in args) else result
        raise TypeError(
            f"torch's {name} is not one of the operations that compile: {', '.join(sorted(FUNCTIONS))}"
        )

    def assign(self, target: Any, result: Any) -> Any:
        """Make ``result`` the value of a symbol, as torch's functions in place do. Return the symbol."""
        if self.name_of(target) is None:
            raise TypeError("a captured tensor must not be changed")
        kind, of_result = self.kind(target), self.kind(result)
        if promoted(kind, of_result) != kind:
            raise TypeError(f"{_said(of_result)} cannot be written in place of {_said(kind)}")
        operand = self.operand(_as_type_of(self, result, target))
        if self.compiling:
            self.placeholders[self.index(target)] = target, operand
        else:
            target.name = operand
        return target

    def emit(self, operation: str, *values: Any, **options: Any) -> Any:
        operands = [self.operand(value) for value in values]
        result = self.builder.emit(operation, *operands, **options)
        return self.symbol(result) if isinstance(result, Name) else result

    def operand(self, value: Any) -> Operand:
        name = self.name_of(value)
        if name is not None:
            return name
        if isinstance(value, (bool, int, float)):
            # Dynamo may have made the number symbolic. Using it as the key of a dict makes it a constant.
            return next(iter({value: None})) if self.compiling else value
        if isinstance(value, Tensor):
            check_dense("a captured tensor", value)
            if value.dim() == 0:
                if torch.compiler.is_compiling():
                    return self.operand(self.load(value, ()))
                self.read(_may_be_a_number, value)
                if not _may_be_a_number(value):
                    return self.operand(self.load(value, ()))
                self.reads_no_data = False
                return value.item()
            raise TypeError(
                f"a tensor of shape {tuple(value.shape)} is not a number: index it with batch, head, q_idx "
                "or kv_idx"
            )
        if isinstance(value, _PartlyRead):
            raise _wrong_count(value.tensor, value.indices)
        raise TypeError(f"{type(value).__name__} is not a number, tensor or value made of the arguments")

    def load(self, tensor: Any, index: Any) -> Any:
        if not isinstance(tensor, Tensor) or self.name_of(tensor) is not None:
            raise TypeError(f"a {_KIND_OF_SYMBOL} is one number, which cannot be indexed")
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) < tensor.dim() and not self.compiling:
            return _PartlyRead(self, tensor, indices)
        if len(indices) != tensor.dim():
            raise _wrong_count(tensor, indices)
        operands = [self.operand(value) for value in indices]
        for operand in operands:
            if self.builder.kind(operand) != "int":
                raise TypeError(f"an index must be an int, got {_said(self.builder.kind(operand))}")
        check_dense("a captured tensor", tensor)
        if tensor.dtype not in (*FLOATS, *WHOLE):
            raise TypeError(
                f"a captured tensor must be of floats, bool, uint8 or signed ints, got {tensor.dtype}"
            )
        kind = _kind_of(tensor.dtype)
        name = self.builder.emit(LOAD, self._number(tensor), *operands, kind=kind, where=user_line())
        if kind == "int" and tensor.dtype != torch.int64:
            self.narrow[name] = _CONVERSIONS[tensor.dtype]
        return self.symbol(name)

    def _number(self, tensor: Tensor) -> int:
        for number, known in enumerate(self.tensors):
            if known is tensor:
                return number
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def kind(self, value: Any) -> str:
        return self.builder.kind(self.operand(value))

    def as_float(self, value: Any) -> Any:
        return value if self.kind(value) == "float" else self.emit("float", value)

    def conversion(self, *values: Any) -> str:
        """Return the conversion in ``INTS`` to the dtype in which torch computes with bools and ints.

        As in torch, a Python number takes the dtype of the others.
        """
        found = []
        for value in values:
            operand = self.operand(value)
            if self.builder.kind(operand) != "int":
                continue
            if isinstance(operand, Name):
                found.append(self.narrow.get(operand, "int"))
            elif isinstance(value, Tensor):
                found.append(_CONVERSIONS.get(value.dtype, "int"))
        return promoted_int(*found) if found else "int"

    def as_int(self, value: Any, conversion: str) -> Any:
        """Convert a value to ints of the dtype of a conversion. Those that it cannot hold wrap around."""
        if self.kind(value) != "int":
            value = self.emit("int", value)
        if self.narrow.get(self.operand(value), "int") == conversion:
            return value
        value = self.emit(conversion, value)
        operand = self.operand(value)
        if isinstance(operand, Name) and conversion != "int":
            self.narrow[operand] = conversion
        return value

    def fitting(self, value: Any, conversion: str) -> Any:
        """Return ``value``. Raise TypeError if it is a number that the dtype of a conversion cannot hold."""
        low, high = range_of(conversion)
        number = self.operand(value)
        if not isinstance(number, Name) and not low <= number <= high:
            raise TypeError(f"{number} does not fit {INTS[conversion]}, in which torch would compute")
        return value

    def arithmetic(self, operation: str, a: Any, b: Any) -> Any:
        """Record an arithmetic operation. Bools become ints, except two under &, | or ^."""
        kinds = [self.kind(value) for value in (a, b)]
        if kinds == ["bool", "bool"] and operation in _COMPARISONS:
            return self.emit(operation, self.emit("int", a), self.emit("int", b))
        if kinds == ["bool", "bool"] and operation not in ("and", "or", "xor"):
            raise TypeError(f"two booleans must be joined by &, |, ^ or a comparison, got {operation}")
        if "float" in kinds and operation in ("and", "or", "xor", "lshift", "rshift"):
            raise TypeError(f"operands of &, |, ^, << and >> must be booleans or ints, got {_said('float')}")
        conversion = self.conversion(a, b)
        if conversion != "int" and operation != "div" and "float" not in kinds:
            result = self.emit(operation, self.as_int(a, conversion), self.as_int(b, conversion))
            return result if operation in _COMPARISONS else self.as_int(result, conversion)
        a, b = (self.emit("int", v) if k == "bool" != kinds[1 - i] else v
                for i, (v, k) in enumerate(zip((a, b), kinds, strict=True)))  # fmt: skip
        return self.emit(operation, a, b)


class _PartlyRead:
    """A captured tensor with indices of its first dimensions, as in ``bias[batch][q_idx, kv_idx]``."""

    __slots__ = ("indices", "recorder", "tensor")
    __iter__ = None  # Python would iterate by __getitem__, without end

    def __init__(self, recorder: _Recorder, tensor: Tensor, indices: tuple) -> None:
        self.recorder, self.tensor, self.indices = recorder, tensor, indices

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return self.recorder.load(self.tensor, self.indices + more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _wrong_count(self.tensor, self.indices)

    def refuse(self, *others: Any) -> Any:
        """Raise the error for an operation on a tensor that was indexed with too few indices."""
        raise _wrong_count(self.tensor, self.indices)

    __bool__ = refuse


def _wrong_count(tensor: Tensor, indices: tuple) -> TypeError:
    return TypeError(
        f"a tensor of {tensor.dim()} dimensions must be read with {tensor.dim()} indices, got {len(indices)}"
    )


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_KIND_OF_SYMBOL = "value that is known only when a kernel runs"


def _arithmetic(operation: str, reverse: bool = False) -> Callable[..., Any]:
    def apply(recorder: _Recorder, a: Any, b: Any, **none: Any) -> Any:
        _refuse(none)
        return recorder.arithmetic(operation, b, a) if reverse else recorder.arithmetic(operation, a, b)

    return apply


def _sum(operation: str, reverse: bool = False) -> Callable[..., Any]:
    def apply(recorder: _Recorder, a: Any, b: Any, alpha: Any = 1, **none: Any) -> Any:
        _refuse(none)
        if reverse:
            a, b = b, a
        if alpha != 1:
            kinds = recorder.kind(a), recorder.kind(b)
            if isinstance(alpha, float) and "float" not in kinds:
                raise TypeError(f"alpha must be an int for ints, got {alpha}")
            # The product has the dtype of the sum.
            b = recorder.as_float(b) if "float" in kinds else recorder.as_int(b, recorder.conversion(a, b))
            b = recorder.arithmetic("mul", b, alpha)
        return recorder.arithmetic(operation, a, b)

    return apply


def _division(recorder: _Recorder, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    return recorder.arithmetic({None: "div", "floor": "floordiv", "trunc": "quotient"}[rounding_mode], a, b)


def _of_float(operation: str) -> Callable[..., Any]:
    def apply(recorder: _Recorder, x: Any, **none: Any) -> Any:
        _refuse(none)
        return recorder.emit(operation, recorder.as_float(x))

    return apply


def _plain(operation: str) -> Callable[..., Any]:
    def apply(recorder: _Recorder, x: Any) -> Any:
        result = recorder.emit(operation, x)
        return recorder.as_int(result, recorder.conversion(x)) if recorder.kind(result) == "int" else result

    return apply


def _refuse(options: dict[str, Any]) -> None:
    if options:
        raise TypeError(f"option {next(iter(options))} of torch's function does not compile")


def _where(recorder: _Recorder, condition: Any, a: Any, b: Any) -> Any:
    kind = recorder.kind(condition)
    if kind != "bool":
        raise TypeError(f"a condition must be a bool, got {_said(kind)}")
    kinds = [recorder.kind(value) for value in (a, b)]
    if "float" in kinds:
        a, b = recorder.as_float(a), recorder.as_float(b)
    elif "int" in kinds:
        conversion = recorder.conversion(a, b)
        a, b = (recorder.as_int(recorder.fitting(value, conversion), conversion) for value in (a, b))
        return recorder.as_int(recorder.emit("where", condition, a, b), conversion)
    return recorder.emit("where", condition, a, b)


def _pow(recorder: _Recorder, base: Any, exponent: Any) -> Any:
    number = isinstance(exponent, (int, float))
    if isinstance(exponent, float):
        base = recorder.as_float(base)
    stays_int = isinstance(exponent, int) and recorder.kind(base) == "int"
    # Repeated squaring also works for negative bases, and ints wrap around on overflow as in torch.
    if number and (exponent in range(1, 65) or (stays_int and exponent >= 0)):
        if exponent < 2:
            return base if exponent else 1
        half = _pow(recorder, base, int(exponent) // 2)
        square = recorder.arithmetic("mul", half, half)
        return recorder.arithmetic("mul", square, base) if exponent % 2 else square
    if number and exponent == 0.5:
        return recorder.emit("sqrt", recorder.as_float(base))
    kinds = [recorder.kind(value) for value in (base, exponent)]
    power = recorder.emit("pow", recorder.as_float(base), recorder.as_float(exponent))
    if number or "float" in kinds:
        return power
    # Torch's powers of ints are ints: with a negative exponent they are 0, except for a base of 1 or -1.
    is_unit = recorder.arithmetic("eq", recorder.emit("abs", recorder.as_int(base, "int")), 1)
    is_whole = recorder.emit("or", recorder.arithmetic("ge", exponent, 0), is_unit)
    return recorder.emit("where", is_whole, power, 0.0)


def _tan(recorder: _Recorder, x: Any) -> Any:
    return recorder.arithmetic("div", *(recorder.emit(name, recorder.as_float(x)) for name in ("sin", "cos")))


def _silu(recorder: _Recorder, x: Any) -> Any:
    return recorder.arithmetic("mul", x, recorder.emit("sigmoid", recorder.as_float(x)))


def _relu(recorder: _Recorder, x: Any) -> Any:
    # Other than maximum and clamp, it has the derivative 0 at 0.
    return _where(recorder, recorder.arithmetic("le", x, 0), 0, x)


def _clamp(recorder: _Recorder, x: Any, min: Any = None, max: Any = None) -> Any:
    bounds = (min, max)
    are_tensors = not any(one is None or isinstance(one, (int, float)) for one in bounds)
    if clamps_share_ties() and are_tensors and "float" in map(recorder.kind, (x, *bounds)):
        # Where the bounds are equal, torch gives the whole gradient to one of the three.
        is_below, is_above, is_one = (
            recorder.arithmetic(name, *pair)
            for name, pair in (("lt", (x, min)), ("gt", (x, max)), ("eq", bounds))
        )
        one = _where(recorder, is_below, min, _where(recorder, is_above, max, x))
        return _where(recorder, is_one, one, _clamp(recorder, _clamp(recorder, x, min), None, max))
    for of_floats, of_ints, bound in (("clamp_min", "maximum", min), ("clamp_max", "minimum", max)):
        if bound is None:
            continue
        if "float" in (recorder.kind(x), recorder.kind(bound)):
            shares = clamps_share_ties() and not isinstance(bound, (int, float))
            x = recorder.arithmetic(of_ints if shares else of_floats, x, bound)
        else:
            x = recorder.arithmetic(of_ints, x, recorder.fitting(bound, recorder.conversion(x, bound)))
    return x


def _masked_fill(recorder: _Recorder, x: Any, mask: Any, value: Any) -> Any:
    if recorder.kind(x) == "int":
        value = recorder.fitting(recorder.as_int(value, "int"), recorder.conversion(x))
    return _where(recorder, mask, _as_type_of(recorder, value, x), x)


def _logical(operation: str) -> Callable[..., Any]:
    def apply(recorder: _Recorder, *values: Any) -> Any:
        return recorder.emit(operation, *(recorder.emit("bool", v) for v in values))

    return apply


def _convert(recorder: _Recorder, x: Any, dtype: Any = None, **options: Any) -> Any:
    """Record ``x.to(dtype)`` as a conversion between the kinds bool, int and float.

    Different float dtypes are the same kind, because all floats of a program are computed in one dtype.
    """
    dtype = options.pop("dtype", dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"to must be called with a dtype, the only argument that compiles, got {dtype!r:.60}")
    if dtype not in (*DTYPES, *WHOLE):
        raise TypeError(f"a value must be converted to a float, bool, uint8 or a signed int, got {dtype}")
    return _as(_CONVERSIONS.get(dtype) or _kind_of(dtype))(recorder, x)


_CONVERSIONS = {dtype: name for name, dtype in INTS.items()}


def _kind_of(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


def _as(to: str) -> Callable[..., Any]:
    """Return the handler of a conversion to "float", to "bool", or to a dtype in ``INTS``."""

    def apply(recorder: _Recorder, x: Any) -> Any:
        if to in INTS:
            return recorder.as_int(x, to)
        return x if recorder.kind(x) == to else recorder.emit(to, x)

    return apply


def _as_type_of(recorder: _Recorder, x: Any, other: Any) -> Any:
    kind = recorder.kind(other)
    return _as(recorder.conversion(other) if kind == "int" else kind)(recorder, x)


def _new(number: int) -> Callable[..., Any]:
    """Return the handler of ``x.new_ones(())`` or ``x.new_zeros(())``.

    FlexAttention makes constants with these functions.
    """

    def apply(recorder: _Recorder, x: Any, size: Any = (), dtype: Any = None, **options: Any) -> Any:
        if size != ():
            raise TypeError(f"a new value must be one number, of size (), got size {size}")
        kind = recorder.kind(x) if dtype is None else _kind_of(dtype)
        return {"float": float, "int": int, "bool": bool}[kind](number)

    return apply


def _floor(recorder: _Recorder, x: Any) -> Any:
    return x if recorder.kind(x) == "int" else _of_float("floor")(recorder, x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _sum(name) for name in ("add", "sub")},
    **{f"r{name}": _sum(name, True) for name in ("add", "sub")},
    **{name: _arithmetic(name) for name in ("mul", "minimum", "maximum", "fmod")},
    **{name: _arithmetic(name) for name in (*_COMPARISONS, "and", "or", "xor")},
    **{name: _arithmetic(name) for name in ("lshift", "rshift", "mod")},
    **{f"r{name}": _arithmetic(name, True) for name in ("mul", "and", "or", "xor", "mod")},
    **{f"bitwise_{name}": _arithmetic(name) for name in ("and", "or", "xor")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    **{
        name: _of_float(name)
        for name in (
            "exp",
            "exp2",
            "log",
            "log2",
            "sqrt",
            "rsqrt",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "erf",
        )
    },
    **{name: _division for name in ("div", "divide", "truediv", "true_divide")},
    **{name: _arithmetic("div", True) for name in ("rdiv", "rtruediv")},
    **{name: _arithmetic("floordiv") for name in ("floordiv", "floor_divide")},
    **{name: _as("float") for name in ("float", "half", "double", "bfloat16")},
    "byte": _as("uint8"),
    "char": _as("int8"),
    "short": _as("int16"),
    "int": _as("int32"),
    "long": _as("int"),
    "rfloordiv": _arithmetic("floordiv", True),
    "remainder": _arithmetic("mod"),
    "subtract": _sum("sub"),
    "multiply": _arithmetic("mul"),
    "bool": _as("bool"),
    "new_ones": _new(1),
    "new_zeros": _new(0),
    "to": _convert,
    "type_as": _as_type_of,
    "floor": _floor,
    "abs": _plain("abs"),
    "neg": _plain("neg"),
    "sign": _plain("sign"),
    "invert": _plain("not"),
    "bitwise_not": _plain("not"),
    "pow": _pow,
    "rpow": lambda recorder, exponent, base: _pow(recorder, base, exponent),
    "where": _where,
    "clamp": _clamp,
    "clip": _clamp,
    "square": lambda recorder, x: _pow(recorder, x, 2),
    "pos": lambda recorder, x: x,
    "positive": lambda recorder, x: x,
    "masked_fill": _masked_fill,
    "tan": _tan,
    "silu": _silu,
    "relu": _relu,
}
"""torch's functions and tensor methods that can be traced, without underscores around their names."""


class Symbol:
    """A value that is known only when a kernel runs."""

    __slots__ = ("name", "recorder")

    def __init__(self, recorder: _Recorder, name: Name) -> None:
        self.recorder, self.name = recorder, name

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        """Make torch's functions accept symbols in place of tensors.

        While a function is traced, torch calls the recorder instead of this method. Afterwards torch raises
        TypeError because of the result.
        """
        return NotImplemented

    device = None
    """Always None, because the device of the call is unknown when the function is traced."""
    shape = torch.Size()

    def __getattr__(self, name: str) -> Any:
        if name.removesuffix("_") not in FUNCTIONS:
            raise AttributeError(f"a {_KIND_OF_SYMBOL} has no {name!r}")
        return lambda *args, **kwargs: self.recorder.call(name, (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise TypeError(
            f"a branch (if, while, and, or, not) depends on a {_KIND_OF_SYMBOL}: use torch.where, &, | or ~"
        )

    def _no_number(self) -> Any:
        raise TypeError(f"a Python number is made of a {_KIND_OF_SYMBOL}: use torch's functions, not math's")

    __int__ = __float__ = __index__ = __complex__ = __round__ = _no_number
    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise TypeError(f"a {_KIND_OF_SYMBOL} is one number, which has no elements")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"a {_KIND_OF_SYMBOL} is one number, which cannot be indexed")


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Symbol, *others: Any) -> Any:
        return self.recorder.call(name, (self, *others), {})

    return method


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
):  # fmt: skip
    setattr(Symbol, f"__i{_name}__", _operator(f"__i{_name}__"))
for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "radd", "rsub", "rmul",
    "rtruediv", "rfloordiv", "rmod", "rpow", "rand", "ror", "rxor", "lshift", "rshift", "eq", "ne", "lt",
    "le", "gt", "ge", "neg", "pos", "abs", "invert",
):  # fmt: skip
    setattr(Symbol, f"__{_name}__", _operator(_name))
    setattr(_PartlyRead, f"__{_name}__", _PartlyRead.refuse)


def _as_run(function: Any) -> Any:
    """Return the function to run on symbols: a ``@triton.jit`` function becomes its torch equivalent."""
    if isinstance(function, types.FunctionType) or not hasattr(function, "fn"):
        return function
    return in_torch(function)
