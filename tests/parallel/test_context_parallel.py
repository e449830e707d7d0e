"""Attention over ranks, against standard attention on one device in float64: out, lse and every gradient."""

from __future__ import annotations

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

import flashtile
import parallel_tasks
from flashtile import masks, parallel
from flashtile.parallel import blocks, gather
from flashtile.parallel import ranks as ranks_module
from flashtile.parallel.attend import Total, at_ranges
from flashtile.parallel.layout import LAYOUTS, pieces_of
from flashtile.parallel.ranks import Message, Ranks
from ranks_pool import pool
from walk import walk

pytestmark = pytest.mark.numerical

CASES = {
    "ring causal": {"ranks": 4, "method": "ring", "causal": True},
    "ring of two, odd": {"ranks": 2, "method": "ring", "tokens": (37, 37), "causal": True},
    "ring window": {"ranks": 8, "method": "ring", "tokens": (100, 100), "window_size": (17, 0)},
    "ring window both": {"ranks": 3, "method": "ring", "window_size": (5, 9), "softcap": 3.0},
    "ring no mask": {"ranks": 3, "method": "ring", "layout": "contiguous", "sizes": (16, 24)},
    "ring striped": {"ranks": 4, "method": "ring", "layout": "striped", "window_size": (13, 0)},
    "ring striped causal": {"ranks": 3, "method": "ring", "layout": "striped", "causal": True, "sink": True},
    "ring, fewer tokens than ranks": {"ranks": 8, "method": "ring", "tokens": (5, 5), "causal": True},
    "ring, no token": {"ranks": 2, "method": "ring", "tokens": (0, 0), "causal": True},
    "ring, other keys": {"ranks": 4, "method": "ring", "tokens": (21, 60), "causal": True, "sink": True},
    "ring, fewer keys": {"ranks": 4, "method": "ring", "tokens": (60, 21), "causal": True},
    "ring documents": {
        "ranks": 4, "method": "ring", "causal": True, "tokens": (64, 64),
        "documents": ([3, 20, 1, 0, 30, 10], [3, 20, 1, 0, 30, 10]),
    },
    "ring documents window": {
        "ranks": 3, "method": "ring", "window_size": (4, 2), "tokens": (64, 64), "sink": True,
        "documents": ([33, 20, 11], [33, 20, 11]),
    },
    "ring documents other keys": {
        "ranks": 2, "method": "ring", "causal": True, "tokens": (30, 50),
        "documents": ([10, 5, 0, 15], [20, 3, 7, 20]),
    },
    "ulysses": {"ranks": 4, "method": "ulysses", "causal": True, "heads": (8, 4), "sink": True},
    "ulysses, fewer key heads": {"ranks": 4, "method": "ulysses", "causal": True, "heads": (8, 2)},
    "ulysses, odd heads": {"ranks": 4, "method": "ulysses", "window_size": (9, 3), "heads": (6, 2)},
    "ulysses, fewer heads": {"ranks": 3, "method": "ulysses", "causal": True, "heads": (2, 1), "sink": True},
    "ulysses striped": {
        "ranks": 2, "method": "ulysses", "layout": "striped", "causal": True, "tokens": (31, 40),
    },
    "ulysses documents": {
        "ranks": 2, "method": "ulysses", "causal": True, "documents": ([13, 30, 7], [13, 30, 7]),
    },
    "ulysses window, other keys": {
        "ranks": 2, "method": "ulysses", "window_size": (6, 4), "tokens": (20, 50), "sink": True,
    },
    "ulysses, documents without queries": {
        "ranks": 2, "method": "ulysses", "causal": True, "tokens": (20, 44), "documents": ([0, 20], [7, 37]),
    },
    "ring window, other keys": {
        "ranks": 3, "method": "ring", "window_size": (6, 4), "tokens": (20, 50), "layout": "striped",
    },
    "allgather window, fewer keys": {
        "ranks": 2, "method": "allgather", "window_size": (3, 2), "tokens": (50, 20),
    },
    "two dimensions, other keys": {
        "ranks": 8, "mesh": (4, 2), "window_size": (9, 4), "tokens": (30, 67),
    },
    "allgather": {"ranks": 4, "method": "allgather", "causal": True, "sink": True},
    "allgather window": {"ranks": 3, "method": "allgather", "window_size": (7, 0), "tokens": (31, 31)},
    "allgather striped": {"ranks": 2, "method": "allgather", "layout": "striped", "causal": True},
    "allgather documents": {
        "ranks": 4, "method": "allgather", "causal": True, "documents": ([13, 30, 7], [13, 30, 7]),
    },
    "pictures, every key": {
        "ranks": 2, "tokens": (90, 90), "sink": True,
        "pictures": ([60, 30], [(10, 40), (42, 50), (70, 80)], -1),
    },
    "pictures in a window": {
        "ranks": 2, "tokens": (150, 150), "layout": "contiguous", "softcap": 5.0, "sizes": (16, 24),
        "pictures": ([97, 53], [(3, 30), (60, 90), (120, 150)], 20),
    },
    "pictures in a window, zigzag": {
        "ranks": 4, "tokens": (301, 301), "batch": 1, "pictures": ([101, 200], [(3, 60), (200, 260)], 31),
    },
    "pictures, fewer tokens than ranks": {"ranks": 3, "tokens": (2, 2), "pictures": ([2], [(0, 2)], -1)},
    "auto": {"ranks": 2, "causal": True},
    "two dimensions": {"ranks": 8, "mesh": (4, 2), "causal": True, "tokens": (67, 67), "sink": True},
    "two dimensions, one key head": {"ranks": 8, "mesh": (2, 4), "window_size": (20, 0), "heads": (4, 1)},
    "ring lazy": {"ranks": 2, "method": "ring", "lazy": True, "sink": True},
    "ulysses lazy": {"ranks": 2, "method": "ulysses", "lazy": True},
    "allgather lazy": {"ranks": 2, "method": "allgather", "lazy": True},
    "two dimensions striped, fewer tokens than ranks": {
        "ranks": 8, "mesh": (4, 2), "layout": "striped", "tokens": (5, 5), "window_size": (2, 5),
        "sink": True,
    },
    "two dimensions striped, few keys": {
        "ranks": 8, "mesh": (2, 4), "layout": "striped", "tokens": (90, 4), "window_size": (-1, 3),
    },
    "ulysses striped, few queries": {
        "ranks": 8, "method": "ulysses", "layout": "striped", "tokens": (4, 90), "causal": True,
        "heads": (8, 8),
    },
    "two dimensions striped": {"ranks": 8, "mesh": (4, 2), "layout": "striped", "causal": True},
}  # fmt: skip


