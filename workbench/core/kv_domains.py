"""KVTC on text of another kind than it was calibrated on, beside the shipped calibration, by protocol P1.

For each domain of the shipped text: what is scored is of that domain, once with the calibration that every
user has (a fifth of all domains), once with one made of all documents of the other domains. In-domain
calibration flatters a learnt basis; this says by how much.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from workbench.core.build import standalone_engine
from workbench.core.build_weights import weights_key
from workbench.core.domains import CHAT, domains, evaluation_ids, ids_without
from workbench.core.kv_bench import methods_bench, named_metrics
from workbench.core.kv_p1 import p1_steps
from workbench.core.kv_points import Points, point_key
from workbench.core.kv_prepared import Prepared
from workbench.core.kv_result import MethodResult
from workbench.core.kv_storage_methods import Bench, kvtc_calibrated, kvtc_method
from workbench.core.kvtc_calibration import LENGTH, cut_sequences
from workbench.core.quality import quality_plans
from workbench.core.quality_windows import QualitySettings, cut
from workbench.engine.engine import Engine
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.joint import JointRows
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session

SHIPPED, OTHERS = "shipped calibration", "other domains only"
RATIOS = (16, 32)
_KEPT = ("kl", "perplexity_change", "top1", "codec_ratio")
Found = dict[tuple[str, int, str], MethodResult]


def chosen_domains(only: Sequence[str]) -> list[str]:
    """All domains, or those named. Raises :class:`OptionError` for one that does not exist."""
    unknown = [d for d in only if d not in domains()]
    if unknown:
        raise OptionError(f"{unknown[0]!r} is no domain.", hint=f"Cells are {', '.join(domains())}.")
    return [d for d in domains() if not only or d in only]


def submit_domains(
    session: Session,
    settings: QualitySettings,
    *,
    only: Sequence[str] = (),
    ratios: Sequence[int] = RATIOS,
    points: Points | None = None,
) -> Job:
    """Queue the measurement; results are by domain, ratio and calibration.

    Raises :class:`OptionError` for a domain that does not exist, :class:`RequestError` when one is too short
    for the settings, both at once.
    """
    wanted = chosen_domains(only)
    tokenizer = session.tokenizer
    windows = {d: cut(evaluation_ids(d, tokenizer), settings) for d in wanted}
    plan, _ = quality_plans(session.plan, Recipe(), session.facts, settings)

    def work(job: Job, _: Engine) -> Generator[None, None, Found]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        decoder = session.decoder(plan, told, job.token)
        yield
        engine = standalone_engine(plan, decoder)
        bench, joint = Bench(plan, decoder, told, job.token), JointRows(decoder.config)
        about = point_key(decoder.weights.fingerprint, decoder.config, weights_key(plan), settings.chunk)
        length = min(LENGTH, decoder.config.max_position)
        found: Found = {}
        for number, domain in enumerate(wanted):
            made = {SHIPPED: kvtc_calibrated(bench)}
            yield
            if domain != CHAT:  # nothing is calibrated on chat
                ids = cut_sequences(ids_without(domain, tokenizer.encode), length)
                text = f"{len(ids)} x {length} tokens of all shipped text but {domain}"
                made[OTHERS] = kvtc_calibrated(bench, text=(text, ids))
                yield
            methods: dict[str, Prepared] = {}
            keys: dict[str, tuple[str, int, str]] = {}
            for which, calibration in made.items():
                for ratio in ratios:
                    codec = Kvtc(calibration.artefact(ratio, ratio), joint, decoder.weights.fingerprint)
                    name = f"{domain}, kvtc {ratio}×, {which}"
                    methods[name], keys[name] = kvtc_method(codec), (domain, ratio, which)

            def tell(done: float, total: float, what: str, at: int = number) -> None:
                job.progress(at + done / total, len(wanted), "domains", what)

            result = yield from p1_steps(engine, windows[domain], methods, settings, tell, points, about)
            found |= {keys[name]: one for name, one in result.items()}
        return found

    return session.task("KVTC by domain", work)


def domains_run(session: Session, settings: QualitySettings, found: Found) -> Run:
    """All of it as one run; metrics are named ``domain, kvtc ratio, calibration:metric``."""
    metrics: list[Metric] = []
    names = []
    for (domain, ratio, which), result in found.items():
        names.append(f"{domain}, kvtc {ratio}×, {which}")
        metrics += named_metrics(names[-1], result, _KEPT)
    bench = {"name": "kv_domains", "contestants": names}
    notes = ("nothing is calibrated on chat; documents that are scored are in no calibration",)
    return methods_bench(session, settings, bench, metrics, notes)
