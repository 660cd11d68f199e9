"""What a chunk says of itself, and whether it may be decoded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from workbench.kv.cachegen.artefact import Artefact
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import Level
from workbench.spec.errors import OptionError, PayloadError

KIND, VERSION = "cachegen", 1
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_AGAIN = "Get it again."


@dataclass(frozen=True)
class Header:
    """``tokens`` rows from position ``first`` of a context of ``context`` tokens, coded at ``level``.

    ``dtype`` is the cache's. ``model``, ``layout`` and ``tables`` name what it was coded with.
    """

    model: str
    layout: str
    tables: str
    first: int
    tokens: int
    context: int
    dtype: str
    level: Level

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        level = self.level
        bins = {"name": level.name, "k": list(level.k), "v": list(level.v), "delta": level.delta}
        return {**{n: getattr(self, n) for n in (*_TEXT, *_NUMBERS)}, "level": bins}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Header:
        """From plain data; raises :class:`PayloadError` for fields that are missing, odd or contradictory."""
        for name in (*_TEXT, *_NUMBERS):
            if type(data.get(name)) is not (str if name in _TEXT else int):
                raise PayloadError(f"The cachegen header has no usable {name!r}.", hint=_AGAIN)
        fields = {n: data[n] for n in (*_TEXT, *_NUMBERS)}
        header = cls(**fields, level=_level(data.get("level")))
        end = header.first + header.tokens
        if min(header.first, header.tokens - 1) < 0 or header.context < end or header.dtype not in DTYPES:
            raise PayloadError("The cachegen header contradicts itself.", hint=_AGAIN)
        return header

    def require(self, artefact: Artefact, layout: Layout) -> None:
        """Raises :class:`PayloadError` naming what differs from the model and calibration at hand."""
        try:
            key = artefact.key(self.level)
        except OptionError as err:
            raise PayloadError(str(err.message), hint=err.hint) from None
        for what, own, here in (
            ("weights", self.model, artefact.model),
            ("layers or rotary embedding", self.layout, layout.key),
            ("probability tables", self.tables, key),
        ):
            if own != here:
                raise PayloadError(
                    f"The chunk was coded with other {what}: {own[:12]}, not {here[:12]}.",
                    hint="Decode it with the model and tables that wrote it.",
                )
        if self.context > layout.limit:
            raise PayloadError(
                f"The chunk belongs to {self.context:,} tokens; the model's context is {layout.limit:,}.",
                hint="Load the model with the context limit it was coded with.",
            )


_TEXT = ("model", "layout", "tables", "dtype")
_NUMBERS = ("first", "tokens", "context")


def _level(data: Any) -> Level:
    try:
        name, k, v, delta = (data[n] for n in ("name", "k", "v", "delta"))
        if type(name) is str and type(delta) is bool and all(type(b) is int for b in (*k, *v)):
            return Level(name, tuple(k), tuple(v), delta)
    except (KeyError, TypeError, IndexError, OptionError):
        pass
    raise PayloadError("The cachegen header names no usable level.", hint=_AGAIN)
