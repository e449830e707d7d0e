"""Kernels compiled ahead of time: the calls of a program as data, their kernels, and folders that travel."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from click.testing import Result
from torch._subclasses import FakeTensorMode
from typer.testing import CliRunner

import flashtile
from targets import INTERPRETING

pytest.importorskip("triton")
if INTERPRETING:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from flashtile.backends.common import compile_worker, first_calls, kernel_store
from flashtile.backends.common.device import Target
from flashtile.backends.common.kernel_store import INDEX, VARIABLE, CompiledFolder, in_use, use_compiled
from flashtile.backends.compat import compiling_driver
from flashtile.cli import application
from flashtile.compilation import compiling
from flashtile.compilation.calls import Call, Signature, calls_of, read_calls, record_calls, write_calls
from flashtile.compilation.compiling import Compiled, Failure, _end, _wanted, compile_calls, launches
from flashtile.engine.config import parse_config
from flashtile.engine.step_calls import Limits, step_calls
from flashtile.op.operation import remembering
from flashtile.problems.masking import EVERYTHING
from flashtile.tools import warmup as warmups
from flashtile.tools import workload_calls
from flashtile.tools.commands import compile as command
from flashtile.tools.commands.compile import _calls as calls_of_command
from flashtile.tools.warmup import warmup
from flashtile.tools.workload_calls import (
    TRAINING_HEADS,
    documented,
    heads_of,
    model_calls,
    training_calls,
)
from needed_kernels import kernels

H200, A100 = Target("H200", (9, 0), 132), Target("A100", (8, 0), 108)
DEFAULTS = (
    *vars(EVERYTHING).items(), ("softcap", 0.0), ("deterministic", False), ("dropout_p", 0.0),
    ("bias_grad", False), ("partial", False),
)  # fmt: skip
CACHE = Signature((8, 16, 2, 64), (2048, 128, 64, 1), "bfloat16")
NEW = Signature((3, 1, 2, 64), (128, 128, 64, 1), "bfloat16")
APPEND = Call(
    "append_kvcache",
    (
        ("k_cache", CACHE), ("v_cache", CACHE), ("k", NEW), ("v", NEW),
        ("cache_seqlens", Signature((3,), (1,), "int32")),
        ("block_table", Signature((3, 4), (4, 1), "int32")),
    ),
)  # fmt: skip


def recorded(path: Path) -> list[Call]:
    """The calls of a small program on the CPU, both passes and a cache."""
    q, k, v = (torch.randn(1, 32, 2, 64, requires_grad=True) for _ in range(3))
    k_cache, v_cache = (torch.zeros(8, 16, 2, 64) for _ in range(2))
    lengths, table = torch.tensor([3]), torch.zeros(1, 4, dtype=torch.int32)
    with record_calls(path):
        for _ in range(2):
            flashtile.attention(q, k, v, causal=True).sum().backward()
            flashtile.flash_attn_with_kvcache(
                q[:, :1].detach(), k_cache, v_cache, k[:, :1].detach(), v[:, :1].detach(),
                cache_seqlens=lengths.int(), block_table=table,
            )  # fmt: skip
    return read_calls(path)


def test_the_calls_of_a_program_are_recorded_once_each(tmp_path):
    calls = recorded(tmp_path / "calls.json")
    assert [call.operation for call in calls] == ["forward", "backward", "append_kvcache", "decode"]
    assert dict(calls[0].arguments)["window_right"] == 0
    assert dict(calls[1].arguments)["dout"] == Signature((1, 32, 2, 64), (4096, 128, 64, 1), "float32")
    assert recorded(tmp_path / "again.json") == calls  # though launches for them are prepared now


def test_recorded_calls_have_kernels_on_any_card(tmp_path):
    calls = recorded(tmp_path / "calls.json")
    for target in (H200, A100):
        found = [launch.kernel.__name__ for call in calls for launch, _ in launches(call, target)]
        assert found[0] == "forward_kernel"
        assert {"append_kernel", "decode_kernel"} <= set(found)


def test_calls_that_write_into_out_have_the_kernels_of_others(tmp_path):
    q = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16)
    with record_calls(tmp_path / "calls.json"):
        flashtile.flash_attn_func(q, q, q, out=torch.empty_like(q))
    into, plain = read_calls(tmp_path / "calls.json")
    assert [into.operation, plain.operation] == ["forward_into", "forward"]
    for target in (H200, A100):
        assert _wanted([into], [target])[0].keys() == _wanted([plain], [target])[0].keys() != set()


@pytest.mark.parametrize("rotary", [False, True])
def test_a_recorded_step_has_the_kernel_that_also_appends(tmp_path, rotary):
    q, k, v = (torch.zeros(2, 1, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    caches = torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)
    angles = torch.zeros(2, 64, 32, dtype=torch.bfloat16) if rotary else (None, None)
    lengths, table = torch.tensor([3, 20]).int(), torch.arange(8, dtype=torch.int32).view(2, 4)
    with record_calls(tmp_path / "calls.json"):
        for given in (q, q, q.expand(2, 2, 8, 64).contiguous()):
            flashtile.flash_attn_with_kvcache(
                given, *caches, k, v, *angles, cache_seqlens=lengths, block_table=table, causal=True
            )
    calls = read_calls(tmp_path / "calls.json")
    (step,) = (call for call in calls if call.operation == "append_and_decode")
    (launch, _), *_ = launches(step, H200)
    appends = launch._fixed[-1].APPEND
    assert (64 if rotary else 0) == appends.ROTARY_DIM
    assert launches(step, A100) == []  # not timed there: another kernel appends


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "path must be a file of recorded calls"),
        ('{"calls": [{"operation": "forward"}]}', "arguments"),
        ('{"calls": [{"operation": "forward", "arguments": {"q": {"dtype": "x"}}}]}', "q has dtype 'x'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / "calls.json").write_text(text)
    with pytest.raises(ValueError, match="path must be a file of recorded calls") as caught:
        read_calls(tmp_path / "calls.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [record_calls, use_compiled, read_calls])
def test_what_is_no_path_is_refused(function):
    message = "path must be a str or an os.PathLike, got int"
    with pytest.raises((TypeError, ValueError), match=message), function(7):
        pass


def test_calls_are_written_though_the_program_fails(tmp_path):
    missing = tmp_path / "missing" / "calls.json"
    with pytest.raises(ValueError, match="path must be in a folder that exists"), record_calls(missing):
        pytest.fail("the program has run")
    q = torch.randn(1, 8, 1, 16)
    with pytest.raises(TypeError), record_calls(tmp_path / "calls.json"):
        flashtile.attention(flashtile.attention(q, q, q), q)
    assert len(read_calls(tmp_path / "calls.json")) == 1


def test_calls_of_another_version_are_failures(tmp_path):
    unknown = [Call("sort", ()), Call("forward", (("colour", 3),))]
    float64 = Signature((1, 32, 2, 64), (4096, 128, 64, 1), "float64")
    unknown.append(Call("forward", (*((name, float64) for name in "qkv"), *DEFAULTS)))
    unknown.append(Call("forward", (("q", float64), ("k", 3))))
    done = compile_calls(unknown, [H200], tmp_path)
    assert done.kernels == 0
    reasons = [failure.reason for failure in done.failures]
    assert "operation must be one of" in reasons[0]
    assert "forward has no argument colour" in reasons[1]
    assert "no backend serves" in reasons[2]
    assert reasons[3] == "forward must have the tensors k, v"


GEMMA = {
    "model_type": "gemma2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "torch_dtype": "bfloat16", "max_position_embeddings": 1024, "attn_logit_softcapping": 50.0,
}  # fmt: skip

GPT_OSS = {
    **GEMMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128,
}  # fmt: skip


def test_warmup_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="device must be an NVIDIA GPU of this machine, got cpu"):
        warmup([], device="cpu")
    with pytest.raises(TypeError, match="calls must be a path or recorded calls, got int"):
        warmup(7)
    (tmp_path / "gemma.json").write_text(json.dumps(GEMMA))
    for given, message in (
        ({}, "must have either calls or model"),
        ({"calls": [], "model": tmp_path}, "must have either calls or model"),
        ({"calls": [], "purpose": "serving"}, "purpose must be .both. without model"),
        ({"model": 7}, "model must be a str or an os.PathLike, got int"),
        ({"model": tmp_path}, "must be a folder with a config.json"),
        ({"model": tmp_path / "gemma.json", "purpose": "fun"}, "purpose must be one of"),
        ({"model": tmp_path / "gemma.json", "device": "cpu"}, "device must be an NVIDIA GPU"),
    ):
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
            warmup(**given)


def test_a_model_is_warmed_up_in_another_process(tmp_path, monkeypatch):
    """Its calls are found there."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warmups, "target_of", lambda device: H200)
    monkeypatch.setattr(warmups, "compile_in_process", lambda *given: given)
    calls, target, workers = warmup(model=tmp_path, purpose="training", workers=3)
    found = pickle.loads(pickle.dumps(calls))()
    assert (target, workers) == (H200, 3)
    assert {call.operation for call in found} == {"forward", "backward"}
    assert {dict(call.arguments)["softcap"] for call in found} == {0.0, 50.0}
    assert warmup([APPEND], workers=1) == ([APPEND], H200, 1)


