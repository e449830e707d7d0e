"""The demonstration's models by their public name: :mod:`flashtile.tools.demo`.

``import flashtile.demo.MODULE`` finds its modules as well.
"""

import sys

from flashtile.tools.demo import (
    attention,
    corpus,
    huggingface,
    llama,
    training,
)

__all__ = ["attention", "corpus", "huggingface", "llama", "training"]

for _module in (attention, corpus, huggingface, llama, training):
    sys.modules[_module.__name__.replace(".tools.", ".")] = _module
