"""Idle OpenMP threads of torch, ended before an engine with threads of its own has its turn.

In the ``bench`` profile torch's workers spin while they wait, so that the next operation finds them awake.
Beside another engine they would take a core from it. ``omp_pause_resource_all`` (OpenMP 5.0, section 3.2.44)
ends them; torch's next parallel operation starts new ones.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_MAPS = Path("/proc/self/maps")
_RUNTIMES = ("libgomp", "libomp", "libiomp5")
_HARD = 2  # omp_pause_hard


def end_idle_threads() -> int:
    """End the waiting OpenMP threads that the calling thread owns; how many runtimes agreed.

    Does nothing where the loaded libraries cannot be listed (other systems than Linux).
    """
    return sum(_pause(path) for path in loaded_runtimes())


def loaded_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes that this process has loaded."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(_RUNTIMES))


def _pause(path: str) -> bool:
    try:
        pause = ctypes.CDLL(path).omp_pause_resource_all
    except (OSError, AttributeError):  # deleted since, or a runtime older than OpenMP 5.0
        return False
    return bool(pause(_HARD) == 0)
