"""The fields of a JSON body, taken one by one; what nobody takes is refused by name."""

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
"""Fields of OpenAI's and vLLM's interfaces that are not served, and the values that ask for nothing."""

METADATA = ("user",)
"""Fields that by their meaning change no answer."""


_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = 60


class Body:
    """A JSON object. A field that is null is one that is absent."""

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
        """Refuse what was not taken."""
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
    """The beginning of a value, however long it is."""
    return f"{_short.repr(value):.60}"


def wrong(name: str, allowed: str, value: Any) -> ApiError:
    return ApiError(f"{name} must be {allowed}, got {shown(value)}", name, code="invalid_value")


def parse(raw: bytes) -> Body:
    """The object in the body of a call.

    Raises:
        ApiError: it is none.
    """
    try:
        text = raw.decode("utf-8")
        fields = json.loads(text, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():
            json.dumps(fields, ensure_ascii=False).encode()  # halves of characters cannot be tokenized
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body must be JSON in UTF-8: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(f"the body must be a JSON object, got {type(fields).__name__}", code="invalid_json")
    return Body(fields)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
