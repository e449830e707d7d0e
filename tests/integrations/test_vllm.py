"""The backend of vLLM: on each recorded interface, and in the installed vLLM if there is one."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import addressed
import numpy as np
import pytest
import torch
import vllm_stand_in
from group_oracle import GroupsInPython
from vllm_stand_in import PLUGIN, RECORD, modules_of

import called
from flashtile import testing
from flashtile.backends.cpu import decode as cpu_decode
from flashtile.integrations import paged_groups
from flashtile.integrations.vllm import register
from flashtile.problems.decode import FP8
from flashtile.reference.decode import attention_with_kvcache
from walk import walk

pytestmark = pytest.mark.numerical

HEADS, HEADS_KV, HEAD_DIM, PAGE, BLOCKS = 4, 2, 16, 16, 24
INSTALLED, HAS_VLLM = "installed", importlib.util.find_spec("vllm") is not None
QUERIES, BEFORE = (1, 5, 17, 1, 0, 3), (40, 0, 30, 7, 20, 1)
SLOPES = [0.5, 0.25, 0.125, 0.0625]
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)


@pytest.fixture(params=[*RECORD, *[INSTALLED] * HAS_VLLM])
def release(request):
    """A recorded release, or "installed"."""
    return request.param


@pytest.fixture
def backend(release):
    """The backend's module."""
    with vllm_stand_in.plugin({} if release == INSTALLED else modules_of(release)) as module:
        yield module


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def newest():
    with vllm_stand_in.plugin(modules_of(list(RECORD)[-1])) as module:
        yield module


@pytest.fixture
def invariant():
    """The backend in vLLM's batch-invariant mode."""
    with vllm_stand_in.plugin(modules_of(list(RECORD)[-1], VLLM_BATCH_INVARIANT=True)) as module:
        yield module


def make_cache(backend, order=None, dtype=torch.float64, heads=HEADS_KV):
    """Return a layer's cache of random numbers, of ``order`` in memory, and views of its keys and values."""
    shape = backend.releases.cache_shape(BLOCKS, PAGE, heads, HEAD_DIM)
    order = range(len(shape)) if order is None else order
    memory = torch.randn([shape[dim] for dim in order], dtype=torch.float64).to(dtype)
    memory = memory.view(torch.uint8) if dtype == FP8 else memory
    cache = memory.permute([list(order).index(dim) for dim in range(len(shape))])
    return cache, backend.releases.keys_and_values(cache.view(dtype), HEAD_DIM)


def make_layer(k_scale=1.0, v_scale=1.0):
    scales = [torch.as_tensor(scale, dtype=torch.float32) for scale in (k_scale, v_scale)]
    floats = [scale.item() if scale.numel() == 1 else None for scale in scales]
    return SimpleNamespace(
        _k_scale=scales[0], _v_scale=scales[1], _k_scale_float=floats[0], _v_scale_float=floats[1]
    )


class Step:
    """A batch of a step as vLLM describes it: block 0 is no sequence's, and unused entries are stale."""

    def __init__(self, backend, queries=QUERIES, before=BEFORE, padding=4, causal=True, empty=0):
        lengths = [a + b for a, b in zip(queries, before, strict=True)]
        self.tokens, pages = sum(queries), iter(range(BLOCKS - 1, 0, -1))
        table = torch.full((len(queries) + empty, 4), 10**6, dtype=torch.int32)
        table[len(queries) :] = 0
        slots = []
        for row, (length, seen) in enumerate(zip(lengths, before, strict=True)):
            for column in range(-(-length // PAGE)):
                table[row, column] = next(pages)
            slots += [int(table[row, i // PAGE]) * PAGE + i % PAGE for i in range(seen, length)]
        starts = torch.tensor([0, *queries, *[0] * empty]).cumsum(0).int()
        self.common = backend_module().CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lengths + [0] * empty, dtype=torch.int32),
            num_reqs=len(queries) + empty,
            num_actual_tokens=self.tokens + (padding if empty else 0),
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            seq_lens_cpu_upper_bound=torch.tensor(lengths + [0] * empty, dtype=torch.int32),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
            causal=causal,
        )
        self.rows = self.tokens + padding

    def tensors(self, dtype=torch.float64, heads_kv=HEADS_KV):
        sizes = HEADS, heads_kv, heads_kv
        return [torch.randn(self.rows, n, HEAD_DIM, dtype=torch.float64).to(dtype) for n in sizes]

    def exact(self, q, keys, values, upcast, **options):
        common = self.common
        return attention_with_kvcache(
            q[: self.tokens],
            keys,
            values,
            cache_seqlens=common.seq_lens,
            block_table=common.block_table_tensor,
            cu_seqlens_q=common.query_start_loc,
            max_seqlen_q=common.max_query_len,
            softmax_scale=HEAD_DIM**-0.5,
            upcast=upcast,
            **options,
        )[0]


def backend_module():
    return importlib.import_module("vllm.v1.attention.backend")


def make_impl(backend, **options):
    positional = HEADS, HEAD_DIM, HEAD_DIM**-0.5, options.pop("num_kv_heads", HEADS_KV)
    return backend.Impl(*positional, **options)


def metadata(backend, step, max_num_batched_tokens=512):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens))
    spec = SimpleNamespace(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=HEAD_DIM)
    return backend.Builder(spec, ["layer"], config, torch.device("cpu")).build(0, step.common)


def run(backend, step, impl, layer, cache, q, k, v):
    """Make the calls of vLLM's ``Attention`` layer, and return the rows that are not padding."""
    out = torch.full_like(q, torch.nan)
    impl.do_kv_cache_update(layer, k, v, cache, step.common.slot_mapping)
    impl.forward(layer, q, k, v, cache, metadata(backend, step), output=out)
    return out[: step.tokens]


def assert_exact(
    backend, step, exact_options=None, dtype=torch.float64, cache_dtype=None, order=None, **given
):
    """Compare a step with the reference by the error rule; new keys must be in the cache."""
    heads_kv, layer = given.get("num_kv_heads", HEADS_KV), given.pop("layer", make_layer())
    cache, (keys, values) = make_cache(backend, order, cache_dtype or dtype, heads_kv)
    q, k, v = step.tensors(dtype, heads_kv)
    out = run(backend, step, make_impl(backend, **given), layer, cache, q, k, v)
    slots = step.common.slot_mapping[: step.tokens]
    options = {"causal": step.common.causal, **(exact_options or {})}
    if cache_dtype is None:
        assert torch.equal(keys[slots // PAGE, slots % PAGE], k[: step.tokens])
        assert torch.equal(values[slots // PAGE, slots % PAGE], v[: step.tokens])
    else:
        scales = [scale.expand(heads_kv).contiguous() for scale in (layer._k_scale, layer._v_scale)]
        options |= {"k_descale": scales[0], "v_descale": scales[1]}
        new = keys.view(torch.uint8)[slots // PAGE, slots % PAGE].view(FP8).double() * scales[0][:, None]
        assert (new - k[: step.tokens].double()).abs().max() <= k.abs().max() / 16 + scales[0].max() / 1024
    exact, plain = (step.exact(q, keys, values, upcast, **options) for upcast in (torch.float64, None))
    comparison = testing.compare("out", out, exact, plain)
    assert comparison.holds, comparison


CASES = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 9}, {"window_size": (8, 0)}),
    "soft cap": ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    "alibi": ({"alibi_slopes": SLOPES}, {"alibi_slopes": torch.tensor(SLOPES)}),
    "sinks": ({"sinks": SINKS}, {"sink": SINKS}),
    "one key head": ({"num_kv_heads": 1}, {}),
    "cross attention": ({"attn_type": "encoder_decoder"}, {}),
    "all": (
        {"sliding_window": 20, "logits_soft_cap": 5.0, "alibi_slopes": SLOPES, "sinks": SINKS},
        {"window_size": (19, 0), "softcap": 5.0, "alibi_slopes": torch.tensor(SLOPES), "sink": SINKS},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mixed_batch(backend, case):
    given, options = CASES[case]
    assert_exact(backend, Step(backend), options, **given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_of_models(backend, dtype):
    assert_exact(backend, Step(backend), dtype=dtype)


@pytest.mark.parametrize("window", [None, 9])
def test_attention_that_is_not_causal(backend, window):
    options = {} if window is None else {"window_size": (window - 1, window - 1)}
    assert_exact(backend, Step(backend, causal=False), options, sliding_window=window)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.25), ([0.5, 0.75], [0.25, 1.5])], ids=str)
def test_fp8_caches_with_a_scale_of_the_layer_or_of_each_head(backend, dtype, scales):
    layer = make_layer(*scales)
    assert_exact(backend, Step(backend), dtype=dtype, cache_dtype=FP8, kv_cache_dtype="fp8", layer=layer)


def test_a_new_scale_of_the_layer_is_taken(newest):
    impl = make_impl(newest, kv_cache_dtype="fp8")
    step = Step(newest)
    for scale in (0.5, 2.0, 1.0):  # 1 is also the scale at first
        cache, (keys, values) = make_cache(newest, dtype=FP8)
        q, k, v = step.tensors()
        out = run(newest, step, impl, make_layer(scale, scale), cache, q, k, v)
        scales = dict.fromkeys(("k_descale", "v_descale"), torch.full((HEADS_KV,), scale))
        exact = step.exact(q, keys, values, torch.float64, causal=True, **scales)
        torch.testing.assert_close(out, exact)


@pytest.mark.parametrize("heads_first", [False, True])
def test_layouts_of_the_cache(backend, heads_first, monkeypatch):
    """The order in memory is what vLLM is told, with keys and values as views."""
    utils = importlib.import_module("vllm.v1.attention.backends.utils")
    layout = "HND" if heads_first else "NHD"
    monkeypatch.setattr(utils, "get_kv_cache_layout", lambda: layout, raising=False)
    order = backend.Backend.get_kv_cache_stride_order()
    with_layers = backend.Backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    shape = backend.Backend.get_kv_cache_shape(BLOCKS, PAGE, HEADS_KV, HEAD_DIM)
    assert sorted(order) == list(range(len(shape)))
    assert sorted(with_layers) == list(range(len(shape) + 1))
    assert with_layers[0] == 1  # blocks come first, so each may be padded
    _, (keys, values) = make_cache(backend, order)
    for view in (keys, values):
        assert view.shape == (BLOCKS, PAGE, HEADS_KV, HEAD_DIM)
        assert (view.stride(2) > view.stride(1)) == heads_first
    assert_exact(backend, Step(backend), order=order)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)], ids=str)
