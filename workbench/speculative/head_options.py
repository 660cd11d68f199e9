"""Options that trained heads with layers of their own share, written once."""

from __future__ import annotations

from typing import Any

from workbench.spec.technique import option


def drafted_vocab() -> Any:
    """How many tokens it drafts from."""
    return option(
        8192,
        low=0,
        high=1 << 20,
        unit="tokens",
        help="Draft only the tokens that the model says most often, so many of them; 0: all tokens.",
    )


def head_bits() -> Any:
    """How its weights are held."""
    return option(
        16,
        unit="bit",
        choices=(4, 8, 16),
        help="Bits per weight of the head; below 16 rounded to nearest: quicker drafts, wrong more often.",
    )


def drawn_chains() -> Any:
    """Whether chains are sampled."""
    return option(
        True,
        help="Sample chains above temperature 0, keeping their laws; off: likeliest tokens, as in trees.",
    )


def least_confidence() -> Any:
    """When a chain ends early."""
    return option(
        0.0,
        low=0.0,
        high=1.0,
        help="End a chain behind a token that the head gives, with all before it, less than this; 0: never. "
        "Trees have no such end.",
    )
