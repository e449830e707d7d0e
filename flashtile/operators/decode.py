"""Decoding as operations: attention over a cache, appends, combining of partial results, copies of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.checks.decode import (
    check_append,
    check_combine,
    check_copy,
    check_decode,
    check_no_gradient,
    check_own_memory,
)
from flashtile.checks.values import (
    check_append_values,
    check_copy_values,
    check_decode_values,
    check_held_pages,
)
from flashtile.op.into import Into, LaunchInto, Result
from flashtile.op.observers import forward_flops, has_data, lengths_of
from flashtile.op.operation import (
    SIGNATURE_BYTES,
    Calls,
    Operation,
    Writing,
    any_learns,
    is_plain,
    launch_cache,
    on_meta,
    reads_values,
    signatures,
    tell_written,
)
from flashtile.op.refusals import (
    refuse_tangents,
    refuse_transformed_gradients,
    transforming,
    without_backward,
)
from flashtile.op.selection import on_target, select
from flashtile.problems.addresses import sequence_lengths
from flashtile.problems.common import MAX_LENGTH, extended
from flashtile.problems.decode import (
    AppendOptions,
    AppendProblem,
    AppendTensors,
    CacheTensors,
    CombineOptions,
    CombineProblem,
    CopyOptions,
    CopyProblem,
    CopyTensors,
    DecodeOptions,
    DecodeProblem,
    NoTensors,
    capacity,
    out_dtype,
)
from flashtile.problems.masking import EVERYTHING

NO_GRADIENT = (
    "attention over a cache has no backward pass (call it under torch.no_grad(), or train with "
    "flash_attn_func or flash_attn_varlen_func)"
)


def _decode_results(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
) -> tuple[Result, Result | None]:
    *rows, heads, _ = q.shape
    out = (*rows, heads, v_cache.shape[-1]), out_dtype(q, options)
    if not options.return_lse:
        return out, None
    lse_shape = (heads, *rows) if tensors.cu_seqlens_q is not None else (rows[0], heads, rows[1])
    return out, (lse_shape, torch.float64 if q.dtype == torch.float64 else torch.float32)


def _mass_results(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
) -> tuple[Result | None, ...]:
    mass = tuple(k_cache.shape[:3]), torch.float32
    return mass, *_decode_results(q, k_cache, v_cache, tensors, options)


def _fake_decode(q: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    results = _decode_results(q, *others)
    return tuple(None if r is None else q.new_empty(r[0], dtype=r[1]) for r in results)


def _decode_flops(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tensors: CacheTensors, options: DecodeOptions
) -> int:
    if tensors.cu_seqlens_q is None:
        rows = [q.shape[1]] * q.shape[0]
    else:
        rows = lengths_of(tensors.cu_seqlens_q, options.max_seqlen_q or 0)
    most = capacity(k_cache, tensors.block_table)
    lengths = [most] * len(rows)
    if tensors.cache_seqlens is not None and has_data(tensors.cache_seqlens):
        keys = sequence_lengths(len(rows), most, tensors, options.seqlen_new)
        assert keys is not None
        lengths = (keys if tensors.cache_leftpad is None else keys - tensors.cache_leftpad).tolist()
    scores = sum(m * n for m, n in zip(rows, lengths, strict=True))
    return forward_flops(scores, q.shape[-2], q.shape[-1], v_cache.shape[-1])


def _fake_combine(
    out_partial: Tensor, lse_partial: Tensor, tensors: NoTensors, options: CombineOptions
) -> tuple[Tensor, Tensor]:
    _, batch, seqlen, heads, _ = out_partial.shape
    out = out_partial.new_empty(out_partial.shape[1:], dtype=options.out_dtype)
    return out, lse_partial.new_empty((batch, heads, seqlen))


class _Writing(Writing):
    """An operation that writes into two caches. No gradient flows through a cache."""

    def __call__(self, tensors: tuple, optional: Any, options: Any) -> None:
        if is_plain(tensors, optional):
            self.launch(tensors, optional, options)
        else:
            self.check(*tensors, optional, options)  # outside no_grad, to find tensors that require grad
            with torch.no_grad():
                self.traced(tensors, optional, options)

    def check_values(self, tensors: tuple, optional: Any, options: Any) -> None:
        check_own_memory(tensors[0], tensors[1])
        super().check_values(tensors, optional, options)


class _Decoding(Operation):
    """Attention over a cache.

    A dense cache may grow at every step, by ``torch.cat`` or as a longer slice of a larger cache. It then has
    a new signature but needs no new kernel. Its launch is derived from the launch for the previous length.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._grown = launch_cache()
        """Launches by the parts of a signature that do not depend on the length of the cache."""

    def prepare_checked(self, tensors: tuple, optional: Any, options: Any) -> Any:
        q, k_cache, v_cache = tensors
        if optional.block_table is not None or not _are_as_long(k_cache, v_cache):
            return super().prepare_checked(tensors, optional, options)
        kind = (options, *signatures((q, *optional)), *_but_length(k_cache), *_but_length(v_cache))
        known = self._grown.get(kind)
        launch = None if known is None else known.with_cache_length(*tensors, optional)
        if launch is None:
            launch = super().prepare_checked(tensors, optional, options)
        if hasattr(launch, "with_cache_length"):
            self._grown.store(kind, launch, SIGNATURE_BYTES)
        return launch

    def of_layer(self, tensors: tuple, optional: Any, options: Any, tables: dict | None) -> Any:
        """Return the results of a call, of which several have the same lengths and pass the same ``tables``.

        Those that also have the same launch share a table of work tiles and the rows of results that no work
        tile writes, both of which the first of them fills, so only the last results are valid. None: nothing
        is shared.
        """
        if tables is None or torch.is_grad_enabled() or not is_plain(tensors, optional):
            return self(tensors, optional, options)
        launch = self.prepared(tensors, optional, options)
        self.check_values(tensors, optional, options)
        if getattr(launch, "takes_tables", False):
            return launch(*tensors, optional, tables=tables)
        return launch(*tensors, optional)


