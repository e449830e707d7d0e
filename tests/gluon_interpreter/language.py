"""Gluon's and Triton's functions by their names in kernels, as far as the interpreted kernels use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from triton.language import core

from gluon_interpreter import barriers, copies, global_memory, products
from gluon_interpreter.errors import KernelError
from gluon_interpreter.global_memory import Pointer
from gluon_interpreter.inline_asm import inline_asm_elementwise
from gluon_interpreter.program import current_partition, warp_specialize
from gluon_interpreter.shared_memory import Tile
from gluon_interpreter.values import (
    LAYOUT,
    TORCH_DTYPES,
    Value,
    cast,
    check_shapes,
    common_dtype,
    elementwise,
    operate,
    tile,
    value_of,
)


class Names:
    """A module as kernels see it: attributes with the interpreter's functions."""

    def __init__(self, name: str, **functions: Any) -> None:
        self.__dict__.update(functions)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"{self._name}.{name}, which the interpreter does not have")


def same(x: Any, *hints: Any, **more: Any) -> Any:
    return x


def nothing(*arguments: Any, **more: Any) -> None:
    return None


def arange(start: int, end: int, layout: Any = None) -> Value:
    if (int(end) - int(start)) & (int(end) - int(start) - 1):
        raise KernelError(f"arange({start}, {end}) is no power of two")
    return Value(torch.arange(int(start), int(end), dtype=torch.int32), core.int32)


def full(shape: Sequence[Any], value: Any, dtype: Any, layout: Any = None) -> Value:
    return tile(shape, value, dtype)


def zeros(shape: Sequence[Any], dtype: Any, layout: Any = None) -> Value:
    return tile(shape, 0, dtype)


def zeros_like(x: Value) -> Value:
    return tile(x.shape, 0, x.dtype)


def to_tensor(x: Any) -> Value:
    return value_of(x)


def where(condition: Any, x: Any, y: Any) -> Value:
    dtype = common_dtype(x, y) if isinstance(x, Value) or isinstance(y, Value) else value_of(x).dtype
    chosen, x, y = value_of(condition), value_of(x, dtype), value_of(y, dtype)
    check_shapes(*(value for value in (chosen, x, y) if value.is_tile))
    found = torch.where(chosen.tensor(), cast(x, dtype).tensor(), cast(y, dtype).tensor())
    return Value(found, dtype)


def _is_tile(x: Any) -> bool:
    return isinstance(x, Value) and x.is_tile


def maximum(x: Any, y: Any, propagate_nan: Any = core.PropagateNan.NONE) -> Value:
    """Return the elementwise maximum; of a number and NaN, the number unless NaN propagates."""
    if _is_tile(x) or _is_tile(y) or propagate_nan is core.PropagateNan.ALL:
        return elementwise(torch.maximum if propagate_nan is core.PropagateNan.ALL else torch.fmax, x, y)
    return where(operate("gt", value_of(x), y), x, y)


def minimum(x: Any, y: Any, propagate_nan: Any = core.PropagateNan.NONE) -> Value:
    if _is_tile(x) or _is_tile(y) or propagate_nan is core.PropagateNan.ALL:
        return elementwise(torch.minimum if propagate_nan is core.PropagateNan.ALL else torch.fmin, x, y)
    return where(operate("lt", value_of(x), y), x, y)


def python_max(*numbers: Any) -> Any:
    """Replace ``max`` in kernels: Python's own for constants, otherwise :func:`maximum`."""
    if any(isinstance(number, Value) for number in numbers):
        return maximum(*numbers)
    return max(*numbers)


def python_min(*numbers: Any) -> Any:
    if any(isinstance(number, Value) for number in numbers):
        return minimum(*numbers)
    return min(*numbers)


class Range:
    """Replaces ``range`` in kernels: yields scalars of the kernel."""

    def __init__(self, *bounds: Any, **hints: Any) -> None:
        self._numbers = range(*(int(bound) for bound in bounds))

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Value]:
        return (Value(i, core.int32) for i in self._numbers)


def static_range(*bounds: Any) -> range:
    return range(*bounds)


