"""Differences between vLLM's releases: the shape of a layer's cache, and what CUDA graphs may replay.

In vLLM 0.25 the shape is (num_blocks, 2, block_size, heads_kv, head_size). From 0.26 on it is (num_blocks,
heads_kv, block_size, 2 * head_size), with keys before values. From 0.29 on vLLM does not call the backend for
this shape.
"""

from __future__ import annotations

from torch import Tensor
from vllm import version
from vllm.v1.attention.backend import AttentionCGSupport

from flashtile.integrations.vllm import private

RELEASE: tuple[int, int] = version.__version_tuple__[:2]
"""Major and minor number of the installed vLLM. A checkout without tags counts as the newest, (99, 0)."""
if RELEASE == (0, 0):
    RELEASE = (99, 0)

IS_PACKED = RELEASE >= (0, 26)
"""Whether the key and the value of a token and head are next to each other in one row of the cache."""


def cache_shape(num_blocks: int, block_size: int, heads_kv: int, head_size: int) -> tuple[int, ...]:
    """Return the shape of a layer's cache, before :func:`stride_order` permutes it in memory."""
    if IS_PACKED:
        return num_blocks, heads_kv, block_size, 2 * head_size
    return num_blocks, 2, block_size, heads_kv, head_size


def stride_order(with_layers: bool) -> tuple[int, ...]:
    """Return the order of the cache's dimensions in memory, for the layout that the user of vLLM has chosen.

    Args:
        with_layers: whether the cache has a leading dimension of layers.
    """
    heads_first = private.get_kv_cache_layout() == "HND"
    if IS_PACKED:
        if with_layers:
            return (1, 2, 0, 3, 4) if heads_first else (1, 0, 3, 2, 4)
        return (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)
    if with_layers:
        return (1, 4, 0, 2, 3, 5) if heads_first else (1, 0, 2, 3, 4, 5)
    return (0, 1, 3, 2, 4) if heads_first else (0, 1, 2, 3, 4)


def keys_and_values(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a layer's cache, views (num_blocks, block_size, heads_kv, head_size)."""
    if kv_cache.dim() == 5:
        keys, values = kv_cache.unbind(1)
    else:
        tokens = kv_cache.transpose(1, 2)
        keys, values = tokens[..., :head_size], tokens[..., head_size:]
    return keys, values


def graph_support() -> AttentionCGSupport:
    """Return which batches a captured CUDA graph of the backend may replay.

    The kernels read all lengths on the device. So a graph may be replayed with any lengths, as long as no
    sequence has more queries than at capture. Graphs of decoding steps meet this condition in every release.
    Graphs of mixed batches meet it only from vLLM 0.33 on. In earlier releases, Model Runner V2 captures them
    with one query per sequence and replays them with more.
    """
    return AttentionCGSupport.ALWAYS if RELEASE >= (0, 33) else AttentionCGSupport.UNIFORM_BATCH
