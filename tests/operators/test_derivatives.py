"""Gradients of gradients, and tangents: by finite differences, and as standard attention has them."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import flashtile
from flashtile import masks
from flashtile.operators import derivatives
from flashtile.reference import attention as reference
from flashtile.rounding import exact_product
from small_calls import DEVICES, assert_same, dense, slopes, varlen

pytestmark = pytest.mark.numerical

STATE = torch.tensor([7, 3])
ROWS, KEYS = 4, 6
CELLS = torch.rand(2, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(0)) > 0.3
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]]).bool()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def causal_over_few_keys(q, k, v, **options):
    """The first rows see no key."""
    return flashtile.attention(q, k[:, :3], v[:, :3], causal=True, **options)


def modified(q, k, v, table, sink, **options):
    """A captured tensor that learns, under a block mask with empty, partial and full blocks."""
    blocks = masks.create_block_mask(masks.causal() | masks.window(2, 3), None, None, 20, 33, BLOCK_SIZE=16)

    def score_mod(score, batch, head, q_idx, kv_idx):
        return score * torch.sigmoid(table[head, q_idx]) + torch.sin(score)

    return flashtile.attention(q, k, v, score_mod=score_mod, block_mask=blocks, sink=sink, **options)


def with_sink(q, k, v, sink, **options):
    return flashtile.attention(q, k, v, sink=sink, softcap=2.0, **options)


def with_bias(q, k, v, bias, **options):
    return flashtile.attention(q, k, v, bias=bias, mask=CELLS, **options)


WHOLE = partial(dense, seqlen_q=ROWS, seqlen_k=KEYS, head_dim=3, dtype=torch.float64)
PACKED = {"cu_seqlens_q": int32(0, 3, 3, 7), "cu_seqlens_k": int32(0, 4, 6, 11), "max_seqlen_q": 4}
PACKED |= {"max_seqlen_k": 5, "causal": True}
CALLS = {
    "full": (flashtile.attention, {}, []),
    "causal": (flashtile.attention, {"causal": True, "softcap": 1.5, "softmax_scale": 0.7}, []),
    "no keys": (causal_over_few_keys, {}, []),
    "window": (
        flashtile.attention, {"window_size": (2, 0), "alibi_slopes": slopes(), "attention_chunk": 4}, []
    ),
    "mask": (flashtile.attention, {"mask": CELLS, "seqused_k": int32(6, 0)}, []),
    "padding": (flashtile.attention, {"key_padding_mask": PADDING, "seqused_q": int32(1, 4)}, []),
    "dropout": (flashtile.attention, {"dropout_p": 0.4, "rng_state": STATE}, []),
    "sink": (with_sink, {}, [random(4)]),
    "bias": (with_bias, {"dropout_p": 0.2, "rng_state": STATE}, [random(1, 4, ROWS, KEYS)]),
}  # fmt: skip


def differentiable(name):
    """A function of tensors in float64 to out and lse; rows without keys have 0 for -inf."""
    if name == "packed":  # with a token behind the last sequence
        call, options, more = flashtile.attention, PACKED, []
        tensors = [t.double() for t in varlen("cpu", (3, 0, 5), (4, 2, 6))[0]]
        tensors = [t[..., :3].contiguous() for t in tensors]
    elif name == "functions":
        call, options, more = modified, {}, [random(4, 20), random(4)]
        tensors = dense(batch=1, seqlen_q=20, seqlen_k=33, head_dim=2, dtype=torch.float64)
    else:
        call, options, more = CALLS[name]
        tensors = WHOLE()

    def run(*arguments):
        out, lse = call(*arguments, return_lse=True, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return run, tuple(t.detach().requires_grad_() for t in [*tensors, *more])


@pytest.mark.parametrize("name", [*CALLS, "packed", "functions"])
def test_second_derivatives_and_tangents_are_those_of_finite_differences(name):
    """The kernels' gradients are differenced, so that two ways of computing are compared."""
    run, tensors = differentiable(name)
    assert gradgradcheck(run, tensors, fast_mode=True)
    assert gradcheck(run, tensors, fast_mode=True, check_forward_ad=True)