class _AddingMass(Into):
    """Attention over a cache that also adds to ``mass``, with launches of its own."""

    def prepare(self, tensors: tuple, optional: Any, options: Any) -> LaunchInto:
        return LaunchInto(Operation.prepare(self, tensors, optional, options), self, tensors, optional)

    def launch_on_meta(self, tensors: tuple, optional: Any, options: Any, target: Any = None) -> None:
        prepared = self._select(tensors, optional, options, target).prepare()
        launch = LaunchInto(prepared, self, tensors, optional)
        launch(*map(on_meta, tensors), optional._make(map(on_meta, optional)))

    def check_values(self, tensors: tuple, optional: Any, options: Any) -> None:
        super().check_values(tensors, optional, options)
        if reads_values(tensors[0], options.debug_checks):
            q, k_cache, v_cache = tensors[:3]
            check_held_pages(q, k_cache, v_cache, optional, options)


def _are_as_long(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether both caches are (batch_cache, seqlen_cache, heads_kv, head_dim), with equal, valid lengths."""
    if k_cache.dim() != 4 or v_cache.dim() != 4:
        return False
    return 0 < k_cache.shape[1] == v_cache.shape[1] <= MAX_LENGTH


def _but_length(cache: Tensor) -> tuple:
    """Return the signature of a dense cache, without its length and the strides that depend on it."""
    batch, _, heads, head_dim = cache.shape
    aligned = not cache.data_ptr() & 15
    return batch, heads, head_dim, cache.stride(3), cache.dtype, cache.device, aligned


DECODE = _Decoding(
    "decode",
    part="decode",
    tensors=("q", "k_cache", "v_cache"),
    optional=CacheTensors(),
    options=DecodeOptions,
    results=2,
    check=check_decode,
    check_values=check_decode_values,
    describe=DecodeProblem.from_tensors,
    fake=_fake_decode,
    no_gradient=NO_GRADIENT,
    flops=_decode_flops,
)
DECODE_INTO = Into(DECODE, ("out", "lse"), _decode_results)
DECODE_MASS = _AddingMass(DECODE, ("mass", "out", "lse"), _mass_results, "decode_mass")
APPEND = _Writing(
    "append_kvcache",
    part="decode",
    tensors=("k_cache", "v_cache", "k", "v"),
    optional=AppendTensors(),
    options=AppendOptions,
    results=0,
    mutates=("k_cache", "v_cache", "q_rotated"),
    check=check_append,
    check_values=check_append_values,
    describe=AppendProblem.from_tensors,
)
COMBINE = Operation(
    "combine",
    part="decode",
    tensors=("out_partial", "lse_partial"),
    optional=NoTensors(),
    options=CombineOptions,
    results=2,
    check=check_combine,
    describe=CombineProblem.from_tensors,
    fake=_fake_combine,
    no_gradient="flash_attn_combine has no backward pass, merge_states has",
)
COPY = _Writing(
    "copy_blocks",
    part="decode",
    tensors=("k_cache", "v_cache", "block_pairs"),
    optional=CopyTensors(),
    options=CopyOptions,
    results=0,
    mutates=("k_cache", "v_cache", "k_descale", "v_descale"),
    check=check_copy,
    check_values=check_copy_values,
    describe=CopyProblem.from_tensors,
)

_append_and_decode = launch_cache()
"""Pairs of launches (append, attention). One look-up finds both, to save host time in decoding steps.

The first one is None if the attention kernel also appends.
"""


_ANGLES = dict.fromkeys(("rotary_cos", "rotary_sin", "rotary_seqlens"), "Tensor | None")
_StepTensors: Any = extended("_StepTensors", CacheTensors, _ANGLES, (*CacheTensors(), None, None, None))
"""The optional tensors of attention over a cache, and those that rotate the queries and the appended keys."""
_StepOptions: Any = extended("_StepOptions", DecodeOptions, {"rotary_interleaved": "bool"})


class _Step(Calls):
    """Attention of one query of each sequence over a cache, after an append of one token.

    It has no torch operator. It lists the kernels that such calls need in addition to those of an append and
    of attention, for compiling ahead.
    """

    def launch_on_meta(self, tensors: tuple, optional: Any, options: Any, target: Any = None) -> None:
        q, k_cache, v_cache, k, v = tensors
        cache_tensors = _part(CacheTensors, optional)
        appended = AppendTensors(
            cache_seqlens=optional.cache_seqlens,
            cache_batch_idx=optional.cache_batch_idx,
            block_table=optional.block_table,
            rotary_cos=optional.rotary_cos,
            rotary_sin=optional.rotary_sin,
            rotary_seqlens=optional.rotary_seqlens,
        )
        decode_options = _part(DecodeOptions, options)
        append_options = AppendOptions(rotary_interleaved=options.rotary_interleaved, backend=options.backend)
        problems = (
            AppendProblem.from_tensors(k_cache, v_cache, k, v, appended, append_options),
            DecodeProblem.from_tensors(q, k_cache, v_cache, cache_tensors, decode_options),
        )
        if target is not None:
            problems = tuple(on_target(problem, target) for problem in problems)
        append, attend = (
            select(operation, problem, options.backend).prepare()
            for operation, problem in zip((APPEND, DECODE), problems, strict=True)
        )
        joined = _joined(append, attend)
        if joined is not None:
            given = map(on_meta, tensors)
            joined(*given, AppendTensors(*map(on_meta, appended)), CacheTensors(*map(on_meta, cache_tensors)))

    def note(self, tensors: tuple, optional: Any, options: Any, joined: bool) -> None:
        """Note a call with a new signature, for :func:`remembering` and for compiling its kernels together.

        ``joined``: whether the call uses the kernel that also appends.
        """
        self._remember(tensors, optional, options)
        if joined:
            self._set_newest(tensors, optional, options)


def _part(kind: Any, extended_by: Any) -> Any:
    """Return the NamedTuple ``kind`` with those fields of one that extends it."""
    return kind(*(getattr(extended_by, name) for name in kind._fields))


STEP = _Step("append_and_decode", ("q", "k_cache", "v_cache", "k", "v"), _StepTensors(), _StepOptions)


def _joined(append: Any, attend: Any) -> Any:
    """Return a launch that does the work of both launches in the attention kernel; None if none can."""
    return attend.with_append(append) if hasattr(attend, "with_append") else None


_BOTH = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", *CacheTensors._fields)
"""Names of all tensors of :func:`append_and_decode` that might require a gradient."""


Buffers = tuple[Any, ...]
"""The caller's buffers: (out, lse) or (mass, out, lse), in which out and lse may be None. () without any."""


def _operation(buffers: Buffers) -> Any:
    """Return the operation of attention that writes into ``buffers``."""
    if not buffers:
        return DECODE
    return DECODE_INTO if len(buffers) == 2 else DECODE_MASS


def decode(
    cache: tuple[Tensor, Tensor, Tensor], tensors: CacheTensors, options: DecodeOptions, buffers: Buffers
) -> Any:
    """Compute (out, lse) of q over (k_cache, v_cache), or fill and return ``buffers`` if there are any."""
    if buffers:
        return _operation(buffers).write(cache, tensors, options, buffers)
    return DECODE(cache, tensors, options)


class SharedKeys(NamedTuple):
    """A level of a cascade: groups of adjacent sequences, and the keys that all sequences of a group have.

    Attributes:
        block_table: (groups, max_blocks) int32, the pages of a sequence of each group.
        end: (groups,) int32. Group g shares the keys at positions ``first[g] <= j < end[g]``.
        first: (groups,) int32. None: 0.
        cu_seqlens_q: (groups + 1,) int32, where the queries of each group start in q. None: one group.
        max_seqlen_q: the largest number of queries of a group. None if there is one group.
        tables: a dict, empty at first, if the layers of a step use the level, one after the other. They then
            share tables of work tiles, and memory of results.
    """

    block_table: Tensor
    end: Tensor
    first: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    tables: dict[Any, Any] | None = None


def attend_shared(
    cache: tuple[Tensor, Tensor, Tensor],
    tensors: CacheTensors,
    options: DecodeOptions,
    levels: Sequence[SharedKeys],
) -> CacheTensors:
    """Attend to the keys that groups of sequences share, and return ``tensors`` with the result as prior.

    All queries of a group attend together, as if they belonged to one sequence, so its keys are read once.
    Every query must see all of these keys. Each level continues the softmax of the one before it. The caller
    computes attention with the result, whose ``cache_leftpad`` must hide the shared keys.

    Args:
        cache: (q, k_cache, v_cache), q as :func:`decode` takes it. The caches have pages.
        tensors, options: of the call that attends to each sequence's own keys.
        levels: the levels, in ascending order of positions.
    """
    q, k_cache, v_cache = cache
    rows = q.flatten(0, -3)
    for level in levels:
        shared = CacheTensors(
            cache_seqlens=level.end, cache_leftpad=level.first, block_table=level.block_table,
            cu_seqlens_q=level.cu_seqlens_q, k_descale=tensors.k_descale, v_descale=tensors.v_descale,
            prior_out=tensors.prior_out, prior_lse=tensors.prior_lse,
        )  # fmt: skip
        options = options._replace(
            max_seqlen_q=level.max_seqlen_q, seqlen_new=0, masking=EVERYTHING, partial=True, return_lse=True
        )
        queries = rows if level.cu_seqlens_q is not None else rows.unsqueeze(0)
        out, lse = DECODE.of_layer((queries, k_cache, v_cache), shared, options, level.tables)
        tensors = tensors._replace(prior_out=out.flatten(0, -3), prior_lse=lse.flatten(0, -2))
    return tensors


def append_and_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    appended: AppendTensors,
    append_options: AppendOptions,
    tensors: CacheTensors,
    options: DecodeOptions,
    buffers: Buffers = (),
) -> tuple[Tensor, Any]:
    """Append k and v to the cache, then compute (out, lse) of q over the cache.

    The results are written into ``buffers``, if there are any. The whole call is checked before anything is
    written. If ``appended`` has rotary angles, this function also rotates q. Therefore ``appended`` must not
    contain queries.
    """
    new = (q, k_cache, v_cache, k, v)
    angles = appended.rotary_cos, appended.rotary_sin, appended.rotary_seqlens
    attend = _operation(buffers)
    if buffers:
        buffers = attend.complete(new[:3], tensors, options, buffers)
        attend.refuse_gradients(buffers, _BOTH, (*new, *angles[:2], *tensors))
    plain = is_plain(new, tensors, angles, buffers)
    if plain and not (torch.is_grad_enabled() and any_learns(new, angles, tensors)):
        return _launch_both(new, appended, append_options, tensors, options, buffers)
    given = (*new, *angles[:2], *tensors)
    if not plain:
        attend.check(q, k_cache, v_cache, *buffers, tensors, options)
        check_append(k_cache, v_cache, k, v, appended, append_options)
        refuse_tangents(_BOTH, given)
        if transforming():
            refuse_transformed_gradients(NO_GRADIENT, _BOTH, given)
    both = _launch_both if plain else _trace_both
    run = partial(both, new, appended, append_options, tensors, options, buffers)
    if torch.is_grad_enabled():
        check_no_gradient(k_cache, v_cache)
        named = zip(_BOTH, given, strict=True)
        learning = [(name, t) for name, t in named if t is not None and t.requires_grad]
        if learning:
            if torch.compiler.is_dynamo_compiling():
                raise NotImplementedError(f"{learning[0][0]} must not require a gradient: {NO_GRADIENT}")
            return without_backward(run, NO_GRADIENT, learning)
    return run()


