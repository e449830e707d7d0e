"""Rewrites a traced score function into the operations that a kernel computes it with.

The new program returns the same numbers with fewer instructions for each score:

* **Floats.** What is computed from the distance ``q - kv`` and becomes a float is computed in float32 from
  the start, where this is exact. A distance is then one addition, and its sign and absolute value are free.
* **Units.** A kernel keeps scores as a multiple of natural units, for example as raw products. The factor to
  this unit joins factors that the program has already: that of a logarithm to base 2, or an ALiBi slope.

The operations below exist in lowered programs only.
"""

from __future__ import annotations

import math

from flashtile.problems.mask_operations import OPERATIONS
from flashtile.problems.mask_program import LOAD, Builder, Name, Operand, Program, depends_on
from flashtile.problems.mask_ranges import ranges

DISTANCE = {"float": "distance", "int": "whole_distance"}
"""``distance q kv c``: q - kv + c, by the kind of the result. Only programs for Gluon have it as an int."""
COLUMN = "column"
"""``column i``: the ``i``-th result of the program of :func:`column_loads`."""
LOG2 = "approximate_log2"
"""Logarithm to base 2, with an error of 2 ** -22: absolute from 0.5 to 2, relative elsewhere.

A score then has an absolute error of 1.7e-7, and its probability the same relative error. That is less than a
thousandth of the rounding of P to float16, 2 ** -12. The logarithm of a whole number has the relative error
everywhere, because that of 1 is exact.
"""
LOG2_OF_WHOLE = "approximate_log2_of_whole"
""":data:`LOG2` of a number that is not subnormal, in fewer instructions."""
NATURAL, WHOLE, UNIT = "natural", "whole", "unit"
"""Fields of :class:`Units`, as operations without operands."""

EXACT = 2**24
"""float32 holds all ints up to this magnitude."""

