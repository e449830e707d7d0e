"""Layouts: which tokens of a sequence each rank has, and functions that cut and join tensors accordingly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.checks.arguments import check_choice, check_dense
from flashtile.checks.conversions import as_int, as_seconds, in_memory
from flashtile.parallel.ranks import TIMEOUT, ranks_of

LAYOUTS = ("contiguous", "zigzag", "striped")


class Piece(NamedTuple):
    """The ``length`` tokens ``start``, ``start + step``, ... of a sequence."""

    start: int
    length: int
    step: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.length * self.step


OfRanks = tuple[tuple[Piece, ...], ...]
"""For each rank, the tokens of the sequence that it has."""


def pieces_of(layout: str, total: int, size: int, rank: int) -> tuple[Piece, ...]:
    """Return the tokens of a rank in its own order, as pieces (:class:`Piece`) of the sequence.

    The sequence has ``total`` tokens, and ``size`` ranks share it.

    "contiguous" cuts the sequence into one part for each rank. "zigzag" cuts it into 2 * size chunks, and
    rank r gets chunks r and 2 * size - 1 - r. Under a causal mask all ranks then have the same work (Llama 3,
    arXiv:2407.21783, section 3.3.2). "striped" gives rank r the tokens r, r + size, ... (Brandon et al. 2023,
    arXiv:2311.09431).
    """
    if layout == "striped":
        return joined([Piece(rank, len(range(rank, total, size)), size)])
    chunks = (rank,) if layout == "contiguous" else (rank, 2 * size - 1 - rank)
    count = size if layout == "contiguous" else 2 * size
    bounds = [(i * total // count, (i + 1) * total // count) for i in chunks]
    return joined([Piece(start, stop - start) for start, stop in bounds])


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Merge adjacent pieces: return the same tokens in the same order, in as few pieces as possible."""
    result: list[Piece] = []
    for piece in pieces:
        if piece.length == 0:
            continue
        last = result[-1] if result else None
        if last is not None and last.step == piece.step and last.stop == piece.start:
            result[-1] = Piece(last.start, last.length + piece.length, last.step)
        else:
            result.append(piece)
    return tuple(result)


def in_sequence(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the pieces sorted by position and merged, or as they are if they are interleaved ("striped")."""
    pieces = tuple(pieces)
    return joined(sorted(pieces)) if all(piece.step == 1 for piece in pieces) else pieces


def tokens_of(pieces: Sequence[Piece]) -> int:
    return sum(piece.length for piece in pieces)


def positions(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """Return the position in the sequence of each token of ``pieces``, (tokens,) int64."""
    parts = [torch.arange(p.start, p.stop, p.step, device=device) for p in pieces]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def shard(x: Tensor, dim: int, group: Any = None, layout: str = "zigzag", *, mesh: Any = None) -> Tensor:
    """Cut a tensor that every rank holds in full, and return this rank's part. Differentiable.

    Cut tokens, labels and positions with this function once per batch. All layers of a transformer except
    attention compute each token separately. The gradient of ``x`` is that of this rank's part, and 0
    elsewhere.

    Args:
        x: any shape and dtype.
        dim: the dimension of the sequence.
        group: process group over which the sequence is cut; None is the default one.
        layout: which tokens rank r of ``size`` gets. "contiguous": the r-th of ``size`` consecutive parts.
            "zigzag": chunks r and ``2 * size - 1 - r`` of ``2 * size`` consecutive chunks. "striped": tokens
            r, r + size, ... The length need not be divisible; parts may be empty.
        mesh: a DeviceMesh of one or two dimensions, instead of ``group``.

    Returns:
        A new tensor, (..., tokens of this rank, ...).

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x = torch.arange(10)
        >>> part = flashtile.parallel.shard(x, 0)  # all of it: there is one rank
        >>> torch.equal(flashtile.parallel.unshard(part, 0), x)
        True
        >>> dist.destroy_process_group()
    """
    check_dense("x", x)
    check_choice("layout", layout, LAYOUTS)
    dim = _checked_dim(x, dim)
    ranks = ranks_of(group, mesh)
    own = pieces_of(layout, x.shape[dim], ranks.size, ranks.rank)
    return x.index_select(dim, positions(own, x.device))


def unshard(
    x: Tensor,
    dim: int,
    group: Any = None,
    layout: str = "zigzag",
    *,
    mesh: Any = None,
    timeout: float = TIMEOUT,
) -> Tensor:
    """Join the parts that :func:`shard` cut. Every rank gets the whole tensor. Not recorded by autograd.

    Args:
        x: this rank's part. Dtype and shape, except for ``dim``, must be equal on all ranks.
        dim, group, layout, mesh: as for :func:`shard`.
        timeout: seconds to wait for the other ranks; 600 by default.

    Returns:
        The whole tensor, (..., tokens of all ranks, ...), the same on every rank.

    Raises:
        TypeError, ValueError: an argument is invalid, or ranks disagree on it; the message names it.
        RuntimeError: a rank has ended or has not made this call within ``timeout``.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> flashtile.parallel.unshard(torch.ones(2, 3), 1).shape
        torch.Size([2, 3])
        >>> dist.destroy_process_group()
    """
    check_dense("x", x)
    check_choice("layout", layout, LAYOUTS)
    dim, timeout = _checked_dim(x, dim), as_seconds("timeout", timeout)
    ranks = ranks_of(group, mesh)
    rest = (*x.shape[:dim], *x.shape[dim + 1 :])
    record = {"layout": layout, "dim": dim, "shape of x without dim": rest, "dtype of x": str(x.dtype)}
    lengths = ranks.agree(record, {"tokens of x": x.shape[dim]}, timeout, x.device)["tokens of x"]
    pieces = all_pieces(layout, lengths, "x")
    with torch.no_grad():
        parts = ranks.gather(in_memory(x).movedim(dim, 0), lengths, timeout)
        whole = x.new_empty((sum(lengths), *rest))
        for part, of_rank in zip(parts, pieces, strict=True):
            whole[positions(of_rank, x.device)] = part
        return whole.movedim(0, dim).contiguous()


def all_pieces(layout: str, lengths: Sequence[int], name: str) -> OfRanks:
    """Return the tokens of each rank as pieces (:class:`Piece`) of the sequence.

    ``lengths`` are the numbers of tokens on the ranks, and ``name`` is the tensor's name in errors.
    A contiguous layout allows any lengths. The other layouts must have the lengths that :func:`shard` gives.
    """
    if layout == "contiguous":
        starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
        return tuple(joined([Piece(*of_rank)]) for of_rank in zip(starts, lengths, strict=True))
    total, size = sum(lengths), len(lengths)
    result = tuple(pieces_of(layout, total, size, rank) for rank in range(size))
    for rank, (length, pieces) in enumerate(zip(lengths, result, strict=True)):
        if length != tokens_of(pieces):
            raise ValueError(
                f"{name} has {length} tokens on rank {rank}, but layout {layout!r} of {total} tokens over "
                f"{size} ranks gives it {tokens_of(pieces)}: cut it with flashtile.parallel.shard"
            )
    return result


def _checked_dim(x: Tensor, dim: int) -> int:
    dim = as_int("dim", dim)
    if x.dim() == 0:
        raise ValueError("x must have a dimension of the sequence, got shape ()")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be from {-x.dim()} to {x.dim() - 1}, got {dim}")
    return dim % x.dim()
