"""The range of a model's attention scores: finds a fixed softmax maximum and says whether it is useful.

FlashDecoding++ (Hong et al. 2023, arXiv:2311.01282, section 3) chooses a maximum phi for a model from its
scores: those of Llama2-7B lie within [-16.8, 6.5]; those of OPT-6.7B spread too far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from flashtile.checks.arguments import (
    as_int,
    check_dense,
    check_dtype,
    check_groups,
    check_heads_tensor,
    check_int,
    check_score_options,
    is_choice,
    named,
)
from flashtile.checks.conversions import as_masking, make_options
from flashtile.operators.attention import FORWARD
from flashtile.operators.decode import DECODE
from flashtile.problems.addresses import sequence_lengths
from flashtile.problems.attention import ModifiedExtras
from flashtile.problems.common import DTYPES, MAX_LENGTH
from flashtile.problems.masking import CAUSAL, EVERYTHING, Masking, positions
from flashtile.reference.decode import sequence
from flashtile.rounding import exact_product
from flashtile.torch_private import TorchDispatchMode

PART = 64
"""Number of keys in a part, a block of adjacent keys of one row. A kernel checks the range of scores for each
part, or for several parts together."""
PAYS = 0.02
"""A fixed maximum saves time if at most this share of parts is out of range and therefore computed twice."""
_BITS = {torch.float16: (10.0, 16.0), torch.float32: (16.0, 16.0)}
"""(below, above) by the dtype of probabilities: exp(score - phi) must lie in [2^-below, 2^above]."""
_BITS_OTHERWISE = (32.0, 120.0)
_SLACK = 16.0
"""Maximum distance in nats from the lower end of the allowed range to the lowest mean score of its parts."""


@dataclass(frozen=True)
class ScoreProfile:
    """Result of :func:`profile_scores`. ``str()`` gives a one-sentence summary."""

    softmax_max: float
    """One ``softmax_max`` for all heads."""
    by_head: Tensor
    """A ``softmax_max`` for each head, (heads_q,) float32."""
    least: float
    """The smallest visible score."""
    most: float
    """The largest visible score."""
    outside: float
    """Share of parts (64 keys of a row) out of range with ``softmax_max``: they are computed twice."""
    outside_by_head: float
    """Share of parts out of range with ``by_head``."""

    @property
    def pays(self) -> bool:
        """Whether few enough parts (64 keys of a row) are out of range for ``softmax_max`` to be useful.

        Whether ``softmax_max`` makes a call faster also depends on the call (docs/guides/decoding.md).
        """
        return self.outside <= PAYS

    def __str__(self) -> str:
        found = f"scores lie within [{self.least:.1f}, {self.most:.1f}]"
        if self.pays:
            return f"{found}: softmax_max={self.softmax_max:.1f} covers {1 - self.outside:.2%} of their parts"
        if self.outside_by_head <= PAYS:
            return f"{found}: too wide for one number, by_head covers {1 - self.outside_by_head:.2%} of them"
        return f"{found}: too wide, {self.outside:.2%} of their parts would be computed twice"


def profile_scores(
    model_or_q: Callable[..., Any] | Tensor,
    *arguments: Any,
    softmax_scale: float | None = None,
    causal: bool = True,
    softcap: float = 0.0,
    dtype: torch.dtype | None = None,
    max_rows: int = 256,
    **keywords: Any,
) -> ScoreProfile:
    """Find ``softmax_max`` for :func:`flashtile.flash_attn_with_kvcache`, and say whether it is useful.

    Args:
        model_or_q: q (batch, seqlen_q, heads_q, head_dim), or a function, such as a module. If it is q,
            ``arguments`` is only k (batch, seqlen_k, heads_kv, head_dim), and rotary embedding has already
            been applied to both. A function is called with ``arguments`` and ``keywords``. All calls that it
            makes of flashtile's attention or PyTorch's ``scaled_dot_product_attention`` are profiled.
        softmax_scale, causal, softcap: as for :func:`flashtile.attention`. They are used if ``model_or_q`` is
            q. If it is a function, each call that the function makes has its own values.
        dtype: dtype of the queries that will be decoded, or torch.float16 for an FP8 cache, because its
            products are computed in float16. float16 allows a narrower range of scores. None: that of q.
        max_rows: number of queries profiled in each sequence, evenly spaced from first to last.

    Returns:
        :class:`ScoreProfile`: ``softmax_max`` for all heads and for each head, the range of the scores, and
        the share of parts (64 keys of a row) that are out of range. Scores are computed in float32.

    Raises:
        TypeError, ValueError: q or k does not have this layout, another argument has the wrong type or value,
            or the model computes no attention.

    Examples:
        >>> q, k = torch.randn(2, 1, 512, 4, 64, dtype=torch.bfloat16).unbind()
        >>> profile = flashtile.profile_scores(q, k)
        >>> profile.pays
        True
        >>> cache = torch.randn(2, 3, 512, 4, 64, dtype=torch.bfloat16).unbind()
        >>> token = torch.randn(3, 1, 4, 64, dtype=torch.bfloat16)
        >>> out = flashtile.flash_attn_with_kvcache(token, *cache, softmax_max=profile.softmax_max)
        >>> flashtile.profile_scores(50 * q, k).pays  # scores of +-200
        False
    """
    options = make_options(as_masking(causal), softmax_scale=softmax_scale, softcap=softcap)
    check_score_options(options)
    if not is_choice(dtype, (None, *DTYPES)):
        raise TypeError(f"dtype must be None or one of {', '.join(map(str, DTYPES))}, got {named(dtype)}")
    max_rows = as_int("max_rows", max_rows)
    check_int("max_rows", max_rows, 1, MAX_LENGTH)
    parts = _Parts(dtype, max_rows)
    if isinstance(model_or_q, Tensor):
        if len(arguments) != 1 or keywords:
            raise TypeError("k must be the one argument after q")
        q, (k,) = model_or_q, arguments
        _check_tensors(q, k)
        for q_rows, k_rows in zip(q, k, strict=True):
            parts.add(q_rows, k_rows, options.softmax_scale, options.softcap, options.masking)
    else:
        if not callable(model_or_q):
            raise TypeError(f"model_or_q must be a torch.Tensor or a function, got {named(model_or_q)}")
        for name, value, default in (
            ("softmax_scale", softmax_scale, None), ("causal", causal, True), ("softcap", softcap, 0.0),
        ):  # fmt: skip
            if value != default:
                raise ValueError(
                    f"{name} must be left out for a model, whose calls have their own, got {value}"
                )
        with _Dispatched(parts), _Functions(parts), torch.no_grad():
            model_or_q(*arguments, **keywords)
    return parts.profile()


def _check_tensors(q: Tensor, k: Any) -> None:
    for name, tensor in (("q", q), ("k", k)):
        check_dense(name, tensor)
        check_dtype(name, tensor)
        check_heads_tensor(name, tensor, False, "total", "seqlen", q)
        if tensor.is_meta:
            raise ValueError(f"{name} is on meta and has no data")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}, but q has {q.shape[0]}: they must be equal")
    check_groups(q, k, "k")


class _Parts:
    """Log-mean-exp and maximum of every part of the scores, each (heads, parts)."""

    def __init__(self, dtype: torch.dtype | None, max_rows: int) -> None:
        self.dtype, self.max_rows = dtype, max_rows
        self.means: list[Tensor] = []
        self.largest: list[Tensor] = []
        self.least = math.inf

    def add(self, q: Tensor, k: Tensor, scale: float | None, softcap: float, masking: Masking) -> None:
        """Add one sequence: q (seqlen_q, heads_q, head_dim) and k (seqlen_k, heads_kv, head_dim)."""
        seqlen_q, seqlen_k = q.shape[0], k.shape[0]
        if seqlen_q == 0 or seqlen_k == 0:
            return
        self.dtype = q.dtype if self.dtype is None else self.dtype
        count = min(seqlen_q, self.max_rows)
        rows = torch.linspace(0, seqlen_q - 1, count, dtype=torch.float64, device=q.device).long()
        seen = masking.visible(positions(seqlen_q, seqlen_k), range(seqlen_k), q.device)[rows]
        group = q.shape[1] // k.shape[1]
        means, largest = [], []
        for head in range(q.shape[1]):
            scores = exact_product(q[rows, head].float(), k[:, head // group].float().T)
            scores *= q.shape[-1] ** -0.5 if scale is None else scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if seen.any():
                self.least = min(self.least, float(scores[seen].min()))
            scores.masked_fill_(~seen, -torch.inf)
            blocks = pad(scores, (0, -seqlen_k % PART), value=-torch.inf).unflatten(1, (-1, PART))
            count = (blocks > -torch.inf).sum(-1)
            means.append((blocks.logsumexp(-1) - count.log())[count > 0])
            largest.append(blocks.amax(-1)[count > 0])
        self.means.append(torch.stack(means).cpu())
        self.largest.append(torch.stack(largest).cpu())

    def profile(self) -> ScoreProfile:
        if not self.means or self.means[0].numel() == 0:
            raise ValueError(
                "model must compute attention by flashtile or scaled_dot_product_attention: none was seen"
            )
        heads = self.means[0].shape[0]
        if any(means.shape[0] != heads for means in self.means):
            raise ValueError(f"model must have equal numbers of heads in all layers, got {heads} and others")
        means, largest = torch.cat(self.means, 1), torch.cat(self.largest, 1)
        assert self.dtype is not None
        below, above = (math.log(2) * bits for bits in _BITS.get(self.dtype, _BITS_OTHERWISE))
        phi, outside = _best(means.flatten(), largest.flatten(), below, above)
        by_head = [_best(*parts, below, above) for parts in zip(means, largest, strict=True)]
        return ScoreProfile(
            softmax_max=phi,
            by_head=torch.tensor([phi for phi, _ in by_head], dtype=torch.float32, device="cpu"),
            least=self.least,
            most=float(largest.max()),
            outside=outside,
            outside_by_head=sum(outside for _, outside in by_head) / heads,
        )


def _best(means: Tensor, largest: Tensor, below: float, above: float) -> tuple[float, float]:
    """Return (phi, share of parts out of range), for the ``softmax_max`` phi that keeps most parts in range.

    A part is 64 keys of a row. It is in range if its mean is at least ``phi - below`` and its largest score
    at most ``phi + above``.
    """
    lows, highs = means.sort().values, largest.sort().values
    # Try each mean as the lower end of the range. A part is outside if its mean is below the range, or its
    # largest score above the range.
    behind = highs.numel() - torch.searchsorted(highs, lows + (below + above), right=True)
    outside = behind + torch.searchsorted(lows, lows)
    i = int(outside.argmin())
    end = highs[highs <= lows[i] + (below + above)]
    room = below + above - float(end[-1] - lows[i] if len(end) else 0.0)
    phi = float(lows[i]) + below - min(room / 2, _SLACK)
    return phi, float(((means < phi - below) | (largest > phi + above)).float().mean())


class _Dispatched(TorchDispatchMode):
    """Observes flashtile's operators: under a dispatch mode every call goes through them."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self._parts = parts

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is FORWARD.operator:
            (q, k, _), extras, options = FORWARD.split(arguments)
            # Calls with score or mask functions are not profiled.
            given = () if isinstance(extras, ModifiedExtras) else _sequences(q, k, extras)
            for q_rows, k_rows in given:
                self._parts.add(q_rows, k_rows, options.softmax_scale, options.softcap, options.masking)
        elif function is DECODE.operator:
            (q, k_cache, _), tensors, options = DECODE.split(arguments)
            offsets = tensors.cu_seqlens_q
            lengths = sequence_lengths(0, 0, tensors, options.seqlen_new)
            for b, q_rows in enumerate(q if offsets is None else _split(q, offsets)):
                length = None if lengths is None else int(lengths[b])
                k = sequence(k_cache, b, length, tensors, tensors.k_descale, torch.float32)
                if tensors.cache_leftpad is not None:
                    k = k[int(tensors.cache_leftpad[b]) :]
                self._parts.add(q_rows, k, options.softmax_scale, options.softcap, options.masking)
        return function(*arguments, **(keywords or {}))


class _Functions(TorchFunctionMode):
    """Observes PyTorch's attention, whichever kernel it uses."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self._parts = parts

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function is scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
            given = dict(zip(names, arguments, strict=False)) | keywords
            q, k = (given[name].flatten(0, -4).transpose(1, 2) for name in ("query", "key"))
            # Only square causal masks are applied here, because SDPA aligns others to the top left. With any
            # other mask, hidden scores are profiled as well.
            masking = CAUSAL if given.get("is_causal") and q.shape[1] == k.shape[1] else EVERYTHING
            for q_rows, k_rows in zip(q, k, strict=True):
                self._parts.add(q_rows, k_rows, given.get("scale"), 0.0, masking)
        return function(*arguments, **keywords)


def _sequences(q: Tensor, k: Tensor, extras: Any) -> Iterator[tuple[Tensor, Tensor]]:
    if extras.cu_seqlens_q is None:
        yield from zip(q, k, strict=True)
        return
    yield from zip(_split(q, extras.cu_seqlens_q), _split(k, extras.cu_seqlens_k), strict=True)


def _split(tokens: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    starts = cu_seqlens.tolist()
    return [tokens[start:end] for start, end in pairwise(starts)]
