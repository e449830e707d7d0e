"""Groups of sequences that share blocks: which are found, what is read, and that answers stay the same."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_models import VOCABULARY, folder, load

from flashtile.backends.cpu import decode as cpu_decode
from flashtile.engine import BeamSearchParams, SamplingParams, groups, model, runner
from flashtile.engine import llm as llm_module
from flashtile.engine.groups import Cascade, Group, PrefixGroups, common_blocks, numbers_of_levels
from flashtile.engine.request import Request
from flashtile.engine.scheduler import Entry, Scheduler
from flashtile.kv_cache import BlockManager

SIZE = 4
"""Tokens of a block."""


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch):
    """Let every common block be worth a group."""
    monkeypatch.setattr(groups, "MIN_SAVED_BYTES", 1)


class Tables:
    """Sequences with blocks, whose prompts share beginnings, and the groups of their steps."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.manager = BlockManager(2000, SIZE, max_sequences=8, max_seqlen=400, num_host_blocks=2000)
        self.groups = PrefixGroups(self.manager)
        self.requests: dict[int, SimpleNamespace] = {}

    def prompt(self) -> list[int]:
        """A beginning that several prompts have, then a question that several have, then own tokens."""
        draw, beginning, question = self.draw, self.draw.randrange(3), self.draw.randrange(3)
        tokens = [beginning] * (0, 3, 4, 9)[draw.randrange(4)]
        return [*tokens, *[10 + question] * (0, 4, 11)[draw.randrange(3)], *[20 + draw.randrange(9)]]

    def change(self) -> None:
        """Create, fork, free, swap out or swap in a sequence."""
        manager, draw = self.manager, self.draw
        resident = [one for one in self.requests if not manager.is_swapped_out(one)]
        swapped = [one for one in self.requests if manager.is_swapped_out(one)]
        what = draw.choice(["create", "create", "fork", "fork", "free", "out", "in"])
        if what == "create" and len(self.requests) < 8:
            prompt = self.prompt()
            number = manager.create(prompt)
            beam = draw.choice((None, BeamSearchParams(2, 9)))
            self.requests[number] = SimpleNamespace(num_prompt=len(prompt), prompt=prompt, beam=beam)
        elif what == "fork" and resident and len(self.requests) < 8:
            parent = draw.choice(resident)
            if manager.length(parent) >= self.requests[parent].num_prompt:
                self.requests[manager.fork(parent)] = self.requests[parent]
        elif what == "free" and resident:
            number = draw.choice(resident)
            manager.free(number)
            del self.requests[number]
        elif what == "out" and resident:
            manager.swap_out([draw.choice(resident)])
        elif what == "in" and swapped:
            manager.swap_in([draw.choice(swapped)])

    def step(self) -> list[Entry]:
        """A step of some sequences: chunks of prompts, then single tokens. Complete prompts are cached."""
        entries = []
        for number, request in self.requests.items():
            if self.manager.is_swapped_out(number) or self.draw.random() < 0.1:
                continue
            start = self.manager.length(number)
            left = request.num_prompt - start
            count = self.draw.randrange(1, left + 1) if left > 0 else 1
            self.manager.reserve(number, count)
            sequence = SimpleNamespace(block_sequence=number, request=request)
            entries.append(Entry(sequence, start, count, self.manager.table.rows[number], ()))
            if left == count:
                self.manager.cache_blocks(number, request.prompt)
        self.draw.shuffle(entries)
        return entries


def grouped(finder: PrefixGroups, entries: list[Entry]) -> tuple[list[Entry], Cascade | None]:
    """The entries in order, and the groups of layers without a window."""
    ordered, cascades = finder(entries)
    return ordered, next((one for one, windows in cascades.items() if -1 in windows), None)


def shared_blocks(tables: list[list[int]]) -> int:
    """Number of blocks that all of these tables begin with."""
    equal = (len(set(column)) == 1 for column in zip(*tables, strict=False))
    return sum(itertools.takewhile(bool, equal))


