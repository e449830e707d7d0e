"""Time two checkouts of flashtile against each other on one GPU, cell by cell, in turns.

    python -m benchmarks.two_trees OLD NEW --out ratios.json
    python -m benchmarks.two_trees OLD NEW --only host,grid --seconds 300
    python -m benchmarks.two_trees . .:four_rounds.py .:eight_rounds.py . --only masks --passes backward

OLD and NEW are folders that contain ``flashtile/``. Further ones are compared with OLD too; OLD again shows
how much two processes of the same code differ. A folder may be followed by a Python file, which its process
runs first: it can change a constant or a choice, for an experiment. Each runs in its own process, and only
one is timed at a time. The cells are the host time to issue small calls, and both passes of the
FlashAttention papers' grid, of the workloads ``shapes``, of calls with little work, of packed documents, of
chunks (``attention_chunk``) and of score and mask functions, and steps over paged caches. The results of
checkouts are compared with OLD's before they are timed. A ratio is old time / new time, so NEW is faster
where it exceeds 1. Results are ``identical`` if their norms and the sums of every seventh element are the
same to the last bit.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MIN_TURNS, MAX_TURNS = 3, 9
SETTLED = 0.02
"""Cells whose ratio differs from 1 by more are timed up to MAX_TURNS times, because clocks and load vary."""
MAX_DIFFERENCE = 0.02
"""Largest allowed difference between the results of the two checkouts, relative to the result's norm."""
HOST_BATCHES, HOST_CALLS = 15, 200
DEVICE = "cuda"


