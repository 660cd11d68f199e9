"""``workbench run``: one prompt through a recipe, its text as it comes, then what was measured.

The engine works on the session's own thread; this one prints what it delivers and looks for Ctrl-C, which
ends the run within a step and keeps what it has: a flag, never an exception, until all is kept and shown.
"""

from __future__ import annotations

import queue
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli import options as o
from workbench.cli.output import Meter, interruptible, note, print_json
from workbench.cli.start import CANCELLED, HINT, MESSAGE
from workbench.cli.tasks import finished
from workbench.spec.errors import Cancelled, EmptyPrompt, RequestError, WorkbenchError
from workbench.spec.events import Event, JobEvent, RequestEvent

if TYPE_CHECKING:
    from workbench.core.runner import RequestJob
    from workbench.core.saved_cache import Resumed
    from workbench.core.session import Session
    from workbench.spec.run import Run

MAX_PROMPT_BYTES = 64 * 1024 * 1024
_SAMPLING = "Sampling"


def run(
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    prompt_file: o.PromptFile = None,
    chat: o.Chat = None,
    use: o.Uses = [],  # noqa: B006 - the command-line library copies it
    recipe: o.RecipeFile = None,
    model: o.Model = o.DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.", rich_help_panel=_SAMPLING)] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: off.", rich_help_panel=_SAMPLING)] = 0,
    top_p: Annotated[float, typer.Option(help="1: off.", rich_help_panel=_SAMPLING)] = 1.0,
    min_p: Annotated[float, typer.Option(help="0: off.", rich_help_panel=_SAMPLING)] = 0.0,
    n: Annotated[int, typer.Option("--n", help="Samples of the prompt.", rich_help_panel=_SAMPLING)] = 1,
    seed: o.Seed = 0,
    stop: Annotated[list[str], typer.Option(help="End at this text; may be repeated.")] = [],  # noqa: B006
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probability of each token and of the K likeliest ones.")
    ] = None,
    dtype: o.DType = o.DTypeName.bfloat16,
    numerics: o.Numerics = o.NumericsName.fast,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    kv_pool_tokens: o.PoolTokens = o.DEFAULT_POOL,
    max_context: o.MaxContext = 0,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on from a conversation that save-cache wrote; the prompt is what comes next."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="What the machine costs per hour: adds the cost of 1,000 output tokens at this speed.",
        ),
    ] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the run in the run store.")] = True,
    json: o.Json = False,
) -> None:
    """Generate text with techniques switched on, and show what it cost."""
    text = read_prompt(prompt, prompt_file)
    wanted = o.recipe_of(use, recipe)
    o.set_threads(threads)
    from workbench.core.cost import priced
    from workbench.core.session import Session
    from workbench.engine.params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_tokens=max_tokens,
        n=n,
        seed=seed,
        stop=tuple(stop),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    limits = o.limits_of(kv_pool_tokens, max_context)
    where = o.place_of(dtype, numerics, device, limits=limits, threads=threads)
    with (
        Meter("loading the model") as meter,
        Session(model, wanted, **where) as session,
        interruptible() as cancel,
    ):
        resumed = finished(session.resume(resume), cancel) if resume is not None else None
        made = _generate(session, text, chat, params, meter, cancel, stream=not json, resumed=resumed)
        made = made if price is None else priced(made, price)
        saved, trouble = keep(made) if save else (False, "")
        show(made, saved, trouble, json, resumed)
    if cancel.is_set() or made.state == "cancelled":
        raise typer.Exit(CANCELLED)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from its option, a file, or standard input.

    Raises :class:`RequestError` when both or neither are given, or the file cannot be read as text.
    """
    if prompt is not None and file is not None:
        raise RequestError("--prompt and --prompt-file were both given.", hint="Give one of them.")
    if prompt is not None:
        return prompt
    if file is None:
        raise EmptyPrompt(
            "There is no prompt.", hint="Give --prompt TEXT, --prompt-file FILE, or --prompt-file -."
        )
    try:
        if str(file) == "-":
            content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with file.open("rb") as stream:
                content = stream.read(MAX_PROMPT_BYTES + 1)
        if len(content) > MAX_PROMPT_BYTES:
            raise RequestError(f"The prompt {str(file)!r} is longer than {MAX_PROMPT_BYTES:,} bytes.")
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(
            f"The prompt {str(file)!r} cannot be read: {why}.", hint="Give a text file."
        ) from None


def prepared(session: Session, text: str, chat: bool | None, params: Any) -> tuple[Any, Any, str]:
    """The prompt as the session takes it, its sampling, and a notice when there is something to say.

    A model without a chat template answers raw by default; asked to chat, it gets the plain fallback and
    its stop texts.
    """
    from dataclasses import replace

    tokenizer = session.tokenizer
    if not (tokenizer.chat_template is not None if chat is None else chat):
        return text, params, ""
    messages = [{"role": "user", "content": text}]
    fallback = tokenizer.chat(messages).fallback
    if fallback is None:
        return messages, params, ""
    return messages, replace(params, stop=(*params.stop, *fallback.stop)), fallback.notice


def _generate(
    session: Session,
    text: str,
    chat: bool | None,
    params: Any,
    meter: Meter,
    cancel: threading.Event,
    *,
    stream: bool,
    resumed: Resumed | None = None,
) -> Run:
    arrivals: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()

    def listen(event: Event) -> None:
        if isinstance(event, RequestEvent):
            arrivals.put(event)
        elif isinstance(event, JobEvent) and event.kind == "live" and event.total:
            meter(event.done / event.total, event.message)

    session.listen(listen)
    if resumed is None:
        asked, params, notice = prepared(session, text, chat, params)
    else:  # a saved conversation goes on as it is
        asked, notice = [*resumed.ids, *session.tokenizer.encode(text)], ""
    if notice:
        note(f"note: {notice}")
    job = session.submit(asked, params, salt=resumed.salt if resumed is not None else "")
    _pump(job, arrivals, meter, cancel, stream)
    if stream and params.n == 1:
        print(flush=True)
    if job.error is not None:
        raise job.error
    if job.value is None:  # cancelled before the model was there
        raise Cancelled(MESSAGE, hint=HINT)
    return job.value


def _pump(
    job: RequestJob,
    arrivals: queue.SimpleQueue[RequestEvent],
    meter: Meter,
    cancel: threading.Event,
    stream: bool,
) -> None:
    """Print the first sample as it arrives; with several samples they are printed at the end instead."""
    alone = job.requested[0].params.n == 1
    while not (job.ended and arrivals.empty()):
        if cancel.is_set():
            job.cancel()
            if job.state == "queued":  # it waits for the model and has nothing to keep
                return
        try:
            event = arrivals.get(timeout=0.05)
        except queue.Empty:
            continue
        meter.close()
        if stream and alone and event.text:
            print(event.text, end="", flush=True)


def keep(made: Run) -> tuple[bool, str]:
    """Put the run into the store; a store that cannot be written never costs the result."""
    from workbench.records.store import RunStore

    trouble = ""
    for _ in range(
        2
    ):  # a damaged store is moved aside on the first attempt, and a new one is there for the second
        try:
            RunStore().save(made)
        except (WorkbenchError, OSError) as error:
            trouble = str(error)
        else:
            return True, trouble
    return False, trouble


def show(made: Run, saved: bool, trouble: str, json: bool, resumed: Resumed | None = None) -> None:
    """The run as one JSON object (its steps stay in the store), or as tables."""
    if json:
        data = made.to_dict()
        data.pop("steps")
        told = {"resumed": resumed.to_dict()} if resumed is not None else {}
        print_json({"text": made.text, "token_ids": made.token_ids, **data, **told, "saved": saved})
    else:
        from workbench.cli.summary import print_summary

        print_summary(made, saved)
    if resumed is not None and resumed.lossy and not json:
        note(f"note: {resumed.cached:,} cached tokens came back through {resumed.codec}, with its losses.")
    if trouble:
        note(f"note: {trouble}" if saved else f"note: the run was not saved: {trouble}")