def test_caches_are_read_by_their_strides(newest, order):
    """vLLM 0.33 lays them out by itself, also with heads outermost."""
    assert_exact(newest, Step(newest), order=order)


def test_one_query_of_each_sequence_with_padded_sequences(backend):
    step = Step(backend, (1, 1, 1), (4, 9, 40), padding=2, empty=2)
    assert metadata(backend, step).is_one_query_each
    assert_exact(backend, step)


def test_speculative_decoding_with_padded_sequences(backend):
    """The tokens are as many as if all sequences had four, so rows must not be counted from the tokens."""
    step = Step(backend, (4, 4, 2), (4, 9, 40), padding=6, empty=1)
    assert not metadata(backend, step).is_one_query_each
    assert_exact(backend, step)


def test_padding_is_not_written(newest):
    step = Step(newest)
    cache, (keys, _) = make_cache(newest)
    before = keys.clone()
    q, k, v = step.tensors()
    run(newest, step, make_impl(newest), make_layer(), cache, q, k, v)
    slots = step.common.slot_mapping[: step.tokens]
    changed = (keys != before).flatten(2).any(-1)
    assert changed.sum() == step.tokens
    assert changed[slots // PAGE, slots % PAGE].all()


def test_without_metadata_the_output_is_zero(backend):
    q = torch.randn(3, HEADS, HEAD_DIM)
    out = make_impl(backend).forward(None, q, q, q, torch.empty(0), None, output=torch.ones_like(q))
    assert not out.any()


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
@pytest.mark.parametrize("window", [None, 4])
def test_encoders_have_no_cache(backend, kind, window):
    step = Step(backend, (3, 9, 6), (0, 0, 0), causal=False)
    q, k, v = step.tensors()
    impl = make_impl(backend, attn_type=kind, sliding_window=window, kv_cache_dtype="fp8")
    out = run(backend, step, impl, make_layer(), torch.empty(0), q, k, v)
    for rows in torch.arange(18).split([3, 9, 6]):
        side = (-1, -1) if window is None else (window - 1, window - 1)
        one = [t[rows][None] for t in (q, k, v)]
        exact = attention_with_kvcache(*one, window_size=side, softmax_scale=HEAD_DIM**-0.5)[0]
        torch.testing.assert_close(out[rows], exact[0])


def test_a_layer_may_read_the_cache_of_another(newest):
    step = Step(newest)
    cache, (keys, values) = make_cache(newest)
    q, *_ = step.tensors()
    out = torch.empty_like(q)
    impl = make_impl(newest, kv_sharing_target_layer_name="other")
    impl.forward(make_layer(), q, None, None, cache, metadata(newest, step), output=out)
    torch.testing.assert_close(out[: step.tokens], step.exact(q, keys, values, torch.float64, causal=True))


def test_pages_of_another_group_of_layers(backend):
    step = Step(backend)
    first = metadata(backend, step)
    table, slots = step.common.block_table_tensor + 1, step.common.slot_mapping + 1
    builder = object.__new__(backend.Builder)
    second = builder.update_block_table(first, torch.cat([table, table]), slots)
    assert torch.equal(second.block_table, table)
    assert second.slot_mapping is slots
    assert first.block_table.data_ptr() == step.common.block_table_tensor.data_ptr()
    assert second.seq_lens is first.seq_lens


def test_the_metadata_of_a_step_are_views_and_numbers(backend):
    """Graphs are replayed without the metadata, so nothing in it may be computed from lengths."""
    step = Step(backend)
    given = {value.data_ptr() for value in vars(step.common).values() if isinstance(value, torch.Tensor)}
    for value in vars(metadata(backend, step)).values():
        assert value.data_ptr() in given if isinstance(value, torch.Tensor) else type(value) in (int, bool)


def test_numbers_may_be_numpys(newest):
    """vLLM's chunked-local layers cut the batch with numpy."""
    step = Step(newest, (1, 17), (4, 0))
    for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"):
        setattr(step.common, name, np.int32(getattr(step.common, name)))
    made = metadata(newest, step)
    assert {type(value) for value in vars(made).values()} == {torch.Tensor, int, bool}
    assert made.max_query_len == 32


def test_launches_are_shared_by_steps_of_similar_lengths(newest):
    assert [metadata(newest, Step(newest, (n,), (0,))).max_query_len for n in (1, 2, 3, 4, 5, 33)] == [
        1, 2, 4, 4, 8, 64,
    ]  # fmt: skip


def test_batch_invariance(invariant):
    """A sequence gives the same bits alone and among others, by calls that choose the same tiles."""
    impl, layer = make_impl(invariant), make_layer()
    cache, _ = make_cache(invariant)
    step = Step(invariant, (1, 17, 5), (40, 3, 0))
    q, k, v = step.tensors()
    together = run(invariant, step, impl, layer, cache, q, k, v)
    alone = Step(invariant, (1,), (40,), padding=0)
    alone.common.block_table_tensor[0] = step.common.block_table_tensor[0]
    made, one = metadata(invariant, step), metadata(invariant, alone)
    out = torch.empty_like(q[:1])
    impl.forward(layer, q[:1], None, None, cache, one, output=out)
    assert torch.equal(out, together[:1])
    assert (
        (made.max_query_len, made.max_encoder_len) == (one.max_query_len, one.max_encoder_len) == (128, 512)
    )
    assert not one.is_one_query_each
    for options in (impl.options, impl.causal_options):
        assert (options.num_splits, options.backend) == (1, None)


def test_batch_invariance_of_wide_heads(invariant, monkeypatch):
    """Of their tiles, Hopper's kernel rescales all rows together."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = [invariant.Impl(1, head_dim, 1.0).options.backend for head_dim in (64, 128, 256)]
    assert chosen == [None, None, "portable"]


# ---- prompts whose keys are all new ----

PROMPTS = {"one": ((9,), (0,)), "several": ((9, 1, 17), (0, 0, 0))}
CACHED = [case for case in CASES if case != "cross attention"]


def run_on_new(backend, step, impl, tensors, made=None):
    """Return the rows that are not padding, computed while the cache is full of NaN."""
    q, k, v = tensors
    cache, _ = make_cache(backend, dtype=q.dtype, heads=k.shape[1])
    out = torch.full_like(q, torch.nan)
    impl.forward(make_layer(), q, k, v, cache.fill_(torch.nan), made or metadata(backend, step), output=out)
    return out[: step.tokens]


@pytest.mark.parametrize("case", CACHED)
@pytest.mark.parametrize("name", PROMPTS)
def test_first_chunks_attend_to_the_tokens_of_the_step(backend, case, name):
    given, options = CASES[case]
    step = Step(backend, *PROMPTS[name])
    q, k, v = step.tensors(heads_kv=given.get("num_kv_heads", HEADS_KV))
    assert metadata(backend, step).is_all_new
    out = run_on_new(backend, step, make_impl(backend, **given), (q, k, v))
    keys, values = (torch.zeros(BLOCKS, PAGE, *t.shape[1:], dtype=t.dtype) for t in (k, v))
    slots = step.common.slot_mapping[: step.tokens]
    where = slots // PAGE, slots % PAGE
    keys[where], values[where] = k[: step.tokens], v[: step.tokens]
    exact, plain = (step.exact(q, keys, values, up, causal=True, **options) for up in (torch.float64, None))
    comparison = testing.compare("out", out, exact, plain)
    assert comparison.holds, comparison


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROMPTS)
def test_first_chunks_are_as_exact_as_over_the_cache(newest, dtype, name):
    assert_exact(newest, Step(newest, *PROMPTS[name]), dtype=dtype)
    assert_exact(newest, Step(newest, *PROMPTS[name], causal=False), dtype=dtype)


NOT_ALL_NEW = {
    "a prefix": {"queries": (9, 5), "before": (0, 1)},
    "a prefix of the longest": {"queries": (9,), "before": (7,)},
    "one query each": {"queries": (1, 1), "before": (0, 0)},
    "decoding": {"queries": (9, 1), "before": (0, 3)},
    "padded sequences": {"queries": (9, 9), "before": (0, 0), "empty": 1, "lengths": (9, 9)},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ALL_NEW)
def test_steps_with_earlier_keys_read_the_cache(backend, name):
    given = dict(NOT_ALL_NEW[name])
    lengths = given.pop("lengths", None)
    step = Step(backend, **given)
    if lengths is not None:
        step.common.seq_lens_cpu_upper_bound = torch.tensor(lengths)
    assert not metadata(backend, step).is_all_new
    assert_exact(backend, step)


def test_bounds_of_lengths_that_are_not_exact_read_the_cache(newest):
    """A length on the host may be larger than on the device."""
    step = Step(newest, (9, 5), (0, 0))
    step.common.seq_lens_cpu_upper_bound[1] += 1
    assert not metadata(newest, step).is_all_new
    step.common.seq_lens_cpu_upper_bound = None
    assert not metadata(newest, step).is_all_new


def test_captured_steps_read_the_cache(backend):
    """Their graph is replayed for sequences with earlier keys."""
    step = Step(backend, (9, 5), (0, 0))
    builder = object.__new__(backend.Builder)
    builder.min_queries = builder.min_encoder_len = 0
    assert builder.build(0, step.common).is_all_new
    assert not builder.build_for_cudagraph_capture(step.common).is_all_new


@pytest.mark.parametrize(
    "given",
    [{"attn_type": "encoder_decoder"}, {"kv_sharing_target_layer_name": "other"}, {"kv_cache_dtype": "fp8"}],
    ids=str,
)
def test_layers_that_read_the_cache_in_all_steps(newest, given):
    """Their cache has other keys than the step, or rounded ones."""
    assert not make_impl(newest, **given).takes_new
    assert make_impl(newest).takes_new


def test_batch_invariant_layers_read_the_cache_in_all_steps(invariant):
    assert not make_impl(invariant).takes_new


# ---- launches by address ----


@pytest.fixture
def launched():
    """Names of the launches by address, which compiled kernels have."""
    with addressed.launches() as calls:
        yield calls


TWICE = ["decode", "append"] * 2
ONE_EACH = {"queries": (1, 1, 1), "before": (4, 9, 40)}


@pytest.mark.parametrize("release", list(RECORD), indirect=True)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [{}, ONE_EACH], ids=["mixed", "decode"])
def test_layers_share_launches(backend, launched, case, batch):
    """The first layer takes the general path. Others, also of other steps, launch by address."""
    given, options = CASES[case]
    for _ in range(3):
        assert_exact(backend, Step(backend, **batch), options, **given)
    assert sorted(launched) == sorted(TWICE)


@pytest.mark.parametrize("scales", [(0.5, 0.25), ([0.5, 0.75], [0.25, 1.5])], ids=str)
def test_fp8_layers_share_launches(newest, launched, scales):
    for factor in (1.0, 2.0, 0.5):
        layer = make_layer(*(torch.as_tensor(scale) * factor for scale in scales))
        assert_exact(newest, Step(newest), cache_dtype=FP8, kv_cache_dtype="fp8", layer=layer)
    assert sorted(launched) == sorted(TWICE)


class Call:
    """A step of one layer, whose tensors may differ from those of other calls in one property."""

    def __init__(self, backend, cache=lambda t: t, order=None, **changes):
        self.backend, self.dtype = backend, changes.pop("dtype", torch.float64)
        self.change = {name: changes.pop(name, lambda t: t) for name in ("q", "k", "v", "out", "slots")}
        table = changes.pop("table", lambda t: t)
        self.given = changes.pop("given", {})
        self.step = Step(backend, **{**ONE_EACH, **changes})
        self.step.common.block_table_tensor = table(self.step.common.block_table_tensor)
        heads_kv = self.given.get("num_kv_heads", HEADS_KV)
        self.cache = cache(make_cache(backend, order, self.dtype, heads_kv)[0])
        self.tensors = self.step.tensors(self.dtype, heads_kv)

    def run(self):
        q, k, v = (self.change[n](t) for n, t in zip("qkv", self.tensors, strict=True))
        step, impl = self.step, make_impl(self.backend, **self.given)
        slots = self.change["slots"](step.common.slot_mapping)
        impl.do_kv_cache_update(make_layer(), k, v, self.cache, slots)
        keys, values = self.backend.releases.keys_and_values(self.cache, HEAD_DIM)
        where = slots[: step.tokens]
        assert torch.equal(keys[where // keys.shape[1], where % keys.shape[1]], k[: step.tokens])
        assert torch.equal(values[where // keys.shape[1], where % keys.shape[1]], v[: step.tokens])
        out = self.change["out"](torch.full_like(self.tensors[0], torch.nan))
        impl.forward(make_layer(), q, k, v, self.cache, metadata(self.backend, step), output=out)
        exact = step.exact(q, keys, values, torch.float64, causal=True)
        torch.testing.assert_close(out[: step.tokens].double(), exact.double(), atol=0.02, rtol=0.02)
        rest = out[step.tokens :]
        assert (rest.isnan() | (rest == 0)).all()  # not written, or filled


def strided(tensor):
    """Return an equal tensor, whose rows are further apart, as in a projection of q, k and v together."""
    return torch.cat([tensor, tensor + 1], 1)[:, : tensor.shape[1]]


def shifted(tensor):
    """Return an equal tensor at an address that is no multiple of 16."""
    memory = tensor.new_empty(tensor.numel() + 1)[1:]
    return memory.as_strided(tensor.shape, tensor.contiguous().stride()).copy_(tensor)


def with_gaps(cache):
    """Return an equal cache, whose blocks are further apart."""
    return torch.cat([cache, cache], -1).unflatten(-1, (2, -1))[..., 0, :]


def longer(cache):
    """Return a cache of more blocks."""
    return torch.cat([cache, cache])


DIFFERENT = {
    "q": {"q": strided}, "k": {"k": strided}, "v": {"v": strided}, "out": {"out": strided},
    "address of q": {"q": shifted}, "address of k": {"k": shifted}, "address of out": {"out": shifted},
    "address of the cache": {"cache": shifted}, "gaps": {"cache": with_gaps}, "blocks": {"cache": longer},
    "order": {"order": (0, 2, 1, 3)}, "dtype": {"dtype": torch.bfloat16},
    "padding": {"padding": 7}, "a short mapping": {"slots": lambda t: t[:3]},
    "table": {"table": lambda t: torch.cat([t, t], 1)[:, :4]},
    "a wide table": {"table": lambda t: torch.cat([t, t], 1)},
    "sequences": {"queries": (1, 1), "before": (40, 3)}, "queries": {"queries": (1, 2, 1)},
    "more queries": {"queries": (1, 5, 1)},
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_tensors_have_another_launch(newest, launched, name):
    """Each call is right after calls whose tensors differ in one property."""
    for changes in ({}, {}, DIFFERENT[name], DIFFERENT[name], {}, DIFFERENT[name]):
        Call(newest, **changes).run()
    assert len(launched) >= 4  # those of the first kind; some of the other kind take the general path
    if name == "address of the cache":  # the views may have other alignments the next time
        assert len(launched) == 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("batch", [{"queries": QUERIES, "before": BEFORE}, ONE_EACH], ids=["mixed", "decode"])
def test_compiled_kernels(newest, batch, device):
    """On a GPU the second call with a signature launches by address."""
    with torch.device(device), torch.inference_mode():
        for name in ("table", "q", "gaps", "address of the cache", "table"):
            for _ in range(2):
                Call(newest, dtype=torch.bfloat16, **batch, **DIFFERENT[name]).run()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [{}, ONE_EACH], ids=["mixed", "decode"])
def test_launches_by_address_in_a_graph(newest, batch):
    """Captured on another stream than that of the first calls, and replayed with other queries.

    The step and what its calls have left are freed before the replays.
    """
    with torch.device("cuda"):
        call, layer = Call(newest, dtype=torch.bfloat16, **batch), make_layer()
    step, impl, made = call.step, make_impl(newest), [metadata(newest, call.step)]
    (q, k, v), graph = call.tensors, torch.cuda.CUDAGraph()
    keys, values = newest.releases.keys_and_values(call.cache, HEAD_DIM)

    def attention() -> torch.Tensor:
        out = torch.full_like(q, torch.nan)
        impl.do_kv_cache_update(layer, k, v, call.cache, step.common.slot_mapping)
        impl.forward(layer, q, k, v, call.cache, made[0], output=out)
        return out[: step.tokens].double()

    with torch.inference_mode():
        first = [attention() for _ in range(3)]
        with torch.cuda.graph(graph):
            out = attention()
        made.clear()
        torch.cuda.empty_cache()
        for change in (1.0, -2.0):
            q.mul_(change)
            graph.replay()
            with torch.device("cuda"):
                exact = step.exact(q, keys, values, torch.float64, causal=True).double()
            for found in (out, *(first if change == 1.0 else ())):
                torch.testing.assert_close(found, exact, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    "given", [{"sliding_window": 2}, {"logits_soft_cap": 0.1}, {"sinks": SINKS}], ids=str
)
def test_other_layers_have_other_options(newest, launched, given):
    step = Step(newest, **ONE_EACH)
    cache, _ = make_cache(newest)
    q, k, v = step.tensors()
    outs = [
        run(newest, step, make_impl(newest, **options), make_layer(), cache, q, k, v)
        for options in ({}, given, {}, given)
    ]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert not torch.allclose(outs[0], outs[1])
    assert launched.count("decode") == 2


def test_scales_at_other_addresses(newest, launched):
    """A launch is for scales whose addresses are multiples of 16, or for others."""
    step = Step(newest, **ONE_EACH)
    cache, (keys, values) = make_cache(newest, dtype=FP8)
    q, k, v = step.tensors()
    impl = make_impl(newest, kv_cache_dtype="fp8")
    impl.scales = tuple(scale.clone() for scale in impl.scales)
    run(newest, step, impl, make_layer(), cache, q, k, v)
    exact = step.exact(q, keys, values, torch.float64, causal=True)
    for change, count in ((lambda t: t, 1), (shifted, 1), (shifted, 2), (lambda t: t.clone(), 3)):
        impl.scales = tuple(change(scale) for scale in impl.scales)
        assert [scale.data_ptr() % 16 == 0 for scale in impl.scales] == [change is not shifted] * 2
        out = torch.full_like(q, torch.nan)
        impl.forward(make_layer(), q, k, v, cache, metadata(newest, step), output=out)
        torch.testing.assert_close(out[: step.tokens], exact)
        assert launched.count("decode") == count


def test_layers_of_two_steps_in_turns_in_two_threads(newest, launched):
    """Each thread has its own step, of the same signatures as that of the other."""
    impl = make_impl(newest)

    def layers(first: int) -> bool:
        torch.set_grad_enabled(False)
        step = Step(newest, **{**ONE_EACH, "before": (first, 9, 40)})
        cache, (keys, values) = make_cache(newest)
        q, k, v = step.tensors()
        made = metadata(newest, step)
        for _ in range(20):
            impl.do_kv_cache_update(make_layer(), k, v, cache, step.common.slot_mapping)
            out = torch.full_like(q, torch.nan)
            impl.forward(make_layer(), q, k, v, cache, made, output=out)
            exact = step.exact(q, keys, values, torch.float64, causal=True)
            torch.testing.assert_close(out[: step.tokens], exact)
        return True

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(layers, (4, 30)))
    assert launched.count("decode") >= 36


@pytest.mark.parametrize("batch", [{}, ONE_EACH], ids=["mixed", "decode"])
def test_pages_of_a_copied_step(newest, launched, batch):
    """A step that layers have used, with other pages: the copy, and the step itself."""
    step = Step(newest, **batch)
    cache, (keys, values) = make_cache(newest)
    q, *_ = step.tensors()
    first, impl = metadata(newest, step), make_impl(newest)
    builder, common = object.__new__(newest.Builder), step.common

    def is_exact(made):
        out = torch.full_like(q, torch.nan)
        impl.forward(make_layer(), q, None, None, cache, made, output=out)
        exact = step.exact(q, keys, values, torch.float64, causal=True)
        torch.testing.assert_close(out[: step.tokens], exact)

    is_exact(first), is_exact(first)
    common.block_table_tensor = torch.where(common.block_table_tensor < BLOCKS, 3, common.block_table_tensor)
    is_exact(builder.update_block_table(first, common.block_table_tensor, common.slot_mapping))
    first.block_table = common.block_table_tensor
    is_exact(first)
    first.seq_lens = common.seq_lens = (common.seq_lens + 1) // 2
    is_exact(first)
    assert launched == ["decode"] * 4


def test_what_launches_by_address_refuse(newest, launched, monkeypatch):
    step = Step(newest, **ONE_EACH, padding=0)
    cache, _ = make_cache(newest)
    q, k, v = step.tensors()
    impl = make_impl(newest)
    for _ in range(2):
        run(newest, step, impl, make_layer(), cache, q, k, v)
    assert launched == ["append", "decode"]
    made = metadata(newest, step)
    with pytest.raises(ValueError, match="out shares memory with q, but is written"):
        impl.forward(make_layer(), q, k, v, cache, made, output=q)
    within = cache.flatten()[: q.numel()].view(q.shape)
    with pytest.raises(ValueError, match="out shares memory with k_cache, but is written"):
        impl.forward(make_layer(), q, k, v, cache, made, output=within)
    slots = torch.stack([step.common.slot_mapping] * 2, 1)[:, 0]
    with pytest.raises(ValueError, match="slot_mapping must have stride 1"):
        impl.do_kv_cache_update(make_layer(), k, v, cache, slots)
    out, learning = torch.empty_like(q), q.clone().requires_grad_()
    with (
        torch.enable_grad(),
        pytest.raises(ValueError, match="out and lse must be None where q requires grad"),
    ):
        impl.forward(make_layer(), learning, k, v, cache, made, output=out)
    step.common.seq_lens[0] = 10**6
    monkeypatch.setenv("FLASHTILE_DEBUG", "1")
    with pytest.raises(ValueError, match="cache_seqlens"):
        impl.forward(make_layer(), q, k, v, cache, made, output=out)


def test_autograd_learns_that_out_has_changed(newest, launched):
    step = Step(newest, **ONE_EACH)
    cache, _ = make_cache(newest)
    q, k, v = step.tensors()
    for _ in range(2):
        out = torch.empty_like(q)
        before = out._version
        make_impl(newest).forward(make_layer(), q, k, v, cache, metadata(newest, step), output=out)
        assert out._version > before
    assert launched == ["decode"]


def test_a_known_layer_calls_few_functions(newest, launched, monkeypatch):
    """Checks and views are left to the first layer with a signature."""
    step = Step(newest, **ONE_EACH)
    cache, _ = make_cache(newest)
    q, k, v = step.tensors()
    impl, made, out = make_impl(newest), metadata(newest, step), torch.empty_like(q)

    def layer():
        impl.do_kv_cache_update(None, k, v, cache, step.common.slot_mapping)
        impl.forward(None, q, k, v, cache, made, output=out)

    layer(), layer()
    assert launched == ["append", "decode"]
    for kind in (addressed.Append, addressed.Decode):
        monkeypatch.setattr(kind, "by_address", lambda *given: None)
    assert called.functions_called(layer) < 50


REFUSED = {
    "kv_cache_dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "chunk_lookback": {"chunk_lookback": 2},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_layer_is_refused(backend, name):
    with pytest.raises(NotImplementedError, match=f"{name} must be"):
        make_impl(backend, **REFUSED[name])


@pytest.mark.parametrize("name", ["dcp_world_size", "pcp_world_size"])
def test_context_parallelism_is_refused(newest, name, monkeypatch):
    monkeypatch.setattr(newest.Impl, name, 2, raising=False)
    with pytest.raises(NotImplementedError, match=f"{name} must be 1, got 2"):
        make_impl(newest)
    assert not newest.Impl.supports_dcp
    assert not newest.Impl.supports_pcp


def test_calls_that_are_refused(newest):
    step = Step(newest)
    step.common.causal = torch.ones(6, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="causal must be one bool"):
        metadata(newest, step)
    q = torch.randn(1, HEADS, HEAD_DIM)
    with pytest.raises(NotImplementedError, match="output_scale"):
        make_impl(newest).forward(None, q, q, q, q, None, q, output_scale=torch.ones(1))


def test_what_the_selector_is_told(backend):
    chosen = backend.Backend
    assert [chosen.supports_head_size(n) for n in (0, 1, 80, 512, 513)] == [False, True, True, True, False]
    kinds = ("decoder", "encoder", "encoder_only", "encoder_decoder", "other")
    assert [chosen.supports_attn_type(kind) for kind in kinds] == [True] * 4 + [False]
    assert [chosen.supports_compute_capability(c) for c in ((7, 5), (8, 0), (9, 0))] == [False, True, True]
    rest = dict.fromkeys(
        ("block_size", "use_mla", "has_sink", "use_sparse", "use_mm_prefix", "device_capability")
    )
    told = {
        (dtype, name): chosen.supports_combination(64, dtype=dtype, kv_cache_dtype=name, **rest)
        for dtype in (torch.bfloat16, torch.float16)
        for name in (None, "auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
    }
    refused = {key for key, reason in told.items() if reason is not None}
    assert refused == {(torch.bfloat16, "float16"), (torch.float16, "bfloat16")}
    assert "model's dtype" in told[torch.bfloat16, "float16"]


GRAPHS = {"0.25.1": "UNIFORM_BATCH", "0.26.0": "UNIFORM_BATCH", "0.33.0": "ALWAYS"}


@pytest.mark.parametrize("release", GRAPHS, indirect=True)
def test_support_of_graphs(backend, release):
    assert backend.Builder._cudagraph_support.name == GRAPHS[release]


def parameters(function):
    """Return the (name, default) of each parameter, but for ``self`` or ``cls``."""
    named = [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
    return [pair for pair in named if pair[0] not in ("self", "cls")]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("Backend", "AttentionBackend"), ("Builder", "AttentionMetadataBuilder"), ("Impl", "AttentionImpl")],
)
def test_methods_have_the_parameters_that_vllm_passes(backend, ours, theirs):
    """In their order and with their defaults; what a release lacks is there for another one."""
    ours, theirs = getattr(backend, ours), getattr(backend_module(), theirs)
    assert not inspect.isabstract(ours)
    own = [vars(cls) for cls in ours.__mro__ if cls.__module__.startswith(PLUGIN)]
    for name in {name for names in own for name in names}:
        if name.startswith("_") and name != "__init__":
            continue
        if not callable(getattr(ours, name)) or not hasattr(theirs, name):
            continue
        given = parameters(getattr(theirs, name))
        taken = inspect.signature(getattr(ours, name))
        if any(p.kind is p.VAR_POSITIONAL for p in taken.parameters.values()):
            taken.bind(*range(len(given) + (name == "__init__")))
            continue
        own = parameters(getattr(ours, name))[: len(given)]
        assert [n for n, _ in own] == [n for n, _ in given], name
        for (parameter, default), (_, expected) in zip(own, given, strict=True):
            assert expected is inspect.Parameter.empty or default == expected, (name, parameter)


CALLS = {
    "impl.do_kv_cache_update": "backend.Impl", "impl.forward": "backend.Impl",
    "impl.forward_mqa": "mla.LatentImpl",
    "prefill_backend.run_prefill_new_tokens": "mla.Prefill",
    "prefill_backend.run_prefill_context_chunk": "mla.Prefill",
}  # fmt: skip


@walk("name", CALLS)
@walk("release", RECORD)
def test_the_layers_pass_what_the_methods_take(release, name):
    """Each recorded call binds, and a positional argument with a parameter's name is that parameter."""
    (module, cls), method = CALLS[name].split("."), name.split(".")[1]
    with vllm_stand_in.plugin(modules_of(release)):
        function = getattr(getattr(importlib.import_module(f"{PLUGIN}.{module}"), cls), method)
        for text in RECORD[release][name]:
            call = ast.parse(text, mode="eval").body
            given = [ast.unparse(argument) for argument in call.args]
            inspect.signature(function).bind(None, *given, **{word.arg: None for word in call.keywords})
            names = [parameter for parameter, _ in parameters(function)]
            for place, argument in enumerate(given):
                assert argument not in names or names[place] == argument, text


def test_names_that_no_release_has():
    """What the classes define is in vLLM's interface, so a method that vLLM renames is noticed."""
    known = {name.split(".")[1] for name in CALLS}  # some are in no class of the interface
    for interface in RECORD.values():
        for entry in interface.values():
            if isinstance(entry, dict):
                known |= {line.split(":")[0].split(" ")[0] for line in entry["attributes"]}
                known |= {line.split("def ")[1].split("(")[0] for line in entry["methods"]}
    with vllm_stand_in.plugin(modules_of(list(RECORD)[-1])) as module:
        latent = importlib.import_module(f"{PLUGIN}.mla")
        classes = module.Common, module.Backend, module.Builder, module.Impl
        for cls in (*classes, latent.LatentBackend, latent.LatentBuilder, latent.LatentImpl, latent.Prefill):
            public = {name for name in vars(cls) if name[0] != "_"}
            assert public - known == set(), cls


def test_vllm_is_told_the_name(release, monkeypatch):
    if release == INSTALLED:
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        register()
        register()
        assert registry.AttentionBackendEnum.CUSTOM.get_class().__module__ == f"{PLUGIN}.backend"
        return
    with vllm_stand_in.plugin(modules_of(release)):
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        register()
        register()
        assert registry.registered == {
            registry.AttentionBackendEnum.CUSTOM: f"{PLUGIN}.Backend",
            registry.MLAPrefillBackendEnum.CUSTOM: f"{PLUGIN}.mla.Prefill",
        }


@pytest.mark.parametrize(
    ("version", "served"), [((0, 24, 0), False), ((0, 25, 0), True), ((0, 0, "dev"), True)]
)
def test_old_releases_are_refused(version, served):
    modules = modules_of(list(RECORD)[-1])
    modules["vllm.version"].__version_tuple__ = version
    modules["vllm.version"].__version__ = "0.24.0"
    with vllm_stand_in.plugin(modules):
        if served:
            register()
        else:
            with pytest.raises(NotImplementedError, match=r"vllm must be 0\.25 or newer, got 0\.24\.0"):
                register()


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed")
def test_without_vllm():
    with pytest.raises(ModuleNotFoundError, match=r"needs vllm"):
        register()


# ---- multi-head latent attention ----

RANK, ROTARY, NOPE, VALUES = 32, 8, 16, 24


@pytest.fixture
def latent(backend):
    """The module of latent attention."""
    return importlib.import_module(f"{PLUGIN}.mla")


def latent_impl(latent):
    """Return a layer. Only vLLM's own classes have prompts, so that method is filled in on a record."""
    cls = latent.LatentImpl
    if inspect.isabstract(cls):
        cls = type("Whole", (cls,), dict.fromkeys(cls.__abstractmethods__))
    named = {
        "num_heads": HEADS, "head_size": RANK + ROTARY, "scale": 0.2, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "q_lora_rank": None, "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROTARY, "qk_head_dim": NOPE + ROTARY, "v_head_dim": VALUES, "kv_b_proj": None,
    }  # fmt: skip
    return cls(**named)


def latent_step(lengths):
    """Return the metadata of decoding steps in vLLM's names, and a cache with pages in no order."""
    cache = torch.randn(BLOCKS, PAGE, RANK + ROTARY, dtype=torch.float64)
    table = (1 + torch.randperm(BLOCKS - 1)[: 4 * len(lengths)]).int().view(len(lengths), 4)
    decode = SimpleNamespace(seq_lens=torch.tensor(lengths, dtype=torch.int32), block_table=table)
    return SimpleNamespace(num_decodes=len(lengths), decode=decode), cache


def latent_exact(q, step, cache, scale=0.2):
    """Return (out, lse) of each sequence's queries over its rows of the cache, as plain products."""
    results = []
    for row, length in enumerate(step.decode.seq_lens.tolist()):
        keys = cache[step.decode.block_table[row].long()].flatten(0, 1)[:length]
        queries = q.unflatten(0, (step.num_decodes, -1))[row]
        scores = torch.einsum("qhd,kd->qhk", queries, keys) * scale
        positions = torch.arange(length) - (length - len(queries))
        scores = scores.masked_fill(positions > torch.arange(len(queries))[:, None, None], -torch.inf)
        results.append((scores.softmax(-1) @ keys[:, :RANK], scores.logsumexp(-1)))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


@pytest.mark.skipif(HAS_VLLM, reason="vLLM's own class needs a whole configuration")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("joined", [False, True])
def test_decoding_over_latent_vectors(latent, queries, joined):
    """Also of speculative decoding, with the queries in two tensors or in one, as after an all-gather."""
    step, cache = latent_step([40, 9, 64])
    q = torch.randn(3 * queries, HEADS, RANK + ROTARY, dtype=torch.float64)
    parts = q[..., :RANK].transpose(0, 1).contiguous().transpose(0, 1), q[..., RANK:]
    out, lse = latent_impl(latent).forward_mqa(q if joined else parts, cache, step, None)
    exact, exact_lse = latent_exact(q, step, cache)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM's own class needs a whole configuration")
def test_ranks_of_decode_context_parallelism_merge_by_lse(latent):
    """Two ranks with half the keys each, one of them with none of a sequence's."""
    whole, cache = latent_step([64, 32])
    q = torch.randn(2, HEADS, RANK + ROTARY, dtype=torch.float64)
    ranks = []
    for lengths, columns in (([32, 32], slice(0, 2)), ([32, 0], slice(2, 4))):
        decode = SimpleNamespace(
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=whole.decode.block_table[:, columns],
        )
        step = SimpleNamespace(num_decodes=2, decode=decode)
        ranks.append(latent_impl(latent).forward_mqa(q, cache, step, None))
    outs, lses = (torch.stack(parts) for parts in zip(*ranks, strict=True))
    assert lses[1, 1].tolist() == [-torch.inf] * HEADS
    assert not outs[1, 1].any()
    merged = (outs * lses.softmax(0)[..., None]).sum(0)
    torch.testing.assert_close(merged, latent_exact(q, whole, cache)[0])
    assert latent.LatentImpl.supports_dcp
    assert latent.LatentImpl.can_return_lse_for_decode


def prefill_of(latent):
    made = object.__new__(latent.Prefill)
    made.scale = 0.2
    lengths = torch.tensor([0, 5, 9], dtype=torch.int32)
    context = SimpleNamespace(cu_seq_lens=torch.tensor([[0, 7, 7], [0, 3, 11]]).int(), max_seq_lens=[7, 8])
    made._prefill_metadata = SimpleNamespace(
        query_start_loc=lengths, max_query_len=5, chunked_context=context
    )
    return made, torch.randn(9, HEADS, NOPE + ROTARY, dtype=torch.float64)


def dense(q, k, v, causal):
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.2
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v)
    return out, scores.logsumexp(-1)


