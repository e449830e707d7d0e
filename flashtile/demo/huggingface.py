"""Llama checkpoints in Hugging Face's format, config.json and \\*.safetensors: read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from flashtile.demo.llama import Llama, LlamaConfig


def load_llama(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Llama:
    """The model in ``folder``.

    Args:
        dtype: of the weights; None: as they are stored.

    Raises:
        ModuleNotFoundError: safetensors is not installed (``pip install '.[hf]'``).
        FileNotFoundError: config.json or the weights are not there.
        NotImplementedError: it is not of the Llama architecture, or has biases.
        ValueError: weights are missing, unknown, or of another shape.
    """
    from safetensors.torch import load_file

    config = read_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no *.safetensors")
    weights = {}
    for file in files:
        for name, weight in load_file(file).items():
            weights[name.removeprefix("model.")] = weight.to(device=device, dtype=dtype or weight.dtype)
    if config.tied_embeddings and "embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    with torch.device("meta"):  # the weights are not initialised first
        model = Llama(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder} does not fit its config.json: {error}") from None
    return model


def save_llama(model: Llama, folder: Path, max_position_embeddings: int) -> None:
    """Write a model of bytes as a folder that :class:`flashtile.LLM` and Transformers read.

    Args:
        max_position_embeddings: the longest text that it was trained on.

    Raises:
        ModuleNotFoundError: safetensors is not installed (``pip install 'flashtile[engine]'``).
    """
    from safetensors.torch import save_file

    config = model.config
    described = {
        # Qwen 3 is Llama with normalised queries and keys.
        "model_type": "qwen3" if config.qk_norm else "llama",
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "vocab_size": config.vocabulary,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.embed,
        "intermediate_size": config.hidden,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": config.rope,
        "tie_word_embeddings": config.tied_embeddings,
        "max_position_embeddings": max_position_embeddings,
        "hidden_act": "silu",
        "dtype": str(model.embed_tokens.weight.dtype).removeprefix("torch."),
        "eos_token_id": None,
        "bos_token_id": None,
    }
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": weight.detach().cpu().contiguous()
        for name, weight in model.state_dict().items()
        if not (config.tied_embeddings and name == "lm_head.weight")
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))


def read_config(folder: Path) -> LlamaConfig:
    """What config.json says.

    Raises:
        FileNotFoundError: it is not there.
        NotImplementedError: it describes another architecture, or biases.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "llama":
        raise NotImplementedError(f"model_type must be 'llama', got {config.get('model_type')!r}")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name, False):
            raise NotImplementedError(f"{name} must be false in config.json, got {config[name]}")
    heads, embed = config["num_attention_heads"], config["hidden_size"]
    # transformers 5 keeps the base of the rotary positions beside their scaling.
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return LlamaConfig(
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or embed // heads,
        embed=embed,
        hidden=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
        rope_theta=scaling.get("rope_theta") or config.get("rope_theta", 10000.0),
        rope_scaling=scaling,
        tied_embeddings=config.get("tie_word_embeddings", False),
    )
