"""From events to a run: latency by its definitions, bytes that add up, lengths that are not mixed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core import provenance as where
from workbench.core.latency import latency, step_phases
from workbench.core.lengths import kv_lengths
from workbench.core.output import Output, live_tokens
from workbench.core.report import Collected, build_run, kv_per_token, step_row
from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.records.runfile import dumps, loads
from workbench.records.sections import acceptance
from workbench.spec.events import (
    KV_IN_USE,
    PHASES,
    DraftRecord,
    RequestEvent,
    StepEvent,
    TokenInfo,
    fullest,
)
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run


def step(
    number: int, time: float, *, kv: int = 0, running: int = 1, drafts: Any = (), **ms: float
) -> StepEvent:
    phases = {**dict.fromkeys(PHASES, 0.0), **ms}
    return StepEvent(
        number,
        time,
        1,
        0,
        1,
        0,
        running,
        0,
        phases,
        1,
        0,
        0,
        {"kv_payload": kv, "kv_meta": 0},
        drafts=tuple(drafts),
    )


def output(deliveries: Sequence[tuple[float, int]], prompt: int = 4, first_step: int = 1) -> Output:
    """An output that was given so many tokens at each time, one delivery per engine step."""
    out = Output("p", tuple(range(prompt)), 0, SamplingParams())
    for i, (time, n) in enumerate(deliveries):
        tokens = tuple(TokenInfo(1, prompt + len(out.tokens) + j, "plain", first_step + i) for j in range(n))
        out.take(RequestEvent("r", first_step + i, time, tokens, "x" * n))
    return out


def values(found: Sequence[Any]) -> dict[str, float]:
    return {m.name: m.value for m in found}


def test_latency_definitions_on_a_hand_made_stream() -> None:
    # Submitted at 10.0, first step at 10.2, tokens at 10.5, 10.7 (two at once) and 11.5.
    out = output([(10.5, 1), (10.7, 2), (11.5, 1)])
    found = values(latency([out], [step(1, 10.2)], submitted=10.0))
    assert found["ttft"] == pytest.approx(500)
    assert found["queue"] == pytest.approx(200)
    assert found["tpot"] == pytest.approx(1000 / 3)  # three tokens after the first, over one second
    assert found["itl"] == pytest.approx(500)  # deliveries 0.2 and 0.8 s apart
    assert found["decode_speed"] == pytest.approx(3.0)


def test_putting_the_model_in_place_is_neither_queue_nor_time_to_first_token() -> None:
    # Submitted at 10.0, engine there at 10.3, first step at 10.4, token at 10.5.
    found = values(latency([output([(10.5, 1)])], [step(1, 10.4)], submitted=10.0, ready=10.3))
    assert found["opening"] == pytest.approx(300)
    assert found["queue"] == pytest.approx(100)
    assert found["ttft"] == pytest.approx(200)
    later = values(latency([output([(10.5, 1)])], [step(1, 10.4)], submitted=10.0, ready=9.0))
    assert "opening" not in later and later["ttft"] == pytest.approx(500)


def test_a_session_tells_opening_from_waiting(model_folder: Callable[[str], Path]) -> None:
    limits = EngineLimits(kv_pool_tokens=512, max_context=128)
    with Session(str(model_folder("llama")), limits=limits) as session:
        first: Run = session.generate("one", max_tokens=4)
        second: Run = session.generate("one", max_tokens=4)
        session.apply(Recipe.of("paged"))
        switched: Run = session.generate("one", max_tokens=4)
    opening = [run.metric("opening") for run in (first, second, switched)]
    assert opening[0] is not None and opening[0].value > 0 and opening[1] is None
    for run in (first, switched):
        ttft, queue = run.metric("ttft"), run.metric("queue")
        assert ttft is not None and queue is not None and 0 <= queue.value < ttft.value


def test_several_outputs_give_median_range_and_count() -> None:
    outs = [output([(1.0 + i, 1), (2.0 + i, 1)]) for i in range(3)]
    found = {m.name: m for m in latency(outs, [step(1, 0.5)], submitted=0.0)}
    assert (found["ttft"].value, found["ttft"].spread, found["ttft"].n) == (2000, (1000, 3000), 3)
    assert found["decode_speed"].value == pytest.approx(3 / 3.0)  # 3 tokens, from 1.0 to 4.0


def test_one_token_has_no_time_per_token() -> None:
    found = values(latency([output([(1.0, 1)])], [step(1, 0.5)], submitted=0.0))
    assert "tpot" not in found and "itl" not in found and "decode_speed" not in found
    assert latency([output([])], [], submitted=0.0) == ()


def test_phases_are_means_per_step_and_overhead_is_the_hosts_share() -> None:
    found = values(
        step_phases(
            [step(1, 0.0, forward=6.0, schedule=1.0, emit=1.0), step(2, 0.1, forward=2.0, sample=2.0)]
        )
    )
    assert found["phase_forward"] == 4.0 and found["phase_schedule"] == 0.5 and found["phase_sample"] == 1.0
    assert found["overhead"] == pytest.approx(100 * 2 / 12)


def test_kv_per_token_is_taken_where_only_this_job_ran() -> None:
    out = output([(1.0, 1), (2.0, 1), (3.0, 1)], prompt=10)
    assert live_tokens([out], [0, 1, 2, 3]) == [(0, 0), (1, 10), (1, 11), (1, 12)]
    steps = [step(1, 0.0, kv=100), step(2, 0.0, kv=110), step(3, 0.0, kv=9999, running=2)]
    (metric,) = kv_per_token([out], steps)
    assert metric.value == 10.0
    out.finish = "length"  # its pages are given back in its last step
    assert live_tokens([out], [2, 3]) == [(1, 11), (0, 0)]


def test_fullest_step_is_the_one_that_holds_most_not_the_one_with_most_payload() -> None:
    full = {"kv_payload": 90, "kv_meta": 0, "fragmentation": 10}  # a page, nearly full
    coded = {"kv_payload": 30, "kv_meta": 10, "fragmentation": 80}  # coded, and a fresh page beside it
    steps = [replace(step(i, 0.0), bytes=held) for i, held in enumerate((full, coded))]
    assert fullest(steps) == coded
    assert fullest([replace(steps[0], peak=dict(coded, kv_meta=11))])["kv_meta"] == 11  # type: ignore[index]
    reserved = [replace(step(i, 0.0), bytes={"kv_payload": i, "fragmentation": 9 - i}) for i in range(5)]
    assert fullest(reserved) == {"kv_payload": 4, "fragmentation": 5}
    assert fullest([]) is None


@pytest.mark.parametrize(
    "uses", [(), ("paged",), ("paged", "kv_int8"), ("paged", "kivi"), ("paged", "ngram")]
)
def test_kvc_15_memory_shown_equals_the_bytes_of_the_tensors_held(
    lab: ModuleType, uses: tuple[str, ...]
) -> None:
    engine = lab.make_engine(*uses, dtype="float32", numerics="fast")
    ran = lab.run_engine(engine, lab.prompts_of(3), max_tokens=9, ignore_eos=True)
    draft = engine.drafting.nbytes()
    held = sum(
        t.untyped_storage().nbytes()
        for store in engine.kv.stores
        for t in (
            *store.planes.values(),
            store.positions,
            *store.held.open.planes.values(),
            *(store.held.work or ()),
        )
    )
    assert held > 0
    shown = engine.memory()
    assert sum(v for k, v in shown.items() if k not in ("weights", "draft")) == held
    assert shown["weights"] == engine.executor.decoder.weights.nbytes() + engine.executor.decoder.table_nbytes
    assert shown["draft"] == draft
    run = build_run(Collected([], ran.steps, 0.0), None, "done", "bench", {})
    assert run.memory in [dict(s.peak or s.bytes) for s in ran.steps]
    in_use = [sum((s.peak or s.bytes).get(k, 0) for k in KV_IN_USE) for s in ran.steps]
    assert sum(run.memory.get(k, 0) for k in KV_IN_USE) == max(in_use)


def test_kvc_15_logical_length_stored_rows_and_dropped_rows_are_three_numbers(lab: ModuleType) -> None:
    engine = lab.make_engine("paged")
    engine.add(
        Request("r", tuple(i % 61 for i in range(100)), SamplingParams(max_tokens=20, ignore_eos=True))
    )
    with torch.inference_mode():
        engine.step()
        (seq,) = engine.sequences("r")
        full = kv_lengths(engine.kv, seq)
        assert (full.prompt, full.logical, full.stored, full.dropped, full.prefill_compression) == (
            100,
            100,
            100,
            0,
            0,
        )
        # What a selector leaves of a prompt of which it keeps 25: slots that hold no position any more.
        slots = torch.tensor([p * engine.kv.page_size for p in seq.tables[0]]).repeat_interleave(
            engine.kv.page_size
        )
        slots = (slots + torch.arange(len(slots)) % engine.kv.page_size)[:75]
        engine.kv.stores[0].positions[slots] = -1
        for _ in range(10):
            engine.step()
    found = kv_lengths(engine.kv, seq)
    assert (found.logical, found.stored, found.dropped, found.prefill_compression) == (110, 35, 75, 0.75)


def test_kvc_16_a_run_shows_bytes_per_token_by_the_number_of_kv_heads(lab: ModuleType) -> None:
    engine = lab.make_engine("paged", dtype="float32", numerics="fast")
    ran = lab.run_engine(engine, [[5] * 40], max_tokens=8, ignore_eos=True)
    out = Output("p", (5,) * 40, 0)
    for event in ran.events:
        out.take(event)
    (metric,) = kv_per_token([out], ran.steps)
    config = engine.executor.decoder.config
    payload = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    assert config.num_kv_heads != config.num_heads
    assert metric.value == pytest.approx(payload + 4, rel=0.001)  # and one int32 position


def test_spd_06_a_run_counts_no_token_after_the_end(lab: ModuleType, scripted: ModuleType) -> None:
    text = [3, 1, 4, 10, 11, 60, 12, 13, 14]
    engine = lab.make_engine("paged", "ngram", eos_ids=(60,))
    scripted.attach(engine, scripted.Replay([text], k=5))
    scripted.say(engine, lambda seq, p: text[p + 1] if p + 1 < len(text) else 0)
    ran = lab.run_engine(engine, [text[:2]], max_tokens=20)
    out = Output("p", tuple(text[:2]), 0)
    for event in ran.events:
        out.take(event)
    run = build_run(Collected([out], ran.steps, 0.0), None, "done", "bench", {})
    # The prompt's own forward gives 4; one draft 10, 11, end, 12, 13 is cut behind the end, then verified.
    assert run.token_ids == [4, 10, 11, 60]
    assert run.acceptance["emitted"] == 3 and run.acceptance["tau"] == 3.0
    assert (run.acceptance["accepted"], run.acceptance["drafted"], run.acceptance["rate"]) == (3, 3, 1.0)


def test_acceptance_is_told_by_source_where_there_are_several() -> None:
    def draft(source: str, kept: int) -> DraftRecord:
        return DraftRecord("r", (5, 6, 7), (-1, 0, 1), tuple(range(kept)), kept + 1, source, "r1")

    copied, copied_less, headed = draft("suffix", 3), draft("suffix", 0), draft("eagle3", 2)
    steps = [step(1, 0.0, drafts=(copied,)), step(2, 0.1, drafts=(copied_less, headed))]
    run = build_run(Collected([output([(0.1, 4)])], steps, 0.0), None, "done", "interactive", {})
    assert run.acceptance["sources"] == {
        "eagle3": {"steps": 1, "drafted": 3, "accepted": 2, "tau": 3.0, "rate": 2 / 3},
        "suffix": {"steps": 2, "drafted": 6, "accepted": 3, "tau": 2.5, "rate": 0.5},
    }
    assert run.acceptance["tau"] == pytest.approx(8 / 3)
    page = acceptance(run)
    assert "<td" in page and "suffix" in page and "eagle3" in page
    assert loads(dumps(run)) == run
    alone = build_run(Collected([output([(0.1, 4)])], steps[:1], 0.0), None, "done", "interactive", {})
    assert "sources" not in alone.acceptance


def test_a_step_row_is_small_plain_data() -> None:
    draft = DraftRecord("r", (1, 2), (-1, 0), (0,), 2, "ngram", "exact", (1.0, 0.5))
    row = step_row(step(1, 1.23456789, forward=0.123456789, drafts=[draft]))
    assert row["time"] == 1.234568 and row["phase_ms"]["forward"] == 0.1235
    assert row["drafts"][0]["parents"] == [-1, 0] and "path" not in row


def test_peak_memory_of_the_process_stands_beside_and_cpu_runs_make_no_cuda_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("max_memory_allocated", "synchronize", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a CUDA call"))
    (metric,) = where.process_memory("cpu")
    assert metric.value > 50e6 and metric.unit == "B"
    assert where.provenance("cpu", "bench").profile == "bench"


def test_only_listed_variables_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = where.provenance("cpu", "interactive")
    assert found.environment["OMP_NUM_THREADS"] == "2" and "hunter2" not in repr(found)


def test_a_sessions_run_is_complete_and_survives_storage(model_folder: Callable[[str], Path]) -> None:
    limits = EngineLimits(kv_pool_tokens=512, max_context=128)
    with Session(str(model_folder("llama")), Recipe.of("paged", "ngram"), limits=limits) as session:
        run: Run = session.generate(["a b a b a b a b", "one"], max_tokens=6, logprobs=2, ignore_eos=True)
    assert run.state == "done" and len(run.outputs) == 2
    for out in run.outputs:
        assert len(out["token_ids"]) == len(out["tokens"]) == len(out["pieces"]) == 6
        said = "".join(out["pieces"])  # without the start of a character that never came to an end
        assert said and out["text"].startswith(said) and set(out["text"][len(said) :]) <= {"\ufffd"}
        assert out["sampling"] == {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    names = [m.name for m in run.metrics]
    assert {
        "ttft",
        "tpot",
        "itl",
        "decode_speed",
        "queue",
        "overhead",
        "process_peak",
        "kv_bytes_per_token",
    } <= set(names)
    assert len(names) == len(set(names))
    assert run.provenance is not None and run.provenance.created.endswith("+00:00")
    assert loads(dumps(run)) == run


def test_kvc_15_a_page_grain_format_holds_one_open_page_per_sequence(lab: ModuleType) -> None:
    engine = lab.make_engine("paged", "kivi:residual=32,group=32", dtype="float32", numerics="fast")
    engine.add(
        Request("r", tuple(i % 61 for i in range(200)), SamplingParams(max_tokens=20, ignore_eos=True))
    )
    store = engine.kv.stores[0]
    for _ in range(12):
        with torch.inference_mode():
            engine.step()
        assert len(store.held.open.rows) <= 1
    config = engine.executor.decoder.config
    page = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 * engine.kv.page_size
    assert store.nbytes()["kv_open"] == page
