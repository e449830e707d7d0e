"""Functions of scores and masks that read something from outside, which then changes: each call must see it.

``STATES`` are the places that a function can read, each with a change. :func:`check` calls attention, changes
the state and calls again; what it is held to is the plain function, evaluated on all scores at once.
``make fuzz`` has a family that draws states, ways and numbers of changes.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks
from torch.torch_version import TorchVersion

import flashtile
from flashtile import masks

WAYS = ("eager", "compiled", "fullgraph", "exported")


class State(NamedTuple):
    """A function that reads something, and a change of that."""

    function: Callable[..., Any]
    change: Callable[[], None]
    kind: str = "score_mod"
    needs_python: bool = False
    """No graph can hold what it does: it makes a number of a tensor's data, or calls ``globals``."""
    unguarded: bool = False
    """Dynamo does not see its change, in any compiled function."""


STATES: dict[str, Callable[[], State]] = {}


def state(make: Callable[[], State]) -> Callable[[], State]:
    STATES[make.__name__] = make
    return make


class _Steps:
    """Numbers that a state holds in turn, none of which the function has seen before."""

    def __init__(self) -> None:
        self.last = 1

    def __call__(self) -> float:
        self.last += 1
        return self.last / 4


W, LIMIT = 0.25, 3
outside = types.ModuleType("state_of_closures")
sys.modules[outside.__name__] = outside


def scaled(score, b, h, q, kv, w):
    return score + w * kv


def of_keywords(score, b, h, q, kv, *, w=0.25):
    return score + w * kv


def read_attribute(of):
    return of.w


def _set(owner: Any, name: str = "w") -> Callable[[], None]:
    """Gives the attribute a number, and every change another."""
    steps = _Steps()

    def change() -> None:
        setattr(owner, name, steps())

    change()
    return change


def _item(container: Any, key: Any) -> Callable[[], None]:
    steps = _Steps()

    def change() -> None:
        container[key] = steps()

    change()
    return change


@state
def closure() -> State:
    w = 0.25

    def change() -> None:
        nonlocal w
        w += 0.25

    return State(lambda s, b, h, q, kv: s + w * kv, change)


@state
def a_global() -> State:
    return State(lambda s, b, h, q, kv: s + W * kv, _item(globals(), "W"))


@state
def a_global_by_name() -> State:
    return State(lambda s, b, h, q, kv: s + globals()["W"] * kv, _item(globals(), "W"), needs_python=True)


@state
def a_global_of_a_mask() -> State:
    def change() -> None:
        globals()["LIMIT"] = LIMIT % 8 + 1

    return State(lambda b, h, q, kv: kv < LIMIT, change, "mask_mod")


@state
def a_global_under_and_masks() -> State:
    first, change, *_ = a_global_of_a_mask()
    return State(and_masks(first, lambda b, h, q, kv: q >= 0), change, "mask_mod")


@state
def a_global_under_or_masks() -> State:
    first, change, *_ = a_global_of_a_mask()
    return State(or_masks(first, lambda b, h, q, kv: q == kv), change, "mask_mod")


@state
def a_global_under_ready_masks() -> State:
    first, change, *_ = a_global_of_a_mask()
    return State(masks.mask_mod(first) | masks.causal(), change, "mask_mod")


@state
def a_global_of_a_helper() -> State:
    def helper(kv):
        return W * kv

    return State(lambda s, b, h, q, kv: s + helper(kv), _item(globals(), "W"))


@state
def a_global_of_another_namespace() -> State:
    scope: dict[str, Any] = {}
    exec("def made(s, b, h, q, kv): return s + w * kv", scope)
    return State(scope["made"], _item(scope, "w"))


@state
def a_class() -> State:
    class Config:
        w = 0.25

    # Dynamo of torch 2.11 takes numbers of classes for constants, of torch 2.13 it guards them.
    old = TorchVersion(torch.__version__) < "2.13"
    return State(lambda s, b, h, q, kv: s + Config.w * kv, _set(Config), unguarded=old)


