"""Which form of a kernel runs: Gluon, Triton, interpreted, or plain torch; decided once, with the reason.

Asked when a plan is bound, never per call. Nothing is imported to answer: on a machine without a GPU the
answer is torch, and triton is not loaded. The interpreter is chosen only where it was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from workbench.kernels import CATALOGUE
from workbench.kernels.target import Target
from workbench.spec.errors import OptionError

Path = Literal["gluon", "triton", "interpreter", "torch"]

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALF, torch.float32)


@dataclass(frozen=True)
class Needs:
    """What a kernel needs beyond the defaults; ``instead`` takes over where it cannot run."""

    language: Literal["gluon", "triton"] = "triton"
    at_least: tuple[int, int] = (8, 0)
    exactly: tuple[int, int] | None = None
    dtypes: tuple[torch.dtype, ...] = _FLOATS
    head_dims: tuple[int, ...] = ()
    instead: str = ""


#: Kernels with needs of their own; all others run on compute capability 8.0 in bf16, fp16 or fp32.
NEEDS: Mapping[str, Needs] = {
    "fa3_fwd": Needs("gluon", exactly=(9, 0), dtypes=_HALF, head_dims=(64, 128, 256), instead="fa_fwd"),
    "fa3_fwd_fp8": Needs("gluon", exactly=(9, 0), dtypes=_HALF, head_dims=(64, 128)),
    "gemm_fp8_block": Needs(at_least=(8, 9), dtypes=_HALF),
    "w4a16": Needs(dtypes=_HALF),
    "fp4_gemm": Needs(dtypes=_HALF),
    "e8p": Needs(dtypes=_HALF),
}


@dataclass(frozen=True)
class Choice:
    """``kernel`` of the catalogue ("" for torch), the form it runs in, and why."""

    kernel: str
    path: Path
    reason: str

    @property
    def runs(self) -> bool:
        """Whether a kernel runs at all."""
        return self.path != "torch"


def choose(
    kernel: str, target: Target, *, dtype: torch.dtype | None = None, head_dim: int | None = None
) -> Choice:
    """The best form of ``kernel`` on ``target`` for a dtype and head size (None: not asked).

    A kernel that cannot run there gives way to its twin, then to torch; ``reason`` says why in each case.
    Raises ``OptionError`` for a name the catalogue does not have.
    """
    if kernel not in CATALOGUE:
        raise OptionError(f"There is no kernel {kernel!r}.", hint=f"Kernels: {', '.join(CATALOGUE)}.")
    needs = NEEDS.get(kernel, Needs())
    against = _against(kernel, needs, target, dtype, head_dim)
    if not against:
        if target.device != "cuda":
            return Choice(
                kernel, "interpreter", "TRITON_INTERPRET is set: kernels are interpreted on the CPU"
            )
        return Choice(kernel, needs.language, f"triton {target.triton} on {target.name}")
    if needs.instead:
        other = choose(needs.instead, target, dtype=dtype, head_dim=head_dim)
        if other.runs:
            return Choice(other.kernel, other.path, f"{against}; {other.kernel}: {other.reason}")
    return Choice("", "torch", against)


def _against(
    kernel: str, needs: Needs, target: Target, dtype: torch.dtype | None, head_dim: int | None
) -> str:
    """What keeps a kernel from running, in words, or nothing."""
    if not target.triton:
        return "triton is not installed (pip install 'inference-workbench[gpu]')"
    if not target.compiler_fits:
        return f"triton {target.triton} is outside the tested range 3.6 to 3.9"
    if dtype is not None and dtype not in needs.dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in needs.dtypes)
        return f"{kernel} takes {names}, not {str(dtype).removeprefix('torch.')}"
    if head_dim is not None and needs.head_dims and head_dim not in needs.head_dims:
        return f"{kernel} takes head sizes {', '.join(map(str, needs.head_dims))}, not {head_dim}"
    if target.device != "cuda":
        if not target.interpreted:
            return f"no GPU: tensors lie on {target.device}"
        return "Gluon kernels are not interpreted" if needs.language == "gluon" else ""
    return _against_capability(kernel, needs, target)


def _against_capability(kernel: str, needs: Needs, target: Target) -> str:
    have = target.capability or (0, 0)
    shown = f"{target.name} has {have[0]}.{have[1]}"
    if needs.exactly is not None and have != needs.exactly:
        return f"{kernel} needs compute capability {needs.exactly[0]}.{needs.exactly[1]}, {shown}"
    if have < needs.at_least:
        return f"{kernel} needs compute capability {needs.at_least[0]}.{needs.at_least[1]}, {shown}"
    return ""
