"""The largest score of each head and the entropy of each row, with the gradient of the entropy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from cases import CASES, Case
from flashtile import masks, testing
from flashtile.masks import alibi
from flashtile.rounding import SCORE_UNITS
from small_calls import needs_compiler
from targets import Target

FP64 = torch.float64
BOTH: dict[str, Any] = {"return_max_logits": True, "return_entropy": True}
TELLING = (
    "tiny-everything", "tiny-everything-window", "tiny-more-queries-sink-causal", "tiny-softcap-window",
    "tiny-scale-negative-causal", "tiny-varlen-everything", "tiny-varlen-tail-causal", "tiny-chunk-causal",
    "tiny-varlen-no-keys-full", "tiny-cells-no-keys-bias", "tiny-bias-own-causal", "tiny-dropout-bias",
    "tiny-padding-mask", "tiny-no-keys-everything", "tiny-no-queries-full", "tiny-batch-0-full",
)  # fmt: skip


@pytest.mark.numerical
@pytest.mark.parametrize("name", TELLING)
def test_by_the_error_rule(target: Target, name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    if not target.takes(case):
        pytest.skip("the backend does not take the case")
    case.inputs(target.device).check(backend=target.backend, **BOTH)


@pytest.mark.numerical
@pytest.mark.parametrize("modified", [False, True])
def test_of_a_block_mask(target: Target, modified: bool) -> None:
    """Blocks are full, partial and empty, and the first rows see no key."""
    lengths = 40, 70
    case = Case(seqlen_q=40, seqlen_k=70, heads_q=2, heads_kv=1, head_dim=16)
    seen = masks.causal(-3) & masks.mask_mod(lambda b, h, q, kv: kv % 5 != h)
    blocks = masks.create_block_mask(seen, None, case.heads_q, *lengths, target.device, (16, 16))
    slopes = torch.tensor([0.5, 0.25], device=target.device)
    given = {"block_mask": blocks} | ({"score_mod": alibi(slopes)} if modified else {})
    inputs = case.inputs(target.device)
    testing.check(*inputs.qkv, dout=inputs.dout, dlse=inputs.dlse, backend=target.backend, **given, **BOTH)


def test_of_a_block_mask_by_their_definitions() -> None:
    q, k, v = (torch.randn(2, n, 2, 8, dtype=FP64) for n in (40, 70, 70))
    seen = masks.causal(-3) & masks.mask_mod(lambda b, h, q, kv: kv % 5 != h)
    blocks = masks.create_block_mask(seen, None, 2, 40, 70, BLOCK_SIZE=16)
    _, largest, entropy = flashtile.attention(q, k, v, block_mask=blocks, **BOTH)
    places = (torch.arange(n).view(shape) for n, shape in ((2, (2, 1, 1)), (40, (40, 1)), (70, (70,))))
    head, rows, keys = places
    hidden = ~((keys <= rows - 3) & (keys % 5 != head))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).div(math.sqrt(8)).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num()  # NaN in rows without a key
    torch.testing.assert_close(largest, scores.amax((-2, -1)))
    torch.testing.assert_close(entropy, torch.special.entr(weights).sum(-1))


def test_each_alone_is_as_both() -> None:
    q, k, v = torch.randn(3, 2, 40, 4, 16)
    out, lse, largest, entropy = flashtile.attention(q, k, v, causal=True, return_lse=True, **BOTH)
    assert torch.equal(flashtile.attention(q, k, v, causal=True, return_max_logits=True)[1], largest)
    found = flashtile.attention(q, k, v, causal=True, return_lse=True, return_entropy=True)
    assert all(torch.equal(a, b) for a, b in zip(found, (out, lse, entropy), strict=True))
    *_, weights = flashtile.attention(q, k, v, causal=True, return_attn_weights=True, **BOTH)
    torch.testing.assert_close(torch.special.entr(weights).sum(-1), entropy)
    assert not largest.requires_grad


def test_of_packed_sequences() -> None:
    """Tokens of no sequence count for none, and a sequence without queries or keys has no score."""
    q, k, v = torch.randn(3, 12, 4, 16, dtype=FP64)
    offsets = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    of_keys = torch.tensor([0, 5, 8, 8], dtype=torch.int32)
    _, largest, entropy = flashtile.flash_attn_varlen_func(q, k, v, offsets, of_keys, 7, 5, **BOTH)
    alone = flashtile.attention(q[None, :3], k[None, :5], v[None, :5], **BOTH)
    assert largest.shape == (3, 4)
    assert entropy.shape == (4, 12)
    torch.testing.assert_close(largest[0], alone[1][0])
    torch.testing.assert_close(entropy[:, :3], alone[2][0])
    assert largest[1:].eq(-math.inf).all()
    assert entropy[:, 3:].eq(0).all()


FORMS: list[tuple[str, tuple[tuple[int, ...], ...], tuple[Any, ...]]] = [
    ("flash_attn_func", ((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)), ()),
    ("flash_attn_kvpacked_func", ((2, 7, 4, 8), (2, 9, 2, 2, 8)), ()),
    ("flash_attn_qkvpacked_func", ((2, 7, 3, 4, 8),), ()),
    ("flash_attn_varlen_qkvpacked_func", ((7, 3, 4, 8),), (torch.tensor([0, 3, 7], dtype=torch.int32), 4)),
]


@pytest.mark.parametrize(("name", "shapes", "more"), FORMS, ids=lambda x: x if isinstance(x, str) else "")
def test_functions_of_flash_attention(name: str, shapes: tuple, more: tuple) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    call = getattr(flashtile, name)
    out, lse, nothing, largest, entropy = call(*tensors, *more, return_attn_probs=True, **BOTH)
    found = call(*tensors, *more, return_lse=True, **BOTH)
    assert nothing is None
    assert all(map(torch.equal, found, (out, lse, largest, entropy)))
    alone = call(*tensors, *more, **BOTH)
    assert all(map(torch.equal, alone, (out, largest, entropy)))


def leaves(sink: bool = False) -> list[Tensor]:
    shapes = [(2, 5, 4, 6), (2, 4, 2, 6), (2, 4, 2, 3), *[(4,)] * sink]
    return [torch.randn(shape, dtype=FP64, requires_grad=True) for shape in shapes]


def attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return out and the entropy. Some rows see no key."""
    sink = {"sink": tensors[3]} if len(tensors) > 3 else {}
    out, entropy = flashtile.attention(*tensors[:3], causal=True, return_entropy=True, **sink, **options)
    return out, entropy


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "softcap": {"softcap": 1.5}, "score_mod": {"score_mod": alibi(torch.tensor([0.5, 1, 2, 4]))},
    "dropout": {"dropout_p": 0.3, "rng_state": torch.tensor([3, 4])},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sink", [False, True])
