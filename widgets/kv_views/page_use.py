"""What paging is worth here: slots that hold a token, by page size, and prompts that need not be computed.

*Use* is the share of allocated slots that hold a token when live sequences hold most, of a batch of prompts
of mixed lengths. *Hits*: the same prompt twice, once under a salt that nobody used before, which can find
nothing, once under one that can; in turn, so that a slow moment slows both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from workbench.engine.params import SamplingParams
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run
from workbench.widgets import figures, words
from workbench.widgets.palette import B, Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.session import Session

CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class PageUse:
    """Runs of the same batches by layout: :data:`CONTIGUOUS` or tokens a page; ``sequences`` in each."""

    runs: dict[str, tuple[Run, ...]]
    sequences: int

    def shares(self, layout: str) -> list[float]:
        """Share of the allocated slots that hold a token at the fullest step, batch by batch."""
        found = []
        for run in self.runs[layout]:
            held = run.memory.get("kv_payload", 0) + run.memory.get("kv_meta", 0)
            found.append(held / max(words.kv_in_use(run.memory), 1))
        return found

    def figure(self, theme: Theme = "auto") -> Any:
        """Share of slots in use by layout, one mark per batch."""
        out = figures.new(
            "KV slots that hold a token, at the fullest step (measured)", theme=theme, x="share of slots",
        )  # fmt: skip
        for layout in self.runs:
            shares = self.shares(layout)
            out.add_scatter(
                x=shares, y=[_named(layout)] * len(shares), mode="markers", showlegend=False,
                marker={**figures.marker("measured", B), "size": 11, "opacity": 0.8},
                hovertemplate="%{y}: %{x:.1%}<extra></extra>",
            )  # fmt: skip
        out.update_xaxes(range=[0, 1.02], tickformat=".0%")
        out.update_yaxes(autorange="reversed")
        out.update_layout(height=144 + 36 * len(self.runs), margin={"l": 120})
        return out

    def table(self) -> Table:
        """Median share with its range, and bytes at the fullest step of the last batch."""
        rows = []
        for layout, runs in self.runs.items():
            shares, memory = self.shares(layout), runs[-1].memory
            held = words.size(words.kv_in_use(memory))
            empty = words.size(memory.get("fragmentation", 0))
            at_once = max(s["running"] for s in runs[-1].steps)
            rows.append((_named(layout), _spread(shares, "{:.1%}"), held, empty, at_once, "measured"))
        batches = len(next(iter(self.runs.values())))
        note = (
            f"{_count(batches, 'batch', 'batches')} of {self.sequences} prompts of mixed lengths, median "
            "(lowest–highest). Bytes, and how many sequences ran at once in the same pool: of the last batch."
        )
        columns = ("layout", "slots in use", "KV held", "of it empty", "at once", "tag")
        return Table.of(columns, rows, note=note)


def measure_use(
    session: Session,
    lengths: Sequence[Sequence[int]],
    page_sizes: Sequence[int] = (16, 64, 128),
    *,
    max_tokens: int = 16,
    seed: int = 0,
) -> PageUse:
    """Run every batch of prompt ``lengths`` under each layout; the session's recipe is put back.

    Prompts are random token ids: what is measured does not depend on them. Raises :class:`OptionError`
    without batches.
    """
    if not lengths or not all(lengths):
        raise OptionError("There is no batch to measure.", hint="Give lengths of at least one prompt each.")
    layouts = {CONTIGUOUS: Recipe(), **{str(n): Recipe.of(f"paged:page_size={n}") for n in page_sizes}}
    before, vocabulary = session.recipe, session.tokenizer.vocab_size
    draw = random.Random(seed)
    batches = [[[draw.randrange(vocabulary) for _ in range(n)] for n in batch] for batch in lengths]
    runs: dict[str, tuple[Run, ...]] = {}
    try:
        for name, recipe in layouts.items():
            session.apply(recipe).result()
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            runs[name] = tuple(session.submit_all(b, [params] * len(b)).result() for b in batches)
    finally:
        session.apply(before).result()
    return PageUse(runs, len(lengths[0]))


@dataclass(frozen=True)
class PrefixHits:
    """Pairs of the same prompt: first token in ms without and with what the cache had of it."""

    cold_ms: tuple[float, ...]
    warm_ms: tuple[float, ...]
    prompt: int
    cached: int

    def table(self) -> Table:
        """Prompt tokens computed, and time to the first token, with spread."""
        ratios = [a / b for a, b in zip(self.cold_ms, self.warm_ms, strict=True)]
        rows = [
            ("nothing cached", self.prompt, _spread(self.cold_ms, "{:.3g} ms"), "1", "measured"),
            (
                "prefix cached", self.prompt - self.cached, _spread(self.warm_ms, "{:.3g} ms"),
                _spread(ratios, "{:.2f}"), "measured",
            ),
        ]  # fmt: skip
        pairs = _count(len(ratios), "pair", "pairs")
        note = f"{pairs} in turn, median (lowest–highest); a prompt of {self.prompt} tokens."
        columns = ("", "prompt tokens computed", "time to first token", "times as fast", "tag")
        return Table.of(columns, rows, note=note)


def measure_hits(session: Session, prompt: Sequence[int], repeats: int = 3) -> PrefixHits:
    """Time to the first token of ``prompt`` with a prefix cache, ``repeats`` times without and with a hit.

    Raises :class:`OptionError` when the session's recipe has no prefix cache.
    """
    if not {"prefix_cache", "radix_cache"} & {u.id for u in session.recipe}:
        raise OptionError("There is no prefix cache to hit.", hint="Switch on prefix_cache or radix_cache.")
    params = SamplingParams(max_tokens=1)

    def once(salt: str) -> tuple[float, int]:
        run: Run = session.submit(list(prompt), params, salt=salt).result()
        first = run.metric("ttft")
        return (first.value if first is not None else 0.0), int(run.outputs[0]["cached_tokens"] or 0)

    once("warm")
    cold, warm, cached = [], [], 0
    for i in range(repeats):
        cold.append(once(f"cold {i}")[0])
        ms, cached = once("warm")
        warm.append(ms)
    return PrefixHits(tuple(cold), tuple(warm), len(prompt), cached)


def _named(layout: str) -> str:
    return layout if layout == CONTIGUOUS else f"{layout} a page"


def _count(n: int, one: str, several: str) -> str:
    return f"{n} {one if n == 1 else several}"


def _spread(values: Sequence[float], style: str) -> str:
    middle = style.format(median(values))
    return (
        middle if len(values) == 1 else f"{middle} ({style.format(min(values))}–{style.format(max(values))})"
    )
