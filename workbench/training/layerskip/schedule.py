"""How often a layer is left out, and how much the loss behind it weighs, at each step of a training.

LayerSkip (arXiv 2404.16710), equations 1 to 6. Layers are numbered from 0, steps too; ``steps`` is T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.training.errors import TrainingError

Curriculum = Literal["all", "rotating", "gradual"]


@dataclass(frozen=True)
class Recipe:
    """``dropout``: chance that the last layer is left out, p_max (0.1 to 0.2); ``ramp``: it grows over the
    training, for models from scratch. ``scale``: e_scale (0.1 to 1) of the early losses, enabled by
    ``curriculum``; ``rotation``: every R-th layer at a time. Published scales are
    0.2 for long trainings from scratch, and 1 for fine-tunings as short as the one here."""

    dropout: float = 0.1
    ramp: bool = True
    scale: float = 1.0
    curriculum: Curriculum = "rotating"
    rotation: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1 or self.scale < 0 or self.rotation < 1:
            raise TrainingError("A recipe needs 0 <= dropout < 1, scale >= 0 and rotation >= 1.")


PLAIN = Recipe(dropout=0.0, scale=0.0, curriculum="all")
"""No layer is left out, and only the last one's loss counts: how a twin is trained."""


def growth(at: int, last: int) -> float:
    """exp(at ln 2 / last) - 1: from 0 at 0 to 1 at ``last``; 1 where there is one place only."""
    return math.expm1(at * math.log(2) / last) if last > 0 else 1.0


def dropout_rates(recipe: Recipe, layers: int, step: int, steps: int) -> list[float]:
    """Chance of each layer to be left out: p_max D(l) S(t), exponential in the depth and, with ``ramp``, in
    the step."""
    now = growth(min(step, steps - 1), steps - 1) if recipe.ramp else 1.0
    return [recipe.dropout * growth(layer, layers - 1) * now for layer in range(layers)]


def depth_weights(layers: int, scale: float) -> list[float]:
    """e(l) before the curriculum: scale Σ_{i <= l} i, and L - 1 more behind the last layer."""
    early = [scale * layer * (layer + 1) / 2 for layer in range(layers - 1)]
    return [*early, max(layers - 1, 1) + scale * (layers - 2) * (layers - 1) / 2]


def enabled(recipe: Recipe, layers: int, step: int, steps: int) -> list[bool]:
    """C(t, l): whose loss counts at a step; the last layer's always.

    *rotating*: layers l with l ≡ t mod R. *gradual*: from the last to the first, one more every T / 2L steps.
    """
    if recipe.curriculum == "rotating":
        on = [layer % recipe.rotation == step % recipe.rotation for layer in range(layers)]
    elif recipe.curriculum == "gradual":
        opened = 1 + 2 * layers * step // max(steps, 1)
        on = [layer >= layers - opened for layer in range(layers)]
    else:
        on = [True] * layers
    return [*on[:-1], True]


def loss_weights(recipe: Recipe, layers: int, step: int, steps: int) -> Sequence[float]:
    """ẽ(t, l): weights of the losses behind each layer; they add up to 1."""
    weights = depth_weights(layers, recipe.scale)
    on = enabled(recipe, layers, step, steps)
    found = [weight if open else 0.0 for weight, open in zip(weights, on, strict=True)]
    return [weight / sum(found) for weight in found]
