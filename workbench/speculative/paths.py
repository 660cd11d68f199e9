"""What the paths of draft trees promised, and what was kept of them.

Li et al., *EAGLE-2* (arXiv 2406.16858, sections 3.2 and 4.1): the product of a drafter's chances from the
root to a node stands for the chance that the node is accepted, and decides which nodes are worth a row. Under
R3 a node is taken with the model's own chance of it, so a good drafter's promise comes true; greedy decoding
keeps likely tokens more often than they are likely.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from workbench.spec.events import DraftRecord

EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # finer where most nodes of a tree are


@dataclass(frozen=True)
class Bin:
    """Nodes whose path confidence is from ``low`` to ``high``; ``confidence`` adds theirs up."""

    low: float
    high: float
    nodes: int
    accepted: int
    confidence: float

    @property
    def foreseen(self) -> float | None:
        """Mean path confidence; None without nodes."""
        return self.confidence / self.nodes if self.nodes else None

    @property
    def share(self) -> float | None:
        """Share of the nodes that were accepted; None without nodes."""
        return self.accepted / self.nodes if self.nodes else None


@dataclass(frozen=True)
class Choices:
    """What rounds kept at one depth: ``first`` children, and ``side`` ones, tried behind them."""

    depth: int
    first: int
    side: int


def along_paths(chances: Sequence[float], parents: Sequence[int]) -> tuple[float, ...]:
    """Of each node: the product of ``chances`` on its path from the root, itself included."""
    paths: list[float] = []
    for chance, parent in zip(chances, parents, strict=True):
        paths.append(chance * (paths[parent] if parent >= 0 else 1.0))
    return tuple(paths)


def path_confidence(record: DraftRecord) -> tuple[float, ...]:
    """Of each node: the product of the drafter's chances on its path; empty where it gave none."""
    return along_paths(record.chances, record.parents) if record.chances else ()


def foreseen(record: DraftRecord) -> float:
    """Accepted tokens that a tree's chances foresee: the path confidences of its nodes, added up."""
    return sum(path_confidence(record))


def reliability(records: Iterable[DraftRecord]) -> tuple[Bin, ...]:
    """Nodes of ``records`` by path confidence, in bins between :data:`EDGES`, and how many were accepted.

    By the verdict: what ended the request behind it says nothing of a drafter. Drafts without chances are
    left out.
    """
    last = len(EDGES) - 2
    nodes, accepted, confidence = [0] * (last + 1), [0] * (last + 1), [0.0] * (last + 1)
    for record in records:
        for node, value in enumerate(path_confidence(record)):
            at = min(bisect_right(EDGES, value) - 1, last)
            nodes[at] += 1
            accepted[at] += node in record.accepted
            confidence[at] += value
    rows = zip(pairwise(EDGES), nodes, accepted, confidence, strict=True)
    return tuple(Bin(*edges, *counts) for edges, *counts in rows)


def kept_choices(records: Iterable[DraftRecord]) -> tuple[Choices, ...]:
    """What was kept by depth, from 1 to the deepest draft: by first choices and by others.

    After truncation, so that both add up to ``Acceptance.survivors``. Drafters put a node's likeliest child
    first; in FastEagle's tree the others are leaves beside the backbone.
    """
    first: list[int] = []
    side: list[int] = []
    for record in records:
        depths: list[int] = []
        for parent in record.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        grown = max(depths, default=-1) + 1 - len(first)
        first += [0] * grown
        side += [0] * grown
        for node in record.accepted[: record.emitted]:
            counts = first if record.parents.index(record.parents[node]) == node else side
            counts[depths[node]] += 1
    return tuple(Choices(i + 1, a, b) for i, (a, b) in enumerate(zip(first, side, strict=True)))
