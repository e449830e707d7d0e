"""Chained hashes of full blocks: each hash covers a block's tokens and all tokens before them.

Keys and values of a token depend on every earlier token, so a block can be reused only if the whole prefix is
equal: ``hash[j] = H(hash[j - 1] + tokens of block j)``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

HASH_BYTES = 16
"""Two different prefixes share a hash with probability 2^-128, so contents are not compared."""


def block_hashes(tokens: array[int], block_size: int, salt: bytes = b"") -> Iterator[bytes]:
    """Yield the hash of each full block of ``tokens``, in order. A last partial block has none.

    Args:
        tokens: the sequence's tokens.
        block_size: tokens per block.
        salt: part of every hash, for anything else that keys and values depend on (an adapter, an image) or
            that separates tenants.

    Raises:
        TypeError: ``salt`` is not bytes, even if there is no full block.
    """
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be bytes, got {type(salt).__name__}")
    block_hash = blake2b(salt, digest_size=HASH_BYTES).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = tokens[start : start + block_size].tobytes()
        block_hash = blake2b(block_hash + content, digest_size=HASH_BYTES).digest()
        yield block_hash
