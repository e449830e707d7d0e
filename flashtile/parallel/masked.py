"""Mask functions over a sequence whose tokens are distributed over ranks.

A rank evaluates the mask of its own queries once, in blocks, and tells the others which blocks of keys some
query sees. In each layer it gathers these keys, and one attention call under a block mask computes its rows,
so nothing is merged. The mask may be any function of two positions: documents, windows, images whose tokens
see each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from flashtile.checks.arguments import ERRORS, check_choice
from flashtile.checks.conversions import as_seconds, in_memory
from flashtile.masks.block_mask import (
    BlockMask,
    as_length,
    block_mask_of,
    create_block_mask,
    device_of_mask,
    listed,
)
from flashtile.masks.mods import mask_mod as as_mask_mod
from flashtile.masks.mods import traced
from flashtile.parallel.attend import Total, wide
from flashtile.parallel.blocks import Mask, Pair, Ranges, union
from flashtile.parallel.gather import Exchange, Needs
from flashtile.parallel.layout import OfRanks, pieces_of, positions, tokens_of
from flashtile.parallel.ranks import TIMEOUT, Ranks, ranks_of
from flashtile.problems.common import UNLIMITED

LAYOUTS = ("contiguous", "zigzag")
"""Layouts in which the tokens that a rank gathers are in the order of the sequence."""


@dataclass(frozen=True, eq=False)
class ShardedMask:
    """A rank's part of a mask, as :func:`shard_mask` makes it. It serves all layers of a step.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mask = flashtile.parallel.shard_mask(flashtile.masks.causal(), 1000)
        >>> mask.ranges  # the only rank needs all keys
        (((0, 1000),),)
        >>> dist.destroy_process_group()
    """

    block_mask: BlockMask
    """The mask of this rank's queries over the keys that it gathers, in the order of the sequence."""
    ranges: tuple[Ranges, ...]
    """For each rank, (start, stop) of the keys of the whole sequence that it gathers."""
    layout: str
    total: int
    """Number of tokens of the whole sequence."""

    def pieces(self, size: int) -> OfRanks:
        """Return the tokens of each rank."""
        return tuple(pieces_of(self.layout, self.total, size, rank) for rank in range(size))

    def check_tokens(self, ranks: Ranks, q: Tensor, k: Tensor) -> None:
        """Raise ValueError unless q and k have this rank's tokens."""
        own = tokens_of(self.pieces(ranks.size)[ranks.rank]) if ranks.size == len(self.ranges) else None
        for name, tensor in (("q", q), ("k", k)):
            if tensor.shape[1] != own:
                raise ValueError(
                    f"{name} must have the {own} tokens that shard gives rank {ranks.rank} of the "
                    f"{self.total} tokens of block_mask over {len(self.ranges)} ranks, got {tensor.shape[1]}"
                )


def shard_mask(
    mask_mod: Callable[..., Any],
    seqlen: int,
    group: Any = None,
    layout: str = "zigzag",
    *,
    mesh: Any = None,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    timeout: float = TIMEOUT,
) -> ShardedMask:
    """Evaluate a mask function of the whole sequence for this rank's queries, once for all layers of a step.

    All ranks of the group call this together. Each evaluates ``mask_mod`` for its own queries and all keys.
    The host waits for the device once.

    Args:
        mask_mod: ``mask_mod(batch, head, q_idx, kv_idx)`` of positions in the *whole* sequence, the same for
            all batches and heads. Tensors that it captures, such as numbers of documents, describe the whole
            sequence on every rank.
        seqlen: number of tokens of the whole sequence.
        group, layout, mesh: as for :func:`shard`; ``layout`` is "zigzag" or "contiguous".
        device, BLOCK_SIZE: as for :func:`flashtile.masks.create_block_mask`.
        timeout: seconds to wait for the other ranks.

    Returns:
        A :class:`ShardedMask`, for ``block_mask`` of :func:`context_parallel_attention`.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument is invalid, or ``mask_mod`` depends on its
            batch or head; the message names it. The other ranks raise a ValueError.
        RuntimeError: a rank has ended or has not made this call within ``timeout``.

    Examples:
        >>> import torch.distributed as dist
        >>> from flashtile import masks
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> picture = torch.tensor([-1, 0, 0, 0, -2, -3])  # tokens 1 to 3 are a picture and see each other
        >>> seen = masks.causal() | masks.document(picture)
        >>> mask = flashtile.parallel.shard_mask(seen, 6)
        >>> q, k, v = torch.randn(3, 1, 6, 4, 32).unbind()
        >>> parts = [flashtile.parallel.shard(t, 1) for t in (q, k, v)]
        >>> out = flashtile.parallel.context_parallel_attention(*parts, block_mask=mask)
        >>> torch.testing.assert_close(
        ...     flashtile.parallel.unshard(out, 1), flashtile.attention(q, k, v, mask_mod=seen)
        ... )
        >>> dist.destroy_process_group()
    """
    timeout, ranks = as_seconds("timeout", timeout), ranks_of(group, mesh)
    host = torch.device("cpu")  # the ranks compare every mask, because each knows only its own part of it
    try:
        check_choice("layout", layout, LAYOUTS)
        seqlen = as_length("seqlen", seqlen)
        block_mask, own = _evaluate(mask_mod, seqlen, ranks, layout, device, BLOCK_SIZE)
    except ERRORS as error:
        ranks.refuse(error, timeout, host)
        raise
    same = {"seqlen": seqlen, "layout": layout, "BLOCK_SIZE": block_mask.BLOCK_SIZE}
    ranges = ranks.agree(same, {"keys": own}, timeout, host)["keys"]
    return ShardedMask(block_mask, ranges, layout, seqlen)


