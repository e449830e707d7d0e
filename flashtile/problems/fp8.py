"""Frozen descriptions of quantisation and attention in FP8, with their optional tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashtile.problems import fp8_layout as layout
from flashtile.problems.attention import OptionalTensors, Options, Problem
from flashtile.problems.common import passed_on, shared_fields
from flashtile.problems.masking import Masking


class Scales(NamedTuple):
    """float32 scales of q, k and v, by which stored numbers are multiplied. None means 1.

    Block scales (``Fp8Problem.block_scales``) are contiguous, (batch, heads, blocks), or (heads, blocks) for
    packed sequences. Other scales are (batch, heads) with any strides.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class QuantizeTensors(NamedTuple):
    """The optional tensors of a quantisation; None for each that is absent."""

    cu_seqlens: Tensor | None = None
    seqused: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    rotary_offsets: Tensor | None = None
    scale: Tensor | None = None


class QuantizeOptions(NamedTuple):
    """The non-tensor arguments of a quantisation, hashable because they are part of a cache key."""

    role: str
    method: str
    seed: int | None
    """Seed of the Hadamard transform's signs; None means no transform."""
    max_seqlen: int | None
    rotary_offset: int
    rotary_interleaved: bool
    backend: str | None


class AttendTensors(NamedTuple):
    """The optional tensors of an attention call in FP8: scales, and fields of ``OptionalTensors``."""

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None

    @property
    def scales(self) -> Scales:
        return Scales(*self[:3])

    @property
    def extras(self) -> OptionalTensors:
        return OptionalTensors(**shared_fields(OptionalTensors, self))


class AttendOptions(NamedTuple):
    """The options of an attention call in FP8: fields of ``Options``, and four further fields."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    masking: Masking
    softcap: float
    deterministic: bool
    backend: str | None
    out_dtype: torch.dtype
    head_dim: int
    """Head size of q and k before quantisation, from which the default softmax_scale is computed."""
    v_transposed: bool = False
    block_scales: bool = False

    @property
    def shared(self) -> Options:
        return Options(**shared_fields(Options, self))


@dataclass(frozen=True)
class QuantizeProblem:
    """Description of the quantisation of a tensor.

    ``role`` and ``method`` are those of :func:`flashtile.fp8.quantize`. Lengths are in rows; ``seqlen`` is
    the longest sequence if varlen.
    """

    role: str
    method: str
    batch: int
    seqlen: int
    total: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    seed: int | None = None
    varlen: bool = False
    seqused: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    rotary_offset: int = 0
    scale_given: bool = False

    @property
    def transformed(self) -> bool:
        """Whether the Hadamard transform is applied, with signs from ``seed``."""
        return self.seed is not None

    @property
    def normalizer(self) -> float:
        """Factor that makes the Hadamard transform orthogonal; 1 without the transform."""
        return layout.hadamard_normalizer(self.stored_head_dim) if self.transformed else 1.0

    def largest_of(self, scale: Tensor) -> Tensor:
        """Return the largest magnitude that can be quantised with each entry of ``scale``.

        With the Hadamard transform, this is a magnitude after the transform and before multiplication by
        ``normalizer``.
        """
        return (scale * (layout.E4M3_MAX / self.normalizer)).expand(self.scales_shape).contiguous()

    @property
    def rows(self) -> int:
        """Number of rows in a block. The rows of a block share a scale."""
        return layout.rows_of(self.role)

    @property
    def blocks(self) -> int:
        """Number of blocks of one sequence, or of all sequences if varlen."""
        if self.varlen:
            return layout.num_blocks_varlen(self.total, self.batch, self.rows)
        return layout.num_blocks(self.seqlen, self.rows)

    @property
    def stored_head_dim(self) -> int:
        if self.role == "v":
            return self.head_dim
        return layout.stored_head_dim(self.head_dim, self.transformed)

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Shape of the stored values.

        q and k: (batch, seqlen, heads, stored_head_dim), or (total, ...) if varlen. v: (batch, heads,
        head_dim, columns), without batch if varlen, with one key per column.
        """
        if self.role == "v":
            columns = self.blocks * self.rows
            return (*self._sequences, self.num_heads, self.head_dim, columns)
        rows = (self.total,) if self.varlen else (self.batch, self.seqlen)
        return (*rows, self.num_heads, self.stored_head_dim)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        if self.method == "tensor":
            return (1, 1)
        if self.method == "head":
            return (self.batch, self.num_heads)
        return (*self._sequences, self.num_heads, self.blocks)

    @property
    def _sequences(self) -> tuple[int, ...]:
        """Leading dimensions of block scales and of a stored v: (batch,), or () for packed sequences."""
        return () if self.varlen else (self.batch,)

    @classmethod
    def from_tensors(cls, x: Tensor, tensors: QuantizeTensors, options: QuantizeOptions) -> QuantizeProblem:
        """Describe a call that :func:`flashtile.checks.fp8.check_quantize` has accepted."""
        cu_seqlens, _, cos, *_ = tensors
        varlen = cu_seqlens is not None
        if cu_seqlens is not None:
            assert options.max_seqlen is not None
            batch, seqlen, total = cu_seqlens.shape[0] - 1, options.max_seqlen, x.shape[0]
        else:
            batch, seqlen, total = x.shape[0], x.shape[1], x.shape[0] * x.shape[1]
        return cls(
            **passed_on(cls, tensors, options)
            | dict(
                batch=batch,
                seqlen=seqlen,
                total=total,
                num_heads=x.shape[-2],
                head_dim=x.shape[-1],
                dtype=x.dtype,
                device=x.device,
                varlen=varlen,
                rotary_dim=0 if cos is None else 2 * cos.shape[1],
                scale_given=tensors.scale is not None,
            )
        )


