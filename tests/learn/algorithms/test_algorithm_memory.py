"""The machine that the algorithms run on: what it counts, what it refuses, what it records."""

import json
from pathlib import Path

import pytest
import torch

from flashtile.algorithms import Memory, Span, SramExceededError, Tile, Trace

ROOT = Path(__file__).parents[3]


def test_moves_are_counted_by_array_and_in_the_chosen_element_size():
    memory = Memory(sram_bytes=1000, element_bytes=2)
    source = memory.place("A", torch.arange(24.0).view(6, 4))
    target = memory.empty("B", 6, 4, source.tensor)
    with memory.sram() as sram:
        tile = sram.load(source, range(1, 3), range(1, 4))
        assert tile.tolist() == [[5, 6, 7], [9, 10, 11]]
        sram.store(target, tile, range(1, 3), range(1, 4))
    assert (memory.hbm_read, memory.hbm_written) == (12, 12)
    assert (memory.traffic["A"].read, memory.traffic["B"].written) == (12, 12)
    assert target.tensor[1:3, 1:4].equal(tile)
    assert target.tensor.isnan().sum() == 24 - 6  # what was never written shows
    assert memory.hbm_peak == 2 * 48
    assert repr(memory).startswith("Memory(hbm_read=12, hbm_written=12, matmul_flops=0")
    memory.release(target)
    assert memory.hbm_used == 48


def test_an_empty_range_moves_nothing():
    memory = Memory()
    array = memory.place("A", torch.zeros(6, 4))
    with memory.sram() as sram:
        assert sram.load(array, range(2, 2)).shape == (0, 4)
    assert memory.hbm_read == 0


def test_sram_holds_what_is_named_until_its_scope_ends():
    memory = Memory(sram_bytes=100, element_bytes=1)
    array = memory.place("A", torch.zeros(10, 10))
    with memory.sram() as outer:
        outer.load(array, range(0, 4))
        with memory.sram() as inner:
            inner.compute("B", torch.zeros(5, 10))
            assert memory.sram_used == 90
            with pytest.raises(SramExceededError, match=r"C of 20 bytes .* 100 bytes .* A 40, B 50"):
                inner.compute("C", torch.zeros(2, 10))
            inner.compute("A", torch.zeros(1, 10))  # takes the place of the outer scope's tile
            assert memory.sram_used == 60
        assert memory.sram_used == 10
        outer.free("A")
        assert memory.sram_used == 0
    assert memory.sram_peak == 90


def test_operations_are_counted_on_chip_only():
    memory = Memory()
    a = memory.place("A", torch.randn(8, 4))
    b = memory.place("B", torch.randn(8, 4))
    a.tensor @ b.tensor.T
    with memory.sram() as sram:
        q, k = sram.load(a), sram.load(b)
        s = q @ k.T * 0.5  # 2 * 8 * 4 * 8, and 64
        p = torch.exp(s - s.amax(1, keepdim=True))  # 64 each for the maximum, the difference and exp
        p.sum(1)  # 64
        p.masked_fill(p > 0.5, 0.0)
        p.T.contiguous()
    assert memory.matmul_flops == 512
    assert memory.other_flops == 5 * 64


def test_operations_of_unknown_cost_are_refused():
    memory = Memory()
    a = memory.place("A", torch.randn(8, 4))
    with memory.sram() as sram:
        tile = sram.load(a)
        with pytest.raises(NotImplementedError, match=r"aten\.sin are not counted"):
            torch.sin(tile)


