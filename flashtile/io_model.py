"""Public name of :mod:`flashtile.learn.io_model`, the cost of a call before it runs.

``import flashtile.io_model.MODULE`` finds its modules as well.
"""

import sys

from flashtile.learn.io_model import *  # noqa: F403
from flashtile.learn.io_model import __all__ as __all__
from flashtile.learn.io_model import closed_forms, decode, estimate, hopper, kernels, l2, memory, models

for _module in (closed_forms, decode, estimate, hopper, kernels, l2, memory, models):
    sys.modules[_module.__name__.replace(".learn.", ".")] = _module
