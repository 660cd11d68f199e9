"""Codes through an adaptive range coder with a model per component, instead of DEFLATE.

Every component keeps counts of its own symbols and leans on those of its group until it has seen enough.
Both sides update them after the same tokens, so no table is stored. Shifts and scales: the first byte
(sign, exponent, two bits) is modelled per group, the second is close to noise and stored as it is. E4M3 codes
split into sign with exponent, and mantissa. The coder is constriction's (arXiv 2201.01741).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from workbench.kv.kvtc.codes import Coder, Codes
from workbench.spec.errors import MissingExtra, PayloadError

_LEAN = 8.0  # symbols of its own after which a component trusts itself as much as its group
_STEP = 16  # tokens between two updates, once begun


class _Model:
    """Adaptive laws of ``len(group)`` columns over ``symbols`` symbols; ``group`` int64, non-decreasing."""

    def __init__(self, group: np.ndarray, symbols: int) -> None:
        self.symbols = symbols
        self._starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
        self._group = np.cumsum(np.r_[False, group[1:] != group[:-1]])
        self._own = np.zeros((len(group), symbols), dtype=np.int64)

    def law(self) -> np.ndarray:
        """float32 [columns, symbols], rows summing to about 1; from integers, so the same everywhere."""
        pooled = np.add.reduceat(self._own, self._starts, axis=0) + 1.0 / self.symbols
        pooled /= pooled.sum(1, keepdims=True)
        mixed = self._own + _LEAN * pooled[self._group]
        law: np.ndarray = (mixed / mixed.sum(1, keepdims=True)).astype(np.float32)
        return law

    def update(self, seen: np.ndarray) -> None:
        """Count symbols [tokens, columns]."""
        columns = np.arange(seen.shape[1])
        for row in seen:
            self._own[columns, row] += 1


def encode(codes: Codes, coder: Coder) -> bytes:
    """The range-coded bytes; raises :class:`MissingExtra` without constriction."""
    stream = _constriction()
    out, family = stream.queue.RangeEncoder(), stream.model.Categorical(perfect=False)
    fields = _split(codes)
    models = _models(coder)
    for begin, end in _steps(codes.tokens):
        for name, model in models.items():
            seen = fields[name][begin:end]
            if model is None:
                out.encode(seen.astype(np.int32).ravel(), stream.model.Uniform(256))
                continue
            out.encode(seen.astype(np.int32).ravel(), family, np.tile(model.law(), (end - begin, 1)))
            model.update(seen)
    data: bytes = out.get_compressed().astype("<u4").tobytes()
    return data


def decode(data: bytes | memoryview, coder: Coder, tokens: int) -> Codes:
    """What :func:`encode` coded; raises :class:`PayloadError` for bytes it cannot have written."""
    stream = _constriction()
    if len(data) % 4:
        raise PayloadError("A range-coded stream is whole 32-bit words.", hint="Get it again.")
    source = stream.queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))
    family = stream.model.Categorical(perfect=False)
    models = _models(coder)
    fields = {n: np.zeros((tokens, _columns(n, coder)), np.uint8) for n in models}
    try:
        for begin, end in _steps(tokens):
            for name, model in models.items():
                shape = fields[name][begin:end].shape
                if model is None:
                    found = source.decode(stream.model.Uniform(256), int(np.prod(shape)))
                else:
                    found = source.decode(family, np.tile(model.law(), (end - begin, 1)))
                fields[name][begin:end] = found.reshape(shape)
                if model is not None:
                    model.update(fields[name][begin:end])
    except (ValueError, AssertionError) as err:
        raise PayloadError(f"The range-coded stream is damaged: {err}.", hint="Get it again.") from None
    return _merge(fields, coder, tokens)


def ideal_bits(codes: Codes, coder: Coder) -> float:
    """Bits that the models assign to the codes: what a perfect coder would need."""
    bits, fields, models = 0.0, _split(codes), _models(coder)
    for begin, end in _steps(codes.tokens):
        for name, model in models.items():
            seen = fields[name][begin:end]
            if model is None:
                bits += 8.0 * seen.size
                continue
            law = model.law().astype(np.float64)
            law /= law.sum(1, keepdims=True)
            bits -= float(np.log2(law[np.arange(seen.shape[1]), seen]).sum())
            model.update(seen)
    return bits


def _steps(tokens: int) -> Iterator[tuple[int, int]]:
    """Between two updates: often while there is little to go by."""
    begin = 0
    while begin < tokens:
        end = min(tokens, begin + min(max(begin, 1), _STEP))
        yield begin, end
        begin = end


def _models(coder: Coder) -> dict[str, _Model | None]:
    """The fields in the order they are coded in; None: stored as bytes."""
    groups = coder.plan.groups
    out: dict[str, _Model | None] = {}
    if groups:
        every = np.arange(len(groups))
        out |= {"shift.high": _Model(every, 256), "shift.low": None}
        out |= {"scale.high": _Model(every, 256), "scale.low": None}
    for kind, width in coder.widths.items():
        if not width:
            continue
        owner = np.concatenate([np.full(g.size, i) for i, g in enumerate(groups) if g.kind == kind])
        if kind == "fp8":
            out |= {"fp8.high": _Model(owner, 32), "fp8.low": _Model(owner, 8)}
        else:
            out[kind] = _Model(owner, 4 if kind == "int2" else 16)
    return out


def _columns(name: str, coder: Coder) -> int:
    kind = name.split(".")[0]
    return len(coder.plan.groups) if kind in ("shift", "scale") else coder.widths[kind]  # type: ignore[index]


def _split(codes: Codes) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name in ("shift", "scale"):
        raw = getattr(codes, name).contiguous().view(torch.uint8).numpy().reshape(codes.tokens, -1, 2)
        out |= {f"{name}.low": raw[..., 0], f"{name}.high": raw[..., 1]}
    fp8 = codes.symbols["fp8"].numpy()
    out |= {"fp8.high": fp8 >> 3, "fp8.low": fp8 & 7}
    return out | {kind: codes.symbols[kind].numpy() for kind in ("int2", "int4")}


def _merge(fields: dict[str, np.ndarray], coder: Coder, tokens: int) -> Codes:
    none = np.zeros((tokens, 0), np.uint8)
    halves = []
    for name in ("shift", "scale"):
        pair = np.stack([fields.get(f"{name}.low", none), fields.get(f"{name}.high", none)], -1)
        halves.append(torch.from_numpy(pair.view(np.float16).reshape(tokens, -1)))
    fp8 = fields.get("fp8.high", none) << 3 | fields.get("fp8.low", none)
    symbols = {"int2": fields.get("int2", none), "int4": fields.get("int4", none), "fp8": fp8}
    return Codes(halves[0], halves[1], {k: torch.from_numpy(x) for k, x in symbols.items()})  # type: ignore[misc]


def _constriction() -> Any:
    try:
        from constriction import stream
    except ImportError:
        raise MissingExtra("constriction", "codec", "kvtc with entropy = range") from None
    return stream
