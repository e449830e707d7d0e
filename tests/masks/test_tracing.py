"""From functions to programs: what is kept, what is written down, what else sees a call."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import flex_attention

import closures
import flashtile
from flashtile import masks
from flashtile.api import masks as functional
from flashtile.masks.block_mask import of_flex_attention
from flashtile.masks.evaluate import evaluate
from flashtile.masks.mods import traced
from flashtile.masks.operations import INTS, OPERATIONS
from flashtile.masks.program import derivatives, parse
from flashtile.operators import functions as operators
from flashtile.operators.attention import BACKWARD, FORWARD
from flashtile.problems.attention import NO_EXTRAS, Options
from flashtile.problems.masks import MAX_CAPTURED
from mod_cases import HEADS, MODS, SEQLEN_K, SEQLEN_Q
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

FACTOR = 2.0


def _doubled(score, batch, head, q_idx, kv_idx):
    return score * FACTOR


def test_a_function_is_traced_again_only_where_it_reads_something_else(monkeypatch) -> None:
    first = traced("score_mod", _doubled)
    assert traced("score_mod", _doubled) is first
    monkeypatch.setattr("test_tracing.FACTOR", 3.0)
    assert "mul score 3.0" in str(traced("score_mod", _doubled).program)
    limits = [4]

    def within(batch, head, q_idx, kv_idx):
        return kv_idx < limits[0]

    assert "lt kv 4" in str(traced("mask_mod", within).program)
    limits[0] = 5  # a list may change without being another
    assert "lt kv 5" in str(traced("mask_mod", within).program)

    def closed(limit):
        def mask(batch, head, q_idx, kv_idx):
            return kv_idx < limit

        def change(to):
            nonlocal limit
            limit = to

        return mask, change

    mask, change = closed(7)
    assert traced("mask_mod", mask) is traced("mask_mod", mask)
    change(8)
    assert "lt kv 8" in str(traced("mask_mod", mask).program)


def test_what_is_kept_lives_no_longer_than_its_function() -> None:
    table = torch.ones(2)
    mod = masks.score_mod(lambda score, batch, head, q_idx, kv_idx: score + table[head])
    gone = weakref.ref(mod.function)
    q = torch.randn(1, 4, 2, 8)
    flashtile.attention(q, q, q, score_mod=mod)
    del mod
    gc.collect()
    assert gone() is None


def test_a_function_without_a_module_is_kept_like_any_other() -> None:
    scope = {"torch": torch}
    exec("def made(score, b, h, q_idx, kv_idx): return torch.nn.functional.relu(score)", scope)
    made = scope["made"]
    assert made.__module__ is None
    assert traced("score_mod", made) is traced("score_mod", made)


@walk("name", MODS)
def test_the_text_says_all_of_a_program(name) -> None:
    for kind in ("score_mod", "mask_mod"):
        function = MODS[name]("cpu").arguments.get(kind)
        if function is not None:
            program = traced(kind, function).program
            assert parse(str(program)) == program
            if kind == "score_mod":
                both, _ = derivatives(program, frozenset(range(8)))
                assert parse(str(both)) == both


def test_a_triton_function_is_one_of_torch() -> None:
    triton = pytest.importorskip("triton")
    tl = triton.language

    most = tl.constexpr(2)

    @triton.jit
    def distance(q, kv):
        return triton.language.minimum(tl.abs(q - kv), most)

    @triton.jit
    def per_head(score, b, h, q, kv, table, SIZE: tl.constexpr = 3):
        bias = tl.load(table + h * SIZE + distance(q, kv))
        return tl.where(kv <= q, score + bias, -float("inf"))

    table = torch.randn(2, 3, requires_grad=True)
    mod = masks.from_triton("score_mod", per_head, table)
    q, k, v = torch.randn(3, 1, 9, 2, 8).unbind()

    def same(score, batch, head, q_idx, kv_idx):
        bias = table[head, (q_idx - kv_idx).abs().clamp(max=2)]
        return torch.where(kv_idx <= q_idx, score + bias, -float("inf"))

    outs = [flashtile.attention(q, k, v, score_mod=function) for function in (mod, same)]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum() + out.square().sum(), table) for out in outs))


def test_ints_of_triton_functions_have_32_bits_and_divide_towards_zero() -> None:
    triton = pytest.importorskip("triton")

    @triton.jit
    def mask(b, h, q, kv):
        hashed = (q * 1103515245 + kv * 12345) > 0
        return (((q - kv) % 3) == 1) | (((q - kv) // 2) < -1) & hashed

    i, j = torch.arange(8, dtype=torch.int32)[:, None], torch.arange(8, dtype=torch.int32)
    quotient = torch.div(i - j, 2, rounding_mode="trunc")
    expected = ((i - j).fmod(3) == 1) | (quotient < -1) & (i * 1103515245 + j * 12345 > 0)
    mod = masks.from_triton("mask_mod", mask)
    assert torch.equal(mod(0, 0, i.long(), j.long()), expected)
    index = torch.zeros((), dtype=torch.int64)
    inputs = {"b": index, "h": index, "q": i.long(), "kv": j.long()}
    assert torch.equal(evaluate(traced("mask_mod", mod).program, inputs, [])[0], expected)


def test_opcheck() -> None:
    mask_mod = MODS["document"]("cpu").arguments["mask_mod"]
    block_mask = masks.create_block_mask(mask_mod, 2, None, SEQLEN_Q, SEQLEN_K, BLOCK_SIZE=16)
    bias = torch.randn(HEADS, 15, requires_grad=True)
    given = functional.functions(masks.relative_position(bias), None, block_mask)
    extras, options = operators.with_functions(NO_EXTRAS, Options(), given)
    tensors = [torch.randn(2, n, HEADS, 16, requires_grad=True) for n in (SEQLEN_Q, SEQLEN_K, SEQLEN_K)]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(FORWARD.operator, FORWARD.flat(tensors, extras, options), test_utils=tests)
    out, lse = (t.detach() for t in FORWARD.operator(*FORWARD.flat(tensors, extras, options)))
    saved = (torch.randn_like(out), None, *tensors, out, lse)
    torch.library.opcheck(BACKWARD.operator, BACKWARD.flat(saved, extras, options), test_utils=tests)


def test_gradients_of_several_results_at_once() -> None:
    """``is_grads_batched`` maps the backward pass over the gradients of out."""
    table = torch.randn(HEADS, 15, requires_grad=True)
    block_mask = masks.create_block_mask(masks.causal(), None, None, 8, 8, BLOCK_SIZE=16)
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 8, HEADS, 8).unbind())
    out = flashtile.attention(q, k, v, score_mod=masks.relative_position(table), block_mask=block_mask)
    given, douts = (q, k, v, table), torch.randn(3, *out.shape)
    batched = torch.autograd.grad(out, given, douts, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(out, given, dout, retain_graph=True) for dout in douts]
    for ours, expected in zip(batched, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(expected))


def test_tangents_of_a_gradient_of_out() -> None:
    table = torch.randn(HEADS, 15, requires_grad=True)
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 8, HEADS, 8).unbind())
    out = flashtile.attention(q, k, v, score_mod=masks.relative_position(table))
    dout, tangent = torch.randn(2, *out.shape)
    expected = torch.autograd.grad(out, (q, v, table), tangent, retain_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(dout, tangent)
        found = torch.autograd.grad(out, (q, v, table), dual)
        tangents = [forward_ad.unpack_dual(t).tangent for t in found]
    torch.testing.assert_close(tangents, list(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("error:Dynamo detected")
def test_compiled() -> None:
    """A graph of one piece, forward and backward, without warnings."""
    bias = torch.randn(2, 7, requires_grad=True)
    block_mask = masks.create_block_mask(masks.causal(), None, None, 40, 40, BLOCK_SIZE=16)
    score_mod = masks.relative_position(bias)

    def attend(q, k, v):
        return flashtile.attention(q, k, v, score_mod=score_mod, block_mask=block_mask)

    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 40, 2, 16).unbind())
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for ours, wanted in zip(
        torch.autograd.grad(compiled(q, k, v).square().sum(), (q, bias)),
        torch.autograd.grad(attend(q, k, v).square().sum(), (q, bias)),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("create", [masks.create_block_mask, flex_attention.create_block_mask])
def test_block_masks_compiled(create: Any) -> None:
    block_mask = create(lambda b, h, q, kv: q >= kv, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)

    def attend(q, k, v):
        return flashtile.attention(q, k, v, block_mask=block_mask)

    q, k, v = torch.randn(3, 1, 40, 2, 16).unbind()
    out = attend(q, k, v)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), out)
    torch.testing.assert_close(attend(q, k, v), out)
    torch._dynamo.reset()


def test_a_number_goes_with_tensors_on_any_device_in_a_graph(monkeypatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    factor, table = torch.tensor(2.0), torch.ones(2, device="meta")
    q = torch.empty(1, 4, 2, 8, device="meta")
    score_mod = masks.score_mod(lambda score, b, h, q_idx, kv_idx: score * factor + table[h])
    extras, _ = functional.with_functions(q, q, NO_EXTRAS, Options(), score_mod, None, None)
    assert [t.device.type for t in extras if t is not None] == ["meta", "meta"]


def test_a_number_in_a_tensor_goes_with_tensors_on_any_device() -> None:
    """It becomes a constant of the program, so any number of them may be read."""
    factors = torch.full((MAX_CAPTURED + 1,), 2.0).unbind()
    q = torch.empty(1, 4, 2, 8, device="meta")

    def score_mod(score, b, h, q_idx, kv_idx):
        return functools.reduce(operator.mul, factors, score)

    assert flashtile.attention(q, q, q, score_mod=score_mod).device.type == "meta"
    assert traced("score_mod", score_mod).tensors == ()


def test_a_block_mask_is_signed_again_when_its_lists_lie_elsewhere() -> None:
    block_mask = masks.create_block_mask(masks.causal(), None, None, 40, 40, BLOCK_SIZE=16)
    q, k, v = torch.randn(3, 1, 40, 2, 16).unbind()
    out = flashtile.attention(q, k, v, block_mask=block_mask)
    given = functional.functions(None, None, block_mask)
    assert functional.functions(None, None, block_mask) is given
    assert given.extras is not None
    (signed,) = given.extras.signature()
    assert given.extras.signature()[0] is signed
    unaligned = torch.zeros(block_mask.kv_indices.numel() + 1, dtype=torch.int32)[1:]
    block_mask.kv_indices.data = unaligned.view_as(block_mask.kv_indices).copy_(block_mask.kv_indices)
    assert given.extras.signature() != (signed,)
    torch.testing.assert_close(flashtile.attention(q, k, v, block_mask=block_mask), out)


def test_score_mods_of_a_block_mask_share_what_is_kept() -> None:
    """Unless they capture tensors, which would be kept alive."""
    slopes = torch.rand(2)
    block_mask = masks.create_block_mask(masks.causal(), None, None, 40, 40, BLOCK_SIZE=16)
    alone = functional.functions(None, None, block_mask)
    q, k, v = torch.randn(3, 1, 40, 2, 16).unbind()

    def steep(score, b, h, q_idx, kv_idx):
        return score + 0.5 * (kv_idx - q_idx)

    def flat(score, b, h, q_idx, kv_idx):
        return score * 2.0

    cases = (steep, True), (flat, True), (masks.softcap(3.0), True), (masks.alibi(slopes), False)
    for score_mod, kept in cases:
        given = functional.functions(score_mod, None, block_mask)
        assert (given.extras is alone.extras) is kept
        expected = flashtile.attention(q, k, v, mask_mod=masks.causal(), score_mod=score_mod)
        for _ in range(2):
            out = flashtile.attention(q, k, v, block_mask=block_mask, score_mod=score_mod)
            torch.testing.assert_close(out, expected)
    assert functional.functions(None, None, block_mask) is alone


def test_a_block_mask_of_flex_attention_is_converted_once() -> None:
    theirs = flex_attention.create_block_mask(
        lambda b, h, q, kv: q >= kv, None, None, 40, 40, device="cpu", BLOCK_SIZE=16
    )
    ours = of_flex_attention(theirs)
    assert of_flex_attention(theirs) is ours
    theirs.kv_num_blocks = theirs.kv_num_blocks.clone()
    assert of_flex_attention(theirs) is not ours
    assert of_flex_attention(theirs).kv_num_blocks is theirs.kv_num_blocks
    theirs.kv_num_blocks = torch.stack([theirs.kv_num_blocks] * 2, -1)[..., 0]
    theirs.kv_num_blocks.zero_()  # into what lies apart
    before = of_flex_attention(theirs).kv_num_blocks
    theirs.kv_num_blocks += 1
    assert (of_flex_attention(theirs).kv_num_blocks == before + 1).all()


@pytest.mark.parametrize(
    "functions",
    [
        {"mask_mod": lambda b, h, i, j: j < NUMBERS[0] + 5},
        {"mask_mod": lambda b, h, i, j: j < NUMBERS.max().item() + 1},
        {"score_mod": lambda s, b, h, i, j: s * NUMBERS.float().mean()},
    ],
    ids=["element", "item", "0-dim"],
)
def test_functions_that_read_numbers_are_explained(functions) -> None:
    q = torch.randn(1, 16, 2, 8)
    assert flashtile.explain(q, q, q, **functions).backend == "cpu"
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert flashtile.attention(fake, fake, fake, **functions).shape == q.shape


NUMBERS = torch.tensor([3, 5])


def test_dynamo_does_not_warn_of_our_caches() -> None:
    torch._dynamo.reset()
    q, table = torch.randn(1, 16, 2, 16), torch.randn(2)
    call = torch.compile(
        lambda q: flashtile.attention(q, q, q, score_mod=lambda s, b, h, i, j: s * table[h]),
        backend="aot_eager",
        fullgraph=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")
        call(q)


def test_a_call_is_repeated_with_copies_only_if_strides_were_refused() -> None:
    calls, tables = [], [torch.ones(2) for _ in range(MAX_CAPTURED + 1)]

    def score_mod(score, b, h, i, j):
        calls.append(None)
        return sum((table[h] for table in tables), score)

    q = torch.randn(1, 16, 2, 16)[..., ::2]
    with pytest.raises(ValueError, match="score_mod must read at most"):
        flashtile.attention(q, q, q, score_mod=score_mod)
    assert len(calls) == 1


def test_explained() -> None:
    from flashtile.io_model import CARDS

    q = torch.randn(1, 40, 2, 16, dtype=torch.bfloat16)
    explanation = flashtile.explain(q, q, q, mask_mod=masks.causal(), card=CARDS["h200"])
    assert explanation.operations == ("forward", "backward")
    assert explanation.backend == "hopper"
    wide = torch.randn(1, 40, 2, 264, dtype=torch.bfloat16)
    explanation = flashtile.explain(wide, wide, wide, mask_mod=masks.causal(), card=CARDS["h200"])
    assert explanation.backend == "portable"
    assert explanation.reasons_against["hopper"] == "it takes mask_mod for head sizes up to 256"


def test_tensors_of_both_functions_are_numbered_in_turn() -> None:
    bias, first, last = torch.tensor([0.5, 2.0]), torch.tensor([1, 0]), torch.tensor([3, 5])

    def near(batch, head, q_idx, kv_idx):
        return (kv_idx >= first[head]) & (kv_idx < last[head])

    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
    out = flashtile.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h] * j, mask_mod=near)
    j = torch.arange(6)
    added = bias[:, None] * j
    added = added.masked_fill((j < first[:, None]) | (j >= last[:, None]), -torch.inf)
    expected = flashtile.attention(q, k, v, bias=added[None, :, None].expand(1, 2, 6, 6))
    torch.testing.assert_close(out, expected)


def test_generated_functions_are_one_for_each_text() -> None:
    pytest.importorskip("triton")
    from flashtile.backends.portable.attention.functions import mask_function
    from flashtile.problems.masks import Mods

    text = str(traced("mask_mod", masks.window(3, -1)).program)
    again = str(traced("mask_mod", masks.window(3, -1)).program)
    other = str(traced("mask_mod", masks.window(3, 2)).program)
    assert mask_function(Mods(mask_mod=text)) is mask_function(Mods(mask_mod=again))
    assert mask_function(Mods(mask_mod=text)).__name__ != mask_function(Mods(mask_mod=other)).__name__


@walk("name", [name for name, found in OPERATIONS.items() if found.simplify is not None])
def test_what_is_simplified_is_what_the_operation_gives(name) -> None:
    """With an operand that is known only later, and with numbers alone."""
    operation = OPERATIONS[name]
    logical = name in ("and", "or", "xor", "not", "bool")
    values = (False, True) if logical else (0, 1, 2, 3)
    unary = ("not", "neg", "abs", "float", "bool", *INTS)
    count = 3 if name == "where" else 1 if name in unary else 2
    later, told = object(), 0
    for operands in itertools.product((*values, later), repeat=count):
        found = operation.simplify(*operands)
        if later not in operands:
            assert found is not None
        for value in values if found is not None else ():
            known = [torch.tensor(value if operand is later else operand) for operand in operands]
            if name == "where":
                known[0] = known[0].bool()
            expected = operation.evaluate(*known)
            simplified = torch.as_tensor(value if found is later else found).to(expected)
            torch.testing.assert_close(simplified, expected, atol=0, rtol=0, equal_nan=True)
            told += 1
    assert told


@walk(("left", "right"), [(0, 0), (0, -1), (-1, 0), (1, 2), (-1, -1)])
def test_a_window_counts_from_its_own_key(left, right) -> None:
    distance = torch.arange(5) - torch.arange(5)[:, None]
    seen = torch.ones(5, 5, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    found = masks.window(left, right)(0, 0, torch.arange(5)[:, None], torch.arange(5))
    assert torch.equal(torch.as_tensor(found).expand(5, 5), seen)


WRITTEN = {
    "to int": lambda s, b, h, q, kv: s.int() * 0.5,
    "equal booleans": lambda s, b, h, q, kv: torch.where((q > 2) == (kv > 2), s, -torch.inf),
    "ordered booleans": lambda s, b, h, q, kv: s + ((q > 2) < (kv > 2)) * 2 + ((q > 3) != (s > 0)),
    "to bool": lambda s, b, h, q, kv: s + (kv - 2).bool() * 3.0,
    "to float": lambda s, b, h, q, kv: s + kv.float() ** -1.0,
    "dtype": lambda s, b, h, q, kv: s.to(torch.int64) + s.to(dtype=torch.float32),
    "logical": lambda s, b, h, q, kv: torch.where(torch.logical_and(q, kv), s, -s),
    "logical not": lambda s, b, h, q, kv: s * torch.logical_not(kv),
    "reversed": lambda s, b, h, q, kv: (7 - s) + 2 / (kv + 1) + 9 % (q + 1),
    "shifts": lambda s, b, h, q, kv: s + ((kv << 2) >> 1) + (q ^ kv) + (q | 1) + (kv & 2),
    "whole": lambda s, b, h, q, kv: s + kv // 2 - (q + 5) % 3 + torch.floor(s),
    "powers": lambda s, b, h, q, kv: s**3 + (s * s) ** 0.5 + s**4 - s**2,
    "powers of ints": lambda s, b, h, q, kv: s + (q - 2) ** 65 % 7 + (kv + 1) ** 200 % 11 + kv**64 % 5,
    "alpha": lambda s, b, h, q, kv: torch.add(s, q, alpha=2) - torch.sub(kv, q, alpha=3),
    "clamp": lambda s, b, h, q, kv: s.clamp(-0.5, 0.75) + s.clamp(max=0.1) + s.clamp(min=0.2),
    "ints beyond float32": lambda s, b, h, q, kv: s + (torch.relu(kv + 2**24) + torch.floor(kv + 2**24)) % 4,
    "ints stay ints": lambda s, b, h, q, kv: s + (kv + 2**24) * q**0 % 4 + s.type_as(q) % 4,
    "type_as": lambda s, b, h, q, kv: s + kv.type_as(s) * 2.0**30 + (kv - 2).type_as(kv > q) * 3.0,
    "signs": lambda s, b, h, q, kv: s.abs() * s.sign() - (-s) + torch.relu(s),
    "silu": lambda s, b, h, q, kv: torch.nn.functional.silu(s) + torch.tan(s) + torch.tan(q / 7),
    "masked_fill": lambda s, b, h, q, kv: s.masked_fill(q < kv, b.new_ones(b.shape)).masked_fill(kv == 0, 2),
}
"""Functions that mean the same on tensors."""


def _filled(s, b, h, q, kv):
    s.masked_fill_(q < kv, -torch.inf)
    return s


def _augmented(s, b, h, q, kv):
    s *= 2
    t = s.float()
    t += kv
    return s


def _raised(s, b, h, q, kv):
    t = s**1
    t += kv
    return s * t


@pytest.mark.parametrize(
    ("function", "same"),
    [
        (_filled, lambda s, b, h, q, kv: s.masked_fill(q < kv, -torch.inf)),
        (_augmented, lambda s, b, h, q, kv: s * 2),
        (_raised, lambda s, b, h, q, kv: s * (s + kv)),
        (
            lambda s, b, h, q, kv: torch.nn.functional.relu(s, inplace=True) + s,
            lambda s, b, h, q, kv: 2 * torch.relu(s),
        ),
    ],
)
def test_functions_in_place_change_their_operand(function, same) -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
    expected = flashtile.attention(q, k, v, score_mod=same)
    attend = functools.partial(flashtile.attention, score_mod=function)
    torch.testing.assert_close(attend(q, k, v), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(q, k, v), expected)
    with pytest.raises(TypeError, match="a float cannot be written in place of an int"):
        traced("score_mod", lambda s, b, h, q, kv: s + q.add_(0.5))


@pytest.mark.parametrize("make", closures.DEFINED_IN_THE_CALL)
def test_functions_of_the_graph_itself_compile(make) -> None:
    def attend(q):
        return flashtile.attention(q, q, q, score_mod=make(q))

    q = torch.randn(1, 6, 2, 8)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attend, backend="eager", fullgraph=True)(q), attend(q))


@pytest.mark.parametrize("name", ["relu_", "zero_", "rrelu_"])
def test_a_function_in_place_that_dynamo_hides_breaks_the_graph(name) -> None:
    change = getattr(torch, name)

    def score_mod(s, b, h, q, kv):
        change(s)
        return s

    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
    attend = functools.partial(flashtile.attention, score_mod=score_mod)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="does not show a function in place"):
        torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager")
    if name == "relu_":
        torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))
    else:
        with pytest.raises(TypeError, match=f"torch's {name} is not one of the operations that compile"):
            compiled(q, k, v)


@walk("name", WRITTEN)
def test_a_program_computes_what_its_function_does_on_tensors(name) -> None:
    generator = torch.Generator().manual_seed(1)
    score = torch.randn(5, 6, generator=generator) * 2
    q, kv = torch.arange(5)[:, None], torch.arange(6)
    b = h = torch.zeros((), dtype=torch.int64)
    program = traced("score_mod", WRITTEN[name]).program
    inputs = {"score": score, "b": b, "h": h, "q": q, "kv": kv}
    (found,) = evaluate(program, inputs, [], kind="score_mod")
    torch.testing.assert_close(found, WRITTEN[name](score, b, h, q, kv).float())


def test_a_symbol_that_outlives_its_trace_is_refused() -> None:
    kept: list[Any] = []
    traced("score_mod", lambda s, b, h, q, kv: s + 0.0 * bool(kept.append(s)))
    with pytest.raises(TypeError):
        torch.exp(kept[0])


def test_a_tensor_may_be_indexed_in_steps() -> None:
    table = torch.ones(2, 3, 4, 5)
    both = (lambda s, b, h, q, kv: s + table[b][h, q][kv]), (lambda s, b, h, q, kv: s + table[b, h, q, kv])
    in_steps, at_once = (traced("score_mod", function).text for function in both)
    assert in_steps == at_once
    for function, error in (
        (lambda s, b, h, q, kv: s + table[b][h], "of 4 dimensions must be read with 4 indices, got 2"),
        (lambda s, b, h, q, kv: s + table[b][h, q, kv, 0], "must be read with 4 indices, got 5"),
        (lambda s, b, h, q, kv: s + (table[b, h, q] - table[b, h, kv]), "with 4 indices, got 3"),
        (lambda s, b, h, q, kv: s + table[b, h, q].sum(), "with 4 indices, got 3"),
        (lambda s, b, h, q, kv: s + 5 // table[b, h, q] ** 2, "with 4 indices, got 3"),
        (lambda s, b, h, q, kv: s if table[b, h, q] else -s, "with 4 indices, got 3"),
        (lambda s, b, h, q, kv: s + sum(table[b, h, q]), "not iterable"),
    ):
        # The message ends with the line of the function, which also contains ``error``.
        with pytest.raises(TypeError, match=f"^score_mod does not compile: .*{error}"):
            traced("score_mod", function)
