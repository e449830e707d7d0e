"""The OpenAPI document of the server. Fields of calls are those that their parsers read."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from flashtile.engine.sampling_params import SamplingParams
from flashtile.engine.server.protocol import (
    IGNORED,
    SAMPLING,
    Body,
    ChatCall,
    CompletionCall,
    read_detokenize,
    read_folder,
    read_tokenize,
)
from flashtile.version import __version__

JSON_TYPES: dict[type, dict[str, Any]] = {
    bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"},
    str: {"type": "string"}, dict: {"type": "object"}, list: {"type": "array", "items": {}},
}  # fmt: skip

TEXTS_OR_TOKENS = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "array"}]}},
    ]
}
OF_CHECKED: dict[str, dict[str, Any]] = {
    "prompt": TEXTS_OR_TOKENS,
    "messages": {"type": "array", "items": {"$ref": "#/components/schemas/Message"}},
    "tokens": {"type": "array", "items": {"type": "integer"}},
    "tool_choice": {"oneOf": [{"type": "string"}, {"type": "object"}]},
    "tools": {"type": "array", "items": {"type": "object"}},
    "reasoning_effort": {"type": "string"},
    "structured_outputs": {"type": "object"},
    "length_penalty": {"type": "number"},
    "model": {"type": "string"},
    "model_path": {"type": "string"},
}
"""Schemas of fields that parsers check themselves."""

MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string"}, "content": {}},
    "required": ["role"],
    "additionalProperties": True,
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": "string", "nullable": True},
                "code": {"type": "string", "nullable": True},
            },
        }
    },
}

CONVERSATION = [{"role": "user", "content": "Hello"}]
READERS: dict[str, tuple[Callable[[Body, int], object], tuple[dict[str, Any], ...]]] = {
    "/v1/completions": (CompletionCall, ({"prompt": "def read(", "max_tokens": 20},)),
    "/v1/chat/completions": (
        ChatCall,
        (
            {"messages": CONVERSATION, "max_tokens": 20},
            {"messages": CONVERSATION, "max_completion_tokens": 20,
             "tools": [{"type": "function", "function": {"name": "f"}}]},
        ),
    ),
    "/tokenize": (lambda body, _: read_tokenize(body), ({"prompt": "Hello"}, {"messages": CONVERSATION})),
    "/detokenize": (lambda body, _: read_detokenize(body), ({"tokens": [72, 105]},)),
    "/update_weights_from_disk": (lambda body, _: read_folder(body), ({"model_path": "folder"},)),
}  # fmt: skip
"""Parser of the body of each path, given ``max_logprobs``, and calls with which it reads all fields. The
first call is an example."""

PARAMETERS = {
    "/v1/models/{name}": {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
    "/reset_prefix_cache": {
        "name": "reset_running_requests",
        "in": "query",
        "schema": {"type": "boolean", "default": False},
    },
    "/sleep": {"name": "level", "in": "query", "schema": {"type": "integer", "enum": [1, 2], "default": 1}},
    "/wake_up": {"name": "tags", "in": "query", "schema": {"type": "array", "items": {"type": "string"}}},
}
SUMMARIES = {
    ("post", "/v1/completions"): "Continue texts or tokens, several prompts in one call.",
    ("post", "/v1/chat/completions"): "Continue a conversation with the model's chat template.",
    ("post", "/tokenize"): "Convert a text or a conversation to tokens.",
    ("post", "/detokenize"): "Convert tokens to a text.",
    ("post", "/reset_prefix_cache"): "Empty the prefix cache.",
    ("get", "/v1/models"): "List the model.",
    ("get", "/v1/models/{name}"): "Describe the model.",
    ("get", "/health"): "200, or 503 if the engine accepts no requests.",
    ("get", "/version"): "The release of flashtile.",
    ("get", "/load"): "The number of calls in flight.",
    ("get", "/metrics"): "Metrics for Prometheus, by vLLM's names.",
    ("get", "/live"): "The state of the engine, which the page at / shows.",
    ("get", "/openapi.json"): "This document.",
}
"""Summaries of all methods and paths, except for pages in HTML and ``DEVELOPMENT``."""
DEVELOPMENT = {
    ("post", "/sleep"): "Free the memory of the KV cache and of the weights: ?level=1 or 2.",
    ("post", "/wake_up"): "Allocate this memory again, all or ?tags=weights or kv_cache.",
    ("get", "/is_sleeping"): "Whether memory that /sleep freed is not allocated yet.",
    ("post", "/update_weights_from_disk"): "Replace all weights by those of a folder.",
}
"""Summaries of what ``--server-dev-mode`` adds."""


class Recorder(Body):
    """A body that notes the schemas of the fields that a parser takes."""

    def __init__(self, fields: Mapping[str, Any]):
        super().__init__(fields)
        self.schemas: dict[str, dict[str, Any]] = {}

    def take(self, name: str, default: Any = None) -> Any:
        self.schemas.setdefault(name, OF_CHECKED.get(name, {}))
        return super().take(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        self.schemas[name] = {"type": "boolean", "default": default}
        return super().flag(name, default)

    def object(self, name: str) -> dict[str, Any]:
        self.schemas[name] = {"type": "object"}
        return super().object(name)

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        found: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": most}
        self.schemas[name] = found if default is None else {**found, "default": default}
        return super().integer(name, default, least, most)

    def text(self, name: str) -> str | None:
        self.schemas[name] = {"type": "string"}
        return super().text(name)


def fields_of(path: str, max_logprobs: int) -> dict[str, dict[str, Any]]:
    """Return the schema of each field of a call, by its name."""
    read, calls = READERS[path]
    found: dict[str, dict[str, Any]] = {"model": OF_CHECKED["model"]}
    for call in calls:
        recorder = Recorder(call)
        read(recorder, max_logprobs)
        found = recorder.schemas | found
    if "stream" in found:  # a call for answers
        found |= _of_sampling() | {name: JSON_TYPES[kind] for name, kind in IGNORED.items()}
    return dict(sorted(found.items()))


def _of_sampling() -> dict[str, dict[str, Any]]:
    hints = get_type_hints(SamplingParams)
    defaults = {name: getattr(SamplingParams, name) for name in SAMPLING}
    return {
        name: _schema(hints[name]) | ({} if default is None else {"default": default})
        for name, default in defaults.items()
    }


def _schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type of Python. A field that may be None may be left out."""
    if get_origin(hint) in (Union, types.UnionType):
        choices = [_schema(one) for one in get_args(hint) if one is not types.NoneType]
        return choices[0] if len(choices) == 1 else {"oneOf": choices}
    if get_origin(hint) is list:
        return {"type": "array", "items": _schema(get_args(hint)[0])}
    return dict(JSON_TYPES.get(get_origin(hint) or hint, {}))


@cache
def document(max_logprobs: int, development: bool = False) -> dict[str, Any]:
    """Return the document, in OpenAPI 3.0."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), summary in (SUMMARIES | (DEVELOPMENT if development else {})).items():
        operation: dict[str, Any] = {
            "summary": summary,
            "responses": {
                "200": {"description": "The answer."},
                "default": {
                    "description": "An error.",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        }
        if path in READERS:
            schema = {
                "type": "object",
                "properties": fields_of(path, max_logprobs),
                "additionalProperties": False,
            }
            content = {"application/json": {"schema": schema, "example": READERS[path][1][0]}}
            operation["requestBody"] = {"required": True, "content": content}
        if path in PARAMETERS:
            operation["parameters"] = [PARAMETERS[path]]
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.0.3",
        "info": {"title": "flashtile", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR, "Message": MESSAGE},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
