"""Structured output: answers whose text matches a JSON schema, a regular expression, a choice or a grammar.

llguidance compiles a structure to a matcher, which knows the tokens that may follow. Each sequence has a copy
of its request's matcher, and the host advances it by each of the sequence's tokens. The logits of the next
token are masked before the draw. The masks are computed while the device computes these logits.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, TimeoutError
from typing import Any

import torch
from torch import Tensor

from flashtile.engine.tokenizer import FastTokenizer, Tokenizer

MAX_CHARACTERS = 2**16
"""Largest number of characters of a structure. A structure twice as long may take a minute to compile."""
MAX_SECONDS = 30.0
"""How long a request waits for its structure. llguidance has limits, but takes hours to reach them for some
intersections of regular expressions."""
MAX_COMPILED = 64
"""Number of compiled structures that are kept for later requests."""
HARMONY = """
start: analysis* <|channel|> "final" <|message|> @answer
analysis: <|channel|> "analysis" <|message|> /(?s:.*)/ <|end|> <|start|> "assistant"
"""
"""Grammar of an answer of gpt-oss to a prompt that ends with ``<|start|>assistant``."""
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
"""The beginning of a rule in llama.cpp's GBNF."""
STACK_BYTES = 2**29
"""Bytes of the stack of the thread that compiles. The compiler recurses along rules and references, and an
overflow would end the process. Only the used part of a stack takes memory."""


