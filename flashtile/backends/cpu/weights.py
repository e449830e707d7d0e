"""Attention weights from q, k and lse, recomputed by tiles of scores as in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.cpu import reason_against, tiled, with_exact_products
from flashtile.backends.cpu.config import Tiled, tiled_config
from flashtile.backends.cpu.functions import optional_inputs
from flashtile.backends.cpu.parts import OptionalInputs, sequences, with_batch
from flashtile.problems.attention import WeightsProblem

__all__ = ["configure_weights", "prepare_weights", "reason_against"]

configure_weights = tiled_config


def prepare_weights(problem: WeightsProblem, config: Tiled) -> Any:
    """Return a function ``(q, k, lse, extras) -> (weights, indices)``.

    ``indices`` are None except for the form "top".
    """
    return with_exact_products(partial(_launch, problem, config))


def _launch(
    problem: WeightsProblem, config: Tiled, q: Tensor, k: Tensor, lse: Tensor, extras: Any
) -> tuple[Tensor, Tensor | None]:
    weights = q.new_zeros(problem.weights_shape, dtype=problem.weights_dtype)
    indices = None
    if problem.form == "top":
        indices = torch.full_like(weights, -1, dtype=torch.int64)
    if not (problem.varlen or problem.seqused_q or problem.seqused_k):
        _keep(problem, config, q, k, lse, optional_inputs(problem, extras), weights, indices)
    else:
        q, k, lse = with_batch(problem, q, k, lse)
        kept = [t for t in (weights, indices) if t is not None]
        if problem.form != "full":
            kept = with_batch(problem, *kept)
        for one in sequences(problem, extras):
            place: tuple[Any, ...] = one.statistics
            if problem.form == "full":
                place = (slice(one.b, one.b + 1),)
            elif problem.form == "columns":
                place = (one.sequences, slice(None), one.keys)
            own = q[one.queries], one.of_keys(k), lse[one.statistics]
            _keep(problem, config, *own, one.optional, *(t[place] for t in kept))
    return weights, indices


def _keep(
    problem: WeightsProblem,
    config: Tiled,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    optional: OptionalInputs,
    weights: Tensor,
    indices: Tensor | None = None,
) -> None:
    """Write the requested form of the weights into ``weights`` (batch, heads, ...) and ``indices``.

    ``weights`` must contain zeros.
    """
    # Weights need no values; k stands for v, because a chunk converts both.
    for chunk in tiled.chunks(problem, config, q, k, k, optional):
        for rows in chunk.row_blocks():
            tiles = _tiles(chunk, lse, rows)
            place = (chunk.batch, chunk.heads_q, slice(rows.start, rows.stop))
            if indices is not None:
                weights[place], indices[place] = _top(problem.top, tiles, weights[place], indices[place])
                continue
            for keys, scores in tiles:
                own = slice(keys.start, keys.stop)
                if problem.form == "full":
                    weights[place][..., own] = scores.exp_().to(weights.dtype)
                else:
                    weights[chunk.batch, chunk.heads_q, own] += scores.exp_().sum(2)


Tiles = Iterator[tuple[range, Tensor]]
"""(keys, scores minus lse) of each tile of some rows; scores are (sequences, heads, rows, keys)."""


def _tiles(chunk: tiled.Chunk, lse: Tensor, rows: range) -> Tiles:
    q = chunk.folded(chunk.q, rows)
    minus_lse = -chunk.statistics(lse, rows).reshape(*q.shape[:2], 1)
    minus_lse = minus_lse.masked_fill(minus_lse == torch.inf, 0.0)  # for rows that see no key
    for keys in chunk.key_blocks(rows):
        seen = chunk.seen(rows, keys)
        if seen is None or seen.any():
            yield keys, chunk.by_heads(chunk.scores(q, rows, keys, minus_lse, seen), rows, keys).flatten(1, 2)


def _top(top: int, tiles: Tiles, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest weights of each row, and their keys."""
    best, found = torch.full_like(weights, -torch.inf), indices
    for keys, scores in tiles:
        places = torch.arange(keys.start, keys.stop, device="cpu").expand(scores.shape)
        joined = torch.cat([best, scores], -1)
        best, order = joined.topk(top, -1)
        found = torch.cat([found, places], -1).gather(-1, order)
    return best.exp(), found.masked_fill(best == -torch.inf, -1)
