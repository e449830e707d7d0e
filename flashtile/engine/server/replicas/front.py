"""The front of the replicas: a proxy that passes each call to one replica and streams the answer back.

If a replica ends, hangs or is being shut down before the first byte of its answer, another replica gets the
call. After the first byte, the stream of a replica that ends or hangs ends with an error event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from flashtile.engine.server.answers import SLOW_READER
from flashtile.engine.server.errors import ApiError, busy, error_event, json_response, shutting_down
from flashtile.engine.server.listener import CLOSING_SECONDS, Listener
from flashtile.engine.server.metrics import CONTENT_TYPE
from flashtile.engine.server.middlewares import add_middlewares, check_content_type, hang_up_after, read_body
from flashtile.engine.server.replicas.process import BAD_ARGUMENTS, Replica
from flashtile.engine.server.replicas.routing import Routing, busiest, prompt_of
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

Choose = Callable[[Sequence[Replica], bytes], Replica | None]
"""Chooses one of several replicas for a prompt. Returns None if no replica accepts calls."""

logger = logging.getLogger("flashtile.server")


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
            *(self._get(str(replica.url), request.path, request.method, headers) for replica in up)
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
