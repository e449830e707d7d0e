"""Attention with ``score_mod`` and ``mask_mod``, which are evaluated tile by tile on the scores' indices.

Blocks that a block mask leaves out are skipped, and full blocks are not masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flashtile.backends.cpu.config import Tiled
from flashtile.backends.cpu.parts import OptionalInputs
from flashtile.backends.cpu.tiled import Chunk
from flashtile.masks.evaluate import evaluate
from flashtile.masks.program import Load, Program, derivatives, mask_program, score_program
from flashtile.problems.attention import Problem
from flashtile.problems.masking import split
from flashtile.problems.masks import MAX_CAPTURED

Blocks = tuple[list[int], list[int]]
"""(partial, full): the numbers of the key blocks that one block of rows visits."""


class EvaluatedFunctions:
    """Score and mask functions of a call, the captured tensors that they read, and the gradients of these."""

    def __init__(self, problem: Problem, extras: Any, with_gradients: bool) -> None:
        assert problem.mods is not None
        self.mods = mods = problem.mods
        self.captured: list[Tensor] = [getattr(extras, f"captured_{i}") for i in range(len(mods.ranks))]
        self.gradients: list[Tensor | None] = [
            t.new_zeros(t.shape, dtype=problem.lse_dtype) if i in mods.learned and with_gradients else None
            for i, t in enumerate(self.captured)
        ]
        self.loads: tuple[Load, ...] = ()
        self.score_program: Program | None = score_program(mods)
        self.with_gradients = with_gradients
        if self.score_program is not None and with_gradients:
            self.score_program, self.loads = derivatives(self.score_program, frozenset(mods.learned))
        self.mask_program = mask_program(mods)
        self.lists = None if mods.block_size is None else _lists(extras)

    def chunks(
        self, problem: Problem, config: Tiled, q: Tensor, k: Tensor, v: Tensor, optional: OptionalInputs
    ) -> Iterator[FunctionChunk]:
        """Yield chunks of one sequence. If each head has its own block lists, a chunk has one query head."""
        for b in range(q.shape[0]):
            sequence = slice(b, b + 1)
            if self.lists is None or self.mods.list_heads == 1:
                for h in split(range(problem.num_heads_kv), config.TILE_HEADS):
                    yield FunctionChunk(problem, config, q, k, v, optional, sequence, slice(h.start, h.stop))
                continue
            for head in range(problem.num_heads_q):
                head_kv = head // problem.group_size
                of_kv, of_q = slice(head_kv, head_kv + 1), slice(head, head + 1)
                yield FunctionChunk(problem, config, q, k, v, optional, sequence, of_kv, of_q)

    def of_captured(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the captured tensors, each in the dtype of its tensor."""
        found = [
            None if gradient is None else gradient.to(tensor.dtype)
            for tensor, gradient in zip(self.captured, self.gradients, strict=True)
        ]
        return (*found, *(None,) * (MAX_CAPTURED - len(found)))

    def add_gradient(self, load: Load, ds: Tensor, indices: list[Any]) -> None:
        """Add ``ds`` (..., rows, keys) to the gradient of a captured tensor, at the elements ``indices``.

        ``indices`` has an index for each dimension of the captured tensor. They broadcast to ``ds``.
        """
        gradient = self.gradients[load.tensor]
        assert gradient is not None
        if not indices:
            gradient.add_(ds.sum())
            return
        where = torch.broadcast_tensors(*map(torch.as_tensor, indices))
        gradient.index_put_(where, ds.sum_to_size(where[0].shape), accumulate=True)


def optional_inputs(
    problem: Problem, extras: Any, dbias: Tensor | None = None, with_gradients: bool = False
) -> OptionalInputs:
    """Return the optional inputs of a dense call, with its score and mask functions."""
    optional = OptionalInputs.of(problem, extras, dbias)
    if problem.mods is None:
        return optional
    return optional._replace(functions=EvaluatedFunctions(problem, extras, with_gradients))


