"""Guesses of the next tokens, which one step checks all at once.

Two ways to guess. Prompt look-up (Saxena 2023): where a text repeats itself, what followed the last few
tokens before is likely to follow again. A draft model (Leviathan et al. 2023, arXiv:2211.17192): a small
model goes on from the text, and beside each of its tokens the next likely ones may be guessed, too, as a tree
(Miao et al. 2024, SpecInfer, arXiv:2305.09781).

A step computes the guesses behind a sequence's last token, draws a token after each, and keeps them along
those guesses that were drawn. A draw is an argmax of logits with noise, and the noise depends on the seed and
the position alone (:mod:`flashtile.engine.sampler`), so that an answer is the same, token by token, as
without guesses, greedy or not. The draft model draws with the same noise. So its guess is right with a
probability of at least (1 - d) / (1 + d), where d is the total variation distance of the two models' next
tokens (Daliri et al. 2025, arXiv:2408.07978), without the second draw of rejection sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flashtile.checks.conversions import as_int
from flashtile.engine.request import Sequence, State
from flashtile.engine.sampling_params import SamplingParams

MOST_GUESSES = 62
"""With the tokens before them they fit into the 64 bits of a tree mask's row."""

UNKNOWN = -1
"""A guess that the draft model makes during the step."""


class Guesses(NamedTuple):
    """``parents[i]`` is what guess i stands behind: 0 is the sequence's last token, j + 1 is guess j < i.

    Guesses in a row come first, so that they lie where they belong in the cache; their siblings follow."""

    tokens: list[int]
    parents: tuple[int, ...]


def row(tokens: list[int]) -> Guesses:
    """One behind the other."""
    return Guesses(tokens, tuple(range(len(tokens))))


def comb(depth: int, width: int) -> tuple[int, ...]:
    """The parents of ``depth`` guesses in a row, and of ``width - 1`` siblings beside each of them."""
    return (*range(depth), *(parent for parent in range(depth) for _ in range(width - 1)))


def depths(parents: tuple[int, ...]) -> list[int]:
    """Of the last token, which is 0, and of each guess."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def visible(parents: tuple[int, ...]) -> list[int]:
    """What each node of the tree, the last token first, sees of it: bit i is node i."""
    found = [1]
    for node, parent in enumerate(parents, 1):
        found.append(found[parent] | 1 << node)
    return found


def way(guesses: list[int], parents: tuple[int, ...], draws: list[int]) -> list[int]:
    """The nodes, from the last token (0) on, whose guesses were drawn. ``draws[i]`` came after node i."""
    found = [0]
    while True:
        last = found[-1]
        following = (
            node
            for node, (token, parent) in enumerate(zip(guesses, parents, strict=False), 1)
            if parent == last and token == draws[last]
        )
        node = next(following, None)
        if node is None:
            return found
        found.append(node)


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

    @property
    def parents(self) -> tuple[int, ...]:
        """Of the most guesses at a time."""
        return tuple(range(self.num_speculative_tokens))


@dataclass(frozen=True)
class DraftModel:
    """A small model that guesses; ``num_speculative_tokens`` and ``model`` are vLLM's names.

    Args:
        model: its folder. It must have the vocabulary of the model that it guesses for.
        num_speculative_tokens: guesses in a row.
        tree_width: likeliest tokens that are guessed at each place: 1 is a row, more is a tree.
    """

    model: Path
    num_speculative_tokens: int = 4
    tree_width: int = 1

    @property
    def parents(self) -> tuple[int, ...]:
        """Of the most guesses at a time."""
        return comb(self.num_speculative_tokens, self.tree_width)


def read_speculative_config(config: Mapping[str, Any]) -> PromptLookup | DraftModel:
    """From vLLM's ``speculative_config``; errors name what is wrong with it."""
    if not isinstance(config, Mapping):
        raise TypeError(f"speculative_config must be a dict, got {type(config).__name__} {config!r:.60}")
    values = dict(config)
    method = values.pop("method", "draft_model" if "model" in values else None)
    if method not in ("ngram", "draft_model"):
        raise NotImplementedError(
            f"speculative_config must have the method 'ngram' or 'draft_model', got {method!r:.60}"
        )
    kind: Any = PromptLookup if method == "ngram" else DraftModel
    unknown = set(values) - set(kind.__dataclass_fields__)
    if unknown:
        raise NotImplementedError(
            f"speculative_config has fields that {method} does not have: {sorted(unknown)}"
        )
    folder = values.pop("model", None)
    given: dict[str, Any] = {name: as_int(name, value) for name, value in values.items()}
    if kind is DraftModel:
        if not isinstance(folder, (str, Path)):
            text = "speculative_config must have the draft model's folder as model"
            raise TypeError(f"{text}, got {folder!r:.60}")
        given["model"] = Path(folder)
    found: PromptLookup | DraftModel = kind(**given)
    count = found.num_speculative_tokens
    if not 1 <= count <= MOST_GUESSES:
        raise ValueError(f"num_speculative_tokens must be from 1 to {MOST_GUESSES}, got {count}")
    if isinstance(found, DraftModel):
        if not 1 <= found.tree_width <= MOST_GUESSES // count:
            raise ValueError(
                f"tree_width must be from 1 to {MOST_GUESSES // count} with "
                f"num_speculative_tokens={count}, got {found.tree_width}"
            )
    elif not 1 <= found.prompt_lookup_min <= found.prompt_lookup_max <= 16:
        raise ValueError(
            "prompt_lookup_min and prompt_lookup_max must be from 1 to 16, in this order, got "
            f"{found.prompt_lookup_min} and {found.prompt_lookup_max}"
        )
    return found


