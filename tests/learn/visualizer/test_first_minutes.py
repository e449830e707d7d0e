"""What a visitor meets first: the tour, questions that begin where they tell something, captions, a phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from visits import Visit, address

from flashtile.algorithms import Memory, Trace, flash2
from flashtile.learn.visualizer.recording import Recording
from flashtile.learn.visualizer.settings import Setting

Recorded = Callable[[Setting], Recording]
TILED = Setting("flash2", 8, 4, block="4x4")
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def test_questions_begin_at_their_moment_and_play(visit: Visit, recorded: Recorded) -> None:
    events = recorded(Setting("standard", 4096, 64, sram_bytes=100 * 1024)).trace.events
    stored = next(at for at, e in enumerate(events, 1) if e.kind == "store" and e.name == "S")
    for number in range(1, 6):
        visit.press(str(number))
        assert visit.page.get_attribute("#play", "aria-label") == "Pause"
        visit.press(" ")
        at, end = int(visit.state["at"]), int(visit.page.get_attribute("#position", "max"))
        assert 0 < at < end
        assert number != 1 or stored <= at < stored + 0.2 * end


@pytest.mark.parametrize("visit", [{"reduced_motion": "reduce"}], indirect=True)
def test_reduced_motion_stops_all_animations(visit: Visit) -> None:
    visit.press("2")
    assert visit.page.get_attribute("#play", "aria-label") == "Play"
    assert int(visit.state["at"]) > 0


def test_arrows_step_with_a_select_focused(visit: Visit) -> None:
    visit.go(address(TILED, 3, drawer="open"))
    visit.page.focus("#choose-mask")
    visit.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert (visit.state["at"], visit.state["mask"]) == ("4", "full")


def test_captions_name_the_line_and_words_are_explained(visit: Visit, recorded: Recorded) -> None:
    """Line 8 of FlashAttention-2's algorithm 1 is S = Q K^T; loading K before it is line 7."""
    events = recorded(TILED).trace.events
    scores = next(at for at, e in enumerate(events, 1) if e.op == "S = Q K^T")
    keys = next(at for at, e in enumerate(events, 1) if e.kind == "load" and e.name == "K")
    for at, line in ((scores, 8), (keys, 7)):
        visit.go(address(TILED, at))
        assert visit.text("[data-run=a] .line") == f"· FlashAttention-2, algorithm 1, line {line}"
    assert "High-bandwidth memory" in visit.page.get_attribute("[data-run=a] .hbm h4", "title")


