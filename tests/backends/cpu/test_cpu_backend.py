"""The CPU backend's own properties: two algorithms, their blocks and memory, and which one is chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile
from cases import Case
from flashtile import testing
from flashtile.backends import cpu
from flashtile.backends.cpu import flash
from flashtile.backends.cpu.config import Config, Fused, Tiled
from flashtile.backends.cpu.parts import OptionalInputs
from flashtile.checks.conversions import as_masking
from flashtile.linear import linear
from flashtile.problems.attention import OptionalTensors, Options, Problem
from flashtile.problems.masking import CAUSAL, Masking, split
from flashtile.reference import attention as reference
from walk import walk

pytestmark = pytest.mark.numerical

WINDOWS = ((-1, -1), (-1, 0), (0, 0), (3, -1), (-1, 4), (5, 2), (100, 100))
LENGTHS = ((1, 1), (7, 7), (9, 4), (4, 9), (12, 1), (1, 12), (20, 6))


def using(**configs: Fused | Tiled):
    """:func:`flashtile.attention` by the CPU backend, with some fields of its configuration replaced."""

    def attention(q, k, v, *, return_lse, alibi_slopes=None, causal=False, window_size=(-1, -1), **options):
        options = Options(**options, masking=as_masking(causal, window_size))
        problem = Problem.from_tensors(q, k, v, OptionalTensors(alibi_slopes=alibi_slopes), options)
        config = dataclasses.replace(cpu.configure_forward(problem), **configs)
        return _WithConfig.apply(q, k, v, alibi_slopes, problem, config)

    return attention


class _WithConfig(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, alibi_slopes, problem, config):
        out, lse = cpu.prepare_forward(problem, config)(q, k, v, OptionalTensors(alibi_slopes=alibi_slopes))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = alibi_slopes, problem, config
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        alibi_slopes, problem, config = ctx.call
        launch = cpu.prepare_backward(problem, config)
        dout = torch.zeros(problem.out_shape, dtype=problem.dtype) if dout is None else dout.contiguous()
        *gradients, _, _ = launch(dout, dlse, *ctx.saved_tensors, OptionalTensors(alibi_slopes=alibi_slopes))
        return (*gradients, None, None, None)


def tensors(batch=1, seqlen_q=64, seqlen_k=64, heads_q=2, heads_kv=2, head_dim=16, dtype=torch.float32):
    q = testing.random_tensor((batch, seqlen_q, heads_q, head_dim), dtype, "cpu", seed=1)
    shape_kv = (batch, seqlen_k, heads_kv, head_dim)
    k, v = (testing.random_tensor(shape_kv, dtype, "cpu", seed=seed) for seed in (2, 3))
    return q, k, v


def configuration(q, k, v, alibi_slopes=None, **options) -> Config:
    extras = OptionalTensors(alibi_slopes=alibi_slopes)
    return cpu.configure_forward(Problem.from_tensors(q, k, v, extras, Options(**options)))


def test_split_covers_once() -> None:
    assert [list(block) for block in split(range(3, 10), 3)] == [[3, 4, 5], [6, 7, 8], [9]]
    assert list(split(range(3, 3), 3)) == []


class TestConfigure:
    @walk(
        "options",
        [
            {},
            {"masking": CAUSAL},
            {"masking": Masking(window_left=5)},
            {"masking": Masking(window_left=9, window_right=3)},
            {"softmax_scale": 0.3},
        ],
    )
    def test_torch_kernel(self, options: dict[str, Any]) -> None:
        config = configuration(*tensors(), **options)
        assert isinstance(config.forward, Fused)
        assert isinstance(config.backward, Fused)
        assert isinstance(config.backward_lse, Tiled)

    @pytest.mark.parametrize("options", [{"softcap": 4.0}, {"softmax_scale": 0.0}, {"softmax_scale": -0.3}])
    def test_tiled(self, options: dict[str, Any]) -> None:
        config = configuration(*tensors(), **options)
        assert isinstance(config.forward, Tiled)
        assert isinstance(config.backward, Tiled)

    def test_unequal_head_dims_are_tiled(self) -> None:
        q, k, v = tensors()
        assert isinstance(configuration(q, k, v[..., :8]).forward, Tiled)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_16_bits_where_they_are_fast_and_fine_enough(self, dtype: torch.dtype, monkeypatch) -> None:
        monkeypatch.setattr(cpu.config, "_multiplies_fast", lambda dtype: True)

        def dtypes(alibi_slopes=None, **shape) -> tuple[torch.dtype, torch.dtype]:
            config = configuration(*tensors(**shape, dtype=dtype), alibi_slopes)
            return config.forward.compute_dtype, config.backward.compute_dtype

        assert dtypes(seqlen_q=1024) == (dtype, dtype)
        assert dtypes(seqlen_q=100) == (dtype, torch.float32)
        assert dtypes(seqlen_q=1) == (torch.float32, torch.float32)
        assert dtypes(seqlen_q=1, heads_q=4) == (dtype, torch.float32)
        assert dtypes(torch.ones(2), seqlen_q=1024) == (torch.float32, torch.float32)
        monkeypatch.setattr(cpu.config, "_multiplies_fast", lambda dtype: False)
        assert dtypes(seqlen_q=1024) == (torch.float32, torch.float32)

    @pytest.mark.parametrize("fast", [torch.float16, torch.bfloat16])
    def test_each_16_bit_dtype_may_be_fast_alone(self, fast: torch.dtype, monkeypatch) -> None:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            monkeypatch.setattr(
                torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda dtype=dtype: dtype == fast
            )
        for dtype in (torch.float16, torch.bfloat16):
            config = configuration(*tensors(seqlen_q=1024, dtype=dtype))
            assert config.forward.compute_dtype == (dtype if dtype == fast else torch.float32)
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        config = configuration(*tensors(seqlen_q=1024, dtype=fast))
        assert config.forward.compute_dtype == torch.float32

    def test_float64_stays(self) -> None:
        config = configuration(*tensors(dtype=torch.float64))
        assert {config.forward.compute_dtype, config.backward_lse.compute_dtype} == {torch.float64}

    def test_other_devices_are_refused(self) -> None:
        problem = Problem.from_tensors(*(t.to("meta") for t in tensors()))
        assert cpu.reason_against(problem, explicit=True) == "it computes on the CPU, the tensors are on meta"
        assert cpu.reason_against(dataclasses.replace(problem, device=torch.device("cpu")), True) is None


CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (21, 6)},
    "left_only": {"window_size": (13, -1)},
    "alibi": {"causal": True, "alibi": True},
}


SHAPES = (70, 70), (33, 90), (90, 33)


def pairs(*blocks: Any) -> Any:
    """Each of CALLS with each of ``blocks``, and each of SHAPES with each of both."""
    return pytest.mark.parametrize(
        ("call", "lengths", "blocks"),
        [
            (call, SHAPES[(i + j) % len(SHAPES)], block)
            for i, call in enumerate(CALLS)
            for j, block in enumerate(blocks)
        ],
        ids=str,
    )


class TestAnyBlocks:
    """Results meet the error rule wherever the edges of blocks fall."""

    def check(self, call: str, lengths: tuple[int, int], options: dict[str, Any], **configs) -> None:
        q, k, v = tensors(2, *lengths, heads_q=6, heads_kv=3)
        arguments = {**CALLS[call], **options}
        if arguments.pop("alibi", False):
            arguments["alibi_slopes"] = testing.random_alibi_slopes((2, 6), "cpu")
        dlse = None if "backward" in configs else testing.random_gradients(q, v)[1]
        dout = testing.random_gradients(q, v)[0]
        testing.check(q, k, v, dout=dout, dlse=dlse, function=using(**configs), **arguments)

    @pairs((8, 5, 2, 3.0), (64, 16, 1, 0.0), (16, 64, 100, 3.0), (1, 7, 3, 0.0))
    def test_tiled(self, call, lengths, blocks) -> None:
        *sizes, softcap = blocks
        tiled = Tiled(*sizes, torch.float32)
        self.check(call, lengths, {"softcap": softcap}, forward=tiled, backward=tiled, backward_lse=tiled)
        self.check(call, lengths, {"softcap": softcap}, forward=tiled, backward_lse=tiled)

    @pairs((1, 10**6), (16, 1), (24, 24 * 200 * 2 + 1), (128, 10**6))
    def test_fused(self, call, lengths, blocks) -> None:
        fused = Fused(torch.float32, *blocks)
        self.check(call, lengths, {}, forward=fused, backward=fused)


@walk("dtype", [torch.bfloat16, torch.float16])
@walk("heads", [(2, 2), (8, 1)])
@walk("options", [{}, {"causal": True}, {"window_size": (90, 0)}])
def test_16_bit_products_meet_the_error_rule(dtype, heads, options) -> None:
    q, k, v = tensors(1, 256, 256, *heads, head_dim=32, dtype=dtype)
    fused = Fused(dtype)
    dout, _ = testing.random_gradients(q, v)
    testing.check(q, k, v, dout=dout, function=using(forward=fused, backward=fused), **options)


@pytest.mark.parametrize("rows", [1, 300])
def test_a_bias_of_several_blocks_of_rows(rows) -> None:
    q, k, v = tensors(1, 300, 20, heads_q=1, heads_kv=1)
    bias = testing.random_tensor((1, 1, rows, 20), torch.float32, "cpu", seed=4)
    testing.check(q, k, v, bias=bias, backend="cpu")


@walk("dtype", [torch.bfloat16, torch.float32])
@walk("options", [{}, {"causal": True}, {"window_size": (9, 0)}])
def test_decode_with_groups(dtype, options) -> None:
    q, k, v = tensors(3, 1, 40, heads_q=8, heads_kv=2, dtype=dtype)
    testing.check(q, k, v, backend="cpu", **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 2)}, {"alibi": True}])
@pytest.mark.parametrize("limit", [40 * 32, 5 * 40 * 32, 7 * 40 * 32])
def test_conversions_of_a_few_heads_at_a_time(monkeypatch, options, limit) -> None:
    monkeypatch.setattr(flash, "CONVERTED_ELEMENTS", limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    q, k, v = tensors(3, 40, 40, heads_q=6, heads_kv=3, head_dim=32, dtype=torch.bfloat16)
    arguments = {name: value for name, value in options.items() if name != "alibi"}
    if "alibi" in options:
        arguments["alibi_slopes"] = testing.random_alibi_slopes((3, 6), "cpu")
    testing.check(q, k, v, gradients=False, function=using(forward=Fused(torch.float32)), **arguments)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@walk(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (100, 50)},
        {"alibi_slopes": torch.ones(1), "causal": True},
        {"softcap": 5.0},
        {"softmax_scale": -0.1, "causal": True},
    ],
)
def test_no_score_matrix(options: dict[str, Any]) -> None:
    """The largest tensor anywhere is an eighth of the score matrix at most."""
    seqlen = 2048
    q, k, v = (t.requires_grad_() for t in tensors(1, seqlen, seqlen, 1, 1))
    for with_lse in (False, True):
        with _Largest() as largest:
            out, lse = flashtile.attention(q, k, v, return_lse=True, backend="cpu", **options)
            (out.sum() + (lse.sum() if with_lse else 0)).backward()
        assert 0 < largest.elements <= seqlen * seqlen // 8


@walk(
    "case",
    [
        Case("fused", causal=True),
        Case("banded", window_size=(30, 3), alibi="batch"),
        Case("tiled", softcap=4.0, causal=True),
        Case("ragged", lengths=((9, 40), (0, 5), (33, 33), (4, 0)), causal=True),
    ],
)
@walk("lse_gradient", [False, True])
def test_same_bits_every_time(case: Case, lse_gradient: bool) -> None:
    inputs = case.inputs("cpu")

    def results() -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs.qkv]
        out, lse = flashtile.attention(
            *leaves, return_lse=True, backend="cpu", deterministic=True, **inputs.arguments
        )
        upstream = [torch.ones_like(out), torch.ones_like(lse)][: 1 + lse_gradient]
        return [out, lse, *torch.autograd.grad([out, lse][: 1 + lse_gradient], leaves, upstream)]

    for first, second in zip(results(), results(), strict=True):
        assert first.is_contiguous()
        assert torch.equal(first, second)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_lse_gradient_of_rows_without_keys(softcap: float, value: float) -> None:
    """Whatever comes back into an lse of -inf, it reaches no gradient."""
    q, k, v = (t.requires_grad_() for t in tensors(seqlen_q=9, seqlen_k=4))
    out, lse = flashtile.attention(q, k, v, causal=True, softcap=softcap, return_lse=True, backend="cpu")
    upstream = torch.where(lse == -torch.inf, value, 1.0)
    gradients = torch.autograd.grad([out, lse], [q, k, v], [torch.ones_like(out), upstream])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :5].any()
    assert gradients[0][:, 5:].any()


def test_gradients_of_keys_are_summed_in_float32():
    """A key gets a term from each block of rows that sees it; in bfloat16 256 of them would be too coarse."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 256, 1, 16).bfloat16() for _ in range(4))
    slopes = OptionalInputs(alibi_slopes=torch.zeros(1))
    results = []
    for block_m in (256, 1):
        extras = OptionalTensors(alibi_slopes=slopes.alibi_slopes)
        problem = Problem.from_tensors(q, k, v, extras, Options())
        config = Fused(torch.bfloat16, BLOCK_M=block_m)
        out, lse = flash.forward(problem, config, q, k, v, slopes)
        results.append(flash.backward(problem, config, dout, None, q, k, v, out, lse, slopes))
    for whole, rows in zip(results[0], results[1], strict=True):
        torch.testing.assert_close(rows, whole, rtol=2**-6, atol=2**-6 * whole.abs().max().item())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("keys", "multiplied"),
    [
        (((0, 9),) * 3, ((3, 9),)),
        (((0, 4), (0, 4), (0, 0), (0, 4), (2, 9)), ((2, 4), (1, 4), (1, 7))),
    ],
    ids=["whole", "some"],
)
def test_padding_is_left_out(monkeypatch, causal, keys, multiplied) -> None:
    """Neighbours with the same keys share a call of torch's kernel, which sees no key of the padding."""
    q, k, v = (t.double().requires_grad_() for t in tensors(len(keys), 9, 9))
    places = torch.arange(9)
    mask = torch.stack([(first <= places) & (places < end) for first, end in keys])
    seen = []

    def forward(q, k, v, *arguments, **options):
        seen.append((k.shape[0], k.shape[2]))
        return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, *arguments, **options)

    monkeypatch.setattr(flash, "cpu_flash_forward", forward)
    options: dict[str, Any] = {"causal": causal, "key_padding_mask": mask}
    found = flashtile.attention(q, k, v, return_lse=True, **options)
    assert set(seen) == set(multiplied)
    assert causal or tuple(seen) == multiplied
    expected = reference.attention(q, k, v, **options)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(out.sum(), (q, k, v)) for out, _ in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "keys"), [(2, 0), (0, 5)], ids=["no keys", "no sequences"])
