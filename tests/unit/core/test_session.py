"""Sessions: one worker, typed errors, nothing lost when a recipe changes, a step fails or a person stops."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.errors import (
    Cancelled,
    CapacityError,
    EmptyPrompt,
    JobFailed,
    MaskError,
    ModelNotFound,
    OptionError,
    PlanError,
    PromptTooLong,
    RecipeError,
    RequestError,
    SamplingError,
    SessionClosed,
    TokenizerError,
    UnknownTechnique,
)
from workbench.spec.events import JobEvent, RequestEvent, StepEvent
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

LIMITS = EngineLimits(kv_pool_tokens=1024, max_sequences=8, max_context=128)
LONG = SamplingParams(max_tokens=100, ignore_eos=True)
WAIT = 60.0


@pytest.fixture
def open_session(model_folder):
    """Sessions on a random model, closed at the end."""
    opened = []

    def make(*uses: str, **kwargs) -> Session:
        kwargs = {"dtype": "float32", "limits": LIMITS, **kwargs}
        session = Session(str(model_folder("llama")), Recipe.of(*uses), **kwargs)
        opened.append(session)
        return session

    yield make
    for session in opened:
        session.close()
        assert not session._worker.is_alive()


class Forced:
    """A mask that allows exactly the given ids, one after the other."""

    key = "forced"

    def __init__(self, ids, vocab: int) -> None:
        self.ids, self.vocab = list(ids), vocab

    def allowed(self, generated, path=()):
        out = torch.zeros(self.vocab, dtype=torch.bool)
        at = len(generated) + len(path)
        out[self.ids[at] if at < len(self.ids) else self.ids[-1]] = True
        return out


def slow_down(session: Session, seconds: float = 0.02) -> None:
    """Make every step of the present engine take a while, so that there is a middle to interrupt."""
    assert session.wait_idle(WAIT)
    engine = session._state.engine
    step = engine.step

    def slow():
        time.sleep(seconds)
        return step()

    engine.step = slow


def until_running(job) -> None:
    end = time.monotonic() + WAIT
    while not job.text and time.monotonic() < end:
        time.sleep(0.002)
    assert job.text


# -- running ----------------------------------------------------------------------------------------------


def test_a_run_tells_what_happened(open_session):
    session = open_session("paged", "ngram:k=4")
    events = []
    session.listen(events.append)
    run = session.generate("Hello there", max_tokens=6, seed=3)
    assert (run.state, run.kind, run.seed, run.numerics) == ("done", "generate", 3, "fast")
    assert run.recipe == [{"id": "paged"}, {"id": "ngram", "k": 4}]
    assert len(run.token_ids) == 6 or run.outputs[0]["finish"] == "stop"
    assert run.text == session.tokenizer.decode(run.token_ids)
    assert run.weight_hash == session.source.fingerprint
    assert run.metric("ttft").value > 0
    steps = [e for e in events if isinstance(e, StepEvent)]
    assert len(run.steps) == len(steps)
    assert sum(len(e.tokens) for e in events if isinstance(e, RequestEvent)) == len(run.token_ids)
    states = [e.state for e in events if isinstance(e, JobEvent) and e.kind == "request"]
    assert (states[0], states[-1], states.count("done")) == ("running", "done", 1)


def test_prompts_of_every_kind(open_session):
    session = open_session("paged")
    ids = session.tokenizer.encode("Hello")
    one = session.generate("Hello", max_tokens=3).token_ids
    assert session.generate(ids, max_tokens=3).token_ids == one
    assert session.generate(tuple(ids), max_tokens=3).token_ids == one
    assert session.generate(torch.tensor(ids), max_tokens=3).token_ids == one
    both = session.generate(["Hello", ids], max_tokens=3, seed=5)
    assert [o["token_ids"] for o in both.outputs] == [one, one]
    chat = session.generate([{"role": "user", "content": "Hello"}], max_tokens=3)
    assert chat.outputs[0]["prompt_tokens"] > len(ids)


def test_prompt_logprobs_reach_the_run(open_session):
    session = open_session("paged", "chunked_prefill:budget=3")
    ids = session.tokenizer.encode("Hello there, all of you")
    whole = session.generate(ids, max_tokens=0, prompt_logprobs=0).outputs[0]["prompt_logprobs"]
    assert sorted(map(int, whole)) == list(range(1, len(ids)))
    assert all(value < 0 for value, _ in whole.values())


def test_ldr_08_a_model_without_a_chat_template_says_so(open_session):
    session = open_session("paged")
    session.tokenizer._hf.chat_template = None
    run = session.generate([{"role": "user", "content": "Hello"}], max_tokens=2)
    assert run.state == "done"
    assert any("template" in note for note in run.notes)
    assert session.generate("and on it goes", max_tokens=2).notes == session.generate("x", max_tokens=1).notes


@pytest.mark.parametrize("uses", [("paged",), ("paged", "ngram")], ids=str)
def test_smp_01_characters_made_of_several_tokens_are_streamed_whole(open_session, uses):
    session = open_session(*uses)
    text = "👋 안녕하 👋 안녕하 x"
    ids = session.tokenizer.encode(text)
    assert len(ids) > len(text)
    pieces: list[str] = []
    session.listen(lambda e: pieces.append(e.text) if isinstance(e, RequestEvent) else None)
    mask = Forced(ids, session.facts.config.vocab_size)
    params = SamplingParams(max_tokens=len(ids), ignore_eos=True)
    run = session.submit(text, params, mask=mask).result(WAIT)
    assert run.token_ids == ids
    assert "".join(pieces) == run.text == session.tokenizer.decode(ids) == text
    assert not any("\ufffd" in p for p in pieces)
    if "ngram" in uses:
        assert run.acceptance["accepted"] > 0
    cut = session.submit(text, SamplingParams(max_tokens=1, ignore_eos=True), mask=mask).result(WAIT)
    assert cut.text == session.tokenizer.decode(ids[:1])  # at the end the rest is told as it is


# -- recipes ----------------------------------------------------------------------------------------------


def test_what_does_not_change_is_kept(open_session):
    session = open_session("paged", "prefix_cache")
    ids = list(range(5, 105))
    first = session.generate(ids, max_tokens=3)
    decoder, kv = session._state.engine.executor.decoder, session._state.engine.kv
    assert session.apply(session.recipe.with_("ngram")).result(WAIT)
    assert session._state.engine.executor.decoder is decoder
    assert session._state.engine.kv is kv
    again = session.generate(ids, max_tokens=3)
    assert again.outputs[0]["cached_tokens"] == 64  # pages survive a drafter
    assert again.token_ids == first.token_ids
    session.apply(session.recipe.with_("kv_int8")).result(WAIT)
    assert session._state.engine.executor.decoder is decoder
    assert session.generate(ids, max_tokens=3).outputs[0]["cached_tokens"] == 0  # but not another format
    session.apply(Recipe.of("paged", "prefix_cache")).result(WAIT)
    assert session.generate(ids, max_tokens=3).token_ids == first.token_ids


def test_law_4_toggling_live_never_serves_stale_pages(open_session):
    """Whatever shaped the pages, a run after a toggle equals a cold session's, bit for bit."""
    base = ("paged:page_size=32", "prefix_cache")
    recipes = [base, (*base, "kv_int8"), (*base, "kv_fp8"), (*base, "rtn"), (*base, "reference"), base]
    ids = list(range(5, 75))

    def run(session: Session) -> tuple[list[int], list[float], int]:
        out = session.generate(ids, max_tokens=4, logprobs=0, ignore_eos=True).outputs[0]
        return out["token_ids"], [t["logprob"] for t in out["tokens"]], out["cached_tokens"]

    session = open_session(*base, numerics="pinned")
    for uses in recipes:
        session.apply(Recipe.of(*uses)).result(WAIT)
        cold = open_session(*uses, numerics="pinned")
        want = run(cold)
        got = run(session)
        assert got == want
        assert got[2] == 0 or uses is base
        warm = run(session)
        assert warm[:2] == want[:2]
        assert warm[2] == 64
        cold.close()


