"""Contestants that only the workloads ``tree`` have, which are eight answers to one prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashtile.api.attention import flash_attn_varlen_func
from flashtile.api.tree import tree_attention
from flashtile.testing import cu_seqlens
from flashtile.tools.bench.inputs import Inputs
from flashtile.tools.bench.mods import tree_segments
from flashtile.tools.bench.peers import Flashtile, Peer, PeerCall
from flashtile.tools.bench.workload import Workload


class FlashtileTree(Flashtile):
    """``tree_attention``, which makes the mask in every call."""

    label = "flashtile-unprepared"

    def _call(self, workload: Workload, inputs: Inputs, **more: Any) -> PeerCall:
        offsets, parent = tree_segments(workload.seqlen_q, inputs.q.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tree_attention(q[0], k[0], v[0], offsets, parent, backend=self._backend, **more)[None]

        return PeerCall(attend)


@dataclass(frozen=True, kw_only=True)
class RepeatedCall(PeerCall):
    """A call on packed sequences, each of which is a copy of the prompt and one answer.

    The time excludes making the copies and summing their gradients.

    Args:
        rows: for each token of the repeated sequences, its index among the tokens of the tree.
        dout: gradient of out, which has one row for each token of the tree.
    """

    rows: Tensor
    dout: Tensor

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor if tensor is self.dout else tensor[0, self.rows]

    def restore(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return a gradient, summed over copies. ``out`` is returned unchanged, because it has no copies."""
        if tensor.dim() == like.dim():
            return tensor
        summed = tensor.new_zeros((like.shape[1], *tensor.shape[1:]), dtype=torch.float32)
        return summed.index_add_(0, self.rows, tensor.float()).to(tensor.dtype)[None]


class Repeated(Peer):
    """flashtile's causal attention over packed sequences, each the prompt and one answer."""

    name = "repeated"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        device = inputs.q.device
        starts = tree_segments(workload.seqlen_q, "cpu")[0].tolist()
        prompt = torch.arange(starts[1])
        paths = [torch.cat([prompt, torch.arange(*pair)]) for pair in pairwise(starts[1:])]
        lengths, rows = [len(path) for path in paths], torch.cat(paths)
        first = torch.cat([prompt, (rows >= starts[1]).nonzero().flatten()]).to(device)
        offsets, longest = cu_seqlens(lengths, device), max(lengths)
        attend: Callable[..., Tensor] = partial(
            flash_attn_varlen_func, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest,
            max_seqlen_k=longest, causal=True,
        )  # fmt: skip
        # The prompt's rows of out are those of its first copy.
        return RepeatedCall(
            attend=lambda q, k, v: attend(q, k, v)[first][None], rows=rows.to(device), dout=inputs.dout
        )
