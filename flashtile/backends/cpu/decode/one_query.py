"""A step of generation on the CPU: each sequence has one query, which sees one range of the keys.

torch's flash kernel computes each sequence of a call separately, so that results do not depend on the rest of
the batch. Adjacent sequences that see the same positions share a call. A long sequence is split into pieces
of at most ``PIECE_ELEMENTS``, whose results are merged by their log-sum-exps. Consecutive pages are read in
place. Other pages are gathered, for several small pieces at a time, up to the size of one full piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu.blocks import split
from flashtile.backends.cpu.config import Fused
from flashtile.backends.cpu.decode.attend import combine
from flashtile.backends.cpu.decode.cache import lengths_of, pages_of, tokens_of_pages, tokens_of_row
from flashtile.backends.cpu.flash import attend_by_heads
from flashtile.problems.decode import CacheTensors, DecodeProblem
from flashtile.problems.masking import positions

PIECE_ELEMENTS = 256 * 1024
"""Maximum elements of a piece's keys, and of its values. Gathered pieces stay in the L2 cache."""


class Piece(NamedTuple):
    """Keys that one call of the kernel reads: a range of positions in one or more adjacent sequences."""

    sequences: range
    keys: range
    pages: list[int]  # pages that hold these keys, sequence by sequence


KeysAndValues = tuple[range, "Tensor | None", "Tensor | None"]
"""(sequences, keys, values): tensors of (sequences, heads_kv, keys, head_dim), None where there is no key."""


