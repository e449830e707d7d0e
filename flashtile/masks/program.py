"""A score or mask function as a list of elementary operations: the traced form of a user's function.

A program has no branches. Each line names the result of one operation. Its operands are earlier results, the
inputs (``score``, ``b``, ``h``, ``q``, ``kv``) and numbers. Operators, compiled graphs and cache keys hold
the program's text::

    t0: int = sub q kv
    t1: float = load 0 h  # alibi.py:7: return score - slopes[head] * (q_idx - kv_idx)
    t2: float = mul t1 t0
    t3: float = sub score t2
    return t3

``load i ...`` reads an element of captured tensor ``i``. A result depends on a single score, so its
derivative with respect to the score is one number. :func:`derivatives` appends lines that compute this
derivative and those with respect to loaded elements. It uses reverse-mode differentiation (Griewank and
Walther, *Evaluating Derivatives*, 2008, chapter 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flashtile.masks.operations import OPERATIONS, kind_of_number
from flashtile.problems.common import cached
from flashtile.problems.masks import MAX_CAPTURED, MAX_SIZES, Mods

INPUTS = {"score": "float", "b": "int", "h": "int", "q": "int", "kv": "int"}
"""Inputs that every program may read, and their kinds."""

LOAD = "load"

_WITH_ANY_NUMBER = frozenset(("add", "sub", "eq", "ne", "lt", "le", "gt", "ge", "minimum", "maximum"))
"""Operations on ints that are no faster if an operand is a compile-time constant."""


Name = str
"""An operand that is a result or an input. All other operands are numbers.

The type is str itself, because Dynamo of torch 2.11 cannot create objects of subclasses of str.
"""


Operand = Any
"""A Name, or a bool, int or float."""


class Line(NamedTuple):
    name: Name
    kind: str
    """Kind of the result: "float", "int" or "bool"."""
    operation: str
    operands: tuple[Operand, ...]
    where: str = ""
    """The user's source line, for operations that can fail at run time."""

    def __str__(self) -> str:
        text = f"{self.name}: {self.kind} = {' '.join([self.operation, *map(str, self.operands)])}"
        return f"{text}  # {self.where}" if self.where else text


class Program(NamedTuple):
    lines: tuple[Line, ...]
    results: tuple[Operand, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.lines), f"return {' '.join(map(str, self.results))}"])

    @property
    def loads(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.operation == LOAD)

    @property
    def kinds(self) -> dict[str, str]:
        return INPUTS | {line.name: line.kind for line in self.lines}


@cached
def parse(text: str) -> Program:
    """Parse the text of a program, the inverse of ``str(program)``."""
    *lines, last = text.split("\n")
    parsed = []
    for line in lines:
        code, _, where = line.partition("  # ")
        name, kind, _, operation, *operands = code.split(" ")
        parsed.append(Line(Name(name[:-1]), kind, operation, tuple(map(_operand, operands)), where))
    return Program(tuple(parsed), tuple(map(_operand, last.split(" ")[1:])))


def _operand(token: str) -> Operand:
    if token in ("True", "False"):
        return token == "True"
    if token in ("inf", "-inf", "nan") or token[0].isdigit() or token[0] == "-":
        return int(token) if token.lstrip("-").isdigit() else float(token)
    return Name(token)


class Builder:
    """Writer of a program's lines.

    Equal operations share a line. An operation gets no line if all operands are numbers, or if the result is
    one of the operands. The result is then returned directly.
    """

    def __init__(self, lines: Sequence[Line] = ()) -> None:
        self.lines = list(lines)
        self.kinds = INPUTS | {line.name: line.kind for line in lines}
        self._known: dict[tuple, Name] = {}

    def kind(self, operand: Operand) -> str:
        return self.kinds[operand] if isinstance(operand, Name) else kind_of_number(operand)

    def emit(self, operation: str, *operands: Operand, kind: str | None = None, where: str = "") -> Operand:
        """Append a line for an operation if it needs one, and return the result: a Name or a number.

        Args:
            kind: kind of the loaded element; None for operations other than loads.
            where: the user's source line.
        """
        if kind is None:
            of = OPERATIONS[operation]
            kind = of.kind(*map(self.kind, operands))
            simpler = of.simplify(*operands) if of.simplify is not None else None
            if simpler is None and not any(isinstance(operand, Name) for operand in operands):
                simpler = of.number(*operands)
            if simpler is not None:  # 1.0 * i simplifies to the int i, but the result must be a float
                return simpler if self.kind(simpler) == kind else self.emit(kind, simpler)
        if any(type(operand) is int and not -(2**63) <= operand < 2**63 for operand in operands):
            raise TypeError("an int must fit 64 bits")
        # True == 1 == 1.0, but they are different operands.
        key = (operation, *((type(operand), operand) for operand in operands))
        if key not in self._known:
            name = self._known[key] = Name(f"t{len(self.lines)}")
            self.lines.append(Line(name, kind, operation, operands, where))
            self.kinds[name] = kind
        return self._known[key]

    def finish(self, *results: Operand) -> Program:
        """Return the program that computes these results, without unused lines."""
        needed = set(results)
        kept = []
        for line in reversed(self.lines):
            if line.name in needed:
                needed.update(line.operands)
                kept.append(line)
        numbered = {line.name: Name(f"t{i}") for i, line in enumerate(reversed(kept))}
        lines = (
            line._replace(name=numbered[line.name], operands=_renamed(line.operands, numbered))
            for line in reversed(kept)
        )
        return Program(tuple(lines), _renamed(results, numbered))


