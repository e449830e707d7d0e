"""Test files of other projects run unmodified; small checkouts, written here, stand for theirs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import flash_attention_tests
import original_tests
import pytest
import pytorch_tests

PLAIN = """
import os, pytest
import helper  # from the folder of this file

@pytest.mark.parametrize("number", range(3))
def test_passes(number):
    assert number < 3

def test_wrong():
    found = 1
    assert found == 2

def test_error():
    [][0]

def test_value():
    raise ValueError("not from flashtile")

def test_skipped():
    pytest.skip("not on this GPU")

def test_memory():
    raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

def test_dies():
    os._exit(7)

def test_long():
    while True:
        pass
"""
FLASH = """
import pytest, torch
from flash_attn import flash_attn_func
from flash_attn_interface import flash_attn_func as flash_attn_3_func

assert torch.cuda.get_device_capability("cuda")[0] >= 7

def tensors(heads):
    return [torch.randn(1, 8, h, 16, device="cuda", dtype=torch.float32) for h in (heads, 2, 2)]

@pytest.mark.parametrize("causal", [False, True])
def test_equal(causal):
    q, k, v = tensors(2)
    torch.cuda.synchronize()
    out = flash_attn_3_func(q, k, v, causal=causal).to(torch.device("cuda", 0)).cuda()
    assert torch.equal(flash_attn_func(q, k, v, causal=causal), out)

def test_refused():
    flash_attn_func(*tensors(3))

def test_flash3_bw_compatibility():
    assert False
"""

PYTORCH = """
import os, unittest, torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

def attend(size=8):
    return F.scaled_dot_product_attention(*torch.ones(3, 1, 2, 4, size))

class TestSDPACPU(unittest.TestCase):
    def test_served(self):
        with sdpa_kernel(SDPBackend.MATH):
            expected = attend()
        torch.testing.assert_close(attend(), expected)

    def test_refused(self):
        attend(600)

    def test_math(self):
        with sdpa_kernel(SDPBackend.MATH):
            attend()

    def test_failed(self):
        attend()
        assert "PYTORCH_TESTS_WITHOUT_FLASHTILE" in os.environ

    def test_invalid_sdpa_kernel_grouped_query_attention_cpu(self):
        assert False

    def test_served_twice(self):
        raise NotImplementedError

    def test_fails_otherwise(self):
        attend()
        self.assertIn("PYTORCH_TESTS_WITHOUT_FLASHTILE", os.environ)
        raise NotImplementedError

    def test_fused_sdp_priority_order(self):
        assert False

    def test_invalid_inputs_1_dimensional(self):
        attend(600)

for parameters in ("cpu", "float16_cpu"):
    setattr(TestSDPACPU, f"test_served_{parameters}", TestSDPACPU.test_served)
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs a suite, or a script with ``--suite``, with command line arguments."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(
        *arguments: object, suite: original_tests.Suite | None = None, script=flash_attention_tests
    ) -> tuple[int, str]:
        words = [str(argument) for argument in arguments]
        if suite is None:
            monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *words])
            code = script.main()
        else:
            code = original_tests.main(original_tests.parser("").parse_args(words), lambda: suite)
        return code, capsys.readouterr().out

    return call


def write(folder: Path, name: str, text: str) -> original_tests.Suite:
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text(text, "utf-8")
    (path.parent / "helper.py").write_text("", "utf-8")
    return original_tests.Suite(folder, (name,), arguments=("--noconftest",))


def results_of(record: Path) -> dict[str, tuple[str, str]]:
    results = map(json.loads, record.read_text("utf-8").splitlines()[1:])
    return {result["case"].split("::")[1]: (result["outcome"], result["reason"]) for result in results}


def test_cases_are_run_counted_and_continued(run, tmp_path):
    suite, record = write(tmp_path, "tests/test_a.py", PLAIN), tmp_path / "record.jsonl"
    (tmp_path / "tests/conftest.py").write_text("raise SystemExit('is not imported')", "utf-8")
    code, out = run("--seconds", 0, "--out", record, suite=suite)
    assert (code, results_of(record)) == (original_tests.UNFINISHED, {})
    assert "10 cases are left" in out
    code, out = run("--out", record, "--limit", 1, "--jobs", 2, suite=suite)
    results = results_of(record)
    assert [results.pop(f"test_passes[{number}]") for number in range(3)] == [("passed", "")] * 3
    assert results == {
        "test_wrong": ("failed", "assert found == 2"),
        "test_error": ("failed", "IndexError: list index out of range"),
        "test_value": ("failed", "ValueError: not from flashtile"),
        "test_skipped": ("skipped", "not on this GPU"),
        "test_memory": ("not run", "out of memory"),
        "test_dies": ("not run", "its process died with exit code 7"),
        "test_long": ("not run", "too long"),
    }
    table = out[out.index("| test |") :]
    assert code == 1
    assert "| `all` | 3 | 3 | 1 | 3 |" in table
    assert run("--add", record, suite=suite) == (1, table)
    lines = record.read_text("utf-8")
    assert run("--out", record, suite=suite) == (1, table)
    assert record.read_text("utf-8") == lines
    code, out = run("--only", "passes|wrong", "--without", "wrong|2]", suite=suite)
    assert (code, out) == (0, "| test | passed |\n|---|---:|\n| `test_passes` | 2 |\n| `all` | 2 |\n")
    with pytest.raises(SystemExit, match="expected a record of"):
        run("--out", record, "--seed", 1, suite=suite)


