"""What must be equal for two runs to be compared fairly, and the words for what is not.

A difference *decides* when speeds of the two runs then say nothing about their recipes: another model, prompt
or sampling, another number format or machine. Others, as the size of the KV pool, are worth a warning only.
What follows from a difference already named (the weights of another model) is not named again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.spec.run import Provenance, Run

# Sampling settings that decide where an output ends or what is kept of it, not which tokens come.
_ENDS = ("max_tokens", "stop", "include_stop", "ignore_eos", "logprobs", "prompt_logprobs", "n")


@dataclass(frozen=True)
class Difference:
    """A condition in which two runs differ: a sentence, and a few words said of the second run."""

    sentence: str
    brief: str = ""
    decides: bool = False


def differences(a: Run, b: Run) -> tuple[Difference, ...]:
    """Every difference besides the recipe, the most important first; empty when the comparison is fair."""
    return (*_question(a, b), *_state(a, b), *_machine(a, b), *_limits(a, b))


def apart(found: Iterable[Difference]) -> str:
    """In a few words why speeds are not compared ("another prompt, top_k 40 instead of 0"), or nothing."""
    return ", ".join(d.brief for d in found if d.decides)


def counted(several: Sequence[Sequence[Difference]]) -> list[str]:
    """The distinct sentences of several comparisons, the most important first; how many each concerns."""
    count = Counter(d for found in several for d in found)
    place = {d: found.index(d) for found in several for d in found}
    order = sorted(count, key=lambda d: (not d.decides, -count[d], place[d]))
    return [f"{d.sentence} ({count[d]} of {len(several)})" for d in order]


def same_question(a: Run, b: Run) -> bool:
    """Whether outputs can be compared token by token: one model, one prompt, one law, some text in both."""
    law = [{k: v for k, v in _sampling(r).items() if k not in _ENDS} for r in (a, b)]
    same = a.model == b.model and a.prompts == b.prompts and law[0] == law[1]
    return same and not _seeds_matter(a, b) and bool(a.token_ids and b.token_ids)


def _question(a: Run, b: Run) -> Iterator[Difference]:
    """What was asked of which model: the same for both, or speeds are of different work."""
    if a.kind != b.kind:
        yield _decides("The kind of run", a.kind, b.kind, f"a {b.kind} run, not a {a.kind} run")
    if a.model != b.model:
        yield _decides("The model", a.model, b.model, f"model {b.model} instead of {a.model}")
    elif a.weight_hash != b.weight_hash:
        yield _decides("The weights", a.weight_hash[:12], b.weight_hash[:12], "other weights")
    for name, x, y in (("dtype", a.dtype, b.dtype), ("numerics", a.numerics, b.numerics)):
        if x != y:
            what = "The numerics class" if name == "numerics" else "The dtype"
            yield _decides(what, x, y, f"{name} {y} instead of {x}")
    if a.outputs and b.outputs:
        if a.prompts != b.prompts:
            several = max(len(a.prompts), len(b.prompts)) > 1
            x, y = (f"{len(r.prompts)} prompts" if several else repr(r.prompts[0]) for r in (a, b))
            yield _decides("The set of prompts" if several else "The prompt", x, y, "another prompt")
        changed = _changed(_sampling(a), _sampling(b), "default")
        if changed:
            of = ", ".join(f"{k} {x} against {y}" for k, x, y in changed)
            brief = ", ".join(f"{k} {y} instead of {x}" for k, x, y in changed)
            yield Difference(f"Sampling differs: {of}.", brief, True)
    if _seeds_matter(a, b):
        yield Difference(f"The seed differs: {a.seed} against {b.seed}.")


def _state(a: Run, b: Run) -> Iterator[Difference]:
    """What became of them."""
    for which, run in (("first", a), ("second", b)):
        if run.state != "done":
            yield Difference(f"The {which} run was {run.state}: its numbers cover only what it did.")
    lengths = [[len(o.get("token_ids", ())) for o in r.outputs] for r in (a, b)]
    if lengths[0] != lengths[1] and a.prompts == b.prompts and a.outputs and b.outputs:
        yield Difference(
            f"Outputs differ in length ({sum(lengths[0])} and {sum(lengths[1])} tokens): so does KV memory."
        )


def _machine(a: Run, b: Run) -> Iterator[Difference]:
    """Where they ran, and how times were taken."""
    p, q = a.provenance, b.provenance
    if p is None or q is None:
        return
    for name, x, y, brief in (
        ("The device", p.device, q.device, f"on {q.device} instead of {p.device}"),
        ("The processor", p.cpu, q.cpu, "another processor"),
        ("The number of threads", p.threads, q.threads, f"{q.threads} instead of {p.threads} threads"),
        ("The profile", p.profile, q.profile, f"profile {q.profile} instead of {p.profile}"),
    ):
        if x != y:
            yield _decides(name, x, y, brief)
    if _timed(a) and _timed(b):
        if p.profile == q.profile == "interactive":
            yield Difference(
                "Times of the interactive profile share the process with a notebook; quote bench ratios."
            )
        elif p.profile == q.profile and a.kind != "bench":
            yield Difference("Times come from two separate runs; ratios are quoted from one interleaved run.")
    yield from _software(p, q)


def _software(p: Provenance, q: Provenance) -> Iterator[Difference]:
    for name, x, y in (
        ("The system", p.platform, q.platform),
        ("PyTorch", p.torch, q.torch),
        ("The workbench version", p.workbench, q.workbench),
    ):
        if x != y:
            yield Difference(f"{name} differs: {_show(x)} against {_show(y)}.")
    changed = _changed(p.environment, q.environment, "unset")
    if changed and p.profile == q.profile:  # a profile brings its own variables
        shown = ", ".join(f"{k} {x} against {y}" for k, x, y in changed)
        yield Difference(f"The environment differs: {shown}.")


def _limits(a: Run, b: Run) -> Iterator[Difference]:
    """Limits of the engine: they shape reservations and the free part of the pool."""
    of = [limits if isinstance(limits := r.plan.get("limits"), Mapping) else {} for r in (a, b)]
    shared = of[0].keys() & of[1].keys()
    changed = [(k, of[0][k], of[1][k]) for k in of[0] if k in shared and of[0][k] != of[1][k]]
    if changed and a.kind == b.kind:  # a benchmark sizes its own engine
        shown = ", ".join(f"{k} {x} against {y}" for k, x, y in changed)
        yield Difference(f"Limits of the engine differ: {shown}.")


def _decides(name: str, x: Any, y: Any, brief: str) -> Difference:
    return Difference(f"{name} differs: {_show(x)} against {_show(y)}.", brief, True)


def _changed(x: Mapping[str, Any], y: Mapping[str, Any], absent: str) -> list[tuple[str, str, str]]:
    """(name, first, second) of every entry that differs."""
    names = [k for k in {**x, **y} if x.get(k) != y.get(k)]
    return [(k, _show(x.get(k, absent)), _show(y.get(k, absent))) for k in names]


def _sampling(run: Run) -> Mapping[str, Any]:
    found = run.outputs[0].get("sampling") if run.outputs else None
    return found if isinstance(found, Mapping) else {}


def _seeds_matter(a: Run, b: Run) -> bool:
    """Seeds differ, and at least one run draws with its own: greedy outputs have no use for one."""
    greedy = [r.outputs and not _sampling(r).get("temperature") for r in (a, b)]
    return a.seed != b.seed and not all(greedy)


def _timed(run: Run) -> bool:
    return any(m.unit in ("ms", "s", "tok/s") for m in run.metrics)


def _show(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
