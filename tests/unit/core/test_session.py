"""Sessions: what a run tells, and that a change of recipe loses and mixes up nothing."""

from __future__ import annotations

import pytest
import torch

from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.errors import (
    JobFailed,
    OptionError,
    PlanError,
    RecipeError,
    UnknownTechnique,
)
from workbench.spec.events import JobEvent, RequestEvent, StepEvent
from workbench.spec.recipe import Recipe

LONG = SamplingParams(max_tokens=100, ignore_eos=True)
WAIT = 60.0


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


def test_a_new_recipe_ends_what_runs_with_what_it_has(open_session, slow_down, until_running):
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

    def fails(plan, *rest):
        if plan.recipe.get("kv_int8"):
            raise MemoryError("no room")
        return real(plan, *rest)

    monkeypatch.setattr(state, "build_kv", fails)
    job = session.apply(Recipe.of("paged", "kv_int8"))
    with pytest.raises(JobFailed, match="no room"):
        job.result(WAIT)
    assert session.wait_idle(WAIT)
    assert session.recipe == Recipe.of("paged")
    run = session.generate("Hello", max_tokens=3)
    assert run.token_ids == before
    assert run.recipe == [{"id": "paged"}]


def test_memory_counts_the_weight_set_that_is_kept_for_toggling_back(model_folder):
    with Session(str(model_folder("llama"))) as session:
        session.generate("a", max_tokens=1)
        plain = session.memory()
        assert "weights_kept" not in plain
        session.apply(Recipe.of("rtn")).result(30)
        run = session.generate("a", max_tokens=2)
        assert session.memory()["weights_kept"] == plain["weights"]
        assert session.memory()["weights"] == run.memory["weights"] < plain["weights"]
        assert "weights_kept" not in run.memory


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_memory_of_a_run_is_what_it_held_even_if_it_lasts_one_step(model_folder, max_tokens):
    """A request that ends in its first step gives its pages back before the step's end is counted."""
    prompts = [[5 + i] * (20 + i) for i in range(3)]
    with Session(str(model_folder("llama")), Recipe.of("paged"), dtype="float32") as session:
        run = session.generate(prompts, max_tokens=max_tokens, ignore_eos=True)
        config = session.facts.config
        assert session.memory()["kv_payload"] == 0  # all given back
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    tokens = sum(map(len, prompts)) + 3 * max(max_tokens - 1, 0)
    assert run.memory["kv_payload"] == row * tokens
