"""Checks of single tensors and numbers, which the other modules combine into the checks of a call.

Each check raises an error that names the argument, its value and what is allowed.
"""

from __future__ import annotations

import contextlib
import numbers
import operator
import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.problems.common import (
    DEVICE_TYPES,
    DTYPES,
    FLOAT32_MAX,
    MAX_HEAD_DIM,
    MAX_LENGTH,
    PREFERENCE,
)
from flashtile.problems.masking import RANGES, Masking
from flashtile.torch_private import check_in_graph

ERRORS = (TypeError, ValueError, NotImplementedError)


def renamed(error: Exception, names: dict[str, str]) -> Exception:
    """Return ``error`` with its argument names replaced by those of the function that the user called.

    Words in quotes are values, and lines after the first show the user's code. Both stay unchanged.

    Args:
        names: maps argument names in the message to the user's names.
    """
    words = "|".join(map(re.escape, names))
    first, *code = str(error).splitlines(keepends=True)
    first = re.sub(rf"(?<!')\b({words})\b(?!')", lambda match: names[match[0]], first)
    return type(error)("".join((first, *code)))


@contextlib.contextmanager
def renaming(**names: str) -> Iterator[None]:
    """Rename arguments in errors within a block: with ``tokens="values"``, errors name ``values``."""
    try:
        yield
    except ERRORS as error:
        raise renamed(error, names) from None


def as_int(name: str, value: Any) -> Any:
    """Convert an integral value to an int, for example a numpy integer or an integer tensor of one element.

    Raise TypeError naming the argument for any other value, bools included. A SymInt is returned unchanged.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    is_bool = isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool)
    try:
        if not is_bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, got {named(value)}")


def as_float(name: str, value: Any, allowed: str) -> Any:
    """Convert a real number to a float, for example an int or a numpy float. Symbolic numbers stay unchanged.

    Raise TypeError for any other value, bools included, and ValueError for an int too large for a float.
    ``allowed`` describes allowed values in the message.
    """
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
        raise TypeError(f"{name} must be {allowed}, got {named(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got {named(value)}") from None


def as_device(name: str, value: Any) -> torch.device:
    """Return the device that ``value`` names, with its index. Raise ValueError if torch does not have it."""
    try:
        if value is not None:  # torch would replace None by its default device
            return torch.empty(0, device=value).device
        first = "there is no default device"
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
        first = str(error).partition("\n")[0]
    raise ValueError(f"{name} must be a device that torch has here, got {named(value)} ({first})")


def named(value: Any) -> str:
    """Describe a value by its type and, if short, its repr, for an error message."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of {value.dim()} dimensions"
    if isinstance(value, torch.dtype):
        return str(value)
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits, an object with a broken __repr__
        return type(value).__name__
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def check_dense(name: str, tensor: Any) -> None:
    """Raise TypeError unless ``tensor`` is a dense torch.Tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")


def check_heads_tensor(
    name: str, tensor: Tensor, packed: bool, total: str, seqlen: str, first: Tensor, most: int = MAX_HEAD_DIM
) -> None:
    """Check the layout (total, heads, head_dim) if ``packed``, else (batch, seqlen, heads, head_dim).

    Args:
        total, seqlen: names of these dimensions in messages.
        first: the tensor whose device ``tensor`` must have.
        most: the largest head_dim.
    """
    rank, layout = (
        (3, f"({total}, heads, head_dim)") if packed else (4, f"(batch, {seqlen}, heads, head_dim)")
    )
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions {layout}, got shape {tuple(tensor.shape)}")
    check_device(name, tensor, first)
    check_head_dim(name, tensor, most)
    check_last_stride(name, tensor)


def check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {_listed(dtypes)}, got {tensor.dtype}")


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    *others, last = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}" if others else last


def check_equal(what: str, name: str, value: Any, name_of_first: str, first: Any) -> None:
    """Check that two tensors have the same ``what``, for example the same "batch size"."""
    if value != first:
        value, first = (tuple(x) if isinstance(x, torch.Size) else x for x in (value, first))
        raise ValueError(f"{name} has {what} {value}, but {name_of_first} has {first}: they must be equal")


def check_same_rows(name: str, tensor: Any, name_of_first: str, first: Any) -> None:
    """Check that two tensors have the same shape, except for head_dim."""
    if tensor.shape[:-1] != first.shape[:-1]:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, which must be that of {name_of_first}, "
            f"{tuple(first.shape)}, except for head_dim"
        )


def check_same_dtype(name: str, tensor: Tensor, name_of_first: str, first: Tensor) -> None:
    if tensor.dtype != first.dtype:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, but {name_of_first} has {first.dtype}: they must be equal"
        )


def check_head_dim(name: str, tensor: Tensor, most: int = MAX_HEAD_DIM) -> None:
    head_dim = tensor.shape[-1]
    if head_dim == 0:
        raise ValueError(f"{name} has head_dim 0, but must have a head_dim from 1 to {most}")
    if head_dim > most:
        raise NotImplementedError(
            f"{name} has head_dim {head_dim}, but must have a head_dim from 1 to {most}"
        )


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Check that the elements of a row are neighbours. A tensor without elements may have any strides.

    ``contiguous()`` does not change them, and vmap may leave any in the tensors that a call sees.
    """
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {tuple(tensor.stride())}: "
            f"set {name} = {name}.contiguous() before the call"
        )


