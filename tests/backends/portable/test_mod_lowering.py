"""Lowered programs return what the traced functions return, with operations that are cheap in kernels."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import masks
from flashtile.masks.evaluate import evaluate
from flashtile.masks.mods import traced
from flashtile.masks.operations import OPERATIONS, Operation
from flashtile.masks.program import Builder, Name, derivatives, kernel_sizes
from flashtile.problems.masks import Mods, positions_of
from walk import walk

functions = pytest.importorskip("flashtile.backends.portable.attention.functions")

TINY = torch.finfo(torch.float32).tiny
HALF_OF_EXACT = positions_of(1, 1)
ROWS, KEYS = 60, 70
SLOPES = torch.tensor([0.5, 0.125])
BYTES = torch.arange(KEYS, dtype=torch.uint8) * 3
TIMES = 1_700_000_000 + torch.arange(KEYS, dtype=torch.int32)


def _approximate_log2(x: Tensor) -> Tensor:
    """The least accurate result that the hardware's instruction may return."""
    finite = x[x.isfinite()]
    assert (finite == finite.floor()).all()
    return x.log2() * (1 + 2**-22)


@pytest.fixture(autouse=True)
def operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of lowered programs in torch."""
    distance = Operation(lambda a, b, c: (a - b + c).to(torch.float32), lambda *kinds: "float")
    monkeypatch.setitem(OPERATIONS, functions.DISTANCE, distance)
    monkeypatch.setitem(OPERATIONS, functions.LOG2, Operation(_approximate_log2, lambda kind: "float"))


def results(program: Any, score: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    rows, keys = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None]
    inputs = {"score": score, "b": torch.tensor(0), "h": torch.tensor(1), "q": rows, "kv": keys}
    found = evaluate(program, inputs, tensors)
    return [torch.as_tensor(one, dtype=torch.float32).expand(ROWS, KEYS) for one in found]


def scores() -> Tensor:
    score = torch.randn(ROWS, KEYS, generator=torch.Generator().manual_seed(1)) * 20
    score[:, :9] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, TINY / 64, TINY, 3e38, 8.0])
    return score


APPROXIMATE: dict[str, Callable[..., Any]] = {
    "distance": lambda s, b, h, i, j: s - torch.log(1 + (i - j).abs()),
    "float distance": lambda s, b, h, i, j: torch.log2(2.0 * (j - i + 7).abs().float() + 1) - s,
    "with a slope": lambda s, b, h, i, j: s - SLOPES[h] * torch.log(1 + (i - j).abs()) * 0.5,
    "of keys": lambda s, b, h, i, j: s + torch.log(j),
    "0 and less": lambda s, b, h, i, j: s + torch.log(i - j),
    "chosen": lambda s, b, h, i, j: torch.where(i >= j, s - torch.log(i - j + 1), -torch.log(j + 2)),
    "of a product": lambda s, b, h, i, j: s * torch.log2(2 + (i - j).abs()),
}
EXACT: dict[str, Callable[..., Any]] = {
    "log of a fraction": lambda s, b, h, i, j: 1e6 * torch.log(1 + 0.001 * (i - j).abs()) - s,
    "log of scores": lambda s, b, h, i, j: s - torch.log2(s.abs() + 1) + torch.log(s * 1e-30),
    "compared log": lambda s, b, h, i, j: torch.where(torch.log(1 + (i - j).abs()) > math.log(9), s, -1.0),
    "rounded log": lambda s, b, h, i, j: s + torch.floor(torch.log2(1 + (i - j).abs()) * 2),
    "log as an index": lambda s, b, h, i, j: SLOPES[(torch.log2(1 + (i - j).abs()).int() > 3).int()] + s,
    "log in an exponent": lambda s, b, h, i, j: s + torch.exp(3 * torch.log(1 + (i - j).abs())),
    "log in a divisor": lambda s, b, h, i, j: s / torch.log(1 + (i - j).abs()),
    "alibi": masks.alibi(SLOPES, offset=5),
    "relative": masks.relative_position(torch.linspace(-1, 1, 26).view(2, 13)),
    "soft-cap": masks.softcap(4.0),
    "distance": lambda s, b, h, i, j: s * 2 + (j - i - 3),
    "products": lambda s, b, h, i, j: s * (i - j) * 0.5 * torch.exp(-0.1 * (i - j) * (i - j)),
    "clamps": lambda s, b, h, i, j: torch.minimum(s, -((i - j).clamp(-4, 9) * 2).float()) + torch.sin(s),
    "of keys": lambda s, b, h, i, j: 0.01 * j.float(),
    "hides": lambda s, b, h, i, j: torch.where((i - j) % 3 == 1, s, -float("inf")),
    "fills": lambda s, b, h, i, j: torch.where(i >= j, s, torch.finfo(torch.float32).min),
    "of int conditions": lambda s, b, h, i, j: s + torch.where(i > j, i - j, 2 * (j - i)) / 7,
    "divided": lambda s, b, h, i, j: (s / 3 + (i - j) // 4) / (1 + (i - j).abs()),
    "both kinds of a distance": lambda s, b, h, i, j: s - (i - j) * torch.where((i - j) % 2 == 0, 0.5, 0.25),
    "captured ints": lambda s, b, h, i, j: s - 0.5 * (TIMES[i] - TIMES[j]),
    "a captured offset": lambda s, b, h, i, j: s - (i - j + TIMES[h] - 1_700_000_000),
    # 0 - 3 is 253 in bytes.
    "bytes": lambda s, b, h, i, j: s + (BYTES[i].clamp(0, 210) - BYTES[j].clamp(0, 210)),
    "bytes and ints": lambda s, b, h, i, j: s + BYTES[h].clamp(0, 210) * (i - j),
    # A zero of ints has no sign.
    "negated": lambda s, b, h, i, j: 1 / -(i - j),
    "negated distance": lambda s, b, h, i, j: 1 / (-(j - i).abs()).float(),
    "zero times negative": lambda s, b, h, i, j: 1 / ((i - j) * -2),
    "zero times a negative distance": lambda s, b, h, i, j: 1 / ((i - j).clamp(-3, 0) * (j - i).clamp(-3, 0)),
    "zero times 2": lambda s, b, h, i, j: 1 / ((i - j) * 2),
    "reversed": lambda s, b, h, i, j: torch.rsqrt((j - i + 1).float()) + 1 / (5 - (i - j)),
}


def both(function: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return values and derivatives of the traced and of the lowered program."""
    trace = traced("score_mod", function)
    program, _ = derivatives(trace.program)
    tensors = list(trace.tensors)
    new = functions.lowered(program, HALF_OF_EXACT)
    return results(program, scores(), tensors), results(new, scores(), tensors)


