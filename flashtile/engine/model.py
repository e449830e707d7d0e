"""The model: one decoder architecture with the switches of :class:`flashtile.engine.config.ModelConfig`.

Each call computes the new tokens of a batch, packed one sequence after another. The keys and values of
earlier tokens are in a paged cache. Chunks of prompts and single tokens go through the same call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flashtile.api.cascade import cascade_with_kvcache
from flashtile.api.decode import append_kvcache, flash_attn_with_kvcache
from flashtile.checks.linear import NORMED_HEAD_DIMS
from flashtile.engine.config import ModelConfig
from flashtile.engine.parallel import ALONE, Ranks
from flashtile.engine.rotary import rotary_tables
from flashtile.engine.weights import SCALE, Weights, quantized
from flashtile.linear import BeforeNorm, linear, linear_before_norm, linear_qkv
from flashtile.operators.decode import SharedKeys
from flashtile.problems.linear import SWIGLU
from flashtile.reference.decode import rotate
from flashtile.reference.linear import scaled_weight
from flashtile.rounding import by_row, leaks_between_rows
from flashtile.torch_private import FakeTensor

SHORT_BYTES, SHORT_TILES, SHORT_HEADS = 2**18, 192, 16
"""Attention to own keys has one program for each sequence and key head in *short* steps. In others all
programs get equal shares of the keys, because one program would take long for a long sequence.

A step is short if no sequence has more than SHORT_BYTES of own keys and values per key head, if there are at
least SHORT_TILES sequences times key heads, and if at most SHORT_HEADS query heads share a key head. On an
H200, 256 sequences of 75 own keys with 8 key heads of 128 take 52 us in equal shares and 40 with one program
each, and 24 sequences of 20 to 520 keys take 19.0 and 13.6. More query heads were not measured."""
MANY_TILES, SHARES = 1024, 3 * 264
"""With at least MANY_TILES sequences times key heads, a step is also short if sequences have at most
SHORT_BYTES in the mean, and the longest has at most a third of an equal share of all keys, one for each of
264 programs of an H200. There, a step of Llama-3-8B with 224 sequences of 20 to 560 tokens takes 0.959 of the
time. With a whole share a step waits for the longest: 222 sequences of 250 keys and one of 1,700 take 91 us
a layer instead of 69. A step of Qwen3-0.6B with 64 sequences of 1,156 tokens would take 1.061 times as
long."""
FEW_ROWS = 64
"""Up to this number of tokens, products also add the residual and prepare the result for the next norm."""
Hidden = Tensor | BeforeNorm
"""Hidden states between layers: (total_new, hidden_size). A BeforeNorm is *prepared* for the next norm: it
also has the hidden states times this norm's weight, and the RMS factor of each row."""


class Groups(NamedTuple):
    """The levels of keys that groups of sequences share.

    Attributes:
        levels: the groups and the keys of each level.
        shared_keys: (batch,) int32, number of each sequence's first keys that are in a level or not visible.
    """

    levels: tuple[SharedKeys, ...]
    shared_keys: Tensor


class StepInput(NamedTuple):
    """The inputs of one step, on the device.

    Attributes:
        tokens: (total_new,) int32, the new tokens.
        cache_seqlens: (batch,) int32, tokens of each sequence before the step.
        block_table: (batch, max_blocks) int32.
        cu_seqlens_q: (batch + 1,) int32, where each sequence's new tokens start. None: one per sequence.
        max_seqlen_q: the largest number of new tokens of a sequence.
        positions: (total_new,) int32, each token's position in its sequence. Given when sequences have
            several drafted tokens each.
        slots: (total_new,) int64, each token's slot in the cache, negative for none. Given with positions.
        tree_mask: (batch, max_seqlen_q, max_seqlen_q) bool: element (b, i, j) says whether new token i of
            sequence b sees new token j. None: causal.
        seqused_k: (batch,) int32, tokens of each sequence including the new ones. Set by
            :meth:`Model.hidden` unless sequences have chunks of prompts.
        groups: groups of sequences that share keys, by the window of the layers that use them.
        parts: the first sequences, and the others, if only the first have groups. They are steps without
            further optional inputs. Attention is a call for each, because its fast kernel for many new tokens
            continues no softmax.
        short: whether one program reads a sequence's own keys of a key head (``SHORT_BYTES``). Only in steps
            of one token per sequence.
    """

    tokens: Tensor
    cache_seqlens: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int
    positions: Tensor | None = None
    slots: Tensor | None = None
    tree_mask: Tensor | None = None
    seqused_k: Tensor | None = None
    groups: Mapping[int, Groups] = MappingProxyType({})
    parts: tuple[StepInput, ...] = ()
    short: bool = False