def test_gradients(name: str, sink: bool) -> None:
    torch.autograd.gradcheck(lambda *tensors: attend(*tensors, **OPTIONS[name]), leaves(sink))


def test_second_derivatives() -> None:
    torch.autograd.gradgradcheck(attend, leaves(True))


def test_results_without_a_gradient_change_no_bit() -> None:
    """If nothing depends on the statistics, the backward pass is that of a call without them."""
    tensors = leaves()
    options: dict[str, Any] = {"causal": True, "softcap": 2.0}  # the same algorithm with and without them
    out, *_ = flashtile.attention(*tensors, return_lse=True, **BOTH, **options)
    plain = flashtile.attention(*tensors, **options)
    dout = torch.randn_like(out)
    found, expected = (torch.autograd.grad(result, tensors, dout) for result in (out, plain))
    assert all(map(torch.equal, found, expected))


def test_transforms_and_compilation() -> None:
    tensors = [t.detach() for t in leaves()]

    def loss(q: Tensor) -> Tensor:
        out, largest, entropy = flashtile.attention(q, *tensors[1:], **BOTH)
        return out.sum() + entropy.square().sum() + largest.sum()

    leaf = tensors[0].clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(tensors[0]), leaf.grad)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(leaf), leaf)
    torch.testing.assert_close(found, leaf.grad)
    several = torch.stack([tensors[0], 2 * tensors[0]])
    expected = torch.stack([loss(q) for q in several])
    torch.testing.assert_close(torch.func.vmap(loss)(several), expected)
    direction = torch.randn_like(tensors[0])
    _, tangent = torch.func.jvp(loss, (tensors[0],), (direction,))
    torch.testing.assert_close(tangent, (leaf.grad * direction).sum())


