"""The recipe's controls, made from the catalogue: one row per technique, grouped by family or seam.

A row has a switch, a badge (exact, lossy, simulated: word and mark), a gear for its options, and a link to
its paper. A technique that cannot be switched on is greyed and says what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as w

from workbench.spec.recipe import Recipe
from workbench.widgets import alike
from workbench.widgets.row import Row, Switch

FAMILIES = {
    "engine": "Engine", "attention": "Attention", "kv": "KV cache", "speculative": "Drafting",
    "quant": "Weights", "moe": "Experts", "depth": "Depth", "grammar": "Output",
}  # fmt: skip
SEAMS = {"kv_codec": "KV format", "kv_selector": "KV selection", "kv_storage": "KV at rest"}
"""Seams of a family too large for one heading: of each, one technique is on at a time."""
_OWN = "own recipe"


class Controls:
    """All rows, with presets, a search field, undo and redo."""

    def __init__(
        self,
        techniques: Sequence[Any],
        head: Any,
        *,
        presets: Mapping[str, Recipe],
        switch: Switch,
        apply: Callable[[Recipe], None],
        undo: Callable[[bool], None],
    ) -> None:
        self.rows = {t.spec.id: Row(t, switch) for t in techniques}
        self.undo = w.Button(description="undo", icon="undo", tooltip="Back to the recipe before")
        self.redo = w.Button(description="redo", icon="repeat", tooltip="Ahead again")
        self.undo.on_click(lambda _: undo(False))
        self.redo.on_click(lambda _: undo(True))
        self._presets = dict(presets)
        self._apply = apply
        self.preset = w.Dropdown(
            options=[_OWN, *presets], value=_OWN, layout={"width": "100%"},
            tooltip="A recipe to start from", _dom_classes=("iwb-preset",),
        )  # fmt: skip
        self.preset.observe(self._chosen, "value")
        self.search = w.Text(
            placeholder="search techniques", continuous_update=True, layout={"width": "100%"}
        )
        self.search.observe(self._filter, "value")
        buttons = w.HBox([self.undo, self.redo], layout=alike.layout(), _dom_classes=("iwb-bar-buttons",))
        parts = [head, self.preset, buttons, self.search, *self._families()]
        self.widget = w.VBox(parts, layout=alike.layout(), _dom_classes=("iwb-controls",))

    def show(self, recipe: Recipe, remedies: Mapping[str, str], can_undo: bool, can_redo: bool) -> None:
        """Show a recipe."""
        for heading, note in self._notes.items():
            ids = [row.id for row in self.rows.values() if _heading(row.spec) == heading]
            said = [remedies[i] for i in ids if remedies.get(i)]
            shared = next((r for r in said if said.count(r) > 1), "")
            note.value = shared
            note.layout.display = None if shared and self._heads[heading].layout.display is None else "none"
            for i in ids:
                remedy = remedies.get(i, "")
                self.rows[i].show(recipe, remedy, remedy != shared)
        name = next((n for n, r in self._presets.items() if r.key == recipe.key), _OWN)
        if self.preset.value != name:
            self.preset.value = name
        for button, able in ((self.undo, can_undo), (self.redo, can_redo)):
            if button.disabled == able:
                button.disabled = not able

    def _chosen(self, change: Mapping[str, Any]) -> None:
        recipe = self._presets.get(str(change["new"]))
        if recipe is not None:
            self._apply(recipe)

    def _families(self) -> list[Any]:
        out: list[Any] = []
        self._heads: dict[str, Any] = {}
        self._notes: dict[str, Any] = {}  # what stands against several rows, said once
        for heading in dict.fromkeys(_heading(r.spec) for r in self.rows.values()):
            head = self._heads[heading] = w.Label(
                heading, layout={}, style=alike.style(w.Label), _dom_classes=("iwb-family",)
            )
            note = self._notes[heading] = w.Label(
                "", layout={"display": "none"}, style=alike.style(w.Label), _dom_classes=("iwb-remedy",)
            )
            out += [head, note, *(r.widget for r in self.rows.values() if _heading(r.spec) == heading)]
        return out

    def _filter(self, change: Mapping[str, Any]) -> None:
        words = str(change["new"]).lower().split()
        shown = set()
        for row in self.rows.values():
            heading, spec = _heading(row.spec), row.spec
            text = f"{row.id} {spec.title} {spec.family} {heading} {spec.summary} {spec.kind}".lower()
            match = all(word in text for word in words)
            row.widget.layout.display = None if match else "none"
            shown |= {heading} if match else set()
        for heading, head in self._heads.items():
            head.layout.display = None if heading in shown else "none"
            note = self._notes[heading]
            note.layout.display = None if heading in shown and note.value else "none"


def _heading(spec: Any) -> str:
    return SEAMS.get(spec.seam) or FAMILIES.get(spec.family) or str(spec.family)
