"""The calls that every backend is held to: data, named once, and turned into tensors by :meth:`Case.inputs`.

``tiny`` cases suit Triton's interpreter, ``medium`` ones the CPU, ``large`` ones a GPU; a GPU runs all three.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile import testing

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


Variants = dict[str, dict[str, Any]]
"""Fields of a :class:`Case` to change, by the name of the change."""


class Inputs(NamedTuple):
    """A call: tensors, the other arguments of ``flashtile.attention``, and the gradients of its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    arguments: dict[str, Any]
    dout: Tensor | None
    dlse: Tensor | None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def check(self, **more: Any) -> testing.Report:
        return testing.check(*self.qkv, dout=self.dout, dlse=self.dlse, **{**self.arguments, **more})


@dataclass(frozen=True)
class Case:
    """One call. With ``lengths``, (seqlen_q, seqlen_k) of each sequence, it is a varlen call."""

    name: str = ""
    size: str = "medium"
    batch: int = 2
    seqlen_q: int = 113
    seqlen_k: int = 203
    lengths: tuple[tuple[int, int], ...] | None = None
    unused_tail: int = 0
    """Number of rows of NaN after the last sequence, in q, k, v and the gradients."""
    slack: int = 0
    """Difference of max_seqlen_q and max_seqlen_k from the length of the longest sequence."""
    heads_q: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = FP16
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: str | None = None
    """ALiBi slopes: per "head", or for "batch" per batch entry and head."""
    sink: str | None = None
    """A sink in "float32" or in the dtype of q ("own")."""
    unused_keys: int = 0
    """Keys of NaN at the end of sequence b that seqused_k leaves out, b + 1 times as many (all at most)."""
    mask: str | None = None
    """A boolean mask with a part of its own for each "b"atch entry, "h"ead and "q"uery, as named."""
    padding: str | None = None
    """key_padding_mask that leaves out keys on the "left" or "right", or in "holes"."""
    bias: str | None = None
    """An additive bias, likewise, some of it -inf; in the dtype of q where it names "own"."""
    dropout_p: float = 0.0
    attention_chunk: int = 0
    unused_rows: int = 0
    """Rows of NaN at the end of sequence b that seqused_q leaves out, b + 1 times as many (all at most)."""
    layout: str = "contiguous"
    upstream: str = "both"
    """Gradients: "both", of "out" or "lse" alone, "sum" (of out.sum(): one element, expanded), "transposed"
    in memory."""

    def inputs(self, device: str) -> Inputs:
        """Tensors of this case, the same on every call."""
        seed = 8 * zlib.crc32(self.name.encode())
        head_dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        arguments: dict[str, Any] = {}
        if self.lengths is None:
            batch = self.batch
            rows, keys = (batch, self.seqlen_q), (batch, self.seqlen_k)
        else:
            batch = len(self.lengths)
            lengths_q, lengths_k = [q for q, _ in self.lengths], [k for _, k in self.lengths]
            rows, keys = (sum(lengths_q) + self.unused_tail,), (sum(lengths_k) + self.unused_tail,)
            arguments.update(
                cu_seqlens_q=testing.cu_seqlens(lengths_q, device),
                cu_seqlens_k=testing.cu_seqlens(lengths_k, device),
                max_seqlen_q=max(lengths_q, default=0) + self.slack,
                max_seqlen_k=max(lengths_k, default=0) + self.slack,
            )
        layout_q = "contiguous" if self.layout == "expanded" else self.layout
        q, k, v = (
            testing.random_tensor(shape, self.dtype, device, seed=seed + i, layout=layout)
            for i, (shape, layout) in enumerate(
                (
                    ((*rows, self.heads_q, self.head_dim), layout_q),
                    ((*keys, self.heads_kv, self.head_dim), self.layout),
                    ((*keys, self.heads_kv, head_dim_v), self.layout),
                )
            )
        )
        if self.alibi is not None:
            shape = (self.heads_q,) if self.alibi == "head" else (batch, self.heads_q)
            arguments["alibi_slopes"] = testing.random_alibi_slopes(shape, device, seed=seed + 3)
        if self.sink is not None:
            dtype = self.dtype if self.sink == "own" else FP32
            arguments["sink"] = testing.random_tensor((self.heads_q,), dtype, device, seed=seed + 4)
        rows_of_masks = max((q for q, _ in self.lengths), default=0) if self.lengths else self.seqlen_q
        keys_of_masks = max((k for _, k in self.lengths), default=0) if self.lengths else self.seqlen_k
        cells = (batch, self.heads_q, rows_of_masks + self.slack, keys_of_masks + self.slack)
        if self.mask is not None:
            arguments["mask"] = self._broadcast(self.mask, cells, device, seed + 5) > -0.5
        if self.bias is not None:
            arguments["bias"] = self._biases(cells, device, seed + 7)
        if self.dropout_p > 0:
            arguments["dropout_p"] = self.dropout_p
            arguments["rng_state"] = torch.tensor([seed << 20, 2**35 + 3], device=device)
        if self.padding is not None:
            arguments["key_padding_mask"] = self._padding(cells, device, seed + 6)
        if self.unused_keys:
            arguments["seqused_k"] = self._leave_out(self.unused_keys, 1, k, v)
        if self.attention_chunk:
            arguments["attention_chunk"] = self.attention_chunk
        arguments.update(
            causal=self.causal,
            window_size=self.window_size,
            softcap=self.softcap,
            softmax_scale=self.softmax_scale,
        )
        dout, dlse = self._gradients(q, v, seed)
        if self.unused_rows:
            arguments["seqused_q"] = self._leave_out(self.unused_rows, 0, q, dout)
        for tensor in (q, k, v, dout, None if dlse is None else dlse.mT):
            if tensor is not None and self.unused_tail:
                poison_last_rows(tensor, self.unused_tail)
        return Inputs(q, k, v, arguments, dout, dlse)

    def _broadcast(self, named: str, cells: tuple[int, ...], device: str, seed: int) -> Tensor:
        """Normal numbers for all scores, expanded where not named: nothing is there twice."""
        shape = [size if name in named else 1 for name, size in zip("bhq", cells, strict=False)]
        numbers = testing.random_tensor((*shape, cells[-1]), FP32, device, seed=seed)
        return numbers if self.layout != "expanded" else numbers.expand(cells)

    def _biases(self, cells: tuple[int, ...], device: str, seed: int) -> Tensor:
        assert self.bias is not None
        named = self.bias.removesuffix("-own")
        numbers = self._broadcast(named, cells, device, seed)
        hidden = self._broadcast(named, cells, device, seed + 1) < -1.5
        numbers = numbers.masked_fill(hidden, -torch.inf)
        return numbers if named == self.bias else numbers.to(self.dtype)

    def _padding(self, cells: tuple[int, ...], device: str, seed: int) -> Tensor:
        batch, _, _, seqlen_k = cells
        keys = torch.arange(seqlen_k, device=device)
        pads = (torch.arange(batch, device=device)[:, None] + 1) * seqlen_k // (batch + 1)
        if self.padding == "left":
            return keys >= pads
        if self.padding == "right":
            return keys < seqlen_k - pads
        return testing.random_tensor((batch, seqlen_k), FP32, device, seed=seed) > 0

    def _leave_out(self, unused: int, of_keys: int, *tensors: Tensor | None) -> Tensor:
        """seqused_q or seqused_k, with NaN written to what it leaves out."""
        lengths = [(self.seqlen_q, self.seqlen_k)] * self.batch if self.lengths is None else self.lengths
        tokens = [pair[of_keys] for pair in lengths]
        used = [max(0, length - unused * (b + 1)) for b, length in enumerate(tokens)]
        start = 0
        for b, (length, count) in enumerate(zip(tokens, used, strict=True)):
            for tensor in tensors:
                if tensor is not None:
                    own = tensor[b] if self.lengths is None else tensor[start : start + length]
                    poison_last_rows(own, length - count)
            start += length
        first = next(tensor for tensor in tensors if tensor is not None)
        return torch.tensor(used, dtype=torch.int32, device=first.device)

    def _gradients(self, q: Tensor, v: Tensor, seed: int) -> tuple[Tensor | None, Tensor | None]:
        dout, dlse = testing.random_gradients(q, v, varlen=self.lengths is not None, seed=seed)
        if self.upstream == "out":
            return dout, None
        if self.upstream == "lse":
            return None, dlse
        if self.upstream == "sum":
            return dout.new_ones(()).expand(dout.shape), None
        if self.upstream == "transposed":
            return dout.transpose(-2, -3).contiguous().transpose(-2, -3), dlse.mT.contiguous().mT
        return dout, dlse


