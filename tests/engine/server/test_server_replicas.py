"""Several servers behind one address: who gets a call, and what its client sees when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import typer
from typer.testing import CliRunner

from flashtile.cli import application
from flashtile.engine.server import replicas as replicas_module
from flashtile.engine.server.listener import tls_context
from flashtile.engine.server.replicas import (
    PIECE,
    SLACK,
    Front,
    Replica,
    RequestBody,
    Routing,
    prompt_of,
    serve_replicas,
)
from flashtile.engine.server.service import Limits
from flashtile.tools.commands.options import as_arguments
from flashtile.tools.commands.serve import environments_of

SERVER = """
import json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NUMBER, draining = os.environ["NUMBER"], threading.Event()

def hang():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # this thread may get here before all of the process is stopped

class Handler(BaseHTTPRequestHandler):
    def answer(self, text, kind="application/json", status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        if draining.is_set():
            self.answer("{}", status=503)
        elif self.path == "/metrics":
            self.answer("# TYPE a counter\\na{m=\\"x\\"} 1\\n", "text/plain")
        else:
            self.answer(json.dumps({"server_load": 2, "path": self.path, "replica": int(NUMBER)}))
    def do_POST(self):
        if draining.is_set():
            return self.answer("{}", status=503)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "Transfer-Encoding" in self.headers:
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size + 2)[:-2]
        prompt = json.loads(body or "{}").get("prompt", "")
        if prompt == "hang at " + NUMBER:
            hang()
        if prompt == "drain at " + NUMBER:
            draining.set()
            time.sleep(1)
        if prompt == "die at " + NUMBER:
            os._exit(2)  # as for bad arguments: of a replica that was up, no reason to give up
        if prompt in ("die in a stream", "hang in a stream"):
            self.protocol_version = "HTTP/1.1"
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"a\\r\\ndata: {}\\n\\n\\r\\n")
            self.wfile.flush()
            if prompt == "hang in a stream":
                hang()
            os._exit(3)
        blocks = 7 if self.path.endswith("?reset_running_requests=true") else 5
        self.answer(json.dumps({"replica": int(NUMBER), "blocks": blocks, "size": len(body)}))
    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"serving a fake at http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
