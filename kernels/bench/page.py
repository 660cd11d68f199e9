"""A record as one HTML page: no script, nothing from a network, light and dark; text escaped.

Every bar has its row in a table; marks stand beside each number, and a missed mark is explained by nothing
but the numbers around it: ceiling, share, spread, baselines, the switches thrown the other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from workbench.kernels.bench import words

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #24292f; --soft: #5c636d; --line: #d8dce1;
  --box: #f6f8fa; --good: #0b7f7d; --warn: #a85a00; --bad: #b3261e; --bar: #2f7fd1; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e3e6ea; --soft: #a0a7b0;
  --line: #3a414a; --box: #1e2227; --good: #3fc7c0; --warn: #f0a74b; --bad: #ff8a80; --bar: #5a9fe6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 24px; margin: 0 0 8px; } h2 { font-size: 19px; margin: 36px 0 8px; }
.soft { color: var(--soft); } .good { color: var(--good); } .warn { color: var(--warn); }
.bad { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; margin: 4px 0 12px; }
th, td { text-align: left; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } thead th { color: var(--soft); font-weight: 600; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
svg .bar { fill: var(--bar); } svg .low { fill: var(--bad); } svg line { stroke: var(--ink); }
"""
_TONE = {"passed": "good", "measured": "good", "failed": "bad", "hung": "bad", "error": "bad",
         "below must": "bad", "must": "warn", "target": "good", "stretch": "good"}  # fmt: skip


def page(record: Mapping[str, Any]) -> str:
    """The whole page."""
    cases: Sequence[Mapping[str, Any]] = record["cases"]
    checks, timed = ([c for c in cases if c["timed"] == t] for t in (False, True))
    device = record["device"]
    title = f"Kernels on {device.get('name', 'an unknown device')}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _summary(record),
        _section("Device", ("fact", "value", "at the end"), _facts(record)),
        _section("Ceilings, measured", ("what", "rate", "spread", "how"), _ceilings(record["ceilings"])),
        "<h2>Goals</h2><p class='soft'>Marks: must, target, stretch.</p>",
        f"<div class='scroll'>{_bars(timed)}</div>",
        _section(
            "Speed",
            ("case", "state", "rate", "of the ceiling", "time", "goals", "how measured"),
            [_speed(c) for c in timed],
        ),
        _section("Beside other implementations", ("case", "other", "result"), _beside(timed, "baselines")),
        _section("Design choices, the other way", ("case", "choice", "result"), _beside(timed, "variants")),
        _section(
            "Relations",
            ("kernel", "what", "times as fast", "goal"),
            [_relation(r) for r in record["relations"]],
        ),
        _section(
            "Correctness",
            ("case", "state", "relative errors", "reason"),
            [(c["key"], _state(c["state"]), words.errors(c.get("check", {})), c["reason"]) for c in checks],
        ),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


class _Markup(str):
    """Text that is markup already."""


def _summary(record: Mapping[str, Any]) -> str:
    verdict = record["verdict"]
    parts = [f"{n} {state}" for state, n in verdict["states"].items()]
    parts += [f"{n} goals: {level}" for level, n in verdict["goals"].items()]
    tone = "good" if verdict["ok"] else "bad"
    text = "No case is wrong or left out, no must is missed." if verdict["ok"] else "Not as promised."
    facts = f"{record['state']}, {record['seconds']:.0f} s, seed {record['seed']}, {record.get('began', '')}"
    counts = escape(" · ".join(parts))
    return f"<p class='{tone}'>{text}</p><p>{counts}</p><p class='soft'>{escape(facts)}</p>"


