"""``flashtile demo``: its measurements, its training run, its report and its exit code."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser

import pytest
import torch
import typer
from typer.testing import CliRunner

from chromium import axe_violations, launched, watched
from flashtile.engine.rotary import rotary_frequencies
from flashtile.hardware.machine import find_device
from flashtile.tools.commands.demo import demo
from flashtile.tools.demo import exactness, operations, report, scaling
from flashtile.tools.demo.attention import ATTENTIONS, standard
from flashtile.tools.demo.corpus import VALIDATION_EVERY, python_library, sample_batch
from flashtile.tools.demo.exactness import Check
from flashtile.tools.demo.llama import ROPE, rotate, sized
from flashtile.tools.demo.report import Results, Training, claim, findings, inspect_setting, write
from flashtile.tools.demo.training import (
    FEWEST_STEPS,
    TrainingConfig,
    TrainingSchedule,
    agreement,
    bits_per_byte,
    fastest_threads,
    generate,
    train,
    validate,
)
from walk import walk

CPU = torch.device("cpu")
TINY = TrainingConfig(sized(layers=2, heads=2, embed=32), steps=40, warm_up=10, batch=4, seqlen=64)


@pytest.fixture(scope="module")
def corpus():
    return python_library()


@pytest.fixture(scope="module")
def trained(corpus):
    """(config, model, result) of a short run with flashtile's attention."""
    return (TINY, *train(TINY, corpus))


def test_corpus_is_the_same_each_time_and_holds_whole_files_out(tmp_path, corpus):
    again = python_library()
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.validation, again.validation)
    assert len(corpus.train) > 1_000_000
    assert len(corpus.validation) > 100_000

    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_bytes(b"skipped")
    texts = [f"text {i}".encode() for i in range(2 * VALIDATION_EVERY)]
    for i, text in enumerate(texts):
        (tmp_path / f"file{i:02}.py").write_bytes(text)
    split = python_library(tmp_path)
    held_out = [texts[VALIDATION_EVERY - 1], texts[2 * VALIDATION_EVERY - 1]]
    assert bytes(split.validation.tolist()) == b"\n".join(held_out)
    assert bytes(split.train.tolist()) == b"\n".join(text for text in texts if text not in held_out)


def test_corpus_of_two_files_has_both_parts_and_of_one_is_refused(tmp_path):
    (tmp_path / "a.py").write_bytes(b"a = 1")
    with pytest.raises(FileNotFoundError, match="holds 1"):
        python_library(tmp_path)
    (tmp_path / "b.py").write_bytes(b"b = 22")
    split = python_library(tmp_path)
    assert (len(split.train), len(split.validation)) == (5, 6)


def test_targets_are_inputs_one_byte_further():
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = sample_batch(text, 50, 7, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (50, 7)
    assert torch.equal(targets, inputs + 1)
    with pytest.raises(ValueError, match="seqlen must be below the text's 100 bytes, got 100"):
        sample_batch(text, 1, 100, torch.Generator())


@walk("name", ATTENTIONS)
@walk("seqlen_q", [1, 5, 33])
def test_every_attention_is_causal_attention_aligned_to_the_bottom_right(name, seqlen_q):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, s, 3, 16, generator=generator) for s in (seqlen_q, 33, 33))
    out = ATTENTIONS[name](q, k, v)
    for row in range(seqlen_q):
        seen = 33 - seqlen_q + row + 1
        weights = torch.softmax(torch.einsum("bhd,bkhd->bhk", q[:, row], k[:, :seen]) / 4, -1)
        torch.testing.assert_close(out[:, row], torch.einsum("bhk,bkhd->bhd", weights, v[:, :seen]))


def test_rotary_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    one = rotary_frequencies(ROPE, 16)

    def score(query: int, key: int) -> float:
        turned = (rotate(x, (angle.cos(), angle.sin())) for x, angle in ((q, query * one), (k, key * one)))
        return torch.mul(*turned).sum().item()

    assert score(30, 20) == pytest.approx(score(12, 2), abs=1e-4)
    assert score(30, 20) != pytest.approx(score(20, 30), abs=1e-2)


def test_model_sees_no_later_byte(trained):
    _, model, _ = trained
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 25:] += 1
    with torch.no_grad():
        logits = model(tokens)
        torch.testing.assert_close(model(changed % 256)[:, :25], logits[:, :25])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "fast"}, "attention must be one of flashtile, standard, sdpa, got 'fast'"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, got 'int8'"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_bad_training_config_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


