"""All results of a demo, the conclusions from them, and the files that they are written to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flashtile import explain
from flashtile.backends.cpu.config import Fused
from flashtile.hardware import machine
from flashtile.learn.io_model.tables import format_bytes, format_seconds
from flashtile.tools.demo import exactness, operations, scaling
from flashtile.tools.demo.exactness import Check
from flashtile.tools.demo.operations import DROP, DROPOUT
from flashtile.tools.demo.scaling import Cost, ScalingRow
from flashtile.tools.demo.training import Agreement, TrainingConfig, TrainingResult, bits_per_byte
from flashtile.tools.page import INK, as_svg, figure_of, length_axis, operation_bars, render

LEARNED_BITS = 6.0
"""Maximum bits per byte of the trained model.

Even the shortest run stays below it if gradients are correct.
"""


@dataclass(frozen=True)
class Setting:
    """The machine, and the backends that dispatch chooses for two calls.

    ``device`` is the device in use. ``devices`` are all devices that torch can use. ``served`` has each call
    with its backend, configuration and reasons against other backends, as ``flashtile.explain`` reports them.
    """

    device: str
    dtype: str
    versions: dict[str, str | None]
    devices: list[dict[str, Any]]
    served: list[dict[str, Any]]

    @property
    def device_name(self) -> str:
        index = "cuda:0" if self.device == "cuda" else self.device
        return next((d["name"] for d in self.devices if d["device"] == index), self.device)

    def machine_lines(self) -> list[str]:
        """Return a line for each device with its cores or SMs and memory, and a line of software versions."""
        lines = []
        for d in self.devices:
            size = f"{d['cores']} cores" if "cores" in d else f"{d['sm_count']} SMs"
            memory = [] if d["memory_bytes"] is None else [format_bytes(d["memory_bytes"])]
            lines.append(f"{d['device']}: {', '.join([d['name'], d['capability'], size, *memory])}")
        return [*lines, ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)]

    def served_lines(self) -> list[str]:
        """Return a line for each call, with the backend that computes it.

        The other backends follow, each with the reason why it cannot compute a call.
        """
        where = f"{self.dtype} on {self.device}"
        lines = [f"{call['call']}, {where}: {call['kernel']}" for call in self.served]
        against = {reason for call in self.served for reason in call["reasons_against"].items()}
        return lines + [f"not by {name}: {reason}" for name, reason in sorted(against)]


def natural_dtype(device: torch.device) -> torch.dtype:
    """Return the usual dtype of a device: float32 on a CPU; on a GPU bfloat16 if supported, else float16."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def inspect_setting(device: torch.device, dtype: torch.dtype) -> Setting:
    """Describe the machine, and find the backends that dispatch chooses for two calls.

    One call is causal. The other also has a window, a soft cap and ALiBi.
    """
    q = torch.empty(1, 1024, 8, 64, dtype=dtype, device=device)
    slopes = torch.ones(8, device=device)
    every: dict[str, Any] = {"window_size": (256, 0), "softcap": 30.0, "alibi_slopes": slopes}
    served = []
    for call, options in (("causal", {}), ("causal, window, soft-cap, ALiBi", every)):
        found = explain(q, q, q, causal=True, **options)
        kernel = f"the kernel of flashtile's backend {found.backend}"
        if found.backend == "cpu":
            fused = isinstance(found.config.forward, Fused)
            kernel = (
                "PyTorch's own flash kernel" if fused else "flashtile's tiles, made of PyTorch's operations"
            )
        reasons = {"config": str(found.config), "reasons_against": found.reasons_against}
        served.append({"call": call, "backend": found.backend, "kernel": kernel} | reasons)
    name = str(dtype).removeprefix("torch.")
    return Setting(str(device), name, machine.versions(), machine.devices(), served)


@dataclass(frozen=True)
class Training:
    """A run with flashtile's attention, the same with standard attention (``twin``), and a sampled text."""

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
                f"{bits:.2f} bits a byte on files it never saw, {LEARNED_BITS:g} allowed, 8 by guessing",
            ),
        ]