server.serve_forever()
"""


def test_calls_go_where_their_beginning_was_and_others_to_the_idlest():
    one, two, down = (SimpleNamespace(in_flight=0, is_up=up) for up in (True, True, False))
    routing, story = Routing(), b"once upon a time " * 100
    assert routing.choose([down], story) is None
    assert routing.choose([down, one, two], story) is one
    one.in_flight = SLACK
    assert routing.choose([one, two], b"else") is two
    assert routing.choose([one, two], story[: 3 * PIECE] + b"x" * PIECE) is one
    one.in_flight = SLACK + 1
    assert routing.choose([one, two], story) is two  # and from now on it is at home there
    one.in_flight = 0
    assert routing.choose([one, two], story) is two
    assert routing.choose([one], story) is one


@pytest.mark.parametrize("place", [0, 1, PIECE - 1])
def test_a_beginning_is_another_one_whichever_character_differs(place):
    one, two = (SimpleNamespace(in_flight=0, is_up=True) for _ in range(2))
    routing, story = Routing(), b"a" * PIECE
    assert routing.choose([one, two], story) is one
    one.in_flight = 1
    assert routing.choose([one, two], story) is one
    assert routing.choose([one, two], story[:place] + b"b" + story[place + 1 :]) is two


def test_a_beginning_is_the_same_one_whatever_follows_it():
    one, two = (SimpleNamespace(in_flight=0, is_up=True) for _ in range(2))
    routing, story = Routing(), b"a" * PIECE
    assert routing.choose([one, two], story + b"b") is one
    one.in_flight = 1
    assert routing.choose([one, two], story + b"c") is one


def test_a_prompt_without_a_whole_piece_has_no_home():
    one, two = (SimpleNamespace(in_flight=0, is_up=True) for _ in range(2))
    routing, short = Routing(), b"a" * (PIECE - 1)
    assert routing.choose([one, two], short) is one
    one.in_flight = 1
    assert routing.choose([one, two], short) is two


def test_the_prompt_of_a_call():
    """Its first bytes, as the client writes them, though the body is cut off or no JSON at all."""
    assert prompt_of(b'{"model": "m", "prompt": "once upon') == b'"prompt": "once upon'
    assert (
        prompt_of(b'{"messages": [{"content": "a \\"prompt\\""')
        == b'"messages": [{"content": "a \\"prompt\\""'
    )
    both = b'"messages": [], "prompt": "x"', b'"prompt": "x", "messages": []'
    assert [prompt_of(b"{" + one) for one in both] == list(both)
    assert prompt_of(b"[1]") == prompt_of(b"\xff") == prompt_of(b"") == b""


@contextlib.asynccontextmanager
async def serving(limits=None):
    """(the front, its replicas, a client of it) of two fakes."""
    replicas = [
        Replica(i, [sys.executable, "-c", SERVER], {**os.environ, "NUMBER": str(i)}) for i in range(2)
    ]
    for one in replicas:
        one.start()
    assert all([await one.wait_until_up() for one in replicas])
    front = Front(replicas, limits or Limits())
    await front.listener.open(front.app(), "127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{front.listener.port}") as client:
        yield front, replicas, client
    for one in replicas:
        one.signal(signal.SIGKILL)
        await one.wait()
    await front.listener.close()
    await front.listener.end()


async def post(client, prompt, **headers):
    """(status, text)."""
    async with client.post("/v1/completions", json={"prompt": prompt}, headers=headers) as found:
        return found.status, await found.text()


async def get(client, path, **headers):
    async with client.get(path, headers=headers) as found:
        return found.status, await found.text()


def test_the_front_has_tls_and_lets_pages_of_other_origins_read():
    """Streams and other answers; its replicas have neither."""
    page, path = "https://page.example", Path(__file__).with_name("certificate.pem")
    trusting = ssl.create_default_context(cafile=str(path))

    async def run() -> None:
        async with (
            serving(Limits(tls=tls_context(path, None, None), cors_origins=(page,))) as (front, _, _),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as client,
        ):
            for prompt in ("abc", "die in a stream"):
                url = f"https://127.0.0.1:{front.listener.port}/v1/completions"
                async with client.post(url, json={"prompt": prompt}, headers={"Origin": page}) as found:
                    assert (found.status, bool(await found.text())) == (200, True)
                    assert found.headers.getall("Access-Control-Allow-Origin") == [page]

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_replica_that_dies_is_replaced(monkeypatch):
    monkeypatch.setattr(replicas_module, "FIRST_PAUSE", 0.01)

    async def run() -> None:
        async with serving() as (front, replicas, client):

            async def restarted(number: int, times: int) -> None:
                while replicas[number].restarts < times:
                    await asyncio.sleep(0.01)
                assert await replicas[number].wait_until_up()

            assert json.loads((await get(client, "/health"))[1]) == {"status": "ok", "replicas": [True, True]}
            assert json.loads((await get(client, "/load"))[1]) == {"server_load": 4, "replicas": [2, 2]}
            path = "/v1/models?a=b%20c"
            assert json.loads((await get(client, path))[1])["path"] == path
            lines = (await get(client, "/metrics"))[1].splitlines()
            assert lines[:3] == ["# TYPE a counter", 'a{replica="0",m="x"} 1', 'a{replica="1",m="x"} 1']
            assert lines[-2:] == [f'flashtile:replica_up{{replica="{i}"}} 1' for i in range(2)]
            async with client.post("/reset_prefix_cache", json={}) as found:
                assert await found.json() == {"blocks": 10}
            async with client.post("/reset_prefix_cache?reset_running_requests=true", json={}) as found:
                assert await found.json() == {"blocks": 14}
            async with client.post("/reset_prefix_cache?reset_running_requests=yes", json={}) as found:
                assert found.status == 400
            async with client.post("/reset_prefix_cache", data="a=b") as found:
                assert found.status == 415

            # Nothing of the answer was sent: the other one gives it.
            status, text = await post(client, "die at 0")
            assert (status, json.loads(text)["replica"]) == (200, 1)
            await restarted(0, 1)
            # A stream that has begun ends with an error.
            status, text = await post(client, "die in a stream")
            assert status == 200
            events = text.split("\n\n")
            assert events[0] == "data: {}"
            assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "engine_dead"
            assert events[2] == "data: [DONE]"
            await restarted(0, 2)
            front.draining = True
            for path in ("/health", "/v1/models", "/metrics"):
                status, text = await get(client, path)
                assert (status, json.loads(text)["error"]["code"]) == (503, "shutting_down")
            front.draining = False
            for one in replicas:
                one.signal(signal.SIGTERM)
            status, text = await post(client, "hello")
            assert (status, json.loads(text)["error"]["code"]) == (503, "engine_dead")
            assert (await get(client, "/health"))[0] == 503
        for code, restarts in ((5, replicas_module.MAX_FAILURES - 1), (replicas_module.BAD_ARGUMENTS, 0)):
            broken = Replica(0, [sys.executable, "-c", f"raise SystemExit({code})"], os.environ)
            broken.start()
            assert not await broken.wait_until_up()
            await broken.wait()
            assert (broken.exit_code, broken.restarts) == (code, restarts)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_replica_that_is_stopped_is_noticed(monkeypatch):
    """Its process is there, its port is open, and nothing comes."""
    monkeypatch.setattr(replicas_module, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(replicas_module, "QUICK_CALL_SECONDS", 0.5)

    async def run() -> None:
        async with serving() as (_, replicas, client):

            async def is_up(number: int, up: bool) -> None:
                while replicas[number].is_up is not up:
                    await asyncio.sleep(0.01)

            status, text = await post(client, "hang at 0")
            assert (status, json.loads(text)["replica"]) == (200, 1)
            assert json.loads((await get(client, "/health"))[1])["replicas"] == [False, True]
            assert 'flashtile:replica_up{replica="0"} 0' in (await get(client, "/metrics"))[1]
            assert json.loads((await get(client, "/load"))[1]) == {"server_load": 2, "replicas": [None, 2]}
            replicas[0]._process.send_signal(signal.SIGCONT)
            await is_up(0, True)
            status, text = await post(client, "hang in a stream")
            assert (status, '"code":"engine_dead"' in text) == (200, True)
            assert text.endswith("data: [DONE]\n\n")
            # A signal that ends it reaches it all the same.
            stopped = next(one for one in replicas if one.hangs)
            stopped.signal(signal.SIGTERM)
            await stopped.wait()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_replica_that_is_shut_down_ends_its_calls(monkeypatch):
    """Its health checks fail meanwhile, and other replicas get the new calls, also before the next check."""
    monkeypatch.setattr(replicas_module, "CHECK_SECONDS", 0.02)

    async def run() -> None:
        async with serving() as (_, replicas, client):
            call = asyncio.create_task(post(client, "drain at 0"))
            while replicas[0].is_up:
                await asyncio.sleep(0.01)
            assert json.loads((await post(client, "new"))[1])["replica"] == 1
            status, text = await call
            assert (status, json.loads(text)["replica"]) == (200, 0)
            assert not replicas[0].is_up
            assert not replicas[0].hangs
            monkeypatch.setattr(replicas_module, "CHECK_SECONDS", 60)
            await asyncio.sleep(0.1)  # the last checks
            replicas[0].takes_calls, replicas[1].in_flight = True, SLACK + 2
            status, text = await post(client, "new")
            assert (status, json.loads(text)["replica"]) == (200, 1)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_page_shows_the_engine_of_the_busiest_replica():
    async def run() -> None:
        async with serving() as (_, replicas, client):
            for busy in (1, 0):
                replicas[busy].in_flight, replicas[1 - busy].in_flight = 2, 0
                assert json.loads((await get(client, "/live"))[1])["replica"] == busy
                assert json.loads((await get(client, "/v1/models"))[1])["replica"] == 1 - busy
                replicas[busy].in_flight = 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_process_that_is_ended_on_purpose_is_no_error(caplog):
    async def test():
        replica = Replica(0, [], {})

        async def serve():
            replica.signal(signal.SIGTERM)
            return -signal.SIGTERM

        replica._serve_once = serve
        await replica._run()
        assert (replica.exit_code, replica.restarts, replica.given_up) == (-signal.SIGTERM, 0, False)

    asyncio.run(test())
    assert "has ended" not in caplog.text


def test_it_is_said_once_that_a_replica_hangs_and_that_it_answers_again(monkeypatch, caplog):
    monkeypatch.setattr(replicas_module, "CHECK_SECONDS", 0)
    replica = Replica(0, [], {})
    replica.url = "http://127.0.0.1"
    front = Front([replica], Limits())
    answers = iter([200, 200, *[0] * (replicas_module.MAX_FAILED_CHECKS + 2), 200, 200, 200])

    async def ask(url, path):
        assert (url, path) == (replica.url, "/health")
        try:
            return next(answers), b""
        except StopIteration:
            raise asyncio.CancelledError from None

    monkeypatch.setattr(front, "_get", ask)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(front._watch(replica))
    assert [record.getMessage() for record in caplog.records] == [
        "replica 0 does not answer: other replicas get its calls until it does",
        "replica 0 answers again",
    ]
    assert not replica.hangs


def test_bodies_are_forwarded_in_pieces_and_only_with_the_key(monkeypatch):
    monkeypatch.setattr(replicas_module, "MAX_KEPT_BYTES", 2**17)
    largest = 2**20

    async def run() -> None:
        async with serving(Limits(api_keys=("sesame",), max_body_bytes=largest)) as (front, _, client):
            key = {"Authorization": "Bearer sesame"}
            for path in ("/v1/completions", "/load", "/metrics", "/nothing"):
                assert (await get(client, path))[0] == 401
            for size in (10, 2**16, 2**17, largest - 14):
                status, text = await post(client, "x" * size, **key)
                assert (status, json.loads(text)["size"]) == (200, size + 14)
            status, text = await post(client, "x" * largest, **key)
            assert (status, json.loads(text)["error"]["code"]) == (413, "body_too_large")

            async def pieces():
                for _ in range(20):
                    yield b"x" * 2**16

            async with client.post("/v1/completions", data=pieces(), headers=key) as found:
                assert (found.status, (await found.json())["error"]["code"]) == (413, "body_too_large")

            # The answer comes though the body does not: without the key, and if its length is too large.
            sesame = b"Authorization: Bearer sesame\r\n"
            for headers, status in (
                (b"Content-Length: 1000", b" 401 "),
                (sesame + b"Content-Length: 2000000", b" 413 "),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", front.listener.port)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % headers)
                assert status in await reader.readline()
                writer.close()
            # A target may be absolute, or lead nowhere.
            for target, status in (
                (b"http://x.test/v1/models?a=%20", b" 200 "),
                (b"*", b" 4"),
                (b"@x", b" 400 "),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", front.listener.port)
                writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n\r\n" % target)
                assert status in await reader.readline(), target
                writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_wrong_arguments_of_replicas_end_the_command_and_are_said_once(capfd):
    program = "import sys; print('such is wrong\\n\\nsuch is wrong', file=sys.stderr); raise SystemExit(2)"
    replicas = [Replica(i, [sys.executable, "-c", program], os.environ) for i in range(3)]
    assert serve_replicas(replicas, Limits(), "127.0.0.1", 0, 1.0, lambda port: None) == 2
    assert capfd.readouterr().err == "such is wrong\n\nsuch is wrong\n"


def test_a_signal_ends_replicas_that_are_still_starting():
    class Starting(Replica):
        def start(self):
            os.kill(os.getpid(), signal.SIGTERM)

        async def wait(self):
            await self._stopping.wait()

    async def run():
        return [Starting(i, [], {}) for i in range(2)]

    replicas = asyncio.run(run())
    assert serve_replicas(replicas, Limits(), "127.0.0.1", 0, 60.0, lambda port: None) == 1


def test_a_signal_ends_replicas_that_serve(monkeypatch):
    """Their processes get it, and need not be killed."""
    monkeypatch.setattr(replicas_module, "CLOSING_SECONDS", 1.0)
    replicas = [
        Replica(i, [sys.executable, "-c", SERVER], {**os.environ, "NUMBER": str(i)}) for i in range(2)
    ]

    def stop(port: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert serve_replicas(replicas, Limits(), "127.0.0.1", 0, 0.0, stop) == 0
    assert [one.exit_code for one in replicas] == [-signal.SIGTERM] * 2


def test_a_signal_leaves_the_exit_code_to_the_watcher(monkeypatch):
    """A process that has just ended is signalled: asyncio's watcher, here slow, still gets its exit code."""
    wait = os.waitpid

    def slow_wait(pid, options):
        if not options:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            time.sleep(0.3)
        return wait(pid, options)

    monkeypatch.setattr(os, "waitpid", slow_wait)

    async def run():
        replica = Replica(0, [sys.executable, "-c", SERVER], {**os.environ, "NUMBER": "0"})
        replica.start()
        assert await replica.wait_until_up()
        pid = replica._process.pid
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        replica.signal(signal.SIGTERM)
        await replica.wait()
        return replica.exit_code

    assert asyncio.run(run()) == -signal.SIGKILL


