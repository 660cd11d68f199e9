"""Several modules of multi-token prediction as one decoder: each reads the states of the one before.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): module k's row of token x_s is given the state of module k - 1 at
row s - 1 (module 0: the model's), so that D modules in a row carry a state D tokens further. All modules run
at every row and keep K and V for it; the row before is part of the same pass, or its states are given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from workbench.models.config import ModelConfig
from workbench.models.decoder import Attend, Decoder, ForwardOut
from workbench.models.feature_decoder import Entrance, FeatureDecoder
from workbench.models.norms import Norm
from workbench.models.packed import held_nbytes
from workbench.models.weightset import WeightSet
from workbench.spec.errors import InvariantError


class ChainDecoder(FeatureDecoder):
    """D modules: D layers of ``weights``, an entrance and a norm before the head for each."""

    def __init__(
        self, config: ModelConfig, weights: WeightSet, entrances: Sequence[Entrance], norms: Sequence[Norm]
    ) -> None:
        super().__init__(config, weights, entrances[0])
        self._entrances = tuple(entrances)
        self._norms = tuple(norms)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        logits_rows: Tensor | None = None,
        capture: Collection[int] = (),
        states: Tensor | None = None,
        layers: range | None = None,
        highest: int | None = None,
    ) -> ForwardOut:
        """As :meth:`Decoder.forward`, with ``states`` [T, D * H + 1]: what each module is given at the row.

        Of a row whose last column is 0 only the first H count, what module 0 is given; the others are given
        what the row before comes out with. Elsewhere it is m + 1: all are given, and the row's logits are
        module m's. ``captured[D]`` [T, D * H]: what leaves each module; ``streams`` are rows of it.
        """
        if states is None:
            raise InvariantError("A head that reads hidden states was given none.")
        if layers is not None:
            raise InvariantError("A chain of modules runs whole.")
        embedded, size = self.embed(ids), self.config.hidden_size
        rotation = self._rotations(positions, highest)[self.config.layer_types[0]]
        given = states[:, -1:] > 0
        out: list[Tensor] = []
        for k, (block, entrance) in enumerate(zip(self._blocks, self._entrances, strict=True)):
            state = states[:, k * size : (k + 1) * size]
            if out:
                before = torch.cat((state[:1], out[-1][:-1]))
                state = torch.where(given, state, before)
            hidden = entrance.stream(embedded, state)
            q, key, v = block.enter(hidden, rotation)
            out.append(block.leave(attend(k, q, key, v), hidden, None))
        asked = states[:, -1].long().sub(1).clamp_min(0)
        chosen = torch.stack(out)[asked, torch.arange(len(ids), device=ids.device)]
        behind = streams = torch.cat(out, 1)
        if logits_rows is not None:
            chosen, asked = chosen.index_select(0, logits_rows), asked.index_select(0, logits_rows)
            streams = behind.index_select(0, logits_rows)
        hidden = self._normed(chosen, asked)
        return ForwardOut(self.logits(hidden), hidden, streams, {len(out): behind})

    def _normed(self, streams: Tensor, modules: Tensor) -> Tensor:
        out = torch.empty_like(streams)
        for module, norm in enumerate(self._norms):
            rows = modules == module
            if bool(rows.any()):
                out[rows] = norm(streams[rows])
        return out

    def own_nbytes(self, target: Decoder) -> int:
        """Bytes held beside the target's: layers, entrances, tables."""
        linears = [x for layer in self.weights.layers for x in layer.linears]
        linears += [x for entrance in self._entrances for x in entrance.held]
        gains = [g for layer in self.weights.layers for g in layer.gains]
        return held_nbytes(linears, gains) + self.table_nbytes