def test_bad_model_config_is_refused():
    with pytest.raises(ValueError, match="embed must be a multiple of 2 \\* heads = 6"):
        sized(layers=1, heads=3, embed=32)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        sized(layers=0, heads=1, embed=2)


def test_learning_rate_rises_stays_and_falls_towards_zero():
    schedule = TrainingSchedule(0.5, warm_up=10, steps=100)
    rates = [schedule.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10:70] == [0.5] * 60
    assert rates[69:] == sorted(rates[69:], reverse=True)
    assert 0 < rates[-1] < 0.02
    assert not schedule.finished(99, 1e9)
    assert schedule.finished(100, 0.0)


def test_run_that_has_seconds_makes_the_same_first_steps_and_fits():
    timed, counted = TrainingSchedule(0.5, 10, seconds=10.0), TrainingSchedule(0.5, 10, steps=1000)
    rates, step = [], 0
    while not timed.finished(step, elapsed=step * 0.01):
        rates.append(timed.rate(step))
        step += 1
    assert step == pytest.approx(1000, abs=2)
    assert rates == pytest.approx([counted.rate(step) for step in range(step)], abs=0.01)


def test_slow_machine_makes_a_few_steps_and_a_slowing_one_ends_in_time():
    slow = TrainingSchedule(0.5, 10, seconds=1.0)
    assert next(step for step in range(1000) if slow.finished(step, float(step))) == FEWEST_STEPS
    slowing = TrainingSchedule(0.5, 10, seconds=10.0)
    assert not slowing.finished(100, 7.0)
    assert not slowing.finished(101, 19.0)
    assert slowing.finished(102, 21.0)


@pytest.mark.parametrize("length", [{}, {"steps": 3, "seconds": 1.0}])
def test_run_needs_one_kind_of_length(length):
    with pytest.raises(ValueError, match="needs steps or seconds"):
        TrainingSchedule(0.5, 10, **length)


def test_training_learns_and_repeats_itself(trained, corpus):
    config, model, result = trained
    assert len(result.losses) == 40
    assert result.losses[0] == pytest.approx(math.log(256), abs=0.5)
    assert result.losses[-1] < 4.5
    assert train(config, corpus)[1].losses == result.losses
    loss = validate(model, corpus, config)
    assert loss == validate(model, corpus, config) < 4.5
    assert bits_per_byte(loss) == pytest.approx(loss / math.log(2))


@pytest.mark.parametrize("attention", ["standard", "sdpa"])
def test_loss_curve_agrees_with_other_attentions(trained, corpus, attention):
    config, _, result = trained
    _, twin = train(replace(config, attention=attention, stop=15), corpus)
    agreed = agreement(result.losses, twin.losses, config.dtype)
    assert agreed.steps == 15
    assert agreed.holds


def test_loss_curve_with_a_wrong_gradient_does_not_agree(trained, corpus, monkeypatch):
    def wrong(q, k, v):
        return standard(q, k.detach(), v)

    config, _, result = trained
    monkeypatch.setitem(ATTENTIONS, "wrong", wrong)
    _, twin = train(replace(config, attention="wrong"), corpus)
    assert not agreement(result.losses, twin.losses, config.dtype).holds
    assert not agreement([1.0, math.nan], [1.0, 1.0], config.dtype).holds


def test_training_in_bfloat16_keeps_float32_weights(corpus):
    model, result = train(replace(TINY, dtype="bfloat16", stop=5), corpus)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(map(math.isfinite, result.losses))


def test_training_has_seconds_and_says_how_much_is_done(corpus):
    seen = []

    def show(*progress):
        seen.append(progress)

    _, result = train(replace(TINY, steps=None, seconds=0.1), corpus, show)
    assert len(result.losses) >= FEWEST_STEPS
    assert [step for step, _, _ in seen] == list(range(1, len(result.losses) + 1))
    assert [loss for _, loss, _ in seen] == result.losses
    shares = [share for _, _, share in seen]
    assert 0 <= min(shares) < max(shares) <= 1


def test_threads_are_chosen_for_the_training_only(corpus):
    before = torch.get_num_threads()
    with fastest_threads(TINY, corpus) as threads:
        assert 1 <= threads == torch.get_num_threads() <= before
    assert torch.get_num_threads() == before


