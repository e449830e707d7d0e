"""The table of bad calls: what is wrong, in which functions, and what the error must say."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

import flashtile

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, HEADS_KV, HEAD_DIM = 2, 5, 7, 4, 2, 16
TOTAL_Q, TOTAL_K = BATCH * SEQLEN_Q, BATCH * SEQLEN_K
NAN, INF = math.nan, math.inf


def rand(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def offsets(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def good(function):
    """Arguments that ``function`` takes, by name."""
    q = rand(BATCH, SEQLEN_Q, HEADS, HEAD_DIM)
    k, v = (rand(BATCH, SEQLEN_K, HEADS_KV, HEAD_DIM) for _ in "kv")
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "kv": torch.stack([k, v], 2),
        "qkv": torch.stack([q, q, q], 2),
        "out_a": q,
        "out_b": q,
        "lse_a": rand(BATCH, HEADS, SEQLEN_Q),
        "lse_b": rand(BATCH, HEADS, SEQLEN_Q),
    }
    if "varlen" in function:
        tensors = {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
        tensors |= {
            "cu_seqlens_q": offsets(0, SEQLEN_Q, TOTAL_Q),
            "cu_seqlens_k": offsets(0, SEQLEN_K, TOTAL_K),
            "max_seqlen_q": SEQLEN_Q,
            "max_seqlen_k": SEQLEN_K,
            "cu_seqlens": offsets(0, SEQLEN_Q, TOTAL_Q),
            "max_seqlen": SEQLEN_Q,
        }
    wanted = inspect.signature(FUNCTIONS[function]).parameters
    return {name: value for name, value in tensors.items() if name in wanted}


FUNCTIONS = {
    "attention": flashtile.attention,
    "attention varlen": flashtile.attention,
    "flash_attn_func": flashtile.flash_attn_func,
    "flash_attn_kvpacked_func": flashtile.flash_attn_kvpacked_func,
    "flash_attn_qkvpacked_func": flashtile.flash_attn_qkvpacked_func,
    "flash_attn_varlen_func": flashtile.flash_attn_varlen_func,
    "flash_attn_varlen_kvpacked_func": flashtile.flash_attn_varlen_kvpacked_func,
    "flash_attn_varlen_qkvpacked_func": flashtile.flash_attn_varlen_qkvpacked_func,
    "merge_states": flashtile.merge_states,
}
DENSE = ("attention", "flash_attn_func")
VARLEN = ("attention varlen", "flash_attn_varlen_func")
ALL = tuple(name for name in FUNCTIONS if name != "merge_states")
EVERY_FORM = (*DENSE, *VARLEN)
WITH_SEQUSED = tuple(name for name in EVERY_FORM if name != "flash_attn_func")
FLASH_ATTN = tuple(name for name in ALL if name.startswith("flash_attn"))


@dataclass(frozen=True)
class Bad:
    """One wrong argument, and what the error must say: the type, and words that its text contains."""

    functions: tuple[str, ...]
    changes: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]
    on_data: bool = False  # wrong by the values of a tensor
    untraceable: bool = False  # torch.compile refuses it in its own words

    @property
    def name(self):
        return "-".join((*self.changes, *self.words))


def bad(functions, error, *words, on_data=False, untraceable=False, **changes):
    names = (functions,) if isinstance(functions, str) else tuple(functions)
    return Bad(names, changes, error, words, on_data, untraceable)


def q_of(**kwargs):
    return rand(BATCH, SEQLEN_Q, HEADS, HEAD_DIM, **kwargs)


def k_of(**kwargs):
    return rand(BATCH, SEQLEN_K, HEADS_KV, HEAD_DIM, **kwargs)


def strided_v():
    return rand(BATCH, SEQLEN_K, HEADS_KV, 2 * HEAD_DIM)[..., ::2]


def unusual(make, *args, **kwargs):
    """Tensors of kinds that torch itself warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args, **kwargs)


def quantized(tensor, dtype):
    return unusual(torch.quantize_per_tensor, tensor, 0.1, 0, dtype)


def nested(*shapes, layout=torch.strided):
    return unusual(torch.nested.nested_tensor, [rand(*shape) for shape in shapes], layout=layout)


# fmt: off
NOT_TENSORS = (None, [[1.0]], np.zeros((2, 5, 4, 16), np.float32), "q", 3)
FLOAT8 = torch.float8_e4m3fn

