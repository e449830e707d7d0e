"""Contestants of workloads in e4m3: flashtile with and without its quantisation, and FlashAttention-3.

All start from the same bfloat16 numbers. What they quantise them to is their own affair, and is prepared
before timing but where the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile import fp8
from flashtile.bench import peers
from flashtile.bench.peers import Call, FlashAttention, Flashtile, Peer, offsets
from flashtile.bench.workloads import Inputs, Workload
from flashtile.fp8.layout import E4M3, E4M3_MAX
from flashtile.problem import UNLIMITED

FROM_BF16 = "flashtile-from-bf16"


class Quantized(Flashtile):
    """flashtile's attention over tensors that were quantised before, by block, with the transform."""

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        done = [
            fp8.quantize(
                x,
                role,
                cu_seqlens=cu_seqlens,
                max_seqlen=None if cu_seqlens is None else longest,
            )
            for x, role, cu_seqlens, longest in (
                (inputs.q, "q", inputs.cu_seqlens_q, workload.seqlen_q),
                (inputs.k, "k", inputs.cu_seqlens_k, workload.seqlen_k),
                (inputs.v, "v", inputs.cu_seqlens_k, workload.seqlen_k),
            )
        ]
        attend = partial(fp8.attention, *done, **_options(workload), backend=self._backend)
        return Call(lambda q, k, v: attend())


class Quantizing(Flashtile):
    """The same from bfloat16, all of it timed."""

    def __init__(self, backend: str | None = None) -> None:
        super().__init__(backend)
        self.name = self.name.replace("flashtile", FROM_BF16)

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        options = _options(workload) | (offsets(workload, inputs) if workload.varlen else {})
        return Call(partial(fp8.attention, **options, backend=self._backend))


class InBf16(Flashtile):
    """flashtile's attention in bfloat16, which FP8 is to beat."""

    ours = False

    def __init__(self) -> None:
        super().__init__()
        self.name = "flashtile-bf16"


class FlashAttention3(FlashAttention):
    """FlashAttention-3 over e4m3 tensors that were quantised before, v row by row, by key head."""

    def __init__(self) -> None:
        super().__init__("fa3-fp8", "flash_attn_interface", UNLIMITED)

    def prepare(self, workload: Workload, inputs: Inputs) -> Call:
        values, scales = zip(
            *(by_key_head(x, workload.num_heads_kv) for x in (inputs.q, inputs.k, inputs.v)), strict=True
        )
        batch = len(workload.sequences)
        names = ("q_descale", "k_descale", "v_descale")
        descales = {name: scale.expand(batch, -1) for name, scale in zip(names, scales, strict=True)}
        attend = partial(self.function(workload, inputs), *values, **descales)
        return Call(lambda q, k, v: peers.first_of(attend()))


def by_key_head(x: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    """x in e4m3, and the scales (heads_kv,) of its groups of heads."""
    groups = x.unflatten(-2, (heads_kv, -1)).float()
    others = [dim for dim in range(groups.dim()) if dim != groups.dim() - 3]
    scale = groups.abs().amax(others) / E4M3_MAX
    return (groups / scale[:, None, None]).to(E4M3).flatten(-3, -2), scale


def contestants(names: Sequence[str], backends: Sequence[str], device: torch.device) -> list[Peer]:
    """As :func:`flashtile.bench.peers.contestants`, for workloads in e4m3."""
    return peers.contestants(
        names,
        backends,
        device,
        ours=lambda backend: [Quantized(backend), Quantizing(backend)],
        others=lambda: [InBf16(), FlashAttention3()],
    )


def _options(workload: Workload) -> dict[str, Any]:
    return {
        "causal": workload.causal,
        "window_size": (workload.window_left, UNLIMITED),
        "softcap": workload.softcap,
    }
