"""Attention mass: the sum of the probabilities that each cached key received, added to the caller's buffer.

Attention has no final probabilities: it accumulates tiles relative to a running maximum. With lse known, they
are P = exp(S - lse), and the mass of a key is the sum of its column of P, over query heads of the group and
query tokens. So this kernel runs after attention::

    for each tile of KEYS keys and HEADS key heads that a program has:
        for each sequence that holds it, in order:       one, unless sequences share pages
            sums += sum over rows of P
        mass += sums

P comes from one of two places:

*Stored* (sum_stored_rows), for the few rows of a step of generation. The attention kernel stores
exp(S - maximum) of each n_block, in the dtype to which it rounds P anyway, and the maxima. A step is bound by
bytes, and these are few: with head_dim 128, a 16-bit cache and a group of 4, a key of a head has 512 bytes
of k and v, 16 of stored P (written and read) and 8 of mass. That is 4.7 %.

*Recomputed* (sum_rows), for more rows: S = Q K^T, by the attention kernel's step functions, and no memory. Of
many rows whose scores are plain products (sum_heads), S^T = K Q^T, with K loaded once.

Every element is added to by one program in one order, so the result is bitwise the same in every run.
Sequences may share pages, or rows of a dense cache (``cache_batch_idx``). A shared page then belongs to the
program of one of its holders, which adds the sums of all of them, in their order. The holders take turns from
n_block to n_block. Programs find them in the page's column of the block table: a shared page is in the same
column in each of its sequences.

A tile takes little work, so its time is bound by loads that wait for each other, and by the instructions of
the search. Therefore one search serves all heads and keys of a tile.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.device import capability, multiprocessors
from flashtile.backends.common.jit import kernel, triton
from flashtile.backends.common.launch import CachedLaunch
from flashtile.backends.common.tiles import LOG2_E
from flashtile.backends.portable.decode.attend import (
    DecodeCall,
    DecodeNumbers,
    DecodeVariant,
    WeightPointers,
    as_operands,
    cache_of,
    decode_pointers,
    in_cache,
    is_seen,
    load_queries,
    load_rows,
    load_terms,
    page_of_keys,
    rows_of_n_block,
    score_rows_of,
    scores_of,
    weight_places,
)
from flashtile.backends.portable.decode.config import TALL, choose
from flashtile.backends.portable.decode.launch import (
    DecodeLaunch,
    cache_operands,
    decode_variant,
    lengths_of,
    m_blocks_of,
    outer_strides_of,
    plan_of,
    scales_scores,
    strides_of,
)
from flashtile.backends.portable.decode.schedule import (
    Rows,
    WorkTile,
    heads_of_rows,
    keys_of_sequence,
    load_sequence,
    lse_places,
)
from flashtile.backends.portable.masking import block_range, visible, window_at
from flashtile.problems.decode import FP8, CacheTensors, DecodeProblem

PROGRAMS = 16
"""Programs per multiprocessor, about, that recompute. Each takes every n-th n_block of a sequence and head.
Not measured."""
MAX_STORED_BYTES = 512 * 2**20
"""Largest memory of stored probabilities, less than 2^31 elements. With a wider block table, they are
recomputed."""
SECTOR = 8
"""Heads of a tile: their numbers of mass, for one key, fill a sector of 32 bytes, the unit of reads."""
TILE = 2048
"""Numbers of mass in a tile, if there are enough tiles for all multiprocessors. 1024 are as fast (H200)."""
PER_THREAD = 8
"""Numbers of mass per thread: a load of 16 bytes of a row of P in 16 bits."""
MAX_REGISTERS = 80
"""For three programs of 8 warps per multiprocessor. 64, for four, spill, and a step takes up to 4 % longer
(H200). Units of fewer keys than PER_THREAD would spill with 80, so they have no limit."""
SHARING_REGISTERS = 128
"""For two programs of 8 warps per multiprocessor, if the rows are taken head by head."""
REACH = 2**31
"""Elements between the first and the last query token of a sequence, less than this if rows are taken head by
head: offsets of 32 bits leave the loop the registers that it needs."""
SCAN = 1024
"""Entries of block tables that a program compares with its own at a time. With 2048, registers spill."""


@dataclass(frozen=True)
class MassVariant(DecodeVariant):
    """Constants of the kernel: those of attention with the same tile, and more."""

    SHARED: bool
    """Whether several sequences may hold a page, or a row of a dense cache."""
    KEYS: int
    """Keys of a tile: one n_block, or several of stored probabilities."""
    HEADS: int
    """Key heads of a tile."""
    ROWS: int
    """Rows of a sequence and key head, at most, if probabilities are stored."""
    SIZE: int
    """Keys of a unit, which is in one page and one n_block."""
    BY_HEAD: bool
    """Whether recomputed rows are taken head by head (:func:`sum_heads`)."""
    SCAN: int
    """Sequences whose block tables a program compares with its own at a time."""


MassPointers = decode_pointers("MassPointers", "q k v lse mass stored", __name__)
"""``stored`` is :class:`attend.WeightPointers`, and q, k and v are None, if C.WEIGHTS."""


class MassSizes(NamedTuple):
    """Integers of a launch. Kernels are not specialized on their values."""

    batch: Any
    parts: Any
    """Programs for a sequence and HEADS key heads: one for each tile, or fewer if they recompute."""
    page_stride: Any
    """Strides of mass, in elements, between pages (or rows of a dense cache) and between tokens."""
    token_stride: Any


@kernel(do_not_specialize=("outer", "lengths", "num_blocks", "sizes"))
def mass_kernel(pointers, strides, outer, lengths, numbers, num_blocks, sizes, C: tl.constexpr):
    """Add the mass of the keys to ``mass``. Grid: (parts * groups of HEADS key heads * batch,).

    q and the caches are laid out as for the attention kernel, and lse is its result. mass is like the caches
    without their last dimension.
    """
    call = DecodeCall(pointers, strides, outer, lengths, numbers, num_blocks, sizes, None, None)
    if C.PDL:
        tl.extra.cuda.gdc_wait()  # this kernel may start before attention has ended
    program = tl.program_id(0)
    groups = (lengths.num_heads_kv + C.HEADS - 1) // C.HEADS
    part = program % sizes.parts
    head_kv = program // sizes.parts % groups * C.HEADS
    b = program // (sizes.parts * groups)
    keys = keys_of_sequence(load_sequence(b, True, pointers, lengths, C), lengths, C)
    first = keys.first // C.KEYS + part
    end = (keys.end + C.KEYS - 1) // C.KEYS
    if C.WEIGHTS:
        if first < end:  # no loop: with one, 20 bytes would spill
            add_tile(first, b, head_kv, call, C)
    else:
        for tile in range(first, end, sizes.parts):
            add_tile(tile, b, head_kv, call, C)


@triton.jit
def add_tile(tile, b, head_kv, call, C: tl.constexpr):
    """Add the mass of a tile of KEYS keys and HEADS key heads, where it is the turn of sequence ``b``."""
    SIZE: tl.constexpr = C.SIZE  # Triton does not accept a field of C in a shape
    UNITS: tl.constexpr = C.KEYS // SIZE
    HEADS: tl.constexpr = C.HEADS
    SCAN: tl.constexpr = C.SCAN
    lengths, sizes = call.lengths, call.splits
    starts = tile * C.KEYS + tl.arange(0, UNITS) * SIZE
    pages, owned = pages_of_units(b, True, starts, call, C)

    # The sequences that hold these pages, and whose turn it is.
    first = b
    last = b
    if C.SHARED:
        lowest = tl.zeros([SCAN, UNITS], tl.int32) + b
        highest = lowest
        holders = lowest * 0
        before = holders
        for scanned in range(0, sizes.batch, SCAN):
            others = (scanned + tl.arange(0, SCAN))[:, None]
            found, held = pages_of_units(others, others < sizes.batch, starts[None, :], call, C)
            same = held & (found == pages[None, :])
            lowest = tl.minimum(lowest, tl.where(same, others, b))
            highest = tl.maximum(highest, tl.where(same, others, b))
            holders += same.to(tl.int32)
            before += (same & (others < b)).to(tl.int32)
        # Reduced once, after the loop: a reduction is an exchange between warps.
        first = tl.min(lowest)
        last = tl.max(highest)
        turn = starts // C.BLOCK_N % tl.maximum(tl.sum(holders, 0), 1)
        owned = owned & (tl.sum(before, 0) == turn)

    if tl.max(owned.to(tl.int32), 0) != 0:
        sums = tl.zeros([HEADS, UNITS, SIZE], tl.float32)
        for i in range(0, last - first + 1):
            holder = first + i
            found, held = pages_of_units(holder, True, starts, call, C)
            same = owned & held & (found == pages)
            if C.WEIGHTS:
                sums += sum_stored_rows(starts, same, holder, head_kv, call, C)
            elif tl.max(same.to(tl.int32), 0) != 0:
                of_holder = tl.reshape(sum_rows(tile, holder, head_kv, call, C), [1, UNITS, SIZE])
                sums += tl.where(same[None, :, None], of_holder, 0.0)
        positions = starts[:, None] + tl.arange(0, SIZE)[None, :]
        token = positions
        if C.PAGE_SIZE != 0:
            token = positions % C.PAGE_SIZE
        heads = head_kv + tl.arange(0, HEADS)
        places = pages.to(tl.int64)[:, None] * sizes.page_stride + token.to(tl.int64) * sizes.token_stride
        to = call.pointers.mass + (places[:, :, None] + heads[None, None, :])
        exist = owned[:, None] & (positions < lengths.capacity)
        exist = exist[:, :, None] & (heads < lengths.num_heads_kv)[None, None, :]
        mass = tl.load(to, mask=exist, other=0.0)
        tl.store(to, mass + tl.permute(sums, (1, 2, 0)), mask=exist)


@triton.jit
def pages_of_units(b, exists, starts, call, C: tl.constexpr):
    """Return (page of each unit, whether sequence ``b`` holds it). Units begin at the positions ``starts``.

    ``b`` broadcasts to ``starts``. A sequence holds a page if one of its rows may see a key there. Pages
    outside of the cache count as not held. The pages of a dense cache are its rows.
    """
    pointers, lengths = call.pointers, call.lengths
    pages = b + starts * 0
    if C.PAGE_SIZE != 0:
        # Also where the page is not held: entries and lengths are then loaded together.
        entries = pointers.block_table + pages.to(tl.int64) * call.outer.table_stride + starts // C.PAGE_SIZE
        pages = tl.load(entries, mask=exists & (starts < lengths.capacity), other=0)
    elif C.HAS_BATCH_IDX:
        pages = tl.load(pointers.cache_batch_idx + pages, mask=exists, other=0)
    keys = keys_of_sequence(load_sequence(b, exists, pointers, lengths, C), lengths, C)
    held = exists & (starts < keys.end) & (starts + C.SIZE > keys.first)
    return pages, held & (pages == in_cache(pages, call.num_blocks))


@triton.jit
def sum_rows(n, b, head_kv, call, C: tl.constexpr):
    """Return the sums [BLOCK_N] of the probabilities in n_block ``n`` over all rows of sequence ``b``."""
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    pointers, lengths = call.pointers, call.lengths
    sequence = load_sequence(b, True, pointers, lengths, C)
    keys = keys_of_sequence(sequence, lengths, C)
    work = WorkTile(b * lengths.m_blocks_per_sequence, head_kv, sequence, 0, keys, 0)
    cache = cache_of(work, n, call, C)
    seen = is_seen(n * BLOCK_N + tl.arange(0, BLOCK_N), keys, C)
    page = cache.row
    if C.PAGE_SIZE != 0:
        page = page_of_keys(in_cache(cache.pages[0], call.num_blocks), C)
    if C.BY_HEAD:
        return tl.where(seen, sum_heads(n, b, head_kv, sequence, cache, page, seen, call, C), 0.0)
    num_rows = sequence.len_q * lengths.group_size
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_rows, C.BLOCK_M):
        index = first + tl.arange(0, C.BLOCK_M)
        exists = index < num_rows
        tokens, heads = heads_of_rows(index, head_kv, lengths, C)
        rows = Rows(b.to(tl.int64), sequence.start_q, tokens, heads, exists)
        q, qv = load_queries(rows, call, C)
        slope, k_scale, _, tree_rows = load_terms(rows, head_kv, call, C)
        q, k_scale = as_operands(q, k_scale, C)
        q_odd = q
        if C.E4M3_PAIRS:
            q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, C.BLOCK_D // 2, 2]))
        score_rows = score_rows_of(rows, slope, k_scale, tree_rows, sequence, lengths, C)
        scores, _ = scores_of(q, q_odd, qv, n, cache, page, seen, score_rows, call, C)
        lse = tl.load(pointers.lse + lse_places(rows, lengths, C), mask=exists, other=0.0)
        # Hidden keys are told apart by their scores: with an lse of -inf or NaN, the exponential is NaN.
        hidden = (scores == -float("inf")) | (exists == 0)[:, None]
        if not C.SCALED_SCORES:
            scores = scores * call.numbers.scale_log2
        p = tl.exp2(scores - lse[:, None] * LOG2_E)
        sums += tl.where(hidden, 0.0, p)
    return tl.sum(sums, 0)  # once: it is an exchange between warps


@triton.jit
def sum_heads(n, b, head_kv, sequence, cache, page, seen, call, C: tl.constexpr):
    """Return the sums [BLOCK_N] of :func:`sum_rows` from S^T = K Q^T, one query head after the other.

    Columns of S^T are rows of one head, so no place of q and lse takes a division, and the sum over them
    stays within a thread until the end. K is loaded once. n_blocks that all rows see have no mask.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_M: tl.constexpr = C.BLOCK_M
    lengths = call.lengths
    start = tl.zeros([], tl.int32) + n * BLOCK_N  # in Triton's interpreter, n is an integer of Python
    base, _, offsets, _ = rows_of_n_block(cache, page, start, call.strides, C)
    k = load_rows(base, offsets, seen, C.HEAD_DIM, C.BLOCK_D)
    offset = sequence.len_k - sequence.len_q
    of_first = window_at(offset, sequence.leftpad, lengths.mask, C)
    of_last = window_at(offset + sequence.len_q - 1, sequence.leftpad, lengths.mask, C)
    _, full, full_end, _ = block_range(
        0, sequence.len_q, offset, sequence.len_k, of_first, of_last, C.HAS_LEFT, C.HAS_RIGHT, BLOCK_N
    )
    tiles = (sequence.len_q + BLOCK_M - 1) // BLOCK_M * lengths.group_size
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if (n >= full) & (n < full_end):
        for tile in range(0, tiles):
            sums += probabilities(tile, k, n, b, head_kv, sequence, False, call, C)
    else:
        for tile in range(0, tiles):
            sums += probabilities(tile, k, n, b, head_kv, sequence, True, call, C)
    return tl.sum(sums, 1)  # once: it is an exchange between threads