def test_generation_is_reproducible_and_outlives_the_trained_length(trained):
    config, model, _ = trained
    text = generate(model, b"def ", 150, config)
    assert text.startswith(b"def ")
    assert len(text) == 154 > 2 * config.seqlen
    assert generate(model, b"def ", 150, config) == text
    assert len(generate(model, b"", 3, config)) == 4


def test_first_sampled_byte_follows_the_whole_prompt(trained):
    config, model, _ = trained
    with torch.no_grad():
        expected = model(torch.tensor([list(b"import ")]))[0, -1].argmax().item()
    assert generate(model, b"import ", 1, config, temperature=1e-4)[-1] == expected


def test_exactness_holds_here_and_a_wrong_result_fails_its_check():
    measured = list(exactness.measure(CPU, [case for case in exactness.CASES if case.lengths][:1]))
    assert [one.dtype for one in measured] == ["float32", "bfloat16", "float16"]
    assert all(set(one.errors) == set(exactness.RESULTS) for one in measured)
    assert all(0 < one.errors["out"].error <= one.errors["out"].allowed for one in measured)
    assert exactness.check(measured).holds
    failed = exactness.check([*measured, replace(measured[0], case="bad", holds=False)])
    assert not failed.holds
    assert "bad in float32" in failed.detail


def test_every_exactness_case_is_another_call():
    assert len(set(exactness.CASES)) == len({case.name for case in exactness.CASES}) == len(exactness.CASES)


WORKLOAD = scaling.ScalingWorkload("cpu", "float32", 1, 4, 32, (256, 512), 0.05)


def test_peak_memory_tells_score_matrices_from_tiles():
    seqlen = 1024
    theirs, ours = (scaling.cost(name, WORKLOAD, seqlen) for name in ("standard", "flashtile"))
    assert theirs.peak_bytes is not None
    assert ours.peak_bytes is not None
    matrix = 4 * seqlen**2 * 4
    # S, masked S, P, dP and dS; a second pass may find memory that the allocator keeps from the first.
    assert 2 * matrix < theirs.peak_bytes < 10 * matrix
    assert ours.peak_bytes < matrix
    assert theirs.milliseconds > 0
    assert ours.passes >= 1


def test_standard_attention_beyond_the_memory_cap_is_not_run(monkeypatch):
    monkeypatch.setattr(scaling, "CPU_MEMORY_CAP", WORKLOAD.score_bytes(256))
    rows = list(scaling.measure(WORKLOAD))
    assert [row.seqlen for row in rows] == [256, 512]
    assert rows[0].standard is not None
    assert rows[0].speed_up == pytest.approx(rows[0].standard.milliseconds / rows[0].flashtile.milliseconds)
    assert rows[1].standard is None
    assert rows[1].obstacle is not None
    assert "does not fit in" in rows[1].obstacle
    assert rows[1].speed_up is None is rows[1].memory_ratio


def test_half_of_the_free_memory_is_the_budget_of_small_machines(monkeypatch):
    monkeypatch.setattr(scaling.machine, "free_memory", lambda: 2.0 * WORKLOAD.score_bytes(512) - 2)
    assert scaling.memory_obstacle(WORKLOAD, 256) is None
    assert "half of the free memory" in str(scaling.memory_obstacle(WORKLOAD, 512))


def test_lengths_that_would_take_too_long_are_left_out(monkeypatch):
    monkeypatch.setattr(scaling, "LONGEST_PASS_SECONDS", 0.0)
    assert len(list(scaling.measure(WORKLOAD))) == 1
    assert scaling.too_slow(None) is None
    assert scaling.too_slow(scaling.Cost(9000.0, None, 1)) == "would take about 36 s a pass"


def cost(milliseconds: float, mebibytes: float) -> scaling.Cost:
    return scaling.Cost(milliseconds, int(mebibytes * 2**20), 3)


ROWS = [
    scaling.ScalingRow(256, cost(1.0, 1), cost(2.0, 8), None),
    scaling.ScalingRow(512, cost(3.0, 2), cost(9.0, 32), None, cost(4.5, 4)),
    scaling.ScalingRow(1024, cost(12.0, 4), None, "needs 6.0 GiB, does not fit in 4.0 GiB (the demo's cap)"),
]


