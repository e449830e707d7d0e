"""What does not compile says so with the user's own line; what cannot be called says which argument."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flashtile
from flashtile import masks
from flashtile.api import masks as functional
from flashtile.masks import BlockMask
from flashtile.operators import functions as operators
from flashtile.problems.attention import NO_EXTRAS, Options
from walk import walk

pytestmark = pytest.mark.quick

SLOPES = torch.ones(2)
SPARSE = SLOPES.to_sparse()


def _branch(score, batch, head, q_idx, kv_idx):
    if q_idx > kv_idx:  # this line
        return score
    return score * 2


def _python_number(score, batch, head, q_idx, kv_idx):
    x = 2
    return score + math.exp(kv_idx) * x  # this line


def _unknown_function(score, batch, head, q_idx, kv_idx):
    return torch.cumsum(score, 0)  # this line


def _unknown_method(score, batch, head, q_idx, kv_idx):
    return score.cumsum(0)  # this line


def _too_few_indices(score, batch, head, q_idx, kv_idx):
    return score + torch.ones(2, 3)[head]  # this line


def _whole_tensor(score, batch, head, q_idx, kv_idx):
    return score * SLOPES  # this line


def _float_index(score, batch, head, q_idx, kv_idx):
    return score * SLOPES[score]  # this line


def _returns_nothing(score, batch, head, q_idx, kv_idx):  # this line
    score = score * 2


def _returns_a_mask(score, batch, head, q_idx, kv_idx):  # this line
    return q_idx >= kv_idx


def _negative_bool(score, batch, head, q_idx, kv_idx):
    return score + -(q_idx > kv_idx)  # this line


def _absolute_bool(score, batch, head, q_idx, kv_idx):
    return score + abs(q_idx > kv_idx)  # this line


class _Floor(torch.autograd.Function):
    """Rounds down, with a derivative of 1."""

    @staticmethod
    def forward(context, x):
        return torch.floor(x)

    @staticmethod
    def backward(context, gradient):
        return gradient


def _own_derivative(score, batch, head, q_idx, kv_idx):
    return _Floor.apply(score)


def _no_gradient(score, batch, head, q_idx, kv_idx):
    with torch.no_grad():
        return score * 2  # this line


def _sparse_tensor(score, batch, head, q_idx, kv_idx):
    return score + SPARSE[head]  # this line


def _named_q_and_k(s, b, h, q, k):
    return s if q > k else -s


WRONG = {
    _branch: "torch.where",
    _python_number: "use torch's functions",
    _unknown_function: "cumsum",
    _unknown_method: "has no 'cumsum'",
    _too_few_indices: "2 dimensions must be read with 2 indices, got 1",
    _whole_tensor: "a tensor of shape (2,) is not a number",
    _float_index: "an index must be an int, got a float",
    _negative_bool: "- takes ints and floats, not a bool",
    _absolute_bool: "abs takes ints and floats, not a bool",
    _no_gradient: "torch.no_grad() and torch.autograd.Function do not compile",
    _sparse_tensor: "a captured tensor must be a dense (strided) tensor",
    _returns_nothing: "must return a float (the modified score), got None",
    _returns_a_mask: "must return a float (the modified score), got a bool",
}


def line_of(function) -> str:
    """``file:number: text`` of the line that says so."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if "# this line" in line)
    return f"test_mod_errors.py:{first + at}: {lines[at].strip()}"


def test_a_derivative_of_its_own_does_not_compile() -> None:
    q = torch.randn(1, 4, 2, 8)
    with torch.no_grad(), pytest.raises(TypeError, match="Function do not compile"):
        flashtile.attention(q, q, q, score_mod=_own_derivative)
    flashtile.attention(q, q, q, mask_mod=lambda b, h, q, kv: _no_gradient(kv, b, h, q, kv) > 0)


