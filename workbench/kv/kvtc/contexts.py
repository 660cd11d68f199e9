"""Laws of integer codes from what a decoder already knows: shift, step, and the component's own past.

A coefficient is expected near a mean predicted from its past values (neighbouring tokens resemble each
other), with the variance of past errors. In units of the group's step that is a place on the grid and a
width; both are quantized to a context, and each context counts how far codes fell from the expected one. So
no law is stored, and heavy tails are learnt instead of assumed.

Encoder and decoder must agree to the last bit on every machine. So counts are integers, everything else is
one IEEE operation per element, and nothing is summed in an order that a library may choose.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PLACES = 4  # fractions of a step that are told apart
_WIDTHS = 32  # half octaves of (step / deviation)^2
_SHORT, _LONG = 0.5, 0.95  # memories of the two means a prediction is made of
_KEPT = 0.98  # memory of the error's variance
_RATE = 0.02  # of the normalised LMS filter
_PRIOR = 128  # how many codes the first guess of a context counts for


class GridModel:
    """Of one integer format: ``owner`` int64 [n] is the group of each component, ``bits`` the width."""

    def __init__(self, owner: Ints, bits: int) -> None:
        self.owner, self.symbols = owner, 1 << bits
        n, self._reach = len(owner), (1 << bits) + 1
        self._counts = _first_guess(self._reach)
        self._short, self._long = np.zeros(n), np.zeros(n)
        self._weights = np.zeros(n), np.zeros(n)
        self._energy, self._seen = np.zeros(n), np.zeros(n)
        self._step, self._tokens = np.zeros(n), 0

    def law(self, shift: Floats, step: Floats) -> NDArray[np.float32]:
        """Counts [n, symbols] for one token whose groups have ``shift`` and ``step`` [n] (by component)."""
        if not self._tokens:
            # Nothing is known: an interval of symbols - 1 steps is some four deviations wide.
            self._energy, self._seen = np.square(step * (self.symbols / 4)), np.ones_like(step)
            self._step = step.copy()
        self._shift, self._now = shift, step
        self._mean = self._weights[0] * self._short + self._weights[1] * self._long
        self._variance = self._energy / self._seen
        # Between a step that only reflects chance and one that reflects a loud token lies their root.
        width = _half_octave(step * self._step / self._variance)
        place = np.clip((self._mean - shift) / step, -1, self.symbols)
        near = np.round(place)
        part = np.minimum(np.floor((place - near + 0.5) * _PLACES), _PLACES - 1)
        self._context = (part * _WIDTHS + width).astype(np.int64)
        self._near = near.astype(np.int64)
        columns = np.arange(self.symbols)[None] - self._near[:, None] + self._reach
        counts: NDArray[np.float32] = self._counts[self._context[:, None], columns].astype(np.float32)
        return counts

    def update(self, codes: NDArray[np.uint8]) -> None:
        """The token's codes [n], once they are known."""
        np.add.at(self._counts, (self._context, codes - self._near + self._reach), 1)
        value = codes * self._now
        value += self._shift
        error = value - self._mean
        gain = _RATE * error / self._variance
        for weights, past in zip(self._weights, (self._short, self._long), strict=True):
            weights += gain * past
        self._short = _SHORT * self._short + (1 - _SHORT) * value
        self._long = _LONG * self._long + (1 - _LONG) * value
        self._energy = _KEPT * (self._energy + np.square(error))
        self._seen = _KEPT * (self._seen + 1)
        self._tokens += 1
        self._step += (self._now - self._step) / self._tokens


def _half_octave(x: Floats) -> Floats:
    """``x`` > 0 as a half octave, 0 to _WIDTHS - 1; exact, without a logarithm."""
    mantissa, exponent = np.frexp(x)
    return np.clip(2.0 * exponent + (mantissa >= 0.70710678) + _WIDTHS // 2, 0, _WIDTHS - 1)


def _first_guess(reach: int) -> Ints:
    """Counts [places * widths, 2 * reach + 1] of Student's t, two degrees of freedom: heavy-tailed, exact."""
    place = ((np.arange(_PLACES) + 0.5) / _PLACES - 0.5)[:, None, None]
    exponents = np.arange(_WIDTHS) - _WIDTHS // 2
    step = np.sqrt(np.ldexp(np.where(exponents % 2, 0.84, 0.6), exponents // 2))  # middle of its half octave
    off = np.arange(-reach, reach + 1) - place
    low, high = ((off + half) * step[None, :, None] for half in (-0.5, 0.5))
    share = high / np.sqrt(2 + high * high) - low / np.sqrt(2 + low * low)
    counts: Ints = np.maximum(1, np.round(share * (_PRIOR / 2))).astype(np.int64)
    return counts.reshape(_PLACES * _WIDTHS, 2 * reach + 1)
