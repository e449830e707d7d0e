"""What the methods share: a call over ranks, and what each of them offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from flashtile.parallel.attend import Scores
from flashtile.parallel.blocks import Mask, Pair, pair_of
from flashtile.parallel.layout import Piece, tokens_of
from flashtile.parallel.ranks import Ranks


@dataclass(frozen=True)
class Shards:
    """A call as the ranks of one group share it.

    Args:
        ranks: the group.
        pieces_q, pieces_k: the tokens of each rank's q and of its k and v.
        timeout: seconds to wait for a rank.
        keys_shared: other ranks have queries of the same keys, so that gradients of keys leave in float32, to
            be added up.
    """

    ranks: Ranks
    pieces_q: tuple[tuple[Piece, ...], ...]
    pieces_k: tuple[tuple[Piece, ...], ...]
    mask: Mask
    scores: Scores
    timeout: float
    keys_shared: bool = False

    def pair(self, rank_q: int, rank_k: int) -> Pair:
        """What one rank computes with the keys of another."""
        return pair_of(self.pieces_q[rank_q], self.pieces_k[rank_k], self.mask)

    @property
    def lengths_q(self) -> list[int]:
        return [tokens_of(pieces) for pieces in self.pieces_q]

    @property
    def lengths_k(self) -> list[int]:
        return [tokens_of(pieces) for pieces in self.pieces_k]


class Forward(NamedTuple):
    """Of a rank's queries over all keys, and the tensors that the backward pass needs."""

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """Of this rank's tokens. dsink is the part of what this rank computed: the sum over ranks is whole."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


class Method(Protocol):
    """q (batch, tokens, heads_q, head_dim), k and v likewise; lse (batch, heads_q, tokens)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward: ...

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients: ...
