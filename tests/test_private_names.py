"""Private names of other libraries stand in one module for each library, and are there in the installed one.

A private name begins with an underscore, or is in a module that the library does not document. A release may
change it without a word. If a test of this file fails for a new release, it says what to mend.
"""

from __future__ import annotations

import ast
import functools
import pkgutil
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import sources
from flashtile.integrations.sglang import private as private_of_sglang
from flashtile.integrations.vllm import private as private_of_vllm

ROOT = sources.PACKAGE


def trees() -> dict[str, ast.Module]:
    """Return the parsed modules of the package by their paths in it."""
    return {str(path.relative_to(ROOT)): sources.tree(path) for path in sources.FILES}


class Library(NamedTuple):
    """A library with private names that flashtile uses.

    Attributes:
        module: the one file that uses them.
        breaks: for each private name what breaks without it. A name that begins with "." is an attribute of
            objects whose type the library does not export.
        documented: prefixes of public names; None if all names without an underscore are public.
        hidden: prefixes of names that are not documented though they have no underscore.
        optional: names that only some builds or releases have.
        oldest: the oldest release that has the names.
    """

    module: str
    breaks: dict[str, str]
    documented: tuple[str, ...] | None = None
    hidden: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    oldest: str | None = None


LOADING = "transformers.modeling_flash_attention_utils"
MODEL = "transformers.modeling_utils.PreTrainedModel"
DISPATCH = "diffusers.models.attention_dispatch"
REGISTRY = f"{DISPATCH}._AttentionBackendRegistry"
LATENT = "vllm.model_executor.layers.attention.mla_attention"
PREFILL = "vllm.v1.attention.backends.mla.prefill"
CHOICES = "sglang.srt.arg_groups.choices"
LIBRARIES = {
    "torch": Library(
        "torch_private.py",
        {
            "torch._C._len_torch_dispatch_stack": "every call: is it observed by a dispatch mode?",
            "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "torch's FLOP counters",
            "torch.utils._python_dispatch.TorchDispatchMode": "score_profile, and FLOPs of the algorithms",
            "torch._C._get_tracing_state": "every call: does torch.jit.trace trace it?",
            "torch._C._get_fp32_precision_getter": "exact products of float32",
            "torch._C._set_fp32_precision_setter": "exact products of float32 on the CPU",
            "torch._C._is_any_autocast_enabled": "every call: is autocast on?",
            "torch.autograd.forward_ad._current_level": "every call: may tensors carry tangents?",
            "torch._C._unset_dispatch_mode": "explain of calls with a score_mod that reads tensors",
            "torch._C._set_dispatch_mode": "explain of calls with a score_mod that reads tensors",
            "torch._C._TorchDispatchModeKey.FAKE": "explain of calls with a score_mod that reads tensors",
            "torch._guards.detect_fake_mode": "explain, and compiling ahead",
            "torch._subclasses.fake_tensor.DataDependentOutputException": "explain of a function that reads",
            "torch._subclasses.fake_tensor.FakeTensor": "calls of fake tensors, so torch.compile",
            "torch._subclasses.fake_tensor.FakeTensorMode": "explain, and compiling ahead",
            "torch._subclasses.functional_tensor.FunctionalTensor": "FLOP counts under torch.compile",
            "torch._C._functorch.CInterpreter": "gradients by torch.func under torch.compile",
            "torch._C._functorch.TransformType": "transforms of torch.func",
            "torch._C._functorch.peek_interpreter_stack": "every call: does torch.func transform it?",
            "torch._C._functorch.get_interpreter_stack": "refusals of functionalize with other transforms",
            "torch._C._functorch.is_functorch_wrapped_tensor": "caches would keep tensors of a transform",
            "torch._C._functorch.is_legacy_batchedtensor": "gradients with is_grads_batched=True",
            "torch._C._functorch.maybe_get_level": "refusals of tangents and gradients under torch.func",
            "torch._C._functorch.get_unwrapped": "refusals of tangents and gradients under torch.func",
            "torch._C._functorch.is_batchedtensor": "second derivatives of score functions under vmap",
            "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter": "the same refusals",
            "torch._dynamo.graph_break": "gradients by torch.func under torch.compile",
            "torch._dynamo.comptime.comptime": "refusals of hidden functions in place in a score_mod",
            "torch.Tensor._version": "refusals of hidden functions in place in a score_mod",
            "torch._functorch.config.activation_memory_budget": "dropout in graphs that save only inputs",
            "torch._C._dynamo.guards.TensorGuards": "nothing: layers of vLLM and SGLang take longer",
            "._dynamo_marked_constant": "DTensors under torch.compile",
            "._torchdynamo_disable": "context_parallel_attention under torch.compile",
            "._torchdynamo_disable_msg": "the reason for a graph break is missing",
            "torch._C._is_alias_of": "refusals of caches that share memory",
            "torch.Tensor._is_zerotensor": "refusals of tensors without memory",
            "torch._neg_view": "the memory layout 'negated' of flashtile.testing",
            "torch._check": "integers of graphs that depend on data",
            "torch.cuda._sleep": "times of short kernels, which would include the host's",
            "torch.nn.attention._registry._FLASH_ATTENTION_IMPLS": "unregister() of integrations.torch",
            "torch.jit._builtins._get_builtin_table": "flashtile.sdpa under TorchScript",
            "torch.distributed._symmetric_memory": "merge='symmetric', and the engine's sums over ranks",
            "torch.distributed.distributed_c10d._get_process_group_store": "context parallelism",
            "torch.distributed.device_mesh.DeviceMesh._flatten": "meshes of two dimensions",
            "torch.ops.aten._to_copy": "FLOPs of the algorithms",
            "torch.ops.aten._unsafe_view": "FLOPs of the algorithms",
            "torch._C._cuda_getDevice": "nothing: launches take longer",
            "torch._C._cuda_getCurrentRawStream": "nothing: launches take longer",
            "torch._scaled_dot_product_flash_attention_for_cpu": "attention on the CPU",
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "gradients on the CPU",
            "torch.ops.mkldnn._is_mkldnn_bf16_supported": "16-bit attention on the CPU",
            "torch.ops.mkldnn._is_mkldnn_fp16_supported": "16-bit attention on the CPU",
        },
        optional=("torch._C._cuda_getDevice", "torch._C._cuda_getCurrentRawStream"),
    ),
    "triton": Library(
        "backends/compat.py",
        {
            "triton.compiler.ASTSource": "every kernel",
            "triton.backends.compiler.GPUTarget": "compiling for a GPU that is not there",
            "triton.runtime.jit.JITCallable": "keys of kernels",
            "triton.experimental.gluon._runtime.GluonASTSource": "Hopper's kernels",
            "triton.experimental.gluon._runtime.GluonJITFunction": "Hopper's kernels",
            "triton.experimental.gluon.language._core.builtin": "Hopper's kernels",
            "triton._C.libtriton.ir.DESCRIPTOR_REDUCE_KIND": "Hopper's backward pass up to Triton 3.7",
            "triton.language.core": "Hopper's kernels with Triton 3.6, whose aggregate is private",
            "triton.language.core._aggregate": "nothing from Triton 3.7 on",
            "triton.runtime.driver.driver._active": "compiling without a GPU, and first calls without gcc",
            "triton.backends.driver.GPUDriver": "first calls without gcc",
            "triton.backends.nvidia.driver.CudaDriver": "first calls without gcc",
            "triton.backends.nvidia.driver.TMA_DTYPE_DEVICE_TO_HOST": "Hopper's kernels",
            "triton.backends.nvidia.compiler.get_ptxas_version": "kernels compiled ahead under torch.compile",
            "triton.runtime.jit._triton_jit_function_registry": "nothing: it is what keeps functions alive",
            "triton._C.libtriton.get_cache_invalidating_env_vars": "compiled folders, and quick first calls",
            "triton.compiler.compiler.make_backend": "compiled folders, and quick first calls",
            "triton.compiler.compiler.CompiledKernel": "compiled folders, and quick first calls",
            "triton.runtime.cache.get_cache_manager": "quick first calls",
            "triton.runtime.cache.triton_key": "quick first calls",
            "triton.JITFunction._call_hook": "kernels while a hook of compilations is set, as by vLLM",
        },
        hidden=(
            "triton._C.",
            "triton.backends.",
            "triton.compiler.",
            "triton.language.core.",
            "triton.runtime.",
        ),
        optional=("triton.language.core._aggregate", "triton.runtime.jit._triton_jit_function_registry"),
    ),
    "transformers": Library(
        "integrations/transformers_private.py",
        {
            f"{LOADING}._lazy_imports": "generate_batch, and models that call the flash function by name",
            f"{LOADING}._loaded_implementation": "a second register() after unregister()",
            f"{LOADING}._pad_input": "padding in models that call the flash function by name",
            f"{LOADING}._unpad_input": "padding in models that call the flash function by name",
            f"{LOADING}._flash_attention_forward": "Falcon, GPT-J and Bark",
            f"{MODEL}._check_and_adjust_attn_implementation": "refusals, T5, and as_flash_attention",
            f"{MODEL}._supports_flash_attn": "refusals of models that would lose terms of their scores",
            f"{MODEL}._is_stateful": "refusals of shared_prompts for state spaces",
            "transformers.PreTrainedConfig._attn_implementation": "refusals of shared_prompts",
            f"{MODEL}._compatible_flash_implementations": "models with sinks, such as GPT-OSS",
            "transformers.modeling_utils.AttentionInterface._global_mapping": "unregister()",
            "transformers.masking_utils.AttentionMaskInterface._global_mapping": "unregister()",
            "transformers.utils.output_capturing._active_collector": (
                "output_attentions of models that do not pass it on"
            ),
            "._is_quantized": "quantized models whose adapters leave norms in float32",
        },
        oldest="5.17",
    ),
    "diffusers": Library(
        "integrations/diffusers.py",
        {
            f"{DISPATCH}._check_device": "register(): tensors on two devices would not be refused",
            f"{DISPATCH}._check_shape": "register(): wrong shapes would not be refused",
            f"{REGISTRY}": "register()",
            f"{REGISTRY}._active_backend": "models whose processors call torch's function",
            f"{REGISTRY}._backends": "unregister()",
            f"{REGISTRY}._constraints": "unregister()",
            f"{REGISTRY}._supported_arg_names": "unregister()",
        },
        oldest="0.37",
    ),
    "vllm": Library(
        "integrations/vllm/private.py",
        {
            f"{LATENT}.MLACommonBackend": "models with latent attention",
            f"{LATENT}.MLACommonImpl": "models with latent attention",
            f"{LATENT}.MLACommonMetadata": "models with latent attention",
            f"{LATENT}.MLACommonMetadataBuilder": "models with latent attention",
            f"{LATENT}.QueryLenSupport": "speculative decoding of models with latent attention",
            f"{PREFILL}.base.MLAPrefillBackend": "prompts of models with latent attention",
            f"{PREFILL}.registry.MLAPrefillBackendEnum": "register()",
            f"{PREFILL}.registry.register_mla_prefill_backend": "register()",
            "vllm.v1.attention.backends.utils.get_kv_cache_layout": "every model",
            "._k_scale": "FP8 caches",
            "._v_scale": "FP8 caches",
            "._k_scale_float": "FP8 caches with one scale for a layer",
            "._v_scale_float": "FP8 caches with one scale for a layer",
            "._prefill_metadata": "prompts of models with latent attention",
        },
        documented=(
            "vllm.config.",
            "vllm.envs.",
            "vllm.version.",
            "vllm.v1.attention.backend.",
            "vllm.v1.attention.backends.registry.",
        ),
        oldest="0.25",
    ),
    "sglang": Library(
        "integrations/sglang/private.py",
        {
            f"{CHOICES}.ATTENTION_BACKEND_CHOICES": "--attention-backend flashtile",
            f"{CHOICES}.DETERMINISTIC_ATTENTION_BACKEND_CHOICES": "--enable-deterministic-inference",
            f"{CHOICES}.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": (
                "shared prefixes with --enable-deterministic-inference"
            ),
            "sglang.srt.configs.model_config.AttentionArch": "refusals of models with latent attention",
            "sglang.srt.layers.radix_attention.AttentionType": "layers without a causal mask",
            "sglang.srt.mem_cache.memory_pool.KVWriteLoc": "every model",
            "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool": "models with sliding windows",
            "sglang.srt.runtime_context.get_exec": "--enable-deterministic-inference",
            "sglang.srt.runtime_context.get_parallel": "refusals of context parallelism",
            "sglang.srt.runtime_context.get_spec": "refusals of speculative decoding",
            "._attn_output": "every model",
        },
        documented=(
            "sglang.version.",
            "sglang.srt.layers.attention.attention_registry.",
            "sglang.srt.layers.attention.base_attn_backend.",
        ),
        oldest="0.5.23",
    ),
}


