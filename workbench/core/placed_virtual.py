"""Two devices that are not there: a session's model and a drafter cut out of it, on a virtual clock.

Tokens, trees, branches and verdicts are real; when they happen is computed from constants that somebody
entered or measured. So a GPU beside an NPU can be looked at on a laptop, and every figure of it says
*simulated clock, real tokens*.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from workbench.core.build import standalone_engine
from workbench.core.placed_run import remote_engine
from workbench.core.plan import plan, require
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.decoder import Decoder
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.speculative.distilled import find_distilled
from workbench.speculative.draft_model import layers_kept
from workbench.speculative.mirror_sd import exit_of
from workbench.speculative.placement.early_exit import ExitDecoder, ExitProxy
from workbench.speculative.placement.mirror import MirrorDrafter
from workbench.speculative.placement.mirror_target import MirrorTarget
from workbench.speculative.placement.placed import drafting_kv
from workbench.speculative.placement.remote import RemoteDrafter
from workbench.speculative.placement.streams import passes_of
from workbench.speculative.placement.timeline import MirrorTimes, mirror_timeline
from workbench.speculative.placement.trace import Trace, of_mirror, of_simulated
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.speculative.placement.virtual import Latencies, VirtualLink, simulate
from workbench.speculative.placement.worker import DraftWorker, Growth
from workbench.speculative.sought import sought

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session


@dataclass(frozen=True)
class Devices:
    """Seconds: a pass of the target (whatever its rows), one of the drafter, and a message on its way.

    ``exit``: share of the target's pass before it says what it may choose (Mirror). Raises
    :class:`OptionError` for what is no time or share.
    """

    target: float
    draft: float
    link: float = 0.0
    exit: float = 2 / 3

    def __post_init__(self) -> None:
        if not (self.target > 0 and self.draft >= 0 and self.link >= 0 and 0 <= self.exit <= 1):
            raise OptionError(
                f"{self} cannot be: times are 0 or more, a pass of the target is more, exit is 0 to 1.",
                hint="Enter seconds, for example Devices(target=0.02, draft=0.002, link=0.00005).",
            )

    def serial(self, tau: float, gamma: int) -> float:
        """Seconds a token where ``gamma`` tokens are drafted and then verified, ``tau`` gained per round."""
        return (self.target + gamma * self.draft + 2 * self.link) / tau

    def limit(self, tau: float, gamma: int) -> float:
        """The same with everything hidden that can be: the longer of both sides alone."""
        return max(self.target, gamma * self.draft) / tau


def simulate_swiftspec(
    session: Session,
    prompt: str,
    devices: Devices,
    *,
    layers: Sequence[int] = (),
    budget: int = 4,
    growth: Growth | None = None,
    tokens: int = 32,
    temperature: float = 0.0,
) -> Trace:
    """SwiftSpec on two devices; ``layers`` of the model draft, or what ``swiftspec`` drafts with."""

    def work(engine: Engine) -> Trace:
        kv, notes = _drafting(session, engine.executor.decoder, layers)
        worker = DraftWorker(kv, growth)
        latencies = Latencies(lambda rows: devices.target, lambda rows: devices.draft, devices.link)

        def make(link: VirtualLink) -> Engine:
            drafter = RemoteDrafter(link, budget=budget, patience=devices.draft * 2 + devices.link * 2)
            made = remote_engine(engine, drafter)
            made.add(_request(session, prompt, tokens, temperature))
            return made

        return replace(
            of_simulated(simulate(make, worker, latencies), "SwiftSpec", devices.link), notes=notes
        )

    return _on_worker(session, "SwiftSpec on a virtual clock", work)


def simulate_mirror(
    session: Session,
    prompt: str,
    devices: Devices,
    *,
    layers: Sequence[int] = (),
    exit_layers: int = 0,
    gamma: int = 4,
    kappa: int = 3,
    streams: int = 0,
    tokens: int = 32,
    temperature: float = 0.0,
) -> Trace:
    """Mirror on two devices: the proxy is the session's model behind ``exit_layers`` layers, with the adapter
    that was trained for that exit; 0: the exit that ``mirror_sd`` takes.

    ``streams`` of a distilled drafter: windows and branches take as many passes as its windows took on
    average. Raises :class:`OptionError` where the drafter has not so many.
    """

    def work(engine: Engine) -> Trace:
        target = engine.executor.decoder
        exit_at, adapter, said = exit_of(
            session.facts.name, session.facts.fingerprint, target.config.num_layers, exit_layers
        )
        proxy = ExitProxy(ExitDecoder(target, exit_at, adapter), kappa + 1)
        kv, notes = _drafting(session, target, layers, streams)
        drafter = MirrorDrafter(kv, gamma=gamma, kappa=kappa, proxy=proxy)
        made = remote_engine(engine, drafter)
        made.add(_request(session, prompt, tokens, temperature))
        while made.has_work:
            made.step()
        log = drafter.log
        passes = [s.fresh_levels for s in log if s.window == gamma and not s.reused] or [gamma]
        drafting = devices.draft * sum(passes) / len(passes)
        times = MirrorTimes(
            early=devices.target * devices.exit,
            late=devices.target * (1 - devices.exit),
            branches=drafting,
            fresh=drafting,
            link=devices.link,
        )
        rounds = mirror_timeline([(s.foreseen, s.emitted) for s in log], times)
        facts = [{"window": s.window, "rows": s.rows, "nodes": kappa * (s.window + 1) * gamma} for s in log]
        return replace(of_mirror(rounds, times, "Mirror", facts), notes=(*notes, *said))

    return _on_worker(session, "Mirror on a virtual clock", work)


@dataclass(frozen=True)
class Reuse:
    """How many verdicts were foreseen behind ``exit`` layers with ``kappa`` candidates a place.

    ``by_accepted``: (foreseen, all) by the number of drafts kept. ``notes``: what whoever reads it should
    know, such as that no adapter foresees them.
    """

    exit: int
    kappa: int
    foreseen: int
    verdicts: int
    by_accepted: Mapping[int, tuple[int, int]]
    notes: tuple[str, ...] = ()

    @property
    def rate(self) -> float | None:
        """Share of verdicts; None without any."""
        return self.foreseen / self.verdicts if self.verdicts else None


def reuse_surface(
    session: Session,
    prompts: Sequence[str],
    *,
    exits: Sequence[int],
    kappas: Sequence[int] = (1, 3, 8),
    gamma: int = 3,
    draft_layers: int = 0,
    tokens: int = 24,
) -> list[Reuse]:
    """Run Mirror in this process, where every branch is whole, at each exit and number of candidates.

    Raises :class:`PlanError` for an exit or layers that the model has not.
    """
    own = f"k={gamma},layers={draft_layers},source=cut,place=here"
    plans = {
        (e, k): require(
            plan(
                Recipe.of(f"mirror_sd:exit={e},kappa={k},{own}"),
                session.facts,
                dtype=session.plan.dtype,
                numerics=session.plan.numerics,
                device=session.plan.device,
                limits=session.plan.limits,
            )
        )
        for e in exits
        for k in kappas
    }

    def work(job: Job, _: Engine) -> Generator[None, None, list[Reuse]]:
        out = []
        for done, ((e, k), made) in enumerate(plans.items()):
            decoder = session.decoder(made, lambda f, what: None, job.token)
            engine = standalone_engine(made, decoder)
            drafter = engine.drafting.drafter
            if isinstance(drafter, MirrorTarget):
                with torch.inference_mode():
                    for i, prompt in enumerate(prompts):
                        engine.add(_request(session, prompt, tokens, 0.0, f"s{i}"))
                    notes: tuple[str, ...] = ()
                    while engine.has_work:
                        notes += engine.step()[0].warnings
                        yield
                tries, hits = drafter.tries, drafter.hits
                split = {n: (hits[n], tries[n]) for n in sorted(tries)}
                out.append(Reuse(e, k, sum(hits.values()), sum(tries.values()), split, notes))
            job.progress(done + 1, len(plans), "points", f"exit {e}, {k} candidates")
        return out

    found: list[Reuse] = session.task("what inner layers foresee", work).result()
    return found


def tokens_per_pass(session: Session) -> dict[int, float]:
    """Tokens that a pass of the distilled drafter adds to its chain, by streams used: as measured when these
    were trained. Without any, a pass adds one."""
    facts = session.facts
    head = sought(lambda: find_distilled(facts.name, facts.fingerprint, facts.config.num_layers)).found
    return {0: 1.0, **passes_of(head)}


def _drafting(
    session: Session, target: Decoder, layers: Sequence[int], streams: int = 0
) -> tuple[TreeKV, tuple[str, ...]]:
    """A drafter's model: given layers, else distilled ones, else those that would be cut out, and why."""
    if layers:
        return drafting_kv(target, layers, None, 0, streams), ()
    facts, total = session.facts, target.config.num_layers
    head = sought(lambda: find_distilled(facts.name, facts.fingerprint, total))
    kept = layers_kept(total, 0) if head.found is None else ()
    kv = drafting_kv(target, kept, head.found, 0, streams)
    return kv, (head.trouble,) if head.trouble else ()


def _request(session: Session, prompt: str, tokens: int, temperature: float, name: str = "s") -> Request:
    ids = tuple(session.tokenizer.encode(prompt))
    return Request(name, ids, SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True))


def _on_worker(session: Session, label: str, work: Any) -> Trace:
    where = session.plan
    made = require(
        plan(
            Recipe(), session.facts, dtype=where.dtype, numerics=where.numerics, device=where.device,
            limits=where.limits,
        )
    )  # fmt: skip

    def run(job: Job, _: Engine) -> Generator[None, None, Trace]:
        decoder = session.decoder(made, lambda f, what: None, job.token)
        yield
        with torch.inference_mode():
            out: Trace = work(standalone_engine(made, decoder))
        return out

    found: Trace = session.task(label, run).result()
    return found
