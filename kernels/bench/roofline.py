"""Floors and rates: what a case costs at least on a chip with given ceilings, and how near a time comes.

Ceilings are measured in the same run; before anything is measured, those of the vendor's data sheet stand in
and say so. Rates: TFLOP/s where the floor is set by operations, TB/s where it is set by bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workbench.kernels.spec import Cost

#: NVIDIA H200 SXM data sheet, dense: operations a second and bytes a second. Claimed, not measured.
DATA_SHEET = {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12, "bytes": 4.8e12}
#: A launch costs this much whatever it does: an order of magnitude, for the plan only.
LAUNCH_SECONDS = 4e-6


@dataclass(frozen=True)
class Ceilings:
    """Operations a second by unit, ``bytes`` a second; ``measured`` or the vendor's. 0: not known."""

    rates: Mapping[str, float]
    measured: bool

    def of(self, unit: str) -> float:
        """The ceiling of a unit, 0 when it is not known."""
        return self.rates.get(unit, 0.0)


CLAIMED = Ceilings(DATA_SHEET, measured=False)


@dataclass(frozen=True)
class Floor:
    """The least time a cost can take, and what sets it."""

    seconds: float
    bound: str

    @property
    def by_bytes(self) -> bool:
        """Whether bytes set it, not operations."""
        return self.bound == "bytes"


def floor(cost: Cost, unit: str, ceilings: Ceilings) -> Floor:
    """The larger of the two times; a ceiling that is not known sets none."""
    times = {
        "bytes": cost.bytes / ceilings.of("bytes") if ceilings.of("bytes") else 0.0,
        unit: cost.flops / ceilings.of(unit) if ceilings.of(unit) else 0.0,
    }
    bound = max(times, key=lambda name: times[name])
    return Floor(times[bound], bound)


def rate(cost: Cost, unit: str, seconds: float) -> tuple[float, str]:
    """Operations or bytes a second reached, in units of 10^12, and the unit's name.

    Which of them follows from the data sheet alone, so that a number never changes its meaning with the chip.
    """
    if floor(cost, unit, CLAIMED).by_bytes:
        return cost.bytes / seconds / 1e12, "TB/s"
    return cost.flops / seconds / 1e12, "TFLOP/s"


def fraction(bound: Floor, seconds: float) -> float | None:
    """Share of the ceiling that was reached; None without a ceiling."""
    return bound.seconds / seconds if bound.seconds else None
