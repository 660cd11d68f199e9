"""What was proposed, and why was this path kept? The draft tree of every round, with its attention mask.

Boxes are drafted tokens, in the column of their depth; what was kept, what was rejected and what was never
judged differ in colour, outline and words. The mask beside it is the block that the tree adds to causal
attention: a node sees the context, its own ancestors and itself. The slider steps through the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import ModelError, RecordError
from workbench.spec.events import DraftRecord, StepEvent
from workbench.spec.run import Run
from workbench.speculative.stats import acceptance
from workbench.widgets.palette import Theme
from workbench.widgets.spec_views.badge import badge, judged_by, kind_of
from workbench.widgets.spec_views.layout import Node, mask_of, nodes_of
from workbench.widgets.spec_views.stored import Source, steps_of
from workbench.widgets.table import Table

Decode = Callable[[Sequence[int]], str]
KEPT = 400  # rounds kept for the slider, the latest


@dataclass(frozen=True)
class Round:
    """One verified draft: nodes as they stand, the mask [n+1][n+1], and the round in words."""

    step: int
    request: str
    nodes: tuple[Node, ...]
    mask: tuple[tuple[bool, ...], ...]
    words: str
    exit: int = 0  # layers of the model that drafted; 0: something else did

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the front end."""
        nodes = [[shown(n.text), n.parent, n.depth, n.line, n.state, n.chance, n.words] for n in self.nodes]
        mask = ["".join("1" if seen else "0" for seen in row) for row in self.mask]
        return {"nodes": nodes, "mask": mask, "words": self.words}


def shown(text: str, most: int = 14) -> str:
    """A token's text with spaces and line ends visible, cut to ``most`` characters."""
    seen = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
    return seen if len(seen) <= most else f"{seen[: most - 1]}…"


def round_of(record: DraftRecord, step: int, decode: Decode, of: str = "") -> Round:
    """A verified draft as it is drawn; ``of`` says which of how many it is."""

    def text(token: int | None) -> str:
        return "" if token is None else decode([token]) or f"#{token}"

    nodes = nodes_of(record, text(record.root) or "…", tuple(map(text, record.tokens)), text(record.own))
    kept = sum(n.state == "accepted" for n in nodes)
    said = {"corrected": " in place of a rejected one", "bonus": " as a bonus", "cut": ", cut off"}
    own = f", then {nodes[-1].text!r}{said[nodes[-1].state]}" if record.own is not None else ""
    where = f" behind layer {record.exit}" if record.exit else ""
    words = f"step {step}: {record.source} drafted {len(record.tokens)}{where}, kept {kept}{own}"
    words = f"{of}{words}; {judged_by([record])}"
    mask = tuple(map(tuple, mask_of(record)))
    return Round(step, record.request_id, tuple(nodes), mask, words, record.exit)


@dataclass(frozen=True)
class DraftRounds:
    """Rounds in order; ``records`` are those of all, also of rounds that are not kept for drawing."""

    rounds: tuple[Round, ...]
    records: tuple[DraftRecord, ...]
    model: str = ""

    def __post_init__(self) -> None:
        if not self.rounds:
            raise RecordError("Nothing was drafted.", hint="Switch on a drafter and run a prompt.")

    @property
    def title(self) -> str:
        """What is drawn, and whether its rule is exact."""
        where = f" on {self.model}" if self.model else ""
        return f"Draft trees{where}, {badge(kind_of(self.records))} (measured)"

    @cached_property
    def first(self) -> int:
        """The round to open at: the one that kept most."""
        kept = [sum(n.state == "accepted" for n in r.nodes) for r in self.rounds]
        return kept.index(max(kept))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the front end."""
        return {
            "title": self.title, "knob": "round", "first": self.first,
            "rounds": [r.to_dict() for r in self.rounds],
        }  # fmt: skip

    def figure(self, theme: Theme = "auto") -> Any:
        """Tree and mask as a plotly figure; the slider shows the last rounds."""
        from workbench.widgets.spec_views.tree_figure import tree_figure

        return tree_figure(self.title, self.rounds, theme)

    def live(self) -> Any:
        """The same as a widget whose slider the keyboard moves; raises ``MissingExtra`` without anywidget."""
        from workbench.widgets.spec_views.tree_live import TreeView

        return TreeView(self)

    def table(self) -> Table:
        """A row per round: what was drafted, what was kept, what the model said itself.

        Where the model's own first layers drafted, behind which of them.
        """
        rows, exits = [], any(r.exit for r in self.rounds)
        for r in self.rounds:
            kept = [shown(n.text) for n in r.nodes if n.state == "accepted"]
            drafted = sum(n.state not in ("root", "corrected", "bonus") for n in r.nodes)
            last = r.nodes[-1]
            own = f"{shown(last.text)} ({last.state})" if last.state in ("corrected", "bonus") else "–"
            left = (r.exit,) if exits else ()
            depth = max(n.depth for n in r.nodes)
            rows.append((r.step, *left, drafted, depth, len(kept), " ".join(kept), own))
        a = acceptance(self.records)
        note = (
            f"{a.steps} rounds, {a.accepted} of {a.drafted} drafted tokens kept, τ {a.tau:.3g} a round; "
            f"{judged_by(self.records)} (measured)."
        )
        left = ("exit layer",) if exits else ()
        columns = ("engine step", *left, "drafted", "depth", "kept", "kept tokens", "the model's own")
        return Table.of(columns, rows, note=note)


def read_rounds(source: Source, decode: Decode | None = None) -> DraftRounds:
    """The rounds of a run (live or stored) or of step events as they came.

    ``decode`` gives the text of ids; without it the tokenizer of the run's model does, or ids stand in its
    place. Raises :class:`RecordError` when nothing was drafted.
    """
    steps = steps_of(source)
    model = source.model if isinstance(source, Run) else ""
    return of_steps(steps, decode or _decoder(model), model)


def of_steps(steps: Iterable[StepEvent], decode: Decode, model: str = "") -> DraftRounds:
    """The rounds of step events."""
    found = [(s.step, d) for s in steps for d in s.drafts]
    several = len({d.request_id for _, d in found}) > 1
    rounds = []
    for i, (step, record) in enumerate(found[-KEPT:], max(len(found) - KEPT, 0) + 1):
        of = f"round {i} of {len(found)}" + (f", {record.request_id}" if several else "")
        rounds.append(round_of(record, step, decode, f"{of}, "))
    return DraftRounds(tuple(rounds), tuple(d for _, d in found), model)


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """The trees of the last run."""
    return read_rounds(runs[-1]).figure(theme)


def table(runs: Sequence[Run]) -> Table:
    """Its rounds as rows."""
    return read_rounds(runs[-1]).table()


def _decoder(model: str) -> Decode:
    try:
        tokenizer = load_tokenizer(model)
    except ModelError:
        return lambda ids: " ".join(f"#{i}" for i in ids)
    return lambda ids: tokenizer.decode(ids, skip_special=False)
