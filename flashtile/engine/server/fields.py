"""Reading of a JSON body field by field. Fields that are not read are refused by name."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from flashtile.engine.server.errors import ApiError

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "bad_words": ([],), "chat_template": (), "documents": ([],), "function_call": ("none",),
    "functions": ([],), "guided_choice": (), "guided_grammar": (), "guided_json": (), "guided_regex": (),
    "kv_transfer_params": (), "logits_processors": ([],), "metadata": ({},), "mm_processor_kwargs": (),
    "modalities": (["text"],), "parallel_tool_calls": (), "prediction": (), "prompt_embeds": (),
    "reasoning_effort": (), "response_format": ({"type": "text"},), "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"), "spaces_between_special_tokens": (True,), "store": (False,),
    "structured_outputs": (), "suffix": ("",), "verbosity": (), "vllm_xargs": (), "web_search_options": (),
}  # fmt: skip
"""Unsupported fields of OpenAI's and vLLM's interfaces, with neutral values that are accepted."""

METADATA = ("user",)
"""Fields that never change an answer."""


_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = 60


class Body:
    """A JSON object whose fields are taken one by one. Null counts as absent."""

    def __init__(self, fields: Mapping[str, Any]):
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self._left = set(self.fields)

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def take(self, name: str, default: Any = None) -> Any:
        self._left.discard(name)
        return self.fields.get(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if type(value) is not bool:
            raise wrong(name, "true or false", value)
        return value

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        value = self.take(name, default)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise wrong(name, f"an integer from {least} to {most}", value)
        return value

    def text(self, name: str, most: int) -> str | None:
        value = self.take(name)
        if value is not None and (not isinstance(value, str) or not 0 < len(value) <= most):
            raise wrong(name, f"a string of 1 to {most} characters", value)
        return value

    def object(self, name: str) -> dict[str, Any]:
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise wrong(name, "an object", value)
        return value

    def finish(self) -> None:
        """Refuse the fields that were not taken."""
        for name in sorted(self._left):
            value = self.fields[name]
            if name in METADATA and isinstance(value, str):
                continue
            if name in METADATA:
                raise wrong(name, "a string", value)
            if name not in UNSUPPORTED:
                raise ApiError(f"{name:.60} is not a field of this call", name[:60], code="unknown_field")
            if not any(type(value) is type(neutral) and value == neutral for neutral in UNSUPPORTED[name]):
                raise ApiError(f"{name} is not supported, got {shown(value)}", name, code="unsupported_field")


def shown(value: Any) -> str:
    """Return the first 60 characters of a value's representation."""
    return f"{_short.repr(value):.60}"


def wrong(name: str, allowed: str, value: Any) -> ApiError:
    return ApiError(f"{name} must be {allowed}, got {shown(value)}", name, code="invalid_value")


def parse(raw: bytes) -> Body:
    """Parse the body of a call.

    Raises:
        ApiError: the body is not a JSON object in UTF-8.
    """
    try:
        text = raw.decode("utf-8")
        fields = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            json.dumps(fields, ensure_ascii=False).encode()  # raises for lone surrogates, which have no UTF-8
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body must be JSON in UTF-8: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(f"the body must be a JSON object, got {type(fields).__name__}", code="invalid_json")
    return Body(fields)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
