"""What the policy may know at a layer, as eight numbers: nothing that a later layer or token would tell.

Confidence, entropy and uncertainty of what the layer would draft, where it stands, how many tokens are
drafted, whether the exit is chosen, and how many recent drafts were accepted (arXiv 2606.03113). Beside them
the product of the drafts' confidences: a sure draft behind a weak one is likely void with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

STOP, GO_ON = 0, 1
"""Actions. While the exit is chosen: leave here, or run another layer; then: verify, or draft another."""
FEATURES = 8


class Reading(NamedTuple):
    """What a layer's law over the next token says: all three in [0, 1]."""

    confidence: float  # chance of the likeliest token
    entropy: float  # of the law, as a share of that of the even law
    uncertainty: float  # 1 - how far the second likeliest is behind


@dataclass(frozen=True)
class Limits:
    """A model of ``layers`` that may be left behind any but the last; at most ``longest`` drafts."""

    layers: int
    longest: int = 12


@dataclass(frozen=True)
class State:
    """Behind ``layer`` layers (from 1) of a draft, ``drafted`` tokens complete; 0: the exit is not chosen."""

    reading: Reading
    layer: int
    drafted: int
    recent: float  # share of recently drafted tokens that were accepted
    chain: float = 1.0  # product of the confidences of the drafted tokens

    @property
    def chosen(self) -> bool:
        """Whether the exit layer is fixed for this round."""
        return self.drafted > 0

    def may_go_on(self, limits: Limits) -> bool:
        """Whether there is another layer to leave at, or room for another draft."""
        return self.drafted < limits.longest if self.chosen else self.layer < limits.layers - 1

    def vector(self, limits: Limits) -> tuple[float, ...]:
        """The :data:`FEATURES` inputs of the Q-network, each in [0, 1]."""
        where = (
            self.layer / limits.layers,
            self.drafted / limits.longest,
            float(self.chosen),
            self.recent,
            self.chain,
        )
        return (*self.reading, *where)


def read(logits: Tensor) -> Reading:
    """The reading of one row of logits [V] of an exit layer."""
    law = logits.double().softmax(-1)
    top = law.topk(min(2, len(law))).values
    second = float(top[1]) if len(top) > 1 else 0.0
    entropy = float(torch.special.entr(law).sum()) / math.log(len(law)) if len(law) > 1 else 0.0
    return Reading(float(top[0]), min(1.0, max(0.0, entropy)), 1.0 - (float(top[0]) - second))


def moved(recent: float, accepted: int, drafted: int, weight: float = 0.1) -> float:
    """``recent`` behind a further round: an exponential mean over rounds that drafted."""
    return recent if not drafted else (1 - weight) * recent + weight * accepted / drafted
