"""Models of real shapes with random weights, as folders that every engine reads, and requests for them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch

from flashtile.learn.io_model.models import Model, find_model
from flashtile.tools.bench.workloads import SMALL_MODEL

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA2_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DRAFT = Model("Llama-3.2-1B", 16, 32, 8, 64, 8192, 1.24e9, 8192, "Meta 2024, the model card of Llama 3.2")
"""Draft model for Llama-3-8B."""
SMALL = Model("Small", 2, 4, 4, 16, 160, 1.2e5, 256, "ours")
"""Model with fixed weights and a tokenizer of bytes, for which all engines must give the same tokens."""
SERVED: dict[str, tuple[Model, int, dict[str, Any]]] = {
    "llama-2-7b": (find_model("llama-2-7b"), 32000, LLAMA2_ROPE),
    "llama-3-8b": (find_model("llama-3-8b"), 128256, LLAMA3_ROPE),
    "llama-3.2-1b": (DRAFT, 128256, {**LLAMA3_ROPE, "factor": 32.0}),
    SMALL_MODEL: (SMALL, 256, LLAMA2_ROPE),
}
"""(sizes, vocabulary size, rotary embedding) by name."""


def write_model(name: str, folder: Path) -> Path:
    """Write a model's folder and return it; only the small model has weights, engines make random ones."""
    model, vocab_size, rope = SERVED[name]
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5,
        "dtype": "float32" if model is SMALL else "bfloat16", "eos_token_id": None, "bos_token_id": None,
        "tie_word_embeddings": model is DRAFT, "vocab_size": vocab_size,
        "hidden_size": model.num_heads_q * model.head_dim, "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers, "num_attention_heads": model.num_heads_q,
        "num_key_value_heads": model.num_heads_kv, "head_dim": model.head_dim,
        "max_position_embeddings": model.longest, "rope_parameters": rope,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    if model is SMALL:
        _write_weights(model, vocab_size, folder)
    return folder


def _write_weights(model: Model, vocab_size: int, folder: Path) -> None:
    """Write random weights and a tokenizer of bytes."""
    from safetensors.torch import save_file

    width, hidden = model.num_heads_q * model.head_dim, model.intermediate
    shapes = {"model.embed_tokens": (vocab_size, width), "lm_head": (vocab_size, width)}
    for layer in range(model.layers):
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
    norms = [f"layers.{layer}.{side}" for layer in range(model.layers) for side in sides]
    weights |= {f"model.{norm}.weight": torch.ones(width) for norm in (*norms, "norm")}
    save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))


def vocabulary(name: str) -> int:
    """Vocabulary size of a model."""
    return SERVED[name][1]


def tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """Return ``count`` random tokens."""
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(count)]


def lengths(count: int, mean: float, most: int, seed: int) -> list[int]:
    """Return log-normal lengths like ShareGPT's; their logarithm has standard deviation 1."""
    draw = random.Random(seed)
    return [min(most, max(1, round(draw.lognormvariate(math.log(mean) - 0.5, 1.0)))) for _ in range(count)]
