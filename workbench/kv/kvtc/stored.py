"""An opened payload: coefficients in memory, layers rebuilt one at a time.

Generation can begin on the early layers while later ones are still coded; the workspace is one layer. The
product with the basis is the work: for a bfloat16 cache it is done in bfloat16, nine times as fast on a CPU
that has instructions for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from workbench.kv.cached import CachedRows
from workbench.kv.container import Payload
from workbench.kv.kvtc import exempt
from workbench.kv.kvtc.artefact import Artefact, Side
from workbench.kv.kvtc.codes import Coder, Codes
from workbench.kv.kvtc.entropy import from_streams
from workbench.kv.kvtc.header import DTYPES, Header
from workbench.kv.kvtc.joint import JointRows
from workbench.models.rope import apply_rope


class Stored:
    """Rows of a checked payload; made by :meth:`workbench.kv.kvtc.codec.Kvtc.open`."""

    def __init__(
        self,
        payload: Payload,
        header: Header,
        artefact: Artefact,
        joint: JointRows,
        coders: tuple[Coder, Coder],
    ) -> None:
        self.header = header
        self._artefact, self._joint = artefact, joint
        self._dtype = DTYPES[header.dtype]
        n, tail = header.lead, header.tokens - header.lead - header.coded
        self._lead = self._kept(payload, "lead", len(joint.layers), n)
        self._tail = self._kept(payload, "tail", len(joint.layers), tail)
        others = [i for i in range(joint.num_layers) if i not in joint.layers]
        self._sliding = self._kept(payload, "sliding", len(others), header.sliding)
        self._others = others
        self._codes: tuple[Codes, Codes] | None = None
        if header.coded:
            stage, n = header.entropy, header.coded
            keys = from_streams(payload, coders[0], stage, "k", n, None)
            expected = artefact.cross.expect(coders[0].exact(keys)) if stage == "range" else None
            self._codes = keys, from_streams(payload, coders[1], stage, "v", n, expected)
        self._coders = coders
        self.positions = torch.arange(header.first, header.first + header.tokens)

    @cached_property
    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Of keys and values, float32 [coded, rank]."""
        if self._codes is None:
            return tuple(torch.zeros(0, c.plan.rank, dtype=torch.float32) for c in self._coders)  # type: ignore[return-value]
        k, v = (coder.decode(c) for coder, c in zip(self._coders, self._codes, strict=True))
        return k, v

    @cached_property
    def factors(self) -> tuple[Tensor, ...]:
        """Coefficients in the dtype that they are multiplied in."""
        return tuple(c.to(_product_dtype(self._dtype)) for c in self.coefficients)

    @cached_property
    def turn(self) -> tuple[Tensor, Tensor]:
        """The rotation to the coded positions, the same in every layer."""
        header = self.header
        return self._joint.turn(self.positions[header.lead : header.lead + header.coded])

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated to their positions) and values [T, Hkv, D] of one layer of the model.

        Of a sliding-window layer only the last ``header.sliding`` rows are stored; earlier ones are zero.
        """
        header = self.header
        if layer in self._others:
            kept = self._sliding[:, self._others.index(layer)]
            out = kept.new_zeros(2, header.tokens, *kept.shape[2:])
            out[:, header.tokens - header.sliding :] = kept
            return out[0], out[1]
        return self.around(layer, *self.coded(layer, self.factors, self.turn))

    def coded(
        self, layer: int, factors: Sequence[Tensor], turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [n, Hkv, D] of a layer behind n rows of coefficients, keys turned by ``turn``."""
        joint = self._joint
        k, v = (
            self._product(side, coefficients, joint.columns(layer)).view(-1, joint.heads, joint.dim)
            for side, coefficients in zip((self._artefact.k, self._artefact.v), factors, strict=True)
        )
        return apply_rope(k, *turn).to(self._dtype), v.to(self._dtype)

    def around(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The coded rows of a layer with those that are kept in 16 bits before and behind them."""
        at = self._joint.layers.index(layer)
        lead, tail = self._lead[:, at], self._tail[:, at]
        return torch.cat([lead[0], k, tail[0]]), torch.cat([lead[1], v, tail[1]])

    def rows(self) -> CachedRows:
        """All layers."""
        layers = [self.layer(i) for i in range(self._joint.num_layers)]
        return CachedRows(tuple(k for k, _ in layers), tuple(v for _, v in layers), self.positions)

    def _product(self, side: Side, coefficients: Tensor, columns: slice) -> Tensor:
        """Rows float32 [coded, columns] behind coefficients, their mean included."""
        if coefficients.dtype == torch.float32:
            return coefficients @ side.basis.components[:, columns].float() + side.basis.mean[columns]
        return torch.nn.functional.linear(coefficients, side.by_feature[columns]) + side.basis.mean[columns]

    def _kept(self, payload: Payload, name: str, layers: int, tokens: int) -> Tensor:
        heads, dim = self._joint.heads, self._joint.dim
        data = payload.stream(name, exempt.nbytes(layers, tokens, heads, dim))
        return exempt.from_bytes(data, self._dtype, (layers, tokens, heads, dim))


def _product_dtype(cache: torch.dtype) -> torch.dtype:
    """A bfloat16 cache rounds what it is given to 8 bits, far below what coding loses: so may the product."""
    return torch.bfloat16 if cache == torch.bfloat16 else torch.float32
