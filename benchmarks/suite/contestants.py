"""The contestants of a run by kind of workload; :mod:`.peers` has the adapters for attention and masks.

For FP8 all contestants get the same bfloat16 inputs. A contestant that computes in FP8 quantises them to e4m3
with its own scales. Quantisation is not timed, except in ``flashtile-from-bf16``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import flashtile
from benchmarks.suite.inputs import Inputs, residual
from benchmarks.suite.jvp_peers import published
from benchmarks.suite.mods import tree_segments
from benchmarks.suite.peers import (
    FlashAttention,
    Flashtile,
    FlexAttention,
    LoopsOfFlash1,
    Peer,
    PeerCall,
    Sdpa,
    Standard,
    TorchVarlen,
    first_of,
    hidden_scores,
    options,
    repeated,
)
from benchmarks.suite.workload import Workload
from flashtile import fp8
from flashtile.api.tree import tree_attention
from flashtile.problems.common import PREFERENCE, UNLIMITED
from flashtile.problems.fp8_layout import E4M3, E4M3_MAX
from flashtile.testing import cu_seqlens

FROM_BF16 = "flashtile-from-bf16"


class Quantized(Flashtile):
    """flashtile's attention over tensors quantised by :func:`flashtile.fp8.quantize` before timing."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        given = options(workload, inputs)
        sides = {
            side: {
                "cu_seqlens": given.pop(f"cu_seqlens_{side}"),
                "max_seqlen": given.pop(f"max_seqlen_{side}"),
            }
            for side in ("q", "k")
            if workload.varlen
        }
        quantized = [
            fp8.quantize(x, role, **sides.get(side, {}))
            for x, role, side in ((inputs.q, "q", "q"), (inputs.k, "k", "k"), (inputs.v, "v", "k"))
        ]
        attend = partial(fp8.attention, *quantized, **given, backend=self._backend)
        return PeerCall(lambda q, k, v: attend())


class Quantizing(Flashtile):
    """flashtile's attention from bfloat16 tensors; quantisation is timed as well."""

    label = FROM_BF16

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        return PeerCall(partial(fp8.attention, **options(workload, inputs), backend=self._backend))


class InBf16(Flashtile):
    """flashtile's attention in bfloat16, the baseline of FP8."""

    ours = False
    label = "flashtile-bf16"


class FlashAttention3InFp8(FlashAttention):
    """FlashAttention-3 over e4m3 tensors quantised before timing, with a scale for each key head."""

    def __init__(self) -> None:
        super().__init__("fa3-fp8", "flash_attn_interface", UNLIMITED)

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        attend = self.function(workload, inputs)
        for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
            values, scale = by_key_head(x, workload.num_heads_kv)
            descale = {f"{name}_descale": scale.expand(len(workload.sequences), -1)}
            attend = partial(attend, values, **descale)
        return PeerCall(lambda q, k, v: first_of(attend()))


def by_key_head(x: Tensor, heads_kv: int) -> tuple[Tensor, Tensor]:
    """Return x in e4m3 and scales (heads_kv,), one for each key head and the query heads that share it."""
    groups = x.unflatten(-2, (heads_kv, -1)).float()
    others = [dim for dim in range(groups.dim()) if dim != groups.dim() - 3]
    scale = groups.abs().amax(others) / E4M3_MAX
    return (groups / scale[:, None, None]).to(E4M3).flatten(-3, -2), scale


TOP = 8
"""Number of weights returned per query if ``weights`` is "top"."""


class Weighing(Flashtile):
    """flashtile's attention with attention weights, which a second pass over q and k computes."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        form: Any = TOP if workload.weights == "top" else workload.weights
        attend: Any = partial(
            flashtile.attention, **options(workload, inputs), return_attn_weights=form, backend=self._backend
        )
        return PeerCall(lambda q, k, v: first_of(attend(q, k, v)))


class WithMaxLogits(Flashtile):
    """flashtile's attention with the largest score of each head."""

    label = "flashtile-max-logits"
    statistic = "return_max_logits"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        asked = options(workload, inputs) | {self.statistic: True}
        attend: Any = partial(flashtile.attention, **asked, backend=self._backend)
        return PeerCall(lambda q, k, v: first_of(attend(q, k, v)))


