"""The parts of backends that compute in FP8, between which :mod:`flashtile.dispatch` chooses.

A backend takes part with a subpackage ``fp8`` that offers what :class:`Backend` says, or a part of it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from flashtile.fp8.problem import Fp8Problem, QuantizeProblem

AttendLaunch = Callable[..., tuple[Tensor, Tensor]]
"""``(q, k, v, scales, extras) -> (out, lse)``, both contiguous."""

QuantizeLaunch = Callable[..., tuple[Tensor, Tensor]]
"""``(x, tensors, seed) -> (values, scales)``, both contiguous; seed is None without a transform."""


class Backend(Protocol):
    """What ``flashtile.backends.<name>.fp8`` offers. Its launches validate nothing."""

    def reason_against(self, problem: Fp8Problem | QuantizeProblem, explicit: bool) -> str | None:
        """Why it does not serve the problem; None if it does. ``explicit``: it was asked for by name."""

    def configure(self, problem: Fp8Problem | QuantizeProblem) -> Any:
        """The frozen configuration that the problem gets."""

    def prepare_forward(self, problem: Fp8Problem, config: Any) -> AttendLaunch:
        """A launch for tensors of one signature."""

    def prepare_quantize(self, problem: QuantizeProblem, config: Any) -> QuantizeLaunch:
        """A launch for tensors of one signature."""


class NoKernels:
    """Stands for a backend without a part that a problem needs."""

    def reason_against(self, problem: Fp8Problem | QuantizeProblem, explicit: bool) -> str:
        return "it has no FP8 kernels for this"


def load_attending(name: str) -> Any:
    """The FP8 attention of a backend."""
    return _load(name, "prepare_forward")


def load_quantizing(name: str) -> Any:
    """The FP8 quantisation of a backend."""
    return _load(name, "prepare_quantize")


def _load(name: str, function: str) -> Any:
    module = f"flashtile.backends.{name}.fp8"
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:  # no such package, or a folder without code
        return NoKernels()
    backend = importlib.import_module(module)
    return backend if hasattr(backend, function) else NoKernels()
