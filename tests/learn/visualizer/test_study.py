"""What helps to study a run: its algorithm line by line, a tile's arithmetic, predictions, links, films."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from visits import KIB, Visit, address

import flashtile.learn.visualizer
from flashtile.algorithms import Memory, Trace, flash1, flash2, standard
from flashtile.learn.visualizer.page import small_inputs
from flashtile.learn.visualizer.recording import RUNNERS, record
from flashtile.learn.visualizer.settings import Setting

EIGHT = "a=flash2;block=2x2&seqlen=8"
SCALE = 4**-0.5


def inputs(seqlen: int) -> list[torch.Tensor]:
    return [torch.tensor(small_inputs()[name][:seqlen], dtype=torch.float64) for name in "qkv"]


def small_trace(module: Any, seqlen: int, block: tuple[int, int]) -> tuple[Trace, Memory]:
    trace = Trace(watch_rows=tuple(range(seqlen)))
    memory = Memory(100 * KIB, trace=trace)
    module.forward(*inputs(seqlen), memory, block_m=block[0], block_n=block[1])
    return trace, memory


def at_op(trace: Trace, op: str, number: int) -> int:
    """How many events have happened when so many of an operation have."""
    return [at for at, event in enumerate(trace.events, 1) if event.op == op][number - 1]


def lit(visit: Visit) -> list[int]:
    return visit.each("[data-run=a] .code [aria-current]", "Number(e.dataset.line)")


def test_the_line_that_runs_is_lit(visit: Visit) -> None:
    trace, _ = small_trace(flash2, 8, (2, 2))
    begins = at_op(trace, "S = Q K^T", 2)
    visit.go(f"{EIGHT}&at={begins}")
    lines = [8]
    for _ in range(5):
        visit.press("ArrowRight")
        lines += lit(visit)
    assert lines == [8, 9, 9, 10, 9, 9]  # P, l, O, m; freeing a tile leaves the line as it was
    code = visit.each("[data-run=a] .code li", "[Number(e.dataset.line), e.textContent]")
    assert [number for number, _ in code] == list(range(1, 18))
    assert dict(code)[8] == "S = Qᵢ Kⱼᵀ"
    for algorithm in ("flash1", "standard", "flash1_backward", "flash2_backward", "standard_backward"):
        setting = Setting(algorithm, 256, 64, mask="causal", block="64x64")
        if algorithm.startswith("standard"):
            setting = Setting(algorithm, 256, 64, mask="causal", sram_bytes=100 * KIB)
        for share in (0.3, 0.6, 1):
            visit.show(address(setting, int(share * 100)))
            shown = visit.text("[data-run=a] .line")
            assert len(lit(visit)) == 1
            assert not shown or shown.endswith(f"line {lit(visit)[0]}")


LINES = {
    "flash3": {"S = Q K^T": 9, "O += P V": 11, "P = exp(S - m)": 13, "O = exp(m - m') O": 14, "lse": 20},
    "flash_decoding": {"S = Q K^T": 6, "O = exp(m - m') O + P V": 8, "O_s": 10, "lse": 18},
    "unified_max": {"S = Q K^T - phi": 6, "O += P V": 8, "l_s": 10, "lse": 12},
    "paged": {"allocate": 2, "copy_on_write": 3, "append": 4, "fork": 5, "S = Q K^T": 11, "lse.B": 15},
}
"""What an operation, or the writing of an array, is in the algorithm's pseudocode."""


def test_every_event_has_its_line(visit: Visit) -> None:
    scripts = Path(flashtile.learn.visualizer.__path__[0]) / "assets" / "js"
    source = "\n".join((scripts / name).read_text() for name in ("lines.js", "pseudocode.js"))
    ask = f"""([name, events]) => {{
        {source}
        return [events.map((e) => lineOf(name, e)?.line), PSEUDOCODE[name].map(([number]) => number)];
    }}"""
    for algorithm in RUNNERS:
        one = algorithm in ("flash_decoding", "unified_max", "paged")
        trace = record(Setting(algorithm, 64, 32, queries="one" if one else "all", block="16x16")).trace
        events = [e for e in trace.events if e.kind in ("load", "store", "compute", "page")]
        given = [
            {"kind": e.kind, "op": e.op, "kernel": e.kernel, "array": e.name.split(".")[0]} for e in events
        ]
        lines, known = visit.page.evaluate(ask, [algorithm, given])
        assert set(lines) <= set(known), algorithm
        for what, line in LINES.get(algorithm, {}).items():
            is_what = [e.op == what or (e.kind == "store" and e.name == what) for e in events]
            assert {n for n, it_is in zip(lines, is_what, strict=True) if it_is} == {line}, what


