"""The exact law of an acceptance rule on a small vocabulary: every draw and every coin is followed both ways.

The real rule functions run, not copies of them: what they draw and what they compare with a coin are branch
points with known probabilities, and all branches are visited. So the law of what is emitted is exact in
float64, and a rule that is wrong by 1e-6 is seen to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.spec.errors import InvariantError
from workbench.speculative.recursive import conditional_laws

Rule = Callable[..., Verdict]
"""``rule(tree, p, sample, coin)``, as ``Verify.sampled``."""
Drafts = Iterable[tuple[float, DraftTree]]
"""Everything a drafter can propose, each with its probability."""


class _Coin:
    """A uniform number nobody looked at yet: comparing it is a choice with two outcomes."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def __lt__(self, threshold: float) -> bool:
        accept = min(1.0, max(0.0, threshold))
        return self._branch.choose([1.0 - accept, accept]) == 1


class Branch:
    """One way through a rule: follows ``script``, then takes first choices and notes the others."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.taken: list[int] = []
        self.weight = 1.0
        self.others: list[tuple[int, ...]] = []
        self._script = script

    def choose(self, chances: Sequence[float]) -> int:
        """The scripted choice, or the first that can happen."""
        at = len(self.taken)
        if at < len(self._script):
            choice = self._script[at]
        else:
            choice, *rest = (i for i, c in enumerate(chances) if c > 0)
            self.others += [(*self.taken, other) for other in rest]
        self.taken.append(choice)
        self.weight *= chances[choice]
        return choice

    def sample(self, law: Tensor, depth: int) -> int:
        """A draw; raises :class:`InvariantError` for what is no law."""
        chances = law.tolist()
        if min(chances) < 0 or abs(sum(chances) - 1) > 1e-9:
            raise InvariantError(f"A rule drew from {chances}, which adds up to {sum(chances):.6g}.")
        return self.choose(chances)

    def coin(self, depth: int, i: int) -> Any:
        """A coin of its own for every comparison."""
        return _Coin(self)


def outcomes(rule: Rule, tree: DraftTree, p: Tensor) -> list[tuple[Verdict, float]]:
    """Every outcome of a rule on a draft, with its exact probability; ``p`` [n+1, V] float64."""
    out: list[tuple[Verdict, float]] = []
    todo: list[tuple[int, ...]] = [()]
    while todo:
        branch = Branch(todo.pop())
        verdict = rule(tree, p, branch.sample, branch.coin)
        out.append((verdict, branch.weight))
        todo += branch.others
    return out


def rows(target: Tensor, tree: DraftTree, root: int = 0) -> Tensor:
    """p [n + 1, V] of a Markov target [V, V] after token ``root``."""
    return target[[root, *tree.tokens]]


def future(target: Tensor, last: int, length: int) -> Tensor:
    """Joint law [V] * length of what follows ``last``."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    return torch.stack([target[last, t] * future(target, t, length - 1) for t in range(len(target))])


def output_law(rule: Rule, target: Tensor, drafts: Drafts, length: int, root: int = 0) -> Tensor:
    """Joint law [V] * length of one round followed by plain decoding.

    A round emits at most ``length`` tokens: drafts are at most ``length`` - 1 deep.
    """
    ahead = {(t, n): future(target, t, n) for t in range(len(target)) for n in range(length)}
    law = torch.zeros((len(target),) * length, dtype=torch.float64)
    for chance, tree in drafts:
        for verdict, weight in outcomes(rule, tree, rows(target, tree, root)):
            out = (*(tree.tokens[i] for i in verdict.path), verdict.token)
            law[out] += chance * weight * ahead[out[-1], length - len(out)]
    return law


def mean_accepted(rule: Rule, target: Tensor, drafts: Drafts, root: int = 0) -> float:
    """Drafted tokens that a round keeps, on average."""
    return sum(
        chance * weight * len(verdict.path)
        for chance, tree in drafts
        for verdict, weight in outcomes(rule, tree, rows(target, tree, root))
    )


def distance(a: Tensor, b: Tensor) -> float:
    """Total variation: half the sum of absolute differences."""
    return float((a - b).abs().sum()) / 2


# -- what a toy drafter [V, V] can propose -----------------------------------------------------------


def sampled_chains(draft: Tensor, k: int, root: int = 0) -> Iterator[tuple[float, DraftTree]]:
    """Every chain of k sampled tokens, with its probability and its laws q."""
    for tokens in itertools.product(range(len(draft)), repeat=k):
        q = draft[[root, *tokens[:-1]]]
        chance = float(torch.stack([q[i, t] for i, t in enumerate(tokens)]).prod())
        if chance > 0:
            yield chance, DraftTree.chain(tokens, "toy", q)


def likeliest_chain(draft: Tensor, k: int, root: int = 0) -> Iterator[tuple[float, DraftTree]]:
    """The one chain of likeliest tokens: a deterministic draft."""
    tokens: list[int] = []
    for _ in range(k):
        tokens.append(int(draft[tokens[-1] if tokens else root].argmax()))
    yield 1.0, DraftTree.chain(tokens, "toy")


def sampled_siblings(draft: Tensor, k: int, root: int = 0) -> Iterator[tuple[float, DraftTree]]:
    """Every set of k siblings below the root that can be drawn without replacement, in every order."""
    law = draft[root]
    for tokens in itertools.permutations(law.nonzero()[:, 0].tolist(), k):
        q = conditional_laws(law, tokens)
        chance = float(torch.stack([q[i, t] for i, t in enumerate(tokens)]).prod())
        yield chance, DraftTree(tokens, (-1,) * k, "toy", q)
