"""The process that touches the GPU: requests as JSON lines on stdin, parts of answers on the original stdout.

Each request ends with ``{"end": true}``, or with ``{"error": …, "lost": …}``; a lost device means that this
process is of no more use. Whatever torch or triton print goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from workbench.kernels import interpreter
from workbench.kernels.bench import roster, tasks
from workbench.kernels.bench.case import Lab
from workbench.spec.errors import WorkbenchError


def main() -> None:
    """Answer requests until stdin ends."""
    # What compilers print from C++ must not land between the answers either.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda")
    interpreter.repair()

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(_finite(line)), file=answers, flush=True)

    say({"ready": True})
    for text in sys.stdin:
        try:
            for part in parts(json.loads(text), device):
                say(part)
            say({"end": True})
        except Exception as error:  # the compiler's and the driver's errors have no common base
            traceback.print_exc(file=sys.stderr)
            say({"error": described(error), "lost": lost(device)})


def parts(request: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Run one request: ``do`` is facts, ceiling, prepare, check or timed; these three name `case`, `seed`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the case before held, its graphs included
    match request["do"]:
        case "facts":
            yield from tasks.facts(device)
        case "ceiling":
            yield from tasks.ceiling(device)
        case what:
            chosen, lab = roster.find(request["case"]), Lab(device, request["seed"])
            task = {"prepare": tasks.prepare, "check": tasks.check, "timed": tasks.timed}[what]
            yield from task(chosen, lab)


def described(error: Exception) -> str:
    """An error in a few lines, with the way out where it has one."""
    hint = f" {error.hint}" if isinstance(error, WorkbenchError) and error.hint else ""
    return f"{type(error).__name__}: {str(error)[:1500]}{hint}"


def lost(device: torch.device) -> bool:
    """Whether the device answers no more, as after an illegal access."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