def test_the_arithmetic_of_a_tile(visit: Visit) -> None:
    """Rows 2 and 3 against keys 4 and 5, computed apart; then the same tile of FlashAttention."""
    q, k, v = inputs(8)
    rows, seen, new = slice(2, 4), slice(0, 4), slice(4, 6)
    old_s, s = (q[rows] @ k[keys].T * SCALE for keys in (seen, new))
    m_old = old_s.amax(-1, keepdim=True)
    m = torch.maximum(m_old, s.amax(-1, keepdim=True))
    sum_old = (old_s - m_old).exp().sum(-1, keepdim=True)
    p = (s - m).exp()
    total = sum_old * (m_old - m).exp() + p.sum(-1, keepdim=True)
    o_old = (old_s - m_old).exp() @ v[seen]
    o = o_old * (m_old - m).exp() + p @ v[new]
    expected = {
        "Q": q[rows], "K": k[new], "V": v[new], "S": s, "P": p, "m before": m_old, "m after": m,
        "l before": sum_old, "l after": total, "O before": o_old, "O after": o,
    }  # fmt: skip
    trace, _ = small_trace(flash2, 8, (2, 2))
    output = at_op(trace, "O = exp(m - m') O + P V", 7)
    visit.go(f"{EIGHT}&at={output}&row=3")
    visit.press("a")
    check_matrices(visit, expected)
    formula = visit.text("[data-run=a] .formula")
    numbers = [float(x.replace("−", "-")) for x in re.findall(r"[-−]?\d+\.?\d*", formula.split("=", 3)[-1])]
    assert "exp(m − m′)[3]" in formula
    assert numbers[-1] == pytest.approx(math.exp(m_old[1] - m[1]), rel=1e-3)
    visit.press("ArrowLeft")
    assert f"= {total[1].item():.4g}" in visit.text("[data-run=a] .formula").replace("−", "-")

    trace, _ = small_trace(flash1, 8, (2, 2))
    at = next(
        at
        for at, e in enumerate(trace.events, 1)
        if e.op == "O = rescaled O + P V" and e.rows == (2, 4) and trace.events[at - 6].cols == (4, 6)
    )
    visit.show(f"a=flash1;block=2x2&seqlen=8&at={at}&arithmetic=open")
    p = (s - s.amax(-1, keepdim=True)).exp()
    check_matrices(visit, expected | {"P": p, "O before": o_old / sum_old, "O after": o / total})
    visit.show(address(Setting("flash2", 256, 64, block="64x64"), 20, arithmetic="open"))
    assert "64 tokens" in visit.text("[data-run=a] .arithmetic")


def check_matrices(visit: Visit, expected: dict[str, torch.Tensor]) -> None:
    cells = "[...row.querySelectorAll('td')].map((x) => Number(x.dataset.value))"
    rows = f"[...e.querySelectorAll('tbody tr')].map((row) => {cells})"
    shown = dict(visit.each("[data-run=a] [data-matrix]", f"[e.dataset.matrix, {rows}]"))
    assert shown.keys() == expected.keys()
    for name, matrix in expected.items():
        assert torch.allclose(torch.tensor(shown[name], dtype=torch.float64), matrix), name


def test_predict_then_reveal(visit: Visit) -> None:
    """Answers counted from Python's run, chosen and revealed by the keyboard alone."""
    trace, memory = small_trace(flash1, 12, (3, 2))
    theirs = Memory(100 * KIB)
    standard.forward(*inputs(12), theirs)
    events = trace.events
    right = {
        "tiles": sum(e.op == "S = Q K^T" for e in events),
        "output": sum(e.kind == "store" and e.name == "O" and e.rows[0] == 0 for e in events if e.rows),
        "bytes": memory.hbm_read + memory.hbm_written,
        "held": 3 * 2,
    }
    visit.go("a=flash1;block=3x2&seqlen=12&at=5")
    visit.press("p")
    for name, answer in right.items():
        assert visit.state["predict"] == name
        assert visit.page.is_hidden(".reveal")
        assert blurred(visit)
        choices = visit.each(".choices button", "Number(e.dataset.choice)")
        assert len(choices) >= 3
        assert choices == sorted(choices)
        assert choices.count(answer) == 1
        wrong = next(choice for choice in choices if choice != answer)
        visit.page.focus(f".choices [data-choice='{wrong}']")
        visit.press("Enter")
        assert visit.text(".reveal").startswith("No:")
        assert not blurred(visit)
        assert visit.each(".choices [data-right]", "Number(e.dataset.choice)") == [answer]
        visit.page.click(f".choices [data-choice='{answer}']")
        assert visit.text(".reveal").startswith("Yes:")
        visit.page.focus("#predict-next")
        visit.press("Enter")
    assert theirs.hbm_read + theirs.hbm_written in visit_choices(visit, "bytes")
    visit.press("p")
    assert visit.page.is_hidden(".predict")


