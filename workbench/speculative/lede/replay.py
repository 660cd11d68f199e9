"""The offline buffer: transitions of logged rounds as tensors, drawn in batches; text held out by prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.spec.errors import OptionError
from workbench.speculative.lede.rounds import Round
from workbench.speculative.lede.state import FEATURES, Limits


@dataclass(frozen=True)
class Replay:
    """N transitions: ``states`` and ``after`` [N, F] float32, ``actions`` int64 [N], ``rewards`` [N].

    ``going``: bool [N], the round goes on behind it; ``open``: bool [N], it may then be gone on with.
    """

    states: Tensor
    actions: Tensor
    rewards: Tensor
    after: Tensor
    going: Tensor
    open: Tensor

    @classmethod
    def of(cls, rounds: Iterable[Round], limits: Limits) -> Replay:
        """The transitions of rounds. Raises :class:`OptionError` when there are none."""
        steps = [step for played in rounds for step in played.steps]
        if not steps:
            raise OptionError("There are no rounds to learn from.", hint="Log some speculation first.")
        nothing = (0.0,) * FEATURES
        return cls(
            torch.tensor([s.state.vector(limits) for s in steps]),
            torch.tensor([s.action for s in steps]),
            torch.tensor([s.reward for s in steps]),
            torch.tensor([s.after.vector(limits) if s.after else nothing for s in steps]),
            torch.tensor([s.after is not None for s in steps]),
            torch.tensor([s.after is not None and s.after.may_go_on(limits) for s in steps]),
        )

    def __len__(self) -> int:
        return len(self.actions)

    def batches(self, size: int, seed: int) -> Iterator[Replay]:
        """Batches drawn evenly with replacement, without end; the same for the same seed."""
        gen = torch.Generator().manual_seed(seed)
        while True:
            rows = torch.randint(len(self), (size,), generator=gen)
            yield Replay(*(x[rows] for x in self.columns()))

    def columns(self) -> tuple[Tensor, ...]:
        """Its tensors, in order."""
        return self.states, self.actions, self.rewards, self.after, self.going, self.open


def held_out(by_prompt: Mapping[str, Sequence[Round]], every: int = 5) -> tuple[list[Round], list[Round]]:
    """Rounds to learn from and rounds to judge by: every ``every``-th prompt, whole, is kept out."""
    learnt: list[Round] = []
    judged: list[Round] = []
    for i, prompt in enumerate(sorted(by_prompt)):
        (judged if i % every == every - 1 else learnt).extend(by_prompt[prompt])
    return learnt, judged
