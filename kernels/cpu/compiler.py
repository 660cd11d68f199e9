"""Compiles the C++ kernels for this CPU, once per source, compiler and machine.

The result is a shared library in a cache folder, named by everything that shaped it. It appears under its
name only when it is complete; processes that want the same one wait for the first. It ends with a digest of
itself: a file that a crash or a full disk cut short is made again, because loading it would end the process.
OpenMP must be torch's own runtime: a second one would bring a second set of threads to the same cores.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from workbench.spec.errors import CompilerError

SOURCE = Path(__file__).parent / "source"
FLAGS = ("-std=c++20", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-w")
NATIVE = ("-march=native",)
TIMEOUT = 600.0
"""Seconds a compiler may take for one file; it needs about two, of a machine that does nothing else."""
_DIGEST = hashlib.sha256().digest_size

BUSY = "Try again when the machine does less else, or name another compiler in CXX."
INSTALL = "Install a C++ compiler (Debian and Ubuntu: apt-get install g++) or name one in CXX."


def find() -> str | None:
    """Path of the C++ compiler: ``$CXX``, else g++, c++ or clang++; None where there is none."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    return next(filter(None, map(shutil.which, wanted)), None)


def none_found() -> CompilerError:
    """Why :func:`find` gives nothing: ``$CXX`` names no program, or there is no compiler at all."""
    named = os.environ.get("CXX")
    if not named:
        return CompilerError("There is no C++ compiler on this machine.", hint=INSTALL)
    return CompilerError(
        f"CXX names {named!r}, which is no program on this machine.",
        hint="Set CXX to the name or path of a C++ compiler, without arguments, or unset it.",
    )


def supported() -> bool:
    """Whether the kernels are known to build on this kind of system: Linux, 64 bits, little-endian."""
    return sys.platform == "linux" and sys.maxsize > 2**32 and sys.byteorder == "little"


def build(folder: Path, flags: Sequence[str] = NATIVE) -> Path:
    """The compiled library in ``folder``; compiles when it is not there yet.

    Raises :class:`CompilerError` without a compiler, when it fails (quoting it), and when the folder cannot
    be written.
    """
    compiler = find()
    if compiler is None:
        raise none_found()
    sources = _sources()
    target = folder / f"{key(compiler, flags, sources)}.so"
    if whole(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "compile.lock", timeout=2 * TIMEOUT):
            if not whole(target):
                _compile(compiler, flags, sources, target)
    except (OSError, Timeout) as error:
        raise CompilerError(
            f"The compiled kernels cannot be kept in {folder}: {error}.",
            hint="Set WORKBENCH_CACHE to a folder that can be written.",
        ) from None
    return target


def whole(library: Path) -> bool:
    """Whether a library is there and as it was made: its last bytes are the digest of those before."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return len(data) > _DIGEST and hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def key(compiler: str, flags: Sequence[str], sources: Mapping[str, str] | None = None) -> str:
    """Name of the library: a digest of source, compiler, flags, processor and OpenMP runtime."""
    parts = [_version(compiler), *FLAGS, *flags, str(_runtime()), _processor()]
    parts += [f"{name}\n{text}" for name, text in (_sources() if sources is None else sources).items()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _sources() -> dict[str, str]:
    """All files by name, read once: what is compiled is what the name of the library says."""
    return {path.name: path.read_text("utf-8") for path in sorted(SOURCE.iterdir())}


def _compile(compiler: str, flags: Sequence[str], sources: Mapping[str, str], target: Path) -> None:
    runtime = _runtime()
    for left in target.parent.glob(".compile-*"):  # of a process that was ended; the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=target.parent) as scratch:
        for name, text in sources.items():
            Path(scratch, name).write_text(text, "utf-8")
        units = [name for name in sources if name.endswith(".cpp")]
        objects = [f"{scratch}/{unit}.o" for unit in units]
        base = [compiler, *FLAGS, *flags, "-c"]
        with ThreadPoolExecutor(len(units)) as pool:
            commands = ([*base, f"{scratch}/{u}", "-o", o] for u, o in zip(units, objects, strict=True))
            list(pool.map(_call, commands))
        made = f"{scratch}/kernels.so"
        openmp = ["-fopenmp"] if runtime is None else [str(runtime), f"-Wl,-rpath,{runtime.parent}"]
        _call([compiler, "-shared", *objects, "-o", made, *openmp])
        with Path(made).open("ab") as file:  # behind what a loader reads
            file.write(hashlib.sha256(Path(made).read_bytes()).digest())
        Path(made).replace(target)


def _call(command: Sequence[str]) -> None:
    """Run one compiler command. Raises :class:`CompilerError` with the end of what it said."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise CompilerError(f"{name} did not finish within {TIMEOUT:.0f} seconds.", hint=BUSY) from None
    except OSError as error:
        raise CompilerError(f"{name} cannot be run: {error.strerror}.", hint=INSTALL) from None
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
        raise CompilerError(f"{name} could not compile the CPU kernels:\n{said}", hint=INSTALL)


@cache
def _version(compiler: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [compiler, "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
        return f"{compiler} {said.stdout}"
    return compiler


@cache
def _processor() -> str:
    """What ``-march=native`` stands for: the model and features of the processor."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").split("\n\n")[0].splitlines()
        return "\n".join(x for x in lines if x.startswith(("model name", "flags", "Features", "CPU part")))
    return platform.machine()


@cache
def _runtime() -> Path | None:
    """The OpenMP library that torch brings along, or None where it uses the system's."""
    import torch

    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return found[0] if found else None
