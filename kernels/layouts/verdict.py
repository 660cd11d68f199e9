"""Drafts and verdicts of a step as arrays, for all sequences at once.

Drafts: nodes of all sequences one after another, ``first`` int32 [B + 1] their bounds, ``parents`` numbers
within the sequence (-1: child of the root), parents before children. Laws have one row more per sequence, the
root's first: node ``i`` of sequence ``b`` has row ``first[b] + b + 1 + i``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.spec.errors import UnsupportedInput


@dataclass(frozen=True)
class Drafts:
    """``tokens``, ``parents`` int32 [N]; ``first`` int32 [B + 1]; ``depth`` int64 [R] of each row (roots 0),
    ``owner`` int64 [R] its sequence. ``most`` is the largest number of nodes of a sequence."""

    tokens: Tensor
    parents: Tensor
    first: Tensor
    depth: Tensor
    owner: Tensor
    most: int

    def to(self, device: torch.device | str) -> Drafts:
        """The same drafts on another device."""
        return Drafts(
            self.tokens.to(device),
            self.parents.to(device),
            self.first.to(device),
            self.depth.to(device),
            self.owner.to(device),
            self.most,
        )


def drafts(trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Drafts:
    """From ``(tokens, parents)`` of each sequence; empty ones draft nothing.

    Raises ``UnsupportedInput`` when lengths differ or a parent does not come before its child.
    """
    tokens: list[int] = []
    parents: list[int] = []
    first, depth, owner = [0], [], []
    for b, (ids, above) in enumerate(trees):
        if len(ids) != len(above) or any(not -1 <= p < i for i, p in enumerate(above)):
            raise UnsupportedInput(
                f"The draft of sequence {b} is no tree: {len(ids)} tokens, parents {tuple(above)}.",
                hint="One parent per token, each before its child, -1 below the root.",
            )
        depths = [0]
        for p in above:
            depths.append(depths[p + 1] + 1)
        tokens += ids
        parents += above
        depth += depths
        owner += [b] * len(depths)
        first.append(len(tokens))
    return Drafts(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor(first, dtype=torch.int32),
        torch.tensor(depth, dtype=torch.int64),
        torch.tensor(owner, dtype=torch.int64),
        max((len(ids) for ids, _ in trees), default=0),
    )


@dataclass(frozen=True)
class Verdicts:
    """Outcome per sequence: ``path`` int32 [B, M] kept nodes (-1 beyond ``length``), the ``token`` after
    them, ``corrected`` whether it replaces a rejected draft, ``expected`` float64 [B, M] acceptance chances
    of the first ``tried`` nodes that were judged."""

    path: Tensor
    length: Tensor
    token: Tensor
    corrected: Tensor
    expected: Tensor
    tried: Tensor

    def lists(self) -> list[tuple[tuple[int, ...], int, bool, tuple[float, ...]]]:
        """``(path, token, corrected, expected)`` of each sequence, as plain data."""
        columns = (self.path, self.length, self.token, self.corrected, self.expected, self.tried)
        rows = zip(*(x.tolist() for x in columns), strict=True)
        return [
            (tuple(path[:n]), token, bool(corrected), tuple(expected[:tried]))
            for path, n, token, corrected, expected, tried in rows
        ]
