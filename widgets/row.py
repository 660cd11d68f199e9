"""One technique in the recipe column: a switch, a badge, a gear for its options, a link to its paper.

The controls of its options are made when the gear is first pressed. Made beforehand, they are two of every
three models of a panel, and a front end that is busy with thousands of them drops what it is told meanwhile.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as w

from workbench.spec.recipe import Recipe
from workbench.spec.technique import Scalar
from workbench.widgets import alike
from workbench.widgets.options import OptionControl

Switch = Callable[[str, bool, dict[str, Scalar]], None]


class Row:
    """One technique."""

    def __init__(self, technique: Any, switch: Switch) -> None:
        spec = technique.spec
        self.id, self.spec, self._switch = spec.id, spec, switch
        self._known: tuple[Any, ...] = tuple(technique.options)
        self._options: dict[str, OptionControl] = {}
        self._given: dict[str, Scalar] = {}  # options of the recipe on screen
        self.on = w.Checkbox(
            value=False, description=spec.title, indent=False, tooltip=spec.summary,
            layout=alike.layout(), style=alike.style(w.Checkbox),
        )  # fmt: skip
        self.on.observe(lambda change: switch(self.id, bool(change["new"]), {}), "value")
        badge = w.HTML(
            f'<span class="iwb-badge iwb-badge-{spec.kind}">{html.escape(spec.kind)}</span>',
            layout=alike.layout(), style=alike.style(w.HTML),
        )  # fmt: skip
        self.gear = self._gear() if self._known else None
        parts = [self.on, badge, *([self.gear] if self.gear is not None else []), *_paper(spec)]
        head = w.HBox(parts, layout=alike.layout(), _dom_classes=("iwb-row",))
        self.remedy = w.Label(
            "", layout={"display": "none"}, style=alike.style(w.Label), _dom_classes=("iwb-remedy",)
        )
        self.box: Any = None
        self.widget = w.VBox([head, self.remedy], layout={}, _dom_classes=("iwb-technique",))

    @property
    def options(self) -> Mapping[str, OptionControl]:
        """Controls by option, made at the first look."""
        if self._known and not self._options:
            self._options = {o.name: OptionControl(o, self._setter(o.name)) for o in self._known}
            self._show_options()  # after they can be seen: a picture drawn meanwhile is not missed
            self.box = w.VBox(
                [o.widget for o in self._options.values()],
                layout={"display": "none"}, _dom_classes=("iwb-options",),
            )  # fmt: skip
            self.widget.children = (*self.widget.children, self.box)
        return self._options

    def show(self, recipe: Recipe, remedy: str, aloud: bool = True) -> None:
        """Show whether it is on, its options, and what stands against it, unless its heading says that."""
        use = recipe.get(self.id)
        if self.on.value != (use is not None):
            self.on.value = use is not None
        self._given = dict(use.options) if use is not None else {}
        if self.on.disabled != bool(remedy):
            self.on.disabled = bool(remedy)
            (self.widget.add_class if remedy else self.widget.remove_class)("iwb-off-limits")
        self._show_options()
        self.remedy.value = remedy
        self.remedy.layout.display = None if remedy and aloud else "none"

    def _show_options(self) -> None:
        for name, control in self._options.items():
            control.set(self._given.get(name, control.option.default))
            control.enable(not self.on.disabled)

    def _setter(self, option: str) -> Callable[[Scalar], None]:
        return lambda value: self._switch(self.id, True, {option: value})

    def _gear(self) -> Any:
        gear = w.ToggleButton(
            value=False, icon="gear", tooltip=f"Options of {self.spec.title}", layout=alike.layout(),
            style=alike.style(w.ToggleButton), _dom_classes=("iwb-gear",),
        )  # fmt: skip
        gear.observe(self._unfold, "value")
        return gear

    def _unfold(self, change: Mapping[str, Any]) -> None:
        if self.options:
            self.box.layout.display = None if change["new"] else "none"


def _paper(spec: Any) -> list[Any]:
    if not spec.paper.startswith("https://"):
        return []
    title = html.escape(spec.title, quote=True)
    address = html.escape(spec.paper, quote=True)
    link = (
        f'<a class="iwb-paper" href="{address}" target="_blank" rel="noopener noreferrer" '
        f'aria-label="source of {title}">paper</a>'
    )
    return [w.HTML(link, layout=alike.layout(), style=alike.style(w.HTML), _dom_classes=("iwb-link",))]
