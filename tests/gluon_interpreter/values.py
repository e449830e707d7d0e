"""Scalars and tiles that a kernel computes with: Triton's types and promotion rules, and torch's arithmetic.

A scalar is a Python number with a dtype, and a tile is a torch tensor. Layouts are ignored, because they do
not change the values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.language import core

from gluon_interpreter.errors import KernelError

TORCH_DTYPES = {
    core.float64: torch.float64,
    core.float32: torch.float32,
    core.float16: torch.float16,
    core.bfloat16: torch.bfloat16,
    core.float8e4nv: torch.float8_e4m3fn,
    core.int64: torch.int64,
    core.int32: torch.int32,
    core.int16: torch.int16,
    core.int8: torch.int8,
    core.uint8: torch.uint8,
    core.int1: torch.bool,
}
DTYPES = {of_torch: dtype for dtype, of_torch in TORCH_DTYPES.items()}
TORCH_DTYPES[core.uint32] = torch.int64  # torch.uint32 has few operations
GARBAGE = -858993460
"""Value of undefined integers; undefined floating-point numbers are NaN."""


class Layout:
    """Placeholder for any layout: calls and attributes return the placeholder itself."""

    def __call__(self, *parts: Any, **named: Any) -> Layout:
        return self

    def __getattr__(self, name: str) -> Layout:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


LAYOUT = Layout()


class Type:
    """``x.type`` of a tile."""

    layout = LAYOUT


class Value:
    """A scalar or a tile. ``flight`` is the wgmma product in flight whose result it is, or None."""

    __slots__ = ("_data", "dtype", "flight")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Any, dtype: Any, flight: Any = None) -> None:
        if isinstance(data, torch.Tensor):
            if data.dim() == 0:
                data = data.item()
        elif dtype.is_int() and not -(2 ** (dtype.primitive_bitwidth - 1)) <= data < 2**64:
            raise KernelError(f"{data} does not fit {dtype}")
        elif dtype == core.int32 and data >= 2**31:
            raise KernelError(f"{data} does not fit int32")
        self._data, self.dtype, self.flight = data, dtype, flight

    @property
    def data(self) -> Any:
        if self.flight is not None:
            raise KernelError(f"used before warpgroup_mma_wait: {self.flight}")
        return self._data

    def renamed(self, data: Any) -> Value:
        """Return a value with the same elements in another shape or order: registers with other names.

        ``data`` is a view of :attr:`registers`.
        """
        return Value(data, self.dtype)

    @property
    def registers(self) -> Any:
        """The number or tensor, for operations that move nothing and so do not wait for a load."""
        return self.data

    @property
    def landed(self) -> Any:
        """The number or tensor, also while its product is in flight, when only products may use it."""
        return self._data

    @property
    def is_tile(self) -> bool:
        return isinstance(self._data, torch.Tensor)

    @property
    def shape(self) -> list[int]:
        return list(self._data.shape) if self.is_tile else []

    @property
    def type(self) -> Type:
        return Type()

    def __repr__(self) -> str:
        return f"{self.dtype}{self.shape}" if self.is_tile else f"{self._data}"

    def arrived(self) -> Value:
        """Return the value itself, after its load to registers is done."""
        assert self.data is not None
        return self

    def tensor(self) -> torch.Tensor:
        if self.is_tile:
            return self.data
        return torch.tensor(self.data, dtype=TORCH_DTYPES[self.dtype])

    def __bool__(self) -> bool:
        if self.is_tile:
            raise KernelError("a tile is no condition")
        return bool(self.data)

    def __int__(self) -> int:
        return int(self.data)

    def __index__(self) -> int:
        return operator.index(self.data)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if bitcast and dtype == core.uint32:
            return Value(self.tensor().to(torch.int64) & 0xFFFFFFFF, dtype)
        if bitcast and self.dtype == core.uint32:
            return Value(self.tensor().to(torch.int32), core.int32).to(dtype, bitcast=True)
        if bitcast:
            return Value(self.tensor().view(TORCH_DTYPES[dtype]), dtype)
        return cast(self, dtype)

    def reshape(self, *shape: Any) -> Value:
        (sizes,) = shape if isinstance(shape[0], list | tuple) else (shape,)
        return self.renamed(self.registers.reshape([int(size) for size in sizes]))

    def permute(self, *order: Any) -> Value:
        (axes,) = order if isinstance(order[0], list | tuple) else (order,)
        return self.renamed(self.registers.permute(*axes))

    def __getitem__(self, key: Any) -> Value:
        return self.renamed(self.registers[key]) if self.is_tile else Value(self.tensor()[key], self.dtype)

    def __neg__(self) -> Value:
        return Value(-self.data, self.dtype)

    def __invert__(self) -> Value:
        return Value(torch.bitwise_not(self.tensor()), self.dtype)

    def __abs__(self) -> Value:
        return Value(abs(self.data), self.dtype)


def dtype_of(number: Any) -> Any:
    """Return the dtype that Triton gives to a Python number."""
    if isinstance(number, bool):
        return core.int1
    if isinstance(number, int):
        return core.int32 if -(2**31) <= number < 2**31 else core.int64
    return core.float32


def value_of(x: Any, dtype: Any = None) -> Value:
    """Return ``x`` as a :class:`Value`. Python numbers get ``dtype``, by default that of :func:`dtype_of`."""
    if isinstance(x, Value):
        return x
    return Value(x, dtype_of(x)) if dtype is None else cast(Value(x, dtype_of(x)), dtype)


def cast(x: Value, dtype: Any) -> Value:
    """Convert ``x`` to another dtype, rounding to the nearest value."""
    if x.dtype == dtype:
        return x
    if x.is_tile:
        return Value(x.data.to(TORCH_DTYPES[dtype]), dtype)
    number = x.data
    if dtype == core.int1:
        return Value(bool(number), dtype)
    if dtype.is_floating():
        return Value(torch.tensor(number, dtype=torch.float64).to(TORCH_DTYPES[dtype]).item(), dtype)
    return Value(int(number), dtype)


def common_dtype(a: Any, b: Any) -> Any:
    """Return the dtype in which an operation on two values or Python numbers is computed.

    A Python number takes the dtype of the other operand if possible.
    """
    if not isinstance(a, Value):
        a, b = b, a
    if not isinstance(b, Value):
        of_number = dtype_of(b)
        if a.dtype == core.uint32 and of_number == core.int64 and 0 <= b < 2**32:
            return a.dtype
        if of_number.is_floating() and not a.dtype.is_floating():
            return core.float32
        if of_number == core.int1 or a.dtype.is_floating():
            return a.dtype
        return of_number if a.dtype == core.int1 or of_number == core.int64 else a.dtype
    if a.dtype == b.dtype:
        return a.dtype
    if a.dtype.is_floating() != b.dtype.is_floating():
        return a.dtype if a.dtype.is_floating() else b.dtype
    if a.dtype.primitive_bitwidth == b.dtype.primitive_bitwidth:
        return core.float32 if a.dtype.is_floating() else core.uint8
    return max(a.dtype, b.dtype, key=lambda dtype: dtype.primitive_bitwidth)


def truncated_quotient(a: Any, b: Any) -> Any:
    """Divide integers and round towards zero, as on a GPU."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def truncated_remainder(a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.fmod(torch.as_tensor(a), b)
    return a - truncated_quotient(a, b) * b


