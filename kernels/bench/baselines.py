"""What kernels are measured against: torch's attention backends, cuBLAS products, gathering before attention.

Each takes what a trial's call takes. A backend that is missing or refuses raises, and the report quotes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from workbench.kernels.bench.case import Outputs


def packed_sdpa(backend: SDPBackend) -> Any:
    """Attention of one backend over equally long packed sequences: q, k, v ``[B * S, H, D]``."""

    def run(q: Tensor, k: Tensor, v: Tensor, q_lens: Any, causal: bool = True, **_: Any) -> Outputs:
        heads = [x.unflatten(0, (len(q_lens), -1)).transpose(1, 2) for x in (q, k, v)]
        with sdpa_kernel([backend]):
            out = sdpa(heads[0], heads[1], heads[2], is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return {"out": out.transpose(1, 2).flatten(0, 1)}

    return run


#: The two fused backends that torch brings, by the names of the report.
ATTENTION = {
    "SDPA cuDNN": packed_sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": packed_sdpa(SDPBackend.FLASH_ATTENTION),
}


def cublas(x: Tensor, dense: Tensor, **_: Any) -> Outputs:
    """The 16-bit product that a quantized linear replaces: ``dense`` [N, K] are the weights it stands for."""
    return {"y": torch.nn.functional.linear(x, dense)}


def gathered_sdpa(q: Tensor, planes: Any, table: Tensor, longest: int, **_: Any) -> Outputs:
    """Equally long sequences: pages copied side by side, then torch's attention; q ``[B, H, D]``."""
    keys, values = (
        planes[name][table.long()].transpose(1, 2).flatten(2, 3)[:, :, :longest] for name in ("k", "v")
    )
    out = sdpa(q[:, :, None], keys, values, enable_gqa=q.shape[1] != keys.shape[1])
    return {"out": out[:, :, 0]}
