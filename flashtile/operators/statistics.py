"""Statistics of the scores: the largest score of each head, and the entropy of each row's probabilities.

The forward pass returns them in a last dimension of lse (``problems.attention.STATISTICS``), so autograd, the
transforms and the shardings treat them as they treat lse. The largest score has no gradient.

With P = exp(S - lse), the entropy of a row is H = -sum(P log P), where a sink counts as one more outcome. Its
gradient is dS = -dH P (log P + H). The part with H is a gradient of lse, -dH H. Kernels add the other part,
-dH P log P, to dS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtile.op.operation import PLAIN_TYPES, Operation, is_dynamo_compiling, is_plain
from flashtile.problems.statistics import MaxLogitsOptions, MaxLogitsProblem, MaxLogitsTensors


def split(
    lse: Tensor, names: Sequence[str], cu_seqlens_q: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Split the second result of the forward pass into lse and the statistics ``names``, if there are any.

    max_logits is (batch, heads), or (sequences, heads) if sequences are packed; entropy has the shape of lse.
    """
    if not names:
        return lse, ()
    # Not by unbind, whose gradient of a DTensor is an error unless all of them have a gradient.
    own, *more = (lse.select(-1, i) for i in range(1 + len(names)))
    found = (
        _over_rows(rows.detach(), cu_seqlens_q) if name == "max_logits" else rows
        for name, rows in zip(names, more, strict=True)
    )
    return own, tuple(found)


def _over_rows(rows: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the largest number of each sequence and head, -inf where there are no rows.

    ``rows`` is (batch, heads, seqlen_q), or (heads, total_q) with the ``offsets`` of packed sequences.
    """
    # Transforms, fake tensors and subclasses have their own rules for torch's operations.
    compiled = is_dynamo_compiling() and type(rows) in PLAIN_TYPES
    if compiled or is_plain((rows,), (offsets,)):
        return MAX_LOGITS((rows,), MaxLogitsTensors(offsets), MaxLogitsOptions())
    return _by_torch(rows, offsets)


class _MaxLogits(Operation):
    """The reduction of the rows' largest scores to those of sequences and heads."""

    def prepare(self, tensors: tuple, optional: Any, options: Any) -> Callable[..., Any]:
        """Return a launch: operations of torch where no backend has a kernel, as on the CPU."""
        if self.is_served(tensors, optional, options):
            return super().prepare(tensors, optional, options)
        return lambda rows, optional: _by_torch(rows, optional.cu_seqlens_q)


def _check(rows: Tensor, tensors: MaxLogitsTensors, options: MaxLogitsOptions) -> None:
    """Check the dimensions of ``rows``, which are a result of a call that has been checked."""
    expected = 3 if tensors.cu_seqlens_q is None else 2
    if rows.dim() != expected:
        raise ValueError(f"rows must have {expected} dimensions, got shape {tuple(rows.shape)}")


def _fake(rows: Tensor, tensors: MaxLogitsTensors, options: MaxLogitsOptions) -> Tensor:
    problem = MaxLogitsProblem.from_tensors(rows, tensors, options)
    return rows.new_empty(problem.batch, problem.num_heads)


MAX_LOGITS = _MaxLogits(
    "max_logits",
    tensors=("rows",),
    optional=MaxLogitsTensors(),
    options=MaxLogitsOptions,
    results=1,
    check=_check,
    describe=MaxLogitsProblem.from_tensors,
    fake=_fake,
    part="statistics",
)


def _by_torch(rows: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the results of :func:`_over_rows` by operations of torch."""
    if offsets is None:
        return rows.amax(-1) if rows.shape[-1] else rows.new_full(rows.shape[:-1], -torch.inf)
    heads, total = rows.shape
    # Tokens after the last sequence go to one more, which is dropped.
    sequence = torch.bucketize(torch.arange(total, device=rows.device), offsets[1:].long(), right=True)
    largest = rows.new_full((len(offsets), heads), -torch.inf)
    return largest.scatter_reduce(0, sequence[:, None].expand(-1, heads), rows.mT, "amax")[:-1]


def for_kernels(tensors: tuple, options: Any) -> tuple[tuple, Any]:
    """Return (tensors, options) of a backward pass as backends take them: with lse and its gradient alone.

    If the entropy has a gradient, dlse has a last dimension for two numbers: the gradient of lse, including
    -dH H, and dH.
    """
    dout, dlse, q, k, v, out, lse = tensors
    if lse.dim() < q.dim():
        return tensors, options
    has_entropy = options.entropy and dlse is not None
    own = lse[..., 0].contiguous()
    if dlse is not None:
        of_entropy = dlse[..., -1]
        dlse = dlse[..., 0].contiguous()
        if has_entropy:
            # H of a row that sees no key is 0, so its gradient may be anything finite.
            dlse = torch.stack([dlse - of_entropy * lse[..., -1], of_entropy]).movedim(0, -1)
    return (dout, dlse, q, k, v, out, own), options._replace(max_logits=False, entropy=has_entropy)


def of_sink(results: tuple, tensors: tuple, extras: Any, options: Any) -> tuple:
    """Add to dsink what the entropy's gradient adds to the gradient of a score: -dH P log P, over all rows.

    Arguments are those of :func:`for_kernels`' results; the backends' dsink lacks this term.
    """
    if not options.entropy:
        return results
    _, dlse, *_, lse = tensors
    p = torch.exp(extras.sink.to(lse.dtype)[:, None] - lse)
    terms = (torch.special.entr(p) * dlse[..., 1]).masked_fill_(lse == -torch.inf, 0.0).sum(-1)
    term = terms if terms.dim() == 1 else terms.sum(0)
    first, dsink, rest = results[:3], results[3], results[4:]
    return (*first, (dsink + term).to(dsink.dtype), *rest)
