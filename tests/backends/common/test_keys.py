"""The key of a compiled kernel: whatever its compilation can read changes it, or is refused."""

from __future__ import annotations

import argparse
import dis
import importlib.util
import itertools
import os
import sys
import textwrap
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have no keys", allow_module_level=True)


from flashtile.backends.common import keys
from walk import walk

CONSTANTS = """
import triton.language as tl
WIDTH = tl.constexpr(16)
HEIGHT = 5
DEPTH = tl.constexpr(7)


def value():
    return object()


def num_programs():
    return object()


def dtype():
    return object()
"""
MODULE = """
import os
from os import environ as environment
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

import key_constants
from flashtile.backends.common import jit
from flashtile.backends.common.jit import triton as deferred
from flashtile.backends.hopper.compat import aggregate, gluon, primitive

SCALE = tl.constexpr(2.0)
NUMBERS = {"a": (1, 2), "b": {4}}
DEFAULT = tl.constexpr(3)


class Kind(Enum):
    ONE = 11
    TWO = 22


class Pair(NamedTuple):
    first: Any
    second: Any = 5


class Numbers(NamedTuple):
    n: int

    @property
    def twice(self):
        return 2 * self.n


@dataclass(frozen=True)
class Base:
    CLASS: ClassVar[int] = 6


@dataclass(frozen=True)
class Inner(Base):
    SIZE: int

    @triton.constexpr_function
    def method(self, n):
        return n + 7


@dataclass(frozen=True)
class Variant:
    SIZE: int
    INNER: Inner
    FUNCTIONS: tuple
    KIND: Kind = Kind.ONE
    NUMBERS: Numbers = Numbers(9)
    LAYOUT: Any = gl.BlockedLayout([1], [32], [4], [0])
    HIDDEN: int = field(default=8, repr=False)

    @property
    def late(self):
        return self.SIZE < limit()


def limit():
    return 64


num_programs = key_constants.num_programs
# A Python function that no kernel calls. It has the name of a function of Triton that one calls.


@triton.constexpr_function
def of_numbers(n):
    module = key_constants
    return of_others(n) + NUMBERS["a"][0] + module.HEIGHT + key_constants.DEPTH.value


@triton.constexpr_function
def of_others(n):
    return n * 10


@aggregate
class Ring:
    tiles: gl.tensor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, STAGES):
        self.tiles = tiles
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def wait(self, i):
        return i + 12


@primitive
def written(x, _semantic=None):
    return x


@deferred.jit
def scaled(x, N: tl.constexpr = DEFAULT):
    return (x * SCALE * N * key_constants.WIDTH).to(x.dtype)


@deferred.jit
def first(x):
    return x + 1


def made(number):
    number = tl.constexpr(number)

    @triton.jit
    def added(x):
        return x + number

    return added


@jit.kernel()
def kernel(x_ptr, pair, C: tl.constexpr):
    x = scaled(tl.load(x_ptr)) + of_numbers(C.SIZE)
    pair = Pair(x, 1)
    tl.store(x_ptr, written(x) + pair.first + tl.num_programs(0))


@jit.gluon_kernel()
def gluon_kernel(x_ptr, pair, C: gl.constexpr):
    ring = Ring(gl.load(x_ptr), 2)
    gl.store(x_ptr, ring.wait(1))


CONSTANT = Variant(32, Inner(1), (made(1), made(2), first))
"""
CHANGES = [
    ("x = scaled(tl.load(x_ptr)) + of_numbers", "x = scaled(tl.load(x_ptr)) - of_numbers"),  # the kernel
    ("x * SCALE * N", "x / SCALE * N"),  # a function that it calls
    ("SCALE = tl.constexpr(2.0)", "SCALE = tl.constexpr(2.5)"),  # a constant of that
    ("SCALE = tl.constexpr(2.0)", "SCALE = tl.constexpr(2)"),  # its type
    ("DEFAULT = tl.constexpr(3)", "DEFAULT = tl.constexpr(4)"),  # a default
    ("WIDTH = tl.constexpr(16)", "WIDTH = tl.constexpr(32)"),  # a constant in another module
    ("HEIGHT = 5", "HEIGHT = 6"),  # one by another name of that module
    ("DEPTH = tl.constexpr(7)", "DEPTH = tl.constexpr(8)"),  # one beside it, by the module's own name
    ("second: Any = 5", "second: Any = 6"),  # a default of a structure
    ("first: Any\n    second: Any = 5", "second: Any\n    first: Any = 5"),  # its fields
    ("of_others(n) + NUMBERS", "of_others(n) - NUMBERS"),  # a Python function that runs in compilation
    ("return n * 10", "return n * 20"),  # a Python function that it calls
    ('"a": (1, 2)', '"a": (3, 2)'),  # a table that it reads
    ("{4}", "{5}"),
    ("    return x\n", "    return x * 1\n"),  # a function that writes instructions
    ("return i + 12", "return i + 13"),  # a method of an aggregate
    ("STAGES: gl.constexpr\n", "STAGES: gl.tensor\n"),  # a field of it
    ("Variant(32,", "Variant(33,"),  # a field of the constant
    ("default=8", "default=9"),  # one that its repr hides
    ("return 64", "return 16"),  # what one of its properties reads
    ("CLASS: ClassVar[int] = 6", "CLASS: ClassVar[int] = 7"),  # a class variable of a constant within it
    ("return n + 7", "return n + 8"),  # a method
    ("return 2 * self.n", "return 3 * self.n"),  # a property of a structure
    ("ONE = 11", "ONE = 12"),
    ("= Kind.ONE", "= Kind.TWO"),
    ("BlockedLayout([1]", "BlockedLayout([2]"),
    ("return x + 1\n", "return x + 3\n"),  # a function in the constant
    ("made(1), made(2)", "made(2), made(1)"),  # functions of the same name and line
]
REFUSED = [
    ("@triton.constexpr_function\ndef of_others", "def of_others"),  # its file may have changed meanwhile
    ("    @triton.constexpr_function\n    def method", "    def method"),
    ("made(2), first)", "made(2), limit)"),
    ("Inner(1), (", "object(), ("),
    ('"b": {4}', '"b": object()'),
]
NOT_OF_THE_PROCESS = [  # what another process, or this one later, may have otherwise
    ("return n * 10", "import key_constants as late; return n * late.WIDTH"),
    ("return n * 10", "return n * int(os.environ.get('FACTOR', '3'))"),
    ("return n * 10", "return n * int(os.getenv('FACTOR', '3'))"),
    ("return n * 10", "return n * int(environment.get('FACTOR', '3'))"),
]
FOLDERS = itertools.count()


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """A function that imports MODULE with a replacement in it or in CONSTANTS."""

    def imported(old: str = "", new: str = "") -> ModuleType:
        folder = tmp_path / str(next(FOLDERS))
        folder.mkdir()
        for name, text in (("key_constants", CONSTANTS), ("key_module", MODULE)):
            path = folder / f"{name}.py"
            path.write_text(text.replace(old, new) if old else text)
            spec = importlib.util.spec_from_file_location(name, path)
            found = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, found)
            spec.loader.exec_module(found)
        return found

    return imported


