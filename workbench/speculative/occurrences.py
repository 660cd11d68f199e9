"""A suffix tree kept as places: a node is the set of positions at which its string ends.

Suffix decoding (Oliaro et al., arXiv 2411.04975) asks a suffix tree with counts two things: where the current
suffix occurs, and what followed there how often. Both are answered from one list of positions per token:
filtering those of the last token by the tokens before them walks the tree down, grouping the survivors by
the token behind them lists a node's children with their counts. The counts are those of the explicit tree;
an append is one list append instead of one update per depth, and forgetting a text restores them exactly.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

_END = -1  # ends a text: equal to no token, followed by nothing
_FEW = 8  # places that are compared one by one

Node = tuple[int, list[int]]
"""Length of a matched suffix, and the positions right behind its occurrences, ascending."""


class Occurrences:
    """Texts (first in, first out) and where each token occurs in them; positions are never reused."""

    def __init__(self) -> None:
        self._ids = array("i")
        self._base = 0  # position of _ids[0]
        self._places: dict[int, array[int]] = {}
        self._ends: deque[int] = deque()  # behind each closed text
        self._place_bytes = 0

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens to the last text; O(1) each, amortised."""
        for token in ids:
            places = self._places.get(token)
            if places is None:
                places = self._places[token] = array("q")
                self._place_bytes += sys.getsizeof(places)
            before = sys.getsizeof(places)
            places.append(self._base + len(self._ids))
            self._place_bytes += sys.getsizeof(places) - before
            self._ids.append(token)

    def close(self) -> None:
        """End the last text: nothing is ever matched across its end."""
        self._ids.append(_END)
        self._ends.append(self._base + len(self._ids))

    def forget_oldest(self) -> None:
        """Drop the oldest closed text, its places included."""
        end = self._ends.popleft()
        for token in self._ids[: end - self._base - 1]:
            places = self._places[token]
            before = sys.getsizeof(places)
            del places[0]  # its own: positions ascend, and it is the oldest
            self._place_bytes += sys.getsizeof(places) - before
            if not places:
                self._place_bytes -= sys.getsizeof(places)
                del self._places[token]
        del self._ids[: end - self._base]
        self._base = end

    def nodes(self, suffix: Sequence[int], depth: int) -> list[Node]:
        """Nodes that spell the last 1 … ``depth`` tokens of ``suffix``, shortest first.

        Of suffixes with the same occurrences only the longest is listed: its node has the same children.
        """
        places = self._places.get(suffix[-1]) if suffix else None
        if not places:
            return []
        most, ids, first = min(depth, len(suffix)), np.frombuffer(self._ids, np.int32), self._base
        ends = np.frombuffer(places, np.int64) + 1
        out: list[Node] = []
        length = 1
        while len(ends) > _FEW and length < most:
            at = ends - (first + length + 1)
            kept = ends[(ids[at] == suffix[-1 - length]) & (at >= 0)]
            if len(kept) < len(ends):
                out.append((length, ends.tolist()))
                ends = kept
            length += 1
        few = ends.tolist()
        lengths = [self._match(end, suffix, length, most) for end in few]
        for longest in sorted(set(lengths)):
            out.append((longest, [e for e, n in zip(few, lengths, strict=True) if n >= longest]))
        return out

    def followers(self, ends: Sequence[int]) -> dict[int, list[int]]:
        """Children of a node: token → positions behind it, in order of their last occurrence."""
        out: dict[int, list[int]] = {}
        ids, first = self._ids, self._base
        for end in ends:
            at = end - first
            token = ids[at] if at < len(ids) else _END
            if token != _END:
                out.setdefault(token, []).append(end + 1)
        return out

    def copy(self, end: int, n: int) -> list[int]:
        """Up to ``n`` tokens from a position on, to the end of their text."""
        at = end - self._base
        ids = self._ids[at : at + n].tolist()
        return ids[: ids.index(_END)] if _END in ids else ids

    def texts(self) -> Iterator[list[int]]:
        """The texts held, oldest first."""
        start = self._base
        for end in (*self._ends, self._base + len(self._ids) + 1):
            yield self._ids[start - self._base : end - self._base - 1].tolist()
            start = end

    def nbytes(self) -> int:
        """Bytes of ids, places and tables."""
        return sys.getsizeof(self._ids) + self._place_bytes + sys.getsizeof(self._places)

    def _match(self, end: int, suffix: Sequence[int], length: int, most: int) -> int:
        """How many tokens before ``end`` agree with the suffix; ``length`` of them are known to."""
        ids, last = self._ids, end - self._base
        while length < min(most, last) and ids[last - 1 - length] == suffix[-1 - length]:
            length += 1
        return length
