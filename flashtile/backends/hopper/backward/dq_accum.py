"""The sums of dQ in fp32: converted after their last addition, and zeroed for the next head, in L2.

Blocks of keys are taken head after head, so that few heads are at work at a time. Their sums have room for
some more, and each head takes the place of one before it. *Keeper* warps wait for a head to be complete, make
dQ of its sums and leave zeros, chunk by chunk through a ring of shared memory. So sums stay in the L2 cache,
where a kernel that zeroes before and one that converts after would pass all of them through DRAM.

Nobody waits for what comes later: a head's additions wait for an earlier head's conversion, and that for the
earlier head's additions. Conversions are taken one by one, as blocks of keys are, by programs that run.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flashtile.backends.hopper import config
from flashtile.backends.hopper.backward.schedule import blocks_of_head, padded_row, sequence_of
from flashtile.backends.hopper.channels import make_channel
from flashtile.backends.hopper.compat import aggregate, async_load, async_store, partition_barrier

ROWS = gl.constexpr(config.WARPGROUP_ROWS)
KEEPER_STAGES = gl.constexpr(config.KEEPER_STAGES)
KEEPER_WARPS = gl.constexpr(config.KEEPER_WARPS)
VECTOR = gl.constexpr(8)
"""Columns whose sums of a row lie side by side; 16 bytes of dQ."""
BLOCK = gl.constexpr(64)
"""Sums of 8 rows and 8 columns that do."""


class Sums(NamedTuple):
    """What the kernel is told of them: integers, then pointers, of which counters are 0 at the start."""

    q_blocks: Any
    """Blocks of padded query rows of a head."""
    all_heads: Any
    """Of k, counted through the batch when dense."""
    kept: Any
    """Key heads whose sums there is room for; one that comes so many later takes a head's place."""
    vectors: Any
    """Of 8 columns, in a row of dQ."""
    turns: Any
    """Of each block of padded rows, the blocks of keys that have added to it; of a deterministic sum."""
    dq: Any
    next_part: Any
    """The first part that no program has taken yet; each block of keys stands for one of its head's sums."""
    added: Any
    """Of each key head, the blocks that have added all that they have to its sums."""
    cleared: Any
    """Of each key head, the parts of the sums that are converted, and zero again."""


@gluon.jit
def between_proxies():
    """Order what this thread has seen of other programs before what it has TMA do."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_writes(LATER: gl.constexpr):
    """Wait until all that this thread has written by TMA is in memory, not only read from shared memory; but
    for the last LATER."""
    gl.inline_asm_elementwise(
        f"cp.async.bulk.wait_group {LATER}; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(1)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_up(counter, LATER: gl.constexpr):
    """Tell other programs that what this partition has written by TMA is in memory, but for the last."""
    await_writes(LATER)
    partition_barrier()
    gl.atomic_add(counter, 1, sem="release", scope="gpu")


@gluon.jit
def count_of(counter):
    """What it is now; what those have done who counted is seen from here on."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_count(counter, count):
    """Wait until so many have told; what they did is seen from here on, also by TMA."""
    seen = count_of(counter)
    while seen < count:
        seen = count_of(counter)
    between_proxies()


@gluon.jit
def await_room(key_head, blocks, sums):
    """Wait until a key head's sums are zero: those of the first heads are from the start."""
    before = key_head - sums.kept
    if before >= 0:
        await_count(sums.cleared + before, blocks)


@gluon.jit
def wide(number):
    """In 64 bits: memory is larger than 32 bits can count."""
    return number.to(gl.int64)


@gluon.jit
def sums_row(C: gl.constexpr, work, key_head, g, row, sums):
    """Where row ``row`` of a sequence, of query head ``g`` of the key head, lies among all that have sums."""
    head = key_head % sums.kept * C.GROUP + g
    return head * (sums.q_blocks * C.BLOCK_M) + padded_row(C, work, row)


