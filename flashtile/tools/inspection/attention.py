"""Compile cases of attention, of its weights, and of the all-reduce.

Hopper's kernels serve some calls on ``sm_90a``; the portable ones any call on any GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common import tiles
from flashtile.backends.common.config import padded
from flashtile.backends.common.device import compiling_for
from flashtile.backends.common.launch import Launched
from flashtile.backends.common.preprocess import preprocess_kernel
from flashtile.backends.hopper import CAPABILITY
from flashtile.backends.hopper.backward.bias_gradient import gradient_kernel
from flashtile.backends.hopper.backward.config import BackwardConfig
from flashtile.backends.hopper.backward.config import alternatives as backward_alternatives
from flashtile.backends.hopper.backward.costs import Splits
from flashtile.backends.hopper.backward.halves_dq import halves_dq_kernel
from flashtile.backends.hopper.backward.kernel import backward_kernel
from flashtile.backends.hopper.backward.launch import HopperBackwardLaunch
from flashtile.backends.hopper.backward.sum_parts import sum_parts_kernel
from flashtile.backends.hopper.backward.wide_dkv import dkv_kernel
from flashtile.backends.hopper.backward.wide_dq import dq_kernel
from flashtile.backends.hopper.forward.config import (
    LONG,
    ForwardConfig,
    ForwardVariant,
    alternatives,
    choose,
    every_row,
    of_tables,
)
from flashtile.backends.hopper.forward.kernel import forward_kernel
from flashtile.backends.hopper.forward.launch import HopperForwardLaunch, forward_variant
from flashtile.backends.hopper.forward.rounds import measured_costs, plan_of
from flashtile.backends.hopper.work_tiles import tile_table_kernel
from flashtile.backends.portable import fits
from flashtile.backends.portable.attention.launch import (
    PortableBackwardLaunch,
    PortableForwardLaunch,
    PortableTangentsLaunch,
)
from flashtile.backends.portable.config import (
    HEAD_DIMS,
    Config,
    choose_tangents,
    family_of_capability,
    for_general_masks,
    has_tangents,
    row_for,
    row_with_functions,
)
from flashtile.backends.portable.statistics.kernel import MaxLogitsLaunch
from flashtile.backends.portable.weights.kernel import WeightsLaunch, of_forward
from flashtile.engine import all_reduce
from flashtile.problems.attention import NO_EXTRAS, ModifiedExtras, OptionalTensors, Problem, WeightsProblem
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masks import LISTS, Mods
from flashtile.problems.statistics import MaxLogitsOptions, MaxLogitsProblem, MaxLogitsTensors
from flashtile.tools.inspection.recording import case_of, cases_of, launches_of, meta, only, only_case, words
from flashtile.tools.inspection.report import HOPPER, CompileCase, architecture


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the compile cases of attention, of its weights, and of the all-reduce, for ``arch``."""
    capability = divmod(architecture(arch).capability, 10)
    yield from _plain_cases(capability)
    if capability >= tiles.CAPABILITY:
        yield from _all_reduce_cases(capability)
    yield from _cases_with_functions(capability)
    yield from _tangents_cases(capability)
    for form, top in (("full", 0), ("columns", 0), ("top", 8), ("top", 128)):
        yield from _weights_cases(capability, form, top)
    yield from _max_logits_cases(capability)
    if arch == HOPPER:
        yield from hopper_forward_cases()
        yield from hopper_backward_cases()


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
# A window of 128 on both sides is as wide as the largest tiles, so every loop over tiles is compiled.
FEATURES: dict[str, Any] = {
    "varlen": True, "seqused_k": True, "window_left": 128, "window_right": 128, "softcap": 1.0, "alibi": True,
}  # fmt: skip
_VARIANTS: dict[str, Problem] = {
    "full": PLAIN,
    "causal": replace(PLAIN, window_right=0),
    "masks": replace(PLAIN, window_right=0, mask=True, key_padding_mask=True),
    "bias": replace(PLAIN, bias=True, bias_grad=True),
    "chunk": replace(PLAIN, window_right=0, attention_chunk=1024),
    "short chunk": replace(PLAIN, window_right=0, attention_chunk=100),
    "dropout": replace(PLAIN, window_right=0, dropout_p=0.1),
    "statistics": replace(PLAIN, window_right=0, max_logits=True, entropy=True),
    "features": replace(PLAIN, sink=True, **FEATURES),
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
_WITH_GENERAL_MASKS = (("hopper", 2, 64), ("hopper", 2, 128))
"""Families, element bytes and head sizes for which masks, biases, dropout and statistics are compiled."""
_PREPROCESS = "preprocess"
_KERNELS = ("forward", "dkdv", "dq", "dbias", _PREPROCESS)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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
    dlse = meta(2, *problem.lse_shape).movedim(0, -1) if problem.entropy else None
    launches = launches_of(
        capability,
        partial(PortableForwardLaunch(problem, config), q, k, v, extras),
        partial(PortableBackwardLaunch(problem, config), out, dlse, q, k, v, out, lse, extras),
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
                problem = _sized(any_problem, head_dim, dtype=_DTYPES[dtype])
                needs_general_mask = problem.needs_general_mask is not None
                rare = needs_general_mask or problem.statistics
                if rare and (table_family, element_bytes, head_dim) not in _WITH_GENERAL_MASKS:
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
            problem = _sized(any_problem, head_dim, dtype=_DTYPES[dtype])
            config = row_with_functions(problem, family, element_bytes, head_dim)
            for name, launched in _kernels(capability, problem, config):
                if name != _PREPROCESS:
                    case = f"{name} {dtype} head_dim {head_dim} {variant}"
                    yield case_of(launched, case, tensor_cores=config.precision != "ieee")


def _tangents_cases(capability: tuple[int, int]) -> Iterator[CompileCase]:
    """Yield the cases of the forward kernel in forward mode."""
    variants = {name: _VARIANTS[name] for name in ("full", "causal", "features")}
    variants["packed"] = replace(PLAIN, window_right=0, varlen=True)
    for (dtype, element_bytes), head_dim, variant in product((("bf16", 2), ("fp32", 4)), HEAD_DIMS, variants):
        if not has_tangents(element_bytes, head_dim):
            continue
        problem = _sized(variants[variant], head_dim, dtype=_DTYPES[dtype])
        with compiling_for(capability):
            config = choose_tangents(problem)
        q, k, v, extras = inputs_of(problem)
        call = partial(PortableTangentsLaunch(problem, config), q, k, v, q, k, v, extras)
        on_tensor_cores = element_bytes == 2 or config.precision != "ieee"
        name = f"tangents {dtype} head_dim {head_dim} {variant}"
        yield only_case(capability, call, name, tensor_cores=on_tensor_cores)


def _weights_cases(capability: tuple[int, int], form: str, top: int) -> Iterator[CompileCase]:
    """Yield the kernels that compute attention weights, with many features and with a block mask.

    ``form`` is the form of the weights ("full", "columns" or "top"), and ``top`` the number of weights that
    "top" keeps in each row.
    """
    family = family_of_capability(*capability)
    name = f"{form} {top}" if top else form
    for head_dim in (64, 128):
        problem = _with_form(_sized(PLAIN, head_dim, **FEATURES), form, top)
        config = for_general_masks(row_for(capability, 2, head_dim, windowed=True))
        yield _weights_case(capability, problem, config, f"weights bf16 head_dim {head_dim} {name}")
    problem = _with_form(WITH_MODS, form, top)
    config = row_with_functions(problem, family, 2, 64)
    yield _weights_case(capability, problem, config, f"modified weights bf16 head_dim 64 {name}")


def _max_logits_cases(capability: tuple[int, int]) -> Iterator[CompileCase]:
    """Yield the kernel that reduces the rows' largest scores, of a batch and of packed sequences."""
    of_batch, packed = meta(2, 8, 4096), meta(8, 8192)
    offsets = MaxLogitsTensors(meta(3, dtype=torch.int32))
    for name, rows, given in (("of a batch", of_batch, MaxLogitsTensors()), ("packed", packed, offsets)):
        launch = MaxLogitsLaunch(MaxLogitsProblem.from_tensors(rows, given, MaxLogitsOptions()))
        call = partial(launch, rows, given)
        yield only_case(capability, call, f"largest scores {name}", tensor_cores=False)


def _weights_case(
    capability: tuple[int, int], problem: WeightsProblem, forward: Config, name: str
) -> CompileCase:
    q, k, _, extras = inputs_of(problem)
    launch = WeightsLaunch(problem, of_forward(problem, forward))
    return only_case(capability, partial(launch, q, k, meta(*problem.lse_shape), extras), name)


def _sized(problem: Problem, head_dim: int, length: int | None = None, **fields: Any) -> Problem:
    """Return ``problem`` with equal head sizes, with ``length`` queries and keys if given, and ``fields``."""
    if length is not None:
        fields |= {"seqlen_q": length, "seqlen_k": length}
    return replace(problem, head_dim=head_dim, head_dim_v=head_dim, **fields)


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
        yield only_case(capability, call, f"all-reduce bf16 {name}", tensor_cores=False)


GROUPED = replace(PLAIN, num_heads_kv=2)
WITH_BIAS = {
    "full": replace(GROUPED, bias=True),
    "causal": replace(GROUPED, bias=True, window_right=0),
    "features": replace(
        GROUPED, bias=True, varlen=True, seqused_k=True, window_left=64, window_right=64, softcap=1.0,
        sink=True, deterministic=True,
    ),
}  # fmt: skip
WITH_DROPOUT = {
    "full": replace(PLAIN, dropout_p=0.1),
    "causal": replace(PLAIN, dropout_p=0.1, window_right=0),
    "features": replace(GROUPED, **FEATURES, dropout_p=0.1, sink=True, deterministic=True),
}
WITH_FUNCTIONS = {
    "block mask": replace(GROUPED, mods=replace(_MODS, score_mod="")),
    "block mask, score_mod": replace(GROUPED, mods=_MODS),
    "mask_mod": replace(GROUPED, window_right=0, mods=replace(_MODS, score_mod="", block_size=None)),
    "score_mod": replace(
        GROUPED, window_right=0, mods=replace(_MODS, mask_mod="", ranks=(2,), block_size=None)
    ),
    "ragged, all": replace(GROUPED, seqlen_k=4001, sink=True, mods=replace(_MODS, block_size=(256, 256))),
    "positions": replace(GROUPED, mods=Mods("", "t0: bool = le kv q\nreturn t0", block_size=(128, 128))),
}
"""A learned bias as score_mod, a document mask as mask_mod or block mask, or both. In the case
"positions", the block mask reads no tensor."""
MODIFIED = {"mods": WITH_FUNCTIONS, "dropout": WITH_DROPOUT, "bias": WITH_BIAS}
"""Calls with modifiers, by the kind of modifier and the name of the compile case."""


def modified(kind: str) -> Iterator[tuple[str, Problem]]:
    """Yield (name, problem) of calls with modifier ``kind``, at the head sizes that are compiled for it."""
    for head_dim in (64, 128, 256) if kind == "mods" else (64, 128):
        for name, problem in MODIFIED[kind].items():
            yield name, _sized(problem, head_dim)


def hopper_inputs(problem: Problem, bias: Tensor | None = None) -> tuple[Any, Any, Any, Any]:
    """Return (q, k, v, extras) of a call, on the meta device. The bias defaults to :func:`bias_of`."""
    q, k, v, extras = inputs_of(problem)
    if problem.bias:
        extras = extras._replace(bias=bias_of(problem) if bias is None else bias)
    return q, k, v, extras


def bias_of(problem: Problem) -> Tensor | None:
    """Return a bias that all sequences share, on the meta device; None if the problem has no bias."""
    if not problem.bias:
        return None
    return meta(1, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k, dtype=problem.dtype)


_GROUPED_CAUSAL = replace(GROUPED, window_right=0)
_EVERYTHING = FEATURES | {"sink": True}
_UNGROUPED: dict[str, Any] = {"num_heads_kv": GROUPED.num_heads_q}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
"""Sequence lengths that together select every entry of the table of configurations."""


def hopper_forward_cases() -> Iterator[CompileCase]:
    """Yield the compile cases of the forward.

    Entries of the table of configurations that are made for windows are compiled for a causal problem, and
    once more with every feature. All other entries are compiled for a plain problem. The same holds for their
    alternatives for few work tiles. Problems with single features follow, and the kernel that fills the tile
    table of packed sequences.
    """
    seen: set[ForwardVariant] = set()
    for block_d, block_dv, windowed, _, config in every_row():
        same = replace(_GROUPED_CAUSAL if windowed else GROUPED, head_dim=block_d, head_dim_v=block_dv)
        measured = measured_costs((block_d, block_dv), config) is not None
        configs = alternatives(config) if measured else (config,)
        # Of three lengths, one fills its blocks of three warpgroups, so that its first one is not partial.
        lengths_more = (0, 64, 128) if windowed and config.warpgroups == 3 else (0,)
        for more, length, other in product(lengths_more, LENGTHS, configs):
            plain = replace(same, seqlen_q=length + more, seqlen_k=length + more)
            if of_tables(plain) != config or (more and other != config):
                continue
            own, variant = plain, forward_variant(plain, plan_of(plain, other))
            if variant not in seen:
                seen.add(variant)
                yield _forward_case(plain, other)
        if windowed:
            everything = replace(own, **_EVERYTHING)
            yield _forward_case(replace(everything, **_UNGROUPED), config)
            dense = replace(everything, varlen=False, seqused_k=False)
            for other in configs:
                variant = forward_variant(dense, plan_of(dense, other))
                if other.warpgroups == 1 and variant not in seen:
                    seen.add(variant)
                    yield _forward_case(dense, other)
    packed = replace(_GROUPED_CAUSAL, varlen=True)
    for head_dim, left in ((64, UNLIMITED), (64, 63), (96, 63), (128, UNLIMITED)):
        short = _sized(packed, head_dim, 128, batch=64, window_left=left)
        yield _forward_case(short)
        if left == UNLIMITED:
            tiny = _sized(short, head_dim, 40, num_heads_q=7 * short.num_heads_kv)
            yield _forward_case(tiny)
            yield _forward_case(replace(short, **_UNGROUPED))
            for same in (short, tiny):
                yield _forward_case(replace(same, **_EVERYTHING), choose(short))
    for head_dim in (64, 128, 256):
        documents = _sized(packed, head_dim, LONG)
        yield _forward_case(documents)
        yield _forward_case(replace(documents, **_EVERYTHING), choose(documents))
        if head_dim == 64:  # three warpgroups
            yield _forward_case(replace(documents, **_UNGROUPED))
    for head_dim in (64, 96, 128):
        window = _sized(packed, head_dim, 4096, window_left=1023)
        yield _forward_case(window)
        yield _forward_case(replace(window, **_UNGROUPED))
        if head_dim < 128:  # there, documents with every feature have this tile as well
            yield _forward_case(replace(window, **_EVERYTHING), choose(window))
    for head_dim, left in ((64, UNLIMITED), (128, UNLIMITED), (128, 1023)):
        yield _forward_case(_sized(packed, head_dim, invariant=True, window_left=left))
    long = _sized(_GROUPED_CAUSAL, 128, 16384)
    for left in (511, 1023):
        yield _forward_case(replace(long, window_left=left))
    yield _forward_case(_sized(long, 128, 2048, window_left=1023))
    for right in (0, UNLIMITED):
        yield _forward_case(replace(long, partial=True, window_right=right))
    for head_dim in (128, 256):
        yield _forward_case(_sized(_GROUPED_CAUSAL, head_dim, softcap=50.0))
    for head_dim, length in ((64, 16384), (128, 1024), (128, 16384), (256, 16384)):
        yield _forward_case(_sized(_GROUPED_CAUSAL, head_dim, length, max_logits=True, entropy=True))
    yield _forward_case(_sized(GROUPED, 80))
    yield _forward_case(replace(_GROUPED_CAUSAL, num_heads_q=64, num_heads_kv=8, window_left=127))
    few_queries = _sized(_GROUPED_CAUSAL, 128, seqlen_q=4, total_q=8)
    yield _forward_case(few_queries, ForwardConfig(2, 128))
    for kind in MODIFIED:
        for name, problem in modified(kind):
            yield _forward_case(problem, kind=f"{kind} forward", name=name)
    used = _sized(packed, 128, seqused_k=True)
    cases = _forward(used, choose(used))
    yield only(tile_table_kernel, cases, name="hopper tile table", tensor_cores=False)


def _forward(problem: Problem, config: ForwardConfig) -> list[CompileCase]:
    """Return the cases of all kernels of a forward pass."""
    return cases_of(CAPABILITY, partial(HopperForwardLaunch(problem, config), *hopper_inputs(problem)))


def _forward_case(
    problem: Problem, config: ForwardConfig | None = None, kind: str = "forward", name: str = ""
) -> CompileCase:
    """Return the case of a call, with the configuration that it would get if ``config`` is None."""
    case = only(forward_kernel, _forward(problem, config or choose(problem)))
    variant = case.constants["C"]
    if name:
        name = f"head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}"
    name = f"hopper {kind} {name or _forward_name(problem, variant)}"
    return replace(case, name=name)


def _forward_name(problem: Problem, variant: ForwardVariant) -> str:
    tile = f"{variant.BLOCK_M}x{variant.BLOCK_N}"
    mask = "window" if variant.HAS_LEFT else "causal" if variant.HAS_RIGHT else "full"
    everything = variant.SOFTCAP and variant.ALIBI
    features = "features" if everything else f"{mask} partial" if problem.partial else mask
    more = words(
        {
            "soft-cap": variant.SOFTCAP and not everything,
            "ping-pong": variant.PING_PONG,
            "q in registers": variant.Q_IN_REGISTERS,
            "o in parts": variant.O_IN_PARTS,
            "lazy": variant.LAZY_RESCALE,
            "packed": variant.PACK > 1,
            "unused rows": variant.PACKED_HEADS < variant.PACK,
            "two programs": variant.WARPGROUPS == 1 and variant.PROGRAMS == 2,
            "pairs": variant.PAIRED,
            "queue": variant.QUEUED,
            "first block partial": variant.FIRST_BLOCK_PARTIAL,
            "statistics": variant.ENTROPY,
            "invariant": variant.INVARIANT,
        }
    )
    return " ".join((f"head_dim {problem.head_dim}/{problem.head_dim_v}", tile, features, *more))


_DQ = (dq_kernel, halves_dq_kernel)
_CAUSAL = replace(PLAIN, window_right=0)
_GROUPED_FEATURES = replace(GROUPED, **FEATURES, deterministic=True)
_MASKS = {"full": PLAIN, "causal": _CAUSAL, "features": _GROUPED_FEATURES}
_KNOWN = replace(_GROUPED_FEATURES, varlen=False, seqused_k=False, deterministic=False)
"""Every feature of the calls that may have another configuration than that of the tables."""
_TABLE = ((32, 32), (64, 64), (128, 128), (64, 128), (128, 64))
_WIDE = ((256, 256), (256, 128), (192, 128), (64, 256), (512, 512))
_SHARED = Splits(heads=4, rows=2)
"""Eight programs share a block of keys: each has one of four query heads and half of the rows."""


def hopper_backward_cases() -> Iterator[CompileCase]:
    """Yield the compile cases of the kernels of the backward pass.

    Each pair of equal head sizes has three cases: without a mask, causal, and with every feature at once.
    Unequal head sizes have only the case with every feature, because they are not timed. Further cases have
    splits (several programs share a block of keys), padded head sizes, or modifiers such as dropout.
    """
    for sizes, (mask, problem) in product((*_TABLE, *_WIDE), _MASKS.items()):
        if mask == "features" or sizes[0] == sizes[1]:
            yield from _products(mask, replace(problem, head_dim=sizes[0], head_dim_v=sizes[1]))
    yield from _products("causal", _sized(_CAUSAL, 128, partial=True))
    for size, (mask, problem) in product((32, 64), (_MASKS | {"features": _KNOWN}).items()):
        problem = _sized(problem, size)
        for config in backward_alternatives(problem)[1:]:
            yield from _products(mask, problem, config=config)
            grouped = replace(problem, num_heads_kv=GROUPED.num_heads_kv)  # _SHARED divides four heads
            yield from _products(mask, grouped, _SHARED, config)
    # With one block of keys, dQ is stored without dq_accum.
    for sizes, (mask, problem) in product(_TABLE, (_MASKS | {"features": _KNOWN}).items()):
        if mask == "features" or sizes[0] == sizes[1]:
            short = replace(problem, seqlen_q=128, seqlen_k=128, head_dim=sizes[0], head_dim_v=sizes[1])
            if mask == "features":
                short = replace(short, varlen=True, window_left=63, window_right=63)
            for config in backward_alternatives(short):
                yield from _products(f"{mask} one block", short, config=config)
    # Short packed sequences have the other configurations as well.
    for mask, problem in {"packed causal": _CAUSAL, "packed features": _KNOWN}.items():
        short = _sized(problem, 64, 256, varlen=True, batch=64)
        fewest_rows = min(backward_alternatives(short), key=attrgetter("BLOCK_M"))
        yield from _products(mask, short, config=fewest_rows)
    for size in (32, 64, 128, 256, 512):
        yield from _products("causal", _sized(_GROUPED_CAUSAL, size), _SHARED)
    # Where work tiles are few, dQ is computed in single blocks of rows, not in pairs.
    for case in _products("causal", _sized(_CAUSAL, 256, 384, batch=1, num_heads_q=1, num_heads_kv=1)):
        if case.kernel is dq_kernel:
            yield replace(case, name=f"{case.name} single")
    # S and dP skip columns of padding at these head sizes.
    for sizes in ((40, 40), (80, 80), (96, 96), (192, 128), (160, 160), (320, 320)):
        yield from _products("causal", replace(_CAUSAL, head_dim=sizes[0], head_dim_v=sizes[1]))
    # With unequal head sizes, dK and dV have shared memory of their own.
    yield from _products("features", replace(_GROUPED_FEATURES, head_dim=256, head_dim_v=128), _SHARED)
    parts = replace(GROUPED, head_dim=72, head_dim_v=128)
    config = replace(backward_alternatives(parts)[0], HEAD_SPLITS=_SHARED.heads, ROW_SPLITS=_SHARED.rows)
    name = "hopper backward sum of parts head_dim 72/128"
    yield only(sum_parts_kernel, _backward(parts, config), name=name, tensor_cores=False)
    for kind in MODIFIED:
        for name, problem in modified(kind):
            yield from _modified(kind, name, problem)
    for name, problem in modified("bias"):
        problem = replace(problem, varlen=False, seqused_k=False, bias_grad=True)
        case = only(gradient_kernel, _backward(problem))
        variant = case.constants["C"]
        tile = f"{variant.BLOCK_M}x{variant.BLOCK_N}"
        yield replace(case, name=f"hopper bias gradient head_dim {problem.head_dim} {tile} {name}")
    with_sink = _sized(PLAIN, 128, sink=True)
    name = "hopper backward preprocess head_dim 128"
    yield only(preprocess_kernel, _backward(with_sink, has_dlse=True), name=name, tensor_cores=False)
    # The longest of these sequences has half of the tokens, so that programs find theirs.
    cases = _backward(replace(with_sink, varlen=True, batch=8, window_right=0), has_dlse=True)
    yield only(preprocess_kernel, cases, name=f"{name} packed", tensor_cores=False)
    yield only(tile_table_kernel, cases, name="hopper backward tile table", tensor_cores=False)


def _backward(
    problem: Problem, config: BackwardConfig | None = None, bias: Tensor | None = None, has_dlse: bool = False
) -> list[CompileCase]:
    """Return the cases of all kernels of a backward pass, by default in the first of its configurations."""
    config = config or backward_alternatives(problem)[0]
    q, k, v, extras = hopper_inputs(problem, bias)
    out, lse = meta(*problem.out_shape, dtype=problem.out_dtype), meta(*problem.lse_shape)
    given = (out, lse if has_dlse else None, q, k, v, out, lse, extras)
    return cases_of(CAPABILITY, partial(HopperBackwardLaunch(problem, config), *given))


def _products(
    mask: str,
    problem: Problem,
    splits: Splits = Splits(),  # noqa: B008
    config: BackwardConfig | None = None,
) -> Iterator[CompileCase]:
    """Yield the compile case of ``backward_kernel``, or two compile cases for head sizes over 128.

    Without ``config``, the configuration is the first of the alternatives. With splits, head sizes over 128
    have only the case of ``dkv_kernel``; ``dq_kernel`` stays the same.
    """
    assert problem.group_size % splits.heads == 0
    config = config or backward_alternatives(problem)[0]
    config = replace(config, HEAD_SPLITS=splits.heads, ROW_SPLITS=splits.rows)
    for case in _backward(problem, config):
        if case.kernel in (backward_kernel, dkv_kernel) or (case.kernel in _DQ and splits.parts == 1):
            variant = case.constants["C"]
            sizes = f"{problem.head_dim}/{problem.head_dim_v}"
            what = f"{mask}{' partial' * problem.partial}{' shared' * (config.parts > 1)}"
            tile = f"{variant.BLOCK_M}x{variant.BLOCK_N}"
            yield replace(case, name=f"hopper {_product(case)} head_dim {sizes} {tile} {what}")


def _modified(kind: str, name: str, problem: Problem) -> Iterator[CompileCase]:
    """Yield the compile case of ``backward_kernel`` with a modifier, or two for head sizes over 128.

    A bias of dense sequences has a second case, in which the kernel writes dS as the bias's gradient.
    """
    shared = bias_of(problem)
    biases = [shared]
    if shared is not None and not problem.varlen:
        biases.append(shared.expand(problem.batch, -1, -1, -1).contiguous())
    for bias in biases:
        own = replace(problem, bias_grad=bias is not shared)
        for case in _backward(own, bias=bias):
            if case.kernel in (backward_kernel, dkv_kernel, *_DQ):
                variant = case.constants["C"]
                sizes = f"head_dim {own.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N}"
                stores_ds = " dS" * (case.kernel is backward_kernel and variant.STORES_DS)
                named = f"hopper {kind} {_product(case)} {sizes} {name}{stores_ds}"
                yield replace(case, name=named)


def _product(case: CompileCase) -> str:
    """Return "backward", and which gradients the kernel computes if it does not compute all."""
    what = case.kernel.fn.__name__.removesuffix("_kernel")
    return "backward" if what == "backward" else f"backward {what}"
