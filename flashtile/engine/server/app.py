"""The routes of the server, and what stands before all of them: keys, limits, errors."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from flashtile.engine.async_llm import EngineDeadError
from flashtile.engine.server import live, protocol
from flashtile.engine.server.chat import chat_completions
from flashtile.engine.server.completions import completions
from flashtile.engine.server.errors import ApiError, refused
from flashtile.engine.server.fields import Body, parse
from flashtile.engine.server.metrics import CONTENT_TYPE
from flashtile.engine.server.service import Service

Call = Callable[[web.Request, Service, Body], Awaitable[web.StreamResponse]]

OPEN = ("/", "/health")
"""Paths that need no key: they say nothing of any request."""

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'"
)
"""The page loads nothing, from here or elsewhere, but what it asks this server."""

CLIENT_IS_GONE = 499

PAGE = Path(__file__).with_name("page.html")

logger = logging.getLogger("flashtile.server")


def make_app(service: Service) -> web.Application:
    """The application; its caller runs it, and shuts the service's engine down after it."""
    app = web.Application(client_max_size=service.limits.max_body_bytes)
    app.middlewares.extend((answer_errors, _authorised(service)))
    get, post = app.router.add_get, app.router.add_post

    def bind(handler: Callable[[web.Request, Service], Awaitable[web.StreamResponse]]) -> Handler:
        async def bound(request: web.Request) -> web.StreamResponse:
            return await handler(request, service)

        return bound

    post("/v1/completions", _call(service, completions))
    post("/v1/chat/completions", _call(service, chat_completions))
    post("/tokenize", _call(service, _tokenize))
    post("/detokenize", _call(service, _detokenize))
    post("/reset_prefix_cache", bind(_reset_prefix_cache))
    get("/v1/models", bind(_models))
    get("/v1/models/{name:.+}", bind(_model))
    get("/health", bind(_health))
    get("/version", _version)
    get("/load", bind(_load))
    get("/metrics", bind(_metrics))
    get("/live", bind(_live))
    get("/", _page)
    return app


def _call(service: Service, answer: Call) -> Handler:
    """A handler of POST: counts the call, reads its body in time, checks the model."""

    async def handle(request: web.Request) -> web.StreamResponse:
        limits = service.limits
        if service.draining:
            raise ApiError("the server is being shut down", status=503, code="shutting_down")
        if service.in_flight >= limits.max_concurrent_requests:
            raise ApiError(
                f"the server answers {limits.max_concurrent_requests} calls at a time, try again later",
                status=429, code="rate_limit_exceeded",
            )  # fmt: skip
        service.in_flight += 1
        try:
            if request.content_type != "application/json":
                raise ApiError(
                    f"Content-Type must be application/json, got {request.content_type!r:.80}",
                    status=415, code="unsupported_media_type",
                )  # fmt: skip
            try:
                raw = await asyncio.wait_for(request.read(), limits.body_timeout)
            except asyncio.TimeoutError:
                raise ApiError(
                    f"the body took longer than {limits.body_timeout:g} s", status=408, code="timeout"
                ) from None
            body = parse(raw)
            service.check_model(body.take("model"))
            return await answer(request, service, body)
        finally:
            service.in_flight -= 1

    return handle


def _authorised(service: Service) -> Middleware:
    keys = [key.encode() for key in service.limits.api_keys]

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
    """Every error in one shape."""
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
        return web.Response(status=CLIENT_IS_GONE)  # which nobody reads
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        found = ApiError("the server failed; its log says why", status=500, code="internal_error")
    response = web.json_response(found.body(), status=found.status)
    if found.status in (429, 503):
        response.headers["Retry-After"] = "1"
    if found.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _tokenize(request: web.Request, service: Service, body: Body) -> web.Response:
    call, tokenizer = protocol.read_tokenize(body), service.tokenizer

    def work() -> web.Response:
        text = call.prompt if call.conversation is None else service.render(call.conversation)
        assert text is not None
        tokens = tokenizer.encode(text, call.add_special_tokens)
        answer = {"count": len(tokens), "max_model_len": service.engine.max_model_len, "tokens": tokens}
        if call.return_token_strs:
            answer["token_strs"] = [tokenizer.decode([token], False) for token in tokens]
        return web.json_response(answer)

    return await asyncio.to_thread(work)  # of a long text it takes seconds


async def _detokenize(request: web.Request, service: Service, body: Body) -> web.Response:
    tokens, most = protocol.read_detokenize(body), service.tokenizer.vocab_size
    if tokens and max(tokens) >= most:
        raise ApiError(f"tokens must be below {most}, got {max(tokens)}", "tokens", code="invalid_value")
    try:
        text = await asyncio.to_thread(service.tokenizer.decode, tokens, False)
        return web.json_response({"prompt": text})
    except ValueError as error:
        raise refused(error, (), "tokens") from None


async def _reset_prefix_cache(request: web.Request, service: Service) -> web.Response:
    count = await service.asynchronous.call(lambda engine: engine.reset_prefix_cache())
    return web.json_response({"blocks": count})


def _described(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name, "object": "model", "created": service.created, "owned_by": "flashtile",
        "root": service.model_name, "parent": None, "max_model_len": service.engine.max_model_len,
    }  # fmt: skip


async def _models(request: web.Request, service: Service) -> web.Response:
    return web.json_response({"object": "list", "data": [_described(service)]})


async def _model(request: web.Request, service: Service) -> web.Response:
    service.check_model(request.match_info["name"])
    return web.json_response(_described(service))


async def _health(request: web.Request, service: Service) -> web.Response:
    if not service.asynchronous.is_alive:
        raise ApiError("the engine takes no requests", status=503, code="engine_dead")
    return web.json_response({"status": "ok"})


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": metadata.version("flashtile")})


async def _load(request: web.Request, service: Service) -> web.Response:
    return web.json_response({"server_load": service.in_flight})


async def _metrics(request: web.Request, service: Service) -> web.Response:
    # Numbers read beside a step may be a step apart from each other: waiting for it would be worse.
    text = service.metrics.text(service.engine.stats())
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


async def _live(request: web.Request, service: Service) -> web.Response:
    return web.json_response(await service.asynchronous.call(live.snapshot))


async def _page(request: web.Request) -> web.Response:
    text = PAGE.read_text(encoding="utf-8")
    return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": POLICY})
