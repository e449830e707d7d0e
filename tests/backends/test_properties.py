"""Relations between calls of one backend that hold for any numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from cases import FP16, FP32, FP64, Case
from flashtile import merge_states, testing
from targets import Target

pytestmark = [pytest.mark.numerical, pytest.mark.quick]


class Attend:
    """A target's attention with its backend filled in, and inputs of its size."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.length = target.longest

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        return flashtile.attention(q, k, v, return_lse=True, backend=self.target.backend, **arguments)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = self(*leaves, **arguments)
        if dlse is None:
            return torch.autograd.grad(out, leaves, dout)
        return torch.autograd.grad((out, lse), leaves, (dout, dlse))

    def inputs(self, **fields: Any) -> tuple[Tensor, ...]:
        """(q, k, v, dout, dlse) in float32, where a broken property stands out of the rounding."""
        defaults = {"seqlen_q": self.length - 5, "seqlen_k": self.length, "heads_q": 2, "heads_kv": 1}
        case = Case(**{"name": "property", "head_dim": 24, "dtype": FP32, **defaults, **fields})
        inputs = case.inputs(self.target.device)
        assert inputs.dout is not None
        assert inputs.dlse is not None
        return *inputs.qkv, inputs.dout, inputs.dlse


@pytest.fixture
def attend(target: Target) -> Attend:
    return Attend(target)


def assert_near(got: Any, expected: Any, atol: float = 2e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=atol)


def assert_same_bits(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 4)},
    "softcap": {"softcap": 2.0, "causal": True},
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
two_masks = pytest.mark.parametrize("mask", [MASKS["softcap"], MASKS["window"]], ids=["softcap", "window"])
a_mask_and_layout = pytest.mark.parametrize(
    ("mask", "varlen"), [(MASKS["window"], False), (MASKS["causal"], True)], ids=["dense", "varlen"]
)


@pytest.mark.relation
def test_the_order_of_keys_does_not_matter(attend: Attend) -> None:
    q, k, v, dout, dlse = attend.inputs()
    order = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(0)).to(k.device)
    assert_near(attend(q, k[:, order], v[:, order]), attend(q, k, v))
    dq, dk, dv = attend.gradients(q, k, v, dout, dlse)
    got = attend.gradients(q, k[:, order], v[:, order], dout, dlse)
    assert_near(got, (dq, dk[:, order], dv[:, order]))


@pytest.mark.relation
@every_mask
def test_the_order_of_batch_and_heads_does_not_matter(attend: Attend, mask: dict[str, Any]) -> None:
    q, k, v, *_ = attend.inputs(heads_q=3, heads_kv=3, batch=2)
    out, lse = attend(q, k, v, **mask)
    flipped = (t.flip(0, 2) for t in (q, k, v))
    assert_near(attend(*flipped, **mask), (out.flip(0, 2), lse.flip(0, 1)))


def test_the_future_does_not_matter(attend: Attend) -> None:
    length = attend.length
    q, k, v, dout, dlse = attend.inputs(seqlen_q=length)
    past = length - 13
    out, lse = attend(q, k, v, causal=True)
    assert_near(attend(q[:, :past], k[:, :past], v[:, :past], causal=True), (out[:, :past], lse[..., :past]))

    k_other, v_other = k.clone(), v.clone()
    k_other[:, past:], v_other[:, past:] = 300.0, -5000.0
    out_other, lse_other = attend(q, k_other, v_other, causal=True)
    assert_same_bits((out_other[:, :past], lse_other[..., :past]), (out[:, :past], lse[..., :past]))

    dout[:, past:], dlse[..., past:] = 0.0, 0.0
    for gradient in attend.gradients(q, k, v, dout, dlse, causal=True):
        assert gradient[:, :past].abs().amax() > 0
        assert_same_bits(gradient[:, past:], torch.zeros_like(gradient[:, past:]))


def test_what_the_window_hides_does_not_matter(attend: Attend) -> None:
    q, k, v, *_ = attend.inputs(seqlen_q=attend.length)
    left, row = 6, attend.length - 2
    out, lse = attend(q, k, v, window_size=(left, 0))
    alone = slice(row - left, row + 1)
    expected = attend(q[:, row : row + 1], k[:, alone], v[:, alone])
    assert_near((out[:, row : row + 1], lse[..., row : row + 1]), expected)


