"""Products with a weight on a card: Hopper's ring, every profiled tile, chains under dependent launch."""

from __future__ import annotations

import pytest
import torch

from flashtile.backends.hopper import linear as ring
from flashtile.linear import linear, linear_before_norm, linear_qkv
from flashtile.problems.linear import E4M3, LinearTensors
from linear_calls import CALLS, Call, check, describe, make_inputs
from targets import CUDA

pytestmark = pytest.mark.gpu
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
REPLAYS, CHECKED_EVERY = 10_000, 500

RING_CALLS = (
    *(call for call in CALLS if call.M <= 16 and call.scales != "block"),
    Call(1, 4096, 1032, norm=True, residual=True),
    Call(8, 4096, 1032, x_scale=True, residual=True, next_norm=True),
    Call(16, 1000, 2048, "silu_and_mul", norm=True, bias=True),
    Call(9, 640, 4104),
    Call(3, 12 * 128, 520, "qkv", norm=True, head_dim=128, rotary_dim=128),
    Call(16, 1024, 512, scales="channel"),
)


def profiled(x, weight, given):
    """(configuration, result) of every tile that fits the card."""
    from triton.runtime.errors import OutOfResources

    from flashtile.tools.linear_profile import candidates, problem_of

    for _, _, config, launch in candidates(
        problem_of(x.shape[0], *weight.shape, x.dtype, weight.dtype, x.device)
    ):
        try:
            yield config, launch(x, weight, given)
        except OutOfResources:
            continue


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("call", RING_CALLS, ids=lambda call: call.name)
def test_the_ring_is_within_the_error_rule(call):
    reason = ring.reason_against(describe(call, make_inputs(call, torch.bfloat16, "cuda", True)), True)
    if reason is not None:
        assert "multiples of 16 bytes" in reason or "no whole heads" in reason
        return
    for dtype, prefetch in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)):
        check(call, dtype, "cuda", aligned=True, backend="hopper", prefetch=prefetch)


@pytest.mark.parametrize("K", [2064, 4096])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_every_profiled_tile_is_right(rows, weight_dtype, K):
    from flashtile.tools.linear_profile import ProfiledOperands

    operands = ProfiledOperands(1016, K, torch.bfloat16, weight_dtype, torch.device("cuda"), once=True)
    x, weight = operands.x[:rows], operands.weights[0]
    expected = x.double() @ weight.double().T
    for config, y in profiled(x, weight, operands.given):
        assert (y - expected).abs().max() < 0.05, config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_every_e4m3_is_exact(rows, dtype):
    """Each of the 256, NaN and subnormals among them, times one."""
    bits = torch.zeros(256, 256, dtype=torch.uint8, device="cuda")
    bits[:, 7] = torch.arange(256, device="cuda")
    x = torch.zeros(rows, 256, dtype=dtype, device="cuda")
    x[:, 7] = 1
    given = LinearTensors(weight_scale=torch.ones(256, device="cuda"))
    expected = bits.view(E4M3)[:, 7].to(dtype).expand(rows, 256)
    for config, y in profiled(x, bits.view(E4M3), given):
        assert torch.equal(y.isnan(), expected.isnan()), config
        assert torch.equal(y.nan_to_num(), expected.nan_to_num()), config


@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_a_chain_replayed_ten_thousand_times_equals_eager(rows):
    """Each product reads what the one before wrote, and asks for its weight before that one has ended."""
    width, inner, heads, heads_kv, head_dim = 512, 768, 4, 2, 64
    torch.manual_seed(0)

    def new(*shape):
        return torch.randn(shape, device="cuda").mul(shape[-1] ** -0.5).bfloat16()

    qkv, out, gate_up, down = (
        new((heads + 2 * heads_kv) * head_dim, width), new(width, heads * head_dim), new(2 * inner, width),
        new(width, inner),
    )  # fmt: skip
    norm = torch.ones(width, device="cuda").bfloat16()
    angles = torch.rand(2, 64, head_dim // 2, device="cuda")
    start = torch.randn(rows, width, device="cuda").bfloat16()
    positions = torch.arange(rows, device="cuda", dtype=torch.int32) % 64
    slots = torch.arange(rows, device="cuda")

    def layer(hidden, caches, prefetch):
        q = linear_qkv(
            hidden, qkv, *caches, positions=positions, slot_mapping=slots, rotary_cos=angles[0],
            rotary_sin=angles[1], norm_weight=norm, prefetch=prefetch,
        )  # fmt: skip
        found = linear_before_norm(q.flatten(1), out, norm, residual=hidden, prefetch=prefetch)
        given = {"activation": "silu_and_mul", "prefetch": prefetch}
        gated = linear(found.scaled, gate_up, x_scale=found.factor, **given)
        gated = gated + linear(found.y, gate_up, norm_weight=norm, **given)
        return linear(gated, down, residual=start, prefetch=prefetch)

    def caches():
        return tuple(torch.zeros(2, 8, 16, heads_kv, head_dim, device="cuda", dtype=torch.bfloat16))

    with torch.no_grad():
        of_eager, of_graph = caches(), caches()
        eager, state = start.clone(), start.clone()
        layer(state, of_graph, True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state.copy_(layer(state, of_graph, True))
        for i in range(REPLAYS):
            graph.replay()
            eager = layer(eager, of_eager, False)
            if i % CHECKED_EVERY == CHECKED_EVERY - 1:
                assert torch.equal(state, eager), i
        assert all(map(torch.equal, of_eager, of_graph))