def test_layers_train_with_all_that_their_model_has():
    """Windows, soft caps and sinks."""
    for config, window, softcap, sinks in ((GEMMA, 4095, 50.0, 0), (GPT_OSS, 127, 0.0, 1)):
        calls = [dict(call.arguments) for call in model_calls(parse_config(config), "training")]
        causal = [call for call in calls if call["window_right"] == 0]
        assert {call["window_left"] for call in causal} == {window, -1}
        assert {call["softcap"] for call in causal} == {softcap}
        assert {"sink" in call for call in causal} == {bool(sinks)}


def test_a_step_of_fake_tensors_lists_the_kernel_that_also_appends():
    """The engine lists the kernels of its warm-up so, for example of models with norms of q and k."""

    def step() -> None:
        q, k, v = torch.zeros(3, 2, 1, 2, 128, dtype=torch.bfloat16).unbind()
        k_cache, v_cache = torch.zeros(2, 8, 4, 2, 128, dtype=torch.bfloat16).unbind()
        table, used = torch.arange(8, dtype=torch.int32).view(2, 4), torch.full((2,), 5, dtype=torch.int32)
        flashtile.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, block_table=table)

    with remembering() as real:
        step()
    with remembering() as fake, FakeTensorMode():
        step()
    assert "append_and_decode" in [call.operation for call in calls_of(real)]
    assert kernels(calls_of(real)) <= kernels(calls_of(fake))


