"""Training heads: resumed runs end with the same bits, losses are what they say, heads work."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from workbench.cli.main import main
from workbench.core.session import Session
from workbench.models.coded_head import decoded
from workbench.models.heads import find_head
from workbench.spec.errors import Cancelled, HeadMismatch, OptionError, StorageError
from workbench.spec.recipe import Recipe
from workbench.training.errors import CheckpointMismatch, TrainingError
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.evaluate import Ranks, rank
from workbench.training.heads.losses import LATE, cross_entropy, divergence, loss_of, rejection
from workbench.training.heads.medusa import MedusaHeads, Shape
from workbench.training.heads.optimise import Schedule, optimise
from workbench.training.heads.rows import Rows
from workbench.training.heads.run import summary
from workbench.training.heads.train import train_medusa

SHAPE = Shape(heads=2, rank=4)


def toy(seed: int = 0) -> tuple[MedusaHeads, Callable]:
    """A head and a loss that depends on the conversations of a step."""
    gen = torch.Generator().manual_seed(seed)
    data = torch.randn(7, 6, generator=gen)
    wanted = torch.randn(7, 2, 6, generator=gen)
    model = MedusaHeads(SHAPE, 6)

    def loss(numbers, share):
        return (model(data[numbers]) - wanted[numbers]).square().mean() * (1 + share), len(numbers)

    return model, loss


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stops", [(3,), (1, 8, 9)])
def test_a_resumed_run_equals_one_that_was_never_stopped_bit_for_bit(tmp_path, stops):
    schedule = Schedule(steps=12, batch=3, save_every=5, look_every=4)
    straight, loss = toy()
    done = optimise(straight, loss, 7, schedule, tmp_path / "a", "key", lambda: {})
    for before, stop in zip((0, *stops), stops, strict=False):
        model, loss = toy()
        asked = iter([False] * (stop - before) + [True])
        with pytest.raises(Cancelled, match=f"step {stop} of 12"):
            optimise(
                model, loss, 7, schedule, tmp_path / "b", "key", lambda: {}, None, lambda it=asked: next(it)
            )
    resumed, loss = toy()
    again = optimise(resumed, loss, 7, schedule, tmp_path / "b", "key", lambda: {})
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))
    assert again.curve == done.curve and again.step == 12
    assert json.loads((tmp_path / "b-curve.json").read_text()) == again.curve
    assert not any(torch.equal(a, b) for a, b in zip(weights(straight), weights(toy()[0]), strict=True))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    model, loss = toy()
    schedule = Schedule(steps=2, batch=3)
    optimise(model, loss, 7, schedule, tmp_path / "a", "key", lambda: {})
    with pytest.raises(CheckpointMismatch):
        optimise(model, loss, 7, schedule, tmp_path / "a", "other", lambda: {})


@pytest.mark.parametrize("name", ["progress.json", "model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path, name):
    model, loss = toy()
    optimise(model, loss, 7, Schedule(steps=2, batch=3), tmp_path / "a", "key", lambda: {})
    file = tmp_path / "a" / name
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(CheckpointMismatch, match="is damaged") as refused:
        optimise(model, loss, 7, Schedule(steps=4, batch=3), tmp_path / "a", "key", lambda: {})
    assert "Remove that folder" in refused.value.hint


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_one(tmp_path, monkeypatch):
    model, loss = toy()
    optimise(model, loss, 7, Schedule(steps=2, batch=3), tmp_path / "a", "key", lambda: {})
    before = (tmp_path / "a" / "progress.json").read_text()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.training.checkpoint.save_file", full)
    with pytest.raises(StorageError, match="No space left"):
        optimise(model, loss, 7, Schedule(steps=4, batch=3), tmp_path / "a", "key", lambda: {})
    assert (tmp_path / "a" / "progress.json").read_text() == before


def test_a_loss_that_is_not_finite_stops_before_it_is_kept(tmp_path):
    model, loss = toy()
    schedule = Schedule(steps=4, batch=3, save_every=1)

    def breaks(numbers, share):
        value, n = loss(numbers, share)
        return (value * math.nan if share >= 0.5 else value), n

    with pytest.raises(TrainingError, match="loss of step 3 is nan"):
        optimise(model, breaks, 7, schedule, tmp_path / "a", "key", lambda: {})
    assert all(bool(w.isfinite().all()) for w in weights(model))
    assert json.loads((tmp_path / "a" / "progress.json").read_text())["step"] == 2


def test_a_step_is_no_larger_than_the_data_and_the_memory():
    assert sorted(Schedule(batch=200).chosen(3, 7)) == list(range(7))
    for batch in (0, 257):
        with pytest.raises(OptionError, match=f"batch = {batch}"):
            Schedule(batch=batch)


def test_every_conversation_comes_once_per_pass_in_a_new_order():
    schedule = Schedule(batch=3)
    seen = [n for step in range(14) for n in schedule.chosen(step, 7)]
    passes = [seen[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(p) == list(range(7)) for p in passes)
    assert len({tuple(p) for p in passes}) > 1


def test_the_learning_rate_warms_up_and_falls():
    schedule = Schedule(steps=100, lr=1.0)
    rates = [schedule.rate(s) for s in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == rates[5] == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True) and rates[-1] == pytest.approx(0.05, abs=1e-2)


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_a_learning_rate_that_is_none_is_refused(lr):
    with pytest.raises(OptionError, match="learning rate"):
        Schedule(lr=lr)


def test_losses_are_what_they_say():
    gen = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 9, generator=gen, dtype=torch.float64)
    law = torch.randn(5, 9, generator=gen, dtype=torch.float64).softmax(-1)
    ids = torch.tensor([0, 3, 8, 1, 2])
    q = logits.exp() / logits.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(cross_entropy(logits, ids), -q[torch.arange(5), ids].log())
    torch.testing.assert_close(divergence(logits, law), (law * (law / q).log()).sum(-1))
    torch.testing.assert_close(rejection(logits, law), -torch.minimum(q, law).sum(-1).log())
    assert divergence(law.log(), law).abs().max() < 1e-12 and rejection(law.log(), law).abs().max() < 1e-12
    early, late = (loss_of("hybrid", logits, ids, law, share) for share in (LATE - 0.01, LATE))
    assert torch.equal(early, divergence(logits, law)) and torch.equal(late, rejection(logits, law))
    assert torch.equal(loss_of("ce", logits, ids, None, 0.0), cross_entropy(logits, ids))


def test_ranks_of_the_right_tokens():
    rows = [Rows.of(Conversation((0, 4, 5, 6), 1, True), torch.zeros(4, 1))]
    candidates = torch.tensor([[5, 1], [0, 6]]).expand(4, 2, 2)  # head 1 says 5 then 1, head 2 says 0 then 6
    found = rank(lambda stream: candidates, rows, 2)
    assert found.ranks.tolist() == [[0, 1], [-1, -2], [-2, -2], [-2, -2]]
    assert found.accuracy(1) == [0.5, 0.0] and found.accuracy(2) == [0.5, 1.0]
    assert found.paths(4) == ([[0], [0, 1]], [0.5, 0.5])
    assert Ranks(torch.full((2, 2), -2)).accuracy() == [0.0, 0.0]


def test_a_model_gets_a_head_that_drafts_for_it(model_folder, cache, tmp_path, small_data):
    """Data, training, tree and engine in seconds; twice the same bits; the session's output is unchanged."""
    folder = model_folder("llama")
    args = (small_data, Shape(heads=2, rank=16, vocab=256), Schedule(steps=4, batch=4))
    seen: list[float] = []
    head = train_medusa(
        folder, *args, prompts=2, progress=lambda f, what: seen.append(f), out=tmp_path / "out"
    )
    assert head.path == tmp_path / "out" / "llama" / "medusa.safetensors"
    assert seen == sorted(seen) and seen[-1] == 1.0
    kept = find_head(folder, "medusa", head.fingerprint)
    assert kept.facts == head.facts
    facts = summary(head)
    assert facts["trained"]["answer_tokens"] >= 60 and "paths" not in facts
    assert set(facts["engine"]) >= {"chain", "tree"}
    assert facts["engine"]["tree"]["tau"] >= 1
    first = kept.path.read_bytes()
    train_medusa(folder, *args, prompts=2)  # all there already: nothing but the measuring is done again
    changed = json.loads(first[8 : 8 + int.from_bytes(first[:8], "little")])["__metadata__"]
    again = find_head(folder, "medusa", head.fingerprint)
    assert {n: v for n, v in again.facts.items() if n != "trained"} == {
        n: v for n, v in json.loads(changed["facts"]).items() if n != "trained"
    }
    assert all(
        torch.equal(a, b) for a, b in zip(kept.tensors().values(), again.tensors().values(), strict=True)
    )
    asked = {"max_tokens": 12, "ignore_eos": True}
    with Session(str(folder), dtype="float64", numerics="pinned") as session:
        plain = session.generate("What is a list?", **asked)
        session.apply(Recipe.of("paged", "medusa:nodes=8")).result()
        drafted = session.generate("What is a list?", **asked)
    assert drafted.token_ids == plain.token_ids


