"""The server's listening sockets, and which connections it keeps.

asyncio's own server takes connections until no file is left, and then writes to the log without end. This
one keeps a number of connections; where one more comes, the one longest without a call makes room.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from aiohttp import web

from flashtile.engine.server.service import Limits

LAST_WORDS = 5.0
"""Seconds for answers, and errors in their place, to reach their clients after the engine has ended."""

BACKLOG = 1024
"""Connections that the kernel holds until they are accepted."""

SPARE_FILES = 48
"""Files that a process may open later: of models, libraries, clients of its own."""

SPARE_CONNECTIONS = 8
"""Connections that calls leave to ``/health`` and to refusals."""

NOTHING_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE = 0.05

logger = logging.getLogger("flashtile.server")


@dataclass(eq=False)
class Connection:
    """``since``: when its last call was answered, or when it came; ``unsent``: bytes, when last looked at."""

    transport: asyncio.Transport
    sock: socket.socket
    since: float
    unsent: int = 0

    @property
    def is_open(self) -> bool:
        return self.sock.fileno() >= 0


class Door:
    """Accepts connections for an application, a limited number at a time.

    A connection without a call, whether none has come, its headers are not whole or its last answer is not
    read, is closed after ``idle_timeout`` seconds, or earlier if room is needed. Connections whose calls are
    being answered are left alone.

    Args:
        files_each: files that a connection needs while its call is answered.

    Attributes:
        max_connections: as the limits say, or as many as the process may open files for.
        max_calls: how many of them may be answered at a time, so that some are left for ``/health``.
        port: of the first address, after :meth:`open`.
    """

    def __init__(self, limits: Limits, files_each: int = 1):
        self.idle_timeout = limits.idle_timeout
        self.max_connections = allowed_connections(limits.max_connections, files_each)
        self.max_calls = min(limits.max_concurrent_requests, max(1, self.max_connections - SPARE_CONNECTIONS))
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._idle: dict[asyncio.BaseTransport, Connection] = {}  # the one that has waited longest first
        self._answering: dict[asyncio.BaseTransport, Connection] = {}
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, app: web.Application, host: str, port: int) -> None:
        """Listen. OSError if the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS,
            keepalive_timeout=self.idle_timeout,
        )  # fmt: skip
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        bound = await loop.create_server(server, host, port, start_serving=False)
        self._listeners = [one.dup() for one in bound.sockets]
        bound.close()
        self.port = self._listeners[0].getsockname()[1]
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._tasks.append(loop.create_task(self._accept(server, listener)))
        self._tasks.append(loop.create_task(self._close_idle()))

    async def close(self) -> None:
        """Accept nothing more. Connections stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def end(self) -> None:
        """After :meth:`close`: end every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """While a call of this connection is answered."""
        connection = None if transport is None else self._idle.pop(transport, None)
        if connection is None:  # one that came before it was known here
            yield
            return
        self._answering[connection.transport] = connection
        try:
            yield
        finally:
            del self._answering[connection.transport]
            connection.since, connection.unsent = asyncio.get_running_loop().time(), 0
            self._idle[connection.transport] = connection

    async def _accept(self, server: web.Server, listener: socket.socket) -> None:
        loop, told = asyncio.get_running_loop(), False
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno not in NOTHING_LEFT:
                    await asyncio.sleep(0)  # who came is gone already
                    continue
                if not told:
                    logger.warning("connections cannot be accepted at the moment: %s", error)
                told = True
                self._close_longest_idle()
                await asyncio.sleep(PAUSE)
                continue
            told = False
            try:
                while self._count() >= self.max_connections:
                    if not self._close_longest_idle():
                        await asyncio.sleep(PAUSE)  # each one's call is being answered
                    await asyncio.sleep(0)  # the end of a connection takes a turn of the loop
                transport, _ = await loop.connect_accepted_socket(server, sock)
            except BaseException as error:
                sock.close()
                if not isinstance(error, OSError):
                    raise
                continue
            self._idle[transport] = Connection(transport, sock, loop.time())

    def _count(self) -> int:
        if len(self._idle) + len(self._answering) >= self.max_connections:
            self._idle = {one: found for one, found in self._idle.items() if found.is_open}
        return len(self._idle) + len(self._answering)

    def _close_longest_idle(self) -> bool:
        """Whether there was one."""
        for transport in self._idle:
            self._idle.pop(transport).transport.abort()
            return True
        return False

    async def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.idle_timeout / 4))
            for transport, found in list(self._idle.items()):
                if not found.is_open:
                    del self._idle[transport]
                elif loop.time() > found.since + self.idle_timeout:
                    left = found.transport.get_write_buffer_size()
                    if 0 < left != found.unsent:  # its last answer is being read
                        found.since, found.unsent = loop.time(), left
                    else:
                        found.transport.abort()


def allowed_connections(wanted: int, files_each: int = 1) -> int:
    """How many connections the files that this process may open leave room for, at most ``wanted``.

    The process's soft limit of open files is raised, if it is too low and may be.
    """
    used = len(os.listdir("/dev/fd")) + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = used + wanted * files_each
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = min(wanted, max(2 * SPARE_CONNECTIONS, (soft - used) // files_each))
    if allowed < wanted:
        logger.warning("%d files may be open (ulimit -n): %d connections are kept", soft, allowed)
    return allowed