class WithEntropy(WithMaxLogits):
    """flashtile's attention with the entropy of each row, which gets no gradient."""

    label = "flashtile-entropy"
    statistic = "return_entropy"


def moving(call: PeerCall, inputs: Inputs) -> PeerCall:
    """Return ``call`` in forward mode: it returns out minus its tangent."""
    tangents = tuple(map(call.arrange, inputs.tangents))
    return replace(call, attend=lambda q, k, v: residual(call.attend, (q, k, v), tangents))


class Moving(Flashtile):
    """flashtile's attention in forward mode."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        return moving(super().prepare(workload, inputs), inputs)


class StandardMoving(Standard):
    """Standard attention in forward mode."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        return moving(super().prepare(workload, inputs), inputs)


class JvpFlashAttention(Peer):
    """Triton kernels of the package jvp_flash_attention."""

    name = "jvp-flash-attention"
    device_type = "cuda"
    needs = ("jvp_flash_attention.jvp_attention", "JVPAttn")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if workload.group_size > 1:
            return "takes as many heads of k and v as of q"
        return "takes no packed sequences" if workload.varlen else None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        attend = importlib.import_module(self.needs[0]).JVPAttn.fwd_dual
        # It copies tensors that are not contiguous in its layout, which is not timed.
        call = PeerCall(partial(attend, causal=workload.causal), heads_first=True, contiguous=True)
        return moving(call, inputs)


class Eager(Standard):
    """Attention as models compute it when weights are requested: all scores stored, softmax in float32."""

    name = "eager"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        hidden, scale = hidden_scores(workload, inputs), workload.head_dim**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (repeated(t, workload) for t in (k, v))
            scores = q @ k.transpose(-2, -1) * scale
            if hidden is not None:
                scores = scores.masked_fill_(hidden, -torch.inf)
            weights = torch.softmax(scores, -1, torch.float32).to(q.dtype)
            if workload.weights == "columns":
                weights.sum(-2, dtype=torch.float32)
            elif workload.weights == "top":
                weights.topk(TOP, -1)
            return weights @ v

        return PeerCall(attend, heads_first=True)


class Decoding(Flashtile):
    """flashtile's decoding over the workload's KV cache."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        return self.over(flashtile.flash_attn_with_kvcache, workload, inputs)

    def over(self, function: Callable[..., Any], workload: Workload, inputs: Inputs, **more: Any) -> PeerCall:
        more |= {"backend": self._backend, **inputs.descales}
        return over_copies(function, workload, inputs, "block_table", **more)


class WithMass(Decoding):
    """flashtile's decoding that adds the mass of each key to a buffer."""

    label = "flashtile-mass"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        mass = torch.zeros(inputs.k.shape[:3], dtype=torch.float32, device=inputs.k.device)
        return self.over(flashtile.flash_attn_with_kvcache, workload, inputs, mass=mass)


class Free(Decoding):
    """flashtile's usual call: packed prompts, or decoding if the workload has a cache."""

    ours = False  # what invariant calls are compared with
    label = "flashtile-free"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        return self.of(workload, inputs)

    def of(self, workload: Workload, inputs: Inputs, **more: Any) -> PeerCall:
        if workload.cache is None:
            return self._call(workload, inputs, **more)
        return self.over(flashtile.flash_attn_with_kvcache, workload, inputs, **more)


