"""Attention over paged caches, as the plug-ins of vLLM and SGLang call it.

A layer calls internal operators directly. The types of an engine's arguments never vary, and outside of CUDA
graphs this saves host time in every layer. Kernels are chosen by shapes, never by lengths, so an engine may
capture the calls in CUDA graphs.

Views and checks would cost most of a layer's host time. They depend on nothing but the signatures of the
tensors that the engine passes. The first call with a signature makes them, takes the general path and stores
its launch. Later calls find this launch and give it the addresses of the engine's tensors, which a view does
not change. They find it by the step, whose signatures are read once for all layers, and compare the other
tensors with those of the first call by guards (``op.operation.guard``), which read no signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.caches import BoundedCache
from flashtile.op.operation import (
    CACHE_BYTES,
    DEBUG,
    ON,
    SIGNATURE_BYTES,
    any_learns,
    environment,
    guard,
    is_dynamo_compiling,
    is_plain,
    launch_cache,
    reads_values,
    signatures,
    tell_written,
)
from flashtile.operators import decode as operators
from flashtile.problems.decode import AppendOptions, AppendTensors, CacheTensors, DecodeOptions
from flashtile.problems.masking import Masking
from flashtile.torch_private import in_forward_mode, num_dispatch_modes

INVARIANT_QUERIES = 128
"""Lower bound of ``max_seqlen_q`` for attention over a cache if results must not depend on the batch. For all
``max_seqlen_q`` above the bound, the kernel has the same tile."""
MAX_INVARIANT_HEAD = 128
"""Largest head size at which the results of Hopper's kernel do not depend on the batch. For larger heads, the
kernel rescales all rows of a tile when one row needs it, so results depend on how a prompt is cut into
chunks. The portable kernel, which rescales each row by itself, is used instead."""
APPEND_OPTIONS = AppendOptions()
OF_LAYER = "alibi_slopes", "sink", "k_descale", "v_descale"
"""The optional tensors of a call that belong to the layer. The others belong to the step."""

MAX_KNOWN = 8
"""Maximum number of launches of a layer in a step, for tensors of different signatures."""


class Known(NamedTuple):
    """The launch of a call, for later calls of the same kind."""

    serves: Callable[..., bool]
    """Whether the launch is for tensors like those that the engine passes now."""
    launch: Any
    of_values: int
    """Bytes from the last tensor of the cache to the first value."""
    aligned: list[bool | None]
    """Whether the address of each optional tensor of the layer is a multiple of 16; None without the tensor.

    The addresses of all tensors that the engine passes are.
    """


_launches = launch_cache()
"""A tuple of :class:`Known` by the kinds of a layer and of a step."""
_kinds = BoundedCache(CACHE_BYTES)


def _kind(*properties: Any) -> object:
    """Return an object that stands for these properties. Unlike them, it is hashed in no time."""
    return _kinds.get(properties) or _kinds.store(properties, object(), SIGNATURE_BYTES)


class StepTensors(NamedTuple):
    """A step as launches take it."""

    source: tuple
    """The fields of the step that this object is made of."""
    kind: object
    """Stands for everything in the step that a launch depends on."""
    addresses: CacheTensors
    """The addresses of the step's tensors, which are the same object for all layers."""
    memory: dict[int, Tensor]
    """Memory for partial results by stream, which the layers share."""


@dataclass
class Step:
    """Lengths and pages of the sequences in one engine step, for all layers of a kind."""

    num_actual_tokens: int
    max_query_len: int
    """Upper bound of the number of queries of a sequence."""
    query_start_loc: Tensor
    """(num_reqs + 1,) int32: the first row of q of each sequence, and the end."""
    seq_lens: Tensor
    """(num_reqs,) int32: number of keys of each sequence, including those of this step."""
    block_table: Tensor
    """(num_reqs, max_blocks) int32."""
    is_one_query_each: bool
    """Whether row i of q is the only query of sequence i."""
    groups: operators.SharedKeys | None = field(default=None, init=False)
    """Keys that sequences share (:mod:`flashtile.integrations.paged_groups`)."""
    _prepared: StepTensors | None = field(default=None, init=False, repr=False, compare=False)

    def tensors(self, *of_layer: Tensor | None) -> CacheTensors:
        """Return the tensors of a call: those of the step and, if given, of the layer (:data:`OF_LAYER`)."""
        starts = None if self.is_one_query_each else self.query_start_loc  # query i belongs to sequence i
        further = dict(zip(OF_LAYER, of_layer, strict=False))
        return CacheTensors(
            cache_seqlens=self.seq_lens, block_table=self.block_table, cu_seqlens_q=starts, **further
        )

    def prepared(self) -> StepTensors | None:
        """Return the step as launches take it, which is made once for all layers; None for fake tensors.

        It is made again if a field was replaced, as in a copy of the step with other pages.
        """
        known = self._prepared
        if known is not None:
            tokens, starts, lengths, table, single = known.source
            if (
                table is self.block_table
                and lengths is self.seq_lens
                and starts is self.query_start_loc
                and tokens is self.num_actual_tokens
                and single is self.is_one_query_each
            ):
                return known
        tensors = self.tensors()
        if not is_plain((self.seq_lens,), tensors):
            return None
        tokens, single = self.num_actual_tokens, self.is_one_query_each
        source = tokens, self.query_start_loc, self.seq_lens, self.block_table, single
        kind = _kind(tokens if single else None, *signatures(tensors))  # otherwise q is not cut
        self._prepared = StepTensors(source, kind, CacheTensors(*map(_address, tensors)), {})
        return self._prepared


