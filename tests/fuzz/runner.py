"""Calls as data: their text, what becomes of them, and the smallest one that fails in the same way."""

from __future__ import annotations

import random
import re
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType

import fuzz.prelude as prelude
from fuzz.prelude import ERRORS, Wrong, names_argument

SHRINK_SECONDS = 20.0


@dataclass(frozen=True)
class Call:
    """A call as text.

    Attributes:
        body: the statements that run and judge it. "OPTIONS" stands where ``options`` go, "GIVEN" where the tensors
            go that the text still uses, as ``name=name``; "NAMES" as ``name``.
        sizes: numbers by name, which the shrinker halves.
        tensors: statements, name and expression, in order; left out where nothing uses the name.
        options: texts that the shrinker leaves out, one at a time.
        fixed: names that stay, such as dtype and device.
        joint: between options.
    """

    body: str
    sizes: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    fixed: dict[str, str] = field(default_factory=dict)
    joint: str = ", "

    def code(self) -> str:
        text = self.body
        if not self.options:
            text = re.sub(r"OPTIONS, |, OPTIONS", "", text)
        text = text.replace("OPTIONS", self.joint.join(self.options))
        lines: list[str] = []
        given = []
        for name, expression in reversed(self.tensors.items()):
            if re.search(rf"\b{name}\b", text) or any(re.search(rf"\b{name}\b", line) for line in lines):
                lines.insert(0, f"{name} = {expression}")
                given.insert(0, name)
        listed = [name for name in given if not name.startswith("_")]
        text = text.replace("GIVEN", ", ".join(f"{name}={name}" for name in listed))
        text = text.replace("NAMES", ", ".join(listed))
        used = "\n".join([*lines, text])
        constants = {**self.fixed, **{name: str(size) for name, size in self.sizes.items()}}
        constants = {name: value for name, value in constants.items() if re.search(rf"\b{name}\b", used)}
        head = [f"{', '.join(constants)} = {', '.join(constants.values())}"] if constants else []
        return "\n".join(["from fuzz.prelude import *", *head, *lines, text])

    def __str__(self) -> str:
        return self.code()


def failure(call: Call) -> tuple[str, str] | None:
    """What is wrong, as (label, text); None where nothing is. A NotImplementedError that names an argument is right."""
    code = call.code()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(code, "<call>", "exec"), {"__name__": "fuzz_call"})
    except Wrong as error:
        return error.label, str(error)
    except NotImplementedError as error:
        words = set(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", code))
        if names_argument(error, words):
            return None
        return "NotImplementedError without a name", str(error)
    except Exception as error:
        return type(error).__name__, "".join(traceback.format_exception(error)[-3:])
    finally:
        prelude.F.scaled_dot_product_attention = _SDPA
    return None


_SDPA = prelude.F.scaled_dot_product_attention


def shrink(call: Call, label: str, seconds: float = SHRINK_SECONDS) -> Call:
    """The same failure with fewer options and smaller sizes, greedily."""
    until, progress = time.monotonic() + seconds, True

    def fails(smaller: Call) -> bool:
        if time.monotonic() > until or smaller.code() == call.code():
            return False
        found = failure(smaller)
        return found is not None and found[0] == label

    while progress:
        progress = False
        for option in call.options:
            smaller = replace(call, options=tuple(o for o in call.options if o is not option))
            if fails(smaller):
                call, progress = smaller, True
        for name in call.sizes:
            for size in (1, call.sizes[name] // 2, call.sizes[name] - 1):
                smaller = replace(call, sizes={**call.sizes, name: size})
                if 0 < size < call.sizes[name] and fails(smaller):
                    call, progress = smaller, True
                    break
        if call.fixed.get("dtype", "torch.float32") != "torch.float32":
            smaller = replace(call, fixed={**call.fixed, "dtype": "torch.float32"})
            if fails(smaller):
                call, progress = smaller, True
    return call


@dataclass
class Outcome:
    calls: int = 0
    failures: list[tuple[str, str, Call]] = field(default_factory=list)  # family and label, text, call


def run(
    families: dict[str, ModuleType],
    seed: int,
    seconds: float,
    calls: int | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
    most: int = 10**9,
) -> Outcome:
    """Draw from the families in turn until the time or the number of calls is over; a label is reported once."""
    outcome, start, known = Outcome(), time.monotonic(), set()
    spent = dict.fromkeys(families, 0.0)
    while time.monotonic() - start < seconds and (calls is None or outcome.calls < calls):
        name = min(spent, key=spent.__getitem__)  # time is shared out evenly
        begin = time.monotonic()
        rng = random.Random(f"{seed}/{name}/{outcome.calls}")
        call = families[name].draw(rng, device)
        found = failure(call)
        outcome.calls += 1
        if found is not None:
            key = f"{name}: {getattr(families[name], 'key', lambda call, label: label)(call, found[0])}"
            if key not in known:
                known.add(key)
                smallest = shrink(call, found[0])
                _, text = failure(smallest) or found
                outcome.failures.append((key, text, smallest))
                say(f"\n--- {name}, {text.strip()}\n{smallest}\n")
                if len(outcome.failures) >= most:
                    break
        spent[name] += time.monotonic() - begin
    return outcome


__all__ = ["ERRORS", "Call", "Outcome", "failure", "run", "shrink"]
