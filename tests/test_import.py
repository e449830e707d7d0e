"""``import flashtile`` is cheap: torch and the standard library only, no triton, no CUDA, no work."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import flashtile

ROOT = Path(__file__).parents[1]
BROUGHT = {
    "flashtile", "flashtile.caches", "flashtile.garbage", "flashtile.torch_private", "flashtile.version",
    "flashtile.api",
    *(f"flashtile.api.{name}" for name in ("attention", "prefill")),
    "flashtile.checks",
    *(f"flashtile.checks.{name}" for name in ("arguments", "attention", "conversions", "decode", "values")),
    "flashtile.op",
    *(f"flashtile.op.{n}" for n in ("into", "observers", "operation", "refusals", "registry", "selection")),
    "flashtile.operators",
    *(
        f"flashtile.operators.{name}"
        for name in (
            "attention", "decode", "dropout", "functions", "gradients", "shardings", "statistics", "weights",
        )
    ),
    "flashtile.problems",
    *(
        f"flashtile.problems.{name}"
        for name in (
            "addresses", "attention", "common", "decode", "masking", "masks", "newest", "statistics",
        )
    ),
}  # fmt: skip
"""The modules that ``import flashtile`` imports. Each costs every program time, also those without a call."""
OPERATORS = {
    "append_kvcache", "backward", "combine", "copy_blocks", "decode", "decode_into", "decode_mass",
    "forward", "forward_into", "max_logits", "tangents", "weights",
}  # fmt: skip
"""Operators that exist after ``import flashtile``, for programs that torch.export has saved."""


def run(code, **environment):
    """What ``code`` prints as JSON, in a Python of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert not result.stderr, result.stderr
    return json.loads(result.stdout)


@functools.cache
def loaded() -> dict:
    """What one import brings and changes, then that of the algorithms, and calls where there is no triton."""
    return run(
        "import json, sys, torch\n"
        "def state():\n"
        "    return [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads(),\n"
        "            torch.initial_seed(), str(torch.get_rng_state().sum()),\n"
        "            torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]\n"
        "torch.manual_seed(1)\n"
        "modules, before = set(sys.modules), state()\n"
        "import flashtile\n"
        "found = {'unchanged': before == state(), 'brought': sorted(set(sys.modules) - modules)}\n"
        "names = torch._C._dispatch_get_all_op_names()\n"
        "found['operators'] = [name.split('::')[1] for name in names if name.startswith('flashtile::')]\n"
        "found |= {'triton': 'triton' in sys.modules, 'cuda': torch.cuda.is_initialized()}\n"
        "import flashtile.learn.algorithms.flash2, flashtile.learn.algorithms.paged\n"
        "found |= {'triton of algorithms': 'triton' in sys.modules}\n"
        "first = flashtile.attention\n"
        "sys.modules['triton'] = None\n"
        "q = torch.ones(1, 4, 2, 8, requires_grad=True)\n"
        "out = first(q, q, q)\n"
        "out.sum().backward()\n"
        "found['without triton'] = out.mean().item(), flashtile.explain(q, q, q).backend\n"
        "for name in [name for name in sys.modules if name.split('.')[0] == 'flashtile']:\n"
        "    del sys.modules[name]\n"
        "import flashtile\n"
        "def gradient(attention):\n"  # by the operator, not past it
        "    x = torch.ones(2, 1, 3, 1, 8, requires_grad=True)\n"
        "    torch.vmap(lambda x: attention(x, x, x).sum())(x).sum().backward()\n"
        "    return x.grad.tolist()\n"
        "found['twice'] = first is not flashtile.attention, gradient(first), gradient(flashtile.attention)\n"
        "print(json.dumps(found))"
    )


def test_it_may_be_imported_again():
    """Operators are defined once in a process; functions of the first import still compute."""
    others, first, again = loaded()["twice"]
    assert others
    assert first == again


def test_import_loads_torch_and_the_standard_library_only():
    """What torch itself does not bring in does not come with flashtile, and no CUDA context is made."""
    brought = loaded()["brought"]
    assert {name.split(".")[0] for name in brought} - set(sys.stdlib_module_names) <= {"flashtile", "torch"}
    assert not [name for name in brought if name.startswith(("torch._inductor", "torch._dynamo"))]
    assert {name for name in brought if name.split(".")[0] == "flashtile"} <= BROUGHT
    assert not loaded()["triton"]
    assert not loaded()["cuda"]


def test_import_defines_the_operators():
    assert set(loaded()["operators"]) >= OPERATORS


def test_importing_the_algorithms_imports_no_triton():
    assert not loaded()["triton of algorithms"]


def test_a_call_on_the_cpu_needs_no_triton():
    assert loaded()["without triton"] == [1.0, "cpu"]


def test_import_leaves_torch_as_it_is():
    assert loaded()["unchanged"]


def test_every_name_is_there():
    """Modules without an import of their own, and without a cost for programs that do not name them."""
    code = (
        "import importlib.util, json, sys, flashtile\n"
        "shown = dir(flashtile)\n"
        "modules = [name for name in shown if importlib.util.find_spec(f'flashtile.{name}')]\n"
        "early = [name for name in modules if f'flashtile.{name}' in sys.modules]\n"
        "found = [getattr(flashtile, name).__name__ for name in modules]\n"
        "found.append(flashtile.integrations.transformers.register.__name__)\n"
        "missing = [name for name in {*shown, *flashtile.__all__} if not hasattr(flashtile, name)]\n"
        "print(json.dumps([shown, modules, early, found, missing]))"
    )
    shown, modules, early, found, missing = run(code)
    assert {*flashtile.__all__, "nn", "learn", "__version__"} <= set(shown)
    assert found == [*(f"flashtile.{name}" for name in modules), "register"]
    assert early == []
    assert missing == []


@pytest.mark.parametrize(
    ("public", "room"),
    [
        ("algorithms.flash3_schedule", "learn"),
        ("algorithms.warps", "learn"),
        ("io_model.estimate", "learn"),
        ("demo.llama", "tools"),
    ],
)
def test_a_module_is_found_by_its_public_name(public, room):
    """What the documentation imports is the module itself, not a second one of the same file."""
    assert import_module(f"flashtile.{public}") is import_module(f"flashtile.{room}.{public}")