def test_flash_attention_s_files_import_flashtile(run, tmp_path):
    write(tmp_path, flash_attention_tests.FILES[2], FLASH)
    record = tmp_path / "record.jsonl"
    code, out = run("--checkout", tmp_path, "--suite", 2, "--out", record)
    assert code == 0
    assert "| `all` | 2 | 1 | 1 |" in out
    assert results_of(record)["test_flash3_bw_compatibility"][0] == "skipped"
    outcome, reason = results_of(record)["test_refused"]
    assert (outcome, "heads" in reason) == ("refused", True)
    with pytest.raises(SystemExit, match="expected a checkout of flash-attention with hopper"):
        run("--checkout", tmp_path, "--suite", 3)


@pytest.mark.thorough
def test_files_in_a_package_find_the_helpers_beside_them(run, tmp_path):
    file = flash_attention_tests.FILES[3]
    imports = "import helper\nfrom flash_attn_interface import flash_attn_func\n"
    write(tmp_path, file, imports + "def test_it(): flash_attn_func.__call__")
    for name in ("__init__.py", "flash_attn_interface.py"):  # flashtile's comes before the checkout's
        ((tmp_path / file).parent / name).write_text("", "utf-8")
    code, out = run("--checkout", tmp_path, "--suite", 3)
    assert (code, "| `all` | 1 |" in out) == (0, True)


@pytest.mark.thorough
def test_pytorch_s_files_call_flashtile(run, tmp_path):
    write(tmp_path, "test/test_transformers.py", PYTORCH)
    record = tmp_path / "record.jsonl"
    code, _ = run("--checkout", tmp_path, "--suite", "sdpa", "--out", record, script=pytorch_tests)
    lines = record.read_text("utf-8").splitlines()[1:]
    results = {line["case"].split("::")[-1]: line for line in map(json.loads, lines)}
    reasons = {case: (result["outcome"], result["reason"]) for case, result in results.items()}
    assert code == 1
    assert {reasons.pop(f"test_served[{parameters}]") for parameters in ("", "cpu", "float16_cpu")} == {
        ("passed", "")
    }
    assert reasons.pop("test_refused[]")[0] == "refused"
    assert reasons.pop("test_failed[]")[0] == "failed"
    assert reasons.pop("test_served_twice[]")[0] == original_tests.WITHOUT
    outcome, reason = reasons.pop("test_fails_otherwise[]")
    assert (outcome, reason[:49]) == ("failed", "'PYTORCH_TESTS_WITHOUT_FLASHTILE' not found in en")
    assert reasons == {
        "test_invalid_inputs_1_dimensional[]": (
            "refused",
            "an invalid call, for which PyTorch raises its error",
        ),
        "test_fused_sdp_priority_order[]": ("skipped", "compares the times of PyTorch's kernels"),
        "test_math[]": ("skipped", "no call reaches flashtile"),
        "test_invalid_sdpa_kernel_grouped_query_attention_cpu[]": (
            "skipped",
            "expects that PyTorch has no kernel",
        ),
    }
    with pytest.raises(SystemExit, match="expected a checkout of pytorch with test/inductor"):
        run("--checkout", tmp_path, "--suite", "flex", script=pytorch_tests)


@pytest.mark.parametrize(("error", "known"), [("0.00015", True), ("1.6e-4", False), ("inf", False)])
def test_a_known_failure_has_a_bound(error, known):
    suite = original_tests.Suite(Path(), (), known=pytorch_tests.KNOWN["flex"])
    reason = f"False is not true : Grad_Query Compiled error {error} is greater than ref error 0.0001 by more"
    result = {"case": "a.py::T::test_causal_block[]", "outcome": "failed", "reason": reason}
    assert (original_tests._explained(suite, result) != reason) is known
    passed = result | {"outcome": "passed", "reason": ""}
    assert original_tests._explained(suite, passed) == ""


@pytest.mark.parametrize("p", ["0_0", "0_22"])
def test_other_subjects_may_depend_on_parameters(p):
    suite = original_tests.Suite(Path(), (), other_subjects=pytorch_tests.OTHER_SUBJECTS["sdpa"])
    name = "a.py::T::test_mem_efficient_attention_vs_math_ref_grads"
    assert bool(original_tests._other_subject(suite, f"{name}[seq_8_dropout_p_{p}_float16]")) is (p != "0_0")
    assert not original_tests._other_subject(suite, "a.py::T::test_is_causal_gpu_too[]")


