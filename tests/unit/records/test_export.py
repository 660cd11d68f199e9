"""Files: whole or not at all, the same run when read back, and a report that is safe and complete."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from workbench.records import export
from workbench.records.export import export_html, export_json, import_json
from workbench.spec.errors import RecordError
from workbench.spec.run import Metric, Run

Make = Callable[..., Run]
EVIL = "</div><script>alert('x')</script><img src=http://a.b/c onerror=e>"


class Tags(HTMLParser):
    """Collects tags with their attributes, and checks that they close."""

    VOID = frozenset({"meta", "br", "img", "rect", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def test_json_reads_back(make_run: Make, tmp_path: Path) -> None:
    runs = [make_run("a" * 32), make_run("b" * 32)]
    assert import_json(export_json(runs, tmp_path / "many.json")) == runs
    assert import_json(export_json(runs[0], tmp_path / "new" / "one.json")) == runs[:1]


def test_a_missing_or_oversized_file_is_named(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecordError, match=r"none\.json"):
        import_json(tmp_path / "none.json")
    path = export_json(make_run(), tmp_path / "a.json")
    monkeypatch.setattr(export, "MAX_BYTES", 10)
    with pytest.raises(RecordError, match="at most 10"):
        import_json(path)


def test_a_failed_write_leaves_the_old_file(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.html"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.os, "replace", fail)
    with pytest.raises(RecordError, match="No space"):
        export_html(make_run(), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        export_html([], tmp_path / "a.html")


def test_one_run_gives_a_full_report(make_run: Make, tmp_path: Path) -> None:
    run = make_run()
    text = export_html(run, tmp_path / "a.html").read_text()
    for part in (
        "Numbers",
        "Memory",
        "Engine steps",
        "Acceptance",
        "Outputs",
        "Recipe",
        "Where this comes from",
    ):
        assert f"<h3>{part}" in text, part
    for metric in run.metrics:  # value, tag, unit, spread, n
        assert metric.name in text and metric.tag in text and metric.unit in text
    assert "95 – 104" in text and "predicted" in text
    assert "wb.Recipe.of(&quot;paged&quot;, &quot;kivi:bits=2&quot;)" in text
    assert all(word in text for word in ("a processor", "2.13.0", run.weight_hash, "a note", "torch-pages"))
    assert sum(run.memory.values()) == 1 << 20 | 4096 + 64 + 512 and f"{sum(run.memory.values()):,}" in text


def test_tokens_are_marked_by_source(make_run: Make, tmp_path: Path) -> None:
    text = export_html(make_run(tokens=[1, 2, 3, 4]), tmp_path / "a.html").read_text()
    for source, piece in zip(("plain", "accepted", "corrected", "bonus"), "bcde", strict=True):
        assert re.search(rf"<span class='{source}' title='token [^']*'>{piece}</span>", text)


def test_a_report_without_steps_drafts_or_outputs_is_still_one(make_run: Make, tmp_path: Path) -> None:
    bare = make_run(steps=0, outputs=[], acceptance={}, memory={}, metrics=(), provenance=None, recipe=[])
    text = export_html(bare, tmp_path / "a.html").read_text()
    assert "No numbers were measured" in text and "Engine steps" not in text
    Tags(text)


def test_numbers_that_are_not_finite_do_not_break_it(make_run: Make, tmp_path: Path) -> None:
    odd = make_run(metrics=(Metric("perplexity", float("inf"), ""), Metric("kl", float("nan"), "nats")))
    odd = replace(odd, acceptance={"steps": 1, "tau": float("nan"), "survival": [float("nan")]})
    assert "inf" in export_html(odd, tmp_path / "a.html").read_text()


def test_every_text_is_escaped_and_nothing_is_loaded(make_run: Make, tmp_path: Path) -> None:
    run = make_run(prompt=EVIL, model=EVIL, notes=[EVIL], path=[EVIL], recipe=[{"id": EVIL}])
    run.outputs[0].update(text=EVIL, pieces=[EVIL] * 4, finish=EVIL)
    run.outputs[0]["tokens"][0]["source"] = "x' onclick='e"
    run = replace(
        run, metrics=(Metric(EVIL, 1.0, EVIL, note=EVIL),), memory={EVIL: 5}, error={"message": EVIL}
    )
    text = export_html([run, run], tmp_path / "a.html", title=EVIL).read_text()
    tags = Tags(text).seen
    assert {t for t, _ in tags}.isdisjoint({"script", "img", "link", "iframe", "object"})
    for _, attributes in tags:
        assert not any(name.startswith("on") or name in ("src", "href") for name in attributes)
    assert "default-src 'none'" in text and "http://" not in text.replace("http://a.b", "")


def test_it_follows_the_readers_theme_and_closes_its_tags(make_run: Make, tmp_path: Path) -> None:
    text = export_html([make_run("a" * 32), make_run("b" * 32, steps=600)], tmp_path / "a.html").read_text()
    assert "prefers-color-scheme: dark" in text
    assert Tags(text).open == []
    assert len(text) < 400_000