def _launch_both(
    given: tuple[Tensor, ...],
    appended: AppendTensors,
    append_options: AppendOptions,
    tensors: CacheTensors,
    options: DecodeOptions,
    buffers: Buffers,
) -> tuple[Tensor, Any]:
    q, k_cache, v_cache, k, v = given
    angles = appended.rotary_cos, appended.rotary_sin, appended.rotary_seqlens
    own: tuple[Any, ...] = ()
    if appended.k_descale is not tensors.k_descale:
        own = appended.k_descale, appended.v_descale
    attend = _operation(buffers)
    try:
        of_both = (q, k_cache, v_cache, k, v, *tensors, *angles, *own, *buffers)
        key = (options, append_options, len(own), *signatures(of_both))
    except Exception:  # not a tensor, or without strides: the checks raise an error
        attend.check(q, k_cache, v_cache, *buffers, tensors, options)
        check_append(k_cache, v_cache, k, v, appended, append_options)
        raise
    launches: Any = _append_and_decode.get(key)
    queries, unrotated = q, appended
    if appended.rotary_cos is not None and (launches is None or launches[0] is not None):
        queries = q.new_empty(q.shape)
        appended = appended._replace(q=q, cu_seqlens_q=tensors.cu_seqlens_q, q_rotated=queries)
    cache, new = (queries, k_cache, v_cache, *buffers), (k_cache, v_cache, k, v)
    if launches is None:
        attend.check(*cache, tensors, options)  # before anything is prepared for the append
        launches = APPEND.prepared(new, appended, append_options), attend.prepared(cache, tensors, options)
        joined = _joined(*launches)
        if joined is not None:
            launches = None, joined
        _note_step(given, appended, append_options, tensors, options, buffers, joined is not None)
        _append_and_decode.store(key, launches, SIGNATURE_BYTES)
    APPEND.check_values(new, appended, append_options)
    attend.check_values(cache, tensors, options)
    if launches[0] is None:
        results = launches[1](q, k_cache, v_cache, k, v, unrotated, tensors)
        tell_written([k_cache, v_cache])
        return results
    if buffers:
        launches[1].refuse_overlap(cache, tensors)
    launches[0](*new, appended)
    tell_written([k_cache, v_cache])
    results = launches[1](*cache, tensors)
    return buffers or results


