"""What a dense call on the CPU has beside q, k and v."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flashtile.attn.problem import Extras


class Beside(NamedTuple):
    """Tensors of a dense call. Masks broadcast to (batch, heads_q, seqlen_q, seqlen_k), True takes part."""

    alibi_slopes: Tensor | None = None
    masks: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, extras: Extras) -> Beside:
        masks: tuple[Tensor, ...] = () if extras.mask is None else (extras.mask,)
        if extras.key_padding_mask is not None:
            masks += (extras.key_padding_mask[:, None, None],)
        return cls(extras.alibi_slopes, masks)

    def of_sequence(self, b: int, seqlen_q: int, seqlen_k: int) -> Beside:
        """Those of sequence ``b`` alone, which has or uses so many rows and keys."""
        slopes = self.alibi_slopes
        own_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        return Beside(own_slopes, tuple(_part(mask, b, seqlen_q, seqlen_k) for mask in self.masks))


def _part(cells: Tensor, b: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    own = cells[b : b + 1] if cells.shape[0] > 1 else cells
    return own[:, :, : seqlen_q if cells.shape[2] > 1 else 1, :seqlen_k]
