"""The list of planted faults stays plantable: ``make mutants`` runs it."""

from __future__ import annotations

import shlex
from pathlib import Path

from script_runner import load_script

ROOT = Path(__file__).parents[1]
