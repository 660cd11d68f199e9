"""How much memory there is to take, on the machine or on a device.

Asked before something large is allocated: a system that overcommits grants more than it has, and ends the
process later.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from workbench.spec.errors import OptionError

GIB = 2**30


def memory_limit() -> tuple[int, int]:
    """Bytes this process may use in all, and bytes available now; a container's limit counts."""
    memory = psutil.virtual_memory()
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit() and int(limit) < memory.total:
        return int(limit), min(memory.available, max(0, int(limit) - int(used)))
    return memory.total, memory.available


def present(device: str) -> bool:
    """Whether a device (``cpu``, ``cuda``, ``cuda:N``) is on this machine."""
    import torch

    where = torch.device(device)
    return where.type != "cuda" or 0 <= (where.index or 0) < torch.cuda.device_count()


def available(device: str) -> int:
    """Bytes that can be allocated now on a device that is present."""
    if not device.startswith("cuda"):
        return memory_limit()[1]
    import torch

    # What the caching allocator holds and does not use can be had as well.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def require_pool(tokens: int, nbytes: int, device: str) -> None:
    """Raises :class:`OptionError` when a KV pool of ``tokens`` slots, ``nbytes`` bytes, cannot be had."""
    there = available(device)
    if nbytes <= there:
        return
    fits = max(there * tokens // nbytes, 0)
    smaller = f"Lower kv_pool_tokens (about {fits:,} fit)" if fits else "Lower kv_pool_tokens"
    raise OptionError(
        f"kv_pool_tokens = {tokens:,} needs {nbytes / GIB:,.1f} GiB ({nbytes:,} bytes) on {device}; "
        f"{there / GIB:,.1f} GiB ({there:,} bytes) are available.",
        hint=f"{smaller}, or choose a smaller KV format.",
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
