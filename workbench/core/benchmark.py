"""Named benchmarks: one process, interleaved turns, ratios with their spread, peers side by side.

``decode``, ``prefill``, ``batch``, ``overhead``, ``idle_pages``, ``prefix``, ``two_places``. The result is a
:class:`Run` of kind *bench*; CPU times are worth quoting only as the ratios it holds. For numbers to keep,
start it in a process of its own (:mod:`workbench.core.benchmark_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from workbench.core.benchmark_engine import Batch, Decode, IdlePages, Prefill, SharedPrefix
from workbench.core.benchmark_peers import PeerSetup, load_peers
from workbench.core.benchmark_timing import Timed, interleave, timing_metrics
from workbench.core.build import standalone_engine
from workbench.core.build_weights import build_weights, weights_key
from workbench.core.latency import step_phases
from workbench.core.peers import check_peers
from workbench.core.plan import ModelFacts, plan, require
from workbench.core.provenance import process_memory
from workbench.core.run_of import run_of
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.models.source import Source
from workbench.spec.errors import OptionError
from workbench.spec.plan import DType, EngineLimits, Numerics, Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run

Sizes = dict[str, int]
Tell = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Bench:
    """One named benchmark: its cells (name → sizes), its unit, and the recipes it compares by default."""

    title: str
    unit: Literal["tok/s", "ms"]
    cells: Mapping[str, Sizes]
    recipes: tuple[str, ...] = ("",)


_TWO_PLACES: Sizes = {
    "context": 192, "tokens": 48, "layers": 6, "k": 4, "width": 3, "top": 2, "window": 2, "kappa": 2,
}  # fmt: skip
BENCHES: Mapping[str, Bench] = {
    "decode": Bench(
        "decode steps of a full batch",
        "tok/s",
        {
            "b1_c512": {"batch": 1, "context": 512, "tokens": 16},
            "b8_c512": {"batch": 8, "context": 512, "tokens": 16},
            "b32_c512": {"batch": 32, "context": 512, "tokens": 16},
            "b1_c4096": {"batch": 1, "context": 4096, "tokens": 16},
        },
    ),
    "prefill": Bench(
        "one prompt to its first token", "tok/s", {"c512": {"context": 512}, "c2048": {"context": 2048}}
    ),
    "batch": Bench(
        "a batch from submission to its last token",
        "tok/s",
        {"b8_c128": {"batch": 8, "context": 128, "tokens": 32}},
    ),
    "overhead": Bench(
        "what the engine adds to the model",
        "ms",
        {
            "b1": {"batch": 1, "context": 64, "tokens": 32},
            "b8": {"batch": 8, "context": 64, "tokens": 32},
            "b32": {"batch": 32, "context": 64, "tokens": 32},
        },
    ),
    "idle_pages": Bench(
        "decode with half the pool holding cached pages",
        "tok/s",
        {"b1_c512": {"batch": 1, "context": 512, "tokens": 16}},
        ("paged+prefix_cache",),
    ),
    "prefix": Bench(
        "first token after a shared prefix",
        "ms",
        {"c512": {"context": 512, "suffix": 32}},
        ("paged", "paged+prefix_cache"),
    ),
    "two_places": Bench(
        "draft and target on a core each, beside one thread, and two, for both",
        "tok/s",
        {"c192": _TWO_PLACES},
    ),
}


@dataclass(frozen=True)
class BenchSettings:
    """What to run. ``sizes`` overrides sizes of every cell; ``cells`` names the cells wanted (empty: all)."""

    name: str
    model: str
    recipes: tuple[Recipe, ...] = ()
    peers: tuple[str, ...] = ()
    rounds: int = 7
    cells: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: DType = "bfloat16"
    numerics: Numerics = "fast"
    device: str = "cpu"
    profile: Literal["interactive", "bench"] = "interactive"

    @property
    def bench(self) -> Bench:
        """The benchmark of that name; raises :class:`OptionError`."""
        if self.name not in BENCHES:
            raise OptionError(f"{self.name!r} is no benchmark.", hint=f"Choose one of {', '.join(BENCHES)}.")
        return BENCHES[self.name]

    def chosen(self) -> dict[str, Sizes]:
        """Cells with their sizes, everything named checked.

        Raises :class:`OptionError` for names and values that do not exist, :class:`MissingExtra` for a peer
        that is not installed.
        """
        check_peers(self.peers, self.device)
        cells = self.bench.cells
        unknown = [c for c in self.cells if c not in cells]
        if unknown:
            raise OptionError(
                f"{unknown[0]!r} is no cell of {self.name}.", hint=f"Cells are {', '.join(cells)}."
            )
        bad = [f"{k}={v}" for k, v in self.sizes.items() if not isinstance(v, int) or v < 1]
        if bad or self.rounds < 1:
            raise OptionError(f"{', '.join(bad) or f'rounds={self.rounds}'} must be a whole number from 1.")
        wanted = [sizes for name, sizes in cells.items() if not self.cells or name in self.cells]
        return {_label(s): s for s in ({k: self.sizes.get(k, v) for k, v in w.items()} for w in wanted)}


def run_benchmark(settings: BenchSettings, tell: Tell = lambda done, total, message: None) -> Run:
    """Run it here and now, to the end."""
    steps = benchmark_steps(settings, tell)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            run: Run = end.value
            return run


def benchmark_steps(settings: BenchSettings, tell: Tell) -> Generator[None, None, Run]:
    """A generator: one turn of one contestant per ``yield``; returns the :class:`Run`."""
    bench, cells = settings.bench, settings.chosen()
    if settings.name == "two_places":
        from workbench.core.placed_bench import two_places_steps

        return (yield from two_places_steps(settings, tell))
    recipes = settings.recipes or tuple(_recipe(text) for text in bench.recipes)
    source = open_source(settings.model)
    facts = ModelFacts(settings.model, source.config, source.fingerprint)
    limited = {name: s for name, s in cells.items() if _slots(s) <= source.config.max_position}
    plans = {name: [_plan(r, facts, settings, sizes) for r in recipes] for name, sizes in limited.items()}
    if not limited:
        raise OptionError(
            f"No cell of {settings.name} fits the model's {source.config.max_position} positions.",
            hint="Give smaller sizes (context, tokens).",
        )
    weights = _Weights(source)
    setup = PeerSetup(
        settings.model,
        settings.dtype,
        settings.device,
        source.config.vocab_size,
        torch.get_num_threads(),
        lambda done, what: tell(0.0, len(limited), what),
    )
    peers = load_peers(settings.peers, settings.name, setup)
    metrics: list[Metric] = []
    names: dict[str, None] = {}  # of all that competed, in order
    path: tuple[str, ...] = ()
    for number, (cell, sizes) in enumerate(limited.items()):
        made: list[Any] = []
        for p in plans[cell]:
            made += _contestants(settings, p, weights, sizes)
        made += peers.contestants(sizes)
        names |= dict.fromkeys(contestant.name for contestant in made)
        total = len(made) * (settings.rounds + 1)

        def report(done: int, name: str, cell: str = cell, number: int = number, total: int = total) -> None:
            tell(number + done / total, len(limited), f"{settings.name} {cell}: {name}")

        timed: list[Timed] = []
        for timed in interleave(made, settings.rounds, report):  # noqa: B007 - the last one is used below
            yield
        peers.release()
        metrics += timing_metrics(cell, timed, bench.unit)
        for contestant in made:
            if settings.name == "overhead" and contestant.steps:
                metrics += [
                    replace(m, name=f"{cell}:{contestant.name}:{m.name}")
                    for m in step_phases(contestant.steps)
                ]
        path = made[0].engine.path
    base = plans[next(iter(limited))][0]
    left_out = [f"cell {c} needs more positions than the model has" for c in cells if c not in limited]
    left_out += [f"{name} has nothing comparable to {settings.name}" for name in peers.left_out]
    return run_of(
        base,
        "bench",
        (*metrics, *process_memory(settings.device)),
        {"bench": _what(settings, limited, names)},
        profile=settings.profile,
        path=path,
        notes=(f"{settings.name}: {bench.title}; random prompts; turns interleaved", *left_out),
    )


class _Weights:
    """Decoders by weight set, so that recipes that share weights share them in memory."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._made: dict[tuple[str, ...], Decoder] = {}

    def decoder(self, p: Plan) -> Decoder:
        key = weights_key(p)
        if key not in self._made:
            with torch.inference_mode():
                self._made[key] = Decoder(self.source.config, build_weights(p, self.source))
        return self._made[key]


