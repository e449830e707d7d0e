"""Helpers shared by commands: checks of options before anything runs, and the console."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from flashtile.checks.vllm_arguments import SERVE_ARGUMENTS, check_argument

if TYPE_CHECKING:
    import torch

MODEL_NAMES = (
    "opt-13b", "llama-7b", "llama-13b", "llama-65b", "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b",
    "mistral-7b", "qwen2.5-7b",
)  # fmt: skip
"""The models of :mod:`flashtile.io_model`, for help texts, which import no torch."""
WIDTH = 160
"""Width in columns of tables that are not printed to a terminal."""
OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator")
"""Parts of torch's out-of-memory messages, which distinguish them from other RuntimeErrors."""


Device = Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu. Default: cuda if present.")]
ModelDtype = Annotated[str, typer.Option(help="Dtype of the model: auto, bfloat16, float16 or float32.")]
CacheDtype = Annotated[str, typer.Option(help="Dtype of keys and values: auto or fp8.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")]
"""Options of several commands."""


class BadArgument(typer.BadParameter):
    """An error of a Python function, whose message names the command's options instead of arguments."""

    def format_message(self) -> str:
        message = str(super().format_message())
        for parameter in self.ctx.command.params if self.ctx else ():
            if parameter.param_type_name == "option" and parameter.name and parameter.opts:
                message = _with_option(message, parameter.name, parameter.opts[0])
        return re.sub(r" \(give [^()]*=[^()]*\)", "", message)  # drop hints about Python's arguments


def _with_option(message: str, name: str, option: str) -> str:
    """Replace the name of a Python argument in an error message by the option of the command line.

    A name of one word, such as ``model``, may also be an English word in the message. Such a name is replaced
    only in ``NAME must be`` and ``NAME=``.
    """
    message = re.sub(rf"(?<![\w.-]){name}=(True\b|(?!\w))", option, message)
    message = re.sub(rf"(?<![\w.-]){name}=", f"{option} ", message)
    alone = rf"{name}(?![\w./])" if "_" in name else rf"{name}(?= must be )"
    return re.sub(rf"(?<![\w./-]){alone}", option, message)


@contextmanager
def bad_parameters() -> Iterator[None]:
    """Convert the ``with`` block's errors about arguments to errors of the command line.

    The command then prints one line and exits with code 2.
    """
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise BadArgument(str(error)) from None


@contextmanager
def bad_models() -> Iterator[None]:
    """Convert errors as :func:`bad_parameters` does, and also errors that a model causes.

    A model causes an error if it cannot be read, or if it does not fit into memory.
    """
    with bad_parameters():
        try:
            yield
        except (OSError, ModuleNotFoundError) as error:
            raise ValueError(str(error)) from None
        except (MemoryError, RuntimeError) as error:
            text = str(error)
            if not isinstance(error, MemoryError) and not any(words in text for words in OUT_OF_MEMORY):
                raise
            sentences = re.split(r"(?<=\.)\s+", text.strip())
            raise ValueError(f"there is not enough memory for the model: {' '.join(sentences[:3])}") from None


def as_arguments(context: typer.Context, **changed: Any) -> list[str]:
    """Return the command line's arguments, as strings, with the parameters in ``changed`` replaced."""
    values, found = {**context.params, **changed}, []
    for parameter in context.command.params:
        value = values.get(parameter.name or "")
        if value is None:
            continue
        if parameter.param_type_name == "argument":
            found.append(str(value))
        elif isinstance(value, bool):
            found += parameter.opts[:1] if value else parameter.secondary_opts[:1]
        else:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                found += [parameter.opts[0], str(one)]
    return found


