"""XQuant: KIVI in 1 or 2 bits with grids moved inward, and layers that read a neighbour's codes.

Yang et al., "XQuant: Achieving Ultra-Low Bit KV Cache Quantization with Cross-Layer Compression" (arXiv
2510.11236, EMNLP 2025). *Deviations*: as in :mod:`workbench.kv.kivi` a page leaves full precision whole;
pairs are neighbours within a KV group; by default it is measured which pairs share, the least harm first, and
a sharing layer's minimum and step are fitted to its partner's codes (``schedule=paper,parameters=range`` is
the paper's way). "Equivalent bits" of the paper leave out minimum and step: they are counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.kv.compiled import kernels_of
from workbench.kv.grouped import group_option, residual_option
from workbench.kv.xquant.codec import XQuantCodec
from workbench.kv.xquant.harm import SharingHarm
from workbench.kv.xquant.schedule import Pair, Schedule, cheapest, from_layer, pairs_of, sides, widths
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """Widths by layer, which pairs share, and the grid; metadata is ``32 / group`` bits in every layer."""

    schedule: str = option(
        "harm",
        choices=("harm", "paper", "none"),
        help="Which pairs of layers share codes. harm: measured on calibration text, the least harm first, "
        "down to target. paper: from layers km and vm on. none: no pair.",
    )
    target: float = option(
        1.8,
        low=0.5,
        high=2.0,
        step=0.05,
        unit="bit",
        help="harm: mean code bits over layers, keys and values, without the bits of minimum and step.",
    )
    lk: int = option(
        -1, low=-1, high=1024, help="Keys take 2 bits in layers below it, 1 bit from it on; -1: 2 in all."
    )
    lv: int = option(-1, low=-1, high=1024, help="The same for values.")
    km: int = option(-1, low=-1, high=1024, help="paper: keys share codes from this layer on; -1: nowhere.")
    vm: int = option(-1, low=-1, high=1024, help="paper: the same for values.")
    eta1: float = option(
        1 / 6,
        low=0.0,
        high=0.49,
        step=0.01,
        help="How far the ends of a 1-bit grid move inward, of its range.",
    )
    eta2: float = option(
        0.045, low=0.0, high=0.49, step=0.005, help="The same of a 2-bit grid; 0 and no sharing is KIVI."
    )
    parameters: str = option(
        "fit",
        choices=("fit", "range"),
        help="Minimum and step of a layer that reads another's codes. range: of its own range, as in the "
        "paper. fit: least squares of its own rows on those codes; the same bytes, less harm.",
    )
    min_agreement: float = option(
        0.0,
        low=0.0,
        high=1.0,
        step=0.01,
        help="Veto pairs whose codes do not agree beyond chance by so much (Cohen's kappa); 0 vetoes none.",
    )
    group: int = group_option()
    residual: int = residual_option()


SPEC = TechniqueSpec(
    id="xquant",
    title="XQuant",
    family="kv",
    seam="kv_codec",
    kind="lossy",
    summary=(
        "1- or 2-bit codes as in KIVI on grids whose ends are moved inward; some layers keep no codes and "
        "read a neighbour's with their own minimum and step, which cost one more bit per element at group 32 "
        "in every layer. The paper's results below 1.4 bits are for 7B models and do not transfer to small "
        "ones: there the codes of neighbouring layers agree no more than chance, and sharing widely ruins "
        "the model. The schedule shares what measurably harms least."
    ),
    paper="https://arxiv.org/abs/2510.11236",
    claims_slot=("kv_format",),
    sweep=("schedule=none", "eta2=0,schedule=none", "", "target=1.5"),
    claims=(
        Claim(
            "LongBench 41.98 on average at 1.38 bits, KIVI 39.86 at 2 bits.",
            "Mistral-7B-Instruct-v0.2; bits without minimum and step (0.25 more at group 128)",
            "https://arxiv.org/abs/2510.11236",
        ),
    ),
)


def schedule_of(
    config: Config, layers: int, pairs: tuple[Pair, ...], harm: SharingHarm | None
) -> Schedule | None:
    """The table of a configuration, or None while it waits for ``harm`` to be measured."""
    bits = widths(layers, config.lk), widths(layers, config.lv)
    measured = config.schedule == "harm" or (config.schedule == "paper" and config.min_agreement > 0)
    if measured and pairs and harm is None:
        return None
    allowed = [
        harm.allowed(side, config.min_agreement) if harm is not None and measured else [True] * len(pairs)
        for side in range(2)
    ]
    if config.schedule == "harm" and harm is not None:
        increase = harm.increase(0), harm.increase(1)
        return cheapest(bits, increase, pairs, (allowed[0], allowed[1]), config.target)
    starts = (config.km, config.vm) if config.schedule == "paper" else (-1, -1)
    shared = [
        [p for p, ok in zip(pairs, allowed[side], strict=True) if ok and p in from_layer(pairs, starts[side])]
        for side in range(2)
    ]
    return Schedule(sides(bits[0], shared[0]), sides(bits[1], shared[1]))


def bind(config: Config, context: Any) -> XQuantCodec:
    """The codec for the context's model, with its schedule once that is known."""
    layers, pairs = context.config.num_layers, pairs_of(g.layers for g in context.config.kv_groups)
    harm: SharingHarm | None = context.kv_sharing
    return XQuantCodec(
        Schedule(sides(widths(layers, config.lk), ()), sides(widths(layers, config.lv), ())),
        schedule_of(config, layers, pairs, harm),
        eta1=config.eta1,
        eta2=config.eta2,
        group=config.group,
        residual=config.residual,
        parameters="fit" if config.parameters == "fit" else "range",
        harm=harm,
        kernels=kernels_of(context),
    )
