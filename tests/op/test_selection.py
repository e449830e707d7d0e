"""Which backend a call gets, and what explain says about it."""

from __future__ import annotations

import dataclasses
import gc
from types import SimpleNamespace

import pytest
import torch

import flashtile
from flashtile.caches import BoundedCache
from flashtile.io_model import find_card
from flashtile.op import operation, selection
from flashtile.op.operation import CACHE_BYTES
from flashtile.op.selection import Selection
from flashtile.operators.attention import BACKWARD, FORWARD
from flashtile.problems.attention import NO_EXTRAS, Options, Problem
from flashtile.problems.common import PREFERENCE
from flashtile.problems.decode import find_obstacle_in_cache
from flashtile.problems.masking import CAUSAL
from walk import walk

pytestmark = pytest.mark.quick


@pytest.fixture
def tensors():
    return [torch.zeros(2, 5, 4, 16) for _ in range(3)]


@pytest.fixture
def problem(tensors):
    return Problem.from_tensors(*tensors, options=Options(masking=CAUSAL))


def backend_double(name, reason=None, explicit_reason=None):
    """A backend that refuses for ``reason``, or for ``explicit_reason`` when it is asked for by name."""
    return SimpleNamespace(
        NAME=name,
        reason_against=lambda problem, explicit: explicit_reason if explicit else reason,
        configure_forward=lambda problem: f"{name}'s configuration",
    )


@pytest.fixture
def backends(monkeypatch):
    """Backends by name, instead of those of the package."""
    doubles = {"hopper": backend_double("hopper", "no such card")}
    monkeypatch.setattr(selection, "load_part", lambda name, operation: doubles[name])
    return doubles


@pytest.mark.parametrize("name", PREFERENCE)
def test_backends_offer_what_dispatch_needs(name, problem):
    backend = selection.load_part(name, FORWARD)
    assert name == backend.NAME
    for function in (
        "reason_against",
        "configure_forward",
        "configure_backward",
        "prepare_forward",
        "prepare_backward",
    ):
        assert callable(getattr(backend, function))
    for explicit in (False, True):
        reason = backend.reason_against(problem, explicit=explicit)
        assert reason is None or (isinstance(reason, str) and reason)


@pytest.mark.parametrize("name", PREFERENCE)
def test_configurations_are_frozen_and_repeatable(name, problem):
    backend = selection.load_part(name, FORWARD)
    config = backend.configure_forward(problem)
    assert dataclasses.is_dataclass(config)
    assert config == backend.configure_forward(problem)
    hash(config)


