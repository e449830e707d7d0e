"""Hashes of full blocks, chained: one hash stands for a block's tokens and for all tokens before them.

Keys and values of a token depend on every earlier token, so that a block can be used again only where the
whole prefix is equal: ``hash[j] = H(hash[j - 1] + tokens of block j)``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import blake2b

HASH_BYTES = 16
"""Two different prefixes share a hash with probability 2^-128: contents are not compared."""


def block_hashes(tokens: array[int], block_size: int, salt: bytes = b"") -> Iterator[bytes]:
    """The hash of each full block of ``tokens``, in order; what does not fill the last block is left out.

    ``salt`` is what else decides the keys and values (an adapter, an image, a tenant): part of every hash.
    TypeError if it is not bytes, even where there is no full block.
    """
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be bytes, got {type(salt).__name__}")
    block_hash = blake2b(salt, digest_size=HASH_BYTES).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = tokens[start : start + block_size].tobytes()
        block_hash = blake2b(block_hash + content, digest_size=HASH_BYTES).digest()
        yield block_hash