@triton.jit
def probabilities(tile, k, n, b, head_kv, sequence, MASKED: tl.constexpr, call, C: tl.constexpr):
    """Return P^T [BLOCK_N, BLOCK_M] of the keys ``k`` and a tile of rows, counted head by head."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    pointers, strides, lengths = call.pointers, call.strides, call.lengths
    of_head = (sequence.len_q + BLOCK_M - 1) // BLOCK_M
    tokens = tile % of_head * BLOCK_M + tl.arange(0, BLOCK_M)
    head = head_kv * lengths.group_size + tile // of_head
    exists = tokens < sequence.len_q
    # Rows past the last token are copies of it with P = 0, not zeros: zero times an infinite key is NaN.
    copied = tl.minimum(tokens, sequence.len_q - 1)
    # The places of the first row are scalars of 64 bits, and the offsets from there have 32 (REACH).
    first = Rows(b.to(tl.int64), sequence.start_q, 0, head, True)
    of_q = pointers.q + (first.b * strides.q_batch + head.to(tl.int64) * strides.q_head)
    of_q += sequence.start_q.to(tl.int64) * strides.q_token
    q = load_rows(of_q, copied * strides.q_token, tokens >= 0, C.HEAD_DIM, C.BLOCK_D)
    # Rows without a key have lse -inf, and P = 0. With an lse of NaN, only P of hidden keys is not NaN.
    of_lse = pointers.lse + lse_places(first, lengths, C)
    lse = tl.load(of_lse + tokens, mask=exists, other=float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E
    scores = tl.dot(k, tl.trans(q), input_precision=C.PRECISION) * call.numbers.scale_log2 - lse[None, :]
    if MASKED:
        of_rows = (copied + sequence.len_k - sequence.len_q)[None, :]
        distance = (n * C.BLOCK_N + tl.arange(0, C.BLOCK_N))[:, None] - of_rows
        window = window_at(of_rows, sequence.leftpad, lengths.mask, C)
        scores = tl.where(visible(distance, window, lengths.mask, C), scores, -float("inf"))
    return tl.exp2(scores)


@triton.jit
def sum_stored_rows(starts, held, b, head_kv, call, C: tl.constexpr):
    """Return the sums [HEADS, UNITS, SIZE] of the probabilities that attention has stored for sequence ``b``.

    0 in units that are not ``held``.
    """
    HEADS: tl.constexpr = C.HEADS
    SIZE: tl.constexpr = C.SIZE
    TOGETHER: tl.constexpr = min(C.ROWS, 4)  # rows whose loads are in flight together, within MAX_REGISTERS
    pointers, lengths = call.pointers, call.lengths
    sequence = load_sequence(b, True, pointers, lengths, C)
    heads_kv = head_kv + tl.arange(0, HEADS)
    n = starts // C.BLOCK_N
    sums = tl.zeros([HEADS, C.KEYS // SIZE, SIZE], tl.float32)
    for first in range(0, C.ROWS, TOGETHER):
        # Row by row: a sum over a tile of rows would be an exchange between warps.
        for i in tl.static_range(TOGETHER):
            exists = (first + i < sequence.len_q * lengths.group_size) & (heads_kv < lengths.num_heads_kv)
            tokens, heads = heads_of_rows(first + i, heads_kv, lengths, C)
            rows = Rows(b.to(tl.int64), sequence.start_q, tokens, heads, exists)
            places = lse_places(rows, lengths, C)
            of_maxima = weight_places(n[None, :], places[:, None], lengths, C)
            of_weights = of_maxima * C.BLOCK_N + (starts % C.BLOCK_N)[None, :]
            of_weights = of_weights[:, :, None] + tl.arange(0, SIZE)[None, None, :]
            inside = exists[:, None] & held[None, :]
            p = tl.load(pointers.stored.weights + of_weights, mask=inside[:, :, None], other=0.0)
            largest = tl.load(pointers.stored.maxima + of_maxima, mask=inside, other=0.0)
            lse = tl.load(pointers.lse + places, mask=exists, other=0.0)
            # Hidden keys have P = 0. If the row sees no key or has an lse of NaN, the factor is NaN.
            factor = tl.exp2(largest - lse[:, None] * LOG2_E)
            p = p.to(tl.float32)
            sums += tl.where(p == 0.0, 0.0, p * factor[:, :, None])
    return sums


class MassLaunch:
    """``(q, k_cache, v_cache, tensors, mass, out, lse) -> (mass, out, lse)`` for tensors of one signature.

    Args:
        attend: the launch of attention. None: the portable one, which stores probabilities of few rows.
    """

    writes_into = True
    adds_to = ("mass",)

    def __init__(self, problem: DecodeProblem, attend: DecodeLaunch | None = None) -> None:
        self._problem = problem
        self._config = config = choose(problem)
        self._kernel: CachedLaunch | None = None
        sizes = problem.batch, problem.seqlen_q, problem.num_blocks, problem.capacity
        self._empty = 0 in (*sizes, *problem.out_shape)
        self._maxima = math.prod(problem.lse_shape) * triton.cdiv(problem.capacity, config.tile.BLOCK_N)
        self._weights = self._maxima * config.tile.BLOCK_N
        in_float16 = problem.cache_dtype == FP8 and problem.dtype.itemsize == 2
        self._stored_dtype = torch.float16 if in_float16 else problem.dtype
        stored_bytes = self._weights * problem.dtype.itemsize
        # The probabilities of a prefill would take more memory than its tensors.
        few = m_blocks_of(problem, config) <= 1 and 0 < stored_bytes <= MAX_STORED_BYTES
        self.recomputes = attend is not None or not few
        """Whether probabilities are recomputed instead of stored."""
        if not self.recomputes:
            # Stored probabilities are relative to maxima, so they must be computed, and no result changes.
            own = replace(problem, softmax_max=None, softmax_max_by_head=False)
            attend = DecodeLaunch(own, config, stores_weights=True)
        self._attend = attend or DecodeLaunch(problem, config)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tensors: CacheTensors,
        mass: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        stored = None
        if not self.recomputes:
            maxima = q.new_empty(self._maxima, dtype=torch.float32)
            stored = WeightPointers(q.new_empty(self._weights, dtype=self._stored_dtype), maxima)
        out, lse = self._attend(q, k_cache, v_cache, tensors, out, lse, stored)
        if not self._empty:
            given = (q, *cache_operands(k_cache, v_cache, self._config))
            if self._kernel is None:
                self._kernel = self._prepare(*given, tensors, mass)
            multiplied = given if self.recomputes else (None, None, None)
            self._kernel(q.device, *multiplied, lse, mass, stored, *tensors)
        return mass, out, lse

    def _prepare(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, mass: Tensor
    ) -> CachedLaunch:
        problem, tile = self._problem, self._config.tile
        count, by_head = multiprocessors(problem.device), False
        if self.recomputes:
            heads = rows = 1
            if tile.BLOCK_M == TALL:
                # Keys stay while rows pass by: with more keys to a tile, q is read less often, and the search
                # and the first loads of a tile, which nothing overlaps, serve more products.
                tile = replace(tile, BLOCK_M=TALL // 2, BLOCK_N=2 * tile.BLOCK_N)
                plain = not (scales_scores(problem) or problem.qv or problem.tree)
                if plain and problem.seqlen_q >= tile.BLOCK_M:  # the rows of a head fill a tile
                    tile = replace(tile, num_stages=2)  # for two programs per multiprocessor
                    by_head = problem.seqlen_q * q.stride(-3) < REACH
            keys = tile.BLOCK_N
            work = problem.batch * problem.num_heads_kv
            parts = min(triton.cdiv(problem.capacity, keys), triton.cdiv(PROGRAMS * count, work))
        else:
            heads = min(SECTOR, triton.next_power_of_2(problem.num_heads_kv))
            rows = triton.next_power_of_2(problem.seqlen_q * problem.group_size)
            keys = tile.BLOCK_N
            work = problem.batch * triton.cdiv(problem.num_heads_kv, heads)
            while 2 * keys * heads <= TILE and work * triton.cdiv(problem.capacity, 2 * keys) >= count:
                keys *= 2
            parts = triton.cdiv(problem.capacity, keys)
            tile = replace(tile, num_warps=max(1, min(8, keys * heads // (32 * PER_THREAD))))
        config, size = replace(self._config, tile=tile), math.gcd(problem.page_size, tile.BLOCK_N)
        plan = plan_of(problem, config, k_cache, v_cache)._replace(stream_k=False, softmax_max="none")
        variant = MassVariant(
            **asdict(decode_variant(problem, config, plan, not self.recomputes)),
            SHARED=problem.batch > 1 and (problem.page_size > 0 or problem.batch_idx),
            KEYS=keys,
            HEADS=heads,
            ROWS=rows,
            SIZE=size,
            BY_HEAD=by_head,
            SCAN=min(max(1, SCAN * size // keys), triton.next_power_of_2(problem.batch)),
        )
        scale = problem.softmax_scale
        options: dict[str, Any] = {}
        if variant.PDL:
            options["launch_pdl"] = True
            if not self.recomputes and size >= PER_THREAD:
                options["maxnreg"] = MAX_REGISTERS
            # On compute capability 10, 500 bytes and more would spill.
            elif by_head and capability(problem.device) == (9, 0):
                options["maxnreg"] = SHARING_REGISTERS
        return CachedLaunch(
            mass_kernel,
            parts * work,
            (
                strides_of(q, k_cache, v_cache),
                outer_strides_of(tensors),
                lengths_of(problem, config),
                DecodeNumbers(scale, scale * LOG2_E.value, problem.softcap, None),
                problem.num_blocks,
                MassSizes(problem.batch, parts, *mass.stride()[:2]),
            ),
            (variant,),
            tile,
            pointers=MassPointers,
            **options,
        )
