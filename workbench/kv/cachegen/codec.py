"""The transfer codec: a chunk of cached rows to self-contained bytes at one level, and back.

arXiv 2310.07240, section 5. Chunks are coded independently; decoding needs a chunk's bytes and the shared
tables, nothing else. Only final rows may be given: there is nothing to roll back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kv.cached import CachedRows
from workbench.kv.cachegen import ranges
from workbench.kv.cachegen.artefact import Artefact
from workbench.kv.cachegen.header import DTYPES, KIND, VERSION, Header
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import SIDES, Alphabet, Level
from workbench.kv.cachegen.quantize import Symbols, decode_rows, encode_rows
from workbench.kv.cachegen.stored import StoredChunk, place
from workbench.kv.container import read_payload, write_payload
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.spec.errors import PayloadError, UnsupportedInput


class CacheGen:
    """One model's codec at any level its ``artefact`` has tables for.

    Raises :class:`PayloadError` when ``artefact`` was made for other weights than ``model``
    (:attr:`WeightSet.fingerprint`) or another layout.
    """

    def __init__(self, artefact: Artefact, layout: Layout, model: str) -> None:
        for what, own, given in (
            ("weights", artefact.model, model),
            ("layers or rotary embedding", artefact.layout, layout.key),
        ):
            if own != given:
                raise PayloadError(
                    f"These cachegen tables are of other {what}: {own[:12]}, not {given[:12]}.",
                    hint="Calibrate on the model that is loaded.",
                )
        self.artefact, self.layout = artefact, layout

    def key(self, level: Level) -> str:
        """Format, version, level and tables: part of the key of whatever it restores (law 4)."""
        return f"{KIND}/{VERSION}/{level.k}/{level.v}/{level.delta}/{self.artefact.key(level)}"

    def encode(
        self,
        rows: CachedRows,
        level: Level,
        *,
        context: int | None = None,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> bytes:
        """The bytes of one chunk of rows at consecutive positions, part of a context of ``context`` tokens.

        Without ``context`` it ends with the chunk; rows that a sliding window no longer reaches then are left
        out. Raises :class:`WrongShape`, :class:`UnsupportedInput` for positions with gaps and for elements
        that are not finite, :class:`OptionError` for a level without tables, and ``Cancelled`` between two
        layers.
        """
        self._check(rows)
        first = int(rows.positions[0])
        header = Header(
            model=self.artefact.model,
            layout=self.layout.key,
            tables=self.artefact.key(level),
            first=first,
            tokens=rows.tokens,
            context=max(context or 0, first + rows.tokens),
            dtype=next(name for name, d in DTYPES.items() if d == rows.k[0].dtype),
            level=level,
        )
        streams = {}
        layers = self.layout.layers
        for layer in range(layers):
            check_cancel(cancel, "Coding a chunk of KV")
            kept = self.layout.kept(layer, first, first + rows.tokens, header.context)
            for side in SIDES:
                alphabet = level.alphabet(side, layer, layers)
                symbols = _symbols(getattr(rows, side)[layer], kept, alphabet)
                parts = [(codes, self.artefact.table(a, side, layer)) for a, codes in symbols.parts(alphabet)]
                scale = symbols.scale.view(torch.uint8).numpy().tobytes()
                streams[f"{side}.{layer}"] = scale + (ranges.encode(parts) if kept else b"")
            report(progress, (layer + 1) / layers, f"coding layer {layer + 1} of {layers}")
        return write_payload(KIND, VERSION, header.to_json(), streams)

    def open(self, data: bytes | memoryview) -> StoredChunk:
        """Check a payload; its layers are then decoded one by one.

        Raises :class:`PayloadError` when it is damaged, or belongs to another model or calibration.
        """
        payload = read_payload(data, KIND, VERSION)
        header = Header.read(payload.header)
        header.require(self.artefact, self.layout)
        return StoredChunk(payload, header, self.artefact, self.layout)

    def decode(self, data: bytes) -> CachedRows:
        """All layers of :meth:`open`, in the dtype that was encoded."""
        return self.open(data).rows()

    def reconstruct(self, rows: CachedRows, level: Level, *, context: int | None = None) -> CachedRows:
        """What decoding an encoded chunk gives, bit for bit, without coding it."""
        self._check(rows)
        first, layers = int(rows.positions[0]), self.layout.layers
        end = first + rows.tokens
        out: dict[str, list[Tensor]] = {"k": [], "v": []}
        for layer in range(layers):
            kept = self.layout.kept(layer, first, end, max(context or 0, end))
            for side in SIDES:
                alphabet = level.alphabet(side, layer, layers)
                x = getattr(rows, side)[layer]
                found = decode_rows(_symbols(x, kept, alphabet), alphabet)
                out[side].append(place(found, rows.tokens, self.layout, x.dtype))
        return CachedRows(tuple(out["k"]), tuple(out["v"]), rows.positions)

    def _check(self, rows: CachedRows) -> None:
        if not rows.tokens:
            raise UnsupportedInput("cachegen was given no rows.", hint="A chunk has at least one token.")
        self.layout.check(rows.k, rows.tokens)
        self.layout.check(rows.v, rows.tokens)
        start = int(rows.positions[0])
        expected = torch.arange(start, start + rows.tokens)
        if start < 0 or not torch.equal(rows.positions.cpu(), expected):
            raise UnsupportedInput(
                f"cachegen codes consecutive positions; these begin with {start}.",
                hint="Encode each run of positions by itself.",
            )
        if start + rows.tokens > self.layout.limit:
            raise UnsupportedInput(
                f"Rows up to position {start + rows.tokens:,} lie beyond the model's {self.layout.limit:,}.",
                hint="Load the model with a larger context.",
            )
        if rows.k[0].dtype not in DTYPES.values():
            raise UnsupportedInput(f"cachegen does not take rows of {rows.k[0].dtype}.", hint="Give floats.")


def _symbols(x: Tensor, kept: int, alphabet: Alphabet) -> Symbols:
    return encode_rows(x[len(x) - kept :].float().cpu().flatten(1), alphabet)
