"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): its tables and scalings for long contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rotary_frequencies(rope: Mapping[str, Any], head_dim: int, positions: int = 0) -> Tensor:
    """Return the angle in radians by which each pair of dimensions is rotated per position.

    The result is (rotary_dim / 2,) float32 on the CPU. ``rotary_dim`` is ``head_dim`` unless ``rope`` has it.

    Args:
        rope: ``rope_theta``, ``rope_type`` ("default", "linear", "dynamic", "llama3", "yarn" or "longrope")
            and the parameters of this type, under Hugging Face's names. With the type "none" nothing is
            rotated.
        head_dim: size of a head.
        positions: maximum length of a sequence. Types "dynamic" and "longrope" choose frequencies by it.
            Transformers chooses them by the current length, although the cache then holds keys that were
            rotated at other frequencies.
    """
    kind, base, head_dim = rope["rope_type"], rope.get("rope_theta", 1.0), rope.get("rotary_dim", head_dim)
    if kind == "none":
        return torch.zeros(head_dim // 2, device="cpu")
    if kind == "dynamic":
        stretch = max(1.0, positions / rope["original_max_position_embeddings"])
        base *= (rope["factor"] * (stretch - 1) + 1) ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    frequencies = 1.0 / base**exponents
    if kind == "longrope":
        name = "long_factor" if positions > rope["original_max_position_embeddings"] else "short_factor"
        return frequencies / torch.tensor(rope[name], device="cpu")
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    elif kind == "yarn":
        kept = 1 - _yarn_ramp(rope, head_dim)
    elif kind in ("default", "dynamic"):
        return frequencies
    else:
        raise NotImplementedError(f"rope_type is not known, got {kind!r}")
    return frequencies * (kept + (1 - kept) / rope["factor"])


def rotary_tables(rope: Mapping[str, Any], head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """Return the tables (cos, sin), each (positions, rotary_dim / 2) float32 on the CPU."""
    frequencies = rotary_frequencies(rope, head_dim, positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device="cpu"), frequencies)
    scale = 1.0
    if rope["rope_type"] == "yarn":
        scale = rope.get("attention_factor") or max(1.0, 0.1 * math.log(rope["factor"]) + 1.0)
    elif rope["rope_type"] == "longrope":
        scale = rope["attention_factor"]
    return angles.cos() * scale, angles.sin() * scale


def _yarn_ramp(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Return YaRN's ramp (head_dim / 2,) (Peng et al. 2023, arXiv:2309.00071, section 3.2).

    It is 0 for high frequencies, which are kept, and 1 for low frequencies, which are divided by ``factor``.
    """
    length, base = rope["original_max_position_embeddings"], rope["rope_theta"]

    def pair(turns: float) -> float:
        """Return the (fractional) index of the pair that makes ``turns`` turns within ``length`` tokens."""
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(rope["beta_fast"]), pair(rope["beta_slow"])
    if rope["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if high == low else high
    return ((torch.arange(head_dim // 2, device="cpu", dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
