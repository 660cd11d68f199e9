"""Draft models: layers in training are the engine's, from data to file, resumed bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.cli.main import main
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.core.session import Session
from workbench.models.coded_head import decoded
from workbench.models.decoder import Decoder
from workbench.models.heads import find_head
from workbench.spec.errors import Cancelled, HeadMismatch, OptionError, UnsupportedModel
from workbench.spec.recipe import Recipe
from workbench.speculative.distilled import kept_config
from workbench.training.heads.capture import capture
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.pruned import Pruned, layer_tensors
from workbench.training.heads.rows import Shown
from workbench.training.heads.target import open_target
from workbench.training.heads.train_draft import DraftShape, train_draft
from workbench.training.heads.unroll import Batch

SHAPE = DraftShape(layers=1, vocab=200)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_layers_in_training_compute_what_the_engine_computes(family, lab):
    """Biases, norms of heads, sandwich norms and windows (conversations are longer than one) included."""
    source = lab.random_source(family)
    config = source.config
    facts = ModelFacts("random", config, source.fingerprint)
    made = require(plan(Recipe.of("paged"), facts, dtype="float32", numerics="fast"))
    decoder = Decoder(config, build_weights(made, source))
    texts = [t for t in lab.prompts_of(5, seed=3, low=30, high=60) if len(t) > 30]
    op = lab.make_engine("paged", family=family, dtype="float32").executor.op
    layers = config.num_layers
    shown = [
        Shown(Conversation(tuple(text), 4 + i, True), tuple(streams))
        for i, (text, streams) in enumerate(zip(texts, capture(decoder, op, texts, (layers,)), strict=True))
    ]
    batch = Batch.of(shown)
    model = Pruned(config, layer_tensors(source, range(layers)))
    with torch.no_grad():
        found = model(decoder.embed(batch.ids), batch)
        expected = decoder.final_norm(batch.last(torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    loss = model(decoder.embed(batch.ids), batch).square().sum()
    loss.backward()
    # Gemma's windows leave nothing without a gradient either.
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_some_layers_are_those_layers(lab):
    source = lab.random_source("gemma3")
    kept = (0, 3)
    config = kept_config(source.config, kept)
    assert config.layer_types == ("sliding_attention", "full_attention")
    tensors = layer_tensors(source, kept)
    name = "self_attn.q_proj.weight"
    assert torch.equal(tensors[f"model.layers.1.{name}"], source.tensor(f"model.layers.3.{name}"))
    assert not any(n.startswith("model.layers.2.") or "embed" in n for n in tensors)
    with pytest.raises(UnsupportedModel, match="cap their attention scores"):
        Pruned(replace(config, attn_softcap=30.0), tensors)


@pytest.mark.parametrize(
    "layers, total, begun", [(6, 30, (0, 1, 2, 3, 4, 29)), (2, 6, (0, 5)), (1, 2, (0,)), (3, 4, (0, 1, 3))]
)
def test_it_starts_as_layers_of_the_target(layers, total, begun):
    assert DraftShape(layers=layers).begun(total) == begun


@pytest.mark.parametrize("layers", [0, 2, 9])
def test_a_draft_model_has_fewer_layers_than_its_target(layers):
    with pytest.raises(OptionError, match=f"of {layers} layers"):
        DraftShape(layers=layers).begun(2)


def test_a_stopped_training_ends_with_the_same_bits(model_folder, target, cache, small_data):
    folder = model_folder("llama")
    schedule = Schedule(steps=5, batch=3, save_every=2, look_every=3, lr=1e-3)
    straight = train_draft(folder, small_data, SHAPE, schedule, prompts=0, target=target)
    whole, first = straight.tensors(), straight.facts
    (run,) = (p for p in (cache / "training").rglob("draft-*") if p.is_dir())
    run.rename(run.with_name("other"))
    steps: list[str] = []
    with pytest.raises(Cancelled, match="step 3 of 5"):
        train_draft(
            folder,
            small_data,
            SHAPE,
            schedule,
            prompts=0,
            target=target,
            progress=lambda f, what: steps.append(what),
            cancel=lambda: bool(steps) and steps[-1].startswith("step 3"),
        )
    again = train_draft(folder, small_data, SHAPE, schedule, prompts=0, target=target)
    assert all(torch.equal(again.tensors()[n], t) for n, t in whole.items())
    assert again.facts["curve"] == first["curve"] and again.facts["held_out"] == first["held_out"]


def test_it_learns_and_the_engine_drafts_with_what_was_written(
    model_folder, target, cache, tmp_path, small_data
):
    folder = model_folder("llama")
    schedule = Schedule(steps=16, batch=6, lr=2e-3, look_every=4)
    made = train_draft(folder, small_data, SHAPE, schedule, prompts=2, target=target, out=tmp_path)
    assert made.path == tmp_path / "llama" / "draft.safetensors"
    facts, tensors = made.facts, made.tensors()
    assert (made.kind, facts["begun"], facts["layers"]) == ("draft", [0], 1)
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert not any("embed" in name for name in tensors)
    curve = facts["curve"]
    assert curve[-1]["step"] == 16 and curve[-1]["loss"] < curve[0]["loss"] / 2
    assert curve[-1]["alpha"] > curve[0]["alpha"]
    held = facts["held_out"]
    assert held["alpha"][0] == pytest.approx(curve[-1]["alpha"], abs=0.01)  # rounding costs next to nothing
    runs = facts["engine"]
    assert set(runs) == {"chain", "chain, temperature 1", "chain of likeliest, temperature 1"}
    assert runs["chain"]["same_output"] == runs["chain"]["prompts"] == 2
    assert 0 < runs["chain, temperature 1"]["alpha"] <= 1
    kept = find_head(folder, "draft", made.fingerprint)
    asked = {"max_tokens": 12, "ignore_eos": True}
    with Session(str(folder), dtype="float64", numerics="pinned") as session:
        plain = session.generate("What is a list?", **asked)
        session.apply(Recipe.of("paged", "draft_model:source=trained,k=3")).result()
        drafted = session.generate("What is a list?", **asked)
        session.apply(Recipe.of("paged", "draft_model")).result()  # finds it by itself
        found = session.generate("What is a list?", **asked)
    assert drafted.token_ids == plain.token_ids == found.token_ids
    assert drafted.acceptance["steps"] and found.acceptance["drafted"]
    assert kept.facts == made.facts


def test_a_draft_model_may_go_on_from_another(model_folder, target, cache, small_data):
    folder = model_folder("llama")
    schedule = Schedule(steps=2, batch=3, lr=1e-3)
    first = train_draft(folder, small_data, SHAPE, schedule, prompts=0, target=target)
    kept = cache / "first.safetensors"
    kept.write_bytes(first.path.read_bytes())
    begun = decoded(first.tensors())
    more = train_draft(folder, small_data, SHAPE, schedule, start=kept, prompts=0, target=target)
    assert more.facts["before"]["curve"] == first.facts["curve"]
    moved = max(float((a - begun[n]).abs().max()) for n, a in decoded(more.tensors()).items() if n != "ids")
    assert 0 < moved < 0.1
    other = open_target(model_folder("qwen3"), dtype="float32", numerics="pinned")
    with pytest.raises(HeadMismatch, match="no draft model of 1 layers"):
        train_draft(model_folder("qwen3"), small_data, SHAPE, schedule, start=kept, prompts=0, target=other)


def test_the_command_trains_and_says_what_came_of_it(model_folder, cache, capsys):
    command = ["train", "draft", "--target", str(model_folder("qwen2")), "--foreground", "--tokens", "40"]
    command += ["--questions", "3", "--steps", "2", "--batch", "2", "--vocab", "64", "--layers", "1"]
    assert main([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert Path(made["file"]).is_file() and made["begun"] == [0]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "drafted token" in said and "written to" in said
    assert main([*command[:-1], "2", "--json"]) == 2
