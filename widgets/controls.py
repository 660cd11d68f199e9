"""The recipe's controls, made from the catalogue: one row per technique, grouped by family or seam.

A row has a switch, a badge (exact, lossy, simulated: word and mark), a gear for its options, and a link to
its paper. A technique that cannot be switched on is greyed and says what to do instead.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as w

from workbench.spec.recipe import Recipe
from workbench.spec.technique import Scalar
from workbench.widgets import alike
from workbench.widgets.options import OptionControl

FAMILIES = {
    "engine": "Engine", "attention": "Attention", "kv": "KV cache", "speculative": "Drafting",
    "quant": "Weights", "moe": "Experts", "depth": "Depth", "grammar": "Output",
}  # fmt: skip
SEAMS = {"kv_codec": "KV format", "kv_selector": "KV selection", "kv_storage": "KV at rest"}
"""Seams of a family too large for one heading: of each, one technique is on at a time."""
_OWN = "own recipe"
Switch = Callable[[str, bool, dict[str, Scalar]], None]


class Row:
    """One technique."""

    def __init__(self, technique: Any, switch: Switch) -> None:
        spec = technique.spec
        self.id, self.spec, self._switch = spec.id, spec, switch
        self.on = w.Checkbox(value=False, description=spec.title, indent=False, tooltip=spec.summary)
        self.on.observe(lambda change: switch(self.id, bool(change["new"]), {}), "value")
        badge = w.HTML(
            f'<span class="iwb-badge iwb-badge-{spec.kind}">{html.escape(spec.kind)}</span>',
            layout=alike.layout(), style=alike.style(w.HTML),
        )  # fmt: skip
        self.options = {o.name: OptionControl(o, self._setter(o.name)) for o in technique.options}
        self.gear = w.ToggleButton(value=False, icon="gear", tooltip=f"Options of {spec.title}")
        self.gear.observe(self._unfold, "value")
        self.gear.add_class("iwb-gear")
        parts = [self.on, badge, *([self.gear] if self.options else []), *_paper(spec)]
        head = w.HBox(parts, layout=alike.layout())
        head.add_class("iwb-row")
        self.remedy = w.Label("", layout={"display": "none"}, style=alike.style(w.Label))
        self.remedy.add_class("iwb-remedy")
        self.box = w.VBox([o.widget for o in self.options.values()], layout={"display": "none"})
        self.box.add_class("iwb-options")
        self.widget = w.VBox([head, self.remedy, self.box])
        self.widget.add_class("iwb-technique")

    def show(self, recipe: Recipe, remedy: str, aloud: bool = True) -> None:
        """Show whether it is on, its options, and what stands against it, unless its heading says that."""
        use = recipe.get(self.id)
        if self.on.value != (use is not None):
            self.on.value = use is not None
        given = dict(use.options) if use is not None else {}
        for name, control in self.options.items():
            control.set(given.get(name, control.option.default))
            control.enable(not remedy)
        if self.on.disabled != bool(remedy):
            self.on.disabled = bool(remedy)
            (self.widget.add_class if remedy else self.widget.remove_class)("iwb-off-limits")
        self.remedy.value = remedy
        self.remedy.layout.display = None if remedy and aloud else "none"

    def _setter(self, option: str) -> Callable[[Scalar], None]:
        return lambda value: self._switch(self.id, True, {option: value})

    def _unfold(self, change: Mapping[str, Any]) -> None:
        self.box.layout.display = None if change["new"] else "none"


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
        self.preset = w.Dropdown(options=[_OWN, *presets], value=_OWN, layout={"width": "100%"})
        self.preset.add_class("iwb-preset")
        self.preset.tooltip = "A recipe to start from"
        self.preset.observe(self._chosen, "value")
        self.search = w.Text(
            placeholder="search techniques", continuous_update=True, layout={"width": "100%"}
        )
        self.search.observe(self._filter, "value")
        buttons = w.HBox([self.undo, self.redo])
        buttons.add_class("iwb-bar-buttons")
        self.widget = w.VBox([head, self.preset, buttons, self.search, *self._families()])
        self.widget.add_class("iwb-controls")

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
            head = self._heads[heading] = w.Label(heading, layout={})
            head.add_class("iwb-family")
            note = self._notes[heading] = w.Label("", layout={"display": "none"}, style=alike.style(w.Label))
            note.add_class("iwb-remedy")
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


def _paper(spec: Any) -> list[Any]:
    if not spec.paper.startswith("https://"):
        return []
    title = html.escape(spec.title, quote=True)
    address = html.escape(spec.paper, quote=True)
    link = (
        f'<a class="iwb-paper" href="{address}" target="_blank" rel="noopener noreferrer" '
        f'aria-label="source of {title}">paper</a>'
    )
    shown = w.HTML(link, layout=alike.layout(), style=alike.style(w.HTML))
    shown.add_class("iwb-link")
    return [shown]
