"""Benchmarks that ``kernels benchmark`` runs in the repository of the hub, compared with plain attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from kernels.benchmark import Benchmark
from torch import Tensor
from torch.nn import functional as F


class AttentionBenchmark(Benchmark):
    """Forward passes of one layer: full, causal, and grouped heads with a window."""

    seed = 0
    batch, seqlen, heads, kv_heads, head_dim = 2, 2048, 16, 16, 128
    options: ClassVar[dict[str, object]] = {}

    def setup(self) -> None:
        """Make q, k and v, shorter where there is no GPU."""
        on_gpu = str(self.device) != "cpu"
        seqlen, dtype = (self.seqlen, torch.bfloat16) if on_gpu else (256, torch.float32)
        self.q, self.k, self.v = (
            torch.randn(self.batch, seqlen, heads, self.head_dim, device=self.device, dtype=dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )

    def benchmark_attention(self) -> None:
        self.out = self.kernel.flash_attn_func(self.q, self.k, self.v, **self.options)

    def verify_attention(self) -> Tensor:
        """Return the same with PyTorch's attention."""
        q, k, v = (tensor.transpose(1, 2) for tensor in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, self.visible(), enable_gqa=True)
        return out.transpose(1, 2)

    def visible(self) -> Tensor | None:
        """Return which keys each query sees, or None for all."""
        return None


class CausalAttentionBenchmark(AttentionBenchmark):
    """The causal mask of a language model."""

    options: ClassVar[dict[str, object]] = {"causal": True}

    def visible(self) -> Tensor:
        rows = torch.arange(self.q.shape[1], device=self.device)
        return rows[:, None] >= rows


class WindowBenchmark(AttentionBenchmark):
    """Four query heads for each key head, and a window of 128 keys, as in Mistral's models."""

    kv_heads = 4
    options: ClassVar[dict[str, object]] = {"causal": True, "window_size": (127, 0)}

    def visible(self) -> Tensor:
        rows = torch.arange(self.q.shape[1], device=self.device)
        distance = rows[:, None] - rows
        return (distance >= 0) & (distance < 128)