def test_what_is_compiled_for_a_model(tmp_path, monkeypatch):
    path, config = tmp_path / "a-model.json", parse_config(GEMMA)
    path.write_text(json.dumps(GEMMA))
    training, serving = (replace(APPEND, operation=name) for name in ("training", "serving"))
    given = {}
    monkeypatch.setattr(
        workload_calls, "training_calls", lambda *args: given.update(training=args) or [training]
    )
    monkeypatch.setattr(workload_calls, "step_calls", lambda *args: given.update(serving=args) or [serving])
    wanted = {"training": [training], "serving": [serving], "both": [training, serving]}
    assert {purpose: calls_of_command([], [path], purpose, []) for purpose in wanted} == wanted
    assert given == {"training": (heads_of(config),), "serving": (config, Limits(1024))}


@pytest.mark.parametrize(
    ("given", "archs"),
    [
        (None, ["sm_90"]),
        (["sm_90,sm_80"], ["sm_90", "sm_80"]),
        (["sm_80", "h200, sm_90a"], ["sm_80", "sm_90"]),
    ],
)
def test_architectures_are_given_in_a_list_or_repeated(tmp_path, monkeypatch, given, archs):
    found = []

    def compiled(calls, targets, *more):
        found.extend(target.arch for target in targets)
        return Compiled(1, ())

    monkeypatch.setattr(compiling, "compile_calls", compiled)
    write_calls(tmp_path / "calls.json", [APPEND])
    command.compile(tmp_path / "kernels", given, [tmp_path / "calls.json"])
    assert found == archs


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match="must be one of sm_80, sm_86"):
        command.compile(tmp_path / "kernels", ["sm_90,sm_91"])


