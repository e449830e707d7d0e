"""The Hopper kernels in the Gluon interpreter, by the error rule and in several orders of events.

``make test`` has a few telling calls of each kernel; ``make test-hopper-interpreted`` all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")


import decode_cases
import flashtile
import linear_calls
from cases import BF16, FP16, Case, Variants, cross, masks
from decode_cases import paged
from flashtile import dropout, testing
from flashtile.backends.common import device
from flashtile.backends.common.launch import Outputs
from flashtile.backends.hopper import decode as hopper_decode
from flashtile.backends.hopper.backward import config as backward_config
from flashtile.backends.hopper.backward import dq_accum
from flashtile.backends.hopper.backward import launch as backward_launch
from flashtile.backends.hopper.backward import schedule as backward_schedule
from flashtile.backends.hopper.backward.costs import Splits
from flashtile.backends.hopper.decode import launch as decode_launch
from flashtile.backends.hopper.forward import config as forward_config
from flashtile.backends.hopper.forward import divided
from flashtile.backends.hopper.forward import launch as forward_launch
from flashtile.backends.hopper.forward.config import alternatives, every_row, of_tables
from flashtile.backends.hopper.forward.rounds import plan_of
from flashtile.backends.hopper.linear import config as ring
from flashtile.backends.hopper.linear import launch as ring_launch
from flashtile.backends.hopper.linear.launch import FlatLaunch
from flashtile.backends.hopper.work_tiles import TileTable, Unwritten, UnwrittenSizes
from flashtile.masks import alibi, create_block_mask, mask_mod, window
from flashtile.op.operation import Operation, signatures
from flashtile.operators.decode import SharedKeys, attend_shared
from flashtile.problems.attention import Problem
from flashtile.problems.decode import CacheTensors, DecodeOptions, DecodeProblem
from flashtile.problems.fp8_layout import E4M3
from flashtile.problems.linear import LinearTensors
from flashtile.problems.masking import EVERYTHING
from flashtile.reference import decode as decode_reference
from flashtile.testing import decode as decode_testing
from flashtile.testing import fp8 as fp8_testing
from flashtile.tools.inspection.attention import GROUPED
from gluon_interpreter import Edited, interpreted
from linear_calls import Call
from listed_calls import LISTED_CALLS, SMALL_SCORES, check_gradients_beside_small_scores, check_small_scores
from packed_and_paged import CALLS, Sequences, bits

exhaustive = pytest.mark.exhaustive
SMALL = Case(
    batch=1, seqlen_q=150, seqlen_k=300, heads_q=2, heads_kv=1, head_dim=64, dtype=BF16, name="hopper"
)
LENGTHS = ((100, 160), (1, 1), (0, 10), (130, 70), (200, 200))
TINY = ((40, 40), (1, 1), (0, 5), (9, 30), (30, 7), (23, 23))


def check(case: Case, seed: int = 0, **options: Any) -> None:
    inputs = case.inputs("cpu")
    with interpreted(seed) as interpreter:
        inputs.check(backend="hopper", **options)
    assert any(name.endswith("kernel") for name in interpreter.launched)


def cases(bases: Variants, variants: Variants) -> Iterator[Case]:
    return cross({name: replace(SMALL, **base) for name, base in bases.items()}, variants)


def by_name(all_cases: Iterator[Case], thorough: Container[str] = ()) -> Any:
    """Parametrise ``case``. Those whose names are in ``thorough`` run with ``make test-thorough``."""
    marked = [
        pytest.param(case, id=case.name, marks=pytest.mark.thorough if case.name in thorough else ())
        for case in all_cases
    ]
    return pytest.mark.parametrize("case", marked)


FORWARD: Variants = {
    "three-warpgroups": {"seqlen_q": 250, "heads_q": 3, "heads_kv": 3},
    "packed-heads": {"seqlen_q": 20, "heads_q": 4, "head_dim": 96, "head_dim_v": 64},
    "d16": {"seqlen_q": 250, "head_dim": 16, "seqlen_k": 400},
    "d24-varlen": {"lengths": LENGTHS, "causal": True, "head_dim": 24, "head_dim_v": 8, "unused_tail": 300},
    "causal": {"causal": True, "seqlen_q": 300, "head_dim": 128, "sink": "own"},
    "varlen": {
        "lengths": LENGTHS, "causal": True, "softcap": 3.0, "head_dim": 128, "dtype": FP16,
        "unused_tail": 300,
    },
    "short-sequences": {"lengths": ((100, 120), (3, 3), (0, 5), (64, 64)), "causal": True, "head_dim": 128},
    "tiny": {
        "lengths": TINY, "causal": True, "heads_q": 14, "heads_kv": 2, "alibi": "batch", "sink": "own",
        "unused_tail": 50,
    },
    "tiny-three-parts": {"lengths": TINY, "window_size": (9, 2), "heads_q": 6, "heads_kv": 2, "head_dim": 80},
    "tiny-six-heads": {"lengths": TINY, "causal": True, "heads_q": 6},
    "tiny-part-of-twelve-heads": {"lengths": TINY, "causal": True, "heads_q": 12, "head_dim": 128},
    "tiny-widest": {"lengths": TINY, "causal": True, "heads_q": 6, "heads_kv": 2, "head_dim": 320},
    "one-token": {"lengths": ((1, 9),), "heads_q": 14, "heads_kv": 2, "softcap": 3.0},
    "groups-of-documents": {
        "lengths": ((300, 300), (129, 260), (7, 7)), "causal": True, "heads_q": 16, "heads_kv": 2,
        "alibi": "head",
    },
    "short-window": {"lengths": ((70, 30), (3, 3), (128, 128)), "window_size": (40, 0), "sink": "own"},
    "window": {"window_size": (70, 9), "seqlen_q": 300, "head_dim": 256, "alibi": "batch"},
    "used": {"unused_keys": 40, "batch": 2, "head_dim": 256, "head_dim_v": 128},
    "tiles-in-parts": {"head_dim": 192, "head_dim_v": 128, "lengths": LENGTHS, "softcap": 3.0},
    "three-parts": {"head_dim": 136, "head_dim_v": 176, "causal": True, "lengths": LENGTHS, "unused_keys": 7},
    "few-columns": {"head_dim": 80, "causal": True, "alibi": "batch"},
    "widest": {"head_dim": 512, "causal": True, "lengths": LENGTHS, "softcap": 3.0},
    "widest-window": {
        "head_dim": 448, "head_dim_v": 320, "window_size": (70, 9), "alibi": "batch", "sink": "own"
    },
    "widest-packed": {"seqlen_q": 20, "heads_q": 4, "head_dim": 264, "head_dim_v": 96, "unused_keys": 40},
    "packed-part-of-a-group": {"seqlen_q": 20, "heads_q": 6, "causal": True, "sink": "own"},
    "packed-window": {"heads_q": 8, "heads_kv": 1, "window_size": (60, 0), "seqlen_q": 200, "sink": "own"},
}  # fmt: skip
BACKWARD: Variants = {
    "d8-more-heads-than-dq-accum-has": {"batch": 8, "seqlen_q": 70, "seqlen_k": 130, "head_dim": 8},
    "d16": {"causal": True, "seqlen_q": 300, "head_dim": 16, "softcap": 3.0},
    "d24-varlen": {"lengths": (*LENGTHS, (30, 0)), "head_dim": 24, "unused_tail": 300, "alibi": "batch"},
    "d32": {"seqlen_q": 300, "head_dim": 32, "heads_kv": 2, "unused_keys": 9},
    "more-heads-than-dq-accum-has": {"batch": 8, "seqlen_q": 70, "seqlen_k": 130},
    "causal": {"causal": True, "head_dim": 128, "softcap": 3.0},
    "varlen": {
        "lengths": (*LENGTHS, (30, 0)), "head_dim_v": 128, "alibi": "batch", "unused_tail": 300, "slack": 100,
    },
    "window-used": {"window_size": (70, 9), "unused_keys": 30, "head_dim": 128, "sink": "own"},
    "unseen-keys": {"window_size": (20, 0), "seqlen_q": 70, "seqlen_k": 400},
    "wide": {"head_dim": 256, "causal": True, "alibi": "batch"},
    "wide-single": {"head_dim": 256, "causal": True, "seqlen_q": 300, "heads_q": 1},
    "wide-varlen": {"lengths": LENGTHS, "head_dim": 192, "head_dim_v": 128, "softcap": 3.0},
    "widest": {"head_dim": 512, "causal": True, "seqlen_q": 100, "seqlen_k": 140},
    "widest-varlen": {"lengths": LENGTHS, "head_dim": 512, "causal": True, "softcap": 3.0},
    "widest-window": {
        "head_dim": 448, "head_dim_v": 320, "window_size": (40, 9), "alibi": "batch", "sink": "own"
    },
    "widest-q": {"head_dim": 264, "head_dim_v": 96, "unused_keys": 40, "batch": 2, "heads_kv": 2},
    "widest-v": {"head_dim": 64, "head_dim_v": 512, "seqlen_q": 70, "seqlen_k": 130, "dtype": FP16},
}  # fmt: skip
HEAD_SIZES: Variants = {
    "d32": {"head_dim": 32},
    "d64": {},
    "d128": {"head_dim": 128},
    "d256": {"head_dim": 256, "seqlen_q": 130},
    "d96-64": {"head_dim": 96, "head_dim_v": 64},
    "d64-256": {"head_dim_v": 256, "seqlen_q": 100, "dtype": FP16},
    "square": {"seqlen_q": 300, "head_dim": 128},
    "varlen": {"lengths": LENGTHS},
    "varlen-wide": {"lengths": LENGTHS, "head_dim": 256},
    "d512": {"head_dim": 512, "seqlen_q": 130},
    "varlen-widest": {"lengths": LENGTHS, "head_dim": 384},
}


DROPOUT: Variants = {
    "causal": {"seqlen_q": 140, "seqlen_k": 140, "causal": True, "dropout_p": 0.2, "sink": "own"},
    "few-rows": {"seqlen_q": 20, "heads_q": 4, "head_dim": 96, "head_dim_v": 64, "dropout_p": 0.03},
    "varlen": {"lengths": LENGTHS, "causal": True, "softcap": 3.0, "head_dim": 128, "dropout_p": 0.5},
    "window": {"window_size": (70, 9), "unused_keys": 30, "batch": 2, "alibi": "batch", "dropout_p": 0.1},
}


@by_name(cases(FORWARD, {"": {}}))
def test_forward(case: Case) -> None:
    check(case, gradients=False)


@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "varlen",
        "packed-heads",
        "three-warpgroups",
        "tiny",
        *(pytest.param(name, marks=exhaustive) for name in ("window", "widest", "used", "tiles-in-parts")),
    ],
)
def test_statistics(name: str) -> None:
    """Of half blocks and a sink, packed sequences, packed heads whose maximum lags behind, and one that does
    not."""
    case = replace(SMALL, **FORWARD[name], name=name)
    check(case, gradients=False, return_max_logits=True, return_entropy=True)


def test_statistics_of_packed_sequences_need_no_fill_of_whole_results() -> None:
    """The kernel that fills the tile table writes the rows after the last sequence, also of statistics."""
    case = replace(SMALL, lengths=((70, 90), (0, 5), (1, 0)), unused_tail=300, slack=300, name="tail")
    with mock.patch.object(Outputs, "cleared", side_effect=AssertionError):
        check(case, gradients=False, return_max_logits=True, return_entropy=True)
    inputs = case.inputs("cpu")
    for options in ({"return_max_logits": True}, {"return_entropy": True}):
        with interpreted(0), testing.poisoned_memory():
            *_, lse, found = flashtile.flash_attn_varlen_func(
                *inputs.qkv, **inputs.arguments, backend="hopper", return_lse=True, **options
            )
        assert lse[:, 71:].eq(-torch.inf).all()
        if "return_entropy" in options:
            assert found[:, 71:].eq(0).all()
        else:
            assert found.isfinite().tolist() == [[True] * 2, [False] * 2, [False] * 2]


def test_statistics_beside_a_large_sink() -> None:
    """A sink above all scores is the maximum that the softmax subtracts, and no score."""
    case = replace(SMALL, seqlen_q=20, name="statistics beside a large sink")
    sink = torch.tensor([20.0, -20.0])
    check(case, gradients=False, sink=sink, return_max_logits=True, return_entropy=True)


def test_statistics_of_natural_scores() -> None:
    """Of a bias that hides scores, some of them large: their P is 0, and their logarithm no number."""
    case = replace(SMALL, **ALIGNED, bias="q-own", name="statistics of a bias")
    check(case, gradients=False, return_max_logits=True, return_entropy=True)


ALIGNED = {"seqlen_k": 304}
"""A bias's rows must begin at multiples of 16 bytes."""
BIAS: Variants = {
    "d64": {"bias": "hq-own", "batch": 2, "seqlen_q": 70, "seqlen_k": 200, "heads_q": 1, "causal": True},
    "d128": {"bias": "bhq-own", "head_dim": 128},
    "softcap": {
        "bias": "q-own", "head_dim": 128, "window_size": (30, 20), "softcap": 5.0, "seqlen_q": 300
    },
    "used": {
        "bias": "q-own", "unused_keys": 40, "batch": 2, "deterministic": True, "dtype": FP16, "sink": "own"
    },
    "varlen": {
        "bias": "hq-own", "head_dim": 128, "lengths": ((100, 160), (1, 1), (0, 10), (200, 70)), "causal": True
    },
    "many-tiles": {"bias": "q-own", "heads_q": 8, "heads_kv": 4, "seqlen_q": 300},
    "more-heads-than-dq-accum-has": {"bias": "hq-own", "batch": 8, "seqlen_q": 70, "seqlen_k": 136},
    "gradient-of-few-cells": {
        "bias": "bq-own", "batch": 3, "seqlen_q": 200, "seqlen_k": 136, "window_size": (40, 9),
        "softmax_scale": -0.1,
    },
    "gradient-is-ds": {
        "bias": "bhq-own", "batch": 2, "heads_q": 4, "heads_kv": 2, "seqlen_q": 200, "causal": True,
        "deterministic": True,
    },
    "gradient-is-ds-of-a-window": {
        "bias": "bhq-own", "head_dim": 104, "seqlen_q": 300, "seqlen_k": 400, "window_size": (30, 20),
        "softmax_scale": -0.1,
    },
}  # fmt: skip


