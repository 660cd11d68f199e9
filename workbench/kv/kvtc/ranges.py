"""Codes through an adaptive range coder with a model per component, instead of DEFLATE.

Both sides update their models after the same symbols, so no table is stored. Integer codes are expected from
the component's past and the group's shift and step (:mod:`contexts`). Of shifts and scales the first byte
(sign, exponent, two bits) is modelled per group; the second is close to noise and stored as it is. E4M3 codes
split into sign with exponent, and mantissa. The coder is constriction's (arXiv 2201.01741).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.kv.kvtc.codes import Coder, Codes
from workbench.kv.kvtc.contexts import GridModel
from workbench.kv.kvtc.formats import BITS, KINDS, Kind
from workbench.spec.errors import MissingExtra, PayloadError

Bytes = NDArray[np.uint8]
Fields = dict[str, Bytes]

_LEAN = 8.0  # symbols of its own after which a component trusts itself as much as its group
_STEP = 16  # tokens between two updates of what is counted, once begun


class _Channel(Protocol):
    """One direction of coding: takes symbols [columns] and their weights, gives the symbols back."""

    def __call__(self, law: NDArray[np.float32] | None, seen: Bytes) -> Bytes: ...


def encode(codes: Codes, coder: Coder, expected: Tensor | None = None) -> bytes:
    """The range-coded bytes; ``expected`` float64 [T, rank] is what both sides know of the coefficients.

    Raises :class:`MissingExtra` without constriction.
    """
    stream = _constriction()
    out, family = stream.queue.RangeEncoder(), stream.model.Categorical(perfect=False)

    def channel(law: NDArray[np.float32] | None, seen: Bytes) -> Bytes:
        if law is None:
            out.encode(seen.astype(np.int32), stream.model.Uniform(256))
        else:
            out.encode(seen.astype(np.int32), family, law)
        return seen

    _walk(_split(codes), coder, codes.tokens, channel, expected)
    data: bytes = out.get_compressed().astype("<u4").tobytes()
    return data


def decode(data: bytes | memoryview, coder: Coder, tokens: int, expected: Tensor | None = None) -> Codes:
    """What :func:`encode` coded; raises :class:`PayloadError` for bytes it cannot have written."""
    stream = _constriction()
    if len(data) % 4:
        raise PayloadError("A range-coded stream is whole 32-bit words.", hint="Get it again.")
    source = stream.queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))
    family = stream.model.Categorical(perfect=False)

    def channel(law: NDArray[np.float32] | None, seen: Bytes) -> Bytes:
        if law is None:
            found = source.decode(stream.model.Uniform(256), len(seen))
        else:
            found = source.decode(family, law)
        return np.asarray(found).astype(np.uint8)

    fields = {name: np.zeros((tokens, n), np.uint8) for name, n in _columns(coder).items()}
    try:
        _walk(fields, coder, tokens, channel, expected)
    except (ValueError, AssertionError) as err:
        raise PayloadError(f"The range-coded stream is damaged: {err}.", hint="Get it again.") from None
    return _merge(fields, tokens)


def ideal_bits(codes: Codes, coder: Coder, expected: Tensor | None = None) -> float:
    """Bits that the models assign to the codes: what a perfect coder would need."""
    bits = 0.0

    def channel(law: NDArray[np.float32] | None, seen: Bytes) -> Bytes:
        nonlocal bits
        if law is None:
            bits += 8.0 * len(seen)
        else:
            chosen = law[np.arange(len(seen)), seen].astype(np.float64)
            bits -= float(np.log2(chosen / law.sum(1, dtype=np.float64)).sum())
        return seen

    _walk(_split(codes), coder, codes.tokens, channel, expected)
    return bits


def _walk(fields: Fields, coder: Coder, tokens: int, channel: _Channel, expected: Tensor | None) -> None:
    """Send every symbol through ``channel`` in the one order there is, and keep what it gives back."""
    counted = _counted(coder)
    owners = {kind: _owner(coder, kind) for kind in KINDS if kind != "fp8" and coder.widths[kind]}
    grids = {kind: GridModel(owner, BITS[kind]) for kind, owner in owners.items()}
    known = {
        kind: np.zeros((tokens, len(owner)))
        if expected is None
        else expected[:, _components(coder, kind)].numpy()
        for kind, owner in owners.items()
    }
    for begin, end in _steps(tokens):
        for name, model in counted.items():
            block = fields[name][begin:end]
            law = None if model is None else np.tile(model.law(), (end - begin, 1))
            block[:] = channel(law, block.ravel()).reshape(block.shape)
            if model is not None:
                model.update(block)
        if grids:
            shift, scale = (_halves(fields, name, begin, end).astype(np.float64) for name in _HEADER)
            shift = np.nan_to_num(shift)  # a forged stream may say anything
            scale = np.fmax(np.nan_to_num(scale), 2.0**-24)
        for t in range(begin, end):
            for kind, grid in grids.items():
                at = t - begin, grid.owner
                fields[kind][t] = channel(grid.law(shift[at] - known[kind][t], scale[at]), fields[kind][t])
                grid.update(fields[kind][t])


class _CountModel:
    """Weights of ``len(owner)`` columns over ``symbols``; columns lean on their owner's law at first."""

    def __init__(self, owner: NDArray[np.int64], symbols: int) -> None:
        new = np.r_[True, owner[1:] != owner[:-1]]
        self._starts, self._group = np.flatnonzero(new), np.cumsum(new) - 1
        self._own = np.zeros((len(owner), symbols), dtype=np.int64)

    def law(self) -> NDArray[np.float32]:
        """float32 [columns, symbols], from integers by one operation each, so the same everywhere."""
        pooled = np.add.reduceat(self._own, self._starts, axis=0)
        symbols = pooled.shape[1]
        share = (symbols * pooled + 1) / (symbols * (pooled.sum(1, keepdims=True) + 1))
        mixed: NDArray[np.float32] = (self._own + _LEAN * share[self._group]).astype(np.float32)
        return mixed

    def update(self, seen: Bytes) -> None:
        """Count symbols [tokens, columns]."""
        columns = np.arange(seen.shape[1])
        for row in seen:
            self._own[columns, row] += 1