def make_speculator(settings: PromptLookup | DraftModel) -> Speculator | DraftSpeculator:
    """What guesses as ``settings`` say."""
    return Speculator(settings) if isinstance(settings, PromptLookup) else DraftSpeculator(settings)


def _room(sequence: Sequence, most: int, lead: int) -> int:
    """Guesses in a row that are worth it: 0 where the next step does not go on with an answer, or computes
    more than ``lead`` tokens before them."""
    params, answered = sequence.request.params, sequence.num_outputs
    if sequence.state is not State.RUNNING or sequence.pending or not answered:
        return 0
    if not isinstance(params, SamplingParams) or params.reads_tokens or answered < params.min_tokens:
        return 0
    if not 1 <= sequence.num_tokens - sequence.num_computed <= lead:
        return 0
    return max(0, min(most, sequence.request.max_outputs - answered - 1))


class Speculator:
    """Guesses from what a sequence has had before."""

    def __init__(self, settings: PromptLookup):
        self.settings = settings
        self._places: dict[Sequence, tuple[int, dict[tuple[int, ...], int]]] = {}

    def guess(self, sequence: Sequence) -> Guesses:
        """What may follow the tokens of a sequence, or nothing."""
        count = _room(sequence, self.settings.num_speculative_tokens, 1)
        if not count:
            return row([])
        tokens, places = sequence.tokens, self._index(sequence)
        for length in range(self.settings.prompt_lookup_max, self.settings.prompt_lookup_min - 1, -1):
            at = places.get(tuple(tokens[-length:]))
            if at is not None and len(tokens) > length:
                guesses = tokens[at : at + count]
                while len(guesses) < count:  # a text that repeats itself in short goes on to do so
                    guesses.append(guesses[at - len(tokens)])
                return row(guesses)
        return row([])

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


class DraftSpeculator:
    """Says how many guesses the draft model makes, on the device, in the step that checks them."""

    def __init__(self, settings: DraftModel):
        self.settings = settings

    def guess(self, sequence: Sequence) -> Guesses:
        # Behind a right sibling, which lies in the wrong place, two tokens are to be computed.
        lead = 1 + (self.settings.tree_width > 1)
        depth = _room(sequence, self.settings.num_speculative_tokens, lead)
        parents = self.settings.parents
        if depth < self.settings.num_speculative_tokens:
            parents = comb(depth, 1)  # near its end, where there is no place for siblings either
        return Guesses([UNKNOWN] * len(parents), parents)

    def forget(self, sequence: Sequence) -> None:
        """It remembers nothing."""
