"""What the Hopper backend serves, and that it says why it does not serve the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="Gluon comes with Triton on Linux")

import flashtile
from cases import BF16, CASES, FP16, Case
from flashtile.backends.hopper.forward.rounds import plan_of
from targets import CUDA, Target, hopper_serves

HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0")]

ADDRESSABLE = ("contiguous", "packed", "transposed")
"""Layouts in which rows of 8 elements lie at multiples of 16 bytes."""
LLAMA = Case(
    name="llama", batch=1, seqlen_q=1024, seqlen_k=1024, heads_q=32, heads_kv=8, head_dim=128, dtype=BF16
)


def explain(case: Case) -> flashtile.Explanation:
    inputs = case.inputs("cuda")
    return flashtile.explain(*inputs.qkv, **inputs.arguments)


def test_every_case_that_it_should_serve() -> None:
    served = [case for case in CASES if hopper_serves(case) and case.layout in ADDRESSABLE]
    assert len(served) > 300
    others = [case.name for case in served if explain(case).backend != "hopper"]
    assert not others


def test_reasons() -> None:
    for case in CASES:
        if hopper_serves(case):
            continue
        explanation = explain(case)
        assert explanation.backend == (None if case.dtype == torch.float64 else "portable"), case.name
        assert explanation.reasons_against["hopper"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 20}, "multiple of 8"),
        ({"dtype": torch.float32}, "float32"),
        ({"layout": "offset"}, "16 bytes"),
        ({"seqlen_k": 0}, "no keys"),
    ],
)
def test_says_why_not(change: dict, reason: str) -> None:
    inputs = replace(LLAMA, name="why-not", **change).inputs("cuda")
    with pytest.raises(NotImplementedError, match=reason):
        flashtile.attention(*inputs.qkv, backend="hopper", **inputs.arguments)


BIASES: dict[str, dict] = {
    "shared": {"bias": "q-own", "batch": 2, "seqlen_q": 900},
    "of-heads-causal": {"bias": "hq-own", "batch": 2, "causal": True, "heads_kv": 32, "dtype": FP16},
    "narrow": {"bias": "bhq-own", "batch": 2, "head_dim": 64, "seqlen_q": 333, "seqlen_k": 776},
    "dense-causal": {"bias": "bhq-own", "batch": 2, "causal": True, "seqlen_q": 700, "seqlen_k": 904},
    "dense-window": {"bias": "bhq-own", "batch": 2, "window_size": (300, 20), "head_dim": 40},
    "narrow-causal": {"bias": "hq-own", "head_dim": 72, "causal": True, "softcap": 3.0, "sink": "own"},
    "window": {"bias": "q-own", "window_size": (300, 20), "head_dim": 40},
    "used": {"bias": "hq-own", "batch": 3, "unused_keys": 100, "head_dim": 64},
    "packed": {"bias": "bhq-own", "lengths": ((700, 896), (1, 300), (333, 333)), "causal": True},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", BIASES)
def test_biases(name: str, deterministic: bool) -> None:
    replace(LLAMA, name=name, **BIASES[name]).inputs("cuda").check(
        backend="hopper", deterministic=deterministic
    )


@pytest.mark.parametrize(
    ("dtype", "rows", "keys", "reason"),
    [
        (torch.float32, 1024, 1024, "q's dtype"),
        (BF16, 1, 1024, "all rows share"),
        (BF16, 1024, 1023, "16 bytes"),
    ],
)
def test_says_why_a_bias_is_not_its(dtype: torch.dtype, rows: int, keys: int, reason: str) -> None:
    inputs = replace(LLAMA, name="why-not", seqlen_k=keys).inputs("cuda")
    bias = torch.zeros(1, 1, rows, keys, dtype=dtype, device="cuda")
    explanation = flashtile.explain(*inputs.qkv, bias=bias)
    assert explanation.backend == "portable"
    assert reason in explanation.reasons_against["hopper"]


def test_a_thousand_runs_give_the_same_bits() -> None:
    lengths = ((700, 900), (1, 300), (333, 333))
    for call in (LLAMA, replace(LLAMA, name="packed", lengths=lengths, causal=True)):
        inputs = call.inputs("cuda")
        arguments = {**inputs.arguments, "return_lse": True, "backend": "hopper"}
        out, lse = flashtile.attention(*inputs.qkv, **arguments)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            again, lse_again = flashtile.attention(*inputs.qkv, **arguments)
            differing += ~((out == again).all() & (lse == lse_again).all())
        assert not differing.item()


@pytest.mark.parametrize("heads_q", [8, 16, 64])
@pytest.mark.parametrize("seqlen_q", [1, 3, 17, 64, 100])
def test_groups_in_one_tile(heads_q: int, seqlen_q: int) -> None:
    """Few queries for each head: query heads of a key head share a tile."""
    call = replace(LLAMA, name="packed", heads_q=heads_q, heads_kv=1, seqlen_q=seqlen_q, batch=2, causal=True)
    call.inputs("cuda").check(backend="hopper", gradients=False)
    everything = replace(call, softcap=8.0, alibi="batch", sink="float32", window_size=(300, 0))
    everything.inputs("cuda").check(backend="hopper", gradients=False)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("longest", "heads_q", "sharing"),
    [
        (40, 3, 3), (40, 6, 6), (40, 7, 7), (40, 12, 4),
        (128, 3, 3), (128, 6, 2), (128, 7, 7), (128, 12, 4),
        (1000, 3, 1), (1000, 6, 2), (1000, 7, 1), (1000, 12, 4),
    ],
)  # fmt: skip
def test_groups_of_packed_documents_in_one_tile(
    longest: int, heads_q: int, sharing: int, head_dim: int
) -> None:
    """Of a group that is no power of two, all heads share tiles, with unused rows, or a power of two."""
    lengths = ((longest, longest), (1, 1), (0, 5), (longest // 2 + 3, longest), (30, 7), (23, 23))
    call = replace(LLAMA, name="documents", heads_q=heads_q, heads_kv=1, head_dim=head_dim, causal=True)
    call = replace(call, lengths=lengths)
    forward = explain(call)["forward"]
    assert plan_of(forward.problem, forward.config).pack == sharing
    call.inputs("cuda").check(backend="hopper", gradients=False)
    everything = replace(call, softcap=8.0, alibi="batch", sink="float32", window_size=(300, 0))
    everything.inputs("cuda").check(backend="hopper", gradients=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_queries_divide_many_keys(head_dim: int) -> None:
    """The gradients take the lse of the merged parts."""
    call = replace(LLAMA, name="divided", batch=2, heads_q=12, heads_kv=2, head_dim=head_dim, causal=True)
    call = replace(call, seqlen_q=100, seqlen_k=20001)
    inputs = call.inputs("cuda")
    assert "forward: hopper, keys divided among programs" in str(explain(call))
    inputs.check(backend="hopper")
    everything = replace(call, softcap=8.0, alibi="batch", sink="float32", window_size=(15000, 0))
    everything.inputs("cuda").check(backend="hopper", gradients=False)


@pytest.mark.parametrize("window", [(127, 0), (40, 9), (0, 0)])
@pytest.mark.parametrize(("heads_q", "heads_kv", "head_dim"), [(64, 8, 64), (16, 2, 128), (4, 1, 256)])
def test_groups_in_one_tile_of_short_windows(
    window: tuple[int, int], heads_q: int, heads_kv: int, head_dim: int
) -> None:
    call = replace(LLAMA, name="window", heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim)
    call = replace(call, seqlen_q=900, window_size=window)
    call.inputs("cuda").check(backend="hopper", gradients=False)
    replace(call, sink="own", alibi="batch").inputs("cuda").check(backend="hopper", gradients=False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (192, 128), (136, 72), (8, 8), (40, 40), (72, 80), (80, 80), (96, 96), (112, 24), (160, 160),
        (248, 64), (512, 512), (448, 320), (64, 512), (264, 96),
    ],
)  # fmt: skip
@pytest.mark.parametrize("length", [257, 2050, 4096])
def test_head_sizes_as_they_are(head_dim: int, head_dim_v: int, length: int, causal: bool) -> None:
    call = replace(LLAMA, name="columns", head_dim=head_dim, head_dim_v=head_dim_v, causal=causal)
    call = replace(call, heads_q=4, heads_kv=2, seqlen_q=length, seqlen_k=length)
    call.inputs("cuda").check(backend="hopper", gradients=False)
    packed = replace(call, lengths=((length, 300), (1, 129), (0, 10), (40, 0), (77, length)), softcap=20.0)
    packed.inputs("cuda").check(backend="hopper", gradients=False)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("softcap", [5.0, 50.0])
@pytest.mark.parametrize(("head_dim", "length"), [(64, 300), (64, 4100), (128, 2050), (256, 700)])
def test_soft_caps(head_dim: int, length: int, softcap: float, dtype: torch.dtype) -> None:
    """Scores far below the cap, of several caps, and both in one row; gradients, too."""
    call = replace(LLAMA, name="capped", heads_q=2, heads_kv=1, head_dim=head_dim, dtype=dtype, causal=True)
    call = replace(call, seqlen_q=length, seqlen_k=length, softcap=softcap)
    for scale in (0.05, 1.0, 4 * softcap):
        replace(call, softmax_scale=scale / head_dim**0.5).inputs("cuda").check(backend="hopper")
    inputs = call.inputs("cuda")
    growing = inputs.k * torch.linspace(2 * softcap, 0.1, length, device="cuda")[:, None, None]
    inputs._replace(k=growing.to(inputs.k.dtype)).check(backend="hopper")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "length"), [(128, 1024), (256, 700), (256, 2048), (256, 8192)])
def test_scores_that_grow(head_dim: int, length: int, causal: bool) -> None:
    """Lazy rescaling where it is not at rest: the maximum of a row goes on growing to its first key."""
    call = replace(LLAMA, name="growing", head_dim=head_dim, seqlen_q=length, seqlen_k=length, causal=causal)
    inputs = replace(call, heads_q=2, heads_kv=1).inputs("cuda")
    growing = inputs.k * torch.linspace(8, 0.2, length, device="cuda")[:, None, None]
    inputs._replace(k=growing.to(inputs.k.dtype)).check(backend="hopper", gradients=False)


def test_lengths_that_lie() -> None:
    """Offsets beyond the tensors reach no memory that is not theirs."""
    inputs = replace(LLAMA, name="lying", lengths=((300, 300), (200, 200))).inputs("cuda")
    arguments = dict(inputs.arguments)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        arguments[name] = torch.tensor([0, 300, 2**30], dtype=torch.int32, device="cuda")
    out = flashtile.attention(*inputs.qkv, backend="hopper", **arguments)
    torch.cuda.synchronize()
    assert out.isfinite().all()


def test_target_is_the_hopper_backend(gpu_target: Target) -> None:
    """The common suite's target without a named backend means this one."""
    if gpu_target.name == "hopper":
        assert explain(LLAMA).backend == "hopper"
