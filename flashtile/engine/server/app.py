"""The routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import cache, partial
from importlib import metadata
from importlib.resources import files
from typing import Any

from aiohttp import web

from flashtile.engine.config import IN_VLLM
from flashtile.engine.core import Engine
from flashtile.engine.server.answers import ChatCompletions, Completions, complete
from flashtile.engine.server.errors import ApiError, busy, json_response, refused
from flashtile.engine.server.listener import Listener
from flashtile.engine.server.metrics import CONTENT_TYPE
from flashtile.engine.server.middlewares import add_middlewares, check_content_type, read_body, request_key
from flashtile.engine.server.openapi import DEVELOPMENT, document
from flashtile.engine.server.protocol import (
    Body,
    parse,
    read_detokenize,
    read_folder,
    read_reset,
    read_tokenize,
    wrong,
)
from flashtile.engine.server.service import Service
from flashtile.files import DESIGN

BODY = request_key("body")
"""Key of a request's :class:`Body`."""

Call = Callable[[web.Request, Service, Body], Awaitable[web.StreamResponse]]

POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'"
)
"""Content security policy of the web page: it loads no resources and connects only to this server."""

UNSERVED = {
    "/v1/audio/transcriptions": "audio", "/v1/audio/translations": "audio", "/classify": "classification",
    "/v1/embeddings": "embeddings", "/pooling": "embeddings", "/v1/load_lora_adapter": "LoRA",
    "/v1/unload_lora_adapter": "LoRA", "/rerank": "reranking", "/v1/rerank": "reranking",
    "/v2/rerank": "reranking", "/v1/responses": "OpenAI's Responses interface", "/score": "scoring",
    "/v1/score": "scoring",
}  # fmt: skip
"""Paths of OpenAI's and vLLM's interfaces that are refused, with the names of what they do."""

ASSETS = files("flashtile.engine.server") / "assets"

MAX_SEQUENCES = 64
MAX_BLOCKS = 4096
"""Maximum numbers of sequences and of blocks that the web page shows. Its totals count all of them."""
WHOLE_POOL = 512
"""Maximum number of blocks of a pool that the page shows whole. Of larger pools it shows blocks in use."""


def make_app(service: Service, listener: Listener) -> web.Application:
    """Make the application. The caller runs it, and shuts down the service's engine afterwards."""
    app = web.Application(client_max_size=service.limits.max_body_bytes)
    add_middlewares(app, listener, service.limits)
    app.on_response_prepare.append(_name_ignored)

    posts = {"/reset_prefix_cache": _reset_prefix_cache}
    calls: dict[str, Call] = {
        "/v1/completions": partial(complete, Completions),
        "/v1/chat/completions": partial(complete, ChatCompletions),
        "/tokenize": _tokenize, "/detokenize": _detokenize,
    }  # fmt: skip
    gets = {
        "/v1/models": _models, "/v1/models/{name:.+}": _model, "/health": _health, "/version": _version,
        "/load": _load, "/metrics": _metrics, "/live": _live, "/openapi.json": _openapi,
    }  # fmt: skip
    absent = {path: f"{name} is not supported{IN_VLLM}" for path, name in UNSERVED.items()}
    if service.limits.server_dev_mode:
        calls["/update_weights_from_disk"] = _update_weights
        gets["/is_sleeping"] = _is_sleeping
        posts |= {"/sleep": _sleep, "/wake_up": _wake_up}
    else:
        absent |= {path: f"{path} is off: start the server with --server-dev-mode" for _, path in DEVELOPMENT}
    app.add_routes(
        [
            *(web.post(path, partial(_call, service, call)) for path, call in calls.items()),
            *(web.post(path, partial(post, service)) for path, post in posts.items()),
            *(web.route("*", path, partial(_refuse, text)) for path, text in absent.items()),
            *(web.get(path, partial(get, service)) for path, get in gets.items()),
            web.get("/", partial(_conversation, service)),
            web.get("/docs", partial(_page, _html("docs.html"))),
        ]
    )
    return app


