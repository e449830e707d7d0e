"""Products with a weight on every backend: the error rule, and what a caller may rely on."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flashtile
from flashtile.caches import BoundedCache
from flashtile.linear import linear, linear_before_norm, linear_qkv
from flashtile.operators.linear import LINEAR, LINEAR_BEFORE_NORM, LINEAR_QKV
from linear_calls import CALLS, Call, check, make_inputs, run
from targets import INTERPRETING, Target
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def dtypes_of(target: Target, call: Call) -> list[torch.dtype]:
    widths = 2 if call.scales != "none" else 4
    return [d for d in DTYPES if d in target.dtypes and d.itemsize <= widths]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_products_are_within_the_error_rule(target, call):
    for dtype in dtypes_of(target, call):
        check(call, dtype, target.device, backend=target.backend)


@pytest.mark.parametrize(("splits", "epilogue"), [(1, "silu_and_mul"), (3, "plain")])
def test_tiles_of_whole_waves_are_within_the_error_rule(target, splits, epilogue, monkeypatch):
    """Tiles of fewer places than they have room for."""
    if target.backend != "portable":
        pytest.skip("the flat product in Triton has them")
    from flashtile.backends.portable import linear as portable
    from flashtile.backends.portable.linear.config import adapted, tiles_of

    tiles = []

    def configure(problem):
        config = adapted(problem, "flat", 32, 32, 4, 2, splits, 0, True)
        tiles.append((tiles_of(problem, config), problem.places))
        return config

    monkeypatch.setattr(portable, "configure_linear", configure)
    check(Call(5, 38, 70, epilogue, bias=True, norm=True), torch.float16, target.device, backend="portable")
    ((count, places),) = tiles
    assert places % count or places // count not in (16, 32)


@pytest.mark.parametrize("call", [call for call in CALLS if call.M <= 4], ids=lambda call: call.name)
def test_few_rows_on_cuda_cores_are_within_the_error_rule(target, call, monkeypatch):
    """Calls for which the measured table gives the flat product."""
    if target.backend != "portable":
        pytest.skip("the GEMV in Triton computes them")
    from flashtile.backends.portable import linear as portable
    from flashtile.backends.portable.linear.config import GEMV, default

    for name in ("configure_linear", "configure_linear_qkv"):
        monkeypatch.setattr(portable, name, lambda problem: default(problem, GEMV))
    for operation in (LINEAR, LINEAR_BEFORE_NORM, LINEAR_QKV):  # other tests make the same calls
        monkeypatch.setattr(operation, "launches", BoundedCache(2**20))
    check(call, torch.float16, target.device, backend="portable")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(target, bad):
    """Of x it reaches its own row of the result, of the weight its own column, and neither any other.

    What lies between the rows of x in memory reaches nothing.
    """
    for M, dtype in itertools.product((1, 3, 17), [dtype for dtype in DTYPES if dtype in target.dtypes]):
        inputs = make_inputs(Call(M, 20, 70), dtype, target.device)
        x, weight = inputs.x.clone(), inputs.weight.clone()
        x[M // 2, 3] = bad
        weight[7, 5] = bad
        rows = linear(x, inputs.weight, backend=target.backend).isfinite()
        assert not rows[M // 2].any()
        assert rows.sum() == (M - 1) * 20
        columns = linear(inputs.x, weight, backend=target.backend).isfinite()
        assert not columns[:, 7].any()
        assert columns.sum() == M * 19
        between = x.new_full((M, 72), bad)
        between[:, 1:71] = inputs.x
        assert linear(between[:, 1:71], inputs.weight, backend=target.backend).isfinite().all()


def test_sums_are_the_same_in_every_run(target):
    inputs = make_inputs(Call(3, 16, 700), target.dtypes[0], target.device)
    first = run(Call(3, 16, 700), inputs, backend=target.backend)
    assert all(torch.equal(first, run(Call(3, 16, 700), inputs, backend=target.backend)) for _ in range(3))


def test_leading_dimensions_come_back(target):
    x = torch.randn(2, 3, 24, device=target.device, dtype=target.dtypes[0])
    weight = torch.randn(10, 24, device=target.device, dtype=target.dtypes[0])
    residual = torch.randn(2, 3, 10, device=target.device, dtype=target.dtypes[0])
    y = linear(x, weight, residual=residual, backend=target.backend)
    assert y.shape == (2, 3, 10)
    rows = linear(x.flatten(0, 1), weight, residual=residual.flatten(0, 1), backend=target.backend)
    assert torch.equal(y.flatten(0, 1), rows)
    assert linear(x[0, 0], weight, backend=target.backend).shape == (10,)
    assert linear(x[:0], weight, backend=target.backend).shape == (0, 3, 10)


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
def test_leading_dimensions_of_queries_come_back():
    x, weight = torch.randn(2, 3, 24), torch.randn(6 * 16, 24)
    q, rows = (
        linear_qkv(t, weight, *torch.zeros(2, 8, 4, 1, 16), slot_mapping=torch.arange(6))
        for t in (x, x.flatten(0, 1))
    )
    assert q.shape == (2, 3, 4, 16)
    assert torch.equal(q.flatten(0, 1), rows)


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
def test_no_rows_are_written_nowhere():
    caches = torch.ones(2, 8, 4, 1, 16).unbind()
    slots = torch.zeros(0, dtype=torch.int64)
    q = linear_qkv(torch.zeros(0, 8), torch.zeros(6 * 16, 8), *caches, slot_mapping=slots)
    assert q.shape == (0, 4, 16)
    assert all((cache == 1).all() for cache in caches)


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
def test_keys_and_values_are_not_written_to_the_same_memory():
    x, weight, slots = torch.randn(2, 8), torch.randn(6 * 16, 8), torch.arange(2)
    cache, other = torch.zeros(2, 8, 4, 1, 16)
    linear_qkv(x, weight, cache, other, slot_mapping=slots)  # later calls of this signature are checked less
    with pytest.raises(ValueError, match="v_cache shares memory with k_cache"):
        linear_qkv(x, weight, cache, cache.view_as(cache), slot_mapping=slots)


def test_gradients_are_refused_by_name():
    x, weight = torch.randn(2, 16), torch.randn(8, 16, requires_grad=True)
    y = linear(x, weight)
    with pytest.raises(NotImplementedError, match=r"weight must not require a gradient.*functional\.linear"):
        y.sum().backward()
    caches = torch.zeros(2, 2, 4, 1, 2)
    with pytest.raises(NotImplementedError, match="weight must not require a gradient"):
        linear_qkv(x, weight, *caches, slot_mapping=torch.tensor([0, 1]))
    with torch.no_grad():
        assert torch.equal(linear(x, weight), y.detach())


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
def test_compiled_calls_are_the_same():
    torch._dynamo.reset()
    for call in (Call(2, 24, 40, "silu_and_mul", norm=True), Call(3, 128, 40, "qkv", rotary_dim=16)):
        inputs, again = (make_inputs(call, torch.float32, "cpu") for _ in range(2))
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(compiled(call, inputs), run(call, again))
            if call.epilogue != "qkv":
                call = Call(2, 24, 40, norm=True, next_norm=True)
                inputs = make_inputs(call, torch.float32, "cpu")
                assert all(map(torch.equal, compiled(call, inputs), run(call, inputs)))
        assert all(map(torch.equal, inputs.caches, again.caches))


X, W = torch.zeros(3, 32), torch.zeros(48, 32)
CACHES = tuple(torch.zeros(2, 4, 2, 2, 8))
SLOTS = torch.zeros(3, dtype=torch.int64)
BAD = {
    "K": (ValueError, r"x must have shape \(\.\.\., K\) with K = 32", dict(x=torch.zeros(3, 31))),
    "no rows of weight": (ValueError, r"weight must have shape \(N, K\)", dict(weight=W[:0])),
    "dtype of weight": (TypeError, "weight has dtype torch.float16, but x has", dict(weight=W.half())),
    "integers": (TypeError, "x must be float16, bfloat16, float32 or float64", dict(x=X.int())),
    "bias": (ValueError, r"bias must have shape \(N,\) = \(48,\)", dict(bias=torch.zeros(47))),
    "strides": (
        ValueError,
        r"weight must have stride 1.*weight\.contiguous",
        dict(weight=torch.zeros(32, 48).T),
    ),
    "activation": (ValueError, "activation must be one of None, 'silu_and_mul'", dict(activation="gelu")),
    "odd halves": (
        ValueError,
        "weight has 47 rows, .* an even number",
        dict(weight=W[:47], activation="silu_and_mul"),
    ),
    "residual": (
        ValueError,
        r"residual must have shape .*\(3, 24\)",
        dict(residual=torch.zeros(3, 48), activation="silu_and_mul"),
    ),
    "scale": (
        ValueError,
        "weight_scale must be None for a weight of torch.float32",
        dict(weight_scale=torch.ones(48)),
    ),
    "no scale": (
        ValueError,
        "weight_scale must be given",
        dict(x=X.half(), weight=W.to(torch.float8_e4m3fn)),
    ),
    "shape of the scale": (
        ValueError,
        r"weight_scale must have shape \(N,\), or .* = \(48,\) or \(1, 1\), got \(32,\)",
        dict(x=X.half(), weight=W.to(torch.float8_e4m3fn), weight_scale=torch.ones(32)),
    ),
    "dtype of the scale": (
        TypeError,
        "weight_scale must be float32, got torch.float16",
        dict(x=X.half(), weight=W.to(torch.float8_e4m3fn), weight_scale=torch.ones(48).half()),
    ),
    "device of the scale": (
        ValueError,
        "weight_scale is on meta, not on cpu",
        dict(x=X.half(), weight=W.to(torch.float8_e4m3fn), weight_scale=torch.ones(48, device="meta")),
    ),
    "wide x": (
        TypeError,
        "x must be float16 or bfloat16 with",
        dict(weight=W.to(torch.float8_e4m3fn), weight_scale=torch.ones(48)),
    ),
    "norm": (ValueError, r"norm_weight must have shape \(K,\)", dict(norm_weight=torch.ones(48))),
    "eps": (ValueError, "norm_eps must be finite", dict(norm_eps=float("nan"))),
    "eps of text": (TypeError, "norm_eps must be a number, got str 'abc'", dict(norm_eps="abc")),
    "eps of truth": (TypeError, "norm_eps must be a number, got bool", dict(norm_eps=True)),
    "no columns": (ValueError, r"x must have shape .* K at least 1, got \(0,\)", dict(x=torch.ones(0))),
    "activations": (ValueError, "activation must be one of", dict(activation=["silu_and_mul"])),
    "factors": (ValueError, r"x_scale must have shape \(rows of x,\) = \(3,\)", dict(x_scale=torch.ones(4))),
    "factors of x": (TypeError, "x_scale must be float32", dict(x_scale=torch.ones(3).half())),
    "two norms": (
        ValueError,
        "x_scale must be None with norm_weight",
        dict(x_scale=torch.ones(3), norm_weight=torch.ones(32)),
    ),
    "flag": (TypeError, "prefetch must be True or False", dict(prefetch=1)),
    "backend": (ValueError, "backend must be None or one of", dict(backend="cublas")),
    "number": (
        ValueError,
        r"x must have shape \(..., K\) with K at least 1, got \(\)",
        dict(x=torch.zeros(())),
    ),
}
BAD_QKV = {
    "places": (ValueError, "slot_mapping or block_table must give .* got neither", dict(slot_mapping=None)),
    "both": (ValueError, "got both", dict(block_table=torch.zeros(3, 2, dtype=torch.int32))),
    "slots": (TypeError, "slot_mapping must be int64", dict(slot_mapping=SLOTS.int())),
    "no positions": (
        ValueError,
        "positions must be given with rotary_cos",
        dict(rotary_cos=torch.ones(4, 4), rotary_sin=torch.ones(4, 4)),
    ),
    "angles": (
        ValueError,
        "^rotary_cos must",
        dict(rotary_cos=torch.ones(4, 9), rotary_sin=torch.ones(4, 9), positions=SLOTS.int()),
    ),
    "dtype of angles": (
        TypeError,
        "^rotary_cos must",
        dict(rotary_cos=torch.ones(4, 4).half(), rotary_sin=torch.ones(4, 4).half(), positions=SLOTS.int()),
    ),
    "pages without positions": (
        ValueError,
        "positions must be given with block_table, got None",
        dict(slot_mapping=None, block_table=torch.zeros(3, 2, dtype=torch.int32)),
    ),
    "interleaved": (TypeError, "rotary_interleaved must be True or False", dict(rotary_interleaved=1)),
    "rows": (ValueError, "weight has 47 rows, but must have head_dim = 8", dict(weight=W[:47])),
    "no query": (ValueError, "weight has 32 rows", dict(weight=W[:32])),
    "dimensions": (ValueError, r"k_cache must have 4 dimensions .* got shape", dict(k_cache=CACHES[0][0])),
    "odd head_dim": (
        ValueError,
        "k_cache must have an even head_dim, got 7",
        dict(k_cache=CACHES[0][..., :7], v_cache=CACHES[1][..., :7]),
    ),
    "one norm of heads": (
        ValueError,
        "k_norm_weight must be given with q_norm_weight, got None",
        dict(q_norm_weight=torch.ones(8)),
    ),
    "size of a norm": (
        ValueError,
        r"k_norm_weight must have shape \(head_dim,\) = \(8,\)",
        dict(q_norm_weight=torch.ones(8), k_norm_weight=torch.ones(16)),
    ),
    "normed head_dim": (
        NotImplementedError,
        "k_cache must have a head_dim of .* with q_norm_weight, got 8",
        dict(q_norm_weight=torch.ones(8), k_norm_weight=torch.ones(8)),
    ),
    "rows of pages": (
        ValueError,
        r"block_table must have shape \(rows of x, max_blocks\) with 3 rows",
        dict(slot_mapping=None, block_table=torch.zeros(2, 2, dtype=torch.int32), positions=SLOTS.int()),
    ),
    "one memory": (ValueError, "v_cache shares memory with k_cache", dict(v_cache=CACHES[0])),
    "expanded": (
        ValueError,
        "k_cache has elements that share",
        dict(k_cache=CACHES[0][:1].expand(4, -1, -1, -1)),
    ),
    "FP8": (
        NotImplementedError,
        "k_cache must be torch.float32 like x.*append_kvcache",
        dict(k_cache=CACHES[0].to(torch.float8_e4m3fn)),
    ),
}


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
@walk("name", BAD)
def test_bad_input_is_named(name):
    error, text, change = BAD[name]
    with pytest.raises(error, match=text):
        linear(**{"x": X, "weight": W} | change)


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (TypeError, "next_norm_weight must be a torch.Tensor, got NoneType", dict(next_norm_weight=None)),
        (ValueError, r"next_norm_weight must have shape \(N,\) = \(48,\)", dict(next_norm_weight=X[0])),
        (ValueError, "next_norm_eps must be finite", dict(next_norm_eps=-1.0)),
        (ValueError, r"residual must have shape .*\(3, 48\)", dict(residual=X)),
    ],
)
def test_bad_input_before_a_norm_is_named(error, text, change):
    with pytest.raises(error, match=text):
        linear_before_norm(**{"x": X, "weight": W, "next_norm_weight": W[:, 0].contiguous()} | change)


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
def test_any_number_of_leading_dimensions_before_a_norm():
    x, weight, norm = torch.rand(3, 32), torch.rand(48, 32), torch.rand(48)
    expected = linear_before_norm(x, weight, next_norm_weight=norm)
    found = linear_before_norm(x.view(1, 3, 1, 32), weight, next_norm_weight=norm)
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(one, other.view(1, 3, 1, 48))


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
@walk("name", BAD_QKV)
def test_bad_input_is_named_before_anything_is_written(name):
    error, text, change = BAD_QKV[name]
    good = {"x": X, "weight": W, "k_cache": CACHES[0], "v_cache": CACHES[1], "slot_mapping": SLOTS}
    with pytest.raises(error, match=text):
        linear_qkv(**good | change)
    assert not any(cache.any() for cache in CACHES)


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
def test_queries_are_no_view_of_the_product():
    assert linear_qkv(X, W, *(c.clone() for c in CACHES), slot_mapping=SLOTS).is_contiguous()


@pytest.mark.skipif(INTERPRETING, reason="one backend is enough")
def test_explain_and_autocast_and_flops():
    explanation = flashtile.linear.explain(X, W)
    assert explanation.backend == "cpu"
    assert "its kernels run on GPUs" in str(explanation)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(X, W).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        linear(X, W)
    assert counter.get_total_flops() == 2 * 3 * 48 * 32
