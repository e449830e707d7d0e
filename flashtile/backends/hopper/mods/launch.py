"""From a call with functions to the arguments of the Hopper kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.backends.common.counters import zeroed_counters
from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.hopper.backward import launch as plain_backward
from flashtile.backends.hopper.backward.config import BackwardConfig
from flashtile.backends.hopper.config import LAUNCH_REGISTERS
from flashtile.backends.hopper.forward.config import ForwardConfig
from flashtile.backends.hopper.forward.launch import Outputs, schedule_of, views
from flashtile.backends.hopper.forward.launch import variant_of as plain_variant_of
from flashtile.backends.hopper.launch import arguments_of, num_programs, score_numbers
from flashtile.backends.hopper.mods.backward import backward_kernel
from flashtile.backends.hopper.mods.config import ModifiedBackwardVariant, ModifiedForwardVariant
from flashtile.backends.hopper.mods.forward import Numbers, forward_kernel
from flashtile.backends.hopper.work_tiles import TABLE_WIDTH
from flashtile.backends.portable.mods import functions
from flashtile.backends.portable.mods.arguments import SIZES
from flashtile.backends.portable.mods.launch import captured_of, kv_lists_of, q_lists_of
from flashtile.problems.attention import Problem
from flashtile.problems.common import LOG2_E
from flashtile.problems.masks import MAX_CAPTURED, Mods


def function_fields(mods: Mods, fixed: bool) -> dict[str, Any]:
    """Fields of both variants. ``fixed`` numbers take no registers, of which a SCORE_MOD never leaves any."""
    mask, listed = functions.mask_function(mods, True, fixed), mods.block_size is not None
    return {
        "HAS_CUTS": mask is not None or listed,
        "SCORE_MOD": functions.score_function(mods, True, fixed=True),
        "MASK_MOD": mask,
        "LISTED": listed,
        **functions.guards(mods),
    }


def variant_of(problem: Problem, config: ForwardConfig) -> ModifiedForwardVariant:
    """What the forward kernel is compiled for."""
    mods = problem.mods
    assert mods is not None
    fields = vars(plain_variant_of(problem, config))
    more = function_fields(mods, fixed=False)
    size_q, size_kv = mods.block_size or (config.BLOCK_M, config.BLOCK_N)
    if more["LISTED"]:  # blocks of rows cost what the block mask leaves them
        fields |= {"EVEN_N": problem.seqlen_k % size_kv == 0, "QUEUED": True, "PAIRED": False}
    if more["SCORE_MOD"] is not None:  # scores are in natural units, which the softmax scales
        fields["HAS_SCORE_MOD"] = False
    return ModifiedForwardVariant(**fields, **more, OWN=size_q, PARTS=size_kv // config.BLOCK_N)


def numbers_of(problem: Problem) -> Numbers:
    """The floats of the forward."""
    numbers = score_numbers(problem)
    assert problem.mods is not None
    if problem.mods.score_mod:
        numbers["scale_log2"] = LOG2_E
    return Numbers(**numbers, scale=problem.softmax_scale)


def integers_of(problem: Problem, extras: Any) -> dict[str, int]:
    """The kernels' integers that say how captured tensors and lists lie, and numbers of the programs."""
    mods = problem.mods
    assert mods is not None
    batch, heads = (1, 1) if mods.block_size is None else extras.kv_num_blocks.shape[:2]
    return {
        "list_batch": batch,
        "list_heads": heads,
        **dict(zip(SIZES, mods.kernel_sizes(captured_of(extras)), strict=True)),
    }


def backward_variant_of(problem: Problem, config: BackwardConfig) -> ModifiedBackwardVariant:
    """What the backward kernel is compiled for."""
    mods = problem.mods
    assert mods is not None
    fields = vars(plain_backward.variant_of(problem, config))
    more = function_fields(mods, fixed=True)
    size_q, size_kv = mods.block_size or (config.BLOCK_M, config.BLOCK_N)
    fields["MASKED"] |= more["HAS_CUTS"]
    fields["HAS_SCORE_MOD"] |= more["SCORE_MOD"] is not None
    return ModifiedBackwardVariant(**fields, **more, OWN=size_kv, PARTS=size_q // config.BLOCK_M)


def backward_numbers_of(problem: Problem) -> plain_backward.Numbers:
    """The floats of the backward. With score_mod they lead to scores in natural units."""
    numbers = plain_backward.numbers_of(problem)
    assert problem.mods is not None
    if problem.mods.score_mod:
        numbers = numbers._replace(scale_log2=problem.softmax_scale)
    return numbers


def function_tensors(extras: Any, lists: tuple[Tensor | None, ...], missing: Tensor) -> list[Tensor]:
    """Captured tensors and lists as the kernels take them, ``missing`` for those that a call has not."""
    return [missing if tensor is None else tensor for tensor in (*captured_of(extras), *lists)]


class ForwardLaunch:
    """``(q, k, v, extras) -> (out, lse)`` for tensors of one signature."""

    def __init__(self, problem: Problem, config: ForwardConfig) -> None:
        self._problem = problem
        self._variant = variant_of(problem, config)
        self._allocate = Outputs(problem, problem.out_dtype)
        self._kernel: KeptKernel | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> tuple[Tensor, Tensor]:
        out, lse = self._allocate(q)
        if self._kernel is None:
            self._kernel = self._prepare(q, k, v, extras)
        table = zeroed_counters(q.device, TABLE_WIDTH.value) if self._variant.QUEUED else lse
        slopes, sink = extras.alibi_slopes, extras.sink
        self._kernel(
            q.device, q, k, v, out, lse, table, lse if slopes is None else slopes,
            lse if sink is None else sink, *function_tensors(extras, kv_lists_of(extras), lse),
        )  # fmt: skip
        return out, lse

    def _prepare(self, q: Tensor, k: Tensor, v: Tensor, extras: Any) -> KeptKernel:
        problem, variant = self._problem, self._variant
        schedule = schedule_of(problem, variant, k, extras.alibi_slopes)
        scalars = schedule._asdict() | integers_of(problem, extras) | numbers_of(problem)._asdict()
        return KeptKernel(
            forward_kernel,
            num_programs(schedule.num_tiles, q.device),
            arguments_of(forward_kernel, scalars),
            (variant,),
            None,
            arguments_of(forward_kernel, views(problem, variant, q, k, v)),
            maxnreg=LAUNCH_REGISTERS[variant.WARPGROUPS],
        )


class BackwardLaunch(plain_backward.BackwardLaunch):
    """``(dout, dlse, q, k, v, out, lse, extras) -> (dq, dk, dv, dsink, *None of captured tensors)``."""

    kernel = backward_kernel
    _variant_of = staticmethod(backward_variant_of)
    _numbers_of = staticmethod(backward_numbers_of)

    def __call__(self, *arguments: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dq, dk, dv, dsink, _ = super().__call__(*arguments)
        return dq, dk, dv, dsink, *(None,) * MAX_CAPTURED

    def _more_integers(self, extras: Any) -> dict[str, int]:
        return integers_of(self._problem, extras)

    def _more_tensors(self, extras: Any, lse: Tensor) -> tuple:
        return tuple(function_tensors(extras, q_lists_of(extras), lse))
