"""The engine for servers: one thread steps it while any number of asyncio tasks await their answers."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from flashtile.checks.vllm_arguments import RESET_ARGUMENTS, SLEEP_ARGUMENTS, takes_also
from flashtile.engine.core import Engine, NamedTensors, Prompt, scores
from flashtile.engine.outputs import RequestOutput
from flashtile.engine.sampling_params import BeamSearchParams, SamplingParams
from flashtile.engine.structured import MAX_SECONDS, late

Result = TypeVar("Result")

logger = logging.getLogger("flashtile.engine")


class EngineDeadError(RuntimeError):
    """The engine failed or was shut down, and accepts no more requests."""


class Stream:
    """Asynchronous iterator over the outputs of one or several requests, in order of arrival.

    It ends when every request in the set ``unfinished`` has yielded its ``finished`` output.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.unfinished = loop, set[str]()
        self._queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

    def put(self, item: RequestOutput | BaseException) -> None:
        """Append an output, or an error to raise. Must run on the event loop's thread."""
        self._queue.put_nowait(item)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self.unfinished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, BaseException):
            self.unfinished.clear()
            raise item
        if item.finished:
            self.unfinished.discard(item.request_id)
        return item


class AsyncLLM:
    """Runs an engine in its own thread.

    Every accepted request ends with a finished output or with an :class:`EngineDeadError`. The last output of
    an aborted request holds the tokens generated so far.

    Args:
        engine: the ``engine`` of an :class:`flashtile.engine.LLM`. Nothing else may step it afterwards.
        on_step: called with the engine after every step, on the engine's thread.
    """

    def __init__(self, engine: Engine, on_step: Callable[[Engine], None] = lambda engine: None):
        self.engine, self.on_step = engine, on_step
        self.error: BaseException | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()
        self._draining = self._ended = False
        engine.structures.on_success = lambda *found: self._send(partial(self._announce, *found))
        self._thread = threading.Thread(target=self._work, name="flashtile-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts requests."""
        return not (self._draining or self._ended)

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        stream: Stream | None = None,
    ) -> Stream:
        """Queue a request as ``Engine.add_request`` does, and return the stream of its outputs.

        ``stream`` is an existing stream to put them into. An :class:`EngineDeadError` is raised if the engine
        has ended or is being shut down.
        """
        if self._draining:
            raise EngineDeadError("the engine takes no more requests: it is being shut down")
        outputs = Stream(asyncio.get_running_loop()) if stream is None else stream
        structure = params.structured_outputs if isinstance(params, SamplingParams) else None
        if structure is not None:
            # The engine's thread will then find the structure compiled. Other requests may wait for it, so
            # neither a cancelled task nor the time limit cancels it.
            compiling = self.engine.structures.compile(structure)
            compiled, _ = await asyncio.wait([asyncio.wrap_future(compiling)], timeout=MAX_SECONDS)
            if not compiled:
                raise late(structure, MAX_SECONDS)

        def add(engine: Engine) -> None:
            engine.add_request(request_id, prompt, params, priority=priority, cache_salt=cache_salt)
            self._streams[request_id] = outputs

        try:
            await self.call(add)
        except asyncio.CancelledError:
            self.abort_soon(request_id, outputs)
            raise
        outputs.unfinished.add(request_id)
        return outputs

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of a request. Leaving the iteration early aborts the request."""
        stream = await self.add_request(request_id, prompt, params, priority=priority, cache_salt=cache_salt)
        try:
            async for output in stream:
                yield output
        finally:
            if stream.unfinished:
                self.abort_soon(request_id, stream)

    async def abort(self, request_id: str) -> None:
        """End a request. Its stream receives a last output with ``finish_reason`` "abort"."""
        await self.call(lambda engine: self._abort(request_id, None))

    def abort_soon(self, request_id: str, stream: Stream) -> None:
        """Queue the abort of a request without awaiting, because a cancelled task may not be able to await.

        The request is not aborted if its id now belongs to a stream other than ``stream``.
        """
        self._send(lambda: self._abort(request_id, stream))

    async def score(self, prompt: Prompt, request_id: str, *, priority: int = 0) -> list[float]:
        """Return the log-probability of each token but the first, as :meth:`flashtile.engine.LLM.score`."""
        tokens, params = self.engine.score_request(prompt)
        async for output in self.generate(tokens[:-1], params, request_id, priority=priority):
            found = scores(tokens, output)  # there is only one output
        return found

    # update_weights and sleep raise ValueError while requests are unfinished. An abort would lose answers,
    # and a wait might never end, because other tasks may add requests.

    async def update_weights(self, named_tensors: NamedTensors) -> None:
        """Replace all weights, as :meth:`flashtile.engine.LLM.update_weights`."""
        await self.call(lambda engine: engine.update_weights(named_tensors))

    @takes_also(SLEEP_ARGUMENTS)
    async def sleep(self, level: int = 1) -> None:
        """Free memory until :meth:`wake_up`, as :meth:`flashtile.engine.LLM.sleep`."""
        await self.call(lambda engine: engine.sleep(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that :meth:`sleep` freed, as :meth:`flashtile.engine.LLM.wake_up`."""
        await self.call(lambda engine: engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Return whether memory that :meth:`sleep` freed is not allocated yet."""
        return await self.call(lambda engine: engine.is_sleeping)

    @takes_also(RESET_ARGUMENTS)
    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache, as :meth:`flashtile.engine.LLM.reset_prefix_cache`."""
        await self.call(lambda engine: engine.reset_prefix_cache(reset_running_requests))
        return True

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run ``function(engine)`` on the engine's thread, between two steps.

        Returns the result of the function, or raises its error.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # the function also runs if the caller is cancelled

        def command() -> None:
            try:
                if self.error is not None:
                    raise EngineDeadError(f"the engine has ended: {self.error}")
                future.set_result(function(self.engine))
            except BaseException as error:  # also a panic of Rust code, which concerns this call only
                future.set_exception(error)

        self._send(command)
        return await asyncio.wrap_future(future)

    async def shutdown(self, timeout: float = 30.0) -> None:
        """Accept no more requests, wait for the unfinished requests, and end the engine.

        Requests that are unfinished after ``timeout`` seconds are aborted.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        self._draining = True
        while self._thread.is_alive() and self._streams and loop.time() < end:
            await asyncio.sleep(0.02)
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _send(self, command: Callable[[], None]) -> None:
        """Queue a command for the engine's thread.

        After that thread has ended, the command is run here, so that it reports an :class:`EngineDeadError`.
        """
        with self._lock:
            if not self._ended:
                self._commands.put(command)
                return
        command()

    def _announce(self, structure: dict[str, Any], size: int) -> None:
        """Let the other processes of the engine compile a structure now, not in a step that needs it."""
        if self.error is None:
            self.engine.compile_structure(structure, size)

    def _work(self) -> None:
        try:
            while True:
                idle = not self.engine.has_unfinished
                while idle or not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        self._close(EngineDeadError("the engine was shut down"), expected=True)
                        return
                    command()
                    idle = not self.engine.has_unfinished
                outputs = self.engine.step()
                self.on_step(self.engine)
                self._deliver(outputs)
        except BaseException as error:
            logger.exception("the engine has ended")
            self._close(error, expected=False)

    def _abort(self, request_id: str, stream: Stream | None) -> None:
        """Abort a request, unless its id now belongs to a stream other than ``stream``.

        Does nothing after the engine has ended, because every stream has then received its last item.
        """
        if self.error is None and (stream is None or self._streams.get(request_id) is stream):
            self._deliver(self.engine.abort(request_id))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            by_loop.setdefault(stream.loop, []).append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        for loop, pairs in by_loop.items():
            _call(loop, partial(_put_all, pairs))

    def _close(self, error: BaseException, expected: bool) -> None:
        """End every request and answer every waiting command.

        Args:
            error: why the engine ended; waiting commands fail with it.
            expected: True for a shutdown, which aborts requests and yields their outputs so far. False for a
                failure, after which streams raise :class:`EngineDeadError`.
        """
        if expected:
            self._deliver(self.engine.abort(list(self.engine.requests)))
        with self._lock:
            self._ended, self.error = True, error
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for stream in self._streams.values():
            dead = EngineDeadError(f"the engine has ended: {type(error).__name__}: {error}")
            _call(stream.loop, partial(stream.put, dead))
        self._streams.clear()


def _put_all(pairs: list[tuple[Stream, RequestOutput]]) -> None:
    for stream, output in pairs:
        stream.put(output)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Run a function on the loop's thread, or do nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        logger.debug("an event loop was closed before its outputs arrived")
