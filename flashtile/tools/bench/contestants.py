"""The contestants of a run; each kind of workload has its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashtile.problems.common import PREFERENCE, UNLIMITED
from flashtile.tools.bench import decode_peers, fp8_peers, weights_peers
from flashtile.tools.bench.peers import (
    FlashAttention,
    Flashtile,
    FlexAttention,
    LoopsOfFlash1,
    Peer,
    Sdpa,
    Standard,
    TorchVarlen,
)
from flashtile.tools.bench.workloads import Workload

OURS: dict[str, tuple[type[Flashtile], ...]] = {
    "attention": (Flashtile,),
    "masks": (Flashtile,),
    "weights": (weights_peers.Weighing,),
    "fp8": (fp8_peers.Quantized, fp8_peers.Quantizing),
    "decode": (decode_peers.Decoding, decode_peers.SharedPrefix),
}
"""Adapters of flashtile by kind of workload; each takes the name of a backend, or None."""


def peers(kind: str) -> tuple[Peer, ...]:
    """Return new adapters of all peers of a kind of workload, in the order of the tables."""
    if kind == "fp8":
        return (fp8_peers.InBf16(), fp8_peers.FlashAttention3())
    if kind == "decode":
        return (decode_peers.FlashAttention3(), decode_peers.SdpaLatent())
    if kind == "weights":
        return (weights_peers.Eager(),)
    if kind == "masks":
        return (FlexAttention(), FlexAttention(flash=True))
    return (
        Sdpa("sdpa-flash", "FLASH_ATTENTION", "cuda"),
        Sdpa("sdpa-cudnn", "CUDNN_ATTENTION", "cuda"),
        Sdpa("sdpa-efficient", "EFFICIENT_ATTENTION", "cuda"),
        Sdpa("sdpa-cpu", "FLASH_ATTENTION", "cpu"),
        FlexAttention(),
        TorchVarlen(),
        FlashAttention("fa2", "flash_attn", UNLIMITED, alibi="alibi_slopes"),
        FlashAttention("fa3", "flash_attn_interface", UNLIMITED),
        FlashAttention("fa4", "flash_attn.cute", None, sink="learnable_sink"),
        LoopsOfFlash1(),
        Standard(),
    )


def contestants(kind: str, names: Sequence[str], backends: Sequence[str], device: torch.device) -> list[Peer]:
    """Return flashtile (or one contestant for each named backend), then the peers.

    Args:
        kind: kind of the workloads.
        names: names of peers; empty takes all that are available on ``device``, ``["none"]`` takes none.
        backends: backends of flashtile; empty lets dispatch choose for each call.

    Raises:
        ValueError: a name is not a peer or backend, or a named peer cannot run here.
    """
    known = {peer.name: peer for peer in peers(kind)} if list(names) != ["none"] else {}
    for name in names if known else ():
        if name not in known:
            raise ValueError(f"peer must be none or one of {', '.join(known)}, got {name!r}")
        reason = known[name].unavailable(device)
        if reason is not None:
            raise ValueError(f"peer {name!r} cannot run here: {reason}")
    for backend in backends:
        if backend not in PREFERENCE:
            raise ValueError(f"backend must be one of {', '.join(PREFERENCE)}, got {backend!r}")
    return [ours(backend) for backend in backends or (None,) for ours in OURS[kind]] + [
        peer for name, peer in known.items() if (name in names if names else peer.unavailable(device) is None)
    ]


def kind_of(workloads: Sequence[Workload]) -> str:
    """Return the kind of all workloads.

    Raises:
        ValueError: the workloads are of several kinds.
    """
    kinds = {workload.kind: workload.name for workload in workloads}
    if len(kinds) > 1:
        given = ", ".join(f"{name} ({kind})" for kind, name in kinds.items())
        raise ValueError(f"workloads must be of one kind, each needs a run of its own, got {given}")
    return next(iter(kinds))