def quotient(a: Any, b: Any) -> Any:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return torch.div(a, b)
    return a / b if b else torch.div(torch.tensor(a), b).item()


COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
OPERATIONS: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": quotient,
    "floordiv": truncated_quotient,
    "mod": truncated_remainder,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    **{name: getattr(operator, name) for name in COMPARISONS},
}


def operate(name: str, a: Any, b: Any) -> Any:
    """Apply the operation ``name`` of :data:`OPERATIONS` to a and b in their common dtype."""
    for operand in (a, b):
        if not isinstance(operand, Value | int | float | bool):
            return NotImplemented
    dtype = common_dtype(a, b)
    if name == "truediv" and not dtype.is_floating():
        dtype = core.float32
    a, b = cast(value_of(a), dtype), cast(value_of(b), dtype)
    if a.is_tile and b.is_tile:
        check_shapes(a, b)
    result = OPERATIONS[name](a.data, b.data)
    if name in COMPARISONS:
        return Value(result, core.int1)
    if dtype.is_floating() and not isinstance(result, torch.Tensor):
        return cast(Value(result, core.float64), dtype)
    return Value(result, dtype)


def check_shapes(*tiles: Value) -> None:
    """Check that tiles have equally many dimensions. Triton broadcasts only dimensions with one element."""
    if len({len(tile.shape) for tile in tiles}) > 1:
        raise KernelError(f"tiles of shapes {[tile.shape for tile in tiles]} do not fit")


def _define_operators() -> None:
    for name in OPERATIONS:
        forward = f"__{name}__"

        def of(a: Any, b: Any, name: str = name) -> Any:
            return operate(name, a, b)

        def reflected(a: Any, b: Any, name: str = name) -> Any:
            return operate(name, b, a)

        setattr(Value, forward, of)
        if name not in COMPARISONS:
            setattr(Value, f"__r{name}__", reflected)


_define_operators()


def tile(shape: Sequence[Any], fill: Any, dtype: Any) -> Value:
    """Return a tile filled with one number; a scalar if ``shape`` is empty."""
    sizes = [int(size) for size in shape]
    number = value_of(fill, dtype)
    if not sizes:
        return cast(number, dtype)
    return Value(torch.full(sizes, number.data, dtype=TORCH_DTYPES[dtype]), dtype)


def elementwise(function: Callable, *operands: Any, dtype: Any = None) -> Value:
    """Apply a torch function to values in their common dtype; the result has that dtype, or ``dtype``."""
    common = value_of(operands[0]).dtype
    for operand in operands[1:]:
        common = common_dtype(value_of(operands[0]), operand)
    values = [cast(value_of(operand), common) for operand in operands]
    check_shapes(*(value for value in values if value.is_tile))
    return Value(function(*(value.tensor() for value in values)), common if dtype is None else dtype)


def undefined(shape: Sequence[int], of_torch: torch.dtype) -> torch.Tensor:
    """Return a tensor of undefined values: NaN, or :data:`GARBAGE` for integers."""
    if of_torch.is_floating_point:
        return torch.full(list(shape), torch.nan, dtype=torch.float32).to(of_torch)
    return torch.full(list(shape), GARBAGE, dtype=torch.int64).to(of_torch)
