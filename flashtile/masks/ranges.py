"""Interval analysis of a program: finds the ints that may exceed 32 bits.

torch computes ints in 64 bits. Kernels compute them in 32 bits where that suffices. Bounds are propagated
from line to line (Moore, *Interval Analysis*, 1966). Positions are bounded by the call's lengths. Batch and
head indices, and elements of captured int32 tensors, are assumed to be at most ``POSITIONS``. A conversion
to int32 gives what torch computes in 32 bits without this assumption.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from flashtile.masks.operations import INTS, kind_of_number, range_of
from flashtile.masks.program import INPUTS, LOAD, Builder, Line, Name, Operand, Program
from flashtile.problems.common import MAX_LENGTH, POSITIONS

_INT32, _INT64 = range_of("int32"), range_of("int")

Range = tuple[int, int]


def wide_lines(program: Program, positions: int = POSITIONS) -> frozenset[Name]:
    """Return the names of the lines whose ints must be computed in 64 bits.

    Args:
        positions: upper bound of query and key positions.
    """
    return _analysed(program, positions, lambda line: (-POSITIONS, POSITIONS))[0]


def ranges(program: Program, positions: int = POSITIONS) -> dict[Any, Range]:
    """Return an interval for each input and each line of ints. Captured ints may have any value."""
    return _analysed(program, positions, lambda line: _INT64)[1]


def without_identities(program: Program, elements: Sequence[str]) -> Program:
    """Return the program without the conversions of ints that are in the range of the conversion anyway.

    Args:
        elements: for each captured tensor, the conversion in ``INTS`` to its dtype. It is unused for floats.
    """

    def range_of_line(line: Line) -> Range:
        return range_of(elements[line.operands[0]] if line.operation == LOAD else "int")

    known = _analysed(program, MAX_LENGTH, range_of_line)[1]
    builder = Builder()
    renamed: dict[Operand, Operand] = {}
    for line in program.lines:
        operands = [renamed.get(o, o) if isinstance(o, Name) else o for o in line.operands]
        of_int = line.operation in INTS and program.kinds[line.operands[0]] == "int"
        if of_int and _within(known[line.operands[0]], range_of(line.operation)):
            renamed[line.name] = operands[0]
        else:
            kind = line.kind if line.operation == LOAD else None
            renamed[line.name] = builder.emit(line.operation, *operands, kind=kind, where=line.where)
    return builder.finish(*(renamed.get(r, r) if isinstance(r, Name) else r for r in program.results))


def _analysed(
    program: Program, positions: int, elements: Callable[[Line], Range]
) -> tuple[frozenset[Name], dict[Any, Range]]:
    """Return (names of lines that need 64 bits, intervals of inputs and lines).

    ``elements`` returns the interval of a line that loads ints, or makes ints of floats.
    """
    kinds = program.kinds
    known: dict[Any, Range] = {Name(name): (0, POSITIONS) for name in INPUTS}
    known |= dict.fromkeys((Name("q"), Name("kv")), (0, positions))
    wide = []
    for line in program.lines:
        ints = [operand for operand in line.operands if _kind(operand, kinds) == "int"]
        of_operands = [known[o] if isinstance(o, Name) else (o, o) for o in ints]
        if line.operation == LOAD or not ints:
            of_bool = line.operation != LOAD and _kind(line.operands[0], kinds) == "bool"
            known[line.name] = elements(line) if line.kind == "int" and not of_bool else (0, 1)
            continue
        found = _range(line, of_operands) if line.kind == "int" else (0, 1)
        numbers = [
            one for one, operand in zip(of_operands, ints, strict=True) if not isinstance(operand, Name)
        ]
        if not all(_within(one, _INT32) for one in (found, *numbers)):
            wide.append(line.name)
        known[line.name] = found if _within(found, _INT64) else _INT64
    return frozenset(wide), known


def _kind(operand: Operand, kinds: dict[str, str]) -> str:
    return kinds[operand] if isinstance(operand, Name) else kind_of_number(operand)


def _within(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _range(line: Line, operands: list[Range]) -> Range:
    if line.operation in _OF_ENDS:  # monotonic in each operand: extremes are at the ends
        ends = [_OF_ENDS[line.operation](*numbers) for numbers in itertools.product(*operands)]
        return min(ends), max(ends)
    low, high = min(low for low, _ in operands), max(high for _, high in operands)
    if line.operation in INTS:
        whole = range_of(line.operation)
        return (low, high) if _within((low, high), whole) else whole
    if line.operation == "where":
        return low, high
    if line.operation == "sign":
        return -1, 1
    if line.operation == "abs":
        return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
    if line.operation == "mod":
        low, high = operands[-1]
        return min(low + 1, 0), max(high - 1, 0)
    if line.operation == "lshift":
        bits = min(max(operands[-1][1], 0), 64)
        return min(operands[0][0], 0) << bits, max(operands[0][1], 0) << bits
    if line.operation == "fmod":
        most = max(*map(abs, operands[-1]), 1) - 1
        return max(min(operands[0][0], 0), -most), min(max(operands[0][1], 0), most)
    if line.operation in ("floordiv", "quotient"):
        most = max(abs(low), abs(high))
        return -most if low < 0 else 0, most
    # Results of rshift and bit operations need no more bits than the operands.
    most = 1 << max(~low if low < 0 else low, high).bit_length()
    return -most if low < 0 or line.operation == "not" else 0, most - 1


_OF_ENDS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "minimum": min,
    "maximum": max,
    "neg": lambda a: -a,
}