def most_saved(tables: list[list[int]], levels: int) -> int:
    """The most blocks that groups save, by trying every division into groups at every level."""

    @functools.cache
    def best(members: tuple[int, ...], base: int, levels: int) -> int:
        if len(members) < 2 or not levels:
            return 0
        first, others = members[0], members[1:]
        found = best(others, base, levels)  # the first one is in no group
        for count in range(1, len(others) + 1):
            for chosen in itertools.combinations(others, count):
                group = (first, *chosen)
                depth = shared_blocks([tables[i] for i in group])
                if depth > base:
                    left = tuple(one for one in others if one not in chosen)
                    own = count * (depth - base) + best(group, depth, levels - 1)
                    found = max(found, own + best(left, base, levels))
        return found

    return best(tuple(range(len(tables))), 0, levels)


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(6))
def test_groups_of_random_tables_save_the_most_that_is_possible(seed, monkeypatch):
    """Each level must save as many more tokens than fewer levels as was asked for."""
    world, saved = Tables(seed), []
    monkeypatch.setattr(groups, "MIN_SAVED_BYTES", least := (1, 1, 6, 12, 17, 24)[seed])
    for _ in range(150):
        world.change()
        entries = world.step()
        ordered, cascade = grouped(world.groups, entries)
        assert sorted(map(id, ordered)) == sorted(map(id, entries))
        tables = []
        for entry in ordered:
            request = entry.sequence.request
            shared = min(entry.start, request.num_prompt) if request.beam is None else entry.start
            tables.append(world.manager.blocks(entry.sequence.block_sequence)[: shared // SIZE])
        by_one, by_two = (most_saved(tables, levels) * SIZE for levels in (1, 2))
        most = by_two if by_one >= least and by_two - by_one >= least else by_one * (by_one >= least)
        saved.append(0 if cascade is None else cascade.saved)
        assert saved[-1] == most
        covered = [0] * len(ordered)
        for level in () if cascade is None else cascade.levels:
            for start, stop, first, end in level:
                assert all(covered[i] == first for i in range(start, stop))  # level 1 begins with key 0
                assert shared_blocks(tables[start:stop]) * SIZE >= end
                covered[start:stop] = [end] * (stop - start)
    assert world.groups.num_saved == sum(saved) > 0


def test_levels_that_save_too_little_are_left_out(monkeypatch):
    world = Tables(0)
    manager = world.manager
    first = manager.create()
    manager.reserve(first, 9)
    numbers = [first, *(manager.fork(first) for _ in range(3))]
    for i, number in enumerate(numbers):
        manager.reserve(number, 8 if i < 2 else 1)
    twins = [manager.fork(number) for number in numbers[:1]]  # shares 4 blocks, all five share 2
    numbers, request = numbers + twins, SimpleNamespace(num_prompt=17, beam=None)
    sequences = [SimpleNamespace(block_sequence=number, request=request) for number in numbers]
    entries = [
        Entry(sequence, manager.length(number), 1, manager.table.row(number), ())
        for sequence, number in zip(sequences, numbers, strict=True)
    ]
    for least, levels in ((8, 2), (9, 1), (32, 1), (33, 0)):
        monkeypatch.setattr(groups, "MIN_SAVED_BYTES", 3 * least - 1)
        _, cascade = grouped(PrefixGroups(manager, token_bytes=3), entries)
        assert (0 if cascade is None else len(cascade.levels)) == levels, least
    monkeypatch.setattr(groups, "MIN_SAVED_BYTES", 1)
    # A long chunk is in no group, and comes last.
    long = entries[0]._replace(num_tokens=groups.MAX_NEW_TOKENS + 1)
    ordered, cascade = grouped(PrefixGroups(manager), [long, *entries[1:]])
    assert ordered[-1] is long
    assert cascade is not None
    assert cascade.levels[0] == (Group(0, 4, 0, 8),)


@pytest.mark.quick
def test_what_steps_of_256_answers_read(monkeypatch):
    """8 answers of 256 tokens to each of 32 prompts of 1,024, with Llama-3-8B's sizes in bf16.

    The mean step, with 128 tokens of each answer, reads 8.6 GB of keys and values instead of 38.6.
    """
    monkeypatch.undo()  # the engine's own bound of what is worth a group
    layers, token_bytes = 32, 2 * 8 * 128 * 2
    manager = BlockManager(32 * 1024 // 16 + 256 * 256 // 16, 16, max_sequences=256, max_seqlen=1280)
    finder = PrefixGroups(manager, (-1,) * layers, token_bytes)
    scheduler = Scheduler(manager, 32 * 1024, groups=finder)
    for number in range(32):
        params = SamplingParams(n=8, max_tokens=256)
        request = Request(str(number), number, None, [number] * 1024, params, max_outputs=256)
        scheduler.add(request)
    steps = []
    for _ in range(256):
        before = finder.num_read, finder.num_saved
        schedule = scheduler.schedule()
        steps.append((finder.num_read - before[0], finder.num_saved - before[1]))
        for sequence in itertools.chain.from_iterable(entry.samples for entry in schedule.entries):
            sequence.append(1)
            sequence.pending -= 1
    assert steps.pop(0) == (layers * 32 * 1024, 0)  # the prompts
    assert steps[127] == (layers * 256 * (1024 + 128), layers * 32 * 7 * 1024)
    assert {saved for _, saved in steps} == {steps[127][1]}
    alone, saved = (sum(column) / len(steps) * token_bytes for column in zip(*steps, strict=True))
    assert alone == 256 * (1024 + 128) * 2**17 == pytest.approx(38.6e9, rel=2e-3)
    assert alone - saved == (32 * 1024 + 256 * 128) * 2**17 == pytest.approx(8.6e9, rel=2e-3)


def visible_keys(entry: Entry, window: int) -> list[set[int]]:
    """The keys that each new token of a sequence sees."""
    return [
        set(range(max(0, at - window), at + 1)) for at in range(entry.start, entry.start + entry.num_tokens)
    ]


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(4))
def test_with_a_window_each_query_reads_what_it_sees_and_nothing_twice(seed):
    """Groups must have no key that a query does not see, and leave no gap before the others."""
    draw, clipped = random.Random(seed), 0
    for _ in range(300):
        count = draw.randrange(2, 7)
        start = draw.randrange(20, 40)
        entries = [
            Entry(None, start + draw.choice((0, 0, 0, draw.randrange(9))), draw.choice((1, 1, 1, 3)), 0, ())
            for _ in range(count)
        ]
        outer = Group(draw.randrange(count - 1), count, 0, draw.randrange(1, 18))
        inner = Group(outer.start, draw.randrange(outer.start + 1, count + 1), outer.end, 19)
        whole, window = Cascade(((outer,), (inner,)), 0), draw.randrange(12, 50)
        found = whole.within(window, entries, 1)
        for i, entry in enumerate(entries):
            own = 0
            read: list[int] = []
            for level in () if found is None else found.levels:
                for begin, stop, first, end in level:
                    if begin <= i < stop:
                        read += range(first, end)
                        own = end
            for seen in visible_keys(entry, window):
                assert sorted(read + [key for key in seen if key >= own]) == sorted(seen)
        if found is None or found is whole:
            continue
        assert found.saved == sum(
            (g.stop - g.start - 1) * (g.end - g.first) for one in found.levels for g in one
        )
        clipped += 1
    assert clipped > 10


def test_numbers_of_a_step_are_padded_to_its_batch():
    cascade = Cascade(((Group(1, 4, 0, 8), Group(5, 7, 0, 4)), (Group(2, 4, 8, 12),)), 0)
    assert len(cascade.numbers(9)) == numbers_of_levels(9, 2) == 7 * 12
    rows = torch.tensor(cascade.numbers(9)).view(7, 12).tolist()
    assert rows[0][:9] == [0, 8, 12, 12, 0, 4, 4, 0, 0]
    assert rows[1][:10] == [0, 1, 4, 5, 7, 8, 9, 9, 9, 9]  # sequences 0, 4, 7 and 8 are on their own
    assert rows[2][:9] == [0] * 9
    assert rows[3][:9] == [0, 8, 0, 4, 0, 0, 0, 0, 0]
    assert rows[4][:10] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 9]
    assert rows[5][:9] == [0, 0, 8, 0, 0, 0, 0, 0, 0]
    assert rows[6][:9] == [0, 0, 12, 0, 0, 0, 0, 0, 0]
    assert cascade.longest(1, 9) == (8, 8)
    assert cascade.longest(5, 14) == (14, 14)
    assert cascade.longest(6, 100) == (32, 16)


def test_common_blocks_are_counted_in_blocks():
    def blocks(*numbers: int) -> bytes:
        return torch.tensor(numbers, dtype=torch.int32).numpy().tobytes()

    assert common_blocks(blocks(1, 2, 3), blocks(1, 2, 3, 4)) == 3
    assert common_blocks(blocks(1, 2, 3), blocks(1, 2, 3 + 2**24)) == 2
    assert common_blocks(blocks(1), blocks(2)) == common_blocks(b"", blocks(2)) == 0


LENGTH = 12
SYSTEM = [(7 * i) % VOCABULARY for i in range(13)]
NESTED = [
    [*SYSTEM, *[(5 * i + question) % VOCABULARY for i in range(9)], *last]
    for question in (1, 2) for last in ([], [3], [4, 50, 6])
] + [[9, 8, 7]]  # fmt: skip
"""A system prompt, two questions with three endings each, and a prompt that shares nothing."""
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}
LITTLE_MEMORY = {"num_gpu_blocks_override": 34, "async_scheduling": True}
ENGINES = {
    "plain": ("llama3", {}),
    "overlapped": ("qwen3", {"async_scheduling": True}),
    "no prefix cache": ("llama3", {"enable_prefix_caching": False}),
    "chunks": ("llama3", {"max_num_batched_tokens": 16, "max_num_seqs": 12}),
    "recomputed": ("qwen3", LITTLE_MEMORY),
    "swapped": ("llama3", {**LITTLE_MEMORY, "swap_space": 0.001}),
    "chunks apart": ("llama3", {"max_num_batched_tokens": 24, "max_num_seqs": 12}),
    "chunks apart, guesses": (
        "qwen3",
        {
            "max_num_batched_tokens": 24,
            "max_num_seqs": 12,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        },
    ),
    "chunks apart, a draft model with a window": (
        "llama3",
        {
            "max_num_batched_tokens": 24,
            "max_num_seqs": 12,
            "speculative_config": {**DRAFT, "model": "gemma2"},
        },
    ),
    "chunks apart, a window": ("gemma2", {"max_num_batched_tokens": 24, "max_num_seqs": 12}),
    "some layers have a window": ("gemma2", {}),
    "some layers have a long window": ("gemma2", {"window": 64}),
    "all layers have a window": ("mistral", {}),
    "all layers have a long window": ("mistral", {"window": 24}),
    "windows, swapped": ("phi3", {**LITTLE_MEMORY, "swap_space": 0.001}),
    "sinks and experts": ("gpt_oss", {}),
    "an fp8 cache": ("llama3", {"kv_cache_dtype": "fp8"}),
    "prompt lookup": ("qwen2", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "a draft model": ("llama3", {"speculative_config": {**DRAFT, "model": "qwen3"}}),
    "a draft model with a window": ("llama3", {"speculative_config": {**DRAFT, "model": "gemma2"}}),
    "a tree of guesses": ("qwen3", {"speculative_config": {**DRAFT, "model": "llama3", "tree_width": 2}}),
}


def with_groups(monkeypatch, name: str, options: dict, captured: bool = False):
    """An engine with groups. ``captured``: its steps are padded, as for CUDA graphs, and computed again."""
    options = {"block_size": SIZE, **options}
    if (window := options.pop("window", None)) is not None:
        read = llm_module.read_config
        monkeypatch.setattr(
            llm_module, "read_config", lambda path: (
                replace(c := read(path), windows=tuple(window if one >= 0 else one for one in c.windows))
            ),
        )  # fmt: skip
    if (draft := options.get("speculative_config", {}).get("model")) is not None:
        options["speculative_config"] = {**options["speculative_config"], "model": folder(draft)}
    engines = [load(name, **options, cascade_attention=wanted) for wanted in (True, False)]
    # On the CPU no two padding sequences may write to the same one of the spare block's SIZE slots.
    monkeypatch.setattr(runner, "graph_batch", lambda batch: -(-batch // SIZE) * SIZE)
    for llm in engines if captured else ():
        monkeypatch.setattr(llm.engine.runner, "capture", lambda run: run)
        monkeypatch.setattr(llm.engine.runner, "_logits", torch.zeros(128, VOCABULARY))
    return engines


def noted(results: list, function, *arguments):
    """The result of a function, which is also appended to a list."""
    results.append(function(*arguments))
    return results[-1]


def levels_used(monkeypatch) -> dict[int, set[int]]:
    """The numbers of levels of the attention calls that follow, by the window of the layer."""
    used: dict[int, set[int]] = {}
    cascade = model.cascade_with_kvcache

    def attend(*tensors, levels, **options):
        used.setdefault(options.get("window_size", (-1, -1))[0], set()).add(len(levels))
        return cascade(*tensors, levels=levels, **options)

    monkeypatch.setattr(model, "cascade_with_kvcache", attend)
    return used


EAGER = ("plain", "chunks")
"""With ``make test``: the engines that are also computed without padding."""


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        pytest.param(name, captured, marks=() if captured or name in EAGER else pytest.mark.thorough)
        for name in ENGINES
        for captured in (True, False)
    ],
)
def test_answers_in_groups_are_those_without(name, captured, monkeypatch):
    """Greedy and sampled, of several answers for each prompt, some of which end earlier."""
    used = levels_used(monkeypatch)
    llm, plain = with_groups(monkeypatch, *ENGINES[name], captured)
    forms: list[tuple[runner.Form, bool]] = []
    if "apart" in name:
        for module in (groups, runner):
            monkeypatch.setattr(module, "MAX_NEW_TOKENS", 6)
        form_of = llm.engine.runner._form
        monkeypatch.setattr(llm.engine.runner, "_form", functools.partial(noted, forms, form_of))
    params = [
        SamplingParams(n=1 + i % 3, temperature=0.7 * (i % 2), seed=i, max_tokens=LENGTH - i, logprobs=1)
        for i in range(len(NESTED))
    ]
    for _ in range(2):  # the second time, prompts are found in the prefix cache
        outputs, expected = (one.generate(NESTED, params) for one in (llm, plain))
        for output, wanted in zip(outputs, expected, strict=True):
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in wanted.outputs]
            for one, other in zip(output.outputs, wanted.outputs, strict=True):
                assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    windows = set(llm.model_config.windows)
    assert used.keys() == windows
    # Prompts of one step share blocks only if an earlier step has cached them.
    if -1 in windows:
        assert used[-1] == ({1, 2} if llm.engine.scheduler.prefix_caching else {1})
    assert ("apart" in name) == any(form.few is not None for form, _ in forms)
    stats = llm.get_metrics()
    assert 0 < stats.kv_reads_saved < stats.kv_reads
    assert plain.get_metrics().kv_reads == 0
    manager = llm.engine.scheduler.manager
    manager.check_integrity()
    assert manager.sequences == ()
    if "num_gpu_blocks_override" in ENGINES[name][1]:
        assert stats.num_preemptions > 0
    if captured:
        captured_levels = {
            (window, len(longest))
            for form in llm.engine.runner.graphs
            for windows, longest in form.levels
            for window in windows
        }
        assert captured_levels >= {(-1, levels) for levels in used.get(-1, ())}
        assert {window for window, _ in captured_levels} == windows
        assert not any(form.levels for form in plain.engine.runner.graphs)


