"""What most KV codecs have in common: no constants per layer, nothing held beside the planes."""

from __future__ import annotations

from typing import Literal, Self


class NoConstants:
    """A codec that is the same for every layer."""

    @property
    def calibration(self) -> Literal["none", "ranges", "sharing"]:
        """What must be measured before it can run: nothing."""
        return "none"

    @property
    def nbytes(self) -> int:
        """Bytes held beside the planes: none."""
        return 0

    def at(self, layer: int) -> Self:
        """The codec of one layer: itself."""
        return self
