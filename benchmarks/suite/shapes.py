"""Workloads of the set ``shapes``: attention of models in use, outside of the papers' grid.

Heads, head sizes, lengths and masks come from published configurations. A name with ``tpN`` has the heads of
one GPU under N-way tensor parallelism. Batches are chosen such that a call has about 2^13 to 2^17 query rows
and takes at most about a millisecond. Each class of models has lengths that are not multiples of a tile.
"""

from __future__ import annotations

from typing import Any

from benchmarks.suite.workload import Workload
from flashtile.problems.common import UNLIMITED


def _shape(
    name: str, batch: int, seqlen_q: int, seqlen_k: int, heads: tuple[int, int], head_dim: int, *,
    window: int = 0, **more: Any,
) -> Workload:  # fmt: skip
    """Return a workload with ``heads`` (heads_q, heads_kv).

    ``window`` counts the keys that a row attends to, including itself; 0 is no window.
    """
    window_left = window - 1 if window else UNLIMITED
    sizes = (batch, seqlen_q, seqlen_k, *heads, head_dim)
    return Workload(name, name, *sizes, window_left=window_left, tags=("shapes",), **more)


def _cross(name: str, batch: int, seqlen_q: int, seqlen_k: int, heads: int, head_dim: int) -> Workload:
    name = f"{name}-{seqlen_q}x{seqlen_k}-d{head_dim}"
    return _shape(name, batch, seqlen_q, seqlen_k, (heads, heads), head_dim)


def _square(name: str, batch: int, seqlen: int, heads: int, head_dim: int) -> Workload:
    """Attention of encoders and image models: without a mask, and with as many key heads as query heads."""
    return _shape(f"{name}-s{seqlen}-d{head_dim}", batch, seqlen, seqlen, (heads, heads), head_dim)


def _decoder(
    name: str, batch: int, seqlen: int, heads: tuple[int, int], head_dim: int = 128, **more: Any
) -> Workload:
    """Causal self-attention of a language model."""
    return _shape(f"{name}-s{seqlen}", batch, seqlen, seqlen, heads, head_dim, causal=True, **more)


