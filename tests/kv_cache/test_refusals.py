"""A call that raises leaves manager and cache unchanged: every public method, with generated arguments."""

from __future__ import annotations

import copy
import inspect
from itertools import product

import numpy as np
import pytest
import torch
from snapshots import snapshot

from flashtile.kv_cache import BlockManager, CacheFullError, PagedKVCache
from walk import walk

SIZES = {"max_sequences": 5, "max_seqlen": 24, "num_host_blocks": 3}
TOKENS = list(range(9))


def manager() -> BlockManager:
    """Sequences 0 to 3: one cached, its fork, one swapped out (2), one freed (1)."""
    return prepared(BlockManager(10, 4, **SIZES, window_left=7))


def cache() -> PagedKVCache:
    return prepared(PagedKVCache(2, 10, 4, 1, 2, dtype=torch.float32, window_left=7, **SIZES))


def prepared(manager):
    sequences = [manager.create() for _ in range(3)]
    manager.reserve_batch(manager.batch(sequences), [9, 2, 3])
    manager.mark_written(manager.batch(sequences))
    manager.cache_blocks(0, TOKENS)
    manager.fork(0)
    manager.free(1)
    manager.swap_out([2])
    return manager


NUMBERS = [0, 3, 1, 2, -1, 99, 2**70, 1.0, True, None, "0", np.int64(0), np.float32(0), torch.tensor(3), [0]]
LISTS = [
    [], [0], [0, 3], [0, 0], [0, 1], [2], [-1], [99], [2**70], [0.0], [[0]], ["x"], [None], None, 7, 0.5,
    "ab", np.array([0]), np.array([0.5]), torch.tensor([0, 3]), torch.tensor([3.0]), torch.ones(1, 1).int(),
    torch.tensor([True]), TOKENS, TOKENS * 5, range(9), object(),
]  # fmt: skip
VALUES = {
    "sequence": NUMBERS,
    "length": [*NUMBERS, 7, 8, 9],
    "count": [*NUMBERS, 4],
    "num_tokens": [*NUMBERS, 15, 16, *LISTS],
    "layer": NUMBERS,
    "sequences": LISTS,
    "parents": [*LISTS, [0] * 7],
    "tokens": LISTS,
    "salt": [b"", b"x", "x", None, 3],
    "batch": None,
    "step": None,
    "q": [torch.ones(2, 2, 2), torch.ones(3, 2, 2), torch.ones(2, 3), torch.ones(2, 2, 5), None, 3],
    "k": [torch.ones(2, 1, 2), torch.ones(3, 1, 2), torch.ones(2, 2, 2), torch.ones(2, 1, 2).double(), None],
    "v": [torch.ones(2, 1, 2), torch.ones(1, 1, 2), torch.ones(2, 1, 3), "v"],
}  # fmt: skip
QUIET = {"usage", "check_integrity", "reset_prefix_cache", "move", "block_bytes"}
"""Without arguments, or with those of this package only."""


def batches(manager):
    other = prepared(BlockManager(10, 4, **SIZES))
    stale = other.batch([3])
    other.free(3)
    return [manager.batch([0, 3]), manager.batch([]), other.batch([0]), stale, [0, 3], None, 0]


def steps(cache):
    """True, untrue, of another cache, and no step."""
    other = copy.deepcopy(cache)
    return [
        cache.reserve_step(cache.batch([0, 3])),
        other.reserve_step(other.batch([0, 3])),
        None,
        (1, 2),
    ]


def methods(cls):
    functions = inspect.getmembers(cls, inspect.isfunction)
    return [name for name, _ in functions if not name.startswith("_") and name not in QUIET]


@walk(
    ("make", "name"),
    [(manager, name) for name in methods(BlockManager)] + [(cache, name) for name in methods(PagedKVCache)],
)
def test_what_raises_changes_nothing(make, name):
    origin = make()
    parameters = [p for p in inspect.signature(getattr(origin, name)).parameters if p != "options"]
    values = {**VALUES, "batch": batches(origin)}
    if "step" in parameters:
        values["step"] = steps(origin)
    before, raised, returned = snapshot(origin), 0, 0
    # Whatever returns has changed the copy it was called on; tokens of batches and steps go with their cache.
    shared = (origin, values["batch"], values["step"])
    target, batch_values, step_values = copy.deepcopy(shared)
    for indices in product(*(range(len(values[parameter])) for parameter in parameters)):
        own = {**values, "batch": batch_values, "step": step_values}
        arguments = [own[parameter][i] for parameter, i in zip(parameters, indices, strict=True)]
        refused = False
        try:
            getattr(target, name)(*arguments)
        except (TypeError, ValueError, NotImplementedError, CacheFullError):
            refused = True
        raised, returned = raised + refused, returned + (not refused)
        if refused:
            assert snapshot(target) == before, arguments
        else:
            target.check_integrity()
            target, batch_values, step_values = copy.deepcopy(shared)
    assert raised
    assert returned


def test_select_with_a_tensor_of_parents():
    """Once every sequence was freed before the error."""
    beams = BlockManager(10, 4, max_sequences=4, max_seqlen=24)
    sequences = [beams.create() for _ in range(2)]
    assert beams.select(torch.tensor(sequences), torch.tensor([1, 1]))[0] == sequences[1]
    assert beams.select(np.array([1, 2]), np.array([0]))[0] == 1


@walk("arguments", [([1.5, 2.5],), ([1, 2], "salt"), (torch.zeros(0),), (torch.tensor([True]),), ([2**70],)])
def test_a_refused_prompt_takes_no_row(arguments):
    prompts = BlockManager(10, 1, max_sequences=1, max_seqlen=24)
    with pytest.raises((TypeError, ValueError), match=r"(tokens|salt) must be"):
        prompts.create(*arguments)
    assert prompts.sequences == ()
    prompts.create(b"bytes are tokens, too")


@pytest.mark.parametrize("number", [np.int64, np.int32, torch.tensor])
def test_numbers_of_numpy_and_torch(number):
    numbers = BlockManager(number(10), number(4), max_sequences=number(3), max_seqlen=number(24))
    sequence = number(numbers.create([number(3)]))
    numbers.reserve(sequence, number(5))
    numbers.reserve_batch(numbers.batch([sequence]), number(2))
    numbers.truncate(sequence, number(6))
    assert numbers.cache_blocks(sequence, [number(3)] * 4) == 1
    child = numbers.fork(sequence)
    assert numbers.length(number(child)) == 6
    numbers.free(sequence)
    assert numbers.sequences == (child,)
    numbers.check_integrity()
