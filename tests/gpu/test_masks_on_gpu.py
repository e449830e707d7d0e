"""Masks, biases and dropout on the card: graphs, bits, and nothing written out or read in vain."""

from __future__ import annotations

import pytest
import torch
from graphs import captured

import closures
import flashtile
from flashtile import dropout, testing

pytestmark = pytest.mark.gpu


def inputs(seqlen=1024, batch=2, heads=4, head_dim=64, dtype=torch.bfloat16):
    shape = (batch, seqlen, heads, head_dim)
    return [testing.random_tensor(shape, dtype, "cuda", seed=i).requires_grad_() for i in range(3)]


def test_a_graph_drops_anew_at_each_replay_and_keeps_its_backward_pass_in_step():
    q, k, v = inputs(256)
    dout = torch.randn_like(q)

    def step():
        out = flashtile.attention(q, k, v, dropout_p=0.3)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    graph, results = captured(step)
    runs = []
    for _ in range(2):
        graph.replay()
        runs.append([t.clone() for t in results])
    assert not torch.equal(runs[0][0], runs[1][0])
    for out, *gradients in runs:
        assert all(t.isfinite().all() for t in (out, *gradients))


@pytest.mark.parametrize("named", [(1, 1, 1), (1, 4, 1), (2, 1, 1024), (2, 4, 1024)])
def test_the_gradient_of_a_bias_has_the_same_bits_each_time(named):
    q, k, v = inputs()
    batch, heads, rows = named
    bias = torch.randn(batch, heads, rows, 1024, device="cuda", requires_grad=True)
    gradients = [
        torch.autograd.grad(
            flashtile.attention(q, k, v, bias=bias, causal=True).float().square().sum(), bias
        )[0]
        for _ in range(20)
    ]
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def test_nothing_that_is_broadcast_is_written_out():
    """One mask of 4096 by 4096 for 64 heads: a copy of it for each would be a GiB."""
    q, k, v = inputs(4096, 1, 64)
    mask = torch.rand(1, 1, 4096, 4096, device="cuda") > 0.5
    bias = torch.randn(1, 1, 4096, 4096, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flashtile.attention(q, k, v, mask=mask, bias=bias).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 512 * 2**20


def test_poisoned_padding_is_not_read_where_blocks_are_left_out():
    """NaN in keys whole blocks before the first and behind the last: nobody touches them."""
    q, k, v = inputs(1024)
    padding = torch.zeros(2, 1024, dtype=torch.bool, device="cuda")
    padding[0, 256:512] = padding[1, 512:768] = True
    expected = flashtile.attention(q, k, v, key_padding_mask=padding)
    with torch.no_grad():
        for tensor in (k, v):
            tensor[0, :256] = tensor[0, 512:] = torch.nan
            tensor[1, :512] = tensor[1, 768:] = torch.nan
    out = flashtile.attention(q, k, v, key_padding_mask=padding)
    assert torch.equal(out, expected)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert dq.isfinite().all()
    assert dk[0, :256].eq(0).all()
    assert dv[1, 768:].eq(0).all()


@pytest.mark.parametrize("dropout_p", [0.37, 0.03])
def test_the_card_keeps_what_the_cpu_keeps(dropout_p):
    state = torch.tensor([2**62 + 99, 2**34 + 7])
    places = (range(2), range(4), range(300), range(517))
    on_cpu = dropout.kept(state, dropout_p, 4, *places)
    assert torch.equal(dropout.kept(state.cuda(), dropout_p, 4, *places).cpu(), on_cpu)
    q = torch.zeros(2, 300, 4, 64, device="cuda", dtype=torch.float16)
    k = torch.zeros(2, 128, 4, 64, device="cuda", dtype=torch.float16)
    v = torch.eye(128, device="cuda", dtype=torch.float16)[None, :, None].expand(2, -1, 4, -1).contiguous()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for backend in ("portable", "hopper") if hopper else ("portable",):
        out = flashtile.attention(q, k, v, dropout_p=dropout_p, rng_state=state.cuda(), backend=backend)
        assert torch.equal((out.transpose(1, 2) != 0).cpu(), on_cpu[..., :128]), backend


@pytest.mark.parametrize("dropout_p", [0.003, 0.1, 0.17, 0.5])
def test_kernels_drop_the_share_that_is_asked_for(dropout_p):
    """Over 10^8 probabilities: with one value for each key, out says which were dropped."""
    batch, seqlen_q, heads, keys = 16, 4096, 16, 128
    q = torch.zeros(batch, seqlen_q, heads, keys, device="cuda", dtype=torch.float16)
    v = torch.eye(keys, device="cuda", dtype=q.dtype)[None, :, None].expand(batch, -1, heads, -1).contiguous()
    state = torch.tensor([11, 0], device="cuda")
    hopper = torch.cuda.get_device_capability() == (9, 0)
    for backend in ("portable", "hopper") if hopper else ("portable",):
        out = flashtile.attention(
            q, torch.zeros_like(v), v, dropout_p=dropout_p, rng_state=state, backend=backend
        )
        dropped = 1 - out.count_nonzero().item() / out.numel()
        assert abs(dropped - dropout_p) < 1e-4, backend


def test_compiled_training_with_dropout_and_a_bias():
    q, k, v = inputs(512)
    bias = torch.randn(1, 4, 512, 512, device="cuda", requires_grad=True)
    call = torch.compile(lambda *t: flashtile.attention(*t[:3], bias=t[3], dropout_p=0.1), fullgraph=True)
    torch.autograd.grad(call(q, k, v, bias).sum(), (q, k, v, bias))


@pytest.mark.parametrize("make", closures.DEFINED_IN_THE_CALL)
def test_functions_of_the_graph_itself_compile(make):
    """On the CPU as well, but a machine with a GPU may have another torch, whose Dynamo differs."""

    def attend(q):
        return flashtile.attention(q, q, q, score_mod=make(q))

    (q, *_) = inputs(64)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(q), attend(q))
