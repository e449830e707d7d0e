"""Public name of :mod:`flashtile.learn.io_model`, the cost of a call before it runs.

``import flashtile.io_model.MODULE`` finds its modules as well.
"""

import sys
from types import ModuleType

from flashtile.learn.io_model import *  # noqa: F403
from flashtile.learn.io_model import __all__ as __all__
from flashtile.learn.io_model import (  # noqa: F401
    closed_forms,
    decode,
    estimate,
    hopper,
    kernels,
    l2,
    memory,
    models,
)

for _name, _module in list(globals().items()):
    if isinstance(_module, ModuleType) and _module is not sys:
        sys.modules[f"{__name__}.{_name}"] = _module