def keys_and_values(count):
    """Return keys, and values that are a slice of a projection."""
    k = torch.randn(count, HEADS, NOPE + ROTARY, dtype=torch.float64)
    return k, torch.randn(count, HEADS, NOPE + VALUES, dtype=torch.float64)[..., NOPE:]


@pytest.mark.parametrize("return_lse", [False, True])
def test_prompts_of_latent_attention(latent, return_lse):
    made, q = prefill_of(latent)
    k, v = keys_and_values(9)
    out = made.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=return_lse)
    parts = [dense(*(t[rows] for t in (q, k, v)), True) for rows in (slice(0, 5), slice(5, 9))]
    if return_lse:
        out, lse = out
        torch.testing.assert_close(lse, torch.cat([part[1] for part in parts], -1))
    torch.testing.assert_close(out, torch.cat([part[0] for part in parts]))


@pytest.mark.parametrize("described", [False, True])
def test_contexts_of_prompts_come_in_chunks(latent, described):
    """By their number, or from 0.29 on with a description; a sequence may have no keys in a chunk."""
    made, q = prefill_of(latent)
    context = made._prefill_metadata.chunked_context
    for index, ends in enumerate(context.cu_seq_lens.tolist()):
        k, v = keys_and_values(ends[-1])
        chunk = SimpleNamespace(
            query_start_loc=made._prefill_metadata.query_start_loc, max_query_len=5,
            cu_seq_lens=context.cu_seq_lens[index], max_seq_len=context.max_seq_lens[index],
        )  # fmt: skip
        which = {"chunk": chunk} if described else {"chunk_idx": index}
        out, lse = made.run_prefill_context_chunk(q=q, k=k, v=v, **which)
        for rows, first, last in ((slice(0, 5), 0, ends[1]), (slice(5, 9), ends[1], ends[2])):
            exact = dense(q[rows], k[first:last], v[first:last], False)
            torch.testing.assert_close(out[rows], exact[0])
            torch.testing.assert_close(lse[:, rows], exact[1])


