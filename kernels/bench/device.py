"""The GPU as its driver describes it, and the refusal where there is none.

Only ``nvidia-smi`` is asked, so that the parent process holds no device; torch is asked whether it sees one.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import torch

from workbench.kernels.target import in_range, triton_version
from workbench.spec.errors import CompilerError, KernelError

_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "sm_clock_max": "clocks.max.sm",
    "memory_clock": "clocks.mem",
    "power_limit": "power.limit",
    "power_draw": "power.draw",
    "temperature": "temperature.gpu",
    "throttled": "clocks_throttle_reasons.active",
}


def require_gpu() -> None:
    """``KernelError`` without an NVIDIA GPU that torch sees, ``CompilerError`` without a fitting triton."""
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} sees none" if torch.version.cuda else "torch is built for the CPU"
        raise KernelError(
            f"There is no NVIDIA GPU to check the kernels on ({built}).",
            hint="Any machine can do: workbench gpu-check --plan, workbench kernels, pytest tests/kernels. "
            "On a machine with a GPU, install a CUDA build of torch.",
        )
    if not in_range(triton_version()):
        raise CompilerError(
            f"The kernels are tested with triton 3.6 to 3.9, not {triton_version() or 'none'}.",
            hint="Install a triton in that range.",
        )


def described() -> dict[str, Any]:
    """What nvidia-smi says about the first visible device now, as text; empty when it cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    asked = [tool, f"--query-gpu={','.join(_FIELDS.values())}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [v.strip() for v in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    return dict(zip(_FIELDS, values, strict=False))


def versions() -> dict[str, str]:
    """Versions that numbers depend on."""
    return {"torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": triton_version()}