@dataclass(frozen=True)
class Results:
    started: datetime
    seconds: float
    quick: bool
    setting: Setting
    exactness: list[exactness.Exactness]
    workload: scaling.ScalingWorkload
    scaling: list[scaling.ScalingRow]
    operations: dict[str, Any]
    """Cell that ``demo.operations`` measured."""
    training: Training

    def checks(self) -> list[Check]:
        timed = [*scaling.checks(self.scaling), *operations.checks(self.operations)]
        return [exactness.check(self.exactness), *timed, *self.training.checks()]

    def as_json(self) -> str:
        """Return all measurements, and the numbers computed from them, as JSON."""
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

    The report is one self-contained page. It includes its style, and its pictures as SVG elements.

    Args:
        page: file name of the interactive page in the same folder, for the report to link to.
    """
    training = results.training
    losses = training.result.losses, training.twin.losses, training.validation_loss
    figures = {
        "time": time_figure(results.scaling),
        "memory": memory_figure(results.scaling),
        "loss": loss_figure(*losses),
    }
    if results.operations["operations"]["status"] == "ok":
        figures["operations"] = operations_figure(results.operations)
    html = render(
        "flashtile.tools.demo",
        "report.html.jinja",
        results=results,
        page=page,
        setting=results.setting,
        training=training,
        checks=results.checks(),
        claim=claim(results),
        findings=findings(results),
        bars=bars(scaling.compared(results.scaling)),
        compared=scaling.compared(results.scaling),
        exactness=exactness.table(results.exactness),
        scaling=scaling.table(results.scaling),
        score_matrices=scaling.SCORE_MATRICES,
        dropout=DROPOUT,
        pictures={name: themed_svg(figure) for name, figure in figures.items()},
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


ALONE = "Exact attention, without the score matrix"
"""Headline if nothing was compared, or nothing was better."""


def claim(results: Results) -> str:
    """Return the headline: speed and memory if every check holds, otherwise how many checks failed."""
    checks = results.checks()
    failed = sum(not check.holds for check in checks)
    if failed:
        return f"{failed} of {len(checks)} checks failed"
    row = scaling.compared(results.scaling)
    if row is None or row.speed_up is None:
        return ALONE
    better = [f"{_factor(row.speed_up)} times as fast"] if row.speed_up > 1 else []
    if row.memory_ratio is not None and row.memory_ratio > 1:
        better.append(f"with {_factor(row.memory_ratio)} times less memory")
    return f"Exact attention, {' '.join(better)}" if better else ALONE


def findings(results: Results) -> dict[str, str]:
    """Return a sentence for each section of the report, by the name of the section."""
    agreement, bits = results.training.agreement, bits_per_byte(results.training.validation_loss)
    return {
        "scaling": scaling_finding(results.scaling),
        "exactness": _exactness(results.exactness),
        "operations": _operations(results.operations),
        "training": (
            f"The two loss curves are at most {agreement.largest_difference:.1e} nats per byte apart, and "
            f"the model needs {bits:.2f} bits per byte of files that it never saw (guessing takes 8)."
        ),
    }


def _exactness(measured: Sequence[exactness.Exactness]) -> str:
    check = exactness.check(measured)
    if not check.holds:
        return f"Results are {check.detail}."
    count = len(measured) * len(exactness.RESULTS)
    return f"All {count} results are as close to float64 as the error rule allows."


def scaling_finding(rows: Sequence[ScalingRow]) -> str:
    """Compare flashtile with standard attention and SDPA, in a sentence for the terminal and the report."""
    row = scaling.compared(rows)
    if row is None or row.standard is None:
        return "Standard attention ran at none of the lengths."
    time = f"takes {_compared(row.flashtile.milliseconds, row.standard.milliseconds)}"
    ours, theirs = row.flashtile.peak_bytes, row.standard.peak_bytes
    sdpa = "" if row.sdpa is None else f" PyTorch's SDPA takes {format_seconds(row.sdpa.milliseconds / 1e3)}."
    if row.memory_ratio is None or ours is None or theirs is None:
        return f"At {row.seqlen:,} tokens a pass {time}.{sdpa}"
    sizes = f"It needs {format_bytes(ours)} instead of {format_bytes(theirs)}"
    return f"At {row.seqlen:,} tokens a pass {time}. {sizes}, {_factor(row.memory_ratio)} times less.{sdpa}"


def _operations(cell: dict[str, Any]) -> str:
    """Return a sentence that compares flashtile's time with the sum of standard attention's operations.

    Both times include dropout if flashtile was timed with dropout. Otherwise both exclude it.
    """
    found = cell["operations"]
    if found["status"] != "ok":
        return f"Standard attention was not taken apart: {found['reason']}."
    dropped = found.get("fused_dropout_ms")
    ours = cell["results"]["flashtile"].get("ms") if dropped is None else dropped
    theirs = found["together_ms"] - (found["ms"][DROP] if dropped is None else 0.0)
    if ours is None:
        return f"Standard attention takes {format_seconds(theirs / 1e3)}; flashtile was not timed."
    return f"A forward pass takes {_compared(ours, theirs)}."


def _compared(ours: float, theirs: float) -> str:
    """Compare two times in milliseconds."""
    times = f"{format_seconds(ours / 1e3)} instead of {format_seconds(theirs / 1e3)}"
    if ours > theirs:
        longer = f"{_factor(ours / theirs)} times as long"
        return f"{times}, {longer} (the scores fit into caches, or other programs use this machine)"
    return f"{times}, {_factor(theirs / ours)} times as fast"


def _factor(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


OURS, THEIRS, SDPA = "#08708f", "#c2413b", "#2e7d4f"
VARIABLES = {OURS: "--q", THEIRS: "--k", SDPA: "--v"}
"""CSS variable of the page for each colour. On a dark page the variable has another value."""

OPERATIONS = ("#e88f88", "#efb3ae", "#e29aa9", "#f0c4cf", "#d3b8bd")
"""Colours of standard attention's operations, light enough for black text."""

