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

from workbench.spec.errors import OptionError

STOP, GO_ON = 0, 1
"""Actions. While the exit is chosen: leave here, or run on (behind the last exit to the model's end, with
no draft). Then: verify, or draft another."""
FEATURES = 8


class Reading(NamedTuple):
    """What a layer's law over the next token says: all three in [0, 1]."""

    confidence: float  # chance of the likeliest token
    entropy: float  # of the law, as a share of that of the even law
    uncertainty: float  # 1 - how far the second likeliest is behind


@dataclass(frozen=True)
class Limits:
    """A model of ``layers`` that may be left behind ``exits``, rising (none given: all but the last); at most
    ``longest`` drafts. Raises :class:`OptionError` where no layer can be left."""

    layers: int
    longest: int = 12
    exits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        known = tuple(range(1, self.layers))
        if not self.exits:
            object.__setattr__(self, "exits", known)
        if not self.exits or not set(self.exits) <= set(known) or list(self.exits) != sorted(set(self.exits)):
            raise OptionError(f"A model of {self.layers} layers cannot be left behind {self.exits or 'any'}.")

    def deeper(self, layer: int) -> int:
        """The next exit behind one; 0 behind the last."""
        return next((exit for exit in self.exits if exit > layer), 0)


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
        """Whether another draft has room; without a draft one may always go on, to the end of the model."""
        return not self.chosen or self.drafted < limits.longest

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


def read(logits: Tensor) -> list[Reading]:
    """The reading of each row of logits [n, V] of an exit layer; of two tokens at least."""
    law = logits.float().softmax(-1)
    top = law.topk(2).values.tolist()
    entropy = (torch.special.entr(law).sum(-1) / math.log(law.shape[-1])).clamp(0, 1).tolist()
    return [Reading(a, e, 1.0 - (a - b)) for (a, b), e in zip(top, entropy, strict=True)]


def moved(recent: float, accepted: int, drafted: int, weight: float = 0.1) -> float:
    """``recent`` behind a further round: an exponential mean over rounds that drafted."""
    return recent if not drafted else (1 - weight) * recent + weight * accepted / drafted
