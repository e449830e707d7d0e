"""A server under load and abuse, for seconds in the suite and for minutes by ``make soak``.

Every call is answered, rightly or with the error that it deserves, whatever other clients do. In the end
nothing is left: no request, no block of the KV cache, no memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from itertools import count as numbers
from pathlib import Path

import aiohttp.web
from serving import MODEL, running, write_alphabet_model
from traffic import AT_A_TIME, OPTIONS, Traffic, known_answers

import flashtile.engine.request
from flashtile.engine.server.service import Limits

OF_CALLS = (flashtile.engine.request.Request, aiohttp.web.Request)
"""What stands for a call in the engine and in the server. None may stay behind."""

GROWTH = 48 * 2**20
"""Bytes by which a process may grow in its second half: what allocators keep."""

LIVES = 120
"""Seconds after which a process must not grow: before, it starts."""

MAY_HAPPEN = frozenset({"engine_dead"})
"""Errors of calls whose replica is stopped or killed in the middle of their answer."""


@dataclass
class Result:
    """``outcomes`` by kind; ``calls_alive`` after a quarter of the calls and after all.

    ``calls_alive`` are the calls that engine or server still hold, with those of one call that came last.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    calls_alive: list[int] = field(default_factory=list)
    preemptions: int = 0
    refusals: int = 0


