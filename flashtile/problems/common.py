"""Limits, conventions, result shapes, and what TMA can address: shared by the descriptions of all calls.

A problem holds everything that decides how a call is computed (shapes, dtype, mask, options, device), and no
data. It is frozen and hashable, because backends choose and cache compiled kernels by it.
"""

from __future__ import annotations

import functools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashtile.torch_private import FakeTensor

UNLIMITED = -1
"""A window side without a limit (FlashAttention's convention)."""

LOG2_E, LN_2 = math.log2(math.e), math.log(2)

MAX_HEAD_DIM = 576
"""Largest head size: the 512 latent and 64 rotary columns of multi-head latent attention."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes of bools and ints in which torch can compute."""
DEVICE_TYPES = ("cuda", "cpu")
FLOAT32_MAX = torch.finfo(torch.float32).max
MAX_LENGTH = 2**31 - 1
"""Largest length and window, because kernels hold them in int32."""
POSITIONS = 2**24
"""Upper bound of the positions that kernels with score or mask functions are compiled for.

All sequences up to this length share a kernel.
"""

PREFERENCE = ("hopper", "portable", "cpu")
"""Backends in the order in which they are tried. An explicit ``backend=`` never falls back to another."""


def address_of(tensor: Tensor) -> int | torch.SymInt:
    """Return the address of the first element, or its byte offset in the storage if there is no address."""
    if not isinstance(tensor, FakeTensor):
        try:
            return tensor.data_ptr()
        except RuntimeError:  # wrapped by a transform
            pass
    return tensor.storage_offset() * tensor.element_size()


def find_tma_obstacle(q: Tensor, k: Tensor, v: Tensor, ends_early: bool) -> str | None:
    """Return why TMA cannot address q, k and v, or None if it can.

    TMA requires pointers and strides in multiples of 16 bytes.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        ends_early: whether sequences of dense k and v end early (``seqused_k``). They are then addressed as
            rows of one packed tensor, so the distance between sequences must be a whole number of rows.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        bytes_of = tensor.element_size()
        start = address_of(tensor)
        if start % 16:
            return f"{name} must start at a multiple of 16 bytes for TMA"
        strides = [tensor.stride(i) for i in range(tensor.dim() - 1) if tensor.shape[i] > 1]
        for stride in strides:
            if stride <= 0 or stride * bytes_of % 16:
                got = tuple(tensor.stride())
                return f"{name} must have positive strides in multiples of 16 bytes for TMA, got {got}"
        if ends_early and name != "q" and tensor.shape[0] > 1 and tensor.stride(0) % max(tensor.stride(1), 1):
            return (
                f"{name} must have sequences whole rows apart for TMA with seqused_k, got {tensor.stride()}"
            )
    if ends_early and k.shape[0] > 1 and k.stride(0) * v.stride(1) != v.stride(0) * k.stride(1):
        return "k and v must have the same number of rows between sequences for TMA with seqused_k"
    return None


def find_bias_obstacle(bias: Tensor, dtype: torch.dtype) -> str | None:
    """Return why TMA cannot load tiles of the bias, or None if it can. ``dtype`` is the dtype of q."""
    if bias.dtype != dtype:
        return f"bias must have q's dtype {dtype} for TMA, got {bias.dtype}"
    if bias.shape[2] == 1 or bias.stride(2) == 0:
        return "bias must have its own values for each row for TMA, got one that all rows share"
    steps = [bias.stride(2), *(bias.stride(i) for i in (0, 1) if bias.shape[i] > 1 and bias.stride(i))]
    aligned = all(step > 0 and step * bias.element_size() % 16 == 0 for step in steps)
    if address_of(bias) % 16 or bias.stride(3) != 1 or not aligned:
        return (
            "bias must start at a multiple of 16 bytes, have positive strides in multiples of 16 bytes, and "
            f"last stride 1, for TMA, got strides {tuple(bias.stride())}"
        )
    return None


def shared_fields(cls: Any, values: Any) -> dict[str, Any]:
    """Return those fields of ``values``, a named tuple, that ``cls`` has as well."""
    fields = cls._fields if hasattr(cls, "_fields") else cls.__dataclass_fields__
    return {name: value for name, value in values._asdict().items() if name in fields}


def passed_on(cls: Any, tensors: Any, options: Any) -> dict[str, Any]:
    """Return those fields of the description ``cls`` that are passed on without a thought.

    These are options of the same name, and bools that say whether the tensor of the same name is given.
    """
    given = {name: tensor is not None for name, tensor in shared_fields(cls, tensors).items()}
    masking = vars(options.masking) if hasattr(options, "masking") else {}
    return given | masking | shared_fields(cls, options)


def extended(name: str, base: Any, more: dict[str, str], defaults: tuple[Any, ...] = ()) -> Any:
    """Return a NamedTuple with the fields of ``base`` and ``more``; the last fields have ``defaults``.

    ``more`` maps the name of a field to its type as text.
    """
    made: Any = namedtuple(name, (*base._fields, *more), defaults=defaults)  # type: ignore[misc]
    made.__annotations__ = base.__annotations__ | more
    return made


class Results:
    """Base of call descriptions: shapes and dtypes of the results, derived from fields of the subclass."""

    batch: int
    seqlen_q: int
    total_q: int
    num_heads_q: int
    num_heads_kv: int
    head_dim_v: int
    dtype: torch.dtype
    varlen: bool

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads_q // max(self.num_heads_kv, 1)

    @property
    def out_shape(self) -> tuple[int, ...]:
        if self.varlen:
            return (self.total_q, self.num_heads_q, self.head_dim_v)
        return (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.varlen:
            return (self.num_heads_q, self.total_q)
        return (self.batch, self.num_heads_q, self.seqlen_q)

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32


_Function = TypeVar("_Function", bound=Callable[..., Any])


def cached(function: _Function) -> _Function:
    """Keep the last 1024 results of a function. While Dynamo traces, the function runs each time.

    Dynamo does not use a cache of functools, and warns of it.
    """
    kept = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments) if torch.compiler.is_dynamo_compiling() else kept(*arguments)

    return call  # type: ignore[return-value]
