"""A byte-level model with Llama's architecture (Touvron et al. 2023, arXiv:2302.13971) in Qwen 3's variant.

Queries and keys are normalised (QK norm), which allows higher learning rates. Modules are named as in Hugging
Face's checkpoints, so the engine and Transformers can load what :func:`save_llama` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile.engine.rotary import rotary_frequencies
from flashtile.tools.demo.attention import Attention, flashtile
from flashtile.tools.demo.corpus import VOCABULARY

NORM_EPS = 1e-5
ROPE: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
"""RoPE parameters, by Hugging Face's names."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model with as many key/value heads as query heads; ``embed`` is its width."""

    layers: int
    heads: int
    embed: int

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "embed"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.embed % (2 * self.heads) != 0:
            raise ValueError(
                f"embed must be a multiple of 2 * heads = {2 * self.heads} (rotary positions turn pairs), "
                f"got {self.embed}"
            )

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer, about 8/3 * embed, in multiples of 32.

        Its three matrices then have about as many weights as two matrices of width 4 * embed.
        """
        return 32 * max(1, round(self.embed * 8 / 3 / 32))


sized = LlamaConfig

PRESETS = {
    "tiny": sized(3, 4, 128),
    "small": sized(6, 6, 384),
    "medium": sized(12, 12, 768),
    "large": sized(24, 16, 1024),
}


class Llama(nn.Module):
    """Llama model: tokens (batch, seqlen) int64 -> logits (batch, seqlen, 256).

    The layers call the attribute ``attention``, which can be replaced by another function.
    """

    frequencies: Tensor

    def __init__(self, config: LlamaConfig, attention: Attention = flashtile):
        super().__init__()
        self.config, self.attention = config, attention
        self.embed_tokens = nn.Embedding(VOCABULARY, config.embed)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, eps=NORM_EPS)
        self.lm_head = nn.Linear(config.embed, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.frequencies = rotary_frequencies(ROPE, config.head_dim)
        self._initialise()

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits of every token, (batch, seqlen, 256).

        Args:
            tokens: (batch, seqlen) int64.
            positions: int64 positions in the sequence, which broadcast to ``tokens``; None is 0, 1, ...
        """
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        angles = positions[..., None, None].float() * self.frequencies.to(positions.device)
        rotation = angles.cos(), angles.sin()  # (..., 1, head_dim / 2) float32
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, rotation, self.attention)
        return self.lm_head(self.norm(x))

    def _initialise(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
                if name.endswith(("o_proj", "down_proj")):  # so each layer is the identity before training
                    nn.init.zeros_(module.weight)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.embed, eps=NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(config.embed, eps=NORM_EPS)
        self.self_attn = SelfAttention(config)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class SelfAttention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.embed, config.embed, bias=False)
        self.k_proj = nn.Linear(config.embed, config.embed, bias=False)
        self.v_proj = nn.Linear(config.embed, config.embed, bias=False)
        self.o_proj = nn.Linear(config.embed, config.embed, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, NORM_EPS)
        self.k_norm = nn.RMSNorm(config.head_dim, NORM_EPS)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(self.q_norm(q.float()), rotation).to(v.dtype)
        k = rotate(self.k_norm(k.float()), rotation).to(v.dtype)
        return self.o_proj(attention(q, k, v).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.embed, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.embed, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embeddings (Su et al. 2021) to x (..., heads, head_dim) float32.

    Element i of the first half of head_dim is rotated together with element i of the second half.
    ``rotation`` is (cos, sin) of the angles.
    """
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)


def save_llama(model: Llama, folder: Path, max_position_embeddings: int) -> None:
    """Write a model as a folder that :class:`flashtile.LLM` and Transformers read.

    Args:
        model: the model. Its output weight is tied to the embedding, or has been replaced by a separate one.
        folder: folder to write, which is created if it is missing.
        max_position_embeddings: length of the longest text that the model was trained on.

    Raises:
        ModuleNotFoundError: safetensors is not installed (``pip install 'flashtile[engine]'``).
    """
    from safetensors.torch import save_file

    config, tied = model.config, model.lm_head.weight is model.embed_tokens.weight
    described = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCABULARY,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head_dim,
        "hidden_size": config.embed,
        "intermediate_size": config.hidden,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": ROPE,
        "tie_word_embeddings": tied,
        "max_position_embeddings": max_position_embeddings,
        "hidden_act": "silu",
        "dtype": str(model.embed_tokens.weight.dtype).removeprefix("torch."),
        "eos_token_id": None,
        "bos_token_id": None,
    }
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": weight.detach().cpu().contiguous()
        for name, weight in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByteTokenizer"}))
