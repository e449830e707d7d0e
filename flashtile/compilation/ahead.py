"""Warm-ups: compilation in a separate process, which starts worker processes.

The program that waits for this process may use a GPU, because its Triton driver is not changed. It may be any
script, because the new processes import only this module. They end when the program ends, even if the program
is killed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from flashtile.backends.common.device import Target, capability, multiprocessors
from flashtile.compilation.compiling import Compiled, Source, compile_calls, launches, representatives
from flashtile.version import __version__

Sources = Iterable[Source] | Callable[[], Iterable[Source]]
"""Calls, or a picklable function that returns calls. The new process calls the function."""


def target_of(device: torch.device) -> Target:
    """Return the description of a GPU of this machine."""
    return Target(torch.cuda.get_device_name(device), capability(device), multiprocessors(device))


def compile_in_process(calls: Sources, target: Target, workers: int | None = None) -> Compiled:
    """Start a process that compiles the kernels of calls into Triton's cache, and wait for its end.

    If no kernel failed, an empty file in the cache then marks these kernels as compiled. If this file exists,
    no process is started. If several programs want the same kernels at once, the first compiles them and the
    others wait.

    Raises:
        OSError: the cache cannot be written.
        RuntimeError: the process failed.
    """
    import fcntl  # Windows does not have it

    from flashtile.backends.common.kernel_store import in_use
    from flashtile.backends.compat import forget_version_of_assembler

    forget_version_of_assembler()
    task = pickle.dumps((calls if callable(calls) else list(calls), target, workers))
    folders = os.pathsep.join(str(folder.path) for folder in in_use())
    note = _note_of(task, folders)
    note.parent.mkdir(parents=True, exist_ok=True)
    with note.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, or the program ends
        if note.is_file():
            return Compiled(0, ())
        done = _compile(task, folders)
        if not done.failures:
            note.touch()
    return done


def compile_for_engine(
    calls: Sources, device: torch.device, logger: logging.Logger, workers: int | None = None
) -> Compiled | None:
    """Compile the kernels of an engine's steps by :func:`compile_in_process`, and log their number.

    If that fails, a warning is logged, and the result is None. Kernels are then compiled when they are
    needed.

    Args:
        calls: the calls of the steps.
        device: the engine's NVIDIA GPU.
        logger: the engine's logger.
        workers: number of processes that compile; by default one for each core, at most 32.
    """
    begun = time.monotonic()
    try:
        done = compile_in_process(calls, target_of(device), workers)
    except (RuntimeError, OSError) as error:
        logger.warning("kernels are compiled when requests need them: %s", error)
        return None
    for failure in done.failures:
        logger.warning("a kernel of the engine was not compiled ahead: %s", failure.reason)
    logger.info("%d kernels compiled in %.1f s", done.kernels, time.monotonic() - begun)
    return done


def compile_and_load(calls: Iterable[Source], device: torch.device, logger: logging.Logger) -> None:
    """Compile kernels by :func:`compile_for_engine`, and load them into this process and to its current GPU.

    The first launch of a kernel then compiles nothing and reads no file. In particular, Triton calls no hook
    that observes compilations, as it does even for a kernel that it finds in its cache.
    """
    target = target_of(device)
    few = representatives(calls, target)
    done = compile_for_engine(few, device, logger)
    if done is None:
        return
    failed = {failure.call for failure in done.failures}
    for call in few:
        if call not in failed:
            for launch, tensors in launches(call, target):
                launch.load(tensors)


def _compile(task: bytes, folders: str) -> Compiled:
    """Compile a task in a new process."""
    from flashtile.backends.common.kernel_store import VARIABLE

    command = [sys.executable, "-m", "flashtile.compilation.ahead"]
    environment = {**os.environ, VARIABLE: folders, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(task).to_bytes(8, "little") + task)
            process.stdin.flush()
            answer = process.stdout.read()  # stdin stays open, because closing it would end the process
        except BaseException:
            process.kill()
            raise
    if process.returncode or not answer:
        raise RuntimeError(f"compiling ahead has ended with code {process.returncode}")
    done: Compiled = pickle.loads(answer)
    return done


def _note_of(task: bytes, folders: str) -> Path:
    """Return the path of the file in Triton's cache that marks a task's kernels as compiled.

    ``folders``: the folders of compiled kernels that are in use.
    """
    import triton

    from flashtile.backends.common.kernel_store import fingerprint
    from flashtile.backends.compat import compiler_variables

    sources = [fingerprint(Path(triton.__file__).parent), fingerprint(Path(__file__).parents[1])]
    others = [__version__, folders, *compiler_variables()]
    digest = hashlib.sha256(task + str((*sources, *others)).encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / "flashtile" / f"{digest}.ahead"


def _end_with_stdin(descriptor: int) -> None:
    """Wait until the program that started this process has ended, then end this process."""
    while os.read(descriptor, 2**16):
        pass
    os._exit(1)


def _main() -> None:
    stdin, answers = sys.stdin.buffer, os.dup(1)
    os.dup2(2, 1)  # stdout is only for the answer; compilers print to stderr
    size = int.from_bytes(stdin.read(8), "little")
    calls, target, workers = pickle.loads(stdin.read(size))  # only the program that started this can write
    threading.Thread(target=_end_with_stdin, args=(stdin.fileno(),), daemon=True).start()
    done: Any = compile_calls(calls() if callable(calls) else calls, [target], None, workers)
    file = os.fdopen(answers, "wb")
    pickle.dump(done, file)
    file.flush()
    # The file is not closed before: at the end of the answer the program closes stdin, and then the thread
    # that reads stdin would end this process with code 1.
    os._exit(0)


if __name__ == "__main__":
    _main()
