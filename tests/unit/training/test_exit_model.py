"""The shipped model that may be left early: complete, what its manifest says, and good for drafting."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from workbench.engine.params import SamplingParams
from workbench.models.registry import open_source, resolve
from workbench.training.heads.evaluate import in_engine
from workbench.training.heads.target import Target, open_target

DATA = Path(__file__).resolve().parents[3] / "data"
FOLDER = DATA / "models/tiny-exit"
MANIFEST = json.loads((FOLDER / "MANIFEST.json").read_text())
OWN = MANIFEST["exits"]["tiny-exit"]
MARGIN = 0.1
"""By how much fewer tokens may accept less often than the card says."""


def code(parts: int) -> list[str]:
    """Starts of held-out modules."""
    known = json.loads((DATA / "text/MANIFEST.json").read_text())["parts"]
    raw = (DATA / "text/eval.txt").read_bytes()
    found = [p for p in known if p["document"].startswith("stdlib/")][:parts]
    return [raw[p["start"] : p["start"] + p["bytes"]].decode()[:500] for p in found]


def test_the_folder_is_complete_small_and_matches_its_hash() -> None:
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == MANIFEST["weights_sha256"]
    assert len(weights) <= 10_000_000
    said = (FOLDER / "README.md").read_text("utf-8")
    assert f"perplexity {OWN['score']['perplexity']:.2f}" in said and MANIFEST["weights_sha256"] in said
    assert len((FOLDER / "curve.csv").read_text().splitlines()) >= 5
    assert resolve("tiny-exit") == FOLDER


def test_it_is_an_ordinary_llama_in_bfloat16() -> None:
    source = open_source("tiny-exit")
    assert (source.config.num_layers, source.config.mtp_modules) == (6, 0)
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16 and bool(torch.isfinite(tensor).all())


def test_layers_agree_with_the_last_the_more_the_deeper_they_are() -> None:
    for name in ("same", "r2"):
        values = [row[name] for row in OWN["layers"]]
        assert values == sorted(values) and values[-1] == pytest.approx(1)
    losses = [row["loss"] for row in OWN["layers"]]
    assert losses == sorted(losses, reverse=True)


@pytest.fixture(scope="module")
def pinned() -> Target:
    return open_target("tiny-exit", dtype="float64", numerics="pinned")


def test_the_engine_accepts_what_the_card_says_at_its_best_exit() -> None:
    found = OWN["acceptance"]["greedy"]
    best = max(found, key=lambda e: found[e]["tau"] / (1 + 4 * int(e) / 6))
    target = open_target("tiny-exit", dtype="float32")
    prompts = [target.tokenizer.encode(text)[:100] for text in code(6)]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    with torch.inference_mode():
        facts, _ = in_engine(target, f"layerskip:k=4,exit={best}", prompts, params)
    assert facts["rate"] >= found[best]["rate"] - MARGIN


def test_in_float64_and_pinned_its_output_is_bit_for_bit_the_models(pinned: Target) -> None:
    prompts = [pinned.tokenizer.encode(text)[:60] for text in code(3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with torch.inference_mode():
        _, plain = in_engine(pinned, None, prompts, params)
        for exit in (1, 3, 5):
            facts, drafted = in_engine(pinned, f"layerskip:k=4,exit={exit}", prompts, params)
            assert drafted == plain and facts["tau"] > 1.1
