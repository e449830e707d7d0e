"""Parts that completions and chat completions share: server-sent events, usage, log-probabilities."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from flashtile.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from flashtile.engine.server.errors import ApiError, error_event, internal_error, to_json
from flashtile.engine.server.job import Job
from flashtile.engine.server.protocol import ApiCall
from flashtile.engine.server.service import Ready, Service

SLOW_READER = 5.0
"""Seconds beyond ``request_timeout`` for which a client may still read an answer."""

MIN_LOGPROB = -9999.0
"""Sent in place of minus infinity, which JSON does not have."""

logger = logging.getLogger("flashtile.server")

Chunks = Callable[[int, RequestOutput, CompletionOutput], list[dict[str, Any]]]
"""(prompt index, output, one of its answers) -> the ``choices`` of its events, one event for each."""


class Usage:
    """Token counts of a call. ``counts_answers`` is False if the call returns only the prompt."""

    def __init__(self, prompts: Sequence[Ready], counts_answers: bool = True):
        self.prompt = sum(len(prompt.tokens) for prompt in prompts)
        self.counts_answers = counts_answers
        self.cached: dict[int, int] = {}
        self.completion = 0

    def add(self, prompt: int, output: RequestOutput) -> None:
        self.cached[prompt] = output.num_cached_tokens
        if self.counts_answers:
            self.completion += sum(len(answer.token_ids) for answer in output.outputs)

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


def new_name(prefix: str, request_id: str | None) -> str:
    return f"{prefix}-{request_id or uuid.uuid4().hex}"


def head(name: str, kind: str, service: Service) -> dict[str, Any]:
    """Return the fields that every answer and every event begins with."""
    return {"id": name, "object": kind, "created": int(time.time()), "model": service.model_name}


async def stream_events(
    request: web.Request,
    call: ApiCall,
    job: Job,
    usage: Usage,
    beginning: dict[str, Any],
    first: list[dict[str, Any]],
    chunks: Chunks,
) -> web.StreamResponse:
    """Stream a call's outputs as server-sent events: ``first``, the chunks, usage, and ``[DONE]``.

    ``first`` is not sent before the first output, because clients time the first token by the first event. An
    error after the first byte is sent as an event, because the status has been sent.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    opening = to_json(beginning)[:-1]

    async def send(choices: list[dict[str, Any]]) -> None:
        used = ""
        if call.include_usage:
            used = f',"usage":{to_json(usage.body()) if call.continuous_usage else "null"}'
        await response.write(f'data: {opening},"choices":{to_json(choices)}{used}}}\n\n'.encode())

    await response.prepare(request)
    patience = job.service.limits.request_timeout + SLOW_READER
    assert request.transport is not None
    hang_up = asyncio.get_running_loop().call_later(patience, request.transport.abort)
    ended: set[tuple[int, int]] = set()
    try:
        try:
            async for prompt, output in job:
                while first:
                    await send([first.pop(0)])
                usage.add(prompt, output)
                for answer in output.outputs:
                    key = prompt, answer.index
                    if key in ended or not (answer.token_ids or answer.text or answer.finished):
                        continue
                    if answer.finished:
                        ended.add(key)
                    for choice in chunks(prompt, output, answer):
                        await send([choice])
            if call.include_usage:
                last = f'data: {opening},"choices":[],"usage":{to_json(usage.body())}}}\n\n'
                await response.write(last.encode())
        except ConnectionError:
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("%r failed in its answer", job.name)
                error = internal_error()
            await response.write(error_event(error))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    finally:
        hang_up.cancel()
    return response


def spelt(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def clamped(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)


def prompt_logprobs_body(entries: Sequence[TokenLogprobs | None] | None) -> list[dict[str, Any] | None]:
    """Return prompt log-probabilities in vLLM's form: keyed by token, with rank; None for the first token."""
    return [
        None if entry is None else {
            str(token): {"logprob": clamped(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in entry.items()
        }
        for entry in entries or [None]
    ]  # fmt: skip
