"""Contestants of workloads in e4m3: flashtile with and without its quantisation, and FlashAttention-3.

All start from the same bfloat16 numbers. Each contestant quantises them in its own way, before timing unless
its name says otherwise.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from flashtile import fp8
from flashtile.problems.common import UNLIMITED
from flashtile.problems.fp8_layout import E4M3, E4M3_MAX
from flashtile.tools.bench.inputs import Inputs
from flashtile.tools.bench.peers import FlashAttention, Flashtile, PeerCall, first_of, options
from flashtile.tools.bench.workloads import Workload

FROM_BF16 = "flashtile-from-bf16"


class Quantized(Flashtile):
    """flashtile's attention over tensors that are quantised before timing, by block, after the rotation."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        given = options(workload, inputs)
        sides = {
            side: {
                "cu_seqlens": given.pop(f"cu_seqlens_{side}"),
                "max_seqlen": given.pop(f"max_seqlen_{side}"),
            }
            for side in ("q", "k")
            if workload.varlen
        }
        quantized = [
            fp8.quantize(x, role, **sides.get(side, {}))
            for x, role, side in ((inputs.q, "q", "q"), (inputs.k, "k", "k"), (inputs.v, "v", "k"))
        ]
        attend = partial(fp8.attention, *quantized, **given, backend=self._backend)
        return PeerCall(lambda q, k, v: attend())


class Quantizing(Flashtile):
    """flashtile's attention from bfloat16 tensors; quantisation is timed as well."""

    def __init__(self, backend: str | None = None) -> None:
        super().__init__(backend)
        self.name = self.name.replace("flashtile", FROM_BF16)

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        return PeerCall(partial(fp8.attention, **options(workload, inputs), backend=self._backend))


class InBf16(Flashtile):
    """flashtile's attention in bfloat16, the baseline of FP8."""

    ours = False

    def __init__(self) -> None:
        super().__init__()
        self.name = "flashtile-bf16"


class FlashAttention3(FlashAttention):
    """FlashAttention-3 over e4m3 tensors quantised before timing, with a scale for each key head."""

    def __init__(self) -> None:
        super().__init__("fa3-fp8", "flash_attn_interface", UNLIMITED)

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        values, scales = zip(
            *(by_key_head(x, workload.num_heads_kv) for x in (inputs.q, inputs.k, inputs.v)), strict=True
        )
        batch = len(workload.sequences)
        names = ("q_descale", "k_descale", "v_descale")
        descales = {name: scale.expand(batch, -1) for name, scale in zip(names, scales, strict=True)}
        attend = partial(self.function(workload, inputs), *values, **descales)
        return PeerCall(lambda q, k, v: first_of(attend()))


def by_key_head(x: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    """Return x in e4m3 and the scales (heads_kv,) of its groups of heads."""
    groups = x.unflatten(-2, (heads_kv, -1)).float()
    others = [dim for dim in range(groups.dim()) if dim != groups.dim() - 3]
    scale = groups.abs().amax(others) / E4M3_MAX
    return (groups / scale[:, None, None]).to(E4M3).flatten(-3, -2), scale
