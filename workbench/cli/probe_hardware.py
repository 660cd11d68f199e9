"""What the doctor asks the machine: cores and threads, instruction sets, memory, disk, GPU.

Nothing here allocates on a device. On a machine without a GPU, CUDA is touched only by
``torch.cuda.is_available()``, which loads no driver when torch was built for the CPU.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from workbench.cli.finding import Finding
from workbench.core.room import GIB, memory_limit

# The default model in float32 takes 0.5 GiB, its conversion a second copy, and a Python process with torch
# and transformers about 1 GiB; below this total the system starts to swap.
MEMORY_FLOOR = 4 * GIB
# The default model on disk: 93 MB wheel, 98 MB GGUF, 269 MB converted.
DISK_FLOOR = GIB
# /proc/cpuinfo spellings (x86, then ARM) of the instructions that low-precision products use.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
INSTRUCTIONS_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve")


def usable_cores() -> int:
    """Cores this process may run on: affinity, cut by a container's CPU quota when there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def instruction_sets(cpuinfo: str) -> list[str]:
    """Those of the instructions above that a /proc/cpuinfo text lists, in a fixed order."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            have = set(value.split())
            return [name for name in (*INSTRUCTIONS, *INSTRUCTIONS_ARM) if name in have]
    return []


def probe_cores() -> Finding:
    """Cores against the threads torch will use."""
    import torch

    cores, threads = usable_cores(), torch.get_num_threads()
    found = f"{cores} usable cores, torch uses {threads} threads"
    if threads > cores:
        return Finding(
            "cores",
            "limited",
            found,
            "More threads than cores: every parallel step waits for the slowest.",
            f"Set OMP_NUM_THREADS={cores}.",
        )
    return Finding("cores", "ok", found)


def probe_isa() -> Finding:
    """Vector instructions that CPU kernels can use."""
    import torch

    level = torch.backends.cpu.get_cpu_capability()
    have = instruction_sets(_read("/proc/cpuinfo"))
    found = f"torch runs {level} code; CPU has {', '.join(have) or 'no known low-precision instructions'}"
    lacks = []
    if not {"avx512_bf16", "amx_bf16", "bf16"} & set(have):
        lacks.append("bfloat16")
    if not {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"} & set(have):
        lacks.append("int8")
    if lacks:
        return Finding(
            "instruction sets",
            "limited",
            found,
            f"No {' or '.join(lacks)} products in hardware; such kernels run, without their speed.",
            "Needs another CPU; speeds measured here say so in their provenance.",
        )
    return Finding("instruction sets", "ok", found)


def probe_memory() -> Finding:
    """Main memory that this process may use."""
    total, available = memory_limit()
    found = f"{total / GIB:.1f} GiB, {available / GIB:.1f} GiB available"
    if min(total, available) < MEMORY_FLOOR:
        return Finding(
            "memory",
            "limited",
            found,
            f"Less than {MEMORY_FLOOR // GIB} GiB available: the default model may not fit beside its copy.",
            "Use the model `tiny`, or close other programs.",
        )
    return Finding("memory", "ok", found)


def probe_disk(folder: Path) -> Finding:
    """Free space where models are kept; the folder need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if not os.access(existing, os.W_OK):
        return Finding(
            "disk",
            "missing",
            found,
            "The folder for models cannot be written; only shipped models work.",
            "Set WORKBENCH_CACHE to a folder you can write.",
        )
    if free < DISK_FLOOR:
        return Finding(
            "disk",
            "limited",
            found,
            "The default model, its source and its conversion may not fit.",
            "Free some space, or set WORKBENCH_CACHE to a folder on another disk.",
        )
    return Finding("disk", "ok", found)


def probe_gpu() -> Finding:
    """NVIDIA GPUs that torch can use, or why there are none."""
    import torch

    if torch.cuda.is_available():
        devices = []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            devices.append(
                f"{facts.name} (sm_{facts.major}{facts.minor}, {facts.total_memory / GIB:.0f} GiB)"
            )
        return Finding("gpu", "ok", ", ".join(devices))
    consequence = "Everything runs on the CPU; CUDA kernels and tests are skipped, with the reason."
    if shutil.which("nvidia-smi"):
        built = f"torch {torch.__version__} sees none" if torch.version.cuda else "torch is built for the CPU"
        return Finding(
            "gpu",
            "limited",
            f"a driver is installed, but {built}",
            consequence,
            "Check `nvidia-smi`; install a CUDA build: pip install --force-reinstall 'torch<2.14'",
        )
    return Finding("gpu", "missing", "no NVIDIA GPU", consequence, "None needed; add a GPU for CUDA kernels.")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