def counted_contexts(contexts, offsets):
    """Return the contexts of prompts as vLLM describes them before 0.29, in one chunk."""
    ends = torch.tensor([0, *contexts]).cumsum(0).int()
    return SimpleNamespace(
        cu_seq_lens=ends[None], max_seq_lens=[max(contexts)], seq_lens=torch.tensor([contexts]),
        prefill_tokens_with_context=int(offsets[sum(length > 0 for length in contexts)]),
    )  # fmt: skip


def prepared_by_the_builder(latent, prompts, monkeypatch):
    """Pass the metadata through the builder, as if the prompts were another backend's."""
    step = SimpleNamespace(prefill=prompts)
    monkeypatch.setattr(latent.MLACommonMetadataBuilder, "build", lambda *_: step, raising=False)
    whole = type("Whole", (latent.LatentBuilder,), dict.fromkeys(latent.LatentBuilder.__abstractmethods__))
    assert object.__new__(whole).build(0, None) is step


def prepared_by_the_prompts(latent, prompts, monkeypatch):
    """Pass the metadata to the prompts' class, as if the builder were another backend's."""
    del monkeypatch
    made, _ = prefill_of(latent)
    made.prepare_metadata(prompts)
    assert made._prefill_metadata is prompts


PREPARED = prepared_by_the_builder, prepared_by_the_prompts


