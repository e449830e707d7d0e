"""Texts: tokenizers, stop texts, streaming, chat, the folder of a trained byte model, the command."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from engine_models import folder
from jinja2 import TemplateError
from typer.testing import CliRunner

from flashtile.cli import application
from flashtile.engine import LLM, ConfigError, RequestOutputKind, SamplingParams
from flashtile.engine.detokenizer import Detokenizer
from flashtile.engine.templates import Account, render
from flashtile.engine.tokenizer import END_MARK, PIECE, SHORT, ByteTokenizer, load_tokenizer
from flashtile.tools.demo.llama import Llama, save_llama, sized
from walk import walk

pytestmark = pytest.mark.quick

PARAMS = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory):
    """A model of bytes that writes the alphabet, made by hand: each letter's embedding points to the next."""
    torch.manual_seed(0)
    model = Llama(sized(1, 2, 256))
    letters = torch.arange(256)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.dim() == 2:
                parameter.zero_()
        model.embed_tokens.weight.copy_(torch.eye(256))
        model.lm_head.weight = torch.nn.Parameter(torch.eye(256)[(letters - 1) % 256])
    path = tmp_path_factory.mktemp("bytes")
    save_llama(model, path, 128)
    return path


@pytest.fixture(scope="module")
def llm(bytes_folder):
    return LLM(bytes_folder, device="cpu", block_size=4)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A folder with a tokenizer of pairs that marks spaces and falls back to bytes, as Llama 2's does."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("words")
    text = ["the quick brown fox jumps over the lazy dog and runs away from it all day long"] * 4
    loaded = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    loaded.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    loaded.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    loaded.train_from_iterator(
        text,
        tokenizers.trainers.BpeTrainer(vocab_size=320, special_tokens=special[:3], initial_alphabet=["▁"]),
    )
    content = json.loads(loaded.to_str())
    vocabulary = content["model"]["vocab"]
    for token in special:
        vocabulary.setdefault(token, len(vocabulary))
    loaded = tokenizers.Tokenizer.from_str(json.dumps(content))
    loaded.save(str(path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}[a]{% endif %}"
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def test_the_byte_model_writes_the_alphabet(llm):
    (output,) = llm.generate("xyzabc", SamplingParams(temperature=0, max_tokens=5))
    assert (output.prompt, output.outputs[0].text) == ("xyzabc", "defgh")
    assert output.outputs[0].token_ids == list(b"defgh")


@walk(
    ("options", "text", "reason", "stop"),
    [
        ({"stop": "gh"}, "def", "stop", "gh"),
        ({"stop": ["zz", "hi", "gh"]}, "def", "stop", "gh"),
        ({"stop": "gh", "include_stop_str_in_output": True}, "defgh", "stop", "gh"),
        ({"stop": "gh", "min_tokens": 10}, "defghijklmnopqrstuvwxyz{", "length", None),
        ({"stop_token_ids": [ord("h")]}, "defg", "stop", ord("h")),
        ({"stop_token_ids": [ord("h")], "include_stop_str_in_output": True}, "defgh", "stop", ord("h")),
        ({"detokenize": False, "max_tokens": 3}, "", "length", None),
    ],
)
@walk("kind", RequestOutputKind)
@walk("overlapped", [False, True])
def test_stop_texts_and_streams(llm, kind, overlapped, options, text, reason, stop):
    """What comes bit by bit is what comes at once, and nothing has to be taken back."""
    engine = llm.engine
    engine.overlap = overlapped
    engine.add_request("a", "abc", SamplingParams(**{**PARAMS, **options, "output_kind": kind}))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    answers = [output.outputs[0] for output in outputs]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert (answers[-1].finish_reason, answers[-1].stop_reason) == (reason, stop)
    if kind is RequestOutputKind.DELTA:
        assert "".join(answer.text for answer in answers) == text
        assert sum(len(answer.token_ids) for answer in answers) >= len(text)
    else:
        assert answers[-1].text == text
        assert all(text.startswith(answer.text) for answer in answers)
    assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1
    assert len(outputs) > 1 or kind is RequestOutputKind.FINAL_ONLY


def test_texts_are_too_long_only_where_they_are(words):
    """Whatever they are of, and wherever they are cut to be counted; little of them is read."""
    for tokenizer in (load_tokenizer(words), ByteTokenizer()):
        for text in ("the quick brown fox ", " ", "🦊"):
            most = 300
            long = text * (2 * PIECE // len(text))
            count = len(tokenizer.encode(long))
            assert tokenizer.is_longer(long, most)
            assert not tokenizer.is_longer(long, count)
            assert not tokenizer.is_longer(long, count // 2)  # it may be, for all that is certain
            assert not tokenizer.is_longer(text * (most // len(text)), most)
    assert not ByteTokenizer().is_longer("a" * SHORT * 300, 300)  # which is encoded to say how long it is
    assert ByteTokenizer().is_longer("a" * (SHORT * 300 + 1), 300)


def test_no_character_is_counted_twice(monkeypatch):
    pieces, text = [], "ab" * PIECE + "c"
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, piece, **options: pieces.append(piece) or [])
    assert not ByteTokenizer().is_longer(text, 300)
    assert "".join(pieces) == text


def test_streams_of_tokenizers_say_what_decoding_says(words):
    """Also inside characters of several bytes, and without a space that a text's first token would lose."""
    tokenizer = load_tokenizer(words)
    before = tokenizer.encode("the quick")
    for text in ("the fox jumps over the dog", "naïve ☃ and 🦊 run", "\n\n  day"):
        tokens = tokenizer.encode(text)
        stream = tokenizer.stream(before)
        pieces = [stream.step(token) for token in tokens]
        whole = "".join(pieces) + stream.flush()
        assert whole == tokenizer.decode(before + tokens)[len(tokenizer.decode(before)) :] == " " + text
        assert "\ufffd" not in "".join(pieces)
    snowman = tokenizer.encode("☃")[1:]
    assert len(snowman) == 3
    reader = Detokenizer(tokenizer, before)
    reader.read(snowman[:2])
    assert reader.text == ""
    for _ in range(2):  # an answer is finished with each later output of its request
        reader.finish()
        assert reader.text == "\ufffd"


@walk("kind", ["bytes", "words"])
@walk(
    ("before", "answer", "cut", "text"),
    [
        ("😀😀", "😀ok", 0, "😀ok"),
        ("你好，世", "界和平", 0, "界和平"),
        ("Hi🌶", " x", 3, "🌶 x"),  # the answer begins within the character
        ("Hi🌶", "", 1, "\ufffd"),
        ("Hi🌶", "🌶", 4, "🌶🌶"),
    ],
)
def test_a_prompt_may_end_with_bytes_or_within_a_character(words, kind, before, answer, cut, text):
    """``cut`` is the number of bytes of the prompt's last character that belong to the answer."""
    tokenizer = load_tokenizer(words) if kind == "words" else ByteTokenizer()
    tokens = tokenizer.encode(before + answer)
    begin = len(tokenizer.encode(before)) - cut
    prompt, tokens = tokens[:begin], tokens[begin:]
    if text == "\ufffd":
        prompt, tokens = prompt[:-2], prompt[-2:]
    stream = tokenizer.stream(prompt)
    assert "".join(map(stream.step, tokens)) + stream.flush() == text
    if "\ufffd" not in text:
        reader = Detokenizer(tokenizer, prompt, stops=[text[0]])
        assert (reader.read(tokens), reader.text) == (text[0], "")


class Pieces:
    """A tokenizer whose tokens are the pieces of text themselves."""

    def stream(self, prompt, skip_special_tokens):
        assert skip_special_tokens  # unless the request says otherwise
        return self

    def step(self, token):
        return token

    def flush(self):
        return ""


@walk(
    ("stops", "keep", "pieces", "found", "text"),
    [
        (["ab", "b"], False, ["a", "b"], "ab", ""),
        (["abc"], False, ["ab", "c"], "abc", ""),
        (["abc"], False, ["xa", "bcd"], "abc", "x"),
        (["abc"], True, ["xa", "", "bcd"], "abc", "xabc"),
        (["c", "bc"], False, ["abcd"], "bc", "a"),
        (["b", "bc"], True, ["abcd"], "b", "ab"),
        (["abc"], False, ["ab", "d"], None, "abd"),
    ],
)
def test_stop_texts_across_pieces(stops, keep, pieces, found, text):
    """The stop text that begins first is found, also at the first character and across pieces."""
    reader = Detokenizer(Pieces(), [], stops=stops, keep_stop=keep)
    assert (reader.read(pieces), reader.text) == (found, text)
    assert reader.certain == (text if found else text[:-2])
    assert reader.tokens_read == len(pieces)


def test_characters_that_may_begin_a_stop_text_are_held_back():
    reader = Detokenizer(Pieces(), [], stops=["xyz", "b"])
    steps = []
    for piece in ("q", "r", "s", "tu"):
        reader.read([piece])
        steps.append((reader.certain, reader.take()))
    assert steps == [("", ""), ("", ""), ("q", "q"), ("qrs", "rs")]
    reader.finish()
    assert (reader.certain, reader.take(), reader.take()) == ("qrstu", "tu", "")


def test_stop_texts_that_ended_before_the_search_are_not_found():
    reader = Detokenizer(Pieces(), [], stops=["ab"])
    assert reader.read(["xab"], search=False) is None
    assert reader.read(["c"]) is None
    assert (reader.read(["a", "b"]), reader.text) == ("ab", "xabc")


HEADER = "<|channel|>{}<|message|>"
ANALYSIS, FINAL = HEADER.format("analysis"), HEADER.format("final")


@walk(
    ("form", "stop", "before", "after"),
    [
        (None, ".", "<think>a", "</think>b"),
        ("think", ".", "<think>a.</think>\n\nb", "c"),
        ("think", "\n\n", "<think>a\n\n</think>\n\nb", "c"),
        ("think", "a", " \n<think>a", None),
        ("think", ".", "b", "c"),
        ("think", "<th", "", "ing>"),
        ("think", "\n", "", "b"),
        ("begun", ".", "a.</think>b", "c"),
        ("begun", ".", "a.</thinking>b.c", None),
        ("harmony", ".", f"{ANALYSIS}a.<|end|><|start|>assistant{FINAL}b", "c"),
        ("harmony", "final", f"{ANALYSIS}a<|end|><|start|>assistant{FINAL}b", None),
        ("harmony", ".", f"{FINAL}b<|end|>{ANALYSIS}a.<|return|>{FINAL}c", ""),
        ("harmony", ".", " to=functions.f<|channel|>json<|message|>{1", "2}"),
        ("harmony", ".", "<|message|>b", "c"),
        ("harmony", ".", "totals", ""),
        ("harmony", ".", "<|" + "x" * 300, ""),
    ],
)
@walk("size", [1, 3])
def test_stop_texts_are_looked_for_after_the_reasoning(form, stop, before, after, size):
    """``after``: the text after the stop text that is found. None: none is found in the text ``before``."""
    text = before if after is None else before + stop + after
    reader = Detokenizer(Pieces(), [], stops=[stop], reasoning=form)
    found = reader.read([text[i : i + size] for i in range(0, len(text), size)])
    assert (found, reader.text) == (None if after is None else stop, before)


@pytest.mark.parametrize(("token", "text"), [("<0x80>", "\ufffd"), ("</s>", "")])
def test_tokens_that_never_become_text_are_not_decoded_again_and_again(words, token, text):
    tokenizer = load_tokenizer(words)
    stream = tokenizer.stream(tokenizer.encode("the quick"))
    token = tokenizer.loaded.token_to_id(token)
    assert [stream.step(token) for _ in range(200)] == [text] * 200
    assert "".join(map(stream.step, tokenizer.encode("fox"))) + stream.flush() == " fox"


def test_tokens_beyond_the_bytes_have_no_text():
    tokenizer = ByteTokenizer()
    tokens = [97, 300, 0xE2, 256, 0x98, 0x83]
    stream = tokenizer.stream([])
    assert "".join(map(stream.step, tokens)) + stream.flush() == tokenizer.decode(tokens) == "a☃"


def test_a_prompt_is_neither_cut_nor_filled_up_as_in_training(words, tmp_path):
    """A tokenizer.json keeps the truncation and padding that it was last used with."""
    tokenizers = pytest.importorskip("tokenizers")
    loaded = tokenizers.Tokenizer.from_file(str(words / "tokenizer.json"))
    loaded.enable_truncation(3)
    loaded.enable_padding(length=40)
    loaded.save(str(tmp_path / "tokenizer.json"))
    for text in ("fox", "the quick brown fox jumps"):
        assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(words).encode(text)


def test_a_tokenizer_that_begins_with_a_token_that_it_lacks_is_refused(words, tmp_path):
    content = json.loads((words / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "<lost>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single[1:], "special_tokens": {}
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_special_tokens_and_ends_come_from_the_folder(words, tmp_path):
    tokenizer = load_tokenizer(words)
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode([2, *tokenizer.encode("fox")]) == "fox"
    assert tokenizer.decode([2], skip_special_tokens=False) == "</s>"
    shutil.copytree(folder("llama3"), tmp_path / "model")
    with pytest.raises(ValueError, match=r"at most the model's vocab_size=120 tokens, got \d+"):
        LLM(tmp_path / "model", tokenizer=words, device="cpu")


def test_chat_templates(words, llm):
    tokenizer = load_tokenizer(words)
    user = {"role": "user", "content": "hi"}
    parts = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    assert tokenizer.apply_chat_template([user]) == tokenizer.apply_chat_template([parts]) == "<s>[user]hi[a]"
    for messages, template, message in [
        ([], None, "must not be empty"),
        ([{"content": "x"}], None, "dicts with a role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None, "got .'image_url'.; vLLM serves"),
        ([user], "{{ raise_exception('no system') }}", "no system"),
        ([user], "{% for %}", "cannot render these messages"),
        ([user], "{{ ''.__class__.__mro__ }}", "cannot render these messages"),
        ([user], "{{ 1 / 0 }}", "cannot render these messages"),
        ([user], "{{ '{x}'.format() }}", "cannot render these messages"),
    ]:
        with pytest.raises(ValueError, match=message):
            tokenizer.apply_chat_template(messages, template)
    template = "{{ strftime_now('%Y') }} {{ tools|tojson(ensure_ascii=False, separators=(',', ':')) }}"
    text = tokenizer.apply_chat_template([user], template, tools=[{"é": [1, 2]}])
    assert re.fullmatch(r'\d{4} \[{"é":\[1,2\]}\]', text)
    named = {"self": "s", "template": "t", "bos_token": "b"}  # a template's own variables may have any name
    template = "{{ template }}{{ bos_token }}"
    assert tokenizer.apply_chat_template([user], template, **named) == "tb"
    outputs = llm.chat([[user], [parts]], SamplingParams(temperature=0, max_tokens=4))
    assert [output.prompt for output in outputs] == ["user: hi\nassistant:"] * 2
    assert [output.outputs[0].text for output in outputs] == [";<=>"] * 2


@walk(
    "template",
    [
        "{{ 'a' * 10**9 }}", "{{ [1] * 10**9 }}", "{{ 10 ** (10**9) }}", "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}", "{{ '{:>1000000000}'.format(1) }}", "{{ '{:>{w}}'.format(1, w=10**9) }}",
        "{{ 'a'.ljust(10**9) }}", "{{ 'a' | center(10**9) }}", "{% filter indent(10**9) %}a{% endfilter %}",
        "{% set x = 'a' * 10000 %}{{ x.replace('a', x) }}", "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
        "{{ (['a' * 10**6] * 10**5) | join }}", "{{ ''.join((['a' * 10**6] * 10**5) | map('trim')) }}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ lipsum(10**9) }}",
    ],
)  # fmt: skip
def test_a_template_cannot_compute_without_bound(template):
    """Without bounds each of them takes minutes or gigabytes."""
    with pytest.raises(ValueError, match=r"computes more than a chat template may|'lipsum' is undefined"):
        ByteTokenizer().apply_chat_template([{"role": "user", "content": "hi"}], template)


def test_a_text_is_paid_for_before_it_is_made():
    account = Account({})
    with pytest.raises(TemplateError, match="computes more than a chat template may"):
        account.pay_for_text("a" * 10000, "replace", ("a", "b" * 10000))


def test_repetitions_of_a_text_cost_what_they_make():
    text = {"text": "x" * 10_000}
    assert render("{% for i in range(10000) %}{{ text * 0 }}{{ -1 * text }}{% endfor %}", text) == ""
    with pytest.raises(ValueError, match="computes more than a chat template may"):
        render("{% for i in range(10000) %}{{ (text * 1)[:0] }}{% endfor %}", text)


def test_a_filter_that_makes_no_text_is_not_paid_by_the_text_s_length():
    loop = "{% for i in range(10000) %}{{ text | FILTER | length }}{% endfor %}"
    text = {"text": "x" * 10_000}
    assert render(loop.replace("FILTER", "first"), text) == "1" * 10_000
    with pytest.raises(ValueError, match="computes more than a chat template may"):
        render(loop.replace("FILTER", "upper"), text)


def test_long_conversations_are_within_the_bounds():
    """As templates write them: with macros, namespaces and texts that grow bit by bit."""
    messages = [{"role": "user", "content": f"{i} " + "word " * 40} for i in range(600)]
    template = (
        "{% macro show(m) %}{{ '<' + m.role + '>' + m['content'] | trim ~ '\n' }}{% endmacro %}"
        "{% set ns = namespace(all='') %}{% for m in messages if m.role == 'user' %}{{ show(m) }}"
        "{% set ns.all = ns.all + m.content[:9].split(' ')[0] %}{% endfor %}"
        "{{ messages | length }}{{ ns.all | length }}"
    )
    text = ByteTokenizer().apply_chat_template(messages, template)
    assert text.startswith("<user>0 word word")
    assert text.endswith("word\n6001690")


def test_templates_that_mark_what_is_trained_on():
    template = "{% generation %}{% set x = messages[0].content %}{{ x }}{% endgeneration %}{{ x }}"
    assert ByteTokenizer().apply_chat_template([{"role": "user", "content": "hi"}], template) == "hi"


@walk("content", ["so far ", "```python\n", "", "<", "end", "|", None, "<|im_end|>\n", f"{END_MARK}x "])
@walk("strips", [False, True])
def test_a_prompt_ends_within_the_last_message_to_continue_it(content, strips):
    """Also if the message is part of the template's own text, or ends with white space that it keeps."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content "
        + "| trim " * strips
        + "}}<|im_end|>\n{% endfor %}"
    )
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    text = ByteTokenizer().apply_chat_template(chat, template, False, continue_final_message=True)
    shown = (content or "").strip() if strips else content or ""
    assert text == f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n{shown}"
    with pytest.raises(ValueError, match="continue_final_message must be False if the template does not"):
        ByteTokenizer().apply_chat_template(chat, "{{ messages[0].content }}", False, True)
    with pytest.raises(ValueError, match="continue_final_message must be False if the template renders"):
        ByteTokenizer().apply_chat_template(chat, template + "{{ messages[-1].content }}", False, True)


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "\u00e9", "b": [1]}'}}


def test_tool_calls_have_objects_as_arguments():
    """A template shows them by ``tojson``, which made a quoted text of OpenAI's form."""
    template = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    tokenizer = ByteTokenizer()
    assert tokenizer.apply_chat_template([message], template) == '{"a": "é", "b": [1]}'
    assert isinstance(CALL["function"]["arguments"], str)  # the caller's is left as it is
    malformed = ('{"a": "b', '{"a": "he said "b""}', "[1]", "none", "", "null", "[" * 10**5, None, 3, [1])
    for given, shown in [({"x": 1}, '{"x": 1}'), ('{"x": "a\nb"}', '{"x": "a\\nb"}')] + [
        (one, "{}") for one in malformed
    ]:
        message["tool_calls"] = [{**CALL, "function": {"name": "f", "arguments": given}}]
        assert tokenizer.apply_chat_template([message], template) == shown


def test_templates_by_name(words, tmp_path):
    """As in Transformers: "tool_use" where there are tools; files of their own go before the config."""
    shutil.copytree(words, tmp_path / "model")
    config = json.loads((words / "tokenizer_config.json").read_text())
    listed = [{"name": name, "template": name} for name in ("default", "tool_use", "rag")]
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({**config, "eos_token": "</s>", "chat_template": listed})
    )
    theirs = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    user, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}]
    for given in ({}, {"tools": tools}, {"chat_template": "rag"}, {"chat_template": "rag", "tools": tools}):
        expected = theirs.apply_chat_template(user, tokenize=False, **given)
        assert load_tokenizer(tmp_path / "model").apply_chat_template(user, **given) == expected
    (tmp_path / "model" / "chat_template.jinja").write_text("file")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("file of tools")
    tokenizer = load_tokenizer(tmp_path / "model")
    assert [tokenizer.apply_chat_template(user), tokenizer.apply_chat_template(user, tools=tools)] == [
        "file", "file of tools"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("own", "generation", "ends"),
    [
        (5, {}, {5}), (5, {"eos_token_id": None}, {5}), (5, {"eos_token_id": 7}, {5, 7}),
        ([5, 6], {"eos_token_id": [7, 5]}, {5, 6, 7}), (None, {"eos_token_id": [7]}, {7}),
    ],
)  # fmt: skip
def test_ends_are_those_of_the_tokenizer_and_of_both_files(words, tmp_path, own, generation, ends):
    """A model that was trained on to chat has the end of a turn in its tokenizer alone."""
    config = json.loads((folder("llama3") / "config.json").read_text())
    config |= {"eos_token_id": own, "vocab_size": 600}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "tokenizer.json").write_text((words / "tokenizer.json").read_text())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    llm = LLM(tmp_path, device="cpu", load_format="dummy")
    assert llm.engine.eos_token_ids == {2, *ends}


@pytest.mark.parametrize("wrong", ["5", [900], [[5]], {"a": 5}])
def test_ends_that_are_no_tokens_are_refused(tmp_path, wrong):
    (tmp_path / "config.json").write_text((folder("llama3") / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ValueError, match=r"/generation_config\.json: eos_token_id must be a token or a list"):
        LLM(tmp_path, device="cpu", load_format="dummy", skip_tokenizer_init=True)


def test_a_request_in_between_takes_no_other_answers(llm):
    """Requests that are queued run beside those of ``generate``, and stay to be waited for."""
    short, long = (SamplingParams(temperature=0, max_tokens=count) for count in (2, 8))
    first = llm.enqueue("abc", short)
    (output,) = llm.generate("mno", long)
    assert output.outputs[0].text == "pqrstuvw"
    second = llm.enqueue("xyz", short)
    outputs = llm.wait_for_completion()
    assert [one.request_id for one in outputs] == first + second
    assert [one.outputs[0].text for one in outputs] == ["de", "{|"]
    assert llm.wait_for_completion() == []


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": "97"}, {"prompt": [97]}, {"prompt": 5, "prompt_token_ids": [97]}]
)
def test_texts_and_tokens_are_not_taken_for_each_other(llm, prompt):
    with pytest.raises(TypeError, match="prompts must have a string as prompt and a list of tokens as"):
        llm.generate(prompt)


@pytest.mark.parametrize("method", ["generate", "score", "enqueue"])
@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([1, 2.5], "token 1 of prompts must be an int, got float 2.5"),
        ([[1, 2], [3, 4.5]], r"token 1 of prompts\[1\] must be an int, got float 4.5"),
        ([[1, 2], {"prompt_token_ids": [3, "a"]}], r"1 of prompt_token_ids of prompts\[1\] must be an int"),
        (["ab", [7, 256]], r"token 1 of prompts\[1\] must be from 0 to 255, got 256"),
        ([[1, 2], []], r"prompts\[1\] must have at least one token"),
        (["ab", 3], r"prompts\[1\] must be a string or a list of tokens, got int"),
        ([[1, 2], {"text": "a"}], r"prompts\[1\] must be a dict with the keys"),
        (["ab", "a" * 129], r"prompts\[1\] must (be shorter than|have 2 to) max_model_len=128"),
    ],
)
def test_a_wrong_prompt_is_named(llm, method, prompts, words):
    params = () if method == "score" else (SamplingParams(max_tokens=1),)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        getattr(llm, method)(prompts, *params)
    assert not llm.engine.has_unfinished


def test_generate_shows_answers_and_refuses_in_a_line(bytes_folder, tmp_path):
    def run(*arguments):
        return CliRunner().invoke(application(), ["generate", *map(str, arguments), "--device", "cpu"])

    shown = run(bytes_folder, "abc", "--temperature", 0, "--max-tokens", 6)
    assert shown.exit_code == 0
    assert "abcdefghi\n6 tokens in" in shown.output
    many = run(bytes_folder, "abc", "mno", "-n", 2, "--temperature", 0, "--max-tokens", 3)
    assert many.output.count("abcdef\n") == many.output.count("mnopqr\n") == 2
    beams = run(bytes_folder, "abc", "--beams", 2, "--max-tokens", 3)
    assert "abcdef" in beams.output
    assert "saved" in beams.output
    for bad, message in [
        ((tmp_path,), "config.json"),
        ((bytes_folder, "x", "--temperature", -1), "temperature"),
        ((bytes_folder, "x" * 128), "--max-model-len"),
        ((bytes_folder, "x", "--dtype", "int3"), "dtype"),
        ((bytes_folder, "x", "--beams", 2, "--stop", "a"), "stop"),
    ]:
        refused = run(*bad)
        assert refused.exit_code == 2
        assert message in refused.output
