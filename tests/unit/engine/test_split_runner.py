"""A pass in two parts: the same output, shown in between, and only where somebody watches."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.engine.engine import Engine
from workbench.engine.split_runner import PeekingDrafter, SplitRunner
from workbench.speculative.verify import ExactVerify

pytestmark = pytest.mark.usefixtures("inference")


class Watcher:
    """Drafts copies of the last token, and keeps what it is shown."""

    name = "watcher"
    max_draft = 3

    def __init__(self, layers: int, watching: bool) -> None:
        self.peek_layers, self.watching = layers, watching
        self.shown: list[tuple[int, Tensor]] = []

    def begin(self, seq: int, tokens: Sequence[int]) -> None: ...
    def commit(self, seq: int, tokens: Sequence[int]) -> None: ...
    def forget(self, seq: int) -> None: ...
    def nbytes(self) -> int:
        return 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        return [DraftTree.chain([c.tokens[-1]] * min(3, c.room), self.name) for c in contexts]

    def watches(self, seq: int) -> bool:
        return self.watching

    def peek(self, rows: Sequence[tuple[int, Tensor]]) -> None:
        self.shown += rows


@pytest.mark.parametrize("watching", [True, False])
def test_what_is_shown_is_the_stream_and_the_output_is_the_plain_runs(
    lab: ModuleType, watching: bool
) -> None:
    layers = 1
    prompts = lab.prompts_of(2, seed=3, low=4, high=20)
    plain = lab.run_engine(lab.make_engine("paged"), prompts, max_tokens=12, ignore_eos=True)
    base = lab.make_engine("paged", page_size=4)
    watcher = Watcher(layers, watching)
    assert isinstance(watcher, PeekingDrafter)
    engine = Engine(
        base.executor,
        base.kv,
        base.scheduler,
        context=256,
        drafter=watcher,
        runner=SplitRunner(base.executor, watcher),
        verify=ExactVerify(),
    )
    captured = []
    forward = base.executor.forward

    def spy(step: object, capture: tuple[int, ...] = (), **more: object) -> object:
        out = forward(step, capture, **more)  # type: ignore[arg-type]
        captured.append((more.get("layers"), out))
        return out

    base.executor.forward = spy  # type: ignore[method-assign]
    ran = lab.run_engine(engine, prompts, max_tokens=12, ignore_eos=True)
    assert [ran.ids("r0"), ran.ids("r1")] == [plain.ids("r0"), plain.ids("r1")]
    assert bool(watcher.shown) == watching
    halves = [part for part, _ in captured if part is not None]
    count = base.executor.decoder.config.num_layers
    if watching:
        assert halves[0::2] == [range(layers)] * (len(halves) // 2)
        assert halves[1::2] == [range(layers, count)] * (len(halves) // 2)
        # A window of three is judged in four rows; what is shown of a prompt is its last row.
        assert {len(states) for _, states in watcher.shown} >= {1, 4}
    else:
        assert halves == []
