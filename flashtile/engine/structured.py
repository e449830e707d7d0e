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
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, TimeoutError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.engine.request import NOT_ERRORS
from flashtile.engine.structure_trial import Trial, Vocabulary, compile_grammar, start_thread
from flashtile.engine.tokenizer import FastTokenizer, Tokenizer

MAX_CHARACTERS = 2**16
"""Largest number of characters of a structure. A structure twice as long may take a minute to compile."""
MAX_SECONDS = 30.0
"""How long a request waits for its structure."""
QUICK_SECONDS, SLOW_SECONDS = 0.5, 10.0
"""Seconds of a processor in which a structure is compiled. One that takes more than the first waits only for
other slow ones, and other structures do not wait for it. One that takes more than the second is refused."""
MAX_KEPT, MAX_KEPT_BYTES = 1024, 2**28
"""Maximum number of structures that are kept for later requests, and maximum number of their bytes."""
HARMONY = """
start: analysis* <|channel|> "final" <|message|> @answer
analysis: <|channel|> "analysis" <|message|> /(?s:.*)/ <|end|> <|start|> "assistant"
"""
"""Grammar of an answer of gpt-oss to a prompt that ends with ``<|start|>assistant``."""
NOT_CONTINUED = "structured_outputs could not be continued"
"""Beginning of the error of an answer whose matcher reached a limit, as in a grammar that cannot end."""
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
"""The beginning of a rule in llama.cpp's GBNF."""


class Compiled(NamedTuple):
    """A structure's matcher at the start of an answer, and the bytes that compiling it took."""

    matcher: Any
    size: int


