"""``workbench``: the commands, and what happens when one fails.

Only the command-line library and plain data are imported here; torch is loaded by the command that needs it,
so that help and refusals come at once.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from workbench.cli import (
    benching,
    catalogue,
    generate,
    gpu_check,
    kernels,
    launch,
    measuring,
    saving,
    stored,
    sweeping,
    training,
)
from workbench.cli.failure import report
from workbench.cli.output import only_json
from workbench.cli.start import HINT, MESSAGE
from workbench.spec.errors import Cancelled, StorageError

app = typer.Typer(
    name="workbench",
    help="Run, compose and measure LLM inference techniques.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Name what the library would make a bare exit status, Ctrl-C or a reader that left, as ``head``; and a
    disk that is full, where what is printed goes to a file."""

    @functools.wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise Cancelled(MESSAGE, hint=HINT) from None
        except BrokenPipeError:
            _forget_stdout()
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            raise StorageError(
                f"{error.filename or 'The output'} cannot be written: {error.strerror}.",
                hint="Free some space, or write to another place.",
            ) from None

    return guarded


def _forget_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's own flush at exit does not fail."""
    if sys.__stdout__ is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
COMMANDS: dict[str, Callable[..., None]] = {
    "list": catalogue.list_techniques,
    "plan": catalogue.plan_recipe,
    "run": generate.run,
    "save-cache": saving.save_cache,
    "measure": measuring.measure,
    "sweep": sweeping.sweep,
    "bench": benching.bench,
    "kernels": kernels.list_kernels,
    "gpu-check": gpu_check.gpu_check,
    "train": training.train,
    "runs": stored.list_runs,
    "compare": stored.compare_runs,
    "export": stored.export_runs,
    "fetch": launch.fetch_model,
    "lab": launch.lab,
    "doctor": launch.doctor,
}
for name, command in COMMANDS.items():
    settings = PASS_ON if name == "lab" else {}
    app.command(name, context_settings=settings)(_guarded(command))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every exception becomes a message."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    with only_json(as_json):
        try:
            status = typer.main.get_command(app).main(given, prog_name="workbench", standalone_mode=False)
        except Exception as error:
            status = _reported(error, as_json)
    return status if isinstance(status, int) else 0


def _reported(error: Exception, as_json: bool) -> int:
    try:
        status = report(error, as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return 1
    except OSError:  # it is stdout that is full: what there is to say goes to stderr
        _forget_stdout()
        return report(error, as_json=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
