"""The table of measured products: which kernel it chooses, its file, and ``explain``."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch

import flashtile
from flashtile.backends.common.device import Target
from flashtile.backends.hopper.linear import config as ring
from flashtile.backends.portable.linear.config import (
    LinearConfig,
    adapted,
    choose,
    device_name,
    kind_of,
    tiles_of,
)
from flashtile.backends.portable.linear.launch import prepare
from flashtile.hardware.linear_table import (
    FLAT,
    GEMV,
    LIBRARY,
    VERSION,
    Found,
    Row,
    cache_file,
    find,
    merged,
    read_table,
    rows,
    write_table,
)
from flashtile.io_model import find_card
from flashtile.linear import linear
from flashtile.problems.linear import QKV, SWIGLU, Heads, LinearOptions, LinearProblem, LinearTensors
from flashtile.tools.inspection.report import architecture
from targets import INTERPRETING

pytestmark = pytest.mark.skipif(INTERPRETING, reason="nothing is launched")

H200 = Target("H200 SXM 141GB", (9, 0), 132)


def time(us, config=(64, 64, 4, 6, 1, 2), backend="portable"):
    return {"us": us, "backend": backend, "config": list(config)}


ROW = Row(
    "NVIDIA H200", 320, 512, "bfloat16", "bfloat16", 2, 33,
    {
        "1": {GEMV: time(3.0), FLAT: time(4.0), LIBRARY: time(9.0)},
        "64": {FLAT: time(12.0), LIBRARY: time(9.0)},
    },
    4.6,
)  # fmt: skip


@pytest.fixture
def own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHTILE_CACHE_DIR", str(tmp_path))
    return tmp_path / "linear.json"


def test_rows_that_asynchronous_copies_can_read():
    """Every row begins and ends at a multiple of 16 bytes."""
    memory = torch.zeros(9, 80, dtype=torch.bfloat16)
    whole = memory[:, :64]
    unfit = {
        "stride": memory.flatten()[: 9 * 76].view(9, 76)[:, :64],
        "length": memory[:, :60],
        "address": memory[:, 4:68],
    }

    def aligned(x: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor) -> bool:
        given = LinearTensors(norm_weight=norm)
        return LinearProblem.from_linear(x, weight, given, LinearOptions()).aligned

    assert aligned(whole, whole, whole[0])
    for name, matrix in unfit.items():
        assert not aligned(matrix, whole, whole[0])
        assert not aligned(whole, matrix, whole[0])
        assert aligned(whole, whole, matrix[0]) is (name == "stride")  # one row has no stride
        assert aligned(matrix[:1], matrix[:1], matrix[0]) is (name == "stride")


def test_a_row_decides_by_its_inflections():
    assert [ROW.kind(m) for m in (1, 2, 32, 33)] == [GEMV, FLAT, FLAT, LIBRARY]
    assert ROW.measured(3, FLAT) == time(12.0)  # that of the next number of rows
    assert ROW.measured(200, FLAT) == time(12.0)
    assert ROW.measured(1, "else") is None


def test_a_users_table_extends_what_came_with_flashtile(own_table):
    shipped = rows()
    write_table(own_table, (ROW,))
    assert read_table(own_table) == (ROW,)
    assert rows() == (*shipped, ROW)
    assert find("NVIDIA H200", 320, 512, "bfloat16", "bfloat16") == Found(ROW, "measured for this shape")
    assert find("NVIDIA H200", 320, 512, "float16", "float16").row == ROW
    assert merged((ROW,), (ROW,)) == (ROW,)


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        json.dumps({"version": VERSION + 1, "rows": []}),
        json.dumps({"version": VERSION, "rows": [{}]}),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_table_is_kept_with_one_warning(own_table, text):
    own_table.write_text(text)
    with pytest.raises(ValueError, match=r"linear\.json"):
        read_table(own_table)
    with pytest.warns(UserWarning, match="ignores a table"):
        kept = rows()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rows() == kept
    assert own_table.read_text() == text
    assert cache_file() == own_table


def test_unmeasured_shapes_take_the_nearest_row():
    near = find("NVIDIA H200", 4224, 4096, "bfloat16", "bfloat16")
    assert (near.row.N, near.row.K, near.how) == (4096, 4096, "the nearest shape measured on this card")
    other = find("NVIDIA A100", 4096, 4096, "bfloat16", "bfloat16")
    assert other.how == "measured on NVIDIA H200, none on NVIDIA A100"
    assert find("NVIDIA H200", 64, 64, "float32", "float32") is None


def problem(M, card=H200, **more):
    return LinearProblem(M, 22016, 4096, torch.bfloat16, torch.bfloat16, card, **more)


def test_fused_ends_are_worth_a_slower_product():
    """The library would need kernels of its own around it."""
    assert device_name(H200) == "NVIDIA H200"
    row = find("NVIDIA H200", 28672, 4096, "bfloat16", "bfloat16")
    assert kind_of(problem(32), row) == LIBRARY
    assert kind_of(problem(32, epilogue=SWIGLU, norm=True), row) == FLAT
    assert kind_of(problem(512, epilogue=SWIGLU, norm=True), row) == LIBRARY
    assert choose(problem(512)).kind == LIBRARY
    assert choose(problem(1)).kind == GEMV  # if Hopper's flat product does not serve the call


def test_few_rows_keep_a_residual_in_the_flat_product():
    """The library copies it first: a kernel more, as a norm before it is."""
    row = find("NVIDIA H200", 4096, 4096, "bfloat16", "bfloat16")
    few = LinearProblem(64, 4096, 4096, torch.bfloat16, torch.bfloat16, H200)
    assert kind_of(few, row) == LIBRARY
    assert kind_of(replace(few, residual=True), row) == FLAT
    assert kind_of(replace(few, M=65, residual=True), row) == LIBRARY


@pytest.mark.parametrize("given", [{}, {"bias"}, {"residual"}], ids=str)
def test_no_kernel_follows_the_librarys_product_that_has_no_end(given):
    """Only torch computes here: a kernel behind it could not be launched."""
    x, weight = torch.randn(96, 24), torch.randn(10, 24)
    bias = torch.randn(10) if "bias" in given else None
    residual = torch.randn(96, 10) if "residual" in given else None
    tensors = LinearTensors(bias, residual=residual)
    described = LinearProblem.from_linear(x, weight, tensors, LinearOptions())
    y = prepare(described, LinearConfig(LIBRARY))(x, weight, tensors)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(y, expected if residual is None else expected + residual)


@pytest.mark.parametrize(("N", "K"), [(1024, 2048), (1024, 3072)])
def test_a_tile_of_a_larger_shape_is_split_until_multiprocessors_have_work(N, K):
    """Products of Qwen3-0.6B ran on 32 of 132 multiprocessors."""
    one = replace(problem(64, next_norm=True), N=N, K=K)
    config = choose(one)
    assert config.kind == FLAT
    assert tiles_of(one, config) * config.splits > H200.multiprocessors // 2


def test_few_outputs_of_many_rows_have_smaller_tiles_instead_of_eight_parts():
    one = replace(problem(64, next_norm=True), N=1024, K=2048)
    small, h100 = LinearConfig(FLAT, 64, 16, 256, 4, 4, splits=2, ahead=4), Target("H100", (9, 0), 132)
    assert choose(one) == choose(replace(one, M=33)) == choose(replace(one, device=h100)) == small
    for other in (
        replace(one, M=32), replace(one, N=2048), replace(one, weight_dtype=torch.float8_e4m3fn),
        replace(one, device=Target("A100", (8, 0), 108)),
    ):  # fmt: skip
        assert choose(other).BLOCK_N > small.BLOCK_N


def test_many_rows_normalise_heads_after_torchs_product():
    """But it would convert an FP8 weight at every call."""
    heads = Heads(16, 8, 128, 128, False, 4096, 16, 1024, 0, norm=True)
    one = replace(problem(32, x_scale=True), N=4096, K=1024, epilogue=QKV, heads=heads)
    few, many = choose(one), choose(replace(one, M=33))
    in_e4m3 = choose(replace(one, M=64, weight_dtype=torch.float8_e4m3fn, scales="channel"))
    assert (few.kind, many.kind, in_e4m3.kind) == (FLAT, LIBRARY, FLAT)
    assert choose(replace(one, M=64, heads=replace(heads, norm=False))).kind == FLAT


def test_splits_of_another_shape_make_no_second_round():
    """Gate and up of Qwen3-0.6B had 192 programs, of which only 132 run at a time."""
    one = replace(problem(64), N=6144, K=1024, epilogue=SWIGLU)
    config = choose(one)
    assert config.kind == FLAT
    assert tiles_of(one, config) * config.splits <= H200.multiprocessors


def test_a_tile_of_another_card_is_not_taken():
    config = choose(LinearProblem(2, 22016, 4096, torch.bfloat16, torch.bfloat16, Target("RTX", (8, 9), 128)))
    assert (config.kind, config.BLOCK_N) == (FLAT, 32)


@pytest.mark.parametrize("norm", [False, True])
def test_the_ring_fits_as_often_as_its_tile_means_to_run(norm):
    for (rows_, width), tiles in ring.TILES.items():
        dtype = torch.bfloat16 if width == 2 else torch.float8_e4m3fn
        described = replace(problem(rows_, norm=norm), weight_dtype=dtype)
        for tile in tiles:
            config = ring.make(described, tile)
            assert ring.fits(described, tuple(vars(config).values())[2:])


@pytest.mark.parametrize(("width", "dtype"), [(2, torch.bfloat16), (1, torch.float8_e4m3fn)], ids=str)
def test_a_thread_of_a_tensor_core_takes_32_bits_of_the_weight_at_a_time(width, dtype):
    from flashtile.backends.hopper.linear.launch import flat_variant

    described = replace(problem(8), weight_dtype=dtype)
    for tile in ring.TILES[8, width]:
        assert flat_variant(described, ring.make(described, tile)).K_WIDTH * dtype.itemsize == 4


def test_tiles_of_whole_waves_cover_every_place():
    rows = ((12288, 128, 1, 132), (4096, 128, 4, 33), (22016, 64, 1, 396), (20, 64, 1, 20))
    for N, BLOCK_N, splits, tiles in rows:
        described = replace(problem(64), N=N)
        config = adapted(described, FLAT, BLOCK_N, 64, 4, 4, splits, 2, True)
        assert tiles_of(described, config) == tiles
        assert -(-N // tiles) <= BLOCK_N


def test_hopper_takes_the_tile_that_was_the_fastest_for_the_shape():
    from flashtile.backends.hopper.linear import configure_linear

    others = 0
    for row in rows():
        measured = row.measured(8, FLAT)
        if row.card != "NVIDIA H200" or measured is None or measured["backend"] != "hopper":
            continue
        dtypes = (getattr(torch, name) for name in (row.dtype, row.weight_dtype))
        described = LinearProblem(8, row.N, row.K, *dtypes, H200)
        tile = tuple(measured["config"])
        assert configure_linear(described) == ring.make(described, tile)
        others += tile[:4] != ring.DEFAULT[ring.key_of(described)]
    assert others


@pytest.mark.compile
def test_the_end_of_a_flat_product_stores_many_places_at_once():
    """Which the compiler does only where it knows that tiles and rows of the output begin at multiples."""
    from flashtile.tools.inspection.linear import compile_cases

    case = next(case for case in compile_cases("sm_90a") if "flat before norm" in case.name)
    ptx = case.compile(architecture("sm_90a")).asm["ptx"]
    assert "st.global.v4.b32" in ptx
    assert "st.global.b16" not in ptx


def test_explain_names_the_row_and_the_share_of_the_floor():
    x, weight = torch.empty(1, 4096).bfloat16(), torch.empty(6144, 4096).bfloat16()
    text = str(flashtile.linear.explain(x, weight, card=find_card("h200")))
    assert "backend: hopper" in text
    assert "NVIDIA H200, weight 6144 x 4096 bfloat16 (measured for this shape)" in text
    assert "of reading the weight in" in text
    many = flashtile.linear.explain(linear, x.expand(512, -1), weight, card=find_card("h200"))
    assert (many.backend, many.config.kind) == ("portable", LIBRARY)
    assert "the table gives" in many.choice.reasons_against["hopper"] or "1 to 16" in str(many)
    caches = torch.empty(2, 4, 16, 8, 128).bfloat16()
    slots = torch.zeros(1, dtype=torch.int64)
    appended = flashtile.linear.explain(
        flashtile.linear.linear_qkv, x, weight, *caches, slot_mapping=slots, card=find_card("h200")
    )
    assert (appended.backend, appended.problem.epilogue) == ("hopper", QKV)
