"""Products with a weight for few rows of x, as in decoding, fused with the operations around them.

FlashDecoding++ (Hong et al. 2023, arXiv:2311.01282), sections 4 and 5. Forward only.
"""

from flashtile.api.explain_linear import LinearExplanation, explain
from flashtile.api.linear import BeforeNorm, linear, linear_before_norm, linear_qkv

__all__ = ["BeforeNorm", "LinearExplanation", "explain", "linear", "linear_before_norm", "linear_qkv"]
