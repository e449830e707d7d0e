"""The site that ``make docs`` builds: complete, without a warning, without anything loaded from elsewhere."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from chromium import launched

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
RESULTS_OF_EXPERIMENTS = sorted((ROOT / "benchmarks" / "results" / "experiments").glob("*.json"))
ALGORITHMS = sorted(
    source
    for source in (ROOT / "flashtile" / "learn" / "algorithms").glob("*.py")
    if source.stem not in ("__init__", "call", "flops", "trace")  # what they share
)

pytestmark = pytest.mark.thorough  # make docs builds it alone, and fails likewise by a warning

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")


class Elements(HTMLParser):
    """Tags, ids and addresses of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        self.ids.add(attributes.get("id") or "")
        if tag in ("script", "img", "iframe"):
            self.loaded.add(attributes.get("src") or "")
        if tag == "link" and attributes.get("rel") in ("stylesheet", "preconnect"):
            self.loaded.add(attributes.get("href") or "")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built strictly, the first warning is an error; once for all workers of pytest-xdist.

    Of each measurement one chart is drawn: tests/benchmarks draws each kind.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    place, built = shared / "site", shared / "site is built"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
            environment = os.environ | {"CHARTS": "1"}
            result = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
            )
            assert result.returncode == 0, result.stdout + result.stderr
            built.touch()
    return place


@pytest.mark.parametrize(
    "package",
    ["flashtile", "flashtile.algorithms", "flashtile.fp8", "flashtile.io_model", "flashtile.kv_cache"],
)
def test_every_public_name_is_in_the_reference(site, package):
    """By its own name, by that of the part it comes from, or, for a part, by what is in it."""
    ids = set().union(*(Elements(page).ids for page in (site / "reference").glob("*.html")))
    names = {i.rpartition(".")[2] for i in ids} | {i.split(".")[1] for i in ids if i.count(".") > 1}
    for name in importlib.import_module(package).__all__:
        assert f"{package}.{name}" in ids or (package == "flashtile" and name in names), name


def test_nothing_is_loaded_from_elsewhere(site):
    loaded = set().union(*(Elements(page).loaded for page in site.rglob("*.html")))
    assert {address for address in loaded if "//" in address} == set()


def test_pages_say_their_language(site):
    for page in (site / "algorithms").glob("*.html"):
        language = "zh-CN" if page.stem.endswith(".zh-CN") else "en"
        assert f'<html lang="{language}"' in page.read_text()[:300], page


def test_formulas_are_mathml(site):
    page = site / "guides" / "understanding.html"
    assert "math" in Elements(page).tags
    assert "arithmatex" not in page.read_text()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_measurement_is_shown(site, path):
    """Its file is there to download, and a page with its device and each of its workloads."""
    document = json.loads(path.read_text())
    place = site / "benchmarks" / "results" / path.name
    assert json.loads(place.read_text()) == document
    text = place.with_suffix(".html").read_text()
    assert document["device"]["name"] in text
    shown = set(re.findall(r"<td[^>]*>([^<]+)</td>", text))
    assert {cell["workload"] for cell in document.get("cells", ())} <= shown


def test_every_experiment_has_its_page(site):
    """Made from the JSON, which pages link to and which is there to download."""
    for path in RESULTS_OF_EXPERIMENTS:
        document = json.loads(path.read_text())
        text = (site / "measured" / f"{path.stem}.html").read_text()
        assert text.count("<h2") == text.count('<details class="rows"') == len(document["experiments"])
        assert text.count('id="row-filter"') == 1
        assert f'href="../benchmarks/results/experiments/{path.name}"' in text
        assert f'href="{path.stem}.html"' in (site / "measured" / "index.html").read_text()


def test_the_interactive_page_is_on_the_home_page(site):
    for name in ("index.html", "index.zh-CN.html"):
        (frame,) = (one for one in Elements(site / name).loaded if "flashtile-visualize" in one)
        assert (site / frame.partition("#")[0]).stat().st_size > 1e6


@pytest.mark.parametrize(("words", "page"), [("torch.compile", "guides/training"), ("install", "start")])
def test_the_search_finds_guides_first_also_from_files(site, words, page):
    with launched() as browser:
        shown = browser.new_page()
        shown.goto((site / "index.html").as_uri())
        shown.fill(".md-search__input", words)
        found = shown.locator(".md-search-result__link").first
        found.wait_for(state="attached")
        assert f"/{page}.html" in found.get_attribute("href")


def test_the_search_leaves_sources_and_rows_out(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert "start.html" in places
    assert [one for one in places if one.startswith(("source/", "benchmarks/results/"))] == []
    row = json.loads(RESULTS_OF_EXPERIMENTS[0].read_text())["experiments"][0]["lines"][0]["question"]
    assert not any(row in entry["text"] for entry in index["docs"])


@pytest.mark.parametrize("source", ALGORITHMS, ids=lambda source: source.stem)
@pytest.mark.parametrize("ending", ["", ".zh-CN"])
def test_an_algorithm_stands_beside_its_text(site, source, ending):
    page = (site / "algorithms" / f"{source.stem}{ending}.html").read_text()
    assert 'class="beside"' in page
    assert f"flashtile/learn/algorithms/{source.name}" in page
    defined = re.findall(r"^(?:def|class) (\w+)", source.read_text(), re.MULTILINE)
    assert [name for name in defined if f">{name}<" not in page] == []
