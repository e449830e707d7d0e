"""Compiles the kernels of calls, in parallel processes, for GPUs that this machine need not have.

This process finds the kernels, which needs torch. It hands them to processes that do not import torch.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtile.backends.common.device import Target, compiling_for
from flashtile.compilation.calls import Call
from flashtile.op.operation import OPERATIONS

MAX_WORKERS = 32
Progress = Callable[[str, int, int], None]
"""Called with a phase, how many calls or kernels are done in it, and how many there are."""
INDEXED_EVERY = 32
"""Number of kernels after which the index is written, so that a compilation that was killed can go on."""

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
    from flashtile.backends.common.launch import recording

    if not isinstance(call, Call):
        with compiling_for(target):
            return call()
    tensors, optional, options = call.on_meta()
    with compiling_for(target), recording() as recorded:
        OPERATIONS[call.operation].launch_on_meta(tensors, optional, options, target)
    return recorded


def representatives(calls: Iterable[Source], target: Target) -> list[Source]:
    """Return those calls that need a kernel which no earlier call needs.

    A call without kernels on the GPU is also returned, so that :func:`compile_calls` tells the reason.
    """
    known: set[tuple] = set()
    found = []
    for call in calls:
        try:
            keys = {launch.kernel_key(tensors) for launch, tensors in launches(call, target)}
        except (NotImplementedError, ValueError):
            keys = {("refused", call)}
        if not keys <= known:
            known |= keys
            found.append(call)
    return found


def compile_calls(
    calls: Iterable[Source],
    targets: Iterable[Target],
    folder: Path | None,
    workers: int | None = None,
    progress: Progress = lambda *counts: None,
) -> Compiled:
    """Compile the kernels of calls into a folder for other machines, or into this machine's Triton cache.

    A kernel that several calls share is compiled once. A kernel that the folder already has is kept.

    Args:
        calls: the calls.
        targets: the GPUs.
        folder: folder for the kernels, made if it is missing; its index is replaced, at last by one that has
            only the kernels of these calls. None: Triton's cache.
        workers: number of processes that compile; by default one for each core, at most 32.
        progress: called with a phase, how many calls or kernels are done in it, and how many there are: first
            "finding the kernels of calls", then "compiling kernels".
    """
    from flashtile.backends.common.kernel_store import write_index

    wanted, failures = _wanted(list(calls), list(targets), progress)
    kernels: dict[str, tuple[str, dict[str, str]]] = {}
    if folder is not None:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        kernels = _kept(wanted, folder)
    tasks = {key: pickled for key, (_, _, pickled) in wanted.items() if key not in kernels}
    progress("compiling kernels", len(kernels), len(wanted))
    try:
        for done, (key, found) in enumerate(_results(tasks, folder, workers), len(kernels) + 1):
            call, target, _ = wanted[key]
            if isinstance(found, str):  # the compiler failed; the other kernels are still compiled
                failures.append(Failure(call, target.name, found))
            else:
                kernels[key] = target.arch, found
            if folder is not None and done % INDEXED_EVERY == 0:
                write_index(folder, kernels)
            progress("compiling kernels", done, len(wanted))
    finally:
        if folder is not None:
            write_index(folder, kernels)
    return Compiled(len(kernels), tuple(failures))


Wanted = dict[str, tuple[Source, Target, bytes]]
"""For each key of a kernel: the first call that needs it, the GPU, and the kernel as bytes."""


def _wanted(
    calls: list[Source], targets: list[Target], progress: Progress = lambda *counts: None
) -> tuple[Wanted, list[Failure]]:
    """Return the kernels of calls, and a failure for each call without kernels."""
    from flashtile.backends.common.first_calls import only_naming, pickled
    from flashtile.backends.compat import compiling_driver

    wanted: Wanted = {}
    failures = []
    for i, target in enumerate(targets):
        known: set[tuple] = set()
        with compiling_driver(target.capability, only_named=True):
            for j, call in enumerate(calls):
                progress("finding the kernels of calls", i * len(calls) + j, len(targets) * len(calls))
                try:
                    for launch, tensors in launches(call, target):
                        kernel = launch.kernel_key(tensors)
                        if kernel in known:  # an engine's 7,000 calls need 200 kernels
                            continue
                        with only_naming() as named:
                            launch.compile_ahead(tensors)
                        for key, source in named.items():
                            if key not in wanted:
                                wanted[key] = call, target, pickled(source)
                        known.add(kernel)
                except (NotImplementedError, ValueError, pickle.PicklingError) as error:
                    failures.append(Failure(call, target.name, str(error)))
    return wanted, failures


def _kept(wanted: Wanted, folder: Path) -> dict[str, tuple[str, dict[str, str]]]:
    """Return (architecture, digests of the files) of each wanted kernel that a folder has, undamaged."""
    from flashtile.backends.common.kernel_store import CompiledFolder

    try:
        found = CompiledFolder.read(folder)
    except ValueError:  # a new folder, or one of another version
        return {}
    return {
        key: (target.arch, found.files[key]) for key, (_, target, _) in wanted.items() if found.has_whole(key)
    }


def _results(
    tasks: dict[str, bytes], folder: Path | None, workers: int | None
) -> Iterator[tuple[str, dict[str, str] | str]]:
    """Compile kernels in processes. Yield the key of each with the digests of its files, or with an error."""
    from flashtile.backends.common.first_calls import QUIET
    from flashtile.backends.common.kernel_store import NO_SOURCE_LINES

    own = threading.local()
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        environment = {QUIET: "1", "TMPDIR": temporary}  # the caller shows the progress
        if folder is not None:
            environment[NO_SOURCE_LINES] = "1"

        def compiled(key: str, source: bytes) -> tuple[str, Any]:
            """Compile a kernel in the process of this thread. If it has died, a new one takes its place."""
            from flashtile.backends.common.first_calls import opening, send, start_worker

            worker: Any = getattr(own, "worker", None)
            try:
                if worker is None:
                    worker = own.worker = start_worker(environment)
                    processes.append(worker)
                    send(worker, opening())
                send(worker, ("compile_into", key, source, folder and str(folder)))
                return key, pickle.load(worker.stdout)
            except Exception as error:  # the caller waits for an answer for each kernel
                own.worker = None
                ended = worker and f"its process has ended with code {_end(worker)}"
                return key, f"{ended or 'no process was started'}: {error}"

        pool = ThreadPoolExecutor(workers or min(os.cpu_count() or 1, MAX_WORKERS))
        try:
            for future in as_completed([pool.submit(compiled, *task) for task in tasks.items()]):
                yield future.result()
        finally:  # if the caller is interrupted, kernels are being compiled and others wait
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            pool.shutdown()
            for process in processes:
                _end(process)


def _end(worker: subprocess.Popen) -> int:
    """End a process, and return its exit code, which is its own if it has ended before."""
    with contextlib.suppress(OSError), worker:  # closing stdin fails if a dead process has not read all of it
        worker.kill()
    return worker.returncode
