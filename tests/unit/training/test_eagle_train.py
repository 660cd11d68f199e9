"""EAGLE heads from data to file: learnt what there is to learn, resumed bit for bit, written as agreed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from workbench.cli.main import main
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.models.decoder import Decoder
from workbench.models.heads import find_head
from workbench.spec.errors import Cancelled, HeadMismatch
from workbench.spec.recipe import Recipe
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.drafted import drafted
from workbench.training.heads.drafter import Drafter, Form, Kind, layers_read
from workbench.training.heads.eagle import EagleLoss, EagleShape
from workbench.training.heads.initial import initial
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.rows import Shown
from workbench.training.heads.target import open_target
from workbench.training.heads.train_eagle import train_eagle

SHAPE = EagleShape(steps=3, vocab=200)
KINDS = get_args(Kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slip", [False, True])
def test_a_rule_of_the_newest_token_is_learnt_in_its_own_row_and_in_no_other(kind, slip, lab):
    """The model says π(x) behind x, and x comes from nowhere: only a row that reads x itself can know it.

    Shown the token before instead (``slip``), a head is hardly ever right.
    """
    source = lab.random_source("llama")
    config = source.config
    facts = ModelFacts("random", config, source.fingerprint)
    made = require(plan(Recipe.of("paged"), facts, dtype="float32", numerics="fast"))
    weights = build_weights(made, source)
    decoder, words = Decoder(config, weights), 16
    matrix = source.tensor("model.embed_tokens.weight").float()
    gen = torch.Generator().manual_seed(5)
    rule = torch.randperm(words, generator=gen)

    def talk(n: int) -> Shown:
        ids = torch.randint(words, (n,), generator=gen)
        # A stream that the vocabulary matrix turns into the next token, behind the gain of the last norm.
        says = torch.linalg.pinv(matrix[:words]).T[rule[ids]] / weights.final_gain
        own = [says] * (4 if kind == "eagle3" else 1)
        said = torch.cat((ids[:1], ids[:-1])) if slip else ids
        conversation = Conversation(tuple(said.tolist()), 3, True)
        return Shown(conversation, tuple(own), rule[ids].to(torch.int32))

    trained, held = [talk(24) for _ in range(72)], [talk(24) for _ in range(8)]
    form = Form.of(kind, config)
    model = Drafter(form, initial(form, source, weights, trained, 0))
    loss = EagleLoss(
        model, EagleShape(steps=2, vocab=words, loss="kl"), decoder, matrix, torch.arange(words), trained
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    schedule = Schedule(steps=140, batch=12, lr=6e-3)
    for step in range(140):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        value, _ = loss(schedule.chosen(step, len(trained)), 0.0)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    found = drafted(loss, held, 2)
    if slip:
        assert found["full"][0] < 0.3
    else:
        assert found["full"][0] > 0.97
        assert found["conditional"][1] > 0.9 or kind == "eagle"
        assert found["chain"] == pytest.approx(1 + sum(found["full"]), abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_training_ends_with_the_same_bits(kind, model_folder, target, cache, small_data):
    folder = model_folder("llama")
    schedule = Schedule(steps=5, batch=3, save_every=2, look_every=3, lr=1e-3)
    straight = train_eagle(kind, folder, small_data, SHAPE, schedule, prompts=0, target=target)
    whole, first = straight.tensors(), straight.facts
    (run,) = (p for p in (cache / "training").rglob(f"{kind}-*") if p.is_dir())
    run.rename(run.with_name("other"))
    steps: list[str] = []
    with pytest.raises(Cancelled, match="step 3 of 5"):
        train_eagle(
            kind,
            folder,
            small_data,
            SHAPE,
            schedule,
            prompts=0,
            target=target,
            progress=lambda f, what: steps.append(what),
            cancel=lambda: bool(steps) and steps[-1].startswith("step 3"),
        )
    again = train_eagle(kind, folder, small_data, SHAPE, schedule, prompts=0, target=target)
    assert all(torch.equal(again.tensors()[n], t) for n, t in whole.items())
    assert again.facts["curve"] == first["curve"] and again.facts["held_out"] == first["held_out"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_what_the_engine_reads(kind, model_folder, target, cache, tmp_path, small_data):
    folder = model_folder("llama")
    made = train_eagle(
        kind,
        folder,
        small_data,
        SHAPE,
        Schedule(steps=2, batch=3),
        prompts=2,
        target=target,
        out=tmp_path / "out",
    )
    assert made.path == tmp_path / "out" / "llama" / f"{kind}.safetensors"
    assert find_head(folder, kind, made.fingerprint).tensors().keys() == made.tensors().keys()
    tensors, facts = made.tensors(), made.facts
    hidden, inner, q, kv = 64, 96, 128, 64
    read = 2 * hidden if kind == "eagle3" else hidden
    layer = {
        "self_attn.q_proj.weight": (q, read),
        "self_attn.k_proj.weight": (kv, read),
        "self_attn.v_proj.weight": (kv, read),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    own: dict[str, tuple[int, ...]] = {"fuse.weight": (hidden, 2 * hidden), "fuse.bias": (hidden,)}
    if kind == "eagle3":
        layer |= {"embed_norm.weight": (hidden,), "state_norm.weight": (hidden,)}
        own = {"fuse.weight": (hidden, 3 * hidden), "fuse.norms": (3, hidden), "norm.weight": (hidden,)}
    expected = own | {f"layers.0.{n}": shape for n, shape in layer.items()}
    ids = tensors.pop("ids")
    assert {n: tuple(t.shape) for n, t in tensors.items()} == expected
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert ids.dtype == torch.int32 and len(ids.unique()) == len(ids)
    assert made.kind == kind and facts["features"] == list(layers_read(kind, 2)) and facts["layers"] == 1
    assert facts["vocab"] == min(200, len(ids)) and facts["curve"][-1]["step"] == 2
    held = facts["held_out"]
    assert len(held["full"]) == len(held["alpha"]) == 5 and all(0 <= a <= 1 for a in held["alpha"])
    assert held["full"] == sorted(held["full"], reverse=True)
    runs = facts["engine"]
    assert {"chain", "tree"} < set(runs) and all(r["tau"] >= 1 for r in runs.values())


def test_a_head_may_go_on_from_another(model_folder, target, cache, small_data):
    folder = model_folder("llama")
    schedule = Schedule(steps=2, batch=3, lr=1e-3)
    first = train_eagle("eagle3", folder, small_data, SHAPE, schedule, prompts=0, target=target)
    kept = cache / "first.safetensors"
    kept.write_bytes(first.path.read_bytes())
    begun = first.tensors()
    more = train_eagle(
        "eagle3",
        folder,
        replace(small_data, tokens=120),
        SHAPE,
        schedule,
        start=kept,
        prompts=0,
        target=target,
    )
    assert more.facts["before"]["curve"] == first.facts["curve"]
    moved = max(float((a - begun[n]).abs().max()) for n, a in more.tensors().items() if n != "ids")
    assert 0 < moved < 0.1
    with pytest.raises(HeadMismatch, match="no eagle head"):
        train_eagle("eagle", folder, small_data, SHAPE, schedule, start=kept, prompts=0, target=target)
    other = open_target(model_folder("qwen3"), dtype="float32", numerics="pinned")
    with pytest.raises(HeadMismatch, match="no eagle3 head"):
        train_eagle(
            "eagle3", model_folder("qwen3"), small_data, SHAPE, schedule, start=kept, prompts=0, target=other
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_trains_and_says_what_came_of_it(kind, model_folder, cache, capsys):
    command = ["train", kind, "--target", str(model_folder("qwen2")), "--foreground", "--tokens", "40"]
    command += ["--questions", "3", "--steps", "2", "--batch", "2", "--vocab", "64", "--unroll", "2"]
    assert main([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert Path(made["file"]).is_file() and made["features"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "drafted token" in said and "written to" in said
