"""Random requests, aborts and steps on small engines: nothing is lost, and company changes no output."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import CapacityError, DuplicateRequest

PAGE = 4
PROMPTS = [
    [5],
    [1, 2, 3, 4],
    [1, 2, 3, 4, 5, 6, 7],
    [9, 9, 9, 9, 9],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 1],
    [30, 31],
]
KEY = tuple[str, int, SamplingParams]


@pytest.mark.parametrize(("codec", "family"), [("", "llama"), ("kv_int8", "gemma3")])
def test_random_requests_end_once_and_equal_their_solo_runs(
    lab: ModuleType, scripted: ModuleType, codec: str, family: str
) -> None:
    solo: dict[KEY, list[list[int]]] = {}

    def make(*uses: str, **kwargs: Any) -> Any:
        return lab.make_engine(
            "paged",
            *([codec] if codec else []),
            *uses,
            family=family,
            page_size=PAGE,
            dtype="float32",
            **kwargs,
        )

    def expected(prompt: int, params: SamplingParams) -> list[list[int]]:
        key = (codec, prompt, params)
        if key not in solo:
            ran = lab.run_engine(make(pool=400), [PROMPTS[prompt]], params=[params])
            solo[key] = [ran.ids("r0", i) for i in range(params.n)]
        return solo[key]

    class Machine(RuleBasedStateMachine):
        @initialize(
            pages=st.integers(3, 12),
            budget=st.sampled_from([0, 1, 3, 8]),
            sequences=st.integers(2, 4),
            prefix=st.booleans(),
            drafter=st.sampled_from(["", "ngram", "chain", "tree"]),
        )
        def build(self, pages: int, budget: int, sequences: int, prefix: bool, drafter: str) -> None:
            uses = (["prefix_cache"] if prefix else []) + (["ngram:k=3"] if drafter else [])
            self.engine = make(*uses, pool=pages * PAGE, budget=budget, sequences=sequences)
            self.texts: list[list[int]] = []
            if drafter in ("chain", "tree"):
                replay = scripted.Replay(
                    self.texts, 5, right=lambda seq, round: (seq + 2 * round) % 5, trees=drafter == "tree"
                )
                scripted.attach(self.engine, replay)
            self.asked: dict[str, tuple[int, SamplingParams]] = {}
            self.got: dict[tuple[str, int], list[int]] = {}
            self.ended: dict[tuple[str, int], str] = {}
            self.names = 0

        @rule(
            prompt=st.integers(0, len(PROMPTS) - 1),
            tokens=st.integers(0, 9),
            n=st.integers(1, 2),
            sampled=st.booleans(),
            seed=st.integers(0, 1),
        )
        def add(self, prompt: int, tokens: int, n: int, sampled: bool, seed: int) -> None:
            params = SamplingParams(
                max_tokens=tokens, n=n, temperature=3.0 if sampled else 0.0, seed=seed if sampled else 0
            )
            name = f"q{self.names}"
            slots = len(PROMPTS[prompt]) + max(tokens - 1, 0)
            request = Request(name, tuple(PROMPTS[prompt]), params)
            if -(-slots // PAGE) > self.engine.kv.pages:
                with pytest.raises(CapacityError):
                    self.engine.add(request)
                return
            self.names += 1
            want = expected(prompt, params)
            self.texts += [PROMPTS[prompt] + w for w in want]
            self.engine.add(request)
            with pytest.raises(DuplicateRequest):
                self.engine.add(request)
            self.asked[name] = (prompt, params)
            for i in range(n):
                self.got[name, i] = []

        @rule(back=st.integers(0, 6))
        def abort(self, back: int) -> None:
            name = f"q{self.names - back}"
            self.take(self.engine.abort(name))
            assert name not in self.engine.alive()

        @rule(times=st.integers(1, 6))
        def step(self, times: int) -> None:
            for _ in range(times):
                event, events = self.engine.step()
                self.take(events)
                self.engine.kv.check()
                assert event.running == len(self.engine.scheduler.running)
                assert not self.engine.scheduler.budget or event.rows <= self.engine.scheduler.budget

        def take(self, events: list[Any]) -> None:
            for e in events:
                at = (e.request_id, e.sample)
                assert at not in self.ended  # nothing comes after the end
                self.got[at] += [t.id for t in e.tokens]
                if e.finish:
                    self.ended[at] = e.finish

        @invariant()
        def books(self) -> None:
            running = self.engine.scheduler.running
            assert len(running) <= self.engine.scheduler.max_sequences
            for pool in self.engine.kv.each_pool:
                refs = [0] * (pool.pages + 1)
                for seq in running:
                    for g, own in enumerate(self.engine.kv.pools):
                        for page in seq.tables[g] if own is pool else ():
                            refs[page] += page > 0
                            assert not page or pool.owners[page] == g
                assert refs == pool.refs
            for seq in self.engine.scheduler.waiting:
                assert seq.tables == []
            for (name, i), ids in self.got.items():
                want = expected(*self.asked[name])[i]
                assert ids == want[: len(ids)]

        def teardown(self) -> None:
            if not hasattr(self, "engine"):
                return
            with torch.inference_mode():
                for _ in range(3000):
                    if not self.engine.has_work:
                        break
                    self.take(self.engine.step()[1])
            assert not self.engine.has_work
            assert self.ended.keys() == self.got.keys()
            for (name, i), ids in self.got.items():
                want = expected(*self.asked[name])[i]
                assert ids == want or self.ended[name, i] == "abort"
            assert self.engine.kv.pools[0].used == 0
            assert self.engine.memory()["draft"] == 0
            self.engine.kv.check()

    with torch.inference_mode():
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=settings.default.max_examples // 2, stateful_step_count=25, deadline=None
            ),
        )