def blurred(visit: Visit) -> bool:
    """Whether the numbers that would give an answer away cannot be read."""
    return all(visit.each("[data-run=a] .readouts dd", "getComputedStyle(e).filter !== 'none'"))


def visit_choices(visit: Visit, name: str) -> list[int]:
    visit.show("&".join(f"{k}={v}" for k, v in {**visit.state, "predict": name}.items()))
    return visit.each(".choices button", "Number(e.dataset.choice)")


@pytest.mark.parametrize("visit", [{"permissions": ["clipboard-read", "clipboard-write"]}], indirect=True)
def test_a_link_and_pictures_of_a_run(visit: Visit, tmp_path: Path) -> None:
    visit.go("a=flash2;block=2x3&seqlen=9&mask=causal&at=30&predict=held&arithmetic=open&row=4")
    visit.page.select_option("#speed", "0.25")
    visit.settle()
    visit.press("c")
    visit.page.wait_for_function("() => document.querySelector('.said').textContent !== ''")
    link = visit.page.evaluate("navigator.clipboard.readText()")
    assert link.split("#")[1] == visit.page.evaluate("location.hash").lstrip("#")
    before = visit.state
    visit.go(link.split("#")[1])
    assert visit.state == before
    assert (before["speed"], visit.page.input_value("#speed")) == ("0.25", "0.25")
    assert visit.page.is_visible("[data-run=a] .tables")

    with visit.page.expect_download() as saved:
        visit.press("s")
    assert saved.value.suggested_filename == "flash2.svg"
    saved.value.save_as(tmp_path / "run.svg")
    check_svg(ElementTree.parse(tmp_path / "run.svg").getroot())
    if visit.page.evaluate("typeof MediaRecorder") == "function":
        with visit.page.expect_download() as saved:
            visit.page.evaluate("flashtilePage.export.video(8)")
        assert re.fullmatch(r"flash2\.(mp4|webm)", saved.value.suggested_filename)
        saved.value.save_as(tmp_path / "run")
        assert (tmp_path / "run").stat().st_size > 1000
        assert visit.state == before


def check_svg(root: ElementTree.Element) -> None:
    """Every cell, and when its colour changes: at its event's share of twelve seconds."""
    trace = Trace()
    flash2.forward(*inputs(9), Memory(100 * KIB, trace=trace), causal=True, block_m=2, block_n=3)
    events = trace.events
    name = "{http://www.w3.org/2000/svg}"
    assert int(root.attrib["data-events"]) == len(events)
    assert re.search(r"FlashAttention-2, N 9, d 4, 2 × 3", root.findtext(f"{name}title") or "")
    cells = [
        rect
        for rect in root.iter(f"{name}rect")
        if rect.find(f"{name}set[@attributeName='fill']") is not None
    ]
    assert len(cells) == math.ceil(9 / 2) * 3
    begins = sorted(float(cell[0].attrib["begin"].rstrip("s")) for cell in cells)
    computed = [at for at, e in enumerate(events, 1) if e.op == "S = Q K^T" or e.kind == "skip"]
    assert begins == pytest.approx([12 * at / len(events) for at in computed], abs=1e-3)


@pytest.mark.parametrize("visit", [{"viewport": {"width": 400, "height": 800}}], indirect=True)
def test_at_400_pixels_nothing_is_wider_than_the_page(visit: Visit) -> None:
    for state in (
        f"{EIGHT}&at=25&preset=eight&arithmetic=open&predict=tiles",
        "preset=a100&a=flash1;block=64x768&seqlen=1024&element=1&b=standard&lang=zh&drawer=open",
    ):
        visit.show(state)
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 400, state
        for selector in ("#predict", "#copy-link", "#play", "#language", "#help"):
            box = visit.page.locator(selector).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 400
