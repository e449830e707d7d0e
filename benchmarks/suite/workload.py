"""One attention call without its data, with its FLOPs and bytes.

FLOPs are counted as in the FlashAttention papers. The two matrix products of the forward pass have
``4 * batch * heads * seqlen_q * seqlen_k * head_dim`` FLOPs, and the five of the backward pass have 2.5 times
as many. Causal attention with seqlen_q = seqlen_k has half of these FLOPs. Other masks and sequences of
different lengths are counted by their visible (query, key) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.suite import mods
from flashtile.hardware.calls import Call
from flashtile.hardware.timing import FP8
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masking import Masking

L2_BYTES = 1e9
"""Bytes of KV caches to rotate over, so each cache has left the GPU's L2 cache when it is read again."""
MAX_COPIES = 16
"""Maximum number of copies of a KV cache to rotate over."""


@dataclass(frozen=True)
class KVCache:
    """Layout of the KV cache of a decoding call.

    Args:
        page_size: tokens per page; 0 is a dense cache.
        dtype: "float8_e4m3fn", or None for the dtype of q.
        prefix: length of the prefix that all sequences share, in tokens.
    """

    page_size: int = 16
    dtype: str | None = None
    prefix: int = 0


@dataclass(frozen=True)
class Workload:
    """One attention call without its data.

    Args:
        name: unique name.
        series: common name of workloads that differ only in sequence length; a series is one line of a plot.
        batch, seqlen_q, seqlen_k: sizes. With ``lengths``, ``seqlen_q`` and ``seqlen_k`` are the longest
            lengths.
        window_left: number of keys that a query sees before its own position; -1 is unlimited.
        lengths: (seqlen_q, seqlen_k) of each sequence of a packed batch or of a decoding call; None if all
            sequences have the same length. A decoding call with different seqlen_q has packed queries.
        mod: name of score and mask functions in :data:`benchmarks.suite.mods.MODS`; "" is none.
        cache: layout of the KV cache if the call is decoding, where ``seqlen_q`` new tokens of each sequence
            attend to cached keys; None otherwise.
        head_dim_v: head size of v and out; None is ``head_dim``.
        latent: absorbed multi-head latent attention (MLA): v is the last ``head_dim_v`` columns of k, and
            these columns are stored once.
        weights: which attention weights the call also returns: "full" (all), "columns" (sums over queries),
            "top" (the largest of each query), or "" for none.
        statistics: whether the largest scores and the entropy are measured beside the call without them.
        tangents: whether q, k and v have tangents, and the call computes that of out (forward mode).
        mass: whether decoding that adds the mass of keys is measured beside the step without it.
        invariant: whether calls whose rows have the same bits in every batch are measured beside usual ones.
        alibi, sink: whether the call has ALiBi slopes, and a learned sink per head.
        drawn_from: name of the class that the workload was drawn from (:mod:`benchmarks.suite.drawn`), or "".
        tags: names of the sets that the workload belongs to.
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
    cache: KVCache | None = None
    mod: str = ""
    head_dim_v: int | None = None
    alibi: bool = False
    sink: bool = False
    latent: bool = False
    weights: str = ""
    statistics: bool = False
    tangents: bool = False
    mass: bool = False
    invariant: bool = False
    drawn_from: str = ""
    tags: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Kind of workload, which determines the contestants: "attention", "masks", "tree", "weights",
        "statistics", "jvp", "fp8", "mass", "invariant" or "decode"."""
        if self.mod:
            return "tree" if self.mod == "tree" else "masks"
        if self.weights:
            return "weights"
        if self.statistics:
            return "statistics"
        if self.tangents:
            return "jvp"
        if self.mass:
            return "mass"
        if self.invariant:
            return "invariant"
        return "decode" if self.cache is not None else "fp8" if self.fp8 else "attention"

    @property
    def masking(self) -> Masking:
        return Masking(window_left=self.window_left, window_right=0 if self.causal else UNLIMITED)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def cache_dtype(self) -> torch.dtype:
        return getattr(torch, (self.cache and self.cache.dtype) or self.dtype)

    @property
    def fp8(self) -> bool:
        return self.dtype == FP8

    @property
    def source_dtype(self) -> torch.dtype:
        """Dtype of the inputs before quantisation, and of the output."""
        return torch.bfloat16 if self.fp8 else self.torch_dtype

    @property
    def width_v(self) -> int:
        """Head size of v and out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def own_columns(self) -> int:
        """Number of columns of q and k, without the columns that k shares with v in absorbed MLA."""
        return self.head_dim - self.width_v if self.latent else self.head_dim

    @property
    def group_size(self) -> int:
        return self.num_heads_q // self.num_heads_kv

    @property
    def changes_scores(self) -> bool:
        """Whether a soft-cap, ALiBi or a sink changes scores or the softmax."""
        return bool(self.softcap or self.alibi or self.sink)

    @property
    def varlen(self) -> bool:
        """Whether the sequences of q, and those of k unless it is a cache, are packed."""
        if self.lengths is None:
            return False
        return self.cache is None or len({seqlen_q for seqlen_q, _ in self.lengths}) > 1

    @property
    def window_right(self) -> int:
        return 0 if self.causal else UNLIMITED

    @property
    def call(self) -> Call:
        """The workload as a call of the I/O model, which counts visible (query, key) pairs and bytes."""
        return Call(
            self.batch, self.seqlen_q, self.seqlen_k, self.num_heads_q, self.num_heads_kv, self.head_dim,
            self.head_dim_v, self.dtype, lengths=self.lengths,
            page_size=None if self.cache is None else self.cache.page_size,
            cache_dtype=None if self.cache is None else self.cache.dtype,
            **vars(self.masking),
        )  # fmt: skip

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(seqlen_q, seqlen_k) of each sequence."""
        return self.call.sequences

    @property
    def mask(self) -> str:
        """Describe the mask in words, for tables and plots."""
        words = [self.mod] if self.mod else ["causal" if self.causal else "full"]
        words += [f"window {self.window_left + 1}"] if self.window_left != UNLIMITED else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        words += ["ALiBi"] if self.alibi else []
        words += ["sink"] if self.sink else []
        words += ["varlen"] if self.varlen else []
        words += ["absorbed MLA"] if self.latent else []
        words += [f"weights: {self.weights}"] if self.weights else []
        words += ["tangents"] if self.tangents else []
        if self.cache is not None:
            words.append(f"pages of {self.cache.page_size}" if self.cache.page_size else "dense cache")
            words += [f"cache in {self.cache.dtype}"] if self.cache.dtype else []
            words += [f"shared prefix {self.cache.prefix}"] if self.cache.prefix else []
        return ", ".join(words)

    @property
    def shape(self) -> str:
        """Describe the shape in words: batch, lengths, heads, head size, dtype."""
        lengths = str(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}/{self.seqlen_k}"
        heads = str(self.num_heads_q) if self.group_size == 1 else f"{self.num_heads_q}/{self.num_heads_kv}"
        width = str(self.head_dim) if self.head_dim_v is None else f"({self.head_dim}, {self.head_dim_v})"
        longest = "up to " if len(set(self.sequences)) > 1 else ""
        return f"B {self.batch}, S {longest}{lengths}, H {heads}, D {width}, {self.dtype}"

    def visible_pairs(self) -> int:
        """Number of visible (query, key) pairs of one head, summed over the batch.

        A causal sequence with seqlen_q = seqlen_k and no window counts as seqlen^2 / 2 pairs, as in the
        papers.
        """
        if self.mod:
            return self.batch * mods.visible_pairs(self.mod, self.seqlen_q)
        square = self.seqlen_q == self.seqlen_k and self.lengths is None
        if square and self.causal and self.window_left == UNLIMITED:
            return self.batch * self.seqlen_q * self.seqlen_k // 2
        return self.call.visible_pairs // self.num_heads_q

    def flops(self, which: str = "forward") -> float:
        """Return the number of floating-point operations of a pass."""
        pair = 2.0 * self.visible_pairs() * self.num_heads_q  # FLOPs of a matrix product with head_dim 1
        # In forward mode, Q' K^T, Q K'^T, P' V and P V' are computed as well.
        forward = pair * (self.head_dim + self.width_v) * (3 if self.tangents else 1)
        backward = pair * (3 * self.head_dim + 2 * self.width_v)
        both = forward + backward
        return {"forward": forward, "backward": backward, "both": both, "graph": forward}[which]

    def bytes(self, which: str = "forward") -> int:
        """Return the minimum memory traffic of a pass in bytes.

        Each input is read once, and each result is written once. A shared prefix is read once for all
        sequences.
        """
        call = self.call
        out = call.rows_q * self.width_v * self.source_dtype.itemsize
        forward = (call.q_bytes + out + self.kv_bytes() + call.lse_bytes) * (2 if self.tangents else 1)
        # reads q, k, v, out, dout and lse; writes dq, dk and dv
        backward = 2 * (call.q_bytes + out + self.kv_bytes()) + call.lse_bytes
        both = forward + backward
        return {"forward": forward, "backward": backward, "both": both, "graph": forward}[which]

    def kv_bytes(self) -> int:
        """Return the size of the keys and values in bytes. A shared prefix is counted once."""
        prefix = self.cache.prefix if self.cache is not None else 0
        tokens = prefix + sum(seqlen_k - prefix for _, seqlen_k in self.sequences)
        return tokens * self.num_heads_kv * (self.own_columns + self.width_v) * self.cache_dtype.itemsize

    def resident_bytes(self) -> int:
        """Return the size in bytes of q, k, v, out, their gradients and lse, which both passes hold."""
        return self.bytes("backward")

    @property
    def copies(self) -> int:
        """Number of copies of the KV cache; 1 unless the cache is paged.

        Measurements rotate over the copies, so that reads miss the L2 cache.
        """
        paged = self.cache is not None and self.cache.page_size
        return max(1, min(MAX_COPIES, round(L2_BYTES / self.kv_bytes()))) if paged else 1
