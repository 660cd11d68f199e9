"""Heads with random weights for random models, and a plain float64 oracle of what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.config import ModelConfig
from workbench.models.heads import write_head
from workbench.models.rope import RopeTable
from workbench.training.heads.capture import capture

FEATURES = {"eagle3": [0, 1, 2], "eagle": [2], "fasteagle": [0, 1, 2]}
"""Layers that random heads read, of models of two layers."""


def layer_tensors(config: ModelConfig, index: int, wide: int, gen: torch.Generator) -> dict[str, Tensor]:
    """One layer whose q, k and v read ``wide`` inputs."""
    h, inner = config.hidden_size, config.intermediate_size
    sizes = {
        "self_attn.q_proj": (config.q_size, wide),
        "self_attn.k_proj": (config.kv_size, wide),
        "self_attn.v_proj": (config.kv_size, wide),
        "self_attn.o_proj": (h, config.q_size),
        "mlp.gate_proj": (inner, h),
        "mlp.up_proj": (inner, h),
        "mlp.down_proj": (h, inner),
    }
    out = {
        f"layers.{index}.{n}.weight": torch.randn(s, generator=gen).double() / s[1] ** 0.5
        for n, s in sizes.items()
    }
    out[f"layers.{index}.post_attention_layernorm.weight"] = 1 + 0.1 * torch.randn(h, generator=gen).double()
    return out


def eagle3(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of an EAGLE-3 head in float64."""
    gen, h = torch.Generator().manual_seed(seed), config.hidden_size
    gains = {
        n: 1 + 0.1 * torch.randn(h, generator=gen).double()
        for n in ("layers.0.embed_norm.weight", "layers.0.state_norm.weight", "norm.weight")
    }
    return {
        "fuse.weight": torch.randn(h, 3 * h, generator=gen).double() / (3 * h) ** 0.5,
        "fuse.norms": 1 + 0.1 * torch.randn(3, h, generator=gen).double(),
        **layer_tensors(config, 0, 2 * h, gen),
        **gains,
        "ids": torch.randperm(config.vocab_size, generator=gen).to(torch.int32),
    }


