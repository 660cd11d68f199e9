"""Other engines as contestants, in the same process and the same rounds, on the same prompts.

Each peer of :mod:`workbench.core.peers` has an adapter module whose ``load(setup)`` gives a
:class:`PeerEngine`; it is imported and loaded once, when a benchmark names it. A peer is timed as its users
would: by the moments at which its tokens come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from workbench.core.benchmark_timing import Contestant
from workbench.core.peers import PEERS, Measure, check_peers
from workbench.models.progress import Progress


@dataclass(frozen=True)
class PeerSetup:
    """What an adapter loads: the model by name or path, for a device, with this many CPU threads."""

    model: str
    dtype: str
    device: str
    vocab: int
    threads: int
    progress: Progress | None = None


class PeerEngine(Protocol):
    """A peer that is loaded; it serves every cell of the benchmark."""

    def contestant(self, which: str, measure: Measure, sizes: Mapping[str, Any]) -> Contestant:
        """The contestant of the peer named ``which`` for one cell."""
        ...

    def release(self) -> None:
        """End what was kept for the cell that is over."""
        ...


@dataclass
class Peers:
    """The peers of one benchmark run, loaded; ``left_out`` have nothing comparable to it."""

    names: tuple[str, ...]
    left_out: tuple[str, ...]
    bench: str
    engines: dict[str, PeerEngine] = field(default_factory=dict)  # by adapter: peers may share one

    def contestants(self, sizes: Mapping[str, Any]) -> list[Contestant]:
        """Those of one cell, in the order of the names."""
        return [
            self.engines[PEERS[name].adapter].contestant(name, PEERS[name].measures[self.bench], sizes)
            for name in self.names
        ]

    def release(self) -> None:
        """The cell is over."""
        for engine in self.engines.values():
            engine.release()


def load_peers(names: Iterable[str], bench: str, setup: PeerSetup) -> Peers:
    """Load those with something comparable to the benchmark; the others are named as left out.

    Raises the errors of :func:`check_peers` and of the adapters.
    """
    names = tuple(dict.fromkeys(names))
    check_peers(names, setup.device)
    fitting = tuple(name for name in names if bench in PEERS[name].measures)
    peers = Peers(fitting, tuple(name for name in names if name not in fitting), bench)
    for name in peers.names:
        adapter = PEERS[name].adapter
        if adapter not in peers.engines:
            peers.engines[adapter] = import_module(adapter).load(setup)
    return peers
