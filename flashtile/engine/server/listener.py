"""The server's listening sockets, with a limit on its connections.

asyncio's own server accepts connections until the process can open no more files, and then logs an error for
each attempt. This listener limits the number of connections. To accept one more, it closes the connection
that has been idle longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from flashtile.engine.server.service import Limits

CLOSING_SECONDS = 5.0
"""Seconds for the last answers and errors to be sent after the engine has ended."""

BACKLOG = 1024
"""Connections that the kernel holds until they are accepted."""

SPARE_FILES = 48
"""Files that the process may open later: models, libraries, client connections of its own."""

SPARE_CONNECTIONS = 8
"""Connections kept free of calls, for ``/health`` and for refusals."""

OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
PAUSE = 0.05

logger = logging.getLogger("flashtile.server")


def _in_one_line(record: logging.LogRecord) -> bool:
    """Shorten aiohttp's message about malformed HTTP, whose stack trace says nothing about this server."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
        record.msg += f": malformed HTTP, {error.code} {error.message!r:.120}".replace("%", "%%")
    return True


_http_logger = logger.getChild("http")
_http_logger.addFilter(_in_one_line)


@dataclass(eq=False)
class Connection:
    """An accepted connection.

    Attributes:
        since: time of the connection's last answer, or of its acceptance if no call was answered yet.
        unsent: number of bytes in the connection's write buffer at the last check.
    """

    transport: asyncio.Transport
    sock: socket.socket
    since: float
    unsent: int = 0

    @property
    def is_open(self) -> bool:
        return self.sock.fileno() >= 0


