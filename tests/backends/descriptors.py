"""Descriptors of wgmma in machine code: are they those of the PTX?

A product of Hopper's tensor cores reads shared memory through descriptors of 64 bits. The lower half has the
address of the tile. The upper half has its strides and swizzle, which are constants of the PTX. The ptxas of
Triton 3.6 and 3.7 (12.8) sometimes takes the upper half from a register that holds something else, or that
nothing has written. The PTX is right, the result is wrong, and the product may read past the end of shared
memory, after which every call of the process fails. The ptxas of Triton 3.8 (12.9) does not do so.

:func:`wrong_descriptors` follows the uniform registers along all paths of a kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

UNKNOWN, COMPUTED, UNSET = -1, -2, -3
"""A register that was moved from a vector register, which is not followed; one whose value is not a constant;
and one that some path to the instruction has not written."""
WORD = 0xFFFFFFFF
LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", re.MULTILINE)
NAMES = {UNKNOWN: "unknown", COMPUTED: "computed", UNSET: "unset"}
Registers = dict[int, int]
"""Value of each uniform register. A register that is missing is UNSET."""


class Instruction:
    """An instruction of SASS: its address, the predicate that guards it, its opcode and its operands."""

    def __init__(self, match: re.Match):
        self.address = int(match[1], 16)
        self.guard, self.opcode = match[2], match[3]
        operands = re.split(r",\s*(?![^\[]*\])", match[4]) if match[4] else []
        self.operands = [operand.replace(".reuse", "") for operand in operands]

    def written(self) -> range:
        """Uniform registers that the instruction writes."""
        if not self.opcode.startswith(("U", "R2UR", "S2UR", "REDUX", "VOTEU")):
            return range(0)
        for operand in self.operands[:2]:
            if match := re.fullmatch(r"UR(\d+)", operand):
                is_pair = self.opcode.endswith(".64") or ".WIDE" in self.opcode
                return range(int(match[1]), int(match[1]) + 1 + is_pair)
            if not operand.startswith("UP"):  # a predicate may be written as well, before the register
                break
        return range(0)

    def apply(self, registers: Registers) -> Registers:
        """Return the registers after this instruction."""
        written = self.written()
        if not written:
            return registers
        sources = [text for text in self.operands[1:] if not re.fullmatch(r"!?UP\w", text)]
        # ptxas swaps two registers by three exclusive ors (0x3c), which are not followed either.
        is_followed = not self.opcode.startswith("R2UR") and "0x3c" not in sources
        values = dict.fromkeys(written, COMPUTED if is_followed else UNKNOWN)
        if self.opcode.startswith("UMOV"):
            values[written[0]] = value(sources[0], registers)
        elif self.opcode == "UIADD3.64":
            halves = [pair(text, registers) for text in sources[:2]]
            for register, terms in zip(written, zip(*halves, strict=True), strict=True):
                values[register] = total(terms)
        elif self.opcode.startswith("UIADD3"):  # additions to a descriptor's lower half never carry
            values[written[0]] = total([value(text, registers) for text in sources[:3]])
        if self.guard is not None:
            # If what the register held is no constant, its value is unknown: a branch behind this instruction
            # may have the same condition, and conditions are not followed.
            held = {r: max(registers.get(r, UNSET), UNKNOWN) for r in values}
            values = {r: met(held[r], found) for r, found in values.items()}
        return {**registers, **values}

    def upper_halves(self) -> list[int]:
        """Registers with the upper halves of the descriptors that this product reads."""
        match = re.search(r"gdesc\[UR(\d+)\]", " ".join(self.operands))
        if "GMMA" not in self.opcode or match is None:
            return []
        first = int(match[1])  # of four registers, the descriptors of A and B
        is_a_in_registers = re.fullmatch(r"R\d+", self.operands[1])
        return [first + 3] if is_a_in_registers else [first + 1, first + 3]


def value(operand: str, registers: Registers) -> int:
    """Return the value of an operand of 32 bits."""
    if operand.startswith("-UR"):
        negated = value(operand[1:], registers)
        return negated if negated < 0 else -negated & WORD
    return pair(operand, registers)[0]


def pair(operand: str, registers: Registers) -> tuple[int, int]:
    """Return the lower and the upper half of an operand of 64 bits."""
    if operand == "URZ":
        return 0, 0
    if re.fullmatch(r"-?0x[0-9a-f]+", operand):
        number = int(operand, 16)
        return number & WORD, number >> 32 & WORD
    if match := re.fullmatch(r"(-?)UR(\d+)", operand):
        lower, upper = (registers.get(int(match[2]) + half, UNSET) for half in (0, 1))
        if not match[1]:
            return lower, upper
        if min(lower, upper) >= 0:
            number = -(upper << 32 | lower)
            return number & WORD, number >> 32 & WORD
        return min(lower, upper), min(lower, upper)
    return COMPUTED, COMPUTED


def total(values: Iterable[int]) -> int:
    values = tuple(values)
    return min(values) if min(values) < 0 else sum(values) & WORD


def met(one: int, other: int) -> int:
    """Return what is known of a register that has one value on one path and another on another path."""
    return one if one == other else min(one, other, COMPUTED if min(one, other) >= 0 else UNKNOWN)


def instructions_of(sass: str) -> list[Instruction]:
    return [Instruction(match) for match in LINE.finditer(sass)]


def successors(code: list[Instruction], places: dict[int, int], i: int) -> list[int]:
    """Indices of the instructions that may follow instruction ``i``."""
    following = [i + 1] if i + 1 < len(code) else []
    if code[i].opcode.startswith("BRA"):
        target = places[int(code[i].operands[-1], 16)]
        is_conditional = code[i].guard is not None or len(code[i].operands) > 1
        return [target, *following] if is_conditional else [target]
    if code[i].opcode.startswith(("EXIT", "RET")) and code[i].guard is None:
        return []
    return following


def upper_halves(sass: str) -> list[tuple[Instruction, list[int]]]:
    """Return each product with the upper halves of its descriptors."""
    code = instructions_of(sass)
    places = {instruction.address: i for i, instruction in enumerate(code)}
    before: dict[int, Registers] = {0: {}}
    waiting = [0] if code else []
    while waiting:
        i = waiting.pop()
        after = code[i].apply(before[i])
        for j in successors(code, places, i):
            both = after
            if j in before:
                both = {r: met(*(one.get(r, UNSET) for one in (before[j], after))) for r in before[j] | after}
            if both != before.get(j):
                before[j] = both
                waiting.append(j)
    return [
        (code[i], [registers.get(register, UNSET) for register in found])
        for i, registers in sorted(before.items())
        if (found := code[i].upper_halves())
    ]


def wrong_descriptors(ptx: str, sass: str) -> list[str]:
    """Return a line for each product with a descriptor whose upper half is not one of the PTX's constants.

    ``sass`` is the output of ``cuobjdump -sass``.
    """
    right = {UNKNOWN} | {int(number) >> 32 & WORD for number in re.findall(r", (-?\d{15,});", ptx)}
    return [
        f"{product.address:#x} {product.opcode}: {', '.join(map(NAMES.get, found, map(hex, found)))}"
        for product, found in upper_halves(sass)
        if not right.issuperset(found)
    ]
