"""What a sweep keeps: it goes on where it was stopped, and never mistakes one point for another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.core.kv_methods import method
from workbench.core.kv_p1 import p1_steps, submit_p1
from workbench.core.kv_points import Points, point_key
from workbench.core.kv_prepared import Prepared
from workbench.core.kv_result import WindowResult
from workbench.core.quality_scores import WindowScores
from workbench.core.quality_windows import QualitySettings, cut
from workbench.kv.cached import CachedRows, Reconstructed
from workbench.spec.errors import Cancelled

SETTINGS = QualitySettings(context=70, score=20, windows=3, greedy=0)
WAIT = 60


def ids(n: int) -> list[int]:
    return torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(0)).tolist()


def result(kl: float = 0.5) -> WindowResult:
    return WindowResult(WindowScores(0, [1.0], [1.0], [kl], [True]), 7, 100, 50, 90, 40, 0.25, None)


def test_points_survive_the_process_and_a_line_that_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "points.jsonl"
    first = Points(path)
    first.put("a", result(0.1))
    first.put("b", result(0.2))
    with path.open("ab") as file:
        file.write(b'{"key": "c", "result": {"scor')  # the process was killed here
    second = Points(path)
    assert len(second) == 2 and second.get("a") == result(0.1) and second.get("c") is None
    second.put("d", result(0.4))
    assert Points(path).get("d") == result(0.4) and Points(path).get("b") == result(0.2)
    assert len(Points(path, fresh=True)) == 0
    Points(path, fresh=True).put("a", result(0.9))
    assert Points(path).get("a") == result(0.9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", "7"), ("payload", 50.5), ("coded", True), ("sixteen", -1), ("encode", "0.25"),
        ("error", [0.1]), ("scores.kl", ["0.5"]), ("scores.kl", 0.5), ("scores.kl", [0.5, 0.5]),
        ("scores.nll", []), ("scores.agree", [1]), ("scores.scored_bytes", None), ("scores.nll", [None]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_not_taken_for_a_result(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "points.jsonl"
    good = result().to_dict()
    assert WindowResult.from_dict(good) == result()
    *inner, last = name.split(".")
    (good[inner[0]] if inner else good)[last] = value
    path.write_text(json.dumps({"key": "a", "result": good}) + "\n")
    assert len(Points(path)) == 0


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe", b"[]", b"{}", b"null", b'{"key": 1}', b'{"key": "a", "result": {}}',
     b'{"key": "a", "result": {"scores": [], "tokens": 1}}', b'{"key": ["a"], "result": null}',
     b"[" * 100_000],
)  # fmt: skip
def test_lines_that_mean_nothing_are_passed_over(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "points.jsonl"
    path.write_bytes(line + b"\n")
    assert len(Points(path)) == 0


def test_a_file_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    points = Points(tmp_path / "file" / "points.jsonl")
    points.put("a", result())
    assert points.trouble and points.get("a") == result()


def test_keys_name_everything() -> None:
    keys = {point_key("a", 1), point_key("a", 2), point_key("b", 1), point_key("a", [1]), point_key("a")}
    assert len(keys) == 5


class Counting:
    """A method that counts how often it codes."""

    def __init__(self, key: str, scale: float) -> None:
        self.calls, self.key, self.scale = 0, key, scale

    def prepared(self) -> Prepared:
        def run(rows: CachedRows) -> Reconstructed:
            self.calls += 1
            return Reconstructed(replace(rows, v=tuple(v * self.scale for v in rows.v)), 10)

        return Prepared(run, self.key)


def steps(engine: Any, points: Points, *methods: Counting) -> Any:
    made = {m.key: m.prepared() for m in methods}
    return p1_steps(engine, cut(ids(400), SETTINGS), made, SETTINGS, lambda *told: None, points, "engine")


def finish(generator: Any) -> Any:
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def test_only_what_is_missing_is_measured(lab: Any, tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    engine = lab.make_engine("paged:page_size=16", pool=512, context=128)
    one, two = Counting("one", 0.5), Counting("two", 0.9)
    stopped = steps(engine, Points(path), one, two)
    while one.calls < 2:
        next(stopped)
    stopped.close()  # killed in the second window, before its first point is whole
    assert len(Points(path)) == 2 and engine.kv.pools[0].used == 0
    again = [Counting("one", 0.5), Counting("two", 0.9)]
    found = finish(steps(engine, Points(path), *again))
    assert [m.calls for m in again] == [2, 2]
    whole = finish(
        steps(engine, Points(tmp_path / "other.jsonl"), Counting("one", 0.5), Counting("two", 0.9))
    )
    assert found == whole
    third = Counting("one", 0.5), Counting("three", 0.1)
    assert finish(steps(engine, Points(path), *third))["one"] == whole["one"]
    assert [m.calls for m in third] == [0, 3]


def test_a_cancelled_sweep_keeps_what_it_had(open_session: Any, tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    session = open_session()
    names = {t: method(t) for t in ("kv_int8", "kv_fp8")}
    settings = replace(SETTINGS, windows=20)
    job = submit_p1(session, names, ids=ids(2000), settings=settings, points=Points(path))
    while not path.exists() and not job.ended:
        job.wait(0.002)
    job.cancel()
    assert job.wait(WAIT)
    kept = len(Points(path))
    assert kept >= 1
    found = submit_p1(session, names, ids=ids(2000), settings=settings, points=Points(path)).result(WAIT)
    assert all(len(r.results) == 20 for r in found.values()) and len(Points(path)) == 40
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) == 40
    with pytest.raises(Cancelled):
        job.result()


def test_another_engine_has_other_points(open_session: Any, tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    for dtype in ("float32", "float64"):
        session = open_session(dtype=dtype)
        job = submit_p1(
            session, {"kv_int8": method("kv_int8")}, ids=ids(400), settings=SETTINGS, points=Points(path)
        )
        job.result(WAIT)
    assert len(Points(path)) == 6


def test_numbers_of_a_method_are_those_of_its_windows() -> None:
    from workbench.core.kv_result import MethodResult

    made = MethodResult([result(0.1), result(0.3)], shared=1000, parameters=5000)
    values = {m.name: m for m in made.metrics()}
    assert values["codec_ratio"].value == 180 / 80 and values["whole_ratio"].value == 2
    assert values["kl"].spread == (0.1, 0.3) and values["kl"].value == pytest.approx(0.2)
    assert values["artefact_share"].value == 10 and values["break_even"].value == pytest.approx(
        1000 * 14 * 0.9 / 100
    )
    assert values["encode_rate"].value == pytest.approx(90 / 0.25 / 1e6) and "decode_rate" not in values
    assert all(m.tag == "measured" for m in values.values())
