"""Saving and resuming conversations as tasks of a session, with progress and cancel."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.core import catalog
from workbench.core.at_rest import RAW, at_rest_codec, bound_storage, raw_codec, storage_use
from workbench.core.bound import attention_op, context_of
from workbench.core.build_weights import weights_key
from workbench.core.kv_groups import drafter_layers
from workbench.core.runner import Requested
from workbench.core.saved_cache import Resumed, Saved, resume_steps, save_steps, shaped_by
from workbench.core.saved_file import Shaped, path_of
from workbench.engine.at_rest import AtRest
from workbench.engine.params import SamplingParams
from workbench.models.chat import Message
from workbench.models.progress import Progress
from workbench.spec.errors import PayloadError, RequestError, WorkbenchError
from workbench.spec.plan import Plan
from workbench.spec.recipe import Use
from workbench.spec.run import Run

if TYPE_CHECKING:
    from workbench.core.jobs import CancelToken, Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

Conversation = str | Sequence[int] | Sequence[Message] | Run


def submit_save(
    session: Session, path: str | Path, conversation: Conversation, codec: str | Use = RAW, salt: str = ""
) -> Job:
    """Queue the saving; the job's result is a :class:`Saved`.

    Raises :class:`RecipeError` and :class:`OptionError` for a codec that cannot be, :class:`RequestError` for
    what is no conversation, :class:`StorageError` for what names no file, at once.
    """
    use, file = storage_use(codec), path_of(path)
    ids = token_ids(session, conversation, salt)

    def work(job: Job, engine: Engine) -> Generator[None, None, Saved]:
        told, plan = _teller(job), session.plan
        made = _codec(session, plan, use, known=False, progress=told, cancel=job.token)
        if made.lossy and engine.selecting.selector is not None:
            raise RequestError(
                "A conversation is coded whole, and KV selection is on.",
                hint="Save it raw, or switch it off.",
            )
        yield
        layers = drafter_layers(plan, engine.executor.decoder.config)
        drafter = "" if not layers else f"{layers} KV layers" if not made.lossy else "the drafter starts cold"
        done = yield from save_steps(
            engine,
            file,
            ids,
            made,
            use,
            _shaped(engine, plan),
            model=plan.model,
            salt=salt,
            drafter=drafter,
            progress=told,
            cancel=job.token,
        )
        return done

    return session.task(f"saving a conversation to {path}", work)


def submit_resume(session: Session, path: str | Path) -> Job:
    """Queue the resuming; the job's result is a :class:`Resumed`.

    The job fails with :class:`PayloadError` for a file that does not belong here, and with
    :class:`RequestError` when no prefix index is switched on. Raises :class:`StorageError` at once for what
    names no file.
    """
    file = path_of(path)

    def work(job: Job, engine: Engine) -> Generator[None, None, Resumed]:
        told, plan = _teller(job), session.plan
        if engine.kv.index is None:
            raise RequestError(
                "There is no prefix index that could find a resumed conversation.",
                hint="Switch on paged and prefix_cache, or radix_cache.",
            )

        def make(codec: dict[str, Any]) -> AtRest:
            try:
                use = storage_use(Use.from_json(codec))
            except WorkbenchError as error:
                raise PayloadError(f"It names no codec: {error.message}", hint=error.hint) from None
            return _codec(session, plan, use, known=True, progress=None, cancel=job.token)

        done = yield from resume_steps(engine, file, make, _shaped(engine, plan), told, job.token)
        return done

    return session.task(f"resuming {path}", work)


def token_ids(session: Session, conversation: Conversation, salt: str = "") -> list[int]:
    """The ids of a conversation: of a prompt, or of a run's first prompt and output.

    Raises :class:`RequestError` for anything else, and for a run whose prompt its text does not spell.
    """
    if not isinstance(conversation, Run):
        return list(Requested.of(conversation, SamplingParams(), session.tokenizer, None, salt).ids)
    if not conversation.outputs:
        raise RequestError("This run has no output.", hint="Save a run that generated something.")
    output = conversation.outputs[0]
    ids = token_ids(session, str(output["prompt"]), salt)
    if len(ids) != output["prompt_tokens"]:
        raise RequestError(
            "The prompt of this run was given as token ids that its text does not spell.",
            hint="Save the token ids: prompt and output, one after the other.",
        )
    return ids + list(output["token_ids"])


def _shaped(engine: Engine, plan: Plan) -> Shaped:
    keeping = [use.to_text() for use in plan.recipe if catalog.get(use.id).spec.keeps_kv]
    method = weights_key(plan)[-1]
    return shaped_by(engine, method=method, numerics=plan.numerics, drafter=" ".join(keeping))


def _codec(
    session: Session,
    plan: Plan,
    use: Use,
    *,
    known: bool,
    progress: Progress | None,
    cancel: CancelToken,
) -> AtRest:
    if use.id == RAW:
        return raw_codec()
    decoder = session.decoder(plan, progress or (lambda done, what: None), cancel)
    return at_rest_codec(
        bound_storage(use, context_of(plan, decoder.config)),
        decoder,
        lambda: attention_op(plan, decoder.config),
        model=plan.model,
        weights=weights_key(plan),
        whole=True,
        tokenizer=session.tokenizer,
        known=known,
        progress=progress,
        cancel=cancel,
    )


def _teller(job: Job) -> Progress:
    return lambda done, what: job.progress(done, 1.0, "", what)
