"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        message: one sentence.
        param: the field that is wrong, if it is one.
        status: of HTTP.
        code: for programs.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(error: Exception, fields: Collection[str], param: str | None = None) -> ApiError:
    """An error of the engine's checks, whose message names the argument, for the client who gave the field.

    Args:
        fields: that the call has; the first of them that the message names is ``param``.
        param: where it names none.
    """
    message = str(error).replace("beam_width", "n")
    named = next((word for word in re.findall(r"\w+", message) if word in fields), param)
    code = "unsupported_value" if isinstance(error, NotImplementedError) else "invalid_value"
    return ApiError(message, named, code=code)