def test_a_long_line_of_a_replica_is_passed_over(capfd):
    """A line of more than a mebibyte is not kept in memory, and the replica runs on."""

    async def run() -> tuple[int, int | None]:
        lines = "import sys; sys.stderr.write('x' * 2**22 + '\\nshort\\n'); sys.stderr.flush()\n"
        replica = Replica(0, [sys.executable, "-c", lines + SERVER], {**os.environ, "NUMBER": "0"})
        replica.start()
        up = asyncio.ensure_future(replica.wait_until_up())
        await asyncio.wait([up, replica._task], return_when=asyncio.FIRST_COMPLETED)
        assert up.done()
        replica.signal(signal.SIGTERM)
        await replica.wait()
        return replica.restarts, replica.exit_code

    assert asyncio.run(run()) == (0, -signal.SIGTERM)
    assert "short\n" in capfd.readouterr().err


def test_a_replica_ends_with_the_task_that_runs_it():
    async def run() -> int | None:
        replica = Replica(0, [sys.executable, "-c", SERVER], {**os.environ, "NUMBER": "0"})
        replica.start()
        assert await replica.wait_until_up()
        replica._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replica.wait()
        assert replica.url is None
        return replica._process.returncode

    assert asyncio.run(run()) == -signal.SIGKILL


