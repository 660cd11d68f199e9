"""An exit adapter learns what the last layer would say, and serves as it was trained."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import torch

from workbench.cli.main import main
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.spec.errors import HeadMismatch
from workbench.spec.recipe import Recipe
from workbench.speculative.placement.early_exit import ExitDecoder
from workbench.speculative.placement.trained_exit import find_exit
from workbench.speculative.placement.tree_kv import TreeKV
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.exit_adapter import ExitHead, ExitLoss
from workbench.training.heads.rows import Shown


@pytest.fixture(scope="module")
def target(lab: ModuleType) -> tuple[Decoder, torch.Tensor]:
    source = lab.random_source("llama")
    made = require(
        plan(
            Recipe(),
            ModelFacts("random", source.config, source.fingerprint),
            dtype="float32",
            numerics="fast",
        )
    )
    matrix = source.tensor("model.embed_tokens.weight").float()
    return Decoder(source.config, build_weights(made, source)), matrix


def shown(decoder: Decoder, ids: list[int], layers: tuple[int, ...]) -> Shown:
    """Streams entering layers, of real contexts."""
    kv = TreeKV(decoder)
    seen: dict[int, torch.Tensor] = {}
    forward = decoder.forward

    def spy(*args, **kwargs):
        out = forward(*args, **{**kwargs, "capture": layers})
        seen.update(out.captured)
        return out

    slots = kv.take(len(ids))
    with torch.inference_mode():
        decoder.forward = spy  # type: ignore[method-assign]
        try:
            kv.feed(ids, range(len(ids)), slots, [slots[: i + 1] for i in range(len(ids))], 1)
        finally:
            del decoder.forward
    return Shown(Conversation(tuple(ids), 3, True), tuple(seen[i].clone() for i in layers))


def test_an_adapter_learns_and_serves_what_it_learnt(target: tuple[Decoder, torch.Tensor]) -> None:
    decoder, matrix = target
    gen = torch.Generator().manual_seed(2)
    talks = [shown(decoder, torch.randint(0, 61, (40,), generator=gen).tolist(), (1, 2)) for _ in range(80)]
    trained, held = [
        [Shown(t.conversation, tuple(s.detach().clone() for s in t.streams)) for t in part]
        for part in (talks[:72], talks[72:])
    ]
    model = ExitHead(decoder.config.hidden_size, decoder.config.norm_eps)
    loss = ExitLoss(model, decoder, matrix, torch.arange(61), trained)
    unseen = ExitLoss(model, decoder, matrix, torch.arange(61), held)
    lens, everyone = loss.hits(held, (1, 8, 61)), list(range(len(held)))
    before = float(unseen(everyone, 0.0)[0].detach())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(120):
        value, rows = loss([(step * 12 + i) % len(trained) for i in range(12)], 0.0)
        assert rows == 12 * 38
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    after, learnt = float(unseen(everyone, 0.0)[0].detach()), loss.hits(held, (1, 8, 61))
    assert after < 0.8 * before
    assert learnt[8] > lens[8] and learnt[1] > lens[1]
    assert learnt[61] == lens[61] == 1.0

    ids = [4, 8, 15, 16, 23, 42]
    kv = TreeKV(ExitDecoder(decoder, 1, model.adapter()))
    slots = kv.take(len(ids))
    with torch.inference_mode():
        served = kv.feed(ids, range(6), slots, [slots[: i + 1] for i in range(6)], 6).logits
        (early, _) = shown(decoder, ids, (1, 2)).streams
        states = decoder.final_norm(model(early.to(torch.float32)))
    torch.testing.assert_close(served, states @ matrix.T, rtol=1e-4, atol=1e-4)


def test_an_untrained_adapter_is_the_logit_lens(target: tuple[Decoder, torch.Tensor]) -> None:
    decoder, _ = target
    stream = torch.randn(5, decoder.config.hidden_size, generator=torch.manual_seed(0))
    model = ExitHead(decoder.config.hidden_size, decoder.config.norm_eps)
    assert torch.equal(model(stream), stream)
    assert not model.adapter().matrix.any() and not model.adapter().gain.requires_grad


def test_the_command_makes_an_adapter_that_is_found_and_served(model_folder, cache, capsys):
    """Hits of the whole vocabulary, measured on what the file holds, beside those of the logit lens."""
    folder = model_folder("llama")
    options = ["--tokens", "60", "--questions", "4", "--batch", "2", "--vocab", "200", "--lr", "0.01"]
    command = ["train", "exit_adapter", "--target", str(folder), "--foreground", *options]
    assert main([*command, "--steps", "12", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layer"] == 1 and facts["held_out"]["lens"]["rows"] == facts["held_out"]["adapter"]["rows"]
    assert facts["held_out"]["adapter"]["kl"] < facts["held_out"]["lens"]["kl"]
    source = open_source(folder)
    found = find_exit(str(folder), source.fingerprint, source.config.num_layers)
    assert found is not None and found.layer == 1
    assert bool(found.adapter.matrix.any()) and found.adapter.matrix.dtype is torch.bfloat16
    with pytest.raises(HeadMismatch, match="does not fit"):
        find_exit(str(folder), source.fingerprint, 1)
    with pytest.raises(HeadMismatch, match="other weights"):
        find_exit(str(folder), "f" * 64, 2)
    assert find_exit("another", source.fingerprint, 2) is None
    assert main([*command, "--steps", "12"]) == 0
    shown = capsys.readouterr().out
    assert "lens" in shown and "written to" in shown
    assert main([*command, "--layer", "2", "--json"]) == 2
    assert "leaves nothing" in capsys.readouterr().out