def test_the_command_trains_and_says_what_came_of_it(model_folder, cache, capsys):
    options = [
        "--tokens",
        "40",
        "--questions",
        "3",
        "--steps",
        "2",
        "--batch",
        "2",
        "--vocab",
        "64",
        "--heads",
        "2",
    ]
    command = ["train", "medusa", "--target", str(model_folder("qwen3")), "--foreground", *options]
    assert main([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert Path(made["file"]).is_file() and made["heads"] == 2
    assert main(command) == 0
    assert "written to" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--lr", "nan"], ["--target", "no-such-model"], ["--steps", "0"]])
def test_the_command_refuses_what_cannot_be(options, cache, capsys):
    assert main(["train", "medusa", "--target", "tiny", "--foreground", *options, "--json"]) != 0
    assert json.loads(capsys.readouterr().out)["error"]


def test_heads_may_go_on_from_others(model_folder, target, cache, small_data):
    folder = model_folder("llama")
    schedule = Schedule(steps=2, batch=3, lr=1e-3)
    first = train_medusa(folder, small_data, SHAPE, schedule, prompts=0, target=target)
    kept = cache / "first.safetensors"
    kept.write_bytes(first.path.read_bytes())
    begun = first.tensors()
    still = Schedule(steps=1, batch=3, lr=1e-12)
    again = train_medusa(folder, small_data, SHAPE, still, prompts=0, target=target, start=kept)
    for name in ("down", "up"):
        torch.testing.assert_close(again.tensors()[name], begun[name])
    assert again.facts["before"]["trained"] == first.facts["trained"]
    anew = train_medusa(folder, small_data, SHAPE, still, prompts=0, target=target)
    assert "before" not in anew.facts and not torch.equal(anew.tensors()["up"], begun["up"])
    for shape in (Shape(heads=3, rank=4), Shape(heads=2, rank=8)):
        with pytest.raises(HeadMismatch, match=f"no {shape.heads} Medusa heads"):
            train_medusa(folder, small_data, shape, still, prompts=0, target=target, start=kept)


def test_heads_may_have_rows_of_their_own(model_folder, target, cache, small_data):
    """They begin as the model's, learn, are stored in eight bits, and are gone on from."""
    folder = model_folder("llama")
    still, moved = (Schedule(steps=2, batch=3, lr=lr) for lr in (1e-12, 1e-2))
    shape = Shape(heads=2, rank=4, vocab=24, own_rows=True)
    first = train_medusa(folder, small_data, shape, still, prompts=1, target=target)
    stored = first.tensors()
    rows = decoded(stored)["rows"]
    assert stored["rows"].dtype == torch.int8 and len(stored["ids"]) == first.facts["own_rows"] <= 24
    matrix = target.source.tensor("model.embed_tokens.weight")[stored["ids"].long()].float()
    torch.testing.assert_close(
        rows, matrix.expand(2, -1, -1), rtol=0.01, atol=0.01 * float(matrix.abs().max())
    )
    assert first.facts["engine"]["tree"]["tau"] >= 1
    kept = cache / "first.safetensors"
    kept.write_bytes(first.path.read_bytes())
    again = train_medusa(folder, small_data, shape, still, prompts=0, target=target, start=kept)
    torch.testing.assert_close(decoded(again.tensors())["rows"], rows, rtol=0.01, atol=1e-6)
    learnt = train_medusa(folder, small_data, shape, moved, prompts=0, target=target, start=kept)
    assert (decoded(learnt.tensors())["rows"] - rows).abs().max() > 1e-3
    with pytest.raises(HeadMismatch, match="no 2 Medusa heads"):
        train_medusa(folder, small_data, Shape(heads=2, rank=4), still, prompts=0, target=target, start=kept)