MASKS = {
    "none": {},
    "causal": {"causal": True},
    "left": {"window_size": (11, -1)},
    "window": {"window_size": (6, 4), "softcap": 5.0, "sink": True},
    "window, more keys": {"window_size": (6, 4), "tokens": (25, 41)},
    "documents": {"causal": True, "documents": ([7, 0, 21, 1, 12], [7, 0, 21, 1, 12])},
}


@pytest.fixture(scope="session")
def ranks():
    with pool(8, groups=(2, 3, 4)) as started:
        yield started


@pytest.mark.parametrize("name", CASES)
def test_it_is_exact(ranks, name):
    case = dict(CASES[name])
    count = case.pop("ranks")
    for rank, errors in enumerate(ranks.run(parallel_tasks.compare, count, **case)):
        assert isinstance(errors, dict), f"rank {rank}: {errors!r}"
        assert all(error < 1e-9 for error in errors.values()), f"rank {rank}: {errors}"


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("count", [2, 4])
def test_only_keys_that_some_query_sees_travel_once_and_in_one_direction(ranks, count, method):
    """Contiguous tokens and a window: the last keys go to the next rank, and their gradients come back.

    In a zigzag, each of the 2 * count - 2 boundaries between chunks of different ranks has as many.
    """
    own, window, of_token = 60, 13, 2 * (16 + 24) * 4  # two key heads, float32
    call = {
        "tokens": own * count, "heads": (4, 2), "sizes": (16, 24), "window_size": (window, 0),
        "method": method,
    }  # fmt: skip
    found = ranks.run(parallel_tasks.traffic, count, layout="contiguous", **call)
    for rank, of_rank in enumerate(found):
        assert isinstance(of_rank, dict), of_rank
        (sent, events), (returned, events_back) = of_rank["forward"], of_rank["backward"]
        assert sent == ({rank + 1: window * of_token} if rank + 1 < count else {})
        assert returned == ({rank - 1: window * of_token} if rank else {})
        if rank:  # other rows are computed while messages are in transit
            assert events == ["post", "attend", "attend", "wait", "attend"]
            assert events_back == ["attend", "post", "attend", "wait"]
    # A document ends 5 tokens after the first boundary and begins 4 tokens before it.
    documents = [own - 4, 9, own * count - own - 5]
    found = ranks.run(parallel_tasks.traffic, count, layout="contiguous", documents=documents, **call)
    assert found[0]["forward"][0] == {1: 4 * of_token}
    assert found[1]["backward"][0] == {0: 4 * of_token}
    found = ranks.run(parallel_tasks.traffic, count, layout="zigzag", **call)
    for which in ("forward", "backward"):
        sent = [sum(of_rank[which][0].values()) for of_rank in found]
        assert sum(sent) == (2 * count - 2) * window * of_token


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_to_gather_are_found_by_few_pairs_of_each_rank(layout, monkeypatch):
    """Packed documents have other pairs in every step, and a pair takes the host up to milliseconds."""
    calls, size = [], 16
    monkeypatch.setattr(gather, "pair_of", lambda *given: calls.append(given) or blocks.pair_of(*given))
    starts = tuple(range(0, 16 * 64 + 1, 32))
    pieces = tuple(pieces_of(layout, starts[-1], size, rank) for rank in range(size))
    for left in (20, -1):
        needs = gather.Needs(pieces, pieces, blocks.Mask(left, 0, starts, starts))
        assert needs.few in (True, False)
        assert len(needs.parts(0, 1)) + len(needs.own(1).calls) > 0
    assert len(calls) <= 2 * 3 * size


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [(20, 0), (5, 11), (-1, 0), (-1, -1)])
def test_a_halo_has_the_gathered_keys_of_other_ranks(layout, window):
    for starts in ((0, 200), (0, 30, 31, 90, 200)):
        pieces = tuple(pieces_of(layout, starts[-1], 4, rank) for rank in range(4))
        needs = gather.Needs(pieces, pieces, blocks.Mask(*window, starts, starts))
        for rank in range(4):
            parts = [part for owner in range(4) if owner != rank for part in needs.parts(owner, rank)]
            whole = torch.arange(needs.gathered(rank).tokens)[None]
            halo = at_ranges(needs.halo_ranges(rank), whole)
            assert needs.halo(rank).tokens == halo.shape[1] == sum(part.tokens for part in parts)
            assert all(torch.equal(part.of_halo(halo), part.of_gathered(whole)) for part in parts)


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("window", [(20, 0), (5, 11), (0, -1), (-1, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_in_two_parts_are_the_same_scores(tokens, window, layout):
    pieces = tuple(pieces_of(layout, tokens, 2, rank) for rank in range(2))
    mask = blocks.Mask(*window, (0, tokens), (0, tokens))
    for pair in (blocks.pair_of(pieces[i], pieces[j], mask) for i in range(2) for j in range(2)):
        if pair.calls:
            first, rest = pair.in_two
            call, rows = pair.calls[0], lambda of: [(block.q_start, block.q_stop) for block in of.blocks]
            assert first.ranges == rest.ranges == pair.ranges
            assert first.pairs + rest.pairs == pair.pairs
            assert len(first.calls) == (call.q_stop - call.q_start >= 8)
            assert blocks.union(rows(first) + rows(rest)) == blocks.union(rows(pair))
    starts = 0, tokens // 3, tokens
    packed = blocks.pair_of(pieces[0], pieces[0], blocks.Mask(*window, starts, starts))
    if packed.calls and isinstance(packed.calls[0], blocks.Packed):
        first, rest = packed.in_two
        assert first.calls == ()
        assert rest is packed


def test_messages_do_not_wait_for_what_is_launched_before_them(one_rank, monkeypatch):
    """The messages' stream begins to wait before the launch, and is left after they are posted."""
    events = []

    @contextlib.contextmanager
    def stream(device):
        events.append("in the stream")
        yield
        events.append("out")

    monkeypatch.setattr(ranks_module, "_aside", lambda device: events.append("wait") or stream(device))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: events.append("messages") or [])
    message = Message(0, torch.zeros(4, dtype=torch.uint8))
    ranks = Ranks(dist.group.WORLD)
    ranks.post([message], [], 5.0, lambda: events.append("launch"))
    assert events == ["wait", "launch", "in the stream", "messages", "out"]
    events.clear()
    ranks.post([], [], 5.0, lambda: events.append("launch"))
    assert events == ["launch"]


def test_only_blocks_of_keys_that_a_mask_shows_travel(ranks):
    """A window of 16 tokens needs a block of the rank before, and a picture at a boundary one of the next."""
    of_block = 16 * 2 * (16 + 24) * 4
    call = {"tokens": 192, "heads": (4, 2), "sizes": (16, 24), "method": "auto", "layout": "contiguous"}
    for pictures, to_rank_0 in (([], {}), ([(40, 70)], {0: of_block})):
        found = ranks.run(parallel_tasks.traffic, 3, pictures=([192], pictures, 16), **call)
        sent = [of_rank["forward"][0] for of_rank in found]
        assert sent == [{1: of_block}, {2: of_block} | to_rank_0, {}]
        returned = [sum(of_rank["backward"][0].values()) for of_rank in found]
        assert sum(returned) == sum(sum(of_rank.values()) for of_rank in sent)


REFUSED_WITH_MASKS = [
    ({"of_mask": {"seqlen": -1}}, "ValueError: seqlen must be"),
    ({"of_mask": {"layout": "striped"}}, "ValueError: layout must be one of"),
    ({"of_mask": {"mask_mod": 3}}, "TypeError: mask_mod must be"),
    ({"of_mask": {"mask_mod": parallel_tasks.of_first_head}},
     "NotImplementedError: mask_mod must be the same for all batches and heads, but depends on its argument"),
    ({"of_mask": {"mask_mod": masks.natten(3, 3, 1)}}, "ValueError: mask_mod natten must have at most 9"),
    ({"of_mask": {"seqlen": 19}}, "ValueError: q must have the 9 tokens that shard gives rank 0 of the 19"),
    ({"of_mask": {}, "layout": "contiguous"}, "ValueError: layout must be that of block_mask, 'zigzag'"),
    ({"of_mask": {}, "method": "ring"}, "NotImplementedError: method must be 'auto' or 'allgather' with"),
    ({"of_mask": {}, "causal": True}, "NotImplementedError: causal or window_size cannot be combined with"),
    ({"of_mask": {}, "cu_seqlens_q": [0, 16]}, "NotImplementedError: cu_seqlens_q cannot be combined with"),
    ({"of_mask": {}, "mesh": 3}, "TypeError: mesh must be a torch.distributed DeviceMesh, got int"),
    ({"block_mask": masks.create_block_mask(masks.causal(), None, None, 16, 16)},
     "TypeError: block_mask must be made by flashtile.parallel.shard_mask, got BlockMask"),
]  # fmt: skip


@walk(("wrong", "says"), REFUSED_WITH_MASKS)
def test_what_cannot_be_combined_with_a_mask_is_named(ranks, wrong, says):
    said = ranks.run(parallel_tasks.faulty, 2, **wrong)
    assert said[0].startswith(says), said[0]
    assert said[1].startswith((says, says.replace("rank 0", "rank 1"), "ValueError: ")), said[1]


def test_masks_on_which_ranks_disagree_are_named(ranks):
    own = {"mask_mod": masks.window(3, 0)}
    for by_rank, name in (
        ([{"of_mask": {"seqlen": 17}}, {"of_mask": {}}], "seqlen"),
        ([{"of_mask": {"layout": "contiguous"}}, {"of_mask": {}}], "layout"),
        ([{"of_mask": own, "softcap": 2.0}, {"of_mask": own}], "softcap"),
        (
            [{"of_mask": own, "learns": True, "learns_keys": keys} for keys in (True, False)],
            "whether gradients of k or v are wanted",
        ),
    ):
        for said in ranks.run(parallel_tasks.faulty, 2, by_rank=by_rank):
            assert said.startswith(f"ValueError: the ranks disagree on {name}: rank 0 has "), said
    said = ranks.run(parallel_tasks.faulty, 2, by_rank=[{"of_mask": {}}, {"of_mask": {"seqlen": "x"}}])
    assert said[0].startswith("ValueError: rank 1 refuses the call: seqlen must be an int")


@pytest.mark.skipif(
    not hasattr(torch.nn.attention, "restore_flash_attention_impl"), reason="torch is older than 2.11"
)
@pytest.mark.parametrize("of", ["heads", "ring", "fsdp"])
def test_torch_s_own_parallelism_on_our_kernels(ranks, of):
    for rank, errors in enumerate(ranks.run(parallel_tasks.through_torch, 2, of=of)):
        assert isinstance(errors, list), f"rank {rank}: {errors!r}"
        assert max(errors) < 1e-5, f"rank {rank}: {errors}"


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("case", [
    {"window_size": (3, -1), "tokens": (5, 12)},
    {"window_size": (6, 4), "tokens": (21, 60)},
    {"causal": True, "tokens": (5, 12), "documents": ([0, 5], [4, 8])},
])  # fmt: skip
@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather", "auto"])
def test_keys_that_no_query_sees_on_one_rank(one_rank, method, case):
    """They are cut off, and what is left is counted from its own start."""
    errors = parallel_tasks.compare(None, method=method, **case)
    assert all(error < 1e-9 for error in errors.values()), errors


WRONG = [
    ({"mesh": 3}, TypeError, "mesh must be a torch.distributed DeviceMesh, got int"),
    ({"group": "x"}, TypeError, "group must be a torch.distributed process group, got str"),
    ({"layout": np.array(["zigzag", "ring"])}, ValueError, "layout must be one of"),
    ({"layout": None}, ValueError, "layout must be one of"),
    ({"method": np.array(["ring", "ring"])}, ValueError, "method must be one of"),
    ({"method": torch.ones(2)}, ValueError, "method must be one of"),
    ({"timeout": "x"}, TypeError, "timeout must be a number of seconds, got str 'x'"),
    ({"timeout": True}, TypeError, "timeout must be a number of seconds"),
    ({"timeout": 0}, ValueError, "timeout must be above 0"),
    ({"timeout": float("nan")}, ValueError, "timeout must be above 0"),
]


@pytest.mark.parametrize(("changed", "error", "says"), WRONG)
def test_wrong_arguments_are_named(one_rank, changed, error, says):
    q = torch.ones(1, 4, 2, 8)
    with pytest.raises(error, match=says):
        parallel.context_parallel_attention(q, q, q, **changed)
    x, name = torch.ones(4), next(iter(changed))
    if name != "method":
        with pytest.raises(error, match=says):
            parallel.unshard(x, 0, **changed)


def test_a_mesh_of_several_dimensions_has_names(one_rank):
    from torch.distributed.device_mesh import init_device_mesh

    q = torch.ones(1, 4, 2, 8)
    with pytest.raises(ValueError, match="mesh must have mesh_dim_names"):
        parallel.context_parallel_attention(q, q, q, mesh=init_device_mesh("cpu", (1, 1)))


@pytest.mark.parametrize("offsets", [[0], [1, 4], [0, 3, 2, 4]])
def test_offsets_of_documents_rise_from_0(one_rank, offsets):
    q = torch.ones(1, 4, 2, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q must start at 0, not decrease, and have at least"):
        parallel.context_parallel_attention(q, q, q, cu_seqlens_q=offsets)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"lengths": [3]}, TypeError, "lengths must be a torch.Tensor, got list"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths must be integers, got torch.float32"),
        ({"rank": 7}, ValueError, "rank must be from 0 to 1, got 7"),
        ({"rank": -1}, ValueError, "rank must be from 0 to 1, got -1"),
        ({"rank": "a"}, TypeError, "rank must be an int"),
        ({"size": 0}, ValueError, "size must be from 1"),
        ({"interleave": 0}, ValueError, "interleave must be from 1"),
        ({"interleave": 1.5}, TypeError, "interleave must be an int"),
    ],
)
def test_own_tokens_names_what_is_wrong(changed, error, says):
    with pytest.raises(error, match=says):
        parallel.own_tokens(**{"lengths": torch.tensor([10]), "rank": 0, "size": 2, **changed})


