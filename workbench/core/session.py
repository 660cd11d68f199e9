"""A session: one model, one device, exactly one worker thread.

Callers (cells, widget callbacks, scripts), from any thread, only post work and wait or listen; the worker
(:mod:`workbench.core.worker`) owns the model, the engine and the KV cache. An exception ends its job, never
the session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from threading import get_ident
from typing import Any
from weakref import finalize

import torch

from workbench.core.build_kv import require_memory
from workbench.core.jobs import CancelToken, Job
from workbench.core.plan import ModelFacts, plan, require, why_not
from workbench.core.room import present
from workbench.core.runner import Requested, RequestJob
from workbench.core.saved_session import Conversation, submit_resume, submit_save
from workbench.core.state import EngineState
from workbench.core.worker import Listener, Task, Worker
from workbench.engine.params import SamplingParams
from workbench.engine.seams import LogitsMask
from workbench.engine.snapshot import PageSnapshot, SequenceKept, kept_snapshot, page_snapshot
from workbench.models.chat import Message
from workbench.models.decoder import Decoder
from workbench.models.progress import Progress
from workbench.models.registry import open_source
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import ModelNotFound, OptionError, RequestError, SamplingError
from workbench.spec.plan import Conflict, DType, EngineLimits, Numerics, Plan, check_threads
from workbench.spec.recipe import Recipe, Use
from workbench.spec.run import Run


class Session:
    """Runs recipes on a model.

    ``model`` is a name of the registry or a folder (never downloaded here: ``workbench fetch``).
    ``limits`` sizes the KV pool and the batch. ``load``: False takes no memory before the first
    :meth:`apply`. Use it as a context manager, or call :meth:`close`.
    Raises :class:`ModelNotFound` and other :class:`ModelError` s when the model cannot be opened,
    :class:`PlanError` when the first recipe does not fit, and :class:`OptionError` when the KV pool does not.
    """

    def __init__(
        self,
        model: str,
        recipe: Recipe | None = None,
        *,
        dtype: DType = "bfloat16",
        numerics: Numerics = "fast",
        device: str = "cpu",
        limits: EngineLimits | None = None,
        threads: int | None = None,
        profile: str = "interactive",
        load: bool = True,
    ) -> None:
        if not isinstance(model, str | Path):
            raise ModelNotFound(f"{model!r} is no model.", hint="Give a name or a folder.")
        self.source = open_source(model)
        self.tokenizer = load_tokenizer(model)
        self.facts = ModelFacts(str(model), self.source.config, self.source.fingerprint)
        self.profile = profile
        self._where: dict[str, Any] = {
            "dtype": dtype,
            "numerics": numerics,
            "device": device,
            "limits": limits,
        }
        first = require(plan(recipe or Recipe(), self.facts, **self._where))
        if not present(device):
            raise OptionError(f"device = {device!r}, but there is no such device here.", hint="Choose cpu.")
        if load:
            require_memory(first, self.source.config)
        check_threads(threads)
        if threads is not None:
            torch.set_num_threads(threads)
        self._state = EngineState(self.source, self.tokenizer)
        self._worker = Worker(self._state, first)
        self._worker.start()
        # Also at exit: a worker still inside a kernel while the interpreter is torn down would abort it.
        finalize(self, self._worker.stop)
        if load:
            self._worker.post_plan(first)

    # -- what callers use ------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that is running, or about to."""
        return self._worker.plan

    @property
    def recipe(self) -> Recipe:
        """The recipe that is running, or about to."""
        return self.plan.recipe

    def why_not(self, technique_id: str) -> list[Conflict]:
        """What stands against switching a technique on now; empty when nothing does."""
        return why_not(self.recipe, technique_id, self.facts, **self._where)

    def apply(self, recipe: Recipe) -> Job:
        """Switch to another recipe; rebuilds only what differs. Returns a *live* job.

        Raises :class:`PlanError`, :class:`UnknownTechnique` or :class:`OptionError` at once and changes
        nothing if the recipe does not fit. Requests in flight finish their step and end as *superseded*
        with what they have. A newer recipe supersedes one that still waits.
        """
        return self._worker.post_plan(require(plan(recipe, self.facts, **self._where)))

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        mask: LogitsMask | None = None,
        salt: str = "",
        context: int | None = None,
        label: str = "",
    ) -> RequestJob:
        """Queue one prompt (text, token ids, or chat messages); the *request* job's result is a :class:`Run`.

        ``salt`` keeps cached prefixes apart. ``context``: tokens of the prompt that come before the question,
        for KV selection that must not see it. Errors of the request itself (empty, too long, can never fit)
        end that job only.
        """
        return self.submit_all(
            [prompt], [params or SamplingParams()], mask=mask, salt=salt, context=context, label=label
        )

    def submit_all(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[Message]],
        params: Sequence[SamplingParams],
        *,
        mask: LogitsMask | None = None,
        salt: str = "",
        context: int | None = None,
        label: str = "",
    ) -> RequestJob:
        """Queue several prompts as one batch with one :class:`Run` as result.

        Raises :class:`RequestError` when a prompt or its settings are of a wrong kind.
        """
        if not prompts or len(prompts) != len(params):
            raise RequestError(
                f"There are {len(prompts)} prompts and {len(params)} sampling settings.",
                hint="Give one SamplingParams per prompt, and at least one prompt.",
            )
        requested = [
            Requested.of(p, s, self.tokenizer, mask, salt, context)
            for p, s in zip(prompts, params, strict=True)
        ]
        job = RequestJob(requested, label or requested[0].text[:40], self._worker.emit, self.profile)
        self._worker.post_requests(job)
        return job

    def generate(self, prompts: str | Sequence[Any], **sampling: Any) -> Run:
        """Generate and wait. ``prompts`` is a text, chat messages, or a list of texts.

        Keywords are those of :class:`SamplingParams`.

        With several prompts, prompt ``i`` uses ``seed + i``. An interrupt cancels the run.
        """
        several = isinstance(prompts, list | tuple) and bool(prompts)
        items = list(prompts) if several and isinstance(prompts[0], str | list | tuple) else [prompts]
        known = {f.name for f in fields(SamplingParams)}
        for name in sampling.keys() - known:
            raise SamplingError(f"{name} is no sampling setting.", hint=f"Known: {', '.join(sorted(known))}.")
        first = SamplingParams(**sampling)
        params = [replace(first, seed=first.seed + i) for i in range(len(items))]
        run: Run = self.submit_all(items, params).result()
        return run

    def save_cache(
        self, path: str | Path, conversation: Conversation, codec: str | Use = "raw", *, salt: str = ""
    ) -> Job:
        """Write the KV of a conversation (a prompt, token ids, or a run) to a file; what is not cached is
        computed. ``codec``: ``raw``, ``kvtc`` or ``cachegen`` with options; ``salt``: its namespace.

        The *task* job's result is a :class:`workbench.core.saved_cache.Saved`. Raises :class:`RecipeError`,
        :class:`OptionError` or :class:`RequestError` at once for what cannot be saved.
        """
        return submit_save(self, path, conversation, codec, salt)

    def resume(self, path: str | Path) -> Job:
        """Put a saved conversation into the cache; the next prompt that begins with it starts behind it.

        The *task* job's result is a :class:`workbench.core.saved_cache.Resumed`; pass its ``salt`` to
        :meth:`submit`, since what a lossy codec gave back serves nobody else. It fails with
        :class:`PayloadError` when the file is damaged or belongs to something else; nothing has changed then.
        """
        return submit_resume(self, path)

    def task(self, label: str, work: Task) -> Job:
        """Queue long work: the generator ``work(job, engine)`` is advanced by one ``yield`` between steps.

        Its return value becomes the job's result; cancelling takes effect at the next ``yield``.
        """
        return self._worker.post_task(label, work)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Receive every event, on the worker's thread; returns a function that stops it.

        A listener must be quick and must not wait for jobs of this session.
        """
        listeners = self._worker.listeners
        listeners.append(listener)
        return lambda: listeners.remove(listener) if listener in listeners else None

    def cancel_all(self) -> None:
        """Stop all requests and tasks, queued or running; partial results are kept, the recipe stays."""
        self._worker.cancel_all()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no job is queued or running; False when ``timeout`` seconds passed first."""
        return self._worker.wait_idle(timeout)

    def decoder(self, plan: Plan, progress: Progress, cancel: CancelToken) -> Decoder:
        """The decoder of a plan's weight set, built if not resident. For tasks, on the worker's thread."""
        return self._state.decoder(plan, progress, cancel)

    def pages(self) -> PageSnapshot | None:
        """Who holds which page. Only for listeners: on the worker's thread, where the engine stands still."""
        engine = self._state.engine
        mine = get_ident() == self._worker.ident
        return page_snapshot(engine) if engine is not None and mine else None

    def kept(self) -> tuple[SequenceKept, ...]:
        """What a KV selector kept of each running sequence. Only for listeners, as :meth:`pages`."""
        engine = self._state.engine
        mine = get_ident() == self._worker.ident
        return kept_snapshot(engine) if engine is not None and mine else ()

    def memory(self) -> dict[str, int]:
        """Bytes held by category, as of the last step or change; ``weights_kept`` are sets not in use now.

        A run's ``memory`` is that of its recipe alone and leaves those out.
        """
        return dict(self._state.held)

    def rest(self) -> Job:
        """Free weights and cache once requests are over; the session stays open, and what is asked of it next
        builds them again. Returns a job that ends when the memory is free.
        """
        return self._worker.post_rest()

    def close(self) -> None:
        """Cancel everything, end the worker, free the model and the cache. Closing twice is fine.

        A session that nobody holds any more closes itself.
        """
        self._worker.stop()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
