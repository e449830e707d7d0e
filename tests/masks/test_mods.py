"""Functions of scores and masks on every backend: against the oracle, which runs them on all indices at
once."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from cases import Case
from flashtile import masks, testing
from flashtile.masks.mods import traced
from flashtile.reference import attention as reference
from listed_calls import check_small_scores
from mod_cases import HEADS, MODS, SEQLEN_K, SEQLEN_Q
from targets import Target
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

CALL = Case(name="mods", seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K, heads_q=HEADS, heads_kv=2, head_dim=24)
SMALL = replace(CALL, batch=1, seqlen_q=20, seqlen_k=40, heads_q=2, heads_kv=1, head_dim=16)


def call_of(target: Target, name: str, *interpreted: str) -> Case:
    if target.name == "interpreter" and name not in interpreted:
        pytest.skip("the interpreter takes seconds")
    return SMALL if target.name == "interpreter" else CALL


def blocked(arguments: dict, size: int, device: str, call: Case) -> dict:
    """The same call by a block mask."""
    lengths = call.batch, call.heads_q, call.seqlen_q, call.seqlen_k
    block_mask = masks.create_block_mask(arguments["mask_mod"], *lengths, device, (16, size))
    return {name: a for name, a in arguments.items() if name != "mask_mod"} | {"block_mask": block_mask}


@pytest.mark.parametrize(("height", "width", "kernel"), [(6, 7, (3, 5)), (3, 8, (3, 1)), (5, 5, (5, 3))])
def test_a_neighborhood_is_shifted_inwards_at_the_edges(height, width, kernel) -> None:
    def near(q: int, kv: int, size: int, extent: int) -> bool:
        first = min(max(q - size // 2, 0), extent - size)
        return first <= kv < first + size

    tokens = [divmod(token, width) for token in range(height * width)]
    expected = [
        [near(y, at[0], kernel[0], height) and near(x, at[1], kernel[1], width) for at in tokens]
        for y, x in tokens
    ]
    places = torch.arange(height * width)
    found = masks.natten(height, width, kernel)(0, 0, places[:, None], places)
    assert found.tolist() == expected


@walk(
    ("mask", "sees"),
    [
        (masks.causal(3), lambda i, j: j <= i + 3),
        (masks.causal(-2), lambda i, j: j <= i - 2),
        (masks.window(2, 1, 3), lambda i, j: -2 <= j - (i + 3) <= 1),
        (masks.window(-1, 1, -2), lambda i, j: j - (i - 2) <= 1),
        (masks.prefix_lm(2, 3), lambda i, j: j < 2 or j <= i + 3),
        (masks.dilated(2, 3, 1), lambda i, j: j - (i + 1) in (-6, -3, 0, 3, 6)),
        (masks.padding(torch.tensor([4])), lambda i, j: j < 4),
        (masks.document(torch.arange(9) // 4), lambda i, j: i // 4 == j // 4),
        (masks.prefix_lm(2, 3) & ~masks.causal(1), lambda i, j: (j < 2 or j <= i + 3) and j > i + 1),
        (masks.causal(-2) | masks.dilated(1, 3, 1), lambda i, j: j <= i - 2 or j - (i + 1) in (-3, 0, 3)),
    ],
)
def test_ready_masks_by_their_definitions(mask, sees) -> None:
    """With ``offset``, query i is at the position of key i + offset."""
    places, zero = torch.arange(9), torch.zeros((), dtype=torch.int64)
    found = mask(zero, zero, places[:, None], places).expand(9, 9)
    assert found.tolist() == [[bool(sees(i, j)) for j in range(9)] for i in range(9)]


@pytest.mark.parametrize(
    ("mod", "changed"),
    [
        (masks.alibi(torch.tensor([0.5]), 3), lambda i, j: 1 - 0.5 * abs(i + 3 - j)),
        (masks.relative_position(torch.arange(5.0)[None], 3), lambda i, j: 3 + min(max(j - i - 3, -2), 2)),
        (masks.softcap(2.0), lambda i, j: 2 * math.tanh(0.5)),
    ],
)
def test_ready_score_mods_by_their_definitions(mod, changed) -> None:
    places, zero = torch.arange(9), torch.zeros((), dtype=torch.int64)
    found = mod(torch.ones(9, 9), zero, zero, places[:, None], places)
    expected = torch.tensor([[float(changed(i, j)) for j in range(9)] for i in range(9)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", MODS)
def test_mod(target: Target, name: str) -> None:
    case = call_of(target, name, "both", "signs-of-zero")
    arguments = MODS[name](target.device).arguments
    inputs = case.inputs(target.device)
    calls = [arguments]
    if "mask_mod" in arguments:
        calls = [blocked(arguments, 16, target.device, case)]
        if target.name != "interpreter":
            calls += [arguments, blocked(arguments, 32, target.device, case)]
    for call in calls:
        own = {k: a for k, a in inputs.arguments.items() if k not in call} | call
        testing.check(*inputs.qkv, dout=inputs.dout, dlse=inputs.dlse, backend=target.backend, **own)


def test_rows_of_small_finite_scores(target: Target) -> None:
    check_small_scores(*call_of(target, "small", "small").inputs(target.device).qkv, target.backend)


@pytest.mark.parametrize("name", ["alibi", "relative", "swin", "many"])
def test_gradients_of_captured_tensors(target: Target, name: str) -> None:
    case = call_of(target, name, "many")
    arguments, learned = MODS[name](target.device)
    for tensor in learned:
        tensor.requires_grad_()
    q, k, v = (t.float() for t in case.inputs(target.device).qkv)
    dout = testing.random_tensor(q.shape, torch.float32, target.device)
    out = flashtile.attention(q, k, v, backend=target.backend, **arguments)
    expected, _ = reference.attention(q.double(), k.double(), v.double(), **arguments)
    ours = torch.autograd.grad(out, learned, dout)
    exact = torch.autograd.grad(expected, learned, dout.double())
    for got, wanted in zip(ours, exact, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=2e-3, atol=2e-4 * float(wanted.abs().max()))


def test_derivatives_of_every_operation() -> None:
    """By finite differences, in float64."""
    slopes = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)

    def modify(score, batch, head, q_idx, kv_idx):
        x = score * slopes[head] + bias[head, (q_idx - kv_idx).clamp(-2, 2) + 2]
        x = x + torch.exp2(-x * x) - torch.log2(2 + x * x) + torch.rsqrt(3 + x * x) + torch.erf(x)
        x = x + torch.cos(x) / (2 + torch.sin(x)) + torch.sqrt(1 + x * x) + (2 + torch.tanh(x)) ** 1.5
        return x + torch.remainder(x, 0.37) + 1.3 ** torch.sigmoid(x)

    q, k, v = (torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(q, k, v, slopes, bias):
        return flashtile.attention(q, k, v, score_mod=modify, return_lse=True)

    assert torch.autograd.gradcheck(attend, (q, k, v, slopes, bias))


TIES = {
    "relu": lambda x, y: torch.relu(x) + torch.relu(y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "clamp": lambda x, y: torch.clamp(x, 0.0, 1.0) + torch.clamp(y, max=0.0),
}


@pytest.mark.parametrize("name", TIES)
def test_gradients_at_ties_are_torchs(target: Target, name: str) -> None:
    """Parameters that start at 0 are ties. Tangents and second derivatives agree with the gradients."""
    function, device = TIES[name], target.device
    q, k, v = (testing.random_tensor((1, 8, 2, 16), torch.float32, device, seed=i) for i in range(3))
    ties = torch.zeros(2, 2, device=device)

    def attend(ties, attention, **options):
        def score_mod(s, b, h, i, j):
            return s + s * function(ties[0, h], ties[1, h]) * (i - j)

        return attention(q, k, v, score_mod=score_mod, **options)

    ours = ties.clone().requires_grad_()
    exact = ties.clone().requires_grad_()
    out = attend(ours, flashtile.attention, backend=target.backend)
    expected, _ = attend(exact, reference.attention)
    dout = testing.random_tensor(out.shape, torch.float32, device, seed=4)
    (found,) = torch.autograd.grad(out, ours, dout, create_graph=True)
    (wanted,) = torch.autograd.grad(expected, exact, dout, create_graph=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    if wanted.requires_grad and found.requires_grad:
        second = [torch.autograd.grad(one.sum(), of)[0] for one, of in ((found, ours), (wanted, exact))]
        torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)
    tangent = torch.ones_like(ties)
    along = torch.func.jvp(
        lambda t: attend(t, flashtile.attention, backend=target.backend), (ties,), (tangent,)
    )[1]
    torch.testing.assert_close((along * dout).sum(), found.sum().detach(), rtol=1e-4, atol=1e-4)


def test_numbers_that_a_condition_chooses_are_ints_where_they_were() -> None:
    table = torch.arange(9.0)
    q = torch.randn(1, 4, 2, 8)
    out = flashtile.attention(
        q, q, q, score_mod=lambda s, b, h, q_idx, kv_idx: s + table[torch.where(q_idx < kv_idx, 5, 0)]
    )
    later = torch.ones(4, 4).triu(1)[None, None]
    torch.testing.assert_close(out, flashtile.attention(q, q, q, bias=5 * later))


def test_a_block_mask_alone_decides_what_is_computed() -> None:
    """Lists that leave a block out hide it, and one in the full list takes no mask, in both directions."""
    block_mask = masks.create_block_mask(masks.causal(), None, None, 64, 64, BLOCK_SIZE=32)
    moved = block_mask.to("meta")
    assert {one.device.type for one in moved.lists} == {"meta"}
    assert repr(moved) == repr(block_mask)
    assert block_mask.kv_num_blocks.tolist() == [[[1, 1]]]
    assert block_mask.full_kv_num_blocks.tolist() == [[[0, 1]]]
    assert block_mask.q_num_blocks.tolist() == [[[1, 1]]]
    assert block_mask.full_q_num_blocks.tolist() == [[[1, 0]]]
    block_mask.full_kv_num_blocks.zero_()
    block_mask.full_q_num_blocks.zero_()
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 64, 2, 16).unbind())
    out = flashtile.attention(q, k, v, block_mask=block_mask)
    parts = [
        flashtile.attention(*(t[:, s] for t in (q, k, v)), causal=True) for s in (slice(32), slice(32, 64))
    ]
    torch.testing.assert_close(out, torch.cat(parts, 1))


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_two_heads_with_lists_of_their_own(heads_kv: int) -> None:
    def near(batch, head, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < 4 + 20 * head

    block_mask = masks.create_block_mask(near, None, 2, 64, 64, BLOCK_SIZE=16)
    q, k, v = torch.randn(1, 64, 2, 8), *torch.randn(2, 1, 64, heads_kv, 8)
    out = flashtile.attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(out, flashtile.attention(q, k, v, mask_mod=near))


def test_poison_in_empty_blocks_is_not_read(target: Target) -> None:
    block_mask = masks.create_block_mask(masks.causal(), None, None, 64, 96, target.device, BLOCK_SIZE=32)
    shape = (1, 96, 2, 16)
    q, k, v = (testing.random_tensor(shape, torch.float16, target.device, seed=i) for i in range(3))
    q = q[:, :64].requires_grad_()
    clean = flashtile.attention(q, k[:, :64], v[:, :64], causal=True, backend=target.backend)
    k[:, 64:] = v[:, 64:] = torch.nan
    k.requires_grad_()
    out = flashtile.attention(q, k, v, block_mask=block_mask, backend=target.backend)
    torch.testing.assert_close(out, clean, rtol=5e-3, atol=2e-3)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk[:, 64:].eq(0).all()


def _opposite_of_everything():
    return ~masks.window(-1, -1)


PICKLED = {
    "causal": lambda: masks.causal(1),
    "everything": lambda: masks.window(-1, -1),
    "nothing": _opposite_of_everything,
    "not nothing": lambda: ~_opposite_of_everything(),
    "joined": lambda: masks.causal() & masks.prefix_lm(torch.tensor([2])) | ~masks.dilated(1, 2, offset=1),
    "document": lambda: masks.document(torch.tensor([0, 1, 1, 2]), ids_kv=torch.tensor([[0, 0, 1, 1]])),
    "natten": lambda: masks.natten(2, 2, 1),
    "decorated": lambda: every_other,
    "alibi": lambda: masks.alibi(torch.tensor([0.5])),
    "relative": lambda: masks.relative_position(torch.arange(3.0)[None]),
    "softcap": lambda: masks.softcap(cap=2.0),
}


@masks.mask_mod
def every_other(batch, head, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0


@walk("name", PICKLED)
def test_masks_and_block_masks_pickle(name: str) -> None:
    made = PICKLED[name]()
    again = pickle.loads(pickle.dumps(made))
    assert repr(again) == repr(made)
    q = torch.randn(1, 4, 1, 8)
    expected = flashtile.attention(q, q, q, **{made.kind: made})
    assert torch.equal(flashtile.attention(q, q, q, **{made.kind: again}), expected)
    assert torch.equal(flashtile.attention(q, q, q, **{made.kind: copy.deepcopy(made)}), expected)
    if made.kind == "mask_mod":
        blocks = pickle.loads(pickle.dumps(masks.create_block_mask(made, None, None, 4, 4)))
        torch.testing.assert_close(flashtile.attention(q, q, q, block_mask=blocks), expected)


def _within_two(batch, head, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 2


def test_a_mask_of_a_global_function_pickles_with_the_function() -> None:
    """The function's global name does not refer to the mask."""
    assert pickle.loads(pickle.dumps(masks.mask_mod(_within_two))).function is _within_two


