"""Numbers of functions: an int becomes a float where torch makes it one, and floats have the call's dtype."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import flashtile
from flashtile import masks, testing
from flashtile.masks import ranges as of_ranges
from flashtile.masks.mods import traced
from flashtile.masks.operations import OPERATIONS
from flashtile.masks.program import Line, Name, variables
from flashtile.masks.ranges import POSITIONS, wide_lines
from flashtile.problems.masks import positions_of
from flashtile.reference import attention as reference
from targets import Target
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

BECOME_FLOATS: dict[str, Callable] = {
    "1.0 * i": lambda s, b, h, i, j: 1.0 * i,
    "i * 1.0": lambda s, b, h, i, j: i * 1.0,
    "i + 0.0": lambda s, b, h, i, j: i + 0.0,
    "0.0 + i": lambda s, b, h, i, j: 0.0 + i,
    "i - 0.0": lambda s, b, h, i, j: i - 0.0,
    "i ** 1.0": lambda s, b, h, i, j: i**1.0,
    "i ** 2.0": lambda s, b, h, i, j: i**2.0,
    "i / 1": lambda s, b, h, i, j: i / 1,
    "where": lambda s, b, h, i, j: torch.where(i > j, i, 1.0),
    "clamp": lambda s, b, h, i, j: i.clamp(max=2.5),
    "type_as": lambda s, b, h, i, j: i.type_as(i / 2),
    "new_ones": lambda s, b, h, i, j: i.new_ones((), dtype=torch.float32),
    "new_zeros": lambda s, b, h, i, j: (i / 2).new_zeros(()),
}


@walk("name", BECOME_FLOATS)
def test_an_int_becomes_a_float_where_torch_makes_it_one(name: str) -> None:
    """A score_mod must give a float, so that its trace says."""
    function = BECOME_FLOATS[name]
    index = torch.arange(3)
    assert function(None, None, None, index, index).is_floating_point()
    traced("score_mod", function)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_indices_may_be_small_ints(target: Target, dtype: torch.dtype) -> None:
    """torch itself takes uint8 for a mask and refuses int16. A table may be longer than int8 can count."""
    table = torch.linspace(-2, 2, 300, device=target.device)
    wide = torch.tensor([3, 0, 5, 127, 5, 1, 90, 2], device=target.device)
    if dtype.is_signed:
        wide = torch.where(wide == 5, -5, wide)
    narrow = wide.to(dtype)
    q, k, v = (testing.random_tensor((1, 8, 1, 16), torch.float32, target.device, seed=i) for i in range(3))

    def out(places: torch.Tensor) -> torch.Tensor:
        return flashtile.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + table[places[j]], backend=target.backend
        )

    def blocks(places: torch.Tensor) -> torch.Tensor:
        mask = masks.mask_mod(lambda b, h, i, j: table[places[j // 16]] > 0)
        return masks.create_block_mask(mask, None, None, 16, 128, target.device, 16).full_kv_num_blocks

    torch.testing.assert_close(out(narrow), out(wide))
    assert torch.equal(blocks(narrow), blocks(wide))


NARROW: dict[str, Callable] = {
    "batch": lambda b, h, i, j, u8, i8, i16: b - u8[j] < 0,
    "head": lambda b, h, i, j, u8, i8, i16: h * 10 + i16[j] > 20,
    "two dtypes": lambda b, h, i, j, u8, i8, i16: i8[j] + u8[i] > 3,
    "products wrap": lambda b, h, i, j, u8, i8, i16: (i8[i] * i8[j] > 0) ^ (i16[i] * i16[j] > 0),
    "conversions wrap": lambda b, h, i, j, *tables: ((i + 1) * 2654435761).int() > (i * 57 + j * 91).char(),
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_ints_are_torchs(target: Target, name: str) -> None:
    """A block mask and a mask function see what torch computes with all indices at once."""
    device, lengths = target.device, (2, 2, 8, 16)
    i, j = (torch.arange(n, device=device) for n in lengths[2:])
    tables = [
        (torch.tensor([3, 0, 1, 200, 2, 5, 127, 128] * 2, device=device)).to(torch.uint8),
        (torch.tensor([100, 50, -128, 127, 3, -7, 0, 9] * 2, device=device)).to(torch.int8),
        (torch.tensor([32767, 5, 32766, 1, 2, -30000, 30000, 0] * 2, device=device)).to(torch.int16),
    ]
    b, h = torch.arange(2, device=device)[:, None, None, None], torch.arange(2, device=device)[:, None, None]
    mask = NARROW[name](b, h, i[:, None], j, *tables).expand(lengths)
    q, k, v = (testing.random_tensor((2, n, 2, 16), torch.float32, device, seed=n) for n in (8, 16, 16))
    expected = flashtile.attention(q, k, v, mask=mask, backend=target.backend)

    def function(b, h, i, j):
        return NARROW[name](b, h, i, j, *tables)

    block_mask = masks.create_block_mask(function, *lengths, device, 16)
    for given in ({"mask_mod": function}, {"block_mask": block_mask}):
        torch.testing.assert_close(flashtile.attention(q, k, v, backend=target.backend, **given), expected)


def test_squares_of_floats_do_not_overflow(target: Target) -> None:
    """As ints of 32 bits they would."""

    def modify(s, b, h, i, j):
        distance = 1.0 * (i - j + 50000)
        return s - distance * distance * 1e-9 - ((j + 60000) + 0.0) ** 2 * 1e-9

    q, k, v = (testing.random_tensor((1, 8, 1, 16), torch.float32, target.device, seed=i) for i in range(3))
    _, lse = flashtile.attention(q, k, v, score_mod=modify, return_lse=True, backend=target.backend)
    i = torch.arange(8, dtype=torch.float64, device=target.device)
    scores = (q[0, :, 0] @ k[0, :, 0].T).double() / 4
    scores = scores - ((i[:, None] - i + 50000) ** 2 + (i + 60000) ** 2) * 1e-9
    torch.testing.assert_close(lse[0, 0].double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)


IN_FLOAT64: dict[str, tuple[Callable, Callable]] = {
    "factor": (lambda s, b, h, i, j: s + 0.1 * j, lambda i, j: 0.1 * j),
    "division": (lambda s, b, h, i, j: s + (i + 1) / (j + 3), lambda i, j: (i + 1) / (j + 3)),
    "float()": (lambda s, b, h, i, j: s + j.float() / 3, lambda i, j: j / 3),
    "bool": (lambda s, b, h, i, j: s + (i > j).float() * 0.1, lambda i, j: (i > j).double() * 0.1),
    "where": (lambda s, b, h, i, j: s + torch.where(i > j, 0.1, 0.7),
              lambda i, j: 0.7 - 0.6 * (i > j).double()),
    "root": (lambda s, b, h, i, j: s + torch.sqrt(j + 2), lambda i, j: torch.sqrt(j + 2)),
    "power": (lambda s, b, h, i, j: s + 1.3**j, lambda i, j: torch.pow(1.3, j)),
    "maximum": (lambda s, b, h, i, j: s + torch.clamp(j, min=0.1), lambda i, j: torch.clamp(j, min=0.1)),
    "comparison": (lambda s, b, h, i, j: s + torch.where(16777216 + j > 16777216.5, 1.0, 0.0),
                   lambda i, j: (j >= 1) * 1.0),
}  # fmt: skip


@walk("name", IN_FLOAT64)
def test_float64_calls_compute_in_float64(name: str) -> None:
    score_mod, bias = IN_FLOAT64[name]
    q, k, v = (torch.randn(1, 6, 1, 4, dtype=torch.float64) for _ in range(3))
    index = torch.arange(6, dtype=torch.float64)
    added = bias(index[:, None], index).expand(6, 6)[None, None].contiguous()
    expected, _ = reference.attention(q, k, v, bias=added)
    out = flashtile.attention(q, k, v, score_mod=score_mod)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


def test_a_division_by_zero_is_torchs() -> None:
    """Where a mask hides it, and in what is folded."""
    q = torch.randn(1, 4, 1, 8, requires_grad=True)
    out = flashtile.attention(
        q, q, q, score_mod=lambda s, b, h, i, j: s / 0, mask_mod=lambda b, h, i, j: i < 0
    )
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert not out.any()
    assert not dq.any()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, b, h, i, j: s + ~s, "~ takes booleans and ints, not a float"),
        (lambda s, b, h, i, j: s + -(i > j), "- takes ints and floats, not a bool"),
        (lambda s, b, h, i, j: s + i * 2**63, "an int must fit 64 bits"),
        (lambda s, b, h, i, j: s + i * -(2**63 + 1), "an int must fit 64 bits"),
    ],
)
def test_what_torch_does_not_compute_does_not_compile(function, words: str) -> None:
    with pytest.raises(TypeError, match=f"^score_mod does not compile: {words}"):
        traced("score_mod", function)


def test_every_int_of_64_bits_compiles() -> None:
    for number in (2**63 - 1, -(2**63)):
        assert str(number) in traced("score_mod", lambda s, b, h, i, j: s + i * number).text  # noqa: B023


def test_ints_that_leave_32_bits_are_computed_in_64(target: Target) -> None:
    """As torch computes them."""

    def modify(s, b, h, i, j):
        square = (i + 50000) * (j + 60000)
        mixed = (i * 2654435761 + (j << 29)) % 97
        chosen = torch.where(i > j, 3000000000, -5) // 1000000000 + torch.where(j * 2**33 > 2**34, 1, 0)
        return s + square % 11 / 11 + mixed / 97 + chosen / 4

    q, k, v = (testing.random_tensor((1, 8, 1, 16), torch.float32, target.device, seed=i) for i in range(3))
    out = flashtile.attention(q, k, v, score_mod=modify, backend=target.backend)
    expected, _ = reference.attention(q.double(), k.double(), v.double(), score_mod=modify)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_divisions_round_down(target: Target) -> None:
    """Of ints and floats of either sign, by numbers and by what is known only in a kernel."""

    def modify(s, b, h, i, j):
        ints = (i - j) // 3 + (i - j) % -4 + (i - j) // (2 * j - 5) + (i - j) % (2 * j - 5)
        return s + ints / 8 + (s // 0.75) / 8 + s % (j - 2.5) + s % -1.5

    q, k, v = (testing.random_tensor((1, 8, 1, 16), torch.float32, target.device, seed=i) for i in range(3))
    out = flashtile.attention(q, k, v, score_mod=modify, backend=target.backend)
    expected, _ = reference.attention(q.double(), k.double(), v.double(), score_mod=modify)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@walk("operation", [
    "abs", "add", "and", "floordiv", "lshift", "maximum", "minimum", "mod", "mul", "neg", "not", "or",
    "rshift", "sign", "sub", "where", "xor",
])  # fmt: skip
def test_ranges_of_ints_hold_every_result(operation: str) -> None:
    allowed = {
        "floordiv": lambda a, b: b != 0,
        "mod": lambda a, b: b != 0,
        "lshift": lambda a, b: b >= 0,
        "rshift": lambda a, b: b >= 0,
    }.get(operation, lambda *numbers: True)
    condition = [True] if operation == "where" else []
    count = 1 if operation in ("abs", "neg", "not", "sign") else 2
    results = {
        numbers: OPERATIONS[operation].number(*condition, *numbers)
        for numbers in itertools.product(range(-5, 6), repeat=count)
        if allowed(*numbers)
    }
    line = Line(Name("t0"), "int", operation, ())
    ranges = [(low, high) for low, high in itertools.product((-5, -1, 0, 1, 3, 5), repeat=2) if low <= high]
    for operands in itertools.product(ranges, repeat=count):
        inside = itertools.product(*(range(low, high + 1) for low, high in operands))
        found = {results[numbers] for numbers in inside if numbers in results}
        low, high = of_ranges._range(line, [*operands])
        assert not found or (low <= min(found) and max(found) <= high), (operands, low, high, found)


def test_numbers_of_32_bits_may_be_launch_arguments() -> None:
    for number, found in ((1, []), (2, [2]), (2**31 - 1, [2**31 - 1]), (2**31, [])):
        program = traced("mask_mod", lambda b, h, i, j, number=number: i + number > j).program
        assert list(variables(program)) == found


def test_only_ints_that_may_leave_32_bits_are_wide() -> None:
    """The others would need more registers."""

    def wide(function: Callable, positions: int = POSITIONS) -> int:
        program = traced("mask_mod", function).program
        return len(wide_lines(program, positions))

    assert wide(lambda b, h, i, j: (i - j).abs() * 100 < 2**30) == 0
    assert wide(lambda b, h, i, j: (i - j).abs() * 100 < 2**30, 2**26) == 1
    assert wide(lambda b, h, i, j: i * j < 5) == 1
    assert wide(lambda b, h, i, j: (i % 1000) * (j % -1000) < 5) == 0
    assert wide(lambda b, h, i, j: i < 2**31) == 1
    for function, largest in (
        (lambda b, h, i, j: i + j < 5, 2**30 - 1),
        (lambda b, h, i, j: i - j < 5, 2**31 - 1),
        (lambda b, h, i, j: -i < 5, 2**31),
    ):
        assert (wide(function, largest), wide(function, largest + 2)) == (0, 1)
    assert wide(lambda b, h, i, j: (i // 64 ^ j // 64) & 1 == 0) == 0
    assert wide(lambda b, h, i, j: i << 8 == ~j) == 1
    for dtype in (torch.int32, torch.int64):
        table = torch.zeros(2, dtype=dtype)
        assert wide(lambda b, h, i, j, table=table: table[h] * i < 5) == 1
        assert wide(lambda b, h, i, j, table=table: table[h] + i < 5) == 0
    # A product that leaves 64 bits may have either sign.
    assert wide(lambda b, h, i, j: (table[h].abs() * (2**39 - 1)).clamp(max=0) < 5) == 1
    assert wide(lambda b, h, i, j: (table[h].abs() * 2**39).clamp(max=0) < 5) == 2
    assert wide(lambda b, h, i, j: (table[h].abs() * -(2**39)).clamp(min=0) < 5) == 1
    assert wide(lambda b, h, i, j: (table[h].abs() * (-(2**39) - 1)).clamp(min=0) < 5) == 2
    assert wide(lambda b, h, i, j: torch.where(i > j, i > 5, 5) - (2**31 - 1) - 4 < 5) == 1
    least = 2**31 - POSITIONS
    assert wide(lambda b, h, i, j: table[h] - least < 5) == 0
    assert wide(lambda b, h, i, j: table[h] - (least + 1) < 5) == 1
    for mask in (masks.window(1000, 5), masks.natten(64, 64, 7), masks.dilated(5, 3), masks.prefix_lm(9)):
        assert wide(mask) == 0
    assert positions_of(2**25 - 1, 5) == positions_of(5, 2**25) == 2**25
    assert positions_of(0, 5) == POSITIONS // 2