TELLING = ("d64", "d128", "softcap", "gradient-is-ds")


@pytest.mark.parametrize(
    "name",
    [name if name in TELLING else pytest.param(name, marks=exhaustive) for name in BIAS],
)
def test_bias(name: str) -> None:
    """In the forward its tiles are copied over as soon as they are let go of, and a load may be late. In the
    backward they lie where dS will be."""
    fields = dict(BIAS[name])
    deterministic = fields.pop("deterministic", False)
    case = replace(SMALL, **{**ALIGNED, "name": name, **fields})
    check(case, seed=len(name), deterministic=deterministic)


@by_name(cases(BACKWARD, {"": {}}), {"medium-widest-q", "medium-widest-window", "medium-wide-single"})
def test_backward(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=exhaustive if place > 1 else ())
        for place, case in enumerate(cases(DROPOUT, {"": {}}))
    ],
)
def test_dropout(case: Case) -> None:
    check(case)


def test_dropout_keeps_what_its_definition_keeps() -> None:
    """Bit by bit, over blocks of rows and of keys: with one value for each key, out says what was kept."""
    state = torch.tensor([0x123456789ABCDEF, 2**33 + 5])
    q = torch.zeros(1, 200, 2, 64, dtype=BF16)
    k = torch.zeros(1, 200, 1, 64, dtype=BF16)
    v = torch.zeros(1, 200, 1, 64, dtype=BF16)
    mask = dropout.kept(state, 0.3, 2, range(1), range(2), range(200), range(200))
    for first in (0, 136):
        v.zero_()[0, first : first + 64, 0] = torch.eye(64)
        with interpreted(first):
            out = flashtile.attention(q, k, v, dropout_p=0.3, rng_state=state, backend="hopper")
        assert torch.equal(out.transpose(1, 2) != 0, mask[..., first : first + 64])


