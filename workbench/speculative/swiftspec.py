"""SwiftSpec: a drafter in a process of its own that never stops growing its tree while the target verifies.

"SwiftSpec: Ultra-Low Latency LLM Decoding by Scaling Asynchronous Speculative Decoding" (arXiv 2506.11309).
The drafter expands its best leaves in batches of a fixed width; the target takes the likeliest connected
subtree it knows of; the verdict re-roots both sides' trees, and what hangs below the newest token lives on
with its KV. The drafter is cut out of the target, or distilled from it. The paper places both on groups of
GPUs with fused kernels; here they are two processes, which on one machine share its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.placement.placed import PlacedDrafter, PlaceOptions, place_of
from workbench.speculative.placement.worker import Growth


@dataclass(frozen=True)
class Config(PlaceOptions):
    """What drafts, how its tree grows, what of it is verified, and where it sits."""

    budget: int = option(8, low=1, high=64, unit="nodes", help="Nodes of the tree verified per step at most.")
    width: int = option(4, low=1, high=32, unit="nodes", help="Leaves expanded at a time.")
    top: int = option(3, low=1, high=16, unit="tokens", help="Children that a leaf gets.")
    nodes: int = option(48, low=2, high=512, unit="nodes", help="Nodes that the tree may have.")
    wait: float = option(
        100.0,
        low=0.0,
        high=10_000.0,
        unit="ms",
        help="How long the target waits where it knows no node at all; with one it never waits.",
    )


SPEC = TechniqueSpec(
    id="swiftspec",
    title="SwiftSpec",
    family="speculative",
    seam="drafter",
    kind="exact",
    summary=(
        "A drafter in a process of its own grows one tree without pause while the target verifies what it "
        "knows of it. It hides the time that drafting takes; it pays where that is much."
    ),
    paper="https://arxiv.org/abs/2506.11309",
    stages=("draft",),
    claims_slot=("drafter",),
    provides=("drafter",),
    claims=(
        Claim(
            "1.75 times the speed of other speculative systems on average",
            "five families of models, six sets of prompts, one query on eight Hopper GPUs",
            "https://arxiv.org/abs/2506.11309",
        ),
    ),
)


def bind(config: Config, context: Any) -> PlacedDrafter:
    """The drafter, here; a session gives it its process. Raises what :func:`place_of` raises."""
    place = place_of(SPEC.id, config, context, Growth(config.width, config.top, config.nodes))
    nodes = max(config.nodes, config.budget)
    return PlacedDrafter(SPEC.id, place, budget=config.budget, patience=config.wait / 1e3, max_nodes=nodes)
