"""Descriptors of the tensor cores' products are those of the PTX, also for shapes that a ptxas got wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have nothing to compile", allow_module_level=True)

from descriptors import wrong_descriptors  # noqa: E402

import flashtile  # noqa: E402
from flashtile.backends.common.device import Target  # noqa: E402
from flashtile.backends.compat import compiling_driver  # noqa: E402
from flashtile.compilation.calls import calls_of  # noqa: E402
from flashtile.compilation.compiling import launches  # noqa: E402
from flashtile.op.operation import remembering  # noqa: E402
from flashtile.tools.inspection.report import cuobjdump  # noqa: E402
from fuzz.prelude import rand  # noqa: E402

H200 = Target("H200", (9, 0), 132)
HAS_FAULT = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)
"""Whether Triton brings ptxas 12.8."""
PTX = "or.b64 %rd1, %rd0, 4611686293305294848; add.s64 %rd2, %rd0, -9223371899415822272;"
"""Upper halves 0x40000040 and 0x80000020."""


def sass(*lines: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/    {line} ;   /* 0x0 */" for i, line in enumerate(lines))


BASE = "USGXT.U32 UR4, UR4, 0xe"
PRODUCT = "HGMMA.64x32x16.F32 R56, R24, gdesc[UR4].tnspB, R56"
LOWER = "UIADD3 UR6, UP0, UR4, 0x40, URZ"
UPPER = "UIADD3.X UR7, UR7, -0x7fffffe0, URZ, UP0, !UPT"
MOVED = "UMOV UR7, 0x80000020"
BOTH = "HGMMA.64x64x16.F32 R24, gdesc[UR4].tnspA.tnspB, RZ, !UPT"
HALVES = "UMOV UR8, 0xffffffc0", "UMOV UR9, 0x7fffffdf", "UMOV UR5, URZ"
RIGHT = {
    "a move": ("UMOV UR6, UR4", MOVED, PRODUCT),
    "additions": ("UMOV UR7, URZ", LOWER, UPPER, PRODUCT),
    "a difference of 64 bits": (*HALVES, "UIADD3.64 UR6, UR4, -UR8, URZ", PRODUCT),
    "both operands": ("UMOV UR5, 0x40000040", "UMOV UR7, 0x40000040", BOTH),
    "a vector register": ("R2UR UR7, R8", PRODUCT),
    "a loop": (MOVED, PRODUCT, "@P1 BRA 0x20", "EXIT"),
}
WRONG = {
    "never written": (LOWER, UPPER, PRODUCT),
    "written on one path": ("@P0 BRA 0x30", MOVED, PRODUCT),
    "the other descriptor's": ("UMOV UR7, 0x40000040", UPPER, PRODUCT),
    "another value": ("S2UR UR7, SR_CTAID.X", UPPER, PRODUCT),
    "one too many": ("UMOV UR7, 0x80000021", PRODUCT),
    "overwritten in a loop": (MOVED, PRODUCT, "UMOV UR7, 0x7", "@P1 BRA 0x20", "EXIT"),
}


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT)
def test_right_descriptors_pass(lines):
    assert wrong_descriptors(PTX, sass(BASE, *lines)) == []


@pytest.mark.parametrize("lines", WRONG.values(), ids=WRONG)
def test_wrong_descriptors_are_found(lines):
    assert len(wrong_descriptors(PTX, sass(BASE, *lines))) == 1


def attend(head_dim: int, head_dim_v: int, heads_first: bool) -> None:
    def tensor(heads: int, width: int) -> torch.Tensor:
        x = torch.empty(1, heads, 70, width, dtype=torch.float16)
        return x.transpose(1, 2) if heads_first else x.reshape(1, 70, heads, width)

    flashtile.attention(tensor(6, head_dim), tensor(3, head_dim), tensor(3, head_dim_v))


def overlapping(*shape: int) -> torch.Tensor:
    """Return keys for a shape (batch, heads, seqlen, head_dim), each one element after the one before."""
    return rand(*shape, dtype=torch.float16, layout="overlapping").transpose(1, 2)


def attend_overlapping(head_dim: int, head_dim_v: int) -> None:
    q, v = (torch.empty(1, 70, heads, width).half() for heads, width in ((6, head_dim), (3, head_dim_v)))
    flashtile.attention(q, overlapping(1, 3, 70, head_dim), v)


def attend_one_key(head_dim: int, head_dim_v: int) -> None:
    """A single key, whose token stride says nothing: as of a transposed (batch, heads, head_dim, 1)."""
    q, v = (torch.empty(2, n, 3, width).half() for n, width in ((70, head_dim), (1, head_dim_v)))
    flashtile.attention(q, torch.empty(2, 3, head_dim, 1).half().permute(0, 3, 1, 2), v)


def decode(head_dim: int, overlaps: bool) -> None:
    """64 queries of each key head."""
    q, k, v = (
        torch.empty(2, n, h, d).half() for n, h, d in ((1, 64, head_dim), (200, 1, head_dim), (200, 1, 20))
    )
    k = overlapping(2, 1, 200, head_dim) if overlaps else k
    flashtile.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.full((2,), 150, dtype=torch.int32))


def wrong_of(call: Callable[[], None], widths: tuple[int, int] | None = None) -> list[str]:
    """Return the wrong descriptors of a call on an H200. ``widths``: columns of the tiles of k and v."""
    with remembering() as calls:
        call()
    (recorded,) = calls_of(calls)
    launch, tensors = launches(recorded, H200)[0]
    if widths is not None:
        variant = replace(launch._fixed[-1], BLOCK_D=widths[0], BLOCK_DV=widths[1])
        launch._fixed = (*launch._fixed[:-1], variant)
    with compiling_driver(H200.capability):
        compiled = launch.compile_ahead(tensors)
    compiled = compiled.result() if hasattr(compiled, "result") else compiled
    return wrong_descriptors(compiled.asm["ptx"], cuobjdump("-sass", compiled.asm["cubin"]))


MET = {
    "keys side by side": (partial(attend, 1, 20, True), (32, 32)),
    "narrower v": (partial(attend, 20, 8, False), (32, 16)),
    "overlapping keys": (partial(attend_overlapping, 32, 20), (32, 32)),
    "one key": (partial(attend_one_key, 20, 20), (32, 32)),
    "decode": (partial(decode, 1, False), (32, 32)),
    "decode, overlapping keys": (partial(decode, 32, True), (32, 32)),
}
"""Calls that met the fault of ptxas 12.8, and the widths of tiles with which they met it."""


@pytest.mark.compile
@pytest.mark.parametrize(("call", "widths"), MET.values(), ids=MET)
def test_widths_of_tiles_keep_clear_of_the_fault_of_ptxas(call, widths):
    assert wrong_of(call) == []
    assert bool(wrong_of(call, widths)) == HAS_FAULT, "the fault, as the check sees it"
