"""Queries in blocks that end at fixed positions, however the engine chunked them.

Sums of floats depend on their order and on the shapes they are computed in. So statistics are formed from
blocks of up to :data:`SIZE` queries that end at multiples of it (and at selections): chunks of 1, 7 or all
tokens then give the same bits. A block is small, so queries times keys never becomes tokens by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 32


@dataclass(frozen=True)
class Block:
    """Queries [b, Hq, D] at int64 positions [b]; ``after`` tokens were committed behind them by now."""

    queries: Tensor
    positions: Tensor
    after: int


class QueryBlocks:
    """Queries of one layer that wait for their block to end. Tensors are never changed in place."""

    def __init__(self, queries: tuple[Tensor, ...] = (), positions: tuple[Tensor, ...] = ()) -> None:
        self._queries, self._positions = queries, positions

    def copy(self) -> QueryBlocks:
        """An independent one with the same queries waiting."""
        return QueryBlocks(self._queries, self._positions)

    @property
    def nbytes(self) -> int:
        """Bytes of the queries that wait."""
        return sum(t.untyped_storage().nbytes() for t in (*self._queries, *self._positions))

    def add(self, queries: Tensor, positions: Tensor) -> Iterator[Block]:
        """The blocks that these queries [n, Hq, D] at int64 ``positions`` [n] complete, in order."""
        n, first = len(positions), int(positions[0]) if len(positions) else 0
        done = 0
        while done < n:
            end = min(n, ((first + done) // SIZE + 1) * SIZE - first)
            # Copies: a slice would keep the whole step's queries alive.
            self._queries += (queries[done:end].clone(),)
            self._positions += (positions[done:end].clone(),)
            done = end
            if (first + done) % SIZE == 0:
                yield self._take(n - done)

    def rest(self) -> Iterator[Block]:
        """The queries that still wait, as a block, if any."""
        if self._queries:
            yield self._take(0)

    def _take(self, after: int) -> Block:
        block = Block(torch.cat(self._queries), torch.cat(self._positions), after)
        self._queries = self._positions = ()
        return block
