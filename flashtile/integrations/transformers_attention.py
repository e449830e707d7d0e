"""The attention function that Transformers' models call in every layer.

Masks become arguments of flashtile's functions, so tokens are not unpadded and padded again. At most one
layer waits for the device, because :mod:`flashtile.integrations.transformers_masks` reads a mask once per
forward pass.

Host time dominates a decoding step (one query per sequence), so such steps have a fast path. All layers of a
step call attention with tensors of equal shapes and strides. The first layer takes the general path and
stores its launch. The other layers find this launch by the arguments that Transformers passes. They give
Transformers' tensors to the launch without a transpose, because a compiled kernel needs only addresses, which
a transpose does not change.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile.api.decode import flash_attn_with_kvcache
from flashtile.api.padding import as_mask_or_bias
from flashtile.checks.arguments import renamed
from flashtile.checks.conversions import as_masking, make_options
from flashtile.integrations.transformers_masks import (
    Padding,
    TreeMask,
    documents_of,
    packing_of,
    padding_of,
    read_packing,
)
from flashtile.integrations.transformers_private import collects_weights, is_quantized
from flashtile.integrations.transformers_statistics import attention, recorder
from flashtile.op.operation import SIGNATURE_BYTES, is_plain, launch_cache, signatures
from flashtile.operators.decode import DECODE
from flashtile.problems.common import UNLIMITED, shared_fields
from flashtile.problems.decode import MAX_HEAD_DIM, CacheTensors, DecodeOptions
from flashtile.torch_private import is_any_autocast_enabled

DROPOUT_FIELDS = "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"
"""Fields of the attention dropout in configs of models."""


def names_in_config(config: Any = None) -> dict[str, str]:
    """Return replacements of argument names in errors by names that users of a model know.

    ``config`` is that of the model, or None if it is unknown.
    """
    fields = [name for name in DROPOUT_FIELDS if hasattr(config, name)] or DROPOUT_FIELDS
    return {"dropout_p": f"dropout_p ({' or '.join(fields)} in the model's config)"}


EVERYWHERE = {"causal": False, "window_size": (UNLIMITED, UNLIMITED)}
"""Options for masks that already include causality and windows."""

Options = dict[str, Any]
"""Keywords of :func:`flashtile.attention`."""

FEW_QUERIES = 16
"""Largest number of queries per sequence for which a call over a cache is computed as a decoding step.

