"""Where kernels could run: the GPU, the compiler, the interpreter. Found without loading triton or a driver.

Only ``probe`` of a CUDA device touches CUDA, through torch, which is loaded anyway. Limits are those of the
CUDA C++ programming guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import importlib.metadata as metadata
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from workbench.kernels import interpreter

TRITON_RANGE = ((3, 6), (3, 10))
"""From the first version that has what the kernels use, up to but not including the first one untested."""

# Shared memory a block may opt in to, in KiB, by compute capability.
_SMEM_KIB = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}


@dataclass(frozen=True)
class Target:
    """A device as kernels see it. ``capability`` is None on a CPU; ``triton`` is "" when not installed."""

    device: str
    name: str
    capability: tuple[int, int] | None
    triton: str
    interpreted: bool

    @property
    def smem(self) -> int:
        """Bytes of shared memory a block may use; 0 on a CPU, 48 KiB (always granted) for unknown GPUs."""
        if self.capability is None:
            return 0
        return 1024 * _SMEM_KIB.get(self.capability, 48)

    @property
    def compiler_fits(self) -> bool:
        """Whether the installed triton is in the range that the kernels are tested with."""
        return in_range(self.triton)


def probe(device: torch.device | str = "cpu") -> Target:
    """The device, the compiler and whether kernels are interpreted in this process."""
    device = torch.device(device)
    version, interpreted = triton_version(), interpreter.wanted()
    if device.type != "cuda":
        return Target(device.type, device.type.upper(), None, version, interpreted)
    found = torch.cuda.get_device_capability(device)
    return Target("cuda", torch.cuda.get_device_name(device), found, version, interpreted)


@cache  # asked before every launch, and reading metadata takes half a millisecond
def triton_version() -> str:
    """Version of the installed triton, from its metadata; "" when there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def in_range(version: str) -> bool:
    """Whether a version string such as ``3.7.1`` lies in ``TRITON_RANGE``."""
    parts = version.split("+")[0].split(".")[:2]
    if len(parts) < 2 or not all(p.isdecimal() for p in parts):
        return False
    low, high = TRITON_RANGE
    return low <= (int(parts[0]), int(parts[1])) < high


def other_triton(version: str, cache: Path) -> Path | None:
    """A folder with triton ``version`` beside the installed one, or None.

    Looked for in ``$WORKBENCH_TRITON_360`` (the digits of the version) and in ``cache/triton-VERSION``.
    """
    named = os.environ.get(f"WORKBENCH_TRITON_{version.replace('.', '')}")
    for folder in (Path(named) if named else None, cache / f"triton-{version}"):
        if folder is not None and (folder / "triton" / "__init__.py").is_file():
            return folder
    return None
