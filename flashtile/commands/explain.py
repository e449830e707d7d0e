"""``flashtile explain``: which backend and configuration a call would get, and why."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from torch import Tensor

from flashtile import dispatch
from flashtile.bench.workloads import DTYPES
from flashtile.commands.devices import parse_device
from flashtile.problem import UNLIMITED


def explain(
    batch: Annotated[int, typer.Option(min=0)] = 1,
    seqlen_q: Annotated[int, typer.Option(min=0)] = 1024,
    seqlen_k: Annotated[
        int | None, typer.Option(min=0, help="Default: that of q.", show_default=False)
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Default: heads.", show_default=False)] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    head_dim_v: Annotated[
        int | None, typer.Option(min=1, help="Default: head_dim.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Default: bfloat16; float32 on the CPU.", show_default=False)
    ] = None,
    causal: Annotated[bool, typer.Option("--causal")] = False,
    window_left: Annotated[int, typer.Option(help="-1 is unlimited.")] = UNLIMITED,
    window_right: Annotated[int, typer.Option(help="-1 is unlimited.")] = UNLIMITED,
    softcap: Annotated[float, typer.Option(help="0 turns it off.")] = 0.0,
    alibi: Annotated[bool, typer.Option("--alibi")] = False,
    varlen: Annotated[
        bool, typer.Option("--varlen", help="A batch of sequences behind one another.")
    ] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic")] = False,
    backend: Annotated[str | None, typer.Option(help="Insist on this backend.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu. Default: cuda if present.")] = None,
) -> None:
    """Say which backend and configuration a call would get, and each other backend's reason against.

    Nothing is launched, and the tensors take no memory.
    """
    place = parse_device(device)
    if dtype is None:
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    kv_heads = heads if kv_heads is None else kv_heads

    def tensor(seqlen: int, number: int, width: int) -> Tensor:
        rows = (batch * seqlen,) if varlen else (batch, seqlen)
        return empty_tensor((*rows, number, width), getattr(torch, dtype), place)

    q, k = tensor(seqlen_q, heads, head_dim), tensor(seqlen_k, kv_heads, head_dim)
    v = tensor(seqlen_k, kv_heads, head_dim_v or head_dim)
    offsets = torch.empty(batch + 1, dtype=torch.int32, device=place) if varlen else None
    try:
        explanation = dispatch.explain(
            q,
            k,
            v,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=seqlen_q if varlen else None,
            max_seqlen_k=seqlen_k if varlen else None,
            causal=causal,
            window_size=(window_left, window_right),
            softcap=softcap,
            alibi_slopes=torch.empty(heads, device=place) if alibi else None,
            deterministic=deterministic,
            backend=backend,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(explanation)
    if explanation.backend is None:
        raise typer.Exit(1)


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of any shape that takes the memory of its last dimension."""
    return torch.empty((1,) * (len(shape) - 1) + shape[-1:], dtype=dtype, device=device).expand(shape)