def test_queries_before_the_first_key_of_a_cache_see_none(one_rank):
    q, k_cache, v_cache = torch.randn(1, 3, 2, 16), *torch.randn(2, 1, 8, 2, 16)
    out, lse = parallel.context_parallel_decode(
        q, k_cache, v_cache, cache_seqlens=torch.tensor([1], dtype=torch.int32), return_lse=True
    )
    assert not out[:, :2].any()
    assert bool((lse[..., :2] == -torch.inf).all())
    torch.testing.assert_close(out[:, 2], v_cache[:, 0])


@pytest.mark.parametrize("dim", range(-3, 3))
def test_any_dimension_is_cut_and_joined(one_rank, dim):
    x = torch.randn(4, 6, 8)
    assert torch.equal(parallel.unshard(parallel.shard(x, dim), dim), x)


def test_a_record_is_kept_for_a_round_after_its_own(one_rank):
    """Until a rank begins a round, it may still be reading the records of the round before."""
    ranks, kept = Ranks(dist.group.WORLD), {}
    ranks.size = 2  # the records of both are this rank's

    class Store:
        def set(self, key, record):
            kept[key] = kept[key.removesuffix("0") + "1"] = record.encode()

        def wait(self, keys, patience):
            assert set(keys) <= set(kept)

        get, delete_key = kept.__getitem__, kept.pop

    ranks._store = Store()
    for number in range(4):
        assert ranks._exchange(f"({number}, 0, None)", 5.0) == [(number, 0, None)] * 2
        own = [key for key in kept if key.endswith("/0")]
        assert own == [f"flashtile/{one}/0" for one in range(max(0, number - 1), number + 1)]