SHAPES: tuple[Workload, ...] = (
    # Diffusion: self-attention over latents, cross-attention to 77 text tokens, text and image joined
    _square("sd15-self", 2, 4096, 8, 40),
    _cross("sd15-cross", 2, 4096, 77, 8, 40),
    _square("sd15-self", 2, 1024, 8, 80),
    _square("sd15-self", 16, 256, 8, 160),
    _square("sdxl-self", 2, 4096, 10, 64),
    _cross("sdxl-cross", 2, 4096, 77, 10, 64),
    _square("sdxl-self", 4, 1024, 20, 64),
    _square("sd3-joint", 2, 4096 + 333, 24, 64),
    _square("dit-xl", 32, 1024, 16, 72),
    _square("flux-joint", 1, 4096 + 512, 24, 128),
    # Video
    _square("wan-video", 1, 32760, 12, 128),
    _cross("wan-text", 1, 32760, 512, 12, 128),
    _square("hunyuan-video", 1, 118800 // 4, 24, 128),
    _square("cogvideo", 1, 17776, 48, 64),
    # Vision
    _square("vit-b", 64, 197, 12, 64),
    _square("vit-l", 64, 257, 16, 64),
    _square("vit-h", 32, 257, 16, 80),
    _square("siglip", 32, 729, 16, 72),
    _square("dinov2-g", 16, 1370, 24, 64),
    _square("vit-22b", 16, 257, 48, 128),
    _square("eva-g", 32, 257, 16, 88),
    _square("vit-so400m", 64, 256, 16, 72),
    _square("internvit", 16, 1025, 25, 128),
    _square("vit-e", 32, 257, 16, 112),
    # Speech
    _square("whisper-encoder", 8, 1500, 20, 64),
    _cross("whisper-cross", 8, 448, 1500, 20, 64),
    _decoder("whisper-decoder", 16, 448, (20, 20), 64),
    # Encoders of text
    _square("bert-base", 64, 384, 12, 64),
    _square("bert-large", 32, 512, 16, 64),
    _square("modernbert", 8, 8192 // 4, 12, 64),
    # Language models: 1 to 16 query heads per key head, whole and as one GPU's share under tensor parallelism
    _decoder("llama2-7b", 4, 4096, (32, 32)),
    _decoder("llama3.1-8b", 2, 8192, (32, 8)),
    _decoder("llama3.1-8b-odd", 4, 3999, (32, 8)),
    _decoder("llama3-70b-tp8", 2, 8192, (8, 1)),
    _decoder("llama3-70b-tp4", 2, 8192, (16, 2)),
    _decoder("llama3-405b-tp8", 1, 8192, (16, 1)),
    _decoder("qwen2-7b", 4, 4096, (28, 4)),
    _decoder("qwen2.5-1.5b", 4, 4096, (12, 2)),
    _decoder("qwen2.5-72b-tp8", 2, 4096, (8, 1)),
    _decoder("qwen3-30b", 4, 4096, (32, 4)),
    _decoder("phi3-mini", 4, 4096, (32, 32), 96),
    _decoder("phi2", 8, 2048, (32, 32), 80),
    _decoder("gpt-j", 4, 2048, (16, 16), 256),
    _decoder("gptneox", 4, 2048, (64, 64), 96),
    _decoder("stablelm", 4, 4096, (32, 32), 80),
    _decoder("openelm", 8, 2048, (12, 3), 64),
    _decoder("falcon-7b", 4, 2048, (71, 1), 64),
    _decoder("tinyllama", 8, 2048, (32, 4), 64),
    _decoder("gpt2-small", 16, 1024, (12, 12), 64),
    _decoder("gpt2-small-short", 32, 512, (12, 12), 64),
    _decoder("tiny-training", 1, 128, (12, 12), 64),
    # Few heads, one sequence
    _decoder("one", 1, 512, (16, 4)),
    _decoder("one", 1, 1024, (32, 8)),
    _decoder("one", 1, 2048, (8, 2)),
    _decoder("one", 1, 4096, (4, 1)),
    # Chunks of a prompt
    _shape("llama3-8b-chunk-512x8192", 1, 512, 8192, (32, 8), 128, causal=True),
    _shape("llama3-70b-tp8-chunk-512x8192", 4, 512, 8192, (8, 1), 128, causal=True),
    # Multi-head latent attention, as trained: head_dim 192, head_dim_v 128
    _decoder("mla", 2, 4096, (16, 16), 192, head_dim_v=128),
    _decoder("mla-long", 1, 8192, (32, 32), 192, head_dim_v=128),
    # Soft-caps, ALiBi, sinks
    _decoder("gemma2-9b-softcap", 2, 8192, (16, 8), 256, softcap=50.0),
    _decoder("gemma2-27b-softcap", 4, 4096, (32, 16), 128, softcap=50.0),
    _decoder("grok-softcap", 2, 8192, (48, 8), 128, softcap=30.0),
    _decoder("gemma2-9b-softcap-window", 1, 16384, (16, 8), 256, softcap=50.0, window=4096),
    _decoder("mpt-7b-alibi", 8, 2048, (32, 32), 128, alibi=True),
    _decoder("bloom-alibi", 8, 2048, (16, 16), 64, alibi=True),
    _decoder("gpt-oss-sink", 2, 8192, (64, 8), 64, sink=True),
    _decoder("gpt-oss-sink-window", 2, 8192, (64, 8), 64, sink=True, window=128),
    # Windows
    _decoder("window-128", 2, 8192, (64, 8), 64, window=128),
    _decoder("gemma3-window-512", 4, 8192, (4, 1), 256, window=512),
    _decoder("gemma3-window-1024", 2, 16384, (16, 8), 128, window=1024),
    _decoder("mistral-window-4096", 1, 16384, (32, 8), 128, window=4096),
    _decoder("phi3-small-window", 2, 8192, (32, 8), 128, window=2048),
    # Every multiple of 8 as the head size, with a length that no tile divides
    *(_decoder(f"head-dim-{d}", 4, 2000, (16, 4), d) for d in range(32, 257, 8)),
)
