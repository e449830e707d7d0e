"""Modules in place of vLLM's, with the interface of one release as it was recorded, and no behaviour."""

from __future__ import annotations

import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch

RECORD = json.loads((Path(__file__).parent / "vllm_interface.json").read_text())
PLUGIN = "flashtile.integrations.vllm"
NAMES = {
    "ABC": ABC, "Any": Any, "Enum": Enum, "Generic": Generic, "M": TypeVar("M"), "T": TypeVar("T"),
    "abstractmethod": abstractmethod, "dataclass": dataclass, "field": field, "torch": torch,
}  # fmt: skip
"""What the recorded lines use."""


def source_of(interface: dict[str, Any]) -> str:
    """Return the source of recorded classes. ``__init__`` keeps its arguments; other methods raise."""
    lines = []
    for name, entry in interface.items():
        if name == "register_backend":
            lines += [f"{entry}:", " registered[backend] = class_path"]
            continue
        *decorators, header = entry["header"].split(" class ")
        lines += [*decorators, f"{header if not decorators else 'class ' + header}:", " pass"]
        lines += [f" {line}" for line in entry["attributes"]]
        for method in entry["methods"]:
            *before, signature = method.split("def ", 1)
            lines += [f" {decorator}" for decorator in before[0].split()]
            keeps = signature.startswith("__init__")
            body = "vars(self).update(locals())" if keeps else "raise NotImplementedError"
            lines += [f" def {signature}:", f"  {body}"]
    return "\n".join(lines)


def modules_of(release: str, **environment: Any) -> dict[str, ModuleType]:
    """Return stand-ins by module name; ``environment`` sets fields of ``vllm.envs``."""
    names = dict(NAMES, registered={})
    exec(source_of(RECORD[release]), names)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.v1": {}, "vllm.v1.attention": {}, "vllm.v1.attention.backends": {},
        "vllm.version": {
            "__version__": release, "__version_tuple__": tuple(int(part) for part in release.split(".")),
        },
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, **environment},
        "vllm.v1.attention.backend": names,
        "vllm.v1.attention.backends.registry": names,
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "NHD"},
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in contents}
    for name, values in contents.items():
        vars(modules[name]).update({key: value for key, value in values.items() if key != "__builtins__"})
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(modules[outer], inner, modules[name])
    return modules


@contextmanager
def plugin(modules: dict[str, ModuleType]) -> Iterator[ModuleType]:
    """Yield the backend's module, imported with these modules; with the installed vLLM for none."""
    package = importlib.import_module(PLUGIN)
    inner = ("backend", "releases")

    def forget() -> None:
        for name in inner:
            sys.modules.pop(f"{PLUGIN}.{name}", None)
            vars(package).pop(name, None)

    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    if modules:
        for name in before:
            del sys.modules[name]
    sys.modules.update(modules)
    forget()
    try:
        yield importlib.import_module(f"{PLUGIN}.backend")
    finally:
        forget()
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
