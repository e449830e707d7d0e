"""Look-up of compiled kernels in Triton's disk cache, without reading Triton's whole installation.

The name of a cache entry depends on the kernel's source and options, and on ``triton_key``: a digest of every
file of Triton's compiler, including the 400 to 500 MB of libtriton.so. In Triton, each process computes that
digest before its first launch. But file sizes and modification times suffice to tell whether files changed,
as for a .pyc. So ``triton_key`` is stored in the cache under a digest of sizes and times. The name of the
entry is then built from the stored ``triton_key``, as in Triton. All other cases fall back to Triton: no
stored key, no entry of this name, an entry that cannot be read, or a Triton that names entries differently.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import triton
from triton import knobs
from triton import language as tl
from triton.runtime.jit import JITCallable, JITFunction

from flashtile.backends.common import compiled_folder
from flashtile.files import replace_file

COMPILER_FOLDERS = ("_C", "backends", "compiler", "language", "runtime")
"""Folders of Triton's installation that hold all files that ``triton_key`` reads."""

COMPILER_FILES = (".py", ".so")

ANNOUNCED_AFTER = 2.0
"""Seconds of compilation after which a line says what is compiled."""

QUIET = "FLASHTILE_QUIET"
"""Environment variable: 1 hides the line that says what is compiled."""


class _Kept:
    """Mixin for JIT functions that :func:`load_or_compile` compiles.

    ``do_not_specialize`` also applies to the integers of tuples.
    """

    @property
    def cache_key(self) -> str:
        """Digest of the kernel's source, of all functions that it calls, and of the constants that they use.

        Triton's own digest also depends on the order in which a process first compiles its kernels. If a
        kernel is hashed before the functions that it calls, the digest lacks their constants. Constants of
        equal names are sorted by address, which differs between processes. So a process might not find a
        kernel in the cache that another process had compiled.
        """
        key = self.__dict__.get("_key")
        if key is None:
            super().cache_key  # type: ignore[misc] # noqa: B018 - notes the constants that must not change
            key = self.__dict__["_key"] = source_digest(self)
        return key

    def create_binder(self) -> Any:
        *others, binder = super().create_binder()  # type: ignore[misc]
        self.compile = load_or_compile
        plain = [p.num for p in self.params if p.do_not_specialize]  # type: ignore[attr-defined]

        def bind(*arguments: Any, **options: Any) -> tuple[dict, list, dict]:
            bound, specialization, options = binder(*arguments, **options)
            values = [*bound.values()]
            for i in plain:
                specialization[i] = unspecialized(values[i], *specialization[i])
            return bound, specialization, options

        return *others, bind


def source_digest(function: Any) -> str:
    """Return a digest of a function's source, of all functions that it calls, and of their constants."""
    found: dict[int, tuple] = {}
    _gather(function, found)
    return hashlib.sha256(str(sorted(found.values())).encode()).hexdigest()


def _gather(function: JITCallable, found: dict[int, tuple]) -> None:
    """Add (name, source, first line, constants) of a function, and of each function it calls, to ``found``.

    The keys of ``found`` are the ``id`` of each function.
    """
    if id(function) in found:
        return
    constants: list[tuple[str, str]] = []
    plain = function.fn
    name = f"{plain.__module__}.{plain.__qualname__}"
    found[id(function)] = name, function.src, function.starting_line_number, constants
    scope = {**plain.__globals__, **inspect.getclosurevars(plain).nonlocals}
    names = sorted(_names(plain.__code__))
    used = [(each, scope[each]) for each in names if each in scope]
    for module_name, module in [pair for pair in used if isinstance(pair[1], ModuleType)]:
        if not module.__name__.startswith("triton"):
            used += [
                (f"{module_name}.{each}", getattr(module, each)) for each in names if hasattr(module, each)
            ]
    for each, value in used:
        members = value.hash_attrs if getattr(value, "__triton_aggregate__", False) else (value,)
        for member in members:
            if isinstance(member, JITCallable):
                _gather(member, found)
            elif isinstance(member, tl.constexpr):
                constants.append((each, str(member.value)))
            elif hasattr(member, "_fields"):  # the type of a structure
                constants.append((each, str(member._fields)))