class Cache(NamedTuple):
    """A layer's keys and values, (num_blocks, block_size, kv_heads, head_dim), and the rotary tables."""

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor


class Matrix:
    """A weight (N, K), stored as given, or in e4m3 with a scale for each row or block, and maybe a bias (N,).

    ``matrix(x)`` computes ``x @ weight.T + bias``, with the options of :meth:`__call__`. If ``invariant``, a
    row has the same bits for any other rows.
    """

    invariant = False

    def __init__(
        self, weight: Tensor, fp8: bool = False, scale: Tensor | None = None, bias: Tensor | None = None
    ):
        self.weight, self.scale, self.bias = weight, scale, bias
        if fp8 and scale is None:
            self.weight, self.scale = quantized(weight)

    @classmethod
    def joined(
        cls, weights: Weights, block: str, names: tuple[str, ...], fp8: bool = False, bias: bool = False
    ) -> Matrix:
        """Return the projections ``names`` of a block as one matrix."""

        def join(kind: str) -> Tensor:
            found = [weights(f"{block}.{name}.{kind}") for name in names]
            return found[0] if len(found) == 1 else torch.cat(found)

        weight = join("weight")
        scale = join(f"weight{SCALE}") if weight.dtype == torch.float8_e4m3fn else None
        return cls(weight, fp8, scale, join("bias") if bias else None)

    @classmethod
    def stacked(cls, matrices: list[Matrix]) -> Matrix:
        """Return matrices of one shape as one, with a new first dimension. It has parts, but no product."""
        scales = [one.scale for one in matrices if one.scale is not None]
        if len(scales) == len(matrices):
            return cls(torch.stack([one.weight for one in matrices]), scale=torch.stack(scales))
        dtype = next(one.weight.dtype for one in matrices if one.scale is None)
        return cls(torch.stack([scaled_weight(one.weight, one.scale, dtype) for one in matrices]))

    def part(self, index: int) -> Matrix:
        scale, bias = (None if one is None else one[index] for one in (self.scale, self.bias))
        part = Matrix(self.weight[index], scale=scale, bias=bias)
        part.invariant = self.invariant
        return part

    def __call__(
        self,
        x: Hidden,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Hidden | None = None,
        following: Norm | None = None,
    ) -> Any:
        """Normalise x (tokens, K) by ``norm`` if given, and multiply it by the weight: (tokens, N).

        Bias and residual are added. If ``following``, the next norm, is given, the result is a
        :class:`BeforeNorm`. The result may reuse the residual's memory: above ``FEW_ROWS`` tokens the product
        is added to the residual in place, because :func:`linear` would copy the residual.
        """
        normed: dict[str, Any] = {}
        if norm is not None:
            x, normed = operand(x, norm)
        assert isinstance(x, Tensor)
        added = residual.y if isinstance(residual, BeforeNorm) else residual
        given: dict[str, Any] = {"weight_scale": self.scale, "residual": added, "prefetch": True, **normed}
        if self.invariant:
            given["invariant"] = True
        if following is not None:
            weight, eps = following.weight, following.eps
            return linear_before_norm(x, self.weight, weight, self.bias, next_norm_eps=eps, **given)
        in_place = len(x) > FEW_ROWS and not (normed or self.invariant) and self.bias is self.scale is None
        if added is not None and in_place and not leaks_between_rows(x):
            return added.addmm_(x, self.weight.t())
        return linear(x, self.weight, self.bias, activation=activation, **given)