@walk("name", EXACT)
def test_values_and_derivatives_are_the_same(name: str) -> None:
    expected, found = both(EXACT[name])
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


@walk("name", APPROXIMATE)
def test_logarithms_in_arithmetic_are_approximate(name: str) -> None:
    assert functions.LOG2 in lines_of(APPROXIMATE[name])
    expected, found = both(APPROXIMATE[name])
    for one, other in zip(expected, found, strict=True):
        # Logarithms up to 8 have an error of 2 ** -19; sums of up to 128 are rounded to 2 ** -18, twice.
        torch.testing.assert_close(other, one, rtol=2**-21, atol=2**-16, equal_nan=True)


def lines_of(function: Callable[..., Any], positions: int = HALF_OF_EXACT) -> list[str]:
    program = functions.lowered(traced("score_mod", function).program, positions)
    return [line.operation for line in program.lines]


def test_a_distance_is_a_float_where_floats_are_exact() -> None:
    function = lambda s, b, h, i, j: s - 0.5 * (i - j + 1).abs()  # noqa: E731
    assert lines_of(function)[:2] == ["distance", "abs"]
    assert "distance" in lines_of(function, 2**24 - 1)
    assert "distance" not in lines_of(function, 2**24)
    assert "distance" not in lines_of(lambda s, b, h, i, j: s + i * j)
    # The product of exact floats is rounded once, as the conversion of an int is.
    assert "distance" in lines_of(lambda s, b, h, i, j: s - (i - j) * 5)
    assert "distance" in lines_of(lambda s, b, h, i, j: s - (i - j) * (i - j))
    assert "distance" not in lines_of(lambda s, b, h, i, j: s - ((i - j) * 5 + 1))
    assert "distance" not in lines_of(EXACT["captured ints"])
    assert lines_of(EXACT["alibi"]).count("float") == 0


def test_a_logarithm_of_a_distance_takes_few_operations() -> None:
    assert lines_of(APPROXIMATE["distance"]) == ["distance", "abs", "add", functions.LOG2, "mul", "sub"]


