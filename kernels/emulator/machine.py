"""The clock of an emulated block: which partition runs, when copies land, when products retire.

Exactly one partition holds the baton. At every point where hardware could interleave, the schedule may hand
the baton on, land a copy, or retire a product. Nothing is timed: a schedule is adversarial, not realistic.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.kernels.emulator.errors import Deadlock, EmulatorError, Stopped
from workbench.kernels.emulator.recorder import Kind, Recorder

#: How often a partition whose products are late lets others go first.
LAG = 12

When = Literal["early", "any", "late"]


@dataclass(frozen=True)
class Schedule:
    """One way to interleave: copies land and products retire at once, at any time, or as late as possible."""

    seed: int
    copies: When
    products: When


_TIMES: tuple[When, ...] = ("early", "any", "late")
#: Every combination of policies, each with a seed of its own.
SCHEDULES = tuple(
    Schedule(3 * i + j, copies, products)
    for i, copies in enumerate(_TIMES)
    for j, products in enumerate(_TIMES)
)


class Partition:
    """One group of warps: a thread, the products it has in flight, and its unfinished stores."""

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self.name = name
        self.body = body
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False
        self.products: deque[Callable[[], None]] = deque()
        self.issued = self.awaited = 0
        self.stored = self.drained = 0
        self.stores: deque[Callable[[], None]] = deque()

    def can_run(self) -> bool:
        """Whether it is neither finished nor behind a closed barrier."""
        return not self.done and (self.ready is None or self.ready())


class Machine:
    """Runs the partitions of one block under a schedule."""

    def __init__(self, schedule: Schedule, block: int, recorder: Recorder | None = None) -> None:
        self.schedule, self.block, self.recorder = schedule, block, recorder
        self.random = random.Random(f"{schedule.seed}/{block}")
        self.copies: list[Callable[[], None]] = []
        self.partitions: list[Partition] = []
        self.failure: BaseException | None = None
        self.current = Partition("kernel", lambda: None)
        self._finished = threading.Event()

    # -- called by the emulated instructions, by whoever holds the baton --------------------

    def note(self, kind: Kind, what: str = "", number: int = 0, by: Partition | None = None) -> None:
        """Tell the recorder, if there is one, what ``by`` (the current partition) did."""
        if self.recorder is not None:
            who = by or self.current
            index = self.partitions.index(who) if who in self.partitions else -1
            self.recorder.note(self.block, index, kind, what, number)

    def point(self) -> None:
        """A place where anything may happen in between."""
        self._background()
        if self.partitions and self.random.random() < 0.5:
            self._hand_on()

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Block the current partition; raises ``Deadlock`` when nothing can open the barrier any more."""
        self.point()
        while not ready():
            if not self.partitions:
                while self.copies and not ready():
                    self._land()
                if not ready():
                    raise Deadlock({"kernel": what})
                return
            self.current.ready, self.current.waits_for = ready, what
            self._hand_on()
            self.current.ready = None

    def copy(self, land: Callable[[], None]) -> None:
        """Start an asynchronous copy into shared memory."""
        self.copies.append(land)
        if self.schedule.copies == "early":
            self._land()

    def product(self, retire: Callable[[], None], what: str = "") -> None:
        """Start a warpgroup product of the current partition, with ``what``; they retire in order."""
        me = self.current
        me.issued += 1
        number = me.issued
        self.note("issues", what, number)

        def retired() -> None:
            retire()
            self.note("retired", what, number, by=me)

        me.products.append(retired)
        if self.schedule.products == "early":
            me.products.popleft()()

    def retire(self, outstanding: int) -> None:
        """Finish products of the current partition until at most ``outstanding`` are left.

        Under the late policy everyone else gets ahead first, as far as barriers let them.
        """
        for _ in range(LAG if self.schedule.products == "late" else 0):
            others = [p for p in self.partitions if p is not self.current and p.can_run()]
            if others:
                self._pass_to(self.random.choice(others))
        self.current.awaited = max(self.current.awaited, self.current.issued - outstanding)
        while len(self.current.products) > outstanding:
            self.current.products.popleft()()
        self.note("awaits", number=self.current.awaited)

    def store(self, write: Callable[[], None]) -> None:
        """Start an asynchronous copy out of shared memory."""
        self.current.stored += 1
        self.note("stores")
        self.current.stores.append(write)
        if self.schedule.copies == "early":
            self.current.stores.popleft()()

    def drain_stores(self, pending: int) -> None:
        """Finish stores of the current partition until at most ``pending`` are left."""
        self.current.drained = max(self.current.drained, self.current.stored - pending)
        while len(self.current.stores) > pending:
            self.current.stores.popleft()()

    # -- running ------------------------------------------------------------------------

    def run(self, partitions: Sequence[Partition]) -> None:
        """Run all partitions to their end; raises what the first failing one raised."""
        outer, self.partitions = self.current, list(partitions)
        threads = [threading.Thread(target=self._life, args=(p,), daemon=True) for p in self.partitions]
        for thread in threads:
            thread.start()
        self.current = self.random.choice(self.partitions)
        self.current.baton.release()
        self._finished.wait()
        for thread in threads:
            thread.join()
        self.current, self.partitions = outer, []
        if self.failure is not None:
            raise self.failure

    def _life(self, partition: Partition) -> None:
        partition.baton.acquire()
        try:
            if self.failure is None:
                partition.body()
                self.leave(partition)
        except Stopped:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        partition.done = True
        if self.failure is not None:
            self._stop_all()
        elif all(p.done for p in self.partitions):
            self._finished.set()
        else:
            try:
                self._hand_on()
            except Stopped:
                pass
            except Deadlock as error:
                self.failure = error
                self._stop_all()

    def leave(self, partition: Partition) -> None:
        """End of a partition; raises ``EmulatorError`` when it never waited for something it started."""
        left = partition.issued - partition.awaited, partition.stored - partition.drained
        if any(left):
            raise EmulatorError(
                f"{partition.name} ends with {left[0]} products and {left[1]} stores not waited for.",
                hint="Wait for them: shared memory and registers are gone after the end.",
            )

    def _stop_all(self) -> None:
        """One partition failed: let every other one unwind."""
        for partition in self.partitions:
            partition.baton.release()
        self._finished.set()

    def _background(self) -> None:
        """Copies and products that happen to finish now."""
        roll = self.random.random
        if self.schedule.copies == "any":
            while self.copies and roll() < 0.5:
                self._land()
        if self.schedule.products == "any":
            for partition in self.partitions:
                while partition.products and roll() < 0.5:
                    partition.products.popleft()()
        if self.schedule.copies == "any" and self.current.stores and roll() < 0.5:
            self.current.stores.popleft()()

    def _land(self) -> None:
        self.copies.pop(self.random.randrange(len(self.copies)))()

    def _hand_on(self) -> None:
        """Give the baton to a partition that can run; land copies as long as none can."""
        while not (able := [p for p in self.partitions if p.can_run()]):
            if not self.copies:
                raise Deadlock({p.name: p.waits_for for p in self.partitions if not p.done})
            self._land()
        self._pass_to(self.random.choice(able))

    def _pass_to(self, next_one: Partition) -> None:
        me, self.current = self.current, next_one
        if next_one is me:
            return
        next_one.baton.release()
        if not me.done:
            me.baton.acquire()
            if self.failure is not None:
                raise Stopped
