"""Predefined masks and score functions, written as a user would write them.

Each function returns a :class:`~flashtile.masks.MaskMod` or a :class:`~flashtile.masks.ScoreMod`, which
FlexAttention also accepts. Positions count from 0. With ``offset``, query i is at the position of key
``i + offset``, so ``offset=seqlen_k - seqlen_q`` aligns a mask to the bottom right, as
``attention(causal=True)`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from flashtile.checks.arguments import as_float, as_int, check_dense, check_int
from flashtile.masks.mods import MaskMod, Mod, ScoreMod
from flashtile.problems.common import FLOAT32_MAX, MAX_LENGTH, WHOLE

_P = ParamSpec("_P")
_M = TypeVar("_M", bound=Mod)


def _ready(make: Callable[_P, _M]) -> Callable[_P, _M]:
    """Decorate ``make`` so that pickle stores a returned object as the call that made the object."""

    @functools.wraps(make)
    def made(*arguments: _P.args, **keywords: _P.kwargs) -> _M:
        mod = make(*arguments, **keywords)
        mod.recipe = functools.partial(made, *arguments, **keywords), ()
        return mod

    return made


def _length(name: str, value: Any, least: int = -MAX_LENGTH) -> int:
    value = as_int(name, value)
    check_int(name, value, least, MAX_LENGTH)
    return value


def _table(name: str, tensor: Any, ranks: tuple[int, ...], layout: str, of_floats: bool) -> Tensor:
    """Return a captured tensor if its dtype is of the right kind and its rank is in ``ranks``, else raise."""
    check_dense(name, tensor)
    if not (tensor.is_floating_point() if of_floats else tensor.dtype in WHOLE):
        raise TypeError(
            f"{name} must have a dtype of {'floats' if of_floats else 'ints'}, got {tensor.dtype}"
        )
    if tensor.dim() not in ranks:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(tensor.shape)}")
    return tensor


@_ready
def causal(offset: int = 0) -> MaskMod:
    """Mask that hides keys after the query's own position.

    Examples:
        >>> from flashtile import masks
        >>> masks.causal()(0, 0, torch.arange(3)[:, None], torch.arange(3)).int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    offset = _length("offset", offset)
    return MaskMod(lambda batch, head, q_idx, kv_idx: kv_idx <= q_idx + offset, "causal")


@_ready
def window(left: int, right: int, offset: int = 0) -> MaskMod:
    """Mask that shows keys from ``left`` before to ``right`` after the query. Negative means no limit.

    Examples:
        >>> from flashtile import masks
        >>> masks.window(1, 0)(0, 0, torch.arange(3)[:, None], torch.arange(3)).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """

    left, right, offset = _length("left", left), _length("right", right), _length("offset", offset)

    def window(batch, head, q_idx, kv_idx):
        distance = kv_idx - (q_idx + offset)
        # FlexAttention's create_block_mask takes nothing but tensors. A trace needs no comparison.
        seen = distance == distance if isinstance(distance, Tensor) and left < 0 and right < 0 else True
        if left >= 0:
            seen = (distance >= -left) & seen
        if right >= 0:
            seen = (distance <= right) & seen
        return seen

    return MaskMod(window)


@_ready
def prefix_lm(length: int | Tensor, offset: int = 0) -> MaskMod:
    """Causal mask with a prefix that every query sees.

    From Raffel et al. 2020 (arXiv:1910.10683), section 3.2.1.

    Args:
        length: length of the prefix, an int for all sequences or (batch,) ints.

    Examples:
        >>> from flashtile import masks
        >>> masks.prefix_lm(2)(0, 0, torch.arange(3)[:, None], torch.arange(3)).int().tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    offset = _length("offset", offset)
    if isinstance(length, Tensor):
        _table("length", length, (1,), "(batch,)", False)
    else:
        length = _length("length", length)

    def prefix_lm(batch, head, q_idx, kv_idx):
        prefix = length[batch] if isinstance(length, Tensor) else length
        return (kv_idx < prefix) | (kv_idx <= q_idx + offset)

    return MaskMod(prefix_lm)


@_ready
def document(ids: Tensor, ids_kv: Tensor | None = None) -> MaskMod:
    """Mask that lets a query see only keys of its own document, for several documents in one sequence.

    Args:
        ids: (seqlen_q,) or (batch, seqlen_q) ints. Tokens with equal ids belong to one document.
        ids_kv: ids of the keys; None: ``ids``.

    Examples:
        >>> from flashtile import masks
        >>> mask = masks.document(torch.tensor([0, 0, 1])) & masks.causal()
        >>> mask(0, 0, torch.arange(3)[:, None], torch.arange(3)).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    of_keys = ids if ids_kv is None else ids_kv
    for name, tensor in (("ids", ids), ("ids_kv", of_keys)):
        _table(name, tensor, (1, 2), "(seqlen,) or (batch, seqlen)", False)

    def document(batch, head, q_idx, kv_idx):
        own = ids[q_idx] if ids.dim() == 1 else ids[batch, q_idx]
        return own == (of_keys[kv_idx] if of_keys.dim() == 1 else of_keys[batch, kv_idx])

    return MaskMod(document)


@_ready
def padding(lengths: Tensor) -> MaskMod:
    """Mask that shows the first ``lengths[batch]`` keys of each sequence. ``lengths`` are (batch,) ints.

    Examples:
        >>> from flashtile import masks
        >>> masks.padding(torch.tensor([2]))(torch.tensor(0), 0, 0, torch.arange(3)).int().tolist()
        [1, 1, 0]
    """
    _table("lengths", lengths, (1,), "(batch,)", False)
    return MaskMod(lambda batch, head, q_idx, kv_idx: kv_idx < lengths[batch], "padding")


