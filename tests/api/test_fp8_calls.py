"""Calls of the FP8 functions: bad arguments, explain, compilation, cached launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import fp8
from flashtile.op import operation
from flashtile.op.registry import flat
from flashtile.operators import fp8 as operators
from flashtile.problems.attention import Options
from flashtile.problems.common import shared_fields
from flashtile.problems.fp8 import AttendOptions, AttendTensors, QuantizeOptions, QuantizeTensors
from flashtile.problems.fp8_layout import E4M3
from flashtile.problems.masking import CAUSAL
from flashtile.reference import fp8 as reference
from walk import walk

FP16, BF16 = torch.float16, torch.bfloat16
B, SQ, SK, H, HKV, D = 2, 5, 9, 4, 2, 16


def x_of(seqlen: int = SK, heads: int = HKV, head_dim: int = D, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(seqlen)
    return torch.randn(B, seqlen, heads, head_dim, generator=generator).to(dtype)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


QUANTIZE: dict[str, Any] = {"x": x_of(), "role": "k"}
HEAD = QUANTIZE | {"method": "head"}
ROTARY = QUANTIZE | {"rotary_cos": torch.ones(SK, 4), "rotary_sin": torch.zeros(SK, 4)}
VARLEN = QUANTIZE | {"x": x_of()[0], "cu_seqlens": int32(0, 4, 9), "max_seqlen": 5}
ATTEND = {"q": x_of(SQ, H), "k": x_of(), "v": x_of()}
ANGLES = {"rotary_cos": torch.ones(2 * SK, 4), "rotary_sin": torch.zeros(2 * SK, 4)}
ATTEND_VARLEN = {name: x[0, :SK] for name, x in ATTEND.items()} | {
    "q": x_of(SK, H)[0], "cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 4, 9),
    "max_seqlen_q": 5, "max_seqlen_k": 5,
}  # fmt: skip
E4M3_CALL = {name: x.to(E4M3) for name, x in ATTEND.items()}

BAD = [
    (fp8.quantize, QUANTIZE, {"x": None}, TypeError, ("x must be a torch.Tensor", "NoneType")),
    (fp8.quantize, QUANTIZE, {"x": x_of().to_sparse()}, TypeError, ("x must be a dense (strided) tensor",)),
    (fp8.quantize, QUANTIZE, {"x": x_of(dtype=torch.float32)}, TypeError, ("float16 or bfloat16", "float32")),
    (fp8.quantize, QUANTIZE, {"x": x_of()[0]}, ValueError, ("x must have 4 dimensions", "(9, 2, 16)")),
    (fp8.quantize, VARLEN, {"x": x_of()}, ValueError, ("x must have 3 dimensions", "total")),
    (fp8.quantize, QUANTIZE, {"x": x_of(head_dim=257)}, NotImplementedError, ("head_dim 257", "256")),
    (fp8.quantize, QUANTIZE, {"x": x_of(head_dim=0)}, ValueError, ("x has head_dim 0", "from 1")),
    (fp8.quantize, QUANTIZE, {"x": x_of(heads=0)}, ValueError, ("x must have at least one head", "9, 0, 16")),
    (fp8.quantize, QUANTIZE, {"x": x_of().mT}, ValueError, ("x must have stride 1", "contiguous()")),
    (fp8.quantize, QUANTIZE, {"role": "w"}, ValueError, ("role must be one of 'q', 'k', 'v'", "'w'")),
    (fp8.quantize, QUANTIZE, {"method": "row"}, ValueError, ("method must be one of 'block'", "'row'")),
    (fp8.quantize, QUANTIZE, {"hadamard": 1}, TypeError, ("hadamard must be True or False", "int")),
    (fp8.quantize, QUANTIZE, {"seed": -1}, ValueError, ("seed must be from 0", "-1")),
    (fp8.quantize, QUANTIZE, {"seed": 2**31}, ValueError, ("seed must be from 0 to 2147483647",)),
    (fp8.quantize, QUANTIZE, {"seed": 0.5}, TypeError, ("seed must be an int", "0.5")),
    (fp8.quantize, QUANTIZE, {"backend": "hopper"}, NotImplementedError, ("hopper", "no kernels for")),
    (fp8.quantize, QUANTIZE, {"max_seqlen": 9}, ValueError, ("max_seqlen must be None without cu_seqlens",)),
    (fp8.quantize, QUANTIZE, {"seqused": int32(1)}, ValueError, ("seqused must", "(batch,) = (2,)")),
    (fp8.quantize, QUANTIZE, {"seqused": int32(1, 10)}, ValueError, ("9 rows of sequence 1", "10")),
    (fp8.quantize, VARLEN, {"max_seqlen": None}, TypeError, ("max_seqlen must be an int", "None")),
    (fp8.quantize, VARLEN, {"max_seqlen": 4}, ValueError, ("max_seqlen", "4")),
    (fp8.quantize, VARLEN, {"cu_seqlens": int32(0, 5, 4)}, ValueError, ("cu_seqlens",)),
    (fp8.quantize, VARLEN, {"cu_seqlens": int32(0, 10)}, ValueError, ("cu_seqlens", "10")),
    (fp8.quantize, VARLEN, {"cu_seqlens": int32(0, 9).short()}, TypeError, ("cu_seqlens", "int32", "int16")),
    (fp8.quantize, ROTARY, {"role": "v"}, ValueError, ("rotary_cos must be None for role 'v'",)),
    (fp8.quantize, ROTARY, {"rotary_sin": None}, ValueError, ("rotary_sin", "None")),
    (fp8.quantize, ROTARY, {"rotary_sin": torch.ones(SK, 3)}, ValueError, ("rotary_sin", "(9, 4)", "(9, 3)")),
    (fp8.quantize, ROTARY, {"rotary_cos": torch.ones(SK, 9)}, ValueError, ("rotary_cos", "head_dim = 16")),
    (fp8.quantize, ROTARY, {"rotary_offset": 1}, ValueError, ("rotary_cos has 9 rows", "up to 10")),
    (fp8.quantize, ROTARY, {"rotary_offset": -7}, ValueError, ("rotary_offset must be from 0 to", "-7")),
    (fp8.quantize, ROTARY, {"rotary_offset": -(2**70)}, ValueError, ("rotary_offset must be from 0 to",)),
    (fp8.quantize, ROTARY, {"rotary_offset": int32(1)}, ValueError, ("rotary_offset", "(2,)", "(1,)")),
    (fp8.quantize, ROTARY, {"rotary_interleaved": None}, TypeError, ("rotary_interleaved must be True or",)),
    (fp8.quantize, QUANTIZE, {"rotary_offset": 3}, ValueError, ("rotary_offset must be 0 without",)),
    (fp8.quantize, QUANTIZE, {"scale": torch.ones(1, 1)}, ValueError, ("scale must be None with", "block")),
    (fp8.quantize, HEAD, {"scale": 1.0}, TypeError, ("scale must be a torch.Tensor", "float")),
    (fp8.quantize, HEAD, {"scale": torch.ones(B, 3)}, ValueError, ("scale must have", "(2, 2)", "(2, 3)")),
    (fp8.quantize, HEAD, {"scale": torch.ones(1, 1).half()}, TypeError, ("scale must be float32", "float16")),
    (fp8.quantize, HEAD, {"scale": torch.zeros(1, HKV)}, ValueError, ("scale must be finite and above 0",)),
    (fp8.quantize, HEAD, {"scale": torch.ones(1, 1, requires_grad=True)}, NotImplementedError,
     ("scale must not require a gradient",)),
    (fp8.attention, ATTEND, {"q": 1}, TypeError, ("q must be a torch.Tensor", "int")),
    (fp8.attention, ATTEND, {"q": ATTEND["q"].float()}, TypeError, ("q must be float16 or", "quantize")),
    (fp8.attention, ATTEND, {"k": x_of(dtype=FP16)}, TypeError, ("k has dtype torch.float16", "bfloat16")),
    (fp8.attention, ATTEND, {"k": x_of()[0]}, ValueError, ("k must have shape", "as q", "9, 2, 16")),
    (fp8.attention, ATTEND, {"v": x_of().to("meta")}, ValueError, ("v must be on q's device, cpu", "meta")),
    (fp8.attention, ATTEND, {"k": x_of(head_dim=8)}, ValueError, ("k has head_dim 8", "q has 16")),
    (fp8.attention, ATTEND, {"v": x_of(8)}, ValueError, ("v has shape (2, 8, 2, 16)", "that of k")),
    (fp8.attention, ATTEND, {"q": x_of(SQ, 3)}, ValueError, ("q has 3 heads", "multiple")),
    (fp8.attention, ATTEND, {"k": fp8.quantize(x_of(), "v")}, ValueError, ("role 'k'", "role 'v'")),
    (fp8.attention, ATTEND, {"method": "row"}, ValueError, ("method must be one of", "'row'")),
    (fp8.attention, ATTEND, {"hadamard": "yes"}, TypeError, ("hadamard must be True, False or None", "str")),
    (fp8.attention, ATTEND | {"k": fp8.quantize(x_of(), "k", method="head")}, {"method": "block"}, ValueError,
     ("k was quantised by 'head'", "method is 'block'")),
    (fp8.attention, ATTEND | {"k": fp8.quantize(x_of(), "k", seed=3)}, {"seed": 1}, ValueError,
     ("k was transformed with seed 3", "seed=1")),
    (fp8.attention, ATTEND | {"k": fp8.quantize(x_of(), "k", hadamard=False)}, {"hadamard": True}, ValueError,
     ("k was transformed with seed None", "hadamard=True")),
    (fp8.attention, {"q": fp8.quantize(x_of(), "q", seed=1), "k": fp8.quantize(x_of(), "k", seed=2),
                     "v": x_of()}, {}, ValueError, ("q and k must share a transform", "'q': 1", "'k': 2")),
    (fp8.attention, ATTEND, {"sink": torch.zeros(3)}, ValueError, ("sink", "(3,)")),
    (fp8.attention, ATTEND, {"softcap": -1.0}, ValueError, ("softcap", "-1.0")),
    (fp8.attention, ATTEND, {"backend": "portable"}, NotImplementedError, ("portable", "cpu")),
    (flashtile.flash_attn_func, ATTEND, {"k_descale": torch.ones(B, HKV)}, ValueError,
     ("k_descale must be None", "float8_e4m3fn")),
    (flashtile.flash_attn_func, E4M3_CALL, {"k": x_of()}, TypeError, ("k must be float8_e4m3fn", "bfloat16")),
    (flashtile.flash_attn_func, E4M3_CALL, {"q_descale": torch.ones(B, 3)}, ValueError,
     ("q_descale must have shape (batch, heads_kv) = (2, 2)", "(2, 3)")),
    (flashtile.flash_attn_func, E4M3_CALL, {"v_descale": torch.ones(B, HKV, dtype=BF16)}, TypeError,
     ("v_descale must be float32", "bfloat16")),
    (flashtile.flash_attn_func, E4M3_CALL, {"v_descale": 1.0}, TypeError, ("v_descale must be a torch",)),
    *((flashtile.flash_attn_func, E4M3_CALL, {name: torch.full((B, HKV), -0.5)}, ValueError,
       (f"{name} must be at least 0", "-0.5")) for name in ("q_descale", "k_descale", "v_descale")),
    (fp8.quantize, QUANTIZE, {"backend": 3}, TypeError, ("backend must be None or", "int")),
    (fp8.quantize, QUANTIZE, {"method": ["block"]}, ValueError, ("method must be one of", "['block']")),
    (fp8.quantize, QUANTIZE, {"role": ["q"]}, ValueError, ("role must be one of", "['q']")),
    (fp8.quantize, QUANTIZE, {"cu_seqlens": [0, 9]}, TypeError, ("cu_seqlens must be a torch.Tensor",)),
    (fp8.attention, ATTEND, {"backend": "x"}, ValueError, ("backend must be None or one of", "'x'")),
    (fp8.attention, ATTEND, {"method": "x"}, ValueError, ("method must be one of", "'x'")),
    (fp8.attention, ATTEND, {"method": torch.zeros(1)}, ValueError, ("method must be one of",)),
    (fp8.quantize, QUANTIZE, {"method": np.ones(2)}, ValueError, ("method must be one of", "ndarray")),
    (fp8.quantize, QUANTIZE, {"role": np.ones(2)}, ValueError, ("role must be one of", "ndarray")),
    (fp8.attention, ATTEND | {"k": fp8.quantize(x_of(), "k")}, {"method": np.ones(2)}, ValueError,
     ("method must be one of", "ndarray")),
    (fp8.attention, ATTEND | ANGLES, {"q": x_of(SK + 3, H)}, ValueError,
     ("rotary_cos must be", "first 3 of 12")),
    (fp8.attention, ATTEND, {"return_lse": 1}, TypeError, ("return_lse must be True or False", "int")),
    (fp8.attention, ATTEND, {"rotary_interleaved": 1}, TypeError, ("rotary_interleaved must be True or",)),
    (fp8.attention, ATTEND, {"seqused_k": int32(3, SK + 1)}, ValueError, ("seqused_k must be from 0", "10")),
    *((fp8.attention, ATTEND | ANGLES, {"seqused_k": value}, error, ("seqused_k must", words))
      for value, error, words in ((int32(1), ValueError, "(batch,) = (2,)"), ([3, 4], TypeError, "list"),
                                  (torch.tensor([3, 4]), TypeError, "int32"),
                                  (int32(3, SK + 1), ValueError, "from 0"))),
    *((fp8.attention, ATTEND_VARLEN | ANGLES, {name: value}, error, (name, words))
      for name in ("cu_seqlens_q", "cu_seqlens_k")
      for value, error, words in (([0, 5], TypeError, "torch.Tensor"), (None, ValueError, "must be given"),
                                  (torch.tensor([0, 4, 9]).short(), TypeError, "int32"),
                                  (int32(0, 9), ValueError, "entries"))),
    (flashtile.flash_attn_func, E4M3_CALL, {"dropout_p": 0.1}, NotImplementedError, ("dropout_p",)),
    (flashtile.attention, E4M3_CALL | {"attention_chunk": 3}, {"mask": torch.ones(SQ, SK, dtype=torch.bool)},
     NotImplementedError, ("mask must be left out for", "float8_e4m3fn")),
    (flashtile.attention, E4M3_CALL | {"attention_chunk": 3}, {"v_descale": torch.ones(B, 3)}, ValueError,
     ("v_descale must have shape", "(2, 3)")),
    (flashtile.attention, E4M3_CALL | {"attention_chunk": 3}, {"k_descale": torch.full((B, HKV), -0.5)},
     ValueError, ("k_descale must be at least 0", "-0.5")),
]  # fmt: skip


@walk(("function", "good", "change", "error", "says"), BAD)
def test_bad_calls_name_what_is_wrong(function, good, change, error, says, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if good is not None:
        function(**good) if not any(isinstance(x, fp8.Quantized) for x in good.values()) else None
    with pytest.raises(error) as raised:
        function(**(good | change))
    for words in says:
        assert words in str(raised.value)


def quantized(**arguments: Any) -> dict[str, fp8.Quantized]:
    return {name: fp8.quantize(x, name, **arguments) for name, x in ATTEND.items()}


@pytest.mark.parametrize("method", ["block", "head", "tensor"])
def test_quantised_before_or_within_the_call_is_the_same(method: str) -> None:
    at_once = fp8.attention(**ATTEND, method=method, seed=4, causal=True)
    before = quantized(method=method, seed=4)
    assert torch.equal(fp8.attention(**before, causal=True), at_once)
    mixed = before | {"q": ATTEND["q"]}
    assert torch.equal(fp8.attention(**mixed, causal=True), at_once)


def test_more_causal_queries_than_keys_are_rotated_from_the_first_key_on() -> None:
    """Those before it see nothing; the others are the queries of a call without them."""
    q, angles = x_of(SK + 3, H), ANGLES | {"causal": True, "hadamard": False, "method": "head"}
    q[:, :3] = 0  # they share a scale with the others
    out = fp8.attention(q, ATTEND["k"], ATTEND["v"], **angles)
    assert not out[:, :3].any()
    assert torch.equal(out[:, 3:], fp8.attention(q[:, 3:].contiguous(), ATTEND["k"], ATTEND["v"], **angles))


def test_varlen_containers_bring_their_lengths() -> None:
    q, k, v = (x.flatten(0, 1) for x in ATTEND.values())
    side_q = {"cu_seqlens": int32(0, 3, 10), "max_seqlen": 7}
    side_k = {"cu_seqlens": int32(0, 9, 18), "max_seqlen": 9, "seqused": int32(9, 4)}
    parts = (
        fp8.quantize(q, "q", **side_q),
        fp8.quantize(k, "k", **side_k),
        fp8.quantize(v, "v", **side_k),
    )
    at_once = fp8.attention(
        q, k, v, cu_seqlens_q=side_q["cu_seqlens"], cu_seqlens_k=side_k["cu_seqlens"], max_seqlen_q=7,
        max_seqlen_k=9, seqused_k=side_k["seqused"], causal=True,
    )  # fmt: skip
    assert torch.equal(fp8.attention(*parts, causal=True), at_once)


def test_explain_says_what_a_call_gets(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for explanation in (
        flashtile.explain(fp8.attention, **ATTEND),
        flashtile.explain(fp8.attention, **quantized(), causal=True),
        flashtile.explain(**E4M3_CALL, q_descale=torch.ones(B, HKV)),
    ):
        assert explanation.backend == "cpu"
        assert set(explanation.reasons_against) == {"hopper", "portable"}
        assert "e4m3" in explanation.details
    with pytest.raises(ValueError, match="v_descale must be None"):
        flashtile.explain(**ATTEND, v_descale=torch.ones(B, HKV))
    with pytest.raises(ValueError, match="k has head_dim 8"):
        flashtile.explain(fp8.attention, **(ATTEND | {"k": x_of(head_dim=8)}))


def test_explain_launches_nothing(monkeypatch) -> None:
    for each in (operators.QUANTIZE, operators.ATTEND):
        monkeypatch.setattr(each, "launch", None)
    explanation = flashtile.explain(fp8.attention, **ATTEND, method="tensor")
    assert explanation.operations == ("fp8_quantize",) * 3 + ("fp8_attend",)
    assert explanation.problem.v_transposed


def test_operators_pass_opcheck() -> None:
    options = QuantizeOptions("k", "block", 3, None, 0, False, None)
    # The schema test multiplies what it gets, which torch does not do in e4m3.
    of_e4m3 = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    quantize = torch.ops.flashtile.fp8_quantize.default
    torch.library.opcheck(quantize, (x_of(), *QuantizeTensors(), *options), test_utils=of_e4m3)
    values = QuantizeOptions("v", "head", None, 5, 0, False, None)
    packed = QuantizeTensors(cu_seqlens=int32(0, 4, 9))
    torch.library.opcheck(quantize, (x_of()[0], *packed, *values), test_utils=of_e4m3)
    shared = shared_fields(AttendOptions, Options(masking=CAUSAL))
    attend = AttendOptions(**shared, out_dtype=BF16, head_dim=D)
    scales = AttendTensors(q_descale=torch.ones(B, HKV), v_descale=torch.ones(B, HKV))
    torch.library.opcheck(
        torch.ops.flashtile.fp8_attend.default,
        (*E4M3_CALL.values(), *scales, *flat(attend)),
        test_utils=of_e4m3,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    """Quantising, containers across the graph, and attention."""
    torch._dynamo.reset()

    def model(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cache = fp8.quantize(k, "k", seed=2), fp8.quantize(v, "v")
        return fp8.attention(q + 1, *cache, causal=True, return_lse=True)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seqlen in (SK, 2 * SK):
        call = (ATTEND["q"], x_of(seqlen), x_of(seqlen) * 2)
        for ours, eager in zip(compiled(*call), model(*call), strict=True):
            assert torch.equal(ours, eager)


def test_e4m3_functions_compile() -> None:
    torch._dynamo.reset()

    def model(q: Tensor, k: Tensor, v: Tensor, descale: Tensor) -> Tensor:
        return flashtile.flash_attn_func(q, k, v, q_descale=descale, v_descale=descale) * 2

    call = (*E4M3_CALL.values(), torch.rand(B, HKV))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*call), model(*call))


def test_a_signature_is_checked_once(monkeypatch) -> None:
    cache = quantized()
    first = fp8.attention(**cache)
    monkeypatch.setattr(operators.ATTEND, "check", None)
    monkeypatch.setattr(operation, "select", None)
    assert torch.equal(fp8.attention(**cache), first)
    with pytest.raises(TypeError):
        fp8.attention(**cache, softcap=0.123)  # another signature: what is patched would be called


def test_autocast_chooses_the_dtype() -> None:
    call = {name: x.float() for name, x in ATTEND.items()}
    with torch.autocast("cpu", BF16):
        assert fp8.attention(**call).dtype == BF16


def test_the_oracle_applies_descales() -> None:
    """Of e4m3 tensors, by head and sequence, dense and packed."""
    scale = 0.5 + torch.rand(B, HKV)
    q, k, v = E4M3_CALL.values()
    scaled = [
        x.double() * scale.double().repeat_interleave(x.shape[2] // HKV, 1)[:, None, :, None]
        for x in (q, k, v)
    ]
    exact, lse = flashtile.reference.attention.attention(*scaled)
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), scale)
    ours, ours_lse = reference.attention(q, k, v, **descales)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(ours_lse, lse)
    packed, _ = reference.attention(
        *(x.flatten(0, 1) for x in (q, k, v)),
        cu_seqlens_q=int32(0, SQ, 2 * SQ), cu_seqlens_k=int32(0, SK, 2 * SK), max_seqlen_q=SQ,
        max_seqlen_k=SK, **descales,
    )  # fmt: skip
    torch.testing.assert_close(packed, exact.flatten(0, 1))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_chunks_and_used_queries_of_e4m3_tensors_are_computed_in_16_bits(packed: bool) -> None:
    """As the same call of bf16 tensors that were multiplied by their scales, gradients included."""
    scales = [0.5 + torch.rand(B, HKV, generator=torch.Generator().manual_seed(3)) for _ in range(3)]
    sources = [x.detach().clone().requires_grad_() for x in E4M3_CALL.values()]
    factors = [
        scale.repeat_interleave(x.shape[2] // HKV, 1)[:, None, :, None]
        for x, scale in zip(sources, scales, strict=True)
    ]
    scaled = [
        (x.detach().float() * factor).to(BF16).requires_grad_()
        for x, factor in zip(sources, factors, strict=True)
    ]
    options: dict[str, Any] = {"attention_chunk": 3, "causal": True, "seqused_q": int32(SQ, 2)}
    ours, theirs = sources, scaled
    if packed:
        ours, theirs = ([x.flatten(0, 1) for x in some] for some in (sources, scaled))
        options |= {"cu_seqlens_q": int32(0, SQ, 2 * SQ), "cu_seqlens_k": int32(0, SK, 2 * SK)}
        options |= {"max_seqlen_q": SQ, "max_seqlen_k": SK}
    names = ("q_descale", "k_descale", "v_descale")
    out = flashtile.attention(*ours, **options, **dict(zip(names, scales, strict=True)))
    expected = flashtile.attention(*theirs, **options)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    for x, exact, factor in zip(sources, scaled, factors, strict=True):
        assert x.grad is not None
        assert exact.grad is not None
        assert torch.equal(x.grad, (exact.grad.float() * factor).to(E4M3))