def test_few_own_keys_are_read_by_one_program(monkeypatch):
    """In graphs. Keys that a group shares do not count."""
    llm, plain = with_groups(monkeypatch, "llama3", {}, captured=True)
    monkeypatch.setattr(runner, "SHORT_BYTES", 4 * llm.model_config.head_dim * 9)  # 9 keys and values
    monkeypatch.setattr(model, "SHORT_TILES", 4 * llm.model_config.num_kv_heads)
    calls: list[tuple[int, int]] = []  # (most own keys, num_splits)

    def noting(attend):
        def noted(*tensors, cache_seqlens, num_splits=0, **options):
            own = cache_seqlens - options.get("cache_leftpad", 0)
            calls.append((int(own.max()), num_splits))
            return attend(*tensors, cache_seqlens=cache_seqlens, num_splits=num_splits, **options)

        return noted

    for name in ("cascade_with_kvcache", "flash_attn_with_kvcache"):
        monkeypatch.setattr(model, name, noting(getattr(model, name)))
    long, little = NESTED[0], NESTED[-1]  # 20 of 22 tokens are whole blocks; 3 tokens are none
    for engine, prompt, answers, short in (
        (llm, long, 4, {True, False}), (plain, long, 4, {False}), (plain, little, 4, {True, False}),
        (llm, long, 1, {False}), (llm, little, 1, {True, False}),
    ):  # fmt: skip
        calls.clear()
        engine.generate([prompt], SamplingParams(n=answers, seed=0, max_tokens=LENGTH))
        assert {count == 1 for _, count in calls} == short
        in_graphs = calls[llm.model_config.num_layers :]  # without the prompt's step
        assert all((count == 1) == (own <= 9) for own, count in in_graphs)