def poison_last_rows(tensor: Tensor, count: int) -> None:
    """Write NaN into the last rows, unless all rows share memory (stride 0)."""
    if tensor.stride(0) == 0:
        return
    once = (slice(1) if stride == 0 else slice(None) for stride in tensor.stride()[1:])
    tensor[(slice(tensor.shape[0] - count, None), *once)] = torch.nan


def masks(left: int, right: int) -> Variants:
    """Every mask and score option, with windows of these two sides."""
    return {
        "full": {},
        "causal": {"causal": True},
        "left": {"window_size": (left, -1)},
        "right": {"window_size": (-1, right)},
        "window": {"window_size": (left, right)},
        "own-key-only": {"window_size": (0, 0)},
        "no-left": {"window_size": (0, -1)},
        "no-right": {"window_size": (-1, 0)},
        "wider-than-keys": {"window_size": (10_000, 10_000)},
        "causal-left": {"causal": True, "window_size": (left, -1)},
        "causal-overrides-right": {"causal": True, "window_size": (left, right)},
        "softcap": {"softcap": 1.5},
        "softcap-weak": {"softcap": 50.0, "causal": True},
        "alibi": {"alibi": "head"},
        "alibi-batch": {"alibi": "batch"},
        "alibi-causal": {"alibi": "head", "causal": True},
        "alibi-window": {"alibi": "batch", "window_size": (left, right)},
        "softcap-window": {"softcap": 2.0, "window_size": (left, right)},
        "scale": {"softmax_scale": 0.3, "causal": True},
        "scale-negative": {"softmax_scale": -0.2},
        "scale-negative-causal": {"softmax_scale": -0.2, "causal": True},
        "scale-zero": {"softmax_scale": 0.0, "causal": True},
        "sink": {"sink": "float32"},
        "sink-causal": {"sink": "own", "causal": True},
        "used": {"unused_keys": 3},
        "used-window": {"unused_keys": left, "window_size": (left, right)},
        "everything": {
            "causal": True,
            "window_size": (left, -1),
            "softcap": 3.0,
            "alibi": "batch",
            "softmax_scale": 0.25,
            "sink": "float32",
            "unused_keys": 2,
        },
        "everything-window": {
            "window_size": (left, right),
            "softcap": 3.0,
            "alibi": "head",
            "softmax_scale": -0.25,
            "sink": "own",
        },
    }


