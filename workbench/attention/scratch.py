"""Buffers of an attention op, kept between calls: fresh large blocks cost page faults on every layer."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers that only grow; contents do not survive the next :meth:`take` of the same name."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised ``[rows, columns]`` tensor."""
        key = (name, dtype, device)
        held = self._held.get(key)
        if held is None or held.numel() < rows * columns:
            with torch.inference_mode(False):  # usable in and out of inference mode
                held = self._held[key] = torch.empty(rows * columns, dtype=dtype, device=device)
        return held[: rows * columns].view(rows, columns)

    def nbytes(self) -> int:
        """Bytes held: workspace, not KV."""
        return sum(t.untyped_storage().nbytes() for t in self._held.values())
