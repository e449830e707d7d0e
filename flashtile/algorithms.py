"""Public name of the papers' algorithms, which are in :mod:`flashtile.learn.algorithms`.

``import flashtile.algorithms.MODULE`` finds its modules as well.
"""

import sys
from types import ModuleType

from flashtile.learn.algorithms import *  # noqa: F403
from flashtile.learn.algorithms import __all__ as __all__
from flashtile.learn.algorithms import (  # noqa: F401
    call,
    flash1,
    flash2,
    flash3,
    flash3_fp8,
    flash3_schedule,
    flash_decoding,
    flops,
    memory,
    online_softmax,
    paged,
    product_chain,
    reservation,
    standard,
    tiled_matmul,
    trace,
    unified_max,
    warp_split,
    warps,
)

for _name, _module in list(globals().items()):
    if isinstance(_module, ModuleType) and _module is not sys:
        sys.modules[f"{__name__}.{_name}"] = _module