class Structures:
    """Compiles the structures of requests. Several threads may use it.

    A structure is compiled in another process first, with limits of time and memory. Only then is it compiled
    here, where nothing could end it.

    Args:
        tokenizer: the model's tokenizer. None: every structure is refused.
        vocab_size: number of columns of the logits.
        ends: end tokens. They are allowed where an answer may end.
        trusting: compile structures without a trial, because another process has tried them.

    Attributes:
        on_success: called with (structure, bytes) after the trial of a structure, on a thread of its own.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, ends: Collection[int], trusting: bool = False
    ):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ends = [end for end in ends if end < vocab_size]
        self._trusting, self._lock = trusting, threading.Lock()
        self._trials = [Trial(self._vocabulary, seconds) for seconds in (QUICK_SECONDS, SLOW_SECONDS)]
        self._kept: OrderedDict[tuple[str, str, str | None], Future[Any]] = OrderedDict()
        self.on_success: Callable[[dict[str, Any], int], None] = lambda structure, size: None

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
        except TimeoutError:  # its trial goes on, because other requests may wait for it
            raise late(structure, seconds) from None
        if isinstance(found, Exception):
            raise type(found)(*found.args)  # a new one: the traceback of one that is kept would grow
        return found.matcher

    def copies(self, structure: dict[str, Any], count: int, seconds: float | None) -> list[Any]:
        """Return ``count`` copies of a structure's :meth:`matcher`, or raise its errors.

        All are made before a request is queued, because one that fails would leave a step half done.
        """
        matcher = self.matcher(structure, seconds)
        try:
            return [matcher.deep_copy() for _ in range(count)]
        except NOT_ERRORS:
            raise
        except BaseException as error:
            raise _failed(error) from None

    def compile(self, structure: dict[str, Any], size: int = 0) -> Future[Any]:
        """Start to compile a structure, unless it is compiled. The result is :class:`Compiled` or an error.

        ``size`` is the number of its bytes without a trial. Raise ValueError at once if the structure is too
        large, or if there is no tokenizer.
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
        key = kind, text, structure.get("reasoning")
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            call = self._kept[key] = Future[Any]()
        call.set_running_or_notify_cancel()  # other requests may wait for it, so it cannot be cancelled

        def work() -> None:
            found: Any
            try:
                found = self._compile(structure, *key, size)
            except (ValueError, NotImplementedError) as error:
                found = error.with_traceback(None)
            except TimeoutError:  # others may have better luck later
                with self._lock:
                    self._kept.pop(key, None)
                found = late(structure, MAX_SECONDS)
            except BaseException as error:
                found = error
            if isinstance(found, (Compiled, ValueError, NotImplementedError)):
                call.set_result(found)
            else:
                call.set_exception(found)
            self._drop_oldest()

        start_thread(work)
        return call

    def _drop_oldest(self) -> None:
        """Drop the structures that were not used for the longest time, until the others are small enough."""
        with self._lock:
            left, count = MAX_KEPT_BYTES, MAX_KEPT
            for key, call in reversed(list(self._kept.items())):
                if not call.done():
                    continue
                found = None if call.exception() else call.result()
                left -= len(key[1]) + (found.size if isinstance(found, Compiled) else 0)
                count -= 1
                if min(left, count) < 0:
                    del self._kept[key]

    def _compile(
        self, structure: dict[str, Any], kind: str, text: str, reasoning: str | None, size: int
    ) -> Compiled:
        try:
            grammar = self._grammar(kind, text, reasoning)
            tokens = self._tokens  # raises here, not in a trial, if llguidance cannot read the tokenizer
            if self._trusting:
                return Compiled(self._matcher(tokens, kind, text, grammar), size)
            deadline = time.monotonic() + MAX_SECONDS
            for trial in self._trials:
                # The lock also covers the second compilation: however many clients there are, their quick
                # structures take one processor, and their slow ones another.
                if not trial.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                try:
                    found = trial.bytes_of(grammar)
                    if found is not None:
                        self.on_success(structure, found)
                        return Compiled(self._matcher(tokens, kind, text, grammar), found)
                finally:
                    trial.lock.release()
        except (ValueError, NotImplementedError, TimeoutError):
            raise
        except BaseException as error:  # panics of Rust code are BaseExceptions
            raise _failed(error) from None
        raise late(structure, SLOW_SECONDS)

    def _grammar(self, kind: str, text: str, reasoning: str | None) -> str:
        """Return the grammar of answers with a structure, in llguidance's JSON."""
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError:
            text = "structured_outputs need the package llguidance: pip install 'flashtile[engine]'"
            raise NotImplementedError(text) from None
        own = text
        if kind == "regex":
            own = json.dumps(json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"])
        elif kind == "grammar":
            own = json.dumps(_in_lark(text))
        grammars = [f'{{"name": "answer", "{"json_schema" if kind == "json" else "lark_grammar"}": {own}}}']
        if reasoning is not None:
            grammars.insert(0, json.dumps({"lark_grammar": self._before(reasoning)}))
        return f'{{"grammars": [{", ".join(grammars)}]}}'

    def _matcher(self, tokens: Any, kind: str, text: str, grammar: str) -> Any:
        found = compile_grammar(tokens, grammar)
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
        try:
            return self._vocabulary().load()
        except BaseException as error:  # llguidance cannot read every tokenizer
            raise _failed(error) from None

    def _vocabulary(self) -> Vocabulary:
        """Return the model's vocabulary and one additional token.

        The additional token is the end token of models that have none. The logits have no column for it.
        """
        size, ends = self._vocab_size + 1, self._ends or [self._vocab_size]
        if not isinstance(self._tokenizer, FastTokenizer):
            assert self._tokenizer is not None
            return Vocabulary([self._tokenizer.token_bytes(token) for token in range(size)], size, ends)
        padded = type(self._tokenizer.loaded).from_str(self._tokenizer.loaded.to_str())
        padded.add_special_tokens([f"<|no token {i}|>" for i in range(self._tokenizer.vocab_size, size)])
        return Vocabulary(padded.to_str(), size, ends)


def late(structure: dict[str, Any], seconds: float | None) -> ValueError:
    """Return the error for a structure that is not compiled within ``seconds``."""
    limit = f"within {seconds} s, after the structures that are compiled before it"
    return ValueError(f"structured_outputs must be compiled {limit}, got {structure!r:.60}")


def _failed(error: BaseException) -> NotImplementedError:
    return NotImplementedError(f"structured_outputs failed in llguidance: {error!s:.200}")


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


def mask(logits: Tensor, matchers: Sequence[tuple[Any, int]]) -> tuple[Tensor, dict[int, str]]:
    """Return logits (rows, vocab_size) with -inf for the tokens that structures forbid, and errors by row.

    ``matchers`` has (matcher, row) of each row with a structure. The logits of a row with an error are of no
    use, but those of the other rows are.
    """
    rows, columns = logits.shape
    words = columns // 32 + 1  # the matchers have one token more than the logits
    bits = torch.full((rows, words), -1, dtype=torch.int32, pin_memory=logits.is_cuda, device="cpu")
    failed = _fill(bits, matchers)
    octets = bits.to(logits.device, non_blocking=True).view(torch.uint8).unsqueeze(-1)
    forbidden = (octets >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1 == 0
    return logits.masked_fill(forbidden.view(rows, -1)[:, :columns], -torch.inf), failed


def _fill(bits: Tensor, matchers: Sequence[tuple[Any, int]]) -> dict[int, str]:
    """Write the bits of the allowed tokens to the rows of ``matchers``. Return errors by row."""
    rows, words = bits.shape
    try:
        if len(matchers) == 1:
            ((matcher, row),) = matchers
            matcher.unsafe_compute_mask_ptr(bits[row].data_ptr(), 4 * words)
        else:
            _executor().unsafe_compute_mask_ptr(list(matchers), bits.data_ptr(), 4 * words, rows)
    except NOT_ERRORS:
        raise
    except BaseException as error:  # maybe a panic of Rust code
        if len(matchers) == 1:
            return {row: f"{type(error).__name__}: {error}"}
        # The error of a batch does not tell which matcher failed.
        return {row: text for pair in matchers for row, text in _fill(bits, [pair]).items()}
    return {}


@functools.cache
def _executor() -> Any:
    """The threads that compute the masks of a batch."""
    from llguidance import LLExecutor

    return LLExecutor()
