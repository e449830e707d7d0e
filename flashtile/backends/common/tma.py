"""Views of tensors for TMA. A view is a TMA descriptor without an address, which each launch adds."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashtile.backends.common.config import RAGGED_ROWS

MAX_EXTENT = 2**31 - 2**16
"""Extent of a dimension whose end TMA need not check. Extents must be below 2^31."""
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
    """Stand-in for a tensor of which only the address is known."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class View:
    """Shape, strides and block of a TMA descriptor. The tensor itself comes with each call.

    Args:
        shape, strides: shape of the tensor, and its strides in elements.
        block: shape of the tile that one TMA operation moves.
        dtype: one of GLUON_DTYPES.
        swizzled: whether tiles in shared memory have Gluon's default layout for wgmma, or a plain one.
    """

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
        """Triton's type of the descriptor, for signatures of ahead-of-time compilation."""

    def of(self, tensor: Tensor | int) -> TensorDescriptor:
        """Return the descriptor of ``tensor``, which may be given by its address if the kernel is compiled.

        The tensor is not checked here. The selection of the kernel has already checked
        ``Problem.tma_obstacle``.
        """
        descriptor = TensorDescriptor.__new__(TensorDescriptor)
        base = Address(tensor) if type(tensor) is int else tensor
        descriptor.__dict__.update(self._fields, base=base)
        return descriptor


def dense_view(shape: tuple, strides: tuple, rows: int, block_d: int, dtype: torch.dtype) -> View:
    """Return the view of a tensor (batch, seqlen, heads, head_dim). A block is ``rows`` rows of one head."""
    return View(list(shape), _usable(shape, strides), [1, rows, 1, block_d], dtype)


def cells_view(shape: tuple, strides: tuple, rows: int, keys: int, dtype: torch.dtype) -> View:
    """Return the view of a tensor (batch, heads, seqlen_q, seqlen_k), such as a bias.

    A block is ``rows`` rows by ``keys`` keys of one head.
    """
    return View(list(shape), _usable(shape, strides), [1, 1, rows, keys], dtype)


def packed_view(shape: tuple, strides: tuple, pack: int, rows: int, block_d: int, dtype: torch.dtype) -> View:
    """Return the view of a tensor (batch, seqlen, heads, head_dim) with ``pack`` adjacent heads per block.

    The view has the dimensions (batch, seqlen, heads / pack, pack, head_dim). A block is ``rows / pack``
    tokens of ``pack`` heads.
    """
    batch, seqlen, heads, head_dim = shape
    split = [batch, seqlen, heads // pack, pack, head_dim]
    head_stride = strides[2]
    split_strides = [strides[0], strides[1], pack * head_stride, head_stride, 1]
    return View(split, _usable(split, split_strides), [1, rows // pack, 1, pack, block_d], dtype)


def ragged_view(
    shape: tuple,
    strides: tuple,
    rows: int,
    block_d: int,
    dtype: torch.dtype,
    pack: int = 1,
    stored_heads: int = 1,
) -> View:
    """Return the view of a packed tensor (total, heads, head_dim) whose loads end at the end of a sequence.

    A descriptor has one extent for all rows, here 2**30. Row i of a sequence has the coordinate
    ``2**30 - seqlen + i``, which is inside exactly if ``i < seqlen``. Two more dimensions correct the address
    to row ``start + i``. The first has the coordinate 2**30; its stride wraps 64-bit addresses around, so it
    subtracts 2**30 rows. The second has the coordinate ``start + seqlen`` and the stride of a row.

    A block has ``pack`` adjacent heads of ``rows / pack`` tokens. To store only ``stored_heads`` of them, of
    a contiguous tensor, the fourth dimension has this extent. The second then counts the groups of so many
    heads in all rows, and its coordinate chooses the group as well. On a card of 144 GB these are fewer than
    MAX_EXTENT: two heads of 8 columns in q and out, and their lse, take 72 bytes.
    """
    heads, head_dim = shape[-2:]
    row = second = _row_stride(shape, strides)
    _, head, last = _usable(shape[-3:], strides[-3:])
    if stored_heads > 1:
        row, second, heads = heads * head, stored_heads * head, stored_heads
    extents = [MAX_EXTENT, MAX_EXTENT, RAGGED_ROWS, heads, head_dim]
    return View(extents, [2**34 - row, second, row, head, last], [1, 1, rows // pack, pack, block_d], dtype)


def rows_between_sequences(k: Tensor) -> int:
    """Return the distance between sequences of a dense k (batch, seqlen, heads, head_dim), in rows.

    It is 0 if k is packed or has one sequence.
    """
    if k.dim() == 3 or k.shape[0] == 1:
        return 0
    return k.stride(0) // _row_stride(k.shape, k.stride())


def _row_stride(shape: tuple, strides: tuple) -> int:
    """Return the stride between rows. If each sequence has one row, return the stride between sequences."""
    if len(shape) == 4 and shape[1] == 1 and shape[0] > 1 and strides[0] > 0:
        return strides[0]
    return _usable(shape[-3:], strides[-3:])[0]


def _usable(shape, strides) -> list[int]:
    """Return strides that TMA accepts, in elements.

    A dimension of size 1 may have any stride; it gets 16, because TMA requires multiples of 16 bytes. The
    last stride becomes 1.
    """
    return [stride if size > 1 else 16 for size, stride in zip(shape, strides, strict=True)][:-1] + [1]
