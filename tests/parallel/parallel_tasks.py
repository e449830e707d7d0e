"""What the ranks of the tests compute."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flashtile
from flashtile import parallel, reference


def compare(
    group: Any,
    *,
    tokens: tuple[int, int] = (50, 50),
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    batch: int = 2,
    documents: tuple[list[int], list[int]] | None = None,
    sink: bool = False,
    layout: str = "zigzag",
    method: str = "auto",
    mesh: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float64,
    **mask: Any,
) -> dict[str, float]:
    """Largest error of out, lse and every gradient of all ranks together, against one device."""
    torch.manual_seed(0)
    batch = 1 if documents else batch
    shapes = [(tokens[0], heads[0], sizes[0]), (tokens[1], heads[1], sizes[0]), (tokens[1], heads[1], sizes[1])]
    whole = [torch.randn(batch, *shape, dtype=dtype) for shape in shapes]
    dout = torch.randn(batch, tokens[0], heads[0], sizes[1], dtype=dtype)
    dlse = torch.randn(batch, heads[0], tokens[0], dtype=dtype)
    of_sink = [torch.randn(heads[0], dtype=dtype)] if sink else []
    dim, over = 1, group
    packed: dict[str, Any] = {}
    if documents:
        whole, dout, dlse, dim = [t[0] for t in whole], dout[0], dlse[0], 0
        packed = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), map(_offsets, documents), strict=True))
    where: dict[str, Any] = {"group": group}
    if mesh is not None:
        over = None
        where = {"mesh": _mesh(mesh)}
    cut = [parallel.shard(t, dim, over, layout, mesh=where.get("mesh")) for t in (*whole, dout)]
    part_dlse = parallel.shard(dlse, -1, over, layout, mesh=where.get("mesh"))
    own = [t.clone().requires_grad_() for t in (*cut[:3], *of_sink)]
    out, lse = parallel.context_parallel_attention(
        *own[:3], sink=own[3] if sink else None, layout=layout, method=method, return_lse=True, timeout=60,
        **where, **packed, **mask,
    )  # fmt: skip
    gradients = torch.autograd.grad([out, lse], own, [cut[3], part_dlse])

    leaves = [t.clone().requires_grad_() for t in (*whole, *of_sink)]
    if packed:
        packed |= {"max_seqlen_q": tokens[0], "max_seqlen_k": tokens[1]}
    if sink:
        mask["sink"] = leaves[3]
    exact = reference.attention(*leaves[:3], **packed, **mask)
    expected = [*exact, *torch.autograd.grad(exact, leaves, [dout, dlse])]
    if sink:
        total = gradients[3].clone()
        dist.all_reduce(total, group=group if mesh is None else None)
        gradients = (*gradients[:3], total)
    dims = [dim, -1, dim, dim, dim]
    errors = {}
    for name, got, right, along in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), expected, dims, strict=False
    ):
        part = parallel.shard(right, along, over, layout, mesh=where.get("mesh"))
        assert got.shape == part.shape, f"{name}: {tuple(got.shape)} instead of {tuple(part.shape)}"
        errors[name] = _error(got, part)
    if sink:
        errors["dsink"] = _error(gradients[3], expected[5])
    return errors


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _error(got: Tensor, right: Tensor) -> float:
    if not got.numel():
        return 0.0
    both = (got == right) | (got - right).abs().isfinite()
    return float("inf") if not both.all() else (got - right).nan_to_num(0.0).abs().max().item()


_meshes: dict[tuple[int, int], Any] = {}


def _mesh(shape: tuple[int, int]) -> Any:
    if shape not in _meshes:
        _meshes[shape] = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    return _meshes[shape]
