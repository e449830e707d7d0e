"""Optional inputs of a dense call on the CPU: ALiBi slopes, masks, bias and dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flashtile.dropout import kept
from flashtile.problems.attention import OptionalTensors, Problem


class Dropout(NamedTuple):
    """Parameters of dropout.

    Which probabilities are dropped depends on the number of their sequence in the whole call. So a call that
    is computed in parts has the same result. ``first_sequence`` is the number of a part's first sequence.
    """

    rng_state: Tensor
    p: float
    heads_q: int
    first_sequence: int = 0

    def kept(self, batch: slice, heads: slice, rows: range, keys: range) -> Tensor:
        """Return (batch, heads, rows, keys) bool: True where a probability is kept."""
        first = self.first_sequence
        sequences = range(first + batch.start, first + batch.stop)
        heads_range = range(heads.start, heads.stop)
        return kept(self.rng_state, self.p, self.heads_q, sequences, heads_range, rows, keys)


class OptionalInputs(NamedTuple):
    """Optional inputs of a call. Masks broadcast to (batch, heads_q, seqlen_q, seqlen_k); True is visible."""

    alibi_slopes: Tensor | None = None
    masks: tuple[Tensor, ...] = ()
    bias: Tensor | None = None
    dbias: Tensor | None = None
    """Accumulator for the gradient of the bias; None if that gradient is not needed."""
    dropout: Dropout | None = None
    functions: Any = None
    """:class:`flashtile.backends.cpu.functions.EvaluatedFunctions` of a call with score or mask functions."""

    @classmethod
    def of(cls, problem: Problem, extras: OptionalTensors, dbias: Tensor | None = None) -> OptionalInputs:
        masks: tuple[Tensor, ...] = () if extras.mask is None else (extras.mask,)
        if extras.key_padding_mask is not None:
            masks += (extras.key_padding_mask[:, None, None],)
        dropout = None
        if problem.dropout_p > 0 and extras.rng_state is not None:
            dropout = Dropout(extras.rng_state, problem.dropout_p, problem.num_heads_q)
        return cls(extras.alibi_slopes, masks, extras.bias, dbias, dropout)

    def of_sequence(self, b: int, seqlen_q: int, seqlen_k: int) -> OptionalInputs:
        """Return the inputs of sequence ``b`` only, which has ``seqlen_q`` rows and ``seqlen_k`` keys."""
        slopes = self.alibi_slopes
        own_slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        masks = tuple(_part(mask, b, seqlen_q, seqlen_k) for mask in self.masks)
        bias, dbias = (
            None if tensor is None else _part(tensor, b, seqlen_q, seqlen_k)
            for tensor in (self.bias, self.dbias)
        )
        dropout = self.dropout and self.dropout._replace(first_sequence=b)
        return OptionalInputs(own_slopes, masks, bias, dbias, dropout)

    @property
    def may_hide_rows(self) -> bool:
        """Whether a row may have no visible key although its window contains keys."""
        return self.masks != () or self.bias is not None


def _part(tensor: Tensor, b: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return a view of one sequence's part of a mask or bias."""
    own = tensor[b : b + 1] if tensor.shape[0] > 1 else tensor
    return own[:, :, : seqlen_q if tensor.shape[2] > 1 else 1, :seqlen_k]
