"""Models of true shapes with random weights, as folders that every engine reads, and requests for them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rope_parameters": LLAMA3_ROPE,
    },
    "llama-3-1b": {  # a draft model for the one before
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": True, "rope_parameters": {**LLAMA3_ROPE, "factor": 32.0},
    },
}  # fmt: skip
CI = "ci"
"""A model that is written with its weights, so that all engines must give the same tokens."""


def write_model(name: str, folder: Path) -> Path:
    """The model as a folder; without weights, for engines that make random ones, but for :data:`CI`."""
    if name == CI:
        from flashtile.demo.huggingface import save_llama
        from flashtile.demo.llama import Llama, sized

        torch.manual_seed(0)
        save_llama(Llama(sized(2, 4, 64)), folder, 256)
        return folder
    config = {
        "model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
        "eos_token_id": None, "bos_token_id": None, **SHAPES[name],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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
