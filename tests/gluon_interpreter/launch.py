"""Runs launches of the package in the interpreter; all host code up to the start of a kernel is unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core

from flashtile.backends.common.launch import CachedLaunch
from flashtile.op.operation import Operation
from gluon_interpreter.functions import Functions
from gluon_interpreter.global_memory import Box, Pointer
from gluon_interpreter.program import Launch, Partition, Program, current_partition
from gluon_interpreter.schedule import Schedule, current_task
from gluon_interpreter.values import Value, cast


def argument(value: Any, is_constant: bool) -> Any:
    """Return the interpreter's form of a launch argument; constants stay as they are."""
    if is_constant or value is None:
        return value
    if isinstance(value, tuple):  # a structure
        return type(value)(*(argument(field, False) for field in value))
    if isinstance(value, Tensor):
        return Pointer.to_tensor(value)
    if isinstance(value, TensorDescriptor):
        return Box(value)
    if isinstance(value, bool):
        return Value(value, core.int1)
    if isinstance(value, int):
        return Value(value, core.int32 if -(2**31) <= value < 2**31 else core.int64)
    return cast(Value(float(value), core.float64), core.float32)


class Interpreter:
    """Runs kernels. Each launch has its own seed, which is ``seed`` plus the number of earlier launches."""

    def __init__(self, seed: int = 0, functions: Functions | None = None, ordered_sums: bool = False) -> None:
        self._seed, self._ordered_sums = seed, ordered_sums
        self._functions = Functions() if functions is None else functions
        self.launched: list[str] = []

    def launch(self, kernel: Any, programs: int, arguments: tuple, num_warps: int) -> None:
        function = self._functions.of(kernel)
        schedule = Schedule(self._seed + len(self.launched))
        self.launched.append(function.__name__)
        constants = [parameter.is_constexpr for parameter in kernel.params]
        if len(constants) != len(arguments):
            raise TypeError(f"{function.__name__} takes {len(constants)} arguments, not {len(arguments)}")
        arguments = tuple(map(self._with_functions, arguments))
        given = [argument(value, constant) for value, constant in zip(arguments, constants, strict=True)]
        if isinstance(kernel, GluonJITFunction):
            launch = Launch(schedule, programs, self._ordered_sums)
            for index in range(programs):
                _start(launch, index, num_warps, lambda: function(*given))
        else:
            _start_in_turn(schedule, programs, num_warps, lambda: function(*given))
        schedule.run()

    def _with_functions(self, value: Any) -> Any:
        """Return a constexpr variant of a kernel with its score and mask functions translated to Python."""
        if not is_dataclass(value) or isinstance(value, type | TensorDescriptor):
            return value
        compiled = {name: field for name, field in vars(value).items() if hasattr(field, "fn")}
        return replace(value, **{name: self._functions.of(field) for name, field in compiled.items()})


def _start(launch: Launch, index: int, num_warps: int, run: Callable[[], None]) -> None:
    name = f"program {index}"
    partition = Partition(Program(launch, index), name, num_warps)

    def body() -> None:
        run()
        current_partition().end()

    launch.schedule.start(name, body, partition)


def _start_in_turn(schedule: Schedule, programs: int, num_warps: int, run: Callable[[], None]) -> None:
    """Run programs of a Triton kernel one after the other in random order, because they never wait."""

    def body() -> None:
        for index in schedule.shuffled(programs):
            program = Program(Launch(schedule, programs), index)
            current_task().state = Partition(program, f"program {index}", num_warps)
            run()

    schedule.start("programs in turn", body, None)


@contextmanager
def interpreted(
    seed: int = 0, functions: Functions | None = None, ordered_sums: bool = False
) -> Iterator[Interpreter]:
    """Run the kernels that are launched in the block in the interpreter, on tensors in the CPU's memory.

    With ``ordered_sums``, two TMA additions to the same memory are an error unless waits order them.
    """
    interpreter = Interpreter(seed, functions, ordered_sums)

    def run(kept: Any, device: torch.device, *tensors: Any) -> None:
        interpreter.launch(kept.kernel, kept.programs, kept.arguments(tensors), kept.options["num_warps"])

    def prepared(operation: Operation, tensors: Any, beside: Any, options: Any) -> Any:
        operation.check(*tensors, beside, options)
        return operation.prepare(tensors, beside, options)  # not cached: it only works in the interpreter

    with (
        mock.patch.object(CachedLaunch, "__call__", run),
        mock.patch.object(Operation, "prepared", prepared),
        mock.patch("flashtile.backends.hopper.reason_of_device", return_value=None),
    ):
        yield interpreter
