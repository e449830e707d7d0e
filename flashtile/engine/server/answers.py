"""Answers of /v1/completions and /v1/chat/completions: one JSON body, or server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any

from aiohttp import web

from flashtile.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from flashtile.engine.request import NOT_ERRORS
from flashtile.engine.sampling_params import BeamSearchParams
from flashtile.engine.server.errors import (
    ApiError,
    error_event,
    internal_error,
    to_json,
)
from flashtile.engine.server.formats import LAST_TOKENS, AnswerParser
from flashtile.engine.server.job import Job
from flashtile.engine.server.middlewares import TOKENS, hang_up_after
from flashtile.engine.server.protocol import Body, ChatCall, CompletionCall
from flashtile.engine.server.service import Service
from flashtile.engine.tokenizer import TextStream

SLOW_READER = 5.0
"""Seconds beyond ``request_timeout`` for which a client may still read an answer."""

MIN_LOGPROB = -9999.0
"""Sent in place of minus infinity, which JSON does not have."""

SCORE_BYTES = 100
"""Bytes that a log-probability of a prompt takes until it is sent."""

logger = logging.getLogger("flashtile.server")


class Writer:
    """Reads a call and describes its answers in JSON.

    Attributes:
        kind: value of the field ``object``.
        prefix: beginning of the answer's id.
        params: the call's sampling parameters, or those of its beam search.
        first: choices that are sent before all others in a stream.
        is_slow: whether an answer's description may take seconds, so that a thread must make it.
    """

    kind = "text_completion"
    prefix = "cmpl"
    first: Sequence[dict[str, Any]] = ()

    def __init__(self, service: Service, call: CompletionCall | ChatCall):
        self.service, self.call, params = service, call, call.params
        self.params = params.sampling() if isinstance(params, BeamSearchParams) else params
        self.is_slow = self.params.prompt_logprobs is not None

    def choice(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any] | None:
        """Return the JSON of an answer to a prompt, or None if there is nothing to tell the client."""
        raise NotImplementedError

    def about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if "prompt_logprobs" in self.call.fields:  # an echo has them in its own form
            about["prompt_logprobs"] = _prompt_logprobs(output)
        if self.call.return_token_ids:
            about["prompt_token_ids"] = output.prompt_token_ids
        return about


async def complete(
    writers: type[Completions] | type[ChatCompletions], request: web.Request, service: Service, body: Body
) -> web.StreamResponse:
    """Answer a call of /v1/completions or /v1/chat/completions."""
    writer = writers(service, body)
    call = writer.call
    prompts = await service.prepare(call)
    service.set_max_tokens(call, prompts)
    name = f"{writer.prefix}-{call.request_id or uuid.uuid4().hex}"
    head = {"id": name, "object": writer.kind, "created": int(time.time()), "model": service.model_name}
    job = Job(service, call, name, prompts)
    request[TOKENS] = job.counts
    outputs: dict[int, RequestOutput] = {}
    count = writer.params.prompt_logprobs
    scores = 0 if count is None else 1 + count
    with service.holding(SCORE_BYTES * scores * sum(len(prompt.tokens) for prompt in prompts)):
        async with job:
            if call.stream:
                return await _stream(request, job, head, writer)
            async for prompt, output in job:
                outputs[prompt] = output

        def whole() -> bytes:
            # Each choice is converted on its own, because json.dumps holds the interpreter's lock.
            choices = [
                to_json(writer.choice(prompt, output, one))
                for prompt, output in sorted(outputs.items())
                for one in output.outputs
            ]
            about = writer.about_prompt(outputs[0]) if isinstance(writer, ChatCompletions) else {}
            rest = to_json({"usage": job.usage(), **about})
            return f'{to_json(head)[:-1]},"choices":[{",".join(choices)}],{rest[1:]}'.encode()

        found = await asyncio.to_thread(whole) if writer.is_slow else whole()
    return web.Response(body=found, content_type="application/json", charset="utf-8")


async def _stream(request: web.Request, job: Job, head: dict[str, Any], writer: Writer) -> web.StreamResponse:
    """Stream a call's outputs as server-sent events: the writer's choices, usage, and ``[DONE]``.

    ``writer.first`` is not sent before the first output, because clients measure the time to the first token
    by the first event. An error after the first byte is sent as an event, because the status has been sent.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    call, opening = job.call, to_json(head)[:-1]

    async def send(choices: str, usage: dict[str, Any] | None) -> None:
        used = f',"usage":{to_json(usage)}' if call.include_usage else ""
        await response.write(f'data: {opening},"choices":[{choices}]{used}}}\n\n'.encode())

    def described(prompt: int, output: RequestOutput, answer: CompletionOutput) -> str | None:
        found = writer.choice(prompt, output, answer)
        return None if found is None else to_json(found)

    await response.prepare(request)
    first, usage = writer.first, job.usage() if call.continuous_usage else None
    ended: set[tuple[int, int]] = set()
    with hang_up_after(request, job.service.limits.request_timeout + SLOW_READER):
        try:
            async for prompt, output in job:
                for choice in first:
                    await send(to_json(choice), usage)
                first, usage = [], job.usage() if call.continuous_usage else None
                for answer in output.outputs:
                    key = prompt, answer.index
                    if key in ended or not (answer.token_ids or answer.text or answer.finished):
                        continue
                    if answer.finished:
                        ended.add(key)
                    found = (
                        await asyncio.to_thread(described, prompt, output, answer) if writer.is_slow
                        else described(prompt, output, answer)
                    )  # fmt: skip
                    if found is not None:
                        await send(found, usage)
            if call.include_usage:
                await send("", job.usage())
        except (ConnectionError, *NOT_ERRORS):
            raise
        except BaseException as error:
            if not isinstance(error, ApiError):
                logger.exception("%r failed in its answer", job.name)
            await response.write(error_event(error if isinstance(error, ApiError) else internal_error()))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response


