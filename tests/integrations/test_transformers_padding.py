"""Padding on any side in Transformers' models: read once, and hidden as in eager attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.17")

from hugging_face import MASK, NAMES, SMALL, TOKENS, pair, registered  # noqa: E402, F401 - a fixture

from flashtile.integrations import transformers_masks as masks  # noqa: E402
from walk import walk  # noqa: E402

pytestmark = pytest.mark.numerical

PADDED = {
    "left": MASK,
    "right": MASK.flip(1),
    "both": torch.tensor([[0] * 4 + [1] * 6 + [0] * 2, [1] * 12, [0] * 7 + [1] * 2 + [0] * 3]),
    "holes": torch.tensor([[1, 0, 1] * 4, [1] * 12, [0, 1] * 6]),
    "a sequence of padding": torch.cat((MASK[:2], torch.zeros_like(MASK[:1]))),
}


def llamas(**changed) -> tuple:
    return pair("LlamaForCausalLM", transformers.LlamaConfig(**{**SMALL, **changed}))


class HostReads(TorchDispatchMode):
    """Counts what waits for a GPU, if the tensors are there."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += function.overloadpacket.__name__ in self.WAITING
        return function(*arguments, **named or {})


def test_every_layer_uses_what_the_first_one_read():
    """Of masks of padding on either side, of positions that may restart, and in a step of decoding."""
    counts = []
    for layers in (1, 4):
        _, model = llamas(num_hidden_layers=layers)
        found = []
        with torch.no_grad():
            restarts = torch.cat([torch.arange(5), torch.arange(7)])[None]
            for named in (
                {"attention_mask": MASK}, {"attention_mask": MASK.flip(1)}, {"input_ids": TOKENS[:1]},
                {"input_ids": TOKENS[:1], "position_ids": restarts},
            ):  # fmt: skip
                with HostReads() as reads:
                    model(**{"input_ids": TOKENS, **named})
                found.append(reads.count)
            cache = model(TOKENS[:, :-1], attention_mask=MASK[:, :-1]).past_key_values
            with HostReads() as reads:
                model(TOKENS[:, -1:], attention_mask=MASK, past_key_values=cache)
            found.append(reads.count)
        counts.append(found)
    assert counts[0] == counts[1]
    assert min(counts[0][:2]) > 0  # they are counted


def test_what_was_read_holds_for_each_layer_once_in_a_pass():
    """Not for one that asks again, nor for another model or pass: writes may be counted by no version."""
    layers, other = [torch.nn.Identity() for _ in range(4)], torch.nn.Identity()
    for layer in layers:
        layer.config = layers[0]
    mask = torch.ones(2, 5, dtype=torch.bool)
    found = masks.padding_of(mask, layers[0])
    assert masks.padding_of(mask, layers[1]) is found
    assert found.whole
    assert all(value is not mask for value in vars(found).values())  # it would never go
    mask.data[0, :2] = False
    assert masks.padding_of(mask, layers[1]).on_left
    assert masks.padding_of(mask, layers[0]).starts.tolist() == [2, 0]
    mask.data[:] = True
    assert masks.padding_of(mask, other).whole
    mask[1, 4] = False
    assert masks.padding_of(mask, layers[2]).on_right
    mask.data[:] = True
    both_ways = {"mask_function": None, "allow_is_bidirectional_skip": True}
    masks.mask_of_keys(lambda **named: None)(kv_length=5, **both_ways)
    assert masks.padding_of(mask, layers[3]).whole


def test_the_mask_of_a_pass_is_no_memory_of_the_caller():
    given = torch.ones(2, 5, dtype=torch.bool)
    given[0, 0] = False
    causal = {"mask_function": None, "allow_is_causal_skip": True}
    made = masks.mask_of_keys(lambda **named: None)(kv_length=5, attention_mask=given, **causal)
    given.data[:] = True
    assert masks.padding_of(made, torch.nn.Identity()).on_left
    assert not made[0, 0]


@walk("where", PADDED)
def test_tokens_see_no_padding(where):
    """In training, in inference mode, and in parts over a cache."""
    mask = PADDED[where]
    here = mask == 1
    eager, ours = llamas()
    expected = eager(TOKENS, attention_mask=mask).logits
    torch.testing.assert_close(
        ours(TOKENS, attention_mask=mask).logits[here], expected[here], atol=2e-6, rtol=1e-5
    )
    with torch.inference_mode():
        torch.testing.assert_close(
            ours(TOKENS, attention_mask=mask).logits[here], expected[here], atol=2e-6, rtol=1e-5
        )
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            cache, parts, place = None, [], 0
            for part in TOKENS.split([7, 4, 1], 1):
                place += part.shape[1]
                result = ours(part, attention_mask=mask[:, :place], past_key_values=cache)
                cache = result.past_key_values
                parts.append(result.logits)
            torch.testing.assert_close(torch.cat(parts, 1)[here], expected[here], atol=2e-6, rtol=1e-5)


