"""What every test may rely on: no network, two threads, seeded properties, and honest skips.

The environment is set before torch can be imported by any test. Sockets reach the loopback interface only, so
a test that would need a download fails here instead of on a machine without a network.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import ipaddress
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("MKL_NUM_THREADS", "2")
# Threads that spin while they wait make tiny operations a hundred times slower on a machine that is shared.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("WORKBENCH_CACHE") or "~/.cache/inference-workbench").expanduser()
COMPILED = CACHE / "kernels" / "cpu"
"""Where kernels of the CPU are kept before any test moves the cache folder."""

# `python -m pytest` puts the repository root on the path, where kernels/ and widgets/ would shadow packages
# of the same names; the workbench itself is installed and does not need the root.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() != ROOT]

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", parent=settings.get_profile("ci"), derandomize=False, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


class NetworkBlocked(OSError):
    """A test tried to reach another machine."""


def _is_loopback(host: object) -> bool:
    if host in (None, "", "localhost", b"localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).split("%")[0]).is_loopback
    except ValueError:
        return False


def _guard_sockets() -> None:
    """Replace connect and name look-up by versions that refuse anything but the loopback interface."""
    real_connect, real_connect_ex, real_lookup = (
        socket.socket.connect,
        socket.socket.connect_ex,
        socket.getaddrinfo,
    )

    def refuse(sock: socket.socket, address: Any) -> None:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise NetworkBlocked(f"tests have no network; refused to connect to {address[0]}")

    def connect(self: socket.socket, address: Any) -> None:
        refuse(self, address)
        real_connect(self, address)

    def connect_ex(self: socket.socket, address: Any) -> int:
        refuse(self, address)
        return real_connect_ex(self, address)

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_loopback(host):
            raise NetworkBlocked(f"tests have no network; refused to look up {host}")
        return real_lookup(host, *args, **kwargs)

    socket.socket.connect = connect  # type: ignore[method-assign]
    socket.socket.connect_ex = connect_ex  # type: ignore[method-assign]
    socket.getaddrinfo = getaddrinfo


_guard_sockets()


@functools.cache
def _cuda_capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _missing(marker: str) -> str | None:
    """Why this machine cannot run a test with the marker, or None when it can."""
    if marker == "ui":
        found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        return None if found else "needs chromium (Debian: apt-get install chromium)"
    capability = _cuda_capability()
    if capability is None:
        return "needs an NVIDIA GPU"
    if marker == "hopper" and capability[0] != 9:
        return f"needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    if marker == "blackwell" and capability[0] < 10:
        return f"needs compute capability 10.0, this GPU has {capability[0]}.{capability[1]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine has no device for."""
    for item in items:
        for marker in ("ui", "cuda", "hopper", "blackwell"):
            if item.get_closest_marker(marker) and (reason := _missing(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))
                break


def pytest_collection_finish() -> None:
    """Whoever asks for a full garbage collection later does not wait for one of every test and library.

    Half a second each time, with the whole suite collected.
    """
    gc.collect()
    gc.freeze()


def _by_path(name: str) -> ModuleType:
    """A helper module next to this file; tests do not import one another."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def inference() -> Iterator[None]:
    """No autograd, as within an engine."""
    import torch

    with torch.inference_mode():
        yield


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """Engines on random tiny models: ``lab.make_engine(...)``, ``lab.run_engine(...)``."""
    return _by_path("random_models")


@pytest.fixture(scope="session")
def model_folder(lab: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with random tiny models, one per family, for sessions: ``model_folder("qwen3")``."""
    from workbench.models.registry import resolve

    @functools.cache
    def folder(family: str) -> Path:
        return lab.write_folder(tmp_path_factory.mktemp("models") / family, family, resolve("tiny"))

    return folder


@pytest.fixture(scope="session")
def fresh_cache() -> Callable[[Path], Path]:
    """Makes empty cache folders that find compiled kernels: ``fresh_cache(tmp_path / "cache")``.

    A library of kernels is named by everything that shaped it, and takes seconds to compile anew.
    """

    def made(folder: Path) -> Path:
        COMPILED.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").mkdir(parents=True)
        (folder / "kernels" / "cpu").symlink_to(COMPILED, target_is_directory=True)
        return folder

    return made


@pytest.fixture(scope="session")
def scripted() -> ModuleType:
    """Drafters that know the future and models that say what they are told: ``scripted.Replay``, ``say``."""
    return _by_path("scripted")


@pytest.fixture(scope="session")
def random_heads() -> ModuleType:
    """Draft heads with random weights, where their techniques look, and oracles of what they compute."""
    return _by_path("random_heads")


@pytest.fixture(scope="session")
def scripted_selection() -> ModuleType:
    """A KV selector that does what it is told, and the definition it is judged by."""
    return _by_path("scripted_selection")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The top of the working tree."""
    return ROOT


@pytest.fixture
def seeded() -> Iterator[None]:
    """Torch's and Python's generators at seed 0, for tests that draw random tensors."""
    import random

    import torch

    random.seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
