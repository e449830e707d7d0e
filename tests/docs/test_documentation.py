"""Code blocks of the README and the docs run or name what exists, and relative links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import flashtile
from walk import walk

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = {document: document.relative_to(ROOT).as_posix() for document in DOCUMENTS}

TRANSLATED = ".zh-CN.md"
TRANSLATIONS = [document for document in DOCUMENTS if document.name.endswith(TRANSLATED)]
ORIGINALS = [
    document
    for document in DOCUMENTS
    if document not in TRANSLATIONS
    and (
        document.parent == ROOT / "docs" / "algorithms"
        or document.with_name(document.stem + TRANSLATED).exists()
    )
]
"""Pages with a Chinese translation. Every page of the algorithms must have one."""

NEEDS_GPU = "# needs a GPU\n"
"""First line of a Python block that the CPU cannot run."""

NEEDS_PACKAGE = re.compile(r"# needs (\w+)\n")
"""First line of a block that needs a package."""
NEEDS_MODEL = "# needs a model\n"
"""First line of a block that reads ``flashtile-demo/model``, which is a small model in the tests. It does not
run on a GPU, because an engine would take the memory that other tests share."""
NEEDS_SERVER = "# needs a server\n"
"""First line of a block that the tests of the server run."""

LANGUAGES = {"python", "bash", "text", ""}
"""Languages of blocks: Python runs, shell commands are checked, and text is neither."""

READ_ONLY_COMMANDS = {"info", "explain"}
"""Commands that run in the tests, because they are quick and write no file."""


def blocks(document: Path, language: str) -> list[tuple[int, str]]:
    """(line it starts on, code) of each fenced block of a language."""
    text = document.read_text()
    return [
        (text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def documents_with(language: str, needle: str = "") -> list[Path]:
    """The documents with a block of ``language`` that contains ``needle``, without translations."""
    return [
        document
        for document in DOCUMENTS
        if document not in TRANSLATIONS and any(needle in code for _, code in blocks(document, language))
    ]


def run_python(document: Path, *, gpu: bool) -> None:
    """Run the blocks of a page in order and in one namespace, because later blocks use earlier ones."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in blocks(document, "python"):
        # Blank lines in front make tracebacks point to the document's own lines.
        compiled = compile("\n" * (line - 1) + code, str(document), "exec")
        if code.startswith(NEEDS_SERVER):
            continue
        package = NEEDS_PACKAGE.match(code)
        if package and find_spec(package[1]) is None:
            continue
        if code.startswith(NEEDS_MODEL) and (gpu or not wrote_model(Path("flashtile-demo/model"))):
            continue
        if gpu or not code.startswith(NEEDS_GPU):
            exec(compiled, namespace)


def wrote_model(folder: Path) -> bool:
    """Write a small random model as ``flashtile demo`` does, or return False without the extra "engine"."""
    if find_spec("safetensors") is None or find_spec("tokenizers") is None:
        return False
    from flashtile.tools.demo.llama import Llama, save_llama, sized

    save_llama(Llama(sized(layers=1, heads=2, embed=32)), folder, max_position_embeddings=64)
    return True


def shell_commands(document: Path) -> list[list[str]]:
    """The commands of a page's bash blocks, each a list of words, without comments."""
    text = "\n".join(code for _, code in blocks(document, "bash")).replace("\\\n", " ")
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [without_variables(command) for command in commands if command]