@pytest.mark.parametrize("prepare", PREPARED)
@pytest.mark.parametrize("contexts", [(0, 7), (7, 0), (5, 6), (0, 1, 0, 30), (9, 0, 2), (3, 0, 0)])
def test_prompts_keep_their_contexts_in_any_order(latent, contexts, prepare, monkeypatch):
    """Model Runner V2 orders prompts by their new tokens, but vLLM merges only the contexts of the first."""
    made, _ = prefill_of(latent)
    news = range(4, 4 + len(contexts))
    offsets = torch.tensor([0, *news]).cumsum(0).int()
    context = counted_contexts(contexts, offsets)
    counted = context.prefill_tokens_with_context
    made._prefill_metadata = SimpleNamespace(
        query_start_loc=offsets, max_query_len=max(news), chunked_context=context
    )
    prepare(latent, made._prefill_metadata, monkeypatch)
    q = torch.randn(sum(news), HEADS, NOPE + ROTARY, dtype=torch.float64)
    (k, v), (old_k, old_v) = keys_and_values(sum(news)), keys_and_values(sum(contexts))
    new = made.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=True)
    old = made.run_prefill_context_chunk(q=q, k=old_k, v=old_v, chunk_idx=0)
    first, last = torch.stack((old[1], new[1])).softmax(0).transpose(1, 2).unsqueeze(-1)
    out, merged = new[0].clone(), context.prefill_tokens_with_context  # of the first rows, or of all
    out[:merged] = (first * old[0] + last * new[0])[:merged]
    before = torch.tensor([0, *contexts]).cumsum(0).tolist()
    for row, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        cached = slice(*before[row : row + 2])
        keys, values = torch.cat((old_k[cached], k[start:end])), torch.cat((old_v[cached], v[start:end]))
        padded = torch.cat((q.new_zeros(contexts[row], *q.shape[1:]), q[start:end]))
        torch.testing.assert_close(out[start:end], dense(padded, keys, values, True)[0][contexts[row] :])
    assert merged in (None, counted)  # vLLM's own number where it is right, as it spares reads
    assert (merged is None) == (list(map(bool, contexts)) != sorted(map(bool, contexts), reverse=True))


