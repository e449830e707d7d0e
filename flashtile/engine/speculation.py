"""Guesses of the next tokens, which one step checks all at once: prompt look-up (Saxena 2023).

Where a text repeats itself, what followed the last few tokens before is likely to follow again. A step
computes the guesses as if they were the answer and draws a token after each. A draw depends on the seed and
the position alone, so that the answer is the same as without guesses, greedy or not; only steps are saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashtile.arguments import as_int
from flashtile.engine.request import Sequence, State
from flashtile.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class PromptLookup:
    """vLLM's names.

    Args:
        num_speculative_tokens: guesses at a time, at most.
        prompt_lookup_max, prompt_lookup_min: how many last tokens must have stood together before.
    """

    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PromptLookup:
        """From vLLM's ``speculative_config``; errors name what is wrong with it."""
        values = dict(config)
        method = values.pop("method", None)
        if method != "ngram":
            raise NotImplementedError(f"speculative_config must have the method 'ngram', got {method!r:.60}")
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise NotImplementedError(f"speculative_config has fields that are not served: {sorted(unknown)}")
        found = cls(**{name: as_int(name, value) for name, value in values.items()})
        if not 1 <= found.num_speculative_tokens <= 64:
            count = found.num_speculative_tokens
            raise ValueError(f"num_speculative_tokens must be from 1 to 64, got {count}")
        if not 1 <= found.prompt_lookup_min <= found.prompt_lookup_max <= 16:
            raise ValueError(
                "prompt_lookup_min and prompt_lookup_max must be from 1 to 16, in this order, got "
                f"{found.prompt_lookup_min} and {found.prompt_lookup_max}"
            )
        return found


class Speculator:
    """Guesses for every sequence that runs."""

    def __init__(self, settings: PromptLookup):
        self.settings = settings
        self._places: dict[Sequence, tuple[int, dict[tuple[int, ...], int]]] = {}

    def guess(self, sequence: Sequence) -> list[int]:
        """What may follow the tokens of a sequence that the next step computes one token of, or nothing."""
        params = sequence.request.params
        if sequence.state is not State.RUNNING or sequence.pending or sequence.wanted != 1:
            return []
        if not isinstance(params, SamplingParams) or params.reads_tokens:
            return []
        if sequence.num_outputs < params.min_tokens:
            return []
        tokens, places = sequence.tokens, self._index(sequence)
        room = sequence.request.max_outputs - sequence.num_outputs - 1
        count = min(self.settings.num_speculative_tokens, room)
        for length in range(self.settings.prompt_lookup_max, self.settings.prompt_lookup_min - 1, -1):
            at = places.get(tuple(tokens[-length:]))
            if at is not None and len(tokens) > length:
                return tokens[at : at + max(0, count)]
        return []

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence, None)

    def _index(self, sequence: Sequence) -> dict[tuple[int, ...], int]:
        """By some tokens in a row, where what followed them last begins."""
        done, places = self._places.get(sequence, (1, {}))
        tokens = sequence.tokens
        for end in range(done, len(tokens)):  # the last tokens have nothing after them yet
            for length in range(self.settings.prompt_lookup_min, self.settings.prompt_lookup_max + 1):
                if length <= end:
                    places[tuple(tokens[end - length : end])] = end
        self._places[sequence] = len(tokens), places
        return places
