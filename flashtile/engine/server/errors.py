"""Errors in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``, and JSON as it is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from aiohttp import web


class ApiError(Exception):
    """An error that a client gets instead of an answer. ``param``: the invalid field, if it is about one."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(error: Exception, fields: Collection[str], param: str | None = None) -> ApiError:
    """Convert an error of the engine's checks, whose message names an argument, to an :class:`ApiError`.

    Args:
        fields: fields of the call. The first field that the message names becomes the error's ``param``.
        param: the error's ``param`` if the message names no field.
    """
    message = str(error).replace("beam_width", "n")
    sources = ("structured_outputs", "response_format", "tools")
    source = next((name for name in sources if name in fields), sources[0])
    message = message.replace("structured_outputs", source)
    named = next((word for word in re.findall(r"\w+", message) if word in fields), param)
    code = "unsupported_value" if isinstance(error, NotImplementedError) else "invalid_value"
    return ApiError(message, named, code=code)


def internal_error() -> ApiError:
    """Return the error that clients get for a fault of the server. Its details are only logged."""
    return ApiError("the server failed; see its log", status=500, code="internal_error")


def shutting_down() -> ApiError:
    return ApiError("the server is being shut down", status=503, code="shutting_down")


def busy(limit: str) -> ApiError:
    return ApiError(f"{limit}: try again later", status=429, code="rate_limit_exceeded")


def to_json(value: Any) -> str:
    """Convert to strict JSON. Raise ValueError for NaN and infinities."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status, dumps=to_json)


def error_event(error: ApiError) -> bytes:
    """Return the error as a server-sent event, for a stream whose HTTP status has already been sent."""
    return f"data: {to_json(error.body())}\n\n".encode()
