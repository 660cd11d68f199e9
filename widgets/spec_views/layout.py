"""Where the nodes of a draft tree stand, how each fared, and what each sees: plain data for every drawing.

A node's column is its depth. Its line is that of its first child, so that the path that is drawn first runs
straight; every further child begins a line of its own. What the model said itself hangs below what was kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workbench.attention.spans import ancestors
from workbench.spec.events import DraftRecord

State = Literal["root", "accepted", "cut", "rejected", "untried", "corrected", "bonus"]
WORDS: dict[State, str] = {
    "root": "the last committed token",
    "accepted": "accepted",
    "cut": "accepted, then cut off where the request ended",
    "rejected": "rejected",
    "untried": "never judged: its place was decided before",
    "corrected": "the model's own, where a draft was rejected",
    "bonus": "the model's own, behind a fully accepted path",
}


@dataclass(frozen=True)
class Node:
    """``parent`` is the index in the list of nodes (the root is 0, its own parent -1)."""

    text: str
    parent: int
    depth: int
    line: int
    state: State
    chance: float | None = None

    @property
    def words(self) -> str:
        """Everything about the node in one line."""
        given = "" if self.chance is None else f", drafted with {self.chance:.2g}"
        return f"depth {self.depth}: {self.text!r}{given}; {WORDS[self.state]}"


def nodes_of(record: DraftRecord, root: str, texts: tuple[str, ...], own: str) -> list[Node]:
    """The root, the drafted nodes in order, and last the model's own token, where it is known."""
    path = record.accepted
    parents = [-1, *(p + 1 for p in record.parents)]
    leaf = path[-1] + 1 if path else 0
    states: list[State] = ["root", *(_state(record, i) for i in range(len(record.tokens)))]
    texts = (root, *texts)
    chances: list[float | None] = [None, *(record.chances or [None] * len(record.tokens))]
    if record.own is not None:
        judged = leaf in parents[1:]
        ended = record.emitted <= len(path)
        states.append("cut" if ended else "corrected" if judged else "bonus")
        parents.append(leaf)
        texts, chances = (*texts, own), [*chances, None]
    depths: list[int] = []
    for p in parents:
        depths.append(0 if p < 0 else depths[p] + 1)
    lines = _lines(parents)
    return [Node(*row) for row in zip(texts, parents, depths, lines, states, chances, strict=True)]


def mask_of(record: DraftRecord) -> list[list[bool]]:
    """Row i sees row j, the root first, then nodes in order: the block that attention adds to the context."""
    seen = ancestors((-1, *(p + 1 for p in record.parents)), len(record.tokens) + 1)
    rows: list[list[bool]] = seen.tolist()
    return rows


def _state(record: DraftRecord, node: int) -> State:
    if node in record.accepted:
        return "accepted" if record.accepted.index(node) < record.emitted else "cut"
    parent = record.parents[node]
    if parent >= 0 and parent not in record.accepted:
        return "untried"
    brothers = [i for i in record.accepted if record.parents[i] == parent]
    return "untried" if brothers and brothers[0] < node else "rejected"


def _lines(parents: list[int]) -> list[int]:
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        below.setdefault(parent, []).append(node)
    out = [0] * len(parents)
    taken = 0
    waiting = [(0, True)]
    while waiting:
        node, straight = waiting.pop()
        if not straight:
            taken += 1
        out[node] = taken
        children = below.get(node, [])
        waiting += [(child, i == 0) for i, child in reversed(list(enumerate(children)))]
    return out