def without_variables(command: list[str]) -> list[str]:
    """``A=b make c`` without its variables."""
    while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
        command = command[1:]
    return command


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def anchors(document: Path) -> set[str]:
    """The anchors of a page: its headings, spelled as code hosts and the site do."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_readme_shows_python():
    assert len(blocks(ROOT / "README.md", "python")) >= 2


@walk("document", DOCUMENTS)
def test_fences_are_of_known_languages(document):
    """A block that no test reads must say that it is text."""
    text = re.sub(r"^````.*?^````$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    opening = re.findall(r"^ *```(.*)$", text, re.MULTILINE)[::2]
    assert set(opening) <= LANGUAGES


@pytest.mark.parametrize("document", documents_with("python"), ids=NAMES.get)
def test_python_blocks_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(document, gpu=torch.cuda.is_available())


@pytest.mark.gpu
@pytest.mark.parametrize("document", documents_with("python", "cuda"), ids=NAMES.get)
def test_python_blocks_run_on_a_gpu(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(document, gpu=True)


@walk("document", documents_with("bash"))
def test_shell_commands_exist(document):
    """Programs, make targets, scripts, extras, and options of ``flashtile``."""
    typer_main = pytest.importorskip("typer.main")
    from benchmarks.suite.command import application as benchmarks_application
    from flashtile.cli import application

    group = typer_main.get_command(application())
    context = group.make_context("flashtile", [], resilient_parsing=True)
    for words in shell_commands(document):
        program, *arguments = words
        if program == "make":
            targets = [word for word in arguments if "=" not in word and not word.startswith("-")]
            assert set(targets) <= make_targets(), words
        elif program == "flashtile":
            command = group.get_command(context, arguments[0])
            assert command is not None, words
            blank = command.make_context(arguments[0], [], resilient_parsing=True)
            command.make_parser(blank).parse_args(arguments[1:])
        elif program == "pip":
            for extra in re.findall(r"\[([a-z,]+)\]", " ".join(arguments)):
                declared = (ROOT / "pyproject.toml").read_text()
                assert all(f"\n{name} = [" in declared for name in extra.split(",")), words
        elif program in ("python", ".venv/bin/python", "torchrun"):
            scripts = [word for word in arguments if word.endswith(".py") or word.startswith("tests")]
            assert all((ROOT / script).exists() for script in scripts), words
            if "-m" in arguments:
                module, *options = arguments[arguments.index("-m") + 1 :]
                assert find_spec(module) is not None, words
                if module == "benchmarks":
                    command = typer_main.get_command(benchmarks_application())
                    blank = command.make_context(module, [], resilient_parsing=True)
                    command.make_parser(blank).parse_args(options)
        else:
            assert program in {"cd", "curl", "git", "pre-commit", "pytest", "uv"}, words


def test_the_claimed_versions_are_those_of_the_tests():
    """The oldest torch and Triton have targets, the environment is within the bounds; pages say the same."""
    from flashtile.backends.common.releases import PAIRS

    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")[:2]))

    declared = (ROOT / "pyproject.toml").read_text()
    pair = re.search(r'"torch>=([\d.]+)", "triton>=([\d.]+),<([\d.]+);', declared)
    torch_floor, floor, bound = pair.groups()
    releases = list(PAIRS.values())
    assert (torch_floor, floor, bound) == (next(iter(PAIRS)), releases[0], f"3.{number(releases[-1])[1] + 1}")
    targets = (ROOT / "Makefile").read_text()
    assert f"$(VENV) triton=={floor}.0 " in targets
    assert f"test-torch TORCH={torch_floor}.0\n" in targets
    setup = (ROOT / "scripts" / "setup-venv").read_text()
    assert number(torch_floor) <= number(re.search(r"torch==([\d.]+)", setup)[1])
    assert number(floor) <= number(re.search(r"triton==([\d.]+)", setup)[1]) < number(bound)
    newest = f"3.{number(bound)[1] - 1}"
    for page in ("README.md", "README.zh-CN.md", "docs/start.md", "docs/start.zh-CN.md"):
        text = (ROOT / page).read_text()
        assert all(words in text for words in (f"PyTorch {torch_floor}", f"Triton {floor}", newest)), page
    for page in ("docs/start.md", "docs/start.zh-CN.md"):
        rows = re.findall(r"^\| (\d\.\d+) \| (\d\.\d+) \| (.+) \|$", (ROOT / page).read_text(), re.MULTILINE)
        assert {row[0]: row[1] for row in rows} == PAIRS


FILE = r"(?<![\w/.-])(?:benchmarks|docs/scripts|examples|scripts|tests)/[\w/]+\.py\b"
"""A program or test of the repository, named by its path from the root."""

MODULE = r"[`\[]([\w/]+\.py)[`\]](?![^.`]*\bcommit )"
"""A module named by the end of its path, as `steps.py` or [portable/masking.py](...).

