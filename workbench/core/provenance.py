"""Where numbers of this process come from; nothing is captured but what is listed here."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from workbench.spec.run import Metric, Provenance

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "jupyterlab")
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLIBC_TUNABLES", "MKL_NUM_THREADS")


def provenance(device: str, profile: str) -> Provenance:
    """Versions, machine, threads, profile and time of a run made now."""
    return Provenance(
        workbench=package_version("inference-workbench"),
        python=sys.version.split()[0],
        torch=torch.__version__,
        platform=platform.platform(),
        cpu=_cpu(),
        device=_device(device),
        threads=torch.get_num_threads(),
        profile="bench" if profile == "bench" else "interactive",
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        versions={p: v for p in _PACKAGES if (v := package_version(p))},
        environment={k: os.environ[k] for k in _VARIABLES if k in os.environ},
    )


def process_memory(device: str) -> tuple[Metric, ...]:
    """Peak memory of the whole process, to be shown beside the bytes by category, never mixed with them."""
    out = [Metric("process_peak", _peak_rss(), "B", note="resident, since the process began")]
    if device.startswith("cuda"):
        peak = torch.cuda.max_memory_allocated(device)
        out.append(Metric("device_peak", peak, "B", note="allocated, since the process began"))
    return tuple(out)


@cache
def package_version(package: str) -> str:
    """The installed version, or an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _peak_rss() -> int:
    info = psutil.Process().memory_info()
    peak = getattr(info, "peak_wset", 0)  # Windows
    if not peak:
        import resource

        # Kilobytes on Linux, bytes on macOS; the present size is a lower bound where it is not counted.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(int(peak), int(info.rss))


def _device(device: str) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device


@cache
def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