@pytest.mark.parametrize("dropout_p", [0.3, 0.003])
def test_the_backward_drops_what_the_forward_drops(dropout_p: float) -> None:
    """Bit by bit: with an upstream gradient for one column of each row, dv says what was kept."""
    state = torch.tensor([0x123456789ABCDEF, 2**33 + 5])
    q, k, v = (torch.zeros(1, 200, 1, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    mask = dropout.kept(state, dropout_p, 1, range(1), range(1), range(200), range(200))
    with interpreted(1):
        out = flashtile.attention(q, k, v, dropout_p=dropout_p, rng_state=state, backend="hopper")
        for first in (0, 136):
            dout = torch.zeros_like(out)
            dout[0, first : first + 64, 0] = torch.eye(64)
            (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
            assert torch.equal(dv[0, :, 0].T != 0, mask[0, 0, first : first + 64])


@pytest.mark.parametrize("head_dim_v", [64, 40])
def test_sequences_of_one_key_that_end_early(head_dim_v: int) -> None:
    """An extent of 1 has no stride of its own, but the next row is the next sequence's."""
    shapes = (3, 5, 1, 64), (3, 1, 1, 64), (3, 1, 1, head_dim_v)
    q, k, v = (testing.random_tensor(shape, BF16, "cpu", seed=i) for i, shape in enumerate(shapes))
    with interpreted():
        testing.check(q, k, v, backend="hopper", seqused_k=torch.tensor([1, 0, 1], dtype=torch.int32))


@pytest.mark.parametrize("by_cost", [False, True])
def test_tile_tables(by_cost: bool) -> None:
    """The longest sequences come first, or the tiles that most tiles of their sequence follow."""
    lengths = [300, 0, 2600, 64, 300, *(1,) * 300, 129]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    total = sum(lengths)
    fill = TileTable(len(lengths), max(lengths), total, total, 128, UnwrittenSizes(), by_cost=by_cost)
    with interpreted():
        table = fill(offsets, offsets, None, Unwritten())
    count, taken = table[0, :2].tolist()
    tiles = [(b, t) for b, length in enumerate(lengths) for t in range(-(-length // 128))]
    following = lambda tile: -(-lengths[tile[0]] // 128) - tile[1]  # noqa: E731
    order = (lambda tile: -following(tile)) if by_cost else (lambda tile: -lengths[tile[0]])
    assert (count, taken) == (len(tiles), 0)
    assert table[1 : 1 + count, :6].tolist() == [
        [b, t, offsets[b], offsets[b], lengths[b], lengths[b]] for b, t in sorted(tiles, key=order)
    ]


SHARED: dict[str, tuple[Splits, dict[str, Any]]] = {
    "both": (Splits(2, 2), {"causal": True, "head_dim": 128, "seqlen_q": 300}),
    "heads": (Splits(4, 1), {"causal": True, "unused_keys": 40, "batch": 2, "softcap": 3.0}),
    "rows-more-than-blocks": (Splits(1, 8), {"seqlen_q": 70}),
    "varlen": (Splits(2, 2), {"lengths": LENGTHS, "causal": True, "unused_tail": 30, "slack": 9}),
    "wide": (Splits(2, 2), {"head_dim": 256, "causal": True}),
    "wide-varlen": (Splits(4, 2), {"lengths": LENGTHS, "head_dim": 192, "head_dim_v": 128}),
    "wide-used": (Splits(1, 4), {"head_dim": 256, "unused_keys": 40, "batch": 2, "window_size": (70, 9)}),
    "widest": (Splits(2, 2), {"head_dim": 320, "causal": True, "seqlen_q": 100}),
    "widest-varlen": (Splits(4, 2), {"lengths": LENGTHS, "head_dim": 512, "unused_tail": 30, "slack": 9}),
}


def choosing(splits: Splits, **more: Any) -> Any:
    """The first configuration of every call, with these splits."""

    def choose(problem: Problem, configs: tuple[Any, ...]) -> Any:
        return replace(configs[0], HEAD_SPLITS=splits.heads, ROW_SPLITS=splits.rows, **more)

    return mock.patch.object(backward_config, "fastest", choose)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name == "both"
        else pytest.param(name, marks=pytest.mark.thorough if name == "wide" else exhaustive)
        for name in SHARED
    ],
)
def test_shared_blocks_of_keys(name: str) -> None:
    """More programs than a card of two multiprocessors would have share them."""
    splits, fields = SHARED[name]
    with choosing(splits):
        for seed, deterministic in enumerate((False, True)):
            case = replace(SMALL, name=name, heads_q=4, **fields)
            check(case, seed, deterministic=deterministic)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=exhaustive if name != "window" else ()) for name in ("window", "more")]
)
def test_other_configurations(name: str) -> None:
    """Steps of 64 rows at head_dim 64, and room in dq_accum for all heads."""
    fields = {"window": {"window_size": (60, 0), "seqlen_q": 300}, "more": {"batch": 8, "causal": True}}[name]
    with choosing(Splits(), BLOCK_M=64, ALL_RESIDENT=True):
        check(replace(SMALL, name=name, **fields))


ONE_BLOCK: dict[str, tuple[Splits, dict[str, Any]]] = {
    "shared": (Splits(1, 4), {"seqlen_q": 300, "seqlen_k": 128, "batch": 2}),
    "group": (Splits(2, 2), {"seqlen_k": 48, "head_dim": 128, "softcap": 3.0}),
    "causal": (Splits(), {"seqlen_q": 128, "seqlen_k": 40, "causal": True}),
    "padded": (Splits(), {"seqlen_k": 60, "head_dim": 24, "head_dim_v": 72, "sink": "own"}),
    "varlen": (Splits(), {"lengths": ((300, 120), (1, 3), (0, 5), (30, 0), (64, 64)), "slack": 7}),
    "varlen-causal": (
        Splits(2, 2),
        {
            "lengths": ((100, 120), (3, 3), (30, 0), (110, 20)), "causal": True, "head_dim": 128,
            "unused_tail": 30,
        },
    ),
}  # fmt: skip


def gradients_with(splits: Splits, case: Case, edited: Edited | None = None, **more: Any) -> Any:
    inputs = case.inputs("cpu")
    leaves = [tensor.requires_grad_() for tensor in inputs.qkv]
    with choosing(splits, **more), interpreted(0, edited), testing.poisoned_memory():
        out = flashtile.attention(*leaves, backend="hopper", **inputs.arguments)
        return torch.autograd.grad(out, leaves, inputs.dout)


@pytest.mark.parametrize("name", ONE_BLOCK)
def test_one_block_of_keys(name: str) -> None:
    """dQ is stored without dq_accum, deterministic or not: the same bits, of rows without keys as well."""
    splits, fields = ONE_BLOCK[name]
    case = replace(SMALL, name=name, heads_q=4, **fields)
    for block_m in (64, 128) if max(case.head_dim, case.head_dim_v or 0) <= 64 else (64,):
        found = [
            gradients_with(splits, case, BLOCK_M=block_m, ONE_BLOCK=one_block) for one_block in (True, False)
        ]
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    check(case)
    launch = mock.patch.object(backward_launch, "backward_variant", wraps=backward_launch.backward_variant)
    with launch as made:
        check(case, deterministic=True)
    assert backward_config.has_one_block(made.call_args.args[0])


def test_rows_without_keys_have_no_other_block() -> None:
    splits, fields = ONE_BLOCK["causal"]
    case = replace(SMALL, name="unvisited", heads_q=4, **fields)
    visited = Edited(backward_schedule.row_blocks, "if C.ONE_BLOCK:", "if False:")
    dq, unwritten = (gradients_with(splits, case, edited, BLOCK_M=64)[0] for edited in (None, visited))
    assert dq.isfinite().all()
    assert unwritten.isnan().any()


NEAR = window(99, 0)
SLOPED = alibi(torch.tensor([0.5, 0.25, 0.1, 0.05]))
BLOCKS = create_block_mask(NEAR, None, None, 300, 300, "cpu")
MODS: dict[str, tuple[Splits, dict[str, Any]]] = {
    "score and block mask": (Splits(2, 1), {"score_mod": SLOPED, "block_mask": BLOCKS}),
    "score, causal": (Splits(2, 2), {"score_mod": SLOPED, "causal": True}),
    "mask": (Splits(1, 4), {"mask_mod": NEAR}),
    "block mask": (Splits(), {"block_mask": BLOCKS}),
}


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        ("score and block mask", 64),
        *(pytest.param(name, head_dim, marks=exhaustive) for head_dim in (128, 256) for name in MODS),
    ],
)
def test_functions_of_scores_and_masks(name: str, head_dim: int) -> None:
    """In both passes, where programs share blocks of keys, too."""
    splits, given = MODS[name]
    q, k, v = (testing.random_tensor((1, 300, h, head_dim), BF16, "cpu", seed=h) for h in (4, 2, 2))
    with (
        choosing(splits),
        interpreted(0) as interpreter,
    ):
        testing.check(q, k, v, backend="hopper", **given)
    backward = {"backward_kernel"} if head_dim <= 128 else {"dkv_kernel", "dq_kernel"}
    assert {"forward_kernel", *backward} <= set(interpreter.launched)


