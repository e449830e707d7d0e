"""``out=`` and ``lse=``: results in the caller's memory, and which memory is refused."""

from __future__ import annotations

import pytest
import torch

import flashtile
from cases import BF16, FP32
from decode_cases import CASES, build
from flashtile.op.registry import flat
from flashtile.problems.decode import CacheTensors, DecodeOptions
from targets import TARGETS
from walk import walk

pytestmark = pytest.mark.numerical

BY_NAME = {case.name: case for case in CASES}
NAN = float("nan")


def aligned(shape, dtype):
    return torch.full((2, *shape), NAN, dtype=dtype)[0], None


def odd_address(shape, dtype):
    """No multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 2,), NAN, dtype=dtype)
    return memory[1:-1].view(shape), memory


def apart(shape, dtype):
    """Rows with a gap behind each."""
    memory = torch.full((*shape[:-1], shape[-1] + 4), NAN, dtype=dtype)
    return memory[..., : shape[-1]], memory


MEMORY = {"aligned": aligned, "odd address": odd_address, "rows apart": apart}


def decode(name):
    def call(target, dtype):
        tensors, arguments = build(BY_NAME[name], dtype, target.device)
        wanted = {"return_softmax_lse": True, "backend": target.backend}

        def run(**results):
            given = [t if t is None else t.clone() for t in tensors]
            return flashtile.flash_attn_with_kvcache(*given, **arguments | wanted | results)

        return run

    return call


def packed(target, dtype):
    """Tokens of nobody's at the end, which are 0 and -inf; and over pages."""
    q, k, v = torch.randn(3, 14, 4, 16, dtype=dtype, device=target.device).unbind()
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=target.device)
    return lambda **results: flashtile.flash_attn_varlen_func(
        q, k, v, offsets, offsets, 7, 7, causal=True, backend=target.backend, **{"return_lse": True} | results
    )


def over_pages(target, dtype):
    q = torch.randn(6, 4, 16, dtype=dtype, device=target.device)
    k, v = torch.randn(2, 9, 4, 2, 16, dtype=dtype, device=target.device).unbind()
    with torch.device(target.device):
        offsets, keys = (torch.tensor(o, dtype=torch.int32) for o in ((0, 3, 6), (0, 5, 17)))
        table = torch.tensor([[0, 1, 8], [2, 3, 4]], dtype=torch.int32)
    return lambda **results: flashtile.flash_attn_varlen_func(
        q, k, v, offsets, keys, 3, 12, block_table=table, backend=target.backend,
        **{"return_lse": True} | results,
    )  # fmt: skip


def dense(target, dtype):
    q = torch.randn(2, 5, 4, 16, dtype=dtype, device=target.device)
    k, v = torch.randn(2, 2, 7, 2, 16, dtype=dtype, device=target.device).unbind()
    return lambda **results: flashtile.attention(
        q, k, v, backend=target.backend, **{"return_lse": True} | results
    )


def shared_prefix(target, dtype):
    with torch.device(target.device):
        k, v = torch.randn(2, 10, 16, 2, 16, dtype=dtype).unbind()
        table = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
        lengths = torch.tensor([40, 35], dtype=torch.int32)
        q = torch.randn(2, 1, 4, 16, dtype=dtype)
    return lambda **results: flashtile.flash_attn_with_shared_prefix(
        q, k, v, table, lengths, 32, backend=target.backend, **{"return_softmax_lse": True} | results
    )


