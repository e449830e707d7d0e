"""Named attention calls, shared by tests, benchmarks and tuning, with their FLOPs and bytes.

FLOPs follow the FlashAttention papers: ``4 * batch * heads * seqlen_q * seqlen_k * head_dim`` forward (two
matrix products), 2.5 times that backward (five), half of either for causal attention of a square. Windows,
sequences of different lengths and causal masks over a rectangle are counted by their visible (query, key)
pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashtile.problem import UNLIMITED
from flashtile.testing import cu_seqlens, random_tensor

PASSES = ("forward", "backward", "both")
FP8 = "float8_e4m3fn"
"""Inputs are bfloat16, and attention is over what a contestant quantises them to; so is the output."""
DTYPES = ("float16", "bfloat16", "float32", "float64", FP8)

PAPER_TOKENS = 16384
PAPER_HIDDEN = 2048
PAPER_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
PAPER_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class Workload:
    """One attention call without its data.

    Args:
        name: unique.
        series: what workloads that differ in sequence length only have in common; one line of a plot.
        batch, seqlen_q, seqlen_k: the longest sequences when ``lengths`` is given.
        window_left: keys that a query sees before its own position; -1 is unlimited.
        lengths: (seqlen_q, seqlen_k) of each sequence of a variable-length batch; None is a dense batch.
        tags: names of the sets that it belongs to.
    """

    name: str
    series: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    window_left: int = UNLIMITED
    softcap: float = 0.0
    lengths: tuple[tuple[int, int], ...] | None = None
    tags: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def fp8(self) -> bool:
        return self.dtype == FP8

    @property
    def source_dtype(self) -> torch.dtype:
        """Of the inputs as they are made, and of the output."""
        return torch.bfloat16 if self.fp8 else self.torch_dtype

    @property
    def group_size(self) -> int:
        return self.num_heads_q // self.num_heads_kv

    @property
    def varlen(self) -> bool:
        return self.lengths is not None

    @property
    def window_right(self) -> int:
        return 0 if self.causal else UNLIMITED

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(seqlen_q, seqlen_k) of each sequence."""
        return ((self.seqlen_q, self.seqlen_k),) * self.batch if self.lengths is None else self.lengths

    @property
    def mask(self) -> str:
        """The mask in words, for tables and plots."""
        words = ["causal" if self.causal else "full"]
        words += [f"window {self.window_left + 1}"] if self.window_left != UNLIMITED else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        words += ["varlen"] if self.varlen else []
        return ", ".join(words)

    @property
    def shape(self) -> str:
        """The shape in words: batch, lengths, heads, head size, dtype."""
        lengths = str(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}/{self.seqlen_k}"
        heads = str(self.num_heads_q) if self.group_size == 1 else f"{self.num_heads_q}/{self.num_heads_kv}"
        longest = "up to " if self.varlen else ""
        return f"B {self.batch}, S {longest}{lengths}, H {heads}, D {self.head_dim}, {self.dtype}"

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head over the batch; seqlen^2 / 2 each for a dense causal square."""
        square = self.seqlen_q == self.seqlen_k and not self.varlen
        if square and self.causal and self.window_left == UNLIMITED:
            return self.batch * self.seqlen_q * self.seqlen_k // 2
        return sum(
            _visible_pairs(seqlen_q, seqlen_k, self.window_left, self.window_right)
            for seqlen_q, seqlen_k in self.sequences
        )

    def flops(self, which: str = "forward") -> float:
        """Floating-point operations of a pass: "forward", "backward", or "both" together."""
        forward = 4.0 * self.visible_pairs() * self.num_heads_q * self.head_dim
        return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[which]

    def bytes(self, which: str = "forward") -> int:
        """The least HBM traffic of a pass: every input read once and every result written once."""
        rows_q = sum(seqlen_q for seqlen_q, _ in self.sequences) * self.num_heads_q
        rows_kv = sum(seqlen_k for _, seqlen_k in self.sequences) * self.num_heads_kv
        q, kv = (rows * self.head_dim * self.torch_dtype.itemsize for rows in (rows_q, rows_kv))
        lse = rows_q * 4
        out = rows_q * self.head_dim * self.source_dtype.itemsize
        forward = q + out + 2 * kv + lse
        backward = 4 * q + 4 * kv + lse  # q, k, v, out, dout, lse in; dq, dk, dv out
        return {"forward": forward, "backward": backward, "both": forward + backward}[which]

    def resident_bytes(self) -> int:
        """q, k, v, out, their gradients and lse: what forward and backward together cannot do without."""
        return self.bytes("backward")


@dataclass(frozen=True)
class Inputs:
    """Data of a workload: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


