"""Compiles the kernels of calls, in parallel processes, for GPUs that this machine need not have."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.common.device import Target, capability, compiling_for, multiprocessors
from flashtile.compilation.calls import Call, read_calls
from flashtile.op.operation import OPERATIONS

MAX_WORKERS = 16

Source = Call | Callable[[], list[Any]]
"""A call, or a picklable function that returns a list of (launch, tensors).

The function is for kernels that belong to no operation.
"""


@dataclass(frozen=True)
class Failure:
    """A call whose kernels were not compiled, and why."""

    call: Source
    target: str
    reason: str

    @property
    def operation(self) -> str:
        """Name of the call's operation."""
        return self.call.operation if isinstance(self.call, Call) else "sample"


@dataclass(frozen=True)
class Compiled:
    """The result of :func:`compile_calls`: the number of kernels, and the calls without compiled kernels."""

    kernels: int
    failures: tuple[Failure, ...]


def launches(call: Source, target: Target) -> list[Any]:
    """Return a list of (launch, tensors): the kernel launches of a call on a GPU. No kernel is run.

    Raises:
        NotImplementedError: no backend with kernels serves the call on this GPU.
        ValueError: this version has no such operation or argument.
    """
    from flashtile.backends.common.cached_launch import recording

    if not isinstance(call, Call):
        with compiling_for(target):
            return call()
    tensors, optional, options = call.on_meta()
    with compiling_for(target), recording() as recorded:
        OPERATIONS[call.operation].launch_on_meta(tensors, optional, options, target)
    return recorded


def compile_calls(
    calls: Iterable[Source],
    targets: Iterable[Target],
    folder: Path | None,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Compiled:
    """Compile the kernels of calls into a folder for other machines, or into this machine's Triton cache.

    A kernel that several calls share is compiled once.

    Args:
        calls: the calls.
        targets: the GPUs.
        folder: folder for the kernels, made if it is missing; its index is replaced. None: Triton's cache.
        workers: number of processes that compile; by default one for each core, at most 16. The processes are
            spawned, so a script that calls this function needs ``if __name__ == "__main__":``.
        progress: called after each kernel with (number of kernels done, number of all kernels).
    """
    wanted, failures = _wanted(list(calls), list(targets))
    if folder is not None:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    kernels: dict[str, tuple[str, dict[str, str]]] = {}
    for done, (task, found) in enumerate(_results(wanted, folder, workers), 1):
        if isinstance(found, Exception):  # the compiler failed; the other kernels are still compiled
            failures.append(Failure(task.call, task.target.name, f"{type(found).__name__}: {found}"))
        else:
            kernels |= {key: (task.target.arch, digests) for key, digests in found.items()}
        progress(done, len(wanted))
    if folder is not None:
        from flashtile.backends.common.compiled_folder import write_index

        write_index(folder, kernels)
    return Compiled(len(kernels), tuple(failures))


def warmup(
    calls: str | os.PathLike[str] | Iterable[Call],
    device: torch.device | str | None = None,
    workers: int | None = None,
) -> Compiled:
    """Compile the kernels of calls for this machine's GPU, in parallel processes, before they are needed.

    The kernels are kept in Triton's cache, where the first call of this or a later process finds them. An
    empty file in this cache marks them as compiled, so the next warm-up with the same calls returns at once,
    with 0 kernels.

    Args:
        calls: file that :func:`record_calls` wrote, or the calls.
        device: the GPU. Default: torch's current one.
        workers: number of processes that compile; by default one for each core, at most 16.

    Raises:
        RuntimeError: the process that compiles failed.
        ValueError: ``device`` is not an NVIDIA GPU of this machine, or the file does not hold calls.

    Examples:
        >>> if torch.cuda.is_available():
        ...     flashtile.warmup("calls.json")
    """
    given = read_calls(calls) if isinstance(calls, (str, os.PathLike)) else _checked(calls)
    found = torch.device(device or "cuda")
    if found.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        raise ValueError(f"device must be an NVIDIA GPU of this machine, got {found}")
    from flashtile.compilation.ahead import compile_in_process

    return compile_in_process(given, target_of(found), workers)


def target_of(device: torch.device) -> Target:
    """Return the description of a GPU of this machine."""
    return Target(torch.cuda.get_device_name(device), capability(device), multiprocessors(device))


def _checked(calls: Any) -> list[Call]:
    given = list(calls) if isinstance(calls, Iterable) else [calls]
    if not all(isinstance(call, Call) for call in given):
        raise TypeError(f"calls must be a path or recorded calls, got {type(calls).__name__}")
    return given


def _results(
    tasks: list[_Task], folder: Path | None, workers: int | None
) -> Iterator[tuple[_Task, dict[str, dict[str, str]] | Exception]]:
    """Yield each finished task with the result of :func:`_compile`, or with its exception."""
    if not tasks:
        return
    count = min(workers or min(os.cpu_count() or 1, MAX_WORKERS), len(tasks))
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(count, context, _begin, ("" if folder is None else cache,)) as pool,
    ):
        running = {pool.submit(_compile, task, folder): task for task in tasks}
        for future in as_completed(running):
            yield running[future], future.exception() or future.result()  # type: ignore[misc]


