"""Rewrites a traced score_mod into operations that are cheaper in Hopper's kernels.

* What is computed from a distance of query and key and becomes a float is computed in float32 from the start,
  where this gives the same number. A distance is then one addition, and its absolute value is free.
* A logarithm of a whole number is one instruction of the hardware, if it reaches the result only through
  arithmetic. Where it is compared, rounded or takes part in anything else, it stays as exact as it was.

The operations ``DISTANCE`` and ``LOG2`` exist in lowered programs only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flashtile.problems.mask_program import LOAD, Builder, Line, Name, Operand, Program, depends_on
from flashtile.problems.mask_ranges import Range, ranges

DISTANCE = "distance"
"""``distance a b c``: a - b + c as a float. ``a`` and ``b`` are ``q`` and ``kv`` in either order."""
LOG2 = "approximate_log2"
"""Logarithm to base 2 of a float without a fraction, with an error of 2 ** -22 of the result.

It is lg2.approx of PTX. From 0.5 to 2 PTX bounds only the absolute error by 2 ** -22, and a factor would
enlarge it. Numbers with a fraction are therefore left to the exact logarithm.
"""

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