def make_inputs(workload: Workload, device: torch.device | str, seed: int = 0) -> Inputs:
    """Standard normal q, k, v and dout, contiguous, from a fixed seed."""

    def normal(seqlen: int, side: int, heads: int, number: int) -> Tensor:
        rows = (
            (sum(pair[side] for pair in workload.sequences),) if workload.varlen else (workload.batch, seqlen)
        )
        return random_tensor(
            (*rows, heads, workload.head_dim), workload.source_dtype, device, seed=4 * seed + number
        )

    offsets = [cu_seqlens([pair[side] for pair in workload.sequences], device) for side in (0, 1)]
    return Inputs(
        q=normal(workload.seqlen_q, 0, workload.num_heads_q, 0),
        k=normal(workload.seqlen_k, 1, workload.num_heads_kv, 1),
        v=normal(workload.seqlen_k, 1, workload.num_heads_kv, 2),
        dout=normal(workload.seqlen_q, 0, workload.num_heads_q, 3),
        cu_seqlens_q=offsets[0] if workload.varlen else None,
        cu_seqlens_k=offsets[1] if workload.varlen else None,
    )


def select(
    names: Sequence[str], *, head_dims: Sequence[int] = (), dtype: str | None = None
) -> tuple[Workload, ...]:
    """Workloads whose name, series or tag is among ``names``, in order of definition.

    Args:
        names: names, series or tags.
        head_dims: keep these head sizes only; empty keeps all.
        dtype: replaces the dtype of each.

    Raises:
        ValueError: a name that nothing has, or a dtype that is none.
    """
    for name in names:
        if not any(name in (w.name, w.series, *w.tags) for w in WORKLOADS):
            raise ValueError(
                f"workload must be a name, a series or one of the tags {', '.join(TAGS)}, got {name!r}"
            )
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    chosen = [w for w in WORKLOADS if not set(names).isdisjoint((w.name, w.series, *w.tags))]
    chosen = [w for w in chosen if not head_dims or w.head_dim in head_dims]
    return tuple(chosen if dtype is None else (replace(w, dtype=dtype) for w in chosen))


def _visible_pairs(seqlen_q: int, seqlen_k: int, window_left: int, window_right: int) -> int:
    """Visible (query, key) pairs of one sequence, aligned to the bottom right."""
    position = torch.arange(seqlen_q) + seqlen_k - seqlen_q
    first = position.sub(window_left).clamp(min=0) if window_left != UNLIMITED else torch.zeros_like(position)
    after = position + window_right + 1 if window_right != UNLIMITED else torch.full_like(position, seqlen_k)
    return int((after.clamp(max=seqlen_k) - first).clamp(min=0).sum())