@walk("function", WRONG)
def test_what_does_not_compile_shows_its_line(function) -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError) as error:
        flashtile.attention(q, q, q, score_mod=function)
    text = str(error.value)
    assert text.startswith("score_mod ")
    assert WRONG[function] in text
    assert text.endswith(f"\n  {line_of(function)}")


def test_a_read_outside_of_a_tensor_shows_its_line() -> None:
    def late(score, batch, head, q_idx, kv_idx):
        return score + SLOPES[kv_idx]  # this line

    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=re.escape(line_of(late))) as error:
        flashtile.attention(q, q, q, score_mod=late)
    assert "score_mod reads element 2 of 2, outside of a captured tensor of shape (2,)" in str(error.value)

    def early(batch, head, q_idx, kv_idx):
        return SLOPES[kv_idx - 5] > 0  # this line

    for call in (
        lambda: flashtile.attention(q, q, q, mask_mod=early),
        lambda: masks.create_block_mask(early, None, None, 4, 4),
    ):
        with pytest.raises(ValueError, match="mask_mod reads element -5 of 2") as error:
            call()
        assert line_of(early) in str(error.value)


def test_a_division_of_ints_by_zero_is_named() -> None:
    q = torch.randn(1, 4, 2, 8)
    for function in (lambda s, b, h, i, j: s + i // j, lambda s, b, h, i, j: s + i % j):
        with pytest.raises(ValueError, match="score_mod divides an int by 0"):
            flashtile.attention(q, q, q, score_mod=function)


def call(**arguments):
    q = torch.randn(1, 32, 2, 8)
    return lambda: flashtile.attention(q, q, q, **arguments)


CAUSAL = masks.causal()
DTYPES = torch.float32, torch.float16, torch.float32
AUX = SimpleNamespace(lse=True, max_scores=True)
BLOCKS = masks.create_block_mask(CAUSAL, None, None, 32, 32)
NINE = [torch.ones(2) for _ in range(9)]
BAD_CALLS = {
    "learnable-slopes": (
        call(alibi_slopes=torch.ones(3, requires_grad=True)),
        ValueError,
        r"alibi_slopes must have shape \(heads,\) or \(batch, heads\) .* got \(3,\)",
    ),
    "keys-with-learnable-slopes": (
        lambda: flashtile.attention(
            torch.randn(1, 4, 2, 8), 3, None, alibi_slopes=torch.ones(2, requires_grad=True)
        ),
        TypeError,
        r"k must be a torch\.Tensor, got int",
    ),
    "no-function": (call(score_mod=3), TypeError, "score_mod must be a function, got int"),
    "other-kind": (call(score_mod=CAUSAL), TypeError, "score_mod must be a score_mod or a function"),
    "both-masks": (
        call(mask_mod=CAUSAL, block_mask=BLOCKS),
        ValueError,
        "mask_mod must be None with block_mask",
    ),
    "no-block-mask": (call(block_mask=CAUSAL), TypeError, "block_mask must be made by .*, got MaskMod"),
    "lengths": (
        call(block_mask=masks.create_block_mask(CAUSAL, None, None, 32, 300)),
        ValueError,
        "block_mask was made for 32 queries and 300 keys, but q has 32 and k 32",
    ),
    "heads": (
        call(block_mask=masks.create_block_mask(CAUSAL, 1, 3, 32, 32)),
        ValueError,
        "block_mask must be of batch 1 or 1 and of 1 or 2 heads, got 1 and 3",
    ),
    "too-many-tensors": (
        call(score_mod=lambda s, b, h, q, kv: s + sum(t[h] for t in NINE)),
        ValueError,
        "score_mod must read at most 8 tensors",
    ),
    "beside": (
        call(score_mod=lambda s, b, h, q, kv: s, seqused_k=torch.tensor([3], dtype=torch.int32)),
        NotImplementedError,
        "seqused_k must be None with score_mod, mask_mod or block_mask",
    ),
    "beside-bias": (
        call(mask_mod=CAUSAL, bias=torch.zeros(1, 1, 32, 32)),
        NotImplementedError,
        "bias must be None with .*: write it in score_mod",
    ),
    "out": (
        call(mask_mod=CAUSAL, out=torch.empty(1, 32, 2, 8)),
        NotImplementedError,
        "out must be None with",
    ),
    "block-size": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, BLOCK_SIZE=24),
        ValueError,
        "BLOCK_SIZE must be one or two multiples of 16 .*, got 24",
    ),
    "block-size-of-floats": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, BLOCK_SIZE=(32.0, 32.0)),
        ValueError,
        r"BLOCK_SIZE must be one or two multiples of 16 .*, got \(32\.0, 32\.0\)",
    ),
    "one-bad-block-size": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, BLOCK_SIZE=(32, 24)),
        ValueError,
        r"BLOCK_SIZE must be one or two multiples of 16 .*, got \(32, 24\)",
    ),
    "no-block-size": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, BLOCK_SIZE=None),
        ValueError,
        "BLOCK_SIZE must be one or two multiples of 16 .*, got None",
    ),
    "no-length": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, None),
        TypeError,
        "KV_LEN must be an int, got NoneType None",
    ),
    "batch": (
        lambda: masks.create_block_mask(CAUSAL, True, None, 32, 32),
        TypeError,
        "B must be an int, got bool True",
    ),
    "length": (
        lambda: masks.create_block_mask(CAUSAL, None, None, -1, 32),
        ValueError,
        "Q_LEN must be from 0 to 2147483647, got -1",
    ),
    "empty-tensor": (
        call(score_mod=lambda s, b, h, q, kv: s + torch.empty(0)[h]),
        ValueError,
        "score_mod or mask_mod reads a tensor without elements",
    ),
    "gqa": (
        lambda: flashtile.flex_attention(*(torch.ones(1, h, 4, 8) for h in (2, 1, 1))),
        ValueError,
        "enable_gqa must be True",
    ),
    "flex-dtype": (
        lambda: flashtile.flex_attention(*(torch.ones(1, 2, 4, 8, dtype=d) for d in DTYPES)),
        TypeError,
        "key has dtype torch.float16, but query has torch.float32",
    ),
    "flex-scale": (
        lambda: flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), scale="1"),
        TypeError,
        "^scale must be a number",
    ),
    "flex-return-lse": (
        lambda: flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), return_lse=1),
        TypeError,
        "return_lse must be True or False",
    ),
    "flex-mod": (
        lambda: flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), score_mod=_named_q_and_k),
        TypeError,
        r"(?s)score_mod does not compile: a branch.*: return s if q > k else -s",
    ),
    "mask-of-keys": (
        call(mask_mod=CAUSAL, mask=torch.ones(1, 1, 1, 32, dtype=torch.bool)),
        NotImplementedError,
        "^mask must be None with score_mod, mask_mod or block_mask",
    ),
    "dropout": (
        call(mask_mod=CAUSAL, dropout_p=0.1),
        NotImplementedError,
        "^dropout_p must be left out with score_mod, mask_mod or block_mask, got 0.1",
    ),
    "chunk": (
        call(score_mod=masks.softcap(2.0), attention_chunk=8),
        NotImplementedError,
        "^attention_chunk must be left out with score_mod, mask_mod or block_mask, got 8",
    ),
    "options": (
        lambda: flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), kernel_options={"BLOCK_K": 64}),
        NotImplementedError,
        "kernel_options must be options of FlexAttention, got 'BLOCK_K'",
    ),
    "max-scores": (
        lambda: flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), return_aux=AUX),
        NotImplementedError,
        "return_aux must not request max_scores",
    ),
    "aux": (
        lambda: flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), return_aux=True),
        TypeError,
        "return_aux must be an AuxRequest of FlexAttention or None, got bool True",
    ),
    "aux-and-lse": (
        lambda: flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), return_lse=True, return_aux=AUX),
        ValueError,
        "return_lse must be False with return_aux",
    ),
    "kind": (lambda: masks.from_triton(np.ones(2), None), ValueError, "kind must be one of 'score_mod', 'm"),
    "kernel": (lambda: masks.natten(4, 4, 2), ValueError, "kernel_size must be odd and from 1 to 4, got 2"),
    "cap": (lambda: masks.softcap(0.0), ValueError, "cap must be above 0"),
    "bias": (
        lambda: masks.relative_position(torch.ones(2, 4)),
        ValueError,
        r"bias must have shape \(heads, 2 \* most \+ 1\), got \(2, 4\)",
    ),
}


