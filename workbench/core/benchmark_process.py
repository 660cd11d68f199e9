"""A benchmark in a fresh process: the ``bench`` profile.

OpenMP and the allocator read their settings once, when torch is imported; so a process is started with them
set (waiting threads spin, huge pages for the heap: 4 to 12 % on two cores, and less noise). Settings go in
and events come out as JSON lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any

from pydantic import TypeAdapter

from workbench.core.benchmark import BenchSettings, Tell, run_benchmark
from workbench.models.progress import Cancel
from workbench.spec import errors
from workbench.spec.errors import Cancelled, JobFailed, PlanError, WorkbenchError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

BENCH_VARIABLES = {"OMP_WAIT_POLICY": "active", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_RUN: TypeAdapter[Run] = TypeAdapter(Run)


def bench_environment(threads: int | None = None, *, spin: bool = True) -> dict[str, str]:
    """This process's environment with the settings of the bench profile; without ``spin``, threads that wait
    for more than a moment leave their core to others."""
    out = {**os.environ, **BENCH_VARIABLES}
    if not spin:
        out.pop("OMP_WAIT_POLICY")
    out.pop("GOMP_SPINCOUNT", None)  # it would overrule the policy
    if threads is not None:
        out |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return out


def benchmark_in_fresh_process(
    settings: BenchSettings,
    *,
    threads: int | None = None,
    tell: Tell = lambda done, total, message: None,
    cancel: Cancel | None = None,
) -> Run:
    """Run a benchmark in the bench profile.

    Raises the :class:`WorkbenchError` it ends with, :class:`Cancelled`, or :class:`JobFailed` with what the
    process said last.
    """
    settings.chosen()  # refuse wrong names before a process is started
    spin = settings.name != "two_places"  # there the other core belongs to another process
    call = Call(f"The benchmark {settings.name}", __name__, settings_to_dict(settings), spin)
    return run_in_fresh_process(call, threads=threads, tell=tell, cancel=cancel)


@dataclass(frozen=True)
class Call:
    """What a fresh process is for: ``what`` in words, the module whose ``main`` it runs, and its settings.

    ``spin``: whether its threads keep their cores while they wait for each other.
    """

    what: str
    module: str
    settings: Mapping[str, Any]
    spin: bool = True


def run_in_fresh_process(
    call: Call,
    *,
    threads: int | None = None,
    tell: Tell = lambda done, total, message: None,
    cancel: Cancel | None = None,
) -> Run:
    """The run that ``call`` comes to in the bench profile; raises as :func:`benchmark_in_fresh_process`."""
    command = [sys.executable, "-c", f"from {call.module} import main; main()"]
    with subprocess.Popen(  # noqa: S603 - this interpreter, fixed code
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=bench_environment(threads, spin=call.spin),
    ) as process:
        complaints: list[str] = []
        drain = threading.Thread(target=_drain, args=(process.stderr, complaints), daemon=True)
        drain.start()
        try:
            result = _talk(process, call, tell, cancel)
        except BaseException:
            process.terminate()
            raise
    drain.join(5.0)
    if result is None:
        tail = "".join(complaints)[-2000:]
        raise JobFailed("Benchmark", f"its process ended with {process.returncode}", traceback_text=tail)
    return result


def main() -> None:
    """The child of a named benchmark."""
    answer(lambda settings, tell: run_benchmark(settings_from_dict(settings), tell))


def answer(work: Callable[[Mapping[str, Any], Tell], Run]) -> None:
    """In the child: settings as one JSON line on stdin; progress, then the run or its error, on stdout."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else prints goes to stderr
    settings = json.loads(sys.stdin.readline())

    def send(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        run = work(settings, lambda done, total, text: send({"progress": [done, total, text]}))
        send({"run": run.to_dict()})
    except WorkbenchError as err:
        send(err.to_dict())


def settings_to_dict(settings: BenchSettings) -> dict[str, Any]:
    """JSON form of the settings."""
    return {**asdict(settings), "recipes": [r.to_json() for r in settings.recipes], "profile": "bench"}


def settings_from_dict(data: Mapping[str, Any]) -> BenchSettings:
    """The settings of :func:`settings_to_dict`."""
    recipes = tuple(Recipe.from_json(r) for r in data["recipes"])
    lists = {name: tuple(data[name]) for name in ("peers", "cells")}
    return BenchSettings(**{**data, **lists, "recipes": recipes})


def _talk(process: subprocess.Popen[str], call: Call, tell: Tell, cancel: Cancel | None) -> Run | None:
    if process.stdin is None or process.stdout is None:
        return None
    process.stdin.write(json.dumps(call.settings) + "\n")
    process.stdin.close()
    for line in process.stdout:
        if cancel is not None and cancel():
            raise Cancelled(f"{call.what} was cancelled.")
        message = json.loads(line)
        if "progress" in message:
            done, total, text = message["progress"]
            tell(done, total, text)
        elif "run" in message:
            return _RUN.validate_python(message["run"])
        else:
            raise _error(message)
    return None


def _error(message: Mapping[str, str]) -> WorkbenchError:
    kind: Callable[..., Any] = getattr(errors, message.get("error", ""), WorkbenchError)
    plain = (
        isinstance(kind, type)
        and issubclass(kind, WorkbenchError)
        and kind.__init__ in (WorkbenchError.__init__, PlanError.__init__)
    )
    made: WorkbenchError = (kind if plain else WorkbenchError)(
        message["message"], hint=message.get("hint", "")
    )
    return made


def _drain(stream: IO[str] | None, into: list[str]) -> None:
    if stream is not None:
        into.extend(stream)
