"""Calls that hypothesis makes up, every feature with every other, held to the error rule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import BF16, FP16, FP32, FP64, Case
from flashtile import testing
from targets import Target


@st.composite
def calls(draw: st.DrawFn, target: Target, dtype, varlen: bool) -> Case:
    """Any valid call of up to four short sequences."""
    lengths = st.integers(0, target.longest) | st.sampled_from((1, 16, 32, 33))
    if varlen:
        shape = {
            "lengths": tuple(draw(st.lists(st.tuples(lengths, lengths), max_size=4))),
            "unused_tail": draw(st.integers(0, 9)),
            "slack": draw(st.sampled_from((0, 0, 1, 200))),
        }
    else:
        shape = {"batch": draw(st.integers(0, 2)), "seqlen_q": draw(lengths), "seqlen_k": draw(lengths)}
    heads_q, heads_kv = draw(st.sampled_from(((1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (5, 1), (6, 2))))
    head_dim = draw(st.sampled_from(target.head_dims))
    side = st.just(-1) | st.integers(0, target.longest + 5)
    return Case(
        name=f"seed-{draw(st.integers(0, 9))}",
        **shape,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=draw(st.just(head_dim) | st.sampled_from(target.head_dims)),
        dtype=dtype,
        causal=draw(st.booleans()),
        window_size=(draw(side), draw(side)),
        softcap=draw(st.just(0.0) | st.floats(0.5, 50.0)),
        softmax_scale=draw(st.none() | st.just(0.0) | st.floats(0.01, 0.5) | st.floats(-0.5, -0.01)),
        alibi=draw(st.sampled_from((None, "head", "batch"))),
        sink=draw(st.sampled_from((None, "float32", "own"))),
        unused_keys=draw(st.sampled_from((0, 0, 1, 17, target.longest))),
        layout=draw(st.sampled_from(testing.LAYOUTS)),
        upstream=draw(st.sampled_from(("both", "out", "lse", "sum", "transposed"))),
    )


DTYPES = {"fp16": FP16, "bf16": BF16, "fp32": FP32, "fp64": FP64}
EVERY_DAY = (("fp16", "dense"), ("bf16", "varlen"), ("fp32", "varlen"), ("fp64", "dense"))


@pytest.mark.parametrize(
    ("dtype", "varlen"),
    [
        pytest.param(
            DTYPES[dtype],
            layout == "varlen",
            id=f"{dtype}-{layout}",
            marks=() if (dtype, layout) in EVERY_DAY else (pytest.mark.thorough,),
        )
        for dtype, layout in itertools.product(DTYPES, ("dense", "varlen"))
    ],
)
def test_any_call(target: Target, dtype, varlen: bool) -> None:
    if dtype not in target.dtypes:
        pytest.skip(f"{target.name} does not take {dtype}")

    @settings(max_examples=target.examples)
    @given(calls(target, dtype, varlen))
    def meets_the_error_rule(call: Case) -> None:
        call.inputs(target.device).check(backend=target.backend)

    meets_the_error_rule()
