"""Global memory: pointers into tensors and TMA descriptors; accesses outside of the tensors are errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

from gluon_interpreter.errors import KernelError
from gluon_interpreter.values import DTYPES, LAYOUT, TORCH_DTYPES, Value, cast, undefined, value_of

TMA_ALIGNMENT = 16
MAX_IN_A_BOX = 256
"""Most elements of a TMA box along a dimension."""


class Buffer:
    """The whole storage of a tensor, as a flat row of elements of any dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self._rows: dict[torch.dtype, Tensor] = {}

    def elements(self, dtype: torch.dtype) -> Tensor:
        row = self._rows.get(dtype)
        if row is None:
            empty = torch.empty(0, dtype=dtype)
            count = self._storage.nbytes() // dtype.itemsize
            row = self._rows[dtype] = empty.set_(self._storage, 0, (count,), (1,))
        return row

    @property
    def address(self) -> int:
        return self._storage.data_ptr()


class PointerType:
    """``pointer.dtype``."""

    def __init__(self, element: Any) -> None:
        self.element_ty = element


class Pointer:
    """An address or a tile of addresses: a buffer, and offsets in elements from its beginning."""

    def __init__(self, buffer: Buffer, element: Any, offset: Any) -> None:
        self.buffer, self.element, self.offset = buffer, element, offset

    @staticmethod
    def to_tensor(tensor: Tensor) -> Pointer:
        dtype = torch.int8 if tensor.dtype == torch.bool else tensor.dtype
        return Pointer(Buffer(tensor), DTYPES[dtype], tensor.storage_offset())

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.element)

    @property
    def shape(self) -> list[int]:
        return list(self.offset.shape) if isinstance(self.offset, Tensor) else []

    def __add__(self, elements: Any) -> Pointer:
        if isinstance(elements, Value):
            elements = cast(elements, core.int64).data
        return Pointer(self.buffer, self.element, self.offset + elements)

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.buffer, self.element, torch.as_tensor(self.offset)[key])

    def to(self, pointer_type: Any, bitcast: bool = False) -> Pointer:
        element = pointer_type.element_ty
        old, new = self.element.primitive_bitwidth, element.primitive_bitwidth
        if old != new:
            raise KernelError(f"pointers to {self.element} and {element} differ in size")
        return Pointer(self.buffer, element, self.offset)

    @property
    def row(self) -> Tensor:
        return self.buffer.elements(TORCH_DTYPES[self.element])

    @property
    def key(self) -> tuple[int, int]:
        """Hashable identity of a scalar pointer's address."""
        return self.buffer.address, int(self.offset)

    def check(self, offset: Any, inside: Any) -> None:
        """Raise a KernelError unless each offset where ``inside`` is true is in the buffer."""
        count = len(self.row)
        if isinstance(offset, Tensor):
            outside = ((offset < 0) | (offset >= count)) & torch.as_tensor(inside)
            if not bool(outside.any()):
                return
            worst = int(offset.expand_as(outside)[outside].flatten()[0])
        elif not inside or 0 <= offset < count:
            return
        else:
            worst = offset
        raise KernelError(f"element {worst} of a buffer of {count} of {self.element}")


def _parts(pointer: Pointer, mask: Any, *others: Any) -> tuple[Any, Any]:
    """Return (offsets, whether each is accessed), broadcast to one shape."""
    inside = True if mask is None else value_of(mask).data
    offset = pointer.offset
    shapes = [x.shape for x in (offset, inside, *others) if isinstance(x, Tensor)]
    if not shapes:
        return offset, inside
    shape = torch.broadcast_shapes(*shapes)
    return torch.as_tensor(offset).expand(shape), torch.as_tensor(inside).expand(shape)


def load(pointer: Pointer, mask: Any, other: Any) -> Value:
    offset, inside = _parts(pointer, mask)
    pointer.check(offset, inside)
    row = pointer.row
    if not isinstance(offset, Tensor):
        if inside:
            return Value(row[offset], pointer.element)
        if other is None:
            return Value(undefined([], row.dtype), pointer.element)
        return value_of(other, pointer.element)
    found = row[torch.where(inside, offset, 0)] if len(row) else undefined(offset.shape, row.dtype)
    if not bool(inside.all()):
        if other is None:
            instead = undefined(offset.shape, row.dtype)
        else:
            instead = value_of(other, pointer.element).tensor().to(row.dtype)
        found = torch.where(inside, found, instead)
    return Value(found, pointer.element)


def store(pointer: Pointer, value: Any, mask: Any) -> None:
    data = cast(value_of(value, pointer.element), pointer.element).tensor()
    offset, inside = _parts(pointer, mask, data)
    pointer.check(offset, inside)
    row = pointer.row
    if not isinstance(offset, Tensor):
        if inside:
            row[offset] = data
        return
    data = data.expand(offset.shape)
    row[offset[inside]] = data[inside]


