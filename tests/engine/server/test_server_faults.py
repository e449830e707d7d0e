"""Clients that disconnect, engines that fail and servers that stop: every request ends, nothing leaks."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import threading
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from serving import MODEL, Running, running, wait_for
from soak import soak
from traffic import WEIGHTS

from flashtile.engine import LLM
from flashtile.engine.async_llm import EngineDeadError
from flashtile.engine.server import answers
from flashtile.engine.server.answers import Completions
from flashtile.engine.server.errors import ApiError, shutting_down
from flashtile.engine.server.job import Job
from flashtile.engine.server.middlewares import answer_errors
from flashtile.engine.server.protocol import Body, CompletionCall
from flashtile.engine.server.run import Server, serve
from flashtile.engine.server.service import Limits
from flashtile.engine.tokenizer import ByteTokenizer
from walk import walk

COMPLETIONS = "/v1/completions"
LONG = {"model": MODEL, "prompt": "abc", "temperature": 0, "max_tokens": 4000}


def is_idle(server):
    engine, manager = server.llm.engine, server.llm.engine.scheduler.manager
    free = manager.pool.available == manager.pool.num_blocks - manager.pool.null_blocks
    return server.service.in_flight == 0 and not engine.has_unfinished and free


def open_stream(server, **fields):
    """A stream that has begun, and goes on for long."""
    response = server.send(COMPLETIONS, {**LONG, "stream": True, **fields})
    assert response.readline().startswith(b"data: ")
    return response


def rest(response):
    """The last event before the end of a stream that has ended as it should."""
    lines = [line for line in response.read().decode().split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    return json.loads(lines[-2].removeprefix("data: "))


def in_background(function, *arguments):
    """Its result, when it is asked for."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments)))
    thread.start()

    def result():
        thread.join(30)
        return results[0]

    return result


@pytest.fixture
def server(model):
    with running(model) as found:
        yield found


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_aborts_its_requests(server, stream):
    body = json.dumps({**LONG, "stream": stream, "prompt": ["abc", "xyz"], "n": 2}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: len(server.llm.engine.scheduler.running) == 4)
    wait_for(lambda: is_idle(server))
    assert server.metric('vllm:request_success_total{model_name="alphabet",finished_reason="abort"}') == 2
    assert server.complete(prompt="a", max_tokens=1)["choices"][0]["text"] == "b"


def test_tokens_of_an_output_that_ends_in_an_error_are_not_counted(server):
    """The client does not get them. The access log has these counts."""

    def output(*tokens, reason=None):
        answer = SimpleNamespace(token_ids=tokens, finish_reason=reason, stop_reason=None)
        return SimpleNamespace(request_id="failed-0", outputs=[answer], num_cached_tokens=0, finished=False)

    async def outputs():
        yield output(1, 2, 3)
        yield output(4, reason="error")

    async def counts():
        call = CompletionCall(Body({"prompt": "abc"}), 0)
        job = Job(server.service, call, "failed", await server.service.prepare(call))
        job._stream = outputs()
        with pytest.raises(ApiError, match="the engine failed"):
            async for _ in job:
                pass
        return job.counts()[1]

    assert server.do(counts()) == 3


def test_a_handler_cancelled_twice_aborts_its_requests(server):
    """A write fails, which ends the handler, and the connection's end cancels it meanwhile."""
    service = server.service

    async def cancelled_twice():
        fields = {name: value for name, value in LONG.items() if name != "model"}
        call = CompletionCall(Body({**fields, "prompt": ["abc", "xyz"]}), 0)
        prompts = await service.prepare(call)

        async def answer():
            async with Job(service, call, "twice", prompts) as job:
                entered.set()
                async for _ in job:
                    pass

        entered = asyncio.Event()
        task = asyncio.create_task(answer())
        await entered.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    server.do(cancelled_twice())
    wait_for(lambda: is_idle(server))


def test_a_refused_prompt_takes_the_others_of_its_call_with_it(server):
    status, body = server.ask(COMPLETIONS, {**LONG, "prompt": [[97], [256]]})
    assert (status, body["error"]["param"]) == (400, "prompt")
    wait_for(lambda: is_idle(server))
    assert server.metric('vllm:request_success_total{model_name="alphabet",finished_reason="abort"}') == 1


def test_an_answer_that_takes_too_long_ends_with_an_error(model):
    with running(model, Limits(request_timeout=1)) as server:  # which a slow machine's first token is within
        status, body = server.ask(COMPLETIONS, {**LONG, "n": 2})
        assert (status, body["error"]["code"]) == (504, "timeout")
        stream = server.send(COMPLETIONS, {**LONG, "stream": True})
        assert rest(stream)["error"]["code"] == "timeout"
        wait_for(lambda: is_idle(server))


