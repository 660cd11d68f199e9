"""Fields for p, q and γ beside the table of rules: every change enumerates again, and bad input says why."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from workbench.spec.errors import MissingExtra, OptionError, WorkbenchError
from workbench.widgets.spec_views.rule_law import RuleLaws, law_of_rules

try:
    import ipywidgets as w
except ImportError:
    raise MissingExtra("ipywidgets", "lab", "A live view") from None


def explorer(laws: RuleLaws, enumerate_laws: Callable[..., RuleLaws] = law_of_rules) -> Any:
    """A box of fields and what they come to; works with the keyboard: Enter in a field, arrows on γ."""
    style = {"description_width": "80px"}
    p, q = (
        w.Text(value=_said(law), description=name, continuous_update=False, style=style,
               layout={"width": "420px"})
        for name, law in (("target p", laws.p), ("drafter q", laws.q))
    )  # fmt: skip
    gamma = w.BoundedIntText(
        value=laws.gamma, min=1, max=6, description="γ", style=style, layout={"width": "160px"}
    )
    shown = w.HTML(value=_page(laws))

    def change(_: Any) -> None:
        try:
            shown.value = _page(enumerate_laws(read_law("p", p.value), read_law("q", q.value), gamma.value))
        except WorkbenchError as err:
            shown.value = f'<p role="alert"><b>{html.escape(err.message)}</b> {html.escape(err.hint)}</p>'

    for field in (p, q, gamma):
        field.observe(change, names="value")
    return Explorer(laws, [p, q, gamma, shown])


class Explorer(w.VBox):  # type: ignore[misc]
    """Fields and tables; where no widget can be shown, the tables of the start stand in its place."""

    def __init__(self, laws: RuleLaws, children: list[Any]) -> None:
        super().__init__(children)
        self._still = laws

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return {**data, "text/plain": f"Rules for p, q and γ of your own: γ = {self._still.gamma}"}


def read_law(name: str, text: str) -> list[float]:
    """Numbers of a field, divided by their sum: 2, 1, 1 is a law. Raises :class:`OptionError`."""
    try:
        values = [float(part) for part in text.replace(";", ",").split(",") if part.strip()]
        total = sum(values)
    except ValueError:
        raise OptionError(
            f"{name} = {text!r} is not a list of numbers.", hint="Write 0.5, 0.3, 0.2."
        ) from None
    if not values or not total > 0:
        raise OptionError(f"{name} = {text!r} is no law.", hint="Write 0.5, 0.3, 0.2.")
    return [v / total for v in values]


def _said(law: tuple[float, ...]) -> str:
    return ", ".join(f"{v:.4g}" for v in law)


def _page(laws: RuleLaws) -> str:
    alpha = f"<p>α = 1 - TV(p, q) = {laws.alpha:.4f}</p>"
    return alpha + laws.table().to_html() + laws.acceptance().to_html()
