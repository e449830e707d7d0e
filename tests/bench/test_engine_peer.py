"""The engine's peer, a design of phases, gives the engine's tokens: what is compared does the same work."""

from __future__ import annotations

import json

import torch

from flashtile.tools.bench.workloads import SMALL_MODEL
from script_runner import load


def test_both_give_the_same_tokens(tmp_path, monkeypatch):
    script = load("benchmarks/engine_peer.py")
    path = tmp_path / "found.json"
    options = ["--model", SMALL_MODEL, "--requests", "5", "--seqs", "3", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["engine_peer.py", *options, "--json", str(path)])
    script.main()  # ends the program where they differ
    found = json.loads(path.read_text())
    assert found["phases, tokens"] == found["flashtile, tokens"]
    assert found["phases"]["steps"] > 5


def test_draws_follow_the_softmax():
    script = load("benchmarks/engine_peer.py")
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(4000, 3)
    shares = script.draw(logits, 1.0).bincount(minlength=3) / 4000
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.03)
