"""The Hopper launches without a GPU: what they give their kernels, from several threads, and from call to
call."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

import flashtile
from flashtile.backends import hopper
from flashtile.backends.common.device import Target
from flashtile.backends.common.launch import CachedLaunch, Outputs
from flashtile.backends.hopper import fp8 as hopper_fp8
from flashtile.backends.hopper.backward.launch import backward_variant
from flashtile.backends.hopper.decode.launch import hopper_decode_variant
from flashtile.backends.hopper.forward.launch import forward_variant
from flashtile.backends.hopper.forward.rounds import plan_of
from flashtile.backends.portable.decode import launch as decode_launch
from flashtile.hardware.cards import CARDS
from flashtile.op.selection import on_target, select
from flashtile.operators.decode import DECODE
from flashtile.problems.attention import OptionalTensors, Problem
from flashtile.problems.common import shared_fields
from flashtile.problems.decode import CacheTensors, DecodeOptions, DecodeProblem
from flashtile.problems.fp8 import AttendTensors, Fp8Problem, Scales
from flashtile.tools.inspection.recording import launches_of
from walk import walk

BF16 = torch.bfloat16
PATIENCE = 20.0
"""Seconds after which threads that wait for one another are said to."""
BATCH, ROWS, HEADS = 2, 128, 4
PROBLEM = Problem(
    batch=BATCH,
    seqlen_q=ROWS,
    seqlen_k=ROWS,
    total_q=BATCH * ROWS,
    total_k=BATCH * ROWS,
    num_heads_q=HEADS,
    num_heads_kv=HEADS,
    head_dim=128,
    head_dim_v=128,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
    softmax_scale=1.0,
    varlen=True,
)
OFFSETS = torch.tensor([0, ROWS, 2 * ROWS], dtype=torch.int32)
EXTRAS = OptionalTensors(OFFSETS, OFFSETS)


def tensor(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(BATCH * ROWS, HEADS, head_dim).to(dtype)


def forward() -> Callable[[], object]:
    launch = hopper.prepare_forward(PROBLEM, hopper.configure_forward(PROBLEM))
    q, k, v = (tensor(128) for _ in range(3))
    return lambda: launch(q, k, v, EXTRAS)


def backward(head_dim: int, heads: int = 1, rows: int = 1) -> Callable[[], object]:
    """Blocks of keys shared by so many shares of heads and of rows."""
    problem = replace(PROBLEM, head_dim=head_dim, head_dim_v=head_dim)
    config = replace(hopper.configure_backward(problem), HEAD_SPLITS=heads, ROW_SPLITS=rows)
    launch = hopper.prepare_backward(problem, config)
    q, k, v, out, dout = (tensor(head_dim) for _ in range(5))
    lse = torch.zeros(HEADS, BATCH * ROWS)
    return lambda: launch(dout, None, q, k, v, out, lse, EXTRAS)


def fp8(scales: Scales, varlen: bool = True) -> Callable[[], object]:
    dtype = torch.float8_e4m3fn
    problem = Fp8Problem(**vars(PROBLEM) | {"dtype": dtype, "varlen": varlen}, block_scales=False)
    launch = hopper_fp8.prepare_fp8_attend(problem, hopper_fp8.configure_fp8_attend(problem))
    q, k, v = (tensor(128, dtype) for _ in range(3))
    if not varlen:
        q, k, v = (t.unflatten(0, (BATCH, ROWS)) for t in (q, k, v))
    extras = EXTRAS if varlen else OptionalTensors()
    return lambda: launch(q, k, v, AttendTensors(*scales, **shared_fields(AttendTensors, extras)))


CALLS = {
    "forward": forward,
    "fp8": lambda: fp8(Scales()),
    "backward": lambda: backward(128),
    "wide backward": lambda: backward(256),
    "widest backward": lambda: backward(512),
    "shared backward": lambda: backward(128, rows=2),
}


class Kernels:
    """Stands for all kernels: what was launched, by thread, and a function to run when one is prepared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: dict[int, list[tuple[str, tuple]]] = {}
        self.constants: dict[str, tuple] = {}
        self.when_prepared: Callable[[], None] = lambda: None
        prepare = CachedLaunch.__init__
        kernels = self

        def init(
            kept: CachedLaunch, kernel: Any, grid: int, scalars: tuple, constants: tuple, *a: Any, **k: Any
        ):
            prepare(kept, kernel, grid, scalars, constants, *a, **k)
            kept.name = kernel.fn.__name__  # type: ignore[attr-defined]
            kernels.constants[kept.name] = constants  # type: ignore[attr-defined]
            kernels.when_prepared()

        def call(kept: Any, device: torch.device, *tensors: Any) -> None:
            kernels.launched.setdefault(threading.get_ident(), []).append((kept.name, tensors))

        monkeypatch.setattr(CachedLaunch, "__init__", init)
        monkeypatch.setattr(CachedLaunch, "__call__", call)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def shapes(launched: list[tuple[str, tuple]]) -> list[tuple[str, list]]:
    return [
        (name, [(t.shape, t.dtype) if isinstance(t, Tensor) else t for t in tensors])
        for name, tensors in launched
    ]


