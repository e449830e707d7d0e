"""Attention by torch's flash kernel for the CPU: one call, or one per block of rows where it lacks the mask.

Why this kernel: the two products alone take 0.37 of standard attention's time, it takes 0.44, and the best
loop of torch functions takes 0.55 (one Zen 4 core, fp32, S 4096; benchmarks/results/experiments/cpu.json).
Why torch's private function: ``scaled_dot_product_attention`` runs the same kernel, but returns no lse.

The kernel has one mask, causal, which is aligned to the top left. This equals bottom-right alignment only if
there are as many queries as keys. For other masks by position and for ALiBi, each block of rows attends to
the keys within its window, with a bias (BLOCK_M, keys): minus the ALiBi slope times the distance, or -inf for
hidden scores. This bias is constant along diagonals. So the biases of all blocks are views of one table,
whose columns are the distances from a block's first row.

First comes what a call does (:func:`forward`, :func:`backward`), then its blocks, then the kernel in this
library's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.backends.cpu.config import Fused
from flashtile.backends.cpu.parts import OptionalInputs
from flashtile.problems.attention import Problem
from flashtile.problems.common import UNLIMITED
from flashtile.problems.masking import Masking, positions, split
from flashtile.torch_private import cpu_flash_backward, cpu_flash_forward

CONVERTED_ELEMENTS = 2 * 1024 * 1024
"""Elements of k that are converted to another dtype at a time, 8 MiB in float32. The allocator then reuses
memory, which makes one bfloat16 query over 4096 keys 3x as fast (Zen 4)."""

NARROW_TILE = 64
"""At least twice the elements of a vector register. Rows that see as many keys never lose NaN."""


def prepare_dense_forward(problem: Problem, config: Fused) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function ``(q, k, v, extras) -> (out, lse)`` for tensors with the lengths of ``problem``.

    Decisions that depend on the lengths are made here, not in each call.
    """
    causal = _kernel_mask(problem, problem.batch, problem.seqlen_q, problem.seqlen_k)
    if causal is None or (problem.seqlen_q == 1 and problem.group_size > 1):
        return lambda q, k, v, extras: forward(problem, config, q, k, v, OptionalInputs.of(problem, extras))
    dtype, scale = config.compute_dtype, problem.softmax_scale
    return lambda q, k, v, extras: attend(dtype, q, k, v, causal, scale)


def forward(
    problem: Problem, config: Fused, q: Tensor, k: Tensor, v: Tensor, optional: OptionalInputs
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ...)."""
    dtype, scale, group = config.compute_dtype, problem.softmax_scale, problem.group_size
    causal = _kernel_mask(problem, q.shape[0], q.shape[1], k.shape[1])
    if causal is not None and q.shape[1] == 1 and group > 1:
        # The kernel would read the keys once for each query head. As queries of one head, the query heads of
        # a group read them once.
        by_groups = q[:, 0].unflatten(1, (-1, group)).transpose(1, 2)
        out, lse = attend(dtype, by_groups, k, v, False, scale)
        return out.transpose(1, 2).reshape(q.shape).detach(), lse.flatten(1)[:, :, None].detach()
    if causal is not None:
        return attend(dtype, q, k, v, causal, scale)
    out = q.new_zeros(q.shape)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=problem.lse_dtype)
    for block in _blocks(problem, config, q, k, optional.alibi_slopes):
        out[block.queries], lse[block.statistics] = attend(
            dtype, q[block.queries], k[block.keys], v[block.keys], False, scale, block.bias
        )
    return out, lse


def backward(
    problem: Problem,
    config: Fused,
    dout: Tensor,
    dlse: None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    optional: OptionalInputs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv), contiguous, from the gradient of out."""
    dtype, scale = config.compute_dtype, problem.softmax_scale
    causal = _kernel_mask(problem, q.shape[0], q.shape[1], k.shape[1])
    if causal is not None:
        dq, dk, dv = differentiate(dtype, dout, q, k, v, out, lse, causal, scale)
        if q.dtype == dtype == dk.dtype:
            return dq, dk, dv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    dq = q.new_zeros(q.shape)
    # A key gets a term from each block of rows that sees it, so the sum needs at least float32.
    dk, dv = (t.new_zeros(t.shape, dtype=problem.lse_dtype) for t in (k, v))
    for block in _blocks(problem, config, q, k, optional.alibi_slopes):
        rows, keys = block.queries, block.keys
        tensors = dout[rows], q[rows], k[keys], v[keys], out[rows], lse[block.statistics]
        dq[rows], dk_term, dv_term = differentiate(dtype, *tensors, False, scale, block.bias)
        dk[keys] += dk_term
        dv[keys] += dv_term
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _kernel_mask(problem: Problem, batch: int, seqlen_q: int, seqlen_k: int) -> bool | None:
    """Return the kernel's ``is_causal``; None if a length is 0 or the kernel does not support the mask."""
    if problem.alibi or batch == 0 or seqlen_q == 0 or seqlen_k == 0:
        return None
    left, right = problem.effective_window(seqlen_q, seqlen_k)
    if left != UNLIMITED:
        return None
    if right == UNLIMITED:
        return False
    return True if right == 0 and seqlen_q == seqlen_k else None


