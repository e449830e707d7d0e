"""Benchmarks in e4m3: its contestants, its gate and its command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.suite import contestants, runner, workloads
from benchmarks.suite.command import bench
from benchmarks.suite.gate import Oracle, through_e4m3
from benchmarks.suite.inputs import make_inputs
from flashtile import fp8

CPU = torch.device("cpu")
DENSE, RAGGED = workloads.select(["ci-fp8"])
each_workload = pytest.mark.parametrize("workload", [DENSE, RAGGED], ids=lambda w: w.name)


@each_workload
def test_contestants_pass_the_gate(workload: workloads.Workload) -> None:
    inputs = make_inputs(workload, CPU)
    assert inputs.q.dtype == torch.bfloat16
    oracle = Oracle(workload, inputs, gradients=False)
    for peer in contestants.contestants("fp8", [], [], CPU):
        call = peer.prepare(workload, inputs)
        (comparison,) = oracle.check({"out": call.attend(inputs.q, inputs.k, inputs.v)})
        assert comparison.holds, comparison


def test_the_gate_sees_what_quantisation_does_not_excuse() -> None:
    """Keys of one head in another's place, or out scaled by 1.2."""
    inputs = make_inputs(DENSE, CPU)
    oracle = Oracle(DENSE, inputs, gradients=False)
    for wrong in (
        fp8.attention(inputs.q, inputs.k.flip(2), inputs.v, causal=True),
        1.2 * fp8.attention(inputs.q, inputs.k, inputs.v, causal=True),
    ):
        (comparison,) = oracle.check({"out": wrong})
        assert not comparison.holds


def test_flash_attention_3_gets_scales_by_key_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package replaced by one that attends over what it is given."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **descales: Tensor) -> Tensor:
        assert {t.dtype for t in (q, k, v)} == {torch.float8_e4m3fn}
        assert {scale.shape for scale in descales.values()} == {(DENSE.batch, DENSE.num_heads_kv)}
        wide = []
        for x, name in ((q, "q_descale"), (k, "k_descale"), (v, "v_descale")):
            scale = descales[name].repeat_interleave(x.shape[2] // DENSE.num_heads_kv, 1)
            wide.append((x.float() * scale[:, None, :, None]).transpose(1, 2))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*wide, is_causal=causal, enable_gqa=True).transpose(1, 2)

    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_interface", module)
    inputs = make_inputs(DENSE, CPU)
    call = contestants.FlashAttention3InFp8().prepare(DENSE, inputs)
    (comparison,) = Oracle(DENSE, inputs, gradients=False).check(
        {"out": call.attend(inputs.q, inputs.k, inputs.v)}
    )
    assert comparison.holds


def test_scales_by_key_head() -> None:
    x = torch.randn(2, 5, 6, 8) * torch.tensor([1.0, 1.0, 1.0, 50.0, 50.0, 50.0])[:, None]
    values, scale = contestants.by_key_head(x, 2)
    assert values.shape == x.shape
    torch.testing.assert_close(scale, torch.stack([x[:, :, :3].abs().max(), x[:, :, 3:].abs().max()]) / 448)
    back = values.float() * scale.repeat_interleave(3)[:, None]
    assert (back - x).abs().max() <= x.abs().max() * 2**-4


def test_rounding_of_a_tensor_keeps_its_largest() -> None:
    x = torch.randn(7, 9).bfloat16()
    rounded = through_e4m3(x)
    assert rounded.abs().max() == pytest.approx(x.abs().max().item())
    assert (rounded - x.float()).abs().max() <= x.abs().max() * 2**-4


def test_bytes_are_of_e4m3_in_and_bfloat16_out() -> None:
    rows_q, rows_kv = 150 * 2 * 4, 150 * 2 * 2
    assert DENSE.bytes() == rows_q * 32 * (1 + 2) + 2 * rows_kv * 32 + 4 * rows_q
    wide = replace(DENSE, dtype="bfloat16")
    assert wide.bytes() == 2 * (2 * rows_q * 32 + 2 * rows_kv * 32) + 4 * rows_q


@pytest.mark.thorough
def test_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench)
    path = tmp_path / "run.json"
    arguments = ["-w", "ci-fp8", "--device", "cpu", "--rounds", "1", "--rep", "1", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert [c["name"] for c in document["contestants"] if c["ours"]] == ["flashtile", contestants.FROM_BF16]
    for cell in document["cells"]:
        assert {result["status"] for result in cell["results"].values()} == {runner.OK}, cell["results"]
        assert cell["dtype"] == workloads.FP8
    assert {row["us"] is not None for row in document["host_time_us"].values()} == {True}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["-w", "ci,ci-fp8"], "one kind"), (["-w", "ci-fp8", "-p", "backward"], "forward")],
)
def test_command_refuses(arguments: list[str], said: str) -> None:
    app = typer.Typer()
    app.command()(bench)
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert result.exit_code == 2
    assert said in result.output
