"""What a child does with the GPU: facts, ceilings, compiling, checking one case, timing one case.

Each task is a generator. It yields ``armed()`` right before it launches a kernel that nobody has seen
finish: from there on silence is counted. What else it yields are parts of the answer, kept even if a later
part hangs.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from workbench.kernels.bench import ceilings, judge, timing
from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.bench.launches import compile_only, recorded
from workbench.kernels.bench.poison import poisoned

Part = dict[str, Any]
#: A kernel whose result differs from a baseline's by more than this, relatively, is wrong at that size.
DISAGREE = 0.05


def armed(what: str) -> Part:
    """From now on the watchdog counts the short time."""
    return {"armed": what}


def facts(device: torch.device) -> Iterator[Part]:
    """The device as torch sees it."""
    found = torch.cuda.get_device_properties(device)
    yield {
        "name": found.name,
        "capability": [found.major, found.minor],
        "multiprocessors": found.multi_processor_count,
        "memory": found.total_memory,
        "l2": found.L2_cache_size,
    }


def ceiling(device: torch.device) -> Iterator[Part]:
    """All ceilings."""
    yield armed("ceilings")
    yield ceilings.measured(device)


def prepare(case: Case, lab: Lab) -> Iterator[Part]:
    """Compile what the case and its variants launch, without launching; the compiler's cache keeps it."""
    began = time.perf_counter()
    trial = case.make(lab, **case.sizes)
    compiled = _compile(case, trial) if lab.on_gpu else 0
    yield {"launches": compiled, "seconds": time.perf_counter() - began}


def check(case: Case, lab: Lab) -> Iterator[Part]:
    """One verdict per output of the case, on fresh data, with poisoned outputs."""
    trial = case.make(lab, **case.sizes)
    exact, plain = trial.exact(), trial.plain()
    if lab.on_gpu:
        _compile(case, trial)
        torch.cuda.synchronize()
    yield armed(case.key)
    began = time.perf_counter()
    with poisoned():
        returned = trial.call(**trial.arguments)
    if lab.on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    verdicts = judge.judged(trial.outputs(returned), exact, plain, trial.within)
    figures = dict(trial.figures())
    yield {"outputs": verdicts, "passed": judge.passes(verdicts), "figures": figures, "seconds": seconds}


def timed(case: Case, lab: Lab) -> Iterator[Part]:
    """Times of the case, its variants and its baselines."""
    trial = case.make(lab, **case.sizes)
    _compile(case, trial)
    properties = torch.cuda.get_device_properties(lab.device)
    sets = [trial.arguments]
    for _ in range(1, timing.copies(case.cost.bytes, properties.L2_cache_size)):
        sets.append(copy.deepcopy(trial.arguments))
    torch.cuda.synchronize()
    yield armed(case.key)
    found = trial.outputs(trial.call(**trial.arguments))
    yield {"ours": _measured(trial, trial.call, sets, {}), "sets": len(sets)}
    if trial.launches:
        yield armed(f"{case.key}, the whole call")
        yield {"call": timing.measure([functools.partial(trial.call, **s) for s in sets]).to_dict()}
    variants: dict[str, Part] = {}
    for name, options in case.variants.items():
        yield armed(f"{case.key}, {name}")
        variants[name] = _guarded(functools.partial(_measured, trial, trial.call, sets, options))
        yield {"variants": dict(variants)}
    baselines: dict[str, Part] = {}
    for name, baseline in trial.baselines.items():
        yield armed(f"{case.key}, {name}")
        baselines[name] = _guarded(functools.partial(_baseline, baseline, sets, found))
        yield {"baselines": dict(baselines)}


def _compile(case: Case, trial: Trial) -> int:
    with compile_only() as seen:
        for options in ({}, *case.variants.values()):
            trial.call(**trial.arguments, **options)
    return len(seen.made)


def _measured(
    trial: Trial, call: Callable[..., Any], sets: list[dict[str, Any]], options: Mapping[str, Any]
) -> Part:
    calls: list[Callable[[], object]] = []
    for arguments in sets:
        if trial.launches:
            with recorded() as seen:
                call(**arguments, **options)
            calls.append(seen)
        else:
            calls.append(functools.partial(call, **arguments, **options))
    return timing.measure(calls).to_dict()


def _baseline(baseline: Callable[..., Outputs], sets: list[dict[str, Any]], found: Outputs) -> Part:
    other = baseline(**sets[0])
    differs = {name: _difference(found[name], other[name]) for name in other if name in found}
    part: Part = timing.measure([functools.partial(baseline, **s) for s in sets]).to_dict()
    return {**part, "differs": max(differs.values()) if differs else None}


def _difference(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm())


def _guarded(work: Callable[[], Part]) -> Part:
    """What a variant or baseline gave, or why it could not; a lost device is nothing to go on from."""
    try:
        return work()
    except Exception as error:  # whatever torch's backends raise: they have no common base
        torch.cuda.synchronize()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
