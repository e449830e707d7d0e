"""Compile cases of the Hopper forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from flashtile.backends.hopper import CAPABILITY
from flashtile.backends.hopper.forward.config import (
    ForwardConfig,
    ForwardVariant,
    alternatives,
    choose,
    every_row,
    of_tables,
)
from flashtile.backends.hopper.forward.kernel import forward_kernel
from flashtile.backends.hopper.forward.launch import HopperForwardLaunch, forward_variant
from flashtile.backends.hopper.forward.rounds import COSTS, plan_of
from flashtile.backends.hopper.work_tiles import tile_table_kernel
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED
from flashtile.tools.inspection.hopper import HOPPER, MODIFIED, PLAIN, inputs, modified, words
from flashtile.tools.inspection.recording import cases_of, only
from flashtile.tools.inspection.report import CompileCase

_CAUSAL = replace(PLAIN, window_right=0)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
"""Sequence lengths that together select every entry of the table of configurations."""


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the compile cases of the forward.

    Entries of the table of configurations that are made for windows are compiled for a causal problem, and
    once more with every feature. All other entries are compiled for a plain problem. The same holds for their
    alternatives for few work tiles. Problems with single features follow, and the kernel that fills the tile
    table of packed sequences.
    """
    if arch != HOPPER:
        return
    seen: set[ForwardVariant] = set()
    for block_d, block_dv, windowed, _, config in every_row():
        same = replace(_CAUSAL if windowed else PLAIN, head_dim=block_d, head_dim_v=block_dv)
        measured = (block_d, block_dv, config.warpgroups, config.BLOCK_N) in COSTS
        configs = alternatives(config) if measured else (config,)
        for length, other in product(LENGTHS, configs):
            plain = replace(same, seqlen_q=length, seqlen_k=length)
            variant = forward_variant(plain, plan_of(plain, other))
            if of_tables(plain) == config and variant not in seen:
                seen.add(variant)
                yield _case(plain, other)
        if windowed:
            everything = replace(
                plain,
                varlen=True,
                seqused_k=True,
                window_left=64,
                window_right=64,
                softcap=1.0,
                alibi=True,
                sink=True,
            )
            yield _case(everything, config)
            dense = replace(everything, varlen=False, seqused_k=False)
            for other in configs:
                variant = forward_variant(dense, plan_of(dense, other))
                if other.warpgroups == 1 and variant not in seen:
                    seen.add(variant)
                    yield _case(dense, other)
    window = replace(_CAUSAL, head_dim=128, head_dim_v=128, window_left=1023, seqlen_q=16384, seqlen_k=16384)
    yield _case(window, choose(window))
    partial_results = replace(
        _CAUSAL, head_dim=128, head_dim_v=128, seqlen_q=16384, seqlen_k=16384, partial=True
    )
    for same in (partial_results, replace(partial_results, window_right=UNLIMITED)):
        yield _case(same, choose(same))
    for head_dim in (128, 256):
        capped = replace(_CAUSAL, head_dim=head_dim, head_dim_v=head_dim, softcap=50.0)
        yield _case(capped, choose(capped))
    few_columns = replace(PLAIN, head_dim=80, head_dim_v=80)
    yield _case(few_columns, choose(few_columns))
    short_window = replace(_CAUSAL, num_heads_q=64, num_heads_kv=8, window_left=127)
    yield _case(short_window, choose(short_window))
    packed = replace(_CAUSAL, head_dim=128, head_dim_v=128, seqlen_q=4, total_q=8)
    yield _case(packed, ForwardConfig(2, 128))
    for kind in MODIFIED:
        for name, problem in modified(kind):
            yield _case(problem, choose(problem), f"{kind} forward", name)
    packed = replace(_CAUSAL, head_dim=128, head_dim_v=128, varlen=True, seqused_k=True)
    cases = _forward(packed, choose(packed))
    yield only(tile_table_kernel, cases, name="hopper tile table", tensor_cores=False)


def _forward(problem: Problem, config: ForwardConfig) -> list[CompileCase]:
    """Return the cases of all kernels of a forward pass."""
    return cases_of(CAPABILITY, partial(HopperForwardLaunch(problem, config), *inputs(problem)))


def _case(problem: Problem, config: ForwardConfig, kind: str = "forward", name: str = "") -> CompileCase:
    case = only(forward_kernel, _forward(problem, config))
    variant = case.constants["C"]
    if name:
        name = f"head_dim {problem.head_dim} {variant.BLOCK_M}x{variant.BLOCK_N} {name}"
    name = f"hopper {kind} {name or _name(problem, variant)}"
    return replace(case, name=name)


def _name(problem: Problem, variant: ForwardVariant) -> str:
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
            "pairs": variant.PAIRED,
            "queue": variant.QUEUED,
        }
    )
    return " ".join((f"head_dim {problem.head_dim}/{problem.head_dim_v}", tile, features, *more))
