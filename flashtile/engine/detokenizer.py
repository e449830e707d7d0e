"""Incremental detokenisation of one answer, with the search for stop texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from flashtile.engine.tokenizer import Tokenizer

THINK, END_OF_THOUGHT = "<think>", "</think>"
HEADER = re.compile(r"\s*(?=<\||to=)(.{0,256}?)<\|message\|>", re.DOTALL)
"""The text before a message of gpt-oss."""
HALF_HEADER = re.compile(r"\s*(?:<?|<\|.{0,256}|to?|to=.{0,256})", re.DOTALL)
"""Text that may be the beginning of a header."""
MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>")
LONGEST_END = len("<|return|>")


class Detokenizer:
    """The growing text of one answer.

    Args:
        prompt: the tokens before the answer.
        skip_special_tokens: leave special tokens out of the text.
        stops: texts that end the answer.
        keep_stop: keep the stop text in the answer.
        reasoning: form of the answer's reasoning, in which stop texts are not looked for
            (``reasoning`` of :class:`flashtile.engine.SamplingParams`).

    Attributes:
        text: the whole text so far, including characters that may turn out to begin a stop text.
        tokens_read: number of tokens of the answer that were read.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        skip_special_tokens: bool = True,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        reasoning: str | None = None,
    ):
        self.stream = tokenizer.stream(prompt, skip_special_tokens)
        self.stops, self.keep_stop = stops, keep_stop
        # The last characters are held back, because they may turn out to be the start of a stop text.
        self.held = 0 if keep_stop or not stops else max(map(len, stops)) - 1
        self.text = ""
        self.tokens_read = 0
        self.shown = 0
        self.begin: int | None = 0 if reasoning is None else None  # of the content; None: it has not begun
        self.searched = 0  # stop texts that end before it are not looked for
        # Each step keeps ``begin`` where the content begins, as far as the text tells.
        self._progress: Iterator[None] = iter(())
        if reasoning == "harmony":
            self._progress = self._follow_messages()
        elif reasoning is not None:
            self._progress = self._follow_thought(reasoning == "begun")

    def read(self, tokens: Sequence[int], search: bool = True) -> str | None:
        """Append the text of the answer's next tokens. If ``search``, look for stop texts.

        Return None, or the stop text that was found. In this case ``text`` is cut at the stop text.
        """
        for token in tokens:
            self.tokens_read += 1
            new = self.stream.step(token)
            self.text += new
            if new and self.stops:
                next(self._progress, None)
                found = self._find() if search and self.begin is not None else None
                self.searched = len(self.text) if self.begin is not None or not search else self.searched
                if found is not None:
                    return found
        return None

    def finish(self) -> None:
        """Release the characters held back for stop texts. No more tokens may follow."""
        self.text += self.stream.flush()
        self.held = 0

    def take(self) -> str:
        """Return the text that became final since the last call."""
        end = max(self.shown, len(self.text) - self.held)
        new, self.shown = self.text[self.shown : end], end
        return new

    @property
    def certain(self) -> str:
        """The text without its last characters, which may be the start of a stop text."""
        return self.text[: max(0, len(self.text) - self.held)]

    def _find(self) -> str | None:
        """Cut the text at the earliest stop text of the content that was not searched yet, and return it."""
        assert self.begin is not None
        begins = [max(self.begin, self.searched + 1 - len(stop)) for stop in self.stops]
        places = [(self.text.find(stop, begin), stop) for begin, stop in zip(begins, self.stops, strict=True)]
        found = [(at, stop) for at, stop in places if at >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if self.keep_stop else at]
        self.held = 0
        return stop

    def _follow_thought(self, begun: bool) -> Iterator[None]:
        while not begun and THINK.startswith(start := self.text.lstrip()[: len(THINK)]):
            begun = start == THINK
            if not begun:
                yield
        at = 0
        if begun:
            while (end := self.text.find(END_OF_THOUGHT, at)) < 0:
                at = max(0, len(self.text) - len(END_OF_THOUGHT))
                yield
            at = end + len(END_OF_THOUGHT)
            while not (rest := self.text[at:].lstrip()):
                yield
            at = len(self.text) - len(rest)
        self.begin = at

    def _follow_messages(self) -> Iterator[None]:
        at = 0
        while True:
            while (header := HEADER.match(self.text, at)) is None and HALF_HEADER.fullmatch(self.text, at):
                yield
            is_reasoning = header is not None and "analysis" in header[1]
            at = at if header is None else header.end()
            self.begin = None if is_reasoning else at
            while (end := MESSAGE_END.search(self.text, at)) is None:
                at = max(at, len(self.text) - LONGEST_END)
                yield
            self.begin, at = None, end.end()