class Use(NamedTuple):
    file: str
    line: int
    name: str
    """Full name, or the name after a "." if it is an attribute of an object of unknown type."""
    library: str | None


def is_private(name: str) -> bool:
    """Whether a name begins with an underscore. ``_name_`` is Enum's, and the others are a named tuple's."""
    documented = {"_fields", "_field_defaults", "_replace", "_asdict", "_make"}
    return bool(re.fullmatch(r"_(?!_)(.*[^_])?", name)) and name not in documented


def library_of(name: str) -> str | None:
    """Return the library of a full name, if the name is private."""
    library = name.split(".")[0]
    if library not in LIBRARIES:
        return None
    documented, whole = LIBRARIES[library].documented, f"{name}."
    hidden = documented is not None and not whole.startswith(documented)
    hidden = hidden or whole.startswith(LIBRARIES[library].hidden)
    return library if hidden or any(map(is_private, name.split("."))) else None


def imported(tree: ast.Module) -> dict[str, tuple[str, int]]:
    """Return (full name, line) of each name that a module imports."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or whole] = whole, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}", node.lineno
    return found


def defined(tree: ast.Module) -> set[str]:
    """Return the names that a module defines: functions, classes, variables, parameters, fields of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.update([node.attr] if ast.unparse(node.value) in ("self", "cls") else [])
    return found


