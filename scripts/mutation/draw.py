"""Finds possible one-line faults in the syntax tree of a file, and draws some of them by a seed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any

from mutation.areas import NOT_PLANTED, ROOT, files_of

KINDS = ("operators", "bounds", "constants", "dropped lines", "swapped arguments")
COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
EXTREMES = dict((("min", "max"), ("minimum", "maximum"), ("any", "all")))
EXTREMES |= {new: old for old, new in EXTREMES.items()}
SYMMETRIC = {
    *EXTREMES,
    *("isinstance", "equal", "allclose", "gcd", "transpose", "swapaxes", "broadcast_shapes", "promote_types"),
}
"""Functions whose result stays the same if two arguments are swapped."""
DROPPED_CALLS = {"masked_fill", "clamp", "clip", "reversed", "sorted", "flip", "unsqueeze", "mul", "sub"}
"""Methods that return a changed copy. The fault is to use the original."""
SILENT = re.compile(
    r"(warn|warning|error|debug|info|log|print|device_print|static_print|static_assert|device_assert|assume|multiple_of|gdc_\w+"
    r"|max_contiguous|max_constancy|debug_barrier|\w*Layout|\w*Error|join|TypeVar|cast|field|getLogger)$"
)
"""Calls without effect on results: messages, hints to a compiler or type checker, and code for GPUs alone."""
SPEED = re.compile(
    r"(num_warps|num_stages|num_ctas|maxnreg|eviction_policy|cache_modifier|loop_unroll_factor|warp_specialize"
    r"|pack|is_pure|timeout|non_blocking|daemon|stacklevel|strict|name|help|description)$"
)
"""Keyword arguments that change no result."""
SPOKEN = re.compile(r"(__repr__|__str__|_?explain\w*|_?describe\w*|_?reason\w*)$")
"""Functions whose result is a text for a person, or a list of compile cases."""


@dataclass(frozen=True)
class Edit:
    """Replacement of the bytes ``start`` to ``end`` (exclusive) of a file by ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Mutant:
    """One possible fault: ``line`` becomes ``fault``.

    If a file has several lines with the same text and fault, ``nth`` counts them from 0.
    """

    file: str
    line: str
    fault: str
    nth: int
    kind: str
    in_function: bool
    """False if the line runs when the module is imported."""
    first: int
    last: int
    """First and last line of the statement, or of its head: the tests that run one of them meet the fault."""
    at: int
    """Line number of the fault."""
    edit: Edit

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Identity of the fault, which stays the same when other lines move."""
        return self.file, self.line, self.fault, self.nth

    def __str__(self) -> str:
        return f"{self.file}:{self.at} ({self.kind})\n    - {self.line}\n    + {self.fault}"

    def planted(self, source: str) -> str:
        data = source.encode()
        return (data[: self.edit.start] + self.edit.text.encode() + data[self.edit.end :]).decode()

    @cached_property
    def reason(self) -> str:
        """The reason why the fault changes no result; "" if it may change one."""
        for entry in NOT_PLANTED["faults"]:
            if (entry["file"], entry["line"], entry["fault"]) == self.key[:3]:
                return entry["reason"]
        return ""

    def rank(self, seed: int) -> bytes:
        """Return the key that sorts faults into the order of a draw. It does not depend on other lines."""
        return blake2b(repr((seed, *self.key)).encode()).digest()


@dataclass(frozen=True)
class Scope:
    """The classes and functions around a piece of code; ``name`` joins their names with dots."""

    name: str = ""
    runs_later: bool = False
    """Whether the code is in a function, so it does not run when the file is imported."""

    def inner(self, name: str) -> str:
        return f"{self.name}.{name}".lstrip(".")


class Source:
    """A source file, in which :meth:`mutants` finds all possible faults."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.lines = text.splitlines()
        self._data = text.encode()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line.encode()))
        self._starts = starts

    def mutants(self) -> list[Mutant]:
        """Return all faults in the order of the syntax tree."""
        found: list[Mutant] = []
        seen: dict[tuple[str, str], int] = {}
        for kind, edit, statement, scope in self._walk(ast.parse(self.text), None, Scope()):
            first, last = statement.lineno, _end_of_head(statement)
            row = self._data[: edit.start].count(b"\n")
            old, new = self._rows(edit)
            if old == new:
                continue
            nth = seen[old, new] = seen.get((old, new), -1) + 1
            found.append(Mutant(self.file, old, new, nth, kind, scope.runs_later, first, last, row + 1, edit))
        return found

    def _rows(self, edit: Edit) -> tuple[str, str]:
        """Return the lines of an edit before and after it, with white space reduced to single spaces."""
        start = self._data.rfind(b"\n", 0, edit.start) + 1
        end = self._data.find(b"\n", edit.end)
        before, after = self._data[start : edit.start], self._data[edit.end : end]
        texts = (self._data[start:end], before + edit.text.encode() + after)
        old, new = (" ".join(text.decode().split()) for text in texts)
        return old, new

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,  # type: ignore[attr-defined]
            self._starts[node.end_lineno - 1] + node.end_col_offset,  # type: ignore[attr-defined]
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._data[start:end].decode()

    def _walk(
        self, node: ast.AST, statement: ast.stmt | None, scope: Scope
    ) -> Iterator[tuple[str, Edit, ast.stmt, Scope]]:
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.Continue, ast.Break)):
            statement = node  # the compiler may optimise continue and break away, so no test runs their lines
        if self._is_left_out(node, scope):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope = Scope(scope.inner(node.name), scope.runs_later or not isinstance(node, ast.ClassDef))
        if statement is not None:
            for kind, edit in chain(self._of_expression(node), self._of_statement(node)):
                yield kind, edit, statement, scope
        on_card = _on_card(node)
        for child in _children(node):
            if child in on_card:
                continue
            yield from self._walk(child, statement, scope)

    def _is_left_out(self, node: ast.AST, scope: Scope) -> bool:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
            return True
        if isinstance(node, ast.keyword):
            return SPEED.match(node.arg or "") is not None
        if isinstance(node, ast.Call):
            card = ast.unparse(node.func).startswith("torch.cuda.")
            return card or SILENT.match(_name(node.func)) is not None
        if isinstance(node, ast.If):
            return ast.unparse(node.test).endswith("TYPE_CHECKING")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return SPOKEN.match(node.name) is not None or self._is_not_planted(scope.inner(node.name))
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            return self._is_not_planted(scope.inner(_name(target)))
        return False

    def _is_not_planted(self, name: str) -> bool:
        return any(
            fnmatchcase(self.file, entry["file"]) and re.fullmatch(entry["name"], name)
            for entry in NOT_PLANTED["code"]
        )

    def _replaced(self, node: ast.AST, text: str) -> Edit:
        return Edit(*self._span(node), text)

    def _between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Edit]:
        """Yield the edit that replaces the operator ``old`` between two operands by ``new``."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._data[start:end].decode()
        place = re.search(re.escape(old).replace(r"\ ", r"\s+"), gap)
        if place is not None and "#" not in gap:
            offset = start + len(gap[: place.start()].encode())
            yield Edit(offset, offset + len(place[0].encode()), new)

    def _of_expression(self, node: ast.AST) -> Iterator[tuple[str, Edit]]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                for edit in self._between(left, right, *COMPARISONS[type(operator)]):
                    yield "operators", edit
        elif isinstance(node, ast.BoolOp):
            names = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in pairwise(node.values):
                for edit in self._between(left, right, *names):
                    yield "operators", edit
                yield "operators", self._replaced(left, "True" if names[0] == "and" else "False")
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            if not any(_is_text(side) for side in (node.left, node.right)):
                for edit in self._between(node.left, node.right, *ARITHMETIC[type(node.op)]):
                    yield "operators", edit
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
            yield "operators", self._replaced(node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.IfExp):
            yield "swapped arguments", self._swapped(node.body, node.test, node.orelse)
        elif isinstance(node, ast.Constant):
            yield from self._of_constant(node)
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if bound is not None:
                    yield "bounds", self._replaced(bound, self._one_more(bound))
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)

    def _of_constant(self, node: ast.Constant) -> Iterator[tuple[str, Edit]]:
        if isinstance(node.value, bool):
            yield "constants", self._replaced(node, str(not node.value))
        elif isinstance(node.value, int):
            yield "constants", self._replaced(node, str(node.value + 1))
            if node.value > 1:
                yield "constants", self._replaced(node, str(node.value - 1))
        elif isinstance(node.value, float):
            yield "constants", self._replaced(node, str(node.value + 1.0))

    def _of_call(self, node: ast.Call) -> Iterator[tuple[str, Edit]]:
        name = _name(node.func)
        plain = [a for a in node.args if not isinstance(a, ast.Starred) and a not in _on_card(node)]
        if name in EXTREMES:
            _, end = self._span(node.func)
            yield "bounds", Edit(end - len(name), end, EXTREMES[name])
        if name in ("range", "arange", "static_range"):
            for argument in plain[:2]:
                yield "bounds", self._replaced(argument, self._one_more(argument))
        if name in DROPPED_CALLS and isinstance(node.func, ast.Attribute):
            yield "dropped lines", self._replaced(node, self._text(node.func.value))
        if name in ("reversed", "sorted") and isinstance(node.func, ast.Name) and len(plain) == 1:
            yield "dropped lines", self._replaced(node, f"list({self._text(plain[0])})")
        if name not in SYMMETRIC and not any(isinstance(a, ast.Starred) for a in node.args):
            for left, right in pairwise(plain):
                if ast.dump(left) != ast.dump(right) and not (_is_text(left) or _is_text(right)):
                    yield "swapped arguments", self._swapped(left, None, right)

    def _one_more(self, node: ast.AST) -> str:
        text = self._text(node)
        return f"{text} + 1" if isinstance(node, (ast.Name, ast.Attribute, ast.Call)) else f"({text}) + 1"

    def _swapped(self, left: ast.AST, middle: ast.AST | None, right: ast.AST) -> Edit:
        """Return the edit that exchanges ``left`` and ``right``; with a ``middle`` node, its text stays."""
        (start, left_end), (right_start, end) = self._span(left), self._span(right)
        between = self._data[left_end:right_start].decode()
        return Edit(start, end, self._text(right) + between + self._text(left))

    def _of_statement(self, node: ast.AST) -> Iterator[tuple[str, Edit]]:
        if isinstance(node, ast.If):
            yield "operators", self._replaced(node.test, "False")
            yield "operators", self._replaced(node.test, "True")
        elif isinstance(node, ast.While):
            yield "operators", self._replaced(node.test, "False")
        elif isinstance(node, ast.AugAssign):
            yield "dropped lines", self._replaced(node, "pass")
            if type(node.op) in ARITHMETIC and not _is_text(node.value):
                old, new = ARITHMETIC[type(node.op)]
                for edit in self._between(node.target, node.value, f"{old}=", f"{new}="):
                    yield "operators", edit
        elif isinstance(node, (ast.Continue, ast.Break, ast.Delete)):
            yield "dropped lines", self._replaced(node, "pass")
        elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
            call = node.value.value if isinstance(node.value, ast.Await) else node.value
            if not (isinstance(call, ast.Call) and self._is_left_out(call, Scope())):
                yield "dropped lines", self._replaced(node, "pass")
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            again = isinstance(target, ast.Name) and any(
                isinstance(part, ast.Name) and part.id == target.id for part in ast.walk(node.value)
            )
            if again or isinstance(target, (ast.Attribute, ast.Subscript)):
                yield "dropped lines", self._replaced(node, "pass")
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1:
            left, right = node.value.elts[:2]
            yield "swapped arguments", self._swapped(left, None, right)


def _on_card(node: ast.AST) -> list[Any]:
    """Return the children of a node that matter on a GPU alone."""
    if isinstance(node, ast.If) and "cuda" in ast.unparse(node.test):
        return node.body
    if isinstance(node, ast.Call) and _name(node.func) == "warp_specialize":
        return node.args[1:]  # warps and registers of the partitions
    return []


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node without annotations, decorators, base classes and type parameters."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _name(node: ast.AST) -> str:
    """Return the last name of an expression such as ``a.b.c``; "" if it is not of this form."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


