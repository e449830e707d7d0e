"""Modules in place of a serving engine's, with the interface of one release as it was recorded."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

NAMES = {
    "A": TypeVar("A"), "ABC": ABC, "Any": Any, "D": TypeVar("D"), "Enum": Enum, "Generic": Generic,
    "IntEnum": IntEnum, "M": TypeVar("M"), "T": TypeVar("T"), "abstractmethod": abstractmethod, "auto": auto,
    "dataclass": dataclass, "field": field, "nn": SimpleNamespace(Module=object), "torch": torch,
}  # fmt: skip
"""What the recorded lines use."""


def source_of(interface: dict[str, Any], bodies: dict[str, str]) -> str:
    """Return the source of recorded classes, functions and lists.

    ``bodies`` has those of functions and of some methods. ``__init__`` keeps its arguments, and other methods
    raise.
    """
    lines = []
    for name, entry in interface.items():
        if isinstance(entry, list):  # calls, which are read by tests
            continue
        if isinstance(entry, str):
            is_function = entry.startswith("def ")
            lines += [f"{entry}:", f" {bodies[name]}"] if is_function else [entry]
            continue
        *decorators, header = entry["header"].split(" class ")
        lines += [*decorators, f"{header if not decorators else 'class ' + header}:", " pass"]
        lines += [f" {line}" for line in entry["attributes"]]
        for method in entry["methods"]:
            *before, signature = method.split("def ", 1)
            lines += [f" {decorator}" for decorator in before[0].split()]
            keeps = signature.startswith("__init__")
            body = "vars(self).update(locals())" if keeps else "raise NotImplementedError"
            body = bodies.get(f"{name}.{signature.split('(')[0]}", body)
            lines += [f" def {signature}:", f"  {body}"]
    return "\n".join(lines)


def modules_from(contents: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Return modules with these contents by name, each an attribute of its package. Packages are added."""
    for name in list(contents):
        parts = name.split(".")
        for count in range(1, len(parts)):
            contents.setdefault(".".join(parts[:count]), {})
    modules = {name: ModuleType(name) for name in sorted(contents)}
    for name, values in contents.items():
        vars(modules[name]).update({key: value for key, value in values.items() if key != "__builtins__"})
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(modules[outer], inner, modules[name])
    return modules


@contextmanager
def plugin(name: str, modules: dict[str, ModuleType]) -> Iterator[ModuleType]:
    """Yield a plug-in's module ``backend``, imported with these modules; for none, with the real engine."""
    package, engine = importlib.import_module(name), name.rpartition(".")[2]

    def forget() -> None:
        for inner in ("ahead", "backend", "mla", "private", "releases"):
            sys.modules.pop(f"{name}.{inner}", None)
            vars(package).pop(inner, None)

    before = {key: module for key, module in sys.modules.items() if key.split(".")[0] == engine}
    if modules:
        for key in before:
            del sys.modules[key]
    sys.modules.update(modules)
    forget()
    try:
        yield importlib.import_module(f"{name}.backend")
    finally:
        forget()
        for key in modules:
            sys.modules.pop(key, None)
        sys.modules.update(before)
