"""Trained files that nobody insists on: used where they are, and said once where one that is there is not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.models.heads import write_head
from workbench.spec.errors import HeadMismatch, MissingHead, PlanError
from workbench.speculative.sought import Sought, sought

DRAFTERS = ("draft_model", "swiftspec:place=here", "mirror_sd:place=here")


@pytest.fixture
def heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where heads of the random model are looked for first."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    folder = tmp_path / "heads" / "random-llama"
    folder.mkdir(parents=True)
    return folder


def said(lab: ModuleType, use: str) -> list[str]:
    """What an engine says in a whole run."""
    with torch.inference_mode():
        engine = lab.make_engine("paged", use, page_size=4)
        found = lab.run_engine(engine, [[5, 9, 13]], max_tokens=6, ignore_eos=True)
    assert len(found.ids("r0")) == 6
    return [w for step in found.steps for w in step.warnings]


def spoil(path: Path, how: str) -> None:
    """Leave a file that is of no use."""
    if how == "damaged":
        path.write_bytes(b"not a head")
    else:
        write_head(path, path.stem, "0" * 64, {"begun": [0]}, {"x": torch.zeros(1)})


@pytest.mark.parametrize("use", DRAFTERS)
@pytest.mark.parametrize(
    ("how", "why"), [("damaged", "no head that can be read"), ("weights", "other weights")]
)
def test_layers_that_cannot_be_used_are_named_once_and_replaced(
    lab: ModuleType, heads: Path, use: str, how: str, why: str
) -> None:
    path = heads / "draft.safetensors"
    spoil(path, how)
    (line,) = said(lab, use)
    name = use.partition(":")[0]
    assert line.startswith(f"{name} drafts with layers of the model as they are")
    assert str(path) in line and why in line and "'workbench train draft --target random-llama'" in line
    insisted = f"{use}{',' if ':' in use else ':'}source=trained"
    with pytest.raises(PlanError, match=why):
        said(lab, insisted)


@pytest.mark.parametrize("use", DRAFTERS)
def test_layers_that_began_as_others_than_the_model_has_are_named(
    lab: ModuleType, heads: Path, use: str
) -> None:
    path = heads / "draft.safetensors"
    fingerprint = lab.random_source("llama").fingerprint
    write_head(path, "draft", fingerprint, {"begun": [9]}, {"x": torch.zeros(1)})
    (line,) = said(lab, use)
    assert str(path) in line and "began as the layers [9]" in line


@pytest.mark.parametrize(
    "use", [*DRAFTERS, "draft_model:layers=1", "draft_model:source=cut", "swiftspec:place=here,layers=1"]
)
def test_there_is_nothing_to_say_where_nothing_is_or_nothing_is_sought(
    lab: ModuleType, heads: Path, use: str
) -> None:
    if "layers" in use or "cut" in use:
        spoil(heads / "draft.safetensors", "damaged")
    assert said(lab, use) == []


@pytest.mark.parametrize(
    ("how", "why"), [("damaged", "no head that can be read"), ("weights", "other weights")]
)
def test_an_exit_adapter_that_cannot_be_used_is_named_once(
    lab: ModuleType, heads: Path, how: str, why: str
) -> None:
    path = heads / "exit_adapter.safetensors"
    spoil(path, how)
    (line,) = said(lab, "mirror_sd:place=here")
    assert line.startswith("mirror_sd foresees verdicts without a trained adapter")
    assert str(path) in line and why in line and "'workbench train exit_adapter" in line
    spoil(heads / "draft.safetensors", how)
    assert len(said(lab, "mirror_sd:place=here")) == 2


def test_what_is_sought_is_found_missing_or_in_trouble() -> None:
    def raises(error: Exception) -> Any:
        raise error

    assert sought(lambda: 3) == Sought(3) and sought(lambda: None) == Sought()
    assert sought(lambda: raises(MissingHead("none", hint="Train one."))) == Sought()
    assert sought(lambda: raises(HeadMismatch("it is bad.", hint="Delete it."))).trouble == (
        "it is bad. Delete it."
    )
    with pytest.raises(ValueError, match="else"):
        sought(lambda: raises(ValueError("else")))