def read_options(context: typer.Context, path: Path | None) -> None:
    """Callback of ``--config``: take the options that the command line does not give from a file.

    The file is TOML, or JSON if its name ends in .json. Its keys are names of options and arguments of the
    command, with ``-`` or ``_``. A list repeats an option, and a table is the JSON of its option.
    """
    if path is None:
        return
    known = {one.name: one for one in context.command.params if one.name != "config"}
    found: dict[str, Any] = {}
    for key, value in _read_table(path).items():
        parameter = known.get(key.replace("-", "_"))
        if parameter is None and key.replace("-", "_") in SERVE_ARGUMENTS:
            check_option(key.replace("-", "_"), value)
            continue
        if parameter is None:
            raise typer.BadParameter(f"{path}: {key!r:.60} is not an option of this command")
        repeats = getattr(parameter, "multiple", False)
        if isinstance(value, list) and not repeats:
            raise typer.BadParameter(f"{path}: {key} must be a single value, got a list")
        if value is not None:
            many = value if isinstance(value, list) else [value]
            texts = [one if isinstance(one, str) else json.dumps(one) for one in many]
            found[str(parameter.name)] = texts if repeats else texts[0]
    context.default_map = found


def check_option(name: str, value: Any) -> None:
    """Refuse an option of vLLM's server by name, unless its value changes nothing here."""
    try:
        check_argument(SERVE_ARGUMENTS, name, value)
    except NotImplementedError as error:
        message = str(error).replace(name, f"--{name.replace('_', '-')}", 1)
        raise typer.BadParameter(message) from None


def _read_table(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file that holds a table."""
    try:
        text = path.read_text("utf-8")
        if path.suffix != ".json":
            import tomllib

            return tomllib.loads(text)
        table = json.loads(text)
    except ModuleNotFoundError:
        raise typer.BadParameter(f"{path}: TOML needs Python 3.11; give a file that ends in .json") from None
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error}") from None
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML, or JSON in a file that ends in .json"
        raise typer.BadParameter(f"{path} must be {kind}: {error}") from None
    if not isinstance(table, dict):
        raise typer.BadParameter(f"{path} must hold an object, got {type(table).__name__}")
    return table


def parse_device(name: str | None) -> torch.device:
    """Return the device that an option names, or the default device if ``name`` is None."""
    from flashtile.hardware import machine

    with bad_parameters():
        return machine.find_device(name)


def finite(value: float | None) -> float | None:
    """Callback of an option that accepts finite numbers only."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be finite, got {value}")
    return value


def output_file(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """Return a callback of an option that accepts the path of a writable file.

    With ``suffixes``, the name of the file must end in one of them.
    """

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        if suffixes and path.suffix.lower() not in suffixes:
            raise typer.BadParameter(f"must end in {', '.join(suffixes)}, got {str(path)!r}")
        if path.is_dir():
            raise typer.BadParameter(f"must be a file, but {str(path)!r} is a folder")
        if not path.parent.is_dir():
            raise typer.BadParameter(
                f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}"
            )
        _check_writable(path, path if path.exists() else path.parent)
        return path

    return check


def output_folder(path: Path) -> Path:
    """Callback of an option that accepts a folder that exists and is writable, or that can be created."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{str(path)!r} must be a folder, but {str(there)!r} is a file")
    _check_writable(path, there)
    return path


def console() -> Console:
    """Return a console as wide as the terminal, or :data:`WIDTH` columns wide if there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def progress_bar(to: Console) -> Progress:
    """Return a progress bar. It is shown only on a terminal and disappears when it is full."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=to, transient=True, disable=not to.is_terminal)


def say(progress: Progress, line: str) -> None:
    """Print a line of progress unless there is a progress bar. There is none if the output is no terminal."""
    if progress.disable:
        progress.console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def phases(to: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function ``(phase, done, total)`` that shows progress: a bar, or a line for each tenth."""
    with progress_bar(to) as progress:
        bar = progress.add_task("", total=None)

        def show(phase: str, done: int, total: int) -> None:
            progress.update(bar, description=phase, completed=done, total=total)
            if done in {total * tenth // 10 for tenth in range(11)}:
                say(progress, f"{phase}: {done} of {total}")

        yield show


def _check_writable(path: Path, there: Path) -> None:
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{str(path)!r} cannot be written: permission denied")
