"""The frozen description of an attention call, with the tensors and options that it is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.problems.common import (
    Results,
    extended,
    find_bias_obstacle,
    find_tma_obstacle,
    passed_on,
)
from flashtile.problems.masking import BEYOND_WINDOW, EVERYTHING, Masking
from flashtile.problems.masks import CAPTURED, LISTS, MAX_CAPTURED, Mods, positions_of


class Options(NamedTuple):
    """The non-tensor arguments of a call, hashable because they are part of a launch's cache key.

    :func:`flashtile.checks.conversions.make_options` ensures that the fields have exactly the declared types.
    """

    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    softmax_scale: float | None = None
    masking: Masking = EVERYTHING
    softcap: float = 0.0
    deterministic: bool = False
    backend: str | None = None
    dropout_p: float = 0.0
    bias_grad: bool = False
    """Whether the bias gets a gradient; used only by the backward pass."""
    partial: bool = False
    """Whether out and the gradients stay float32, to be summed over devices before they are rounded."""
    invariant: bool = False
    """Whether a row of the result has the same bits in all calls, as over a cache; only the forward pass."""
    max_logits: bool = False
    """Whether the largest score of each row is a result; ``entropy``: that of its probabilities."""
    entropy: bool = False


class OptionalTensors(NamedTuple):
    """The optional tensors of a call in addition to q, k and v; None for each that is absent."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    mask: Tensor | None = None
    key_padding_mask: Tensor | None = None
    bias: Tensor | None = None
    rng_state: Tensor | None = None
    seqused_q: Tensor | None = None


OPTIONS_OF_PLAIN_CALLS = "dropout_p", "bias_grad", "partial", "invariant"
"""Options that cannot be combined with score and mask functions or FP8. All are false by default."""

STATISTICS = "max_logits", "entropy"
"""Options with one more result for each row. lse then has a last dimension: lse itself, then these."""

NEEDS_GENERAL_MASK = ("mask", "key_padding_mask", "bias", "dropout_p", *BEYOND_WINDOW, "seqused_q")
"""Arguments whose effect on a score depends on more than the distance between row and key."""

NO_EXTRAS = OptionalTensors()
"""The value for calls with only q, k and v. It is recognised by identity, which is the fastest test."""


_FURTHER_TENSORS = dict.fromkeys((*CAPTURED, *LISTS), "Tensor | None")
ModifiedExtras: Any = extended(
    "ModifiedExtras", OptionalTensors, _FURTHER_TENSORS, (None,) * len(_FURTHER_TENSORS)
)
"""All optional tensors of a call with functions, also those that they capture and a block mask's lists."""

FURTHER_OPTIONS = {
    "score_mod": "str", "mask_mod": "str", "learned": "int", "block_q": "int", "block_kv": "int",
    "mask_seqlen_q": "int", "mask_seqlen_k": "int",
}  # fmt: skip
"""Options that only calls with score or mask functions have.

The functions are texts of programs. Bit i of ``learned`` is set if captured tensor i needs a gradient. Block
sizes, and the lengths that the block mask was made for, are 0 without a block mask.
"""
FURTHER_DEFAULTS = "", "", 0, 0, 0, 0, 0
ModifiedOptions: Any = extended("ModifiedOptions", Options, FURTHER_OPTIONS, FURTHER_DEFAULTS)

_NUM_EXTRAS = len(OptionalTensors._fields)


def statistics_of(call: Any) -> tuple[str, ...]:
    """Return the names of the statistics that ``call``, Options or a Problem, has as results."""
    return tuple(name for name in STATISTICS if getattr(call, name))


def new_lse(like: Tensor, shape: Sequence[int], dtype: torch.dtype, statistics: Sequence[str]) -> Tensor:
    """Return memory for lse in ``shape``, with a last dimension for lse and the statistics if there are any.

    Each of them is contiguous in memory, because kernels write them as separate tensors.
    """
    if not statistics:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty((1 + len(statistics), *shape), dtype=dtype).movedim(0, -1)


def clear_lse(lse: Tensor, statistics: Sequence[str]) -> Tensor:
    """Fill memory of :func:`new_lse` with the results of rows that see no key, and return it."""
    lse.fill_(-torch.inf)
    if "entropy" in statistics:
        lse[..., -1] = 0.0
    return lse


def extras_of(tensors: Sequence[Tensor | None]) -> Any:
    """Return ``tensors`` as OptionalTensors or ModifiedExtras, chosen by their number; NO_EXTRAS if empty."""
    if not tensors:
        return NO_EXTRAS
    return (OptionalTensors if len(tensors) == _NUM_EXTRAS else ModifiedExtras)._make(tensors)


def captured_of(extras: Any) -> tuple[Tensor | None, ...]:
    """Return the tensors that functions capture, in ``MAX_CAPTURED`` places; () without functions."""
    return extras[_NUM_EXTRAS : _NUM_EXTRAS + MAX_CAPTURED]


def captured_tensors(extras: Any) -> list[Tensor]:
    """Return the captured tensors that a call has, in the order in which its functions number them."""
    return [tensor for tensor in captured_of(extras) if tensor is not None]


def learned_of(options: Any) -> tuple[int, ...]:
    """Return the indices of captured tensors that need a gradient."""
    bits = getattr(options, "learned", 0)
    return tuple(i for i in range(MAX_CAPTURED) if bits >> i & 1)


