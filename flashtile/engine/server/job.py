"""The engine requests of one call, which are added, read and aborted together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from flashtile.engine.async_llm import EngineDeadError, Stream
from flashtile.engine.outputs import RequestOutput
from flashtile.engine.runner import NO_TOKEN
from flashtile.engine.server.errors import ApiError, refused
from flashtile.engine.server.protocol import ApiCall
from flashtile.engine.server.service import Service, TokenizedPrompt
from flashtile.engine.structured import NOT_CONTINUED


class Job:
    """Runs a call's prompts: ``async with Job(...) as job: async for index, output in job``.

    Leaving the context early aborts the unfinished requests. An abort, a failure of the engine and a timeout
    are raised as :class:`ApiError`.

    Args:
        name: name of the call; the engine's request ``i`` is ``name-i``.
    """

    def __init__(self, service: Service, call: ApiCall, name: str, prompts: Sequence[TokenizedPrompt]):
        self.service, self.call, self.name, self.prompts = service, call, name, prompts
        self._ids = {f"{name}-{i}": i for i in range(len(prompts))}
        self._stream = Stream(asyncio.get_running_loop())
        self._expired = False
        self._generated: dict[str, int] = {}
        self._received = 0
        self._cached: dict[str, int] = {}
        self._last: dict[str, float] = {}

    async def __aenter__(self) -> Job:
        try:
            added = await asyncio.gather(
                *(self._add(one, prompt) for one, prompt in zip(self._ids, self.prompts, strict=True)),
                return_exceptions=True,
            )
            for error in added:
                if error is not None:
                    raise self._as_api_error(error) from None
        except BaseException:
            self._abort()
            raise
        timeout = self.service.limits.request_timeout
        self._timer = asyncio.get_running_loop().call_later(timeout, self._expire)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._timer.cancel()
        self._abort()

    async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, output) in order of arrival until all requests are finished."""
        try:
            async for output in self._stream:
                self._count(output)
                self._check(output)
                self._received += sum(len(answer.token_ids) for answer in output.outputs)
                yield self._ids[output.request_id], output
        except EngineDeadError as error:
            raise self._as_api_error(error) from None

    def counts(self) -> tuple[int, int]:
        """Return the numbers of the prompts' tokens and of the generated tokens that the client gets."""
        prompt = sum(len(prompt.tokens) for prompt in self.prompts)
        return prompt, 0 if self.call.echo_only else self._received

    def usage(self) -> dict[str, Any]:
        """Return token counts in OpenAI's form."""
        prompt, generated = self.counts()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }

    async def _add(self, request_id: str, prompt: TokenizedPrompt) -> None:
        call = self.call
        tokens = {"prompt": prompt.text, "prompt_token_ids": prompt.tokens}
        await self.service.asynchronous.add_request(
            request_id, tokens, call.params, priority=call.priority, cache_salt=call.cache_salt,
            stream=self._stream,
        )  # fmt: skip

    def _count(self, output: RequestOutput) -> None:
        new, one = sum(len(answer.token_ids) for answer in output.outputs), output.request_id
        metrics = self.service.metrics
        self._generated[one] = self._generated.get(one, 0) + new
        self._cached[one] = output.num_cached_tokens
        if self.call.stream:
            now = time.monotonic()
            if one in self._last and new:
                metrics.observe("inter_token_latency_seconds", now - self._last[one])
            self._last[one] = now
        if output.finished:
            metrics.request_finished(output, self._generated[one], self.call.stream)

    def _check(self, output: RequestOutput) -> None:
        for answer in output.outputs:
            if answer.stop_reason == NO_TOKEN and answer.finish_reason == "error":
                raise ApiError(NO_TOKEN, code="no_token_left")
            if answer.finish_reason == "error" and str(answer.stop_reason).startswith(NOT_CONTINUED):
                raise refused(ValueError(answer.stop_reason), self.call.fields)
            if answer.finish_reason == "error":
                raise ApiError(f"the engine failed: {answer.stop_reason}", status=500, code="engine_error")
            if answer.finish_reason == "abort" and self._expired:
                seconds = self.service.limits.request_timeout
                raise ApiError(f"the answer took longer than {seconds:g} s", status=504, code="timeout")
            if answer.finish_reason == "abort":
                raise ApiError("the request was aborted", status=503, code="aborted")

    def _as_api_error(self, error: BaseException) -> BaseException:
        if isinstance(error, EngineDeadError):
            if self.service.draining:
                return ApiError(str(error), status=503, code="shutting_down")
            self.service.on_death()
            return ApiError(str(error), status=503, code="engine_dead")
        if isinstance(error, (TypeError, ValueError, NotImplementedError)):
            param = next((name for name in ("prompt", "messages") if name in self.call.fields), None)
            return refused(error, self.call.fields, param)
        return error

    def _expire(self) -> None:
        self._expired = True
        self._abort(forget=False)

    def _abort(self, forget: bool = True) -> None:
        """Abort the unfinished requests. ``forget``: nothing will read their last outputs."""
        left = list(self._stream.unfinished)
        if forget:
            self._stream.unfinished.clear()
            self.service.metrics.finished["abort"] += len(left)
        for request_id in left:
            self.service.asynchronous.abort_soon(request_id, self._stream)
