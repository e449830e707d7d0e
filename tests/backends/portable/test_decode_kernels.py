"""The decoding kernels in Triton's interpreter: every feature, the schedule, what a launch must not touch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

import decode_cases
import flashtile
from cases import FP16, FP32
from decode_cases import CASES, build, check_mass_of_nan
from flashtile.backends.common.device import Target
from flashtile.backends.common.tiles import decode_bits, encode_bits
from flashtile.backends.portable.decode import config, launch, prepare_combine, prepare_copy_blocks
from flashtile.backends.portable.decode import mass as mass_kernel
from flashtile.backends.portable.decode.attend import WeightPointers
from flashtile.backends.portable.decode.mass import MassVariant
from flashtile.backends.portable.decode.schedule import DecodeLengths, Layout, stream_k_start
from flashtile.backends.portable.decode.schedule import share_of as share_of_kernel
from flashtile.backends.portable.decode.schedule import share_start as share_start_kernel
from flashtile.hardware.cards import CARDS
from flashtile.problems.decode import FP8, CombineProblem, CopyProblem, CopyTensors
from flashtile.problems.masking import KernelMask
from flashtile.testing import decode as testing
from flashtile.tools.inspection.decode import PAGED

share_of, share_start = share_of_kernel.fn, share_start_kernel.fn

pytestmark = pytest.mark.interpreter

BY_NAME = {case.name: case for case in CASES}
WHOLE = (
    "dense", "paged", "empty-cache", "window-left", "ragged-queries", "tree-by-batch", "sink-without-keys",
)  # fmt: skip
OF_MASS = (
    "dense", "empty-cache", "odd-head-dims", "page-size-5-transposed", "one-large-page", "window-left",
    "chunk-ragged", "chunk-leftpad", "alibi", "sink", "tree-by-batch", "everything", "two-splits",
    "group-of-7", "heads-in-blocks", "fp8-by-block", "fp8-append-by-sequence",
)  # fmt: skip
IN_FLOAT16 = [name for name, case in BY_NAME.items() if case.cache_dtype == FP8]
IN_FLOAT16 += ["paged", "everything", "sink", "split-size"]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_feature_in_float32(name):
    tensors, arguments = build(BY_NAME[name], FP32, "cpu")
    testing.check(*tensors, backend="portable", **arguments)


@pytest.mark.parametrize("name", IN_FLOAT16)
@pytest.mark.usefixtures("balanced_work")
def test_float16(name):
    tensors, arguments = build(BY_NAME[name], FP16, "cpu")
    testing.check(*tensors, backend="portable", **arguments)


@pytest.fixture
def recomputed(monkeypatch, fresh_launches):
    """No call stores probabilities."""
    monkeypatch.setattr(mass_kernel, "MAX_STORED_BYTES", 0)


@pytest.fixture(params=["stored", "recomputed"])
def either_mass(request, fresh_launches):
    if request.param == "recomputed":
        request.getfixturevalue("recomputed")


@pytest.fixture
def many_rows(monkeypatch, recomputed):
    """The narrowest tiles count as those of many rows."""
    monkeypatch.setattr(mass_kernel, "TALL", 16)


def check_mass(case, dtype=FP32):
    tensors, arguments = build(case, dtype, "cpu")
    mass = torch.rand(tensors[1].shape[:3], generator=torch.Generator().manual_seed(9))
    testing.check(*tensors, mass=mass, backend="portable", **arguments)


@pytest.mark.parametrize("name", OF_MASS)
@pytest.mark.usefixtures("either_mass")
def test_mass(name):
    check_mass(BY_NAME[name], FP16 if BY_NAME[name].cache_dtype == FP8 else FP32)


@pytest.mark.parametrize("name", ["paged", "chunk-ragged", "everything"])
@pytest.mark.usefixtures("many_rows")
def test_mass_of_many_rows_has_wide_tiles_of_keys(name):
    check_mass(BY_NAME[name])


HEAD_BY_HEAD: dict[str, tuple[bool, dict[str, Any]]] = {
    "causal": (True, {"causal": True}),
    "ragged": (True, {"seqlen_q": (8, 0, 13), "causal": True, "sink": "float32"}),
    "one-page": (True, {"page_size": 96, "seqlen_q": 17}),
    "dense": (True, {"page_size": None, "batch_idx": (4, 0, 2), "window_size": (5, -1)}),
    "padded": (True, {"window_size": (7, 2), "leftpad": (3, 0, 29)}),
    "chunk": (True, {"attention_chunk": 6, "head_dim": 24}),
    "no-key": (True, {"lengths": (3, 0, 70), "causal": True, "heads": (3, 1)}),
    "short": (False, {"seqlen_q": 7, "causal": True}),
    "softcap": (False, {"softcap": 2.0}),
    "alibi": (False, {"alibi": "head"}),
    "tree": (False, {"tree": "shared"}),
    "negative-scale": (False, {"softmax_scale": -0.3}),
}
"""Whether rows are taken head by head, in tiles of 8, and features of the calls."""


@pytest.mark.parametrize("name", HEAD_BY_HEAD)
@pytest.mark.usefixtures("many_rows")
def test_mass_of_rows_head_by_head(name, monkeypatch):
    """Of rows of a head that fill a tile, if their scores are plain products."""
    expected, features = HEAD_BY_HEAD[name]
    chosen = []
    monkeypatch.setattr(
        mass_kernel, "MassVariant", lambda **c: chosen.append(c["BY_HEAD"]) or MassVariant(**c)
    )
    given = {"seqlen_q": 9, "lengths": (75, 9, 96), "capacity": 96, "page_size": 4, **features}
    check_mass(decode_cases.case(name, **given))
    assert set(chosen) == {expected}


@pytest.mark.usefixtures("many_rows")
def test_a_row_with_nan_head_by_head_changes_only_the_mass_of_keys_that_it_sees():
    (q, *caches), arguments = decode_cases.paged(
        [20, 9], (4, 2), 16, page_size=4, seqlen_q=8, dtype=FP32, device="cpu"
    )
    add = partial(flashtile.flash_attn_with_kvcache, causal=True, window_size=(3, 0), backend="portable")
    clean, mass = torch.zeros(2, *caches[0].shape[:3])
    add(q, *caches, mass=clean, **arguments)
    q[0, 5] = torch.nan  # at position 17
    add(q, *caches, mass=mass, **arguments)
    keys = torch.arange(14, 18)
    seen = torch.zeros_like(mass, dtype=torch.bool)
    seen[arguments["block_table"][0, keys // 4].long(), keys % 4] = True
    assert torch.equal(mass.isnan(), seen)
    assert torch.equal(mass[~seen], clean[~seen])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("many_rows")
def test_an_infinite_key_gets_its_mass_from_tokens_that_exist(causal):
    """Rows of zeros after the last token would have products with infinity that are NaN."""
    (q, *caches), arguments = decode_cases.paged(
        [20, 9], (4, 2), 16, page_size=4, seqlen_q=9, dtype=FP32, device="cpu"
    )
    q.abs_()
    where = arguments["block_table"][0, 0].long(), 3
    caches[0][where[0], where[1], 0, 0] = -torch.inf
    mass = torch.zeros(caches[0].shape[:3])
    flashtile.flash_attn_with_kvcache(q, *caches, mass=mass, causal=causal, backend="portable", **arguments)
    assert mass[where][0] == 0
    assert not mass.isnan().any()


@pytest.mark.usefixtures("fresh_launches")
def test_mass_of_a_prefix_of_neighbours(monkeypatch):
    """Sequences 1 to 3 share 32 keys, as 1 and 2 share 16 more. To the bit, as one after the other."""
    monkeypatch.setattr(mass_kernel, "TILE", 64)
    generator = torch.Generator().manual_seed(0)
    table = torch.arange(30).int().view(5, 6)
    table[1:4, :4] = table[1, :4]
    table[2, 4:6] = table[1, 4:6]
    q, k, v = (torch.randn(s, generator=generator) for s in ((5, 1, 6, 16), *[(30, 8, 2, 16)] * 2))
    arguments = {"block_table": table, "cache_seqlens": torch.tensor([48, 47, 45, 33, 48]).int()}
    mass = torch.rand(k.shape[:3], generator=generator)
    testing.check(q, k, v, mass=mass, backend="portable", **arguments)
    together, one_by_one = torch.zeros(2, *mass.shape)
    attend = partial(flashtile.flash_attn_with_kvcache, backend="portable", num_splits=1)
    attend(q, k, v, mass=together, **arguments)
    for b in range(5):
        alone = {name: tensor[b : b + 1] for name, tensor in arguments.items()}
        attend(q[b : b + 1], k, v, mass=one_by_one, **alone)
    assert torch.equal(together, one_by_one)


@pytest.mark.usefixtures("either_mass")
def test_a_row_with_nan_changes_only_the_mass_of_keys_that_it_sees():
    check_mass_of_nan("portable")


@pytest.mark.usefixtures("fresh_launches")
def test_units_of_pages_that_overlap_tiles(monkeypatch):
    """A page of 24 and tiles of 16 keys have units of 8."""
    units = []
    monkeypatch.setattr(mass_kernel, "MassVariant", lambda **c: units.append(c["SIZE"]) or MassVariant(**c))
    check_mass(replace(BY_NAME["paged"], page_size=24))
    assert set(units) == {8}


def test_rows_padded_to_the_capacity_store_no_probabilities(monkeypatch):
    """They visit an n_block beyond the cache, for which there is no memory."""
    behind = []

    def with_room(*memory):
        longer = [m.new_full((len(m) + 512,), 7.0) for m in memory]
        behind.extend(more[len(m) :] for more, m in zip(longer, memory, strict=True))
        return WeightPointers(*(more[: len(m)] for more, m in zip(longer, memory, strict=True)))

    monkeypatch.setattr(mass_kernel, "WeightPointers", with_room)
    case = replace(BY_NAME["dense"], lengths=(128, 128), leftpad=(0, 128), capacity=128)
    tensors, arguments = build(case, FP32, "cpu")
    mass = torch.zeros(tensors[1].shape[:3])
    testing.check(*tensors, mass=mass, backend="portable", **arguments)
    assert len(behind) == 2
    assert all((more == 7.0).all() for more in behind)


@pytest.mark.parametrize("tile", [64, 2048])
@pytest.mark.parametrize("page_size", [3, 16, 128])
@pytest.mark.usefixtures("fresh_launches")
def test_mass_of_pages_that_sequences_share(page_size, tile, monkeypatch):
    """In several tiles of two n_blocks, and in one. With this SCAN, holders are found in several rounds."""
    monkeypatch.setattr(mass_kernel, "SCAN", 1)
    monkeypatch.setattr(mass_kernel, "TILE", tile)
    lengths = (70, 33, 90, 5, 90)
    columns = -(-96 // page_size)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(5 * columns, generator=generator).int().view(5, columns)
    for b, first, count in ((1, 0, 32), (4, 0, 80), (2, 4, 32)):  # 2 shares with 4, and through it with 0
        same = min(max(1, count // page_size), -(-min(lengths[b], lengths[first]) // page_size))
        table[b, :same] = table[first, :same]
    past = -(-lengths[3] // page_size)
    table[3, past:] = table[0, past:]  # left over from another request: not held
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in ((5, 2, 6, 16), *[(5 * columns, page_size, 2, 16)] * 2)
    )
    mass = torch.rand(k.shape[:3], generator=generator)
    arguments = {"block_table": table, "cache_seqlens": torch.tensor(lengths).int()}
    testing.check(q, k, v, mass=mass, backend="portable", window_size=(40, 0), **arguments)
    together, one_by_one = torch.zeros(2, *mass.shape)
    attend = partial(flashtile.flash_attn_with_kvcache, backend="portable", causal=True, num_splits=1)
    attend(q, k, v, mass=together, **arguments)
    for b in range(5):
        alone = {name: tensor[b : b + 1] for name, tensor in arguments.items()}
        attend(q[b : b + 1], k, v, mass=one_by_one, **alone)
    assert torch.equal(together, one_by_one)


@pytest.mark.parametrize("name", WHOLE)
def test_short_work_tiles_are_left_whole(name, monkeypatch):
    """No kernel combines anything, and what nobody asks for is not written."""
    monkeypatch.setattr(launch, "combine_tile", None)
    tensors, arguments = build(BY_NAME[name], FP16, "cpu")
    testing.check(*tensors, backend="portable", **arguments)
    (q, *caches, _, _), arguments = tensors, arguments | {"backend": "portable"}
    expected, _ = flashtile.flash_attn_with_kvcache(q, *caches, return_softmax_lse=True, **arguments)
    for _ in range(2):
        assert torch.equal(flashtile.flash_attn_with_kvcache(q, *caches, **arguments), expected)


@pytest.mark.parametrize(
    ("keys", "sequences", "even", "stream_k"),
    [
        (256, 1, True, False),
        (512, 1, True, True),
        (512, 8, True, False),
        (2048, 16, True, True),
        (1024, 16, True, False),
        (1024, 16, False, True),
        (512, 16, False, False),
        (1024, 33, True, False),
        (1024, 34, True, True),
    ],
)
def test_which_work_tiles_are_left_whole(keys, sequences, even, stream_k):
    """Of 8 key heads of 128 on an H200: those that a program reads while parts would be combined, and longer
    ones where a last round of programs keeps the card busy."""
    chosen = config.row("hopper", 2, config.NARROW, 128)
    assert chosen.takes_stream_k(1, 8 * sequences, 132, 512 * keys, even) is stream_k


def test_a_single_split_has_one_tile_whatever_the_batch_is():
    """On an H200, with 8 key heads. Another tile would be another order of sums."""
    one = replace(PAGED, device=Target.of_card(CARDS["h200"]), num_splits=1)
    for head_dim in (64, 128, 256):
        tiles = {
            config.choose(replace(one, batch=batch, head_dim=head_dim, head_dim_v=head_dim)).tile
            for batch in (1, 16, 66, 67, 256, 4096)
        }
        assert len(tiles) == 1, head_dim


class Sequences(NamedTuple):
    cache_seqlens: Any


@triton.jit
def _starts_kernel(pointers, out, lengths, C: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    total, position, m_block, m_block_start = stream_k_start(
        tl.arange(0, C.SCAN_BLOCK), program, programs, pointers, lengths, C
    )
    tl.store(out + 4 * program, total)
    tl.store(out + 4 * program + 1, position)
    tl.store(out + 4 * program + 2, m_block)
    tl.store(out + 4 * program + 3, m_block_start)


@pytest.mark.parametrize("team_heads", [1, 3])
@pytest.mark.parametrize("scan_block", [1, 4, 16])
@pytest.mark.parametrize("window_left", [-1, 30])
@pytest.mark.parametrize("lengths", [(7, 0, 100, 33, 1), (0, 0), (500,), (16,) * 9], ids=str)
def test_teams_share_all_n_blocks(lengths, window_left, scan_block, team_heads):
    """Shares are equal but for one tile, and each team finds the sequence that its share begins in."""
    heads, teams, block_n = 3, 7, 16
    mask = KernelMask(window_left, -1)
    layout = Layout(
        HAS_LENGTHS=True,
        HAS_LEFTPAD=False,
        VARLEN=False,
        VARLEN_NEW=False,
        **mask.constants,
        BLOCK_M=16,
        BLOCK_N=block_n,
        SCAN_BLOCK=scan_block,
        ONE_SCAN=len(lengths) <= scan_block,
        ONE_M_BLOCK=True,
        ONE_TOKEN=True,
        HEADS_PER_TEAM=team_heads,
        ONE_TEAM=team_heads == heads,
    )
    out = torch.zeros(teams, 4, dtype=torch.int32)
    given = Sequences(torch.tensor(lengths, dtype=torch.int32))
    integers = DecodeLengths(len(lengths), 1, heads, 1, 1, 0, 0, 1000, mask)
    _starts_kernel[(teams,)](given, out, integers, layout)

    starts = [max(0, n - 1 - window_left) if window_left >= 0 else 0 for n in lengths]
    tiles = [max(1, -(-n // block_n) - s // block_n) for n, s in zip(lengths, starts, strict=True)]
    ends = torch.tensor(tiles).mul(heads // team_heads).cumsum(0)
    total = int(ends[-1])
    shares = [total // teams + (t < total % teams) for t in range(teams)]
    for team, (found_total, position, pair, pair_start) in enumerate(out.tolist()):
        assert (found_total, position) == (total, sum(shares[:team]))
        expected = int((ends <= position).sum())
        assert (pair, pair_start) == (expected, int(ends[expected - 1]) if expected else 0)


@pytest.mark.parametrize("total", [0, 1, 5, 7, 8, 100, 1000])
def test_every_n_block_has_one_team(total):
    teams = 7
    for team in range(teams):
        first, end = share_start(team, teams, total), share_start(team + 1, teams, total)
        assert all(share_of(tile, teams, total) == team for tile in range(first, end))
    assert share_start(teams, teams, total) == total


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 3}, {"split_size": 16}], ids=str)
def test_results_do_not_depend_on_the_batch(splits):
    case = replace(BY_NAME["paged"], lengths=(48, 5, 31))
    (q, k_cache, v_cache, _, _), arguments = build(case, FP32, "cpu")

    def attend(rows):
        mine = {name: tensor[rows] for name, tensor in arguments.items()}
        return flashtile.flash_attn_with_kvcache(
            q[rows], k_cache, v_cache, return_softmax_lse=True, backend="portable", **mine, **splits
        )

    together = attend(slice(None))
    for b in range(3):
        rows = slice(b, b + 1)
        torch.testing.assert_close(attend(rows), tuple(r[rows] for r in together), rtol=0, atol=0)


@triton.jit
def _decode_kernel(bits, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, decode_bits(tl.load(bits + index)))


@triton.jit
def _encode_kernel(x, bits, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bits + index, encode_bits(tl.load(x + index)))


def test_e4m3_is_decoded_exactly():
    bits = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=FP16)
    _decode_kernel[(1,)](bits, out, 256)
    expected = bits.view(FP8).to(FP16)
    finite = expected.isfinite()
    assert torch.equal(out[finite], expected[finite])
    assert (out[~finite].abs() == 480).all()


def test_e4m3_is_encoded_as_torch_does():
    """Every value, every midpoint between two, its neighbours in float32, and values at random."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    around = [middles, middles.nextafter(values[1:]), middles.nextafter(values[:-1])]
    x = torch.cat([values, *around, torch.randn(500) * 3, torch.randn(500) * 1e-3, torch.tensor([torch.nan])])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 256))
    bits = torch.empty(x.numel(), dtype=torch.uint8)
    _encode_kernel[(x.numel() // 256,)](x, bits, 256)
    assert torch.equal(bits, x.to(FP8).view(torch.uint8))


@pytest.mark.parametrize("dtype", [FP32, FP8], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_copy_blocks(dtype, index_dtype):
    caches = [torch.randn(2, 9, 3, 2, dim).to(dtype) for dim in (24, 17)]
    descales = [torch.rand(2, 9, 2) for _ in range(2)]
    expected = [t.clone() for t in (*caches, *descales)]
    for source, destination in ((3, 8), (5, 1)):
        for tensor in expected:
            tensor[:, destination] = tensor[:, source]
    pairs = torch.tensor([(3, 8), (-1, 4), (5, 1), (50, 2)], dtype=index_dtype)
    problem = CopyProblem(4, 2, 9, dtype, torch.device("cpu"), descales=True)
    prepare_copy_blocks(problem, None)(*caches, pairs, CopyTensors(*descales))
    for got, wanted in zip((*caches, *descales), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("num_splits", [1, 2, 19])
def test_combine(num_splits):
    """Parts without keys may hold anything; rows without any part are 0."""
    out = torch.randn(num_splits, 2, 3, 2, 24)
    lse = torch.randn(2, num_splits, 3, 2).transpose(0, 1) * 4
    lse[0, 0], out[0, 0] = torch.inf, torch.nan
    lse[:, 1, 2] = -torch.inf
    problem = CombineProblem(num_splits, 2, 3, 2, 24, FP32, FP32, torch.device("cpu"))
    got, got_lse = prepare_combine(problem, None)(out, lse)
    exact = lse.double().masked_fill(lse == torch.inf, -torch.inf)
    weights = torch.softmax(exact, 0).nan_to_num(0.0)[..., None]
    expected = (out.double().nan_to_num(0.0) * weights).sum(0)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got_lse.double(), exact.logsumexp(0).transpose(1, 2), rtol=1e-6, atol=1e-6)