def _dense(series: str, seqlens: Iterable[int], tokens: int, tags: str, heads: tuple[int, int, int], **more):
    """Workloads of ``tokens`` tokens each; heads is (heads_q, heads_kv, head_dim)."""
    return [
        Workload(
            f"{series}-s{s}", series, max(1, tokens // s), s, s, *heads, tags=tuple(tags.split()), **more
        )
        for s in seqlens
    ]


def _varlen(series: str, lengths: Sequence[tuple[int, int]], tags: str, heads: tuple[int, int, int], **more):
    longest_q, longest_k = (max(pair[side] for pair in lengths) for side in (0, 1))
    return Workload(
        series, series, len(lengths), longest_q, longest_k, *heads,
        lengths=tuple(lengths), tags=tuple(tags.split()), **more,
    )  # fmt: skip


def log_uniform_lengths(total: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths between ``shortest`` and ``longest``, evenly many in each octave, of ``total`` together; the
    last may be shorter."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        length = round(shortest * (longest / shortest) ** draw.random())
        lengths.append(min(length, left))
    return lengths


def _square(*lengths: int) -> list[tuple[int, int]]:
    return [(length, length) for length in lengths]


def _paper() -> list[Workload]:
    """The grid of Shah et al. 2024 (FlashAttention-3, arXiv:2407.08608), section 4.1."""
    return [
        workload
        for head_dim in PAPER_HEAD_DIMS
        for causal in (False, True)
        for workload in _dense(
            f"paper-d{head_dim}{'-causal' if causal else ''}",
            PAPER_SEQLENS,
            PAPER_TOKENS,
            "paper",
            (PAPER_HIDDEN // head_dim, PAPER_HIDDEN // head_dim, head_dim),
            causal=causal,
        )
    ]


def _models() -> list[Workload]:
    """Attention of known models: heads, head sizes and masks from their published configurations."""
    return [
        *_dense("llama3-8b", (2048, 8192, 16384), 16384, "llama models", (32, 8, 128), causal=True),
        Workload(
            "llama3-8b-chunk",
            "llama3-8b-chunk",
            2,
            2048,
            8192,
            32,
            8,
            128,
            causal=True,
            tags=("llama", "models"),
        ),
        *_dense("qwen2.5-7b", (4096, 16384), 16384, "qwen models", (28, 4, 128), causal=True),
        *_dense("qwen3-0.6b", (4096,), 16384, "qwen models", (16, 8, 128), causal=True),
        *_dense("gpt2", (1024,), 16384, "gpt2 models", (12, 12, 64), causal=True),
        *_dense(
            "mixtral-window",
            (8192, 16384),
            16384,
            "mixtral window models",
            (32, 8, 128),
            causal=True,
            window_left=4095,
        ),
        *_dense("gemma2-2b", (8192,), 16384, "gemma models", (8, 4, 256), causal=True, softcap=50.0),
        _varlen(
            "llama3-8b-varlen",
            _square(8192, 37, 4096, 64, 2048, 128, 1024, 27, 512, 256),
            "varlen llama models",
            (32, 8, 128),
            causal=True,
        ),
        _varlen(
            "bert-varlen",
            _square(*(64 + (index * 149) % 449 for index in range(56))),
            "varlen models",
            (16, 16, 64),
        ),
    ]


def _windows() -> list[Workload]:
    """What a window saves of a long sequence; many tokens."""
    heads = (16, 16, 128)
    return [
        *_dense("window-none", (16384,), PAPER_TOKENS, "windows", heads, causal=True),
        *_dense("window-1024", (16384,), PAPER_TOKENS, "windows", heads, causal=True, window_left=1023),
        *_dense("batch16-causal", (8192,), 16 * 8192, "batch16", heads, causal=True),
    ]


def _ragged() -> list[Workload]:
    """Log-uniform lengths, beside equal ones of as many tokens and about as many pairs."""
    heads = (16, 16, 128)
    lengths = log_uniform_lengths(PAPER_TOKENS, 64, 8192)
    batch = round(PAPER_TOKENS**2 / sum(length**2 for length in lengths))
    return [
        workload
        for suffix, causal in (("", False), ("-causal", True))
        for workload in (
            _varlen(f"ragged{suffix}", _square(*lengths), "lengths", heads, causal=causal),
            *_dense(
                f"ragged-equal{suffix}",
                (PAPER_TOKENS // batch,),
                PAPER_TOKENS,
                "lengths",
                heads,
                causal=causal,
            ),
        )
    ]


def _dtypes() -> list[Workload]:
    """The same calls in bf16 and in fp16."""
    return [
        workload
        for dtype in ("bfloat16", "float16")
        for head_dim in PAPER_HEAD_DIMS
        for suffix, causal in (("", False), ("-causal", True))
        for workload in _dense(
            f"{dtype}-d{head_dim}{suffix}",
            (2048, 8192),
            PAPER_TOKENS,
            "dtypes",
            (PAPER_HIDDEN // head_dim, PAPER_HIDDEN // head_dim, head_dim),
            causal=causal,
            dtype=dtype,
        )
    ]


def _fp8() -> list[Workload]:
    """The FlashAttention-3 paper's grid in e4m3."""
    return [
        workload
        for head_dim in PAPER_HEAD_DIMS
        for suffix, causal in (("", False), ("-causal", True))
        for workload in _dense(
            f"fp8-d{head_dim}{suffix}",
            (4096, 8192, 16384),
            PAPER_TOKENS,
            "fp8",
            (PAPER_HIDDEN // head_dim, PAPER_HIDDEN // head_dim, head_dim),
            causal=causal,
            dtype=FP8,
        )
    ]


def _cpu() -> list[Workload]:
    """Sized for two cores."""
    float32 = {"dtype": "float32"}
    return [
        *_dense("cpu-d64", (512, 1024, 2048, 4096), 0, "cpu", (8, 8, 64), **float32),
        *_dense("cpu-d64-causal", (512, 1024, 2048, 4096), 0, "cpu", (8, 8, 64), causal=True, **float32),
        *_dense("cpu-d128-gqa-causal", (1024,), 0, "cpu", (8, 2, 128), causal=True, **float32),
        *_dense("cpu-window-causal", (2048,), 0, "cpu", (8, 8, 64), causal=True, window_left=255, **float32),
    ]


def _ci() -> list[Workload]:
    """Seconds on two cores; every kind of call once, lengths that are no powers of two."""
    float32 = {"dtype": "float32"}
    return [
        *_dense("ci-full", (96, 160), 192, "ci", (2, 2, 32), **float32),
        *_dense("ci-causal", (96, 160), 192, "ci", (2, 2, 32), causal=True, **float32),
        *_dense("ci-gqa", (113,), 226, "ci", (4, 2, 40), causal=True, **float32),
        *_dense("ci-window", (150,), 0, "ci", (2, 1, 16), causal=True, window_left=31, **float32),
        *_dense("ci-softcap", (100,), 0, "ci", (2, 2, 64), softcap=5.0, **float32),
        Workload("ci-chunk", "ci-chunk", 2, 40, 130, 2, 2, 32, "float32", causal=True, tags=("ci",)),
        _varlen("ci-varlen", [(50, 50), (1, 70), (33, 20), (0, 9)], "ci", (2, 1, 32), causal=True, **float32),
        *_dense("ci-fp8-causal", (150,), 300, "ci-fp8", (4, 2, 32), causal=True, dtype=FP8),
        _varlen("ci-fp8-varlen", [(50, 50), (1, 170), (0, 9)], "ci-fp8", (2, 1, 64), dtype=FP8),
    ]


WORKLOADS: tuple[Workload, ...] = (
    *_paper(),
    *_models(),
    *_windows(),
    *_ragged(),
    *_dtypes(),
    *_fp8(),
    *_cpu(),
    *_ci(),
)

TAGS: tuple[str, ...] = tuple(dict.fromkeys(tag for workload in WORKLOADS for tag in workload.tags))

SMALL_CALL = Workload("small-call", "small-call", 1, 128, 128, 8, 8, 64, causal=True)
"""A call whose GPU time is below its host time: what host time is measured on."""
