"""FastEagle's training: what a layer learns from, and that it is what the engine then drafts with."""

from __future__ import annotations

import pytest
import torch

from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.models.decoder import Decoder
from workbench.models.heads import find_head
from workbench.spec.recipe import Recipe
from workbench.training.heads.cascade import Cascade, CascadeLoss, begin_cascade, cascade_shapes
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.drafted import drafted
from workbench.training.heads.eagle import EagleShape
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.rows import Shown
from workbench.training.heads.train_eagle import train_eagle
from workbench.training.heads.unroll import Batch

LAYERS = 3


@pytest.fixture(scope="module")
def source(lab):
    return lab.random_source("llama")


@pytest.fixture(scope="module")
def decoder(source) -> Decoder:
    facts = ModelFacts("random", source.config, source.fingerprint)
    made = require(plan(Recipe.of("paged"), facts, dtype="float64", numerics="pinned"))
    return Decoder(source.config, build_weights(made, source))


def random_tensors(source, seed: int = 1):
    gen = torch.Generator().manual_seed(seed)
    return {
        name: (name.endswith("norm.weight") or "norms" in name)
        + 0.1 * torch.randn(shape, generator=gen, dtype=torch.float64)
        for name, shape in cascade_shapes(source.config, LAYERS).items()
    }


def texts(source, lengths, seed: int = 2) -> list[Shown]:
    gen, config = torch.Generator().manual_seed(seed), source.config
    return [
        Shown(
            Conversation(tuple(torch.randint(config.vocab_size, (n,), generator=gen).tolist()), answer, True),
            tuple(torch.randn(n, config.hidden_size, generator=gen, dtype=torch.float64) for _ in range(4)),
            torch.randint(config.vocab_size, (n,), generator=gen, dtype=torch.int32),
        )
        for n, answer in lengths
    ]


def loss_on(source, decoder, shown, tensors) -> CascadeLoss:
    model = Cascade(source.config, LAYERS, tensors, None)
    matrix = source.tensor("model.embed_tokens.weight").double()
    ids = torch.arange(source.config.vocab_size)
    shape = EagleShape(steps=LAYERS, vocab=len(ids), loss="kl")
    return CascadeLoss(model, shape, decoder, matrix, ids, shown)


def test_layers_give_what_the_oracle_says_row_by_row(source, decoder, random_heads):
    """Row s reads x_s and the streams at s - 1; layer i is laid at position s + i - 1, the one it is for."""
    shown = texts(source, [(12, 4), (9, 3)])
    tensors = random_tensors(source)
    loss = loss_on(source, decoder, shown, tensors)
    with torch.no_grad():
        given, _ = loss.run(Batch.of(shown), LAYERS)
    matrix = source.tensor("model.embed_tokens.weight")
    oracle = random_heads.Oracle(
        "fasteagle", source.config, tensors, matrix, source.tensor("model.norm.weight")
    )
    n = 0
    for s in shown:
        states = oracle.fused(list(s.streams[:3]))
        states = torch.cat((torch.zeros_like(states[:1]), states))
        for place, row in enumerate(range(s.conversation.answer, len(s.conversation.ids) - 1)):
            ids = list(s.conversation.ids[: row + 1])
            for j, law in enumerate(oracle.cascade(ids, states[: row + 1])):
                later = place + j  # the answer's row whose position it is for
                if row + j < len(s.conversation.ids) - 1:
                    mine = given[j][n + later] @ matrix.double().T
                    torch.testing.assert_close(mine, law, rtol=1e-8, atol=1e-8)
        n += len(s.conversation.ids) - 1 - s.conversation.answer


def test_the_loss_of_a_layer_trains_it_and_those_before(source, decoder):
    shown = texts(source, [(14, 4)])
    loss = loss_on(source, decoder, shown, random_tensors(source))
    for j in range(LAYERS):
        given, _ = loss.run(Batch.of(shown), LAYERS)
        grads = torch.autograd.grad(given[j].square().sum(), list(loss.model.parameters()), allow_unused=True)
        reached = {
            int(name.split("_")[1]): grad is not None and bool(grad.abs().max() > 0)
            for (name, _), grad in zip(loss.model.named_parameters(), grads, strict=True)
            if name.startswith("layers_")
        }
        assert reached == {layer: layer <= j for layer in range(LAYERS)}


def test_what_comes_later_is_not_seen(source, decoder):
    shown = texts(source, [(14, 4), (10, 3)])
    loss = loss_on(source, decoder, shown, random_tensors(source))
    with torch.no_grad():
        before, _ = loss.run(Batch.of(shown), LAYERS)
        ids = shown[0].conversation.ids
        changed = Shown(
            Conversation((*ids[:9], *((t + 1) % 60 for t in ids[9:])), 4, True),
            tuple(torch.cat((s[:9], s[9:] * 2)) for s in shown[0].streams),
            shown[0].best,
        )
        after, _ = loss.run(Batch.of([changed, shown[1]]), LAYERS)
    for j in range(LAYERS):
        same = [torch.equal(a, b) for a, b in zip(before[j], after[j], strict=True)]
        first = 9 - 4 + j  # row 9 is the first that reads something else; laid j places on
        assert all(same[:first]) and not any(same[first : 14 - 1 - 4])
        assert all(same[14 - 1 - 4 + j :])


def test_rules_are_learnt_as_far_as_layers_reach(source, decoder):
    """Behind x comes x + 1: the first layer says x + 1, the second x + 2, the third x + 3."""
    words, gen = 16, torch.Generator().manual_seed(3)
    matrix = source.tensor("model.embed_tokens.weight").double()
    says = torch.linalg.pinv(matrix[:words]).T / decoder.weights.final_gain

    def talk(n: int) -> Shown:
        ids = (torch.randint(words, (1,), generator=gen) + torch.arange(n)) % words
        own = says[(ids + 1) % words]
        return Shown(Conversation(tuple(ids.tolist()), 3, True), (own,) * 4, ((ids + 1) % words).int())

    trained, held = [talk(20) for _ in range(48)], [talk(20) for _ in range(6)]
    start = begin_cascade(source.config, LAYERS, source, decoder.weights, trained, 0)
    model = Cascade(source.config, LAYERS, {n: t.double() for n, t in start.items()}, None)
    shape = EagleShape(steps=LAYERS, vocab=words, loss="kl")
    loss = CascadeLoss(model, shape, decoder, matrix, torch.arange(words), trained)
    optimizer, schedule = (
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        Schedule(steps=80, batch=12, lr=3e-3),
    )
    for step in range(80):
        optimizer.param_groups[0]["lr"] = schedule.rate(step)
        value, _ = loss(schedule.chosen(step, len(trained)), 0.0)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert min(drafted(loss, held, LAYERS)["full"]) > 0.97


def test_a_trained_cascade_drafts_in_the_engine(model_folder, target, small_data, cache):
    folder = model_folder("llama")
    made = train_eagle(
        "fasteagle",
        folder,
        small_data,
        EagleShape(steps=2, vocab=200),
        Schedule(steps=3, batch=2, save_every=10, look_every=10),
        prompts=2,
        target=target,
    )
    assert made.facts["layers"] == 2 and len(made.facts["held_out"]["full"]) == 2
    assert made.facts["engine"]["chain"]["same_output"] == made.facts["engine"]["chain"]["prompts"]
    assert find_head(folder, "fasteagle", target.source.fingerprint).path == made.path
    assert {n: tuple(t.shape) for n, t in made.tensors().items() if n != "ids"} == cascade_shapes(
        target.source.config, 2
    )