class Norm:
    """RMSNorm. Gemma stores w and multiplies by 1 + w, which is kept in float32 to avoid rounding it.

    ``fused`` says whether :func:`linear` can apply the norm to its input.
    """

    def __init__(self, config: ModelConfig, weight: Tensor):
        self.weight, self.eps = weight.float() + 1 if config.family.unit_norm else weight, config.norm_eps
        self.fused = self.weight.dtype == weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Compute RMSNorm in float32 and round the result once."""
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def operand(x: Hidden, norm: Norm) -> tuple[Tensor, dict[str, Any]]:
    """Return (x, keyword arguments) for a call of :func:`linear` that normalises x by ``norm`` first.

    A norm that :func:`linear` cannot apply is applied to x here.
    """
    if isinstance(x, BeforeNorm):
        return x.scaled, {"x_scale": x.factor}
    return (x, {"norm_weight": norm.weight, "norm_eps": norm.eps}) if norm.fused else (norm(x), {})


class Attention:
    """The projections and the attention of one layer."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, ranks: Ranks, fp8: bool):
        c, name = config, f"model.layers.{layer}.self_attn"
        self.head_dim, self.eps = c.head_dim, c.norm_eps
        self.heads, self.kv_heads = c.num_heads // ranks.world, c.num_kv_heads // ranks.world
        self.window, self.scale, self.softcap = c.windows[layer], c.softmax_scale, c.attn_softcap
        self.ranks, self.norm_all = ranks, c.family.qk_norm == "all"
        self.qkv = Matrix.joined(weights, name, c.family.qkv, fp8, c.qkv_bias)
        # The ranks' results are summed, so only rank 0 adds the bias.
        self.o = Matrix.joined(weights, name, ("o_proj",), fp8, c.o_bias and ranks.rank == 0)
        self.q_norm: Norm | None = None
        if c.family.qk_norm:
            self.q_norm, self.k_norm = (Norm(c, weights(f"{name}.{part}_norm.weight")) for part in "qk")
        self.sink = weights(f"{name}.sinks").float() if c.family.sinks else None

    def __call__(
        self, x: Hidden, norm: Norm | None, step: StepInput, cache: Cache, residual: Hidden | None,
        following: Norm | None = None,
    ) -> Any:  # fmt: skip
        """Normalise x (total_new, hidden_size) by ``norm`` if given, apply attention, and add ``residual``.

        If ``following``, the next norm, is given, the result is prepared for it (see ``Hidden``).
        """
        out = self._attend(x, norm, step, cache).reshape(len(step.tokens), -1)
        return self.o(out, residual=residual, following=following)

    def _append_few(self, x: Hidden, norm: Norm | None, step: StepInput, cache: Cache) -> Tensor | None:
        """Return the queries (total_new, heads, head_dim) of a product that also appends keys and values.

        It also applies rotary embedding. Returns None for chunks of prompts and for models that the kernel
        does not serve.
        """
        if step.seqused_k is None or norm is None or not norm.fused:
            return None
        heads: dict[str, Any] = {}
        if self.q_norm is not None:
            if self.norm_all or not self.q_norm.fused or self.head_dim not in NORMED_HEAD_DIMS:
                return None
            heads = {"q_norm_weight": self.q_norm.weight, "k_norm_weight": self.k_norm.weight}
        if self.qkv.invariant:  # all steps append in the same way, also chunks
            return None
        x, normed = operand(x, norm)
        normed["norm_eps"] = norm.eps  # that of all norms
        if cache.k.dtype != x.dtype:
            return None
        has_slots = step.slots is not None
        return linear_qkv(
            x, self.qkv.weight, cache.k, cache.v, self.qkv.bias,
            positions=step.positions if has_slots else step.cache_seqlens,
            block_table=None if has_slots else step.block_table, slot_mapping=step.slots,
            rotary_cos=cache.cos, rotary_sin=cache.sin, weight_scale=self.qkv.scale, prefetch=True, **normed,
            **heads,
        )  # fmt: skip

    def _options(self, step: StepInput) -> dict[str, Any]:
        """Return the options that every attention of a step has."""
        options: dict[str, Any] = {
            "block_table": step.block_table, "softmax_scale": self.scale, "softcap": self.softcap,
            "sink": self.sink, "cu_seqlens_q": step.cu_seqlens_q,
            "max_seqlen_q": None if step.cu_seqlens_q is None else step.max_seqlen_q,
        }  # fmt: skip
        if self.qkv.invariant:
            options["invariant"] = True
        if step.short:
            options["num_splits"] = 1
        if step.tree_mask is not None:
            return {"tree_mask": step.tree_mask, **options}
        return {"causal": True, "window_size": (self.window, -1), **options}

    def _attend(self, x: Hidden, norm: Norm | None, step: StepInput, cache: Cache) -> Tensor:
        q = self._append_few(x, norm, step, cache)
        if q is not None:
            return self._attend_to(step, cache, q)
        qkv = self.qkv(x, norm=norm).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.norm_all:
            q, k = self._norm_all_heads(q, k)
        elif self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if not step.parts:
            return self._attend_to(step, cache, q, k, v)
        counts = [len(part.tokens) for part in step.parts]
        each = zip(step.parts, *(tensor.split(counts) for tensor in (q, k, v)), strict=True)
        return torch.cat([self._attend_to(part, cache, *own).view_as(own[0]) for part, *own in each])

    def _attend_to(
        self, step: StepInput, cache: Cache, q: Tensor, k: Tensor | None = None, v: Tensor | None = None
    ) -> Tensor:
        """Attend from q (total_new, heads, head_dim), after k and v are rotated and appended, if given."""
        ragged, options = step.cu_seqlens_q is not None, self._options(step)
        attend: Callable[..., Any] = flash_attn_with_kvcache
        groups = step.groups.get(self.window)
        if groups is not None:
            attend = cascade_with_kvcache
            options |= {"levels": groups.levels, "cache_leftpad": groups.shared_keys}
        if k is not None and v is not None:
            if step.slots is None or self.qkv.invariant:
                if ragged:
                    options |= {"cu_seqlens_k_new": step.cu_seqlens_q, "max_seqlen_k_new": step.max_seqlen_q}
                else:
                    q, k, v = (tensor.unsqueeze(1) for tensor in (q, k, v))
                return attend(
                    q, cache.k, cache.v, k, v, cache.cos, cache.sin, cache_seqlens=step.cache_seqlens,
                    rotary_interleaved=False, **options,
                )  # fmt: skip
            # Tokens of a tree are not at successive positions, and padding tokens must not be written.
            assert step.positions is not None
            q, k = (rotate(t, cache.cos, cache.sin, step.positions.long(), False) for t in (q, k))
            append_kvcache(cache.k, cache.v, k, v, slot_mapping=step.slots)
        q = q if ragged else q.unsqueeze(1)
        return attend(q, cache.k, cache.v, cache_seqlens=step.seqused_k, **options)

    def _norm_all_heads(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Apply RMSNorm over all heads of all ranks to q and to k, each (total_new, heads, head_dim)."""
        assert self.q_norm is not None
        squares = torch.stack([x.float().square().mean((1, 2)) for x in (q, k)], -1)
        factors = (self.ranks.sum(squares) / self.ranks.world + self.eps).rsqrt().unsqueeze(-1)
        return [
            (x.float() * factors[:, i : i + 1] * norm.weight.float().view(x.shape[1:])).to(x.dtype)
            for i, (x, norm) in enumerate(((q, self.q_norm), (k, self.k_norm)))
        ]


class MLP:
    """Gated MLP, which computes down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, ranks: Ranks, fp8: bool):
        name, self.silu = f"model.layers.{layer}.mlp", config.activation == "silu"
        self.gate_up = Matrix.joined(weights, name, config.family.gate_up, fp8, config.mlp_bias)
        self.down = Matrix.joined(weights, name, ("down_proj",), fp8, config.mlp_bias and ranks.rank == 0)

    def __call__(
        self, x: Hidden, norm: Norm | None, residual: Hidden | None, following: Norm | None = None
    ) -> Any:
        """Normalise x (total_new, hidden_size) by ``norm`` if given, apply the MLP, and add ``residual``.

        If ``following``, the next norm, is given, the result is prepared for it (see ``Hidden``).
        """
        if self.silu:
            inner = self.gate_up(x, norm=norm, activation=SWIGLU)
        else:
            inner = self.gate_up(x, norm=norm)
            inner = by_row(gelu_and_mul, inner) if self.gate_up.invariant else gelu_and_mul(inner)
        return self.down(inner, residual=residual, following=following)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


