"""Configs as Transformers reads them: every supported class, every field, left out, null and given."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest
import torch

from flashtile.engine.config import FAMILIES, ConfigError, parse_config
from flashtile.engine.rotary import rotary_frequencies, rotary_tables
from walk import walk

transformers = pytest.importorskip("transformers")

LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
CHANGED: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 6,
    "num_attention_heads": 128, "num_key_value_heads": 2, "head_dim": 48, "rms_norm_eps": 1e-4,
    "hidden_act": "gelu_new", "hidden_activation": "silu", "max_position_embeddings": 640,
    "bos_token_id": 7, "eos_token_id": [5, 9], "rope_parameters": LINEAR, "sliding_window": 33,
    "use_sliding_window": True, "max_window_layers": 2, "mlp_bias": True, "query_pre_attn_scalar": 20,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", "full_attention"],
    "final_logit_softcapping": 7.0, "attn_logit_softcapping": 9.0, "num_local_experts": 12,
    "num_experts_per_tok": 3, "swiglu_alpha": 1.5, "swiglu_limit": 5.0, "num_experts": 12,
    "moe_intermediate_size": 40, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1],
    "no_rope_layers": [1, 1, 0, 1, 1, 1] * 6, "no_rope_layer_interval": 3,
    "original_max_position_embeddings": 96,
}  # fmt: skip
"""None of them is any class's default; two flags are the opposite of theirs."""
CHANGED_IN: dict[str, dict[str, Any]] = {
    "gemma3_text": {"rope_parameters": {"full_attention": LINEAR}},
    "olmo2": {"vocab_size": 60000},
    "smollm3": {"vocab_size": 200000},
    "phi3": {
        "vocab_size": 40000,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}
UNREAD_FIELDS = {"gemma3_text": {"attn_logit_softcapping"}}
"""Fields of a class that its layers do not read."""
READ_FIELDS: dict[str, set[str]] = {
    "mistral": {"layer_types"}, "gemma3_text": {"sliding_window_pattern", "rope_local_base_freq"},
    **{name: {"head_dim"} for name in ("qwen2", "olmo2", "smollm3")},
    "mixtral": {"num_experts"}, "qwen3_moe": {"num_local_experts", "head_dim"},
    "gpt_oss": {"num_experts", "original_max_position_embeddings"},
}  # fmt: skip
"""Fields that a class does not have, although its layers read them."""
WITHOUT_EFFECT = {
    "attention_dropout", "initializer_range", "output_router_logits", "pad_token_id", "pretraining_tp",
    "embd_pdrop", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise", "use_bidirectional_attention",
    "use_cache",
}  # fmt: skip
"""On what a trained model computes; use_bidirectional_attention is refused."""


@functools.cache
def fields_of(model_type: str) -> dict[str, Any]:
    """The fields that a class adds to all configs', with changed values."""
    config = transformers.AutoConfig.for_model(model_type)
    common = {one.name for one in dataclasses.fields(transformers.PreTrainedConfig)}
    names = {one.name for one in dataclasses.fields(config)} - common - WITHOUT_EFFECT
    names -= UNREAD_FIELDS.get(model_type, set())
    flags, changed = {"tie_word_embeddings", "attention_bias"}, changed_in(model_type)
    return {name: not getattr(config, name) if name in flags else changed[name] for name in sorted(names)}


def changed_in(model_type: str) -> dict[str, Any]:
    return CHANGED | CHANGED_IN.get(model_type, {})


def in_full(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """What Transformers makes of a config.json, with every field."""
    found = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(values)))
    return {**found.to_dict(), "model_type": model_type}


@walk("model_type", FAMILIES)
def test_an_empty_config_is_the_classs(model_type):
    assert parse_config({"model_type": model_type}) == parse_config(in_full(model_type, {}))


@walk("model_type", FAMILIES)
def test_fields_left_out_or_null_are_the_classs(model_type):
    given = fields_of(model_type)
    for name in given:
        rest = {key: value for key, value in given.items() if key not in (name, "layer_types")}
        full = in_full(model_type, rest)
        assert parse_config({**rest, "model_type": model_type}) == parse_config(full), name
        empty = {**rest, name: None}
        try:
            full = in_full(model_type, empty)
        except Exception:  # the class takes no null there
            continue
        assert parse_config({**empty, "model_type": model_type}) == parse_config(full), name


@walk("model_type", FAMILIES)
def test_every_field_of_the_class_changes_the_model_and_no_other_does(model_type):
    base = {"use_sliding_window": True, "num_hidden_layers": 6, "max_window_layers": 3}
    base = {"model_type": model_type, **base}
    if model_type == "smollm3":
        base |= {"sliding_window": 5}
    if model_type == "phi3":
        base |= {"rope_parameters": {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}}
        base |= {"max_position_embeddings": 5000}
    before = parse_config(base)
    for name, value in {**changed_in(model_type), **fields_of(model_type)}.items():
        if base.get(name) == value or (model_type, name) == ("gpt_oss", "hidden_act"):
            continue  # gpt-oss's experts have an activation of their own
        if model_type == "phi3" and name in ("hidden_size", "num_attention_heads", "head_dim"):
            continue  # the scaling factors no longer fit
        known = name in fields_of(model_type) or name in READ_FIELDS.get(model_type, set())
        change = {**base, name: value}
        assert (parse_config(change) != before) == known, name


