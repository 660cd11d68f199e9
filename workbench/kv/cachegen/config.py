"""Options of the transfer codec: what a recipe says."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.kv.cachegen.context import CHUNK
from workbench.kv.cachegen.levels import Level
from workbench.spec.errors import OptionError
from workbench.spec.technique import option


@dataclass(frozen=True)
class Config:
    """Bins of the first, second and last third of the layers, keys and values apart."""

    k: str = option(
        "32/16/16",
        unit="bins",
        help="Keys: even numbers from 4 to 256; more bins lose less. Usual: 16 to 64.",
    )
    v: str = option("32/16/16", unit="bins", help="Values: as keys.")
    delta: bool = option(
        False,
        help="Code nine of ten tokens as differences to the tenth: the paper's form, worse on small models.",
    )
    chunk: int = option(
        CHUNK,
        unit="tokens",
        low=10,
        high=65536,
        help="Tokens coded together; multiples of 160 line up with groups and pages.",
    )


SHORT = {"bins": ("k", "v")}
"""What sets several options at once."""

SWEEP = (
    "k=64/64/64,v=64/64/64",
    "k=64/32/24,v=64/32/24",
    "k=32/32/32,v=32/32/32",
    "",
    "k=16/16/12,v=16/12/12",
    "k=12/12/12,v=12/12/12",
    "delta=true",
    "k=16/10/8,v=16/10/8,delta=true",
)
"""Its points on a rate-distortion curve."""


def level_of(config: Config) -> Level:
    """The level that options name; raises :class:`OptionError` for what is no list of three bin counts."""
    name = config.k if config.k == config.v else f"{config.k}:{config.v}"
    bins = []
    for side, text in (("k", config.k), ("v", config.v)):
        parts = text.split("/")
        if len(parts) != 3 or not all(p.isdecimal() and len(p) < 4 for p in parts):
            raise OptionError(
                f"cachegen.{side} = {text!r} is not three numbers of bins.", hint="Write 32/16/16."
            )
        bins.append((int(parts[0]), int(parts[1]), int(parts[2])))
    return Level(name + ("-delta" if config.delta else ""), bins[0], bins[1], config.delta)