Decoding steps use the decoding kernels, which divide the keys of a sequence among programs.
"""


_launches = launch_cache()
"""Maps the key of :func:`_kind_of_step` to (launch, shape of out)."""


def serving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the attention function for Transformers.

    The function takes query, key and value (batch, heads, seqlen, head_dim). It returns out (batch, seqlen,
    heads, head_dim) and weights (batch, heads, seqlen, keys) or None.

    If keys and values are paged, it calls ``original``, Transformers' own function for flash implementations.
    Exceptions are calls with a block mask, a mask of scores or a position bias, and calls that return
    weights.
    """

    @functools.wraps(original)
    def serve(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        compiling = torch.compiler.is_compiling()
        if not others.get("output_attentions") and not compiling:
            # Some models do not pass output_attentions to their attention.
            others["output_attentions"] = collects_weights()
        step, record = None, recorder(module, query)
        if attention_mask is None and query.shape[2] == 1 and not compiling and record is None:
            step = _kind_of_step(
                query, key, value, dropout, scaling, sliding_window, softcap, s_aux, others
            )  # fmt: skip
            out = None if step is None else _attend_by(step, query, key, value)
            if out is not None:
                return out, None
        of_scores = attention_mask is not None and attention_mask.dim() == 4
        with_scores = of_scores or others.get("output_attentions") or others.get("position_bias") is not None
        by_blocks = others.get("block_mask") is not None
        if not with_scores and not by_blocks and others.get("cache") is not None:
            if record is not None:
                raise NotImplementedError("statistics() must not be used over a paged cache")
            return original(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                sliding_window=sliding_window, softcap=softcap, is_causal=is_causal, s_aux=s_aux, **others,
            )  # fmt: skip
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if q.dtype == torch.float32:
            q, k, v = _in_dtype_of_weights(module, q, k, v)
        reach = -1 if sliding_window is None or k.shape[1] <= sliding_window else sliding_window - 1
        if q.shape[1] == 1:
            is_causal = False  # the last token sees all keys in any case
        elif is_causal is None:
            is_causal = _is_causal(module)
        options: dict[str, Any] = {
            "softmax_scale": scaling, "softcap": softcap or 0.0, "window_size": (reach, reach),
            "causal": is_causal,
        }  # fmt: skip
        if s_aux is not None:
            options["sink"] = s_aux.to(q.dtype)
        if record is not None:
            options["record"] = record
        if dropout:
            options["dropout_p"] = dropout
        if torch.is_grad_enabled():
            requested = others.get("deterministic")
            if requested is None:
                requested = os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1"
            if requested:
                options["deterministic"] = True
        try:
            if by_blocks:
                return _under_blocks(q, k, v, attention_mask, options, others)
            if with_scores:
                return _with_scores(q, k, v, attention_mask, options, others)
            if attention_mask is not None and attention_mask.dim() == 2:
                return _padded(q, k, v, attention_mask, options, module), None
            out = _sequences(q, k, v, attention_mask, options, others, module)
            if out is not None:
                return out, None
            out = _dense(q, k, v, options)
            if step is not None:
                _remember(step, q, k, v, _options_of_step(*(options[name] for name in _OF_STEP)), out)
            return out, None
        except NotImplementedError as error:
            raise renamed(error, names_in_config(getattr(module, "config", None))) from None

    return serve


def serving_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that some models call by its name, in place of Transformers' own.

    ``original`` knows packed sequences in a batch only by their offsets.
    """

    @functools.wraps(original)
    def serve(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *arguments: Any, **named: Any
    ) -> Any:
        if mask is not None and mask.dim() == 3:
            packing, mask = read_packing(mask), None
            if packing is not None:
                offsets, longest = packing
                named |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
                named |= {"max_length_q": longest, "max_length_k": longest}
        return original(query, key, value, mask, *arguments, **named)

    return serve


def _kind_of_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    others: dict[str, Any],
) -> tuple | None:
    """Return the key of a decoding step in the cache of launches, or None if the step has no fast path.

    The caller has checked that the step has no mask. The arguments are those of Transformers' attention:
    query (batch, heads, 1, head_dim), key and value (batch, heads_kv, keys, head_dim). ``others`` are further
    arguments of Transformers, including ``output_attentions``.
    """
    given, positions = others.get, others.get("position_ids")
    if (
        not is_plain((query, key, value))
        or type(scaling) is not float
        or torch.is_grad_enabled()
        or is_any_autocast_enabled()
        or dropout
        or s_aux is not None
        or given("output_attentions")
        or given("position_bias") is not None
        or given("block_mask") is not None
        or given("cache") is not None
        or given("cu_seq_lens_q") is not None
        or (positions is not None and positions.shape[-1] != 1)
    ):
        return None
    return (scaling, sliding_window, softcap, *signatures((query, key, value)))


def _attend_by(kind: tuple, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Compute out (batch, 1, heads, head_dim) with the launch that an earlier layer stored.

    Returns None if no launch is stored under the key ``kind``.
    """
    known = _launches.get(kind)
    if known is None:
        return None
    launch, shape = known
    out = query.new_empty(*shape)
    launch(query, key, value, DECODE.nothing, out)
    return out


def _remember(kind: tuple, q: Tensor, k: Tensor, v: Tensor, options: DecodeOptions, out: Tensor) -> None:
    """Store the launch that computed ``out`` under the key ``kind``, for the following layers.

    q, k, v and out are (batch, tokens, heads, head_dim).
    """
    launch: Any = DECODE.launches.get((options, *signatures((q, k, v))))
    if getattr(launch, "takes_addresses", False):
        _launches.store(kind, (launch, tuple(out.shape)), SIGNATURE_BYTES)


def _dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Compute attention without padding."""
    if _is_step(q, k, v, options):
        return _step(q, k, v, options)
    return attention(q, k, v, **options)


def _step(q: Tensor, k: Tensor, v: Tensor, options: Options, cache_leftpad: Tensor | None = None) -> Tensor:
    """Compute attention of a decoding step.

    Host time dominates a decoding step, so the options are built once and reused in all layers and steps.
    """
    scale, softcap, window, causal = (options[name] for name in _OF_STEP)
    usual = type(scale) is float and q.stride(3) == k.stride(3) == v.stride(3) == 1
    if not usual or torch.compiler.is_compiling() or is_any_autocast_enabled():
        return flash_attn_with_kvcache(q, k, v, cache_leftpad=cache_leftpad, **options)
    optional = DECODE.nothing
    if cache_leftpad is not None or "sink" in options:
        optional = CacheTensors(cache_leftpad=cache_leftpad, sink=options.get("sink"))
    return DECODE((q, k, v), optional, _options_of_step(scale, softcap, window, causal))[0]


_OF_STEP = "softmax_scale", "softcap", "window_size", "causal"


@functools.lru_cache(maxsize=256, typed=True)
def _options_of_step(
    softmax_scale: float, softcap: float, window_size: tuple[int, int], causal: bool
) -> DecodeOptions:
    made = make_options(as_masking(causal, window_size), softmax_scale=softmax_scale, softcap=softcap)
    return DecodeOptions(**shared_fields(DecodeOptions, made), return_lse=False)


def _is_step(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether a call is a decoding step: few queries over more keys, without gradients or dropout."""
    return (
        q.shape[1] <= FEW_QUERIES
        and q.shape[1] < k.shape[1]
        and "dropout_p" not in options
        and "deterministic" not in options
        and "record" not in options
        and max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    )


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: Options, module: Any) -> Tensor:
    """Compute attention under a padding mask (batch, seqlen_k) that is True for keys that are not padding.

    The mask may be shorter than k and v of a static cache, whose last keys are not written yet. The queries
    belong to the last tokens of the sequence. A causal or windowed call with as many queries as keys is
    self-attention, so its queries have the same padding as its keys. In cross-attention their padding may
    differ.
    """
    if mask.shape[1] > k.shape[1]:
        mask = mask[:, : k.shape[1]]
    seqlen = mask.shape[1]
    if seqlen < k.shape[1]:
        k, v = k[:, :seqlen], v[:, :seqlen]
    if torch.compiler.is_compiling():  # compiled code cannot read the mask on the host
        return _under_keys(q, k, v, mask.bool(), options)
    padding = padding_of(mask, module)
    if padding.whole:
        return _dense(q, k, v, options)
    by_place = options["causal"] or options["window_size"] != (-1, -1)
    if padding.solid and by_place and q.shape[1] == seqlen:
        return _in_runs(q, k, v, padding, options)
    if padding.on_right and not by_place:
        return attention(q, k, v, seqused_k=padding.lengths, **options)
    if padding.on_left and _is_step(q, k, v, options):
        return _step(q, k, v, options, padding.starts)
    return _under_keys(q, k, v, mask.bool(), options)


