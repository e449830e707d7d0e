"""Exact attention: FlashAttention-2's functions by name, argument order and defaults, and :func:`attention`.

Every function computes ``softmax(mask(softcap(q k^T * softmax_scale) + alibi)) v`` exactly, without ever
storing the score matrix (Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691).

Results are annotated ``Tensor | Any``, so type checkers accept the result as a Tensor, or as a tuple of
several results, without a cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

from torch import Tensor

from flashtile.api.prefill import attention_over_pages
from flashtile.checks.arguments import ERRORS, check_dense, renamed
from flashtile.checks.attention import check_kind, refuse_descales
from flashtile.checks.conversions import (
    as_form,
    as_masking,
    as_offset_pair,
    as_operands,
    check_flag,
    join_qv,
    make_options,
    optional_tensors,
    refuse_unknown,
    with_statistics,
)
from flashtile.operators.dropout import with_state
from flashtile.operators.gradients import forward
from flashtile.operators.statistics import split
from flashtile.operators.weights import weights_of
from flashtile.problems.attention import NO_EXTRAS, OptionalTensors, Options, statistics_of

# Names of these arguments in the packed functions, for error messages.
_OF_KV = {"k": "kv", "v": "kv"}
_OF_QKV = {"q": "qkv", "k": "qkv", "v": "qkv"}
_OF_BOTH = {
    "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens",
    "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    rng_state: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    deterministic: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    qv: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    return_attn_weights: bool | Literal["full", "columns"] | int = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """Exact attention, differentiable in q, k, v, sink and bias (and through lse).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), or (total_q, heads_q, head_dim) with ``cu_seqlens_q``;
            float16, bfloat16, float32, or float64 (CPU only). Any strides; the tensor is copied if its last
            stride is not 1.
        k: (batch, seqlen_k, heads_kv, head_dim) or (total_k, heads_kv, head_dim). heads_q must be a multiple
            of heads_kv; query heads share key/value heads in contiguous groups (GQA, MQA).
        v: shaped as k, except that its head_dim may differ. Every head_dim is from 1 to 576; on GPUs head
            sizes above 512 need 16-bit inputs.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 offsets of each sequence, on the device of q, starting
            at 0; int64 is cast, which costs a kernel launch. Tokens after the last offset belong to no
            sequence: their out and gradients are 0, their lse is -inf. The offsets are checked on the CPU; on
            a GPU only under ``FLASHTILE_DEBUG=1``, because the check synchronises.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence (or more), required with cu_seqlens.
        seqused_q: (batch,) int32 on the device of q: the number of queries in use in each sequence. Out and
            gradients of the other queries are 0, their lse is -inf, and masks are aligned to the used length.
        seqused_k: (batch,) int32 on the device of q: the number of keys in use in each sequence. The other
            keys are not read, their gradients are 0, and masks are aligned to the used length. Like offsets,
            values are checked on the CPU, and on a GPU only under ``FLASHTILE_DEBUG=1``; kernels clamp them.
        dropout_p: the probability with which an attention weight is dropped, from 0 to below 1. The remaining
            weights are divided by ``1 - dropout_p``. lse is computed before dropout.
        rng_state: (2,) int64 on the device of q: the seed and offset that decide which weights are dropped
            (see :mod:`flashtile.dropout`). None: they are drawn from torch's generator of q's device. Used
            only with dropout_p, in the forward and the backward pass.
        softmax_scale: factor on q k^T; None means ``head_dim ** -0.5``.
        causal: hide later keys from each query. Aligned to the bottom right: query i sees keys up to
            ``i + seqlen_k - seqlen_q``.
        window_size: (left, right): the number of keys that a query sees on each side of its own position; a
            negative number means no limit. ``causal`` sets right to 0.
        attention_chunk: if > 0, positions are divided into chunks of this size, and a query sees only keys of
            its own chunk (as in Llama 4 and FlashAttention-3). ``causal`` hides the later keys of the chunk.
        softcap: if > 0, scores become ``softcap * tanh(scores / softcap)`` before bias and mask.
        alibi_slopes: (heads_q,) or (batch, heads_q) float32; adds ``-slope * |i + seqlen_k - seqlen_q - j|``
            to the score of query i and key j. Learnable, if the call has only arguments that can be combined
            with score_mod, because the kernels for score_mod compute the gradient.
        sink: (heads_q,) float32 or q's dtype, learnable: one logit per head that joins the softmax of every
            row, like a key without a value. It is not scaled and never masked (attention sinks, Xiao et al.
            2023, arXiv:2309.17453, in the form of gpt-oss). -inf means no sink.
        mask: bool, broadcastable to (batch, heads_q, seqlen_q, seqlen_k), any strides: True for a key that
            takes part. It is combined with the masks above. Broadcast dimensions are never materialised. With
            cu_seqlens the last two dimensions are max_seqlen_q and max_seqlen_k, and entry (i, j) belongs to
            query i and key j of a sequence.
        key_padding_mask: bool, (batch, seqlen_k), any strides: True for a key that takes part, for every
            query and head. Padding at the start and at the end of a sequence costs no time. causal and
            window_size are aligned to the padded lengths. Cannot be combined with cu_seqlens.
        bias: float32 or q's dtype, learnable, broadcast as ``mask``: added to the scores after scale and
            softcap. -inf hides a key. Its gradient is summed in float32 over the broadcast dimensions, in a
            fixed order.
        score_mod: FlexAttention's function of a score. ``score_mod(score, batch, head, q_idx, kv_idx)``
            replaces the score, after softcap and alibi_slopes and before masks. Captured tensors get
            gradients.
        mask_mod: FlexAttention's ``mask_mod(batch, head, q_idx, kv_idx)``, True for a key that takes part. It
            is combined with causal and window_size. q_idx and kv_idx are indices within the sequence from 0;
            they are not aligned to the bottom right. See :mod:`flashtile.masks` for both functions.
        block_mask: a block mask of :func:`flashtile.masks.create_block_mask` or of FlexAttention. It contains
            a ``mask_mod``, so the argument ``mask_mod`` must be None. Completely hidden blocks cost nothing.
        deterministic: make gradients bitwise reproducible from run to run. Without it they are also
            reproducible, except on Hopper GPUs with head sizes up to 128, where key blocks add to dq in the
            order in which they finish.
            ``torch.use_deterministic_algorithms(True)`` has the same effect.
        q_descale, k_descale, v_descale: FlashAttention-3's scales, only for q, k and v of float8_e4m3fn:
            (batch, heads_kv) float32, at least 0, any strides. Each stored number is multiplied by its scale;
            None means 1. out is then bfloat16. Autograd rounds gradients of e4m3 tensors to e4m3, so train
            with :func:`flashtile.fp8.attention`, which also quantises 16-bit inputs.
        qv: shaped as q, but with the head_dim of v; learnable. Scores are then ``q k^T + qv v^T``: multi-head
            latent attention with absorbed projections (DeepSeek-V2, Liu et al. 2024, arXiv:2405.04434,
            section 2.1). ``softmax_scale=None`` then means ``(head_dim + head_dim_v) ** -0.5``, and the two
            head sizes may add up to 576. q and qv are copied into one tensor, and so are k and v.
            :func:`flashtile.flash_attn_with_kvcache` computes the same over a cache without copying keys.
        return_lse: also return the log-sum-exp of the scores of each row.
        return_max_logits: also return the largest visible score of each head, as it enters the softmax:
            scaled, after softcap, alibi_slopes, bias and score_mod. A sink is no score of a key. No gradient.
        return_entropy: also return the entropy of each row's probabilities, in nats, before dropout. A sink
            is one more outcome. It is differentiable, like lse.
        return_attn_weights: also return the probabilities, before dropout, from a second pass over q and k:
            True or "full" for all of them, "columns" for their sums over the rows of a head, or an int from 1
            to 128 for that many of the largest in each row. "columns" and an int never take memory of size
            seqlen_q * seqlen_k. The weights have no gradient. See :func:`flashtile.attention_weights`.
        out, lse: tensors that receive the results and are returned. Each has exactly the result's shape and
            dtype, a last stride of 1, and shares no memory with another argument. The call then has no
            gradients. GPU kernels write directly into contiguous memory that starts at a multiple of 16
            bytes; otherwise the result is copied. If ``lse`` is given, it is written even without
            ``return_lse``.
        backend: "hopper", "portable" or "cpu" to require this backend. None lets dispatch choose (see
            ``flashtile.explain``).

    Returns:
        out, shaped as q with the head_dim of v; a row that sees no key is 0. With ``return_attn_weights``:
        (out, weights), or (out, lse, weights) with ``return_lse``. With only ``return_lse``: (out, lse).
        Statistics come before the weights: (out, lse, max_logits, entropy, weights), without
        those that the call does not return.

        lse is in natural log, float32 (float64 for float64 inputs), (batch, heads_q, seqlen_q) or (heads_q,
        total_q), and includes the sink; it is -inf for a row that sees no key and has no sink. max_logits is
        (batch, heads_q), or (sequences, heads_q) with cu_seqlens; it is -inf where no key is visible. entropy
        has the shape of lse; it is 0 for a row that sees no key. Both have the dtype of lse.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what it was and what is allowed.

    Forward mode (``torch.func.jvp``) computes out, lse and their tangents in one pass. Second derivatives
    (``create_graph=True``) take a slower path that stores the scores: :mod:`flashtile.operators.derivatives`.

    Examples:
        >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)  # (batch, seqlen, heads, head_dim)
        >>> k, v = torch.randn(2, 2, 128, 2, 64).unbind()  # four query heads share a key/value head
        >>> out, lse = flashtile.attention(q, k, v, causal=True, window_size=(64, 0), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
        >>> out.sum().backward()
        >>> q.grad.shape
        torch.Size([2, 128, 8, 64])
    """
    if unknown:
        refuse_unknown("attention", unknown)
    if type(return_lse) is not bool:
        check_flag("return_lse", return_lse)
    form = None if return_attn_weights is False else as_form("return_attn_weights", return_attn_weights)
    masking = as_masking(causal, window_size, attention_chunk=attention_chunk)
    options = make_options(
        masking,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
        dropout_p=dropout_p,
    )
    q, k, v, qv = as_operands(q, k, v, qv)
    has_functions = score_mod is not None or mask_mod is not None or block_mask is not None
    extras = NO_EXTRAS  # recognised by identity; most calls have none of these nine
    if not (
        cu_seqlens_q
        is cu_seqlens_k
        is seqused_k
        is alibi_slopes
        is sink
        is mask
        is key_padding_mask
        is bias
        is seqused_q
        is None
    ):
        extras = optional_tensors(
            q,
            k,
            options,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            alibi_slopes=alibi_slopes,
            sink=sink,
            mask=mask,
            key_padding_mask=key_padding_mask,
            bias=bias,
            finds_padding=not has_functions,
        )
    descales = () if q_descale is k_descale is v_descale is None else (q_descale, k_descale, v_descale)
    buffers = () if out is lse is None else (out, lse)
    if return_max_logits is not False or return_entropy is not False:
        options = with_statistics(options, return_max_logits, return_entropy, q, buffers)
    if qv is not None:
        q, k = join_qv(q, k, v, qv, extras, options)

    # The other checks wait until a call has a new signature.
    in_e4m3 = check_kind(q, k, v, extras, options, descales, buffers, has_functions, form)

    if has_functions:
        from flashtile.api import masks  # few programs use them

        extras, options = masks.with_functions(q, k, extras, options, score_mod, mask_mod, block_mask)
    if options.dropout_p != 0.0:
        extras = with_state(q, extras, options, rng_state)
    out, lse, found = _attend(q, k, v, descales if in_e4m3 else None, extras, options, buffers)
    if form is not None:
        found += (weights_of(q, k, lse, extras, options, form),)
    return _result(out, lse, found, return_lse) if found or return_lse else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    qv: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """FlashAttention-2's ``flash_attn_func``.

    q is (batch, seqlen_q, heads_q, head_dim), k and v are (batch, seqlen_k, heads_kv, head_dim). The
    arguments are those of :func:`attention`.

    Returns:
        out; (out, lse) with ``return_lse``; (out, lse, S_dmask) with ``return_attn_probs``. S_dmask is
        FlashAttention-2's debugging output of dropout: all probabilities before dropout, of shape (batch,
        heads_q, seqlen_q, seqlen_k), negative where dropout dropped them, in float32 (float64 for float64
        inputs). Without dropout S_dmask is None. max_logits and entropy come last.

    Raises:
        NotImplementedError: as :func:`attention`.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 128, 4, 64).unbind()  # each (batch, seqlen, heads, head_dim)
        >>> flashtile.flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 128, 4, 64])
        >>> out, lse = flashtile.flash_attn_func(q, k, v, softcap=30.0, return_lse=True)
    """
    if unknown:
        refuse_unknown("flash_attn_func", unknown)
    _check_flags(return_attn_probs, return_lse)
    masking = as_masking(causal, window_size)
    options = make_options(
        masking,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
        dropout_p=dropout_p,
    )
    q, k, v, qv = as_operands(q, k, v, qv)
    extras = NO_EXTRAS
    if not (alibi_slopes is sink is None):
        extras = OptionalTensors(alibi_slopes=alibi_slopes, sink=sink)
    descales = () if q_descale is k_descale is v_descale is None else (q_descale, k_descale, v_descale)
    buffers = () if out is lse is None else (out, lse)
    if return_max_logits is not False or return_entropy is not False:
        options = with_statistics(options, return_max_logits, return_entropy, q, buffers)
    return _flash(q, k, v, qv, extras, options, descales, buffers, return_attn_probs, return_lse)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """FlashAttention-2's ``flash_attn_kvpacked_func``: k and v are one tensor, which is read in place.

    The gradients of k and v are also written into one tensor: nothing is copied or concatenated.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        kv: (batch, seqlen_k, 2, heads_kv, head_dim): keys, then values.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sink, return_lse, return_max_logits, return_entropy, backend: as for
            :func:`flash_attn_func`.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim); (out, lse) with ``return_lse``; (out, lse, S_dmask) with
        ``return_attn_probs``, as :func:`flash_attn_func`. lse is (batch, heads_q, seqlen_q).

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`; also if ``kv`` has another shape.

    Examples:
        >>> q = torch.randn(2, 16, 8, 64)
        >>> kv = torch.randn(2, 128, 2, 2, 64)  # (batch, seqlen_k, k and v, heads_kv, head_dim)
        >>> flashtile.flash_attn_kvpacked_func(q, kv, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    if unknown:
        refuse_unknown("flash_attn_kvpacked_func", unknown)
    k, v = _unpack("kv", kv, 5, 2, "(batch, seqlen_k, 2, heads_kv, head_dim)")
    try:
        return flash_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, sink=sink, return_lse=return_lse, return_max_logits=return_max_logits,
            return_entropy=return_entropy, backend=backend,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, _OF_KV) from None


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """FlashAttention-2's ``flash_attn_qkvpacked_func``: q, k and v are one tensor, which is read in place.

    Their gradients are also written into one tensor: nothing is copied or concatenated.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim): queries, keys, values.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sink, return_lse, return_max_logits, return_entropy, backend: as for
            :func:`flash_attn_func`.

    Returns:
        out, (batch, seqlen, heads, head_dim); (out, lse) with ``return_lse``; (out, lse, S_dmask) with
        ``return_attn_probs``, as :func:`flash_attn_func`. lse is (batch, heads, seqlen).

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`; also if ``qkv`` has another shape.

    Examples:
        >>> qkv = torch.randn(2, 128, 3, 4, 64, requires_grad=True)
        >>> flashtile.flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
        >>> qkv.grad.shape
        torch.Size([2, 128, 3, 4, 64])
    """
    if unknown:
        refuse_unknown("flash_attn_qkvpacked_func", unknown)
    q, k, v = _unpack("qkv", qkv, 5, 3, "(batch, seqlen, 3, heads, head_dim)")
    try:
        return flash_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs, sink=sink, return_lse=return_lse, return_max_logits=return_max_logits,
            return_entropy=return_entropy, backend=backend,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, _OF_QKV) from None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    qv: Tensor | None = None,
    seqused_k: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    invariant: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """FlashAttention-2's ``flash_attn_varlen_func``: packed sequences of different lengths.

    q is (total_q, heads_q, head_dim), k and v are (total_k, heads_kv, head_dim). Sequence b is rows
    ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q. ``cu_seqlens_k`` divides k and v in the same way. The
    other arguments are those of :func:`attention`. The results are those of :func:`flash_attn_func`, but lse
    is (heads_q, total_q).

    Args:
        block_table: (batch, max_blocks) int32, for a paged KV cache: k and v are then (num_blocks, page_size,
            heads_kv, head_dim), page_size is at least 1, and entry i of a row is the page of the sequence's
            keys from ``i * page_size`` on. Only the lengths of ``cu_seqlens_k`` are then used, or
            ``seqused_k`` in their place if it is given. There is no backward pass.
        q_descale, k_descale, v_descale: as for :func:`attention`; cannot be combined with ``block_table``.
        qv: as for :func:`attention`. With ``block_table`` the pages are not copied, head_dim and head_dim_v
            may each be up to 512, and there is no backward pass.
        invariant: give each row the bits that it has in every other call with ``invariant``, such as
            :func:`flash_attn_with_kvcache` of its token alone. On Hopper, tensors that TMA cannot address
            (pointers or strides that are no multiples of 16 bytes) have another kernel, and so other bits.
            The gradients are the usual ones. Cannot be combined with ``dropout_p`` or FP8.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`; also for ``dropout_p`` or a backward
            pass with ``block_table``.

    Examples:
        >>> cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)  # a sequence of 5 tokens and one of 7
        >>> q, k, v = torch.randn(3, 12, 4, 64).unbind()  # each (total, heads, head_dim)
        >>> out = flashtile.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True)
        >>> second = flashtile.attention(q[None, 5:], k[None, 5:], v[None, 5:], causal=True)[0]
        >>> torch.testing.assert_close(out[5:], second)
    """
    if unknown:
        refuse_unknown("flash_attn_varlen_func", unknown)
    _check_flags(return_attn_probs, return_lse)
    masking = as_masking(causal, window_size)
    options = make_options(
        masking,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        backend=backend,
        dropout_p=dropout_p,
        invariant=invariant,
    )
    cu_seqlens_q, cu_seqlens_k = as_offset_pair(cu_seqlens_q, cu_seqlens_k)
    extras = OptionalTensors(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        sink=sink,
    )
    descales = () if q_descale is k_descale is v_descale is None else (q_descale, k_descale, v_descale)
    buffers = () if out is lse is None else (out, lse)
    if return_max_logits is not False or return_entropy is not False:
        options = with_statistics(options, return_max_logits, return_entropy, q, buffers)
    if block_table is not None:
        for name in statistics_of(options):
            raise NotImplementedError(f"return_{name} must be False with block_table, got True")
        refuse_descales(descales, "without block_table")
        out, lse = attention_over_pages(q, k, v, block_table, extras, options, buffers, qv)
        return _result(out, lse, (None,) if return_attn_probs else (), return_lse or return_attn_probs)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(f"{name} must be an int32 torch.Tensor, got None: use flash_attn_func without it")
    q, k, v, qv = as_operands(q, k, v, qv)
    return _flash(q, k, v, qv, extras, options, descales, buffers, return_attn_probs, return_lse)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """FlashAttention-2's ``flash_attn_varlen_kvpacked_func``: packed sequences, k and v in one tensor.

    k and v are read in place, and their gradients are written into one tensor.

    Args:
        q: (total_q, heads_q, head_dim).
        kv: (total_k, 2, heads_kv, head_dim): keys, then values.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 offsets of each sequence, as for :func:`attention`.
        max_seqlen_q, max_seqlen_k: length of the longest sequence (or more).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sink, return_lse, return_max_logits, return_entropy, backend: as for
            :func:`flash_attn_varlen_func`.

    Returns:
        out, (total_q, heads_q, head_dim); (out, lse) with ``return_lse``; (out, lse, S_dmask) with
        ``return_attn_probs``, as :func:`flash_attn_func`. lse is (heads_q, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`; also if ``kv`` has another shape.

    Examples:
        >>> cu_seqlens_q = torch.tensor([0, 2, 5], dtype=torch.int32)  # 2 and 3 queries
        >>> cu_seqlens_k = torch.tensor([0, 10, 30], dtype=torch.int32)  # over 10 and 20 keys
        >>> q, kv = torch.randn(5, 8, 64), torch.randn(30, 2, 2, 64)
        >>> flashtile.flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, 3, 20).shape
        torch.Size([5, 8, 64])
    """
    if unknown:
        refuse_unknown("flash_attn_varlen_kvpacked_func", unknown)
    k, v = _unpack("kv", kv, 4, 2, "(total_k, 2, heads_kv, head_dim)")
    try:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            sink=sink, return_lse=return_lse, return_max_logits=return_max_logits,
            return_entropy=return_entropy, backend=backend,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, _OF_KV) from None


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sink: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_entropy: bool = False,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Tensor | Any:
    """FlashAttention-2's ``flash_attn_varlen_qkvpacked_func``: packed sequences, q, k and v in one tensor.

    q, k and v are read in place, and their gradients are written into one tensor.

    Args:
        qkv: (total, 3, heads, head_dim): queries, keys, values.
        cu_seqlens: (batch + 1,) int32 offsets of each sequence, as for :func:`attention`.
        max_seqlen: length of the longest sequence (or more).
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sink, return_lse, return_max_logits, return_entropy, backend: as for
            :func:`flash_attn_varlen_func`.

    Returns:
        out, (total, heads, head_dim); (out, lse) with ``return_lse``; (out, lse, S_dmask) with
        ``return_attn_probs``, as :func:`flash_attn_func`. lse is (heads, total).

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`; also if ``qkv`` has another shape.

    Examples:
        >>> cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)  # a sequence of 5 tokens and one of 7
        >>> qkv = torch.randn(12, 3, 4, 64)
        >>> flashtile.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 7, causal=True).shape
        torch.Size([12, 4, 64])
    """
    if unknown:
        refuse_unknown("flash_attn_varlen_qkvpacked_func", unknown)
    q, k, v = _unpack("qkv", qkv, 4, 3, "(total, 3, heads, head_dim)")
    try:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
            sink=sink, return_lse=return_lse, return_max_logits=return_max_logits,
            return_entropy=return_entropy, backend=backend,
        )  # fmt: skip
    except ERRORS as error:
        raise renamed(error, _OF_QKV | _OF_BOTH) from None


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    extras: OptionalTensors,
    options: Options,
    descales: tuple[Tensor | None, ...],
    buffers: tuple,
    return_attn_probs: bool,
    return_lse: bool,
) -> Tensor | Any:
    """Check and run a call of one of FlashAttention-2's functions, and return what it returns."""
    if qv is not None:
        q, k = join_qv(q, k, v, qv, extras, options)
    in_e4m3 = check_kind(q, k, v, extras, options, descales, buffers)
    if options.dropout_p != 0.0:
        extras = with_state(q, extras, options)
    out, lse, found = _attend(q, k, v, descales if in_e4m3 else None, extras, options, buffers)
    if return_attn_probs:
        dmask = None
        if options.dropout_p != 0.0:
            from flashtile.api.probabilities import signed_probabilities

            dmask = signed_probabilities(q, k, v, extras, options)
        found = (dmask, *found)
    return _result(out, lse, found, return_lse or return_attn_probs)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, descales: Any, extras: Any, options: Any, buffers: tuple
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Return (out, lse, statistics) of a call that has been checked. ``descales`` are None unless in FP8."""
    if descales is None:
        out, lse = forward(q, k, v, extras, options, buffers)
    else:
        from flashtile.operators.fp8_gradients import attend_descaled

        out, lse = attend_descaled(q, k, v, descales, extras, options)
    if options.max_logits or options.entropy:
        return out, *split(lse, statistics_of(options), extras.cu_seqlens_q)
    return out, lse, ()


def _check_flags(return_attn_probs: bool, return_lse: bool) -> None:
    """Raise TypeError unless both flags are bools."""
    if type(return_attn_probs) is not bool or type(return_lse) is not bool:
        check_flag("return_attn_probs", return_attn_probs)
        check_flag("return_lse", return_lse)


def _unpack(name: str, packed: Tensor, rank: int, parts: int, layout: str) -> tuple[Tensor, ...]:
    """Split a packed tensor, such as qkv, into views of q, k and v.

    The backward pass writes the gradients of the views into one tensor.
    """
    check_dense(name, packed)
    if packed.dim() != rank or packed.shape[-3] != parts:
        raise ValueError(f"{name} must have shape {layout}, got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _result(out: Tensor, lse: Tensor, found: tuple[Any, ...], return_lse: bool) -> Tensor | Any:
    """Return out, then lse if ``return_lse``, then the other results that were ``found``."""
    if return_lse:
        return out, lse, *found
    return (out, *found) if found else out
