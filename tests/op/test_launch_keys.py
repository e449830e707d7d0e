"""The key of a cached launch contains every option and every property of each tensor that it depends on."""

from __future__ import annotations

import pytest
import torch

import flashtile
from cases import BF16
from flashtile import fp8
from flashtile.operators.attention import FORWARD
from flashtile.operators.decode import COMBINE, DECODE
from flashtile.operators.fp8 import ATTEND, QUANTIZE
from flashtile.problems.attention import OptionalTensors, Options
from flashtile.problems.decode import CacheTensors, CombineOptions, DecodeOptions, NoTensors
from walk import walk


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


TENSORS = [randn(1, 8, 2, 16) for _ in range(3)]
CACHE = [randn(2, 1, 4, 16), randn(2, 8, 2, 16), randn(2, 8, 2, 16)]
PARTS = [randn(2, 1, 3, 4, 16), randn(2, 1, 3, 4)]
EXTRAS = {
    "forward": OptionalTensors(alibi_slopes=torch.ones(2), sink=torch.ones(2)),
    "decode": CacheTensors(
        torch.tensor([3, 8], dtype=torch.int32), alibi_slopes=torch.ones(4), sink=torch.ones(4)
    ),
    "combine": NoTensors(),
}
CALLS = [
    pytest.param(FORWARD, TENSORS, Options(), id="forward"),
    pytest.param(DECODE, CACHE, DecodeOptions(), id="decode"),
    pytest.param(COMBINE, PARTS, CombineOptions(torch.float32), id="combine"),
]


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, shape and strides, 4 bytes behind a multiple of 16."""
    memory = tensor.new_empty(tensor.numel() + 8)
    first = next(i for i in range(8) if memory[i:].data_ptr() % 16 == 4)
    return memory[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(("operation", "tensors", "options"), CALLS)
def test_alignment_of_every_tensor(operation, tensors, options):
    everything = (*tensors, *EXTRAS[operation.name])
    places = [i for i, t in enumerate(everything) if t is not None]

    def prepared(*places: int) -> object:
        given = [misaligned(t) if i in places else t for i, t in enumerate(everything)]
        own = type(EXTRAS[operation.name])(*given[len(tensors) :])
        return operation.prepared(tuple(given[: len(tensors)]), own, options)

    launches = [prepared(), *map(prepared, places)]
    assert len({id(launch) for launch in launches}) == len(launches)
    assert [prepared(), *map(prepared, places)] == launches


QUANTIZED = [fp8.quantize(t.to(BF16), name) for t, name in zip(TENSORS, "qkv", strict=True)]


@walk(
    ("operation", "call"),
    [
        (FORWARD, lambda **o: flashtile.attention(*TENSORS, **o)),
        (DECODE, lambda **o: flashtile.flash_attn_with_kvcache(*CACHE, **o)),
        (COMBINE, lambda **o: flashtile.flash_attn_combine(*PARTS, **o)),
        (QUANTIZE, lambda **o: fp8.quantize(TENSORS[0].to(BF16), "q", **o)),
        (ATTEND, lambda **o: fp8.attention(*QUANTIZED, **o)),
    ],
)
def test_a_launch_that_was_kept_is_not_another_backends(operation, call):
    call()
    assert operation.launches
    with pytest.raises(NotImplementedError, match="backend='portable' does not serve"):
        call(backend="portable")


def test_a_launch_in_fp8_is_not_another_masks():
    full, causal = (fp8.attention(*QUANTIZED, causal=causal) for causal in (False, True))
    assert not torch.equal(full, causal)
    torch.testing.assert_close(causal[:, 0], QUANTIZED[2].dequantize()[:, 0].to(BF16), atol=0.2, rtol=0.1)