TELLING_FUNCTIONS = {"document", "compared-log", "negated-distance", "finite-fill", "times", "wide-products"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in TELLING_FUNCTIONS else exhaustive) for name in LISTED_CALLS],
)
def test_calls_with_functions(name: str) -> None:
    call = LISTED_CALLS[name]
    with interpreted():
        testing.check(*call.inputs("cpu"), backend="hopper", **call.arguments("cpu"))


TELLING_WIDE = {("document", 256, 256), ("ragged-in-a-full-block", 192, 128), ("no-keys", 256, 256)}


@pytest.mark.parametrize(
    ("name", "head_dim", "head_dim_v"),
    [
        pytest.param(*given, marks=() if given in TELLING_WIDE else exhaustive)
        for given in (
            (name, *sizes) for name in LISTED_CALLS for sizes in ((256, 256), (192, 192), (192, 128))
        )
    ],
)
def test_calls_with_functions_of_wide_heads(name: str, head_dim: int, head_dim_v: int) -> None:
    """These kernels have deterministic gradients with block masks, too."""
    call = replace(LISTED_CALLS[name], head_dim=head_dim, head_dim_v=head_dim_v)
    with interpreted() as interpreter:
        testing.check(*call.inputs("cpu"), backend="hopper", deterministic=True, **call.arguments("cpu"))
    assert {"forward_kernel", "dkv_kernel", "dq_kernel"} <= set(interpreter.launched)


@pytest.mark.parametrize("small", SMALL_SCORES)
def test_rows_of_small_finite_scores(small: float) -> None:
    """The FMA of the softmax does not round the product that the row's maximum is."""
    with interpreted():
        check_small_scores(*LISTED_CALLS["finite-fill"].inputs("cpu"), "hopper", small)


@pytest.mark.parametrize("bias", [False, True], ids=["score_mod", "bias"])
def test_gradients_beside_small_finite_scores(bias: bool) -> None:
    q, k, v = (tensor.to(torch.bfloat16) for tensor in LISTED_CALLS["finite-fill"].inputs("cpu"))
    with interpreted():
        check_gradients_beside_small_scores(q, k, v, "hopper", -1e9, bias)


def test_hidden_scores_have_no_gradient() -> None:
    """Neither those that a mask hides nor rows past the end, where the function divides by zero."""

    def modify(s, b, h, q_idx, kv_idx):
        return s / (q_idx - kv_idx).abs() + torch.log(70.0 - q_idx) / 8

    q, k, v = (testing.random_tensor((1, 70, 1, 64), BF16, "cpu", seed=i) for i in range(3))
    with interpreted() as interpreter:
        testing.check(q, k, v, backend="hopper", score_mod=modify, mask_mod=lambda b, h, i, j: i != j)
    assert "backward_kernel" in interpreter.launched