class Listener:
    """Accepts connections for an application, up to a maximum number at a time.

    A connection is idle before its first complete headers and after its last answer. Idle connections are
    closed after ``idle_timeout`` seconds, unless the client is still reading the last answer. They are closed
    earlier to make room for others. Connections with a call in progress are not closed.

    Args:
        limits: ``idle_timeout``, ``max_connections`` and ``max_concurrent_requests``.
        files_each: number of open files that a connection needs while its call is answered.

    Attributes:
        max_connections: ``limits.max_connections``, or less if the process may not open enough files.
        max_calls: maximum number of calls answered at a time. It is below ``max_connections``, so that
            ``/health`` is always served.
        port: port of the first address, after :meth:`open`.
    """

    def __init__(self, limits: Limits, files_each: int = 1):
        self.idle_timeout, self._tls = limits.idle_timeout, limits.tls
        self.max_connections = allowed_connections(limits.max_connections, files_each)
        self.max_calls = min(limits.max_concurrent_requests, max(1, self.max_connections - SPARE_CONNECTIONS))
        self.port: int
        self._runner: web.AppRunner
        self._idle: dict[asyncio.BaseTransport, Connection] = {}  # ordered, the longest idle one first
        self._answering: dict[asyncio.BaseTransport, Connection] = {}
        self._handshakes: dict[asyncio.Task[None], None] = {}  # of TLS, ordered, the oldest one first
        self._sockets: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, app: web.Application, host: str, port: int) -> None:
        """Listen at an address. Raise OSError if the address is not available."""
        loop = asyncio.get_running_loop()
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSING_SECONDS,
            keepalive_timeout=self.idle_timeout, logger=_http_logger,
        )  # fmt: skip
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        bound = await loop.create_server(server, host, port, start_serving=False)
        self._sockets = [one.dup() for one in bound.sockets]
        bound.close()
        self.port = self._sockets[0].getsockname()[1]
        for listening in self._sockets:
            listening.setblocking(False)
            listening.listen(BACKLOG)
            self._tasks.append(loop.create_task(self._accept(server, listening)))
        self._tasks.append(loop.create_task(self._close_idle()))

    async def close(self) -> None:
        """Stop accepting connections. Existing connections stay open."""
        tasks = [*self._tasks, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._sockets:
            listening.close()

    async def end(self) -> None:
        """End every connection. Call :meth:`close` first."""
        await self._runner.cleanup()

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Mark a connection as busy while its call is answered."""
        connection = None if transport is None else self._idle.pop(transport, None)
        if connection is None:  # the call came before ``_accept`` registered the connection
            yield
            return
        self._answering[connection.transport] = connection
        try:
            yield
        finally:
            del self._answering[connection.transport]
            connection.since, connection.unsent = asyncio.get_running_loop().time(), 0
            self._idle[connection.transport] = connection

    async def _accept(self, server: web.Server, listening: socket.socket) -> None:
        loop, has_warned = asyncio.get_running_loop(), False
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno not in OUT_OF_RESOURCES:
                    await asyncio.sleep(0)  # the client is gone already
                    continue
                if not has_warned:
                    logger.warning("connections cannot be accepted: %s", error)
                has_warned = True
                self._close_longest_idle()
                await asyncio.sleep(PAUSE)
                continue
            has_warned = False
            try:
                while self._count() >= self.max_connections:
                    if not self._close_longest_idle():
                        await asyncio.sleep(PAUSE)  # every connection is busy
                    await asyncio.sleep(0)  # closing a connection takes an iteration of the loop
            except BaseException:
                sock.close()
                raise
            if self._tls is None:
                await self._connect(server, sock)
            else:  # a client may take its time for the handshake, which delays no other client
                task = loop.create_task(self._connect(server, sock))
                self._handshakes[task] = None
                task.add_done_callback(lambda task: self._handshakes.pop(task, None))

    async def _connect(self, server: web.Server, sock: socket.socket) -> None:
        loop, patience = asyncio.get_running_loop(), None if self._tls is None else self.idle_timeout
        try:
            transport, _ = await loop.connect_accepted_socket(
                server, sock, ssl=self._tls, ssl_handshake_timeout=patience
            )
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            return
        self._idle[transport] = Connection(transport, sock, loop.time())

    def _count(self) -> int:
        if len(self._idle) + len(self._answering) + len(self._handshakes) >= self.max_connections:
            self._idle = {one: found for one, found in self._idle.items() if found.is_open}
        return len(self._idle) + len(self._answering) + len(self._handshakes)

    def _close_longest_idle(self) -> bool:
        """Close the oldest handshake of TLS, or else the longest idle connection. False: there is none."""
        for task in self._handshakes:
            self._handshakes.pop(task)
            task.cancel()
            return True
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
                    if 0 < left != found.unsent:  # the client is still reading its last answer
                        found.since, found.unsent = loop.time(), left
                    else:
                        found.transport.abort()


def tls_context(certfile: Path | None, keyfile: Path | None, ca_certs: Path | None) -> ssl.SSLContext | None:
    """Return the TLS settings of a server, or None without a certificate.

    Args:
        certfile: the server's certificate, with those of its issuers after it, in PEM.
        keyfile: the certificate's key without a password. None: it is in ``certfile``.
        ca_certs: certificates of authorities. Clients must show a certificate that one of them issued.

    Raises:
        ValueError: a file cannot be read, or the key does not belong to the certificate.
    """
    if certfile is None:
        if keyfile is not None or ca_certs is not None:
            raise ValueError("ssl_certfile must be given with ssl_keyfile or ssl_ca_certs, got None")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    name, path = "ssl_certfile", certfile
    try:
        context.load_cert_chain(certfile, keyfile, lambda: "")  # without a password, OpenSSL asks a terminal
        if ca_certs is not None:
            name, path = "ssl_ca_certs", ca_certs
            context.load_verify_locations(ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ValueError(f"{name} must be certificates and a key that fit, got {path}: {error}") from None
    return context


def allowed_connections(wanted: int, files_each: int = 1) -> int:
    """Return how many connections open files allow, at most ``wanted``. A low soft limit is raised."""
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
        logger.warning("the limit of %d open files (ulimit -n) allows %d connections", soft, allowed)
    return allowed
