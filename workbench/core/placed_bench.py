"""``workbench bench two_places``: a drafter on a core of its own, beside one and two threads for both.

Contestants take turns on real prompts: plain decoding and drafting in one process, each with one thread and
with two, and the same draft in a process of its own while the target has the other core (SwiftSpec, Mirror,
and Mirror with streams where the draft was trained for them). A second place is judged against one thread
that does both; two threads, which may well be better, stand beside it. A turn of all is kept when it is done:
stopped at any moment, the same command goes on.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.core.build import standalone_engine
from workbench.core.build_weights import build_weights
from workbench.core.drafters.known import code_digest
from workbench.core.drafters.prompt_sets import read_prompts
from workbench.core.kept_lines import KeptLines
from workbench.core.kv_points import point_key
from workbench.core.placed import setup_of
from workbench.core.placed_numbers import STREAMED, Turned, numbers, turned
from workbench.core.placed_run import run_two_places
from workbench.core.plan import ModelFacts, plan, require
from workbench.core.provenance import process_memory, provenance
from workbench.core.run_of import run_of
from workbench.core.two_places import start_drafter
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.decoder import Decoder
from workbench.models.heads import HeadFile
from workbench.models.registry import open_source
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import OptionError
from workbench.spec.plan import EngineLimits, Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run
from workbench.speculative.distilled import find_distilled
from workbench.speculative.placement.placed import PlacedDrafter
from workbench.speculative.placement.process_link import ProcessLink
from workbench.speculative.placement.streams import passes_of
from workbench.speculative.sought import sought

if TYPE_CHECKING:
    from workbench.core.benchmark import BenchSettings, Tell

PROMPTS = "mixed"


@dataclass(frozen=True)
class Contestant:
    """``threads`` of the target."""

    name: str
    recipe: Recipe
    threads: int


@dataclass(frozen=True)
class Group:
    """A turn of all contestants on one prompt, by name; ``code``: what ran."""

    turns: Mapping[str, Turned]
    code: str

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"turns": {n: t.to_dict() for n, t in self.turns.items()}, "code": self.code}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Group:
        """The group of :meth:`to_dict`."""
        return cls({n: Turned.from_dict(t) for n, t in data["turns"].items()}, str(data["code"]))


def two_places_steps(settings: BenchSettings, tell: Tell) -> Generator[None, None, Run]:
    """A generator: one turn of one contestant per ``yield``; returns the :class:`Run`.

    Raises :class:`OptionError` on a machine that has one core, or cannot bind a process to it.
    """
    cores = usable_cores()
    if settings.recipes or settings.peers:
        raise OptionError("two_places has contestants of its own.", hint="Leave --use and --peer out.")
    ((cell, sizes),) = settings.chosen().items()
    source, tokenizer = open_source(settings.model), load_tokenizer(settings.model)
    facts = ModelFacts(settings.model, source.config, source.fingerprint)
    asked = [p.ids for half in read_prompts(PROMPTS, tokenizer, sizes["context"]).halves for p in half]
    most = source.config.num_layers - 1
    distilled = sought(lambda: find_distilled(settings.model, source.fingerprint, source.config.num_layers))
    draft, digest = drafts_with(distilled.found, min(sizes["layers"], most))
    racers = contestants(draft, sizes, max(passes_of(distilled.found), default=0))
    limits = EngineLimits(0, 0, 1, min(sizes["context"] + sizes["tokens"] + 32, source.config.max_position))
    plans = {r.name: _plan(r.recipe, facts, settings, limits) for r in racers}
    kept: KeptLines[Group] = KeptLines("two_places.jsonl", Group.from_dict, Group.to_dict)
    machine = provenance(settings.device, settings.profile)
    key = {
        "model": facts.fingerprint, "head": digest, "sizes": sizes, "dtype": settings.dtype,
        "numerics": settings.numerics, "device": settings.device, "profile": settings.profile,
        "cpu": machine.cpu, "recipes": {n: p.recipe.key for n, p in plans.items()},
    }  # fmt: skip
    keys = [point_key({**key, "round": number}) for number in range(settings.rounds)]
    rounds = [kept.get(k) for k in keys]
    tell(sum(r is not None for r in rounds), len(rounds), "two_places: what is known")
    if any(r is None for r in rounds):
        with torch.inference_mode():
            decoder = Decoder(source.config, build_weights(plans["plain_1"], source))
        with _placed(plans, decoder) as (engines, links):
            take = _Turns(engines, links, racers, cores)
            total = sum(r is None for r in rounds) * len(racers) + len(racers)
            done = 0
            for racer in racers:
                tell(done, total, f"two_places: {racer.name} warms up")
                take(racer, asked[-1][:32], 8)
                done += 1
                yield
            for number, k in enumerate(keys):
                if rounds[number] is not None:
                    continue
                found: dict[str, Turned] = {}
                shift = number % len(racers)
                for racer in (*racers[shift:], *racers[:shift]):
                    tell(done, total, f"two_places, turn {number + 1} of {settings.rounds}: {racer.name}")
                    found[racer.name] = take(racer, asked[number % len(asked)], sizes["tokens"])
                    done += 1
                    yield
                rounds[number] = group = Group(found, code_digest())
                kept.put(k, group)
    known = [r.turns for r in rounds if r is not None]
    older = sum(r is not None and r.code != code_digest() for r in rounds)
    told = {
        "name": settings.name, "rounds": len(known), "cells": {cell: sizes}, "draft": draft,
        "contestants": [r.name for r in racers], "cores": list(cores),
        "turns": [Group(r, "").to_dict()["turns"] for r in known],
    }  # fmt: skip
    return run_of(
        plans["plain_1"],
        "bench",
        (*numbers(cell, known, sizes["k"], sizes["window"]), *process_memory(settings.device)),
        {"bench": told},
        profile=settings.profile,
        notes=(
            f"two_places: {settings.bench.title}; greedy, {PROMPTS} prompts; turns interleaved",
            f"the draft: {draft}; both places share this machine's memory and caches",
            *([distilled.trouble] if distilled.trouble else []),
            *([f"{older} of {len(known)} turns were measured with other code"] if older else []),
            *([f"turns were not kept: {kept.trouble}"] if kept.trouble else []),
        ),
    )


def contestants(draft: str, sizes: Mapping[str, int], streams: int = 0) -> list[Contestant]:
    """All of them; one thread in one process comes first: what the others are compared with."""
    k, own = sizes["k"], f",{draft}"
    inline = Recipe.of(f"draft_model:k={k},draws=false{own}")
    swift = Recipe.of(f"swiftspec:budget={k},width={sizes['width']},top={sizes['top']}{own}")
    windows = f"mirror_sd:k={sizes['window']},kappa={sizes['kappa']}{own}"
    streamed = [Contestant(STREAMED, Recipe.of(f"{windows},streams={streams}"), 1)] if streams else []
    return [
        Contestant("inline_1", inline, 1),
        Contestant("plain_1", Recipe(), 1),
        Contestant("swiftspec", swift, 1),
        Contestant("mirror_sd", Recipe.of(windows), 1),
        *streamed,
        Contestant("inline_2", inline, 2),
        Contestant("plain_2", Recipe(), 2),
    ]


def drafts_with(distilled: HeadFile | None, layers: int) -> tuple[str, str]:
    """Options of the draft, and the digest of its file: distilled layers if there are any, else cut ones."""
    return ("source=trained", distilled.digest) if distilled else (f"source=cut,layers={layers}", "")


class _Turns:
    """Runs one prompt with one contestant, bound to its cores, and counts."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        links: Mapping[str, ProcessLink],
        racers: Sequence[Contestant],
        cores: Sequence[int],
    ) -> None:
        self._engines, self._links, self._cores = engines, links, cores
        self._number = itertools.count()
        torch.set_num_threads(max(r.threads for r in racers))
        torch.ones(512, 512) @ torch.ones(512, 512)  # its threads start while this one may run anywhere

    def __call__(self, racer: Contestant, ids: Sequence[int], tokens: int) -> Turned:
        torch.set_num_threads(racer.threads)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        request = Request(f"t{next(self._number)}", tuple(ids), params)
        cores = self._cores[:1] if racer.threads == 1 else ()
        link = self._links.get(racer.name)
        done = run_two_places(self._engines[racer.name], link, [request], cores)
        return turned(done, done.ids(request.id))


