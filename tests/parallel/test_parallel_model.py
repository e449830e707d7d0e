"""The model of what sharing a sequence costs, and the blocks that it and the ranks compute."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashtile import attention
from flashtile.caches import BoundedCache
from flashtile.io_model import find_card
from flashtile.parallel import LINKS, Sharing, blocks, estimates, explain, two_dimensions
from flashtile.parallel.attend import attend_once
from flashtile.parallel.blocks import Block, Mask, Packed, Pair, pair_of
from flashtile.parallel.layout import LAYOUTS, Piece, pieces_of, positions, tokens_of
from flashtile.parallel.ranks import Alone, Ranks
from flashtile.parallel.ulysses import in_order
from flashtile.problems.attention import Options

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "parallel.md"
H200 = find_card("h200")


def test_parts_of_ranks_are_gathered_whatever_their_lengths(monkeypatch) -> None:
    lengths, sent = (2, 5, 0), []
    monkeypatch.setattr(
        Ranks, "stack", lambda self, x, timeout: sent.append(x) or torch.stack([x, x + 1, x + 2])
    )
    x = torch.arange(6).view(2, 3)
    parts = Alone().gather(x, lengths, 1.0)
    assert sent[0].shape == (5, 3)  # of one size on all ranks
    assert [part.shape for part in parts] == [(length, 3) for length in lengths]
    assert torch.equal(parts[0], x)
    assert torch.equal(parts[1][:2], x + 1)


def test_pieces_of_a_group_are_in_order() -> None:
    pieces = Piece(8, 4), Piece(0, 4), Piece(4, 4), Piece(16, 4)
    assert in_order(pieces) == (Piece(0, 12), Piece(16, 4))


def test_rows_that_no_call_has_are_0() -> None:
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 3, 2, 8)
    pair = Pair(((0, 3),), (Block(0, 2, 0, 3),))
    out, lse = attend_once(q, k, k, pair, Options(softmax_scale=0.3), None)
    expected = attention(q[:, :2], k, k, softmax_scale=0.3, return_lse=True)
    torch.testing.assert_close((out[:, :2], lse[..., :2]), expected)
    assert (out.shape, lse.shape) == (q.shape, (1, 2, 5))
    assert (out[:, 2:] == 0).all()
    assert (lse[..., 2:] == -torch.inf).all()


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -1.0])])
def test_results_of_two_calls_for_the_same_queries_are_merged(sink: torch.Tensor | None) -> None:
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 16)
    pair = Pair(((0, 6),), (Block(0, 4, 0, 3), Block(0, 4, 3, 6)))
    expected = attention(q, k, v, softmax_scale=0.3, sink=sink, return_lse=True)
    torch.testing.assert_close(attend_once(q, k, v, pair, Options(softmax_scale=0.3), sink), expected)


def test_blocks_are_packed_with_the_tokens_between_them() -> None:
    packed = Packed((Block(0, 2, 1, 4), Block(5, 9, 4, 6)), 0, 10, 8)
    q, k = (offsets.tolist() for offsets in packed.offsets(torch.device("cpu")))
    assert (q, k) == ([0, 0, 2, 5, 9, 10, 10], [0, 1, 4, 4, 6, 6, 8])
    assert packed.longest == (4, 3)


def test_offsets_on_devices_are_bounded_and_have_gradients_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of training on packed documents has others, and the first call may be in inference mode."""
    kept = BoundedCache(10 * 2**10)
    monkeypatch.setattr(blocks, "_on_devices", kept)
    for i in range(1, 50):
        packed = Packed((Block(0, i, 0, i),), 0, 50, 50)
        with torch.inference_mode():
            q, k = packed.offsets(torch.device("cpu"))
        assert (q.tolist(), k.tolist()) == ([0, i, 50, 50], [0, i, i, 50])
        assert packed.offsets(torch.device("cpu"))[0] is q
        assert not q.is_inference()
    assert len(kept) == 10


def test_offsets_first_seen_in_another_mode_serve_outside_of_it() -> None:
    packed, device = Packed((Block(0, 2, 1, 4),), 0, 2, 4), torch.device("cpu")
    with FakeTensorMode():
        packed.offsets(device)
    with torch.inference_mode():
        q, k = packed.offsets(device)
    assert (q.tolist(), k.tolist()) == ([0, 0, 2], [0, 1, 4])
    assert not q.is_inference()
    assert packed.offsets(device)[0] is q


def visible(q: torch.Tensor, k: torch.Tensor, mask: Mask) -> torch.Tensor:
    """(queries, keys) bool, by the definition of the mask."""
    inside = torch.zeros(len(q), len(k), dtype=torch.bool)
    for d in range(len(mask.starts_q) - 1):
        (q0, q1), (k0, k1) = (starts[d : d + 2] for starts in (mask.starts_q, mask.starts_k))
        own = (q >= q0) & (q < q1)
        distance = (k - k0)[None, :] - (q - q0 + (k1 - k0) - (q1 - q0))[:, None]
        seen = torch.ones_like(inside)
        if mask.left >= 0:
            seen &= distance >= -mask.left
        if mask.right >= 0:
            seen &= distance <= mask.right
        inside |= seen & own[:, None] & ((k >= k0) & (k < k1))[None, :]
    return inside


