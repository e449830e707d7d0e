"""Who watches our operators: counters of FLOPs, and DTensors, which ask how a call may be sharded."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import flashtile
from flashtile import fp8
from walk import walk


def rand(*shape, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def count(function, *arguments, **keywords):
    """FLOPs of a call and of its backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward:
        out = function(*arguments, **keywords)
    if not out.requires_grad:
        return forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def torch_counts(q, k, v):
    """What torch counts of its own flash attention over tensors of these shapes, without computing it."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (t.detach().transpose(1, 2).to("meta", torch.float16) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    aten = torch.ops.aten
    with FlopCounterMode(display=False) as forward:
        out, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v)
    with FlopCounterMode(display=False) as backward:
        aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, lse, *rest[:4], 0.0, False, *rest[4:6]
        )
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0}], ids=["", "causal"])
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 4), (8, 2)])
def test_attention_counts_as_torchs_own(heads, heads_kv, options):
    q = rand(2, 24, heads, 16).requires_grad_()
    k, v = rand(2, 40, heads_kv, 16), rand(2, 40, heads_kv, 16)
    assert count(flashtile.attention, q, k, v, **options) == torch_counts(q, k, v)


def test_a_head_dim_of_v_counts_for_itself():
    q, k, v = rand(2, 24, 8, 16).requires_grad_(), rand(2, 40, 2, 16), rand(2, 40, 2, 8)
    pairs = 2 * 2 * 24 * 40 * 8
    assert count(flashtile.attention, q, k, v) == (pairs * (16 + 8), pairs * (3 * 16 + 2 * 8))


def test_packed_sequences_count_one_by_one():
    q, k, v = rand(12, 8, 16).requires_grad_(), rand(30, 2, 16), rand(30, 2, 16)
    offsets = int32(0, 5, 12), int32(0, 20, 30)
    each = [
        torch_counts(q[None, :5], k[None, :20], v[None, :20]),
        torch_counts(q[None, 5:], k[None, 20:], v[None, 20:]),
    ]
    expected = tuple(map(sum, zip(*each, strict=True)))
    assert count(flashtile.flash_attn_varlen_func, q, k, v, *offsets, 7, 20) == expected


def test_a_transformed_and_a_compiled_call_count_the_same():
    from torch.utils.flop_counter import FlopCounterMode

    torch._dynamo.reset()
    q, k, v = rand(2, 24, 8, 16), rand(2, 40, 2, 16), rand(2, 40, 2, 16)
    expected = sum(torch_counts(q, k, v))
    compiled = torch.compile(flashtile.attention, backend="aot_eager")
    wanted = q.clone().requires_grad_()
    compiled(wanted, k, v)
    for run in (
        lambda: torch.func.grad(lambda q: flashtile.attention(q, k, v).sum())(q),
        lambda: compiled(wanted, k, v).sum().backward(),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        assert counter.get_total_flops() == expected


def test_fake_sequences_count_as_the_longest():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = rand(12, 8, 16), rand(30, 2, 16), rand(30, 2, 16)
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(t) for t in (q, k, v, int32(0, 5, 12), int32(0, 20, 30))]
        counted = count(flashtile.flash_attn_varlen_func, *tensors, 7, 20)
    assert counted == 2 * 2 * 7 * 20 * 8 * (16 + 16)


def test_decoding_counts_the_keys_in_use():
    cache = {"k_cache": rand(2, 50, 2, 16), "v_cache": rand(2, 50, 2, 8)}
    q, k, v = rand(2, 3, 8, 16), rand(2, 3, 2, 16), rand(2, 3, 2, 8)
    decode, each = flashtile.flash_attn_with_kvcache, 2 * 3 * 8 * (16 + 8)
    assert count(decode, q, **cache) == each * (50 + 50)
    assert count(decode, q, **cache, cache_seqlens=int32(5, 9)) == each * (5 + 9)
    assert count(decode, q, **cache, k=k, v=v, cache_seqlens=int32(5, 9)) == each * (8 + 12)
    assert count(decode, q, **cache, cache_seqlens=int32(5, 9), cache_leftpad=int32(1, 4)) == each * (4 + 5)
    flat, offsets = q.flatten(0, 1), {"cu_seqlens_q": int32(0, 1, 6), "max_seqlen_q": 5}
    expected = 2 * 8 * (16 + 8) * (1 * 5 + 5 * 9)
    assert count(decode, flat, **cache, cache_seqlens=int32(5, 9), **offsets) == expected


def test_fp8_counts_what_was_asked_for_and_not_its_padding():
    q, k, v = (rand(2, 24, 4, 24, dtype=torch.bfloat16) for _ in range(3))
    assert count(fp8.attention, q, k, v) == 2 * 2 * 24 * 24 * 4 * (24 + 24)


@pytest.mark.thorough
def test_a_counter_may_be_imported_after_the_first_call():
    code = """
