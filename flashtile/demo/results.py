"""All that a demo measured, and the files that it becomes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flashtile.bench.operations import DROPOUT
from flashtile.bench.report_charts import as_svg
from flashtile.bench.report_page import render
from flashtile.demo import exactness, operations, plots, scaling
from flashtile.demo.agreement import Agreement
from flashtile.demo.check import Check
from flashtile.demo.setting import Setting
from flashtile.demo.training import TrainingConfig, TrainingResult, bits_per_byte

LEARNED_BITS = 6.0
"""What the model may need at most, so that even the shortest run shows whether gradients lead anywhere."""


@dataclass(frozen=True)
class Training:
    """A run with flashtile, its twin with standard attention, and what the first learned to write."""

    config: TrainingConfig
    corpus: str
    corpus_files: int
    train_bytes: int
    validation_bytes: int
    threads: int
    result: TrainingResult
    twin: TrainingResult
    agreement: Agreement
    validation_loss: float
    prompt: str
    sample: str

    def checks(self) -> list[Check]:
        found, allowed = self.agreement, self.agreement.tolerance
        bits = bits_per_byte(self.validation_loss)
        return [
            Check(
                "loss curve agrees with standard attention's",
                found.holds,
                f"at most {found.early_difference:.1e} nats a byte apart in {found.early_steps} steps "
                f"({allowed.early:g} allowed), {found.largest_difference:.1e} in {found.steps} "
                f"({allowed.whole:g} allowed)",
            ),
            Check(
                "the model learned",
                bits <= LEARNED_BITS,
                f"{bits:.2f} bits a byte on files it never saw, {LEARNED_BITS:g} allowed, 8 is ignorance",
            ),
        ]


@dataclass(frozen=True)
class Results:
    started: datetime
    seconds: float
    quick: bool
    setting: Setting
    exactness: list[exactness.Exactness]
    workload: scaling.Workload
    scaling: list[scaling.Row]
    operations: dict[str, Any]
    """The cell of ``demo.operations``."""
    training: Training

    def checks(self) -> list[Check]:
        timed = [*scaling.checks(self.scaling), *operations.checks(self.operations)]
        return [exactness.check(self.exactness), *timed, *self.training.checks()]

    def as_json(self) -> str:
        """Every number, and the numbers that follow from them."""
        record = asdict(self) | {"started": self.started.isoformat(timespec="seconds")}
        record["setting"]["device_name"] = self.setting.device_name
        record["checks"] = [asdict(check) for check in self.checks()]
        record["passed"] = all(check.holds for check in self.checks())
        for row, entry in zip(self.scaling, record["scaling"], strict=True):
            entry |= {"speed_up": row.speed_up, "memory_ratio": row.memory_ratio}
        record["training"]["bits_per_byte"] = bits_per_byte(self.training.validation_loss)
        return json.dumps(_finite(record), indent=2, allow_nan=False) + "\n"


def write(results: Results, folder: Path, page: str | None = None) -> list[Path]:
    """Write ``results.json``, the figures and ``report.html``, replacing those of an earlier run.

    The report is one page that needs nothing else: style and pictures, SVG elements, are inside.

    Args:
        page: file name of the interactive page in the same folder, for the report to link to.
    """
    training = results.training
    losses = training.result.losses, training.twin.losses, training.validation_loss
    figures = {
        "time": plots.time_figure(results.scaling),
        "memory": plots.memory_figure(results.scaling),
        "loss": plots.loss_figure(*losses),
    }
    if results.operations["operations"]["status"] == "ok":
        figures["operations"] = plots.operations_figure(results.operations)
    html = render(
        "flashtile.demo",
        "report.html.jinja",
        results=results,
        page=page,
        setting=results.setting,
        training=training,
        checks=results.checks(),
        bits_per_byte=bits_per_byte(training.validation_loss),
        exactness=exactness.table(results.exactness),
        scaling=scaling.table(results.scaling),
        score_matrices=scaling.SCORE_MATRICES,
        dropout=DROPOUT,
        pictures={name: as_svg(figure) for name, figure in figures.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        folder / name for name in ("results.json", *(f"{name}.png" for name in figures), "report.html")
    ]
    written[0].write_text(results.as_json())
    for path, figure in zip(written[1:], figures.values(), strict=False):
        figure.savefig(path, dpi=160, facecolor="white")
    written[-1].write_text(html)
    return written


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: say them in words."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