def grid_cells() -> list[dict[str, Any]]:
    return [
        {"set": "grid", "name": f"d{d}-s{s}{'-causal' * causal}", "which": which, "batch": 16384 // s,
         "seqlen_q": s, "seqlen_k": s, "heads": (2048 // d,) * 2, "head_dim": d, "causal": causal}
        for which in ("forward", "backward")
        for d in (64, 128, 256)
        for causal in (False, True)
        for s in (512, 1024, 2048, 4096, 8192, 16384)
    ]  # fmt: skip


def shape_cells() -> list[dict[str, Any]]:
    from benchmarks.suite.shapes import SHAPES

    return cells_of("shapes", SHAPES)


def little_cells() -> list[dict[str, Any]]:
    """Calls with little work that the suite draws, from two seeds."""
    from benchmarks.suite.workloads import select

    return cells_of("little", [w for seed in (0, 2) for w in select(["little"], seed=seed)])


def cells_of(group: str, workloads: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        {"set": group, "name": w.name, "which": which, "batch": w.batch, "seqlen_q": w.seqlen_q,
         "seqlen_k": w.seqlen_k, "heads": (w.num_heads_q, w.num_heads_kv), "head_dim": w.head_dim,
         "head_dim_v": w.head_dim_v, "causal": w.causal, "window": w.window_left + 1, "softcap": w.softcap,
         "alibi": w.alibi, "sink": w.sink}
        for which in ("forward", "backward")
        for w in workloads
    ]  # fmt: skip


def packed_cells() -> list[dict[str, Any]]:
    """Packed documents that the suite draws: a set of the first two workloads of each class, and the rest."""
    from benchmarks.suite.workloads import select

    return [
        {"set": "packed" if w.name.endswith((".0", ".1")) else "packed-rest", "name": w.name, "which": which,
         "lengths": [length for length, _ in w.sequences], "heads": (w.num_heads_q, w.num_heads_kv),
         "head_dim": w.head_dim, "causal": w.causal, "window": w.window_left + 1}
        for w in select(["packed"])
        for which in ("forward", "backward")
    ]  # fmt: skip


def chunk_cells() -> list[dict[str, Any]]:
    """Calls with ``attention_chunk``, as Llama 4's: two short chunks a row block, and long ones."""
    return [
        {"set": "chunks", "name": f"d{d}-s{s}-chunk{chunk}", "which": which, "batch": 16384 // s,
         "seqlen_q": s, "seqlen_k": s, "heads": (2048 // d,) * 2, "head_dim": d, "causal": True,
         "chunk": chunk}
        for which in ("forward", "backward")
        for d in (64, 128)
        for s, chunk in ((2048, 100), (8192, 2048))
    ]  # fmt: skip


def mask_cells() -> list[dict[str, Any]]:
    """Score functions, mask functions and block masks: the suite's at 4,096 tokens, some of others."""
    from benchmarks.suite.workloads import select

    named = [w.mod for w in select(["masks"]) if w.seqlen_q == 4096]
    calls = [(name, 4, 4096, 16, 128) for name in named]
    calls += [(name, 4, 4096, 32, 64) for name in ("document-causal", "alibi-causal", "global-window")]
    calls += [("window-by-head", 4, 4096, 16, d) for d in (64, 128)]
    calls += [("document-causal", 1, 16384, 16, 128), ("relative-document", 8, 2048, 16, 128)]
    calls += [("tree", 1, 9728, 8, 256), ("document-causal", 2, 8192, 8, 256), ("relative", 4, 4096, 8, 256)]
    return [
        {"set": "masks", "name": f"{name}-d{d}-s{s}", "which": which, "mod": name, "batch": batch,
         "seqlen_q": s, "seqlen_k": s, "heads": (heads, heads), "head_dim": d}
        for name, batch, s, heads, d in calls
        for which in ("forward", "backward")
    ]  # fmt: skip


def decode_cells() -> list[dict[str, Any]]:
    """Steps over a paged cache, of sequences of equal lengths and of very different ones."""
    draw = random.Random(0)

    def uneven(count: int, least: int, most: int) -> list[int]:
        return [round(least * (most / least) ** draw.random()) for _ in range(count)]

    equal = [
        (f"{batch}x{length}", [length] * batch, tokens, page, (32, 8))
        for batch, length, tokens, page in (
            (1, 8192, 1, 256), (8, 8192, 1, 16), (64, 2048, 1, 16), (8, 8192, 16, 64), (1, 16384, 256, 16),
        )
    ]  # fmt: skip
    ragged = [
        ("uneven-64", uneven(64, 128, 16384), 1, 16, (32, 8)),
        ("uneven-16", uneven(16, 1024, 32768), 4, 64, (32, 8)),
        ("uneven-256", uneven(256, 64, 4096), 1, 256, (28, 4)),
        ("131072-63x512", [131072] + [512] * 63, 1, 16, (32, 8)),
    ]
    return [
        {"set": "decode", "name": f"{name}-t{tokens}-p{page}", "which": "forward", "cached": cached,
         "tokens": tokens, "page": page, "heads": heads, "head_dim": 128}
        for name, cached, tokens, page, heads in equal + ragged
    ]  # fmt: skip


def host_cells() -> list[dict[str, Any]]:
    names = ("forward", "backward", "decode", "append", "block_mask", "score_mod")
    return [{"set": "host", "name": name, "which": "host"} for name in names]


def attention_call(cell: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return (function to time, function that returns the results to compare) of an attention cell."""
    import torch

    import flashtile

    torch.manual_seed(0)
    (heads_q, heads_kv), head_dim = cell["heads"], cell["head_dim"]
    width_v = cell.get("head_dim_v") or head_dim
    lengths = cell.get("lengths")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    total = (sum(lengths),) if lengths else None
    queries, keys = (total or (cell["batch"], cell[name]) for name in ("seqlen_q", "seqlen_k"))
    q = normal(*queries, heads_q, head_dim)
    k, v = normal(*keys, heads_kv, head_dim), normal(*keys, heads_kv, width_v)
    arguments: dict[str, Any] = {"causal": cell.get("causal", False), "softcap": cell.get("softcap", 0.0)}
    if cell.get("window"):
        arguments["window_size"] = (cell["window"] - 1, 0 if arguments["causal"] else -1)
    if cell.get("alibi"):
        arguments["alibi_slopes"] = torch.rand(heads_q, device=DEVICE)
    if cell.get("sink"):
        arguments["sink"] = torch.randn(heads_q, device=DEVICE)
    attend: Callable[..., Any] = flashtile.flash_attn_func
    if cell.get("mod"):
        attend, arguments = flashtile.attention, functions_of(cell)
    elif cell.get("chunk"):
        attend = functools.partial(flashtile.attention, attention_chunk=cell["chunk"])
    elif lengths:
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
        attend = functools.partial(
            flashtile.flash_attn_varlen_func, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths),
        )  # fmt: skip
    if cell["which"] == "forward":
        call = lambda: attend(q, k, v, **arguments)  # noqa: E731
        return call, lambda: (call(),)
    inputs = tuple(t.requires_grad_() for t in (q, k, v))
    out = attend(q, k, v, **arguments)
    dout = normal(*out.shape)
    call = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)  # noqa: E731
    return call, call


def functions_of(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the score function and the block mask of a cell of :func:`mask_cells` as arguments."""
    import flashtile

    # By its path: the checkout that is imported may have other functions, or none.
    mods = runpy.run_path(str(Path(__file__).with_name("suite") / "mods.py"))["MODS"]
    length = cell["seqlen_q"]
    score_mod, mask_mod = mods[cell["mod"]](length, cell["heads"][0], DEVICE)
    given: dict[str, Any] = {} if score_mod is None else {"score_mod": score_mod}
    if mask_mod is not None:
        create = flashtile.masks.create_block_mask
        given["block_mask"] = create(mask_mod, None, None, length, length, device=DEVICE)
    return given


def decode_call(cell: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what :func:`attention_call` returns, of a cell of :func:`decode_cells`."""
    import torch

    import flashtile

    torch.manual_seed(0)
    (heads_q, heads_kv), cached = cell["heads"], cell["cached"]
    head_dim, page = cell["head_dim"], cell["page"]
    q = torch.randn(len(cached), cell["tokens"], heads_q, head_dim, device=DEVICE, dtype=torch.bfloat16)
    counts = [math.ceil(length / page) for length in cached]
    pages = sum(counts)
    k_cache, v_cache = torch.randn(2, pages, page, heads_kv, head_dim, device=DEVICE, dtype=torch.bfloat16)
    own = torch.randperm(pages, device=DEVICE).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True)
    lengths = torch.tensor(cached, device=DEVICE, dtype=torch.int32)
    call = lambda: flashtile.flash_attn_with_kvcache(  # noqa: E731
        q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True
    )
    return call, lambda: (call(),)


def host_call(name: str) -> Callable[[], Any]:
    import torch

    import flashtile

    q, k, v = (torch.randn(2, 128, 8, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    if name == "backward":
        inputs = tuple(t.requires_grad_() for t in (q, k, v))
        out = flashtile.flash_attn_func(q, k, v, causal=True)
        return lambda: torch.autograd.grad(out, inputs, out, retain_graph=True)
    if name in ("decode", "append"):
        # Views are made here: a view costs as much as a part of the call that is measured.
        query, key, value = (t[:, :1] for t in (q, k, v))
        k_cache, v_cache = torch.randn(2, 64, 16, 8, 64, device=DEVICE, dtype=torch.bfloat16)
        table = torch.arange(64, device=DEVICE, dtype=torch.int32).reshape(2, 32)
        lengths = torch.full((2,), 100, device=DEVICE, dtype=torch.int32)
        more: dict[str, Any] = {"k": key, "v": value} if name == "append" else {}
        return lambda: flashtile.flash_attn_with_kvcache(
            query, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True, **more
        )
    if name == "block_mask":
        mask = flashtile.masks.create_block_mask(lambda b, h, i, j: i >= j, 2, 8, 128, 128, device=DEVICE)
        return lambda: flashtile.attention(q, k, v, block_mask=mask)
    if name == "score_mod":
        score_mod = lambda s, b, h, i, j: s - 0.1 * (i - j)  # noqa: E731
        return lambda: flashtile.attention(q, k, v, score_mod=score_mod)
    return lambda: flashtile.flash_attn_func(q, k, v, causal=True)


def device_time(call: Callable[[], Any], warm: bool = False, milliseconds: float = 20.0) -> float:
    """Return the median milliseconds of a call on the GPU, without the host time.

    The L2 cache is cold, or with ``warm`` as the call before left it.
    """
    import torch

    flushed = torch.empty(0 if warm else 2**28, dtype=torch.int8, device=DEVICE)
    call()
    pairs: list[tuple[Any, Any]] = []
    spent = 0.0
    while len(pairs) < 5 or (spent < milliseconds and len(pairs) < 40):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        if warm:
            call()
        torch.cuda._sleep(1_000_000)
        begin.record()
        call()
        end.record()
        end.synchronize()
        spent += begin.elapsed_time(end)
        pairs.append((begin, end))
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def host_time(call: Callable[[], Any]) -> float:
    """Return the microseconds that the host needs to issue a call.

    This is the minimum over several batches of calls, because other load on the machine only adds time.
    """
    import torch

    batches = []
    for _ in range(HOST_BATCHES):
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        batches.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
        torch.cuda.synchronize()
    return min(batches)


def work(changes: str, warm: bool) -> None:
    """Run as a worker: read questions from standard input and write an answer to each, as lines of JSON.

    The file ``changes`` runs first. A question is a cell to prepare, which is answered with checksums of its
    results, or "time", which is answered with the time of the last cell. An error is the answer
    {"error": text}.
    """
    import torch

    call: Callable[[], Any] = lambda: None  # noqa: E731
    cell: dict[str, Any] = {}
    sys.stdout, answers = sys.stderr, sys.stdout
    if changes:
        runpy.run_path(changes)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question == "time":
                answer: Any = host_time(call) if cell["which"] == "host" else device_time(call, warm)
            else:
                cell = question
                torch.cuda.empty_cache()
                if cell["which"] == "host":
                    call = host_call(cell["name"])
                    call()
                    answer = []
                else:
                    call, results = (decode_call if cell["set"] == "decode" else attention_call)(cell)
                    # Permuted results have the same norm, so a sum over some elements is added.
                    answer = [
                        [float(t.double().norm()), float((t.double().flatten()[::7]).sum())]
                        for t in results()
                    ]
        except Exception as error:  # reported, and the next cell is measured
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Tree:
    """A checkout, with changes or without, and its worker process."""

    def __init__(self, given: str, warm: bool) -> None:
        folder, _, changes = given.partition(":")
        self.name = given
        environment = {**os.environ, "PYTHONPATH": str(Path(folder).resolve())}
        changes = str(Path(changes).resolve()) if changes else ""
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", changes, *["--warm"] * warm]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd="/"
        )

    def ask(self, question: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def same(old: Any, new: Any) -> bool:
    return all(
        abs(a - b) <= MAX_DIFFERENCE * max(x[0], y[0])
        for x, y in zip(old, new, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def measure(trees: list[Tree], cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cell for each tree but the first, with its time, the first one's and their ratio.

    A tree that fails, or whose results differ from those of the first, has an error instead.
    """
    for tree in trees:  # all compile in parallel
        tree.ask(cell)
    expected, *others = [tree.answer() for tree in trees]
    entries: list[dict[str, Any]] = [{**cell, "tree": tree.name} for tree in trees[1:]]
    for entry, results in zip(entries, others, strict=True):
        failed = [answer["error"] for answer in (expected, results) if isinstance(answer, dict)]
        if failed:
            entry["error"] = failed[0]
        elif not same(expected, results):
            entry["error"] = f"results differ: {expected}, {results}"
        elif cell["which"] != "host":
            entry["identical"] = expected == results
    timed = [(entry, tree) for entry, tree in zip(entries, trees[1:], strict=True) if "error" not in entry]
    if not timed:
        return entries
    contestants = [trees[0], *(tree for _, tree in timed)]
    times: list[list[float]] = [[] for _ in contestants]
    of_turns = min if cell["which"] == "host" else statistics.median
    for turn in range(MAX_TURNS):
        old, *rest = (of_turns(own) if own else math.nan for own in times)
        if turn >= MIN_TURNS and all(abs(old / new - 1) <= SETTLED for new in rest):
            break
        numbers = range(len(contestants))
        for number in numbers if turn % 2 == 0 else reversed(numbers):
            contestants[number].ask("time")
            times[number].append(contestants[number].answer())
    old, *rest = (of_turns(own) for own in times)
    for (entry, _), new in zip(timed, rest, strict=True):
        entry.update(old=old, new=new, ratio=old / new, turns=len(times[0]))
    return entries


def summarise(found: list[dict[str, Any]]) -> None:
    several = len({cell["tree"] for cell in found}) > 1
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in found:
        of_tree = f"{cell['tree']} " if several else ""
        groups.setdefault(f"{of_tree}{cell['set']} {cell['which']}", []).append(cell)
    for name, cells in groups.items():
        timed = sorted((c for c in cells if "ratio" in c), key=lambda c: c["ratio"])
        for cell in cells:
            if "error" in cell:
                print(f"  {name} {cell['name']}: {cell['error']}")
        if timed:
            mean = math.exp(sum(math.log(c["ratio"]) for c in timed) / len(timed))
            worst = ", ".join(
                f"{c['name']} {c['ratio']:.3f} ({c['old']:.4g}/{c['new']:.4g})" for c in timed[:6]
            )
            identical = sum(c.get("identical", False) for c in timed)
            of = f"{len(timed)} cells, {identical} identical" if "host" not in name else f"{len(timed)} cells"
            print(f"{name}: {of}, geometric mean {mean:.4f}; least {worst}")


def main() -> None:
    makers = {
        "host": host_cells, "grid": grid_cells, "shapes": shape_cells, "little": little_cells,
        "packed": packed_cells, "packed-rest": packed_cells, "chunks": chunk_cells, "decode": decode_cells,
        "masks": mask_cells,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", metavar="FOLDER[:FILE]")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help="time calls with a warm L2 cache")
    parser.add_argument("--only", default=",".join(makers), help="sets of cells, by commas; all by default")
    parser.add_argument("--passes", default="forward,backward,host", help="passes of these sets, by commas")
    parser.add_argument("--names", default="", help="names of cells, by commas; all by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after this time")
    parser.add_argument("--out", type=Path, help="JSON file for all cells")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return work(arguments.worker, arguments.warm)
    if len(arguments.trees) < 2:
        parser.error(f"expected two folders or more, OLD and NEW, got {len(arguments.trees)}")
    sys.path.insert(0, str(Path(arguments.trees[1].partition(":")[0]).resolve()))
    passes = arguments.passes.split(",")
    cells = [c for name in arguments.only.split(",") for c in makers[name]() if c["set"] == name]
    cells = [c for c in cells if c["which"] in passes]
    if arguments.names:
        cells = [c for c in cells if c["name"] in arguments.names.split(",")]
    trees = [Tree(given, arguments.warm) for given in arguments.trees]
    start = time.monotonic()
    found: list[dict[str, Any]] = []
    for cell in cells:
        if time.monotonic() - start > arguments.seconds:
            print(f"out of time before {cell['set']} {cell['which']} {cell['name']}")
            break
        found += measure(trees, cell)
        if arguments.out:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    summarise(found)


if __name__ == "__main__":
    main()
