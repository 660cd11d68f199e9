"""Do the codes of paired layers agree more than chance would have it?

The premise of sharing is that neighbouring layers have similar codes: "over 80% differ by at most one". Two
independent layers do that too, since middle codes are common. So agreement is shown beside what the two
layers' own distributions give, and beside the same codes with the tokens of one layer shuffled, which keeps
whatever channels have in common; only what exceeds both is agreement about tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def joint_counts(a: Tensor, b: Tensor, levels: int) -> Tensor:
    """How often codes ``a`` and ``b`` (same shape, < ``levels``) occur together, int64 [levels, levels]."""
    index = a.flatten().long() * levels + b.flatten().long()
    return torch.bincount(index, minlength=levels * levels).view(levels, levels)


def shuffled_tokens(codes: Tensor, seed: int) -> Tensor:
    """Codes [n, H, P, D] with the tokens (n, P) in another order, the same for all heads and channels."""
    by_token = codes.transpose(1, 2).flatten(0, 1)
    order = torch.randperm(len(by_token), generator=torch.Generator().manual_seed(seed))
    n, heads, slots, dim = codes.shape
    return by_token[order.to(codes.device)].view(n, slots, heads, dim).transpose(1, 2)


def difference(joint: Tensor) -> Tensor:
    """The law of |a - b|, float64 [levels], of counts or probabilities [levels, levels]."""
    p = joint.double() / joint.sum().clamp(min=1e-300)
    level = torch.arange(len(p))
    apart = (level[:, None] - level).abs().flatten()
    return torch.zeros(len(p), dtype=torch.float64).index_add_(0, apart, p.flatten())


@dataclass(frozen=True)
class Agreement:
    """Laws of |difference| between a pair's codes, float64 [levels]: as they are, as their marginals alone
    would have it, and with tokens shuffled."""

    observed: Tensor
    chance: Tensor
    shuffled: Tensor

    @classmethod
    def of(cls, joint: Tensor, shuffled: Tensor) -> Agreement:
        """From counts [levels, levels] of the codes, and of the codes with shuffled tokens."""
        p = joint.double() / joint.sum().clamp(min=1)
        independent = p.sum(1, keepdim=True) * p.sum(0, keepdim=True)
        return cls(difference(joint), difference(independent), difference(shuffled))

    @property
    def kappa(self) -> float:
        """Equal codes beyond the stronger of the two controls: 0 is chance, 1 is always (Cohen's kappa)."""
        control = max(float(self.chance[0]), float(self.shuffled[0]))
        return (float(self.observed[0]) - control) / (1 - control) if control < 1 else 0.0

    def row(self) -> dict[str, float]:
        """Shares in percent, for a table."""
        laws = (("observed", self.observed), ("chance", self.chance), ("shuffled", self.shuffled))
        shares = {f"{name} |Δ|={i}": 100 * float(x) for name, law in laws for i, x in enumerate(law)}
        within = {f"{name} |Δ|≤1": 100 * float(law[:2].sum()) for name, law in laws}
        return shares | within | {"kappa": self.kappa}
