"""Public name of the demonstration's modules, which are in :mod:`flashtile.tools.demo`.

``import flashtile.demo.MODULE`` finds its modules as well; ``huggingface`` is a former name of ``llama``.
"""

import sys

from flashtile.tools.demo import attention, corpus, llama, training

huggingface = llama

__all__ = ["attention", "corpus", "huggingface", "llama", "training"]

for _name in __all__:
    sys.modules[f"{__name__}.{_name}"] = globals()[_name]
