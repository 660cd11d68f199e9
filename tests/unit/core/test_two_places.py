"""A drafter in a process of its own: the plain run's output whatever it does, and no process left behind."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
import torch

from workbench.core.build import standalone_engine
from workbench.core.build_weights import build_weights
from workbench.core.placed_run import TwoPlaces, remote_engine, run_two_places
from workbench.core.plan import ModelFacts, plan, require
from workbench.core.two_places import DraftSetup, start_drafter
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.spec.errors import JobFailed, OptionError
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.speculative.placement.mirror_target import MirrorTarget
from workbench.speculative.placement.mirror_worker import Windows
from workbench.speculative.placement.placed import Place
from workbench.speculative.placement.process_link import ProcessLink, pinned_cores
from workbench.speculative.placement.remote import RemoteDrafter
from workbench.speculative.placement.worker import Growth

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
SETUP = DraftSetup(
    "tiny",
    layers=(0, 1, 2, 4),
    cores=tuple(CORES[-1:]),
    growth=Growth(width=3, top=2, max_nodes=20, max_depth=6),
)
WINDOWS = Windows(gamma=3, kappa=3)
MIRROR = replace(SETUP, windows=WINDOWS)
PROMPTS = ([5, 9, 40, 77, 300, 12], [1000, 7, 7, 8])
NUMBERS = itertools.count(1)  # streams of all tests: their links are shared
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def made() -> tuple[object, Decoder]:
    """Plan and weights of the target: pinned, so that equal means equal."""
    source = open_source("tiny")
    facts = ModelFacts("tiny", source.config, source.fingerprint)
    limits = EngineLimits(512, 0, 4, 128)
    planned = require(plan(Recipe(), facts, dtype="float64", numerics="pinned", limits=limits))
    return planned, Decoder(source.config, build_weights(planned, source))


def engine_of(made: tuple[object, Decoder]) -> Engine:
    return standalone_engine(*made)  # type: ignore[arg-type]


def requests(params: SamplingParams) -> list[Request]:
    return [Request(f"r{i}", tuple(prompt), params) for i, prompt in enumerate(PROMPTS)]


def alone(made: tuple[object, Decoder], params: SamplingParams) -> list[list[int]]:
    """Output without a drafter, by request."""
    engine = engine_of(made)
    ids: list[list[int]] = [[], []]
    for request in requests(params):
        engine.add(request)
    with torch.inference_mode():
        while engine.has_work:
            for event in engine.step()[1]:
                ids[int(event.request_id[1:])] += [t.id for t in event.tokens]
    return ids


@pytest.fixture(scope="module")
def plain(made: tuple[object, Decoder]) -> dict[str, list[list[int]]]:
    """Output without a drafter."""
    return {"greedy": alone(made, GREEDY), "seeded": alone(made, SEEDED)}


@pytest.fixture(scope="module")
def link() -> Iterator[ProcessLink]:
    """One drafter for the tests that leave it alive."""
    with start_drafter(SETUP) as running:
        yield running
    assert not running.alive and not psutil.pid_exists(running.pid)


@pytest.fixture(scope="module")
def mirror_link() -> Iterator[ProcessLink]:
    """One drafter of windows and branches."""
    with start_drafter(MIRROR) as running:
        yield running
    assert not running.alive and not psutil.pid_exists(running.pid)


def run_mirror(
    made: tuple[object, Decoder], link: ProcessLink, params: SamplingParams, patience: float
) -> tuple[TwoPlaces, MirrorTarget]:
    drafter = MirrorTarget(
        "mirror_sd", Place(SETUP.layers, WINDOWS), WINDOWS, peek_layers=3, patience=patience
    )
    drafter.attach_target(made[1])
    drafter.place(link, NUMBERS)
    engine = remote_engine(engine_of(made), drafter)
    return run_two_places(engine, link, requests(params), CORES[:1]), drafter


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_branches_of_another_process_change_nothing(made, plain, mirror_link, name, delayed) -> None:
    draw = random.Random(7)
    hold = (lambda: draw.uniform(0.0, 0.05)) if delayed else None
    mirror_link.to_drafter = mirror_link.to_target = hold
    try:
        params = {"greedy": GREEDY, "seeded": SEEDED}[name]
        done, drafter = run_mirror(made, mirror_link, params, 5.0)
    finally:
        mirror_link.to_drafter = mirror_link.to_target = None
    assert ids_of(done) == plain[name]
    drafts = [d for step in done.steps for d in step.drafts]
    assert drafts and all(len(d.tokens) <= WINDOWS.gamma for d in drafts)
    assert drafter.windows >= len(drafts) and 0 <= drafter.reused <= drafter.windows
    assert set(drafter.hits) <= set(drafter.tries) <= set(range(WINDOWS.gamma + 1))
    assert not drafter.books and done.draft


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals of POSIX")
def test_a_drafter_of_windows_that_dies_loses_no_token(made, plain) -> None:
    with start_drafter(MIRROR) as link:
        os.kill(link.pid, signal.SIGSTOP)
        done, drafter = run_mirror(made, link, GREEDY, 0.02)  # waits in vain once, and goes on
        assert ids_of(done) == plain["greedy"] and drafter.waits == 1
        assert not any(step.draft or step.warnings for step in done.steps)
        os.kill(link.pid, signal.SIGKILL)
        psutil.wait_procs([psutil.Process(link.pid)], timeout=5)
        done, drafter = run_mirror(made, link, GREEDY, 60.0)  # nobody to wait for
        assert ids_of(done) == plain["greedy"]
        warnings = [w for step in done.steps for w in step.warnings]
        assert len(warnings) == 1 and "without drafts" in warnings[0]


def run(
    made: tuple[object, Decoder], link: ProcessLink, params: SamplingParams, patience: float = 0.0
) -> tuple[TwoPlaces, RemoteDrafter]:
    drafter = RemoteDrafter(link, budget=5, patience=patience, vocab=made[1].config.vocab_size)
    engine = remote_engine(engine_of(made), drafter)
    return run_two_places(engine, link, requests(params), CORES[:1]), drafter


def ids_of(done: TwoPlaces) -> list[list[int]]:
    return [done.ids("r0"), done.ids("r1")]


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_drafts_that_come_in_time_are_used_and_change_nothing(made, plain, link, name) -> None:
    params = {"greedy": GREEDY, "seeded": SEEDED}[name]
    done, drafter = run(made, link, params, patience=5.0)
    assert ids_of(done) == plain[name]
    drafts = [d for step in done.steps for d in step.drafts]
    # How much has come when a step begins is a matter of time; whether anything of it is right is chance.
    assert drafts and (name == "seeded" or sum(len(d.accepted) for d in drafts) > 0)
    assert {d.rule for d in drafts} == {"r1" if name == "greedy" else "r3"}
    assert done.draft and 0 < done.utilisation(done.target) <= 1 and 0 < done.utilisation(done.draft) <= 1
    assert all(a.end <= b.start for a, b in zip(done.draft, done.draft[1:], strict=False))
    assert not drafter.books


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_a_target_on_a_gpu_is_drafted_for_by_a_core(link, name) -> None:
    source = open_source("tiny")
    facts, limits = ModelFacts("tiny", source.config, source.fingerprint), EngineLimits(512, 0, 4, 128)
    planned = require(plan(Recipe(), facts, dtype="float64", numerics="pinned", device="cuda", limits=limits))
    made = planned, Decoder(source.config, build_weights(planned, source))
    params = {"greedy": GREEDY, "seeded": SEEDED}[name]
    done, _ = run(made, link, params, patience=5.0)
    assert ids_of(done) == alone(made, params)
    assert sum(step.draft for step in done.steps) > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_random_delays_change_nothing(made, plain, link, name, seed) -> None:
    draw = random.Random(seed)
    link.to_drafter = link.to_target = lambda: draw.uniform(0.0, 0.05)
    try:
        done, _ = run(made, link, {"greedy": GREEDY, "seeded": SEEDED}[name], patience=0.02)
    finally:
        link.to_drafter = link.to_target = None
    assert ids_of(done) == plain[name]


def test_each_side_keeps_to_its_cores(link) -> None:
    assert link.ready is not None and link.ready.cores == SETUP.cores
    if CORES:
        assert sorted(psutil.Process(link.pid).cpu_affinity()) == list(SETUP.cores)
        assert list(pinned_cores(())) == CORES  # given back by the runs before
        assert list(pinned_cores([10_000])) == CORES  # there is no such core


@pytest.mark.skipif(not hasattr(os, "getpgid"), reason="needs process groups of POSIX")
def test_an_interrupt_of_a_terminal_or_a_notebook_does_not_reach_the_drafter(link) -> None:
    assert os.getpgid(link.pid) != os.getpgrp()  # both interrupt the whole group


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals of POSIX")
def test_a_drafter_that_hangs_or_dies_loses_no_token(made, plain) -> None:
    with start_drafter(SETUP) as link:
        drafter = RemoteDrafter(link, budget=5, patience=0.2, vocab=2048)
        engine = remote_engine(engine_of(made), drafter)
        step, steps = engine.step, 0

        def act() -> object:
            nonlocal steps
            steps += 1
            if steps == 4:
                os.kill(link.pid, signal.SIGSTOP)
            elif steps == 8:
                os.kill(link.pid, signal.SIGKILL)
                psutil.wait_procs([psutil.Process(link.pid)], timeout=5)
            return step()

        engine.step = act  # type: ignore[assignment, method-assign]
        done = run_two_places(engine, link, requests(GREEDY))
        assert ids_of(done) == plain["greedy"] and steps > 8
        assert not link.alive and not any(step.draft for step in done.steps[-3:])
        again, _ = run(made, link, GREEDY, patience=5.0)  # nobody to wait for
        assert ids_of(again) == plain["greedy"]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals of POSIX")
def test_a_drafter_that_is_stopped_is_ended_all_the_same() -> None:
    link = ProcessLink(IDLE, "{}")
    os.kill(link.pid, signal.SIGSTOP)
    link.close()
    link.close()
    assert not link.alive and not psutil.pid_exists(link.pid)
    assert link.poll(0.1) == []


def test_nonsense_ends_the_link_and_not_the_run(made, plain) -> None:
    code = "import sys; sys.stdin.readline(); print('[\"Ready\",{}]', flush=True); sys.stdin.readline()\n"
    with ProcessLink(code + "print('what?', flush=True); sys.stdin.read()", "{}") as link:
        link.wait_ready(60.0)
        done, _ = run(made, link, GREEDY, patience=0.1)
        assert ids_of(done) == plain["greedy"]
        assert "cannot be read" in link.broken and not link.alive


def test_a_drafter_that_does_not_start_says_why() -> None:
    with pytest.raises(JobFailed, match="ended") as failed:
        ProcessLink("raise SystemExit('there is no model')", "{}").wait_ready(60.0)
    assert "there is no model" in failed.value.traceback_text
    for wrong in ({"layers": (0, 9)}, {"device": "cuda:99"}):
        with pytest.raises(OptionError):
            start_drafter(replace(SETUP, **wrong))
    with pytest.raises(JobFailed, match="in time"):
        ProcessLink(IDLE, "{}").wait_ready(0.1)


IDLE = """
from workbench.speculative.placement.process_inbox import Inbox
inbox = Inbox()
while True: pass
"""
HELPER = """
import os, sys, time
from workbench.speculative.placement.mirror_target import MirrorTarget
from workbench.speculative.placement.mirror_worker import Windows
from workbench.speculative.placement.placed import Place
from workbench.speculative.placement.process_link import ProcessLink
link = ProcessLink(sys.argv[1], "{}")
other = os.fork() if sys.argv[2] == "held" else 0
if sys.argv[2] == "held" and other == 0:
    time.sleep(60.0)  # it holds the pipes of its parent
    os._exit(0)
print(link.pid, other, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("pipe", ["broken", "held"])
def test_no_drafter_outlives_a_target_that_was_killed(pipe: str) -> None:
    helper = subprocess.Popen([sys.executable, "-c", HELPER, IDLE, pipe], stdout=subprocess.PIPE, text=True)
    assert helper.stdout is not None
    drafter, other = (int(n) for n in helper.stdout.readline().split())
    try:
        helper.wait(30)
        until = time.monotonic() + 30
        while _runs(drafter) and time.monotonic() < until:
            time.sleep(0.1)
        assert not _runs(drafter)
    finally:
        for pid in (drafter, other):
            if pid and _runs(pid):
                os.kill(pid, signal.SIGKILL)
        helper.stdout.close()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
