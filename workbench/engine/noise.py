"""Noise that belongs to a position: a pure function of (seed, sample, position, stream, index).

Randomness is counter-based (Philox4x64, Salmon et al., SC 2011), never a generator that is stepped, so
a token does not depend on batch mates, chunking, preemption, or on how many drafts were checked before it.

What one seed means: sample ``i`` of a request (``n`` > 1) uses stream set ``i`` of the seed, so the
samples differ and sample 0 equals the run with n = 1. Prompts do not enter: two requests with the same
seed see the same noise at the same absolute position (common random numbers, which makes A/B runs of one
prompt comparable); give each prompt its own seed where independence matters.

Drafts are different: what a round drafted may decide how much of it was kept (block verification judges a
chain as a whole), so a position that comes again in the next round must not show the same noise. Coins and
drafted tokens belong to the position at which their round began, and to how far ahead of it they are.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Stream(enum.IntEnum):
    """Independent uses of randomness at one position."""

    TOKEN = 0  # the token the target draws there, with or without a draft
    COIN = 1  # acceptance coins of a round's drafts
    DRAFT = 2  # tokens a drafter draws; shared with the target's noise, drafts would bias the output


AHEAD = 1 << 8
"""What one place ahead adds to the counter's word of the stream."""


class Key(NamedTuple):
    """Names one noise vector. All fields are whole numbers in [0, 2**64), ``ahead`` below 2**56.

    ``ahead``: of a round that began at ``position``, how many places on; 0 for what belongs to a position.
    """

    seed: int
    sample: int
    position: int
    stream: int = Stream.TOKEN
    ahead: int = 0


def uniforms(key: Key, n: int) -> NDArray[np.float64]:
    """``n`` numbers in [0, 1), multiples of 2**-53; a prefix of those for a larger ``n``."""
    # Words 1..3 of the counter name the use, word 0 counts blocks within it: distinct keys never share a
    # block. random_raw is used because NumPy keeps a bit generator's raw stream stable between versions.
    use = key.stream + AHEAD * key.ahead
    counter = np.array([0, key.position, use, key.sample], dtype=np.uint64)
    bits = np.random.Philox(key=np.array([key.seed, 0], dtype=np.uint64), counter=counter)
    raw: NDArray[np.uint64] = bits.random_raw(n)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(key: Key, i: int = 0) -> float:
    """The ``i``-th number in [0, 1) of a key."""
    return float(uniforms(key, i + 1)[i])


def sample(law: Tensor, key: Key) -> int:
    """Draw from ``law`` [V] (non-negative, any scale) by the Gumbel-max trick; probability 0 is never drawn.

    argmax(log p + g) is taken as argmax(p / E) with E = exp(-g) exponential: the same winner for half the
    logarithms. A token's noise depends on its id alone, so filters that remove others do not change it.
    """
    return several(law, key, 1)[0]


def several(law: Tensor, key: Key, k: int) -> list[int]:
    """``k`` draws without replacement in order (the first as of :func:`sample`); fewer of a smaller law.

    The k winners of the race are k draws one after the other (Kool et al., arXiv 1903.06059).
    """
    p = law.detach().cpu().double().numpy()
    support = np.flatnonzero(p > 0)
    race = _exponential(uniforms(key, p.shape[0])[support])
    scores = p[support] / race
    if k == 1:
        return [int(support[np.argmax(scores)])]
    return [int(i) for i in support[np.argsort(-scores, kind="stable")[:k]]]


def _exponential(u: NDArray[np.float64]) -> NDArray[np.float64]:
    # u = 0 (once in 2**53) would never finish its race; the smallest half step stands in for it.
    out: NDArray[np.float64] = -np.log(np.maximum(u, 2.0**-54))
    return out
