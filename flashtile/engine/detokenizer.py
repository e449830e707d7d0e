"""Incremental detokenisation of one answer, with the search for stop texts."""

from __future__ import annotations

from collections.abc import Sequence

from flashtile.engine.tokenizer import Tokenizer


class Detokenizer:
    """The growing text of one answer.

    Args:
        prompt: the tokens before the answer.
        skip_special_tokens: leave special tokens out of the text.
        stops: texts that end the answer.
        keep_stop: keep the stop text in the answer.

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
    ):
        self.stream = tokenizer.stream(prompt, skip_special_tokens)
        self.stops, self.keep_stop = stops, keep_stop
        # The last characters are held back, because they may turn out to be the start of a stop text.
        self.held = 0 if keep_stop or not stops else max(map(len, stops)) - 1
        self.text = ""
        self.tokens_read = 0
        self.shown = 0

    def read(self, tokens: Sequence[int], search: bool = True) -> str | None:
        """Append the text of the answer's next tokens. If ``search``, look for stop texts.

        Return None, or the stop text that was found. In this case ``text`` is cut at the stop text.
        """
        for token in tokens:
            self.tokens_read += 1
            new = self.stream.step(token)
            self.text += new
            found = self._find(len(new)) if new and search else None
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

    def _find(self, new: int) -> str | None:
        """Cut the text at the earliest stop text that ends in its last ``new`` characters, and return it."""
        begins = len(self.text) - new + 1
        places = [(self.text.find(stop, max(0, begins - len(stop))), stop) for stop in self.stops]
        found = [(at, stop) for at, stop in places if at >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) if self.keep_stop else at]
        self.held = 0
        return stop
