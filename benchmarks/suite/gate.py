"""The correctness gate: a contestant is timed only if its results on the timed inputs meet the error rule.

The error rule is that of :mod:`flashtile.testing`. The reference is standard attention in float32 (float64
for float32 inputs), computed head by head in chunks of query rows, to limit its memory. If all heads would
take too long, a random sample of heads is compared. All elements of the results must be finite. For FP8, the
allowed error is that of exact attention over q, k and v quantised to e4m3 with one scale per tensor.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.inputs import Inputs, residual
from benchmarks.suite.mods import MODS
from benchmarks.suite.workload import Workload
from flashtile import testing
from flashtile.reference import attention as reference
from flashtile.rounding import SCORE_UNITS

RESULTS = ("out", "dq", "dk", "dv")
SCORES_CHECKED = {"cuda": 2**31, "cpu": 2**25}
"""Maximum number of scores that the reference computes for a workload (at least one head), by device type."""

HEADS_CHECKED = 64
"""Maximum number of key/value heads that are compared."""

CHUNK_SCORES = {"cuda": 2**25, "cpu": 2**19}
"""Number of scores that the reference holds in memory at once, by device type."""

LARGEST_SCORE = 6.0
"""Approximate largest score of standard normal q and k, scaled by ``head_dim ** -0.5``."""


@dataclass(frozen=True)
class Head:
    """A key/value head of one sequence, with the query heads that share it."""

    sequence: int
    kv_head: int


class Oracle:
    """Reference results of a workload on a sample of heads: exact results, and results of plain PyTorch.

    The results of plain PyTorch are computed in the dtype of the inputs. They set the allowed error.
    """

    def __init__(self, workload: Workload, inputs: Inputs, gradients: bool) -> None:
        self._workload, self._inputs = workload, inputs
        self.heads = sample_heads(workload, inputs.q.device.type)
        """Heads that are compared."""
        wide = torch.float32 if workload.torch_dtype.itemsize < 4 else torch.float64
        self._exact = self._compute(inputs, wide, gradients)
        if workload.fp8:
            rounded: dict[str, Any] = {name: through_e4m3(getattr(inputs, name)) for name in "qkv"}
            inputs = replace(inputs, **rounded)
        self._plain = self._compute(inputs, wide if workload.fp8 else workload.torch_dtype, gradients)

    def check(self, results: dict[str, Tensor]) -> list[testing.Comparison]:
        """Compare results, named as in ``RESULTS``, with the exact results on the sampled heads.

        Raises:
            ArithmeticError: some element of a result is not finite.
        """
        comparisons = []
        for name, result in results.items():
            if not torch.isfinite(result).all():
                raise ArithmeticError(f"{name} holds infinities or NaN")
            side = 0 if name in ("out", "dq") else 1
            sample = torch.cat([self._head(result, head, side).flatten() for head in self.heads])
            exact, plain = self._exact[name], self._plain[name].to(sample.dtype)
            comparisons.append(
                testing.compare(
                    name, sample, exact, plain, factor=testing.FACTORS[name], noise=self._noise(exact)
                )
            )
        return comparisons

    def _noise(self, exact: Tensor) -> tuple[float, float]:
        """Return the absolute error (largest, rms) that rounding in the accumulator may cause.

        P is exp(score - lse). A small absolute error of the score or of lse is therefore an equal relative
        error of P and of the result.
        """
        eps = torch.finfo(torch.promote_types(self._workload.source_dtype, torch.float32)).eps
        lse = math.log(max(1, self._workload.seqlen_k)) + 1.0
        relative = SCORE_UNITS * eps * (LARGEST_SCORE + lse)
        values = exact.double()
        return relative * values.abs().max().item(), relative * values.square().mean().sqrt().item()

    def _head(self, tensor: Tensor, head: Head, side: int) -> Tensor:
        """Return the part of ``tensor`` that belongs to a head.

        For queries (side 0) this is (seqlen_q, group, head_dim), for keys (side 1) (seqlen_k, 1, head_dim).
        """
        rows = (self._inputs.rows_of, self._inputs.keys_of)[side](tensor, head.sequence)
        group = self._workload.group_size if side == 0 else 1
        return rows[:, head.kv_head * group : (head.kv_head + 1) * group]

    def _compute(self, inputs: Inputs, dtype: torch.dtype, gradients: bool) -> dict[str, Tensor]:
        names = RESULTS if gradients else RESULTS[:1]
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for head in self.heads:
            q, dout = (self._head(t, head, 0).to(dtype) for t in (inputs.q, inputs.dout))
            k, v = (inputs.keys_of(t, head.sequence)[:, head.kv_head].to(dtype) for t in (inputs.k, inputs.v))
            if inputs.qv is not None:
                q = torch.cat([q, self._head(inputs.qv, head, 0).to(dtype)], -1)
                k = torch.cat([k, v], -1)
            by_head = {
                name: t[head.kv_head * q.shape[1] : (head.kv_head + 1) * q.shape[1]].to(dtype)
                for name in ("alibi_slopes", "sink")
                if (t := getattr(inputs, name)) is not None
            }
            moving = [
                self._head(t, head, side).to(dtype)
                for t, side in zip(inputs.tangents, (0, 1, 1), strict=False)
            ]
            results = _attend_head(self._workload, head, q, k, v, dout, by_head, gradients, moving)
            for name, result in zip(names, results, strict=True):
                parts[name].append(result.flatten())
        return {name: torch.cat(results) for name, results in parts.items()}


def through_e4m3(x: Tensor) -> Tensor:
    """Round x to e4m3 with one scale for the tensor, and return the rounded values in float32."""
    scale = x.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def sample_heads(workload: Workload, device_type: str) -> list[Head]:
    """Return the key/value heads to compare.

    If all heads are too many, these are the first, the last and a random sample. The sample depends only on
    the workload's name.
    """
    every = [
        Head(sequence, kv_head)
        for sequence in range(len(workload.sequences))
        for kv_head in range(workload.num_heads_kv)
    ]
    drawn = random.Random(workload.name).sample(every[1:-1], len(every[1:-1]))
    chosen: list[Head] = []
    left = SCORES_CHECKED[device_type]
    for head in dict.fromkeys([every[0], every[-1], *drawn]):
        seqlen_q, seqlen_k = workload.sequences[head.sequence]
        left -= seqlen_q * seqlen_k * workload.group_size
        if chosen and (left < 0 or len(chosen) == HEADS_CHECKED):
            break
        chosen.append(head)
    return chosen


def _attend_head(
    workload: Workload,
    head: Head,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    by_head: dict[str, Tensor],
    gradients: bool,
    moving: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Return (out,) or, with ``gradients``, (out, dq, dk, dv) of one key/value head.

    q and dout are (seqlen_q, group, head_dim), k and v are (seqlen_k, head_dim), and the tensors of
    ``by_head`` are (group,). dk and dv are summed over chunks of query rows in float32 or wider.
    ``moving`` are the tangents of q, k and v in forward mode, of which out is the :func:`residual`.
    """
    k, v = (t.detach().requires_grad_(gradients) for t in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros_like(t, dtype=wide) for t in (k, v))
    outs, dqs = [torch.empty_like(dout[:0])], [torch.empty_like(q[:0])]
    step = max(1, CHUNK_SCORES[q.device.type] // max(1, k.shape[0] * q.shape[1]))
    for start in range(0, q.shape[0], step):
        rows = q[start : start + step].detach().requires_grad_(gradients)
        position = start + k.shape[0] - q.shape[0]
        attend: Callable[..., Tensor] = partial(_attend_rows, workload, head, position=position, **by_head)
        if moving:
            of_q, *of_keys = moving
            along = of_q[start : start + step], *(t[:, 0] for t in of_keys)
            out = residual(attend, (rows, k, v), along)
        else:
            out = attend(rows, k, v)
        outs.append(out.detach())
        if gradients:
            dq, *shares = torch.autograd.grad(out, (rows, k, v), dout[start : start + step])
            dqs.append(dq)
            dk += shares[0]
            dv += shares[1]
    out = torch.cat(outs)
    return (out, torch.cat(dqs), dk.to(k.dtype), dv.to(v.dtype)) if gradients else (out,)


def _attend_rows(
    workload: Workload,
    head: Head,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: int,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return out (rows, group, head_dim) of query rows; the first row is aligned with key ``position``."""
    rows, group = q.shape[:2]
    own = range(position, position + rows)
    seen = workload.masking.visible(own, range(k.shape[0]), q.device)
    # The query heads of a group have the same keys and values, so they are computed as rows of a single head.
    hidden = ~seen.repeat_interleave(group, 0)
    bias = column = None
    if alibi_slopes is not None:
        distance = reference.distance(rows, k.shape[0], q.device, position).abs()
        bias = (-alibi_slopes[:, None] * distance[:, None]).flatten(0, 1)
    if sink is not None:
        column = sink.repeat(rows)[None, :, None]
    modify = None
    if workload.mod:  # these workloads have seqlen_q == seqlen_k, so a row's position is its index
        score_mod, mask_mod = MODS[workload.mod](workload.seqlen_q, workload.num_heads_q, q.device)
        grids = (
            torch.tensor(head.sequence, device=q.device),
            (head.kv_head * group + torch.arange(group, device=q.device)).repeat(rows)[:, None],
            torch.arange(position, position + rows, device=q.device).repeat_interleave(group)[:, None],
            torch.arange(k.shape[0], device=q.device),
        )
        hidden = hidden if mask_mod is None else hidden | ~mask_mod(*grids)
        modify = None if score_mod is None else lambda scores: score_mod(scores, *grids)
    out, _ = reference.standard(
        q.flatten(0, 1)[None], k[None], v[None], workload.head_dim**-0.5, hidden=hidden,
        empty=hidden.all(-1, keepdim=True), bias=bias, softcap=workload.softcap, modify=modify, sink=column,
    )  # fmt: skip
    return out[0].unflatten(0, (rows, group))