def soak(model: Path, count: int, seed: int = 0) -> Result:
    """Ask a server of this process so often; AssertionError if an answer is wrong or something is left."""
    limits = Limits(
        max_concurrent_requests=AT_A_TIME - 2, max_connections=AT_A_TIME + 8, request_timeout=60,
        max_priority=2, access_log=False,
    )  # fmt: skip
    result, known = Result(), known_answers(model, 5)
    with running(model, limits, num_gpu_blocks_override=48, **OPTIONS) as server:
        engine, asynchronous = server.llm.engine, server.service.asynchronous
        others = _count_calls()  # those of other servers in this process
        for part, calls in enumerate((count // 4, count - count // 4)):
            traffic, left = Traffic(server.url, known, seed + part), iter(range(calls))
            asyncio.run(traffic.run(lambda left=left: next(left, None) is not None))
            result.outcomes += traffic.outcomes
            result.refusals += traffic.refusals
            deadline = time.monotonic() + 20
            while (engine.has_unfinished or server.service.in_flight) and time.monotonic() < deadline:
                time.sleep(0.02)  # for those whose clients went away
            server.complete(prompt="a", max_tokens=1)  # the engine holds its last step until the next one
            result.calls_alive.append(_count_calls() - others)
        assert not engine.has_unfinished
        assert (server.service.in_flight, asynchronous.is_alive) == (0, True)
        manager = engine.scheduler.manager
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
        assert not manager.sequences
        assert manager.pool.available == manager.pool.num_blocks - manager.pool.null_blocks
        assert all(one.left == one.right for one in manager.check_integrity())
        assert server.ask("/health")[0] == 200
        result.preemptions = engine.scheduler.num_preemptions
    assert sum(result.outcomes.values()) == count
    return result


def _count_calls() -> int:
    gc.collect()
    return sum(type(one) in OF_CALLS for one in gc.get_objects())


class Replicas:
    """``flashtile serve`` with two replicas on the CPU, each with memory for 48 blocks.

    Attributes:
        memory: by process, (when, bytes) as :meth:`look` has seen them.
    """

    def __init__(self, model: Path):
        command = [
            sys.executable, "-m", "flashtile", "serve", str(model), "--device", "cpu", "--port", "0",
            "--served-model-name", MODEL, "--data-parallel-size", "2", "--kv-cache-memory-bytes", "400000",
            "--max-priority", "2", "--max-concurrent-requests", str(AT_A_TIME - 2), "--idle-timeout", "5",
            "--max-connections", str(AT_A_TIME + 16), "--no-access-log", "--shutdown-timeout", "10",
        ]  # fmt: skip
        for name, value in OPTIONS.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stderr=self.log, env=environment)
        self.memory: dict[int, list[tuple[float, int]]] = {}
        deadline = time.monotonic() + 180
        found = None
        while not (found := re.findall(r"serving .* at (http://\S+)", self.said())):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)
        self.url = found[-1]

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    @property
    def pids(self) -> list[int]:
        """Of the replicas."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def ask(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return answer.read().decode()

    def look(self) -> None:
        for pid in (self.process.pid, *self.pids):
            try:
                found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            except OSError:
                continue
            if found:
                self.memory.setdefault(pid, []).append((time.monotonic(), int(found[1]) * 1024))

    async def disturb(self, draw: random.Random, seconds: float) -> Counter[str]:
        """Stop a replica for a moment or until it is noticed, or kill it, again and again."""
        done: Counter[str] = Counter()
        end = time.monotonic() + seconds
        for number in numbers():
            await asyncio.sleep(min(10.0, seconds / 6))
            pids, what = self.pids, ("stopped for a moment", "stopped", "killed")[number % 3]
            stopped_for = {"stopped for a moment": 2.0, "stopped": 20.0, "killed": 0.0}[what]
            if time.monotonic() + stopped_for > end - 5:
                return done
            if len(pids) < 2:
                continue
            # One lives as long as all of it, so that its memory can be watched.
            pid = draw.choice(pids) if stopped_for else max(pids)
            done[what] += 1
            os.kill(pid, signal.SIGSTOP if stopped_for else signal.SIGKILL)
            if stopped_for:
                await asyncio.sleep(stopped_for)
                os.kill(pid, signal.SIGCONT)
        return done

    def check_end(self) -> None:
        """Both serve, nothing runs, and every block is free."""
        deadline = time.monotonic() + 90
        while True:
            health, metrics = json.loads(self.ask("/health")), self.ask("/metrics")
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            values = [
                float(one)
                for name in names
                for one in re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", metrics, re.M)
            ]
            loads = json.loads(self.ask("/load"))["replicas"]
            if health["replicas"] == [True, True] and values == [0.0] * 6 and loads == [0, 0]:
                return
            assert time.monotonic() < deadline, (health, values, loads)
            time.sleep(0.2)

    def check_memory(self) -> list[str]:
        """What each process that lived long enough has grown by; AssertionError if that is too much."""
        told = []
        for pid, seen in self.memory.items():
            begun, ended = seen[0][0], seen[-1][0]
            early = [size for when, size in seen if when < (begun + ended) / 2]
            grown = seen[-1][1] - max(early)
            growth = f"{grown / 2**20:+.1f} in the second half"
            told.append(f"process {pid}: {ended - begun:.0f} s, {seen[-1][1] >> 20} MiB, {growth}")
            assert ended - begun < LIVES or grown < GROWTH, told
        return told

    def end(self) -> None:
        """SIGTERM ends all of it."""
        for pid in self.pids if self.process.poll() is None else ():
            os.kill(pid, signal.SIGCONT)
        self.process.terminate()
        try:
            code = self.process.wait(60)
        finally:
            self.process.kill()
        assert code == 0, (code, self.said())
        assert "Traceback" not in self.said(), self.said()


def soak_replicas(model: Path, seconds: float, seed: int = 0) -> str:
    """Ask two replicas for so long, while they are stopped and killed; what there is to say of it."""
    server = Replicas(model)
    try:
        traffic = Traffic(server.url, known_answers(model), seed, MAY_HAPPEN, pause=0.2)
        begun = time.monotonic()

        async def run() -> Counter[str]:
            async def watch() -> None:
                while time.monotonic() < begun + seconds:
                    server.look()
                    await asyncio.sleep(1)

            asking = traffic.run(lambda: time.monotonic() < begun + seconds)
            disturbing = server.disturb(random.Random(seed), seconds)
            return (await asyncio.gather(disturbing, asking, watch()))[0]

        disturbances = asyncio.run(run())
        server.check_end()
        lines = [
            f"{sum(traffic.outcomes.values())} calls in {time.monotonic() - begun:.0f} s: "
            f"{dict(traffic.outcomes)}",
            f"{traffic.refusals} refusals (429), the slowest call took {traffic.slowest:.1f} s",
            f"replicas: {dict(disturbances)}; all blocks are free again",
            *server.check_memory(),
        ]
        return "\n".join(lines)
    finally:
        server.end()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(soak_replicas(write_alphabet_model(Path(folder)), float(sys.argv[1])))
        except AssertionError as error:
            raise SystemExit(f"the soak test failed: {error}") from error