@state
def an_instance() -> State:
    config = types.SimpleNamespace()
    return State(lambda s, b, h, q, kv: s + config.w * kv, _set(config))


@state
def a_callable() -> State:
    class Biased:
        def __call__(self, s, b, h, q, kv):
            return s + self.w * kv

    biased = Biased()
    return State(biased, _set(biased))


@state
def a_method() -> State:
    class Biased:
        def bias(self, s, b, h, q, kv):
            return s + self.w * kv

    biased = Biased()
    return State(biased.bias, _set(biased))


@state
def a_named_tuple_of_a_cell() -> State:
    config = collections.namedtuple("Config", "w")(0.25)
    steps = _Steps()

    def change() -> None:
        nonlocal config
        config = config._replace(w=steps())

    return State(lambda s, b, h, q, kv: s + config.w * kv, change)


@state
def a_tuple_of_a_number_and_a_dict() -> State:
    config: tuple[int, dict[str, Any]] = (1, {})
    return State(lambda s, b, h, q, kv: s + config[0] * config[1]["w"] * kv, _item(config[1], "w"))


@state
def a_module_of_torch() -> State:
    drop = torch.nn.Dropout(0.0)
    probabilities = _Steps()

    def change() -> None:
        drop.p = probabilities() / 8

    return State(lambda s, b, h, q, kv: s + drop.p * kv, change)


@state
def a_module() -> State:
    return State(lambda s, b, h, q, kv: s + outside.w * kv, _set(outside))


@state
def a_module_in_an_inner_function() -> State:
    return State(lambda s, b, h, q, kv: (lambda: s + outside.w * kv)(), _set(outside))


@state
def a_module_that_a_helper_is_given() -> State:
    return State(lambda s, b, h, q, kv: s + read_attribute(outside) * kv, _set(outside))


@state
def an_import() -> State:
    def imports(s, b, h, q, kv):
        import state_of_closures

        return s + state_of_closures.w * kv

    return State(imports, _set(outside))


@state
def an_attribute_of_the_function() -> State:
    def function(s, b, h, q, kv):
        return s + function.w * kv

    return State(function, _set(function))


@state
def a_list() -> State:
    numbers = [0.25]
    return State(lambda s, b, h, q, kv: s + numbers[0] * kv, _item(numbers, 0))


@state
def a_dict() -> State:
    numbers = {"w": 0.25}
    return State(lambda s, b, h, q, kv: s + numbers["w"] * kv, _item(numbers, "w"))


@state
def a_builtin_of_a_dict() -> State:
    numbers = {"w": 0.25}
    read = numbers.__getitem__
    # Dynamo of torch 2.11 has no bound methods of dicts, of torch 2.13 it has.
    old = TorchVersion(torch.__version__) < "2.13"
    return State(lambda s, b, h, q, kv: s + read("w") * kv, _item(numbers, "w"), needs_python=old)


@state
def a_default() -> State:
    def function(s, b, h, q, kv, w=0.25):
        return s + w * kv

    steps = _Steps()

    def change() -> None:
        function.__defaults__ = (steps(),)

    return State(function, change)


@state
def a_default_of_a_keyword() -> State:
    def function(s, b, h, q, kv, *, w=0.25):
        return s + w * kv

    return State(function, _item(function.__kwdefaults__, "w"))


@state
def the_code() -> State:
    def function(s, b, h, q, kv):
        return s

    others = iter(
        [lambda s, b, h, q, kv: s + 0.25 * kv, lambda s, b, h, q, kv: s * 2, lambda s, b, h, q, kv: -s] * 9
    )

    def change() -> None:
        function.__code__ = next(others).__code__

    return State(function, change)


@state
def keywords_of_a_partial() -> State:
    function = functools.partial(scaled, w=0.25)
    return State(function, _item(function.keywords, "w"))


@state
def a_partial_of_a_cell() -> State:
    inner = functools.partial(of_keywords)
    return State(lambda *arguments: inner(*arguments), _item(inner.keywords, "w"))


