"""The products of experts: sorted rows in one kernel, against a product for each row."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from engine_models import folder, greedy, load, prompts

from flashtile.engine import SamplingParams, model
from flashtile.engine.config import read_config
from flashtile.engine.parallel import ALONE
from flashtile.reference.linear import scaled_weight
from targets import CUDA

pytest.importorskip("triton")


def check(
    device: str,
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    per_token: int,
    sizes: tuple[int, int],
    bias: bool,
    scales: str = "",
) -> None:
    from flashtile.backends.portable.linear.kernel import grouped_linear

    N, K = sizes
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, weight, b = draw(tokens, K), draw(experts, N, K), draw(experts, N) if bias else None
    chosen = torch.rand(tokens, experts, generator=generator).topk(per_token).indices.to(device)
    chosen[: tokens // 2, 0] = 1  # expert 1 gets most rows, and some experts get none
    sorted_experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    wide, scale = weight, None
    if scales:  # powers of two, so that neither product rounds a weight
        weight = weight.to(torch.float8_e4m3fn)
        shape = (experts, N) if scales == "channel" else (experts, -(-N // 128), -(-K // 128))
        scale = 2.0 ** torch.randint(-3, 2, shape, generator=generator).to(device, torch.float32)
        wide = torch.stack([scaled_weight(*one, dtype) for one in zip(weight, scale, strict=True)])
    products = torch.einsum("tk,tpnk->tpn", x.float(), wide[chosen].float())
    if b is not None:
        products += b[chosen].float()
    expected = products.reshape(-1, N)
    gathered = grouped_linear(x, weight, b, order // per_token, ends, True, scale)
    torch.testing.assert_close(gathered.float(), expected[order], atol=0.02, rtol=0.01)
    inputs = x[order // per_token]
    scattered = grouped_linear(inputs, weight, b, order, ends, False, scale)
    torch.testing.assert_close(scattered.float(), expected, atol=0.02, rtol=0.01)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "sizes", "bias"),
    [(1, 4, 2, (32, 128), True), (13, 5, 2, (40, 72), False), (40, 3, 1, (24, 136), True)],
)
def test_rows_meet_the_weights_of_their_experts(tokens, experts, per_token, sizes, bias):
    check("cpu", torch.float16, tokens, experts, per_token, sizes, bias)


@pytest.mark.interpreter
@pytest.mark.parametrize("scales", ["channel", "block"])
@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "sizes", "bias"),
    [(1, 4, 2, (32, 128), True), (13, 5, 2, (200, 264), False), (40, 3, 1, (256, 136), True)],
)
def test_weights_in_e4m3_are_scaled(tokens, experts, per_token, sizes, bias, scales):
    """Also where a block of scales ends with its expert."""
    check("cpu", torch.float16, tokens, experts, per_token, sizes, bias, scales)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize(("tokens", "bias"), [(1, True), (7, False), (64, True), (500, False), (3000, True)])
@pytest.mark.parametrize(("experts", "per_token"), [(8, 2), (128, 8)])
@pytest.mark.parametrize("scales", ["", "channel", "block"])
def test_rows_meet_the_weights_of_their_experts_on_a_gpu(tokens, experts, per_token, bias, scales):
    check("cuda", torch.bfloat16, tokens, experts, per_token, (384, 512), bias, scales)


def test_there_are_no_rows():
    from flashtile.backends.portable.linear.kernel import grouped_linear

    ends = torch.zeros(3, dtype=torch.int32)
    rows = torch.zeros(0, dtype=torch.int64)
    assert grouped_linear(torch.ones(0, 4), torch.ones(3, 5, 4), None, rows, ends, True).shape == (0, 5)


NAMES = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.mark.parametrize("name", NAMES)
def test_experts_without_waiting_for_the_host_give_the_same_tokens(name, monkeypatch):
    """As in float32 on a GPU: a step that a graph captures cannot depend on the numbers of the experts."""
    monkeypatch.setattr(model, "FakeTensor", torch.Tensor)  # whose values the host does not know
    outputs = load(name, block_size=4).generate(prompts(), SamplingParams(temperature=0, max_tokens=6))
    assert [output.outputs[0].token_ids for output in outputs] == [tokens[:6] for tokens in greedy(name, 14)]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "scales"), [*((name, "") for name in NAMES), ("mixtral", "channel"), ("qwen3_moe", "block")]
)
def test_experts_in_one_kernel_are_those_one_by_one(name, scales):
    from flashtile.engine.weights import random_weights

    config = read_config(folder(name))
    if scales:
        config = replace(config, scales=scales, expert_size=128)
    weights = random_weights(config, torch.device("cpu"), torch.float16)
    experts = model.Experts(config, weights, 0, ALONE)
    assert experts.down.weight.dtype == (torch.float8_e4m3fn if scales else torch.float16)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).half()
    for residual in (None, x):
        expected = experts(x, None, residual)
        with mock.patch.object(model, "FakeTensor", torch.Tensor):
            found = experts(x, None, residual)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("scales", "dims"), [("", 0), ("channel", 1), ("block", 2)])
def test_kernels_of_experts_are_compiled_ahead(scales, dims):
    from flashtile.backends.common.device import Target
    from flashtile.compilation.compiling import launches
    from flashtile.engine.step_calls import Limits, step_calls

    limits = Limits(64, max_num_seqs=2, max_num_batched_tokens=8, num_blocks=8)
    sizes = {"head_dim": 128, "expert_size": 128, "intermediate_size": 128}
    config = replace(read_config(folder("qwen3_moe")), dtype="bfloat16", scales=scales, **sizes)
    products = [call for call in step_calls(config, limits) if "grouped" in str(call)]
    assert len(products) == 2
    for call in products:
        launched = launches(call, Target("card", (9, 0), 132))
        assert [launch._fixed[2].BLOCK_M for launch, _ in launched] == [8, 16, 32, 64]
        assert {launch._fixed[2].BLOCK_SCALES for launch, _ in launched} == {dims == 2}
        assert {launch._fixed[3].CHANNEL_SCALES for launch, _ in launched} == {dims == 1}
        assert {tensors[1].dtype.itemsize for _, tensors in launched} == {1 if scales else 2}