TENSORS = [
    *(bad(DENSE, TypeError, name, "torch.Tensor", type(value).__name__, **{name: value})
      for name in "qkv" for value in NOT_TENSORS),
    bad(DENSE, TypeError, "q must be a torch.Tensor", "NoneType", q=None, dropout_p=0.5),
    *(bad(DENSE, ValueError, name, "4 dimensions", "(batch, seqlen, heads, head_dim)", str(shape),
          **{name: rand(*shape)})
      for name in "qkv" for shape in ((), (16,), (5, 16), (5, 4, 16), (1, 2, 5, 4, 16))),
    *(bad(VARLEN, ValueError, name, "3 dimensions", "(total, heads, head_dim)", str(shape),
          **{name: rand(*shape)})
      for name in "qkv" for shape in ((), (10, 16), (2, 5, 4, 16))),
    *(bad(DENSE, TypeError, "q", "float16, bfloat16, float32 or float64", str(dtype), q=q_of(dtype=dtype))
      for dtype in (torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64,
                    torch.float8_e5m2)),
    *(bad(DENSE, TypeError, name, "float16, bfloat16, float32 or float64", str(dtype),
          **{name: k_of(dtype=dtype)})
      for name in "kv" for dtype in (torch.int64, torch.complex128, FLOAT8)),
    *(bad(DENSE, TypeError, name, str(dtype), "q has torch.float32", "equal", **{name: k_of(dtype=dtype)})
      for name in "kv" for dtype in (torch.float16, torch.bfloat16, torch.float64)),
    bad(DENSE, TypeError, "k has dtype torch.float32", "q has torch.float16", "equal",
        q=q_of(dtype=torch.float16)),
    *(bad(DENSE, TypeError, name, "dense (strided)", "sparse",
          **{name: k_of().to_sparse()}) for name in "qkv"),
    *(bad(DENSE, TypeError, name, "dense (strided)", "nested",
          **{name: nested((3, 4, 16), (5, 4, 16), layout=layout)})
      for name in "qkv" for layout in (torch.strided, torch.jagged)),
    # v is copied, because its last stride is not 1, and q is looked at on the way.
    *(bad(DENSE, TypeError, "q", "dense (strided)", "nested", v=strided_v(),
          q=nested((3, 4, 16), (5, 4, 16), layout=layout)) for layout in (torch.strided, torch.jagged)),
    bad(DENSE, TypeError, "q", "dense (strided)", "sparse", v=strided_v(), q=q_of().to_sparse()),
    bad(DENSE, ValueError, "q must have 4 dimensions", "got shape ()", v=strided_v(), q=rand()),
    bad(DENSE, TypeError, "q", "float16, bfloat16", "quint8",
        q=quantized(q_of(), torch.quint8)),
    bad(DENSE, TypeError, "v", "float16, bfloat16", "qint8",
        v=quantized(k_of(), torch.qint8)),
    *(bad(DENSE, ValueError, name, "on meta", "not on cpu", "one device",
          **{name: k_of(device="meta")}) for name in "kv"),
    bad(DENSE, ValueError, "k", "on cpu", "not on meta", "one device", q=q_of(device="meta")),
]

SHAPES = [
    bad(DENSE, ValueError, "k has batch size 3", "q has 2", "equal",
        k=rand(3, SEQLEN_K, HEADS_KV, HEAD_DIM), v=rand(3, SEQLEN_K, HEADS_KV, HEAD_DIM)),
    bad(DENSE, ValueError, "v", "(3, 7)", "k has (2, 7)", "equal", v=rand(3, SEQLEN_K, HEADS_KV, HEAD_DIM)),
    bad(DENSE, ValueError, "v", "(2, 8)", "k has (2, 7)", "equal", v=rand(BATCH, 8, HEADS_KV, HEAD_DIM)),
    bad(VARLEN, ValueError, "v", "(15,)", "k has (14,)", "equal", v=rand(15, HEADS_KV, HEAD_DIM)),
    *(bad(DENSE, ValueError, "v has", f"{heads} heads", "k has 2", "equal",
          v=rand(BATCH, SEQLEN_K, heads, HEAD_DIM))
      for heads in (0, 1, 4)),
    bad(DENSE, ValueError, "k has head_dim 24", "q has 16", "equal", k=rand(BATCH, SEQLEN_K, HEADS_KV, 24)),
    bad(VARLEN, ValueError, "k has head_dim 8", "q has 16", "equal", k=rand(TOTAL_K, HEADS_KV, 8)),
    *(bad(DENSE, ValueError, f"q has {heads} heads", "multiple of the 2 heads of k",
          q=rand(BATCH, SEQLEN_Q, heads, HEAD_DIM)) for heads in (1, 3, 5)),
    bad(DENSE, ValueError, "q has 4 heads", "multiple of the 3 heads of k",
        k=rand(BATCH, SEQLEN_K, 3, HEAD_DIM), v=rand(BATCH, SEQLEN_K, 3, HEAD_DIM)),
    bad(VARLEN, ValueError, "q has 3 heads", "multiple of the 2 heads of k", q=rand(TOTAL_Q, 3, HEAD_DIM)),
    bad(DENSE, ValueError, "q has 0 heads", "at least one", q=rand(BATCH, SEQLEN_Q, 0, HEAD_DIM)),
    bad(DENSE, ValueError, "k has 0", "at least one",
        k=rand(BATCH, SEQLEN_K, 0, HEAD_DIM), v=rand(BATCH, SEQLEN_K, 0, HEAD_DIM)),
    bad(DENSE, ValueError, "q has head_dim 0", "from 1 to 576", q=rand(BATCH, SEQLEN_Q, HEADS, 0)),
    bad(DENSE, ValueError, "v has head_dim 0", "from 1 to 576", v=rand(BATCH, SEQLEN_K, HEADS_KV, 0)),
    bad(DENSE, NotImplementedError, "q has head_dim 577", "from 1 to 576",
        q=rand(BATCH, SEQLEN_Q, HEADS, 577)),
    bad(DENSE, NotImplementedError, "v has head_dim 1024", "from 1 to 576",
        v=rand(BATCH, SEQLEN_K, HEADS_KV, 1024)),
    bad(DENSE, ValueError, "k has batch size 4", "q has 2",
        k=k_of().permute(2, 1, 0, 3).repeat(2, 1, 1, 1), v=k_of().permute(2, 1, 0, 3).repeat(2, 1, 1, 1)),
]