def test_scaling_is_judged_at_the_longest_length_that_both_ran():
    assert [(check.holds, check.detail) for check in scaling.checks(ROWS)] == [(True, "16.0 times less")]
    large = scaling.ScalingRow(512, cost(3.0, 40), cost(9.0, 32), None)
    assert [check.holds for check in scaling.checks([ROWS[0], large, ROWS[2]])] == [False]
    assert scaling.checks(ROWS[2:]) == []


APART = {
    "shape": "B 1, S 256, H 12, D 64, float32",
    "workload": "gpt2-s256",
    "dtype": "float32",
    "operations": {
        "status": "ok",
        "reason": None,
        "ms": {"q k": 1.0, "mask": 2.0, "softmax": 3.0, "dropout": 4.0, "p v": 5.0},
        "together_ms": 15.0,
        "dropout_p": 0.1,
        "fused_dropout_ms": 5.0,
    },
    "results": {"flashtile": {"status": "ok", "reason": None, "ms": 2.5}},
}


def test_operations_are_checked_before_they_are_shown(results, tmp_path):
    """A wrong side fails the demo; a side that did not fit is said, and nothing is drawn."""
    assert [check.holds for check in operations.checks(APART)] == [True]
    wrong = {**APART, "results": {"flashtile": {"status": "wrong", "reason": "out is off"}}}
    (check,) = operations.checks(wrong)
    assert not check.holds
    assert "out is off" in check.detail
    full = {**APART, "operations": {"status": "refused", "reason": "needs about 9 MiB"}}
    assert [check.holds for check in operations.checks(full)] == [True]
    written = write(replace(results, operations=full), tmp_path)
    assert "operations.png" not in {path.name for path in written}
    assert "not taken apart: needs about 9 MiB" in (tmp_path / "report.html").read_text()


@pytest.fixture
def undrawn(monkeypatch):
    """Reports have no pictures: to draw them takes most of the time."""
    monkeypatch.setattr(report, "themed_svg", lambda figure: "")
    monkeypatch.setattr(report.Figure, "savefig", lambda figure, path, **options: None)


@pytest.mark.usefixtures("undrawn")
def test_both_sides_of_the_picture_do_the_same_work(results, html, tmp_path):
    """With dropout where the fused call was timed with it, otherwise without on both sides."""
    assert "Both sides apply dropout of 0.1." in html
    undropped = {name: value for name, value in APART["operations"].items() if name != "fused_dropout_ms"}
    write(replace(results, operations={**APART, "operations": undropped}), tmp_path)
    assert "Neither side applies dropout." in (tmp_path / "report.html").read_text()


def test_operations_are_of_gpt2():
    on_cpu = operations.workload_for(CPU, torch.float32, quick=True)
    on_gpu = operations.workload_for(torch.device("cuda"), torch.bfloat16, quick=False)
    assert [w.heads * w.head_dim for w in (on_cpu, on_gpu)] == [768, 768]
    assert (on_cpu.seqlens, on_gpu.seqlens, on_gpu.dtype) == ((256,), (1024,), "bfloat16")


SMALL_LAYER = scaling.ScalingWorkload("cpu", "float32", 2, 2, 32, (48,), 0.001)


def test_operations_are_measured_with_their_sum():
    """Without dropout on a CPU, on either side."""
    cell = operations.measure(SMALL_LAYER)
    assert "fused_dropout_ms" not in cell["operations"]
    rows = [row for row, time in operations.compared_times(cell, "flashtile").items() if time is not None]
    assert operations.DROP not in rows
    assert "without dropout" in rows
    found = cell["operations"]
    assert [side["status"] for side in (found, cell["results"]["flashtile"])] == ["ok", "ok"]
    assert tuple(found["ms"]) == operations.NAMES
    assert found["together_ms"] == pytest.approx(sum(found["ms"].values()))
    assert all(check.holds for check in operations.checks(cell))


def test_wrong_operations_are_not_timed(monkeypatch):
    right = operations.steps
    monkeypatch.setattr(
        operations, "steps", lambda *arguments: {**right(*arguments), operations.SOFTMAX: torch.sigmoid}
    )
    cell = operations.measure(SMALL_LAYER)
    assert cell["operations"]["status"] == "wrong"
    assert not operations.checks(cell)[0].holds


