"""What the training of every head has in common: one at a time per data set, a folder and a key of its own.

A key names everything that shapes the outcome; a run with the same key goes on where it stopped, one with
another key is another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workbench.models.cache import cache_dir, locked
from workbench.models.heads import HeadFile, read_head, target_name, write_head
from workbench.models.progress import Cancel, Progress, part, report
from workbench.training.checkpoint import Progress as State
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.heap import keep_small
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.shards import DataSettings, Shards
from workbench.training.heads.target import Target, open_target

VOCAB_KEPT = 8192
"""Ids that are drafted from."""
VOCAB_LISTED = 16384
"""Ids listed in a head's file, most frequent first: what can be drafted from, at most, but for all tokens."""


@contextmanager
def shards_of(
    model: str | Path,
    data: DataSettings,
    target: Target | None,
    progress: Progress | None,
    cancel: Cancel | None,
) -> Iterator[Shards]:
    """The shards of a model, held against another training of it; uses 2% of ``progress``."""
    keep_small()
    target = target or open_target(model, progress=part(progress, 0.0, 0.02), cancel=cancel)
    shards = Shards(target, data)

    def waits() -> None:
        report(progress, 0.02, "waiting for another training of this model")

    with locked(f"training-{shards.folder.name}", cancel, waits):  # two would write the same files
        yield shards


@dataclass(frozen=True)
class Run:
    """One training: of which kind, on what, how; ``before``: digest of the head it goes on from, if any."""

    model: str | Path
    kind: str
    shards: Shards
    shape: Any
    schedule: Schedule
    before: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What of the schedule shapes the outcome."""
        return {n: v for n, v in asdict(self.schedule).items() if not n.endswith("_every")}

    def key(self, count: int) -> str:
        """Of a run on ``count`` conversations."""
        shape = sorted(asdict(self.shape).items())
        learnt = ("whole",) if self.shards.settings.whole else ()
        return repr((self.shards.key, count, shape, sorted(self.settings.items()), self.before, *learnt))

    def folder(self, count: int) -> Path:
        """Where its checkpoint is."""
        name = hashlib.blake2b(self.key(count).encode(), digest_size=6).hexdigest()
        return self.shards.folder / f"{self.kind}-{name}"

    @property
    def path(self) -> Path:
        """The head in the cache folder: where the engine that measures it looks first."""
        return cache_dir() / "heads" / target_name(self.model) / f"{self.kind}.safetensors"

    def facts(self, trained: Sequence[Conversation], state: State) -> dict[str, Any]:
        """How the head came to be, and its learning curve."""
        return {
            "target": target_name(self.model),
            "recipe": {
                "shape": asdict(self.shape),
                "schedule": self.settings,
                "data": asdict(self.shards.settings),
            },
            "trained": {
                "conversations": len(trained),
                "answer_tokens": sum(len(c.ids) - c.answer for c in trained),
                "predictions": state.tokens,
                "cpu_seconds": round(state.seconds, 1),
                "dtype": self.shards.target.plan.dtype,
            },
            "curve": state.curve,
        }

    def copied(self, made: HeadFile, out: Path | None) -> HeadFile:
        """``made``, or its copy in a folder of heads."""
        if out is None:
            return made
        path = out / target_name(self.model) / made.path.name
        write_head(path, made.kind, made.fingerprint, made.facts, made.tensors())
        return read_head(path)


def summary(head: HeadFile) -> dict[str, Any]:
    """What a command shows: the head's facts without curve and paths."""
    hidden = ("curve", "paths", "path_shares")
    facts = {n: v for n, v in head.facts.items() if n not in hidden}
    return json.loads(json.dumps({"file": str(head.path), "fingerprint": head.fingerprint, **facts}))  # type: ignore[no-any-return]
