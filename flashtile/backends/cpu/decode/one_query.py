"""A step of generation on the CPU: each sequence has one query, which sees all keys of a range.

torch's flash kernel attends. It takes one sequence after another, so that no result depends on its batch, and
pieces of at most ``PIECE_ELEMENTS`` of a long one, which are put together by their log-sum-exps. Pages are
gathered for as many pieces at a time as one could have.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashtile.backends.cpu.blocks import split, visible_keys
from flashtile.backends.cpu.config import Fused
from flashtile.backends.cpu.decode.combine import combine
from flashtile.backends.cpu.decode.tokens import lengths_of, pages_of, tokens_of_pages, tokens_of_row
from flashtile.backends.cpu.flash import attend_by_heads
from flashtile.decode.problem import CacheTensors, DecodeProblem

PIECE_ELEMENTS = 256 * 1024
"""Of keys over all heads, and as many of values: gathered ones stay in the second-level cache."""

Piece = tuple[int, range, range]
"""(sequence, keys of it, columns of the block table in which they lie)"""


def attend(
    problem: DecodeProblem, config: Fused, q: Tensor, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the whole batch; lse comes in any case.

    A group's heads are as many queries of one head, whose keys are read once.
    """
    by_group = (problem.batch, problem.num_heads_kv, problem.group_size, problem.head_dim)
    queries = q.to(config.compute_dtype).reshape(by_group).split(1)
    parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in queries]
    with torch.autocast("cpu", enabled=False):
        for b, k, v in _pieces(problem, config.compute_dtype, k_cache, v_cache, given):
            parts[b].append(attend_by_heads(queries[b], k, v, problem.softmax_scale))
    outs, lses = zip(*(_together(problem, of_sequence) for of_sequence in parts), strict=True)
    out = torch.cat(outs).reshape(problem.out_shape).to(problem.out_dtype)
    return out, torch.cat(lses).reshape(problem.lse_shape)


def _together(problem: DecodeProblem, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Out (1, heads_kv, group_size, head_dim) and lse without head_dim of all parts of a sequence."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        rows = (1, problem.num_heads_kv, problem.group_size)
        lse = torch.full(rows, -torch.inf, dtype=problem.lse_dtype)
        return torch.zeros((*rows, problem.head_dim_v), dtype=problem.out_dtype), lse
    outs, lses = zip(*parts, strict=True)
    out, lse = combine(problem, torch.stack(outs), torch.stack(lses))
    return out, lse.mT


def _pieces(
    problem: DecodeProblem, dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(sequence, keys, values) of each piece, tensors of (1, heads_kv, keys, head_dim)."""
    caches = (k_cache, given.k_descale), (v_cache, given.v_descale)
    most = max(1, PIECE_ELEMENTS // (problem.num_heads_kv * problem.head_dim))
    seen = enumerate(_seen(problem, given))
    if given.block_table is None:
        rows = range(problem.batch) if given.cache_batch_idx is None else given.cache_batch_idx.tolist()
        in_place = k_cache.dtype == dtype
        for b, keys in seen:
            for piece in split(keys, max(1, len(keys)) if in_place else most):
                k, v = (tokens_of_row(cache, rows[b], piece, descale, dtype) for cache, descale in caches)
                yield b, _by_heads(k), _by_heads(v)
        return
    page_size = problem.page_size
    pieces = [(b, piece, pages_of(piece, page_size)) for b, keys in seen for piece in split(keys, most)]
    groups = list(_gathered_together(pieces, -(-most // page_size)))
    most_pages = max((sum(len(columns) for _, _, columns in group) for group in groups), default=0)
    memory = k_cache.new_empty((2, most_pages, *k_cache.shape[1:]), dtype=dtype).unbind()
    for group in groups:
        pages = torch.cat([given.block_table[b, columns.start : columns.stop] for b, _, columns in group])
        k, v = (
            _by_heads(tokens_of_pages(cache, pages, descale, place))
            for (cache, descale), place in zip(caches, memory, strict=True)
        )
        first = 0
        for b, keys, columns in group:
            start = first + keys.start - columns.start * page_size
            yield b, k.narrow(2, start, len(keys)), v.narrow(2, start, len(keys))
            first += len(columns) * page_size


def _by_heads(tokens: Tensor) -> Tensor:
    """(1, heads_kv, keys, head_dim) of (keys, heads_kv, head_dim)."""
    return tokens.transpose(0, 1).unsqueeze(0)


def _seen(problem: DecodeProblem, given: CacheTensors) -> Iterator[range]:
    """The keys that each sequence's query sees."""
    leftpads = [0] * problem.batch if given.cache_leftpad is None else given.cache_leftpad.tolist()
    for length, leftpad in zip(lengths_of(problem, given), leftpads, strict=True):
        seen = visible_keys(range(1), length, length - 1, problem.window_left, problem.window_right)
        yield range(max(seen.start, leftpad), seen.stop)


def _gathered_together(pieces: list[Piece], most: int) -> Iterator[list[Piece]]:
    """Consecutive pieces of ``most`` pages in all, or a single one."""
    group: list[Piece] = []
    room = most
    for piece in pieces:
        if group and len(piece[2]) > room:
            yield group
            group, room = [], most
        group.append(piece)
        room -= len(piece[2])
    if group:
        yield group