def eagle(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of an EAGLE head in float64."""
    gen, h = torch.Generator().manual_seed(seed), config.hidden_size
    return {
        "fuse.weight": torch.randn(h, 2 * h, generator=gen).double() / (2 * h) ** 0.5,
        "fuse.bias": 0.1 * torch.randn(h, generator=gen).double(),
        **layer_tensors(config, 0, h, gen),
        "ids": torch.randperm(config.vocab_size, generator=gen).to(torch.int32),
    }


def fasteagle(config: ModelConfig, seed: int = 0, layers: int = 3) -> dict[str, Tensor]:
    """Tensors of a FastEagle head in float64."""
    gen, h = torch.Generator().manual_seed(seed), config.hidden_size
    out = {
        "fuse.weight": torch.randn(h, 4 * h, generator=gen).double() / (4 * h) ** 0.5,
        "fuse.norms": 1 + 0.1 * torch.randn(4, h, generator=gen).double(),
        "norms": 1 + 0.1 * torch.randn(layers, h, generator=gen).double(),
        "ids": torch.randperm(config.vocab_size, generator=gen).to(torch.int32),
    }
    for i in range(layers):
        out |= layer_tensors(config, i, h, gen)
        out[f"layers.{i}.input_layernorm.weight"] = 1 + 0.1 * torch.randn(h, generator=gen).double()
    return out


def put(
    cache: Path, model: str, kind: str, fingerprint: str, tensors: dict[str, Tensor], **facts: Any
) -> Path:
    """Where the technique of that kind looks for a head of this model."""
    path = cache / "heads" / model / f"{kind}.safetensors"
    write_head(path, kind, fingerprint, facts, tensors)
    return path


class Oracle:
    """A one-layer head on whole sequences: no pages, no steps, every row from scratch.

    ``final``: gain of the target's last norm, which EAGLE's states went through.
    """

    def __init__(
        self, kind: str, config: ModelConfig, tensors: dict[str, Tensor], embed: Tensor, final: Tensor
    ) -> None:
        self.kind, self.config, self.t = kind, config, tensors
        self.embed, self.final = embed.double(), final.double() + config.norm_offset
        scaled = config.hidden_size**0.5 if config.scale_embedding else 1.0
        self.embedded = self.embed * scaled

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt() * gain

    def fused(self, streams: list[Tensor]) -> Tensor:
        if self.kind == "eagle":
            return self.norm(streams[0].double(), self.final)
        rows = [self.norm(s.double(), g) for s, g in zip(streams, self.t["fuse.norms"], strict=False)]
        joined = torch.cat(rows, -1)
        return joined @ self.t["fuse.weight"][:, : joined.shape[1]].T

    def run(self, ids: list[int], states: Tensor, sees: list[list[int]], positions: list[int]) -> Tensor:
        """Streams [n, H] behind the layer of rows that see the rows ``sees[i]`` each."""
        t, embedded = self.t, self.embedded[ids]
        if self.kind == "eagle":
            stream = torch.cat((embedded, states), -1) @ t["fuse.weight"].T + t["fuse.bias"]
            return self._layer(0, stream, stream, sees, positions)
        gains = (t["layers.0.embed_norm.weight"], t["layers.0.state_norm.weight"])
        x = torch.cat([self.norm(y, g) for y, g in zip((embedded, states), gains, strict=True)], -1)
        return self._layer(0, states, x, sees, positions)

    def cascade(self, ids: list[int], states: Tensor) -> list[Tensor]:
        """Of a FastEagle head the logits [V] of every layer at the last row."""
        t, n = self.t, len(ids)
        width = t["fuse.weight"].shape[0]
        embedded = self.norm(self.embedded[ids], t["fuse.norms"][3])
        stream = states + embedded @ t["fuse.weight"][:, 3 * width :].T
        out = []
        for i, gain in enumerate(t["norms"]):
            x = self.norm(stream, t[f"layers.{i}.input_layernorm.weight"])
            stream = self._layer(i, stream, x, [list(range(r + 1)) for r in range(n)], list(range(n)))
            out.append(self.norm(stream[-1], gain) @ self.embed.T)
        return out

    def _layer(
        self, index: int, stream: Tensor, x: Tensor, sees: list[list[int]], positions: list[int]
    ) -> Tensor:
        """A layer whose q, k and v read ``x`` [n, *]."""
        c, t, base = self.config, self.t, f"layers.{index}"
        q, k, v = ((x @ t[f"{base}.self_attn.{n}_proj.weight"].T).view(len(x), -1, c.head_dim) for n in "qkv")
        q, k = self._turned(q, positions) * c.query_scale, self._turned(k, positions)
        per = c.num_heads // c.num_kv_heads
        out = torch.zeros(len(x), c.num_heads, c.head_dim, dtype=torch.float64)
        for i, seen in enumerate(sees):
            for head in range(c.num_heads):
                keys, values = k[seen, head // per], v[seen, head // per]
                out[i, head] = (keys @ q[i, head]).softmax(-1) @ values
        hidden = stream + out.flatten(1) @ t[f"{base}.self_attn.o_proj.weight"].T
        z = self.norm(hidden, t[f"{base}.post_attention_layernorm.weight"])
        gate, up = (z @ t[f"{base}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return hidden + (F.silu(gate) * up) @ t[f"{base}.mlp.down_proj.weight"].T

    def logits(self, streams: Tensor) -> Tensor:
        gain = self.t.get("norm.weight")
        return (streams if gain is None else self.norm(streams, gain)) @ self.embed.T

    def _turned(self, x: Tensor, positions: list[int]) -> Tensor:
        c = self.config
        table = RopeTable(c.rope[0][1], c.head_dim, c.max_position, torch.float64, torch.device("cpu"))
        cos, sin = table.gather(torch.tensor(positions), max(positions))
        half = c.head_dim // 2
        turned = torch.cat((x[..., half:], x[..., :half]), -1)  # signs are in the table
        return x * cos[:, None] + turned * sin[:, None]


def states_of(oracle, engine, ids):
    """What the head reads at each position: the states of the positions before, of committed tokens."""
    layers = FEATURES[oracle.kind]
    (streams,) = capture(engine.executor.decoder, engine.executor.op, [ids], layers)
    states = oracle.fused(streams)[:-1]  # the newest token's own is not known yet
    return torch.cat((torch.zeros_like(states[:1]), states))


def oracle_chain(oracle, engine, ids, depth):
    """What the head drafts greedily behind ``ids``, every row computed anew."""
    states = states_of(oracle, engine, ids)
    out: list[int] = []
    for _ in range(depth):
        n = len(ids) + len(out)
        behind = oracle.run([*ids, *out], states, [list(range(i + 1)) for i in range(n)], list(range(n)))
        out.append(int(oracle.logits(behind[-1:]).argmax()))
        states = torch.cat((states, behind[-1:]))
    return out


def oracle_tree(oracle, engine, ids, depth, width, nodes):
    """EAGLE-2's tree by brute force: every node's row computed alone behind its whole path."""
    states = states_of(oracle, engine, ids)

    def behind(path):
        own = states
        for j in range(len(path) + 1):
            n = len(ids) + j
            out = oracle.run([*ids, *path[:j]], own, [list(range(i + 1)) for i in range(n)], list(range(n)))
            own = torch.cat((own, out[-1:]))
        chances = oracle.logits(out[-1:])[0].log_softmax(-1)
        return [(int(t), float(v)) for v, t in zip(*chances.topk(width), strict=True)]

    made, frontier, expanded = [], [((), 0.0)], 0
    for level in range(depth):
        new = []
        for path, value in frontier:
            new += [((*path, t), value + v) for t, v in behind(path)]
        made += new
        room = nodes - expanded
        frontier = sorted(new, key=lambda x: -x[1])[: min(width, room)] if level + 1 < depth else []
        expanded += len(frontier)
    return {path for path, _ in sorted(made, key=lambda x: -x[1])[:nodes]}