def first_and_second(attention, device, dtype, rows=9, keys=12):
    q, k, v = dense(device, 2, rows, keys, dtype=dtype, grad=True)
    sink, bias = (t.to(device, dtype).requires_grad_() for t in (random(4), random(1, 4, rows, keys)))
    state = STATE.to(device)
    learned = q, k, v, sink, bias
    out, lse = attention(q, k, v, sink=sink, bias=bias, causal=True, dropout_p=0.3, rng_state=state)
    gradients = torch.autograd.grad(out.sin().sum() + lse.square().sum(), learned, create_graph=True)
    penalty = sum(t.float().square().sum() for t in gradients)
    return *gradients, *torch.autograd.grad(penalty, learned)


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_penalty_is_that_of_standard_attention(device):
    """GQA, a sink, a bias and dropout at once; the first gradients come from the kernels."""
    ours = first_and_second(partial(flashtile.attention, return_lse=True), device, torch.float32)
    expected = first_and_second(reference.attention, device, torch.float32)
    for a, e in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, e, atol=2e-4, rtol=2e-4)


def test_half_precision_keeps_its_dtypes():
    results = first_and_second(partial(flashtile.attention, return_lse=True), "cpu", torch.bfloat16)
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in results)


def products_are_rounded():
    """torch rounds factors of float32 to bfloat16 within this context, which is left with its setting."""
    context = contextlib.ExitStack()
    context.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("medium")
    return context


@pytest.mark.parametrize(
    ("rounded", "dtype"),
    [(products_are_rounded, torch.float32), (partial(torch.autocast, "cpu", torch.bfloat16), torch.bfloat16)],
)
def test_products_are_exact_whatever_torch_rounds_them_to(rounded, dtype):
    q, k, v = dense("cpu", seqlen_q=50, seqlen_k=60, head_dim=64, dtype=dtype)
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    product = torch.compile(exact_product, backend="eager", fullgraph=True)

    def results():
        _, tangent = torch.func.jvp(partial(flashtile.attention, causal=True), (q, k, v), (q.cos(), k, v))
        second: tuple[torch.Tensor, ...] = ()
        if dtype == torch.float32:  # the penalty of gradients that were rounded to 16 bits has their errors
            second = first_and_second(partial(flashtile.attention, return_lse=True), "cpu", dtype, 50, 60)
        scores = flashtile.profile_scores(q, k)
        return tangent, *second, torch.tensor([scores.least, scores.most]), product(hidden, hidden.mT)

    expected = results()
    with rounded():
        found = results()
    # With float64 in place of float32, a result of 16 bits may be rounded the other way.
    error = 1e-5 if dtype == torch.float32 else 2**-8
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=error, atol=error * b.abs().max().item())


def loss(attention, k, v, x):
    out, lse = attention(x, k, v, causal=True)
    return out.square().sum() + lse.sin().sum()


