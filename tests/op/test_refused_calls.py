"""Refused by name: forward mode, gradients that no operation computes, and writes to lazy negations."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import flashtile
from flashtile import fp8

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def rand(*shape, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


Q, K, V = rand(2, 3, 4, 16), rand(2, 3, 2, 16), rand(2, 3, 2, 16)
COS, SIN, SINK = rand(20, 4), rand(20, 4), rand(4)
TABLE = int32([0, 1, 2], [0, 1, 3])
FP8 = {name: t.to(BF16) for name, t in (("q", Q), ("k", K), ("v", V))}


def caches():
    return {"k_cache": rand(2, 20, 2, 16), "v_cache": rand(2, 20, 2, 16)}


def pages():
    return {"k_cache": rand(9, 4, 2, 16), "v_cache": rand(9, 4, 2, 16)}


def append(**arguments):
    flashtile.append_kvcache(**arguments)
    return arguments["k"].sum() * 0


def copy(**arguments):
    flashtile.copy_blocks(**arguments)
    return arguments["k_cache"].sum() * 0


def scales(**arguments):
    return fp8.quantize(**arguments).scales


def over_pages(q, k, v, **arguments):
    return flashtile.flash_attn_varlen_func(q, k, v, int32(0, 3, 6), int32(0, 12, 23), 3, 12, **arguments)


def combined(**arguments):
    return flashtile.flash_attn_combine(**arguments)[0]


WITH_KVCACHE = flashtile.flash_attn_with_kvcache
DECODE = {"q": Q, "cache_seqlens": 5, "sink": SINK}
NEW = DECODE | {"k": K, "v": V}
ROTARY = NEW | {"rotary_cos": COS, "rotary_sin": SIN}
PREFIX = {"q": Q, "block_table": TABLE, "cache_seqlens": int32(12, 11), "prefix_seqlens": 8, "sink": SINK}
CALLS = {
    "decode": (WITH_KVCACHE, DECODE, caches, ("q", "k_cache", "v_cache", "sink")),
    "append and decode": (WITH_KVCACHE, NEW, caches, ("q", "k", "v", "k_cache", "sink")),
    "rotate and decode": (WITH_KVCACHE, ROTARY, caches, ("q", "k", "rotary_cos", "rotary_sin")),
    "append": (append, {"k": K, "v": V, "cache_seqlens": 5}, caches, ("k", "v", "k_cache")),
    "copy_blocks": (copy, {"block_pairs": torch.tensor([[0, 1]])}, pages, ("k_cache", "v_cache")),
    "combine": (
        combined,
        {"out_partial": rand(2, 3, 4, 8), "lse_partial": rand(2, 3, 4)},
        dict,
        ("out_partial", "lse_partial"),
    ),
    "shared prefix": (
        flashtile.flash_attn_with_shared_prefix, PREFIX, pages, ("q", "k_cache", "v_cache", "sink")
    ),
    "varlen over pages": (
        over_pages,
        {"q": Q.flatten(0, 1), "k": rand(9, 4, 2, 16), "v": rand(9, 4, 2, 16), "block_table": TABLE},
        dict,
        ("q", "k", "v"),
    ),
    "fp8.quantize": (scales, {"x": FP8["q"], "role": "q"}, dict, ("x",)),
    "fp8.attention": (
        fp8.attention,
        FP8 | {"sink": SINK, "rotary_cos": COS, "rotary_sin": SIN},
        dict,
        ("q", "k", "v", "sink", "rotary_cos"),
    ),
    "descales": (
        flashtile.flash_attn_func,
        {name: t.to(E4M3) for name, t in FP8.items()} | {"q_descale": rand(2, 2), "v_descale": rand(2, 2)},
        dict,
        ("q_descale", "v_descale"),
    ),
}  # fmt: skip


def function_of(call, name):
    """The call as a function of one of its tensors, and that tensor."""
    function, arguments, memory, _ = CALLS[call]
    arguments = arguments | memory()
    written = {"append": ("k_cache", "v_cache"), "copy_blocks": ("k_cache", "v_cache")}.get(call, ())

    def run(x):
        given = arguments | {name: x}
        for cache in written:  # a tensor of its own, as x may be one that is used again
            given[cache] = given[cache] * 1
        return function(**given)

    return run, arguments[name]


def by_dual_numbers(run, x):
    with forward_ad.dual_level():
        run(forward_ad.make_dual(x, torch.ones_like(x)))


def by_jvp(run, x):
    torch.func.jvp(run, (x,), (torch.ones_like(x),))


def by_jacfwd(run, x):
    torch.func.jacfwd(run)(x)


def by_linearize(run, x):
    torch.func.linearize(run, x)[1](torch.ones_like(x))


def by_jvp_around_grad(run, x):
    """What ``grad`` sees are tensors without tangents, which those within have."""
    factor = torch.ones((), dtype=x.dtype)

    def gradient(t):
        return torch.func.grad(lambda z: run(x * t).sum() * z)(factor)

    torch.func.jvp(gradient, (factor,), (factor,))


def by_jvp_around_vmap(run, x):
    def mapped(t):
        return torch.func.vmap(lambda y: run(t) * y)(torch.ones(2))

    torch.func.jvp(mapped, (x,), (torch.ones_like(x),))


MODES = (
    by_dual_numbers, by_jvp, by_jacfwd, by_linearize, by_jvp_around_grad, by_jvp_around_vmap
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_forward_mode_is_refused_by_name(call, subtests):
    for name in CALLS[call][-1]:
        run, x = function_of(call, name)
        for mode in MODES:
            with (
                subtests.test(f"{name} {mode.__name__}"),
                pytest.raises(NotImplementedError, match=rf"^{name} must carry no tangents"),
            ):
                mode(run, x)


@pytest.mark.parametrize("call", CALLS)
def test_tensors_without_tangents_may_be_used_in_forward_mode(call):
    run, x = function_of(call, CALLS[call][-1][0])
    expected = run(x)
    with forward_ad.dual_level():
        assert torch.equal(run(x), expected)
        assert forward_ad.unpack_dual(run(x)).tangent is None


def test_a_refused_call_writes_nothing():
    cache = caches()
    before = {name: t.clone() for name, t in cache.items()}
    for name in ("q", "k", "v", "sink"):
        for mode in (by_dual_numbers, by_jvp):
            with pytest.raises(NotImplementedError, match=f"{name} must carry no tangents"):
                mode(lambda x, name=name: WITH_KVCACHE(**NEW | cache | {name: x}), NEW[name])
    assert all(torch.equal(cache[name], before[name]) for name in before)


NO_BACKWARD = {
    call: [name for name in names if not (name == "k_cache" and "append" in call)]
    for call, (*_, names) in CALLS.items()
    if call not in ("append", "copy_blocks", "attention")
}


@pytest.mark.parametrize("call", NO_BACKWARD)
def test_a_gradient_that_a_transform_asks_for_is_refused_by_name(call, subtests):
    for name in NO_BACKWARD[call]:
        run, x = function_of(call, name)
        for transform in (torch.func.grad, torch.func.jacrev):
            with (
                subtests.test(f"{name} {transform.__name__}"),
                pytest.raises(NotImplementedError, match=rf"^{name} must not require a gradient"),
            ):
                transform(lambda x, run=run: run(x).float().sum())(x)


def test_a_gradient_is_refused_around_vmap():
    """Where ``vmap`` hides that the weight within wants one."""

    def loss(weight):
        cache = caches()
        return torch.func.vmap(lambda scale: WITH_KVCACHE(weight * scale, **cache, cache_seqlens=5))(
            torch.ones(2)
        ).sum()

    with pytest.raises(NotImplementedError, match="q must not require a gradient"):
        torch.func.grad(loss)(Q)


@pytest.mark.parametrize("name", ["k", "v", "rotary_cos"])
def test_new_keys_that_require_a_gradient(name):
    """Written, since the gradient may not be wanted after all; a backward pass says that there is none."""
    arguments = ROTARY | {name: ROTARY[name].clone().requires_grad_()}
    cache, expected = caches(), caches()
    with torch.no_grad():
        wanted = WITH_KVCACHE(**ROTARY, **expected)
    out = WITH_KVCACHE(**arguments, **cache)
    assert torch.equal(out, wanted)
    for written, right in zip(cache.values(), expected.values(), strict=True):
        assert not written.requires_grad
        assert torch.equal(written, right)
    with pytest.raises(NotImplementedError, match=f"{name} must not require a gradient"):
        out.sum().backward()


@pytest.mark.parametrize("transform", ["compile", "grad"])
def test_new_keys_that_require_a_gradient_are_refused_at_once(transform):
    """By torch.compile in words of its own around ours, and before anything is written."""
    torch._dynamo.reset()
    cache, before = caches(), caches()

    def loss(k):
        return WITH_KVCACHE(**NEW | {"k": k}, **cache).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    transformed = {"compile": compiled, "grad": torch.func.grad(loss)}[transform]
    with pytest.raises(Exception, match="k must not require a gradient"):
        transformed(K.clone().requires_grad_())
    assert all(torch.equal(cache[name], before[name]) for name in cache)


def test_a_compiled_call_names_what_wants_the_gradient():
    torch._dynamo.reset()
    sink = SINK.clone().requires_grad_()
    compiled = torch.compile(WITH_KVCACHE, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="sink must not require a gradient"):
        compiled(**DECODE | {"sink": sink}, **caches())


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (flashtile.attention, {"q": Q, "k": K, "v": V}, "k"),
        (flashtile.attention, {"q": Q, "k": K, "v": V, "sink": SINK}, "sink"),
        (WITH_KVCACHE, NEW | caches(), "v"),
    ],
)
def test_a_tensor_without_memory_is_refused(function, arguments, name):
    function(**arguments)  # its launch must not serve the other call
    without = torch._efficientzerotensor(arguments[name].shape)
    with pytest.raises(ValueError, match=f"^{name} must have memory"):
        function(**arguments | {name: without})


@pytest.mark.parametrize(
    ("function", "arguments", "written"),
    [
        (append, CALLS["append"][1] | caches(), "k_cache"),
        (append, CALLS["append"][1] | caches(), "v_cache"),
        (WITH_KVCACHE, NEW | caches(), "k_cache"),
        (copy, CALLS["copy_blocks"][1] | pages(), "v_cache"),
        (flashtile.attention, {"q": Q, "k": K, "v": V, "out": Q.clone()}, "out"),
    ],
)
def test_a_lazy_negation_is_not_written(function, arguments, written):
    negated = torch._neg_view(arguments[written])
    before = negated.clone()
    with pytest.raises(ValueError, match=f"^{written} must hold its own numbers because it is written"):
        function(**arguments | {written: negated})
    assert torch.equal(negated, before)