PACKED = [
    *(bad("flash_attn_kvpacked_func", TypeError, "kv", "torch.Tensor", type(value).__name__, kv=value)
      for value in (None, [1], (k_of(), k_of()))),
    *(bad("flash_attn_qkvpacked_func", TypeError, "qkv", "torch.Tensor", type(value).__name__, qkv=value)
      for value in (None, (q_of(), q_of(), q_of()))),
    *(bad("flash_attn_varlen_kvpacked_func", TypeError, "kv", "torch.Tensor", type(value).__name__, kv=value)
      for value in (None, 1.0)),
    *(bad("flash_attn_varlen_qkvpacked_func", TypeError, "qkv", "torch.Tensor", type(value).__name__,
          qkv=value)
      for value in (None, "qkv")),
    *(bad("flash_attn_kvpacked_func", ValueError, "kv", "(batch, seqlen_k, 2, heads_kv, head_dim)",
          str(shape),
          kv=rand(*shape)) for shape in ((), (16,), (2, 7, 2, 16), (2, 7, 3, 2, 16), (2, 7, 2, 1, 2, 16))),
    *(bad("flash_attn_qkvpacked_func", ValueError, "qkv", "(batch, seqlen, 3, heads, head_dim)", str(shape),
          qkv=rand(*shape)) for shape in ((), (2, 5, 3, 16), (2, 5, 2, 4, 16), (2, 3, 5, 4, 16))),
    *(bad("flash_attn_varlen_kvpacked_func", ValueError, "kv", "(total_k, 2, heads_kv, head_dim)", str(shape),
          kv=rand(*shape)) for shape in ((14, 2, 16), (14, 3, 2, 16), (2, 7, 2, 2, 16))),
    *(bad("flash_attn_varlen_qkvpacked_func", ValueError, "qkv", "(total, 3, heads, head_dim)", str(shape),
          qkv=rand(*shape)) for shape in ((10, 3, 16), (10, 2, 4, 16), (2, 5, 3, 4, 16))),
    bad("flash_attn_qkvpacked_func", TypeError, "qkv", "dense (strided)", "sparse", qkv=rand(2, 5, 3, 4,
        16).to_sparse()),
    bad("flash_attn_kvpacked_func", TypeError, "kv", "dense (strided)", "nested",
        kv=nested((3, 2, 2, 16), (4, 2, 2, 16))),
    bad("flash_attn_qkvpacked_func", TypeError, "q", "float16, bfloat16", "int64",
        qkv=rand(2, 5, 3, 4, 16, dtype=torch.int64)),
    bad("flash_attn_kvpacked_func", TypeError, "kv has dtype torch.float16", "q has torch.float32",
        kv=rand(2, 7, 2, 2, 16, dtype=torch.float16)),
    bad("flash_attn_kvpacked_func", ValueError, "q has 4 heads", "multiple of the 3 heads of k", kv=rand(2,
        7, 2, 3, 16)),
    bad("flash_attn_kvpacked_func", ValueError, "kv has batch size 3", "q has 2", kv=rand(3, 7, 2, 2, 16)),
    bad("flash_attn_varlen_qkvpacked_func", TypeError, "cu_seqlens", "int32", "None", cu_seqlens=None),
    bad("flash_attn_varlen_qkvpacked_func", TypeError, "cu_seqlens", "int32", "int16",
        cu_seqlens=offsets(0, 5, 10, dtype=torch.int16)),
    *(bad("flash_attn_varlen_qkvpacked_func", TypeError, "cu_seqlens must be", "torch.Tensor", "got",
          cu_seqlens=value) for value in (None, [0, 5], "cu_seqlens_q")),
    bad("flash_attn_varlen_qkvpacked_func", TypeError, "max_seqlen must be", "with cu_seqlens,", "None",
        max_seqlen=None),
    bad("flash_attn_varlen_qkvpacked_func", TypeError, "max_seqlen must be", "float", max_seqlen=1.5),
    bad("flash_attn_varlen_qkvpacked_func", TypeError, "qkv must be float16", "int64",
        qkv=rand(10, 3, 4, 16, dtype=torch.int64)),
    bad("flash_attn_varlen_qkvpacked_func", ValueError, "max_seqlen", "from 0", "-1", max_seqlen=-1),
    bad("flash_attn_varlen_qkvpacked_func", ValueError, "cu_seqlens", "10", "11", on_data=True,
        cu_seqlens=offsets(0, 5, 11), max_seqlen=6),
]

