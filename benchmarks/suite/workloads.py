"""Named attention calls, shared by tests, benchmarks and tuning."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from benchmarks.suite import drawn, mods
from benchmarks.suite.shapes import SHAPES
from benchmarks.suite.workload import KVCache, Workload
from flashtile.hardware.timing import FP8

PASSES = ("forward", "backward", "both", "graph")
"""Passes to measure: "both" is forward and backward, "graph" a forward call in a replayed CUDA graph."""
DTYPES = ("float16", "bfloat16", "float32", "float64", FP8)
"""Dtypes of workloads. With FP8, inputs and output are bfloat16, and each contestant quantises the inputs."""

PAPER_TOKENS = 16384
PAPER_HIDDEN = 2048
SMALL_HIDDEN = 1024
"""Columns of all heads in the workloads of small heads: half of the papers', whose heads are fewer."""
PAPER_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER_HEAD_DIMS = (64, 128, 256)
MASKS = (("", False), ("-causal", True))
"""(end of the name, causal) of workloads that are measured with and without a causal mask."""


def select(
    names: Sequence[str], *, head_dims: Sequence[int] = (), dtype: str | None = None, seed: int = 0
) -> tuple[Workload, ...]:
    """Return workloads whose name, series or tag is among ``names``, in order of definition.

    Args:
        names: names, series or tags.
        head_dims: head sizes to keep; empty keeps all.
        dtype: replaces the dtype of each workload.
        seed: seed of the workloads that are drawn.

    Raises:
        ValueError: a name or a dtype is unknown, or no workload remains.
    """
    known = WORKLOADS if seed == 0 else (*FIXED, *drawn.workloads(seed))
    for name in names:
        if not any(name in (w.name, w.series, *w.tags) for w in known):
            raise ValueError(
                f"workload must be a name, a series or one of the tags {', '.join(TAGS)}, got {name!r}"
            )
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    chosen = [w for w in known if not set(names).isdisjoint((w.name, w.series, *w.tags))]
    if dtype == FP8 and any(w.cache for w in chosen):
        raise ValueError(f"dtype must be that of q in decoding, got {dtype!r}; decode-fp8 has FP8 caches")
    if head_dims and not any(w.head_dim in head_dims for w in chosen):
        have = ", ".join(map(str, sorted({w.head_dim for w in chosen})))
        raise ValueError(
            f"head-dim must be one of {have} in these workloads, got {', '.join(map(str, head_dims))}"
        )
    chosen = [w for w in chosen if not head_dims or w.head_dim in head_dims]
    return tuple(chosen if dtype is None else (replace(w, dtype=dtype) for w in chosen))


Heads = tuple[int, int, int]
"""(heads_q, heads_kv, head_dim)."""


