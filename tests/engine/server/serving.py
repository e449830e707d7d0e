"""A server in a thread, a model that writes the alphabet, and calls to it, for the tests of the server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtile.engine import LLM
from flashtile.engine.server.run import Server
from flashtile.engine.server.service import Limits
from flashtile.engine.tokenizer import ByteTokenizer
from flashtile.tools.demo.llama import Llama, save_llama, sized

MODEL = "alphabet"
END = 0
"""The token that ends scripted answers."""

TOOL_TEMPLATE = (
    "{% for tool in tools or () %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or () %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ m.reasoning_content or '' }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
"""A chat template that shows all that a conversation with tools has."""

MAX_MODEL_LEN = 4096


def write_alphabet_model(path: Path) -> Path:
    """A model of bytes made by hand: each letter's embedding points to the next letter."""
    torch.manual_seed(0)
    model = Llama(sized(1, 2, 256))
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        model.embed_tokens.weight.copy_(torch.eye(256))
        model.lm_head.weight = torch.nn.Parameter(torch.eye(256)[(torch.arange(256) - 1) % 256])
    save_llama(model, path, MAX_MODEL_LEN)
    return path


class Running:
    """A server that listens, and its own loop in a thread.

    Attributes:
        server, service, port: of it.
    """

    def __init__(self, model: Path, limits: Limits | None = None, **options: Any):
        options = {
            "device": "cpu",
            "block_size": 4,
            "max_num_seqs": 64,
            "num_gpu_blocks_override": 2048,
            **options,
        }
        self.llm = LLM(model, **options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = Server(self.llm, MODEL, limits or Limits(), port=0)
        self.do(self.server.start())
        self.service, self.port = self.server.service, self.server.port

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def stop(self, timeout: float = 5.0) -> None:
        self.do(self.server.stop(timeout))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        """GET, or POST of a body: JSON, or bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        method, data = ("GET", None) if body is None else ("POST", body)
        if data is not None and not isinstance(data, bytes):
            data = json.dumps(data).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        return connection.getresponse()

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, JSON)."""
        response = self.send(path, body, headers)
        return response.status, json.loads(response.read())

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The answer to a greedy completion, which must succeed."""
        status, answer = self.ask("/v1/completions", {"model": MODEL, "temperature": 0, **fields})
        assert status == 200, answer
        return answer

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream, whose last one says that it is done."""
        response = self.send(path, {"model": MODEL, "temperature": 0, "stream": True, **fields})
        assert response.status == 200, response.read()
        assert response.getheader("Content-Type") == "text/event-stream"
        lines = [line.decode() for line in response.read().split(b"\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def metric(self, name: str) -> float:
        """The number of a line of /metrics that begins so."""
        text = self.send("/metrics").read().decode()
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        return float(line.split()[-1])


@contextlib.contextmanager
def running(model: Path, limits: Limits | None = None, **options: Any) -> Iterator[Running]:
    found = Running(model, limits, **options)
    try:
        yield found
    finally:
        found.stop()


def tool_call(name: str, **arguments: Any) -> str:
    """A call of a tool, as Qwen's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextlib.contextmanager
def scripted(model: Path, **options: Any) -> Iterator[Any]:
    """A server with tools. It takes answers from its list ``script``; None is the model's own answer.

    It keeps the prompts in ``asked``, and the last call's parameters in ``params``. Answers are encoded by
    the model's tokenizer. ``options`` are those of the LLM.
    """

    def add_scripted(request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        text = found.script.pop(0)
        tokens = [*found.llm.engine.tokenizer.encode(text or "", False), end]

        def next_token(before: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits = torch.full_like(logits, -torch.inf)
            logits[tokens[len(before)]] = 0
            return logits

        found.asked.append(prompt["prompt"])
        params.logits_processors, found.params = [next_token] if text is not None else [], params
        return add(request_id, prompt, params, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByteTokenizer, "chat_templates", {"default": TOOL_TEMPLATE})
        with running(model, **options) as server:
            found: Any = server
            found.asked, found.script = [], []
            engine = found.llm.engine
            engine.eos_token_ids = engine.eos_token_ids or frozenset([END])
            (end,) = engine.eos_token_ids
            add, found.llm.engine.add_request = found.llm.engine.add_request, add_scripted
            yield found


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition holds.

    A client can read the last byte of a stream before the server has finished with the call, so what the
    server counts is waited for.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        time.sleep(0.01)