def test_a_body_that_does_not_come_ends_with_an_error(model):
    with running(model, Limits(body_timeout=0.2)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (408, "timeout")
        connection.close()
        assert server.service.in_flight == 0


def test_a_client_that_does_not_read_the_end_is_disconnected(model, monkeypatch):
    async def never(response):
        await asyncio.Event().wait()

    monkeypatch.setattr(answers, "SLOW_READER", 0.0)
    monkeypatch.setattr(web.StreamResponse, "write_eof", never)
    with running(model, Limits(request_timeout=0.5)) as server:
        stream = server.send(COMPLETIONS, {**LONG, "stream": True, "max_tokens": 1})
        wait_for(lambda: is_idle(server))
        stream.close()


ERRORS = {
    "no key": (ApiError("no", status=401, code="invalid_api_key"), 401, {"WWW-Authenticate": "Bearer"}),
    "forbidden": (ApiError("no", status=403), 403, {}),
    "too many": (ApiError("no", status=429), 429, {"Retry-After": "1"}),
    "ends": (shutting_down(), 503, {"Retry-After": "1"}),
    "dead": (EngineDeadError("no"), 503, {"Retry-After": "1"}),
    "a fault": (KeyError("no"), 500, {}),
    "too large": (web.HTTPRequestEntityTooLarge(9, 10), 413, {}),
    "cut": (web.RequestPayloadError("no"), 400, {}),
    "nowhere": (web.HTTPNotFound(), 404, {}),
}


@walk("name", ERRORS)
def test_headers_of_errors(name):
    """A refused key is told the scheme (RFC 9110), and a call at a bad moment when to come again."""
    error, status, headers = ERRORS[name]

    async def fails(request):
        raise error

    response = asyncio.run(answer_errors(make_mocked_request("GET", "/v1/models"), fails))
    assert (response.status, response.content_type) == (status, "application/json")
    found = {key: value for key, value in response.headers.items() if not key.startswith("Content-")}
    assert found == headers
    assert json.loads(response.body)["error"]["message"]


def test_a_client_that_is_gone_gets_a_status_for_the_log():
    async def fails(request):
        raise ConnectionResetError

    response = asyncio.run(answer_errors(make_mocked_request("GET", "/"), fails))
    assert (response.status, response.body) == (499, None)


class Panic(BaseException):
    """As Rust code raises it in Python."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_panic_is_answered_with_an_error(server, monkeypatch, stream):
    def fail(*args):
        raise Panic

    name, patched = ("choice", Completions) if stream else ("encode", ByteTokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(patched, name, fail)
        response = server.send(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "stream": stream})
        text = response.read().decode()
    assert response.status == (200 if stream else 500)
    assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert text.endswith("data: [DONE]\n\n") == stream
    assert server.complete(prompt="a", max_tokens=1)["choices"][0]["text"] == "b"


def test_one_call_too_many_is_told_to_come_again(model):
    with running(model, Limits(max_concurrent_requests=1)) as server:
        stream = open_stream(server)
        response = server.send(COMPLETIONS, LONG)
        assert (response.status, response.getheader("Retry-After")) == (429, "1")
        assert json.loads(response.read())["error"]["code"] == "rate_limit_exceeded"
        assert server.ask("/load") == (200, {"server_load": 1})
        stream.close()
        wait_for(lambda: is_idle(server))
        assert server.complete(prompt="a", max_tokens=1)


def test_no_event_comes_before_the_first_token(server, monkeypatch):
    """Not even that which names the role: clients would take it for a token, and time it."""
    runner, gate, lines = server.llm.engine.runner, threading.Event(), []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda schedule: gate.wait(20) and launch(schedule))
    messages = [{"role": "user", "content": "a"}]
    fields = {"messages": messages, "stream": True, "max_tokens": 2}
    thread = threading.Thread(
        target=lambda: lines.append(server.send("/v1/chat/completions", fields).readline())
    )
    thread.start()
    wait_for(lambda: server.llm.engine.requests)
    thread.join(0.3)
    assert not lines
    gate.set()
    thread.join(20)
    assert b'"role":"assistant"' in lines[0]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_prompts_are_written_beside_the_event_loop(server, monkeypatch, stream):
    """Which other calls need meanwhile: those of many prompts take seconds."""
    choice, threads = Completions.choice, []

    def noted(*args):
        threads.append(threading.current_thread())
        return choice(*args)

    monkeypatch.setattr(Completions, "choice", noted)
    fields = {"prompt": ["abc", "d"], "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    assert server.send(COMPLETIONS, fields).read()
    assert len(threads) == 2
    assert server.thread not in threads


def test_two_unfinished_requests_of_one_name(server):
    stream = open_stream(server, request_id="mine")
    status, body = server.ask(COMPLETIONS, {**LONG, "request_id": "mine"})
    assert (status, body["error"]["param"]) == (400, "request_id")
    stream.close()
    wait_for(lambda: is_idle(server))


def test_a_step_that_fails_ends_its_requests_and_no_others(server, monkeypatch, caplog):
    runner = server.llm.engine.runner
    launch = runner.launch

    def fail(schedule):
        monkeypatch.setattr(runner, "launch", launch)
        raise RuntimeError("out of luck")

    stream = open_stream(server)
    monkeypatch.setattr(runner, "launch", fail)
    error = rest(stream)["error"]
    assert (error["code"], error["type"]) == ("engine_error", "server_error")
    assert "out of luck" in error["message"]
    assert server.complete(prompt="a", max_tokens=1)["choices"][0]["text"] == "b"
    assert is_idle(server)


def test_an_engine_that_dies_is_said_to_be_dead(model, monkeypatch, caplog):
    with running(model) as server:
        died = threading.Event()
        server.service.on_death = died.set

        def fail():
            raise RuntimeError("the end")

        stream = open_stream(server)
        waiting = in_background(server.ask, COMPLETIONS, LONG)
        wait_for(lambda: server.service.in_flight == 2)
        monkeypatch.setattr(server.llm.engine, "step", fail)
        assert rest(stream)["error"]["code"] == "engine_dead"
        status, body = waiting()
        assert (status, body["error"]["code"]) == (503, "engine_dead")
        assert died.wait(10)
        assert server.ask("/health")[0] == 503
        assert server.ask(COMPLETIONS, LONG)[0] == 503
        assert server.send("/metrics").status == 200


def test_an_engine_that_dies_ends_the_server_with_code_1(model):
    statuses = []

    def fail():
        raise RuntimeError("the end")

    def ask(port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", COMPLETIONS, json.dumps(LONG), {"Content-Type": "application/json"})
        statuses.append(connection.getresponse().status)

    def on_start(server):
        server.service.engine.step = fail
        asyncio.get_running_loop().call_later(20, signal.raise_signal, signal.SIGTERM)  # ends it with code 0
        threading.Thread(target=ask, args=(server.port,)).start()

    llm = LLM(model, device="cpu", block_size=4, num_gpu_blocks_override=2048)
    assert serve(Server(llm, MODEL, Limits(), port=0), 20.0, on_start) == 1
    assert statuses == [503]


def test_at_the_end_calls_finish_if_there_is_time(model):
    server = Running(model)
    calls = [in_background(server.ask, COMPLETIONS, {**LONG, "max_tokens": 40}) for _ in range(3)]
    wait_for(lambda: server.service.in_flight == 3)  # whether the engine has them or not
    server.stop(timeout=30)
    assert [call()[0] for call in calls] == [200] * 3
    with pytest.raises(ConnectionRefusedError):
        server.send("/health")


def test_at_the_end_calls_get_an_error_if_there_is_none(model):
    server = Running(model)
    kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    kept.request("GET", "/health")
    assert kept.getresponse().read()
    stream = open_stream(server)
    call = in_background(server.ask, COMPLETIONS, LONG)
    wait_for(lambda: len(server.llm.engine.requests) == 2)
    stopping = in_background(server.stop, 0.5)
    wait_for(lambda: server.service.draining)
    for method, path, body in (("POST", COMPLETIONS, json.dumps(LONG)), ("GET", "/health", None)):
        kept.request(method, path, body, {"Content-Type": "application/json"})
        response = kept.getresponse()
        assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "shutting_down")
    status, body = call()
    assert (status, body["error"]["code"]) == (503, "aborted")
    assert rest(stream)["error"]["code"] == "aborted"
    stopping()
    assert is_idle(server)


def test_many_random_calls_with_too_little_memory(model):
    found = soak(model, 80)
    assert set(found.outcomes) == set(WEIGHTS)
    assert found.preemptions > 0
    assert max(found.calls_alive) <= 6, found.calls_alive  # of 80


def test_the_memory_of_all_bodies_is_bounded(model):
    """A body that has not arrived counts with the size that its headers announce, or with the largest one."""
    fields = {"prompt": "abc", "max_tokens": 1}
    with running(model, Limits(max_body_bytes=2000, max_total_body_bytes=1500)) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for length, most in ((b"Content-Length: 1400", 1400), (b"Transfer-Encoding: chunked", 2000)):
            with socket.create_connection(("127.0.0.1", server.port)) as slow:
                slow.sendall(head + length + b"\r\n\r\n")
                wait_for(lambda most=most: server.service.body_bytes == most)
                status, answer = server.ask("/v1/completions", {**fields, "user": "x" * 200})
                assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
                assert server.ask("/health")[0] == 200
            wait_for(lambda: server.service.body_bytes == 0)
        assert server.ask("/v1/completions", {**fields, "user": "x" * 1700})[0] == 200
        assert server.ask("/v1/completions", {**fields, "user": "x" * 2000})[0] == 413
        # So do the log-probabilities of a prompt, which take much more than the body.
        scored = {"prompt": "a" * 20, "echo": True, "logprobs": 4, "max_tokens": 0}
        assert server.ask("/v1/completions", scored)[0] == 200
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(head + b"Content-Length: 10\r\n\r\n")
            wait_for(lambda: server.service.body_bytes == 10)
            status, answer = server.ask("/v1/completions", scored)
            assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
            assert server.ask("/v1/completions", {**fields, "echo": True, "logprobs": 1})[0] == 200
        wait_for(lambda: server.service.body_bytes == server.service.in_flight == 0)
