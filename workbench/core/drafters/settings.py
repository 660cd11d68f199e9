"""What is compared: drafters, on which prompts, at which batch sizes, with which weights and numerics.

A cell is one choice of prompts, batch size, weights and numerics; in it all drafters and plain decoding take
turns on the same weights. Batch sizes are measured with the first weights and numerics named, and the other
weights and numerics at the first batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.core import catalog
from workbench.core.drafters.prompt_sets import SHIPPED, set_name
from workbench.spec.errors import OptionError
from workbench.spec.plan import DType, Numerics
from workbench.spec.recipe import Recipe

NAME, PLAIN = "drafters", "plain"
UNCODED = "unquantized"
WEIGHTS = (UNCODED, "rtn:bits=8", "rtn:bits=4")
BATCHES = (1, 2, 4, 8, 16)
SIZES = {"prompts": 24, "tokens": 64, "longest": 512}


@dataclass(frozen=True)
class Cell:
    """One choice: ``prompts`` as given, ``weights`` a technique or :data:`UNCODED`."""

    prompts: str
    batch: int
    weights: str
    numerics: Numerics

    @property
    def label(self) -> str:
        """Its name in metrics and tables, e.g. ``chat_b4`` or ``mixed_b1_rtn:bits=4``."""
        rest = [self.weights] if self.weights != UNCODED else []
        rest += [self.numerics] if self.numerics != "fast" else []
        return "_".join([set_name(self.prompts), f"b{self.batch}", *rest])

    def turns(self, count: int) -> int:
        """Turns that take about ``count`` prompts: an even number, for two halves."""
        return 2 * max(1, round(count / (2 * self.group)))

    @property
    def group(self) -> int:
        """Prompts of a turn: one by one, or enough to keep a batch full for a while."""
        return 1 if self.batch == 1 else 2 * self.batch


@dataclass(frozen=True)
class DrafterSettings:
    """Of one run of the benchmark.

    ``drafters``: none means every one that runs on the model, as it is by default. ``prompts``: shipped sets
    or files. ``sizes``: see :data:`SIZES`; prompts a cell, tokens of an answer, tokens of the longest prompt.
    ``vocab``: numbers of tokens to draft from, each a contestant of every head. ``cells``: only these.
    ``deadline_s``: seconds after which no turn is begun, 0: none. ``fresh``: measure what is known again.
    """

    model: str
    drafters: tuple[Recipe, ...] = ()
    prompts: tuple[str, ...] = SHIPPED
    batches: tuple[int, ...] = BATCHES
    weights: tuple[str, ...] = WEIGHTS
    numerics: tuple[Numerics, ...] = ("fast", "pinned")
    sizes: dict[str, int] = field(default_factory=dict)
    vocab: tuple[int, ...] = ()
    cells: tuple[str, ...] = ()
    temperature: float = 0.0
    deadline_s: float = 0.0
    fresh: bool = False
    dtype: DType = "bfloat16"
    device: str = "cpu"
    profile: Literal["interactive", "bench"] = "interactive"

    def size(self, name: str) -> int:
        """A size: the one given, or its default."""
        return self.sizes.get(name, SIZES[name])

    def chosen(self) -> list[Cell]:
        """The cells, in order, everything named checked. Raises :class:`OptionError`."""
        for name, value in self.sizes.items():
            if name not in SIZES:
                raise OptionError(f"{NAME} has no size {name!r}.", hint=f"Sizes are {', '.join(SIZES)}.")
            if value < 1:
                raise OptionError(f"{name}={value} must be a whole number from 1.")
        if not self.batches or min(self.batches) < 1 or self.deadline_s < 0:
            raise OptionError(
                f"Batches of {list(self.batches)} within {self.deadline_s:g} s cannot be measured.",
                hint="Give batch sizes from 1, and seconds from 0.",
            )
        for text in self.weights:
            check_weights(text)
        names = [set_name(p) for p in dict.fromkeys(self.prompts)]
        if twice := [n for n in names if names.count(n) > 1]:
            raise OptionError(
                f"Two sets of prompts are called {twice[0]!r}; their cells would be, too.",
                hint="Give one of the files another name.",
            )
        every = self._every()
        labels = [c.label for c in every]
        unknown = [c for c in self.cells if c not in labels]
        if unknown:
            raise OptionError(f"{unknown[0]!r} is no cell here.", hint=f"Cells are {', '.join(labels)}.")
        return [c for c in every if not self.cells or c.label in self.cells]

    def _every(self) -> list[Cell]:
        weights, numerics = self.weights[0], self.numerics[0]
        out = [Cell(p, b, weights, numerics) for b in self.batches for p in self.prompts]
        out += [Cell(p, self.batches[0], w, numerics) for w in self.weights[1:] for p in self.prompts]
        out += [Cell(p, self.batches[0], weights, n) for n in self.numerics[1:] for p in self.prompts]
        return list(dict.fromkeys(out))


def weights_of(text: str) -> Sequence[str]:
    """The recipe's part that codes weights: nothing, or the technique."""
    return () if text == UNCODED else (text,)


def check_weights(text: str) -> None:
    """Raise :class:`OptionError` for what codes no weights."""
    for use in Recipe.of(*weights_of(text)):
        if catalog.get(use.id).spec.seam != "weights":
            raise OptionError(
                f"{text!r} codes no weights.", hint=f"Choose {UNCODED}, rtn:bits=8 or rtn:bits=4."
            )
