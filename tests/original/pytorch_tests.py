"""Run PyTorch's own test files on flashtile, unmodified.

    git clone https://github.com/pytorch/pytorch
    python tests/original/pytorch_tests.py --checkout pytorch --suite sdpa --sample 400 --limit 120
    python tests/original/pytorch_tests.py --checkout pytorch --suite flex --shard 1/4 \
        --seconds 540 --out 1.jsonl
    python tests/original/pytorch_tests.py --add 1.jsonl 2.jsonl 3.jsonl 4.jsonl

| suite | file in test/ | computed by flashtile |
|---|---|---|
| sdpa | test_transformers.py | ``F.scaled_dot_product_attention``, unless only the math backend is enabled |
| flex | inductor/test_flex_attention.py | ``flex_attention`` within functions that the file compiles |
| multihead | nn/test_multihead_attention.py, test_transformers.py | ``nn.MultiheadAttention`` |

The references of the files stay PyTorch's: the math backend, ``flex_attention`` that is not compiled, and
``F.multi_head_attention_forward``. In the sdpa and flex suites, they also compute all calls in float64 on a
GPU, for which flashtile has no kernels. The checkout should be of the installed release of torch. The files
need expecttest. Without a GPU, tensors of the flex suite with the device "cuda" are created on the CPU,
because the file tests gradients only on a GPU.

A case is refused if PyTorch computed one of its calls because flashtile does not support the call. It is
skipped if it passes without any call of flashtile. A case that fails runs again on PyTorch's own functions,
those of the flex suite without compiling. If it fails there as well, the release of torch does not fit.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import original_tests
import pytest
from flash_attention_tests import map_cuda_to_cpu

FILES = {
    "sdpa": ("test_transformers.py",),
    "flex": ("inductor/test_flex_attention.py",),
    "multihead": ("nn/test_multihead_attention.py", "test_transformers.py"),
}
SUITE = "PYTORCH_TESTS_SUITE"
WITHOUT = "PYTORCH_TESTS_WITHOUT_FLASHTILE"
EXTENSION = "test_cpp_extensions_open_device_registration"
"""Module of PyTorch's tests that test_transformers.py imports, for cases that are skipped."""
REFERENCE = "computes a reference"
COMPARED_WITH_PYTHON = (
    "test_scaled_dot_product_attention",
    "test_scaled_dot_product_attention_math_with_negative_scale",
    "test_sdp_math_gradcheck",
)
"""Functions of the sdpa suite that enable only the math backend, and compare it with Python's operators.

flashtile computes their calls, except those with dropout, for which it draws other random numbers.
"""
_COMPILER = "checks what torch.compile generates or how often it compiles"
_TORCHSCRIPT = "compiles nn.MultiheadAttention with TorchScript, which does not compile flashtile's module"
_DROPOUT = "compares dropout with that of TorchScript, which draws other random numbers"
_EFFICIENT_DROPOUT = "compares dropout with PyTorch's memory-efficient kernel, which draws other numbers"
_NO_KERNEL = "expects that PyTorch has no kernel"
_WARNINGS = "expects a warning or an error of PyTorch's fused kernels, for a call that flashtile computes"
_ERRORS = "checks the type and the text of PyTorch's own errors"
_BLOCK_MASK = "checks a private form of PyTorch's BlockMask"
OTHER_SUBJECTS = {
    "sdpa": {
        r"test_mem_efficient_.*vs_math_ref_grads\[.*dropout_p_0_[1-9].*": _EFFICIENT_DROPOUT,
        "test_invalid_sdpa_kernel_grouped_query_attention_(cpu|cuda)": _NO_KERNEL,
        "test_is_causal_gpu": _NO_KERNEL,
        "test_flash_attention_fail_with_non_square_causal_attention": _WARNINGS,
        "test_flash_fail_fp32": _WARNINGS,
        r"test_fused_backwards_throws_determinism_warning\[.*warn_only_True.*": _WARNINGS,
        "test_invalid_fused_inputs_(attn_mask_present|dim_3|head_dim)": _WARNINGS,
        "test_invalid_last_dim_stride": _WARNINGS,
        "test_invalid_sequence_lengths": _WARNINGS,
        "test_unaligned_tensors": _WARNINGS,
        "test_fused_sdp_priority_order": "compares the times of PyTorch's kernels",
        "test_transformerencoderlayer_subclass": _DROPOUT,
        "test_transformerencoderlayer_subclass_model": _DROPOUT,
    },
    "flex": {
        "test_block_mask_attributes": _BLOCK_MASK,
        "test_getitem": _BLOCK_MASK,
        "test_block_mask_device_change": "moves a block mask from the CPU to a GPU",
        "test_builtin_score_mods_automatic_dynamic": _COMPILER,
        "test_builtin_score_mods_dynamic": _COMPILER,
        "test_compiling_create_block_mask_no_recompile": _COMPILER,
        "test_epilogue_fused": _COMPILER,
        "test_free_symbol_dynamic": _COMPILER,
        "test_fw_bw_graph_correctness": _COMPILER,
        "test_kernel_options_argument_is_respected": _COMPILER,
        "test_logsumexp_only_return": _COMPILER,
        "test_subgraph_respect_decompostion": _COMPILER,
        "test_block_mask_vs_sequence_lengths": _ERRORS,
        "test_cant_lower_error_message": _ERRORS,
        "test_captured_wrong_device_error_message": _ERRORS,
        "test_invalid_block_size": _ERRORS,
        "test_symmetric_bias": "expects that PyTorch refuses a gradient, which flashtile computes",
    },
    "multihead": {
        "test_multihead_attn_fast_path_invalid_shape": _ERRORS,
        "test_multihead_attn_invalid_shape": _ERRORS,
        "test_multihead_attn_fast_path_query_and_bias_have_different_dtypes": (
            "gives the bias another dtype than the weights, which PyTorch accepts only for some strides"
        ),
        "test_multihead_self_attn_two_masks_fast_path_mock": "expects a call of PyTorch's fused kernel",
        "test_is_causal_gpu": _NO_KERNEL,
        "test_disable_fastpath": "expects a call of PyTorch's fused kernel",
        "test_train_with_is_causal": "expects an error for is_causal without a mask, which flashtile accepts",
        "test_script_encoder_subclass": _TORCHSCRIPT,
        "test_script_mha_in_proj_weight_none": _TORCHSCRIPT,
        "test_transformerencoderlayer_subclass": _TORCHSCRIPT,
        "test_transformerencoderlayer_subclass_model": _TORCHSCRIPT,
    },
}
"""Test functions of each suite that cannot pass, with reasons, in the form of ``Suite.other_subjects``."""
_ROUNDED_P = "the Hopper backward pass computes dS from P in 16 bits: at most 1.5 times the reference's error"
KNOWN = {
    "sdpa": {
        "must be a dense .* got a nested tensor": "a nested tensor, for which PyTorch computes the call",
        "test_invalid_inputs_|test_invalid_fused_inputs_broadcast|test_is_causal_and_mask_fails": (
            "an invalid call, for which PyTorch raises its error"
        ),
    },
    "flex": {
        r"Grad_(Query|Key) Compiled error (?P<error>\S+) is greater than ref error (?P<reference>\S+) by": (
            _ROUNDED_P
        ),
        r"test_comparison_vs_sdpa\b.* Ref error: (?P<reference>[^\s,]+), Flex Error: (?P<error>\S+)": (
            _ROUNDED_P
        ),
        r"dtype:b?float16.* Tensor: grad_bias ": (
            "the reference adds up the gradient of a captured 16-bit tensor in 16 bits"
        ),
        "Stride order mismatch": "expects the strides of out in the order of query's strides",
        "test_reduction_unrolled.*must be read with": "computes with whole rows of a captured tensor",
    },
    "multihead": {"it computes .* not torch.float64": "float64 on a GPU, for which flashtile has no kernels"},
}
"""Failures and refusals of each suite that are no faults, in the form of ``Suite.known``."""