@pytest.mark.parametrize(
    "visit",
    [{"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}],
    indirect=True,
)
def test_on_a_phone_the_picture_is_on_the_first_screen(visit: Visit) -> None:
    visit.go(address(TILED, 12))
    picture = visit.page.locator("article.a canvas").bounding_box()
    player = visit.page.locator(".player").bounding_box()
    assert picture["y"] + picture["height"] < player["y"]
    assert player["y"] + player["height"] <= 844
    for select in ("#choose-mask", "[data-run=a] .settings"):
        assert visit.page.is_hidden(select)


def test_the_sum_that_overflows_is_shown_as_plus_infinity(visit: Visit) -> None:
    visit.go("story=softmax&variant=large&case=naive&at=99")
    assert visit.text("[data-strip=l] span") == "+∞"


def test_scores_are_shown_once_they_are_computed_and_as_they_are_stored(visit: Visit) -> None:
    """No zeros before the product, and the same numbers when S is written and read back."""
    record = """() => {
      const { scene, run } = flashtilePage.views.a;
      const shown = [];
      const write = scene.write;
      scene.write = (text, x, y, options = {}) => {
        if (options.colour === flashtilePage.colours.onTile) shown.push(text);
        write(text, x, y, options);
      };
      flashtilePage.draw();
      scene.write = write;
      const { kind, name } = run.trace.event(flashtilePage.clock.at - 1);
      return { did: `${kind} ${name}`, shown };
    }"""
    visit.go("a=standard&seqlen=8&head_dim=4&at=0")
    of_scores = {}
    while "load S" not in of_scores:
        visit.press("ArrowRight")
        seen = visit.page.evaluate(record)
        if len(seen["shown"]) == 64:
            of_scores[seen["did"]] = seen["shown"]
    assert {"compute S", "store S", "load S"} <= set(of_scores)
    assert all(shown == of_scores["load S"] for shown in of_scores.values())


@pytest.mark.parametrize("visit", [{"reduced_motion": "reduce"}], indirect=True)
def test_the_first_tour_starts_from_a_sentence_that_the_reader_can_change(visit: Visit) -> None:
    """Scores are those of the words, and equal words have equal scores; the next scene has the same words."""
    visit.go("tour=slow&scene=1")
    assert visit.text(".guide.tour .sentence").startswith("Each of 8 words")
    field = ".guide.tour .says input"
    visit.page.fill(field, "a rose is a")
    visit.page.wait_for_function("flashtilePage.state.words === 'a rose is a'")
    visit.settle()
    assert "4 × 4 scores" in visit.text(".guide.tour .sentence")
    scores, words = visit.page.evaluate(
        """() => {
          const { trace } = flashtilePage.runs.a;
          const vectorsOf = (word) => flashtilePage.catalog.maker.vectorsOf(word);
          const scores = trace.numbers.find((_, i) => trace.event(i).op === "S += Q K^T");
          return [scores, ["a", "rose", "is", "a"].map(vectorsOf)];
        }"""
    )
    q, k, _ = torch.tensor(words, dtype=torch.float64).unbind(1)
    torch.testing.assert_close(torch.tensor(scores, dtype=torch.float64), q @ k.T / 2)
    assert scores[0] == scores[3]
    visit.page.press(field, "l")  # a letter, not the key of the language
    assert visit.page.input_value(field) == "a rose is al"
    visit.page.click("#tour-next")
    visit.settle()
    assert visit.state["seqlen"] == "4"
    visit.go("lang=zh&tour=slow&scene=1")
    assert visit.page.input_value(field) == "猫在垫子上睡着了"


def test_the_landing_view_starts_the_first_tour_from_the_readers_sentence(visit: Visit) -> None:
    assert visit.each(".home button.main", "e.id") == ["start-tour"]
    assert visit.page.input_value(".begin input") == "The cat sat on the mat and slept"
    visit.page.fill(".begin input", "to be or not to be")
    visit.page.press(".begin input", "Enter")
    visit.page.wait_for_selector("body.touring")
    visit.settle()
    assert visit.page.input_value(".guide.tour .says input") == "to be or not to be"
    assert "6 × 6 scores" in visit.text(".guide.tour .sentence")


WRITTEN = """() => {
  const { scene } = flashtilePage.views.a;
  const written = [];
  const write = scene.write;
  scene.write = (text, ...place) => { written.push(text); write(text, ...place); };
  flashtilePage.draw();
  scene.write = write;
  return written;
}"""


def test_weights_in_the_place_of_scores_are_called_so(visit: Visit, recorded: Recorded) -> None:
    events = recorded(TILED).trace.events
    scores = next(at for at, e in enumerate(events, 1) if e.op == "S = Q K^T")
    weights = next(at for at, e in enumerate(events, 1) if e.op.startswith("P ="))
    for at, called in ((scores, False), (weights, True)):
        visit.go(address(TILED, at))
        assert ("P" in visit.page.evaluate(WRITTEN)) == called


def test_results_fill_hbm_as_they_are_written(visit: Visit) -> None:
    """Inputs are there from the start, O in halves."""
    filled = """() => {
      const { scene } = flashtilePage.views.a;
      const isColoured = (name, share) => {
        const { left, top, width, height } = scene.places.get(name);
        const [x, y] = [left + width / 2, top + share * height].map((at) => Math.round(at * scene.ratio));
        const shown = [...scene.context.getImageData(x, y, 1, 1).data.slice(0, 3)];
        return flashtilePage.colours[name] === `rgb(${shown.join(", ")})`;
      };
      return ["Q", "O"].map((name) => [0.25, 0.75].map((share) => isColoured(name, share)));
    }"""
    events = small_events()
    stored = [at for at, e in enumerate(events, 1) if e.kind == "store" and e.name == "O"]
    for at, output in (
        (stored[0] - 1, [False, False]),
        (stored[0] + 1, [True, False]),
        (len(events), [True] * 2),
    ):
        visit.go(address(TILED, at))
        assert visit.page.evaluate(filled) == [[True, True], output]


def small_events() -> list[Any]:
    memory = Memory(100 * 1024, trace=Trace())
    flash2.forward(*torch.randn(3, 8, 4), memory, block_m=4, block_n=4)
    assert memory.trace is not None
    return memory.trace.events


def test_the_line_of_a_move_crosses_no_name(visit: Visit) -> None:
    visit.go(address(TILED, 1))
    ends = visit.page.evaluate(
        """() => {
          const { scene } = flashtilePage.views.a;
          const ends = [];
          for (const name of ["moveTo", "lineTo"]) {
            const draw = scene.context[name];
            scene.context[name] = (x, y) => { ends.push(y); draw.call(scene.context, x, y); };
          }
          const { clock } = flashtilePage;
          while (scene.run.trace.event(clock.at - 1).kind !== "load") clock.at += 1;
          flashtilePage.draw();
          const { top, height } = scene.bus;
          return ends.map((y) => top <= y && y <= top + height);
        }"""
    )
    assert ends == [True, True]


def test_standard_attention_is_not_compared_with_itself(visit: Visit) -> None:
    visit.go("a=standard&seqlen=8&head_dim=4&at=20")
    assert "standard" not in visit.text("[data-counter=beside_standard]")
    visit.go(address(TILED, 12))
    assert visit.text("[data-counter=beside_standard]").endswith("of standard")


def test_all_scores_are_held_once(visit: Visit) -> None:
    for at in (8, 10, 20):
        visit.go(f"a=standard&seqlen=8&head_dim=4&at={at}")
        assert visit.text("[data-counter=scores_held]") == "64 of 64"
    visit.go(address(TILED, 12))
    assert visit.text("[data-counter=scores_held]") == "16 of 64"


def test_flash_decoding_opens_with_several_splits(visit: Visit) -> None:
    visit.go("a=flash_decoding")
    assert "num_splits=8" in visit.state_text


@pytest.mark.parametrize("visit", [PHONE], indirect=True)
def test_an_algorithm_that_is_chosen_far_down_opens_at_its_top(visit: Visit) -> None:
    visit.page.click(".more > summary")
    visit.page.click("[data-algorithm=flash2_backward]")
    visit.settle()
    assert visit.page.evaluate("document.querySelector('main').scrollTop") == 0


def test_back_leads_from_a_tour_to_the_landing_view(visit: Visit) -> None:
    visit.page.click("#start-tour")
    visit.page.wait_for_selector("body.touring")
    visit.settle()
    visit.press("ArrowRight")
    visit.page.go_back()
    visit.page.wait_for_selector("body[data-view=home]")
    assert visit.page.is_hidden(".guide.tour")
    visit.page.go_forward()
    visit.page.wait_for_selector("body.touring")


def test_a_tour_folds_everything_but_the_stage_and_its_sentence(visit: Visit) -> None:
    visit.go("tour=slow&scene=2")
    assert visit.page.is_hidden("[data-run=a] .code")
    visit.page.click(".log > summary")
    assert visit.page.is_visible("[data-run=a] .code")
    visit.go(address(TILED, 12))
    assert visit.page.is_visible("[data-run=a] .code")


def test_events_are_said_in_words_of_a_reader(visit: Visit) -> None:
    visit.go("a=standard&seqlen=8&head_dim=4&at=5")
    assert visit.text("[data-run=a] .now") == "Make room in SRAM for the scores of queries 0–7 with keys 0–7."
    visit.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert visit.text("[data-run=a] .now") == "Compute the scores of queries 0–7 with keys 0–7: S += Q Kᵀ."


def test_the_race_moves_at_once_and_its_bytes_are_counted(visit: Visit, recorded: Recorded) -> None:
    for algorithm, block in (("flash2", "64x64"), ("standard", None)):
        sram = None if block else 100 * 1024
        totals = recorded(Setting(algorithm, 1024, 64, block=block, sram_bytes=sram)).totals
        bytes_of = "(name) => flashtilePage.home.race.lanes.find(({ algorithm }) => algorithm === name).bytes"
        assert visit.page.evaluate(bytes_of, algorithm) == totals["hbm_read"] + totals["hbm_written"]
    visit.page.wait_for_function(
        "document.querySelector('[data-racer=standard] .bytes').textContent !== '0\\u202fB'"
    )


@pytest.mark.parametrize("visit", [{"reduced_motion": "reduce"}], indirect=True)
def test_the_race_stands_at_its_end_for_whoever_wants_no_motion(visit: Visit) -> None:
    said = visit.each(".lane .bytes", "e.textContent")
    visit.draw_frames(5)
    assert all(text.startswith("done after") for text in said)
    assert visit.each(".lane .bytes", "e.textContent") == said
