"""flashtile.io_model of our GPU kernels: which blocks they walk, how many run at once, what L2 keeps."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from dataclasses import replace

import pytest

from flashtile.backends.portable.config import row
from flashtile.hardware.calls import blocks_of
from flashtile.io_model import Call, find_card, kernels
from flashtile.learn.io_model.l2 import Stream, dram_blocks
from flashtile.problems.masking import Masking
from walk import walk

H100 = find_card("h100")


def tiles(call: Call):
    return row("hopper", call.element_bytes, call.head_dim, call.window_right != -1)


class TestBlocks:
    def test_is_the_block_range_of_the_kernels(self):
        pytest.importorskip("triton")
        from flashtile.backends.portable.masking import block_range

        for length, offset, back, ahead in itertools.product(
            (1, 50, 64), (-20, 0, 13), (-1, 0, 9), (-1, 0, 9)
        ):
            for start in range(0, 60, 16):
                end = min(start + 16, 60)
                window = back, ahead
                first, _, _, last = block_range.fn(
                    start, end, offset, length, window, window, back != -1, ahead != -1, 8
                )
                masking = Masking(window_left=back, window_right=ahead)
                seen = masking.key_range(range(start + offset, end + offset), range(length))
                assert list(blocks_of(seen, 8)) == list(range(first, last))


class TestL2:
    @staticmethod
    def brute_force(stream: Stream, count: int, resident: int, capacity: float) -> int:
        """Programs in step, one block at a time."""
        waiting = [
            [(s, block) for part in p for block in part] for s in range(count) for p in stream.programs
        ]
        waiting = [visits for visits in reversed(waiting) if visits]
        running: list[list] = [[]] * resident
        cache: OrderedDict = OrderedDict()
        misses = 0
        while waiting or any(running):
            running = [visits or (waiting.pop() if waiting else []) for visits in running]
            for block in dict.fromkeys(visits.pop(0) for visits in running if visits):
                misses += block not in cache
                cache[block] = None
                cache.move_to_end(block)
                while len(cache) > capacity:
                    cache.popitem(last=False)
        return misses

    def test_is_the_brute_force_where_nothing_is_cut(self):
        generator = random.Random(0)
        for _ in range(60):
            blocks = generator.randint(1, 40)
            programs = tuple(
                (range(start, generator.randint(start, blocks)),)
                for start in (generator.randint(0, blocks) for _ in range(generator.randint(1, 12)))
            )
            stream = Stream(blocks, programs)
            resident, count = generator.randint(1, 6), generator.randint(1, 3)
            if count * len(programs) > 8 * resident:
                continue
            for capacity in (2, 9, 30):
                expected = self.brute_force(stream, count, resident, capacity)
                assert dram_blocks(stream, count, resident, capacity) == expected

    def test_walked_and_distinct(self):
        stream = Stream(20, ((range(0, 5),), (range(3, 8), range(10, 12)), (range(4, 4),)))
        assert stream.walked == 12
        assert stream.distinct == 10

    def test_programs_in_step_share_their_reads(self):
        stream = Stream(1000, ((range(1000),),) * 8)
        assert dram_blocks(stream, 1, resident=8, capacity=10) == pytest.approx(1000, rel=0.01)

    def test_waves_read_again_what_l2_has_dropped(self):
        stream = Stream(1000, ((range(1000),),) * 32)
        assert dram_blocks(stream, 1, resident=8, capacity=100) == pytest.approx(4000, rel=0.01)
        assert dram_blocks(stream, 1, resident=8, capacity=1000) == pytest.approx(1000)

    def test_long_grids_go_on_as_they_began(self):
        stream = Stream(100, ((range(100),),) * 16)
        one = dram_blocks(stream, 1, resident=4, capacity=10)
        assert dram_blocks(stream, 1000, resident=4, capacity=10) == pytest.approx(1000 * one, rel=0.02)


class TestKernels:
    @walk("kernel", ["forward", "dkdv", "dq"])
    @walk("causal", [False, True])
    def test_loads_by_brute_force(self, kernel, causal):
        call = Call(2, 300, 520, 4, 2, 64, window_right=0 if causal else -1)
        tile = getattr(tiles(call), kernel)
        found = getattr(kernels, kernel)(call, tile, H100)
        offset = call.seqlen_k - call.seqlen_q
        loaded = 0
        for rows, keys in itertools.product(
            range(0, call.seqlen_q, tile.BLOCK_M), range(0, call.seqlen_k, tile.BLOCK_N)
        ):
            last_row = min(rows + tile.BLOCK_M, call.seqlen_q) - 1
            if causal and keys > last_row + offset:
                continue
            # The model takes the mean size of a block, so that the last, short one counts alike.
            if kernel == "dkdv":
                blocks = -(-call.seqlen_q // tile.BLOCK_M)
                loaded += 2 * 4 * call.seqlen_q / blocks * (2 * 64 * 2 + 8)
            else:
                blocks = -(-call.seqlen_k // tile.BLOCK_N)
                loaded += 2 * 4 * call.seqlen_k / blocks * 2 * 64 * 2
        own = {
            "forward": call.q_bytes,
            "dq": 2 * call.q_bytes + call.rows_q * 8,
            "dkdv": call.k_bytes + call.v_bytes,
        }[kernel]
        assert found.sm_read == pytest.approx(own + loaded, rel=1e-9)
        assert found.dram_read == found.compulsory_read

    def test_short_sequences_are_read_once(self):
        for seqlen, causal in itertools.product((512, 4096, 16384), (False, True)):
            call = Call(16384 // seqlen, seqlen, seqlen, 16, 16, 128, window_right=0 if causal else -1)
            found = kernels.forward(call, tiles(call).forward, H100)
            assert found.dram_read == call.q_bytes + call.k_bytes + call.v_bytes
            assert found.written == call.out_bytes + call.lse_bytes

    def test_keys_beyond_l2_are_read_for_every_wave(self):
        call = Call(1, 2**18, 2**18, 1, 1, 128)
        found = kernels.forward(call, tiles(call).forward, H100)
        waves = -(-found.programs // found.resident)
        again = (found.dram_read - call.q_bytes) / (call.k_bytes + call.v_bytes)
        assert waves == 16
        assert again == pytest.approx(2**11 / 132, rel=0.05)

    def test_a_larger_l2_never_costs_more(self):
        call = Call(1, 2**17, 2**17, 1, 1, 128, window_right=0)
        sizes = [2**20 * mebibytes for mebibytes in (8, 32, 64, 128, 512)]
        reads = [
            kernels.forward(call, tiles(call).forward, replace(H100, l2_bytes=size)).dram_read
            for size in sizes
        ]
        assert reads == sorted(reads, reverse=True)
        assert reads[-1] == call.q_bytes + call.k_bytes + call.v_bytes

    def test_variable_lengths(self):
        lengths = ((100, 100), (100, 100), (700, 700), (0, 0), (1, 300))
        call = Call(5, 700, 700, 4, 2, 64, lengths=lengths, window_right=0)
        parts = [Call(1, *pair, 4, 2, 64, window_right=0) for pair in lengths]
        for name in ("forward", "dkdv", "dq"):
            tile = getattr(tiles(call), name)
            whole = getattr(kernels, name)(call, tile, H100)
            each = [getattr(kernels, name)(part, tile, H100) for part in parts]
            assert whole.sm_read == pytest.approx(sum(part.sm_read for part in each))
            assert whole.dram_bytes == pytest.approx(sum(part.dram_bytes for part in each))

    def test_prepare(self):
        call = Call(2, 100, 100, 4, 4, 64)
        found = kernels.preprocess(call, H100)
        assert found.dram_read == 2 * call.out_bytes + call.lse_bytes
        assert found.written == 2 * 4 * 128 * 8


@pytest.mark.compile
@pytest.mark.thorough
def test_residents_are_those_of_the_compiled_kernels():
    from flashtile.tools.inspection.attention import compile_cases
    from flashtile.tools.inspection.report import report

    calls = itertools.product(("forward", "dkdv", "dq"), ("64 causal", "128 full"))
    wanted = {f"{kernel} bf16 head_dim {what}" for kernel, what in calls}
    for case in compile_cases("sm_90a"):
        if case.name not in wanted:
            continue
        kernel, _, _, head_dim, variant = case.name.split()
        call = Call(1, 4096, 4096, 8, 8, int(head_dim), window_right=0 if variant == "causal" else -1)
        compiled = report(case, "sm_90a")
        by_registers = kernels.REGISTERS // (-(-compiled.registers // 8) * 8 * compiled.threads)
        by_shared = H100.shared_bytes // (compiled.shared + kernels.RESERVED_SHARED)
        estimated = kernels.residents(kernel, call, getattr(tiles(call), kernel), H100)
        assert estimated == min(by_registers, by_shared), case.name