def source(kernel: Any, constant: Any) -> Any:
    signature = {"x_ptr": "*fp32", "pair": ("i32", "fp32"), "C": "constexpr"}
    return keys.source_of(kernel, signature, {"C": constant})


def hashes(module: ModuleType) -> list[str]:
    """Return the keys of both kernels."""
    return [source(kernel, module.CONSTANT).hash() for kernel in (module.kernel, module.gluon_kernel)]


@walk("change", CHANGES)
def test_what_compilation_can_read_changes_the_key(module_of, change):
    before = hashes(module_of())
    assert hashes(module_of()) == before  # in another file, with other objects
    assert (MODULE + CONSTANTS).count(change[0]) == 1
    assert hashes(module_of(*change)) != before


def paths_by_dis(code: CodeType) -> set[tuple[str, ...]]:
    found, path, unseen = set(), (), set(code.co_names)
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            path = *(path or ("",)), each.argval
        elif each.opname not in ("CACHE", "EXTENDED_ARG"):
            path = (each.argval,) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
        found.add(path if path[:1] != ("",) else ("", path[-1]))
        unseen.difference_update(path)
    inner = (paths_by_dis(value) for value in code.co_consts if isinstance(value, CodeType))
    return found.union(*inner, {(name,) for name in unseen})


@pytest.mark.parametrize("module", [keys, argparse, textwrap], ids=lambda module: module.__name__)
def test_names_are_read_as_dis_reads_them(module):
    """The numbers of names in instructions differ between versions of Python."""
    code = compile(Path(module.__file__).read_text(), module.__name__, "exec")
    found = set(keys._paths(code))
    assert found <= paths_by_dis(code)
    assert {name for path in found for name in path if name} == _names(code)


def _names(code: CodeType) -> set[str]:
    inner = (_names(value) for value in code.co_consts if isinstance(value, CodeType))
    return set(code.co_names).union(*inner)


@walk("change", REFUSED)
def test_what_no_key_can_contain_is_refused(module_of, change):
    assert (MODULE + CONSTANTS).count(change[0]) == 1
    with pytest.raises(TypeError, match=r"\w: the key of a compiled kernel can contain .*, got .* at 0x"):
        hashes(module_of(*change))


@walk("change", NOT_OF_THE_PROCESS)
def test_what_a_function_imports_late_or_takes_from_the_environment_is_refused(module_of, change):
    match = r"key_module\.of_others: .*the key of a compiled kernel cannot contain"
    with pytest.raises(TypeError, match=match):
        hashes(module_of(*change))
