"""Which backend serves a decoding call: the first of the preference that does, or the one that is named.

A backend takes part with a subpackage ``decode`` that offers what :class:`Backend` says.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol, cast

from flashtile.decode.problem import AppendProblem, CombineProblem, CopyProblem, DecodeProblem
from flashtile.problem import PREFERENCE

AnyProblem = DecodeProblem | AppendProblem | CombineProblem | CopyProblem
Launch = Callable[..., Any]


class Backend(Protocol):
    """What ``flashtile.backends.<name>.decode`` offers. Its launches validate nothing."""

    def reason_against(self, problem: AnyProblem, explicit: bool) -> str | None:
        """Why it does not serve the problem; None if it does. ``explicit``: it was asked for by name."""

    def prepare_decode(self, problem: DecodeProblem) -> Launch:
        """``(q, k_cache, v_cache, *CacheTensors, return_lse=True) -> (out, lse)``, both contiguous; lse may
        be None unless ``return_lse``."""

    def prepare_append(self, problem: AppendProblem) -> Launch:
        """``(k_cache, v_cache, k, v, *AppendTensors) -> None``, writing the caches and ``q_rotated``."""

    def prepare_combine(self, problem: CombineProblem) -> Launch:
        """``(out_partial, lse_partial) -> (out, lse)`` from (num_splits, batch, seqlen, heads, head_dim) and
        (num_splits, batch, seqlen, heads) with any strides; out (batch, seqlen, heads, head_dim) and lse
        (batch, heads, seqlen), contiguous."""

    def prepare_copy(self, problem: CopyProblem) -> Launch:
        """``(k_cache, v_cache, block_pairs, k_descale, v_descale) -> None``, all with layers in front."""


def select(problem: AnyProblem, name: str | None = None) -> Backend:
    """The backend's subpackage that serves the problem.

    Raises:
        NotImplementedError: no backend (or not the named one) serves it, with the reasons.
    """
    reasons = []
    for candidate in PREFERENCE if name is None else (name,):
        module = f"flashtile.backends.{candidate}.decode"
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # no such package, or a folder without code
            reasons.append(f"{candidate}: it has no kernels for decoding")
            continue
        backend = cast(Backend, importlib.import_module(module))
        reason = backend.reason_against(problem, explicit=name is not None)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    asked = "no backend serves this call" if name is None else f"backend={name!r} does not serve this call"
    raise NotImplementedError(f"{asked} ({'; '.join(reasons)})")
