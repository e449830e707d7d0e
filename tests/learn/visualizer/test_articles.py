"""The figures of the articles, to the digit, and the read-outs beside every run."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from visits import KIB, Visit, address

from flashtile.algorithms import Memory, flash1
from flashtile.learn.visualizer.settings import Setting


def readouts(visit: Visit, run: str = "a") -> dict[str, str]:
    return dict(visit.each(f"[data-run={run}] [data-readout]", "[e.dataset.readout, e.textContent]"))


def choose(visit: Visit, preset: str) -> None:
    visit.page.click(f"[data-preset={preset}]")
    visit.settle()


def drag(visit: Visit, slider: str, value: int) -> None:
    visit.page.eval_on_selector(
        f".small [name={slider}]",
        "(e, value) => { e.value = value; e.dispatchEvent(new Event('input')); }",
        value,
    )
    visit.settle()


def test_the_page_of_the_article(visit: Visit) -> None:
    """8 x 8 in blocks of 2 x 2: 4 x 4 = 16 blocks, (0, 0) and 0 % at first, 64 scores against 4."""
    visit.go("drawer=open")
    visit.page.click(".articles summary")
    choose(visit, "eight")
    shown = readouts(visit)
    assert shown == {
        "tiles": "4 × 4 = 16", "block": "(0, 0)", "progress": "0 %", "held": "64 against 4",
        "held_bytes": "128\u202fB against 8\u202fB", "saved": "93.8 %",
    }  # fmt: skip
    seen = [shown["block"]]
    for _ in range(16):
        visit.press("Shift+ArrowRight")
        if readouts(visit)["block"] != seen[-1]:
            seen.append(readouts(visit)["block"])
    assert seen == [f"({i}, {j})" for i in range(4) for j in range(4)]
    visit.press("End")
    assert readouts(visit)["progress"] == "100 %"
    link = visit.state
    assert link["preset"] == "eight"
    for seqlen, high, wide in ((64, 1, 64), (4, 3, 4), (37, 5, 6)):
        for slider, value in (("seqlen", seqlen), ("block_m", high), ("block_n", wide)):
            drag(visit, slider, value)
        shown = readouts(visit)
        rows, cols = math.ceil(seqlen / high), math.ceil(seqlen / wide)
        assert shown["tiles"] == f"{rows} × {cols} = {rows * cols}"
        assert shown["held"] == f"{seqlen**2} against {high * wide}"
        assert shown["saved"] == f"{100 * (1 - high * wide / seqlen**2):.1f} %"
    visit.go("&".join(f"{key}={value}" for key, value in link.items()))
    assert (readouts(visit)["tiles"], readouts(visit)["progress"]) == ("4 × 4 = 16", "100 %")
    visit.press("l")
    assert readouts(visit)["held"] == "64 对 4"


def test_the_other_figures(visit: Visit) -> None:
    visit.go("drawer=open")
    visit.page.click(".articles summary")
    choose(visit, "twelve")
    assert readouts(visit)["tiles"] == "4 × 6 = 24"
    blocks = []
    for _ in range(24):
        visit.press("Shift+ArrowRight")
        blocks.append(readouts(visit)["block"])
    expected = [f"({i}, {j})" for j in range(6) for i in range(4)]
    assert [b for n, b in enumerate(blocks) if b not in blocks[:n]] == expected

    choose(visit, "softmax")
    visit.press("End")
    row = {name: statistic(visit, name) for name in ("m", "l", "lse")}
    total = sum(math.exp(x - 4) for x in (1, 2, 3, 4))
    assert row == pytest.approx({"m": 4, "l": total, "lse": 4 + math.log(total)})
    note = visit.text(".articles .note")
    for number in (math.exp(-1) + 1, total, *(math.exp(x - 4) / total for x in (1, 2, 3, 4))):
        assert f"{number:.3f}" in note or f"{number:.4f}" in note

    choose(visit, "six")
    assert readouts(visit)["held"] == "36 against 36"
    assert readouts(visit)["saved"] == "0.0 %"


def statistic(visit: Visit, name: str) -> float:
    return float(visit.page.get_attribute(f"[data-run=a] [data-statistic={name}]", "data-value"))


def test_the_blocks_of_the_paper_on_an_a100(visit: Visit) -> None:
    """M = 196608, d = 64: Bc = 768, Br = 64, Tc = 2, Tr = 16, if an element is a byte; 384 if it is two."""
    visit.go("drawer=open")
    visit.page.click(".articles summary")
    choose(visit, "a100")
    for element, bc in ((1, 768), (2, 384), (4, 192)):
        visit.page.select_option(".small [name=element]", str(element))
        visit.settle()
        rule = json.loads(visit.page.get_attribute(".rule", "data-places"))
        tc = math.ceil(1024 / bc)
        assert (rule["bc"], rule["br"], rule["tc"], rule["tr"]) == (bc, 64, tc, 16)
        assert f"= {bc}, Br = min(Bc, d) = min({bc}, 64) = 64" in visit.text(".rule")
        assert readouts(visit)["tiles"] == f"16 × {tc} = {16 * tc}"
        visit.press("End")
        assert moved(visit) == moved_in_python(bc, element)


def moved(visit: Visit) -> tuple[int, int, int]:
    return tuple(int(visit.counter(name)) for name in ("hbm_read", "hbm_written", "sram_peak"))  # type: ignore[return-value]


def moved_in_python(block_n: int, element: int) -> tuple[int, int, int]:
    memory = Memory(192 * KIB, element)
    flash1.forward(*torch.zeros(3, 1024, 64), memory, block_m=64, block_n=block_n)
    return memory.hbm_read, memory.hbm_written, memory.sram_peak


RUNS: list[tuple[Setting, int, dict[str, Any]]] = [
    (Setting("flash2", 256, 64, block="32x32"), 0, {"tiles": "8 × 8 = 64", "held": "65536 against 1024"}),
    (Setting("flash1", 256, 64, block="64x64"), 10**9, {"block": "(3, 3)", "progress": "100 %"}),
    (Setting("standard", 256, 64, sram_bytes=100 * KIB), 10**9, {"held": "65536 against 65536"}),
    (Setting("paged", 64, 64, queries="one", page_size=8), 10**9, {"progress": "100 %"}),
]


def test_every_run_has_them(visit: Visit) -> None:
    for setting, at, expected in RUNS:
        visit.show(address(setting, at))
        shown = readouts(visit)
        assert {name: shown[name] for name in expected} == expected, setting