HALF_WIDTH = (5.4, 3.6)
"""Inches of a figure that has half of the page's width."""


def bars(row: ScalingRow | None) -> dict[str, list[dict[str, Any]]]:
    """Return the bars "Time" and "Memory" that compare standard attention with flashtile at one length.

    The ``share`` of a bar is its length divided by that of the longest bar.
    """
    if row is None or row.standard is None:
        return {}
    ours, theirs = row.flashtile, row.standard
    sides = [("standard attention", theirs, THEIRS), ("flashtile", ours, OURS)]
    if row.sdpa is not None:
        sides.insert(1, ("PyTorch's SDPA", row.sdpa, SDPA))

    def compared(
        value: Callable[[Cost], float | None], described: Callable[[float], str]
    ) -> list[dict[str, Any]]:
        values = [(label, value(cost) or 0.0, VARIABLES[color]) for label, cost, color in sides]
        longest = max(number for _, number, _ in values)
        return [
            {"label": label, "value": described(number), "share": number / longest, "color": color}
            for label, number, color in values
        ]

    found = {"Time": compared(lambda cost: cost.milliseconds / 1e3, format_seconds)}
    if ours.peak_bytes and theirs.peak_bytes:
        found["Memory"] = compared(lambda cost: cost.peak_bytes, lambda size: format_bytes(round(size)))
    return found


def themed_svg(figure: Figure) -> str:
    """Return an SVG element in which the CSS variables of the page replace the two main colours."""
    svg = as_svg(figure)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable}, {color})")
    return svg


