"""A run as tables for a terminal: latency, phases, memory, acceptance, and where the numbers come from.

Every number stands with its unit and its tag (measured, predicted, simulated, claimed), and with its spread
when it was taken more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from workbench.cli.output import out, size
from workbench.records import code_path

if TYPE_CHECKING:
    from workbench.spec.run import Metric, Run


def print_summary(run: Run, saved: bool) -> None:
    """Print a run: outputs when there are several, then everything measured."""
    console = out()
    if len(run.outputs) > 1:
        for output in run.outputs:
            console.rule(f"sample {output['sample']}", align="left")
            print(output["text"])
    if run.state != "done":
        console.print(f"\n{run.state}: what follows is of the part that ran", style="bold")
    for title, rows in (
        ("run", facts(run)),
        ("numbers", [metric_row(m) for m in run.metrics]),
        ("memory", memory_rows(run.memory)),
        ("acceptance", acceptance_rows(run.acceptance)),
    ):
        if rows:
            print_table(title, rows)
    for line in run.notes:
        console.print(f"· {line}", markup=False)
    if saved:
        console.print(f"saved as {run.id[:8]}: workbench compare {run.id[:8]} OTHER", markup=False)


def facts(run: Run) -> list[tuple[str, ...]]:
    """What ran, and how: recipe, numerics class, code path, machine."""
    kind = run.plan.get("kind", "")
    uses = " + ".join(_use_text(u) for u in run.recipe) or "plain"
    what = ("recipe", f"{uses} ({kind})" if kind else uses)
    rows: list[tuple[str, ...]] = [
        ("bench", run.subject) if run.contestants else what,
        ("model", f"{run.model} · {run.dtype} · numerics {run.numerics} · seed {run.seed}"),
    ]
    if run.outputs:
        tokens = ", ".join(f"{len(o['token_ids'])} ({o['finish']})" for o in run.outputs)
        first = run.outputs[0]
        rows.append(
            ("tokens", f"prompt {first['prompt_tokens']} (cached {first['cached_tokens']}), output {tokens}")
        )
    if run.path:
        rows.append(("code path", " · ".join(code_path.in_words(run.path, run.recipe))))
    p = run.provenance
    if p is not None:
        rows.append(
            ("machine", f"{p.cpu or p.platform} · {p.device} · {p.threads} threads · profile {p.profile}")
        )
    return rows


def metric_row(m: Metric) -> tuple[str, ...]:
    """Name, value with unit, tag, spread, remark."""
    spread = f"{m.spread[0]:.4g} … {m.spread[1]:.4g}, n={m.n}" if m.spread and m.n > 1 else ""
    remark = "; ".join(filter(None, (f"of {m.of}" if m.of else "", m.note)))
    value = size(m.value) if m.unit == "B" else f"{m.value:.4g} {m.unit}".strip()
    return m.name, value, m.tag, spread, remark


def memory_rows(memory: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Bytes by category, from storages really held."""
    rows: list[tuple[str, ...]] = [(name, size(count), "measured") for name, count in memory.items() if count]
    if rows:
        rows.append(("sum", size(sum(memory.values())), "measured"))
    return rows


_ACCEPTANCE = {
    "tau": "tokens per verified draft, the model's own token included",
    "rate": "accepted per drafted token",
    "tokens_per_forward": "forwards without a draft included",
    "alpha": "expected acceptance of a drafted token: mean of sum(min(p, q))",
    "mismatch": "share of tokens that the model would have chosen otherwise",
    "survival": "accepted at draft position 1, 2, …",
    "conditional": "the same, given that the position before was accepted",
    "steps": "drafts verified",
    "drafted": "tokens drafted",
    "accepted": "of them kept",
    "emitted": "tokens that came with a draft",
    "plain": "tokens that came without one",
    "cut": "drafts that lost tokens to an end or a limit",
}
"""What of a run's acceptance is printed, and what it means; the sums behind it stay in the record."""


def acceptance_rows(acceptance: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Ratios and counts of drafting, each with its meaning; empty when nothing was drafted."""
    rows: list[tuple[str, ...]] = []
    for name, meaning in _ACCEPTANCE.items():
        value = acceptance.get(name)
        if isinstance(value, bool | int | float):
            rows.append(
                (name, f"{value:.4g}" if isinstance(value, float) else str(value), "measured", meaning)
            )
        elif isinstance(value, list | tuple) and value:
            rows.append((name, " ".join(f"{v:.3f}" for v in value), "measured", meaning))
    for source, own in (acceptance.get("sources") or {}).items():
        meaning = f"tokens per draft of {source}: {own['accepted']} of {own['drafted']} kept"
        rows.append((f"tau of {source}", f"{own['tau']:.4g}", "measured", meaning))
    return rows


def print_table(title: str, rows: Iterable[tuple[str, ...]]) -> None:
    """A small borderless table under a bold title."""
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table(
        box=None, pad_edge=False, show_header=False, title=title, title_justify="left", title_style="bold"
    )
    for _ in range(max(len(r) for r in rows)):
        table.add_column()
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = out()
    console.print()
    console.print(table)


def _use_text(use: Mapping[str, Any]) -> str:
    rest = ",".join(f"{k}={v}" for k, v in use.items() if k != "id")
    return f"{use['id']}:{rest}" if rest else str(use["id"])
