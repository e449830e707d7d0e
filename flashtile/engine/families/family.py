"""The type of a declaration of a model family, and the fields that all families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Experts:
    """Where a mixture of experts is stored.

    Attributes:
        block: name of the mixture in a layer.
        router: name of the router in the block. The router has a bias if ``stacked``.
        gate_up, down: names of each expert's projections in ``experts.NUMBER``. Ignored if ``stacked``.
        stacked: one tensor (experts, inputs, outputs) has the projections of all experts. Gate and up columns
            alternate, and projections have biases (gpt-oss).
        inner: the field of ``config.json`` with the intermediate size of an expert.
    """

    block: str = "mlp"
    router: str = "gate"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    stacked: bool = False
    inner: str = "intermediate_size"


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama.

    Attributes:
        fields: the fields that the family's config class in Transformers has, with the class's defaults.
            Any other field of ``config.json`` is ignored.
        qkv, gate_up: names of the projections to queries, keys and values, and to the MLP's gate and up
            halves. A single name holds all of them, one after another (Phi-3).
        norms: names of a layer's norms (before attention, after attention, before MLP, after MLP). None: the
            layer has no such norm. Norms after attention and MLP are applied before the residual is added.
        qkv_bias, o_bias: whether the attention's projections have a bias. None: ``attention_bias`` decides.
        qk_norm: "head" for RMSNorm of each query and key head before the rotation (Qwen 3), "all" for RMSNorm
            over all heads together (OLMo 2), or "".
        unit_norm: norms multiply by ``1 + weight``, and embeddings by ``sqrt(hidden_size)`` (Gemma).
        full_every: if n, every n-th layer has no sliding window. 0: all layers have the window. The fields
            ``layer_types`` and ``sliding_window_pattern`` take precedence.
        local_rope: ``rope_theta`` and scaling apply to layers without a window. Layers with a window have the
            base ``rope_local_base_freq`` (Gemma 3).
        rope_types: the usual names of rope types that the family's checkpoints name differently.
        sinks: each head has a learned attention sink.
        experts: the MLP is a mixture of experts, at least in some layers.
    """

    fields: Mapping[str, Any] = field(compare=False)
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    norms: tuple[str | None, ...] = ("input", None, "post_attention", None)
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: str = ""
    unit_norm: bool = False
    full_every: int = 0
    local_rope: bool = False
    rope_types: Mapping[str, str] = field(default_factory=dict, compare=False)
    sinks: bool = False
    experts: Experts | None = None


COMMON = {
    "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "intermediate_size": 11008,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "rope_parameters": None, "rope_theta": 10000.0, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
"""Fields of all families, with defaults that most of them share."""
