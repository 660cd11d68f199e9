"""Counts symbols of calibration rows for every alphabet that levels need, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.kv.cachegen.artefact import Artefact
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import SIDES, Alphabet
from workbench.kv.cachegen.quantize import encode_rows
from workbench.kv.cachegen.tables import SymbolCounts


class TableRecorder:
    """Collects tables of several alphabets, a layer of a sequence at a time."""

    def __init__(self, layout: Layout, alphabets: Sequence[Alphabet]) -> None:
        self._layout = layout
        self._counts = {a: SymbolCounts(a, layout.layers, layout.channels) for a in alphabets}
        self._rows = 0

    def add(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keys and values [T, Hkv, D] of one layer of one sequence.

        Any row may become an anchor, so the anchors' table counts all of them; differences are counted
        without the anchors between them.
        """
        self._rows += len(k) if layer == 0 else 0
        for side, x in zip(SIDES, (k, v), strict=True):
            flat = x.float().cpu().flatten(1)
            for alphabet, counts in self._counts.items():
                parts = encode_rows(flat, alphabet).parts(alphabet)
                counts.add(side, layer, parts[-1][1])

    def artefact(self, model: str, origin: str) -> Artefact:
        """The tables of what was added; ``model`` names the weights, ``origin`` the text."""
        tables = {a: c.frequencies() for a, c in self._counts.items()}
        return Artefact(tables, model, self._layout.key, origin, self._rows)
