"""Attention with score and mask functions, as operations separate from those of attention without.

They take all tensors and options of attention, then the captured tensors, the lists of a block mask and the
functions' programs as text. Calls without functions therefore pay nothing for them, and calls with functions
are traced, cached and launched like all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.checks.attention import check_call, check_types
from flashtile.checks.values import check_block_lists
from flashtile.masks.block_mask import BACKWARD_LISTS, LISTS
from flashtile.masks.evaluate import evaluate
from flashtile.masks.tracing import Trace
from flashtile.op.operation import PLAIN_TYPES, Operation, is_plain, signatures
from flashtile.op.refusals import carries_tangents, refuse_tangents, transforming
from flashtile.op.registry import register_autograd
from flashtile.op.schema import extended
from flashtile.operators import attention as operators
from flashtile.operators import derivatives
from flashtile.operators.mask_derivatives import plain
from flashtile.problems.attention import NO_EXTRAS, Extras, Options, Problem
from flashtile.problems.mask_program import parse
from flashtile.problems.mask_ranges import positions_of
from flashtile.problems.masks import MAX_CAPTURED, Mods

CAPTURED = tuple(f"captured_{i}" for i in range(MAX_CAPTURED))

ModifiedExtras: Any = extended("ModifiedExtras", Extras, dict.fromkeys((*CAPTURED, *LISTS), Tensor | None))
"""All tensors of a call except q, k and v: attention's extras, captured tensors, a block mask's lists."""

ModifiedOptions: Any = extended(
    "ModifiedOptions",
    Options,
    {
        "score_mod": str, "mask_mod": str, "learned": int, "block_q": int, "block_kv": int,
        "mask_seqlen_q": int, "mask_seqlen_k": int,
    },
)  # fmt: skip
"""Options of attention with functions.

Bit i of ``learned`` is set if captured tensor i needs a gradient. Block sizes, and the lengths that the block
mask was made for, are 0 without a block mask.
"""

_NUM_EXTRAS, _NUM_OPTIONS = len(Extras._fields), len(Options._fields)
_FIRST_CAPTURED = _NUM_EXTRAS
_NOT_CAPTURED, _NO_LISTS = (None,) * MAX_CAPTURED, (None,) * len(LISTS)
_NOTHING = ModifiedExtras(*(None,) * len(ModifiedExtras._fields))


class SignedExtras(ModifiedExtras):
    """Extras that are built once for many forward calls: captured tensors and a block mask's lists.

    All tensors are plain. The lists get a new signature only when their memory changes.
    """

    captured: tuple[Tensor, ...]
    lists: tuple[Tensor, ...]
    signed: tuple[list[int], str] = ([], "")
    """Addresses of the lists, and their signature as a string, because Python caches a string's hash."""

    @classmethod
    def of(cls, captured: tuple[Tensor, ...], lists: tuple[Tensor, ...]) -> SignedExtras | None:
        """Return the extras, or None if a tensor is of a subclass, which may override operations."""
        lists = lists[:-BACKWARD_LISTS]
        if any(type(tensor) not in PLAIN_TYPES for tensor in (*captured, *lists)):
            return None
        absent = _NOT_CAPTURED[len(captured) :]
        made = cls._make((*NO_EXTRAS, *captured, *absent, *lists, *_NO_LISTS[:BACKWARD_LISTS]))
        made.captured, made.lists = captured, lists
        return made

    def signature(self) -> tuple:
        addresses = [tensor.data_ptr() for tensor in self.lists]
        at, text = self.signed
        if at != addresses:
            text = str(signatures(self.lists))
            self.signed = addresses, text
        return (text, *signatures(self.captured)) if self.captured else (text,)


class Functions(NamedTuple):
    """The traced form of ``score_mod``, ``mask_mod`` and ``block_mask``."""

    captured: tuple[Tensor, ...]
    lists: tuple[Tensor, ...]
    """Lists of the block mask, () without one."""
    score_mod: str
    mask_mod: str
    block_size: tuple[int, int]
    lengths: tuple[int, int]
    """Numbers of queries and keys that the block mask was made for."""
    soft_cap: float
    """The soft cap, if ``score_mod`` is only a soft cap."""
    mask: Trace | None
    """The trace whose text is ``mask_mod``."""
    extras: SignedExtras | None = None
    """Extras of a forward call with only a block mask, cached for the next one."""


def captured_of(extras: Any) -> tuple[Tensor | None, ...]:
    return extras[_FIRST_CAPTURED : _FIRST_CAPTURED + MAX_CAPTURED]


