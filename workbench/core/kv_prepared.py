"""A KV method ready to be measured: its round trip, what it shares, and how long its two halves took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from workbench.engine.engine import Engine
from workbench.engine.seams import KVCodec
from workbench.kv.cached import CachedRows, Reconstructed, RoundTrip, page_format
from workbench.spec.errors import InvariantError


@dataclass
class Clock:
    """Seconds spent encoding and decoding."""

    encode: float = 0.0
    decode: float = 0.0

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Add what the block takes to :attr:`encode`."""
        start = time.perf_counter()
        yield
        self.encode += time.perf_counter() - start

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Add what the block takes to :attr:`decode`."""
        start = time.perf_counter()
        yield
        self.decode += time.perf_counter() - start

    def take(self) -> tuple[float, float]:
        """Both, and begin again."""
        out = self.encode, self.decode
        self.encode = self.decode = 0.0
        return out


@dataclass(frozen=True)
class Prepared:
    """``trip`` is what it does to rows; or ``engine`` makes one that does it while it computes a context.

    ``key`` names everything that shapes the result (empty: it is not known, keep no point); ``shared`` bytes
    of artefacts are needed once per model; ``clock`` is what ``trip`` keeps time with, if anyone does.
    """

    trip: RoundTrip | None
    key: str = ""
    shared: int = 0
    clock: Clock | None = None
    engine: Callable[[], Engine] | None = None


def prepared(method: RoundTrip | Prepared) -> Prepared:
    """A bare round trip as a prepared method."""
    return method if isinstance(method, Prepared) else Prepared(method)


def then(first: Prepared, second: Prepared) -> Prepared:
    """``second`` codes what ``first`` gives back; bytes are the second's, times are the sums of both.

    Raises :class:`InvariantError` for a method that is no round trip.
    """
    clock, one, two = Clock(), first.trip, second.trip
    if one is None or two is None:
        raise InvariantError(
            "A method that needs an engine of its own cannot be put before or behind another."
        )

    def run(rows: CachedRows) -> Reconstructed:
        back = two(one(rows).rows)
        for part in (first, second):
            if part.clock is not None:
                spent = part.clock.take()
                clock.encode += spent[0]
                clock.decode += spent[1]
        return back

    key = f"{first.key} + {second.key}" if first.key and second.key else ""
    return Prepared(run, key, first.shared + second.shared, clock)


def timed_format(codec: KVCodec, page_size: int, clock: Clock) -> Prepared:
    """The round trip of a format that attention reads."""
    key = f"{codec.key}/page{page_size}"
    return Prepared(page_format(_Timed(codec, clock), page_size), key, codec.nbytes, clock)


@dataclass(frozen=True)
class _Timed:
    """A codec whose encoder and decoder are timed; everything else is the codec's own."""

    codec: KVCodec
    clock: Clock = field(default_factory=Clock)

    def at(self, layer: int) -> _Timed:
        return replace(self, codec=self.codec.at(layer))

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        with self.clock.encoding():
            self.codec.encode(planes, where, k, v)

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        with self.clock.decoding():
            self.codec.decode(planes, pages, k, v)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)