def test_a_replica_that_cannot_start_ends_the_others(monkeypatch):
    monkeypatch.setattr(replicas_module, "FIRST_PAUSE", 0.01)
    replicas = [
        Replica(0, [sys.executable, "-c", SERVER], {**os.environ, "NUMBER": "0"}),
        Replica(1, [sys.executable, "-c", "raise SystemExit(5)"], os.environ),
    ]
    assert serve_replicas(replicas, Limits(), "127.0.0.1", 0, 60.0, pytest.fail) == 1
    assert [one.exit_code for one in replicas] == [-signal.SIGTERM, 5]


def test_work_ends_if_the_replica_hangs_or_no_client_waits():
    async def run() -> None:
        replica, ended = Replica(0, [], {}), []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(1)

        asyncio.get_running_loop().call_later(0.01, replica.set_hanging, True)
        with pytest.raises(asyncio.TimeoutError):
            await replica.ask(work())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(replica.ask(work()), 0.01)
        await asyncio.sleep(0)
        assert (len(ended), replica._asked) == (2, set())

    asyncio.run(run())


def test_a_short_body_is_sent_in_one_piece():
    chunks = [b'{"prompt"', b': "a"}', b""]

    async def read():
        return chunks.pop(0)

    async def run():
        content = SimpleNamespace(readany=read)
        body = RequestBody(SimpleNamespace(content=content, content_length=None), Limits())
        return await body.read_beginning(), body.to_send()

    assert asyncio.run(run()) == (b'{"prompt": "a"}', (b'{"prompt": "a"}', {}))


