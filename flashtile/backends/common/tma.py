"""Tensors as TMA sees them, without their addresses: a launch makes a descriptor for each."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtile.backends.common.launch import RAGGED_ROWS

MAX_EXTENT = 2**31 - 2**16
GLUON_DTYPES = {
    torch.float32: gl.float32,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
}
TRITON_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
}


class Address:
    """Memory of a tensor that is not at hand."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class View:
    """A tensor as TMA sees it: shape, strides and block, without the tensor, which comes with each call."""

    def __init__(
        self,
        shape: list[int],
        strides: list[int],
        block: list[int],
        dtype: torch.dtype,
        swizzled: bool = True,
    ) -> None:
        if swizzled:
            layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPES[dtype])
        else:
            layout = gl.NVMMASharedLayout(0, 8 * dtype.itemsize, len(block))
        self._fields = {"shape": shape, "strides": strides, "block_shape": block, "layout": layout}
        self._fields["padding"] = "zero"

        numbers = ", ".join(map(str, block))
        self.type_name = f"tensordesc<{TRITON_NAMES[dtype]}[{numbers}],{layout!r}>"
        """As a type in a signature, for compilation ahead of time."""

    def of(self, tensor: Tensor | int) -> TensorDescriptor:
        """The descriptor of ``tensor``, or of the one at an address, for a kernel that is compiled.

        Its checks were the dispatch's (``Problem.tma_obstacle``).
        """
        descriptor = TensorDescriptor.__new__(TensorDescriptor)
        base = Address(tensor) if type(tensor) is int else tensor
        descriptor.__dict__.update(self._fields, base=base)
        return descriptor


def dense_view(shape: tuple, strides: tuple, rows: int, block_d: int, dtype: torch.dtype) -> View:
    """(batch, seqlen, heads, head_dim), a block of ``rows`` of one head."""
    return View(list(shape), _usable(shape, strides), [1, rows, 1, block_d], dtype)


def cells_view(shape: tuple, strides: tuple, rows: int, keys: int, dtype: torch.dtype) -> View:
    """(batch, heads, seqlen_q, seqlen_k) as a bias is, a block of ``rows`` by ``keys`` of one head."""
    return View(list(shape), _usable(shape, strides), [1, 1, rows, keys], dtype)


def packed_view(shape: tuple, strides: tuple, pack: int, rows: int, block_d: int, dtype: torch.dtype) -> View:
    """(batch, seqlen, heads / pack, pack, head_dim), a block of ``rows / pack`` rows of ``pack`` heads."""
    batch, seqlen, heads, head_dim = shape
    split = [batch, seqlen, heads // pack, pack, head_dim]
    head_stride = strides[2]
    split_strides = [strides[0], strides[1], pack * head_stride, head_stride, 1]
    return View(split, _usable(split, split_strides), [1, rows // pack, 1, pack, block_d], dtype)


def ragged_view(shape: tuple, strides: tuple, rows: int, block_d: int, dtype: torch.dtype) -> View:
    """Rows of any sequence, with that sequence's end as the end of the tensor.

    TMA knows one extent for all rows. With 2**30 rows, row ``2**30 - seqlen + i`` of a sequence is inside
    exactly if ``i < seqlen``; two more dimensions bring the address back to row ``start + i``: their
    coordinates are 2**30, with a stride that wraps 64-bit addresses around to minus 2**30 rows, and
    ``start + seqlen``.
    """
    heads, head_dim = shape[-2:]
    row = _row_stride(shape, strides)
    _, head, last = _usable(shape[-3:], strides[-3:])
    extents = [MAX_EXTENT, MAX_EXTENT, RAGGED_ROWS, heads, head_dim]
    return View(extents, [2**34 - row, row, row, head, last], [1, 1, rows, 1, block_d], dtype)


def rows_between_sequences(k: Tensor) -> int:
    """Rows from one sequence of a dense k to the next."""
    if k.dim() == 3 or k.shape[0] == 1:
        return 0
    return k.stride(0) // _row_stride(k.shape, k.stride())


def _row_stride(shape: tuple, strides: tuple) -> int:
    """From one row to the next. Where each sequence has one row, that is the next sequence's."""
    if len(shape) == 4 and shape[1] == 1 and shape[0] > 1 and strides[0] > 0:
        return strides[0]
    return _usable(shape[-3:], strides[-3:])[0]


def _usable(shape, strides) -> list[int]:
    """The stride of an extent of 1 may be anything, but TMA wants multiples of 16 bytes."""
    return [stride if size > 1 else 16 for size, stride in zip(shape, strides, strict=True)][:-1] + [1]
