"""What commands share: checks of options, made before anything runs, and the console."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from flashtile.hardware import machine

WIDTH = 160
"""Columns of a table that is not printed to a terminal."""
OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator")
"""In torch's messages: its errors of CUDA and of the CPU have no class in common but RuntimeError."""

STOPPED = 128 + signal.SIGINT
"""Exit code of a command that a signal ended early."""


class BadArgument(typer.BadParameter):
    """An error of a Python function, in which the command's options stand for arguments."""

    def format_message(self) -> str:
        message = str(super().format_message())
        for parameter in self.ctx.command.params if self.ctx else ():
            if parameter.param_type_name == "option" and parameter.name and parameter.opts:
                message = _with_option(message, parameter.name, parameter.opts[0])
        return re.sub(r" \(give [^()]*=[^()]*\)", "", message)  # a hint that the command has no options for


def _with_option(message: str, name: str, option: str) -> str:
    """Names of one word, such as ``model``, may be English: ``NAME must be`` and ``NAME=`` are arguments."""
    message = re.sub(rf"(?<![\w.-]){name}=(True\b|(?!\w))", option, message)
    message = re.sub(rf"(?<![\w.-]){name}=", f"{option} ", message)
    alone = rf"{name}(?![\w./])" if "_" in name else rf"{name}(?= must be )"
    return re.sub(rf"(?<![\w./-]){alone}", option, message)


@contextmanager
def bad_parameters() -> Iterator[None]:
    """Errors of arguments, raised inside, as errors of the command line: one line, exit code 2."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        raise BadArgument(str(error)) from None


@contextmanager
def bad_models() -> Iterator[None]:
    """:func:`bad_parameters`, and so for a model's folder that cannot be read, or has no room in memory."""
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
    """The arguments and options of a command as its command line would have them, some of them changed."""
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


def parse_device(name: str | None) -> torch.device:
    """:func:`flashtile.hardware.machine.find_device` for an option."""
    with bad_parameters():
        return machine.find_device(name)


def finite(value: float | None) -> float | None:
    """Callback of an option: a number that is not infinite."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be finite, got {value}")
    return value


def output_file(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """Callback of an option: a file that can be written, its name ending in one of ``suffixes`` if given."""

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
    """Callback of an option: a folder that can be written to, or made."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{str(path)!r} must be a folder, but {str(there)!r} is a file")
    _check_writable(path, there)
    return path


def console() -> Console:
    """As wide as the terminal; elsewhere as wide as the tables are."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDTH)


def progress_bar(to: Console) -> Progress:
    """A bar that is gone when it is full, and that only a terminal sees."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=to, transient=True, disable=not to.is_terminal)


def say(progress: Progress, line: str) -> None:
    """Print a line of progress where there is no terminal that shows the bar."""
    if progress.disable:
        progress.console.print(line, highlight=False, markup=False, soft_wrap=True)


@dataclass
class Stop:
    """``early`` becomes True if a signal ended the block of :func:`stops_early`."""

    early: bool = False


@contextmanager
def stops_early() -> Iterator[Stop]:
    """End the block, and no more, at an interrupt (Ctrl-C) or SIGTERM."""
    stop = Stop()
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield stop
    except KeyboardInterrupt:
        stop.early = True
    finally:
        signal.signal(signal.SIGTERM, former)


def _check_writable(path: Path, there: Path) -> None:
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{str(path)!r} cannot be written: permission denied")