class FunctionChunk(Chunk):
    """A chunk of one sequence. Scores are modified by ``score_mod`` and hidden by ``mask_mod``."""

    def __init__(self, *arguments: Any) -> None:
        """The arguments are those of :class:`Chunk`."""
        super().__init__(*arguments)
        self.functions: EvaluatedFunctions = self.optional.functions
        self.b = self.batch.start  # one sequence: functions and block lists depend on its number
        self.may_hide_rows = True  # mask_mod may hide all keys of a row, and so may a score_mod of -inf
        if self.functions.mods.block_size is not None:
            self.block_m, self.block_n = self.functions.mods.block_size
        self._results: list[Any] = []
        """Results of ``score_mod`` and its derivatives for the last tile of scores."""

    def row_blocks(self) -> Iterator[range]:
        if self.functions.lists is None:
            yield from super().row_blocks()
            return
        seen = self.visible_rows()
        for block in split(range(self.seqlen_q), self.block_m):
            rows = range(max(block.start, seen.start), min(block.stop, seen.stop))
            if rows:
                yield rows

    def key_blocks(self, rows: range) -> Iterator[range]:
        if self.functions.lists is None:
            yield from super().key_blocks(rows)
            return
        within = self.visible_keys(rows)
        partial, full = self._listed(rows)
        for n in (*full, *partial):  # in any order: the online softmax does not depend on it
            keys = range(max(n * self.block_n, within.start), min((n + 1) * self.block_n, within.stop))
            if keys:
                yield keys

    def _listed(self, rows: range) -> Blocks:
        assert self.functions.lists is not None
        of_head = self.functions.lists[self.b % len(self.functions.lists)]
        return of_head[self.heads_q.start % len(of_head)][rows.start // self.block_m]

    def seen(self, rows: range, keys: range) -> Tensor | None:
        program = self.functions.mask_program
        if program is None:
            return None
        if self.functions.lists is not None and keys.start // self.block_n in self._listed(rows)[1]:
            return None  # a full block: mask_mod shows all of it
        (seen,) = evaluate(program, self._inputs(rows, keys), self.functions.captured, self.dtype)
        return torch.as_tensor(seen, device="cpu")

    def scores(
        self, q: Tensor, rows: range, keys: range, added: Tensor | None, seen: Tensor | None
    ) -> Tensor:
        # ``added`` comes after score_mod, which must see the scores themselves.
        tile = super().scores(q, rows, keys, None, seen)
        return tile if added is None else tile.add_(added)

    def modify(self, tile: Tensor, rows: range, keys: range) -> None:
        if self.functions.score_program is None:
            return
        by_heads = self.by_heads(tile, rows, keys)
        # The scores are copied, because they are overwritten below and a derivative may be the same tensor.
        inputs = self._inputs(rows, keys) | {"score": by_heads.clone()}
        given = self.functions.score_program, inputs, self.functions.captured, self.dtype, "score_mod"
        score, *self._results = evaluate(*given)
        by_heads.copy_(torch.as_tensor(score, dtype=self.dtype, device="cpu"))

    def through_functions(self, ds: Tensor, p: Tensor, rows: range, keys: range) -> None:
        """Turn ``ds`` from the gradient of the result of ``score_mod`` into that of its input, in place.

        Gradients of captured tensors are added to ``EvaluatedFunctions.gradients``. Hidden scores get
        gradient 0, because a derivative there may be inf or NaN.
        """
        if self.functions.score_program is None:
            return
        by_heads, hidden = self.by_heads(ds, rows, keys), self.by_heads(p, rows, keys) == 0
        factor, *results = self._results
        for load in self.functions.loads:
            partial, *indices = results[: 1 + load.indices]
            results = results[1 + load.indices :]
            self.functions.add_gradient(load, (by_heads * partial).masked_fill(hidden, 0.0), indices)
        by_heads.mul_(factor).masked_fill_(hidden, 0.0)

    def _inputs(self, rows: range, keys: range) -> dict[str, Tensor]:
        """Return the indices b, h, q and kv of a tile's scores. They broadcast to :meth:`by_heads`."""
        heads = torch.arange(self.heads_q.start, self.heads_q.stop, device="cpu")
        return {
            "b": torch.tensor(self.b, device="cpu"),
            "h": heads.view(-1, self.group, 1, 1),
            "q": torch.arange(rows.start, rows.stop, device="cpu")[:, None],
            "kv": torch.arange(keys.start, keys.stop, device="cpu"),
        }


def _lists(extras: Any) -> list[list[list[Blocks]]]:
    """Return the key blocks that a block mask shows to each block of rows.

    ``result[b][h][i]`` are the :data:`Blocks` of the ``i``-th block of rows, in sequence b and head h.
    """
    counts = zip(extras.kv_num_blocks.tolist(), extras.full_kv_num_blocks.tolist(), strict=True)
    blocks = zip(extras.kv_indices.tolist(), extras.full_kv_indices.tolist(), strict=True)
    return [
        [
            [
                (sorted(partial[:some]), sorted(full[:all_of]))
                for some, all_of, partial, full in zip(*of_head, strict=True)
            ]
            for of_head in zip(*of_counts, *of_blocks, strict=True)
        ]
        for of_counts, of_blocks in zip(counts, blocks, strict=True)
    ]