KEYS = """
import sys
from flashtile.backends.common.device import Target
from flashtile.compilation.calls import read_calls
from flashtile.compilation.compiling import launches
found = {}
for number in sys.argv[2].split(","):
    call = read_calls(sys.argv[1])[int(number)]
    for capability in ((9, 0), (8, 0)):
        for launch, _ in launches(call, Target("a GPU", capability, 108)):
            found[f"{launch.kernel.__module__}.{launch.kernel.__name__}"] = launch.kernel.cache_key
print(sorted(found.items()))
"""


def test_a_kernels_key_does_not_depend_on_the_order_of_a_process(tmp_path):
    calls = tmp_path / "calls.json"
    recorded(calls)
    found = []
    for order in ("0,1,2,3", "3,2,1,0"):
        command = [sys.executable, "-c", KEYS, str(calls), order]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(found[0]) > 500
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the kernel of a call."""
    path = tmp_path_factory.mktemp("compiled") / "kernels"
    assert compile_calls([APPEND, APPEND], [H200, A100], path, workers=1) == Compiled(2, ())
    return path


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """Triton's own compilations, in an empty cache."""
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_store, "_in_use", [])
    calls, compile_ = [], triton.compile

    def counted(*arguments, **more):
        calls.append(arguments)
        return compile_(*arguments, **more)

    monkeypatch.setattr(triton, "compile", counted)
    return calls


def compiled_here(target: Target = H200) -> object:
    ((launch, tensors),) = launches(APPEND, target)
    launch.kernel.device_caches.clear()
    with compiling_driver(target.capability):
        return launch.compile_ahead(tensors)


@pytest.mark.compile
def test_a_kernel_of_a_folder_is_not_compiled(folder, compilations):
    found = use_compiled(folder)
    assert found.archs == {"sm_90": 1, "sm_80": 1}
    assert in_use() == (found,)
    kernels = [compiled_here(target) for target in (H200, A100)]
    assert not compilations
    assert [kernel.metadata.target.arch for kernel in kernels] == [90, 80]
    assert all(kernel.asm["cubin"].startswith(b"\x7fELF") for kernel in kernels)


@pytest.mark.compile
def test_a_folder_is_whole_though_another_has_its_kernels(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(folder))
    assert compile_calls([APPEND], [H200], tmp_path / "copy", workers=1) == Compiled(1, ())


@pytest.mark.compile
def test_a_folder_is_completed(folder, started, tmp_path):
    """Kernels that it has are kept, those that are damaged or missing are compiled."""
    copied = shutil.copytree(folder, tmp_path / "copied")
    names = sorted(path.name for path in copied.glob("*.xz"))
    whole = CompiledFolder.read(copied).files
    assert compile_calls([APPEND], [H200, A100], copied, workers=1) == Compiled(2, ())
    assert not started
    (copied / names[0]).write_bytes(b"x")
    assert compile_calls([APPEND], [H200, A100], copied, workers=1) == Compiled(2, ())
    assert len(started) == 1
    assert CompiledFolder.read(copied).files == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda kernels, key: kernels.pop(key),
        lambda kernels, key: kernels.update({key: None}),
        lambda kernels, key: kernels[key].popitem(),
        lambda kernels, key: kernels[key].update({".json": "0"}),
    ],
    ids=["no entry", "no digests", "one digest", "another digest"],
)
def test_a_kernel_is_not_whole_if_the_index_is_damaged(folder, tmp_path, damage):
    copied = shutil.copytree(folder, tmp_path / "copied")
    key, *_ = CompiledFolder.read(copied).files
    assert CompiledFolder.read(copied).has_whole(key)
    index = json.loads((copied / INDEX).read_text())
    damage(index["kernels"], key)
    (copied / INDEX).write_text(json.dumps(index))
    assert not CompiledFolder.read(copied).has_whole(key)


