"""``softmax_max`` changes no result, and saves work if scores are near it."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import flashtile
from cases import BF16, FP16, FP32
from decode_cases import CASES, build
from flashtile.algorithms import Memory, unified_max
from flashtile.api.score_profile import _best
from flashtile.problems.decode import FP8
from flashtile.testing import decode as testing
from walk import walk

pytestmark = pytest.mark.numerical

BY_NAME = {case.name: case for case in CASES}
FEATURES = (
    "paged", "page-size-1", "causal-longer-than-keys", "window-both", "softcap", "negative-scale", "alibi",
    "sink", "sink-without-keys", "leftpad-paged", "ragged-queries", "fp8-by-head", "fp8-by-block", "tree",
    "everything", "more-splits-than-keys",
)  # fmt: skip
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def of_short_caches_too(monkeypatch):
    if importlib.util.find_spec("triton") is not None:
        from flashtile.backends.portable.decode import launch

        monkeypatch.setattr(launch, "MIN_UNIFIED_N_BLOCKS", 0)


def dtypes(target):
    return [dtype for dtype in (BF16, FP16, FP32) if dtype in target.dtypes]


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.usefixtures("either_work")
def test_every_feature(name, target):
    dtype = dtypes(target)[0]
    tensors, arguments = build(BY_NAME[name], dtype, target.device)
    if name == "sink":
        phi = torch.linspace(-2, 3, 4, device=target.device)
    else:
        phi = 1.5
    testing.check(*tensors, **arguments, softmax_max=phi, backend=target.backend)


def scores_of(kind, seqlen, generator):
    """(2, seqlen): scores of two rows' keys."""
    scores = torch.randn(2, seqlen, generator=generator)
    match kind:
        case "equal":
            scores.zero_()
        case "wide":
            scores *= 60
        case "low":
            scores -= 300
        case "high":
            scores += 300
        case "spike first":
            scores[:, 0] = 80
        case "spike last":
            scores[1, -1] = 150
        case "just too low":  # no sum is small, but in float16 every term is: 5.1 and 3.8 of its least steps
            scores[:], scores[:, ::2] = -15, -15.3
        case "just too high":  # for float16
            scores[0, 5] = 11.5
        case "a low part":
            scores[:, seqlen // 2 :] -= 40
    return scores


KINDS = (
    "usual", "equal", "wide", "low", "high", "spike first", "spike last", "just too low", "just too high",
    "a low part",
)  # fmt: skip


def call_of(scores, dtype, device, cache_dtype=None, value=1.0):
    """(q, k_cache, v_cache) of one sequence and two heads with these scores at softmax_scale=1."""
    heads, seqlen = scores.shape
    d = 32
    q = torch.zeros(1, 1, heads, d)
    q[..., :2] = 1.0
    k = torch.zeros(1, seqlen, heads, d)
    coarse = scores.to(FP8 if cache_dtype else dtype).float()
    k[0, :, :, 0] = coarse.T
    k[0, :, :, 1] = (scores - coarse).T
    v = torch.randn(1, seqlen, heads, d, generator=torch.Generator().manual_seed(1)) * value
    kept = cache_dtype or dtype
    return q.to(device, dtype), k.to(kept).to(device), v.to(kept).to(device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_any_scores(kind, dtype, target):
    if dtype not in dtypes(target):
        pytest.skip(f"{target.name} does not take {dtype}")
    scores = scores_of(kind, 200, torch.Generator().manual_seed(0))
    tensors = call_of(scores, dtype, target.device)
    for phi, splits in ((0.0, 2), (-30.0, 1))[: 2 if kind in ("usual", "equal") else 1]:
        arguments = {"softmax_scale": 1.0, "num_splits": splits, "backend": target.backend}
        if dtype == FP32 and kind in ("low", "high"):  # such scores are not float32's to the last bit
            expected = flashtile.flash_attn_with_kvcache(*tensors, **arguments)
            got = flashtile.flash_attn_with_kvcache(*tensors, softmax_max=phi, **arguments)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        else:
            testing.check(*tensors, softmax_max=phi, **arguments)


@pytest.mark.parametrize("kind", ["usual", "wide", "just too low", "just too high"])
@pytest.mark.usefixtures("balanced_work")
def test_any_scores_of_an_fp8_cache(kind, target):
    scores = scores_of(kind, 200, torch.Generator().manual_seed(0))
    tensors = call_of(scores, dtypes(target)[0], target.device, FP8)
    for phi in (0.0, 20.0):
        testing.check(*tensors, softmax_max=phi, softmax_scale=1.0, backend=target.backend)


@pytest.mark.parametrize("value", [1e-34, 1e30, 0.0])
def test_values_of_any_size(value, target):
    """That are so small, products with small exponentials are flushed to zero."""
    scores = scores_of("usual", 300, torch.Generator().manual_seed(0))
    dtype = FP32 if BF16 not in target.dtypes else BF16
    tensors = call_of(scores, dtype, target.device, value=value)
    for phi in (20.0, -10.0):
        arguments = {"softmax_max": phi, "softmax_scale": 1.0, "backend": target.backend}
        out = flashtile.flash_attn_with_kvcache(*tensors, **arguments)
        if value:
            unit = call_of(scores, dtype, target.device)
            expected = flashtile.flash_attn_with_kvcache(*unit, **arguments | {"softmax_max": None})
            torch.testing.assert_close(out / value, expected, rtol=0.02, atol=0.005)
        else:
            assert int(out.count_nonzero()) == 0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["k", "v", "all keys"])
@pytest.mark.usefixtures("balanced_work")
def test_what_is_not_finite(bad, where, target):
    """As without ``softmax_max``."""
    scores = scores_of("usual", 300, torch.Generator().manual_seed(0))
    q, k, v = call_of(scores, dtypes(target)[0], target.device)
    (v if where == "v" else k)[0, slice(None) if where == "all keys" else 130, 0, 0] = bad
    arguments = {"softmax_scale": 1.0, "return_softmax_lse": True, "backend": target.backend}
    expected = flashtile.flash_attn_with_kvcache(q, k, v, **arguments)
    got = flashtile.flash_attn_with_kvcache(q, k, v, softmax_max=0.0, **arguments)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02, equal_nan=True)


