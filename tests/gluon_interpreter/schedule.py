"""Scheduler: partitions are threads, of which one runs at a time, and copies complete at random times.

A thread may hand over to another one wherever it synchronises. The seed decides which thread continues and
which copy completes. So a run can be repeated, and another seed gives another order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Hashable
from typing import Any

from gluon_interpreter.errors import DeadlockError, KernelError

PATIENCES = (0.02, 0.3, 1.0)
"""Probabilities that a copy completes at a possible hand-over; each run uses one of them."""
HAND_OVERS = (0.1, 0.5, 1.0)
"""Probabilities that a thread hands over although it could continue; each run uses one of them."""

_local = threading.local()


class Stopped(BaseException):
    """Raised in the other threads of a run to end them after one has found a fault."""


class Copy:
    """A copy in flight, which completes in one or several steps."""

    def __init__(self, name: str, *steps: Callable[[], None]) -> None:
        self.name = name
        self._steps = list(steps)

    @property
    def steps_left(self) -> int:
        return len(self._steps)

    def land(self, steps_left: int = 0) -> None:
        """Perform steps until ``steps_left`` are left."""
        while len(self._steps) > steps_left:
            self._steps.pop(0)()


class Task:
    """A thread of the interpreter."""

    def __init__(self, schedule: Schedule, name: str, body: Callable[[], Any], state: Any) -> None:
        self.schedule, self.name, self.state = schedule, name, state
        self.result: Any = None
        self.done = False
        self.until: Callable[[], bool] | None = None
        """Condition that a waiting thread waits for; None if it does not wait."""
        self.reason: Callable[[], str] = str
        self.seen: dict[Hashable, tuple[Any, int]] = {}
        """(value, version of memory) at the thread's last poll, by the polled address."""
        self._body = body
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def ready(self) -> bool:
        return not self.done and (self.until is None or self.until())

    def _run(self) -> None:
        _local.task = self
        self.turn.acquire()
        try:
            if self.schedule.fault is None:
                self.result = self._body()
        except Stopped:
            pass
        except BaseException as fault:  # raised again by the thread that started the run
            if isinstance(fault, KernelError):
                fault.args = (f"{self.name}: {fault}", *fault.args[1:])
            self.schedule.fault = self.schedule.fault or fault
        self.done = True
        self.schedule.hand_over(self)


def current_task() -> Task:
    """Return the task of the running thread."""
    return _local.task


class Schedule:
    """All threads and copies of a launch."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._patience = self._random.choice(PATIENCES)
        self._hand_over = self._random.choice(HAND_OVERS)
        self._tasks: list[Task] = []
        self._copies: list[Copy] = []
        self._finished = threading.Semaphore(0)
        self.fault: BaseException | None = None
        self.version = 0
        """Number of changes of global memory so far; threads that poll memory wait for the next change."""

    def start(self, name: str, body: Callable[[], Any], state: Any) -> Task:
        task = Task(self, name, body, state)
        self._tasks.append(task)
        task.thread.start()
        return task

    def run(self) -> None:
        """Run until all threads have ended, and raise the fault if one was found."""
        self.hand_over(None)
        self._finished.acquire()
        if self.fault is not None:
            for task in self._tasks:
                task.turn.release()
            raise self.fault
        while self._copies:
            self._land_one()

    def launch(self, copy: Copy) -> None:
        """Start a copy, which completes at some later time."""
        self._copies.append(copy)

    def land(self, copy: Copy, steps_left: int = 0) -> None:
        """Perform the steps of a copy now until ``steps_left`` are left."""
        copy.land(steps_left)
        if not copy.steps_left and copy in self._copies:
            self._copies.remove(copy)

    def _land_one(self) -> None:
        copy = self._random.choice(self._copies)
        self.land(copy, copy.steps_left - 1)

    def shuffled(self, count: int) -> list[int]:
        order = list(range(count))
        self._random.shuffle(order)
        return order

    def pause(self) -> None:
        """Let a copy complete and let another thread run, each at random."""
        if self._copies and self._random.random() < self._patience:
            self._land_one()
        if self._random.random() < self._hand_over:
            self.hand_over(current_task())

    def wait(self, until: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Let the running thread wait until ``until()`` is true; ``reason()`` describes it in a deadlock."""
        self.pause()
        if until():
            return
        task = current_task()
        task.until, task.reason = until, reason
        self.hand_over(task)
        task.until = None

    def poll(self, key: Hashable, read: Callable[[], Any], name: Callable[[], str]) -> Any:
        """Return ``read()``, a value that another program may change.

        If neither the value nor memory has changed since the last poll of ``key``, first wait for a change.
        """
        task = current_task()
        self.pause()
        found = read()
        if task.seen.get(key) == (found, self.version):
            version = self.version
            self.wait(lambda: self.version != version, lambda: f"polls {name()}, which is {found}")
            found = read()
        task.seen[key] = found, self.version
        return found

    def hand_over(self, task: Task | None) -> None:
        """Hand over to a random thread that can continue; return when it is the turn of ``task`` again.

        If ``task`` has ended or is None, return at once.
        """
        try:
            chosen = self._choose()
        except Exception as fault:  # raised again by the thread that started the run
            self.fault, chosen = fault, None
        if chosen is task and task is not None and not task.done:
            return
        if chosen is None:
            self._finished.release()
        else:
            chosen.turn.release()
        if task is not None and not task.done:
            task.turn.acquire()
            if self.fault is not None:
                raise Stopped

    def _choose(self) -> Task | None:
        """Return a random thread that can continue; None if all have ended or one has found a fault.

        Raises:
            DeadlockError: no thread can continue, and no copy is in flight.
        """
        if self.fault is not None:
            return None
        while True:
            ready = [task for task in self._tasks if task.ready]
            if ready:
                return self._random.choice(ready)
            if all(task.done for task in self._tasks):
                return None
            if not self._copies:
                waiting = [f"{task.name} {task.reason()}" for task in self._tasks if not task.done]
                raise DeadlockError("nobody can go on:\n  " + "\n  ".join(waiting))
            self._land_one()