@pytest.fixture
def started(monkeypatch):
    """The processes that compile."""
    processes, start = [], first_calls.start_worker

    def noted(*given):
        processes.append(start(*given))
        return processes[-1]

    monkeypatch.setattr(first_calls, "start_worker", noted)
    return processes


@pytest.mark.compile
def test_an_interrupted_compilation_leaves_an_index_and_nothing_else(started, tmp_path, monkeypatch):
    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "compiling kernels" and done:
            raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(KeyboardInterrupt):
        compile_calls([APPEND], [H200, A100], tmp_path / "kernels", workers=1, progress=interrupt)
    assert CompiledFolder.read(tmp_path / "kernels").archs == {"sm_90": 1}
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_progress_counts_the_kernels_that_a_folder_has(monkeypatch, tmp_path):
    """The index is written now and then, without a kernel that the compiler refused, and at the end."""
    wanted, written, shown = {key: (APPEND, H200, b"") for key in "abcde"}, [], []
    results = [("c", {}), ("d", "the compiler failed"), ("e", {})]
    monkeypatch.setattr(compiling, "INDEXED_EVERY", 2)
    monkeypatch.setattr(compiling, "_wanted", lambda calls, targets, progress: (wanted, []))
    monkeypatch.setattr(compiling, "_kept", lambda wanted, folder: {key: ("sm_90", {}) for key in "ab"})
    monkeypatch.setattr(compiling, "_results", lambda tasks, folder, workers: iter(results))
    monkeypatch.setattr(kernel_store, "write_index", lambda folder, kernels: written.append([*kernels]))
    done = compile_calls([], [], tmp_path / "kernels", progress=lambda *counts: shown.append(counts))
    assert done == Compiled(4, (Failure(APPEND, "H200", "the compiler failed"),))
    assert shown == [("compiling kernels", done, 5) for done in (2, 3, 4, 5)]
    assert written == [["a", "b", "c"], ["a", "b", "c", "e"]]


@pytest.mark.parametrize(
    ("cores", "workers", "count"), [(4, None, 4), (None, None, 1), (64, None, 32), (2, 5, 5)]
)
def test_the_number_of_processes_that_compile(monkeypatch, cores, workers, count):
    """One for each core, at most 32, or as many as are given. Each is started by its thread."""
    pools, environments = [], []

    class Pool(ThreadPoolExecutor):
        def __init__(self, most):
            pools.append(most)
            super().__init__(most)

    def start_worker(environment):
        environments.append(environment)
        raise OSError("no process")

    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(compiling, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(first_calls, "start_worker", start_worker)
    found = dict(compiling._results({"a": b"kernel", "b": b"kernel"}, None, workers))
    assert found == dict.fromkeys("ab", "no process was started: no process")
    assert pools == [count]
    assert [kernel_store.NO_SOURCE_LINES in environment for environment in environments] == [False] * 2


def test_a_compiler_that_dies_is_told(tmp_path, monkeypatch):
    (tmp_path / "compile_worker.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setattr(first_calls, "__file__", str(tmp_path / "first_calls.py"))
    done = compile_calls([APPEND], [H200, A100], tmp_path / "kernels", workers=1)
    assert done.kernels == 0
    assert ["its process has ended with code 3" in failure.reason for failure in done.failures] == [True] * 2


def test_a_compiler_that_cannot_be_started_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    done = compile_calls([APPEND], [H200, A100], tmp_path / "kernels", workers=1)
    assert done.kernels == 0
    assert ["no process was started: [Errno 2]" in failure.reason for failure in done.failures] == [True] * 2


def test_a_process_that_has_not_read_its_tasks_is_ended():
    """Data that it has not read cannot be written when its stdin is closed."""
    dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(4)"], stdin=subprocess.PIPE)
    dead.wait()
    dead.stdin.write(b"a task")
    assert _end(dead) == 4


def test_a_kernel_with_another_key_is_refused(tmp_path):
    ((key, (_, _, source)),) = _wanted([APPEND], [H200])[0].items()
    with pytest.raises(ValueError, match=f"^expected a kernel with key 0, got {key}$"):
        compile_worker.compile_into("0", source, str(tmp_path))


@pytest.mark.compile
def test_folders_of_the_environment(folder, compilations, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(tmp_path / "none"), str(folder)]))
    compiled_here()
    assert not compilations
    assert [one.path for one in in_use()] == [folder]
    assert f"{VARIABLE}: path must be a folder made by" in caplog.text