def _evaluate(
    mask_mod: Any, seqlen: int, ranks: Ranks, layout: str, device: Any, sizes: Any
) -> tuple[BlockMask, Ranges]:
    """Return this rank's block mask over the keys that its queries see, and these keys."""
    mask_mod = as_mask_mod(mask_mod)
    mask_mod.check_lengths(seqlen, seqlen)
    trace = traced("mask_mod", mask_mod)
    for name, argument in (("b", "batch"), ("h", "head")):
        if any(name in line.operands for line in trace.program.lines):
            raise NotImplementedError(
                f"mask_mod must be the same for all batches and heads, but depends on its argument {argument}"
            )
    device = device_of_mask(device, trace.tensors)
    pieces = pieces_of(layout, seqlen, ranks.size, ranks.rank)
    # One element more than tokens, because a captured tensor must not be empty.
    rows = pad(positions(pieces, device).int(), (0, 1))

    def of_rows(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(batch, head, rows[q_idx], kv_idx)

    whole = create_block_mask(of_rows, None, None, tokens_of(pieces), seqlen, device, sizes)
    seen = (whole.q_num_blocks + whole.full_q_num_blocks)[0, 0] > 0
    kept, size = seen.nonzero()[:, 0].tolist(), whole.BLOCK_SIZE[1]
    ranges = union([(i * size, min((i + 1) * size, seqlen)) for i in kept])
    if len(kept) == len(seen):
        return whole, ranges
    keys = torch.cat([torch.arange(*of, dtype=rows.dtype, device=rows.device) for of in (*ranges, (0, 1))])

    def of_gathered(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(batch, head, rows[q_idx], keys[kv_idx])

    partial = listed(whole.kv_num_blocks, whole.kv_indices)[..., kept]
    full = listed(whole.full_kv_num_blocks, whole.full_kv_indices)[..., kept]
    lengths, mod = (tokens_of(pieces), len(keys) - 1), as_mask_mod(of_gathered)
    return block_mask_of(partial | full, full, lengths, whole.BLOCK_SIZE, mod), ranges


class _NeedsOfMask(Needs):
    """The keys that ranks need under a :class:`ShardedMask`: those of its ranges, for all their queries."""

    def __init__(self, pieces: OfRanks, ranges: tuple[Ranges, ...]) -> None:
        super().__init__(pieces, pieces, Mask(UNLIMITED, UNLIMITED, (), ()))
        self._ranges = ranges

    def gathered(self, rank: int) -> Pair:
        return Pair(self._ranges[rank], ())


class _Gathered(torch.autograd.Function):
    """Gathers the keys and values that this rank's queries see. Backward gives their gradients back."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        # Backward needs the shapes of k and v, but not their memory.
        ctx.exchange, ctx.like = exchange, [t.new_empty(1).expand(t.shape) for t in (k, v)]
        keys, values = exchange.gather([k, v])()
        return keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        gradients, exchange = [in_memory(dk), in_memory(dv)], ctx.exchange
        sums = [Total(t, wide(t.dtype)) for t in ctx.like]
        add_returned = exchange.give_back(gradients, sums)
        # Copies, because a sum may be written into the memory of its parts.
        exchange.add_own([t.to(wide(t.dtype), copy=True) for t in gradients], sums)
        add_returned()
        return *(total.rounded(t.dtype) for total, t in zip(sums, ctx.like, strict=True)), None


def gather_under_mask(
    k: Tensor, v: Tensor, mask: ShardedMask, ranks: Ranks, timeout: float
) -> tuple[Tensor, Tensor]:
    """Return the keys and values that this rank's queries see under its part of a mask. Differentiable.

    The ranks have agreed on the call.
    """
    needs = _NeedsOfMask(mask.pieces(ranks.size), mask.ranges)
    return _Gathered.apply(k, v, Exchange(ranks, needs, timeout))
