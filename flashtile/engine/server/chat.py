"""/v1/chat/completions: continuation of conversations."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from flashtile.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from flashtile.engine.server.answers import (
    Usage,
    clamped,
    head,
    new_name,
    prompt_logprobs_body,
    spelt,
    stream_events,
)
from flashtile.engine.server.errors import json_response
from flashtile.engine.server.fields import Body
from flashtile.engine.server.job import Job
from flashtile.engine.server.protocol import ChatCall, read_chat
from flashtile.engine.server.service import Service
from flashtile.engine.tokenizer import Tokenizer


async def chat_completions(request: web.Request, service: Service, body: Body) -> web.StreamResponse:
    """Answer a call of /v1/chat/completions."""
    call = read_chat(body, service.limits.max_logprobs)
    prompts = await service.prepare(call)
    service.set_max_tokens(call, prompts)
    name = new_name("chatcmpl", call.request_id)
    usage, tokenizer = Usage(prompts), service.tokenizer
    async with Job(service, call, name, prompts) as job:
        if call.stream:
            beginning = head(name, "chat.completion.chunk", service)
            role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            first = [{"index": i, **role} for i in range(getattr(call.params, "n", 1))]

            def chunks(_: int, output: RequestOutput, answer: CompletionOutput) -> list[dict[str, Any]]:
                return [_choice(call, tokenizer, answer, "delta", {"content": answer.text})]

            return await stream_events(request, call, job, usage, beginning, first, chunks)
        async for prompt, output in job:
            usage.add(prompt, output)
    choices = [
        _choice(call, tokenizer, answer, "message", {"role": "assistant", "content": answer.text})
        for answer in output.outputs
    ]
    answered = {**head(name, "chat.completion", service), "choices": choices, "usage": usage.body()}
    if call.prompt_logprobs is not None:
        answered["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs)
    if call.return_token_ids:
        answered["prompt_token_ids"] = output.prompt_token_ids
    return json_response(answered)


def _choice(
    call: ChatCall, tokenizer: Tokenizer, answer: CompletionOutput, name: str, content: dict[str, Any]
) -> dict[str, Any]:
    choice = {
        "index": answer.index,
        name: content,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if call.logprobs is not None:
        entries = zip(answer.token_ids, answer.logprobs or [], strict=True)
        positions = [_position(tokenizer, token, entry, call.logprobs) for token, entry in entries]
        choice["logprobs"] = {"content": positions}
    if call.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


def _position(tokenizer: Tokenizer, token: int, entry: TokenLogprobs, count: int) -> dict[str, Any]:
    likeliest = sorted(entry.items(), key=lambda item: item[1].rank)
    top = [_token(tokenizer, other, one) for other, one in likeliest if one.rank <= count]
    return {**_token(tokenizer, token, entry[token]), "top_logprobs": top}


def _token(tokenizer: Tokenizer, token: int, one: Logprob) -> dict[str, Any]:
    """Describe a token. Its ``bytes`` may be only part of a character."""
    text, data = spelt(token, one), list(tokenizer.token_bytes(token))
    return {"token": text, "logprob": clamped(one), "bytes": data}