class _Block(NamedTuple):
    """Indices of one call of the kernel, and its bias (1, heads or 1, rows, keys).

    The bias is None if the call needs no bias.
    """

    queries: tuple[slice, slice, slice]  # into q and out
    keys: tuple[slice, slice, slice]  # into k and v
    statistics: tuple[slice, slice, slice]  # into lse
    bias: Tensor | None


def _blocks(
    problem: Problem, config: Fused, q: Tensor, k: Tensor, alibi_slopes: Tensor | None
) -> Iterator[_Block]:
    """Yield the calls of the kernel that compute all rows which see a key."""
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    masking: Masking = problem
    offset = seqlen_k - seqlen_q
    own = masking.row_range(positions(seqlen_q, seqlen_k), range(seqlen_k))
    all_rows = range(own.start - offset, own.stop - offset)
    if not all_rows:
        return
    block_m = min(config.BLOCK_M, len(all_rows))
    # Distances from a block's first row to the keys that its rows see. Within these bounds lie those of all
    # blocks: the last row is farthest from the first key, and the first row from the last key.
    distances = masking.key_range(range(block_m), range(-(own.stop - 1), seqlen_k - own.start))
    heads_kv = range(k.shape[2])
    if alibi_slopes is None:
        parts = [(slice(0, batch), heads_kv)]
    else:
        # Each head needs its own table of biases. If the slopes differ between sequences, each sequence also
        # needs its own tables. A few heads are computed at a time, to bound the size of the tables.
        heads = max(1, config.TABLE_ELEMENTS // (block_m * len(distances) * problem.group_size))
        sequences = split(range(batch), 1 if alibi_slopes.dim() == 2 else max(1, batch))
        parts = [(_slice(b), h) for b in sequences for h in split(heads_kv, heads)]
    for sequence, part in parts:
        heads_q = slice(part.start * problem.group_size, part.stop * problem.group_size)
        slopes = None if alibi_slopes is None else alibi_slopes.expand(batch, -1)[sequence.start, heads_q]
        table = _table(masking, distances, block_m, slopes, config.compute_dtype)
        for rows in split(all_rows, block_m):
            at = range(rows.start + offset, rows.stop + offset)
            keys = masking.key_range(at, range(seqlen_k))
            unbiased = slopes is None and masking.sees_all(at, keys)
            first = keys.start - at.start - distances.start
            yield _Block(
                (sequence, _slice(rows), heads_q),
                (sequence, _slice(keys), _slice(part)),
                (sequence, heads_q, _slice(rows)),
                None if unbiased else table[:, :, : len(rows), first : first + len(keys)],
            )


def _table(
    masking: Masking, distances: range, block_m: int, slopes: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return a table of the biases for a block of rows, (1, heads or 1, block_m, distances).

    Its last dimension is the distance of a key from the block's first row.
    """
    rows = range(block_m)  # what a window hides, and ALiBi, depend on distances alone
    if slopes is None:
        table = torch.zeros((1, 1, block_m, len(distances)), dtype=dtype, device="cpu")
    else:
        own = torch.arange(block_m, dtype=torch.int32, device="cpu")[:, None]
        distance = torch.arange(distances.start, distances.stop, dtype=torch.int32, device="cpu") - own
        table = -slopes[None, :, None, None].to(dtype) * distance.abs().to(dtype)
    if masking.has_window:
        table.masked_fill_(masking.visible(rows, distances).logical_not_(), -torch.inf)
    return table


def _slice(extent: range) -> slice:
    return slice(extent.start, extent.stop)


def attend(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse); q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, ...).

    Computes in ``dtype``; ``bias`` (1, heads_q or 1, seqlen_q, seqlen_k) of that dtype is added to scores.
    """
    given = q.dtype
    if given != dtype:
        batch, seqlen_k, heads_kv, head_dim = k.shape
        pairs = max(CONVERTED_ELEMENTS // (seqlen_k * head_dim), torch.get_num_threads())
        if batch * heads_kv > pairs:
            return _attend_by_pairs(pairs, dtype, q, k, v, causal, scale, bias)
        q, k, v = _converted(dtype, q, k, v)
    # The kernel allocates out with the order of q's strides, so a contiguous q makes out contiguous. Rows of
    # q that overlap would even give out a last stride that the kernel ignores.
    q, k, v = q.contiguous().transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = attend_by_heads(q, k, v, causal, scale, bias)
    # It is detached because autograd forbids in-place changes of a result that is a view.
    out = out.transpose(1, 2).detach()
    return (out if given == dtype else out.to(given)), lse.contiguous()


def attend_by_heads(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Call the kernel. All tensors are (batch, heads, seqlen, head_dim) of one dtype."""
    out, lse = cpu_flash_forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    # A lost row of NaN has lse 0. Rows that see many keys cannot be lost, so most calls do not look for it.
    if (causal or bias is not None or k.shape[2] < NARROW_TILE) and not lse.all():
        _restore(out, lse, q, k, causal, scale, bias)
    return out, lse


def _restore(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, causal: bool, scale: float, bias: Tensor | None
) -> None:
    """Correct the rows, in place, in which the kernel found no score above -inf.

    When the kernel looks for the largest score, it leaves out NaN in what is left over after the last full
    vector register. A row of NaN then gets out and lse 0, as a row without visible keys does. A row whose lse
    is 0 for another reason stays.
    """
    group = q.shape[1] // k.shape[1]
    for b, h in (lse == 0).any(-1).nonzero().tolist():
        rows = (lse[b, h] == 0).nonzero()[:, 0]
        scores = (q[b, h, rows].to(lse.dtype) @ k[b, h // group].to(lse.dtype).mT) * scale
        if bias is not None:
            scores += bias[0, h % bias.shape[1], rows]
        if causal:
            scores.masked_fill_(torch.arange(k.shape[2], device=rows.device) > rows[:, None], -torch.inf)
        exact = scores.logsumexp(-1)
        lse[b, h, rows] = torch.where(exact.isfinite(), 0.0, exact)
        out[b, h, rows] = torch.where(exact.isnan()[:, None], exact[:, None].to(out.dtype), out[b, h, rows])


def _converted(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Return contiguous copies in ``dtype``.

    Copies that keep the order of strides would not have stride 1 in the last dimension if rows overlap.
    """
    return [t.to(dtype, memory_format=torch.contiguous_format) for t in tensors]


def _attend_by_pairs(
    pairs: int,
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attend` in several calls.

    Each call has at most ``pairs`` pairs of a sequence and a key/value head.
    """
    batch, seqlen_q, heads_q, _ = q.shape
    heads_kv = k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    lse = torch.empty((batch, heads_q, seqlen_q), dtype=dtype, device="cpu")
    for b in split(range(batch), max(1, pairs // heads_kv)):
        for h in split(range(heads_kv), min(pairs, heads_kv)):
            sequences, heads = slice(b.start, b.stop), slice(h.start, h.stop)
            of_group = slice(h.start * heads_q // heads_kv, h.stop * heads_q // heads_kv)
            out[sequences, :, of_group], lse[sequences, of_group] = attend(
                dtype,
                q[sequences, :, of_group],
                k[sequences, :, heads],
                v[sequences, :, heads],
                causal,
                scale,
                bias if bias is None or bias.shape[1] == 1 else bias[:, of_group],
            )
    return out, lse


def differentiate(
    dtype: torch.dtype,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) from the inputs and results of :func:`attend`.

    The gradients are contiguous, in ``dtype`` or wider.
    """
    if q.dtype != dtype:
        dout, q, k, v, out = _converted(dtype, dout, q, k, v, out)
    group = q.shape[2] // k.shape[2]
    if group == 1 or dtype.itemsize > 2:
        return _one_backward(dout, q, k, v, out, lse, causal, scale, bias)
    # The kernel sums dk and dv over the heads of a group in its own dtype, which is too coarse in 16 bits.
    # One call per head of a group costs as much in total, and the sums here are float32.
    dq = q.new_empty(q.shape)
    dk, dv = (t.new_zeros(t.shape, dtype=torch.float32) for t in (k, v))
    for head in range(group):
        of_head = slice(head, None, group)
        bias_of_head = bias if bias is None or bias.shape[1] == 1 else bias[:, of_head]
        dq[:, :, of_head], dk_term, dv_term = _one_backward(
            dout[:, :, of_head],
            q[:, :, of_head],
            k,
            v,
            out[:, :, of_head],
            lse[:, of_head],
            causal,
            scale,
            bias_of_head,
        )
        dk += dk_term
        dv += dv_term
    return dq, dk, dv


def _one_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    by_heads = (t.transpose(1, 2) for t in (dout, q, k, v, out))
    dq, dk, dv = cpu_flash_backward(*by_heads, lse, 0.0, causal, attn_mask=bias, scale=scale)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