async def _call(service: Service, call: Call, request: web.Request) -> web.StreamResponse:
    """Answer a POST: count the call, read its body within a time limit and check its model."""
    limits = service.limits
    service.check_open()
    if service.in_flight >= service.max_calls:
        raise busy(f"the server answers at most {service.max_calls} calls at a time")
    coded = "Content-Encoding" in request.headers or request.content_length is None
    size = limits.max_body_bytes if coded else min(request.content_length or 0, limits.max_body_bytes)
    if service.body_bytes and service.body_bytes + size > limits.max_total_body_bytes:
        raise busy(f"all bodies together have at most {limits.max_total_body_bytes} bytes")
    service.in_flight += 1
    service.body_bytes += size
    try:
        check_content_type(request)
        raw = await read_body(request.read(), limits, asyncio.get_running_loop().time())
        service.body_bytes += len(raw) - size
        size = len(raw)
        body = request[BODY] = parse(raw, service.sampling_defaults)
        service.check_model(body.take("model"))
        return await call(request, service, body)
    finally:
        service.in_flight -= 1
        service.body_bytes -= size


async def _refuse(text: str, request: web.Request) -> web.StreamResponse:
    raise ApiError(text, status=404, code="unsupported_path")


async def _name_ignored(request: web.Request, response: web.StreamResponse) -> None:
    """Name the call's fields that had no effect in the header ``X-Ignored-Fields``."""
    body: Body | None = request.get(BODY)
    if body is not None and body.ignored:
        response.headers["X-Ignored-Fields"] = ", ".join(body.ignored)


async def _tokenize(request: web.Request, service: Service, body: Body) -> web.Response:
    given, add_special_tokens, return_token_strs = read_tokenize(body)
    tokenizer = service.tokenizer

    def work() -> web.Response:
        param, text = ("prompt", given) if isinstance(given, str) else ("messages", service.render(given))
        tokens = service.encode(param, text, service.engine.max_model_len, add_special_tokens)
        answer = {"count": len(tokens), "max_model_len": service.engine.max_model_len, "tokens": tokens}
        if return_token_strs:
            answer["token_strs"] = [tokenizer.decode([token], False) for token in tokens]
        return json_response(answer)

    return await asyncio.to_thread(work)  # long texts take seconds


async def _detokenize(request: web.Request, service: Service, body: Body) -> web.Response:
    tokens, longest = read_detokenize(body), service.engine.max_model_len
    if len(tokens) > longest:
        raise service.too_long("tokens", f"at most {longest} tokens", len(tokens))
    if tokens and max(tokens) >= service.tokenizer.vocab_size:
        raise wrong("tokens", f"below {service.tokenizer.vocab_size}", max(tokens))
    return json_response({"prompt": await asyncio.to_thread(service.tokenizer.decode, tokens, False)})


async def _reset_prefix_cache(service: Service, request: web.Request) -> web.Response:
    check_content_type(request)
    running = read_reset(request.query)
    count = await service.asynchronous.call(lambda engine: engine.reset_prefix_cache(running))
    return json_response({"blocks": count})


async def _sleep(service: Service, request: web.Request) -> web.Response:
    check_content_type(request)
    given: dict[str, Any] = {name: int(x) if x.isdecimal() else x for name, x in request.query.items()}
    with _clients_errors(given):
        await service.asynchronous.sleep(**given)
    return await _is_sleeping(service, request)


async def _wake_up(service: Service, request: web.Request) -> web.Response:
    check_content_type(request)
    given = {name: request.query.getall(name) for name in request.query}
    with _clients_errors(given):
        await service.asynchronous.wake_up(**given)
    return await _is_sleeping(service, request)


async def _is_sleeping(service: Service, request: web.Request) -> web.Response:
    return json_response({"is_sleeping": await service.asynchronous.is_sleeping()})


async def _update_weights(request: web.Request, service: Service, body: Body) -> web.Response:
    folder = read_folder(body)
    with _clients_errors(body.fields, "model_path"):
        await service.asynchronous.update_weights(folder)
    return json_response({"success": True, "message": f"the weights are those of {folder}"})


