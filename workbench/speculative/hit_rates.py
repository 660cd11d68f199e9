"""Moving estimate of how often the first, second, third … drafted token is accepted.

``rates[j]`` estimates P(node j lies on the accepted path): in a chain the survival of position j, in a tree
the worth of its j-th node. All counts fade with every draft that is judged, so what was not tried for long
drifts back to what the nodes before it suggest: the ratio of the last two, or that of all sequences together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.speculative.step_cost import rising

Floats = NDArray[np.float64]
NEGLIGIBLE = 0.01
"""Rates below it are not told from 0."""


class HitRates:
    """Fading counts of accepted and tried nodes by index; ``weight`` observations stand for the prior."""

    def __init__(self, memory: float, weight: float) -> None:
        self._keep = 1 - 1 / memory
        self._weight = weight
        self._hit: Floats = np.zeros(0)
        self._tried: Floats = np.zeros(0)

    def add(self, nodes: int, path: Sequence[int]) -> None:
        """A draft of ``nodes`` was judged; those of ``path`` were accepted."""
        more = nodes - len(self._hit)
        if more > 0:
            self._hit = np.pad(self._hit, (0, more))
            self._tried = np.pad(self._tried, (0, more))
        self._hit = self._hit * self._keep
        self._tried = self._tried * self._keep
        self._tried[:nodes] += 1
        self._hit[list(path)] += 1

    def rates(self, n: int, prior: Floats | None = None) -> Floats:
        """Estimates [n], never rising; what was never tried is 0 from the first below ``NEGLIGIBLE`` on.

        Drafters that stop where they are unsure have deep nodes only where they are sure, so a deep node may
        be worth more than those before it. It is not to be had without them: such nodes share their mean.
        ``prior`` [n] are the estimates of all sequences together; None: these are they.
        """
        hit, tried, weight, seen = self._hit, self._tried, self._weight, len(self._hit)
        out: list[float] = []
        for j in range(n):
            if prior is not None:
                expected = float(prior[0]) if j == 0 else out[-1] * float(prior[j] / max(prior[j - 1], 1e-12))
            elif j == 0:
                expected = 0.5
            else:  # as the last step went on
                expected = out[-1] * min(1.0, out[-1] / max(out[-2], 1e-12) if j > 1 else out[0])
            value = (hit[j] + weight * expected) / (tried[j] + weight) if j < seen else expected
            out.append(float(value))
            if out[-1] < NEGLIGIBLE and j >= seen:
                break
        falling = rising([(value, 1.0) for value in reversed(out)])[::-1]
        return np.array(falling + [0.0] * (n - len(out)))

    def nbytes(self) -> int:
        """Bytes of the counts."""
        return self._hit.nbytes + self._tried.nbytes
