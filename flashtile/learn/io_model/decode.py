"""Bytes that the decoding kernels of both GPU backends move for attention over a key/value cache.

The query heads that share a key head form one tile, so keys are read once for all of them. The key blocks of
all tiles may be divided into equal runs, one per program (stream-K). If a run ends within a tile, the tile is
split: its programs write partial results, which a second kernel combines (Flash-Decoding). Runs end at the
same key blocks as in the kernels' schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from flashtile.backends.common.config import padded
from flashtile.backends.portable.config import family_of_capability
from flashtile.backends.portable.decode.config import (
    NARROW,
    DecodeConfig,
    bytes_to_read,
    row,
    row_blocks,
)
from flashtile.hardware.calls import Call, blocks_of
from flashtile.hardware.cards import Card
from flashtile.learn.algorithms.paged import TABLE_ENTRY_BYTES
from flashtile.learn.io_model.kernels import L2_SHARE, STATISTIC_BYTES, KernelTraffic, counted
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masking import positions

if TYPE_CHECKING:
    from flashtile.backends.hopper.decode.config import HopperDecodeConfig


@dataclass(frozen=True)
class QueryTile:
    """Tile of query rows of one sequence and one key/value head."""

    rows: int
    blocks: range  # key blocks that any of its rows attends to


def kernels_of(call: Call, card: Card) -> list[KernelTraffic]:
    """Return the traffic of the kernels of a call over a cache: attention, and combine if tiles are split.

    Raises:
        ValueError: no decoding kernel supports the head size or the dtypes.
    """
    config, pack = config_of(call, card)
    block, heads = config.tile.BLOCK_N, call.num_heads_q // pack
    tiles = [
        (tile, count)
        for lengths, count in counted(call.sequences)
        for tile in tiles_of(call, lengths, config, pack)
    ]
    key_bytes = (call.head_dim + call.width_v) * call.cache_element_bytes
    walked = sum(len(tile.blocks) * count for tile, count in tiles) * heads * block
    seen = [
        (call.key_range(positions(seqlen_q, seqlen_k), range(seqlen_k)), count)
        for (seqlen_q, seqlen_k), count in counted(call.sequences)
    ]
    distinct = sum(len(keys) * count for keys, count in seen) * call.num_heads_kv
    # Tiles of one sequence and head run concurrently, so keys that stay in L2 are read from DRAM once.
    largest = max((len(keys) for keys, _ in seen), default=0) * key_bytes
    missed = distinct if largest <= L2_SHARE * card.l2_bytes else walked
    pages = walked // call.page_size if call.page_size else 0
    own = call.q_bytes + pages * TABLE_ENTRY_BYTES
    m_blocks = -(-call.seqlen_q * pack // config.tile.BLOCK_M)
    every = [tile for tile, count in tiles for _ in range(count * heads)]
    programs, parts, cut_rows = len(every), 0, 0
    most = max((len(tile.blocks) for tile in every), default=0)
    even = not call.page_size and all(len(tile.blocks) == most for tile in every)
    tile_bytes = bytes_to_read(most * block, call.head_dim + call.width_v, _operand_bytes(call))
    mixed = 2 * sum(seqlen_q for seqlen_q, _ in call.sequences) < call.batch * call.seqlen_q
    if config.takes_stream_k(m_blocks, len(every), card.sm_count, tile_bytes, even, mixed):
        programs = config.stream_k_programs(len(every), card.sm_count)
        each = _even_part(every, programs) if config.DIVIDES_ALIKE else 0
        programs, parts, cut_rows = _even_parts(every, each) if each else _runs(every, programs)
    partial_bytes = parts * (call.width_v + 1) * STATISTIC_BYTES
    cut_out = cut_rows * (call.width_v * call.element_bytes + 4)
    attend = KernelTraffic(
        name="decode",
        programs=programs,
        resident=card.sm_count * config.programs_per_sm,
        sm_read=own + walked * key_bytes,
        dram_read=own + missed * key_bytes,
        written=call.out_bytes + call.lse_bytes - cut_out + partial_bytes,
        compulsory_read=call.q_bytes + distinct * key_bytes,
    )
    if not parts:
        return [attend]
    # Partial results have just been written: they are read from L2.
    combine = KernelTraffic("combine", programs, programs, partial_bytes, 0.0, cut_out, partial_bytes)
    return [attend, combine]


def config_of(call: Call, card: Card) -> tuple[DecodeConfig, int]:
    """Return the call's configuration on the card and the number of query heads that share a tile."""
    rows, width = call.seqlen_q * call.group_size, padded(max(call.head_dim, call.width_v))
    if card.capability == (9, 0) and call.element_bytes == 2:
        from flashtile.backends.hopper.decode import config as hopper

        if hopper.serves_heads(call.head_dim, call.width_v):
            pack = hopper.pack_of(call.group_size)
            work_tiles = call.batch * call.num_heads_q // pack
            alone = hopper.fill(work_tiles, card.sm_count)
            config = hopper.for_rows(call.head_dim, call.width_v, rows, call.cache_element_bytes, alone)
            if rows > NARROW or _takes_few_rows(call, card, config, work_tiles):
                return config, pack
    family = family_of_capability(*card.capability)
    element_bytes = _operand_bytes(call)
    blocks = row_blocks(family, element_bytes, width)
    if not blocks:
        raise ValueError(f"head_dim must be at most 512 and dtype of 8 to 32 bits, got {width}, {call.dtype}")
    BLOCK_M = next((block for block in blocks if rows <= block), blocks[-1])
    return row(family, element_bytes, BLOCK_M, width), call.group_size


