"""Turns and costs that were measured already: under which key, by which code, in which files.

A key names what was asked: model, heads, recipes, prompts, settings, machine, threads. Which code ran is kept
beside the numbers, so that an edit does not throw away an hour of measuring unasked, and is said where
numbers of different code stand side by side.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workbench.core.drafters.contestants import heads_of
from workbench.core.drafters.costs import CONTEXT, LENGTHS, ROUNDS, Costs
from workbench.core.drafters.settings import Cell, DrafterSettings
from workbench.core.drafters.turns import Turn
from workbench.core.kept_lines import KeptLines
from workbench.core.kv_points import point_key
from workbench.core.plan import ModelFacts
from workbench.core.provenance import provenance
from workbench.models.heads import HeadFile
from workbench.spec.plan import Plan

_TIMED = ("engine", "speculative", "attention", "models", "numerics", "quant", "kernels")
_VERSION = 1


@dataclass(frozen=True)
class Group:
    """Turns of all contestants on the same prompts, by name; ``code``: what ran."""

    turns: Mapping[str, Turn]
    code: str

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"turns": {n: t.to_dict() for n, t in self.turns.items()}, "code": self.code}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Group:
        """The group of :meth:`to_dict`."""
        return cls({n: Turn.from_dict(t) for n, t in data["turns"].items()}, str(data["code"]))


class Known:
    """What is on disk, for one model, its settings and this machine; ``folder`` None: the cache folder."""

    def __init__(self, settings: DrafterSettings, facts: ModelFacts, folder: Path | None = None) -> None:
        self.settings, self.facts = settings, facts
        paths = [None if folder is None else folder / name for name in ("drafters.jsonl", "costs.jsonl")]
        self.groups: KeptLines[Group] = KeptLines(
            "drafters.jsonl", Group.from_dict, Group.to_dict, paths[0], fresh=settings.fresh
        )
        self.costs: KeptLines[Costs] = KeptLines(
            "drafters-costs.jsonl", Costs.from_dict, Costs.to_dict, paths[1], fresh=settings.fresh
        )
        here = provenance(settings.device, settings.profile)
        machine = (here.cpu, here.device, here.threads, here.profile, here.torch)
        self._base = (_VERSION, facts.fingerprint, settings.dtype, *machine)

    @property
    def trouble(self) -> str:
        """Why something is not kept, if so."""
        return self.groups.trouble or self.costs.trouble

    def group_key(self, cell: Cell, plans: Mapping[str, Plan], prompts: Sequence[Sequence[int]]) -> str:
        """Of one turn of all contestants."""
        s = self.settings
        who = [
            (name, p.recipe.key, [_digest(h) for h in heads_of(p.recipe, self.facts)])
            for name, p in plans.items()
        ]
        asked = (cell.batch, cell.numerics, s.size("tokens"), s.temperature, [list(p) for p in prompts])
        return point_key("turn", self._base, who, asked)

    def costs_key(self, cell: Cell, plan: Plan) -> str:
        """Of the costs of a batch of a cell."""
        return point_key(
            "costs", self._base, plan.recipe.key, cell.batch, cell.numerics, LENGTHS, CONTEXT, ROUNDS
        )


_digests: dict[tuple[str, int], str] = {}


def _digest(head: HeadFile) -> str:
    """A head's digest; read again only when its file has changed."""
    key = (str(head.path), head.path.stat().st_mtime_ns)
    if key not in _digests:
        _digests[key] = head.digest
    return _digests[key]


@cache
def code_digest() -> str:
    """Names the sources that run in a step."""
    out = hashlib.blake2b(digest_size=8)
    for name in _TIMED:
        package = importlib.import_module(f"workbench.{name}")
        root = Path(str(package.__file__)).parent
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
            out.update(f"{name}/{path.relative_to(root)}".encode() + path.read_bytes())
    return out.hexdigest()
