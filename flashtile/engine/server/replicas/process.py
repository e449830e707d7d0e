"""A replica: a server in its own process, which is restarted when it ends unexpectedly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

READY = re.compile(r"serving .* at (http://\S+)")
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0
"""Seconds before a replica is restarted: the first pause, which doubles at each failure, and its maximum."""
MAX_FAILURES = 3
"""A replica is not restarted any more after this many starts in a row that end before it serves."""
BAD_ARGUMENTS = 2
"""Exit code of an invalid command line, after which a restart is useless."""

ORPHAN = "FLASHTILE_END_WITH_STDIN"
"""Environment variable of a replica that enables :func:`end_with_stdin`."""

logger = logging.getLogger("flashtile.server")


def end_with_stdin() -> None:
    """Make this replica receive SIGTERM when its parent process has ended, even if the parent was killed."""
    if not os.environ.pop(ORPHAN, None):
        return

    descriptor = sys.stdin.fileno()

    def watch() -> None:
        # Do not read sys.stdin: Python aborts at exit while a thread waits for it.
        while os.read(descriptor, 2**16):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class Replica:
    """A server process, restarted when it ends unexpectedly.

    Args:
        command, environment: command line and environment of the process. Its stderr is copied to this
            process's stderr.

    Attributes:
        url: address of the server; None while it does not serve.
        hangs: whether its process runs but does not answer.
        takes_calls: whether it takes new calls. A replica that is being shut down does not.
        in_flight: number of calls that it is answering.
        given_up: whether it failed to start so often that it is not restarted any more.
        exit_code: exit code of its last process.
        printed: for each line that a replica wrote before it began to serve, the first replica that wrote it.
            Replicas that share this dict print such a line only once.
    """

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str]):
        self.number, self.command, self.environment = number, list(command), dict(environment)
        self.url: str | None = None
        self.in_flight = self.restarts = self._failures = 0
        self.given_up = self.hangs = False
        self.takes_calls = True
        self.exit_code = 0
        self._stopping = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None]
        self._changed = asyncio.Event()
        self.printed: dict[str, int] = {}
        self._asked: set[asyncio.Task[Any]] = set()

    @property
    def is_up(self) -> bool:
        return self.url is not None and self.takes_calls and not (self.hangs or self._stopping.is_set())

    def start(self) -> None:
        """Start the process and keep it running."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_until_up(self) -> bool:
        """Wait until the replica serves. Return False if it failed to start too often."""
        while self.url is None and not self.given_up:
            self._changed.clear()
            await self._changed.wait()
        return self.url is not None

    def signal(self, number: int) -> None:
        """Send a signal that ends the process, and do not restart it."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            _send(self._process, number)
            _send(self._process, signal.SIGCONT)  # a stopped process would not handle the signal

    def set_hanging(self, hangs: bool) -> None:
        """Set whether the replica hangs. If it does, the work of every :meth:`ask` is cancelled."""
        self.hangs = hangs
        for task in self._asked if hangs else ():
            task.cancel()

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that needs the replica. Raise asyncio.TimeoutError if it is cancelled by a hang."""
        task = asyncio.create_task(work)
        self._asked.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._asked.discard(task)
            task.cancel()  # without effect unless the caller was cancelled
        if task.cancelled():
            raise asyncio.TimeoutError("the replica has stopped answering")
        return task.result()

    async def wait(self) -> None:
        """Wait until the process has ended and will not be restarted."""
        await self._task

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            begun = time.monotonic()
            self.exit_code = code = await self._serve_once()
            if self._stopping.is_set():
                return
            if code != BAD_ARGUMENTS:  # after bad arguments, the process has printed its own message
                logger.error("replica %d has ended with code %d", self.number, code)
            if time.monotonic() - begun > MAX_PAUSE:
                pause = FIRST_PAUSE
            if self._failures >= (1 if code == BAD_ARGUMENTS else MAX_FAILURES):
                self.given_up = True
                self._changed.set()
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause = min(2 * pause, MAX_PAUSE)
            self.restarts += not self._stopping.is_set()

    async def _serve_once(self) -> int:
        """Run the process once and return its exit code."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self.command, env={**self.environment, ORPHAN: "1"}, stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, limit=2**20,
            # A new session keeps the terminal's SIGINT from the replicas. The front process stops them.
            start_new_session=True,
        )  # fmt: skip
        if self._stopping.is_set():
            _send(process, signal.SIGTERM)
        assert process.stderr is not None
        self._failures += 1
        try:
            while line := await _read_line(process.stderr):
                text = line.decode(errors="replace")
                found = READY.search(text) if self.url is None else None
                if found is None:
                    if self.url is not None or self.printed.setdefault(text, self.number) == self.number:
                        sys.stderr.write(text)
                    continue
                self.url, self._failures, self.hangs, self.takes_calls = found[1], 0, False, True
                self._changed.set()
            return await process.wait()
        finally:
            self.url = None
            if process.returncode is None:
                _send(process, signal.SIGKILL)
                await process.wait()


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, or b"" at the end. Of a line longer than the stream's limit, only the end."""
    while True:
        with contextlib.suppress(ValueError):  # the line is too long; what was read of it is dropped
            return await stream.readline()


def _send(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal to a process, if it has not ended.

    asyncio's own ``send_signal`` is not used: before Python 3.13 it may fetch the exit code of a process that
    has just ended. The thread that waits for the process then reports 255.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
