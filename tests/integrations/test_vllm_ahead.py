"""What the plug-in of vLLM compiles at the start has every kernel of later steps."""

from __future__ import annotations

import functools
import importlib
import logging
import random
from types import SimpleNamespace

import pytest
import torch
import vllm_stand_in
from group_oracle import GroupsInPython
from vllm_stand_in import RECORD, modules_of

from flashtile.compilation.calls import Call, calls_of, resized
from flashtile.integrations import paged_calls
from flashtile.integrations.paged_calls import StepLimits, calls_in, prompt_calls, step_calls
from flashtile.op.operation import remembering
from flashtile.torch_private import FakeTensor
from targets import INTERPRETING

pytest.importorskip("triton")
if INTERPRETING:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from flashtile.backends.common.device import Target
from flashtile.backends.common.launch import CachedLaunch
from flashtile.compilation import ahead as compilation
from flashtile.compilation.compiling import Compiled, Failure, representatives
from needed_kernels import H200, keys_of, lacking, named

A100 = Target("A100", (8, 0), 108)
CPU = torch.device("cpu")
PAGE, BLOCKS, SEQS, TOKENS, LENGTH = 16, 64, 12, 96, 200
SINKS = torch.zeros(8, dtype=torch.bfloat16)
MODELS = {
    # model: (heads, heads_kv, head_size, options of the layers, guesses)
    "llama": (8, 2, 128, ({},), 0),
    "small heads": (4, 4, 64, ({},), 0),
    "guesses": (8, 2, 64, ({},), 3),
    "windows and sinks": (8, 1, 64, ({"sinks": SINKS}, {"sinks": SINKS, "sliding_window": 40}), 0),
    "wide heads, soft cap": (2, 1, 256, ({"logits_soft_cap": 30.0}, {"sliding_window": 40}), 0),
    "odd heads, alibi": (3, 3, 24, ({"alibi_slopes": [0.5, 0.25, 0.125]},), 0),
    "fp8": (8, 2, 128, ({"kv_cache_dtype": "fp8"},), 0),
    "shared": (8, 2, 128, ({"kv_sharing_target_layer_name": "other"},), 0),
    "cross attention": (4, 4, 64, ({"attn_type": "encoder_decoder"},), 0),
    "encoder": (4, 4, 64, ({"attn_type": "encoder_only"},), 0),
}


NEWEST, OLDEST = list(RECORD)[-1], next(iter(RECORD))


@pytest.fixture
def newest():
    with vllm_stand_in.plugin(modules_of(NEWEST)) as module:
        yield module


@pytest.fixture
def invariant():
    with vllm_stand_in.plugin(modules_of(NEWEST, VLLM_BATCH_INVARIANT=True)) as module:
        yield module


def config_of(guesses=0, layers=()):
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=SEQS, max_num_batched_tokens=TOKENS),
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=LENGTH),
        cache_config=SimpleNamespace(num_gpu_blocks=BLOCKS),
        compilation_config=SimpleNamespace(static_forward_context=dict(layers)),
        speculative_config=SimpleNamespace(num_speculative_tokens=guesses) if guesses else None,
    )


def ahead():
    """Return the module for the engine that stands in."""
    return importlib.import_module("flashtile.integrations.vllm.ahead")


class GroupsOfRealTensors(GroupsInPython):
    """Finds groups on the CPU; calls are listed on fake tensors, in which there are none to find."""

    def __call__(self, *tensors):
        if not isinstance(tensors[0], FakeTensor):
            super().__call__(*tensors)


