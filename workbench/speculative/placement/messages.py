"""What the target's side and the drafter's side say to each other, as plain data.

The committed ids of a stream only ever grow, so their number names them: every draft says the length it was
made for (``base_len``), and whoever holds another length drops it. A stream is one life of a sequence: when a
sequence starts over after a preemption it is another stream, so nothing of its first life can be mistaken.
Sent as JSON, one message a line. SwiftSpec (arXiv 2506.11309) has the roles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from workbench.spec.errors import PayloadError

ROOT = -1
"""The node below which drafts hang: the newest committed token."""

_EXACT = ConfigDict(extra="forbid", strict=False)


@checked(frozen=True, config=_EXACT)
class DraftSync:
    """Target to drafter: a stream starts, with these committed ids, at least one."""

    stream: int
    tokens: tuple[int, ...]


@checked(frozen=True, config=_EXACT)
class VerifyCommit:
    """Target to drafter: ``tokens`` (the accepted path and the target's own) follow ``pre_len`` ids."""

    stream: int
    pre_len: int
    tokens: tuple[int, ...]


@checked(frozen=True, config=_EXACT)
class TailNode:
    """One drafted token: its absolute position, and the logarithm of its chance given its parent.

    ``id`` and ``parent`` are numbers of the drafter's, unique within a stream; :data:`ROOT` is the root.
    """

    id: int
    parent: int
    pos: int
    token: int
    chance: float


@checked(frozen=True, config=_EXACT)
class TailStream:
    """Drafter to target: nodes to be added to the tree below the first ``base_len`` ids, parents first.

    ``reused``: they were there when the verdict came.
    """

    stream: int
    base_len: int
    nodes: tuple[TailNode, ...]
    reused: bool = False


@checked(frozen=True, config=_EXACT)
class Candidates:
    """Target to drafter: what a proxy says may follow at each place of the window behind ``base_len`` ids.

    ``places[i]``: (token, logarithm of its chance) behind ``i`` drafts of the window, likeliest first.
    """

    stream: int
    base_len: int
    places: tuple[tuple[tuple[int, float], ...], ...]


@checked(frozen=True, config=_EXACT)
class Close:
    """Target to drafter: a stream ended; None: all did, and so does the drafter."""

    stream: int | None = None


@checked(frozen=True, config=_EXACT)
class Ready:
    """Drafter to target: its model is loaded; ``cores`` it may run on (empty: any), ``nbytes`` of weights."""

    cores: tuple[int, ...] = ()
    nbytes: int = 0


@checked(frozen=True, config=_EXACT)
class Worked:
    """Drafter to target: one batch, in seconds of the system's monotonic clock; ``held``: bytes of its KV."""

    start: float
    end: float
    rows: int
    nodes: int
    held: int = 0


Message = DraftSync | VerifyCommit | Candidates | TailStream | Close | Ready | Worked


_KINDS: Mapping[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Message)}


def to_line(message: Message) -> str:
    """One line of JSON, without its end."""
    return json.dumps([type(message).__name__, asdict(message)], separators=(",", ":"))


def from_line(line: str) -> Message:
    """The message of :func:`to_line`; raises :class:`PayloadError` for anything else."""
    try:
        kind, body = json.loads(line)
        made: Message = _KINDS[kind].validate_python(body)
    except (ValueError, TypeError, KeyError, ValidationError) as err:
        raise PayloadError(
            f"A message between drafter and target cannot be read: {line[:80]!r}.",
            hint="Run both sides from one version.",
        ) from err
    return made