def test_problems_are_hashable_descriptions(tensors, problem):
    same = Problem.from_tensors(*(t.clone() for t in tensors), options=Options(masking=CAUSAL))
    assert same == problem
    assert hash(same) == hash(problem)
    assert problem.window_right == 0
    assert (problem.window_left, problem.window_right) == (-1, 0)
    assert problem.softmax_scale == 0.25
    assert problem.out_shape == (2, 5, 4, 16)
    assert problem.lse_shape == (2, 4, 5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.window_right = -1


def test_first_that_serves_is_chosen(backends, problem):
    backends["portable"], backends["cpu"] = backend_double("portable"), backend_double("cpu")
    chosen = selection.select(FORWARD, problem)
    assert chosen == Selection(
        FORWARD, problem, "portable", "portable's configuration", {"hopper": "no such card"}
    )


def test_others_follow_with_reasons(backends, problem):
    backends["portable"], backends["cpu"] = backend_double("portable", "too cold"), backend_double("cpu")
    chosen = selection.select(FORWARD, problem)
    assert chosen.backend == "cpu"
    assert chosen.reasons_against == {"hopper": "no such card", "portable": "too cold"}


def test_none_serves(backends, problem):
    backends["portable"] = backend_double("portable", "too cold")
    backends["cpu"] = backend_double("cpu", "too hot")
    reasons = r"\(hopper: no such card; portable: too cold; cpu: too hot\)"
    with pytest.raises(NotImplementedError, match=f"no backend serves this call {reasons}"):
        selection.select(FORWARD, problem)


@pytest.mark.parametrize("name", PREFERENCE)
def test_explicit_backend_never_falls_back(backends, problem, name):
    for other in PREFERENCE:
        backends[other] = backend_double(other)
    backends[name] = backend_double(name, explicit_reason="not today")
    with pytest.raises(NotImplementedError, match=rf"backend='{name}' does not serve .*: not today"):
        selection.select(FORWARD, problem, name)
    backends[name] = backend_double(name, reason="only if asked")
    assert selection.select(FORWARD, problem, name).backend == name


def test_unknown_backend(problem, tensors):
    with pytest.raises(ValueError, match="backend must be None or one of hopper, portable, cpu, got 'fast'"):
        selection.select(FORWARD, problem, "fast")
    for function in (flashtile.attention, flashtile.explain):
        with pytest.raises(ValueError, match="got 'fast'"):
            function(*tensors, backend="fast")


def test_cached_launch_of_one_backend_is_not_anothers(tensors, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    flashtile.attention(*tensors)
    flashtile.attention(*tensors, backend="cpu")
    with pytest.raises(NotImplementedError, match="backend='portable' does not serve"):
        flashtile.attention(*tensors, backend="portable")


def test_repeated_calls_neither_check_nor_dispatch(tensors, monkeypatch):
    """What makes a repeated call cheap: its launch is looked up."""
    q, k, v = (t.requires_grad_() for t in tensors)
    first = flashtile.attention(q, k, v, causal=True)
    torch.autograd.grad(first.sum(), (q, k, v))

    def never(*arguments):
        raise AssertionError("a repeated call came here")

    monkeypatch.setattr(operation, "select", never)
    for each in (FORWARD, BACKWARD):
        monkeypatch.setattr(each, "check", never)
    monkeypatch.setattr(Problem, "from_tensors", never)
    again = flashtile.attention(q, k, v, causal=True)
    assert torch.equal(again, first)
    torch.autograd.grad(again.sum(), (q, k, v))
    with torch.no_grad():
        flashtile.attention(q, k, v, causal=True)
    with pytest.raises(AssertionError, match="came here"):
        flashtile.attention(q, k, v, softmax_scale=0.123)


def test_explain_on_the_cpu(tensors, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    explanation = flashtile.explain(*tensors, causal=True)
    assert explanation.backend == "cpu"
    assert explanation.config == selection.load_part("cpu", FORWARD).configure_forward(explanation.problem)
    assert explanation.problem == Problem.from_tensors(*tensors, options=Options(masking=CAUSAL))
    assert list(explanation.reasons_against) == ["hopper", "portable"]
    assert "GPU" in explanation.reasons_against["portable"]


def test_explain_prints_what_matters(tensors, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    explanation = flashtile.explain(*tensors, causal=True, softcap=3.0)
    lines = explanation.details.splitlines()
    assert explanation.operations == ("forward", "backward")
    assert lines[:3] == ["forward", "backend: cpu", f"config: {explanation.config}"]
    assert lines[3].startswith("not hopper: ")
    assert lines[4].startswith("not portable: ")
    assert "softcap=3.0" in lines[5]
    assert "window_right=0" in lines[5]
    assert lines[7:9] == ["backward", "backend: cpu"]


REFUSED_ON_A_CPU = (
    "refused: hopper (its kernels run on NVIDIA's Hopper GPUs, not on cpu); "
    "portable (its kernels run on GPUs, not on cpu (TRITON_INTERPRET=1 interprets them))"
)


def test_explain_is_three_lines_on_the_cpu(tensors, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    fused, tiled = "cpu, torch's flash kernel", "cpu, online softmax over tiles in torch"
    first = "why: cpu is the first of the backends hopper, portable, cpu that serves this call on cpu"
    for options, kernel in (({}, fused), ({"softcap": 3.0}, tiled)):
        assert str(flashtile.explain(*tensors, **options)).splitlines() == [
            f"kernel: forward: {kernel}; backward: {kernel}", first, REFUSED_ON_A_CPU
        ]  # fmt: skip


def test_a_card_is_an_entry_of_the_table():
    q = torch.zeros(1, 8, 2, 16)
    for explain, arguments in (
        (flashtile.explain, (q, q, q)),
        (flashtile.linear.explain, (q[0, 0], q[0, 0])),
    ):
        with pytest.raises(TypeError, match=r"card must be one of flashtile\.io_model\.CARDS, got 'h100'"):
            explain(*arguments, card="h100")


def test_explain_is_three_lines_on_a_card():
    pytest.importorskip("triton")
    q = torch.zeros(2, 1024, 4, 64, dtype=torch.bfloat16)
    card = find_card("h100")

    def lines(*arguments, **options) -> list[str]:
        return str(flashtile.explain(*arguments, card=card, **options)).splitlines()

    found = flashtile.explain(q, q, q, card=card)
    m_forward, n_forward = found["forward"].config.BLOCK_M, found["forward"].config.BLOCK_N
    m_backward, n_backward = found["backward"].config.BLOCK_M, found["backward"].config.BLOCK_N
    assert lines(q, q, q) == [
        f"kernel: forward: hopper, tiles of {m_forward} x {n_forward}; "
        f"backward: hopper, tiles of {m_backward} x {n_backward}",
        "why: hopper is the first of the backends hopper, portable, cpu that serves this call "
        "on an H100 SXM5 80GB (sm_90)",
        "refused: nothing; hopper is the most preferred backend",
    ]
    masked = lines(q, q, q, mask=torch.ones(2, 4, 1024, 1024).bool())
    assert len(masked) == 3
    assert masked[2] == "refused: hopper (it has no mask)"
    config = flashtile.explain(q, q, q, mask=torch.ones(2, 4, 1024, 1024).bool(), card=card).config
    assert f"backward: portable, tiles of {config.dkdv.BLOCK_M} x {config.dkdv.BLOCK_N}" in masked[0]
    summed = lines(q, q, q, return_attn_weights=True)
    assert summed[2] == "refused: hopper for weights (it has no kernels for weights)"
    assert lines(q, q, q, backend="portable")[1:] == [
        "why: backend='portable' was requested",
        "refused: hopper (it could serve the call, but backend='portable' was requested)",
    ]
    cache = q.clone()
    decoding = lines(flashtile.flash_attn_with_kvcache, q[:, :1], q, cache)
    tile = flashtile.explain(flashtile.flash_attn_with_kvcache, q[:, :1], q, cache, card=card).config.tile
    assert decoding[0] == f"kernel: decode: portable, tiles of {tile.BLOCK_M} x {tile.BLOCK_N}"


def test_the_floor_of_packed_sequences_counts_tiles_of_all_heads_that_share_them():
    """10 tokens of seven heads have two tiles of 64 rows, eight a token, and 55 visible scores a head."""
    pytest.importorskip("triton")
    q = torch.empty(10, 14, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 10, "max_seqlen_k": 10}
    found = flashtile.explain(q, q[:, :2], q[:, :2], causal=True, card=find_card("h200"), **packed)
    forward, backward = found.floor([10]).splitlines()
    share = 14 * 55 / (2 * 2 * 64 * 64)
    assert f"; {share:.0%} of the scores in visited tiles of 64 x 64 are visible" in forward
    share = 14 * 55 / (14 * 64 * 128)
    assert f"; {share:.0%} of the scores in visited tiles of 64 x 128 are visible" in backward
    for wrong in ([9], [12, -2]):
        with pytest.raises(ValueError, match=r"lengths must be at least 0 and add up to the call's 10 "):
            found.floor(wrong)
    with pytest.raises(ValueError, match=r"packed sequences .* got \[10\] for a call without any"):
        flashtile.explain(q[None], q[None], q[None]).floor([10])
    assert found.floor(torch.tensor([4, 6])) == found.floor((4, 6))
    for wrong in ("46", 10, None, [4.5, 5.5], [4, "6"], torch.tensor([4.5, 5.5])):
        with pytest.raises(TypeError, match="lengths must be "):
            found.floor(wrong)
    more = torch.empty(11, 2, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=r"lengths are those of 10 queries, but the call has 11 keys"):
        flashtile.explain(q, more, more, **packed).floor([10])


def test_explain_of_a_tree_and_of_functions_that_it_cannot_explain():
    q, offsets = torch.randn(8, 4, 16), torch.tensor([0, 3, 8])
    tree = q, q, q, offsets, torch.tensor([-1, 0])
    assert flashtile.explain(flashtile.tree_attention, *tree).operations == ("forward", "backward")
    with pytest.raises(ValueError, match="a function that calls flashtile, got sin, which launches nothing"):
        flashtile.explain(torch.sin, q)
    with pytest.raises(ValueError, match="a function that calls flashtile, got sin, which launches nothing"):
        flashtile.linear.explain(torch.sin, q)
    with pytest.raises(TypeError, match="at most 3 positional arguments of attention, got 7: pass another"):
        flashtile.explain(q, q, q, offsets, offsets, 5, 5, causal=True)

    def reads(q):
        return flashtile.attention(q, q, q, softmax_scale=float(q.sum()))

    with pytest.raises(NotImplementedError, match="need no values of their tensors, got reads"):
        flashtile.explain(reads, q[None])


def test_explain_launches_nothing_and_keeps_nothing(tensors, monkeypatch):
    for each in (FORWARD, BACKWARD):
        monkeypatch.setattr(each, "launches", BoundedCache(CACHE_BYTES))
    backend = selection.load_part("cpu", FORWARD)
    monkeypatch.setattr(backend, "prepare_forward", None)
    flashtile.explain(*(t.requires_grad_() for t in tensors))
    assert not FORWARD.launches
    assert not BACKWARD.launches


def test_explain_refuses_what_the_call_refuses(tensors):
    q, k, v = tensors
    for bad, says in (
        ((q, k[..., :8], v), "head_dim"),
        ((q, k, v[:, 1:]), "v has"),
        ((q[:, :, :3], k, v), "q has"),
    ):
        for function in (flashtile.attention, flashtile.explain):
            with pytest.raises(ValueError, match=says):
                function(*bad)


@pytest.mark.parametrize("name", [None, *PREFERENCE])
def test_explain_agrees_with_the_call(tensors, monkeypatch, name):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    explanation = flashtile.explain(*tensors, backend=name)
    if explanation.backend is None:
        with pytest.raises(NotImplementedError):
            flashtile.attention(*tensors, backend=name)
    else:
        chosen = selection.select(FORWARD, explanation.problem, name)
        assert explanation.backend == chosen.backend
        flashtile.attention(*tensors, backend=name)


def test_explain_names_the_reason_against_an_explicit_backend(backends, tensors):
    backends["portable"] = backend_double("portable", explicit_reason="not today")
    backends["cpu"] = backend_double("cpu", reason="only if asked")
    explanation = flashtile.explain(*tensors, backend="portable")
    assert explanation.backend is None
    assert explanation.config is None
    assert explanation.reasons_against == {
        "hopper": "no such card",
        "portable": "not today",
        "cpu": "only if asked",
    }
    assert explanation.details.startswith("forward\nbackend: None")
    assert str(explanation).splitlines() == [
        "kernel: forward: none; backward: none",
        "why: backend='portable' was requested, and does not serve this call on cpu",
        "refused: hopper (no such card); portable (not today); cpu (only if asked)",
    ]


def test_explain_says_which_others_could(backends, tensors):
    backends["portable"], backends["cpu"] = backend_double("portable"), backend_double("cpu")
    explanation = flashtile.explain(*tensors)
    assert explanation.backend == "portable"
    assert explanation.reasons_against == {
        "hopper": "no such card",
        "cpu": "it could serve the call, but portable comes first",
    }
    explanation = flashtile.explain(*tensors, backend="cpu")
    assert explanation.backend == "cpu"
    assert explanation.reasons_against == {
        "hopper": "no such card",
        "portable": "it could serve the call, but backend='cpu' was requested",
    }


def test_explain_of_tensors_without_data(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with torch.device("meta"):
        q, k, v = (torch.zeros(2, 5, 4, 16, dtype=torch.float16) for _ in range(3))
    explanation = flashtile.explain(q, k, v)
    assert explanation.backend is None
    assert set(explanation.reasons_against) == set(PREFERENCE)
    assert all("meta" in reason for reason in explanation.reasons_against.values())


def test_explain_varlen():
    q, k, v = (torch.zeros(10, 4, 16) for _ in range(3))
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 7, "max_seqlen_k": 8}
    problem = flashtile.explain(q, k, v, **lengths).problem
    assert problem.varlen
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.total_q) == (2, 7, 8, 10)
    assert problem.lse_shape == (4, 10)


def test_explain_shows_every_operation_of_a_decoding_call(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    q, k = torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 2, 16)
    k_cache, v_cache = torch.zeros(2, 2, 9, 2, 16).unbind()
    call = (flashtile.flash_attn_with_kvcache, q, k_cache, v_cache)
    explanation = flashtile.explain(*call, k, k, cache_seqlens=3, num_splits=2)
    assert explanation.operations == ("append_kvcache", "decode")
    assert explanation.main is explanation["decode"]
    assert explanation.backend == "cpu"
    assert explanation["append_kvcache"].problem.seqlen_new == 1
    assert explanation.problem.num_splits == 2
    assert explanation.reasons_against["hopper"] == "its kernels run on NVIDIA's Hopper GPUs, not on cpu"
    assert not k_cache.any()
    with pytest.raises(ValueError, match="block_table must have shape"):
        flashtile.explain(*call, block_table=torch.zeros(3, 4, dtype=torch.int32))


@pytest.mark.parametrize(("card", "backend"), [("h100", "hopper"), ("a100", "portable"), ("v100", None)])
def test_explain_for_a_card_that_is_not_here(card, backend):
    """What the card would choose, and nothing of where the tensors happen to be."""
    pytest.importorskip("triton")
    q, k_cache = (torch.zeros(2, n, 4, 64, dtype=torch.bfloat16)[..., ::1] for n in (1, 9))
    card = find_card(card)
    odd = torch.zeros(2 * 5 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 5, 4, 64)  # no place for TMA
    explanation = flashtile.explain(odd, odd, odd, card=card)
    assert explanation["forward"].backend == explanation["backward"].backend == backend
    assert "TMA" not in str(explanation.reasons_against)
    decoding = flashtile.explain(flashtile.flash_attn_with_kvcache, q, k_cache, k_cache, card=card)
    assert decoding.backend == ("portable" if backend else None)
    if backend:
        assert decoding.config is not None
        assert explanation["backward"].config != explanation["forward"].config or backend == "portable"


def test_float64_is_for_the_cpu(tensors, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    explanation = flashtile.explain(*(t.double() for t in tensors), backend="portable")
    assert explanation.backend is None
    assert "float64" in explanation.reasons_against["portable"]
    assert flashtile.explain(*(t.double() for t in tensors)).backend == "cpu"


@pytest.mark.gpu
def test_explain_on_the_gpu():
    q, k, v = (torch.zeros(2, 5, 4, 16, device="cuda", dtype=torch.float16) for _ in range(3))
    explanation = flashtile.explain(q, k, v, causal=True)
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert explanation.backend == ("hopper" if on_hopper else "portable")
    assert "cuda" in explanation.reasons_against["cpu"]
    with pytest.raises(NotImplementedError, match="float64"):
        flashtile.attention(q.double(), k.double(), v.double())
    with pytest.raises(NotImplementedError, match="backend='cpu' does not serve"):
        flashtile.attention(q, k, v, backend="cpu")


@walk(
    ("tokens", "more", "backend", "reason"),
    [
        (8, {}, "hopper", None),
        (4, {}, "portable", "16 query rows of a key head fit"),
        (8, {"fp8": True}, "hopper", None),
        (8, {"fp8": True, "head_dim": 72}, "portable", "head_dim must be a multiple of 16"),
        (8, {"head_dim": 72}, "hopper", None),
        (8, {"head_dim": 20}, "portable", "head_dim must be a multiple of 8"),
        (8, {"head_dim": 320}, "portable", "no tile for head sizes"),
        (8, {"page_size": 1}, "hopper", None),
        (8, {"softmax_max": 2.0}, "hopper", None),
        (8, {"softmax_max": 2.0, "backend": "hopper"}, None, "softmax_max"),
    ],
)
def test_which_decoding_calls_are_hoppers(tokens, more, backend, reason):
    pages, heads_kv, head_dim = 10, 2, more.get("head_dim", 64)
    shape = pages, more.get("page_size", 16), heads_kv, head_dim
    dtype = torch.float8_e4m3fn if "fp8" in more else torch.bfloat16
    caches = torch.empty(2, *shape, dtype=torch.bfloat16).to(dtype)
    q = torch.empty(3, tokens, 4 * heads_kv, head_dim, dtype=torch.bfloat16)
    call = {"block_table": torch.zeros(3, 2, dtype=torch.int32), "cache_seqlens": 5, "causal": True}
    call |= {name: more[name] for name in ("softmax_max", "backend") if name in more}
    explanation = flashtile.explain(
        flashtile.flash_attn_with_kvcache, q, *caches, card=flashtile.io_model.CARDS["h100"], **call
    )
    assert explanation.backend == backend
    assert reason is None or reason in explanation.reasons_against["hopper"]


def test_caches_that_are_no_run_of_rows():
    q, cache = torch.empty(3, 8, 4, 64), torch.empty(10, 16, 2, 64)
    assert find_obstacle_in_cache(q, cache, cache) is None
    apart = torch.empty(10, 33, 64).as_strided((10, 16, 2, 64), (33 * 64, 128, 64, 1))
    reason = "a whole number of tokens between pages (or rows) for TMA, got strides (2112, 128, 64, 1)"
    assert find_obstacle_in_cache(q, cache, apart) == f"v_cache must have {reason}"
    many = torch.empty(2**27, 16, 2, 64, device="meta")
    assert "at most 1073741824 tokens for TMA, got 2147483648" in find_obstacle_in_cache(q, many, many)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_backend_is_imported(monkeypatch, enabled):
    """Not even if the import fails, and a program that collects nothing goes on with that."""
    states = []

    def imported(name, operation):
        states.append(gc.isenabled())
        raise ImportError(name)

    monkeypatch.setattr(selection, "load_part", imported)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError, match="hopper"):
            FORWARD.prepare((torch.randn(1, 16, 2, 64),) * 3, NO_EXTRAS, Options())
        assert states == [False]
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
