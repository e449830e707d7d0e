"""Which tiles the kernel takes in forward mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from flashtile.backends.common.config import KernelConfig
from flashtile.backends.common.device import compiling_for
from flashtile.backends.portable.config import choose_tangents
from flashtile.problems.attention import Problem
from flashtile.problems.masks import Mods
from flashtile.tools.inspection.attention import PLAIN, WITH_MODS
from walk import walk

BARE = {
    "full": PLAIN,
    "causal": replace(PLAIN, window_right=0),
    "packed": replace(PLAIN, varlen=True, window_right=0),
    "keys used": replace(PLAIN, seqused_k=True),
    "grouped": replace(PLAIN, num_heads_kv=2),
    "sink": replace(PLAIN, sink=True),
}
OTHERS = {
    "window": replace(PLAIN, window_left=128, window_right=0),
    "softcap": replace(PLAIN, softcap=1.0),
    "alibi": replace(PLAIN, alibi=True),
    "negative scale": replace(PLAIN, softmax_scale=-1.0),
    "mask": replace(PLAIN, mask=True),
    "bias": replace(PLAIN, bias=True),
    "dropout": replace(PLAIN, dropout_p=0.1),
    "chunks": replace(PLAIN, window_right=0, attention_chunk=1024),
    "functions": WITH_MODS,
}


def tile(problem: Problem, capability: tuple[int, int], head_dim: int) -> KernelConfig:
    with compiling_for(capability):
        return choose_tangents(replace(problem, head_dim=head_dim, head_dim_v=head_dim)).forward


@walk("name", BARE)
def test_bare_blocks_of_keys_are_wide_on_hopper(name: str) -> None:
    assert tile(BARE[name], (9, 0), 64) == KernelConfig(128, 128, 8, 3)
    assert tile(BARE[name], (9, 0), 128) == KernelConfig(128, 64, 8, 2)


@walk("name", OTHERS)
def test_others_have_half_as_many_keys_and_a_stage_more(name: str) -> None:
    assert tile(OTHERS[name], (9, 0), 64) == KernelConfig(128, 64, 8, 3)
    assert tile(OTHERS[name], (9, 0), 128) == KernelConfig(128, 32, 8, 3)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_have_no_wide_tiles(capability: tuple[int, int]) -> None:
    """Shared memory of 99 KiB, or the tensor memory of compute capability 10, is too small for them."""
    for head_dim in (64, 128):
        assert tile(PLAIN, capability, head_dim) == tile(OTHERS["window"], capability, head_dim)


def test_a_block_mask_divides_the_tile() -> None:
    small = Mods("", "t0: bool = le kv q\nreturn t0", block_size=(64, 16))
    assert tile(replace(PLAIN, mods=small), (9, 0), 128) == KernelConfig(64, 16, 8, 3)
