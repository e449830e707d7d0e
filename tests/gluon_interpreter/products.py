"""Products on the tensor cores: wgmma, which is asynchronous, and mma, which is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.language import core

from gluon_interpreter.errors import KernelError
from gluon_interpreter.program import current_partition
from gluon_interpreter.shared_memory import Tile
from gluon_interpreter.values import Value

WARPGROUP = 4
ROWS = 64


class Flight:
    """A wgmma product in flight: its partition has not yet waited for it."""

    def __init__(self, name: str, number: int, partition: Any) -> None:
        self.name, self.number, self.partition = name, number, partition

    def __str__(self) -> str:
        return self.name


def _operand(operand: Any, name: str) -> Tensor:
    """Return an operand as [rows, columns] fp32.

    The read of a tile in shared memory is recorded; it lasts until the product has been waited for.
    """
    partition = current_partition()
    if isinstance(operand, Tile):
        partition.check_read(operand, f"multiplies by {name},", is_async=True)
        operand.record_read(partition.products, partition.num_products)
        return operand.data.float()
    return operand.data.float()


def warpgroup_mma(
    a: Any, b: Tile, acc: Value, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: Any = False,
) -> Value:  # fmt: skip
    """Return acc + a @ b, in flight until :func:`warpgroup_mma_wait`. Until then only products may use it."""
    partition = current_partition()
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b or acc.shape != [m, n] or a.dtype != b.dtype or acc.dtype != core.float32:
        raise KernelError(
            f"{acc.dtype}{acc.shape} += {a.dtype}{a.shape} times {b.dtype}{b.shape} is no product"
        )
    if partition.num_warps != WARPGROUP or m != ROWS:
        raise KernelError(f"a product of {m} rows by {partition.num_warps} warps")
    flight = acc.flight
    if flight is not None and flight.partition is not partition:
        raise KernelError(f"adds to another partition's sum: {flight}")
    partition.num_products += 1
    product = _operand(a, "a") @ _operand(b, "b")
    if use_acc:
        product = product + acc.landed
    name = f"product number {partition.num_products} of {partition.name}"
    result = Value(product, core.float32, Flight(name, partition.num_products, partition))
    if not is_async:
        result = warpgroup_mma_wait(0, [result])
    return result


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    """Wait for all products except the last ``num_outstanding``, and return ``deps`` as they are then."""
    if not deps:
        raise KernelError("warpgroup_mma_wait without deps: the compiler moves what needs them over it")
    partition = current_partition()
    partition.wait_products(int(num_outstanding))
    over = int(partition.clock[partition.products.number])
    results = tuple(
        Value(x.landed, x.dtype, x.flight if x.flight is not None and x.flight.number > over else None)
        for x in deps
    )
    partition.schedule.pause()
    return results[0] if len(results) == 1 else results


def mma_v2(a: Value, b: Value, acc: Value, input_precision: Any = None) -> Value:
    """Return acc + a @ b, batched over the leading dimensions."""
    if a.dtype != b.dtype:
        raise KernelError(f"{a.dtype} times {b.dtype} is no product")
    return Value(torch.matmul(a.data.float(), b.data.float()) + acc.data, acc.dtype)


def dot(a: Value, b: Value, acc: Value | None = None, input_precision: Any = None) -> Value:
    """Return a @ b, plus ``acc`` if given, in fp32: ``tl.dot`` of Triton kernels."""
    product = a.data.float() @ b.data.float()
    return Value(product if acc is None else product + acc.data, core.float32)
