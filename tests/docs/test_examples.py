"""Every example in a docstring runs. Every public function, and every class that users make, has one."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path

import pytest
import torch

import flashtile
import flashtile.integrations.diffusers
import flashtile.integrations.torch
import flashtile.integrations.transformers
import flashtile.operators.gradients

MADE_BY_US = {
    "Array", "Batch", "BeforeNorm", "BlockMask", "BlockPool", "Bound", "Choice", "Comparison",
    "CompletionOutput",
    "EngineStats", "Estimate", "Event", "Explanation", "Invariant", "LinearExplanation", "Logprob",
    "ParallelEstimate",
    "ParallelExplanation", "Report", "RequestMetrics", "RequestOutput", "Span", "Step", "Usage",
}  # fmt: skip
"""Classes that users get and never make."""

OF_A_MODEL = {"AsyncLLM", "BeamSearchParams", "Engine", "ModelConfig", "RequestOutputKind"}
"""Classes of the engine whose examples, on the guide's page, need a model."""

MODULES = [
    name
    for name in ("flashtile", *(f"flashtile.{one.name}" for one in pkgutil.iter_modules(flashtile.__path__)))
    if not name.endswith("__main__") and hasattr(importlib.import_module(name), "__all__")
]
"""The public modules: those that list what users may import."""


def public(module_name: str) -> dict[str, object]:
    """What of a module needs an example, by its name."""
    module = importlib.import_module(module_name)
    found = {name: getattr(module, name) for name in module.__all__}
    return {
        f"{module_name}.{name}": value
        for name, value in found.items()
        if inspect.isfunction(value) or (inspect.isclass(value) and name not in MADE_BY_US | OF_A_MODEL)
        if not (inspect.isclass(value) and issubclass(value, BaseException))
    }


def own_functions(module_name: str) -> dict[str, object]:
    """The public functions that a module defines."""
    functions = inspect.getmembers(importlib.import_module(module_name), inspect.isfunction)
    return {
        f"{module_name}.{name}": function
        for name, function in functions
        if function.__module__ == module_name and not name.startswith("_")
    }


PUBLIC = own_functions("flashtile.testing")
PUBLIC["flashtile.compat.install_as_flash_attn"] = flashtile.compat.install_as_flash_attn
PUBLIC["flashtile.nn.MultiheadAttention"] = flashtile.nn.MultiheadAttention
PUBLIC["flashtile.operators.gradients.attention_backward"] = flashtile.operators.gradients.attention_backward
PUBLIC["flashtile.integrations.torch.register"] = flashtile.integrations.torch.register
for library in ("transformers", "diffusers"):
    if importlib.util.find_spec(library) is not None:
        name = f"flashtile.integrations.{library}.register"
        PUBLIC[name] = getattr(flashtile.integrations, library).register
for module in MODULES:
    PUBLIC.update(public(module))


def examples() -> dict[str, tuple[str, str]]:
    """(module, name in it) of everything in the package whose docstring has an example, by its whole name."""
    found = {}
    folder = Path(flashtile.__file__).parent

    def look(node: ast.AST, module: str, name: str) -> None:
        if ">>> " in (ast.get_docstring(node) or ""):
            found[f"{module}.{name}"] = module, name
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                look(inner, module, f"{name}.{inner.name}".removeprefix("."))

    for path in sorted(folder.rglob("*.py")):
        if ">>> " in (text := path.read_text()):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            look(ast.parse(text), ".".join(parts).removesuffix(".__init__"), "")
    return found


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name):
    module_name, inner = EXAMPLES[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:  # of a library that is not installed
        if str(error.name).startswith("flashtile"):
            raise
        pytest.skip(str(error))
    torch.manual_seed(0)
    value = functools.reduce(getattr, filter(None, inner.split(".")), module)
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(value, name, globs={"torch": torch, "flashtile": flashtile})
    assert test.examples, f"{name} has no example"
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0


def test_what_is_public_has_an_example():
    assert not {
        name for name, value in PUBLIC.items() if f"{value.__module__}.{value.__qualname__}" not in EXAMPLES
    }


def test_results_are_typed():
    functions = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
    untyped = {"Any", "", inspect.Signature.empty}
    returned = {name: inspect.signature(value).return_annotation for name, value in functions.items()}
    assert [name for name, annotation in returned.items() if annotation in untyped] == []
