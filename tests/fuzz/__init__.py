"""``make fuzz``: random calls of every public function against an oracle in float64, and random bad calls.

``oracle.py`` is plain torch and shares no code with the package. ``runner.py`` runs, shrinks and prints calls. Every
other module is a family of calls with a function ``draw(rng) -> Call``.
"""

from __future__ import annotations

import importlib
from functools import partial

FAMILIES = {
    name: partial(importlib.import_module, f"fuzz.{name}")
    for name in (
        "attention",
        "functions",
        "closures",
        "caches",
        "fp8",
        "linear",
        "sampling",
        "doors",
        "hugging_face",
        "parallel",
        "manager",
        "engine",
        "bad_calls",
    )
}
"""Functions that import the module of a family, by the family's name."""
