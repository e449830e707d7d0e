"""Random calls, many at a time, by clients of every kind, and whether each is answered rightly.

The model writes the alphabet, so that greedy answers are known; sampled ones are those of an undisturbed
engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from serving import MODEL

from flashtile.engine import LLM, SamplingParams

AT_A_TIME = 24
OPTIONS = {"max_model_len": 64, "max_num_seqs": 12, "max_num_batched_tokens": 24, "block_size": 4}
"""Of the engine: too little for what is asked."""

BAD_FIELDS: tuple[dict[str, Any], ...] = (
    {"top_p": 7}, {"n": 0}, {"temperature": "hot"}, {"stop": [""]}, {"max_tokens": -1}, {"suffix": "x"},
    {"no_such_field": 1}, {"logit_bias": {"x": 1}}, {"stop_token_ids": [256]}, {"echo": 3},
    {"prompt": "x" * 1000}, {"priority": 3}, {"response_format": {"type": "xml"}},
    {"structured_outputs": {"regex": "(["}},
)  # fmt: skip
WEIGHTS = {
    "answered": 12, "bad field": 2, "bad body": 1, "left early": 4, "cut off": 1, "slow body": 1,
    "slow reader": 1, "idle": 1,
}  # fmt: skip
"""What clients do, and how often."""

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"


class ClearError(Exception):
    """An error that a call may end with while replicas are stopped and killed."""


@dataclass
class Traffic:
    """Asks until told otherwise; AssertionError at the first answer that is wrong.

    Args:
        url: of the server.
        sampled: (fields, texts) of calls whose answers are known, as :func:`known_answers` has them.
        seed: of all that is drawn.
        errors: codes of errors that calls may end with.
        pause: seconds, at most, that slow clients wait at a time.

    Attributes:
        outcomes: calls by kind; "an error that is clear" for those that ended with one of ``errors``.
        refusals: calls that were told to come again, and did.
        slowest: seconds of the call that took longest.
    """

    url: str
    sampled: list[tuple[dict[str, Any], list[str]]]
    seed: int = 0
    errors: frozenset[str] = frozenset()
    pause: float = 0.05
    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: int = 0
    slowest: float = 0.0

    async def run(self, goes_on: Callable[[], bool]) -> None:
        """``AT_A_TIME`` clients, each of which asks once more as long as ``goes_on`` says so."""
        draw, connector = random.Random(self.seed), aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(300)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session:

            async def client() -> None:
                while goes_on():
                    kind, fields, expected = self._draw(draw)
                    begun = time.monotonic()
                    while True:
                        try:
                            if await self._ask(session, kind, fields, expected, draw):
                                self.outcomes[kind] += 1
                                break
                        except ClearError:
                            self.outcomes["a clear error"] += 1
                            break
                        self.refusals += 1
                        await asyncio.sleep(0.05)
                    self.slowest = max(self.slowest, time.monotonic() - begun)

            await asyncio.gather(*(client() for _ in range(AT_A_TIME)))

    def _draw(self, draw: random.Random) -> tuple[str, dict[str, Any], list[str]]:
        """(what the client does, its call, the texts of the answer)."""
        kind = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if draw.random() < 0.3:
            fields, expected = draw.choice(self.sampled)
            fields = {**fields, "stream": draw.random() < 0.5}
        else:
            start, length, count = draw.randrange(32, 60), draw.randrange(1, 20), draw.randrange(1, 40)
            if kind in ("left early", "slow reader"):
                count = 40
            prompt = "".join(chr(start + i) for i in range(length))
            answer = "".join(chr(start + length + i) for i in range(count))
            fields = {
                "model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": count,
                "n": draw.choice((1, 1, 1, 2, 4)), "stream": draw.random() < 0.5,
                "priority": draw.randrange(3),
            }  # fmt: skip
            if draw.random() < 0.2:
                fields |= {"logprobs": 2, "echo": draw.random() < 0.5}
            elif draw.random() < 0.1:
                fields |= {"use_beam_search": True, "stream": False}
            expected = [prompt + answer if fields.get("echo") else answer] * fields["n"]
        if kind == "bad field":
            fields |= draw.choice(BAD_FIELDS)
        if kind == "slow reader":
            fields |= {"stream": True, "use_beam_search": False}
        return kind, fields, expected

    async def _ask(
        self, session: aiohttp.ClientSession, kind: str, fields: dict[str, Any], expected: list[str],
        draw: random.Random,
    ) -> bool:  # fmt: skip
        """Whether the server was not too busy."""
        data = json.dumps(fields).encode()
        if kind in ("idle", "cut off"):
            await self._leave_half(kind, data, draw)
            return True
        if kind == "left early":
            call = asyncio.create_task(self._post(session, data, fields, draw.randrange(3)))
            await asyncio.wait({call}, timeout=draw.random() * 0.05)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return True
        if kind == "bad body":
            data = data[: draw.randrange(len(data))]
        body: Any = self._slowly(data, draw) if kind == "slow body" else data
        status, answers = await self._post(session, body, fields, None, slow=kind == "slow reader")
        if status == 429:
            return False
        if kind in ("bad field", "bad body"):
            assert status == 400 or status in self._codes(answers[0]), (status, answers)
            return True
        if status != 200:
            self._codes(answers[0])
            raise AssertionError((status, answers, fields))
        if fields.get("use_beam_search"):
            answers, expected = answers[:1], expected[:1]
        assert answers == expected, (fields, answers, expected)
        return True

    def _codes(self, text: str) -> tuple[()]:
        """Nothing; ClearError where the text is an error that may be."""
        if json.loads(text)["error"]["code"] in self.errors:
            raise ClearError(text)
        return ()

    async def _slowly(self, data: bytes, draw: random.Random) -> Any:
        for start in range(0, len(data), 50):
            yield data[start : start + 50]
            await asyncio.sleep(draw.random() * self.pause)

    async def _leave_half(self, kind: str, data: bytes, draw: random.Random) -> None:
        """Stay without a call, or die within one."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % (len(data) + 10) + data
        if kind == "idle":
            writer.write(whole[: draw.choice((0, 1, 60))])
            await asyncio.sleep(draw.random() * 20 * self.pause)
        else:
            writer.write(whole)
            await writer.drain()
        writer.close()

    async def _post(
        self, session: aiohttp.ClientSession, data: Any, fields: dict[str, Any], leave: int | None,
        slow: bool = False,
    ) -> tuple[int, list[str]]:  # fmt: skip
        """(status, texts of the answers); a client that leaves does so after so many events."""
        headers = {"Content-Type": "application/json"}
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
                    event = json.loads(line[6:])
                    if "error" in event:
                        self._codes(line[6:].decode())
                        raise AssertionError(event)
                    for choice in event["choices"]:
                        texts[choice["index"]] += choice["text"]
                    events += 1
                if slow:
                    await asyncio.sleep(self.pause / 4)
                if leave is not None and events > leave:
                    response.close()
                    return 200, texts
            assert done
            return 200, texts


def known_answers(model: Path, count: int = 12, seed: int = 0) -> list[tuple[dict[str, Any], list[str]]]:
    """(fields, texts) of sampled calls, one at a time, of an engine that has all the memory it needs."""
    llm, draw, known = (
        LLM(model, device="cpu", max_model_len=OPTIONS["max_model_len"]),
        random.Random(seed),
        [],
    )
    for number in range(count):
        fields = {"temperature": draw.choice((1.0, 5.0)), "seed": number, "n": draw.choice((1, 2))}
        kinds = ({}, {"top_p": 0.9}, {"frequency_penalty": 0.5}, {"min_p": 0.01, "top_k": 40})
        fields |= draw.choice((*kinds, {"structured_outputs": {"regex": "[a-z]{2}([0-9]|[A-Z]{3}){2,9}"}}))
        # Of bytes that are characters: pieces of others would be spelt differently in a stream.
        fields |= {"max_tokens": draw.randrange(1, 40), "allowed_token_ids": list(range(32, 127))}
        prompt = "".join(chr(draw.randrange(32, 127)) for _ in range(draw.randrange(1, 20)))
        (output,) = llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)
        known.append(({"model": MODEL, "prompt": prompt, **fields}, [one.text for one in output.outputs]))
    return known
