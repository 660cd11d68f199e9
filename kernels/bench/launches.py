"""What a wrapper launches: compiled without running, or recorded so that the launches alone can be timed.

Every launch of a Triton or Gluon kernel goes through ``JITFunction.run``; for the length of a ``with`` block
it does something else. Nothing about a wrapper changes, so what is compiled ahead is exactly what will run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Launches:
    """Launches of one call, in order; calling it launches them again on the same arguments."""

    made: list[tuple[Any, tuple[Any, ...], Any, dict[str, Any]]] = field(default_factory=list)

    def __call__(self) -> None:
        for function, arguments, grid, options in self.made:
            function.run(*arguments, grid=grid, warmup=False, **options)


@contextlib.contextmanager
def compile_only() -> Iterator[Launches]:
    """Kernels are compiled and loaded, not launched; outputs stay as they were. Yields what was compiled."""
    with _replaced(launch=False) as seen:
        yield seen


@contextlib.contextmanager
def recorded() -> Iterator[Launches]:
    """Kernels are launched and remembered."""
    with _replaced(launch=True) as seen:
        yield seen


@contextlib.contextmanager
def _replaced(launch: bool) -> Iterator[Launches]:
    from triton.runtime.jit import JITFunction

    seen, original = Launches(), JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        seen.made.append((self, arguments, grid, dict(options)))
        return original(self, *arguments, grid=grid, warmup=warmup or not launch, **options)

    JITFunction.run = run
    try:
        yield seen
    finally:
        JITFunction.run = original
