"""The repository that Hugging Face ``kernels`` loads: the package under a name of its own."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashtile

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_hub.py"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, SCRIPT, folder], check=True)
    return folder


@pytest.fixture(scope="module")
def kernel(repository: Path) -> Iterator[ModuleType]:
    """The package as ``kernels`` imports it, by ``kernels`` itself if it is installed."""
    if importlib.util.find_spec("kernels") is not None:
        from kernels import get_local_kernel

        yield get_local_kernel(repository, backend="cpu")
        return
    folder = repository / "build" / "torch-cpu"
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    yield sys.modules[name]
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]


def test_no_module_imports_flashtile_by_its_name(repository):
    found = [
        (path, line)
        for path in repository.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from|import) flashtile\b", line) or "torch.ops.flashtile" in line
    ]
    assert found == []


def test_the_metadata_names_every_file_with_its_hash(repository):
    for folder in (repository / "build").iterdir():
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["backend"]["type"] == folder.name.removeprefix("torch-")
        files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        assert set(metadata["digest"]["files"]) == files - {"metadata.json"}
        assert {"backends/hopper/__init__.py", "hardware/linear_tables/nvidia_h200.json"} - files == set()


def test_kernels_accepts_the_digest(repository):
    rust = pytest.importorskip("kernels._rust")
    folder = repository / "build" / "torch-cuda"
    expected = rust.Metadata.read_from_file(folder / "metadata.json").digest
    expected.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, folder))


def test_its_functions_are_those_of_the_package_with_operators_of_their_own(kernel):
    assert kernel.__version__ == flashtile.__version__
    q, k, v = torch.randn(3, 2, 40, 4, 16).unbind()
    q.requires_grad_()
    results = []
    for package in (flashtile, kernel):
        out = package.flash_attn_func(q, k, v, causal=True)
        with FlopCounterMode(display=False) as counter:  # calls under a mode go through the operators
            package.attention(q, k, v, causal=True)
        flops = torch.tensor(counter.get_total_flops())
        modified = package.attention(q, k, v, score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j))
        decoded = package.flash_attn_with_kvcache(q[:, :1].detach(), k, v, cache_seqlens=9)
        results.append((out, flops, modified, decoded, *torch.autograd.grad(out.sum(), q)))
    torch.testing.assert_close(*results, atol=0, rtol=0)
    assert flops > 0
    assert type(kernel.sdpa).__module__ != "flashtile.integrations.sdpa"
    for module in ("backends.hopper", "backends.portable", "fp8", "compat.flex", "parallel"):
        importlib.import_module(f"{kernel.__name__}.{module}")


def test_benchmarks_are_in_the_hub_s_form_and_right(repository, kernel, monkeypatch):
    """As ``kernels benchmark`` runs them: set up, run, compared with the reference at its tolerance."""
    (script,) = (repository / "benchmarks").glob("benchmark*.py")
    if importlib.util.find_spec("kernels") is None:
        base = types.ModuleType("kernels.benchmark")
        base.Benchmark = type("Benchmark", (), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kernels", types.ModuleType("kernels"))
        monkeypatch.setitem(sys.modules, "kernels.benchmark", base)
    found = runpy.run_path(str(script))
    classes = [one for one in found.values() if isinstance(one, type) and one.__name__ != "Benchmark"]
    classes = [one for one in classes if hasattr(one, "verify_attention")]
    assert len(classes) == 3
    for one in classes:
        benchmark = one()
        benchmark.kernel, benchmark.device = kernel, "cpu"
        torch.manual_seed(one.seed)
        benchmark.setup()
        benchmark.benchmark_attention()
        assert torch.allclose(benchmark.out, benchmark.verify_attention(), atol=1e-2)
