"""Which backend serves a problem, with which configuration, and why not the others."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from flashtile.arguments import apply_autocast, make_options, refuse_descales
from flashtile.problem import PREFERENCE, Extras, Problem

ForwardLaunch = Callable[..., tuple[Tensor, Tensor]]
"""``(q, k, v, extras) -> (out, lse)``, both contiguous."""

BackwardLaunch = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
"""``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink)``; dout and dlse are contiguous, dlse may
be None; the results are contiguous; dsink, in the dtype of sink, is None without one."""


class Backend(Protocol):
    """What a package under ``flashtile.backends`` offers. Its launches validate nothing."""

    NAME: str

    def reason_against(self, problem: Problem, explicit: bool) -> str | None:
        """Why it does not serve the problem; None if it does. ``explicit``: it was asked for by name."""

    def configure(self, problem: Problem) -> Any:
        """The frozen configuration that the problem gets."""

    def prepare_forward(self, problem: Problem, config: Any) -> ForwardLaunch:
        """A launch for tensors of one signature, kept as long as calls of that signature may come."""

    def prepare_backward(self, problem: Problem, config: Any) -> BackwardLaunch:
        """A launch for tensors of one signature, likewise."""


@dataclass(frozen=True)
class Selection:
    """The backend that serves a problem, its configuration, and why those before it in preference do not."""

    backend: Backend
    config: Any
    reasons_against: dict[str, str] = field(hash=False)


@dataclass(frozen=True)
class Explanation:
    """What a call would get: the backend, its configuration, and each other backend's reason against.

    ``backend`` and ``config`` are None where no backend serves the call; ``str()`` gives a readable text.
    """

    problem: Problem
    backend: str | None
    config: Any
    reasons_against: dict[str, str]

    def __str__(self) -> str:
        lines = [f"backend: {self.backend}", f"config: {self.config}"]
        lines += [f"not {name}: {reason}" for name, reason in self.reasons_against.items()]
        return "\n".join([*lines, f"problem: {self.problem}"])


def load_backend(name: str) -> Backend:
    """Import a backend by name (one may need triton, which ``import flashtile`` must not)."""
    return cast(Backend, importlib.import_module(f"flashtile.backends.{name}"))


def select(problem: Any, name: str | None = None, load: Callable[[str], Any] | None = None) -> Selection:
    """The first backend in order of preference that serves ``problem``, or ``name`` and no other.

    Args:
        load: gives a backend by its name, or the part of it that serves such problems; None is
            :func:`load_backend`.

    Raises:
        ValueError: ``name`` is not a backend.
        NotImplementedError: no backend (or not the named one) serves the problem, with the reasons.
    """
    if name is not None and name not in PREFERENCE:
        raise ValueError(f"backend must be None or one of {', '.join(PREFERENCE)}, got {name!r}")
    reasons: dict[str, str] = {}
    for candidate in PREFERENCE if name is None else (name,):
        backend = (load or load_backend)(candidate)
        reason = backend.reason_against(problem, explicit=name is not None)
        if reason is None:
            return Selection(backend, backend.configure(problem), reasons)
        reasons[candidate] = reason
    listed = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    asked = "no backend serves this call" if name is None else f"backend={name!r} does not serve this call"
    raise NotImplementedError(f"{asked} ({listed})")


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    deterministic: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    backend: str | None = None,
) -> Explanation:
    """Say which backend and configuration :func:`flashtile.attention` would use for these arguments, and why.

    Nothing is launched and no data is read, so meta and fake tensors do as well. The arguments are those of
    :func:`flashtile.attention`, and so are the errors for arguments that no backend could take. For q, k and
    v of float8_e4m3fn, or from :func:`flashtile.fp8.quantize`, it is :func:`flashtile.fp8.explain`.
    """
    from flashtile.fp8 import Quantized
    from flashtile.fp8 import explain as explain_fp8

    given = (q, k, v)
    of_e4m3 = isinstance(q, Tensor) and q.dtype == torch.float8_e4m3fn
    if not of_e4m3:
        refuse_descales(q_descale, k_descale, v_descale, "for q, k and v of float8_e4m3fn")
    if of_e4m3 or any(isinstance(t, Quantized) for t in given):
        return explain_fp8(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, seqused_k=seqused_k, softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, sink=sink,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, backend=backend,
        )  # fmt: skip
    options = make_options(
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap, deterministic, backend
    )
    if torch._C._is_any_autocast_enabled():
        q, k, v = apply_autocast(q, k, v)
    extras = Extras(cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink)
    return explain_problem(Problem.from_tensors(q, k, v, extras, options), backend)


def explain_problem(
    problem: Problem, name: str | None, load: Callable[[str], Any] | None = None
) -> Explanation:
    """What ``problem`` would get if ``name`` is asked for; ``load`` is that of :func:`select`."""
    chosen: str | None = None
    config: Any = None
    reasons: dict[str, str] = {}
    for candidate in PREFERENCE:
        backend = (load or load_backend)(candidate)
        reason = backend.reason_against(problem, explicit=candidate == name)
        if reason is not None:
            reasons[candidate] = reason
        elif name is not None and candidate != name:
            reasons[candidate] = f"it could serve the call, but backend={name!r} was asked for"
        elif chosen is not None:
            reasons[candidate] = f"it could serve the call, but {chosen} comes first"
        else:
            chosen, config = candidate, backend.configure(problem)
    return Explanation(problem, chosen, config, reasons)