def time_figure(rows: Sequence[ScalingRow]) -> Figure:
    """Plot the milliseconds of a pass by sequence length on logarithmic axes."""
    return _pass_figure(rows, "Time of a pass", lambda cost: cost.milliseconds, 10, _duration)


def memory_figure(rows: Sequence[ScalingRow]) -> Figure:
    """Plot the peak bytes of a pass by sequence length on logarithmic axes."""
    title = "Peak memory of a pass, beyond q, k and v"
    return _pass_figure(rows, title, lambda cost: cost.peak_bytes, 2, format_bytes)


def operations_figure(cell: dict[str, Any]) -> Figure:
    """Plot the milliseconds of each operation of standard attention, and those of flashtile's call."""
    title = f"Forward pass of GPT-2's attention: {cell['shape']}"
    with mpl.rc_context({"axes.prop_cycle": cycler(color=[OURS, *OPERATIONS])}):
        return figure_of(lambda axes: operation_bars(axes, cell, "flashtile"), title)


def loss_figure(losses: Sequence[float], twin: Sequence[float], validation: float) -> Figure:
    """Plot the training loss in nats per byte by step, and the final validation loss.

    ``losses`` are those of flashtile, and ``twin`` those of the same run with standard attention. The running
    mean of each run is a strong line. The loss of each step with flashtile is a faint line.
    """

    def draw(axes: Axes) -> None:
        window = max(1, len(losses) // 40)
        axes.plot(range(1, len(losses) + 1), losses, color=OURS, linewidth=0.8, alpha=0.3)
        for curve, color, style, label in (
            (losses, OURS, "-", "flashtile"),
            (twin, THEIRS, (0, (2, 2)), f"standard attention,\nthe same {len(twin)} steps"),
        ):
            mean = running_mean(curve, window)
            axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2, linestyle=style, label=label)
        axes.plot([len(losses)], [validation], "o", color=INK, fillstyle="none", label="files it never saw")
        axes.set_xlabel("step", fontsize=8)

    return figure_of(draw, "Training loss, nats per byte")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the running mean: element i is the mean of the last ``window`` values up to value i."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _pass_figure(
    rows: Sequence[ScalingRow],
    title: str,
    value: Callable[[Cost], float | None],
    base: int,
    text_of: Callable[[float], str],
) -> Figure:
    """Plot ``value`` by sequence length: a curve each for flashtile, PyTorch's SDPA and standard attention.

    Lengths that standard attention cannot run are marked. ``text_of`` formats numbers of the y axis.
    """

    def draw(axes: Axes) -> None:
        for name, label, color in (
            ("standard", "standard attention", THEIRS),
            ("sdpa", "PyTorch's SDPA", SDPA),
            ("flashtile", "flashtile", OURS),
        ):
            costs = ((row.seqlen, getattr(row, name)) for row in rows)
            points = [(seqlen, found) for seqlen, cost in costs if cost and (found := value(cost))]
            if not points:
                continue
            seqlens, values = zip(*points, strict=True)
            axes.plot(seqlens, values, "o-", color=color, linewidth=1.8, markersize=4.5, label=label)
        for row in rows:
            if row.obstacle is not None:
                reason = "does not fit" if "does not fit" in row.obstacle else "left out"
                axes.axvline(row.seqlen, color=THEIRS, linewidth=0.9, linestyle=":")
                axes.annotate(
                    f"standard {reason}", (row.seqlen, 0.04), xycoords=("data", "axes fraction"), rotation=90,
                    ha="right", va="bottom", fontsize=8, color=THEIRS,
                )  # fmt: skip
        length_axis(axes, [row.seqlen for row in rows])
        axes.margins(y=0.14)
        axes.set_yscale("log", base=base)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: text_of(number)))

    figure = figure_of(draw, title)
    figure.axes[0].legend(loc="upper left", frameon=False, fontsize=8, labelcolor=INK)
    figure.set_size_inches(HALF_WIDTH)
    return figure


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:g} s" if milliseconds >= 1e3 else f"{milliseconds:g} ms"