ORDERS = {
    "hessian": torch.func.hessian,
    "jacrev of jacrev": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "third": lambda f: torch.func.grad(
        lambda y: torch.func.grad(lambda x: torch.func.grad(f)(x).sin().sum())(y).cos().sum()
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_transforms_nest(order):
    q, k, v = WHOLE()
    losses = (
        partial(loss, attention, k, v)
        for attention in (partial(flashtile.attention, return_lse=True), reference.attention)
    )
    ours, expected = (ORDERS[order](f)(q) for f in losses)
    torch.testing.assert_close(ours, expected)
    assert expected.abs().max() > 1e-2


def test_second_derivatives_in_compiled_functions():
    """Autograd refuses to differentiate what it compiled (test_autograd); torch.func leaves the graph."""
    q, k, v = dense()
    penalty = torch.func.grad(partial(loss, partial(flashtile.attention, return_lse=True), k, v))
    second = torch.func.grad(lambda x: penalty(x).square().sum())
    torch.testing.assert_close(torch.compile(second, backend="aot_eager")(q), second(q))


def test_third_derivatives_by_autograd():
    run, tensors = differentiable("sink")
    third = []
    for attend in (run, partial(reference.attention, softcap=2.0)):
        q, k, v, sink = tensors
        out, lse = attend(q, k, v, sink) if attend is run else attend(q, k, v, sink=sink)
        value = out.sin().sum() + lse.sin().sum()
        for _ in range(3):
            value = sum(t.sin().sum() for t in torch.autograd.grad(value, tensors, create_graph=True))
        third.append(torch.autograd.grad(value, tensors))
    assert_same(third[0], third[1])


@pytest.mark.parametrize("of", ["dout", "dlse"])
def test_forward_mode_over_a_gradient(of):
    """Where the gradient of a result alone has a tangent: gradients are linear in it."""
    q, k, v = dense(grad=True)
    out, lse = flashtile.attention(q, k, v, return_lse=True)
    result = out if of == "dout" else lse
    with forward_ad.dual_level():
        ones = torch.ones_like(result)
        (dq,) = torch.autograd.grad(result, q, forward_ad.make_dual(ones, 2 * ones), retain_graph=True)
        primal, tangent = forward_ad.unpack_dual(dq)
    (expected,) = torch.autograd.grad(result, q, ones)
    assert_same((primal, tangent), (expected, 2 * expected))


@pytest.mark.parametrize("moving", [(0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.sin().sum()])
def test_gradients_within_a_dual_level_have_tangents(moving, loss):
    """The tangents of what the forward pass saved count as well as those of the gradient of out."""
    given = [t.detach().requires_grad_() for t in dense(dtype=torch.float64)]
    found = []
    for attend in (partial(flashtile.attention, return_lse=True), reference.attention):
        with forward_ad.dual_level():
            tensors = [forward_ad.make_dual(t, t.cos()) if i in moving else t for i, t in enumerate(given)]
            out, _ = attend(*tensors, causal=True)
            gradients = torch.autograd.grad(loss(out), given)
            found.append([forward_ad.unpack_dual(t).tangent for t in gradients])
    assert_same(found[0], found[1])


@pytest.mark.parametrize("name", ["causal", "no keys", "dropout", "sink", "bias", "packed", "functions"])
def test_gradients_of_tangents_are_those_of_finite_differences(name):
    """Reverse over forward mode, and its own derivative. The kernels' tangents are differenced."""
    run, tensors = differentiable(name)
    moving = tuple(t.detach().cos().requires_grad_() for t in tensors[:3])

    def along(*given):
        return tuple(
            t for pair in torch.func.jvp(lambda *t: run(*t, *given[6:]), given[:3], given[3:6]) for t in pair
        )

    assert gradcheck(along, (*tensors[:3], *moving, *tensors[3:]), fast_mode=True)
    if name == "causal":
        assert gradgradcheck(along, (*tensors[:3], *moving), fast_mode=True)


class Standard:
    """Counts the calls that standard attention computes."""

    def __init__(self, monkeypatch):
        self.calls = 0
        plain = derivatives.plain
        monkeypatch.setattr(derivatives, "plain", lambda *given: self.count() or plain(*given))

    def count(self):
        self.calls += 1


def detached_target(attention, tensors, moving):
    """A loss as of MeanFlow, whose target has the tangent without its gradient."""
    out, tangent = torch.func.jvp(attention, tensors, moving)
    return (out - tangent.detach()).square().sum()


def test_losses_with_a_detached_tangent_store_no_scores(monkeypatch):
    """Under autograd, torch.func.grad and dual numbers: the gradients are those of the kernels."""
    q, k, v = dense(dtype=torch.float64)
    moving = tuple(t.cos() for t in (q, k, v))
    attention = partial(flashtile.attention, causal=True)
    tangent = torch.func.jvp(partial(reference.attention, causal=True), (q, k, v), moving)[1][0]
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = reference.attention(*leaves, causal=True)[0]
    expected = torch.autograd.grad((out - tangent).square().sum(), leaves)
    standard = Standard(monkeypatch)
    by_func = torch.func.grad(lambda *t: detached_target(attention, t, moving), argnums=(0, 1, 2))(q, k, v)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    by_autograd = torch.autograd.grad(detached_target(attention, tuple(leaves), moving), leaves)
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, leaves, moving)
        out, found = forward_ad.unpack_dual(attention(*duals))
    by_dual = torch.autograd.grad((out - found.detach()).square().sum(), leaves)
    for gradients in (by_func, by_autograd, by_dual):
        assert_same(gradients, expected)
    assert standard.calls == 0


def test_a_loss_with_a_detached_tangent_costs_one_ordinary_backward_pass():
    """Out and its tangent are one operator, and the gradient is that of a plain call."""
    tensors = dense(dtype=torch.float64)
    leaves = tuple(t.detach().requires_grad_() for t in tensors)
    attention = partial(flashtile.attention, causal=True)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu]) as seen:
        loss = detached_target(attention, leaves, tuple(t.cos() for t in tensors))
        torch.autograd.grad(loss, leaves)
    called = [event.name for event in seen.events() if event.name.startswith("flashtile::")]
    assert called == ["flashtile::tangents", "flashtile::backward"]