def test_two_weight_sets_stay_resident_and_no_more(open_session):
    session = open_session()
    session.generate("x", max_tokens=1)
    plain = session._state.engine.executor.decoder
    for uses in (["rtn"], ["rtn:bits=8"], ["rtn"], []):
        session.apply(Recipe.of(*uses)).result(WAIT)
        assert len(session._state._decoders) <= 2
    assert session._state.engine.executor.decoder is not plain  # it had made room
    session.apply(Recipe.of("rtn")).result(WAIT)
    session.apply(Recipe()).result(WAIT)
    session.generate("x", max_tokens=1)


def test_a_new_recipe_ends_what_runs_with_what_it_has(open_session):
    session = open_session("paged")
    slow_down(session)
    job = session.submit("Hello", LONG)
    until_running(job)
    applied = session.apply(Recipe.of("paged", "ngram"))
    run = job.result(WAIT)
    assert job.state == "superseded"
    assert run.state == "cancelled"
    assert 0 < len(run.token_ids) < 100
    assert run.outputs[0]["finish"] == "abort"
    assert run.recipe == [{"id": "paged"}]
    applied.result(WAIT)
    assert session.generate("Hello", max_tokens=2).recipe == [{"id": "paged"}, {"id": "ngram"}]
    assert session._state.engine.kv.pools[0].used == 0


