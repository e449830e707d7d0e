"""Reports which kernel a product would get, which measurement decided it, and the time to read its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashtile.api.explain import described_calls
from flashtile.api.linear import linear
from flashtile.hardware.linear_table import Found, find
from flashtile.op.selection import Choice, choose
from flashtile.problems.linear import LinearProblem

if TYPE_CHECKING:
    from flashtile.hardware.cards import Card


@dataclass(frozen=True)
class LinearExplanation:
    """The kernel chosen for a call of :func:`flashtile.linear.linear` or ``linear_qkv``, and its speed.

    Args:
        choice: backend, configuration, and the reason against each other backend.
        found: the row of the table of measurements that decided the choice, and why this row. None if no row
            has these dtypes.
        measured_us: time of the chosen kind of product in that row, without a fused epilogue. None if there
            is no row.
        floor_us: time to read that row's weight at the measured bandwidth of its card. It is a lower bound
            of ``measured_us``. None if there is no row.
    """

    choice: Choice
    found: Found | None
    measured_us: float | None
    floor_us: float | None

    @property
    def problem(self) -> LinearProblem:
        return self.choice.problem

    @property
    def backend(self) -> str | None:
        return self.choice.backend

    @property
    def config(self) -> Any:
        return self.choice.config

    @property
    def floor_share(self) -> float | None:
        """``floor_us / measured_us``. 1 means that the product takes no longer than reading the weight.

        None if there is no measured time.
        """
        if self.measured_us is None or self.floor_us is None:
            return None
        return self.floor_us / self.measured_us

    def __str__(self) -> str:
        lines = [str(self.choice)]
        if self.found is None:
            lines.append("table: no row for these dtypes, so by rule")
        else:
            row = self.found.row
            lines.append(
                f"table: {row.card}, weight {row.N} x {row.K} {row.weight_dtype} ({self.found.how}): gemv "
                f"below {row.gemv_below} rows, the library from {row.library_from}"
            )
        if self.measured_us is not None and self.floor_us is not None:
            lines.append(
                f"measured: {self.measured_us:.1f} us, {self.floor_share:.0%} of reading the weight in "
                f"{self.floor_us:.1f} us"
            )
        return "\n".join(lines)


def explain(*arguments: Any, card: Card | None = None, **keywords: Any) -> LinearExplanation:
    """Say which kernel a product would get, which measurement decided that, and the measured time.

    ``explain(x, weight)`` explains :func:`flashtile.linear.linear`. For another function, pass it first:
    ``explain(flashtile.linear.linear_qkv, x, ...)``. Nothing is launched, so meta and fake tensors also work.

    Args:
        arguments, keywords: those of the call, after its function.
        card: one of :data:`flashtile.io_model.CARDS`, to explain the call on that card instead of on the
            device of its tensors.

    Examples:
        >>> x, weight = torch.empty(1, 4096).bfloat16(), torch.empty(4096, 4096).bfloat16()
        >>> from flashtile.io_model import find_card
        >>> explanation = flashtile.linear.explain(x, weight, card=find_card("h200"))
        >>> explanation.found.row.card, explanation.found.how
        ('NVIDIA H200', 'measured for this shape')
        >>> explanation.floor_share > 0.5
        True
    """
    operation, problem, backend = described_calls(linear, arguments, keywords, card)[-1]
    name = "" if card is None else card.device_name
    if card is None and problem.device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(problem.device)
    choice = choose(operation, problem, backend)
    dtypes = (str(dtype).removeprefix("torch.") for dtype in (problem.dtype, problem.weight_dtype))
    found = find(name, problem.N, problem.K, *dtypes)
    kind = getattr(choice.config, "kind", None)
    if found is None or kind is None:
        return LinearExplanation(choice, found, None, None)
    measured = found.row.measured(problem.M, kind)
    floor_us = found.row.weight_bytes / found.row.read_tbps / 1e6
    return LinearExplanation(choice, found, None if measured is None else measured["us"], floor_us)