@walk(
    "values",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR},
        {"rope_parameters": {}},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 300.0},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "truncate": None, "beta_fast": None}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}},
        {
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 96,
        },
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0
            },
        },
    ],
)  # fmt: skip
@walk("model_type", sorted({*FAMILIES} - {"gemma3_text", "phi3"}))
def test_rotary_frequencies_are_those_of_the_class(model_type, values):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {**values, "head_dim": 32, "max_position_embeddings": 256}
    ours = parse_config({**values, "model_type": model_type})
    config = transformers.AutoConfig.for_model(model_type, **json.loads(json.dumps(values)))
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        expected = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 32, 2) / 32)
        scale = 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    torch.testing.assert_close(rotary_frequencies(ours.rope, 32), expected, rtol=1e-6, atol=0)
    assert rotary_tables(ours.rope, 32, 1)[0][0, 0] == pytest.approx(scale)


def rotary_of_class(config: Any, layer_type: str | None = None, length: int | None = None) -> Any:
    """Transformers' (frequencies, factor of the tables)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, 32, 2) / 32), 1.0
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", seq_len=length, layer_type=layer_type)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 500.0},
        {
            "rope_theta": 500.0, "rope_local_base_freq": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": None}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
    ],
)  # fmt: skip
def test_layers_of_gemma_3_with_a_window_have_their_own_frequencies(values):
    values = {**values, "head_dim": 32, "max_position_embeddings": 256, "num_hidden_layers": 2}
    values |= {"layer_types": ["full_attention", "sliding_attention"]}
    ours = parse_config({**values, "model_type": "gemma3_text"})
    config = transformers.AutoConfig.for_model("gemma3_text", **json.loads(json.dumps(values)))
    for layer, kind in enumerate(values["layer_types"]):
        expected, _ = rotary_of_class(config, kind)
        found = rotary_frequencies(ours.rope_of(layer), 32)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@walk("kind", ["longrope", "su", "yarn"])
@walk("more", [{}, {"attention_factor": 1.5}, {"factor": 6.0}, {"original_max_position_embeddings": 32}])
def test_longrope_chooses_its_factors_by_the_longest_sequence(kind, more):
    factors = {
        f"{name}_factor": [start + i / 8 for i in range(16)]
        for name, start in (("short", 1.0), ("long", 3.0))
    }
    values = {
        "rope_scaling": {"type": kind, **factors, **more}, "original_max_position_embeddings": 64,
        "max_position_embeddings": 256, "hidden_size": 128, "num_attention_heads": 4,
    }  # fmt: skip
    ours = parse_config({**values, "model_type": "phi3"})
    values["rope_scaling"] = {**values["rope_scaling"], "type": "longrope"}  # as Transformers renames it
    config = transformers.AutoConfig.for_model("phi3", **json.loads(json.dumps(values)))
    for length in (64, 65):
        expected, scale = rotary_of_class(config, length=length)
        torch.testing.assert_close(rotary_frequencies(ours.rope, 32, length), expected, rtol=1e-6, atol=0)
        assert rotary_tables(ours.rope, 32, length)[0][0, 0] == pytest.approx(scale)


def test_dynamic_scaling_is_that_of_the_longest_sequence():
    values = {
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 64,
        "head_dim": 32,
    }
    ours = parse_config({**values, "model_type": "llama"})
    assert ours.longest_sequence == 256
    config = transformers.AutoConfig.for_model("llama", **json.loads(json.dumps(values)))
    for length in (10, 64, 200):
        expected, _ = rotary_of_class(config, length=length)
        torch.testing.assert_close(rotary_frequencies(ours.rope, 32, length), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("outside", [True, False])
def test_phi_may_rotate_a_part_of_each_head(outside):
    part = {"partial_rotary_factor": 0.75}
    values = {"head_dim": 32, **(part if outside else {"rope_parameters": {"rope_type": "default", **part}})}
    rope = parse_config({**values, "model_type": "phi3"}).rope
    config = transformers.AutoConfig.for_model("phi3", **json.loads(json.dumps(values)))
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    expected, _ = Phi3RotaryEmbedding.compute_default_rope_parameters(config)
    torch.testing.assert_close(rotary_frequencies(rope, 32), expected, rtol=1e-6, atol=0)


@walk(
    ("values", "error", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, ConfigError,
            "rope_theta must be other than 1 with rope_type 'yarn', got 1.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, NotImplementedError,
            "rope_parameters must be the same for all types of layers",
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 1.5}, ConfigError,
            "partial_rotary_factor must be an even part of head_dim=96, got 1.5",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}}, NotImplementedError,
            "rope_parameters must be objects full_attention and sliding_attention, got",
        ),
        ({"model_type": "gemma3_text", "rope_scaling": "x"}, NotImplementedError, "must be objects full_att"),
        ({"model_type": "gemma3_text", "rope_parameters": LINEAR}, NotImplementedError, "be objects full"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, ConfigError, "a list of at least 36 integers"),
        ({"model_type": "smollm3", "no_rope_layers": ["a"] * 36}, ConfigError, "must be a list of integers"),
        ({"per_layer_config": {"0": {}}}, NotImplementedError, "per_layer_config is not supported"),
        ({"use_bidirectional_attention": True}, NotImplementedError, "use_bidirectional_attention is not"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        parse_config({"model_type": "llama", **values})


def test_positions_stretched_beyond_all_numbers_are_bounded():
    rope = {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 1e300}
    assert parse_config({"model_type": "llama", "rope_parameters": rope}).longest_sequence == 2**24