def _float(x: Any) -> Value:
    x = value_of(x)
    return x if x.dtype.is_floating() else cast(x, core.float32)


def exp2(x: Any) -> Value:
    return elementwise(torch.exp2, _float(x))


def exp(x: Any) -> Value:
    return elementwise(torch.exp, _float(x))


def log(x: Any) -> Value:
    return elementwise(torch.log, _float(x))


def log2(x: Any) -> Value:
    return elementwise(torch.log2, _float(x))


def rsqrt(x: Any) -> Value:
    return elementwise(torch.rsqrt, _float(x))


def absolute(x: Any) -> Value:
    return elementwise(torch.abs, x)


def fma(x: Any, y: Any, z: Any) -> Value:
    """Return x * y + z in float32, rounded once (but for the rare rounding of float64 to a tie)."""
    return elementwise(lambda x, y, z: (x.double() * y.double() + z.double()).to(x.dtype), x, y, z)


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def sum_of(x: Value, axis: Any = None, keep_dims: bool = False) -> Value:
    x = cast(x, core.int32) if x.dtype in (core.int1, core.int8, core.int16) else x
    data = x.data.sum() if axis is None else x.data.sum(int(axis))
    return Value(data.to(TORCH_DTYPES[x.dtype]), x.dtype)


def max_of(x: Value, axis: Any = None) -> Value:
    """Return the maximum along ``axis`` (None: of all elements), without NaN."""
    data = x.data
    if x.dtype.is_floating():
        data = torch.where(torch.isnan(data), -torch.inf, data)
    return Value(data.amax() if axis is None else data.amax(int(axis)), x.dtype)


def cumsum(x: Value, axis: int = 0) -> Value:
    return Value(x.data.cumsum(axis).to(x.data.dtype), x.dtype)


def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    x.registers if assert_trivial else x.data  # noqa: B018 - raises an error if x is a product in flight
    return x


def reshape(x: Value, *shape: Any) -> Value:
    return x.reshape(*shape)


def permute(x: Value, *order: Any) -> Value:
    return x.permute(*order)


def expand_dims(x: Value, axis: int) -> Value:
    return x.renamed(x.registers.unsqueeze(axis))


def broadcast_to(x: Value, *shape: Any) -> Value:
    (sizes,) = shape if isinstance(shape[0], list | tuple) else (shape,)
    return Value(x.tensor().expand([int(size) for size in sizes]), x.dtype)


def split(x: Value) -> tuple[Value, Value]:
    first, second = x.registers.unbind(-1)
    return x.renamed(first), x.renamed(second)


def join(x: Value, y: Value) -> Value:
    return Value(torch.stack([x.data, y.data], -1), x.dtype)


def multiple_of(x: Any, divisor: int) -> Any:
    """Check the hint to the compiler that x is a multiple of ``divisor`` and return x; -1 is allowed.

    Addresses are counted in bytes from the beginning of their tensor's memory, which is aligned.
    """
    if isinstance(x, Pointer):
        number = torch.as_tensor(x.offset) * x.element.primitive_bitwidth // 8
    else:
        number = torch.as_tensor(x.data)
    if bool(((number % divisor != 0) & (number != -1)).any()):
        raise KernelError(f"{x} has what is no multiple of {divisor}")
    return x


def program_id(axis: int) -> Value:
    return Value(current_partition().program.index if axis == 0 else 0, core.int32)


def num_programs(axis: int) -> Value:
    return Value(current_partition().program.launch.programs if axis == 0 else 1, core.int32)


def num_warps() -> int:
    return current_partition().num_warps


def load(
    pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False, **hints: Any
) -> Value:
    if volatile:
        schedule = current_partition().schedule
        found = schedule.poll(
            pointer.key, lambda: global_memory.load(pointer, None, None).data, lambda: f"{pointer.offset}"
        )
        return Value(found, pointer.element)
    return global_memory.load(pointer, mask, other)