def _in_runs(q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: Options) -> Tensor:
    """Compute attention of padded sequences as if they were packed, without moving tokens.

    ``max_seqlen_q`` and ``max_seqlen_k`` are the padded lengths, not the longest lengths without padding. So
    all batches of one shape can use the same stored launch.
    """
    offsets, used = padding.runs
    runs = {
        "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "seqused_k": used, "max_seqlen_q": q.shape[1],
        "max_seqlen_k": k.shape[1],
    }  # fmt: skip
    return _packed(q, k, v, options | runs)


def _packed(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """Compute attention of packed sequences. q, k and v are (batch, seqlen, heads, head_dim)."""
    out: Tensor = attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **options)
    return out.unflatten(0, q.shape[:2])


def _sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: Options,
    others: dict[str, Any],
    module: Any,
) -> Tensor | None:
    """Compute attention of packed sequences, or return None if nothing is packed.

    The lengths come from the caller's offsets or from :func:`_numbers`.
    """
    of_q, of_k = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    most_q, most_k = others.get("max_length_q"), others.get("max_length_k")
    if of_q is None or of_k is None or most_q is None or most_k is None:
        numbers = _numbers(q, k, mask, others)
        if numbers is None:
            return None
        if torch.compiler.is_compiling():  # compiled code cannot read the numbers on the host
            documents = documents_of(numbers)

            def same_document(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
                return documents[batch, q_idx] == documents[batch, kv_idx]

            return attention(q, k, v, mask_mod=same_document, **options)
        packing = packing_of(numbers, module)
        if packing is None:
            return None
        of_q = of_k = packing.cu_seqlens
        most_q = most_k = packing.max_seqlen
    offsets = {
        "cu_seqlens_q": of_q.int(), "cu_seqlens_k": of_k.int(), "max_seqlen_q": int(most_q),
        "max_seqlen_k": int(most_k),
    }  # fmt: skip
    return _packed(q, k, v, options | offsets)


def _numbers(q: Tensor, k: Tensor, mask: Tensor | None, others: dict[str, Any]) -> Tensor | None:
    """Return the numbers that tell packed sequences apart (``documents_of``), or None if there are none.

    They are in the mask, if Transformers found packed sequences itself. It does not look for them in calls
    with a cache, and in some models. In a batch of one, the positions then tell, as in Transformers' own code
    for flash implementations.

    Models that get no positions number the tokens of all rows by a single row. Compiled code cannot read it,
    but in a batch of several it means that nothing is packed.
    """
    positions = others.get("position_ids")
    if mask is not None:
        numbered = positions is not None and positions.dim() == 2 and len(positions) == 1 < len(q)
        return mask if mask.dim() == 3 and not (numbered and torch.compiler.is_compiling()) else None
    packed = len(q) == 1 < q.shape[1] == k.shape[1]
    return positions if packed and positions is not None and positions.shape == q.shape[:2] else None


def _under_keys(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, options: Options) -> Tensor | Any:
    """Compute attention with the padding mask ``keys`` (batch, seqlen_k). Padding may be at any position.

    Causal masks and windows count padding as positions, as in Transformers' eager attention.
    """
    return attention(q, k, v, key_padding_mask=keys, **options)


def _under_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options, others: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Return out and weights (None unless wanted) in a model that was called with ``block_mask=``.

    The block mask alone decides which keys a query sees, also if positions begin anew (``mask`` then has
    numbers of documents). A dictionary has a block mask for each left side of a window among the layers, -1
    without a window.
    """
    given_mask, window_left = others["block_mask"], options["window_size"][0]
    windowed = isinstance(given_mask, dict) and window_left in given_mask
    block_mask = given_mask[window_left] if windowed else given_mask
    for name, given in (
        ("attention_mask", not isinstance(mask, TreeMask) and mask is not None and mask.dim() != 3),
        ("sliding_window", window_left >= 0 and not windowed),
        ("position_bias", others.get("position_bias") is not None),
    ):  # fmt: skip
        if given:
            raise NotImplementedError(f"{name} must be None in a model that is called with block_mask")
    wanted = bool(others.get("output_attentions"))
    options = options | EVERYWHERE | {"block_mask": block_mask, "return_attn_weights": wanted}
    found: Any = attention(q, k, v, **options)
    return found if wanted else (found, None)


def _with_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options, others: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for a call with a mask of scores, with a position bias or with ``output_attentions``.

    Returns out (batch, seqlen_q, heads, head_dim), and weights (batch, heads, seqlen_q, keys) if
    ``output_attentions`` is set, otherwise None.

    ``mask`` is None, a padding mask (batch, keys), numbers of documents (batch, 1, seqlen), or a mask of
    scores (batch, heads or 1, seqlen_q, keys), which already includes causality and windows.
    """
    _refuse_offsets(others)
    wanted, bias = bool(others.get("output_attentions")), others.get("position_bias")
    options = options | {"return_attn_weights": wanted}
    numbers = _numbers(q, k, mask, others)
    if numbers is not None:
        documents = documents_of(numbers)[:, None]
        options["mask"] = documents[..., None] == documents[:, :, None]
    if mask is not None and mask.dim() == 3:
        mask = None
    of_scores = mask is not None and mask.dim() == 4
    if mask is not None and not of_scores:
        mask = mask[:, : k.shape[1]].bool()
        k, v = k[:, : mask.shape[1]], v[:, : mask.shape[1]]
    if bias is not None:
        bias = options["bias"] = bias[..., : k.shape[1]]
    found: Any
    if mask is None:
        found = attention(q, k, v, **options)
    elif not of_scores:
        found = _under_keys(q, k, v, mask, options)
    else:
        given = as_mask_or_bias(mask[..., : k.shape[1]])
        if bias is not None and "bias" in given:
            given["bias"] = bias + given["bias"]
        found = attention(q, k, v, **options | EVERYWHERE | given)
    return found if wanted else (found, None)


def _refuse_offsets(others: dict[str, Any]) -> None:
    given = any("cu_seq" in name and offsets is not None for name, offsets in others.items())
    if given or others.get("cache") is not None:
        raise NotImplementedError(
            "output_attentions must be False, and position bias and mask of scores must be absent, for "
            'packed cu_seq_lens_q and paged caches: use model.set_attn_implementation("eager") for these'
        )


def _is_causal(module: Any) -> bool:
    """Whether a module attends causally.

    Decoders with a position bias are recognised separately, because UMT5's causal decoder has is_causal=False
    in Transformers 5.17.
    """
    biased_decoder = getattr(module, "is_decoder", False) and getattr(
        module, "has_relative_attention_bias", False
    )
    return module.is_causal or biased_decoder


def _in_dtype_of_weights(module: Any, *tensors: Tensor) -> list[Tensor]:
    """Cast float32 tensors to the dtype of the layer's weights, because adapters may leave norms in float32.

    Under autocast nothing is cast here, because attention then casts its inputs itself.
    """
    if torch.is_autocast_enabled(tensors[0].device.type):
        return list(tensors)
    if is_quantized(module.config):
        dtype = module.config.dtype
    else:
        weights = (layer.weight for layer in module.modules() if isinstance(layer, torch.nn.Linear))
        dtype = next((weight.dtype for weight in weights), torch.float32)
    return [tensor.to(dtype) for tensor in tensors]
