"""Make .venv ready for this checkout: create it, choose a torch build, install the rest, remember it.

Run through `make setup`; needs only the standard library. A stamp in .venv holds a hash of everything that
decides what is installed, so a second run installs nothing; a .venv that is there is kept and completed.
Torch comes first and alone, because an open version range on a machine without a GPU may pull gigabytes of
CUDA libraries. With an NVIDIA GPU the configured index serves; without one, PyTorch's own CPU index when it
answers within three seconds, else exactly one release from the configured index.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / ".workbench-setup"
PYTHON_FLOOR = (3, 11)
TORCH_RANGE = "torch>=2.11,<2.14"
TORCH_CPU = "torch==2.13.0"
TRITON_CPU = "triton==3.7.1"  # the release that torch 2.13 is built with
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BASE_EXTRAS = ("lab", "codec", "grammar", "formats", "dev")


def main() -> int:
    """Set up, unless the stamp says that nothing has changed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--force", action="store_true", help="install again although nothing changed")
    args = parser.parse_args()

    if sys.version_info < PYTHON_FLOOR:
        return _continue_with_newer_python()
    gpu = has_nvidia_gpu()
    extras = (*BASE_EXTRAS, "gpu") if gpu else BASE_EXTRAS
    fingerprint = fingerprint_of(extras)
    if not args.force and STAMP.is_file() and STAMP.read_text() == fingerprint:
        return 0

    python = ensure_venv()
    pip(python, "setuptools>=77")
    install_torch(python, gpu)
    if not gpu and sys.platform == "linux":
        # A CPU build of torch brings no triton; kernels are interpreted and compiled ahead of time with it.
        pip(python, TRITON_CPU)
    pip(python, *requirements(extras))
    pip(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    quiet_lab()
    STAMP.write_text(fingerprint)
    print(f"ready: {VENV.name} with {', '.join(extras)}")
    return 0


def fingerprint_of(extras: Sequence[str]) -> str:
    """Hash of all that decides what set-up installs: metadata, this file, the place, and the extras."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{ROOT}\n{','.join(extras)}".encode())  # an editable install is bound to its folder
    return digest.hexdigest()


def requirements(extras: Sequence[str]) -> list[str]:
    """Core dependencies and those of the extras, as pyproject.toml states them."""
    import tomllib  # not in the older Pythons that main() hands over from

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


def ensure_venv() -> Path:
    """Return the interpreter of .venv, created if it is not there."""
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        print("creating .venv")
        try:
            venv.create(VENV, with_pip=True, symlinks=os.name != "nt")
        except subprocess.CalledProcessError:
            sys.exit("venv cannot install pip here (Debian and Ubuntu: apt-get install python3-venv)")
    version = tuple(map(int, _output(python, "-c", "import sys; print(*sys.version_info[:2])").split()))
    if version < PYTHON_FLOOR:
        sys.exit(f".venv has Python {version[0]}.{version[1]}; remove it and run again with 3.11 or newer")
    return python


def install_torch(python: Path, gpu: bool) -> None:
    """Install a torch build that fits the machine, unless a fitting release is already there."""
    if torch_is_fitting(python):
        return
    if gpu:
        pip(python, TORCH_RANGE)
    elif sys.platform == "linux" and answers(CPU_INDEX + "/torch/"):
        pip(python, "--index-url", CPU_INDEX, TORCH_CPU)
    else:
        pip(python, TORCH_CPU)


def quiet_lab() -> None:
    """Keep JupyterLab from asking, over the first notebook, whether it may fetch news: here it may not."""
    folder = VENV / "share" / "jupyter" / "lab" / "settings"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}
    (folder / "overrides.json").write_text(json.dumps(settings))


def torch_is_fitting(python: Path) -> bool:
    """Whether .venv already has a torch of the supported range, looked up without importing it."""
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    result = subprocess.run([python, "-c", probe], capture_output=True, text=True)
    found = re.match(r"(\d+)\.(\d+)", result.stdout)
    return bool(found) and (2, 11) <= tuple(map(int, found.groups())) < (2, 14)


def has_nvidia_gpu() -> bool:
    """Whether the driver's own tool lists a GPU; the driver library itself is never loaded."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return False
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def answers(url: str, seconds: float = 3.0) -> bool:
    """Whether a URL answers in time; in a process of its own, as a stalled name look-up cannot be stopped."""
    code = f"import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout={seconds}).read(1)"
    try:
        done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def pip(python: Path, *arguments: str) -> None:
    """Install with the environment's pip; end the set-up with pip's own status when it fails."""
    command = [python, "-m", "pip", "install", "-qq", "--retries", "2", "--disable-pip-version-check"]
    print("pip install", " ".join(a.replace(str(ROOT), ".") for a in arguments), flush=True)
    # Not from the root: there the folders kernels/ and widgets/ would shadow packages of those names.
    done = subprocess.run([*command, *arguments], cwd=tempfile.gettempdir(), stdin=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(f"pip failed with status {done.returncode}; run again to go on where it stopped")


def _output(python: Path, *arguments: str) -> str:
    return subprocess.run([python, *arguments], check=True, capture_output=True, text=True).stdout


def _continue_with_newer_python() -> int:
    for name in ("python3.14", "python3.13", "python3.12", "python3.11"):
        found = shutil.which(name)
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return subprocess.run([found, *sys.argv]).returncode
    have = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"Python 3.11 or newer is needed, this is {have}; name one with: make PYTHON=/path/to/python")


if __name__ == "__main__":
    sys.exit(main())
