"""Verification of drafts: greedy against a walk by hand, the others against the law they must leave alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.bench.cases.sample import frequency, noise
from workbench.kernels.decode.spec_verify import KERNELS, verify_greedy, verify_match, verify_rejection
from workbench.kernels.layouts.verdict import Verdicts, drafts
from workbench.kernels.spec import Cost


def _shape(nodes: int, tree: bool) -> list[int]:
    return [(i - 1) // 2 if tree and i else i - 1 for i in range(nodes)]


def make_greedy(lab: Lab, *, sequences: int, nodes: int, vocabulary: int, tree: bool = False) -> Trial:
    """Drafts that are right about two times in three."""
    shape = _shape(nodes, tree)
    scores = lab.normal(sequences * (nodes + 1), vocabulary)
    best = scores.cpu().float().argmax(-1).view(sequences, -1)
    guess = lab.integers(0, 3, sequences, nodes).cpu()
    ids = [[int(b[p + 1] + (g == 0)) % vocabulary for p, g in zip(shape, row, strict=True)]
           for b, row in zip(best, guess, strict=True)]  # fmt: skip
    made = drafts([(row, shape) for row in ids]).to(lab.device)

    def exact() -> Outputs:
        lengths, tokens = [], []
        for row, b in zip(ids, best, strict=True):
            path = [-1]
            while hits := [i for i, p in enumerate(shape) if p == path[-1] and row[i] == b[p + 1]]:
                path.append(hits[0])
            lengths.append(len(path) - 1)
            tokens.append(int(b[path[-1] + 1]))
        named = {"length": lengths, "token": tokens}
        return {n: torch.tensor(x, device=lab.device) for n, x in named.items()}

    return Trial(
        {"drafts": made, "scores": scores},
        verify_greedy,
        exact,
        outputs=lambda found: {"length": found.length, "token": found.token},
        within={"length": 0.0, "token": 0.0},
    )


def make_sampled(lab: Lab, *, sequences: int, nodes: int, vocabulary: int, rule: str) -> Trial:
    """One target law and one draft law for all sequences: what comes out first follows the target's."""
    p, q = (_law(lab, vocabulary) for _ in range(2))
    drafted = torch.multinomial(q, sequences * nodes, replacement=True, generator=lab.random)
    tokens = drafted.view(sequences, nodes)
    made = drafts([(row, _shape(nodes, False)) for row in tokens.tolist()]).to(lab.device)
    arguments: dict[str, Any] = {"drafts": made, "noise": noise(lab, sequences)}
    arguments["p"] = p.expand(sequences * (nodes + 1), -1).contiguous()
    if rule == "rejection":
        arguments["q"] = q.expand(sequences * nodes, -1).contiguous()

    def outputs(found: Verdicts) -> Outputs:
        first = torch.where(found.length > 0, tokens[:, 0], found.token)
        return {"frequency": frequency(first, vocabulary)}

    # 16,384 draws from a law of 40 leave about 1.5 %; a wrong rule is off by a third.
    return Trial(
        arguments,
        functools.partial(verify_rejection, check=False) if rule == "rejection" else verify_match,
        exact=lambda: {"frequency": p.double()[None]},
        outputs=outputs,
        within={"frequency": 0.08},
    )


def _law(lab: Lab, vocabulary: int) -> Tensor:
    return (lab.normal(vocabulary, dtype=torch.float32) * 1.5).softmax(-1)


def _greedy(name: str, **sizes: Any) -> Case:
    b, n, v = (sizes[s] for s in ("sequences", "nodes", "vocabulary"))
    work = KERNELS[0].cost(b, n)
    return Case("spec_verify", name, make_greedy, sizes, Cost(work.flops, work.bytes + 2 * b * (n + 1) * v))


def _sampled(name: str, rule: str, sequences: int, nodes: int, vocabulary: int, timed: bool = False) -> Case:
    sizes = {"sequences": sequences, "nodes": nodes, "vocabulary": vocabulary, "rule": rule}
    rows = sequences * (nodes + 1) * vocabulary
    work = Cost(60 * rows, 4 * rows) if rule == "match" else KERNELS[1].cost(sequences, vocabulary, sequences)
    return Case("spec_verify", name, make_sampled, sizes, work, timed=timed)


CASES = (
    _greedy("greedy, 3 chains", sequences=3, nodes=4, vocabulary=30),
    _greedy("greedy, trees of 31", sequences=40, nodes=31, vocabulary=1000, tree=True),
    _greedy("greedy, large vocabulary", sequences=16, nodes=16, vocabulary=128256),
    _sampled("match keeps the law", "match", 16384, 1, 40),
    _sampled("rejection keeps the law", "rejection", 16384, 2, 40),
    _sampled("match, 64 chains of 8, V 128256", "match", 64, 8, 128256, timed=True),
    _sampled("rejection, 64 chains of 8, V 128256", "rejection", 64, 8, 128256, timed=True),
)
