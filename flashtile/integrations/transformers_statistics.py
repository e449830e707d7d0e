"""Statistics of the scores of a model's layers, collected while Transformers runs the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtile.api import attention as api
from flashtile.checks.conversions import check_flag


class Statistics:
    """Statistics of the layers that ran inside :func:`statistics`, by module, in the order of first calls.

    Reading them raises a ValueError if no layer with flashtile's attention has run inside.
    """

    def __init__(self, with_entropy: bool) -> None:
        self.with_entropy, self._ran = with_entropy, False
        self._max_logits: dict[torch.nn.Module, Tensor] = {}
        self._entropy: dict[torch.nn.Module, Tensor] = {}

    @property
    def max_logits(self) -> dict[torch.nn.Module, Tensor]:
        """(heads,): the largest scores of all calls, without gradient."""
        self._check_ran()
        return self._max_logits

    @property
    def entropy(self) -> dict[torch.nn.Module, Tensor]:
        """(batch, heads, seqlen_q): the entropy of each row in the last call, 0 for padded queries.

        It is differentiable. Empty without ``statistics(entropy=True)``.
        """
        self._check_ran()
        return self._entropy

    def _check_ran(self) -> None:
        if not self._ran:
            raise ValueError(
                'model must have attn_implementation="flashtile" and run inside statistics(), but no layer '
                'collected any: call register() and model.set_attn_implementation("flashtile"). Of several '
                "contexts, only the innermost collects. Flash code of a model's own (Falcon) collects none"
            )

    def _attend(
        self, module: torch.nn.Module, shape: torch.Size, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Any:
        """Compute attention of a layer, and record its statistics. ``shape`` is that of the layer's query."""
        out, max_logits, *found = api.attention(
            q, k, v, return_max_logits=True, return_entropy=self.with_entropy, **options
        )
        self._ran = True
        largest = max_logits.amax(0)  # over sequences
        earlier = self._max_logits.get(module)
        self._max_logits[module] = largest if earlier is None else torch.maximum(earlier, largest)
        if self.with_entropy:
            rows, *found = found
            if rows.dim() == 2:  # the batch was computed as packed sequences
                rows = rows.unflatten(1, (shape[0], shape[2])).transpose(0, 1)
            self._entropy[module] = rows
        return (out, *found) if found else out


_active: list[Statistics] = []


def recorder(module: torch.nn.Module, query: Tensor) -> Callable[..., Any] | None:
    """Return the ``record`` of a layer's call; None outside of :func:`statistics`.

    ``query`` is (batch, heads, seqlen, head_dim).
    """
    if not _active:
        return None
    if torch.compiler.is_compiling():
        # A graph cannot hold the records. Without fullgraph, Dynamo then runs the layer as it is.
        raise NotImplementedError("statistics() must not be used around a model compiled with fullgraph=True")
    return partial(_active[-1]._attend, module, query.shape)


def attention(
    q: Tensor, k: Tensor, v: Tensor, record: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """Compute :func:`flashtile.attention`, by ``record`` if given, which also keeps the statistics."""
    return (api.attention if record is None else record)(q, k, v, **options)


@contextlib.contextmanager
def statistics(entropy: bool = False) -> Iterator[Statistics]:
    """Collect the largest scores of each layer and head, as QK-clip needs them, and the rows' entropy.

    Layers compute the statistics in the same pass as attention, of every call inside the context, in all
    threads. With gradient checkpointing, the backward pass must be inside as well.

    Args:
        entropy: also collect the entropy. With gradients, it can be a term of the loss.

    Yields:
        A :class:`Statistics`. Of several contexts, only the innermost one collects. Reading it raises a
        ValueError if no layer has collected, because the model has another attention.

    Raises:
        TypeError: ``entropy`` is not a bool.
        NotImplementedError: by a layer of a model compiled with ``fullgraph=True``, or over a paged cache
            (``generate_batch``). Without it, layers of a compiled model run uncompiled inside.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from flashtile.integrations.transformers import register, statistics
        >>> register()
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2,
        ... )
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="flashtile")
        >>> with statistics() as found:
        ...     loss = model(torch.tensor([[1, 2, 3]])).logits.logsumexp(-1).mean()
        >>> for layer, largest in found.max_logits.items():  # QK-clip: scale the weights of heads above 100
        ...     factors = 100 / largest.clamp(min=100)
        >>> layer.layer_idx, factors.shape
        (1, torch.Size([4]))
    """
    check_flag("entropy", entropy)
    found = Statistics(entropy)
    _active.append(found)
    try:
        yield found
    finally:
        _active.remove(found)