def _facts(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    before, after = record.get("smi_before", {}), record.get("smi_after", {})
    fixed = {**record["device"], **record.get("versions", {})}
    rows: list[tuple[str, ...]] = [(name, _text(value), "") for name, value in fixed.items()]
    return rows + [(n, _text(v), _text(after.get(n, ""))) for n, v in before.items() if n not in fixed]


def _ceilings(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, c in found.items():
        if "rate" not in c:
            rows.append((name, "not measured", "", str(c.get("error", ""))))
            continue
        unit = "TB/s" if name == "bytes" else "TFLOP/s" if name != "int8" else "TOP/s"
        spread = f"{words.time(c['low'])} to {words.time(c['high'])}"
        rows.append((name, f"{c['rate'] / 1e12:.4g} {unit}", spread, f"{c['what']}; {c['by']}"))
    return rows


def _speed(case: Mapping[str, Any]) -> tuple[str, ...]:
    ours = case.get("ours") or {}
    spread = f" ({words.time(ours['low'])} to {words.time(ours['high'])})" if ours else ""
    how = f"{ours['by']}, {ours['repeats']} times, {case['sets']} input sets" if ours else case["reason"]
    if case.get("call"):
        how += f"; whole call {words.time(case['call']['median'])}"
    if ours and case["reason"]:
        how += f"; {case['reason']}"
    goals = _Markup("<br>".join(_tone(g["level"], words.goal(g)) for g in case["goals"]))
    return (case["key"], _state(case["state"]), words.rate(case), words.percent(case.get("fraction")),
            words.time(case.get("seconds")) + spread, goals, how)  # fmt: skip


def _beside(cases: Iterable[Mapping[str, Any]], what: str) -> list[tuple[str, ...]]:
    return [
        (c["key"], name, words.beside(found))
        for c in cases
        if isinstance(c.get(what), Mapping)
        for name, found in c[what].items()
    ]


def _relation(row: Mapping[str, Any]) -> tuple[str, ...]:
    goals = _Markup("<br>".join(_tone(g["level"], words.goal(g)) for g in row["goals"]))
    return (row["kernel"], row["what"], words.times(row["value"]), goals)


def _bars(cases: Iterable[Mapping[str, Any]]) -> str:
    """One bar per absolute goal: length against 1.15 times the stretch mark, ticks at the three marks."""
    drawn = [(c, g) for c in cases for g in c["goals"] if not g["of"] and g["value"] is not None]
    if not drawn:
        return "<p class='soft'>No goal was measured.</p>"
    left, width, step = 330, 560, 26
    parts = []
    for i, (case, goal) in enumerate(drawn):
        top, scale = 4 + i * step, width / (1.15 * goal["stretch"])
        tone = "low" if goal["level"] == "below must" else "bar"
        label = escape(f"{case['kernel']}: {case['name']}")
        text = escape(f"{words.rate(case)}, {goal['level']}")
        length = min(goal["value"] * scale, width)
        parts.append(f"<text x='0' y='{top + 13}'>{label}</text>")
        parts.append(f"<rect class='{tone}' x='{left}' y='{top}' width='{length:.1f}' height='16' rx='2'/>")
        for mark in ("must", "target", "stretch"):
            x = left + goal[mark] * scale
            parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{top - 2}' y2='{top + 18}'/>")
        parts.append(f"<text x='{left + width + 8}' y='{top + 13}'>{text}</text>")
    size = f"0 0 1080 {8 + len(drawn) * step}"
    return f"<svg viewBox='{size}' role='img' aria-label='Rates against their marks'>{''.join(parts)}</svg>"


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"<h2>{escape(title)}</h2><p class='soft'>Nothing here.</p>"
    head = "".join(f"<th scope='col'>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{_cell(c)}</td>" for c in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<h2>{escape(title)}</h2><div class='scroll'>{table}</div>"


def _cell(text: str) -> str:
    return text if isinstance(text, _Markup) else escape(text)


def _state(state: str) -> str:
    return _Markup(_tone(state, state))


def _tone(key: str, text: str) -> str:
    return f"<span class='{_TONE.get(key, 'soft')}'>{escape(text)}</span>"


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