@_ready
def dilated(size: int, dilation: int, offset: int = 0) -> MaskMod:
    """Mask that shows every ``dilation``-th key: the query's own, and ``size`` keys before and after it.

    From Beltagy et al. 2020 (arXiv:2004.05150), section 3.1.

    Examples:
        >>> from flashtile import masks
        >>> masks.dilated(1, 2)(0, 0, torch.tensor(3), torch.arange(7)).int().tolist()
        [0, 1, 0, 1, 0, 1, 0]
    """

    size, dilation = _length("size", size, 0), _length("dilation", dilation, 1)
    offset = _length("offset", offset)

    def dilated(batch, head, q_idx, kv_idx):
        distance = q_idx + offset - kv_idx
        return (distance.abs() <= size * dilation) & (distance % dilation == 0)

    return MaskMod(dilated)


@_ready
def natten(height: int, width: int, kernel_size: int | tuple[int, int]) -> MaskMod:
    """Mask of neighborhood attention over a picture (Hassani et al. 2023, arXiv:2204.07143).

    Token i is the pixel (i // width, i % width). At the edges the neighborhood is shifted inwards, so every
    query sees the same number of keys. Sequences with more tokens than the picture are refused, unless the
    mask is combined by ``|`` with a mask that defines the additional tokens.

    Args:
        height, width: size of the picture in tokens.
        kernel_size: rows and columns of the neighborhood; odd, and no larger than the picture.

    Raises:
        ValueError: ``kernel_size`` is even or larger than the picture.

    Examples:
        >>> from flashtile import masks
        >>> mask = masks.natten(4, 4, 3)
        >>> mask(0, 0, torch.tensor(0), torch.arange(16)).view(4, 4).int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    """
    height, width = _length("height", height, 1), _length("width", width, 1)
    pair = tuple(kernel_size) if isinstance(kernel_size, (tuple, list)) else (kernel_size, kernel_size)
    if len(pair) != 2:
        raise ValueError(f"kernel_size must be an int or a pair (rows, columns), got {kernel_size!r}")
    rows, columns = (as_int("kernel_size", size) for size in pair)
    for size, most in ((rows, height), (columns, width)):
        if size % 2 == 0 or not 1 <= size <= most:
            raise ValueError(f"kernel_size must be odd and from 1 to {most}, got {size}")

    def natten(batch, head, q_idx, kv_idx):
        seen = True
        for position, key, size, extent in (
            (q_idx // width, kv_idx // width, rows, height),
            (q_idx % width, kv_idx % width, columns, width),
        ):
            center = position.clamp(size // 2, extent - 1 - size // 2)
            seen = ((center - key).abs() <= size // 2) & seen
        return seen

    mask = MaskMod(natten)
    mask.most_tokens = height * width
    return mask


@_ready
def alibi(slopes: Tensor, offset: int = 0) -> ScoreMod:
    """Score function that subtracts slope times distance (ALiBi, Press et al. 2022, arXiv:2108.12409).

    Args:
        slopes: (heads,) floats, learnable.

    Examples:
        >>> from flashtile import masks
        >>> masks.alibi(torch.tensor([0.5]))(1.0, 0, torch.tensor(0), torch.tensor(4), torch.tensor(2))
        tensor(0.)
    """

    _table("slopes", slopes, (1,), "(heads,)", True)
    offset = _length("offset", offset)

    def alibi(score, batch, head, q_idx, kv_idx):
        return score - slopes[head] * (q_idx + offset - kv_idx).abs()

    return ScoreMod(alibi)


@_ready
def relative_position(bias: Tensor, offset: int = 0) -> ScoreMod:
    """Score function that adds a learnable bias for each distance of key and query.

    From Shaw et al. 2018 (arXiv:1803.02155), section 3.2, with scalars instead of vectors.

    Args:
        bias: (heads, 2 * most + 1) floats, learnable. Column ``most + d`` is added if key minus query is d.
            Distances are clamped to -most and most.

    Raises:
        ValueError: ``bias`` does not have two dimensions with an odd number of columns.

    Examples:
        >>> from flashtile import masks
        >>> bias = torch.arange(5.0)[None]  # for the distances -2 to 2
        >>> relative_position = masks.relative_position(bias)
        >>> relative_position(0.0, 0, torch.tensor(0), torch.tensor(1), torch.arange(5)).tolist()
        [1.0, 2.0, 3.0, 4.0, 4.0]
    """
    layout = "(heads, 2 * most + 1)"
    _table("bias", bias, (2,), layout, True)
    offset = _length("offset", offset)
    if bias.shape[1] % 2 == 0:
        raise ValueError(f"bias must have shape {layout}, got {tuple(bias.shape)}")
    most = bias.shape[1] // 2

    def relative_position(score, batch, head, q_idx, kv_idx):
        return score + bias[head, (kv_idx - (q_idx + offset)).clamp(-most, most) + most]

    return ScoreMod(relative_position)


@_ready
def softcap(cap: float) -> ScoreMod:
    """Score function ``cap * tanh(score / cap)``, as in Gemma 2 (arXiv:2408.00118, section 2).

    Examples:
        >>> from flashtile import masks
        >>> masks.softcap(2.0)(torch.tensor(100.0), 0, 0, 0, 0)
        tensor(2.)
    """
    cap = as_float("cap", cap, "a number")
    if not 0 < cap <= FLOAT32_MAX:
        raise ValueError(f"cap must be above 0 and finite in float32, got {cap}")

    def softcap(score, batch, head, q_idx, kv_idx):
        return cap * (score / cap).tanh()

    return ScoreMod(softcap)
