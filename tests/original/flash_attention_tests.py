"""Run FlashAttention's own test files on flashtile, unmodified.

    git clone https://github.com/Dao-AILab/flash-attention
    python tests/original/flash_attention_tests.py --checkout flash-attention --suite 2 --sample 300
    python tests/original/flash_attention_tests.py --checkout flash-attention --suite 3 --sample 3000 \
        --group 8 --jobs 8 --seconds 540 --out 1.jsonl    # the same command goes on
    python tests/original/flash_attention_tests.py --add 1.jsonl 2.jsonl

The files import flashtile under FlashAttention's names (``flashtile.compat.install_as_flash_attn``). They
need einops. All their tensors are on the device "cuda". Without a GPU this script creates them on the CPU
instead, and the files see a GPU of compute capability 9.0. The long sequences of many cases take minutes
there, so give ``--sample`` and ``--limit``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import original_tests
import pytest

FILES = {2: "tests/test_flash_attn.py", 3: "hopper/test_flash_attn.py", 4: "tests/cute/test_flash_attn.py"}
CHECKOUT = "FLASH_ATTENTION_CHECKOUT"
"""Environment variable with the checkout whose helpers FlashAttention-4's file imports."""
_LENGTHS_ON_DEVICE = (
    "flashtile reads lengths on the device and writes NaN for such a sequence, without an error"
)
OTHER_SUBJECTS = {
    "test_flash_attn_kvcache_paged_block_table_bounds": _LENGTHS_ON_DEVICE,
    "test_flash_attn_generator_arg_must_be_none": "calls FlashAttention's C++ extension",
    "test_flash_attn_invalid_head_dim": "expects errors for head sizes that flashtile has",
    "test_flash3_bw_compatibility": "compares the schemas of FlashAttention's own torch operators",
}
"""Test functions that cannot pass, with reasons."""
RUN_TIME = frozenset(
    (
        "seqlen",
        "seqlen_q",
        "seqlen_k",
        "swap_sq_sk",
        "kvpacked",
        "add_unused_qkv",
        "has_batch_idx",
        "num_splits",
    )
)
"""Parameters of the files that choose no kernel, or only by the length of the sequences."""
_ONE_KEY = "the sequences have one key, for which the file allows no rounding error in {}"
KNOWN = {
    r"hopper/.*_output\[\d+-1-.*d[qv]_pt": _ONE_KEY.format("dq or dv"),
    r"_varlen_output\[.*0\.17-1-147-.*dropout_fraction": (
        "the share dropped of 3,000 scores is off by more than the file's 0.01 for one seed in nine"
    ),
    r"::test_flash_attn_(splitkv|output)\[.*\b(1-\d+-True|\d+-1-).*dv_pt": _ONE_KEY.format("dv"),
}
"""Failures that are no faults, by a regular expression of case and reason."""


def pytest_configure() -> None:
    """Prepare a process that collects or runs the files."""
    import torch

    from flashtile.compat import install_as_flash_attn

    if not torch.cuda.is_available():
        map_cuda_to_cpu()
    install_as_flash_attn()
    if checkout := os.environ.get(CHECKOUT):
        complete_flash_attention_4(Path(checkout))


def complete_flash_attention_4(checkout: Path) -> None:
    """Add what FlashAttention-4's file imports besides the public functions.

    These are its helpers for tests, from the checkout, and names that only compile its kernels.
    """
    from flashtile.compat.flash_attn.cute import interface

    def internal(*_: object, **__: object) -> None:
        pytest.skip("calls a function below autograd, whose arguments choose FlashAttention-4's kernels")

    for name in ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla"):
        setattr(interface, name, internal)
    cache = types.ModuleType("flash_attn.cute.cache_utils")
    cache.JITCache = dict  # type: ignore[attr-defined]
    sys.modules[cache.__name__] = cache
    path = checkout / "flash_attn/cute/testing.py"
    spec = importlib.util.spec_from_file_location("flash_attn.cute.testing", path)
    assert spec is not None
    assert spec.loader is not None
    helpers = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = helpers
    spec.loader.exec_module(helpers)


def map_cuda_to_cpu() -> None:
    """Make this process create tensors of the device "cuda" on the CPU, and show a GPU like an H200."""
    import torch
    from torch.utils._device import _device_constructors

    def on_host(value: Any) -> Any:
        if isinstance(value, str) and value.split(":")[0] == "cuda":
            return "cpu"
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

    def mapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def on_cpu(*arguments: Any, **named: Any) -> Any:
            arguments = tuple(on_host(argument) for argument in arguments)
            return function(*arguments, **{name: on_host(value) for name, value in named.items()})

        return on_cpu

    for function in _device_constructors():
        name = function.__name__
        if vars(torch).get(name) == function:
            setattr(torch, name, mapped(function))
    torch.Tensor.to = mapped(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(  # type: ignore[assignment]
        total_memory=141 * 10**9
    )
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda *_: None


def suite(checkout: Path, number: int) -> original_tests.Suite:
    """Return the suite of FlashAttention-``number`` in a checkout of Dao-AILab/flash-attention."""
    file = FILES[number]
    if not (checkout / file).exists():
        raise SystemExit(f"--checkout: expected a checkout of flash-attention with {file}, got {checkout}")
    return original_tests.Suite(
        checkout.resolve(),
        (file,),
        "flash_attention_tests",
        ("--noconftest",),
        {CHECKOUT: str(checkout.resolve())} if number == 4 else {},
        other_subjects=OTHER_SUBJECTS,
        run_time=RUN_TIME,
        known=KNOWN,
    )


def main() -> int:
    return original_tests.command(__doc__.splitlines()[0], "Dao-AILab/flash-attention", tuple(FILES), suite)


if __name__ == "__main__":
    sys.exit(main())