@pytest.mark.parametrize("module", [__name__, "flashtile.gone"])
def test_a_mask_of_a_local_function_is_copied_but_not_pickled(module: str) -> None:
    near = masks.mask_mod(lambda batch, head, q_idx, kv_idx: (q_idx - kv_idx).abs() < 2)
    near.function.__module__ = module
    q = torch.randn(1, 4, 1, 8)
    out = flashtile.attention(q, q, q, mask_mod=copy.deepcopy(near))
    assert torch.equal(out, flashtile.attention(q, q, q, mask_mod=near))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(near)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0)])
def test_gradients_without_queries_or_keys_are_0(target: Target, seqlen_q: int, seqlen_k: int) -> None:
    table = torch.ones(2, 9, device=target.device, requires_grad=True)
    q, k = (torch.ones(1, n, 2, 16, device=target.device, requires_grad=True) for n in (seqlen_q, seqlen_k))
    out = flashtile.attention(q, k, k, score_mod=masks.relative_position(table), backend=target.backend)
    assert not out.any()
    for tensor, gradient in zip((q, k, table), torch.autograd.grad(out.sum(), (q, k, table)), strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


def test_the_opposite_of_everything_is_nothing() -> None:
    q = torch.randn(1, 4, 1, 8)
    assert not flashtile.attention(q, q, q, mask_mod=~masks.window(-1, -1)).any()
    everything = masks.mask_mod(lambda b, h, q_idx, kv_idx: True)
    assert (~everything)(0, 0, 0, 0) is False
    torch.testing.assert_close(
        flashtile.attention(q, q, q, mask_mod=~~everything), flashtile.attention(q, q, q)
    )


def test_a_block_mask_of_no_sequences() -> None:
    block_mask = masks.create_block_mask(masks.causal(), 0, None, 20, 20, BLOCK_SIZE=16)
    q = torch.randn(0, 20, 2, 8, requires_grad=True)
    out = flashtile.attention(q, q, q, block_mask=block_mask)
    out.sum().backward()
    assert out.shape == q.grad.shape == (0, 20, 2, 8)


def test_a_table_of_no_sequences() -> None:
    table = torch.zeros(0, 9, requires_grad=True)
    q = torch.randn(0, 5, 2, 8, requires_grad=True)
    score_mod, mask_mod = (
        (lambda s, b, h, i, j: s + table[b, j]),
        masks.padding(torch.zeros(0, dtype=torch.int64)),
    )
    out = flashtile.attention(q, q, q, score_mod=score_mod, mask_mod=mask_mod)
    of_q, of_table = torch.autograd.grad(out.sum(), (q, table))
    assert (of_q.shape, of_table.shape) == (q.shape, table.shape)


def test_flex_attention_and_its_block_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = torch.tensor([0] * 20 + [1] * 80)
    slopes = torch.tensor([0.5, 0.1])
    mask_mod, score_mod = masks.document(ids) & masks.causal(), masks.alibi(slopes)
    query, key, value = torch.randn(3, 2, 2, 100, 16).unbind()
    theirs = create_block_mask(mask_mod, None, None, 100, 100, device="cpu", BLOCK_SIZE=32)
    ours = masks.create_block_mask(mask_mod, None, None, 100, 100, BLOCK_SIZE=32)
    expected = flex_attention(query, key, value, score_mod, theirs, return_lse=True)
    for block_mask in (theirs, ours):
        out, lse = flashtile.flex_attention(query, key, value, score_mod, block_mask, return_lse=True)
        torch.testing.assert_close(out, expected[0])
        torch.testing.assert_close(lse, expected[1])


@walk("mask_mod", [masks.window(-1, -1), ~masks.window(-1, -1), masks.window(-1, -1) & masks.causal()])
def test_flex_attention_takes_a_window_without_limits(mask_mod: masks.MaskMod) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = torch.randn(3, 1, 40, 2, 8).unbind()
    theirs = create_block_mask(mask_mod, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    out = flashtile.attention(q, k, v, block_mask=theirs)
    torch.testing.assert_close(out, flashtile.attention(q, k, v, mask_mod=mask_mod))


def test_keys_that_all_sequences_share() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = (torch.randn(batch, 2, 40, 8, requires_grad=True) for batch in (3, 1, 1))
    block_mask = create_block_mask(masks.causal(), 3, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    out = flashtile.flex_attention(query, key, value, block_mask=block_mask)
    expected = flex_attention(query.detach(), key.detach(), value.detach(), block_mask=block_mask)
    torch.testing.assert_close(out, expected)
    whole = [t.detach().expand(3, -1, -1, -1).requires_grad_() for t in (query, key, value)]
    flashtile.flex_attention(*whole, block_mask=block_mask).sum().backward()
    out.sum().backward()
    torch.testing.assert_close(value.grad, whole[2].grad.sum(0, keepdim=True))


def test_flex_attention_without_the_options_of_its_kernels() -> None:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, _create_empty_block_mask

    query, key, value = torch.randn(3, 1, 2, 20, 8).unbind()
    out, lse = flashtile.flex_attention(query, key, value, return_lse=True)
    options = {"BLOCK_M": 64, "fwd_num_stages": 1, "bwd_BLOCK_N1": 32, "BACKEND": "TRITON"}
    again, aux = flashtile.flex_attention(
        query,
        key,
        value,
        block_mask=_create_empty_block_mask(query, key),
        kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )
    assert isinstance(aux, AuxOutput)
    assert torch.equal(again, out)
    assert torch.equal(aux.lse, lse)
    assert aux.max_scores is None
    assert flashtile.flex_attention(query, key, value, return_aux=AuxRequest())[1].lse is None


def test_a_mask_that_flex_attention_does_not_write_down_hides_nothing() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, noop_mask

    block_mask = create_block_mask(noop_mask, None, None, 100, 100, device="cpu", BLOCK_SIZE=32)
    q, k, v = torch.randn(3, 1, 100, 2, 16).unbind()
    out = flashtile.attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(out, flashtile.attention(q, k, v))


def test_a_block_mask_of_flex_attention_without_full_blocks() -> None:
    from torch.nn.attention.flex_attention import BlockMask

    counts = torch.tensor([1, 2, 3, 4], dtype=torch.int32).view(1, 1, 4)
    indices = torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4).contiguous()
    mask_mod = masks.causal()
    block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, mask_mod=mask_mod)
    assert block_mask.full_kv_indices is None
    q, k, v = torch.randn(3, 1, 64, 2, 8).unbind()
    out = flashtile.attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(out, flashtile.attention(q, k, v, causal=True))


def _in_inference_mode(call, q):
    with torch.inference_mode():
        call(q)


def _on_fake_tensors(call, q):
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(q)


FIRST_CALLS = {
    "inference": _in_inference_mode,
    "fake": _on_fake_tensors,
    "explained": lambda call, q: flashtile.explain(call, q),
    "jvp": lambda call, q: torch.func.jvp(call, (q,), (q,)),
    "compiled": lambda call, q: torch.compile(call, backend="aot_eager", fullgraph=True)(q),
}


@walk("mode", FIRST_CALLS)
def test_a_block_mask_serves_after_a_first_call_in_another_mode(mode) -> None:
    """The empty lists of full blocks, made at the first call, do not belong to its mode."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    block_mask = BlockMask.from_kv_blocks(
        counts.int(), indices.int(), BLOCK_SIZE=16, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(32, 32)
    )
    q, k, v = torch.randn(3, 1, 32, 2, 8, dtype=torch.float64).unbind()

    def call(q):
        return flashtile.attention(q, k, v, block_mask=block_mask)

    FIRST_CALLS[mode](call, q)
    q = q.requires_grad_()
    (got,), (expected,) = (
        torch.autograd.grad(out.square().sum(), q)
        for out in (call(q), flashtile.attention(q, k, v, causal=True))
    )
    torch.testing.assert_close(got, expected)


def test_lists_of_the_backward_pass_follow_from_those_of_the_forward_pass() -> None:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    mask_mod = masks.window(20, 0)
    theirs = create_block_mask(mask_mod, None, None, 64, 48, device="cpu", BLOCK_SIZE=16)
    lists = theirs.kv_num_blocks, theirs.kv_indices, theirs.full_kv_num_blocks, theirs.full_kv_indices
    forward_only = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=16, mask_mod=mask_mod, seq_lengths=(64, 48), compute_q_blocks=False
    )
    q, k, v = torch.randn(1, 64, 2, 8), *torch.randn(2, 1, 48, 2, 8).unbind()
    grads = []
    for block_mask in (theirs, forward_only):
        inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        grads.append(torch.autograd.grad(flashtile.attention(*inputs, block_mask=block_mask).sum(), inputs))
    assert all(map(torch.equal, *grads))


def test_a_soft_cap_is_recognised() -> None:
    """The kernels' own then serves it; nothing that only looks like one."""
    capped = [masks.softcap(20.0), lambda score, b, h, q, kv: torch.tanh(score / 20) * 20]
    others = [
        lambda score, b, h, q, kv: 20 * torch.tanh(score / 10),
        lambda score, b, h, q, kv: 20 * torch.tanh(20 / score),
        lambda score, b, h, q, kv: 20 * torch.tanh(score / 20) - 1,
        lambda score, b, h, q, kv: q * torch.tanh(score / 20),
        lambda score, b, h, q, kv: torch.tanh(score / 20) * torch.tanh(score / 20),
        lambda score, b, h, q, kv: -20 * torch.tanh(score / -20),
    ]
    found = [traced("score_mod", function).soft_cap for function in (*capped, *others)]
    assert found == [20.0] * len(capped) + [0.0] * len(others)


def test_a_recognised_soft_cap_beside_another_and_slopes() -> None:
    q, k, v = (testing.random_tensor((1, 40, 2, 16), torch.float32, "cpu", seed=seed) for seed in range(3))
    for beside in (
        {},
        {"softcap": 2.0},
        {"alibi_slopes": torch.tensor([0.5, 0.25])},
        {"mask_mod": masks.causal()},
    ):
        testing.check(q, k, v, score_mod=masks.softcap(1.5), **beside)
    q, k, v, slopes = (t.double() for t in (q, k, v, torch.tensor([0.5, 0.25])))
    bias = -slopes[:, None, None] * (torch.arange(40)[:, None] - torch.arange(40)).abs()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4 + bias  # slopes are added before the cap
    scores = 1.5 * torch.tanh(scores / 1.5)
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    out = flashtile.attention(q, k, v, score_mod=masks.softcap(1.5), alibi_slopes=slopes.float())
    torch.testing.assert_close(out, expected)
