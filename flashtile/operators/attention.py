"""Attention as operations: the forward and the backward pass.

:mod:`flashtile.operators.gradients` connects them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashtile.checks.attention import check_forward, check_tangents, check_traced
from flashtile.op.into import ALIGNMENT, Into, Result
from flashtile.op.observers import backward_flops, count_scores, forward_flops
from flashtile.op.operation import (
    SIGNATURE_BYTES,
    Operation,
    any_learns,
    fast_guard,
    is_plain,
    launch_cache,
    on_meta,
    signatures,
)
from flashtile.operators import functions, statistics
from flashtile.operators.decode import DECODE
from flashtile.operators.functions import SignedExtras
from flashtile.operators.shardings import backward_shardings, forward_shardings
from flashtile.problems.attention import (
    NO_EXTRAS,
    ModifiedExtras,
    ModifiedOptions,
    OptionalTensors,
    Options,
    Problem,
    learned_of,
    new_lse,
    statistics_of,
)
from flashtile.problems.common import shared_fields
from flashtile.problems.decode import CacheTensors, DecodeOptions
from flashtile.problems.masks import CAPTURED
from flashtile.torch_private import has_no_memory


def _forward_results(
    q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors, options: Options
) -> tuple[Result, Result]:
    *rows, heads, _ = q.shape
    lse_shape = (heads, *rows) if extras.cu_seqlens_q is not None else (rows[0], heads, rows[1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype = lse_dtype if options.partial else q.dtype
    return ((*rows, heads, v.shape[-1]), out_dtype), (lse_shape, lse_dtype)


def _fake_forward(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    (out, dtype), (lse, lse_dtype) = _forward_results(q, *others)
    return q.new_empty(out, dtype=dtype), new_lse(q, lse, lse_dtype, statistics_of(others[-1]))


def of_forward(
    dout: Any, dlse: Any, q: Tensor, k: Tensor, v: Tensor, out: Any, lse: Any, *others: Any
) -> Any:
    """Return the arguments of the forward pass, given the arguments of its backward pass."""
    return q, k, v, *others


def _fake_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    q, k, v, extras, options = of_forward(*arguments)
    sink, bias = extras.sink, extras.bias
    dsink = None if sink is None else sink.new_empty(sink.shape)
    dbias = bias.new_empty(bias.shape) if options.bias_grad else None
    (_, dtype), _ = _forward_results(q, k, v, extras, options)
    of_captured = (t.new_empty(t.shape) for t in (getattr(extras, CAPTURED[i]) for i in learned_of(options)))
    return *(t.new_empty(t.shape, dtype=dtype) for t in (q, k, v)), dsink, dbias, *of_captured


def _forward_flops(q: Tensor, k: Tensor, v: Tensor, extras: OptionalTensors, options: Options) -> int:
    return forward_flops(_count_scores(q, k, extras, options), q.shape[-2], q.shape[-1], v.shape[-1])


def _backward_flops(*arguments: Any) -> int:
    q, k, v, extras, options = of_forward(*arguments)
    return backward_flops(_count_scores(q, k, extras, options), q.shape[-2], q.shape[-1], v.shape[-1])


def _count_scores(q: Tensor, k: Tensor, extras: OptionalTensors, options: Options) -> int:
    of_q = extras.cu_seqlens_q, options.max_seqlen_q
    return count_scores(q, *of_q, k.shape[1], extras.cu_seqlens_k, options.max_seqlen_k)


def over_cache(
    tensors: tuple, extras: OptionalTensors, options: Options
) -> tuple[tuple, CacheTensors, DecodeOptions]:
    """Return the arguments of an equal call over a cache. The pages of packed keys are single tokens."""
    q, k, v = tensors
    cached = CacheTensors(**shared_fields(CacheTensors, extras))
    own = DecodeOptions(**shared_fields(DecodeOptions, options))
    starts, lengths = extras.cu_seqlens_k, extras.seqused_k
    if starts is None:
        return tensors, cached._replace(cache_seqlens=lengths), own
    assert options.max_seqlen_k is not None
    table = starts[:-1, None] + torch.arange(options.max_seqlen_k, dtype=torch.int32, device=k.device)
    lengths = starts.diff() if lengths is None else lengths
    pages = q, k.unsqueeze(1), v.unsqueeze(1)
    return pages, cached._replace(block_table=table, cache_seqlens=lengths), own


class ForwardOperation(Operation):
    def prepare(self, tensors: tuple, extras: Any, options: Any) -> Callable[..., Any]:
        """Return a launch."""
        if self._over_cache(tensors, extras, options):
            return lambda *call: DECODE.launch(*over_cache(call[:-1], call[-1], options))
        return super().prepare(tensors, extras, options)

    def launch_on_meta(self, tensors: tuple, extras: Any, options: Any, target: Any = None) -> None:
        if self._over_cache(tensors, extras, options, target):
            DECODE.launch_on_meta(*over_cache(tensors, extras, options), target)
        else:
            super().launch_on_meta(tensors, extras, options, target)

    def _over_cache(self, tensors: tuple, extras: Any, options: Any, target: Any = None) -> bool:
        """Whether the call is computed as one over a cache: with ``invariant``, unless a forward kernel gives
        the bits of that."""
        return options.invariant and not self.is_served(tensors, extras, options, target)

    def check_values(self, tensors: tuple, extras: OptionalTensors, options: Options) -> None:
        """Check offsets and lengths, which are optional tensors. Calls without them have nothing to check."""
        if extras is not NO_EXTRAS:
            super().check_values(tensors, extras, options)

    @staticmethod
    def signature(optional: Any) -> tuple:
        return optional.signature() if type(optional) is SignedExtras else signatures(optional)

    def following(self, tensors: tuple, extras: Any, options: Any) -> Iterable[tuple]:
        """Return the backward pass, if a tensor requires grad."""
        if not any_learns(tensors, extras):
            return ()
        q, k, v = tensors
        options = options._replace(max_logits=False, entropy=False)  # nothing may depend on them
        out, lse = self.fake(*map(on_meta, tensors), extras, options)
        if any_learns([extras.bias]):
            options = options._replace(bias_grad=True)
        options = options._replace(invariant=False)
        if any_learns([extras.alibi_slopes]):
            extras, options = functions.learning_slopes(q, k, extras, options)
        return ((BACKWARD, (out, None, q, k, v, out, lse), extras, options),)


def _fake_tangents(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, extras, options = others
    results = _fake_forward(q, k, v, extras, options)
    return *results, *map(torch.empty_like, results)


def _tangents_flops(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> int:
    *tangents, extras, options = others
    of_q, of_k, of_v = (tangent is not None for tangent in tangents)
    widths = q.shape[-1] * (1 + of_q + of_k), v.shape[-1] * (1 + (of_q or of_k) + of_v)
    return forward_flops(_count_scores(q, k, extras, options), q.shape[-2], *widths)


class TangentsOperation(Operation):
    """The forward pass in forward mode, from q, k, v and their tangents to out, lse and theirs.

    An input's tangent may be None, which means 0.
    """

    def launch(self, tensors: tuple, extras: Any, options: Any) -> Any:
        return super().launch(self.normalized(tensors), extras, options)

    def normalized(self, tensors: tuple) -> tuple:
        """Return the tensors with tangents that have the strides of their tensors, as kernels read them."""
        own, tangents = list(tensors[:3]), list(tensors[3:])
        for i, (tensor, tangent) in enumerate(zip(own, tangents, strict=True)):
            if tangent is None or has_no_memory(tangent):  # torch's zero tensors, which autograd makes
                tangents[i] = None
            elif tensor.stride() != tangent.stride():
                own[i], tangents[i] = tensor.contiguous(), tangent.contiguous()
        return *own, *tangents

    def prepare(self, tensors: tuple, extras: Any, options: Any) -> Callable[..., Any]:
        """Return a launch: standard attention if no backend serves the call, or if it has statistics."""
        if not statistics_of(options) and self.is_served(tensors, extras, options):
            return super().prepare(tensors, extras, options)
        if options.backend is not None:  # it may have no kernel for tangents, but must serve the call
            FORWARD.refuse_unserved(tensors[:3], extras, options)
        from flashtile.operators import derivatives

        def launch(*call: Any) -> tuple[Tensor, ...]:
            return derivatives.along(
                lambda q, k, v: derivatives.plain(q, k, v, call[-1], options), call[:3], call[3:6]
            )

        return launch


@dataclass(slots=True)
class Repeated:
    """The launch of backward passes that repeat, as those of a model's layers do.

    Attributes:
        launch: the launch of the last call with some options.
        calls: number of calls in a row that had it, up to REPEATS.
        alike: whether (dout, q, k, v, out, lse) are like those of these calls (:func:`fast_guard`); None
            before there were REPEATS of them.
    """

    launch: Callable[..., Any]
    calls: int = 1
    alike: Callable[..., bool] | None = None


REPEATS = 8
"""Calls in a row with one launch, after which a guard is made. It takes as long as three signatures."""


class BackwardOperation(Operation):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._repeated = launch_cache()
        """:class:`Repeated` by options, for calls without optional tensors and without dlse."""

    def repeated(self, dout: Tensor, saved: tuple, options: Options) -> Callable[..., Any] | None:
        """Return the launch of a plain call like the last ones, or None if it must be looked up.

        ``saved`` are (q, k, v, out, lse). A guard takes a third of the time of the tensors' signature.
        """
        if torch.is_grad_enabled() or not is_plain((dout,)):
            return None
        known = self._repeated.get(options)
        if known is None or known.alike is None:
            return None
        return known.launch if known.alike(dout, *saved) and _are_aligned(dout, *saved) else None

    def _count(self, launch: Callable[..., Any], tensors: tuple, options: Options) -> None:
        known = self._repeated.get(options)
        if known is None or known.launch is not launch:
            self._repeated.store(options, Repeated(launch), SIGNATURE_BYTES)
        elif known.calls < REPEATS:
            known.calls += 1
            given = tuple(tensor for tensor in tensors if tensor is not None)
            if known.calls == REPEATS and _are_aligned(*given):
                known.alike = fast_guard(given)

    def launch(self, tensors: tuple, extras: OptionalTensors, options: Options) -> Any:
        """Return (dq, dk, dv, dsink, dbias) from dout and dlse. One of the two may be None, which means 0.

        With score or mask functions, the gradients of captured tensors follow. They are None for captured
        tensors that need no gradient.
        """
        tensors = self.normalized(tensors)
        if options.max_logits or options.entropy:
            tensors, options = statistics.for_kernels(tensors, options)
        prepared = self.prepared(tensors, extras, options)
        if extras is NO_EXTRAS and tensors[1] is None:
            self._count(prepared, tensors, options)
        results = prepared(*tensors, extras)
        return results if extras.sink is None else statistics.of_sink(results, tensors, extras, options)

    def launch_on_meta(self, tensors: tuple, extras: Any, options: Any, target: Any = None) -> None:
        tensors, options = statistics.for_kernels(tensors, options)
        super().launch_on_meta(tensors, extras, options, target)

    def normalized(self, tensors: tuple) -> tuple:
        """Return the tensors with contiguous dout and dlse, because autograd passes them with any strides.

        If dout is None, zeros replace it.
        """
        dout, dlse, q, k, v, out, lse = tensors
        dout = out.new_zeros(out.shape) if dout is None else dout.contiguous()
        return (dout, None if dlse is None else dlse.contiguous(), q, k, v, out, lse)

    def returned(self, results: Any, tensors: Any) -> Any:
        """Return the operator's five results: dq, dk, dv, dsink and dbias.

        With score or mask functions, one vector with the gradients of all captured tensors replaces dbias.
        """
        (*gradients, dbias), of_captured = results[: self.results], results[self.results :]
        return super().returned((*gradients, functions.pack(of_captured) if of_captured else dbias), tensors)


def _are_aligned(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> bool:
    addresses = dout.data_ptr() | q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
    return not (addresses | lse.data_ptr()) % ALIGNMENT


FORWARD = ForwardOperation(
    "forward",
    tensors=("q", "k", "v"),
    optional=NO_EXTRAS,
    options=Options,
    results=2,
    extended_to=(ModifiedExtras, ModifiedOptions),
    check=check_forward,
    describe=Problem.from_tensors,
    fake=_fake_forward,
    check_values=functions.check_values,
    check_traced=check_traced,
    flops=_forward_flops,
    shardings=forward_shardings,
)
TANGENTS = TangentsOperation(
    "tangents",
    tensors=("q", "k", "v", "q_tangent?", "k_tangent?", "v_tangent?"),
    optional=NO_EXTRAS,
    options=Options,
    results=4,
    extended_to=(ModifiedExtras, ModifiedOptions),
    check=check_tangents,
    describe=lambda q, k, v, *others: Problem.from_tensors(q, k, v, *others[-2:]),
    fake=_fake_tangents,
    check_values=lambda q, k, v, *others: functions.check_values(q, k, v, *others[-2:]),
    flops=_tangents_flops,
)
FORWARD_INTO = Into(FORWARD, ("out", "lse"), _forward_results)
BACKWARD = BackwardOperation(
    "backward",
    tensors=("dout?", "dlse?", "q", "k", "v", "out", "lse"),
    optional=NO_EXTRAS,
    options=Options,
    extended_to=(ModifiedExtras, ModifiedOptions),
    results=5,
    check=lambda *arguments: None,  # the forward pass checked what it saved
    describe=lambda *arguments: Problem.from_tensors(*of_forward(*arguments)),
    fake=_fake_backward,
    flops=_backward_flops,
    shardings=backward_shardings,
)
