"""Products with a weight in float64, and what plain PyTorch makes of them, for the error rule."""

from __future__ import annotations