def _takes_few_rows(call: Call, card: Card, config: HopperDecodeConfig, work_tiles: int) -> bool:
    """Whether Hopper's kernel serves the call although its rows fit the portable kernel's narrow tile."""
    from flashtile.backends.hopper.decode.config import COPY_ROWS

    if call.cache_element_bytes != 2 or not call.page_size or call.page_size % COPY_ROWS:
        return False
    left = call.seqlen_k if call.window_left == UNLIMITED else call.window_left + call.seqlen_q
    tile_bytes = bytes_to_read(min(call.seqlen_k, left), call.head_dim + call.width_v, 2)
    rows = call.seqlen_q * call.group_size
    return config.takes_few_rows(call.seqlen_q, rows, work_tiles, card.sm_count, tile_bytes)


def _operand_bytes(call: Call) -> int:
    """Return the size in bytes of one operand element in the matrix products of the portable kernels."""
    return 4 if call.element_bytes == 4 else call.cache_element_bytes


def tiles_of(call: Call, lengths: tuple[int, int], config: DecodeConfig, pack: int) -> Iterator[QueryTile]:
    """Yield the query tiles of one sequence for ``pack`` query heads that share a key head."""
    seqlen_q, seqlen_k = lengths
    rows, step = seqlen_q * pack, config.tile.BLOCK_M
    for first in range(0, rows, step):
        last = min(first + step, rows)
        own = positions(seqlen_q, seqlen_k)[first // pack : -(-last // pack)]
        seen = call.key_range(own, range(seqlen_k))
        yield QueryTile(last - first, blocks_of(seen, config.tile.BLOCK_N))


def _even_part(tiles: list[QueryTile], programs: int) -> int:
    """Return the key blocks per program if Hopper's kernel divides all tiles alike, otherwise 0."""
    from flashtile.backends.hopper.decode.work import PART_COST

    if not tiles or programs % len(tiles):
        return 0
    counts = [len(tile.blocks) for tile in tiles]
    each = -(-max(counts) * len(tiles) // programs)
    return each if each <= sum(counts) / programs + PART_COST.value else 0


def _even_parts(tiles: list[QueryTile], each: int) -> tuple[int, int, int]:
    """Cut each tile after every ``each`` key blocks. Returns what :func:`_runs` returns."""
    counts = [(-(-len(tile.blocks) // each), tile.rows) for tile in tiles]
    divided = [(count, rows) for count, rows in counts if count > 1]
    programs = sum(count for count, _ in counts)
    return programs, sum(count * rows for count, rows in divided), sum(rows for _, rows in divided)


def _runs(tiles: list[QueryTile], most_programs: int) -> tuple[int, int, int]:
    """Cut the key blocks of all tiles into equal runs, one for each of at most ``most_programs`` programs.

    Returns:
        (number of programs, rows of partial results, query rows of the tiles that are split between runs).
    """
    ends = list(accumulate(len(tile.blocks) for tile in tiles))
    total = ends[-1] if ends else 0
    programs = min(total, most_programs)
    cuts: Counter[int] = Counter()
    for program in range(1, programs):
        position = program * total // programs
        index = bisect_right(ends, position)
        # A run that ends between two tiles splits neither of them.
        cuts[index] += not (index and ends[index - 1] == position)
    parts = sum((count + 1) * tiles[index].rows for index, count in cuts.items() if count)
    return programs, parts, sum(tiles[index].rows for index, count in cuts.items() if count)
