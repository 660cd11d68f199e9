"""LayerSkip: the first layers of the model draft a chain, the others judge it.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding" (arXiv 2404.16710).
Drafts come from the target's own final norm and head behind its first E layers; KV of those layers is shared
with the target, not kept twice. Models whose early layers were trained to be read (layer dropout, early-exit
loss) are drafted for well, others hardly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.engine.exit_control import ExitControl
from workbench.engine.exit_runner import ExitRunner
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.drafted_chain import draft_chains
from workbench.speculative.steered_chain import steered_chains


@dataclass(frozen=True)
class Config:
    """Where it leaves the model, and how far and how it drafts."""

    k: int = option(4, low=1, high=32, unit="tokens", help="Tokens drafted at most per step.")
    exit: int = option(
        0, low=0, high=1024, unit="layers", help="Layers of the model that draft. 0: a third of them."
    )
    draws: bool = option(
        True, help="Sample drafts above temperature 0 and keep their law; off: the likeliest tokens."
    )
    confidence: float = option(
        0.0, low=0.0, high=1.0, help="Draft no further behind a token that was less likely than this."
    )
    reuse: bool = option(
        True, help="Judge drafted tokens from the exit layer on; off: run all layers on them again."
    )


SPEC = TechniqueSpec(
    id="layerskip",
    title="LayerSkip",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "The model's first layers draft a chain through its own head, on the model's own KV; the layers "
        "behind them judge it. For models trained to be left early; from others it shows the mechanism."
    ),
    paper="https://arxiv.org/abs/2404.16710",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter", "early_exits"),
    claims=(
        Claim(
            "up to 2.16 times faster summarization, 1.82 times coding, 2.0 times semantic parsing",
            "Llama models trained with layer dropout and early-exit loss; CNN/DM, HumanEval, TOPv2",
            "https://arxiv.org/abs/2404.16710",
        ),
    ),
)


def exit_layers(target: int, asked: int) -> int:
    """Layers that draft for a target of so many (asked 0: a third).

    Raises :class:`OptionError` for as many as the target has.
    """
    layers = asked or max(1, target // 3)
    if layers >= target:
        raise OptionError(
            f"layerskip.exit = {layers} is too many: the target has {target}.",
            hint=f"Choose {target - 1} at most." if target > 1 else "Choose another drafter.",
        )
    return layers


class LayerSkip:
    """The ``drafter`` seam for a model's own first layers; needs a runner before the first draft."""

    name = "layerskip"

    def __init__(self, config: Config, layers: int) -> None:
        self.config = config
        self.max_draft = config.k
        self.exit_layers = exit_layers(layers, config.exit)
        self.reuse = config.reuse
        self._runner: ExitRunner | None = None
        self._control: ExitControl | None = None

    def attach(self, runner: ExitRunner) -> None:
        """How it runs its layers."""
        self._runner = runner

    def steer(self, control: ExitControl) -> None:
        """Where its layers end and how far drafts go is the control's from now on, not the options'."""
        self._control = control
        self.max_draft = control.longest

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """Nothing of its own to begin: what is committed went through its layers."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """Chains of at most ``min(k, room)`` tokens, or as a control steers them."""
        runner = self._runner
        if runner is None:
            raise InvariantError("layerskip drafts before it has a runner.")
        if self._control is not None:
            draws = self.config.draws
            return steered_chains(contexts, runner, self._control, draws=draws, source=self.name)
        chains = draft_chains(contexts, runner, self.config, self.name)
        return [replace(c, exit=runner.layers) if c is not None else None for c in chains]

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """The runner is told by the engine."""

    def forget(self, seq: int) -> None:
        """The runner is told by the engine."""

    def nbytes(self) -> int:
        """Bytes of streams that are kept during a step; weights and KV are the target's."""
        return self._runner.nbytes() if self._runner is not None else 0


def bind(config: Config, context: Any) -> LayerSkip:
    """The drafter; raises :class:`OptionError` when the model has too few layers."""
    return LayerSkip(config, context.config.num_layers)
