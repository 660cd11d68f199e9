"""Ahead-of-time compilation of kernels to Hopper machine code, on any machine, without a GPU.

``compile_builds`` hands builds to worker processes (see `aot_worker`), two at a time, and returns what was
counted in their machine code. Results are cached by kernel source, configuration and triton version, so a
second run costs seconds. Another triton than the installed one can be named by its folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.kernels import CATALOGUE, load
from workbench.kernels.sass import Facts
from workbench.kernels.spec import Build, Kernel
from workbench.spec.errors import CompilerError, MissingExtra

HOPPER, BLACKWELL = 90, 100


@dataclass(frozen=True)
class Request:
    """One build to compile: ``module`` is a dotted name or the path of a file, ``arch`` 90 or 100."""

    module: str
    kernel: Kernel
    build: Build
    arch: int = HOPPER

    @property
    def label(self) -> str:
        """Kernel, build and target in one line."""
        return f"{self.kernel.name} · {self.build.name} · sm_{self.arch}a"


@dataclass(frozen=True)
class Compiled:
    """What became of a request: facts and the path of the disassembly, or the compiler's error."""

    request: Request
    triton: str = ""
    facts: Facts | None = None
    sass: str = ""
    error: str = ""
    seconds: float = 0.0
    cached: bool = False

    def broken(self) -> list[str]:
        """Bounds that do not hold, or that it does not compile; a negative control must have some."""
        if self.facts is None:
            return [f"does not compile: {self.error.splitlines()[0] if self.error else 'no reason given'}"]
        return self.facts.broken(self.request.build)

    def as_promised(self) -> bool:
        """Whether all bounds hold; of a negative control, that it compiles and some do not."""
        return bool(self.broken()) == self.request.build.fails and self.facts is not None


Progress = Callable[[int, int, Compiled], None]


def requests(names: Sequence[str] | None = None, arch: int = HOPPER) -> list[Request]:
    """All builds of the named kernel files, or of the whole catalogue."""
    return [
        Request(CATALOGUE[name], kernel, build, arch)
        for name in (CATALOGUE if names is None else names)
        for kernel in load(name)
        for build in kernel.builds
    ]


def compile_builds(
    wanted: Sequence[Request],
    *,
    triton: Path | None = None,
    jobs: int = 2,
    timeout: float = 600.0,
    progress: Progress | None = None,
) -> list[Compiled]:
    """Compile ``wanted`` in order and return one result each, failures included.

    ``triton`` is a folder with another triton (``pip install --no-deps --target``); ``timeout`` seconds hold
    per build; ``progress(done, total, result)`` is called as results arrive. Raises ``MissingExtra`` when
    there is no triton, ``CompilerError`` when the folder holds none.
    """
    _check_triton(triton)
    results: list[Compiled | None] = [None] * len(wanted)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(wanted)):
        todo.put(i)
    lock = threading.Lock()

    workers = [_Worker(triton, timeout) for _ in range(min(jobs, len(wanted)))]

    def work(worker: _Worker) -> None:
        with worker:
            while True:
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                result = worker.compile(wanted[i])
                with lock:
                    results[i] = result
                    if progress is not None:
                        progress(sum(r is not None for r in results), len(wanted), result)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:  # interrupted: begin nothing more, and end what runs
        while not todo.empty():
            todo.get_nowait()
        for worker in workers:
            worker.kill()
    return [r for r in results if r is not None]


def cache_folder() -> Path:
    """``$WORKBENCH_CACHE/kernels``, else ``~/.cache/inference-workbench/kernels``."""
    return Path(os.environ.get("WORKBENCH_CACHE") or "~/.cache/inference-workbench").expanduser() / "kernels"


@functools.cache
def _spare() -> tempfile.TemporaryDirectory[str]:
    """Where disassemblies are that the cache cannot take; gone with this process."""
    return tempfile.TemporaryDirectory(prefix="workbench-kernels-")


def _check_triton(folder: Path | None) -> None:
    from importlib.util import find_spec

    if folder is None:
        if find_spec("triton") is None:
            raise MissingExtra("triton", "gpu", "Compiling kernels")
    elif not (folder / "triton" / "__init__.py").is_file():
        raise CompilerError(
            f"The folder {folder} holds no triton.",
            hint="Fill it with: pip install --no-deps --target FOLDER triton==VERSION.",
        )


class _Worker:
    """One worker process, started when first needed and again after it died or hung."""

    def __init__(self, triton: Path | None, timeout: float) -> None:
        self._triton, self._timeout = triton, timeout
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def compile(self, request: Request) -> Compiled:
        """Compile one build; a dead or late worker is an error of that build only."""
        message = {
            "module": request.module,
            "kernel": request.kernel.name,
            "build": request.build.name,
            "arch": request.arch,
            "cache": str(cache_folder()),
            "spare": _spare().name,
        }
        process = self._started()
        late = threading.Timer(self._timeout, process.kill)
        late.start()
        line = ""
        # A compiler that aborts closes the pipe: that is an answer too.
        with contextlib.suppress(BrokenPipeError):
            if process.stdin is not None and process.stdout is not None:
                process.stdin.write(json.dumps(message) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
        late.cancel()
        if not line:
            code = process.wait()
            self._stop()
            reason = f"took more than {self._timeout:g} s" if code == -9 else f"ended with status {code}"
            return Compiled(request, error=f"the compiler {reason}")
        return _compiled(request, json.loads(line))

    def kill(self) -> None:
        """End the process at once; its build counts as failed."""
        if self._process is not None:
            self._process.kill()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workbench.kernels.aot_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=self._environment(),
            )
        return self._process

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
        environment.pop("TRITON_INTERPRET", None)
        environment["OMP_NUM_THREADS"] = "1"
        if self._triton is not None:
            path = [str(self._triton), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
        return environment

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            process.wait()


def _compiled(request: Request, answer: dict[str, Any]) -> Compiled:
    if "error" in answer:
        return Compiled(request, error=answer["error"])
    facts = answer["facts"]
    return Compiled(
        request,
        triton=answer["triton"],
        facts=Facts(**{**facts, "windows": tuple(facts["windows"]), "warnings": tuple(facts["warnings"])}),
        sass=answer["sass"],
        seconds=answer["seconds"],
        cached=answer["cached"],
    )
