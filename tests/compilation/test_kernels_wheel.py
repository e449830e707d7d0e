"""The wheel of compiled kernels: what it has, how flashtile finds it, and when it is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile import masks
from targets import INTERPRETING

pytest.importorskip("triton")
pytest.importorskip("setuptools", minversion="77")
if INTERPRETING:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from test_compilation import A100, APPEND, compiled_here

from flashtile.backends.common import kernel_store
from flashtile.backends.common.kernel_store import INDEX, PACKAGE, VARIABLE, in_use
from flashtile.compilation.calls import calls_of, write_calls
from flashtile.op.operation import remembering
from flashtile.tools.commands.compile import PRESETS
from flashtile.tools.commands.compile import _calls as calls_of_command
from flashtile.tools.workload_calls import TRAINING_HEADS, Heads, decoding_calls, documented, training_calls
from needed_kernels import kernels

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "make_kernels.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel with the kernel of one call."""
    place = tmp_path_factory.mktemp("wheel")
    write_calls(place / "calls.json", [APPEND])
    command = [sys.executable, SCRIPT, place / "dist", "--arch", "sm_90", "--calls", place / "calls.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture
def installed(wheel, tmp_path, monkeypatch) -> Path:
    """The folder of kernels of the wheel, unpacked into a folder of sys.path."""
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    folder = site / PACKAGE / "sm90"
    folder.chmod(0o755)
    (folder / INDEX).chmod(0o644)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_store, "_in_use", [])
    kernel_store._installed.cache_clear()
    yield folder
    kernel_store._installed.cache_clear()


@pytest.fixture
def compilations(monkeypatch) -> list:
    """The kernels that Triton is asked to compile. It compiles none of them."""
    import triton

    asked: list = []

    def refuse(src, **more):
        asked.append(src.name)
        raise AssertionError(src.name)

    monkeypatch.setattr(triton, "compile", refuse)
    return asked


@pytest.mark.compile
def test_the_wheel_is_for_any_machine_and_small(wheel):
    import triton

    version = f"{flashtile.__version__}+triton{triton.__version__.partition('+')[0]}"
    assert wheel.name == f"{PACKAGE}_sm90-{version}-py3-none-any.whl"
    assert wheel.stat().st_size < 10_000
    with zipfile.ZipFile(wheel) as archive:
        suffixes = [Path(name).suffix for name in archive.namelist() if name.startswith(f"{PACKAGE}/")]
    assert sorted(suffixes) == [".json", ".json", ".xz"]


@pytest.mark.compile
def test_kernels_of_an_installed_wheel_are_not_compiled(installed, compilations):
    kernel = compiled_here()
    assert [folder.path for folder in in_use()] == [installed]
    assert kernel.metadata.target.arch == 90
    assert kernel.asm["cubin"].startswith(b"\x7fELF")
    assert b"debug_line" not in kernel.asm["cubin"]
    assert b"debug_ptx" not in kernel.asm["cubin"]
    assert not compilations


@pytest.mark.compile
@pytest.mark.parametrize(("name", "value"), [("triton", "1.0"), ("flashtile", "0.0.1")])
def test_a_wheel_of_another_version_is_not_used(installed, compilations, caplog, name, value):
    index = json.loads((installed / INDEX).read_text())
    (installed / INDEX).write_text(json.dumps(index | {name: value}))
    with pytest.raises(AssertionError, match="append_kernel"):
        compiled_here()
    assert in_use() == ()
    assert f"{PACKAGE}: path must have kernels for" in caplog.text
    assert f"for {dict(triton='Triton').get(name, name)} {value}" in caplog.text


@pytest.mark.compile
def test_a_wheel_that_others_may_write_to_is_not_used(installed, compilations, caplog):
    installed.chmod(0o777)
    with pytest.raises(AssertionError, match="append_kernel"):
        compiled_here()
    assert "others may write to" in caplog.text


@pytest.mark.compile
def test_a_wheel_for_another_architecture_is_not_used(installed, compilations, caplog):
    with pytest.raises(AssertionError, match="append_kernel"):
        compiled_here(A100)
    assert f"{installed} has kernels for sm_90, but none for sm_80" in caplog.text


