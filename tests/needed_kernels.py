"""Which kernels calls need, found without compiling any, and traffic for an engine in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence

import flashtile
from flashtile.backends.common.device import Target
from flashtile.backends.common.first_calls import only_naming, unpickled
from flashtile.backends.compat import compiling_driver
from flashtile.compilation.compiling import _wanted, launches, representatives
from flashtile.engine.sampling_params import BeamSearchParams

H200 = Target("H200", (9, 0), 132)


def traffic(llm: flashtile.LLM, count: int, kinds: tuple = ({},)) -> None:
    """Ask for answers to many random prompts at once, as the server's soak test does: some are searched."""
    draw = random.Random(1)
    prompts, params = [], []
    for _ in range(count):
        first, length = draw.randrange(40), draw.randrange(1, 20)
        prompts.append({"prompt_token_ids": [(first + i) % 99 for i in range(length)]})
        tokens = draw.randrange(1, 40)
        if draw.random() < 0.1:
            params.append(BeamSearchParams(beam_width=2, max_tokens=tokens))
        else:
            n = draw.choice((1, 1, 1, 2, 4))
            given = {"n": n, "temperature": 0.5, "seed": 1, "max_tokens": tokens, **draw.choice(kinds)}
            params.append(flashtile.SamplingParams(**given))
    llm._run(prompts, params, [draw.randrange(3) for _ in prompts])


def kernels(calls: list) -> set[tuple[str, str]]:
    """The kernels of calls on an H200: name, key in folders of compiled kernels.

    That few calls need those of all, ``test_representatives_have_the_kernels_of_all_calls`` shows.
    """
    return named(representatives(calls, H200))


def named(calls: list) -> set[tuple[str, str]]:
    """The kernels of calls, as in :func:`kernels`, by the sources of every call."""
    found, failures = _wanted(calls, [H200])
    assert failures == []
    return {(unpickled(source)[0].name, key) for key, (_, _, source) in found.items()}


def keys_of(calls: Iterable, target: Target = H200) -> set:
    """The keys of the kernels of calls in a process."""
    return {launch.kernel_key(tensors) for call in calls for launch, tensors in launches(call, target)}


def lacking(calls: Collection, listed: Sequence, target: Target = H200) -> tuple[set, int]:
    """The keys of the kernels of calls that no listed call needs, and the number of all keys.

    Listed calls are looked at until all keys are found: first those that are among the calls, then the others
    in any order, because a few of them need most kernels.
    """
    missing = keys_of(calls, target)
    count = len(missing)
    among = set(calls)
    for call in sorted(random.Random(0).sample(listed, len(listed)), key=lambda call: call not in among):
        if not missing:
            break
        missing -= keys_of([call], target)
    return missing, count


def kernel_of(launch: Callable) -> set[tuple[str, str]]:
    """The kernel that ``launch`` compiles, as in :func:`kernels`. It is not compiled."""
    with compiling_driver(H200.capability, only_named=True), only_naming() as found:
        launch()
    return {(source.name, key) for key, (source, _, _) in found.items()}
