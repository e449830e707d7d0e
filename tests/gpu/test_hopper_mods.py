"""Functions of scores and masks on the Hopper kernels, block masks of their tiles' sizes above all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile import masks, testing
from listed_calls import (
    LISTED_CALLS,
    MANY_TILES,
    SMALL_SCORES,
    ListedCall,
    check_gradients_beside_small_scores,
    check_small_scores,
    full_by_its_lists,
)
from targets import CUDA

HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")]


def check(call: ListedCall) -> None:
    """In memory full of NaN, which makes gradients deterministic.

    Only the kernels for head sizes over 128 take block masks then. For others the gradients follow without.
    """
    arguments = call.arguments("cuda")
    wide = max(call.head_dim, call.head_dim_v or 0) > 128
    testing.check(*call.inputs("cuda"), backend="hopper", gradients=wide, **arguments)
    if not wide:
        testing.check(*call.inputs("cuda"), backend="hopper", poison=False, **arguments)


@pytest.mark.parametrize("name", LISTED_CALLS)
def test_call(name: str) -> None:
    check(LISTED_CALLS[name])


@pytest.mark.parametrize("name", LISTED_CALLS)
def test_call_of_wide_heads(name: str) -> None:
    check(replace(LISTED_CALLS[name], head_dim=256))


@pytest.mark.parametrize("sizes", [(192, 192), (192, 128), (160, 160), (64, 256), (256, 64)], ids=str)
@pytest.mark.parametrize(
    "name", ["document", "no-keys", "ragged-in-a-full-block", "blocks-of-256", "mask-causal", "log-distance"]
)
def test_other_wide_heads(name: str, sizes: tuple[int, int]) -> None:
    check(replace(LISTED_CALLS[name], head_dim=sizes[0], head_dim_v=sizes[1]))


@pytest.mark.parametrize("small", SMALL_SCORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_rows_of_small_finite_scores(backend: str, dtype: torch.dtype, small: float) -> None:
    q, k, v = (tensor.to(dtype) for tensor in LISTED_CALLS["finite-fill"].inputs("cuda"))
    check_small_scores(q, k, v, backend, small)


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("bias", [False, True], ids=["score_mod", "bias"])
@pytest.mark.parametrize("small", [-1.1e9, -1e10, -3e11, -1e30])
def test_gradients_beside_small_finite_scores(small: float, bias: bool, backend: str) -> None:
    q, k, v = (tensor.to(torch.bfloat16) for tensor in LISTED_CALLS["finite-fill"].inputs("cuda"))
    check_gradients_beside_small_scores(q, k, v, backend, small, bias)


@pytest.mark.parametrize("name", MANY_TILES)
def test_many_tiles(name: str) -> None:
    check(MANY_TILES[name])


@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("name", MANY_TILES)
def test_many_tiles_of_wide_heads(name: str, head_dim: int) -> None:
    check(replace(MANY_TILES[name], head_dim=head_dim))


def test_gradients_of_wide_heads_are_the_same_in_every_run() -> None:
    call = replace(MANY_TILES["documents"], head_dim=256)
    tensors = [tensor.requires_grad_() for tensor in call.inputs("cuda")]
    arguments = call.arguments("cuda")

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        out = flashtile.attention(*tensors, backend="hopper", deterministic=deterministic, **arguments)
        return torch.autograd.grad(out.float().square().sum(), tensors)

    first = gradients(True)
    for deterministic in (True, False):
        for one, other in zip(first, gradients(deterministic), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_poison_in_empty_blocks_is_not_read(head_dim: int) -> None:
    """A mask that ends before the keys do: nobody touches what is behind it."""
    shape = (2, 1024, 4, head_dim)
    q, k, v = (testing.random_tensor(shape, torch.bfloat16, "cuda", seed=i) for i in range(3))
    block_mask = masks.create_block_mask(masks.padding(torch.tensor([512, 640]).cuda()), 2, None, 1024, 1024)
    clean = flashtile.attention(q, k, v, block_mask=block_mask, backend="hopper")
    k[0, 512:], v[0, 512:], k[1, 640:], v[1, 640:] = (torch.nan,) * 4
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    out = flashtile.attention(q, k, v, block_mask=block_mask, backend="hopper")
    assert torch.equal(out, clean)
    dq, dk, dv = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert dq.isfinite().all()
    assert dk[0, 512:].eq(0).all()
    assert dv[1, 640:].eq(0).all()


def test_a_block_mask_is_read_anew_at_each_replay_of_a_graph() -> None:
    q, k, v = (testing.random_tensor((1, 1024, 4, 128), torch.bfloat16, "cuda", seed=i) for i in range(3))
    block_mask = masks.create_block_mask(masks.causal(), None, None, 1024, 1024, "cuda")
    call = lambda: flashtile.attention(q, k, v, block_mask=block_mask, backend="hopper")  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.testing.assert_close(out, flashtile.attention(q, k, v, causal=True), atol=1e-2, rtol=1e-2)
    for name in ("full_kv_num_blocks", "full_q_num_blocks"):
        getattr(block_mask, name).zero_()  # what is left are the blocks on the diagonal
    graph.replay()
    parts = [tensor.view(8, 128, 4, 128) for tensor in (q, k, v)]
    expected = flashtile.attention(*parts, causal=True).view(1, 1024, 4, 128)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_a_full_block_hides_nothing() -> None:
    shape = (1, 300, 2, 64)
    q, k, v = (testing.random_tensor(shape, torch.float16, "cuda", seed=i).requires_grad_() for i in range(3))
    out = flashtile.attention(q, k, v, block_mask=full_by_its_lists(300, 300, "cuda"), backend="hopper")
    plain = flashtile.attention(q, k, v)
    torch.testing.assert_close(out, plain, atol=2e-3, rtol=2e-3)
    gradients, expected = (torch.autograd.grad(one.float().sum(), (q, k, v)) for one in (out, plain))
    torch.testing.assert_close(gradients, expected, atol=5e-3, rtol=5e-3)


def test_gradients_of_captured_tensors_come_from_the_portable_kernels() -> None:
    q, k, v = (testing.random_tensor((1, 256, 2, 64), torch.bfloat16, "cuda", seed=i) for i in range(3))
    slopes = torch.tensor([0.5, 0.1], device="cuda", requires_grad=True)
    explanation = flashtile.explain(q, k, v, score_mod=masks.alibi(slopes))
    assert explanation.backend == "hopper"
    out = flashtile.attention(q, k, v, score_mod=masks.alibi(slopes))
    (gradient,) = torch.autograd.grad(out.float().square().sum(), slopes)
    assert gradient.isfinite().all()
