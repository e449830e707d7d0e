"""Launches by address hand the kernels what calls with tensors do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flashtile import torch_private
from flashtile.backends.common.launch import CachedLaunch, Outputs
from flashtile.backends.portable.decode import config
from flashtile.backends.portable.decode import launch as decode_launch
from flashtile.backends.portable.decode.launch import AppendLaunch, DecodeLaunch
from flashtile.problems.decode import (
    FP8,
    AppendOptions,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    DecodeOptions,
    DecodeProblem,
)
from flashtile.problems.masking import CAUSAL

HEADS, HEADS_KV, DIM, PAGE, BLOCKS = 4, 2, 32, 16, 24


@pytest.fixture
def launched(monkeypatch) -> list[tuple]:
    """(kernel's name, addresses) of each launch; kernels are neither compiled nor run."""
    launches: list[tuple] = []

    def compile_nothing(self: Any, device: Any, tensors: tuple) -> None:
        def run(stream: int, given: tuple, further: tuple | None = None) -> None:
            every = (*given, *(further or ()))
            assert further is None or not any(isinstance(t, torch.Tensor) for t in every)
            addresses = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in every]
            launches.append((self.kernel.__name__, addresses))

        run(0, tensors)
        self._run, self._index = run, 0

    monkeypatch.setattr(CachedLaunch, "_compile", compile_nothing)
    monkeypatch.setattr(torch_private, "cuda_device", lambda: 0)
    monkeypatch.setattr(torch_private, "cuda_stream", lambda index: 0)
    return launches


def addresses(tensors: Any) -> Any:
    return type(tensors)(*(None if t is None else t.data_ptr() for t in tensors))