def test_a_file_that_cannot_be_imported_is_an_error(tmp_path):
    suite = write(tmp_path, "tests/test_a.py", "import absent_module")
    with pytest.raises(RuntimeError, match="No module named 'absent_module'"):
        original_tests.collect(suite)


def test_a_sample_has_all_functions():
    many = [f"a.py::test_many[{n}]" for n in range(100)]
    cases = {case: case for case in [*many, "a.py::test_one", "a.py::T::test_two[b-0]"]}
    groups = original_tests.sample(cases, 10, seed=0)
    some = [case for (case,) in groups]
    assert groups == original_tests.sample(cases, 10, seed=0)
    assert groups != original_tests.sample(cases, 10, seed=1)
    assert len(set(some)) == 10
    assert {original_tests.function_of(case) for case in some} == {"test_many", "test_one", "T::test_two"}
    assert sorted(original_tests.sample(cases, None, seed=0)) == sorted([case] for case in cases)


def test_groups_of_a_sample_share_a_configuration():
    cases = {f"a.py::test_many[{n}]": str(n % 7) for n in range(100)} | {"a.py::test_one": ""}
    groups = original_tests.sample(cases, 30, seed=0, group=4)
    assert sum(map(len, groups)) == 30
    assert ["a.py::test_one"] in groups
    for group in groups:
        assert len({cases[case] for case in group}) == 1
    assert max(map(len, groups)) == 4
    assert len(groups) < 15
    every = original_tests.sample(cases, None, seed=0, group=4)
    assert sorted(case for group in every for case in group) == sorted(cases)


SHAPES = """
import pytest

@pytest.mark.parametrize("seqlen", [3, 5])
@pytest.mark.parametrize("d", [16, 32])
def test_shapes(seqlen, d):
    pass
"""


@pytest.mark.parametrize("items", [False, True], ids=["calls", "items"])
def test_a_configuration_has_no_parameters_of_run_time(tmp_path, items):
    suite = replace(write(tmp_path, "tests/test_a.py", SHAPES), run_time=frozenset({"seqlen"}))
    if items:
        suite = replace(suite, arguments=(*suite.arguments, "-k", "shapes"))
    cases = original_tests.collect(suite)
    of = {case.split("[")[1]: configuration for case, configuration in cases.items()}
    assert of["16-3]"] == of["16-5]"] != of["32-3]"] == of["32-5]"]


TWICE = """
import os
from pathlib import Path

def test_needs_all_memory():
    if not Path("again").exists():
        Path("again").write_text("")
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

def test_of_another_release():
    assert False

def test_ours():
    assert "WITHOUT" in os.environ
"""


def test_cases_run_again_alone_and_without_flashtile(run, tmp_path):
    suite = replace(
        write(tmp_path, "tests/test_a.py", TWICE), without={"WITHOUT": "1"}, known={"test_our": "why"}
    )
    record = tmp_path / "record.jsonl"
    code, out = run("--out", record, "--jobs", 2, suite=suite)
    assert code == 1
    assert results_of(record) == {
        "test_needs_all_memory": ("passed", ""),
        "test_of_another_release": ("fails without flashtile", "assert False"),
        "test_ours": ("failed", "why"),
    }
    lines = record.read_text("utf-8")
    assert run("--out", record, "--jobs", 2, suite=suite) == (1, out[out.index("| test |") :])
    assert record.read_text("utf-8") == lines


ENDLESS = """
def test_quick():
    pass

def test_endless():
    while True:
        pass
"""
PROGRAM = """
import sys
from pathlib import Path
import original_tests
words, folder = sys.argv[1:], Path(sys.argv[2])
suite = original_tests.Suite(folder, ("tests/test_a.py",), arguments=("--noconftest",))
options = original_tests.parser("").parse_args(["--jobs", "2", "--out", words[0]])
sys.exit(original_tests.main(options, lambda: suite))
"""


def test_a_stopped_run_prints_its_table(tmp_path):
    write(tmp_path, "tests/test_a.py", ENDLESS)
    record = tmp_path / "record.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(record), str(tmp_path)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (record.exists() and '"passed"' in record.read_text("utf-8")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == original_tests.UNFINISHED
    assert "| `test_quick` | 1 |" in out
    assert out.endswith("out of time: 1 cases are left\n")


def test_equal_faults_have_one_reason():
    results = [
        {
            "case": f"a.py::test[{n}]",
            "outcome": "refused",
            "reason": f"q must be ({n}, {n + 1}) | fp8, got 1e-{n}",
        }
        for n in range(3)
    ]
    assert "| refused | 3 | q must be (N, ...) \\| fp8, got N |" in original_tests.table(results)
