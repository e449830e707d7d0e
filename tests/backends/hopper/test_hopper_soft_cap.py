"""The soft-cap of the Hopper kernels: the exponential form, and which calls use the hardware's tanh."""

import struct
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

from cases import BF16, FP16
from flashtile.backends.hopper.forward.config import choose
from flashtile.backends.hopper.forward.launch import forward_variant
from flashtile.backends.hopper.forward.rounds import plan_of
from flashtile.backends.hopper.modifiers import EXPONENTIAL
from flashtile.tools.inspection.attention import GROUPED
from walk import walk

INSTRUCTIONS = {
    "mul": torch.mul,
    "add": torch.add,
    "fma": lambda a, b, c: (a.double() * b + c).float(),
    "ex2": torch.exp2,
    "rcp": torch.reciprocal,
}


def run(assembly, x, rate):
    """The assembly for numbers ``x`` and one rate, float32."""
    registers = {"$1": x, "$2": torch.tensor(rate)}

    def value(operand):
        if operand.startswith("0f"):
            return torch.tensor(struct.unpack(">f", bytes.fromhex(operand[2:]))[0])
        return registers[operand]

    for statement in assembly.strip("{} ").split(";"):
        name, *operands = statement.replace(",", " ").split() or [".reg"]
        if name != ".reg":
            registers[operands[0]] = INSTRUCTIONS[name.split(".")[0]](*map(value, operands[1:]))
    return registers["$0"]


def test_the_exponential_form_is_tanh():
    x = torch.linspace(-12, 12, 4096)
    for rate in (1.0, -0.25):
        assert (run(EXPONENTIAL.value, x, rate).double() - torch.tanh(x.double() * rate)).abs().max() < 6e-7
    ends = run(EXPONENTIAL.value, torch.tensor([torch.inf, -torch.inf, torch.nan]), 1.0)
    assert ends[:2].tolist() == [1.0, -1.0]
    assert ends[2].isnan()


@walk("softcap", [0.0, 30.0])
@walk("dtype", [BF16, FP16])
def test_bfloat16_takes_the_hardwares(dtype, softcap):
    problem = replace(GROUPED, dtype=dtype, softcap=softcap)
    assert (dtype == BF16 and softcap > 0) == forward_variant(
        problem, plan_of(problem, choose(problem))
    ).TANH_APPROX
