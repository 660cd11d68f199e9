"""From an exception to what a person or a program reads, and to the exit status.

A person reads what happened, where, and the way out; with ``--json`` stdout carries
``{"error", "message", "hint"}`` and, for recipes that do not fit, the conflicts. Statuses: 2 a command line
or recipe that cannot be used, 3 a model, 4 a request, 5 the run store or a full disk, 6 kernels, 130
cancelled, 1 anything else.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from workbench.cli.output import print_json
from workbench.spec.errors import JobFailed, PlanError, WorkbenchError
from workbench.spec.plan import Conflict

USAGE = 2


def describe(error: Exception) -> tuple[dict[str, Any], int]:
    """JSON form and exit status of any exception."""
    if isinstance(error, WorkbenchError):
        data: dict[str, Any] = dict(error.to_dict())
        if isinstance(error, PlanError):
            conflicts = [c for c in error.conflicts if isinstance(c, Conflict)]
            data["conflicts"] = [c.to_dict() for c in conflicts]
        return data, error.exit_code
    if hasattr(error, "format_message"):  # a usage error of the command-line library
        return {"error": "UsageError", "message": error.format_message(), "hint": usage_hint(error)}, USAGE
    return {
        "error": type(error).__name__,
        "message": str(error) or "An unexpected error.",
        "hint": "This is a bug; the traceback on stderr says where.",
    }, 1


def usage_hint(error: Any) -> str:
    """Which help page lists what the command takes."""
    context = getattr(error, "ctx", None)
    return f"See: {context.command_path} --help" if context is not None else "See: workbench --help"


def report(error: Exception, as_json: bool) -> int:
    """Print an exception for a person or a program; returns the exit status."""
    data, status = describe(error)
    if isinstance(error, JobFailed):
        print(error.traceback_text, file=sys.stderr)
    elif status == 1 and not isinstance(error, WorkbenchError):
        traceback.print_exception(error, file=sys.stderr)
    if as_json:
        print_json(data)
        return status
    if isinstance(error, PlanError) and error.conflicts:
        print("error: the recipe does not fit", file=sys.stderr)
        for c in data["conflicts"]:
            print(f"  {c['first']} × {c['second']} ({c['resource']})\n  → {c['remedy']}", file=sys.stderr)
    else:
        print(f"error: {data['message']}", file=sys.stderr)
        if data["hint"]:
            print(f"  → {data['hint']}", file=sys.stderr)
    return status
