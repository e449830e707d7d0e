"""State shared by all calls (the engine, limits, metrics), and tokenization of prompts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashtile.engine.async_llm import AsyncLLM
from flashtile.engine.core import Engine
from flashtile.engine.llm import LLM
from flashtile.engine.sampling_params import SamplingParams
from flashtile.engine.server.errors import ApiError, busy, refused, shutting_down
from flashtile.engine.server.formats import Formats
from flashtile.engine.server.metrics import Metrics
from flashtile.engine.server.protocol import ApiCall, ChatCall, CompletionCall, Conversation, wrong
from flashtile.engine.tokenizer import Tokenizer

TRUNCATED = 4
"""Factor by which a text may be longer with ``truncate_prompt_tokens`` than without."""


@dataclass(frozen=True)
class Limits:
    """Limits of what one client may request from a server.

    Attributes:
        api_keys: valid keys. A client must send one of them as ``Authorization: Bearer KEY``. Empty: no key
            is needed.
        max_concurrent_requests: maximum number of calls answered at a time. Further calls get status 429.
        max_prompts, max_body_bytes: of one call.
        max_prompt_tokens: None: one less than the engine's ``max_model_len``.
        max_logprobs: maximum number of log-probabilities at each position.
        max_total_body_bytes: maximum number of bytes of the bodies of all calls that are being answered, with
            the log-probabilities of their prompts. Further calls get status 429, but one call at a time may
            have a body of any allowed size.
        body_timeout, request_timeout: maximum seconds to receive a body, and to finish an answer.
        idle_timeout: maximum seconds that a connection may stay open without a call.
        max_connections: maximum number of connections at a time. To accept another connection, the server
            closes the one that has been idle longest.
        max_priority: ``priority`` of a call may be from ``-max_priority`` to ``max_priority``.
        cors_origins: origins, such as "https://example.org", whose web pages may call the server. "*": all.
        server_dev_mode: serve the paths for trainers as well, by which clients can stop the engine.
        tls: certificates and key for TLS. None: connections are not encrypted.

    Raises:
        ValueError: a limit is invalid; the message names it.
    """

    api_keys: tuple[str, ...] = ()
    max_concurrent_requests: int = 1024
    max_prompts: int = 256
    max_prompt_tokens: int | None = None
    max_logprobs: int = 20
    max_body_bytes: int = 2**24
    max_total_body_bytes: int = 2**30
    body_timeout: float = 60.0
    request_timeout: float = 600.0
    idle_timeout: float = 75.0
    max_connections: int = 4096
    max_priority: int = 0
    access_log: bool = True
    cors_origins: tuple[str, ...] = ()
    server_dev_mode: bool = False
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_concurrent_requests", "max_prompts", "max_prompt_tokens", "max_body_bytes",
            "max_total_body_bytes", "body_timeout", "request_timeout", "idle_timeout", "max_connections",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {value}")
        if self.max_logprobs < 0:
            raise ValueError(f"max_logprobs must be at least 0, got {self.max_logprobs}")
        if not 0 <= self.max_priority < 2**31:
            raise ValueError(f"max_priority must be from 0 to {2**31 - 1}, got {self.max_priority}")
        if not all(key and key.isascii() and key.isprintable() for key in self.api_keys):
            raise ValueError("api_key must be printable ASCII and not empty")
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[!-.0-@\[-~]+", origin):
                raise ValueError(f"cors_origin must be * or scheme://host in lower case, got {origin!r:.80}")


@dataclass(frozen=True)
class TokenizedPrompt:
    """A tokenized prompt; ``text`` is None if the client sent tokens."""

    text: str | None
    tokens: list[int]


class Service:
    """The engine in its own thread, with the state that handlers of calls share.

    Args:
        llm: the model. Nothing else may use it afterwards.
        model_name: the name that clients use for the model.
        formats: formats of reasoning and tool calls, or "auto" for those that the chat template shows.

    Attributes:
        id: random text, different in each replica and after each start.
        in_flight: number of calls not answered yet.
        max_calls: maximum of ``in_flight``.
        body_bytes: bytes of these calls' bodies and of log-probabilities of their prompts. A body that has
            not arrived counts with its largest size.
        draining: whether the server is being shut down.
        on_death: called when a call finds that the engine has failed.
    """

    def __init__(self, llm: LLM, model_name: str, limits: Limits, formats: Formats):
        self.model_name, self.limits = model_name, limits
        self.created, self.id = int(time.time()), uuid.uuid4().hex
        self.metrics = Metrics(model_name)
        self.engine: Engine = llm.engine
        longest = self.engine.max_model_len
        self.max_prompt_tokens = min(longest - 1, limits.max_prompt_tokens or longest)
        self.sampling_defaults = llm.sampling_defaults
        self.formats = formats.of_model(self.engine.tokenizer.chat_templates if self.engine.tokenizer else {})
        self._counted = llm.engine.last_schedule
        self.asynchronous = AsyncLLM(llm.engine, on_step=self._count_step)
        self.in_flight, self.max_calls, self.body_bytes = 0, limits.max_concurrent_requests, 0
        self.draining = False
        self.on_death: Callable[[], None] = lambda: None

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ApiError("there is no tokenizer: prompts must be tokens", code="no_tokenizer")
        return self.engine.tokenizer

    def check_open(self) -> None:
        """Raise ApiError if the server is being shut down."""
        if self.draining:
            raise shutting_down()

    @contextlib.contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count further bytes of a call until it ends. Raise ApiError if calls together have too many."""
        most = self.limits.max_total_body_bytes
        if size and self.in_flight > 1 and self.body_bytes + size > most:
            raise busy(f"all bodies and log-probabilities of prompts together have at most {most} bytes")
        self.body_bytes += size
        try:
            yield
        finally:
            self.body_bytes -= size

    def check_model(self, name: object) -> None:
        """Raise ApiError if a call names another model. A call may leave the model out."""
        if name is not None and name != self.model_name:
            raise ApiError(
                f"model must be {self.model_name!r}, got {name!r:.100}", "model",
                status=404, code="model_not_found",
            )  # fmt: skip

    async def prepare(self, call: CompletionCall | ChatCall) -> list[TokenizedPrompt]:
        """Tokenize a call's prompts. Texts are tokenized in another thread."""
        limits = self.limits
        if self.engine.is_sleeping:
            raise ApiError("the engine sleeps until POST /wake_up", status=503, code="engine_sleeping")
        if abs(call.priority) > limits.max_priority:
            allowed = f"from {-limits.max_priority} to {limits.max_priority}"
            none = "0, because this server sets no priorities"
            raise wrong("priority", allowed if limits.max_priority else none, call.priority)
        if isinstance(call, CompletionCall):
            if len(call.prompts) > limits.max_prompts:
                raise wrong("prompt", f"at most {limits.max_prompts} prompts", len(call.prompts))
            if all(isinstance(prompt, list) for prompt in call.prompts):
                return self._prepare(call)
        return await asyncio.to_thread(self._prepare, call)

    def render(self, conversation: Conversation) -> str:
        """Render a conversation as a prompt with the model's chat template."""
        count, most = len(conversation.messages), self.engine.max_model_len
        if count > most:  # each message takes at least a token
            raise self.too_long("messages", f"at most {most} messages", count)
        templates, text = self.tokenizer.chat_templates, None
        template = templates.get("tool_use", templates.get("default", ""))
        if conversation.calls and not re.search(r"\btools\b", template):
            text = "tools must be absent: the model's chat template does not show tools to the model"
        elif conversation.calls and self.formats.tools is None:
            text = "tools need the format of the model's calls: start the server with --tool-call-parser"
        if text is not None:
            raise ApiError(text, "tools", code="unsupported_field")
        try:
            return self.tokenizer.apply_chat_template(
                conversation.messages, None, conversation.add_generation_prompt,
                conversation.continue_final_message, conversation.tools, **conversation.chat_template_kwargs,
            )  # fmt: skip
        except ValueError as error:
            raise refused(error, ("messages",), "messages") from None

    def set_max_tokens(self, call: ApiCall, prompts: list[TokenizedPrompt]) -> None:
        """Check ``max_tokens`` of a call, or set it for a chat call that does not give it.

        The maximum is the engine's ``max_model_len`` minus the length of the longest prompt. ApiError is
        raised if the given ``max_tokens`` is larger. A chat call without ``max_tokens`` gets the least of the
        maximum, the model's own default and the number of tokens that the KV cache can hold after the prompt.
        It gets at least 1.
        """
        engine, manager, params = self.engine, self.engine.scheduler.manager, call.params
        longest = max(len(prompt.tokens) for prompt in prompts)
        room = engine.max_model_len - longest
        name = "max_completion_tokens" if "max_completion_tokens" in call.fields else "max_tokens"
        if name in call.fields or isinstance(call, CompletionCall):
            assert params.max_tokens is not None
            if params.max_tokens > room:
                raise self.too_long(name, f"at most {room} after a prompt of {longest}", params.max_tokens)
            return
        if manager.window_left < 0:  # with a window, the cache does not grow with the length
            pool = manager.pool
            room = min(room, (pool.num_blocks - pool.null_blocks) * manager.block_size - longest)
        params.max_tokens = max(1, room if params.max_tokens is None else min(room, params.max_tokens))

    def _prepare(self, call: CompletionCall | ChatCall) -> list[TokenizedPrompt]:
        if isinstance(call, ChatCall):
            text, params = self.render(call.conversation), call.params
            if isinstance(params, SamplingParams) and call.conversation.separate_reasoning:
                params.reasoning = self.formats.reasoning_form(text)
                if params.structured_outputs is not None:
                    structure = {**params.structured_outputs, "reasoning": params.reasoning}
                    params.structured_outputs = structure
            return [self._tokenized(call, "messages", text)]
        return [self._tokenized(call, "prompt", prompt) for prompt in call.prompts]

    def encode(self, param: str, text: str, most: int, add_special_tokens: bool) -> list[int]:
        """Encode the text of a field, but not all of it if it certainly has more than ``most`` tokens."""
        try:
            if self.tokenizer.is_longer(text, most):
                raise self.too_long(param, f"at most {most} tokens", f"many more in {len(text)} characters")
            return self.tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise refused(error, (param,), param) from None

    def too_long(self, param: str, allowed: str, got: object) -> ApiError:
        """Return the error for too many tokens, in the words that OpenAI's clients look for."""
        longest = f"This model's maximum context length is {self.engine.max_model_len} tokens"
        message = f"{longest}, so the prompt is too long: {param} must be {allowed}, got {got}"
        return ApiError(message, param, code="context_length_exceeded")

    def _tokenized(self, call: ApiCall, param: str, prompt: str | list[int]) -> TokenizedPrompt:
        if isinstance(prompt, str):
            truncated = call.truncate_prompt_tokens is not None
            most = self.max_prompt_tokens * (TRUNCATED if truncated else 1)
            text, tokens = prompt, self.encode(param, prompt, most, call.add_special_tokens)
        else:
            text, tokens = None, prompt
        if call.truncate_prompt_tokens is not None and len(tokens) > call.truncate_prompt_tokens:
            text, tokens = None, tokens[-call.truncate_prompt_tokens :]
        if len(tokens) > self.max_prompt_tokens:
            raise self.too_long(param, f"at most {self.max_prompt_tokens} tokens", len(tokens))
        return TokenizedPrompt(text, tokens)

    def _count_step(self, engine: Engine) -> None:
        """Record the number of tokens of the engine's last step. Runs on the engine's thread."""
        if engine.last_schedule is not self._counted:
            self._counted = engine.last_schedule
            self.metrics.observe("iteration_tokens_total", self._counted.num_tokens)
