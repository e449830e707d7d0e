"""Tokenizers and chat templates, read from a model's folder."""

from __future__ import annotations

import codecs
import contextlib
import functools
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashtile.engine.config import IN_VLLM, ConfigError, read_json

BYTES = "ByteTokenizer"
"""Value of ``tokenizer_class`` in tokenizer_config.json for tokens that are UTF-8 bytes."""

PLAIN_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Chat template of byte-level models, which have none of their own."""

END_MARK = "END_OF_FINAL_MESSAGE "
"""Text that is appended to the last message with ``continue_final_message``, to find the message's end in the
prompt. A template that strips messages removes its space. Messages that contain the text get a longer one."""

SHORT = 8
"""A text of at most this many characters per allowed token is encoded without a check of its length."""
PIECE, MARGIN = 2**14, 64
"""PIECE: number of characters of a longer text that are encoded together. MARGIN: number of tokens that the
cuts between pieces may add."""


def _characters_of_bytes() -> dict[str, int]:
    """Map each character of a byte-level token to its byte (GPT-2's encoder, Radford et al. 2019)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _characters_of_bytes()


class TextStream:
    """Incremental decoding of the tokens after ``before``.

    Tokens that stand for bytes pass through one UTF-8 decoder, which holds back the bytes of an incomplete
    character. The text of other tokens may depend on the token before them; a text's first token, for
    example, may lose its space. So the last token is decoded with and without the new one.
    """

    CONTEXT = 5  # more than the bytes of a character, so that one that ``before`` begins is completed

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], skip_special_tokens: bool):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.last: list[int] = []  # the last token, if there is one
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        shown = (token for token in reversed(before) if tokenizer.fixed_bytes(token, self.skip) != b"")
        for token in reversed(list(itertools.islice(shown, self.CONTEXT))):
            self.step(token)

    def step(self, token: int) -> str:
        """Append a token and return the new text. Bytes of an incomplete character are held back."""
        data = self.tokenizer.fixed_bytes(token, self.skip)
        if data == b"":
            return ""
        if data is not None:
            new = self.decoder.decode(data)
        else:
            before = self.tokenizer.decode(self.last, self.skip)
            new = self.flush() + self.tokenizer.decode([*self.last, token], self.skip)[len(before) :]
        self.last = [token]
        return new

    def flush(self) -> str:
        """Return a replacement character if bytes of an incomplete character were held back."""
        return self.decoder.decode(b"", final=True)