def test_a_block_mask_of_whole_blocks() -> None:
    """Full, partial and empty ones, and rows that have none: no other mask hides a key."""
    mask = mask_mod(lambda b, h, q, kv: (q // 128 != 1) & (((q - kv) % 3 != 1) | (kv < 128)))
    blocks = create_block_mask(mask, None, None, 384, 384, "cpu")
    q, k, v = (testing.random_tensor((1, 384, h, 64), BF16, "cpu", seed=h) for h in (2, 1, 1))
    with interpreted():
        testing.check(q, k, v, backend="hopper", block_mask=blocks, gradients=False)


def test_a_sequence_that_ends_in_the_only_full_block() -> None:
    """Keys behind its end are hidden, although the block mask hides none."""
    blocks = create_block_mask(mask_mod(lambda b, h, q, kv: kv >= 100), None, None, 64, 200, "cpu")
    assert blocks.full_kv_indices[0, 0, 0, 0] == 1
    q, k, v = (testing.random_tensor((1, n, 1, 64), BF16, "cpu", seed=n) for n in (64, 200, 200))
    with interpreted():
        testing.check(q, k, v, backend="hopper", block_mask=blocks, gradients=False)


def test_launches_share_the_counter_of_their_queue() -> None:
    """Each leaves it 0, whichever of its programs is the last to ask."""
    counters = torch.zeros(8, dtype=torch.int32)
    q, k, v = (testing.random_tensor((1, 300, h, 64), BF16, "cpu", seed=h) for h in (6, 2, 2))
    with mock.patch.object(forward_launch, "zeroed_counters", return_value=counters):
        for seed in range(2):
            with interpreted(seed):
                testing.check(q, k, v, backend="hopper", block_mask=BLOCKS, gradients=False)
            assert not counters.any()
    q, k, v = (testing.random_tensor((1, 300, h, 192), BF16, "cpu", seed=h) for h in (6, 2, 2))
    with (
        mock.patch.object(forward_launch, "zeroed_counters", return_value=counters),
        mock.patch.object(backward_launch, "zeroed_counters", return_value=counters),
        interpreted(0),
    ):
        testing.check(q, k, v, backend="hopper", block_mask=BLOCKS)
    assert not counters.any()


def test_divisions_of_negative_numbers() -> None:
    mask = mask_mod(
        lambda b, h, q, kv: ((q - kv) // 3 + (q - kv) % 5 * 2 + (q - kv) // 4 + (q - kv) % 8) % 3 == 0
    )
    q, k, v = (testing.random_tensor((1, 140, h, 64), BF16, "cpu", seed=h) for h in (2, 1, 1))
    with interpreted():
        testing.check(q, k, v, backend="hopper", mask_mod=mask, gradients=False)


@exhaustive
@pytest.mark.parametrize("seed", [1, 2])
@by_name(cases(HEAD_SIZES, masks(70, 9)))
def test_every_mask(case: Case, seed: int) -> None:
    for deterministic in (False, True):
        check(case, seed, deterministic=deterministic)


def table_rows() -> Iterator[Case]:
    """A call of few rows for each configuration of the forward."""
    fewest: dict[tuple, int] = {}
    for d, dv, windowed, keys, _ in every_row():
        start = fewest.get((d, dv, windowed), 200)
        fewest[d, dv, windowed] = keys
        variants: Variants = {"causal": {"causal": True}, "left": {"window_size": (start - 2, -1)}}
        for name, variant in variants.items() if windowed else [("full", {})]:
            yield replace(
                SMALL, name=f"d{d}-{dv}-{start}-{name}", seqlen_q=260, seqlen_k=start + 7, head_dim=d,
                head_dim_v=dv, heads_kv=2, **variant,
            )  # fmt: skip


@exhaustive
@by_name(table_rows())
def test_every_configuration_of_the_forward(case: Case) -> None:
    for seed in range(3):
        check(case, seed, gradients=False)


@pytest.mark.parametrize(
    ("head_dim", "keys", "causal"),
    [
        (64, 2048, True),
        pytest.param(64, 4096, False, marks=exhaustive),
        pytest.param(64, 512, True, marks=exhaustive),
        pytest.param(96, 1024, True, marks=exhaustive),
        *(pytest.param(128, keys, True, marks=exhaustive) for keys in (512, 1024, 4096)),
        *(pytest.param(256, keys, True, marks=exhaustive) for keys in (512, 1024)),
        pytest.param(256, 1024, False, marks=exhaustive),
    ],
)
def test_alternatives_compute_the_same_bits(head_dim: int, keys: int, causal: bool) -> None:
    """Which of them a call has may depend on its number of sequences, so that of one must not show it."""
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "window_right": 0 if causal else -1}
    table = of_tables(replace(GROUPED, seqlen_q=keys, seqlen_k=keys, **sizes))
    q, k, v = (testing.random_tensor((1, 300, h, head_dim), BF16, "cpu", seed=h) for h in (2, 1, 1))
    found = []
    for seed, config in enumerate(alternatives(table)):
        with mock.patch.object(forward_config, "choose", return_value=config), interpreted(seed):
            found.append(flashtile.attention(q, k, v, causal=causal, backend="hopper", return_lse=True))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    with mock.patch.object(forward_config, "choose", return_value=config), interpreted():
        testing.check(q, k, v, causal=causal, backend="hopper", gradients=False)


RAGGED = ((0, 9), (1, 1), (63, 63), (64, 200), (65, 65), (191, 191), (193, 120), (300, 300))
FIRST_PARTIAL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, bool]]] = {
    "documents": ({"lengths": RAGGED, "alibi": "batch", "unused_tail": 90}, {}, {}),
    "groups": ({"lengths": RAGGED, "heads_q": 8, "heads_kv": 2, "sink": "own"}, {}, {}),
    "unused-rows": ({"lengths": RAGGED, "heads_q": 3}, {}, {}),
    "pairs": ({"seqlen_q": 390, "seqlen_k": 390}, {"PING_PONG": True}, {"paired": True}),
    "queue": ({"seqlen_q": 321, "seqlen_k": 450}, {}, {"queued": True, "paired": False}),
    "more-queries": ({"seqlen_q": 321, "seqlen_k": 150, "softcap": 3.0}, {}, {}),
    "shared-tiles": ({"seqlen_q": 70, "heads_q": 4}, {}, {}),
    "used-keys": ({"batch": 2, "unused_keys": 40}, {}, {}),
    "to-the-right": ({"seqlen_q": 193, "window_size": (-1, 70), "causal": False}, {}, {}),
    "window": ({"lengths": RAGGED, "window_size": (90, 3), "causal": False}, {}, {}),
    "two-warpgroups": ({"seqlen_q": 321, "seqlen_k": 321, "head_dim": 128}, {"warpgroups": 2}, {}),
}  # fmt: skip
"""Name -> the call, its configuration's fields, and its plan's."""


@pytest.mark.parametrize(
    "name",
    [name if name in ("groups", "pairs") else pytest.param(name, marks=exhaustive) for name in FIRST_PARTIAL],
)
def test_a_partial_first_block_changes_no_bits(name: str) -> None:
    """Also in calls that never have one: with two warpgroups, and under a window to the left."""
    call, fields, planned = FIRST_PARTIAL[name]
    inputs = replace(SMALL, **{"name": name, "causal": True} | call).inputs("cpu")

    def choose(problem: Problem) -> Any:
        return replace(of_tables(problem), PROGRAMS=1, **{"warpgroups": 3} | fields)

    found = []
    for seed, partial in enumerate((False, True, True)):
        changes = {"first_partial": partial, **planned}

        def plan(*arguments: Any, changes: dict[str, Any] = changes) -> Any:
            return plan_of(*arguments)._replace(**changes)

        with (
            mock.patch.object(forward_config, "choose", choose),
            mock.patch.object(forward_launch, "plan_of", side_effect=plan) as planner,
            interpreted(seed),
        ):
            found.append(
                flashtile.attention(*inputs.qkv, backend="hopper", return_lse=True, **inputs.arguments)
            )
        assert planner.called
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


DIVIDED: Variants = {
    "grouped": {"heads_q": 4, "causal": True, "seqlen_q": 140, "seqlen_k": 700, "sink": "own"},
    "window": {"batch": 2, "window_size": (400, 0), "softcap": 9.0, "head_dim": 40, "seqlen_k": 600},
    "rows-without-keys": {
        "seqlen_q": 200,
        "seqlen_k": 150,
        "causal": True,
        "alibi": "batch",
        "head_dim": 128,
    },
}


@pytest.mark.parametrize(
    "name", [name if name == "grouped" else pytest.param(name, marks=exhaustive) for name in DIVIDED]
)
def test_few_queries_divide_their_keys(name: str) -> None:
    """Also the backward takes the lse of divided keys."""
    case = replace(SMALL, name=name, **DIVIDED[name])
    with mock.patch.object(divided, "WORTHWHILE", 100.0), interpreted() as interpreter:
        case.inputs("cpu").check(backend="hopper")
    assert "attend_kernel" in interpreter.launched
    assert "forward_kernel" not in interpreter.launched


def test_keys_that_tma_cannot_address_as_a_cache_are_not_divided() -> None:
    """Between the two sequences lies a row and a half."""
    q = torch.randn(2, 10, 2, 64, dtype=BF16)
    k, v = (torch.randn(2, 301 * 64 + 32, dtype=BF16)[:, : 300 * 64].view(2, 300, 1, 64) for _ in "kv")
    with mock.patch.object(divided, "WORTHWHILE", 100.0), interpreted() as interpreter:
        testing.check(q, k, v, backend="hopper", gradients=False)
    assert "forward_kernel" in interpreter.launched


DETERMINISTIC: Variants = {
    "full": {"seqlen_k": 500},
    "causal": {"seqlen_k": 500, "causal": True},
    "varlen": {"lengths": ((300, 400), (40, 300))},
}
ONE_HEAD: Variants = {
    name: {"seqlen_q": 300, "heads_q": 1, "dtype": FP16, **variant} for name, variant in DETERMINISTIC.items()
}
"""All programs are at work on one head, and must wait for one another. FP16 shows what float32 sums lose."""


def gradients_of_some_orders(case: Case, edited: Edited | None) -> list[tuple[torch.Tensor, ...]]:
    inputs = case.inputs("cpu")
    leaves = [tensor.requires_grad_() for tensor in inputs.qkv]
    found = []
    for seed in range(3):
        with interpreted(seed, edited, ordered_sums=edited is None):
            out = flashtile.attention(*leaves, backend="hopper", deterministic=True, **inputs.arguments)
            found.append(torch.autograd.grad(out, leaves, inputs.dout))
    return found


