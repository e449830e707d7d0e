"""Shared parts of the compile cases of Hopper's kernels: problems, and calls with modifiers of scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from flashtile.problems.attention import Problem
from flashtile.problems.masks import Mods
from flashtile.tools.inspection.portable import WITH_MODS, inputs_of

HOPPER = "sm_90a"
PLAIN = Problem(
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    total_q=8192,
    total_k=8192,
    num_heads_q=8,
    num_heads_kv=2,
    head_dim=64,
    head_dim_v=64,
    dtype=torch.bfloat16,
    device=torch.device("meta"),
    softmax_scale=1.0,
)
WITH_BIAS = {
    "full": replace(PLAIN, bias=True),
    "causal": replace(PLAIN, bias=True, window_right=0),
    "features": replace(
        PLAIN, bias=True, varlen=True, seqused_k=True, window_left=64, window_right=64, softcap=1.0,
        sink=True, deterministic=True,
    ),
}  # fmt: skip
_WITH_DROPOUT = replace(PLAIN, num_heads_kv=PLAIN.num_heads_q, dropout_p=0.1)
WITH_DROPOUT = {
    "full": _WITH_DROPOUT,
    "causal": replace(_WITH_DROPOUT, window_right=0),
    "features": replace(
        PLAIN, dropout_p=0.1, varlen=True, seqused_k=True, window_left=64, window_right=64, softcap=1.0,
        alibi=True, sink=True, deterministic=True,
    ),
}  # fmt: skip
_MODS = WITH_MODS.mods
assert _MODS is not None
WITH_FUNCTIONS = {
    "block mask": replace(PLAIN, mods=replace(_MODS, score_mod="")),
    "block mask, score_mod": replace(PLAIN, mods=_MODS),
    "mask_mod": replace(PLAIN, window_right=0, mods=replace(_MODS, score_mod="", block_size=None)),
    "score_mod": replace(
        PLAIN, window_right=0, mods=replace(_MODS, mask_mod="", ranks=(2,), block_size=None)
    ),
    "ragged, all": replace(PLAIN, seqlen_k=4001, sink=True, mods=replace(_MODS, block_size=(256, 256))),
    "positions": replace(PLAIN, mods=Mods("", "t0: bool = le kv q\nreturn t0", block_size=(128, 128))),
}
"""A learned bias as score_mod, a document mask as mask_mod or block mask, or both. In the case
"positions", the block mask reads no tensor."""
MODIFIED = {"mods": WITH_FUNCTIONS, "dropout": WITH_DROPOUT, "bias": WITH_BIAS}
"""Calls with modifiers, by the kind of modifier and the name of the compile case."""


def modified(kind: str) -> Iterator[tuple[str, Problem]]:
    """Yield (name, problem) of calls with modifier ``kind``, at the head sizes that are compiled for it."""
    for head_dim in (64, 128, 256) if kind == "mods" else (64, 128):
        for name, problem in MODIFIED[kind].items():
            yield name, replace(problem, head_dim=head_dim, head_dim_v=head_dim)


def inputs(problem: Problem, bias: torch.Tensor | None = None) -> tuple[Any, Any, Any, Any]:
    """Return (q, k, v, extras) of a call, on the meta device. The bias defaults to :func:`bias_of`."""
    q, k, v, extras = inputs_of(problem)
    if problem.bias:
        extras = extras._replace(bias=bias_of(problem) if bias is None else bias)
    return q, k, v, extras


def bias_of(problem: Problem) -> torch.Tensor | None:
    """Return a bias that all sequences share, on the meta device; None if the problem has no bias."""
    if not problem.bias:
        return None
    shape = 1, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k
    return torch.empty(shape, dtype=problem.dtype, device="meta")


def words(named: Mapping[str, Any]) -> list[str]:
    """Return the names whose value is true."""
    return [name for name, present in named.items() if present]