@pytest.mark.parametrize(
    ("own", "short"),
    [
        ([512] * 256, True), ([513] * 256, False), ([512] * 24, True), ([20] * 23, False),
        ([20, 560] * 112, True), ([20, 560] * 48, False), ([20, 560] * 56, False),
        ([250] * 222 + [560], True), ([250] * 222 + [575], False),
        ([1156] * 64, False), ([1156] * 256, False),
    ],
    ids=lambda one: f"{len(one)} of {min(one)} to {max(one)}" if isinstance(one, list) else None,
)  # fmt: skip
def test_which_steps_are_short(own, short):
    """With 8 key heads of 128: no sequence has many keys, or few in the mean, none over a third share."""
    config = SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=128, windows=(-1,))
    of = SimpleNamespace(kv_heads=8, invariant=False, config=config)
    of.may_be_short = functools.partial(model.Model.may_be_short, of)
    one = SimpleNamespace(model=of)
    schedule = SimpleNamespace(entries=[SimpleNamespace(start=keys - 1) for keys in own], cascades={})
    assert runner.Runner._is_short(one, schedule, len(own)) is short  # type: ignore[arg-type]


def test_the_layers_of_a_step_share_tables_that_no_other_step_has(monkeypatch):
    """A captured graph fills a table in its first layer, from the lengths of each replay."""
    llm, _ = with_groups(monkeypatch, "gemma2", {"window": 64}, captured=True)
    steps: list[list[tuple]] = []
    cascade, hidden = model.cascade_with_kvcache, model.Model.hidden

    def attend(*tensors, levels, **options):
        steps[-1].append(levels)
        return cascade(*tensors, levels=levels, **options)

    def compute(*arguments):
        steps.append([])
        return hidden(*arguments)

    monkeypatch.setattr(model, "cascade_with_kvcache", attend)
    monkeypatch.setattr(model.Model, "hidden", compute)
    llm.generate(NESTED, SamplingParams(n=2, max_tokens=5))
    grouped = [layers for layers in steps if layers]
    assert len(grouped) > 2
    found = []
    for layers in grouped:
        assert len(layers) == llm.model_config.num_layers
        tables = {id(level.tables): level.tables for levels in layers for level in levels}
        # A level of all layers, and, where a window hides keys, others of the layers that have one.
        assert len(tables) == len({id(level.end) for levels in layers for level in levels})
        assert all(table is not None for table in tables.values())
        found += tables.values()
    assert len(set(map(id, found))) == len(found)


