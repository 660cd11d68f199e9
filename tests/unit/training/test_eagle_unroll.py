"""Training-time test is what drafting will be: each step of it against a drafter run token by token."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.models.decoder import Decoder
from workbench.models.source import DictSource
from workbench.spec.recipe import Recipe
from workbench.training.heads.conversations import Conversation
from workbench.training.heads.distil import distilled
from workbench.training.heads.drafted import drafted
from workbench.training.heads.drafter import LAYER, Drafter, Form, Kind, layers_read
from workbench.training.heads.eagle import NOISE, EagleLoss, EagleShape, rotation
from workbench.training.heads.losses import LossName, loss_of
from workbench.training.heads.rows import Shown
from workbench.training.heads.unroll import Batch, unroll

STEPS = 4


@pytest.fixture(scope="module")
def source(lab) -> DictSource:
    return lab.random_source("llama")


@pytest.fixture(scope="module")
def decoder(source: DictSource) -> Decoder:
    facts = ModelFacts("random", source.config, source.fingerprint)
    made = require(plan(Recipe.of("paged"), facts, dtype="float64", numerics="pinned"))
    return Decoder(source.config, build_weights(made, source))


def head(kind: Kind, source: DictSource, seed: int = 1) -> Drafter:
    """A head with random parameters, nothing of which is where it begins."""
    gen = torch.Generator().manual_seed(seed)
    form = Form.of(kind, source.config)
    tensors = {
        name: torch.randn(shape, generator=gen, dtype=torch.float64) * (0.3 if len(shape) == 1 else 0.1)
        + (name.endswith("norm.weight") or name.endswith("norms"))
        for name, shape in form.shapes().items()
    }
    return Drafter(form, tensors)


def texts(kind: Kind, hidden: int, vocab: int, lengths: list[tuple[int, int]], seed: int = 2) -> list[Shown]:
    """Random conversations (length, answer) with random streams."""
    gen = torch.Generator().manual_seed(seed)
    count = 4 if kind == "eagle3" else 1
    return [
        Shown(
            Conversation(tuple(torch.randint(vocab, (n,), generator=gen).tolist()), answer, True),
            tuple(torch.randn(n, hidden, generator=gen, dtype=torch.float64) for _ in range(count)),
            torch.randint(vocab, (n,), generator=gen, dtype=torch.int32),
        )
        for n, answer in lengths
    ]


def drafted_by_hand(model: Drafter, decoder: Decoder, shown: Shown, root: int, steps: int) -> list[Tensor]:
    """What rows ``root`` … give when row ``root`` is the last with the target's states: one at a time.

    Written from the rule alone, with the parameters as they are: row s reads x_s and the state of s - 1.
    """
    form, p = model.form, model.tensors()
    eps, dim, group = form.eps, form.head_dim, form.heads // form.kv_heads
    ids = torch.tensor(shown.conversation.ids)
    angles = decoder.config.rope[0][1].theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return x / (x.square().mean() + eps).sqrt() * gain

    def turn(x: Tensor, position: int) -> Tensor:
        a, b = x.chunk(2, -1)
        c, s = (position * angles).cos(), (position * angles).sin()
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    def state(s: int) -> Tensor:
        at = [stream[s - 1] if s else stream[0] * 0 for stream in shown.streams]
        if form.kind == "eagle":
            return decoder.final_norm(at[0][None])[0]
        normed = [norm(x, gain) for x, gain in zip(at[:3], p["fuse.norms"], strict=True)]
        return p["fuse.weight"] @ torch.cat(normed)

    keys: list[Tensor] = []
    values: list[Tensor] = []

    def row(s: int, known: Tensor) -> Tensor:
        emb = decoder.embed(ids[s : s + 1])[0]
        if form.kind == "eagle":
            stream = p["fuse.weight"] @ torch.cat((emb, known)) + p["fuse.bias"]
            read = stream
        else:
            stream = known
            halves = norm(emb, p[f"{LAYER}.embed_norm.weight"]), norm(known, p[f"{LAYER}.state_norm.weight"])
            read = torch.cat(halves)
        q, k, v = ((p[f"{LAYER}.self_attn.{n}_proj.weight"] @ read).view(-1, dim) for n in "qkv")
        keys.append(turn(k, s))
        values.append(v)
        out = []
        for h, query in enumerate(turn(q, s)):
            scores = torch.stack([query @ key[h // group] for key in keys]) * form.scale
            law = scores.softmax(0)
            out.append(sum(w * value[h // group] for w, value in zip(law, values, strict=True)))
        stream = stream + p[f"{LAYER}.self_attn.o_proj.weight"] @ torch.cat(out)
        x = norm(stream, p[f"{LAYER}.post_attention_layernorm.weight"])
        gate, up = (p[f"{LAYER}.mlp.{n}_proj.weight"] @ x for n in ("gate", "up"))
        return stream + p[f"{LAYER}.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    given = [row(s, state(s)) for s in range(root + 1)][-1:]
    for j in range(1, steps):
        given.append(row(root + j, given[-1]))
    return given


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_step_is_what_a_drafter_gives_token_by_token(kind, source, decoder):
    """float64: the whole graph of a batch of three, against drafting from each root alone."""
    config = source.config
    shown = texts(kind, config.hidden_size, config.vocab_size, [(9, 3), (13, 5), (6, 2)])
    model = head(kind, source)
    loss = EagleLoss(
        model,
        EagleShape(vocab=40),
        decoder,
        source.tensor("model.embed_tokens.weight"),
        torch.arange(50),
        shown,
    )
    batch = Batch.of(shown)
    given, target = loss.run(batch, STEPS)
    n = 0
    for one in shown:
        answer, end = one.conversation.answer, len(one.conversation.ids) - 1
        for s in range(answer, end):
            torch.testing.assert_close(target[n], decoder.final_norm(one.streams[-1][s : s + 1])[0])
            for j in range(min(STEPS, s - answer + 1)):
                by_hand = drafted_by_hand(model, decoder, one, s - j, j + 1)[j]
                torch.testing.assert_close(given[j][n], by_hand, atol=1e-10, rtol=1e-9)
            n += 1
    assert n == len(target)


def test_a_row_sees_nothing_of_what_comes(source, decoder):
    """Tokens and states behind a row change nothing of it, at no step."""
    config = source.config
    (one,) = texts("eagle3", config.hidden_size, config.vocab_size, [(12, 3)])
    model, table = head("eagle3", source), rotation(decoder)

    def run(shown: Shown) -> list[Tensor]:
        batch = Batch.of([shown])
        states = model.fuse(batch.streams(torch.float64)[:3])
        return unroll(model, batch, decoder.embed(batch.ids), states, table, 3)

    cut = 8
    ids = tuple(i if s < cut else (i + 1) % config.vocab_size for s, i in enumerate(one.conversation.ids))
    streams = tuple(torch.cat((s[: cut - 1], s[cut - 1 :] + 1)) for s in one.streams)
    changed = run(Shown(Conversation(ids, 3, True), streams, one.best))
    for before, after in zip(run(one), changed, strict=True):
        assert torch.equal(before[: cut - 3], after[: cut - 3])
        assert not torch.equal(before[cut - 3], after[cut - 3])


@pytest.mark.parametrize("name", get_args(LossName))
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_loss_in_pieces_is_the_loss(name, share, monkeypatch):
    """Value and gradient of all steps, in uneven pieces, against one graph."""
    monkeypatch.setattr("workbench.training.heads.distil.ROWS", 3)
    gen = torch.Generator().manual_seed(3)
    states = [torch.randn(8, 6, generator=gen, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    targets = torch.randn(8, 6, generator=gen, dtype=torch.float64)
    matrix = torch.randn(11, 6, generator=gen, dtype=torch.float64)
    wanted = torch.randint(11, (8,), generator=gen)
    weights = torch.rand(2, 8, generator=gen, dtype=torch.float64)
    weights[:, 3:6] = 0
    found = distilled(states, targets, matrix, wanted, weights, name, share)
    law = (targets @ matrix.T).softmax(-1)
    plain = sum(
        (loss_of(name, s @ matrix.T, wanted, law, share) * w).sum()
        for s, w in zip(states, weights, strict=True)
    )
    torch.testing.assert_close(found, plain)
    for a, b in zip(
        torch.autograd.grad(3 * found, states), torch.autograd.grad(3 * plain, states), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_only_rows_that_draft_an_answer_count_and_prompts_are_context(kind, source, decoder):
    config = source.config
    shown = texts(kind, config.hidden_size, config.vocab_size, [(9, 3), (13, 5)])
    ids = torch.arange(config.vocab_size).flip(0)[:30]
    matrix = source.tensor("model.embed_tokens.weight").double()
    model = head(kind, source)
    loss = EagleLoss(model, EagleShape(vocab=24, loss="kl"), decoder, matrix, ids, shown)
    value, tokens = loss([0, 1], 0.0)
    steps = 3 if kind == "eagle3" else 1
    kept = set(ids[:24].tolist())
    batch = Batch.of(shown)
    noise = torch.Generator().manual_seed(0)
    given, target = loss.run(batch, steps, noise if kind == "eagle" else None)
    law = (target @ matrix[ids[:24]].T).softmax(-1)
    ahead = [
        s - one.conversation.answer
        for one in shown
        for s in range(one.conversation.answer, len(one.conversation.ids) - 1)
    ]
    best = [int(b) for one in shown for b in one.best[one.conversation.answer : -1]]
    total, decay, count = 0.0, 0.0, 0
    for j in range(steps):
        rows = [n for n, (a, b) in enumerate(zip(ahead, best, strict=True)) if a >= j and b in kept]
        logits = model.outlet(given[j]) @ matrix[ids[:24]].T
        each = (law * (law.log() - logits.log_softmax(-1))).sum(-1)
        total += 0.8**j * float(each[rows].mean())
        decay += 0.8**j
        count += len(rows)
    expected = total / decay
    if kind == "eagle":
        expected = 0.1 * expected + float(F.smooth_l1_loss(given[0], target))
    assert tokens == count
    assert float(value) == pytest.approx(expected, rel=1e-9)
    prompt = tuple(
        (i + 1) % config.vocab_size if s == 1 else i for s, i in enumerate(shown[0].conversation.ids)
    )
    other = Shown(Conversation(prompt, 3, True), shown[0].streams, shown[0].best)
    loss.shown = [other, shown[1]]
    assert float(loss([0, 1], 0.0)[0]) != float(value)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_states_are_noisy_in_training_and_nowhere_else(kind, source, decoder, monkeypatch):
    """EAGLE-1 learns from states with uniform noise (another in every step, the same when it is run again);
    measuring reads the states as they are, and so does the engine. EAGLE-3 learns from its own, without."""
    config = source.config
    model = head(kind, source)
    matrix = source.tensor("model.embed_tokens.weight").double()
    shown = texts(kind, config.hidden_size, config.vocab_size, [(9, 3), (7, 2)])
    shape = EagleShape(steps=2, vocab=config.vocab_size)
    loss = EagleLoss(model, shape, decoder, matrix, torch.arange(config.vocab_size), shown)
    read: list[torch.Tensor] = []

    def fused(streams):
        read.append(streams[-1].clone())
        return Drafter.fuse(model, streams)

    monkeypatch.setattr(model, "fuse", fused)
    with torch.no_grad():
        values = [float(loss([0, 1], share)[0]) for share in (0.25, 0.25, 0.5)]
        drafted(loss, shown, 2, overlap=False)
    once, again, later, measured = read
    assert torch.equal(once, again) and values[0] == values[1]
    exact = Batch.of(shown).streams(torch.float64)[0 if kind == "eagle" else 2]
    exact = decoder.final_norm(exact) if kind == "eagle" else exact
    torch.testing.assert_close(measured, exact, rtol=0, atol=1e-12)
    if kind == "eagle3":
        assert torch.equal(once, measured) and torch.equal(later, measured)
        return
    noise = once - measured
    bound = float(NOISE * measured.square().mean().sqrt())
    assert not torch.equal(once, later) and values[0] != values[2]
    assert 0.9 * bound < float(noise.abs().max()) <= bound and abs(float(noise.mean())) < bound / 5


def test_layers_of_small_and_large_models():
    assert layers_read("eagle3", 30) == (2, 15, 27) and layers_read("eagle", 30) == (30,)
    assert all(0 <= i < 2 for i in layers_read("eagle3", 2))


@pytest.mark.parametrize("steps", [0, 8])
def test_a_training_time_test_has_bounds(steps):
    from workbench.spec.errors import OptionError

    with pytest.raises(OptionError, match=f"{steps} steps"):
        EagleShape(steps=steps)