@walk("name", BAD_CALLS)
def test_bad_call(name) -> None:
    run, kind, text = BAD_CALLS[name]
    with pytest.raises(kind, match=text):
        run()


WRONG_VALUES = (
    None, "a", 1.5, math.nan, math.inf, True, 2**63, 10**400, [1], {}, torch.tensor(1.5), torch.ones(2, 3, 3),
    torch.ones(4, dtype=torch.complex64), torch.ones(4).to_sparse(), torch.ones(4, 4).to_mkldnn(),
    torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8),
    torch.nested.nested_tensor([torch.ones(4)]),
)  # fmt: skip
READY = {
    "causal": {"offset": 0},
    "window": {"left": 1, "right": 1, "offset": 0},
    "prefix_lm": {"length": 2, "offset": 0},
    "document": {"ids": torch.zeros(8, dtype=torch.int64), "ids_kv": torch.zeros(8, dtype=torch.int64)},
    "padding": {"lengths": torch.tensor([3])},
    "dilated": {"size": 1, "dilation": 2, "offset": 0},
    "natten": {"height": 4, "width": 4, "kernel_size": 3},
    "alibi": {"slopes": torch.ones(2), "offset": 0},
    "relative_position": {"bias": torch.ones(2, 5), "offset": 0},
    "softcap": {"cap": 2.0},
    "create_block_mask": {"mask_mod": CAUSAL, "B": 1, "H": 1, "Q_LEN": 32, "KV_LEN": 32, "device": "cpu",
                          "BLOCK_SIZE": 16},
}  # fmt: skip
ALSO_RIGHT = {
    ("document", "ids_kv"): (None,), ("create_block_mask", "B"): (None,), ("create_block_mask", "H"): (None,),
    ("create_block_mask", "device"): (None,), ("softcap", "cap"): (1.5, 2**63),
}  # fmt: skip
"""Of the wrong values."""


