"""Attention, caches and linear layers in plain torch. Nothing here imports flashtile.

The functions compute in the dtype of their tensors: with float64 tensors they are the reference, with tensors in the
dtype of the call they are "plain PyTorch". ``narrow`` marks values that an implementation rounds to the dtype of the
call, ``wide`` values that it keeps in the dtype of its accumulators. In a block :func:`rounding`, both add a random
error of this size. The change of the result then tells how large an error rounding may cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_errors: dict[str, float] = {"narrow": 0.0, "wide": 0.0}


@contextmanager
def rounding(dtype, seed) -> Iterator[None]:
    """Add random errors in the block: up to half a unit of ``dtype``, and of a few units of float32 to sums.

    For float64, sums have errors of float64.
    """
    sums = torch.finfo(torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32).eps
    _errors.update(narrow=torch.finfo(dtype).eps / 2, wide=4 * sums)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
    _errors.update(narrow=0.0, wide=0.0)


def _off(x, size):
    if not size:
        return x
    return x * (1 + size * (2 * torch.rand(x.shape, dtype=torch.float64) - 1).to(x))


def narrow(x):
    return _off(x, _errors["narrow"])


def wide(x):
    return _off(x, _errors["wide"])


def seen_by(sq, sk, causal=False, window_size=(-1, -1), attention_chunk=0, device=None, leftpad=0):
    """Return (sq, sk) bool, True for visible scores; masks are aligned to the bottom right, chunks to ``leftpad``."""
    i = torch.arange(sq, device=device)[:, None] + sk - sq
    j = torch.arange(sk, device=device)
    left, right = window_size
    right = 0 if causal else right
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    if attention_chunk:
        seen &= (i - leftpad) // attention_chunk == (j - leftpad) // attention_chunk
    return seen


def _of(b, tensor):
    """Return the entry of sequence ``b`` of a tensor whose first dimension may be broadcast."""
    return tensor[b if tensor.shape[0] > 1 else 0]


def one(
    q, k, v, b=0, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    alibi_slopes=None, sink=None, mask=None, key_padding_mask=None, bias=None, score_mod=None, mask_mod=None,
    qv=None, kept=None, dropout_p=0.0, leftpad=0, own=None, first=0,
):  # fmt: skip
    """Return (out, lse, probabilities, largest score of each head, entropy of each row) of one sequence.

    q is (sq, heads, d), k (sk, heads_kv, d) and v (sk, heads_kv, dv). ``b`` is the number of the sequence, ``own`` a
    tree mask, and ``kept`` a dropout mask.
    """
    (sq, heads, d), sk = q.shape, k.shape[0]
    group = heads // k.shape[1]
    scale = (d + (0 if qv is None else v.shape[-1])) ** -0.5 if softmax_scale is None else softmax_scale
    k, v = wide(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = wide(q).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    s = q @ k.mT
    if qv is not None:
        s = s + wide(qv).transpose(0, 1) @ wide(v).mT
    s = s * scale
    if softcap:
        x = wide(s) / softcap
        y = torch.tanh(x)
        slope_off = (y.square() - wide(y).square()).detach()  # of the derivative 1 - y^2, large near y = 1
        s = softcap * (y + (x - x.detach()) * slope_off)
    h = torch.arange(heads, device=q.device)[:, None, None]
    i = torch.arange(sq, device=q.device)[:, None]
    j = torch.arange(sk, device=q.device)
    if alibi_slopes is not None:
        slopes = (_of(b, alibi_slopes) if alibi_slopes.dim() == 2 else alibi_slopes).to(q.dtype)
        s = wide(s - slopes[:, None, None] * (i + sk - sq - j).abs())
    if bias is not None:
        s = wide(s + _of(b, bias)[:, :sq, :sk].to(q.dtype))
    seen = seen_by(sq, sk, causal, window_size, attention_chunk, q.device, leftpad) & (j >= leftpad)
    if own is not None:  # a tree: the last sq keys are the queries' own
        seen = seen & torch.cat(
            [torch.ones(sq, sk - sq, dtype=torch.bool, device=q.device), own[:sq, :sq]], 1
        )
    seen = seen.expand(heads, sq, sk)
    if mask is not None:
        seen = seen & _of(b, mask)[:, :sq, :sk]
    if key_padding_mask is not None:
        seen = seen & key_padding_mask[b, :sk]
    at = [
        torch.tensor(b, device=q.device).expand_as(seen),
        h.expand_as(seen),
        i.expand_as(seen),
        j.expand_as(seen),
    ]
    if mask_mod is not None:
        seen = seen & torch.as_tensor(mask_mod(*at), device=q.device).bool()
    seen = seen & (s != -math.inf)
    if score_mod is not None:

        def modified():
            of_seen = score_mod(wide(s)[seen], *(x[seen] for x in at))
            return torch.as_tensor(of_seen, device=q.device).to(q.dtype).expand(int(seen.sum()))

        # Only visible scores: the others have a gradient of 0 even if the function gives NaN. It hides those that it
        # makes -inf.
        with torch.no_grad():
            seen = seen.masked_scatter(seen, modified() != -math.inf)
        s = torch.zeros_like(s).masked_scatter(seen, modified())
    s = torch.where(seen, wide(s), -math.inf)
    top = s.detach().amax(-1, keepdim=True) if sk else s.new_full((heads, sq, 1), -math.inf)
    sinks = None if sink is None else sink.to(q.dtype)[:, None, None].expand(heads, sq, 1)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach())
    top = torch.where(top == -math.inf, 0.0, top)
    e = torch.exp(s - top)
    total = wide(e).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    empty = total == 0
    lse = torch.where(empty, 0.0, top + torch.log(torch.where(empty, 1.0, total)))
    # A backward pass recomputes P from a score and lse. Both may be large, and be rounded in other ways than before.
    factor = torch.exp(lse - wide(lse))
    p = narrow(e) / torch.where(empty, 1.0, total) * factor
    dropped = p if kept is None else torch.where(kept[b, :, :sq, :sk], p, 0.0) / (1 - dropout_p)
    out = (dropped @ v).transpose(0, 1)
    rounded = narrow(out)
    # A backward pass computes rowsum(dP * P) from the rounded output, so the rows of dS do not sum to 0.
    error, at_rest = (rounded - out).detach(), lse - lse.detach()
    lse = lse + (factor - 1).detach() * at_rest  # the gradient of lse is P
    least = s.new_full((heads, sq, 1), -math.inf)
    largest = torch.cat([wide(s).detach(), least], -1).flatten(1)
    largest = largest.amax(-1) if sq else least.new_full((heads,), -math.inf)
    log_p = s if sinks is None else torch.cat([s, sinks], -1)
    nothing = empty | (log_p == -math.inf)
    log_p = torch.where(nothing, 0.0, wide(torch.where(nothing, 0.0, log_p) - lse))
    entropy = -wide(torch.where(nothing, 0.0, torch.exp(log_p)) * log_p).sum(-1)
    lse = torch.where(empty, -math.inf, lse)[..., 0]
    return rounded - error * at_rest.transpose(0, 1), lse, p, largest, entropy


def attention(
    q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
    seqused_k=None, block_mask=None, qv=None, return_attn_weights=False, deterministic=False, return_lse=True,
    return_attn_probs=False, return_max_logits=False, return_entropy=False, rng_state=None, invariant=False, backend=None, **options,
):  # fmt: skip
    """Return (out, lse) as :func:`flashtile.attention` does, then its statistics and weights."""
    if block_mask is not None:
        options["mask_mod"] = block_mask.mask_mod
    packed, weights = cu_seqlens_q is not None, []
    batch = len(cu_seqlens_q) - 1 if packed else q.shape[0]
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]) if packed else (batch, q.shape[2], q.shape[1]), -math.inf).to(q)
    entropy, largest = torch.zeros_like(lse), [q.new_empty(0, q.shape[-2])]
    for b in range(batch):
        rows = slice(*cu_seqlens_q[b : b + 2].tolist()) if packed else slice(0, q.shape[1])
        keys = slice(*cu_seqlens_k[b : b + 2].tolist()) if packed else slice(0, k.shape[1])
        rows = rows if seqused_q is None else slice(rows.start, rows.start + int(seqused_q[b]))
        keys = keys if seqused_k is None else slice(keys.start, keys.start + int(seqused_k[b]))
        sides = [x if packed else x[b] for x in (q, k, v)]
        own = None if qv is None else (qv if packed else qv[b])[rows]
        found = one(sides[0][rows], sides[1][keys], sides[2][keys], b, qv=own, **options)
        where = (slice(None), rows) if packed else (b, slice(None), rows)
        out = out.index_put(
            (torch.arange(rows.start, rows.stop, device=q.device),) if packed
            else (torch.tensor(b, device=q.device), torch.arange(rows.start, rows.stop, device=q.device)), found[0]
        )  # fmt: skip
        at = torch.zeros_like(lse, dtype=torch.bool)
        at[where] = True
        lse = lse.masked_scatter(at, found[1])
        entropy = entropy.masked_scatter(at, found[4])
        largest.append(found[3][None])
        weights.append(found[2])
    statistics = [torch.cat(largest)] * return_max_logits + [entropy] * return_entropy
    if return_attn_weights is False:
        return out, lse, *statistics
    sq = max_seqlen_q if packed else q.shape[1]
    sk = max_seqlen_k if packed else k.shape[1]
    pad = torch.nn.functional.pad
    padded = [pad(p, (0, sk - p.shape[2], 0, sq - p.shape[1])) for p in weights]
    full = torch.stack(padded) if padded else q.new_zeros(0, q.shape[-2], sq, sk)
    return out, lse, weights_as(full, return_attn_weights)


def weights_as(full, form):
    """Return weights in a form: "full", "columns" (summed over rows), or an int for the largest of each row."""
    if form is True or form == "full":
        return full
    if form == "columns":
        return full.sum(2)
    most = min(form, full.shape[-1])
    return torch.nn.functional.pad(full.topk(most, -1).values, (0, form - most))


def rotated(x, cos, sin, positions, interleaved):
    """Apply rotary embeddings to x (n, heads, d), with the rows ``positions`` of the tables cos and sin."""
    half = cos.shape[1]
    cos, sin = (t.to(x.dtype)[positions.clamp(0, len(cos) - 1)][:, None] for t in (cos, sin))
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([narrow(turned), rest], -1)


def with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, rotary_interleaved=True, rotary_seqlens=None, tree_mask=None, qv=None,
    q_descale=None, k_descale=None, v_descale=None, return_softmax_lse=True, num_splits=0, split_size=None,
    invariant=False, softmax_max=None, backend=None, debug_checks=False, out=None, lse=None, mass=None,
    cu_seqlens_q=None, max_seqlen_q=None, **options,
):  # fmt: skip
    """Return (out, lse) as :func:`flashtile.flash_attn_with_kvcache` does, and write into the caches and mass."""
    queries = list(q) if cu_seqlens_q is None else list(q.split(cu_seqlens_q.diff().tolist()))
    batch, new, outs, lses = len(queries), 0 if k is None else k.shape[1], [], []
    size = k_cache.shape[1]
    capacity = size if block_table is None else size * block_table.shape[1]
    for b in range(batch):
        n = (
            capacity
            if cache_seqlens is None
            else int(cache_seqlens[b] if torch.is_tensor(cache_seqlens) else cache_seqlens)
        )
        at = torch.arange(n + new, device=q.device)
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        rows = torch.full_like(at, row) if block_table is None else block_table[b].long()[at // size]
        at = at if block_table is None else at % size
        query, angle = queries[b], n if rotary_seqlens is None else int(rotary_seqlens[b])
        by_token = options.get("causal") or max(options.get("window_size", (-1, -1))) >= 0
        by_token = by_token or options.get("attention_chunk")
        if k is not None:
            fresh = k[b]
            if rotary_cos is not None:
                tables = rotary_cos, rotary_sin
                fresh = rotated(
                    fresh, *tables, angle + torch.arange(new, device=q.device), rotary_interleaved
                )
                turn = angle + torch.arange(len(query), device=q.device) * bool(by_token)
                query = rotated(query, *tables, turn, rotary_interleaved)
            k_cache[rows[n:], at[n:]] = fresh.detach().to(k_cache.dtype)
            v_cache[rows[n:], at[n:]] = v[b].to(v_cache.dtype)
        keys, values = k_cache[rows, at].to(q.dtype), v_cache[rows, at].to(q.dtype)
        if k_descale is not None:
            keys, values = (x * d.to(q.dtype)[..., None] for x, d in ((keys, k_descale), (values, v_descale)))
        own = None if tree_mask is None else tree_mask if tree_mask.dim() == 2 else tree_mask[b]
        pad = 0 if cache_leftpad is None else int(cache_leftpad[b])
        found = one(query, keys, values, b, leftpad=pad, own=own, qv=None if qv is None else qv[b], **options)
        outs.append(found[0])
        lses.append(found[1])
        if mass is not None:
            sums = wide(found[2]).unflatten(0, (k_cache.shape[2], -1)).sum((1, 2))
            mass[rows, at] += sums.T.to(mass.dtype)
    if not batch:
        return q.new_zeros(*q.shape[:-1], v_cache.shape[-1]), q.new_zeros(q.shape[:-1]).mT
    if cu_seqlens_q is not None:
        return torch.cat(outs), torch.cat(lses, -1)
    return torch.stack(outs), torch.stack(lses)


def merged(outs, lses):
    """Merge partial results: outs (parts, batch, sq, heads, d) and lses (parts, batch, heads, sq)."""
    top = lses.detach().amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    e = wide(torch.exp(lses - top))
    total = wide(e.sum(0))
    share = (narrow(e) / torch.where(total == 0, 1.0, total)).mT[..., None]
    return narrow((share * torch.where(share > 0, outs, 0.0)).sum(0)), top + torch.log(total)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def linear(
    x, weight, bias=None, *, weight_scale=None, norm_weight=None, norm_eps=1e-6, x_scale=None, activation=None,
    residual=None, prefetch=False, invariant=False, backend=None,
):  # fmt: skip
    y = x
    if norm_weight is not None:
        y = narrow(rms(wide(x), norm_weight, norm_eps))
    weight = weight.to(y.dtype)
    if weight_scale is not None:
        scale = weight_scale.to(y.dtype)
        if scale.dim() == 2:
            scale = scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[
                :, : weight.shape[1]
            ]
        weight = weight * (scale if scale.dim() == 2 else scale[:, None])
    y = wide(y) @ wide(weight).mT
    if x_scale is not None:
        y = y * x_scale.to(y.dtype).view(*x.shape[:-1], 1)
    y = y if bias is None else y + bias
    if activation == "silu_and_mul":
        a, b = y.chunk(2, -1)
        y = torch.nn.functional.silu(a) * b
    return narrow(y if residual is None else y + residual)


def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Compute as torch's scaled_dot_product_attention: heads before tokens, causal aligned to the upper left."""
    sq, sk = q.shape[-2], k.shape[-2]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril() if is_causal else None
    options = {}
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], sq, sk)
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        options = {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}
    if seen is not None:
        options["mask"] = seen[None, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, softmax_scale=scale, **options)[0].transpose(1, 2)


