"""Parts of README.md that are derived from the catalogue: ``python -m workbench.cli.docs [--check]``.

Text between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` is replaced; ``--check`` only says whether it
is current (status 1 when not), as the contract tests do. Compatibility is what planning says for the first
shipped model that has what both need.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from itertools import combinations

from workbench.core import catalog
from workbench.core.plan import pair_conflicts, plan
from workbench.core.shipped import fitting_model, shipped_facts
from workbench.models.datadir import data_dir
from workbench.models.registry import registry
from workbench.spec.errors import WorkbenchError
from workbench.spec.plan import Conflict
from workbench.spec.recipe import Recipe


def technique_table() -> str:
    """One row per technique: id, title, whether it changes results, seam, source."""
    rows = ["| id | technique | results | seam | source |", "|---|---|---|---|---|"]
    for technique in catalog.all_techniques():
        spec = technique.spec
        cells = (f"`{spec.id}`", spec.title, spec.kind, f"`{spec.seam}`", _link(spec.paper))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def compatibility_matrix() -> str:
    """Every pair: ``+`` composes, ``×`` does not; below it, each reason once, and what needs what."""
    ids = list(catalog.MODULES)
    conflicts = {
        pair: pair_conflicts(*pair, shipped_facts(fitting_model(pair))) for pair in combinations(ids, 2)
    }
    head = "| | " + " | ".join(str(n) for n in range(1, len(ids) + 1)) + " |"
    rows = [head, "|---" * (len(ids) + 1) + "|"]
    for n, row in enumerate(ids, 1):
        marks = ["×" if conflicts[column, row] else "+" for column in ids[: n - 1]]
        cells = [*marks, "–", *[""] * (len(ids) - n)]
        rows.append(f"| {n} `{row}` | {' | '.join(cells)} |")
    return "\n".join([*rows, "", *_reasons(conflicts), *_needs(ids)])


def model_table() -> str:
    """The models that have a name."""
    rows = ["| name | model | licence | on disk |", "|---|---|---|---|"]
    for entry in registry().values():
        size = f"{entry.bytes / 1e6:.0f} MB" if entry.bytes else "ships with the repository"
        rows.append(f"| `{entry.name}` | {entry.title} | {entry.licence} | {size} |")
    return "\n".join(rows)


PARTS: dict[str, Callable[[], str]] = {
    "techniques": technique_table,
    "compatibility": compatibility_matrix,
    "models": model_table,
}


def rendered(text: str) -> str:
    """``text`` with every part made anew. Raises :class:`WorkbenchError` when a marker is missing."""
    for name, make in PARTS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise WorkbenchError(
                f"There is no part {name!r}.", hint=f"Put {begin.strip()} and {end} on lines of their own."
            )
        text = f"{before}{begin}{make()}\n{end}{after}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring README.md up to date, or with ``--check`` say whether it is."""
    check = "--check" in (sys.argv[1:] if arguments is None else arguments)
    readme = data_dir().parent / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = rendered(before)
    if check:
        return int(before != after)
    readme.write_text(after, encoding="utf-8")
    return 0


def _reasons(conflicts: dict[tuple[str, str], list[Conflict]]) -> list[str]:
    """Pairs that conflict, gathered by the rule they break: the planner's sentence up to its colon."""
    by_rule: dict[str, list[str]] = {}
    for (first, second), found in conflicts.items():
        for conflict in found:
            members = by_rule.setdefault(conflict.remedy.partition(":")[0].rstrip("."), [])
            members += [i for i in (first, second) if i not in members]
    return [f"- ×: {rule} ({_names(ids)})" for rule, ids in by_rule.items()]


def _needs(ids: list[str]) -> list[str]:
    """What cannot be switched on alone, in the planner's words."""
    lines = []
    for id in ids:
        alone = plan(Recipe.of(id), shipped_facts(fitting_model((id,))))
        lines += [f"- `{id}`: {c.remedy}" for c in alone] if isinstance(alone, list) else []
    return lines


def _names(ids: list[str]) -> str:
    return ", ".join(f"`{i}`" for i in ids)


def _link(paper: str) -> str:
    """A source as Markdown: links are shown without their scheme."""
    return re.sub(r"https?://(\S+[^\s.,;)])", lambda m: f"[{m[1]}]({m[0]})", paper)


if __name__ == "__main__":
    sys.exit(main())
