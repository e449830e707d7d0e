"""examples/paged_generation.py, run as a user runs it, and the parts it is made of."""

from __future__ import annotations

import json
import re

import pytest
import torch

import script_runner
from flashtile.demo.generation import DenseDecoder, PagedDecoder, beam_search, greedy, parallel_samples
from flashtile.demo.huggingface import load_llama, read_config, save_llama
from flashtile.demo.llama import Llama, LlamaConfig
from flashtile.kv_cache import PagedKVCache

SMALL = LlamaConfig(vocabulary=23, layers=2, heads=4, kv_heads=2, head_dim=8, embed=16, hidden=24)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3], [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def model() -> Llama:
    """Untrained, but with weights that make its choices depend on every earlier token."""
    torch.manual_seed(0)
    model = Llama(SMALL).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.6)
    return model.eval()


def paged(model: Llama, num_blocks: int = 80, block_size: int = 4, **sizes) -> PagedDecoder:
    config = model.config
    cache = PagedKVCache(
        config.layers,
        num_blocks,
        block_size,
        config.kv_heads,
        config.head_dim,
        max_sequences=16,
        max_seqlen=64,
        dtype=torch.float64,
        **sizes,
    )
    return PagedDecoder(model, cache)


STRATEGIES = {
    "greedy": lambda decoder: greedy(decoder, PROMPTS, 20),
    "samples": lambda decoder: parallel_samples(decoder, PROMPTS, 20, samples=4, seed=3),
    "beams": lambda decoder: [
        [b.tokens for b in group] for group in beam_search(decoder, PROMPTS, 20, width=4)
    ],
}


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_paged_tokens_equal_unpaged_ones(model, strategy, block_size):
    decoder = paged(model, num_blocks=12 * -(-40 // block_size), block_size=block_size)
    assert strategy(decoder) == strategy(DenseDecoder(model))
    decoder.cache.check_integrity()


def test_samples_differ_and_share_their_prompt(model):
    decoder = paged(model)
    (samples,) = parallel_samples(decoder, PROMPTS[:1], 20, samples=4, seed=3)
    assert len({tuple(tokens) for tokens in samples}) == 4
    usage = decoder.peak.usage
    assert (usage.blocks, usage.blocks_unshared) == (
        2 + 4 * 5,
        4 * 7,
    )  # two full blocks of the prompt are shared
    assert decoder.peak.copied_blocks == 3  # the third block, which the last sample writes in place


def test_beams_are_the_likeliest(model):
    """Against every continuation of two tokens, and wide enough that none is cut off."""
    best = beam_search(paged(model, num_blocks=120), PROMPTS[:1], 2, width=16)[0]
    width, scores = SMALL.vocabulary, {}
    with torch.no_grad():
        after = torch.log_softmax(model(torch.tensor([PROMPTS[0]]))[0, -1], -1)
        for a in range(width):
            then = torch.log_softmax(model(torch.tensor([[*PROMPTS[0], a]]))[0, -1], -1)
            scores.update({(a, b): float(after[a] + then[b]) for b in range(width)})
    (likeliest, score), *_ = sorted(scores.items(), key=lambda item: -item[1])
    assert tuple(best[0].tokens) == likeliest
    assert best[0].score == pytest.approx(score)
    assert [beam.score for beam in best] == sorted((beam.score for beam in best), reverse=True)


def test_a_second_start_finds_the_prompts_again(model):
    decoder = paged(model)
    first = greedy(decoder, PROMPTS, 5)
    assert greedy(decoder, PROMPTS, 5) == first
    assert decoder.cache.length(decoder.cache.create(PROMPTS[0])) == 8


@pytest.fixture(scope="module")
def run():
    return script_runner.runner(script_runner.load("examples/paged_generation.py"))


def test_the_example_trains_generates_and_compares(run, tmp_path):
    options = ("--device", "cpu", "--steps", 3, "--length", 12, "--checkpoint", tmp_path / "small.pt")
    result = run(*options, "--samples", 3, "--beams", 2)
    assert result.exit_code == 0, result.output
    assert "training step    3" in result.output
    assert "all tokens are equal to those of the unpaged computation" in result.output
    rows = {
        row[0]: row[1:]
        for row in re.findall(r"│ (greedy|3 samples|2 beams)" + r"\s+│\s+(\S+)" * 6, result.output)
    }
    assert rows["greedy"][0] == "3"
    assert rows["3 samples"][0] == "9"
    assert float(rows["3 samples"][3].rstrip("%")) > 0
    again = run(*options)
    assert again.exit_code == 0, again.output
    assert "training" not in again.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dtype", "int4"), "dtype must be one of"),
        (("--device", "abacus"), "abacus"),
        (("--model", "/nowhere"), "'/nowhere' does not exist"),
        (("--prompt", ""), "prompt must not be empty"),
        (("--num-blocks", "3"), "num_blocks is too small for greedy"),
    ],
)
def test_wrong_options_are_refused(run, options, message):
    result = run("--device", "cpu", "--steps", 1, "--length", 4, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_llama3_frequencies():
    """High ones as they are, low ones slowed down by the factor, those between by a share of it."""
    plain = Llama(LlamaConfig(head_dim=128, rope_theta=500000.0)).frequencies
    scaled = Llama(LlamaConfig(head_dim=128, rope_theta=500000.0, rope_scaling=LLAMA3)).frequencies
    ratio = scaled / plain
    turns = LLAMA3["original_max_position_embeddings"] * plain / (2 * torch.pi)
    assert torch.all(ratio[turns >= 4] == 1)
    assert torch.allclose(ratio[turns <= 1], torch.tensor(1 / 8))
    assert torch.all(ratio.diff() <= 0)
    with pytest.raises(NotImplementedError, match="'yarn'"):
        Llama(LlamaConfig(rope_scaling={"rope_type": "yarn"}))


@pytest.mark.parametrize(("tied", "rope"), [(False, {}), (True, {}), (False, LLAMA3)])
def test_a_hugging_face_folder(tmp_path, tied, rope):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        **({"rope_scaling": {**rope, "rope_theta": 10000.0}} if rope else {"rope_theta": 50000.0}),
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_llama(tmp_path)
    tokens = torch.randint(0, 50, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (ours.lm_head.weight.data_ptr() == ours.embed_tokens.weight.data_ptr()) == tied


def test_a_head_that_differs_is_kept_whatever_the_config_says(tmp_path):
    from safetensors.torch import load_file, save_file

    model = Llama(SMALL)
    save_llama(model, tmp_path, 16)
    head = torch.randn_like(model.lm_head.weight)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "lm_head.weight": head}, file)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    assert torch.equal(load_llama(tmp_path).lm_head.weight, head)


def test_other_architectures_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    with pytest.raises(NotImplementedError, match="model_type must be 'llama', got 'mistral'"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "attention_bias": True}))
    with pytest.raises(NotImplementedError, match="attention_bias must be false"):
        read_config(tmp_path)
