"""Mixtral: Mistral with experts in every layer."""

from flashtile.engine.families.family import Experts, Family
from flashtile.engine.families.mistral import FIELDS

FAMILY = Family(
    {
        **FIELDS, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    experts=Experts("block_sparse_moe", gate_up=("w1", "w3"), down="w2"),
)  # fmt: skip