def _contestants(settings: BenchSettings, p: Plan, weights: _Weights, sizes: Sizes) -> list[Any]:
    engine = standalone_engine(p, weights.decoder(p))
    kinds: dict[str, Any] = {"decode": Decode, "overhead": Decode, "prefill": Prefill, "batch": Batch}
    kinds |= {"prefix": SharedPrefix, "idle_pages": IdlePages}
    kind, name = kinds[settings.name], str(p.recipe).replace(" ", "")
    if settings.name != "idle_pages":
        return [kind(name, engine, settings.device, **sizes)]
    shares = (("empty", 0.0), ("half_cached", 0.5))
    return [kind(f"{name}:{w}", engine, settings.device, share=share, **sizes) for w, share in shares]


def _what(settings: BenchSettings, cells: Mapping[str, Sizes], names: Iterable[str]) -> dict[str, Any]:
    """What a bench run was of: its ``recipe`` and the rest of its plan are those of the first contestant."""
    return {"name": settings.name, "rounds": settings.rounds, "cells": cells, "contestants": list(names)}


def _recipe(text: str) -> Recipe:
    return Recipe.of(*filter(None, text.split("+")))


def _label(sizes: Sizes) -> str:
    """A cell's name: batch and context, as they really are."""
    batch = f"b{sizes['batch']}" if "batch" in sizes else ""
    context = f"c{sizes['context']}" if sizes.get("context", 64) != 64 else ""
    return "_".join(filter(None, (batch, context))) or "c64"


def _slots(sizes: Sizes) -> int:
    """Positions that one sequence needs at least."""
    return sizes.get("context", 0) + sizes.get("suffix", 0) + sizes.get("tokens", 1) + 2


def _plan(recipe: Recipe, facts: ModelFacts, settings: BenchSettings, sizes: Sizes) -> Plan:
    # Room for drafts that are accepted: several tokens per timed step.
    context = min(_slots(sizes) + 8 * sizes.get("tokens", 1), facts.config.max_position)
    batch = sizes.get("batch", 1)
    pool = context * batch * (2 if settings.name == "idle_pages" else 1) + 128 * batch
    limits = EngineLimits(kv_pool_tokens=pool, max_sequences=batch, max_context=context)
    made = plan(
        recipe, facts, dtype=settings.dtype, numerics=settings.numerics, device=settings.device, limits=limits
    )
    return require(made)