def test_a_trace_adds_up_to_the_counters_and_becomes_json():
    trace = Trace(watch_rows=(1, 7))
    memory = Memory(sram_bytes=1 << 12, trace=trace)
    a = memory.place("A", torch.randn(8, 4))
    b = memory.empty("B", 8, 1, a.tensor)
    for rows in (range(0, 4), range(4, 8)):
        with memory.sram(kernel="row sums") as sram:
            tile = sram.load(a, rows)
            sram.compute("E", torch.exp(tile), rows, range(4), op="exp")
            sram.compute("m", torch.full((4, 1), -torch.inf), rows)
            sram.store(b, torch.exp(tile).sum(1, keepdim=True), rows)
    assert trace.totals() == memory.totals()
    assert memory.totals()["other_flops"] == 3 * 32

    page = json.loads(json.dumps(trace.to_json(), allow_nan=False))
    events = page["events"]
    assert page["totals"] == memory.totals()
    kinds = [page["kinds"][i] for i in events["kind"]]
    assert kinds[:3] == ["place", "empty", "load"]
    assert [page["kernels"][i] for i in events["kernel"]].count("row sums") == len(kinds) - 2
    assert (events["row_start"][2], events["row_end"][2], events["col_end"][2]) == (0, 4, 4)
    assert max(events["program"]) == 1
    stored = [i for i, kind in enumerate(kinds) if kind == "store"]
    values = [page["values"][str(i)] for i in stored]
    assert values == [{"1": pytest.approx(b.tensor[1].item())}, {"7": pytest.approx(b.tensor[7].item())}]
    assert {"1": None} in page["values"].values()  # an infinity


def test_a_timeline_becomes_json():
    trace = Trace(algorithm="flash3", settings={"N": 64})
    trace.spans.append(Span("producer", "TMA", "K", 0, 0.0, 0.5))
    page = json.loads(json.dumps(trace.to_json()))
    assert (page["algorithm"], page["settings"], page["events"]["row_end"]) == ("flash3", {"N": 64}, [])
    span = {"worker": "producer", "unit": "TMA", "label": "K", "block": 0, "start": 0.0, "end": 0.5}
    assert page["spans"] == [span]


@pytest.mark.parametrize("argument", ["sram_bytes", "element_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_bad_sizes_are_refused(argument, value):
    with pytest.raises(ValueError, match=argument):
        Memory(**{argument: value})


def test_bad_tiles_are_refused():
    memory = Memory()
    with pytest.raises(ValueError, match="A must have 2 dimensions"):
        memory.place("A", torch.zeros(2, 3, 4))
    array = memory.place("A", torch.zeros(4, 4))
    with memory.sram() as sram, pytest.raises(ValueError, match=r"shape \(2, 4\), got \(2, 3\)"):
        sram.store(array, torch.zeros(2, 3), range(2))


def test_assigned_tiles_are_counted_and_described():
    tiles = {"S": Tile("S = X X^T", "rows", "keys"), "P": Tile("P = exp(S)", "rows", "keys", name="S")}
    trace = Trace()
    memory = Memory(sram_bytes=64, element_bytes=1, trace=trace)
    with memory.sram("program", tiles, rows=range(4, 8)) as sram:
        sram.start(m=torch.zeros(4, 1))
        with sram.scope(keys=range(2)):
            sram.S = torch.zeros(4, 2)
            sram.P = torch.exp(sram.S)
            sram.m = sram.m + 1  # belongs to the scope around this one
            assert memory.sram_used == 4 + 8
            with pytest.raises(AttributeError, match=r"no computed tile S, only m, S"):
                _ = sram.S  # P has replaced it
            with pytest.raises(SramExceededError, match="tile Y of 60 bytes"):
                sram.Y = torch.zeros(60, 1)
        assert memory.sram_used == 4
        with pytest.raises(AttributeError, match="no computed tile P"):
            _ = sram.P  # freed at the end of its scope
        assert sram.m.tolist() == [[1.0]] * 4
        sram.skip("S", range(4, 8), range(2, 4))
    assert [(e.kind, e.name, e.rows, e.cols, e.op) for e in trace.events] == [
        ("compute", "m", (4, 8), None, ""),
        ("compute", "S", (4, 8), (0, 2), "S = X X^T"),
        ("compute", "S", (4, 8), (0, 2), "P = exp(S)"),
        ("compute", "m", (4, 8), None, ""),
        ("free", "S", (4, 8), (0, 2), ""),
        ("skip", "S", (4, 8), (2, 4), ""),
        ("free", "m", (4, 8), None, ""),
    ]


def test_a_loaded_tile_replaces_an_assigned_one():
    memory = Memory()
    array = memory.place("m", torch.ones(4, 1))
    with memory.sram() as sram:
        sram.m = torch.zeros(4, 1)
        loaded = sram.load(array)
        with pytest.raises(AttributeError, match="no computed tile m"):
            _ = sram.m
        sram.m = loaded + 1
        assert sram.m.tolist() == [[2.0]] * 4