def test_agreements_of_gpus_are_kept_up_to_a_number(one_rank, monkeypatch):
    monkeypatch.delenv("FLASHTILE_DEBUG", raising=False)
    monkeypatch.setattr(ranks_module, "AGREEMENTS", 2)
    ranks, asked = Ranks(dist.group.WORLD), []
    exchange = ranks._exchange
    monkeypatch.setattr(ranks, "_exchange", lambda *given: asked.append(given) or exchange(*given))
    for tokens, rounds in ((1, 1), (2, 2), (1, 2), (3, 3), (2, 3), (1, 4)):
        assert ranks.agree({}, {"tokens": tokens}, 5.0, torch.device("cuda")) == {"tokens": (tokens,)}
        assert len(asked) == rounds
    assert len(ranks._agreed) == 2


def test_one_work_for_all_messages_is_waited_for(one_rank, monkeypatch):
    """NCCL returns that, and gloo one for each."""

    class Work:
        def wait(self, patience):
            raise RuntimeError("timed out")

    monkeypatch.setattr(dist, "P2POp", lambda *given: given)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [Work()])
    messages = [Message(0, torch.ones(3)), Message(0, torch.ones(4))]
    pending = Ranks(dist.group.WORLD).post(messages, messages, 5.0)
    with pytest.raises(RuntimeError, match="got no message from rank 0 within 5 s"):
        pending.wait()


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"interleave": 1.5}, TypeError, "interleave must be"),
        ({"interleave": 2**40}, ValueError, "interleave must be"),
        ({"k_cache": "x"}, TypeError, "k_cache must be a torch.Tensor"),
        ({"k_cache": torch.tensor(1.0)}, ValueError, "k_cache must have 4 dimensions"),
        ({"k": 3}, TypeError, "k must be a torch.Tensor"),
        ({"v": None}, ValueError, "v must be given together with k"),
        ({"k": torch.ones(1, 1, 2, 16, device="meta")}, ValueError, "k is on meta"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be finite"),
        ({"softcap": float("nan")}, ValueError, "softcap must be finite"),
    ],
    ids=str,
)
def test_a_cache_is_not_written_where_an_argument_is_wrong(one_rank, changed, error, says):
    k_cache, v_cache = torch.zeros(2, 1, 8, 2, 16).unbind()
    q, k, v = torch.ones(3, 1, 1, 2, 16).unbind()
    lengths = torch.tensor([3], dtype=torch.int32)
    call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": lengths}
    with pytest.raises(error, match=says):
        parallel.context_parallel_decode(**call | changed)
    assert not k_cache.any()
    assert not v_cache.any()


