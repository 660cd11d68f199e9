"""One engine step: schedule → draft → prepare → forward → verify and sample → commit → events.

The engine owns requests and sequences and is driven by one thread. It never asks which technique
it runs: attention, codec, drafter, verification and masks are the seams it was given. A request
that cannot be served raises when it is added; other requests are not affected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from time import perf_counter

from workbench.engine.admission import token_budget
from workbench.engine.choose import Chooser
from workbench.engine.clock import PhaseClock
from workbench.engine.commit import commit_tokens, flush_text
from workbench.engine.control import Controlling, DraftControl
from workbench.engine.done import Done
from workbench.engine.draft_seams import Drafter, Verify
from workbench.engine.drafting import Drafting, Runner
from workbench.engine.executor import Executor
from workbench.engine.kv import KVCache
from workbench.engine.rounds import RoundDone, Rounds
from workbench.engine.scheduler import Scheduler
from workbench.engine.seams import SpanPlan, StepPlan
from workbench.engine.selecting import Selecting
from workbench.engine.selection import KVSelector
from workbench.engine.sequence import Request, Sequence
from workbench.engine.spans import plan_spans
from workbench.engine.stops import StopMatcher
from workbench.engine.text import MakeStream
from workbench.spec.errors import DuplicateRequest, RequestError
from workbench.spec.events import DraftRecord, FinishReason, RequestEvent, StepEvent, TokenInfo


class Engine:
    """Continuous batching over one model.

    ``context`` is the limit of prompt and output together; ``static_bytes`` are bytes that do not
    change from step to step (weights), by category; ``path`` names the code really taken.
    """

    def __init__(
        self,
        executor: Executor,
        kv: KVCache,
        scheduler: Scheduler,
        *,
        context: int,
        eos_ids: Collection[int] = (),
        drafter: Drafter | None = None,
        runner: Runner | None = None,
        verify: Verify | None = None,
        control: DraftControl | None = None,
        selector: KVSelector | None = None,
        make_stream: MakeStream | None = None,
        static_bytes: Mapping[str, int] | None = None,
        path: tuple[str, ...] = (),
    ) -> None:
        self.executor = executor
        self.kv = kv
        self.scheduler = scheduler
        self.context = context
        self.vocab_size = executor.decoder.config.vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.drafting = Drafting(drafter, runner, self.vocab_size, self.eos_ids)
        self.controlling = Controlling(control)
        self.selecting = Selecting(selector, kv, executor)
        if selector is not None:
            scheduler.boundaries += (self.selecting.left,)
        self.make_stream = make_stream
        self.static_bytes = dict(static_bytes or {})
        self.path = path
        self.steps = 0
        self.rounds: Rounds | None = None  # decodes that are one program
        self._chooser = Chooser(verify, self.vocab_size)
        self._requests: dict[str, list[Sequence]] = {}
        self._ended: list[Sequence] = []  # in the step that runs
        self._ids = 0

    # -- requests -----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self._requests)

    def alive(self) -> list[str]:
        """Ids of requests that are waiting or running, oldest first."""
        return list(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises :class:`DuplicateRequest`, and what :func:`~workbench.engine.admission.token_budget` raises for
        a request that can never be served.
        """
        if request.id in self._requests:
            raise DuplicateRequest(
                f"Request id {request.id!r} is still alive.", hint="Abort it or use another id."
            )
        budget = token_budget(
            request,
            self.kv,
            context=self.context,
            vocab_size=self.vocab_size,
            max_sequences=self.scheduler.max_sequences,
            block=self.scheduler.budget or None,
        )
        samples = [self._sequence(request, i, budget) for i in range(request.params.n)]
        samples[0].siblings = samples[1:]
        self._requests[request.id] = samples
        for seq in samples:
            self.selecting.begin(seq)
        self.scheduler.add(samples[0])

    def abort(self, request_id: str, reason: FinishReason = "abort") -> list[RequestEvent]:
        """End a request now; unknown or finished ids are ignored. Text held back so far is delivered."""
        events = []
        for seq in self._requests.pop(request_id, ()):
            if seq.state == "finished":
                continue
            if seq.finish is None:
                seq.finish = reason
                text = flush_text(seq)
                seq.text += text
                events.append(self._event(seq, (), text))
            self._retire(seq)
        return events

    def reset(self) -> list[RequestEvent]:
        """End every request, e.g. after an exception inside a step; the engine is usable afterwards."""
        self._ended.clear()
        return [e for request_id in self.alive() for e in self.abort(request_id, "error")]

    def sequences(self, request_id: str) -> list[Sequence]:
        """The samples of a request that is alive."""
        return list(self._requests.get(request_id, ()))

    # -- one step -----------------------------------------------------------------------------------

    def step(self) -> tuple[StepEvent, list[RequestEvent]]:
        """Run one iteration and return what happened."""
        clock = PhaseClock()
        self.steps += 1
        batch = self.scheduler.select(self.drafting.max_draft)
        self.controlling.limit(batch)
        clock("schedule")
        done = Done(batch)
        if self.rounds is not None:
            self._fused(self.rounds.run(batch, self.steps, clock), done)
            clock("commit")
        drafts = done.drafts
        drafts.update(self.drafting.propose(batch, self.kv.extend))
        clock("draft")
        self.scheduler.secure(batch, drafts)
        for seq in batch.preempted:
            self.drafting.forget(seq)
        spans = plan_spans(batch, drafts)
        clock("schedule")
        if spans:
            plan = StepPlan(self.steps, tuple(span for _, span in spans))
            queries = self.selecting.wants(spans)
            states, layers = self.drafting.enter(plan, whole=queries)
            clock("forward")
            prepared = self.executor.prepare(plan)
            clock("prepare")
            for seq, _ in spans:
                self.drafting.meet(seq)
            out = self.executor.forward(
                prepared, self.drafting.features, queries=queries, states=states, layers=layers
            )
            done.queries, done.captured = out.queries, out.captured
            clock("forward")
            chosen = self._chooser.choose(
                out.logits,
                [(seq, span, drafts.get(seq.id)) for seq, span in spans],
                out.offsets,
                self.steps,
                clock,
            )
            for (seq, span), choice in zip(spans, chosen, strict=True):
                try:
                    if isinstance(choice, RequestError):
                        raise choice
                    if seq.state == "running":
                        self._commit(seq, span, choice, done)
                except RequestError as err:
                    done.events.extend(self._fail(seq, err))
                done.rows += span.n_new
        peak = max(done.peak, self._retire_ended(), key=lambda held: sum(held.values()))
        clock("commit")
        event = self._step_event(clock, done, peak)
        self.controlling.learn(event, drafts, self._chooser.verdicts if spans else {})
        return event, done.events

    # -- inside ----------------------------------------------------------------------------------------

    def _sequence(self, request: Request, sample: int, budget: int) -> Sequence:
        self._ids += 1
        params = request.params
        return Sequence(
            id=self._ids,
            request=request,
            sample=sample,
            tokens=list(request.prompt),
            budget=budget,
            stream=self.make_stream() if self.make_stream is not None else None,
            stops=StopMatcher(params.stop, params.include_stop) if params.stop else None,
        )

    def _fused(self, rounds: list[RoundDone], done: Done) -> None:
        """Make the outcome of rounds final that were one program."""
        for each in rounds:
            seq, done.drafts[each.seq.id] = each.seq, each.tree
            self._chooser.verdicts[seq.id] = each.verdict
            try:
                if each.error is not None:
                    raise each.error
                self._commit(seq, each.span, [each.infos], done)
            except RequestError as err:
                done.events.extend(self._fail(seq, err))
            done.fused += 1

    def _commit(
        self,
        seq: Sequence,
        span: SpanPlan,
        choice: list[tuple[TokenInfo, ...]],
        done: Done,
    ) -> None:
        """Make one span's outcome final: KV, tokens, selection, drafter, forks, retirement.

        Raises :class:`RequestError` for what ends this request alone.
        """
        tree = done.drafts.get(seq.id)
        path = self._chooser.verdicts.get(seq.id)
        base = span.start + span.n_new - (len(tree.tokens) if tree else 0)
        accepted = path.path if path is not None else ()
        if accepted and tuple(range(len(accepted))) != accepted:
            self.kv.move(seq, [base + i for i in accepted], list(range(base, base + len(accepted))))
        infos = choice[0] if choice else ()
        gained = commit_tokens(seq, infos, self.eos_ids)
        if not infos and seq.budget == 0 and span.start + span.n_new >= seq.prompt_len:
            self._end_scoring(seq, done.events)
        computed = min(base + len(accepted), len(seq.tokens) - 1) if infos else base
        own = [*range(base - span.start), *(base - span.start + i for i in accepted)]
        rows = [done.rows + i for i in own[: computed - span.start]]
        self.drafting.before_commit(seq, span.start, computed, rows, done.captured)
        self.kv.commit(seq, computed)
        self.drafting.after_commit(seq)
        if seq.finish is None:
            self._select(seq, span.start, rows, done)
        if tree is not None and path is not None:
            done.records.append(
                DraftRecord(
                    request_id=seq.request.id,
                    tokens=tree.tokens,
                    parents=tree.parents,
                    accepted=accepted,
                    emitted=gained.kept,
                    source=tree.source,
                    rule=path.rule or self._chooser.rule(tree, seq),
                    expected=path.expected,
                    mismatch=path.mismatch,
                    root=span.tokens[base - span.start - 1],
                    own=infos[-1].id,
                    chances=tree.chances(),
                    exit=tree.exit,
                )
            )
        self.drafting.commit(seq, gained.infos)
        if infos and seq.siblings:
            self._fork(seq, choice[1:], done.events)
        if gained.kept or seq.finish:
            done.events.append(self._event(seq, gained.infos, gained.text))
        if seq.finish is not None:
            self._ended.append(seq)

    def _select(self, seq: Sequence, start: int, rows: list[int], done: Done) -> None:
        """Let the KV selector act; a sequence that finds no pages for what is kept is computed again."""
        if not done.peak and self.selecting.acts(seq, start):
            done.peak = self.memory()  # the step's most: rows go now
        if not self.selecting.commit(seq, start, rows, done.queries):
            self.scheduler.preempt(seq, done.batch)
            self.drafting.forget(seq)

    def _fail(self, seq: Sequence, error: RequestError) -> list[RequestEvent]:
        """End the whole request of a sequence that cannot go on; others are not affected."""
        return [replace(e, error=error.to_dict()) for e in self.abort(seq.request.id, "error")]

    def _fork(
        self, parent: Sequence, choices: list[tuple[TokenInfo, ...]], events: list[RequestEvent]
    ) -> None:
        """The prompt is computed: its other samples start here, on shared pages."""
        siblings, parent.siblings = parent.siblings, []
        waiting = []
        for child, infos in zip(siblings, choices, strict=True):
            forked = self.kv.fork(parent, child)
            child.prompt_logprobs = parent.prompt_logprobs
            gained = commit_tokens(child, infos, self.eos_ids)
            child.state = "running" if forked else "waiting"
            if forked:
                self.drafting.fork(parent, child)
                self.scheduler.running.append(child)
                self.scheduler.running.sort(key=lambda s: s.id)
            else:
                waiting.append(child)
            events.append(self._event(child, gained.infos, gained.text))
            if child.finish is not None:
                self._ended.append(child)
        self.scheduler.waiting.extendleft(reversed(waiting))  # ahead of later requests, in their order

    def _end_scoring(self, seq: Sequence, events: list[RequestEvent]) -> None:
        """The prompt was all that was asked for: its other samples end with it."""
        siblings, seq.siblings = seq.siblings, []
        for sample in (seq, *siblings):
            sample.finish = "length"
        for sibling in siblings:
            sibling.prompt_logprobs = seq.prompt_logprobs
            events.append(self._event(sibling, (), ""))
            self._ended.append(sibling)

    def _retire_ended(self) -> dict[str, int]:
        """Retire what ended in this step, all at once; returns the bytes held before their pages went back.

        A request of one step would otherwise never be seen holding anything.
        """
        if not self._ended:
            return {}
        peak = self.memory()
        for seq in self._ended:
            self._retire(seq)
        self._ended.clear()
        return peak

    def _retire(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        self.drafting.forget(seq)
        self.controlling.forget(seq.id)
        samples = self._requests.get(seq.request.id)
        if samples is not None and all(s.state == "finished" for s in samples):
            del self._requests[seq.request.id]

    def _event(self, seq: Sequence, infos: tuple[TokenInfo, ...], text: str) -> RequestEvent:
        first = bool(infos) and seq.n_generated == len(infos)
        return RequestEvent(
            request_id=seq.request.id,
            step=self.steps,
            time=perf_counter(),
            tokens=infos,
            text=text,
            sample=seq.sample,
            cached_tokens=seq.cached_tokens if first or seq.finish else None,
            finish=seq.finish,
        )

    def memory(self) -> dict[str, int]:
        """Bytes by category, from storages held; categories add up to what the engine holds."""
        kv = self.kv.nbytes(self.scheduler.running)
        kv["kv_meta"] += self.selecting.nbytes(self.scheduler.running)
        return {**self.static_bytes, **kv, "draft": self.drafting.nbytes() + self.controlling.nbytes()}

    def _step_event(
        self,
        clock: PhaseClock,
        done: Done,
        peak: Mapping[str, int],
    ) -> StepEvent:
        batch, drafts = done.batch, done.drafts
        pools = self.kv.each_pool
        cold = self.kv.cold.tier if self.kv.cold is not None else None
        prefill = sum(n for _, n in batch.prefills)
        drafted = sum(len(t.tokens) for t in drafts.values())
        decode = len(batch.decodes) + done.fused
        memory = self.memory()
        clock("emit")
        return StepEvent(
            step=self.steps,
            time=clock.start,
            rows=prefill + decode + drafted,
            prefill=prefill,
            decode=decode,
            draft=drafted,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            phase_ms=clock.ms,
            pages_used=sum(pool.used for pool in pools),
            pages_cached=sum(pool.cached for pool in pools),
            pages_free=sum(pool.free - pool.cached for pool in pools),
            bytes=memory,
            drafts=tuple(done.records),
            preempted=tuple(s.request.id for s in batch.preempted),
            path=self.path,
            peak=peak,
            cold=cold.report() if cold is not None else {},
            warnings=(*(cold.warnings() if cold is not None else ()), *self.drafting.warnings()),
        )