WINDOWED = {
    "Mistral": ("ForCausalLM", {"sliding_window": 3}),
    "Qwen2": ("ForCausalLM", {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1}),
    "Gemma2": ("ForCausalLM", {"sliding_window": 3, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "Gemma3Text": ("ForCausalLM", {"sliding_window": 3, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "Phi3": ("ForCausalLM", {"sliding_window": 3}),
    "GptOss": (
        "ForCausalLM", {"sliding_window": 3, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "ModernBert": ("Model", {"local_attention": 4, "global_attn_every_n_layers": 2}),
}  # fmt: skip


@walk("where", ["left", "right", "both", "holes"])
@walk("model", WINDOWED)
def test_a_window_counts_places_as_eager_attention_does(model, where):
    """Of tokens and padding alike, in one piece and in pieces over a cache."""
    kind, changed = WINDOWED[model]
    config = getattr(transformers, f"{model}Config")(**SMALL, **changed)
    models = pair(model.removesuffix("Text") + kind, config)
    mask = PADDED[where]
    with torch.no_grad():
        expected, found = (model(TOKENS, attention_mask=mask)[0] for model in models)
        torch.testing.assert_close(found[mask == 1], expected[mask == 1], atol=2e-6, rtol=1e-5)
        if kind == "Model":
            return
        first, last = TOKENS.split([9, 3], 1)
        cache = models[1](first, attention_mask=mask[:, :9]).past_key_values
        found = models[1](last, attention_mask=mask, past_key_values=cache).logits
    here = mask[:, 9:] == 1
    torch.testing.assert_close(found[here], expected[:, 9:][here], atol=2e-6, rtol=1e-5)


def test_a_window_in_a_compiled_model_counts_places():
    """In one graph: Transformers' own code would unpad, and wait for the device."""
    q, k, v = torch.randn(3, 3, 2, 12, 8, dtype=torch.float64).unbind()
    keys = PADDED["holes"] == 1
    attend = transformers.AttentionInterface()[NAMES[0]]

    def call(q, k, v, keys):
        return attend(torch.nn.Identity(), q, k, v, keys, sliding_window=3, is_causal=True)[0]

    with torch.no_grad():
        found = torch.compile(call, backend="eager", fullgraph=True)(q, k, v, keys)
    band = torch.ones(12, 12, dtype=torch.bool).tril().triu(-2)
    seen = keys[:, None, None] & band
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)
    torch.testing.assert_close(found[keys], expected[keys])


@walk("where", PADDED)
def test_a_decoder_looks_at_the_padded_tokens_of_its_encoder(where):
    """As many queries as there are keys: padding of the keys is none of the queries."""
    config = transformers.BartConfig(
        vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        dropout=0.0,
    )  # fmt: skip
    models = pair("BartForConditionalGeneration", config)
    here = PADDED[where].any(1)  # eager attention makes of no key the mean of all
    named = {"attention_mask": PADDED[where], "decoder_input_ids": TOKENS.flip(1)}
    expected, logits = (model.train()(TOKENS, **named).logits for model in models)
    torch.testing.assert_close(logits[here], expected[here], atol=5e-6, rtol=1e-5)
    gradients = []
    for model, found in zip(models, (expected, logits), strict=True):
        found[here].square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], atol=2e-5, rtol=1e-3)


@walk("where", PADDED)
def test_a_mask_of_more_keys_than_there_are_is_cut(where):
    attend = transformers.AttentionInterface()[NAMES[0]]
    query, key, value = torch.randn(3, 3, 2, 12, 8).double().unbind()
    module, mask = torch.nn.Identity(), PADDED[where]
    more = torch.cat((mask, torch.ones_like(mask[:, :5])), 1)
    expected = attend(module, query, key, value, mask, is_causal=False)[0]
    assert torch.equal(attend(module, query, key, value, more, is_causal=False)[0], expected)


def test_float32_next_to_half_precision_takes_the_dtype_of_the_weights():
    """That of the config only where the weights are quantized."""
    attend = transformers.AttentionInterface()[NAMES[0]]
    query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
    module = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16))
    module.config = SimpleNamespace(dtype=torch.float16)
    assert attend(module, query, key, value, None, is_causal=False)[0].dtype == torch.bfloat16
    module.config._is_quantized = True
    assert attend(module, query, key, value, None, is_causal=False)[0].dtype == torch.float16
