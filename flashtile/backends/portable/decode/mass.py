"""Attention mass: the sum of probabilities that each cached key received, added to the caller's buffer.

Attention itself never has the final probabilities: it accumulates tiles relative to a running maximum. With lse
known, they are P = exp(S - lse), as in the weights kernel, and the mass of a key is the sum of its column over the
query heads of the group and over the query tokens. So this kernel runs after attention, with its step functions::

    for each n_block that a program owns:
        for each sequence that holds it, in order:       one, unless sequences share pages
            for each m_block of the sequence:
                S = Q K^T;  mask;  P = exp(S - lse);  sums += sum of P over rows
        mass += sums

Every element is added to by one program in one order, so the result is bitwise the same in every run. Sequences may
share pages (or rows of a dense cache, by ``cache_batch_idx``). A page then belongs to the program of the first
sequence that holds it, which also adds the mass of the others, in their order. Programs find the holders of a page
in its column of the block table: a shared page lies at the same place in each of its sequences.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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
    as_operands,
    cache_of,
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
)
from flashtile.backends.portable.decode.config import choose
from flashtile.backends.portable.decode.launch import (
    DecodeLaunch,
    decode_variant,
    lengths_of,
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
from flashtile.problems.decode import CacheTensors, DecodeProblem

PROGRAMS = 16
"""Programs per multiprocessor, about. Each takes every n-th n_block of a sequence and head. More programs divide
pages that many sequences share better. Not measured."""
SCAN = 32
"""Sequences whose block tables a program compares with its own at a time. Not measured."""


@dataclass(frozen=True)
class MassVariant(DecodeVariant):
    """Constants of the kernel: those of attention with the same tile, and more."""

    SHARED: bool
    """Whether several sequences may hold a page, or a row of a dense cache."""
    SCAN: int
    UNITS: int
    """Units of an n_block. The keys of a unit are in one page."""


class MassPointers(NamedTuple):
    """Tensors of the call; None for each that the call does not use."""

    q: Any
    k: Any
    v: Any
    lse: Any
    mass: Any
    cache_seqlens: Any
    cache_leftpad: Any
    cache_batch_idx: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k_new: Any
    alibi_slopes: Any
    sink: Any
    k_descale: Any
    v_descale: Any
    tree_mask: Any
    prior_out: Any
    prior_lse: Any
    softmax_max: Any
    qv: Any


class MassSizes(NamedTuple):
    """Integers of a launch. Kernels are not specialized on their values."""

    batch: Any
    parts: Any
    """Programs per sequence and key head."""
    page_stride: Any
    """Strides of mass, in elements: between pages (or rows of a dense cache), tokens and heads."""
    token_stride: Any
    head_stride: Any


@kernel(do_not_specialize=("outer", "lengths", "num_blocks", "sizes"))
def mass_kernel(pointers, strides, outer, lengths, numbers, num_blocks, sizes, C: tl.constexpr):
    """Add the mass of the keys to ``mass``. Grid: (parts * heads_kv * batch,).

    q and the caches are laid out as for the attention kernel, and lse is its result. mass is like the caches without
    their last dimension.
    """
    call = DecodeCall(pointers, strides, outer, lengths, numbers, num_blocks, sizes, None, None)
    program = tl.program_id(0)
    part = program % sizes.parts
    head_kv = program // sizes.parts % lengths.num_heads_kv
    b = program // (sizes.parts * lengths.num_heads_kv)
    keys = keys_of_sequence(load_sequence(b, True, pointers, lengths, C), lengths, C)
    for n in range(keys.first // C.BLOCK_N + part, (keys.end + C.BLOCK_N - 1) // C.BLOCK_N, sizes.parts):
        add_n_block(n, b, head_kv, call, C)


@triton.jit
def add_n_block(n, b, head_kv, call, C: tl.constexpr):
    """Add the mass of those keys of n_block ``n`` whose pages sequence ``b`` is the first to hold."""
    lengths, sizes = call.lengths, call.splits
    SIZE: tl.constexpr = C.BLOCK_N // C.UNITS
    starts = n * C.BLOCK_N + tl.arange(0, C.UNITS) * SIZE
    pages, owned = pages_of_units(b, True, starts, call, C)
    last = b
    if C.SHARED:
        for start in range(0, sizes.batch, C.SCAN):
            others = start + tl.arange(0, C.SCAN)
            other = others[:, None]
            found, held = pages_of_units(other, other < sizes.batch, starts[None, :], call, C)
            same = held & (found == pages[None, :])
            owned = owned & (tl.max((same & (other < b)).to(tl.int32), 0) == 0)
            last = tl.maximum(last, tl.max(tl.where(tl.max(same.to(tl.int32), 1) != 0, others, b), 0))
    if tl.max(owned.to(tl.int32), 0) != 0:
        sums = tl.zeros([C.BLOCK_N], tl.float32)
        for i in range(0, last - b + 1):
            holder = b + i
            found, held = pages_of_units(holder, True, starts, call, C)
            same = owned & held & (found == pages)
            if tl.max(same.to(tl.int32), 0) != 0:
                sums += tl.where(keys_of_units(same, C), sum_rows(n, holder, head_kv, call, C), 0.0)
        positions = n * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
        token = positions
        if C.PAGE_SIZE != 0:
            token = positions % C.PAGE_SIZE
        places = (
            keys_of_units(pages, C).to(tl.int64) * sizes.page_stride + token.to(tl.int64) * sizes.token_stride
        )
        places += head_kv.to(tl.int64) * sizes.head_stride
        inside = keys_of_units(owned, C) & (positions < lengths.capacity)
        before = tl.load(call.pointers.mass + places, mask=inside, other=0.0)
        tl.store(call.pointers.mass + places, before + sums, mask=inside)


@triton.jit
def pages_of_units(b, exists, starts, call, C: tl.constexpr):
    """Return (page of each unit, whether sequence ``b`` holds it), for units that begin at positions ``starts``.

    ``b`` broadcasts to ``starts``. A sequence holds a page if one of its rows sees a key there. Other entries of the
    block table are not read, and pages outside of the cache count as not held. Of a dense cache, a page is a row.
    """
    pointers = call.pointers
    sequence = load_sequence(b, exists, pointers, call.lengths, C)
    keys = keys_of_sequence(sequence, call.lengths, C)
    held = exists & (starts < keys.end) & (starts + C.BLOCK_N // C.UNITS > keys.first)
    pages = b + starts * 0
    if C.PAGE_SIZE != 0:
        entries = pointers.block_table + pages.to(tl.int64) * call.outer.table_stride + starts // C.PAGE_SIZE
        pages = tl.load(entries, mask=held, other=0)
    elif C.HAS_BATCH_IDX:
        pages = tl.load(pointers.cache_batch_idx + pages, mask=held, other=0)
    return pages, held & (pages == in_cache(pages, call.num_blocks))


@triton.jit
def keys_of_units(units, C: tl.constexpr):
    """Return the value of each key [BLOCK_N] from that of its unit [UNITS]."""
    SIZE: tl.constexpr = C.BLOCK_N // C.UNITS
    return tl.reshape(tl.broadcast_to(units[:, None], [C.UNITS, SIZE]), [C.BLOCK_N])


@triton.jit
def sum_rows(n, b, head_kv, call, C: tl.constexpr):
    """Return the sums [BLOCK_N] over all rows of sequence ``b`` of the probabilities of the keys in n_block ``n``."""
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
    sums = tl.zeros([C.BLOCK_N], tl.float32)
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
            q, q_odd = tl.split(tl.reshape(q, [C.BLOCK_M, C.BLOCK_D // 2, 2]))
        products = multiply_keys(q, q_odd, k, k_offsets, seen, C)
        if C.HAS_QV:
            v_tile = load_rows(v, v_offsets, seen, C.HEAD_DIM_V, C.BLOCK_DV)
            products = tl.dot(qv, tl.trans(v_tile), products, input_precision=C.PRECISION)
        if C.DESCALE == "block":
            page_scale = tl.load(cache.k_descale + page.to(tl.int64) * call.outer.k_descale_stride)
            if C.PAGE_SIZE != 0 and not C.one_page:
                page_scale = page_scale[None, :]
            products = products * page_scale
        of_rows = score_rows_of(tokens, slope, k_scale, tree_rows, sequence, lengths, C)
        scores = scores_of(products, positions, seen, of_rows, call, C)
        lse = tl.load(
            pointers.lse + lse_places(rows, packed_tokens(rows, lengths, C), lengths, C),
            mask=exists,
            other=0.0,
        )
        # Hidden keys are told apart by their scores: with an lse of -inf or NaN, the exponential is NaN.
        hidden = (scores == -float("inf")) | (exists == 0)[:, None]
        if not C.SCALED_SCORES:
            scores = scores * call.numbers.scale_log2
        p = tl.exp2(scores - lse[:, None] * LOG2_E)
        sums += tl.sum(tl.where(hidden, 0.0, p), 0)
    return sums


def units_of(page_size: int, block_n: int) -> int:
    """Return the number of units of an n_block: 1 within one page, else its pages, or its keys."""
    if page_size == 0 or page_size % block_n == 0:
        return 1
    return block_n if block_n % page_size else block_n // page_size


class MassLaunch:
    """``(q, k_cache, v_cache, tensors, mass, out, lse) -> (mass, out, lse)`` for tensors of one signature.

    Args:
        attend: the launch of attention.
    """

    writes_into = True
    adds_to = ("mass",)

    def __init__(self, problem: DecodeProblem, attend: DecodeLaunch) -> None:
        self._problem, self._attend = problem, attend
        self._kernel: CachedLaunch | None = None
        self._config = choose(problem)

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
        out, lse = self._attend(q, k_cache, v_cache, tensors, out, lse)
        if 0 in self._problem.out_shape or 0 in mass.shape or self._problem.batch == 0:
            return mass, out, lse
        k_cache, v_cache = caches_as_operands(k_cache, v_cache, self._config)
        if self._kernel is None:
            self._kernel = self._prepare(q, k_cache, v_cache, tensors, mass)
        self._kernel(q.device, q, k_cache, v_cache, lse, mass, *tensors)
        return mass, out, lse

    def _prepare(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, mass: Tensor
    ) -> CachedLaunch:
        problem, config = self._problem, self._config
        plan = plan_of(problem, config, k_cache, v_cache)._replace(stream_k=False, softmax_max="none")
        block_n = config.tile.BLOCK_N
        variant = MassVariant(
            **asdict(decode_variant(problem, config, plan)),
            SHARED=problem.batch > 1 and (problem.page_size > 0 or problem.batch_idx),
            SCAN=min(SCAN, triton.next_power_of_2(problem.batch)),
            UNITS=units_of(problem.page_size, block_n),
        )
        lengths = lengths_of(problem, config)
        work = problem.batch * problem.num_heads_kv
        n_blocks = triton.cdiv(problem.capacity, block_n)
        parts = max(1, min(n_blocks, triton.cdiv(PROGRAMS * multiprocessors(problem.device), work)))
        scale = problem.softmax_scale
        return CachedLaunch(
            mass_kernel,
            parts * work,
            (
                strides_of(q, k_cache, v_cache),
                outer_strides_of(tensors),
                lengths,
                DecodeNumbers(scale, scale * common.LOG2_E, problem.softcap, None),
                problem.num_blocks,
                MassSizes(problem.batch, parts, *mass.stride()),
            ),
            (variant,),
            config.tile,
            pointers=MassPointers,
        )
