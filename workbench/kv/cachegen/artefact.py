"""What encoder and decoder share per model: the probability tables, and the identity of what they came from.

No payload holds tables (in-stream ones would cost a short chunk more than they save), so their bytes are
reported beside every ratio, with the number of tokens after which they have paid for themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from workbench.kv.cachegen.levels import SIDES, Alphabet, Level, Side
from workbench.kv.cachegen.tables import pooled
from workbench.spec.errors import OptionError


@dataclass(frozen=True)
class Artefact:
    """``tables[alphabet]`` uint16 [2, layers, channels, symbols], for any level made of its alphabets.

    ``model`` and ``layout`` name the weights and the :attr:`Layout.key` it belongs to; ``origin`` says on
    what it was measured, ``tokens`` on how many positions.
    """

    tables: Mapping[Alphabet, np.ndarray]
    model: str
    layout: str
    origin: str
    tokens: int

    def table(self, alphabet: Alphabet, side: Side, layer: int) -> np.ndarray:
        """uint16 [channels, symbols]; raises :class:`OptionError` for an alphabet that was not calibrated."""
        found = self.tables.get(alphabet)
        if found is None:
            known = ", ".join(a.name for a in self.tables)
            raise OptionError(
                f"cachegen was not calibrated for {alphabet.name}; its tables are {known}.",
                hint="Calibrate with all levels that will be used.",
            )
        table: np.ndarray = found[SIDES.index(side), layer]
        return table

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return int(next(iter(self.tables.values())).shape[1])

    @property
    def channels(self) -> int:
        """Channels of a layer."""
        return int(next(iter(self.tables.values())).shape[2])

    def nbytes(self, level: Level) -> int:
        """Bytes of the tables that one level needs."""
        return sum(2 * self.channels * a.symbols for a, _, _ in level.tables(self.layers))

    def key(self, level: Level) -> str:
        """A digest of every table the level uses, and of the model (law 4)."""
        digest = hashlib.blake2b(f"{self.model}/{self.layout}".encode(), digest_size=16)
        for alphabet in sorted({a for a, _, _ in level.tables(self.layers)}):
            self.table(alphabet, "k", 0)
            digest.update(self._digests[alphabet])
        return digest.hexdigest()

    def break_even(self, level: Level, bytes_per_token: float) -> float:
        """Tokens after which the bytes saved against 16-bit KV exceed the tables' own."""
        plain = 4 * self.layers * self.channels
        return self.nbytes(level) / (plain - bytes_per_token) if bytes_per_token < plain else float("inf")

    def pooled(self) -> Artefact:
        """With one table per side for all layers and channels: the comparison, not the method."""
        tables = {a: pooled(t) for a, t in self.tables.items()}
        return replace(self, tables=tables, origin=f"{self.origin}, pooled")

    @cached_property
    def _digests(self) -> dict[Alphabet, bytes]:
        return {
            a: hashlib.blake2b(a.name.encode() + np.ascontiguousarray(t).tobytes(), digest_size=16).digest()
            for a, t in self.tables.items()
        }