@pytest.mark.interpreter
def test_the_kernel_takes_the_short_way_where_it_can(monkeypatch):
    from flashtile.backends.portable.decode import attend

    taken = []

    def online(scores, row_max, *others, step=attend.softmax_step):
        taken.append(True)
        return step(scores, row_max, *others)

    monkeypatch.setattr(attend, "softmax_step", online)
    for dtype, kind, phi, value, computed_again in (
        (FP16, "usual", 0.0, 1.0, False),
        (FP16, "just too low", 0.0, 1.0, True),
        (FP16, "just too low", -15.0, 1.0, False),
        (FP16, "just too high", 0.0, 1.0, True),
        (FP32, "low", 0.0, 1.0, True),
        (FP32, "usual", 0.0, 2.0**-60, False),
        (FP32, "usual", 0.0, 2.0**-80, True),
        (FP32, "usual", 0.0, 2.0**100, False),
        (FP32, "usual", 0.0, 2.0**120, True),
    ):
        scores = scores_of(kind, 200, torch.Generator().manual_seed(0))
        tensors = call_of(scores, dtype, "cpu", value=value)
        taken.clear()
        flashtile.flash_attn_with_kvcache(*tensors, softmax_scale=1.0, softmax_max=phi, backend="portable")
        assert bool(taken) is computed_again, (dtype, kind, phi, value)


def test_a_part_that_is_out_of_range_is_computed_again_alone(target):
    """Splits write log-sum-exps of their own, however they came by them."""
    scores = scores_of("spike last", 400, torch.Generator().manual_seed(0))
    tensors = call_of(scores, dtypes(target)[0], target.device)
    testing.check(*tensors, softmax_max=0.0, softmax_scale=1.0, num_splits=4, backend=target.backend)


