"""Compile cases from recorded launches.

Calls with tensors on torch's "meta" device compute nothing. Their launches are recorded, with everything that
the compiler would receive. So a case cannot differ from the launch that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common.device import Target, compiling_for
from flashtile.backends.common.launch import CachedLaunch, Launched, recording
from flashtile.tools.inspection.report import CompileCase

TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""Triton's names of dtypes."""


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches_of(gpu: Target | tuple[int, int], *calls: Callable[[], Any]) -> list[Launched]:
    """Return the launches that ``calls`` would make on a GPU, or on one of this compute capability.

    The tensors of the calls are on torch's "meta" device.
    """
    with compiling_for(gpu), recording() as launches:
        for call in calls:
            call()
    return launches


def cases_of(gpu: Target | tuple[int, int], *calls: Callable[[], Any]) -> list[CompileCase]:
    """Return the compile case of each launch that ``calls`` make, with the name of its kernel."""
    launches = launches_of(gpu, *calls)
    return [case_of(launched, launched[0].kernel.fn.__name__) for launched in launches]


def only_case(
    gpu: Target | tuple[int, int], call: Callable[[], Any], name: str, **others: Any
) -> CompileCase:
    """Return the compile case of the only launch that ``call`` makes."""
    (launched,) = launches_of(gpu, call)
    return case_of(launched, name, **others)


def only(kernel: Any, cases: list[CompileCase], **fields: Any) -> CompileCase:
    """Return the case of ``kernel``, which must be one, with ``fields`` changed."""
    (case,) = (case for case in cases if case.kernel is kernel)
    return replace(case, **fields)


def words(named: Mapping[str, Any]) -> list[str]:
    """Return the names whose value is true."""
    return [name for name, present in named.items() if present]


def case_of(launched: Launched, name: str, **others: Any) -> CompileCase:
    """Return the :class:`CompileCase` of a recorded launch. ``others`` are further fields of the case."""
    launch, tensors = launched
    options = dict(launch.options)
    num_warps, num_stages = options.pop("num_warps"), options.pop("num_stages", 3)
    fused = options.pop("enable_fp_fusion", True)
    options.pop("launch_pdl", None)  # it changes no code
    others = {"options": options if fused else options | {"enable_fp_fusion": False}} | others
    return CompileCase(
        name=name, kernel=launch.kernel, **_arguments(launch, tensors), num_warps=num_warps,
        num_stages=num_stages, **others,
    )  # fmt: skip


def _arguments(launch: CachedLaunch, tensors: tuple) -> dict[str, Any]:
    """Return the fields ``signature``, ``constants`` and ``divisible_by_16`` of a launch's compile case."""
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    divisible = set()
    parameters = launch.kernel.params
    descriptors = {p.name: kind for p, kind in zip(parameters, launch.descriptor_types, strict=False)}
    constants |= {name: None for name, kind in descriptors.items() if kind is None}
    signature |= {name: kind for name, kind in descriptors.items() if kind is not None}
    for parameter, value in zip(parameters, launch.arguments(tensors), strict=True):
        if parameter.name in descriptors:
            continue
        if parameter.is_constexpr:
            constants[parameter.name] = value
            continue
        specialized = not parameter.do_not_specialize
        signature[parameter.name] = _type(value, specialized)
        multiples = {number % 16 == 0 for number in _integers(value) if number != 1}
        if specialized and multiples == {True}:
            divisible.add(parameter.name)
        elif specialized and len(multiples) == 2:
            raise ValueError(f"{parameter.name} mixes multiples of 16 with other integers: {value}")
    return {"signature": signature, "constants": constants, "divisible_by_16": frozenset(divisible)}


def _type(value: Any, specialized: bool) -> Any:
    """Return Triton's type of an argument, or a structure of the types of its fields.

    An argument that Triton compiles as a constant, such as None, is returned unchanged.
    """
    if isinstance(value, tuple):
        fields = [_type(field, specialized) for field in value]
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    if isinstance(value, Tensor):
        return f"*{TYPE_NAMES[value.dtype]}"
    if type(value) is int and not (value == 1 and specialized):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32" if type(value) is float else value


def _integers(value: Any) -> list[int]:
    if isinstance(value, tuple):
        return [number for field in value for number in _integers(field)]
    return [value] if type(value) is int else []