@functools.cache
def all_defined() -> set[str]:
    """Return the names that any module of the package defines."""
    return set().union(*map(defined, trees().values()))


def uses(file: str, tree: ast.Module) -> Iterator[Use]:
    """Yield the private names of other libraries that a file uses, or overrides.

    A private attribute of an object of unknown type is a library's if the file does not define the name. One
    of ``self`` may be defined in the file of a base class.
    """
    names, own = imported(tree), defined(tree)
    for whole, line in names.values():
        if library := library_of(whole):
            yield Use(file, line, whole, library)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from _of_attributes(file, node, names, own)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = getattr(node.args[1], "value", None)
            if is_private(str(name)) and name not in own:
                yield Use(file, node.lineno, f".{name}", None)
        elif isinstance(node, ast.ClassDef):
            yield from _overridden(file, node, names)


def _overridden(file: str, node: ast.ClassDef, names: dict[str, tuple[str, int]]) -> Iterator[Use]:
    """Yield the private names of a library's class that a class derived from it defines."""
    for base in node.bases:
        root, _, path = ast.unparse(base).partition("[")[0].partition(".")
        whole = ".".join(filter(None, (names.get(root, ("", 0))[0], path)))
        if whole.split(".")[0] not in LIBRARIES:
            continue
        try:
            found = pkgutil.resolve_name(whole)
        except ImportError:  # the library is not installed
            continue
        members = [n for each in node.body for n in defined(ast.Module([each], [])) if is_private(n)]
        library = whole.split(".")[0]
        yield from (Use(file, node.lineno, f"{whole}.{n}", library) for n in members if hasattr(found, n))