class Experts:
    """A mixture of experts: each token goes through the few gated MLPs that the router chooses for it."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, ranks: Ranks):
        c, names = config, config.family.experts
        assert names is not None
        block = f"model.layers.{layer}.{names.block}"
        self.per_token, self.normalized, self.silu = c.experts_per_token, c.normalized, c.activation == "silu"
        self.alpha, self.limit = c.swiglu_alpha, c.swiglu_limit
        self.router = Matrix.joined(weights, block, (names.router,), bias=names.stacked)
        self.numbers = torch.arange(c.num_experts, device=self.router.weight.device)
        if names.stacked:
            gate_up, down = (weights(f"{block}.experts.{one}_proj").mT for one in ("gate_up", "down"))
            bias, down_bias = (weights(f"{block}.experts.{one}_proj_bias") for one in ("gate_up", "down"))
            gate_up, bias = (torch.cat([x[:, ::2], x[:, 1::2]], 1) for x in (gate_up, bias))
            self.gate_up = Matrix(gate_up.contiguous(), bias=bias)
            self.down = Matrix(
                down.contiguous(), bias=torch.zeros_like(down_bias) if ranks.rank else down_bias
            )
        else:
            experts = [f"{block}.experts.{expert}" for expert in range(c.num_experts)]
            self.gate_up, self.down = (
                Matrix.stacked([Matrix.joined(weights, one, part) for one in experts])
                for part in (names.gate_up, (names.down,))
            )

    def __call__(self, x: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
        """Normalise x (total_new, hidden_size) by ``norm`` if given, apply the experts, add ``residual``."""
        x = x if norm is None else norm(x)
        shares, chosen = self._route(x)
        on_host = x.device.type == "cpu" and not isinstance(x, FakeTensor)
        if not on_host and x.dtype in (torch.float16, torch.bfloat16):
            parts = self._products(x, chosen)
            if self.down.invariant:  # torch's product chooses its order by the number of tokens
                out = torch.zeros_like(x) if residual is None else residual
                for i in range(self.per_token):
                    out = out + shares[:, i : i + 1] * parts[:, i]
                return out
            if residual is None:
                return torch.bmm(shares.unsqueeze(1), parts).squeeze(1)
            return torch.baddbmm(residual.unsqueeze(1), shares.unsqueeze(1), parts).squeeze(1)
        out = torch.zeros_like(x) if residual is None else residual.clone()
        # On a GPU the host does not wait to learn which experts are chosen. Every expert computes all tokens,
        # and its share is 0 for tokens that did not choose it.
        every_token = torch.arange(len(x), device=x.device)
        for expert in chosen.unique().tolist() if on_host else range(len(self.down.weight)):
            is_chosen = chosen == expert
            token = every_token[is_chosen.any(-1)] if on_host else every_token
            inner = self.gate_up.part(expert)(x[token])
            inner = by_row(self._activate, inner) if self.down.invariant else self._activate(inner)
            share = (shares * is_chosen).sum(-1, keepdim=True)
            out.index_add_(0, token, self.down.part(expert)(inner) * share[token])
        return out

    def _products(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the results (total_new, per_token, hidden_size) of each token's experts, without host syncs.

        The pairs of a token and an expert are sorted by expert.
        """
        from flashtile.backends.portable.linear.kernel import grouped_linear

        numbers, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(numbers, self.numbers, right=True, out_int32=True)
        gate_up, down, tokens = self.gate_up, self.down, order // self.per_token
        same = {"invariant": down.invariant}
        inner = grouped_linear(x, gate_up.weight, gate_up.bias, tokens, ends, True, gate_up.scale, **same)
        inner = self._activate(inner)
        out = grouped_linear(inner, down.weight, down.bias, order, ends, False, down.scale, **same)
        return out.view(len(x), self.per_token, -1)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (shares in the dtype of x, numbers) of each token's experts, both (total_new, per_token)."""
        scores = linear(x, self.router.weight, self.router.bias, invariant=self.router.invariant).float()
        best, chosen = scores.topk(self.per_token)
        total = (best if self.normalized else scores).logsumexp(-1, keepdim=True)
        return (best - total).exp().to(x.dtype), chosen

    def _activate(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) * up, for the halves gate and up of the columns."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self.alpha:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            return (up + 1) * gate * torch.sigmoid(self.alpha * gate)
        return (F.silu(gate) if self.silu else F.gelu(gate, approximate="tanh")) * up


