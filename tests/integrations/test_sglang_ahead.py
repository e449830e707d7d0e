"""What the plug-in of SGLang compiles at the first call of a layer has every kernel of later steps."""

from __future__ import annotations

import importlib
import random
from types import SimpleNamespace

import pytest
import sglang_stand_in
import torch
from sglang_stand_in import RECORD, Pool, modules_of

from flashtile.compilation.calls import calls_of
from flashtile.integrations import paged_calls
from flashtile.op.operation import remembering
from flashtile.problems.decode import FP8
from targets import INTERPRETING

pytest.importorskip("triton")
if INTERPRETING:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from needed_kernels import lacking

NEWEST, PAGE, REQUESTS, CONTEXT, CHUNK = list(RECORD)[-1], 16, 12, 160, 96
ARGUMENTS = SimpleNamespace(chunked_prefill_size=CHUNK, max_prefill_tokens=400, enable_mixed_chunk=False)


@pytest.fixture
def backend():
    with sglang_stand_in.plugin(modules_of(NEWEST)) as module:
        yield module


@pytest.fixture
def deterministic():
    with sglang_stand_in.plugin(modules_of(NEWEST, deterministic=True)) as module:
        yield module


def sglang(module):
    return importlib.import_module(f"sglang.srt.{module}")


class Server:
    """A layer of SGLang over a pool, for batches of random sequences."""

    def __init__(self, backend, heads=8, heads_kv=2, size=64, cache_dtype=torch.bfloat16, **options):
        self.heads, self.heads_kv, self.size = heads, heads_kv, size
        recorded = sglang("mem_cache.memory_pool").MHATokenToKVPool
        pool = Pool(recorded, REQUESTS * CONTEXT, (heads_kv, size, size), PAGE, cache_dtype, False)
        for buffer in pool.buffers:
            buffer.zero_()
        table = torch.zeros(REQUESTS, CONTEXT, dtype=torch.int32)
        self.made = backend.Backend(SimpleNamespace(
            token_to_kv_pool=pool, page_size=PAGE, kv_cache_dtype=cache_dtype, kv_cache_dtype_str="auto",
            req_to_token_pool=SimpleNamespace(req_to_token=table), server_args=ARGUMENTS,
            kv_index_translator=SimpleNamespace(is_translating=False),
            model_config=SimpleNamespace(
                attention_arch=sglang("configs.model_config").AttentionArch.MHA, is_encoder_decoder=False,
                is_local_attention_model=False, context_len=CONTEXT,
            ),
        ))  # fmt: skip
        given = {
            "layer_id": 0, "tp_q_head_num": heads, "tp_k_head_num": heads_kv, "qk_head_dim": size,
            "v_head_dim": size, "scaling": size**-0.5, "logit_cap": 0.0, "sliding_window_size": -1,
            "is_cross_attention": False, "use_irope": False, "pos_encoding_mode": "NONE",
            "logit_capping_method": "tanh", "xai_temperature_len": -1, "k_scale": None, "v_scale": None,
            "attn_type": sglang("layers.radix_attention").AttentionType.DECODER, **options,
        }  # fmt: skip
        self.layer, self.draw = SimpleNamespace(**given), random.Random(0)

    def step(self, sinks=None):
        """Run a random batch."""
        draw, info = self.draw, sglang("model_executor.forward_batch_info")
        count = draw.randrange(1, REQUESTS + 1)
        queries = [draw.randrange(1, CHUNK // count + 1) for _ in range(count)]
        decodes = draw.random() < 0.4
        tokens = count if decodes else sum(queries)
        batch = info.ForwardBatch(
            forward_mode=info.ForwardMode["DECODE" if decodes else "EXTEND"], batch_size=count,
            req_pool_indices=torch.arange(count), seq_lens=torch.full((count,), CONTEXT),
            out_cache_loc=torch.arange(tokens), extend_num_tokens=None if decodes else tokens,
            extend_seq_lens=None if decodes else torch.tensor(queries).int(),
            extend_seq_lens_cpu=None if decodes else queries,
        )  # fmt: skip
        q, k, v = (
            torch.zeros(tokens, n, self.size, dtype=torch.bfloat16)
            for n in (self.heads, self.heads_kv, self.heads_kv)
        )
        self.made.init_forward_metadata(batch)
        self.made.forward_extend(q.flatten(1), k, v, self.layer, batch, sinks=sinks)
        return q.flatten(1)

    def missing(self, steps, sinks=None):
        """Return the kernels of random steps that are not listed, and the number of all."""
        with torch.no_grad(), remembering() as remembered:
            for _ in range(steps):
                q = self.step(sinks)
        return lacking(calls_of(remembered), self.made._calls(self.made.layers[0], 0, q, sinks))


MODELS = {
    "llama": {}, "wide heads": {"size": 256, "heads": 2, "heads_kv": 1},
    "window": {"sliding_window_size": 30, "logit_cap": 30.0}, "fp8": {"cache_dtype": FP8},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_no_step_needs_a_kernel_that_is_not_listed(backend, name):
    missing, count = Server(backend, **MODELS[name]).missing(40)
    assert missing == set()
    assert count > 5


def test_layers_with_sinks(backend):
    assert Server(backend).missing(30, torch.zeros(8))[0] == set()


def test_deterministic_steps(deterministic):
    assert Server(deterministic).missing(30)[0] == set()


def test_the_limits_of_a_step(backend, monkeypatch):
    made = Server(backend).made
    assert made._limits() == paged_calls.StepLimits(REQUESTS, CHUNK, min_queries=1)
    monkeypatch.setattr(ARGUMENTS, "enable_mixed_chunk", True)
    assert made._limits().max_num_batched_tokens == CHUNK + REQUESTS
    for cut in (None, -1):
        monkeypatch.setattr(ARGUMENTS, "chunked_prefill_size", cut)
        assert made._limits().max_num_batched_tokens == 400 + REQUESTS


@pytest.mark.parametrize("is_known", [True, False])
def test_layers_of_a_kind_are_compiled_once(backend, monkeypatch, caplog, is_known):
    """A server whose arguments are not known starts with a warning."""
    from flashtile.compilation import ahead

    found = []
    monkeypatch.setattr(paged_calls, "is_nvidia", lambda device: True)
    monkeypatch.setattr(ahead, "compile_and_load", lambda calls, *others: found.append(len(calls)))
    server = Server(backend)
    server.made.server_args = ARGUMENTS if is_known else None
    with torch.inference_mode():
        for number in (0, 1, 0):
            server.layer.layer_id = number
            server.step()
        server.layer.layer_id, server.layer.sliding_window_size = 2, 9
        server.step()
    assert len(found) == (2 if is_known else 0)
    assert ("kernels are compiled when requests need them" in caplog.text) != is_known