def attend(
    problem: DecodeProblem, config: Fused, q: Tensor, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the whole batch; lse is always computed.

    The query heads of a group become queries of one head, so that its keys are read once.
    """
    by_group = (problem.batch, problem.num_heads_kv, problem.group_size, problem.head_dim)
    queries = q.to(config.compute_dtype).contiguous().view(by_group)
    read = _dense if given.block_table is None else _paged
    outs, lses = [], []
    with torch.autocast("cpu", enabled=False):
        pieces = read(problem, config.compute_dtype, k_cache, v_cache, given)
        for sequences, of_sequences in groupby(pieces, key=itemgetter(0)):
            rows = queries[sequences.start : sequences.stop]
            parts = [
                attend_by_heads(rows, k, v, problem.softmax_scale)
                for _, k, v in of_sequences
                if k is not None and v is not None
            ]
            out, lse = _together(problem, len(sequences), parts)
            outs.append(out)
            lses.append(lse)
    out = torch.cat(outs).reshape(problem.out_shape).to(problem.out_dtype)
    return out, torch.cat(lses).reshape(problem.lse_shape)


def _together(
    problem: DecodeProblem, count: int, parts: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Merge the results (out, lse) of all pieces of the keys of ``count`` sequences.

    Returns out (count, heads_kv, group_size, head_dim), and lse (count, heads_kv, group_size).
    """
    if len(parts) == 1:
        return parts[0]
    if not parts:
        rows = (count, problem.num_heads_kv, problem.group_size)
        lse = torch.full(rows, -torch.inf, dtype=problem.lse_dtype, device="cpu")
        return torch.zeros((*rows, problem.head_dim_v), dtype=problem.out_dtype, device="cpu"), lse
    outs, lses = zip(*parts, strict=True)
    out, lse = combine(problem, torch.stack(outs), torch.stack(lses))
    return out, lse.mT


def _dense(
    problem: DecodeProblem, dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> Iterator[KeysAndValues]:
    """Yield the keys and values of a dense cache, in place or converted to ``dtype`` piece by piece."""
    in_place, indexed = k_cache.dtype == dtype, given.cache_batch_idx is not None
    rows = range(problem.batch) if given.cache_batch_idx is None else given.cache_batch_idx.tolist()
    caches = (k_cache, given.k_descale), (v_cache, given.v_descale)
    for sequences, keys in _seen(problem, given, together=in_place and not indexed):
        if not keys:
            yield sequences, None, None
        elif in_place:
            first = rows[sequences.start]
            where = slice(first, first + len(sequences)), slice(keys.start, keys.stop)
            yield sequences, k_cache[where].transpose(1, 2), v_cache[where].transpose(1, 2)
        else:
            for piece in split(keys, _most_keys(problem)):
                row = rows[sequences.start]
                k, v = (tokens_of_row(cache, row, piece, descale, dtype) for cache, descale in caches)
                yield sequences, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)


def _paged(
    problem: DecodeProblem, dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> Iterator[KeysAndValues]:
    """Yield the keys and values of a paged cache, one :class:`Piece` at a time.

    The division into pieces does not depend on the places of the pages in memory. So neither do the results.
    """
    caches = (k_cache, given.k_descale), (v_cache, given.v_descale)
    in_place = k_cache.dtype == dtype and given.k_descale is given.v_descale is None
    most_pages = -(-_most_keys(problem) // problem.page_size)
    memory = k_cache.new_empty((2, 0, *k_cache.shape[1:]), dtype=dtype)
    for group in _gathered_together(_pieces(problem, given, most_pages), most_pages):
        scattered = [not (in_place and _consecutive(piece.pages)) for piece in group]
        pages = [page for piece, there in zip(group, scattered, strict=True) if there for page in piece.pages]
        if len(pages) > memory.shape[1]:
            memory = k_cache.new_empty((2, max(most_pages, len(pages)), *k_cache.shape[1:]), dtype=dtype)
        gathered = [
            tokens_of_pages(cache, torch.tensor(pages, dtype=torch.long, device="cpu"), descale, place)
            for (cache, descale), place in zip(caches, memory, strict=True)
            if pages
        ]
        first = 0
        for piece, there in zip(group, scattered, strict=True):
            if not piece.keys:
                yield piece.sequences, None, None
                continue
            if there:
                stop = first + len(piece.pages) * problem.page_size
                k, v = (tokens[first:stop] for tokens in gathered)
                first = stop
            else:
                k, v = (c[piece.pages[0] : piece.pages[-1] + 1].flatten(0, 1) for c in (k_cache, v_cache))
            yield piece.sequences, _by_heads(k, piece, problem), _by_heads(v, piece, problem)


def _pieces(problem: DecodeProblem, given: CacheTensors, most_pages: int) -> Iterator[Piece]:
    assert given.block_table is not None
    table, page_size = given.block_table.tolist(), problem.page_size
    for sequences, keys in _seen(problem, given, together=True):
        fits = len(pages_of(keys, page_size)) * len(sequences) <= most_pages
        for few in [sequences] if fits else split(sequences, 1):
            for piece in split(keys, _most_keys(problem)) if keys else [keys]:
                columns = pages_of(piece, page_size)
                pages = [page for b in few for page in table[b][columns.start : columns.stop]]
                yield Piece(few, piece, pages)


def _most_keys(problem: DecodeProblem) -> int:
    return max(1, PIECE_ELEMENTS // (problem.num_heads_kv * problem.head_dim))


def _consecutive(pages: list[int]) -> bool:
    return pages == list(range(pages[0], pages[0] + len(pages))) if pages else False


def _by_heads(tokens: Tensor, piece: Piece, problem: DecodeProblem) -> Tensor:
    """View the keys of a piece as (sequences, heads_kv, keys, head_dim).

    ``tokens`` (tokens, heads_kv, head_dim) has all tokens of the piece's pages. Those before and after the
    piece are left out.
    """
    by_sequence = tokens.unflatten(0, (len(piece.sequences), -1)).transpose(1, 2)
    return by_sequence.narrow(2, piece.keys.start % problem.page_size, len(piece.keys))


def _seen(problem: DecodeProblem, given: CacheTensors, together: bool) -> Iterator[tuple[range, range]]:
    """Yield (range of sequences, range of the keys that their queries see).

    Each range of sequences has one sequence. With ``together``, it has all adjacent sequences whose queries
    see the same positions.
    """
    leftpads = [0] * problem.batch if given.cache_leftpad is None else given.cache_leftpad.tolist()
    bounds = list(zip(lengths_of(problem, given), leftpads, strict=True))
    first = 0
    while first < problem.batch:
        stop = first + 1
        while together and stop < problem.batch and bounds[stop] == bounds[first]:
            stop += 1
        length, leftpad = bounds[first]
        # Positions are counted from the first key, at which the first chunk begins.
        seen = problem.key_range(positions(1, length - leftpad), range(length - leftpad))
        yield range(first, stop), range(seen.start + leftpad, seen.stop + leftpad)
        first = stop


def _gathered_together(pieces: Iterator[Piece], most: int) -> Iterator[list[Piece]]:
    """Yield groups of consecutive pieces that have at most ``most`` pages together.

    A piece with more pages is a group of its own.
    """
    group: list[Piece] = []
    room = most
    for piece in pieces:
        if group and len(piece.pages) > room:
            yield group
            group, room = [], most
        group.append(piece)
        room -= len(piece.pages)
    if group:
        yield group