def cross(bases: dict[str, Case], variants: Variants) -> Iterator[Case]:
    """Every base with every variant."""
    for base_name, base in bases.items():
        for variant_name, variant in variants.items():
            name = "-".join(part for part in (base.size, base_name, variant_name) if part)
            yield replace(base, name=name, **variant)


def some(variants: Variants, *names: str) -> Variants:
    return {name: variants[name] for name in names}


def lengths(*pairs: tuple[int, int]) -> Variants:
    return {f"{q}x{k}": {"seqlen_q": q, "seqlen_k": k} for q, k in pairs}


def with_masks(variants: Variants, chosen: Variants) -> Variants:
    return {f"{a}-{b}": {**variant, **mask} for a, variant in variants.items() for b, mask in chosen.items()}


CELLS: Variants = {
    "mask": {"mask": "bhq"},
    "mask-causal": {"mask": "q", "causal": True},
    "mask-heads": {"mask": "h", "softcap": 2.0},
    "mask-window-sink": {"mask": "bq", "window_size": (9, 4), "sink": "float32"},
    "padding-left": {"padding": "left", "causal": True},
    "padding-right": {"padding": "right"},
    "padding-right-causal": {"padding": "right", "causal": True},
    "padding-holes": {"padding": "holes"},
    "padding-holes-causal": {"padding": "holes", "causal": True, "sink": "own"},
    "padding-window": {"padding": "right", "window_size": (9, 4), "alibi": "head"},
    "padding-mask": {"padding": "left", "mask": "hq"},
    "bias": {"bias": "bhq"},
    "bias-own-causal": {"bias": "hq-own", "causal": True},
    "bias-own": {"bias": "bhq-own", "head_dim": 128},
    "bias-softcap-window": {"bias": "q", "softcap": 2.0, "window_size": (9, 4)},
    "bias-of-keys-sink": {"bias": "b", "sink": "float32"},
    "bias-mask-padding": {"bias": "bh", "mask": "q", "padding": "holes"},
    "dropout": {"dropout_p": 0.2},
    "dropout-causal-sink": {"dropout_p": 0.5, "causal": True, "sink": "own"},
    "dropout-bias": {"dropout_p": 0.1, "bias": "h", "mask": "q", "padding": "left"},
    "chunk": {"attention_chunk": 7},
    "chunk-causal": {"attention_chunk": 16, "causal": True, "bias": "h"},
    "chunk-longer": {"attention_chunk": 10_000, "window_size": (9, 4)},
    "used-rows": {"unused_rows": 4, "causal": True, "sink": "float32"},
    "used-everything": {
        "unused_rows": 3,
        "unused_keys": 2,
        "attention_chunk": 11,
        "bias": "q",
        "mask": "bh",
        "dropout_p": 0.2,
        "sink": "own",
    },
    "mask-used": {"mask": "bq", "unused_keys": 3, "causal": True},
}
"""What differs from score to score, or from key to key, in other ways than by distance."""

