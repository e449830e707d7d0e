"""Compilation of structures by llguidance, and a process in which it is tried first.

A small structure may take llguidance hours or all memory, and a thread cannot be ended. So a process compiles
each structure once before the engine does. It forks itself for each structure, and the fork ends at a limit
of time or memory. This module imports nothing of the package, so that the process starts quickly.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this module's folder, whose modules must not hide others

import os
import pickle
import resource
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MAX_BYTES = 2**31
"""Largest number of bytes that compiling a structure may take, with the vocabulary and the stack."""
STACK_BYTES = 2**29
"""Bytes of the stack of a thread that compiles. The compiler recurses along rules and references, and an
overflow would end the process. Only the used part of a stack takes memory."""


class Vocabulary(NamedTuple):
    """A vocabulary in a form that can be pickled.

    Attributes:
        tokenizer: the text of a tokenizer.json, or the bytes of each token.
        size: number of tokens.
        ends: end tokens.
    """

    tokenizer: str | list[bytes]
    size: int
    ends: list[int]

    def load(self) -> Any:
        """Return llguidance's tokenizer."""
        from llguidance import LLTokenizer

        own: Any = self.tokenizer if isinstance(self.tokenizer, str) else _Bytes(self.tokenizer, self.ends[0])
        return LLTokenizer(own, n_vocab=self.size, eos_token=self.ends)


class _Bytes:
    """A vocabulary of given bytes in the form that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes], end: int):
        self.tokens, self.eos_token_id = tokens, end
        self._found = {text: token for token, text in reversed(list(enumerate(tokens)))}

    def __call__(self, text: str) -> list[int]:
        return [self._found[bytes([byte])] for byte in text.encode() if bytes([byte]) in self._found]


def compile_grammar(tokens: Any, grammar: str) -> Any:
    """Return the matcher of a grammar in llguidance's JSON, which may be in a state of error."""
    from llguidance import LLMatcher, LLParserLimits

    found = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    found.compute_bitmask()  # the first mask may take much longer than later ones, or reach a limit
    return found


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a thread with a stack that is large enough to compile.

    The thread is a daemon, because the process must be able to end while a structure is compiled.
    """
    usual = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread


class Trial:
    """A process that compiles structures, one at a time, each within ``seconds`` of a processor's time.

    The process starts at the first structure. It ends with this process, or when nothing refers to the trial.
    Use it under its ``lock``.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float):
        self.seconds, self.lock = seconds, threading.Lock()
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def bytes_of(self, grammar: str) -> int | None:
        """Compile a grammar, and return how many bytes this took. None: a limit was reached.

        A grammar that llguidance refuses counts as compiled.
        """
        try:
            if self._process is None:
                self._process = self._start()
            _send(self._process.stdin, (grammar, self.seconds))
            assert self._process.stdout is not None
            found: int | None = pickle.load(self._process.stdout)
        except (OSError, EOFError):  # the process was killed; the next structure starts a new one
            self._process = None
            return None
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            # A new session keeps the terminal's SIGINT from the process.
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        weakref.finalize(self, _end, process)
        _send(process.stdin, (sys.path, tuple(self._vocabulary())))
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def _send(file: Any, what: Any) -> None:
    pickle.dump(what, file)
    file.flush()


def _bytes_in_fork(tokens: Any, grammar: str, seconds: float) -> int | None:
    """Compile a grammar in a fork of this process, and return how many bytes this took, or None."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with open(reader, "rb") as found:
            text = found.read()  # ends when the fork does
        os.waitpid(child, 0)
        return int(text) if text else None
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the fork
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))

    def work() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            compile_grammar(tokens, grammar)
        finally:
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            os.write(writer, str((after - before) * (1 if sys.platform == "darwin" else 1024)).encode())
            os._exit(0)

    start_thread(work).join()
    os._exit(1)


def main() -> None:
    """Answer the calls of a :class:`Trial`."""
    sys.path[:], given = pickle.load(sys.stdin.buffer)
    tokens = Vocabulary(*given).load()
    while True:
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _send(sys.stdout.buffer, _bytes_in_fork(tokens, *call))


if __name__ == "__main__":
    main()
