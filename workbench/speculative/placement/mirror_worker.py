"""Mirror's drafter as a side of its own: windows out, candidates in, branches while the target goes on.

Mirror Speculative Decoding (arXiv 2510.13161). A window of γ tokens is sent whole; when the target's proxy
has said what may follow at each of its γ + 1 places, every candidate is continued, all of them one pass at a
time, so that a verdict is heard between two passes. A verdict that was foreseen makes its branch the next
window, finished where it is short; any other one has a window drafted afresh. A pass makes a token of each,
or several where the drafter has ``streams``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.speculative.placement.branches import outcomes
from workbench.speculative.placement.in_turn import InTurn
from workbench.speculative.placement.messages import ROOT, Candidates, Message, TailStream
from workbench.speculative.placement.mirror_stream import MirrorStream
from workbench.speculative.placement.tree_kv import TreeKV


@dataclass(frozen=True)
class Windows:
    """``gamma`` tokens of a window, ``kappa`` candidates at each of its places, ``streams`` of a row."""

    gamma: int = 4
    kappa: int = 3
    streams: int = 0


@dataclass
class _Live:
    """A stream; ``sent``: the target has its window. ``ends``: of branches, ``left``: tokens each lacks."""

    stream: MirrorStream
    sent: bool = False
    reused: bool = False
    places: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    @property
    def short(self) -> bool:
        """Whether a branch lacks anything."""
        return any(self.left)

    @property
    def tokens(self) -> Sequence[int]:
        """Committed ids."""
        return self.stream.tokens

    def close(self) -> None:
        """Give back everything."""
        self.stream.close()


class MirrorWorker(InTurn[_Live]):
    """Streams by number, served in turn."""

    def __init__(self, kv: TreeKV, windows: Windows | None = None) -> None:
        super().__init__(kv)
        self.windows = windows or Windows()

    def begin(self, tokens: Sequence[int]) -> _Live:
        """A window is owed."""
        return _Live(MirrorStream(self.kv, tokens, self.windows.gamma, self.windows.kappa))

    def settle(self, number: int, stream: _Live, tokens: Sequence[int]) -> TailStream | None:
        """The answer to a verdict that was foreseen in time is the next window."""
        stream.stream.settle(tokens)
        stream.places, stream.ends, stream.left, stream.sent = [], [], [], False
        stream.reused = bool(stream.stream.tree.below)
        return self._whole(number, stream)

    def told(self, message: Message) -> None:
        """Candidates make branches."""
        if isinstance(message, Candidates):
            self._foresee(message)

    @property
    def has_work(self) -> bool:
        """Whether a window is owed, or a branch is short."""
        return any(not live.sent or live.short for live in self.streams.values())

    def work(self) -> tuple[TailStream | None, int]:
        """One pass of the stream whose turn it is: its window if it is whole now, and the rows this took."""
        for number, live in self.turns():
            if live.sent and not live.short:
                continue
            stream = live.stream
            stream.rows, before = 0, stream.tree.stats.added
            tail = None
            if live.sent:
                self._branches(live)
            else:
                tail = self._window(number, live)
            self.made = stream.tree.stats.added - before
            return tail, stream.rows
        return None, 0

    # -- inside -----------------------------------------------------------------------------------------

    def _window(self, number: int, live: _Live) -> TailStream | None:
        """One pass more of a window; the window when it is whole, a short one where nothing can follow."""
        stream, gamma = live.stream, self.windows.gamma
        if len(stream.tokens) + 2 * gamma >= self.kv.limit:
            live.sent = True
            return TailStream(number, len(stream.tokens), ())
        chain = stream.chain(gamma)
        if len(chain) < gamma:
            _, (left,), _ = stream.step(chain[-1:] or [ROOT], [gamma - len(chain)])
            chain = stream.chain(gamma)
            if not left and len(chain) < gamma:
                live.sent = True
                return TailStream(number, len(stream.tokens), stream.tree.tail(chain))
        return self._whole(number, live)

    def _whole(self, number: int, live: _Live) -> TailStream | None:
        stream, gamma = live.stream, self.windows.gamma
        chain = stream.chain(gamma)
        live.sent = len(chain) == gamma
        return (
            TailStream(number, len(stream.tokens), stream.tree.tail(chain), live.reused)
            if live.sent
            else None
        )

    def _foresee(self, message: Candidates) -> None:
        """Heads of branches: what the proxy says may follow at each place, beside the window's own token."""
        live = self.streams.get(message.stream)
        if live is None or not live.sent or live.ends or message.base_len != len(live.stream.tokens):
            return
        stream = live.stream
        window = stream.chain(min(self.windows.gamma, len(message.places) - 1))
        live.places = [ROOT, *window]
        said = [dict(place) for place in message.places]
        tokens = [stream.tree.nodes[n].token for n in window]
        ends = outcomes(tokens, lambda path: list(said[len(path)]), self.windows.kappa)
        live.ends = [stream.put(live.places[e.accepted], e.token, said[e.accepted][e.token]) for e in ends]
        live.left = [self.windows.gamma] * len(live.ends)

    def _branches(self, live: _Live) -> None:
        """One pass of all branches; before the first, what of the window was never fed."""
        for place in live.places:
            live.stream.know([place])
        live.places = []
        live.ends, live.left, _ = live.stream.step(live.ends, live.left)