HEADS = {
    f"heads-{q}-{kv}": {"heads_q": q, "heads_kv": kv}
    for q, kv in ((1, 1), (3, 3), (3, 1), (5, 1), (7, 1), (6, 2), (10, 2), (14, 2))
}
LAYOUTS = {layout: {"layout": layout} for layout in testing.LAYOUTS[1:]}
UPSTREAM = {f"d{upstream}": {"upstream": upstream} for upstream in ("out", "lse", "sum", "transposed")}
NO_TOKENS = {
    "batch-0": {"batch": 0},
    "no-queries": {"seqlen_q": 0},
    "no-keys": {"seqlen_k": 0},
    "neither": {"seqlen_q": 0, "seqlen_k": 0},
}


def head_dims(*dims: int | tuple[int, int]) -> Variants:
    pairs = [d if isinstance(d, tuple) else (d, d) for d in dims]
    return {f"d{qk}-{v}" if qk != v else f"d{qk}": {"head_dim": qk, "head_dim_v": v} for qk, v in pairs}


def diagonals(seqlen_q: int, *tiles: int) -> tuple[tuple[int, int], ...]:
    """Sequences whose diagonal crosses corners of tiles of these sizes, or passes right beside them."""
    corners = [sign * tile for tile in (0, *tiles) for sign in (-1, 1)]
    offsets = {corner + beside for corner in corners for beside in range(-2, 3)}
    return tuple((seqlen_q, seqlen_q + offset) for offset in sorted(offsets) if seqlen_q + offset >= 0)


EDGES: Variants = {
    "causal": {"causal": True},
    "window-narrow": {"window_size": (2, 1)},
    "window-tile": {"window_size": (31, 30)},
    "window-tiles": {"window_size": (127, 64)},
}
"""Masks whose edges lie on or beside corners of tiles where the diagonal does."""


