"""``mass=``: the probabilities that each cached key received, added to the caller's numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import flashtile
from cases import BF16, FP32, FP64
from decode_cases import CASES, build, check_mass_of_nan
from flashtile.op.registry import flat
from flashtile.problems.decode import CacheTensors, DecodeOptions
from flashtile.testing import decode as testing
from small_calls import needs_compiler
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

BY_NAME = {case.name: case for case in CASES}
NAN = float("nan")


def numbers(k_cache):
    """Random numbers of all keys."""
    return torch.rand(k_cache.shape[:3], generator=torch.Generator().manual_seed(9))


@walk("dtype", [FP64, FP32, BF16])
@walk("name", BY_NAME)
def test_every_feature(name, dtype):
    tensors, arguments = build(BY_NAME[name], dtype, "cpu")
    testing.check(*tensors, mass=numbers(tensors[1]), backend="cpu", **arguments)


@walk("name", ["window-both", "leftpad-paged", "ragged-queries", "batch-idx"])
def test_keys_that_no_query_sees_keep_their_numbers(name):
    (q, k_cache, v_cache, *_), arguments = build(BY_NAME[name], FP32, "cpu")
    reached = torch.zeros(k_cache.shape[:3])
    flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, mass=reached, **arguments)
    mass = torch.where(reached > 0, 0.0, NAN)
    flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, mass=mass, **arguments)
    assert mass.isnan().any()
    torch.testing.assert_close(mass, torch.where(reached > 0, reached, NAN), rtol=0, atol=0, equal_nan=True)


def test_a_row_with_nan_changes_only_the_mass_of_keys_that_it_sees():
    check_mass_of_nan("cpu")


def shared_pages():
    """(q, caches), and a block table of four sequences, three of which begin with the pages of the first."""
    generator = torch.Generator().manual_seed(0)
    q, *caches = (
        torch.randn(s, generator=generator) for s in ((4, 2, 6, 16), (15, 4, 2, 16), (15, 4, 2, 16))
    )
    table = torch.tensor([[7, 2, 9, 0], [7, 2, 1, 3], [4, 5, 6, 8], [7, 10, 11, 12]], dtype=torch.int32)
    return (q, *caches), {"block_table": table, "cache_seqlens": torch.tensor([14, 9, 13, 6]).int()}


def test_shared_pages_get_the_sums_of_their_sequences_in_order():
    (q, *caches), arguments = shared_pages()
    attend = partial(flashtile.flash_attn_with_kvcache, causal=True)
    together, one_by_one = torch.zeros(2, 15, 4, 2)
    out = attend(q, *caches, mass=together, **arguments)
    for b in range(4):
        alone = {name: tensor[b : b + 1] for name, tensor in arguments.items()}
        attend(q[b : b + 1], *caches, mass=one_by_one, **alone)
    assert torch.equal(together, one_by_one)
    assert torch.equal(out, attend(q, *caches, **arguments))
    testing.check(q, *caches, mass=numbers(caches[0]), **arguments)


def test_it_is_added_up_over_steps_beside_the_callers_results():
    (q, k_cache, v_cache, k, v), arguments = build(BY_NAME["append-paged"], FP32, "cpu")
    mass = torch.zeros(k_cache.shape[:3])
    out, lse = torch.full((2, *q.shape), NAN)[0], torch.full((3, 4, 1), NAN)
    for step in range(1, 3):
        got = flashtile.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, mass=mass, out=out, lse=lse, return_softmax_lse=True, **arguments
        )
        assert got[0] is out
        assert got[1] is lse
        # Each query's probabilities add up to 1.
        torch.testing.assert_close(mass.sum(), torch.tensor(12.0 * step))


def test_a_gradient_is_refused():
    (q, k_cache, v_cache, *_), arguments = build(BY_NAME["dense"], FP32, "cpu")
    mass = torch.zeros(k_cache.shape[:3])
    with pytest.raises(ValueError, match=r"mass, out and lse must be None where q requires grad.*no_grad"):
        flashtile.flash_attn_with_kvcache(q.requires_grad_(), k_cache, v_cache, mass=mass, **arguments)
    assert not mass.any()


@pytest.mark.parametrize("name", ["paged", "append-ragged", "rotary"])
def test_compiled_calls_add_the_same(name):
    torch._dynamo.reset()
    tensors, arguments = build(BY_NAME[name], FP32, "cpu")

    def step(mass):
        given = [t if t is None else t.clone() for t in tensors]
        return flashtile.flash_attn_with_kvcache(*given, mass=mass, **arguments) * 2

    masses = numbers(tensors[1]), numbers(tensors[1])
    expected = step(masses[0])
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(masses[1])
    assert torch.equal(got, expected)
    assert torch.equal(*masses)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.thorough
def test_inductor_adds_in_place():
    """The caller's numbers are read and written in a graph that inductor compiles."""
    needs_compiler()
    torch._dynamo.reset()
    tensors, arguments = build(BY_NAME["paged"], FP32, "cpu")

    def step(q, mass):
        mass.mul_(0.5)  # older steps count less
        out = flashtile.flash_attn_with_kvcache(q.sin(), *tensors[1:], mass=mass, **arguments)
        return out.relu(), mass.sum()

    masses = numbers(tensors[1]), numbers(tensors[1])
    expected = step(tensors[0], masses[0])
    with torch._inductor.config.patch(compile_threads=1):  # a pool of processes would import torch each
        got = torch.compile(step, fullgraph=True)(tensors[0], masses[1])
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*masses)
    torch._dynamo.reset()


def test_opcheck():
    (q, k_cache, v_cache, *_), arguments = build(BY_NAME["paged"], FP32, "cpu")
    cache = [t.nan_to_num(0.5) for t in (k_cache, v_cache)]
    beside = CacheTensors(**{n: a for n, a in arguments.items() if n in CacheTensors._fields})
    written = numbers(k_cache), torch.zeros_like(q), torch.zeros(3, 4, 1)
    operator = torch.ops.flashtile.decode_mass.default
    torch.library.opcheck(operator, (q, *cache, *written, *beside, *flat(DecodeOptions())))


def test_explained_as_the_call_itself():
    (q, k_cache, v_cache, *_), arguments = build(BY_NAME["paged"], FP32, "cpu")
    explanation = flashtile.explain(
        flashtile.flash_attn_with_kvcache, q, k_cache, v_cache, mass=numbers(k_cache), **arguments
    )
    assert explanation.operations == ("decode_mass",)
    assert explanation.backend == "cpu"
