"""Workloads that a seed draws: packed training batches, serving steps, and calls with little work.

A class is a kind of call that people train or serve with, such as packed documents of instruction tuning.
Each class has COUNT workloads with drawn lengths, heads and masks, so that a mean over a class says more than
one shape. Another seed draws other workloads of the same classes. Names are ``CLASS-SEED.NUMBER``, and the
class is a tag of its workloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from benchmarks.suite.workload import KVCache, Workload

COUNT = 8
"""Number of workloads in each class."""

Lengths = list[tuple[int, int]]
"""(seqlen_q, seqlen_k) of each sequence."""
Heads = tuple[int, int, int]
"""(heads_q, heads_kv, head_dim)."""

DECODER_HEADS: tuple[Heads, ...] = (
    (16, 16, 64), (32, 8, 128), (28, 4, 128), (32, 8, 64), (40, 8, 128), (32, 32, 96), (16, 8, 256),
    (12, 2, 128), (32, 32, 80), (14, 2, 64), (24, 8, 128), (64, 8, 64),
)  # fmt: skip
"""Heads of language models: Llama 2 and 3, Qwen2.5, Phi-2 and 3, Gemma 3, gpt-oss."""
VISION_HEADS: tuple[Heads, ...] = (
    (16, 16, 72), (16, 16, 64), (12, 12, 64), (16, 16, 80), (24, 24, 64), (16, 16, 88), (25, 25, 128),
    (16, 16, 128),
)  # fmt: skip
"""Heads of image encoders: SigLIP, ViT-L, ViT-B, ViT-H, DINOv2-g, EVA-g, InternViT, Qwen2.5-VL."""


def log_uniform(draw: Random, least: float, most: float) -> int:
    return round(least * (most / least) ** draw.random())


def documents(draw: Random, total: int, length: Callable[[], int]) -> Lengths:
    """Return sequences with ``total`` tokens together; the last one is shortened to fit."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(length(), left))
    return [(n, n) for n in lengths]


