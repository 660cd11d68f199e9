"""Which tokens a quality measurement scores: windows of held-out text.

*p1*: windows spread over the text, each with ``context`` tokens before the first one scored (the KV protocol:
what is scored reads a coded cache). *ppl*: windows laid end to end, so that every token of the text is scored
once with up to ``context`` tokens before it (sliding perplexity).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from workbench.spec.errors import OptionError, RequestError

Protocol = Literal["p1", "ppl"]


@dataclass(frozen=True)
class QualitySettings:
    """How much is scored. ``context``, ``score`` and ``greedy`` are tokens per window.

    ``greedy`` tokens are generated after each context to find the first divergence (0: skip it).
    ``chunk`` rows are scored per forward. Out of range raises :class:`OptionError`.
    """

    protocol: Protocol = "p1"
    context: int = 1024
    score: int = 192
    windows: int = 5
    greedy: int = 32
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.protocol not in get_args(Protocol):
            raise OptionError(f"protocol = {self.protocol!r} is unknown.", hint="It is p1 or ppl.")
        lowest = {"context": 1, "score": 1, "windows": 1, "greedy": 0, "chunk": 1}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise OptionError(
                    f"{name} = {value!r} cannot be used.", hint=f"It is a whole number from {low}."
                )

    @property
    def slots(self) -> int:
        """KV slots that one window needs at most."""
        return self.context + max(self.score, self.greedy)


@dataclass(frozen=True)
class Window:
    """``ids`` with everything from index ``start`` on scored."""

    ids: tuple[int, ...]
    start: int

    @property
    def scored(self) -> tuple[int, ...]:
        """The tokens that are scored."""
        return self.ids[self.start :]


def cut(ids: Sequence[int], settings: QualitySettings) -> list[Window]:
    """Windows of ``ids``; raises :class:`RequestError` when the text is too short for one."""
    size, n = settings.context + settings.score, settings.windows
    if settings.protocol == "ppl":
        starts = range(1, len(ids), settings.score)[:n]
        return [
            Window(tuple(ids[max(s - settings.context, 0) : s + settings.score]), min(s, settings.context))
            for s in starts
        ] or _too_short(len(ids), 2)
    if len(ids) < size:
        return _too_short(len(ids), size)
    # As many as fit without overlap, spread evenly.
    count = min(n, len(ids) // size)
    stride = (len(ids) - size) // max(count - 1, 1)
    return [Window(tuple(ids[i * stride : i * stride + size]), settings.context) for i in range(count)]


def _too_short(have: int, need: int) -> list[Window]:
    raise RequestError(
        f"The text has {have} tokens; one window needs {need}.",
        hint="Give a longer text, or a smaller context or score.",
    )
