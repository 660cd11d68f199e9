"""What sharing each pair's codes costs a model, and how much the codes agree: the data schedules are made of.

Measured by :mod:`workbench.core.xquant_calibration`, keys and values apart, one pair at a time with all else
exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench.kv.xquant.agreement import Agreement
from workbench.kv.xquant.schedule import Pair

SIDES = ("k", "v")


@dataclass(frozen=True)
class SharingHarm:
    """By side (keys, values) and pair, float64 [2, n]: KL in nats per token against exact KV when the second
    layer reads its partner's codes (``shared``), and when it reads its own (``own``).

    ``joint`` and ``shuffled`` int64 [2, n, 4, 4]: counts of code pairs, as they are and with tokens shuffled.
    ``origin`` says on what text, ``tokens`` how many tokens were scored.
    """

    pairs: tuple[Pair, ...]
    shared: Tensor
    own: Tensor
    joint: Tensor
    shuffled: Tensor
    origin: str
    tokens: int

    def increase(self, side: int) -> list[float]:
        """KL that sharing adds, by pair."""
        return [float(x) for x in self.shared[side] - self.own[side]]

    def agreement(self, side: int, pair: int) -> Agreement:
        """Agreement of a pair's codes."""
        return Agreement.of(self.joint[side, pair], self.shuffled[side, pair])

    def allowed(self, side: int, least: float) -> list[bool]:
        """Pairs whose codes agree beyond chance by at least ``least``; 0 allows all."""
        return [not least or self.agreement(side, i).kappa >= least for i in range(len(self.pairs))]

    @property
    def nbytes(self) -> int:
        """Bytes of the artefact."""
        return sum(t.numel() * t.element_size() for t in (self.shared, self.own, self.joint, self.shuffled))

    def table(self) -> list[dict[str, object]]:
        """One row per side and pair, for people."""
        return [
            {
                "side": SIDES[side],
                "layers": f"{first}→{second}",
                "kl_shared": float(self.shared[side, i]),
                "kl_own": float(self.own[side, i]),
                **self.agreement(side, i).row(),
            }
            for side in range(2)
            for i, (first, second) in enumerate(self.pairs)
        ]
