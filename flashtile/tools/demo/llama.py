"""A Llama-architecture model (Touvron et al. 2023, arXiv:2302.13971; grouped heads as in Llama 2 and 3).

The model does not store keys and values. A call may pass an ``attend`` function, which gets each layer's
queries, keys and values, so that one model can train on dense tensors and generate from a paged or dense
cache. Modules are named as in Hugging Face's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile.engine.rotary import rotary_frequencies
from flashtile.tools.demo.attention import Attention, flashtile
from flashtile.tools.demo.corpus import VOCABULARY

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v) -> out: q and out (..., heads, head_dim), k and v (..., kv_heads, head_dim) of the new
tokens, already rotated."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model.

    ``rope_scaling`` is that of Hugging Face's config.json, of type "llama3" or "linear", or empty.
    ``qk_norm`` normalises queries and keys, which lets a small model learn at higher rates.
    """

    vocabulary: int = VOCABULARY
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    embed: int = 128
    hidden: int = 352
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    tied_embeddings: bool = True
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "heads", "embed", "kv_heads", "head_dim", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads != 0:
            raise ValueError(f"heads must be a multiple of kv_heads = {self.kv_heads}, got {self.heads}")
        if self.head_dim % 2 != 0:
            raise ValueError(f"head_dim must be even (rotary positions turn pairs), got {self.head_dim}")

    @property
    def rope(self) -> dict[str, Any]:
        """Parameters of the rotary positions, by Hugging Face's names."""
        kind = self.rope_scaling.get("rope_type", self.rope_scaling.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            text = f"rope_scaling must be of type default, linear or llama3, got {kind!r}"
            raise NotImplementedError(text)
        return {**self.rope_scaling, "rope_theta": self.rope_theta, "rope_type": kind}


def sized(layers: int, heads: int, embed: int) -> LlamaConfig:
    """Return a byte-level model's sizes, with as many key/value heads as query heads and with ``qk_norm``."""
    if heads > 0 and embed % (2 * heads) != 0:
        raise ValueError(
            f"embed must be a multiple of 2 * heads = {2 * heads} (rotary positions turn pairs), got {embed}"
        )
    return LlamaConfig(
        layers=layers, heads=heads, kv_heads=heads, head_dim=embed // max(1, heads), embed=embed,
        # three matrices of this size have as many weights as two of 4 * embed
        hidden=32 * max(1, round(embed * 8 / 3 / 32)), qk_norm=True,
    )  # fmt: skip


PRESETS = {
    "tiny": sized(3, 4, 128),
    "small": sized(6, 6, 384),
    "medium": sized(12, 12, 768),
    "large": sized(24, 16, 1024),
}


class Past:
    """Keys and values of one sequence, (1, seqlen, heads, head_dim) for each layer."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    @property
    def seqlen(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values to a layer and return all of the layer."""
        if layer == len(self.layers):
            self.layers.append((k, v))
        else:
            earlier_k, earlier_v = self.layers[layer]
            self.layers[layer] = torch.cat([earlier_k, k], 1), torch.cat([earlier_v, v], 1)
        return self.layers[layer]


class Llama(nn.Module):
    """Llama model: tokens (...) int64 -> logits (..., vocabulary).

    Layers compute ``attention`` unless a call passes its own ``attend``.
    """

    frequencies: Tensor

    def __init__(self, config: LlamaConfig, attention: Attention = flashtile):
        super().__init__()
        self.config, self.attention = config, attention
        self.embed_tokens = nn.Embedding(config.vocabulary, config.embed)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.embed, config.vocabulary, bias=False)
        if config.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.frequencies = rotary_frequencies(config.rope, config.head_dim)
        self._initialise()

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, attend: Attend | None = None
    ) -> Tensor:
        """Return the logits of every token; for the arguments see :meth:`hidden`."""
        return self.lm_head(self.hidden(tokens, positions, attend))

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, attend: Attend | None = None) -> Tensor:
        """Return the hidden states (..., embed) that ``lm_head`` turns into logits.

        Args:
            tokens: (...) int64; (batch, seqlen) without ``attend``.
            positions: (...) int64, position in the sequence; None: 0, 1, ... in the last dimension.
            attend: computes the attention of each layer; None uses the model's own over only these tokens.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        angles = positions[..., None, None].float() * self.frequencies.to(positions.device)
        rotation = angles.cos(), angles.sin()  # (..., 1, head_dim / 2) float32
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotation, self.attention if attend is None else partial(attend, i))
        return self.norm(x)

    @torch.no_grad()
    def extended(self, tokens: list[int], past: Past) -> Tensor:
        """Append ``tokens`` to the sequence in ``past`` and return the logits (vocabulary) after them."""
        device = self.embed_tokens.weight.device
        positions = torch.arange(past.seqlen, past.seqlen + len(tokens), device=device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attention(q, *past.extended(layer, k, v))

        hidden = self.hidden(torch.tensor([tokens], device=device), positions, attend)
        return self.lm_head(hidden[0, -1])

    def _initialise(self) -> None:
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
                if name.endswith(("o_proj", "down_proj")):  # every layer starts as the identity
                    nn.init.zeros_(module.weight)


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.embed, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.embed, eps=config.norm_eps)
        self.self_attn = SelfAttention(config)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class SelfAttention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.embed, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.embed, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.embed, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.embed, bias=False)
        norm = partial(nn.RMSNorm, config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

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
    """Apply rotary positions (Su et al. 2021) to x (..., heads, head_dim) float32.

    The two halves of head_dim are the coordinates of the rotated pairs.
    """
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
