"""Modules for ``torch.nn`` models, with torch's names, arguments and parameters."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.api.attention import attention
from flashtile.api.padding import MaskPattern, as_booleans, attend, can_look, pattern_of, recognise
from flashtile.checks.arguments import ERRORS, check_dense, check_dtype, renamed
from flashtile.checks.conversions import check_flag
from flashtile.dropout import kept
from flashtile.operators.dropout import draw_state
from flashtile.problems.common import DTYPES
from flashtile.rounding import exact_product

_OF_MODULE = {"q": "query", "k": "key", "v": "value"}


class MultiheadAttention(torch.nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` computed by flashtile.

    State dicts of either module load into the other. The constructor is torch's: ``kdim``, ``vdim``,
    ``batch_first``, ``add_bias_kv`` and ``add_zero_attn`` are supported. Keys that ``key_padding_mask``
    excludes cost nothing.

    Examples:
        >>> theirs = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> ours = flashtile.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 10, 64)
        >>> padding = torch.tensor([[False] * 10, [False] * 7 + [True] * 3])  # True is excluded
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
        *,
        return_max_logits: bool = False,
        return_entropy: bool = False,
    ) -> Any:
        """Compute multi-head attention, and return (out, weights) as torch's module does.

        Args:
            query: (batch, seqlen_q, embed_dim) with ``batch_first``, (seqlen_q, batch, embed_dim) without, or
                (seqlen_q, embed_dim).
            key, value: as query, with seqlen_k instead of seqlen_q, and kdim or vdim instead of embed_dim.
            key_padding_mask: (batch, seqlen_k), True for excluded keys; or floats to add to the scores.
            need_weights: also return the weights, which take memory of (batch, heads, seqlen_q, seqlen_k).
                The default is True, as in torch; pass False unless the weights are needed.
            attn_mask: (seqlen_q, seqlen_k) or (batch * heads, seqlen_q, seqlen_k), True for excluded scores;
                or floats that are added to the scores and may require a gradient. Scores hidden by a causal
                mask (aligned to the bottom right), or by a mask that excludes the same keys for every query,
                cost no work.
            average_attn_weights: whether the weights are averaged over the heads.
            is_causal: states that ``attn_mask`` is causal. If seqlen_q equals seqlen_k, the mask is then not
                read, and ``attn_mask`` may be omitted.
            return_max_logits, return_entropy: also return statistics of the scores, as
                :func:`flashtile.attention` does: the largest score of each head (batch, heads), and the
                entropy of each query's weights (batch, heads, seqlen_q). They follow the weights. The key
                that ``add_zero_attn`` appends counts as an outcome, not as a score.

        Returns:
            (out, weights): out in the shape of query. Weights are (batch, seqlen_q, seqlen_k), or (batch,
            heads, seqlen_q, seqlen_k) without ``average_attn_weights``, or None without ``need_weights``. A
            query that sees no key has weights of 0, and its out is the bias of the last projection.

        Raises:
            NotImplementedError: ``add_bias_kv`` is used with a causal mask, or a tensor is nested.
            TypeError, ValueError: an argument is invalid; the message names it.
        """
        check_flag("need_weights", need_weights)
        check_flag("average_attn_weights", average_attn_weights)
        check_flag("is_causal", is_causal)
        for name, tensor, size in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            check_dense(name, tensor)
            self._check_with_weights(name, tensor)
            if tensor.dim() not in (2, 3) or tensor.dim() != query.dim() or tensor.shape[-1] != size:
                raise ValueError(
                    f"{name} must have 2 or 3 dimensions, as many as query, and the last of size {size}, "
                    f"got shape {tuple(tensor.shape)}"
                )
        batched = query.dim() == 3
        inputs = query, key, value
        if not batched:
            inputs = query[None], key[None], value[None]
            if key_padding_mask is not None:
                check_dense("key_padding_mask", key_padding_mask)
                key_padding_mask = key_padding_mask[None]
        elif not self.batch_first:
            inputs = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._project(query is key is value, *inputs)
        masking = self._masking(key_padding_mask, attn_mask, is_causal, q, k)
        if self.bias_k is not None:
            if masking.pattern.causal:
                raise NotImplementedError("attn_mask must not be causal with add_bias_kv, got a causal mask")
            biases: tuple[Any, Any] = self.bias_k, self.bias_v
            added = (t.view(1, 1, *k.shape[2:]).expand(len(k), -1, -1, -1) for t in biases)
            k, v = (torch.cat(pair, 1) for pair in zip((k, v), added, strict=True))
            masking = masking.with_one_more_key()
        # torch appends a key and a value of zeros, which act like a sink of 0.
        sink = q.new_zeros(self.num_heads) if self.add_zero_attn else None
        dropout_p = self.dropout if self.training else 0.0
        rng_state = draw_state(q) if dropout_p > 0 else None
        options: dict[str, Any] = {"sink": sink, "dropout_p": dropout_p, "rng_state": rng_state}
        has_statistics = return_max_logits is not False or return_entropy is not False
        found: list[Tensor] = []
        try:
            if masking.is_pattern and not (need_weights and dropout_p > 0) and not has_statistics:
                out, lse = attend(q, k, v, masking.pattern, **options)
            else:  # the dropout mask depends on positions, which packing would change
                out, lse, *found = attention(
                    q, k, v, **masking.keywords, return_lse=True, return_max_logits=return_max_logits,
                    return_entropy=return_entropy, **options,
                )  # fmt: skip
        except ERRORS as error:
            raise renamed(error, _OF_MODULE) from None
        out = self.out_proj(out.flatten(-2))
        weights = None
        if need_weights:
            weights = self._weights(q, k, lse, masking)
            if rng_state is not None:
                places = (range(size) for size in (*weights.shape[:3], k.shape[1]))
                mask = kept(rng_state, dropout_p, self.num_heads, *places)
                weights = weights * F.pad(mask, (0, int(self.add_zero_attn)), value=True)
                weights = weights / (1 - dropout_p)
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            return out[0], None if weights is None else weights[0], *(x[0] for x in found)
        return (out if self.batch_first else out.transpose(0, 1)), weights, *found

    def _check_with_weights(self, name: str, tensor: Tensor) -> None:
        """Raise unless the module's weights can multiply the tensor.

        Under autocast the dtypes of tensor and weights may differ, because autocast casts both to one dtype.
        """
        weight = self.out_proj.weight
        if tensor.device != weight.device:
            raise ValueError(
                f"{name} must be on the device of the module's weights, {weight.device}, got {tensor.device}"
            )
        device_type = tensor.device.type
        if device_type != "meta" and torch.is_autocast_enabled(device_type):
            return
        if tensor.dtype != weight.dtype:
            raise TypeError(
                f"{name} must have the dtype of the module's weights, {weight.dtype}, got {tensor.dtype}"
            )

    def _project(self, same: bool, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Project to q, k and v, (batch, seqlen, heads, head_dim)."""
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

    def _masking(
        self, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor
    ) -> _Masking:
        """Check the masks and combine them.

        ``pattern`` of the result describes padding and causality if possible. Other hidden scores are False
        in ``mask``. Float masks with values other than 0 and -inf are added up in ``bias``.
        """
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        keys: Tensor | None = None
        mask: Tensor | None = None
        biases: list[Tensor] = []
        if padding is not None:
            _check_mask("key_padding_mask", padding, [(batch, seqlen_k)], q)
            keys = _as_visible("key_padding_mask", padding)
            if keys is None:
                biases.append(padding[:, None, None])
        if attn_mask is not None:
            shapes = [(seqlen_q, seqlen_k), (batch * self.num_heads, seqlen_q, seqlen_k)]
            _check_mask("attn_mask", attn_mask, shapes, q)
        elif is_causal and seqlen_q != seqlen_k:
            raise ValueError(
                f"attn_mask must be given for {seqlen_q} causal queries of {seqlen_k} keys, got None"
            )
        causal = is_causal and seqlen_q == seqlen_k
        if attn_mask is not None and not causal:
            of_heads = attn_mask.dim() == 3
            heads = attn_mask.unflatten(0, (batch, self.num_heads)) if of_heads else attn_mask[None, None]
            mask = _as_visible("attn_mask", heads)
            if mask is None:
                biases.append(heads)
        bias = functools.reduce(torch.add, biases).to(q.dtype) if biases else None
        pattern = None
        if mask is not None and bias is None:
            both = mask if keys is None else mask & keys[:, None, None]
            pattern = recognise(both, batch, seqlen_q, seqlen_k)
        elif mask is None and (keys is None or bias is None):
            pattern = MaskPattern(None, causal, False) if keys is None else pattern_of(keys, causal, seqlen_q)
        if pattern is not None:
            return _Masking(pattern, None, bias)
        if causal and keys is not None:  # the padding is not at one end, or the host may not read it
            causal, mask = False, torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device).tril()
        return _Masking(MaskPattern(keys, causal, False), mask, bias)

    def _weights(self, q: Tensor, k: Tensor, lse: Tensor, masking: _Masking) -> Tensor:
        """Compute the attention weights (batch, heads, seqlen_q, seqlen_k) from the log-sum-exp.

        With ``add_zero_attn``, the sink is one more key at the end.
        """
        scale = self.head_dim**-0.5
        q_heads, k_heads = (t.to(lse.dtype).transpose(1, 2) for t in (q, k))
        scores = exact_product(q_heads * scale, k_heads.mT)
        if masking.bias is not None:
            scores = scores + masking.bias
        if masking.pattern.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(later.triu(k.shape[1] - q.shape[1] + 1), -torch.inf)
        for mask in masking.masks:
            scores = scores.masked_fill(~mask, -torch.inf)
        if self.add_zero_attn:
            scores = F.pad(scores, (0, 1))
        return (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp().to(q.dtype)


class _Masking(NamedTuple):
    """Everything that hides or changes scores (batch, heads, seqlen_q, seqlen_k).

    Attributes:
        pattern: which keys are padding, and whether the mask is causal.
        mask: booleans that broadcast to the scores, True for visible ones, or None.
        bias: floats that broadcast to the scores, or None.
    """

    pattern: MaskPattern
    mask: Tensor | None
    bias: Tensor | None

    @property
    def is_pattern(self) -> bool:
        """Whether ``pattern`` describes the whole mask, and the host may read which keys are padding.

        The sequences can then be packed without their padding.
        """
        keys = self.pattern.keys
        return self.mask is self.bias is None and (keys is None or can_look(keys))

    @property
    def masks(self) -> list[Tensor]:
        keys = self.pattern.keys
        given = self.mask, None if keys is None else keys[:, None, None]
        return [mask for mask in given if mask is not None]

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of :func:`flashtile.attention`."""
        return {
            "causal": self.pattern.causal,
            "key_padding_mask": self.pattern.keys,
            "mask": self.mask,
            "bias": self.bias,
        }

    def with_one_more_key(self) -> _Masking:
        keys, mask, bias = (
            None if tensor is None else F.pad(tensor, (0, 1), value=value)
            for tensor, value in ((self.pattern.keys, True), (self.mask, True), (self.bias, 0.0))
        )
        return _Masking(self.pattern._replace(keys=keys), mask, bias)


def _as_visible(name: str, mask: Tensor) -> Tensor | None:
    """Convert a mask in torch's form to booleans that are True for visible keys or scores.

    In torch's form, a bool mask is True for excluded keys or scores, and a float mask is added to the scores.
    The result is None for a float mask that has values other than 0 and -inf, or that requires a gradient.
    """
    if mask.requires_grad:
        return None
    return ~mask if mask.dtype == torch.bool else as_booleans(name, mask)


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]], q: Tensor) -> None:
    check_dense(name, mask)
    check_dtype(name, mask, (torch.bool, *DTYPES))
    if tuple(mask.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {allowed}, got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise ValueError(f"{name} must be on query's device, {q.device}, got {mask.device}")
