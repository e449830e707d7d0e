"""A small GPT: pre-norm RMSNorm, normalised queries and keys, rotary positions, SwiGLU, tied embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile.demo.attention import Attention
from flashtile.demo.corpus import VOCABULARY


@dataclass(frozen=True)
class GPTConfig:
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


PRESETS = {
    "tiny": GPTConfig(layers=3, heads=4, embed=128),
    "small": GPTConfig(layers=6, heads=6, embed=384),
    "medium": GPTConfig(layers=12, heads=12, embed=768),
    "large": GPTConfig(layers=24, heads=16, embed=1024),
}

KeyValue = tuple[Tensor, Tensor]
"""What a layer remembers of earlier tokens: k and v, each (batch, seqlen, heads, head_dim)."""


class GPT(nn.Module):
    """tokens (batch, seqlen) int64 -> logits (batch, seqlen, 256)."""

    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.embed)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 * module.in_features**-0.5)
                if name.endswith((".out", ".down")):  # every block starts as the identity
                    nn.init.zeros_(module.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        logits, _ = self.extend(tokens, [])
        return logits

    def extend(self, tokens: Tensor, past: list[KeyValue]) -> tuple[Tensor, list[KeyValue]]:
        """Logits of ``tokens`` that follow what ``past`` remembers (which may be empty), and the new past."""
        earlier = past[0][0].shape[1] if past else 0
        rotation = rotary(earlier, tokens.shape[1], self.config.head_dim, tokens.device)
        x = self.embedding(tokens)
        present = []
        for i, block in enumerate(self.blocks):
            x, key_value = block(x, rotation, past[i] if past else None)
            present.append(key_value)
        return F.linear(self.norm(x), self.embedding.weight), present


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.norm_attend, self.norm_mlp = nn.RMSNorm(config.embed), nn.RMSNorm(config.embed)
        self.attend = SelfAttention(config, attention)
        self.mlp = SwiGLU(config.embed)

    def forward(self, x: Tensor, rotation: Tensor, past: KeyValue | None) -> tuple[Tensor, KeyValue]:
        attended, present = self.attend(self.norm_attend(x), rotation, past)
        x = x + attended
        return x + self.mlp(self.norm_mlp(x)), present


class SelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.heads, self.attention = config.heads, attention
        self.qkv = nn.Linear(config.embed, 3 * config.embed, bias=False)
        self.norm_q, self.norm_k = nn.RMSNorm(config.head_dim), nn.RMSNorm(config.head_dim)
        self.out = nn.Linear(config.embed, config.embed, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, past: KeyValue | None) -> tuple[Tensor, KeyValue]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q = rotate(self.norm_q(q.float()), rotation).to(v.dtype)
        k = rotate(self.norm_k(k.float()), rotation).to(v.dtype)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        return self.out(self.attention(q, k, v).flatten(-2)), (k, v)


class SwiGLU(nn.Module):
    def __init__(self, embed: int):
        super().__init__()
        hidden = 32 * round(embed * 8 / 3 / 32)  # three matrices of this size hold what two of 4 * embed do
        self.gate_up = nn.Linear(embed, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def rotary(first: int, seqlen: int, head_dim: int, device: torch.device) -> Tensor:
    """(2, seqlen, 1, head_dim / 2) float32: cosines and sines of positions ``first`` on (Su et al. 2021)."""
    frequencies = 10000.0 ** -torch.arange(0, 1, 2 / head_dim, device=device)
    angles = torch.outer(torch.arange(first, first + seqlen, device=device).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()]).unsqueeze(2)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn x (batch, seqlen, heads, head_dim) float32, whose halves are the two coordinates of each pair."""
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
