"""When a selector acts and how many tokens it leaves: the part that all of them share.

A selection is a function of absolute positions (law 3), so its points follow from the lengths alone. The
budget is a share of what there is at the first point and counts sinks and recent tokens; with ``interval``
the same number is kept again and again, so that the cache stays bounded while text goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from workbench.spec.technique import option

AWARE, AGNOSTIC = "aware", "agnostic"


def keep_option() -> Any:
    """The field ``keep``."""
    return option(
        0.5,
        low=0.05,
        high=1.0,
        step=0.05,
        unit="of the context",
        help="Share of the context that is kept, sinks and recent tokens included.",
    )


def sinks_option() -> Any:
    """The field ``sinks``."""
    return option(
        4, low=0, high=64, unit="tokens", help="First tokens of the context, which are never dropped."
    )


def protocol_option() -> Any:
    """The field ``protocol``."""
    return option(
        AWARE,
        choices=(AWARE, AGNOSTIC),
        help="aware: select at the end of the prompt, the question has been seen. agnostic: at the end of "
        "the context that the request names, before the question.",
    )


def interval_option(default: int) -> Any:
    """The field ``interval``."""
    return option(
        default,
        low=0,
        high=65536,
        unit="tokens",
        help="Select again after so many tokens, down to the same number; 0 selects once. In between the "
        "cache grows by as many.",
    )


@dataclass(frozen=True)
class KeepOptions:
    """Options of a technique that keeps a share of the context, sinks and the last tokens first."""

    keep: float = keep_option()
    sinks: int = sinks_option()
    recent: int = option(
        0,
        low=0,
        high=4096,
        unit="tokens",
        help="Last tokens before a selection, kept whatever their score; only sinks have a better claim.",
    )
    protocol: str = protocol_option()


@dataclass(frozen=True)
class Rules:
    """Points and sizes of a selector's cuts; see the options of the same names."""

    keep: float
    sinks: int
    recent: int
    protocol: str
    interval: int = 0

    @classmethod
    def of(cls, config: Any, **fixed: Any) -> Rules:
        """From the common fields of a technique's config; ``fixed`` sets those it does not offer."""
        names = ("keep", "sinks", "recent", "protocol", "interval")
        return cls(**{**{n: getattr(config, n) for n in names if hasattr(config, n)}, **fixed})

    def first(self, prompt: int, context: int) -> int:
        """Tokens committed at the first selection."""
        return prompt if self.protocol == AWARE else context

    def next(self, at: int, prompt: int, context: int) -> int | None:
        """The first selection after more than ``at`` committed tokens, or None."""
        point = self.first(prompt, context)
        if at < point:
            return point
        if not self.interval:
            return None
        return point + ((at - point) // self.interval + 1) * self.interval

    def budget(self, prompt: int, context: int) -> int:
        """Tokens kept at every selection: the share rounded down, and at least 1."""
        return max(1, math.floor(self.keep * self.first(prompt, context) + 1e-9))