def _of_attributes(
    file: str, node: ast.Attribute, names: dict[str, tuple[str, int]], own: set[str]
) -> Iterator[Use]:
    """Yield the private name in a chain of attributes, ``a.b.c``."""
    chain, root = [node.attr], node.value
    while isinstance(root, ast.Attribute):
        chain.insert(0, root.attr)
        root = root.value
    if isinstance(root, ast.Name) and root.id in names:
        whole = ".".join((names[root.id][0], *chain))
        library = library_of(whole)
        if library and not library_of(names[root.id][0]):
            yield Use(file, node.lineno, whole, library)
        if whole.split(".")[0] in {*LIBRARIES, *sys.stdlib_module_names}:
            return
    of_self = isinstance(root, ast.Name) and root.id in ("self", "cls")
    known = all_defined() if of_self and len(chain) == 1 else own
    yield from (Use(file, node.lineno, f".{n}", None) for n in chain if is_private(n) and n not in known)


def listed(use: Use, library: Library) -> bool:
    """Whether a table has the name, an object that contains it, or, for an attribute, its last part."""
    if use.library is None:
        return any(name.endswith(use.name) for name in library.breaks)
    return any(
        f"{name}.".startswith(f"{use.name}.") or f"{use.name}.".startswith(f"{name}.")
        for name in library.breaks
    )


