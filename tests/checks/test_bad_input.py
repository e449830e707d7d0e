"""Bad calls raise an error that names the argument, what it got and what is allowed; nothing is launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bad_calls import CALLS, FUNCTIONS, good

import flashtile
from flashtile.caches import BoundedCache
from flashtile.op import selection
from flashtile.op.operation import CACHE_BYTES, SIGNATURE_BYTES, reads_values
from flashtile.operators.attention import BACKWARD, FORWARD

pytestmark = pytest.mark.quick


class Recorder:
    """In place of the CPU backend: notes what was launched."""

    NAME = "cpu"

    def __init__(self):
        self.launched = []

    def reason_against(self, problem, explicit):
        return None if problem.device.type == "cpu" else "not on the CPU"

    def prepare_forward(self, problem, config):
        def launch(*tensors):
            self.launched.append(problem)
            return torch.zeros(problem.out_shape, dtype=problem.dtype), torch.zeros(problem.lse_shape)

        return launch


@pytest.fixture
def launched(monkeypatch):
    """What was launched, on empty caches."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # on which the portable backend serves the CPU
    recorder, load = Recorder(), selection.load_part
    monkeypatch.setattr(
        selection, "load_part", lambda name, operation: recorder if name == "cpu" else load(name, operation)
    )
    for operation in (FORWARD, BACKWARD):
        monkeypatch.setattr(operation, "launches", BoundedCache(CACHE_BYTES))
    return recorder.launched


def test_a_mask_of_keys_alone_is_called_a_mask():
    q, mask = torch.zeros(2, 5, 2, 8), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"^mask must be bool, got torch\.float32.* bias"):
        flashtile.attention(q, q, q, mask=mask.float())
    with pytest.raises(ValueError, match=r"^mask is on meta"):
        flashtile.attention(q, q, q, mask=mask.to("meta"))
    with pytest.raises(TypeError, match=r"^q must be a torch\.Tensor, got str"):
        flashtile.attention("q", q, q, mask=mask)
    q = q.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match=r"^mask must be left out"):
        flashtile.attention(q, q, q, mask=mask)


def requires_grad(arguments):
    """The same call with a gradient wanted, where its tensors can have one."""

    def wanted(name, value):
        return (
            name in ("q", "kv", "qkv", "out_a")
            and isinstance(value, torch.Tensor)
            and value.is_floating_point()
        )

    return {
        name: value.detach().requires_grad_() if wanted(name, value) else value
        for name, value in arguments.items()
    }


def assert_refused(call, function, arguments):
    with pytest.raises(call.error) as caught:
        FUNCTIONS[function](**arguments)
    assert type(caught.value) is call.error
    for word in call.words:
        # A packed function's argument goes by its own name, or by those of its parts.
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def test_there_are_hundreds():
    assert len({(function, call.name) for call in CALLS for function in call.functions}) >= 600
    assert len({call.name for call in CALLS}) >= 250


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_good_call_passes(function, launched):
    FUNCTIONS[function](**good(function))
    assert len(launched) == (function != "merge_states")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_calls_are_refused(function, launched, subtests):
    """With and without gradients, before and after a good call has left its launch in the cache."""
    calls = [call for call in CALLS if function in call.functions]
    assert calls
    for call in calls:
        with subtests.test(call.name):
            FORWARD.launches.clear()
            arguments = good(function) | call.changes
            for _ in range(2):
                assert_refused(call, function, arguments)
                assert_refused(call, function, requires_grad(arguments))
                if call.words[1] != "no gradient":
                    with torch.no_grad():
                        assert_refused(call, function, arguments)
                assert not launched
                FUNCTIONS[function](**good(function))
                launched.clear()


TRACED = ("attention", "attention varlen", "merge_states")


def one_of_each_refusal():
    """For each argument, of what tracing can tell apart; which error it is, eager calls show."""
    chosen = {}
    for function in TRACED:
        for call in CALLS:
            if function in call.functions:
                kind = (next(iter(call.changes)), call.on_data, call.untraceable)
                chosen.setdefault(kind, (function, call))
    return list(chosen.values())


def every_refusal():
    """make test has one of each function and type of argument."""
    seen = set()
    for function, call in one_of_each_refusal():
        kind = (function, type(next(iter(call.changes.values()))), call.on_data, call.untraceable)
        marks = (pytest.mark.thorough,) if kind in seen else ()
        seen.add(kind)
        yield pytest.param(function, call, id=f"{function}-{call.name}", marks=marks)


@pytest.mark.parametrize(("function", "call"), list(every_refusal()))
def test_refused_when_compiled(function, call, launched):
    """The error has the same words when torch.compile traces the call, also if torch wraps it in its own."""
    torch._dynamo.reset()
    arguments = good(function) | call.changes
    compiled = torch.compile(lambda arguments: FUNCTIONS[function](**arguments), backend="eager")
    with pytest.raises((TypeError, ValueError, RuntimeError, AssertionError)) as caught:
        compiled(arguments)
    if not call.untraceable:
        for word in call.words:
            assert word in str(caught.value)
    assert not launched