class Layer:
    """A decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Gemma also normalises the results of attention and MLP, and OLMo 2 only those.
    """

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, ranks: Ranks, fp8: bool):
        self.attention = Attention(config, weights, layer, ranks, fp8)
        self.mlp: MLP | Experts
        if config.has_experts(layer):
            self.mlp = Experts(config, weights, layer, ranks)
        else:
            self.mlp = MLP(config, weights, layer, ranks, fp8)
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else Norm(config, weights(f"model.layers.{layer}.{name}_layernorm.weight"))
            for name in config.family.norms
        )
        self.ranks = ranks
        self.rope = config.ropes.index(config.rope_of(layer))  # number of the layer's rotary tables
        self.following: Norm | None = None  # the next layer's first norm
        # Attention and MLP may prepare their result for the next norm (see Hidden) only if the next norm
        # follows directly. An all-reduce or a second norm in between would change the result.
        fused = self.before_mlp is not None and self.before_mlp.fused
        self.prepares = ranks.world == 1 and fused and self.after_attention is None

    def __call__(self, x: Hidden, step: StepInput, cache: Cache) -> Any:
        add = self.ranks.sum
        few = len(step.tokens) <= FEW_ROWS or self.attention.qkv.invariant  # the same for every number
        if self.prepares and isinstance(self.mlp, MLP) and few:
            x = self.attention(x, self.before_attention, step, cache, x, self.before_mlp)
            return self.mlp(x, self.before_mlp, x, self.following)
        assert isinstance(x, Tensor)
        if self.after_attention is not None and self.after_mlp is not None:
            x = x + self.after_attention(add(self.attention(x, self.before_attention, step, cache, None)))
            return x + self.after_mlp(add(self.mlp(x, self.before_mlp, None)))
        within, after = self.ranks.split_residual(x)
        x = add(self.attention(x, self.before_attention, step, cache, within), after)
        within, after = self.ranks.split_residual(x)
        return add(self.mlp(x, self.before_mlp, within), after)


