"""Requests and sequences: what was asked, and how far it has come.

A request with ``n`` samples becomes ``n`` sequences that share their prompt's pages. A sequence's
``tokens`` are prompt and committed output; the KV of the first ``computed`` of them is in the cache.
One token is pending in a decode, more in a prefill: there is no other difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from workbench.engine.params import SamplingParams
from workbench.engine.prefix import Published
from workbench.engine.seams import LogitsMask
from workbench.engine.selection import Selection
from workbench.engine.stops import StopMatcher
from workbench.engine.text import TextStream
from workbench.spec.events import FinishReason, TokenInfo


@dataclass(frozen=True)
class Request:
    """What was asked: ids, sampling, and an optional mask of allowed tokens.

    ``salt`` separates prefix-cache entries of callers who must not share them. ``context``: how many tokens
    of the prompt come before the question, for KV selection that must not see it; None: not told.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    mask: LogitsMask | None = None
    salt: str = ""
    context: int | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample of a request while it is waiting, running or finished."""

    id: int
    request: Request
    sample: int
    tokens: list[int]
    budget: int  # output tokens it may still be given at most, context limit included
    computed: int = 0
    cached_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)  # page ids per KV group
    chain: list[Published] = field(default_factory=list)  # published prefix entries, one per full page
    shareable: int | None = None  # tokens that a prefix index may give at most; None: no limit
    selection: Selection | None = None  # what a KV selector knows of it
    dropped: list[int] = field(default_factory=list)  # tokens a selector dropped, per KV group
    shift: int = 0  # how far positions moved back behind them
    kept: dict[int, list[Tensor]] = field(default_factory=dict)  # layer: int32 tokens kept, per KV head
    selected: int = 0  # tokens that were there when it was last thinned out; later ones are all kept
    state: Literal["waiting", "running", "finished"] = "waiting"
    finish: FinishReason | None = None
    stream: TextStream | None = None
    stops: StopMatcher | None = None
    infos: list[TokenInfo] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=dict)
    drafted: int = 0  # tokens of which a drafter's layers hold K and V in its pages
    ends: dict[int, Tensor] = field(default_factory=dict)  # page: what a drafter reads at the row behind it
    siblings: list[Sequence] = field(default_factory=list)  # samples to fork when the prompt is computed
    preemptions: int = 0
    overtaken: int = 0  # later requests admitted before it
    text: str = ""

    @property
    def params(self) -> SamplingParams:
        """The request's sampling settings."""
        return self.request.params

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    def used(self, group: int) -> int:
        """Slots of a KV group that hold its tokens: all computed ones but those a selector dropped."""
        return self.computed - self.dropped[group] if self.dropped else self.computed

    @property
    def pending(self) -> int:
        """Committed tokens whose KV is not in the cache yet: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> list[int]:
        """Committed output ids."""
        return self.tokens[self.prompt_len :]

    @property
    def n_generated(self) -> int:
        """Number of committed output ids."""
        return len(self.tokens) - self.prompt_len

    @property
    def left(self) -> int:
        """Output tokens it may still be given."""
        return self.budget - self.n_generated
