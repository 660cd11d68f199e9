"""A control from an option's metadata: switch, menu, slider or field, with its unit and help.

A fractional value has a slider and a field for exact input. Both show one rounded value, and a change goes
through once: neither answers the other's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as w

from workbench.spec.technique import Option, Scalar
from workbench.widgets import alike

_SLIDER_STEPS = 512  # a whole-number slider with more is a field
_WIDE = {"width": "100%"}


class Pair:
    """A slider and a field for one number with ``decimals`` places; ``changed`` hears each new value once."""

    def __init__(
        self,
        value: float,
        low: float,
        high: float,
        decimals: int,
        changed: Callable[[float], None],
        label: str = "",
    ) -> None:
        self.decimals, self._changed, self._busy = decimals, changed, False
        step = 10.0**-decimals
        shown = round(value, decimals)
        common = {"min": low, "max": high, "step": step, "value": shown}
        self.slider = w.FloatSlider(**common, readout=False, continuous_update=False, description=label)
        self.field = w.BoundedFloatText(**common, continuous_update=False, layout=alike.layout(width="72px"))
        self.slider.observe(self._moved, "value")
        self.field.observe(self._moved, "value")
        self.value = shown

    def set(self, value: float) -> None:
        """Show a value without telling anyone."""
        self._busy = True
        try:
            self.value = round(value, self.decimals)
            self.slider.value = self.field.value = self.value
        finally:
            self._busy = False

    def _moved(self, change: dict[str, Any]) -> None:
        if self._busy:
            return
        before, value = self.value, round(float(change["new"]), self.decimals)
        self.set(value)
        if value != before:
            self._changed(value)


class OptionControl:
    """The control of one option; ``changed`` is called with values in the option's type."""

    def __init__(self, option: Option, changed: Callable[[Scalar], None]) -> None:
        self.option, self._changed, self._quiet = option, changed, False
        label = f"{option.name.replace('_', ' ')}{f' ({option.unit})' if option.unit else ''}"
        self._pair: Pair | None = None
        if option.type is float and not option.choices and option.low is not None and option.high is not None:
            self._pair = Pair(float(option.default), option.low, option.high, _decimals(option), changed)
            self._inputs: list[Any] = [self._pair.slider, self._pair.field]
            self.main: Any = w.HBox(self._inputs, layout=alike.layout(overflow="visible"))
        else:
            self.main = _control(option)
            self._inputs = [self.main]
            self.main.observe(self._moved, "value")
        for control in self._inputs:
            control.tooltip = option.help
            control.tabbable = True
        parts = [_words(label, "iwb-sub"), self.main, _words(option.help, "iwb-help")]
        self.widget = w.VBox(parts, layout=alike.layout(), _dom_classes=("iwb-option",))

    def set(self, value: Scalar) -> None:
        """Show a value without telling anyone."""
        if self._pair is not None:
            self._pair.set(float(value))
        elif self.main.value != value:
            self._quiet = True
            try:
                self.main.value = value
            finally:
                self._quiet = False

    def enable(self, on: bool) -> None:
        """Allow or refuse input."""
        for control in self._inputs:
            if control.disabled == on:
                control.disabled = not on

    def _moved(self, change: dict[str, Any]) -> None:
        if not self._quiet:
            self._changed(change["new"])


def _words(text: str, kind: str) -> Any:
    return w.Label(text, layout=alike.layout(), style=alike.style(w.Label), _dom_classes=(kind,))


def _control(option: Option) -> Any:
    if option.choices:
        return w.Dropdown(options=list(option.choices), value=option.default, layout=alike.layout(**_WIDE))
    if option.type is bool:
        return w.Checkbox(value=bool(option.default), indent=False, description="on", layout=alike.layout())
    if option.type is str:
        return w.Text(value=str(option.default), continuous_update=False, layout=alike.layout(**_WIDE))
    if option.type is int:
        low, high = option.low, option.high
        if low is not None and high is not None and high - low <= _SLIDER_STEPS:
            step = int(option.step or 1)
            return w.IntSlider(
                value=int(option.default),
                min=int(low),
                max=int(high),
                step=step,
                continuous_update=False,
                layout=alike.layout(**_WIDE),
            )
        top = int(high) if high is not None else 2**31 - 1
        bottom = int(low) if low is not None else -(2**31)
        return w.BoundedIntText(
            value=int(option.default),
            min=bottom,
            max=top,
            continuous_update=False,
            layout=alike.layout(**_WIDE),
        )
    return w.FloatText(value=float(option.default), continuous_update=False, layout=alike.layout(**_WIDE))


def _decimals(option: Option) -> int:
    """Decimal places of an option's step; two when it has none."""
    text = f"{option.step:g}" if option.step else "0.01"
    return len(text.partition(".")[2]) if "e" not in text else int(text.partition("e-")[2])
