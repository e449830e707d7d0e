"""The fuzzer itself: a short run of each family, what it sees, what it prints, and that it draws all that is public."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import itertools
import random
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile
import fuzz.__main__
from fuzz import FAMILIES, bad_calls, caches, functions, oracle, runner
from fuzz.__main__ import POISONED
from fuzz.prelude import Wrong, agree, compare, refuses
from fuzz.runner import Call

CALLS = {
    "attention": 8,
    "functions": 4,
    "caches": 8,
    "fp8": 4,
    "linear": 8,
    "doors": 6,
    "hugging_face": 4,
    "manager": 2,
    "closures": 3,
}
"""By family, calls of a short run. Ranks and checkpoints take seconds to begin with, and have tests of their own."""

SEEDS = {"doors": 5}

SEEN = {"bad_calls": 400}
"""By family, calls whose texts are looked through, 120 otherwise."""

MODULES = ("flashtile", "flashtile.fp8", "flashtile.linear", "flashtile.masks", "flashtile.parallel", "flashtile.kv_cache",
           "flashtile.compat.flash_attn", "flashtile.compat.flash_attn_interface", "flashtile.compat.flash_attn.bert_padding",
           "flashtile.compat.flash_attn.layers.rotary")  # fmt: skip
LEFT_OUT = {
    "a record of results, which nobody calls": {
        "BeforeNorm", "Explanation", "LinearExplanation", "Quantized", "BlockMask", "Batch", "Invariant", "Step", "Usage", "Link", "ParallelEstimate",
        "ParallelExplanation", "ShardedMask", "Sharing",
    },
    "an error": {"CacheFullError", "IntegrityError", "OutOfBlocksError", "OutOfSequencesError"},
    "drawn by what is made of it": {"LLM", "BlockPool", "MaskMod", "ScoreMod", "shard", "shard_mask", "context_parallel_attention", "context_parallel_decode"},
    "an estimate of time": {"estimates", "two_dimensions", "explain"},
    "the other half of shard, compared in tests/parallel": {"unshard"},
    "plans nothing here": {"get_scheduler_metadata"},
    "files and compilers, tested in tests/compilation": {"record_calls", "use_compiled", "warmup"},
    "two lines around what is drawn": {
        "unpad_input_for_concatenated_sequences", "apply_rotary_emb_qkv_", "apply_rotary_emb_kv_", "apply_rotary_emb_func", "RotaryEmbedding",
    },
}  # fmt: skip
"""Public names that no family draws, and why."""


@pytest.mark.parametrize("family", CALLS)
def test_short_run(family: str) -> None:
    module = FAMILIES[family]()
    found = runner.run(
        {family: module}, SEEDS.get(family, 4), 60.0, CALLS[family], say=lambda text: None, most=1
    )
    assert not found.failures, "\n".join(map(str, found.failures[0]))


def test_bad_calls_of_the_front_door_are_refused() -> None:
    front = tuple(
        name for name in bad_calls.GOOD if name.startswith(("flashtile.attention ", "flashtile.flash_attn"))
    )
    for number in range(60):
        call = bad_calls.draw(random.Random(number), functions=front)
        assert runner.failure(call) is None, str(call)


def test_every_public_function_is_drawn() -> None:
    text = []
    for family, load in FAMILIES.items():
        module = load()
        text += [module.draw(random.Random(f"{family}/{n}")).code() for n in range(SEEN.get(family, 120))]
    words = set(re.findall(r"\w+", "\n".join(text)))
    excused = set().union(*LEFT_OUT.values())
    for name in MODULES:
        module = importlib.import_module(name)
        public = {n for n in module.__all__ if callable(getattr(module, n))}
        assert not public - words - excused, f"{name}: no family draws {sorted(public - words - excused)}"


def test_a_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = flashtile.attention

    def faulty(q, k, v, *, softcap=0.0, **options):
        return attend(q, k, v, softcap=softcap * 1.01, **options)

    monkeypatch.setattr(flashtile, "attention", faulty)
    body = "agree(lambda f, q, k, v: f(q, k, v, OPTIONS, return_lse=True), flashtile.attention, oracle.attention, GIVEN)"
    shape = "rand(batch, seqlen, 2, head_dim, seed={})"
    tensors = {name: shape.format(n) for n, name in enumerate("qkv")}
    call = Call(
        body,
        {"batch": 2, "seqlen": 9, "head_dim": 8},
        tensors,
        ("causal=True", "softcap=1.0", "softmax_scale=0.5"),
    )
    label, _ = runner.failure(call) or ("", "")
    assert label == "result 0 is off"
    smallest = runner.shrink(call, label)
    assert smallest.options == ("softcap=1.0",)
    assert smallest.sizes["batch"] == 1
    assert str(smallest).startswith("from fuzz.prelude import *\n")
    assert runner.failure(smallest) is not None
    monkeypatch.undo()
    assert runner.failure(smallest) is None


def test_the_rule_refuses_nan_and_a_wrong_infinity() -> None:
    """NaN is right where the result is NaN, as by a score function that takes the root of a negative number."""
    right = torch.tensor([1.0, -torch.inf, torch.nan], dtype=torch.float64)
    inf, nan = torch.inf, torch.nan
    for wrong in ([1, 5, nan], [1, nan, nan], [1, inf, nan], [1.001, -inf, nan], [1, -inf, 0]):
        with pytest.raises(Wrong, match="result 0 is off"):
            compare("result 0", torch.tensor(wrong), right, right, [right], torch.float32)
    compare("result 0", right.float(), right, right, [right], torch.float32)


def test_a_score_that_a_function_makes_minus_infinity_has_no_gradient() -> None:
    q, k, v = (torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))

    def call(attend, q, k, v, w):
        return attend(q, k, v, score_mod=lambda s, b, h, i, j: s + w[h] / (i - j).abs(), return_lse=True)

    agree(call, flashtile.attention, oracle.attention, q=q, k=k, v=v, w=torch.tensor([-1.0]))


def test_a_mask_can_be_joined_to_that_of_a_score_function() -> None:
    """Otherwise ``needed & a | b`` shows scores for which the function divides by 0."""
    for seed in range(500):
        joined = ast.parse("needed & " + functions.mask_mod(random.Random(seed), {}), mode="eval").body
        assert isinstance(joined, ast.BinOp)
        assert isinstance(joined.op, ast.BitAnd), ast.unparse(joined)


def test_a_gradient_may_have_a_rounding_error_of_the_largest_result() -> None:
    """A soft cap's derivative is a difference of numbers near 1, so it is exact only in absolute terms."""
    right = torch.tensor([1.65e-5], dtype=torch.float64)
    given = right, [right], torch.float64, 1.1
    compare("gradient of q", right + 1.7e-17, right, *given)
    for name, wrong in (("gradient of q", 1e-14), ("result 0", 1.7e-17)):
        with pytest.raises(Wrong, match=f"{name} is off"):
            compare(name, right + wrong, right, *given)