@dataclass(frozen=True)
class Fp8Problem(Problem):
    """Description of an attention call whose q, k and v are e4m3; ``head_dim`` is the stored head size.

    If ``v_transposed``, v is (batch, heads_kv, head_dim_v, columns), or (heads_kv, head_dim_v, columns) for
    packed sequences. A column holds a key, in the order of :func:`flashtile.problems.fp8_layout.key_order`;
    sequence b starts at column ``first_block * 128``. Columns after a sequence's last key are 0 up to the end
    of the key's block. Blocks that belong to no sequence are undefined.
    """

    out_dtype: torch.dtype = torch.bfloat16
    v_transposed: bool = False
    block_scales: bool = False
    """Whether scales belong to blocks of 64 rows of q and 128 keys; otherwise to heads."""
    q_scale_group: int = 1
    """Number of query heads that share an entry of the scales of q."""

    @classmethod
    def from_call(
        cls, q: Tensor, k: Tensor, v: Tensor, tensors: AttendTensors, options: AttendOptions
    ) -> Fp8Problem:
        """Describe a call that :func:`flashtile.checks.fp8.check_attend` has accepted."""
        heads_q = q.shape[-2]
        of_heads = not options.block_scales and tensors.q_descale is not None
        q_scale_heads = tensors.q_descale.shape[1] if of_heads else heads_q  # type: ignore[union-attr]
        scale = options.softmax_scale
        return cls.from_tensors(  # type: ignore[return-value]
            q,
            k,
            k if options.v_transposed else v,  # from_tensors expects a row per key
            tensors.extras,
            options.shared,
            head_dim_v=v.shape[-2] if options.v_transposed else v.shape[-1],
            softmax_scale=options.head_dim**-0.5 if scale is None else scale,
            deterministic=False,
            out_dtype=options.out_dtype,
            v_transposed=options.v_transposed,
            block_scales=options.block_scales,
            q_scale_group=heads_q // max(q_scale_heads, 1),
        )
