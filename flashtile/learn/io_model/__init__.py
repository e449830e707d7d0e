"""Costs of attention before anything runs: bytes, FLOPs, time floors and memory of a call on a card.

from flashtile.io_model import Call, estimates, find_card

for estimate in estimates(Call(1, 4096, 4096, 16, 16, 128, window_right=0), find_card("h100")):
    print(estimate.algorithm, estimate.bound, estimate.floor_seconds)
"""

from flashtile.hardware.calls import Call
from flashtile.hardware.cards import CARDS, Card, card_of_device, find_card
from flashtile.hardware.timing import measured_card
from flashtile.learn.io_model.estimate import Estimate, estimates
from flashtile.learn.io_model.memory import (
    attention_memory,
    cached_tokens,
    longest_sequence,
    prompt_memory,
)
from flashtile.learn.io_model.models import MODELS, Model, Product, find_model

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
