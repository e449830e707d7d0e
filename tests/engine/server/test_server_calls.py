"""Answers of each path of the server, compared with those of the engine."""

from __future__ import annotations

import json
import math
import re
import threading

import pytest
from serving import MAX_MODEL_LEN, MODEL, running, wait_for

from flashtile.engine import LLM, Logprob, SamplingParams
from flashtile.engine.server.answers import Completions
from flashtile.engine.server.app import UNSERVED
from flashtile.engine.server.protocol import Body
from flashtile.engine.server.service import Limits
from flashtile.engine.tokenizer import ByteTokenizer
from walk import walk

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def server(model):
    with running(model, Limits(max_body_bytes=10_000, max_prompts=8, max_prompt_tokens=4000)) as found:
        yield found


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, device="cpu", block_size=4)


def text(events):
    return "".join(choice.get("text", "") for event in events for choice in event["choices"])


def test_a_completion(server):
    answer = server.complete(prompt="abc", max_tokens=4, return_token_ids=True)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("defg", "length", 0)
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([*b"defg"], [*b"abc"])
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)


def test_prompts_and_answers_are_numbered_prompt_by_prompt(server):
    answer = server.complete(prompt=["abc", "klm", "x"], n=2, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == ["de", "de", "no", "no", "yz", "yz"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert server.complete(prompt=[[97], [98]], max_tokens=1)["choices"][1]["text"] == "c"


def test_a_stop_text_and_a_stop_token_end_an_answer(server):
    (choice,) = server.complete(prompt="a", stop=["ef", "zz"], max_tokens=20)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bcd", "stop", "ef")
    (choice,) = server.complete(prompt="a", stop_token_ids=[ord("d")], max_tokens=20)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("bc", "stop", ord("d"))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3.0, "seed": 5, "n": 2, "top_p": 0.9},
        {"temperature": 3.0, "seed": 5, "logit_bias": {"66": 8, "67": 8}, "frequency_penalty": 1.0},
        {"temperature": 2.0, "seed": 1, "allowed_token_ids": [65, 66, 67], "min_p": 0.1, "top_k": 2},
    ],
)
def test_sampling_is_the_engines_own(server, llm, fields):
    (expected,) = llm.generate("abc", SamplingParams(**fields, max_tokens=8))
    answer = server.complete(prompt="abc", max_tokens=8, return_token_ids=True, **fields)
    assert [one["token_ids"] for one in answer["choices"]] == [one.token_ids for one in expected.outputs]
    events = server.events(COMPLETIONS, prompt="abc", max_tokens=8, return_token_ids=True, **fields)
    streamed = [[] for _ in expected.outputs]
    for event in events:
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["token_ids"]
    assert streamed == [one.token_ids for one in expected.outputs]


def test_a_stream_of_completions(server):
    options = {"include_usage": True}
    events = server.events(COMPLETIONS, prompt=["abc", "x"], max_tokens=3, stream_options=options, echo=True)
    last = events.pop()
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    assert all(event["usage"] is None for event in events)
    texts, reasons = ["", ""], [[], []]
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == ["abcdef", "xyz{"]
    assert reasons == [[None, None, "length"]] * 2
    options["continuous_usage_stats"] = True
    events = server.events(COMPLETIONS, prompt="a", max_tokens=2, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 2]


def test_every_answer_of_a_stream_ends_once(server):
    """Though they end at different times."""
    fields = {"prompt": "a", "n": 4, "seed": 1, "temperature": 100, "max_tokens": 12}
    fields["stop_token_ids"] = list(range(0, 256, 8))
    events = server.events(COMPLETIONS, return_token_ids=True, **fields)
    choices = [event["choices"][0] for event in events]
    ends = sorted(choice["index"] for choice in choices if choice["finish_reason"])
    assert ends == [0, 1, 2, 3]
    lengths = [sum(len(one["token_ids"]) for one in choices if one["index"] == index) for index in range(4)]
    assert len(set(lengths)) > 1
    whole = server.complete(return_token_ids=True, **fields)
    assert [len(one["token_ids"]) for one in whole["choices"]] == lengths