class Server:
    """Layers, their builder, and a cache, for batches of random sequences."""

    def __init__(self, backend, name, device=CPU):
        self.backend, self.device = backend, device
        self.heads, self.heads_kv, self.size, options, self.guesses = MODELS[name]
        is_fp8 = "kv_cache_dtype" in options[0]
        self.spec = SimpleNamespace(
            block_size=PAGE, num_kv_heads=self.heads_kv, head_size=self.size,
            dtype=torch.uint8 if is_fp8 else torch.bfloat16,
        )  # fmt: skip
        options = [{key: t.to(device) if key == "sinks" else t for key, t in one.items()} for one in options]
        with torch.device(device):
            self.impls = [
                backend.Impl(self.heads, self.size, self.size**-0.5, self.heads_kv, **one) for one in options
            ]
        layers = {str(i): SimpleNamespace(impl=impl) for i, impl in enumerate(self.impls)}
        self.config = config_of(self.guesses, layers)
        self.names = list(layers)
        self.builder = backend.Builder(self.spec, self.names, self.config, device)
        shape = backend.releases.cache_shape(BLOCKS, PAGE, self.heads_kv, self.size)
        order = backend.releases.stride_order(False)
        memory = torch.zeros([shape[dim] for dim in order], dtype=self.spec.dtype, device=device)
        self.cache = memory.permute([order.index(dim) for dim in range(len(shape))])
        self.draw = random.Random(0)

    def listed(self):
        return ahead().calls_of_layers(self.group(), self.impls)

    def group(self):
        """Return the group that the builder has made."""
        with pytest.MonkeyPatch.context() as patch:
            made = []
            patch.setattr(self.backend, "warm_up", lambda group, layer_names: made.append(group))
            type(self.builder)(self.spec, self.names, self.config, self.device)
        return made[0]

    def lengths(self):
        """Return random (queries, earlier keys): prompts and chunks of them, decoding, guesses, mixtures."""
        draw, verified = self.draw, 1 + self.guesses
        count = draw.randrange(1, SEQS + 1)
        kind = draw.choice(("prompts", "chunks", "decoding", "verifying", "mixture"))
        if kind == "prompts" and draw.random() < 0.5:
            count = 1
        longest = TOKENS // count if draw.random() < 0.5 else draw.randrange(1, TOKENS // count + 1)
        queries = {
            "decoding": lambda i: 1,
            "verifying": lambda i: draw.randrange(1, verified + 1),
            "mixture": lambda i: longest if i == count - 1 else draw.randrange(1, verified + 1),
        }.get(kind, lambda i: draw.randrange(1, longest + 1))
        lengths = [queries(i) for i in range(count)]
        before = [0 if kind == "prompts" else draw.randrange(LENGTH - n + 1) for n in lengths]
        return lengths, before

    def step(self):
        """Run a random batch in all layers."""
        draw = self.draw
        queries, before = self.lengths()
        lengths = [a + b for a, b in zip(queries, before, strict=True)]
        tokens = sum(queries)
        rows = tokens + draw.choice((0, 0, 3)) * (tokens + 3 <= TOKENS)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        bounds = torch.tensor(lengths, dtype=torch.int32)
        columns = -(-LENGTH // 128) * 128 // PAGE
        heads = self.heads, self.heads_kv, self.heads_kv
        with torch.device(self.device):
            common = SimpleNamespace(
                query_start_loc=starts.to(self.device), query_start_loc_cpu=starts,
                seq_lens=bounds.to(self.device), seq_lens_cpu_upper_bound=bounds, num_reqs=len(queries),
                num_actual_tokens=tokens, max_query_len=max(queries), max_seq_len=max(lengths),
                block_table_tensor=torch.zeros(len(queries), columns, dtype=torch.int32),
                slot_mapping=torch.arange(rows),
                causal=self.impls[0].attn_type == "decoder",
            )  # fmt: skip
            layer = SimpleNamespace(_k_scale=torch.ones(self.heads_kv), _v_scale=torch.ones(self.heads_kv))
            tensors = torch.zeros(rows, sum(heads), self.size, dtype=torch.bfloat16).split(heads, 1)
            q, k, v = tensors if draw.random() < 0.5 else [t.contiguous() for t in tensors]
            out = torch.zeros(rows, self.heads, self.size, dtype=torch.bfloat16)
        step = self.builder.build(0, common)
        for impl in self.impls:
            impl.do_kv_cache_update(layer, k, v, self.cache, common.slot_mapping)
            impl.forward(layer, q, k, v, self.cache, step, out)

    def missing(self, steps):
        """Return the kernels of random steps that are not listed, and the number of all."""
        with torch.no_grad(), remembering() as remembered:
            for _ in range(steps):
                self.step()
        return lacking(calls_of(remembered), self.listed())


RESEMBLE = ("small heads", "wide heads, soft cap", "shared", "cross attention")
"""Models whose layers differ little from those of another."""


def thorough(names, marked):
    """Return ``names``, of which ``marked`` run with ``make test-thorough``."""
    return [pytest.param(name, marks=pytest.mark.thorough) if name in marked else name for name in names]


@pytest.mark.parametrize("name", thorough(MODELS, RESEMBLE))
def test_no_step_needs_a_kernel_that_is_not_listed(newest, name):
    missing, count = Server(newest, name).missing(60)
    assert missing == set()
    assert count > (1 if name == "encoder" else 5)


@pytest.mark.parametrize("name", thorough(["llama", "odd heads, alibi"], ["odd heads, alibi"]))
def test_caches_of_the_oldest_release(name):
    with vllm_stand_in.plugin(modules_of(OLDEST)) as backend:
        assert Server(backend, name).missing(30)[0] == set()


def test_builders_that_vllm_derives(newest):
    """Their method reads fields of a batch that the listed steps do not have."""

    class Derived(newest.Builder):
        def build(self, *given):
            raise AttributeError("encoder_seq_lens")

    server = Server(newest, "cross attention")
    listed = server.listed()
    server.builder = Derived(server.spec, [], server.config, CPU)
    assert server.listed() == listed


def test_the_kernels_of_batch_invariant_steps(invariant):
    assert Server(invariant, "llama").missing(30)[0] == set()


@pytest.mark.parametrize("name", thorough(["llama", "guesses", "windows and sinks", "fp8"], ["fp8"]))
def test_the_kernels_of_steps_with_groups(newest, name, monkeypatch):
    monkeypatch.setenv("FLASHTILE_CASCADE_ATTENTION", "1")
    server = Server(newest, name)
    with monkeypatch.context() as patched:
        patched.setattr("flashtile.backends.portable.decode.groups.GroupLaunch", GroupsOfRealTensors)
        listed = server.listed()
        plain = ahead().calls_of_layers(server.group()._replace(groups=False), server.impls)
        with torch.no_grad(), remembering() as remembered:
            for _ in range(60):
                server.step()
    calls = calls_of(remembered)
    assert any(dict(call.arguments).get("partial") for call in calls)
    assert lacking(calls, listed)[0] == set()
    assert lacking(calls, plain)[0] != set()
    finding = next(call for call in listed if not isinstance(call, Call))
    assert {launch.kernel.__name__ for launch, _ in finding()} == {"common_kernel", "group_kernel"}


LARGE = {
    "llama": ((32, 8, 128, {}), StepLimits(256, 8192)),
    "qwen": ((28, 4, 128, {}), StepLimits(128, 4096, verified=5)),
    "gpt-oss": ((64, 8, 64, {"sliding_window": 128}), StepLimits(512, 2048)),
}
"""(heads, heads_kv, head_size, options of the layer), limits of the server."""


LARGE_ON = [(name, gpu) for name in LARGE for gpu in (H200, A100)]
TELLING = ("gpt-oss", H200), ("llama", A100)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [pytest.param(*one, marks=() if one in TELLING else pytest.mark.thorough) for one in LARGE_ON],
    ids=[f"{name}-{gpu.name}" for name, gpu in LARGE_ON],
)
def test_random_sizes_of_large_servers(newest, name, gpu):
    """Numbers of sequences and tokens, without the steps themselves."""
    (heads, heads_kv, size, options), limits = LARGE[name]
    impl = newest.Impl(heads, size, size**-0.5, heads_kv, **options)
    run = functools.partial(ahead()._run, Server(newest, "llama").group(), impl, 512, False)
    ones, chunks, new, prompt = (
        calls_in(functools.partial(run, *sizes))
        for sizes in ((2, 2, 1), (2, 4, 2), (2, 4, 2, True), (1, 2, 2, True))
    )
    listed = [*step_calls(ones, [*chunks, *new], limits), *prompt_calls(prompt, limits)]
    draw, most = random.Random(1), limits.max_num_batched_tokens
    used = set()  # many draws are of equal sizes
    for _ in range(400):
        batch = max(1, int(limits.max_num_seqs ** draw.random()))
        longest = max(2, int((most - batch + 1) ** draw.random()))
        tokens = draw.randrange(batch - 1 + longest, min(batch * longest, most) + 1)
        rounded = 1 << (longest - 1).bit_length()
        used.update(resized(call, batch, tokens, rounded) for call in (*chunks, *new))
        used.update(prompt_calls(prompt, StepLimits(1, longest))[-1:])
        used.update(resized(call, batch, batch, 1) for call in ones)
    missing, count = lacking(used, listed, gpu)
    assert missing == set()
    assert count > 30


