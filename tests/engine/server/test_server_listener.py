"""Connections: more than there are files, idle ones, slow ones, and every form of what comes through them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import socket
import time
from types import SimpleNamespace

import pytest
from aiohttp import web
from serving import MODEL, running

from flashtile.engine.server import listener as listener_module
from flashtile.engine.server import run as run_module
from flashtile.engine.server.listener import Listener, allowed_connections
from flashtile.engine.server.middlewares import logged
from flashtile.engine.server.replicas import Front
from flashtile.engine.server.service import Limits


@contextlib.asynccontextmanager
async def opened(listener, handler=None):
    async def answer(request):
        return web.Response(text="well")

    app = web.Application(middlewares=[logged(listener, True)])
    app.router.add_get("/health", answer)
    app.router.add_get("/{path:.*}", handler or answer)
    await listener.open(app, "127.0.0.1", 0)
    try:
        yield listener.port
    finally:
        await listener.close()
        await listener.end()


async def connect(port, data=b""):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def ask(port, path=b"/health", connection=None):
    """The status line; over a connection of its own if none is given."""
    reader, writer = connection or await connect(port)
    writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
    line = await asyncio.wait_for(reader.readline(), 20)
    if connection is None:
        writer.close()
    return line


def run(test):
    asyncio.run(asyncio.wait_for(test, 50))


def test_the_oldest_waiting_client_makes_room():
    async def test():
        listener = Listener(Limits(max_connections=20))
        async with opened(listener) as port:
            idle = [
                await connect(port, data)
                for data in (b"", b"GET / HTTP/1.1\r\nHos", b"\r\n")
                for _ in range(30)
            ]
            assert await ask(port) == b"HTTP/1.1 200 OK\r\n"
            assert await asyncio.wait_for(idle[0][0].read(), 20) == b""
            assert await ask(port, connection=idle[-1]) == b"HTTP/1.1 200 OK\r\n"
            for _, writer in idle:
                writer.close()

    run(test())


def test_a_process_without_files_closes_idle_connections(monkeypatch):
    """One for each failed attempt. Other errors are those of clients that are gone."""
    closed = []
    answers = iter(
        [*(OSError(number, "no") for number in (errno.EMFILE, errno.ENFILE)), ConnectionAbortedError()]
    )

    async def accept(listening):
        raise next(answers, asyncio.CancelledError())

    async def test():
        listener = Listener(Limits())
        monkeypatch.setattr(listener_module, "PAUSE", 0)
        monkeypatch.setattr(listener, "_close_longest_idle", lambda: closed.append(1) is None)
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_accept", accept)
        with pytest.raises(asyncio.CancelledError):
            await listener._accept(None, None)

    run(test())
    assert len(closed) == 2


def test_calls_that_are_answered_keep_their_connections():
    """Where each has one, another connection waits until one of them is done."""
    gate = asyncio.Event()

    async def slow(request):
        await gate.wait()
        return web.Response(text="done")

    async def test():
        listener = Listener(Limits(max_connections=3, idle_timeout=0.1))
        async with opened(listener, slow) as port:
            calls = [asyncio.create_task(ask(port, b"/slow")) for _ in range(3)]
            await asyncio.sleep(0.2)
            late = asyncio.create_task(ask(port))
            await asyncio.wait([late, *calls], timeout=0.2)
            assert not any(one.done() for one in (late, *calls))
            gate.set()
            assert {await one for one in (late, *calls)} == {b"HTTP/1.1 200 OK\r\n"}

    run(test())


def test_a_connection_without_a_call_is_closed_in_time():
    """Whatever it lacks: a first byte, the end of its headers, a next call, a reader of its answer."""
    large = 2**23

    async def answer(request):
        return web.Response(body=bytes(large))

    async def test():
        async with opened(Listener(Limits(idle_timeout=0.3)), answer) as port:
            mute, slow, kept = (
                await connect(port),
                await connect(port, b"GET /health HTT"),
                await connect(port),
            )
            lazy = await connect(port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await ask(port, connection=kept) == b"HTTP/1.1 200 OK\r\n"
            await kept[0].readuntil(b"well")
            for reader, _ in (mute, slow, kept):
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 20) == b""
            await asyncio.sleep(0.8)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await lazy[0].readexactly(large)
            # Who reads slowly, and does read, gets all of it.
            reader, _ = await connect(port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            left = large
            while left:
                left -= len(await asyncio.wait_for(reader.read(2**20), 20))
                await asyncio.sleep(0.05)

    run(test())


def test_a_process_without_files_says_so_once_and_goes_on(monkeypatch, caplog):
    class Broken(socket.socket):
        left = 50

        def accept(self):
            if Broken.left:
                Broken.left -= 1
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().accept()

        def dup(self):
            return Broken(fileno=os.dup(self.fileno()))

    monkeypatch.setattr(socket.socket, "dup", Broken.dup)
    monkeypatch.setattr(listener_module, "PAUSE", 0.001)

    async def test():
        async with opened(Listener(Limits())) as port:
            assert await ask(port) == b"HTTP/1.1 200 OK\r\n"

    run(test())
    assert Broken.left == 0
    assert len([one for one in caplog.records if "cannot be accepted" in one.message]) == 1
    assert len(caplog.records) < 5


def test_the_files_of_the_process_bound_its_connections(monkeypatch, caplog):
    allowed = [(300, 300)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: allowed[0])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: allowed.__setitem__(0, both))
    monkeypatch.setattr(os, "listdir", lambda path: [""] * 52)
    assert allowed_connections(1000) == 200
    assert allowed_connections(1000, files_each=2) == 100
    assert "ulimit -n" in caplog.text
    listener = Listener(Limits())
    assert (listener.max_connections, listener.max_calls) == (200, 192)
    assert Front([], Limits()).listener.max_connections == 100  # a call has a connection to a replica
    allowed[0] = (300, 5000)  # the soft limit is ours to raise
    assert allowed_connections(1000) == 1000
    assert allowed[0] == (1100, 5000)
    assert allowed_connections(10**6) == 4900
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: None)  # as where the system refuses it
    allowed[0] = (300, 5000)
    assert allowed_connections(10**6) == 200
    allowed[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert allowed_connections(10**6) == 10**6


def test_a_server_answers_as_many_calls_as_its_door_lets_in(monkeypatch):
    monkeypatch.setattr(listener_module, "allowed_connections", lambda *wanted: 20)
    monkeypatch.setattr(run_module, "Service", lambda *given: SimpleNamespace(max_calls=1000))
    monkeypatch.setattr(run_module, "make_app", lambda service, listener: web.Application())
    server = run_module.Server(None, MODEL, Limits(), port=0)

    async def run():
        await server.start()
        await server._listener.close()
        await server._listener.end()

    asyncio.run(run())
    assert server.service.max_calls == server._listener.max_calls < Limits().max_concurrent_requests


def test_a_line_for_each_call(model, caplog):
    caplog.set_level("INFO", "flashtile.server")
    with running(model) as server:
        server.complete(prompt="a", max_tokens=1)
        server.ask("/v1/models/no%0Asuch?secret=1")
        server.ask("/health")
        for target in (b"*", b"http://[::1", b"/" + b"a\x1b" * 2**14):
            exchange(server.port, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        stream = server.send("/v1/completions", {"prompt": "a", "max_tokens": 4000, "stream": True})
        stream.readline()
        stream.close()
        deadline = time.monotonic() + 20
        while "499" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = caplog.text.splitlines()
    malformed = [line for line in lines if "malformed HTTP, 400" in line]
    assert len(lines) == len(caplog.records) == 3 + len(malformed) == 6
    assert all(line.startswith("INFO") and len(line) < 250 and line.isprintable() for line in malformed)
    lines = [one.getMessage() for one in caplog.records if "malformed" not in one.getMessage()]
    assert [line.split(" ms")[0].rsplit(" ", 1)[0] for line in lines] == [
        "127.0.0.1 POST /v1/completions 200",
        "127.0.0.1 GET /v1/models/no%0Asuch 404",
        "127.0.0.1 POST /v1/completions 499",
    ]
    caplog.clear()
    with running(model, Limits(access_log=False)) as server:
        server.complete(prompt="a", max_tokens=1)
    assert not caplog.records


def exchange(port, data):
    """All that comes back, to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(data)
        found = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(2**16):
                found += chunk
        return found