CALLS = {
    "packed": packed,
    "over pages": over_pages,
    "dense": dense,
    "shared prefix": shared_prefix,
    **{
        name: decode(name)
        for name in ("paged", "ragged-queries", "rotary", "two-splits", "sink-without-keys", "wide-values")
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_results_go_to_the_callers_memory(name, target):
    dtype = BF16 if BF16 in target.dtypes else FP32
    run = CALLS[name](target, dtype)
    expected = run()
    for memory in MEMORY.values():
        with torch.device(target.device):
            (out, around), (lse, around_lse) = (memory(t.shape, t.dtype) for t in expected)
        got = run(out=out, lse=lse)
        assert got[0] is out
        assert got[1] is lse
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        for buffer, whole in ((out, around), (lse, around_lse)):
            if whole is not None:  # nothing beside the buffer was written
                assert int((~whole.isnan()).sum()) == int((~buffer.isnan()).sum())


@pytest.mark.parametrize("name", ["dense", "packed", "paged", "rotary"])
def test_one_of_the_results(name, target):
    run = CALLS[name](target, FP32 if FP32 in target.dtypes else BF16)
    of_lse = "return_lse" if name in ("dense", "packed") else "return_softmax_lse"
    out, lse = run()
    given = torch.full_like(out, NAN)
    assert run(out=given, **{of_lse: False}) is given
    assert torch.equal(given, out)
    both = run(out=given.fill_(NAN))
    assert both[0] is given
    assert torch.equal(both[1], lse)
    statistics = torch.full_like(lse, NAN)  # written, though nobody wants it back
    assert torch.equal(run(lse=statistics, **{of_lse: False}), out)
    assert torch.equal(statistics, lse)


def cache_call():
    (q, k_cache, v_cache, k, v), arguments = build(BY_NAME["append"], FP32, "cpu")
    caches = {"k_cache": k_cache.nan_to_num(0.5), "v_cache": v_cache.nan_to_num(0.5)}
    return {"q": q, "k": k, "v": v, **caches, **arguments}


def test_autograd_learns_that_a_buffer_has_changed():
    arguments = cache_call()
    out = torch.empty_like(arguments["q"])
    weight = torch.ones(16, requires_grad=True)
    product = out @ weight
    with torch.no_grad():
        flashtile.flash_attn_with_kvcache(**arguments, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def like_q(**changes):
    return lambda arguments: torch.empty_like(arguments["q"], **changes)


LSE, MASS = (3, 4, 1), (3, 48, 2)
REFUSED = [
    ("out", lambda a: [1.0], TypeError, "out must be a torch.Tensor, got list"),
    ("out", like_q(dtype=BF16), TypeError, "out must have dtype torch.float32, got torch.bf"),
    ("out", lambda a: torch.empty(3, 4, 16), ValueError, "out must have shape (3, 1, 4, 16), got (3, 4, 16)"),
    ("out", like_q(device="meta"), ValueError, "out is on meta, not on cpu"),
    ("out", lambda a: torch.empty(3, 1, 4, 32)[..., ::2], ValueError, "out must have stride 1"),
    ("out", lambda a: torch.empty(1, 1, 4, 16).expand(3, 1, 4, 16), ValueError, "elements that share"),
    ("out", lambda a: torch.empty(192).as_strided((3, 1, 4, 16), (63, 1, 16, 1)), ValueError, "that share"),
    ("out", like_q(requires_grad=True), ValueError, "out requires grad"),
    ("out", lambda a: a["q"], ValueError, "out shares memory with q"),
    ("out", lambda a: a["v_cache"].view(-1)[64:256].view(3, 1, 4, 16), ValueError, "memory with v_cache"),
    ("lse", lambda a: torch.empty(LSE, dtype=BF16), TypeError, "lse must have dtype"),
    ("lse", lambda a: torch.empty(3, 1, 4), ValueError, "lse must have shape (3, 4, 1)"),
    ("lse", lambda a: a["k_cache"].view(-1)[:12].view(LSE), ValueError, "lse shares memory with k_cache"),
    ("mass", lambda a: 1.0, TypeError, "mass must be a torch.Tensor, got float"),
    ("mass", lambda a: torch.empty(MASS, dtype=BF16), TypeError, "mass must have dtype"),
    ("mass", lambda a: torch.empty(3, 2, 48), ValueError, "mass must have shape (3, 48, 2), got (3, 2, 48)"),
    ("mass", lambda a: torch.empty(2, 48, 3).permute(2, 1, 0), ValueError,
     "mass must have stride 1 in its last dimension, got strides (1, 3, 144): set mass = mass.contiguous()"),
    ("mass", lambda a: torch.empty(MASS, device="meta"), ValueError, "mass is on meta, not on cpu"),
    ("mass", lambda a: torch.empty(MASS, requires_grad=True), ValueError, "mass requires grad"),
    ("mass", lambda a: torch.empty(1, 48, 2).expand(MASS), ValueError, "mass has elements that share"),
    ("mass", lambda a: a["v_cache"].view(-1)[:288].view(MASS), ValueError, "mass shares memory with v_cache"),
]  # fmt: skip


@walk("known", [False, True])
@walk(("name", "buffer", "error", "words"), REFUSED)
def test_memory_that_is_refused(name, buffer, error, words, known):
    """By name and before the cache is written, of a known signature, too."""
    arguments = cache_call()
    if known:
        good = {"out": torch.empty_like(arguments["q"]), "lse": torch.empty(LSE)}
        good |= {"mass": torch.empty(MASS)} if name == "mass" else {}
        flashtile.flash_attn_with_kvcache(**arguments, **good)
    before = arguments["k_cache"].clone()
    arguments["k"] = arguments["k"] + 1
    with pytest.raises(error) as caught:
        flashtile.flash_attn_with_kvcache(**arguments, **{name: buffer(arguments)})
    assert words in str(caught.value)
    assert torch.equal(arguments["k_cache"], before)


def test_buffers_in_each_others_memory():
    arguments = cache_call()
    out = torch.empty_like(arguments["q"])
    with pytest.raises(ValueError, match="out shares memory with lse"):
        flashtile.flash_attn_with_kvcache(**arguments, out=out, lse=out.view(-1)[:12].view(LSE))


@pytest.mark.parametrize("name", ["q", "k", "sink"])
def test_a_call_that_needs_gradients_is_refused(name):
    arguments = cache_call() | {"sink": torch.zeros(4)}
    arguments[name] = arguments[name].clone().requires_grad_()
    out = torch.full_like(arguments["q"], NAN, requires_grad=False)
    words = rf"out and lse must be None where {name} requires grad.*torch\.no_grad"
    with pytest.raises(ValueError, match=words):
        flashtile.flash_attn_with_kvcache(**arguments, out=out)
    with torch.no_grad():
        assert flashtile.flash_attn_with_kvcache(**arguments, out=out) is out
    q, k, v = torch.randn(3, 1, 5, 4, 16).unbind()
    out = torch.empty_like(q)
    with pytest.raises(ValueError, match="out and lse must be None where v requires grad"):
        flashtile.flash_attn_func(q, k, v.requires_grad_(), out=out)
    with pytest.raises(NotImplementedError, match="out and lse must be None under a transform"):
        torch.func.vmap(lambda q: flashtile.flash_attn_func(q, k, v.detach(), out=out))(q[None])


def test_e4m3_tensors_take_no_buffers():
    q = torch.zeros(1, 5, 4, 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="lse must be None for q, k and v of float8_e4m3fn"):
        flashtile.flash_attn_func(q, q, q, lse=torch.empty(1, 4, 5))


@pytest.mark.parametrize("name", ["dense", "packed", "paged", "rotary"])
def test_compiled_calls_write_the_same(name):
    torch._dynamo.reset()
    run = CALLS[name](TARGETS[0], FP32)
    expected = run()
    out, lse = (torch.full_like(t, NAN) for t in expected)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(out=out, lse=lse)
    for buffer, returned, result in zip((out, lse), got, expected, strict=True):
        assert returned.data_ptr() == buffer.data_ptr()
        assert torch.equal(buffer, result)
    torch._dynamo.reset()


def test_opcheck():
    (q, k_cache, v_cache, *_), arguments = build(BY_NAME["paged"], FP32, "cpu")
    cache = [t.nan_to_num(0.5) for t in (k_cache, v_cache)]
    beside = CacheTensors(**{n: a for n, a in arguments.items() if n in CacheTensors._fields})
    buffers = torch.zeros_like(q), torch.zeros(LSE)
    operator = torch.ops.flashtile.decode_into.default
    assert operator._schema.returns == []  # what it writes has no second name in a graph
    torch.library.opcheck(operator, (q, *cache, *buffers, *beside, *flat(DecodeOptions())))


def test_explained_as_the_call_itself():
    q, k, v = torch.randn(3, 1, 5, 4, 16).unbind()
    explanation = flashtile.explain(flashtile.flash_attn_func, q, k, v, out=torch.empty_like(q))
    assert explanation.operations == ("forward",)
    assert explanation.backend == "cpu"
