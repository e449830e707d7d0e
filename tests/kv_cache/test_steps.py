"""A step of a PagedKVCache is valid in every layer until its sequences grow."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from snapshots import COPIES, snapshot

from flashtile.kv_cache import BlockManager, PagedKVCache
from walk import walk

LAYERS = 2


def make(**sizes) -> PagedKVCache:
    sizes = {
        "num_layers": LAYERS,
        "num_blocks": 12,
        "block_size": 4,
        "num_kv_heads": 1,
        "head_dim": 2,
        **sizes,
    }
    options = {"max_sequences": 4, "max_seqlen": 24, "dtype": torch.float32, "num_host_blocks": 6}
    return PagedKVCache(**{**options, **sizes})


def tokens(count: int, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v."""
    return tuple(torch.full((count, 1, 2), value) for _ in range(3))


def run(cache, sequences, count, value=1.0):
    """A whole step."""
    step = cache.reserve_step(cache.batch(sequences), count)
    for layer in range(LAYERS):
        cache.attend(layer, *tokens(count * len(sequences), value), step)
    return step


INTERVENTIONS = {
    "freed": lambda cache, sequence: cache.free(sequence),
    "freed, and its row and block used by another": lambda cache, sequence: (
        cache.free(sequence),
        run(cache, [cache.create()], 3, 7.0),
    ),
    "reserved for again": lambda cache, sequence: run(cache, [sequence], 1),
    "truncated": lambda cache, sequence: cache.truncate(sequence, 1),
    "truncated and reserved for": lambda cache, sequence: (
        cache.truncate(sequence, 0),
        run(cache, [sequence], 3),
    ),
    "forked": lambda cache, sequence: cache.fork(sequence),
    "a parent of two": lambda cache, sequence: cache.select([sequence], [0, 0]),
    "cached": lambda cache, sequence: cache.cache_blocks(sequence, [5, 6, 7]),
    "swapped out": lambda cache, sequence: cache.swap_out([sequence]),
    "swapped out and in": lambda cache, sequence: (cache.swap_out([sequence]), cache.swap_in([sequence])),
}


@walk("intervene", INTERVENTIONS.values())
def test_an_outdated_step_writes_nothing(intervene):
    cache = make()
    sequence, other = cache.create(), cache.create()
    step = run(cache, [other, sequence], 3)
    intervene(cache, sequence)
    before = snapshot(cache)
    q, k, v = tokens(6, 9.0)
    for call in (lambda: cache.attend(0, q, k, v, step), lambda: cache.write(0, k, v, step)):
        with pytest.raises(
            ValueError, match=f"step is no longer valid: sequence {sequence} has been .* since"
        ):
            call()
    assert snapshot(cache) == before


def test_other_sequences_leave_a_step_true():
    """Two steps may be under way at a time, as for prefill and decoding, or micro-batches."""
    cache = make()
    first, second, third = (cache.create() for _ in range(3))
    one, two = (cache.reserve_step(cache.batch([sequence]), 3) for sequence in (first, second))
    cache.free(third)
    for layer in range(LAYERS):
        cache.attend(layer, *tokens(3), one)
        cache.attend(layer, *tokens(3), two)
    cache.free(first)
    cache.attend(0, *tokens(3), two)  # once more: it is still true


def test_a_step_or_batch_of_another_cache():
    cache, other = make(), make()
    batches = [c.batch([c.create()]) for c in (cache, other)]
    steps = [c.reserve_step(batch) for c, batch in zip((cache, other), batches, strict=True)]
    for copied in COPIES:
        with pytest.raises(ValueError, match="step must come from this cache's reserve_step"):
            copied(cache).attend(0, *tokens(1), steps[0])
    with pytest.raises(ValueError, match="step must come from this cache's reserve_step"):
        cache.write(0, *tokens(1)[:2], steps[1])
    with pytest.raises(ValueError, match="batch must come from this manager"):
        cache.reserve_batch(batches[1])
    for copied in COPIES:  # a cache and its step together
        twin, step = copied((cache, steps[0]))
        twin.attend(0, *tokens(1), step)