def meet(call: Callable[[], object], kernels: Kernels, first_at: int, second_at: int) -> list[list]:
    """What each of two threads launches that call while neither has prepared before.

    The first one waits at the ``first_at``-th kernel that it prepares until the second one has reached its
    ``second_at``-th, and that one until the first one is done.
    """
    first, prepared = threading.get_ident(), Counter[int]()
    second_is_there, first_is_done = threading.Event(), threading.Event()

    def call_second() -> None:
        try:
            call()
        finally:
            second_is_there.set()

    def when_prepared() -> None:
        me = threading.get_ident()
        prepared[me] += 1
        if me == first and prepared[me] == first_at:
            second.start()
            assert second_is_there.wait(PATIENCE)
        elif me != first and prepared[me] == second_at:
            second_is_there.set()
            assert first_is_done.wait(PATIENCE)

    second = threading.Thread(target=call_second, daemon=True)
    kernels.when_prepared = when_prepared
    try:
        call()
    finally:
        first_is_done.set()
        if second.ident is not None:
            second.join(PATIENCE)
        kernels.when_prepared = lambda: None
    return [shapes(kernels.launched.pop(thread)) for thread in list(kernels.launched)]


@pytest.mark.parametrize("name", CALLS)
def test_threads_that_prepare_at_once_launch_the_same(name: str, kernels: Kernels) -> None:
    """Whatever a second thread has prepared when the first launches, nothing is missing."""
    CALLS[name]()()
    expected = shapes(kernels.launched.pop(threading.get_ident()))
    assert any("table" in kernel for kernel, _ in expected)
    for first_at, second_at in itertools.product(range(1, 6), repeat=2):
        found = meet(CALLS[name](), kernels, first_at, second_at)
        assert all(launched == expected for launched in found), (first_at, second_at)


@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("rows", [1, 4])
def test_shared_blocks_of_keys_give_parts_that_are_added_up(
    head_dim: int, rows: int, kernels: Kernels
) -> None:
    """In float32, by one more kernel, into the gradients that are returned; else nothing is."""
    _, dk, dv, *_ = backward(head_dim, rows=rows)()  # type: ignore[misc]
    launched = kernels.launched[threading.get_ident()]
    products = next(tensors for name, tensors in launched if name in ("backward_kernel", "dkv_kernel"))
    places = [t.data_ptr() for t in products if isinstance(t, Tensor)]
    if rows == 1:
        assert "sum_parts_kernel" not in [name for name, _ in launched]
        assert {dk.data_ptr(), dv.data_ptr()} <= set(places)
        return
    name, tensors = launched[-1]
    assert name == "sum_parts_kernel"
    *parts, dk_summed, dv_summed = tensors
    assert dk_summed is dk
    assert dv_summed is dv
    assert not {dk.data_ptr(), dv.data_ptr()} & set(places)
    for part in parts:
        assert part.data_ptr() in places
        assert part.shape == (BATCH * ROWS, HEADS * rows, head_dim)
        assert part.dtype == torch.float32


