"""Digests of full blocks, chained: one digest stands for a block's tokens and for all tokens before them.

Keys and values of a token depend on every earlier token, so that a block can be used again only where the
whole prefix is equal: ``digest[j] = H(digest[j - 1] + tokens of block j)``.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from torch import Tensor

DIGEST_BYTES = 16
"""Two different prefixes share a digest with probability 2^-128: contents are not compared."""


def chain(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> Iterator[bytes]:
    """The digest of each full block of ``tokens``, in order; what does not fill the last block is left out.

    Args:
        tokens: token ids within int64.
        salt: what else decides the keys and values (an adapter, an image, a tenant): part of every digest.
    """
    digest = blake2b(salt, digest_size=DIGEST_BYTES).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size]).tobytes()
        digest = blake2b(digest + content, digest_size=DIGEST_BYTES).digest()
        yield digest


def as_tokens(tokens: Sequence[int] | Tensor) -> Sequence[int]:
    """A tensor's numbers as a list; anything else as it is.

    Raises:
        ValueError: a tensor that is not one-dimensional.
    """
    if not isinstance(tokens, Tensor):
        return tokens
    if tokens.dim() != 1:
        raise ValueError(f"tokens must have shape (seqlen,), got {tuple(tokens.shape)}")
    return tokens.tolist()
