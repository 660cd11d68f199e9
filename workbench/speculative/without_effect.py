"""Options that were set and cannot act beside others are refused, not ignored.

A number that was set and does nothing is read as a result of it. Only what differs from its default counts:
an option that nobody touched has no wish behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from workbench.spec.errors import OptionError


def refuse_changed(owner: str, config: Any, names: Sequence[str], why: str, instead: str) -> None:
    """Raise :class:`OptionError` where one of the options ``names`` of ``config`` is not its default.

    ``why`` it has no effect, and what to do ``instead`` of leaving it, both continue a sentence.
    """
    defaults = {f.name: f.default for f in fields(config)}
    for name in names:
        value = getattr(config, name)
        if value != defaults[name]:
            raise OptionError(
                f"{owner}.{name} = {value!r} has no effect: {why}.",
                hint=f"Leave {name} at {defaults[name]}, or {instead}.",
            )
