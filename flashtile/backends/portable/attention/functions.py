"""Functions of the user (score_mod, mask_mod) in the attention kernels: from a traced program to the
arguments of a launch::

    Program                a traced function: lines of operations on scalars (problems.mask_program)
    -> lowered             cheaper operations with the same results, for Hopper's kernels
    -> _Writer             source text of a ``@triton.jit`` function, which kernels call on whole tiles
    -> with_functions      the kernel's variant with these functions
    -> FunctionPointers    at each call: captured tensors, their gradients, and the lists of a block mask

Each function is generated as source text, and its name contains a digest of the text. A kernel's key contains
the text and the steps that it calls (:mod:`~flashtile.backends.common.keys`). So the same program finds the
same compiled kernel, in this process and in Triton's cache on disk. ``linecache`` holds the text, because the
functions have no file.

Gluon kernels call the same functions, whose results take the layouts of their arguments. A tile that a
function creates would need a layout of its own. A mask creates none, nor does a ``score_mod`` for Gluon
(``gluon=True``). With ``shared`` they have further arguments, for what several scores of a thread have in
common: ``distances`` (:class:`~flashtile.backends.hopper.modifiers.Distances`) and, for a mask, ``columns``,
which holds the results of :func:`column_function`.

Numbers that are added or compared are arguments of the kernel (``numbers_of``), so that a window of another
length needs no new compilation. With ``fixed`` they are literals, for kernels without registers to spare.

Lowering rewrites a score_mod in two ways:

* What is computed from a distance of query and key and becomes a float is computed in float32 from the start,
  where this gives the same number. A distance is then one addition, and its absolute value is free.
* A logarithm of a whole number is one instruction of the hardware, if it reaches the result only through
  arithmetic. Where it is compared, rounded or takes part in anything else, it stays as exact as it was.

The operations ``DISTANCE`` and ``LOG2`` exist in lowered programs only.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import operator
import weakref
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends import compat
from flashtile.backends.common.config import KernelConfig
from flashtile.backends.common.jit import triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.portable.attention.arguments import AttentionVariant
from flashtile.backends.portable.tiles import tanh
from flashtile.caches import BoundedCache
from flashtile.masks.program import (
    LOAD,
    Builder,
    Line,
    Name,
    Operand,
    Program,
    depends_on,
    derivatives,
    is_finite,
    is_variable,
    kernel_sizes,
    mask_program,
    numbers_of,
    score_program,
)
from flashtile.masks.ranges import Range, ranges, wide_lines
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.masks import CAPTURED, MAX_CAPTURED, MAX_SIZES, Mods


@triton.jit
def element(index, size):
    """Clamp ``index`` to a dimension of ``size``; a negative index counts from the end."""
    index = tl.where(index < 0, index + size, index)
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def floor_div(a, b):
    """Divide and round down. Triton's own division of ints rounds towards zero."""
    if (a + b).dtype.is_floating():
        return tl.floor(a / b)
    else:
        quotient = a // b
        return tl.where((quotient * b != a) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def floor_mod(a, b):
    """Return the remainder of :func:`floor_div`, which has the sign of ``b``."""
    return a - floor_div(a, b) * b


@triton.jit
def floor_div_by_positive(a, b):
    """Return :func:`floor_div` of ints for a positive ``b``, in fewer instructions."""
    quotient = a // b
    return tl.where(a < quotient * b, quotient - 1, quotient)


@triton.jit
def floor_mod_by_positive(a, b):
    remainder = a % b
    return tl.where(remainder < 0, remainder + b, remainder)


@triton.jit
def truncated_div(a, b):
    """Divide and round towards zero."""
    if (a + b).dtype.is_floating():
        quotient = a / b
        return tl.where(quotient < 0, tl.ceil(quotient), tl.floor(quotient))
    else:
        return a // b


@triton.jit
def widened(loaded):
    """Return loaded ints with at least 32 bits. Narrower ones wrap only where a program says so."""
    if loaded.dtype.primitive_bitwidth < 32:
        return loaded.to(tl.int32)
    else:
        return loaded


@triton.jit
def power(a, b):
    """Return ``a ** b`` of floats. Negative bases (with whole exponents) and 0 ** 0 give torch's results."""
    size = tl.exp2(tl.log2(tl.abs(a)) * b)
    is_whole = b == tl.floor(b)
    is_odd = is_whole & (b * 0.5 != tl.floor(b * 0.5))
    signed = tl.where(is_odd, -size, tl.where(is_whole, size, float("nan")))
    return tl.where(b == 0, 1.0, tl.where(a < 0, signed, size))


@triton.jit
def sign(a):
    return tl.where(a > 0, 1, tl.where(a < 0, -1, 0)).to(a.dtype)


@triton.jit
def approximate_log2(a):
    """Return log2(a) as ``LOG2`` defines it. Numbers without a fraction are not subnormal."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)


_STEPS = {
    "approximate_log2": approximate_log2, "element": element, "floor_div": floor_div,
    "floor_div_by_positive": floor_div_by_positive, "floor_mod": floor_mod,
    "floor_mod_by_positive": floor_mod_by_positive, "power": power, "sign": sign, "tanh": tanh,
    "truncated_div": truncated_div, "widened": widened,
}  # fmt: skip
"""Operations that Triton lacks, or computes differently from torch."""

DISTANCE = "distance"
"""``distance a b c``: a - b + c as a float. ``a`` and ``b`` are ``q`` and ``kv`` in either order."""
LOG2 = "approximate_log2"
"""Logarithm to base 2 of a float without a fraction, with an error of 2 ** -22 of the result.

It is lg2.approx of PTX. From 0.5 to 2 PTX bounds only the absolute error by 2 ** -22, and a factor would
enlarge it. Numbers with a fraction are therefore left to the exact logarithm.
"""

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>", "fmod": "%",
}  # fmt: skip
_CALLS = {
    "minimum": "tl.minimum", "maximum": "tl.maximum", "clamp_max": "tl.minimum", "clamp_min": "tl.maximum",
    "abs": "tl.abs", "where": "tl.where", "exp": "tl.exp",
    "exp2": "tl.exp2", "log": "tl.log", "log2": "tl.log2", "sqrt": "tl.sqrt", "rsqrt": "tl.rsqrt",
    "sin": "tl.sin", "cos": "tl.cos", "sigmoid": "tl.sigmoid", "erf": "tl.erf", "floor": "tl.floor",
    "tanh": "tanh", "pow": "power", "floordiv": "floor_div", "mod": "floor_mod", "sign": "sign",
    "quotient": "truncated_div",
    LOG2: "approximate_log2",
}  # fmt: skip

_NARROW = {"int32": "", "int16": ".to(tl.int16)", "int8": ".to(tl.int8)", "uint8": ".to(tl.uint8)"}
_EXTREMES = ("minimum", "maximum", "clamp_max", "clamp_min")
_BY_NUMBER = ("div", "floordiv", "mod")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_MAX_COMPARED = 2**29
"""Bound of numbers that a distance in 32 bits may be compared with. Their difference must fit in 32 bits."""

_kept: BoundedCache = BoundedCache(4 * 2**20)
"""Compiled functions by their source text."""


def score_function(mods: Mods, gluon: bool = False, fixed: bool = False, shared: bool = False) -> Any:
    """Return ``score_mod`` as a function; None without one.

    The function is ``(scores, b, head, rows, keys, captured) -> (new scores, derivative)``, where the
    derivative is that of the new scores with respect to the given scores.
    """
    program = score_program(mods)
    if program is None:
        return None
    both, _ = derivatives(program)
    if gluon:
        both = lowered(both, mods.positions)
    writer = _Writer(both, mods, gluon, fixed, shared)
    writer.lines_of_program()
    value, factor = (writer.spread(result) for result in both.results)
    parameters = "score, b, h, q, kv, captured" + (", distances" if shared else "")
    return writer.function("score_mod", parameters, f"return {value}, {factor}")


def guards(mods: Mods) -> dict[str, Any]:
    """Return the variant's GUARD fields: whether ``score_mod`` or its derivative may be NaN or infinite. A
    function that stays finite gets no guard, which saves registers."""
    program = score_program(mods)
    if program is None:
        return {"GUARD_SCORES": False, "GUARD_FACTORS": False}
    both, _ = derivatives(program)
    score, factor = both.results
    return {
        "GUARD_SCORES": not is_finite(both, score, loads_are=True),
        "GUARD_FACTORS": not is_finite(both, factor, loads_are=False),
    }


def mask_function(mods: Mods, fixed: bool = False, shared: bool = False) -> Any:
    """Return ``mask_mod`` as a function ``(b, head, rows, keys, captured) -> seen``; None without one.

    ``seen`` broadcasts to the tile. It may be a scalar or a Python bool.
    """
    program = mask_program(mods)
    if program is None:
        return None
    writer = _Writer(program, mods, fixed=fixed, shared=shared)
    if shared:
        writer.columns = _column_loads(program)
    writer.lines_of_program()
    parameters = "b, h, q, kv, captured" + (", distances, columns" if shared else "")
    return writer.function("mask_mod", parameters, f"return {writer.operand(program.results[0])}")


def column_function(mods: Mods) -> Any:
    """Return a function ``(b, head, keys, captured) -> values`` for Gluon; None if no values are needed.

    It returns a tuple of the elements of captured tensors that ``mask_mod`` loads for each key.
    """
    program = mask_program(mods)
    if program is None or not _column_loads(program):
        return None
    loads = Builder(program.lines).finish(*_column_loads(program))
    writer = _Writer(loads, mods)
    writer.lines_of_program()
    values = "".join(f"{writer.operand(result)}, " for result in loads.results)
    return writer.function("mask_columns", "b, h, kv, captured", f"return ({values})")


def _column_loads(program: Program) -> tuple[Name, ...]:
    """Return the names of the loads that depend on the key, but not on the query."""
    depends = depends_on(program)
    return tuple(
        line.name for line in program.loads if "kv" in depends[line.name] and "q" not in depends[line.name]
    )


def gradient_function(mods: Mods) -> Any:
    """Return a function that adds to gradients of captured tensors; None if no tensor needs a gradient.

    The function is ``(ds, scores, b, head, rows, keys, captured)``, where ``ds`` [rows, keys] is the gradient
    of the modified scores. It adds to the gradient of each element that ``score_mod`` read.
    """
    program = score_program(mods)
    if program is None or not mods.learned:
        return None
    both, loads = derivatives(program, frozenset(mods.learned))
    if not loads:
        return None
    writer = _Writer(both, mods)
    writer.lines_of_program()
    depends = depends_on(both)
    results = both.results[2:]
    for number, load in enumerate(loads):
        partial, *indices = results[: 1 + load.indices]
        results = results[1 + load.indices :]
        of: frozenset[str] = frozenset().union(*(depends[i] for i in indices if isinstance(i, Name)))
        value = f"ds * ({writer.operand(partial)})"
        if not is_finite(both, partial, loads_are=False):  # ds is 0 where a score is hidden
            value = f"tl.where(ds == 0.0, 0.0, {value})"
        if "score" in of or {"q", "kv"} <= of:  # each score may have read another element
            pass
        elif "q" in of:
            value = f"tl.sum({value}, 1)[:, None]"
        elif "kv" in of:
            value = f"tl.sum({value}, 0)[None, :]"
        else:
            value = f"tl.sum({value})"
        pointer = writer.pointer(f"g{number}", f"captured.gradient_{load.tensor}", load.tensor, indices)
        writer.write(f'tl.atomic_add({pointer}, {value}, sem="relaxed")')
    return writer.function("add_gradients", "ds, score, b, h, q, kv, captured", "return")


class _Writer:
    """Writer of a function's body."""

    def __init__(
        self, program: Program, mods: Mods, gluon: bool = False, fixed: bool = False, shared: bool = False
    ) -> None:
        self.program = program
        self.gluon = gluon
        self.shared = shared
        self.columns: tuple[Name, ...] = ()
        """Names of the loads that the function gets as ``columns``."""
        self.first_size = [sum(mods.ranks[:i]) for i in range(len(mods.ranks) + 1)]
        self.numbers = () if fixed else numbers_of(mods)
        self.wide = wide_lines(program, mods.positions)
        self.distances = {
            line.name: line.operands
            for line in program.lines
            if line.operation == "sub" and set(line.operands) == {"q", "kv"} and line.name not in self.wide
        }
        """Operands of the lines that are distances."""
        self.body: list[str] = []

    def write(self, text: str) -> None:
        self.body.append(text)

    def operand(self, operand: Any) -> str:
        if isinstance(operand, float) and (operand != operand or operand in (float("inf"), -float("inf"))):
            return f'float("{operand}")'
        return str(operand) if isinstance(operand, Name) else f"({operand!r})"

    def spread(self, operand: Any) -> str:
        """Return the source text of an operand, broadcast to the shape of the scores as floats."""
        whole = "score" in depends_on(self.program)[operand] if isinstance(operand, Name) else False
        text = self.operand(operand)
        if whole:
            return text
        if self.gluon:
            return f"tl.where(score == score, {text}, {text})"
        return f"(tl.zeros_like(score) + {text})"

    def lines_of_program(self) -> None:
        for line in self.program.lines:
            self.write(f"{line.name} = {self._load(line) if line.operation == LOAD else self._call(line)}")

    def _call(self, line: Line) -> str:
        operation = line.operation
        if operation == DISTANCE:
            return self._float_distance(*line.operands)
        if line.name in self.wide:
            return self._wide_call(line)
        by_number = self._by_number(operation, *line.operands) if operation in _BY_NUMBER else None
        if by_number is not None:
            return by_number
        if self.shared and (line.name in self.distances or operation in _COMPARISONS):
            of_distance = self._int_distance(line)
            if of_distance is not None:
                return of_distance
        return self._text(line, [self._number(line, o) or self.operand(o) for o in line.operands])

    def _int_distance(self, line: Line) -> str | None:
        """Return the source text of a distance, or of its comparison with an int; None for other comparisons.

        Each score compares a number of the thread with a constant of the register.
        """
        a, b = line.operands
        if line.name in self.distances:
            return f"{'' if a == 'q' else '-'}(distances.threads + distances.registers)"
        number = "0"
        if a in self.distances and type(b) is int and abs(b) < _MAX_COMPARED:
            number = self._number(line, b) or self.operand(b)
            a, b = self.distances[a]
        if {a, b} != {"q", "kv"}:
            return None
        compare = _INFIX[line.operation]
        if a == "q":
            return f"distances.threads - {number} {compare} 0 - distances.registers"
        return f"0 - distances.registers {compare} distances.threads + {number}"

    def _float_distance(self, a: Name, b: Name, offset: int) -> str:
        """Return the source text of a - b + offset as a float, in one operation for each score."""
        if not self.shared:
            return f"({a} + ({offset})).to(tl.float32) - {b}.to(tl.float32)"
        threads = f"distances.threads + ({offset})" if a == "q" else f"({offset}) - distances.threads"
        sign = "+" if a == "q" else "-"
        return f"({threads}).to(tl.float32) {sign} distances.registers.to(tl.float32)"

    def _wide_call(self, line: Line) -> str:
        """Return the source text of an operation on 64-bit ints."""
        operands = []
        for operand in line.operands:
            text = self.operand(operand)
            if isinstance(operand, Name) and self.program.kinds[operand] == "int":
                text = f"{text}.to(tl.int64)"
            elif line.operation == "where" and type(operand) is int:  # Triton may take a literal as unsigned
                text = f"({self.operand(line.operands[0])}.to(tl.int64) * 0 + {text})"
            operands.append(text)
        return self._text(line, operands)

    def _text(self, line: Line, operands: list[str]) -> str:
        operation = line.operation
        if operation in _INFIX:
            return f" {_INFIX[operation]} ".join(operands)
        if operation in _EXTREMES and line.kind == "float":
            operands.append("tl.PropagateNan.ALL")
        if operation in _CALLS:
            return f"{_CALLS[operation]}({', '.join(operands)})"
        (x,) = operands
        if operation in _NARROW:
            return f"{x}{_NARROW[operation]}.to(tl.int32)"
        return {
            "neg": f"{x} * -1.0" if line.kind == "float" else f"-{x}",  # Triton's -x is a subtraction
            "not": f"{x} == 0" if line.kind == "bool" else f"~{x}",
            "float": f"{x}.to(tl.float32)",
            "int": f"{x}.to(tl.int32)",
            "bool": f"{x} != 0",
        }[operation]

    def _number(self, line: Line, operand: Any) -> str:
        """Return the source text of the kernel argument that holds a number; "" if no argument holds it."""
        if operand not in self.numbers or not is_variable(self.program, line, operand):
            return ""
        return f"captured.size_{MAX_SIZES - 1 - self.numbers.index(operand)}"

    def _by_number(self, operation: str, x: Any, number: Any) -> str | None:
        """Return the source text of a cheaper equivalent of a division by a constant; None if none exists."""
        if not isinstance(x, Name) or isinstance(number, Name) or number <= 0:
            return None
        text, kind = self.operand(x), self.program.kinds[x]
        if operation == "div":
            # A product with the inverse and the quotient round differently. In a score this is harmless,
            # but a comparison could have another result.
            of_score = kind == "float" and "score" in depends_on(self.program)[x]
            # The bounds keep the inverse a normal number of float32.
            return f"{text} * ({1 / number!r})" if of_score and 1e-30 < number < 1e30 else None
        if kind != "int" or type(number) is not int:
            return None
        if number & (number - 1):  # no power of two. Powers round down by shifts and masks, as torch does
            return f"{_CALLS[operation]}_by_positive({text}, {number})"
        if operation == "mod":
            return f"{text} & {number - 1}"
        return f"{text} >> {number.bit_length() - 1}"

    def _load(self, line: Line) -> str:
        if line.name in self.columns:
            return f"columns[{self.columns.index(line.name)}]"
        tensor, *indices = line.operands
        loaded = f"tl.load({self.pointer(line.name, f'captured.tensor_{tensor}', tensor, indices)})"
        as_kind = {"float": f"{loaded}.to(tl.float32)", "bool": f"{loaded} != 0", "int": f"widened({loaded})"}
        return as_kind[line.kind]

    def pointer(self, name: str, base: str, tensor: int, indices: list[Any]) -> str:
        """Return the source text of a pointer to an element.

        Indices are clamped to the tensor; negative ones count from the end.
        """
        pointer = base
        sizes = [f"captured.size_{self.first_size[tensor] + i}" for i in range(len(indices))]
        for i, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            at = f"{name}_{i}"
            self.write(f"{at} = element({self.operand(index)}, {size})")
            # The tensor is contiguous: the last dimension has stride 1, the others may need 64 bits.
            later = " * ".join(sizes[i + 1 :])
            pointer += f" + {at}.to(tl.int64) * ({later})" if later else f" + {at}"
        return pointer

    def function(self, name: str, parameters: str, result: str) -> Any:
        body = "".join(f"    {line}\n" for line in (*self.body, result))
        return _function(name, parameters, body)


def _function(name: str, parameters: str, body: str) -> Any:
    """Return the ``@triton.jit`` function with this source text. Equal texts share one function."""
    key = (name, parameters, body)
    made = _kept.get(key)
    if made is not None:
        return made
    digest = hashlib.sha256(f"{key}".encode()).hexdigest()[:24]
    source = f"def {name}_{digest}({parameters}):\n{body}"
    filename = f"<flashtile {name} {digest}>"
    linecache.cache[filename] = len(source), None, source.splitlines(True), filename
    names: dict[str, Any] = {"__name__": __name__, "tl": tl, **_STEPS}
    exec(compile(source, filename, "exec"), names)
    made = triton.jit(names[f"{name}_{digest}"])
    compat.forget_function(made)
    weakref.finalize(made, linecache.cache.pop, filename, None)
    return _kept.store(key, made, 8 * len(source))


def function_of(source: str) -> Any:
    """Return the function that this module has made in another process, from its source text."""
    head, _, body = source.partition("\n")
    name, _, parameters = head.removeprefix("def ").removesuffix("):").partition("(")
    return _function(name.rpartition("_")[0], parameters, body)


EXACT = 2**24
"""float32 holds all ints up to this magnitude."""

_ARITHMETIC = frozenset(
    ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "clamp_min", "clamp_max", "where")
)
"""Operations that compute the same on ints and on floats that hold them exactly. They enlarge no error,
relative to the term or factor that it comes from."""


