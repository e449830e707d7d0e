"""Decoding on the CPU in torch, with all features, without storing all scores.

*Steps of generation*, where each sequence has one query that sees one range of the keys, go to torch's flash
kernel. It computes each sequence of a call separately, so that results do not depend on the rest of the
batch. Adjacent sequences that see the same positions share a call. A long sequence is split into pieces of at
most ``PIECE_ELEMENTS``, whose results are merged by their log-sum-exps. Consecutive pages are read in place.
Other pages are gathered, for several small pieces at a time, up to the size of one full piece.

*All other calls* are an online softmax over blocks of keys that are gathered one at a time. Sequences are
computed one after another, so that results do not depend on the rest of the batch. The query heads of a
key/value head are rows of one tile. Tiles are computed in float32 (float64 for float64 inputs), because sums
of 16-bit products are too coarse. Keys and values are converted to this dtype block by block. The largest
temporaries are a tile of scores and a block of keys.

The functions for steps come first, then those for all other calls, then what reads and writes caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu import reason_against, with_exact_products
from flashtile.backends.cpu.config import Fused, configure_decode
from flashtile.backends.cpu.flash import attend_by_heads
from flashtile.problems.addresses import descales_of, destinations, locate, new_tokens, sequence_lengths
from flashtile.problems.decode import (
    FP8,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    CombineProblem,
    CopyProblem,
    CopyTensors,
    DecodeProblem,
)
from flashtile.problems.masking import positions, split
from flashtile.reference.decode import quantized, rotate_appended

__all__ = [
    "configure_decode",
    "prepare_append_kvcache",
    "prepare_combine",
    "prepare_copy_blocks",
    "prepare_decode",
    "prepare_decode_mass",
    "reason_against",
]

PIECE_ELEMENTS = 256 * 1024
"""Maximum elements of a piece's keys, and of its values. Gathered pieces stay in the L2 cache. A step of few
short sequences took 1.25, 0.51, 0.73 and 0.52 ms with pieces of 32, 64, 128 and 256 Ki elements (Xeon with
2 MiB of L2 a core; benchmarks/results/experiments/cpu.json)."""
BLOCK_ROWS = 256
"""Rows of a tile: query tokens times heads per group. Other sizes were not measured."""
TILE_ELEMENTS = 1 << 18
"""Elements in a tile of scores over all heads, so that the tile stays in the L2 cache."""
MIN_SUM, MAX_SUM = 2.0**-16, 2.0**16
"""Accepted range for a row's sum of exponentials with a unified maximum. Within it, the sum's logarithm is
small, as with online softmax, and terms that exp flushes to zero are negligible."""
MIN_VALUE = 2.0**-60
"""Minimum magnitude of the largest weighted sum of values. Smaller sums may lack terms flushed to zero."""


def prepare_decode(problem: DecodeProblem, config: Fused | None) -> Callable[..., Any]:
    attend = partial(attend_tiles, problem) if config is None else partial(attend_one_query, problem, config)
    return with_exact_products(attend)


configure_decode_mass = configure_decode


def prepare_decode_mass(problem: DecodeProblem, config: Fused | None) -> Callable[..., Any]:
    """Return a function ``(q, k_cache, v_cache, given, mass) -> (mass, out, lse)``."""
    attend, add = prepare_decode(problem, config), with_exact_products(partial(add_mass, problem))

    def launch(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, given: CacheTensors, mass: Tensor, *buffers: None
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = attend(q, k_cache, v_cache, given)
        add(q, k_cache, v_cache, given, mass, lse)
        return mass, out, lse

    launch.adds_to = ("mass",)  # type: ignore[attr-defined]
    return launch


def prepare_append_kvcache(problem: AppendProblem, config: None) -> Callable[..., Any]:
    return partial(append, problem)


def prepare_combine(problem: CombineProblem, config: None) -> Callable[..., Any]:
    return partial(combine, problem)


def prepare_copy_blocks(problem: CopyProblem, config: None) -> Callable[..., Any]:
    return copy_blocks


class Piece(NamedTuple):
    """Keys that one call of the kernel reads: a range of positions in one or more adjacent sequences."""

    sequences: range
    keys: range
    pages: list[int]  # pages that hold these keys, sequence by sequence

    @property
    def in_order(self) -> bool:
        """Whether the pages lie one after the other in memory, so that their tokens need not be copied."""
        return not self.pages or self.pages == list(range(self.pages[0], self.pages[0] + len(self.pages)))


KeysAndValues = tuple[range, "Tensor | None", "Tensor | None"]
"""(sequences, keys, values): tensors of (sequences, heads_kv, keys, head_dim), None where there is no key."""


def attend_one_query(
    problem: DecodeProblem, config: Fused, q: Tensor, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the whole batch; lse is always computed.

    The query heads of a group become queries of one head, so that its keys are read once.
    """
    by_group = (problem.batch, problem.num_heads_kv, problem.group_size, problem.head_dim)
    queries = q.to(config.compute_dtype).contiguous().view(by_group)
    read = _dense if given.block_table is None else _paged
    outs, lses = [], []
    with torch.autocast("cpu", enabled=False):  # autocast has a dtype of its own
        pieces = read(problem, config.compute_dtype, k_cache, v_cache, given)
        for sequences, of_sequences in groupby(pieces, key=itemgetter(0)):
            rows = queries[sequences.start : sequences.stop]
            parts = [
                attend_by_heads(rows, k, v, False, problem.softmax_scale)
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
    # Only rows that lie one after the other can share a call, and only without a copy: copies are made by
    # pieces of one row, so that they stay in the L2 cache.
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
    # Small pieces are gathered together, because each gather costs time: one of k and one of v took 34 us of
    # a step of four short sequences (benchmarks/results/experiments/cpu.json).
    memory = k_cache.new_empty((2, 0, *k_cache.shape[1:]), dtype=dtype)
    for group in _gathered_together(_pieces(problem, given, most_pages), most_pages):
        scattered = [not (in_place and piece.in_order) for piece in group]
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
        # Sequences share a call only if their pages are one piece, because a piece is a range of keys.
        fits = len(pages_of(keys, page_size)) * len(sequences) <= most_pages
        for few in [sequences] if fits else split(sequences, 1):
            for piece in split(keys, _most_keys(problem)) if keys else [keys]:
                columns = pages_of(piece, page_size)
                pages = [page for b in few for page in table[b][columns.start : columns.stop]]
                yield Piece(few, piece, pages)


def _most_keys(problem: DecodeProblem) -> int:
    return max(1, PIECE_ELEMENTS // (problem.num_heads_kv * problem.head_dim))


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


def attend_tiles(
    problem: DecodeProblem, q: Tensor, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of the whole batch; lse is always computed."""
    out = q.new_zeros(problem.out_shape, dtype=problem.out_dtype)
    lse = q.new_full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype)
    with torch.autocast("cpu", enabled=False):  # autocast would round the products of tiles
        for sequence in _sequences(problem, q, k_cache, v_cache, given):
            out_rows, lse_rows = out[sequence.own], sequence.rows_of(lse)
            for block in split(range(sequence.seqlen_q), _tokens_of_block(problem)):
                out_tile, lse_tile = sequence.attend(block)
                out_rows[block.start : block.stop] = out_tile
                lse_rows[:, block.start : block.stop] = lse_tile
    return out, lse


def _sequences(
    problem: DecodeProblem, q: Tensor, k_cache: Tensor, v_cache: Tensor, given: CacheTensors
) -> Iterator[_Sequence]:
    """Yield the sequences of a batch."""
    starts = None if given.cu_seqlens_q is None else given.cu_seqlens_q.tolist()
    for b, seqlen_k in enumerate(lengths_of(problem, given)):
        own = b if starts is None else slice(starts[b], starts[b + 1])
        yield _Sequence(problem, b, own, seqlen_k, q, k_cache, v_cache, given)


def _tokens_of_block(problem: DecodeProblem) -> int:
    """Return the number of query tokens of a block of rows.

    The block has all query heads of these tokens, so that the keys are read once for a group. Products of
    other shapes add in another order, so an invariant call has one token a block.
    """
    return 1 if problem.invariant else max(1, BLOCK_ROWS // problem.group_size)


@torch.inference_mode()  # so that a mass made in inference mode can be written outside of it
def add_mass(
    problem: DecodeProblem,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    given: CacheTensors,
    mass: Tensor,
    lse: Tensor,
) -> None:
    """Add to ``mass``, sequence by sequence, the probabilities that each key received; ``lse`` is known."""
    with torch.autocast("cpu", enabled=False):
        for sequence in _sequences(problem, q, k_cache, v_cache, given):
            sums = lse.new_zeros((problem.num_heads_kv, sequence.seqlen_k))
            for block in split(range(sequence.seqlen_q), _tokens_of_block(problem)):
                sequence.weigh(block, sequence.rows_of(lse)[:, block.start : block.stop], sums)
            # Only keys with mass: entries of the block table that no row sees may lead anywhere.
            keys = sums.any(0).nonzero()[:, 0]
            pages, offsets = locate(torch.full_like(keys, sequence.b), keys, k_cache, given)
            mass[pages, offsets] += sums[:, keys].T.to(mass.dtype)


Sums = tuple[Tensor, Tensor, Tensor]
"""(maximum, sum, accumulator) of an online softmax, each (heads_kv, group * rows, 1 or head_dim_v)."""


class _Sequence:
    """One sequence: its queries, the location of its keys, and its options."""

    def __init__(
        self,
        problem: DecodeProblem,
        b: int,
        own: int | slice,
        seqlen_k: int,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        given: CacheTensors,
    ) -> None:
        """``own`` is the index of sequence ``b`` in q and out: a slice of tokens if sequences are packed."""
        self.problem, self.b, self.own = problem, b, own
        self.q, self.qv = q[own], None if given.qv is None else given.qv[own]
        self.k_cache, self.v_cache = k_cache, v_cache
        self.k_descale, self.v_descale = given.k_descale, given.v_descale
        if problem.descale == "sequence" and given.k_descale is not None and given.v_descale is not None:
            self.k_descale, self.v_descale = given.k_descale[b, 0], given.v_descale[b, 0]
        self.dtype = problem.lse_dtype
        self.seqlen_q, self.seqlen_k = self.q.shape[0], seqlen_k
        self.offset = self.seqlen_k - self.seqlen_q
        self.first_key = 0 if given.cache_leftpad is None else int(given.cache_leftpad[b])
        self.blocks = None if given.block_table is None else given.block_table[b]
        self.row = b if given.cache_batch_idx is None else int(given.cache_batch_idx[b])
        slopes = given.alibi_slopes
        self.slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        self.sink = given.sink
        self.phi = given.softmax_max
        if problem.softmax_max is not None:
            heads, phi = (problem.num_heads_q,), problem.softmax_max
            self.phi = torch.full(heads, phi, dtype=torch.float32, device="cpu")
        self.prior = None
        if given.prior_out is not None and given.prior_lse is not None:
            # The prior result is packed even if q is not.
            tokens = own if isinstance(own, slice) else slice(b * self.seqlen_q, (b + 1) * self.seqlen_q)
            self.prior = given.prior_out[tokens].transpose(0, 1), given.prior_lse[:, tokens].unsqueeze(-1)
        self.tree = None if given.tree_mask is None else given.tree_mask[min(b, given.tree_mask.shape[0] - 1)]

    def attend(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return out (rows, heads_q, head_dim_v) and lse (heads_q, rows) of the query tokens ``rows``."""
        heads_kv, group = self.problem.num_heads_kv, self.problem.group_size
        q = self._queries(rows)
        start = self._start(rows)
        sums = None if self.phi is None else self._unified(start, q, rows)
        row_max, row_sum, acc = self._online(start, q, rows) if sums is None else sums
        empty = row_sum == 0
        out = acc.div_(row_sum.masked_fill(empty, 1.0)).view(heads_kv * group, len(rows), -1)
        lse = (row_max + row_sum.log()).view(heads_kv * group, len(rows))
        return out.transpose(0, 1), lse

    def weigh(self, rows: range, lse: Tensor, sums: Tensor) -> None:
        """Add to ``sums`` (heads_kv, seqlen_k) the probabilities of each key, given lse (heads_q, rows)."""
        shift = lse.reshape(sums.shape[0], -1, 1)
        for scores, keys in self._tiles(self._queries(rows), rows):
            hidden = scores == -torch.inf  # also in rows whose lse is -inf or NaN
            sums[:, keys.start : keys.stop] += scores.sub_(shift).exp_().masked_fill_(hidden, 0.0).sum(1)

    def rows_of(self, lse: Tensor) -> Tensor:
        """Return the part (heads_q, rows) of this sequence of lse."""
        return lse[self.b] if isinstance(self.own, int) else lse[:, self.own]

    def _queries(self, rows: range) -> Tensor:
        """Return the scaled queries of ``rows``, (heads_kv, group * rows, head_dim)."""
        q = self.q[rows.start : rows.stop]
        if self.qv is not None:  # one product gives q k^T + qv v^T
            q = torch.cat([q, self.qv[rows.start : rows.stop]], -1)
        q = q.to(self.dtype) * self.problem.softmax_scale
        heads_kv, group = self.problem.num_heads_kv, self.problem.group_size
        return q.transpose(0, 1).reshape(heads_kv, group * len(rows), -1)

    def _online(self, start: Sums, q: Tensor, rows: range) -> Sums:
        row_max, row_sum, acc = start
        for scores, keys in self._tiles(q, rows):
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            p = scores.sub_(new_max).exp_()
            correction = torch.exp(row_max - new_max)
            row_sum = row_sum * correction + p.sum(-1, keepdim=True)
            v = self._gather(self.v_cache, self.v_descale, keys)
            acc = acc.mul_(correction).baddbmm_(p, v.transpose(0, 1))
            row_max = new_max
        return row_max, row_sum, acc

    def _unified(self, start: Sums, q: Tensor, rows: range) -> Sums | None:
        """Return the same sums as :meth:`_online`, or None if the scores are too far from phi.

        phi is the unified maximum of FlashDecoding++ (Hong et al. 2023, section 3). It is subtracted from all
        scores in place of a row's maximum.
        """
        row_max, row_sum, acc = start
        assert self.phi is not None
        phi = self.phi.to(self.dtype).view(row_sum.shape[0], -1, 1, 1).expand(-1, -1, len(rows), 1)
        phi = phi.reshape(row_sum.shape)
        # Multiplying exp(score) by exp(-phi) is more accurate than exp(score - phi), because the subtraction
        # rounds scores near zero.
        factor = torch.exp(-phi)
        total, values = torch.zeros_like(row_sum), torch.zeros_like(acc)
        for scores, keys in self._tiles(q, rows):
            p = scores.exp_().mul_(factor)
            total += p.sum(-1, keepdim=True)
            values.baddbmm_(p, self._gather(self.v_cache, self.v_descale, keys).transpose(0, 1))
        largest = values.abs().amax()  # NaN if any value is NaN
        in_range = ((total >= MIN_SUM) & (total <= MAX_SUM)).all() & (largest >= MIN_VALUE)
        if not (in_range and largest.isfinite()):
            return None
        # ``start`` holds a sink or attention over other keys, whose maximum may be far from phi. So both sums
        # are scaled to the larger of the two maxima before they are added.
        lse = phi + total.log()
        new_max = torch.maximum(row_max, lse)
        before, here = torch.exp(row_max - new_max), torch.exp(lse - new_max)
        return new_max, row_sum * before + here, acc * before + values / total * here

    def _tiles(self, q: Tensor, rows: range) -> Iterator[tuple[Tensor, range]]:
        """Yield the masked scores of each block of keys, and the block's range of keys.

        Scores are (heads_kv, group * rows, keys). The blocks cover the keys that any of ``rows`` sees.
        """
        first = self.first_key
        seen = self.problem.key_range(self._positions(rows), range(self.seqlen_k - first))
        seen = range(seen.start + first, seen.stop + first)
        # At least 256 keys: with many rows the tile grows, instead of its products becoming short.
        for keys in split(seen, max(256, TILE_ELEMENTS // (q.shape[0] * q.shape[1]))):
            k = self._gather(self.k_cache, self.k_descale, keys)
            if self.qv is not None:
                k = torch.cat([k, self._gather(self.v_cache, self.v_descale, keys)], -1)
            yield self._masked(torch.matmul(q, k.permute(1, 2, 0)), rows, keys), keys

    def _start(self, rows: range) -> Sums:
        """Return the :data:`Sums` that the online softmax starts with, before the first key.

        They contain the sink, and the result of attention over other keys (``prior``).
        """
        heads_kv, group = self.problem.num_heads_kv, self.problem.group_size
        size = (heads_kv, group * len(rows))
        # The lowest finite number instead of -inf: hidden scores then give exp(-inf - lowest) = 0, not NaN.
        lowest = torch.finfo(self.dtype).min
        row_max = torch.full((*size, 1), lowest, dtype=self.dtype, device="cpu")
        row_sum = torch.zeros_like(row_max)
        acc = torch.zeros((*size, self.problem.head_dim_v), dtype=self.dtype, device="cpu")
        if self.prior is not None:
            out, lse = (part[:, rows.start : rows.stop].reshape(*size, -1) for part in self.prior)
            row_max = lse.clamp(min=lowest)
            row_sum = torch.exp(lse - row_max)
            acc = out.masked_fill(row_sum == 0, 0.0)
        if self.sink is not None:
            sink = self.sink.to(self.dtype).view(heads_kv, group, 1).expand(-1, -1, len(rows))
            sink = sink.reshape(*size, 1)
            new_max = torch.maximum(row_max, sink)
            correction = torch.exp(row_max - new_max)
            row_sum = row_sum * correction + torch.exp(sink - new_max)
            row_max, acc = new_max, acc * correction
        return row_max, row_sum, acc

    def _gather(self, cache: Tensor, descale: Tensor | None, keys: range) -> Tensor:
        """Return the sequence's tokens at positions ``keys`` of a cache, multiplied by their scales.

        The result has shape (keys, heads_kv, head_dim) and the dtype of computation.
        """
        if self.blocks is None:
            return tokens_of_row(cache, self.row, keys, descale, self.dtype)
        page_size = cache.shape[1]
        columns = pages_of(keys, page_size)
        memory = cache.new_empty((len(columns), *cache.shape[1:]), dtype=self.dtype)
        tokens = tokens_of_pages(cache, self.blocks[columns.start : columns.stop], descale, memory)
        first = columns.start * page_size
        return tokens[keys.start - first : keys.stop - first]

    def _masked(self, scores: Tensor, rows: range, keys: range) -> Tensor:
        """Apply soft-cap, ALiBi and masks to a tile of scores (heads_kv, group * rows, keys), in place."""
        problem = self.problem
        if problem.softcap > 0:
            scores.div_(problem.softcap).tanh_().mul_(problem.softcap)
        by_head = scores.view(problem.num_heads_q, len(rows), len(keys))
        own, at = self._positions(rows), range(keys.start - self.first_key, keys.stop - self.first_key)
        if self.slopes is not None:
            row = torch.arange(own.start, own.stop, device="cpu")[:, None]
            distance = (torch.arange(at.start, at.stop, device="cpu") - row).abs()
            by_head.sub_(self.slopes.to(self.dtype)[:, None, None] * distance)
        hidden = None
        if self.tree is not None:
            hidden = self._hidden_by_tree(rows, keys)
        elif not problem.sees_all(own, at):
            hidden = ~problem.visible(own, at)
        if hidden is not None:
            by_head.masked_fill_(hidden, -torch.inf)
        return scores

    def _positions(self, rows: range) -> range:
        """Return the positions of rows, counted from the first key, at which the first chunk begins."""
        offset = self.offset - self.first_key
        return range(rows.start + offset, rows.stop + offset)

    def _hidden_by_tree(self, rows: range, keys: range) -> Tensor | None:
        start = max(keys.start, self.offset)  # the first key of this tile that belongs to the tree
        if start >= keys.stop:
            return None
        assert self.tree is not None
        hidden = torch.zeros((len(rows), len(keys)), dtype=torch.bool, device="cpu")
        mask = self.tree[rows.start : rows.stop, start - self.offset : keys.stop - self.offset]
        hidden[:, start - keys.start :] = ~mask
        return hidden


def combine(
    problem: CombineProblem | DecodeProblem, out_partial: Tensor, lse_partial: Tensor, tensors: None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial results by their log-sum-exps, in the order of the parts.

    Args:
        out_partial: (parts, batch, seqlen, heads, head_dim).
        lse_partial: (parts, batch, seqlen, heads).

    Returns:
        out (batch, seqlen, heads, head_dim), and lse (batch, heads, seqlen).
    """
    lse_partial = lse_partial.masked_fill(lse_partial == torch.inf, -torch.inf)
    largest = lse_partial.amax(0)
    empty = largest == -torch.inf
    largest = largest.masked_fill(empty, 0.0)
    total = torch.zeros_like(largest)
    out = torch.zeros(out_partial.shape[1:], dtype=lse_partial.dtype, device="cpu")
    for out_part, lse_part in zip(out_partial, lse_partial, strict=True):
        weight = torch.exp(lse_part - largest)
        total += weight
        # If a part has no keys, its out was not written and may hold NaN. A weight of 0 would not remove NaN.
        part = out_part.to(out.dtype).masked_fill((lse_part == -torch.inf).unsqueeze(-1), 0.0)
        out.addcmul_(part, weight.unsqueeze(-1))
    out /= total.masked_fill(empty, 1.0).unsqueeze(-1)
    lse = (largest + total.log()).masked_fill(empty, -torch.inf)
    return out.to(problem.out_dtype), lse.transpose(1, 2).contiguous().detach()


def tokens_of_row(cache: Tensor, row: int, keys: range, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the tokens at positions ``keys`` in one row of a dense cache, multiplied by their scales.

    The result has shape (keys, heads_kv, head_dim) and dtype ``dtype``.
    """
    tokens = cache[row, keys.start : keys.stop].to(dtype, memory_format=torch.contiguous_format)
    if descale is not None:
        tokens *= (descale if descale.dim() == 1 else descale[row]).to(dtype).unsqueeze(-1)
    return tokens


def tokens_of_pages(cache: Tensor, pages: Tensor, descale: Tensor | None, memory: Tensor) -> Tensor:
    """Write the tokens of ``pages`` to ``memory``, multiplied by their scales, and return them.

    The result has shape (pages * page_size, heads_kv, head_dim). ``memory`` has the dtype of computation and
    room for at least ``len(pages)`` pages. Callers reuse ``memory``, because allocating it each time costs
    more than the copy.
    """
    tokens = memory[: len(pages)]
    if cache.dtype == memory.dtype:
        torch.index_select(cache, 0, pages, out=tokens)
    elif cache.itemsize == 1:  # torch cannot index FP8 tensors on the CPU
        tokens.copy_(cache.view(torch.uint8).index_select(0, pages).view(cache.dtype))
    else:
        tokens.copy_(cache.index_select(0, pages))
    if descale is not None:
        factor = descale if descale.dim() == 1 else descale[pages].unsqueeze(1)
        tokens *= factor.to(tokens.dtype).unsqueeze(-1)
    return tokens.flatten(0, 1)


def pages_of(keys: range, page_size: int) -> range:
    """Return the columns of a block table that hold these keys."""
    return range(keys.start // page_size, -(-keys.stop // page_size))


def lengths_of(problem: DecodeProblem, given: CacheTensors) -> list[int]:
    """Return the number of keys of each sequence, including appended ones."""
    lengths = sequence_lengths(problem.batch, problem.capacity, given, problem.seqlen_new)
    return [problem.capacity] * problem.batch if lengths is None else lengths.tolist()


@torch.inference_mode()  # so that caches made in inference mode can be written outside of it
def append(
    problem: AppendProblem, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, given: AppendTensors
) -> None:
    """Write k and v into the caches, and the rotated queries to ``q_rotated``."""
    token, row, offset = destinations(k_cache, k, given)
    k_rows, v_rows = (t.detach().flatten(0, -3)[token] for t in (k, v))
    if given.rotary_cos is not None:
        k_rows = rotate_appended(k.detach(), given.cu_seqlens_k_new, given, problem.rotary_interleaved)
        if given.q is not None and given.q_rotated is not None:
            by_token = problem.rotate_q_by_token
            q_rows = rotate_appended(
                given.q.detach(), given.cu_seqlens_q, given, problem.rotary_interleaved, by_token
            )
            given.q_rotated.view(-1, *q_rows.shape[1:])[: len(q_rows)] = q_rows
    sequence = new_tokens(k, given.cu_seqlens_k_new)[0] if problem.descale == "sequence" else row
    for cache, new, descale in ((k_cache, k_rows, given.k_descale), (v_cache, v_rows, given.v_descale)):
        factor = None if descale is None else descales_of(descale, sequence, row)
        _indexable(cache)[row, offset] = _indexable(quantized(new, factor, cache.dtype))


@torch.inference_mode()
def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor, given: CopyTensors) -> None:
    """Copy blocks onto others, in all layers, for each (source, destination) of ``block_pairs``.

    The first dimension of all tensors is the layer.
    """
    sources, destinations = block_pairs[block_pairs[:, 0] >= 0].long().unbind(1)
    for tensor in (k_cache, v_cache, *given):
        if tensor is not None:
            data = _indexable(tensor)
            data[:, destinations] = data[:, sources]


def _indexable(tensor: Tensor) -> Tensor:
    """Return a view that torch can index on the CPU: FP8 tensors as uint8."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
