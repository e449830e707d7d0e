"""First calls: the kernels of a call compile in processes of their own, and each of them once."""

from __future__ import annotations

import gc
import os
import pickle
import queue
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from targets import INTERPRETING

pytest.importorskip("triton")
pytest.importorskip("fcntl")
if INTERPRETING:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton
from test_compilation import A100, APPEND, H200, compilations  # noqa: F401 - a fixture
from triton.runtime import cache as triton_cache

from flashtile.backends.common import compile_worker, first_calls, jit, kernel_store
from flashtile.backends.common.device import compiling_for
from flashtile.backends.common.first_calls import KernelLock, opening, pickled, send, start_worker
from flashtile.backends.common.launch import recording
from flashtile.backends.compat import compiling_driver
from flashtile.compilation.calls import Call, Signature, calls_of
from flashtile.compilation.compiling import launches
from flashtile.engine.sampling import sampling_ahead
from flashtile.op.operation import OPERATIONS, remembering
from flashtile.operators.attention import BACKWARD, FORWARD
from flashtile.problems.attention import NO_EXTRAS, Options
from flashtile.problems.masking import CAUSAL
from flashtile.problems.newest import newest_call

WORKER = Path(compile_worker.__file__)
CACHES = Signature((1, 8, 16, 2, 64), (16384, 2048, 128, 64, 1), "bfloat16")
COPY = Call(
    "copy_blocks",
    (("k_cache", CACHES), ("v_cache", CACHES), ("block_pairs", Signature((3, 2), (2, 1), "int32"))),
)


def launch_of(call: Call) -> tuple:
    ((launch, tensors),) = launches(call, H200)
    launch.kernel.device_caches.clear()
    return launch, tensors


def compile_both(first: tuple, second: tuple) -> list:
    """The kernels of two launches that one call has, in this order."""
    with compiling_driver(H200.capability):
        return [launch.compile_ahead(tensors) for launch, tensors in (first, second)]


@pytest.fixture
def started(monkeypatch):
    """The workers that start. The newest call of this process has the kernels of APPEND and COPY."""
    processes: list[subprocess.Popen] = []
    hand = first_calls._hand

    def handed(tasks):
        hand(tasks)
        processes.append(first_calls._workers[-1])

    def repeat():
        for call in (APPEND, COPY):
            OPERATIONS[call.operation].launch_on_meta(*call.on_meta(), H200)

    monkeypatch.setenv(first_calls.WORKERS, "1")
    monkeypatch.setattr(first_calls, "multiprocessors", lambda device: H200.multiprocessors)
    monkeypatch.setattr(first_calls, "_hand", handed)
    token = newest_call.set(repeat)
    yield processes
    newest_call.reset(token)
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.compile
def test_the_other_kernels_of_a_call_compile_in_a_process(started, compilations, monkeypatch, tmp_path):  # noqa: F811
    kernels = compile_both(launch_of(APPEND), launch_of(COPY))
    assert [src.name for src, *_ in compilations] == [kernels[0].src.name]
    assert [process.wait() for process in started] == [0]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "alone"))
    alone = compile_both(launch_of(APPEND), launch_of(COPY))
    assert len(compilations) == 3
    assert [kernel.asm["cubin"] for kernel in alone] == [kernel.asm["cubin"] for kernel in kernels]


