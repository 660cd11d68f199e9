"""A request job: prompts in, events collected while the engine works on them, one run out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from time import perf_counter
from typing import Any

from workbench.core.jobs import Job
from workbench.core.report import Collected, Output, build_run
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.seams import LogitsMask
from workbench.engine.sequence import Request
from workbench.engine.sequence import Sequence as EngineSequence
from workbench.models.chat import Message
from workbench.models.tokenizer import Tokenizer, check_text
from workbench.spec import errors
from workbench.spec.errors import RequestError, WorkbenchError
from workbench.spec.events import Event, JobState, RequestEvent, StepEvent
from workbench.spec.plan import Plan


@dataclass(frozen=True)
class Requested:
    """One prompt as it was asked for: its text, its ids, its sampling."""

    text: str
    ids: tuple[int, ...]
    params: SamplingParams
    mask: LogitsMask | None = None
    salt: str = ""
    context: int | None = None
    notices: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        prompt: str | Sequence[int] | Sequence[Message],
        params: SamplingParams,
        tokenizer: Tokenizer,
        mask: LogitsMask | None = None,
        salt: str = "",
        context: int | None = None,
    ) -> Requested:
        """Text is encoded as it is, messages go through the chat template, ids are taken as they are.

        Raises :class:`RequestError` for anything else, :class:`TokenizerError` for malformed messages.
        """
        _check(params, mask, salt, context)
        if isinstance(prompt, str):
            return cls(prompt, tuple(tokenizer.encode(prompt)), params, mask, salt, context)
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray | Mapping):
            raise _no_prompt(prompt)
        items: list[Any] = list(prompt)
        if items and isinstance(items[0], dict):
            chat = tokenizer.chat(items)
            notices = (chat.fallback.notice,) if chat.fallback is not None else ()
            return cls(chat.text, tuple(chat.ids), params, mask, salt, context, notices)
        ids = tuple(_token_id(t) for t in items)
        known = [t for t in ids if 0 <= t < tokenizer.vocab_size]
        return cls(tokenizer.decode(known, skip_special=False), ids, params, mask, salt, context)


@dataclass
class _Part:
    """One prompt of a job: its request id and what came of it, per sample."""

    request_id: str
    requested: Requested
    outputs: list[Output] = field(default_factory=list)
    sequences: list[EngineSequence] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return any(o.finish is None for o in self.outputs)


class RequestJob(Job):
    """A batch of prompts on its way through the engine."""

    def __init__(
        self, requested: Sequence[Requested], label: str, notify: Callable[[Event], None], profile: str
    ) -> None:
        super().__init__("request", label, notify)
        self.requested = list(requested)
        self.profile = profile
        self.added = False
        self.submitted = self.ready = perf_counter()
        self._parts = [_Part(f"{self.id}/{i}", r) for i, r in enumerate(self.requested)]
        self._by_id = {p.request_id: p for p in self._parts}
        self._steps: list[StepEvent] = []
        self._plan: Plan | None = None

    @property
    def request_ids(self) -> list[str]:
        """Engine ids of its requests, in order of the prompts."""
        return list(self._by_id)

    @property
    def text(self) -> str:
        """Text of the first output so far."""
        return self._parts[0].outputs[0].text if self._parts and self._parts[0].outputs else ""

    # -- called by the worker -----------------------------------------------------------------------

    def add_to(self, engine: Engine, plan: Plan, ready: float) -> None:
        """Hand the prompts to the engine, there since ``ready``; one that cannot be served fails alone."""
        self.ready = max(self.submitted, ready)
        self.start()
        self.added, self._plan = True, plan
        for part in self._parts:
            r = part.requested
            streams = [engine.make_stream() if engine.make_stream else None for _ in range(r.params.n)]
            part.outputs = [Output(r.text, r.ids, i, r.params, s) for i, s in enumerate(streams)]
            try:
                engine.add(Request(part.request_id, r.ids, r.params, r.mask, r.salt, r.context))
                part.sequences = engine.sequences(part.request_id)
            except RequestError as err:
                if len(self._parts) == 1:
                    raise
                for out in part.outputs:
                    out.finish, out.error = "error", err.to_dict()

    def take(self, step: StepEvent | None, events: Sequence[RequestEvent]) -> None:
        """Collect what a step brought; events of other jobs are ignored."""
        if step is not None:
            self._steps.append(step)
        for event in events:
            part = self._by_id.get(event.request_id)
            if part is not None:
                part.outputs[event.sample].take(event)
        total = sum(r.params.max_tokens * r.params.n for r in self.requested)
        self.progress(sum(len(o.tokens) for p in self._parts for o in p.outputs), total, "tokens")

    @property
    def complete(self) -> bool:
        """True when every output has ended."""
        return self.added and not any(p.open for p in self._parts)

    def close(self, engine: Engine | None, state: JobState, error: WorkbenchError | None = None) -> None:
        """End the job with the run of what it has; its open requests are aborted.

        A job of one prompt that the engine gave up fails with that error; its run is still its value.
        """
        if engine is not None and self.added:
            for part in self._parts:
                for out, seq in zip(part.outputs, part.sequences, strict=False):
                    out.prompt_logprobs = dict(seq.prompt_logprobs)
                if part.open:
                    self.take(None, engine.abort(part.request_id))
        if error is not None and self._plan is None:
            self.fail(error)
            return
        refused = self._parts[0].outputs[0].error if len(self._parts) == 1 and self.added else None
        if state == "done" and refused is not None:
            error = _typed(refused)
            self._value = self._run(engine, "failed", error)
            self.fail(error)
            return
        self.finish(self._run(engine, state, error), state)

    def _run(self, engine: Engine | None, state: JobState, error: WorkbenchError | None) -> Any:
        outputs = [o for p in self._parts for o in p.outputs]
        collected = Collected(
            outputs=outputs,
            steps=self._steps,
            submitted=self.submitted,
            ready=self.ready,
            seed=self.requested[0].params.seed if self.requested else 0,
            notices=tuple(dict.fromkeys(n for r in self.requested for n in r.notices)),
        )
        memory = engine.memory() if engine is not None else {}
        return build_run(collected, self._plan, state, self.profile, memory, error)


def _check(params: object, mask: object, salt: object, context: object) -> None:
    """What a caller passes beside the prompt; a wrong type found in a step would end its neighbours too."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"{params!r} are no sampling settings.", hint="Pass SamplingParams(...).")
    if mask is not None and not callable(getattr(mask, "allowed", None)):
        raise RequestError(
            f"{mask!r} is no logits mask.", hint="A mask has a method allowed(generated, path)."
        )
    if not isinstance(salt, str):
        raise RequestError(f"salt = {salt!r} is no text.", hint="Any string separates cached prefixes.")
    check_text(salt, "salt")
    if context is not None and (not isinstance(context, int) or isinstance(context, bool)):
        raise RequestError(
            f"context = {context!r} is no number of tokens.",
            hint="Give how many tokens of the prompt come before the question.",
        )


def _token_id(value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _no_prompt(value) from None


def _no_prompt(value: object) -> RequestError:
    return RequestError(
        f"{value!r} of type {type(value).__name__} is no prompt or token id.",
        hint="A prompt is text, a list of token ids, or a list of chat messages.",
    )


def _typed(error: Mapping[str, str]) -> RequestError:
    """The error that ended a request, from its JSON form in the event."""
    kind = getattr(errors, error["error"], RequestError)
    known = isinstance(kind, type) and issubclass(kind, RequestError)
    return (kind if known else RequestError)(error["message"], hint=error["hint"])
