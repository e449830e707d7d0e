"""Launches of the FP8 functions, kept per call signature as in :mod:`flashtile.launches`."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from flashtile.checks.fp8 import check_attend, check_quantize
from flashtile.dispatch import select
from flashtile.fp8.dispatch import AttendLaunch, QuantizeLaunch, load_attending, load_quantizing
from flashtile.fp8.problem import (
    AttendOptions,
    Fp8Problem,
    QuantizeOptions,
    QuantizeProblem,
    QuantizeTensors,
    Scales,
)
from flashtile.launches import LaunchCache, signatures
from flashtile.problem import NO_EXTRAS, Extras, Options, check_lengths, check_offsets, debug_checks

_quantize_launches = LaunchCache()
_attend_launches = LaunchCache()


def quantize(x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> tuple[Tensor, Tensor]:
    """(values, scales) in the shapes of the :class:`flashtile.fp8.problem.QuantizeProblem`."""
    try:
        key = (options, *signatures((x, *tensors)))
    except Exception:  # not a tensor, or one without strides: the checks name it
        check_quantize(x, tensors, options)
        raise
    launch: QuantizeLaunch | None = _quantize_launches.get(key)
    if launch is None:
        check_quantize(x, tensors, options)
        problem = QuantizeProblem.from_tensors(x, tensors, options)
        selection = select(problem, options.backend, load_quantizing)
        prepare = cast(Any, selection.backend).prepare_quantize
        launch = _quantize_launches.keep(key, prepare(problem, selection.config))
    if not x.is_cuda or debug_checks():
        _check_values(x, tensors, options)
    return launch(x, tensors, options.seed)


def _check_values(x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> None:
    """Raise ValueError for lengths that no sequences of x can have. Reads the data."""
    lengths = [x.shape[1]] * x.shape[0] if tensors.cu_seqlens is None else []
    if tensors.cu_seqlens is not None:
        assert options.max_seqlen is not None
        check_offsets("cu_seqlens", tensors.cu_seqlens, x.shape[0], options.max_seqlen)
        lengths = tensors.cu_seqlens.diff().tolist()
    if tensors.seqused is not None:
        for b, (count, length) in enumerate(zip(tensors.seqused.tolist(), lengths, strict=True)):
            if not 0 <= count <= length:
                raise ValueError(f"seqused must be from 0 to the {length} rows of sequence {b}, got {count}")


def attend(
    q: Tensor, k: Tensor, v: Tensor, scales: Scales, extras: Extras, options: Options, fp8: AttendOptions
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention over e4m3."""
    try:
        key = (options, fp8, *signatures((q, k, v, *scales)))
        if extras is not NO_EXTRAS:
            key += signatures(extras)
    except Exception:
        check_attend(q, k, v, scales, extras, options, fp8)
        raise
    launch: AttendLaunch | None = _attend_launches.get(key)
    if launch is None:
        check_attend(q, k, v, scales, extras, options, fp8)
        problem = Fp8Problem.from_call(q, k, v, scales, extras, options, fp8)
        selection = select(problem, options.backend, load_attending)
        launch = _attend_launches.keep(key, selection.backend.prepare_forward(problem, selection.config))
    if extras is not NO_EXTRAS and (not q.is_cuda or debug_checks()):
        check_lengths(q, k, extras, options)
    return launch(q, k, v, scales, extras)