def _names(code: CodeType) -> set[str]:
    """Return the global names and attributes in a function's code, and in that of functions within it."""
    inner = (_names(value) for value in code.co_consts if isinstance(value, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*inner)


def unspecialized(value: Any, kind: Any, key: Any) -> tuple[Any, Any]:
    """Return Triton's (type, specialisation key) of an argument, without specialising on integer values.

    ``kind`` and ``key`` are the type and key that Triton has computed. Triton always specialises on the
    integers of a tuple.
    """
    if isinstance(value, tuple):
        fields = [unspecialized(*field) for field in zip(value, kind, key, strict=True)]
        kinds, keys = zip(*fields, strict=True)
        return (type(kind)(*kinds), type(key)(*keys)) if hasattr(value, "_fields") else (kinds, keys)
    if type(value) is int:
        return "i32" if kind == "constexpr" else kind, None
    return kind, key


class KeptFunction(_Kept, JITFunction):
    """A ``@triton.jit`` function that is compiled when it is launched."""


def kernel(**options: Any) -> Callable[[Callable], Any]:
    """Return a decorator like :func:`triton.jit`. :func:`load_or_compile` compiles the decorated kernels."""
    if knobs.runtime.interpret:
        return triton.jit(**options)
    return lambda function: KeptFunction(function, **options)


def gluon_kernel(**options: Any) -> Callable[[Callable], Any]:
    """Return a decorator like :func:`kernel`, for Gluon."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    class KeptGluonFunction(_Kept, GluonJITFunction):
        """A Gluon function that is compiled when it is launched."""

    return lambda function: KeptGluonFunction(function, **options)


def load_or_compile(src: Any, target: Any = None, options: dict | None = None, **more: Any) -> Any:
    """Compile as :func:`triton.compile` does, or load the kernel if it has been compiled before.

    Folders of compiled kernels are searched first, then Triton's disk cache. The look-up in that cache is
    faster than Triton's own.
    """
    if (named := _named.get()) is not None:
        named[key_in_folders(src, target, options)] = src, target, options
        raise _OnlyNamedError
    if _is_observed():
        return triton.compile(src, target=target, options=options, **more)
    if (found := find(src, target, options)) is not None:
        return found
    from flashtile.backends.common.first_calls import alone

    with _announced(src.name), alone(key_in_folders(src, target, options), target):
        return load_or_compile_alone(src, target, options, **more)


def find(src: Any, target: Any, options: dict | None) -> Any:
    """Return a kernel from the folders of compiled kernels or Triton's disk cache, or None."""
    if folders := compiled_folder.in_use_for(target):
        key = key_in_folders(src, target, options)
        for folder in folders:
            if (found := folder.load(key, src)) is not None:
                return found
    return _load(src, target, options, _key_file())


class _OnlyNamedError(Exception):
    """Ends the compilation of a kernel inside :func:`only_naming`."""


@contextlib.contextmanager
def only_naming() -> Iterator[dict[str, tuple[Any, Any, Any]]]:
    """Inside the context, no kernel is compiled or loaded. The context ends at the first one.

    The dictionary then has (source, target, options) of this kernel under its key
    (:func:`compiled_folder.key_of`). It is empty if this process already uses the kernel.
    """
    named: dict[str, tuple[Any, Any, Any]] = {}
    token = _named.set(named)
    try:
        with contextlib.suppress(_OnlyNamedError):
            yield named
    finally:
        _named.reset(token)


_named: ContextVar[dict[str, tuple[Any, Any, Any]] | None] = ContextVar("named_kernels", default=None)


def key_in_folders(src: Any, target: Any, options: dict | None) -> str:
    """Return the key of a kernel (:func:`compiled_folder.key_of`) with options that are not parsed."""
    from triton.compiler.compiler import make_backend

    parsed, variables = _parsed(src, make_backend(target), options)
    return compiled_folder.key_of(src, target, parsed, variables)


def _parsed(src: Any, backend: Any, options: dict | None) -> tuple[Any, list[tuple[str, str]]]:
    """Return the compiler's parsed options, and the environment variables that change what it compiles."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    parsed = backend.parse_options(dict(options or {}, **src.parse_options()))
    return parsed, sorted(get_cache_invalidating_env_vars().items())


def load_or_compile_alone(src: Any, target: Any, options: dict | None, **more: Any) -> Any:
    """Return a kernel from Triton's disk cache, or compile it. The caller holds the kernel's lock."""
    key_file = _key_file()
    found = _load(src, target, options, key_file)
    if found is None:
        _keep_key(key_file)
        found = triton.compile(src, target=target, options=options, **more)
    return found


def stored_key() -> str | None:
    """Return the ``triton_key`` that a process has stored for this installation of Triton, or None."""
    file = _key_file()
    return file.read_text() if file.is_file() else None


def _key_file() -> Path:
    return Path(knobs.cache.dir) / "flashtile" / fingerprint(Path(triton.__file__).parent)


@contextlib.contextmanager
def _announced(name: str) -> Iterator[None]:
    """Print a line to a terminal if a kernel compiles for longer than ANNOUNCED_AFTER."""
    if os.environ.get(QUIET) == "1" or not _has_terminal():
        yield
        return
    line = f"flashtile: compiling {name}; `flashtile compile` does it ahead of time ({QUIET}=1 hides this)"
    timer = threading.Timer(ANNOUNCED_AFTER, print, (line,), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _has_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # None in a program that was started without stderr, or closed
        return False


def fingerprint(installation: Path) -> str:
    """Return a digest of Triton's version and path, and of the sizes and times of its compiler's files."""
    parts = [triton.__version__, str(installation)]
    for path in _compiler_files(installation):
        status = path.stat()
        parts.append(f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _compiler_files(installation: Path) -> Iterator[Path]:
    for name in COMPILER_FOLDERS:
        for folder, folders, files in os.walk(installation / name, followlinks=True):
            folders.sort()
            yield from (Path(folder, file) for file in sorted(files) if file.endswith(COMPILER_FILES))


def _is_observed() -> bool:
    """Whether a setting or a hook of Triton requires that ``triton.compile`` is called for every kernel."""
    return bool(
        knobs.compilation.always_compile
        or knobs.compilation.listener is not None
        or knobs.runtime.add_stages_inspection_hook is not None
    )


def _load(src: Any, target: Any, options: dict | None, key_file: Path) -> Any:
    """Return the compiled kernel from Triton's disk cache, or None if there is no readable entry for it."""
    try:
        from triton.compiler.compiler import CompiledKernel, make_backend
        from triton.runtime.cache import get_cache_manager

        triton_key = key_file.read_text()
        backend = make_backend(target)
        parsed, variables = _parsed(src, backend, options)
        key = f"{triton_key}-{src.hash()}-{backend.hash()}-{parsed.hash()}-{variables}"
        name = hashlib.sha256(key.encode()).hexdigest()
        metadata = f"{src.name[:150]}.json"
        group = get_cache_manager(name).get_group(metadata) or {}
        return CompiledKernel(src, group, name) if metadata in group else None
    except Exception:  # the caller falls back to triton.compile, which reports a lasting error
        return None


def _keep_key(key_file: Path) -> None:
    """Store ``triton_key``, which Triton computes once in a process that compiles.

    Several processes may do this at the same time.
    """
    try:
        from triton.runtime.cache import triton_key

        key = triton_key()
        if key_file.exists() and key_file.read_text() == key:
            return
        key_file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(key_file, key)
    except (ImportError, OSError):  # this Triton has no such function, or the cache cannot be written
        return