class Invariant(Free):
    """The same call with ``invariant=True``.

    It is timed only if its last row has the bits that the row's token has in a call of its own.
    """

    ours = True
    label = "flashtile-invariant"
    split_size: int | None = None
    """Keys of a part in decoding; None is one part."""

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        parts: dict[str, Any] = {} if self.split_size is None else {"split_size": self.split_size}
        call = self.of(workload, inputs, invariant=True, **parts)
        last = len(workload.sequences) - 1
        k, v = (inputs.keys_of(t, last)[None].contiguous() for t in (inputs.k, inputs.v))
        q = inputs.rows_of(inputs.q, last)[-1:]
        alone = flashtile.flash_attn_with_kvcache(
            q[None], k, v, invariant=True, backend=self._backend, **parts
        )
        together = inputs.rows_of(call.attend(inputs.q, inputs.k, inputs.v), last)[-1:]
        if not torch.equal(together, alone[0]):
            raise ArithmeticError("the last row has not the bits that its token alone has")
        return call


class InvariantInParts(Invariant):
    """The same with the keys in parts of one size, so that few long sequences keep the device busy."""

    label = "flashtile-invariant-parts"
    split_size = 1024

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        return "packed prompts are not divided into parts" if workload.cache is None else None


class SharedPrefix(Decoding):
    """flashtile's decoding with one more argument, the length of the prefix that all sequences share."""

    label = "flashtile-prefix"

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        shares = workload.cache is not None and workload.cache.prefix
        return None if shares else "the sequences share no prefix"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        assert workload.cache is not None
        function = flashtile.flash_attn_with_shared_prefix
        return self.over(function, workload, inputs, prefix_seqlens=workload.cache.prefix)


class FlashAttention3OverCache(FlashAttention):
    """FlashAttention-3's decoding over the workload's KV cache, with arguments that all its builds accept."""

    def __init__(self) -> None:
        super().__init__("fa3", "flash_attn_interface", UNLIMITED)
        self.needs = ("flash_attn_interface", "flash_attn_with_kvcache")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        paged = workload.cache is not None and workload.cache.page_size
        sixteen_bits = workload.cache_dtype == workload.torch_dtype and workload.torch_dtype.itemsize == 2
        heads = workload.head_dim <= 256
        if workload.latent:
            heads = workload.own_columns <= 64 and 256 <= workload.width_v <= 512
        taken = paged and sixteen_bits and heads
        return None if taken else "takes only paged 16-bit caches with heads up to 256, or MLA's"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        import flash_attn_interface

        function = flash_attn_interface.flash_attn_with_kvcache
        return over_copies(function, workload, inputs, "page_table")


class FlashAttention4OverCache(FlashAttention):
    """FlashAttention-4's variable-length attention over the workload's KV cache."""

    def __init__(self) -> None:
        super().__init__("fa4", "flash_attn.cute", None)
        self.needs = ("flash_attn.cute", "flash_attn_varlen_func")

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        paged = workload.cache is not None and workload.cache.page_size and not workload.latent
        sixteen_bits = workload.cache_dtype == workload.torch_dtype and workload.torch_dtype.itemsize == 2
        return None if paged and sixteen_bits else "takes only paged 16-bit caches"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

        def attend(q: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, **more: Any) -> Tensor:
            more |= {"max_seqlen_q": workload.seqlen_q, "max_seqlen_k": workload.seqlen_k}
            return first_of(function(q, k, v, seqused_k=cache_seqlens, **more))

        return over_copies(attend, workload, inputs, "page_table")


class SdpaLatent(Peer):
    """torch's ``scaled_dot_product_attention`` on absorbed MLA.

    Before timing, the pages are gathered, and the two parts of the keys are concatenated. Query heads that
    share a key head are passed as rows of one head.
    """

    name = "sdpa-latent"

    def refuses(self, workload: Workload, device: torch.device) -> str | None:
        if not workload.latent or len(set(workload.sequences)) > 1:
            return "takes absorbed MLA over sequences of one length only"
        return "its causal mask does not support packed heads" if workload.seqlen_q > 1 else None

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        assert inputs.qv is not None
        q = torch.cat([inputs.q, inputs.qv], -1).unflatten(2, (workload.num_heads_kv, -1))[:, 0]

        def over(table: Tensor) -> Callable[..., Tensor]:
            pages = (cache[table].flatten(1, 2)[:, : workload.seqlen_k] for cache in (inputs.k, inputs.v))
            k, v = (t.transpose(1, 2).contiguous() for t in pages)
            joined = torch.cat([k, v], -1)
            return lambda *_: F.scaled_dot_product_attention(q, joined, v).flatten(1, 2)[:, None]

        copies = tuple(over(table) for table in inputs.block_tables)
        return PeerCall(copies[0], copies=copies)


