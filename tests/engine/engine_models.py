"""Small random models of every family, and what Transformers makes of them."""

from __future__ import annotations

import atexit
import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtile.engine import LLM

VOCABULARY = 120
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 128,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 32,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1000.0, "attention_factor": 1.3, "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + 0.3 * i for i in range(6)],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "sliding_window": 6, "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "phi3": {
        "model_type": "phi3", "sliding_window": 11, "original_max_position_embeddings": 128,
        "rope_parameters": LONGROPE,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": YARN,
    },
}  # fmt: skip


@functools.cache
def transformers_model(name: str) -> Any:
    """A model of Transformers, float32, with every weight random: the defaults have zeros and ones."""
    transformers = pytest.importorskip("transformers")
    given = {**SIZES, **MODELS[name]}
    model_type = given.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **given)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif parameter.dim() == 1:
                parameter.normal_(std=0.5)
            else:
                inner = parameter.shape[1] if parameter.dim() == 3 else parameter.shape[-1]
                parameter.normal_(std=1.5 * inner**-0.5)
    return model


def new_folder(prefix: str) -> Path:
    """An empty folder that is removed when this process ends."""
    path = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def folder(name: str) -> Path:
    """The model as a folder in Hugging Face's format."""
    path = new_folder(f"flashtile-{name}-")
    transformers_model(name).save_pretrained(path)
    return path


def load(name: str, **options: Any) -> LLM:
    options = {"device": "cpu", "skip_tokenizer_init": True, "warmup": False, **options}
    return LLM(folder(name), **options)


@functools.cache
def prompts() -> list[list[int]]:
    """Of different lengths, two with a common beginning."""
    draw = random.Random(2)
    made = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (5, 21, 1, 14, 30)]
    made[3][:12] = made[1][:12]
    return made


@functools.cache
def greedy(name: str, length: int) -> list[list[int]]:
    """What Transformers answers to :func:`prompts`."""
    model = transformers_model(name)
    answers = []
    for prompt in prompts():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


PAIRS_ENDS = (1, 405)
"""End tokens of :func:`folder_with_pairs`: the tokenizer's, and the config's, which the tokenizer lacks."""


def folder_with_pairs(path: Path) -> Path:
    """A model without weights and a trained tokenizer of bytes and pairs, as GPT's and Llama 3's are."""
    tokenizers = pytest.importorskip("tokenizers")
    loaded = tokenizers.Tokenizer(tokenizers.models.BPE())
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    loaded.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    loaded.train_from_iterator(['{"name": "red", "sizes": [10, 20, 30], "kind": "green"}'] * 4, trainer)
    loaded.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    config = {
        "model_type": "llama", "vocab_size": 410, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "eos_token_id": PAIRS_ENDS[1],
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path