@contextlib.contextmanager
def _clients_errors(fields: Collection[str], param: str | None = None) -> Iterator[None]:
    """Convert what the engine refuses to an :class:`ApiError`."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError, FileNotFoundError) as error:
        raise refused(error, fields, param) from None


def _described(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name, "object": "model", "created": service.created, "owned_by": "flashtile",
        "root": service.model_name, "parent": None, "max_model_len": service.engine.max_model_len,
    }  # fmt: skip


async def _models(service: Service, request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_described(service)]})


async def _model(service: Service, request: web.Request) -> web.Response:
    service.check_model(request.match_info["name"])
    return json_response(_described(service))


async def _health(service: Service, request: web.Request) -> web.Response:
    service.check_open()
    if not service.asynchronous.is_alive:
        raise ApiError("the engine takes no requests", status=503, code="engine_dead")
    return json_response({"status": "ok"})


async def _version(service: Service, request: web.Request) -> web.Response:
    return json_response({"version": metadata.version("flashtile")})


async def _openapi(service: Service, request: web.Request) -> web.Response:
    return json_response(document(service.limits.max_logprobs, service.limits.server_dev_mode))


async def _load(service: Service, request: web.Request) -> web.Response:
    return json_response({"server_load": service.in_flight})


async def _metrics(service: Service, request: web.Request) -> web.Response:
    # Counters read during a step may mix two steps. Waiting for the end of the step would be worse.
    text = service.metrics.text(service.engine.stats())
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


async def _live(service: Service, request: web.Request) -> web.Response:
    return json_response({"server": service.id, **await service.asynchronous.call(_snapshot)})


def _snapshot(engine: Engine) -> dict[str, Any]:
    """Return the state of blocks and running sequences for the web page, without any text of a request.

    This must run on the engine's thread.

    ``blocks`` are the numbers of blocks to show, and ``refs`` has one digit for each of them, which is the
    number of references to the block, including that of the prefix cache, or 9 if there are more. The first
    ``null_blocks`` blocks of the pool hold no tokens and are left out.
    """
    scheduler, stats = engine.scheduler, engine.stats()
    manager, pool = scheduler.manager, scheduler.manager.pool
    shown = scheduler.running[:MAX_SEQUENCES]
    if pool.num_blocks - pool.null_blocks <= WHOLE_POOL:
        blocks = list(range(pool.null_blocks, pool.num_blocks))
    else:
        in_use = pool.refs_tensor[pool.null_blocks :].nonzero()[:MAX_BLOCKS, 0] + pool.null_blocks
        blocks = in_use.tolist()
    computed = {id(entry.sequence): entry.num_tokens for entry in engine.last_schedule.entries}
    return {
        "block_size": manager.block_size,
        "num_blocks": pool.num_blocks,
        "null_blocks": pool.null_blocks,
        "num_free": len(pool.free),
        "num_cached": len(pool.cached),
        "blocks": blocks,
        "refs": "".join(str(min(9, pool.refs[block])) for block in blocks),
        "cache_usage": stats.cache_usage,
        "chat_template": _has_chat_template(engine),
        "max_num_seqs": scheduler.max_num_seqs,
        "num_running": stats.running,
        "num_waiting": stats.waiting,
        "num_preemptions": stats.num_preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "prefix_hits": stats.prefix_hits,
        "step_tokens": engine.last_schedule.num_tokens,
        "running": [
            {
                "request_id": one.request.request_id,
                "index": one.index,
                "prompt_tokens": one.request.num_prompt,
                "computed": one.num_computed,
                "tokens": one.num_tokens,
                "step_tokens": computed.get(id(one), 0),
                "blocks": (
                    [] if one.block_sequence is None else manager.blocks(one.block_sequence)[:MAX_BLOCKS]
                ),
            }
            for one in shown
        ],
    }


def _has_chat_template(engine: Engine) -> bool:
    return engine.tokenizer is not None and "default" in engine.tokenizer.chat_templates


async def _conversation(service: Service, request: web.Request) -> web.Response:
    page = _html("page.html")
    if _has_chat_template(service.engine):
        page = page.replace('data-chat="no"', 'data-chat="yes"', 1)
    return await _page(page, request)


async def _page(html: str, request: web.Request) -> web.Response:
    return web.Response(text=html, content_type="text/html", headers={"Content-Security-Policy": POLICY})


@cache
def _html(name: str) -> str:
    """Return one of the server's web pages with its styles and its script, as one HTML file."""
    page = (ASSETS / name).read_text("utf-8")
    for path in (DESIGN, *(ASSETS / part for part in ("page.css", "page.js", "zh.json"))):
        page = page.replace(f"/* {path.name} */", path.read_text("utf-8"))
    return page
