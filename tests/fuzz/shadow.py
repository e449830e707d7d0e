"""A paged cache together with plain lists of tokens, the expected content of each sequence."""

from __future__ import annotations

import torch

from flashtile.kv_cache import CacheFullError, PagedKVCache
from fuzz import oracle
from fuzz.prelude import Wrong, rand

HEADS, HEADS_KV, DIM, VOCABULARY = 4, 2, 8, 6


class Shadow:
    """A paged cache and the expected tokens of its sequences, which are compared after each operation.

    Operations choose a sequence by a number, modulo the number of sequences that are not swapped out. They do nothing
    if there is none.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_sequences: int, num_host_blocks: int, window_left: int
    ):
        self.cache = PagedKVCache(
            2, num_blocks, block_size, HEADS_KV, DIM, max_sequences=max_sequences, max_seqlen=60, dtype=torch.float64,
            num_host_blocks=num_host_blocks, window_left=window_left,
        )  # fmt: skip
        self.window = window_left
        self.tokens: dict[int, list[int]] = {}
        self.swapped: set[int] = set()
        self.kv = rand(2, VOCABULARY, HEADS_KV, DIM, dtype=torch.float64, seed=3)

    def _pick(self, number: int) -> int | None:
        here = [s for s in self.tokens if s not in self.swapped]
        return here[number % len(here)] if here else None

    def create(self, tokens: list[int]) -> None:
        sequence = self.cache.create(tokens)
        found = self.cache.length(sequence)
        if found and found >= len(tokens):
            raise Wrong("create found the last token, too")
        self.tokens[sequence] = tokens[:found]
        if len(tokens) > found:
            self.step([sequence], tokens[found:], exactly=True)

    def step(self, numbers: list[int], new: list[int], exactly: bool = False) -> None:
        """Append the tokens ``new`` to each of the sequences and check its attention in both layers.

        With ``exactly``, ``numbers`` are sequences of the cache instead of choices.
        """
        chosen = (
            numbers if exactly else list(dict.fromkeys(s for s in map(self._pick, numbers) if s is not None))
        )
        chosen = [s for s in chosen if len(self.tokens[s]) + len(new) <= 60]
        if not chosen or not new:
            return
        step = self.cache.reserve_step(self.cache.batch(chosen), len(new))
        for s in chosen:
            self.tokens[s] = self.tokens[s] + new
        q = rand(2, len(chosen) * len(new), HEADS, DIM, dtype=torch.float64, seed=len(new))
        ids = torch.tensor(new * len(chosen))
        for layer in range(2):  # keys and values of the second layer are negated, to tell the layers apart
            sign = 1 - 2 * layer
            out = self.cache.attend(layer, q[layer], sign * self.kv[0, ids], sign * self.kv[1, ids], step)
            for n, s in enumerate(chosen):
                rows = slice(n * len(new), (n + 1) * len(new))
                known = torch.tensor(self.tokens[s])
                left = self.window if self.window >= 0 else -1
                right = oracle.one(
                    q[layer, rows],
                    sign * self.kv[0, known],
                    sign * self.kv[1, known],
                    causal=True,
                    window_size=(left, -1),
                )
                difference = (out[rows] - right[0]).abs().max().item()
                if not difference < 1e-12:
                    raise Wrong("a sequence attends to other tokens than it has", f"off by {difference:.3g}")

    def fork(self, number: int) -> None:
        if (s := self._pick(number)) is not None:
            self.tokens[self.cache.fork(s)] = self.tokens[s]

    def select(self, numbers: list[int], parents: list[int]) -> None:
        chosen = list(dict.fromkeys(s for s in map(self._pick, numbers) if s is not None))
        if not chosen:
            return
        parents = [p % len(chosen) for p in parents]
        texts = [self.tokens[chosen[p]] for p in parents]
        found = self.cache.select(chosen, parents)
        self.tokens = {s: t for s, t in self.tokens.items() if s not in chosen} | dict(
            zip(found, texts, strict=True)
        )

    def free(self, number: int) -> None:
        if (s := self._pick(number)) is not None:
            self.cache.free(s)
            del self.tokens[s]

    def truncate(self, number: int, share: float) -> None:
        if (s := self._pick(number)) is not None and self.window < 0:
            kept = int(len(self.tokens[s]) * share)
            self.cache.truncate(s, kept)
            self.tokens[s] = self.tokens[s][:kept]

    def cache_blocks(self, number: int) -> None:
        if (s := self._pick(number)) is not None:
            self.cache.cache_blocks(s, self.tokens[s])

    def reset(self) -> None:
        self.cache.reset_prefix_cache()

    def swap_out(self, number: int) -> None:
        if (s := self._pick(number)) is not None:
            self.cache.swap_out([s])
            self.swapped.add(s)

    def swap_in(self) -> None:
        if self.swapped:
            s = min(self.swapped)
            self.cache.swap_in([s])
            self.swapped.remove(s)

    def do(self, *operations: tuple) -> None:
        """Perform operations in turn and check the cache after each. A full cache must leave it unchanged."""
        for name, *arguments in operations:
            before = dict(self.tokens)
            try:
                getattr(self, name)(*arguments)
            except CacheFullError:
                for s in set(self.tokens) - set(before):  # a new sequence whose tokens found no room
                    self.cache.free(s)
                self.tokens = before
            self.cache.check_integrity()
            if set(self.cache.sequences) != set(self.tokens):
                raise Wrong(
                    "other sequences than there should be", f"{self.cache.sequences}, {list(self.tokens)}"
                )
            for s, tokens in self.tokens.items():
                if self.cache.length(s) != len(tokens):
                    raise Wrong(
                        "a sequence has another length", f"{self.cache.length(s)}, expected {len(tokens)}"
                    )