@walk(("name", "argument"), [(name, argument) for name in READY for argument in READY[name]])
def test_every_argument_of_ready_masks_is_checked_by_name(name: str, argument: str) -> None:
    make = getattr(masks, name)
    make(**READY[name])
    for value in WRONG_VALUES:
        right = ALSO_RIGHT.get((name, argument), ())
        if any(value is one or (type(value) is type(one) and value == one) for one in right):
            continue
        with pytest.raises((TypeError, ValueError), match=rf"\b{argument}\b"):
            make(**READY[name] | {argument: value})


def test_numbers_out_of_range_are_refused() -> None:
    for make, words in (
        (lambda: masks.padding(torch.tensor([1.5])), "lengths must have a dtype of ints, got torch.float32"),
        (lambda: masks.alibi(torch.tensor([1])), "slopes must have a dtype of floats, got torch.int64"),
        (lambda: masks.dilated(2, 0), "dilation must be from 1"),
        (lambda: masks.dilated(-1, 1), "size must be from 0"),
        (lambda: masks.natten(0, 4, 1), "height must be from 1"),
        (lambda: masks.natten(4, 4, (1, 3, 5)), "kernel_size must be an int or a pair"),
        (
            lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, "abc"),
            "device must be a device",
        ),
        (
            lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, "meta"),
            "device must be None or a device with data",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            make()