def test_groups_are_the_default_where_bits_may_depend_on_the_batch():
    for options, has_groups in (
        ({}, True),
        ({"cascade_attention": False}, False),
        ({"batch_invariant": True}, False),
    ):
        assert (load("llama3", **options).engine.scheduler.groups is not None) == has_groups


def test_by_default_there_are_no_groups_beside_long_chunks(monkeypatch):
    """Their gain there is not measured."""
    monkeypatch.setattr(groups, "MIN_SAVED_BYTES", 1)
    for module in (groups, runner):
        monkeypatch.setattr(module, "MAX_NEW_TOKENS", 6)
    for cascade_attention in (None, True):
        llm = load(
            "llama3", block_size=SIZE, max_num_batched_tokens=24, max_num_seqs=12,
            cascade_attention=cascade_attention,
        )  # fmt: skip
        kinds, launch = set(), llm.engine.runner.launch

        def launched(schedule, kinds=kinds, launch=launch):
            most = max((entry.num_tokens for entry in schedule.entries), default=0)
            kinds.add((most > 6, bool(schedule.cascades)))
            return launch(schedule)

        monkeypatch.setattr(llm.engine.runner, "launch", launched)
        llm.generate(NESTED, SamplingParams(n=3, temperature=0, max_tokens=LENGTH))
        assert (False, True) in kinds
        assert ((True, True) in kinds) == (cascade_attention is True)