def over_copies(
    function: Callable[..., Any], workload: Workload, inputs: Inputs, table_name: str, **arguments: Any
) -> PeerCall:
    """Return a contestant's call that runs ``function`` over the KV cache.

    The call has one variant for each copy of the cache, and timing rotates over the variants. Each variant
    passes the block table of its copy as the argument ``table_name``.
    """
    arguments |= {"cache_seqlens": inputs.cache_seqlens, "causal": workload.causal}
    if workload.varlen:
        arguments |= {"cu_seqlens_q": inputs.cu_seqlens_q, "max_seqlen_q": workload.seqlen_q}
    if inputs.qv is not None:
        arguments["qv"] = inputs.qv
    tables: tuple[Tensor | None, ...] = inputs.block_tables or (None,)
    copies = tuple(partial(function, **{table_name: table}, **arguments) for table in tables)
    return PeerCall(copies[0], copies=copies)


class FlashtileTree(Flashtile):
    """``tree_attention``, which makes the mask in every call."""

    label = "flashtile-unprepared"

    def _call(self, workload: Workload, inputs: Inputs, **more: Any) -> PeerCall:
        offsets, parent = tree_segments(workload.seqlen_q, inputs.q.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tree_attention(q[0], k[0], v[0], offsets, parent, backend=self._backend, **more)[None]

        return PeerCall(attend)


@dataclass(frozen=True, kw_only=True)
class RepeatedCall(PeerCall):
    """A call on packed sequences, each of which is a copy of the prompt and one answer.

    The time excludes making the copies and summing their gradients.

    Args:
        rows: for each token of the repeated sequences, its index among the tokens of the tree.
        dout: gradient of out, which has one row for each token of the tree.
    """

    rows: Tensor
    dout: Tensor

    def arrange(self, tensor: Tensor) -> Tensor:
        return tensor if tensor is self.dout else tensor[0, self.rows]

    def restore(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return a gradient, summed over copies. ``out`` is returned unchanged, because it has no copies."""
        if tensor.dim() == like.dim():
            return tensor
        summed = tensor.new_zeros((like.shape[1], *tensor.shape[1:]), dtype=torch.float32)
        return summed.index_add_(0, self.rows, tensor.float()).to(tensor.dtype)[None]


class Repeated(Peer):
    """flashtile's causal attention over packed sequences, each the prompt and one answer."""

    name = "repeated"

    def prepare(self, workload: Workload, inputs: Inputs) -> PeerCall:
        device = inputs.q.device
        starts = tree_segments(workload.seqlen_q, "cpu")[0].tolist()
        prompt = torch.arange(starts[1], device="cpu")
        paths = [torch.cat([prompt, torch.arange(*pair, device="cpu")]) for pair in pairwise(starts[1:])]
        lengths, rows = [len(path) for path in paths], torch.cat(paths)
        first = torch.cat([prompt, (rows >= starts[1]).nonzero().flatten()]).to(device)
        offsets, longest = cu_seqlens(lengths, device), max(lengths)
        attend: Callable[..., Tensor] = partial(
            flashtile.flash_attn_varlen_func, cu_seqlens_q=offsets, cu_seqlens_k=offsets,
            max_seqlen_q=longest, max_seqlen_k=longest, causal=True,
        )  # fmt: skip
        # The prompt's rows of out are those of its first copy.
        return RepeatedCall(
            attend=lambda q, k, v: attend(q, k, v)[first][None], rows=rows.to(device), dout=inputs.dout
        )


OURS: dict[str, tuple[type[Flashtile], ...]] = {
    "attention": (Flashtile,),
    "masks": (Flashtile,),
    "tree": (Flashtile, FlashtileTree),
    "weights": (Weighing,),
    "statistics": (Flashtile, WithMaxLogits, WithEntropy),
    "jvp": (Moving,),
    "fp8": (Quantized, Quantizing),
    "decode": (Decoding, SharedPrefix),
    "mass": (Decoding, WithMass),
    "invariant": (Invariant, InvariantInParts),
}
"""Adapters of flashtile by kind of workload. Their argument names a backend; None lets dispatch choose."""


def peers(kind: str) -> tuple[Peer, ...]:
    """Return a new adapter of each peer for a kind of workload, in the order of the report's columns."""
    if kind == "fp8":
        return (InBf16(), FlashAttention3InFp8())
    if kind == "decode":
        return (FlashAttention3OverCache(), FlashAttention4OverCache(), SdpaLatent())
    if kind == "weights":
        return (Eager(),)
    if kind in ("statistics", "mass"):
        return ()
    if kind == "invariant":
        return (Free(),)
    if kind == "jvp":
        return (JvpFlashAttention(), *published(), StandardMoving())
    if kind == "tree":
        return (Repeated(), FlexAttention(), FlexAttention(flash=True))
    if kind == "masks":
        return (FlexAttention(), FlexAttention(flash=True))
    return (
        Sdpa("sdpa-flash", "FLASH_ATTENTION", "cuda"),
        Sdpa("sdpa-cudnn", "CUDNN_ATTENTION", "cuda"),
        Sdpa("sdpa-efficient", "EFFICIENT_ATTENTION", "cuda"),
        Sdpa("sdpa-cpu", "FLASH_ATTENTION", "cpu"),
        FlexAttention(),
        TorchVarlen(),
        FlashAttention("fa2", "flash_attn", UNLIMITED, alibi="alibi_slopes"),
        FlashAttention("fa3", "flash_attn_interface", UNLIMITED),
        FlashAttention("fa4", "flash_attn.cute", None, sink="learnable_sink"),
        LoopsOfFlash1(),
        Standard(),
    )


def contestants(kind: str, names: Sequence[str], backends: Sequence[str], device: torch.device) -> list[Peer]:
    """Return flashtile (or one contestant for each named backend), then the peers.

    Args:
        kind: kind of the workloads.
        names: names of peers. Empty means all that are available on ``device``, ``["none"]`` means none.
        backends: backends of flashtile; empty lets dispatch choose for each call.

    Raises:
        ValueError: a name is not a peer or backend, or a named peer cannot run here.
    """
    known = {peer.name: peer for peer in peers(kind)} if list(names) != ["none"] else {}
    for name in names if known else ():
        if name not in known:
            raise ValueError(f"peer must be none or one of {', '.join(known)}, got {name!r}")
        reason = known[name].unavailable(device)
        if reason is not None:
            raise ValueError(f"peer {name!r} cannot run here: {reason}")
    for backend in backends:
        if backend not in PREFERENCE:
            raise ValueError(f"backend must be one of {', '.join(PREFERENCE)}, got {backend!r}")
    return [ours(backend) for backend in backends or (None,) for ours in OURS[kind]] + [
        peer for name, peer in known.items() if (name in names if names else peer.unavailable(device) is None)
    ]


def kind_of(workloads: Sequence[Workload]) -> str:
    """Return the kind that all workloads have. Raise ValueError if they are of several kinds."""
    kinds = {workload.kind: workload.name for workload in workloads}
    if len(kinds) > 1:
        given = ", ".join(f"{name} ({kind})" for kind, name in kinds.items())
        raise ValueError(f"workloads must be of one kind, each needs a run of its own, got {given}")
    return next(iter(kinds))
