"""What most KV codecs have in common: no constants per layer, nothing held beside the planes."""

from __future__ import annotations

from typing import Self


class NoConstants:
    """A codec that is the same for every layer."""

    @property
    def needs_ranges(self) -> bool:
        """Whether anything of it comes from calibration: no."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes held beside the planes: none."""
        return 0

    def at(self, layer: int) -> Self:
        """The codec of one layer: itself."""
        return self
