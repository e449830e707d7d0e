"""flashtile.io_model: counts by hand and by brute force, floors, the tables, the explain command."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.suite import workloads
from flashtile.algorithms import flash1
from flashtile.hardware.calls import visible_pairs
from flashtile.hardware.linear_table import rows as measured_products
from flashtile.io_model import (
    CARDS,
    MODELS,
    Call,
    Product,
    attention_memory,
    cached_tokens,
    card_of_device,
    closed_forms,
    estimates,
    find_card,
    find_model,
    longest_sequence,
    measured_card,
    prompt_memory,
)
from flashtile.learn.algorithms.memory import Memory
from flashtile.learn.io_model.estimate import DECODING, FLASH1, FLASH2, FLASHTILE, LEAST, PASSES, STANDARD
from flashtile.learn.io_model.memory import at_length, longest_prompt
from flashtile.learn.io_model.tables import about_copied_totals, why_flash1_is_slower
from flashtile.problems.attention import Options, Problem
from flashtile.problems.masking import Masking, positions
from flashtile.tools.commands.explain import explain
from walk import walk

H100 = find_card("h100")
PAPER = Call(4, 4096, 4096, 16, 16, 128)


class TestCalls:
    def test_visible_pairs_are_those_of_the_mask(self):
        lengths, sides = (0, 1, 3, 8, 13), (-1, 0, 2, 5, 30)
        for seqlen_q, seqlen_k, left, right in itertools.product(lengths, lengths, sides, sides):
            masking = Masking(window_left=left, window_right=right)
            expected = int(masking.visible(positions(seqlen_q, seqlen_k), range(seqlen_k)).sum())
            assert visible_pairs(seqlen_q, seqlen_k, left, right) == expected, (
                seqlen_q,
                seqlen_k,
                left,
                right,
            )

    def test_visible_pairs_of_chunks(self):
        masking = Masking(window_left=5, attention_chunk=4)
        for seqlen_q, seqlen_k in itertools.product((0, 1, 8, 13), repeat=2):
            problem = Problem.from_tensors(
                *(torch.empty(2, n, 3, 8, device="meta") for n in (seqlen_q, seqlen_k, seqlen_k)),
                options=Options(masking=masking),
            )
            seen = masking.visible(positions(seqlen_q, seqlen_k), range(seqlen_k))
            call = Call.from_problem(problem)
            assert (call.masking, call.visible_pairs) == (masking, 6 * int(seen.sum()))

    def test_large_counts_are_exact(self):
        assert visible_pairs(10**6, 10**6, -1, 0) == 10**6 * (10**6 + 1) // 2
        assert visible_pairs(10**6, 10**6, 0, 0) == 10**6

    @pytest.mark.parametrize("name", ["ci-gqa-s113", "ci-varlen", "ci-window-s150", "ci-chunk"])
    def test_workloads_count_the_same(self, name):
        (workload,) = workloads.select([name])
        call = workload.call
        forward, backward = estimates(call, H100)[-1], estimates(call, H100, "backward")[-1]
        assert forward.bytes == workload.bytes("forward")
        assert backward.bytes == workload.bytes("backward")
        if workload.causal and workload.seqlen_q == workload.seqlen_k and workload.window_left == -1:
            # Benchmarks leave out half of the diagonal, as the papers do.
            diagonal = 2 * workload.batch * workload.seqlen_q * workload.num_heads_q * workload.head_dim
            if not workload.varlen:
                assert (
                    abs(forward.flops - workload.flops() - diagonal)
                    <= 4 * workload.head_dim * call.num_heads_q
                )
                return
        assert forward.flops == workload.flops("forward")
        assert backward.flops == workload.flops("backward")

    def test_from_a_problem(self):
        q = torch.empty(2, 7, 6, 32, dtype=torch.float16, device="meta")
        k = torch.empty(2, 9, 3, 32, dtype=torch.float16, device="meta")
        v = torch.empty(2, 9, 3, 16, dtype=torch.float16, device="meta")
        call = Call.from_problem(Problem.from_tensors(q, k, v))
        assert call == Call(2, 7, 9, 6, 3, 32, 16, "float16")
        held = (call.q_bytes, call.k_bytes, call.v_bytes, call.out_bytes, call.lse_bytes)
        out = 2 * 7 * 6 * 16 * 2
        assert held == (q.numel() * 2, k.numel() * 2, v.numel() * 2, out, 2 * 7 * 6 * 4)

    @walk(
        ("change", "message"),
        [
            ({"batch": -1}, "batch must be at least 0, got -1"),
            ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
            ({"head_dim_v": 0}, "head_dim_v must be at least 1, got 0"),
            ({"num_heads_kv": 3}, "num_heads_q must be a multiple of num_heads_kv = 3, got 16"),
            ({"dtype": "int8"}, "dtype must be one of .*got 'int8'"),
            ({"window_left": -2}, r"window_left must be -1 \(unlimited\) or more, got -2"),
        ],
    )
    def test_refuses(self, change, message):
        with pytest.raises(ValueError, match=message):
            replace(PAPER, **change)


class TestCards:
    def test_numbers_are_consistent(self):
        for card in CARDS.values():
            assert card.tflops["float16"] > card.tflops["float32"] >= card.tflops["float64"]
            assert 20 < card.ridge("float16") < 500
            assert card.sram_bytes > card.l2_bytes / 10
            assert card.sram_gbps > 4 * card.bandwidth_gbps

    def test_the_articles_hierarchy(self):
        """Of an A100: 19 TB/s of SRAM over 1.5 TB/s of HBM."""
        a100 = find_card("A100-40GB")
        assert a100.sram_gbps == pytest.approx(19.5e3, rel=0.01)
        assert a100.bandwidth_gbps == pytest.approx(1.5e3, rel=0.05)

    def test_find(self):
        assert find_card("H100") is CARDS["h100"]
        assert card_of_device("NVIDIA H100 80GB HBM3") is CARDS["h100"]
        assert card_of_device("NVIDIA L40S") is CARDS["l40s"]
        assert card_of_device("NVIDIA L4") is CARDS["l4"]
        assert card_of_device("NVIDIA L40") is None
        with pytest.raises(ValueError, match=r"card must be one of .*h100.*got 'h1000'"):
            find_card("h1000")
        with pytest.raises(ValueError, match=r"V100 SXM2 32GB must be one of float16.*got 'bfloat16'"):
            find_card("v100").peak_tflops("bfloat16")

    def test_measured_here(self):
        card = measured_card(torch.device("cpu"), ("float32",), rep=1.0)
        assert card.peak_tflops("float32") > 0
        assert card.bandwidth_gbps > 0
        found = {row.algorithm: row for row in estimates(replace(PAPER, dtype="float32"), card)}
        assert set(found) == {STANDARD, LEAST}
        assert found[STANDARD].memory_seconds > found[LEAST].memory_seconds > 0


class TestEstimates:
    def test_least_by_hand(self):
        call = Call(2, 10, 20, 4, 2, 8, dtype="float16")
        forward, backward = (estimates(call, H100, which)[-1] for which in PASSES)
        q, kv, lse = 2 * 10 * 4 * 8 * 2, 2 * 20 * 2 * 8 * 2, 2 * 10 * 4 * 4
        assert forward.bytes == 2 * q + 2 * kv + lse
        assert backward.bytes == 4 * q + 4 * kv + lse
        assert forward.flops == 4 * 2 * 4 * 10 * 20 * 8
        assert backward.flops == 2.5 * forward.flops
        assert forward.memory_seconds == forward.bytes / 3350e9
        assert forward.compute_seconds == forward.flops / 989.4e12

    def test_standard_is_bound_by_memory_and_flash_is_not(self):
        for which in PASSES:
            found = {row.algorithm: row for row in estimates(PAPER, H100, which)}
            assert found[STANDARD].bound == "HBM"
            assert found[FLASHTILE].bound == "compute"
            assert found[FLASHTILE].bytes < found[STANDARD].bytes / 10
            assert found[FLASHTILE].peak_bytes < found[STANDARD].peak_bytes / 10

    def test_the_second_algorithm_moves_less_than_the_first(self):
        found = {row.algorithm: row for row in estimates(PAPER, H100)}
        order = [found[name].bytes for name in (LEAST, FLASHTILE, FLASH2, FLASH1, STANDARD)]
        assert order == sorted(order)

    def test_splits_use_the_whole_card_at_batch_one(self):
        found = {row.algorithm: row for row in estimates(Call(1, 1, 32768, 32, 8, 128), H100)}
        assert found[FLASHTILE].programs == 32
        assert found[DECODING].programs >= H100.sm_count
        assert found[DECODING].floor_seconds < found[FLASHTILE].floor_seconds / 3
        assert found[DECODING].bytes < 1.01 * found[LEAST].bytes

    def test_nothing_to_do(self):
        for call in (Call(0, 5, 5, 1, 1, 16), Call(1, 0, 5, 1, 1, 16), Call(1, 5, 0, 1, 1, 16)):
            for which in PASSES:
                assert all(math.isfinite(row.floor_seconds) for row in estimates(call, H100, which))
                assert estimates(call, H100, which)[-1].flops == 0

    def test_refuses(self):
        with pytest.raises(ValueError, match="which must be one of forward, backward, got 'both'"):
            estimates(PAPER, H100, "both")
        with pytest.raises(ValueError, match="got 'bfloat16'"):
            estimates(PAPER, find_card("v100"))

    def test_peak_memory_is_what_a_card_measured(self):
        """The portable kernels hold to the byte what the model says; standard attention in PyTorch more."""
        path = Path(__file__).parents[3] / "benchmarks" / "results" / "2026-11-21-h100-paper-grid.json"
        checked = 0
        for cell in json.loads(path.read_text())["cells"]:
            (workload,) = workloads.select([cell["workload"]])
            found = estimates(workload.call, H100, cell["pass"])
            predicted = {row.algorithm: row.peak_bytes for row in found}
            for name, algorithm in (("flashtile", FLASHTILE), ("standard", STANDARD)):
                measured = cell["results"][name].get("peak_memory_bytes")
                if measured is not None:
                    most = 1.0 if name == "flashtile" else 1.6
                    assert 1.0 <= measured / predicted[algorithm] <= most, (cell["workload"], name)
                    checked += 1
        assert checked > 100


class TestClosedForms:
    def test_standard_is_nd_plus_n_squared(self):
        call = Call(1, 512, 512, 1, 1, 64, dtype="float16")
        forward, backward = closed_forms.standard_forward(call), closed_forms.standard_backward(call)
        assert forward.hbm_bytes == 2 * (4 * 512 * 64 + 4 * 512**2)
        assert backward.hbm_bytes == 2 * (8 * 512 * 64 + 7 * 512**2)

    def test_flash1_falls_with_sram_as_the_theorem_says(self):
        """Theorem 2: Theta(N^2 d^2 / M)."""
        call = Call(1, 16384, 16384, 1, 1, 64, dtype="float16")
        small, large = (self.flash1(call, kib * 1024) for kib in (32, 128))
        assert small / large == pytest.approx(4, rel=0.1)
        assert self.flash1(replace(call, head_dim=128), 128 * 1024) / large == pytest.approx(4, rel=0.1)

    def test_where_flash1_begins_to_win(self):
        """Less SRAM than d^2 elements, and the scores would have been cheaper to store."""
        call = Call(1, 4096, 4096, 1, 1, 128, dtype="float16")
        standard = closed_forms.standard_forward(call).hbm_bytes
        assert self.flash1(call, 2**18) < standard
        assert self.flash1(call, 2**13) > standard

    @staticmethod
    def flash1(call, sram_bytes):
        blocks = flash1.block_sizes(Memory(sram_bytes, call.element_bytes), call.head_dim, call.width_v)
        return closed_forms.flash1_forward(call, blocks).hbm_bytes

    def test_heads_and_sequences_add_up(self):
        lengths = ((100, 100), (37, 90), (1, 300))
        call = Call(3, 100, 300, 4, 2, 64, dtype="float16", window_right=0, lengths=lengths)
        heads = [
            Call(1, *pair, 1, 1, 64, dtype="float16", window_right=0) for pair in lengths for _ in range(4)
        ]
        blocks = (32, 16)
        for function in (
            closed_forms.standard_forward,
            closed_forms.standard_backward,
            lambda each: closed_forms.flash1_forward(each, blocks),
            lambda each: closed_forms.flash1_backward(each, blocks),
            lambda each: closed_forms.flash2_forward(each, blocks),
            lambda each: closed_forms.flash2_backward(each, blocks),
        ):
            whole, parts = function(call), [function(head) for head in heads]
            for name in ("hbm_read", "hbm_written", "matmul_flops", "extra_bytes"):
                assert getattr(whole, name) == sum(getattr(part, name) for part in parts)

    def test_a_group_reads_its_keys_once_in_decoding(self):
        call = Call(1, 1, 4096, 8, 2, 64, dtype="float16")
        one, eight = (closed_forms.flash_decoding(call, splits) for splits in (1, 8))
        assert call.k_bytes + call.v_bytes < one.hbm_read < 1.01 * (call.k_bytes + call.v_bytes)
        assert eight.hbm_bytes - one.hbm_bytes == 7 * (call.q_bytes + 2 * 8 * (64 + 1) * 4)

    def test_refuses_too_little_sram(self):
        with pytest.raises(MemoryError, match="sram_bytes must be at least"):
            self.flash1(PAPER, 512)


class TestMemory:
    def test_the_articles_table(self):
        """One head in fp16: 16 MB at 2k, 256 MB at 8k, 4 GB at 32k, 64 GB at 128k; flash 4 bytes a row."""
        call = Call(1, 1, 1, 1, 1, 128, dtype="float16")
        for seqlen, mebibytes in ((2048, 16), (8192, 256), (32768, 4096), (131072, 65536)):
            row = attention_memory(at_length(call, seqlen))
            assert row.standard == mebibytes * 2**20
            assert row.flash == 4 * seqlen

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("standard", [False, True])
    def test_when_a_card_is_full(self, standard, training):
        call = Call(1, 1, 1, 32, 8, 128)

        def needed(seqlen: int) -> int:
            row = attention_memory(at_length(call, seqlen), training)
            return row.tensors + (row.standard if standard else row.flash)

        longest = longest_sequence(call, H100, standard=standard, training=training)
        assert needed(longest) <= H100.memory_bytes < needed(longest + 1)

    def test_caches_of_known_models(self):
        tokens = {model.name: model.kv_bytes_per_token() for model in MODELS}
        assert tokens["LLaMA-7B"] == 512 * 1024
        assert tokens["LLaMA-13B"] == 800 * 1024
        assert tokens["Llama-2-70B"] == 320 * 1024
        # "1.7 GB for a single sequence of LLaMA-13B" (the vLLM announcement).
        assert tokens["LLaMA-13B"] * 2048 == pytest.approx(1.7e9, rel=0.02)

    def test_tokens_beside_the_weights(self):
        model = next(model for model in MODELS if model.name == "LLaMA-13B")
        tokens = cached_tokens(model, find_card("a100-40gb"))
        used = model.weight_bytes() + tokens * model.kv_bytes_per_token()
        assert 0 <= 40 * 2**30 - used < model.kv_bytes_per_token()
        assert cached_tokens(model, find_card("rtx4090")) == 0
        assert cached_tokens(model, find_card("rtx4090"), cards=2) > 0


class TestModels:
    def test_products_of_known_layers(self):
        """From the published configurations: hidden 4096, and 11008 (14336) between the feed-forward's."""
        llama2, llama3 = (find_model(name).products for name in ("llama-2-7b", "Llama-3-8B"))
        assert llama2 == ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008))
        assert llama3 == ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
        assert find_model("opt-13b").products[2] == (20480, 5120)

    @walk("model", MODELS)
    def test_products_are_most_of_the_parameters(self, model):
        """The rest are the embedding and the head, norms and biases: up to 1.3e9."""
        of_layers = model.layers * sum(rows * columns for rows, columns in model.products)
        assert 0 < model.parameters - of_layers < 1.3e9

    def test_memory_of_a_prompt_by_hand(self):
        memory = prompt_memory(find_model("llama-2-7b"), 2, 1000, "float16")
        assert memory.weights == 2 * 6.74e9
        assert memory.cache == 2 * 1000 * 2 * 32 * 4096 * 2
        assert memory.rows == 2 * 2 * 1000 * 4096 * 2
        assert memory.standard == 2 * (2 * 32 * 1000 * 1000) * 2
        assert memory.flash == 4 * 2 * 32 * 1000
        assert memory.total_standard - memory.total_flash == memory.standard - memory.flash

    @pytest.mark.parametrize("standard", [False, True])
    def test_when_a_card_is_full(self, standard):
        model, card = find_model("llama-2-13b"), find_card("a100")
        longest = longest_prompt(model, 2, card, standard=standard)
        totals = [prompt_memory(model, 2, seqlen) for seqlen in (longest, longest + 1)]
        sizes = [total.total_standard if standard else total.total_flash for total in totals]
        assert sizes[0] <= card.memory_bytes < sizes[1]

    def test_the_copied_totals_are_below_the_weights(self):
        for name in ("llama-7b", "llama-13b", "llama-2-70b"):
            assert "cannot come from attention alone" in about_copied_totals(find_model(name), "float16")
        assert "cannot" not in about_copied_totals(find_model("llama-7b"), "float8_e4m3fn")
        assert "5,590 tokens" in about_copied_totals(find_model("llama-7b"), "float16")

    def test_why_the_first_algorithm_is_slower(self):
        a100, one = find_card("a100"), Call(1, 4096, 4096, 16, 16, 64)
        assert "its 16 use 16 of 108 SMs" in str(why_flash1_is_slower(estimates(one, a100)))
        assert why_flash1_is_slower(estimates(replace(one, batch=16), a100)) is None