def _end_of_head(statement: ast.stmt) -> int:
    """Return the last line of a statement, or of its head if it contains other statements.

    For a function this is the last line of its body: defaults in the head take effect where the body uses
        them.
    """
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return statement.end_lineno or statement.lineno
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return max(statement.lineno, body[0].lineno - 1)
    return statement.end_lineno or statement.lineno


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def drawn(area: str, count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """Draw ``count`` faults of an area that may change a result, from each kind in turn.

    Faults drawn on the way that change no result are returned as well; they have a ``reason``.
    """
    texts = {file: (root / file).read_text("utf-8") for file in files_of(area)}
    every = [mutant for file, text in texts.items() for mutant in Source(file, text).mutants()]
    begin = len(area) % len(KINDS)  # areas begin with different kinds, so small samples cover all kinds
    kinds = KINDS[begin:] + KINDS[:begin]
    of_kinds = [sorted((m for m in every if m.kind == kind), key=lambda m: m.rank(seed)) for kind in kinds]
    found: list[Mutant] = []
    for mutant in chain.from_iterable(zip_longest(*of_kinds)):
        if mutant is not None and _is_python(mutant.planted(texts[mutant.file])):
            found.append(mutant)
            count -= not mutant.reason
            if count <= 0:
                break
    return found