class Calls:
    """Calls of one case, counted as ``flashtile.sdpa`` counts them.

    Attributes:
        served: number of calls that flashtile has computed.
        passed: number of calls that torch has computed, by reason.
    """

    def __init__(self) -> None:
        self.served = 0
        self.passed: Counter[str] = Counter()


def is_float64_on_gpu(tensor: Any) -> bool:
    """Whether flashtile has no kernel for the dtype and the device of a tensor."""
    return tensor.is_cuda and str(tensor.dtype) == "torch.float64"


def install_sdpa() -> Any:
    import torch

    import flashtile

    class Door(flashtile.sdpa):
        serves_math = False

        def _serve(self, *arguments: Any) -> Any:
            enabled = (getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ("flash", "mem_efficient"))
            if (not any(enabled) and not self.serves_math) or is_float64_on_gpu(arguments[0]):
                raise NotImplementedError(REFERENCE)
            return super()._serve(*arguments)

    door = Door()
    door.enable()
    return door


def install_multihead() -> Any:
    import torch

    import flashtile

    calls, ours = Calls(), flashtile.nn.MultiheadAttention

    def count(module: Any, *_: Any) -> None:
        calls.served += isinstance(module, ours)

    torch.nn.modules.module.register_module_forward_hook(count)
    for module in (torch.nn, torch.nn.modules, torch.nn.modules.activation, torch.nn.modules.transformer):
        module.MultiheadAttention = ours  # type: ignore[attr-defined]
    return calls


