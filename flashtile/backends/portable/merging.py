"""Merges two float32 results over different keys, in one pass over out that also rounds it.

One program owns ROWS tokens of one head: load both results and their lse, weigh them by exp(lse - max), add,
round, store.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.config import padded
from flashtile.backends.common.jit import kernel
from flashtile.backends.common.tiles import LN_2, LOG2_E

ROWS = 16
"""Tokens per program. Not measured against others."""


@dataclass(frozen=True)
class MergeVariant:
    """Constants of the kernel."""

    HEAD_DIM: int
    BLOCK_D: int
    ROWS: int


@kernel(do_not_specialize=("start", "tokens", "more_tokens", "num_heads"))
def merge_kernel(
    out, lse, more_out, more_lse, result, start, tokens, more_tokens, num_heads, C: tl.constexpr
):
    """Merge two partial results over different keys into ``result`` and ``lse``; ``result`` may be ``out``.

    Grid: (blocks of ROWS tokens * heads * batch,); heads vary fastest. out and result have shape (batch,
    tokens, heads, HEAD_DIM). lse has shape (batch, heads, tokens) and is a natural logarithm. ``more_out``
    and ``more_lse`` are for the ``more_tokens`` tokens of out from token ``start`` on.
    """
    # Heads vary fastest, because they are adjacent in memory.
    pid = tl.program_id(0)
    head = pid % num_heads
    blocks = tl.cdiv(tokens, C.ROWS)
    token = pid // num_heads % blocks * C.ROWS + tl.arange(0, C.ROWS)
    b = (pid // num_heads // blocks).to(tl.int64)
    exists = token < tokens
    more_token = token - start
    # Tokens without a second result get lse -inf for it, so their first result is only rounded.
    has_more = exists & (more_token >= 0) & (more_token < more_tokens)
    column = tl.arange(0, C.BLOCK_D)[None, :]
    row = (b * tokens + token) * num_heads + head
    more_row = (b * more_tokens + more_token) * num_heads + head
    inside = exists[:, None] & (column < C.HEAD_DIM)
    elements = row[:, None] * C.HEAD_DIM + column
    first = tl.load(out + elements, mask=inside, other=0.0)
    second = tl.load(
        more_out + more_row[:, None] * C.HEAD_DIM + column, mask=inside & has_more[:, None], other=0.0
    )
    lse_row = lse + (b * num_heads + head) * tokens + token
    more_lse_row = more_lse + (b * num_heads + head) * more_tokens + more_token
    first_lse = tl.load(lse_row, mask=exists, other=-float("inf")) * LOG2_E
    second_lse = tl.load(more_lse_row, mask=has_more, other=-float("inf")) * LOG2_E
    # The softmax of two numbers, the log-sum-exps. A row that saw no key on either side has -inf and -inf:
    # both weights are then 0, and out is 0.
    largest = tl.maximum(first_lse, second_lse)
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    first_weight = tl.exp2(first_lse - shift)
    second_weight = tl.exp2(second_lse - shift)
    total = first_weight + second_weight
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    merged = first * (first_weight * scale)[:, None] + second * (second_weight * scale)[:, None]
    tl.store(result + elements, merged.to(result.dtype.element_ty), mask=inside)
    tl.store(lse_row, (shift + tl.log2(total)) * LN_2, mask=exists)


def merge(
    out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor, start: int, dtype: torch.dtype
) -> Tensor:
    """Merge the results (out, lse) and (more_out, more_lse) over different keys. Return out in ``dtype``.

    lse is updated in place. out is updated in place if ``dtype`` is float32. All tensors are contiguous and
    float32: out has shape (batch, tokens, heads, head_dim), lse (batch, heads, tokens). ``more_out`` and
    ``more_lse`` are for the tokens of out from token ``start`` on, and may end before out.
    """
    batch, tokens, heads, head_dim = out.shape
    result = out if dtype == out.dtype else torch.empty_like(out, dtype=dtype)
    programs = triton.cdiv(tokens, ROWS) * heads * batch
    if programs and more_out.shape[1]:
        variant = MergeVariant(head_dim, padded(head_dim), ROWS)
        with torch.cuda.device_of(out):
            merge_kernel[(programs,)](
                out, lse, more_out, more_lse, result, start, tokens, more_out.shape[1], heads, C=variant
            )
        return result
    return result.copy_(out)
