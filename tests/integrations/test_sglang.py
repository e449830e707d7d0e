"""The backend of SGLang on its recorded interface, with shuffled pages and stale entries in tables."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import SimpleNamespace

import addressed
import pytest
import sglang_stand_in
import torch
from sglang_stand_in import PLUGIN, RECORD, Pool, modules_of, window_pool

from flashtile import testing
from flashtile.integrations.sglang import register
from flashtile.problems.decode import FP8
from flashtile.reference.decode import attention_with_kvcache

pytestmark = pytest.mark.numerical

HEADS, HEADS_KV, HEAD_DIM, CONTEXT = 4, 2, 16, 64
NEWEST = list(RECORD)[-1]
QUERIES, BEFORE = (1, 5, 17, 1, 3), (40, 0, 30, 7, 1)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


@pytest.fixture(params=RECORD)
def backend(request):
    """The backend's module."""
    with sglang_stand_in.plugin(modules_of(request.param)) as module:
        yield module


@pytest.fixture
def newest():
    with sglang_stand_in.plugin(modules_of(NEWEST)) as module:
        yield module


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def sglang(module):
    return importlib.import_module(f"sglang.srt.{module}")


def make_layer(layer_id=0, heads_kv=HEADS_KV, dims=(HEAD_DIM, HEAD_DIM), **options):
    layer = sglang("layers.radix_attention").RadixAttention()
    given = {
        "layer_id": layer_id, "tp_q_head_num": HEADS, "tp_k_head_num": heads_kv, "qk_head_dim": dims[0],
        "v_head_dim": dims[1], "scaling": dims[0] ** -0.5, "logit_cap": 0.0, "sliding_window_size": -1,
        "is_cross_attention": False, "use_irope": False, "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh", "xai_temperature_len": -1, "k_scale": None, "v_scale": None,
        "attn_type": sglang("layers.radix_attention").AttentionType.DECODER, **options,
    }  # fmt: skip
    for name, value in given.items():
        assert hasattr(layer, name), name
        setattr(layer, name, value)
    return layer


