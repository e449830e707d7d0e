"""Shared parts of the ahead-of-time compile cases of all Hopper kernels (``flashtile inspect``, tests): calls
with modifiers of scores, and the tile table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flashtile.backends.common.compile_cases import case_of, launches_of
from flashtile.backends.common.compile_report import CompileCase
from flashtile.backends.hopper import CAPABILITY
from flashtile.backends.hopper.work_tiles import CHUNK, TABLE_WIDTH, tile_table_kernel
from flashtile.backends.portable.compile_cases import WITH_MODS, inputs_of
from flashtile.problems.attention import Problem
from flashtile.problems.fp8 import Fp8Problem
from flashtile.problems.masks import Mods

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


def modified(kind: str, spills: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[str, Problem, int]]:
    """Yield (name, problem, spill budget) of calls with modifier ``kind``, at the head sizes in ``spills``.

    ``spills`` has, for each head size, the budgets in bytes in the order of the calls. A budget is the larger
    of the spills with Triton 3.6 and 3.7.
    """
    for head_dim, budgets in spills.items():
        for (name, problem), budget in zip(MODIFIED[kind].items(), budgets, strict=True):
            yield name, replace(problem, head_dim=head_dim, head_dim_v=head_dim), budget


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the compile case of the kernel that fills the tile table."""
    if arch != HOPPER:
        return
    pointers = ("table", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    integers = ("batch", "num_blocks", "total_q", "total_k", "capacity")
    yield CompileCase(
        name="hopper tile table",
        kernel=tile_table_kernel,
        signature=dict.fromkeys(pointers, "*i32") | dict.fromkeys(integers, "i32"),
        constants={
            "SEQUSED": True,
            "PAIRED": True,
            "BLOCK_M": 128,
            "WIDTH": TABLE_WIDTH.value,
            "CHUNK": CHUNK,
        },
        tensor_cores=False,
    )


def recorded(launch: Callable[..., Any], *arguments: Any) -> list[CompileCase]:
    """Return the compile case of each kernel that a call of ``launch`` starts, without names and budgets."""
    launches = launches_of(CAPABILITY, partial(launch, *arguments))
    return [case_of(launched, launched[0].kernel.fn.__name__) for launched in launches]


def only(kernel: Any, cases: list[CompileCase], **fields: Any) -> CompileCase:
    """Return the case of ``kernel``, which must be one, with ``fields`` changed."""
    (case,) = (case for case in cases if case.kernel is kernel)
    return replace(case, **fields)


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


def tensors(problem: Problem | Fp8Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return contiguous q, k and v of the problem's shapes, on the meta device."""
    rows = (problem.total_q,) if problem.varlen else (problem.batch, problem.seqlen_q)
    keys = (problem.total_k,) if problem.varlen else (problem.batch, problem.seqlen_k)
    q = torch.empty(*rows, problem.num_heads_q, problem.head_dim, dtype=problem.dtype, device="meta")
    k = torch.empty(*keys, problem.num_heads_kv, problem.head_dim, dtype=problem.dtype, device="meta")
    v = torch.empty(*keys, problem.num_heads_kv, problem.head_dim_v, dtype=problem.dtype, device="meta")
    return q, k, v


def words(named: Mapping[str, Any]) -> list[str]:
    """Return the names whose value is true."""
    return [name for name, present in named.items() if present]
