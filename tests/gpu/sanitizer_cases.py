"""A few calls, forward and backward, to run under NVIDIA's compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitizer_cases.py

Without torch's cache each tensor is an allocation of its own, so that memcheck sees an access beside it. A
plain script: neither pytest nor the reference, whose launches would be checked as slowly as ours.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import flashtile
from cases import BF16, FP16, FP32, Case

RAGGED = ((70, 130), (1, 139), (0, 17), (35, 0), (7, 7))
SANITIZED = (
    Case(name="causal", causal=True),
    Case(name="odd head_dim", head_dim=59, head_dim_v=40, layout="offset"),
    Case(name="window", window_size=(33, 5), layout="transposed", dtype=BF16),
    Case(name="everything", causal=True, window_size=(40, -1), softcap=3.0, alibi="batch", layout="packed"),
    Case(name="varlen", lengths=RAGGED, unused_tail=9, causal=True, slack=100),
    Case(name="varlen float32", lengths=RAGGED, dtype=FP32, alibi="head"),
    Case(name="head_dim 128", head_dim=128, seqlen_q=200, seqlen_k=64, dtype=FP16),
    Case(name="head_dim 256", head_dim=256, seqlen_q=65, seqlen_k=127, dtype=BF16, causal=True),
    Case(name="expanded", layout="expanded", heads_q=6, heads_kv=3),
    Case(name="sink", sink="own", causal=True, heads_q=6, heads_kv=3),
    Case(name="unused keys", unused_keys=40, sink="float32", window_size=(33, 5), dtype=BF16),
    Case(name="varlen, unused keys", lengths=RAGGED, unused_keys=5, sink="float32", unused_tail=9),
)
DETERMINISTIC = (
    Case(name="deterministic", causal=True, dtype=BF16, seqlen_q=200, seqlen_k=300),
    Case(
        name="deterministic, head_dim 128", head_dim=128, head_dim_v=64, window_size=(90, 40), unused_keys=9
    ),
    Case(name="deterministic, varlen", head_dim=128, lengths=RAGGED, unused_tail=9, sink="own"),
    Case(name="deterministic, head_dim 256", head_dim=256, head_dim_v=128, lengths=RAGGED, causal=True),
)
"""Kernels that add blocks of keys up in one order wait for each other in memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="Default: what dispatch chooses.")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    for case in (*SANITIZED, *DETERMINISTIC):
        inputs = case.inputs(options.device)
        leaves = [t.detach().requires_grad_() for t in inputs.qkv]
        results = flashtile.attention(
            *leaves,
            return_lse=True,
            backend=options.backend,
            deterministic=case in DETERMINISTIC,
            **inputs.arguments,
        )
        torch.autograd.grad(results, leaves, (inputs.dout, inputs.dlse))
        if options.device == "cuda":
            torch.cuda.synchronize()
        print(f"ran: {case.name}", flush=True)


if __name__ == "__main__":
    main()