def test_beams_in_groups_are_those_without(monkeypatch):
    """Groups have what beams have in common: the prompt, and full blocks of their answers."""
    used = levels_used(monkeypatch)
    llm, plain = with_groups(monkeypatch, "llama3", {})
    launch, of_answers = llm.engine.runner.launch, []

    def launched(schedule):
        for cascade in schedule.cascades:
            for group in itertools.chain.from_iterable(cascade.levels):
                request = schedule.entries[group.start].sequence.request
                of_answers.append(group.end - request.num_prompt)
        return launch(schedule)

    monkeypatch.setattr(llm.engine.runner, "launch", launched)
    for _ in range(2):
        outputs, expected = (one.beam_search(NESTED[:4], BeamSearchParams(3, LENGTH)) for one in (llm, plain))
        for output, wanted in zip(outputs, expected, strict=True):
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in wanted.outputs]
    assert used == {-1: {1, 2}}
    assert SIZE <= max(of_answers) < LENGTH


def test_common_blocks_are_read_once_in_a_step(monkeypatch):
    """Counted where the CPU backend gathers the pages of a sequence."""
    llm, _ = with_groups(monkeypatch, "llama3", {})
    table, steps = llm.engine.scheduler.manager.table, []
    gather, launch = cpu_decode.tokens_of_pages, llm.engine.runner.launch

    def tokens_of_pages(cache, pages, descale, memory):
        steps[-1][1].extend(pages.tolist())
        return gather(cache, pages, descale, memory)

    def launched(schedule):
        shared = {
            table.entries[schedule.entries[group.start].row * table.max_blocks + at // SIZE]
            for cascade in schedule.cascades
            for level in cascade.levels
            for group in level
            for at in range(group.first, group.end, SIZE)
        }
        steps.append((shared, []))
        return launch(schedule)

    monkeypatch.setattr(cpu_decode, "tokens_of_pages", tokens_of_pages)
    monkeypatch.setattr(llm.engine.runner, "launch", launched)
    llm.generate(NESTED[:2], SamplingParams(n=3, max_tokens=3, ignore_eos=True))
    assert [len(shared) for shared, _ in steps] == [0, 10, 10]  # the full blocks of 22 and of 23 tokens
    layers = len(llm.engine.runner.model.layers)
    for shared, read in steps:
        assert {read.count(page) for page in shared} <= {2 * layers}  # keys, and values
