"""``flashtile explain`` and ``flashtile info``."""

from __future__ import annotations

import pytest
import torch
import typer
from typer.testing import CliRunner

from flashtile.problems.masking import RANGES
from flashtile.tools.commands.explain import explain
from flashtile.tools.commands.info import info


def invoke(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def test_explain_is_three_lines():
    result = invoke(explain, "--device", "cpu", "--causal")
    assert result.exit_code == 0, result.output
    assert [line.split(":")[0] for line in result.output.splitlines()] == ["kernel", "why", "refused"]
    # What is asked for by name is printed in addition.
    assert "HBM" in invoke(explain, "--card", "h100").output
    assert "is full at" in invoke(explain, "--device", "cpu", "--memory").output


def test_explain_verbose():
    shape = ("--causal", "--heads", "8", "--kv-heads", "2", "--softcap", "9")
    result = invoke(explain, "--verbose", "--device", "cpu", *shape)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("forward\nbackend: cpu\n")
    assert "not portable: " in result.output
    assert "num_heads_kv=2" in result.output
    assert "softcap=9.0" in result.output


def test_explain_of_a_call_larger_than_memory():
    result = invoke(
        explain, "--verbose", "--device", "cpu", "--seqlen-q", "100000000", "--heads", "64", "--varlen",
        "--batch", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "total_q=300000000" in result.output


def test_explain_of_a_call_that_no_backend_serves():
    result = invoke(explain, "--device", "cpu", "--backend", "portable", "--dtype", "float64")
    assert result.exit_code == 1
    assert "kernel: forward: none; backward: none" in result.output


def test_explain_on_a_card_that_is_not_here():
    """Its choice, not this machine's, and nothing of where the command's own tensors would lie."""
    pytest.importorskip("triton")
    arguments = ("--verbose", "--card", "h100", "--heads", "8", "--kv-heads", "2", "--causal")
    result = invoke(explain, *arguments)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("forward\nbackend: hopper\n")
    assert "\n\nbackward\nbackend: hopper\nconfig: BackwardConfig(" in result.output
    assert "TMA" not in result.output
    assert "it computes on the CPU, the tensors are on an H100" in result.output
    result = invoke(explain, "--card", "a100", "--dtype", "float16")
    assert result.output.startswith("kernel: forward: portable, tiles of ")


def test_explain_of_packed_lengths():
    """100 tokens have three tiles of 64 x 64 and 5050 visible scores, 28 have one and 406."""
    pytest.importorskip("triton")
    shape = ("--heads", "4", "--causal", "--lengths", "100,28")
    result = invoke(explain, "--card", "h200", *shape)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    least, whole = (4 * scores * 4 * 128 / 1e9 for scores in (5050 + 406, 4 * 64 * 64))
    tensors, lse = 2 * 128 * 4 * 128, 4 * 128 * 4
    assert f"forward: at least {(4 * tensors + lse) / 1e6:,.1f} MB and {least:,.1f} GFLOPs; " in text
    assert "33% of the scores in visited tiles of 64 x 64 are visible" in text
    assert f"the products of whole tiles are {whole:,.1f} GFLOPs" in text
    assert f"{(4 * tensors + lse) / 2**10:.0f} KiB" in text  # q, k, v and out of 128 tokens
    here = invoke(explain, *shape[:-1], "100,0,28")
    assert f"{least:,.1f} GFLOPs" in here.output.splitlines()[3]
    for more, words in ((("--batch", "2"), "--batch"), (("--lengths", "0,0"), "not all of them 0")):
        result = invoke(explain, *shape, *more)
        assert result.exit_code == 2
        assert words in result.output


def test_explain_over_a_cache():
    shape = ("--batch", "8", "--seqlen-k", "8192", "--heads", "32", "--kv-heads", "8", "--causal")
    arguments = ("--card", "h200", *shape, "--page-size", "16")
    one = invoke(explain, *arguments, "--seqlen-q", "1")
    eight = invoke(explain, *arguments, "--seqlen-q", "8")
    assert (one.exit_code, eight.exit_code) == (0, 0)
    assert "kernel: decode: portable" in one.output
    assert "kernel: decode: hopper" in eight.output
    assert "flashtile, over a cache" in eight.output
    narrow = invoke(explain, *arguments, "--seqlen-q", "1", "--cache-dtype", "float8_e4m3fn")
    assert "129 MiB" in narrow.output


def test_explain_has_every_option_of_the_mask():
    """Without and with a cache, whose problem and costs are made in two ways."""
    values = {name: number for number, name in enumerate(RANGES, 5)}
    options = [word for name, n in values.items() for word in ("--" + name.replace("_", "-"), str(n))]
    for where in ((), ("--page-size", "16")):
        result = invoke(explain, "--verbose", "--device", "cpu", *where, *options)
        assert result.exit_code == 0, result.output
        assert all(f"{name}={value}" in result.output for name, value in values.items())


def test_explain_refuses():
    result = invoke(explain, "--device", "cpu", "--heads", "6", "--kv-heads", "4")
    assert result.exit_code == 2
    assert "multiple of the 4 heads" in result.output


def test_info():
    result = invoke(info)
    assert result.exit_code == 0, result.output
    for expected in (torch.__version__, "flashtile", "portable", "cpu", "bfloat16"):
        assert expected in result.output