def test_every_way_to_reserve_copies():
    """Without a step, too; the manager without tensors leaves it to the caller."""
    for reserve in (
        lambda cache, sequence: cache.reserve(sequence),
        lambda cache, sequence: cache.reserve_batch(cache.batch([sequence])),
        lambda cache, sequence: cache.reserve_step(cache.batch([sequence])),
    ):
        cache = make()
        sequence = cache.create()
        run(cache, [sequence], 6, 5.0)
        child = cache.fork(sequence)
        reserve(cache, child)
        (old, new) = (cache.blocks(s)[1] for s in (sequence, child))
        assert old != new
        assert torch.equal(cache.k[:, new, :2], torch.full((LAYERS, 2, 1, 2), 5.0))
        assert torch.equal(cache.v[:, new], cache.v[:, old])


def test_swapping_moves_the_given_sequences():
    cache = make(num_blocks=3)
    sequence = cache.create()
    run(cache, [sequence], 6, 5.0)
    cache.swap_out([sequence])
    run(cache, [cache.create()], 6, 7.0)
    cache.free(1)
    cache.swap_in([sequence])
    assert torch.equal(cache.k[0, cache.blocks(sequence)].flatten(0, 1)[:6], tokens(6, 5.0)[1])


class TestUnwritten:
    """Tokens that were reserved and not written in every layer are not built upon."""

    @walk("layers", [[], [0], [1], [0, 0]])
    @walk(
        "operation",
        [
            lambda cache, sequence: cache.fork(sequence),
            lambda cache, sequence: cache.select([cache.sequences[0], sequence], [1, 1]),
            lambda cache, sequence: cache.reserve_step(cache.batch([sequence])),
            lambda cache, sequence: cache.reserve(sequence),
            lambda cache, sequence: cache.cache_blocks(sequence, range(5)),
        ],
    )
    def test_refused(self, layers, operation):
        cache = make()
        _, sequence = cache.create(), cache.create()
        run(cache, [sequence], 4)
        step = cache.reserve_step(cache.batch([sequence]), 2)
        for layer in layers:
            cache.write(layer, *tokens(2)[:2], step)
        before = snapshot(cache)
        with pytest.raises(ValueError, match=r"(has 6 tokens, of which 4 are written|the 4 written tokens)"):
            operation(cache, sequence)
        assert snapshot(cache) == before
        assert cache.cache_blocks(sequence, range(4)) == 1  # the step before
        for layer in range(LAYERS):
            cache.attend(layer, *tokens(2), step)
        operation(cache, sequence)

    def test_what_was_never_written_can_be_cut_off(self):
        cache = make()
        sequence = cache.create()
        cache.reserve(sequence, 5)
        with pytest.raises(ValueError, match="or truncate the sequence"):
            cache.reserve(sequence)
        cache.truncate(sequence, 0)
        run(cache, [sequence], 2)

    def test_written_by_other_means(self):
        cache = make()
        sequence = cache.create()
        step = cache.reserve_step(cache.batch([sequence]), 4)
        cache.mark_written(step.batch)
        assert cache.cache_blocks(sequence, range(4)) == 1

    def test_a_found_prefix_is_written(self):
        cache = make()
        sequence = cache.create(range(9))
        run(cache, [sequence], 9)
        cache.cache_blocks(sequence, range(9))
        cache.fork(cache.create(range(9)))

    def test_a_manager_without_tensors_leaves_it_to_its_caller(self):
        manager = BlockManager(8, 4, max_sequences=2, max_seqlen=24)
        sequence = manager.create()
        manager.reserve(sequence, 4)
        manager.fork(sequence)
        assert manager.cache_blocks(sequence, range(4)) == 1


