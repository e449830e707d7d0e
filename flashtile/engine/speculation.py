"""Speculative decoding: guesses of the next tokens, which one step verifies together.

There are two ways to guess. Prompt lookup (Saxena 2023) finds an earlier occurrence of the last few tokens
and proposes the tokens that followed it. A draft model (Leviathan et al. 2023, arXiv:2211.17192) is a small
model that continues the text. It may also propose its next likely tokens at each position, as a tree (Miao et
al. 2024, SpecInfer, arXiv:2305.09781).

A step computes a sequence's last token and its guesses, and draws a token after each of them. It accepts the
longest path on which each guess equals the token drawn after its parent. A draw is an argmax of logits with
noise, and the noise depends only on seed, position and token (:mod:`flashtile.engine.sampler`). So an answer
is token by token the same as without guesses, greedy or not. The draft model draws with the same noise. Its
guess is therefore right with a probability of at least (1 - d) / (1 + d), where d is the total variation
distance of the two models' next-token distributions (Daliri et al. 2025, arXiv:2408.07978). Rejection
sampling is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flashtile.checks.arguments import check_int, is_choice
from flashtile.checks.conversions import as_int
from flashtile.engine.config import model_folder
from flashtile.engine.request import Sequence, State

MAX_GUESSES = 62
"""Largest number of guesses: with up to two tokens before them, a row of the tree mask fits into 64 bits."""

UNKNOWN = -1
"""Placeholder for a guess that the draft model makes during the step."""


class Guesses(NamedTuple):
    """A tree of guesses.

    Node 0 is the sequence's last token, and node i + 1 is guess i. ``parents[i]`` is the node that guess i
    follows. The chain of likeliest guesses comes first, so each of them has the cache slot of its position.
    Siblings (other guesses for the same positions) come after the chain, in later slots.
    """

    tokens: list[int]
    parents: tuple[int, ...]


def comb(depth: int, width: int) -> tuple[int, ...]:
    """Return the parent of each guess in a tree of ``depth * width`` guesses.

    The tree has a chain of ``depth`` guesses. Each of them has ``width - 1`` siblings (other guesses for the
    same position), which have no children.
    """
    return (*range(depth), *(parent for parent in range(depth) for _ in range(width - 1)))


def depths(parents: tuple[int, ...]) -> list[int]:
    """Return the depth of each node of a tree of guesses. Node 0, the last token, has depth 0."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def visible(parents: tuple[int, ...]) -> list[int]:
    """Return a bit mask for each node of a tree of guesses: the bits of the node itself and its ancestors."""
    found = [1]
    for node, parent in enumerate(parents, 1):
        found.append(found[parent] | 1 << node)
    return found


def accepted_path(guesses: list[int], parents: tuple[int, ...], draws: list[int]) -> list[int]:
    """Return the path of accepted nodes in the tree of guesses, beginning with node 0, the last token.

    ``draws[i]`` is the token drawn after node i. A guess is accepted if its parent is on the path and the
    token drawn after that parent equals the guess.
    """
    found = [0]
    for node, (token, parent) in enumerate(zip(guesses, parents, strict=False), 1):
        if parent == found[-1] and token == draws[parent]:
            found.append(node)
    return found


@dataclass(frozen=True)
class PromptLookup:
    """Guesses from a sequence's own earlier tokens. The parameters have vLLM's names.

    Args:
        num_speculative_tokens: maximum number of guesses in a step.
        prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram at the sequence's end that is looked
            up in its earlier tokens. The longest is tried first.
    """

    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    tree_width = 1  # without a type, because users do not choose it

    def guess(self, sequence: Sequence) -> Guesses:
        """Guess the next tokens of a sequence. Make no guess if its last tokens do not occur earlier."""
        count = _chain_length(sequence, self.num_speculative_tokens, 1)
        if not count:
            return Guesses([], ())
        tokens, positions = sequence.tokens, self._index(sequence)
        for length in range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1):
            at = positions.get(tuple(tokens[-length:]))
            if at is not None and len(tokens) > length:
                guesses = tokens[at : at + count]
                while len(guesses) < count:  # repeat the tokens from ``at`` to the end of the sequence
                    guesses.append(guesses[at - len(tokens)])
                return Guesses(guesses, tuple(range(count)))
        return Guesses([], ())

    def _index(self, sequence: Sequence) -> dict[tuple[int, ...], int]:
        """Map each n-gram of the sequence's tokens to the position after its latest occurrence."""
        tokens, positions = sequence.tokens, sequence.ngrams
        for end in range(sequence.num_indexed, len(tokens)):  # no token follows the last n-gram yet
            for length in range(self.prompt_lookup_min, self.prompt_lookup_max + 1):
                if length <= end:
                    positions[tuple(tokens[end - length : end])] = end
        sequence.num_indexed = len(tokens)
        return positions


