"""How many bits each layer's keys and values take, and which layers read another's codes.

Layers are paired within a KV group, so that both see the same tokens, in the group's order; a pair's first
layer keeps the codes and its second may read them. Keys and values are decided apart (section 3.3 of the
paper and the schedule string of its code: ``lk lv km vm``). A schedule is data: it is shown as a table, and
its digest is part of the format's key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

Pair = tuple[int, int]


@dataclass(frozen=True)
class Side:
    """Keys or values of a layer: width of a code, and the layer whose codes are read (None: its own)."""

    bits: int
    owner: int | None = None

    @property
    def code_bits(self) -> int:
        """Bits of code stored per element, parameters not counted."""
        return self.bits if self.owner is None else 0


@dataclass(frozen=True)
class Schedule:
    """One :class:`Side` per model layer, for keys and for values."""

    keys: tuple[Side, ...]
    values: tuple[Side, ...]

    @property
    def code_bits(self) -> Fraction:
        """Mean bits of code over layers, keys and values: the paper's *equivalent bits*, without metadata."""
        sides = (*self.keys, *self.values)
        return Fraction(sum(s.code_bits for s in sides), len(sides))

    @property
    def key(self) -> str:
        """A digest of the whole table."""
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=8).hexdigest()

    def table(self) -> list[dict[str, int | None]]:
        """One row per layer: bits of keys and values, and whose codes are read."""
        return [
            {"layer": i, "k_bits": k.bits, "k_codes_of": k.owner, "v_bits": v.bits, "v_codes_of": v.owner}
            for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True))
        ]


def pairs_of(groups: Iterable[Sequence[int]]) -> tuple[Pair, ...]:
    """Neighbours within each KV group, two by two; a layer left over has no partner."""
    return tuple(sorted((g[i], g[i + 1]) for g in groups for i in range(0, len(g) - 1, 2)))


def widths(layers: int, below: int) -> tuple[int, ...]:
    """2 bits in layers under ``below``, 1 bit from it on; -1 means 2 bits everywhere."""
    return tuple(2 if below < 0 or i < below else 1 for i in range(layers))


def sides(bits: Sequence[int], shared: Collection[Pair]) -> tuple[Side, ...]:
    """Sides of these widths; the second layer of a shared pair has its partner's codes, so its width too."""
    owner = {second: first for first, second in shared}
    return tuple(
        Side(bits[owner[i]], owner[i]) if i in owner else Side(width) for i, width in enumerate(bits)
    )


def from_layer(pairs: Sequence[Pair], start: int) -> tuple[Pair, ...]:
    """Pairs whose second layer is ``start`` or later; -1 means none."""
    return tuple(p for p in pairs if 0 <= start <= p[1])


def cheapest(
    bits: tuple[Sequence[int], Sequence[int]],
    harm: tuple[Sequence[float], Sequence[float]],
    pairs: Sequence[Pair],
    allowed: tuple[Sequence[bool], Sequence[bool]],
    target: float,
) -> Schedule:
    """Share pair by pair, the least ``harm`` per bit saved first, until the mean code bits are ``target``.

    ``bits``, ``harm`` (by pair) and ``allowed`` (by pair) are given for keys and values. When all that is
    allowed does not reach the target, the schedule is as near as that comes.
    """
    candidates = sorted(
        (harm[side][i] / bits[side][pair[1]], side, pair)
        for side in range(2)
        for i, pair in enumerate(pairs)
        if allowed[side][i]
    )
    shared: tuple[list[Pair], list[Pair]] = ([], [])
    schedule = Schedule(sides(bits[0], ()), sides(bits[1], ()))
    for _, side, pair in candidates:
        if schedule.code_bits <= target:
            break
        shared[side].append(pair)
        schedule = Schedule(sides(bits[0], shared[0]), sides(bits[1], shared[1]))
    return schedule
