"""The model families: how each ``model_type`` differs from Llama.

A declaration has the fields and defaults of the family's config class in Transformers, the names of its
weights, and switches. :mod:`flashtile.engine.config` reads ``config.json`` by it,
:mod:`flashtile.engine.weights` derives the names and shapes of the weights, and :mod:`flashtile.engine.model`
computes the layers. To add a family, add its entry to ``FAMILIES``.
"""

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


_COMMON = {
    "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": None, "head_dim": None, "intermediate_size": 11008,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "rope_parameters": None, "rope_theta": 10000.0, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
"""Fields of all families, with defaults that most of them share."""

# Fields that families of one maker share.
_MISTRAL = {
    **_COMMON, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "sliding_window": 4096, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
_QWEN = {
    **_COMMON, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_GEMMA = {
    **_COMMON, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
    "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "final_logit_softcapping": None, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
_GEMMA_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")

FAMILIES: dict[str, Family] = {
    # Llama 2 and 3, from which the other families differ.
    "llama": Family(
        {**_COMMON, "attention_bias": False, "mlp_bias": False, "eos_token_id": 2, "bos_token_id": 1}
    ),
    # Mistral: a sliding window in every layer.
    "mistral": Family({**_MISTRAL, "layer_types": None}),
    # Mixtral: Mistral with experts in every layer.
    "mixtral": Family(
        {
            **_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        experts=Experts("block_sparse_moe", gate_up=("w1", "w3"), down="w2"),
    ),
    # Qwen 2 and 2.5: biases of queries, keys and values, and a window in later layers.
    "qwen2": Family(_QWEN, qkv_bias=True, o_bias=False),
    # Qwen 3: queries and keys are normalised per head.
    "qwen3": Family({**_QWEN, "head_dim": 128, "attention_bias": False}, qk_norm="head"),
    # Qwen3-MoE: Qwen 3 with experts, at least in some layers.
    "qwen3_moe": Family(
        {
            **_COMMON, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 24, "num_key_value_heads": 4, "max_position_embeddings": 32768,
            "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
            "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
        },
        qk_norm="head", experts=Experts(inner="moe_intermediate_size"),
    ),
    # Gemma 2: soft caps, norms after attention and MLP, and a window in every other layer.
    "gemma2": Family(
        {
            **_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norms=_GEMMA_NORMS, unit_norm=True, full_every=2,
    ),
    # Gemma 3 of text: layers with a window have their own rotary base; queries and keys are normalised.
    "gemma3_text": Family(
        {
            **_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
        },
        norms=_GEMMA_NORMS, qk_norm="head", unit_norm=True, local_rope=True,
    ),
    # OLMo 2: norms only after attention and MLP; queries and keys are normalised over all heads.
    "olmo2": Family(
        {
            **_COMMON, "vocab_size": 50304, "rms_norm_eps": 1e-5, "attention_bias": False,
            "eos_token_id": 50279,
        },
        norms=(None, "post_attention", None, "post_feedforward"), qk_norm="all",
    ),
    # SmolLM 3: every fourth layer has no rotary embedding.
    "smollm3": Family(
        {
            **_COMMON, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
            "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "rope_theta": 2000000.0,
            "use_sliding_window": False, "sliding_window": None, "layer_types": None, "no_rope_layers": None,
            "no_rope_layer_interval": 4, "eos_token_id": 128001, "bos_token_id": 128000,
        }
    ),
    # Phi-3 and Phi-4-mini: joined projections and LongRoPE, which may rotate a part of each head.
    "phi3": Family(
        {
            **_COMMON, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0, "sliding_window": None, "eos_token_id": 32000, "bos_token_id": 1,
        },
        qkv=("qkv_proj",), gate_up=("gate_up_proj",), rope_types={"su": "longrope", "yarn": "longrope"},
    ),
    # gpt-oss: attention sinks, a window in every other layer, YaRN, and experts.
    "gpt_oss": Family(
        {
            **_COMMON, "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True,
            "rope_theta": 150000.0, "sliding_window": 128, "layer_types": None, "num_local_experts": 128,
            "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        full_every=2, sinks=True, experts=Experts(router="router", stacked=True),
    ),
}  # fmt: skip
"""The families, keyed by ``model_type``."""
