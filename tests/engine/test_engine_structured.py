"""Structured output: random weights write what a schema, an expression, a choice or a grammar allows."""

from __future__ import annotations

import json
import re

import pytest

from flashtile.engine import LLM, SamplingParams

tokenizers = pytest.importorskip("tokenizers")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
ENDS = (1, 405)
"""End tokens: the tokenizer's, and one of generation_config.json that the tokenizer lacks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without weights and a trained tokenizer of bytes and pairs, as GPT's and Llama 3's are."""
    loaded = tokenizers.Tokenizer(tokenizers.models.BPE())
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    loaded.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    loaded.train_from_iterator(['{"name": "red", "sizes": [10, 20, 30], "kind": "green"}'] * 4, trainer)
    path = tmp_path_factory.mktemp("structured")
    loaded.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    config = {
        "model_type": "llama", "vocab_size": 410, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 256, "eos_token_id": ENDS[1],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def load(folder, **options):
    return LLM(folder, load_format="dummy", device="cpu", block_size=4, warmup=False, **options)


@pytest.fixture(scope="module")
def llm(folder):
    return load(folder)


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    assert list(found) == ["name", "sizes", "kind"]
    assert len(found["name"]) <= 6
    assert found["kind"] in ("red", "green")
    assert len(found["sizes"]) <= 3
    return all(type(size) is int and 0 <= size < 100 for size in found["sizes"])


CHOICES = ["a (b)", "é☃ \n", 'say "no"', "c"]
KINDS = [
    ({"json": SCHEMA}, fits_schema),
    ({"json": json.dumps(SCHEMA)}, fits_schema),
    ({"regex": r"[0-9]{3}-(ab|cd){1,9}x"}, lambda text: re.fullmatch(r"[0-9]{3}-(ab|cd){1,9}x", text)),
    ({"choice": CHOICES, "json": None}, lambda text: text in CHOICES),
    (
        {"grammar": 'start: "(" start ")" | /[a-c]{2,4}/'},
        lambda text: re.fullmatch(r"\(*[a-c]{2,4}\)*", text),
    ),
]


def params(structure, **options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "seed": 1, **options}, structured_outputs=structure)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("structure", "fits"), KINDS)
def test_random_weights_write_what_is_allowed(llm, structure, fits, temperature):
    many = [params(structure, seed=i, temperature=temperature) for i in range(6)]
    for output in llm.generate(["one", "two", "three"] * 2, many):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert fits(answer.text), answer.text


def test_objects_of_any_form(llm):
    for output in llm.generate(["one", "two"], [params({"json_object": True}, seed=i) for i in (1, 2)]):
        text = output.outputs[0].text
        assert text.startswith("{")
        assert output.outputs[0].finish_reason != "stop" or isinstance(json.loads(text), dict)
