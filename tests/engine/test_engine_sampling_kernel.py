"""The kernel draws what the torch form draws."""

from __future__ import annotations

import pytest
import torch

from flashtile.engine.sampler import Choice, mix32_, noisy_scores
from targets import CUDA

pytest.importorskip("triton")


def choices(rows: int, device: str) -> Choice:
    """Combinations of a few values, row by row: all in 128 rows, and all temperatures in any few."""
    values = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.3, 1.0, 5.0)
        for top_k in (0, 1, 7, 10**6)
        for top_p in (1.0, 0.95, 0.5, 1e-6)
        for min_p in (0.0, 0.3)
    ]
    columns = list(zip(*(values[37 * i % len(values)] for i in range(rows)), strict=True))
    dtypes = (torch.float32, torch.int64, torch.float32, torch.float32)
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, device=device, dtype=dtype)
        for column, dtype in zip(columns, dtypes, strict=True)
    )
    seed = torch.arange(rows, device=device) * 7919 - 3000
    return Choice(temperature, top_k, top_p, min_p, seed, False, True, True, True)


def check(device: str, rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    from flashtile.engine.sampling import sample

    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(rows, vocab_size + 3, generator=generator) * 3).to(device, dtype)[:, :vocab_size]
    logits[:, 5] = -torch.inf
    choice = choices(rows, device)
    positions = torch.arange(rows, dtype=torch.int32, device=device) * 3
    expected = noisy_scores(logits, choice, positions).argmax(-1)
    found, _ = sample(logits, *choice[:5], positions, True)
    # A mass may be summed to the other side of top-p: one token more or less is kept, once in a long while.
    assert (found != expected).sum() <= rows // 100
    plain = choice._replace(any_top_k=False, any_top_p=False, any_min_p=False)
    found, _ = sample(logits, *plain[:5], positions, False)
    assert torch.equal(found, noisy_scores(logits, plain, positions).argmax(-1))


def check_bad_logits(device: str, vocab_size: int) -> None:
    """NaN of either sign and infinity win, whatever the filters, and rows without them draw as before."""
    from flashtile.engine.sampling import sample

    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7F800000, 0x3F000000], dtype=torch.int32)
    logits[:, vocab_size - 2] = bits.view(torch.float32).repeat(2)
    every = choices(128, device)
    choice = Choice(*(column[3::17].contiguous() for column in every[:5]), *every[5:])
    logits, positions = logits.to(device), torch.arange(8, dtype=torch.int32, device=device)
    for filtered in (True, False):
        if not filtered:
            choice = choice._replace(any_top_k=False, any_top_p=False, any_min_p=False)
        expected = noisy_scores(logits, choice, positions).argmax(-1)
        found, _ = sample(logits, *choice[:5], positions, filtered)
        for tokens in (expected, found):
            is_bad = (~logits.gather(1, tokens.unsqueeze(1)).isfinite()).squeeze(1).view(2, 4)
            assert is_bad.tolist() == [[True, True, True, False]] * 2


