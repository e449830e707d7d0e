"""Lowered programs return what the traced functions return, with the operations that are cheap in kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import masks
from flashtile.masks.evaluate import evaluate
from flashtile.masks.mods import traced
from flashtile.problems.mask_operations import OPERATIONS, Operation
from flashtile.problems.mask_program import derivatives
from flashtile.problems.mask_ranges import positions_of

lowering = pytest.importorskip("flashtile.backends.portable.attention.lowering")

TINY = torch.finfo(torch.float32).tiny
HALF_OF_EXACT = positions_of(1, 1)
SLOPES = torch.tensor([0.5, 0.125])


def _whole_log2(x: Tensor) -> Tensor:
    assert not ((x != 0) & (x.abs() < TINY)).any(), "a subnormal number"
    return x.log2()


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> tuple[float, float, float]:
    """(natural, whole, unit) of scores, with operations that compute what the kernels' functions do."""
    natural, unit = 0.125, 3.0
    numbers = {lowering.NATURAL: natural, lowering.WHOLE: natural * unit, lowering.UNIT: unit}
    for name, number in numbers.items():
        monkeypatch.setitem(
            OPERATIONS, name, Operation(lambda number=number: torch.tensor(number), lambda: "float")
        )
    for kind, name in lowering.DISTANCE.items():
        dtype = torch.float32 if kind == "float" else torch.int64
        of = lambda q, kv, c, dtype=dtype: (q - kv + c).to(dtype)  # noqa: E731
        monkeypatch.setitem(OPERATIONS, name, Operation(of, lambda *kinds, kind=kind: kind))
    monkeypatch.setitem(OPERATIONS, lowering.LOG2, Operation(lambda x: x.log2(), lambda kind: "float"))
    monkeypatch.setitem(OPERATIONS, lowering.LOG2_OF_WHOLE, Operation(_whole_log2, lambda kind: "float"))
    return natural, natural * unit, unit


def results(program: Any, score: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    rows, keys = torch.arange(60)[:, None], torch.arange(70)[None]
    inputs = {"score": score, "b": torch.tensor(0), "h": torch.tensor(1), "q": rows, "kv": keys}
    found = evaluate(program, inputs, tensors)
    return [torch.as_tensor(one, dtype=torch.float32).expand(60, 70) for one in found]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "log of a distance": lambda s, b, h, i, j: s - torch.log(1 + (i - j).abs()),
    "log of floats": lambda s, b, h, i, j: torch.log(0.25 * (j - i + 7).abs() + 1.5) - s,
    "log of scores": lambda s, b, h, i, j: s + 3 * torch.log(0.5 + s * s) - torch.log2(s.abs() + 1),
    "log of 0 and less": lambda s, b, h, i, j: s + torch.log(i - j),
    "log of an edge": lambda s, b, h, i, j: torch.where(j > 3, torch.log(s), torch.log2(s.abs() * 1e-30)),
    "alibi": masks.alibi(SLOPES, offset=5),
    "relative": masks.relative_position(torch.linspace(-1, 1, 26).view(2, 13)),
    "soft-cap": masks.softcap(4.0),
    "distance": lambda s, b, h, i, j: s * 2 + (j - i - 3),
    "products": lambda s, b, h, i, j: s * (i - j) * 0.5 * torch.exp(-0.1 * (i - j).abs()),
    "clamps": lambda s, b, h, i, j: torch.minimum(s, -((i - j).clamp(-4, 9) * 2).float()) + torch.sin(s),
    "of keys": lambda s, b, h, i, j: 0.01 * j.float(),
    "a number": lambda s, b, h, i, j: torch.where(i >= j, s, -2.5),
    "hides": lambda s, b, h, i, j: torch.where((i - j) % 3 == 1, s, -float("inf")),
    "of int conditions": lambda s, b, h, i, j: s + torch.where(i > j, i - j, 2 * (j - i)) / 7,
    "divided": lambda s, b, h, i, j: (s / 3 + (i - j) // 4) / (1 + (i - j).abs()),
    "both kinds of a distance": lambda s, b, h, i, j: s - (i - j) * torch.where((i - j) % 2 == 0, 0.5, 0.25),
}


@pytest.mark.parametrize("approximates", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives(name: str, approximates: bool, units: tuple[float, float, float]) -> None:
    natural, _, unit = units
    trace = traced("score_mod", FUNCTIONS[name])
    both, _ = derivatives(trace.program)
    lowered = lowering.lowered(both, HALF_OF_EXACT, approximates)
    score = torch.randn(60, 70, generator=torch.Generator().manual_seed(1)) * 20
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, TINY / 64, -TINY / 64, TINY, 3e38, 8.0])
    score[:, :10] = edges
    value, derivative = results(both, score * natural, list(trace.tensors))
    new_value, new_derivative = results(lowered, score, list(trace.tensors))
    close = {"rtol": 2e-6, "atol": 2e-6, "equal_nan": True}
    overflows = (value * unit).isinf() & value.isfinite()
    torch.testing.assert_close(new_value[~overflows], (value * unit)[~overflows], **close)
    torch.testing.assert_close(new_derivative, derivative, **close)


