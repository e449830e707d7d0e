"""Bad calls of the decoding functions raise an error that names the argument, what it got and what is
allowed, and write nothing to a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashtile
from flashtile.api import cascade
from flashtile.problems.decode import FP8

pytestmark = pytest.mark.quick

B, SQ, SN, H, HKV, D, ROWS, PAGES, PAGE = 2, 3, 2, 4, 2, 16, 20, 9, 4


def rand(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def int64(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def q_of(**kwargs):
    return rand(B, SQ, H, D, **kwargs)


def k_of(**kwargs):
    return rand(B, SN, HKV, D, **kwargs)


def cache_of(**kwargs):
    return rand(B, ROWS, HKV, D, **kwargs)


def pages_of(**kwargs):
    return rand(PAGES, PAGE, HKV, D, **kwargs)


DENSE = {"q": q_of(), "k_cache": cache_of(), "v_cache": cache_of(), "cache_seqlens": int32(5, 0)}
APPEND = DENSE | {"k": k_of(), "v": k_of()}
PAGED = {
    "q": q_of(),
    "k_cache": pages_of(),
    "v_cache": pages_of(),
    "cache_seqlens": int32(5, 12),
    "block_table": int32([0, 1, 99], [2, 3, 4]),
}
PAGED_APPEND = PAGED | {"k": k_of(), "v": k_of(), "cache_seqlens": int32(5, 9)}
ROTARY = APPEND | {"rotary_cos": rand(ROWS, 4), "rotary_sin": rand(ROWS, 4)}
VARLEN = DENSE | {"q": rand(5, H, D), "cu_seqlens_q": int32(0, 2, 5), "max_seqlen_q": 3}
FP8_CALL = DENSE | {
    "k_cache": cache_of(dtype=FP8),
    "v_cache": cache_of(dtype=FP8),
    "k_descale": rand(HKV),
    "v_descale": rand(HKV),
}
E4M3_CALL = FP8_CALL | {"q": q_of(dtype=FP8)}
TREE = DENSE | {"tree_mask": torch.ones(SQ, SQ, dtype=torch.bool)}

CALLS = [
    # what is no tensor, or of another shape, dtype, device or memory layout
    *((DENSE, {name: value}, TypeError, (name, "torch.Tensor", type(value).__name__))
      for name in ("q", "k_cache", "v_cache") for value in (None, [1.0], 3)),
    (DENSE, {"q": rand(B, H, D)}, ValueError, ("q must have 4 dimensions", "(2, 4, 16)")),
    (DENSE, {"q": q_of(dtype=torch.int64)}, TypeError, ("q must be float16", "torch.int64")),
    (DENSE, {"q": q_of(dtype=FP8)}, TypeError, ("k_cache has dtype torch.float32", "float8")),
    (DENSE, {"q": q_of(dtype=torch.float16)}, TypeError,
     ("k_cache has dtype torch.float32", "torch.float16")),
    (DENSE, {"q": rand(B, SQ, H, 8)}, ValueError, ("k_cache has head_dim 16", "q has 8")),
    (DENSE, {"q": rand(B, SQ, 3, D)}, ValueError, ("q has 3 heads", "multiple of the 2 heads of k_cache")),
    (DENSE, {"q": rand(B, SQ, 0, D)}, ValueError, ("q has 0 heads", "least one")),
    (DENSE, {"k_cache": rand(B, ROWS, HKV, 513), "q": rand(B, SQ, H, 513)}, NotImplementedError,
     ("head_dim 513", "from 1 to 512")),
    (DENSE, {"k_cache": rand(B, ROWS, 0, D), "v_cache": rand(B, ROWS, 0, D)}, ValueError,
     ("k_cache must have at least one head, got 0",)),
    (DENSE, {"v_cache": rand(B, ROWS, HKV, 0)}, ValueError, ("v_cache has head_dim 0", "from 1 to 512")),
    (DENSE, {"v_cache": rand(B, ROWS, 1, D)}, ValueError, ("v_cache has shape (2, 20, 1, 16)", "k_cache")),
    (DENSE, {"v_cache": cache_of(dtype=torch.float16)}, TypeError, ("v_cache has dtype torch.float16",)),
    (DENSE, {"k_cache": rand(ROWS, HKV, D)}, ValueError, ("k_cache must have 4 dimensions", "seqlen_cache")),
    (PAGED, {"k_cache": rand(ROWS, HKV, D)}, ValueError, ("k_cache must have 4 dimensions", "page_size")),
    (PAGED, {"k_cache": rand(9, 0, HKV, D), "v_cache": rand(9, 0, HKV, D)}, ValueError, ("page_size 0",)),
    (DENSE, {"k_cache": rand(3, ROWS, HKV, D), "v_cache": rand(3, ROWS, HKV, D)}, ValueError,
     ("k_cache has 3 rows", "2 sequences", "cache_batch_idx")),
    (DENSE, {"k_cache": cache_of(device="meta")}, ValueError, ("k_cache is on meta", "cpu")),
    # where sequences lie
    (DENSE, {"cache_seqlens": int64(5, 0)}, TypeError, ("cache_seqlens must be int32", "torch.int64")),
    (DENSE, {"cache_seqlens": int32(5, 0, 1)}, ValueError, ("cache_seqlens", "(batch,) = (2,)", "(3,)")),
    (DENSE, {"cache_seqlens": 1.5}, TypeError, ("cache_seqlens must be an int", "float 1.5")),
    (DENSE, {"cache_seqlens": -1}, ValueError, ("cache_seqlens must be from 0", "-1")),
    (DENSE, {"cache_seqlens": int32(5, 0, 5, 0)[::2]}, ValueError, ("cache_seqlens must be contiguous",)),
    (DENSE, {"cache_leftpad": int64(0, 0)}, TypeError, ("cache_leftpad must be int32",)),
    (DENSE, {"cache_batch_idx": int32(0)}, ValueError, ("cache_batch_idx", "(2,)", "(1,)")),
    (PAGED, {"cache_batch_idx": int32(0, 1)}, ValueError, ("cache_batch_idx must be None", "block_table[")),
    (PAGED, {"block_table": [[0]]}, TypeError, ("block_table", "torch.Tensor", "list")),
    (PAGED, {"block_table": int64([0], [1])}, TypeError, ("block_table must be int32", "torch.int64")),
    (PAGED, {"block_table": int32(0, 1)}, ValueError, ("block_table", "batch = 2", "(2,)")),
    (PAGED, {"block_table": int32([0, 1])}, ValueError, ("block_table", "batch = 2", "(1, 2)")),
    # options
    (DENSE, {"softmax_scale": float("nan")}, ValueError, ("softmax_scale must be finite", "nan")),
    (DENSE, {"softcap": -1.0}, ValueError, ("softcap", "at least 0", "-1.0")),
    (DENSE, {"window_size": (2**31, 0)}, ValueError, ("window_size[0]", "2147483648")),
    (DENSE, {"window_size": 3}, TypeError, ("window_size must be a pair",)),
    (DENSE, {"causal": 1}, TypeError, ("causal must be True or False",)),
    (DENSE, {"rotary_interleaved": None}, TypeError,
     ("rotary_interleaved must be True or False", "NoneType")),
    (DENSE, {"debug_checks": 1}, TypeError, ("debug_checks must be True or False",)),
    (DENSE, {"num_splits": -1}, ValueError, ("num_splits must be from 0 to 256", "-1")),
    (DENSE, {"num_splits": 257}, ValueError, ("num_splits must be from 0 to 256", "257")),
    (DENSE, {"num_splits": 1.5}, TypeError, ("num_splits must be an int",)),
    (DENSE, {"split_size": 0}, ValueError, ("split_size must be None or at least 1", "0")),
    (DENSE, {"split_size": 8, "num_splits": 2}, ValueError, ("split_size must be None", "num_splits = 2")),
    (DENSE, {"backend": "cuda"}, ValueError, ("backend must be None or one of", "'cuda'")),
    (DENSE, {"backend": "portable"}, NotImplementedError, ("backend='portable'", "cpu")),
    (DENSE, {"alibi_slopes": rand(H, dtype=torch.float16)}, TypeError, ("alibi_slopes must be float32",)),
    (DENSE, {"alibi_slopes": rand(3, H)}, ValueError, ("alibi_slopes", "(4,) or (2, 4)", "(3, 4)")),
    (DENSE, {"sink": rand(HKV)}, ValueError, ("sink must have shape (heads_q,)", "(2,)")),
    (DENSE, {"sink": rand(H, dtype=torch.bfloat16)}, TypeError, ("sink must be float32", "bfloat16")),
    # ragged queries
    (VARLEN, {"max_seqlen_q": None}, TypeError, ("max_seqlen_q must be an int",)),
    (VARLEN, {"cu_seqlens_q": int64(0, 2, 5).short()}, TypeError, ("cu_seqlens_q must be int32",)),
    (VARLEN, {"cu_seqlens_q": int32(0, 3, 5), "max_seqlen_q": 2}, ValueError,
     ("cu_seqlens_q", "3 tokens", "max_seqlen_q = 2")),
    (VARLEN, {"cu_seqlens_q": int32(0, 2, 6), "max_seqlen_q": 4}, ValueError,
     ("within the tensor's 5 tokens", "6")),
    (DENSE, {"max_seqlen_q": 3}, ValueError, ("max_seqlen_q must be None without cu_seqlens_q",)),
    # FP8
    (DENSE, {"k_descale": rand(HKV), "v_descale": rand(HKV)}, ValueError,
     ("k_descale must be None", "float32")),
    (FP8_CALL, {"v_descale": None}, ValueError, ("v_descale must be given with k_descale",)),
    (FP8_CALL, {"k_descale": rand(3)}, ValueError, ("k_descale", "(2,) or (2, 2)", "(3,)")),
    (FP8_CALL, {"k_descale": rand(B, HKV)}, ValueError, ("v_descale has shape (2,)", "(2, 2)")),
    (FP8_CALL, {"k_descale": rand(HKV, dtype=torch.float64)}, TypeError, ("k_descale must be float32",)),
    (FP8_CALL, {"k_descale": rand(3, 1, HKV)}, ValueError, ("k_descale", "(2, 1, 2)", "(3, 1, 2)")),
    (FP8_CALL, {"q_descale": rand(HKV)}, ValueError, ("q_descale must be None", "float32")),
    (E4M3_CALL, {"q_descale": rand(3, HKV)}, ValueError, ("q_descale", "(2,) or (2, 2)", "(3, 2)")),
    (E4M3_CALL, {"q_descale": 2.0}, TypeError, ("q_descale must be a torch.Tensor", "float")),
    (E4M3_CALL, {"q_descale": rand(B, HKV), "k_descale": rand(B, HKV), "v_descale": rand(B, HKV)},
     NotImplementedError, ("q_descale must be (heads_kv,)", "(2, 2)")),
    (E4M3_CALL, {"k": k_of(dtype=FP8), "v": k_of()}, TypeError, ("v has dtype torch.float32", "float8")),
    (E4M3_CALL, {"k": k_of(dtype=FP8)}, ValueError, ("v must be given with k",)),
    # trees
    (TREE, {"tree_mask": [[True]]}, TypeError, ("tree_mask must be a torch.Tensor", "list")),
    (TREE, {"tree_mask": rand(SQ, SQ)}, TypeError, ("tree_mask must be bool", "float32")),
    (TREE, {"tree_mask": torch.ones(2, SQ, dtype=torch.bool)}, ValueError,
     ("tree_mask", "(3, 3)", "(1, 2, 3)")),
    (TREE, {"causal": True}, ValueError, ("tree_mask", "combined with causal", "causal=True")),
    (TREE, {"window_size": (3, -1)}, ValueError, ("tree_mask", "window_size=(3, -1)")),
    (TREE, {"attention_chunk": 2}, ValueError, ("attention_chunk must be 0 with tree_mask", "got 2")),
    (DENSE, {"attention_chunk": -1}, ValueError, ("attention_chunk must be", "0 (off)", "-1")),
    (DENSE, {"attention_chunk": 2.5}, TypeError, ("attention_chunk", "2.5")),
    (TREE, {"alibi_slopes": rand(H)}, ValueError, ("alibi_slopes must be None with tree_mask",)),
    (ROTARY, {"tree_mask": torch.ones(SQ, SQ, dtype=torch.bool)}, ValueError, ("rotary_cos", "tree_mask")),
    # appending
    (APPEND, {"v": None}, ValueError, ("v must be given with k",)),
    (APPEND, {"k": None}, ValueError, ("k must be given with v",)),
    (APPEND, {"cache_seqlens": None}, ValueError, ("cache_seqlens must give the positions",)),
    (APPEND, {"k": [1.0]}, TypeError, ("k must be a torch.Tensor", "list")),
    (APPEND, {"k": rand(B, 1, HKV, D)}, ValueError, ("v has shape", "that of k")),
    (APPEND, {"k": rand(B, SN, 1, D), "v": rand(B, SN, 1, D)}, ValueError,
     ("k has (heads, head_dim)", "k_cache")),
    (APPEND, {"k": k_of(dtype=torch.float16)}, TypeError, ("k", "torch.float16")),
    (APPEND, {"v": k_of(dtype=torch.float16)}, TypeError, ("v has dtype torch.float16",)),
    (APPEND, {"k_cache": cache_of().requires_grad_()}, ValueError, ("k_cache requires grad", "detached")),
    (APPEND, {"cu_seqlens_k_new": int32(0, 1, 2)}, ValueError, ("k must have 3 dimensions", "total_new")),
    (DENSE, {"cu_seqlens_k_new": int32(0, 1, 2)}, ValueError, ("cu_seqlens_k_new must be None without k",)),
    # rotary
    (DENSE, {"rotary_cos": rand(ROWS, 4)}, ValueError, ("rotary_cos must be None without k",)),
    (ROTARY, {"rotary_sin": None}, ValueError, ("rotary_sin must be given with rotary_cos",)),
    (ROTARY, {"rotary_cos": None}, ValueError, ("rotary_cos must be given with rotary_sin",)),
    (ROTARY, {"rotary_sin": rand(ROWS, 3)}, ValueError, ("rotary_sin has shape (20, 3)", "(20, 4)")),
    (ROTARY, {"rotary_cos": rand(ROWS, 9)}, ValueError, ("rotary_cos", "rotary_dim from 2 to head_dim = 16")),
    (ROTARY, {"rotary_cos": rand(ROWS, 4, dtype=torch.float64)}, TypeError, ("rotary_cos", "float64")),
    (ROTARY, {"rotary_seqlens": int64(0, 0)}, TypeError, ("rotary_seqlens must be int32",)),
    (APPEND, {"rotary_seqlens": int32(0, 0)}, ValueError,
     ("rotary_seqlens must be None without rotary_cos",)),
    # data, which is on the host here
    (DENSE, {"cache_seqlens": int32(21, 0)}, ValueError,
     ("cache_seqlens", "0 to 20", "row of the cache", "21")),
    (DENSE, {"cache_seqlens": int32(5, -3)}, ValueError, ("cache_seqlens", "-3 at entry 1")),
    (DENSE, {"cache_seqlens": 21}, ValueError, ("cache_seqlens", "0 to 20", "21")),
    (DENSE, {"cache_leftpad": int32(-1, 0)}, ValueError, ("cache_leftpad", "-1 at entry 0")),
    (DENSE, {"cache_batch_idx": int32(0, 2)}, ValueError, ("cache_batch_idx", "from 0 to 1", "2 at entry 1")),
    (PAGED, {"cache_seqlens": int32(5, 13)}, ValueError, ("cache_seqlens", "3 pages of 4", "13 at entry 1")),
    (PAGED, {"cache_seqlens": None}, ValueError, ("block_table", "99 at [0, 2]")),
    (PAGED, {"block_table": int32([0, 9, 1], [2, 3, 4])}, ValueError,
     ("block_table must name blocks from 0 to 8", "9 at [0, 1]", "5 tokens")),
    (PAGED, {"block_table": int32([-1, 1, 1], [2, 3, 4])}, ValueError, ("block_table", "-1 at [0, 0]")),
    (PAGED, {"block_table": int32([0, 1, 99], [2, 0, 4]), "mass": rand(PAGES, PAGE, HKV)}, ValueError,
     ("block_table must have each page in only one column", "page 0 at [0, 0] and at [1, 1]")),
    (APPEND, {"cache_seqlens": int32(19, 0)}, ValueError, ("cache_seqlens with the tokens to append", "21")),
    (APPEND, {"cache_leftpad": int32(-1, 0)}, ValueError, ("cache_leftpad", "-1 at entry 0")),
    (PAGED_APPEND, {"cache_seqlens": int32(5, 11)}, ValueError, ("tokens to append", "3 pages of 4", "13")),
    (PAGED_APPEND, {"block_table": int32([0, 1, 99], [2, 3, 44])}, ValueError,
     ("block_table", "44 at [1, 2]")),
    (PAGED_APPEND, {"block_table": int32([0, 1, 9], [2, 3, 1]), "cache_seqlens": int32(5, 8)}, ValueError,
     ("block_table", "two tokens", "offset 1 of block 1", "copied before")),
    (APPEND, {"cache_batch_idx": int32(1, 1), "cache_seqlens": int32(4, 4)}, ValueError,
     ("cache_batch_idx must name each row", "1 twice")),
    (ROTARY, {"rotary_cos": rand(6, 4), "rotary_sin": rand(6, 4)}, ValueError,
     ("cache_seqlens with the tokens to rotate", "rotary_cos", "6 at entry 0")),
    (ROTARY, {"rotary_seqlens": int32(19, 0)}, ValueError,
     ("rotary_seqlens with the tokens to rotate", "20")),
]  # fmt: skip


def assert_refused(function, arguments, error, words):
    with pytest.raises(error) as caught:
        function(**arguments)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def test_bad_calls_are_refused_before_anything_is_written(subtests):
    for good, changes, error, words in CALLS:
        with subtests.test(words[0]):
            arguments = good | changes
            for name in ("k", "v"):  # ones, because the caches hold zeros
                if isinstance(arguments.get(name), torch.Tensor):
                    arguments[name] = torch.ones_like(arguments[name])
            assert_refused(flashtile.flash_attn_with_kvcache, arguments, error, words)
            for name in ("k_cache", "v_cache"):
                cache = arguments[name]
                if isinstance(cache, torch.Tensor) and cache.device.type == "cpu" and cache.numel():
                    assert not cache.float().any()


def test_good_calls_run(subtests):
    for good in (DENSE, APPEND, PAGED, PAGED_APPEND, ROTARY, VARLEN, FP8_CALL, TREE):
        with subtests.test("-".join(good)):
            flashtile.flash_attn_with_kvcache(
                **{n: a.clone() if isinstance(a, torch.Tensor) else a for n, a in good.items()}
            )


SLOTS = {"k_cache": pages_of(), "v_cache": pages_of(), "k": rand(3, HKV, D), "v": rand(3, HKV, D),
         "slot_mapping": int64(7, -1, 0)}  # fmt: skip
BAD_SLOTS = [
    ({"slot_mapping": int32(7, 1, 0)}, TypeError, ("slot_mapping must be int64", "torch.int32")),
    ({"slot_mapping": int64(7, 1)}, ValueError, ("slot_mapping", "(total_new,) = (3,)", "(2,)")),
    ({"slot_mapping": int64(7, 36, 0)}, ValueError, ("slot_mapping must be below 36", "got 36")),
    ({"slot_mapping": int64(7, 0, 7)}, ValueError, ("slot_mapping must name each slot once", "7 twice")),
    ({"slot_mapping": int64(7, 5, 7, 5)} | dict.fromkeys("kv", rand(4, HKV, D)), ValueError, ("5 twice",)),
    ({"cache_seqlens": int32(0)}, ValueError, ("cache_seqlens must be None with slot_mapping",)),
    ({"block_table": int32([0])}, ValueError, ("block_table must be None with slot_mapping",)),
    ({"slot_mapping": None}, ValueError, ("k must have 4 dimensions",)),
    ({"slot_mapping": None, "k": k_of(), "v": k_of()}, ValueError, ("cache_seqlens must give",)),
]


COPY = {"k_cache": pages_of(), "v_cache": pages_of(), "block_pairs": int64([0, 1], [0, 2])}
BAD_COPIES = [
    ({"block_pairs": [[0, 1]]}, TypeError, ("block_pairs must be a torch.Tensor",)),
    ({"block_pairs": rand(1, 2)}, TypeError, ("block_pairs must be int32 or int64", "float32")),
    ({"block_pairs": int64(0, 1)}, ValueError, ("block_pairs must have shape (n, 2)", "(2,)")),
    ({"block_pairs": int64([0, 1, 2])}, ValueError, ("block_pairs must have shape (n, 2)", "(1, 3)")),
    ({"block_pairs": int64([0, 9])}, ValueError, ("block_pairs (destinations)", "from 0 to 8", "9")),
    ({"block_pairs": int64([9, 1])}, ValueError, ("block_pairs (sources)", "9")),
    ({"block_pairs": int64([0, 1], [2, 1])}, ValueError, ("write each block once", "1 twice")),
    ({"block_pairs": int64([0, 1], [1, 2])}, ValueError, ("must not read a block that they write", "1")),
    ({"v_cache": rand(3, PAGE, HKV, D)}, ValueError, ("v_cache has shape", "k_cache")),
    ({"k_descale": rand(PAGES, HKV)}, ValueError, ("v_descale must be given with k_descale",)),
    ({"k_descale": rand(HKV), "v_descale": rand(HKV)}, ValueError, ("k_descale", "(9, 2)", "(2,)")),
    ({"k_cache": rand(PAGE, HKV, D)}, ValueError, ("k_cache must have shape", "(4, 2, 16)")),
]


COMBINE = {"out_partial": rand(3, B, SQ, H, D), "lse_partial": rand(3, B, SQ, H)}
BAD_COMBINES = [
    ({"out_partial": 1}, TypeError, ("out_partial must be a torch.Tensor",)),
    ({"out_partial": rand(3, D)}, ValueError, ("out_partial must have shape", "(3, 16)")),
    ({"out_partial": rand(3, B, SQ, H, D, dtype=torch.int32)}, TypeError, ("out_partial must be float16",)),
    ({"lse_partial": rand(3, B, H, SQ)}, ValueError, ("lse_partial", "(3, 2, 3, 4)", "(3, 2, 4, 3)")),
    (
        {"lse_partial": rand(3, B, SQ, H, dtype=torch.float64)},
        TypeError,
        ("lse_partial must be torch.float32",),
    ),
    ({"out_partial": rand(0, B, SQ, H, D), "lse_partial": rand(0, B, SQ, H)}, ValueError, ("has no split",)),
    ({"out": rand(B, SQ, H, 8)}, ValueError, ("out must have shape (2, 3, 4, 16)",)),
    ({"out": q_of().requires_grad_()}, ValueError, ("out requires grad",)),
    ({"out": q_of()[:1].expand(B, -1, -1, -1)}, ValueError, ("out has elements that share memory",)),
    ({"out": q_of(), "out_dtype": torch.float16}, TypeError, ("out has dtype torch.float32",)),
    ({"out_dtype": "float16"}, TypeError, ("out_dtype must be a torch.dtype", "str")),
    ({"out_dtype": torch.int8}, TypeError, ("out_dtype must be float16", "torch.int8")),
]


PREFIX = {name: PAGED[name] for name in ("q", "k_cache", "v_cache")} | {
    "block_table": int32([0, 1, 99], [0, 3, 4]),
    "cache_seqlens": int32(8, 12),
    "prefix_seqlens": 4,
}
BAD_PREFIXES = [
    ({"prefix_seqlens": 5}, ValueError, ("same 2 pages", "rows 0 and 1 differ")),
    ({"prefix_seqlens": 9}, ValueError, ("end before every query", "got 9", "8 tokens")),
    ({"cache_seqlens": int32(5, 12), "causal": True}, ValueError, ("got 4", "5 tokens with 3 queries")),
    ({"prefix_seqlens": -1}, ValueError, ("prefix_seqlens must be from 0", "-1")),
    ({"prefix_seqlens": int32(4, 4)}, ValueError, ("prefix_seqlens", "(num_groups,) = (1,)", "(2,)")),
    ({"prefix_seqlens": "4"}, TypeError, ("prefix_seqlens must be an int", "str")),
    ({"cu_prefix_groups": int64(0, 2)}, TypeError, ("cu_prefix_groups must be int32",)),
    ({"cu_prefix_groups": int32(0, 1)}, ValueError, ("cu_prefix_groups must end with the 2 sequences", "1")),
    ({"block_table": int32([0, 1, 2])}, ValueError, ("block_table", "batch = 2", "(1, 3)")),
    ({"q": rand(5, H, D)}, ValueError, ("q must have 4 dimensions",)),
    ({"num_splits": -2}, ValueError, ("num_splits", "-2")),
]


PREFIX_GROUPS = PREFIX | {"cu_prefix_groups": int32(0, 1, 2), "prefix_seqlens": int32(4, 4)}
SPARSE = torch.eye(3).to_sparse()
WRONG_TENSORS = {
    "q": (3, None, SPARSE, rand(2, 3), q_of().long(), rand(B, SQ, 0, D), rand(B, SQ, 3, D),
          rand(B, SQ, H, 2 * D)[..., ::2]),
    **{name: (3, None, SPARSE, rand(9, 4), pages_of().long(), pages_of().to("meta"), rand(9, 4, 1, D),
              rand(9, 4, HKV, 2 * D)[..., ::2]) for name in ("k_cache", "v_cache")},
    "block_table": (3, None, [[0]], SPARSE, int32(0, 1), int64([0, 1, 2], [0, 3, 4]), int32([0, 1, 2]),
                    int32([0, 1, 2], [0, 3, 4]).to("meta"), int32([0, 9, 1, 9], [0, 9, 3, 9])[:, ::2]),
    "cache_seqlens": (3, None, [8, 12], SPARSE, int64(8, 12), int32(8), int32(8, 12).to("meta"),
                      int32(8, 0, 12, 0)[::2]),
    "prefix_seqlens": (None, "4", 1.5, -1, 2**31, SPARSE, int64(4, 4), int32(4, 4, 4), int32(4, 4).to("meta"),
                       int32(4, 0, 4, 0)[::2]),
    "cu_prefix_groups": (3, [0, 2], SPARSE, int64(0, 1, 2), int32(0), int32([0, 2]),
                         int32(0, 1, 2).to("meta")),
    "sink": (3, rand(3), rand(H).half(), rand(H).to("meta")),
    "k_descale": (3, rand(HKV)),
    "v_descale": (3, rand(HKV)),
    "softmax_scale": ("1", float("nan")),
    "softcap": ("1", -1.0),
    "causal": (1, None),
    "num_splits": (1.5, -1, 257),
    "split_size": (1.5, 0),
    "return_softmax_lse": (1, None),
    "debug_checks": (1, None),
    "backend": ("x", 3),
}  # fmt: skip


@pytest.mark.parametrize("reads_data", [True, False], ids=["", "as-on-a-gpu"])
@pytest.mark.parametrize("good", [PREFIX, PREFIX_GROUPS], ids=["one-group", "groups"])
def test_wrong_arguments_of_a_shared_prefix_are_named(good, reads_data, monkeypatch, subtests):
    if not reads_data:
        monkeypatch.setattr(cascade, "reads_values", lambda *arguments: False)
    function = flashtile.flash_attn_with_shared_prefix
    function(**good)
    for name, values in WRONG_TENSORS.items():
        for i, value in enumerate(values):
            with subtests.test(f"{name} {i}"), pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
                function(**good | {name: value})


def over_one_memory():
    """Caches that share memory, or of which two places are one, and the words that say so."""
    k_cache, v_cache = pages_of(), pages_of()
    expanded = rand(1, PAGE, HKV, D).expand(PAGES, -1, -1, -1)
    return {
        "expanded keys": (expanded, v_cache, "k_cache has elements that share memory"),
        "expanded values": (k_cache, expanded, "v_cache has elements that share memory"),
        "the same tensor": (k_cache, k_cache, "v_cache shares memory with k_cache"),
        "two tensors of one memory": (k_cache, k_cache[:], "v_cache shares memory with k_cache"),
    }


WRITES = {
    "flash_attn_with_kvcache": (flashtile.flash_attn_with_kvcache, PAGED_APPEND),
    "append_kvcache": (
        flashtile.append_kvcache, {n: PAGED_APPEND[n] for n in ("k", "v", "cache_seqlens", "block_table")}
    ),
    "copy_blocks": (flashtile.copy_blocks, {"block_pairs": int64([0, 1])}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_caches_of_one_memory_are_not_written(name, fresh_launches, subtests):
    """Also if the signature is known, which has shapes and strides but no addresses."""
    function, arguments = WRITES[name]
    for known in (False, True):
        if known:
            function(**arguments | {"k_cache": pages_of(), "v_cache": pages_of()})
        for which, (k_cache, v_cache, words) in over_one_memory().items():
            with subtests.test(which, known=known), pytest.raises(ValueError, match=words):
                function(**arguments | {"k_cache": k_cache, "v_cache": v_cache})


@pytest.mark.parametrize(
    ("places", "words"),
    {
        "values a token later": (lambda memory: (memory[:, :PAGE], memory[:, 1:]), "v_cache shares memory"),
        "values a page later": (lambda memory: (memory[:-1], memory[1:]), "v_cache shares memory"),
        "overlapping tokens": (
            lambda memory: (memory.as_strided((PAGES, PAGE, HKV, D), (PAGE * D, D, D, 1)), pages_of()),
            "k_cache has elements that share memory",
        ),
    }.values(),
)  # fmt: skip
def test_caches_that_overlap_in_part_are_not_written(places, words):
    k_cache, v_cache = places(rand(PAGES + 1, PAGE + 1, HKV, D))
    if k_cache.shape[1] != PAGE:
        k_cache, v_cache = k_cache[:, :PAGE], v_cache[:, :PAGE]
    function, arguments = WRITES["append_kvcache"]
    with pytest.raises(ValueError, match=words):
        function(**arguments | {"k_cache": k_cache, "v_cache": v_cache})


def test_new_keys_that_lie_in_the_cache_are_refused():
    k_cache = rand(2, 16, HKV, D)
    with pytest.raises(ValueError, match="k shares memory with k_cache"):
        flashtile.append_kvcache(k_cache, k_cache.clone(), k_cache[:, 1:9], rand(2, 8, HKV, D), int32(0, 0))


def test_layers_of_one_memory_are_not_copied():
    k_cache = rand(2, PAGES, PAGE, HKV, D)
    for v_cache in (k_cache, k_cache[:]):
        with pytest.raises(ValueError, match="v_cache shares memory with k_cache"):
            flashtile.copy_blocks(k_cache, v_cache, int64([0, 1]))


def test_keys_and_values_may_lie_side_by_side():
    k_cache, v_cache = rand(PAGES, PAGE, 2, HKV, D).unbind(2)
    for function, arguments in WRITES.values():
        function(**arguments | {"k_cache": k_cache, "v_cache": v_cache})
    empty = rand(0, PAGE, HKV, D)
    flashtile.copy_blocks(empty, empty[:], torch.empty(0, 2, dtype=torch.int64))


PAGES_CALL = {
    "q": rand(6, H, D), "k": pages_of(), "v": pages_of(), "cu_seqlens_q": int32(0, 3, 6),
    "cu_seqlens_k": int32(0, 5, 17), "max_seqlen_q": 3, "max_seqlen_k": 12,
    "block_table": int32([0, 1, 99], [2, 3, 4]),
}  # fmt: skip
BAD_PAGES = [
    ({"seqused_k": int32(13, 2)}, ValueError, ("seqused_k must be from 0 to 12", "13")),
    ({"seqused_k": int64(3, 2)}, TypeError, ("seqused_k must be int32",)),
    ({"seqused_k": int32(3)}, ValueError, ("seqused_k must have shape (batch,) = (2,)",)),
    ({"seqused_k": [3, 2]}, TypeError, ("seqused_k must be a torch.Tensor", "list")),
    ({"cu_seqlens_k": int32(0, 5, 18)}, ValueError, ("cu_seqlens_k has a sequence of 13", "max_seqlen_k")),
    ({"cu_seqlens_k": int32(0, 5, 3)}, ValueError, ("cu_seqlens_k must not decrease", "5 then 3")),
    ({"cu_seqlens_k": int32(3, 5, 17)}, ValueError, ("cu_seqlens_k must start with 0",)),
    ({"cu_seqlens_k": [0, 5, 17]}, TypeError, ("cu_seqlens_k must be a torch.Tensor",)),
    ({"cu_seqlens_k": int32(0, 5)}, ValueError, ("cu_seqlens_k has 2 entries", "cu_seqlens_q has 3")),
    ({"cu_seqlens_q": [0, 3, 6]}, TypeError, ("cu_seqlens_q must be a torch.Tensor",)),
    ({"block_table": [[0]]}, TypeError, ("block_table must be a torch.Tensor",)),
    ({"k": rand(6, HKV, D)}, ValueError, ("k must have 4 dimensions (num_blocks",)),
    ({"q": rand(6, 3, D)}, ValueError, ("q has 3 heads", "heads of k")),
]


@pytest.mark.parametrize(
    ("function", "good", "table"),
    [
        (flashtile.append_kvcache, SLOTS, BAD_SLOTS),
        (flashtile.copy_blocks, COPY, BAD_COPIES),
        (flashtile.flash_attn_combine, COMBINE, BAD_COMBINES),
        (flashtile.flash_attn_with_shared_prefix, PREFIX, BAD_PREFIXES),
        (flashtile.flash_attn_varlen_func, PAGES_CALL, BAD_PAGES),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_calls_name_the_arguments_of_the_function(function, good, table, subtests):
    function(**good)  # its launch must not serve a bad call
    for changes, error, words in table:
        with subtests.test(words[0]):
            assert_refused(function, good | changes, error, words)


@pytest.mark.parametrize("name", [*WRITES, "flash_attn_combine"])
def test_an_unknown_backend_is_refused(name, subtests):
    function, arguments = WRITES.get(name) or (flashtile.flash_attn_combine, COMBINE)
    if name in WRITES:
        arguments = arguments | {"k_cache": pages_of(), "v_cache": pages_of()}
    for backend, error in (("x", ValueError), ("", ValueError), (3, TypeError), (["cpu"], TypeError)):
        with subtests.test(repr(backend)), pytest.raises(error, match=r"^backend must be None or"):
            function(**arguments, backend=backend)


def test_lengths_of_an_append_name_its_arguments():
    for changes, words in (
        ({"k": [1.0]}, "k must be a torch.Tensor"),
        ({"cu_seqlens_k_new": [0, 2]}, "cu_seqlens_k_new must be a torch.Tensor"),
    ):
        arguments = APPEND | {"cache_seqlens": 3} | changes
        arguments.pop("q")
        with pytest.raises(TypeError, match=words):
            flashtile.append_kvcache(**arguments)
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be a torch\.Tensor"):
        flashtile.flash_attn_with_kvcache(**DENSE | {"cache_seqlens": 3, "cu_seqlens_q": [0, 2]})