@dataclass(frozen=True)
class _Task:
    """The launch number ``index`` of a call on a GPU."""

    call: Source
    target: Target
    index: int


def _wanted(calls: list[Source], targets: list[Target]) -> tuple[list[_Task], list[Failure]]:
    """Return one task for each different kernel, and a failure for each call without kernels."""
    tasks: dict[Any, _Task] = {}
    failures = []
    for target in targets:
        for call in calls:
            try:
                for index, (launch, tensors) in enumerate(launches(call, target)):
                    key = target, launch.kernel, str(_kinds(launch, tensors)), str(launch.options)
                    tasks.setdefault(key, _Task(call, target, index))
            except (NotImplementedError, ValueError) as error:
                failures.append(Failure(call, target.name, str(error)))
    return list(tasks.values()), failures


def _kinds(launch: Any, tensors: tuple) -> list[Any]:
    """Return what the compiler may assume about the arguments of a launch.

    Launches with equal assumptions share a kernel.
    """
    given = zip(launch.kernel.params, launch.arguments(tensors), strict=True)
    return [
        value if parameter.is_constexpr else _kind(value, not parameter.do_not_specialize)
        for parameter, value in given
    ]


def _kind(value: Any, specialized: bool) -> Any:
    """Return what the compiler may assume about an argument.

    ``specialized``: whether it assumes that integers are 1, or multiples of 16, if they are.
    """
    if isinstance(value, tuple):
        return tuple(_kind(each, specialized) for each in value)
    if isinstance(value, Tensor):
        return value.dtype
    if type(value) is int:
        return specialized and (value == 1, value % 16 == 0), -(2**31) <= value < 2**31
    if type(value) is float:
        return float
    if hasattr(value, "block_shape"):  # a TMA descriptor
        return value.base.dtype, tuple(value.block_shape), str(getattr(value, "layout", None))
    return value


def _begin(cache: str) -> None:
    """Prepare a worker process, which compiles kernels.

    ``cache`` is the folder of a temporary Triton cache, for kernels that go to a folder. If it is "", the
    kernels go to the usual cache.
    """
    from flashtile.backends.common.compiled_folder import NO_SOURCE_LINES

    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["FLASHTILE_QUIET"] = "1"  # the caller shows the progress
    if cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, NO_SOURCE_LINES: "1"}


def _end_with_parent() -> None:
    """End this process when its parent has ended, even if the parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _compile(task: _Task, folder: Path | None) -> dict[str, dict[str, str]]:
    """Compile the kernel of a task, and return {key of the kernel: digests of its files}.

    The files are written to ``folder``. If it is None, the kernel is only in Triton's cache, and there are no
    digests.
    """
    from flashtile.backends.common.compiled_folder import write_kernel
    from flashtile.backends.common.kernel_cache import collecting
    from flashtile.backends.compat import compiling_driver

    launch, tensors = launches(task.call, task.target)[task.index]
    with compiling_driver(task.target.capability), collecting() as collected:
        launch.compile_ahead(tensors)
    if folder is None:
        return {key: {} for key in collected}
    return {key: write_kernel(folder, key, compiled) for key, compiled in collected.items()}