def test_representatives_have_the_kernels_of_all_calls(newest):
    listed = Server(newest, "small heads").listed()
    few = representatives(listed, H200)
    assert len(few) < len(listed) / 4
    assert named(few) == named(listed)


@pytest.fixture
def compiled(monkeypatch, newest):
    """Calls that were compiled, and those that were loaded, on a machine that seems to have a GPU."""
    compiled, loaded = [], []
    monkeypatch.setattr(paged_calls, "is_nvidia", lambda device: True)
    monkeypatch.setattr(compilation, "target_of", lambda device: H200)
    monkeypatch.setattr(CachedLaunch, "load", lambda launch, given: loaded.append(launch.kernel_key(given)))

    def compile_in_process(calls, target, workers):
        compiled.extend(calls)
        return Compiled(len(calls), (Failure(compiled[0], target.name, "a reason"),))

    monkeypatch.setattr(compilation, "compile_in_process", compile_in_process)
    return compiled, loaded


def test_the_builder_compiles_and_loads(newest, compiled, caplog):
    with caplog.at_level(logging.INFO, "flashtile.vllm"):
        server = Server(newest, "llama")
    calls, loaded = compiled
    assert set(calls) <= set(server.listed())
    assert set(loaded) == keys_of(calls[1:], H200)
    assert "a kernel of the engine was not compiled ahead: a reason" in caplog.text
    assert f"{len(calls)} kernels compiled in" in caplog.text


