"""PagedKVCache: steps, memory, FP8 caches, and scales that move with their blocks."""

from __future__ import annotations

import pytest
import torch

from flashtile.kv_cache import OutOfBlocksError, PagedKVCache

pytestmark = pytest.mark.numerical


def make(**sizes) -> PagedKVCache:
    sizes = {"num_layers": 2, "num_blocks": 12, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, **sizes}
    return PagedKVCache(**{"max_sequences": 4, "max_seqlen": 24, "dtype": torch.float32, **sizes})


def test_a_step_says_where_every_token_goes():
    cache = make()
    assert (cache.dtype, cache.device) == (torch.float32, torch.device("cpu"))
    first, second, third = (cache.create() for _ in range(3))
    cache.mark_written(cache.reserve_step(cache.batch([first, second]), [6, 3]).batch)
    step = cache.reserve_step(cache.batch([third, first, second]), [0, 3, 1])
    blocks = {sequence: cache.blocks(sequence) for sequence in (first, second)}
    assert step.cache_seqlens.tolist() == [0, 6, 3]
    assert step.seqused_k.tolist() == [0, 9, 4]
    assert step.positions.tolist() == [6, 7, 8, 3]
    assert step.cu_seqlens_q.tolist() == [0, 0, 3, 4]
    assert (step.max_seqlen_q, step.same_length, step.copied_blocks) == (3, False, 0)
    slots = [blocks[first][p // 4] * 4 + p % 4 for p in (6, 7, 8)] + [blocks[second][0] * 4 + 3]
    assert step.slot_mapping.tolist() == slots
    assert step.block_table[1, :3].tolist() == blocks[first]
    assert step.block_table[2, :1].tolist() == blocks[second]
    types = {
        tensor.dtype for tensor in (step.block_table, step.cache_seqlens, step.seqused_k, step.cu_seqlens_q)
    }
    assert types == {torch.int32}
    assert {step.slot_mapping.dtype, step.positions.dtype} == {torch.int64}


def test_the_device_table_follows_the_managers():
    """Only what changed is sent, and it is enough, through forks, copies and rows that are used again."""
    cache = make()
    sequences = [cache.create() for _ in range(2)]
    for count in (3, 4, 1, 5, 1):
        step = cache.reserve_step(cache.batch(sequences), count)
        for row, sequence in enumerate(sequences):
            blocks = cache.blocks(sequence)
            assert step.block_table[row, : len(blocks)].tolist() == blocks
        assert len(cache.table.take_changes()[0]) == 0
        cache.mark_written(step.batch)
        sequences = cache.select(sequences, [1, 1])


def test_an_empty_batch_and_a_step_without_tokens():
    cache = make()
    step = cache.reserve_step(cache.batch([]))
    assert step.block_table.shape == (0, 6)
    assert step.cu_seqlens_q.tolist() == [0]
    sequence = cache.create()
    step = cache.reserve_step(cache.batch([sequence]), 0)
    out = cache.attend(0, torch.zeros(0, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), step)
    assert out.shape == (0, 4, 8)


def test_block_bytes_is_what_a_block_takes():
    cache = make(head_dim_v=5, dtype=torch.bfloat16)
    taken = sum(memory.numel() * memory.element_size() for memory in (cache.k, cache.v))
    assert PagedKVCache.block_bytes(2, 4, 2, 8, 5, torch.bfloat16) * 12 == taken


def test_out_of_blocks_moves_nothing():
    cache = make(num_blocks=3)
    sequence = cache.create()
    batch = cache.batch([sequence])
    step = cache.reserve_step(batch, 6)
    kv = torch.randn(6, 2, 8)
    for layer in range(2):
        cache.write(layer, kv, kv, step)
    twin = cache.fork(sequence)
    before = cache.k.clone()
    with pytest.raises(OutOfBlocksError):
        cache.reserve_step(cache.batch([sequence, twin]), 5)
    assert torch.equal(cache.k, before)


def test_a_table_names_the_null_block_where_the_window_has_passed():
    cache = make(window_left=3)
    sequence = cache.create()
    for _ in range(20):
        step = cache.reserve_step(cache.batch([sequence]), 1)
        cache.mark_written(step.batch)
    blocks = cache.blocks(sequence)
    assert blocks[:2] == [0, 0]
    assert step.block_table[0, : len(blocks)].tolist() == blocks


def test_descales_of_fp8_are_1_unless_given_and_may_have_any_strides():
    cache = make(dtype=torch.float8_e4m3fn)
    ones = torch.ones(2, 2)
    assert torch.equal(cache.k_descale, ones)
    assert torch.equal(cache.v_descale, ones)
    given = torch.rand(2, 2).t()
    cache = make(dtype=torch.float8_e4m3fn, k_descale=given, v_descale=given)
    assert cache.k_descale is given


@pytest.mark.parametrize("per_block", [False, True])
def test_fp8(per_block):
    """Descales are applied, and those of a block go where it goes: to its copies, to the host and back."""
    torch.manual_seed(0)
    shape = (2, 12, 2) if per_block else (2, 2)
    k_descale, v_descale = torch.rand(shape) * 0.05 + 0.02, torch.rand(shape) * 0.05 + 0.02
    cache = make(
        dtype=torch.float8_e4m3fn, k_descale=k_descale, v_descale=v_descale, num_host_blocks=6, max_seqlen=40
    )
    first = cache.create()
    k, v = torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    step = cache.reserve_step(cache.batch([first]), 10)
    for layer in range(2):
        cache.attend(layer, torch.randn(10, 4, 8), k, v, step)
    second = cache.fork(first)
    stored = contents(cache, first)
    assert (stored[0] - k).abs().max() < 0.1
    assert (stored[1] - v).abs().max() < 0.1
    step = cache.reserve_step(cache.batch([first]))
    assert step.copied_blocks == 1
    assert torch.equal(contents(cache, first)[0][:10], stored[0])
    cache.swap_out([first, second])
    with torch.no_grad():
        cache.k.view(torch.uint8).fill_(0x7F)  # NaN
    third = cache.create()
    cache.reserve_step(cache.batch([third]), 12)  # so that they come back elsewhere
    cache.swap_in([second, first])
    for sequence in (first, second):
        for back, before in zip(contents(cache, sequence), stored, strict=True):
            assert torch.equal(back[:10], before)


def contents(cache: PagedKVCache, sequence: int) -> list[torch.Tensor]:
    """Keys and values of layer 1 as numbers, (tokens, kv_heads, head_dim)."""
    blocks = torch.tensor(cache.blocks(sequence))
    result = []
    for memory, descale in ((cache.k, cache.k_descale), (cache.v, cache.v_descale)):
        factor = descale[1][blocks][:, None, :, None] if descale.dim() == 3 else descale[1][:, None]
        result.append((memory[1][blocks].float() * factor).flatten(0, 1)[: cache.length(sequence)])
    return result
