"""The frozen description of a product with a weight, with its optional tensors and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.problems.common import address_of, passed_on

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCALE_BLOCK = 128
"""Number of rows, and of columns, in a block of the weight that has its own scale."""
COPY_BYTES = 16
"""Size and alignment in bytes of an asynchronous copy."""

PLAIN, SWIGLU, QKV = "plain", "silu_and_mul", "qkv"
ACTIVATIONS = (None, SWIGLU)


class LinearTensors(NamedTuple):
    """The optional tensors of a product, in addition to x and the weight; None for each that is absent."""

    bias: Tensor | None = None
    weight_scale: Tensor | None = None
    norm_weight: Tensor | None = None
    x_scale: Tensor | None = None
    residual: Tensor | None = None


class LinearOptions(NamedTuple):
    """The non-tensor arguments of a product, hashable because they are part of a launch's cache key."""

    activation: str | None = None
    norm_eps: float = 1e-6
    prefetch: bool = False
    invariant: bool = False
    backend: str | None = None


class BeforeNormTensors(NamedTuple):
    """The optional tensors of a product before a norm, and the weight of that norm."""

    bias: Tensor | None = None
    weight_scale: Tensor | None = None
    norm_weight: Tensor | None = None
    x_scale: Tensor | None = None
    residual: Tensor | None = None
    next_norm_weight: Tensor | None = None


class BeforeNormOptions(NamedTuple):
    """The non-tensor arguments of a product that precedes a norm."""

    norm_eps: float = 1e-6
    next_norm_eps: float = 1e-6
    prefetch: bool = False
    invariant: bool = False
    backend: str | None = None


class QkvTensors(NamedTuple):
    """The optional tensors of a QKV product, in addition to x, the weight and the caches."""

    bias: Tensor | None = None
    weight_scale: Tensor | None = None
    norm_weight: Tensor | None = None
    x_scale: Tensor | None = None
    positions: Tensor | None = None
    slot_mapping: Tensor | None = None
    block_table: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    q_norm_weight: Tensor | None = None
    k_norm_weight: Tensor | None = None


class QkvOptions(NamedTuple):
    """The non-tensor arguments of a QKV product."""

    rotary_interleaved: bool = False
    norm_eps: float = 1e-6
    prefetch: bool = False
    backend: str | None = None


@dataclass(frozen=True)
class Heads:
    """The heads, rotary embedding and cache of a product for queries, keys and values."""

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    rotary_dim: int
    """Number of rotated columns of a head; 0 for no rotary embedding."""
    rotary_interleaved: bool
    rotary_rows: int
    page_size: int
    num_blocks: int
    table_width: int
    """Number of pages in a row of the block table; 0 if the call has a slot mapping instead."""
    norm: bool = False
    """Whether each query and each key is normalised, with ``LinearProblem.norm_eps``."""


@dataclass(frozen=True)
class LinearProblem:
    """Description of the product y = epilogue(x_scale norm(x) W^T + bias), with x (M, K) and W (N, K).

    ``epilogue`` is applied to the product:

    * PLAIN: nothing.
    * SWIGLU: the result is silu of the first half of the columns times the second half.
    * QKV: queries are the result, and keys and values are written to a paged cache.

    With ``residual`` a tensor is added to the result. With ``next_norm`` the results also include y times the
    weight of the next RMSNorm, and the norm's factor of each row.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: Any
    epilogue: str = PLAIN
    norm: bool = False
    norm_eps: float = 1e-6
    bias: bool = False
    residual: bool = False
    x_scale: bool = False
    next_norm: bool = False
    next_norm_eps: float = 1e-6
    scales: str = "none"
    """Scales of the weight: "none", "channel" (one per row) or "block"."""
    prefetch: bool = False
    aligned: bool = True
    """Whether rows of x, W and the norm's weight are aligned for asynchronous copies."""
    heads: Heads | None = None
    invariant: bool = False
    """Whether sums have one order for every number of rows of x."""

    @property
    def places(self) -> int:
        """Number of units of work that are divided among programs: N for PLAIN, otherwise N / 2.

        A unit of PLAIN is an output column. SWIGLU computes an output column from two rows of W, and QKV
        computes the two columns of a rotary pair together.
        """
        return self.N if self.epilogue == PLAIN else self.N // 2

    @property
    def out_columns(self) -> int:
        if self.heads is not None:
            return self.heads.num_heads_q * self.heads.head_dim
        return self.places

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight. A call reads all of them at least once, however small M is."""
        return self.N * self.K * self.weight_dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether nothing is fused with the product."""
        fused = self.norm or self.residual or self.x_scale or self.next_norm or self.scales != "none"
        return self.epilogue == PLAIN and not fused

    @classmethod
    def from_linear(
        cls, x: Tensor, weight: Tensor, tensors: LinearTensors, options: LinearOptions
    ) -> LinearProblem:
        """Describe a call that :func:`flashtile.checks.linear.check_linear` has accepted."""
        return cls(
            epilogue=options.activation or PLAIN,
            **_product(x, weight, tensors, options),
        )

    @classmethod
    def from_before_norm(
        cls, x: Tensor, weight: Tensor, tensors: BeforeNormTensors, options: BeforeNormOptions
    ) -> LinearProblem:
        """Describe a call that :func:`flashtile.checks.linear.check_before_norm` has accepted."""
        return cls(
            next_norm=True,
            **_product(x, weight, tensors, options),
        )

    @classmethod
    def from_qkv(
        cls, x: Tensor, weight: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: QkvTensors,
        options: QkvOptions,
    ) -> LinearProblem:  # fmt: skip
        """Describe a call that :func:`flashtile.checks.linear.check_qkv` has accepted."""
        num_blocks, page_size, heads_kv, head_dim = k_cache.shape
        cos, table = tensors.rotary_cos, tensors.block_table
        heads = Heads(
            num_heads_q=weight.shape[0] // head_dim - 2 * heads_kv,
            num_heads_kv=heads_kv,
            head_dim=head_dim,
            rotary_dim=0 if cos is None else 2 * cos.shape[1],
            rotary_interleaved=options.rotary_interleaved,
            rotary_rows=0 if cos is None else cos.shape[0],
            page_size=page_size,
            num_blocks=num_blocks,
            table_width=0 if table is None else table.shape[1],
            norm=tensors.q_norm_weight is not None,
        )
        return cls(epilogue=QKV, heads=heads, **_product(x, weight, tensors, options))


def _product(x: Tensor, weight: Tensor, tensors: Any, options: Any) -> dict[str, Any]:
    """Return the fields of :class:`LinearProblem` that all kinds of calls have."""
    scale = tensors.weight_scale
    rows = [x, weight] if tensors.norm_weight is None else [x, weight, tensors.norm_weight]
    return passed_on(LinearProblem, tensors, options) | {
        "M": x.shape[0],
        "N": weight.shape[0],
        "K": weight.shape[1],
        "dtype": x.dtype,
        "weight_dtype": weight.dtype,
        "device": x.device,
        "norm": tensors.norm_weight is not None,
        "scales": "none" if scale is None else "channel" if scale.dim() == 1 else "block",
        "aligned": all(_aligned(t) for t in rows),
    }


def _aligned(tensor: Tensor) -> bool:
    """Whether the address and the length in bytes of every row are multiples of ``COPY_BYTES``."""
    strides = [
        stride for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1
    ]
    bytes_ = [size * tensor.dtype.itemsize for size in (*strides, tensor.shape[-1])]
    return all(size % COPY_BYTES == 0 for size in bytes_) and address_of(tensor) % COPY_BYTES == 0
