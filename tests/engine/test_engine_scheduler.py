"""Every decision of the scheduler, without tensors."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

import called
from flashtile.compilation.calls import Call, sizes_between
from flashtile.engine.config import parse_config
from flashtile.engine.request import Request, State
from flashtile.engine.sampling_params import SamplingParams
from flashtile.engine.scheduler import COPY, SWAP_IN, SWAP_OUT, Scheduler
from flashtile.engine.step_calls import Limits, _chunks, _sizes, step_calls
from flashtile.kv_cache import BlockManager
from walk import walk

pytestmark = pytest.mark.quick


class World:
    """A scheduler, and a device that answers with made-up tokens one step later."""

    def __init__(self, blocks=16, block_size=4, seqs=4, budget=32, host_blocks=0, prefix_caching=True):
        manager = BlockManager(
            blocks, block_size, max_sequences=seqs, max_seqlen=64, num_host_blocks=host_blocks
        )
        self.scheduler = Scheduler(manager, budget, prefix_caching)
        self.requests: list[Request] = []
        self.in_flight = []

    def add(self, prompt: int | list[int], outputs=4, n=1, priority=0) -> Request:
        number = len(self.requests)
        tokens = [1000 * number + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(n=n, max_tokens=outputs)
        request = Request(str(number), number, None, tokens, params, max_outputs=outputs, priority=priority)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self):
        """The next schedule, with the results of the last one read after it."""
        schedule = self.scheduler.schedule()
        # What is written in a step is not moved before it.
        samples = [one for entry in schedule.entries for one in (entry.sequence, *entry.samples)]
        assert {one.state for one in samples} <= {State.RUNNING}
        for sequence in self.in_flight:
            sequence.pending -= 1
            if sequence.state is not State.FINISHED:
                sequence.append(7)
                if len(sequence.outputs) == sequence.request.max_outputs:
                    self.scheduler.finish(sequence, "length")
        self.in_flight = [one for entry in schedule.entries for one in entry.samples]
        self.scheduler.manager.check_integrity()
        return schedule

    def shape(self):
        """[(request, tokens)] of the next schedule."""
        return [(entry.sequence.request.number, entry.num_tokens) for entry in self.step().entries]


def test_single_tokens_and_chunks_share_a_step():
    world = World(budget=10, blocks=32)
    world.add(4)
    assert world.shape() == [(0, 4)]
    world.add(25)
    assert world.shape() == [(0, 1), (1, 9)]
    world.add(3)
    assert world.shape() == [(0, 1), (1, 9)]  # the third finds no token left
    assert world.shape() == [(0, 1), (1, 7), (2, 2)]
    assert world.shape() == [(1, 1), (2, 1)]  # the first has its four tokens


def test_a_long_prompt_leaves_room_for_single_tokens_behind_it():
    world = World(budget=8, blocks=32)
    world.add(30)
    world.step()
    world.add(2, outputs=10)
    assert [world.shape() for _ in range(3)] == [[(0, 8)], [(0, 8)], [(0, 6), (1, 2)]]
    world.add(40)
    assert world.shape() == [(0, 1), (1, 1), (2, 6)]


def test_priority_goes_before_arrival():
    world = World(seqs=1)
    for priority in (0, 0, -1):
        world.add(2, outputs=1, priority=priority)
    order = [shape[0][0] for _ in range(8) if (shape := world.shape())]
    assert order == [2, 0, 1]


def test_the_last_to_come_loses_its_blocks_and_is_computed_again():
    world = World(blocks=6, seqs=2, prefix_caching=False)
    world.add(8, outputs=10)
    world.add(7, outputs=10)
    preempted = []
    for _ in range(40):
        schedule = world.step()
        preempted += [sequence.request.number for sequence in schedule.preempted]
    assert preempted == [1]
    assert all(request.finished for request in world.requests)
    assert [len(request.sequences[0].outputs) for request in world.requests] == [10, 10]
    assert world.requests[1].metrics.preemptions == 1


def test_swapped_sequences_come_back_without_computing():
    world = World(blocks=6, seqs=2, host_blocks=8, prefix_caching=False)
    world.add(8, outputs=10)
    world.add(7, outputs=10)
    moves, computed = [], Counter()
    for _ in range(40):
        schedule = world.step()
        moves += [what for what, _ in schedule.moves]
        computed.update({entry.sequence.request.number: entry.num_tokens for entry in schedule.entries})
    assert moves == [SWAP_OUT, SWAP_IN]
    assert computed == {0: 8 + 9, 1: 7 + 9}  # each token once; the last one is never an input
    assert all(request.finished for request in world.requests)


def test_parallel_answers_are_forked_when_the_prompt_is_done_and_copy_on_write():
    world = World(seqs=3, budget=8)
    request = world.add(10, outputs=3, n=3)
    assert len(world.step().entries[0].samples) == 0
    assert len(world.step().entries[0].samples) == 3
    schedule = world.step()
    assert [(entry.sequence.index, entry.start, entry.num_tokens) for entry in schedule.entries] == [
        (0, 10, 1), (1, 10, 1), (2, 10, 1),
    ]  # fmt: skip
    assert [(what, len(pairs)) for what, pairs in schedule.moves] == [(COPY, 2)]
    assert world.scheduler.manager.usage().saved == 1 - 5 / 9
    for _ in range(4):
        world.step()
    assert request.finished


def test_a_fork_calls_few_functions():
    """A prompt's last step is launched after its answers are forked, so the device may wait for them."""

    def functions(answers: int, prompt: int) -> int:
        world = World(blocks=64, seqs=32, budget=64)
        world.add(prompt, n=answers)
        return called.functions_called(world.scheduler.schedule)

    forks = functions(32, 9) - functions(2, 9)
    assert forks < 30 * 20
    assert functions(32, 41) - functions(2, 41) == forks  # the length of the prompt does not matter


