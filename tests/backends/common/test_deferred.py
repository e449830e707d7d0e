"""Device functions that read their source when it is needed."""

from __future__ import annotations

import importlib
import inspect
import linecache
import pkgutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

import flashtile.backends
from targets import INTERPRETING

pytest.importorskip("triton")
if INTERPRETING:
    pytest.skip("interpreted functions are not JIT functions", allow_module_level=True)

from triton.runtime import jit
from triton.runtime.jit import JITCallable, JITFunction

from flashtile.backends.common.jit import Deferred, function_lines, triton

MODULE = """
from flashtile.backends.common.jit import triton

@triton.jit
def halved(x):
    return x / 2
"""

FIRST_CALL = """
import gc, sys
from flashtile.backends.common.device import Target
from flashtile.backends.compat import compiling_driver
from flashtile.compilation.calls import Call, Signature
from flashtile.compilation.compiling import launches
from flashtile.backends.common import first_calls
from flashtile.backends.common.jit import Deferred

tensor = Signature((1, 256, 2, 128), (65536, 256, 128, 1), "bfloat16")
call = Call("forward", (("q", tensor), ("k", tensor), ("v", tensor), *{options}))
named = []
with compiling_driver((9, 0)):
    for launch, tensors in launches(call, Target("H200", (9, 0), 132)):
        with first_calls.only_naming() as found:
            launch.compile_ahead(tensors)
        named += [source.name for source, *_ in found.values()]
deferred = [each for each in gc.get_objects() if isinstance(each, Deferred)]
constructed = [each.__name__ for each in deferred if vars(each)["_options"] is None]
print(len(deferred), *named, "|", *constructed, "|", *(m for m in ("sympy", "mpmath") if m in sys.modules))
"""


def every_function() -> list[Deferred]:
    """All device functions of all kernels, and those in aggregates."""
    found = {}
    for entry in pkgutil.walk_packages(flashtile.backends.__path__, "flashtile.backends."):
        module = importlib.import_module(entry.name)
        for value in vars(module).values():
            members = vars(value).values() if inspect.isclass(value) else (value,)
            found |= {id(each): each for each in members if isinstance(each, Deferred)}
    return [*found.values()]