def attend_tensors(kernels: Kernels) -> list[tuple]:
    launched = kernels.launched[threading.get_ident()]
    return [tensors for name, tensors in launched if name == "fp8_forward_kernel"]


@pytest.mark.parametrize("varlen", [False, True])
def test_fp8_keeps_no_tensor_from_an_earlier_call(varlen: bool, kernels: Kernels) -> None:
    """One that was filled on another stream, or is filled only when a captured graph runs, would be read as
    it is."""
    call = fp8(Scales(), varlen)
    first, second = call(), call()
    assert first is not second
    one, other = attend_tensors(kernels)
    inputs = {t.data_ptr() for t in one[:3]}
    assert not {t.data_ptr() for t in one[3:]} & {t.data_ptr() for t in other[3:]} - inputs
    (variant,) = kernels.constants["fp8_forward_kernel"]
    assert (variant.HAS_Q_SCALE, variant.HAS_K_SCALE, variant.HAS_V_SCALE) == (False, False, False)


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)))
def test_fp8_reads_the_scales_that_there_are(given: tuple[bool, bool, bool], kernels: Kernels) -> None:
    scales = Scales(*(torch.ones(BATCH, HEADS) if there else None for there in given))
    fp8(scales)()
    (tensors,) = attend_tensors(kernels)
    (variant,) = kernels.constants["fp8_forward_kernel"]
    assert given == (variant.HAS_Q_SCALE, variant.HAS_K_SCALE, variant.HAS_V_SCALE)
    for scale, found in zip(scales, tensors[-3:], strict=True):
        assert scale is None or found is scale