PARTS = Layer, Attention, MLP, Experts, Matrix, Norm


def overwrite(part: Any, new: Any) -> None:
    """Copy all tensors of a new part of a model into those of a present one."""
    for name, value in vars(new).items():
        if isinstance(value, Tensor):
            getattr(part, name).copy_(value)
        elif isinstance(value, PARTS):
            overwrite(getattr(part, name), value)


def parts_of(part: Any, kind: type) -> Iterator[Any]:
    """Yield the tensors or matrices of a part of a model, some of them more than once."""
    for value in vars(part).values():
        if isinstance(value, kind):
            yield value
        elif isinstance(value, PARTS):
            yield from parts_of(value, kind)


class Model:
    """A decoder-only model with the weights of all layers on one device.

    Args:
        config, weights: sizes and switches, and a function from a weight's name to its tensor.
        max_positions: positions of the rotary tables; :meth:`set_positions` changes them.
        ranks: the processes that compute the model together. ``weights`` returns this process's shard.
        fp8: round the layers' matrices to e4m3, except for those of experts.
        invariant: give each token the same bits for any other tokens of a step.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        max_positions: int,
        ranks: Ranks = ALONE,
        fp8: bool = False,
        invariant: bool = False,
    ):
        self.config, self.ranks, self.fp8, self.invariant = config, ranks, fp8, invariant
        self.in_e4m3: set[str] = getattr(weights, "in_e4m3", set())
        self.kv_heads = config.num_kv_heads // ranks.world
        self.embedding = weights("model.embed_tokens.weight")
        self.layers = [Layer(config, weights, layer, ranks, fp8) for layer in range(config.num_layers)]
        for layer, following in pairwise(self.layers):
            if isinstance(following.mlp, MLP):  # layers with experts do not take prepared states
                layer.following = following.before_attention
        self.norm = Norm(config, weights("model.norm.weight"))
        if config.tie_word_embeddings:
            head = self.embedding[ranks.slice(config.vocab_size)]
        else:
            head = weights("lm_head.weight")
        self.head = Matrix(head)
        for part in (self, *self.layers) if invariant else ():
            for matrix in parts_of(part, Matrix):
                matrix.invariant = True
        self.set_positions(max_positions)

    def set_positions(self, count: int) -> None:
        """Make rotary tables of ``count`` positions. Call it before the first step."""
        tables = [rotary_tables(rope, self.config.head_dim, count) for rope in self.config.ropes]
        self.rotary = [table.to(self.embedding.device) for pair in tables for table in pair]

    def check_e4m3(self, weights: Weights) -> None:
        """Raise ValueError unless other weights have the same matrices in e4m3."""
        different = sorted(self.in_e4m3 ^ getattr(weights, "in_e4m3", set()))
        if different:
            raise ValueError(
                f"named_tensors must have the same matrices in e4m3 as the model, got {different[0]!r} in "
                + ("another dtype" if different[0] in self.in_e4m3 else "e4m3")
            )

    @torch.inference_mode()
    def update(self, weights: Weights) -> None:
        """Write other weights into the memory of the present ones, one layer at a time."""
        config = self.config
        self.embedding.copy_(weights("model.embed_tokens.weight"))
        for number, layer in enumerate(self.layers):
            overwrite(layer, Layer(config, weights, number, self.ranks, self.fp8))
        overwrite(self.norm, Norm(config, weights("model.norm.weight")))
        if not config.tie_word_embeddings:
            self.head.weight.copy_(weights("lm_head.weight"))

    @property
    def weights(self) -> Iterator[Tensor]:
        """All weights, some of them more than once. The rotary tables are none."""
        return itertools.chain.from_iterable(parts_of(part, Tensor) for part in (self, *self.layers))

    def may_be_short(self, batch: int) -> bool:
        """Whether steps of ``batch`` sequences may be short (``SHORT_BYTES``), if these have few own keys."""
        few_heads = self.config.num_heads <= SHORT_HEADS * self.config.num_kv_heads
        return few_heads and not self.invariant and batch * self.kv_heads >= SHORT_TILES

    def hidden(self, step: StepInput, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Append keys and values, and return the last layer's hidden states (total_new, hidden_size).

        Args:
            step: the new tokens.
            k_cache, v_cache: (num_layers, num_blocks, block_size, kv_heads, head_dim), written in place.
        """
        if step.cu_seqlens_q is None:
            step = step._replace(seqused_k=step.cache_seqlens + 1)
        elif step.slots is not None:
            step = step._replace(seqused_k=step.cache_seqlens + step.cu_seqlens_q.diff())
        x = F.embedding(step.tokens, self.embedding)
        if self.config.family.unit_norm:
            # A number on the host is an argument of the kernel; on the GPU, it is a copy that no graph takes.
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device="cpu")
        for layer, k, v in zip(self.layers, k_cache, v_cache, strict=True):
            x = layer(x, step, Cache(k, v, *self.rotary[2 * layer.rope : 2 * layer.rope + 2]))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, vocab_size) of hidden states (rows, hidden_size) in the weights' dtype."""
        return self.ranks.join(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, vocab_size / world) of this process's part of the vocabulary."""
        logits = self.head(hidden, norm=self.norm)
        cap = self.config.final_softcap
        return torch.tanh(logits / cap) * cap if cap else logits
