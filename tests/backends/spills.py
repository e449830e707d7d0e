"""Register spills that are accepted: ``spills.json`` has bytes by architecture and name of the compile case.

A case that it does not name must spill nothing. For sm_80 and sm_90a, the bytes are the larger of those with
Triton 3.6 and 3.7, and a measurement showed that the configuration is faster than those that spill less,
except for kernels that nobody timed (masks, biases, dropout, functions, weights and latent queries of the
portable kernels, statistics, tangents and mass). For other architectures, and for statistics and tangents,
they are bytes that were seen with Triton 3.7.1.
"""

from __future__ import annotations

import json
from pathlib import Path

from flashtile.tools.inspection.report import CompileReport

SPILLS: dict[str, dict[str, int]] = json.loads(Path(__file__).with_name("spills.json").read_text())


def accepted(arch: str, name: str) -> int:
    """Return the bytes of spill stores that are accepted for a case."""
    return SPILLS.get(arch, {}).get(name, 0)


def beyond_limits(found: CompileReport) -> list[str]:
    """Return the violations of a report, and its spills if they are more than accepted."""
    budget = accepted(found.arch, found.name)
    spilled = [f"{found.spill_stores} bytes of spill stores, {budget} accepted"]
    return found.violations + (spilled if found.spill_stores > budget else [])
