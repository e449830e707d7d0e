"""Modules for ``torch.nn`` models: the names, arguments and parameters are torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.checks.arguments import ERRORS, check_dense, renamed
from flashtile.padding import MaskPattern, as_booleans, attend, pattern_of, recognise

_OF_MODULE = {"q": "query", "k": "key", "v": "value"}


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` computed by flashtile: a state dict of one loads into the other.

    The constructor is torch's: ``kdim``, ``vdim``, ``batch_first``, ``add_bias_kv`` and ``add_zero_attn`` are
    served. Keys that ``key_padding_mask`` leaves out cost nothing.

    Examples:
        >>> theirs = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> ours = flashtile.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 10, 64)
        >>> padding = torch.tensor([[False] * 10, [False] * 7 + [True] * 3])  # True is left out
        >>> out, _ = ours(x, x, x, key_padding_mask=padding, need_weights=False)
        >>> torch.testing.assert_close(out, theirs(x, x, x, key_padding_mask=padding)[0])
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(out, weights), as torch's.

        Args:
            query: (batch, seqlen_q, embed_dim) with ``batch_first``, (seqlen_q, batch, embed_dim) without, or
                (seqlen_q, embed_dim).
            key, value: likewise, (..., seqlen_k, ..., kdim) and vdim.
            key_padding_mask: (batch, seqlen_k), True for keys that are left out; or floats of 0 and -inf.
            need_weights: also return the weights, which takes memory of (batch, heads, seqlen_q, seqlen_k).
                It is True by default because it is torch's; pass False.
            attn_mask: (seqlen_q, seqlen_k) or (batch * heads, seqlen_q, seqlen_k), True for what is left out;
                or floats of 0 and -inf. Causal ones are served, aligned to the bottom right, and ones that
                leave the same keys out for every query.
            average_attn_weights: whether the weights are the mean over the heads.
            is_causal: ``attn_mask`` is causal, which is believed without a look where seqlen_q is seqlen_k.
                Here it may be left out then.

        Returns:
            out as query; weights (batch, seqlen_q, seqlen_k), (batch, heads, seqlen_q, seqlen_k) without
            ``average_attn_weights``, or None. A query that sees no key gets weights of 0, and the bias of the
            last projection.

        Raises:
            NotImplementedError: dropout in training, other masks, ``add_bias_kv`` beside a causal mask,
                nested tensors.
            TypeError, ValueError: naming the argument, what it was and what is allowed.
        """
        if self.training and self.dropout > 0.0:
            raise NotImplementedError(
                f"dropout must be 0.0 in training (it is not implemented yet), got {self.dropout}"
            )
        for name, tensor, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            check_dense(name, tensor)
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim() or tensor.shape[-1] != size:
                raise ValueError(
                    f"{name} must have 2 or 3 dimensions, as query has, and last {size}, "
                    f"got shape {tuple(tensor.shape)}"
                )
        batched = query.dim() == 3
        inputs = query, key, value
        if not batched:
            inputs = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            inputs = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._project(query is key is value, *inputs)
        pattern = self._pattern(key_padding_mask, attn_mask, is_causal, q, k)
        if self.bias_k is not None:
            if pattern.causal:
                raise NotImplementedError("attn_mask must not be causal with add_bias_kv")
            biases: tuple[Any, Any] = self.bias_k, self.bias_v
            added = (t.view(1, 1, *k.shape[2:]).expand_as(k[:, :1]) for t in biases)
            k, v = (torch.cat(pair, 1) for pair in zip((k, v), added, strict=True))
            if pattern.keys is not None:
                pattern = pattern._replace(keys=F.pad(pattern.keys, (0, 1), value=True))
        # A key of zeros has a score of 0, and as a value adds nothing: it is a sink.
        sink = q.new_zeros(self.num_heads) if self.add_zero_attn else None
        try:
            out, lse = attend(q, k, v, pattern, sink=sink)
        except ERRORS as error:
            raise renamed(error, _OF_MODULE) from None
        out = self.out_proj(out.flatten(-2))
        weights = self._weights(q, k, lse, pattern, average_attn_weights) if need_weights else None
        if not batched:
            return out[0], None if weights is None else weights[0]
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _project(self, same: bool, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v, (batch, seqlen, heads, head_dim)."""
        heads = (self.num_heads, self.head_dim)
        if same and self.in_proj_weight is not None:
            packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            return list(packed.unflatten(-1, (3, *heads)).unbind(-3))
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases: Any = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = zip((query, key, value), weights, biases, strict=True)
        return [F.linear(tensor, weight, bias).unflatten(-1, heads) for tensor, weight, bias in parts]

    def _pattern(
        self, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor
    ) -> MaskPattern:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        keys = mask = None
        if padding is not None:
            _check_mask("key_padding_mask", padding, [(batch, seqlen_k)], q)
            keys = _taking_part("key_padding_mask", padding)
        if attn_mask is not None:
            shapes = [(seqlen_q, seqlen_k), (batch * self.num_heads, seqlen_q, seqlen_k)]
            _check_mask("attn_mask", attn_mask, shapes, q)
        elif is_causal and seqlen_q != seqlen_k:
            raise ValueError(
                f"attn_mask must be given for {seqlen_q} causal queries of {seqlen_k} keys, got None"
            )
        if is_causal and seqlen_q == seqlen_k:
            pattern = MaskPattern(None, True, False) if keys is None else pattern_of(keys, True, seqlen_q)
        elif attn_mask is None:
            return MaskPattern(keys, False, False)
        else:
            mask = _taking_part("attn_mask", attn_mask)
            if mask.dim() == 3:
                mask = mask.unflatten(0, (batch, self.num_heads))
            if keys is not None:
                mask = mask & keys[:, None, None]
            pattern = recognise(mask, batch, seqlen_q, seqlen_k)
        if pattern is None:
            raise NotImplementedError(
                "attn_mask must be causal (aligned to the bottom right), with key_padding_mask on one side, "
                "or leave out the same keys for every query and head: other masks are not implemented yet"
            )
        return pattern

    def _weights(self, q: Tensor, k: Tensor, lse: Tensor, pattern: MaskPattern, average: bool) -> Tensor:
        """The softmax that attention did not keep, from its log-sum-exp; the sink's column comes last."""
        scale = self.head_dim**-0.5
        scores = torch.einsum("bqhd,bkhd->bhqk", q.to(lse.dtype) * scale, k.to(lse.dtype))
        if pattern.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(later.triu(k.shape[1] - q.shape[1] + 1), -torch.inf)
        if pattern.keys is not None:
            scores = scores.masked_fill(~pattern.keys[:, None, None], -torch.inf)
        if self.add_zero_attn:
            scores = F.pad(scores, (0, 1))
        weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp().to(q.dtype)
        return weights.mean(1) if average else weights


def _taking_part(name: str, mask: Tensor) -> Tensor:
    """True for what takes part, of a mask that is True for what is left out, or of 0 and -inf."""
    return ~mask if mask.dtype == torch.bool else as_booleans(name, mask)


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]], q: Tensor) -> None:
    check_dense(name, mask)
    if tuple(mask.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {allowed}, got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise ValueError(f"{name} is on {mask.device}, not on {q.device}: all must be on one device")
