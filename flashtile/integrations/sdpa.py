"""flashtile in the place of ``torch.nn.functional.scaled_dot_product_attention``.

:class:`sdpa` replaces the function in ``torch.nn.functional``, for every call in the process that looks it up
there. :func:`flashtile.integrations.torch.register`, which is also importable from here, replaces the kernels
of torch's flash backend instead, below autograd.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import has_torch_function

from flashtile.api.attention import attention
from flashtile.api.padding import MaskPattern, as_booleans, as_mask_or_bias, attend, can_look, recognise
from flashtile.checks.arguments import ERRORS, check_backend, check_dense, renamed
from flashtile.integrations.torch import register
from flashtile.torch_private import torchscript_builtins

__all__ = ["register", "sdpa"]

FUNCTION = "scaled_dot_product_attention"
_OF_SDPA = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}


class sdpa:  # noqa: N801 - a context manager, named as torch names its own
    """Replace ``F.scaled_dot_product_attention`` by flashtile, within a ``with`` block or until disabled.

    Arguments have torch's meaning: ``is_causal`` is aligned at the upper left, a boolean mask is True for
    visible keys, and heads are grouped only with ``enable_gqa``.

    Key padding masks, causal masks and combinations of both are recognised, as booleans or as floats of 0 and
    -inf. Scores that these masks hide cost no work. Recognising a mask synchronises with the device in every
    call, except for a boolean mask of shape (batch, 1, 1, seqlen_k) on a GPU. Kernels read all other masks
    element by element, as booleans or as a bias, which may have a gradient. Within a CUDA graph, a compiled
    graph or a transform, kernels read every mask in this way.

    ``nn.MultiheadAttention`` also calls the replaced function, except on torch's inference fast path
    (``torch.backends.mha.set_fastpath_enabled(False)`` disables this path).

    Three kinds of calls are not replaced: calls through a name that was imported before (``from
    torch.nn.functional import scaled_dot_product_attention``), calls that ``torch.compile`` has compiled
    before, and calls in TorchScript. The backward pass may run after the block, except for checkpointed
    modules, which compute the forward pass again.

    Args:
        fallback: pass calls that flashtile does not support (head sizes above 576, for example) to torch.
            False: raise an error that names the reason.
        backend: as for :func:`flashtile.attention`.

    Attributes:
        served: number of calls that flashtile has computed.
        passed: number of calls that torch has computed, by reason.

    Raises:
        TypeError, ValueError, NotImplementedError: with ``fallback=False``, as :func:`flashtile.attention`,
            with torch's names of the arguments.

    Examples:
        >>> from torch.nn import functional as F
        >>> q, k, v = torch.randn(3, 2, 4, 128, 64).unbind()  # (batch, heads, seqlen, head_dim)
        >>> with flashtile.sdpa() as door:
        ...     out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> door.served, door.passed
        (1, Counter())
        >>> torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    """

    def __init__(self, fallback: bool = True, backend: str | None = None) -> None:
        if type(fallback) is not bool:
            raise TypeError(f"fallback must be True or False, got {type(fallback).__name__}")
        check_backend(backend)
        self.fallback, self.backend = fallback, backend
        self.served = 0
        self.passed: Counter[str] = Counter()
        self._replaced: Any = None
        # Each access to self.attend makes another object, and TorchScript finds a builtin by its object's id.
        self._function = self.attend
        self._last: _Looked | None = None

    def enable(self) -> None:
        """Replace the function until :meth:`disable`.

        Raises:
            RuntimeError: this object has already replaced the function.
        """
        if self._replaced is not None:
            raise RuntimeError("this flashtile.sdpa is already enabled")
        self._replaced = getattr(F, FUNCTION)
        setattr(F, FUNCTION, self._function)
        if not torch.compiler.is_dynamo_compiling():  # a graph contains no TorchScript
            torchscript_builtins()[id(self._function)] = f"aten::{FUNCTION}"

    def disable(self) -> None:
        """Restore the replaced function.

        Raises:
            RuntimeError: this object has not replaced the function, or other code has replaced it since.
        """
        if self._replaced is None or getattr(F, FUNCTION) is not self._function:
            raise RuntimeError(f"torch.nn.functional.{FUNCTION} must be this flashtile.sdpa to disable it")
        setattr(F, FUNCTION, self._replaced)
        if not torch.compiler.is_dynamo_compiling():
            torchscript_builtins().pop(id(self._function), None)  # enable() may be in a graph
        self._replaced = self._last = None

    def __enter__(self) -> sdpa:
        self.enable()
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute one call of ``scaled_dot_product_attention``. It also works without :meth:`enable`."""
        try:
            out = self._serve(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        except ERRORS as error:
            named = renamed(error, _OF_SDPA)
            if not self.fallback:
                raise named from None
            self.passed[str(named)] += 1
            return self._fall_back(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        self.served += 1
        return out

    def _fall_back(self, *arguments: Any, **named: Any) -> Tensor:
        """Return torch's result.

        Tensor subclasses look the function up by its name, so torch's function is restored while they run.
        """
        if self._replaced is None:
            return getattr(F, FUNCTION)(*arguments, **named)
        if not has_torch_function([a for a in arguments if isinstance(a, Tensor)]):
            return self._replaced(*arguments, **named)
        setattr(F, FUNCTION, self._replaced)
        try:
            return self._replaced(*arguments, **named)
        finally:
            setattr(F, FUNCTION, self._function)

    def _serve(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_dense(name, tensor)
        lead = query.shape[:-2]
        if not lead == key.shape[:-2] == value.shape[:-2] and not (
            enable_gqa and query.dim() == key.dim() == 4 and lead[:1] == key.shape[:1] == value.shape[:1]
        ):
            raise ValueError(
                "key and value must have the leading dimensions of query (heads grouped with enable_gqa), "
                f"got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
            )
        if is_causal and attn_mask is not None:
            raise ValueError("attn_mask must be None with is_causal=True, got a tensor")
        q, k, v = (_heads_second(t) for t in (query, key, value))
        options: dict[str, Any] = {"dropout_p": dropout_p, "softmax_scale": scale, "backend": self.backend}
        if isinstance(attn_mask, CausalBias) and attn_mask.variant == CausalVariant.LOWER_RIGHT:
            out = attention(q, k, v, causal=True, **options)
        elif attn_mask is None or isinstance(attn_mask, CausalBias):
            is_causal = is_causal or attn_mask is not None
            k, v, masking = _masked(q, k, v, is_causal)
            out = attention(q, k, v, **masking, **options)
        else:
            pattern = self._pattern(attn_mask, query, k.shape[1])
            if pattern is None:
                out = attention(q, k, v, **as_mask_or_bias(attn_mask), **options)
            else:
                out, _ = attend(q, k, v, pattern, **options)
        return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])

    def _pattern(self, mask: Tensor, query: Tensor, seqlen_k: int) -> MaskPattern | None:
        """Return the pattern of a mask, or None if there is none or if the host must not read the mask.

        Successive layers share a mask, so the last pattern is reused if the mask has the same elements. The
        elements are compared, because some writes change neither the address nor the version of a tensor
        (numpy, ``.data``, kernels, graph replays).
        """
        check_dense("attn_mask", mask)
        _check_broadcast(mask, query, seqlen_k)
        if mask.requires_grad or not can_look(mask):
            return None
        batch, seqlen_q = query.shape[:-3].numel(), query.shape[-2]
        if mask.is_cuda and mask.dtype == torch.bool and mask.shape[:-1].numel() == mask.shape[:1].numel():
            return None  # attention recognises a key padding mask by this shape
        known, kind = self._last, (mask.shape, mask.dtype, mask.device, batch, seqlen_q, seqlen_k)
        distinct = mask[tuple(slice(None) if stride else slice(1) for stride in mask.stride())]
        if known is not None and known.kind == kind and torch.equal(known.held, distinct):
            return known.pattern
        booleans = as_booleans("attn_mask", mask)
        pattern = None if booleans is None else recognise(booleans, batch, seqlen_q, seqlen_k)
        self._last = _Looked(kind, distinct.clone(), pattern)
        return pattern


class _Looked(NamedTuple):
    """A mask whose pattern was determined.

    Attributes:
        kind: shape, dtype and device of the mask, and sizes of the call.
        held: a copy of the mask's elements, without broadcast dimensions.
        pattern: the pattern, or None if none was recognised.
    """

    kind: tuple
    held: Tensor
    pattern: MaskPattern | None


def _heads_second(tensor: Tensor) -> Tensor:
    """Convert (..., heads, seqlen, head_dim) to (batch, seqlen, heads, head_dim).

    Missing dimensions get size 1, and additional ones are flattened into the batch.
    """
    if tensor.dim() < 2:
        raise ValueError(f"query, key and value must have 2 dimensions or more, got {tuple(tensor.shape)}")
    if tensor.dim() < 4:
        tensor = tensor[(None,) * (4 - tensor.dim())]
    elif tensor.dim() > 4:
        tensor = tensor.flatten(0, -4)
    return tensor.transpose(1, 2)


def _check_broadcast(mask: Tensor, query: Tensor, seqlen_k: int) -> None:
    """Check that ``mask`` broadcasts to the scores.

    If the scores have more than 4 dimensions, the mask's dimensions before the last two must have size 1.
    """
    scores = (*query.shape[:-1], seqlen_k)
    allowed = scores if len(scores) <= 4 else (1, *scores[-2:])
    pairs = zip(reversed(mask.shape), reversed(allowed), strict=False)
    if mask.dim() > len(allowed) or any(size not in (1, whole) for size, whole in pairs):
        raise ValueError(f"attn_mask must broadcast to {allowed}, got shape {tuple(mask.shape)}")
    if mask.device != query.device:
        raise ValueError(f"attn_mask must be on query's device, {query.device}, got {mask.device}")


def _masked(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return (keys, values, options of attention) for torch's causal mask, aligned at the upper left.

    Keys and values after the last visible key are cut off.
    """
    beyond = q.shape[1] - k.shape[1]
    if not is_causal or beyond == 0:
        return k, v, {"causal": is_causal}
    if beyond > 0:
        return k, v, {"window_size": (-1, beyond)}
    return k[:, : q.shape[1]], v[:, : q.shape[1]], {"causal": True}
