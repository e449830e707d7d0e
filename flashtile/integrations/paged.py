"""Attention over paged caches, as the plug-ins of vLLM and SGLang call it.

A layer calls the internal operator of ``flash_attn_with_kvcache`` directly. The types of an engine's
arguments never vary, and outside of CUDA graphs this saves host time in every layer. Kernels are chosen by
shapes, never by lengths, so an engine may capture the calls in CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashtile.operators import decode as operators
from flashtile.problems.decode import CacheTensors, DecodeOptions

INVARIANT_QUERIES = 128
"""Lower bound of ``max_seqlen_q`` for attention over a cache if results must not depend on the batch. For all
``max_seqlen_q`` above the bound, the kernel has the same tile."""
MAX_INVARIANT_HEAD = 128
"""Largest head size at which the results of Hopper's kernel do not depend on the batch. For larger heads, the
kernel rescales all rows of a tile when one row needs it, so results depend on how a prompt is cut into
chunks. The portable kernel, which rescales each row by itself, is used instead."""


@dataclass
class Step:
    """Lengths and pages of the sequences in one engine step, for all layers of a kind."""

    num_actual_tokens: int
    max_query_len: int
    """Upper bound of the number of queries of a sequence."""
    query_start_loc: Tensor
    """(num_reqs + 1,) int32: the first row of q of each sequence, and the end."""
    seq_lens: Tensor
    """(num_reqs,) int32: number of keys of each sequence, including those of this step."""
    block_table: Tensor
    """(num_reqs, max_blocks) int32."""
    is_one_query_each: bool
    """Whether row i of q is the only query of sequence i."""


def rounded_queries(most: int, least: int = 0) -> int:
    """Return ``most`` rounded up to a power of two, and at least ``least``.

    Steps of different lengths then reuse the same prepared launches. The tile of a launch is chosen for the
    rounded number of queries.
    """
    return max(1 << max(most - 1, 0).bit_length(), least)


class PagedAttention:
    """The options of one layer's calls.

    Args:
        window: number of keys before a query that it sees, and after it if the layer is not causal; -1 for
            all.
        invariant: whether a sequence's result must not depend on the rest of the batch.
    """

    def __init__(self, scale: float, softcap: float, window: int, head_dim: int, invariant: bool) -> None:
        wide = invariant and head_dim > MAX_INVARIANT_HEAD
        options = DecodeOptions(
            softmax_scale=scale,
            softcap=softcap,
            num_splits=1 if invariant else 0,
            return_lse=False,
            backend="portable" if wide and torch.cuda.is_available() else None,
        )
        self.causal_options = options._replace(causal=True, window_left=window, window_right=0)
        self.options = options._replace(window_left=window, window_right=window)
        self._options_of: dict[tuple[bool, int], DecodeOptions] = {}
        """Options by (causal, max_query_len). There are few, because max_query_len is a power of two."""

    def attend(
        self,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        out: Tensor,
        step: Step,
        causal: bool,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        """Compute attention from ``query`` to ``cache`` and write it to ``out``.

        ``query`` is (tokens, heads, head_dim). Rows after the step's tokens are neither read nor written.
        ``cache`` is the layer's keys and values, (num_blocks, block_size, heads_kv, head_dim).
        """
        if step.is_one_query_each:  # query i belongs to sequence i, so no offsets are needed
            options, starts = self.causal_options if causal else self.options, None
            tokens = step.num_actual_tokens
            query, out = query[:tokens].unsqueeze(1), out[:tokens].unsqueeze(1)
        else:
            options, starts = self._options_for(causal, step.max_query_len), step.query_start_loc
        tensors = CacheTensors(
            step.seq_lens, None, None, step.block_table, starts, None, alibi_slopes, sinks, k_scale, v_scale
        )
        operators.decode((query, *cache), tensors, options, (out, None))

    def _options_for(self, causal: bool, max_query_len: int) -> DecodeOptions:
        options = self._options_of.get((causal, max_query_len))
        if options is None:
            options = self.causal_options if causal else self.options
            options = options._replace(max_seqlen_q=max_query_len)
            self._options_of[causal, max_query_len] = options
        return options