OFFSETS = {"cu_seqlens_q": (SEQLEN_Q, TOTAL_Q), "cu_seqlens_k": (SEQLEN_K, TOTAL_K)}
LENGTHS = [
    *(bad(VARLEN, TypeError, name, "int32 torch.Tensor", "got None", **{name: None}) for name in OFFSETS),
    *(bad(VARLEN, TypeError, name, "torch.Tensor", type(value).__name__, **{name: value})
      for name in OFFSETS for value in ([0, 5, 10], (0, 5), 10, np.array([0, 5, 10], np.int32))),
    *(bad(VARLEN, TypeError, name, "int32", str(dtype), **{name: offsets(0, one, total, dtype=dtype)})
      for name, (one, total) in OFFSETS.items()
      for dtype in (torch.int16, torch.float32, torch.bool, torch.uint8)),
    *(bad(VARLEN, ValueError, name, "(batch + 1,)", str(tuple(value.shape)), **{name: value})
      for name in OFFSETS for value in (offsets(0, 5, 10)[None], torch.tensor(0, dtype=torch.int32))),
    *(bad(VARLEN, ValueError, name, "(batch + 1,)", **{name: offsets()}) for name in OFFSETS),
    *(bad(VARLEN, ValueError, name, "contiguous", "stride", **{name: offsets(0, 0, one, 0, total)[::2]})
      for name, (one, total) in OFFSETS.items()),
    *(bad(VARLEN, ValueError, name, "on meta", "not on cpu", "one device", **{name: offsets(0, 5,
          10).to("meta")})
      for name in OFFSETS),
    *(bad(VARLEN, TypeError, name, "dense (strided)", "sparse", **{name: offsets(0, 5, 10).to_sparse()})
      for name in OFFSETS),
    bad(VARLEN, ValueError, "cu_seqlens_k has 3", "cu_seqlens_q has 4", "batch + 1",
        cu_seqlens_q=offsets(0, 5, 7, 10)),
    bad(VARLEN, ValueError, "cu_seqlens_k has 2", "cu_seqlens_q has 3", "batch + 1",
        cu_seqlens_k=offsets(0, 14),
        max_seqlen_k=14),
    *(bad(VARLEN, ValueError, name, "start with 0", "got 1", on_data=True, **{name: offsets(1, one, total)})
      for name, (one, total) in OFFSETS.items()),
    *(bad(VARLEN, ValueError, name, "start with 0", "got -1", on_data=True, **{name: offsets(-1, one - 1,
          total)})
      for name, (one, total) in OFFSETS.items()),
    *(bad(VARLEN, ValueError, name, "not decrease", "4 then 3", "entry 2", on_data=True,
          **{name: offsets(0, 4, 3)})
      for name in OFFSETS),
    *(bad(VARLEN, ValueError, name, "end within", f"{total} tokens", f"got {total + 1}", on_data=True,
          **{name: offsets(0, one + 1, total + 1), f"max_seqlen_{name[-1]}": one + 1})
      for name, (one, total) in OFFSETS.items()),
    *(bad(VARLEN, ValueError, name, f"{one} tokens", f"max_seqlen_{name[-1]} = {one - 1}", on_data=True,
          **{f"max_seqlen_{name[-1]}": one - 1}) for name, (one, _) in OFFSETS.items()),
    *(bad(VARLEN, TypeError, name, "int", *words, **{name: value})
      for name in ("max_seqlen_q", "max_seqlen_k")
      for value, words in ((None, ("None",)), (7.0, ("float 7.0",)), ("7", ("str '7'",)), (True,
                           ("bool True",)),
                           (Fraction(7), ("Fraction",)), ([7], ("list [7]",)), (NAN, ("float nan",)),
                           (np.float32(7), ("float32",)), (torch.tensor(7.0), ("torch.float32",)),
                           (torch.tensor([7, 7]), ("torch.int64 tensor of 1 dim",)),
                           (torch.tensor(True), ("torch.bool",)))),
    *(bad(VARLEN, ValueError, name, "from 0 to", str(value), **{name: value})
      for name in ("max_seqlen_q", "max_seqlen_k") for value in (-1, -7, 2**31)),
    *(bad(VARLEN, ValueError, name, "from 0 to", str(10**30), untraceable=True, **{name: 10**30})
      for name in ("max_seqlen_q", "max_seqlen_k")),
    *(bad(("attention",), ValueError, name, "must be None", "cu_seqlens", **{name: 7})
      for name in ("max_seqlen_q", "max_seqlen_k")),
    *(bad(("attention",), ValueError, "q", "3 dimensions", **{name: offsets(0, 5,
          10)}) for name in OFFSETS),
    bad(("attention varlen",), ValueError, "q", "4 dimensions", cu_seqlens_q=None,
        cu_seqlens_k=None),
]