def mods_of(q: Tensor, k: Tensor, extras: Any, options: Any) -> Mods | None:
    """Describe the score and mask functions of a call; None if it has none."""
    if not isinstance(extras, ModifiedExtras):
        return None
    return Mods(
        options.score_mod,
        options.mask_mod,
        learned_of(options),
        tuple(tensor.dim() for tensor in captured_tensors(extras)),
        (options.block_q, options.block_kv) if options.block_q else None,
        extras.kv_num_blocks.shape[1] if options.block_q else 1,
        positions_of(q.shape[1], k.shape[1]),
    )


@dataclass(frozen=True)
class Problem(Masking, Results):
    """Description of an attention call: its mask by position, and all else that decides how it is computed.

    Lengths are in tokens. Bool fields such as ``alibi`` say whether the call has that argument.
    """

    batch: int
    seqlen_q: int  # the longest sequence if varlen
    seqlen_k: int
    total_q: int  # rows of q in memory: batch * seqlen_q, or q.shape[0] if varlen
    total_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    softmax_scale: float
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    varlen: bool = False
    seqused_k: bool = False
    deterministic: bool = False
    mask: bool = False
    key_padding_mask: bool = False
    bias: bool = False
    dropout_p: float = 0.0
    seqused_q: bool = False
    bias_grad: bool = False
    """Whether the backward pass computes the gradient of the bias."""
    mods: Mods | None = None
    """The score and mask functions."""
    partial: bool = False
    invariant: bool = False
    max_logits: bool = False
    entropy: bool = False
    """Whether entropy is a result; in the backward pass, whether it has a gradient."""
    tma_obstacle: str | None = None
    """Why the tensor memory accelerator (TMA) of Hopper GPUs cannot address q, k or v in their layout."""
    bias_obstacle: str | None = None
    """Why TMA cannot load the bias tile by tile."""

    @property
    def needs_general_mask(self) -> str | None:
        """Name of the first argument in ``NEEDS_GENERAL_MASK`` that the call has, or None.

        These arguments need a general mask, because their effect on a score depends on more than the sequence
        lengths and the distance between row and key.
        """
        return next((name for name in NEEDS_GENERAL_MASK if getattr(self, name)), None)

    @property
    def has_natural_scores(self) -> bool:
        """Whether a bias or a score_mod changes scores, in natural units. They may have any magnitude."""
        return self.bias or (self.mods is not None and bool(self.mods.score_mod))

    @property
    def statistics(self) -> tuple[str, ...]:
        return statistics_of(self)

    @property
    def out_dtype(self) -> torch.dtype:
        """Dtype of out and of the gradients of q, k and v."""
        return self.lse_dtype if self.partial else self.dtype

    @classmethod
    def from_tensors(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extras: Any = NO_EXTRAS,
        options: Any = Options(),  # noqa: B008 - immutable
        **others: Any,
    ) -> Problem:
        """Describe a call that :func:`flashtile.checks.attention.check_call` has accepted.

        Args:
            extras, options: OptionalTensors and Options; with score or mask functions, ModifiedExtras and
                ModifiedOptions.
            others: fields that are otherwise derived from the arguments.
        """
        if extras.cu_seqlens_q is not None:
            batch = extras.cu_seqlens_q.shape[0] - 1
            seqlen_q, seqlen_k = int(options.max_seqlen_q or 0), int(options.max_seqlen_k or 0)
            total_q, total_k = q.shape[0], k.shape[0]
        else:
            batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
            total_q, total_k = batch * seqlen_q, batch * seqlen_k
        varlen, used = extras.cu_seqlens_q is not None, extras.seqused_k is not None
        scale = options.softmax_scale
        fields: dict[str, Any] = passed_on(cls, extras, options) | {
            "batch": batch,
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "total_q": total_q,
            "total_k": total_k,
            "num_heads_q": q.shape[-2],
            "num_heads_kv": k.shape[-2],
            "head_dim": q.shape[-1],
            "head_dim_v": v.shape[-1],
            "dtype": q.dtype,
            "device": q.device,
            "softmax_scale": q.shape[-1] ** -0.5 if scale is None else float(scale),
            "alibi": extras.alibi_slopes is not None,
            "mods": mods_of(q, k, extras, options),
            "varlen": varlen,
            "tma_obstacle": find_tma_obstacle(q, k, v, used and not varlen),
            "bias_obstacle": None if extras.bias is None else find_bias_obstacle(extras.bias, q.dtype),
        }
        return cls(**fields | others)


@dataclass(frozen=True)
class WeightsProblem(Problem):
    """Description of a call that computes probabilities from q, k and lse, without v."""

    form: str = "full"
    """"full", "columns" (sums over rows) or "top" (the largest of each row)."""
    top: int = 0
    """Number of weights kept per row for "top", 0 otherwise."""

    @property
    def weights_shape(self) -> tuple[int, ...]:
        heads = self.num_heads_q
        if self.form == "full":
            return (self.batch, heads, self.seqlen_q, self.seqlen_k)
        if self.form == "columns":
            return (heads, self.total_k) if self.varlen else (self.batch, heads, self.seqlen_k)
        return (*self.lse_shape, self.top)

    @property
    def weights_dtype(self) -> torch.dtype:
        return self.dtype if self.form == "full" else self.lse_dtype