@pytest.mark.parametrize("change", [{"seqlen_q": 0}, {"seqlen_k": 0}, {"total_q": 0}, {"batch": 0}])
def test_sequences_without_rows_are_not_served(
    change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward are served by the same backend, then another one."""
    monkeypatch.setattr(hopper, "reason_of_device", lambda problem: None)
    assert hopper.reason_against(PROBLEM, True) is None
    assert hopper.reason_against(replace(PROBLEM, **change), True) == "there are no queries or no keys"


GROUPS = (2, 4, 8, 3, 5, 6, 7, 12, 14)
"""Query heads of a key head: powers of two, then those of Qwen2.5, Phi and GLM."""


POWERS = {group: (group & -group, group & -group) for group in GROUPS}
CARD = Target("H200", (9, 0), 132)


def names_of(launch: Any, *tensors: Any) -> list[str]:
    """Return the names of the kernels that a launch runs on an H200."""
    return [one.kernel.fn.__name__ for one, _ in launches_of(CARD, partial(launch, *tensors))]


@walk(
    ("operation", "head_dim", "longest", "kernels"),
    [
        ("forward", 64, 1024, ["tile_table_kernel", "forward_kernel"]),
        ("forward", 64, 4096, ["tile_table_kernel", "forward_kernel"]),  # the first block of rows is partial
        ("forward", 128, 1024, ["tile_table_kernel", "forward_kernel"]),
        ("backward", 64, 1024, ["preprocess_kernel", "tile_table_kernel", "backward_kernel"]),
        ("backward", 128, 1024, ["preprocess_kernel", "tile_table_kernel", "backward_kernel"]),
    ],
)
def test_group_sizes_that_are_no_powers_of_two_have_the_same_kernels(
    operation: str, head_dim: int, longest: int, kernels: list[str]
) -> None:
    """Packed training batches. Variants differ only in how many heads of a group share a tile."""

    def kernel(group: int) -> tuple[list[str], Any]:
        q, k = (torch.empty(8192, n, head_dim, dtype=BF16, device="meta") for n in (4 * group, 4))
        offsets = torch.empty(17, dtype=torch.int32, device="meta")
        choice = flashtile.explain(
            flashtile.flash_attn_varlen_func, q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets,
            max_seqlen_q=longest, max_seqlen_k=longest, causal=True, card=CARDS["h200"],
        )[operation]  # fmt: skip
        assert choice.backend == "hopper"
        problem, config, extras = choice.problem, choice.config, OptionalTensors(offsets, offsets)
        variant: Any
        if operation == "forward":
            names = names_of(hopper.prepare_forward(problem, config), q, k, k, extras)
            variant = forward_variant(problem, plan_of(problem, config))
            assert POWERS[group] == (variant.PACK, variant.PACKED_HEADS)
            assert variant.FIRST_BLOCK_PARTIAL is (longest == 4096)
            return names, replace(variant, PACK=1, PACKED_HEADS=1)
        # How heads are divided among programs depends on their number, not on its kind.
        config = replace(config, HEAD_SPLITS=1, ROW_SPLITS=1)
        lse = torch.empty(4 * group, 8192, device="meta")
        names = names_of(hopper.prepare_backward(problem, config), q, None, q, k, k, q, lse, extras)
        return names, backward_variant(problem, config)

    of_four = kernel(4)
    assert of_four[0] == kernels
    for group in GROUPS:
        assert kernel(group) == of_four, group


def cached(
    group: int, head_dim: int, batch: int, tokens: int, longest: int
) -> tuple[Any, tuple[Tensor, ...], CacheTensors]:
    """Return the choice, and the tensors, of a step over pages in which one sequence has ``longest`` tokens.

    If it has more tokens than that one sequence, the step is packed.
    """
    packed = tokens != batch * longest
    shape = (tokens,) if packed else (batch, longest)
    q = torch.empty(*shape, 2 * group, head_dim, dtype=BF16, device="meta")
    cache = torch.empty(4096, 16, 2, head_dim, dtype=BF16, device="meta")
    lengths, offsets = (torch.empty(n, dtype=torch.int32, device="meta") for n in (batch, batch + 1))
    table = torch.empty(batch, 256, dtype=torch.int32, device="meta")
    given = {"cache_seqlens": lengths, "block_table": table} | ({"cu_seqlens_q": offsets} if packed else {})
    step = given | ({"max_seqlen_q": longest} if packed else {})
    choice = flashtile.explain(
        flashtile.flash_attn_with_kvcache, q, cache, cache, causal=True, card=CARDS["h200"], **step
    )["decode"]
    return choice, (q, cache, cache), CacheTensors(**given)


@walk(
    ("head_dim", "batch", "tokens", "longest", "kernels"),
    [
        (64, 16, 1550, 1024, ["table_kernel", "attend_kernel", "combine_divided_kernel"]),  # some chunks
        (128, 16, 1550, 1024, ["table_kernel", "attend_kernel", "combine_divided_kernel"]),
        (64, 32, 287, 256, ["table_kernel", "attend_kernel", "combine_divided_kernel"]),  # one chunk
        (128, 32, 287, 256, ["table_kernel", "attend_kernel", "combine_divided_kernel"]),
        (64, 64, 64, 1, ["decode_kernel", "combine_kernel"]),  # single tokens
        (128, 64, 64, 1, ["decode_kernel", "combine_kernel"]),
    ],
)
def test_serving_steps_have_the_same_kernels_in_groups_of_every_size(
    head_dim: int, batch: int, tokens: int, longest: int, kernels: list[str]
) -> None:
    """Over pages, chunks among single tokens take Hopper's kernel, single tokens alone the portable one."""

    def kernel(group: int) -> tuple[list[str], Any]:
        choice, tensors, given = cached(group, head_dim, batch, tokens, longest)
        problem, config = choice.problem, choice.config
        assert choice.backend == ("portable" if longest == 1 else "hopper")
        names = names_of(select(DECODE, problem, None).prepare(), *tensors, given)
        if longest == 1:
            plan = decode_launch.plan_of(problem, config, *tensors[1:])
            return names, decode_launch.decode_variant(problem, config, plan)
        variant = hopper_decode_variant(problem, config)
        # A TMA load has a power of two of rows. Where a group does not divide them, threads copy queries.
        copied = group & (group - 1) > 0
        assert (group, 1, copied) == (variant.PACK, variant.KV_GROUP, variant.COPIES_Q)
        return names, replace(variant, PACK=1, COPIES_Q=False)

    of_four = kernel(4)
    assert of_four[0] == kernels
    for group in GROUPS:
        assert kernel(group) == of_four, group


APART = dict.fromkeys(GROUPS, (1, 1))
SHARING: dict[str, tuple[dict[str, Any], dict[int, tuple[int, int]]]] = {
    "dense, 4,096 rows": ({"seqlen": 4096}, APART),
    "dense, 320 rows": ({"seqlen": 320}, APART),
    "dense, 16 rows": ({"seqlen": 16}, POWERS),
    "window of 128": (
        {"seqlen": 4096, "window_size": (127, 0)}, APART | {group: POWERS[group] for group in (4, 8, 12)}
    ),
    "packed, to 1,024": ({"packed": True, "seqlen": 1024}, POWERS),
    "packed, to 128": ({"packed": True, "seqlen": 128}, POWERS | {3: (4, 3), 7: (8, 7)}),
    "packed, to 40": (
        {"packed": True, "seqlen": 40}, POWERS | {3: (4, 3), 5: (8, 5), 6: (8, 6), 7: (8, 7), 14: (16, 14)}
    ),
}  # fmt: skip
"""Calls, and for each group (PACK, PACKED_HEADS): the rows of a token, and how many of them have a head."""


@walk(("call", "head_dim"), itertools.product(SHARING, (64, 128)))
def test_how_many_heads_of_a_group_share_a_tile(call: str, head_dim: int) -> None:
    """Powers of two that divide the group; short packed documents leave rows unused instead."""
    options, expected = dict(SHARING[call][0]), SHARING[call][1]
    seqlen, packed = options.pop("seqlen"), options.pop("packed", False)
    found = {}
    for group in GROUPS:
        shape = (8192,) if packed else (4, seqlen)
        q, k = (torch.empty(*shape, n, head_dim, dtype=BF16, device="meta") for n in (4 * group, 4))
        attend: Any = flashtile.flash_attn_func
        if packed:
            offsets = torch.empty(17, dtype=torch.int32, device="meta")
            lengths = {f"max_seqlen_{side}": seqlen for side in "qk"}
            attend = partial(
                flashtile.flash_attn_varlen_func, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **lengths
            )
        choice = flashtile.explain(attend, q, k, k, causal=True, **options, card=CARDS["h200"])["forward"]
        variant = forward_variant(choice.problem, plan_of(choice.problem, choice.config))
        found[group] = variant.PACK, variant.PACKED_HEADS
    assert found == expected


def test_the_layers_of_a_step_over_shared_keys_launch_one_table_and_no_fills() -> None:
    """256 sequences of an 8B model, in groups of up to 32."""
    k, v = torch.empty(2, 9000, 16, 8, 128, dtype=BF16, device="meta")
    q, lengths = torch.empty(256, 32, 128, dtype=BF16, device="meta"), torch.empty(256, device="meta").int()
    offsets, pages = torch.empty(257, device="meta").int(), torch.empty(256, 256, device="meta").int()
    given = CacheTensors(cache_seqlens=lengths, block_table=pages, cu_seqlens_q=offsets)
    options = DecodeOptions(max_seqlen_q=32, partial=True)
    problem = on_target(DecodeProblem.from_tensors(q, k, v, given, options), CARD)
    launch: Any = select(DECODE, problem, None).prepare()
    tables: dict[Any, Any] = {}
    found = []
    with mock.patch.object(Outputs, "cleared", side_effect=AssertionError):
        for _ in range(3):
            found.append(names_of(partial(launch, tables=tables), q, k, v, given))
    attend = ["attend_kernel", "combine_divided_kernel"]
    assert found == [["table_kernel", *attend], attend, attend]


@walk(("head_dim", "tokens"), itertools.product((64, 128), (32, 64, 1024)))
def test_chunks_over_pages_share_a_tile_in_groups_of_every_size(head_dim: int, tokens: int) -> None:
    for group in (*GROUPS, 64, 96):
        choice, *_ = cached(group, head_dim, 16, 16 * tokens, tokens)
        assert choice.backend == "hopper"
        variant = hopper_decode_variant(choice.problem, choice.config)
        pack = group if group <= 64 else 32
        assert pack == variant.PACK
        assert group // pack == variant.KV_GROUP
        assert variant.COPIES_Q is (group in (3, 5, 6, 7, 12, 14))
