"""Middlewares of a server and of the replicas' front: API keys, errors, access log."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from flashtile.engine.async_llm import EngineDeadError
from flashtile.engine.server.errors import ApiError, internal_error, json_response
from flashtile.engine.server.listener import Listener

OPEN = ("/", "/health")
"""Paths that need no key, because they tell nothing about requests."""

POLLED = ("/health", "/load", "/metrics", "/live")
"""Paths that programs poll. Only their errors are logged."""

CLIENT_IS_GONE = 499

logger = logging.getLogger("flashtile.server")


def request_key(name: str) -> Any:
    """Return a key for data of a request. Releases of aiohttp without ``RequestKey`` use strings."""
    return web.RequestKey(name, object) if hasattr(web, "RequestKey") else name


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
                seconds = time.monotonic() - begun
                path = request.rel_url.raw_path  # percent-encoded, so it cannot contain a line break
                logger.info("%s %s %.200s %d %.3f s", request.remote, request.method, path, status, seconds)

    return log


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
    except Exception:
        logger.exception("%s %s failed", request.method, request.rel_url.raw_path)
        found = internal_error()
    response = json_response(found.body(), status=found.status)
    if found.status in (429, 503):
        response.headers["Retry-After"] = "1"
    if found.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def check_content_type(request: web.Request) -> None:
    """Raise ApiError unless the content type is JSON.

    Web pages of other origins cannot send JSON without CORS, so they cannot call this server.
    """
    if request.content_type != "application/json":
        raise ApiError(
            f"Content-Type must be application/json, got {request.content_type!r:.80}",
            status=415, code="unsupported_media_type",
        )  # fmt: skip
