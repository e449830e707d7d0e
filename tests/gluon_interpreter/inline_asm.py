"""Python functions for the kernels' inline assembly, by its text. An unknown text is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from triton.language import core

from gluon_interpreter import global_memory
from gluon_interpreter.errors import KernelError
from gluon_interpreter.program import current_partition
from gluon_interpreter.values import TORCH_DTYPES, Value

LARGEST_E4M3 = 448.0


def same(x: Any, dtype: Any) -> Value:
    """Return ``x`` unchanged, after its load to registers is done; its dtype must be ``dtype``."""
    if isinstance(x, int) or x.dtype == dtype:
        return x if isinstance(x, int) else x.arrived()
    raise KernelError(f"{x.dtype} is taken for {dtype}")


def rounded(x: Value, dtype: Any) -> Value:
    return x.to(dtype)


def differs_from_one(x: Value, dtype: Any) -> Value:
    return Value(torch.ne(x.data, 1.0).to(TORCH_DTYPES[dtype]), dtype)


def rescaled(x: Value, factor: Value, flag: Value, dtype: Any) -> Value:
    """Multiply x by ``factor`` where ``flag`` is set. A warp skips this if no row of it needs the factor."""
    return Value(torch.where(flag.data != 0, x.data * factor.data, x.data), dtype)


def e4m3_bytes(*numbers_and_dtype: Any) -> Value:
    """Convert four numbers to e4m3 and pack them into an int32, the first in the lowest byte."""
    *numbers, dtype = numbers_and_dtype
    four = torch.stack([number.data for number in numbers], -1).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return Value(four.to(torch.float8_e4m3fn).view(torch.int32)[..., 0], dtype)


def registers_as_bytes(x: Value, dtype: Any) -> Value:
    """Return for each group of four neighbours the four bytes of the first one, as int8."""
    firsts = x.data.reshape(*x.data.shape[:-1], -1, 4)[..., :1]
    return Value(firsts.contiguous().view(torch.int8).reshape(x.data.shape), dtype)


def bytes_exchanged(low: Value, high: Value, dtypes: Any) -> tuple[Value, Value]:
    """Return (low bytes, high bytes) of two tiles whose last dimension is a pair of int16.

    Each result has the same shape. The first element of a pair packs the bytes of ``low``, the second of
    ``high``.
    """
    parts = [x.data.contiguous().view(torch.int8).reshape(*x.data.shape, 2) for x in (low, high)]
    both = torch.stack(parts, -3)  # [..., low or high, c, byte], but pairs c are the last dimension
    even, odd = (both[..., byte].contiguous().view(torch.int16)[..., 0] for byte in range(2))
    return Value(even, dtypes[0]), Value(odd, dtypes[1])


def log2(x: Value, dtype: Any) -> Value:
    return Value(x.tensor().log2(), dtype)


def product(x: Value, factor: Any, dtype: Any) -> Value:
    return Value(x.data * (factor.data if isinstance(factor, Value) else factor), dtype)


def nothing(*operands_and_dtype: Any) -> Value:
    """Do nothing, for instructions without effect here: kernels run one after the other in one memory."""
    return Value(0, core.int32)


def stores_awaited(pending: int) -> Callable[..., Value]:
    def wait(*operands: Any) -> Value:
        partition = current_partition()
        partition.wait_store_writes(pending)
        partition.schedule.pause()
        return Value(1, core.int32)

    return wait


def load_acquire(pointer: Any, dtype: Any) -> Value:
    partition = current_partition()
    found = partition.schedule.poll(
        pointer.key, lambda: global_memory.load(pointer, None, None).data, lambda: f"counter {pointer.offset}"
    )
    partition.acquire(pointer.key)
    return Value(found, dtype)


def proxy_fence(*operands: Any) -> Value:
    current_partition().fence_global()
    return Value(0, core.int32)


def tanh_of_product(x: Value, rate: Any, dtype: Any) -> Value:
    factor = rate.data if isinstance(rate, Value) else rate
    return Value(torch.tanh(x.data * factor), dtype)


def kept_by_numbers(axis: int) -> Callable[..., Value]:
    """Return a function that keeps P where a 15-bit random number is at least the limit, and else returns 0.

    The number is the low 15 bits of a 16-bit half of the word; even columns use the low half, odd ones the
    high half. At positions along ``axis`` that have bit 3 set, the two bytes of the half are exchanged first.
    """

    def kept(p: Value, words: Value, limit: Value, dtype: Any) -> Value:
        rows, columns = torch.arange(p.shape[0])[:, None], torch.arange(p.shape[1])
        half = words.data >> columns % 2 * 16 & 0xFFFF
        exchanged = half >> 8 | half << 8 & 0xFF00
        number = torch.where((rows, columns)[axis] // 8 % 2 == 1, exchanged, half) & 0x7FFF
        kept = number >= (limit.data & 0xFFFF)
        return Value(torch.where(kept, p.data, 0.0).to(p.data.dtype), dtype)

    return kept


def halves_transposed(words: Value, dtype: Any) -> Value:
    """Transpose matrices of 8 x 8 16-bit halves, of which each 32-bit word has two adjacent columns."""
    eights = words.data.unflatten(1, (-1, 4, 2)).unflatten(0, (-1, 8))  # [a, row, b, pair, register]
    halves = torch.stack((eights & 0xFFFF, eights >> 16 & 0xFFFF), 4)  # [a, row, b, pair, half, register]
    transposed = halves.flatten(3, 4).transpose(1, 3).unflatten(3, (4, 2))
    both = transposed[..., 0, :] | transposed[..., 1, :] << 16
    return Value(both.flatten(2).flatten(0, 1), dtype)


KNOWN: list[tuple[str, Callable[..., Any]]] = [
    (r"\{ \.reg \.pred never;.*nanosleep.*\}", same),
    (r"cvt\.rn\.(bf16|f16)x2\.f32 \$0, \$2, \$1;", rounded),
    (r"\{ \.reg \.b16 low, high, h<4>; .*cvt\.rn\.f16x2\.e4m3x2.*prmt\.b32 \$1, f2, f3, 0x7632; \}", rounded),
    (r"shl\.b32 \$0, \$2, 16; and\.b32 \$1, \$2, 0xffff0000;", rounded),
    (r"\{ \.reg \.pred other; setp\.neu.*vote\.sync\.any.*\}", differs_from_one),
    (r"\{ \.reg \.pred same; setp\.eq\.b32 same, \$48, 0; @same bra\.uni done; mul.*\}", rescaled),
    (r"\{ \.reg \.b16 low, high; cvt\.rn\.satfinite\.e4m3x2\.f32 low, \$2, \$1; .*\}", e4m3_bytes),
    (r"prmt\.b32 \$0, \$2, \$3, 0x6420; prmt\.b32 \$1, \$2, \$3, 0x7531;", bytes_exchanged),
    (r"\{ \.reg \.f32 a; mul\.ftz\.f32 (\$0|a), \$1, \$2; .*(ex2|tanh)\.approx.* \}", tanh_of_product),
    (r"lg2\.approx\.ftz\.f32 \$0, \$1;", log2),
    (r"mul\.rn\.f32 \$0, \$1, \$2;", product),
    (r"\{ \.reg \.b32 x<4>, a<4>, m<4>; .*prmt\.b32 x2, \$12.*0x30; \}", kept_by_numbers(1)),
    (r"\{ \.reg \.b32 x<4>, a<4>, m<4>; .*prmt\.b32 x2, \$10.*0x30; \}", kept_by_numbers(0)),
    (r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16 \$0, \$1;", halves_transposed),
    (r"griddepcontrol\.(wait|launch_dependents); mov\.[bu]32 \$0, (0|\$1);", nothing),
    (r"prefetch\.global\.L2 \[\$1\]; mov\.u32 \$0, 0;", nothing),
    (r"shfl\.sync\.idx\.b32 \$0, \$1, 0, 31, 0xffffffff;", same),
    (r"fence\.proxy\.async; mov\.b32 \$0, \$1;", proxy_fence),
    (r"ld\.acquire\.gpu\.global\.b32 \$0, \[\$1\];", load_acquire),
]
COPIED = "mov.b32 $0, $1;"
STORES_AWAITED = re.compile(r"cp\.async\.bulk\.wait_group (\d+); mov\.b32 \$0, \$1;")


def meaning(text: str, pack: int, dtype: Any) -> Callable[..., Any]:
    """Return the function for an assembly text.

    Raises:
        NotImplementedError: the text is unknown.
    """
    text = " ".join(text.split())
    if text == COPIED:
        return registers_as_bytes if dtype == core.int8 and pack == 4 else same
    awaited = STORES_AWAITED.fullmatch(text)
    if awaited is not None:
        return stores_awaited(int(awaited[1]))
    for pattern, function in KNOWN:
        if re.fullmatch(pattern, text):
            return function
    raise NotImplementedError(f"inline assembly that the interpreter does not know: {text}")


def inline_asm_elementwise(asm: str, constraints: str, args: Any, dtype: Any, is_pure: Any, pack: Any) -> Any:
    return meaning(asm, pack, dtype)(*args, dtype)
