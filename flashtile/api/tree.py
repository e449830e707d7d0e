"""Attention over packed segments that share prefixes. Each prefix is stored and computed once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashtile.api.attention import attention
from flashtile.checks.attention import check_segments
from flashtile.masks.trees import create_tree_mask
from flashtile.problems.common import UNLIMITED


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    parent: Tensor,
    *,
    window_left: int = UNLIMITED,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | Any:
    """Causal attention over trees of packed segments, differentiable in q, k, v and sink.

    A token attends to all tokens of its segment's ancestors, and to its own segment up to itself. Its result
    is that of causal attention over its path from the root. Several answers to one prompt are a tree of depth
    1, conversations that branch are deeper trees, and each root starts a separate document. dK and dV of a
    segment are summed over the queries of the segment and of its descendants. Blocks of scores between
    branches are skipped. The host does not wait for a GPU.

    For several layers, make the mask once: ``mask = flashtile.masks.create_tree_mask(cu_seqlens, parent,
    total, q.device)``. Then call ``flashtile.attention(q[None], k[None], v[None], block_mask=mask)`` in each
    layer.

    Args:
        q: (total, heads_q, head_dim). Dtypes are those of :func:`attention`.
        k: (total, heads_kv, head_dim); heads_q must be a multiple of heads_kv.
        v: (total, heads_kv, head_dim_v).
        cu_seqlens: (segments + 1,) int32 or int64 offsets of the segments, on any device. Segments may be
            empty. Tokens after the last offset have out and gradients 0, and lse -inf.
        parent: (segments,) int32 or int64, on any device: for each segment, the index of the segment that it
            continues, or -1 for a root. Segments may be packed in any order. The values of ``cu_seqlens`` and
            ``parent`` are checked if both are on the CPU, otherwise only with ``FLASHTILE_DEBUG=1``.
        window_left: a token attends to at most this many tokens before it in its path; -1: no limit.
        softmax_scale, softcap, sink, deterministic, return_lse, backend: as for :func:`attention`.

    Returns:
        out, (total, heads_q, head_dim_v); with ``return_lse`` (out, lse), lse (heads_q, total).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Examples:
        >>> cu_seqlens = torch.tensor([0, 100, 130, 150])  # a prompt of 100 tokens, answers of 30 and 20
        >>> parent = torch.tensor([-1, 0, 0])
        >>> q, k, v = torch.randn(3, 150, 4, 64).unbind()
        >>> out = flashtile.tree_attention(q, k, v, cu_seqlens, parent)
        >>> path = [*range(100), *range(130, 150)]  # the prompt and the second answer
        >>> alone = flashtile.attention(q[None, path], k[None, path], v[None, path], causal=True)
        >>> torch.testing.assert_close(out[path], alone[0])
    """
    check_segments(q, k, v)
    block_mask = create_tree_mask(cu_seqlens, parent, q.shape[0], q.device, window_left=window_left)
    result = attention(
        q[None], k[None], v[None], softmax_scale=softmax_scale, softcap=softcap, sink=sink,
        block_mask=block_mask, deterministic=deterministic, return_lse=return_lse, backend=backend,
    )  # fmt: skip
    return (result[0][0], result[1][0]) if return_lse else result[0]
