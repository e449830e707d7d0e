"""Middlewares of a server and of the replicas' front: API keys, errors, access log, other origins."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from flashtile.engine.async_llm import EngineDeadError
from flashtile.engine.request import NOT_ERRORS
from flashtile.engine.server.errors import ApiError, internal_error, json_response
from flashtile.engine.server.listener import Listener
from flashtile.engine.server.service import Limits

OPEN = ("/", "/docs", "/health", "/openapi.json")
"""Paths that need no key, because they tell nothing about requests."""

POLLED = ("/health", "/load", "/metrics", "/live")
"""Paths that programs poll. Only their errors are logged."""

CLIENT_IS_GONE = 499

logger = logging.getLogger("flashtile.server")


def request_key(name: str) -> Any:
    """Return a key for data of a request. Releases of aiohttp without ``RequestKey`` use strings."""
    return web.RequestKey(name, object) if hasattr(web, "RequestKey") else name


TOKENS = request_key("tokens")
"""Key of a function of no arguments that returns the numbers of prompt and generated tokens of a call."""


def add_middlewares(app: web.Application, listener: Listener, limits: Limits) -> None:
    """Add everything that a server and the replicas' front do around their handlers."""
    app.middlewares.append(logged(listener, limits.access_log))
    if limits.cors_origins:
        allow_origins(app, limits.cors_origins)
    app.middlewares.extend((answer_errors, authorised(limits.api_keys)))


def logged(listener: Listener, access_log: bool) -> Middleware:
    """Return the outermost middleware, which logs each call and marks its connection as busy."""

    @web.middleware
    async def log(request: web.Request, handler: Handler) -> web.StreamResponse:
        begun, status = time.monotonic(), CLIENT_IS_GONE
        try:
            with listener.answering(request.transport):
                response = await handler(request)
                status = response.status
                return response
        finally:
            if access_log and (status >= 400 or request.path not in POLLED):
                spent = 1000 * (time.monotonic() - begun)
                path = request.rel_url.raw_path  # percent-encoded, so it cannot contain a line break
                count = request.get(TOKENS)
                tokens = "" if count is None else ", {} prompt and {} generated tokens".format(*count())
                client, method = request.remote, request.method
                logger.info("%s %s %.200s %d %.0f ms%s", client, method, path, status, spent, tokens)

    return log


def allow_origins(app: web.Application, origins: Sequence[str]) -> None:
    """Let web pages of the given origins call the server. Their browsers' preflight calls have no key."""

    def allowed(request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        return origin if origin is not None and ("*" in origins or origin.lower() in origins) else None

    @web.middleware
    async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or allowed(request) is None:
            return await handler(request)
        headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": "600"}
        # Clients add headers of their own, so every header that the browser names is allowed.
        headers["Access-Control-Allow-Headers"] = request.headers.get("Access-Control-Request-Headers", "")
        return web.Response(status=204, headers=headers)

    async def let_read(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Vary"] = "Origin"
        origin = allowed(request)
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = "Retry-After, X-Ignored-Fields"

    app.middlewares.append(answer_preflights)
    app.on_response_prepare.append(let_read)


def authorised(api_keys: Sequence[str]) -> Middleware:
    """Return a middleware that refuses calls without a valid key before it reads their body."""
    keys = [key.encode() for key in api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys and request.path not in OPEN:
            kind, _, given = request.headers.get("Authorization", "").partition(" ")
            offered = given.strip().encode(errors="replace")
            fits = [hmac.compare_digest(offered, key) for key in keys]
            if kind.lower() != "bearer" or not any(fits):
                text = "Authorization must be Bearer and a key of this server"
                raise ApiError(text, status=401, code="invalid_api_key")
        return await handler(request)

    return check


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert every error of a handler to a response in OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        found = error
    except web.HTTPRequestEntityTooLarge as error:
        found = ApiError(f"the body is too large: {error.text}", status=413, code="body_too_large")
    except web.RequestPayloadError as error:
        found = ApiError(f"the body cannot be read: {error}", code="invalid_json")
    except web.HTTPException as error:
        found = ApiError(f"{request.method} {request.path:.200}: {error.reason}", status=error.status)
    except EngineDeadError as error:
        found = ApiError(str(error), status=503, code="engine_dead")
    except ConnectionError:
        return web.Response(status=CLIENT_IS_GONE)  # only for the access log
    except NOT_ERRORS:
        raise
    except BaseException:
        logger.exception("%s %s failed", request.method, request.rel_url.raw_path)
        found = internal_error()
    response = json_response(found.body(), status=found.status)
    if found.status in (429, 503):
        response.headers["Retry-After"] = "1"
    if found.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def read_body(part: Awaitable[bytes], limits: Limits, begun: float) -> bytes:
    """Read a part of a call's body, whose reading began at a time of the event loop."""
    try:
        return await asyncio.wait_for(part, begun + limits.body_timeout - asyncio.get_running_loop().time())
    except asyncio.TimeoutError:
        text = f"the body took longer than {limits.body_timeout:g} s"
        raise ApiError(text, status=408, code="timeout") from None


def check_content_type(request: web.Request) -> None:
    """Raise ApiError unless the content type is JSON, or the call has no body and is not of a web page.

    Web pages of other origins cannot send JSON without CORS, so they cannot call this server unless
    ``cors_origins`` names them. Browsers name the origin of a page in each of its POST calls.
    """
    is_pages = request.can_read_body or "Origin" in request.headers
    if is_pages and request.content_type != "application/json":
        raise ApiError(
            f"Content-Type must be application/json, got {request.content_type!r:.80}",
            status=415, code="unsupported_media_type",
        )  # fmt: skip


@contextlib.contextmanager
def hang_up_after(request: web.Request, seconds: float) -> Iterator[None]:
    """Close the client's connection if the body of this context takes longer."""
    assert request.transport is not None
    timer = asyncio.get_running_loop().call_later(seconds, request.transport.abort)
    try:
        yield
    finally:
        timer.cancel()
