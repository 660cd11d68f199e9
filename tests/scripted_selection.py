"""A KV selector that does what it is told, and the definition of a model whose cache is thinned out.

The oracle keeps every key and value, marks what each head has dropped, and attends row by row in float64: it
shares nothing with the engine's pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.engine.selection import CachedLayer
from workbench.models.decoder import Decoder
from workbench.models.rope import frequencies, turn


def random_keep(layer: int, used: int, heads: int, at: int, share: float, same: bool, ragged: bool = False):
    """Slots each head keeps, as a pure function of where it is asked."""
    out = []
    for head in range(heads):
        gen = torch.Generator().manual_seed(1000 * at + 10 * (0 if same else layer) + (0 if same else head))
        k = max(2, int(used * share)) + (head if ragged else 0)
        out.append(torch.randperm(used, generator=gen)[:k].sort().values)
    return out


@dataclass
class Scripted:
    """Selects at ``context`` and then every ``interval`` tokens (0: never again)."""

    share: float = 0.5
    interval: int = 0
    history: int | None = 0
    per_head: bool = False
    rerotates: bool = False
    aware: bool = True
    name: str = "scripted"
    states: list[ScriptedState] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"scripted/{self.share}/{self.interval}"

    def next(self, at: int, prompt: int, context: int) -> int | None:
        first = prompt if self.aware else context
        if at < first:
            return first
        return first + ((at - first) // self.interval + 1) * self.interval if self.interval else None

    def begin(self, prompt: int, context: int) -> ScriptedState:
        self.states.append(ScriptedState(self))
        return self.states[-1]


@dataclass
class ScriptedState:
    """Remembers which tokens it was shown, and a digest of their queries."""

    owner: Scripted
    seen: dict[int, list[int]] = field(default_factory=dict)
    queries: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def observe(
        self, layer: int, queries: Tensor, positions: Tensor, cached: Callable[[], CachedLayer]
    ) -> None:
        self.seen.setdefault(layer, []).extend(positions.tolist())
        now = cached()
        for i, position in enumerate(positions.tolist()):
            self.queries[layer, position] = queries[i].clone()
            slot = now.positions.shape[1] - len(positions) + i
            if now.positions[:, slot].tolist() != [position] * len(now.positions):
                raise AssertionError("the newest slots are not those of the newest tokens")
            self.keys[layer, position] = now.keys[:, slot].clone()

    def keep(self, layer: int, cached: CachedLayer) -> Sequence[Tensor]:
        heads, used = cached.positions.shape
        at = int(cached.positions[0, -1]) + 1
        same = self.owner.rerotates
        return random_keep(layer, used, heads, at, self.owner.share, same, self.owner.per_head)

    def fork(self) -> ScriptedState:
        copy = ScriptedState(self.owner, {k: list(v) for k, v in self.seen.items()})
        self.owner.states.append(copy)
        return copy

    def nbytes(self) -> int:
        return 0


def thinned(decoder: Decoder, prompt: Sequence[int], n: int, selector: Scripted, context: int) -> list[int]:
    """Greedy ids of a model whose layers forget what ``selector`` drops, one token at a time."""
    config = decoder.config
    windows = {layer: group.window for group in config.kv_groups for layer in group.layers}
    heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    k: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
    v: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
    live = [[[] for _ in range(heads)] for _ in range(config.num_layers)]  # tokens kept, per layer and head
    shift = 0
    rate = frequencies(dict(config.rope)[config.layer_types[0]], config.head_dim, config.max_position)

    def attend(layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        token = len(k[layer])
        k[layer].append(key[0])
        v[layer].append(value[0])
        out = []
        for head in range(heads):
            live[layer][head].append(token)
            window = windows[layer]
            seen = [t for t in live[layer][head] if window is None or t > token - window]
            keys = torch.stack([k[layer][t][head] for t in seen])
            values = torch.stack([v[layer][t][head] for t in seen])
            s = q[0, head * group : (head + 1) * group] @ keys.T
            out.append(s.softmax(-1) @ values)
        return torch.cat(out).reshape(1, -1)

    tokens, generated = list(prompt), []
    index = 0
    while len(generated) < n:
        ids, positions = torch.tensor([tokens[index]]), torch.tensor([index - shift])
        logits = decoder.forward(ids, positions, attend).logits
        index += 1
        if index == len(tokens):
            tokens.append(int(logits[-1].argmax()))
            generated.append(tokens[-1])
        if selector.next(index - 1, len(prompt), context) != index:
            continue
        dropped = 0
        for layer, window in windows.items():
            if window is not None:
                continue
            used = len(live[layer][0])
            slots = random_keep(
                layer, used, heads, index, selector.share, selector.rerotates, selector.per_head
            )
            for head, kept in enumerate(slots):
                old = live[layer][head]
                if selector.rerotates:
                    for new, slot in enumerate(kept.tolist()):
                        key = k[layer][old[slot]].clone()
                        key[head] = turn(key[head], torch.tensor(new - slot), rate)
                        k[layer][old[slot]] = key
                live[layer][head] = [old[i] for i in kept.tolist()]
                dropped = used - len(kept)
        if selector.rerotates:
            shift += dropped
    return generated
