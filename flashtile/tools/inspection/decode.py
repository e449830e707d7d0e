"""Compile cases of decoding: attention over a cache, combining, appending and copying."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common.device import Target, compiling_for
from flashtile.backends.hopper.decode.combine import combine_divided_kernel, combine_recorded_kernel
from flashtile.backends.hopper.decode.config import HopperDecodeConfig, choose, every_row
from flashtile.backends.hopper.decode.kernel import attend_kernel
from flashtile.backends.hopper.decode.launch import HopperDecodeLaunch
from flashtile.backends.hopper.decode.work import table_kernel
from flashtile.backends.portable.config import family_of_capability
from flashtile.backends.portable.decode import config
from flashtile.backends.portable.decode.attend import decode_kernel
from flashtile.backends.portable.decode.combine import combine_kernel
from flashtile.backends.portable.decode.config import DecodeConfig
from flashtile.backends.portable.decode.launch import (
    APPEND_ROWS,
    COPY_TILE,
    AppendingLaunch,
    AppendLaunch,
    CombineLaunch,
    CopyLaunch,
    DecodeLaunch,
)
from flashtile.backends.portable.decode.mass import MassLaunch, mass_kernel
from flashtile.parallel.exchange import exchange, exchange_variant
from flashtile.problems.decode import (
    FP8,
    AppendOptions,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    CombineOptions,
    CombineProblem,
    CopyOptions,
    CopyProblem,
    CopyTensors,
    DecodeOptions,
    DecodeProblem,
    NoTensors,
)
from flashtile.tools.inspection.recording import TYPE_NAMES, cases_of, meta, only, only_case, words
from flashtile.tools.inspection.report import HOPPER, CompileCase, architecture

PAGED = DecodeProblem(
    batch=8,
    seqlen_q=1,
    total_q=8,
    num_heads_q=32,
    num_heads_kv=8,
    head_dim=128,
    head_dim_v=128,
    capacity=65536,
    page_size=16,
    num_blocks=2048,
    seqlen_new=0,
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    device=torch.device("meta"),
    softmax_scale=1.0,
    lengths=True,
)
_FEATURES = {
    "seqlen_q": 4,
    "window_left": 1024,
    "window_right": 0,
    "softcap": 1.0,
    "alibi": True,
    "sink": True,
    "leftpad": True,
    "varlen": True,
    "varlen_new": True,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "page 16": {},
    "page 1": {"page_size": 1},
    "page 256": {"page_size": 256},
    "dense": {"page_size": 0, "num_blocks": 8},
    "whole": {"page_size": 0, "num_blocks": 8, "lengths": False, "capacity": 256, "return_lse": False},
    "splits": {"num_splits": 4},
    "tree": {"tree": True, "seqlen_q": 4},
    "prior": {"prior": True},
    "unified max": {"softmax_max": 0.0},
    "unified max, features": _FEATURES | {"softmax_max_by_head": True},
    "features": _FEATURES,
    "chunk": {"seqlen_q": 4, "window_right": 0, "attention_chunk": 8192},
}
"""Variants by name. Every tile is compiled for pages of 16 tokens. For 16-bit elements and head_dim 128,
NARROW tiles are compiled for all variants, and other tiles for ``_WIDE_VARIANTS``."""
_MANY_ROWS = {"seqlen_q": 64, "total_q": 512, "window_right": 0}
_MASS_VARIANTS: dict[str, dict[str, Any]] = {
    "page 16": {},
    "dense": {"page_size": 0, "num_blocks": 8},
    "e4m3": {"cache_dtype": FP8, "descale": "block"},
    "features": _FEATURES,
    "many rows": _MANY_ROWS,
    "many rows, features": _MANY_ROWS | {"softcap": 1.0},
    "many rows, packed, window": _MANY_ROWS | {"window_left": 1024, "varlen": True, "leftpad": True},
}
_WIDE_VARIANTS = ("page 16", "splits", "features", "unified max")


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the cases of all decoding kernels.

    Attention is compiled with each tile that is configured for ``arch``. Some tiles are compiled in several
    variants.
    """
    if arch == HOPPER:
        yield from _hopper_cases()
    capability = divmod(architecture(arch).capability, 10)
    family = family_of_capability(*capability)
    for dtype, element_bytes in ((torch.bfloat16, 2), (torch.float32, 4), (FP8, 1)):
        for head_dim in config.HEAD_DIMS:
            for BLOCK_M in config.row_blocks(family, element_bytes, head_dim):
                chosen = config.row(family, element_bytes, BLOCK_M, head_dim)
                variants: Iterable[str] = ("page 16",)
                if element_bytes == 1 and head_dim == 128 and BLOCK_M == config.NARROW:
                    variants = ("page 16", "unified max")
                if head_dim == 128 and element_bytes == 2:
                    variants = _VARIANTS if BLOCK_M == config.NARROW else _WIDE_VARIANTS
                for variant in variants:
                    problem = replace(
                        PAGED,
                        head_dim=head_dim,
                        head_dim_v=head_dim,
                        dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
                        cache_dtype=dtype,
                        descale="head" if dtype == FP8 else "none",
                        **_VARIANTS[variant],
                    )
                    name = f"{TYPE_NAMES[dtype]} head_dim {head_dim} rows {BLOCK_M} {variant}"
                    yield _attention_case(f"decode {name}", problem, chosen, capability)
                    if head_dim == 128 and variant in ("page 16", "splits") and element_bytes == 2:
                        yield from _combine_cases(f"decode combine {name}", problem, chosen, capability)
    if family == "hopper":  # one program for each work tile
        whole = replace(PAGED, batch=256, total_q=256, num_splits=1)
        for head_dim, grouped in itertools.product((64, 128), (False, True)):
            problem = replace(whole, head_dim=head_dim, head_dim_v=head_dim, prior=grouped, leftpad=grouped)
            with compiling_for(capability):
                chosen = config.choose(problem)
            name = f"decode bf16 head_dim {head_dim} rows {config.NARROW} single split{' prior' * grouped}"
            yield _attention_case(name, problem, chosen, capability)
    latent = replace(PAGED, num_heads_q=128, num_heads_kv=1, head_dim=64, head_dim_v=512, qv=True)
    for BLOCK_M in config.row_blocks(family, 2, latent.head_dim_v):
        chosen = config.row(family, 2, BLOCK_M, latent.head_dim_v)
        name = f"decode bf16 latent 64 and 512 rows {BLOCK_M}"
        yield _attention_case(name, latent, chosen, capability)
    if family == "hopper":
        for head_dim, invariant in itertools.product((64, 128), (False, True)):
            yield _appending_case(head_dim, invariant, capability)
    for name, features in _MASS_VARIANTS.items():
        yield from _mass_cases(name, replace(PAGED, **features), capability)
    out, lse = meta(16, 8, 1, 32, 128), meta(16, 8, 1, 32)
    combine = CombineProblem.from_tensors(out, lse, NoTensors(), CombineOptions(torch.bfloat16))
    call = partial(CombineLaunch(combine), out, lse)
    yield only_case(capability, call, "decode combine given", tensor_cores=False)
    if not architecture(arch).amd:
        exchanged = exchange_variant(2, 2048, 128)
        memories, calls = meta(2, dtype=torch.int64), meta(exchanged.PROGRAMS, dtype=torch.int64)
        call = partial(exchange, out[0], lse[0], memories, calls, 0, exchanged, torch.bfloat16, 60.0)
        yield only_case(capability, call, "decode exchange", tensor_cores=False)
    for dtype in (torch.bfloat16, FP8):
        for packed in (False, True):
            yield _append_case(dtype, capability, packed)
    cache = meta(1, 1024, COPY_TILE // 128 // 8, 8, 128, dtype=torch.bfloat16)
    copied = (cache, cache, meta(4, 2, dtype=torch.int32), CopyTensors())
    copy = CopyLaunch(CopyProblem.from_tensors(*copied, CopyOptions()))
    yield only_case(capability, partial(copy, *copied), "decode copy blocks", tensor_cores=False)


def inputs_of(problem: DecodeProblem) -> tuple[Tensor, Tensor, Tensor, CacheTensors]:
    """Return (q, k_cache, v_cache, tensors) of a call, contiguous and on the meta device."""
    batch, heads, width = problem.batch, problem.num_heads_q, problem.head_dim_v
    int32 = partial(meta, dtype=torch.int32)
    of_scales = {
        "none": None,
        "head": (problem.num_heads_kv,),
        "block": (problem.num_blocks, problem.num_heads_kv),
        "sequence": (batch, 1, problem.num_heads_kv),
    }[problem.descale]
    scales = None if of_scales is None else meta(*of_scales)
    offsets = int32(batch + 1)
    tokens = (problem.total_q,) if problem.varlen else (batch, problem.seqlen_q)
    rows = (problem.num_blocks, problem.page_size or problem.capacity, problem.num_heads_kv)
    possible = {
        "cache_seqlens": (problem.lengths, int32(batch)),
        "cache_leftpad": (problem.leftpad, int32(batch)),
        "cache_batch_idx": (problem.batch_idx, int32(batch)),
        "cu_seqlens_q": (problem.varlen, offsets),
        "cu_seqlens_k_new": (problem.varlen_new, offsets),
        "alibi_slopes": (problem.alibi, meta(heads)),
        "sink": (problem.sink, meta(heads)),
        "k_descale": (scales is not None, scales),
        "v_descale": (scales is not None, scales),
        "tree_mask": (problem.tree, meta(1, problem.seqlen_q, problem.seqlen_q, dtype=torch.bool)),
        "prior_out": (problem.prior, meta(problem.total_q, heads, width)),
        "prior_lse": (problem.prior, meta(heads, problem.total_q)),
        "softmax_max": (problem.softmax_max_by_head, meta(heads)),
        "qv": (problem.qv, meta(*tokens, heads, width, dtype=problem.dtype)),
    }
    tensors = CacheTensors(**{name: tensor for name, (is_used, tensor) in possible.items() if is_used})
    if problem.page_size:
        tensors = tensors._replace(block_table=int32(batch, problem.capacity // problem.page_size))
    q = meta(*tokens, heads, problem.head_dim, dtype=problem.dtype)
    k, v = (meta(*rows, size, dtype=problem.cache_dtype) for size in (problem.head_dim, width))
    return q, k, v, tensors


def _attention_case(
    name: str, problem: DecodeProblem, chosen: DecodeConfig, capability: tuple[int, int]
) -> CompileCase:
    on_tensor_cores = problem.dtype.itemsize == 2 or chosen.precision != "ieee"
    cases = cases_of(capability, partial(DecodeLaunch(problem, chosen), *inputs_of(problem)))
    return only(decode_kernel, cases, name=name, tensor_cores=on_tensor_cores)


def _combine_cases(
    name: str, problem: DecodeProblem, chosen: DecodeConfig, capability: tuple[int, int]
) -> Iterator[CompileCase]:
    """Yield the case of the kernel that combines splits, or two of those that combine a stream-K grid.

    With one sequence, the grid of an H100 has more programs than work tiles, and each work tile is combined.
    With two multiprocessors it has fewer, and the work tiles at the programs' boundaries are combined.
    """
    one = replace(problem, batch=1, total_q=problem.seqlen_q)
    large = Target("a GPU", capability, 132)
    calls: dict[str, tuple[Any, DecodeProblem]] = {name: (capability, problem)}
    if problem.num_splits == 0:
        calls = {name: (large, one), f"{name} by boundary": (capability, problem)}
    for case_name, (gpu, described) in calls.items():
        cases = cases_of(gpu, partial(DecodeLaunch(described, chosen), *inputs_of(described)))
        yield only(combine_kernel, cases, name=case_name, tensor_cores=False)


def _mass_cases(name: str, problem: DecodeProblem, capability: tuple[int, int]) -> Iterator[CompileCase]:
    """Yield the cases of attention that stores probabilities, if it does, and of the kernel for mass."""
    with compiling_for(capability):
        launch = MassLaunch(problem)
    q, k_cache, v_cache, tensors = inputs_of(problem)
    mass = meta(*k_cache.shape[:3])
    cases = cases_of(capability, partial(launch, q, k_cache, v_cache, tensors, mass))
    yield replace(only(mass_kernel, cases), name=f"decode mass {name}", tensor_cores=launch.recomputes)
    if not launch.recomputes:
        yield replace(only(decode_kernel, cases), name=f"decode {name} storing probabilities")


def _append_case(dtype: torch.dtype, capability: tuple[int, int], packed: bool) -> CompileCase:
    """Return the case of an append kernel that applies rotary embedding to the new keys and to queries.

    There are as many query tokens as new tokens. ``packed``: whether their sequences are packed.
    """
    bf16, int32, heads = torch.bfloat16, torch.int32, 8
    cache = meta(1024, 16, heads, 128, dtype=dtype)
    rows = (8 * APPEND_ROWS,) if packed else (8, APPEND_ROWS)
    new, q = meta(*rows, heads, 128, dtype=bf16), meta(*rows, 4 * heads, 128, dtype=bf16)
    offsets = meta(9, dtype=int32) if packed else None
    scales = None
    if dtype == FP8:
        scales = meta(8, 1, heads) if packed else meta(1024, heads)
    tensors = AppendTensors(
        cache_seqlens=meta(8, dtype=int32), block_table=meta(8, 64, dtype=int32), cu_seqlens_k_new=offsets,
        rotary_cos=meta(1024, 64), rotary_sin=meta(1024, 64), k_descale=scales, v_descale=scales, q=q,
        cu_seqlens_q=offsets, q_rotated=q,
    )  # fmt: skip
    longest = APPEND_ROWS if packed else None
    options = AppendOptions(max_seqlen_k_new=longest, max_seqlen_q=longest, rotate_q_by_token=True)
    given = (cache, cache, new, new, tensors)
    with compiling_for(capability):
        launch = AppendLaunch(AppendProblem.from_tensors(*given, options))
    name = f"decode append {TYPE_NAMES[dtype]}{' packed' if packed else ''}"
    return only_case(capability, partial(launch, *given), name, tensor_cores=False)


def _appending_case(head_dim: int, invariant: bool, capability: tuple[int, int]) -> CompileCase:
    """Return the case of an attention kernel that appends a new token and applies rotary embedding."""
    bf16, int32, heads = torch.bfloat16, torch.int32, 8
    cache, new = (meta(size, n, heads, head_dim, dtype=bf16) for size, n in ((4096, 16), (1, 1)))
    queries = meta(1, 1, 4 * heads, head_dim, dtype=bf16)
    lengths, table, angles = meta(1, dtype=int32), meta(1, 4096, dtype=int32), meta(65536, head_dim // 2)
    given = (cache, cache, new, new)
    tensors = CacheTensors(lengths, block_table=table)
    appended = AppendTensors(lengths, block_table=table, rotary_cos=angles, rotary_sin=angles)
    with compiling_for(capability):
        options = DecodeOptions(None, 1, invariant=invariant)
        problem = DecodeProblem.from_tensors(queries, cache, cache, tensors, options)
        append = AppendLaunch(AppendProblem.from_tensors(*given, appended, AppendOptions()))
        chosen = config.choose(problem)
        launch = AppendingLaunch(problem, chosen, append)
    case, *_ = cases_of(capability, partial(launch, queries, *given, appended, tensors))
    name = f"decode bf16 head_dim {head_dim} rows {config.NARROW} appending" + " invariant" * invariant
    return replace(case, name=name)


_H100 = Target("H100", (9, 0), 132)
_HOPPER_PAGED = replace(
    PAGED,
    seqlen_q=8,
    total_q=64,
    num_blocks=32768,
    device=_H100,  # type: ignore[arg-type]
    window_right=0,
)
_CHUNK: dict[str, Any] = {"seqlen_q": 1024, "total_q": 8192}
_DIVIDED: dict[str, Any] = {"seqlen_q": 64, "total_q": 512}
"""Few blocks of rows and many keys, so that work tiles are divided into parts."""
_MIXED: dict[str, Any] = {"varlen": True, "batch": 85, "seqlen_q": 255, "total_q": 404, "num_heads_q": 12}
"""A step of chunks and single tokens, with work tiles of 64 rows."""
_WHOLE: dict[str, Any] = {"batch": 16, "total_q": 128}
_MANY_SEQUENCES: dict[str, Any] = {"batch": 40, "total_q": 320}
_HOPPER_FEATURES: dict[str, Any] = {
    "window_left": 1024,
    "softcap": 1.0,
    "alibi": True,
    "sink": True,
    "varlen": True,
    "varlen_new": True,
    "num_splits": 3,
}
_HOPPER_VARIANTS: dict[str, dict[str, Any]] = {
    "page 1": {"page_size": 1},
    "padded": {"page_size": 0, "leftpad": True},
    "page 256": {"page_size": 256},
    "dense": {"page_size": 0, "batch_idx": True},
    "tree": {"window_right": -1, "tree": True},
    "chunk": {"attention_chunk": 8192},
    "group of 7": {"num_heads_q": 56, "num_heads_kv": 8},
    "group of 7, page 1": {"num_heads_q": 56, "num_heads_kv": 8, "page_size": 1},
    "e4m3 by head": {"descale": "head"},
    "e4m3 by sequence": {"descale": "sequence"},
    "e4m3 by block, page 1": {"descale": "block", "page_size": 1},
}
_E4M3 = ("e4m3 by head", "e4m3 by sequence", "e4m3 by block, page 1")
_FEW = ("padded", "tree", "group of 7")
_MANY = ("page 1", "page 256", "dense", "chunk", "group of 7", "group of 7, page 1")
"""Variants compiled with at most 64 query rows per sequence and key head, and with more."""


def _hopper_cases() -> Iterator[CompileCase]:
    """Yield a compile case with all features for each configuration (:func:`every_row`).

    Configurations of equal head sizes also have a case without features, and those with head_dim 128 have
    cases of ``_HOPPER_VARIANTS``. Then come mixed steps, which divide work tiles of few rows. Last come the
    kernels that combine parts, and the one that fills the table of the work queue.
    """
    for block_d, block_dv, cache_dtype, chosen in every_row():
        problem = replace(_HOPPER_PAGED, head_dim=block_d, head_dim_v=block_dv, cache_dtype=cache_dtype)
        rows: tuple[dict[str, Any], ...] = ({}, _WHOLE, _CHUNK)
        problem = next(p for p in (replace(problem, **row) for row in rows) if choose(p) == chosen)
        fp8 = cache_dtype == FP8
        features = _HOPPER_FEATURES | ({"descale": "block"} if fp8 else {})
        if block_d == block_dv:
            yield _hopper_case(problem, "e4m3" if fp8 else "page 16")
        yield _hopper_case(replace(problem, **features), "e4m3 features" if fp8 else "features", chosen)
        if block_d == block_dv == 128:
            few = _FEW if problem.seqlen_q == _HOPPER_PAGED.seqlen_q else _MANY
            for name in _E4M3 if fp8 else few:
                yield _hopper_case(replace(problem, **_HOPPER_VARIANTS[name]), name)
    chunk = replace(_HOPPER_PAGED, **_CHUNK)
    for head_dim, problem, page_size in itertools.product((64, 128, 256), (_HOPPER_PAGED, chunk), (1, 16)):
        problem = replace(problem, invariant=True, num_splits=1, page_size=page_size)
        problem = replace(problem, head_dim=head_dim, head_dim_v=head_dim)
        yield _hopper_case(problem, f"invariant, page {page_size}")
    scaled = replace(chunk, invariant=True, num_splits=1)
    for problem, what in (
        (replace(scaled, softcap=30.0), "soft-cap"),
        (replace(scaled, softmax_scale=-0.1), "negative scale"),
        (replace(scaled, cache_dtype=FP8, descale="head"), "e4m3"),
    ):
        yield _hopper_case(problem, f"invariant, {what}")
    for head_dim in (64, 128):
        problem = replace(_HOPPER_PAGED, **_MIXED, num_heads_kv=2, head_dim=head_dim, head_dim_v=head_dim)
        yield _hopper_case(problem, "mixed, group of 6")
    for problem in (_HOPPER_PAGED, replace(_HOPPER_PAGED, **_MANY_SEQUENCES)):
        combine = only(combine_recorded_kernel, _hopper_kernels(problem), tensor_cores=False)
        unit = "work tile" if combine.constants["C"].BY_WORK_TILE else "program"
        yield replace(combine, name=f"hopper decode combine by {unit}")
    for kernel, name, sizes in (
        (table_kernel, "table", _CHUNK | {"batch": 40, "total_q": 40960}),
        (combine_divided_kernel, "combine of a table", _DIVIDED),
    ):
        cases = _hopper_kernels(replace(_HOPPER_PAGED, **sizes))
        yield only(kernel, cases, name=f"hopper decode {name}", tensor_cores=False)


def _hopper_kernels(problem: DecodeProblem, chosen: HopperDecodeConfig | None = None) -> list[CompileCase]:
    launch = HopperDecodeLaunch(problem, chosen or choose(problem))
    return cases_of(_H100, partial(launch, *inputs_of(problem)))


def _hopper_case(problem: DecodeProblem, name: str, chosen: HopperDecodeConfig | None = None) -> CompileCase:
    case = only(attend_kernel, _hopper_kernels(problem, chosen))
    variant = case.constants["C"]
    more = words({"stream-K": variant.STREAM_K, "queue": not variant.STREAM_K})
    head = f"head_dim {variant.BLOCK_D}/{variant.BLOCK_DV} {variant.BLOCK_M}x{variant.BLOCK_N}"
    return replace(case, name=" ".join(("hopper decode", head, name, *more)))