def test_a_stop_text_is_never_shown_in_a_stream(server):
    events = server.events(COMPLETIONS, prompt="a", stop=["efg"], max_tokens=20)
    assert text(events) == "bcd"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_form_of_lm_eval(server):
    """It sums the log-probabilities of a continuation, and asks whether it is the greedy one."""
    prompts = [[*b"abcd"], [*b"abxy"], [ord("a")]]
    answer = server.complete(prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1234)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    greedy = []
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(prompt) + 1
        assert (scores["token_logprobs"][0], scores["top_logprobs"][0]) == (None, None)
        assert scores["text_offset"] == list(range(len(prompt) + 1))
        assert "".join(scores["tokens"]) == choice["text"]
        pairs = list(zip(scores["token_logprobs"], scores["top_logprobs"], strict=True))[1:-1]
        greedy.append([max(top.values()) == one for one, top in pairs])
    assert greedy == [[True] * 3, [True, False, True], []]
    only = server.complete(prompt=prompts[1], echo=True, logprobs=1, max_tokens=0)
    assert only["choices"][0]["text"] == "abxy"
    assert (
        only["choices"][0]["logprobs"]["token_logprobs"]
        == answer["choices"][1]["logprobs"]["token_logprobs"][:-1]
    )
    assert only["usage"]["completion_tokens"] == 0


def test_an_echo_has_its_log_probabilities_once(server):
    fields = {"prompt": "abc", "echo": True, "logprobs": 2, "max_tokens": 1}
    (choice,) = server.complete(**fields)["choices"]
    assert "prompt_logprobs" not in choice
    (choice,) = server.complete(**fields, prompt_logprobs=1)["choices"]
    assert len(choice["prompt_logprobs"]) == 3


def test_of_two_tokens_with_one_text_the_likelier_is_shown(server):
    """Or lm-eval would take the answer for the greedy one."""
    entry = {5: Logprob(-3.0, 3, "x"), 6: Logprob(-2.0, 2, "x"), 7: Logprob(-1.0, 1, "x")}
    writer = Completions(server.service, Body({"prompt": "a", "logprobs": 2}))
    body = writer.logprobs([5], [entry], [0])
    assert (body["token_logprobs"], body["top_logprobs"]) == ([-3.0], [{"x": -1.0}])