class Drawing:
    """Draws the workloads of a class: ``draw`` for sizes, and each of some heads once before any comes again.

    ``scale`` divides numbers of tokens and sequences, so that tests can run every class on a CPU.
    """

    def __init__(self, name: str, seed: int, scale: int) -> None:
        self.name, self.seed, self.scale = name, seed, scale
        self.draw = Random(f"{name} {seed}")
        self._left: list[Any] = []
        self.number = 0

    def of(self, choices: Sequence[Any]) -> Any:
        """Draw one of ``choices``, which are drawn in another order once all were drawn."""
        if not self._left:
            self._left = self.draw.sample(choices, len(choices))
        return self._left.pop()

    def between(self, least: int, most: int) -> int:
        """Draw a number of tokens, log-uniformly."""
        return max(1, log_uniform(self.draw, least, most) // self.scale)

    def few(self, least: int, most: int) -> int:
        """Draw a number of sequences, uniformly."""
        return max(1, self.draw.randint(least, most) // self.scale)

    def workload(self, batch: int, seqlen_q: int, seqlen_k: int, heads: Heads, **more: Any) -> Workload:
        """Return a workload of the class, with its next number."""
        name = f"{self.name}-{self.seed}.{self.number}"
        self.number += 1
        return Workload(name, name, batch, seqlen_q, seqlen_k, *heads, drawn_from=self.name, **more)

    def of_lengths(self, lengths: Lengths, heads: Heads, **more: Any) -> Workload:
        seqlen_q, seqlen_k = (max(pair[side] for pair in lengths) for side in (0, 1))
        return self.workload(len(lengths), seqlen_q, seqlen_k, heads, lengths=tuple(lengths), **more)

    def packed(self, total: int, length: Callable[[], int], heads: Sequence[Heads], **more: Any) -> Workload:
        return self.of_lengths(documents(self.draw, total // self.scale, length), self.of(heads), **more)


def _tuning(of: Drawing) -> Workload:
    return of.packed(32768, lambda: of.between(40, 4000), DECODER_HEADS, causal=True)


def _chat(of: Drawing) -> Workload:
    return of.packed(32768, lambda: of.between(16, 128), DECODER_HEADS, causal=True)


def _long(of: Drawing) -> Workload:
    return of.packed(32768, lambda: of.between(2000, 6000), DECODER_HEADS, causal=True)


def _long_window(of: Drawing) -> Workload:
    window = of.draw.choice((512, 1024, 2048, 4096)) // of.scale
    length = lambda: of.between(2000, 6000)  # noqa: E731
    return of.packed(32768, length, DECODER_HEADS, causal=True, window_left=window - 1)


def _images(of: Drawing) -> Workload:
    return of.packed(32768, lambda: of.between(196, 1024), VISION_HEADS)


def _tiny(of: Drawing) -> Workload:
    return of.packed(16384, lambda: log_uniform(of.draw, 1, 40), DECODER_HEADS, causal=True)


def _step(of: Drawing, heads: Heads) -> Workload:
    """Return a serving step: some chunks of prompts, and one token each of more sequences that decode."""
    chunks = []
    for _ in range(of.draw.randint(1, 4)):
        new = of.between(64, 2048)
        chunks.append((new, new + of.draw.choice((0, of.between(256, 8192)))))
    singles = [(1, of.between(128, 16384)) for _ in range(of.few(16, 96))]
    cache = KVCache(page_size=(16, 64)[of.number % 2])
    return of.of_lengths(chunks + singles, heads, causal=True, cache=cache)


def _step_of_odd_groups(of: Drawing) -> Workload:
    heads = ((24, 8, 128), (40, 8, 128), (12, 2, 128), (14, 2, 64), (96, 8, 128), (14, 1, 64))
    return _step(of, of.of(heads))


def _few_tiles(of: Drawing) -> Workload:
    """Return a call with about one to three query tiles for each multiprocessor of a large GPU."""
    heads, head_dim = of.draw.choice((4, 6, 8, 10, 12)), of.of((64, 128))
    seqlen = of.between(640, 2560)
    batch = max(1, round(of.draw.uniform(130, 400) * 128 / (seqlen * of.scale * heads)))
    return of.workload(batch, seqlen, seqlen, (heads, heads, head_dim), causal=of.draw.random() < 0.5)


def _short_keys(of: Drawing) -> Workload:
    """Return cross-attention to a text or to few latent vectors."""
    heads = of.draw.choice((8, 12, 16, 20))
    return of.workload(
        of.few(1, 8), of.between(1024, 8192), of.between(16, 256), (heads, heads, of.of((64, 128)))
    )


def _short_sequences(of: Drawing) -> Workload:
    heads, seqlen = of.draw.choice((12, 16)), of.between(200, 640)
    causal = of.draw.random() < 0.5
    return of.workload(of.few(24, 64), seqlen, seqlen, (heads, heads, 64), causal=causal)


def _grouped_64(of: Drawing) -> Workload:
    heads = of.of(((32, 8), (64, 8), (16, 4), (14, 2), (32, 4), (24, 8), (40, 8), (12, 4)))
    seqlen = of.between(2500, 4500)
    return of.workload(of.draw.randint(1, 2), seqlen, seqlen, (*heads, 64), causal=True)


def _latent_192(of: Drawing) -> Workload:
    """Return multi-head latent attention of DeepSeek's models as it is trained, with keys of 192 columns."""
    heads, seqlen = of.draw.choice((8, 16, 32)), of.between(1500, 6000)
    return of.workload(
        of.draw.randint(1, 2), seqlen, seqlen, (heads, heads, 192), head_dim_v=128, causal=True
    )


def _on_cached(of: Drawing) -> Workload:
    """Return new tokens of a prompt on more tokens that were computed before."""
    new, heads = of.between(128, 512), of.of(((32, 8), (28, 4), (40, 8), (16, 2), (8, 1), (64, 8)))
    return of.workload(1, new, new + of.between(8192, 32768), (*heads, 128), causal=True)


def _window_by_head(of: Drawing) -> Workload:
    heads, seqlen = of.draw.choice((8, 16)), of.between(1500, 8192)
    batch = max(1, 16384 // (seqlen * of.scale))
    head_dim = of.of((64, 128))
    return of.workload(batch, seqlen, seqlen, (heads, heads, head_dim), causal=True, mod="window-by-head")


CLASSES: dict[str, tuple[str, Callable[[Drawing], Workload]]] = {
    "packed-tuning": ("packed", _tuning),
    "packed-chat": ("packed", _chat),
    "packed-long": ("packed", _long),
    "packed-long-window": ("packed", _long_window),
    "packed-images": ("packed", _images),
    "packed-tiny": ("packed", _tiny),
    "mixed-32/8": ("mixed", lambda of: _step(of, (32, 8, 128))),
    "mixed-28/4": ("mixed", lambda of: _step(of, (28, 4, 128))),
    "mixed-groups": ("mixed", _step_of_odd_groups),
    "few-tiles": ("little", _few_tiles),
    "short-keys": ("little", _short_keys),
    "short-sequences": ("little", _short_sequences),
    "grouped-d64": ("little", _grouped_64),
    "latent-192": ("little", _latent_192),
    "on-cached": ("little", _on_cached),
    "window-by-head": ("little-masks", _window_by_head),
}
"""The classes by name: (tag of several classes, which need one kind of contestant; how one is drawn)."""


def workloads(seed: int) -> list[Workload]:
    """Return COUNT workloads of each class. The first of each class come first, then the second, and so on.

    A run whose time is limited therefore measures about as many of each class.
    """
    columns = [_drawn(name, seed, (tag, name), COUNT) for name, (tag, _) in CLASSES.items()]
    return [workload for row in zip(*columns, strict=True) for workload in row]


def small_workloads() -> list[Workload]:
    """Return a small workload of each class in float32, for a CPU."""
    found = [_drawn(name, 0, (f"ci-{tag}",), 1, scale=32)[0] for name, (tag, _) in CLASSES.items()]
    return [replace(one, name=f"ci-{one.name}", series=f"ci-{one.name}", dtype="float32") for one in found]


def _drawn(name: str, seed: int, tags: tuple[str, ...], count: int, scale: int = 1) -> list[Workload]:
    of, (_, make) = Drawing(name, seed, scale), CLASSES[name]
    return [replace(make(of), tags=tags) for _ in range(count)]