OPTIONS = [
    *(bad(ALL, TypeError, "return_lse must be True or False", type(value).__name__, return_lse=value)
      for value in (1, None, "yes")),
    *(bad(ALL, TypeError, f"{name} must be True or False", type(value).__name__, **{name: value})
      for name in ("return_max_logits", "return_entropy") for value in (1, None)),
    *(bad(FLASH_ATTN, TypeError, "return_attn_probs must be True or False", type(value).__name__,
          return_attn_probs=value) for value in (0, "no")),
    *(bad(ALL, TypeError, "softmax_scale", "number or None", *words, softmax_scale=value)
      for value, words in (("0.1", ("str '0.1'",)), (True, ("bool True",)), ([0.1], ("list",)), (1j,
                           ("complex",)),
                           (torch.tensor(0.1), ("torch.float32 tensor",)), (np.ones(1), ("ndarray",)))),
    *(bad(ALL, ValueError, "softmax_scale", "finite", *words, softmax_scale=value)
      for value, words in ((NAN, ("nan",)), (INF, ("inf",)), (-INF, ("-inf",)), (1e39, ("1e+39",)))),
    *(bad(ALL, ValueError, "softmax_scale", "finite", word, untraceable=True, softmax_scale=value)
      for value, word in ((10**400, "int"), (np.float32("nan"), "nan"))),
    *(bad(ALL, TypeError, "softcap", "number", *words, softcap=value)
      for value, words in (("30", ("str '30'",)), (None, ("None",)), (True, ("bool True",)), ([30.0],
                           ("list",)),
                           (torch.tensor(30.0), ("torch.float32 tensor",)))),
    *(bad(ALL, ValueError, "softcap", "at least 0", *words, softcap=value)
      for value, words in ((-1, ("-1",)), (-1e-30, ("-1e-30",)), (NAN, ("nan",)), (INF, ("inf",)), (-INF,
                           ("-inf",)))),
    *(bad(ALL, TypeError, name, "True or False", *words, **{name: value})
      for name in ("causal", "deterministic")
      for value, words in (("yes", ("str 'yes'",)), ("", ("str ''",)), (None, ("None",)), (1, ("int 1",)),
                           (0, ("int 0",)),
                           (1.0, ("float 1.0",)), (torch.tensor(True), ("torch.bool tensor",)), ([],
                             ("list []",)))),
    *(bad(ALL, TypeError, "window_size", "pair (left, right)", *words, window_size=value)
      for value, words in ((None, ("None",)), (5, ("int 5",)), (True, ("bool",)))),
    bad(ALL, TypeError, "window_size", "pair (left, right)", "torch.int64", untraceable=True,
        window_size=torch.tensor(3)),
    *(bad(ALL, ValueError, "window_size", "pair (left, right)", *words, window_size=value)
      for value, words in (((), ("()",)), ((1,), ("(1,)",)), ((1, 2, 3), ("(1, 2, 3)",)), ("abc", ("'abc'",)),
                           (torch.tensor([1, 2, 3]), ("torch.int64",)))),
    *(bad(ALL, TypeError, f"window_size[{side}]", "int", *words, window_size=(value,
          0) if side == 0 else (0, value))
      for side in (0, 1)
      for value, words in ((1.0, ("float 1.0",)), (None, ("None",)), ("4", ("str '4'",)), (True,
                           ("bool True",)),
                           ([4], ("list",)), (NAN, ("nan",)), (np.float64(4), ("float64",)),
                           (torch.tensor(4.0), ("torch.float32",)), (torch.tensor(False), ("torch.bool",)))),
    *(bad(ALL, ValueError, f"window_size[{side}]", "from -1 (unlimited)", str(2**31),
          window_size=(2**31, 0) if side == 0 else (0, 2**31)) for side in (0, 1)),
    *(bad(ALL, ValueError, f"window_size[{side}]", "from -1 (unlimited)", str(2**70), untraceable=True,
          window_size=(2**70, 0) if side == 0 else (0, 2**70)) for side in (0, 1)),
    *(bad(ALL, ValueError, "backend", "None or one of hopper, portable, cpu", repr(value), backend=value)
      for value in ("", "triton", "CPU", "cpu ", "portable,cpu")),
    *(bad(ALL, TypeError, "backend", "None or", *words, backend=value)
      for value, words in ((0, ("int 0",)), (b"cpu", ("bytes",)), (["cpu"], ("list",)),
                           (torch.device("cpu"), ("device",)))),
    bad(ALL, NotImplementedError, "portable", "run on GPUs", "cpu", backend="portable"),
]

