"""Medusa-2: heads first, then the model with them; another model comes of it, and it is told how far off."""

from __future__ import annotations

import pytest
import torch

from workbench.cli.main import main
from workbench.core.session import Session
from workbench.models.heads import find_head
from workbench.models.registry import open_source
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.errors import OptionError, StorageError
from workbench.spec.recipe import Recipe
from workbench.training.heads.medusa import MedusaHeads
from workbench.training.heads.medusa2 import Joint, JointLoss, JointShape
from workbench.training.heads.optimise import Schedule, optimise
from workbench.training.heads.pruned import Pruned, layer_tensors
from workbench.training.heads.train_joint import train_joint

SHAPE = JointShape(heads=2, rank=8, vocab=4096, warmup=0.5)


def test_a_model_and_its_heads_come_of_another(model_folder, target, cache, tmp_path, small_data):
    folder, made_of = tmp_path / "new-model", model_folder("llama")
    schedule = Schedule(steps=6, batch=4, lr=1e-2, look_every=3)
    path, head = train_joint(made_of, folder, small_data, SHAPE, schedule, prompts=2, target=target)
    assert path == folder
    old, new = open_source(made_of), open_source(folder)
    assert (
        new.config == old.config
        and new.fingerprint != old.fingerprint == head.facts["made_of"]["fingerprint"]
    )
    assert torch.equal(*(s.tensor("model.embed_tokens.weight") for s in (old, new)))
    assert load_tokenizer(folder).encode("a list") == load_tokenizer(made_of).encode("a list")
    first, last = head.facts["curve"]
    assert (first["divergence"], first["same"]) == (pytest.approx(0, abs=1e-5), 1.0)  # heads alone
    assert last["divergence"] > 1e-5
    assert head.facts["made_of"]["divergence"] == pytest.approx(last["divergence"], rel=0.2)
    assert head.fingerprint == new.fingerprint
    assert find_head(folder, "medusa", new.fingerprint).path == head.path
    runs = head.facts["engine"]
    assert runs["chain"]["same_output"] == runs["tree"]["same_output"] == 2  # exact for the new model
    with Session(str(folder), dtype="float64", numerics="pinned") as session:
        plain = session.generate("What is a list?", max_tokens=8, ignore_eos=True)
        session.apply(Recipe.of("paged", "medusa:nodes=4")).result()
        drafted = session.generate("What is a list?", max_tokens=8, ignore_eos=True)
    assert drafted.token_ids == plain.token_ids
    with pytest.raises(OptionError, match="is there already"):
        train_joint(made_of, folder, small_data, SHAPE, schedule, target=target)


def test_the_model_is_held_still_while_heads_warm_up_and_then_moves_slowly(lab, target, tmp_path):
    from workbench.training.heads.conversations import Conversation
    from workbench.training.heads.rows import Shown

    source, config = target.source, target.source.config
    gen = torch.Generator().manual_seed(1)

    def talk(n: int) -> Shown:
        ids = torch.randint(200, (n,), generator=gen)
        stream = torch.randn(n, config.hidden_size, generator=gen)
        return Shown(Conversation(tuple(ids.tolist()), 3, True), (stream,))

    shown = [talk(n) for n in (12, 9, 15)]
    matrix = source.tensor("model.embed_tokens.weight")
    moved = {}
    for slower in (0.1, 1.0):
        shape = JointShape(heads=2, rank=8, vocab=300, warmup=0.5, slower=slower)
        joint = Joint(
            Pruned(config, layer_tensors(source, range(config.num_layers))),
            MedusaHeads(shape.own, config.hidden_size),
        )
        begun = {n: p.detach().clone() for n, p in joint.named_parameters()}
        loss = JointLoss(joint, shape, target.decoder, matrix, torch.arange(300), shown)
        for name, share in (("warm", 0.49), ("joint", 0.5)):
            joint.zero_grad()
            loss([0, 1, 2], share)[0].backward()
            with_gradient = {n.split(".")[0] for n, p in joint.named_parameters() if p.grad is not None}
            assert with_gradient == ({"heads"} if name == "warm" else {"heads", "backbone"})
        schedule = Schedule(steps=2, batch=3, lr=1e-3, clip=1e9, decay=0.0)
        folder = tmp_path / str(slower)
        optimise(joint, loss, 3, schedule, folder, "key", lambda: {}, slower={"backbone": slower})
        change = {n: float((p.detach() - begun[n]).abs().max()) for n, p in joint.named_parameters()}
        moved[slower] = max(c for n, c in change.items() if n.startswith("backbone"))
        assert max(c for n, c in change.items() if n.startswith("heads.up")) > 1e-4
    assert moved[0.1] == pytest.approx(0.1 * moved[1.0], rel=0.05)


@pytest.mark.parametrize("name", ["share", "warmup", "slower"])
def test_shares_are_shares(name):
    with pytest.raises(OptionError, match=name):
        JointShape(**{name: 1.5})


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_trained(target, tmp_path, small_data):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        train_joint("m", tmp_path / "file" / "model", small_data, SHAPE, target=target)
    with pytest.raises(OptionError, match="there already"):
        train_joint("m", tmp_path, small_data, SHAPE, target=target)


def test_the_command_says_that_the_target_changed(model_folder, cache, tmp_path, capsys):
    folder = tmp_path / "joint"
    command = ["train", "medusa", "--target", str(model_folder("qwen3")), "--foreground", "--tokens", "40"]
    command += ["--questions", "3", "--steps", "2", "--batch", "2", "--vocab", "64", "--heads", "2"]
    assert main([*command, "--rank", "8", "--joint", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "joint is another model" in said and (folder / "config.json").is_file()
