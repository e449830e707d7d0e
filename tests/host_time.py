"""What a call costs the host, in calls of PyTorch's own attention: on a loaded machine, both take longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def in_calls_of_sdpa(function: Callable[[], Any], calls: int = 50, rounds: int = 50) -> float:
    """The quickest of ``rounds`` rounds of each, in turns; no gradients."""
    q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")

    def sdpa() -> Any:
        return scaled_dot_product_attention(q, q, q, is_causal=True)

    best = {function: float("inf"), sdpa: float("inf")}
    with torch.no_grad():
        for _ in range(rounds):
            for timed in best:
                torch.cuda.synchronize()
                start = time.thread_time()
                for _ in range(calls):
                    timed()
                best[timed] = min(best[timed], time.thread_time() - start)
    return best[function] / best[sdpa]