@pytest.mark.parametrize("prepare", PREPARED)
def test_steps_without_counted_contexts(latent, prepare, monkeypatch):
    """First chunks alone, and releases from 0.29 on; for the builder also steps without prompts."""
    for context in (None, SimpleNamespace(chunks=[])):
        prepare(latent, SimpleNamespace(chunked_context=context), monkeypatch)
    if prepare is prepared_by_the_builder:
        prepare(latent, None, monkeypatch)


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
def test_vllm_merges_all_contexts_if_it_has_no_number():
    """The installed vLLM takes None for all rows, or does not count contexts."""
    layer = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
    fields = inspect.signature(layer.MLACommonPrefillMetadata.ChunkedContextMetadata).parameters
    merged = inspect.signature(layer.merge_attn_states).parameters
    if "prefill_tokens_with_context" in fields:
        assert "seq_lens" in fields
        assert merged["prefill_tokens_with_context"].default is None


def test_a_quantised_result_of_prompts_is_refused(latent):
    made, q = prefill_of(latent)
    with pytest.raises(NotImplementedError, match="output_scale must be None"):
        made.run_prefill_new_tokens(q, q, q, False, output_scale=torch.ones(1))


def test_what_the_selectors_are_told_of_latent_attention(latent):
    assert latent.LatentBackend.get_name() == latent.Prefill.get_name() == "CUSTOM"
    assert "fp8" not in latent.LatentBackend.supported_kv_cache_dtypes
    given = [latent.Prefill.supports_compute_capability(c) for c in (None, (7, 5), (8, 0), (9, 0))]
    assert given == [False, False, True, True]
    orders = [latent.LatentBackend.get_kv_cache_stride_order(layers) for layers in (False, True)]
    assert orders == [(0, 1, 2), (1, 0, 2, 3)]
    assert latent.LatentBuilder._cudagraph_support.name == "UNIFORM_BATCH"
    assert latent.LatentBuilder.query_len_support.name == "UNIFORM"
    assert latent.LatentBackend.get_impl_cls() is latent.LatentImpl
    assert latent.LatentBackend.get_builder_cls() is latent.LatentBuilder