def tiny() -> Iterator[Case]:
    mask = masks(5, 3)
    dense = Case(size="tiny", batch=1, seqlen_q=19, seqlen_k=35, heads_q=2, heads_kv=1, head_dim=24)
    ragged = replace(dense, lengths=((7, 13), (1, 1), (20, 5), (16, 33), (3, 3)), heads_kv=2)
    yield from cross({"": dense, "more-queries": replace(dense, seqlen_q=35, seqlen_k=19)}, mask)
    yield from cross(
        {"": dense},
        with_masks(
            lengths((1, 1), (1, 17), (17, 1), (2, 3), (33, 32), (32, 33), (16, 40), (40, 16), (32, 32)),
            some(mask, "full", "causal"),
        ),
    )
    yield from cross({"": replace(dense, seqlen_q=9, seqlen_k=12)}, with_masks(HEADS, some(mask, "causal")))
    whole_blocks = replace(dense, seqlen_q=64, seqlen_k=128)  # which used keys do not fill
    yield from cross({"whole-blocks": whole_blocks}, some(mask, "full", "used"))
    of_cells = {"batch": 2, "bias": "bq", "padding": "holes"}
    yield from cross({"whole-blocks": whole_blocks}, {"cells": of_cells})
    dims = head_dims(1, 3, 8, 16, 32, 40, 59, 80, (8, 40), (40, 8), (16, 1), (1, 33), (576, 512))
    yield from cross({"": dense}, with_masks(dims, some(mask, "causal")))
    yield from cross({"": dense, "varlen": ragged}, with_masks(LAYOUTS, some(mask, "causal")))
    yield from cross({"": dense, "varlen": ragged}, with_masks(UPSTREAM, some(mask, "everything-window")))
    yield from cross({"": dense}, with_masks(NO_TOKENS, some(mask, "full", "everything")))
    for dtype, name in ((BF16, "bf16"), (FP32, "fp32"), (FP64, "fp64")):
        bases = {name: replace(dense, dtype=dtype), f"varlen-{name}": replace(ragged, dtype=dtype)}
        yield from cross(bases, some(mask, "full", "causal", "window", "everything"))
    batches = {
        "varlen": ragged,
        "varlen-tail": replace(ragged, unused_tail=5, slack=20),
        "varlen-empty": replace(ragged, lengths=((0, 9), (12, 12), (9, 0), (0, 0), (4, 6), (0, 0))),
        "varlen-all-empty": replace(ragged, lengths=((0, 0), (0, 0)), unused_tail=3),
        "varlen-no-keys": replace(ragged, lengths=((3, 0), (5, 0))),
        "varlen-no-queries": replace(ragged, lengths=((0, 3), (0, 5))),
        "varlen-no-sequence": replace(ragged, lengths=()),
        "varlen-only-tail": replace(ragged, lengths=(), unused_tail=4, slack=2),
    }
    yield from cross(batches, some(mask, "full", "causal", "window", "everything"))
    two = replace(dense, batch=2, head_dim=16)
    cells = some(CELLS, "padding-mask", "bias-own-causal", "dropout-bias", "chunk-causal")
    yield from cross({"": two}, cells)
    yield from cross({"more-queries": replace(two, seqlen_q=35, seqlen_k=19)}, some(CELLS, "chunk"))
    yield from cross({"expanded": replace(two, layout="expanded")}, some(CELLS, "mask-causal"))
    yield from cross({"varlen": replace(ragged, slack=2)}, some(CELLS, "used-everything"))
    yield from cross({"cells-no-keys": replace(two, seqlen_k=0)}, some(CELLS, "bias"))
    corners = replace(dense, lengths=diagonals(34, 32), heads_q=1, heads_kv=1, head_dim=16)
    yield from cross({"diagonals": corners}, some(EDGES, "causal", "window-narrow", "window-tile"))


def medium() -> Iterator[Case]:
    mask = masks(70, 33)
    dense = Case()
    # Plain PyTorch is slow in half precision on a CPU: few, short sequences, which still cross tiles of 64.
    batch = ((71, 130), (1, 139), (90, 64), (0, 17), (35, 0), (7, 7))
    ragged = replace(dense, lengths=batch, heads_q=2, heads_kv=1)
    bases = {"": dense, "more-queries": replace(dense, seqlen_q=203, seqlen_k=113), "varlen": ragged}
    yield from cross(bases, mask)
    pairs = lengths(
        (128, 217), (1, 239), (239, 1), (3, 799), (799, 3), (127, 512), (512, 127), (511, 512),
        (64, 8), (8, 64), (64, 64), (128, 128), (129, 129), (255, 257), (257, 255),
    )  # fmt: skip
    yield from cross({"": replace(dense, batch=1)}, with_masks(pairs, some(mask, "full", "causal")))
    yield from cross({"": dense}, with_masks(HEADS, some(mask, "causal")))
    dims = head_dims(1, 8, 16, 24, 32, 40, 59, 80, 96, 111, 128, 160, 192, 224, 256)
    uneven = head_dims((64, 128), (128, 64), (192, 128), (40, 24), (96, 111), (1, 256), (256, 1), (576, 512))
    for name, dtype in (("", FP16), ("fp32", FP32)):
        yield from cross({name: replace(dense, dtype=dtype)}, with_masks(dims, some(mask, "causal")))
    yield from cross({"": dense}, with_masks(uneven, some(mask, "causal-left")))
    yield from cross({"bf16": replace(dense, dtype=BF16)}, with_masks(dims, some(mask, "full")))
    wide = {"bf16": replace(dense, dtype=BF16), "varlen-fp32": replace(ragged, dtype=FP32)}
    yield from cross(wide, with_masks(head_dims(512), some(mask, "everything")))
    small = head_dims(8, 16, 24, 32)
    batches = {"varlen": ragged, "varlen-bf16": replace(ragged, dtype=BF16, heads_q=4, heads_kv=2)}
    yield from cross(batches, with_masks(small, some(mask, "causal", "everything")))
    # No GPU takes heads this wide in float32; the CPU's are among the tiny cases.
    yield from cross({"bf16": wide["bf16"]}, with_masks(head_dims(576), some(mask, "everything")))
    yield from cross({"": dense, "varlen": ragged}, with_masks(LAYOUTS, some(mask, "causal", "window")))
    yield from cross({"": dense, "varlen": ragged}, with_masks(UPSTREAM, some(mask, "everything-window")))
    for dtype, name in ((BF16, "bf16"), (FP32, "fp32"), (FP64, "fp64")):
        bases = {name: replace(dense, dtype=dtype), f"varlen-{name}": replace(ragged, dtype=dtype)}
        yield from cross(bases, some(mask, "full", "causal", "window", "softcap", "alibi", "everything"))
    tail = replace(ragged, unused_tail=77, slack=300, heads_q=6, heads_kv=2)
    yield from cross({"varlen-tail": tail}, some(mask, "full", "causal", "window", "everything"))
    # Short sequences whose heads share tiles on Hopper, in a group that is no power of two.
    documents = replace(ragged, lengths=((40, 40), (1, 1), (9, 30), (0, 5), (23, 23)), heads_q=7)
    sizes = head_dims(64, 80, 128, 256)
    yield from cross({"documents": documents}, with_masks(sizes, some(mask, "causal", "everything")))


