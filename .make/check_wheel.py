"""Build the wheel and import the workbench from it, away from the checkout: `make wheel`.

The wheel is unpacked into an empty folder that comes before .venv's packages on the path, so that its real
files are tested and the dependencies need no second installation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Runs with the unpacked wheel first on the path. Every module is imported, except entry points that act on
# import and modules whose optional dependency is missing here.
PROBE = """
import importlib, importlib.metadata, pathlib, pkgutil, sys
site = pathlib.Path(sys.argv[1]).resolve()
import workbench
assert pathlib.Path(workbench.__file__).resolve().is_relative_to(site), workbench.__file__
count, missing = 0, []
for found in pkgutil.walk_packages(workbench.__path__, "workbench."):
    if found.name.endswith("__main__"):
        continue
    try:
        module = importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if (error.name or "workbench").partition(".")[0] == "workbench":
            raise
        missing.append(f"{found.name} ({error.name})")
        continue
    assert pathlib.Path(module.__file__).resolve().is_relative_to(site), module.__file__
    count += 1
for name in ("workbench.kernels", "workbench.widgets"):
    assert name in sys.modules, name
data = pathlib.Path(workbench.__path__[0]) / "_data"
names = sorted(p.name for p in data.iterdir()) if data.is_dir() else []
print(f"imported {count} modules from the wheel; data: {', '.join(names) or 'none'}")
if missing:
    print("without their optional dependency:", ", ".join(missing))
"""


def main() -> int:
    """Build, list, unpack, import; the exit status of the import."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        site = Path(folder) / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
            tops = {name.split("/")[0] for name in archive.namelist()}
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        strangers = {top for top in tops if top != "workbench" and not top.endswith(".dist-info")}
        if strangers:
            print(f"the wheel would install more than workbench: {sorted(strangers)}", file=sys.stderr)
            return 1
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(
            [sys.executable, "-c", PROBE, str(site)], cwd=folder, env=environment
        ).returncode


def build(folder: Path) -> Path:
    """Build sdist and wheel-from-sdist with the installed setuptools, and return the wheel's path."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-4000:] + done.stderr[-4000:])
    return next(folder.glob("*.whl"))


if __name__ == "__main__":
    sys.exit(main())