def test_padding_of_nothing(causal, batch, keys) -> None:
    q, k, v = tensors(batch, 3, keys)
    mask = torch.ones(batch, keys, dtype=torch.bool)
    out, lse = flashtile.attention(q, k, v, key_padding_mask=mask, causal=causal, return_lse=True)
    assert out.shape == q.shape
    assert not out.any()
    assert bool((lse == -torch.inf).all())


NAN_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 3)},
    "slopes": {"alibi_slopes": torch.ones(2)},
    "sink": {"sink": torch.zeros(2)},
    "padding": {"key_padding_mask": torch.arange(7)[None] < 6},
    "used": {"seqused_k": torch.tensor([6], dtype=torch.int32)},
}


@walk("dtype", [torch.float32, torch.bfloat16, torch.float64])
@walk("name", NAN_CALLS)
def test_a_row_of_nan_stays_nan(name: str, dtype: torch.dtype) -> None:
    """torch's kernel returns out 0 and lse 0 for such a row of few keys."""
    q, k, v = (testing.random_tensor((1, 7, 2, 8), dtype, "cpu", seed=i) for i in range(3))
    q[0, 3, 1, 2] = torch.nan
    out, lse = flashtile.attention(q, k, v, return_lse=True, **NAN_CALLS[name])
    expected = torch.zeros(1, 7, 2, dtype=torch.bool)
    expected[0, 3, 1] = True
    assert torch.equal(out.isnan(), expected[..., None].expand(out.shape))
    assert torch.equal(lse.isnan(), expected.mT)