def test_every_form_of_http(model):
    """Pipelined, in chunks, for the head alone, with nonsense: answered rightly or refused with a 4xx."""
    body = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 2, "temperature": 0}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    call = head + b"Content-Length: %d\r\n" % len(body)
    close = b"Connection: close\r\n"
    with running(model) as server:
        found = exchange(server.port, 3 * (call + b"\r\n" + body) + call + close + b"\r\n" + body)
        assert found.count(b"HTTP/1.1 200 OK") == found.count(b'"text":"de"') == 4
        pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        found = exchange(server.port, head + close + b"Transfer-Encoding: chunked\r\n\r\n" + pieces)
        assert b'"text":"de"' in found
        for start, status in (
            (b"HEAD /health HTTP/1.1\r\nHost: x\r\n", 200),
            (b"HEAD /v1/completions HTTP/1.1\r\nHost: x\r\n", 405),
            (b"OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\n", 405),
            (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n", 404),
            (b"GET http://elsewhere.test/health HTTP/1.1\r\nHost: x\r\n", 200),
            (b"GET //health HTTP/1.1\r\nHost: x\r\n", 404),
            (b"GET /v1/models/%ff%00%0d%0a HTTP/1.1\r\nHost: x\r\n", 404),
            (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n", 4),
            (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 2**16 + b"\r\n", 4),
            (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 2**10, 4),
            (b"NONSENSE\r\n", 4),
            (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n", 4),
            (call + b"Transfer-Encoding: chunked\r\n", 4),
            (head + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", 400),
        ):
            whole = start.replace(b"Host: x\r\n", b"Host: x\r\n" + close) + b"\r\n"
            line, _, rest = exchange(server.port, whole).partition(b"\r\n")
            assert line.split()[1].startswith(b"%d" % status), (start[:80], line)
            if start.startswith(b"HEAD"):
                assert rest.endswith(b"\r\n\r\n")
        assert server.ask("/health")[0] == 200
