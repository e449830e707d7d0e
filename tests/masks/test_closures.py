"""Whatever a function reads from outside is read again when it has changed."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import closures
import flashtile
from flashtile import masks
from flashtile.masks.mods import traced

q, k, v = torch.randn(3, 1, 12, 2, 8, generator=torch.Generator().manual_seed(1)).unbind()


@pytest.mark.parametrize("name", closures.STATES)
def test_a_change_is_seen(name: str) -> None:
    closures.check(name, "eager")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("a_number_in_a_tensor", "fullgraph"),
        ("a_default", "compiled"),
        ("an_int_of_an_element", "compiled"),
        ("a_module_of_torch", "exported"),
        ("an_element", "exported"),
    ],
)
def test_a_change_is_seen_in_graphs(name: str, way: str) -> None:
    closures.check(name, way, changes=1)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(list(closures.STATES)), st.integers(0, 2)), min_size=2, max_size=4))
def test_states_read_together(parts: list[tuple[str, int]]) -> None:
    """One function of several states, of which any may change between calls."""
    made = [closures.STATES[name]() for name, _ in parts]

    def together(s, b, h, i, j):
        for state in made:
            read = state.function(*((s,) if state.kind == "score_mod" else ()), b, h, i, j)
            s = read if state.kind == "score_mod" else torch.where(read, s, s - 1.0)
        return s

    def nested(index: int) -> Any:
        """The same with functions in cells, which guards can follow, instead of a list."""
        if index == len(made):
            return lambda s, b, h, i, j: s
        function, kind, rest = made[index].function, made[index].kind, nested(index + 1)
        if kind == "score_mod":
            return lambda s, b, h, i, j: rest(function(s, b, h, i, j), b, h, i, j)
        return lambda s, b, h, i, j: rest(torch.where(function(b, h, i, j), s, s - 1.0), b, h, i, j)

    for function in (together, nested(0)):
        own = closures.State(function, lambda: None)
        for state, (_, changes) in zip(made, parts, strict=True):
            out = flashtile.attention(q, k, v, score_mod=function)
            torch.testing.assert_close(out.detach(), closures.dense(q, k, v, own).detach())
            for _ in range(changes):
                state.change()
        out = flashtile.attention(q, k, v, score_mod=function)
        torch.testing.assert_close(out.detach(), closures.dense(q, k, v, own).detach())


def test_a_number_that_learns_after_the_first_call_gets_its_gradient() -> None:
    t = torch.tensor(0.5)

    def scaled(score, b, h, i, j):
        return score * t

    flashtile.attention(q, k, v, score_mod=scaled)
    t.requires_grad_()
    flashtile.attention(q, k, v, score_mod=scaled).square().sum().backward()
    expected = torch.autograd.grad(
        closures.dense(q, k, v, closures.State(scaled, lambda: None)).square().sum(), t
    )
    torch.testing.assert_close(t.grad, *expected)


def test_a_tensor_that_gets_a_dimension_is_read_anew() -> None:
    table = torch.ones(2)

    def shifted(s, b, h, i, j):
        return s + table[h]

    flashtile.attention(q, k, v, score_mod=shifted)
    table.unsqueeze_(1)
    with pytest.raises(TypeError, match="of 2 dimensions must be read with 2 indices, got 1"):
        flashtile.attention(q, k, v, score_mod=shifted)


def test_a_function_that_calls_itself_is_freed() -> None:
    """With the tensor that it captures."""
    freed = []

    def call() -> None:
        table = torch.ones(2)

        def power(s, b, h, i, j, n=1):
            return s + table[h] if n == 0 else power(s, b, h, i, j, n - 1)

        flashtile.attention(q, k, v, score_mod=power)
        assert traced("score_mod", power) is traced("score_mod", power)
        freed.append(weakref.ref(table))

    call()
    gc.collect()
    assert freed[0]() is None


def test_a_function_is_freed_without_the_garbage_collector() -> None:
    def made() -> Any:
        table = torch.ones(2)
        return lambda s, b, h, i, j: s + table[h]

    function = made()
    flashtile.attention(q, k, v, score_mod=function)
    gone = weakref.ref(function)
    gc.disable()
    try:
        del function
        assert gone() is None
    finally:
        gc.enable()


def test_a_wrapper_with_the_attributes_of_a_function_has_another_trace() -> None:
    def plain(s, b, h, i, j):
        return s

    traced("score_mod", plain)

    @functools.wraps(plain)
    def doubled(*arguments):
        return 2 * plain(*arguments)

    assert "mul" in traced("score_mod", doubled).text
    assert traced("score_mod", plain).text == "return score"


def _on_first_use(way: str, function: Any, **arguments: Any) -> torch.Tensor:
    call = closures.caller(closures.State(function, lambda: None, **arguments), way)
    torch._dynamo.reset()
    return call(q, k, v)


def test_functions_are_first_called_in_a_graph() -> None:
    """Made in the compiled function, or outside; with tensors, operators and builtins of Python."""
    table = torch.tensor([0.5, -1.0])

    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def attend(q: Any, width: int) -> Any:
        def inner(b, h, i, j):
            return ~(abs(i - j) > width) | (j == width)

        bias = q.sum((0, 1, 3))
        return flashtile.attention(
            q, k, v, mask_mod=inner, score_mod=lambda s, b, h, i, j: s * table[h] + bias[h] - +s / 2
        )

    def plain(q: Any, width: int) -> Any:
        bias = q.sum((0, 1, 3))
        made = closures.State(
            lambda s, b, h, i, j: torch.where(
                ((i - j).abs() <= width) | (j == width), s * table[h] + bias[h] - s / 2, -torch.inf
            ),
            lambda: None,
        )
        return closures.dense(q, k, v, made)

    torch._dynamo.reset()
    for width in (2, 3, 5):  # the second makes Dynamo take width for a symbol
        torch.testing.assert_close(attend(q, width), plain(q, width))


def test_a_number_of_data_is_refused_in_a_graph_of_one_piece() -> None:
    lengths = torch.tensor([3, 5])
    with pytest.raises(Exception, match="a Python number is made of a tensor"):
        _on_first_use("fullgraph", lambda b, h, i, j: j < int(lengths[0]), kind="mask_mod")


def test_a_triton_function_reads_what_changes() -> None:
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def per_head(score, b, h, q, kv, table):
        return score + tl.load(table + h * 2 + kv % 2)

    table = torch.rand(2, 3)[:, :2]  # not contiguous
    mod = masks.from_triton("score_mod", per_head, table)
    same = closures.State(lambda s, b, h, i, j: s + table[h, j % 2], lambda: None)
    flat = masks.from_triton("score_mod", per_head, table.flatten())
    assert traced("score_mod", flat) is traced("score_mod", flat)
    for _ in range(2):
        out = flashtile.attention(q, k, v, score_mod=mod)
        torch.testing.assert_close(out, closures.dense(q, k, v, same))
        table[:, 0] += 1
    table.requires_grad_()
    outs = flashtile.attention(q, k, v, score_mod=mod), closures.dense(q, k, v, same)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), table) for out in outs))
