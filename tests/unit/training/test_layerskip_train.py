"""Training for early exits: schedules as published, rows that pass layers by, exact resumption."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from workbench.training.errors import CheckpointMismatch, TrainingError
from workbench.training.layerskip.model import ExitModel, by_layer, dropped, exit_loss
from workbench.training.layerskip.schedule import (
    PLAIN,
    Recipe,
    depth_weights,
    dropout_rates,
    enabled,
    loss_weights,
)
from workbench.training.layerskip.train import train
from workbench.training.tiny import train as loop
from workbench.training.tiny.data import Windows
from workbench.training.tiny.train import Settings

TOY = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=32,
    tie_word_embeddings=True,
)
STREAM = (np.arange(4000) % 7 + np.arange(4000) % 5).astype(np.uint16)
CORPUS, HELD_OUT = Windows(STREAM, 3), Windows(STREAM, 4).batch(0, 4, 16)
SETTINGS = Settings(steps=6, batch_tokens=64, save_every_s=0.0, eval_every_steps=1)
EARLY = Recipe(dropout=0.5, ramp=False, scale=1.0)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 and 32 tokens."""
    monkeypatch.setattr(loop, "WINDOWS", ((0.0, 16), (0.5, 32)))


def trained(folder: Path, recipe: Recipe = EARLY, **rest: Any) -> Any:
    return train(SETTINGS, recipe, TOY, CORPUS, HELD_OUT, folder / "early", "corpus", **rest)


def test_dropout_rises_with_depth_and_over_a_training_from_scratch() -> None:
    steady = dropout_rates(Recipe(dropout=0.2, ramp=False), 5, 0, 100)
    expected = [0.2 * (math.exp(layer * math.log(2) / 4) - 1) for layer in range(5)]
    assert steady == pytest.approx(expected)
    assert steady[0] == 0 and steady[-1] == pytest.approx(0.2)
    ramp = Recipe(dropout=0.2)
    assert dropout_rates(ramp, 5, 0, 100) == [0] * 5
    assert dropout_rates(ramp, 5, 99, 100) == pytest.approx(steady)
    assert dropout_rates(ramp, 5, 50, 101)[-1] == pytest.approx(0.2 * (math.sqrt(2) - 1))


def test_losses_weigh_more_with_depth_and_the_last_dominates() -> None:
    assert depth_weights(4, 0.5) == pytest.approx([0.0, 0.5, 1.5, 3 + 0.5 * 3])
    weights = loss_weights(Recipe(scale=0.5, curriculum="all"), 4, 0, 10)
    assert sum(weights) == pytest.approx(1) and list(weights) == sorted(weights)
    assert loss_weights(PLAIN, 4, 3, 10) == [0, 0, 0, 1]


def test_curricula_enable_layers_in_turn() -> None:
    rotating = Recipe(curriculum="rotating", rotation=3)
    assert enabled(rotating, 5, 0, 10) == [True, False, False, True, True]
    assert enabled(rotating, 5, 4, 10) == [False, True, False, False, True]
    gradual = Recipe(curriculum="gradual")
    on = [sum(enabled(gradual, 5, step, 100)) for step in range(0, 100, 10)]
    assert on == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5]  # a layer more every T / 2L steps, from the last on
    assert enabled(gradual, 5, 10, 100) == [False, False, False, True, True]


def test_the_streams_are_the_models_own() -> None:
    model = ExitModel(TOY, 0)
    with torch.inference_mode():
        found = model.streams(HELD_OUT)
        expected = model.main(input_ids=HELD_OUT, output_hidden_states=True, use_cache=False)
        torch.testing.assert_close(model.logits(found[-1]), expected.logits)
        torch.testing.assert_close(found[0], expected.hidden_states[1])


def test_a_row_passes_its_layers_by_and_others_do_not_notice() -> None:
    model = ExitModel(TOY, 0)
    left_out = torch.zeros(3, 4, dtype=torch.bool)
    left_out[1, 2] = left_out[2, 2] = left_out[2, 0] = True
    with torch.inference_mode():
        plain, found = model.streams(HELD_OUT), model.streams(HELD_OUT, left_out)
    for layer in (1, 2):
        assert torch.equal(found[layer][2], found[0][2])
        torch.testing.assert_close(found[layer][[1, 3]], plain[layer][[1, 3]])
    assert torch.equal(found[2][0], found[1][0])
    left_out[:] = True
    with torch.inference_mode():
        assert torch.equal(model.streams(HELD_OUT, left_out)[-1], model.main.model.embed_tokens(HELD_OUT))


def test_rows_are_left_out_as_often_as_the_rates_say() -> None:
    rates = (0.0, 0.25, 0.75)
    found = torch.stack([dropped(rates, 64, step, 1) for step in range(60)]).float().mean((0, 2))
    assert found[0] == 0 and found[1:].tolist() == pytest.approx(rates[1:], abs=0.04)
    assert torch.equal(dropped(rates, 8, 3, 1), dropped(rates, 8, 3, 1))
    assert not torch.equal(dropped(rates, 8, 3, 1), dropped(rates, 8, 4, 1))


def test_the_loss_is_the_weighted_sum_and_reaches_what_it_reads() -> None:
    model = ExitModel(TOY, 0)
    single = [float(exit_loss(model, HELD_OUT, None, w).detach()) for w in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    both = float(exit_loss(model, HELD_OUT, None, (0.25, 0, 0.75)).detach())
    assert both == pytest.approx(0.25 * single[0] + 0.75 * single[2])
    exit_loss(model, HELD_OUT, None, (1, 0, 0)).backward()
    layers = model.main.model.layers
    assert layers[0].mlp.up_proj.weight.grad is not None and layers[1].mlp.up_proj.weight.grad is None
    rows = by_layer(model, HELD_OUT)
    assert [r["loss"] for r in rows] == pytest.approx(single, abs=1e-5)
    assert rows[-1]["same"] == 1 and rows[-1]["r2"] == pytest.approx(1)


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    plain, progress = trained(tmp_path / "a")
    _, half = trained(tmp_path / "b", until=3)
    assert half.step == 3
    resumed, _ = trained(tmp_path / "b")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
    assert {"held_out_loss", "same1", "same2"} <= set(progress.curve[-1])
    with pytest.raises(CheckpointMismatch):
        trained(tmp_path / "b", PLAIN)


def test_early_layers_learn_to_speak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a language that can be known, behind the first layer, against a twin without the recipe."""
    monkeypatch.setattr(loop, "WINDOWS", ((0.0, 16),))
    settings = Settings(steps=60, batch_tokens=128, eval_every_steps=60, peak_lr=2e-2)
    recipe = Recipe(dropout=0.1, scale=1.0)
    losses = {}
    for name, chosen in (("early", recipe), ("twin", PLAIN)):
        model, _ = train(settings, chosen, TOY, CORPUS, HELD_OUT, tmp_path / name, "corpus")
        losses[name] = by_layer(model, HELD_OUT)[1]
    assert losses["early"]["loss"] < losses["twin"]["loss"]
    assert losses["early"]["same"] > losses["twin"]["same"]


def test_minutes_are_no_budget_and_recipes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="follow the step"):
        train(Settings(minutes=1), EARLY, TOY, CORPUS, HELD_OUT, tmp_path, "corpus")
    with pytest.raises(TrainingError, match="dropout < 1"):
        Recipe(dropout=1.0)