def test_a_client_that_is_gone_gets_no_second_answer(monkeypatch):
    asked = []

    async def ask(*given):
        asked.append(given)
        raise aiohttp.ClientConnectionResetError

    async def read():
        return b""

    replicas = [Replica(i, [], {}) for i in range(2)]
    for replica in replicas:
        replica.url = "http://127.0.0.1"
    front = Front(replicas, Limits())
    monkeypatch.setattr(front, "_relay", ask)
    transport = SimpleNamespace(is_closing=lambda: True, abort=None)
    content = SimpleNamespace(readany=read)
    request = SimpleNamespace(content=content, content_length=None, transport=transport)
    with pytest.raises(ConnectionError):
        asyncio.run(front._forward(request))
    assert len(asked) == 1


def test_a_replica_that_waits_for_its_parent_can_end():
    """With the exit code that it wants: a thread that reads ``sys.stdin`` would abort it."""
    program = "from flashtile.engine.server.replicas import *; import time; end_with_stdin()"
    command = [sys.executable, "-c", f"{program}; time.sleep(0.2)"]
    folder = str(Path(replicas_module.__file__).parents[3])
    environment = {**os.environ, replicas_module.ORPHAN: "1", "PYTHONPATH": folder}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as found:
        assert found.wait(60) == 0


