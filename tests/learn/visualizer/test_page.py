"""The page in a browser: its numbers are the traces', its state is in its address, nothing complains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import pytest
from visits import SETTINGS, Visit, address

from flashtile.hardware.cards import CARDS
from flashtile.learn.algorithms.trace import Event
from flashtile.learn.visualizer.recording import RUNNERS, Recording
from flashtile.learn.visualizer.settings import Setting

Recorded = Callable[[Setting], Recording]
COUNTERS = ("hbm_read", "hbm_written", "matmul_flops", "other_flops", "sram_peak", "hbm_peak")


def counters_after(events: list[Event]) -> dict[str, int]:
    """What the first events add up to, by the book."""
    sram: dict[str, int] = {}
    totals = dict.fromkeys(COUNTERS, 0)
    hbm = 0
    for event in events:
        totals["hbm_read"] += event.bytes if event.kind == "load" else 0
        totals["hbm_written"] += event.bytes if event.kind == "store" else 0
        totals["matmul_flops"] += event.matmul_flops
        totals["other_flops"] += event.other_flops
        hbm += {"place": event.bytes, "empty": event.bytes, "release": -event.bytes}.get(event.kind, 0)
        if event.kind in ("load", "compute"):
            sram[event.name] = event.bytes
        elif event.kind == "free":
            del sram[event.name]
        totals["sram_peak"] = max(totals["sram_peak"], sum(sram.values()))
        totals["hbm_peak"] = max(totals["hbm_peak"], hbm)
    return totals


def tiles_after(events: list[Event]) -> dict[str, int]:
    tiles: dict[str, int] = {}
    for event in events:
        if event.kind in ("load", "compute"):
            tiles[event.name] = event.bytes
        elif event.kind == "free":
            del tiles[event.name]
    return tiles


@pytest.mark.parametrize("algorithm", RUNNERS)
def test_numbers_are_those_of_the_trace(visit: Visit, recorded: Recorded, algorithm: str) -> None:
    for setting in SETTINGS:
        if setting.algorithm == algorithm:
            check_numbers(visit, recorded(setting))


def check_numbers(visit: Visit, recording: Recording) -> None:
    setting, events = recording.setting, recording.trace.events
    for at in (1, len(events) // 3, 2 * len(events) // 3 + 1, len(events)):
        visit.show(address(setting, at))
        expected = counters_after(events[:at])
        shown = {name: int(visit.counter(name)) for name in COUNTERS}
        assert shown == expected, at
        assert int(visit.counter("hbm_moved")) == expected["hbm_read"] + expected["hbm_written"]
        assert visit.text("[data-run=a] [data-counter=position]") == f"{at} / {len(events)}"
        tiles = dict(
            visit.each("[data-run=a] .sram .tile:not([hidden])", "[e.dataset.name, Number(e.dataset.bytes)]")
        )
        assert tiles == tiles_after(events[:at]), at
    assert {name: int(visit.counter(name)) for name in COUNTERS} == recording.totals


def test_traffic_of_each_array(visit: Visit, recorded: Recorded) -> None:
    setting = Setting("flash1", 256, 64, block="64x64")
    recording = recorded(setting)
    visit.go(address(setting, len(recording.trace.events)))
    for name, (read, written) in recording.traffic.items():
        assert int(visit.counter(f"{name}.read")) == read
        assert int(visit.counter(f"{name}.written")) == written
    assert set(recording.traffic) == {"Q", "K", "V", "O", "m", "l"}


@pytest.mark.parametrize("algorithm", ["flash1", "flash2", "flash3"])
def test_statistics_of_the_watched_rows(visit: Visit, recorded: Recorded, algorithm: str) -> None:
    setting = Setting(algorithm, 256, 64, mask="causal", block="64x64")
    recording = recorded(setting)
    events = recording.trace.events
    for row in recording.trace.watch_rows:
        for at in (len(events) // 2, len(events)):
            visit.go(address(setting, at, row=row))
            for name in ("m", "l"):
                known = [
                    event.values[row]
                    for event in events[:at]
                    if event.values and row in event.values and event.name.split(".")[0] == name
                ]
                shown = visit.page.get_attribute(f"[data-run=a] [data-statistic={name}]", "data-value")
                if not known:
                    assert shown == ""
                else:
                    assert float(shown) == pytest.approx(known[-1], rel=1e-4)
    assert visit.text("[data-run=a] .statistics select").split() == [
        str(row) for row in recording.trace.watch_rows
    ]


def test_the_matrix_shows_what_was_computed_and_what_was_kept(visit: Visit) -> None:
    colours = visit.page.evaluate("flashtilePage.colours")
    flash = Setting("flash2", 256, 64, block="64x64")
    visit.go(address(flash, 10**9))
    assert pixel(visit, 0.5 + 1 / 16, 0.5 + 1 / 16) == rgb(colours["computed"])
    visit.go(address(Setting("standard", 256, 64, sram_bytes=100 * 1024), 10**9))
    assert pixel(visit, 0.3, 0.6) == rgb(colours["weights"])
    visit.go(address(flash, 0))
    assert pixel(visit, 0.3, 0.6) == rgb(colours["untouched"])


def pixel(visit: Visit, x: float, y: float) -> tuple[int, int, int]:
    """The colour of the matrix at a share of its width and height."""
    return tuple(
        visit.page.evaluate(
            """([x, y]) => {
                 const { canvas, area, ratio } = flashtilePage.views.a.scene;
                 const place = [area.left + x * area.width, area.top + y * area.height];
                 const [left, top] = place.map((at) => Math.round(at * ratio));
                 return [...canvas.getContext("2d").getImageData(left, top, 1, 1).data].slice(0, 3);
               }""",
            [x, y],
        )
    )  # type: ignore[return-value]


def rgb(colour: str) -> tuple[int, int, int]:
    return tuple(map(int, re.findall(r"\d+", colour)))  # type: ignore[return-value]


def test_two_runs_advance_together(visit: Visit, recorded: Recorded) -> None:
    flash, standard = (
        Setting("flash2", 256, 64, block="64x64"),
        Setting("standard", 256, 64, sram_bytes=100 * 1024),
    )
    lengths = [len(recorded(setting).trace.events) for setting in (flash, standard)]
    leader = max(lengths)
    visit.go(address(flash, leader // 2, b="standard", sram=100 * 1024))
    shown = [int(visit.counter("position", run)) for run in "ab"]
    assert shown == [leader // 2 if n == leader else math.floor(leader // 2 / leader * n) for n in lengths]
    visit.go(address(flash, 10**9, b="standard", sram=100 * 1024))
    assert [int(visit.counter("position", run)) for run in "ab"] == lengths


def test_a_race_is_one_of_bytes(visit: Visit, recorded: Recorded) -> None:
    """Standard attention leads, since it moves more; FlashAttention-2 is done long before it."""
    flash = Setting("flash2", 256, 64, block="64x64")
    flash_bytes = recorded(flash).totals["hbm_read"] + recorded(flash).totals["hbm_written"]
    standard = recorded(Setting("standard", 256, 64, sram_bytes=100 * 1024)).trace.events
    visit.go(address(flash, len(standard) // 4, b="standard", sram=100 * 1024, sync="bytes"))
    a, b = (int(visit.counter("hbm_moved", run)) for run in "ab")
    assert 0 < a <= b < flash_bytes
    visit.go(address(flash, len(standard) - 20, b="standard", sram=100 * 1024, sync="bytes"))
    assert int(visit.counter("hbm_moved")) == flash_bytes < int(visit.counter("hbm_moved", "b"))


def test_bytes_beside_standard_attention(visit: Visit, recorded: Recorded) -> None:
    flash, standard = (
        Setting("flash2", 256, 64, block="64x64"),
        Setting("standard", 256, 64, sram_bytes=100 * 1024),
    )
    totals = [recorded(setting).totals for setting in (flash, standard)]
    moved, all_of_it = (total["hbm_read"] + total["hbm_written"] for total in totals)
    visit.go(address(flash, 10**9, sram=100 * 1024))
    assert float(visit.counter("beside_standard")) == pytest.approx(moved / all_of_it)


def test_the_roofline_names_the_bound(visit: Visit, recorded: Recorded) -> None:
    setting = Setting("flash2", 4096, 64, block="auto", sram_bytes=100 * 1024)
    totals = recorded(setting).totals
    intensity = totals["matmul_flops"] / (totals["hbm_read"] + totals["hbm_written"])
    cards = {name: card for name, card in CARDS.items() if name in ("v100", "a100", "t4")}
    bounds = set()
    for name, card in cards.items():
        visit.go(address(setting, 10**9, card=name))
        bounds.add(visit.counter("bound"))
        memory_bound = intensity < card.ridge("float16")
        assert visit.counter("bound") == ("bound_memory" if memory_bound else "bound_compute")
        centre = visit.page.evaluate(
            "() => document.querySelector('.roofline .dot.a').style.transform.match(/[\\d.]+/)[0]"
        )
        share = (math.log10(intensity) + 1) / 5
        assert float(centre) == pytest.approx(82 + share * (460 - 82 - 18), abs=0.01)


def test_splits_and_their_merge(visit: Visit, recorded: Recorded) -> None:
    setting = Setting("flash_decoding", 4096, 64, queries="one", block="1x128", num_splits=8)
    recording = recorded(setting)
    stored: dict[int, float] = {}
    for event in recording.trace.events:
        if event.kind == "store" and event.name == "lse_s":
            stored |= event.values or {}
    visit.go(address(setting, len(recording.trace.events)))
    assert visit.page.get_attribute("[data-run=a] [data-kernel=split]", "data-programs") == "8"
    shown = visit.each("[data-run=a] [data-split]", "Number(e.dataset.value)")
    assert shown == pytest.approx([stored[split] for split in range(8)], rel=1e-4)
    chains = {}
    for splits in (1, 8):
        chosen = Setting("flash_decoding", 4096, 64, queries="one", block="1x128", num_splits=splits)
        by_program: dict[tuple[str, int], int] = {}
        for event in recorded(chosen).trace.events:
            if event.kind in ("load", "store"):
                key = (event.kernel, event.program)
                by_program[key] = by_program.get(key, 0) + event.bytes
        chains[splits] = sum(
            max(n for (k, _), n in by_program.items() if k == kernel) for kernel in ("split", "merge")
        )
        visit.go(address(chosen))
        assert int(visit.counter("chain")) == chains[splits]
    assert chains[1] > 7 * chains[8]


SEQUENCES = "[data-run=a] [data-sequence]"
PHYSICAL = "[...e.querySelectorAll('[data-physical]')].map((block) => Number(block.dataset.physical))"


def test_pages_of_a_fork(visit: Visit, recorded: Recorded) -> None:
    setting = Setting("paged", 64, 64, queries="one", page_size=8)
    events = recorded(setting).trace.events
    seen = set()
    for at, event in enumerate(events, start=1):
        if not event.data or (event.data["op"] == "append" and at % 7):
            continue
        seen.add(event.data["op"])
        visit.show(address(setting, at))
        tables = dict(visit.each(SEQUENCES, f"[e.dataset.sequence, {PHYSICAL}]"))
        counts = visit.each("[data-run=a] [data-block]", "Number(e.dataset.count)")
        assert tables == event.data["tables"], at
        assert counts == event.data["ref_counts"], at
    assert seen == {"allocate", "append", "fork", "copy_on_write"}


def test_the_timeline_has_every_span(visit: Visit, recorded: Recorded) -> None:
    setting = Setting("flash3", 256, 64, block="32x32")
    spans = recorded(setting).trace.spans
    visit.go(address(setting, 100))
    titles = visit.each("[data-run=a] .timeline title", "e.textContent")
    assert len(spans) > 20
    assert sorted(titles) == sorted(
        f"{s.worker} · {s.unit}: {s.label} ({s.start:g}–{s.end:g})" for s in spans
    )
    assert not visit.page.is_hidden("[data-run=a] .timeline")
    visit.go(address(Setting("flash2", 256, 64, block="32x32"), 100))
    assert visit.page.is_hidden("[data-run=a] .timeline")


@pytest.mark.parametrize("number", range(1, 6))
def test_questions_are_answered_with_numbers(visit: Visit, number: int) -> None:
    visit.press(str(number))
    places = json.loads(visit.page.get_attribute(".answer", "data-places"))
    answer = visit.text(".answer")
    assert len(places) >= 6
    assert all(str(value) in answer.replace("\xa0", " ") for value in places.values())
    assert not re.search(r"NaN|undefined|Infinity|\{", answer)
    visit.press("l")
    assert visit.page.get_attribute("html", "lang") == "zh-CN"
    assert all(str(value) in visit.text(".answer") for value in places.values())


def test_answers_agree_with_the_recordings(visit: Visit, recorded: Recorded) -> None:
    visit.press("3")
    places = json.loads(visit.page.get_attribute(".answer", "data-places"))
    first, second = (recorded(Setting(name, 4096, 64, block="64x64")) for name in ("flash1", "flash2"))

    def mib(recording: Recording, *names: str) -> str:
        moved = sum(sum(recording.traffic.get(name, (0, 0))) for name in names)
        unit = "KiB" if moved < 2**20 else "MiB"
        return f"{moved / (2**10 if unit == 'KiB' else 2**20):.3g}\u202f{unit}"

    assert places["first"] == mib(first, "O", "m", "l", "lse")
    assert places["second"] == mib(second, "O", "m", "l", "lse")
    assert (places["first_programs"], places["second_programs"]) == (64, 64)
    assert float(places["first_chain"].split("\u202f")[0]) > 50 * float(
        places["second_chain"].split("\u202f")[0]
    )
    visit.press("1")
    places = json.loads(visit.page.get_attribute(".answer", "data-places"))
    standard = recorded(Setting("standard", 4096, 64, sram_bytes=100 * 1024))
    total = standard.totals["hbm_read"] + standard.totals["hbm_written"]
    scores = sum(sum(standard.traffic[name]) for name in ("S", "P"))
    assert places["scores"] == f"{100 * scores / total:.1f}"
