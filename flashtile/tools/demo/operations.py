"""Time of GPT-2's attention: standard attention's operations compared with flashtile's one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashtile.tools.bench import runner
from flashtile.tools.bench.peers import Flashtile
from flashtile.tools.bench.workload import Workload
from flashtile.tools.bench.workloads import select
from flashtile.tools.demo.exactness import Check

QUICK_SEQLEN = 256


def workload_for(device: torch.device, dtype: torch.dtype, quick: bool) -> Workload:
    """Return the attention of one GPT-2 layer over 16 sequences of 1024 tokens; one sequence on a CPU.

    ``quick`` shortens the sequences to 256 tokens.
    """
    (found,) = select(["cpu-gpt2-s1024" if device.type == "cpu" else "gpt2-s1024"])
    found = replace(found, dtype=str(dtype).removeprefix("torch."))
    if quick:
        found = replace(found, name=f"gpt2-s{QUICK_SEQLEN}", seqlen_q=QUICK_SEQLEN, seqlen_k=QUICK_SEQLEN)
    return found


def measure(workload: Workload, device: torch.device) -> dict[str, Any]:
    """Measure a workload as ``flashtile bench --operations`` does, and return the cell of its document."""
    settings = runner.Settings(device, rounds=1, rep=50.0, operations=True)
    (cell,) = runner.measure_workload(workload, [Flashtile()], settings)
    return cell


def checks(cell: dict[str, Any]) -> list[Check]:
    """Check the results of flashtile and standard attention; no check if neither had enough memory."""
    sides = {"flashtile": cell["results"]["flashtile"], "standard attention": cell["operations"]}
    judged = {name: side for name, side in sides.items() if side["status"] in (runner.OK, runner.WRONG)}
    wrong = [f"{name}: {side['reason']}" for name, side in judged.items() if side["status"] != runner.OK]
    detail = "; ".join(wrong) or f"{' and '.join(judged)} within the error rule"
    return [Check("GPT-2's attention is right before it is timed", not wrong, detail)] if judged else []
