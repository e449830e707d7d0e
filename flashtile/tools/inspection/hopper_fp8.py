"""Compile cases of attention over FP8 tensors on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from flashtile.backends.hopper import CAPABILITY
from flashtile.backends.hopper.fp8.config import Fp8Config, every_row
from flashtile.backends.hopper.fp8.kernel import fp8_forward_kernel
from flashtile.backends.hopper.fp8.launch import Fp8ForwardLaunch
from flashtile.problems.fp8 import Fp8Problem
from flashtile.tools.inspection import hopper
from flashtile.tools.inspection.hopper import HOPPER, words
from flashtile.tools.inspection.portable_fp8 import attended
from flashtile.tools.inspection.recording import cases_of, only
from flashtile.tools.inspection.report import CompileCase

PLAIN = Fp8Problem(
    **vars(hopper.PLAIN) | {"dtype": torch.float8_e4m3fn}, v_transposed=True, block_scales=True
)


def compile_cases(arch: str) -> Iterator[CompileCase]:
    """Yield the compile cases of each entry of the table of configurations, and two more.

    Entries without a window get a plain case. Entries with a window get a case with all features, and a
    causal case if v is transposed in memory. Entries for unequal head sizes have only a plain case. The two
    further cases, at head_dim 128, are a short causal q with several heads per tile, and a call without
    scales.
    """
    if arch != HOPPER:
        return
    for block_d, block_dv, windowed, v_transposed, config in every_row():
        plain = replace(PLAIN, head_dim=block_d, head_dim_v=block_dv, v_transposed=v_transposed)
        if not windowed:
            yield _case(plain, config)
            continue
        if v_transposed:
            yield _case(replace(plain, window_right=0), config)
        everything = replace(plain, varlen=True, window_left=64, window_right=64, softcap=1.0)
        yield _case(replace(everything, seqused_k=not v_transposed), config)
    square = replace(PLAIN, head_dim=128, head_dim_v=128)
    yield _case(replace(square, window_right=0, seqlen_q=4, total_q=8), Fp8Config(2, 128))
    unscaled = replace(square, v_transposed=False, block_scales=False)
    yield _case(unscaled, Fp8Config(2, 128), scaled=False)


def _case(problem: Fp8Problem, config: Fp8Config, scaled: bool = True) -> CompileCase:
    q, k, v, tensors = attended(problem)
    if not scaled:
        tensors = tensors._replace(q_descale=None, k_descale=None, v_descale=None)
    sizes, tile = f"{problem.head_dim}/{problem.head_dim_v}", f"{config.BLOCK_M}x{config.BLOCK_N}"
    features = "features" if problem.softcap else "causal" if problem.window_right == 0 else "full"
    more = words(
        {
            "ping-pong": config.PING_PONG,
            "q in registers": config.Q_IN_REGISTERS,
            "packed": problem.seqlen_q < config.BLOCK_M,
            "v row by row": not problem.v_transposed,
            "without scales": not scaled,
        }
    )
    cases = cases_of(CAPABILITY, partial(Fp8ForwardLaunch(problem, config), q, k, v, tensors))
    name = " ".join((f"hopper fp8 forward head_dim {sizes}", tile, features, *more))
    return only(fp8_forward_kernel, cases, name=name)
