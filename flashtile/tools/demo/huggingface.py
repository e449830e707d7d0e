"""Llama checkpoints in Hugging Face's format, config.json and model.safetensors, as the engine reads them."""

from __future__ import annotations

import json
from pathlib import Path

from flashtile.tools.demo.llama import Llama


def save_llama(model: Llama, folder: Path, max_position_embeddings: int) -> None:
    """Write a byte-level model as a folder that :class:`flashtile.LLM` and Transformers read.

    Args:
        max_position_embeddings: length of the longest text that the model was trained on.

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
