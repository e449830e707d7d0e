"""HTTPS: answers, streams, wrong certificates, and clients that never finish the handshake.

``certificate.pem`` has a key that protects nothing, and its own certificate for 127.0.0.1, valid until 2126.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
from pathlib import Path

import pytest
from aiohttp import web
from serving import MODEL, running

from flashtile.engine.server.listener import Listener, tls_context
from flashtile.engine.server.middlewares import logged
from flashtile.engine.server.service import Limits

CERTIFICATE = Path(__file__).with_name("certificate.pem")


@pytest.fixture(scope="module")
def server(model):
    with running(model, Limits(tls=tls_context(CERTIFICATE, None, None))) as found:
        yield found


def trusting():
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def send(port, fields, context):
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({"model": MODEL, **fields}), headers)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def test_answers_and_streams(server):
    fields = {"prompt": "abc", "temperature": 0, "max_tokens": 40}
    assert json.loads(send(server.port, fields, trusting()))["usage"]["completion_tokens"] == 40
    assert send(server.port, {**fields, "stream": True}, trusting()).endswith("data: [DONE]\n\n")


def test_clients_without_tls_or_trust_are_refused_and_others_served(server):
    with pytest.raises(ssl.SSLCertVerificationError):
        send(server.port, {"prompt": "a"}, ssl.create_default_context())
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        server.send("/health")
    assert "choices" in send(server.port, {"prompt": "a"}, trusting())


def test_clients_with_a_certificate(model):
    with running(model, Limits(tls=tls_context(CERTIFICATE, None, CERTIFICATE))) as server:
        with pytest.raises((OSError, http.client.HTTPException)):
            send(server.port, {"prompt": "a"}, trusting())
        known = trusting()
        known.load_cert_chain(CERTIFICATE)
        assert "choices" in send(server.port, {"prompt": "a"}, known)


@contextlib.asynccontextmanager
async def opened(limits):
    async def answer(request):
        return web.Response(text="well")

    listener = Listener(limits)
    app = web.Application(middlewares=[logged(listener, True)])
    app.router.add_get("/health", answer)
    await listener.open(app, "127.0.0.1", 0)
    try:
        yield listener
    finally:
        await listener.close()
        await listener.end()


async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line


def test_handshakes_that_do_not_end():
    """They delay no other client, count as connections, and make room for others."""

    async def test():
        tls = tls_context(CERTIFICATE, None, None)
        limits = Limits(max_connections=16, tls=tls)
        async with opened(limits) as listener:
            silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(40)]
            assert b"200" in await ask(listener.port)
            for one in silent[:8]:  # the oldest
                one.setblocking(False)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(one, 1) == b""
            for one in silent:
                one.close()
            assert b"200" in await ask(listener.port)

    asyncio.run(asyncio.wait_for(test(), 50))


def test_a_handshake_may_take_as_long_as_a_connection_may_be_idle():
    async def test():
        async with opened(Limits(idle_timeout=0.1, tls=tls_context(CERTIFICATE, None, None))) as listener:
            with socket.create_connection(("127.0.0.1", listener.port)) as silent:
                silent.setblocking(False)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""

    asyncio.run(asyncio.wait_for(test(), 50))


def test_a_listener_closes_with_handshakes_under_way():
    async def test():
        async with opened(Limits(tls=tls_context(CERTIFICATE, None, None))) as listener:
            with socket.create_connection(("127.0.0.1", listener.port)) as silent:
                silent.setblocking(False)
                assert b"200" in await ask(listener.port)  # accepted after the silent one
                await listener.close()
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.get_running_loop().sock_recv(silent, 1) == b""

    asyncio.run(asyncio.wait_for(test(), 50))


def test_files_that_are_wrong(tmp_path):
    assert tls_context(None, None, None) is None
    text = CERTIFICATE.read_text()
    (tmp_path / "alone.pem").write_text(text[text.index("-----BEGIN CERT") :])
    (tmp_path / "no.pem").write_text("no certificate")
    for files, named in (
        ((None, CERTIFICATE, None), "ssl_certfile"),
        ((None, None, CERTIFICATE), "ssl_certfile"),
        ((tmp_path / "absent.pem", None, None), "ssl_certfile"),
        ((tmp_path / "alone.pem", None, None), "ssl_certfile"),
        ((CERTIFICATE, tmp_path / "no.pem", None), "ssl_certfile"),
        ((CERTIFICATE, None, tmp_path / "no.pem"), "ssl_ca_certs"),
    ):
        with pytest.raises(ValueError, match=f"{named} must be"):
            tls_context(*files)
    assert tls_context(tmp_path / "alone.pem", CERTIFICATE, None) is not None
