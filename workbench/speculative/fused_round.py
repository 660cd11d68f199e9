"""Fused round: draft loop, target pass, judgement and selection as one program of fixed shapes.

The mode of AWS' Neuron (NxD Inference, ``enable_fused_speculation``), where a whole round is one compiled
graph: a fixed number of drafts, outputs padded with a sentinel, K and V of both models written at fixed
places, one wait of the host per round. What it costs is padding: a round pays for the whole of a table of
pages, for all drafts and for a batch of the next power of two. Output is what the step-by-step path says:
R1 at temperature 0, above it R2 for sampled drafts and R3 for others, on the laws of requests whose top-k is
at most ``top``. Requests that ask for more (masks, penalties, wider laws) are drafted for step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from workbench.engine.draft_runner import DraftRunner
from workbench.engine.draft_seams import Drafter
from workbench.engine.executor import Executor
from workbench.spec.technique import TechniqueSpec, option
from workbench.speculative.fused.program import FusedChain, FusedRound


@dataclass(frozen=True)
class Config:
    """How it is run, and which sampled requests it serves."""

    graph: str = option(
        "off",
        choices=("off", "eager", "aot_eager", "inductor"),
        help="Run by torch.compile as one graph, with this backend; inductor needs a C++ compiler. "
        "off: operation by operation.",
    )
    top: int = option(
        64,
        low=0,
        high=1 << 20,
        unit="tokens",
        help="Largest top-k of requests that are sampled in the program; 0: any, all tokens sorted.",
    )


_PAGES = "Switch off the KV format: the program reads and writes K and V as they are."
_ROWS = "Switch off the KV selection: the program finds a token's K and V by its position."
_ALONE = "Switch off one of the two: the program's attention is that of plain torch."

SPEC = TechniqueSpec(
    id="fused_round",
    title="Fused round",
    family="speculative",
    seam="placement",
    kind="exact",
    summary=(
        "Draft loop, target pass, verification and selection as one program of fixed shapes, as compilers "
        "for accelerators want it: one wait per round, nothing recompiled. Here it shows the form and what "
        "padding costs; drafts are those of EAGLE-3, MTP or a draft model."
    ),
    paper="https://awsdocs-neuron.readthedocs-hosted.com/en/latest/vllm-neuron/docs/design/speculation/"
    "speculative_decoding_design.html",
    stages=("draft", "verify"),
    claims_slot=("placement", "verify", "draft_control"),
    needs=("fixed_chain",),
    conflicts={
        **dict.fromkeys(("kv_fp8", "kv_int8", "kv_fp4", "kivi", "xquant"), _PAGES),
        **dict.fromkeys(
            ("streaming_llm", "snapkv", "h2o", "expected_attention", "knorm", "curdkv", "adacurdkv"), _ROWS
        ),
        **dict.fromkeys(("reference", "triton", "quest"), _ALONE),
    },
)


@runtime_checkable
class ChainDrafter(Drafter, Protocol):
    """A drafter of chains of one length, with layers of its own."""

    @property
    def chain_obstacle(self) -> str:
        """Why its drafts are no chains of one length, as a remedy; empty where they are."""
        ...

    def fused_chain(self) -> FusedChain:
        """What it is made of, once it has a target."""
        ...


@dataclass(frozen=True)
class FusedPlacement:
    """The ``placement`` seam."""

    config: Config

    @property
    def traced(self) -> bool:
        """Whether a compiler looks into the model's layers."""
        return self.config.graph != "off"

    def program(
        self, drafter: ChainDrafter, target: Executor, runner: DraftRunner, *, home: int, context: int
    ) -> FusedRound:
        """The round of a drafter on its target; ``home`` is the KV group that holds the drafter's layers."""
        graph = self.config.graph
        return FusedRound(
            drafter.fused_chain(),
            target,
            runner.executor,
            home=home,
            context=context,
            top=self.config.top,
            backend=None if graph == "off" else graph,
        )


def bind(config: Config, context: Any) -> FusedPlacement:
    """What makes rounds of a drafter."""
    return FusedPlacement(config)
