"""What a payload says of itself, and whether it may be decoded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from workbench.kv.kvtc.artefact import Artefact
from workbench.kv.kvtc.entropy import STAGES, Entropy
from workbench.kv.kvtc.joint import JointRows
from workbench.spec.errors import PayloadError

KIND, VERSION = "kvtc", 1
CHUNK = 16  # tokens coded together (the paper's c); a 16-token page is one chunk
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class Header:
    """``tokens`` rows from position ``first``: ``lead`` in 16 bits, ``coded``, and the rest in 16 bits.

    ``sliding`` rows are kept of every sliding-window layer. ``dtype`` is the cache's. ``model``, ``phases``
    and ``artefact`` name what it was coded with; ``sinks`` and ``window`` say how.
    """

    model: str
    phases: str
    artefact: str
    first: int
    tokens: int
    lead: int
    coded: int
    sliding: int
    sinks: int
    window: int
    dtype: str
    entropy: Entropy

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Header:
        """From plain data; raises :class:`PayloadError` for fields that are missing, odd or contradictory."""
        kinds = {f.name: (str if f.type in ("str", "Entropy") else int) for f in fields(cls)}
        for name, kind in kinds.items():
            if type(data.get(name)) is not kind:
                raise PayloadError(f"The kvtc header has no usable {name!r}.", hint="Get it again.")
        header = cls(**{name: data[name] for name in kinds})
        numbers = (header.first, header.lead, header.coded, header.sliding, header.sinks, header.window)
        if (
            min(numbers) < 0
            or header.lead + header.coded > header.tokens
            or header.coded % CHUNK
            or header.sliding > header.tokens
            or header.dtype not in DTYPES
            or header.entropy not in STAGES
        ):
            raise PayloadError("The kvtc header contradicts itself.", hint="Get it again.")
        return header

    def require(self, artefact: Artefact, joint: JointRows) -> None:
        """Raises :class:`PayloadError` naming what differs from the model and calibration at hand."""
        for what, own, here in (
            ("weights", self.model, artefact.model),
            ("rotary embedding or layers", self.phases, joint.key),
            ("calibration or bit plan", self.artefact, artefact.key),
        ):
            if own != here:
                raise PayloadError(
                    f"The stored KV was coded with other {what}: {own[:12]}, not {here[:12]}.",
                    hint="Decode it with the model and artefact that wrote it.",
                )
        if self.first + self.tokens > joint.limit:
            raise PayloadError(
                f"The stored KV reaches position {self.first + self.tokens:,}; "
                f"the model's context is {joint.limit:,}.",
                hint="Load the model with the context limit it was coded with.",
            )