@pytest.mark.compile
def test_a_kernel_is_compiled_here_if_its_process_dies(started, compilations, monkeypatch, tmp_path):  # noqa: F811
    (tmp_path / "compile_worker.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.setattr(first_calls, "__file__", str(tmp_path / "first_calls.py"))
    kernels = compile_both(launch_of(APPEND), launch_of(COPY))
    assert [process.wait() for process in started] == [1]
    assert [src.name for src, *_ in compilations] == [kernel.src.name for kernel in kernels]


@pytest.mark.compile
def test_the_digest_of_triton_is_computed_while_processes_start(started, compilations, monkeypatch):  # noqa: F811
    triton_key = getattr(triton_cache, "triton_key", None)
    if triton_key is None:
        pytest.skip("this Triton has no such function")
    triton_key.cache_clear()
    computed, states, begun, compile_ = [], [], threading.Event(), triton.compile

    def counted():
        computed.append(threading.current_thread())
        begun.set()
        return triton_key()

    def compiling(*given, **more):
        states.append(gc.isenabled())
        return compile_(*given, **more)

    monkeypatch.setattr(triton_cache, "triton_key", counted)
    monkeypatch.setattr(triton, "compile", compiling)
    monkeypatch.setattr(first_calls, "_start", lambda target: begun.wait(5))
    launch, tensors = launch_of(APPEND)
    with compiling_driver(H200.capability):
        launch.compile_ahead(tensors)
    assert computed[0] is not threading.main_thread()
    assert triton_key.cache_info().misses == 1
    assert states == [False]  # and no garbage is collected while a kernel is compiled
    assert gc.isenabled()


@pytest.mark.compile
@pytest.mark.parametrize("reason", ["0 workers", "1 core", "busy cores", "no interpreter"])
def test_no_process_is_started(started, compilations, monkeypatch, reason):  # noqa: F811
    if reason == "0 workers":
        monkeypatch.setenv(first_calls.WORKERS, "0")
    elif reason == "1 core":
        monkeypatch.delenv(first_calls.WORKERS)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
        monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    elif reason == "busy cores":
        monkeypatch.delenv(first_calls.WORKERS)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
        monkeypatch.setattr(os, "getloadavg", lambda: (float(os.cpu_count()), 0.0, 0.0))
    else:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    launch, tensors = launch_of(APPEND)
    with compiling_driver(H200.capability):
        launch.compile_ahead(tensors)
    assert len(compilations) == 1
    assert not started


def test_kernels_that_wait_for_their_process_are_not_locked(started, monkeypatch, tmp_path):
    """Also if a process was forked while they were locked, whose descriptors are copies."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "compile_worker.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.setattr(first_calls, "__file__", str(tmp_path / "first_calls.py"))
    keys, copies = [], []
    hand = first_calls._hand

    def forked(tasks):
        keys.extend(lock.key for lock, _ in tasks)
        copies.extend(os.dup(lock.descriptor) for lock, _ in tasks)
        hand(tasks)

    monkeypatch.setattr(first_calls, "_hand", forked)
    for launch, _ in map(launch_of, (APPEND, COPY)):
        launch.kernel.device_caches.clear()
    with compiling_driver(H200.capability):
        first_calls._start(SimpleNamespace(backend="cuda", arch=90))
    assert len(keys) == 2
    waiting = KernelLock(keys[1])
    assert waiting.acquire()
    waiting.release()
    for copy in copies:
        os.close(copy)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_lock_is_free_when_its_process_has_ended(cache):
    ours, other = KernelLock("kernel"), KernelLock("kernel")
    assert ours.acquire()
    assert not other.acquire()
    command = [sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[ours.descriptor]
    )
    ours.close()
    assert not other.acquire()  # the process has inherited it
    process.communicate(b"end")
    assert other.acquire()
    other.release()
    assert ours.acquire()
    ours.release()
    assert [path.name for path in cache.rglob("*")] == ["flashtile_locks", "kernel"]


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_users_who_share_a_cache_share_its_locks(cache, umask, mode):
    before = os.umask(umask)
    try:
        lock = KernelLock("kernel")
        assert lock.acquire()
        lock.release()
    finally:
        os.umask(before)
    assert (cache / "flashtile_locks" / "kernel").stat().st_mode & 0o777 == mode


def test_nobody_waits_for_ever(cache, monkeypatch):
    monkeypatch.setattr(first_calls, "LONGEST_WAIT", 0.0)
    lock = KernelLock("kernel")
    assert lock.acquire()
    with first_calls.alone("kernel", None):
        assert not KernelLock("kernel").acquire()
    lock.release()


def test_an_error_frees_the_lock(cache):
    with pytest.raises(ValueError, match="the compiler"), first_calls.alone("kernel", None):
        raise ValueError("the compiler")
    lock = KernelLock("kernel")
    assert lock.acquire()
    lock.release()


def test_a_cache_that_cannot_be_written_has_no_locks(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with first_calls.alone("kernel", None):
        pass


@pytest.mark.parametrize(
    ("load", "cores", "usable", "count"),
    [(0.0, 8, 8, 4), (7.9, 8, 3, 2), (8.0, 8, 8, 0), (0.5, None, 2, 1), (1.0, None, 8, 0), (0.0, 4, 1, 0)],
)
def test_the_default_number_of_processes(monkeypatch, load, cores, usable, count):
    """At most 4, and a core is left to the program; none on a machine that is busy."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(first_calls, "usable_cores", lambda: usable)
    assert first_calls._default_workers() == count


@pytest.mark.parametrize(("given", "free"), [("3", 2), ("0", -1), ("", 6), ("-2", 6), ("all", 6)])
def test_processes_that_compile_are_counted(monkeypatch, given, free):
    """Those that have ended are not."""
    alive, ended = (SimpleNamespace(poll=lambda code=code: code) for code in (None, 0))
    monkeypatch.setenv(first_calls.WORKERS, given)
    monkeypatch.setattr(first_calls, "_default_workers", lambda: 7)
    monkeypatch.setattr(first_calls, "_workers", [ended, alive, ended])
    assert first_calls._free_workers() == free
    assert first_calls._workers == [alive]
    monkeypatch.setattr(sys, "executable", "")
    assert first_calls._free_workers() == 0


@pytest.mark.parametrize(("free", "shares"), [(1, ["acde"]), (2, ["ad", "ce"]), (9, ["a", "c", "d", "e"])])
def test_kernels_are_shared_among_processes(monkeypatch, cache, free, shares):
    """Without the kernel that another process compiles. No lock is held afterwards."""
    handed, other = [], KernelLock("b")
    assert other.acquire()
    monkeypatch.setattr(first_calls, "_free_workers", lambda: free)
    monkeypatch.setattr(first_calls, "_missing", lambda call, target: dict.fromkeys("abcde", "a kernel"))
    monkeypatch.setattr(first_calls, "pickled", str.encode)
    monkeypatch.setattr(first_calls, "_hand", handed.append)
    token = newest_call.set(lambda: None)
    first_calls._start(SimpleNamespace(backend="hip"))
    assert not handed
    for _ in range(2):  # the call is repeated once
        first_calls._start(SimpleNamespace(backend="cuda"))
        assert newest_call.get() is None
    newest_call.reset(token)
    assert ["".join(lock.key for lock, _ in tasks) for tasks in handed] == shares
    assert {source for tasks in handed for _, source in tasks} == {b"a kernel"}
    other.release()
    locks = [KernelLock(key) for key in "abcde"]
    assert all(lock.acquire() for lock in locks)
    for lock in locks:
        lock.release()


def test_a_process_inherits_the_lock_of_its_first_kernel(monkeypatch, cache):
    first, second = KernelLock("first"), KernelLock("second")
    assert first.acquire()
    descriptor, attended, started = first.descriptor, queue.SimpleQueue(), []
    monkeypatch.setattr(first_calls, "_workers", [])
    monkeypatch.setattr(first_calls, "start_worker", lambda *given: started.append(given) or "a process")
    monkeypatch.setattr(first_calls, "_attend", lambda *given: attended.put(given))
    first_calls._hand([(first, b"1"), (second, b"2")])
    process, tasks = attended.get(timeout=60)
    assert process == "a process"
    assert tasks == [("compile_handed", "first", b"1", descriptor), ("compile_handed", "second", b"2", None)]
    assert started == [({"TRITON_CACHE_DIR": str(cache)}, (descriptor,), subprocess.DEVNULL)]
    assert first.descriptor is None
    assert first_calls._workers == ["a process"]


@pytest.mark.parametrize(("longest", "used"), [(60.0, True), (0.0, False)])
def test_a_process_uses_the_digest_that_its_program_stores(monkeypatch, longest, used):
    """It waits for it, but not forever, and only when Triton needs it."""
    read = [None, None, None, "digest"]
    monkeypatch.setattr(kernel_store, "_read_key", lambda key_file: read.pop(0))
    monkeypatch.setattr(triton_cache, "triton_key", lambda: "computed", raising=False)
    compile_worker._use_stored_digest(longest)
    assert len(read) == 3
    assert triton_cache.triton_key() == ("digest" if used else "computed")
    assert len(read) == (0 if used else 2)


def test_a_stored_digest_is_read_at_once(monkeypatch):
    """Later, Triton's cache may be another folder."""
    monkeypatch.setattr(triton_cache, "triton_key", pytest.fail, raising=False)
    monkeypatch.setattr(kernel_store, "_read_key", lambda key_file: "digest")
    compile_worker._use_stored_digest(0.0)
    monkeypatch.setattr(kernel_store, "_read_key", pytest.fail)
    assert triton_cache.triton_key() == "digest"


def sources() -> dict:
    """The sources of kernels by key: of APPEND, of sampling, and of both passes of two calls, on two GPUs."""
    with remembering() as remembered, FakeTensorMode():
        q, k, v = (torch.empty(1, 64, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        flashtile.attention(q, k, v, causal=True, dropout_p=0.1).sum().backward()
        flashtile.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + torch.tanh(s) * (i - j)
        ).sum().backward()
    draws = partial(sampling_ahead, torch.bfloat16, 27)
    found: dict = {}
    for target in (H200, A100):
        with compiling_driver(target.capability):
            for call in (*calls_of(remembered), APPEND, draws):
                for launch, tensors in launches(call, target):
                    launch.kernel.device_caches.clear()
                    with first_calls.only_naming() as named:
                        launch.compile_ahead(tensors)
                    found |= named
    return found


KEYS = """
import pickle, runpy, sys
*program, _, given = pickle.load(sys.stdin.buffer)
runpy.run_path(sys.argv[1])["without_torch"](*program)
from flashtile.backends.common.first_calls import unpickled
from flashtile.backends.common.kernel_store import key_in_folders
found = [key_in_folders(*unpickled(source)) for source in given]
import torch
assert not hasattr(torch, "__version__")
sys.stdout.write(" ".join(found))
"""


def test_keys_do_not_depend_on_torch(cache):
    found = sources()
    assert len(found) >= 18
    content = pickle.dumps((*opening(), [pickled(source) for source in found.values()]))
    done = subprocess.run(
        [sys.executable, "-c", KEYS, str(WORKER)], input=content, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == list(found)


def test_functions_of_users_stay_here(cache):
    src = SimpleNamespace(fn=jit.kernel()(nothing_kernel))
    with pytest.raises(pickle.PicklingError, match="nothing_kernel cannot be imported"):
        pickled((src, None, {}))


def nothing_kernel():
    pass


PROGRAM = """
import hashlib, pickle, runpy, sys
*program, _, given = pickle.load(sys.stdin.buffer)
runpy.run_path(sys.argv[1])["without_torch"](*program)
import triton
from flashtile.backends.common.first_calls import load_or_compile, unpickled
compile_, compiled = triton.compile, []
triton.compile = lambda src, **more: compiled.append(src) or compile_(src, **more)
kernel = load_or_compile(*unpickled(given))
print(len(compiled), hashlib.sha256(kernel.asm["cubin"]).hexdigest())
"""


@pytest.mark.compile
@pytest.mark.parametrize("count", [4, pytest.param(50, marks=[pytest.mark.exhaustive, pytest.mark.slow])])
def test_processes_at_once_compile_a_kernel_once(cache, count):
    launch, tensors = launch_of(COPY)
    with compiling_driver(H200.capability), first_calls.only_naming() as named:
        launch.compile_ahead(tensors)
    (source,) = named.values()
    content = pickle.dumps((*opening(), pickled(source)))
    command = [sys.executable, "-c", PROGRAM, str(WORKER)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    for process in running:
        process.stdin.write(content)
        process.stdin.close()
    found = [process.stdout.read().split() for process in running]
    for process in running:
        process.stdout.close()
        assert process.wait() == 0
    assert sorted(int(compiled) for compiled, _ in found) == [0] * (count - 1) + [1]
    assert len({digest for _, digest in found}) == 1


def test_a_process_ends_with_its_program():
    worker = start_worker({})
    send(worker, opening())
    worker.communicate()
    assert worker.returncode == 1


@pytest.mark.parametrize("learns", ["", "q", "bias"])
def test_the_backward_pass_follows_a_call_that_learns(learns):
    meta = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    q, k, v = (meta(2, 64, 2, 64, requires_grad=name == learns) for name in "qkv")
    extras = NO_EXTRAS._replace(bias=meta(2, 2, 64, 64, requires_grad=learns == "bias"))
    options = Options(softmax_scale=0.125)
    following = list(FORWARD.following((q, k, v), extras, options))
    if not learns:
        assert following == []
        return
    ((operation, tensors, *others),) = following
    assert operation is BACKWARD
    assert [None if t is None else t.shape for t in tensors] == [q.shape, None, *[q.shape] * 4, (2, 2, 64)]
    assert others == [extras, options._replace(bias_grad=learns == "bias")]
    assert not list(BACKWARD.following(tensors, *others))


@pytest.fixture
def on_h200(monkeypatch) -> None:
    """Tensors on "cuda" are on an H200, as far as a problem describes it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H200.capability)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
    )


def repeated() -> list:
    """The launches of the newest call, repeated on torch's "meta" device."""
    with compiling_for(H200), recording() as recorded:
        newest_call.get()()
    return recorded


def test_a_call_whose_tensors_are_gone_is_not_repeated(on_h200):
    with FakeTensorMode():
        q = torch.empty(1, 128, 2, 64, dtype=torch.bfloat16, device="cuda")
        extras = NO_EXTRAS._replace(bias=q.new_empty(1, 2, 128, 128))
        FORWARD.prepare((q, q, q), extras, Options(softmax_scale=0.125))
        del extras
    assert not repeated()


@pytest.mark.parametrize("learns", [False, True])
def test_a_call_on_a_gpu_is_repeated_with_its_backward_pass(on_h200, learns):
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 128, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        k.requires_grad_(learns)
        FORWARD.prepare((q, k, v), NO_EXTRAS, Options(softmax_scale=0.125, masking=CAUSAL))
    recorded = repeated()
    names = [launch.kernel.__name__ for launch, _ in recorded]
    assert names == ["forward_kernel", *["preprocess_kernel", "backward_kernel"] * learns]
    assert all(
        tensor.is_meta for _, tensors in recorded for tensor in tensors if isinstance(tensor, torch.Tensor)
    )