def test_a_prompt_is_copied_when_its_answers_get_tokens():
    """Not before the step that draws these tokens is launched."""
    world = World(seqs=3)
    request = world.add(10, outputs=3, n=3)
    world.step()
    assert len({id(one.tokens) for one in request.sequences}) == 1
    world.step()
    assert len({id(one.tokens) for one in request.sequences}) == 3
    assert [one.tokens for one in request.sequences] == [[*request.prompt_token_ids, 7]] * 3


def test_answers_to_come_have_their_seats():
    world = World(seqs=3, budget=4)
    world.add(6, n=3)
    world.add(2)
    assert world.shape() == [(0, 4)]
    assert world.scheduler._seats_taken() == 3  # one is taken, two are for the answers to come
    assert world.shape() == [(0, 2)]
    assert world.shape() == [(0, 1)] * 3


def test_waiting_requests_start_together():
    world = World(blocks=200, seqs=64, budget=256)
    for i in range(70):
        world.add(1, outputs=2 + i // 2)
    started = [sum(entry.start == 0 for entry in world.step().entries) for _ in range(8)]
    assert started == [64, 0, 0, 2, 2, 2, 0, 0]


def test_a_prompt_is_found_again_one_step_after_it_was_computed():
    world = World(budget=40)
    tokens = list(range(13))
    world.add(tokens)
    world.step()
    world.add([*tokens[:12], 99])
    assert world.shape() == [(0, 1), (1, 1)]
    assert world.requests[1].num_cached_tokens == 12


def test_what_never_fits_is_refused():
    world = World(blocks=4)
    world.add(12, outputs=4)
    with pytest.raises(ValueError, match="need 5 blocks of keys and values, got a cache of 4"):
        world.add(13, outputs=4)


@walk("host_blocks", [0, 5, 40])
@walk("seed", range(6))
def test_random_programs_lose_nothing(seed, host_blocks):
    """Requests of all kinds in a small pool, some aborted, some reset: all end, and no block stays."""
    draw = random.Random(seed)
    world = World(blocks=draw.choice([8, 12]), seqs=5, budget=draw.choice([6, 24]), host_blocks=host_blocks)
    aborted = set()
    for _ in range(400):
        if len(world.requests) < 40 and draw.random() < 0.4:
            shared = list(range(draw.randrange(1, 17)))
            world.add(
                draw.choice([draw.randrange(1, 17), shared]), outputs=draw.randrange(1, 16),
                n=draw.choice([1, 1, 2, 4]), priority=draw.choice([0, 0, 1]),
            )  # fmt: skip
        if draw.random() < 0.03 and world.requests:
            request = draw.choice(world.requests)
            if not request.finished:
                aborted.add(request)
                for sequence in request.sequences:
                    world.scheduler.finish(sequence, "abort")
        resets = draw.random() < 0.03
        if resets:
            world.scheduler.reset_prefix_cache(reset_running_requests=True)
        entries = world.step().entries
        if resets:
            assert all(entry.start == 0 for entry in entries)
            assert {one.block_sequence for entry in entries for one in (entry.sequence, *entry.samples)} == {
                *world.scheduler.manager.sequences
            }
    for _ in range(2000):
        if all(request.finished for request in world.requests):
            break
        world.step()
    world.step()
    for request in world.requests:
        assert request.finished
        if request not in aborted:
            assert len(request.sequences) == request.params.n
            assert all(len(one.outputs) == request.max_outputs for one in request.sequences)
    assert world.scheduler.manager.sequences == ()
    assert not world.scheduler.running
    assert not world.scheduler.waiting
    assert world.scheduler._reserved_seats == 0
    assert world.scheduler.num_preemptions > 0


def test_sizes_of_steps_that_are_compiled_ahead():
    """The bounds, the powers of two between them, and sizes between these."""
    assert sizes_between(1, 20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert sizes_between(5, 17, parts=4) == [5, 6, 7, 8, 10, 12, 14, 16, 17]
    limits = Limits(64, max_num_seqs=2, max_num_batched_tokens=8, captured=False)
    assert list(_chunks(limits)) == [
        (1, 2, 2), (1, 3, 3), (1, 4, 4), (1, 6, 6), (1, 8, 8),
        (2, 3, 2), (2, 4, 2), (2, 4, 3), (2, 6, 3), (2, 5, 4), (2, 6, 4), (2, 8, 4), (2, 7, 6), (2, 8, 6),
        (2, 8, 7),
    ]  # fmt: skip
    assert _sizes(limits, 1) == [1, 2]
    guessing = replace(limits, max_num_seqs=40)
    assert _sizes(guessing, 4) == [*range(2, 65), 96, 128, 160]
    captured = replace(guessing, captured=True)
    assert _sizes(captured, 4) == [4, 8, 16, 32, 64, 96, 128, 160]
    assert _sizes(replace(captured, max_num_seqs=800), 1)[-4:] == [480, 512, 768, 800]


@pytest.mark.parametrize(("drafts", "world"), [(False, 1), (True, 1), (False, 2)])
def test_calls_of_steps_are_found_without_computing_them(drafts, world):
    pytest.importorskip("triton")
    config = parse_config(
        {
            "model_type": "llama", "vocab_size": 98, "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        }
    )  # fmt: skip
    limits = Limits(64, max_num_seqs=2, max_num_batched_tokens=8, block_size=4, num_blocks=16, world=world)
    calls = [call for call in step_calls(config, limits, drafts) if isinstance(call, Call)]
    assert {call.operation for call in calls} >= {"decode", "append_kvcache"}
    weights = [dict(call.arguments)["weight"] for call in calls if call.operation == "linear"]
    # Those of a checkpoint are contiguous, also if they are divided.
    assert all(one.stride == (one.shape[1], 1) for one in weights)
    assert min(one.shape[1] for one in weights) == 64 // world


@pytest.mark.parametrize("change", [{}, {"captured": False}, {"invariant": True}, {"grouped": True}])
def test_calls_of_steps_with_few_own_keys_are_found(change):
    """One program for a sequence and key head, where a graph may have it."""
    pytest.importorskip("triton")
    config = parse_config(
        {
            "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 16,
        }
    )  # fmt: skip
    limits = Limits(4096, max_num_seqs=24, max_num_batched_tokens=32, block_size=16, num_blocks=16, **change)
    calls = [dict(call.arguments) for call in step_calls(config, limits) if isinstance(call, Call)]
    attends = [one for one in calls if "q" in one and "k_cache" in one and not one.get("partial")]
    short = {one["q"].shape[0] for one in attends if one.get("num_splits") == 1 and not one.get("invariant")}
    assert short == ({16, 24} if change.keys() <= {"grouped"} else set())
    prior = {one["q"].shape[0] for one in attends if one.get("num_splits") == 1 and "prior_out" in one}
    assert prior == ({16, 24} if "grouped" in change else set())
