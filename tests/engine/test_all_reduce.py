"""The engine's sums over GPUs that write into each other's memory: the kernel in an interpreter. Two GPUs run
it in ``tests/gpu``."""

from __future__ import annotations

import threading
import time

import pytest
import torch

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (2, torch.float16), (3, torch.float32)])
def test_sums_of_what_all_ranks_have_written(monkeypatch, ranks, dtype):
    """Ranks take turns here. So that none waits for one that comes later, each call is made twice: at first
    every word says that it is of this call and results are of no use, and then all is there. What the call
    before was given must stay: another rank may still read it."""
    from flashtile.engine import all_reduce as module

    torch.manual_seed(0)
    capacity = 1024
    memory = torch.randint(-(2**62), 2**62, (ranks, module.memory_words(ranks, capacity)))
    slots = memory.view(torch.int32).view(ranks, 2, ranks, capacity, 2)
    memories = torch.tensor([part.data_ptr() for part in memory])
    monkeypatch.setattr(module, "PROGRAMS", 3)
    calls = torch.full((ranks, 3), 2**32 - 2)  # numbers of 32 bits begin anew
    for call, columns in enumerate((2, 450, 8), start=2**32 - 1):  # less than a block, several of a program
        parts = torch.randn(ranks, 2, columns, dtype=dtype)
        residual = torch.randn(2, columns, dtype=dtype) if columns != 8 else None
        summed = parts.float().sum(0)
        right = (summed if residual is None else summed + residual.float()).to(dtype)
        slots[..., 1] = (call + 2**31) % 2**32 - 2**31
        before = slots[:, (call + 1) % 2].clone()
        for attempt in range(2):
            for rank in range(ranks):
                out = module.all_reduce(parts[rank], residual, memories, calls[rank], rank, capacity, 1.0)
                if attempt == 1:
                    close = (2**-7, 2**-7) if dtype == torch.bfloat16 else (0, 0)  # it truncates
                    torch.testing.assert_close(out, right, rtol=close[0], atol=close[1])
            assert bool((calls == call).all())
            calls -= 1 - attempt
        assert torch.equal(slots[:, (call + 1) % 2], before)


def test_it_waits_for_every_word(monkeypatch):
    """Half of the other rank's words are there at first, the rest come when it has received this rank's."""
    from flashtile.engine import all_reduce as module

    monkeypatch.setattr(module, "PROGRAMS", 1)
    capacity = words = 64
    own, theirs = torch.randn(2, 1, words).unbind()
    memory = torch.zeros(2, module.memory_words(2, capacity), dtype=torch.int64)
    slots = memory.view(torch.int32).view(2, 2, 2, capacity, 2)  # receiver, parity of the call, sender
    received, sent = slots[1, 1, 0, :, 1], slots[0, 1, 1]
    ended = threading.Event()

    def send(some):
        sent[some, 0], sent[some, 1] = theirs[0, some].view(torch.int32), 1

    def send_late():
        while not ended.wait(0.02):
            if bool((received == 1).all()):
                time.sleep(0.02)  # in the meantime this rank looks at its memory
                send(slice(words // 2, words))
                return

    send(slice(words // 2))
    other = threading.Thread(target=send_late)
    other.start()
    try:
        addresses = torch.tensor([part.data_ptr() for part in memory])
        calls = torch.zeros(1, dtype=torch.int64)
        assert torch.equal(module.all_reduce(own, None, addresses, calls, 0, capacity, 1.0), own + theirs)
    finally:
        ended.set()
        other.join()


def test_a_rank_is_waited_for_in_nanoseconds_of_64_bits():
    """The interpreter has no clock, so this looks at what the kernels are given."""
    from flashtile.backends.common.launch import recording
    from flashtile.engine.all_reduce import all_reduce
    from flashtile.parallel.exchange import exchange, exchange_variant

    part, numbers = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    out, lse = torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4)
    variant = exchange_variant(2, 8, 16)
    with recording() as launches:
        for timeout in (0.5, 7200.0, float("inf")):
            all_reduce(part, None, numbers, numbers, 0, 64, timeout)
            exchange(out, lse, numbers, numbers, 0, variant, torch.float32, timeout)
    waited = [
        dict(zip(launch.kernel.arg_names, launch.arguments(tensors), strict=True))["timeout_ns"]
        for launch, tensors in launches
    ]
    assert waited == [5 * 10**8] * 2 + [7200 * 10**9] * 2 + [10**18] * 2


@pytest.mark.parametrize("result", ["FIRST", "JOIN"])
def test_bits_of_the_first_rank_and_parts_side_by_side(result):
    from flashtile.engine import all_reduce as module

    memory = torch.zeros(2, module.memory_words(2, 64), dtype=torch.int64)
    memories = torch.tensor([part.data_ptr() for part in memory])
    calls = torch.zeros(2, module.PROGRAMS, dtype=torch.int64)
    parts = torch.randint(-(2**62), 2**62, (2, 3, 5))
    memory.view(torch.int32)[:, 1::2] = 1
    kind = getattr(module, result).value
    for rank in range(2):
        out = module.all_reduce(parts[rank], None, memories, calls[rank], rank, 64, 1.0, kind)
    assert torch.equal(out, parts[0] if result == "FIRST" else torch.cat(list(parts), 1))


def test_the_engine_takes_it_for_what_fits():
    """One rank, which hears itself alone."""
    from flashtile.engine.all_reduce import memory_words
    from flashtile.engine.parallel import DirectCollectives

    memory = torch.zeros(memory_words(1, 64), dtype=torch.int64)
    direct = DirectCollectives(0, 64, torch.tensor([memory.data_ptr()]), memory)
    x, residual = torch.randn(2, 4, 6).unbind()
    assert torch.equal(direct(x.t(), residual.t()), (x + residual).t())
    assert torch.equal(direct(x, result="join"), x)
    assert direct.serves(torch.zeros(8, 8))
    unfit = torch.zeros(65), torch.zeros(3, dtype=torch.float16), torch.zeros(2, dtype=torch.float64)
    assert not any(direct.serves(one) for one in (*unfit, torch.zeros(0)))
