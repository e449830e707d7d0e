"""Attention in FP8 (e4m3): quantisation with scales by block, head or tensor, and incoherent processing.

Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), section 3.3. Forward only.
"""

from flashtile.api.fp8 import attention, quantize
from flashtile.problems.quantized import Quantized

__all__ = ["Quantized", "attention", "quantize"]
