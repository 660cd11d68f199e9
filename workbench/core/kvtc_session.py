"""KVTC for a session's model: calibrated once, planned for the ratios asked for, ready to encode."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from workbench.core.bound import attention_op
from workbench.core.build_weights import weights_key
from workbench.core.kvtc_calibration import kvtc_calibration
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.config import Config
from workbench.kv.kvtc.joint import JointRows

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine


def submit_kvtc(session: Session, config: Config | None = None) -> Job:
    """Queue the making of a codec for the session's present weights; the job's result is a :class:`Kvtc`.

    Minutes when the weights were not calibrated yet, with progress and cancel, else about a second. The job
    fails as :func:`kvtc_calibration` and :class:`Kvtc` do.
    """
    config = config or Config()
    plan = session.plan

    def work(job: Job, _: Engine) -> Generator[None, None, Kvtc]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        decoder = session.decoder(plan, told, job.token)
        yield
        calibration = kvtc_calibration(
            decoder,
            lambda: attention_op(plan, decoder.config),
            model=plan.model,
            weights=weights_key(plan),
            progress=told,
            cancel=job.token,
        )
        yield
        return Kvtc(
            calibration.artefact(config.k_ratio, config.v_ratio),
            JointRows(decoder.config),
            decoder.weights.fingerprint,
            sinks=config.sinks,
            window=config.window,
            entropy=config.entropy,  # type: ignore[arg-type]  # Kvtc refuses what is no stage
        )

    return session.task("calibrating KVTC", work)