@pytest.fixture(scope="module")
def chromium():
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def results(trained, corpus) -> Results:
    config, _, result = trained
    return Results(
        started=datetime(2025, 1, 2, 3, 4),
        seconds=12.0,
        quick=True,
        setting=inspect_setting(CPU, torch.float32),
        exactness=list(exactness.measure(CPU, exactness.CASES[1:2])),
        workload=WORKLOAD,
        scaling=ROWS,
        operations=APART,
        training=Training(
            config,
            corpus.source,
            corpus.files,
            len(corpus.train),
            len(corpus.validation),
            1,
            result,
            replace(result, losses=result.losses[:10]),
            agreement(result.losses, result.losses[:10], "float32"),
            3.5,
            "def ",
            "<b>&sample</b>",
        ),
    )


class Page(HTMLParser):
    """The addresses that a page refers to, and its text."""

    def __init__(self, html: str):
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "srcset", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_running_mean_takes_the_latest_values():
    assert report.running_mean([1.0, 3.0, 5.0, 9.0], 2) == [1.0, 2.0, 4.0, 7.0]


@pytest.fixture(scope="module")
def html(results, tmp_path_factory):
    """The report, in a folder that is made for it."""
    *_, report = write(results, tmp_path_factory.mktemp("report") / "deep" / "folder")
    return report.read_text()


def test_report_is_one_file_that_needs_no_network(results, html):
    page = Page(html)
    assert page.open == []
    assert all(address.startswith("#") for address in page.addresses)
    assert html.count("<svg") == 4
    assert html.count("currentColor") > 3  # a figure suits a light and a dark page
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html
    assert "def <b>&sample</b>" in page.text  # escaped
    assert "does not fit in 4.0 GiB" in page.text
    assert all(check.name in page.text for check in results.checks())


def test_claim_and_findings_follow_the_numbers(results, html):
    assert claim(results) == "Exact attention, 3.0 times as fast with 16 times less memory"
    found = findings(results)
    assert found["scaling"] == (
        "At 512 tokens a pass takes 3 ms instead of 9 ms, 3.0 times as fast. It needs 2 MiB instead of "
        "32 MiB, 16 times less. PyTorch's SDPA takes 4.5 ms."
    )
    assert found["operations"] == "A forward pass takes 5 ms instead of 15 ms, 3.0 times as fast."
    assert found["exactness"] == "All 15 results are as close to float64 as the error rule allows."
    text = Page(html).text
    assert all(sentence in text for sentence in [claim(results), *found.values()])
    assert text.index(claim(results)) < text.index("Time of a pass") < text.index(found["scaling"])


def test_claim_of_a_demo_that_fails_or_cannot_compare(results):
    slow = scaling.ScalingRow(512, cost(9.1, 2), cost(9.0, 32), None)
    assert claim(replace(results, scaling=[slow])) == "Exact attention, with 16 times less memory"
    large = scaling.ScalingRow(512, cost(9.1, 40), cost(9.0, 32), None)
    assert claim(replace(results, scaling=[large])) == f"1 of {len(results.checks())} checks failed"
    assert findings(replace(results, scaling=[slow]))["scaling"].startswith(
        "At 512 tokens a pass takes 9.1 ms instead of 9 ms, 1.0 times as long (the scores fit into caches"
    )
    alone = replace(results, scaling=ROWS[2:])
    assert claim(alone) == "Exact attention, without the score matrix"
    assert findings(alone)["scaling"] == "Standard attention ran at none of the lengths."
    broken = [replace(results.exactness[0], holds=False)]
    assert findings(replace(results, exactness=broken))["exactness"].startswith("Results are outside of it: ")


def test_finding_of_operations_leaves_dropout_out_on_both_sides_or_on_neither(results):
    undropped = {name: value for name, value in APART["operations"].items() if name != "fused_dropout_ms"}
    found = findings(replace(results, operations={**APART, "operations": undropped}))
    assert found["operations"] == "A forward pass takes 2.5 ms instead of 11 ms, 4.4 times as fast."


@pytest.fixture(scope="module")
def linked(results, tmp_path_factory):
    """The report of a run that wrote an interactive page, too."""
    *_, report = write(results, tmp_path_factory.mktemp("linked"), "visualize.html")
    return report


def test_report_links_to_the_interactive_page(linked):
    assert '<a href="visualize.html">' in linked.read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1366, 768), (768, 1024), (360, 640)])
