"""First and last key of each sequence under a padding mask, computed on the device.

Attention masks every block of such a call, but visits only blocks within these bounds, which the host does
not know.
"""

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.jit import kernel
from flashtile.backends.common.launch import CachedLaunch
from flashtile.problems.attention import Problem

BLOCK = 1024


@kernel(do_not_specialize=("seqlen_k",))
def key_bounds_kernel(padding, bounds, stride_b, stride_k, seqlen_k, BLOCK: tl.constexpr):
    """Write the bounds [batch, 2] int32 of the keys of each sequence. Grid: (batch,).

    The bounds are the first key for which ``padding`` [batch, seqlen_k] is True, and the index after the last
    such key. Without such a key they are an empty range, (2**31 - 1, 0).
    """
    b = tl.program_id(0)
    first = tl.full([BLOCK], 2**31 - 1, tl.int32)
    end = tl.zeros([BLOCK], tl.int32)
    row = padding + b.to(tl.int64) * stride_b
    for start in range(0, seqlen_k, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        seen = tl.load(row + keys.to(tl.int64) * stride_k, mask=keys < seqlen_k, other=False)
        first = tl.minimum(first, tl.where(seen, keys, 2**31 - 1))
        end = tl.maximum(end, tl.where(seen, keys + 1, 0))
    tl.store(bounds + 2 * b, tl.min(first, 0))
    tl.store(bounds + 2 * b + 1, tl.max(end, 0))


class KeyBounds:
    """The launch ``(key_padding_mask) -> (batch, 2)`` for masks of one signature."""

    def __init__(self, problem: Problem, key_padding_mask: Tensor) -> None:
        self._shape = (problem.batch, 2)
        scalars = (*key_padding_mask.stride(), problem.seqlen_k)
        self._kernel = CachedLaunch(key_bounds_kernel, problem.batch, scalars, (BLOCK,), None)

    def __call__(self, key_padding_mask: Tensor) -> Tensor:
        bounds = torch.empty(self._shape, dtype=torch.int32, device=key_padding_mask.device)
        self._kernel(key_padding_mask.device, key_padding_mask, bounds)
        return bounds