import torch, flashtile
tensors = torch.zeros(3, 1, 8, 2, 16).unbind()
flashtile.attention(*tensors)
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    flashtile.attention(*tensors)
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 2 * 8 * 8 * 2 * (16 + 16)


# DTensor: the shards of one rank, whose collectives do nothing, and all of a mesh of two processes.


@pytest.fixture(params=[0, 1])
def mesh(request):
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=request.param, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def own(tensor, placement, mesh):
    """The part of a tensor that this rank has, as it is and as a DTensor; leaves that want a gradient."""
    from torch.distributed.tensor import DTensor

    parts = tensor.chunk(mesh.size(), placement.dim) if placement.is_shard() else [tensor] * mesh.size()
    wanted = tensor.is_floating_point()
    local = parts[mesh.get_local_rank()].clone().requires_grad_(wanted)
    whole = {"shape": tensor.shape, "stride": tensor.stride()}
    sharded = DTensor.from_local(local.detach(), mesh, [placement], run_check=False, **whole)
    return local, sharded.requires_grad_(wanted)


def dense_call(way):
    """Tensors of a call and their placements, for work that is shared by batch or by heads, or not shared."""
    from torch.distributed.tensor import Replicate, Shard

    whole = Replicate()
    rows = {"batch": Shard(0), "heads": Shard(2), "whole": whole}[way]
    by_batch, by_head = (Shard(0) if way == name else whole for name in ("batch", "heads"))
    slopes = {"batch": Shard(0), "heads": Shard(1), "whole": whole}[way]
    return {
        "q": (rand(4, 6, 8, 16), rows),
        "k": (rand(4, 7, 4, 16), rows),
        "v": (rand(4, 7, 4, 8), rows),
        "sink": (rand(8), by_head),
        "seqused_k": (int32(7, 3, 0, 5), by_batch),
        "alibi_slopes": (rand(4, 8), slopes),
        "mask": (rand(4, 1, 6, 7).detach() > -1, by_batch),
        "bias": (rand(1, 8, 1, 7), Shard(1) if way == "heads" else whole),
    }


def packed_call(way):
    from torch.distributed.tensor import Replicate, Shard

    rows, by_head = (Shard(1), Shard(0)) if way == "heads" else (Replicate(), Replicate())
    return {
        "q": (rand(12, 8, 16), rows),
        "k": (rand(30, 4, 16), rows),
        "v": (rand(30, 4, 16), rows),
        "sink": (rand(8), by_head),
        "alibi_slopes": (rand(8), by_head),
        "cu_seqlens_q": (int32(0, 5, 12), Replicate()),
        "cu_seqlens_k": (int32(0, 20, 30), Replicate()),
    }


WAYS = [(dense_call, "batch"), (dense_call, "heads"), (dense_call, "whole"), (packed_call, "heads"),
        (packed_call, "whole")]  # fmt: skip


def differentiated(tensors, **lengths):
    slopes = tensors.pop("alibi_slopes").detach()
    out, lse = flashtile.attention(**tensors, alibi_slopes=slopes, causal=True, return_lse=True, **lengths)
    wanted = [t for t in tensors.values() if t.requires_grad]
    return out, lse, torch.autograd.grad(out.square().sum() + lse.exp().sum(), wanted)


