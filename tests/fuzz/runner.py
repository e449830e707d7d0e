"""Random calls as texts: runs them, and reduces a failing call to a small one that fails in the same way.

A call counts as failed if it fails in repeated runs. A failure for lack of a package, of memory or of file handles does
not count. A call may use ``CPU_SECONDS`` of CPU time; wall-clock time is not limited. A wrong number must also exceed
twice a bound from more trials, because the bound from a few trials is random.
"""

from __future__ import annotations

import contextlib
import errno
import random
import re
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType

import fuzz.prelude as prelude
from flashtile.backends.portable import interpreting
from fuzz.prelude import ERRORS, Wrong, names_argument

SHRINK_SECONDS = 20.0
CPU_SECONDS = 120.0
INTERPRETED = ("attention", "functions", "caches", "fp8", "linear")
"""Families of functions that take a backend by name, most of them."""
WITHOUT_BACKEND = re.compile("profile_scores|flash_attn_interface|merge_states")
OPTIONAL = ("transformers", "triton")
"""Packages that a machine may lack."""
SCARCE = (errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
TOO_LONG = f"takes more than {CPU_SECONDS:g} s of the CPU"


class TooLong(BaseException):
    """Raised if a call has used up its CPU time."""


class Poisoned(Exception):  # noqa: N818 - a verdict
    """Raised if a call has made the GPU fail, so that every later call of this process fails as well."""


class Lacking(Exception):  # noqa: N818 - a verdict
    """Raised if the machine lacks something that the call needs."""


@dataclass(frozen=True)
class Call:
    """A call as text.

    Attributes:
        body: statements that run the call and check it. "OPTIONS" is replaced by ``options``, "NAMES" by the names of
            the tensors that the text uses, and "GIVEN" by these tensors as ``name=name``.
        sizes: numbers by name, which the shrinker makes smaller.
        tensors: expressions by name, in the order of their definition. A tensor whose name is unused is left out, and
            names that begin with "_" are left out of "NAMES" and "GIVEN".
        options: texts of arguments, which the shrinker leaves out one at a time.
        fixed: texts of constants by name, such as dtype and device.
        joint: text between options.
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
    """Run a call and return (label, text) of its failure, or None. A NotImplementedError may name an argument.

    Raises:
        Lacking: the machine lacks something that the call needs.
        Poisoned: the GPU has failed.
    """
    code = call.code()
    try:
        with warnings.catch_warnings(), _limited():
            warnings.simplefilter("ignore")
            exec(compile(code, "<call>", "exec"), {"__name__": "fuzz_call"})
            _wait_for_gpu()  # so that a launch that fails is counted for its own call
    except TooLong:
        return TOO_LONG, TOO_LONG
    except Wrong as error:
        return error.label, str(error)
    except NotImplementedError as error:
        words = set(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", code))
        if names_argument(error, words):
            return None
        return "NotImplementedError without a name", str(error)
    except Exception as error:
        if _lacks(error):
            raise Lacking(f"{type(error).__name__}: {error}") from None
        try:
            _wait_for_gpu()
        except Exception as lasting:
            raise Poisoned(f"{type(error).__name__}: {error}; then {lasting}") from error
        return type(error).__name__, "".join(traceback.format_exception(error)[-3:])
    finally:
        prelude.F.scaled_dot_product_attention = _SDPA
    return None


def _wait_for_gpu() -> None:
    if prelude.torch.cuda.is_initialized():
        prelude.torch.cuda.synchronize()


def _lacks(error: Exception) -> bool:
    """Return whether an error comes from a missing package, or from a lack of memory or another resource."""
    if isinstance(error, ModuleNotFoundError):
        return (error.name or "").partition(".")[0] in OPTIONAL
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return True
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in SCARCE)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise :class:`TooLong` in the block after CPU_SECONDS of CPU time, which other load does not change."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fails_again(call: Call, label: str) -> bool:
    """Return whether the call fails in the same way twice more, with twice the bounds of more trials."""
    with prelude.confirming():
        return all((failure(call) or ("",))[0] == label for _ in range(2))


_SDPA = prelude.F.scaled_dot_product_attention


def shrink(call: Call, label: str, seconds: float = SHRINK_SECONDS) -> Call:
    """Return a call with the same failure, with options removed and sizes reduced greedily."""
    until, progress = time.monotonic() + seconds, True

    def fails(smaller: Call) -> bool:
        if time.monotonic() > until or smaller.code() == call.code():
            return False
        with prelude.confirming():
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
    once: list[tuple[str, str, Call]] = field(
        default_factory=list
    )  # the same, of those that did not fail again
    lacking: Counter[str] = field(default_factory=Counter)  # how often something was not here


def run(
    families: dict[str, ModuleType],
    seed: int,
    seconds: float,
    calls: int | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = print,
    most: int = 10**9,
    begun: Callable[[str, int], None] = lambda family, number: None,
) -> Outcome:
    """Draw and run calls of the families until the time is up or the number of calls is reached.

    Each family gets the same share of the time, and each kind of failure is reported once. The seed determines the
    calls of each family, the time how many of them run. The run ends early after ``most`` failures. ``begun`` is
    called with the family and the number of each call before it runs.

    Raises:
        Poisoned: the GPU has failed.
    """
    outcome, start, known = Outcome(), time.monotonic(), set()
    spent, drawn = dict.fromkeys(families, 0.0), Counter[str]()
    while time.monotonic() - start < seconds and (calls is None or outcome.calls < calls):
        name = min(spent, key=spent.__getitem__)  # the family with the least time
        begin = time.monotonic()
        begun(name, drawn[name])
        call = drawn_call(families[name], seed, name, drawn[name], device)
        drawn[name] += 1
        outcome.calls += 1
        try:
            found = failure(call)
            key = "" if found is None else f"{name}: {_key(families[name])(call, found[0])}"
            if found is not None and key not in known:
                known.add(key)
                _report(name, key, call, found, outcome, say)
        except Lacking as error:
            outcome.lacking[f"{name}: {error}"] += 1
        if len(outcome.failures) >= most:
            break
        spent[name] += time.monotonic() - begin
    return outcome


def drawn_call(family: ModuleType, seed: int, name: str, number: int, device: str) -> Call:
    """Return call ``number`` of a family with a seed. In Triton's interpreter, it runs the portable kernels."""
    call = family.draw(random.Random(f"{seed}/{name}/{number}"), device)
    if not interpreting() or name not in INTERPRETED or WITHOUT_BACKEND.search(call.body):
        return call
    narrow = {"torch.bfloat16": "torch.float16", "torch.float64": "torch.float32"}
    fixed = {name: narrow.get(text, text) for name, text in call.fixed.items()}
    return replace(call, fixed=fixed, options=(*call.options, "backend='portable'"))


def _key(family: ModuleType) -> Callable[[Call, str], str]:
    return getattr(family, "key", lambda call, label: label)


def _report(name: str, key: str, call: Call, found: tuple[str, str], outcome: Outcome, say) -> None:
    label, text = found
    if label != TOO_LONG:
        if not fails_again(call, label):
            outcome.once.append((key, text, call))
            say(f"\n--- {name}, once but not again: {text.strip()}\n{call}\n")
            return
        call = shrink(call, label)
        _, text = failure(call) or found
    outcome.failures.append((key, text, call))
    say(f"\n--- {name}, {text.strip()}\n{call}\n")


__all__ = [
    "ERRORS",
    "Call",
    "Lacking",
    "Outcome",
    "Poisoned",
    "drawn_call",
    "fails_again",
    "failure",
    "run",
    "shrink",
]
