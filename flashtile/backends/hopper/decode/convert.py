"""FP8 caches: conversion of e4m3 tiles to 16 bits, by the warpgroup that multiplies them.

wgmma multiplies e4m3 only by e4m3, and needs V transposed for it. Loaders therefore copy e4m3 tiles, at half
the bytes, and the consumer converts them in shared memory. It converts to float16, in which e4m3 is exact, by
one instruction for two values. Queries and P are then float16. Rows of bfloat16 queries are divided by a
power of two to fit float16's range, and their scores are multiplied by it.

If each block of the cache has a scale, the scores of a key are multiplied by the scale of its block. Values
are multiplied by the scale of their block and rounded to the dtype of q. P then also has this dtype.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from flashtile.backends.hopper.channels import Channel
from flashtile.backends.hopper.compat import aggregate, gluon, partition_barrier, reinterpret
from flashtile.backends.hopper.decode.loads import is_seen
from flashtile.backends.hopper.forward.schedule import Numbers
from flashtile.backends.hopper.inline_asm import to_16_bit
from flashtile.backends.portable.decode.cache import in_cache
from flashtile.backends.portable.decode.schedule import sequence_of

ELEMENTS = gl.constexpr(8192)
"""Elements of a tile that are converted at a time, 64 per thread; more would not fit the registers."""
COLUMNS = gl.constexpr(64)
"""Columns of queries that are converted at a time."""
EXPONENT = gl.constexpr(0x7F800000)
"""Exponent bits of a float32."""
LARGEST = gl.constexpr(253 << 23)
"""The bits of 2 ** 126, the largest power of two whose inverse is a normal float32."""
ONE = gl.constexpr(127 << 23)
"""The bits of 1.0."""
INVERSE = gl.constexpr(254 << 23)
"""This minus the bits of a power of two gives the bits of its inverse."""


@gluon.constexpr_function
def by_rows(width):
    """Layout of [rows, width] for 128 threads, 8 adjacent elements each, without bank conflicts."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def operand_layout(rows, width, dtype):
    """Layout of a shared [rows, width] tile that wgmma reads."""
    return gl.NVMMASharedLayout.get_default_for([rows, width], dtype)


class KeyNumbers(NamedTuple):
    """``forward.schedule.Numbers`` with one value per row, and the scales of the keys of the current tile."""

    scale_log2: Any
    softcap_rate: Any
    softcap_log2: Any
    key_scales: Any


class KeyScales(NamedTuple):
    """Shared memory for the scales of single keys, if KEY_SCALES."""

    arrived: Any
    """fp32 [STAGES, BLOCK_N]: scales of the keys in each slot of the channel."""
    in_use: Any
    """fp32 [BLOCK_N]: scales of the keys in the converted tile of k."""


@gluon.jit
def replace_tile(C: gl.constexpr, V: gl.constexpr, raw, i, tile, arrived, in_use):
    """Wait for the ``i``-th tile in the channel ``raw``, and write it in 16 bits over ``tile``.

    The slot of ``raw`` is then released. With KEY_SCALES, values are multiplied by the scales of their keys.
    A tile of k is not scaled: its scales are copied from ``arrived`` to ``in_use``, for the scores.
    """
    N: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    PARTS: gl.constexpr = max(1, N * WIDTH // ELEMENTS)
    ROWS: gl.constexpr = N // PARTS
    layout: gl.constexpr = by_rows(WIDTH)
    slot = raw.wait(i)
    rows = raw.tiles.index(slot).reshape([N, WIDTH])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if C.KEY_SCALES and not V:
        key_scales = arrived.index(slot).load(line)
    for part in gl.static_range(PARTS):
        x = rows.slice(part * ROWS, ROWS, dim=0).load(layout).to(gl.float16)
        if C.KEY_SCALES and V:
            scale = arrived.index(slot).slice(part * ROWS, ROWS).load(gl.SliceLayout(1, layout))
            x = to_16_bit(x.to(gl.float32) * scale[:, None], tile.dtype)
        # All warps synchronise before the first write, because the previous product of another warp may still
        # read the tile. A release also synchronises them. The fence orders this thread's loads from the slot
        # before the next TMA copy into it; TMA does not wait for ordinary loads by itself.
        if part == PARTS - 1:
            fence_async_shared()
            raw.release(i)
        elif part == 0:
            partition_barrier()
        tile.slice(part * ROWS, ROWS, dim=0).store(x)
    if C.KEY_SCALES and not V:
        in_use.store(key_scales)
    fence_async_shared()
    partition_barrier()


@aggregate
class ConvertedChannel:
    """A channel of e4m3 tiles whose only reader, a warpgroup, converts each tile when it waits for it.

    ``tiles`` holds one converted tile. Products that read it must have ended before the next :meth:`wait`.
    ``arrived`` and ``in_use`` are those of :class:`KeyScales`; without KEY_SCALES they are unused.
    """

    raw: Channel
    tiles: gl.shared_memory_descriptor
    arrived: gl.shared_memory_descriptor
    in_use: gl.shared_memory_descriptor
    C: gl.constexpr
    V: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, raw, tiles, arrived, in_use, C, V):
        self.raw = raw
        self.tiles = tiles
        self.arrived = arrived
        self.in_use = in_use
        self.C = gl.constexpr(C)
        self.V = gl.constexpr(V)

    @gluon.jit
    def wait(self, i):
        """Wait for the ``i``-th tile and convert it. Returns its index in ``tiles``, which is always 0."""
        replace_tile(self.C, self.V, self.raw, i, self.tiles.index(0), self.arrived, self.in_use)
        return 0

    @gluon.jit
    def release(self, i):
        """Do nothing: :meth:`wait` has already released the slot of the ``i``-th tile."""


