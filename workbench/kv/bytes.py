"""Analytic bytes of a KV format, derived from its planes.

One rule for all formats: the sum over planes of elements times element size. The page pool
allocates exactly these planes, so the analytic figure and the storages really held must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod

from workbench.engine.seams import KVCodec, PageGeometry, PlaneSpec


def page_bytes(planes: Sequence[PlaneSpec], category: str = "") -> int:
    """Bytes of one page of one layer; with ``category`` only planes counted under it."""
    return sum(prod(p.shape) * p.dtype.itemsize for p in planes if category in ("", p.category))


def bytes_per_token(codec: KVCodec, geometry: PageGeometry, category: str = "") -> Fraction:
    """Bytes one encoded token occupies over all layers of the group, as an exact fraction.

    A fraction because formats with per-channel scales share them between the tokens of a page. Open
    pages of page-grain formats, which the engine keeps at full precision, are not part of it.
    Raises :class:`workbench.spec.errors.OptionError` when the codec cannot hold the geometry.
    """
    return Fraction(geometry.layers * page_bytes(codec.planes(geometry), category), geometry.page_size)


def compression_ratio(codec: KVCodec, geometry: PageGeometry) -> float:
    """16-bit KV over this format, of encoded tokens only (the *codec ratio*)."""
    plain = geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * 2
    return float(plain / bytes_per_token(codec, geometry))
