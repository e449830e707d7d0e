"""Interface of the methods of context parallelism, and the description of a call over ranks."""

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
    """Description of a call that the ranks of one group make together.

    Args:
        ranks: the group.
        pieces_q, pieces_k: for each rank, the tokens of its q, and those of its k and v.
        mask: the mask of the whole sequence.
        scores: the other options of attention.
        timeout: seconds to wait for a rank.
        keys_shared: whether ranks outside of the group attend to the same key heads. Gradients of keys and
            values are then returned in float32, and the caller sums them.
    """

    ranks: Ranks
    pieces_q: tuple[tuple[Piece, ...], ...]
    pieces_k: tuple[tuple[Piece, ...], ...]
    mask: Mask
    scores: Scores
    timeout: float
    keys_shared: bool = False

    def pair(self, rank_q: int, rank_k: int) -> Pair:
        """Return the calls of one rank's queries with the keys of another."""
        return pair_of(self.pieces_q[rank_q], self.pieces_k[rank_k], self.mask)

    @property
    def lengths_q(self) -> list[int]:
        return [tokens_of(pieces) for pieces in self.pieces_q]

    @property
    def lengths_k(self) -> list[int]:
        return [tokens_of(pieces) for pieces in self.pieces_k]


class Forward(NamedTuple):
    """Result of a forward pass on one rank.

    Attributes:
        out: (batch, tokens, heads_q, head_dim_v), of this rank's queries over all keys.
        lse: (batch, heads_q, tokens).
        saved: tensors that the backward pass needs.
    """

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """Gradients of this rank's tokens, in the shapes of q, k and v.

    dsink (heads_q,) covers only this rank's computations: the sum over ranks is the gradient of the sink.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


class Method(Protocol):
    """A method of context parallelism.

    q, k and v are (batch, tokens, heads, head_dim), and lse is (batch, heads_q, tokens).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Forward: ...

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], sink: Tensor | None
    ) -> Gradients: ...