def test_report_is_accessible_at_every_size(linked, chromium, width, height, scheme):
    context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    complaints = watched(page)
    page.goto(linked.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").bounding_box()["y"] < page.locator(".bars").bounding_box()["y"] < height
    widths = [bar.bounding_box()["width"] for bar in page.locator(".bar i").all()]
    times, sizes = [9.0, 4.5, 3.0], [32, 4, 2]  # standard attention, SDPA, flashtile
    shares = [width / max(widths) for width in widths]
    assert shares == pytest.approx([t / 9.0 for t in times] + [size / 32 for size in sizes], abs=0.01)
    assert axe_violations(page) == []
    assert complaints == []
    context.close()


def test_results_hold_every_number_and_writing_again_changes_nothing(results, tmp_path):
    written = write(results, tmp_path)
    figures = {"time.png", "memory.png", "loss.png", "operations.png"}
    assert {path.name for path in written} == {"results.json", "report.html"} | figures
    assert set(tmp_path.iterdir()) == set(written)
    before = {path: path.read_bytes() for path in written}
    assert all(before[path].startswith(b"\x89PNG") for path in written if path.suffix == ".png")
    assert write(results, tmp_path) == written
    assert {path: path.read_bytes() for path in written} == before

    record = json.loads((tmp_path / "results.json").read_text())
    assert record["passed"] is True
    assert record["scaling"][1]["speed_up"] == 3.0
    assert record["scaling"][2]["standard"] is None
    assert record["training"]["result"]["losses"] == results.training.result.losses
    assert record["exactness"][0]["errors"]["dq"]["error"] == results.exactness[0].errors["dq"].error
    assert {served["backend"] for served in record["setting"]["served"]} == {"cpu"}


@pytest.mark.usefixtures("undrawn")
def test_failures_and_numbers_that_are_not_finite_reach_the_files(results, tmp_path):
    nan = replace(results.training.result, losses=[1.0, math.nan])
    training = replace(results.training, result=nan, agreement=agreement(nan.losses, [1.0, 1.0], "float32"))
    write(replace(results, training=training), tmp_path)
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["passed"] is False
    assert record["training"]["result"]["losses"] == [1.0, "nan"]
    assert "✗" in Page((tmp_path / "report.html").read_text()).text


@pytest.mark.usefixtures("undrawn")
def test_report_where_the_system_does_not_tell_memory(results, tmp_path):
    unknown = scaling.Cost(1.0, None, 1)
    rows = [replace(row, flashtile=unknown, standard=unknown if row.standard else None) for row in ROWS]
    write(replace(results, scaling=rows), tmp_path)
    assert "–" in Page((tmp_path / "report.html").read_text()).text
    assert scaling.checks(rows) == []


def test_devices_are_checked():
    assert find_device("cpu") == CPU
    for name, message in (("toaster", "got 'toaster'"), ("meta", "got 'meta'"), ("cuda:99", "torch finds")):
        with pytest.raises(ValueError, match=message):
            find_device(name)


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(demo)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_command_shows_everything(run, tmp_path):
    result = run("--quick", "--device", "cpu", "--out", tmp_path / "out", "--seconds", "0.5")
    assert result.exit_code == 0, result.output
    parts = (
        "machine",
        "PyTorch's own flash kernel",
        "not by portable",
        "exactness",
        "PyTorch's SDPA takes",
        "class Reader",
    )
    for part in (*parts, "6 answers to 3 prompts", "tokens of prompts were found in the prefix cache"):
        assert part in " ".join(result.output.split())
    assert (tmp_path / "out" / "model" / "config.json").exists()
    assert json.loads((tmp_path / "out" / "results.json").read_text())["passed"] is True


@pytest.mark.slow
@pytest.mark.thorough
def test_command_fails_when_a_check_fails(run, tmp_path, monkeypatch):
    """It writes over the files of another run."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text('{"passed": true}')
    monkeypatch.setattr(exactness, "check", lambda measured: Check("exact", False, "it is not"))
    monkeypatch.setattr(scaling, "workload_for", lambda *_: replace(WORKLOAD, seqlens=(64,)))
    result = run("--quick", "--device", "cpu", "--out", tmp_path / "out", "--seconds", "0.1")
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert json.loads((tmp_path / "out" / "results.json").read_text())["passed"] is False


def test_command_refuses_a_device_that_is_not_there(run, tmp_path):
    result = run("--device", "toaster", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert not (tmp_path / "out").exists()
