"""How long a sequence is, and how much of it is stored: three numbers that are never mixed.

*logical* tokens went through the model; *stored* rows hold K and V that attention can still read; *dropped*
rows were written once and are gone (a selector's doing). Without a selector logical equals stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.engine.kv import KVCache
from workbench.engine.sequence import Sequence


@dataclass(frozen=True)
class KVLengths:
    """Rows of one sequence in one KV group, per layer and head."""

    prompt: int
    logical: int
    stored: int

    @property
    def dropped(self) -> int:
        """Rows that were computed and are stored no more."""
        return self.logical - self.stored

    @property
    def prefill_compression(self) -> float:
        """Dropped share of the prompt, in [0, 1]; 0 without a prompt."""
        return min(self.dropped, self.prompt) / self.prompt if self.prompt else 0.0


def kv_lengths(kv: KVCache, seq: Sequence, group: int = 0) -> KVLengths:
    """Lengths of a running sequence, counted in the slots of its pages that hold a position."""
    store, table = kv.stores[group], seq.tables[group]
    positions = store.positions.view(-1, kv.page_size)[table].flatten()
    stored = int(((positions >= 0) & (positions < seq.computed)).sum())
    return KVLengths(min(seq.prompt_len, seq.computed), seq.computed, stored)
