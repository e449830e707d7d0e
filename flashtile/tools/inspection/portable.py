"""Compile cases of the portable attention kernels, of attention weights, and of the all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common import tiles
from flashtile.backends.common.config import padded
from flashtile.backends.common.launch import Launched
from flashtile.backends.portable import fits
from flashtile.backends.portable.attention.launch import PortableBackwardLaunch, PortableForwardLaunch
from flashtile.backends.portable.config import (
    HEAD_DIMS,
    Config,
    family_of_capability,
    for_general_masks,
    row_for,
    row_with_functions,
)
from flashtile.backends.portable.weights.kernel import WeightsLaunch, of_forward
from flashtile.engine import all_reduce
from flashtile.problems.attention import (
    NO_EXTRAS,
    ModifiedExtras,
    OptionalTensors,
    Problem,
    WeightsProblem,
)
from flashtile.problems.masks import LISTS, Mods
from flashtile.tools.inspection.recording import case_of, launches_of, meta
from flashtile.tools.inspection.report import CompileCase, architecture

PLAIN = Problem(
    batch=2,
    seqlen_q=4096,
    seqlen_k=4096,
    total_q=8192,
    total_k=8192,
    num_heads_q=8,
    num_heads_kv=8,
    head_dim=64,
    head_dim_v=64,
    dtype=torch.bfloat16,
    device=torch.device("meta"),
    softmax_scale=1.0,
)
_FEATURES: dict[str, Any] = {
    "varlen": True, "seqused_k": True, "window_left": 64, "window_right": 64, "softcap": 1.0, "alibi": True,
}  # fmt: skip
_VARIANTS: dict[str, Problem] = {
    "full": PLAIN,
    "causal": replace(PLAIN, window_right=0),
    "masks": replace(PLAIN, window_right=0, mask=True, key_padding_mask=True),
    "bias": replace(PLAIN, bias=True, bias_grad=True),
    "dropout": replace(PLAIN, window_right=0, dropout_p=0.1),
    "features": replace(PLAIN, sink=True, **_FEATURES),
}
"""Problems of common calls without score or mask functions, and one with many features at once."""
_SCORE = """\
t0: int = sub kv q
t1: int = maximum t0 -128
t2: int = minimum t1 128
t3: int = add t2 128
t4: float = load 0 h t3
t5: float = add score t4
return t5"""
_MASK = """\
t0: int = load 1 b q
t1: int = load 1 b kv
t2: bool = eq t0 t1
t3: bool = le kv q
t4: bool = and t2 t3
return t4"""
_MODS = Mods(_SCORE, _MASK, learned=(0,), ranks=(2, 2), block_size=(128, 128))
WITH_MODS = replace(PLAIN, mods=_MODS)
"""A learned bias under a document mask."""
_WITH_FUNCTIONS = {
    "block mask": WITH_MODS,
    "mask_mod": replace(WITH_MODS, mods=replace(_MODS, score_mod="", learned=(), block_size=None)),
    "score_mod": replace(WITH_MODS, window_right=0, mods=Mods(_SCORE, learned=(0,), ranks=(2,))),
}
_FORMS = (("full", 0), ("columns", 0), ("top", 8), ("top", 128))
"""Forms of attention weights, and how many weights of a row are kept."""

_WITH_GENERAL_MASKS = (("hopper", 2, 64), ("hopper", 2, 128))
"""Families, element bytes and head sizes for which masks, biases and dropout are compiled."""
_PREPROCESS = "preprocess"
_KERNELS = ("forward", "dkdv", "dq", "dbias", _PREPROCESS)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the compile cases of the portable attention kernels, with the tile sizes for ``arch``.

    The cases include attention weights, the all-reduce, and score and mask functions.
    """
    capability = divmod(architecture(arch).capability, 10)
    yield from _plain_cases(capability)
    if capability >= tiles.CAPABILITY:
        yield from _all_reduce_cases(capability)
    yield from _cases_with_functions(capability)
    for form, top in _FORMS:
        yield from _weights_cases(capability, form, top)


