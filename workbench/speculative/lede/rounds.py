"""A round of drafting as a decision process: states, actions, rewards, and what it comes to.

An episode of the learner is one round. Rewards add up to accepted tokens minus ``price`` times its cost in
passes of the whole model, heads that were read included. The verifying pass counts whole: of the drafts only
the last goes through the first layers, but weights are read for it. Without a draft the pass goes on where
it was left. A price of 1 compares with plain decoding, where a pass gives a token. A token's reward is paid
where it was drafted, which a log knows: so what lies ahead of a state does not depend on what was gained
before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from workbench.speculative.lede.state import GO_ON, STOP, Limits, Reading, State


@dataclass(frozen=True)
class Costs:
    """In whole passes: ``head`` for reading a law, the last layer's as any, ``choice`` for one decision,
    ``verify`` for the target's pass."""

    layers: int
    head: float = 0.0
    choice: float = 0.0
    verify: float = 1.0
    price: float = 1.0

    def looked(self, layers: int = 1) -> float:
        """Running so many layers on one draft, reading the last of them, and deciding."""
        return self._run(layers) + self.head + self.choice

    def finished(self, layers: int) -> float:
        """The rest of a pass that stands behind so many layers, and drafts nothing."""
        return self.verify - self._run(layers)

    def _run(self, layers: int) -> float:
        return layers * (1 - self.head) / self.layers


@dataclass(frozen=True)
class Transition:
    """``state`` --``action``--> ``reward``, ``after``; None: the round is over."""

    state: State
    action: int
    reward: float
    after: State | None


@dataclass(frozen=True)
class Round:
    """A round that was played; ``cost`` in passes of the whole model; ``exit`` 0: nothing was drafted."""

    steps: tuple[Transition, ...]
    exit: int
    drafted: int
    accepted: int
    cost: float

    @property
    def reward(self) -> float:
        """What it was worth."""
        return sum(s.reward for s in self.steps)

    @property
    def tokens(self) -> int:
        """Tokens the text gained: the accepted ones and the model's own."""
        return self.accepted + 1


class World(Protocol):
    """A place in a text where a round begins, as drafting meets it."""

    def reading(self, draft: int, layer: int) -> Reading:
        """What ``layer`` says of draft number ``draft`` (from 0), those before it drafted at the exit."""
        ...

    def accepted(self, exit: int, drafted: int) -> int:
        """How many of ``drafted`` tokens, drafted at ``exit``, the model accepts."""
        ...


Policy = Callable[[State], int]


def play(world: World, policy: Policy, limits: Limits, costs: Costs, recent: float) -> Round:
    """One round under a policy; where a state leaves no choice the policy is not asked."""
    steps: list[Transition] = []
    layer, drafted = limits.exits[0], 0
    entry = spent = costs.looked(layer)  # it is run and read whatever comes
    state = State(world.reading(0, layer), layer, 0, recent)
    while True:
        action = policy(state) if state.may_go_on(limits) else STOP
        cost, after = 0.0, None
        if not state.chosen and action == GO_ON:
            deeper = limits.deeper(layer)
            cost = costs.looked(deeper - layer) if deeper else costs.finished(layer)
            layer = deeper
            after = State(world.reading(0, layer), layer, 0, recent) if deeper else None
        elif not state.chosen:
            drafted = 1
            after = State(state.reading, layer, drafted, recent, state.reading.confidence)
        elif action == GO_ON:
            cost = costs.looked(layer)
            reading = world.reading(drafted, layer)
            drafted += 1
            after = State(reading, layer, drafted, recent, state.chain * reading.confidence)
        else:
            cost = costs.verify
        spent += cost
        steps.append(Transition(state, action, -costs.price * (entry + cost), after))
        entry = 0.0
        if after is None:
            break
        state = after
    accepted = world.accepted(layer, drafted) if drafted else 0
    return Round(_credited(steps, accepted), layer, drafted, accepted, spent)


def _credited(steps: list[Transition], accepted: int) -> tuple[Transition, ...]:
    """A token that will be accepted is rewarded where it was drafted."""
    return tuple(
        replace(s, reward=s.reward + 1)
        if s.after is not None and s.after.drafted > s.state.drafted and s.after.drafted <= accepted
        else s
        for s in steps
    )


def static(exit: int, drafted: int) -> Policy:
    """The policy without eyes: always ``exit`` layers and ``drafted`` tokens; 0 layers: no draft."""

    def policy(state: State) -> int:
        return GO_ON if (state.drafted < drafted if state.chosen else state.layer != exit) else STOP

    return policy


def rate(rounds: list[Round]) -> float:
    """Tokens per pass of the whole model: the speed-up over plain decoding where passes are what counts."""
    return sum(r.tokens for r in rounds) / sum(r.cost for r in rounds)