@contextmanager
def _placed(
    plans: Mapping[str, Plan], decoder: Decoder
) -> Iterator[tuple[dict[str, Engine], dict[str, ProcessLink]]]:
    """An engine each on shared weights, and a process each for drafters that have one."""
    engines: dict[str, Engine] = {}
    links: dict[str, ProcessLink] = {}
    before = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        for name, made in plans.items():
            engine = engines[name] = standalone_engine(made, decoder)
            drafter = engine.drafting.drafter
            if isinstance(drafter, PlacedDrafter):
                links[name] = stack.enter_context(start_drafter(setup_of(made, drafter.wanted)))
                drafter.place(links[name], itertools.count(1))
        yield engines, links


def usable_cores() -> tuple[int, ...]:
    """Cores to bind to. Raises :class:`OptionError` for fewer than two."""
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    if len(cores) < 2:
        raise OptionError(
            f"two_places needs two cores that a process can be bound to; there are {len(cores)}.",
            hint="Simulate them: notebook 24_two_devices shows how.",
        )
    return cores


def _plan(recipe: Recipe, facts: ModelFacts, settings: BenchSettings, limits: EngineLimits) -> Plan:
    pool = EngineLimits(limits.max_context + 128, 0, 1, limits.max_context)
    where: dict[str, Any] = {"dtype": settings.dtype, "numerics": settings.numerics}
    return require(plan(recipe, facts, device=settings.device, limits=pool, **where))