FLASH_ATTN_ONLY = [
    *(bad(ALL, ValueError, "dropout_p", "from 0 to below 1", str(value), dropout_p=value)
      for value in (1, -0.5, 1.5, NAN)),
    *(bad(ALL, TypeError, "dropout_p", "number", word, dropout_p=value)
      for value, word in ((None, "None"), ("0.0", "str"), (torch.tensor([0.0, 0.1]), "tensor"),
                          (True, "bool"))),
    bad("flash_attn_varlen_func", ValueError, "k must have 4 dimensions", "(num_blocks, page_size",
        block_table=torch.zeros(2, 1, dtype=torch.int32)),
    bad("flash_attn_varlen_func", TypeError, "block_table", "torch.Tensor", "list", block_table=[[0]],
        k=k_of(), v=k_of()),
    bad("flash_attn_varlen_func", TypeError, "block_table must be int32", "torch.int64",
        block_table=torch.zeros(2, 1, dtype=torch.int64), k=k_of(), v=k_of()),
    bad("flash_attn_varlen_func", ValueError, "block_table", "batch = 2", "(3, 1)",
        block_table=torch.zeros(3, 1, dtype=torch.int32), k=k_of(), v=k_of()),
]

ALIBI = [
    *(bad(DENSE + VARLEN, TypeError, "alibi_slopes", "torch.Tensor", type(value).__name__, alibi_slopes=value)
      for value in ([0.5] * HEADS, 0.5, True, np.ones(HEADS, np.float32))),
    *(bad(DENSE + VARLEN, TypeError, "alibi_slopes", "float32", str(dtype), alibi_slopes=rand(HEADS,
          dtype=dtype))
      for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32)),
    *(bad(DENSE + VARLEN, ValueError, "alibi_slopes", "(4,)", "(2, 4)", f"got {shape}",
          alibi_slopes=rand(*shape))
      for shape in ((), (3,), (HEADS_KV,), (1, HEADS), (3, HEADS), (BATCH, 3), (HEADS, BATCH), (1, BATCH,
        HEADS))),
    bad(DENSE + VARLEN, ValueError, "alibi_slopes", "on meta", "not on cpu", alibi_slopes=rand(HEADS,
        device="meta")),
    bad(DENSE + VARLEN, ValueError, "alibi_slopes", "stride 1", "(2,)", alibi_slopes=rand(2 * HEADS)[::2]),
    bad(DENSE + VARLEN, ValueError, "alibi_slopes", "stride 1", "(1, 2)", alibi_slopes=rand(HEADS, BATCH).T),
    bad(DENSE + VARLEN, TypeError, "alibi_slopes", "dense (strided)", "sparse",
        alibi_slopes=rand(HEADS).to_sparse()),
    bad(VARLEN, NotImplementedError, "alibi_slopes", "no gradient", "detached",
        alibi_slopes=rand(HEADS).requires_grad_()),
]

