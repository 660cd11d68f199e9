"""A panel's state as code: a cell that rebuilds it, a command line, and JSON."""

from __future__ import annotations

import json
import pprint
import shlex
from typing import Literal

from workbench.spec.errors import OptionError
from workbench.widgets.state import PanelState

Form = Literal["python", "cli", "json"]
FORMS: tuple[Form, ...] = ("python", "cli", "json")
# SamplingParams field -> option of `workbench run`
_FLAGS = {
    "max_tokens": "--max-tokens", "temperature": "--temperature", "top_p": "--top-p", "top_k": "--top-k",
    "min_p": "--min-p", "n": "--n", "seed": "--seed",
}  # fmt: skip


def as_code(state: PanelState, form: Form = "python") -> str:
    """``state`` as Python, as a command, or as JSON. Raises :class:`OptionError` for another form."""
    if form == "json":
        return json.dumps(state.to_json(), indent=2, ensure_ascii=False)
    if form == "cli":
        return _cli(state)
    if form == "python":
        data = pprint.pformat(state.to_json(), width=88, sort_dicts=False)
        return f"from workbench.widgets import Panel\n\npanel = Panel.from_state({data})\npanel"
    raise OptionError(f"There is no code form {form!r}.", hint=f"Choose one of {', '.join(FORMS)}.")


def _cli(state: PanelState) -> str:
    parts = ["workbench run", f"--model {shlex.quote(state.model)}"]
    parts += [f"--use {shlex.quote(use.to_text())}" for use in state.recipe]
    for name, default in (("dtype", "bfloat16"), ("device", "cpu"), ("numerics", "fast")):
        if getattr(state, name) != default:
            parts.append(f"--{name} {shlex.quote(getattr(state, name))}")
    parts.append(f"--prompt {shlex.quote(state.prompt)}")
    parts.append("--chat" if state.chat else "--raw")
    parts += [f"{flag} {state.sampling[name]}" for name, flag in _FLAGS.items() if name in state.sampling]
    parts += [f"--stop {shlex.quote(s)}" for s in state.sampling.get("stop", ())]
    if state.sampling.get("ignore_eos"):
        parts.append("--ignore-eos")
    return " \\\n  ".join(parts)