def lines_of(function: Callable[..., Any], positions: int = HALF_OF_EXACT, approximates: bool = True) -> Any:
    program = lowering.lowered(traced("score_mod", function).program, positions, approximates)
    return [line.operation for line in program.lines]


def test_a_distance_is_a_float_where_floats_are_exact() -> None:
    function = lambda s, b, h, i, j: s - 0.5 * (i - j + 1).abs()  # noqa: E731
    assert "distance" in lines_of(function)
    assert "distance" in lines_of(function, 2**24 - 1)
    assert "distance" not in lines_of(function, 2**24)
    assert "whole_distance" not in lines_of(function, 2**26)  # 2 ** 26 - 1 is no float32
    assert "distance" not in lines_of(lambda s, b, h, i, j: s + i * j)
    # The square of a distance is one rounded product, but sums of squares have inexact operands.
    assert "distance" in lines_of(lambda s, b, h, i, j: s - (i - j) * 5)
    assert "distance" not in lines_of(lambda s, b, h, i, j: s - ((i - j) * 5 + 1))


def test_only_kernels_for_16_bits_take_logarithms_of_the_hardware() -> None:
    function = FUNCTIONS["log of a distance"]
    assert lowering.LOG2_OF_WHOLE in lines_of(function)
    assert lowering.LOG2 in lines_of(FUNCTIONS["log of floats"])
    assert "log" in lines_of(function, approximates=False)


def test_a_logarithm_takes_one_factor() -> None:
    """The factor of log(2) and the unit's are one number for all scores."""
    operations = lines_of(FUNCTIONS["log of a distance"])
    assert operations.count("mul") == 3  # whole * score, unit * log(2), and this number times the logarithm


def test_a_mask_takes_what_it_loads_for_a_key() -> None:
    ids = torch.zeros(2, 70, dtype=torch.int32)
    program = traced("mask_mod", masks.document(ids) & masks.causal()).program
    loads = lowering.column_loads(program)
    assert [line.operation for line in loads.lines] == ["load"]
    assert loads.lines[0].operands == (0, "b", "kv")
    lowered = lowering.lowered_mask(program, HALF_OF_EXACT, has_columns=True)
    assert [line.operation for line in lowered.lines].count("load") == 1
    assert lowering.COLUMN in [line.operation for line in lowered.lines]
    assert lowering.column_loads(traced("mask_mod", masks.causal()).program) is None


def test_masks_compute_distances_once() -> None:
    program = traced("mask_mod", masks.dilated(3, 4)).program
    lowered = lowering.lowered_mask(program, HALF_OF_EXACT)
    assert lowered.lines[0].operation == "whole_distance"
