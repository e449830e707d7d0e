"""The bytes of attention over a cache: by hand where they can be, and by walking every block of keys."""

from __future__ import annotations

import pytest

from flashtile.io_model import Call, decode, estimates, find_card

H200, A100 = find_card("h200"), find_card("a100")
BY_NAME = {"h200": H200, "a100": A100}


def over_pages(batch: int, seqlen_q: int, seqlen_k: int, **more) -> Call:
    return Call(batch, seqlen_q, seqlen_k, 32, 8, 128, window_right=0, page_size=16, **more)


def test_one_token_reads_the_cache_once():
    call = over_pages(8, 1, 8192)
    attend, combine = decode.kernels_of(call, H200)
    cache = 2 * 8 * 8192 * 8 * 128 * 2
    q = 8 * 32 * 128 * 2
    table = 8 * (8192 // 16) * 8 * 4
    assert attend.sm_read == attend.dram_read == cache + q + table
    assert attend.compulsory_read == cache + q
    # 264 programs over 64 tiles of 128 blocks: 7 of their 263 boundaries lie between two tiles, the others
    # within one of 4 rows each, and every tile is cut.
    assert attend.programs == 264
    parts = (263 - 7 + 64) * 4
    assert combine.sm_read == parts * 129 * 4
    assert combine.written == call.out_bytes + call.lse_bytes
    assert attend.written == combine.sm_read


@pytest.mark.parametrize("card", BY_NAME.values(), ids=BY_NAME)
@pytest.mark.parametrize(
    "lengths", [((1, 300), (1, 5000), (1, 64)), ((8, 4000), (3, 70), (8, 9000))], ids=["tokens", "guesses"]
)
def test_partial_results_are_those_of_equal_runs(lengths, card):
    call = Call(3, 8, 9000, 32, 8, 128, window_right=0, page_size=16, lengths=lengths)
    config, pack = decode.config_of(call, card)
    assert pack == 4
    tiles = [t for pair in lengths for _ in range(8) for t in decode.tiles_of(call, pair, config, pack)]
    owners = [number for number, tile in enumerate(tiles) for _ in tile.blocks]
    programs = min(len(owners), config.stream_k_programs(len(tiles), card.sm_count))
    bounds = [program * len(owners) // programs for program in range(programs + 1)]
    visitors = [set() for _ in tiles]
    for program in range(programs):
        for owner in owners[bounds[program] : bounds[program + 1]]:
            visitors[owner].add(program)
    parts = sum(len(seen) * tile.rows for seen, tile in zip(visitors, tiles, strict=True) if len(seen) > 1)
    _, combine = decode.kernels_of(call, card)
    assert combine.sm_read == parts * (128 + 1) * 4


def test_tiles_of_similar_lengths_are_divided_alike():
    """Each of 64 tiles into halves: of 64 rows with 8192 keys, of 128 rows with 255 or 256 blocks."""
    for call, rows in ((over_pages(8, 16, 8192), 64), (over_pages(1, 256, 32768), 128)):
        attend, combine = decode.kernels_of(call, H200)
        assert attend.programs == 128
        assert combine.sm_read == 128 * rows * 129 * 4


def test_calls_of_few_rows_leave_no_parts_if_their_tiles_fill_the_card():
    """Hopper's kernel takes 256 tiles of 4 tokens whole, and would divide those of 8 sequences."""
    (attend,) = decode.kernels_of(over_pages(32, 4, 4096), H200)
    assert attend.programs == 256
    assert len(decode.kernels_of(over_pages(8, 4, 8192), H200)) == 2
    assert decode.config_of(over_pages(8, 4, 8192), H200)[0].tile.BLOCK_M == 16
    assert decode.config_of(over_pages(32, 2, 4096), H200)[0].tile.BLOCK_M == 16
    assert decode.config_of(over_pages(32, 4, 4096), H200)[0].tile.BLOCK_M == 64


def test_a_chunk_of_a_prompt_is_split_nowhere():
    (attend,) = decode.kernels_of(over_pages(8, 1024, 8192), H200)
    assert attend.programs == 8 * 8 * 1024 * 4 // 128
    assert attend.sm_read > 16 * attend.dram_read  # tiles of a sequence share its keys in L2


def test_an_e4m3_cache_is_half_the_bytes():
    (wide, _), (narrow, _) = (
        [row.bytes for row in estimates(over_pages(32, 1, 4096, cache_dtype=dtype), H200)]
        for dtype in (None, "float8_e4m3fn")
    )
    assert 0.49 < narrow / wide < 0.52


def test_what_it_does_not_count():
    with pytest.raises(ValueError, match="which must be 'forward' over a cache, got 'backward'"):
        estimates(over_pages(1, 1, 64), H200, "backward")
    with pytest.raises(ValueError, match="page_size must be 0"):
        Call(1, 1, 64, 8, 8, 64, page_size=-1)
    with pytest.raises(ValueError, match="cache_dtype must be one of"):
        Call(1, 1, 64, 8, 8, 64, page_size=1, cache_dtype="int3")
    with pytest.raises(ValueError, match="head_dim must be at most 512"):
        estimates(Call(1, 1, 64, 8, 8, 1024, page_size=16), H200)