class Server:
    """SGLang's runner with sequences of ``before`` cached tokens, whose pages are in no order."""

    def __init__(self, backend, page=16, before=BEFORE, dtype=torch.float32, cache_dtype=None, hnd=False,
                 heads_kv=HEADS_KV, dims=(HEAD_DIM, HEAD_DIM), windows=False):  # fmt: skip
        self.dtype, self.page, self.heads_kv, self.dims = dtype, page, heads_kv, dims
        self.cache_dtype = cache_dtype or dtype
        pages = len(before) * CONTEXT // page + 1
        pools = sglang("mem_cache.memory_pool").MHATokenToKVPool
        make = (pages * page, (heads_kv, *dims), page, self.cache_dtype, hnd)
        self.pool = self.full = Pool(pools, *make)
        self.mapping = None
        if windows:
            order = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(pages - 1) + 1])
            self.mapping = (order[:, None] * page + torch.arange(page)).flatten()
            self.full, self.window = Pool(pools, *make), Pool(pools, *make)
            recorded = sglang("mem_cache.swa_memory_pool").SWAKVPool
            self.pool = window_pool(recorded, self.full, self.window, self.mapping)
        self.rows = torch.randperm(len(before) + 2)[: len(before)]
        owned = (torch.randperm(pages - 1) + 1).view(len(before), -1)
        self.slots = (owned[:, :, None] * page + torch.arange(page)).flatten(1)  # (sequences, CONTEXT)
        # Stale rows name slots that are written: those of earlier steps, and slot 0, which padding writes.
        written = [slots[:length].int() for slots, length in zip(self.slots, before, strict=True)]
        written = torch.cat([torch.zeros(1, dtype=torch.int32), *written])
        self.table = written[torch.randint(len(written), (len(before) + 2, CONTEXT))]
        self.lengths = [0] * len(before)
        self.layers = make_layer(0, heads_kv, dims), make_layer(1, heads_kv, dims)
        self.extend_tables(before)
        for layer_id in range(1 + windows):  # what was written in earlier steps
            for slots, length in zip(self.slots, before, strict=True):
                k, v = self.draw(length, heads_kv, dims[0]), self.draw(length, heads_kv, dims[1])
                given = {"cache_k": k, "cache_v": v, "k_scale": None, "v_scale": None}
                where = slots[:length] if layer_id == 0 else self.mapping[slots[:length]]
                (self.window if layer_id else self.full).write(where, given)
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool, page_size=page, kv_cache_dtype=self.cache_dtype,
            kv_cache_dtype_str="auto", req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            kv_index_translator=SimpleNamespace(is_translating=False),
            model_config=SimpleNamespace(
                attention_arch=sglang("configs.model_config").AttentionArch.MHA, is_encoder_decoder=False,
                is_local_attention_model=False,
            ),
        )  # fmt: skip

    def draw(self, *shape):
        return torch.randn(*shape).to(self.dtype)

    def extend_tables(self, counts):
        """Give each sequence slots for ``counts`` more tokens, and return these slots."""
        new = []
        for number, count in enumerate(counts):
            old = self.lengths[number]
            self.lengths[number] = old + count
            self.table[self.rows[number], : old + count] = self.slots[number, : old + count].int()
            new.append(self.slots[number, old : old + count])
        return torch.cat(new)

    def batch(self, queries, mode="EXTEND", padding=0):
        slots = self.extend_tables(queries)
        info = sglang("model_executor.forward_batch_info")
        extend = mode != "DECODE"
        return info.ForwardBatch(
            forward_mode=info.ForwardMode[mode],
            batch_size=len(queries) + padding,
            req_pool_indices=torch.cat([self.rows, torch.zeros(padding, dtype=torch.int64)]),
            seq_lens=torch.tensor(self.lengths + [1] * padding),
            out_cache_loc=torch.cat([slots, torch.zeros(padding, dtype=torch.int64)]),
            extend_num_tokens=sum(queries) if extend else None,
            extend_seq_lens=torch.tensor(queries, dtype=torch.int32) if extend else None,
            extend_seq_lens_cpu=list(queries) if extend else None,
        )

    def tensors(self, rows):
        sizes = (HEADS, self.dims[0]), (self.heads_kv, self.dims[0]), (self.heads_kv, self.dims[1])
        q, k, v = (self.draw(rows, *size) for size in sizes)
        return q.flatten(1), k, v

    def exact(self, layer, q, queries, upcast, **options):
        """Compute each sequence by itself over its keys in order."""
        out, layer_id = [], layer.layer_id
        for number, rows in enumerate(q.unflatten(1, (HEADS, -1))[: sum(queries)].split(queries)):
            slots = self.slots[number, : self.lengths[number]]
            pool = self.full if layer_id == 0 else self.window
            keys, values = (
                pool.rows(i, slots if layer_id == 0 else self.mapping[slots])[None] for i in (0, 1)
            )
            if rows.shape[0]:
                given = {"causal": True, "softmax_scale": layer.scaling, **options}
                out.append(attention_with_kvcache(rows[None], keys, values, upcast=upcast, **given)[0][0])
        return torch.cat(out).flatten(1)

    def assert_exact(self, made, layer, queries, mode="EXTEND", exact=None, sinks=None, padding=0):
        """Run a step and compare it with the reference by the error rule; new keys must be in the pool."""
        batch = self.batch(queries, mode)
        q, k, v = self.tensors(sum(queries) + padding)
        batch._attn_output = torch.full((q.shape[0], HEADS * self.dims[1]), torch.nan, dtype=self.dtype)
        made.init_forward_metadata(batch)
        call = made.forward_decode if mode == "DECODE" else made.forward_extend
        real = slice(0, sum(queries))
        out = call(q, k[real], v[real], layer, batch, **({} if sinks is None else {"sinks": sinks}))
        assert out is batch._attn_output
        self.check(layer, q, out, queries, exact, sinks)
        return out

    def check(self, layer, q, out, queries, exact=None, sinks=None):
        options = dict(exact or {})
        if sinks is not None:
            options["sink"] = sinks
        results = [self.exact(layer, q, queries, upcast, **options) for upcast in (torch.float64, None)]
        comparison = testing.compare("out", out[: sum(queries)], *results)
        assert comparison.holds, comparison


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("hnd", [False, True])
def test_extend_then_decode(backend, page, hnd):
    server = Server(backend, page, hnd=hnd)
    made = backend.Backend(server.runner)
    server.assert_exact(made, server.layers[0], QUERIES, "MIXED", padding=3)
    server.assert_exact(made, server.layers[0], (1,) * 5, "DECODE")