def test_requests_after_an_apply_run_under_it(open_session):
    session = open_session("paged")
    for k in range(2, 8):
        session.apply(Recipe.of("paged", f"ngram:k={k}"))
        assert session.generate("Hello", max_tokens=1).recipe[1]["k"] == k


def test_only_the_newest_of_many_recipes_runs(open_session):
    session = open_session("paged")
    session.wait_idle(WAIT)
    jobs = [session.apply(Recipe.of("paged", f"ngram:k={k}")) for k in range(1, 30)]
    assert jobs[-1].result(WAIT).recipe.get("ngram").options == (("k", 29),)
    assert session.wait_idle(WAIT)
    assert all(j.ended and j.state in ("done", "superseded") for j in jobs)
    assert session._state.plan is session.plan


def test_a_recipe_that_does_not_fit_changes_nothing(open_session):
    session = open_session("paged", "kv_int8")
    before = session.plan
    with pytest.raises(PlanError) as err:
        session.apply(session.recipe.with_("kivi"))
    assert err.value.conflicts[0].second == "kv_int8"
    for recipe, error in (
        (Recipe.of("nothing"), UnknownTechnique),
        (Recipe.of("ngram:k=0"), OptionError),
        ("paged", RecipeError),
        (None, RecipeError),
    ):
        with pytest.raises(error):
            session.apply(recipe)
    assert session.plan is before
    assert session.generate("Hello", max_tokens=1).state == "done"


