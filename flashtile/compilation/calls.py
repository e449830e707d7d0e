"""Recorded calls: a JSON file has the signature of each call, which determines the kernels of the call."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashtile.files import as_path, replace_file
from flashtile.op.operation import OPERATIONS, Remembered, remembering
from flashtile.operators import attention, decode, fp8, linear

REGISTERED = attention, decode, fp8, linear
"""Importing these modules declares all operations that a recorded call can name."""


@dataclass(frozen=True)
class Signature:
    """Shape, strides (in elements) and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: Tensor) -> Signature:
        name = str(tensor.dtype).removeprefix("torch.")
        return Signature(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), name)

    def on_meta(self) -> Tensor:
        """Return a tensor without memory that has this signature."""
        return torch.empty_strided(
            self.shape, self.stride, dtype=getattr(torch, self.dtype), device=torch.device("meta")
        )


@dataclass(frozen=True)
class Call:
    """A call of an operation.

    Args:
        operation: name of the operator in ``torch.ops.flashtile``.
        arguments: (name, value) of each argument that is not None. A tensor is given by its signature.
    """

    operation: str
    arguments: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(operation: str, values: tuple) -> Call:
        """Return the description of a call. ``values`` are the operator's arguments, in order."""
        names = OPERATIONS[operation].arguments
        given = (
            (name, Signature.of(value) if isinstance(value, Tensor) else value)
            for name, value in zip(names, values, strict=True)
            if value is not None
        )
        return Call(operation, tuple(given))

    def on_meta(self) -> tuple[tuple, Any, Any]:
        """Return the operation's (tensors, optional tensors, options), with tensors on torch's "meta" device.

        Raises:
            ValueError: there is no such operation or argument in this version.
        """
        if self.operation not in OPERATIONS:
            raise ValueError(
                f"operation must be one of {', '.join(sorted(OPERATIONS))}, got {self.operation!r}"
            )
        operation, given = OPERATIONS[self.operation], dict(self.arguments)
        if unknown := given.keys() - set(operation.arguments):
            raise ValueError(f"{self.operation} has no argument {', '.join(sorted(unknown))}")
        needed = {name for name in operation.tensors if not name.endswith("?")}
        if missing := sorted(n for n in needed if not isinstance(given.get(n), Signature)):
            raise ValueError(f"{self.operation} must have the tensors {', '.join(missing)}")
        values = [given.get(name) for name in operation.arguments]
        made = (value.on_meta() if isinstance(value, Signature) else value for value in values)
        tensors, optional, options = operation.split(tuple(made))
        return operation.normalized(tensors), optional, options


def resized(call: Call, batch: int, tokens: int, longest: int) -> Call:
    """Return a copy of an attention call, or of a write to a cache, with other sizes.

    Args:
        call: the call to copy. Its tokens are the first dimension of its tensors, except for ``prior_lse``.
        batch: number of sequences.
        tokens: number of new tokens of all sequences.
        longest: largest number of new tokens of a sequence.
    """
    first = dict.fromkeys(("q", "k", "v", "q_rotated", "out", "slot_mapping", "prior_out"), tokens)
    first |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new"), batch + 1)
    first |= dict.fromkeys(("cache_seqlens", "cache_leftpad", "block_table", "seqused_k"), batch)
    arguments = []
    for name, value in call.arguments:
        if isinstance(value, Signature) and name in first:
            value = replace(value, shape=(first[name], *value.shape[1:]))
        elif name == "prior_lse":
            value = replace(value, shape=(value.shape[0], tokens), stride=(tokens, 1))
        elif name in ("max_seqlen_q", "max_seqlen_k", "max_seqlen_k_new"):
            value = longest
        arguments.append((name, value))
    return Call(call.operation, tuple(arguments))


def sizes_between(least: int, most: int, parts: int = 2) -> list[int]:
    """Return sizes from ``least`` to ``most`` in ascending order, by which kernels are found.

    These are the powers of two, ``parts - 1`` evenly spaced sizes between successive powers, and ``most``.
    """
    powers = (2**i for i in range(most.bit_length()))
    found = {power + power * part // parts for power in powers for part in range(parts)}
    return sorted(size for size in {*found, most} if least <= size <= most)


def calls_of(remembered: Remembered) -> list[Call]:
    """Return the calls of :func:`flashtile.op.operation.remembering`, without duplicates."""
    found = (
        Call.of(operation.full_name, operation.flat_of_all(tensors, optional, options))
        for operation, tensors, optional, options in remembered
    )
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def record_calls(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record the calls of flashtile inside the context, and write their signatures to a JSON file.

    ``flashtile compile --calls PATH`` compiles the kernels of these calls, for any GPU. Neither this command
    nor the recorded program needs a GPU. The contents of tensors are not written. The file is also written if
    the program raises an error.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: there is no folder for the file.

    Examples:
        >>> import os, tempfile
        >>> q, k, v = torch.randn(3, 1, 32, 4, 64).unbind()
        >>> path = os.path.join(tempfile.mkdtemp(), "calls.json")
        >>> with flashtile.record_calls(path):
        ...     out = flashtile.attention(q, k, v, causal=True)
        >>> [call.operation for call in flashtile.compilation.calls.read_calls(path)]
        ['forward']
    """
    if not as_path(path).absolute().parent.is_dir():
        raise ValueError(f"path must be in a folder that exists, got {path}")
    with remembering() as remembered:
        try:
            yield
        finally:
            write_calls(path, calls_of(remembered))


def write_calls(path: str | os.PathLike[str], calls: list[Call]) -> None:
    """Write calls as JSON."""
    entries = [
        {
            "operation": call.operation,
            "arguments": {name: _as_json(value) for name, value in call.arguments},
        }
        for call in calls
    ]
    replace_file(as_path(path), json.dumps({"calls": entries}, indent=1) + "\n")


def read_calls(path: str | os.PathLike[str]) -> list[Call]:
    """Read calls that :func:`record_calls` wrote.

    Raises:
        ValueError: the file does not hold calls.
    """
    try:
        entries = json.loads(as_path(path).read_text("utf-8"))["calls"]
        return [
            Call(entry["operation"], tuple(map(_argument, entry["arguments"].items()))) for entry in entries
        ]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"path must be a file of recorded calls, got {path}: {error}") from None


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return vars(value) if isinstance(value, Signature) else value


def _argument(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    if not isinstance(value, dict):
        return name, tuple(value) if isinstance(value, list) else value
    if not isinstance(getattr(torch, value["dtype"], None), torch.dtype):
        raise ValueError(f"{name} has dtype {value['dtype']!r}, which torch does not have")
    if value.keys() == {"dtype"}:
        return name, getattr(torch, value["dtype"])
    return name, Signature(tuple(value["shape"]), tuple(value["stride"]), value["dtype"])