@pytest.mark.parametrize(("off", "label"), [(2**-14, ""), (2**-7, "gradient of q is off")])
def test_the_gradient_of_lse_may_have_a_rounding_error_of_a_large_score(off: float, label: str) -> None:
    """It is P, which a backward pass recomputes: a score of 1,000 has a unit of 2 ** -14 in float32."""

    def ours(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = oracle.attention(*tensors, **options)
        return out, lse + (lse - lse.detach()) * off

    def call(attend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attend(q, k, v, softmax_scale=1.0)

    given = {"q": torch.full((1, 4, 2, 1), 1000.0), "k": torch.ones(1, 1, 2, 1), "v": torch.ones(1, 1, 2, 8)}
    with pytest.raises(Wrong, match=label) if label else contextlib.nullcontext():
        agree(call, ours, oracle.attention, **given)


@pytest.mark.parametrize(("off", "label"), [(3e-7, ""), (1e-4, "result 0 is off")])
def test_a_profile_of_float64_may_have_errors_of_float32(
    monkeypatch: pytest.MonkeyPatch, off: float, label: str
) -> None:
    def rounded(q, k, **options):
        found = profile(q, k, **options)
        return replace(found, most=found.most * (1 + off))

    draws = (caches.draw(random.Random(seed)) for seed in itertools.count())
    call = next(call for call in draws if "profile_scores" in call.code() and not call.options)
    profile = flashtile.profile_scores
    monkeypatch.setattr(flashtile, "profile_scores", rounded)
    found = runner.failure(replace(call, fixed={**call.fixed, "dtype": "torch.float64"}))
    assert (found or ("",))[0] == label


def test_a_number_within_twice_its_bound_is_no_failure() -> None:
    body = "agree(lambda f, x: f(x), lambda x: x + {}, lambda x: 1 * x, x=torch.full((3,), 1.5), gradients=False)"
    near, wrong = (_outcome(body.format(steps * 2.0**-23)) for steps in (2, 4))
    assert (len(near.failures), len(near.once)) == (0, 1)
    assert (len(wrong.failures), len(wrong.once)) == (1, 0)


def test_a_bad_call_must_be_refused_by_name() -> None:
    def raises(error: Exception) -> None:
        raise error

    refuses(lambda: raises(ValueError("softcap must be a number")), "softcap")
    for error, label in (
        (ValueError("no"), "does not name"),
        (RuntimeError("softcap"), "RuntimeError"),
        (None, "is taken"),
    ):
        with pytest.raises(Wrong, match=label):
            refuses((lambda: None) if error is None else lambda error=error: raises(error), "softcap")


def _outcome(code: str) -> runner.Outcome:
    family = types.ModuleType("family")
    family.draw = lambda rng, device: Call(code)  # type: ignore[attr-defined]
    return runner.run({"family": family}, 1, 60.0, calls=2, say=lambda text: None)


def test_what_the_machine_lacks_is_no_failure() -> None:
    no_thread = 'RuntimeError("can\'t start new thread")'
    for error in (
        "ModuleNotFoundError(name='transformers')",
        "MemoryError()",
        "OSError(24, 'many')",
        no_thread,
    ):
        found = _outcome(f"raise {error}")
        assert (found.calls, found.failures, sum(found.lacking.values())) == (2, [], 2)
    for error in ("ModuleNotFoundError(name='flashtile.x')", "OSError(2, 'no such file')"):
        assert len(_outcome(f"raise {error}").failures) == 1


def test_a_call_that_fails_once_or_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _outcome("math.calls = getattr(math, 'calls', 0) + 1\nassert math.calls > 1")
    monkeypatch.delattr("math.calls")
    assert (len(found.failures), len(found.once)) == (0, 1)
    monkeypatch.setattr(runner, "CPU_SECONDS", 0.05)
    endless = "while True:\n    try:\n        sum(range(1000))\n    except Exception:\n        pass"
    assert [label for label, *_ in _outcome(endless).failures] == [f"family: {runner.TOO_LONG}"]


def test_a_process_that_dies_is_replaced_and_its_last_call_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a launch that fails on a GPU: alone the call passes, after the calls before it it fails again."""
    begun: list[tuple[str, ...]] = []

    def started(*arguments: str, log: Path | None = None, **environment: str) -> int:
        begun.append(arguments)
        given = dict(itertools.pairwise(arguments))
        if "--repeat" in arguments:
            repeated = Path(given["--repeat"]).read_text().splitlines()
            assert environment == {"CUDA_LAUNCH_BLOCKING": "1"}
            assert repeated[-1] == "7 linear 2"
            return POISONED if len(repeated) > 1 else 0
        if given["--seed"] == "7":
            Path(given["--log"]).write_text("".join(f"7 linear {n}\n" for n in range(3)))
            return POISONED
        return 0

    monkeypatch.setattr(fuzz.__main__, "started", started)
    options = argparse.Namespace(seconds=60.0, device="cuda", family=["linear"], calls=None)
    assert fuzz.__main__.supervise(options, 7) == 1
    assert ["--repeat" in arguments for arguments in begun] == [False, True, True, False]


def test_a_call_that_does_not_end_is_named_and_the_next_seed_begins(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """As with a kernel that does not end: the process is ended from outside. On the CPU, a sleeping one stands for it."""
    monkeypatch.setattr(fuzz.__main__, "STUCK_SECONDS", 3.0)
    script = "import sys, time; open(sys.argv[-1], 'a').write('{} linear 1\\n'); time.sleep({})"
    popen, begun = fuzz.__main__.subprocess.Popen, []

    def process(command: list[str], **given):
        begun.append(command[command.index("--seed") + 1])
        return popen(
            [sys.executable, "-c", script.format(begun[-1], 60 if len(begun) == 1 else 0), command[-1]],
            **given,
        )

    monkeypatch.setattr(fuzz.__main__.subprocess, "Popen", process)
    options = argparse.Namespace(seconds=60.0, device="cuda", family=["linear"], calls=None)
    assert fuzz.__main__.supervise(options, 7) == 1
    assert begun == ["7", str(7 + fuzz.__main__.NEXT_SEED)]
    assert "linear, call 1 of seed 7" in capsys.readouterr().out


def test_a_log_names_its_calls(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    log = tmp_path / "calls"

    def begun(family: str, number: int) -> None:
        with log.open("a") as lines:
            lines.write(f"3 {family} {number}\n")

    found = runner.run({"linear": FAMILIES["linear"]()}, 3, 60.0, 2, begun=begun)
    assert (found.calls, fuzz.__main__.repeat(log, "cpu")) == (2, 0)
    assert "linear, call 1 of seed 3" in capsys.readouterr().out


def test_a_seed_draws_the_same_calls_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(runner, "failure", lambda call: drawn.append(call.code()))
    family = FAMILIES["linear"]()
    for others in ({}, {"attention": FAMILIES["attention"]()}):
        runner.run({"linear": family, **others}, 3, 60.0, calls=4)
    of_linear = [code for code in drawn if "linear" in code]
    assert of_linear[: len(of_linear) - 4] == of_linear[4:]