class Structures:
    """Compiles the structures of requests. Several threads may use it.

    Args:
        tokenizer: the model's tokenizer. None: every structure is refused.
        vocab_size: number of columns of the logits.
        ends: end tokens. They are allowed where an answer may end.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, ends: Collection[int]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ends = [end for end in ends if end < vocab_size]
        self._lock = threading.Lock()  # however many clients there are, their structures take one processor
        self._compiled = functools.lru_cache(MAX_COMPILED)(self._submit)

    def matcher(self, structure: dict[str, Any], seconds: float | None = MAX_SECONDS) -> Any:
        """Return the matcher of a structure at the start of an answer. Advance only copies of it.

        Args:
            structure: ``structured_outputs`` of :class:`flashtile.engine.SamplingParams`.
            seconds: how long to wait until it is compiled. None: without a limit.

        Raises:
            ValueError: the structure is invalid, too large or not compiled in time, or there is no tokenizer.
            NotImplementedError: llguidance is not installed, or cannot read the tokenizer.
        """
        try:
            found = self.compile(structure).result(seconds)
        except TimeoutError:  # compilation goes on, because a thread cannot be stopped
            raise late(structure, seconds) from None
        if isinstance(found, Exception):
            raise type(found)(*found.args)  # a new one: the traceback of one that is kept would grow
        return found

    def compile(self, structure: dict[str, Any]) -> Future[Any]:
        """Start to compile a structure, unless it is compiled. The result is the matcher or an error.

        Raise ValueError at once if the structure is too large, or if there is no tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("structured_outputs must be None without a tokenizer")
        ((kind, value),) = ((kind, one) for kind, one in structure.items() if kind != "reasoning")
        if kind == "choice":
            kind, value = "regex", "|".join(map(re.escape, value))
        elif kind == "json_object":
            kind, value = "json", {"type": "object"}
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"structured_outputs must have at most {MAX_CHARACTERS} characters, got {len(text)}"
            )
        return self._compiled(kind, text, structure.get("reasoning"))

    def _submit(self, *structure: Any) -> Future[Any]:
        call: Future[Any] = Future()
        call.set_running_or_notify_cancel()  # other requests may wait for it, so it cannot be cancelled

        def work() -> None:
            try:
                with self._lock:
                    call.set_result(self._compile(*structure))
            except (ValueError, NotImplementedError) as error:
                call.set_result(error.with_traceback(None))
            except BaseException as error:
                call.set_exception(error)

        usual = threading.stack_size(STACK_BYTES)
        try:
            # A daemon, because the process must be able to end while a structure is compiled.
            threading.Thread(target=work, daemon=True).start()
        finally:
            threading.stack_size(usual)
        return call

    def _compile(self, kind: str, text: str, reasoning: str | None) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError:
            text = "structured_outputs need the package llguidance: pip install 'flashtile[engine]'"
            raise NotImplementedError(text) from None
        own = text
        if kind == "regex":
            own = json.dumps(json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"])
        elif kind == "grammar":
            own = json.dumps(_in_lark(text))
        grammars = [f'{{"name": "answer", "{"json_schema" if kind == "json" else "lark_grammar"}": {own}}}']
        limits = LLParserLimits(verbose_errors=False)
        try:
            if reasoning is not None:
                grammars.insert(0, json.dumps({"lark_grammar": self._before(reasoning)}))
            grammar = f'{{"grammars": [{", ".join(grammars)}]}}'
            found = LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
            found.compute_bitmask()  # the first mask may take much longer than later ones, or reach a limit
        # llguidance cannot read every tokenizer. Panics of its Rust code are BaseExceptions.
        except BaseException as error:
            raise NotImplementedError(f"structured_outputs failed in llguidance: {error!s:.200}") from None
        if found.is_error():
            raise _invalid(kind, text, error_of(found))
        return found

    def _before(self, reasoning: str) -> str:
        """Return the grammar of an answer that may reason, in which ``@answer`` stands for the structure.

        llguidance tells tokens that stand for ``<think>`` and ``</think>`` from other tokens with this text.
        """
        if reasoning == "harmony":
            return HARMONY
        begin = "<think>" if self._is_special("<think>") else '"<think>"'
        start = "thought" if reasoning == "begun" else f"({begin} thought)?"
        thought = 'thought: text LINES?\ntext[suffix="</think>"]: /(?s:.*)/'
        if self._is_special("</think>"):
            thought = "thought: /(?s:.*)/ </think> LINES?"
        return f"start: {start} @answer\n{thought}\nLINES: /\\n{{1,2}}/"

    def _is_special(self, text: str) -> bool:
        assert self._tokenizer is not None
        tokens = self._tokenizer.encode(text, False)
        return len(tokens) == 1 and self._tokens.is_special_token(tokens[0])

    @functools.cached_property
    def _tokens(self) -> Any:
        """llguidance's tokenizer, which has the model's vocabulary and one additional token.

        The additional token is the end token of models that have none. The logits have no column for it.
        """
        from llguidance import LLTokenizer

        size, ends = self._vocab_size + 1, self._ends or [self._vocab_size]
        if not isinstance(self._tokenizer, FastTokenizer):
            assert self._tokenizer is not None
            vocabulary: Any = _Vocabulary(self._tokenizer, size, ends[0])
            return LLTokenizer(vocabulary, n_vocab=size, eos_token=ends)
        padded = type(self._tokenizer.loaded).from_str(self._tokenizer.loaded.to_str())
        padded.add_special_tokens([f"<|no token {i}|>" for i in range(self._tokenizer.vocab_size, size)])
        return LLTokenizer(padded.to_str(), n_vocab=size, eos_token=ends)


class _Vocabulary:
    """The tokens of a tokenizer in the form that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokenizer: Tokenizer, size: int, end: int):
        self.eos_token_id = end
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, False)


def late(structure: dict[str, Any], seconds: float | None) -> ValueError:
    """Return the error for a structure that is not compiled within ``seconds``."""
    limit = f"within {seconds} s, after the structures that are compiled before it"
    return ValueError(f"structured_outputs must be compiled {limit}, got {structure!r:.60}")


def _in_lark(grammar: str) -> str:
    """Return a grammar in Lark's syntax. A grammar with a rule of GBNF is converted.

    llguidance's own search for Lark's syntax overlooks ``start[capture]:``. It also takes half a minute for
    60000 empty lines, in which no other thread runs.
    """
    if not GBNF_RULE.search(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # also RecursionError
        raise _invalid("grammar in GBNF", grammar, " ".join(str(error).split())) from None


def _invalid(kind: str, text: str, error: str) -> ValueError:
    return ValueError(f"structured_outputs must have a valid {kind}, got {text!r:.60}: {error:.200}")


def error_of(matcher: Any) -> str:
    """Return the error of a matcher in one line of at most 200 characters."""
    return f"{' '.join(matcher.get_error().replace('<non-verbose/>', '').split()):.200}"


def mask(logits: Tensor, matchers: Sequence[tuple[Any, int]]) -> Tensor:
    """Return logits (rows, vocab_size) with -inf for the tokens that structures forbid.

    ``matchers`` has (matcher, row) of each row with a structure.
    """
    rows, columns = logits.shape
    words = columns // 32 + 1  # the matchers have one token more than the logits
    bits = torch.full((rows, words), -1, dtype=torch.int32, pin_memory=logits.is_cuda, device="cpu")
    if len(matchers) == 1:
        ((matcher, row),) = matchers
        matcher.unsafe_compute_mask_ptr(bits[row].data_ptr(), 4 * words)
    else:
        _executor().unsafe_compute_mask_ptr(list(matchers), bits.data_ptr(), 4 * words, rows)
    octets = bits.to(logits.device, non_blocking=True).view(torch.uint8).unsqueeze(-1)
    forbidden = (octets >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1 == 0
    return logits.masked_fill(forbidden.view(rows, -1)[:, :columns], -torch.inf)


@functools.cache
def _executor() -> Any:
    """The threads that compute the masks of a batch."""
    from llguidance import LLExecutor

    return LLExecutor()