_HEADER = ("shift", "scale")


def _counted(coder: Coder) -> dict[str, _CountModel | None]:
    """The fields whose symbols are counted, in the order they are coded in; None: stored as bytes."""
    out: dict[str, _CountModel | None] = {}
    for name in _HEADER if coder.plan.groups else ():
        out |= {f"{name}.high": _CountModel(np.arange(len(coder.plan.groups)), 256), f"{name}.low": None}
    if coder.widths["fp8"]:
        owner = _owner(coder, "fp8")
        out |= {"fp8.high": _CountModel(owner, 32), "fp8.low": _CountModel(owner, 8)}
    return out


def _owner(coder: Coder, kind: Kind) -> NDArray[np.int64]:
    """The group of every component stored as ``kind``."""
    return np.concatenate([np.full(g.size, i) for i, g in enumerate(coder.plan.groups) if g.kind == kind])


def _components(coder: Coder, kind: Kind) -> Tensor:
    """The component behind each symbol of a format, int64."""
    return torch.cat([torch.arange(g.start, g.start + g.size) for g in coder.plan.groups if g.kind == kind])


def _steps(tokens: int) -> Iterator[tuple[int, int]]:
    """Between two updates: often while there is little to go by."""
    begin = 0
    while begin < tokens:
        end = min(tokens, begin + min(max(begin, 1), _STEP))
        yield begin, end
        begin = end


def _columns(coder: Coder) -> dict[str, int]:
    """Symbols per token of every field."""
    header = {f"{name}.{half}": len(coder.plan.groups) for name in _HEADER for half in ("low", "high")}
    width = coder.widths
    return header | {
        "fp8.high": width["fp8"],
        "fp8.low": width["fp8"],
        "int2": width["int2"],
        "int4": width["int4"],
    }


def _halves(fields: Fields, name: str, begin: int, end: int) -> NDArray[np.float16]:
    """Float16 [end - begin, groups] of two bytes each."""
    pair = np.stack([fields[f"{name}.low"][begin:end], fields[f"{name}.high"][begin:end]], -1)
    return pair.view(np.float16).reshape(end - begin, -1)


def _split(codes: Codes) -> Fields:
    out: Fields = {}
    for name in _HEADER:
        raw = np.ascontiguousarray(getattr(codes, name).numpy())[..., None].view(np.uint8)
        out |= {f"{name}.low": raw[..., 0].copy(), f"{name}.high": raw[..., 1].copy()}
    fp8: Bytes = codes.symbols["fp8"].numpy()
    out["fp8.high"], out["fp8.low"] = np.right_shift(fp8, 3), np.bitwise_and(fp8, 7)
    return out | {kind: codes.symbols[kind].numpy().copy() for kind in KINDS if kind != "fp8"}


def _merge(fields: Fields, tokens: int) -> Codes:
    shift, scale = (torch.from_numpy(_halves(fields, name, 0, tokens)) for name in _HEADER)
    symbols: dict[Kind, Any] = {
        "int2": fields["int2"],
        "int4": fields["int4"],
        "fp8": fields["fp8.high"] << 3 | fields["fp8.low"],
    }
    return Codes(shift, scale, {kind: torch.from_numpy(x) for kind, x in symbols.items()})


def _constriction() -> Any:
    try:
        from constriction import stream
    except ImportError:
        raise MissingExtra("constriction", "codec", "kvtc with entropy = range") from None
    return stream
