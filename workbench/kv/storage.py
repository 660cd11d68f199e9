"""What a technique for KV at rest is to the engine: a codec once it is calibrated, a place, and a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.kv.at_rest import RowCodec
from workbench.kv.cold_store import DiskStore, RamStore
from workbench.models.config import ModelConfig
from workbench.spec.technique import option

MIB = 2**20


def where_option() -> Any:
    """Where cold pages lie."""
    return option(
        "ram",
        choices=("ram", "disk"),
        help="Where cold pages lie: in memory, or in a temporary folder that goes with the session.",
    )


def limit_option() -> Any:
    """How many bytes cold pages may take."""
    return option(
        256,
        unit="MiB",
        low=1,
        high=1 << 20,
        help="Bytes of cold pages kept at most; the least recently used leave first.",
    )


@dataclass(frozen=True)
class Storage:
    """``calibration`` names what must be measured of the model first; ``make`` turns it into a codec.

    ``make(measured, config, model, whole)``: ``model`` is the fingerprint of the weights, ``whole`` a
    conversation from its first token on, whose most recent tokens may be kept better; else a page of one.
    """

    calibration: str
    make: Callable[[Any, ModelConfig, str, bool], RowCodec]
    where: str
    limit: int

    def store(self) -> RamStore | DiskStore:
        """A fresh place for cold pages."""
        return DiskStore() if self.where == "disk" else RamStore()
