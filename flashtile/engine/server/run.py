"""Starting, running and stopping a server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from flashtile.engine.llm import LLM
from flashtile.engine.server.app import make_app
from flashtile.engine.server.formats import AUTO, Formats
from flashtile.engine.server.listener import CLOSING_SECONDS, Listener
from flashtile.engine.server.service import Limits, Service

logger = logging.getLogger("flashtile.server")


class Server:
    """A server that answers calls from :meth:`start` to :meth:`stop`.

    Args:
        llm, model_name, limits, formats: as for :class:`Service`.
        host, port: address to listen at. Port 0: a free port, whose number is ``port`` after :meth:`start`.
    """

    def __init__(
        self, llm: LLM, model_name: str, limits: Limits, host: str = "127.0.0.1", port: int = 8000,
        formats: Formats = AUTO,
    ):  # fmt: skip
        self.service = Service(llm, model_name, limits, formats)
        self.host, self.port = host, port
        self._listener = Listener(limits)

    async def start(self) -> None:
        """Start to accept calls. Raise OSError if the address is not available."""
        self.service.max_calls = self._listener.max_calls
        await self._listener.open(make_app(self.service, self._listener), self.host, self.port)
        self.port = self._listener.port

    async def stop(self, timeout: float) -> None:
        """Accept no more calls and shut down. Calls unfinished after ``timeout`` seconds get an error."""
        self._time_left = timeout
        self.service.draining = True
        await self._listener.close()
        await self._wait_for_calls()
        await self.service.asynchronous.shutdown(0)
        self._time_left = CLOSING_SECONDS
        await self._wait_for_calls()
        await self._listener.end()

    def abort_calls(self) -> None:
        """Make :meth:`stop` abort unfinished calls now."""
        self._time_left = 0.0

    async def _wait_for_calls(self) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while self.service.in_flight and loop.time() < begun + self._time_left:
            await asyncio.sleep(0.02)


def serve(server: Server, shutdown_timeout: float, on_start: Callable[[Server], None]) -> int:
    """Serve until SIGTERM or SIGINT. A second signal aborts the calls that still run.

    Args:
        shutdown_timeout: seconds for calls to finish after the signal.
        on_start: called once the server accepts calls.

    Returns:
        The exit code: 0, or 1 if the engine failed.
    """

    async def run() -> int:
        loop, stopping, code = asyncio.get_running_loop(), asyncio.Event(), 0

        def stop() -> None:
            if stopping.is_set():
                server.abort_calls()
            stopping.set()

        def died() -> None:
            nonlocal code
            code = 1
            stopping.set()

        server.service.on_death = died
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await server.start()
        on_start(server)
        await stopping.wait()
        logger.info("shutting down: %d calls are being answered", server.service.in_flight)
        await server.stop(shutdown_timeout)
        return code

    return asyncio.run(run())
