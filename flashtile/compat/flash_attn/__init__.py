"""FlashAttention-2's package, with the interface of its version ``__version__``."""

from flashtile.compat.flash_attn.flash_attn_interface import *  # noqa: F403
from flashtile.compat.flash_attn.flash_attn_interface import __all__ as __all__

__version__ = "2.8.4"