The name of a module of an earlier commit is followed by "of commit ..."."""


@walk("document", [d for d in DOCUMENTS if d.name != "CHANGELOG.md"])
def test_scripts_in_the_text_exist(document):
    """The changelog may name scripts of earlier versions."""
    scripts = set(re.findall(FILE, document.read_text()))
    assert [script for script in scripts if not (ROOT / script).exists()] == []


@functools.cache
def modules() -> tuple[str, ...]:
    folders = ("benchmarks", "docs", "examples", "flashtile", "scripts", "tests")
    return tuple(f"/{p.relative_to(ROOT).as_posix()}" for f in folders for p in (ROOT / f).rglob("*.py"))


@walk("document", [d for d in DOCUMENTS if d.name != "CHANGELOG.md"])
def test_modules_in_the_text_exist(document):
    named = set(re.findall(MODULE, document.read_text()))
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in modules())] == []


@walk("document", documents_with("bash", "flashtile "))
def test_read_only_commands_run(document):
    testing = pytest.importorskip("typer.testing")
    from flashtile.cli import application

    for words in shell_commands(document):
        if words[0] == "flashtile" and words[1] in READ_ONLY_COMMANDS:
            result = testing.CliRunner().invoke(application(), words[1:])
            assert result.exit_code == 0, result.output


@walk("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    broken = []
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        path = document.parent / target if target else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


PAGES = [document for document in DOCUMENTS if document.name != "CHANGELOG.md"]


CODE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
"""Code within the text and in cells of tables."""

DOTTED = re.compile(r"(?<![\w./\"'-])[A-Za-z_]\w*(?:\.(?!py\b|js\b)[A-Za-z_]\w*)+")
"""Names with dots that are no names of files."""

FIND = """
import functools, os, sys, flashtile

def get(owner, name):  # fields of dataclasses without a default are no attributes
    return None if name in getattr(owner, "__dataclass_fields__", ()) else getattr(owner, name)

for path in sys.argv[1:]:
    if os.fork() == 0:  # a module that another name imports does not count
        try:
            functools.reduce(get, path.removeprefix("flashtile.").split("."), flashtile)
        except Exception as error:
            print(path, error, flush=True)
        os._exit(0)
    os.wait()
"""


def test_named_attributes_exist():
    """``flashtile.a.b``, or ``a.b`` in guides, in a page's text is found after ``import flashtile`` alone.

    Backends are no public room, and pages about the design name them.
    """
    rooms, names = set(dir(flashtile)), set()
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        found = {name for code in CODE.findall(prose) for name in DOTTED.findall(code)}
        names |= {name for name in found if name.startswith("flashtile.")} - {"flashtile.backends"}
        if page.parent.name == "guides" or page.parent == ROOT:
            names |= {name for name in found if name.split(".")[0] in rooms} - OF_OBJECTS
    command = [sys.executable, "-c", FIND, *sorted(names)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == ""


OF_OBJECTS = {"engine.abort", "engine.step"}
"""Methods of an object that a guide calls by the name of a room."""


REFUSED_CALLS = {"flash_attn_func(..., attn_mask=causal_mask)"}
"""Calls that the text names because they are refused."""


def calls_of_flashtile(code: str) -> Iterator[ast.Call]:
    """The calls of public functions in a piece of code, which may be the head of a ``with`` statement."""
    with contextlib.suppress(SyntaxError):
        code = " ".join(code.split()).replace("(...)", "()").replace(", ...)", ")").replace("(..., ", "(")
        tree = ast.parse(f"{code} pass" if code.startswith("with ") else code)
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def public_function(call: ast.Call, page: str) -> object | None:
    """The function of flashtile that a call in the text names, also without the package's name.

    Short names on the page about vLLM are vLLM's.
    """
    path = ast.unparse(call.func).split(".")
    is_short = path[0] in dir(flashtile) and page != "vllm.md"
    names = path if is_short else path[1:]
    is_ours = is_short or path[0] == "flashtile"
    return (
        functools.reduce(getattr, names, flashtile) if is_ours and all(map(str.isidentifier, path)) else None
    )


@walk("document", PAGES)
def test_named_calls_have_the_arguments_that_are_named(document):
    """A call in the text or a table, such as ``flashtile.attention(q, k, v, causal=True)``, could be made."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in set(CODE.findall(text)) - REFUSED_CALLS:
        for call in calls_of_flashtile(code):
            function = public_function(call, document.name)
            if not callable(function):
                continue
            given = {keyword.arg: None for keyword in call.keywords if keyword.arg}
            signature = inspect.signature(function)
            known = [one for one in signature.parameters.values() if one.name != "unknown"]  # is refused
            signature.replace(parameters=known).bind_partial(*call.args, **given)


