"""The decoding operators under all that looks into a call: opcheck, compile, fake tensors, gradients."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from cases import FP32
from decode_cases import CASES, build
from flashtile.checks.conversions import as_masking
from flashtile.op.registry import flat
from flashtile.operators import decode as operators
from flashtile.problems.decode import (
    AppendOptions,
    AppendTensors,
    CacheTensors,
    CopyOptions,
    CopyTensors,
    DecodeOptions,
)

BY_NAME = {case.name: case for case in CASES}
ops = torch.ops.flashtile


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def call(name, device="cpu"):
    """(q, k_cache, v_cache, k, v) without NaN, which no two results share, and the other arguments."""
    tensors, arguments = build(BY_NAME[name], FP32, device)
    if tensors[1].dtype.itemsize != 1:
        tensors = tuple(t if t is None else t.nan_to_num(0.5) for t in tensors)
    return tensors, arguments


def cache_tensors(arguments):
    return CacheTensors(**{n: a for n, a in arguments.items() if n in CacheTensors._fields})


def test_fakes_of_partial_results_are_as_wide_as_the_results():
    """As between the halves of attention with a shared prefix."""
    q, cache = torch.randn(2, 1, 4, 16).bfloat16(), torch.randn(2, 8, 2, 16).bfloat16()
    for partial in (False, True):
        options = DecodeOptions(partial=partial)
        real = operators.DECODE((q, cache, cache), operators.DECODE.nothing, options)
        fake = operators.DECODE.fake(q, cache, cache, operators.DECODE.nothing, options)
        assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


DECODE = (
    "paged",
    "dense",
    "causal",
    "ragged-queries",
    "sink",
    "alibi",
    "leftpad",
    "tree-by-batch",
)


@pytest.mark.parametrize("name", DECODE)
def test_opcheck_decode(name):
    (q, k_cache, v_cache, *_), arguments = call(name)
    masking = as_masking(arguments.get("causal", False))
    options = DecodeOptions(max_seqlen_q=arguments.get("max_seqlen_q"), masking=masking)
    given = q, k_cache, v_cache, *cache_tensors(arguments), *flat(options)
    torch.library.opcheck(ops.decode.default, given)


@pytest.mark.parametrize("name", ["append-paged", "append-ragged", "rotary", "append-batch-idx"])
def test_opcheck_append(name):
    (q, k_cache, v_cache, k, v), arguments = call(name)
    tensors = {n: a for n, a in arguments.items() if n in AppendTensors._fields and n != "cu_seqlens_q"}
    if "rotary_cos" in tensors:
        tensors |= {"q": q, "q_rotated": torch.zeros_like(q)}
    options = AppendOptions()
    torch.library.opcheck(
        ops.append_kvcache.default, (k_cache, v_cache, k, v, *AppendTensors(**tensors), *options)
    )


def test_opcheck_slots():
    (_, k_cache, v_cache, *_), _ = call("paged")
    new = torch.randn(3, *k_cache.shape[2:])
    tensors = AppendTensors(slot_mapping=torch.tensor([5, -1, 0]))
    arguments = (k_cache, v_cache, new, new, *tensors, *AppendOptions())
    torch.library.opcheck(ops.append_kvcache.default, arguments)


def test_opcheck_combine():
    arguments = (torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4), torch.bfloat16, None)
    torch.library.opcheck(ops.combine.default, arguments)


@pytest.mark.parametrize("scaled", [False, True])
def test_opcheck_copy_blocks(scaled):
    caches = (torch.randn(2, 6, 4, 2, 8), torch.randn(2, 6, 4, 2, 8))
    descales = (torch.randn(2, 6, 2), torch.randn(2, 6, 2)) if scaled else (None, None)
    pairs = torch.tensor([[1, 2], [-1, 0], [3, 5]])
    torch.library.opcheck(ops.copy_blocks.default, (*caches, pairs, *descales, None, False))


@pytest.mark.parametrize(
    "name",
    [
        "append-paged",
        "everything",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("rotary", "append-ragged", "causal")),
    ],
)
def test_one_compiled_graph_writes_and_attends(name):
    """fullgraph: no break; and the compiled call leaves the caches as the eager one does."""
    tensors, arguments = call(name)
    results = []
    for function in (
        flashtile.flash_attn_with_kvcache,
        torch.compile(flashtile.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager"),
    ):
        q, k_cache, v_cache, k, v = (t if t is None else t.clone() for t in tensors)
        results.append(
            (*function(q, k_cache, v_cache, k, v, return_softmax_lse=True, **arguments), k_cache, v_cache)
        )
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_the_operator_checks_the_data_of_each_call():
    """Without scales, too, and of a signature that it knows."""
    k_cache, v_cache = torch.zeros(2, 1, 4, 16, 2, 8).unbind()
    copy = torch.ops.flashtile.copy_blocks
    rest = *CopyTensors(), *CopyOptions()
    copy(k_cache, v_cache, torch.tensor([[0, 1]]), *rest)
    with pytest.raises(ValueError, match=r"block_pairs \(destinations\) must be from 0 to 3"):
        copy(k_cache, v_cache, torch.tensor([[0, 9]]), *rest)
    with pytest.raises(ValueError, match="v_cache shares memory with k_cache"):
        copy(k_cache, k_cache, torch.tensor([[0, 1]]), *rest)


def test_compiled_prefix_append_and_copy():
    (q, k_cache, v_cache, *_), arguments = call("paged")
    table = arguments["block_table"].clamp(max=len(k_cache) - 1)
    table[:, :2] = table[0, :2]
    lengths = torch.tensor([17, 9, 40], dtype=torch.int32)

    def step(q, k_cache, v_cache, new, slots, pairs):
        flashtile.append_kvcache(k_cache, v_cache, new, new, slot_mapping=slots)
        flashtile.copy_blocks(k_cache, v_cache, pairs)
        out = flashtile.flash_attn_with_shared_prefix(q, k_cache, v_cache, table, lengths, 7)
        return flashtile.flash_attn_combine(torch.stack([out, 2 * out]), torch.zeros(2, *out.shape[:-1]))

    arguments = (torch.randn(2, *k_cache.shape[2:]), torch.tensor([3, 9]), torch.tensor([[0, 1]]))
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = k_cache.clone(), v_cache.clone()
        results.append((*function(q, *caches, *arguments), *caches))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("name", ["paged", "append-ragged", "rotary", "ragged-queries"])
def test_fake_tensors_have_the_shapes_of_real_ones(name):
    tensors, arguments = call(name)
    real = flashtile.flash_attn_with_kvcache(*tensors, return_softmax_lse=True, **arguments)
    with FakeTensorMode() as mode:
        fake = tuple(t if t is None else mode.from_tensor(t) for t in tensors)
        moved = {n: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
        got = flashtile.flash_attn_with_kvcache(*fake, return_softmax_lse=True, **moved)
    for r, f in zip(real, got, strict=True):
        assert (r.shape, r.dtype, r.stride()) == (f.shape, f.dtype, f.stride())


@pytest.mark.parametrize("name", ["paged", "append-paged", "rotary"])
def test_a_wanted_gradient_is_refused_by_name(name):
    (q, *rest), arguments = call(name)
    with torch.no_grad():
        expected = flashtile.flash_attn_with_kvcache(q, *rest, **arguments)
    out = flashtile.flash_attn_with_kvcache(q.requires_grad_(), *rest, **arguments)
    assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match="q must not require a gradient"):
        out.sum().backward()


def test_combine_refuses_a_gradient_and_names_merge_states():
    out_partial = torch.randn(2, 3, 4, 8, requires_grad=True)
    out, _ = flashtile.flash_attn_combine(out_partial, torch.zeros(2, 3, 4))
    with pytest.raises(NotImplementedError, match="merge_states"):
        out.sum().backward()


def test_one_graph_for_every_batch_and_length():
    """Dynamic shapes: nothing in a call depends on a size's value."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flashtile.flash_attn_with_kvcache, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for batch, seqlen in ((3, 5), (5, 7), (6, 10)):
        q, k = torch.randn(batch, seqlen, 4, 16), torch.randn(batch, seqlen, 2, 16)
        table = torch.randperm(batch * 8).view(batch, 8).int()
        lengths = torch.arange(batch, dtype=torch.int32)
        eager, traced = (torch.zeros(batch * 8, 9, 2, 16) for _ in range(2))
        arguments = {"cache_seqlens": lengths, "block_table": table, "causal": True}
        expected = flashtile.flash_attn_with_kvcache(q, eager, eager.clone(), k, k, **arguments)
        assert torch.equal(compiled(q, traced, traced.clone(), k, k, **arguments), expected)
        assert torch.equal(traced, eager)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]