def check_written(name: str, tensor: Tensor) -> None:
    """Check that no two elements of a tensor share memory, because it is written in place.

    Each stride must lead past everything that the dimensions with smaller strides reach. In a graph, where an
    order of symbolic strides would bind it to one shape, only strides of 0 are refused.
    """
    reached = 0
    steps = list(zip(tensor.stride(), tensor.shape, strict=True))
    if torch.compiler.is_compiling():
        steps = [step for step in steps if step[0] == 0]
    else:
        steps.sort()
    for stride, size in steps:
        if size > 1 and stride <= reached and tensor.numel():
            raise ValueError(
                f"{name} has elements that share memory (strides {tuple(tensor.stride())} of shape "
                f"{tuple(tensor.shape)}), but is written in place: it needs memory for each element"
            )
        reached += (size - 1) * stride


def check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}")


def check_device(name: str, tensor: Tensor, first: Tensor) -> None:
    """Check that ``tensor`` is on the device of ``first``, and that flashtile supports this device."""
    if tensor.device.type not in (*DEVICE_TYPES, "meta"):
        raise NotImplementedError(f"{name} is on {tensor.device}: flashtile supports cuda and cpu tensors")
    if tensor.device != first.device:
        raise ValueError(f"{name} is on {tensor.device}, not on {first.device}: all must be on one device")


def check_qv(q: Tensor, v: Tensor, name_of_v: str, qv: Tensor) -> None:
    """Check ``qv``, the queries that are multiplied by v. Its shape must be q's, with the head_dim of v."""
    check_dense("qv", qv)
    check_same_dtype("qv", qv, "q", q)
    check_device("qv", qv, q)
    expected = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != expected:
        raise ValueError(
            f"qv must have shape {expected}, that of q with the head_dim of {name_of_v}, "
            f"got {tuple(qv.shape)}"
        )


def check_buffer(name: str, buffer: Any, shape: tuple[int, ...], dtype: torch.dtype, first: Tensor) -> None:
    """Raise if a buffer cannot take a result of this shape and dtype."""
    check_dense(name, buffer)
    if tuple(buffer.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(buffer.shape)}")
    if buffer.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {buffer.dtype}")
    check_device(name, buffer, first)
    check_last_stride(name, buffer)
    check_written(name, buffer)


def check_groups(q: Tensor, k: Tensor, name_of_k: str) -> None:
    """Check that q and k have the same head_dim, and that num_heads_q is a multiple of num_heads_kv."""
    check_equal("head_dim", name_of_k, k.shape[-1], "q", q.shape[-1])
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_kv == 0 or heads_q == 0:
        raise ValueError(f"q has {heads_q} heads and {name_of_k} has {heads_kv}: both must have at least one")
    if heads_q % heads_kv != 0:
        words = f"q has {heads_q} heads, which must be a multiple of the {heads_kv} heads of {name_of_k}"
        transposed = q.dim() == k.dim() == 4 and heads_q > q.shape[1] > 0 == q.shape[1] % max(k.shape[1], 1)
        raise ValueError(f"{words}. They {TRANSPOSED}" if transposed and hints_layout() else words)


TRANSPOSED = (
    "look like (batch, heads, seqlen, head_dim), but must be (batch, seqlen, heads, head_dim): call "
    "transpose(1, 2) on them and on the result (FLASHTILE_LAYOUT_HINTS=0 turns this hint off)"
)
MAX_HEADS = 128
"""The largest number of heads of large models."""


