"""The cache that is bounded in bytes: what it holds, what it drops, how often a cycle of keys hits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from flashtile.caches import BoundedCache


def test_what_is_stored_is_read_as_from_a_dict():
    cache = BoundedCache(100)
    value = object()
    assert cache.store("a", value, 60) is value
    assert cache["a"] is cache.get("a") is value
    assert cache.get("b") is None
    with pytest.raises(KeyError):
        cache["b"]


def test_reads_are_those_of_dict():
    assert BoundedCache.get is dict.get
    assert BoundedCache.__getitem__ is dict.__getitem__


def test_only_what_has_a_size_can_be_stored():
    cache = BoundedCache(100)
    with pytest.raises(TypeError, match="store"):
        cache["a"] = 1
    assert not cache


def test_the_bound_holds_for_any_sizes():
    cache, sizes = BoundedCache(1000), {}
    for step in range(3000):
        key, nbytes = step * 37 % 101, step * 61 % 400
        sizes[key] = nbytes
        cache.store(key, step, nbytes)
        assert cache[key] == step
        assert cache.held_bytes == sum(sizes[key] for key in cache) <= 1000
    assert len(cache) > 2


def test_one_entry_is_dropped_for_one_that_does_not_fit():
    cache = BoundedCache(64)
    for key in range(64):
        cache.store(key, key, 1)
    for key in range(64, 200):
        cache.store(key, key, 1)
        assert len(cache) == 64


def test_a_value_larger_than_the_bound_is_returned_and_not_kept():
    cache = BoundedCache(10)
    cache.store("a", 1, 10)
    assert cache.store("b", 2, 11) == 2
    assert dict(cache) == {"a": 1}


def test_a_new_value_replaces_the_old_one_and_its_size():
    cache = BoundedCache(10)
    cache.store("a", 1, 9)
    cache.store("a", 2, 3)
    cache.store("b", 3, 7)
    assert dict(cache) == {"a": 2, "b": 3}
    cache.store("b", 4, 8)  # it does not fit beside the other one, and is itself never dropped
    assert dict(cache) == {"b": 4}


def test_a_cleared_cache_is_empty_and_usable():
    cache = BoundedCache(10)
    cache.store("a", 1, 10)
    cache.clear()
    assert not cache
    assert cache.held_bytes == 0
    cache.store("b", 2, 10)
    assert dict(cache) == {"b": 2}


def test_values_are_freed_outside_of_the_lock():
    """Freeing a value may run any code, which may need the cache."""
    locked = []

    class Value:
        def __del__(self):
            locked.append(cache._lock.locked())

    cache = BoundedCache(1)
    cache.store("a", Value(), 1)
    cache.store("a", Value(), 1)
    cache.store("b", Value(), 1)
    cache.clear()
    assert locked == [False] * 3


@pytest.mark.parametrize("more", [1, 4])
def test_a_cycle_over_slightly_more_keys_than_fit_hits_nearly_always(more):
    fitting, cycles, misses = 64, 200, 0
    cache = BoundedCache(fitting)
    for _ in range(cycles):
        for key in range(fitting + more):
            if key not in cache:
                misses += 1
                cache.store(key, key, 1)
    # Emptying when full, or dropping the oldest, misses at every key of a cycle.
    assert misses < 0.15 * cycles * (fitting + more)
    if more == 1:
        assert misses < 0.05 * cycles * (fitting + more)


def test_threads_may_store_at_once():
    cache = BoundedCache(50)

    def store(thread: int) -> None:
        for step in range(2000):
            cache.store((thread, step % 40), step, 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store, range(4)))
    assert len(cache) == cache.held_bytes == 50
