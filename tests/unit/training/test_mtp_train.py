"""Training with multi-token prediction: exact resumption, a frozen model, what the curves say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from workbench.training.errors import CheckpointMismatch
from workbench.training.mtp.build import compare
from workbench.training.mtp.card import card
from workbench.training.mtp.evaluate import by_entropy
from workbench.training.mtp.export import rounded
from workbench.training.mtp.model import MTPModel, recursive_loss
from workbench.training.mtp.train import Joint, Recursive, train_joint, train_recursive
from workbench.training.tiny import train as loop
from workbench.training.tiny.data import Windows
from workbench.training.tiny.train import Settings

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
CORPUS, HELD_OUT = Windows(STREAM, 3), Windows(STREAM, 4).batch(0, 4, 16)
SETTINGS = Settings(steps=6, batch_tokens=64, save_every_s=0.0, eval_every_steps=1)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 16 and 32 tokens."""
    monkeypatch.setattr(loop, "WINDOWS", ((0.0, 16), (0.5, 32)))


def dies_at(step: int) -> Any:
    def on_point(point: dict[str, float]) -> None:
        if point["step"] == step:
            raise KeyboardInterrupt

    return on_point


def jointly(folder: Path, settings: Settings = SETTINGS, joint: Joint | None = None, **rest: Any) -> Any:
    return train_joint(settings, joint or Joint(), TOY, CORPUS, HELD_OUT, folder / "joint", "corpus", **rest)


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    plain, progress = jointly(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        jointly(tmp_path / "b", on_point=dies_at(4))
    resumed, _ = jointly(tmp_path / "b")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
    assert {"held_out_loss", "mtp1_loss", "mtp1_same"} <= set(progress.curve[-1])
    with pytest.raises(CheckpointMismatch):
        jointly(tmp_path / "b", joint=Joint(modules=2))


def test_a_run_may_be_left_on_its_way_and_go_on(tmp_path: Path) -> None:
    plain, _ = jointly(tmp_path / "a")
    _, progress = jointly(tmp_path / "b", until=3)
    assert progress.step == 3
    later, progress = jointly(tmp_path / "b")
    assert progress.step == 6
    assert torch.equal(plain.main.lm_head.weight, later.main.lm_head.weight)


def test_the_weight_of_the_modules_loss_falls() -> None:
    joint = Joint()
    assert [joint.weight(s) for s in (0.0, 0.66, 0.67, 1.0)] == [0.3, 0.3, 0.1, 0.1]


def test_recursive_training_resumes_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model, _ = jointly(tmp_path)
    before = {n: p.clone() for n, p in model.state_dict().items()}

    def go(folder: Path, **rest: Any) -> MTPModel:
        copy = MTPModel(TOY, 1, 0)
        copy.load_state_dict(before)
        train_recursive(copy, SETTINGS, Recursive(), CORPUS, HELD_OUT, folder, "corpus", **rest)
        return copy

    plain = go(tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "b", on_point=dies_at(4))
    resumed = go(tmp_path / "b")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])
        assert torch.equal(value, before[name]) == name.startswith("main.")
    assert all(p.requires_grad for p in plain.parameters())


def test_recursive_training_teaches_the_later_passes(tmp_path: Path) -> None:
    settings = Settings(steps=60, batch_tokens=256, peak_lr=1e-2, eval_every_steps=30)
    model, _ = jointly(tmp_path, settings)

    def third(betas: tuple[float, ...]) -> float:
        """Divergence of the third pass from the model's law."""
        copy = MTPModel(TOY, 1, 0)
        copy.load_state_dict(model.state_dict())
        train_recursive(copy, settings, Recursive(betas), CORPUS, HELD_OUT, tmp_path / str(betas), "corpus")
        with torch.no_grad():
            passes = copy.recursion(HELD_OUT, 3)
            return float(recursive_loss(passes, HELD_OUT, (0.0, 0.0, 1.0), "kl", 0.0))

    assert third((0.51, 0.31, 0.18)) < 0.95 * third((1.0,))


def test_the_twins_losses_are_compared_where_both_have_some(tmp_path: Path) -> None:
    _, joint = jointly(tmp_path / "a")
    _, twin = jointly(tmp_path / "b", joint=Joint(modules=0), until=3)
    found = compare(joint, twin)
    assert [p["step"] for p in found["points"]] == [1, 2, 3]
    assert found["points"][0]["with"] == joint.curve[0]["held_out_loss"]
    assert not any("mtp" in name for name in twin.curve[0])


def test_acceptance_by_entropy_is_that_of_both_laws() -> None:
    model = MTPModel(TOY, 1, 0)
    (row,) = by_entropy(model, HELD_OUT, (0.0, 100.0))
    with torch.no_grad():
        passes = model.recursion(HELD_OUT, 1)
        p, q = passes.main.softmax(-1), passes.drafts[0].softmax(-1)
    assert row["rows"] == HELD_OUT.numel()
    assert row["r2"] == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-4)
    assert row["r3"] == pytest.approx(float(p.gather(-1, q.argmax(-1, keepdim=True)).mean()), abs=1e-4)
    assert row["r3"] <= row["r2"] + 1e-6 or row["r3"] <= float(p.max(-1).values.mean())


def test_weights_are_rounded_as_they_are_stored() -> None:
    model = MTPModel(TOY, 1, 0)
    for name, value in rounded(model).state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, model.state_dict()[name].to(torch.bfloat16).float())


def test_the_card_is_filled_from_the_manifest() -> None:
    mode = {"1": {"tau": 1.75, "survival": [0.75], "conditional": [0.75], "tokens": 9}}
    stage = {"steps": 10, "tokens": 20_000, "seconds": 30.0}
    manifest = {
        "parameters": 4_000_000, "module_parameters": 800_000, "note": "", "weights_sha256": "ab",
        "score": {"nats": 30.0, "tokens": 10, "bytes": 40, "perplexity": 20.1, "bits_per_byte": 1.5},
        "joint": stage, "recursive": stage, "betas": [0.51, 0.31, 0.18], "loss": "the law",
        "settings": {"batch_tokens": 2048, "peak_lr": 1e-3, "floor_lr": 1e-5, "seed": 0},
        "corpus": {"train_tokens": 2_600_000}, "lambda": {"high": 0.3, "low": 0.1, "fall": 0.67},
        "twin": {"points": [{"step": 5, "with": 4.0, "without": 4.1}]}, "sources": [], "entropy": [],
        "acceptance": {"joint": dict.fromkeys(("greedy", "sampled", "likeliest"), mode)},
        "variants": {"joint": "as it was left"},
    }  # fmt: skip
    text = card(manifest, [])
    assert "| 1 | 1.75 | 0.75 |" in text and "| 5 | 4.0000 | 4.1000 | -2.44 % |" in text
    assert "4,000,000 parameters" in text