class Completions(Writer):
    """Writer of /v1/completions."""

    call: CompletionCall

    def __init__(self, service: Service, body: Body):
        super().__init__(service, CompletionCall(body, service.limits.max_logprobs))
        self._streams: dict[int, TextStream | None] = {}
        self._ends: dict[int, int] = {}  # of the choices' texts that were sent

    def choice(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        call, params, tokenizer = self.call, self.params, self.service.engine.tokenizer
        index, prompt_tokens = prompt * params.n + answer.index, output.prompt_token_ids
        is_first, echoed = index not in self._streams, ""
        text, tokens, reason, stop = answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason
        entries: Iterable[TokenLogprobs | None] = answer.logprobs or []
        if call.echo_only:  # the engine always makes one token; the client wants none
            text, tokens, entries = "", [], []
            reason, stop = ("length", None) if reason is not None else (None, None)
        if call.echo and is_first:
            echoed = output.prompt or ""
            if output.prompt is None and tokenizer is not None:
                echoed = tokenizer.decode(prompt_tokens, False)
        if is_first:
            skip = params.skip_special_tokens
            self._streams[index] = None if tokenizer is None else tokenizer.stream(prompt_tokens, skip)
            self._ends[index] = len(echoed)
        offsets: list[int] = []
        if params.logprobs is not None:
            *offsets, self._ends[index] = _offsets(self._ends[index], self._streams[index], tokens)
        if call.echo and is_first:
            text, tokens = echoed + text, prompt_tokens + tokens
            entries = chain(output.prompt_logprobs or [None], entries)
            if params.logprobs is not None:
                of_prompt = None if tokenizer is None else tokenizer.stream([], output.prompt is not None)
                offsets = _offsets(0, of_prompt, prompt_tokens)[:-1] + offsets
        logprobs = None if params.logprobs is None else self.logprobs(tokens, entries, offsets)
        choice: dict[str, Any] = {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop
        }  # fmt: skip
        if call.return_token_ids:
            choice["token_ids"] = [] if call.echo_only else answer.token_ids
            choice["prompt_token_ids"] = None
        return choice | (self.about_prompt(output) if is_first else {})

    def logprobs(
        self, tokens: Sequence[int], entries: Iterable[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, list[Any]]:
        """Return log-probabilities in OpenAI's form: lists with one element for each token.

        The entry of a prompt's first token is None.
        """
        body: dict[str, list[Any]] = {"token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, entry in zip(tokens, entries, strict=True):
            top: dict[str, float] | None = None
            if entry is None:
                tokenizer = self.service.engine.tokenizer
                text = f"token_id:{token}" if tokenizer is None else tokenizer.spell(token)
                probability = None
            else:
                text, probability, top = _spelt(token, entry[token]), _clamped(entry[token]), {}
                for other, one in sorted(entry.items(), key=lambda item: -item[1].logprob):
                    if other == token or one.rank <= (self.params.logprobs or 0):
                        top.setdefault(_spelt(other, one), _clamped(one))
            body["token_logprobs"].append(probability)
            body["tokens"].append(text)
            body["top_logprobs"].append(top)
        return {"text_offset": offsets, **body}


def _offsets(at: int, stream: TextStream | None, tokens: Sequence[int]) -> list[int]:
    """Return the offsets at which the tokens' texts begin, and at last the one where their text ends.

    Several tokens may form one character, and some have no text.
    """
    lengths = (0 if stream is None else len(stream.step(token)) for token in tokens)
    return list(accumulate(lengths, initial=at))


class ChatCompletions(Writer):
    """Writer of /v1/chat/completions."""

    call: ChatCall
    prefix = "chatcmpl"

    def __init__(self, service: Service, body: Body):
        super().__init__(service, ChatCall(body, service.limits.max_logprobs))
        self.kind = "chat.completion.chunk" if self.call.stream else "chat.completion"
        role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        self.first = [{"index": i, **role} for i in range(self.params.n)]
        self._parsers: dict[int, AnswerParser] = {}
        conversation = self.call.conversation
        apart = conversation.separate_reasoning and service.formats.reasoning is not None
        self._structured = self.params.structured_outputs is not None
        self._parses = bool(conversation.forced) or apart or (conversation.calls and not self._structured)
        if self._parses:
            self.params.skip_special_tokens = False  # the formats' markers may be special tokens

    def choice(self, prompt: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any] | None:
        call, reason = self.call, answer.finish_reason
        fields: dict[str, Any] = {"content": answer.text}
        if self._parses:
            fields, called = self._parsed(output, answer)
            reason = "tool_calls" if called and reason == "stop" else reason
            shows_tokens = self.params.logprobs is not None or call.return_token_ids
            if call.stream and not fields and not answer.finished and not shows_tokens:
                return None
        choice: dict[str, Any] = {
            "index": answer.index,
            **({"delta": fields} if call.stream else {"message": {"role": "assistant", **fields}}),
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": answer.stop_reason,
        }
        if self.params.logprobs is not None:
            entries = zip(answer.token_ids, answer.logprobs or [], strict=True)
            choice["logprobs"] = {"content": [self._position(token, entry) for token, entry in entries]}
        if call.return_token_ids:
            choice["token_ids"] = answer.token_ids
        return choice

    def _parsed(self, output: RequestOutput, answer: CompletionOutput) -> tuple[dict[str, Any], bool]:
        """Return the fields of an answer's message or delta, and whether the answer only has whole calls."""
        parser = self._parsers.get(answer.index)
        if parser is None:
            last = self.service.tokenizer.decode(output.prompt_token_ids[-LAST_TOKENS:], False)
            parser = AnswerParser(self.service.formats, self.call.conversation, last, self._structured)
            self._parsers[answer.index] = parser
        # The model wrote an end token, unless the length or a stop text ended the answer.
        cut = answer.finish_reason not in (None, "stop") or isinstance(answer.stop_reason, str)
        fields = parser.feed(answer.text, answer.finished, cut)
        if not self.call.stream:
            fields.setdefault("content", None if parser.found else "")
            for call in fields.get("tool_calls", ()):
                del call["index"]
        return fields, parser.found > 0 and not (cut and parser.unfinished)

    def _position(self, token: int, entry: TokenLogprobs) -> dict[str, Any]:
        """Describe the token at a position, and the likeliest tokens at this position."""
        likeliest = sorted(entry.items(), key=lambda item: item[1].rank)
        most = self.params.logprobs or 0
        top = [self._token(other, one) for other, one in likeliest if one.rank <= most]
        return {**self._token(token, entry[token]), "top_logprobs": top}

    def _token(self, token: int, one: Logprob) -> dict[str, Any]:
        """Describe a token. Its ``bytes`` may be only part of a character."""
        data = list(self.service.tokenizer.token_bytes(token))
        return {"token": _spelt(token, one), "logprob": _clamped(one), "bytes": data}


def _spelt(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def _clamped(entry: Logprob) -> float:
    return max(entry.logprob, MIN_LOGPROB)


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """Return prompt log-probabilities in vLLM's form: keyed by token, with rank; None for the first token."""
    return [
        None if entry is None else {
            str(token): {"logprob": _clamped(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in entry.items()
        }
        for entry in output.prompt_logprobs or [None]
    ]  # fmt: skip