def test_equal_hashes_do_not_let_a_bad_call_through(launched, subtests):
    """True == 1 == 1.0, so a dictionary finds the launch of one under another."""
    arguments = good("attention")
    for name, right, wrong in (
        ("causal", True, 1),
        ("causal", True, 1.0),
        ("causal", False, 0),
        ("deterministic", True, 1),
        ("deterministic", False, 0.0),
        ("softcap", 1.0, True),
        ("softcap", 0.0, False),
        ("softmax_scale", 1.0, True),
        ("softmax_scale", 0.0, False),
        ("window_size", (1, 0), (1.0, 0)),
        ("window_size", (1, 0), (True, False)),
        ("window_size", (-1, -1), (-1.0, -1)),
    ):
        with subtests.test(f"{name}={wrong}"):
            FORWARD.launches.clear()
            for _ in range(2):
                flashtile.attention(**arguments, **{name: right})
            launched.clear()
            with pytest.raises(TypeError, match=f"^{name}"):
                flashtile.attention(**arguments, **{name: wrong})
            assert not launched


def test_equal_lengths_do_not_let_a_bad_call_through(launched):
    arguments = good("attention varlen") | {"max_seqlen_q": 5}
    flashtile.attention(**arguments)
    launched.clear()
    with pytest.raises(TypeError, match=r"max_seqlen_q must be an int, got float 5\.0"):
        flashtile.attention(**arguments | {"max_seqlen_q": 5.0})
    assert not launched


def test_equal_options_share_one_launch(launched, monkeypatch):
    """Different ways to say the same make one cache entry."""
    arguments = good("attention")
    for softcap in (0.0, -0.0, 0):
        for window_size in ((-1, -1), [-1, -1], torch.tensor([-1, -1])):
            flashtile.attention(**arguments, softcap=softcap, window_size=window_size)
    assert len(launched) == 9
    assert len(FORWARD.launches) == 1


def test_cached_launches_see_every_change_of_a_tensor(launched):
    """What a launch was prepared for is in its key: shape, strides, dtype, device, alignment."""
    storage = torch.zeros(2 * 5 * 4 * 16 + 8)
    tensors = {
        "shape": torch.zeros(2, 6, 4, 16),
        "strides": torch.zeros(2, 4, 5, 16).transpose(1, 2),
        "alignment": storage[1 : 1 + 2 * 5 * 4 * 16].view(2, 5, 4, 16),
    }
    _, k, v = good("attention").values()
    flashtile.attention(torch.zeros(2, 5, 4, 16), k, v)
    for entries, q in enumerate(tensors.values(), 2):
        for _ in range(2):
            flashtile.attention(q, k, v)
        assert len(FORWARD.launches) == entries
    flashtile.attention(*(t.half() for t in (tensors["shape"], k, v)))
    assert len(FORWARD.launches) == entries + 1


def test_the_cache_is_bounded(launched, monkeypatch):
    monkeypatch.setattr(FORWARD, "launches", BoundedCache(3 * SIGNATURE_BYTES))
    _, k, v = good("attention").values()
    for seqlen in (1, 2, 3, 4, 5, 1):
        flashtile.attention(torch.zeros(2, seqlen, 4, 16), k, v)
        assert 1 <= len(FORWARD.launches) <= 3
    assert len(launched) >= 5


def test_data_checks_on_request(monkeypatch):
    """FLASHTILE_DEBUG=1 reads the lengths on a GPU too; on the CPU they are always read."""
    monkeypatch.delenv("FLASHTILE_DEBUG", raising=False)
    on_gpu = SimpleNamespace(is_cuda=True)
    assert reads_values(torch.zeros(1))
    assert not reads_values(on_gpu)
    assert reads_values(on_gpu, debug_checks=True)
    monkeypatch.setenv("FLASHTILE_DEBUG", "1")
    assert reads_values(on_gpu)


@pytest.mark.gpu
def test_lengths_are_checked_on_the_gpu_on_request(monkeypatch):
    arguments = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in good("attention varlen").items()
    }
    monkeypatch.setenv("FLASHTILE_DEBUG", "1")
    flashtile.attention(**arguments)
    arguments["cu_seqlens_q"] = torch.tensor([0, 4, 3], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease"):
        flashtile.attention(**arguments)
    arguments["cu_seqlens_q"] = torch.tensor([0, 5, 10], dtype=torch.int32, device="cuda")
    arguments["seqused_k"] = torch.tensor([7, 8], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match="seqused_k must be from 0 to the 7 keys of sequence 1, got 8"):
        flashtile.attention(**arguments)


EXTRA = {
    "seqused_k": torch.tensor([7, 7], dtype=torch.int32),
    "alibi_slopes": torch.zeros(4),
    "sink": torch.zeros(4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *EXTRA])
def test_mixed_devices(name):
    arguments = good("attention varlen") | EXTRA
    other = torch.device("cpu")
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor) and argument != name:
            arguments[argument] = value.cuda()
    stays = "k" if name == "q" else name
    message = "is on cuda:0, not on cpu" if name == "q" else f"is on {other}, not on cuda:0"
    with pytest.raises(ValueError, match=f"{stays} {message}"):
        flashtile.attention(**arguments)