def inputs_of(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Return (q, k, v, extras) of a call that ``problem`` describes. They are contiguous meta tensors."""
    batch, heads_q, heads_kv = problem.batch, problem.num_heads_q, problem.num_heads_kv
    scores = (batch, heads_q, problem.seqlen_q, problem.seqlen_k)
    offsets, by_head = meta(batch + 1, dtype=torch.int32), meta(heads_q)
    possible = {
        "cu_seqlens_q": (problem.varlen, offsets),
        "cu_seqlens_k": (problem.varlen, offsets),
        "seqused_k": (problem.seqused_k, meta(batch, dtype=torch.int32)),
        "alibi_slopes": (problem.alibi, by_head),
        "sink": (problem.sink, by_head),
        "mask": (problem.mask, meta(*scores, dtype=torch.bool)),
        "key_padding_mask": (problem.key_padding_mask, meta(batch, problem.seqlen_k, dtype=torch.bool)),
        "bias": (problem.bias, meta(*scores, dtype=problem.dtype)),
        "rng_state": (problem.dropout_p > 0, meta(2, dtype=torch.int64)),
    }
    given = {name: tensor for name, (is_used, tensor) in possible.items() if is_used}
    extras: Any = OptionalTensors(**given)
    if problem.mods is not None:
        given |= _tensors_of_functions(problem.mods, scores)
        extras = ModifiedExtras(*NO_EXTRAS)._replace(**given)
    of_q, of_k = (
        ((problem.total_q,), (problem.total_k,))
        if problem.varlen
        else ((batch, problem.seqlen_q), (batch, problem.seqlen_k))
    )
    q = meta(*of_q, heads_q, problem.head_dim, dtype=problem.dtype)
    k, v = (
        meta(*of_k, heads_kv, width, dtype=problem.dtype) for width in (problem.head_dim, problem.head_dim_v)
    )
    return q, k, v, extras


def _tensors_of_functions(mods: Mods, scores: tuple[int, int, int, int]) -> dict[str, Tensor]:
    """Return the tensors that ``_SCORE`` and ``_MASK`` read, and the lists of the block mask, if any."""
    batch, heads, seqlen_q, seqlen_k = scores
    documents = meta(batch, seqlen_q, dtype=torch.int32)
    given = {f"captured_{i}": documents for i in range(len(mods.ranks))}
    if mods.score_mod:
        given["captured_0"] = meta(heads, 257)
    if mods.block_size is not None:
        blocks_q, blocks_kv = seqlen_q // mods.block_size[0], seqlen_k // mods.block_size[1]
        for name in LISTS:
            own, others = (blocks_q, blocks_kv) if "kv" in name else (blocks_kv, blocks_q)
            given[name] = meta(batch, 1, own, *(() if "num" in name else (others,)), dtype=torch.int32)
    return given


def _kernels(capability: tuple[int, int], problem: Problem, config: Config) -> Iterator[tuple[str, Launched]]:
    """Yield (name, launch) of each kernel of a forward and backward call."""
    q, k, v, extras = inputs_of(problem)
    rows = q.shape[:-1] if problem.varlen else (problem.batch, problem.seqlen_q, problem.num_heads_q)
    out, lse = meta(*rows, problem.head_dim_v, dtype=problem.dtype), meta(*problem.lse_shape)
    launches = launches_of(
        capability,
        partial(PortableForwardLaunch(problem, config), q, k, v, extras),
        partial(PortableBackwardLaunch(problem, config), out, None, q, k, v, out, lse, extras),
    )
    for launched in launches:
        name = launched[0].kernel.fn.__name__.removesuffix("_kernel")
        if name in _KERNELS:
            yield name, launched


def _plain_cases(capability: tuple[int, int]) -> Iterator[CompileCase]:
    table_family = family_of_capability(*capability)
    for dtype, element_bytes in (("bf16", 2), ("fp32", 4)):
        for head_dim in HEAD_DIMS:
            if not fits(capability, element_bytes, head_dim):
                continue
            for variant, any_problem in _VARIANTS.items():
                problem = _sized(any_problem, dtype, head_dim)
                needs_general_mask = problem.needs_general_mask is not None
                if needs_general_mask and (table_family, element_bytes, head_dim) not in _WITH_GENERAL_MASKS:
                    continue
                config = row_for(capability, element_bytes, padded(head_dim), windowed=variant != "full")
                if needs_general_mask:
                    config = for_general_masks(config)
                for name, launched in _kernels(capability, problem, config):
                    case = f"{name} {dtype} head_dim {head_dim}"
                    if name == _PREPROCESS:
                        if variant == "full":
                            yield case_of(launched, case, tensor_cores=False)
                        continue
                    case = f"{case} {variant}"
                    on_tensor_cores = element_bytes == 2 or config.precision != "ieee"
                    yield case_of(launched, case, tensor_cores=on_tensor_cores)


def _cases_with_functions(capability: tuple[int, int]) -> Iterator[CompileCase]:
    """Yield the cases of kernels with score or mask functions, for head sizes 64 and 128."""
    family = family_of_capability(*capability)
    for dtype, element_bytes, head_dim in (("bf16", 2, 64), ("bf16", 2, 128), ("fp32", 4, 64)):
        for variant, any_problem in _WITH_FUNCTIONS.items():
            problem = _sized(any_problem, dtype, head_dim)
            config = row_with_functions(problem, family, element_bytes, head_dim)
            for name, launched in _kernels(capability, problem, config):
                if name != _PREPROCESS:
                    case = f"{name} {dtype} head_dim {head_dim} {variant}"
                    yield case_of(launched, case, tensor_cores=config.precision != "ieee")


def _weights_cases(capability: tuple[int, int], form: str, top: int) -> Iterator[CompileCase]:
    """Yield the kernels that compute attention weights, with many features and with a block mask.

    ``form`` is the form of the weights ("full", "columns" or "top"), and ``top`` the number of weights that
    "top" keeps in each row.
    """
    family = family_of_capability(*capability)
    name = f"{form} {top}" if top else form
    for head_dim in (64, 128):
        problem = _with_form(_sized(replace(PLAIN, **_FEATURES), "bf16", head_dim), form, top)
        config = for_general_masks(row_for(capability, 2, head_dim, windowed=True))
        yield case_of(
            _weights_launch(capability, problem, config), f"weights bf16 head_dim {head_dim} {name}"
        )
    problem = _with_form(WITH_MODS, form, top)
    config = row_with_functions(problem, family, 2, 64)
    yield case_of(_weights_launch(capability, problem, config), f"modified weights bf16 head_dim 64 {name}")


def _weights_launch(capability: tuple[int, int], problem: WeightsProblem, forward: Config) -> Launched:
    q, k, _, extras = inputs_of(problem)
    launch = WeightsLaunch(problem, of_forward(problem, forward))
    (launched,) = launches_of(capability, partial(launch, q, k, meta(*problem.lse_shape), extras))
    return launched


def _sized(problem: Problem, dtype: str, head_dim: int) -> Problem:
    return replace(problem, dtype=_DTYPES[dtype], head_dim=head_dim, head_dim_v=head_dim)


def _with_form(problem: Problem, form: str, top: int) -> WeightsProblem:
    given = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return WeightsProblem(**given, form=form, top=top)


def _all_reduce_cases(capability: tuple[int, int]) -> Iterator[CompileCase]:
    """Yield the case that adds one row of 4096 elements and a residual, and the one that joins rows."""
    row, rows = meta(1, 2**12, dtype=torch.bfloat16), meta(8, 2**15, dtype=torch.bfloat16)
    memories, calls = meta(2, dtype=torch.int64), meta(all_reduce.PROGRAMS, dtype=torch.int64)
    shared: dict[str, Any] = {
        "memories": memories,
        "calls": calls,
        "rank": 0,
        "capacity": 2**17,
        "timeout": 60.0,
    }
    for name, part, residual, result in (
        ("1 row", row, row, all_reduce.SUM),
        ("join", rows, None, all_reduce.JOIN),
    ):
        call = partial(all_reduce.all_reduce, part, residual, **shared, result=result.value)
        (launched,) = launches_of(capability, call)
        yield case_of(launched, f"all-reduce bf16 {name}", tensor_cores=False)