@by_name(cases(ONE_HEAD, {"": {}}))
def test_deterministic_gradients_do_not_depend_on_the_order(case: Case) -> None:
    """Blocks of keys add to dQ as they come: the order decides the rounding, unless it is fixed.

    The interpreter also checks that the waits order the additions in memory: each acquires what the one
    before has released, also for TMA.
    """
    first, *others = gradients_of_some_orders(case, None)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_without_their_order_they_would() -> None:
    case = replace(SMALL, name="unordered", **ONE_HEAD["causal"])
    waits = "if load_acquire(accum.dq_semaphores + block) < order:"
    unordered = Edited(dq_accum.accumulate_dq, waits, "if False:")
    (first, *_), *others = gradients_of_some_orders(case, unordered)
    assert not all(torch.equal(first, dq) for dq, *_ in others)


DECODE = {
    case.name: case
    for case in decode_cases.CASES
    if not (
        case.rotary_dim or case.new is not None or case.head_dim % 8 or (case.head_dim_v or 8) % 8
    )
}  # fmt: skip
TELLING_DECODE = (
    "page-size-1", "window-left", "leftpad-paged", "batch-idx", "ragged-queries", "tree-by-batch",
    "more-splits-than-keys", "fp8-by-head", "chunk-leftpad", "sink", "alibi-by-batch", "fp8-by-sequence",
    "wide-values", "empty-cache", "softcap", "two-splits",
)  # fmt: skip


def check_decode(tensors: tuple, arguments: dict[str, Any], seed: int = 0, **more: Any) -> None:
    with interpreted(seed) as interpreter:
        decode_testing.check(*tensors, backend="hopper", **arguments, **more)
    assert "attend_kernel" in interpreter.launched


@pytest.mark.parametrize(
    "name", [name if name in TELLING_DECODE else pytest.param(name, marks=exhaustive) for name in DECODE]
)
def test_decode(name: str) -> None:
    check_decode(*decode_cases.build(DECODE[name], BF16, "cpu"))


INVARIANT: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (80, 0)},
    "soft-cap": {"heads": (6, 2), "softcap": 5.0},
    "sink": {"sink": torch.tensor([0.5, -1.0])},
    "d64": {"head_dim": 64},
    "d96": {"head_dim": 96},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "negative scale": {"softmax_scale": -0.1},
    "d256": {"head_dim": 256},
    "parts": {"split_size": 128},
}
"""Arguments of invariant calls; heads (2, 1) of 128 columns by default."""
BY_FORWARD = ("plain", "window", "d64", "d96", "negative scale")
"""Those whose prompts the forward kernel computes."""


@pytest.mark.parametrize(
    "name",
    [name if name in ("plain", "window") else pytest.param(name, marks=exhaustive) for name in INVARIANT],
)
def test_prompts_chunks_and_single_tokens_have_the_same_bits(name: str) -> None:
    options = {"heads": (2, 1), "head_dim": 128, **INVARIANT[name], "backend": "hopper"}
    sequences = Sequences(BF16, *options.pop("heads"), options.pop("head_dim"), times=4)
    with interpreted() as interpreter:
        if "split_size" in options:
            whole = sequences.over_cache([0], 0, 70, **options)[0]
        else:
            whole = sequences.whole(invariant=True, **options)
        for call in CALLS if "split_size" not in options else [([0], 63, 7), ([0], 40, 1), ([0], 69, 1)]:
            found, rows = sequences.over_cache(*call, **options)
            assert torch.equal(bits(found), bits(whole[rows])), call
    assert "attend_kernel" in interpreter.launched
    assert ("forward_kernel" in interpreter.launched) == (name in BY_FORWARD)


@pytest.mark.parametrize("call", ["attention", "score_mod", "decode", "splits"])
def test_a_sink_may_be_any_number(call: str) -> None:
    """Its product with log2(e) may be infinite. lse is the sink, if that is larger or the only score."""
    sink = torch.tensor([3e38, -3e38, 1e30, 0.5])
    q = torch.randn(1, 6, 4, 64, dtype=BF16)
    k, v = torch.randn(2, 1, 4, 2, 64, dtype=BF16).unbind()  # two rows have no key
    common: dict[str, Any] = {"causal": True, "backend": "hopper", "sink": sink}
    with interpreted():
        if call in ("decode", "splits"):
            out, lse = flashtile.flash_attn_with_kvcache(
                q, k, v, num_splits=1 + (call == "splits"), return_softmax_lse=True, **common
            )
        else:
            mod = (lambda s, b, h, i, j: s + 0.5 * i) if call == "score_mod" else None
            out, lse = flashtile.attention(q, k, v, return_lse=True, score_mod=mod, **common)
    assert out.isfinite().all()
    assert out[:, :, [0, 2]].eq(0).all()
    assert out[:, :2].eq(0).all()
    assert out[:, 2:, [1, 3]].ne(0).all()
    for head in (0, 2):
        assert lse[:, head].eq(sink[head]).all()
    assert lse[:, :, :2].eq(sink[:, None]).all()
    assert lse[:, 1, 2:].abs().amax() < 10


@pytest.mark.parametrize("splits", [{}, pytest.param({"num_splits": 3}, marks=exhaustive)], ids=str)
@pytest.mark.parametrize(
    ("page_size", "seqlen_q"),
    [(16, 40), *(pytest.param(size, 9, marks=exhaustive) for size in (0, 3, 64, 256))],
)
def test_decode_of_several_blocks(page_size: int, seqlen_q: int, splits: dict[str, int]) -> None:
    tensors, arguments = paged([300, 5, 700], (8, 2), page_size=page_size, seqlen_q=seqlen_q, device="cpu")
    check_decode(tensors, arguments, causal=True, **splits)


GROUPS = {
    "7, two warpgroups": ((7, 1), 12, {"causal": True}),
    "3, ragged": ((6, 2), (30, 0, 9), {"causal": True}),
    "5, window": ((10, 2), 30, {"window_size": (20, 3)}),
    "12, splits": ((12, 1), 6, {"causal": True, "num_splits": 2}),
}
"""Heads, tokens, and arguments of calls whose groups do not divide a tile's rows."""


@pytest.mark.parametrize("name", GROUPS)
def test_decode_of_groups_that_do_not_divide_a_tile(name: str) -> None:
    """Queries are copied row by row, from memory with NaN between tokens and heads."""
    heads, tokens, more = GROUPS[name]
    case = decode_cases.case(name, heads=heads, seqlen_q=tokens, page_size=16, head_dim=40)
    (q, *others), arguments = decode_cases.build(case, BF16, "cpu")
    spread = q.new_full((*q.shape[:-2], heads[0] + 1, 48), torch.nan)[..., : heads[0], :40].copy_(q)
    check_decode((spread, *others), arguments, **more)


def test_decode_of_a_chunk_among_single_tokens() -> None:
    """The queue has the longest sequence, of one token, in parts. Of others some m_blocks have no rows."""
    tensors, arguments = paged([50, 3900, 5, 300], (7, 1), 64, seqlen_q=(50, 1, 1, 1), device="cpu")
    # Each multiprocessor has two programs, as the rows of most sequences are few.
    with mock.patch.object(device, "INTERPRETER_MULTIPROCESSORS", 2), interpreted() as interpreter:
        decode_testing.check(*tensors, backend="hopper", causal=True, **arguments)
    assert {"table_kernel", "attend_kernel", "combine_divided_kernel"} <= set(interpreter.launched)


