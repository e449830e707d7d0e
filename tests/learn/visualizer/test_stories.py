"""The stories of the page: their numbers against numbers computed apart."""

from __future__ import annotations

import colorsys
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from visits import Visit

from chromium import watched
from flashtile.algorithms import Memory, flash3_fp8, flash3_schedule, reservation
from flashtile.learn.visualizer import stories

END = 10**9


@pytest.fixture(scope="module")
def told(chromium: Any, page_file: Path) -> Iterator[Visit]:
    """One page for all of these tests; at its end, nothing must have complained."""
    context = chromium.new_context(viewport={"width": 1400, "height": 1000}, locale="en-US")
    page = context.new_page()
    visit = Visit(page, page_file.as_uri(), watched(page))
    page.on("request", lambda sent: visit.requests.append(sent.url))
    visit.go("story=softmax&at=0")
    yield visit
    context.close()
    assert not visit.complaints
    assert not [url for url in visit.requests if not url.startswith((visit.url, "about:", "data:", "blob:"))]


def tell(visit: Visit, name: str, at: int = END, **more: str) -> dict[str, dict[str, str]]:
    """The counters of each case of a story after ``at`` events of the longest."""
    visit.show("&".join([f"story={name}", f"at={at}", *(f"{key}={value}" for key, value in more.items())]))
    counters = visit.each(
        ".case [data-counter]", "[e.closest('.case').dataset.case, e.dataset.counter, e.dataset.value]"
    )
    found: dict[str, dict[str, str]] = {}
    for case, counter, value in counters:
        found.setdefault(case, {})[counter] = value
    return found


def column(found: dict[str, dict[str, str]], counter: str) -> dict[str, float]:
    return {case: float(counters[counter]) for case, counters in found.items() if counter in counters}


def strip(visit: Visit, case: str, name: str) -> list[str]:
    return visit.each(f"[data-case={case}] [data-strip='{name}'] span", "e.dataset.value ?? e.textContent")


def test_softmax_in_three_passes_two_and_one(told: Visit) -> None:
    found = tell(told, "softmax", variant="article")
    assert column(found, "passes") == {"naive": 2, "safe": 3, "online": 2, "average": 1}
    assert column(found, "hbm_read") == {"naive": 16, "safe": 24, "online": 16, "average": 8 + 8}
    total = sum(math.exp(x - 4) for x in (1, 2, 3, 4))
    exact = [math.exp(x - 4) / total for x in (1, 2, 3, 4)]
    for case in ("naive", "safe", "online"):
        assert [float(value) for value in strip(told, case, "softmax")] == pytest.approx(exact, rel=1e-5)
    average = sum(p * v for p, v in zip(exact, (10, 20, 30, 40), strict=True))
    assert float(strip(told, "average", "result")[0]) == pytest.approx(average, rel=1e-5)


def test_the_sum_is_corrected_when_the_second_block_comes(told: Visit) -> None:
    """m = 2, l = e^-1 + 1; then m = 4, l = (e^-1 + 1) e^-2 + e^-1 + 1."""
    case = next(case for case in stories.recorded("softmax") if case.name == "online")
    sums = [at for at, event in enumerate(case.trace.events, 1) if event.name == "l" and event.op]
    first = math.exp(-1) + 1
    longest = max(len(case.trace.events) for case in stories.recorded("softmax"))
    for at, maximum, total in zip(sums, (2, 4), (first, first * math.exp(-2) + first), strict=True):
        place = math.ceil((at + 1) / len(case.trace.events) * longest)  # m is stored right after l
        tell(told, "softmax", place, variant="article")
        assert float(strip(told, "online", "m")[0]) == maximum
        assert float(strip(told, "online", "l")[0]) == pytest.approx(total, rel=1e-4)


def test_only_the_naive_softmax_overflows(told: Visit) -> None:
    tell(told, "softmax", variant="large")
    assert strip(told, "naive", "softmax")[-1] == "nan"
    assert float(strip(told, "online", "softmax")[-1]) == pytest.approx(1)