def test_a_failed_rebuild_goes_on_with_the_recipe_before(open_session, monkeypatch):
    session = open_session("paged")
    before = session.generate("Hello", max_tokens=3).token_ids
    import workbench.core.state as state

    real = state.build_kv

    def fails(plan, decoder):
        if plan.recipe.get("kv_int8"):
            raise MemoryError("no room")
        return real(plan, decoder)

    monkeypatch.setattr(state, "build_kv", fails)
    job = session.apply(Recipe.of("paged", "kv_int8"))
    with pytest.raises(JobFailed, match="no room"):
        job.result(WAIT)
    assert session.wait_idle(WAIT)
    assert session.recipe == Recipe.of("paged")
    run = session.generate("Hello", max_tokens=3)
    assert run.token_ids == before
    assert run.recipe == [{"id": "paged"}]


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ("", {}, EmptyPrompt),
        ([], {}, EmptyPrompt),
        (None, {}, RequestError),
        (5, {}, RequestError),
        (b"abc", {}, RequestError),
        ([1.5, 2], {}, RequestError),
        ([True, 2], {}, RequestError),
        (["Hello", 3], {}, RequestError),
        ([None], {}, RequestError),
        ({"role": "user"}, {}, RequestError),
        ("half \ud800 a character", {}, RequestError),
        ([-1], {}, RequestError),
        ([10**9], {}, RequestError),
        ([{"role": "user"}], {}, TokenizerError),
        ([3] * 128, {}, PromptTooLong),
        ([3] * 500, {"max_tokens": 0}, PromptTooLong),
        ("Hello", {"temperature": -1}, SamplingError),
        ("Hello", {"temperature": "hot"}, SamplingError),
        ("Hello", {"max_tokens": 2.5}, SamplingError),
        ("Hello", {"seed": "x"}, SamplingError),
        ("Hello", {"stop": [""]}, SamplingError),
        ("Hello", {"temprature": 1}, SamplingError),
        ("Hello", {"n": 9}, CapacityError),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_bad_requests_end_alone_with_a_typed_error(open_session, prompt, sampling, error):
    session = open_session("paged")
    slow_down(session, 0.005)
    neighbour = session.submit("Hello", SamplingParams(max_tokens=12, ignore_eos=True))
    with pytest.raises(error) as err:
        session.generate(prompt, **sampling)
    assert isinstance(err.value, RequestError | TokenizerError)
    assert err.value.hint or error in (RequestError, MaskError)
    assert len(neighbour.result(WAIT).token_ids) == 12
    assert session.generate("Hello", max_tokens=2).state == "done"


def test_settings_and_masks_of_wrong_kinds_are_refused_at_once(open_session):
    session = open_session("paged", "prefix_cache")
    for kwargs in ({"params": "x"}, {"mask": object()}, {"salt": 3}):
        with pytest.raises(RequestError):
            session.submit("Hello", **kwargs)
    with pytest.raises(RequestError):
        session.submit_all(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError):
        session.submit_all([], [])


def test_one_bad_prompt_of_a_batch_fails_alone(open_session):
    session = open_session("paged")
    run = session.generate(["Hello", "", "there"], max_tokens=2)
    assert [o["finish"] for o in run.outputs][1] == "error"
    assert run.outputs[1]["error"]["error"] == "EmptyPrompt"
    assert len(run.outputs[0]["token_ids"]) > 0
    assert run.outputs[0]["error"] is None


@pytest.mark.parametrize("how", ["nothing", "raises", "shape"])
def test_a_mask_that_dies_on_the_way_fails_its_request_alone(open_session, how):
    session = open_session("paged")

    class Dies:
        key = "dies"

        def allowed(self, generated, path=()):
            if len(generated) < 3:
                return None
            if how == "raises":
                raise ZeroDivisionError("bug of a grammar")
            return torch.zeros(session.facts.config.vocab_size + (how == "shape"), dtype=torch.bool)

    slow_down(session, 0.005)
    neighbour = session.submit("Hello", SamplingParams(max_tokens=12, ignore_eos=True))
    job = session.submit("Hello", SamplingParams(max_tokens=9, ignore_eos=True), mask=Dies())
    with pytest.raises(MaskError):
        job.result(WAIT)
    assert job.state == "failed"
    assert len(job.value.token_ids) == 3  # what it had is kept
    assert job.value.error["error"] == "MaskError"
    assert len(neighbour.result(WAIT).token_ids) == 12


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"recipe": "paged"}, RecipeError),
        ({"recipe": Recipe.of("pagde")}, UnknownTechnique),
        ({"recipe": Recipe.of("prefix_cache")}, PlanError),
        ({"dtype": "float17"}, OptionError),
        ({"numerics": "x"}, OptionError),
        ({"device": "gpu"}, OptionError),
        ({"limits": "x"}, OptionError),
        ({"limits": EngineLimits(max_context=10**6)}, OptionError),
        ({"threads": 0}, OptionError),
        ({"threads": "many"}, OptionError),
    ],
    ids=str,
)
def test_sessions_that_cannot_be_opened(model_folder, kwargs, error):
    before = threading.active_count()
    with pytest.raises(error):
        Session(str(model_folder("llama")), **kwargs)
    assert threading.active_count() == before