def lowered(program: Program, positions: int) -> Program:
    """Return the program in cheaper operations, with the same results.

    Args:
        positions: upper bound of query and key positions.
    """
    lowering = _Lowering(program, positions)
    for line in program.lines:
        lowering.add(line)
    return lowering.builder.finish(*map(lowering.approximate, program.results))


class _Lowering:
    """The new operands of the lines so far, by their old names."""

    def __init__(self, program: Program, positions: int) -> None:
        self.kinds, self.depends = program.kinds, depends_on(program)
        self.ranges = ranges(program, positions)
        self.builder = Builder()
        self.equal: dict[Operand, Operand] = {}
        """New operands that are equal to old ones."""
        self.floats: dict[Operand, Operand] = {}
        """New floats that are equal to old ints, which depend on both positions."""
        self.approximations: dict[Operand, Operand] = {}
        """New operands that differ from old ones only by the errors of approximate logarithms."""
        self.linear: dict[Operand, tuple[int, int, int]] = {"q": (1, 0, 0), "kv": (0, 1, 0)}
        """(a, b, c) of ints that are a q + b kv + c."""
        self.whole: set[Operand] = set()
        """Floats without a fraction."""

    def add(self, line: Line) -> None:
        name, operation, operands = line.name, line.operation, line.operands
        if operation == LOAD:
            indices = map(self.value, operands[1:])
            self.equal[name] = self.builder.emit(
                LOAD, operands[0], *indices, kind=line.kind, where=line.where
            )
        elif line.kind != "float":
            self.equal[name] = self.builder.emit(operation, *map(self.value, operands))
            if line.kind == "int":
                self._add_int(line)
        elif operation == "float" and operands[0] in self.floats:
            self.equal[name] = self.floats[operands[0]]
        else:
            self.equal[name] = self.builder.emit(operation, *map(self.number, operands))
        if line.kind == "float":
            self._add_approximation(line)

    def value(self, operand: Operand) -> Operand:
        """Return the new operand that is equal to an old one."""
        return self.equal.get(operand, operand) if isinstance(operand, Name) else operand

    def number(self, operand: Operand) -> Operand:
        """Return :meth:`value` for an operation on floats, as a float if this is cheaper."""
        return self.floats[operand] if operand in self.floats else self.value(operand)

    def approximate(self, operand: Operand) -> Operand:
        """Return :meth:`number` with approximate logarithms."""
        return self.approximations[operand] if operand in self.approximations else self.number(operand)

    def as_float(self, operand: Operand) -> Operand:
        """Return the float that is equal to an int."""
        if operand in self.floats:
            return self.floats[operand]
        value = self.value(operand)
        return self.builder.emit("float", value) if isinstance(value, Name) else float(value)

    def _add_int(self, line: Line) -> None:
        """Add the float that is equal to an int, if the int depends on both positions and floats are exact.

        The last operation may be rounded, as the conversion of the int would be. No zero gets a sign.
        """
        form = self._linear(line)
        if form is not None:
            self.linear[line.name] = form
        operands = _without_condition(line)
        if not {"q", "kv"} <= self.depends[line.name] or not all(map(self._is_exact, operands)):
            return
        if form is not None and sorted(form[:2]) == [-1, 1] and self._is_exact(line.name):
            names = (Name("q"), Name("kv")) if form[0] == 1 else (Name("kv"), Name("q"))
            self.floats[line.name] = self.builder.emit(DISTANCE, *names, form[2], kind="float")
        elif line.operation in _ARITHMETIC and all(map(self._has_float, operands)):
            floats = [self.as_float(operand) for operand in operands]
            if line.operation == "neg":
                self.floats[line.name] = self.builder.emit("sub", 0.0, *floats)
            elif line.operation == "where":
                self.floats[line.name] = self.builder.emit("where", self.value(line.operands[0]), *floats)
            elif line.operation != "mul" or self._has_positive_zero(operands):
                self.floats[line.name] = self.builder.emit(line.operation, *floats)

    def _has_float(self, operand: Operand) -> bool:
        """Whether the float of an operand takes no conversion of each score's int."""
        is_distance = isinstance(operand, Name) and {"q", "kv"} <= self.depends[operand]
        return operand in self.floats or not is_distance

    def _range(self, operand: Operand) -> Range:
        return self.ranges[operand] if isinstance(operand, Name) else (operand, operand)

    def _is_exact(self, operand: Operand) -> bool:
        low, high = self._range(operand)
        return low >= -EXACT and high <= EXACT

    def _has_positive_zero(self, factors: Sequence[Operand]) -> bool:
        """Whether a product is never 0 times a negative number, which is -0.0 for floats."""
        a, b = factors
        (a_low, a_high), (b_low, b_high) = self._range(a), self._range(b)
        is_signed = (a_low <= 0 <= a_high and b_low < 0) or (b_low <= 0 <= b_high and a_low < 0)
        return a == b or not is_signed

    def _linear(self, line: Line) -> tuple[int, int, int] | None:
        """Return (a, b, c) if an int is a q + b kv + c with constants, otherwise None."""
        if line.operation not in ("add", "sub", "neg"):
            return None
        forms = [self.linear.get(o) if isinstance(o, Name) else (0, 0, o) for o in line.operands]
        if line.operation == "neg":
            forms.insert(0, (0, 0, 0))
        first, second = forms
        if first is None or second is None:
            return None
        sign = 1 if line.operation == "add" else -1
        a, b, c = (x + sign * y for x, y in zip(first, second, strict=True))
        return a, b, c

    def _add_approximation(self, line: Line) -> None:
        name, operation, operands = line.name, line.operation, line.operands
        keeps_whole = operation == "float" or operation in _ARITHMETIC
        if operation == "floor" or (keeps_whole and all(map(self._is_whole, _without_condition(line)))):
            self.whole.add(name)
        if operation in ("log", "log2") and self._is_whole(operands[0]):
            logarithm = self.builder.emit(LOG2, self.number(operands[0]), kind="float")
            factor = math.log(2) if operation == "log" else 1.0
            self.approximations[name] = self.builder.emit("mul", logarithm, factor)
        elif operation in _ARITHMETIC and any(operand in self.approximations for operand in operands):
            self.approximations[name] = self.builder.emit(operation, *map(self.approximate, operands))

    def _is_whole(self, operand: Operand) -> bool:
        """Whether an operand has no fraction, or is infinite or NaN."""
        if isinstance(operand, Name):
            return operand in self.whole or self.kinds[operand] != "float"
        return float(operand).is_integer()


