"""Encodes a sequence while it grows, 16 tokens at a time as they leave the window.

Only committed rows may be pushed; what a rollback of drafts can still take back must lie in the window. The
payload can be asked for at any moment. How rows were cut into pushes never shows in it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from workbench.kv.cached import CachedRows
from workbench.kv.container import write_payload
from workbench.kv.kvtc import exempt
from workbench.kv.kvtc.artefact import Artefact, Side
from workbench.kv.kvtc.codes import Coder, Codes, join
from workbench.kv.kvtc.entropy import Entropy, to_streams
from workbench.kv.kvtc.header import CHUNK, DTYPES, KIND, VERSION, Header
from workbench.kv.kvtc.joint import JointRows
from workbench.spec.errors import UnsupportedInput, WrongShape


class Encoder:
    """One sequence's encoder; made by :meth:`workbench.kv.kvtc.codec.Kvtc.encoder`.

    Holds the rows in 16 bits that are not coded yet as they came, and codes of the others.
    """

    def __init__(
        self,
        artefact: Artefact,
        joint: JointRows,
        coders: tuple[Coder, Coder],
        *,
        sinks: int,
        window: int,
        entropy: Entropy,
    ) -> None:
        self._artefact, self._joint, self._coders = artefact, joint, coders
        self._sinks, self._window, self._entropy = sinks, window, entropy
        self._lead: CachedRows | None = None
        self._tail: CachedRows | None = None
        self._sliding: CachedRows | None = None
        self._codes: tuple[list[Codes], list[Codes]] = [], []
        self._first = self._tokens = 0

    def push(self, rows: CachedRows) -> None:
        """Take the next committed rows, of every layer of the model.

        Raises :class:`WrongShape` for rows of another model, :class:`UnsupportedInput` for positions that do
        not follow, and for infinities and NaN; the encoder is then unchanged.
        """
        if not rows.tokens:
            return
        self._check(rows)
        k, v = (tuple(x.cpu() for x in side) for side in (rows.k, rows.v))
        rows = CachedRows(k, v, rows.positions.cpu())
        if self._tail is None:
            self._first = int(rows.positions[0])
        self._tokens += rows.tokens
        keep = self._joint.window or 0
        self._sliding = _last(_append(self._sliding, rows), keep)
        tail = _append(self._tail, rows)
        lead = min(max(self._sinks - int(tail.positions[0]), 0), tail.tokens)
        self._lead = _append(self._lead, _cut(tail, 0, lead))
        tail = _cut(tail, lead, tail.tokens)
        ready = max(tail.tokens - self._window, 0) // CHUNK * CHUNK
        if ready:
            self._encode(_cut(tail, 0, ready))
        self._tail = _cut(tail, ready, tail.tokens)

    def payload(self) -> bytes:
        """The bytes of everything pushed so far; raises :class:`UnsupportedInput` before the first row."""
        if self._lead is None or self._tail is None or self._sliding is None:
            raise UnsupportedInput("kvtc was given no rows.", hint="Push rows before asking for the payload.")
        joint, artefact = self._joint, self._artefact
        coded = sum(c.tokens for c in self._codes[0])
        others = [i for i in range(joint.num_layers) if i not in joint.layers]
        dtype = self._tail.k[0].dtype
        header = Header(
            model=artefact.model,
            phases=joint.key,
            artefact=artefact.key,
            first=self._first,
            tokens=self._tokens,
            lead=self._lead.tokens,
            coded=coded,
            sliding=self._sliding.tokens,
            sinks=self._sinks,
            window=self._window,
            dtype=next(name for name, d in DTYPES.items() if d == dtype),
            entropy=self._entropy,
        )
        streams = {
            "lead": exempt.to_bytes(self._lead, joint.layers),
            "tail": exempt.to_bytes(self._tail, joint.layers),
            "sliding": exempt.to_bytes(self._sliding, others),
        }
        if coded:
            keys, values = (join(parts) for parts in self._codes)
            streams |= to_streams(keys, self._coders[0], self._entropy, "k", None)
            expected = None
            if self._entropy == "range":
                expected = artefact.cross.expect(self._coders[0].exact(keys))
            streams |= to_streams(values, self._coders[1], self._entropy, "v", expected)
        return write_payload(KIND, VERSION, header.to_json(), streams)

    def _check(self, rows: CachedRows) -> None:
        for side in (rows.k, rows.v):
            self._joint.check(side)
        if len(rows.k[0]) != rows.tokens or len(rows.v[0]) != rows.tokens:
            raise WrongShape(f"{len(rows.k[0])} rows were given at {rows.tokens} positions.")
        start = self._first + self._tokens if self._tail is not None else int(rows.positions[0])
        expected = torch.arange(start, start + rows.tokens)
        if not torch.equal(rows.positions.cpu(), expected) or start + rows.tokens > self._joint.limit:
            raise UnsupportedInput(
                f"kvtc codes consecutive positions; {start} should come next, within {self._joint.limit}.",
                hint="Encode each run of positions by itself.",
            )
        if rows.k[0].dtype not in DTYPES.values():
            raise UnsupportedInput(f"kvtc does not take rows of {rows.k[0].dtype}.", hint="Give floats.")
        if not all(bool(torch.isfinite(x).all()) for x in (*rows.k, *rows.v)):
            raise UnsupportedInput("The rows hold infinities or NaN.", hint="Nothing can store them.")

    def _encode(self, rows: CachedRows) -> None:
        """Whole chunks; each product is [16, p] x [p, r], whatever else is there."""
        joint = self._joint
        both = joint.keys(rows.k, rows.positions), joint.values(rows.v)
        sides, dtype = (self._artefact.k, self._artefact.v), rows.k[0].dtype
        for side, flat, coder, out in zip(sides, both, self._coders, self._codes, strict=True):
            out.append(coder.encode(_project(side, flat, dtype)))


def _project(side: Side, flat: Tensor, cache: torch.dtype) -> Tensor:
    """Coefficients float32 of joint rows; of a bfloat16 cache in bfloat16, whose rounding they share."""
    centred = flat - side.basis.mean
    if cache == torch.bfloat16:
        rows = torch.split(centred.to(torch.bfloat16), CHUNK)
        return torch.cat([x @ side.by_feature for x in rows]).float()
    return torch.cat([torch.nn.functional.linear(x, side.by_component) for x in torch.split(centred, CHUNK)])


def _append(a: CachedRows | None, b: CachedRows) -> CachedRows:
    if a is None:
        return b
    return CachedRows(
        _cat(a.k, b.k),
        _cat(a.v, b.v),
        torch.cat([a.positions, b.positions]),
    )


def _cat(a: Iterable[Tensor], b: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(pair) for pair in zip(a, b, strict=True))


def _cut(rows: CachedRows, begin: int, end: int) -> CachedRows:
    part = slice(begin, end)
    return CachedRows(tuple(x[part] for x in rows.k), tuple(x[part] for x in rows.v), rows.positions[part])


def _last(rows: CachedRows, n: int) -> CachedRows:
    return _cut(rows, max(rows.tokens - n, 0), rows.tokens)