def test_users_may_do_without_the_warm_up(newest, compiled, monkeypatch):
    monkeypatch.setenv(paged_calls.WARMUP, "0")
    Server(newest, "llama")
    assert compiled == ([], [])


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), KeyError("a layer")])
def test_a_server_starts_without_its_warm_up(newest, compiled, monkeypatch, caplog, error):
    def fail(*given):
        raise error

    monkeypatch.setattr(compilation, "compile_in_process", fail)
    Server(newest, "llama")
    assert "kernels are compiled when requests need them" in caplog.text
    assert str(error) in caplog.text
    assert compiled[1] == []


def test_a_long_cache_needs_its_own_offsets(newest):
    """Numbers of blocks change kernels only where offsets exceed 32 bits."""
    server = Server(newest, "small heads")
    listed = {}
    for blocks in (None, 64, 1000, 2**20):
        server.config.cache_config.num_gpu_blocks = blocks
        listed[blocks] = server.listed()
    assert listed[None] == listed[64] == listed[1000]
    assert keys_of(listed[2**20], A100) != keys_of(listed[64], A100)


def test_chunks_of_chunked_local_layers_are_sequences(newest):
    spec = SimpleNamespace(block_size=PAGE, attention_chunk_size=32)
    group = Server(newest, "llama").group()._replace(spec=spec)
    assert ahead().limits_of(group).max_num_seqs == 2 * SEQS + TOKENS // 32
    assert ahead()._tables(group) == [2, 8]


@pytest.mark.gpu
@pytest.mark.parametrize("cascades", ["0", "1"])
@pytest.mark.parametrize("name", ["llama", "windows and sinks", "fp8", "guesses"])
def test_no_step_compiles_on_a_gpu(newest, name, cascades, monkeypatch):
    """The hook is that of vLLM's monitor, which Triton also calls for kernels from its disk cache."""
    from triton import knobs

    monkeypatch.setenv("FLASHTILE_CASCADE_ATTENTION", cascades)
    server = Server(newest, name, torch.device("cuda", torch.cuda.current_device()))
    seen = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **given: seen.append(given["fn"].name))
    with torch.inference_mode():
        for _ in range(200):
            server.step()
    torch.cuda.synchronize()
    assert seen == []