def test_models_that_are_not_there(tmp_path):
    for model in ("no-such-model", str(tmp_path), None, 5):
        with pytest.raises(ModelNotFound):
            Session(model)


# -- stopping ---------------------------------------------------------------------------------------------


def test_cancel_keeps_what_there_is(open_session):
    session = open_session("paged")
    slow_down(session)
    job = session.submit("Hello", LONG)
    until_running(job)
    job.cancel()
    run = job.result(WAIT)
    assert (job.state, run.state, run.outputs[0]["finish"]) == ("cancelled", "cancelled", "abort")
    assert 0 < len(run.token_ids) < 100
    assert session._state.engine.kv.pools[0].used == 0


def test_a_kernel_interrupt_stops_the_run_a_cell_waits_for(open_session):
    session = open_session("paged")
    slow_down(session)
    other = session.submit("stays", SamplingParams(max_tokens=30, ignore_eos=True))
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
    seen = []
    session.listen(lambda e: seen.append(e) if isinstance(e, JobEvent) and e.state == "cancelled" else None)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        session.generate("Hello", max_tokens=100, ignore_eos=True)
    timer.join()
    assert len(seen) == 1
    assert len(other.result(WAIT).token_ids) == 30
    assert session.generate("Hello", max_tokens=2).state == "done"


def test_tasks_advance_cancel_and_fail_by_themselves(open_session):
    session = open_session("paged")

    def work(job, engine):
        for i in range(10**6):
            job.progress(i, 10**6)
            yield
        return "never"

    def quick(job, engine):
        yield
        return engine.vocab_size

    def broken(job, engine):
        yield
        raise ValueError("bad data")

    long, failing, short = (session.task(n, w) for n, w in (("a", work), ("b", broken), ("c", quick)))
    run = session.generate("Hello", max_tokens=3)  # served between the units of a task
    assert run.state == "done"
    assert not long.ended
    long.cancel()
    with pytest.raises(Cancelled):
        long.result(WAIT)
    assert long.state == "cancelled"
    with pytest.raises(JobFailed, match="bad data"):
        failing.result(WAIT)
    assert short.result(WAIT) == session.facts.config.vocab_size


def test_close_ends_everything_and_frees_the_model(model_folder):
    session = Session(str(model_folder("llama")), Recipe.of("paged"), dtype="float32", limits=LIMITS)
    slow_down(session)
    model = weakref.ref(session._state.engine.executor.decoder)
    jobs = [session.submit("Hello", LONG) for _ in range(3)]
    jobs.append(session.task("t", lambda job, engine: iter(range(10**9))))
    until_running(jobs[0])
    waiting = []
    waiter = threading.Thread(target=lambda: waiting.append(session.wait_idle(None)), daemon=True)
    waiter.start()
    session.close()
    session.close()
    waiter.join(WAIT)
    assert waiting == [True]  # whoever waited for idleness waits no longer
    assert all(j.ended for j in jobs)
    for job in jobs:
        assert job.state in ("failed", "cancelled")
        if job.state == "failed":
            with pytest.raises(SessionClosed):
                job.result(0)
    for call in (
        lambda: session.submit("Hello"),
        lambda: session.apply(Recipe()),
        lambda: session.task("t", lambda job, engine: iter(())),
        lambda: session.generate("Hello"),
    ):
        with pytest.raises(SessionClosed):
            call()
    assert not session._worker.is_alive()
    assert session.memory() == {}
    jobs.clear()
    del job
    gc.collect()
    assert model() is None