def test_a_key_of_nan_that_is_seen_alone_stays_nan() -> None:
    q, k, v = (testing.random_tensor((1, n, 2, 8), torch.float32, "cpu", seed=n) for n in (4, 1, 1))
    assert flashtile.attention(q, torch.full_like(k, torch.nan), v).isnan().all()
    q, k, v = (testing.random_tensor((1, 4, 2, 8), torch.float32, "cpu", seed=n) for n in range(3))
    k[:, 0] = torch.nan
    assert flashtile.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=1).isnan().all()


def test_a_row_whose_lse_is_0_keeps_its_result() -> None:
    """One key with score 0."""
    q, v = torch.zeros(1, 5, 1, 8), torch.ones(1, 5, 1, 8)
    out, lse = flashtile.attention(q, q, v, causal=True, return_lse=True)
    assert torch.equal(out, v)
    torch.testing.assert_close(lse[0, 0], torch.arange(1, 6.0).log())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_products_are_exact_whatever_precision_torch_is_set_to(dtype) -> None:
    """fp16 gradients are computed by float32 products."""
    q, k, v = (torch.randn(1, 130, 2, 64).to(dtype).requires_grad_() for _ in range(3))

    def results() -> tuple[torch.Tensor, ...]:
        out, lse = flashtile.attention(q, k, v, return_lse=True)
        weights = flashtile.attention_weights(q.detach(), k.detach(), lse.detach())
        step = flashtile.flash_attn_with_kvcache(q.detach()[:, :3], k.detach(), v.detach())
        product = linear(q.detach()[0, :, 0], k.detach()[0, :, 0])
        return out, lse, weights, step, product, *torch.autograd.grad(out.sin().sum(), (q, k, v))

    expected, before = results(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        found = results()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