def written(folder: Path, text: str) -> ModuleType:
    """A new module with this text."""
    name = f"written_{folder.name}"
    (folder / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_of_each_function_is_what_python_finds():
    functions = every_function()
    assert len(functions) > 450
    different = [f.__qualname__ for f in functions if f.text != inspect.getsource(f.fn)]
    assert different == []


def test_every_jit_function_of_the_kernels_is_deferred():
    eager = []
    for entry in pkgutil.walk_packages(flashtile.backends.__path__, "flashtile.backends."):
        for name, value in vars(importlib.import_module(entry.name)).items():
            if isinstance(value, JITFunction) and not isinstance(value, Deferred):
                eager += [f"{entry.name}.{name}"] * value.__module__.startswith("flashtile")
    assert eager == []


def test_a_kernel_that_is_found_constructs_no_other_function():
    """Its key is known when only the kernel itself has been constructed, and no large module is imported."""
    from flashtile.op.registry import flat, flat_fields
    from flashtile.operators.attention import FORWARD
    from flashtile.problems.attention import NO_EXTRAS, Options

    assert NO_EXTRAS is FORWARD.nothing
    options = tuple(zip(flat_fields(Options), flat(Options()), strict=True))
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL.replace("{options}", repr(options))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    named, constructed, imported = done.stdout.split("|")
    count, *kernels = named.split()
    assert int(count) > 100
    assert kernels == ["forward_kernel"]
    assert constructed.split() == kernels
    assert imported.split() == []


@pytest.mark.parametrize("attribute", ["src", "params", "signature", "cache_key"])
def test_an_attribute_constructs_a_function(tmp_path, attribute):
    function = written(tmp_path, MODULE).halved
    assert vars(function)["_options"] is not None
    assert getattr(function, attribute)
    assert vars(function)["_options"] is None
    assert function.src == "def halved(x):\n    return x / 2\n"


def test_a_table_of_functions_parses_none(tmp_path):
    function = written(tmp_path, MODULE).halved
    assert {function: 1}[function] == 1
    assert vars(function)["_options"] is not None
    assert function.params
    assert {function: 1}[function] == 1
    assert function.hash is None


def test_an_attribute_that_no_function_has(tmp_path):
    function = written(tmp_path, MODULE).halved
    for _ in range(2):
        with pytest.raises(AttributeError, match="'DeviceFunction' object has no attribute 'nothing'"):
            function.nothing  # noqa: B018


def test_a_file_that_changes_after_its_import_is_not_compiled(tmp_path):
    function = written(tmp_path, MODULE).halved
    text = function.text
    path = Path(function.fn.__code__.co_filename)
    path.write_text(MODULE.replace("x / 2", "x / 4  # another line"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{path.name} has changed since it was imported"):
            function.params  # noqa: B018
    assert function.text == text
    path.write_text(MODULE)
    assert [parameter.name for parameter in function.params] == ["x"]


def test_a_module_that_is_imported_again_has_its_new_text(tmp_path):
    assert written(tmp_path, MODULE).halved.params
    changed = written(tmp_path, MODULE.replace("x / 2", "x / 4  # another line")).halved
    assert changed.src == "def halved(x):\n    return x / 4  # another line\n"


def test_an_interrupted_construction_is_repeated(tmp_path, monkeypatch):
    function = written(tmp_path, MODULE).halved

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(jit, "KernelParam", interrupted)
        with pytest.raises(KeyboardInterrupt):
            function.params  # noqa: B018
    assert [parameter.name for parameter in function.params] == ["x"]


def test_a_function_that_is_in_no_file_reads_its_source_now():
    """Its text is in ``linecache``, from which any program may remove it."""
    filename, text = "<flashtile halved>", "def halved(x):\n    return x / 2\n"
    linecache.cache[filename] = len(text), None, text.splitlines(True), filename
    names: dict = {}
    exec(compile(text, filename, "exec"), names)
    function = triton.jit(names["halved"])
    linecache.clearcache()
    assert not isinstance(function, Deferred)
    assert function.src == text


def test_a_file_is_read_again_if_its_lines_were_dropped(tmp_path):
    function = written(tmp_path, MODULE).halved
    linecache.clearcache()
    assert [parameter.name for parameter in function.params] == ["x"]


def test_threads_construct_a_function_once(tmp_path, monkeypatch):
    function = written(tmp_path, MODULE).halved
    made, construct, parameter = [], JITCallable.__init__, jit.KernelParam

    begun = threading.Event()

    def slow(*given):
        begun.set()
        time.sleep(0.05)
        return parameter(*given)

    def read_later():
        begun.wait(10)
        found.append([*function.params])

    monkeypatch.setattr(JITCallable, "__init__", lambda self, fn: (made.append(fn), construct(self, fn))[1])
    monkeypatch.setattr(jit, "KernelParam", slow)
    found: list[list] = []
    threads = [threading.Thread(target=read_later) for _ in range(7)]
    for thread in threads:
        thread.start()
    found.append([*function.params])
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert [len(each) for each in found] == [1] * 8


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("@jit\ndef f(\n    x,\n):\n    return x\n\n\n# next\n@jit\ndef g(x):\n    return x\n", 5),
        ("@jit(\n    a=1,\n)\ndef f(x):\n    # words\n\n    return (\n        x\n    )\ny = 1\n", 9),
        ("@jit\ndef f(x):\n# words\n    return x\n    # last\ny = 1\n", 5),
        ("def f(x):\n    return x\ndef g(x):\n    return x\n", 2),
    ],
)
def test_where_a_function_ends(text, count):
    lines = text.splitlines(True)
    assert function_lines(lines, 0) == lines[:count]
    indented = ["    " + line for line in lines]
    assert function_lines(["class C:\n", *indented], 1) == indented[:count]