@pytest.mark.parametrize("row", [0, 299])
def test_reads_of_every_row_are_checked_for_a_card(row: int) -> None:
    """As for a call on one with ``FLASHTILE_DEBUG=1``; the CPU's launch has a check of its own."""
    table = torch.zeros(1)
    score_mod = masks.score_mod(lambda score, b, h, q_idx, kv_idx: score + table[(q_idx == row).int()])
    given = functional.functions(score_mod, None, None)
    extras, options = operators.with_functions(NO_EXTRAS, Options(), given)
    q, k = torch.empty(1, 300, 1, 8), torch.empty(1, 2, 1, 8)
    on_card = SimpleNamespace(is_cuda=True, shape=q.shape, device=q.device, new_zeros=q.new_zeros)
    with pytest.raises(ValueError, match="score_mod reads element 1 of 1, outside of a captured tensor"):
        operators.check_values(on_card, k, k, extras, options)  # type: ignore[arg-type]
    exact = torch.zeros(300, 2)  # an element of each score
    given = functional.functions(lambda s, b, h, q_idx, kv_idx: s + exact[q_idx, kv_idx], None, None)
    extras, options = operators.with_functions(NO_EXTRAS, Options(), given)
    operators.check_values(on_card, k, k, extras, options)  # type: ignore[arg-type]


def test_a_picture_of_fewer_pixels_than_tokens_is_refused() -> None:
    q = torch.randn(1, 35, 2, 8)
    lse = torch.zeros(1, 2, 35)
    smaller = masks.natten(5, 5, 3)
    for mask in (smaller, CAUSAL & smaller, masks.natten(5, 7, 3) & smaller):
        for use in (
            lambda mask: flashtile.attention(q, q, q, mask_mod=mask),
            lambda mask: flashtile.attention_weights(q, q, lse, mask_mod=mask),
            lambda mask: masks.create_block_mask(mask, None, None, 35, 35),
        ):
            with pytest.raises(ValueError, match="must have at most 25 tokens, got 35 queries and 35 keys"):
                use(mask)
    with pytest.raises(ValueError, match="at most 25 tokens, got 3 queries and 35 keys"):
        flashtile.attention(q[:, :3], q, q, mask_mod=masks.natten(5, 5, 3))
    flashtile.attention(q, q, q, mask_mod=masks.natten(5, 5, 3) | CAUSAL)
    flashtile.attention(q, q, q, mask_mod=masks.natten(5, 7, 3))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.complex64, torch.float8_e8m0fnu])
def test_dtypes_that_kernels_do_not_compute_with_are_not_captured(dtype: torch.dtype) -> None:
    table = torch.ones(2).to(dtype)
    with pytest.raises(TypeError, match="a captured tensor must be of floats, bool, uint8 or signed ints"):
        masks.mask_mod(lambda b, h, q_idx, kv_idx: table[h] == 1)


def test_kinds_of_tensors_that_are_not_captured() -> None:
    for tensor in WRONG_VALUES:
        if isinstance(tensor, torch.Tensor) and (tensor.layout != torch.strided or tensor.is_quantized):
            words = "must be of floats, bool" if tensor.is_quantized else "must be a dense"
            for kind in (masks.mask_mod, masks.score_mod):
                with pytest.raises(TypeError, match=f"a captured tensor {words}"):
                    kind(lambda *arguments, tensor=tensor: tensor[(arguments[-1],) * tensor.dim()])
                if not tensor.is_quantized:
                    with pytest.raises(TypeError, match=f"a captured tensor {words}"):
                        kind(lambda *arguments, tensor=tensor: arguments[-1] + tensor)


@pytest.mark.parametrize("options", [torch.ones(2), False, [], "a"])
def test_kernel_options_are_a_dict(options) -> None:
    with pytest.raises(TypeError, match="kernel_options must be a dict or None"):
        flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), kernel_options=options)


def listing(name: str, *places_and_values: tuple[tuple[int, ...], int]) -> BlockMask:
    """A causal mask of 4 blocks, some of whose lists' entries are others."""
    block_mask = masks.create_block_mask(CAUSAL, None, None, 64, 64, BLOCK_SIZE=16)
    changed = getattr(block_mask, name).clone()
    for place, value in places_and_values:
        changed[place] = value
    return replace(block_mask, **{name: changed})


