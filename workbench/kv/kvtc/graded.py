"""KVTC by age: recent tokens at a low ratio, older ones at a higher, all with one basis.

The paper keeps the last 128 tokens in 16 bits and codes everything before them alike; at long contexts and
high ratios those few tokens cost more than all others. Here they are coded too, only more finely, and each
span of age has its own bit plan. A payload per span; what is shared is the basis of the finest plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.kv.cached import CachedRows
from workbench.kv.kvtc.artefact import Calibration, Planner
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.entropy import Entropy
from workbench.kv.kvtc.header import CHUNK
from workbench.kv.kvtc.joint import JointRows
from workbench.kv.kvtc.plan import best_plan
from workbench.spec.errors import OptionError


@dataclass(frozen=True)
class Grade:
    """The next ``tokens`` towards the beginning, at these ratios; a multiple of 16 tokens."""

    tokens: int
    k_ratio: float
    v_ratio: float


def grades(text: str) -> tuple[Grade, ...]:
    """``"64x8/448x24:32"``: the last 64 tokens at 8, the 448 before at 24 (keys) and 32 (values).

    Raises :class:`OptionError` for anything else, and for tokens that are no multiple of 16.
    """
    out = []
    for part in filter(None, text.split("/")):
        tokens, cross, ratios = part.partition("x")
        k, apart, v = ratios.partition(":")
        try:
            grade = Grade(int(tokens), float(k), float(v if apart else k))
        except ValueError:
            grade = None
        if grade is None or not cross or grade.tokens < CHUNK or grade.tokens % CHUNK:
            raise OptionError(
                f"kvtc_graded cannot read the grade {part!r}.",
                hint=f"Write 64x8/448x24: tokens (a multiple of {CHUNK}), x, ratio; the newest first.",
            )
        out.append(grade)
    return tuple(out)


class Graded:
    """``near`` grades, the newest first, then ``far`` for all older tokens; ``sinks`` first ones in 16 bits.

    ``window`` newest tokens stay in 16 bits. Raises what :class:`Kvtc` and plans raise.
    """

    def __init__(
        self,
        calibration: Calibration,
        joint: JointRows,
        model: str,
        near: Sequence[Grade],
        far: tuple[float, float],
        *,
        sinks: int = 4,
        window: int = 0,
        entropy: Entropy = "deflate",
        planner: Planner = best_plan,
    ) -> None:
        ratios = [*((g.k_ratio, g.v_ratio) for g in near), far]
        self.near, self.sinks, self.window = tuple(near), sinks, window
        self.codecs = [
            Kvtc(
                calibration.artefact(*pair, planner),
                joint,
                model,
                sinks=sinks,
                window=window if i == 0 else 0,
                entropy=entropy,
            )
            for i, pair in enumerate(ratios)
        ]

    @property
    def key(self) -> str:
        """Names every grade and its codec."""
        sizes = [g.tokens for g in self.near]
        return f"graded/{sizes}/{self.codecs[0].entropy}/{[c.key for c in self.codecs]}"

    @property
    def shared_bytes(self) -> int:
        """Bytes of the artefact: bases nest, so the largest one serves all grades."""
        return max(c.shared_bytes for c in self.codecs)

    def spans(self, rows: CachedRows) -> list[tuple[Kvtc, int, int]]:
        """Codec and rows of every span that is not empty, the oldest first.

        Spans end at whole chunks, counted from the window backwards; what is left over is the oldest span's.
        """
        cuts = [rows.tokens]
        for i, grade in enumerate(self.near):
            cuts.append(max(cuts[-1] - grade.tokens - (self.window if i == 0 else 0), 0))
        cuts.append(0)
        found = zip(self.codecs, cuts[1:], cuts[:-1], strict=True)
        return [(codec, begin, end) for codec, begin, end in found if end > begin][::-1]

    def encode(self, rows: CachedRows) -> list[bytes]:
        """A payload per span, the oldest first; raises what :meth:`Kvtc.encode` does."""
        return [codec.encode(_cut(rows, begin, end)) for codec, begin, end in self.spans(rows)]

    def decode(self, rows: CachedRows, payloads: Sequence[bytes]) -> CachedRows:
        """The rows again; of ``rows`` only the number is used."""
        parts = [c.decode(data) for (c, _, _), data in zip(self.spans(rows), payloads, strict=True)]
        k = tuple(torch.cat(layer) for layer in zip(*(p.k for p in parts), strict=True))
        v = tuple(torch.cat(layer) for layer in zip(*(p.v for p in parts), strict=True))
        return CachedRows(k, v, torch.cat([p.positions for p in parts]))

    def exempt(self, rows: CachedRows) -> int:
        """Rows that stay in 16 bits."""
        kept = 0
        for codec, begin, end in self.spans(rows):
            sinks = max(codec.sinks - int(rows.positions[begin]), 0)
            free = max(end - begin - sinks - codec.window, 0)
            kept += end - begin - free // CHUNK * CHUNK
        return kept


def _cut(rows: CachedRows, begin: int, end: int) -> CachedRows:
    part = slice(begin, end)
    return CachedRows(tuple(x[part] for x in rows.k), tuple(x[part] for x in rows.v), rows.positions[part])