def looks_transposed(q: Tensor, k: Tensor) -> bool:
    """Whether q and k, whose shapes are valid, probably have the layout (batch, heads, seqlen, head_dim).

    This is assumed if dimension 2 has the same size in q and k, this size is larger than q's dimension 1, and
    one of two conditions holds: the size exceeds ``MAX_HEADS``, or q's dimension 1 is a multiple of k's, as
    numbers of heads are in grouped-query attention.
    """
    (_, seqlen_q, heads_q, _), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
    if type(seqlen_q) is not int or heads_q <= seqlen_q or heads_q != heads_kv or not hints_layout():
        return False  # comparing a symbolic size would add a guard to the graph
    grouped = seqlen_q > seqlen_k > 1 and seqlen_q % seqlen_k == 0
    return heads_q > MAX_HEADS or grouped


def hints_layout() -> bool:
    return os.environ.get("FLASHTILE_LAYOUT_HINTS", "1") != "0"


def check_offsets(name: str, offsets: Any, first: Tensor) -> None:
    """Check that ``offsets`` are contiguous int32 (batch + 1,). ``check_offset_values`` checks the values."""
    if offsets is None:
        raise TypeError(
            f"{name} must be an int32 torch.Tensor if offsets of the other side are given, got None"
        )
    check_dense(name, offsets)
    check_dtype(name, offsets, (torch.int32,))
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(offsets.shape)}")
    check_device(name, offsets, first)
    if offsets.shape[0] > 1 and offsets.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous (stride 1), got stride {offsets.stride(0)}")


def check_offset_pair(cu_seqlens_q: Any, cu_seqlens_k: Any, first: Tensor) -> None:
    """Check the offsets of queries and of keys. Both must have the same number of sequences."""
    check_offsets("cu_seqlens_q", cu_seqlens_q, first)
    check_offsets("cu_seqlens_k", cu_seqlens_k, first)
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise ValueError(
            f"cu_seqlens_k has {cu_seqlens_k.shape[0]} entries, but cu_seqlens_q has "
            f"{cu_seqlens_q.shape[0]}: both must have batch + 1"
        )


def check_longest(name: str, longest: Any) -> None:
    """Check ``max_seqlen``, which must be given with ``cu_seqlens``."""
    if longest is None:
        raise TypeError(f"{name} must be an int with {name.replace('max_seqlen', 'cu_seqlens')}, got None")
    check_int(name, longest, 0, MAX_LENGTH)


def check_int32(name: str, tensor: Any, shape: tuple[int, ...], layout: str, first: Tensor) -> None:
    """Check that ``tensor`` is None, or contiguous int32 of this shape on the device of ``first``."""
    check_tensor(name, tensor, (shape,), layout, first, (torch.int32,), any_strides=True)
    if tensor is not None:
        check_contiguous(name, tensor)


def check_tensor(
    name: str,
    tensor: Any,
    shapes: tuple[tuple[Any, ...], ...],
    layout: str,
    first: Tensor,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    any_strides: bool = False,
) -> None:
    """Check that ``tensor`` is None, or has one of these dtypes and shapes and the device of ``first``.

    Its last stride must be 1 unless ``any_strides``. ``layout`` names the dimensions in messages.
    """
    if tensor is None:
        return
    check_dense(name, tensor)
    check_dtype(name, tensor, dtypes)
    if all(tuple(tensor.shape) != shape for shape in shapes):  # `in` would not compare symbolic sizes
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        raise ValueError(f"{name} must have shape {layout} = {allowed}, got {tuple(tensor.shape)}")
    check_device(name, tensor, first)
    if not any_strides:
        check_last_stride(name, tensor)


def check_broadcast(
    name: str, tensor: Tensor, scores: tuple[Any, Any, Any, Any], packed: bool, first: Tensor
) -> None:
    """Check that ``tensor`` broadcasts to the scores (batch, heads_q, seqlen_q, seqlen_k).

    It must have four dimensions, each of size 1 or of the size of the scores. The last dimension must have
    the size of the scores. Users may omit leading dimensions or pass 1 as the last; public functions expand
    such tensors before this check.
    """
    of_rows, of_keys = ("max_seqlen_q", "max_seqlen_k") if packed else ("seqlen_q", "seqlen_k")
    pairs = zip(tensor.shape[:-1], scores[:-1], strict=False)
    if tensor.dim() != 4 or tensor.shape[-1] != scores[-1] or any(n != 1 and n != all_ for n, all_ in pairs):
        batch, heads, rows, keys = scores
        raise ValueError(
            f"{name} must broadcast to (batch, heads_q, {of_rows}, {of_keys}) = "
            f"({batch}, {heads}, {rows}, {keys}), got {tuple(tensor.shape)}"
        )
    check_device(name, tensor, first)


