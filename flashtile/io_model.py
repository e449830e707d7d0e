"""Public name of :mod:`flashtile.learn.io_model`, the cost of a call before it runs.

``import flashtile.io_model.MODULE`` finds its modules as well.
"""

import sys

from flashtile.learn.io_model import (
    CARDS,
    MODELS,
    Call,
    Card,
    Estimate,
    Model,
    Product,
    attention_memory,
    cached_tokens,
    card_of_device,
    closed_forms,
    decode,
    estimate,
    estimates,
    find_card,
    find_model,
    hopper,
    kernels,
    l2,
    longest_sequence,
    measured_card,
    memory,
    models,
    prompt_memory,
)

__all__ = [
    "CARDS",
    "MODELS",
    "Call",
    "Card",
    "Estimate",
    "Model",
    "Product",
    "attention_memory",
    "cached_tokens",
    "card_of_device",
    "estimates",
    "find_card",
    "find_model",
    "longest_sequence",
    "measured_card",
    "prompt_memory",
]

for _module in (
    closed_forms,
    decode,
    estimate,
    hopper,
    kernels,
    l2,
    memory,
    models,
):
    sys.modules[_module.__name__.replace(".learn.", ".")] = _module