@pytest.mark.parametrize("partial", [False, True])
def test_decode_of_a_queue_fills_the_tokens_of_no_sequence(partial: bool) -> None:
    """The kernel that fills its table does it, so that a call launches no fill of whole results."""
    tensors, arguments = paged([50, 900, 5], (6, 2), 64, seqlen_q=(50, 1, 0), device="cpu")
    given, q = CacheTensors(**{n: t for n, t in arguments.items() if n != "max_seqlen_q"}), tensors[0]
    q = torch.cat([q, q.new_full((70, *q.shape[1:]), torch.nan)])  # 71 tokens of no sequence
    options = DecodeOptions(max_seqlen_q=50, partial=partial, backend="hopper")
    problem = DecodeProblem.from_tensors(q, *tensors[1:], given, options)
    launch = hopper_decode.prepare_decode(problem, hopper_decode.configure_decode(problem))
    out, lse = torch.full(q.shape, torch.nan, dtype=problem.out_dtype), torch.full((6, len(q)), torch.nan)
    with mock.patch.object(Outputs, "cleared", side_effect=AssertionError), interpreted() as interpreter:
        launch(q, *tensors[1:], given, out, lse)
    assert interpreter.launched[:2] == ["table_kernel", "attend_kernel"]
    assert out[:51].isfinite().all()
    assert lse[:, :51].isfinite().all()
    assert out[51:].eq(0).all()
    assert lse[:, 51:].eq(-torch.inf).all()


def shared_level(tables: dict | None) -> tuple[SharedKeys, int]:
    """Return a level of groups, of which a long one is divided, and the number of tokens. One is in none."""
    sizes = 8, 5, 0, 7
    table = torch.arange(4 * 200, dtype=torch.int32).view(4, 200)
    offsets = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
    end = torch.tensor([3200, 70, 30, 5], dtype=torch.int32)
    return SharedKeys(table, end, None, offsets, max(sizes), tables), sum(sizes) + 1


@contextmanager
def cached_launches() -> Iterator[Any]:
    """Interpret kernels, and keep launches by signature as without the interpreter."""
    known: dict[Any, Any] = {}
    with mock.patch.object(device, "INTERPRETER_MULTIPROCESSORS", 2), interpreted() as interpreter:
        prepare = Operation.prepared

        def prepared(operation: Operation, tensors: Any, beside: Any, options: Any) -> Any:
            key = operation, options, signatures((*tensors, *beside))
            if key not in known:
                known[key] = prepare(operation, tensors, beside, options)
            return known[key]

        with mock.patch.object(Operation, "prepared", prepared):
            yield interpreter


def of_layers(tables: dict | None, softcaps: tuple[float, ...]) -> tuple[list[Any], list[str]]:
    """Return out and lse of each layer of a step over keys that groups share, and the launched kernels."""
    level, tokens = shared_level(tables)
    found = []
    with cached_launches() as interpreter, torch.no_grad():
        for layer, softcap in enumerate(softcaps):
            q = testing.random_tensor((tokens, 8, 64), BF16, "cpu", seed=layer)
            k, v = (testing.random_tensor((800, 16, 2, 64), BF16, "cpu", seed=9 * layer + i) for i in (1, 2))
            options = DecodeOptions(max_seqlen_q=1, backend="hopper", softcap=softcap)
            own = attend_shared((q, k, v), CacheTensors(), options, [level])
            found.append((own.prior_out.clone(), own.prior_lse.clone()))
    return found, [name for name in interpreter.launched if name.endswith("_kernel")]


def test_layers_of_a_step_share_a_table() -> None:
    """The first layer fills it. Each layer leaves it as it was, and computes what it does alone."""
    alone, kernels = of_layers(None, (0.0, 0.0, 0.0))
    layer = ["table_kernel", "attend_kernel", "combine_divided_kernel"]
    assert kernels == 3 * layer
    shared, kernels = of_layers({}, (0.0, 0.0, 0.0))
    assert kernels == layer + 2 * layer[1:]
    for (out, lse), (own_out, own_lse) in zip(shared, alone, strict=True):
        assert torch.equal(out, own_out)
        assert torch.equal(lse, own_lse)
        assert out[-1].eq(0).all()
        assert lse[:, -1].eq(-torch.inf).all()


def test_layers_with_other_launches_share_no_table() -> None:
    alone, _ = of_layers(None, (0.0, 3.0, 0.0, 3.0))
    shared, kernels = of_layers({}, (0.0, 3.0, 0.0, 3.0))
    assert Counter(kernels)["table_kernel"] == 2
    for found, expected in zip(shared, alone, strict=True):
        assert all(map(torch.equal, found, expected))


def test_a_queue_without_divided_work_tiles_keeps_no_table() -> None:
    """No kernel after it would reset its counter."""
    tensors, arguments = paged([300, 70], (8, 2), 64, seqlen_q=20, device="cpu")
    given, options = CacheTensors(**arguments), DecodeOptions(num_splits=1, backend="hopper")
    problem = DecodeProblem.from_tensors(*tensors, given, options)
    launch = hopper_decode.prepare_decode(problem, hopper_decode.configure_decode(problem))
    tables: dict[Any, Any] = {}
    with interpreted() as interpreter:
        for _ in range(2):
            launch(*tensors, given, tables=tables)
    assert interpreter.launched == 2 * ["table_kernel", "attend_kernel"]
    assert not tables


ALIKE = {
    "few rows": (2, [700], 9, {"causal": True}),
    "two m_blocks": (4, [700], 60, {"causal": True}),
    "shorter than its parts": (2, [40], 9, {}),
    "a window": (3, [700, 650], 9, {"window_size": (300, 0)}),
    "other lengths": (3, [900, 5], 9, {}),
}
"""Multiprocessors, lengths, tokens, and arguments of calls with equally many programs for each work tile."""


@pytest.mark.parametrize("name", ALIKE)
def test_decode_with_equally_many_programs_for_each_work_tile(name: str) -> None:
    multiprocessors, lengths, seqlen_q, more = ALIKE[name]
    tensors, arguments = paged(lengths, (4, 1), seqlen_q=seqlen_q, device="cpu")
    with mock.patch.object(device, "INTERPRETER_MULTIPROCESSORS", multiprocessors):
        problem = DecodeProblem.from_tensors(
            *tensors, CacheTensors(**arguments), DecodeOptions(backend="hopper")
        )
        config = hopper_decode.configure_decode(problem)
        assert decode_launch.is_stream_k(problem, config)
        programs = decode_launch.balanced_programs(problem, config)
        assert programs == multiprocessors * config.programs_per_sm
        check_decode(tensors, arguments, **more)


@pytest.mark.parametrize("chunk", [300, pytest.param(64, marks=exhaustive)])
def test_decode_of_several_blocks_in_chunks(chunk: int) -> None:
    """Rows of one tile lie in several chunks, which begin and end within blocks and at their edges."""
    tensors, arguments = paged([900, 5], (2, 1), seqlen_q=320, device="cpu")
    check_decode(tensors, arguments, attention_chunk=chunk)


