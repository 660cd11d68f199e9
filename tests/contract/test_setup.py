"""What set-up would install, decided without installing: the torch build, the stamp, the stalled index."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup() -> ModuleType:
    """A fresh copy of .make/setup.py, which is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location("workbench_setup", ROOT / ".make" / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installs(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """What pip is asked for, recorded instead of run; a .venv without torch that already exists."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "ROOT", ROOT)
    monkeypatch.setattr(setup, "STAMP", tmp_path / ".workbench-setup")
    monkeypatch.setattr(setup, "ensure_venv", lambda: Path(sys.executable))
    monkeypatch.setattr(setup, "torch_is_fitting", lambda python: False)
    monkeypatch.setattr(setup, "pip", lambda python, *arguments: asked.append(arguments))
    monkeypatch.setattr(setup.sys, "argv", ["setup.py"])
    monkeypatch.setattr(setup.sys, "platform", "linux")
    return asked


@pytest.mark.parametrize(
    ("gpu", "index_answers", "expected"),
    [
        (True, True, ("torch>=2.11,<2.14",)),
        (False, True, ("--index-url", "https://download.pytorch.org/whl/cpu", "torch==2.13.0")),
        (False, False, ("torch==2.13.0",)),
    ],
)
def test_torch_comes_first_and_fits_the_machine(
    setup: ModuleType,
    installs: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
    index_answers: bool,
    expected: tuple[str, ...],
) -> None:
    monkeypatch.setattr(setup, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(setup, "answers", lambda url: index_answers)
    assert setup.main() == 0
    mentions = [i for i in installs if any(a.startswith("torch") for a in i)]
    assert mentions[0] == expected
    rest = installs[installs.index(mentions[1])]
    assert ("triton>=3.6,<3.10; sys_platform == 'linux'" in rest) == gpu
    # Without a GPU one release, the partner of the CPU torch: torch itself brings none there.
    assert ((setup.TRITON_CPU,) in installs) == (not gpu)
    assert installs[-1][:3] == ("--no-deps", "--no-build-isolation", "--editable")
    asks = json.loads((setup.VENV / "share/jupyter/lab/settings/overrides.json").read_text())
    assert asks["@jupyterlab/apputils-extension:notification"] == {"fetchNews": "false"}


def test_a_fitting_torch_is_kept(
    setup: ModuleType, installs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "torch_is_fitting", lambda python: True)
    setup.install_torch(Path(sys.executable), gpu=False)
    assert installs == []


def test_second_run_installs_nothing_until_something_changes(
    setup: ModuleType, installs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(setup, "answers", lambda url: False)
    setup.main()
    first = len(installs)
    setup.main()
    assert len(installs) == first > 0
    monkeypatch.setattr(setup, "has_nvidia_gpu", lambda: True)  # a GPU was added
    setup.main()
    assert len(installs) > first


def test_failed_install_leaves_no_stamp(
    setup: ModuleType, installs: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(python: Path, *arguments: str) -> None:
        sys.exit("pip failed")

    monkeypatch.setattr(setup, "pip", fail)
    monkeypatch.setattr(setup, "has_nvidia_gpu", lambda: False)
    with pytest.raises(SystemExit, match="pip failed"):
        setup.main()
    assert not setup.STAMP.exists()


def test_torch_of_this_environment_is_recognised(setup: ModuleType) -> None:
    assert setup.torch_is_fitting(Path(sys.executable))


@pytest.mark.parametrize(
    ("version", "fits"), [("2.10.1", False), ("2.11.0+cpu", True), ("2.14.0", False), ("", False)]
)
def test_range_of_torch(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0 if version else 1, version, "")

    monkeypatch.setattr(setup.subprocess, "run", run)
    assert setup.torch_is_fitting(Path("python")) == fits


def test_an_index_that_accepts_and_says_nothing_is_given_up(setup: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not setup.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/torch/", seconds=0.5)


def test_driver_tool_that_hangs_or_fails_means_no_gpu(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    assert not setup.has_nvidia_gpu()
    monkeypatch.setattr(setup.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(setup.subprocess, "run", hang)
    assert not setup.has_nvidia_gpu()
    listed = subprocess.CompletedProcess([], 0, "GPU 0: NVIDIA H200 (UUID: x)\n", "")
    monkeypatch.setattr(setup.subprocess, "run", lambda *_, **__: listed)
    assert setup.has_nvidia_gpu()


def test_declared_versions_agree(setup: ModuleType) -> None:
    """The range for torch and the extras are named in the metadata and in set-up."""
    assert setup.TORCH_RANGE in setup.requirements(())
    assert set(setup.BASE_EXTRAS) | {"gpu", "peers"} == set(_extras())
    (triton,) = (r for r in setup.requirements(("gpu",)) if r.startswith("triton"))
    assert Requirement(triton).specifier.contains(Requirement(setup.TRITON_CPU).specifier.__str__()[2:])


def _extras() -> list[str]:
    import tomllib

    return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
