"""Tables that one test walks: each row is a subtest, so a failure names its row and the other rows run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def walk(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Decorate a test to call it for each row, as ``pytest.mark.parametrize`` does, but within one test.

    For tables whose rows differ little and take milliseconds. All rows share the test's fixtures, so no
    fixture may be needed to undo what a row changes.

    Args:
        names: the argument, or several, that a row gives.
        rows: values of the argument, or a sequence of values for several.
    """
    names = (names,) if isinstance(names, str) else names
    table = [dict(zip(names, row if len(names) > 1 else (row,), strict=True)) for row in rows]
    assert table

    def decorate(test: Callable) -> Callable:
        parameters = inspect.signature(test).parameters

        @functools.wraps(test)
        def walked(*arguments: Any, subtests: Any, **fixtures: Any) -> None:
            if "subtests" in parameters:  # of a table within this one
                fixtures["subtests"] = subtests
            for number, row in enumerate(table):
                label = " ".join(f"{name}={_short(value, number)}" for name, value in row.items())
                with subtests.test(label):
                    test(*arguments, **row, **fixtures)

        kept = {name: parameter for name, parameter in parameters.items() if name not in names}
        kept["subtests"] = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        walked.__signature__ = inspect.Signature(list(kept.values()))  # type: ignore[attr-defined]
        return walked

    return decorate


def _short(value: Any, number: int) -> str:
    """A text that names the value, or the number of its row."""
    text = getattr(value, "__name__", None) or (value.name if isinstance(value, Path) else repr(value))
    return text if len(text) <= 60 and "\n" not in text else f"row {number}"