_FLOAT_STEPS = frozenset(("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "where"))
"""Operations on ints that give the same result on floats, if the floats hold the ints exactly."""


def lowered(program: Program, positions: int, approximates: bool) -> Program:
    """Return the program on a kernel's unit of scores, with the same number of results.

    The first result is converted to the kernel's unit. Further results (derivatives) stay as they are. In
    the new program, the input ``score`` has a unit of its own; :data:`NATURAL` is its factor to natural
    units.

    Args:
        positions: upper bound of query and key positions.
        approximates: whether logarithms may be computed by :data:`LOG2`.
    """
    return _Lowering(program, positions, approximates).program()


def lowered_mask(program: Program, positions: int, has_columns: bool = False) -> Program:
    """Return a mask's program for Gluon, in which distances are lines of :data:`DISTANCE`.

    With ``has_columns``, the results of :func:`column_loads` are given to the program.
    """
    lowering = _Lowering(program, positions, True)
    if has_columns:
        for i, name in enumerate(_column_loads(program)):
            kind = program.kinds[name]
            lowering.known[name] = lowering.builder.emit(COLUMN, i, kind=kind)
    return lowering.builder.finish(*map(lowering.value, program.results))


def column_loads(program: Program) -> Program | None:
    """Return the program of a mask's loads that depend on the key, not on the query; None without any."""
    loads = _column_loads(program)
    return Builder(program.lines).finish(*loads) if loads else None


def _column_loads(program: Program) -> list[Name]:
    """Return the names of these loads."""
    depends = depends_on(program)
    return [
        line.name for line in program.loads if "kv" in depends[line.name] and "q" not in depends[line.name]
    ]


class _Lowering:
    def __init__(self, program: Program, positions: int, approximates: bool) -> None:
        self.old = program
        self.lines = {line.name: line for line in program.lines}
        self.kinds, self.depends = program.kinds, depends_on(program)
        self.ranges = ranges(program, positions)
        self.approximates = approximates
        self.builder = Builder()
        self.known: dict[Name, Operand] = {}
        """New operands of old names."""
        self.known_floats: dict[Name, Operand] = {}
        """New float operands of old ints."""

    def program(self) -> Program:
        first, *others = self.old.results
        return self.builder.finish(self.scaled(first), *map(self.value, others))

    def emit(self, operation: str, *operands: Operand) -> Operand:
        kind = None if operation in OPERATIONS else "float"
        return self.builder.emit(operation, *operands, kind=kind)

    def value(self, operand: Operand) -> Operand:
        """Return the new operand that is equal to an old one."""
        if not isinstance(operand, Name) or operand in ("b", "h", "q", "kv"):
            return operand
        if operand not in self.known:
            self.known[operand] = self._value(operand)
        return self.known[operand]

    def _value(self, name: Name) -> Operand:
        if name == "score":
            return self.emit("mul", name, self.emit(NATURAL))
        line = self.lines[name]
        if line.operation == LOAD:
            tensor, *indices = line.operands
            places = map(self.value, indices)
            return self.builder.emit(LOAD, tensor, *places, kind=line.kind, where=line.where)
        if line.operation in ("log", "log2") and self.approximates:
            logarithm = self.log2(line.operands[0])
            return self.emit("mul", logarithm, math.log(2)) if line.operation == "log" else logarithm
        if line.kind != "float":
            distance = self._difference(name, "int") if self.approximates and line.kind == "int" else None
            return distance or self.emit(line.operation, *map(self.value, line.operands))
        operands = [self.number(operand) for operand in line.operands]
        if line.operation == "float" and self.builder.kind(operands[0]) == "float":
            return operands[0]
        return self.emit(line.operation, *operands)

    def number(self, operand: Operand) -> Operand:
        """Return the new operand of a float operation: a float instead of an int if that is cheaper."""
        value = self.as_float(operand) if self._is_distance(operand) else None
        return self.value(operand) if value is None else value

    def _is_distance(self, operand: Operand) -> bool:
        """Whether an operand is an int that depends on rows and on keys."""
        return (
            isinstance(operand, Name)
            and self.kinds[operand] == "int"
            and {"q", "kv"} <= self.depends[operand]
        )

    def as_float(self, operand: Operand) -> Operand | None:
        """Return the float that is equal to an int; None if it cannot be computed exactly in floats.

        The last operation of an int may be rounded, as its conversion would be. Its operands must be exact.
        """
        if not isinstance(operand, Name):
            return float(operand)
        if not self._is_distance(operand):
            return self.emit("float", self.value(operand))
        if operand in self.known_floats:
            return self.known_floats[operand]
        line = self.lines[operand]
        found = self._difference(operand, "float")
        if found is None and line.operation in _FLOAT_STEPS:
            condition = line.operands[:1] if line.operation == "where" else ()
            operands = line.operands[len(condition) :]
            if all(self._is_exact(one) for one in operands):
                floats = [self.as_float(one) for one in operands]
                if None not in floats:
                    found = self.emit(line.operation, *map(self.value, condition), *floats)
        if found is not None:
            self.known_floats[operand] = found
        return found

    def _is_exact(self, operand: Operand) -> bool:
        low, high = self.ranges[operand] if isinstance(operand, Name) else (operand, operand)
        return low >= -EXACT and high <= EXACT

    def _difference(self, operand: Name, kind: str) -> Operand | None:
        """Return q - kv + c or kv - q + c as a number of this kind; None if the int is of another form."""
        form = self._linear(operand)
        if form is None or not self._is_exact(operand) or form[0] != -form[1] or abs(form[0]) != 1:
            return None
        sign, _, constant = form
        operands = Name("q"), Name("kv"), sign * constant
        distance = self.builder.emit(DISTANCE[kind], *operands, kind=kind)
        return distance if sign == 1 else self.emit("neg", distance)

    def _linear(self, operand: Operand) -> tuple[int, int, int] | None:
        """Return (a, b, c) if an int is a q + b kv + c with constants, otherwise None."""
        if not isinstance(operand, Name):
            return (0, 0, operand) if type(operand) is int else None
        if operand in ("q", "kv"):
            return (int(operand == "q"), int(operand == "kv"), 0)
        line = self.lines.get(operand)
        if line is None or line.operation not in ("add", "sub", "neg"):
            return None
        forms = [self._linear(one) for one in line.operands]
        if None in forms:
            return None
        if line.operation == "neg":
            forms.insert(0, (0, 0, 0))
        sign = 1 if line.operation == "add" else -1
        a, b, c = (x + sign * y for x, y in zip(*forms, strict=True))
        return a, b, c

    def log2(self, operand: Operand) -> Operand:
        return self.emit(LOG2_OF_WHOLE if self._is_whole(operand) else LOG2, self.number(operand))

    def _is_whole(self, operand: Operand) -> bool:
        """Whether an operand has no fraction. It is then no subnormal number."""
        if not isinstance(operand, Name):
            return float(operand).is_integer()
        if self.kinds[operand] != "float":
            return True
        line = self.lines.get(operand)
        if line is None or line.operation not in _FLOAT_STEPS:
            return line is not None and line.operation in ("float", "floor")
        return all(map(self._is_whole, line.operands))

    def scaled(self, operand: Operand) -> Operand:
        """Return the new operand that is an old one in the kernel's unit: times UNIT."""
        if not isinstance(operand, Name):
            is_infinite = isinstance(operand, float) and not math.isfinite(operand)
            return operand if is_infinite else self.emit("mul", self.emit(UNIT), float(operand))
        if operand == "score":
            return self.emit("mul", operand, self.emit(WHOLE))
        line = self.lines.get(operand)
        if line is not None and line.kind == "float":
            operation, operands = line.operation, line.operands
            if operation in ("add", "sub", "neg", "minimum", "maximum"):
                return self.emit(operation, *map(self.scaled, operands))
            if operation == "where":
                return self.emit(operation, self.value(operands[0]), *map(self.scaled, operands[1:]))
            if operation == "mul":
                a, b = sorted(operands, key=self._takes_factors)
                if self._takes_factors(b):
                    return self.emit("mul", self.number(a), self.scaled(b))
            if operation in ("log", "log2") and self.approximates:
                factor = math.log(2) if operation == "log" else 1.0
                return self.emit("mul", self.log2(operands[0]), self.emit("mul", self.emit(UNIT), factor))
        return self.emit("mul", self.number(operand), self.emit(UNIT))

    def _takes_factors(self, operand: Operand) -> bool:
        """Whether a factor of an operand costs no instruction for each score."""
        return not isinstance(operand, Name) or operand == "score" or self.depends[operand] <= {"b", "h"}