SINK = [
    *(bad(EVERY_FORM, TypeError, "sink", "torch.Tensor", type(value).__name__, sink=value)
      for value in ([0.5] * HEADS, 0.5, True, np.ones(HEADS, np.float32))),
    *(bad(EVERY_FORM, TypeError, "sink", "must be float32", str(dtype),
          sink=rand(HEADS, dtype=dtype))
      for dtype in (torch.float16, torch.float64, torch.int32)),
    *(bad(EVERY_FORM, ValueError, "sink", "(heads_q,) = (4,)", f"got {shape}", sink=rand(*shape))
      for shape in ((), (3,), (HEADS_KV,), (1, HEADS), (BATCH, HEADS), (HEADS, 1))),
    bad(EVERY_FORM, ValueError, "sink", "on meta", "not on cpu", sink=rand(HEADS, device="meta")),
    bad(EVERY_FORM, ValueError, "sink", "stride 1", "strides (2,)", "contiguous()",
        sink=rand(2 * HEADS)[::2]),
    bad(EVERY_FORM, TypeError, "sink", "dense (strided)", "sparse", sink=rand(HEADS).to_sparse()),
]

USED = [
    *(bad(WITH_SEQUSED, TypeError, "seqused_k", "torch.Tensor", type(value).__name__, seqused_k=value)
      for value in ([7, 7], 7, np.array([7, 7], np.int32))),
    *(bad(WITH_SEQUSED, TypeError, "seqused_k", "int32", str(dtype), seqused_k=offsets(7, 7, dtype=dtype))
      for dtype in (torch.int64, torch.int16, torch.float32, torch.bool)),
    *(bad(WITH_SEQUSED, ValueError, "seqused_k", "(batch,) = (2,)", f"got {tuple(value.shape)}",
          seqused_k=value)
      for value in (offsets(), offsets(7), offsets(0, 7, 14), offsets(7, 7)[None], offsets(7, 7)[0])),
    bad(WITH_SEQUSED, ValueError, "seqused_k", "contiguous", "strides (2,)",
        seqused_k=offsets(7, 0, 7, 0)[::2]),
    bad(WITH_SEQUSED, ValueError, "seqused_k", "on meta", "not on cpu", seqused_k=offsets(7, 7).to("meta")),
    bad(WITH_SEQUSED, TypeError, "seqused_k", "dense (strided)", "sparse",
        seqused_k=offsets(7, 7).to_sparse()),
    *(bad(("attention", "attention varlen"), TypeError, "seqused_q", "int32", str(dtype),
          seqused_q=offsets(5, 5, dtype=dtype)) for dtype in (torch.int64, torch.float32)),
    *(bad(("attention", "attention varlen"), ValueError, "seqused_q", "(batch,) = (2,)", f"got {shape}",
          seqused_q=rand(*shape, dtype=torch.int32)) for shape in ((1,), (3,), (2, 1))),
    bad(WITH_SEQUSED, ValueError, "seqused_k", "from 0 to the 7 keys of sequence 1", "got 8", on_data=True,
        seqused_k=offsets(7, 8)),
    bad(WITH_SEQUSED, ValueError, "seqused_k", "from 0 to the 7 keys of sequence 0", "got -1", on_data=True,
        seqused_k=offsets(-1, 7)),
]

BIAS = [
    *(bad(("attention", "attention varlen"), TypeError, "bias must be float32", str(dtype),
          bias=rand(1, 1, 5, 7, dtype=dtype)) for dtype in (torch.float16, torch.float64, torch.bool)),
    *(bad("attention", ValueError, "bias must broadcast to", "(2, 4, 5, 7)", f"got {shape}",
          bias=rand(*shape))
      for shape in ((5, 6), (2, 3, 5, 7), (1, 1, 1, 5, 7))),
    bad(("attention",), ValueError, "bias", "on meta", "not on cpu", bias=rand(1, 1, 5, 7, device="meta")),
    bad(("attention", "attention varlen"), TypeError, "bias", "dense (strided)", "sparse",
        bias=rand(5, 1).to_sparse()),
    bad(("attention", "attention varlen"), TypeError, "bias", "dense (strided)", "nested",
        bias=nested((5, 7), (4, 7))),
]

STATE = [
    bad("attention", TypeError, "rng_state must be int64", "float32", dropout_p=0.1, rng_state=rand(2)),
    bad("attention", ValueError, "rng_state must have shape (2,)", "(3,)", dropout_p=0.1,
        rng_state=rand(3, dtype=torch.int64)),
    bad("attention", ValueError, "rng_state", "on meta", dropout_p=0.1,
        rng_state=rand(2, dtype=torch.int64, device="meta")),
]