def _renamed(operands: tuple[Operand, ...], names: dict[Name, Name]) -> tuple[Operand, ...]:
    return tuple(names.get(o, o) if isinstance(o, Name) else o for o in operands)


def soft_cap_of(program: Program) -> float:
    """Return ``cap`` if the program is ``cap * tanh(score / cap)``, otherwise 0.0."""
    if [line.operation for line in program.lines] != ["div", "tanh", "mul"]:
        return 0.0
    divided, of_tanh, factors = (line.operands for line in program.lines)
    score, cap = divided
    if score != "score" or isinstance(cap, Name) or cap <= 0:
        return 0.0
    first, second, last = (line.name for line in program.lines)
    is_cap = of_tanh == (first,) and factors in ((cap, second), (second, cap)) and program.results == (last,)
    return float(cap) if is_cap else 0.0


def composed(first: Program, second: Program) -> Program:
    """Return the program that applies ``second`` to the score that ``first`` returns.

    Both refer to the same list of captured tensors.
    """
    builder = Builder(first.lines)
    known: dict[Operand, Operand] = {Name("score"): first.results[0]}

    def value(operand: Operand) -> Operand:
        return known.get(operand, operand) if isinstance(operand, Name) else operand

    for line in second.lines:
        kind = line.kind if line.operation == LOAD else None
        operands = map(value, line.operands)
        known[line.name] = builder.emit(line.operation, *operands, kind=kind, where=line.where)
    return builder.finish(*map(value, second.results))


def alibi(tensor: int, offset: int, by_batch: bool) -> Program:
    """Return ALiBi as a program: the score minus a slope times the distance of query and key.

    Captured tensor ``tensor`` holds the slopes, (heads,), or (batch, heads) if ``by_batch``. Query ``i`` is
    at the position of key ``i + offset``.
    """
    builder = Builder()
    distance = builder.emit("sub", builder.emit("add", Name("q"), offset), Name("kv"))
    places = (Name("b"), Name("h")) if by_batch else (Name("h"),)
    slope = builder.emit(LOAD, tensor, *places, kind="float")
    bias = builder.emit("mul", slope, builder.emit("float", builder.emit("abs", distance)))
    return builder.finish(builder.emit("sub", Name("score"), bias))


class Load(NamedTuple):
    """A load of an element of a captured tensor.

    The program computes the derivative with respect to this element.
    """

    tensor: int
    indices: int
    """Number of indices of the element, which are results of the program."""


def derivatives(program: Program, tensors: frozenset[int] = frozenset()) -> tuple[Program, tuple[Load, ...]]:
    """Return (program, loads), where the new program also computes derivatives.

    The new program returns the original result, and then its derivative with respect to the score. For each
    load from one of ``tensors``, it also returns the derivative with respect to the loaded element, followed
    by the indices of this element. ``loads`` describes these loads.
    """
    builder = Builder(program.lines)
    (result,) = program.results
    adjoints: dict[Operand, Operand] = {result: 1.0} if isinstance(result, Name) else {}
    for line in reversed(program.lines):
        adjoint = adjoints.get(line.name, 0.0)
        gradient = None if line.operation == LOAD else OPERATIONS[line.operation].gradient
        if gradient is None or line.kind != "float" or _is_zero(adjoint):
            continue
        partials = gradient(builder.emit, line.name, *line.operands)
        for operand, partial in zip(line.operands, partials, strict=True):
            if partial is None or not isinstance(operand, Name) or builder.kind(operand) != "float":
                continue
            term = partial(adjoint) if callable(partial) else builder.emit("mul", adjoint, partial)
            adjoints[operand] = builder.emit("add", adjoints.get(operand, 0.0), term)
    results = [result, adjoints.get(Name("score"), 0.0)]
    loads = []
    for line in program.loads:
        tensor, *indices = line.operands
        if tensor in tensors and line.name in adjoints:
            results += [adjoints[line.name], *indices]
            loads.append(Load(tensor, len(indices)))
    return builder.finish(*results), tuple(loads)