def shapes(rows: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Logits for which the kernel finds its thresholds in different ways."""
    normal = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))
    block = 256 if vocab_size < 4096 else 2048
    lanes = torch.arange(block)
    chosen = mix32_(lanes.int(), torch.tensor(0, dtype=torch.int32)).long() & 0xFFFFFFFF
    misleading = normal * 0.1  # the scores that the kernel takes for random ones are the largest
    misleading[:, (chosen % -(-vocab_size // block) * block + lanes).clamp(max=vocab_size - 1)] += 1
    few = torch.full_like(normal, -torch.inf)
    few[:, 3 : vocab_size // 50] = normal[:, 3 : vocab_size // 50]
    return {
        "flat": normal,
        "peaked": normal * 5,
        "ties": (normal * 2).round(),
        "few": few,
        "equal": normal * 0,
        "misleading": misleading,
        "rising": normal + torch.arange(vocab_size) * (400 / vocab_size),
    }


FILTERS = [
    {"top_k": 5}, {"top_k": 300}, {"top_p": 0.9}, {"top_p": 0.05}, {"top_k": 40, "top_p": 0.9},
    {"top_k": 700, "top_p": 0.5}, {"top_p": 0.9, "min_p": 0.05}, {"top_k": 7, "top_p": 0.8, "min_p": 0.1}, {},
]  # fmt: skip


def check_filters(device: str, rows: int, vocab_size: int, names=None) -> None:
    """Every filter in one batch, compared with the torch form, which sorts."""
    from flashtile.engine.sampling import sample

    given = [FILTERS[i % len(FILTERS)] for i in range(rows)]

    def column(name, default, dtype):
        return torch.tensor([one.get(name, default) for one in given], dtype=dtype, device=device)

    choice = Choice(
        torch.ones(rows, device=device), column("top_k", 0, torch.int64), column("top_p", 1, torch.float32),
        column("min_p", 0, torch.float32), torch.arange(rows, device=device) * 31, False, True, True, True,
    )  # fmt: skip
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    for name, logits in shapes(rows, vocab_size).items():
        if names is None or name in names:
            logits = logits.to(device)
            expected = noisy_scores(logits, choice, positions).argmax(-1)
            wrong = sample(logits, *choice[:5], positions, True)[0] != expected
            assert wrong.sum() <= rows // 100, (name, [given[i] for i in wrong.nonzero().flatten().tolist()])


def with_small_tiles(monkeypatch, block: int, listed: int) -> None:
    from flashtile.engine import sampling

    def variant(filtered, _, adjusted):
        return sampling.SamplingVariant(filtered or adjusted, block, listed, adjusted)

    monkeypatch.setattr(sampling, "variant_of", variant)


@pytest.mark.interpreter
@pytest.mark.parametrize("names", [["flat", "few"], ["peaked", "rising"], ["ties", "equal"]])
def test_every_filter_keeps_what_a_sort_keeps(monkeypatch, names):
    with_small_tiles(monkeypatch, 256, 1024)
    check_filters("cpu", len(FILTERS), 2000, names)


@pytest.mark.interpreter
@pytest.mark.parametrize("listed", [1024, 8192], ids=["drawn", "listed"])
def test_a_bound_that_is_too_high_is_noticed(monkeypatch, listed):
    with_small_tiles(monkeypatch, 256, listed)
    monkeypatch.setitem(globals(), "FILTERS", [{"top_p": 0.5}, {"top_p": 0.5, "min_p": 1e-9}])
    check_filters("cpu", 12, 2000, ["misleading"])


@pytest.mark.interpreter
@pytest.mark.parametrize("listed", [32, 512], ids=["drawn", "listed"])
def test_the_second_best_is_drawn_if_the_best_is_not_kept(monkeypatch, listed):
    with_small_tiles(monkeypatch, 64, listed)
    given = [{"top_k": 40}, {"top_p": 0.7}]  # with bounds far below them
    in_steps = [{**one, "min_p": 1e-9} for one in given]
    monkeypatch.setitem(globals(), "FILTERS", given + in_steps)
    check_filters("cpu", 24, 200, ["flat"])


@pytest.mark.interpreter
def test_a_list_without_room_is_replaced_by_a_search(monkeypatch):
    with_small_tiles(monkeypatch, 512, 64)
    check_filters("cpu", len(FILTERS), 1000, ["flat"])


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("shape", "given", "way"),
    [("flat", {"top_k": 5}, "listed"), ("flat", {"top_k": 300}, "in two passes"),
     ("flat", {"top_k": 1500, "min_p": 1e-9}, "drawn"), ("flat", {"top_p": 0.9, "min_p": 1e-9}, "drawn"),
     ("flat", {"top_k": 300, "min_p": 1e-9}, "listed"), ("flat", {"top_p": 0.9}, "in two passes"),
     ("flat", {"top_p": 0.5}, "in two passes"), ("peaked", {"top_p": 0.9}, "listed")],
)  # fmt: skip
def test_the_number_of_kept_tokens_tells_the_way(monkeypatch, shape, given, way):
    from flashtile.engine import sampling

    drawn, listed, draw, fill = [], [], sampling.draw_from.fn, sampling.list_from.fn
    monkeypatch.setattr(
        sampling, "draw_from", lambda row, *rest: (drawn.append(int(row.vocab_size)), draw(row, *rest))[1]
    )
    monkeypatch.setattr(sampling, "list_from", lambda *rest: (listed.append(1), fill(*rest))[1])
    with_small_tiles(monkeypatch, 256, 1024)
    monkeypatch.setitem(globals(), "FILTERS", [given])
    check_filters("cpu", 2, 2000, [shape])
    ways = {"listed": (2, {0}), "drawn": (0, {2000}), "in two passes": (0, set())}
    assert (len(listed), set(drawn)) == ways[way]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_every_filter_keeps_what_a_sort_keeps_on_a_gpu():
    check_filters("cuda", 900, 128256)


@pytest.mark.interpreter
def test_a_draw_does_not_depend_on_the_batch(monkeypatch):
    from flashtile.engine.sampling import sample

    with_small_tiles(monkeypatch, 64, 256)
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(2))
    choice, positions = choices(6, "cpu"), torch.arange(6, dtype=torch.int32)
    together, _ = sample(logits, *choice[:5], positions, True)
    for i in range(6):
        one = slice(i, i + 1)
        alone, _ = sample(logits[one], *(column[one] for column in choice[:5]), positions[one], True)
        assert alone.item() == together[i].item()


def check_adjusted(device: str) -> None:
    """Changed logits are read from lists, with every filter and with none."""
    from test_engine_sampling import adjusted_rows

    from flashtile.engine.sampling import sample

    logits, adjusted, _ = adjusted_rows(device)
    logits[1::2, 7] = -torch.inf  # penalties leave it
    before, rows = logits.clone(), len(logits)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    every = choices(128, device)
    for first in range(0, rows * (4 if device == "cuda" else 1), rows):
        choice = Choice(*(column[first : first + rows].contiguous() for column in every[:5]), *every[5:])
        changed = adjusted.apply(logits)
        expected = noisy_scores(changed, choice, positions).argmax(-1)
        tokens, scores = sample(logits, *choice[:5], positions, True, adjusted)
        assert torch.equal(tokens, expected)
        temperature = choice.temperature + (choice.temperature == 0)
        wanted = changed.gather(1, tokens.unsqueeze(1)).squeeze(1) / temperature
        torch.testing.assert_close(scores, wanted)
        assert torch.equal(logits, before)


@pytest.mark.interpreter
def test_changed_logits_are_drawn(monkeypatch):
    with_small_tiles(monkeypatch, 16, 128)
    check_adjusted("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_changed_logits_are_drawn_on_a_gpu():
    check_adjusted("cuda")


@pytest.mark.interpreter
def test_bad_logits_win():
    check_bad_logits("cpu", 50)


# Calls of fuzz.sampling.draws. Only the first failed in Triton's interpreter, where the maximum of NaN is
# NaN, and products are rounded before they are subtracted.
FOUND = [
    {"top_p": (1e-60,)},  # 0 as float32: the draw did not end
    {"top_p": (0.9,), "min_p": (0.0, 0.1), "shape": "bad"},  # exponents of 3e38 overflow: it did not end
    {"top_k": (7,), "shape": "bad", "adjusted": True},  # the list hid the row's NaN
    {"temperature": (0.3, 5.0), "min_p": (1.0,)},  # the best score seemed to be below itself
]  # fmt: skip


def check_found(device: str, given: dict) -> None:
    from fuzz.sampling import draws

    for seed in range(4 if device == "cuda" else 1):
        draws(16, 300, seed, device, **given)


@pytest.mark.interpreter
@pytest.mark.parametrize("given", FOUND[:1])
def test_a_draw_that_a_random_call_found(given):
    check_found("cpu", given)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("given", FOUND, ids=["top_p", "bad", "adjusted", "min_p"])
def test_a_draw_that_a_random_call_found_on_a_gpu(given):
    check_found("cuda", given)


@pytest.mark.interpreter
def test_rows_without_tokens_have_no_score():
    from flashtile.engine.sampling import sample

    logits, positions = torch.full((24, 50), -torch.inf), torch.zeros(24, dtype=torch.int32)
    _, scores = sample(logits, *choices(24, "cpu")[:5], positions, True)
    assert (scores == -torch.inf).all()


@pytest.mark.interpreter
def test_logits_may_have_any_strides():
    from flashtile.engine.sampling import sample

    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    given = *choices(8, "cpu")[:5], torch.arange(8, dtype=torch.int32), False
    assert torch.equal(sample(logits.t().contiguous().t(), *given)[0], sample(logits, *given)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_bad_logits_win_on_a_gpu():
    check_bad_logits("cuda", 50)


@pytest.mark.interpreter
@pytest.mark.parametrize("vocab_size", [50, 4500])
def test_the_kernel_draws_what_torch_draws(vocab_size):
    check("cpu", 48 if vocab_size == 50 else 12, vocab_size, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [50, 32000, 128256])
def test_the_kernel_draws_what_torch_draws_on_a_gpu(vocab_size, dtype):
    check("cuda", 256, vocab_size, dtype)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("filtered", "adjusted", "spills"),
    # Those of changed logits are offsets of a loop's first loads, moved once a row.
    [(False, False, 0), (True, False, 88), (True, True, 140)],
)
def test_the_kernel_compiles_within_its_limits(filtered, adjusted, spills):
    from flashtile.engine.sampling import options, sample_kernel, variant_of
    from flashtile.tools.inspection.report import CompileCase, report

    signature = {
        "logits_ptr": "*bf16", "temperature_ptr": "*fp32", "top_k_ptr": "*i64", "top_p_ptr": "*fp32",
        "min_p_ptr": "*fp32", "seed_ptr": "*i64", "position_ptr": "*i32", "scores_ptr": "*fp32",
        "tokens_ptr": "*i32", "out_ptr": "*i64", "best_ptr": "*fp32",
        "lists_ptr": "*i32", "numbers_ptr": "*i32", "penalties_ptr": "*fp32", "table_ptr": "*i32",
        "known_ptr": "*i32", "logits_stride": "i32", "vocab_size": "i32", "room": "i32", "columns": "i32",
        "width": "i32",
    }  # fmt: skip
    case = CompileCase(
        "sample", sample_kernel, signature, {"C": variant_of(filtered, 128256, adjusted)}, options=options(),
        tensor_cores=False,
        divisible_by_16=frozenset(("logits_stride", "vocab_size")),
    )  # fmt: skip
    found = report(case, "sm_90a")
    assert found.violations == []
    assert found.spill_stores <= spills
