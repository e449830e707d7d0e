"""Where faults are planted, and where a fault would change no result. Edit this module when files move."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Area:
    """A group of files of the package, and the tests near them.

    ``files`` and ``near`` are patterns of paths, in which ``*`` also matches slashes.
    """

    name: str
    files: tuple[str, ...]
    near: tuple[str, ...]
    """Tests that meet the faults of a sample; a whole run uses all of ``TESTS``."""


AREAS = (
    Area(
        "masks",
        ("flashtile/masks/*", "flashtile/problems/mask*", "flashtile/api/mask*"),
        ("tests/masks/*", "tests/operators/test_derivatives.py"),
    ),
    Area(
        "operators",
        (
            *(f"flashtile/{folder}/*" for folder in ("api", "checks", "op", "operators", "problems")),
            *(f"flashtile/{file}.py" for file in ("caches", "dropout")),
        ),
        (
            "tests/api/test_functional.py",
            "tests/checks/test_bad_input.py",
            "tests/api/test_merge.py",
            "tests/problems/test_tma_obstacles.py",
            "tests/op/test_selection.py",
            "tests/op/test_launch_keys.py",
            "tests/op/test_refused_calls.py",
            "tests/op/test_results_into.py",
            "tests/operators/test_decode_operators.py",
            "tests/checks/test_decode_bad_input.py",
            "tests/api/test_append.py",
            "tests/api/test_fp8_calls.py",
            "tests/operators/test_fp8_gradients.py",
            "tests/test_caches.py",
        ),
    ),
    Area(
        "portable",
        ("flashtile/backends/portable/*", "flashtile/backends/common/*", "flashtile/backends/libcuda.py"),
        (
            "tests/api/test_weights.py",
            "tests/operators/test_partial_results.py",
            "tests/backends/test_fp8_quantize.py",
            "tests/backends/common/test_kernel_store.py",
            "tests/backends/common/test_keys.py",
            "tests/backends/common/test_cached_launches.py",
            "tests/backends/common/test_direct_launch.py",
            "tests/backends/portable/test_decode_kernels.py",
            "tests/api/test_linear.py",
            "tests/hardware/test_linear_table.py",
            "tests/parallel/test_symmetric.py",
        ),
    ),
    Area(
        "Hopper",
        ("flashtile/backends/hopper/*",),
        tuple(
            f"tests/backends/hopper/test_hopper_{name}.py"
            for name in ("dq_accum", "interpreted", "rounds", "schedule")
        ),
    ),
    Area(
        "CPU",
        ("flashtile/backends/cpu/*",),
        (
            "tests/api/test_weights.py",
            "tests/api/test_merge.py",
            "tests/backends/cpu/test_cpu_backend.py",
            "tests/api/test_decode.py",
            "tests/backends/cpu/test_one_query.py",
            "tests/api/test_fp8_calls.py",
        ),
    ),
    Area(
        "cache",
        ("flashtile/kv_cache/*",),
        (
            "tests/kv_cache/test_manager.py",
            "tests/kv_cache/test_paged.py",
            "tests/kv_cache/test_refusals.py",
            "tests/kv_cache/test_steps.py",
        ),
    ),
    Area("server", ("flashtile/engine/server/*",), ("tests/engine/server/*",)),
    Area(
        "engine",
        ("flashtile/engine/*",),
        tuple(
            f"tests/engine/test_engine_{name}.py"
            for name in (
                "faults",
                "models",
                "sampling",
                "sampling_kernel",
                "scheduler",
                "speculation",
                "structured",
                "texts",
                "tokenizers",
                "upload",
            )
        ),
    ),
    Area("parallel", ("flashtile/parallel/*",), ("tests/parallel/*",)),
    Area(
        "integrations",
        ("flashtile/integrations/*", "flashtile/compat/*", "flashtile/nn.py", "flashtile/api/padding.py"),
        ("tests/integrations/*", "tests/compat/*", "tests/test_nn.py"),
    ),
)
"""All areas. A file belongs to the first area whose patterns match it."""

TESTS = (
    *(f"tests/{folder}/*" for folder in ("api", "checks", "compat", "compilation", "engine", "hardware")),
    *(f"tests/{folder}/*" for folder in ("integrations", "kv_cache", "masks", "op", "operators", "parallel")),
    *(f"tests/{folder}/*" for folder in ("problems", "reference", "testing")),
    *(f"tests/backends/{folder}/*" for folder in ("common", "cpu", "hopper", "portable")),
    *(f"tests/backends/test_{name}*" for name in ("[!c]", "con")),
    *(f"tests/scripts/test_{name}*" for name in ("compare", "hub", "run", "wheel")),
    "tests/docs/test_examples.py",
    "tests/gluon_interpreter/*",
    "tests/test_*.py",
)
"""Patterns of the test files that meet faults.

The rest of other folders is left out, because it tests code that is in no area: pages, pictures, benchmarks.
test_mutants.py is left out because it reads the source that faults change, and test_compile.py because it
compiles kernels for minutes without running them.
"""

NOT_PLANTED = json.loads(Path(__file__).with_name("not_planted.json").read_text("utf-8"))
"""Where no fault is planted, each with the reason.

``code`` lists functions and tables that change no result or run only on a GPU, by a pattern of paths and a
regular expression of names. ``faults`` lists single faults that change no result, by the text of the line.
"""


def area_of(file: str) -> str | None:
    """Return the name of a file's area, None if it is in no area; ``file`` is relative to the repository."""
    for area in AREAS:
        if any(fnmatchcase(file, pattern) for pattern in area.files):
            return area.name
    return None


def files_of(name: str) -> list[str]:
    """Return the files of an area, sorted, relative to the repository."""
    return [file for file in _files("flashtile", "*.py") if area_of(file) == name]


def files_matching(patterns: tuple[str, ...]) -> list[str]:
    """Return the test files that match one of ``patterns``, sorted, relative to the repository."""
    every = _files("tests", "test_*.py")
    return [file for file in every if any(fnmatchcase(file, pattern) for pattern in patterns)]


def unmatched() -> list[str]:
    """Return the patterns of areas and of ``TESTS`` that match no file, for example because files moved."""
    package, tests = _files("flashtile", "*.py"), _files("tests", "test_*.py")
    patterns = [(pattern, package) for area in AREAS for pattern in area.files]
    patterns += [(pattern, tests) for near in (*(area.near for area in AREAS), TESTS) for pattern in near]
    return [pattern for pattern, files in patterns if not any(fnmatchcase(f, pattern) for f in files)]


def _files(folder: str, name: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(name))