_MAY_OVERFLOW = frozenset(("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "pow"))
_DIVISIONS = frozenset(("div", "floordiv", "mod", "quotient", "fmod"))


def is_finite(program: Program, result: Operand, loads_are: bool) -> bool:
    """Whether a result is finite for finite scores.

    -inf is allowed as the result, or as an operand of ``where`` in the last line.

    Args:
        loads_are: whether the elements of captured tensors are assumed to be finite.
    """
    lines = Builder(program.lines).finish(result).lines
    for line in lines:
        if line.operation in _MAY_OVERFLOW or (
            line.operation == LOAD and line.kind == "float" and not loads_are
        ):
            return False
        if line.operation in _DIVISIONS and (isinstance(line.operands[1], Name) or line.operands[1] == 0):
            return False
        for operand in line.operands:
            chosen = line is lines[-1] and line.operation == "where" and operand == -math.inf
            if isinstance(operand, float) and not math.isfinite(operand) and not chosen:
                return False
    return isinstance(result, Name) or result == -math.inf or math.isfinite(result)


def is_variable(program: Program, line: Line, operand: Operand) -> bool:
    """Whether ``operand`` of a line may be a launch argument of the kernel instead of a constant.

    Programs that differ only in such numbers share a kernel.
    """
    if type(operand) is not int or not 1 < abs(operand) < 2**31 or line.operation not in _WITH_ANY_NUMBER:
        return False
    return all(program.kinds[o] == "int" for o in line.operands if isinstance(o, Name))


def variables(program: Program) -> Iterator[int]:
    """Yield, in order, the numbers of a program that may be launch arguments (:func:`is_variable`)."""
    for line in program.lines:
        yield from (operand for operand in line.operands if is_variable(program, line, operand))


def _is_zero(operand: Operand) -> bool:
    return not isinstance(operand, Name) and operand == 0


def depends_on(program: Program) -> dict[Operand, frozenset[str]]:
    """Map each name to the set of inputs on which its value depends."""
    found: dict[Operand, frozenset[str]] = {Name(name): frozenset((name,)) for name in INPUTS}
    for line in program.lines:
        inputs = (found[operand] for operand in line.operands if isinstance(operand, Name))
        found[line.name] = frozenset().union(*inputs)
    return found


def renumbered(program: Program, tensors: dict[int, int]) -> Program:
    """Return the program with captured tensor ``i`` renamed to captured tensor ``tensors[i]``."""
    lines = (
        line._replace(operands=(tensors[line.operands[0]], *line.operands[1:]))
        if line.operation == LOAD
        else line
        for line in program.lines
    )
    return program._replace(lines=tuple(lines))


def score_program(mods: Mods) -> Program | None:
    return parse(mods.score_mod) if mods.score_mod else None


def mask_program(mods: Mods) -> Program | None:
    return parse(mods.mask_mod) if mods.mask_mod else None


@cached
def numbers_of(mods: Mods) -> tuple[int, ...]:
    """Return ints in the programs that are launch arguments of the kernel instead of compile-time constants.

    They are the first ``MAX_SIZES - sum(ranks)`` distinct ints that :func:`variables` yields, first for
    score_mod and then for mask_mod.
    """
    programs = (program for program in (score_program(mods), mask_program(mods)) if program is not None)
    found = dict.fromkeys(number for program in programs for number in variables(program))
    return tuple(found)[: MAX_SIZES - sum(mods.ranks)]


def kernel_sizes(mods: Mods, captured: Iterable[Tensor | None]) -> list[int]:
    """Return the ``MAX_SIZES`` int arguments of a launch.

    They are the sizes of the captured tensors, then zeros, then :func:`numbers_of` in reverse order.
    """
    sizes = [size for tensor in captured if tensor is not None for size in tensor.shape]
    numbers = numbers_of(mods)
    return sizes + [0] * (MAX_SIZES - len(sizes) - len(numbers)) + [*reversed(numbers)]


@cached
def behind(text: str, first: int) -> str:
    """Add ``first`` to the indices of a mask program's captured tensors, and return the program's text.

    The list of captured tensors then starts with ``first`` tensors of another program.
    """
    return str(renumbered(parse(text), {i: first + i for i in range(MAX_CAPTURED)}))