def _without_condition(line: Line) -> tuple[Operand, ...]:
    return line.operands[1:] if line.operation == "where" else line.operands


SIZES = tuple(f"size_{i}" for i in range(MAX_SIZES))


Captured: Any = namedtuple(  # type: ignore[misc]
    "Captured", [f"{kind}_{i}" for kind in ("tensor", "gradient") for i in range(MAX_CAPTURED)] + [*SIZES]
)
"""Contiguous tensors that functions read, their fp32 gradients, and the sizes of all their dimensions.

The last fields of sizes hold integer constants of the traced functions. Unused tensors are None, unused
sizes 0."""


class Lists(NamedTuple):
    """Lists of a block mask: the key blocks of each row block, or the row blocks of each key block.

    ``batch`` and ``heads`` are the mask's own sizes: 1 if all sequences or heads share it.
    """

    num_blocks: Any
    indices: Any
    full_num_blocks: Any
    full_indices: Any
    batch: Any
    heads: Any


kv_lists_of = operator.attrgetter("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
q_lists_of = operator.attrgetter("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
_captured_of = operator.attrgetter(*CAPTURED)
_PLAIN = len(OptionalTensors._fields)
"""Number of optional tensors of a call without score or mask functions. They come first."""
_NO_GRADIENTS = (None,) * MAX_CAPTURED


def captured_of(extras: Any) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in _captured_of(extras)]


def with_functions(
    plain: AttentionVariant, problem: Problem, config: KernelConfig, owns_keys: bool
) -> AttentionVariant:
    """Add the score and mask functions of ``problem`` to a variant.

    ``owns_keys``: whether each program computes the results of a block of keys (dk, dv), not of rows.
    """
    mods = problem.mods
    assert mods is not None
    score = score_function(mods)
    variant = replace(
        plain,
        SCORE_MOD=score,
        MASK_MOD=mask_function(mods),
        SCALED_SCORES=plain.SCALED_SCORES or score is not None,
        **guards(mods),
    )
    if mods.block_size is None:
        return variant
    size_q, size_kv = mods.block_size
    variant = replace(
        variant,
        EVEN_M=problem.seqlen_q % size_q == 0,
        EVEN_N=problem.seqlen_k % size_kv == 0,
        MASK_BLOCK=size_kv if owns_keys else size_q,
        TILES_PER_MASK_BLOCK=size_q // config.BLOCK_M if owns_keys else size_kv // config.BLOCK_N,
    )
    return replace(variant, FULL=replace(variant, MASK_MOD=None))


class FunctionPointers:
    """``(kernel, extras, captured) -> last arguments of the kernel``, for calls of one signature."""

    def __init__(self, problem: Problem, extras: Any) -> None:
        mods = problem.mods
        assert mods is not None
        self._mods = mods
        self._sizes = kernel_sizes(mods, _captured_of(extras))
        self._list_sizes: Sequence[int] = ()
        if mods.block_size is not None:
            self._list_sizes = [max(size, 1) for size in extras.kv_num_blocks.shape[:2]]

    def __call__(
        self,
        kernel: CachedLaunch,
        extras: Any,
        captured: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None] = _NO_GRADIENTS,
        owns_keys: bool = False,
    ) -> tuple[Any, ...]:
        """Return the kernel's last arguments.

        ``captured``: the tensors of :func:`captured_of`, which the caller keeps alive until the launch.
        ``owns_keys``: whether each program computes the results of a block of keys (dk, dv), not of rows.
        """
        tensors: Sequence[Any] = (*captured, *gradients)
        lists: Sequence[Any] = ()
        if self._list_sizes:
            lists = (q_lists_of if owns_keys else kv_lists_of)(extras)
        if kernel.takes_addresses:
            tensors, lists = _addresses(tensors), _addresses(lists)
        listed = Lists._make((*lists, *self._list_sizes)) if lists else None
        return (*extras[:_PLAIN], None, Captured(*tensors, *self._sizes), listed)

    def new_gradients(self, captured: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return fp32 zeros for each captured tensor that requires a gradient, and None for the others."""
        return [
            tensor.new_zeros(tensor.shape, dtype=torch.float32)
            if tensor is not None and i in self._mods.learned
            else None
            for i, tensor in enumerate(captured)
        ]

    def cast(
        self, gradients: Sequence[Tensor | None], captured: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Convert each gradient to the dtype of its tensor."""
        return [
            None if gradient is None or tensor is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, captured, strict=True)
        ]


def zero_gradients(mods: Mods, extras: Any) -> tuple[Tensor | None, ...]:
    """Return zero gradients of the captured tensors, for calls in which no row sees a key."""
    return tuple(
        torch.zeros_like(tensor) if tensor is not None and i in mods.learned else None
        for i, tensor in enumerate(_captured_of(extras))
    )


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