@pytest.mark.compile
def test_folders_of_the_environment_come_first(installed, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.mkdir(mode=0o755)
    (other / INDEX).write_bytes((installed / INDEX).read_bytes())
    (other / INDEX).chmod(0o644)
    monkeypatch.setenv(VARIABLE, os.fspath(other))
    assert [folder.path for folder in in_use()] == [other, installed]


def documented_calls(heads: Heads) -> list:
    """Calls of the documented features for one layer, under several functions' names."""
    with remembering() as remembered, FakeTensorMode():
        for batch, seqlen in ((1, 1000), (8, 1024), (1, 4096)):
            tensors = lambda: heads.tensors(batch, seqlen)  # noqa: B023, E731
            q, k, v = tensors()
            flashtile.flash_attn_func(q, k, v, causal=True).sum().backward()
            flashtile.flash_attn_func(q, k, v, dropout_p=0.2, causal=True).sum().backward()
            for left in (100, 256, 4095):
                flashtile.flash_attn_func(q, k, v, causal=True, window_size=(left, 0)).sum().backward()
            flashtile.flash_attn_func(q, k, v, softcap=50.0, causal=True).sum().backward()
            flashtile.flash_attn_func(q, k, v, causal=True, deterministic=True).sum().backward()
            slopes = torch.zeros(heads.num_heads)
            flashtile.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes).sum().backward()
            bias = torch.zeros(1, heads.num_heads, seqlen, seqlen, dtype=q.dtype)
            flashtile.attention(q, k, v, bias=bias).sum().backward()
            hidden = torch.ones(batch, seqlen, dtype=torch.bool)
            flashtile.attention(q, k, v, key_padding_mask=hidden).sum().backward()
            sink = torch.zeros(heads.num_heads, dtype=q.dtype, requires_grad=True)
            flashtile.attention(q, k, v, sink=sink, causal=True).sum().backward()
            lengths = torch.zeros(batch, dtype=torch.int32)
            for mask_mod in (masks.document(hidden.int()), masks.padding(lengths), masks.prefix_lm(lengths)):
                flashtile.attention(q, k, v, mask_mod=mask_mod).sum().backward()
            with torch.no_grad():
                lse = flashtile.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[1]
                flashtile.attention_weights(q, k, lse, causal=True)
                flashtile.fp8.attention(q, k, v, causal=True)
            packed = [tensor.flatten(0, 1) for tensor in tensors()]
            offsets = torch.zeros(batch + 1, dtype=torch.int32)
            flashtile.flash_attn_varlen_func(
                *packed, offsets, offsets, seqlen, seqlen, causal=True
            ).sum().backward()
        for batch in (1, 8):
            sizes = (heads.num_heads_kv, heads.head_dim), (heads.num_heads_kv, heads.head_dim_v)
            caches = (torch.empty(64 * batch, 16, *size, dtype=q.dtype) for size in sizes)
            new = [torch.empty(batch, 1, *size, dtype=q.dtype) for size in sizes]
            table = torch.zeros(batch, 64, dtype=torch.int32)
            angles = torch.zeros(1024, heads.head_dim // 2, dtype=q.dtype)
            caches = tuple(caches)
            rotary = {"rotary_cos": angles, "rotary_sin": angles, "rotary_interleaved": False}
            given = [(q.dtype, {}), (q.dtype, rotary)]
            if heads.num_heads_kv < heads.num_heads:
                sink = torch.zeros(heads.num_heads)
                given += [(torch.float8_e4m3fn, {}), (q.dtype, {"softcap": 50.0}), (q.dtype, {"sink": sink})]
                given += [(q.dtype, {"window_size": (left, 0)}) for left in (127, 511, 1023)]
            for dtype, arguments in given:
                flashtile.flash_attn_with_kvcache(
                    q.detach()[:, :1].expand(batch, -1, -1, -1), *(cache.to(dtype) for cache in caches), *new,
                    block_table=table, cache_seqlens=torch.zeros(batch, dtype=torch.int32), causal=True,
                    **arguments,
                )  # fmt: skip
            flashtile.copy_blocks(*caches, torch.zeros(3, 2, dtype=torch.int64))
    return calls_of(remembered)


HEADS = {
    f"{heads.head_dim}-{heads.head_dim_v}-{heads.num_heads_kv}": heads
    for heads in documented(TRAINING_HEADS)
    if heads.dtype == "bfloat16"
}
OTHERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in HEADS if name != "128-128-4"]


@pytest.mark.parametrize("name", [pytest.param("128-128-4", marks=pytest.mark.thorough), *OTHERS])
def test_documented_calls_need_no_kernel_that_the_preset_lacks(name):
    heads = HEADS[name]
    listed = [*training_calls([heads], features=True), *decoding_calls([heads], features=True)]
    there, used = map(kernels, (listed, documented_calls(heads)))
    assert len(used) > 30
    assert used - there == set()


@pytest.mark.parametrize(
    "head_dim", [128, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (64, 256))]
)
def test_kernels_of_training_serve_any_number_of_heads(head_dim):
    """Also where programs share blocks of keys, and each has a part of the query heads or rows."""
    sizes = head_dim, head_dim
    there = kernels(training_calls([Heads(16, 16, *sizes), Heads(16, 4, *sizes)]))
    with remembering() as remembered, FakeTensorMode():
        for num_heads, num_heads_kv in ((40, 8), (14, 2), (64, 8), (12, 12), (3, 1)):
            for batch, seqlen in ((1, 640), (3, 1000), (8, 2048)):
                tensors = Heads(num_heads, num_heads_kv, *sizes).tensors(batch, seqlen)
                flashtile.attention(*tensors, causal=True).sum().backward()
                flashtile.attention(*tensors).sum().backward()
    used = kernels(calls_of(remembered))
    assert {name for name, _ in used} >= {"forward_kernel", "sum_parts_kernel"}
    assert used - there == set()


def test_presets_have_the_calls_of_their_purpose(monkeypatch):
    monkeypatch.setattr("flashtile.tools.workload_calls.documented", lambda heads: [HEADS["128-128-4"]])
    training, serving, everything = (set(calls_of_command([], [], "both", [name])) for name in PRESETS)
    assert {call.operation for call in training} == {"forward", "backward"}
    assert {call.operation for call in serving} == {"append_kvcache", "decode", "append_and_decode"}
    assert training | serving < everything
    others = {call.operation for call in everything - training - serving}
    assert others >= {"copy_blocks", "weights", "fp8_attend"}
    assert not any(dict(call.arguments).get("score_mod") for call in everything)


def test_each_largest_distance_of_relative_position_needs_a_kernel():
    """Why the presets leave ``relative_position`` out: they cannot know the tables of programs."""

    def needed(most: int) -> set:
        with remembering() as remembered, FakeTensorMode(), torch.no_grad():
            near = masks.relative_position(torch.zeros(16, 2 * most + 1))
            flashtile.attention(*HEADS["128-128-4"].tensors(1, 1024), score_mod=near, causal=True)
        return kernels(calls_of(remembered))

    assert len(needed(1023) - needed(2047)) == 1
