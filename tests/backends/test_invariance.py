"""``invariant=True``: a row has the same bits in all calls, whatever else they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashtile
import linear_calls
from flashtile.backends.common.device import Target
from flashtile.backends.portable.decode import config as decode_config
from flashtile.backends.portable.linear import config as linear_config
from flashtile.hardware.cards import CARDS
from flashtile.problems.linear import LinearProblem
from packed_and_paged import CALLS, Sequences, bits

BACKENDS = [
    "cpu",
    pytest.param("portable", marks=pytest.mark.interpreter),
    pytest.param(None, marks=pytest.mark.gpu),
]
LONGER = 32
"""Factor of all lengths and positions on a GPU."""


@pytest.fixture(autouse=True)
def _products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter's products add in one order for any number of rows, as those of a GPU do.

    NumPy's library may choose the order by the number of rows: on some CPUs it does, on others not.
    """

    def product(a: Any, b: Any, dtype: Any) -> Any:
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for k in range(a.shape[-1]):
            total += a[..., k, None].astype(dtype) * b[..., k, None, :].astype(dtype)
        return total

    monkeypatch.setattr(np, "matmul", product)


def device_of(backend: str | None) -> str:
    return "cuda" if backend is None else "cpu"


def sequences_on(device: str, *sizes: Any) -> Sequences:
    return Sequences(*sizes, device, LONGER if device == "cuda" else 1)


CASES: dict[str, dict[str, Any]] = {
    "plain": {"dtype": torch.float32},
    "16 bits": {"dtype": torch.float16, "heads": (6, 2), "softcap": 5.0},
    "window": {"dtype": torch.float16, "window_size": (20, 0)},
    "heads of 64": {"dtype": torch.float16, "heads": (3, 1), "head_dim": 64},
    "sink": {"dtype": torch.float16, "sink": torch.tensor([0.5, -1.0])},
    "negative scale": {"dtype": torch.float16, "heads": (6, 2), "softmax_scale": -0.1},
    "slopes": {"dtype": torch.float16, "heads": (3, 1), "alibi_slopes": torch.tensor([0.5, 0.25, 0.1])},
}
"""With three heads a key head, chunks mask other blocks of a row than whole sequences: a product may then be
fused with the subtraction of the maximum in one of them, and not in the other."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_whole_sequences_chunks_and_single_tokens_have_the_same_bits(name, backend):
    device = device_of(backend)
    options = {"heads": (2, 1), "backend": backend, **CASES[name]}
    head_dim = options.pop("head_dim", 128 if device == "cuda" else 24)
    sequences = sequences_on(device, options.pop("dtype"), *options.pop("heads"), head_dim)
    for given in {"sink", "alibi_slopes"} & {*options}:
        options[given] = options[given].to(device)
    whole = sequences.whole(invariant=True, **options)
    # The bounds are those of rounding; whether the values are right, the oracles of other tests say.
    torch.testing.assert_close(whole, sequences.whole(**options), atol=4e-3, rtol=4e-3)
    for call in CALLS:
        found, rows = sequences.over_cache(*call, **options)
        assert torch.equal(bits(found), bits(whole[rows])), call


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_and_single_tokens_over_e4m3_have_the_same_bits(backend):
    sequences = sequences_on(device_of(backend), torch.float16, 6, 2, 64)
    for name in ("k_cache", "v_cache"):
        setattr(sequences, name, getattr(sequences, name).to(torch.float8_e4m3fn))
    whole, _ = sequences.over_cache([0], 0, 70, backend=backend)
    for first, tokens in ((0, 1), (40, 1), (69, 1), (11, 30), (63, 7)):
        found, rows = sequences.over_cache([0], first, tokens, backend=backend)
        assert torch.equal(bits(found), bits(whole[rows])), (first, tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_a_fixed_size_are_part_of_the_order(backend):
    sequences = sequences_on(device_of(backend), torch.float16, 2, 1, 16)
    options = {"split_size": 32 * sequences.times, "backend": backend}
    whole, _ = sequences.over_cache([0], 0, 70, **options)
    for first, tokens in ((0, 1), (31, 1), (32, 1), (69, 1), (50, 20)):
        found, rows = sequences.over_cache([0], first, tokens, **options)
        assert torch.equal(bits(found), bits(whole[rows])), (first, tokens)


@pytest.mark.interpreter
def test_a_tile_by_the_number_of_rows_is_noticed(monkeypatch):
    usual = decode_config.choose
    monkeypatch.setattr(decode_config, "choose", lambda problem: usual(replace(problem, invariant=False)))
    sequences = Sequences(torch.float16, 2, 1, 48)
    whole = sequences.whole(invariant=True, backend="portable")
    found, rows = sequences.over_cache([0], 69, 1, backend="portable")
    assert not torch.equal(found, whole[rows])


def test_gradients_are_the_usual_ones():
    sequences = Sequences(torch.float32, 4, 2, 16)
    tensors = sequences.q, sequences.k, sequences.v
    for tensor in tensors:
        tensor.requires_grad_()
    weight = torch.randn_like(sequences.q)
    found, expected = (
        torch.autograd.grad((sequences.whole(invariant=invariant) * weight).sum(), tensors)
        for invariant in (True, False)
    )
    torch.testing.assert_close(found, expected)
    compiled = torch.compile(sequences.whole, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(invariant=True), sequences.whole(invariant=True))


PRODUCTS = {
    "plain": linear_calls.Call(70, 52, 100),
    "norm": linear_calls.Call(70, 52, 100, norm=True),
    "gated": linear_calls.Call(70, 52, 100, "silu_and_mul", norm=True, residual=True),
    "before a norm": linear_calls.Call(70, 52, 100, residual=True, next_norm=True),
    "in splits": linear_calls.Call(70, 30, 300, x_scale=True, next_norm=True),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", PRODUCTS.values(), ids=PRODUCTS)
def test_a_row_of_a_product_has_the_same_bits(call, backend):
    options = {"invariant": True, "backend": backend}
    linear_calls.check(call, torch.float16, device_of(backend), **options)
    assert differing_rows(call, device_of(backend), **options) == []


def differing_rows(call: linear_calls.Call, device: str, **options: Any) -> list[tuple[int, int]]:
    """Return the ranges of rows of a product whose results have other bits without the other rows."""
    inputs, differing = linear_calls.make_inputs(call, torch.float16, device), []
    if call.x_scale:  # sums of 0, so that the results are what other orders of sums round differently
        half = call.K // 2
        inputs.x[:, half:], inputs.weight[:, half:] = -inputs.x[:, :half], inputs.weight[:, :half]
    whole = results(linear_calls.run(call, inputs, **options))
    for first, end in ((0, 1), (5, 6), (3, 20), (1, 66), (69, 70)):
        own = {name: inputs.given[name][first:end] for name in ("residual", "x_scale") if getattr(call, name)}
        rows = linear_calls.Inputs(inputs.x[first:end], inputs.weight, inputs.given | own, ())
        found = results(linear_calls.run(call, rows, **options))
        if not all(torch.equal(bits(a), bits(b[first:end])) for a, b in zip(found, whole, strict=True)):
            differing.append((first, end))
    return differing


def results(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def test_products_have_the_tile_of_64_rows():
    """A fixed split of K and a measured tile: in a default tile, Llama's gate and up take two rounds."""
    h200 = Target.of_card(CARDS["h200"])
    for N, K in ((3072, 2048), (16384, 2048), (2048, 8192), (28672, 4096), (100, 30)):
        problem = LinearProblem(64, N, K, torch.bfloat16, torch.bfloat16, h200, residual=True)
        expected = linear_config.choose(problem)
        for rows in (1, 2, 16, 65, 5000):
            given = replace(problem, M=rows, invariant=True)
            assert linear_config.choose(given) == expected, (N, K, rows)
    assert linear_config.choose(replace(problem, N=3072, K=2048)).splits > 1