@pytest.mark.compile
def test_a_damaged_kernel_is_compiled_again(folder, compilations, tmp_path, caplog):
    copied = tmp_path / "copied"
    copied.mkdir(mode=0o755)
    for path in folder.iterdir():
        content = path.read_bytes()
        (copied / path.name).write_bytes(content if path.name == INDEX else content[:-1] + b"x")
    use_compiled(copied)
    compiled_here()
    assert len(compilations) == 1
    assert "is damaged" in caplog.text


@pytest.mark.compile
@pytest.mark.parametrize(("name", "value"), [("triton", "1.0"), ("flashtile", "0.0.1"), ("format", 0)])
def test_a_folder_of_another_version_is_refused(folder, tmp_path, name, value):
    index = json.loads((folder / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps(index | {name: value}))
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"^path must .*" + str(value)):
        CompiledFolder.read(tmp_path)


@pytest.mark.compile
@pytest.mark.parametrize("which", ["folder", "index"])
def test_a_folder_that_others_may_write_to_is_refused(folder, tmp_path, which):
    tmp_path.chmod(0o777 if which == "folder" else 0o755)
    (tmp_path / INDEX).write_bytes((folder / INDEX).read_bytes())
    (tmp_path / INDEX).chmod(0o666 if which == "index" else 0o644)
    with pytest.raises(ValueError, match="others may write to"):
        use_compiled(tmp_path)


@pytest.mark.parametrize(("owner", "refused"), [(0, False), (1000, False), (1001, True)])
def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch, owner, refused):
    status = SimpleNamespace(st_mode=0o755, st_uid=owner)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 1000)
        patched.setattr(Path, "stat", lambda path: status)
        with pytest.raises(ValueError, match="belongs to another user") if refused else nullcontext():
            kernel_store._check_owner(tmp_path)


def test_what_is_observed_is_compiled(compilations, monkeypatch):
    """Listeners of Triton's see every kernel, as without folders."""
    from triton import knobs

    monkeypatch.setattr(knobs.compilation, "listener", lambda **given: None)
    monkeypatch.setattr(kernel_store, "in_use", pytest.fail)
    compiled_here()
    assert compilations


def cli(*arguments: str) -> subprocess.CompletedProcess:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "flashtile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def here(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(application(), arguments)


