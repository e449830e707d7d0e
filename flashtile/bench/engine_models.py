"""Models of true shapes with random weights, as folders that every engine reads, and requests for them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch

from flashtile.bench.workloads import SMALL_MODEL
from flashtile.io_model.models import Model, find_model

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA2_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DRAFT = Model("Llama-3.2-1B", 16, 32, 8, 64, 8192, 1.24e9, 8192, "Meta 2024, the model card of Llama 3.2")
"""Small enough to guess for Llama-3-8B."""
SERVED: dict[str, tuple[Model, int, dict[str, Any]]] = {
    "llama-2-7b": (find_model("llama-2-7b"), 32000, LLAMA2_ROPE),
    "llama-3-8b": (find_model("llama-3-8b"), 128256, LLAMA3_ROPE),
    "llama-3.2-1b": (DRAFT, 128256, {**LLAMA3_ROPE, "factor": 32.0}),
}
"""By name: sizes, vocabulary, rotary embedding."""


def write_model(name: str, folder: Path) -> Path:
    """The model as a folder: the small one with weights, so that all engines must give the same tokens; the
    others without, for engines that make random ones."""
    if name == SMALL_MODEL:
        return _write_small(folder)
    model, vocab_size, rope = SERVED[name]
    config = {
        "model_type": "llama", "rms_norm_eps": 1e-5, "dtype": "bfloat16", "eos_token_id": None,
        "bos_token_id": None, "tie_word_embeddings": model is DRAFT, "vocab_size": vocab_size,
        "hidden_size": model.num_heads_q * model.head_dim, "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers, "num_attention_heads": model.num_heads_q,
        "num_key_value_heads": model.num_heads_kv, "head_dim": model.head_dim,
        "max_position_embeddings": model.longest, "rope_parameters": rope,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_small(folder: Path) -> Path:
    """Write a Llama of two layers with random weights."""
    from safetensors.torch import save_file

    layers, heads, width, hidden, vocab_size = 2, 4, 64, 160, vocabulary(SMALL_MODEL)
    shapes = {"model.embed_tokens": (vocab_size, width), "lm_head": (vocab_size, width)}
    for layer in range(layers):
        for part, shape in (
            *((f"self_attn.{name}_proj", (width, width)) for name in "qkvo"),
            ("mlp.gate_proj", (hidden, width)),
            ("mlp.up_proj", (hidden, width)),
            ("mlp.down_proj", (width, hidden)),
        ):
            shapes[f"model.layers.{layer}.{part}"] = shape
    draw = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": torch.randn(shape, generator=draw) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    sides = "input_layernorm", "post_attention_layernorm"
    norms = [f"layers.{layer}.{side}" for layer in range(layers) for side in sides]
    weights |= {f"model.{norm}.weight": torch.ones(width) for norm in (*norms, "norm")}
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab_size,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "hidden_size": width, "intermediate_size": hidden, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256, "dtype": "float32", "eos_token_id": None, "bos_token_id": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
    return folder


def vocabulary(name: str) -> int:
    """Tokens of a model."""
    return 256 if name == SMALL_MODEL else SERVED[name][1]


def tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Random ones."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(count)]


def lengths(count: int, mean: float, most: int, seed: int) -> list[int]:
    """Log-normal, as ShareGPT's are, with a deviation of 1 of the logarithm."""
    draw = random.Random(seed)
    return [
        min(most, max(1, round(draw.lognormvariate(math.log(mean) - 0.5, 1.0)))) for _ in range(count)
    ]
