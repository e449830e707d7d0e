"""Rendering of Jinja chat templates in a sandbox, with bounds on time and memory.

A template comes with the weights and is not trusted. Jinja's sandbox keeps it from Python's internals, but
bounds neither time nor memory, for example of ``{{ 'a' * 10**9 }}``. So a template has a budget of steps and
characters, which grows with the size of the rendered variables. Every loop, call, filter and operator that
can multiply its input is paid from this budget.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE = 2**20
STEPS, CHARACTERS = 2**17, 2**24
STEPS_EACH, CHARACTERS_EACH = 4, 256
"""Additional budget for each character of the variables. It is more than 1, because a template that appends
to a text copies the whole text each time."""
ACCOUNT = " account"
"""The variable that holds the :class:`Account`. Its name has a space, so that no template can use it."""

STRUCTURAL = {
    "abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last",
    "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round", "select",
    "selectattr", "sort", "sum", "unique",
}  # fmt: skip
"""Filters that do not convert their whole input to text."""


class Account:
    """A template's remaining budget of steps and characters."""

    def __init__(self, variables: Mapping[str, Any]):
        self.steps, self.characters = 2**62, 2**62
        self.pay_for(variables)
        size = 2**62 - self.characters
        self.steps, self.characters = STEPS + STEPS_EACH * size, CHARACTERS + CHARACTERS_EACH * size

    def pay(self, characters: int, steps: int = 0) -> None:
        """Subtract characters and steps from the budget. Raise TemplateError if the budget is exceeded."""
        self.characters -= characters
        self.steps -= steps
        if self.characters < 0 or self.steps < 0:
            raise TemplateError("the template computes more than a chat template may")

    def pay_for(self, value: Any, counts: bool = False) -> None:
        """Pay for a value: its length as text in characters, and one step for each element of a container.

        With ``counts``, pay n characters for an integer n. It may be a width or a number of repetitions, so
        the result may have n characters.
        """
        if isinstance(value, str):
            self.pay(len(value))
        elif isinstance(value, int):
            self.pay(abs(value) if counts else value.bit_length() // 3)
        elif isinstance(value, Mapping):
            self.pay_for(list(value))
            self.pay_for(list(value.values()), counts)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self.pay(2 * len(value), len(value))
            for one in value:
                self.pay_for(one, counts)

    def pay_for_text(self, text: str, name: str, given: tuple[Any, ...]) -> None:
        """Pay for the longest text that the method or filter ``name`` of a text can return."""
        self.pay_for(given, counts=True)
        if name == "replace" and len(given) > 1 and all(isinstance(one, str) for one in given[:2]):
            self.pay((len(text) // max(1, len(given[0])) + 1) * len(given[1]))
        elif name == "join" and given and isinstance(given[0], (list, tuple)):
            self.pay(len(text) * len(given[0]))
        elif name == "format":
            self.pay_for([int(digits) for digits in re.findall(r"\d+", text)], counts=True)


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training. Here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _meter(tree: nodes.Template) -> None:
    """Insert filters into a parsed template that pay for its work (see :class:`Account`).

    Each iteration of a loop and each call of a macro costs one step, and one character for each character of
    constant text in its body. The operator ``a ~ b`` costs the length of its operands.
    """
    bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
    for node in bodies:
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.Output([_filter(nodes.Const(""), "charged", nodes.Const(size))]))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = _filter(node.test, "charged", nodes.Const(0))
    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = [_filter(node, "paid") for node in concat.nodes]


def _filter(value: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which operations are paid from the budget of an :class:`Account`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, finalize=_paid,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )  # fmt: skip
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.filters["tojson"] = _to_json
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.filters |= {"charged": _charged, "paid": _paid}

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **options: Any) -> Any:  # noqa: N805
        account: Account = __context[ACCOUNT]
        account.pay(0, 1)
        # If ``__obj`` is a method of a str, get the str. The sandbox replaces str.format by a function, whose
        # ``__wrapped__`` is the method.
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(text, str):
            arguments = tuple(list(one) if isinstance(one, Iterator) else one for one in arguments)
            account.pay_for_text(text, __obj.__name__, (*arguments, *options.values()))
        result = super().call(__context, __obj, *arguments, **options)
        if isinstance(result, str):
            account.pay(len(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        account: Account = context[ACCOUNT]
        account.pay(0, 1)
        if operator == "%" and isinstance(left, str):
            account.pay_for_text(left, "format", (right,))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            account.pay(left.bit_length() * abs(right))
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            count, many = (left, right) if isinstance(left, int) else (right, left)
            account.pay(max(0, count) * len(many) if hasattr(many, "__len__") else 0)
        else:
            for one in (left, right):
                account.pay(len(one) if hasattr(one, "__len__") else 0)
                account.pay(one.bit_length() if isinstance(one, int) else 0)
        return super().call_binop(context, operator, left, right)


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template with variables.

    Raises:
        ValueError: the template is invalid, fails on these variables, refuses them, or exceeds its budget.
    """
    try:
        return _compiled(template).render({**variables, ACCOUNT: Account(variables)})
    except Exception as error:  # a template can raise any exception
        found = str(error) or type(error).__name__
        raise ValueError(f"chat_template cannot render these messages: {found}") from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    if len(template) > MAX_TEMPLATE:
        raise TemplateError(f"expected at most {MAX_TEMPLATE} characters, got {len(template)}")
    environment = BoundedEnvironment()
    tree = environment.parse(template)
    _meter(tree)
    tree.set_environment(environment).set_lineno(1)
    return environment.from_string(tree)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter, so that each call pays for its input and its result from the template's budget."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", "nothing")

    @pass_context
    def metered(context: Context, value: Any, *arguments: Any, **options: Any) -> Any:
        account: Account = context[ACCOUNT]
        account.pay(0, 1)
        if name not in STRUCTURAL:
            value = list(value) if isinstance(value, Iterator) else value
            account.pay_for(value)
            text = value if isinstance(value, str) else ""
            account.pay_for_text(text, name, (*arguments, *options.values()))
            if name == "join" and isinstance(value, (list, tuple)):
                account.pay(sum(len(one) for one in arguments if isinstance(one, str)) * len(value))
        given = {
            "context": (context,), "eval_context": (context.eval_ctx,),
            "environment": (context.environment,), "nothing": (),
        }[wanted]  # fmt: skip
        result = function(*given, value, *arguments, **options)
        if isinstance(result, str):
            account.pay(len(result))
        return result

    return metered


@pass_context
def _charged(context: Context, value: Any, characters: int) -> Any:
    context[ACCOUNT].pay(characters, 1)
    return value


@pass_context
def _paid(context: Context, value: Any) -> Any:
    context[ACCOUNT].pay_for(value)
    return value


def _refuse(text: str) -> None:
    raise TemplateError(text)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON without escaping HTML. This replaces Jinja's ``tojson`` filter, as in Transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
