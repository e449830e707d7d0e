"""Attention mass: the sum of the probabilities that each cached key received, added to the caller's buffer.

Attention has no final probabilities: it accumulates tiles relative to a running maximum. With lse known, they
are P = exp(S - lse), and the mass of a key is the sum of its column of P, over query heads of the group and
query tokens. So this kernel runs after attention::

    for each tile of keys that a program owns, for all heads of a 32-byte sector of mass:
        for each sequence that holds it, in order:       one, unless sequences share pages
            sums += sum over rows of P
        mass += sums

P comes from one of two places:

*Stored* (sum_stored_rows), for the few rows of a step of generation. The attention kernel stores
exp(S - maximum) of each n_block, in the dtype to which it rounds P anyway, and the maxima. A step is bound by
bytes, and these are few: with head_dim 128, a 16-bit cache and a group of 4, a key of a head has 512 bytes
of k and v, 16 of stored P (written and read) and 8 of mass. That is 4.7 %.

*Recomputed* (sum_rows), for more rows: S = Q K^T, by the attention kernel's step functions. This takes about
half as long as attention, and no memory.

Every element is added to by one program in one order, so the result is bitwise the same in every run.
Sequences may share pages, or rows of a dense cache (``cache_batch_idx``). A shared page then belongs to the
program of one of its holders, which adds the sums of all of them, in their order. The holders take turns from
n_block to n_block. Programs find them in the page's column of the block table: a shared page is in the same
column in each of its sequences.

A tile takes little work, so loads that wait for each other and instructions of the search bound its time. The
search serves all heads and keys of a tile, and four waits remain: for the sequence's length; for all lengths
and the entries of the block table; for P, maxima and lse; for mass.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flashtile.backends.common.device import multiprocessors
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
    multiply_keys,
    page_of_keys,
    rows_of_n_block,
    score_rows_of,
    scores_of,
    weight_places,
)
from flashtile.backends.portable.decode.config import TALL, DecodeConfig, choose
from flashtile.backends.portable.decode.launch import (
    DecodeLaunch,
    decode_variant,
    lengths_of,
    m_blocks_of,
    outer_strides_of,
    plan_of,
    strides_of,
)
from flashtile.backends.portable.decode.launch import as_operands as caches_as_operands
from flashtile.backends.portable.decode.schedule import (
    Rows,
    WorkTile,
    heads_of_rows,
    keys_of_sequence,
    load_sequence,
    lse_places,
    packed_tokens,
)
from flashtile.problems import common
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
"""Numbers of mass in a tile, if there are enough tiles for all multiprocessors. Not measured."""
PER_THREAD = 8
"""Numbers of mass per thread: a load of 16 bytes of a row of P in 16 bits."""
MAX_REGISTERS = 80
"""For three programs of 8 warps per multiprocessor: Triton 3.6 would take 91 registers, for two. Units of
fewer keys than PER_THREAD would spill, so they have no limit."""
SCAN = 2048
"""Entries of block tables that a program compares with its own at a time. Not measured."""


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
    """Keys of a unit. They are in one page and one n_block."""
    SCAN: int
    """Sequences whose block tables a program compares with its own at a time."""


MassPointers = decode_pointers("MassPointers", "q k v lse mass stored", __name__)
"""``stored`` is :class:`attend.WeightPointers`, and q, k and v are None, if C.WEIGHTS."""


class MassSizes(NamedTuple):
    """Integers of a launch. Kernels are not specialized on their values."""

    batch: Any
    parts: Any
    """Programs per sequence and group of HEADS key heads: its tiles, or fewer if they recompute."""
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
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    groups = (lengths.num_heads_kv + C.HEADS - 1) // C.HEADS
    part = program % sizes.parts
    head_kv = program // sizes.parts % groups * C.HEADS
    b = program // (sizes.parts * groups)
    keys = keys_of_sequence(load_sequence(b, True, pointers, lengths, C), lengths, C)
    first = keys.first // C.KEYS + part
    end = (keys.end + C.KEYS - 1) // C.KEYS
    if C.WEIGHTS:
        # No loop: what the compiler moves out of one takes 128 instead of 61 registers.
        if first < end:
            add_tile(first * C.KEYS, b, head_kv, call, C)
    else:
        for tile in range(first, end, sizes.parts):
            add_tile(tile * C.KEYS, b, head_kv, call, C)


@triton.jit
def add_tile(start, b, head_kv, call, C: tl.constexpr):
    """Add the mass of the tile of keys from ``start`` on, as far as sequence ``b`` owns their pages."""
    pointers, lengths, sizes = call.pointers, call.lengths, call.splits
    SIZE: tl.constexpr = C.SIZE  # Triton does not accept a field of C in a shape
    UNITS: tl.constexpr = C.KEYS // SIZE
    HEADS: tl.constexpr = C.HEADS
    SCAN: tl.constexpr = C.SCAN
    starts = start + tl.arange(0, UNITS) * SIZE
    pages, owned = pages_of_units(b, True, starts, call, C)
    first = b
    last = b
    if C.SHARED:
        # Reduced once, after the loop: a reduction is an exchange between warps.
        lowest = tl.zeros([SCAN, UNITS], tl.int32) + b
        highest = lowest
        for scanned in range(0, sizes.batch, SCAN):
            others = (scanned + tl.arange(0, SCAN))[:, None]
            found, held = pages_of_units(others, others < sizes.batch, starts[None, :], call, C)
            same = held & (found == pages[None, :])
            lowest = tl.minimum(lowest, tl.where(same, others, b))
            highest = tl.maximum(highest, tl.where(same, others, b))
        first = tl.min(lowest)
        last = tl.max(highest)
        before = starts * 0
        holders = starts * 0
        for other in tl.range(first, last + 1, loop_unroll_factor=4):
            found, held = pages_of_units(other, True, starts, call, C)
            same = (held & (found == pages)).to(tl.int32)
            holders += same
            before += tl.where(other < b, same, 0)
        owned = owned & (before == starts // C.BLOCK_N % tl.maximum(holders, 1))
    if tl.max(owned.to(tl.int32), 0) != 0:
        sums = tl.zeros([HEADS, UNITS, SIZE], tl.float32)
        for i in range(0, last - first + 1):
            holder = first + i
            found, held = pages_of_units(holder, True, starts, call, C)
            same = owned & held & (found == pages)
            if C.WEIGHTS:
                sums += sum_stored_rows(starts, same, holder, head_kv, call, C)
            elif tl.max(same.to(tl.int32), 0) != 0:
                of_holder = tl.reshape(
                    sum_rows(start // C.BLOCK_N, holder, head_kv, call, C), [1, UNITS, SIZE]
                )
                sums += tl.where(same[None, :, None], of_holder, 0.0)
        positions = starts[:, None] + tl.arange(0, SIZE)[None, :]
        token = positions
        if C.PAGE_SIZE != 0:
            token = positions % C.PAGE_SIZE
        heads = head_kv + tl.arange(0, HEADS)
        places = pages.to(tl.int64)[:, None] * sizes.page_stride + token.to(tl.int64) * sizes.token_stride
        places = places[:, :, None] + heads[None, None, :]
        inside = owned[:, None] & (positions < lengths.capacity)
        inside = inside[:, :, None] & (heads < lengths.num_heads_kv)[None, None, :]
        mass = tl.load(pointers.mass + places, mask=inside, other=0.0)
        tl.store(pointers.mass + places, mass + tl.permute(sums, (1, 2, 0)), mask=inside)


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
    start = n * C.BLOCK_N
    positions = start + tl.arange(0, C.BLOCK_N)
    seen = is_seen(positions, keys, C)
    page = cache.row
    if C.PAGE_SIZE != 0:
        page = page_of_keys(in_cache(cache.pages[0], call.num_blocks), C)
    k, v, k_offsets, v_offsets = rows_of_n_block(cache, page, start, call.strides, C)
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
        products = multiply_keys(q, q_odd, k, k_offsets, seen, C)
        if C.HAS_QV:
            v_tile = load_rows(v, v_offsets, seen, C.HEAD_DIM_V, C.BLOCK_DV)
            products = tl.dot(qv, tl.trans(v_tile), products, input_precision=C.PRECISION)
        if C.DESCALE == "block":
            page_scale = tl.load(cache.k_descale + page.to(tl.int64) * call.outer.k_descale_stride)
            if C.PAGE_SIZE != 0 and not C.one_page:
                page_scale = page_scale[None, :]
            products = products * page_scale
        of_rows = score_rows_of(rows, slope, k_scale, tree_rows, sequence, lengths, C)
        scores = scores_of(products, positions, seen, of_rows, call, C)
        places = lse_places(rows, packed_tokens(rows, lengths, C), lengths, C)
        lse = tl.load(pointers.lse + places, mask=exists, other=0.0)
        # Hidden keys are told apart by their scores: with an lse of -inf or NaN, the exponential is NaN.
        hidden = (scores == -float("inf")) | (exists == 0)[:, None]
        if not C.SCALED_SCORES:
            scores = scores * call.numbers.scale_log2
        p = tl.exp2(scores - lse[:, None] * LOG2_E)
        sums += tl.where(hidden, 0.0, p)
    return tl.sum(sums, 0)  # once: it is an exchange between warps


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
            places = lse_places(rows, packed_tokens(rows, lengths, C), lengths, C)
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


def unit_of(page_size: int, block_n: int) -> int:
    """Return the keys of a unit: an n_block within one page, a page of several in an n_block, or 1."""
    if page_size == 0 or page_size % block_n == 0:
        return block_n
    return 1 if block_n % page_size else page_size


def stored_sizes(problem: DecodeProblem, config: DecodeConfig) -> tuple[int, int]:
    """Return the numbers of (weights, maxima) that attention stores; (0, 0) if it stores none.

    It does for few rows. Those of a prefill would take more memory than its tensors.
    """
    n_blocks = triton.cdiv(problem.capacity, config.tile.BLOCK_N)
    maxima = math.prod(problem.lse_shape) * n_blocks
    weights = maxima * config.tile.BLOCK_N
    few = m_blocks_of(problem, config) <= 1 and weights * problem.dtype.itemsize <= MAX_STORED_BYTES
    return (weights, maxima) if few else (0, 0)


class MassLaunch:
    """``(q, k_cache, v_cache, tensors, mass, out, lse) -> (mass, out, lse)`` for tensors of one signature.

    Args:
        attend: the launch of attention. None: the portable one, which stores probabilities of few rows.
    """

    writes_into = True
    adds_to = ("mass",)

    def __init__(self, problem: DecodeProblem, attend: DecodeLaunch | None = None) -> None:
        self._problem = problem
        self._kernel: CachedLaunch | None = None
        self._config = config = choose(problem)
        self._sizes = (0, 0) if attend else stored_sizes(problem, config)
        in_float16 = problem.cache_dtype == FP8 and problem.dtype.itemsize == 2
        self._stored_dtype = torch.float16 if in_float16 else problem.dtype
        if self.recomputes and config.tile.BLOCK_M == TALL:
            # Keys stay while rows pass by: with more keys to a tile, q is read less often, and the search and
            # the first loads of a tile, which nothing overlaps, serve more products.
            tile = replace(config.tile, BLOCK_M=TALL // 2, BLOCK_N=2 * config.tile.BLOCK_N)
            self._config = replace(config, tile=tile)
        if attend is None:
            # Stored probabilities are relative to maxima, so they must be computed, and no result changes.
            own = (
                problem if self.recomputes else replace(problem, softmax_max=None, softmax_max_by_head=False)
            )
            attend = DecodeLaunch(own, config, stores_weights=not self.recomputes)
        self._attend = attend

    @property
    def recomputes(self) -> bool:
        """Whether probabilities are recomputed instead of stored."""
        return self._sizes[0] == 0

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
        stored, (weights, maxima) = None, self._sizes
        if weights:
            stored = WeightPointers(
                q.new_empty(weights, dtype=self._stored_dtype), q.new_empty(maxima, dtype=torch.float32)
            )
        out, lse = self._attend(q, k_cache, v_cache, tensors, out, lse, stored)
        if 0 in self._problem.out_shape or 0 in mass.shape or self._problem.batch == 0:
            return mass, out, lse
        given = (q, *caches_as_operands(k_cache, v_cache, self._config))
        if self._kernel is None:
            self._kernel = self._prepare(*given, tensors, mass)
        multiplied = given if self.recomputes else (None, None, None)
        self._kernel(q.device, *multiplied, lse, mass, stored, *tensors)
        return mass, out, lse

    def _prepare(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, mass: Tensor
    ) -> CachedLaunch:
        problem, config = self._problem, self._config
        plan = plan_of(problem, config, k_cache, v_cache)._replace(stream_k=False, softmax_max="none")
        block_n = config.tile.BLOCK_N
        heads, keys, tile = 1, block_n, config.tile
        count = multiprocessors(problem.device)
        if not self.recomputes:
            heads = min(SECTOR, triton.next_power_of_2(problem.num_heads_kv))
            groups = triton.cdiv(problem.num_heads_kv, heads) * problem.batch
            while 2 * keys * heads <= TILE and groups * triton.cdiv(problem.capacity, 2 * keys) >= count:
                keys *= 2
            tile = replace(tile, num_warps=max(1, min(8, keys * heads // (32 * PER_THREAD))))
        size = unit_of(problem.page_size, block_n)
        variant = MassVariant(
            **asdict(decode_variant(problem, config, plan, not self.recomputes)),
            SHARED=problem.batch > 1 and (problem.page_size > 0 or problem.batch_idx),
            KEYS=keys,
            HEADS=heads,
            ROWS=1 if self.recomputes else triton.next_power_of_2(problem.seqlen_q * problem.group_size),
            SIZE=size,
            SCAN=min(max(1, SCAN * size // keys), triton.next_power_of_2(problem.batch)),
        )
        lengths = lengths_of(problem, config)
        work = problem.batch * triton.cdiv(problem.num_heads_kv, heads)
        tiles = triton.cdiv(problem.capacity, keys)
        parts = max(1, min(tiles, triton.cdiv(PROGRAMS * count, work)) if self.recomputes else tiles)
        scale = problem.softmax_scale
        options: dict[str, Any] = {"launch_pdl": True} if variant.PDL else {}
        if variant.PDL and variant.WEIGHTS and size >= PER_THREAD:
            options["maxnreg"] = MAX_REGISTERS
        return CachedLaunch(
            mass_kernel,
            parts * work,
            (
                strides_of(q, k_cache, v_cache),
                outer_strides_of(tensors),
                lengths,
                DecodeNumbers(scale, scale * common.LOG2_E, problem.softcap, None),
                problem.num_blocks,
                MassSizes(problem.batch, parts, *mass.stride()[:2]),
            ),
            (variant,),
            tile,
            pointers=MassPointers,
            **options,
        )