def test_private_names_are_in_one_module_for_each_library():
    files = {library.module: name for name, library in LIBRARIES.items()}
    wrong = [
        f"flashtile/{use.file}:{use.line}: {use.name}"
        for file, tree in trees().items()
        for use in uses(file, tree)
        if file not in files
        or use.library not in (None, files[file])
        or not listed(use, LIBRARIES[files[file]])
    ]
    assert wrong == [], "private names belong into " + ", ".join(files)


PLANTED = {
    "torch._a.b": "import torch\ntorch._a.b(1)",
    "torch.a._b": "from torch import a\na._b",
    "torch._a.c": "from torch._a import c",
    "torch._a": "import torch._a as d",
    "triton.runtime.driver": "from triton.runtime import driver",
    "vllm.a.b": "from vllm.a import b",
    "._a": "def f(x): return x.b._a.c",
    "._b": "def f(x): return getattr(x, '_b', None)",
    "torch.nn.Module._call_impl": "from torch import nn\nclass A(nn.Module):\n def _call_impl(self): pass",
}
"""Private names, and lines that use them."""


@pytest.mark.parametrize("name", PLANTED)
def test_planted_names_are_found(name):
    assert [use.name for use in uses("planted.py", ast.parse(PLANTED[name]))] == [name]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_installed_library_has_them(library):
    pytest.importorskip(library, minversion=LIBRARIES[library].oldest)
    missing = []
    for name, breaks in LIBRARIES[library].breaks.items():
        if not name.startswith(".") and name not in LIBRARIES[library].optional:
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                missing.append(f"without {name}: {breaks}")
    assert missing == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_listed_names_are_used(library):
    text = (ROOT / LIBRARIES[library].module).read_text()
    assert [name for name in LIBRARIES[library].breaks if name.rpartition(".")[2] not in text] == []


@pytest.mark.parametrize("module", [private_of_vllm, private_of_sglang])
def test_names_that_are_imported_when_used_are_listed(module):
    breaks = {name for library in LIBRARIES.values() for name in library.breaks}
    assert {f"{where}.{name}" for name, where in module.NAMES.items()} <= breaks
    with pytest.raises(AttributeError, match="has no attribute another"):
        module.another  # noqa: B018