def check_slopes(alibi_slopes: Any, batch: int, q: Tensor) -> None:
    heads = q.shape[-2]
    check_tensor("alibi_slopes", alibi_slopes, ((heads,), (batch, heads)), "(heads,) or (batch, heads)", q)


def check_sink(sink: Any, q: Tensor, dtypes: tuple[torch.dtype, ...] | None = None) -> None:
    allowed = (torch.float32, q.dtype) if dtypes is None else dtypes
    check_tensor("sink", sink, ((q.shape[-2],),), "(heads_q,)", q, allowed)


def check_pair(name_a: str, a: Any, name_b: str, b: Any) -> None:
    """Check that both values or neither are given."""
    if (a is None) != (b is None):
        missing, given = (name_a, name_b) if a is None else (name_b, name_a)
        raise ValueError(f"{missing} must be given with {given}, got None")


def check_rotary(cos: Any, sin: Any, first: Tensor, head_dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Check that both rotary tables are contiguous (positions, rotary_dim / 2), or that both are None."""
    check_pair("rotary_cos", cos, "rotary_sin", sin)
    if cos is None:
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_dense(name, table)
        check_dtype(name, table, dtypes)
        if table.dim() != 2 or not table.shape[0] or not 1 <= table.shape[1] <= head_dim // 2:
            raise ValueError(
                f"{name} must have shape (positions, rotary_dim / 2) with at least one position and "
                f"rotary_dim from 2 to head_dim = {head_dim}, got {tuple(table.shape)}"
            )
        check_device(name, table, first)
        check_contiguous(name, table)
    check_equal("shape", "rotary_sin", sin.shape, "rotary_cos", cos.shape)
    check_same_dtype("rotary_sin", sin, "rotary_cos", cos)


def check_int(name: str, value: int, least: int, most: int, least_said: str | None = None) -> None:
    """Raise ValueError unless ``value`` is from ``least`` to ``most``.

    ``least_said`` replaces ``least`` in the message. A SymInt, for example from ``.item()`` in a compiled
    function, is checked when the graph runs.
    """
    if isinstance(value, torch.SymInt):
        check_in_graph(value >= least, lambda: f"{name} must be from {least_said or least} to {most}")
    elif not least <= value <= most:
        raise ValueError(f"{name} must be from {least_said or least} to {most}, got {value}")


def as_int_within(name: str, value: Any, least: int, most: int) -> Any:
    """Convert as :func:`as_int`, and raise ValueError unless the result is from ``least`` to ``most``."""
    number = as_int(name, value)
    check_int(name, number, least, most)
    return number


def check_score_options(options: Any) -> None:
    """Check softmax_scale, softcap, masking and backend, the options that all kinds of calls have."""
    scale, softcap = options.softmax_scale, options.softcap
    if scale is not None and not abs(scale) <= FLOAT32_MAX:  # in this form the condition also rejects NaN
        raise ValueError(f"softmax_scale must be finite in float32, got {scale}")
    if not 0 <= softcap <= FLOAT32_MAX:
        raise ValueError(f"softcap must be finite in float32 and at least 0 (0 turns it off), got {softcap}")
    for name, (argument, least, meaning) in RANGES.items():
        check_int(argument, getattr(options.masking, name), least, MAX_LENGTH, meaning)
    check_backend(options.backend)


def check_only_window(masking: Masking, where: str) -> None:
    """Check that the mask has no option but the window; ``where`` names the kind of call, for the message."""
    beyond = masking.beyond_window
    if beyond is not None:
        got = getattr(masking, beyond)
        raise NotImplementedError(f"{beyond} must be left out {where}, got {got}")


def check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be from 0 to below 1, got {value}")


def check_backend(backend: Any) -> None:
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be None or a backend's name, got {type(backend).__name__}")
    if backend is not None and backend not in PREFERENCE:
        raise ValueError(f"backend must be None or one of {', '.join(PREFERENCE)}, got {backend!r}")


def is_choice(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether ``value`` is one of ``allowed``.

    Values of other types are not compared, because ``==`` of an array returns an array.
    """
    return isinstance(value, tuple(map(type, allowed))) and value in allowed


def check_choice(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    if not is_choice(value, allowed):
        got = repr(value) if isinstance(value, str) else named(value)
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {got}")