def store(pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
    global_memory.store(pointer, value, mask)
    current_partition().schedule.version += 1


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Value:
    partition = current_partition()
    partition.schedule.pause()
    before = global_memory.atomic_add(pointer, value)
    partition.schedule.version += 1
    partition.release(pointer.key)
    if sem != "release":
        partition.acquire(pointer.key)
    return before


def allocate_shared_memory(dtype: Any, shape: Sequence[Any], layout: Any) -> Tile:
    return Tile.allocate(shape, dtype, current_partition().program.launch.agents)


def reinterpret(memory: Tile, dtype: Any, shape: Sequence[Any], layout: Any) -> Tile:
    return memory.reinterpret(dtype, shape)


def transposed(x: Value) -> Value:
    return x.permute(1, 0)


def fence_async_shared(cluster: bool = False) -> None:
    current_partition().fence()


def wide_product(word: Value, factor: int) -> tuple[Value, Value]:
    """Return the (upper, lower) 32 bits of an unsigned 64-bit product, which does not fit torch's int64.

    This replaces the kernels' own function of the same name.
    """
    bits = word.data
    high = (factor * (bits >> 16) + (factor * (bits & 0xFFFF) >> 16)) >> 16
    return Value(high, core.uint32), Value(factor * bits & 0xFFFFFFFF, core.uint32)


COMMON = dict(
    abs=absolute, arange=arange, atomic_add=atomic_add, broadcast_to=broadcast_to, cdiv=cdiv, cumsum=cumsum,
    exp=exp, exp2=exp2, expand_dims=expand_dims, fma=fma, full=full,
    inline_asm_elementwise=inline_asm_elementwise, join=join, load=load, log=log, log2=log2, max=max_of,
    maximum=maximum, minimum=minimum, PropagateNan=core.PropagateNan,
    multiple_of=multiple_of, num_programs=num_programs, permute=permute, pointer_type=core.pointer_type,
    program_id=program_id, range=Range, reshape=reshape, rsqrt=rsqrt, split=split,
    static_range=static_range, store=store, sum=sum_of, to_tensor=to_tensor, where=where, zeros=zeros,
    zeros_like=zeros_like, float32=core.float32, float16=core.float16,
    bfloat16=core.bfloat16, float8e4nv=core.float8e4nv, int64=core.int64, int32=core.int32, int16=core.int16,
    int8=core.int8, uint8=core.uint8, uint32=core.uint32, int1=core.int1, float64=core.float64,
    constexpr=same, debug_barrier=nothing, tensor=None, static_assert=nothing,
)  # fmt: skip
CUDA = Names("tl.extra.cuda", gdc_wait=nothing, gdc_launch_dependents=nothing)
TL = Names("tl", **COMMON, dot=products.dot, trans=transposed, extra=Names("tl.extra", cuda=CUDA))
GL = Names(
    "gl", **COMMON, allocate_shared_memory=allocate_shared_memory, convert_layout=convert_layout,
    num_warps=num_warps, shared_memory_descriptor=None, warp_specialize=warp_specialize,
    **{name: LAYOUT for name in (
        "AutoLayout", "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout",
        "NVMMADistributedLayout", "NVMMASharedLayout", "SliceLayout", "SwizzledSharedLayout",
    )},
)  # fmt: skip
MBARRIER = Names(
    "mbarrier", MBarrierLayout=LAYOUT, init=barriers.init, expect=barriers.expect, arrive=barriers.arrive,
    wait=barriers.wait,
)  # fmt: skip
TMA = Names("tma", store_wait=copies.store_wait)
ASYNC_COPY = Names("async_copy", commit_group=copies.commit_group, wait_group=copies.wait_group)
PYTHON = {"range": Range, "max": python_max, "min": python_min, "abs": absolute}
"""Functions that replace Python's built-in ones in kernels."""


BY_NAME = {
    "warpgroup_mma": products.warpgroup_mma,
    "warpgroup_mma_wait": products.warpgroup_mma_wait,
    "mma_v2": products.mma_v2,
    "fence_async_shared": fence_async_shared,
    "async_copy_to_shared": copies.copy_to_shared,
    "async_load": copies.load,
    "async_store": copies.store,
    "async_add": copies.add,
    "partition_barrier": nothing,
    "wide_product": wide_product,
    "reinterpret": reinterpret,
}
"""Functions that replace those that kernels import by name."""