@pytest.mark.relation
@every_mask
def test_decoding_repeats_the_last_row(attend: Attend, mask: dict[str, Any]) -> None:
    """One query against all keys stands at the bottom right of the whole."""
    q, k, v, *_ = attend.inputs(seqlen_q=attend.length)
    out, lse = attend(q, k, v, **mask)
    assert_near(attend(q[:, -1:], k, v, **mask), (out[:, -1:], lse[..., -1:]))


@pytest.mark.relation
@pytest.mark.parametrize(
    ("mask", "alibi"), list(zip(MASKS.values(), ("batch", None, "head", "batch"), strict=True)), ids=MASKS
)
def test_varlen_is_a_loop_over_sequences(attend: Attend, mask: dict[str, Any], alibi: str | None) -> None:
    lengths = ((attend.length, attend.length - 7), (0, 5), (6, 0), (11, attend.length), (1, 1), (16, 16))
    call = Case(name="loop", lengths=lengths, heads_q=2, heads_kv=1, head_dim=24, dtype=FP32, alibi=alibi)
    inputs = call.inputs(attend.target.device)
    arguments = {**inputs.arguments, **mask}
    out, lse = attend(*inputs.qkv, **arguments)
    gradients = attend.gradients(*inputs.qkv, inputs.dout, inputs.dlse, **arguments)

    starts_q, starts_k = arguments["cu_seqlens_q"].tolist(), arguments["cu_seqlens_k"].tolist()
    for b in range(len(lengths)):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        alone = (inputs.q[None, rows], inputs.k[None, keys], inputs.v[None, keys])
        slopes = arguments.get("alibi_slopes")
        slopes = slopes[b] if alibi == "batch" else slopes
        expected_out, expected_lse = attend(*alone, alibi_slopes=slopes, **mask)
        assert_near((out[None, rows], lse[None, :, rows]), (expected_out, expected_lse))
        expected = attend.gradients(
            *alone, inputs.dout[None, rows], inputs.dlse[None, :, rows], alibi_slopes=slopes, **mask
        )
        dq, dk, dv = gradients
        assert_near((dq[None, rows], dk[None, keys], dv[None, keys]), expected)


@pytest.mark.relation
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_two_halves_of_the_keys_merge_to_the_whole(attend: Attend, softcap: float) -> None:
    q, k, v, dout, dlse = attend.inputs()
    half = attend.length // 2 - 3

    def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = attend(q, k[:, :half], v[:, :half], softcap=softcap)
        second = attend(q, k[:, half:], v[:, half:], softcap=softcap)
        return merge_states(*first, *second)

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    results = merged(*leaves)
    assert_near(results, attend(q, k, v, softcap=softcap))
    got = torch.autograd.grad(results, leaves, (dout, dlse))
    assert_near(got, attend.gradients(q, k, v, dout, dlse, softcap=softcap))