def test_parts_of_characters_are_told_by_their_bytes(server, llm):
    """Each of a snowman's three bytes had the replacement character's, and moved what follows by one."""
    answer = server.complete(prompt="a☃b", echo=True, logprobs=3, max_tokens=2)["choices"][0]
    scores = answer["logprobs"]
    assert scores["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x98", "bytes:\\x83", "b", "c", "d"]
    assert (answer["text"], scores["text_offset"]) == ("a☃bcd", [0, 1, 1, 1, 2, 3, 4])
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True}
    _, chat = server.ask(CHAT, {**fields, "logit_bias": {"226": 100}})
    content = chat["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in content] == [("bytes:\\xe2", [226])] * 2
    (output,) = llm.generate("a", SamplingParams(logprobs=256, max_tokens=1))
    assert len({one.decoded_token for one in output.outputs[0].logprobs[0].values()}) == 256


def test_log_probabilities_are_the_engines_own(server, llm):
    params = SamplingParams(temperature=2.0, seed=3, logprobs=3, prompt_logprobs=2, max_tokens=4)
    (expected,) = llm.generate("ab", params)
    fields = {
        "prompt": "ab",
        "temperature": 2.0,
        "seed": 3,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "max_tokens": 4,
    }
    (choice,) = server.complete(**fields)["choices"]
    scores = choice["logprobs"]
    for i, (token, entry) in enumerate(
        zip(expected.outputs[0].token_ids, expected.outputs[0].logprobs, strict=True)
    ):
        assert math.isclose(scores["token_logprobs"][i], entry[token].logprob, abs_tol=1e-5)
        assert max(scores["top_logprobs"][i].values()) == max(one.logprob for one in entry.values())
    (at,) = choice["prompt_logprobs"][1:]
    assert at["98"] == {"logprob": at["98"]["logprob"], "rank": 1, "decoded_token": "b"}
    streamed = server.events(COMPLETIONS, **fields)
    joined = [one for event in streamed for one in event["choices"][0]["logprobs"]["token_logprobs"]]
    assert joined == scores["token_logprobs"]
    offsets = [one for event in streamed for one in event["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == scores["text_offset"]


def test_the_form_of_vllm_bench_serve(server):
    fields = {
        "prompt": "abcdef", "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": None,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    events = server.events(COMPLETIONS, **fields)
    assert text(events) == "ghijk"
    assert sum(bool(event["choices"]) for event in events) == 5  # it times each of them
    assert events[-1]["usage"]["completion_tokens"] == 5
    message = {"role": "user", "content": [{"type": "text", "text": "abc"}]}
    events = server.events(
        CHAT, messages=[message], max_completion_tokens=3, stream_options={"include_usage": True}
    )
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert "".join(event["choices"][0]["delta"]["content"] for event in events[:-1]) == ";<="


def test_a_beam_search(server, llm):
    from flashtile.engine import BeamSearchParams

    (expected,) = llm.beam_search("ab", BeamSearchParams(3, 4, temperature=2.0))
    answer = server.complete(
        prompt="ab", use_beam_search=True, n=3, max_tokens=4, temperature=2.0, return_token_ids=True
    )
    assert [one["token_ids"] for one in answer["choices"]] == [one.token_ids for one in expected.outputs]
    messages = [{"role": "user", "content": "a"}]
    fields = {"messages": messages, "use_beam_search": True, "n": 2, "max_tokens": 3}
    status, chat = server.ask(CHAT, fields)
    assert status == 200
    assert len(chat["choices"]) == 2


def test_a_chat(server):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    status, answer = server.ask(
        CHAT, {"messages": messages, "temperature": 0, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    )
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ";<="}
    assert [one["token"] for one in choice["logprobs"]["content"]] == [";", "<", "="]
    assert all(len(one["top_logprobs"]) == 2 for one in choice["logprobs"]["content"])
    assert not {"prompt_logprobs", "prompt_token_ids"} & {*answer, *choice}
    fields = {"messages": messages, "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
    _, scored = server.ask(CHAT, fields)
    assert len(scored["prompt_logprobs"]) == len(scored["prompt_token_ids"]) > 2
    assert answer["object"] == "chat.completion"
    events = server.events(CHAT, messages=messages, max_tokens=3, n=2)
    assert [event["choices"][0]["delta"].get("role") for event in events[:3]] == [
        "assistant",
        "assistant",
        None,
    ]
    said = ["", ""]
    for event in events:
        said[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert said == [";<=", ";<="]


def test_a_conversation_goes_on_within_its_last_message(server):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "abc"}]
    fields = {"messages": messages, "temperature": 0, "max_tokens": 2, "continue_final_message": True}
    answer = server.ask(CHAT, fields)[1]
    assert answer["choices"][0]["message"]["content"] == "de"


def test_only_the_end_of_a_prompt_that_is_truncated_counts(server):
    answer = server.complete(prompt="abcxyk", truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert answer["choices"][0]["text"] == "ykl"
    assert answer["usage"]["prompt_tokens"] == 2


def test_the_prefix_cache_is_used_and_reset(server):
    prompt = "the prefix that comes again"
    server.complete(prompt=prompt, max_tokens=1)
    again = server.complete(prompt=prompt, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 24
    salted = server.complete(prompt=prompt, max_tokens=1, cache_salt="another tenant")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.ask("/reset_prefix_cache", b"")[1]["blocks"] > 0
    reset = server.complete(prompt=prompt, max_tokens=1)
    assert reset["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_unfinished_requests_give_up_their_blocks(server):
    stream = server.send("/v1/completions", {"prompt": "a", "max_tokens": 4000, "stream": True})
    assert stream.readline().startswith(b"data: ")
    before = server.metric("vllm:num_preemptions_total")
    assert server.ask("/reset_prefix_cache?reset_running_requests=false&reset_external=0", b"")[0] == 200
    assert server.metric("vllm:num_preemptions_total") == before
    assert server.ask("/reset_prefix_cache?reset_running_requests=True", b"")[0] == 200
    assert stream.readline() == b"\n"
    while server.metric("vllm:num_preemptions_total") == before:
        assert stream.readline()
    stream.close()
    for query, words in (
        ("reset_running_requests=yes", "reset_running_requests must be true or false, got 'yes'"),
        ("reset_external=true", "reset_external is not supported"),
        ("running=true", "running is not a parameter of this call"),
    ):
        status, answer = server.ask(f"/reset_prefix_cache?{query}", b"")
        assert status == 400
        assert words in answer["error"]["message"]


def test_a_call_that_excludes_every_token_is_refused_alone(server):
    prompt = "the prefix that stays in the cache"
    server.complete(prompt=prompt, max_tokens=1)
    fields = {"prompt": "a", "allowed_token_ids": [98], "stop_token_ids": [98], "min_tokens": 1}
    status, body = server.ask("/v1/completions", {"model": MODEL, "max_tokens": 4, **fields})
    assert (status, body["error"]["code"]) == (400, "no_token_left")
    assert "exclude every token" in body["error"]["message"]
    again = server.complete(prompt=prompt, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_structure_that_cannot_end_is_the_clients_error(server):
    pytest.importorskip("llguidance")
    fields = {"prompt": "a", "structured_outputs": {"grammar": 'start: "a" start'}}
    status, body = server.ask("/v1/completions", {"model": MODEL, "max_tokens": 4, **fields})
    assert (status, body["error"]["param"]) == (400, "structured_outputs")
    assert "structured_outputs could not be continued: " in body["error"]["message"]


def test_tokens_and_texts(server):
    assert server.ask("/tokenize", {"prompt": "aé", "return_token_strs": True}) == (
        200,
        {
            "count": 3,
            "max_model_len": MAX_MODEL_LEN,
            "tokens": [97, 195, 169],
            "token_strs": ["a", "\ufffd", "\ufffd"],
        },
    )
    assert server.ask("/detokenize", {"tokens": [97, 195, 169]}) == (200, {"prompt": "aé"})
    messages = [{"role": "user", "content": "hi"}]
    tokens = server.ask("/tokenize", {"messages": messages})[1]["tokens"]
    assert bytes(tokens) == b"user: hi\nassistant:"
    status, answer = server.ask("/detokenize", {"tokens": [256]})
    assert (status, answer["error"]["param"]) == (400, "tokens")


class Beginning(ByteTokenizer):
    """A tokenizer whose special token 0 begins a text."""

    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + super().encode(text)

    def decode(self, tokens, skip_special_tokens=True):
        return super().decode([token for token in tokens if token or not skip_special_tokens])

    def fixed_bytes(self, token, skip_special_tokens=False):
        return self.decode([token], skip_special_tokens).encode()


def test_special_tokens(server, monkeypatch):
    """Texts get them and conversations do not, unless a call says otherwise. Those of a call are shown."""
    monkeypatch.setattr(server.llm.engine, "tokenizer", Beginning())
    answer = server.ask("/tokenize", {"prompt": "a", "return_token_strs": True})[1]
    assert (answer["tokens"], answer["token_strs"]) == ([0, 97], ["\0", "a"])
    assert server.ask("/detokenize", {"tokens": [0, 97]})[1] == {"prompt": "\0a"}
    assert server.ask("/tokenize", {"prompt": "a", "add_special_tokens": False})[1]["tokens"] == [97]
    for added in (False, True):
        fields = {"messages": HELLO} | ({"add_special_tokens": True} if added else {})
        assert (server.ask("/tokenize", fields)[1]["tokens"][0] == 0) == added
    for prompt, text, offsets in (("a", "a", [0, 0]), ([0, 97], "\0a", [0, 1])):
        (choice,) = server.complete(prompt=prompt, echo=True, max_tokens=0, logprobs=0)["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def test_paths_that_describe(server):
    models = server.ask("/v1/models")[1]
    assert [one["id"] for one in models["data"]] == [MODEL]
    assert models["data"][0]["max_model_len"] == MAX_MODEL_LEN
    assert server.ask(f"/v1/models/{MODEL}") == (200, models["data"][0])
    assert server.ask("/v1/models/another")[0] == 404
    assert server.ask("/health")[0] == 200
    assert set(server.ask("/version")[1]) == {"version"}
    wait_for(lambda: server.ask("/load") == (200, {"server_load": 0}))


def test_numbers_for_prometheus(server):
    before = (
        server.metric("vllm:generation_tokens_total"),
        server.metric("vllm:inter_token_latency_seconds_count"),
        server.metric("vllm:iteration_tokens_total_sum"),
        server.metric("vllm:request_time_per_output_token_seconds_count"),
        server.metric("vllm:e2e_request_latency_seconds_sum"),
    )
    server.complete(prompt="abc", max_tokens=1)  # no time passes between tokens of one
    server.complete(prompt="abc", max_tokens=5)
    server.events(COMPLETIONS, prompt="abc", max_tokens=5)
    assert server.metric("vllm:generation_tokens_total") - before[0] == 11
    assert server.metric("vllm:inter_token_latency_seconds_count") - before[1] == 8
    assert server.metric("vllm:iteration_tokens_total_sum") - before[2] == 3 + 2 * (3 + 4)
    assert server.metric("vllm:request_time_per_output_token_seconds_count") - before[3] == 2
    assert server.metric("vllm:e2e_request_latency_seconds_sum") > before[4]
    response = server.send("/metrics")
    assert response.getheader("Content-Type").startswith("text/plain")
    found = response.read().decode()
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum",
        "request_time_per_output_token_seconds_count", "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count", "iteration_tokens_total_count",
    ):  # fmt: skip
        assert f'vllm:{name}{{model_name="{MODEL}"' in found, name
    bounds = re.findall(r'vllm:e2e_request_latency_seconds_bucket{.*le="(.*)"}', found)
    assert [float(bound) for bound in bounds] == [
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
        1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, math.inf,
    ]  # fmt: skip
    parser = pytest.importorskip("prometheus_client.parser")
    assert len(list(parser.text_string_to_metric_families(found))) > 15


@walk(
    ("path", "fields", "status", "param", "code"),
    [
        (COMPLETIONS, {"prompt": "a", "model": "another"}, 404, "model", "model_not_found"),
        (COMPLETIONS, {"prompt": "a", "top_p": 2}, 400, "top_p", "invalid_value"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": [256]}, 400, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, 400, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "n": 65}, 400, "n", "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "n": 100, "use_beam_search": True}, 400, "n", "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [300]}, 400, "stop_token_ids", "invalid_value"),
        (COMPLETIONS, {"prompt": "a" * 4050}, 400, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 4096}, 400, "max_tokens", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a" * 11_000}, 413, None, "body_too_large"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "invalid_value",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a" * 5000}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
        ("/v1/embeddings", {"input": "a"}, 404, None, "unsupported_path"),
        ("/nothing", {}, 404, None, None),
        ("/health", {}, 405, None, None),
    ],
)
def test_an_error_has_its_status_and_names_the_field(server, path, fields, status, param, code):
    found, body = server.ask(path, fields)
    assert found == status
    assert set(body) == {"error"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    if code == "context_length_exceeded":  # clients that fall back to another model look for these words
        begin = "This model's maximum context length is 4096 tokens, so the prompt is too long: "
        assert body["error"]["message"].startswith(f"{begin}{param} must be at most ")
    if fields.get("stream") is None and status == 400:
        assert server.ask(path, {**fields, "stream": True})[0] == 400  # before the first event


def test_what_is_not_served_is_named_with_where_it_is(server):
    for path, name in UNSERVED.items():
        message = server.ask(path, {})[1]["error"]["message"]
        assert message.startswith(f"{name} is not supported; vLLM serves more models, on flashtile's"), path


def test_a_body_that_is_not_in_its_encoding(server):
    status, body = server.ask(COMPLETIONS, {"prompt": "a"}, {"Content-Encoding": "gzip"})
    assert (status, body["error"]["code"]) == (400, "invalid_json")


def test_variables_of_a_template_have_any_name(server):
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    status, _ = server.ask(CHAT, {**fields, "chat_template_kwargs": {"self": 1, "template": "x"}})
    assert status == 200


def test_long_texts_do_not_keep_the_others_waiting(server, monkeypatch):
    """Tokens of megabytes are told apart beside the loop."""
    threads, decode = set(), server.service.tokenizer.decode

    def watched(*given):
        threads.add(threading.current_thread())
        return decode(*given)

    monkeypatch.setattr(server.service.tokenizer, "decode", watched)
    assert server.ask("/tokenize", {"prompt": "abc", "return_token_strs": True})[0] == 200
    assert server.ask("/detokenize", {"tokens": [97]})[0] == 200
    assert threads
    assert server.thread not in threads


@walk("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/reset_prefix_cache"])
def test_bodies_that_are_not_json_are_refused(server, path):
    """Nor can a page of another origin send one: what is not JSON needs no leave of the browser."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        status, body = server.ask(path, {"prompt": "a"}, {"Content-Type": kind})
        assert (status, body["error"]["code"]) == (415, "unsupported_media_type")


def test_priorities_are_the_servers_to_allow(server, model):
    status, body = server.ask(COMPLETIONS, {"prompt": "a", "priority": -1})
    assert (status, body["error"]["param"]) == (400, "priority")
    assert server.ask(COMPLETIONS, {"prompt": "a", "priority": 0})[0] == 200
    with running(model, Limits(max_priority=2)) as allowing:
        assert allowing.ask(COMPLETIONS, {"prompt": "a", "priority": -2})[0] == 200
        for path in (COMPLETIONS, CHAT):
            fields = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
            status, body = allowing.ask(path, {**fields, "priority": -3})
            assert (status, body["error"]["message"]) == (400, "priority must be from -2 to 2, got -3")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{"prompt": "a", "logprobs": 1}, {"messages": HELLO, "logprobs": True}])
def test_numbers_that_json_does_not_have_end_a_call_with_an_error(model, monkeypatch, caplog, fields, stream):
    """A model whose logits are NaN gives no answer, and no body that is no JSON."""
    with running(model) as server:
        network = server.llm.engine.runner.model
        logits = network.logits
        monkeypatch.setattr(network, "logits", lambda hidden: logits(hidden) * math.nan)
        path = CHAT if "messages" in fields else COMPLETIONS
        response = server.send(path, {**fields, "stream": stream, "max_tokens": 2})
        text = response.read().decode()
        assert response.status == (200 if stream else 500)
        if stream:
            *_, text, done, _ = text.split("\n\n")
            assert done == "data: [DONE]"
        error = json.loads(text.removeprefix("data: "), parse_constant=pytest.fail)["error"]
        assert (error["type"], error["code"] in ("engine_error", "internal_error")) == ("server_error", True)
        monkeypatch.undo()
        assert server.complete(prompt="a", max_tokens=1)["choices"][0]["text"] == "b"


@pytest.mark.parametrize("more", [{}, {"truncate_prompt_tokens": 5}])
def test_overlong_texts_are_refused_before_all_of_them_is_read(model, monkeypatch, more):
    with running(model, Limits(max_body_bytes=2**24)) as server:
        read, encode = [], server.service.tokenizer.encode
        monkeypatch.setattr(
            server.service.tokenizer,
            "encode",
            lambda text, *flags, **named: read.append(len(text)) or encode(text),
        )
        long, start = "a" * 2**20, {**more, "max_tokens": 1}
        for path, fields, param in (
            (COMPLETIONS, {"prompt": long, **start}, "prompt"),
            (COMPLETIONS, {"prompt": ["a", long], **start}, "prompt"),
            (CHAT, {"messages": [{"role": "user", "content": long}], **start}, "messages"),
            ("/tokenize", {"prompt": long}, "prompt"),
            (CHAT, {"messages": HELLO * MAX_MODEL_LEN + HELLO, **start}, "messages"),
            ("/detokenize", {"tokens": [97] * MAX_MODEL_LEN + [97]}, "tokens"),
        ):
            read.clear()
            status, body = server.ask(path, fields)
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            assert body["error"]["param"] == param
            assert sum(read) < 16 * MAX_MODEL_LEN
        # What may be cut to its end may be somewhat longer than what may not.
        status, _ = server.ask(COMPLETIONS, {"prompt": "a" * 9 * MAX_MODEL_LEN, **start})
        assert status == (200 if more else 400)


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})],
)
def test_a_text_that_the_tokenizer_cannot_encode_is_refused(server, monkeypatch, path, fields):
    def refuse(*given, **named):
        raise ValueError("prompt must be a text that the tokenizer can encode")

    monkeypatch.setattr(server.service.tokenizer, "encode", refuse)
    status, body = server.ask(path, fields)
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, min(fields), "invalid_value")


def test_a_grammar_that_cannot_end_is_refused(server):
    pytest.importorskip("llguidance")
    fields = {"prompt": "a", "structured_outputs": {"grammar": 'start: "a" start'}}
    status, body = server.ask(COMPLETIONS, fields)
    assert (status, body["error"]["param"]) == (400, "structured_outputs")


def test_requests_without_the_key_are_refused(model):
    with running(model, Limits(api_keys=("open", "sesame"))) as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "sesame"},
            {"Authorization": "Bearer é"},
        ):
            for path in ("/v1/models", "/metrics", "/live", "/nothing"):
                status, body = server.ask(path, headers=headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key"), (path, headers)
            assert server.ask(COMPLETIONS, {"prompt": "a"}, headers)[0] == 401
        assert server.ask(COMPLETIONS, {"prompt": "a"}, KEY)[0] == 200
        assert server.ask("/health")[0] == 200
        assert server.send("/").status == 200


def test_the_page_needs_nothing_from_elsewhere(server):
    response = server.send("/")
    page = response.read().decode()
    assert response.getheader("Content-Type").startswith("text/html")
    assert "default-src 'none'" in response.getheader("Content-Security-Policy")
    assert "<script src" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    for path in (COMPLETIONS, CHAT, "/live"):
        assert path.removeprefix("/") in page


def test_the_page_shows_a_model_without_a_tokenizer(model):
    with running(model, skip_tokenizer_init=True) as server:
        assert server.ask("/live")[1]["chat_template"] is False


def test_what_the_page_shows(server):
    server.complete(prompt="abcdefgh", max_tokens=1)
    seen = server.ask("/live")[1]
    assert seen["num_blocks"] == 2048  # of a pool so large, only blocks in use are shown
    assert len(seen["refs"]) == len(seen["blocks"]) == seen["num_cached"] > 0
    assert seen["num_free"] == seen["num_blocks"] - seen["num_cached"]
    assert seen["num_running"] == 0
    assert seen["running"] == []
    assert (seen["null_blocks"], seen["max_num_seqs"], seen["chat_template"]) == (0, 64, True)
    assert seen["server"] == server.service.id