def test_a_replica_ends_when_its_parent_does(monkeypatch):
    ended, reader = threading.Event(), os.pipe()
    monkeypatch.setattr(sys, "stdin", os.fdopen(reader[0]))
    own = os.getpid(), signal.SIGTERM
    monkeypatch.setattr(os, "kill", lambda *given: given == own and ended.set())
    replicas_module.end_with_stdin()  # not in the environment of a replica
    monkeypatch.setenv(replicas_module.ORPHAN, "1")
    replicas_module.end_with_stdin()
    assert not ended.is_set()
    os.close(reader[1])
    assert ended.wait(30)


def test_a_replica_gets_the_options_and_gpus_that_are_its_own(monkeypatch):
    app, found = typer.Typer(), []

    @app.command()
    def command(
        context: typer.Context, model: str, n: int = 1, on: bool = True, key: list[str] | None = None,
        other: str | None = None, port: int = 8000,
    ) -> None:  # fmt: skip
        found.extend(as_arguments(context, port=0))

    CliRunner().invoke(app, ["M", "--n", "3", "--no-on", "--key", "a", "--key", "b"])
    assert found == ["M", "--n", "3", "--no-on", "--key", "a", "--key", "b", "--port", "0"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in environments_of(2, 1, "cpu")[0]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in environments_of(2, 2, None)] == ["4,5", "6,7"]
    with pytest.raises(ValueError, match="at most the 4 GPUs here, got 3"):
        environments_of(3, 2, None)


def test_bad_json_is_an_error_of_the_command_line(model):
    result = CliRunner().invoke(application(), ["serve", str(model), "--speculative-config", "{"])
    assert result.exit_code == 2
    assert "--speculative-config must be JSON" in " ".join(result.output.replace("│", " ").split())