@walk(("call", "way"), WAYS)
def test_a_shard_is_attended_to_where_it_lies(call, way, mesh):
    from torch.distributed.tensor.debug import CommDebugMode

    given = {name: own(*placed, mesh) for name, placed in call(way).items()}
    lengths = {"max_seqlen_q": 7, "max_seqlen_k": 20} if call is packed_call else {}
    out, lse, gradients = differentiated({name: local for name, (local, _) in given.items()}, **lengths)
    with CommDebugMode() as communication:
        results = differentiated({name: sharded for name, (_, sharded) in given.items()}, **lengths)
    assert communication.get_total_counts() == 0
    sharded_out, sharded_lse, sharded_gradients = results
    q = given["q"][1]
    assert sharded_out.placements == q.placements
    assert torch.equal(sharded_out.to_local(), out)
    assert torch.equal(sharded_lse.to_local(), lse)
    for sharded, local in zip(sharded_gradients, gradients, strict=True):
        torch.testing.assert_close(sharded.to_local(), local)
    dq, dk, dv, dsink, *dbias = sharded_gradients
    assert dq.placements == dk.placements == dv.placements == q.placements
    for gradient in (dsink, *dbias):  # each has a term of its sequences
        assert gradient.placements[0].is_partial() == (way == "batch")


def test_key_heads_that_do_not_divide_are_not_shared(mesh):
    """Two query heads of three for each key head: a shard would have a key head and a half."""
    from torch.distributed.tensor import Replicate, Shard

    q, k, v = rand(2, 6, 6, 16), rand(2, 7, 3, 16), rand(2, 7, 3, 16)
    tensors = [own(t, placement, mesh)[1] for t, placement in ((q, Shard(0)), (k, Shard(0)), (v, Shard(0)))]
    assert flashtile.attention(*tensors).placements == (Shard(0),)
    tensors = [own(t, Replicate(), mesh)[1] for t in (q, k, v)]
    assert flashtile.attention(*tensors).placements == (Replicate(),)
    with_all = own(rand(2, 7, 6, 16), Shard(2), mesh)[1]
    assert flashtile.attention(own(q, Shard(2), mesh)[1], with_all, with_all).placements == (Shard(2),)
    redistributed = flashtile.attention(own(q, Shard(2), mesh)[1], *tensors[1:])
    assert redistributed.placements == (Replicate(),)
    alone = [own(rand(2, 7, 3, 16), Shard(2), mesh)[1] for _ in range(3)]  # two heads here, one elsewhere
    assert flashtile.attention(*alone).placements == (Shard(2),)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_first_call_that_is_compiled():
    """In a process of its own, where no eager call has told DTensor how to shard."""
    code = """
import torch, flashtile
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
local = [t.requires_grad_() for t in torch.rand(3, 2, 6, 4, 16).unbind()]
sharded = [DTensor.from_local(t.detach(), mesh, [Shard(2)], run_check=False).requires_grad_() for t in local]
compiled = torch.compile(flashtile.attention, backend="aot_eager", fullgraph=True)
for call, tensors in ((flashtile.attention, local), (compiled, sharded)):
    call(*tensors).sum().backward()
for ours, expected in zip(sharded, local):
    assert ours.grad.placements == (Shard(2),)
    torch.testing.assert_close(ours.grad.to_local(), expected.grad)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def all_ranks(rank, store):
    """Everything gathered from two processes equals the call on one."""
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for call, way in WAYS:
        given = call(way)
        lengths = {"max_seqlen_q": 7, "max_seqlen_k": 20} if call is packed_call else {}
        local = {n: t.clone().requires_grad_(t.is_floating_point()) for n, (t, _) in given.items()}
        sharded = {
            n: distribute_tensor(t, mesh, [p]).requires_grad_(t.is_floating_point())
            for n, (t, p) in given.items()
        }
        out, lse, gradients = differentiated(local, **lengths)
        sharded_out, sharded_lse, sharded_gradients = differentiated(sharded, **lengths)
        for ours, expected in zip(
            (sharded_out, sharded_lse, *sharded_gradients), (out, lse, *gradients), strict=True
        ):
            torch.testing.assert_close(ours.full_tensor(), expected)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.thorough
def test_two_processes_compute_what_one_does(tmp_path):
    torch.multiprocessing.spawn(all_ranks, (str(tmp_path / "store"),), nprocs=2)