class Tokenizer(ABC):
    """Interface of a tokenizer. Its ``eos_token_ids`` end answers in addition to those of the model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: Mapping[str, str] = {}
    special_tokens: Mapping[str, str] = {}

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, by default with the tokenizer's special tokens, such as BOS."""

    def is_longer(self, text: str, most: int) -> bool:
        """Return True if a text certainly has more than ``most`` tokens, without encoding all of it.

        The text is encoded in pieces. Cuts between pieces change a few tokens, so the count must exceed twice
        ``most``.
        """
        if len(text) <= SHORT * most:
            return False
        count = 0
        for start in range(0, len(text), PIECE):
            count += len(self.encode(text[start : start + PIECE], add_special_tokens=False))
            if count > 2 * most + MARGIN:
                return True
        return False

    @abstractmethod
    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    @abstractmethod
    def fixed_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes | None:
        """Return the bytes that a token adds to every text. None: they depend on the tokens before it."""

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text, maybe part of a character; b"" if unknown."""
        data = self.fixed_bytes(token)
        if data is None:
            # A decoder may treat the first token of a text specially. Use the text that a second copy adds.
            once, twice = (self.decode([token] * count, False) for count in (1, 2))
            data = twice[len(once) :].encode()
        return data

    def spell(self, token: int) -> str:
        """Return a token as text, or in OpenAI's form ``bytes:\\xe2\\x98`` if it is part of a character."""
        if token not in self._spelt:
            data = self.token_bytes(token)
            try:
                self._spelt[token] = data.decode()
            except UnicodeDecodeError:
                self._spelt[token] = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return self._spelt[token]

    @functools.cached_property
    def _spelt(self) -> dict[int, str]:
        return {}

    def stream(self, before: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        """Return a stream that decodes the tokens after ``before``, without the text of ``before`` itself."""
        return TextStream(self, before, skip_special_tokens)

    def apply_chat_template(
        self,
        /,
        messages: Iterable[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation as a prompt, with the model's Jinja template in a sandbox.

        Args:
            messages: dicts with ``role`` and ``content``. The ``arguments`` of ``tool_calls`` may be JSON
                texts as in OpenAI's interface; the template gets them as objects.
            chat_template: a template, or the name of one of the model's templates. None: "tool_use" if there
                are tools and the model has that template, otherwise "default".
            add_generation_prompt: append the beginning of an assistant message.
            continue_final_message: end the prompt within the last message, so that the model continues it.
            tools: descriptions of tools for the template.
            variables: further variables of the template.

        Raises:
            ValueError: there is no template, or it cannot render these messages.
            ModuleNotFoundError: jinja2 is not installed.
        """
        from flashtile.engine.templates import render

        named = self.chat_templates
        chosen = chat_template or ("tool_use" if tools and "tool_use" in named else "default")
        template = named.get(chosen, chat_template)
        if template is None:
            has = f"only {', '.join(sorted(named))}" if named else "none"
            raise ValueError(f"chat_template must be given: the model's folder has {has}")
        if continue_final_message and add_generation_prompt:
            raise ValueError("add_generation_prompt must be False with continue_final_message=True")
        checked = [_checked_message(message) for message in messages]
        if not checked:
            raise ValueError("messages must not be empty, got []")
        mark = END_MARK
        if continue_final_message:
            while mark.rstrip() in str(checked):
                mark = f"_{mark}"
            checked[-1]["content"] += mark
        shown = {
            "messages": checked,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = render(template, {**self.special_tokens, "documents": None, **variables, **shown})
        if continue_final_message:
            stripped = mark.rstrip()
            text, *after = text.split(stripped)
            if len(after) != 1:
                renders = "renders the last message more than once" if after else (
                    "does not render the last message as given"
                )  # fmt: skip
                raise ValueError(f"continue_final_message must be False if the template {renders}, got True")
            if not after[0].startswith(mark[len(stripped) :]):  # the template strips messages
                content = checked[-1]["content"].removesuffix(mark)
                text = text.removesuffix(content[len(content.rstrip()) :])
        return text


class ByteTokenizer(Tokenizer):
    """Tokens are UTF-8 bytes, as in the demo's models. Tokens from 256 on have no text."""

    vocab_size = 256
    chat_templates: Mapping[str, str] = {"default": PLAIN_CHAT}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def fixed_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes | None:
        return bytes([token]) if token < 256 else b""


class FastTokenizer(Tokenizer):
    """The tokenizer in tokenizer.json, run by the ``tokenizers`` package.

    Args:
        max_tokens: number of tokens that the model has embeddings for. Added tokens beyond it are left out,
            for example the one for images in Gemma 3's tokenizer. Their texts are read as any other text.
    """

    def __init__(self, folder: Path, max_tokens: int | None = None):
        from tokenizers import Tokenizer as Loaded

        path = folder / "tokenizer.json"
        with _rust_errors(ConfigError, f"{path} is not a tokenizer"):
            self.loaded = Loaded.from_file(str(path))
            added = self.loaded.get_added_tokens_decoder()
            if max_tokens is not None and max(added, default=0) >= max_tokens:
                content = json.loads(self.loaded.to_str())
                content["added_tokens"] = [one for one in content["added_tokens"] if one["id"] < max_tokens]
                self.loaded = Loaded.from_str(json.dumps(content))
            self.loaded.encode("")  # fails if special tokens are missing from the vocabulary
        self.loaded.no_truncation()  # training may have left truncation and padding in the file
        self.loaded.no_padding()
        self.vocab_size = self.loaded.get_vocab_size(with_added_tokens=True)
        config = _tokenizer_config(folder)
        found = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        texts = {name: one.get("content") if isinstance(one, Mapping) else one for name, one in found.items()}
        self.special_tokens = {name: text for name, text in texts.items() if isinstance(text, str)}
        eos = self.loaded.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = () if eos is None else (eos,)
        self.chat_templates = _chat_templates(folder, config)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with _rust_errors(ValueError, "prompt must be a text that the tokenizer can encode"):
            return self.loaded.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.loaded.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def fixed_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes | None:
        if token not in self._fixed:
            self._fixed[token] = self._bytes_of(token)
        return b"" if skip_special_tokens and token in self._special else self._fixed[token]

    def _bytes_of(self, token: int) -> bytes | None:
        text = self.loaded.id_to_token(token)
        if text is None:
            return b""
        if "ByteLevel" in self.decoders and all(character in BYTE_OF for character in text):
            return bytes(BYTE_OF[character] for character in text)
        if "ByteFallback" in self.decoders and re.fullmatch("<0x[0-9A-Fa-f]{2}>", text):
            return bytes.fromhex(text[3:5])
        return None

    @functools.cached_property
    def _fixed(self) -> dict[int, bytes | None]:
        return {}

    @functools.cached_property
    def _special(self) -> set[int]:
        added = self.loaded.get_added_tokens_decoder()
        return {token for token, one in added.items() if one.special}

    @functools.cached_property
    def decoders(self) -> set[str]:
        """The types of the tokenizer's decoders."""
        decoder = self.loaded.decoder
        found = [] if decoder is None else [json.loads(decoder.__getstate__())]
        for one in found:
            found += one.get("decoders", ())
        return {one["type"] for one in found}


@contextlib.contextmanager
def _rust_errors(kind: type[Exception], message: str) -> Iterator[None]:
    """Turn errors of the ``tokenizers`` package into errors of a kind.

    The package raises bare Exceptions. Its Rust code panics with a BaseException that is no Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(f"{message}: {error!s:.200}") from None


def load_tokenizer(folder: Path, max_tokens: int | None = None) -> Tokenizer:
    """Load the tokenizer of a model's folder. ``max_tokens``: see :class:`FastTokenizer`.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ConfigError: a file of the tokenizer is invalid.
        ModuleNotFoundError: tokenizers is not installed (``pip install 'flashtile[engine]'``).
    """
    if _tokenizer_config(folder).get("tokenizer_class") == BYTES:
        return ByteTokenizer()
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json (give tokenizer=, or skip_tokenizer_init=True)"
        )
    return FastTokenizer(folder, max_tokens)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and the special tokens that older folders have in a separate file."""
    found: dict[str, Any] = {}
    for path in (folder / "special_tokens_map.json", folder / "tokenizer_config.json"):
        found |= read_json(path) if path.is_file() else {}
    return found


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name, from .jinja files or else from tokenizer_config.json."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    template = config.get("chat_template")
    listed = template if isinstance(template, list) else [{"name": "default", "template": template}]
    found = {one.get("name"): one.get("template") for one in listed if isinstance(one, Mapping)}
    return {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}


def _checked_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages must be dicts with a role and a content, got {message!r:.60}")
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's content parts; only text is supported
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
            got = [part.get("type") for part in parts]
            raise ValueError(
                f"messages must have parts of type 'text' only in their content, got {got!r:.80}{IN_VLLM}"
            )
        message["content"] = "".join(part["text"] for part in parts)
    elif content is None:
        message["content"] = ""
    elif not isinstance(content, str):
        raise ValueError(f"messages must have a string as content, got {type(content).__name__}")
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        message["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return message


def _with_object_arguments(call: Any) -> Any:
    """Return a tool call whose arguments are an object, from OpenAI's form, in which they are a JSON text.

    Arguments that are no object become an empty one. Models write such calls, and clients send them back.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)  # models write line breaks within strings
        except (ValueError, RecursionError):
            arguments = None
    arguments = arguments if isinstance(arguments, Mapping) else {}
    return {**call, "function": {**function, "arguments": arguments}}
