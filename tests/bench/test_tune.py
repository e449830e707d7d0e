"""The search for tiles launches each kernel alone: with the arguments that it has today."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashtile.bench import tune

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_a_candidate_of_each_kernel_runs(kernel: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = tuple(torch.randn(1, 40, 2, 16, generator=generator) for _ in range(4))
    candidate = tune.Candidate(kernel, 16, "float32", True, 32, 32, 4, 1)
    tune._launch(candidate, tensors)()
