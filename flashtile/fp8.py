"""Attention in FP8 (e4m3): quantisation with scales by block, head or tensor, and incoherent processing.

Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), section 3.3. Gradients are computed in 16 bits.
Pickles of version 0.1 need the module ``flashtile.fp8.quantized``.
"""

import sys

from flashtile.api.fp8 import attention, quantize
from flashtile.problems import quantized
from flashtile.problems.quantized import Quantized
from flashtile.testing import fp8 as testing

__all__ = ["Quantized", "attention", "quantize"]

sys.modules[f"{__name__}.quantized"] = quantized
sys.modules[f"{__name__}.testing"] = testing