def test_latent_methods_have_the_parameters_that_vllm_passes(latent):
    """The layer passes those of prompts by name."""
    names = [name for name, _ in parameters(latent.MLACommonImpl.forward_mqa)]
    assert [name for name, _ in parameters(latent.LatentImpl.forward_mqa)] == names
    for name in ("run_prefill_new_tokens", "run_prefill_context_chunk", "prepare_metadata"):
        given = parameters(getattr(latent.MLAPrefillBackend, name))
        assert {n for n, _ in given} <= {n for n, _ in parameters(getattr(latent.Prefill, name))}
    common = latent.MLACommonMetadataBuilder.build
    assert parameters(latent.LatentBuilder.build) == parameters(common)
    assert not inspect.isabstract(latent.Prefill)
    inspect.signature(latent.MLACommonImpl.__init__).bind(*range(18))


@pytest.mark.parametrize("use_mla", [None, False, True])
def test_the_model_chooses_the_class(backend, use_mla, monkeypatch):
    """vLLM has one name for plug-ins of both kinds."""
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
    chosen = None if use_mla is None else config
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: chosen)
    module = importlib.import_module(PLUGIN)
    assert module.Backend.__module__ == f"{PLUGIN}.{'mla' if use_mla else 'backend'}"
    with pytest.raises(AttributeError, match="no attribute missing"):
        _ = module.missing


# ---- blocks that sequences share ----

DECODING = {"queries": (1,) * 6, "before": (40, 35, 48, 20, 33, 62)}
VERIFYING = {"queries": (3, 2, 3, 1, 3, 2), "before": (40, 35, 48, 20, 33, 46)}
GROUPED = {"one query each": DECODING, "several queries": VERIFYING}
RANGES = (0, 3, 2), (4, 6, 2)
"""First sequence, end, and number of equal first blocks of ranges in these steps."""


@pytest.fixture
def cascading(monkeypatch):
    """The option is on, and every common block is worth a group."""
    monkeypatch.setenv("FLASHTILE_CASCADE_ATTENTION", "1")
    monkeypatch.setattr(paged_groups, "MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr("flashtile.backends.portable.decode.groups.GroupLaunch", GroupsInPython)


def share(step, ranges=RANGES):
    """Let ranges of sequences begin with the same blocks."""
    for first, end, blocks in ranges:
        step.common.block_table_tensor[first:end, :blocks] = step.common.block_table_tensor[
            first, :blocks
        ].clone()
    return step


def builder_of(backend, *impls, max_num_seqs=8, device="cpu"):
    layers = {str(i): SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512, max_num_seqs=max_num_seqs),
        compilation_config=SimpleNamespace(static_forward_context=layers), speculative_config=None,
    )  # fmt: skip
    spec = SimpleNamespace(block_size=PAGE, num_kv_heads=HEADS_KV, head_size=HEAD_DIM)
    return backend.Builder(spec, list(layers), config, torch.device(device))


class Layer:
    """A layer with a cache, which compares each step with the reference by the error rule."""

    def __init__(self, backend, exact_options=None, dtype=torch.float64, **given):
        cache_dtype = FP8 if "kv_cache_dtype" in given else dtype
        self.options, self.heads_kv = (
            {"causal": True, **(exact_options or {})},
            given.get("num_kv_heads", HEADS_KV),
        )
        self.impl, self.dtype = make_impl(backend, **given), dtype
        self.cache, self.views = make_cache(backend, None, cache_dtype, self.heads_kv)
        if cache_dtype == FP8:
            scales = torch.ones(self.heads_kv)
            self.options |= {"k_descale": scales, "v_descale": scales}

    def check(self, step, made):
        """Compute a step with its ``made`` metadata."""
        q, k, v = step.tensors(self.dtype, self.heads_kv)
        self.impl.do_kv_cache_update(make_layer(), k, v, self.cache, step.common.slot_mapping)
        out = torch.full_like(q, torch.nan)
        self.impl.forward(make_layer(), q, k, v, self.cache, made, output=out)
        self.compare(step, q, out)

    def compare(self, step, q, out):
        exact, plain = (step.exact(q, *self.views, up, **self.options) for up in (torch.float64, None))
        comparison = testing.compare("out", out[: step.tokens], exact, plain)
        assert comparison.holds, comparison


