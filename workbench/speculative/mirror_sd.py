"""Mirror speculative decoding: the drafter works on every way a window may end while the target decides.

"Mirror Speculative Decoding: Breaking the Serial Barrier in LLM Inference" (arXiv 2510.13161). Behind its
first layers the target says which tokens it may choose at each place of the window, and goes on; the drafter,
in a process of its own, continues all of them. A verdict that was foreseen finds its next window made. The
proxy is the target's own head on an inner layer, through an adapter where one was trained; it decides what is
made ahead, never what is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from workbench.spec.errors import OptionError
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.placement.early_exit import ExitAdapter
from workbench.speculative.placement.mirror_target import MirrorTarget
from workbench.speculative.placement.mirror_worker import Windows
from workbench.speculative.placement.placed import PlaceOptions, place_of
from workbench.speculative.placement.trained_exit import find_exit
from workbench.speculative.sought import sought


@dataclass(frozen=True)
class Config(PlaceOptions):
    """The window, what is foreseen of its end, what drafts, and where it sits."""

    k: int = option(4, low=1, high=16, unit="tokens", help="Tokens of a window.")
    kappa: int = option(
        3, low=1, high=16, unit="tokens", help="Candidates at each place of a window: its branches."
    )
    streams: int = option(
        0,
        low=0,
        high=8,
        unit="tokens",
        help="Tokens that each of the drafter's passes guesses ahead, for its next pass to bear out "
        "(speculative streaming). It takes a draft model that was trained for it.",
    )
    exit: int = option(
        0,
        low=0,
        high=1024,
        unit="layers",
        help="Layers of the target before it says what it may choose. 0: those of the trained adapter, else "
        "two thirds.",
    )
    wait: float = option(
        2000.0,
        low=0.0,
        high=60_000.0,
        unit="ms",
        help="How long the target waits for a window before it goes on without.",
    )


SPEC = TechniqueSpec(
    id="mirror_sd",
    title="Mirror speculative decoding",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "While the target verifies a window, a drafter in a process of its own continues every end that the "
        "target's inner layers foresee. A verdict that was foreseen costs no drafting time."
    ),
    paper="https://arxiv.org/abs/2510.13161",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter",),
    claims=(
        Claim(
            "2.8 to 5.8 times faster, 30% over EAGLE-3 on average",
            "server models of 14 to 66 billion parameters, Spec-Bench, GPU and NPU",
            "https://arxiv.org/abs/2510.13161",
        ),
    ),
)


def peek_layers(target: int, asked: int) -> int:
    """Layers that run before the proxy (asked 0: two thirds). Raises :class:`OptionError` for all of them."""
    layers = asked or max(1, min(target - 1, round(target * 2 / 3)))
    if layers >= target:
        raise OptionError(
            f"mirror_sd.exit = {layers} leaves nothing to hide behind: the target has {target} layers.",
            hint=f"Choose {target - 1} at most." if target > 1 else "Choose another drafter.",
        )
    return layers


class Exit(NamedTuple):
    """``layers`` before the exit, the ``adapter`` that was trained for it, if any; ``notes``: why one that is
    there is not used."""

    layers: int
    adapter: ExitAdapter | None = None
    notes: tuple[str, ...] = ()


def exit_of(model: str, fingerprint: str, layers: int, asked: int) -> Exit:
    """The exit of a target of ``layers``.

    Asked for 0: where the adapter is, else behind two thirds. Raises :class:`OptionError` for all layers.
    """
    found = sought(lambda: find_exit(model, fingerprint, layers))
    trained, trouble = found.found, found.trouble
    at = peek_layers(layers, asked or (trained.layer if trained is not None else 0))
    notes = (f"{SPEC.id} foresees verdicts without a trained adapter. {trouble}",) if trouble else ()
    return Exit(at, trained.adapter if trained is not None and trained.layer == at else None, notes)


def bind(config: Config, context: Any) -> MirrorTarget:
    """The drafter, here; a session gives it its process. Raises what :func:`place_of` raises."""
    windows = Windows(config.k, config.kappa, config.streams)
    place = place_of(SPEC.id, config, context, windows)
    layers = context.config.num_layers
    found = exit_of(context.model, context.fingerprint, layers, config.exit)
    return MirrorTarget(
        SPEC.id,
        replace(place, notes=(*place.notes, *found.notes)),
        windows,
        peek_layers=found.layers,
        patience=config.wait / 1e3,
        adapter=found.adapter,
    )