def atomic_add(pointer: Pointer, value: Any) -> Value:
    pointer.check(pointer.offset, True)
    row = pointer.row
    before = row[pointer.offset].item()
    row[pointer.offset] = before + value_of(value).data
    return Value(before, pointer.element)


class BlockType:
    """``desc.block_type``."""

    def __init__(self, shape: list[int], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype
        self.nbytes = math.prod(shape) * dtype.primitive_bitwidth // 8


class Box:
    """A TMA descriptor: a tensor, and the shape of the box that one operation copies."""

    layout = LAYOUT

    def __init__(self, descriptor: TensorDescriptor) -> None:
        base = descriptor.base
        self.buffer = Buffer(base)
        self.torch_dtype = base.dtype
        self.dtype = DTYPES[base.dtype]
        self.shape, self.strides = list(descriptor.shape), list(descriptor.strides)
        self.block_shape = list(descriptor.block_shape)
        self.block_type = BlockType(self.block_shape, self.dtype)
        self._offset = base.storage_offset()
        self._check()

    def _check(self) -> None:
        size = self.torch_dtype.itemsize
        address = self.buffer.address + self._offset * size
        if address % TMA_ALIGNMENT:
            raise KernelError(f"TMA of memory at {address}, which is no multiple of {TMA_ALIGNMENT}")
        if self.strides[-1] != 1 or any(stride * size % TMA_ALIGNMENT for stride in self.strides[:-1]):
            raise KernelError(f"TMA with strides of {self.strides} elements of {size} bytes")
        if len(self.shape) > 5 or any(size > MAX_IN_A_BOX for size in self.block_shape[:-1]):
            raise KernelError(f"TMA of a box of {self.block_shape}")

    @property
    def row(self) -> Tensor:
        """The whole storage of the tensor, as a flat row of its dtype."""
        return self.buffer.elements(self.torch_dtype)

    def _part(self, where: list[int], row: Tensor) -> tuple[tuple[slice, ...], Tensor] | None:
        """Return (slices of the box at ``where``, view of ``row``) of the part of the box inside the tensor.

        None if the box is completely outside. ``row`` has one entry for each element of the storage.
        """
        if len(where) != len(self.shape):
            raise KernelError(f"{len(where)} coordinates of a tensor of {len(self.shape)} dimensions")
        if any(not -(2**31) <= coordinate < 2**31 for coordinate in where):
            raise KernelError(f"TMA coordinates {where} do not fit 32 bits")
        begins = [max(-coordinate, 0) for coordinate in where]
        ends = [
            min(size - coordinate, block)
            for size, coordinate, block in zip(self.shape, where, self.block_shape, strict=True)
        ]
        counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if min(counts) <= 0:
            return None
        size = self.torch_dtype.itemsize
        # Addresses wrap around at 2 ** 64. Descriptors of ragged batches rely on this.
        bytes_from_base = sum(
            (coordinate + begin) * stride * size
            for coordinate, begin, stride in zip(where, begins, self.strides, strict=True)
        )
        bytes_from_base = (bytes_from_base + 2**63) % 2**64 - 2**63
        first = self._offset + bytes_from_base // size
        # The stride of a dimension with one element is unused, and may be larger than any memory.
        strides = [stride if count > 1 else 1 for stride, count in zip(self.strides, counts, strict=True)]
        last = first + sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True))
        if first < 0 or last >= len(row):
            raise KernelError(
                f"TMA of elements {first} to {last} of a buffer of {len(row)}, at coordinates {where}"
            )
        places = tuple(slice(begin, end) for begin, end in zip(begins, ends, strict=True))
        return places, row.as_strided(counts, strides, first)

    def part_of(self, row: Tensor, where: list[int]) -> Tensor | None:
        """Return the view of ``row``, which has an entry per element, of the box at ``where``, or None."""
        part = self._part(where, row)
        return None if part is None else part[1]

    def read(self, where: list[int]) -> Tensor:
        """Return the box at ``where``, with zeros outside of the tensor."""
        box = torch.zeros(self.block_shape, dtype=torch.float32).to(self.torch_dtype)
        part = self._part(where, self.row)
        if part is not None:
            places, memory = part
            box[places] = memory
        return box

    def write(self, where: list[int], box: Tensor) -> None:
        part = self._part(where, self.row)
        if part is not None:
            places, memory = part
            memory.copy_(box[places])

    def add(self, where: list[int], box: Tensor) -> None:
        part = self._part(where, self.row)
        if part is not None:
            places, memory = part
            memory.add_(box[places])
