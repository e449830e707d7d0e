"""What a decoding program prefetches, in Triton's interpreter: what its work tiles begin with."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

import flashtile
from flashtile.backends.portable.decode import attend, launch

pytestmark = pytest.mark.interpreter

D = 32
N_BLOCKS = 2
"""n_blocks of a work tile, asked for ahead."""


@pytest.fixture
def events(monkeypatch):
    """(program, what, addresses of rows) in their order; what a GPU is told in assembly is noted instead."""
    seen_so_far = []

    def note(what, base, offsets, seen):
        rows = (base + offsets).handle.data[seen.handle.data].tolist()
        seen_so_far.append((interpreter_builder.grid_idx[0], what, rows))

    load_rows, attend_n_blocks = attend.load_rows, attend.attend_n_blocks

    def noted_load(base, offsets, seen, *widths):
        note("load", base, offsets, seen)
        return load_rows(base, offsets, seen, *widths)

    def noted_work_tile(*arguments, **named):
        seen_so_far.append((interpreter_builder.grid_idx[0], "work tile", []))
        return attend_n_blocks(*arguments, **named)

    monkeypatch.setattr(attend, "load_rows", noted_load)
    monkeypatch.setattr(attend, "prefetch_rows", lambda base, at, seen, *_: note("ask", base, at, seen))
    monkeypatch.setattr(attend, "not_hoisted", lambda number: number)
    monkeypatch.setattr(attend, "attend_n_blocks", noted_work_tile)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(tl.extra.cuda, name, lambda name=name: seen_so_far.append(
            (interpreter_builder.grid_idx[0], name, [])
        ))  # fmt: skip
    monkeypatch.setattr(launch, "has_dependent_launch", lambda device: True)
    return seen_so_far


RAGGED = (10, 300, 0, 129, 64, 5, 500)


@pytest.mark.parametrize(
    ("lengths", "page_size", "heads_kv"),
    [((700,), 16, 2), (RAGGED, 0, 2), (RAGGED, 3, 2), (RAGGED, 16, 2), (RAGGED, 128, 2), (RAGGED, 16, 9)],
    ids=str,
)
@pytest.mark.usefixtures("balanced_work")
def test_work_tiles_begin_with_what_was_asked_for(events, lengths, page_size, heads_kv):
    batch, capacity = len(lengths), 768
    torch.manual_seed(0)
    q = torch.randn(batch, 1, heads_kv, D, dtype=torch.float16)
    tensors, shape = {}, (batch, capacity, heads_kv, D)
    if page_size:
        pages = capacity // page_size
        shape = (batch * pages, page_size, heads_kv, D)
        tensors["block_table"] = torch.randperm(batch * pages).view(batch, pages).int()
    cache = torch.randn(2, *shape, dtype=torch.float16)
    flashtile.flash_attn_with_kvcache(
        q, *cache, cache_seqlens=torch.tensor(lengths).int(), backend="portable", **tensors
    )
    programs = {program for program, *_ in events}
    assert len(programs) > 1
    for program in programs:
        mine = [(what, rows) for p, what, rows in events if p == program]
        names = [what for what, _ in mine]
        assert set(names[: names.index("gdc_wait")]) <= {"ask"}
        starts = [i for i, what in enumerate(names) if what == "work tile"]
        if not starts:
            continue
        n_blocks, begun_with = N_BLOCKS, set()
        for start, end in itertools.pairwise([*starts, len(mine)]):
            asked = {row for what, rows in mine[:start] if what == "ask" for row in rows}
            loads = [rows for what, rows in mine[start:end] if what == "load"]
            # A tile of keys and one of values; each n_block of the work tile before asks for one.
            first = {row for rows in loads[: 2 * min(n_blocks, N_BLOCKS)] for row in rows}
            assert first <= asked
            begun_with |= first
            n_blocks = len(loads) // 2
        assert {row for what, rows in mine if what == "ask" for row in rows} == begun_with
        assert "gdc_launch_dependents" in names[starts[-1] :]
        assert "gdc_launch_dependents" not in names[: starts[-1]]
