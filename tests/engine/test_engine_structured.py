"""Structured output: random weights write what a schema, an expression, a choice or a grammar allows."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
import threading
import types

import pytest
import torch
from engine_models import PAIRS_ENDS, folder_with_pairs

from flashtile.engine import LLM, AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams
from flashtile.engine.structure_trial import Trial, Vocabulary
from flashtile.engine.structured import MAX_CHARACTERS, Compiled, Structures, mask
from flashtile.engine.tokenizer import ByteTokenizer

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["red", "green"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with_pairs(tmp_path_factory.mktemp("structured"))


def load(folder, **options):
    return LLM(folder, load_format="dummy", device="cpu", block_size=4, warmup=False, **options)


@pytest.fixture(scope="module")
def llm(folder):
    return load(folder)


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    assert list(found) == ["name", "sizes", "kind"]
    assert len(found["name"]) <= 6
    assert found["kind"] in ("red", "green")
    assert len(found["sizes"]) <= 3
    return all(type(size) is int and 0 <= size < 100 for size in found["sizes"])


CHOICES = ["a (b)", "é☃ \n", 'say "no"', "c"]
KINDS = [
    ({"json": SCHEMA}, fits_schema),
    ({"json": json.dumps(SCHEMA)}, fits_schema),
    ({"regex": r"[0-9]{3}-(ab|cd){1,9}x"}, lambda text: re.fullmatch(r"[0-9]{3}-(ab|cd){1,9}x", text)),
    ({"choice": CHOICES, "json": None}, lambda text: text in CHOICES),
    (
        {"grammar": 'start: "(" start ")" | /[a-c]{2,4}/'},
        lambda text: re.fullmatch(r"\(*[a-c]{2,4}\)*", text),
    ),
    ({"grammar": 'start[capture]: "::=" /[a-c]{2}/'}, lambda text: re.fullmatch("::=[a-c]{2}", text)),
    (
        {"grammar": 'root ::= "SELECT " column ("," column)?\ncolumn ::= "col_" [1-3]\n'},
        lambda text: re.fullmatch(r"SELECT col_[1-3](,col_[1-3])?", text),
    ),
]


def params(structure, **options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 70, "seed": 1, **options}, structured_outputs=structure)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("structure", "fits"), KINDS)
def test_random_weights_write_what_is_allowed(llm, structure, fits, temperature):
    many = [params(structure, seed=i, temperature=temperature) for i in range(6)]
    for output in llm.generate(["one", "two", "three"] * 2, many):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop"
        assert fits(answer.text), answer.text


def test_objects_of_any_form(llm):
    for output in llm.generate(["one", "two"], [params({"json_object": True}, seed=i) for i in (1, 2)]):
        text = output.outputs[0].text
        assert text.startswith("{")
        assert output.outputs[0].finish_reason != "stop" or isinstance(json.loads(text), dict)


def texts(outputs) -> list[str]:
    return [answer.text for output in outputs for answer in output.outputs]


def tokens(outputs) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


FREE = SamplingParams(max_tokens=20, seed=7, ignore_eos=True)
PROMPTS = ["one", "free one", "two", "free two", "three"]
MIXED = [params({"json": SCHEMA}), FREE, params({"choice": CHOICES}), FREE, params({"regex": "[ab]{30}"})]


@pytest.fixture(scope="module")
def alone(llm):
    """The answers to ``MIXED`` when each request has the engine to itself."""
    return [tokens(llm.generate(prompt, one))[0] for prompt, one in zip(PROMPTS, MIXED, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"async_scheduling": True}, {"max_num_batched_tokens": 5, "max_num_seqs": 5},
        {"speculative_config": {"method": "ngram"}},
        {"num_gpu_blocks_override": 20}, {"num_gpu_blocks_override": 20, "swap_space": 0.001},
    ],
)  # fmt: skip
def test_a_batch_changes_no_answer(folder, alone, options):
    """With and without a structure, also in chunks, after a preemption and next to guesses."""
    found = load(folder, enable_prefix_caching=False, **options)
    assert tokens(found.generate(PROMPTS, MIXED)) == alone
    assert (found.get_metrics().num_preemptions > 0) == ("num_gpu_blocks_override" in options)


def test_several_answers_to_a_prompt(llm):
    (output,) = llm.generate("one", params({"json": SCHEMA}, n=4))
    found = texts([output])
    assert all(map(fits_schema, found))
    assert len(set(found)) == 4


def test_a_stream_ends_with_the_structure(llm, alone):
    engine = llm.engine
    one = params({"json": SCHEMA}, output_kind=RequestOutputKind.DELTA)
    request = engine.add_request("a", "one", one)
    answers = []
    while engine.has_unfinished:
        answers += [output.outputs[0] for output in engine.step()]
    assert [token for answer in answers for token in answer.token_ids] == alone[0]
    assert fits_schema("".join(answer.text for answer in answers))
    assert (answers[-1].finish_reason, answers[-1].stop_reason) == ("stop", None)
    assert request.sequences[0].matcher is None


@pytest.mark.parametrize("end", PAIRS_ENDS)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_ends_only_where_its_text_matches(llm, end, ignore_eos):
    wanted = params({"regex": "ab{2,5}"}, logit_bias={end: 100}, ignore_eos=ignore_eos)
    (output,) = llm.generate("one", wanted)
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids[-1], answer.finish_reason) == ("abb", end, "stop")
    (output,) = llm.generate("one", params({"regex": "ab{2,5}"}, logit_bias={end: 100}, min_tokens=9))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abbbbb", "stop")


def test_parameters_of_sampling_hold_within_the_structure(llm):
    token = llm.get_tokenizer().encode
    (b,), (z,) = token("b"), token("z")
    found = llm.generate("one", params({"regex": "[ab]{8}"}, logit_bias={b: 50, z: 100}))
    assert texts(found) == ["bbbbbbbb"]
    (output,) = llm.generate("one", params({"regex": "[ab]{8}"}, allowed_token_ids=[z]))
    assert output.outputs[0].finish_reason == "error"
    assert "no token is left" in output.outputs[0].stop_reason
    (output,) = llm.generate("one", params({"regex": "[ab]{9}"}, max_tokens=2))
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm.generate("one", params({"regex": "[ab]+c[ab]+"}, stop="c"))
    assert re.fullmatch("[ab]+", output.outputs[0].text)


MARKERS = ["<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"]


@pytest.fixture(scope="module", params=["text", "tokens"])
def thinker(folder, tmp_path_factory, request):
    """A model whose tokenizer knows the markers of reasoning as tokens, or has only their text."""
    if request.param == "text":
        return load(folder)
    path = shutil.copytree(folder, tmp_path_factory.mktemp("thinker") / "model")
    loaded = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path / "tokenizer.json"))
    loaded.add_special_tokens(MARKERS)
    loaded.save(str(path / "tokenizer.json"))
    return load(path)


def writing(llm, text, structure, **options):
    """Parameters with which random weights write this text as far as the structure allows it."""
    tokens = [*llm.get_tokenizer().encode(text, False), *PAIRS_ENDS[:1]]

    def prefer(before, logits):
        wanted = tokens[min(len(before), len(tokens) - 1)]
        return logits.index_fill_(0, torch.tensor([wanted]), 1e9)

    return params(structure, temperature=0, logits_processors=[prefer], skip_special_tokens=False, **options)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("think", "<think>Is {it} c?</think>abba"),
        ("think", "<think>\n\n</think>\n\nabba"),
        ("think", "abba"),
        ("begun", "Is {it} c?</think>\n\nabba"),
        (None, "abba"),
    ],
)
def test_reasoning_comes_before_the_structure(thinker, form, text):
    structure = {"regex": "[ab]{4}", "reasoning": form}
    (output,) = thinker.generate("one", writing(thinker, text, structure))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    ("form", "text"),
    [("think", "<think>a</think>no"), ("begun", "a</think>no"), (None, "<think>a</think>abba")],
)
def test_reasoning_of_another_form_is_not_allowed(thinker, form, text):
    (output,) = thinker.generate("one", writing(thinker, text, {"regex": "[ab]{4}", "reasoning": form}))
    answer = output.outputs[0]
    assert re.fullmatch("(?s:.*</think>)?" * (form is not None) + "[ab]{4}", answer.text)
    assert (answer.text.startswith(text), answer.finish_reason) == (False, "stop")


def test_the_messages_of_harmony_come_before_the_structure(thinker):
    is_known = len(thinker.get_tokenizer().encode(MARKERS[-1], False)) == 1
    begin = "<|channel|>analysis<|message|>Is {it} c?<|end|><|start|>assistant"
    structure = {"json": SCHEMA, "reasoning": "harmony"}
    if not is_known:
        with pytest.raises(ValueError, match="structured_outputs must have a valid json, got"):
            thinker.generate("one", params(structure))
        return
    for before in ("", begin, 2 * begin):
        wanted = before + '<|channel|>final<|message|>{"name": "a", "sizes": [1], "kind": "red"}'
        (output,) = thinker.generate("one", writing(thinker, wanted, structure, max_tokens=150))
        assert output.outputs[0].text.startswith(before + "<|channel|>final<|message|>")
        assert fits_schema(output.outputs[0].text.split("<|message|>")[-1])


def test_unknown_forms_of_reasoning_are_refused():
    with pytest.raises(ValueError, match="one of think, begun, harmony as reasoning, got 'loud'"):
        params({"regex": "a", "reasoning": "loud"})
    with pytest.raises(ValueError, match="structured_outputs must be a dict with one of json"):
        params({"reasoning": "think"})


def test_log_probabilities_are_those_without_the_structure(llm):
    free, bound = (
        llm.generate("one", SamplingParams(max_tokens=1, temperature=0, logprobs=-1, structured_outputs=one))
        for one in (None, {"regex": "b"})
    )
    free, bound = (found[0].outputs[0].logprobs[0] for found in (free, bound))
    assert {token: one.logprob for token, one in free.items()} == pytest.approx(
        {token: one.logprob for token, one in bound.items()}
    )


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": {"type": "nonsense"}}, "structured_outputs must have a valid json, got .*nonsense"),
        ({"json": {"$ref": "#/none"}}, "structured_outputs must have a valid json, got .*/none"),
        ({"regex": "(["}, "structured_outputs must have a valid regex, got '..': .*unclosed"),
        ({"grammar": "start: nothing"}, "structured_outputs must have a valid grammar, got .*nothing"),
        ({"grammar": "start: " + "(" * 9999}, "structured_outputs must have a valid grammar"),
        ({"grammar": "nothing"}, "structured_outputs must have a valid grammar, got 'nothing': "),
        ({"grammar": "root ::= x"}, "must have a valid grammar in GBNF, got 'root ::= x': .* 'x'"),
        ({"grammar": "\n" * 60000 + "root ::= x"}, "must have a valid grammar in GBNF"),
        ({"grammar": "root ::= " + "(" * 9999}, "structured_outputs must have a valid grammar"),
        ({"choice": ["a" * MAX_CHARACTERS, "b"]}, "structured_outputs must have at most 65536 characters"),
    ],
)
def test_bad_structures_are_refused_in_a_line(llm, structure, message):
    with pytest.raises(ValueError, match=message) as caught:
        llm.generate("one", params(structure))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert llm.engine.requests == {}
    assert not llm.engine.has_unfinished


def test_a_structure_that_becomes_too_complex_ends_its_own_request_alone(llm):
    bad, good = llm.generate(
        ["one", "two"], [params({"regex": "(a{1000}){1000}"}), params({"regex": "[ab]{3}"})]
    )
    assert bad.outputs[0].finish_reason == "error"
    assert "structured_outputs could not be continued: " in bad.outputs[0].stop_reason
    assert re.fullmatch("[ab]{3}", good.outputs[0].text)


def test_a_structure_is_compiled_once(llm):
    """Also one that is refused, each time by an error of its own."""
    structures, errors = llm.engine.structures, []
    first = structures.matcher({"regex": "compiled once"})
    assert structures.matcher({"choice": ["compiled once"]}) is not first
    assert structures.matcher({"regex": "compiled once"}) is first
    bad = structures.compile({"regex": "(never"})
    for _ in range(2):
        assert structures.compile({"regex": "(never"}) is bad
        with pytest.raises(ValueError, match="valid regex") as caught:
            structures.matcher({"regex": "(never"})
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_a_slow_structure_ends_its_own_request_alone(llm, monkeypatch):
    structures, released = llm.engine.structures, threading.Event()
    known = structures.matcher({"regex": "known"})

    def slow(structure, kind, text, reasoning, size):
        assert released.wait(60)
        return Compiled((text, threading.current_thread().daemon), 0)

    monkeypatch.setattr(structures, "_compile", slow)
    monkeypatch.setattr("flashtile.engine.async_llm.MAX_SECONDS", 0.1)

    async def ask():
        engine = AsyncLLM(llm.engine)
        try:
            await engine.add_request("slow", "one", params({"regex": "slow"}))
        finally:
            await engine.shutdown()

    late = r"structured_outputs must be compiled within 0\.1 s, after .*, got {'regex': 'slow'}"
    try:
        with pytest.raises(ValueError, match=late):
            structures.matcher({"regex": "slow"}, 0.1)
        with pytest.raises(ValueError, match=late):
            asyncio.run(asyncio.wait_for(ask(), 60))
        assert structures.matcher({"regex": "known"}, 0.0) is known
        assert not structures.compile({"regex": "slow"}).cancel()  # others may wait for it
    finally:
        released.set()
    assert structures.matcher({"regex": "slow"}, None) == ("slow", True)


MULTIPLE = {"json": {"type": "integer", "multipleOf": 999983}}
"""A structure that takes llguidance a minute."""


def test_other_structures_do_not_wait_for_a_slow_one(llm, monkeypatch):
    structures, released = llm.engine.structures, threading.Event()
    quick, slow = structures._trials
    monkeypatch.setattr(quick, "seconds", 0.1)
    monkeypatch.setattr(slow, "bytes_of", lambda grammar: None if released.wait(60) else 0)
    compiling = structures.compile(MULTIPLE)
    try:
        for i in range(3):
            assert structures.matcher({"choice": [f"another {i}"]}, 60) is not None
        assert not compiling.done()
    finally:
        released.set()
    with pytest.raises(ValueError, match=r"must be compiled within 10\.0 s, .*multipleOf"):
        structures.matcher(MULTIPLE, 60)


def test_a_structure_that_waits_too_long_is_refused_once(llm, monkeypatch):
    """It may be compiled later, when fewer others wait."""
    structures, waiting = llm.engine.structures, {"regex": "waits too long"}
    monkeypatch.setattr("flashtile.engine.structured.MAX_SECONDS", 0.01)
    with structures._trials[0].lock, pytest.raises(ValueError, match=r"within 0\.01 s, after the structures"):
        structures.matcher(waiting, 60)
    assert structures.matcher(waiting, 60) is not None


def test_a_trial_ends_at_its_limit_and_survives_its_process():
    """With the bytes that compiling takes, whether or not llguidance accepts the grammar."""
    vocabulary = Vocabulary([bytes([i]) for i in range(256)], 256, [0])
    trial = Trial(lambda: vocabulary, 0.1)
    small = '{"grammars": [{"lark_grammar": "start: /[ab]+/"}]}'
    assert 0 < trial.bytes_of(small) < 2**25
    assert trial.bytes_of("no grammar") >= 0
    assert trial.bytes_of(json.dumps({"grammars": [{"json_schema": MULTIPLE["json"]}]})) is None
    assert trial.bytes_of(small) > 0
    trial._process.kill()
    assert trial.bytes_of(small) is None
    assert trial.bytes_of(small) > 0


def test_structures_that_are_kept_have_few_bytes(folder, monkeypatch):
    structures = load(folder).engine.structures
    many = [{"regex": f"kept {i}"} for i in range(6)]
    found = [structures.matcher(one, 60) for one in many]
    (size,) = {structures.compile(one).result().size // 2**24 for one in many}
    assert size == 0
    total = sum(structures.compile(one).result().size for one in many[3:])
    monkeypatch.setattr("flashtile.engine.structured.MAX_KEPT_BYTES", total)
    structures.matcher(many[2], 60)  # now the one that was used last
    assert len(structures._kept) == 6
    structures.matcher({"regex": "one more"}, 60)
    assert len(structures._kept) <= 3
    assert structures.matcher(many[2], 60) is found[2]
    assert structures.matcher(many[0], 60) is not found[0]


def test_other_processes_compile_a_structure_at_the_same_time(folder, monkeypatch):
    """They begin after the trial, before the first process has it, and long before a step needs it."""
    first, other = load(folder), load(folder)
    begun, order = threading.Event(), []
    compile_first, compile_other = first.engine.structures._matcher, other.engine.structures._compile

    def wait(*structure):
        assert begun.wait(20)
        return compile_first(*structure)

    def begin(*structure):
        begun.set()
        return compile_other(*structure)

    def repeat(name, arguments, options):
        order.append(name)
        getattr(other.engine, name)(*arguments, **options)

    monkeypatch.setattr(first.engine.structures, "_matcher", wait)
    monkeypatch.setattr(other.engine.structures, "_compile", begin)
    first.engine.on_change = repeat

    async def ask():
        server, texts = AsyncLLM(first.engine), []
        try:
            for request_id in "ab":  # the second request finds the structure compiled
                outputs = server.generate("one", params({"regex": "[ab]{3}"}), request_id)
                texts.append([output async for output in outputs][-1].outputs[0].text)
        finally:
            await server.shutdown()
        return texts

    assert all(re.fullmatch("[ab]{3}", text) for text in asyncio.run(asyncio.wait_for(ask(), 60)))
    assert order[:2] == ["compile_structure", "add_request"]
    assert order.count("compile_structure") == 1
    assert not other.engine.requests


@pytest.mark.parametrize("ends", [[7], [7, 300], [], [300]])
def test_structures_of_bytes(ends):
    """Texts are bytes, and an answer may end where it matches. End tokens without logits are ignored."""
    structures = Structures(ByteTokenizer(), 256, ends)
    matcher, other = (structures.matcher({"regex": "ab?☃"}).deep_copy() for _ in range(2))
    expected = [{ord("a")}, {ord("b"), *"☃".encode()[:1]}, *({byte} for byte in "☃".encode()[1:])]
    for token, allowed in zip(b"a" + "☃".encode(), expected, strict=True):
        # Rows without a structure allow all tokens. Several structures are masked by threads.
        for matchers in ([(matcher, 1)], [(matcher, 1), (other, 2)]):
            logits, _ = mask(torch.arange(3.0 * 256).view(3, 256), matchers)
            assert set(logits[1].isfinite().nonzero().flatten().tolist()) == allowed
            finite = logits.isfinite()
            assert torch.equal(logits[finite], torch.arange(3.0 * 256).view(3, 256)[finite])
            assert finite[0].all()
            assert finite[2].sum() == (256 if len(matchers) == 1 else 1)
        assert matcher.consume_token(token)
    allowed = mask(torch.zeros(1, 256), [(matcher, 0)])[0].isfinite().nonzero()[:, 1].tolist()
    assert allowed == [end for end in ends if end < 256]


class PanicException(BaseException):
    """A panic of Rust code arrives as an exception that is no Exception."""


class Panics:
    """A matcher that panics in its function ``name``, and otherwise allows each token."""

    def __init__(self, name: str):
        self.name = name

    def unsafe_compute_mask_ptr(self, address, size):
        self.run("unsafe_compute_mask_ptr")

    def consume_token(self, token):
        self.run("consume_token")

    def run(self, name):
        if name == self.name:
            raise PanicException("index out of bounds")


@pytest.mark.parametrize("name", ["unsafe_compute_mask_ptr", "consume_token"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_panic_of_a_matcher_ends_one_request(llm, name, alone):
    """The masks of several matchers are computed in one call, whose error does not tell which one failed."""
    others = {} if alone else {"bound": params({"regex": "[ab]{9}"})}
    others["free"] = FREE
    expected = {key: llm.generate("one", one)[0].outputs[0].token_ids for key, one in others.items()}
    engine, ends = llm.engine, {}
    for key, one in others.items():
        engine.add_request(key, "one", one)
    engine.add_request("fails", "two", params({"regex": "a"})).sequences[0].matcher = Panics(name)
    while engine.has_unfinished:
        ends |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    assert (ends["fails"].finish_reason, ends["fails"].stop_reason) == (
        "error",
        "PanicException: index out of bounds",
    )
    assert {key: ends[key].token_ids for key in others} == expected


@pytest.mark.parametrize("good", [0, 1])
def test_a_matcher_that_cannot_be_copied_is_refused(llm, good, monkeypatch):
    """Answers fork within a step, which other requests share, so their matchers are copied before."""
    engine, found = llm.engine, [Panics("none") for _ in range(good)]
    matcher = types.SimpleNamespace(deep_copy=lambda: found.pop() if found else Panics("copy").run("copy"))
    expected = llm.generate("one", FREE)[0].outputs[0].token_ids
    engine.add_request("goes on", "one", FREE)
    with monkeypatch.context() as patch:
        patch.setattr(engine.structures, "matcher", lambda *_: matcher)
        with pytest.raises(NotImplementedError, match="llguidance: index out of bounds"):
            engine.add_request("fails", "two", params({"regex": "a"}, n=2))
    ends = {}
    while engine.has_unfinished:
        ends |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    assert {key: output.token_ids for key, output in ends.items()} == {"goes on": expected}
    assert engine.scheduler.manager.sequences == ()


def test_a_fault_of_the_compiler_is_raised(llm, monkeypatch):
    def fails(*structure):
        raise KeyError("a fault")

    monkeypatch.setattr(llm.engine.structures, "_compile", fails)
    with pytest.raises(KeyError, match="a fault"):
        llm.engine.structures.matcher({"regex": "a fault"})


def test_threads_that_start_later_have_a_stack_of_usual_size(llm):
    usual = threading.stack_size(2**21)
    try:
        llm.engine.structures.matcher({"regex": "usual stacks"})
        assert threading.stack_size() == 2**21
    finally:
        threading.stack_size(usual)


def test_a_long_chain_of_references_is_compiled(llm):
    """It would overflow a stack of usual size."""
    count = 1200
    chain = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)}
    schema = {"$defs": {**chain, f"a{count}": {"type": "null"}}, "$ref": "#/$defs/a0"}
    output = llm.generate("one", params({"json": schema}, max_tokens=3))[0]
    assert len(output.outputs[0].token_ids) > 0


def test_what_structures_need(llm, folder, monkeypatch):
    bare = LLM(folder, load_format="dummy", device="cpu", warmup=False, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="structured_outputs must be None without a tokenizer"):
        bare.generate([[1, 2]], params({"regex": "a"}))
    with pytest.raises(NotImplementedError, match="structured_outputs is not supported"):
        BeamSearchParams(2, 4, structured_outputs={"regex": "a"})
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(NotImplementedError, match=re.escape("pip install 'flashtile[engine]'")):
        llm.generate("one", params({"regex": "not compiled yet"}))


def test_a_tokenizer_that_llguidance_cannot_read_is_refused(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    words = tokenizers.models.WordLevel({"a": 0, "</s>": 1, "b": 2}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    found = load(tmp_path)
    with pytest.raises(NotImplementedError, match="structured_outputs failed in llguidance: "):
        found.generate("a", params({"regex": "ab"}))
    assert len(found.generate("a", FREE)) == 1
