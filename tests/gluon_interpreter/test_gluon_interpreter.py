"""What the interpreter of the Hopper kernels finds: faults planted into their source, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

import decode_cases
import flashtile
import linear_calls
from cases import BF16, Case
from flashtile.backends.hopper import pipeline
from flashtile.backends.hopper.backward import dq_accum, wide_dkv
from flashtile.backends.hopper.backward import kernel as backward
from flashtile.backends.hopper.decode import kernel
from flashtile.backends.hopper.forward import kernel as forward
from flashtile.backends.hopper.fp8 import kernel as fp8_forward
from flashtile.backends.hopper.linear import kernel as linear
from gluon_interpreter import Edited, KernelError, interpreted

CALL = Case(batch=1, seqlen_q=300, seqlen_k=300, heads_q=2, heads_kv=1, head_dim=64, dtype=BF16, causal=True)
LONG = replace(CALL, seqlen_q=190, seqlen_k=700, causal=False)  # a tile of 192 rows: three consumers
MANY_HEADS = replace(CALL, batch=6, seqlen_q=70, seqlen_k=140, causal=False)


def attend(case: Case) -> None:
    inputs = case.inputs("cpu")
    flashtile.attention(*inputs.qkv, backend="hopper", **inputs.arguments)


def differentiate(case: Case) -> None:
    inputs = case.inputs("cpu")
    leaves = [tensor.requires_grad_() for tensor in inputs.qkv]
    flashtile.attention(*leaves, backend="hopper", **inputs.arguments).backward(inputs.dout)


def attend_fp8(case: Case) -> None:
    inputs = case.inputs("cpu")
    rows = (tensor.to(torch.float8_e4m3fn) for tensor in inputs.qkv)
    flashtile.attention(*rows, backend="hopper", **inputs.arguments)


def decode() -> None:
    case = next(case for case in decode_cases.CASES if case.name == "page-size-1")
    tensors, arguments = decode_cases.build(case, BF16, "cpu")
    flashtile.flash_attn_with_kvcache(*tensors, backend="hopper", **arguments)


def multiply() -> None:
    call = linear_calls.Call(3, 128, 2056)
    linear_calls.run(call, linear_calls.make_inputs(call, BF16, "cpu", True), backend="hopper")


RUNS: dict[str, Callable[[], None]] = {
    "forward": lambda: attend(CALL),
    "forward, long": lambda: attend(LONG),
    "backward": lambda: differentiate(CALL),
    "backward, many heads": lambda: differentiate(MANY_HEADS),
    "backward, wide": lambda: differentiate(replace(CALL, head_dim=256)),
    "backward, widest": lambda: differentiate(replace(CALL, head_dim=512)),
    "fp8": lambda: attend_fp8(LONG),
    "decode": decode,
    "linear": multiply,
}
WAIT_FOR_S = "        s = warpgroup_mma_wait(LATER, deps=[s])"
RELEASE_K = "s = finish_qk(C, s, k, i, 1 if C.O_RIGHT == 0 else 2)"
WAIT_FOR_O = "o = finish_pv(o)\n        v.release(i - 1)\n        # P V reads"
EXPECT_V = "expect(v.full.index(slot), PARTS * desc.block_type.nbytes"
WAIT_FOR_DS = "mbarrier.wait(shared.ds_full.index(before & 1), (before >> 1) & 1)"
WAIT_FOR_DELTA = "neg_delta = wait_for_numbers(neg_delta, C.BLOCK_M // 4)"
WAIT_FOR_ADDED = "wait_for(accum.added_blocks + head, parts)"
ADDED = "signal(accum.added_blocks + key_head, "
CONVERTED = "wait_until_zeroed(key_head, blocks << row_shift(C, schedule), accum)"
OWN_TILE = "o_tile = output.tiles.index(W)\n            "
SOME_END = "global memory at .* by a (TMA store|load).* knows of no end"
MANY_HEADS_RUN = "backward, many heads"
FAULTS: list[tuple[str, Any, str, str, str]] = [
    # A wait less.
    ("forward", forward.tile_of_v, "v.wait(i)", "i % v.STAGES",
     r"multiplies by b, v\.tiles\[\d\], written by a load that completes on v\.full\[\d\]"),
    ("forward", forward.store_tile, OWN_TILE + "tma.store_wait(0)", OWN_TILE + "pass",
     r"stores to o_tiles\[\d\], read by a TMA store"),
    ("forward", forward.consumer, "tma.store_wait(0)", "pass", "ends before its TMA stores have read"),
    ("forward, long", forward.finish_qk, WAIT_FOR_S, "", "used before warpgroup_mma_wait"),
    ("forward, long", forward.finish_pv, "wait(0, deps=[o[0]])", "wait(1, deps=[o[0]])",
     "used before warpgroup_mma_wait"),
    ("backward", backward.pass_dq, "mbarrier.wait(shared.dq_empty.index(W), (i & 1) ^ 1)", "",
     r"stores to dq_parts\[\d\], read by a TMA store"),
    ("backward", backward.step, WAIT_FOR_DS, "", r"multiplies by a, ds\[\d\]"),
    (MANY_HEADS_RUN, dq_accum.accumulate_dq, CONVERTED, "pass", SOME_END),
    (MANY_HEADS_RUN, dq_accum.postprocess, WAIT_FOR_ADDED, "", SOME_END),
    ("backward, wide", wide_dkv.key_step, "weights.wait(i)", "i % 2", r"loads weights\[\d\]"),
    ("linear", linear.flat_kernel, "wait_group(STAGES - 2)", "wait_group(STAGES - 1)",
     "written by an asynchronous copy of program"),
    # Freed, or handed on, too early.
    ("forward, long", forward.attend_blocks, RELEASE_K, RELEASE_K + "; k.release(i)",
     "more arrive at|nobody can go on"),
    ("forward, long", forward.attend_blocks, WAIT_FOR_O, "v.release(i - 1); " + WAIT_FOR_O,
     r"loads to v\.tiles\[\d\], read by a product"),
    ("backward, widest", wide_dkv.key_step, WAIT_FOR_DELTA, "pass", r"loads to neg_delta\[\d\], loaded by"),
    (MANY_HEADS_RUN, dq_accum.accumulate_dq, ADDED + "0)", ADDED + "1)", SOME_END),
    # A fence less.
    ("forward", forward.store_tile, "fence_async_shared()", "", r"o_tiles\[\d\], .* without fence"),
    ("backward", backward.step, "fence_async_shared()", "", r"ds\[\d\], written by .* without fence"),
    (MANY_HEADS_RUN, dq_accum.wait_for, "proxy_fence()", "", SOME_END),
    ("fp8", fp8_forward.transpose_values, "fence_async_shared()", "", r"v_tiles\[\d\], .* without fence"),
    ("decode", kernel.arrive_with_copies, "fence_async_shared()", "", r"[kv]\.tiles\[\d\], .* without fence"),
    # Barriers that nobody passes, or too early.
    ("forward, long", pipeline.Channel.acquire, "^ 1", "^ 0", r"waits for parity 0 of q\.full\[0\]"),
    ("forward, long", pipeline.make_ring, "count=READERS", "count=READERS - 1",
     "more arrive at|knows of no end"),
    ("forward", forward.load_v, EXPECT_V, EXPECT_V + " // 2", "more bytes have landed"),
    ("forward", forward.load_v, EXPECT_V, EXPECT_V + " * 2",
     r"waits for parity 0 of v\.full\[0\].* 8192 bytes missing"),
    # Addresses.
    ("forward", forward.store_row, "positions < work.seqlen_q", "positions < 2**20", "of a buffer of 600"),
    ("decode", kernel.is_seen, "position < keys.end", "position < keys.end + 64", "of a buffer of"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "function", "old", "new", "message"), FAULTS)
def test_planted_faults_are_found(call: str, function: Any, old: str, new: str, message: str) -> None:
    with pytest.raises(KernelError, match=message), interpreted(0, Edited(function, old, new)):
        RUNS[call]()


def test_a_seed_repeats_a_run() -> None:
    """Orders and copies included: dQ is added up in the order of events."""
    inputs = MANY_HEADS.inputs("cpu")
    leaves = [tensor.requires_grad_() for tensor in inputs.qkv]
    found = []
    for _ in range(2):
        with interpreted(5):
            out = flashtile.attention(*leaves, backend="hopper")
            found.append(torch.autograd.grad(out, leaves, inputs.dout))
    assert all(map(torch.equal, *found))


def test_what_is_not_known_is_named() -> None:
    edited = Edited(forward.store_row, "gl.store(", "gl.histogram(")
    with (
        pytest.raises(NotImplementedError, match=r"gl\.histogram, which the interpreter"),
        interpreted(0, edited),
    ):
        attend(CALL)
