"""The report of the benchmarks: charts from a document of measurements, the page, time over the floor."""

from __future__ import annotations

import copy
import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from test_bench import made_up_document
from typer.testing import CliRunner

from benchmarks.suite import documents, report_page
from benchmarks.suite.command import bench
from benchmarks.suite.report_charts import INK, charts

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


def one_of_each_kind():
    """The newest document of ``python -m benchmarks`` with each set of contestants of ours and of passes."""
    kinds = {}
    for path in RESULTS:
        document = json.loads(path.read_text())
        if "contestants" in document:
            ours = tuple(row["name"] for row in document["contestants"] if row["ours"])
            kinds[ours, tuple(document["settings"]["passes"])] = path
    return kinds.values()


def texts(svg: str) -> list[str]:
    return [
        "".join(element.itertext())
        for element in ElementTree.fromstring(svg).iter()
        if element.tag.endswith("text")
    ]


@pytest.fixture(scope="module")
def drawn():
    return {chart.name: chart for chart in charts(made_up_document())}


class TestFloor:
    def test_by_hand(self):
        document = made_up_document()
        cell = document["cells"][0]
        # 1e11 FLOPs at 400 TFLOP/s are 0.25 ms, 1e7 bytes at 40 GB/s the same.
        assert documents.floor_ms(document, cell) == pytest.approx(0.25)
        assert documents.over_floor(document, cell, "flashtile") == pytest.approx(4.0)
        assert documents.over_floor(document, document["cells"][1], "flex") is None

    @pytest.mark.parametrize(("key", "factor"), [("flops", 2), ("bytes", 3)])
    def test_the_longer_of_the_two_counts(self, key, factor):
        document = made_up_document()
        cell = document["cells"][0]
        cell[key] *= factor
        assert documents.floor_ms(document, cell) == pytest.approx(0.25 * factor)


class TestCharts:
    def test_each_series_gets_its_pictures(self, drawn):
        assert list(drawn) == [
            "w-forward-speed",
            "w-backward-speed",
            "w-forward-speed-up",
            "w-backward-speed-up",
            "w-memory",
        ]

    def test_card_and_versions_are_on_each_picture(self, drawn):
        for chart in drawn.values():
            assert "Card, torch 2.11, triton 3.6, cuda 13.0, 2026-01-02" in texts(chart.svg)
            assert chart.title in texts(chart.svg)

    def test_bars_say_their_speed_and_what_is_missing(self, drawn):
        shown = texts(drawn["w-forward-speed"].svg)
        # 100 TFLOP/s over the milliseconds; flex ran out of memory at the second length.
        assert {"100", "50", "25", "200", "OOM"} <= set(shown)
        assert "TFLOP/s" in shown

    def test_colours_follow_the_page(self, drawn):
        for chart in drawn.values():
            assert "currentColor" in chart.svg
            assert INK not in chart.svg

    def test_pictures_are_reproducible(self, drawn):
        again = {chart.name: chart for chart in charts(made_up_document())}
        assert again == drawn

    def test_one_length_gets_bars_alone(self):
        document = made_up_document()
        document["cells"] = [cell for cell in document["cells"] if cell["seqlen_k"] == 512]
        assert [chart.name for chart in charts(document)] == ["w-forward-speed", "w-backward-speed"]

    def test_decoding_is_drawn_in_bandwidth(self):
        document = copy.deepcopy(made_up_document())
        for cell in document["cells"]:
            cell["seqlen_q"] = 1
        assert documents.unit_of(document["cells"]) == "gbps"
        first = next(iter(charts(document)))
        assert "GB/s" in texts(first.svg)
        assert "copy, measured" in texts(first.svg)
        assert "1/512" in texts(first.svg)

    def test_nothing_measured(self):
        with pytest.raises(ValueError, match="nothing to draw"):
            next(charts(made_up_document() | {"cells": []}))


class TestPage:
    class Tags(HTMLParser):
        """Every tag that opens is closed, in order."""

        VOID = frozenset({"meta", "link", "br", "img"})

        def __init__(self):
            super().__init__()
            self.open, self.seen, self.attributes = [], [], []

        def handle_starttag(self, tag, attributes):
            self.seen.append(tag)
            self.attributes += attributes
            if tag not in self.VOID:
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    def test_stands_alone(self):
        html = report_page.render_page(made_up_document())
        tags = self.Tags()
        tags.feed(html)
        assert tags.open == []
        assert tags.seen.count("figure") == 5
        assert "script" not in tags.seen
        assert not [value for name, value in tags.attributes if name in ("src", "href") and value[:1] != "#"]

    def test_says_what_the_document_says(self):
        html = report_page.render_page(made_up_document())
        for expected in ("Card, torch 2.11", "2.83", "w-s1024", "out of memory", "12.2 us", "4.00"):
            assert expected in html

    @pytest.mark.parametrize("path", one_of_each_kind(), ids=lambda path: path.stem)
    def test_committed_results_can_be_drawn(self, path, tmp_path):
        document = json.loads(path.read_text())
        first = document["cells"][0]["series"]
        document["cells"] = [cell for cell in document["cells"] if cell["series"] == first][:8]
        numbers, page = tmp_path / "numbers.json", tmp_path / "out.html"
        numbers.write_text(json.dumps(document))
        app = typer.Typer()
        app.command()(bench)
        result = CliRunner().invoke(app, ["--show", str(numbers), "--report", str(page)])
        assert result.exit_code == 0, result.output
        assert "x best peer" in result.output
        assert page.read_text().count("<figure") >= 1