@pytest.mark.slow
@pytest.mark.thorough
def test_compiled_by_inductor() -> None:
    needs_compiler()
    q, k, v = (t.detach() for t in leaves())

    def call(q: Tensor) -> tuple[Tensor, ...]:
        out, largest, entropy = flashtile.attention(2 * q, k.sin(), v, causal=True, **BOTH)
        return out.relu(), largest + 1, entropy.square()

    leaf = q.clone().requires_grad_()
    expected = call(leaf)
    with torch._inductor.config.patch(compile_threads=1):  # a pool of processes would import torch each
        found = torch.compile(call, fullgraph=True)(leaf)
        (gradient,) = torch.autograd.grad(found[0].sum() + found[2].nansum(), leaf)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, *torch.autograd.grad(expected[0].sum() + expected[2].nansum(), leaf))


@pytest.mark.parametrize("packed", [False, True])
def test_heads_are_reduced_by_one_operator_of_a_graph(packed: bool) -> None:
    """It is one kernel on a GPU. Operations of torch take five for packed sequences, with atomics."""
    q, k, v = torch.randn(3, 12, 4, 16)
    offsets = torch.tensor([0, 3, 3, 10], dtype=torch.int32)

    def largest() -> Tensor:
        if not packed:
            return flashtile.attention(q[None], k[None], v[None], return_max_logits=True)[1]
        return flashtile.flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, return_max_logits=True)[1]

    targets: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in module.graph.nodes)
        return module

    assert torch.equal(torch.compile(largest, backend=backend, fullgraph=True)(), largest())
    operators = [target for target in targets if target.startswith("flashtile.")]
    assert operators == ["flashtile.forward.default", "flashtile.max_logits.default"]


def test_long_rows_lose_no_digits(target: Target) -> None:
    """Large scores are far from the entropy, of which they are no part."""
    case = Case(name="long", seqlen_q=9, seqlen_k=700, heads_q=2, heads_kv=1, head_dim=16, softmax_scale=9.0)
    inputs = case.inputs(target.device)
    exact = flashtile.attention(*(t.double().cpu() for t in inputs.qkv), softmax_scale=9.0, **BOTH)
    found = flashtile.attention(*inputs.qkv, softmax_scale=9.0, backend=target.backend, **BOTH)
    noise = SCORE_UNITS * torch.finfo(torch.float32).eps * exact[1].abs().max().item()
    assert testing.compare("entropy", found[2].cpu(), exact[2], exact[2], noise=(noise, noise)).holds


def test_what_has_no_statistics_refuses_them() -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    eighth = [t.to(torch.float8_e4m3fn) for t in (q, k, v)]
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="q must be float16 or wider with return_entropy"):
        flashtile.attention(*eighth, return_entropy=True)
    with pytest.raises(NotImplementedError, match="out must be None with return_max_logits"):
        flashtile.attention(q, k, v, out=torch.empty_like(q), return_max_logits=True)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="return_entropy must be False with block_table"):
        flashtile.flash_attn_varlen_func(
            q[0], k, v, offsets, offsets, 8, 8, block_table=table, return_entropy=True
        )