def rounded_queries(most: int, least: int = 0) -> int:
    """Return ``most`` rounded up to a power of two, and at least ``least``.

    Steps of different lengths then reuse the same prepared launches. The tile of a launch is chosen for the
    rounded number of queries.
    """
    return max(1 << max(most - 1, 0).bit_length(), least)


def _address(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.data_ptr()


def _is_eager() -> bool:
    """Whether launches of :data:`_launches` may be used, as far as :attr:`Known.serves` does not say."""
    return (
        not (is_dynamo_compiling() or num_dispatch_modes() or in_forward_mode())
        and environment.get(DEBUG) != ON
    )


def _remember(
    key: tuple,
    launch: Any,
    given: tuple[Tensor, ...],
    optional: tuple[Tensor | None, ...],
    cache: tuple[Tensor, ...],
    views: tuple[Tensor, Tensor],
) -> None:
    """Store the launch of a call for later calls with the same ``key`` and such tensors.

    Args:
        given: tensors that the engine passes, of which ``cache`` are some.
        optional: further tensors of the layer.
        views: keys and values of the cache, which the launch takes.
    """
    offset, of_values = (
        view.data_ptr() - t.data_ptr() for view, t in zip(views, (cache[0], cache[-1]), strict=True)
    )
    # With other addresses, the views' signatures may differ from call to call.
    is_aligned = not any(tensor.data_ptr() & 15 for tensor in given)
    if is_aligned and offset == 0 and getattr(launch, "can_launch_by_address", False):
        serves = guard((*given, *_present(optional)))
        known = Known(serves, launch, of_values, _aligned(map(_address, optional)))
        every = known, *_launches.get(key, ())[: MAX_KNOWN - 1]
        _launches.store(key, every, SIGNATURE_BYTES * len(every))


def _may_remember(given: tuple[Tensor, ...], optional: tuple[Tensor | None, ...]) -> bool:
    """Whether a call is eager, without gradients and checks of values."""
    return is_plain(given, optional) and not (any_learns(given, optional) or reads_values(given[0]))


def _present(tensors: tuple[Tensor | None, ...]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _aligned(addresses: Iterable[int | None]) -> list[bool | None]:
    return [None if address is None else not address & 15 for address in addresses]


class PagedAttention:
    """The calls of one layer.

    Args:
        window: number of keys before a query that it sees, and after it if the layer is not causal; -1 for
            all.
        invariant: whether a sequence's result must not depend on the rest of the batch.
        sizes: number of query heads, sizes of a head of keys and of values, and further numbers on which
            :meth:`_keys_and_values` depends.
    """

    takes_groups = False
    """Whether steps may have groups. All queries must see shared keys alike, unlike with windows or ALiBi."""

    def __init__(
        self,
        scale: float,
        softcap: float,
        window: int,
        invariant: bool,
        sizes: tuple[int, ...],
    ) -> None:
        wide = invariant and sizes[1] > MAX_INVARIANT_HEAD
        options = DecodeOptions(
            softmax_scale=scale,
            softcap=softcap,
            num_splits=1 if invariant else 0,
            return_lse=False,
            backend="portable" if wide and torch.cuda.is_available() else None,
        )
        self.causal_options = options._replace(masking=Masking(window_left=window, window_right=0))
        self.options = options._replace(masking=Masking(window_left=window, window_right=window))
        self.sizes = sizes
        self._options_of: dict[tuple[bool, int | None], tuple[DecodeOptions, object]] = {}
        """Options by (causal, max_query_len). There are few, because max_query_len is a power of two."""
        self._append_kind = _kind(type(self), APPEND_OPTIONS, sizes)

    def _keys_and_values(self, cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the engine's ``cache`` (num_blocks, block_size, heads_kv, head_dim).

        They are views. They depend on the signatures of the tensors and on ``self.sizes`` only.
        """
        raise NotImplementedError

    def attend(
        self,
        query: Tensor,
        cache: tuple[Tensor, ...],
        out: Tensor,
        step: Step,
        causal: bool,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        """Compute attention from ``query`` to ``cache`` and write it to ``out``.

        ``query`` has a row for each token, and so has ``out``. Rows after the step's tokens are not read. In
        ``out`` they are not written, or filled with 0. ``cache`` is what the engine passes for the layer's
        keys and values.
        """
        groups = step.groups if self.takes_groups else None
        options, kind = self._options_for(causal, None if step.is_one_query_each else step.max_query_len)
        of_layer: tuple[Tensor | None, ...] = ()
        if sinks is not None or k_scale is not None or alibi_slopes is not None:
            of_layer = alibi_slopes, sinks, k_scale, v_scale
        given = query, *cache, out
        # An earlier call of these kinds left its launch, which needs only addresses: no views, no checks.
        prepared = step.prepared() if groups is None and _is_eager() else None
        if prepared is not None:
            key: tuple = kind, prepared.kind
            every, further = given, []
            if of_layer:  # which of these tensors a call has decides its kernel
                key, every = (*key, *[t is None for t in of_layer]), (*given, *_present(of_layer))
            for serves, launch, of_values, aligned in _launches.get(key, ()):
                if serves(*every):
                    # If one tensor holds keys and values, the values are at a fixed distance from its start.
                    at, keys_at, to_at = query.data_ptr(), cache[0].data_ptr(), out.data_ptr()
                    values_at = of_values + (keys_at if len(cache) == 1 else cache[1].data_ptr())
                    tensors: tuple = prepared.addresses
                    if of_layer:
                        further = [*map(_address, of_layer)]
                        tensors = prepared.addresses._replace(**dict(zip(OF_LAYER, further, strict=True)))
                    # Kernels are compiled for this alignment, and guards do not compare addresses.
                    if not (at | keys_at | values_at | to_at) & 15 and _aligned(further) == aligned:
                        launch.by_address(out, (at, keys_at, values_at, to_at), tensors, prepared.memory)
                        return
        optional = step.tensors(*of_layer)
        heads, head_dim, head_dim_v = self.sizes[:3]
        q, to = query.view(-1, heads, head_dim), out.view(-1, heads, head_dim_v)
        if step.is_one_query_each:  # as a batch (tokens, 1, heads, head_dim), for which there are no offsets
            tokens = step.num_actual_tokens
            q, to = q[:tokens].unsqueeze(1), to[:tokens].unsqueeze(1)
        keys, values = self._keys_and_values(cache)
        if groups is not None:
            optional = operators.attend_shared((q, keys, values), optional, options, [groups])
            optional = optional._replace(cache_leftpad=groups.end)
        operators.decode((q, keys, values), optional, options, (to, None))
        if prepared is not None and _may_remember(given, of_layer):
            launch = operators.DECODE_INTO.prepared((q, keys, values, to, None), optional, options)
            _remember(key, launch, given, of_layer, cache, (keys, values))

    def append(
        self,
        key: Tensor,
        value: Tensor,
        cache: tuple[Tensor, ...],
        slots: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        """Write keys and values (tokens, heads_kv, head_dim) to their ``slots`` of ``cache``.

        ``slots`` (n,) int64 contains the slots of the first n tokens. Tokens with a negative slot are not
        written.
        """
        given = key, value, slots, *cache
        scales = () if k_scale is None else (k_scale, v_scale)
        is_eager = _is_eager()
        if is_eager:
            kind, every, further = (self._append_kind, k_scale is None), (*given, *scales), []
            for serves, launch, of_values, aligned in _launches.get(kind, ()):
                if serves(*every):
                    k, v, at, to = key.data_ptr(), value.data_ptr(), slots.data_ptr(), cache[0].data_ptr()
                    first = of_values + (to if len(cache) == 1 else cache[1].data_ptr())
                    if scales:
                        further = [*map(_address, scales)]
                    if not (k | v | at | to | first) & 15 and _aligned(further) == aligned:
                        launch.by_address(to, first, k, v, at, *further)
                        tell_written(cache)
                        return
        keys, values = self._keys_and_values(cache)
        new = keys, values, key[: slots.shape[0]], value[: slots.shape[0]]
        tensors = AppendTensors(slot_mapping=slots, k_descale=k_scale, v_descale=v_scale)
        operators.APPEND(new, tensors, APPEND_OPTIONS)
        if is_eager and _may_remember(given, scales):
            launch = operators.APPEND.prepared(new, tensors, APPEND_OPTIONS)
            _remember(kind, launch, given, scales, cache, (keys, values))

    def _options_for(self, causal: bool, max_query_len: int | None) -> tuple[DecodeOptions, object]:
        """Return the options of a call, and an object that stands for them and for ``self.sizes``."""
        known = self._options_of.get((causal, max_query_len))
        if known is None:
            options = self.causal_options if causal else self.options
            options = options._replace(max_seqlen_q=max_query_len)
            known = self._options_of[causal, max_query_len] = options, _kind(type(self), options, self.sizes)
        return known