@pytest.mark.interpreter
def test_splits_by_the_number_of_rows_are_noticed(monkeypatch):
    usual = linear_config.choose
    monkeypatch.setattr(
        linear_config, "choose", lambda problem: replace(usual(problem), splits=1 + (problem.M > 8))
    )
    call = replace(PRODUCTS["in splits"], N=28)  # another shape: launches of the same have their tile
    assert differing_rows(call, "cpu", invariant=True, backend="portable") == [(0, 1), (5, 6), (69, 70)]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"num_splits": 2},
            ValueError,
            "num_splits must be at most 1 with invariant .use split_size., got 2",
        ),
        ({"split_size": 16, "window_size": (4, 0)}, ValueError, "split_size must be None with invariant"),
        ({"softmax_max": 3.0}, NotImplementedError, "softmax_max must be None with invariant"),
        (
            {"causal": False, "tree_mask": torch.ones(1, 1, dtype=torch.bool)},
            NotImplementedError,
            "tree_mask",
        ),
        ({"invariant": 1}, TypeError, "invariant must be True or False"),
    ],
    ids=["splits", "window", "unified maximum", "tree", "int"],
)
def test_what_has_no_fixed_order_is_refused(options, error, words):
    with pytest.raises(error, match=words):
        Sequences(torch.float32, 2, 1, 16).over_cache([0], 5, 1, **options)


def test_dropout_statistics_and_forward_mode_are_refused():
    sequences = Sequences(torch.float32, 2, 1, 16)
    with pytest.raises(NotImplementedError, match="dropout_p must be 0 with invariant"):
        sequences.whole(invariant=True, dropout_p=0.1)
    for name in ("return_max_logits", "return_entropy"):
        with pytest.raises(NotImplementedError, match=f"invariant must be False with {name}, got True"):
            sequences.whole(invariant=True, **{name: True})
    offsets = sequences.starts, sequences.starts, max(sequences.lengths), max(sequences.lengths)

    def attend(q):
        return flashtile.flash_attn_varlen_func(q, sequences.k, sequences.v, *offsets, invariant=True)

    with pytest.raises(NotImplementedError, match="invariant must be False in forward mode"):
        torch.func.jvp(attend, (sequences.q,), (sequences.q,))