@functools.cache
def commands_of_flashtile():
    typer_main = pytest.importorskip("typer.main")
    from flashtile.cli import application

    return typer_main.get_command(application()).commands


@walk("document", PAGES)
def test_named_commands_and_options_exist(document):
    """Commands of ``flashtile`` in the text; ``...`` stands for a value."""
    commands = commands_of_flashtile()
    for name, rest in re.findall(r"`flashtile ([a-z]+)([^`]*)`", document.read_text()):
        known = {option for one in commands[name].params for option in (*one.opts, *one.secondary_opts)}
        assert {word.partition("=")[0] for word in rest.split() if word.startswith("--")} <= known, (
            name,
            rest,
        )


@walk("document", DOCUMENTS)
def test_named_make_targets_exist(document):
    assert set(re.findall(r"`make ([a-z-]+)", document.read_text())) <= make_targets()


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_measured_speeds_are_those_of_the_linked_run(name):
    """Every whole number in the tables is a TFLOP/s of the linked JSON, rounded."""
    measured = re.search(r"<!-- measured -->(.*)<!-- /measured -->", (ROOT / name).read_text(), re.DOTALL)
    assert measured is not None
    linked = re.findall(r"\]\((benchmarks/results/[^)/]+\.json)\)", measured[1])
    runs = [json.loads((ROOT / path).read_text()) for path in linked]
    results = [result for run in runs for cell in run["cells"] for result in cell["results"].values()]
    known = {round(result["tflops"]) for result in results if result.get("status") == "ok"}
    bodies = re.sub(r"^\|.*\|\n\|[-|]+\|$", "", measured[1], flags=re.MULTILINE)
    rows = re.findall(r"^\|[^|]*\|(.*)\|$", bodies, re.MULTILINE)
    shown = {int(number) for row in rows for number in re.findall(r"(?<![\d.])\d+(?![\d.])", row)}
    assert shown
    assert shown <= known


def test_fp8_errors_are_those_of_the_linked_run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import fp8_tables

    text = fp8_tables.PAGE.read_text()
    assert fp8_tables.with_tables(text) == text


def test_pictures_of_masks_are_those_of_the_functions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import mask_pictures

    drawn = mask_pictures.pictures()
    assert {path.name for path in mask_pictures.FOLDER.iterdir()} == set(drawn)
    for name, text in drawn.items():
        assert (mask_pictures.FOLDER / name).read_text() == text, f"{name}: python {mask_pictures.__file__}"