@walk(
    ("layer", "rows", "error", "message"),
    [
        (-1, 3, ValueError, "layer must be from 0 to 1, got -1"),
        (2, 3, ValueError, "layer must be from 0 to 1, got 2"),
        (0.0, 3, TypeError, "layer must be an int, got float"),
        (
            0,
            4,
            ValueError,
            r"shape \(total_new, heads, head_dim\) with the step's total_new = 3, got \(4, 1, 2\)",
        ),
        (0, 2, ValueError, r"with the step's total_new = 3, got \(2, 1, 2\)"),
    ],
)
@walk("counts", [[3], [2, 1]])
def test_arguments_of_a_layer(layer, rows, error, message, counts):
    cache = make()
    step = cache.reserve_step(cache.batch([cache.create() for _ in counts]), counts)
    before = snapshot(cache)
    for position in range(3):
        if rows == 3 and position:
            continue
        q, k, v = (tokens(rows if i == position else 3)[i] for i in range(3))
        with pytest.raises(error, match=message):
            cache.attend(layer, q, k, v, step)
        if position:
            with pytest.raises(error, match=message):
                cache.write(layer, k, v, step)
    assert snapshot(cache) == before
    cache.attend(np.int64(1), *tokens(3), step)


@walk(
    ("sizes", "error", "message"),
    [
        ({"dtype": torch.int32}, TypeError, "dtype must be float16, .* got torch.int32"),
        ({"dtype": "float16"}, TypeError, "dtype must be float16, .* got str 'float16'"),
        ({"dtype": np.ones(2)}, TypeError, "dtype must be float16, .* got ndarray"),
        *(
            ({"device": device}, ValueError, "^device must be a device that torch has here")
            for device in (-7, 2**70, "nonsense", None)
        ),
        ({"head_dim": 10000}, ValueError, "head_dim must be from 1 to 512, got 10000"),
        ({"head_dim_v": 513}, ValueError, "head_dim_v must be from 1 to 512, got 513"),
        (
            {"device": "meta", "dtype": torch.float64},
            TypeError,
            "on the CPU, float64, got torch.float64 for meta",
        ),
    ],
)
def test_a_cache_that_no_kernel_can_read_is_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        make(**sizes)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_and_its_original_go_on_alike(copied):
    """The same program on both, one after the other, gives the same numbers and the same bytes."""
    original = make(window_left=5)
    for sequence in (original.create(range(9)), original.create()):
        run(original, [sequence], 6, float(sequence))
    original.cache_blocks(0, range(4))
    original.swap_out([1])
    before, copy = snapshot(original), copied(original)
    results = []
    for cache in (copy, original):
        assert snapshot(cache) == before  # the program on the copy has not reached the original
        fork = cache.fork(0)
        cache.swap_in([1])
        step = run(cache, [fork, 1, 0], 3, 2.0)
        found = cache.create(range(9))
        results.append((step.slot_mapping.tolist(), step.copied_blocks, cache.blocks(found), snapshot(cache)))
        cache.check_integrity()
    assert results[0] == results[1]


def test_a_cache_is_released_at_once():
    """No reference leads back to it: a GPU's memory must not wait for the garbage collector."""
    gc.disable()
    try:
        cache = make()
        step = run(cache, [cache.create()], 3)
        tensor = weakref.ref(cache.k)
        del cache
        assert tensor() is None
        del step
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_on_a_gpu_is_pinned(copied):
    cache = make(device="cuda")
    sequence = cache.create()
    step = cache.reserve_step(cache.batch([sequence]), 6)
    for layer in range(LAYERS):
        cache.attend(layer, *(tensor.cuda() for tensor in tokens(6, 5.0)), step)
    twin = copied(cache)
    twin.swap_out([sequence])
    assert all(tensor.is_pinned() for tensor in vars(twin)["_host"])
    assert torch.equal(cache.k[0, cache.blocks(sequence)].flatten(0, 1)[:6].cpu(), tokens(6, 5.0)[1])
