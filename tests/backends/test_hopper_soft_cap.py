"""The soft-cap of the Hopper kernels: what its assembly computes, and the error rule with it."""

import struct

import pytest
import torch

from flashtile import testing

pytest.importorskip("triton")

from flashtile.backends.hopper.soft_cap import SMALL, TANH, TOGETHER

COUNT = TOGETHER.value


def _value(operand, registers):
    if operand.startswith("0f"):
        return torch.tensor(struct.unpack(">f", bytes.fromhex(operand[2:]))[0])
    return registers[operand]


INSTRUCTIONS = {
    "mul": torch.mul,
    "add": torch.add,
    "abs": torch.abs,
    "max": torch.maximum,
    "fma": lambda a, b, c: (a.double() * b + c).float(),
    "ex2": torch.exp2,
    "rcp": torch.reciprocal,
    "setp": lambda a, b: ~(a <= b),
    "vote": lambda a, mask: a.any(),
}


def run(assembly, x, rate):
    """The assembly for one warp: x (COUNT, 32), float32."""
    registers = {f"${n}": x[n] for n in range(COUNT)}
    registers |= {f"${2 * COUNT + n}": torch.tensor(rate) for n in range(COUNT)} | {"0xffffffff": None}
    skipping = None
    for statement in assembly.strip("{} ").split(";"):
        words = statement.replace(",", " ").split()
        if words and words[0].endswith(":"):
            skipping = None if words[0] == f"{skipping}:" else skipping
            words = words[1:]
        if not words or skipping or words[0] == ".reg":
            continue
        if words[0].startswith("@"):
            skipping = words[2] if registers[words[0][1:]] else None
        elif words[0] == "bra.uni":
            skipping = words[1]
        else:
            name, result, *operands = words
            values = [_value(operand, registers) for operand in operands]
            registers[result] = INSTRUCTIONS[name.split(".")[0]](*values)
    return torch.stack([registers[f"${n}"] for n in range(COUNT)])


def tanh(x):
    """Of all numbers of a tensor, by the assembly, in warps of neighbours."""
    warps = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % (COUNT * 32))).view(-1, COUNT, 32)
    return torch.stack([run(TANH.value, warp, 1.0) for warp in warps]).flatten()[: x.numel()].view(x.shape)


class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = tanh(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)


@pytest.mark.parametrize("largest", [SMALL, 12.0])
def test_both_branches_are_tanh_to_float32s_accuracy(largest):
    x = torch.linspace(-largest, largest, 8 * COUNT * 32)
    error = (tanh(x).double() - torch.tanh(x.double())).abs()
    assert error.max() < 6e-7
    if largest == SMALL:
        assert (error / x.double().abs().clamp_min(1e-30)).max() < 1e-6


def test_a_warp_with_one_large_number_takes_the_exponential():
    x = torch.full((COUNT, 32), 0.3)
    x[5, 7] = 3.0
    torch.testing.assert_close(run(TANH.value, x, 1.0), torch.tanh(x), atol=3e-7, rtol=0)
    torch.testing.assert_close(run(TANH.value, x, -2.0), torch.tanh(-2 * x), atol=3e-7, rtol=0)


def test_nan_stays_and_infinities_are_capped():
    x = torch.zeros(COUNT, 32)
    x[0, 0], x[1, 1], x[15, 31] = torch.nan, torch.inf, -torch.inf
    result = run(TANH.value, x, 1.0)
    assert result[0, 0].isnan()
    assert result.isnan().sum() == 1
    assert (result[1, 1], result[15, 31]) == (1, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("softcap", "spread"), [(5.0, 10.0), (50.0, 1.0), (50.0, 100.0)])
def test_the_error_rule_with_it(dtype, softcap, spread):
    """``spread``: standard deviation of the scores before the cap, up to two caps."""

    def attend(q, k, v, *, softmax_scale, softcap, return_lse):
        scores = torch.einsum("bihd,bjhd->bhij", q.float(), k.float())
        scores = softcap * Tanh.apply(scores * (softmax_scale / softcap))
        lse = scores.logsumexp(-1)
        p = torch.exp(scores - lse[..., None]).to(v.dtype)
        return torch.einsum("bhij,bjhd->bihd", p, v), lse

    q, k, v = (testing.random_tensor((1, 96, 2, 64), dtype, "cpu", seed=i) for i in range(3))
    testing.check(q, k, v, function=attend, softmax_scale=spread / 8, softcap=softcap, poison=False)