def _note_step(
    given: tuple[Tensor, ...],
    appended: AppendTensors,
    append_options: AppendOptions,
    tensors: CacheTensors,
    options: DecodeOptions,
    buffers: Buffers,
    joined: bool = False,
) -> None:
    """Note a call whose attention kernel may also append (:class:`_Step`)."""
    q, k_cache = given[:2]
    if q.shape[1] == options.seqlen_new == 1 and k_cache.element_size() == 2 and not buffers:
        angles = appended.rotary_cos, appended.rotary_sin, appended.rotary_seqlens
        optional = _StepTensors(*tensors, *angles)
        STEP.note(given, optional, _StepOptions(*options, append_options.rotary_interleaved), joined)


def _trace_both(
    given: tuple[Tensor, ...],
    appended: AppendTensors,
    append_options: AppendOptions,
    tensors: CacheTensors,
    options: DecodeOptions,
    buffers: Buffers,
) -> tuple[Tensor, Any]:
    q, k_cache, v_cache, k, v = given
    if not torch.compiler.is_dynamo_compiling():
        # The engine lists its kernels by calls of fake tensors. The same calls of real tensors are joined.
        _note_step(given, appended, append_options, tensors, options, buffers)
    queries = q.detach()
    if appended.rotary_cos is not None:
        rotated = queries.new_empty(q.shape)
        appended = appended._replace(q=queries, cu_seqlens_q=tensors.cu_seqlens_q, q_rotated=rotated)
        queries = rotated
    with torch.no_grad():
        APPEND.traced((k_cache, v_cache, k, v), appended, append_options)
    return decode((queries, k_cache, v_cache), tensors, options, buffers)