LISTS = {
    "negative count": (
        listing("kv_num_blocks", ((0, 0, 1), -2)),
        "kv_num_blocks must be from 0 to 4 .* got -2",
    ),
    "large count": (
        listing("full_q_num_blocks", ((0, 0, 1), 5)),
        "full_q_num_blocks must be from 0 to 4 .* 5",
    ),
    "block": (listing("kv_indices", ((0, 0, 2, 0), 4)), "kv_indices must be from 0 to 3 .* got 4"),
    "negative block": (
        listing("full_q_indices", ((0, 0, 0, 0), -1)),
        "full_q_indices must be from 0 to 3 .* -1",
    ),
    "twice": (listing("full_kv_indices", ((0, 0, 3, 1), 0)), "name each block once, got block 0 twice"),
    "partial and full": (listing("full_kv_indices", ((0, 0, 3, 1), 3)), "block 3 twice"),
    "other blocks": (listing("q_indices", ((0, 0, 3, 0), 0)), "must name the blocks that kv_indices"),
}


@walk("name", LISTS)
def test_lists_that_contradict_each_other_are_refused(name: str) -> None:
    block_mask, words = LISTS[name]
    q = torch.randn(1, 64, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match=f"block_mask.*{words}"):
        flashtile.attention(q, q, q, block_mask=block_mask)
    with pytest.raises(ValueError, match=f"block_mask.*{words}"):
        flashtile.attention_weights(q, q, torch.zeros(1, 2, 64), block_mask=block_mask)


def test_entries_behind_the_count_may_be_anything() -> None:
    block_mask = listing("kv_indices", ((0, 0, 0, 3), 99), ((0, 0, 1, 1), -7))
    q = torch.randn(1, 64, 2, 8)
    out = flashtile.attention(q, q, q, block_mask=block_mask)
    torch.testing.assert_close(out, flashtile.attention(q, q, q, causal=True))


def test_block_masks_of_other_lengths_in_as_many_blocks_are_refused() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    q = torch.randn(1, 60, 2, 8)
    for make in (masks.create_block_mask, partial(create_block_mask, device="cpu")):
        block_mask = make(CAUSAL, None, None, 52, 52, BLOCK_SIZE=16)
        for call in (
            flashtile.attention,
            lambda q, k, v, **mask: flashtile.attention_weights(q, k, v, **mask),
        ):
            with pytest.raises(
                ValueError, match="block_mask was made for 52 queries and 52 keys, but q has 60"
            ):
                call(q, q, q if call is flashtile.attention else torch.zeros(1, 2, 60), block_mask=block_mask)


def test_fields_of_block_masks_are_checked() -> None:
    block_mask = masks.create_block_mask(CAUSAL, None, None, 64, 64, BLOCK_SIZE=16)
    q = torch.randn(1, 64, 2, 8)
    for fields, words in (
        ({"BLOCK_SIZE": (0, 16)}, "BLOCK_SIZE must be two ints of at least 1"),
        ({"seq_lengths": (64,)}, "seq_lengths must be two ints of at least 0"),
        ({"q_indices": 3}, "q_indices must be a torch.Tensor"),
        ({"kv_num_blocks": block_mask.kv_num_blocks[0]}, "kv_num_blocks must have 3 dimensions"),
        ({"kv_indices": block_mask.kv_indices.mT.contiguous().mT}, "kv_indices must be contiguous"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            flashtile.attention(q, q, q, block_mask=replace(block_mask, **fields))


def test_there_is_no_transform_without_tangents() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)

    def attend(q):
        return flashtile.attention(q, q, q, mask_mod=CAUSAL).sum()

    with pytest.raises(NotImplementedError, match="score_mod, mask_mod and block_mask must be None under"):
        torch.func.grad(attend)(q.detach())
