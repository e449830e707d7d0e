"""The reduction of the rows' largest scores to those of heads, by each backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import testing
from flashtile.backends.portable import statistics as portable_statistics
from flashtile.operators.statistics import MAX_LOGITS
from flashtile.problems.attention import new_lse
from flashtile.problems.statistics import MaxLogitsOptions, MaxLogitsTensors
from targets import Target


def largest_of(target: Target, rows: Tensor, offsets: Tensor | None = None) -> Tensor:
    with testing.poisoned_memory():
        return MAX_LOGITS((rows,), MaxLogitsTensors(offsets), MaxLogitsOptions(target.backend))


def rows_of(target: Target, *shape: int) -> Tensor:
    """Random numbers as calls return them: between lse and the entropy, which are larger."""
    rows = new_lse(torch.empty(0, device=target.device), shape, torch.float32, ("max_logits", "entropy"))
    rows.fill_(100.0)
    rows[..., 1] = torch.randn(shape, device=target.device) - 5
    return rows[..., 1]


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 129), (1, 9, 1030), (1, 1, 2048)], ids=str)
def test_of_batches(target: Target, shape: tuple[int, ...]) -> None:
    rows = rows_of(target, *shape)
    assert torch.equal(largest_of(target, rows), rows.amax(-1))
    strided = torch.randn(*shape, 2, device=target.device)[..., 0]
    assert torch.equal(largest_of(target, strided), strided.amax(-1))


@pytest.mark.parametrize("heads", [1, 3, 16])
def test_of_packed_sequences(target: Target, heads: int) -> None:
    """Of sequences without rows and longer than a program reads at a time. Rows of none count for none."""
    lengths = 5, 0, 300, 1, 128, 0
    rows = rows_of(target, heads, sum(lengths) + 7)
    offsets = torch.tensor([0, *lengths], device=target.device).cumsum(0, dtype=torch.int32)
    rows[:, -7:] = 50.0
    found = largest_of(target, rows, offsets)
    for own, of_sequence in zip(rows[:, :-7].split(lengths, -1), found, strict=True):
        expected = own.amax(-1) if own.shape[-1] else own.new_full((heads,), -math.inf)
        assert torch.equal(of_sequence, expected)


def test_of_no_rows(target: Target) -> None:
    assert largest_of(target, rows_of(target, 2, 3, 0)).eq(-math.inf).all()
    assert largest_of(target, rows_of(target, 0, 3, 4)).shape == (0, 3)
    nothing = torch.zeros(1, device=target.device, dtype=torch.int32)
    assert largest_of(target, rows_of(target, 3, 4), nothing).shape == (0, 3)


def test_of_rows_that_see_no_key_and_of_nan(target: Target) -> None:
    rows = rows_of(target, 2, 2, 40)
    rows[0, 0] = -math.inf
    rows[1, 0, 7] = math.nan
    found = largest_of(target, rows)
    assert found[0, 0] == -math.inf
    assert found.isnan().tolist() == [[False, False], [True, False]]
    offsets = torch.tensor([0, 20, 40], device=target.device, dtype=torch.int32)
    assert largest_of(target, rows[1], offsets).isnan().tolist() == [[True, False], [False, False]]


@pytest.mark.gpu
def test_kernel_is_chosen_on_a_gpu(gpu_target: Target) -> None:
    rows = rows_of(gpu_target, 2, 3, 100)
    prepared = MAX_LOGITS.prepared((rows,), MaxLogitsTensors(), MaxLogitsOptions())
    assert type(prepared).__name__ == "MaxLogitsLaunch"


def test_only_selection_may_fall_back_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a selected backend, while it prepares its kernel, is not hidden."""

    def prepare(*arguments: Any) -> None:
        raise NotImplementedError("while it prepares")

    monkeypatch.setattr(portable_statistics, "reason_against", lambda problem, explicit: None)
    monkeypatch.setattr(portable_statistics, "prepare_max_logits", prepare)
    with pytest.raises(NotImplementedError, match="while it prepares"):
        MAX_LOGITS.prepare((torch.randn(2, 3, 4),), MaxLogitsTensors(), MaxLogitsOptions())