@pytest.mark.compile
def test_from_a_script_to_a_folder(tmp_path, monkeypatch):
    script, calls, kernels = tmp_path / "script.py", tmp_path / "calls.json", tmp_path / "kernels"
    script.write_text(
        "import sys, torch, flashtile\n"
        "k_cache, v_cache = torch.zeros(2, 8, 16, 2, 64)\n"
        "new = torch.zeros(2, 1, int(sys.argv[1]), 64)\n"
        "arguments = dict(cache_seqlens=torch.zeros(2, dtype=torch.int32))\n"
        "flashtile.append_kvcache(k_cache[:2], v_cache[:2], new, new, **arguments)\n"
    )
    found = cli("record", str(calls), str(script), "--", "2")
    assert found.returncode == 0, found.stderr
    assert [call.operation for call in read_calls(calls)] == ["append_kvcache"]
    found = here("compile", str(kernels), "--calls", str(calls), "--arch", "sm_80", "--workers", "1")
    assert found.exit_code == 0
    assert found.stderr.splitlines() == [
        "finding the kernels of calls: 0 of 1", "compiling kernels: 0 of 1", "compiling kernels: 1 of 1",
    ]  # fmt: skip
    assert found.stdout.startswith("1 kernels of 1 calls")
    monkeypatch.setenv(VARIABLE, str(kernels))
    monkeypatch.setattr(kernel_store, "_in_use", [])
    assert "1 for sm_80" in here("info").stdout
    calls.write_text('{"calls": [{"operation": "sort", "arguments": {}}]}')
    refused = here("compile", str(kernels), "--calls", str(calls))
    assert refused.exit_code == 1
    assert refused.stdout.startswith("sort for H200 SXM 141GB: operation must be one of")


@pytest.mark.thorough
def test_calls_of_models_have_kernels():
    config = parse_config(GEMMA)
    training = training_calls(heads_of(config))
    limits = Limits(1024, max_num_seqs=4, max_num_batched_tokens=64)
    serving = [call for call in step_calls(config, limits) if isinstance(call, Call)]
    features = training_calls(documented(TRAINING_HEADS)[:1], features=True)
    kinds = {call.operation for call in serving}
    assert {"decode", "append_kvcache", "linear"} <= kinds
    assert {dict(call.arguments)["window_left"] for call in training} >= {-1, 4095}
    for operation in ("forward", "backward"):
        packed = [call for call in training if "cu_seqlens_q" in dict(call.arguments)]
        assert any(launches(call, H200) for call in packed if call.operation == operation)
    for call in (*training[::7], *serving[::7], *features[::7]):
        for target in (H200, A100):
            # The library computes products of many rows. On an A100, another kernel than attention's appends.
            elsewhere = {"linear"} if target is H200 else {"linear", "append_and_decode"}
            assert launches(call, target) or call.operation in elsewhere, call


def varlen_training_of_short_documents() -> None:
    """Every sequence has one block of keys, so Hopper's backward has no accumulator of dQ."""
    cu_seqlens = torch.tensor([0, 60, 188], dtype=torch.int32)
    q, k, v = (torch.randn(188, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    flashtile.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 128, 128, causal=True).sum().backward()


def combined_parts() -> None:
    flashtile.flash_attn_combine(torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 5, 4))


def small_heads_in_pages(heads: int, heads_kv: int, head_dim: int, head_dim_v: int) -> None:
    """Strides of heads and tokens that Triton does not know to be multiples of 16 bytes."""
    q = torch.randn(5, 30, heads, head_dim).half()
    k, v = (torch.randn(40, 4, heads_kv, width).half() for width in (head_dim, head_dim_v))
    table = torch.arange(40, dtype=torch.int32).reshape(5, 8)
    lengths = torch.full((5,), 32, dtype=torch.int32)
    flashtile.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True)


PASSED = {
    "no accumulator of dQ": (varlen_training_of_short_documents, "preprocess_kernel"),
    "parts of attention": (combined_parts, "combine_given_kernel"),
    "heads of 8": (partial(small_heads_in_pages, 6, 2, 8, 8), "attend_kernel"),
    "tokens of 40": (partial(small_heads_in_pages, 5, 1, 8, 16), "attend_kernel"),
}


@pytest.mark.compile
@pytest.mark.parametrize(("call", "kernel"), PASSED.values(), ids=PASSED)
def test_a_kernel_compiles_with_the_tensors_that_its_call_passes(call, kernel):
    """Cases of ``test_compile`` are written by hand. A call may lack their tensors or alignment."""
    with remembering() as remembered:
        call()
    found = [pair for each in calls_of(remembered) for pair in launches(each, H200)]
    ((launch, tensors),) = [pair for pair in found if pair[0].kernel.__name__ == kernel]
    with compiling_driver(H200.capability):
        assert launch.compile_ahead(tensors) is not None
