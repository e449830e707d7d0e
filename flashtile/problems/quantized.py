"""A tensor in e4m3 with its scales, in the form that the kernels take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashtile.problems import fp8_layout as layout


@dataclass(frozen=True, eq=False)
class Quantized:
    """q, k or v in e4m3: made by :func:`flashtile.fp8.quantize`, read by :func:`flashtile.fp8.attention`.

    Args:
        values: float8_e4m3fn. q and k have the shape of the original tensor, with zero columns added up to a
            multiple of 16, or to a power of 2 if they are transformed. v is transposed, (batch, heads,
            head_dim, columns) or (heads, head_dim, columns), with keys in the order of
            :func:`flashtile.problems.fp8_layout.key_order`.
        scales: float32 factors of the values. Method "block": (batch, heads, blocks), or (heads, blocks) for
            packed sequences; "head": (batch, heads); "tensor": (1, 1).
        role: "q", "k" or "v".
        method: "block", "head" or "tensor".
        seed: seed of the Hadamard transform; None if there was none.
        shape: shape of the tensor before quantisation.
        dtype: dtype of the tensor before quantisation. The results of attention have the same dtype.
        cu_seqlens, max_seqlen, seqused: as given to :func:`flashtile.fp8.quantize`.
        source: the tensor that gets the gradient of attention, in the shape and dtype before quantisation;
            None if it required no gradient.

    Examples:
        >>> k = torch.randn(1, 256, 2, 64, dtype=torch.bfloat16)
        >>> keys = flashtile.fp8.quantize(k, "k")
        >>> keys.role, keys.method, keys.shape, keys.nbytes
        ('k', 'block', (1, 256, 2, 64), 32784)
    """

    values: Tensor
    scales: Tensor
    role: str
    method: str
    seed: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    seqused: Tensor | None = None
    source: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> Quantized:
        """Copy the quantised tensor to another device."""
        return replace(
            self,
            values=self.values.to(device),
            scales=self.scales.to(device),
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.to(device),
            seqused=None if self.seqused is None else self.seqused.to(device),
            source=None if self.source is None else self.source.to(device),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32, *, transformed: bool = False) -> Tensor:
        """Return values times scales, in the shape before quantisation. Rows outside all sequences are 0.

        Args:
            dtype: dtype of the result.
            transformed: whether to return q and k after the Hadamard transform, with all stored columns, as
                the kernels read them. False undoes the transform.
        """
        if self.cu_seqlens is not None and self.cu_seqlens.shape[0] == 1:  # there are rows, but no sequences
            return self.values.new_zeros(self.shape, dtype=dtype)
        x = self._values_in_rows(dtype) * self._scales_in_rows(dtype)
        if self.seed is not None and not transformed:
            columns = x.shape[-1]
            matrix = layout.hadamard_transform(
                torch.eye(columns, dtype=torch.float64, device=x.device), self.seed
            )
            # torch may be set to round factors of float32.
            wide = torch.float64 if dtype == torch.float32 else dtype
            x = (x.to(wide) @ (matrix * layout.hadamard_normalizer(columns)).mT.to(wide)).to(dtype)
        return x if transformed else x[..., : self.shape[-1]]

    def _values_in_rows(self, dtype: torch.dtype) -> Tensor:
        values = self.values.to(dtype)
        if self.role != "v" and self.cu_seqlens is None:
            return values
        if self.role != "v":
            *_, inside = self._places()
            return values.where(inside[:, None, None], 0.0)
        columns = values.movedim(-1, -3)  # (..., columns, heads, head_dim)
        rows = columns.new_empty(columns.shape)
        rows[..., layout.key_order(columns.shape[-3], values.device), :, :] = columns
        if self.cu_seqlens is None:
            return rows[:, : self.shape[1]]
        _, within, block, inside = self._places()
        taken = rows[(block * layout.KEY_BLOCK + within % layout.KEY_BLOCK) * inside]
        return taken.where(inside[:, None, None], 0.0)

    def _scales_in_rows(self, dtype: torch.dtype) -> Tensor:
        """Return the scale of each row, (..., heads, 1)."""
        scales = self.scales.to(dtype)
        if self.method == "tensor":
            return scales[..., None]
        if self.cu_seqlens is None:
            if self.method == "head":
                return scales[:, None, :, None]
            rows = scales.repeat_interleave(layout.rows_of(self.role), -1)[..., : self.shape[1]]
            return rows.mT[..., None]
        sequence, _, block, inside = self._places()
        if self.method == "head":
            return scales[sequence][..., None]
        return scales[:, block * inside].mT.where(inside[:, None], 0.0)[..., None]

    def _places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return four tensors (total,) that locate each packed row.

        They are the index of the row's sequence, the row's index within the sequence, the index of its block
        among the blocks of all sequences, and a bool: whether the row belongs to a sequence.
        """
        assert self.cu_seqlens is not None
        rows = torch.arange(self.shape[0], device=self.device, dtype=torch.int32)
        last = max(self.cu_seqlens.shape[0] - 2, 0)
        sequence = torch.searchsorted(self.cu_seqlens[1:], rows, right=True).clamp_max(last)
        start = self.cu_seqlens[sequence].long()
        within, size = rows - start, layout.rows_of(self.role)
        return sequence, within, start // size + sequence + within // size, rows < self.cu_seqlens[-1]


def sequences(
    of: tuple[object, ...], cu_seqlens: Tensor | None, max_seqlen: int | None, seqused: Tensor | None
) -> tuple[Tensor | None, int | None, Tensor | None]:
    """Return (cu_seqlens, max_seqlen, seqused). Each of them that is None is replaced by a value from ``of``.

    Only the quantised tensors of ``of`` store these values. The first tensor that has a value is used.
    """
    for x in of:
        if isinstance(x, Quantized):
            cu_seqlens = x.cu_seqlens if cu_seqlens is None else cu_seqlens
            max_seqlen = x.max_seqlen if max_seqlen is None else max_seqlen
            seqused = x.seqused if seqused is None else seqused
    return cu_seqlens, max_seqlen, seqused