@pytest.mark.parametrize("page_size", [64, 16, 3])
def test_decode_of_a_page_outside_the_pool_is_nan(page_size: int) -> None:
    """For its sequence alone. A call on the CPU would be refused, so this launches the kernel itself."""
    (q, *caches), arguments = paged([70, 300], (2, 1), 64, page_size=page_size, device="cpu")
    given = CacheTensors(**arguments)
    problem = DecodeProblem.from_tensors(q, *caches, given, DecodeOptions(num_splits=1, backend="hopper"))
    launch = hopper_decode.prepare_decode(problem, hopper_decode.configure_decode(problem))
    with interpreted():
        right, _ = launch(q, *caches, given)
        for position, page in ((0, -1), (127, -1), (160, len(caches[0])), (299, 2**30)):
            table = given.block_table.clone()
            table[1, position // page_size] = page
            out, lse = launch(q, *caches, given._replace(block_table=table))
            assert torch.equal(out[0], right[0])
            assert out[1].isnan().all()
            assert lse[1].isnan().all()


def test_decode_of_pages_with_padding_of_several_blocks() -> None:
    """TMA could take such pages, but not what is in the padding, which the formula reads as well."""
    tensors, arguments = paged([300, 270], (8, 2), 64, page_size=64, seqlen_q=2, device="cpu")
    arguments["cache_leftpad"] = torch.tensor([0, 140], dtype=torch.int32)
    pages = arguments["block_table"][1].long()
    found = []
    for padding in (0.0, torch.nan):
        for cache in tensors[1:]:
            cache[pages[:2]] = padding
            cache[pages[2], :12] = padding
        if padding == 0.0:
            check_decode(tensors, arguments)
        with interpreted():
            found.append(flashtile.flash_attn_with_kvcache(*tensors, backend="hopper", **arguments))
    assert torch.equal(*found)


@pytest.mark.parametrize("page_size", [16, pytest.param(64, marks=exhaustive)])
def test_keys_that_groups_share_within_a_window(page_size: int) -> None:
    """Keys before a group's first one are NaN. The last group has neither queries nor keys."""
    tensors, arguments = paged(
        [300, 150, 0], (8, 2), 64, page_size=page_size, seqlen_q=(10, 24, 0), device="cpu"
    )
    arguments["cache_leftpad"] = torch.tensor([130, 0, 0], dtype=torch.int32)
    exact, lse, *_ = decode_reference.attention_with_kvcache(*tensors, upcast=torch.float64, **arguments)
    for cache in tensors[1:]:
        cache[arguments["block_table"][0, : 128 // page_size].long()] = torch.nan
    longest = arguments.pop("max_seqlen_q")
    given, options = CacheTensors(**arguments), DecodeOptions(max_seqlen_q=longest, backend="hopper")
    problem = DecodeProblem.from_tensors(*tensors, given, options._replace(partial=True, masking=EVERYTHING))
    launch = hopper_decode.prepare_decode(problem, hopper_decode.configure_decode(problem))
    with interpreted():
        out, found = launch(*tensors, given)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact.double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.double(), lse.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "descale", ["block", "head", *(pytest.param(kind, marks=exhaustive) for kind in ("sequence", None))]
)
@pytest.mark.parametrize(
    ("page_size", "head_dim"), [(16, 128), *(pytest.param(size, 64, marks=exhaustive) for size in (0, 1, 64)),
                                pytest.param(16, 256, marks=exhaustive)],
)  # fmt: skip
def test_decode_over_fp8(page_size: int, head_dim: int, descale: str | None) -> None:
    tensors, arguments = paged(
        [200, 5, 130], (8, 2), head_dim, page_size=page_size, seqlen_q=9, cache_dtype=E4M3, device="cpu"
    )
    tensors[0][1] *= 1e30  # in float16 by a scale of each row
    if descale is not None:
        blocks, _, heads, _ = tensors[1].shape
        shape = {"head": (heads,), "block": (blocks, heads), "sequence": (3, 1, heads)}[descale]
        scales = 0.25 + torch.rand(2, *shape)
        if descale == "head":
            scales[0, 0], scales[0, 1] = 0.0, -scales[0, 1]
        arguments |= dict(zip(("k_descale", "v_descale"), scales, strict=True))
    check_decode(tensors, arguments, causal=True)


@exhaustive
def test_decoding_rows_among_a_chunk() -> None:
    tensors, arguments = paged([300, 700, 5, 90], (8, 2), seqlen_q=(1, 600, 1, 2), device="cpu")
    check_decode(tensors, arguments, causal=True, num_splits=1)


FP8: Variants = {
    "full": {"seqlen_q": 200, "heads_q": 3, "heads_kv": 3},
    "causal-softcap": {"causal": True, "softcap": 5.0, "head_dim": 128, "seqlen_q": 300},
    "window": {"window_size": (100, 20), "head_dim": 256},
    "varlen": {"lengths": LENGTHS, "head_dim": 128, "causal": True},
}
EVERY_FP8 = cross(
    {name: replace(SMALL, **HEAD_SIZES[name]) for name in ("d64", "d128", "d256", "varlen", "varlen-wide")},
    {name: masks(70, 9)[name] for name in ("full", "causal", "window", "left", "softcap", "scale-negative")},
)


def check_fp8(case: Case, seed: int, rows: bool) -> None:
    """Quantised by block, V transposed; or as it is, V row by row, with a scale for each head."""
    inputs = case.inputs("cpu")
    tensors, scales = inputs.qkv, {}
    if rows:
        generator = torch.Generator().manual_seed(3)
        shape = (case.batch if case.lengths is None else len(case.lengths), case.heads_kv)
        scales = {f"{name}_descale": 0.5 + torch.rand(shape, generator=generator) for name in "qkv"}
        tensors = tuple(tensor.to(E4M3) for tensor in tensors)  # type: ignore[assignment]
    with interpreted(seed) as interpreter:
        fp8_testing.check(*tensors, backend="hopper", **inputs.arguments, **scales)
    assert "fp8_forward_kernel" in interpreter.launched


@pytest.mark.parametrize("rows", [False, True], ids=["blocks", "rows"])
@by_name(cases(FP8, {"": {}}))
def test_fp8(case: Case, rows: bool) -> None:
    check_fp8(case, 0, rows)


@exhaustive
@pytest.mark.parametrize("rows", [False, True], ids=["blocks", "rows"])
@by_name(EVERY_FP8)
def test_fp8_under_every_mask(case: Case, rows: bool) -> None:
    check_fp8(case, 1, rows)


PRODUCTS = (
    Call(3, 128, 1032, norm=True, residual=True),
    Call(16, 100, 520, "silu_and_mul", bias=True),
    Call(1, 96, 272, scales="channel"),
    Call(5, 128, 72, "qkv", bias=True, rotary_dim=8, x_scale=True),
    Call(9, 300, 264, residual=True, next_norm=True),
)


@pytest.mark.parametrize("call", PRODUCTS, ids=lambda call: call.name)
def test_products(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    counters: list[torch.Tensor] = []

    def zeroed(device: torch.device, count: int) -> torch.Tensor:
        counters.append(torch.zeros(count, dtype=torch.int32))
        return counters[-1]

    monkeypatch.setattr(ring_launch, "zeroed_counters", zeroed)
    with interpreted(0) as interpreter:
        linear_calls.check(call, BF16, "cpu", aligned=True, backend="hopper", prefetch=call.M > 3)
    assert interpreter.launched == ["flat_kernel"]
    assert len(counters) == call.next_norm
    assert not any(counter.any() for counter in counters)  # the next launch of the stream gets them


@pytest.mark.parametrize("key", ring.TILES, ids=str)
def test_products_of_the_largest_tiles(key: tuple[int, int]) -> None:
    """With as many warps as there are, and K that is no whole number of slots."""
    rows, width = key
    call = Call(rows, 90, 1040, scales="channel" if width == 1 else "none")
    inputs = linear_calls.make_inputs(call, BF16, "cpu", aligned=True)
    problem = linear_calls.describe(call, inputs)
    config = ring.make(problem, max(ring.TILES[key], key=lambda tile: (len(tile), tile)))
    given = LinearTensors(weight_scale=inputs.given.get("weight_scale"))
    exact, plain = (linear_calls.expected(call, inputs, dtype)[0] for dtype in (torch.float64, BF16))
    with interpreted(0), testing.poisoned_memory():
        y = FlatLaunch(problem, config)(inputs.x, inputs.weight, given)
    comparison = testing.compare("y", y, exact, plain)
    assert comparison.holds, str(comparison)