def test_the_readme_s_picture_shows_the_measurements(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import speed_picture

    assert speed_picture.PICTURE.read_text() == speed_picture.picture()
    for name in ("README.md", "README.zh-CN.md"):
        assert f"]({speed_picture.PICTURE.relative_to(ROOT).as_posix()})" in (ROOT / name).read_text()


def test_badges_are_those_of_the_project(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import badges

    assert {path.name: path.read_text() for path in badges.FOLDER.iterdir()} == badges.badges()
    for name in ("README.md", "README.zh-CN.md"):
        shown = re.findall(r"docs/assets/badges/(\w+\.svg)", (ROOT / name).read_text())
        assert sorted(shown) == sorted(badges.badges())


def test_the_citation_is_of_this_version():
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    for name in ("README.md", "README.zh-CN.md"):
        assert f"version = {{{version}}}" in (ROOT / name).read_text()


EXPERIMENTS = sorted((ROOT / "benchmarks" / "results" / "experiments").glob("*.json"))


def test_every_measurement_answers_a_question_of_the_index():
    index = (ROOT / "docs" / "measured" / "index.md").read_text()
    answered = set(re.findall(r"\]\(../../benchmarks/results/([\w-]+)\.json\)", index))
    assert answered == {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}


def test_every_subject_of_experiments_is_in_the_index():
    index = (ROOT / "docs" / "measured" / "index.md").read_text()
    subjects = set(re.findall(r"\]\(../../benchmarks/results/experiments/(\w+)\.json\)", index))
    assert subjects == {path.stem for path in EXPERIMENTS}


@walk("path", EXPERIMENTS)
def test_every_experiment_says_what_was_decided(path):
    experiments = json.loads(path.read_text())["experiments"]
    assert all(re.search(r"\d", experiment["conclusion"]) for experiment in experiments)
    lines = [line for experiment in experiments for line in experiment["lines"]]
    assert lines
    assert {tuple(line) for line in lines} == {("question", "predicted", "measured", "decision")}
    assert [line for line in lines if not all(line.values())] == []


def test_rows_of_experiments_have_a_case_each(monkeypatch):
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import measured_pages

    def cases(*texts: str) -> list[list[str]]:
        line = dict(zip(measured_pages.COLUMNS, texts, strict=True))
        return measured_pages.cases(line)

    assert cases("Full: D 64; D 128 (us; TFLOP/s)", "even", "1.1; 1.2 (5; 6)", "kept") == [
        ["Full: D 64", "even", "1.1", "kept"],
        ["Full: D 128 (us; TFLOP/s)", "even", "1.2 (5; 6)", "kept"],
    ]
    for result in ("1.1", "1.1; none"):
        assert len(cases("D 64; D 128", "even", result, "kept")) == 1
    assert len(cases("D 64; D 128", "1.0, 1.1", "1.1; 1.2", "kept")) == 1


def contents(page: Path) -> dict[str, list]:
    """The parts of a page that a translation must share with its original: all but the words."""
    text = page.read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    formulas = re.findall(r"\$\$.*?\$\$|\$[^$]+\$", prose, re.DOTALL)
    prose = re.sub(r"\$\$.*?\$\$|\$[^$]+\$", "", prose, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]*)", prose)
    words = re.sub(r"\]\([^)]*\)", "", prose)
    return {
        "python": [ast.dump(ast.parse(code)) for _, code in blocks(page, "python")],
        "commands": shell_commands(page),
        "blocks": re.findall(r"^```(.*)$", text, re.MULTILINE),
        "marks": re.findall(r"^(?:#+ |- |\||!\[)", prose, re.MULTILINE),
        "formulas": sorted(re.sub(r"\\text\{.*?\}|\s+", "", formula) for formula in formulas),
        "links": sorted(link.replace(TRANSLATED, ".md").replace(".zh-CN.svg", ".svg") for link in links),
        "numbers": sorted(re.findall(r"\d+(?:\.\d+)?", words)),
    }


@walk("english", ORIGINALS)
def test_a_chinese_page_says_what_the_english_one_says(english):
    """The same code, commands, formulas, links and numbers, and as many sections, list items and rows."""
    chinese = english.with_name(english.stem + TRANSLATED)
    assert chinese in DOCUMENTS, "every page of the algorithms has one"
    assert contents(chinese) == contents(english)
    assert f"]({chinese.name})" in english.read_text()


@walk("page", TRANSLATIONS)
def test_a_chinese_page_leads_to_chinese_pages(page):
    """Links lead to translations where they exist, except for the link to the page's own original."""
    targets = {page.parent / link for link in re.findall(r"\]\(([^)#:\s]+\.md)", page.read_text())}
    elsewhere = {target for target in targets if target.with_name(target.stem + TRANSLATED).exists()}
    assert elsewhere == {page.with_name(page.name.replace(TRANSLATED, ".md"))}


def test_design_lists_every_room_of_the_house():
    house = re.search(r"^flashtile/\n((?: .*\n)+)", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    assert house is not None
    listed = set(re.findall(r"^  (\w+(?:/|\.py))", house[1], re.MULTILINE))
    packages = {f"{path.parent.name}/" for path in (ROOT / "flashtile").glob("*/__init__.py")}
    modules = {path.name for path in (ROOT / "flashtile").glob("*.py") if path.name != "__main__.py"}
    assert packages | modules == listed
