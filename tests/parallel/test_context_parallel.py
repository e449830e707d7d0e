"""Attention over ranks, against standard attention on one device in float64: out, lse and every gradient."""

from __future__ import annotations

import pytest

import parallel_tasks
from ranks_pool import pool

CASES = {
    "ring causal": {"ranks": 4, "method": "ring", "causal": True},
    "ring of two, odd": {"ranks": 2, "method": "ring", "tokens": (37, 37), "causal": True},
    "ring window": {"ranks": 8, "method": "ring", "tokens": (100, 100), "window_size": (17, 0)},
    "ring window both": {"ranks": 3, "method": "ring", "window_size": (5, 9), "softcap": 3.0},
    "ring no mask": {"ranks": 3, "method": "ring", "layout": "contiguous", "sizes": (16, 24)},
    "ring striped": {"ranks": 4, "method": "ring", "layout": "striped", "window_size": (13, 0)},
    "ring striped causal": {"ranks": 3, "method": "ring", "layout": "striped", "causal": True, "sink": True},
    "ring, fewer tokens than ranks": {"ranks": 8, "method": "ring", "tokens": (5, 5), "causal": True},
    "ring, no token": {"ranks": 2, "method": "ring", "tokens": (0, 0), "causal": True},
    "ring, other keys": {"ranks": 4, "method": "ring", "tokens": (21, 60), "causal": True, "sink": True},
    "ring, fewer keys": {"ranks": 4, "method": "ring", "tokens": (60, 21), "causal": True},
    "ring documents": {
        "ranks": 4, "method": "ring", "causal": True, "tokens": (64, 64),
        "documents": ([3, 20, 1, 0, 30, 10], [3, 20, 1, 0, 30, 10]),
    },
    "ring documents window": {
        "ranks": 3, "method": "ring", "window_size": (4, 2), "tokens": (64, 64), "sink": True,
        "documents": ([33, 20, 11], [33, 20, 11]),
    },
    "ring documents other keys": {
        "ranks": 2, "method": "ring", "causal": True, "tokens": (30, 50),
        "documents": ([10, 5, 0, 15], [20, 3, 7, 20]),
    },
    "ulysses": {"ranks": 4, "method": "ulysses", "causal": True, "heads": (8, 4), "sink": True},
    "ulysses, fewer key heads": {"ranks": 4, "method": "ulysses", "causal": True, "heads": (8, 2), "sink": True},
    "ulysses, odd heads": {"ranks": 4, "method": "ulysses", "window_size": (9, 3), "heads": (6, 2)},
    "ulysses, fewer heads": {"ranks": 3, "method": "ulysses", "causal": True, "heads": (2, 1), "sink": True},
    "ulysses striped": {"ranks": 2, "method": "ulysses", "layout": "striped", "causal": True, "tokens": (31, 40)},
    "ulysses documents": {
        "ranks": 2, "method": "ulysses", "causal": True, "documents": ([13, 30, 7], [13, 30, 7]),
    },
    "allgather": {"ranks": 4, "method": "allgather", "causal": True, "sink": True},
    "allgather window": {"ranks": 3, "method": "allgather", "window_size": (7, 0), "tokens": (31, 31)},
    "allgather striped": {"ranks": 2, "method": "allgather", "layout": "striped", "causal": True},
    "allgather documents": {
        "ranks": 4, "method": "allgather", "causal": True, "documents": ([13, 30, 7], [13, 30, 7]),
    },
    "auto": {"ranks": 2, "causal": True},
    "two dimensions": {"ranks": 8, "mesh": (4, 2), "causal": True, "tokens": (67, 67), "sink": True},
    "two dimensions, one key head": {"ranks": 8, "mesh": (2, 4), "window_size": (20, 0), "heads": (4, 1)},
    "two dimensions striped": {"ranks": 8, "mesh": (4, 2), "layout": "striped", "causal": True},
}  # fmt: skip


@pytest.fixture(scope="session")
def ranks():
    with pool(8, groups=(2, 3, 4)) as started:
        yield started


@pytest.mark.parametrize("name", CASES)
def test_it_is_exact(ranks, name):
    case = dict(CASES[name])
    count = case.pop("ranks")
    for rank, errors in enumerate(ranks.run(parallel_tasks.compare, count, **case)):
        assert isinstance(errors, dict), f"rank {rank}: {errors!r}"
        assert all(error < 1e-9 for error in errors.values()), f"rank {rank}: {errors}"
