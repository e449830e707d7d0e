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
        ("flashtile/masks/*", "flashtile/operators/mask*", "flashtile/problems/mask*", "flashtile/api/mask*"),
        ("tests/masks/*", "tests/attn/test_derivatives.py"),
    ),
    Area(
        "operators",
        (
            *(f"flashtile/{folder}/*" for folder in ("api", "checks", "op", "operators", "problems")),
            *(f"flashtile/{file}.py" for file in ("caches", "dropout")),
        ),
        (
            "tests/attn/test_functional.py",
            "tests/attn/test_bad_input.py",
            "tests/attn/test_merge.py",
            "tests/attn/test_tma_obstacles.py",
            "tests/op/test_selection.py",
            "tests/op/test_launch_keys.py",
            "tests/op/test_refused_calls.py",
            "tests/op/test_results_into.py",
            "tests/decode/test_decode_operators.py",
            "tests/decode/test_decode_bad_input.py",
            "tests/decode/test_append.py",
            "tests/fp8/test_fp8_calls.py",
            "tests/fp8/test_fp8_gradients.py",
            "tests/test_caches.py",
        ),
    ),
    Area(
        "portable",
        ("flashtile/backends/portable/*", "flashtile/backends/common/*", "flashtile/backends/libcuda.py"),
        (
            "tests/attn/test_weights.py",
            "tests/attn/test_partial_results.py",
            "tests/backends/test_kernel_cache.py",
            "tests/backends/test_keys.py",
            "tests/backends/test_cached_launches.py",
            "tests/backends/test_direct_launch.py",
            "tests/backends/test_compile_report.py",
            "tests/decode/test_decode_kernels.py",
            "tests/linear/*",
            "tests/parallel/test_symmetric.py",
        ),
    ),
    Area(
        "Hopper",
        ("flashtile/backends/hopper/*",),
        tuple(
            f"tests/backends/test_hopper_{name}.py"
            for name in ("dq_accum", "interpreted", "rounds", "schedule")
        ),
    ),
    Area(
        "CPU",
        ("flashtile/backends/cpu/*",),
        (
            "tests/attn/test_weights.py",
            "tests/attn/test_merge.py",
            "tests/backends/test_cpu_backend.py",
            "tests/decode/test_decode.py",
            "tests/decode/test_one_query.py",
            "tests/fp8/test_fp8_calls.py",
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
    Area("server", ("flashtile/engine/server/*", "flashtile/server/*"), ("tests/engine/server/*",)),
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
        ("tests/integrations/*",),
    ),
)
"""All areas. A file belongs to the first area whose patterns match it."""

TESTS = (
    *(f"tests/{folder}/*" for folder in ("attn", "compilation", "decode", "engine", "fp8", "integrations")),
    *(f"tests/{folder}/*" for folder in ("kv_cache", "linear", "masks", "op", "parallel")),
    *(f"tests/backends/test_{name}*" for name in ("[!c]", "compare", "cpu", "compile_")),
    "tests/bench/test_flash1_loops.py",
    "tests/docs/test_examples.py",
    "tests/test_[!m]*.py",
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
    every = (path.relative_to(ROOT).as_posix() for path in (ROOT / "flashtile").rglob("*.py"))
    return sorted(file for file in every if area_of(file) == name)


def files_matching(patterns: tuple[str, ...]) -> list[str]:
    """Return the test files that match one of ``patterns``, sorted, relative to the repository."""
    every = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    return sorted(file for file in every if any(fnmatchcase(file, pattern) for pattern in patterns))