@pytest.mark.parametrize(("variant", "beta"), [("product", 0), ("scaled", 1)])
def test_tiles_of_blocks_and_of_warps(told: Visit, variant: str, beta: int) -> None:
    found = tell(told, "matmul", variant=variant)
    n = stories.MATMUL_SIZE
    reads = {
        name: 2 * (2 * n**3 // block + beta * n * n) for name, (block, _) in stories.MATMUL_TILES.items()
    }
    assert column(found, "hbm_read") == reads
    assert column(found, "shared_read") == {
        name: 2 * 2 * n**3 // w for name, (_, w) in stories.MATMUL_TILES.items()
    }
    barriers = {
        name: 2 * (n // block) ** 2 * (n // stories.MATMUL_STRIP)
        for name, (block, _) in stories.MATMUL_TILES.items()
    }
    assert column(found, "barriers") == barriers
    assert set(column(found, "finished").values()) == {n * n}


def test_the_chain_of_products(told: Visit) -> None:
    found = tell(told, "chain")
    n, d, block = 6, 4, 2
    assert column(found, "middle") == {"separate": 2 * n * n, "fused": 0, "reordered": 2 * d * d}
    assert column(found, "hbm_read")["fused"] == 2 * (n * d + n // block * 2 * n * d)
    assert column(found, "matmul_flops") == {
        "separate": 4 * n * n * d, "fused": 4 * n * n * d, "reordered": 4 * n * d * d,
    }  # fmt: skip
    assert column(found, "hbm_peak")["separate"] - column(found, "hbm_peak")["fused"] == 2 * n * n


def test_warps_split_keys_or_rows(told: Visit) -> None:
    found = tell(told, "warps")
    w, rows, d, tile = (
        stories.WARPS_NUM_WARPS,
        stories.WARPS_ROWS,
        stories.WARPS_HEAD_DIM,
        stories.WARPS_BLOCK,
    )
    tiles = stories.WARPS_KEYS // tile
    assert column(found, "shared_read")["split_q"] == 2 * rows * d + tiles * w * 2 * tile * d * 2
    assert column(found, "shared_written") == {
        "split_k": tiles * 4 * w * rows * (1 + 1 + d), "split_q": 0,
    }  # fmt: skip
    assert column(found, "barriers") == {"split_k": 1 + 4 * tiles, "split_q": 1 + 2 * tiles}
    cases = {case.name: case for case in stories.recorded("warps")}
    ends = {name: round(max(span.end for span in case.trace.spans)) for name, case in cases.items()}
    assert column(found, "cycles") == ends
    assert ends["split_k"] > 1.5 * ends["split_q"]
    bars = told.each(".lanes-of-warps rect title", "e.textContent")
    assert len(bars) == sum(len(case.trace.spans) for case in cases.values())


@pytest.mark.parametrize("variant", ["column", "huge", "none"])
def test_eight_bits_and_an_outlier(told: Visit, variant: str) -> None:
    """What is coarser than e4m3's 1/16, or gone: rounded here by hand, block by block."""
    found = tell(told, "fp8", variant=variant)
    q, k, _ = stories.fp8_inputs(variant)
    for case, rows in (("tensor", stories.FP8_SEQLEN), ("block", stories.FP8_BLOCK)):
        coarse = lost = 0
        for x, start in itertools.product((q, k), range(0, stories.FP8_SEQLEN, rows)):
            part = x[start : start + rows].double()
            scale = part.abs().max().float().double() / 448
            step = 2.0 ** (torch.floor(torch.log2((part / scale).abs())).clamp(min=-6) - 3)
            stored = torch.round(part / scale / step) * step * scale
            gone = stored == 0
            lost += int(gone.sum())
            coarse += int((~gone & ((stored - part).abs() > part.abs() / 16 * (1 + 1e-5))).sum())
        assert (found[case]["coarse"], found[case]["lost"]) == (str(coarse), str(lost)), case
    error = column(found, "error")
    if variant == "column":
        assert error["rotated"] < 0.5 * min(error["tensor"], error["block"])
    if variant == "huge":
        assert error["block"] < 0.6 * error["tensor"]


@pytest.mark.parametrize("variant", ["spike", "calm"])
def test_a_unified_maximum_falls_back(told: Visit, variant: str) -> None:
    found = tell(told, "unified", variant=variant)
    blocks, again = len(stories.UNIFIED_SCORES) // stories.UNIFIED_BLOCK, variant == "spike"
    assert column(found, "again") == {"running": 0, "unified": again}
    corrections = {"running": blocks + stories.UNIFIED_NUM_SPLITS, "unified": blocks * again}
    assert column(found, "corrections") == corrections
    red = told.each("[data-case=unified] circle.wrong", "Number(e.dataset.score)")
    assert red == ([stories.UNIFIED_SPIKE] if again else [])
    for case in stories.recorded("unified"):
        weights = [math.exp(score) for score in case.facts["scores"]]
        out = sum(i * weight for i, weight in enumerate(weights)) / sum(weights)
        assert case.facts["out"] == [pytest.approx(out, rel=1e-5)]


def test_reservations_against_pages(told: Visit) -> None:
    """Reserving for the longest is a queue with as many places as fit: simulated here without addresses."""
    found = tell(told, "pool")
    requests, places = (
        reservation.random_requests(stories.POOL_REQUESTS),
        stories.POOL_SLOTS // reservation.LONGEST,
    )
    waiting, running, tokens, steps = list(requests), [], 0, 0
    while waiting or running:
        while waiting and len(running) < places:
            prompt, output = waiting.pop(0)
            running.append([prompt, prompt + output])
        if waiting:
            tokens, steps = tokens + sum(length for length, _ in running), steps + 1
        running = [[length + 1, final] for length, final in running if length + 1 < final]
    assert column(found, "sequences")["longest"] == places
    waste = column(found, "waste")
    assert waste["longest"] == pytest.approx(1 - tokens / (steps * places * reservation.LONGEST))
    assert 0.6 < waste["longest"] < 0.8
    assert waste["pages"] < 0.04
    assert column(found, "sequences")["pages"] > 5 * places


@pytest.mark.parametrize("name", stories.MASKS)
def test_blocks_of_a_mask(told: Visit, name: str) -> None:
    """Counted here score by score, and painted so; both ways give what standard attention gives."""
    places = torch.arange(stories.MASKS_SEQLEN)
    seen = torch.as_tensor(stories.MASKS[name]()(0, 0, places[:, None], places))
    side, block = stories.MASKS_SEQLEN // stories.MASKS_BLOCK, stories.MASKS_BLOCK
    kept = seen.view(side, block, side, block).transpose(1, 2).flatten(2).sum(-1)
    empty, full = int((kept == 0).sum()), int((kept == block**2).sum())
    found = tell(told, "masks", variant=name)
    partial = side**2 - empty - full
    assert column(found, "skipped") == {"every": 0, "lists": empty}
    assert column(found, "partial") == {"every": side**2, "lists": partial}
    assert column(found, "full") == {"every": 0, "lists": full}
    assert column(found, "masked") == {"every": stories.MASKS_SEQLEN**2, "lists": partial * block**2}
    flops = column(found, "matmul_flops")
    assert flops["lists"] * side**2 == flops["every"] * (side**2 - empty)
    painted = told.each("[data-case=lists] .cells rect:not(.outline)", "e.getAttribute('class')")
    words = {0: "skipped", block**2: "computed"}
    assert painted == [words.get(n, "partial") for n in kept.flatten().tolist()]

    q, k, v = (t.double() for t in stories.masks_inputs())
    scores = q @ k.T * stories.MASKS_HEAD_DIM**-0.5
    if name == "alibi":
        scores = scores - stories.MASKS_SLOPE * (places[:, None] - places).abs()
    exact = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v
    for in_lists in (False, True):
        out = stories.attend_in_blocks(name, Memory(), in_lists).double()
        torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-5)


def test_memories_are_shown_at_the_same_step(told: Visit) -> None:
    found = tell(told, "pool", 20)
    traces = {case.name: case.trace.events for case in stories.recorded("pool")}
    step = traces["longest"][19].data["step"]  # type: ignore[index]
    for name, events in traces.items():
        data = [event.data for event in events if event.data["step"] <= step][-1]  # type: ignore[index]
        assert data is not None
        assert int(found[name]["now"]) == len(data["sequences"])
        assert float(found[name]["waste_now"]) == pytest.approx(1 - data["used"] / data["held"])
        used = told.each(f"[data-case={name}] .cells .used", "1")
        sizes = [-(-length // stories.POOL_PAGE_SIZE) for _, length, *_ in data["sequences"]]
        if name == "pages":
            assert len(used) == sum(sizes)


def test_buttons_player_and_the_way_back(told: Visit) -> None:
    told.show("a=flash2;block=4x4&seqlen=8&head_dim=4&at=3&story=none")
    assert told.page.is_visible("article.a")
    told.press("h")
    told.page.click(".more summary")
    told.page.click("[data-story=chain]")
    told.settle()
    assert told.state["story"] == "chain"
    assert told.page.get_attribute("#play", "aria-label") == "Pause"
    assert told.page.is_hidden("article.a")
    told.press(" ", "Home", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert told.state["at"] == "1"
    told.press("End")
    state = told.state
    assert state["at"] == told.page.get_attribute("#position", "max")
    told.press("l")
    assert told.text(".story h2") == "没有 softmax 的 Q Kᵀ V"
    told.press("l")
    told.page.click("#story-end")
    told.settle()
    assert told.page.is_visible("article.a")
    assert "story" not in told.state
    assert told.state["at"] == "3"
    told.press("h")
    told.page.click("[data-story=fp8]")
    told.settle()
    told.page.click("#play")
    told.page.select_option(".variants", "huge")
    told.settle()
    assert told.state["variant"] == "huge"
    told.press("1")
    assert told.page.is_visible("article.a")


def test_every_story_fits_on_a_phone(told: Visit) -> None:
    """In Chinese: no text is missing, nothing is wider than the screen."""
    told.page.set_viewport_size({"width": 390, "height": 844})
    for name in stories.STORIES:
        tell(told, name, 5, lang="zh")
        assert told.page.evaluate("document.documentElement.scrollWidth") <= 390, name
        assert len(told.text(".about-story .about")) > 100
    told.page.set_viewport_size({"width": 1400, "height": 1000})


def test_the_numbers_of_the_backward_pass_are_those_of_autograd(told: Visit) -> None:
    """Every tile of P, dP and dS in float64, and what the page shows of dQ, dK and dV at the end."""
    q, k, v, dout = (x.requires_grad_() for x in stories.backward_inputs())
    s = q @ k.T * stories.BACKWARD_HEAD_DIM**-0.5
    p = torch.softmax(s, -1)
    out = p @ v
    exact = dict(zip(("dS", "dQ", "dK", "dV"), torch.autograd.grad(out, (s, q, k, v), dout), strict=True))
    exact |= {"P": p, "dP": dout @ v.T, "D": (dout * out).sum(-1, keepdim=True)}
    (case,) = stories.recorded("backward")
    shown = case.facts["numbers"]
    seen = set()
    for at, event in enumerate(case.trace.events):
        name = event.op.split(" =")[0] if event.name in ("S", "dS") and event.op else event.name
        whole = event.kind == "store" and name in ("D", "dK", "dV")
        if (not whole and name not in ("P", "dP", "dS")) or event.kind == "free":
            continue
        rows, cols = slice(*event.rows), slice(*(event.cols or (None, None)))
        close(shown[at], exact[name][rows, cols])
        seen.add(name)
    assert seen == {"P", "dP", "dS", "D", "dK", "dV"}
    tell(told, "backward")
    for name in ("dQ", "dK", "dV"):
        texts = told.each(f"[data-grid={name}] text", "e.textContent")
        close([[float(text.replace("−", "-"))] for text in texts], exact[name].reshape(-1, 1), 0.00501)


def close(rows: list[list[float]], exact: torch.Tensor, absolute: float = 1e-12) -> None:
    """The page's numbers have three digits."""
    torch.testing.assert_close(
        torch.tensor(rows, dtype=torch.float64), exact.detach(), rtol=5e-3, atol=absolute
    )


def test_the_timeline_of_warpgroups_is_that_of_the_schedule(told: Visit) -> None:
    for at in (40, END):
        found = tell(told, "turns", at)
        for case in stories.recorded("turns"):
            now = min(at / stories.TICKS, case.facts["end"])
            busy = sum(
                max(min(span.end, now) - span.start, 0)
                for span in case.trace.spans
                if span.unit == "tensor core"
            )
            assert column(found, "time")[case.name] == now
            assert column(found, "busy")[case.name] == pytest.approx(busy / now)
    assert told.each("[data-case=both] .turns g", "e.classList.contains('begun')").count(False) == 0
    tell(told, "turns", 40, lang="en")  # other tests change the language
    said = told.text("[data-case=pingpong] .now")
    assert "Producer waits for an empty stage: P V of block 0 is still being used." in said
    assert "Warpgroup 1: tensor cores compute P V of block 0." in said


def test_the_lane_of_the_tensor_cores_shows_when_they_are_idle(told: Visit) -> None:
    tell(told, "turns")
    for case in stories.recorded("turns"):
        bars = told.each(
            f"[data-case={case.name}] .turns g:is(.idle, .tensor) rect",
            "[e.parentElement.classList[0], Number(e.getAttribute('y')), Number(e.getAttribute('width'))]",
        )
        lowest = max(y for _, y, _ in bars)
        idle, busy = (
            sum(width + 1 for kind, y, width in bars if kind == which and y == lowest)
            for which in ("idle", "tensor")
        )
        spans = case.trace.spans
        assert busy / (busy + idle) == pytest.approx(flash3_schedule.busy(spans, flash3_schedule.TENSOR_CORE))


def test_the_names_of_the_bounds_are_at_their_lines(told: Visit) -> None:
    tell(told, "unified")
    names = told.each(
        "[data-case=unified] .scores text:not(.maximum)", "[e.textContent, Number(e.getAttribute('y')) + 4]"
    )
    lines = told.each("[data-case=unified] .scores line:is(.phi, .bound)", "Number(e.getAttribute('y1'))")
    assert [name for name, _ in names] == ["φ = 6", "φ − 3", "φ + 3"]
    assert [y for _, y in names] == pytest.approx(lines)


def test_a_sum_in_two_levels_loses_fewer_bits(told: Visit) -> None:
    products = stories.sums_products()
    exact = products.sum().item()
    found = tell(told, "sums")
    for name, promote in (("one", None), ("two", 128)):
        register, total = 0.0, 0.0
        for i, part in enumerate(products.split(32), 1):
            register += part.sum().item()
            step = 2.0 ** (math.floor(math.log2(register)) - 13)  # of the last of 14 bits
            register = math.floor(register / step) * step
            if promote and 32 * i % promote == 0:
                total, register = torch.tensor(total + register, dtype=torch.float32).item(), 0.0
        error = abs(total + register - exact) / exact
        assert column(found, "error")[name] == pytest.approx(error, rel=1e-4)
        assert column(found, "summed")[name] == len(products)
    errors = column(found, "error")
    assert errors["two"] < errors["one"] / 20
    tell(told, "sums", 100)
    bits = {
        kind: told.each(f"[data-case=one] .bits .{kind} text", "e.textContent")
        for kind in ("register", "cut")
    }
    sums = flash3_fp8.sum_products(products)[99]
    top = math.floor(math.log2(sums.register))
    assert "".join(bits["register"]) == f"{int(sums.register / 2.0 ** (top - 13)):014b}"
    lost = sums.added / 2.0 ** (top - 13) % 1
    assert int("".join(bits["cut"]), 2) == int(lost * 2 ** len(bits["cut"]))


def test_no_colour_is_brown_or_mustard(told: Visit) -> None:
    """Colours of what pictures are painted with, in both themes: none between orange and olive."""
    found = set()
    for theme in ("light", "dark"):
        for story in stories.STORIES:
            tell(told, story, theme=theme)
            found.update(
                told.each(
                    ".picture :is(rect, circle, i)",
                    "`colour ${getComputedStyle(e)[e.tagName === 'I' ? 'backgroundColor' : 'fill']}`",
                )
            )
        names = told.page.evaluate("Object.values(flashtilePage.colours)")
        found.update(f"colour {value}" for value in names)
    told.show("story=softmax&at=0&theme=light")
    brown = [colour for colour in found if is_brown(colour)]
    assert len(found) > 20
    assert not brown


def is_brown(colour: str) -> bool:
    """Whether a colour, as CSS computes it, has a hue from orange to olive."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour.split(" ", 1)[1])]
    if len(numbers) < 3 or (len(numbers) == 4 and numbers[3] == 0):
        return False
    scale = 1 if "srgb" in colour else 255
    hue, lightness, saturation = colorsys.rgb_to_hls(*(number / scale for number in numbers[:3]))
    return 20 < 360 * hue < 75 and saturation > 0.25 and 0.1 < lightness < 0.9


def test_a_scale_brings_small_numbers_to_dense_values(told: Visit) -> None:
    found = column(tell(told, "rounding"), "percent")
    x = torch.tensor(stories.ROUNDED, dtype=torch.float64)
    for name, scale in (("plain", 1.0), ("scaled", x.max() / 448)):
        stored = (x / scale).float().to(torch.float8_e4m3fn).double() * scale
        assert found[name] == pytest.approx(100 * ((stored - x).abs() / x).max().item(), rel=1e-5)
    assert found["plain"] == 100  # the smallest one became 0
    assert found["scaled"] < 100 / 16
