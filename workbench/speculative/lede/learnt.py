"""What was learnt for a model, as a file: two ways of drafting, one for temperature 0 and one above it.

A way is a fitted network with the exits it looks at, the best fixed choice, how rounds of either fared on
held-out text, and which of the two was better there. The file names the weights it was learnt from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workbench.models.heads import HeadFile, find_head, target_name, write_head
from workbench.spec.errors import HeadMismatch, MissingHead, OptionError
from workbench.speculative.lede.choice import Guard
from workbench.speculative.lede.q_learning import Values
from workbench.speculative.lede.state import FEATURES, Limits

KIND = "lede"
KINDS = ("greedy", "sampled")
"""Ways: at temperature 0, and above it."""


@dataclass(frozen=True)
class Way:
    """How drafts are made: ``values`` within ``limits``, or ``fixed`` exit and length (0, 0: none).

    ``learnt``: whether the network did better than what is fixed where it was chosen.
    """

    values: Values
    limits: Limits
    fixed: tuple[int, int]
    learnt: bool
    guard: Guard


@dataclass(frozen=True)
class Learnt:
    """Ways by :data:`KINDS`."""

    ways: Mapping[str, Way]

    def nbytes(self) -> int:
        """Bytes of the networks."""
        return sum(way.values.nbytes() for way in self.ways.values())


def find(model: str | Path, fingerprint: str, layers: int) -> Learnt:
    """What was learnt for a model's weights; an empty ``fingerprint`` takes any (planning alone).

    Raises :class:`MissingHead` or :class:`HeadMismatch`.
    """
    try:
        return read(find_head(model, KIND, fingerprint), layers)
    except MissingHead:
        raise MissingHead(
            f"No exits and lengths were learnt for {target_name(model)}.",
            hint=f"Learn them: 'workbench train {KIND} --target {model}'",
        ) from None


def read(file: HeadFile, layers: int) -> Learnt:
    """The ways of a file. Raises :class:`HeadMismatch` for one that holds none for so many layers."""
    tensors = file.tensors()
    try:
        ways = {}
        for kind in KINDS:
            facts = file.facts["ways"][kind]
            net = [(tensors[f"{kind}.weight{i}"], tensors[f"{kind}.bias{i}"]) for i in range(facts["depth"])]
            _check(net)
            guard = {name: tuple(map(float, facts["guard"][name])) for name in ("learnt", "fixed")}
            ways[kind] = Way(
                Values([(w.float().numpy(), b.float().numpy()) for w, b in net]),
                Limits(layers, int(facts["longest"]), tuple(map(int, facts["exits"]))),
                (int(facts["fixed"][0]), int(facts["fixed"][1])),
                bool(facts["learnt"]),
                Guard((guard["learnt"][0], guard["learnt"][1]), (guard["fixed"][0], guard["fixed"][1])),
            )
            if not 0 <= ways[kind].fixed[0] < layers:
                raise ValueError(f"it leaves behind layer {ways[kind].fixed[0]}")
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, OptionError) as error:
        raise HeadMismatch(
            f"{file.path} holds no exits and lengths for a model of {layers} layers: {error}.",
            hint=f"Learn them again: 'workbench train {KIND}'",
        ) from None
    return Learnt(ways)


def write(path: Path, fingerprint: str, learnt: Learnt, facts: Mapping[str, Any]) -> None:
    """Write a file that :func:`read` reads; ``facts`` are the recipe and what was measured."""
    tensors = {}
    ways: dict[str, Any] = {}
    for kind, way in learnt.ways.items():
        for i, (weight, bias) in enumerate(way.values.layers):
            tensors[f"{kind}.weight{i}"] = torch.from_numpy(np.ascontiguousarray(weight))
            tensors[f"{kind}.bias{i}"] = torch.from_numpy(np.ascontiguousarray(bias))
        ways[kind] = {
            "depth": len(way.values.layers),
            "longest": way.limits.longest,
            "exits": list(way.limits.exits),
            "fixed": list(way.fixed),
            "learnt": way.learnt,
            "guard": {n: v for n, v in asdict(way.guard).items() if n in ("learnt", "fixed")},
        }
    write_head(path, KIND, fingerprint, {**facts, "ways": ways}, tensors)


def _check(net: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise :class:`ValueError` for layers that do not follow from a state to the worth of two actions."""
    sizes = [tuple(weight.shape) for weight, _ in net]
    ends = [FEATURES, *(out for out, _ in sizes)]
    if not sizes or ends[-1] != 2 or [into for _, into in sizes] != ends[:-1]:
        raise ValueError(f"its network has layers of {sizes}")
    biases = [tuple(bias.shape) for _, bias in net]
    if biases != [(out,) for out, _ in sizes]:
        raise ValueError(f"its network has layers of {sizes} with biases of {biases}")