def test_the_papers_algorithm_agrees():
    q, k, v = torch.randn(3, 96, 16, generator=torch.Generator().manual_seed(0)).unbind()
    for phi, factor in ((0.0, 1.0), (3.0, 1.0), (0.0, 40.0)):
        out, lse, again = unified_max.forward(
            factor * q[:4], k, v, Memory(), phi=phi, bounds=(-20.0, 20.0), causal=True
        )
        assert bool(again) is (factor > 1)
        got, got_lse = flashtile.flash_attn_with_kvcache(
            factor * q[None, :4, None], k[None, :, None], v[None, :, None], causal=True, softmax_max=phi,
            return_softmax_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(got[0, :, 0], out)
        torch.testing.assert_close(got_lse[0, 0], lse[:, 0])


def test_a_compiled_call_takes_it():
    torch._dynamo.reset()
    q, k, v = call_of(scores_of("usual", 64, torch.Generator().manual_seed(0)), FP32, "cpu")
    compiled = torch.compile(flashtile.flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    for phi in (1.0, torch.ones(2)):
        expected = flashtile.flash_attn_with_kvcache(q, k, v, softmax_max=phi)
        assert torch.equal(compiled(q, k, v, softmax_max=phi), expected)
    torch._dynamo.reset()


@walk(
    ("phi", "error", "words"),
    [
        ("6", TypeError, "softmax_max must be a number, a tensor or None, got str '6'"),
        (True, TypeError, "softmax_max must be a number, a tensor or None, got bool True"),
        (NAN, ValueError, "softmax_max must be from -1000000.0 to 1000000.0, got nan"),
        (-INF, ValueError, "softmax_max must be from -1000000.0 to 1000000.0, got -inf"),
        (torch.zeros(3), ValueError, "softmax_max must have shape (heads_q,) = (2,), got (3,)"),
        (torch.zeros(2, dtype=BF16), TypeError, "softmax_max must be float32, got torch.bfloat16"),
        (torch.zeros(2, device="meta"), ValueError, "softmax_max is on meta, not on cpu"),
    ],
)
def test_bad_numbers(phi, error, words):
    tensors = call_of(torch.zeros(2, 5), FP32, "cpu")
    with pytest.raises(error) as caught:
        flashtile.flash_attn_with_kvcache(*tensors, softmax_max=phi)
    assert words in str(caught.value)


def test_short_caches_take_the_online_softmax(monkeypatch):
    """Eight blocks of keys at least: with fewer, the check costs more than is saved."""
    pytest.importorskip("triton")
    from flashtile.backends.portable.decode import config, launch
    from flashtile.tools.inspection.decode import PAGED

    monkeypatch.undo()
    row = config.row("hopper", 2, config.NARROW, 128)
    problem = replace(PAGED, softmax_max=1.0, capacity=8 * row.tile.BLOCK_N)
    assert launch.softmax_max_kind(problem, row) == "number"
    assert launch.softmax_max_kind(replace(problem, softmax_max_by_head=True), row) == "head"
    assert launch.softmax_max_kind(replace(problem, capacity=problem.capacity - 1), row) == "none"
    assert launch.softmax_max_kind(replace(problem, softmax_max=None), row) == "none"


class TestProfile:
    def make(self, factor=1.0, dtype=BF16):
        q, k = torch.randn(2, 1, 256, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
        return factor * q, k

    def test_scores_near_one_another(self):
        profile = flashtile.profile_scores(*self.make())
        assert profile.pays
        assert profile.outside == profile.outside_by_head == 0
        assert -7 < profile.least < profile.most < 7
        assert str(profile).startswith("scores lie within [-")

    def test_hidden_scores_do_not_count(self):
        """Of two queries the first does not see the last key, and the scores of the second are 0."""
        q, k = self.make()
        q, k = q[:, :2].clone(), k[:, :4].clone()
        q[:, 1], k[:, 3] = 0, 1000
        profile = flashtile.profile_scores(q, k, causal=True)
        alone = flashtile.profile_scores(q[:, :1], k[:, :3])
        expected = min(alone.least, 0), max(alone.most, 0)
        assert (profile.least, profile.most) == pytest.approx(expected, rel=1e-5)
        assert profile.pays
        assert not flashtile.profile_scores(q, k, causal=False).pays

    def test_not_more_rows_than_max_rows(self):
        q, k = self.make()
        found = flashtile.profile_scores(q, k, causal=False, max_rows=3)
        expected = flashtile.profile_scores(q[:, [0, 127, 255]], k, causal=False)
        assert (found.least, found.most) == (expected.least, expected.most)

    @walk("dtype", [BF16, FP16, FP32])
    @walk("shift", [0.0, 100.0])
    def test_phi_leaves_room_on_both_sides(self, dtype, shift):
        """``shift`` is added to every score."""
        q, k = self.make(dtype=FP32)
        q[..., 0], k[..., 0] = shift / 8, 8 * 32**0.5
        profile = flashtile.profile_scores(q, k, dtype=dtype)
        below, above = {FP16: (10, 16), FP32: (16, 16)}.get(dtype, (32, 120))
        assert profile.pays
        assert profile.softmax_max - below * math.log(2) < shift - 2
        assert profile.most < profile.softmax_max + above * math.log(2)

    def test_scores_too_far_apart(self):
        assert not flashtile.profile_scores(*self.make(60.0)).pays
        q, k = self.make(8.0)
        assert flashtile.profile_scores(q, k).pays
        assert not flashtile.profile_scores(q, k, dtype=FP16).pays
        assert "would be computed twice" in str(flashtile.profile_scores(q, k, dtype=FP16))

    def test_heads_apart_from_each_other(self):
        q, k = self.make(dtype=FP16)
        q[..., 0] = 5.0
        k[..., 0, 0], k[..., 1, 0] = 30.0, -30.0  # scores around 26 and -26
        profile = flashtile.profile_scores(q, k)
        assert not profile.pays
        assert profile.outside_by_head < 0.02
        assert profile.by_head[0] - profile.by_head[1] > 40

    def test_the_attention_of_a_model(self):
        q, k = self.make(dtype=FP32)
        table = torch.arange(16, dtype=torch.int32).view(1, 16)
        pages = k.view(16, 16, 2, 32)
        models = {
            "attention": lambda x: flashtile.attention(x, k, k, causal=True),
            "packed": lambda x: flashtile.flash_attn_varlen_func(
                x[0], k[0], k[0], *[torch.tensor([0, 256], dtype=torch.int32)] * 2, 256, 256, causal=True
            ),
            "over pages": lambda x: flashtile.flash_attn_with_kvcache(
                x, pages, pages, causal=True, cache_seqlens=256, block_table=table
            ),
            "torch": lambda x: torch.nn.functional.scaled_dot_product_attention(
                *(t.transpose(1, 2) for t in (x, k, k)), is_causal=True
            ),
        }
        expected = flashtile.profile_scores(q, k)
        for name, model in models.items():
            profile = flashtile.profile_scores(model, q)
            assert profile.softmax_max == pytest.approx(expected.softmax_max, abs=1e-4), name
            assert profile.least == pytest.approx(expected.least, abs=1e-4), name

    def test_chunks_are_sequences_of_their_own(self):
        q, k = self.make(dtype=FP32)
        k[:, :128] *= 9.0  # scores that no query of the second chunk sees
        profile = flashtile.profile_scores(
            lambda x: flashtile.attention(x, k, k, causal=True, attention_chunk=128), q
        )
        apart = flashtile.profile_scores(*(t.reshape(2, 128, *t.shape[2:]) for t in (q, k)))
        assert profile.softmax_max == pytest.approx(apart.softmax_max, abs=1e-4)
        assert profile.least == pytest.approx(apart.least, abs=1e-4)

    def test_a_part_that_fills_the_range_is_in_it(self):
        assert _best(torch.tensor([0.0]), torch.tensor([3.0]), 1.0, 2.0) == (1.0, 0.0)
        assert _best(torch.tensor([0.0]), torch.tensor([3.5]), 1.0, 2.0)[1] == 1.0
        assert _best(torch.tensor([0.0, 0.5]), torch.tensor([3.0, 3.25]), 1.0, 2.0) == (1.0, 0.5)

    def test_nothing_to_look_at(self):
        with pytest.raises(ValueError, match="model must compute attention"):
            flashtile.profile_scores(lambda x: x + 1, torch.zeros(3))
        q, k = self.make()
        with pytest.raises(TypeError, match="k must be the one argument after q"):
            flashtile.profile_scores(q)
        with pytest.raises(ValueError, match="k has head_dim 16, but q has 32"):
            flashtile.profile_scores(q, k[..., :16])

    @walk(
        ("arguments", "error", "words"),
        [
            ({"dtype": "abc"}, TypeError, "dtype must be None or one of torch.float16"),
            ({"dtype": torch.int8}, TypeError, "dtype must be None or one of torch.float16"),
            ({"dtype": np.ones(2)}, TypeError, "dtype must be None or one of torch.float16"),
            ({"max_rows": 0}, ValueError, "max_rows must be from 1"),
            ({"max_rows": "a"}, TypeError, "max_rows must be an int"),
            ({"causal": 1}, TypeError, "causal must be True or False"),
            ({"softcap": -1.0}, ValueError, "softcap must be finite"),
            ({"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite"),
            ({"softmax_scale": "a"}, TypeError, "softmax_scale must be a number"),
        ],
    )
    def test_arguments_are_checked(self, arguments, error, words):
        with pytest.raises(error, match=words):
            flashtile.profile_scores(*self.make(), **arguments)

    def test_tensors_and_models_are_checked(self):
        q, k = self.make()
        with pytest.raises(ValueError, match="k has batch size 2, but q has 1"):
            flashtile.profile_scores(q[:1], k[:1].expand(2, -1, -1, -1))
        with pytest.raises(TypeError, match="q must be float16"):
            flashtile.profile_scores(q.int(), k.int())
        with pytest.raises(ValueError, match="q is on meta"):
            flashtile.profile_scores(q.to("meta"), k.to("meta"))
        with pytest.raises(TypeError, match=r"model_or_q must be a torch\.Tensor or a function"):
            flashtile.profile_scores(3)
        with pytest.raises(ValueError, match="causal must be left out for a model"):
            flashtile.profile_scores(lambda: None, causal=False)