@dataclass(frozen=True)
class DraftModel:
    """Guesses that a draft model makes on the device, in the step that verifies them.

    Args:
        model: folder of the draft model, which must have the target model's vocabulary.
        num_speculative_tokens: length of the chain of guesses.
        tree_width: number of tokens guessed at each position: 1 is a chain, more is a tree.
    """

    model: Path
    num_speculative_tokens: int = 4
    tree_width: int = 1

    def guess(self, sequence: Sequence) -> Guesses:
        """Choose how many guesses the draft model makes. Each has the placeholder ``UNKNOWN``."""
        # An accepted sibling (a guess outside the chain) has its keys and values in the wrong cache slot. The
        # next step therefore computes this token again, before the guesses.
        depth = _chain_length(sequence, self.num_speculative_tokens, 1 + (self.tree_width > 1))
        # Near the end of the answer there is no room for siblings.
        parents = comb(depth, self.tree_width if depth == self.num_speculative_tokens else 1)
        return Guesses([UNKNOWN] * len(parents), parents)


def _chain_length(sequence: Sequence, most: int, lead: int) -> int:
    """Return how many successive guesses the next step of a sequence can verify, at most ``most``.

    Returns 0 if the answer has not begun, if more than ``lead`` tokens must be computed before the guesses,
    or if the request's parameters do not allow guesses.
    """
    params, answered = sequence.request.params, sequence.num_outputs
    if sequence.state is not State.RUNNING or sequence.pending or not answered:
        return 0
    if sequence.request.reads_tokens or answered < params.min_tokens:
        return 0
    if not 1 <= sequence.num_tokens - sequence.num_computed <= lead:
        return 0
    return max(0, min(most, sequence.request.max_outputs - answered - 1))


def read_speculative_config(config: Mapping[str, Any]) -> PromptLookup | DraftModel:
    """Validate vLLM's ``speculative_config`` and return the parameters of its method."""
    if not isinstance(config, Mapping):
        raise TypeError(f"speculative_config must be a dict, got {type(config).__name__} {config!r:.60}")
    values = dict(config)
    method = values.pop("method", "draft_model" if "model" in values else None)
    if not is_choice(method, ("ngram", "draft_model")):
        raise NotImplementedError(
            f"speculative_config must have the method 'ngram' or 'draft_model', got {method!r:.60}"
        )
    kind: Any = PromptLookup if method == "ngram" else DraftModel
    unknown = set(values) - set(kind.__dataclass_fields__)
    if unknown:
        raise NotImplementedError(
            f"speculative_config must have only fields of {method}, got {sorted(unknown)}"
        )
    folder = values.pop("model", None)
    given: dict[str, Any] = {name: as_int(name, value) for name, value in values.items()}
    if kind is DraftModel:
        if not isinstance(folder, (str, Path)):
            text = "speculative_config must have a field model with the draft model's folder"
            raise TypeError(f"{text}, got {folder!r:.60}")
        given["model"] = model_folder(folder)
    found: PromptLookup | DraftModel = kind(**given)
    count = found.num_speculative_tokens
    check_int("num_speculative_tokens", count, 1, MAX_GUESSES)
    if isinstance(found, DraftModel):
        if not 1 <= found.tree_width <= MAX_GUESSES // count:
            raise ValueError(
                f"tree_width must be from 1 to {MAX_GUESSES // count} with "
                f"num_speculative_tokens={count}, got {found.tree_width}"
            )
    elif not 1 <= found.prompt_lookup_min <= found.prompt_lookup_max <= 16:
        raise ValueError(
            "prompt_lookup_min and prompt_lookup_max must be from 1 to 16, in ascending order, got "
            f"{found.prompt_lookup_min} and {found.prompt_lookup_max}"
        )
    return found