def cells() -> Iterator[Case]:
    """Small ones of what differs from score to score; each cell costs plain PyTorch a lot."""
    two = Case(size="medium", seqlen_q=40, seqlen_k=67, head_dim=16, dtype=FP32)
    yield from cross({"cells": two}, CELLS)
    ragged = replace(two, lengths=((20, 33), (0, 5), (40, 31), (7, 0)), unused_tail=3, slack=2)
    chosen = some(CELLS, "mask-used", "bias-own-causal", "dropout", "used-everything", "chunk-causal")
    yield from cross({"cells-varlen": ragged}, chosen)
    for dtype, name in ((BF16, "bf16"), (FP16, "fp16"), (FP64, "fp64")):
        typed = replace(two, dtype=dtype)
        yield from cross({f"cells-{name}": typed}, some(CELLS, "bias-own-causal", "dropout-bias"))


def large() -> Iterator[Case]:
    mask = masks(512, 100)
    dense = Case(
        size="large", batch=1, seqlen_q=2048, seqlen_k=2048, heads_q=8, heads_kv=8, head_dim=128, dtype=BF16
    )
    yield from cross({"": dense, "gqa": replace(dense, heads_kv=2, seqlen_q=1999, seqlen_k=3001)}, mask)
    dims = head_dims(16, 32, 64, 256, (192, 128))
    yield from cross({"": dense}, with_masks(dims, some(mask, "full", "causal", "window")))
    pairs = lengths((4096, 4096), (1, 16384), (16384, 1), (4099, 130), (130, 4099), (5000, 4000))
    few = replace(dense, heads_q=4, heads_kv=2, head_dim=64)
    yield from cross({"": few}, with_masks(pairs, some(mask, "full", "causal", "left")))
    precise = replace(dense, seqlen_q=1000, seqlen_k=1100, dtype=FP32)
    dims = head_dims(64, 128, 256)
    yield from cross({"fp32": precise}, with_masks(dims, some(mask, "full", "causal", "everything")))
    yield from cross({"": replace(few, batch=3)}, CELLS)
    corners = replace(few, lengths=diagonals(260, 16, 32, 64, 128), heads_q=2, heads_kv=1)
    for head_dim in (24, 64, 128, 256):
        yield from cross({f"diagonals-d{head_dim}": replace(corners, head_dim=head_dim)}, EDGES)
    yield from cross({"diagonals-fp32": replace(corners, dtype=FP32)}, EDGES)
    many = tuple((37 * i % 701, 53 * i % 601) for i in range(64))
    yield from cross({"varlen": replace(few, lengths=many, unused_tail=129)}, mask)


def _all() -> tuple[Case, ...]:
    cases = (*tiny(), *medium(), *cells(), *large())
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases share a name"
    return cases


CASES = _all()
