"""Conversions of arguments to exact types, because calls are described and cached by their arguments.

In Python ``True == 1 == 1.0``, and all three have the same hash. So each option is converted to its type
before it becomes part of a cache key.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashtile.checks.arguments import (
    as_float,
    as_int,
    check_dense,
    check_offsets,
    check_qv,
    named,
)
from flashtile.checks.attention import check_operands, check_types
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.problems.common import DEVICE_TYPES, MAX_HEAD_DIM, MAX_LENGTH, UNLIMITED
from flashtile.problems.masking import Masking
from flashtile.torch_private import is_any_autocast_enabled

AUTOCAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def as_masking(causal: Any = False, window_size: Any = (UNLIMITED, UNLIMITED), **options: Any) -> Masking:
    """Convert the arguments that hide keys by position to a Masking. Ranges are checked later.

    ``options`` are the options of :class:`Masking` other than the window.

    Raises:
        TypeError: an argument does not have the type that :func:`flashtile.attention` states.
        ValueError: ``window_size`` is not a pair.
    """
    try:
        left, right = window_size
    except (TypeError, ValueError) as error:
        text = f"window_size must be a pair (left, right) of ints, got {named(window_size)}"
        raise type(error)(text) from None
    if type(left) is not int:
        left = as_int("window_size[0]", left)
    if type(right) is not int:
        right = as_int("window_size[1]", right)
    if left < UNLIMITED:
        left = UNLIMITED
    if right < UNLIMITED:
        right = UNLIMITED
    for name in options:
        if type(options[name]) is not int:
            options[name] = as_int(name, options[name])
    if type(causal) is not bool:
        raise TypeError(f"causal must be True or False, got {named(causal)}")
    right = 0 if causal and right <= MAX_LENGTH else right  # the check of ranges refuses a larger one
    if not torch.compiler.is_dynamo_compiling():  # which does not use a cache of functools, and warns of it
        try:
            return _kept_masking(window_left=left, window_right=right, **options)
        except TypeError:  # a symbolic number, which is not hashable
            pass
    return Masking(window_left=left, window_right=right, **options)


_kept_masking = functools.lru_cache(maxsize=1024)(Masking)
"""Maskings by their options. Making one takes longer than all other conversions of a call."""


def make_options(
    masking: Masking,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    backend: str | None = None,
    dropout_p: float = 0.0,
    invariant: bool = False,
) -> Options:
    """Convert arguments to their exact types, and return them as Options. Ranges are checked later.

    Raises:
        TypeError: an argument does not have the type that :func:`flashtile.attention` states.
    """
    if max_seqlen_q is not None and type(max_seqlen_q) is not int:
        max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and type(max_seqlen_k) is not int:
        max_seqlen_k = as_int("max_seqlen_k", max_seqlen_k)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = as_float("softmax_scale", softmax_scale, "a number or None")
    if type(softcap) is not float:
        softcap = as_float("softcap", softcap, "a number")
    if type(dropout_p) is not float:
        dropout_p = as_float("dropout_p", dropout_p, "a number")
    if type(deterministic) is not bool:
        raise TypeError(f"deterministic must be True or False, got {named(deterministic)}")
    if backend is not None and type(backend) is not str:
        raise TypeError(f"backend must be None or a backend's name, got {named(backend)}")
    if type(invariant) is not bool:
        raise TypeError(f"invariant must be True or False, got {named(invariant)}")
    if not deterministic:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return Options.__new__(  # with keywords, a call of the class itself takes twice as long
        Options,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        masking=masking,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
        dropout_p=dropout_p,
        invariant=invariant,
    )


MAX_SECONDS = 2**31 - 1

FOREIGN = {
    "attn_mask": "use mask (boolean) of flashtile.attention, or causal and window_size",
    "attention_mask": "use key_padding_mask of flashtile.attention, True for keys that are not padding, or "
    "flash_attn_varlen_func on packed tokens, which also skips padded queries",
    "mask": "use mask of flashtile.attention",
    "is_causal": "use causal, which is aligned to the bottom right",
    "scale": "use softmax_scale",
    "enable_gqa": "leave enable_gqa out, because heads are grouped automatically",
    "need_weights": "use return_attn_weights of flashtile.attention",
    "output_attentions": "use return_attn_weights of flashtile.attention",
}
FOREIGN["key_padding_mask"] = FOREIGN["attention_mask"]
"""Argument names of other attention functions, and what to use instead."""


def refuse_unknown(function: str, unknown: Mapping[str, Any]) -> NoReturn:
    """Raise TypeError for an unknown keyword, as Python does, with a hint about what to use instead."""
    name = next(iter(unknown))
    hint = f": {FOREIGN[name]}" if name in FOREIGN else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def padding_of(mask: Any, q: Any, k: Any) -> tuple[Any, Any]:
    """Convert a mask that only hides padded keys to a key_padding_mask.

    Returns (mask, key_padding_mask), one of which is None. A bool mask (batch or 1, 1, 1, seqlen_k) becomes a
    key_padding_mask (batch, seqlen_k). Any other mask, even an invalid one, is returned unchanged, so that
    errors name ``mask``.
    """
    if not all(isinstance(t, Tensor) and t.dim() == 4 for t in (mask, q, k)):
        return mask, None
    batch, heads, rows, keys = mask.shape
    if heads != 1 or rows != 1 or keys != k.shape[1] or batch not in (1, q.shape[0]):
        return mask, None
    if mask.dtype != torch.bool or mask.device != q.device or q.dtype == torch.float8_e4m3fn:
        return mask, None
    return None, mask[:, 0, 0].expand(q.shape[0], -1)


def under_autocast(*tensors: Any, cache: Any = None) -> tuple[Any, ...]:
    """Return q, k and v, cast to autocast's dtype if autocast is on for the device of the first.

    With a KV ``cache``, they are cast to its dtype instead, unless the cache is in FP8. As in torch's own
    attention, float64 is not cast. Dtypes that flashtile does not support are not cast either.
    """
    if not is_any_autocast_enabled():
        return tensors
    first = tensors[0] if cache is None else cache
    if not isinstance(first, Tensor) or first.device.type not in DEVICE_TYPES:
        return tensors
    device_type = first.device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    if cache is not None and cache.dtype != torch.float8_e4m3fn:
        dtype = cache.dtype
        if dtype not in AUTOCAST_DTYPES:
            return tensors
    casts = [isinstance(t, Tensor) and t.dtype in AUTOCAST_DTYPES for t in tensors]
    return tuple([t.to(dtype) if cast else t for t, cast in zip(tensors, casts, strict=True)])


def as_operands(*tensors: Any, cache: Any = None) -> Sequence[Any]:
    """Return q, k and v as operations take them: cast under autocast, and with a last stride of 1."""
    if is_any_autocast_enabled():
        tensors = under_autocast(*tensors, cache=cache)
    try:
        for tensor in tensors:
            # is_contiguous() takes a third of the time of stride(-1)
            if tensor is not None and not tensor.is_contiguous() and tensor.stride(-1) != 1:
                break
        else:
            return tensors
    except Exception:  # not a tensor, or one without strides: later checks refuse it
        pass
    return [with_unit_stride(tensor) for tensor in tensors]


def as_scores(scores: Any, seqlen_k: Any) -> Any:
    """Expand a mask or bias to four dimensions. The size of the last dimension becomes seqlen_k.

    A tensor that does not broadcast to the scores is returned unchanged, and rejected by later checks.
    """
    if not isinstance(scores, Tensor) or scores.is_nested or scores.layout != torch.strided:
        return scores
    rank = scores.dim()
    if seqlen_k is None or (rank and scores.shape[-1] not in (1, seqlen_k)):
        return scores
    if rank < 4:
        scores = scores[(None,) * (4 - rank)]
    if scores.shape[-1] != seqlen_k:
        scores = scores.expand(*scores.shape[:-1], seqlen_k)
    return scores


MAX_TOP = 128
"""Largest number of weights per row that the kernels keep in registers."""


def as_form(name: str, form: Any) -> tuple[str, int]:
    """Convert the ``form`` of attention weights to (form, number of weights per row). True means "full".

    ``name`` is the argument's name in errors.
    """
    if form is True or (isinstance(form, str) and form == "full"):
        return "full", 0
    if isinstance(form, str) and form == "columns":
        return "columns", 0
    allowed = f'{name} must be "full", "columns" or an int from 1 to {MAX_TOP}'
    if isinstance(form, str):
        raise ValueError(f"{allowed}, got {form!r}")
    try:
        top = as_int(name, form)
    except TypeError:
        raise TypeError(f"{allowed}, got {type(form).__name__} {form!r}") from None
    if not 1 <= top <= MAX_TOP:
        raise ValueError(f"{allowed}, got {top}")
    return "top", top


def keys_of_scores(k: Any, cu_seqlens_k: Any, options: Options) -> Any:
    """Return seqlen_k, the size of the last dimension of a mask or bias, or None if the call is invalid."""
    if cu_seqlens_k is not None:
        return options.max_seqlen_k
    return k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else None


def join_qv(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, extras: OptionalTensors, options: Options
) -> tuple[Tensor, Tensor]:
    """Return q and k with the columns of qv and v appended. Their product is ``q k^T + qv v^T``.

    These are the queries for v of multi-head latent attention. Both results are differentiable. Only what is
    joined is checked here, so that errors name its own shapes.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flashtile.attention`.
    """
    if isinstance(q, Tensor) and q.dtype == torch.float8_e4m3fn:
        raise NotImplementedError("qv must be None for q, k and v of float8_e4m3fn, got a tensor")
    check_types(q, k, v, extras, options)
    if not torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace the check of strides
        check_operands(q, k, v, extras.cu_seqlens_q is not None or extras.cu_seqlens_k is not None)
    check_qv(q, v, "v", qv)
    columns = q.shape[-1] + v.shape[-1]
    if columns > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"qv needs head_dims of q and v that add up to at most {MAX_HEAD_DIM}, got {q.shape[-1]} and "
            f"{v.shape[-1]}: flash_attn_with_kvcache takes up to 512 each, without a backward pass"
        )
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def optional_tensors(
    q: Any,
    k: Any,
    options: Options,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    mask: Any,
    key_padding_mask: Any,
    bias: Any,
    finds_padding: bool = False,
    **others: Any,
) -> OptionalTensors:
    """Return the optional tensors of a call: int32 offsets, and a mask and bias of four dimensions.

    With ``finds_padding``, a mask that only hides padded keys becomes a key_padding_mask.
    """
    cu_seqlens_q, cu_seqlens_k = as_offset_pair(cu_seqlens_q, cu_seqlens_k)
    if mask is not None or bias is not None:
        seqlen_k = keys_of_scores(k, cu_seqlens_k, options)
        mask, bias = as_scores(mask, seqlen_k), as_scores(bias, seqlen_k)
    if finds_padding and mask is not None and key_padding_mask is None:
        mask, key_padding_mask = padding_of(mask, q, k)
    return OptionalTensors(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        mask=mask,
        key_padding_mask=key_padding_mask,
        bias=bias,
        **others,
    )


def as_offsets(cu_seqlens: Any) -> Any:
    """Cast ``cu_seqlens`` from int64, which ``cumsum`` returns, to int32.

    Any other value is returned unchanged. Later checks reject it if it is invalid.
    """
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype is torch.int64:
        return cu_seqlens.int()
    return cu_seqlens


def as_offset_pair(cu_seqlens_q: Any, cu_seqlens_k: Any) -> tuple[Any, Any]:
    """Apply :func:`as_offsets` to both offsets. If they are the same tensor, it is cast only once."""
    of_q = as_offsets(cu_seqlens_q)
    return of_q, of_q if cu_seqlens_k is cu_seqlens_q else as_offsets(cu_seqlens_k)


def with_unit_stride(tensor: Any) -> Any:
    """Return ``tensor``, or a contiguous copy if its last stride is not 1, as FlashAttention does."""
    if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    if tensor.shape[-1] <= 1 or tensor.layout != torch.strided:
        return tensor
    # Not contiguous(), which keeps the strides of a tensor without elements.
    return tensor.clone(memory_format=torch.contiguous_format)


def in_memory(tensor: Any) -> Any:
    """Return ``tensor``, or a copy if its memory holds the numbers before a lazy negation.

    Torch's dispatcher applies the negation, but messages between ranks and direct launches do not.
    """
    return tensor.resolve_neg() if isinstance(tensor, Tensor) else tensor


def as_seconds(name: str, value: Any) -> float:
    """Convert a timeout to seconds, in the range that torch.distributed accepts."""
    seconds = as_float(name, value, "a number of seconds")
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"{name} must be above 0 and at most {MAX_SECONDS} seconds, got {seconds:g}")
    return seconds


def with_statistics(
    options: Options, return_max_logits: Any, return_entropy: Any, q: Any, buffers: tuple[Tensor | None, ...]
) -> Options:
    """Return the options of a call that also returns statistics of its scores.

    Raises:
        TypeError: an argument is not a bool.
        NotImplementedError: the call has an argument that cannot be combined with them.
    """
    check_flag("return_max_logits", return_max_logits)
    check_flag("return_entropy", return_entropy)
    if return_max_logits or return_entropy:
        name = "return_max_logits" if return_max_logits else "return_entropy"
        if isinstance(q, Tensor) and q.dtype == torch.float8_e4m3fn:
            raise NotImplementedError(f"q must be float16 or wider with {name}, got {q.dtype}")
        if buffers:
            buffer = "lse" if buffers[0] is None else "out"
            raise NotImplementedError(f"{buffer} must be None with {name}, got a tensor")
        if options.invariant:
            raise NotImplementedError(f"invariant must be False with {name}, got True")
    return options._replace(max_logits=return_max_logits, entropy=return_entropy)


def check_flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def check_tuning(pack_gqa: Any = None, scheduler_metadata: Any = None, **numbers: Any) -> None:
    """Check the types of FlashAttention's arguments that change no result here. None is always allowed."""
    if pack_gqa is not None:
        check_flag("pack_gqa", pack_gqa)
    if scheduler_metadata is not None and not isinstance(scheduler_metadata, Tensor):
        raise TypeError(
            f"scheduler_metadata must be a torch.Tensor or None, got {type(scheduler_metadata).__name__}"
        )
    for name, value in numbers.items():
        if value is not None and type(value) is not int:
            as_int(name, value)


def lengths_tensor(
    length: Any, name: str, tokens: Tensor, name_of_offsets: str, cu_seqlens: Tensor | None
) -> Tensor:
    """Return ``cache_seqlens``, a tensor (batch,) int32 filled with ``length``, for the batch of ``tokens``.

    ``name`` and ``name_of_offsets`` are the names of ``tokens`` and ``cu_seqlens`` in errors.
    """
    length = as_int("cache_seqlens", length)
    if not 0 <= length <= MAX_LENGTH:
        raise ValueError(f"cache_seqlens must be from 0 to {MAX_LENGTH}, got {length}")
    check_dense(name, tokens)
    if cu_seqlens is None:
        batch = tokens.shape[:1].numel()
    else:
        check_offsets(name_of_offsets, cu_seqlens, tokens)
        batch = cu_seqlens.shape[0] - 1
    return torch.full((batch,), length, dtype=torch.int32, device=tokens.device)


def split_arguments(num_splits: Any, split_size: Any) -> tuple[int, int]:
    """Convert num_splits and split_size to ints. A split_size of None becomes 0."""
    if type(num_splits) is not int:
        num_splits = as_int("num_splits", num_splits)
    if split_size is None:
        return num_splits, 0
    split_size = as_int("split_size", split_size)
    if split_size < 1:
        raise ValueError(f"split_size must be None or at least 1, got {split_size}")
    return num_splits, split_size


def softmax_max_arguments(softmax_max: Any) -> tuple[float | None, Tensor | None]:
    """Return (number for all heads, tensor with one number per head). One of the two is None."""
    if isinstance(softmax_max, Tensor):
        return None, softmax_max
    return as_float("softmax_max", softmax_max, "a number, a tensor or None"), None


def is_batch(k: Any) -> bool:
    """Whether k, if it is valid, is (batch, seqlen_new, heads_kv, head_dim)."""
    return isinstance(k, Tensor) and k.dim() == 4


def contiguous_qv(qv: Tensor) -> Tensor:
    """Return ``qv``, or a contiguous copy of it, because operations over a cache need a contiguous one."""
    check_dense("qv", qv)
    return qv.contiguous()


def dense_tree(tree_mask: Tensor) -> Tensor:
    """Return a contiguous tree_mask of shape (batch or 1, seqlen_q, seqlen_q)."""
    check_dense("tree_mask", tree_mask)
    if tree_mask.dim() == 2:
        tree_mask = tree_mask.unsqueeze(0)
    return tree_mask.contiguous()
