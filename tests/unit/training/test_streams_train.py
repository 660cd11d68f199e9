"""Streams in training are those that serve; the draft model beside them stays what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from workbench.cli.main import main
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.core.session import Session
from workbench.models.decoder import Decoder
from workbench.spec.errors import MissingHead, OptionError
from workbench.spec.recipe import Recipe
from workbench.speculative.placement.streams import CARRY, MARKS, StreamedKV, Streams
from workbench.training.heads.capture import capture
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.pruned import Pruned, layer_tensors
from workbench.training.heads.rows import Shown
from workbench.training.heads.stream_loss import StreamHeads, StreamLoss
from workbench.training.heads.train_draft import DraftShape, train_draft
from workbench.training.heads.train_streams import StreamShape, train_streams
from workbench.training.heads.unroll import Batch

COUNT = 2


@pytest.mark.parametrize("family, layers", [("llama", 1), ("llama", 2), ("gemma3", 3)])
def test_streams_in_training_guess_what_they_guess_when_they_serve(family, layers, lab):
    """Row by row, windows of layers (conversations are longer than one) included."""
    source = lab.random_source(family)
    config = source.config
    facts = ModelFacts("random", config, source.fingerprint)
    made = require(plan(Recipe.of("paged"), facts, dtype="float32", numerics="fast"))
    decoder = Decoder(config, build_weights(made, source))
    texts = [t for t in lab.prompts_of(4, seed=3, low=30, high=60) if len(t) > 30]
    op = lab.make_engine("paged", family=family, dtype="float32").executor.op
    total = config.num_layers
    shown = [
        Shown(Conversation(tuple(text), 4 + i, True), tuple(streams))
        for i, (text, streams) in enumerate(zip(texts, capture(decoder, op, texts, (total,)), strict=True))
    ]
    model = StreamHeads(config.hidden_size, COUNT)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    kept = torch.arange(config.vocab_size)
    draft = Pruned(config, layer_tensors(source, range(total)))
    loss = StreamLoss(model, draft, layers, decoder, source.tensor("model.embed_tokens.weight"), kept, shown)
    batch = Batch.of(shown)
    with torch.no_grad():
        guessed, own = loss.run(batch)
        said = [decoder.logits(rows).argmax(-1) for rows in (own, *guessed)]
    kv = StreamedKV(decoder, None, Streams(model.carry.detach(), model.marks.detach(), layers))
    first, compared = 0, 0
    for each in shown:
        ids = each.conversation.ids[:-1]
        slots = kv.take(len(ids))
        answer = len(ids) - each.conversation.answer
        sees = [slots[: i + 1] for i in range(len(ids))]
        with torch.inference_mode():
            fed = kv.feed(ids, range(len(ids)), slots, sees, answer)
        assert fed.logits.argmax(-1).tolist() == said[0][first : first + answer].tolist()
        for row, ahead in enumerate(fed.ahead):
            for j, token in enumerate(ahead, 1):
                if row + j < answer:
                    assert token == int(said[j][first + row + j])
                    compared += 1
        first += answer
    assert compared > 50


def test_nothing_but_the_streams_learns_and_they_do(lab):
    source = lab.random_source("llama")
    config = source.config
    facts = ModelFacts("random", config, source.fingerprint)
    made = require(plan(Recipe.of("paged"), facts, dtype="float32", numerics="fast"))
    decoder = Decoder(config, build_weights(made, source))
    texts = lab.prompts_of(6, seed=5, low=20, high=30)
    shown = [Shown(Conversation(tuple(t), 4, True), ()) for t in texts]
    model, draft = StreamHeads(config.hidden_size, COUNT), Pruned(config, layer_tensors(source, [0, 1]))
    before = {n: t.clone() for n, t in draft.tensors().items()}
    matrix = source.tensor("model.embed_tokens.weight")
    loss = StreamLoss(model, draft, 2, decoder, matrix, torch.arange(config.vocab_size), shown)
    value, counted = loss(range(6), 0.0)
    assert counted == sum(len(t) - 5 - j for t in texts for j in range(1, COUNT + 1))
    value.backward()
    assert all(bool((p.grad != 0).any()) for p in model.parameters())
    assert all(p.grad is None for p in draft.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        later, _ = loss(range(6), 0.0)
        later.backward()
        optimizer.step()
    assert float(later.detach()) < 0.8 * float(value.detach())
    assert all(torch.equal(t, before[n]) for n, t in draft.tensors().items())


def test_the_same_file_holds_draft_model_and_streams(model_folder, target, cache, small_data, tmp_path):
    folder = model_folder("llama")
    schedule = Schedule(steps=3, batch=3, lr=1e-3, save_every=2, look_every=2)
    with pytest.raises(MissingHead, match="draft"):
        train_streams(folder, small_data, StreamShape(), schedule, target=target)
    draft = train_draft(folder, small_data, DraftShape(1, 200), schedule, prompts=0, target=target)
    was, facts, bare = draft.tensors(), dict(draft.facts), draft.path.read_bytes()
    made = train_streams(
        folder, small_data, StreamShape(2, vocab=200), schedule, prompts=2, target=target, out=tmp_path
    )
    tensors = made.tensors()
    assert made.path == tmp_path / "llama" / "draft.safetensors"
    assert all(torch.equal(tensors[n], t) for n, t in was.items())
    assert {CARRY, MARKS} <= tensors.keys() - was.keys()
    streams = made.facts["streams"]
    assert {n: v for n, v in made.facts.items() if n != "streams"} == facts
    assert (streams["layers"], streams["count"], len(streams["right"])) == (1, 2, 2)
    assert streams["passes"]["0"] == 1.0 <= streams["passes"]["2"] <= 3.0
    assert [p["step"] for p in streams["curve"]] == [2, 3]
    draft.path.write_bytes(bare)
    again = train_streams(folder, small_data, StreamShape(2, vocab=200), schedule, target=target, prompts=2)
    assert all(torch.equal(again.tensors()[n], t) for n, t in tensors.items())
    asked = {"max_tokens": 12, "ignore_eos": True}
    with Session(str(folder), dtype="float64", numerics="pinned") as session:
        plain = session.generate("What is a list?", **asked)
        session.apply(Recipe.of("paged", "mirror_sd:place=here,streams=2,k=3")).result()
        assert session.generate("What is a list?", **asked).token_ids == plain.token_ids
        with pytest.raises(OptionError, match="holds 2") as caught:
            session.apply(Recipe.of("paged", "mirror_sd:place=here,streams=3")).result()
        assert "0 to 2" in caught.value.hint
        with pytest.raises(OptionError, match="cut out"):
            session.apply(Recipe.of("paged", "mirror_sd:place=here,streams=1,source=cut")).result()


@pytest.mark.parametrize("shape", [StreamShape(0), StreamShape(9), StreamShape(2, 4), StreamShape(2, -1)])
def test_impossible_streams_are_refused(shape):
    with pytest.raises(OptionError):
        shape.passed(3)


def test_the_command_shows_what_a_pass_makes(model_folder, cache, capsys: pytest.CaptureFixture[str]):
    folder = str(model_folder("llama"))
    common = ["--target", folder, "--tokens", "60", "--questions", "4", "--steps", "2", "--batch", "2"]
    common += ["--dtype", "float32", "--foreground"]
    assert main(["train", "draft", "--layers", "1", *common]) == 0
    capsys.readouterr()
    assert main(["train", "streams", "--streams", "1", *common]) == 0
    said = capsys.readouterr().out
    assert "stream 1: right in" in said and "1 streams:" in said
    assert main(["train", "streams", "--streams", "1", *common, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["streams"]["count"] == 1 and Path(found["file"]).exists()
