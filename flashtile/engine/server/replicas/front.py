"""The address before the replicas: each call goes to one of them, and its answer comes back as it is made.

A call whose replica dies before anything of the answer was sent is given to another one. A stream that has
begun ends with an error, as it does where the engine fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from flashtile.engine.server.app import answer_errors
from flashtile.engine.server.errors import ApiError
from flashtile.engine.server.replicas.process import BAD_ARGUMENTS, Replica
from flashtile.engine.server.replicas.routing import Routing, prompt_of
from flashtile.engine.server.run import LAST_WORDS
from flashtile.engine.server.service import Limits

HOP = (
    "connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host", "te",
    "trailer", "upgrade", "proxy-authorization", "proxy-authenticate", "expect", "date", "server",
)  # fmt: skip
"""Headers that are between two ends of one connection alone, or that each end writes itself."""

Gone = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, asyncio.TimeoutError)

logger = logging.getLogger("flashtile.server")


class Front:
    """Answers with the replicas' answers.

    Args:
        limits: whose body size and time hold here; all others hold in each replica.
    """

    def __init__(self, replicas: Sequence[Replica], limits: Limits):
        self.replicas, self.limits, self.routing = replicas, limits, Routing()
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self.limits.max_body_bytes, middlewares=[answer_errors])
        add = app.router.add_route
        add("GET", "/health", self._health)
        add("GET", "/metrics", self._metrics)
        add("GET", "/load", self._load)
        add("POST", "/reset_prefix_cache", self._reset)
        add("*", "/{path:.*}", self._pass_on)
        app.cleanup_ctx.append(self._connected)
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            yield

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await asyncio.wait_for(request.read(), self.limits.body_timeout)
        except asyncio.TimeoutError:
            seconds = self.limits.body_timeout
            raise ApiError(f"the body took longer than {seconds:g} s", status=408, code="timeout") from None
        prompt = prompt_of(body)
        tried: list[Replica] = []
        while True:
            untried = [one for one in self.replicas if one not in tried]
            replica = self.routing.choose(untried, prompt)
            if replica is None and tried:
                raise ApiError("the replica has died", status=503, code="engine_dead")
            if replica is None:
                raise ApiError("no replica serves at the moment", status=503, code="engine_dead")
            tried.append(replica)
            replica.in_flight += 1
            try:
                return await self._ask(request, body, replica)
            except Gone as error:
                if request.transport is None or request.transport.is_closing():
                    raise ConnectionResetError("the client is gone") from None
                logger.warning("replica %d did not answer: %s", replica.number, error or type(error).__name__)
            finally:
                replica.in_flight -= 1

    async def _ask(self, request: web.Request, body: bytes, replica: Replica) -> web.StreamResponse:
        """The replica's answer; one of ``Gone`` if it has died before anything was sent."""
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        async with self._session.request(
            request.method, f"{replica.url}{request.raw_path}", data=body or None, headers=headers,
            allow_redirects=False,
        ) as found:  # fmt: skip
            kept = {name: value for name, value in found.headers.items() if name.lower() not in HOP}
            if found.content_type != "text/event-stream":
                return web.Response(body=await found.read(), status=found.status, headers=kept)
            response = web.StreamResponse(status=found.status, headers=kept)
            # Without a first byte another replica can still answer.
            chunk = await found.content.readany()
            await response.prepare(request)
            try:
                while chunk:
                    await response.write(chunk)
                    chunk = await found.content.readany()
            except Gone:
                error = ApiError("the replica has died", status=503, code="engine_dead")
                text = f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n"
                await response.write(text.encode())
            await response.write_eof()
            return response

    async def _ask_all(self, request: web.Request) -> tuple[list[tuple[Replica, bytes]], web.Response | None]:
        """(the replicas with their answers, None), or ([], the first answer that is an error)."""
        assert self._session is not None
        answers: list[tuple[Replica, bytes]] = []
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        for replica in self.replicas:
            if not replica.is_up:
                continue
            try:
                async with self._session.request(
                    request.method, f"{replica.url}{request.raw_path}", headers=headers
                ) as found:
                    answer = await found.read()
                    if found.status != 200:
                        kept = {n: v for n, v in found.headers.items() if n.lower() not in HOP}
                        return [], web.Response(body=answer, status=found.status, headers=kept)
                    answers.append((replica, answer))
            except Gone:
                continue
        if not answers:
            raise ApiError("no replica serves at the moment", status=503, code="engine_dead")
        return answers, None

    async def _health(self, request: web.Request) -> web.Response:
        up = [replica.is_up for replica in self.replicas]
        if not any(up):
            raise ApiError("no replica serves at the moment", status=503, code="engine_dead")
        return web.json_response({"status": "ok", "replicas": up})

    async def _metrics(self, request: web.Request) -> web.Response:
        answers, error = await self._ask_all(request)
        if error is not None:
            return error
        text = joined([(replica.number, answer.decode()) for replica, answer in answers])
        return web.Response(text=text, content_type="text/plain")

    async def _load(self, request: web.Request) -> web.Response:
        answers, error = await self._ask_all(request)
        if error is not None:
            return error
        loads = [json.loads(answer)["server_load"] for _, answer in answers]
        return web.json_response({"server_load": sum(loads), "replicas": loads})

    async def _reset(self, request: web.Request) -> web.Response:
        answers, error = await self._ask_all(request)
        if error is not None:
            return error
        return web.json_response({"blocks": sum(json.loads(answer)["blocks"] for _, answer in answers)})


def joined(texts: Sequence[tuple[int, str]]) -> str:
    """Prometheus's text of several replicas as one: each sample says which one it is of.

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
            families[name].append(re.sub(r"\{", f'{{replica="{number}",', line, count=1))
    return "\n".join(line for lines in families.values() for line in lines)


def serve_replicas(
    replicas: Sequence[Replica],
    limits: Limits,
    host: str,
    port: int,
    on_start: Callable[[int], None],
) -> int:
    """Serve until SIGTERM or SIGINT, which the replicas get, too; a second one hurries them. The exit code: 1
    if the replicas could not be started, or have all been given up; 2 if their arguments are wrong.

    Args:
        on_start: called with the port when calls are taken.
    """

    async def run() -> int:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()

        def stop() -> None:
            stopping.set()
            for replica in replicas:
                replica.signal(signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        runner = web.AppRunner(
            Front(replicas, limits).app(), handler_cancellation=True, access_log=None,
            shutdown_timeout=LAST_WORDS,
        )  # fmt: skip
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()  # before the models are loaded: the address may be taken
        ups = [asyncio.ensure_future(replica.wait_until_up()) for replica in replicas]
        for replica in replicas:
            replica.start()
        all_ended: asyncio.Future[Any] = asyncio.gather(*(replica.wait() for replica in replicas))
        started: asyncio.Future[Any] = asyncio.gather(*ups)
        await asyncio.wait([started, all_ended], return_when=asyncio.FIRST_COMPLETED)
        code = 1
        if started.done() and all(started.result()) and not stopping.is_set():
            on_start(runner.addresses[0][1])
        elif not stopping.is_set():
            stop()
        await all_ended
        if stopping.is_set() and started.done() and all(started.result()):
            code = 0
        elif all(replica.given_up and replica.exit_code == BAD_ARGUMENTS for replica in replicas):
            code = BAD_ARGUMENTS
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)
        await site.stop()
        await runner.cleanup()
        return code

    return asyncio.run(run())