def test_close_while_a_recipe_is_being_built(model_folder, monkeypatch):
    import workbench.core.state as state

    begun, real = threading.Event(), state.build_weights

    def slowly(plan, source, progress, cancel):
        begun.set()
        end = time.monotonic() + WAIT
        while not cancel() and time.monotonic() < end:
            time.sleep(0.005)
        return real(plan, source, progress, cancel)

    monkeypatch.setattr(state, "build_weights", slowly)
    session = Session(str(model_folder("llama")), Recipe.of("paged"), dtype="float32", limits=LIMITS)
    job = session.submit("Hello")
    assert begun.wait(WAIT)
    session.close()
    assert not session._worker.is_alive()
    assert session.wait_idle(1.0)
    with pytest.raises(SessionClosed):
        job.result(1.0)


def test_two_sessions_share_a_model_and_nothing_else(open_session):
    a, b = open_session("paged", "prefix_cache"), open_session("paged", "prefix_cache", "kv_int8")
    jobs = [(s, s.submit("Hello there", SamplingParams(max_tokens=8, ignore_eos=True))) for s in (a, b) * 3]
    outs = {s: {tuple(j.result(WAIT).token_ids) for t, j in jobs if t is s} for s in (a, b)}
    assert [len(v) for v in outs.values()] == [1, 1]
    a.close()
    assert b.generate("Hello there", max_tokens=8, ignore_eos=True).state == "done"


def test_an_open_session_does_not_break_the_interpreters_exit(model_folder):
    code = (
        "import sys\nfrom workbench.core.session import Session\n"
        "from workbench.engine.params import SamplingParams\n"
        "s = Session(sys.argv[1], dtype='float32')\n"
        "s.submit('Hello', SamplingParams(max_tokens=200, ignore_eos=True))\nprint('done')\n"
    )
    folder = str(model_folder("llama"))
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# -- failures inside a step -------------------------------------------------------------------------------


class Held:
    """Stands for a tensor that a failing step allocated."""


@pytest.mark.parametrize("where", ["forward", "commit", "listener"])
def test_nbw_13_an_exception_in_a_step_frees_its_tensors_and_the_next_run_works(open_session, where):
    session = open_session("paged", "prefix_cache", "ngram")
    before = session.generate("Hello", max_tokens=4).token_ids
    engine = session._state.engine
    seen: list[weakref.ref] = []

    def fails(*args, **kwargs):
        big = Held()
        seen.append(weakref.ref(big))
        raise MemoryError("too large")

    if where == "listener":  # a broken listener is dropped, the run goes on
        session.listen(fails)
        assert session.generate("Hello", max_tokens=4).token_ids == before
    else:
        target, name = (engine.executor, "forward") if where == "forward" else (engine.kv, "commit")
        real = getattr(target, name)
        setattr(target, name, fails)
        jobs = [session.submit("Hello", SamplingParams(max_tokens=4)) for _ in range(2)]
        for job in jobs:
            with pytest.raises(JobFailed, match="too large") as err:
                job.result(WAIT)
            assert err.value.kind == "MemoryError"
        setattr(target, name, real)
        del err
        assert session.wait_idle(WAIT)
        assert not engine.alive()  # nothing of them lives on in the engine
        assert engine.kv.pools[0].used == 0
    gc.collect()
    assert seen
    assert [r() for r in seen] == [None] * len(seen)
    assert session.wait_idle(WAIT)
    assert session.generate("Hello", max_tokens=4).token_ids == before
    session._state.engine.kv.check()
    assert session._state.engine.kv.pools[0].used == 0
    assert not session._state.engine.alive()


def test_books_broken_beyond_repair_give_a_new_engine(open_session):
    session = open_session("paged")
    before = session.generate("Hello", max_tokens=4).token_ids
    broken = session._state.engine
    slow_down(session)
    job = session.submit("Hello", LONG)
    until_running(job)
    broken.kv.pools[0].refs[:] = [0] * len(broken.kv.pools[0].refs)  # every release is now one too many
    job.cancel()
    assert job.wait(WAIT)
    assert session.wait_idle(WAIT)
    assert session.generate("Hello", max_tokens=4).token_ids == before
    assert session._state.engine is not broken
    session._state.engine.kv.check()
