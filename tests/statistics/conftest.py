"""Tools that judge acceptance rules: the integrator and imitations of the package, toy Markov models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.engine.sampling import row_paths
from workbench.speculative import exact_law, imitations


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


def output_law(rule: Any, target: Tensor, drafts: Any, length: int, root: int = 0) -> Tensor:
    """The package's integral, of a rule whose every path is checked to be a path of its tree."""

    def checked(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
        verdict = rule(tree, p, sample, coin)
        said = tuple(tree.tokens[i] for i in verdict.path)
        assert said == (row_paths(tree)[verdict.path[-1] + 1] if verdict.path else ())
        return verdict

    return exact_law.output_law(checked, target, drafts, length, root)


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
                law = law.index_fill(0, torch.tensor([x]), 0)
                law = law / law.sum()
        if hit is None:
            return Verdict(tuple(path), sample(law, len(path)), bool(children))
        path.append(hit)
        at = hit


@pytest.fixture(scope="session")
def toy() -> SimpleNamespace:
    """The integrator and the toy models."""
    return SimpleNamespace(
        integrate=exact_law.outcomes, models=models, rows=exact_law.rows, future=exact_law.future,
        output_law=output_law, sampled_chains=exact_law.sampled_chains, goodness=goodness,
    )  # fmt: skip


@pytest.fixture(scope="session")
def wrong() -> SimpleNamespace:
    """Negative controls, and the textbook form of R3."""
    return SimpleNamespace(
        resample_from_p=imitations.resample_from_p, bonus_from_q=imitations.bonus_from_q,
        one_hot_residual=imitations.one_hot_residual, no_renormalisation=imitations.no_renormalisation,
        textbook_r3=textbook_r3,
    )  # fmt: skip
