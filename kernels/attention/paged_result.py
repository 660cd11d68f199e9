"""What the paged attention kernels return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Attended(NamedTuple):
    """``out`` [rows, H, D] in the query's dtype, ``lse`` float32 [rows, H] natural, and how it was
    computed."""

    out: Tensor
    lse: Tensor
    path: str
