"""The shipped text by domain: what is scored is in no calibration, and nothing of a domain in the rest."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.core.domains import CHAT, domains, evaluation_ids, ids_without
from workbench.core.kv_domains import OTHERS, SHIPPED, domains_run, submit_domains
from workbench.core.kv_points import Points
from workbench.core.quality_windows import QualitySettings
from workbench.core.texts import shipped_documents, shipped_text
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import OptionError, RequestError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("tiny")


def test_documents_are_the_text_and_each_has_one_use() -> None:
    documents = shipped_documents()
    for use in ("evaluation", "calibration"):
        text = "".join(d.text for d in documents if d.use == use)
        assert text and text == shipped_text(use)
    assert {d.name.partition("/")[0] for d in documents} == {"docs", "stdlib", "plays", "jargon"}
    for name in ("docs", "stdlib", "plays", "jargon"):
        assert {d.use for d in documents if d.name.startswith(name)} == {"evaluation", "calibration"}


def test_a_domain_and_all_that_is_not_of_it(tokenizer: Any) -> None:
    assert domains() == ("docs", "stdlib", "plays", "jargon", CHAT)
    scored = tokenizer.decode(evaluation_ids("stdlib", tokenizer), skip_special=False)
    rest = tokenizer.decode(ids_without("stdlib", tokenizer.encode), skip_special=False)
    assert "def total_seconds" in scored or "import" in scored
    for document in shipped_documents():
        sample = document.text[200:260]
        if document.name.startswith("stdlib"):
            assert sample not in rest and (sample in scored) == (document.use == "evaluation")
        elif len(sample) == 60:
            assert sample in rest and sample not in scored
    with pytest.raises(RequestError, match="no domain"):
        evaluation_ids("poems", tokenizer)


def test_chat_has_questions_and_answers_of_documents_that_are_scored(tokenizer: Any) -> None:
    ids = evaluation_ids(CHAT, tokenizer)
    text = tokenizer.decode(ids, skip_special=False)
    assert "What does" in text and len(ids) > 1200


@pytest.mark.slow
def test_kvtc_by_domain(monkeypatch: Any, tmp_path: Any) -> None:
    from workbench.core.measure import opened

    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    settings = QualitySettings(context=256, score=16, windows=1, greedy=0)
    points = Points(tmp_path / "points.jsonl")
    with opened("tiny") as session:
        asked = {"only": ("stdlib", CHAT), "ratios": (16,), "points": points}
        found = submit_domains(session, settings, **asked).result(250)
        assert set(found) == {("stdlib", 16, SHIPPED), ("stdlib", 16, OTHERS), (CHAT, 16, SHIPPED)}
        kl = {k: next(m.value for m in r.metrics() if m.name == "kl") for k, r in found.items()}
        assert all(v > 0 for v in kl.values()) and len(set(kl.values())) == len(points) == 3
        run = domains_run(session, settings, found)
        assert run.metric(f"stdlib, kvtc 16×, {OTHERS}:kl").value == kl["stdlib", 16, OTHERS]
        with pytest.raises(OptionError, match="Cells are"):
            submit_domains(session, settings, only=("nope",))
        with pytest.raises(RequestError):
            submit_domains(session, QualitySettings(context=900, score=50_000, greedy=0))
