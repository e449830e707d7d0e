"""From tensors to the arguments of the kernels of attention weights."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from flashtile.backends.common.kept_kernel import KeptKernel
from flashtile.backends.common.launch import padded
from flashtile.backends.portable.launch import attention_kernel
from flashtile.backends.portable.mods.launch import Arguments, captured_of, kv_lists_of, q_lists_of
from flashtile.backends.portable.weights.config import WeightsConfig
from flashtile.backends.portable.weights.kernel import weights_kernel
from flashtile.backends.portable.weights.modified import modified_weights_kernel
from flashtile.problems.attention import WeightsProblem


def constants_of(problem: WeightsProblem) -> dict[str, Any]:
    """Constants that attention itself does not have."""
    return {"FORM": problem.form, "TOP": problem.top, "BLOCK_TOP": padded(problem.top) if problem.top else 0}


class Launch:
    """``(q, k, lse, extras) -> (weights, indices)`` for tensors of one signature."""

    def __init__(self, problem: WeightsProblem, config: WeightsConfig) -> None:
        self._problem, self._config = problem, config
        self._kernel: KeptKernel | None = None

    def __call__(self, q: Tensor, k: Tensor, lse: Tensor, extras: Any) -> tuple[Tensor, Tensor | None]:
        problem, tile = self._problem, self._config.tile
        weights = q.new_zeros(problem.weights_shape, dtype=problem.weights_dtype)
        indices = None
        if problem.form == "top":
            indices = q.new_full(problem.weights_shape, -1, dtype=torch.int64)
        by_keys = problem.form == "columns"
        blocks = (
            triton.cdiv(problem.seqlen_k, tile.BLOCK_N)
            if by_keys
            else triton.cdiv(problem.seqlen_q, tile.BLOCK_M)
        )
        programs = blocks * problem.num_heads_q * problem.batch
        if programs == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
            return weights, indices
        lse = lse.contiguous()
        if problem.mods is not None:
            tensors = (
                extras.alibi_slopes, *captured_of(extras), *(q_lists_of if by_keys else kv_lists_of)(extras)
            )  # fmt: skip
        else:
            tensors = (
                extras.cu_seqlens_q, extras.cu_seqlens_k, extras.seqused_k, extras.alibi_slopes, extras.mask,
                extras.key_padding_mask, extras.bias, extras.seqused_q,
            )  # fmt: skip
        if self._kernel is None:
            self._kernel = self._prepare(q, k, extras, programs)
        self._kernel(q.device, q, k, lse, weights, indices, *tensors)
        return weights, indices

    def _prepare(self, q: Tensor, k: Tensor, extras: Any, programs: int) -> KeptKernel:
        problem, tile, precision = self._problem, self._config.tile, self._config.precision
        more = constants_of(problem)
        if problem.mods is None:
            return attention_kernel(
                weights_kernel, programs, tile, problem, precision, (q, k, k), extras, **more
            )
        arguments = Arguments(problem, q, k, k, extras)
        by_keys = problem.form == "columns"
        return arguments.kernel(modified_weights_kernel, programs, tile, precision, by_keys, **more)
