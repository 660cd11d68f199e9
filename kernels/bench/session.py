"""One run of the check: facts, ceilings, compiling ahead, proving, measuring; within a time limit.

Order of worth: every kernel is proven before any is measured, smallest shapes first, and cases with goals are
measured before others. What fails is written down and the rest goes on; a kernel with wrong numbers is not
measured, one that hung is not tried again. The record is handed out after every step, so an interrupt loses
nothing that was finished.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from workbench.kernels.bench import record as rec
from workbench.kernels.bench import roster
from workbench.kernels.bench.case import Case
from workbench.kernels.bench.tasks import DISAGREE
from workbench.kernels.bench.watch import Answer
from workbench.kernels.dispatch import choose
from workbench.kernels.target import Target, triton_version

LIMIT_SECONDS = 400.0
WARM_SHARE = 0.4
"""Of the limit, at most, for compiling ahead: what is not compiled by then is compiled when needed."""


class Asked(Protocol):
    """What a session asks of a child."""

    def ask(self, **request: Any) -> Answer:
        """One request and its answer."""

    def close(self) -> None:
        """End it."""


@dataclass
class Session:
    """A run over ``cases``.

    ``child(stop)`` makes a child that gives up once ``stop()``; ``save`` gets the record after every step,
    ``tell`` the fraction done and what is at hand; ``stopped`` says whether to end. ``measure`` False: prove
    only.
    """

    cases: Sequence[Case]
    child: Callable[[Callable[[], bool]], Asked]
    seed: int
    limit: float = LIMIT_SECONDS
    jobs: int = 8
    measure: bool = True
    save: Callable[[dict[str, Any]], None] = lambda record: None
    tell: Callable[[float, str], None] = lambda fraction, what: None
    stopped: Callable[[], bool] = lambda: False
    record: dict[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """All phases; returns the record, whose ``state`` is done, interrupted or out of time."""
        self._began = time.monotonic()
        self.record |= {
            "schema": rec.SCHEMA,
            "state": "running",
            "seed": self.seed,
            "limit": self.limit,
            "device": {},
            "ceilings": {},
            "phases": [],
            "cases": [rec.row_of(case) for case in self.cases],
            "relations": [],
        }
        child = self.child(self._over)
        try:
            if self.measure:
                self._phase("facts", lambda: self._facts(child))
                self._phase("ceilings", lambda: self._ceilings(child))
                self._phase("compile", self._warm)
            self._phase("prove", lambda: self._prove(child))
            if self.measure:
                self._phase("measure", lambda: self._measure(child))
        finally:
            child.close()
            self._finish()
        return self.record

    def _phase(self, name: str, work: Callable[[], None]) -> None:
        if self._over():
            return
        began = time.monotonic()
        work()
        self.record["phases"].append({"name": name, "seconds": time.monotonic() - began})
        self._step()

    def _facts(self, child: Asked) -> None:
        answer = child.ask(do="facts")
        self.record["device"] |= answer.parts
        if not answer.complete:
            self.record["device"]["error"] = answer.error
            return
        major, minor = answer.parts["capability"]
        chip = Target("cuda", answer.parts["name"], (major, minor), triton_version(), False)
        for row in self.record["cases"]:
            choice = choose(row["kernel"], chip)
            if choice.kernel != row["kernel"]:
                row |= {"state": "skipped", "reason": choice.reason}

    def _ceilings(self, child: Asked) -> None:
        self.tell(0.0, "ceilings")
        answer = child.ask(do="ceiling")
        self.record["ceilings"] = answer.parts
        if not answer.complete:
            self.record["ceilings_error"] = answer.error

    def _warm(self) -> None:
        """Compile in several processes; nothing is launched, so nothing can hang for long."""
        until = time.monotonic() + WARM_SHARE * self.limit
        todo = self._waiting()
        shares: list[list[Case]] = [[] for _ in range(max(1, min(self.jobs, len(todo))))]
        for i, case in enumerate(todo):
            shares[i % len(shares)].append(case)
        done: list[str] = []

        def enough() -> bool:
            return self._over() or time.monotonic() > until

        def work(share: Sequence[Case]) -> None:
            child = self.child(enough)
            try:
                for case in share:
                    if enough():
                        return
                    answer = child.ask(do="prepare", case=case.key, seed=self.seed)
                    done.append(case.key)
                    self._row(case)["compile"] = {**answer.parts, "error": answer.error}
                    self.tell(0.05 + 0.25 * len(done) / len(todo), f"compiled {case.key}")
            finally:
                child.close()

        threads = [threading.Thread(target=work, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _prove(self, child: Asked) -> None:
        checks = [case for case in self._waiting() if not case.timed]
        hung: set[str] = set()
        for i, case in enumerate(checks):
            if self._over():
                return
            row = self._row(case)
            if case.kernel in hung:
                row |= {"state": "skipped", "reason": "a smaller case hung or lost the device"}
                continue
            self.tell(0.3 + 0.3 * i / len(checks), case.key)
            answer = child.ask(do="check", case=case.key, seed=self.seed)
            if answer.stopped:
                return
            if "outputs" in answer.parts:
                row |= rec.with_check(row, answer.parts)
            else:
                row |= {"state": "hung" if answer.hung else "error", "reason": answer.error}
                if answer.hung or answer.lost:
                    hung.add(case.kernel)
            self._step()

    def _measure(self, child: Asked) -> None:
        ceilings = rec.ceilings_of(self.record["ceilings"])
        wrong = {r["kernel"] for r in self.record["cases"] if r["state"] in rec.BAD}
        timed = sorted((c for c in self._waiting() if c.timed), key=lambda case: not case.goals)
        for i, case in enumerate(timed):
            if self._over():
                return
            row = self._row(case)
            if case.kernel in wrong:
                row |= {"state": "skipped", "reason": "its numbers are wrong"}
                continue
            self.tell(0.6 + 0.4 * i / len(timed), case.key)
            answer = child.ask(do="timed", case=case.key, seed=self.seed)
            if "ours" in answer.parts:
                row |= rec.with_times(row, answer.parts, case, ceilings, DISAGREE)
                if not answer.complete:
                    row["reason"] = "; ".join(filter(None, [row["reason"], answer.error]))
            elif answer.stopped:
                return
            else:
                row |= {"state": "hung" if answer.hung else "error", "reason": answer.error}
                if answer.hung or answer.lost:
                    wrong.add(case.kernel)
            self._step()

    def _finish(self) -> None:
        late = time.monotonic() - self._began > self.limit
        rows = self.record["cases"]
        waiting = [row for row in rows if row["state"] == "waiting" and (self.measure or not row["timed"])]
        for row in waiting:
            row |= {"state": "not reached"}
        if self.stopped():
            self.record["state"] = "interrupted"
        else:
            self.record["state"] = "out of time" if late and waiting else "done"
        kernels = dict.fromkeys(case.kernel for case in self.cases)
        names = {row["name"] for row in rows}
        self.record["relations"] = [
            rec.relation_row(r, kernel, rows)
            for kernel in (kernels if self.measure else ())
            for r in roster.relations_of(kernel)
            if {r.first, r.second} <= names
        ]
        self._step()

    def _over(self) -> bool:
        return self.stopped() or time.monotonic() - self._began > self.limit

    def _step(self) -> None:
        self.record["seconds"] = time.monotonic() - self._began
        self.record["verdict"] = rec.verdict(self.record)
        self.save(self.record)

    def _waiting(self) -> list[Case]:
        return [case for case in self.cases if self._row(case)["state"] == "waiting"]

    def _row(self, case: Case) -> rec.Row:
        found: rec.Row = next(row for row in self.record["cases"] if row["key"] == case.key)
        return found
