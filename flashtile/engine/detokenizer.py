"""The text of an answer as its tokens come, and the stop texts in it."""

from __future__ import annotations

from collections.abc import Sequence

from flashtile.engine.tokenizer import Tokenizer


class Detokenizer:
    """One answer's text.

    Args:
        tokenizer: of the model.
        prompt: the tokens before the answer.
        stops: texts that end it.
        keep_stop: leave the text that ended it in.

    Attributes:
        text: all of it so far.
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
        # What may still become a stop text is not shown: it would have to be taken back.
        self.held = 0 if keep_stop or not stops else max(map(len, stops)) - 1
        self.text = ""
        self.tokens_read = 0
        self.shown = 0

    def read(self, tokens: Sequence[int], search: bool = True) -> tuple[int, str] | None:
        """Go on by the tokens of the answer that are new in ``tokens``, all of it.

        Returns:
            (tokens read, the stop text) where one was found: ``text`` ends there, and no more is read.
        """
        for token in tokens[self.tokens_read :]:
            self.tokens_read += 1
            new = self.stream.step(token)
            if not new:
                continue
            self.text += new
            found = self._find(len(new)) if search else None
            if found is not None:
                return self.tokens_read, found
        return None

    def finish(self) -> None:
        """No more tokens come: what was held back belongs to the text."""
        self.text += self.stream.flush()
        self.held = 0

    def take(self) -> str:
        """What is new since the last call, and certain."""
        end = max(self.shown, len(self.text) - self.held)
        new, self.shown = self.text[self.shown : end], end
        return new

    @property
    def certain(self) -> str:
        """The text, without what may become a stop text."""
        return self.text[: max(0, len(self.text) - self.held)]

    def _find(self, new: int) -> str | None:
        """The stop text that begins first in the newest characters; the text is cut there."""
        places = []
        for stop in self.stops:
            at = self.text.find(stop, max(0, len(self.text) - new - len(stop) + 1))
            if at >= 0:
                places.append((at, stop))
        if not places:
            return None
        at, stop = min(places)
        self.text = self.text[: at + len(stop) if self.keep_stop else at]
        self.held = 0
        return stop
