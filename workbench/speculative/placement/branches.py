"""Branch-complete rollout: continuations for every way a window may end, made before it is known.

Mirror Speculative Decoding (arXiv 2510.13161): while the target verifies a window of γ drafts, each position
has κ candidates for the token that ends the accepted prefix there, by a proxy of the target's law (an early
exit of the target, or the drafter's own); every candidate is continued by γ tokens. The verdict (accepted
prefix, correction) reuses its branch, or the drafter starts afresh. The proxy decides what is made ahead,
never what is accepted. Speculative Speculative Decoding enumerates the same outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from workbench.spec.errors import InvariantError

Path = tuple[int, ...]
"""Ids behind the committed ones."""


@dataclass(frozen=True)
class Outcome:
    """``accepted`` drafts of the window were kept, then came ``token``."""

    accepted: int
    token: int


@dataclass(frozen=True)
class Rollout:
    """A window and its branches."""

    window: Path
    branches: Mapping[Outcome, Path]

    def reuse(self, accepted: int, token: int) -> Path | None:
        """The continuation behind this verdict, or None: nobody foresaw it."""
        return self.branches.get(Outcome(accepted, token))

    @property
    def drafted(self) -> int:
        """Tokens of all continuations."""
        return sum(len(b) for b in self.branches.values())


def outcomes(window: Sequence[int], proxy: Callable[[Path], Sequence[int]], kappa: int) -> list[Outcome]:
    """The ``kappa`` likeliest ends at each of the γ + 1 places of a window, the first place first.

    ``proxy(path)`` ranks ids behind a path, likeliest first: a place is asked with the drafts before it. The
    window's own next token is no end there: it would have been accepted.
    """
    if kappa < 1:
        raise InvariantError(f"{kappa} candidates per position foresee nothing.")
    out: list[Outcome] = []
    for accepted in range(len(window) + 1):
        own = window[accepted] if accepted < len(window) else None
        ranked = dict.fromkeys(t for t in proxy(tuple(window[:accepted])) if t != own)
        out += [Outcome(accepted, token) for token in list(ranked)[:kappa]]
    return out


def roll_out(
    window: Sequence[int],
    ends: Sequence[Outcome],
    extend: Callable[[Sequence[Path]], Sequence[Sequence[int]]],
) -> Rollout:
    """Continue every end at once: ``extend(paths)`` gives what follows each path, itself left out."""
    paths = [(*window[: end.accepted], end.token) for end in ends]
    made = extend(paths) if paths else []
    return Rollout(tuple(window), {e: tuple(c) for e, c in zip(ends, made, strict=True)})


@dataclass
class RolloutStats:
    """Verdicts that found their branch, by accepted length, and what the others cost.

    ``drafted`` counts tokens of branches, ``used`` those of branches that were taken up.
    """

    tries: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)
    branches: int = 0
    drafted: int = 0
    used: int = 0
    emitted: int = 0

    def count(self, rollout: Rollout, accepted: int, token: int) -> Path | None:
        """Book a verdict; the branch it takes up."""
        found = rollout.reuse(accepted, token)
        self.tries[accepted] = self.tries.get(accepted, 0) + 1
        self.hits[accepted] = self.hits.get(accepted, 0) + (found is not None)
        self.branches += len(rollout.branches)
        self.drafted += rollout.drafted
        self.used += len(found) if found is not None else 0
        self.emitted += accepted + 1
        return found

    @property
    def reuse_rate(self) -> float | None:
        """Share of verdicts whose branch was there; None before the first."""
        tries = sum(self.tries.values())
        return sum(self.hits.values()) / tries if tries else None

    @property
    def wasted(self) -> float | None:
        """Tokens drafted in branches that nobody took up, per emitted token: what the overlap costs."""
        return (self.drafted - self.used) / self.emitted if self.emitted else None
