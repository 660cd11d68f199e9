"""Rows to symbols and back: one scale per token and layer, and anchors with differences to them.

As in the authors' code a token's scale is the largest magnitude over all channels of a layer, kept in 16
bits. Differences are to the anchor *as decoded*, so that its error does not add to theirs, and to the anchor
of the group, not to the previous token, so that groups decode in parallel (section 5.1 of the paper).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kv.cachegen.levels import ANCHORS, GROUP, Alphabet
from workbench.spec.errors import UnsupportedInput


@dataclass(frozen=True)
class Symbols:
    """``codes`` uint8 [T, C] and ``scale`` float16 [T] of one side of one layer."""

    codes: Tensor
    scale: Tensor

    def parts(self, alphabet: Alphabet) -> list[tuple[Alphabet, Tensor]]:
        """What is coded with which alphabet: all rows, or anchors and then the rows between them."""
        if alphabet.of == "rows":
            return [(alphabet, self.codes)]
        anchor = is_anchor(len(self.codes))
        return [(ANCHORS, self.codes[anchor]), (alphabet, self.codes[~anchor])]


def is_anchor(tokens: int) -> Tensor:
    """bool [T]: the first row of every group of ten; the last group may be short."""
    return torch.arange(tokens) % GROUP == 0


def sizes(alphabet: Alphabet, tokens: int) -> list[tuple[Alphabet, int]]:
    """Alphabet and number of rows of every part of ``tokens`` rows."""
    if alphabet.of == "rows":
        return [(alphabet, tokens)]
    anchors = -(-tokens // GROUP)
    return [(ANCHORS, anchors), (alphabet, tokens - anchors)]


def encode_rows(x: Tensor, alphabet: Alphabet, *, decoded: bool = True) -> Symbols:
    """Quantize float32 [T, C]; ``alphabet`` of deltas codes every tenth row as an anchor.

    ``decoded``: differences are to the anchor as it decodes; else to the row it was made of, whose rounding
    then adds to theirs (for comparison). Raises :class:`UnsupportedInput` for infinities, NaN and magnitudes
    beyond float16.
    """
    if alphabet.of == "rows":
        return _quantize(x, alphabet)
    anchor = is_anchor(len(x))
    anchors = _quantize(x[anchor], ANCHORS)
    near = _dequantize(anchors.codes, anchors.scale, ANCHORS) if decoded else x[anchor]
    deltas = _quantize((x - near.repeat_interleave(GROUP, 0)[: len(x)])[~anchor], alphabet)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    scale = torch.empty(len(x), dtype=torch.float16)
    codes[anchor], codes[~anchor] = anchors.codes, deltas.codes
    scale[anchor], scale[~anchor] = anchors.scale, deltas.scale
    return Symbols(codes, scale)


def decode_rows(symbols: Symbols, alphabet: Alphabet) -> Tensor:
    """float32 [T, C]: what :func:`encode_rows` kept."""
    codes, scale = symbols.codes, symbols.scale
    if alphabet.of == "rows":
        return _dequantize(codes, scale, alphabet)
    anchor = is_anchor(len(codes))
    anchors = _dequantize(codes[anchor], scale[anchor], ANCHORS)
    out = anchors.repeat_interleave(GROUP, 0)[: len(codes)].clone()
    out[~anchor] += _dequantize(codes[~anchor], scale[~anchor], alphabet)
    return out


def from_parts(alphabet: Alphabet, parts: list[Tensor], scale: Tensor) -> Symbols:
    """The inverse of :meth:`Symbols.parts`."""
    if alphabet.of == "rows":
        return Symbols(parts[0], scale)
    anchor = is_anchor(len(scale))
    codes = torch.empty(len(scale), parts[0].shape[1], dtype=torch.uint8)
    codes[anchor], codes[~anchor] = parts
    return Symbols(codes, scale)


def _quantize(x: Tensor, alphabet: Alphabet) -> Symbols:
    scale = x.abs().amax(1).to(torch.float16)
    if not bool(torch.isfinite(scale).all()):
        raise UnsupportedInput(
            "cachegen keeps the largest magnitude of a row in float16; "
            "rows with infinities, NaN or values beyond 65,504 have none.",
            hint="Nothing can be done for NaN; very large keys need another codec.",
        )
    step = scale.float() / alphabet.half
    inverse = torch.where(step > 0, 1 / step, torch.zeros(()))
    codes = (x * inverse[:, None]).round().clamp(-alphabet.half, alphabet.half) + alphabet.half
    return Symbols(codes.to(torch.uint8), scale)


def _dequantize(codes: Tensor, scale: Tensor, alphabet: Alphabet) -> Tensor:
    step = scale.float() / alphabet.half
    return (codes.float() - alphabet.half) * step[:, None]