def _dense(
    series: str, seqlens: Iterable[int], tokens: int, tags: str, heads: Heads, **more: Any
) -> list[Workload]:
    """Return a dense workload for each length, with ``tokens // seqlen`` sequences, but at least one."""
    return [
        Workload(
            f"{series}-s{s}", series, max(1, tokens // s), s, s, *heads, tags=tuple(tags.split()), **more
        )
        for s in seqlens
    ]


def _paper_grid(prefix: str, seqlens: Iterable[int], tags: str, **more: Any) -> list[Workload]:
    """Return the workloads of the FlashAttention papers' plots, with and without a causal mask.

    The head sizes are 64, 128 and 256, and heads * head_dim is 2048.
    """
    sets = (
        _dense(
            f"{prefix}-d{d}{suffix}", seqlens, PAPER_TOKENS, tags, (PAPER_HIDDEN // d, PAPER_HIDDEN // d, d),
            causal=causal, **more,
        )
        for d in PAPER_HEAD_DIMS
        for suffix, causal in MASKS
    )  # fmt: skip
    return list(chain.from_iterable(sets))


def _lengths(
    name: str, lengths: Sequence[tuple[int, int]], tags: str, heads: Heads, series: str = "", **more: Any
) -> Workload:
    """Return a workload whose sequences have these ``lengths``, pairs (seqlen_q, seqlen_k)."""
    longest_q, longest_k = (max(pair[side] for pair in lengths) for side in (0, 1))
    return Workload(
        name, series or name, len(lengths), longest_q, longest_k, *heads,
        lengths=tuple(lengths), tags=tuple(tags.split()), **more,
    )  # fmt: skip


def _documents(least: int, most: int) -> drawn.Lengths:
    """Return log-uniform lengths of packed documents, 32,768 tokens in all."""
    draw = random.Random(0)
    return drawn.documents(draw, 2 * PAPER_TOKENS, lambda: drawn.log_uniform(draw, least, most))


def _decode(
    name: str, contexts: Sequence[int], tags: str, heads: Heads = (32, 8, 128), *, series: str = "",
    seqlen_q: int = 1, page_size: int = 16, cache_dtype: str | None = None, prefix: int = 0, **more: Any,
) -> Workload:  # fmt: skip
    """Return a decoding workload: ``seqlen_q`` new tokens per sequence over ``contexts`` cached keys."""
    return _lengths(
        f"decode-{name}", [(seqlen_q, context) for context in contexts], tags, heads,
        f"decode-{series or name}", causal=seqlen_q > 1,
        cache=KVCache(page_size, cache_dtype, prefix), **more,
    )  # fmt: skip


def log_uniform_lengths(total: int, shortest: int, longest: int) -> list[int]:
    """Return log-uniform lengths with the sum ``total``; the last length may be below ``shortest``."""
    draw = random.Random(0)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        length = round(shortest * (longest / shortest) ** draw.random())
        lengths.append(min(length, left))
    return lengths


def _square(*lengths: int) -> list[tuple[int, int]]:
    return [(length, length) for length in lengths]


def _ragged() -> list[Workload]:
    """Return workloads with log-uniform lengths, and workloads with equal lengths to compare them with.

    Both have similar numbers of tokens and of visible (query, key) pairs.
    """
    lengths = log_uniform_lengths(PAPER_TOKENS, 64, 8192)
    batch = round(PAPER_TOKENS**2 / sum(length**2 for length in lengths))
    found = []
    for suffix, causal in MASKS:
        more: dict[str, Any] = {"tags": "lengths", "heads": WIDE_HEADS, "causal": causal}
        found.append(_lengths(f"ragged{suffix}", _square(*lengths), **more))
        found += _dense(f"ragged-equal{suffix}", (PAPER_TOKENS // batch,), PAPER_TOKENS, **more)
    return found


WIDE_HEADS: Heads = (16, 16, 128)
FLOAT32: dict[str, Any] = {"dtype": "float32"}
LATENT: dict[str, Any] = {"latent": True, "head_dim_v": 512}
CONTEXTS = (4096,) * 32
"""Cached keys per sequence in decoding workloads that vary another parameter."""

FIXED: tuple[Workload, ...] = (
    *_paper_grid("paper", PAPER_SEQLENS, "paper"),  # Shah et al. 2024, arXiv:2407.08608, section 4.1
    # Attention of known models: heads, head sizes and masks from their published configurations
    *_dense("llama3-8b", (2048, 8192, 16384), 16384, "llama models", (32, 8, 128), causal=True),
    Workload(
        "llama3-8b-chunk", "llama3-8b-chunk", 2, 2048, 8192, 32, 8, 128, causal=True,
        tags=("llama", "models"),
    ),
    *_dense("qwen2.5-7b", (4096, 16384), 16384, "qwen models", (28, 4, 128), causal=True),
    *_dense("qwen3-0.6b", (4096,), 16384, "qwen models", (16, 8, 128), causal=True),
    *_dense("gpt2", (1024,), 16384, "gpt2 models", (12, 12, 64), causal=True),
    *_dense(
        "mixtral-window", (8192, 16384), 16384, "mixtral window models", (32, 8, 128),
        causal=True, window_left=4095,
    ),
    *_dense("gemma2-2b", (8192,), 16384, "gemma models", (8, 4, 256), causal=True, softcap=50.0),
    _lengths(
        "llama3-8b-varlen", _square(8192, 37, 4096, 64, 2048, 128, 1024, 27, 512, 256),
        "varlen llama models", (32, 8, 128), causal=True,
    ),
    _lengths(
        "bert-varlen", _square(*(64 + (index * 149) % 449 for index in range(56))),
        "varlen models", (16, 16, 64),
    ),
    # Long sequences with and without a window
    *_dense("window-none", (16384,), PAPER_TOKENS, "windows", WIDE_HEADS, causal=True),
    *_dense("window-1024", (16384,), PAPER_TOKENS, "windows", WIDE_HEADS, causal=True, window_left=1023),
    *_dense("batch16-causal", (8192,), 16 * 8192, "batch16", WIDE_HEADS, causal=True),
    *_ragged(),
    *SHAPES,
    *_paper_grid("bfloat16", (2048, 8192), "dtypes"),
    *_paper_grid("float16", (2048, 8192), "dtypes", dtype="float16"),
    *_paper_grid("fp8", (4096, 8192, 16384), "fp8", dtype=FP8),
    # One to 128 sequences of 1024 to 131072 keys; page sizes, e4m3 caches, several tokens, head sizes
    *(
        _decode(f"{b}x{s}-{q}/{kv}", (s,) * b, "decode decode-grid", (q, kv, 128), series=f"{b}x-{q}/{kv}")
        for q, kv in ((32, 8), (32, 32), (64, 8))
        for b, s in ((1, 8192), (1, 131072), (8, 8192), (8, 65536), (32, 4096), (128, 1024), (128, 4096))
    ),
    *(
        _decode(f"32x4096-page-{size}", CONTEXTS, "decode decode-pages", series="pages", page_size=size)
        for size in (1, 16, 64, 256)
    ),
    _decode("32x4096-dense", CONTEXTS, "decode decode-pages", series="pages", page_size=0),
    _decode("ragged-131072-63x512", (131072, *(512,) * 63), "decode decode-ragged"),
    _decode("64x512", (512,) * 64, "decode decode-ragged"),
    *(
        _decode(f"{b}x{s}-32/8-fp8", (s,) * b, "decode decode-fp8", series=f"{b}x-32/8-fp8", cache_dtype=FP8)
        for b, s in ((1, 8192), (8, 65536), (32, 4096), (128, 4096))
    ),
    *(
        _decode(f"32x4096-32/8-q{n}", CONTEXTS, "decode decode-tokens", series="tokens", seqlen_q=n)
        for n in (4, 16, 64)
    ),
    *(
        _decode(f"32x4096-d{d}", CONTEXTS, "decode decode-head-dims", (32, 8, d), series="head-dims")
        for d in (64, 256, 512)
    ),
    # Verification of speculated tokens, and chunks of prompts, over a paged cache
    *(
        _decode(
            f"{b}x{s}-chunk{n}", (s,) * b, "decode decode-chunks", series=f"{b}x{s}-chunk", seqlen_q=n
        )
        for b, s in ((8, 8192), (32, 4096), (1, 32768), (128, 512), (1, 131072))
        for n in (1, 2, 4, 8, 16, 64, 256, 1024, 2048)
        if n <= s // 2 and b * n <= 16384
    ),
    *(
        _decode(
            f"8x8192-chunk{n}-page-{size}", (8192,) * 8, "decode decode-chunks",
            series=f"chunk{n}-pages", seqlen_q=n, page_size=size,
        )
        for n in (8, 64, 1024)
        for size in (1, 8, 64, 256)
    ),
    *(
        _decode(
            f"8x8192-chunk{n}-{q}/{kv}-d{d}", (8192,) * 8, "decode decode-chunks", (q, kv, d),
            series=f"chunk{n}-heads", seqlen_q=n,
        )
        for n in (8, 64, 1024)
        for q, kv, d in ((32, 32, 128), (64, 8, 128), (32, 8, 64), (16, 4, 256))
    ),
    *(
        _decode(
            f"{b}x{s}-chunk{n}-fp8", (s,) * b, "decode decode-chunks", series="chunks-fp8", seqlen_q=n,
            cache_dtype=FP8,
        )
        for b, s, n in ((8, 8192, 8), (32, 4096, 8), (8, 8192, 64), (32, 4096, 64), (1, 32768, 256))
    ),
    _decode("cascade-64x32768", (32768 + 128,) * 64, "decode decode-cascade", prefix=32768),
    # score_mod and mask_mod functions as users of FlexAttention write them
    *chain.from_iterable(
        _dense(f"masks-{name}", (2048, 4096, 8192, 16384), PAPER_TOKENS, "masks", WIDE_HEADS, mod=name)
        for name in mods.MODS
        if name not in ("tree", "window-by-head", "pictures", "pictures-window-1024")  # they have their own
    ),
    # Text and pictures: Gemma 4's local layers; Gemma 3's global ones; and a mask on heads of 512
    *_dense(
        "pictures-local", (4096, 16384), PAPER_TOKENS, "pictures", (16, 8, 256), mod="pictures-window-1024"
    ),
    *_dense("pictures-global", (4096, 16384), PAPER_TOKENS, "pictures", (16, 8, 256), mod="pictures"),
    *_dense("pictures-d512", (4096, 16384), PAPER_TOKENS, "pictures", (16, 2, 512), mod="pictures"),
    # Gemma 4's global layers, which are causal
    *_dense("pictures-causal", (4096, 16384), PAPER_TOKENS, "pictures", (16, 2, 512), causal=True),
    # Eight answers of 512 to 2048 tokens to one prompt, as in GRPO
    *(
        Workload(
            f"tree-{prompt}-d{d}", f"tree-d{d}", 1, *2 * (prompt + sum(mods.ANSWERS),), PAPER_HIDDEN // d,
            PAPER_HIDDEN // d // 4, d, mod="tree", tags=("tree",),
        )
        for d in PAPER_HEAD_DIMS
        for prompt in (1024, 4096, 16384)
    ),
    # Absorbed MLA of DeepSeek's models with all 128 heads and with 16: decoding, and prompts over pages
    *(
        _decode(
            f"mla-{b}x{s}-h{h}", (s,) * b, "mla mla-decode", (h, 1, 576), series=f"mla-{b}x-h{h}",
            page_size=64, **LATENT,
        )
        for h in (16, 128)
        for b, s in (
            (1, 1024), (1, 8192), (1, 32768), (8, 4096), (8, 32768), (32, 8192), (64, 1024), (64, 4096),
            (64, 32768),
        )
    ),
    *(
        _decode(
            f"mla-{b}x{s}-h{h}-q{n}", (s,) * b, "mla mla-tokens", (h, 1, 576),
            series=f"mla-tokens-h{h}", seqlen_q=n, page_size=64, **LATENT,
        )
        for h in (16, 128)
        for b, s, n in ((8, 4096, 4), (4, 4096, 256), (1, 8192, 2048), (1, 32768, 1024))
    ),
    # Heads wider than 256
    *chain.from_iterable(
        _dense(
            f"wide-d{d}{suffix}", (1024, 4096), PAPER_TOKENS, "wide", (4, 4, d), head_dim_v=d_v, causal=causal
        )
        for d, d_v in ((320, 320), (512, 512), (576, 512))
        for suffix, causal in MASKS
    ),
    # Heads of tabular models (16) and of small vision models (32)
    *chain.from_iterable(
        _dense(
            f"small-d{d}{suffix}", (1024, 2048, 4096, 8192), PAPER_TOKENS, "small-heads",
            (SMALL_HIDDEN // d, SMALL_HIDDEN // d, d), causal=causal,
        )
        for d in (16, 32)
        for suffix, causal in MASKS
    ),
    # Attention weights: all, summed over queries, the largest of each query
    *chain.from_iterable(
        _dense(
            f"weights-{form}", (512, 2048, 8192), PAPER_TOKENS, "weights", (16, 16, 64), causal=True,
            weights=form,
        )
        for form in ("full", "columns", "top")
    ),
    # Statistics of the scores, beside the same call without them
    *chain.from_iterable(
        _dense(
            f"statistics-d{d}{suffix}", (1024, 2048, 4096, 8192, 16384), PAPER_TOKENS, "statistics",
            (PAPER_HIDDEN // d, PAPER_HIDDEN // d, d), causal=causal, statistics=True,
        )
        for d in PAPER_HEAD_DIMS
        for suffix, causal in MASKS
    ),
    *(
        _lengths(
            f"statistics-{name}", _documents(least, most), "statistics", (32, 8, 128), causal=True,
            window_left=window - 1, statistics=True,
        )
        for name, least, most, window in (
            ("tuning", 40, 4000, 0), ("chat", 16, 128, 0), ("window", 40, 4000, 1024)
        )
    ),
    # Forward mode, as in losses of MeanFlow
    *chain.from_iterable(
        _dense(
            f"jvp-d{d}{suffix}", (1024, 2048, 4096, 8192), PAPER_TOKENS, "jvp",
            (PAPER_HIDDEN // d, PAPER_HIDDEN // d, d), causal=causal, tangents=True,
        )
        for d in PAPER_HEAD_DIMS
        for suffix, causal in MASKS
    ),
    # Prompts, steps, and steps with a chunk of a prompt, whose rows have the same bits in every batch
    *(
        _lengths(
            f"invariant-{b}x{s}", _square(*(s,) * b), "invariant", (32, 8, 128), "invariant-prompts",
            causal=True, invariant=True,
        )
        for b, s in ((4, 2048), (2, 4096), (1, 8192))
    ),
    *(
        _decode(f"invariant-{b}x{s}", (s,) * b, "invariant", series="invariant", invariant=True)
        for b, s in ((64, 1024), (64, 8192), (8, 8192))
    ),
    *(
        _lengths(
            f"decode-invariant-{b}x1024-chunk{n}", ((n, 1024), *((1, 1024),) * b), "invariant", (32, 8, 128),
            "decode-invariant-chunk", causal=True, cache=KVCache(), invariant=True,
        )
        for b, n in ((63, 512), (31, 1024))
    ),
    # A step that adds the mass of keys, beside the same step without it
    *(
        _decode(
            f"mass-{b}x{s}-{q}/{kv}", (s,) * b, "mass", (q, kv, 128), series=f"mass-{b}x-{q}/{kv}", mass=True
        )
        for q, kv in ((32, 8), (32, 32), (64, 8))
        for b, s in ((1, 8192), (1, 131072), (8, 65536), (32, 4096), (128, 4096))
    ),
    _decode("mass-32x4096-fp8", CONTEXTS, "mass", cache_dtype=FP8, mass=True),
    _decode("mass-32x4096-prefix", CONTEXTS, "mass", prefix=2048, mass=True),
    *(_decode(f"mass-32x4096-q{n}", CONTEXTS, "mass", seqlen_q=n, mass=True) for n in (4, 64)),
    # Sized for two cores
    *_dense("cpu-d64", (512, 1024, 2048, 4096), 0, "cpu", (8, 8, 64), **FLOAT32),
    *_dense("cpu-d64-causal", (512, 1024, 2048, 4096), 0, "cpu", (8, 8, 64), causal=True, **FLOAT32),
    *_dense("cpu-d128-gqa-causal", (1024,), 0, "cpu", (8, 2, 128), causal=True, **FLOAT32),
    *_dense("cpu-gpt2", (1024,), 0, "cpu-gpt2", (12, 12, 64), causal=True, **FLOAT32),
    *_dense("cpu-window-causal", (2048,), 0, "cpu", (8, 8, 64), causal=True, window_left=255, **FLOAT32),
    # Runs in seconds on two cores: calls of every kind, mostly with lengths that are not powers of two
    *_dense("ci-full", (96, 160), 192, "ci", (2, 2, 32), **FLOAT32),
    *_dense("ci-causal", (96, 160), 192, "ci", (2, 2, 32), causal=True, **FLOAT32),
    *_dense("ci-gqa", (113,), 226, "ci", (4, 2, 40), causal=True, **FLOAT32),
    *_dense("ci-window", (150,), 0, "ci", (2, 1, 16), causal=True, window_left=31, **FLOAT32),
    *_dense("ci-softcap", (100,), 0, "ci", (2, 2, 64), softcap=5.0, **FLOAT32),
    *_dense("ci-alibi", (90,), 180, "ci", (4, 2, 16), causal=True, alibi=True, **FLOAT32),
    *_dense("ci-sink", (70,), 0, "ci", (4, 2, 48), head_dim_v=32, sink=True, **FLOAT32),
    Workload("ci-chunk", "ci-chunk", 2, 40, 130, 2, 2, 32, "float32", causal=True, tags=("ci",)),
    _lengths("ci-varlen", [(50, 50), (1, 70), (33, 20), (0, 9)], "ci", (2, 1, 32), causal=True, **FLOAT32),
    *_dense("ci-masks-both", (160,), 320, "ci-masks", (4, 2, 32), mod="relative-document", **FLOAT32),
    *_dense("ci-masks-natten", (128,), 0, "ci-masks", (2, 2, 32), mod="natten", **FLOAT32),
    *_dense("ci-pictures", (300,), 0, "ci-masks", (4, 2, 32), mod="pictures-window-1024", **FLOAT32),
    *_dense("ci-tree", (300,), 0, "ci-tree", (4, 2, 32), mod="tree", **FLOAT32),
    *_dense("ci-fp8-causal", (150,), 300, "ci-fp8", (4, 2, 32), causal=True, dtype=FP8),
    _lengths("ci-fp8-varlen", [(50, 50), (1, 170), (0, 9)], "ci-fp8", (2, 1, 64), dtype=FP8),
    _decode("ci-mla", (70, 70), "ci-mla", (4, 1, 40), latent=True, head_dim_v=24, **FLOAT32),
    _decode(
        "ci-mla-prompt", (70, 30), "ci-mla", (4, 1, 40), seqlen_q=20, latent=True, head_dim_v=24, **FLOAT32
    ),
    *chain.from_iterable(
        _dense(
            f"ci-weights-{form}", (70,), 140, "ci-weights", (4, 2, 32), causal=True, weights=form, **FLOAT32
        )
        for form in ("full", "columns", "top")
    ),
    *_dense("ci-statistics", (70,), 140, "ci-statistics", (4, 2, 32), statistics=True, **FLOAT32),
    _lengths(
        "ci-statistics-varlen", [(50, 50), (1, 70), (0, 9)], "ci-statistics", (2, 1, 32), causal=True,
        statistics=True, **FLOAT32,
    ),
    *_dense("ci-jvp", (70,), 140, "ci-jvp", (4, 2, 32), causal=True, tangents=True, **FLOAT32),
    _lengths("ci-jvp-varlen", [(50, 50), (1, 70), (0, 9)], "ci-jvp", (2, 1, 32), tangents=True, **FLOAT32),
    _decode("ci", (70, 9, 130), "ci-decode", (4, 2, 32), **FLOAT32),
    _decode("ci-dense", (70, 9, 130), "ci-decode", (4, 2, 32), seqlen_q=3, page_size=0, **FLOAT32),
    _decode("ci-fp8", (70, 9, 130), "ci-decode", (4, 2, 32), cache_dtype=FP8),
    _decode("ci-prefix", (80, 70), "ci-decode", (4, 2, 32), prefix=64, **FLOAT32),
    _decode("ci-mass", (70, 9, 130), "ci-mass", (4, 2, 32), mass=True, **FLOAT32),
    _lengths(
        "ci-invariant", _square(50, 9), "ci-invariant", (4, 2, 32), causal=True, invariant=True, **FLOAT32
    ),
    _lengths(
        "decode-ci-invariant", [(1, 70), (9, 9), (1, 130)], "ci-invariant", (4, 2, 32), causal=True,
        cache=KVCache(), invariant=True, **FLOAT32,
    ),
    *drawn.small_workloads(),
)  # fmt: skip

WORKLOADS: tuple[Workload, ...] = (*FIXED, *drawn.workloads(seed=0))

TAGS: tuple[str, ...] = tuple(dict.fromkeys(tag for workload in WORKLOADS for tag in workload.tags))


def small_call(kind: str, device_type: str) -> Workload:
    """Return a small workload of a kind, whose time on the GPU is shorter than the host time of its call."""
    dtype = FP8 if kind == "fp8" else "bfloat16" if device_type == "cuda" else "float32"
    if kind in ("decode", "mass"):
        return _decode("small", (256, 256), "", (8, 8, 64), prefix=128, mass=kind == "mass", dtype=dtype)
    mod = {"masks": "relative-document", "tree": "tree"}.get(kind, "")
    weights = "columns" if kind == "weights" else ""
    return Workload(
        "small-call", "small-call", 1, 128, 128, 8, 8, 64, dtype, causal=not mod, mod=mod, weights=weights,
        statistics=kind == "statistics", tangents=kind == "jvp", invariant=kind == "invariant",
        lengths=((128, 128),) if kind == "invariant" else None,  # only packed prompts have the option
    )  # fmt: skip