@pytest.fixture
def pages_read(monkeypatch):
    """Counts how often the CPU backend gathers each page, of keys and of values."""
    pages, gather = Counter(), cpu_decode.tokens_of_pages

    def tokens_of_pages(cache, given, descale, memory):
        pages.update(given.tolist())
        return gather(cache, given, descale, memory)

    monkeypatch.setattr(cpu_decode, "tokens_of_pages", tokens_of_pages)
    return pages


SHARING = {name: CASES[name] for name in ("plain", "soft cap", "sinks", "one key head")}
SHARING["fp8"] = {"kv_cache_dtype": "fp8"}, {}


@pytest.mark.parametrize("case", SHARING)
@pytest.mark.parametrize("batch", GROUPED)
def test_blocks_that_sequences_share_are_read_once(backend, cascading, pages_read, batch, case):
    given, options = SHARING[case]
    layer = Layer(backend, options, **given)
    step = share(Step(backend, **GROUPED[batch], empty=2))
    made = builder_of(backend, layer.impl).build(0, step.common)
    layer.check(step, made)
    table = step.common.block_table_tensor
    shared = {int(page) for first, _, blocks in RANGES for page in table[first, :blocks]}
    assert {pages_read[page] for page in shared} == {2}  # keys, and values
    assert set(pages_read.values()) == {2}
    pages_read.clear()
    made.groups = None
    layer.check(step, made)
    assert {pages_read[page] for page in shared} == {4, 6}  # twice for each of two or three sequences


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("batch", GROUPED)
def test_groups_are_as_exact_as_sequences_by_themselves(newest, cascading, batch, dtype):
    layer = Layer(newest, dtype=dtype)
    step = share(Step(newest, **GROUPED[batch]))
    made = builder_of(newest, layer.impl).build(0, step.common)
    assert made.groups.end.tolist() == [32, 32, 32, 0, 32, 32]
    layer.check(step, made)


@pytest.mark.parametrize("case", ["window", "alibi", "all"])
def test_layers_whose_queries_see_shared_keys_differently(newest, cascading, pages_read, case):
    """They read the cache as before, also next to a layer that reads shared blocks once."""
    given, options = CASES[case]
    layer, other = Layer(newest, options, **given), make_impl(newest)
    step = share(Step(newest, **DECODING))
    assert builder_of(newest, layer.impl)._shared is None
    made = builder_of(newest, other, layer.impl).build(0, step.common)
    assert made.groups is not None
    layer.check(step, made)
    read = Counter(pages_read)
    made.groups = None
    layer.check(step, made)
    assert pages_read == read + read


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_graph_serves_all_groups(newest, cascading, device):
    """It reads the views of its capture's metadata, which each step fills before the replay."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    steps = (RANGES, 2), ((), 2), (((0, 6, 1),), 2), (((1, 3, 2), (3, 6, 1)), 2), (RANGES, 2)
    with torch.device(device), torch.inference_mode():
        layer = Layer(newest, dtype=dtype)
        builder = builder_of(newest, layer.impl, device=device)
        captured = Step(newest, (1,) * 8, (0,) * 8, padding=0)
        made = builder.build_for_cudagraph_capture(captured.common)
        q, k, v = captured.tensors(dtype)
        out, scales = torch.full_like(q, torch.nan), make_layer()

        def replay():
            layer.impl.do_kv_cache_update(scales, k, v, layer.cache, captured.common.slot_mapping)
            layer.impl.forward(scales, q, k, v, layer.cache, made, output=out)

        if device == "cuda":
            replay()  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replay()
            replay = graph.replay
        found = set()
        for ranges, empty in steps:
            step = share(Step(newest, **DECODING, padding=empty, empty=empty), ranges)
            for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
                getattr(captured.common, name).copy_(getattr(step.common, name))
            found.add(tuple(builder.build(0, step.common).groups.end.tolist()))
            for tensor, drawn in zip((q, k, v), step.tensors(dtype), strict=True):
                tensor.copy_(drawn)
            replay()
            layer.compare(step, q, out)
    assert len(found) == 4


def test_a_step_without_common_blocks(newest, cascading, pages_read):
    layer = Layer(newest)
    step = Step(newest, **DECODING)
    made = builder_of(newest, layer.impl).build(0, step.common)
    assert made.groups.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert not made.groups.end.any()
    layer.check(step, made)
    assert set(pages_read.values()) == {2}


STEPS_WITHOUT = {
    "a prompt": {"queries": (1, 40), "before": (40, 0)},
    "one sequence": {"queries": (1,), "before": (40,)},
    "not causal": {**DECODING, "causal": False},
    "more sequences than vLLM has announced": {"queries": (1,) * 9, "before": (3,) * 9},
}


@pytest.mark.parametrize("name", STEPS_WITHOUT)
def test_steps_that_never_have_groups(newest, cascading, name):
    """Only their sizes decide, so that a captured step and its replays decide alike."""
    step = share(Step(newest, **STEPS_WITHOUT[name]), ((0, 2, 2),))
    assert builder_of(newest, make_impl(newest)).build(0, step.common).groups is None


def test_without_the_option_nothing_changes(newest, monkeypatch):
    for value in (None, "0"):
        if value is not None:
            monkeypatch.setenv("FLASHTILE_CASCADE_ATTENTION", value)
        builder = builder_of(newest, make_impl(newest))
        assert builder._shared is None
        assert builder.build(0, share(Step(newest, **DECODING)).common).groups is None


def test_values_of_the_option(newest, monkeypatch):
    monkeypatch.setenv("FLASHTILE_CASCADE_ATTENTION", "yes")
    with pytest.raises(ValueError, match="FLASHTILE_CASCADE_ATTENTION must be 0 or 1, got 'yes'"):
        builder_of(newest, make_impl(newest))


def test_groups_do_not_depend_on_the_batch_only_without_them(invariant, cascading):
    with pytest.raises(ValueError, match="must be 0 with VLLM_BATCH_INVARIANT=1"):
        builder_of(invariant, make_impl(invariant))


def test_groups_of_another_block_table(newest, cascading):
    """Layers of another group have other blocks, and a builder of their own."""
    layer = Layer(newest)
    builders = [builder_of(newest, layer.impl) for _ in range(2)]
    step = share(Step(newest, **DECODING))
    first, other = builders[0].build(0, step.common), share(Step(newest, **DECODING), ((1, 5, 1),))
    second = builders[1].update_block_table(first, other.common.block_table_tensor, other.common.slot_mapping)
    assert first.groups.end.tolist() == [32, 32, 32, 0, 32, 32]
    assert second.groups.end.tolist() == [0, 16, 16, 16, 16, 0]
    layer.check(other, second)
    window = builder_of(newest, make_impl(newest, sliding_window=9))
    assert window.update_block_table(first, step.common.block_table_tensor, None).groups is None


@pytest.mark.parametrize("fault", ["one block too many", "the blocks of another sequence"])
def test_wrong_groups_are_noticed(newest, cascading, monkeypatch, fault):
    layer = Layer(newest)
    builder, step = builder_of(newest, layer.impl), share(Step(newest, **DECODING))
    made, keys = builder.build(0, step.common), None
    layer.check(step, made)
    if fault == "one block too many":
        keys = made.groups.end + PAGE
        made.groups = made.groups._replace(end=keys)
    else:
        made.groups = made.groups._replace(
            cu_seqlens_q=torch.tensor([0, 4, 4, 4, 4, 6, 6], dtype=torch.int32)
        )
    with pytest.raises(AssertionError):
        layer.check(step, made)
