"""/v1/completions: continuation of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from flashtile.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
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
from flashtile.engine.server.protocol import CompletionCall, read_completion
from flashtile.engine.server.service import Service
from flashtile.engine.tokenizer import Tokenizer


async def completions(request: web.Request, service: Service, body: Body) -> web.StreamResponse:
    """Answer a call of /v1/completions."""
    call = read_completion(body, service.limits.max_logprobs)
    prompts = await service.prepare(call)
    service.set_max_tokens(call, prompts)
    name = new_name("cmpl", call.request_id)
    beginning = head(name, "text_completion", service)
    writer, usage = _Writer(service, call), Usage(prompts, counts_answers=not call.echo_only)
    async with Job(service, call, name, prompts) as job:
        if call.stream:
            return await stream_events(request, call, job, usage, beginning, [], writer.chunks)
        outputs: dict[int, RequestOutput] = {}
        async for prompt, output in job:
            outputs[prompt] = output
            usage.add(prompt, output)
    choices = [
        choice
        for prompt, output in sorted(outputs.items())
        for answer in output.outputs
        for choice in writer.chunks(prompt, output, answer)
    ]
    return json_response({**beginning, "choices": choices, "usage": usage.body()})


class _Writer:
    """Makes a call's choices, for one response or for the events of a stream."""

    def __init__(self, service: Service, call: CompletionCall):
        self.service, self.call = service, call
        self._places: dict[int, _Place] = {}

    def chunks(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> list[dict[str, Any]]:
        """Return the choices that hold the new part of an answer."""
        call = self.call
        width = getattr(call.params, "n", None) or len(output.outputs)
        index = prompt * width + answer.index
        first, tokenizer = index not in self._places, self.service.engine.tokenizer
        text, tokens, reason, stop = answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason
        entries: list[TokenLogprobs | None] = list(answer.logprobs or [])
        if call.echo_only:  # the engine always makes one token; the client wants none
            text, tokens, entries = "", [], []
            reason, stop = ("length", None) if reason is not None else (None, None)
        echoed = self._prompt_text(output) if call.echo and first else ""
        if first:
            skip = getattr(call.params, "skip_special_tokens", True)
            self._places[index] = _Place(tokenizer, len(echoed), output.prompt_token_ids, skip)
        offsets = self._places[index].read(tokens) if call.logprobs is not None else []
        if call.echo and first:
            text = echoed + text
            tokens = output.prompt_token_ids + tokens
            entries = (output.prompt_logprobs or [None]) + entries
            beginning = _Place(tokenizer, 0, [], output.prompt is not None)
            offsets = (beginning.read(output.prompt_token_ids) if call.logprobs is not None else []) + offsets
        logprobs = None
        if call.logprobs is not None:
            logprobs = logprobs_body(tokens, entries, call.logprobs, offsets, self.service)
        choice: dict[str, Any] = {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop
        }  # fmt: skip
        if first and call.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs)
        if call.return_token_ids:
            choice["token_ids"] = [] if call.echo_only else answer.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids if first else None
        return [choice]

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self.service.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, False)


class _Place:
    """Tracks the text offset of each token. Several tokens may form one character, and some have no text.

    Args:
        at: offset of the next token's text.
        before: the tokens before it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, at: int, before: Sequence[int], skip_special_tokens: bool
    ):
        self.at = at
        self._stream = None if tokenizer is None else tokenizer.stream(before, skip_special_tokens)

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Return the offset at which each token's text begins."""
        found = []
        for token in tokens:
            found.append(self.at)
            self.at += 0 if self._stream is None else len(self._stream.step(token))
        return found


def logprobs_body(
    tokens: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    count: int,
    offsets: list[int],
    service: Service,
) -> dict[str, list[Any]]:
    """Return log-probabilities in OpenAI's form: lists with one element for each token.

    Args:
        entries: log-probabilities of each token; None for the first token of a prompt.
        count: number of likeliest tokens to list in addition to the chosen one.
        offsets: text offset at which each token begins.
    """
    body: dict[str, list[Any]] = {"token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, entry in zip(tokens, entries, strict=True):
        top: dict[str, float] | None = None
        if entry is None:
            tokenizer = service.engine.tokenizer
            text = f"token_id:{token}" if tokenizer is None else tokenizer.spell(token)
            probability = None
        else:
            text, probability, top = spelt(token, entry[token]), clamped(entry[token]), {}
            for other, one in sorted(entry.items(), key=lambda item: -item[1].logprob):
                if other == token or one.rank <= count:
                    top.setdefault(spelt(other, one), clamped(one))
        body["token_logprobs"].append(probability)
        body["tokens"].append(text)
        body["top_logprobs"].append(top)
    return {"text_offset": offsets, **body}