MASKS = [
    *(bad(("attention", "attention varlen"), TypeError, "mask", "torch.Tensor", type(value).__name__,
          mask=value)
      for value in ([True], True, np.ones((1, 1, 5, 7), bool))),
    *(bad(("attention", "attention varlen"), TypeError, "mask must be bool", str(dtype),
          mask=rand(1, 1, 5, 7, dtype=dtype)) for dtype in (torch.float32, torch.uint8, torch.int64)),
    *(bad("attention", ValueError, "mask must broadcast to", "(2, 4, 5, 7)", f"got {shape}",
          mask=rand(*shape, dtype=torch.bool))
      for shape in ((5,), (2, 2, 5, 7), (3, 1, 5, 7), (1, 1, 4, 7), (1, 1, 1, 5, 7), (2, 1, 1, 6),
                    (3, 1, 1, 7))),
    bad("attention varlen", ValueError, "mask", "max_seqlen_q, max_seqlen_k", "got (1, 1, 10, 14)",
        mask=rand(1, 1, 10, 14, dtype=torch.bool)),
    bad(("attention",), ValueError, "mask", "on meta", "not on cpu",
        mask=rand(1, 1, 5, 7, dtype=torch.bool, device="meta")),
    bad(("attention", "attention varlen"), TypeError, "mask", "dense (strided)", "sparse",
        mask=rand(5, 1, dtype=torch.bool).to_sparse()),
    bad(("attention", "attention varlen"), TypeError, "mask", "dense (strided)", "nested",
        mask=nested((5, 7), (4, 7)).bool()),
    *(bad("attention", TypeError, "key_padding_mask must be bool", str(dtype),
          key_padding_mask=rand(2, 7, dtype=dtype)) for dtype in (torch.float32, torch.int64)),
    *(bad("attention", ValueError, "key_padding_mask", "(batch, seqlen_k) = (2, 7)", f"got {shape}",
          key_padding_mask=rand(*shape, dtype=torch.bool)) for shape in ((7,), (1, 7), (2, 5), (2, 1, 1, 7))),
    bad("attention varlen", NotImplementedError, "key_padding_mask must be None", "seqused_k",
        key_padding_mask=rand(2, 7, dtype=torch.bool)),
]

MERGE = [
    *(bad("merge_states", TypeError, name, "torch.Tensor", type(value).__name__, **{name: value})
      for name in ("out_a", "lse_a", "out_b", "lse_b") for value in (None, [0.0], 1.0)),
    *(bad("merge_states", TypeError, name, "dense (strided)", "sparse", **{name: q_of().to_sparse()})
      for name in ("out_a", "lse_a", "out_b", "lse_b")),
    *(bad("merge_states", ValueError, name, "on meta", "out_a is on cpu", "one device",
          **{name: q_of(device="meta")})
      for name in ("lse_a", "out_b", "lse_b")),
    *(bad("merge_states", ValueError, "out_a", "(total, heads, head_dim)", str(shape), out_a=rand(*shape))
      for shape in ((), (5, 16), (1, 2, 5, 4, 16))),
    *(bad("merge_states", TypeError, "out_a", "float16, bfloat16, float32 or float64", str(dtype),
          out_a=q_of(dtype=dtype))
      for dtype in (torch.int32, torch.complex64, FLOAT8)),
    *(bad("merge_states", ValueError, "out_b", str(shape), "out_a has (2, 5, 4, 16)", "equal",
          out_b=rand(*shape))
      for shape in ((2, 5, 4, 8), (1, 5, 4, 16), (5, 4, 16))),
    bad("merge_states", TypeError, "out_b", "float16", "out_a has torch.float32", "equal",
        out_b=q_of(dtype=torch.float16)),
    *(bad("merge_states", ValueError, "lse_a", "(2, 4, 5)", str(shape), lse_a=rand(*shape))
      for shape in ((2, 5, 4), (4, 5), (2, 4, 5, 1), (2, 4, 6))),
    bad("merge_states", ValueError, "lse_b", "(2, 5, 4)", "lse_a has (2, 4, 5)", "equal", lse_b=rand(2, 5,
        4)),
    *(bad("merge_states", TypeError, "lse_a", "float32 or float64", str(dtype), lse_a=rand(2, 4, 5,
          dtype=dtype))
      for dtype in (torch.float16, torch.bfloat16, torch.int64)),
    bad("merge_states", TypeError, "lse_b", "float64", "lse_a has torch.float32", "equal",
        lse_b=rand(2, 4, 5, dtype=torch.float64)),
]  # fmt: skip

CALLS = [
    *TENSORS, *SHAPES, *PACKED, *LENGTHS, *OPTIONS, *FLASH_ATTN_ONLY, *ALIBI, *SINK, *USED, *MASKS, *BIAS,
    *STATE, *MERGE,
]
# fmt: on