def test_tangents_need_memory_that_grows_with_the_tokens():
    """Standard attention would take 9 tensors of 32 MiB."""
    q = torch.randn(1, 2048, 2, 8)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as seen:
        torch.func.jvp(lambda x: flashtile.attention(x, q, q, causal=True), (q,), (q.cos(),))
    largest = max(event.cpu_memory_usage for event in seen.events() if event.name.startswith("aten::"))
    assert largest < 2**24


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_losses_with_a_detached_tangent_store_no_scores_on_a_gpu(head_dim):
    """The scores of 16384 tokens would take 4 GiB in float32, and each tensor takes 16 or 32 MiB."""
    leaves = [torch.randn(1, 16384, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    moving = tuple(t.cos() for t in leaves)
    leaves = [t.requires_grad_() for t in leaves]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = detached_target(partial(flashtile.attention, causal=True), tuple(leaves), moving)
    gradients = torch.autograd.grad(loss, leaves)
    assert all(t.isfinite().all() for t in gradients)
    assert torch.cuda.max_memory_allocated() - before < 2**30


def test_slopes_and_lengths_under_vmap_of_tangents():
    """Tangents around vmap, and within it, are computed for all samples in one call."""
    q, k, v = (torch.stack([t, t / 2, -t]) for t in dense(dtype=torch.float64))
    given = {"alibi_slopes": slopes("cpu", 3, 4), "seqused_k": int32(4, 12).repeat(3, 1)}
    moving = tuple(t.cos() for t in (q, k, v))

    def attend(attention, *tensors):
        return attention(*tensors[:3], alibi_slopes=tensors[3], seqused_k=tensors[4], causal=True)

    ours = partial(attend, partial(flashtile.attention, return_lse=True))
    mapped = torch.func.vmap(ours)
    around = torch.func.jvp(lambda *t: mapped(*t, *given.values()), (q, k, v), moving)
    within = torch.func.vmap(lambda t, m, *more: torch.func.jvp(lambda *x: ours(*x, *more), t, m))(
        (q, k, v), moving, *given.values()
    )
    for i in range(3):
        more = [t[i] for t in given.values()]
        expected = torch.func.jvp(
            lambda *t, more=more: attend(reference.attention, *t, *more),
            *(tuple(t[i] for t in some) for some in ((q, k, v), moving)),
        )
        for found in (around, within):
            assert_same([t[i] for pair in found for t in pair], [t for pair in expected for t in pair])


@pytest.mark.parametrize("name", ["packed", "functions"])
@pytest.mark.parametrize("order", ["tangents around", "tangents within", "gradients of samples"])
def test_tangents_and_vmap_of_calls_without_a_common_batch(name, order):
    """Packed sequences and score functions: the samples are computed one by one."""
    run, (q, *others) = differentiable(name)
    samples = torch.stack([q.detach(), -q.detach()])

    def attend(x):
        return run(x, *(t.detach() for t in others))

    def along(x):
        return torch.func.jvp(attend, (x,), (x.cos(),))

    def loss(x):
        return along(x)[0][0].square().sum() + along(x)[1][0].square().sum()

    if order == "tangents around":
        found = torch.func.jvp(torch.func.vmap(attend), (samples,), (samples.cos(),))
    elif order == "tangents within":
        found = torch.func.vmap(along)(samples)
    else:
        found = torch.func.vmap(torch.func.grad(loss))(samples)
        assert_same((found,), (torch.stack([torch.func.grad(loss)(x) for x in samples]),))
        return
    for i, x in enumerate(samples):
        assert_same([t[i] for pair in found for t in pair], [t for pair in along(x) for t in pair])


def test_tangents_that_no_backend_computes_are_those_of_standard_attention(monkeypatch):
    """Of calls with statistics, for example."""
    q, k, v = dense(dtype=torch.float64)
    standard = Standard(monkeypatch)
    along = partial(torch.func.jvp, primals=(q, k, v), tangents=(q.cos(), k.cos(), v.cos()))
    expected = along(partial(flashtile.attention, causal=True))
    assert standard.calls == 0
    of_statistics = partial(flashtile.attention, causal=True, return_entropy=True)
    assert_same(along(lambda *tensors: of_statistics(*tensors)[0]), expected)
    assert standard.calls == 1
    with pytest.raises(ValueError, match="backend must be None or one of"):
        along(partial(flashtile.attention, backend="fast"))


def test_a_call_with_tangents_obeys_its_backend_like_a_plain_call(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k, v = dense(dtype=torch.float64)
    jvp, vmap, sink = torch.func.jvp, torch.func.vmap, torch.zeros(q.shape[2], dtype=q.dtype)
    for backend in ("portable", "hopper"):
        call = partial(flashtile.attention, backend=backend)
        of_q = lambda x, call=call, **options: call(x, k, v, **options)  # noqa: E731
        for run in (
            lambda of_q=of_q: of_q(q),
            lambda of_q=of_q: jvp(of_q, (q,), (q,)),
            lambda of_q=of_q: jvp(lambda s: of_q(q, sink=s), (sink,), (sink,)),
            lambda of_q=of_q: jvp(partial(of_q, return_entropy=True), (q,), (q,)),
            lambda of_q=of_q: jvp(lambda x: jvp(of_q, (x,), (q,)), (q,), (q,)),
            lambda of_q=of_q: jvp(vmap(of_q), (q[None],), (q[None],)),
        ):
            with pytest.raises(NotImplementedError, match=f"backend='{backend}' does not serve this call"):
                run()


def test_packed_sequences_have_tangents():
    (q, k, v), options = varlen()
    call = partial(flashtile.flash_attn_varlen_func, **options)
    _, tangent = torch.func.jvp(call, (q, k, v), (k.new_ones(q.shape), v, k))
    _, expected = torch.func.jvp(
        lambda *t: reference.attention(*t, **options)[0], (q, k, v), (k.new_ones(q.shape), v, k)
    )
    assert_same((tangent,), (expected,))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "softcap": 2.0}, {"mask": torch.ones(1, 1, 9, 12).tril(2).bool()}]
)
def test_slopes_have_tangents(options):
    given = (slopes(),), (torch.ones(4),)

    def tangents(attention):
        tensors = dense(dtype=torch.float64)
        return torch.func.jvp(lambda s: attention(*tensors, alibi_slopes=s, **options), *given)

    ours, expected = map(tangents, (partial(flashtile.attention, return_lse=True), reference.attention))
    for a, e in zip(ours, expected, strict=True):
        assert_same(a, e)


def test_slopes_have_tangents_with_a_score_mod():
    q, k, v = dense(dtype=torch.float64)
    options = {"score_mod": lambda s, b, h, i, j: s * (1 + h)}
    given = slopes(), torch.ones(4)
    expected = torch.func.jvp(
        lambda s: reference.attention(q, k, v, alibi_slopes=s, **options)[0], given[:1], given[1:]
    )
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(*given)
        assert_same(
            forward_ad.unpack_dual(flashtile.attention(q, k, v, alibi_slopes=dual, **options)), expected
        )


def test_a_call_with_tangents_is_checked():
    q, k, v = dense()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="v has leading shape"):
        flashtile.attention(forward_ad.make_dual(q, q), k[:1], v)