@pytest.mark.parametrize(
    ("places", "error", "says"),
    [
        ({"k": None}, TypeError, "k must be a DTensor if q is one, got Tensor"),
        ({"k": 0}, ValueError, r"k must be placed as q, \(Shard\(dim=1\),\).*, got \(Shard\(dim=0\),\)"),
        ({"v": 2}, ValueError, r"v must be placed as q, \(Shard\(dim=1\),\).*, got \(Shard\(dim=2\),\)"),
        (dict.fromkeys("qkv", 3), ValueError, "q must be sharded by batch, sequence or heads"),
        (dict.fromkeys("qkv", 2), NotImplementedError, "q must have its sequence sharded on one dimension"),
        ({"layout": "zigzag"}, ValueError, "layout must be 'contiguous' for DTensors"),
    ],
)
def test_distributed_tensors_that_are_refused(one_rank, places, error, says):
    """``places``: the sharded dimension of each tensor, 1 unless given; None for a plain tensor."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, given = dist.init_device_mesh("cpu", (1,)), []
    for name in "qkv":
        tensor, dim = torch.ones(1, 4, 2, 8), places.get(name, 1)
        given.append(tensor if dim is None else DTensor.from_local(tensor, mesh, [Shard(dim)]))
    with pytest.raises(error, match=says):
        parallel.context_parallel_attention(*given, layout=places.get("layout", "contiguous"))


@pytest.mark.parametrize("names", [("entropy",), ("max_logits",), ("max_logits", "entropy")])
def test_statistics_of_dtensors_have_gradients(one_rank, names):
    from torch.distributed.tensor import DTensor, Shard

    mesh, found = dist.init_device_mesh("cpu", (1,)), []
    q = torch.randn(2, 6, 4, 16)
    for as_given in (lambda x: x, lambda x: DTensor.from_local(x, mesh, [Shard(2)])):
        leaf = q.clone().requires_grad_()
        given = as_given(leaf)
        results = flashtile.attention(given, given, given, **{f"return_{name}": True for name in names})
        loss = sum(result.sin().sum() for result in results if result.requires_grad)
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_every_method_layout_and_mask(ranks, count, method, layout, mask):
    case = {"tokens": (41, 41), "heads": (6, 3), "sizes": (8, 12)} | MASKS[mask]
    for errors in ranks.run(parallel_tasks.compare, count, method=method, layout=layout, **case):
        assert isinstance(errors, dict), errors
        assert all(error < 1e-9 for error in errors.values()), errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("mesh", [(4, 2), (2, 4), (8, 1), (1, 8)])
def test_every_mesh(ranks, mesh, layout, mask):
    case = {"tokens": (41, 41), "heads": (6, 3), "sizes": (8, 12)} | MASKS[mask]
    for errors in ranks.run(parallel_tasks.compare, 8, mesh=mesh, layout=layout, **case):
        assert isinstance(errors, dict), errors
        assert all(error < 1e-9 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("count", "arguments"),
    [
        (4, {"pages": True, "merge": "allgather", "interleave": 1, "seqlen_q": 1}),
        (3, {"pages": False, "merge": "allgather", "interleave": 2, "seqlen_q": 2}),
        (2, {"pages": True, "merge": "reduce_scatter", "interleave": 4, "seqlen_q": 3}),
    ],
)
def test_decoding_over_a_sharded_cache(ranks, count, arguments):
    """It begins with sequences that some ranks have no token of."""
    for errors in ranks.run(parallel_tasks.decode, count, steps=6, **arguments):
        assert max(errors) < 1e-12, errors


def test_many_layers_are_as_exact_as_on_one_device(ranks):
    for shared, single in ranks.run(parallel_tasks.through_layers, 4, layers=64):
        assert shared <= 1.1 * single


def test_parts_are_not_rounded(ranks):
    """Neither of out nor of gradients: rounding once is all that their error is."""
    for errors in ranks.run(parallel_tasks.rounding, 8):
        ratios = {name: shared / once for name, (shared, once, _) in errors.items()}
        assert max(ratios.values()) < 1.02, ratios


@pytest.mark.parametrize("window", [(31, 0), (14, 9)])
def test_under_a_window_few_rows_are_rounded_twice(ranks, window):
    """Gradients at a boundary between ranks are rounded again with those of the halo.

    A second rounding errs at most as much as the first, so their sum errs at most twice as much.
    """
    for errors in ranks.run(parallel_tasks.rounding, 4, window_size=window):
        for name, (shared, once, _) in errors.items():
            assert shared <= 2 * once, (name, shared, once)


@pytest.mark.parametrize("placements", [(1, 0), (1, 2), (0, 1)])
@pytest.mark.parametrize("public", [False, True])
def test_distributed_tensors(ranks, placements, public):
    for error in ranks.run(parallel_tasks.distributed, 8, shape=(4, 2), placements=placements, public=public):
        assert error < 1e-12


def test_a_compiled_call_ends_one_graph_and_begins_another():
    """One rank: what the compiler sees is the same. The error of a whole graph says what it lacks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert parallel_tasks.compiled(None) == (2, 0.0)
        whole = torch.compile(partial(parallel.context_parallel_attention, causal=True), fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compare their calls on the host"):
            whole(*torch.randn(3, 1, 4, 2, 8).unbind())
    finally:
        dist.destroy_process_group()


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
def test_compiled_calls_over_ranks(ranks, method):
    for found in ranks.run(parallel_tasks.compiled, 2, method=method):
        assert found == (2, 0.0), found


DISAGREEMENTS = {
    "causal": ({"causal": True}, {}),
    "window_left": ({"window_size": (3, 0)}, {"window_size": (4, 0)}),
    "method": ({"method": "ring"}, {"method": "ulysses"}),
    "layout": ({"layout": "striped"}, {"layout": "zigzag"}),
    "heads of q": ({"heads": 2}, {"heads": 4}),
    "dtype": ({"dtype": torch.float64}, {"dtype": torch.float32}),
    "whether gradients are wanted": ({"learns": True}, {}),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_say_so(ranks, name):
    for said in ranks.run(parallel_tasks.faulty, 2, by_rank=DISAGREEMENTS[name]):
        assert said.startswith(f"ValueError: the ranks disagree on {name}: rank 0 has "), said


def test_a_rank_with_other_tokens_is_named(ranks):
    for said in ranks.run(parallel_tasks.faulty, 2, by_rank=[{"tokens": 8}, {"tokens": 5}]):
        assert "rank" in said, said
        assert "cut it with flashtile.parallel.shard" in said


def test_a_refused_call_is_refused_on_all_ranks(ranks):
    said = ranks.run(parallel_tasks.faulty, 2, by_rank=[{}, {"softcap": -1.0}])
    assert said[0].startswith("ValueError: rank 1 refuses the call: softcap")
    assert said[1].startswith("ValueError: softcap must be")


def test_an_absent_rank_is_named_in_time_and_nothing_hangs():
    with pool(3) as few:
        away = [{}, {}, {"stays_away": True}]
        for said in few.run(parallel_tasks.faulty, 3, by_rank=away, timeout=5.0)[:2]:
            assert said.startswith("RuntimeError: rank "), said
            assert "from rank 2 within 5 s" in said
    with pool(2) as few:
        dying = [{"dies": False}, {"dies": True}]
        alive, _ = few.run(parallel_tasks.dies_between_passes, 2, by_rank=dying, timeout=60.0)
        assert alive.startswith("rank 0 of 2 got no message from rank 1 within 60 s"), alive


def test_the_example_goes_on_from_its_checkpoint_with_other_ranks(ranks, tmp_path):
    run = {"path": "examples/train_long_gpt.py"}
    whole = ranks.run(parallel_tasks.example, 2, steps=6, checkpoint=None, **run)
    first = ranks.run(parallel_tasks.example, 3, steps=4, checkpoint=tmp_path / "long.pt", **run)
    rest = ranks.run(parallel_tasks.example, 2, steps=6, checkpoint=tmp_path / "long.pt", **run)
    assert whole[0] == whole[1]
    assert len(rest[0]) == 2
    assert first[0] + rest[0] == pytest.approx(whole[0], abs=1e-4)
    assert whole[0][-1] < whole[0][0]


def test_the_example_of_pictures_has_the_losses_and_gradients_of_one_device(ranks):
    """Heads of 256 with windows and pictures, and heads of 512, packed."""
    for differences in ranks.run(parallel_tasks.pictures_example, 2):
        assert isinstance(differences, tuple), differences
        assert max(differences) < 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@walk(
    "spans",
    [
        ((0, 6),),
        ((0, 6), (1, 3)),
        ((0, 6), (0, 6)),
        ((3, 6), (0, 6)),
        ((3, 6), (0, 3)),
        ((1, 3), (2, 5)),
        ((1, 3), (4, 5), (2, 6)),
        ((1, 3), (4, 6), (0, 6)),
        ((0, 6), (3, 4), (0, 2)),
        ((0, 6), (1, 3), (2, 6)),
        ((0, 6), (1, 3), (0, 6)),
    ],
)
def test_gradients_of_some_tokens_add_up(dtype, spans):
    torch.manual_seed(0)
    like, total = torch.empty(2, 6, 3, 4), torch.zeros(2, 6, 3, 4, dtype=torch.float64)
    gradients = Total(like, torch.float64)
    for start, stop in spans:
        part = torch.randn(2, stop - start, 3, 4, dtype=torch.float64)
        total[:, start:stop] += part
        gradients.add(part, start, stop)
    torch.testing.assert_close(gradients.rounded(dtype), total.to(dtype))


@walk("spans", [((0, 6), (1, 3)), ((1, 3), (4, 6), (0, 6)), ((0, 6), (1, 3), (2, 6))])
def test_a_sum_in_16_bits_grows_in_place(spans):
    """Of gradients of all tokens that a kernel has rounded, and float32 gradients of some."""
    torch.manual_seed(0)
    like, total = torch.empty(1, 6, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 6, 3, 4)
    gradients, whole = Total(like, torch.float32), like
    for start, stop in spans:
        part = torch.randn(1, stop - start, 3, 4)
        if stop - start == 6:
            whole = part = part.bfloat16()
        total[:, start:stop] += part
        gradients.add(part, start, stop)
    found = gradients.rounded(torch.bfloat16)
    torch.testing.assert_close(found, total.bfloat16(), rtol=0, atol=0)
    apart = spans != ((0, 6), (1, 3), (2, 6))
    assert (found.data_ptr() == whole.data_ptr()) == apart