CALLS = {
    "split": ({}, {}), "whole": ({"num_splits": 1}, {}), "sinks": ({}, {"sink": torch.randn(HEADS)}),
    "alibi": ({}, {"alibi_slopes": torch.rand(HEADS)}),
    "fp8": ({}, {"k_descale": torch.ones(HEADS_KV), "v_descale": torch.ones(HEADS_KV)}),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_attention(launched, name, packed):
    given, more = CALLS[name]
    q = torch.randn(*((6,) if packed else (3, 1)), HEADS, DIM)
    k, v = torch.randn(2, BLOCKS, PAGE, HEADS_KV, DIM).to(FP8 if name == "fp8" else q.dtype)
    starts = torch.tensor([0, 1, 3, 5], dtype=torch.int32) if packed else None
    tensors = CacheTensors(
        cache_seqlens=torch.tensor([5, 40, 0], dtype=torch.int32),
        block_table=torch.zeros(3, 8, dtype=torch.int32), cu_seqlens_q=starts, **more,
    )  # fmt: skip
    options = DecodeOptions(max_seqlen_q=2 if packed else None, masking=CAUSAL, return_lse=False, **given)
    problem = DecodeProblem.from_tensors(q, k, v, tensors, options)
    launch, out = DecodeLaunch(problem, config.choose(problem)), torch.full_like(q, torch.nan)
    assert not launch.can_launch_by_address
    launch(q, k, v, tensors, out)
    assert launch.can_launch_by_address
    launched.clear()
    launch(q, k, v, tensors, out)
    expected = launched.copy()
    launched.clear()
    out.fill_(torch.nan)
    launch.by_address(out, tuple(t.data_ptr() for t in (q, k, v, out)), addresses(tensors), {})
    assert [kernel for kernel, _ in launched] == [kernel for kernel, _ in expected]
    assert out.isnan().all()  # tokens that no kernel writes are not filled
    known = {t.data_ptr() for t in (q, k, v, out, *tensors) if t is not None}
    for (_, now), (_, before) in zip(launched, expected, strict=True):
        # lse and partial results have new memory in each call.
        assert [a if a in known else a is None for a in now] == [
            a if a in known else a is None for a in before
        ]
    if len(launched) == 2:  # the second kernel combines what the first has left
        lse, partial = launched[0][1][4:6]
        assert lse == partial + 4 * launch._partials
        assert launched[1][1][:3] == [partial, out.data_ptr(), lse]


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_appends(launched, dtype):
    k, v = torch.randn(2, 3, HEADS_KV, DIM)
    k_cache, v_cache = torch.zeros(2, BLOCKS, PAGE, HEADS_KV, DIM).to(dtype)
    scales = (torch.ones(HEADS_KV),) * 2 if dtype == FP8 else (None, None)
    tensors = AppendTensors(slot_mapping=torch.arange(3), k_descale=scales[0], v_descale=scales[1])
    problem = AppendProblem.from_tensors(k_cache, v_cache, k, v, tensors, AppendOptions())
    launch = AppendLaunch(problem)
    assert not launch.can_launch_by_address
    for _ in range(2):
        launch(k_cache, v_cache, k, v, tensors)
    assert launch.can_launch_by_address
    of_slots = addresses(tensors)
    launch.by_address(
        *(t.data_ptr() for t in (k_cache, v_cache, k, v)), of_slots.slot_mapping, of_slots.k_descale,
        of_slots.v_descale,
    )  # fmt: skip
    assert launched[1] == launched[2]
    assert launched[2][1] == [t.data_ptr() for t in (k_cache, v_cache, k, v)] + [*of_slots]


def test_steps_in_turns(launched):
    """Both kernels get the addresses of the step, also after another step with the same signature."""
    q, (k, v) = torch.randn(3, 1, HEADS, DIM), torch.randn(2, BLOCKS, PAGE, HEADS_KV, DIM)
    tensors = CacheTensors(torch.tensor([5, 40, 0], dtype=torch.int32))
    tensors = tensors._replace(block_table=torch.zeros(3, 8, dtype=torch.int32))
    problem = DecodeProblem.from_tensors(q, k, v, tensors, DecodeOptions(masking=CAUSAL, return_lse=False))
    launch = DecodeLaunch(problem, config.choose(problem))
    launch(q, k, v, tensors, torch.empty_like(q))
    launched.clear()
    steps = [CacheTensors(16 * i, None, None, 16 * i + 160) for i in range(1, 4)]
    for layer, step in enumerate((*steps, *steps)):
        launch.by_address(q, (layer, 1000 + layer, 2000 + layer, 3000 + layer), step, {})
        (_, attended), (_, combined) = launched
        assert attended[:4] == [layer, 1000 + layer, 2000 + layer, 3000 + layer]
        assert attended[7:] == [*step]
        assert combined == [attended[5], 3000 + layer, attended[4], *[None] * 3, step[0], *[None] * 3]
        launched.clear()


def test_layers_of_a_step_share_memory(launched, monkeypatch):
    """Memory for partial results: one for each stream, larger where a layer needs it, and new in captures."""
    (k, v), table = torch.randn(2, BLOCKS, PAGE, HEADS_KV, DIM), torch.zeros(3, 8, dtype=torch.int32)
    tensors = CacheTensors(torch.tensor([5, 40, 0], dtype=torch.int32))._replace(block_table=table)
    queries = [torch.randn(3, n, HEADS, DIM) for n in (1, 4)]
    made, options = [], DecodeOptions(masking=CAUSAL, return_lse=False)
    for q in queries:
        problem = DecodeProblem.from_tensors(q, k, v, tensors, options)
        made.append(DecodeLaunch(problem, config.choose(problem)))
        made[-1](q, k, v, tensors, torch.empty_like(q))
    (few, many), memory = made, {}
    assert 0 < few._scratch_bytes < many._scratch_bytes

    def partial(launch: DecodeLaunch, stream: int = 0) -> int:
        monkeypatch.setattr(torch_private, "cuda_stream", lambda index: stream)
        launched.clear()
        launch.by_address(queries[0], (1, 2, 3, 4), addresses(tensors), memory)
        return launched[0][1][5]

    first = partial(few)
    assert partial(few) == first
    assert partial(few, 9) not in (first, memory[0].data_ptr())
    larger = partial(many)
    assert memory[0].nbytes >= many._scratch_bytes
    assert partial(few) == partial(many) == larger
    kept = dict(memory)
    monkeypatch.setattr(decode_launch, "is_capturing", lambda device: True)
    assert partial(few) != larger
    assert memory == kept


def test_another_device_is_made_current(launched, monkeypatch):
    current = [0]

    class On:
        def __init__(self, device: Any) -> None:
            self.before = current[0]

        def __enter__(self) -> None:
            current[0] = 0

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch_private, "cuda_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", On)
    streams: list[int] = []
    monkeypatch.setattr(torch_private, "cuda_stream", lambda index: streams.append(current[0]) or 7)
    q, (k, v) = torch.randn(3, 1, HEADS, DIM), torch.randn(2, BLOCKS, PAGE, HEADS_KV, DIM)
    lengths, table = torch.tensor([5, 40, 0], dtype=torch.int32), torch.zeros(3, 8, dtype=torch.int32)
    tensors = CacheTensors(lengths, block_table=table)
    problem = DecodeProblem.from_tensors(q, k, v, tensors, DecodeOptions(masking=CAUSAL, return_lse=False))
    attend = DecodeLaunch(problem, config.choose(problem))
    attend(q, k, v, tensors, torch.empty_like(q))
    slots = AppendTensors(slot_mapping=torch.arange(3))
    append = AppendLaunch(AppendProblem.from_tensors(k, v, q[:, 0, :2], q[:, 0, :2], slots, AppendOptions()))
    append(k, v, q[:, 0, :2], q[:, 0, :2], slots)
    launched.clear(), streams.clear()
    current[0] = 1
    attend.by_address(q, (1, 2, 3, 4), addresses(tensors), {})
    append.by_address(1, 2, 3, 4, 5)
    assert [name for name, _ in launched] == ["decode_kernel", "combine_kernel", "append_kernel"]
    assert streams == [0, 0]
    assert current == [1]