@pytest.mark.relation
@a_mask_and_layout
def test_a_sink_merges_as_attention_to_a_key_without_a_value(
    attend: Attend, mask: dict[str, Any], varlen: bool
) -> None:
    """Whatever its size; the gradients of the merge, and that of the sink, come from autograd."""
    more: dict[str, Any] = {"lengths": ((11, attend.length), (9, 0), (20, 5))} if varlen else {}
    call = Case(name="sink", seqlen_q=21, heads_q=4, heads_kv=2, head_dim=24, dtype=FP32, **more)
    inputs = call.inputs(attend.target.device)
    arguments = {**inputs.arguments, **mask}
    sink = torch.tensor([0.7, -40.0, 60.0, -torch.inf], device=attend.target.device)

    def merged(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(q, k, v, **arguments)
        return merge_states(out, lse, torch.zeros_like(out), sink[:, None].expand(lse.shape))

    given = (*inputs.qkv, sink)
    leaves, copies = ([t.detach().requires_grad_() for t in given] for _ in range(2))
    results, expected = attend(*leaves[:3], sink=leaves[3], **arguments), merged(*copies)
    assert_near(results, expected)
    upstream = (inputs.dout, inputs.dlse)
    got = torch.autograd.grad(results, leaves, upstream)
    assert_near(got, torch.autograd.grad(expected, copies, upstream), atol=5e-5)
    assert got[3][1:].abs().amax() > 0


def test_a_sink_alone_is_learned(attend: Attend) -> None:
    """Its gradient does not depend on whether q, k and v want theirs."""
    q, k, v, dout, _ = attend.inputs()
    sink, other = (torch.nn.Parameter(torch.tensor([0.5, -0.5], device=q.device)) for _ in range(2))
    (dsink,) = torch.autograd.grad(attend(q, k, v, sink=sink)[0], sink, dout)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, _ = attend(*leaves, sink=other)
    assert_same_bits(torch.autograd.grad(out, (*leaves, other), dout)[3], dsink)
    assert dsink.abs().amin() > 0


@a_mask_and_layout
def test_unused_keys_do_not_exist(attend: Attend, mask: dict[str, Any], varlen: bool) -> None:
    lengths = ((attend.length, attend.length - 3), (7, 9), (5, 5), (0, 4))
    if varlen:
        fields: dict[str, Any] = {"lengths": lengths}
    else:
        fields = {"batch": 4, "seqlen_q": 12, "seqlen_k": attend.length}
    call = Case(name="used", heads_q=2, heads_kv=1, head_dim=24, dtype=FP32, unused_keys=4, **fields)
    inputs = call.inputs(attend.target.device)
    arguments = {**inputs.arguments, **mask}
    out, lse = attend(*inputs.qkv, **arguments)
    dq, dk, dv = attend.gradients(*inputs.qkv, inputs.dout, inputs.dlse, **arguments)
    row = key = 0
    for b, used in enumerate(arguments["seqused_k"].tolist()):
        if varlen:
            len_q, len_k = lengths[b]
            own = ((q := slice(row, row + len_q)), slice(key, key + used), (slice(None), q))
            unused: Any = slice(key + used, key + len_k)
            row, key = row + len_q, key + len_k
        else:
            own, unused = (b, (b, slice(0, used)), b), (b, slice(used, None))
        queries, keys, statistics = own
        alone = (inputs.q[queries][None], inputs.k[keys][None], inputs.v[keys][None])
        assert_near((out[queries][None], lse[statistics][None]), attend(*alone, **mask))
        expected = attend.gradients(*alone, inputs.dout[queries][None], inputs.dlse[statistics][None], **mask)
        assert_near((dq[queries][None], dk[keys][None], dv[keys][None]), expected)
        assert (dk[unused] == 0).all()
        assert (dv[unused] == 0).all()


def test_causal_is_a_full_and_a_causal_part(attend: Attend) -> None:
    """How ring attention and chunked prefill cut a causal call."""
    length = attend.length
    q, k, v, *_ = attend.inputs(seqlen_q=length)
    cut = length // 2 + 1
    past = attend(q[:, cut:], k[:, :cut], v[:, :cut])
    present = attend(q[:, cut:], k[:, cut:], v[:, cut:], causal=True)
    out, lse = attend(q, k, v, causal=True)
    assert_near(merge_states(*past, *present), (out[:, cut:], lse[..., cut:]))


@every_mask
def test_two_runs_give_the_same_bits(gpu_target: Target, mask: dict[str, Any]) -> None:
    """On GPUs, where programs run in any order; elsewhere one follows the other."""
    attend = Attend(gpu_target)
    q, k, v, dout, dlse = attend.inputs(dtype=FP16, heads_q=6, heads_kv=2)
    arguments = {"deterministic": True, **mask}
    results = attend(q, k, v, **arguments), attend.gradients(q, k, v, dout, dlse, **arguments)
    for _ in range(3):
        again = attend(q, k, v, **arguments), attend.gradients(q, k, v, dout, dlse, **arguments)
        assert_same_bits(again, results)


def test_a_batch_element_does_not_feel_the_others(attend: Attend) -> None:
    q, k, v, dout, dlse = attend.inputs(batch=3)
    out, lse = attend(q, k, v, causal=True)
    gradients = attend.gradients(q, k, v, dout, dlse, causal=True)
    for b in range(3):
        one = slice(b, b + 1)
        assert_near(attend(q[one], k[one], v[one], causal=True), (out[one], lse[one]))
        alone = attend.gradients(q[one], k[one], v[one], dout[one], dlse[one], causal=True)
        assert_near(alone, tuple(g[one] for g in gradients))


@pytest.mark.relation
@two_masks
def test_grouped_heads_are_repeated_heads(attend: Attend, mask: dict[str, Any]) -> None:
    q, k, v, dout, dlse = attend.inputs(heads_q=4, heads_kv=2)
    repeated = tuple(t.repeat_interleave(2, dim=2) for t in (k, v))
    assert_near(attend(q, k, v, **mask), attend(q, *repeated, **mask))
    dq, *dkv = attend.gradients(q, *repeated, dout, dlse, **mask)
    summed = (t.unflatten(2, (2, 2)).sum(3) for t in dkv)
    assert_near(attend.gradients(q, k, v, dout, dlse, **mask), (dq, *summed))


@pytest.mark.relation
def test_a_shift_of_all_keys_shifts_lse_alone(attend: Attend) -> None:
    q, k, v, dout, _ = attend.inputs()
    shift = testing.random_tensor((1, 1, 1, q.shape[-1]), FP32, q.device, seed=9)
    out, lse = attend(q, k, v, softmax_scale=0.3)
    shifted = lse + 0.3 * (q * shift).sum(-1).transpose(1, 2)
    assert_near(attend(q, k + shift, v, softmax_scale=0.3), (out, shifted))
    dk = attend.gradients(q, k, v, dout, None, softmax_scale=0.3)[1]
    assert_near(dk.double().sum(1), torch.zeros_like(dk[:, 0], dtype=FP64), atol=5e-5)


def test_weights_sum_to_one(attend: Attend) -> None:
    q, k, v, *_ = attend.inputs(seqlen_q=attend.length, seqlen_k=attend.length - 9)
    out, lse = attend(q, k, torch.ones_like(v), causal=True)
    sees = (lse > -torch.inf).transpose(1, 2).unsqueeze(-1).expand_as(out)
    assert sees[:, 9:].all()
    assert not sees[:, :9].any()
    assert_near(out, sees.float())


@pytest.mark.relation
@every_mask
def test_out_is_linear_in_v(attend: Attend, mask: dict[str, Any]) -> None:
    q, k, v, *_ = attend.inputs()
    other = v.flip(1)
    combined = 2 * attend(q, k, v, **mask)[0] - 3 * attend(q, k, other, **mask)[0]
    assert_near(attend(q, k, 2 * v - 3 * other, **mask)[0], combined, atol=5e-5)


@pytest.mark.relation
def test_scale_belongs_to_the_scores(attend: Attend) -> None:
    q, k, v, *_ = attend.inputs()
    assert_near(attend(-4 * q, k, v, softmax_scale=-0.0625), attend(q, k, v, softmax_scale=0.25))
    assert_near(attend(q, k, v), attend(q, k, v, softmax_scale=24**-0.5))


def test_scale_zero_is_the_mean_of_the_visible_values(attend: Attend) -> None:
    q, k, v, *_ = attend.inputs(seqlen_q=attend.length)
    out, lse = attend(q, k, v, causal=True, softmax_scale=0.0)
    count = torch.arange(1, attend.length + 1, device=v.device)
    mean = v.cumsum(1) / count[:, None, None]
    assert_near(out, mean.expand_as(out))
    assert_near(lse, count.log().expand_as(lse))


@pytest.mark.relation
def test_different_words_for_one_mask(attend: Attend) -> None:
    q, k, v, *_ = attend.inputs()
    causal = attend(q, k, v, causal=True)
    assert_same_bits(attend(q, k, v, window_size=(-1, 0)), causal)
    assert_same_bits(attend(q, k, v, causal=True, window_size=(-1, 7)), causal)
    assert_near(attend(q, k, v, window_size=(10**6, 0)), causal)
    assert_near(attend(q, k, v, window_size=(10**6, 10**6)), attend(q, k, v))
    assert_near(attend(q, k, v, softcap=1e6), attend(q, k, v), atol=1e-4)
    slopes = torch.zeros(q.shape[2], device=q.device)
    assert_near(attend(q, k, v, alibi_slopes=slopes), attend(q, k, v))


@pytest.mark.relation
@pytest.mark.parametrize("parts", [2, 3], ids=["kvpacked", "qkvpacked"])
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_packed_functions(target: Target, parts: int, varlen: bool) -> None:
    """The packed forms compute the same, and their gradient is packed like their input."""
    heads, head_dim, length, backend = 2, 24, target.longest - 3, target.backend
    rows = (length + 9,) if varlen else (2, length)
    shape = (*rows, 3, heads, head_dim)
    packed = testing.random_tensor(shape, FP16, target.device, seed=4)
    cu_seqlens = testing.cu_seqlens((length, 9), target.device)
    q, k, v = packed.unbind(-3)
    dout = testing.random_tensor(q.shape, FP16, target.device, seed=5)
    name = f"flash_attn_{'varlen_' if varlen else ''}{'kv' if parts == 2 else 'qkv'}packed_func"
    if parts == 2:
        leaves = [q.detach().requires_grad_(), packed[..., 1:, :, :].detach().requires_grad_()]
        lengths = (cu_seqlens, cu_seqlens, length, length) if varlen else ()
    else:
        leaves = [packed.detach().requires_grad_()]
        lengths = (cu_seqlens, length) if varlen else ()
    out, lse = getattr(flashtile, name)(*leaves, *lengths, causal=True, return_lse=True, backend=backend)
    got = torch.autograd.grad(out, leaves, dout)

    attend = Attend(target)
    arguments: dict[str, Any] = {"causal": True}
    if varlen:
        arguments.update(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        arguments.update(max_seqlen_q=length, max_seqlen_k=length)
    assert_same_bits((out, lse), attend(q, k, v, **arguments))
    expected = attend.gradients(q, k, v, dout, None, **arguments)
    got_packed = torch.cat([t.unsqueeze(-3) if t.dim() == q.dim() else t for t in got], dim=-3)
    # Without deterministic=True a backend may add in another order: one rounding unit of gradients up to 4.
    assert_near(got_packed, torch.stack(expected, dim=-3), atol=4e-3)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize(
    "mask",
    [
        {},
        {"causal": True},
        {"window_size": (2, 1), "softcap": 1.5},
        {"alibi_slopes": torch.tensor([0.5, 0.25])},
        {"sink": torch.tensor([0.5, -1.0], dtype=FP64), "causal": True},
    ],
    ids=["full", "causal", "window-softcap", "alibi", "sink"],
)
def test_finite_differences(target: Target, varlen: bool, mask: dict[str, Any]) -> None:
    """Gradients of out and lse against differences of the forward pass itself, in float64."""
    if FP64 not in target.dtypes:
        pytest.skip(f"{target.name} does not compute in float64")
    rows, keys = ((5,), (9,)) if varlen else ((1, 4), (1, 5))
    arguments = dict(mask)
    if varlen:
        arguments.update(
            cu_seqlens_q=testing.cu_seqlens((2, 3), "cpu"),
            cu_seqlens_k=testing.cu_seqlens((3, 6), "cpu"),
            max_seqlen_q=3,
            max_seqlen_k=6,
        )
    shapes = ((*rows, 2, 3), (*keys, 1, 3), (*keys, 1, 2))
    leaves = [testing.random_tensor(s, FP64, "cpu", seed=i).requires_grad_() for i, s in enumerate(shapes)]
    attend = Attend(target)
    names = [name for name in ("sink",) if name in arguments]
    leaves += [arguments[name].detach().requires_grad_() for name in names]

    def attention(*given: Tensor) -> tuple[Tensor, Tensor]:
        return attend(*given[:3], **arguments | dict(zip(names, given[3:], strict=True)))

    assert torch.autograd.gradcheck(attention, leaves)