def covered(queries: int, pair, keys: int) -> torch.Tensor:
    """How often each score is computed, (queries, keys of the rank)."""
    counts = torch.zeros(queries, keys, dtype=torch.int64)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(pair.ranges))  # no two meet
    of_range = [column for start, stop in pair.ranges for column in range(start, stop)]
    for block in pair.blocks:
        rows, width = block.q_stop - block.q_start, block.k_stop - block.k_start
        distance = torch.arange(width)[None, :] - torch.arange(rows)[:, None] - (width - rows)
        seen = torch.ones(rows, width, dtype=torch.bool)
        if block.left >= 0:
            seen &= distance >= -block.left
        if block.right >= 0:
            seen &= distance <= block.right
        assert seen.any(0).all()  # nothing is sent or computed in vain
        assert seen.any(1).all()
        columns = of_range[block.k_start : block.k_stop]
        counts[block.q_start : block.q_stop, columns] += seen
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_visible_score_is_computed_once_and_no_other(layout):
    chance = random.Random(0)
    for _ in range(30):
        size = chance.choice([1, 2, 3, 4, 8])
        documents = chance.choice([1, 1, 5])
        totals = [chance.randrange(40), chance.randrange(40)]
        starts = [sorted(chance.randrange(total + 1) for _ in range(documents - 1)) for total in totals]
        mask = Mask(
            chance.choice([-1, 0, 3, 11]), chance.choice([-1, 0, 0, 5]),
            (0, *starts[0], totals[0]), (0, *starts[1], totals[1]),
        )  # fmt: skip
        for rank, other in itertools.product(range(size), repeat=2):
            q, k = pieces_of(layout, totals[0], size, rank), pieces_of(layout, totals[1], size, other)
            pair = pair_of(q, k, mask)
            right = visible(positions(q, torch.device("cpu")), positions(k, torch.device("cpu")), mask)
            assert torch.equal(covered(tokens_of(q), pair, tokens_of(k)), right.long()), (q, k, mask)
            assert pair.pairs == right.sum()


def test_a_causal_zigzag_gives_all_ranks_equally_much():
    ends = (0, 8192)
    causal = Mask(-1, 0, ends, ends)
    pieces = [pieces_of("zigzag", 8192, 8, rank) for rank in range(8)]
    work = [sum(pair_of(q, k, causal).pairs for k in pieces) for q in pieces]
    assert max(work) == min(work)
    assert len(pair_of(pieces[3], pieces[3], causal).calls) == 1
    assert pair_of(pieces[3], pieces[1], causal).tokens == 512  # half of that rank's keys


def test_a_window_is_sent_by_neighbours_alone():
    ends = (0, 8192)
    window = Mask(255, 0, ends, ends)
    pieces = [pieces_of("contiguous", 8192, 8, rank) for rank in range(8)]
    sent = [[pair_of(q, k, window).tokens for k in pieces] for q in pieces]
    assert sent[4] == [0, 0, 0, 255, 1024, 0, 0, 0]


def test_the_guide_s_table_is_the_model_s():
    million = Sharing(1, 1048576, 32, 8, 128, 128, right=0)
    for line in re.findall(r"^\| \d+ \|.*ms?.*$|^\| \d+ \| .*%.*$", GUIDE.read_text(), re.MULTILINE):
        ranks, *told = (cell.strip() for cell in line.strip("|").split("|"))
        count = int(ranks)
        link = LINKS["nvlink" if count <= 8 else "infiniband"]
        rows = {row.method: row for row in estimates(million, count, H200, link)}
        both = two_dimensions(million, count // 8, 8, H200, LINKS["infiniband"], LINKS["nvlink"])
        found = [rows["ring"], rows["ulysses"], rows["allgather"], both]
        assert told == [f"{row.seconds * 1e3:,.0f} ({row.efficiency:.0%})" for row in found], line


def test_the_choice_follows_what_travels():
    card = {"card": H200, "link": LINKS["infiniband"]}
    windowed = Sharing(1, 131072, 32, 8, 128, 128, left=4096, right=0)
    assert explain(windowed, 8, **card).method == "ring"
    short = Sharing(1, 8192, 32, 8, 128, 128, right=0)
    assert explain(short, 16, **card).method != "ring"  # sixteen steps of little work each
    text = str(explain(windowed, 8, **card))
    assert text.startswith("method: ring, over 8 ranks on H200")
    assert all(method in text for method in ("ulysses", "allgather"))
    with pytest.raises(ValueError, match="ranks must be from 1 to 16384, got 0"):
        explain(windowed, 0)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"heads_kv": 3}, ValueError, "heads_q must be a multiple of heads_kv = 3, got 32"),
        ({"heads_kv": 0}, ValueError, "heads_kv must be from 1"),
        ({"seqlen": 1.5}, TypeError, "seqlen must be an int"),
        ({"dtype": "abc"}, ValueError, "dtype must be one of"),
        ({"layout": 3}, ValueError, "layout must be one of"),
        ({"ranks": "a"}, TypeError, "ranks must be an int"),
        ({"ranks": 2**70}, ValueError, "ranks must be from 1 to 16384"),
        ({"card": np.ones(2)}, TypeError, "card must be a Card, got ndarray"),
        ({"card": "h100"}, TypeError, "card must be a Card, got str"),
    ],
)
def test_what_is_to_be_explained_is_checked(changed, error, says):
    given = {"batch": 1, "seqlen": 64, "heads_q": 32, "heads_kv": 8, "head_dim": 8, "head_dim_v": 8} | changed
    named = {name: given.pop(name) for name in ("ranks", "card") if name in given}
    with pytest.raises(error, match=says):
        explain(Sharing(**given), **{"ranks": 2, **named})