@pytest.mark.parametrize(("has_table", "packed"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("gathers", "copies_q"), [(False, False), (False, True), (True, True)])
def test_hopper(has_table, packed, gathers, copies_q):
    from flashtile.backends.hopper.decode.launch import Attend

    launched: list[tuple] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, device: Any, *given: Any) -> None:
            launched.append((self.name, *given))

        def by_address(self, stream: int, given: tuple, further: tuple = ()) -> None:
            assert stream == 7
            launched.append((self.name, *given, *further))

    variant: Any = SimpleNamespace(GATHER=gathers, COPIES_Q=copies_q, VARLEN=packed)
    table: Any = Kernel("table") if has_table else None
    attend: Any = Attend(Kernel("attend"), table, variant)  # type: ignore[arg-type]
    step = CacheTensors(*range(100, 115))
    attend("device", 1, 2, 3, 4, 5, 6, None, *step)
    expected = launched.copy()
    launched.clear()
    attend.by_address(7, (1, 2, 3, 4, 5, 6, None), step)
    assert launched == expected
    assert len(launched) == 1 + has_table
    if has_table:  # of packed sequences, the table's kernel also fills rows of out and lse
        assert launched[0][1:4] == ((4, 5) if packed else (None, None)) + (6,)


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [0, 1, 2])
def test_kernels_write_every_row_of_a_sequence(monkeypatch, num_splits):
    """Also rows without keys. So only tokens that belong to no sequence would have to be filled."""
    monkeypatch.setattr(Outputs, "cleared", lambda self, q, out, lse: (out, lse))
    q = torch.randn(9, HEADS, DIM)
    k, v = torch.randn(2, BLOCKS, PAGE, HEADS_KV, DIM)
    tensors = CacheTensors(
        cache_seqlens=torch.tensor([5, 0, 1, 0, 70], dtype=torch.int32),
        block_table=torch.arange(25, dtype=torch.int32).view(5, 5) % BLOCKS,
        cu_seqlens_q=torch.tensor([0, 1, 3, 5, 5, 7], dtype=torch.int32),
    )
    options = DecodeOptions(max_seqlen_q=2, masking=CAUSAL, return_lse=False, num_splits=num_splits)
    problem = DecodeProblem.from_tensors(q, k, v, tensors, options)
    out, lse = torch.full_like(q, torch.nan), torch.full((HEADS, 9), torch.nan)
    DecodeLaunch(problem, config.choose(problem))(q, k, v, tensors, out, lse)
    assert out[:7].isfinite().all()
    assert not out[1:3].any()
    assert out[7:].isnan().all()


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [0, 1, 2])
def test_layers_of_a_step_fill_the_tokens_of_no_sequence_once(monkeypatch, num_splits):
    clear, cleared = Outputs.cleared, []
    monkeypatch.setattr(Outputs, "cleared", lambda *given: cleared.append(given) or clear(*given))
    tensors = CacheTensors(
        cache_seqlens=torch.tensor([5, 0, 70], dtype=torch.int32),
        block_table=torch.arange(15, dtype=torch.int32).view(3, 5),
        cu_seqlens_q=torch.tensor([0, 1, 3, 5], dtype=torch.int32),
    )
    options = DecodeOptions(max_seqlen_q=2, masking=CAUSAL, num_splits=num_splits)
    q, (k, v) = torch.randn(3, 9, HEADS, DIM), torch.randn(2, BLOCKS, PAGE, HEADS_KV, DIM)
    problem = DecodeProblem.from_tensors(q[0], k, v, tensors, options)
    launch, tables = DecodeLaunch(problem, config.choose(problem)), {}
    for layer in q:
        alone = launch(layer, k, v, tensors)
        cleared.clear()
        out, lse = launch(layer, k, v, tensors, tables=tables)
        assert len(cleared) == (layer.data_ptr() == q.data_ptr())
        assert torch.equal(out, alone[0])
        assert torch.equal(lse, alone[1])
        assert not out[5:].any()
        assert lse[:, 5:].eq(-torch.inf).all()
