"""A layer of the engine's model in prefill and in decode: the operations that it calls, and their shapes.

The layer runs on fake tensors, which have shapes and no data; a dispatch mode notes flashtile's operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashtile.hardware.linear_table
from flashtile.engine.config import ModelConfig
from flashtile.engine.model import Model, StepInput
from flashtile.hardware.linear_table import FLAT, LIBRARY, Row, read_table
from pictures.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, Say, box, heading, line, svg, text

LLAMA_2_7B = ModelConfig(
    "llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=1, num_heads=32,
    num_kv_heads=32, head_dim=128, norm_eps=1e-5, max_position_embeddings=4096, windows=(-1,),
    softmax_scale=128**-0.5,
)  # fmt: skip
TABLE = Path(flashtile.hardware.linear_table.__file__).with_name("linear_tables") / "nvidia_h200.json"
PROMPT, BATCH = 512, 4
COLUMN, WIDTH, HEIGHT, STEP = 350, 310, 56, 76


PARTS = {
    "norm_weight": "RMSNorm", "x_scale": "factor", "rotary_cos": "RoPE", "activation": "SwiGLU",
    "residual": "residual", "next_norm_weight": "next",
}  # fmt: skip
"""Names of the operations that a call includes if it has the argument."""


class Called(NamedTuple):
    """An operation of flashtile."""

    name: str
    x: tuple[int, ...]
    """Shape of the first tensor."""
    weight: tuple[int, ...]
    """Shape of the second, which is the weight if it has two dimensions."""
    fused: tuple[str, ...]


class Recorder(TorchDispatchMode):
    """Notes the operations of ``torch.ops.flashtile``, and torch's product that is added to a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Called] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function.namespace == "flashtile":
            names = [argument.name for argument in function._schema.arguments]
            given = {name: value for name, value in zip(names, args, strict=False) if value is not None}
            fused = [part for argument, part in PARTS.items() if argument in given]
            if "k_cache" in given and function._schema.is_mutable:
                fused.append("append")
            x, other, *_ = (tuple(value.shape) for value in args if isinstance(value, Tensor))
            self.calls.append(Called(function._schema.name.split("::")[1], x, other, tuple(fused)))
        elif function is torch.ops.aten.addmm_.default:
            _, x, columns = (tuple(value.shape) for value in args)
            self.calls.append(Called("linear", x, columns[::-1], (PARTS["residual"],)))
        return function(*args, **(kwargs or {}))


def weight(name: str) -> Tensor:
    c, part = LLAMA_2_7B, name.split(".")[-2]
    shapes = {
        "gate_proj": (c.intermediate_size, c.hidden_size), "up_proj": (c.intermediate_size, c.hidden_size),
        "down_proj": (c.hidden_size, c.intermediate_size),
        "embed_tokens": (c.vocab_size, c.hidden_size), "lm_head": (c.vocab_size, c.hidden_size),
    }  # fmt: skip
    square = (c.hidden_size, c.hidden_size)
    shape = shapes.get(part, square if part.endswith("_proj") else (c.hidden_size,))
    return torch.empty(shape, dtype=torch.bfloat16)


def integers(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32)


def calls(lengths: list[int]) -> list[Called]:
    """Return the calls of one layer, for sequences with these numbers of new tokens."""
    c, tokens, batch = LLAMA_2_7B, sum(lengths), len(lengths)
    with FakeTensorMode():
        model = Model(c, weight, c.max_position_embeddings)
        pages = torch.empty(1, 64, 16, c.num_kv_heads, c.head_dim, dtype=torch.bfloat16)
        step = StepInput(
            tokens=integers(tokens), cache_seqlens=integers(batch), block_table=integers(batch, 64),
            cu_seqlens_q=None if max(lengths) == 1 else integers(batch + 1), max_seqlen_q=max(lengths),
        )  # fmt: skip
        with Recorder() as recorder:
            model.hidden(step, pages, pages.clone())
    return recorder.calls


