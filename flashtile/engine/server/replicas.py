"""Data parallelism: several server processes with the same model, behind one address.

The front is a proxy that passes each call to one replica and streams the answer back. If a replica ends,
hangs or is being shut down before the first byte of its answer, another replica gets the call. After the
first byte, the stream of a replica that ends or hangs ends with an error event. A replica is restarted when
it ends unexpectedly.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from yarl import URL

from flashtile.engine.server.answers import SLOW_READER
from flashtile.engine.server.errors import ApiError, busy, error_event, json_response, shutting_down
from flashtile.engine.server.listener import CLOSING_SECONDS, Listener
from flashtile.engine.server.metrics import CONTENT_TYPE
from flashtile.engine.server.middlewares import add_middlewares, check_content_type, hang_up_after, read_body
from flashtile.engine.server.protocol import read_reset
from flashtile.engine.server.service import Limits

HOP_BY_HOP = (
    "connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host", "te",
    "trailer", "upgrade", "proxy-authorization", "proxy-authenticate", "expect", "date", "server",
)  # fmt: skip
"""Headers that are not passed on, because they apply to one connection only or are written anew."""

HEAD_BYTES = 2**16
"""Number of bytes at the beginning of a body by which its replica is chosen."""
MAX_KEPT_BYTES = 2**20
"""Bytes of a body that are kept until the answer begins, so that another replica can get the call."""

QUICK_CALL_SECONDS = 3.0
"""Seconds in which a replica must answer quick calls, such as ``/health``."""
CHECK_SECONDS, MAX_FAILED_CHECKS = 1.0, 3
"""Seconds between two health checks of a replica, and the number of successive failed checks after which the
replica counts as hanging."""

CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.TimeoutError)

Choose = Callable[[Sequence["Replica"], bytes], "Replica | None"]
"""Chooses one of several replicas for a prompt. Returns None if no replica accepts calls."""

T = TypeVar("T")
logger = logging.getLogger("flashtile.server")


def serve_replicas(
    replicas: Sequence[Replica],
    limits: Limits,
    host: str,
    port: int,
    shutdown_timeout: float,
    on_start: Callable[[int], None],
) -> int:
    """Serve until SIGTERM or SIGINT, and then send SIGTERM to the replicas.

    A second signal aborts the replicas' calls.

    Args:
        shutdown_timeout: seconds for calls to finish after the signal. Replicas that do not end soon
            afterwards are killed.
        on_start: called with the port once calls are accepted.

    Returns:
        The exit code: 0 after a signal, 1 if a replica could not be started or if no replica could be
        restarted any more, 2 if the replicas' arguments are wrong.
    """

    async def run() -> int:
        loop, stopping, front = asyncio.get_running_loop(), asyncio.Event(), Front(replicas, limits)

        def stop() -> None:
            if not stopping.is_set():
                loop.call_later(shutdown_timeout + 3 * CLOSING_SECONDS, signal_all, signal.SIGKILL)
            stopping.set()
            front.draining = True
            signal_all(signal.SIGTERM)

        def signal_all(number: int) -> None:
            for replica in replicas:
                replica.signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        # The address may be taken, so listen before models are loaded.
        await front.listener.open(front.app(), host, port)
        started: asyncio.Future[Any] = asyncio.gather(*(replica.wait_until_up() for replica in replicas))
        printed: dict[str, int] = {}
        for replica in replicas:
            replica.printed = printed
            replica.start()
        all_ended: asyncio.Future[Any] = asyncio.gather(*(replica.wait() for replica in replicas))
        await asyncio.wait([started, all_ended], return_when=asyncio.FIRST_COMPLETED)
        code = 1
        if started.done() and all(started.result()) and not stopping.is_set():
            on_start(front.listener.port)
        elif not stopping.is_set():
            stop()
        await all_ended
        if stopping.is_set() and started.done() and all(started.result()):
            code = 0
        elif all(replica.given_up and replica.exit_code == BAD_ARGUMENTS for replica in replicas):
            code = BAD_ARGUMENTS
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)
        await front.listener.close()
        await front.listener.end()
        return code

    return asyncio.run(run())


class Front:
    """A proxy in front of the replicas.

    It enforces the limits of connections, bodies, keys and times, and each replica enforces the others.
    """

    def __init__(self, replicas: Sequence[Replica], limits: Limits):
        self.replicas, self.limits, self.routing = replicas, limits, Routing()
        self.listener = Listener(limits, files_each=2)
        self.draining = False
        self._in_flight = 0
        self._session: aiohttp.ClientSession

    def app(self) -> web.Application:
        app = web.Application()
        add_middlewares(app, self.listener, self.limits)
        add = app.router.add_route
        add("GET", "/health", self._health)
        add("GET", "/metrics", self._metrics)
        add("GET", "/load", self._load)
        # The busiest replica answers, so that the server's web page shows an engine at work.
        add("GET", "/live", partial(self._forward, choose=busiest))
        add("POST", "/reset_prefix_cache", self._reset)
        add("*", "/{path:.*}", self._forward)
        app.cleanup_ctx.append(self._connected)
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=QUICK_CALL_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            checks = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]
            yield
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        """Check a replica's health repeatedly, because a process may hang without ending.

        A replica that answers or refuses the connection does not hang. If it takes no new calls, it is being
        shut down, and its calls in flight may still end.
        """
        failed_checks = 0
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            url = replica.url
            if url is None:
                continue
            status, _ = await self._get(url, "/health")
            if replica.url != url:  # another process serves by now
                failed_checks = 0
                continue
            replica.takes_calls = status == 200
            failed_checks = failed_checks + 1 if status == 0 else 0
            if failed_checks == MAX_FAILED_CHECKS:
                logger.error(
                    "replica %d does not answer: other replicas get its calls until it does", replica.number
                )
                replica.set_hanging(True)
            elif replica.hangs and status:
                logger.warning("replica %d answers again", replica.number)
                replica.set_hanging(False)

    async def _get(
        self, url: str, path: str, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Make a quick call and return (status, body).

        The status is 0 without an answer in time, and 503 if the connection is refused or lost.
        """
        timeout = aiohttp.ClientTimeout(QUICK_CALL_SECONDS)
        try:
            async with self._session.request(method, url + path, headers=headers, timeout=timeout) as found:
                return found.status, await found.read()
        except asyncio.TimeoutError:
            return 0, b""
        except CONNECTION_ERRORS:
            return 503, b""

    def _check_open(self) -> None:
        if self.draining:
            raise shutting_down()

    async def _forward(self, request: web.Request, choose: Choose | None = None) -> web.StreamResponse:
        self._check_open()
        if self._in_flight >= self.listener.max_calls:
            raise busy(f"the server answers at most {self.listener.max_calls} calls at a time")
        patience = self.limits.body_timeout + self.limits.request_timeout + 2 * SLOW_READER
        self._in_flight += 1
        try:
            with hang_up_after(request, patience):
                return await self._forward_to_one(request, choose or self.routing.choose)
        finally:
            self._in_flight -= 1

    async def _forward_to_one(self, request: web.Request, choose: Choose) -> web.StreamResponse:
        body = RequestBody(request, self.limits)
        prompt = prompt_of((await body.read_beginning())[:HEAD_BYTES])
        tried: list[Replica] = []
        while True:
            untried = [one for one in self.replicas if one not in tried]
            replica = choose(untried, prompt) if body.can_be_sent else None
            if replica is None:
                self._check_open()
                raise _replica_ended() if tried else _no_replica()
            tried.append(replica)
            replica.in_flight += 1
            try:
                return await replica.ask(self._relay(request, body, replica))
            except CONNECTION_ERRORS as error:
                if body.error is not None:
                    raise body.error from None
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError("the client has closed the connection") from None
                logger.warning("replica %d did not answer: %s", replica.number, error or type(error).__name__)
            finally:
                replica.in_flight -= 1

    async def _relay(self, request: web.Request, body: RequestBody, replica: Replica) -> web.StreamResponse:
        """Pass on a replica's answer. Raise one of ``CONNECTION_ERRORS`` if it does not begin."""
        assert replica.url is not None
        # The request target may be a full URL; only its path and query are passed on.
        url = URL(replica.url + request.rel_url.raw_path_qs, encoded=True)
        data, headers = body.to_send()
        async with self._session.request(
            request.method, url, data=data, headers={**_end_to_end(request.headers), **headers},
            allow_redirects=False,
        ) as found:  # fmt: skip
            if found.status == 503 and not self.draining:
                raise aiohttp.ClientConnectionError("it takes no calls")
            kept = _end_to_end(found.headers)
            if found.content_type != "text/event-stream":
                return web.Response(body=await found.read(), status=found.status, headers=kept)
            response = web.StreamResponse(status=found.status, headers=kept)
            # Wait for the first byte, because until then another replica can still answer.
            chunk = await found.content.readany()
            await response.prepare(request)
            try:
                while chunk:
                    await response.write(chunk)
                    chunk = await found.content.readany()
            except (*CONNECTION_ERRORS, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and not replica.hangs:
                    raise  # the client is gone
                await response.write(error_event(_replica_ended()) + b"data: [DONE]\n\n")
            await response.write_eof()
            return response

    async def _call_all(self, request: web.Request) -> dict[int, bytes]:
        """Return the answers of all replicas by their numbers. Raise ApiError if there are none."""
        self._check_open()
        up = [replica for replica in self.replicas if replica.is_up]
        headers = _end_to_end(request.headers)
        found = await asyncio.gather(
            *(self._get(str(replica.url), request.path_qs, request.method, headers) for replica in up)
        )
        answers = {one.number: body for one, (status, body) in zip(up, found, strict=True) if status == 200}
        if not answers:
            raise _no_replica()
        return answers

    async def _health(self, request: web.Request) -> web.Response:
        self._check_open()
        up = [replica.is_up for replica in self.replicas]
        if not any(up):
            raise _no_replica()
        return json_response({"status": "ok", "replicas": up})

    async def _metrics(self, request: web.Request) -> web.Response:
        answers = await self._call_all(request)
        numbers = [replica.number for replica in self.replicas]
        lines = [
            joined([(number, answer.decode()) for number, answer in answers.items()]),
            "# HELP flashtile:replica_up Whether a replica answers.",
            "# TYPE flashtile:replica_up gauge",
            *(f'flashtile:replica_up{{replica="{number}"}} {int(number in answers)}' for number in numbers),
            "",
        ]
        return web.Response(body="\n".join(lines).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _load(self, request: web.Request) -> web.Response:
        answers = await self._call_all(request)
        loads = {number: json.loads(answer)["server_load"] for number, answer in answers.items()}
        each = [loads.get(replica.number) for replica in self.replicas]
        return json_response({"server_load": sum(loads.values()), "replicas": each})

    async def _reset(self, request: web.Request) -> web.Response:
        check_content_type(request)
        read_reset(request.query)  # what all replicas would refuse
        answers = await self._call_all(request)
        return json_response({"blocks": sum(json.loads(answer)["blocks"] for answer in answers.values())})


def _no_replica() -> ApiError:
    return ApiError("no replica is available: try again later", status=503, code="engine_dead")


def _replica_ended() -> ApiError:
    return ApiError("the replica ended before its answer was complete", status=503, code="engine_dead")


def _end_to_end(headers: Any) -> dict[str, str]:
    """Return the headers that the proxy passes on between client and replica."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}


def joined(texts: Sequence[tuple[int, str]]) -> str:
    """Merge the Prometheus texts of several replicas, with a label ``replica`` on each sample.

    Examples:
        >>> from flashtile.engine.server.replicas import joined
        >>> print(joined([(0, '# TYPE a counter\\na{b="c"} 1'), (1, '# TYPE a counter\\na{b="c"} 2')]))
        # TYPE a counter
        a{replica="0",b="c"} 1
        a{replica="1",b="c"} 2
    """
    families: dict[str, list[str]] = {}
    for number, text in texts:
        for line in filter(None, text.splitlines()):
            if line.startswith("#"):
                name = line.split()[2]
                comments = families.setdefault(name, [])
                if number == texts[0][0]:
                    comments.append(line)
                continue
            families[name].append(line.replace("{", f'{{replica="{number}",', 1))
    return "\n".join(line for lines in families.values() for line in lines)


class RequestBody:
    """The body of a call. Its beginning is kept, and the rest of a long body is only passed through.

    Attributes:
        error: why the body could not be read to its end, or None.
        can_be_sent: whether the body is still available from its beginning.
    """

    def __init__(self, request: web.Request, limits: Limits):
        self.request, self.limits = request, limits
        self.error: Exception | None = None
        self.can_be_sent = True
        self._kept = b""
        self._size = 0
        self._ended = False
        self._begun = asyncio.get_running_loop().time()
        self._check_size(request.content_length or 0)

    async def read_beginning(self) -> bytes:
        """Read at least ``MAX_KEPT_BYTES`` bytes, or else the whole body, and return what was read."""
        pieces = []
        while self._size < MAX_KEPT_BYTES and not self._ended:
            pieces.append(await self._read())
        self._kept = b"".join(pieces)
        return self._kept

    def to_send(self) -> tuple[bytes | AsyncIterator[bytes] | None, dict[str, str]]:
        """Return (data for an HTTP client to send, headers that describe the data)."""
        if self._ended:
            return self._kept or None, {}
        length = self.request.headers.get("Content-Length")
        # aiohttp decodes a body with Content-Encoding, which changes the body's length.
        is_coded = "Content-Encoding" in self.request.headers
        return self._pieces(), {} if length is None or is_coded else {"Content-Length": length}

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield the whole body. A failure to read it is stored in ``error`` and raised."""
        yield self._kept
        try:
            while piece := await self._read():
                self.can_be_sent, self._kept = False, b""
                yield piece
        except (ApiError, web.RequestPayloadError) as error:
            self.error = error
            raise

    async def _read(self) -> bytes:
        """Return the next piece of the body, or b"" at its end."""
        piece = await read_body(self.request.content.readany(), self.limits, self._begun)
        self._ended = not piece
        self._size += len(piece)
        self._check_size(self._size)
        return piece

    def _check_size(self, size: int) -> None:
        if size > self.limits.max_body_bytes:
            text = f"the body is too large: expected at most {self.limits.max_body_bytes} bytes"
            raise ApiError(text, status=413, code="body_too_large")


PIECE = 256
"""Number of bytes of the prompt's JSON text in a piece. Prefixes are compared in whole pieces."""
SLACK = 8
"""A replica that knows the prefix is chosen if it has at most this many calls more than the replica with the
fewest calls."""
REMEMBERED = 2**16
"""Number of remembered prefixes; the least recently used ones are dropped."""


class Routing:
    """Chooses replicas, and remembers which replica computed each prefix.

    Examples:
        >>> from types import SimpleNamespace
        >>> from flashtile.engine.server.replicas import Routing, prompt_of
        >>> one, two = (SimpleNamespace(in_flight=0, is_up=True) for _ in "12")
        >>> routing, story, other = Routing(), prompt_of(b'{"prompt": "...') * 100, b"something else"
        >>> first = routing.choose([one, two], story)
        >>> first.in_flight += 1
        >>> routing.choose([one, two], other) is first, routing.choose([one, two], story + b"?") is first
        (False, True)
    """

    def __init__(self) -> None:
        self._replica_of_prefix: OrderedDict[bytes, Replica] = OrderedDict()

    def choose(self, replicas: Sequence[Replica], prompt: bytes) -> Replica | None:
        """Return the replica for a prompt, or None if no replica accepts calls."""
        up = [replica for replica in replicas if replica.is_up]
        if not up:
            return None
        idlest = min(up, key=lambda replica: replica.in_flight)
        prefixes = _prefixes(prompt)
        known = (self._replica_of_prefix.get(one) for one in reversed(prefixes))
        preferred = next((found for found in known if any(found is replica for replica in up)), None)
        chosen = idlest if preferred is None or preferred.in_flight > idlest.in_flight + SLACK else preferred
        for one in prefixes:
            self._replica_of_prefix[one] = chosen
            self._replica_of_prefix.move_to_end(one)
        while len(self._replica_of_prefix) > REMEMBERED:
            self._replica_of_prefix.popitem(last=False)
        return chosen


def busiest(replicas: Sequence[Replica], prompt: bytes) -> Replica | None:
    """Return the replica with the most calls for any prompt, or None if no replica accepts calls."""
    return max((one for one in replicas if one.is_up), key=lambda one: one.in_flight, default=None)


def prompt_of(head: bytes) -> bytes:
    """Return the part of ``head``, the first bytes of a body, that begins at the prompt or the messages.

    Returns b"" if ``head`` has neither. The JSON is not parsed: equal prompts usually have equal bytes. If
    their bytes differ, for example in escapes, the chosen replica may not have the prefix in its cache.
    """
    starts = [start for name in (b'"messages"', b'"prompt"') if (start := head.find(name)) >= 0]
    return head[min(starts) :] if starts else b""


def _prefixes(prompt: bytes) -> list[bytes]:
    """Return the hashes of those prefixes of ``prompt`` that consist of whole pieces, the shortest first."""
    found, state = [], hashlib.blake2b(digest_size=16)
    for end in range(PIECE, len(prompt) + 1, PIECE):
        state.update(prompt[end - PIECE : end])
        found.append(state.digest())
    return found


READY = re.compile(r"serving .* at (http://\S+)")
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0
"""Seconds before a replica is restarted: the first pause, which doubles at each failure, and its maximum."""
MAX_FAILURES = 3
"""A replica is not restarted any more after this many starts in a row that end before it serves."""
BAD_ARGUMENTS = 2
"""Exit code of an invalid command line, after which a restart is useless."""

ORPHAN = "FLASHTILE_END_WITH_STDIN"
"""Environment variable of a replica that enables :func:`end_with_stdin`."""


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
