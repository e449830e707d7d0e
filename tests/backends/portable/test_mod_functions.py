"""Jit functions that are written from programs do not depend on the programs' numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashtile import masks
from flashtile.masks.mods import traced
from flashtile.masks.program import kernel_sizes, numbers_of
from flashtile.problems.masks import MAX_SIZES, Mods

functions = pytest.importorskip("flashtile.backends.portable.attention.functions")


def mods_of(kind: str, mod: object) -> tuple[Mods, list[int]]:
    trace = traced(kind, mod)  # type: ignore[arg-type]
    mods = Mods(**{kind: trace.text}, ranks=tuple(tensor.dim() for tensor in trace.tensors))
    return mods, kernel_sizes(mods, trace.tensors)


def test_other_numbers_need_no_other_function() -> None:
    short, of_short = mods_of("mask_mod", masks.window(100, 5))
    long, of_long = mods_of("mask_mod", masks.window(3000, 70))
    assert functions.mask_function(short) is functions.mask_function(long)
    assert of_short[-2:] == [5, -100]
    assert of_long[-2:] == [70, -3000]
    fixed = [functions.mask_function(mods, fixed=True) for mods in (short, long)]
    assert fixed[0] is not fixed[1]


def test_numbers_stand_behind_the_sizes_of_captured_tensors() -> None:
    mods, sizes = mods_of("score_mod", masks.relative_position(torch.zeros(2, 257)))
    assert numbers_of(mods) == (-128, 128)
    assert sizes == [2, 257, *[0] * (MAX_SIZES - 4), 128, -128]


def test_numbers_without_a_place_stay_in_the_text() -> None:
    trace = traced("mask_mod", lambda b, h, q, kv: (q > 10) & (q > 20) & (q > 30) & (kv < 40))
    program = Mods(mask_mod=trace.text, ranks=(MAX_SIZES - 1,))
    assert numbers_of(program) == (10,)
    text = functions.mask_function(program).src
    assert f"size_{MAX_SIZES - 1}" in text
    assert "30" in text


def test_what_a_shift_can_do_stays_in_the_text() -> None:
    mods, _ = mods_of("mask_mod", lambda b, h, q, kv: (q // 64 == kv // 64) & (q % 7 == 0))
    assert numbers_of(mods) == ()
    # A number near 0 may spare the kernel more than an instruction.
    assert numbers_of(mods_of("mask_mod", lambda b, h, q, kv: q - kv >= 1)[0]) == ()


def test_a_compiled_kernel_gets_addresses_in_its_structures():
    """Triton asks the driver about each tensor that it finds there."""
    from flashtile.backends.portable.attention.functions import FunctionPointers, captured_of
    from flashtile.problems.attention import ModifiedExtras
    from flashtile.tools.inspection.attention import WITH_MODS

    slopes, counts, indices = torch.rand(8), torch.ones(2, 1, 32), torch.zeros(2, 1, 32, 32)
    given = {"alibi_slopes": slopes, "captured_0": torch.rand(8, 257), "captured_1": torch.zeros(2, 4096)}
    given |= {"kv_num_blocks": counts, "kv_indices": indices, "full_kv_num_blocks": counts}
    given |= {"full_kv_indices": indices}
    extras = ModifiedExtras(**dict.fromkeys(ModifiedExtras._fields) | given)
    captured, gradient = captured_of(extras), torch.zeros(8, 257)
    pointers_of = FunctionPointers(WITH_MODS, extras)
    gradients = (gradient, *[None] * 7)
    for takes_addresses in (False, True):
        kernel = SimpleNamespace(takes_addresses=takes_addresses)
        *plain, bounds, functions, lists = pointers_of(kernel, extras, captured, gradients)
        assert (plain[3], bounds, sum(x is not None for x in plain)) == (slopes, None, 1)
        tensors = [functions.tensor_0, functions.tensor_1, functions.gradient_0, *lists[:4]]
        expected = [*captured[:2], gradient, counts, indices, counts, indices]
        if takes_addresses:
            expected = [tensor.data_ptr() for tensor in expected]
        assert all(x is y or x == y for x, y in zip(tensors, expected, strict=True))
        assert (functions.tensor_2, functions.gradient_1) == (None, None)
        assert functions[16:20] == (8, 257, 2, 4096)
        assert lists[4:] == (2, 1)