def test_the_work_grows_with_the_lines_of_a_program() -> None:
    """Each line may use the previous one twice, and programs may be deeper than Python's stack."""
    builder = Builder()
    distance = builder.emit("sub", Name("q"), Name("kv"))
    score = builder.emit("log", builder.emit("float", builder.emit("abs", distance)))
    for _ in range(1500):
        distance = builder.emit("maximum", builder.emit("neg", distance), distance)
        score = builder.emit("add", builder.emit("neg", score), score)
    score = builder.emit("add", builder.emit("float", distance), builder.emit("add", score, Name("score")))
    assert functions.LOG2 in str(functions.lowered(builder.finish(score), HALF_OF_EXACT))


def mask_text(mask: Any, shared: bool = True) -> str:
    trace = traced("mask_mod", mask)
    mods = Mods(mask_mod=trace.text, ranks=tuple(tensor.dim() for tensor in trace.tensors))
    columns = functions.column_function(mods)
    text = functions.mask_function(mods, shared=shared).src
    return text if columns is None else columns.src + text


IDS = torch.zeros(2, KEYS, dtype=torch.int32)


def test_a_mask_takes_what_it_loads_for_a_key() -> None:
    text = mask_text(masks.document(IDS) & masks.causal())
    columns, mask = text.split("def mask_mod")
    assert columns.count("tl.load") == mask.count("tl.load") == mask.count("columns[0]") == 1
    assert "def mask_columns" not in mask_text(masks.causal())
    assert mask_text(masks.document(IDS), shared=False).split("def mask_mod")[1].count("tl.load") == 2


def test_products_of_loads_and_of_distances_have_64_bits() -> None:
    _, mask = mask_text(lambda b, h, i, j: IDS[0, j] * j < IDS[1, i] * (i - j)).split("def mask_mod")
    assert "t0.to(tl.int64) * kv.to(tl.int64)" in mask
    assert "t2.to(tl.int64) * t3.to(tl.int64)" in mask
    _, mask = mask_text(lambda b, h, i, j: IDS[0, j].long() * 1000 > i).split("def mask_mod")
    assert ".to(tl.int64) * (1000)" in mask


def test_logarithms_of_masks_are_exact() -> None:
    assert "approximate" not in mask_text(lambda b, h, i, j: torch.log(1 + (i - j).abs()) < 2.5)


def test_masks_compare_distances_with_arguments_of_the_launch() -> None:
    """A window of another length, or at another offset, needs no new kernel."""
    sliding = lambda length, offset: lambda b, h, i, j: (j <= i) & (i + offset - j < length)  # noqa: E731
    assert mask_text(sliding(100, 5)) == mask_text(sliding(3000, -77))
    assert mask_text(masks.window(100, 5)) == mask_text(masks.window(3000, 2))
    text = mask_text(sliding(100, 0))
    assert "0 - distances.registers <= distances.threads + 0" in text
    assert "distances.threads - captured.size_15 < 0 - distances.registers" in text
    # A larger number could leave 32 bits.
    assert "captured.size_15 <" not in mask_text(sliding(2**31 - 1, 0))


@walk("number", [0, 1, -5, 100, 2**29 - 1, 1 - 2**29, 2**29, -(2**29), 2**31 - 1])
@walk("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_comparisons_of_distances_at_the_longest_lengths(name: str, number: int) -> None:
    """Positions up to 2 ** 30 are ints of 32 bits, as are the two parts of a distance."""
    compare = getattr(operator, name)
    positions = torch.tensor([0, 1, 99, 100, 2**29 - 1, 2**29, 2**29 + 1, 2**30 - 8, 2**30 - 1])
    q, kv, register = positions[:, None, None], positions[None, :, None], torch.tensor([-255, -1, 0, 7])
    masks_ = (
        lambda b, h, i, j: compare(i - j, number),
        lambda b, h, i, j: compare(j - i, number),
        lambda b, h, i, j: compare(number, i - j),
        lambda b, h, i, j: compare(i, j) ^ compare(j, i) ^ (h == 1),
    )
    for mask in masks_:
        mods = Mods(mask_mod=traced("mask_mod", mask).text, positions=2**30)
        source = functions.mask_function(mods, shared=True).src
        names: dict[str, Any] = {"tl": SimpleNamespace(int64=torch.int64)}
        exec(source, names)
        found = names[source[4 : source.index("(")]](
            torch.tensor(0), torch.tensor(1), q.int(), kv.int(),
            SimpleNamespace(**{f"size_{i}": size for i, size in enumerate(kernel_sizes(mods, ()))}),
            SimpleNamespace(threads=(q - kv - register).int(), registers=register.int()), (),
        )  # fmt: skip
        assert torch.equal(found.expand(9, 9, 4), mask(0, 1, q, kv).expand(9, 9, 4)), source
