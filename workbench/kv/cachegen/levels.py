"""Loss levels: how many quantization bins each third of the layers gets.

Early layers matter more (section 5.2 of the paper), so bins may fall with depth; keys and values apart, as in
the authors' code. Coding every row by itself is the default. With ``delta`` only every tenth row is, finely,
and the others as differences to it: the paper's form, which the authors' code leaves out, and which small
models do not profit from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from workbench.spec.errors import OptionError

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
GROUP = 10  # tokens that share an anchor
ANCHOR_BINS = 256  # anchors are coded in 8 bits


@dataclass(frozen=True, order=True)
class Alphabet:
    """The symbols of ``rows``, or of ``deltas`` to an anchor, in ``bins`` bins: 4 to 256, even."""

    of: Literal["rows", "deltas"]
    bins: int

    def __post_init__(self) -> None:
        if self.of not in ("rows", "deltas") or not 4 <= self.bins <= 256 or self.bins % 2:
            raise OptionError(
                f"cachegen cannot code {self.of} in {self.bins} bins.",
                hint="Choose an even number, 4 to 256.",
            )

    @property
    def half(self) -> int:
        """The largest quantized magnitude: 15 for 32 bins."""
        return self.bins // 2 - 1

    @property
    def symbols(self) -> int:
        """Symbols 0 to ``2 * half``; ``half`` stands for zero."""
        return 2 * self.half + 1

    @property
    def name(self) -> str:
        """For example ``rows32``."""
        return f"{self.of}{self.bins}"


ANCHORS = Alphabet("rows", ANCHOR_BINS)


@dataclass(frozen=True)
class Level:
    """Bins of keys and of values in the first, second and last third of the layers."""

    name: str
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    delta: bool = False

    def __post_init__(self) -> None:
        if len(self.k) != 3 or len(self.v) != 3:
            raise OptionError(f"Level {self.name!r} needs bins for three thirds of the layers.")
        for bins in (*self.k, *self.v):
            Alphabet("rows", bins)

    def alphabet(self, side: Side, layer: int, layers: int) -> Alphabet:
        """What rows (or, with ``delta``, differences) of a layer are coded in."""
        bins = (self.k if side == "k" else self.v)[layer * 3 // layers]
        return Alphabet("deltas" if self.delta else "rows", bins)

    def tables(self, layers: int) -> Iterator[tuple[Alphabet, Side, int]]:
        """Every probability table the level needs: alphabet, side, layer."""
        for side in SIDES:
            for layer in range(layers):
                yield self.alphabet(side, layer, layers), side, layer
                if self.delta:
                    yield ANCHORS, side, layer


def uniform(bins: int, *, delta: bool = False) -> Level:
    """The same bins everywhere."""
    return Level(f"{bins}{'-delta' if delta else ''}", (bins,) * 3, (bins,) * 3, delta)


LEVELS: tuple[Level, ...] = (
    uniform(64),
    uniform(32),
    Level("32/16/16", (32, 16, 16), (32, 16, 16)),
    Level("16/16/12", (16, 16, 12), (16, 12, 12)),
)
"""From the least to the most lossy: what a context is stored at unless told otherwise."""

DELTA_LEVELS: tuple[Level, ...] = (
    Level("32/16/16-delta", (32, 16, 16), (32, 16, 16), delta=True),
    Level("16/10/8-delta", (16, 10, 8), (16, 10, 8), delta=True),
)
"""The paper's anchors and deltas, for comparison."""


def alphabets(levels: tuple[Level, ...]) -> tuple[Alphabet, ...]:
    """All alphabets that levels use, whatever the number of layers."""
    found = {Alphabet("deltas" if n.delta else "rows", b) for n in levels for b in (*n.k, *n.v)}
    if any(n.delta for n in levels):
        found.add(ANCHORS)
    return tuple(sorted(found))