CASES = {
    "window": ({"sliding_window_size": 8}, {"window_size": (8, 0)}),
    "soft cap": ({"logit_cap": 2.0}, {"softcap": 2.0}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers(newest, name, dtype):
    given, exact = CASES[name]
    server = Server(newest, dtype=dtype)
    made, layer = newest.Backend(server.runner), make_layer(**given)
    server.assert_exact(made, layer, QUERIES, exact=exact)
    server.assert_exact(made, layer, (1,) * 5, "DECODE", exact=exact)


@pytest.mark.parametrize("dtypes", [(torch.float32, None), (torch.float32, FP8)], ids=str)
@pytest.mark.parametrize("hnd", [False, True])
def test_layers_share_launches(newest, hnd, dtypes):
    """The first layer with a signature takes the general path. Others launch by address."""
    with addressed.launches() as launched:
        for page in (16, 4):  # of equal buffers
            server = Server(newest, page, dtype=dtypes[0], cache_dtype=dtypes[1], hnd=hnd)
            made = newest.Backend(server.runner)
            for queries, mode in ((QUERIES, "MIXED"), ((1,) * 5, "DECODE"), ((1,) * 5, "DECODE")):
                server.assert_exact(made, server.layers[0], queries, mode)
            assert launched == ["decode"] * (1 if page == 16 else 2)


def test_sinks_of_the_models_dtype(newest):
    server = Server(newest, dtype=torch.bfloat16)
    made = newest.Backend(server.runner)
    for queries, mode in ((QUERIES, "EXTEND"), ((1,) * 5, "DECODE")):
        server.assert_exact(made, server.layers[0], queries, mode, sinks=SINKS.bfloat16())


@pytest.mark.parametrize("shape", [(1, (16, 16)), (4, (24, 8))], ids=str)
def test_heads(newest, shape):
    server = Server(newest, heads_kv=shape[0], dims=shape[1])
    made = newest.Backend(server.runner)
    server.assert_exact(made, server.layers[0], QUERIES)
    server.assert_exact(made, server.layers[0], (1,) * 5, "DECODE")


@pytest.mark.parametrize("kind", ["ENCODER_ONLY", "DECODER_BIDIRECTIONAL"])
@pytest.mark.parametrize("window", [-1, 3])
def test_layers_without_causal_mask(newest, kind, window):
    server = Server(newest, before=(0, 0, 0))
    kinds = sglang("layers.radix_attention").AttentionType
    layer = make_layer(attn_type=kinds[kind], sliding_window_size=window)
    exact = {"causal": False, "window_size": (window, window)}
    server.assert_exact(newest.Backend(server.runner), layer, (3, 9, 6), exact=exact)


@pytest.mark.parametrize("scales", [None, (torch.tensor(0.5), torch.tensor([2.0]))], ids=["none", "given"])
def test_fp8_caches(newest, scales):
    server = Server(newest, cache_dtype=FP8)
    k_scale, v_scale = scales or (None, None)
    layer = make_layer(k_scale=k_scale, v_scale=v_scale)
    exact = {}
    if scales is not None:
        exact["k_descale"], exact["v_descale"] = (scale.expand(HEADS_KV).contiguous() for scale in scales)
    made = newest.Backend(server.runner)
    server.assert_exact(made, layer, QUERIES, exact=exact)
    server.assert_exact(made, layer, (1,) * 5, "DECODE", exact=exact)
    batch = server.batch((1,) * 5, "DECODE")
    q, k, v = server.tensors(5)
    made.init_forward_metadata(batch)
    made.forward_decode(q, k, v, layer, batch)
    for number, (new, scale) in enumerate(((k, k_scale), (v, v_scale))):
        stored = server.full.rows(number, batch.out_cache_loc).float() * (1.0 if scale is None else scale)
        assert (stored - new).abs().max() <= new.abs().max() / 16


@pytest.mark.parametrize("page", [1, 16])
def test_windows_in_a_pool_of_their_own(newest, page):
    """Pages that the window has left are given away: their entry is -1."""
    server = Server(newest, page, before=(40, 0, 30), windows=True)
    server.assert_exact(newest.Backend(server.runner), server.layers[0], (5, 17, 1))
    server = Server(newest, page, before=(40, 0, 30), windows=True)
    made, window = newest.Backend(server.runner), make_layer(1, sliding_window_size=8)
    server.assert_exact(made, window, (2, 1, 9), exact={"window_size": (8, 0)})
    kept = server.mapping.clone()
    for slots, length in zip(server.slots, server.lengths, strict=True):
        gone = slots[: max(length - 8, 0) // page * page]
        for number in (0, 1):
            server.window.buffers[number][server.mapping[gone]] = torch.nan
        server.mapping[gone] = -1
    batch = server.batch((1, 1, 1), "DECODE")
    q, k, v = server.tensors(3)
    made.init_forward_metadata(batch)
    out = made.forward_decode(q, k, v, window, batch)
    server.mapping.copy_(kept)
    for number in range(3):  # the reference sees the keys of the window only
        slots = server.slots[number, : server.lengths[number]][-9:]
        keys, values = (server.window.rows(i, server.mapping[slots])[None] for i in (0, 1))
        exact = attention_with_kvcache(
            q[None, number : number + 1].unflatten(2, (HEADS, -1)), keys, values, softmax_scale=window.scaling
        )
        torch.testing.assert_close(out[number], exact[0].flatten())


def capture(made, call):
    """Return a call's result and a function that replays it: a CUDA graph; on the CPU, the same call again.

    A replay sees the buffers of its capture, and not the metadata of its own step.
    """
    out, metadata = call(), made.forward_metadata
    if out.is_cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        return out, graph.replay

    def replay():
        made.forward_metadata = metadata
        out.copy_(call())

    return out, replay


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_graphs(newest, page, windows, device):
    """A graph is captured with one key per request, and replayed with others from the same addresses."""
    with torch.device(device), torch.inference_mode():  # as SGLang runs, so later calls launch by address
        server = Server(newest, page, dtype=torch.bfloat16, dims=(64, 64), windows=windows)
        made = newest.Backend(server.runner)
        layer, exact = server.layers[0], None
        if windows:
            layer, exact = make_layer(1, dims=(64, 64), sliding_window_size=8), {"window_size": (8, 0)}
        made.init_cuda_graph_state(8, 8)
        info, zeros = sglang("model_executor.forward_batch_info"), torch.zeros(7, dtype=torch.int64)
        batch = info.ForwardBatch(
            forward_mode=info.ForwardMode.DECODE, batch_size=7, req_pool_indices=zeros, seq_lens=zeros + 1,
            out_cache_loc=zeros.clone(),
        )  # fmt: skip
        made.init_forward_metadata_out_graph(batch, in_capture=True)
        assert made.get_cuda_graph_seq_len_fill_value() == 1
        static = server.tensors(7)
        out, replay = capture(made, lambda: made.forward_decode(*static, layer, batch))
        for _ in range(2):
            step = server.batch((1,) * 5, "DECODE", padding=2)
            for buffer, new in zip(
                (batch.out_cache_loc, *static), (step.out_cache_loc, *server.tensors(7)), strict=True
            ):
                buffer.copy_(new)
            made.init_forward_metadata_out_graph(step)
            out.fill_(torch.nan)
            replay()
            assert out.isfinite().all()
            server.check(layer, static[0], out, (1,) * 5, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [False, True])
def test_steps_do_not_wait_for_the_gpu(newest, windows):
    for queries, mode in ((QUERIES, "MIXED"), ((1,) * 5, "DECODE")):
        with torch.device("cuda"), torch.inference_mode():
            server = Server(newest, dtype=torch.bfloat16, dims=(64, 64), windows=windows)
            made, layer = newest.Backend(server.runner), server.layers[0]
            server.assert_exact(made, layer, queries, mode)  # compiles
            batch, new = server.batch(queries, mode), server.tensors(sum(queries))
            torch.cuda.set_sync_debug_mode("error")
            try:
                made.init_forward_metadata(batch)
                made.forward_extend(*new, layer, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_steps_share_launches_and_do_not_synchronise(newest):
    """Lengths and tables are tensors; numbers come from the host's copy of the counts."""
    server = Server(newest)
    made = newest.Backend(server.runner)
    most = []
    for queries in ((3, 5, 17, 1, 3), (3, 5, 20, 1, 3)):
        made.init_forward_metadata(server.batch(queries))
        most.append(made.forward_metadata.step.max_query_len)
    assert most == [32, 32]
    assert not made.forward_metadata.step.is_one_query_each
    made.init_forward_metadata(server.batch((1,) * 5, "DECODE"))
    assert made.forward_metadata.step.is_one_query_each
    assert not made.needs_cpu_seq_lens
    assert made.token_to_kv_pool is server.pool
    assert made.req_to_token_pool is server.runner.req_to_token_pool
    batch = server.batch((2, 1, 1, 1, 1))
    batch.extend_seq_lens_cpu = None  # an upper bound is enough
    made.init_forward_metadata(batch)
    assert made.forward_metadata.step.max_query_len == 8
    server.lengths = [0] * 5
    idle = server.batch((0,) * 5, "IDLE")
    idle.seq_lens, idle.req_pool_indices = idle.seq_lens[:0], idle.req_pool_indices[:0]
    made.init_forward_metadata(idle)


def test_deterministic_inference():
    """A sequence gives the same bits alone and among others."""
    with sglang_stand_in.plugin(modules_of(NEWEST, deterministic=True)) as backend:
        server = Server(backend)
        made, layer = backend.Backend(server.runner), server.layers[0]
        batch = server.batch((1,) * 5, "DECODE")
        q, k, v = server.tensors(5)
        made.init_forward_metadata(batch)
        assert made.forward_metadata.step.max_query_len == 128
        together = made.forward_decode(q, k, v, layer, batch)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            setattr(batch, name, getattr(batch, name)[2:3])
        made.init_forward_metadata(batch)
        alone = made.forward_decode(q[2:3], None, None, layer, batch)
        assert torch.equal(alone, together[2:3])
        assert made.layers[0].attention.options.num_splits == 1


RUNNERS = {
    "attention_arch": lambda runner: setattr(
        runner.model_config, "attention_arch", sglang("configs.model_config").AttentionArch.MLA
    ),
    "is_encoder_decoder": lambda runner: setattr(runner.model_config, "is_encoder_decoder", True),
    "is_local_attention_model": lambda runner: setattr(runner.model_config, "is_local_attention_model", True),
    "attn_cp_size": lambda runner: setattr(sglang("runtime_context").state.parallel, "attn_cp_size", 2),
    "attn_dcp_size": lambda runner: setattr(sglang("runtime_context").state.parallel, "attn_dcp_size", 2),
    "speculative_algorithm": lambda runner: setattr(
        sglang("runtime_context").state.spec, "speculative_algorithm", "EAGLE"
    ),
    "enable_unified_memory": lambda runner: setattr(runner.kv_index_translator, "is_translating", True),
    "kv_cache_dtype": lambda runner: setattr(runner, "kv_cache_dtype", torch.float8_e5m2),
    "kv_cache_dtype .*mxfp8": lambda runner: setattr(runner, "kv_cache_dtype_str", "mxfp8"),
}


@pytest.mark.parametrize("name", RUNNERS)
def test_servers_that_are_refused(newest, name):
    runner = Server(newest).runner
    RUNNERS[name](runner)
    expected = name if " " in name else f"{name} must be"
    with pytest.raises(NotImplementedError, match=expected):
        newest.Backend(runner)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_cross_attention", True),
        ("use_irope", True),
        ("pos_encoding_mode", "ALIBI"),
        ("xai_temperature_len", 8),
    ],
)
def test_layers_that_are_refused(newest, name, value):
    server = Server(newest)
    made = newest.Backend(server.runner)
    batch = server.batch(QUERIES)
    made.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match=f"layer 0: {name} must be"):
        made.forward_extend(*server.tensors(27), make_layer(**{name: value}), batch)
    wide = make_layer(dims=(513, 16))
    with pytest.raises(NotImplementedError, match="head_dim must be at most 512, got 513"):
        made.forward_decode(torch.empty(1, HEADS * 513), None, None, wide, batch)


def test_calls_that_are_refused(newest):
    server = Server(newest)
    made = newest.Backend(server.runner)
    batch = server.batch(QUERIES)
    made.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="score_mod must be None"):
        made.forward_extend(*server.tensors(27), server.layers[0], batch, score_mod=len, return_lse=False)
    made.init_cuda_graph_state(8, 8)
    with pytest.raises(NotImplementedError, match="must decode, got EXTEND: set --cuda-graph"):
        made.init_forward_metadata_out_graph(batch)
    verify = server.batch(QUERIES, "TARGET_VERIFY")
    with pytest.raises(NotImplementedError, match="must decode or extend, got TARGET_VERIFY"):
        made.init_forward_metadata(verify)


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_methods_have_the_parameters_that_sglang_passes(backend):
    """In their order and with their defaults; a method that SGLang renames is noticed."""
    base = sglang("layers.attention.base_attn_backend").AttentionBackend
    for name, method in vars(backend.Backend).items():
        if name.startswith("_") or not callable(method):
            continue
        assert hasattr(base, name), name
        given = [p for p in parameters(getattr(base, name)) if p[1] is not inspect.Parameter.VAR_KEYWORD]
        assert parameters(method)[: len(given)] == given, name
    for name in ("needs_cpu_seq_lens", "forward_metadata", "kv_cache_dtype"):
        assert hasattr(base, name)


def test_sglang_is_told_the_name():
    with sglang_stand_in.plugin(modules_of(NEWEST)) as backend:
        register()
        register()
        registered = sglang("layers.attention.attention_registry").registered
        assert list(registered) == ["flashtile"]
        choices = sglang("arg_groups.choices")
        for name in sglang_stand_in.FILES["sglang.srt.arg_groups.choices"]:
            assert getattr(choices, name).count("flashtile") == 1
        assert type(registered["flashtile"](Server(backend).runner)) is backend.Backend


@pytest.mark.parametrize(
    ("version", "served"), [("0.5.22", False), ("0.5.23", True), ("0.6.0rc1", True), ("0.0.0.dev0", True)]
)
def test_old_releases_are_refused(version, served):
    modules = modules_of(NEWEST)
    modules["sglang.version"].__version__ = version
    with sglang_stand_in.plugin(modules):
        if served:
            register()
        else:
            with pytest.raises(NotImplementedError, match=r"sglang must be 0\.5\.23 or newer, got 0\.5\.22"):
                register()


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="sglang is installed")
def test_without_sglang():
    assert register.__module__ == PLUGIN
    with pytest.raises(ModuleNotFoundError, match="needs sglang"):
        register()
