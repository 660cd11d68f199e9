"""Who gets how many bits: a dynamic program over consecutive groups of components.

arXiv 2511.01815, section 3.2. Components, in order of variance, are cut into groups of 1, 16, 64, 256 or
1,024; each is dropped or stored in a format, for ``size * bits`` and a 32-bit header per token. With
``D`` the measured error,

    E[i][b] = min over (size, kind) of E[i - size][b - cost(size, kind)] + D(size, kind, i - size)

and ``E[i - 1][b]`` plus the energy of component i for dropping it. The plan is exactly optimal for these
errors, headers inside the budget. Time: components x budget x choices; costs are even, so half as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.kv.kvtc.distortion import Distortion
from workbench.kv.kvtc.formats import BITS, HEADER_BITS, KINDS, Kind
from workbench.spec.errors import OptionError


@dataclass(frozen=True)
class Group:
    """``size`` consecutive components from ``start`` on, stored in one format."""

    start: int
    size: int
    kind: Kind

    @property
    def bits(self) -> int:
        """Bits per token, header included."""
        return self.size * BITS[self.kind] + HEADER_BITS


@dataclass(frozen=True)
class BitPlan:
    """The kept groups in order; what lies between and behind them is dropped.

    ``error`` is the expected squared error per token, ``budget`` the bits per token that were allowed.
    """

    groups: tuple[Group, ...]
    error: float
    budget: int

    @property
    def bits(self) -> int:
        """Bits per token of codes and headers, before entropy coding."""
        return sum(g.bits for g in self.groups)

    @property
    def rank(self) -> int:
        """Components up to the last one kept: where the basis can be cut."""
        return max((g.start + g.size for g in self.groups), default=0)


def best_plan(distortion: Distortion, budget: int) -> BitPlan:
    """The plan of least error within ``budget`` bits per token; raises :class:`OptionError` below 0 bits."""
    if budget < 0:
        raise OptionError(f"kvtc cannot plan with {budget} bits per token.", hint="Choose a lower ratio.")
    choices = [
        (i, k, size, size * BITS[kind] + HEADER_BITS)
        for i, size in enumerate(distortion.sizes)
        for k, kind in enumerate(KINDS)
    ]
    unit = math.gcd(*(cost for *_, cost in choices))
    rank, steps = len(distortion.energy), budget // unit
    # Only the last max(size) rows of E are looked at again; which choice won is kept for every step.
    depth = min(max(distortion.sizes), rank) + 1
    lowest = np.zeros((depth, steps + 1))
    won = np.zeros((rank, steps + 1), dtype=np.uint8)
    energy, error = distortion.energy.numpy(), distortion.error.numpy()
    for end in range(1, rank + 1):
        row = lowest[end % depth]
        np.add(lowest[(end - 1) % depth], energy[end - 1], out=row)
        for number, (i, k, size, cost) in enumerate(choices, 1):
            paid = cost // unit
            if size > end or paid > steps:
                continue
            candidate = lowest[(end - size) % depth][: steps + 1 - paid] + error[i, k, end - size]
            better = candidate < row[paid:]
            np.copyto(row[paid:], candidate, where=better)
            np.copyto(won[end - 1, paid:], number, where=better)
    return BitPlan(_trace(won, choices, unit), float(lowest[rank % depth][steps]), budget)


def truncated_plan(distortion: Distortion, budget: int) -> BitPlan:
    """No program: the leading components, all in fp8, as many as the budget has room for; for comparison.

    Raises :class:`OptionError` below 0 bits.
    """
    if budget < 0:
        raise OptionError(f"kvtc cannot plan with {budget} bits per token.", hint="Choose a lower ratio.")
    groups: list[Group] = []
    error, at, left = float(distortion.energy.sum()), 0, budget
    for i, size in sorted(enumerate(distortion.sizes), key=lambda pair: -pair[1]):
        while at + size <= len(distortion.energy) and size * BITS["fp8"] + HEADER_BITS <= left:
            group = Group(at, size, "fp8")
            groups.append(group)
            error += float(
                distortion.error[i, KINDS.index("fp8"), at] - distortion.energy[at : at + size].sum()
            )
            at, left = at + size, left - group.bits
    return BitPlan(tuple(groups), error, budget)


def _trace(won: np.ndarray, choices: Sequence[tuple[int, int, int, int]], unit: int) -> tuple[Group, ...]:
    """Follow the choices back from all components and the whole budget."""
    end, left = won.shape[0], won.shape[1] - 1
    groups = []
    while end:
        number = won[end - 1, left]
        if not number:
            end -= 1
            continue
        _, k, size, cost = choices[number - 1]
        end, left = end - size, left - cost // unit
        groups.append(Group(end, size, KINDS[k]))
    return tuple(reversed(groups))
