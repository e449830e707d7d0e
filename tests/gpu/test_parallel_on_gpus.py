"""Context parallelism over NCCL on two GPUs, and the float32 results that it is made of, on one."""

from __future__ import annotations

import pytest
import torch

from flashtile.checks.conversions import as_masking
from flashtile.operators.attention import BACKWARD, FORWARD
from flashtile.problems.attention import NO_EXTRAS, Options
from flashtile.testing import poisoned_memory
from targets import CUDA

pytestmark = pytest.mark.gpu
two = pytest.mark.skipif(not CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window_size": (300, 70)}, {}])
def test_partial_results_are_not_rounded(backend, head_dim, mask):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0")
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, 1001, 4, head_dim, device="cuda", dtype=torch.bfloat16).unbind()
    k, v = torch.randn(2, 2, 777, 2, head_dim, device="cuda", dtype=torch.bfloat16).unbind()
    options = Options(masking=as_masking(**mask), backend=backend)
    with poisoned_memory():
        rounded, lse = FORWARD.launch((q, k, v), NO_EXTRAS, options)
        out, same = FORWARD.launch((q, k, v), NO_EXTRAS, options._replace(partial=True))
        tensors = (dout, None, q, k, v, rounded, lse)
        gradients = BACKWARD.launch(tensors, NO_EXTRAS, options)[:3]
        parts = BACKWARD.launch(tensors, NO_EXTRAS, options._replace(partial=True))[:3]
    torch.testing.assert_close(lse, same, rtol=1e-5, atol=1e-5)
    for part, whole in zip((out, *parts), (rounded, *gradients), strict=True):
        assert part.dtype == torch.float32
        assert not torch.equal(part, part.bfloat16().float())
        torch.testing.assert_close(
            part.bfloat16(), whole, rtol=2**-7, atol=2**-7 * whole.abs().max().item() / 4
        )


@pytest.fixture(scope="module")
def ranks():
    from ranks_pool import pool

    with pool(2, backend="nccl") as started:
        yield started


@two
@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window_size": (500, 0)}, {"softcap": 20.0}])
def test_two_gpus_are_as_exact_as_one(ranks, method, mask):
    import parallel_tasks

    for sizes in ((2048, 128), (1537, 64)):
        for errors in ranks.run(parallel_tasks.on_gpus, 2, method=method, sizes=sizes, **mask):
            assert isinstance(errors, dict), errors
            for name, (shared, single) in errors.items():
                assert shared <= 1.1 * single, (name, errors)


@two
@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
def test_many_layers_on_two_gpus_are_as_exact_as_on_one(ranks, method):
    import parallel_tasks

    arguments = {"layers": 64, "sizes": (2048, 8, 128), "device": "cuda", "method": method}
    for errors in ranks.run(parallel_tasks.through_layers, 2, **arguments):
        assert isinstance(errors, tuple), errors
        shared, single = errors
        assert shared <= 1.1 * single


@two
def test_decoding_over_two_gpus_in_a_graph(ranks):
    import parallel_tasks

    for errors in ranks.run(parallel_tasks.decode_in_a_graph, 2):
        assert isinstance(errors, list), errors
        assert max(errors) < 2e-2


@two
@pytest.mark.parametrize("batch", [3, 200])  # 32 rows of room; programs with several blocks of rows
def test_decoding_by_symmetric_memory_is_as_by_allgather(ranks, batch):
    import parallel_tasks

    for differences in ranks.run(parallel_tasks.decode_by_symmetric_memory, 2, batch=batch):
        assert isinstance(differences, list), differences
        assert all(difference < 2e-2 for difference in differences), differences  # NaN is not


@two
def test_two_gpus_that_disagree_say_so(ranks):
    import parallel_tasks

    different = [{"causal": True}, {}]
    for said in ranks.run(parallel_tasks.faulty, 2, by_rank=different):
        assert said.startswith("ValueError: the ranks disagree on causal"), said