def plain_part(extras: Any, options: Any) -> tuple[Extras, Options]:
    """Return the extras and options of attention without functions."""
    given = Extras(*extras[:_NUM_EXTRAS])
    nothing = all(tensor is None for tensor in given)
    return NO_EXTRAS if nothing else given, Options(*options[:_NUM_OPTIONS])


def check_modified(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> None:
    check_call(q, k, v, *plain_part(extras, options))
    for tensor in captured_of(extras):
        if tensor is not None and tensor.device != q.device:
            raise ValueError(
                f"score_mod or mask_mod reads a tensor on {tensor.device}, but q is on {q.device}"
            )
        if tensor is not None and tensor.numel() == 0:
            raise ValueError(
                f"score_mod or mask_mod reads a tensor without elements, of shape {tuple(tensor.shape)}"
            )
    if options.block_q:
        _check_lists(q, k, extras, options)


def _check_lists(q: Tensor, k: Tensor, extras: Any, options: Any) -> None:
    lengths = q.shape[1], k.shape[1]
    made_for = options.mask_seqlen_q, options.mask_seqlen_k
    if made_for != lengths:
        raise ValueError(
            f"block_mask was made for {made_for[0]} queries and {made_for[1]} keys, but q has {lengths[0]} "
            f"and k {lengths[1]}: make one for these lengths"
        )
    if extras.kv_num_blocks.dim() != 3:
        shape = tuple(extras.kv_num_blocks.shape)
        raise ValueError(
            f"block_mask.kv_num_blocks must have 3 dimensions (batch, heads, blocks), got {shape}"
        )
    batch, heads = extras.kv_num_blocks.shape[:2]
    if batch not in (1, q.shape[0]) or heads not in (1, q.shape[2]):
        raise ValueError(
            f"block_mask must be of batch 1 or {q.shape[0]} and of 1 or {q.shape[2]} heads, got "
            f"{batch} and {heads}"
        )
    blocks_q, blocks_kv = -(-q.shape[1] // options.block_q), -(-k.shape[1] // options.block_kv)
    for name in LISTS:
        tensor = getattr(extras, name)
        if tensor is None and name in LISTS[-BACKWARD_LISTS:]:
            continue
        own, others = (blocks_q, blocks_kv) if "kv" in name else (blocks_kv, blocks_q)
        shape = (batch, heads, own) if "num" in name else (batch, heads, own, others)
        if tensor.dtype != torch.int32:
            raise TypeError(f"block_mask.{name} must be int32, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"block_mask.{name} must have shape {shape} for {q.shape[1]} queries and {k.shape[1]} keys, "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.device != q.device:
            raise ValueError(f"block_mask is on {tensor.device}, but q is on {q.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"block_mask.{name} must be contiguous, got strides {tuple(tensor.stride())}")


def _check_traced(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> None:
    check_types(q, k, v, *plain_part(extras, options))


def check_modified_values(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> None:
    """Raise for inconsistent lists of blocks, and for reads outside captured tensors.

    Reads are checked only for GPUs, because the CPU's launch checks them as it computes.
    """
    if options.block_q:
        by_queries = check_block_lists("kv", tuple(getattr(extras, name) for name in LISTS[:4]))
        if extras.q_indices is not None:
            by_keys = check_block_lists("q", tuple(getattr(extras, name) for name in LISTS[4:]))
            if not torch.equal(by_queries.mT, by_keys):
                raise ValueError(
                    "block_mask.q_indices and full_q_indices must name the blocks that kv_indices and "
                    "full_kv_indices name, got others"
                )
    if not q.is_cuda:
        return
    captured = [tensor for tensor in captured_of(extras) if tensor is not None]
    batch, heads, rows, keys = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    for kind, text in (("score_mod", options.score_mod), ("mask_mod", options.mask_mod)):
        if not text:
            continue
        for first in range(0, rows, 256):
            inputs = {
                "score": q.new_zeros((), dtype=torch.float32),
                "b": torch.arange(batch, device=q.device)[:, None, None, None],
                "h": torch.arange(heads, device=q.device)[:, None, None],
                "q": torch.arange(first, min(first + 256, rows), device=q.device)[:, None],
                "kv": torch.arange(keys, device=q.device),
            }
            evaluate(parse(text), inputs, captured, kind=kind, check=True)


def mods_of(q: Tensor, k: Tensor, extras: Any, options: Any) -> Mods:
    captured = [tensor for tensor in captured_of(extras) if tensor is not None]
    return Mods(
        options.score_mod,
        options.mask_mod,
        tuple(i for i in range(MAX_CAPTURED) if options.learned >> i & 1),
        tuple(tensor.dim() for tensor in captured),
        (options.block_q, options.block_kv) if options.block_q else None,
        extras.kv_num_blocks.shape[1] if options.block_q else 1,
        positions_of(q.shape[1], k.shape[1]),
    )


def _describe(q: Tensor, k: Tensor, v: Tensor, extras: Any, options: Any) -> Problem:
    mods = mods_of(q, k, extras, options)
    return Problem.from_tensors(q, k, v, *plain_part(extras, options), mods=mods)


def _fake_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    q, k, v, extras, options = operators.of_forward(*arguments)
    dsink = None if extras.sink is None else extras.sink.new_empty(extras.sink.shape)
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        dsink,
        *(
            tensor.new_empty(tensor.shape) if tensor is not None and options.learned >> i & 1 else None
            for i, tensor in enumerate(captured_of(extras))
        ),
    )


class _Forward(Operation):
    def signature(self, optional: Any) -> tuple:
        return optional.signature() if type(optional) is SignedExtras else signatures(optional)


FORWARD = _Forward(
    "forward",
    suffix="_modified",
    tensors=operators.FORWARD.tensors,
    optional=_NOTHING,
    options=ModifiedOptions,
    results=2,
    check=check_modified,
    describe=_describe,
    fake=operators.FORWARD.fake,
    check_values=check_modified_values,
    check_traced=_check_traced,
)
BACKWARD = operators.BackwardOperation(
    "backward",
    suffix="_modified",
    tensors=operators.BACKWARD.tensors,
    optional=_NOTHING,
    options=ModifiedOptions,
    results=4 + MAX_CAPTURED,
    check=lambda *arguments: None,  # the forward pass checked what it saved
    describe=lambda *arguments: _describe(*operators.of_forward(*arguments)),
    fake=_fake_backward,
)


def arguments_of(extras: Extras, options: Options, functions: Functions) -> tuple[Any, Any]:
    """Return (extras, options) of a call with functions."""
    captured, lists = functions.captured, functions.lists
    tensors = *extras, *captured, *_NOT_CAPTURED[len(captured) :], *(lists or _NO_LISTS)
    return ModifiedExtras._make(tensors), _options_of(options, functions)


def _options_of(options: Options, functions: Functions) -> Any:
    captured, _, score_mod, mask_mod, block_size, lengths, *_ = functions
    learned = 0
    if captured and torch.is_grad_enabled():
        learned = sum(1 << i for i, t in enumerate(captured) if t.requires_grad and t.is_floating_point())
    return ModifiedOptions._make((*options, score_mod, mask_mod, learned, *block_size, *lengths))


def forward(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, functions: Functions
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a call with functions."""
    tensors = (q, k, v)
    signed = functions.extras
    if signed is not None and extras is NO_EXTRAS and is_plain(tensors):
        all_options = _options_of(options, functions)
        learns = all_options.learned or q.requires_grad or k.requires_grad or v.requires_grad
        if not (learns and torch.is_grad_enabled()):
            return FORWARD.launch(tensors, signed, all_options)
    all_extras, all_options = arguments_of(extras, options, functions)
    if not is_plain(tensors, all_extras):
        return _watched(tensors, extras, all_extras, all_options)
    if torch.is_grad_enabled() and (
        all_options.learned or any(t.requires_grad for t in tensors) or _learns(extras.sink)
    ):
        return _Attention.apply(q, k, v, *all_extras, all_options)
    if functions.lists:
        all_extras = ModifiedExtras._make((*all_extras[:-BACKWARD_LISTS], *_NO_LISTS[:BACKWARD_LISTS]))
    return FORWARD.launch(tensors, all_extras, all_options)


def _watched(
    tensors: tuple[Tensor, Tensor, Tensor], extras: Extras, all_extras: Any, all_options: Any
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of a call that is not plain."""
    if carries_tangents((*tensors, *all_extras)):
        check_modified(*tensors, all_extras, all_options)
        refuse_tangents(Extras._fields, extras._replace(sink=None))
        attend, learned = _definition(all_extras, all_options, all_captured=True)
        return attend(*tensors, *learned)
    if transforming():
        raise NotImplementedError(
            "score_mod, mask_mod and block_mask must be None under transforms of torch.func that have no "
            "tangents: call flashtile.attention without them, or outside of the transform"
        )
    return FORWARD.traced(tensors, all_extras, all_options)


def _learns(sink: Tensor | None) -> bool:
    return sink is not None and sink.requires_grad


class _Attention(torch.autograd.Function):
    """The autograd node of a plain call."""

    @staticmethod
    def forward(ctx: Any, q, k, v, *others):
        extras, options = ModifiedExtras(*others[:-1]), others[-1]
        out, lse = FORWARD.launch((q, k, v), extras, options)
        _save(ctx, q, k, v, out, lse, extras, options)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout, dlse):
        return (*_gradients(ctx, dout, dlse), None)


def _save(ctx, q, k, v, out, lse, extras, options):
    ctx.save_for_backward(q, k, v, out, lse, *extras)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v and every extra."""
    of_extras: list[Tensor | None] = [None] * len(ModifiedExtras._fields)
    if dout is None and dlse is None:
        return None, None, None, *of_extras
    tensors = ctx.saved_tensors
    saved, extras, options = tensors[:5], ModifiedExtras(*tensors[5:]), ctx.options
    plain = is_plain(saved, extras, (dout, dlse)) and not torch.is_grad_enabled()
    run = BACKWARD.launch if plain else BACKWARD.traced
    dq, dk, dv, dsink, *of_captured = run((dout, dlse, *saved), extras, options)
    if extras.sink is not None:
        of_extras[Extras._fields.index("sink")] = dsink
    for i, gradient in enumerate(of_captured):
        if options.learned >> i & 1:
            of_extras[_FIRST_CAPTURED + i] = gradient
    return dq, dk, dv, *of_extras


def _setup_context(ctx, inputs, output):
    (q, k, v), extras, options = FORWARD.split(inputs)
    out, lse = output
    _save(ctx, q, k, v, out, lse, extras, options)


def _operator_backward(ctx, dout, dlse):
    return *_gradients(ctx, dout, dlse), *(None,) * len(ModifiedOptions._fields)


def _definition(extras: Any, options: Any, all_captured: bool = False) -> tuple[Any, list[Tensor]]:
    """Return standard attention as a function of (q, k, v, *learned), and the learned tensors.

    These are the sink if there is one, and the captured tensors that need a gradient (or all of them).
    """
    given, plain_options = plain_part(extras, options)
    captured = [tensor for tensor in captured_of(extras) if tensor is not None]
    which = [i for i in range(len(captured)) if all_captured or options.learned >> i & 1]
    sinks = [] if given.sink is None else [given.sink]

    def attend(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> tuple[Tensor, Tensor]:
        own = given._replace(sink=learned[0]) if sinks else given
        values = list(captured)
        for i, tensor in zip(which, learned[len(sinks) :], strict=True):
            values[i] = tensor
        return plain(q, k, v, extras, options, values, (own, plain_options))

    return attend, sinks + [captured[i] for i in which]


def _save_for_second(ctx, inputs, output):
    (dout, dlse, q, k, v, _, _), extras, options = BACKWARD.split(inputs)
    ctx.save_for_backward(dout, dlse, q, k, v, *extras)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _second_derivative(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
    """Map the gradients of the backward pass's results to those of its arguments.

    See :func:`flashtile.operators.transforms.second_derivative`; captured tensors replace the bias.
    """
    dout, dlse, q, k, v, *rest = ctx.saved_tensors
    extras, options = ModifiedExtras(*rest), ctx.options
    attend, learned = _definition(extras, options)
    which = [i for i in range(MAX_CAPTURED) if options.learned >> i & 1]
    asked = [*cotangents[:3], *([] if extras.sink is None else [cotangents[3]])]
    asked += [cotangents[4 + i] for i in which]
    ddout, ddlse, (ddq, ddk, ddv, *found) = derivatives.of_gradients(
        attend, asked, dout, dlse, (q, k, v, *learned)
    )
    of_extras: list[Tensor | None] = [None] * len(ModifiedExtras._fields)
    if extras.sink is not None:
        of_extras[Extras._fields.index("sink")] = found.pop(0)
    for i, gradient in zip(which, found, strict=True):
        of_extras[_FIRST_CAPTURED + i] = gradient
    return ddout, ddlse, ddq, ddk, ddv, None, None, *of_extras, *(None,) * len(options)


register_autograd("forward_modified", _operator_backward, _setup_context)
register_autograd("backward_modified", _second_derivative, _save_for_second)