def multihead(
    module,
    query,
    key,
    value,
    key_padding_mask=None,
    attn_mask=None,
    need_weights=True,
    average_attn_weights=True,
):
    """Compute as torch.nn.MultiheadAttention ``module`` does, but a query without visible keys gives zeros."""

    def parameter(p):
        return p.detach().to(query.dtype)

    inputs = [x if module.batch_first else x.transpose(0, 1) for x in (query, key, value)]
    weights = module.in_proj_weight
    weights = (
        (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        if weights is None
        else weights.chunk(3)
    )
    biases = (0, 0, 0) if module.in_proj_bias is None else parameter(module.in_proj_bias).chunk(3)
    q, k, v = (narrow(wide(x) @ parameter(w).mT + b) for x, w, b in zip(inputs, weights, biases, strict=True))
    batch, sk = k.shape[:2]
    if module.bias_k is not None:
        k, v = (
            torch.cat([x, parameter(b).expand(batch, 1, -1)], 1)
            for x, b in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(batch, 1, x.shape[2])], 1) for x in (k, v))
    more = k.shape[1] - sk  # added keys, which the masks do not cover
    heads, pad = module.num_heads, torch.nn.functional.pad
    options = {}
    if key_padding_mask is not None:
        options["key_padding_mask"] = pad(~key_padding_mask, (0, more), value=True)
    if attn_mask is not None:
        of_heads = attn_mask.dim() == 3
        attn_mask = attn_mask.unflatten(0, (batch, heads)) if of_heads else attn_mask[None, None]
        hides = attn_mask.dtype == torch.bool
        options["mask" if hides else "bias"] = pad(~attn_mask if hides else attn_mask, (0, more), value=hides)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    out, _, p = attention(q, k, v, return_attn_weights=True, **options)
    out = wide(out.flatten(-2)) @ parameter(module.out_proj.weight).mT
    out = narrow(out if module.out_proj.bias is None else out + parameter(module.out_proj.bias))
    out = out if module.batch_first else out.transpose(0, 1)
    p = wide(p).mean(1) if average_attn_weights else wide(p)
    return (out, p) if need_weights else out
