"""The kernel draws what the torch form draws."""

from __future__ import annotations

import pytest
import torch

from flashtile.engine.sampler import Choice, noisy_scores
from targets import CUDA

pytest.importorskip("triton")


def choices(rows: int, device: str) -> Choice:
    """Combinations of a few values, row by row: all in 128 rows, and all temperatures in any few."""
    values = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.3, 1.0, 5.0)
        for top_k in (0, 1, 7, 10**6)
        for top_p in (1.0, 0.95, 0.5, 1e-6)
        for min_p in (0.0, 0.3)
    ]
    columns = list(zip(*(values[37 * i % len(values)] for i in range(rows)), strict=True))
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, device=device, dtype=dtype)
        for column, dtype in zip(columns, dtypes, strict=True)
    )
    seed = torch.arange(rows, device=device) * 7919 - 3000
    return Choice(temperature, top_k, top_p, min_p, seed, False, True, True, True)


def check(device: str, rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    from flashtile.engine.sampling import sample

    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(rows, vocab_size + 3, generator=generator) * 3).to(device, dtype)[:, :vocab_size]
    logits[:, 5] = -torch.inf
    choice = choices(rows, device)
    positions = torch.arange(rows, dtype=torch.int32, device=device) * 3
    expected = noisy_scores(logits, choice, positions).argmax(-1)
    found = sample(logits, *choice[:5], positions, True)
    # A mass may be summed to the other side of top-p: one token more or less is kept, once in a long while.
    assert (found != expected).sum() <= rows // 100
    plain = choice._replace(any_top_k=False, any_top_p=False, any_min_p=False)
    found = sample(logits, *plain[:5], positions, False)
    assert torch.equal(found, noisy_scores(logits, plain, positions).argmax(-1))


def check_bad_logits(device: str, vocab_size: int) -> None:
    """NaN of either sign and infinity win, whatever the filters, and rows without them draw as before."""
    from flashtile.engine.sampling import sample

    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800000, 0x3F000000], dtype=torch.int32)
    logits[:, vocab_size - 2] = bits.view(torch.float32).repeat(2)
    every = choices(128, device)
    choice = Choice(*(column[3::17].contiguous() for column in every[:5]), *every[5:])
    logits, positions = logits.to(device), torch.arange(8, dtype=torch.int32, device=device)
    for filtered in (True, False):
        if not filtered:
            choice = choice._replace(any_top_k=False, any_top_p=False, any_min_p=False)
        expected = noisy_scores(logits, choice, positions).argmax(-1)
        found = sample(logits, *choice[:5], positions, filtered)
        for tokens in (expected, found):
            is_bad = (~logits.gather(1, tokens.unsqueeze(1)).isfinite()).squeeze(1).view(2, 4)
            assert is_bad.tolist() == [[True, True, True, False]] * 2


@pytest.mark.interpreter
def test_bad_logits_win():
    check_bad_logits("cpu", 50)


@pytest.mark.interpreter
def test_logits_may_have_any_strides():
    from flashtile.engine.sampling import sample

    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    given = *choices(8, "cpu")[:5], torch.arange(8, dtype=torch.int32), False
    assert torch.equal(sample(logits.t().contiguous().t(), *given), sample(logits, *given))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_bad_logits_win_on_a_gpu():
    check_bad_logits("cuda", 50)


@pytest.mark.interpreter
@pytest.mark.parametrize("vocab_size", [50, 4500])
def test_the_kernel_draws_what_torch_draws(vocab_size):
    check("cpu", 48 if vocab_size == 50 else 12, vocab_size, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [50, 32000, 128256])
def test_the_kernel_draws_what_torch_draws_on_a_gpu(vocab_size, dtype):
    check("cuda", 256, vocab_size, dtype)


@pytest.mark.compile
@pytest.mark.parametrize("filtered", [False, True])
def test_the_kernel_compiles_without_spills(filtered):
    from spills import beyond_limits

    from flashtile.engine.sampling import NUM_WARPS, SamplingVariant, sample_kernel
    from flashtile.tools.inspection.report import CompileCase, report

    signature = {
        "logits_ptr": "*bf16", "temperature_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp32",
        "min_p_ptr": "*fp32", "seed_ptr": "*i64", "position_ptr": "*i32", "out_ptr": "*i64",
        "logits_stride": "i32", "vocab_size": "i32",
    }  # fmt: skip
    case = CompileCase(
        "sample", sample_kernel, signature, {"C": SamplingVariant(filtered, 4096)}, num_warps=NUM_WARPS,
        tensor_cores=False,
    )  # fmt: skip
    assert beyond_limits(report(case, "sm_90a")) == []