@state
def a_cache() -> State:
    numbers = [0.25]
    read = functools.lru_cache(lambda: numbers[0])
    item = _item(numbers, 0)

    def change() -> None:
        item()
        read.cache_clear()

    return State(lambda s, b, h, q, kv: s + read() * kv, change)


@state
def a_list_of_a_helper() -> State:
    numbers = [0.25]

    def reads(kv):
        return numbers[0] * kv

    return State(lambda s, b, h, q, kv: s + reads(kv), _item(numbers, 0))


@state
def a_function_that_calls_itself() -> State:
    w = 0.25

    def power(s, b, h, q, kv, n=2):
        return s + w * kv if n == 0 else power(s, b, h, q, kv, n - 1)

    def change() -> None:
        nonlocal w
        w += 0.25

    return State(power, change)


def _tensor(*values: float, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@state
def a_captured_tensor() -> State:
    table = _tensor(0.5, -0.5)

    def change() -> None:
        table.add_(0.25)

    return State(lambda s, b, h, q, kv: s + table[h] * kv, change)


@state
def a_captured_tensor_through_data() -> State:
    table = _tensor(0.5, -0.5)

    def change() -> None:
        table.data = table.data + 0.25

    return State(lambda s, b, h, q, kv: s + table[h] * kv, change)


@state
def the_dtype_of_a_captured_tensor() -> State:
    table = _tensor(1, 2)
    dtypes = iter([torch.float32, torch.int32, torch.float64, torch.int64] * 9)

    def change() -> None:
        table.data = (table.data + 1).to(next(dtypes))

    return State(lambda s, b, h, q, kv: torch.where(s < 0, 1.5 * table[h] * kv, s + table[h] // 2), change)


@state
def a_number_in_a_tensor() -> State:
    t = torch.tensor(0.5)

    def change() -> None:
        t.add_(0.25)

    return State(lambda s, b, h, q, kv: s + t * kv, change)


@state
def a_parameter_of_no_dimension() -> State:
    t = torch.nn.Parameter(torch.tensor(0.5))

    def change() -> None:
        with torch.no_grad():
            t.add_(0.25)

    return State(lambda s, b, h, q, kv: s + t * kv, change)


@state
def an_element() -> State:
    lengths = _tensor(3, 5)

    def change() -> None:
        lengths[0] += 1

    return State(lambda b, h, q, kv: kv < lengths[0], change, "mask_mod")


@state
def an_int_of_an_element() -> State:
    lengths = _tensor(3, 5)

    def change() -> None:
        lengths[0] += 1

    return State(lambda b, h, q, kv: kv < int(lengths[0]), change, "mask_mod", needs_python=True)


@state
def an_item() -> State:
    lengths = _tensor(1, 3)

    def change() -> None:
        lengths.add_(1)

    return State(lambda b, h, q, kv: kv < lengths.max().item(), change, "mask_mod", needs_python=True)


@state
def a_shape() -> State:
    table = torch.zeros(3)

    def change() -> None:
        table.resize_(len(table) + 1)

    return State(lambda s, b, h, q, kv: s + kv / table.shape[0], change)


@state
def a_stride() -> State:
    table = torch.zeros(64)

    def change() -> None:
        table.set_(table.untyped_storage(), 0, (2,), (table.stride(0) + 1,))

    return State(lambda s, b, h, q, kv: s + kv / table.stride(0), change)


@state
def an_attribute_of_a_tensor() -> State:
    table = _tensor(0.5, -0.5)
    return State(lambda s, b, h, q, kv: s + table[h] + table.w * kv, _set(table))


@state
def an_attribute_in_a_pattern() -> State:
    table = _tensor(0.5, -0.5)

    def function(s, b, h, q, kv):
        match table:
            case Tensor(w=w):
                return s + table[h] + w * kv
        return s

    return State(function, _set(table))


@state
def whether_a_tensor_learns() -> State:
    table = _tensor(0.5, -0.5)

    def change() -> None:
        table.requires_grad_(not table.requires_grad)

    return State(lambda s, b, h, q, kv: s + (kv if table.requires_grad else table[h]), change)


@state
def a_function_of_math() -> State:
    numbers = (2.0, 3.0)

    def change() -> None:
        nonlocal numbers
        numbers = numbers[0] + 2, numbers[1]

    return State(lambda s, b, h, q, kv: s + math.sqrt(max(numbers)) * kv, change)


def dense(q: Tensor, k: Tensor, v: Tensor, made: State) -> Tensor:
    """Attention by its definition, the function called once with all scores and positions."""
    return torch.einsum("bhij,bjhd->bihd", scores_of(q, k, made).softmax(-1), v)


def scores_of(q: Tensor, k: Tensor, made: State) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    sizes = zip(scores.shape, _VIEWS, strict=True)
    places = [torch.arange(size, device=q.device).view(shape) for size, shape in sizes]
    if made.kind == "score_mod":
        return made.function(scores, *places)
    return torch.where(torch.as_tensor(made.function(*places)), scores, -math.inf)


_VIEWS = (-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)


def caller(made: State, way: str) -> Callable[..., Tensor]:
    """Attention with the function, called in one of ``WAYS``."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, **{made.kind: made.function})

    if way == "compiled":
        return torch.compile(attend, backend="eager")
    if way == "fullgraph":
        return torch.compile(attend, backend="eager", fullgraph=True)
    if way == "exported":
        return lambda *qkv: _exported(attend, qkv)(*qkv)
    return attend


def _exported(attend: Callable[..., Tensor], qkv: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v)

    return torch.export.export(Attend(), qkv).module()


MAX_CHANGES = 6
"""Each of so many changes of a state changes the result."""


def check(name: str, way: str, changes: int = 2, seed: int = 0, device: str = "cpu") -> None:
    """Calls, each after a change, agree with the plain function."""
    with torch.device(device):
        made = STATES[name]()
    if way in ("compiled", "fullgraph"):
        torch._dynamo.reset()
    call = caller(made, way)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 9, 2, 8, generator=generator).to(device).unbind()
    last = None
    for change in range(1 + changes):
        for again in range(2 if way == "eager" else 1):
            expected = dense(q.double(), k.double(), v.double(), made).detach()
            scores = scores_of(q, k, made).detach()
            # A score is off by units of rounding, a probability in proportion to that.
            units = 32 * torch.finfo(q.dtype).eps * (1 + scores[scores.isfinite()].abs().max())
            error = (call(q, k, v).detach() - expected).abs().max()
            message = f"{name} ({way}) is off by {error:.3g} after {change} changes, in call {again}"
            assert error <= units * v.abs().max(), message
        assert last is None or not torch.equal(last, expected), f"{name} changes nothing"
        last = expected
        made.change()


def allowed(name: str, way: str) -> bool:
    """Whether the state's function may be called in this way: a graph of one piece holds all that it does."""
    made = STATES[name]()
    if made.unguarded and way in ("compiled", "fullgraph"):
        return False
    return way in ("eager", "compiled") or not made.needs_python


def _closure(q: Tensor) -> Callable[..., Any]:
    shift = q.mean()
    return lambda s, b, h, i, j: s + shift * (i - j)


def _default(q: Tensor) -> Callable[..., Any]:
    def score_mod(s, b, h, i, j, slope=0.5):
        return s - slope * (i - j)

    return score_mod


def _named_default(q: Tensor) -> Callable[..., Any]:
    def score_mod(s, b, h, i, j, *, slope=0.5):
        return s - slope * (i - j)

    return score_mod


def _closure_and_defaults(q: Tensor) -> Callable[..., Any]:
    shift = q.mean()

    def score_mod(s, b, h, i, j, slope=0.5, *, other=0.25):
        return s + shift - slope * i + other * j

    return score_mod


DEFINED_IN_THE_CALL = (_closure, _default, _named_default, _closure_and_defaults)
"""Makers of a score_mod. In a compiled function that calls one, the score_mod is a function of the graph."""