def install_flex() -> Any:
    import torch
    import torch.nn.attention.flex_attention as module

    import flashtile

    if not torch.cuda.is_available():
        show_file_a_gpu()
        module._validate_device = lambda *_: None  # it refuses gradients on the CPU
    calls, within = Calls(), list[bool]()
    reference, compile_function = module.flex_attention, torch.compile

    @functools.wraps(reference)
    def flex_attention(*arguments: Any, **named: Any) -> Any:
        query = arguments[0] if arguments else named["query"]
        if not within or WITHOUT in os.environ or is_float64_on_gpu(query):
            return reference(*arguments, **named)
        out = flashtile.flex_attention(*arguments, **named)
        calls.served += 1
        return out

    def compiled(function: Any = None, **options: Any) -> Any:
        if not called_by_file():
            return compile_function(function, **options)
        if function is None:  # used as @torch.compile(...)
            return within_call
        return within_call(function)

    def within_call(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            within.append(True)
            try:
                return function(*arguments, **named)
            finally:
                within.pop()

        return call

    module.flex_attention, torch.compile = flex_attention, compiled  # type: ignore[assignment]
    return calls


def called_by_file() -> bool:
    """Whether the file of the flex suite has called the caller."""
    return sys._getframe(2).f_code.co_filename.endswith(FILES["flex"])


def show_file_a_gpu() -> None:
    """Make the file of the flex suite see a GPU, whose tensors are on the CPU."""
    import torch
    import torch._inductor.test_case  # asks for a GPU at its import
    import torch.testing._internal.common_cuda
    import torch.utils._triton

    map_cuda_to_cpu()
    for module, name in ((torch.cuda, "is_available"), (torch.utils._triton, "has_triton")):
        found = getattr(module, name)
        setattr(module, name, lambda found=found: called_by_file() or found())


DOORS: dict[str, Callable[[], Any]] = {
    "sdpa": install_sdpa,
    "flex": install_flex,
    "multihead": install_multihead,
}


def pytest_configure(config: pytest.Config) -> None:
    """Make the suite's calls reach flashtile in a process that collects or runs cases."""
    if not any((Path(folder) / f"{EXTENSION}.py").exists() for folder in ("", *sys.path)):
        stub = types.ModuleType(EXTENSION)
        stub.remove_build_path = stub.generate_faked_module = lambda *_: None  # type: ignore[attr-defined]
        sys.modules[EXTENSION] = stub
    suite = os.environ[SUITE]
    if WITHOUT not in os.environ:
        config.pluginmanager.register(_Judge(DOORS[suite]()), "pytorch-tests-judge")
    elif suite == "flex":
        install_flex()


@functools.cache
def _functions(file: Path) -> list[str]:
    """Return the names of the test functions of a file, longest first."""
    return sorted(re.findall(r"def (test_\w+)", file.read_text("utf-8")), key=len, reverse=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Call a case ``test_name[parameters]``, which PyTorch calls ``test_name_parameters``."""
    for item in items:
        place, name = item.nodeid.rsplit("::", 1)
        function = next(one for one in _functions(item.path) if name.startswith(one))
        setattr(item, original_tests.CASE, f"{place}::{function}[{name.removeprefix(function).strip('_')}]")


class _Judge:
    """Judges a case that passes by its calls."""

    def __init__(self, door: Any) -> None:
        self._door = door

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        case = original_tests.case_of(item)
        function = original_tests.function_of(case).rsplit("::", 1)[-1]
        other_numbers = re.search(r"dropout_p_0_[1-9]", case)
        self._door.serves_math = function in COMPARED_WITH_PYTHON and not other_numbers
        self._door.served = 0
        self._door.passed.clear()
        done = yield
        self._door.passed.pop(REFERENCE, None)
        if getattr(item, "_excinfo", None):  # where pytest keeps the failure of a unittest.TestCase
            return done
        if self._door.passed:
            raise original_tests.Refused(next(iter(self._door.passed)))
        if not self._door.served:
            pytest.skip("no call reaches flashtile")
        return done


def suite(checkout: Path, name: str) -> original_tests.Suite:
    """Return the suite of one door in a checkout of pytorch/pytorch."""
    tests = checkout.resolve() / "test"
    for file in FILES[name]:
        if not (tests / file).exists():
            raise SystemExit(f"--checkout: expected a checkout of pytorch with test/{file}, got {checkout}")
    arguments = ["--noconftest"]
    if name == "multihead":
        arguments += ["-k", "not TestSDPA and not TestAttnBias"]
    return original_tests.Suite(
        tests,
        FILES[name],
        "pytorch_tests",
        tuple(arguments),
        {SUITE: name},
        other_subjects=OTHER_SUBJECTS[name],
        known=KNOWN[name],
        without={WITHOUT: "1"},
    )


def main() -> int:
    return original_tests.command(__doc__.splitlines()[0], "pytorch/pytorch", tuple(FILES), suite)


if __name__ == "__main__":
    sys.exit(main())
