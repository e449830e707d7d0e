"""Random calls, many at a time, to a server with too little memory.

``PYTHONPATH=.:tests python tests/engine/server/soak.py 20000``. Every call is answered: rightly, because
the model writes the alphabet, or with the error that it deserves. Some clients go away, before or while they
are answered. In the end nothing is left: no request, no block, no memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp.web
from serving import MODEL, running, write_alphabet_model

import flashtile.engine.request
from flashtile.engine.server.service import Limits

AT_A_TIME = 24
OF_CALLS = (flashtile.engine.request.Request, aiohttp.web.Request)
"""What stands for a call in the engine and in the server. None may stay behind."""

BAD_FIELDS: tuple[dict[str, Any], ...] = (
    {"top_p": 7}, {"n": 0}, {"temperature": "hot"}, {"stop": [""]}, {"max_tokens": -1}, {"suffix": "x"},
    {"no_such_field": 1}, {"logit_bias": {"x": 1}}, {"stop_token_ids": [256]}, {"echo": 3},
)  # fmt: skip
KINDS = ("answered", "bad field", "bad body", "left early", "cut off")
WEIGHTS = (6, 1, 0.5, 2, 0.5)


@dataclass
class Result:
    """``outcomes`` by kind; ``calls_alive`` and ``peak_bytes`` after a quarter of the calls and after all.

    ``calls_alive`` are the calls that engine or server still hold, with those of one call that came last.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    calls_alive: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    preemptions: int = 0
    refusals: int = 0
    seconds: float = 0.0


def soak(model: Path, count: int, seed: int = 0) -> Result:
    """Ask ``count`` times; AssertionError if an answer is wrong or something is left."""
    limits = Limits(max_concurrent_requests=AT_A_TIME - 2, request_timeout=60)
    options = {
        "max_model_len": 64,
        "num_gpu_blocks_override": 48,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 24,
    }
    result, begun = Result(), time.monotonic()
    with running(model, limits, **options) as server:
        engine, asynchronous = server.llm.engine, server.service.asynchronous

        others = _count_calls()  # those of other servers in this process

        def measure() -> None:
            server.complete(prompt="a", max_tokens=1)  # the engine holds its last step until the next one
            result.calls_alive.append(_count_calls() - others)
            result.peak_bytes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

        for part, number in enumerate((count // 4, count - count // 4)):
            asyncio.run(_ask_all(server.url, number, random.Random(seed + part), result))
            deadline = time.monotonic() + 20
            while (engine.has_unfinished or server.service.in_flight) and time.monotonic() < deadline:
                time.sleep(0.02)  # for those whose clients went away
            measure()
        assert not engine.has_unfinished
        assert (server.service.in_flight, asynchronous.is_alive) == (0, True)
        manager = engine.scheduler.manager
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
        assert not manager.sequences
        assert manager.pool.available == manager.pool.num_blocks - manager.pool.null_blocks
        assert all(one.left == one.right for one in manager.check_integrity())
        assert server.ask("/health")[0] == 200
        result.preemptions = engine.scheduler.num_preemptions
    assert sum(result.outcomes.values()) == count
    result.seconds = time.monotonic() - begun
    return result


def _count_calls() -> int:
    gc.collect()
    return sum(type(one) in OF_CALLS for one in gc.get_objects())


async def _ask_all(url: str, count: int, draw: random.Random, result: Result) -> None:
    numbers = iter(range(count))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(90)) as session:

        async def client() -> None:
            for _ in numbers:
                kind, fields = _draw_call(draw)
                while not await _ask(session, kind, fields, draw):
                    result.refusals += 1
                    await asyncio.sleep(0.05)
                result.outcomes[kind] += 1

        await asyncio.gather(*(client() for _ in range(AT_A_TIME)))


def _draw_call(draw: random.Random) -> tuple[str, dict[str, Any]]:
    start, length = draw.randrange(32, 60), draw.randrange(1, 20)
    prompt = "".join(chr(start + i) for i in range(length))
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": draw.randrange(1, 40),
        "n": draw.choice((1, 1, 1, 2, 4)), "stream": draw.random() < 0.5, "priority": draw.randrange(3),
    }  # fmt: skip
    if draw.random() < 0.2:
        fields |= {"logprobs": 2, "echo": draw.random() < 0.5}
    if draw.random() < 0.1:
        fields |= {"use_beam_search": True, "stream": False}
        fields.pop("logprobs", None)
        fields.pop("echo", None)
    kind = draw.choices(KINDS, WEIGHTS)[0]
    if kind == "bad field":
        fields |= draw.choice(BAD_FIELDS)
    if kind == "left early":
        fields |= {"max_tokens": 40}
    return kind, fields


async def _ask(
    session: aiohttp.ClientSession, kind: str, fields: dict[str, Any], draw: random.Random
) -> bool:
    """Whether the server was not too busy."""
    data = json.dumps(fields).encode()
    if kind == "bad body":
        data = data[: draw.randrange(len(data))]
    headers = {"Content-Type": "application/json"}
    if kind == "left early":
        call = asyncio.create_task(_post(session, data, headers, fields, draw.randrange(3)))
        await asyncio.wait({call}, timeout=draw.random() * 0.05)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return True
    if kind == "cut off":  # a client that dies within its body
        url = session._base_url
        assert url is not None
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % (len(data) + 10) + data)
        await writer.drain()
        writer.close()
        return True
    status, answers = await _post(session, data, headers, fields, None)
    if status == 429:
        return False
    if kind == "answered":
        assert status == 200, answers
        expected = _expected(fields)
        if fields.get("use_beam_search"):
            answers = answers[:1]
        assert answers == [expected] * len(answers), (answers, expected)
    else:
        assert status == 400, (status, answers)
    return True


def _expected(fields: dict[str, Any]) -> str:
    prompt, count = fields["prompt"], fields["max_tokens"]
    answer = "".join(chr(ord(prompt[-1]) + 1 + i) for i in range(count))
    return prompt + answer if fields.get("echo") else answer


async def _post(
    session: aiohttp.ClientSession,
    data: bytes,
    headers: dict[str, str],
    fields: dict[str, Any],
    leave: int | None,
) -> tuple[int, list[str]]:
    """(status, texts of the answers); a client that leaves does so after so many events."""
    async with session.post("/v1/completions", data=data, headers=headers) as response:
        if response.status != 200:
            return response.status, [await response.text()]
        texts = [""] * fields["n"]
        if not fields["stream"]:
            for choice in (await response.json())["choices"]:
                texts[choice["index"]] = choice["text"]
            return 200, texts
        events, done = 0, False
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
                events += 1
            if leave is not None and events > leave:
                response.close()
                return 200, texts
        assert done
        return 200, texts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = soak(write_alphabet_model(Path(folder)), int(sys.argv[1]))
    print(dict(found.outcomes), f"in {found.seconds:.0f} s")
    print(found.preemptions, "preemptions,", found.refusals, "refusals")
    print("calls alive", found.calls_alive, "peak MB", [peak // 2**20 for peak in found.peak_bytes])
