"""Llama checkpoints in Hugging Face's format, config.json and \\*.safetensors: read and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from flashtile.demo.llama import Llama, LlamaConfig
from flashtile.engine.config import read_config as read_model_config


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
    embedding, head = weights.get("embed_tokens.weight"), weights.get("lm_head.weight")
    if config.tied_embeddings and embedding is not None:
        if head is None or torch.equal(head, embedding):
            weights["lm_head.weight"] = embedding
        else:  # as in Transformers 5: the checkpoint is right
            config = replace(config, tied_embeddings=False)
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
        ValueError: a field is of the wrong type or out of range.
        NotImplementedError: it describes another architecture, or biases.
    """
    config = read_model_config(folder)
    if config.model_type != "llama":
        raise NotImplementedError(f"model_type must be 'llama', got {config.model_type!r}")
    if config.activation != "silu":
        raise NotImplementedError(f"hidden_act must be 'silu' in config.json, got {config.activation!r}")
    for name, biased in (("attention_bias", config.qkv_bias), ("mlp_bias", config.mlp_bias)):
        if biased:
            raise NotImplementedError(f"{name} must be false in config.json, got {biased}")
    return LlamaConfig(
        vocabulary=config.vocab_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        embed=config.hidden_size,
        hidden=config.intermediate_size,
        norm_eps=config.norm_eps,
        rope_theta=config.rope["rope_theta"],
        rope_scaling=config.rope,
        tied_embeddings=config.tie_word_embeddings,
    )