class TestCommand:
    @staticmethod
    def invoke(*arguments):
        app = typer.Typer()
        app.command()(explain)
        return CliRunner().invoke(
            app, ["--device", "cpu", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
        )

    def test_costs_on_a_card(self):
        result = self.invoke("--verbose", "--card", "h100", "--seqlen-q", "4096", "--batch", "4")
        assert result.exit_code == 0, result.output
        assert "costs: --card NAME" not in result.output
        least = estimates(PAPER, H100)[-1]
        assert f"{least.bytes / 2**20:.0f} MiB" in result.output
        for name in (STANDARD, FLASH1, FLASH2, FLASHTILE, LEAST, "backward on H100", "989 TFLOP/s"):
            assert name in result.output

    def test_tables(self):
        result = self.invoke("--verbose", "--memory", "--kv-cache", "--dtype", "float16", "--heads", "1")
        assert result.exit_code == 0, result.output
        for expected in ("64 GiB", "LLaMA-13B", "800 KiB", "is full at", "costs: --card NAME"):
            assert expected in result.output

    def test_a_model(self):
        result = self.invoke("--model", "llama-2-7b", "--seqlen", "2048,131072", "--card", "a100")
        assert result.exit_code == 0, result.output
        for expected in (
            "12.6 GiB",
            "64 GiB",
            "2 TiB",
            "21,767",
            "133,911",
            "14 with standard",
            "32 of 108 SMs",
        ):
            assert expected in result.output
        rows = [line.split("│")[1:-1] for line in result.output.splitlines() if line.startswith("│")]
        assert [(row[0].strip(), row[8].strip()) for row in rows] == [("2k", "both"), ("128k", "flash")]

    def test_a_card_says_what_of_an_sm_is_shared(self):
        result = self.invoke("--card", "a100")
        for expected in ("108 x 192 KiB", "108 x 164 KiB", "108 x 256 KiB", "the other 28 always"):
            assert expected in " ".join(result.output.split())

    def test_kernels_that_are_only_compiled_are_called_so(self):
        for card, only in (("a100", True), ("b200", True), ("h100", False)):
            assert ("only compiled" in self.invoke("--card", card).output) == only
            portable = self.invoke("--card", card, "--backend", "portable").output
            assert ("only compiled" in portable) == only

    def test_a_decode_step_has_no_backward(self):
        result = self.invoke("--card", "a100", "--seqlen-q", "1", "--seqlen-k", "8192")
        assert DECODING in result.output
        assert "backward on" not in result.output

    def test_the_dtype_that_an_old_card_has(self):
        assert "float16" in self.invoke("--card", "v100").output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--card", "h1000"], "card must be one of"),
            (["--card", "v100", "--dtype", "bfloat16"], "got 'bfloat16'"),
        ],
    )
    def test_refuses(self, arguments, message):
        result = self.invoke(*arguments)
        assert result.exit_code == 2
        assert message in result.output


def test_no_measured_product_is_faster_than_its_floor():
    card = find_card("h200")
    for row in measured_products():
        for m, kinds in row.kernels.items():
            product = Product(int(m), row.N, row.K, row.dtype, row.weight_dtype)
            assert min(found["us"] for found in kinds.values()) * 1e-6 > product.floor_seconds(card)


def test_intensity_grows_with_the_rows_and_the_block():
    few, many = Product(1, 4096, 4096), Product(16, 4096, 4096)
    assert few.intensity(64) < 2 < few.intensity(64) * many.M
    assert many.intensity(16) < many.intensity(64) < 2 * many.M