@gluon.jit
def make_scales(C: gl.constexpr):
    if C.KEY_SCALES:
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        arrived = gl.allocate_shared_memory(gl.float32, [C.STAGES, C.BLOCK_N], layout)
        return KeyScales(arrived, gl.allocate_shared_memory(gl.float32, [C.BLOCK_N], layout))
    else:
        return KeyScales(0, 0)


@gluon.jit
def make_reader(C: gl.constexpr, V: gl.constexpr, raw, scales, dtype: gl.constexpr):
    """Return the channel from which the consumer reads k or v.

    It is ``raw``, or with E4M3 a channel that converts the tiles of ``raw`` to ``dtype``.
    """
    if C.E4M3:
        WIDTH: gl.constexpr = C.BLOCK_DV if V else C.BLOCK_D
        layout: gl.constexpr = operand_layout(C.BLOCK_N, WIDTH, dtype)
        tiles = gl.allocate_shared_memory(dtype, [1, C.BLOCK_N, WIDTH], layout)
        if C.KEY_SCALES:
            return ConvertedChannel(raw, tiles, scales.arrived, scales.in_use, C, V)
        else:
            return ConvertedChannel(raw, tiles, tiles, tiles, C, V)
    else:
        return raw


@gluon.jit
def load_scales(C: gl.constexpr, descale, stride, entry, n, keys, head, cache):
    """Load the scales of the keys of n_block ``n``, as fp32 [BLOCK_N].

    Each page of the cache has a scale; in a dense cache, each row (sequence) has one. Keys that no query row
    sees get 0. ``entry`` comes from ``loads.first_entry``.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [C.LOADER_WARPS], [0])
    position = n * C.BLOCK_N + gl.arange(0, C.BLOCK_N, layout=line)
    seen = is_seen(C, position, keys)
    if C.PAGE_SIZE == 0:
        page = position * 0 + entry
    else:
        page = gl.load(entry + position // C.PAGE_SIZE, mask=seen, other=0)
    page = in_cache(page, cache.num_blocks).to(gl.int64)
    return gl.load(descale + page * stride + head, mask=seen, other=0.0)


@gluon.jit
def scales_of_head(C: gl.constexpr, work, call):
    """Load the scales of k and v of a work tile, if DESCALE is "head" or "sequence"; otherwise 1.0."""
    pointers = call.pointers
    head = work.head_kv // C.KV_GROUP
    if C.DESCALE == "head":
        return gl.load(pointers.k_descale + head), gl.load(pointers.v_descale + head)
    elif C.DESCALE == "sequence":
        b, _ = sequence_of(work.m_block, call.lengths, C)
        b = b.to(gl.int64)
        k_scale = gl.load(pointers.k_descale + b * call.outer.k_descale_stride + head)
        return k_scale, gl.load(pointers.v_descale + b * call.outer.v_descale_stride + head)
    else:
        return 1.0, 1.0


@gluon.jit
def query_operand(C: gl.constexpr, q, k, k_scale, numbers, row_layout: gl.constexpr):
    """Return (q, numbers) for products with the tiles of ``k``.

    If q [64, BLOCK_D] has another dtype than these tiles, it is converted in place in shared memory. Each of
    its rows is then divided by a power of two, to fit the range of float16. The returned ``numbers``, which
    are factors of the scores, have one value per row. They include ``k_scale`` and the row's power of two.
    """
    ROWS: gl.constexpr = q.shape[0]
    dtype: gl.constexpr = k.tiles.dtype
    scale = gl.full([ROWS], 1.0, gl.float32, row_layout)
    if q.dtype != dtype:
        layout: gl.constexpr = by_rows(COLUMNS)
        largest = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, layout))
        for part in gl.static_range(C.BLOCK_D // COLUMNS):
            x = q.slice(part * COLUMNS, COLUMNS, dim=1).load(layout)
            largest = gl.maximum(largest, gl.max(gl.abs(x.to(gl.float32)), 1))
        # The exponent bits alone are the largest power of two that is at most ``largest``.
        power = gl.minimum(largest.to(gl.int32, bitcast=True) & EXPONENT, LARGEST)
        power = gl.where(power == 0, ONE, power)
        inverse = (INVERSE - power).to(gl.float32, bitcast=True)
        scale = gl.convert_layout(power.to(gl.float32, bitcast=True), row_layout)
        converted = reinterpret(q, dtype, [ROWS, C.BLOCK_D], operand_layout(ROWS, C.BLOCK_D, dtype))
        for part in gl.static_range(C.BLOCK_D // COLUMNS):  # each thread writes what it has read
            x = q.slice(part * COLUMNS, COLUMNS, dim=1).load(layout).to(gl.float32)
            converted.slice(part * COLUMNS, COLUMNS, dim=1).store((x * inverse[:, None]).to(dtype))
        fence_async_shared()
        q = converted
    scale = (scale * k_scale)[:, None]
    log2, rate = numbers.scale_log2 * scale, numbers.softcap_rate * scale
    if C.KEY_SCALES:
        return q, KeyNumbers(log2, rate, numbers.softcap_log2, k.in_use)
    else:
        return q, Numbers(log2, rate, numbers.softcap_log2)
