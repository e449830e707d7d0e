"""The server's page in a real Chromium: conversations, errors, the engine's picture, accessibility."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import Running, running, wait_for

from chromium import axe_violations, launched, watched
from flashtile.engine.server.app import ASSETS
from flashtile.engine.server.openapi import SUMMARIES
from flashtile.engine.server.service import Limits

SIZES = ((1366, 768), (768, 1024), (360, 640))
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
REFUSED = re.compile("Failed to load resource: the server responded with a status of 4")
"""Chromium's own message about each call that a server refuses."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(model) -> Iterator[Running]:
    with running(model) as found:
        yield found


class Visit:
    """An open page of a server.

    Attributes:
        complaints: errors on the console and of scripts.
        requests: addresses that the page has loaded.
        bodies: bodies of the calls for answers.
    """

    def __init__(self, page: Any, url: str):
        self.page, self.url = page, url
        self.complaints = watched(page)
        self.requests: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        page.on("request", self._note)
        page.goto(url)
        self.until("seen !== null || !byId('notice').hidden")

    def _note(self, request: Any) -> None:
        self.requests.append(request.url)
        if request.url.endswith("completions"):
            self.bodies.append(json.loads(request.post_data))

    def set(self, **fields: Any) -> None:
        """Set fields of the settings, by id."""
        self.page.click("#open-settings")
        for name, value in fields.items():
            if name == "show_tokens":
                self.page.set_checked("#show-tokens", value)
            else:
                self.page.fill(f"#{name}", str(value))
        self.page.keyboard.press("Escape")

    def complete_text(self) -> None:
        self.page.click("label:has-text('Complete text')")

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def until(self, condition: str, seconds: float = 60.0) -> None:
        """Wait for a condition in JavaScript. The page's policy forbids what Playwright's own wait needs."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(20)

    def settle(self) -> None:
        """Wait until nothing is being answered."""
        self.until("running === null")

    def ask(self, text: str) -> None:
        """Send a text and wait for its answer."""
        self.send(text)
        self.settle()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


@pytest.fixture
def visit(chromium, server) -> Iterator[Callable[..., Visit]]:
    """visit(server, **options of the context): the page, which must not complain nor load anything else."""
    opened = []

    def open_page(of: Running = server, **options: Any) -> Visit:
        options = {"viewport": {"width": 1366, "height": 768}, "locale": "en-US", **options}
        context = chromium.new_context(**options)
        found = Visit(context.new_page(), f"{of.url}/")
        opened.append((context, found))
        return found

    yield open_page
    for context, found in opened:
        context.close()
        assert [text for text in found.complaints if not REFUSED.match(text)] == []
        assert all(url.startswith(found.url) or url.startswith("data:") for url in found.requests)


def test_a_conversation_is_sent_whole_with_its_system_prompt_and_sampling(visit):
    one = visit()
    one.set(system="Be brief.", max_tokens=3, top_k=1, seed=7)
    one.ask("abc")
    one.page.press("#prompt", "Shift+Enter")
    one.page.type("#prompt", "second line")
    one.page.press("#prompt", "Enter")
    one.settle()
    first, second = one.bodies
    answers = one.texts(".answer .text")
    assert all(len(text) == 3 for text in answers)
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "abc"},
    ]
    assert second["messages"][1:] == [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "\nsecond line"},
    ]
    sampled = {name: first[name] for name in ("temperature", "top_p", "top_k", "seed", "max_tokens", "n")}
    assert sampled == {"temperature": 0.8, "top_p": 1, "top_k": 1, "seed": 7, "max_tokens": 3, "n": 1}
    assert one.texts(".system") == ["System prompt: Be brief."]
    assert one.page.input_value("#prompt") == ""
    assert "3 tokens" in one.page.inner_text("#status")
    assert re.search(r"\d+ prompt tokens, 3 tokens written", one.page.inner_text(".turn:last-child"))


def test_an_answer_streams_and_escape_stops_it(visit, server):
    one = visit()
    one.set(max_tokens=4000)
    one.send("abc")
    one.until("document.querySelector('.answer .text').innerText.length > 20")
    assert one.page.is_visible("#stop")
    assert not one.page.is_visible("#send")
    one.page.keyboard.press("Escape")
    one.settle()
    assert "stopped by you" in one.page.inner_text(".answer .actions")
    one.until("seen.num_running === 0")  # the server has dropped the request
    assert len(one.page.inner_text(".answer .text")) < 4000
    one.set(max_tokens=3)
    one.ask("x")  # the stopped answer is part of the conversation
    assert [message["role"] for message in one.bodies[-1]["messages"]] == ["user", "assistant", "user"]
    wait_for(lambda: server.service.in_flight == 0)


def test_answers_stand_next_to_each_other_and_one_is_replied_to(visit):
    one = visit()
    one.set(n=3, max_tokens=4)
    one.ask("abc")
    boxes = [box.bounding_box() for box in one.page.locator(".answer").all()]
    assert len({box["y"] for box in boxes}) == 1
    assert len({box["x"] for box in boxes}) == 3
    one.page.check(".answer:nth-child(2) input[type=radio]")
    one.page.evaluate("turns.chat[0].answers.forEach((answer, i) => { answer.text = `answer ${i + 1}`; })")
    one.ask("more")
    assert one.bodies[-1]["messages"][1] == {"role": "assistant", "content": "answer 2"}


def test_text_is_completed_and_continued(visit):
    one = visit()
    one.complete_text()
    one.set(max_tokens=3)
    one.ask("abc")
    assert one.bodies[0]["prompt"] == "abc"
    assert one.texts(".answer .text") == ["abcdef"]
    one.page.click(".answer >> text=Continue")
    one.settle()
    assert one.texts(".answer .text") == ["abcdefghi"]
    assert one.bodies[1]["prompt"] == "abcdef"


def test_an_answer_of_a_chat_that_was_cut_is_continued_and_copied(visit):
    one = visit(permissions=["clipboard-read", "clipboard-write"])
    one.set(max_tokens=3)
    one.ask("abc")
    (start,) = one.texts(".answer .text")
    one.page.click(".answer >> text=Continue")
    one.settle()
    (whole,) = one.texts(".answer .text")
    assert (whole[:3], len(whole)) == (start, 6)
    sent = one.bodies[-1]
    assert sent["messages"][-1] == {"role": "assistant", "content": start}
    assert (sent["continue_final_message"], sent["add_generation_prompt"]) == (True, False)
    one.page.click(".answer >> text=Copy")
    one.page.wait_for_selector(".answer >> text=Copied")
    assert one.page.evaluate("navigator.clipboard.readText()") == whole


def test_a_message_is_edited_and_an_answer_tried_again(visit):
    one = visit()
    one.set(max_tokens=2)
    one.ask("abc")
    one.ask("klm")
    one.page.click(".turn >> nth=0 >> text=Edit")
    one.page.fill(".turn textarea", "xyz")
    one.page.press(".turn textarea", "Enter")
    one.settle()
    assert one.texts(".user") == ["xyz"]  # what followed the changed message is gone
    one.page.click("text=Retry")
    one.settle()
    assert one.bodies[-1]["messages"] == [{"role": "user", "content": "xyz"}]
    assert len(one.texts(".turn")) == 1


def test_an_answer_never_takes_more_than_the_room_after_its_prompt(visit, server):
    one = visit()
    one.complete_text()
    one.set(max_tokens=100_000)
    one.send("abc" * 1000)
    one.until("document.querySelector('.token, .words span')?.innerText.length > 3")
    one.page.click("#stop")
    one.settle()
    assert one.bodies[0]["max_tokens"] == server.service.engine.max_model_len - 3000


def test_tokens_show_their_probabilities(visit):
    one = visit()
    one.complete_text()
    one.set(max_tokens=4, show_tokens=True)
    one.ask("abc")
    assert one.texts(".token") == list("defg")
    one.page.click(".token >> nth=0")
    one.page.keyboard.press("ArrowRight")
    assert one.page.get_attribute(".token >> nth=1", "aria-selected") == "true"
    assert "Token 101, probability 100.0 %" in one.page.inner_text(".details")
    assert '"e"' in one.page.inner_text(".details")
    one.set(show_tokens=False)
    assert one.texts(".answer .text") == ["abcdefg"]
    one.page.click("label:has-text('Chat')")
    one.set(show_tokens=True)
    one.ask("abc")
    assert len(one.texts(".token")) == 4
    assert one.bodies[-1]["top_logprobs"] == 5


def test_a_refused_call_is_one_line_and_can_be_tried_again(visit):
    one = visit()
    one.set(n=100)
    one.ask("abc")
    assert "n must be at most max_num_seqs=64, got 100" in one.page.inner_text(".turn .error")
    assert "\n" not in one.page.inner_text(".turn .error").strip()
    assert not one.page.is_visible(".answer")
    assert "written" not in one.page.inner_text(".turn")
    one.set(n=1, max_tokens=2)
    one.page.click("text=Retry")
    one.settle()
    assert one.page.inner_text(".turn .error") == ""
    assert len(one.page.inner_text(".answer .text")) == 2


def test_an_error_within_a_stream_is_shown(visit):
    one = visit()
    error = 'data: {"error":{"message":"the answer took longer than 600 s"}}\n\ndata: [DONE]\n\n'
    one.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=error))
    one.ask("abc")
    assert one.page.inner_text(".turn .error") == "the answer took longer than 600 s"


def test_markup_in_messages_and_answers_is_text(visit):
    one = visit()
    evil = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
    choice = {"index": 0, "delta": {"content": evil}, "finish_reason": "stop", "token_ids": [1]}
    choice["logprobs"] = {"content": [{"logprob": -0.1, "top_logprobs": [{"token": evil, "logprob": -0.1}]}]}
    event = json.dumps({"id": "chatcmpl-1", "choices": [choice]})
    one.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {event}\n\ndata: [DONE]\n\n")
    )
    one.ask(evil)
    assert one.texts(".user") == [evil]
    assert one.texts(".answer .text") == [evil]
    one.set(show_tokens=True)
    one.page.click(".token")
    assert "onerror" in one.page.inner_text(".details")
    assert one.page.evaluate("window.broken") is None
    assert one.page.locator("#log img, #log script").count() == 0


def test_code_in_an_answer_is_set_apart(visit):
    one = visit()
    pieces = ["See:\n`", "``python\na = 1", "\n```\nDone."]
    lines = [
        json.dumps({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": piece}}]})
        for piece in pieces
    ]
    body = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
    one.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    one.ask("abc")
    assert [text.strip() for text in one.texts(".words > *")] == ["See:", "a = 1", "Done."]
    assert one.texts(".words pre") == ["a = 1\n"]


def test_a_server_with_a_key_asks_for_it(visit, model):
    with running(model, Limits(api_keys=("secret",))) as closed:
        one = visit(closed)
        assert "This server needs an API key." in one.page.inner_text("#notice")
        one.page.click("text=Enter the key")
        one.page.keyboard.type("secret")
        one.page.keyboard.press("Enter")
        one.until("seen !== null")
        one.set(max_tokens=2)
        one.ask("abc")
        assert not one.page.is_visible("#notice")
        assert len(one.page.inner_text(".answer .text")) == 2


def test_a_model_without_a_chat_template_completes_text(visit, server, monkeypatch):
    monkeypatch.setattr(server.service.tokenizer, "chat_templates", {})
    one = visit()
    one.until("mode === 'text'")
    assert one.page.is_disabled("[name=mode][value=chat]")
    assert "has no chat template" in one.page.inner_text("#welcome-text")
    one.set(max_tokens=2)
    one.ask("abc")
    assert one.texts(".answer .text") == ["abcde"]


def test_a_model_without_a_chat_template_never_opens_as_chat(visit, server, monkeypatch):
    monkeypatch.setattr(server.service.tokenizer, "chat_templates", {})
    one = visit()
    one.page.route("**/live", lambda route: route.abort())
    one.page.reload()
    assert one.page.evaluate("mode") == "text"
    one.complaints.clear()  # Chromium's own message about the call that this test aborts


@pytest.mark.parametrize(
    ("served", "shown"),
    [
        ("/home/me/models/Llama-3-8B", "Llama-3-8B"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("/root/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd", "Qwen/Qwen3-8B"),
    ],
)
def test_the_page_shows_the_model_s_name_and_no_path(visit, server, monkeypatch, served, shown):
    monkeypatch.setattr(server.service, "model_name", served)
    one = visit()
    one.until("model.name !== ''")
    assert one.page.inner_text("#model") == f"{shown}, up to 4,096 tokens"
    assert one.page.inner_text("#welcome-title") == f"Chat with {shown}"


def test_the_page_speaks_chinese(visit):
    """To readers who prefer it, and to others after a click, also what was written before."""
    one = visit(locale="zh-CN")
    one.set(max_tokens=2)
    one.ask("abc")
    words = re.findall(
        r"[A-Za-z]{3,}", one.page.inner_text("body").replace(one.texts(".answer .text")[0], "")
    )
    assert set(words) - {"abc"} <= {"flashtile", "alphabet", "token", "Enter", "Shift", "Escape", "English"}
    assert one.page.get_attribute("html", "lang") == "zh-CN"
    chinese = one.page.inner_text("main")
    one.page.click("#language")
    english = one.page.inner_text("main")
    assert "Retry" in english
    assert not re.search("[\u4e00-\u9fff]", english)
    one.page.click("#language")
    assert re.sub(r"[\d.,]+", "", one.page.inner_text("main")) == re.sub(r"[\d.,]+", "", chinese)


def test_every_sentence_of_the_page_is_in_chinese():
    chinese = json.loads((ASSETS / "zh.json").read_text())
    script, page = ((ASSETS / name).read_text() for name in ("page.js", "page.html"))
    said = re.findall(r'\b(?:say|spoken|quiet|notify)\(\s*"([^"]+)"', script)
    assert [text for text in said if text not in chinese] == []
    assert [text for text in chinese if text not in script + page] == []
    for english, translated in chinese.items():
        places = (sorted(re.findall(r"\{\w+\}", text)) for text in (english, translated))
        assert len(set(map(tuple, places))) == 1, english


def test_the_interface_s_page_describes_and_sends_calls(visit):
    one = visit()
    one.page.goto(f"{one.url}docs")
    one.page.wait_for_selector("summary")
    assert one.page.locator("summary").count() == len(SUMMARIES)
    completions = one.page.locator("details").first
    completions.locator("summary").click()
    assert completions.locator("td code").first.inner_text() in ("max_tokens", "prompt")
    completions.locator("button").click()
    one.until("document.querySelector('details pre').textContent.includes('text_completion')")
    assert axe_violations(one.page) == []


def test_the_picture_shows_the_blocks_that_answers_share(visit):
    """Four answers to a prompt of 40 tokens share its ten blocks of four tokens; then nothing is in use."""
    one = visit()
    one.complete_text()
    one.set(n=4, max_tokens=1500)
    one.send(ALPHABET + ALPHABET[:14])
    one.until("Number(byId('count-shared').textContent) >= 9 && owners.size > 12")
    found = one.page.evaluate("""() => {
      const canvas = byId("blocks"), copy = new OffscreenCanvas(canvas.width, canvas.height);
      const context = copy.getContext("2d", { willReadFrequently: true });
      context.drawImage(canvas, 0, 0);
      const { size, columns } = layout(seen.refs.length), scale = canvas.width / canvas.clientWidth;
      const at = (block, isInside) => {
        const inset = isInside ? Math.floor((size - 2) / 2) : 0;
        const x = (block % columns) * size + inset, y = Math.floor(block / columns) * size + inset;
        return [...context.getImageData(x * scale, y * scale, 1, 1).data].slice(0, 3).join();
      };
      const look = (block) => ({ rim: at(block, false), middle: at(block, true) });
      const many = [...owners].filter(([, users]) => users.length > 1).map(([block]) => block);
      const own = [...owners].filter(([, users]) => users.length === 1).map(([block]) => block);
      return {
        sharers: owners.get(many[0]).length, shared: look(many[0]), own: look(own[0]),
        listed: [...document.querySelectorAll("#batch li:first-child .shared")].length, count: many.length,
        rows: document.querySelectorAll("#batch li").length, label: canvas.getAttribute("aria-label"),
      };
    }""")
    assert found["sharers"] == 4
    assert found["shared"]["rim"] == found["own"]["rim"] == found["own"]["middle"]  # one request, one colour
    assert found["shared"]["middle"] != found["shared"]["rim"]
    assert found["count"] == found["listed"] >= 9
    assert found["rows"] == 4
    assert f"of which {found['count']} shared" in found["label"]
    assert "Request 1: " in one.page.inner_text(".turn .note >> nth=-1")
    one.page.keyboard.press("Escape")
    one.until("byId('count-used').textContent === '0'")
    assert int(one.page.inner_text("#count-cached").replace(",", "")) >= 9


def test_tokens_per_second_are_drawn(visit):
    one = visit()
    one.set(max_tokens=3000)
    one.send("abc")
    one.until("samples.some((one) => one.rate > 0)")
    assert one.page.get_attribute("#chart-line", "d").count("L") >= 1
    one.until("Number(byId('rate').textContent) > 0")
    one.page.keyboard.press("Escape")
    one.settle()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_size_is_accessible_and_never_scrolls_sideways(visit, width, height, scheme):
    one = visit(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = one.page

    def check(state: str) -> None:
        one.until("document.getAnimations().length === 0")  # a drawer that fades in has little contrast
        assert page.evaluate("document.documentElement.scrollWidth") <= width, state
        assert page.evaluate("document.documentElement.scrollHeight") <= height, state
        assert axe_violations(page) == [], state

    page.evaluate("byId('model').textContent = 'a model with a long name, '.repeat(6)")
    check("start")
    for button in page.locator("header button, #send").all():
        box = button.bounding_box()
        assert box["height"] >= 24
        assert box["x"] + box["width"] <= width
    one.set(n=2, max_tokens=30, show_tokens=True, system="Be brief.")
    one.ask("abc " * 30)
    page.click(".token >> nth=3")
    check("answers")
    if width < 900:
        page.click("#show-engine")
        page.wait_for_selector("#engine:visible")
        check("engine")
        page.click("#show-engine")
    page.click("#open-settings")
    check("settings")


def test_the_keyboard_reaches_everything_in_order(visit):
    one = visit()
    assert one.page.evaluate("document.activeElement.id") == "prompt"
    found: list[str] = []
    while found.count("new") < 2:
        one.page.keyboard.press("Tab")
        found.append(one.page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    found = found[found.index("new") : -1]
    wanted = ["new", "open-settings", "show-engine", "log", "prompt", "send", "engine"]
    assert [name for name in found if name in wanted] == wanted


def test_motion_is_left_out_where_the_reader_wants_none(visit):
    for preference, moves in (("no-preference", True), ("reduce", False)):
        one = visit(reduced_motion=preference)
        seconds = one.page.evaluate("getComputedStyle(byId('send')).transitionDuration")
        assert (seconds != "0s") == moves, preference
