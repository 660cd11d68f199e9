"""The shipped model with multi-token prediction: complete, what its manifest says, and good for drafting."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open

from workbench.engine.params import SamplingParams
from workbench.models.registry import open_source, resolve
from workbench.training.heads.evaluate import in_engine
from workbench.training.heads.target import open_target

DATA = Path(__file__).resolve().parents[3] / "data"
FOLDER = DATA / "models/tiny-mtp"
MANIFEST = json.loads((FOLDER / "MANIFEST.json").read_text())
FLOOR = 0.70
"""Least share of first drafted tokens accepted, greedy, on continuations of held-out code."""


def code(parts: int) -> list[str]:
    """Starts of held-out modules."""
    known = json.loads((DATA / "text/MANIFEST.json").read_text())["parts"]
    raw = (DATA / "text/eval.txt").read_bytes()
    found = [p for p in known if p["document"].startswith("stdlib/")][:parts]
    return [raw[p["start"] : p["start"] + p["bytes"]].decode()[:600] for p in found]


def test_the_folder_is_complete_small_and_matches_its_hash() -> None:
    weights = (FOLDER / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == MANIFEST["weights_sha256"]
    assert len(weights) <= 10_000_000
    assert f"perplexity {MANIFEST['score']['perplexity']:.2f}" in (FOLDER / "README.md").read_text("utf-8")
    assert len((FOLDER / "curve.csv").read_text().splitlines()) >= 10
    assert resolve("tiny-mtp") == FOLDER


def test_weights_are_bfloat16_and_finite() -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            assert tensor.dtype == torch.bfloat16 and bool(torch.isfinite(tensor).all())


def test_it_has_the_layout_of_deepseek_and_repeats_nothing() -> None:
    source = open_source("tiny-mtp")
    own = {n.removeprefix("model.layers.4.") for n in source.names() if n.startswith("model.layers.4.")}
    assert source.config.num_layers == 4 and source.config.mtp_modules == 1
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < own
    assert len(own) == 13 and not any("embed" in n or n.endswith("head.head.weight") for n in own)
    assert tuple(source.tensor("model.layers.4.eh_proj.weight").shape) == (256, 512)


def test_what_was_measured_holds_the_bars() -> None:
    found = MANIFEST["acceptance"]
    assert found["recursive"]["greedy"]["1"]["survival"][0] >= FLOOR
    for k in ("2", "3", "4"):
        assert found["recursive"]["greedy"][k]["tau"] > found["joint"]["greedy"][k]["tau"]
        assert found["recursive"]["sampled"][k]["tau"] > found["joint"]["sampled"][k]["tau"]
    for variant in found.values():
        assert variant["sampled"]["1"]["tau"] > variant["likeliest"]["1"]["tau"], "R2 beats R3 here"
    for point in MANIFEST["twin"]["points"]:
        assert point["with"] <= 1.01 * point["without"] or point["step"] < 300


def test_acceptance_falls_with_the_entropy_of_the_model() -> None:
    rows = MANIFEST["entropy"]
    assert len(rows) >= 5
    for name in ("r3", "same"):
        values = [row[name] for row in rows]
        assert values == sorted(values, reverse=True)


def test_the_engine_accepts_its_drafts_and_says_what_it_says_without() -> None:
    target = open_target("tiny-mtp", dtype="float32")
    prompts = [target.tokenizer.encode(text)[:100] for text in code(6)]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    with torch.inference_mode():
        _, plain = in_engine(target, None, prompts, params)
        facts, drafted = in_engine(target, "mtp:k=1", prompts, params)
    assert facts["survival"][0] >= FLOOR - 0.1  # fewer tokens than the manifest's
    agree = sum(a == b for a, b in zip(plain, drafted, strict=True))
    assert agree >= len(prompts) - 1  # a tie may fall the other way where kernels differ by row count


def test_in_float64_and_pinned_its_output_is_bit_for_bit_the_models() -> None:
    target = open_target("tiny-mtp", dtype="float64", numerics="pinned")
    prompts = [target.tokenizer.encode(text)[:60] for text in code(3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with torch.inference_mode():
        _, plain = in_engine(target, None, prompts, params)
        for use in ("mtp:k=1", "mtp:k=4"):
            facts, drafted = in_engine(target, use, prompts, params)
            assert drafted == plain and facts["tau"] > 1.3
