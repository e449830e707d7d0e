"""Contestants that return attention weights: all weights, their sums over rows, or the largest of each
row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile.reference import attention as reference
from flashtile.tools.bench.inputs import Inputs
from flashtile.tools.bench.peers import Flashtile, PeerCall, Standard, first_of, options
from flashtile.tools.bench.workloads import Workload

TOP = 8
"""Number of weights per row in the form "top"."""


class Weighing(Flashtile):
    """flashtile's second pass over q and k."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        form: Any = TOP if workload.weights == "top" else workload.weights
        attend: Any = partial(
            flashtile.attention, **options(workload, inputs), return_attn_weights=form, backend=self._backend
        )
        return PeerCall(lambda q, k, v: first_of(attend(q, k, v)))


class Eager(Standard):
    """Models' fallback when weights are requested: all scores stored, the softmax in float32."""

    name = "eager"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        window = workload.window_left, workload.window_right
        seen = reference.visible(workload.seqlen_q, workload.seqlen_k, *window, inputs.q.device)
        hidden = None if bool(seen.all()) else ~seen
        scale, group = workload.head_dim**-0.5, workload.group_size

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
            scores = q @ k.transpose(-2, -1) * scale
            if hidden is not None:
                scores = scores.masked_fill_(hidden, -torch.inf)
            weights = torch.softmax(scores, -1, torch.float32).to(q.dtype)
            if workload.weights == "columns":
                weights.sum(-2, dtype=torch.float32)
            elif workload.weights == "top":
                weights.topk(TOP, -1)
            return weights @ v

        return PeerCall(attend, heads_first=True)
