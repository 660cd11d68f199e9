"""The training loop of the tiny model: schedule, windows, exact resumption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from workbench.training.errors import CheckpointMismatch, TrainingError
from workbench.training.tiny import train as loop
from workbench.training.tiny.data import Windows, encode_stream
from workbench.training.tiny.tokenizer import train_tokenizer
from workbench.training.tiny.train import Settings, learning_rate, train, window_length

TOY = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    intermediate_size=32,
    tie_word_embeddings=True,
)
STREAM = (np.arange(4000) % 7 + np.arange(4000) % 5).astype(np.uint16)
SETTINGS = Settings(steps=6, batch_tokens=64, save_every_s=0.0, eval_every_steps=1)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 and 32 tokens, so that a run of six steps crosses a change of length."""
    monkeypatch.setattr(loop, "WINDOWS", ((0.0, 16), (0.5, 32)))


def go(folder: Path, settings: Settings = SETTINGS, stop_at: int = 0) -> dict[str, torch.Tensor]:
    """Train the toy; with ``stop_at`` the run dies at that step, before it is saved."""

    def on_point(point: dict[str, float]) -> None:
        if point["step"] == stop_at:
            raise KeyboardInterrupt

    corpus, held_out = Windows(STREAM, 3), Windows(STREAM, 4).batch(0, 4, 16)
    model, progress = train(settings, TOY, corpus, held_out, folder / "checkpoint", "corpus", on_point)
    assert progress.step == settings.steps
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    plain = go(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "b", stop_at=4)
    resumed = go(tmp_path / "b")
    assert all(torch.equal(plain[name], resumed[name]) for name in plain)


def test_a_run_stopped_between_the_renames_still_has_its_checkpoint(tmp_path: Path) -> None:
    plain = go(tmp_path)
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")
    again = go(tmp_path)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_another_run_does_not_take_over_a_checkpoint(tmp_path: Path) -> None:
    go(tmp_path)
    with pytest.raises(CheckpointMismatch, match="other settings"):
        go(tmp_path, Settings(steps=6, batch_tokens=64, seed=1))


def test_training_learns_and_another_seed_gives_other_weights(tmp_path: Path) -> None:
    settings = Settings(steps=40, batch_tokens=128, peak_lr=1e-2, eval_every_steps=40)
    corpus, held_out = Windows(STREAM, 3), Windows(STREAM, 4).batch(0, 4, 16)
    _, progress = train(settings, TOY, corpus, held_out, tmp_path / "c", "corpus")
    assert progress.curve[-1]["held_out_loss"] < 0.8 * np.log(64)
    other, _ = loop.build(TOY, Settings(steps=1, seed=1))
    assert not torch.equal(other.lm_head.weight, loop.build(TOY, Settings(steps=1))[0].lm_head.weight)


def test_learning_rate_warms_up_then_falls_to_the_floor() -> None:
    settings = Settings(steps=10)
    rates = [learning_rate(settings, share) for share in np.linspace(0, 1, 101)]
    peak = int(np.argmax(rates))
    assert rates[0] < 0.01 * settings.peak_lr
    assert peak == round(100 * settings.warmup)
    assert all(a >= b for a, b in zip(rates[peak:], rates[peak + 1 :], strict=False))
    assert rates[-1] == pytest.approx(settings.floor_lr)


def test_window_length_follows_the_share() -> None:
    assert [window_length(share) for share in (0.0, 0.49, 0.5, 0.99)] == [16, 16, 32, 32]


@pytest.mark.parametrize("budget", [{"minutes": 0.0}, {"minutes": -1.0}, {"steps": -1}])
def test_a_run_without_a_budget_is_refused(budget: dict[str, float]) -> None:
    with pytest.raises(TrainingError, match="budget"):
        Settings(**budget)  # type: ignore[arg-type]


def test_windows_cover_the_stream_evenly() -> None:
    windows = Windows(np.arange(10_000, dtype=np.uint16), seed=5)
    starts = np.sort(windows.batch(0, 200, 50)[:, 0].numpy())
    gaps = np.diff(starts)
    assert gaps.max() <= 3 * 10_000 / 200  # a random draw leaves gaps several times as wide
    assert len({int(g) // 4 for g in gaps}) <= 4


def test_windows_do_not_depend_on_how_they_are_batched() -> None:
    windows = Windows(STREAM, seed=2)
    whole = windows.batch(0, 6, 20)
    assert torch.equal(whole, torch.cat([windows.batch(0, 2, 20), windows.batch(2, 4, 20)]))


def test_a_window_longer_than_the_corpus_is_refused() -> None:
    with pytest.raises(TrainingError, match="10 tokens"):
        Windows(np.zeros(10, np.uint16)).batch(0, 1, 11)


def test_streams_end_every_document() -> None:
    tokenizer = train_tokenizer(["some words, 1234 and some words\n"] * 3)
    stream = encode_stream(tokenizer, ["some words", "12"])
    assert stream.dtype == np.uint16
    assert np.flatnonzero(stream == 0).tolist() == [len(tokenizer.encode("some words").ids), len(stream) - 1]
