"""The whole picture of a panel as plain data: what the front end draws, and what a static page says.

Pure functions of the controller's state, called under its lock by the publisher.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from workbench.records import code_path
from workbench.records.conditions import same_question
from workbench.spec.events import PHASES
from workbench.spec.run import Run
from workbench.widgets import clean, words
from workbench.widgets.code import FORMS, as_code
from workbench.widgets.controller import Controller
from workbench.widgets.measuring import in_words
from workbench.widgets.prompts import examples
from workbench.widgets.views import compare, memory

HISTORY = ("run", "recipe", "decode speed", "TTFT", "TPOT", "KV in use", "τ", "KL", "top-1", "state")


def status(c: Controller) -> dict[str, Any]:
    """State, progress, and what went wrong."""
    live, running = c.live, c.running
    now = "switching" if c.switching else "running" if running else "idle"
    last = c.last
    ended = last.state if last is not None and not running else ""
    done = live.tokens if live is not None else 0
    seconds = 0.0
    if live is not None:
        seconds = (perf_counter() if running else live.last or live.submitted) - live.submitted
    return {
        "state": now,
        "ended": "failed" if c.problem is not None and not running else ended,
        "message": f"opening {c.opening.label}" if c.opening is not None else c.progress,
        "stale": _stale(c),
        "measuring": c.measuring.shown(),
        "done": done,
        "total": live.total if live is not None else 0,
        "seconds": round(seconds, 1),
        "problem": c.problem.to_dict() if c.problem is not None else None,
        "can_undo": c.recipes.back() is not None,
        "can_redo": c.recipes.ahead() is not None,
        "can_pin": last is not None,
        "pinned": memory.label(c.pinned) if c.pinned is not None else "",
    }


def inputs(c: Controller) -> dict[str, Any]:
    """The prompt, where it comes from, and the sampling fields."""
    state, known = c.state, examples()
    return {
        "prompt": state.prompt,
        "chat": state.chat,
        "template": c.session.tokenizer.chat_template is not None,
        "example": next((e.name for e in known.values() if e.text == state.prompt), ""),
        "examples": [[e.group, e.name, e.label] for e in known.values()],
        "sampling": dict(state.sampling),
    }


def text(c: Controller) -> list[list[Any]]:
    """[text, source, step, log-probability] per token on screen."""
    return clean.plain(c.live.pieces) if c.live is not None else []


def meters(c: Controller) -> dict[str, Any]:
    """Memory, time, acceptance, quality and path of the run on screen; the pinned one; the difference."""
    live, last = c.live, c.last
    if live is None:
        known = {"kind": c.session.plan.kind, "quality": quality(c, None)}
        return {"tag": "", "phases": list(PHASES), **clean.plain(known)}
    finished = last is not None and not c.running and live.place == _place(last)
    latency = live.latency()
    if finished and last is not None:  # the run's own numbers, once there are any
        latency |= {m.name: m.value for m in last.metrics if m.name in ("ttft", "tpot", "decode_speed")}
    out = {
        "recipe": live.recipe,
        "phases": list(PHASES),
        "strip": live.strip(),
        "memory": live.memory(),
        "kv_line": live.kv_line(),
        "latency": latency,
        "acceptance": live.acceptance(),
        "draft": live.draft(),
        "path": code_path.in_words(live.path, live.uses, c.pinned.path if c.pinned is not None else ()),
        "keys": list(live.path),
        "warnings": list(dict.fromkeys(w for s in live.steps for w in s.warnings)),
        "kind": live.kind,
        "tag": f"measured on {c.session.plan.device}, {c.session.plan.numerics}, {c.session.profile} profile",
        "quality": quality(c, last if finished else None),
        "pinned": pinned(c.pinned) if c.pinned is not None else None,
        "delta": _delta(c.pinned, last) if finished else "",
    }
    shown: dict[str, Any] = clean.plain(out)
    return shown


def _delta(a: Run | None, b: Run | None) -> str:
    if a is None or b is None or a is b:
        return ""
    return words.delta(a, b, f"A ({memory.label(a)})")


def _named(run: Run, here: str) -> str:
    """A run's recipe, and its model where that is another one."""
    return memory.label(run) if run.model == here else f"{run.model}, {memory.label(run)}"


def _place(run: Run) -> str:
    return " ".join((run.model, run.dtype, run.plan.get("device", ""), run.numerics, run.recipe_key))


def _stale(c: Controller) -> str:
    if not c.stale or c.live is None:
        return ""
    return "recipe changed" if c.live.place.startswith(c.place[: -len(c.recipe.key)]) else "model changed"


def pinned(run: Run) -> dict[str, Any]:
    """The ghost: the pinned run's numbers."""
    return {
        "recipe": memory.label(run),
        "memory": dict(run.memory),
        "latency": {m.name: m.value for m in run.metrics if m.name in ("ttft", "tpot", "decode_speed")},
        "survival": list(run.acceptance.get("survival", ())),
        "tau": run.acceptance.get("tau"),
    }


def quality(c: Controller, last: Run | None) -> list[str]:
    """What is known of the recipe's quality: what was measured, and agreement with the pinned run."""
    measured = c.measured.get(c.place)
    out = in_words(measured) if measured is not None else []
    a = c.pinned
    if a is not None and last is not None and a is not last and same_question(a, last):
        out.append(f"text against A: {words.text_agreement(a.token_ids, last.token_ids)}")
    return out


def tables(c: Controller) -> dict[str, Any]:
    """History, comparison with the pinned run, and code."""
    runs = list(c.runs)
    history = [
        [
            str(i),
            _named(r, c.state.model),
            _metric(r, "decode_speed"),
            _metric(r, "ttft"),
            _metric(r, "tpot"),
            words.size(words.kv_in_use(r.memory)),
            words.number(r.acceptance.get("tau")),
            _metric(r, "kl"),
            _metric(r, "top1"),
            "measured" if r.kind == "measure" else r.state,
        ]
        for i, r in enumerate(c.history, 1)
    ]
    against = None
    if c.pinned is not None and runs:
        table = compare.table((c.pinned, runs[-1]))
        against = {"columns": list(table.columns), "rows": [list(r) for r in table.rows], "note": table.note}
    return {
        "history": {
            "columns": list(HISTORY),
            "rows": history[::-1],
            "note": "Measured in this panel, the latest first." if history else "",
        },
        "compare": against,
        "code": {form: as_code(c.state, form) for form in FORMS},
    }


def _metric(run: Run, name: str) -> str:
    metric = run.metric(name)
    return words.describe(metric) if metric is not None else "–"
