"""What does not compile says so with the user's own line; what cannot be called says which argument."""

from __future__ import annotations

import math
import re

import pytest
import torch

import flashtile
from flashtile import masks

SLOPES = torch.ones(2)


def _branch(score, batch, head, q_idx, kv_idx):
    if q_idx > kv_idx:  # this line
        return score
    return score * 2


def _python_number(score, batch, head, q_idx, kv_idx):
    x = 2
    return score + math.exp(kv_idx) * x  # this line


def _unknown_function(score, batch, head, q_idx, kv_idx):
    return torch.cumsum(score, 0)  # this line


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


def _named_q_and_k(s, b, h, q, k):
    return s if q > k else -s


WRONG = {
    _branch: "torch.where",
    _python_number: "use torch's functions",
    _unknown_function: "cumsum",
    _too_few_indices: "2 dimensions must be read with as many indices, got 1",
    _whole_tensor: "a tensor of shape (2,) is not a number",
    _float_index: "an index must be an int, got a float",
    _returns_nothing: "must return a float (the modified score), got None",
    _returns_a_mask: "must return a float (the modified score), got a bool",
}


def line_of(function) -> str:
    """``file:number: text`` of the line that says so."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if "# this line" in line)
    return f"test_mod_errors.py:{first + at}: {lines[at].strip()}"


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
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


def call(**arguments):
    q = torch.randn(1, 32, 2, 8)
    return lambda: flashtile.attention(q, q, q, **arguments)


CAUSAL = masks.causal()
DTYPES = torch.float32, torch.float16, torch.float32
BLOCKS = masks.create_block_mask(CAUSAL, None, None, 32, 32)
NINE = [torch.ones(2) for _ in range(9)]
BAD_CALLS = {
    "no-function": (call(score_mod=3), TypeError, "score_mod must be a function, got int"),
    "other-kind": (call(score_mod=CAUSAL), TypeError, "score_mod must not be a mask_mod"),
    "both-masks": (
        call(mask_mod=CAUSAL, block_mask=BLOCKS),
        ValueError,
        "mask_mod must be None beside block_mask",
    ),
    "no-block-mask": (call(block_mask=CAUSAL), TypeError, "block_mask must be made by .*, got MaskMod"),
    "lengths": (
        call(block_mask=masks.create_block_mask(CAUSAL, None, None, 32, 300)),
        ValueError,
        r"block_mask\.kv_indices must have shape .* for 32 queries and 32 keys, got \(1, 1, 1, 3\)",
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
        "seqused_k must be None beside score_mod, mask_mod and block_mask",
    ),
    "beside-bias": (
        call(mask_mod=CAUSAL, bias=torch.zeros(1, 1, 32, 32)),
        NotImplementedError,
        "bias must be None beside .*: write it in score_mod",
    ),
    "out": (
        call(mask_mod=CAUSAL, out=torch.empty(1, 32, 2, 8)),
        NotImplementedError,
        "out must be None beside",
    ),
    "block-size": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, BLOCK_SIZE=24),
        ValueError,
        "BLOCK_SIZE must be multiples of 16, got 24",
    ),
    "block-size-of-floats": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, BLOCK_SIZE=(32.0, 32.0)),
        ValueError,
        r"BLOCK_SIZE must be multiples of 16, got \(32\.0, 32\.0\)",
    ),
    "no-block-size": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, 32, BLOCK_SIZE=None),
        ValueError,
        "BLOCK_SIZE must be multiples of 16, got None",
    ),
    "no-length": (
        lambda: masks.create_block_mask(CAUSAL, None, None, 32, None),
        ValueError,
        "KV_LEN must be an int of at least 0, got None",
    ),
    "batch": (
        lambda: masks.create_block_mask(CAUSAL, True, None, 32, 32),
        ValueError,
        "B must be an int of at least 0, got True",
    ),
    "length": (
        lambda: masks.create_block_mask(CAUSAL, None, None, -1, 32),
        ValueError,
        "Q_LEN must be an int of at least 0, got -1",
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
        "^mask must be None beside score_mod, mask_mod and block_mask",
    ),
    "options": (
        lambda: flashtile.flex_attention(*torch.ones(3, 1, 2, 4, 8), kernel_options={"BLOCK_M": 64}),
        NotImplementedError,
        "kernel_options must be None",
    ),
    "kernel": (lambda: masks.natten(4, 4, 2), ValueError, "kernel_size must be odd and from 1 to 4, got 2"),
    "cap": (lambda: masks.softcap(0.0), ValueError, "cap must be more than 0"),
    "bias": (
        lambda: masks.relative_position(torch.ones(2, 4)),
        ValueError,
        r"bias must have shape \(heads, 2 \* most \+ 1\), got \(2, 4\)",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call(name) -> None:
    run, kind, text = BAD_CALLS[name]
    with pytest.raises(kind, match=text):
        run()


def test_there_is_no_transform_without_tangents() -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)

    def attend(q):
        return flashtile.attention(q, q, q, mask_mod=CAUSAL).sum()

    with pytest.raises(NotImplementedError, match="score_mod, mask_mod and block_mask must be None under"):
        torch.func.grad(attend)(q.detach())
