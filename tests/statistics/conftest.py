"""Tools that judge acceptance rules: an exact integrator over noise, toy Markov models, broken rules.

The integrator runs the real rule functions. Every draw and every coin comparison they make is a branch
point with a known probability; all branches are visited, so the law of the outcome is exact in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.engine.sampling import row_paths
from workbench.speculative import rules

Rule = Callable[..., Verdict]  # (tree, p, sample, coin)


class _Coin:
    """A uniform number nobody looked at yet: comparing it is a choice with two outcomes."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace

    def __lt__(self, threshold: float) -> bool:
        accept = min(1.0, max(0.0, threshold))
        return self._trace.choose([1.0 - accept, accept]) == 1


class _Trace:
    """One branch: follows ``script``, then takes first choices and notes the others."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.taken: list[int] = []
        self.weight = 1.0
        self.others: list[tuple[int, ...]] = []
        self._script = script

    def choose(self, chances: list[float]) -> int:
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
        chances = law.tolist()
        assert min(chances) >= 0 and abs(sum(chances) - 1) < 1e-9, "a rule sampled from what is no law"
        return self.choose(chances)

    def coin(self, depth: int, i: int) -> Any:
        return _Coin(self)


def integrate(rule: Rule, tree: DraftTree, p: Tensor) -> list[tuple[Verdict, float]]:
    """Every outcome of a rule on a draft, with its exact probability."""
    out, todo = [], [()]
    while todo:
        trace = _Trace(todo.pop())
        verdict = rule(tree, p, trace.sample, trace.coin)
        out.append((verdict, trace.weight))
        todo += trace.others
    return out


def models(vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two Markov chains [V, V] float64, target and drafter: related, each with some forbidden tokens."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(vocab, vocab, generator=g, dtype=torch.float64) * 1.5
    b = a + torch.randn(vocab, vocab, generator=g, dtype=torch.float64)
    target, draft = a.softmax(-1), b.softmax(-1)
    if vocab > 3:
        target[:, seed % vocab] = 0
        draft[:, (seed + 1) % vocab] = 0
    return target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)


def rows(target: Tensor, tree: DraftTree, root: int = 0) -> Tensor:
    """p [n + 1, V] of a Markov target after token ``root``."""
    return target[[root, *tree.tokens]]


def future(target: Tensor, last: int, length: int) -> Tensor:
    """Joint law [V] * length of what follows ``last``."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    return torch.stack([target[last, t] * future(target, t, length - 1) for t in range(len(target))])


def output_law(
    rule: Rule, target: Tensor, drafts: Iterable[tuple[float, DraftTree]], length: int, root: int = 0
) -> Tensor:
    """Joint law [V] * length of one round followed by plain decoding; each draft has a probability."""
    ahead = {(t, n): future(target, t, n) for t in range(len(target)) for n in range(length)}
    law = torch.zeros((len(target),) * length, dtype=torch.float64)
    for chance, tree in drafts:
        for verdict, weight in integrate(rule, tree, rows(target, tree, root)):
            out = (*(tree.tokens[i] for i in verdict.path), verdict.token)
            assert out[:-1] == (row_paths(tree)[verdict.path[-1] + 1] if verdict.path else ())
            law[out] += chance * weight * ahead[out[-1], length - len(out)]
    return law


def sampled_chains(draft: Tensor, k: int, root: int = 0) -> Iterable[tuple[float, DraftTree]]:
    """Every chain of k tokens the drafter can sample, with its probability and its laws q."""
    for tokens in itertools.product(range(len(draft)), repeat=k):
        q = draft[[root, *tokens[:-1]]]
        chance = float(torch.stack([q[i, t] for i, t in enumerate(tokens)]).prod())
        if chance > 0:
            yield chance, DraftTree.chain(tokens, "toy", q)


def goodness(counts: Tensor, law: Tensor) -> float:
    """Chi-square p-value of ``counts`` against ``law``; cells that expect fewer than 5 are pooled."""
    seen, want = counts.double().flatten(), law.double().flatten() * counts.sum()
    if bool((seen[want == 0] > 0).any()):
        return 0.0
    small = want < 5
    pooled = bool(small.any()) and float(want[small].sum()) > 0
    f_obs = torch.cat([seen[~small], seen[small].sum()[None]]) if pooled else seen[~small]
    f_exp = torch.cat([want[~small], want[small].sum()[None]]) if pooled else want[~small]
    return float(stats.chisquare(f_obs.numpy(), (f_exp * (f_obs.sum() / f_exp.sum())).numpy()).pvalue)


# -- rules that are wrong, each in one way that was shipped somewhere ------------------------------


def _chain(tree: DraftTree, p: Tensor, sample: Any, coin: Any, q: Tensor, rest: Any, bonus: Any) -> Verdict:
    for i, x in enumerate(tree.tokens):
        if not coin(i, 0) < float(p[i, x] / q[i, x]):
            return Verdict(tuple(range(i)), sample(rest(p[i], q[i], x), i), True)
    return Verdict(tuple(range(len(tree.tokens))), sample(bonus(p, q), len(tree.tokens)), False)


def _residual(p: Tensor, q: Tensor, x: int) -> Tensor:
    return rules.residual(p, q)


def _p(p: Tensor, q: Tensor, x: int) -> Tensor:
    return p


def _without(p: Tensor, q: Tensor, x: int) -> Tensor:
    left = p.index_fill(0, torch.tensor([x]), 0)
    return left / left.sum()


def _last_p(p: Tensor, q: Tensor) -> Tensor:
    return p[-1]


def resample_from_p(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """(a) A rejection draws from p instead of the residual."""
    return _chain(tree, p, sample, coin, tree.q, _p, _last_p)


def bonus_from_q(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """(b) The bonus token comes from the drafter."""
    return _chain(tree, p, sample, coin, tree.q, _residual, lambda p, q: q[-1])


def one_hot_residual(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """(d) Ratio p/q, but the residual of a deterministic draft."""
    return _chain(tree, p, sample, coin, tree.q, _without, _last_p)


def no_renormalisation(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """(e) Siblings of one node: the second is accepted with p(x) although the first was rejected."""
    left = p[0].clone()
    for i, x in enumerate(tree.tokens):
        if coin(0, i) < float(p[0, x]):
            return Verdict((i,), sample(p[i + 1], 1), False)
        left[x] = 0
    return Verdict((), sample(left / left.sum(), 0), True)


def textbook_r3(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """R3 as written in papers: coins, zeroing and renormalising. Correct; the reference for ``match``."""
    path: list[int] = []
    at = -1
    while True:
        law, hit = p[at + 1], None
        children = [i for i, parent in enumerate(tree.parents) if parent == at]
        for i, node in enumerate(children):
            x = tree.tokens[node]
            if coin(len(path), i) < float(law[x]):
                hit = node
                break
            if float(law[x]) > 0:
                law = _without(law, law, x)
        if hit is None:
            return Verdict(tuple(path), sample(law, len(path)), bool(children))
        path.append(hit)
        at = hit


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The integrator and the toy models."""
    return SimpleNamespace(
        integrate=integrate, models=models, rows=rows, future=future, output_law=output_law,
        sampled_chains=sampled_chains, goodness=goodness,
    )  # fmt: skip


@pytest.fixture(scope="session")
def wrong() -> SimpleNamespace:
    """Negative controls, and the textbook form of R3."""
    return SimpleNamespace(
        resample_from_p=resample_from_p, bonus_from_q=bonus_from_q, one_hot_residual=one_hot_residual,
        no_renormalisation=no_renormalisation, textbook_r3=textbook_r3,
    )  # fmt: skip