def slot_of(call: Called) -> str | tuple[int, ...]:
    """Return the key of a row, which shows products with one weight or operations of one name."""
    return call.weight if len(call.weight) == 2 else call.name


def column(
    x: float,
    title: str,
    called: list[Called],
    slots: list[str | tuple[int, ...]],
    rows: dict[tuple[int, ...], Row],
    say: Say,
) -> Iterator[str]:
    """The operations in their order, downwards."""
    products = [
        say("Q, K, V projection", "Q、K、V 投影"), say("O projection", "O 投影"),
        say("gate and up projection", "gate、up 投影"), say("down projection", "down 投影"),
    ]  # fmt: skip
    parts = {
        "append": say("append to pages", "追加到分页缓存"), "residual": say("residual", "残差"),
        "factor": say("factor of RMSNorm", "RMSNorm 的因子"),
        "next": say("weight of the next RMSNorm", "下一个 RMSNorm 的权重"),
    }  # fmt: skip
    kernels = {
        FLAT: say("flat product", "flat GEMM"),
        LIBRARY: say("library product", "库的 GEMM"),
    }
    colours = {FLAT: GREEN, LIBRARY: BLUE}
    yield heading(x, 26, title)
    above = None
    for call in called:
        y = 44 + slots.index(slot_of(call)) * STEP
        fused = [parts.get(part, part) for part in call.fused]
        if len(call.weight) == 2:
            kind = rows[call.weight].kind(call.x[0])
            colour, first = colours[kind], f"{products.pop(0)} · M = {call.x[0]}"
            second = f"[{call.weight[0]}, {call.weight[1]}] · {kernels[kind]}"
        elif fused:
            colour, first, second = PURPLE, say("write K and V", "写入 K、V"), ""
        else:
            colour, first = ORANGE, say("attention over pages", "对分页缓存做注意力")
            tokens = call.x[1] if len(call.x) == 4 else call.x[0]
            second = say(f"{tokens} queries", f"{tokens} 个查询")
            if tokens == 1:
                second = say("1 query a sequence, keys split", "每个序列 1 个查询，切分键")
        lines = [first, second, "+ " + ", ".join(fused) if fused else ""]
        yield box(x, y, WIDTH, HEIGHT, colour)
        for place, words in enumerate(filter(None, lines)):
            yield text(x + 10, y + 18 + 15 * place, words, fill="#ffffff", size=12 if place == 0 else 11)
        if above is not None:
            yield line([(x + WIDTH / 2, above + HEIGHT + 1), (x + WIDTH / 2, y - 1)], INK, tip=True)
        above = y


def picture(say: Say) -> str:
    table = [row for row in read_table(TABLE) if row.dtype == row.weight_dtype == "bfloat16"]
    rows: dict[tuple[int, ...], Row] = {(row.N, row.K): row for row in table}
    prefill, decode = calls([PROMPT]), calls([1] * BATCH)
    slots = [slot_of(call) for call in prefill]
    parts = [
        *column(
            16, say(f"Prefill: {PROMPT} tokens", f"Prefill：{PROMPT} 个 token"),
            prefill, slots, rows, say,
        ),
        *column(
            16 + COLUMN, say(f"Decode: {BATCH} sequences of 1 token", f"Decode：{BATCH} 个各 1 token 的序列"),
            decode, slots, rows, say,
        ),
    ]  # fmt: skip
    bottom = 44 + STEP * len(prefill)
    footer = say(
        "Llama-2-7B, bf16; kernels as measured on an H200", "Llama-2-7B，bf16；内核按 H200 上的实测选择"
    )
    title = say(
        "One layer in prefill and in decode: the same steps, other kernels, and in decode the projection "
        "writes K and V itself",
        "同一层在 prefill 与 decode 阶段：步骤相同，内核不同；decode 时由投影内核直接写入 K、V",
    )
    return svg(32 + COLUMN + WIDTH, bottom + 16, title, [*parts, text(16, bottom + 4, footer, size=11)])