@aggregate
class Keep:
    """What the keeper has of shared memory: a ring of chunks of sums, and zeros."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    zeros: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, zeros):
        self.tiles = tiles
        self.full = full
        self.zeros = zeros


@gluon.jit
def make_keep(sums_desc):
    ring = make_channel(sums_desc, KEEPER_STAGES, 0, 1)
    zeros = gl.allocate_shared_memory(gl.float32, sums_desc.block_type.shape, sums_desc.layout)
    return Keep(ring.tiles, ring.full, zeros)


@gluon.jit
def tile_of_part(t, work, blocks):
    """(query head of the group, first row) of tile ``t``, of 64 rows, of the part of a key head's sums that
    block ``work.place`` of its sequence's ``blocks`` stands for."""
    tiles = max((work.seqlen_q + ROWS - 1) // ROWS, 1)
    tile = work.place + t * blocks
    return tile // tiles, tile % tiles * ROWS


@gluon.jit
def tiles_of_part(C: gl.constexpr, work, blocks):
    tiles = (work.seqlen_q + ROWS - 1) // ROWS * C.GROUP
    return (tiles - work.place + blocks - 1) // blocks


@gluon.jit
def sums_of_tile(C: gl.constexpr, t, work, blocks, key_head, sums):
    """The first of the tile's groups of 8 columns among all of them."""
    g, row = tile_of_part(t, work, blocks)
    return sums_row(C, work, key_head, g, row, sums) // ROWS * (C.BLOCK_D // VECTOR)


@gluon.jit
def dq_of_tile(C: gl.constexpr, t, work, blocks, schedule, sums):
    """(where the tile's dQ begins, how many of its rows there are)"""
    g, row = tile_of_part(t, work, blocks)
    token = wide(work.start_q + row)
    if not C.VARLEN:
        token += wide(work.sequence) * work.seqlen_q
    heads = schedule.heads * C.GROUP
    vector = (token * heads + work.head * C.GROUP + g) * sums.vectors
    return sums.dq + vector * VECTOR, work.seqlen_q - row


@gluon.jit
def load_chunk(keep, sums_desc, i, tile, c):
    """Chunk ``c`` of a tile, as use ``i`` of the ring."""
    slot = i % KEEPER_STAGES
    barrier = keep.full.index(slot)
    mbarrier.expect(barrier, sums_desc.block_type.nbytes)
    async_load(sums_desc, [tile, c * sums_desc.block_type.shape[1], 0], barrier, keep.tiles.index(slot))


@gluon.jit
def convert_part(C: gl.constexpr, keep, sums_desc, i, key_head, block, pointers, schedule, sums, scale):
    """dQ of the part of a key head's sums that its block number ``block`` stands for, and zeros in its place
    for a later head. Returns the new ``i``, which counts the uses of the ring.

    Of a tile of 64 rows, row 16 w + 8 a + r and columns 8 j to 8 j + 7 lie together, at
    ((2 j + a) 4 + w) 64 + 8 r. A chunk is one or two groups of 8 rows, (a, w), with all their columns.
    """
    COLUMNS: gl.constexpr = sums_desc.block_type.shape[0]
    GROUPS: gl.constexpr = sums_desc.block_type.shape[1]
    CHUNKS: gl.constexpr = ROWS // VECTOR // GROUPS
    layout: gl.constexpr = gl.BlockedLayout([1, 1, VECTOR], [4, 1, 8], [KEEPER_WARPS, 1, 1], [2, 1, 0])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    cell = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    row = group * 16 + cell // VECTOR
    row_vectors = schedule.heads * C.GROUP * sums.vectors
    cells = (row * row_vectors + column) * VECTOR + cell % VECTOR
    work, blocks = sequence_of(C, key_head, block, pointers, schedule)
    chunks = tiles_of_part(C, work, blocks) * CHUNKS
    again = key_head + sums.kept < sums.all_heads
    tile = sums_of_tile(C, 0, work, blocks, key_head, sums)
    following, dq, rows = tile * 0, sums.dq, work.seqlen_q  # their types: each tile's first chunk sets them
    for n in range(min(chunks, KEEPER_STAGES)):
        load_chunk(keep, sums_desc, i + n, tile, n)
    for n in range(chunks):
        c = n % CHUNKS
        if c == 0:
            tile = sums_of_tile(C, n // CHUNKS, work, blocks, key_head, sums)
            following = sums_of_tile(C, n // CHUNKS + 1, work, blocks, key_head, sums)
            dq, rows = dq_of_tile(C, n // CHUNKS, work, blocks, schedule, sums)
        slot = i % KEEPER_STAGES
        mbarrier.wait(keep.full.index(slot), (i // KEEPER_STAGES) & 1)
        values = keep.tiles.index(slot).load(layout) * scale  # [columns / 8, rows / 8, 64]
        values = values.to(dq.dtype.element_ty)
        partition_barrier()
        if again:
            async_store(sums_desc, [tile, c * GROUPS, 0], keep.zeros)
        if n + KEEPER_STAGES < chunks:
            later = c + KEEPER_STAGES
            load_chunk(
                keep, sums_desc, i + KEEPER_STAGES, following if later >= CHUNKS else tile, later % CHUNKS
            )
        first = c * GROUPS % 4 * 16 + c * GROUPS // 4 * VECTOR
        inside = (row < rows - first) & (column < sums.vectors)
        gl.store(dq + first * row_vectors * VECTOR + cells, values, mask=inside, cache_modifier=".cs")
        i += 1
    return i


@gluon.jit
def keeper(C: gl.constexpr, keep, sums_desc, pointers, schedule, sums, scale):
    """Makes dQ of sums that are complete, part after part."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, VECTOR], [4, 1, 8], [KEEPER_WARPS, 1, 1], [2, 1, 0])
    keep.zeros.store(gl.full(sums_desc.block_type.shape, 0.0, gl.float32, layout))
    fence_async_shared()
    partition_barrier()
    blocks = blocks_of_head(C, pointers, schedule)
    i = 0
    part = gl.atomic_add(sums.next_part, 1)
    while part < blocks * sums.all_heads:
        following = gl.atomic_add(sums.next_part, 1)  # here, the wait hides that it takes its time
        head = part // blocks
        await_count(sums.added + head, blocks)
        i = convert_part(C, keep, sums_desc, i, head, part % blocks, pointers, schedule, sums, scale)
        count_up(sums.cleared + head, 0)
        part = following
